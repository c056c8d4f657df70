"""`gpuaug parity` with targets: masks and boxes equal torchvision's, and a planted difference is seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import scenes as made

import gpuaug
from gpuaug.tools.main import main
from gpuaug.tools.parity import targets as parity_targets
from gpuaug.tools.parity.differences import Difference, Parity
from gpuaug.tools.parity.pixels import compare
from gpuaug.tools.peers import torchvision


@pytest.fixture(scope="module", autouse=True)
def _torchvision(v2: object) -> None:
    """The command needs it."""


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write(tmp_path_factory.mktemp("scenes"), count=4, size=(150, 200), things=5)


BOXES = gpuaug.Targets(boxes=gpuaug.Boxes())
MASKS = gpuaug.Targets(masks=gpuaug.Masks())
BOTH = gpuaug.Targets(masks=gpuaug.Masks(kind="instances"), boxes=gpuaug.Boxes())


def measured(scenes: Path, targets: gpuaug.Targets, augment: Any, count: int = 3) -> Parity:
    source: Any = gpuaug.MaskFolderSource(scenes)
    if targets.boxes is not None:
        masks = "instances" if targets.masks is not None else None
        source = gpuaug.CocoSource(scenes / "images", annotations=scenes / "instances.json", masks=masks)
    with gpuaug.Loader(source, targets=targets, augment=augment, num_workers=0, prefetch=0, device="cpu") as loader:
        return compare(loader, indices=range(count))


def found(parity: Parity, name: str, kind: str, reference: str = "torchvision") -> Difference:
    (one,) = [d for d in parity.targets if (d.name, d.kind, d.reference) == (name, kind, reference)]
    return one


FOLLOWING = {
    "flip": K.RandomHorizontalFlip(p=0.5),
    "vflip": K.RandomVerticalFlip(p=0.5),
    "affine": K.RandomAffine(20, translate=(0.1, 0.1), scale=(0.8, 1.2), shear=(-9.0, 9.0, -5.0, 5.0), p=1.0),
    "rotation": K.RandomRotation(30.0, p=1.0),
    "shear": K.RandomShear((-12.0, 12.0), p=1.0),
    "translate": K.RandomTranslate((0.0, 0.2), (0.0, 0.2), p=1.0),
}


@pytest.fixture(scope="module")
def following(scenes: Path) -> Parity:
    pytest.importorskip("pycocotools")
    return measured(scenes, BOTH, gpuaug.Augment(crop=gpuaug.RandomResizedCrop((96, 120)), ops=FOLLOWING))


@pytest.mark.parametrize("name", FOLLOWING)
def test_operations_move_boxes_and_masks_as_torchvision(name: str, following: Parity) -> None:
    boxes = found(following, name, "boxes")
    assert (boxes.images, boxes.verdict) == (3, "equal")
    assert boxes.largest < 1e-3
    masks = found(following, name, "masks")
    assert masks.verdict in ("equal", "rounding")
    assert (masks.images, masks.count) == (3, 3 * 96 * 120)


def test_several_warps_differ_for_reasons_that_are_told(following: Parity) -> None:
    boxes, masks = (found(following, "everything", kind) for kind in ("boxes", "masks"))
    assert boxes.verdict == "other"
    assert "torchvision's boxes are larger" in boxes.why
    assert "samples a mask in every operation" in masks.why
    printed = " ".join(" ".join(following.lines()).split())
    assert boxes.why in printed
    assert f"{boxes.largest:.3f}" in printed


CROPS = {
    "resized": gpuaug.RandomResizedCrop((70, 90)),
    "letterbox": gpuaug.Letterbox(128),
    "scale": gpuaug.RandomScaleCrop(140, base=120),
    "iou": gpuaug.RandomIoUCrop(100),
    "padded": gpuaug.RandomCrop(180, padding=30),
}


@pytest.mark.parametrize("name", CROPS)
def test_crops_and_one_operation_move_boxes_as_torchvision(name: str, scenes: Path) -> None:
    augment = gpuaug.Augment(crop=CROPS[name], ops={"rotation": K.RandomRotation(20.0, p=1.0)})
    parity = measured(scenes, BOXES, augment)
    for step in ("crop", "rotation", "everything"):
        one = found(parity, step, "boxes")
        assert one.verdict == "equal", one
        assert one.count > 3 or name == "resized"
    assert any("RandomIoUCrop" in note for note in parity.notes) == (name == "iou")


@pytest.mark.parametrize("name", ["resized", "letterbox", "scale", "padded"])
def test_masks_are_pillows_and_torchvisions_resize_is_named(name: str, scenes: Path) -> None:
    parity = measured(scenes, MASKS, gpuaug.Augment(crop=CROPS[name], ops={"flip": K.RandomHorizontalFlip(p=1.0)}))
    assert found(parity, "crop", "masks", "Pillow").verdict in ("equal", "rounding")
    torchvisions = found(parity, "crop", "masks")
    if name == "padded":  # no resize
        assert torchvisions.off == 0
    else:
        assert torchvisions.off > 0
        assert "`nearest`" in torchvisions.why
    assert found(parity, "flip", "masks").off == 0


def test_elastic_masks_and_policies_are_compared(scenes: Path) -> None:
    ops = {
        "elastic": K.RandomElasticTransform((21, 15), (4.0, 3.0), (0.6, 0.9), p=1.0),
        "rand": K.auto.RandAugment(n=2, m=9),
    }
    parity = measured(scenes, MASKS, gpuaug.Augment(crop=gpuaug.Resize((64, 80)), ops=ops), count=4)
    assert found(parity, "elastic", "masks").verdict in ("equal", "rounding")
    assert found(parity, "rand", "masks").images > 0


def identity(real: Callable[..., Any], kind: str) -> Callable[..., Any]:
    return lambda x, *more, **given: x if type(x).__name__ == kind else real(x, *more, **given)


@pytest.mark.parametrize("kind", ["BoundingBoxes", "Mask"])
def test_a_planted_difference_is_seen(kind: str, scenes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    functional = torchvision()[0].functional
    monkeypatch.setattr(functional, "horizontal_flip", identity(functional.horizontal_flip, kind))
    ops = {"flip": K.RandomHorizontalFlip(p=1.0)}
    targets = BOXES if kind == "BoundingBoxes" else MASKS
    parity = measured(scenes, targets, gpuaug.Augment(crop=gpuaug.Resize((64, 80)), ops=ops))
    one = found(parity, "flip", "boxes" if kind == "BoundingBoxes" else "masks")
    assert one.verdict == "other"
    assert one.worst.endswith(".jpg")


def test_what_cannot_be_compared_is_said(scenes: Path) -> None:
    ops = {
        "uneven": K.RandomAffine(0, scale=(0.8, 1.2, 0.6, 0.7), p=1.0),
        "jitter": K.ColorJitter(0.4),
        "never": K.RandomHorizontalFlip(p=0.0),
    }
    pose = gpuaug.Targets(boxes=gpuaug.Boxes(), keypoints=gpuaug.Keypoints())
    parity = measured(scenes, pose, gpuaug.Augment(crop=gpuaug.Resize((64, 80)), ops=ops))
    assert {d.name for d in parity.targets} == {"crop"}
    for words in ("keypoints are not compared", "`uneven` is not compared", "`jitter`: only pixel", "`never` moved no"):
        assert any(words in note for note in parity.notes), words


def test_views_are_compared_with_their_own_numbers(scenes: Path) -> None:
    def augment(size: int) -> gpuaug.Augment:
        return gpuaug.Augment(
            crop=gpuaug.RandomResizedCrop(size), ops={"rotation": K.RandomRotation(20.0, p=1.0)}, copies=2
        )

    parity = measured(scenes, BOXES, gpuaug.MultiView(views={"a": augment(96), "b": augment(48)}))
    assert [(d.name, d.view) for d in parity.targets] == [
        (name, view) for view in "ab" for name in ("crop", "rotation", "everything")
    ]
    assert all(d.verdict == "equal" for d in parity.targets)


def test_numbers_are_those_of_the_definition() -> None:
    boxes, masks = (Difference("targets", "x", "y", kind=kind) for kind in ("boxes", "masks"))
    for gaps in ([0.0, 1.0, 0.25], [], [0.75]):
        boxes.add_targets(np.array(gaps), "a.jpg")
        masks.add_targets(np.array([[gap > 0 for gap in gaps]]), "a.jpg")
    assert (boxes.images, boxes.count, boxes.largest) == (3, 4, 1.0)
    assert (boxes.mean, boxes.off) == (0.5, 0.5)
    assert (masks.count, masks.off, masks.largest) == (4, 0.75, 0.0)
    assert parity_targets.summary([boxes]).startswith(" Boxes differ from torchvision's by at most 1.00 pixels")


def test_command(scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parity", "source=masks", f"source.root={scenes}", "targets=segmentation", "augment=flip", "samples=2"]
    assert main([*words, f"out={tmp_path}/p.png", f"json={tmp_path}/p.json"]) == 0
    printed = capsys.readouterr().out
    values = json.loads((tmp_path / "p.json").read_text())
    assert "masks and boxes, from the same input" in printed
    assert "mask pixels differ from torchvision's" in values["summary"]
    assert {(d["name"], d["reference"]) for d in values["targets"]} >= {("crop", "torchvision"), ("crop", "Pillow")}
    assert all(f"{d['off']:.3%}" in printed for d in values["targets"])
