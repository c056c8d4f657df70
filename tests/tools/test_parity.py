"""`gpuaug parity`: what differs is found and named; what does not is called equal."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from PIL import Image

import gpuaug
from bench import photographs
from gpuaug.augment import auto
from gpuaug.augment.recipe import Augment
from gpuaug.tools.main import main
from gpuaug.tools.parity.command import summary
from gpuaug.tools.parity.compare import compare
from gpuaug.tools.parity.counterpart import calls_of, run
from gpuaug.tools.parity.differences import Difference, Parity
from gpuaug.tools.peers import torchvision


@pytest.fixture(scope="module", autouse=True)
def _torchvision(v2: object) -> None:
    """The command needs it."""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photographs.cut(tmp_path_factory.mktemp("photos"), count=60) / "train"


def measured(photos: Path, ops: dict, *, decode: Any = None, **more: Any) -> Parity:
    augment = gpuaug.Augment(ops=ops, **{"crop": gpuaug.RandomResizedCrop(48), **more})
    source = gpuaug.FolderSource(photos)
    with gpuaug.Loader(source, augment=augment, decode=decode, num_workers=0, device="cpu") as loader:
        return compare(loader, indices=range(0, 21, 7))


def stages(parity: Parity) -> dict[str, Difference]:
    return {d.stage if d.name != "everything" else d.name: d for d in parity.differences}


FOLLOWING = {
    "flip": K.RandomHorizontalFlip(p=0.5),
    "vflip": K.RandomVerticalFlip(p=0.5),
    "jitter": K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8),
    "fixed": K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8, order=(3, 1, 0, 2)),
    "hue": K.RandomHue((-0.3, 0.3), p=1.0),
    "gray": K.RandomGrayscale(p=0.2),
    "gamma": K.RandomGamma((0.5, 2.0), p=1.0),
    "solarize": K.RandomSolarize(thresholds=(0.3, 0.7), additions=(0.0, 0.0), p=1.0),
    "equalize": K.RandomEqualize(p=1.0),
    "autocontrast": K.RandomAutoContrast(p=1.0),
    "invert": K.RandomInvert(p=1.0),
    "sharpness": K.RandomSharpness((0.2, 2.5), p=1.0),
    "blur": K.RandomGaussianBlur((5, 9), (0.3, 2.0), p=1.0),
    "erase": K.RandomErasing(p=1.0),
}


@pytest.mark.parametrize("backend", ["fused", "kornia"])
@pytest.mark.parametrize("name", FOLLOWING)
def test_operations_are_torchvisions(name: str, backend: Any, photo_batch: torch.Tensor) -> None:
    augment = Augment(ops={name: FOLLOWING[name]}, backend=backend)
    for row, image in enumerate(photo_batch[:4, :64, :64]):
        (chosen,) = augment.choose(augment.draw(seed=0, epoch=0, indices=[row]), [(64, 64)])
        calls = calls_of(augment.prepared, chosen)
        assert not isinstance(calls, str)
        ours = augment.run(image[None], chosen)[0].permute(1, 2, 0) * 255
        # torchvision's weight of red is 0.2989, Kornia's 0.299
        assert np.abs(ours.numpy() - run(calls, image.numpy())).max() < 0.05


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        (K.RandomSolarize(0.1, 0.1, p=1.0), "RandomSolarize"),
        (K.RandomGaussianNoise(0.01, 0.1, p=1.0), "RandomGaussianNoise"),
        (K.RandomBrightness((0.6, 0.7), p=1.0), "RandomBrightness"),
        (torch.nn.Dropout(), "Dropout"),
        (gpuaug.AugMix(), "PillowOp"),
    ],
)
def test_what_cannot_be_compared_is_said(op: torch.nn.Module, kind: str, photos: Path) -> None:
    parity = measured(photos, {"op": op})
    assert "everything" not in stages(parity)
    assert any(f"`op`: torchvision has no {kind}" in note for note in parity.notes), parity.notes


POLICIES = {
    "torchvision": gpuaug.RandAugment(),
    "autoaugment": gpuaug.AutoAugment(),
    "timm": gpuaug.TimmAugment("rand-m9-mstd0.5-inc1"),
    "timm's AutoAugment": gpuaug.TimmAugment("original-mstd0.5"),
}


@pytest.mark.parametrize("name", POLICIES)
def test_policies_are_their_librarys(name: str, photos: Path) -> None:
    before = random.getstate(), torch.get_rng_state()
    parity = measured(photos, {"policy": POLICIES[name], "erase": gpuaug.RandomErasing(p=0.0)})
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    found = stages(parity)
    ((title, choices),) = parity.choices.items()
    assert ("timm" if "timm" in name else "torchvision") in title
    assert len(choices) >= 10
    assert [op for op, row in choices.items() if not row["equal"]] == []
    assert (found["policy"].images, found["policy"].verdict) == (3, "equal")
    assert found["everything"].verdict in ("equal", "rounding")


def test_augmix_is_compared_by_its_choices(photos: Path) -> None:
    parity = measured(photos, {"mix": gpuaug.AugMix(), "timm": gpuaug.TimmAugment("augmix-m5")})
    assert [all(row["equal"] for row in choices.values()) for choices in parity.choices.values()] == [True, True]


def test_a_planted_policy_is_seen(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One operation less, and one whose level is 20 % too strong."""
    monkeypatch.setattr(auto, "FACTORS", ("brightness", "color", "contrast"))
    names = ("identity", *auto.GEOMETRIC, "brightness", "color", "contrast", *auto._OTHERS)
    monkeypatch.setattr(auto._Space, "__init__", lambda self, real=auto._Space.__init__, **given: real(
        self, **{**given, "names": names, "shear": 0.36}))  # fmt: skip
    parity = measured(photos, {"policy": gpuaug.RandAugment(interpolation="bilinear")})
    (choices,) = parity.choices.values()
    assert not any(choices[name]["equal"] for name in ("sharpness", "shear_x", "shear_y"))
    assert choices["rotate"]["equal"]
    assert "sharpness of policy" in summary(parity)


