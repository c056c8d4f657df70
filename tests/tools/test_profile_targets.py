"""`gpuaug profile` of loaders with targets, and the commands that refuse targets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import planted
import pytest
import torch
from common import threads
from pictures import photograph
from PIL import Image

import gpuaug
from gpuaug.targets import masks
from gpuaug.tools.doctor import command as doctor
from gpuaug.tools.main import main
from gpuaug.tools.profile.bottleneck import bottleneck, diagnose, predict
from gpuaug.tools.profile.costs import FREE, LOADER, Cost, Measured
from gpuaug.tools.profile.measure import Profiler, _as_runs


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    planted.few_images(monkeypatch)
    with threads(2):
        yield


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small images with masks, and COCO's annotations of them."""
    root = tmp_path_factory.mktemp("scenes")
    rng, coco = np.random.default_rng(0), {"images": [], "annotations": [], "categories": [{"id": 1, "name": "a"}]}
    for k in range(24):
        for name in ("images", "masks"):
            (root / name).mkdir(exist_ok=True)
        photograph(size=(96, 64)).save(root / "images" / f"{k:02d}.jpg")
        values = np.kron(rng.integers(0, 5, (8, 12)), np.ones((8, 8))).astype(np.uint8)
        Image.fromarray(values).save(root / "masks" / f"{k:02d}.png")
        coco["images"].append({"id": k, "file_name": f"{k:02d}.jpg", "height": 64, "width": 96})
        coco["annotations"].append({"id": k, "image_id": k, "category_id": 1, "bbox": [9, 9, 30, 30], "area": 900,
                                    "iscrowd": 0})  # fmt: skip
    (root / "coco.json").write_text(json.dumps(coco))
    return root


def words(scenes: Path, kind: str = "segmentation") -> list[str]:
    common = [f"targets={kind}", "device=cpu", "batch_size=8", "augment=flip", "augment.crop.size=32"]
    if kind == "detection":
        return ["source=coco", f"source.root={scenes}/images", f"source.annotations={scenes}/coco.json", *common]
    return ["source=masks", f"source.root={scenes}", *common]


def build(scenes: Path, *more: str) -> gpuaug.Loader:
    made: gpuaug.Loader = gpuaug.build(gpuaug.compose("train", [*words(scenes), *more]))
    return made


def cost(ms: float) -> Cost:
    return Cost(ms / 1e3, ms / 1e3)


def measured(**changed: Any) -> Measured:
    plain = Measured(
        batch_size=16, workers=2, prefetch=2, main_thread=False, device_type="cpu", cores=9.0, source=cost(1.0),
        read=cost(0.6), copy=cost(0.1), take=Cost(0.0001, 0.0), decode=cost(1.0), augment=cost(0.5),
        headers=cost(0.0999), objects=cost(0.0001), masks=cost(3.0), finish=cost(0.4),
    )  # fmt: skip
    return replace(plain, **changed)


# -- the formula --


def test_masks_are_added_to_the_threads_that_make_them() -> None:
    found = predict(measured())
    assert found.terms["decoding"] == pytest.approx(0.004)
    assert found.terms["augmenting"] == pytest.approx(0.0009)
    assert found.seconds == pytest.approx(0.004)
    assert predict(measured(masks=FREE, finish=FREE)).terms["decoding"] == pytest.approx(0.001)
    assert predict(measured(main_thread=True)).terms["model"] == pytest.approx(0.0009)
    assert measured().total(LOADER).cpu == pytest.approx((0.6 + 1 + 3 + 0.5 + 0.4 + 0.1) / 1e3)
    busy = predict(measured(cores=1.0))
    assert busy.seconds == busy.terms["cores"] == pytest.approx(measured().total(LOADER).cpu)


def test_masks_are_named_as_the_bottleneck() -> None:
    name, evidence = bottleneck(measured())
    assert name == "masks"
    assert any("3 ms per image to decode" in text for text in evidence)
    assert bottleneck(measured(masks=cost(0.1)))[0] == "decode"
    assert bottleneck(measured(masks=cost(0.1), finish=cost(7)))[0] == "masks"


class Paper:
    """What a profiler would measure."""

    cores, threads, kornia, pillow, reducible = 8, 2, False, False, False

    def __init__(self, side: tuple[int, float] | None = None) -> None:
        self.side = side

    def with_decoder(self, m: Measured, *, num_threads: int) -> Measured:
        return m.scaled(dict.fromkeys(("decode", "masks"), Cost(self.threads / num_threads, 1)))

    def with_runs(self, m: Measured) -> Measured:
        return replace(m, masks=FREE)

    def packed(self) -> tuple[int, float] | None:
        return self.side


