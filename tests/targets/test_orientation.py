"""Annotations of images that EXIF turns or mirrors, made for the displayed or for the stored pixels."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import loader
from pictures import encode, png
from PIL import Image, ImageOps

import gpuaug
from gpuaug.tools.pack.command import pack
from gpuaug.tools.pack.job import Pack

SIZES = {"square": (64, 64), "oblong": (48, 80)}  # (height, width) as stored
POINTS = np.array([[11.0, 9.0], [29.0, 15.0], [21.0, 33.0]])  # pixel centres in the stored image
BOX = (6, 4, 40, 36)  # (x1, y1, x2, y2) in the stored image
STILL = gpuaug.Augment()  # the whole image
ALL = {"boxes": gpuaug.Boxes(), "masks": gpuaug.Masks(), "keypoints": gpuaug.Keypoints()}


def turned(values: np.ndarray, exif: int) -> np.ndarray:
    """What Pillow displays for the stored values."""
    image = Image.fromarray(values)
    image.getexif()[274] = exif
    return np.asarray(ImageOps.exif_transpose(image))


def drawn(size: tuple[int, int], exif: int) -> tuple[list[np.ndarray], dict[str, Any]]:
    """The stored and the displayed mask, and the box and points in the displayed one, which Pillow turned."""
    stored = np.zeros(size, np.uint8)
    stored[BOX[1] : BOX[3], BOX[0] : BOX[2]] = 1
    places = []
    for x, y in POINTS.astype(int):
        dot = np.zeros(size, np.uint8)
        dot[y, x] = 1
        places.append(np.argwhere(turned(dot, exif))[0, ::-1])
    shown = turned(stored, exif)
    rows, columns = np.nonzero(shown)
    box = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    return [stored, shown], {"box": np.array(box, float), "points": np.array(places, float)}


def targets_of(which: str, size: tuple[int, int], exif: int, *, form: str) -> gpuaug.Target:
    """The same annotations for the stored or the displayed image. ``form``: with a size, without, or as fractions."""
    (stored, shown), at = drawn(size, exif)
    mask, box, points = (shown, at["box"], at["points"]) if which == "displayed" else (stored, np.array(BOX), POINTS)
    sides = np.array(mask.shape[::-1])
    points = np.concatenate([points, np.full((3, 1), 2.0)], axis=1)
    target = gpuaug.Target(mask=png(mask), boxes=[box], labels=[1], keypoints=[points], size=mask.shape)
    if form == "fractions":
        points[:, :2] = (points[:, :2] + 0.5) / sides
        return replace(target, boxes=[box / np.tile(sides, 2)], keypoints=[points], size=None, fractions=True)
    return target if form == "sized" else replace(target, size=None)


def image_of(size: tuple[int, int], exif: int) -> bytes:
    tag = Image.Exif()
    tag[274] = exif
    mask = np.zeros(size, np.uint8)
    mask[BOX[1] : BOX[3], BOX[0] : BOX[2]] = 255
    return encode(Image.fromarray(np.repeat(mask[..., None], 3, axis=2)), "JPEG", quality=100, subsampling=0, exif=tag)


class Samples(list[Any]):
    target_kinds = frozenset({"masks", "boxes", "keypoints"})


def iou(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a & b).sum() / (a | b).sum())


def check(source: Any, exif: int, size: tuple[int, int], orientation: str) -> None:
    """Mask, box and points are where Pillow's image shows them."""
    with loader(source, augment=STILL, targets=gpuaug.Targets(**ALL, orientation=orientation)) as made:
        ((images, targets),) = list(made)
    (_, shown), at = drawn(size, exif)
    lit = images[0, 0] > 0.5
    assert iou(targets.masks[0] == 1, torch.from_numpy(shown == 1)) == 1
    assert iou(targets.masks[0] == 1, lit) > 0.98  # JPEG's edges
    np.testing.assert_allclose(targets.boxes[0].numpy(), at["box"], atol=1e-3)
    np.testing.assert_allclose(targets.keypoints[0, :, :2].numpy(), at["points"], atol=1e-3)


@pytest.mark.parametrize("exif", range(1, 9))
@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("which", ["displayed", "stored"])
def test_annotations_are_where_pillow_shows_the_image(which: str, shape: str, exif: int) -> None:
    size = SIZES[shape]
    for form in ("sized", "unsized"):
        source = Samples([(image_of(size, exif), targets_of(which, size, exif, form=form))])
        check(source, exif, size, which)
        if shape == "oblong" and exif > 4:  # sizes tell, so the key must not matter
            check(source, exif, size, "stored" if which == "displayed" else "displayed")
    fractions = Samples([(image_of(size, exif), targets_of(which, size, exif, form="fractions"))])
    rules = {"boxes": gpuaug.Boxes(), "keypoints": gpuaug.Keypoints(pixel_centers=False)}
    with loader(fractions, augment=STILL, targets=gpuaug.Targets(**rules, orientation=which)) as made:
        ((_, targets),) = list(made)
    _, at = drawn(size, exif)
    np.testing.assert_allclose(targets.boxes[0].numpy(), at["box"], atol=1e-3)
    np.testing.assert_allclose(targets.keypoints[0, :, :2].numpy() - 0.5, at["points"], atol=1e-3)


