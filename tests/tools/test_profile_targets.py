"""`gpuaug profile` of loaders with targets, and the commands that refuse targets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from common import threads
from pictures import photograph
from PIL import Image

import gpuaug
from gpuaug.tools.main import main
from gpuaug.tools.profile.advice import bottleneck
from gpuaug.tools.profile.trace import trace


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
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


def test_slow_masks_are_the_bottleneck(scenes: Path, tmp_path: Path) -> None:
    """Images that DALI or Pillow decodes quickly, with masks that compress badly."""
    big = tmp_path / "big"
    for k, file in enumerate(sorted((scenes / "images").iterdir())[:4]):
        for name in ("images", "masks"):
            (big / name).mkdir(parents=True, exist_ok=True)
        with Image.open(file) as image:
            image.resize((1200, 1200)).save(big / "images" / f"{k}.jpg", quality=20)
        Image.fromarray(np.random.default_rng(k).integers(0, 5, (1200, 1200), np.uint8)).save(
            big / "masks" / f"{k}.png"
        )
    with build(big, "batch_size=2", "num_workers=1") as loader:
        found = trace(loader, seconds=0.2)
    assert found.busy["masks"] > found.busy["headers"]
    busy = {**found.busy, "masks": found.seconds, "decode": 0.1 * found.seconds}
    assert bottleneck(loader, replace(found, busy=busy))[0] == "masks"


@pytest.mark.parametrize("more", [("num_workers=1",), ("num_workers=0", "prefetch=0")])
def test_a_loader_with_targets_is_traced_and_stays_the_same(scenes: Path, more: tuple[str, ...]) -> None:
    def pixels(loader: gpuaug.Loader) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(batch.images.clone(), batch.targets.masks.clone()) for batch in loader]

    with build(scenes, *more) as loader:
        before = pixels(loader)
        loader.set_epoch(0)
        found = trace(loader, seconds=0.02)
        assert found.busy["masks"] > 0 < found.busy["targets"]
        assert found.faults == 0
        for (a, b), (c, d) in zip(before, pixels(loader), strict=True):
            assert torch.equal(a, c)
            assert torch.equal(b, d)


@pytest.mark.parametrize("kind", ["segmentation", "detection"])
def test_command_names_the_share_of_targets(
    kind: str, scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.json"
    call = ["profile", *words(scenes, kind), "num_workers=1", f"json={file}"]
    assert main([*call, "repeats=1", "seconds=0.02"]) == 0
    printed, values = capsys.readouterr().out, json.loads(file.read_text())
    assert "masks (decode, crop, move)" in printed
    assert {"masks", "targets"} <= set(values["stages"])


# -- refused, and not refused --


@pytest.mark.parametrize("kind", ["segmentation", "detection"])
def test_train_refuses_targets(kind: str, scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["train", *words(scenes, kind), "num_workers=0", f"out={tmp_path / 'out'}"]
    assert main(call) == 2
    assert "`targets` must be null, because `gpuaug train` trains image classification" in capsys.readouterr().err
    assert main([*call, "targets=none"]) == 2
    assert "needs labels, but" in capsys.readouterr().err
