"""`gpuaug parity`: what differs is found, named and shown; what does not is called equal."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from PIL import Image

import gpuaug
from bench import photographs
from gpuaug.augment.policy import prepare
from gpuaug.tools.main import main
from gpuaug.tools.parity import command
from gpuaug.tools.parity.command import summary
from gpuaug.tools.parity.counterpart import counterpart
from gpuaug.tools.parity.differences import Difference, Parity, Sample
from gpuaug.tools.parity.pixels import compare
from gpuaug.tools.peers import torchvision


@pytest.fixture(scope="module", autouse=True)
def _torchvision(v2: object) -> None:
    """The command needs it."""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photographs.cut(tmp_path_factory.mktemp("photos"), count=60) / "train"


def measured(photos: Path, ops: dict, *, count: int = 3, **more: object) -> Parity:
    more = {"crop": gpuaug.RandomResizedCrop(48), **more}
    augment = gpuaug.Augment(ops=ops, **more)
    with gpuaug.Loader(gpuaug.FolderSource(photos), augment=augment, num_workers=0, prefetch=0, device="cpu") as loader:
        return compare(loader, indices=range(0, 7 * count, 7))


def found(parity: Parity, name: str, kind: str = ", float") -> Difference:
    (difference,) = [d for d in parity.differences if d.name == name and d.reference.endswith(kind)]
    return difference


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
    "affine": K.RandomAffine(20, translate=(0.1, 0.1), scale=(0.8, 1.2), shear=(-9.0, 9.0, -5.0, 5.0), p=1.0),
    "rotation": K.RandomRotation(30.0, p=1.0),
    "shear": K.RandomShear((-12.0, 12.0), p=1.0),
    "translate": K.RandomTranslate((0.0, 0.2), (0.0, 0.2), p=1.0),
    "elastic": K.RandomElasticTransform((21, 15), (4.0, 3.0), (0.6, 0.9), p=1.0),
}


@pytest.fixture(scope="module")
def following(photos: Path) -> dict[str, Parity]:
    """Every operation that is torchvision's, by both backends."""
    return {backend: measured(photos, FOLLOWING, count=2, backend=backend) for backend in ("fused", "kornia")}


@pytest.mark.parametrize("backend", ["fused", "kornia"])
@pytest.mark.parametrize("name", FOLLOWING)
def test_operations_are_torchvisions(name: str, backend: str, following: dict[str, Parity]) -> None:
    difference = found(following[backend], name)
    assert difference.images == 2
    # one level around a threshold, where float32 falls on the other side of it, would show as many
    assert difference.verdict == "equal", (difference.largest, difference.worst and difference.worst.what)


def test_the_fraction_that_uint8_cuts_off_is_seen(following: dict[str, Parity]) -> None:
    difference = found(following["fused"], "hue", ", uint8")
    assert 0 < difference.largest <= 1.001
    jitter = found(following["fused"], "jitter", ", uint8")
    assert 0.5 < jitter.bias < 4
    assert "truncate" in jitter.why


@pytest.mark.parametrize(
    ("op", "word"),
    [
        (K.RandomBrightness((0.6, 0.7), p=1.0), "adds"),
        (K.RandomContrast((0.5, 0.6), p=1.0), "mean gray"),
        (K.RandomSaturation((0.2, 0.3), p=1.0), "HSV"),
        (K.ColorJiggle(0.5, 0.5, 0.5, 0.1, p=1.0), "ColorJiggle"),
        (K.RandomPosterize((2.0, 3.0), p=1.0), "floor"),
    ],
)
def test_another_formula_is_named(op: torch.nn.Module, word: str, photos: Path) -> None:
    parity = measured(photos, {"op": op})
    difference = found(parity, "op")
    assert difference.verdict == "other" or type(op) is K.RandomPosterize
    assert word in difference.why
    if type(op) is K.RandomPosterize:  # torchvision's uint8 one is the same
        assert found(parity, "op", ", uint8").verdict == "equal"
    else:
        assert "`op` differs" in summary(parity)


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (K.RandomSolarize(0.1, 0.1, p=1.0), "adds no value"),
        (K.RandomPlanckianJitter(p=1.0), "no counterpart"),
        (K.RandomMedianBlur((3, 3), p=1.0), "no counterpart"),
        (K.RandomGaussianNoise(0.01, 0.1, p=1.0), "no counterpart"),
        (torch.nn.Dropout(), "its own random numbers"),
        (K.RandomMotionBlur(5, 35.0, 0.5, p=1.0), "no counterpart"),
        (K.RandomElasticTransform(padding_mode="border", p=1.0), "zeros outside"),
        (K.RandomInvert(p=0.0), "not applied"),
    ],
)
def test_what_cannot_be_compared_is_said(op: torch.nn.Module, reason: str, photos: Path) -> None:
    parity = measured(photos, {"op": op}, count=1)
    assert not [d for d in parity.differences if d.stage == "operation"]
    assert any(reason in note and "`op`" in note for note in parity.notes), parity.notes