@pytest.mark.parametrize("reduced", [False, True])
def test_crop_is_compared_with_pillow(reduced: bool, photos: Path) -> None:
    parity = measured(photos, {}, decode=gpuaug.Decode(num_threads=1, backend="pillow", reduced=reduced))
    found = stages(parity)
    assert found["decode"].verdict in ("equal", "rounding")
    assert ("reduced" in found["crop"].name) == reduced
    assert found["crop"].mean < 3.5
    assert reduced or found["crop"].verdict == "rounding"
    unscaled = measured(photos, {}, crop=gpuaug.RandomCrop(64, padding=8, fill=7))
    assert stages(unscaled)["crop"].verdict == "equal"


def test_a_wrong_resize_is_seen(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: Pillow takes the nearest pixel."""
    monkeypatch.setattr(
        Image.Image, "resize", lambda self, size, how=None, real=Image.Image.resize: real(self, size, Image.NEAREST)
    )
    parity = measured(photos, {})
    assert stages(parity)["all"].verdict in ("close", "DIFFERENT")
    assert "more than rounding" in summary(parity)


def test_orientation_and_faults_are_noted(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    exif = Image.Exif()
    exif[274] = 6
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "0.jpg", exif=exif)
    (folder / "1.jpg").write_bytes(b"\xff\xd8 no image")
    augment = gpuaug.Augment(crop=gpuaug.Resize((20, 20)))
    with gpuaug.Loader(gpuaug.FolderSource(tmp_path), augment=augment, num_workers=0, device="cpu") as loader:
        parity = compare(loader, indices=[0, 1])
    assert parity.samples == 1
    assert any("1 of 1 images have an EXIF orientation" in note for note in parity.notes)
    assert any("a/1.jpg) is left out" in note for note in parity.notes)
    assert parity.differences[0].verdict == "equal"


def test_numbers_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    pairs = [(rng.uniform(0, 255, (9, w, 3)), rng.uniform(0, 255, (9, w, 3))) for w in (5, 8)]
    difference = Difference("all", "op", "another")
    for n, (ours, theirs) in enumerate(pairs):
        difference.add(ours, theirs, str(n))
    gap = np.concatenate([(a - b).reshape(-1, 3) for a, b in pairs])
    assert difference.largest == pytest.approx(np.abs(gap).max(), rel=1e-6)
    assert difference.mean == pytest.approx(np.abs(gap).mean(), rel=1e-6)
    assert difference.off == pytest.approx((np.abs(gap).max(axis=1) > 1.001).mean())


@pytest.mark.parametrize(
    "more",
    [
        ("augment=standard", "mix=mixup_cutmix"),
        ("augment=dino", "samples=2"),
        ("augment=eval",),
        ("augment=timm:rand-m9-mstd0.5-inc1",),
    ],
)
def test_command(more: tuple[str, ...], photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", f"source.root={photos}", f"json={tmp_path}/p.json", "samples=3", *more]) == 0
    printed = capsys.readouterr().out
    values = json.loads((tmp_path / "p.json").read_text())
    assert values["summary"] in " ".join(printed.split())
    assert {d["stage"] for d in values["differences"]} >= {"decode", "crop", "all"}
    for d in values["differences"]:
        assert 0 <= d["mean"] <= d["largest"] <= 255
        assert f"{d['largest']:.2f}" in printed
        assert d["worst"].endswith(".jpg")
    assert ("choices of timm" in printed) == bool(values["choices"]) == ("timm" in more[0])
    assert ("`mix` is left out" in printed) == ("mix" in more[-1])


def test_sixteen_bits_of_gray_are_told_apart_from_what_pillow_makes_of_them(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    ramp = (np.arange(64 * 64).reshape(64, 64) * 16).astype(np.uint16)
    Image.fromarray(ramp).save(tmp_path / "a" / "deep.png")
    Image.fromarray((ramp >> 8).astype(np.uint8)).save(tmp_path / "a" / "plain.png")
    words = [f"source.root={tmp_path}", "num_workers=0", "augment=none", "augment.crop.size=32"]
    with gpuaug.build(gpuaug.compose("train", words)) as loader:
        parity = compare(loader, indices=[0, 1], epoch=0)
    (difference,) = [d for d in parity.differences if d.stage == "decode"]
    assert (difference.images, difference.largest <= 1) == (1, True)
    assert any("deep.png" in note and "is left out" in note and "white" in note for note in parity.notes)


def test_without_torchvision_it_says_what_to_install(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchvision.cache_clear()
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(gpuaug.ConfigError, match="pip install torchvision"):
        measured(photos, {})


def test_nothing_that_can_be_decoded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.jpg").write_bytes(b"\xff\xd8 no image")
    for word, message in (("samples=0", "`samples` must be a count"), ("samples=[9]", "Not among them: 9")):
        assert main(["parity", f"source.root={tmp_path}", word]) == 2
        assert message in capsys.readouterr().err
    assert main(["parity", f"source.root={tmp_path}"]) == 2
    captured = capsys.readouterr()
    assert "Choose others with `samples`" in captured.err
    assert "a/0.jpg) is left out" in captured.out


def test_names_of_files_can_be_anything(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Line breaks, escapes of the terminal's and bytes that are no UTF-8, in names of good and of bad images."""
    folder = os.fsencode(tmp_path / "images") + b"/a\nb"
    os.makedirs(folder)
    good = next(photos.rglob("*.jpg")).read_bytes()
    for name, data in ((b"\x1b[31m.jpg", good), (b"\xff\n.jpg", good), (b"\xfe\x1b[2J\n.jpg", b"\xff\xd8 no image")):
        with open(folder + b"/" + name, "wb") as file:
            file.write(data)
    words = [f"source.root={tmp_path}/images", "augment.crop.size=32", f"json={tmp_path}/r.json"]
    assert main(["parity", *words]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    shown.encode()
    assert "is left out" in shown
    assert len(json.loads((tmp_path / "r.json").read_text())["numbers"]) == 3


def test_packed_pixels_are_compared_from_the_crop_on(photos: Path, tmp_path: Path) -> None:
    few = [f"source.root={photos}", "source.subset=4", "num_workers=0"]
    assert main(["pack", *few[:2], f"out={tmp_path}/packed", "format=uint8", "sizes=[48,64]", "num_workers=0"]) == 0
    packed = ["source=packed", f"source.root={tmp_path}/packed"]
    for more in ([], ["source.size={0:48,2:64}", "epoch=1"]):
        assert main(["parity", "samples=2", *packed, *more, f"json={tmp_path}/p.json"]) == 0
        values = json.loads((tmp_path / "p.json").read_text())
        assert {d["stage"] for d in values["differences"]} == {"crop", "all"}
    assert main(["pack", *few[:2], f"out={tmp_path}/augmented", "epochs=1", "num_workers=0"]) == 0
    assert main(["parity", "source=packed", f"source.root={tmp_path}/augmented"]) == 2