@pytest.mark.parametrize("format", ["jpeg", "uint8"])
@pytest.mark.parametrize("which", ["displayed", "stored"])
def test_packed_copies_hold_displayed_annotations(which: str, format: Any, tmp_path: Any) -> None:
    cases = [(size, exif) for size in SIZES.values() for exif in range(1, 9)]
    source = Samples([(image_of(*case), targets_of(which, *case, form="sized")) for case in cases])
    pack(source, tmp_path, what=Pack(format=format, orientation=which), num_workers=0)
    for number, (size, exif) in enumerate(cases):
        one = gpuaug.PackedSource(tmp_path)
        one.indices = torch.tensor([number])
        for orientation in ("displayed", "stored"):  # packed images have no EXIF
            check(one, exif, size, orientation)


def stored_as(kind: str, root: Path, image: bytes, target: gpuaug.Target) -> Any:
    """The annotations of one image in a format of files."""
    assert target.size is not None
    (height, width), box = target.size, np.array(target.boxes[0], float)
    for folder in ("images", "labels", "masks", "annotations", "JPEGImages", "Annotations"):
        (root / folder).mkdir()
    for folder in ("images", "JPEGImages"):
        (root / folder / "a.jpg").write_bytes(image)
    if kind == "masks":
        (root / "masks/a.png").write_bytes(target.mask)
        return gpuaug.MaskFolderSource(root)
    if kind == "yolo":
        fractions = np.concatenate([(box[:2] + box[2:]) / 2, box[2:] - box[:2]]) / [width, height, width, height]
        (root / "labels/a.txt").write_text(f"0 {' '.join(map(str, fractions))}\n")
        (root / "data.yaml").write_text("names: [thing]\ntrain: images\n")
        return gpuaug.YoloSource(root)
    if kind == "voc":
        box[:2] += 1  # VOC counts pixels from 1
        sides = zip(("xmin", "ymin", "xmax", "ymax"), box.astype(int), strict=True)
        edges = "".join(f"<{name}>{value}</{name}>" for name, value in sides)
        size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
        text = f"<annotation>{size}<object><name>thing</name><bndbox>{edges}</bndbox></object></annotation>"
        (root / "Annotations/a.xml").write_text(text)
        (root / "ImageSets/Main").mkdir(parents=True)
        (root / "ImageSets/Main/train.txt").write_text("a\n")
        return gpuaug.VocSource(root, year=None, classes=["thing"])
    entry = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [*box[:2], *(box[2:] - box[:2])], "iscrowd": 0}
    corners = [box[0], box[1], box[2], box[1], box[2], box[3], box[0], box[3]]
    file = {"images": [{"id": 1, "file_name": "a.jpg", "width": width, "height": height}],
            "annotations": [entry | {"area": 1.0, "segmentation": [corners]}],
            "categories": [{"id": 1, "name": "thing"}]}  # fmt: skip
    (root / "annotations/instances_images.json").write_text(json.dumps(file))
    return gpuaug.CocoSource(root, split="images", masks="instances")


@pytest.mark.parametrize("kind", ["masks", "yolo", "voc", "coco"])
@pytest.mark.parametrize("which", ["displayed", "stored"])
def test_all_formats_of_files_follow_the_key(which: str, kind: str, tmp_path: Path) -> None:
    size, exif = SIZES["square"], 5
    source = stored_as(kind, tmp_path, image_of(size, exif), targets_of(which, size, exif, form="sized"))
    rules: dict[str, Any] = {"boxes": None if kind == "masks" else gpuaug.Boxes()}
    rules["masks"] = {"masks": gpuaug.Masks(), "coco": gpuaug.Masks(kind="instances")}.get(kind)
    with loader(source, augment=STILL, targets=gpuaug.Targets(**rules, orientation=which)) as made:
        batch = next(iter(made))
    (_, shown), at = drawn(size, exif)
    if rules["masks"]:
        assert iou(batch.targets.masks[0] == 1, torch.from_numpy(shown == 1)) == 1
    if rules["boxes"]:
        np.testing.assert_allclose(batch.targets.boxes[0].numpy(), at["box"], atol=1e-3)


def test_one_line_says_what_annotations_are_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gpuaug")
    size = SIZES["oblong"]
    source = Samples(
        [(image_of(size, exif), targets_of("stored", size, exif, form="sized")) for exif in (1, 6, 3, 2, 4)]
    )
    rules = gpuaug.Targets(**ALL, orientation="stored")
    with loader(source, augment=STILL, batch_size=1, order="sequential", targets=rules) as made:
        for _ in range(2):
            list(made)
    lines = [text for text in caplog.messages if "orientation" in text]
    assert len(lines) == 1
    assert "sample 2 has EXIF orientation 3" in lines[0]  # the size of sample 1 tells
    assert "targets.orientation=stored" in lines[0]
    with pytest.raises(gpuaug.ConfigError, match=r"`targets\.orientation` must be"):
        gpuaug.Targets(masks=gpuaug.Masks(), orientation="upright")