MIXES = {"mixup": {"mixup_alpha": 0.4}, "cutmix": {"cutmix_alpha": 1.0}, "both": {"mixup_alpha": 1, "cutmix_alpha": 1}}


@pytest.mark.parametrize("name", MIXES)
def test_mix_is_torchvisions(name: str, photos: Path) -> None:
    views = {
        "large": gpuaug.Augment(crop=gpuaug.RandomResizedCrop((40, 56))),
        "small": gpuaug.Augment(crop=gpuaug.RandomResizedCrop(24), copies=2),
    }
    for seed in range(4):
        with gpuaug.Loader(
            gpuaug.FolderSource(photos),
            augment=gpuaug.MultiView(views=views),
            mix=gpuaug.Mix(**MIXES[name], label_smoothing=0.1),
            num_workers=0,
            device="cpu",
            seed=seed,
        ) as loader:
            parity = compare(loader, indices=range(0, 50, 10))
        mixed = [d for d in parity.differences if d.stage == "mix"]
        kinds = ["mixup", "cutmix"] if name == "both" else [name]
        assert [(d.name, d.view) for d in mixed] == [(k, v) for k in kinds for v in views]
        assert all(d.verdict == "equal" and d.images == 5 for d in mixed)
        for kind in kinds:
            assert any(note.startswith(f"{kind}: torchvision mixes neighbors") for note in parity.notes)
        assert any("CrossEntropyLoss" in note for note in parity.notes)