def test_advice_for_masks() -> None:
    verdict = diagnose(Paper(), measured())  # type: ignore[arg-type]
    assert verdict.bottleneck == "masks"
    assert verdict.overrides == ["decode.num_threads=8"]
    one = Paper()
    one.threads = 8  # as many as cores: nothing is left but to prepare the masks
    (pack,) = diagnose(one, measured()).others  # type: ignore[arg-type]
    assert "gpuaug pack format=uint8" in pack.text
    one.side = 256, 0.25
    (pack,) = diagnose(one, measured()).others  # type: ignore[arg-type]
    assert "gpuaug pack sizes=[256]" in pack.text


# -- measured --


@pytest.mark.parametrize("more", [("num_workers=1",), ("num_workers=0", "prefetch=0"), ("cache=ram", "num_workers=1")])
def test_a_loader_with_targets_is_measured_and_stays_the_same(scenes: Path, more: tuple[str, ...]) -> None:
    def pixels(loader: gpuaug.Loader) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(batch.images.clone(), batch.targets.masks.clone()) for batch in loader]

    with build(scenes, *more) as loader:
        before = pixels(loader)
        loader.set_epoch(0)
        with Profiler(loader, repeats=1, seconds=0.02) as profiler:
            found = profiler.measure()
            assert found.masks.wall > 0
            assert found.finish.wall > 0
            assert found.objects.wall > 0
            assert profiler.faults == 0
            diagnose(profiler, found)
            for other in (profiler.with_runs(found), profiler.with_decoder(found, num_threads=1)):
                assert other is not None
                assert other.masks.wall > 0
        for (a, b), (c, d) in zip(before, pixels(loader), strict=True):
            assert torch.equal(a, c)
            assert torch.equal(b, d)


def test_masks_as_runs_hold_the_same_values(scenes: Path) -> None:
    with build(scenes, "num_workers=0", "order=sequential") as loader, Profiler(loader, repeats=1, seconds=0.01) as p:
        stage, batch = p.stage, p.encoded[0]
        changed = _as_runs(batch, stage)
        for a, b, c, d in zip(batch.images, changed.images, batch.masks, changed.masks, strict=True):
            assert (a == b).all()
            values = [masks.decode(x.tobytes(), stored=(64, 96), exif=1, max_pixels=10**6) for x in (c, d)]
            assert (values[0] == values[1]).all()


@pytest.mark.parametrize("kind", ["segmentation", "detection"])
def test_command_names_the_share_of_targets(
    kind: str, scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.json"
    call = ["profile", *words(scenes, kind), "num_workers=1", f"out={tmp_path / 'p.png'}", f"json={file}"]
    assert main([*call, "repeats=1", "seconds=0.02"]) == 0
    printed, values = capsys.readouterr().out, json.loads(file.read_text())
    assert "masks (decode, crop, move)" in printed
    assert "of the loader's CPU time" in printed
    assert 0 < values["targets"] < 1
    assert {"masks", "finish"} <= set(values["stages"])


def test_a_packed_source_is_measured(scenes: Path, tmp_path: Path) -> None:
    out = tmp_path / "packed"
    assert main(["pack", *words(scenes)[:2], f"out={out}", "format=uint8", "num_workers=0"]) == 0
    given = ["source=packed", f"source.root={out}", *words(scenes)[2:]]
    assert main(["profile", *given, "repeats=1", "seconds=0.02", f"out={tmp_path / 'p.png'}"]) == 0


# -- refused, and not refused --


@pytest.mark.parametrize("kind", ["segmentation", "detection"])
def test_train_refuses_targets(kind: str, scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["train", *words(scenes, kind), "num_workers=0", f"out={tmp_path / 'out'}"]
    assert main(call) == 2
    assert "`targets` must be null, because `gpuaug train` trains image classification" in capsys.readouterr().err
    assert main([*call, "targets=none"]) == 2
    assert "needs a label for each image" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_doctor_takes_a_configuration_with_targets(
    scenes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def planted(name: str, **_: Any) -> doctor.Verdict:
        return doctor.Verdict(name=name, good=name != "cuda", text="planted", seconds=0.1)

    monkeypatch.setattr(doctor, "probe", planted)
    monkeypatch.setattr(doctor, "examine", planted)
    assert main(["doctor", *words(scenes)]) in (0, 1)
    assert "machine:" in capsys.readouterr().out