def test_another_mix_is_seen(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a box that is pasted one column further left."""

    class Shifted(torchvision()[0].CutMix):
        def transform(self, inpt: torch.Tensor, params: dict) -> torch.Tensor:
            left, *rest = params["box"]
            return super().transform(inpt, {**params, "box": (left + 1, *rest)})

    monkeypatch.setattr(torchvision()[0], "CutMix", Shifted)
    augment = gpuaug.Augment(crop=gpuaug.Resize((32, 32)))
    source = gpuaug.FolderSource(photos)
    mix = gpuaug.Mix(cutmix_alpha=1.0)
    with gpuaug.Loader(source, augment=augment, mix=mix, num_workers=0, device="cpu", seed=1) as loader:
        parity = compare(loader, indices=[0, 20, 40])
    (mixed,) = [d for d in parity.differences if d.stage == "mix"]
    assert mixed.verdict != "equal"


def test_without_torchvision_it_says_what_to_install(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchvision.cache_clear()
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(gpuaug.ConfigError, match="pip install torchvision"):
        measured(photos, {}, count=1)


def test_mix_of_one_image_is_not_compared(photos: Path) -> None:
    augment = gpuaug.Augment(crop=gpuaug.Resize((32, 32)))
    source, mix = gpuaug.FolderSource(photos), gpuaug.Mix(mixup_alpha=1.0)
    with gpuaug.Loader(source, augment=augment, mix=mix, num_workers=0, device="cpu") as loader:
        parity = compare(loader, indices=[3])
    assert not [d for d in parity.differences if d.stage == "mix"]
    assert any(note.startswith("mix is not compared") for note in parity.notes)


def test_reduced_decoding_is_compared_with_full_decoding(photos: Path) -> None:
    augment = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(48))
    decode = gpuaug.Decode(num_threads=1, reduced=True)
    source = gpuaug.FolderSource(photos)
    with gpuaug.Loader(source, augment=augment, decode=decode, num_workers=0, device="cpu") as loader:
        parity = compare(loader, indices=range(0, 40, 5))
    full = {d.name: d for d in parity.differences if d.stage in ("decode", "resize")}
    assert all(d.verdict in ("equal", "rounding") for d in full.values())
    (reduced,) = [d for d in parity.differences if d.stage == "reduced"]
    assert 0.05 < reduced.mean <= reduced.largest_mean < 3.5
    assert reduced.images == parity.samples
    assert any(f"largest mean difference of an image is {reduced.largest_mean:.2f}" in note for note in parity.notes)
    assert any("decode.reduced" in line for line in parity.lines())


def test_policies_are_compared_by_what_they_choose(photos: Path) -> None:
    parity = measured(photos, {"auto": K.auto.TrivialAugment()}, count=2)
    names = {d.name for d in parity.differences if d.stage == "operation"}
    assert "auto: RandomRotation" in names
    assert len(names) > 6
    assert found(parity, "auto: RandomBrightness").verdict == "other"
    assert found(parity, "auto: RandomSharpness").verdict == "equal"
    choice = gpuaug.OneOf(ops={"gray": K.RandomGrayscale(p=1.0), "hue": K.RandomHue((0.1, 0.2), p=1.0)})
    names = {d.name for d in measured(photos, {"choice": choice}).differences if d.stage == "operation"}
    assert names == {"choice: RandomGrayscale", "choice: RandomHue"}


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_resize_is_compared_by_its_interpolation(interpolation: gpuaug.batch.Interpolation, photos: Path) -> None:
    parity = measured(photos, {}, crop=gpuaug.Resize((40, 40), interpolation=interpolation))
    (resized,) = [d for d in parity.differences if d.stage == "resize"]
    assert resized.name == f"crop, {interpolation}"
    assert resized.verdict == "rounding"
    unscaled = measured(photos, {}, crop=gpuaug.RandomCrop(64, padding=8, fill=7))
    (crop,) = [d for d in unscaled.differences if d.stage == "resize"]
    assert crop.name == "crop"
    assert crop.verdict == "equal"


def test_a_wrong_resize_is_seen(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: Pillow takes the nearest pixel."""
    monkeypatch.setattr(
        Image.Image, "resize", lambda self, size, how=None, real=Image.Image.resize: real(self, size, Image.NEAREST)
    )
    parity = measured(photos, {})
    (whole,) = [d for d in parity.differences if d.name == "everything but the operations"]
    assert whole.verdict in ("close", "other")
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
    difference = Difference("operation", "op", "another")
    for n, (ours, theirs) in enumerate(pairs):
        difference.add(ours, theirs, Sample(n, str(n)))
    gap = np.concatenate([(a - b).reshape(-1, 3) for a, b in pairs])
    assert difference.largest == pytest.approx(np.abs(gap).max(), rel=1e-6)
    assert difference.mean == pytest.approx(np.abs(gap).mean(), rel=1e-6)
    assert difference.bias == pytest.approx(gap.mean(), abs=1e-4)
    assert difference.off == pytest.approx((np.abs(gap).max(axis=1) > 1.001).mean())
    worst = difference.worst
    assert worst is not None
    assert np.abs(worst.ours - worst.theirs)[worst.y, worst.x].max() == pytest.approx(difference.largest, rel=1e-6)


def test_counterparts_name_torchvisions_functions() -> None:
    """Each is a function of torchvision.transforms.v2.functional, with the values as drawn."""
    op = prepare("affine", FOLLOWING["affine"])
    params = op.draw(np.full((1, op.count), 0.25, dtype=np.float32), (48, 48)).params[0][0]
    ((name, given),) = counterpart(op.op, {k: v[0] for k, v in params.items()})
    assert name == "affine"
    assert given["angle"] == pytest.approx(-10)
    assert given["translate"] == pytest.approx([-2.4, -2.4])
    assert given["scale"] == pytest.approx(0.9)
    assert given["shear"] == pytest.approx([-4.5, -2.5])


@pytest.mark.parametrize(
    "more",
    [
        ("augment=standard", "mix=mixup_cutmix"),
        ("augment=dino", "samples=2"),
        ("augment=eval", "rows=1"),
    ],
)
def test_command(more: tuple[str, ...], photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parity", f"source.root={photos}", f"out={tmp_path}/p.png", f"json={tmp_path}/p.json", "samples=3", *more]
    assert main(words) == 0
    printed = capsys.readouterr().out
    told = " ".join(printed.split())
    values = json.loads((tmp_path / "p.json").read_text())
    assert values["summary"] in told
    assert "match torchvision's functions" in told or "augment=eval" in more
    assert {d["stage"] for d in values["differences"]} >= {"decode", "resize", "normalize", "all"}
    for d in values["differences"]:
        assert 0 <= d["mean"] <= d["largest"] <= 255
        assert f"{d['largest']:.2f}" in printed
        place = d["worst"]
        gap = np.abs(np.array(place["ours"]) - np.array(place["theirs"])).max()
        assert gap == pytest.approx(d["largest"], abs=1e-3)
    with Image.open(tmp_path / "p.png") as page:
        assert page.format == "PNG"
        assert page.width > 1000
        assert page.height > 300
        assert len(np.unique(np.asarray(page.convert("L")))) > 100


def test_the_picture_shows_both_and_the_difference() -> None:
    ours = np.full((30, 30, 3), 100.0)
    theirs = ours.copy()
    theirs[20, 5] = 110
    difference = Difference("operation", "op", "another", why="planted")
    difference.add(ours, theirs, Sample(0, "a.jpg"), what="planted")
    (worst,) = command.worst_cases(Parity("0", 1, [difference]), 5)
    assert worst.worst is not None
    assert (worst.worst.y, worst.worst.x) == (20, 5)
    cells = command.row(worst).cells
    assert [cell.caption for cell in cells] == ["ours", "theirs", "difference x 8, signed"]
    assert all(cell.picture.size == (command.CELL,) * 2 for cell in cells)
    shown = [set(np.unique(np.asarray(cell.picture)).tolist()) for cell in cells]
    assert shown == [{100}, {100, 110}, {128 - 80, 128}]


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


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("samples=0", "`samples` must be a whole number >= 1"),
        ("rows=many", "`rows` must be a whole number >= 1"),
        ("indices=[100000]", "Not among them: 100000"),
        ("indices=[a]", "`indices` must be a list"),
        ("out=/proc/none/p.png", "`out` must be the path of a file"),
        ("smaples=3", "Did you mean `samples`?"),
    ],
)
def test_mistakes_are_named(word: str, message: str, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", f"source.root={photos}", word]) == 2
    assert message in capsys.readouterr().err


def test_nothing_that_can_be_decoded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.jpg").write_bytes(b"\xff\xd8 no image")
    assert main(["parity", f"source.root={tmp_path}", f"out={tmp_path}/p.png"]) == 2
    captured = capsys.readouterr()
    assert "`indices`" in captured.err
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
    assert main(["parity", *words, f"out={tmp_path}/p.png"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    shown.encode()
    assert "is left out" in shown
    assert len(json.loads((tmp_path / "r.json").read_text())["indices"]) == 3
    assert main(["preview", *words, f"out={tmp_path}/p.png", "faults.policy=blank", "draws=1"]) == 0


def test_help_names_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "--help"]) == 0
    assert "samples: 8" in capsys.readouterr().out


def test_packed_pixels(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are compared from the crop on; augmented ones are refused with what to do instead."""
    few = [f"source.root={photos}", "source.subset=4", "num_workers=0"]
    assert main(["pack", *few[:2], f"out={tmp_path}/packed", "format=uint8", "sizes=[48,64]", "num_workers=0"]) == 0
    words = ["parity", "samples=2", f"out={tmp_path}/p.png"]
    assert main([*words, "source=packed", f"source.root={tmp_path}/packed"]) == 0
    assert "decoding is not compared" in capsys.readouterr().out
    by_epoch = ["source=packed", f"source.root={tmp_path}/packed", "source.size={0:48,2:64}", "epoch=1"]
    assert main([*words, *by_epoch]) == 0
    assert main(["preview", f"out={tmp_path}/p.png", *by_epoch]) == 0
    assert main(["preview", f"out={tmp_path}/p.png", *by_epoch, "show=operations"]) == 0
    assert main(["pack", *few, "epochs=1", f"out={tmp_path}/epochs"]) == 0
    assert main([*words, "source=packed", f"source.root={tmp_path}/epochs"]) == 2
    assert "source=folder" in capsys.readouterr().err
