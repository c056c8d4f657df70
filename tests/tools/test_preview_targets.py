"""`gpuaug preview` with targets: masks, boxes and keypoints are drawn where they are, on every picture."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import scenes as made
import torch
from PIL import Image

import gpuaug
from gpuaug.display import annotations as drawing
from gpuaug.display import sheet
from gpuaug.display.annotations import Annotated, Annotations, Style, color_of
from gpuaug.tools.main import main
from gpuaug.tools.preview import drawing as preview
from gpuaug.tools.preview.originals import Sample

SIZE = (150, 200)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write(tmp_path_factory.mktemp("scenes"), count=4, size=SIZE, things=4)


def coco(scenes: Path, **more: object) -> gpuaug.CocoSource:
    return gpuaug.CocoSource(scenes / "images", annotations=scenes / "instances.json", **more)


SEGMENTATION = gpuaug.Targets(masks=gpuaug.Masks())
POSE = gpuaug.Targets(boxes=gpuaug.Boxes(), keypoints=gpuaug.Keypoints())


def samples(source: object, targets: gpuaug.Targets, augment: gpuaug.Augment, count: int = 3) -> list[Sample]:
    with gpuaug.Loader(source, targets=targets, augment=augment, num_workers=0, prefetch=0, device="cpu") as loader:
        return preview.samples_of(loader, range(count), epochs=[0, 1])


def original(sample: Sample) -> Annotations:
    """The annotations of the original."""
    assert sample.original.annotations is not None
    return sample.original.annotations


def blended(picture: np.ndarray, color: tuple[int, int, int], share: float) -> np.ndarray:
    return np.rint(picture + (np.array(color) - picture) * share)


def test_masks_have_the_colors_of_their_classes() -> None:
    mask = np.repeat(np.array([[0, 1, 3, 255]], np.int32), 20, axis=1).repeat(40, axis=0)
    none = np.zeros(0, dtype=np.int64)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 80, 3), dtype=np.uint8))
    shown = Annotated(picture, Annotations(mask, None, None, none, none > 0, none))
    before, out = np.asarray(picture).astype(float), np.asarray(shown.drawn(1, Style(SEGMENTATION))).astype(float)
    for value, color, share in ((0, drawing.BACKGROUND, 0.4), (1, color_of(0), 0.5), (3, color_of(2), 0.5)):
        inner = (mask == value) & (np.roll(mask, -1, axis=1) == value)  # edges are darker
        assert np.abs(out[inner] - blended(before, color, share)[inner]).max() <= 1
    ignored = mask == 255  # light or dark stripes, and the image behind them
    light, dark = (np.abs(out - blended(before, tone, 0.8)).max(axis=2) <= 1 for tone in (sheet.STRIPED, sheet.STRIPE))
    assert (light | dark)[ignored].all()
    assert 0.6 < light[ignored].mean() < 0.9


def test_boxes_and_labels_are_drawn_inside_their_edges() -> None:
    picture = Image.new("RGB", (120, 100), (90, 90, 90))
    shown = Annotations(
        None, np.array([[20.0, 30, 80, 90]], np.float32), None, np.array([1]), np.array([False]), np.array([5])
    )
    style = Style(gpuaug.Targets(boxes=gpuaug.Boxes()), ["a", "cat"])
    out = np.asarray(Annotated(picture, shown).drawn(1, style))
    color = list(color_of(1))
    for y, x in ((30, 70), (89, 50), (60, 20), (60, 21), (60, 79)):
        assert out[y, x].tolist() == color
    assert out[60, 50].tolist() == [90, 90, 90]
    assert (out[:, 85:] == 90).all()
    label = out[16:30, 20:40]  # above the box
    assert (label == color).all(axis=2).mean() > 0.4
    assert label.sum(axis=2).min() < sum(color) / 2  # black text
    twice = np.asarray(Annotated(picture, shown).drawn(2, style))  # the line does not become thicker
    assert [(row == color).all() for row in twice[120, 38:46]] == [False, False, True, True, False, False, False, False]


def test_labels_do_not_cover_each_other_or_small_objects() -> None:
    picture, free = Image.new("RGB", (200, 200)), np.array([[10.0, 50, 90, 120]] * 2, np.float32)
    tiny = np.array([[150.0, 150, 160, 158]], np.float32)
    style = Style(gpuaug.Targets(boxes=gpuaug.Boxes()), ["class"])

    def text_pixels(boxes: np.ndarray) -> int:
        n = len(boxes)
        shown = Annotations(None, boxes, None, np.zeros(n, int), np.zeros(n, bool), np.full(n, -1))
        out = np.asarray(Annotated(picture, shown).drawn(1, style)).astype(int)
        return int((out == color_of(0)).all(axis=2).sum())

    one, both = text_pixels(free[:1]), text_pixels(free)
    assert both > one + 150  # the second label is at another place
    assert text_pixels(tiny) <= 2 * (10 + 8) * 2


def test_keypoints_are_dots_with_lines() -> None:
    points = np.array([[[20, 20, 2], [80, 20, 1], [50, 80, 0]]], dtype=np.float32)  # the last one is not labelled
    one = np.zeros(1, dtype=np.int64)
    shown = Annotations(None, None, points, one, one > 0, one)
    style = Style(POSE, ["cat"], ((0, 1), (1, 2), (2, 0)))
    out = np.asarray(Annotated(Image.new("RGB", (100, 100)), shown).drawn(1, style))
    assert out[20, 18].tolist() == list(color_of(0))
    assert out[20, 82].tolist() == list(color_of(1))
    assert out[20, 50].tolist() == list(color_of(0))  # the line, in the color of the class
    assert not out[40:].any()


def test_originals_have_the_annotations_of_the_file(scenes: Path) -> None:
    document = json.loads((scenes / "instances.json").read_text())
    for sample in samples(coco(scenes), POSE, gpuaug.Augment(crop=gpuaug.RandomResizedCrop(32))):
        own = [a for a in document["annotations"] if a["image_id"] == sample.index + 1]
        known = original(sample)
        boxes = np.array([[x, y, x + w, y + h] for x, y, w, h in (a["bbox"] for a in own)])
        np.testing.assert_allclose(known.boxes, boxes, atol=1e-3)
        assert known.ids.tolist() == [a["id"] for a in own]
        points = np.array([a["keypoints"] for a in own]).reshape(-1, 3, 3)
        points[..., :2] += 0.5 * (points[..., 2:] > 0)
        seen = points[..., 2] > 0
        np.testing.assert_allclose(known.keypoints[seen], points[seen], atol=1e-3)
    for sample in samples(gpuaug.MaskFolderSource(scenes), SEGMENTATION, gpuaug.Augment(crop=gpuaug.Resize(32))):
        with Image.open(scenes / "masks" / f"{sample.index:03d}.png") as mask:
            assert np.array_equal(original(sample).mask, np.asarray(mask))


def test_an_object_has_one_color_in_all_pictures(scenes: Path) -> None:
    pytest.importorskip("pycocotools")
    targets = gpuaug.Targets(masks=gpuaug.Masks(kind="instances"), boxes=gpuaug.Boxes())
    augment = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(64, scale=(0.2, 0.5)))
    colors: dict[int, set[tuple[int, int, int]]] = {}
    for sample in samples(coco(scenes, masks="instances"), targets, augment):
        first = original(sample)
        style = Style(targets).for_sample(first)
        for shown in (first, *(view.annotations for view in sample.augmented)):
            for k, number in enumerate(shown.ids.tolist()):
                colors.setdefault(number, set()).add(style.color(shown, k))
        assert len({style.color(first, k) for k in range(len(first))}) == len(first)
    assert set(map(len, colors.values())) == {1}


def test_the_legend_names_the_classes_that_are_shown() -> None:
    def mask(*values: int) -> Annotations:
        none = np.zeros(0, dtype=np.int64)
        return Annotations(np.array([values]), None, None, none, none.astype(bool), none)

    style = Style(SEGMENTATION, ["road", "car"])
    assert style.legend([mask(0, 1, 255), mask(7)]) == [
        (drawing.BACKGROUND, "0: road"), (color_of(0), "1: car"), (color_of(6), "7"), (None, "255: ignored"),
    ]  # fmt: skip
    many = style.legend([mask(*range(100))])
    assert len(many) == drawing.LEGEND + 1
    assert many[-1][1] == f"and {100 - drawing.LEGEND} more classes"
    assert len({color_of(k) for k in range(200)}) == 200
    row = sheet.SheetRow("row", [], [sheet.Cell(Image.new("RGB", (40, 40)), "cell")])
    page = np.asarray(sheet.sheet([row], heading="h", lines=["l"], legend=[*many, (None, "255: ignored")]))
    assert all((page == chip).all(axis=2).sum() > 60 for chip in (color_of(0), color_of(5), sheet.STRIPED))
    text = sheet.page([row], heading="h", lines=["l"], legend=[((1, 2, 3), "<b>"), (None, "255: ignored")])
    assert "#010203" in text
    assert "&lt;b&gt;" in text
    assert "dotted" in text


def test_negative_labels_are_drawn_as_numbers() -> None:
    labels = np.array([-1, -100])
    boxes = np.array([[2, 2, 90, 60], [2, 64, 90, 98]], dtype=np.float32)
    shown = Annotations(None, boxes, None, labels, labels > 0, labels)
    style = Style(POSE, ["road", "car"])
    assert style.legend([shown]) == [(color_of(-100), "-100"), (color_of(-1), "-1")]
    pixels = np.asarray(Annotated(Image.new("RGB", (100, 100)), shown).drawn(1, style))
    assert all((pixels == color_of(label)).all(axis=2).any() for label in labels.tolist())


COMMANDS = {
    "segmentation": ("source=masks", "targets=segmentation"),
    "detection": ("source=coco", "targets=detection", "augment.crop._target_=gpuaug.RandomIoUCrop",
                  "~augment.crop.scale", "~augment.crop.ratio"),
    "instances": ("source=coco", "targets=instances", "source.masks=instances"),
    "views": ("source=coco", "targets=detection", "augment=dino", "augment.backend=kornia"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "ending"),
    [("segmentation", "png"), ("instances", "png"), ("views", "png"), ("segmentation", "html"), ("detection", "html")],
)
def test_command(name: str, ending: str, scenes: Path, tmp_path: Path) -> None:
    if name == "instances":
        pytest.importorskip("pycocotools")
    of_coco = [f"source.root={scenes}/images", f"source.annotations={scenes}/instances.json"]
    where = of_coco if "source=coco" in COMMANDS[name] else [f"source.root={scenes}"]
    out = tmp_path / f"p.{ending}"
    words = ["preview", *COMMANDS[name], *where, f"out={out}", f"json={tmp_path}/p.json", "samples=2", "draws=1"]
    assert main(words) == 0
    assert len(json.loads((tmp_path / "p.json").read_text())["numbers"]) == 2
    if ending == "html":
        text = out.read_text()
        assert ("2: triangle" in text) == (name not in ("segmentation", "instances"))
        assert ("255: ignored" in text) == (name == "segmentation")
        assert ("objects" in text) == (name != "segmentation")
        return
    with Image.open(out) as page:
        pixels = np.asarray(page.convert("RGB"))
    shown = sum((pixels == color_of(k)).all(axis=2).sum() > 50 for k in range(3))
    assert shown >= 2  # outlines and labels have the pure colors


def test_a_sample_with_damaged_targets_is_shown_without_them(scenes: Path, tmp_path: Path) -> None:
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
        for file in sorted((scenes / name).iterdir())[:2]:
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
    (tmp_path / "masks" / "000.png").write_bytes(b"no mask")
    augment = gpuaug.Augment(crop=gpuaug.Resize(32))
    source, faults = gpuaug.MaskFolderSource(tmp_path), gpuaug.Faults(policy="blank")
    settings = {"targets": SEGMENTATION, "augment": augment, "faults": faults, "num_workers": 0, "device": "cpu"}
    with gpuaug.Loader(source, **settings) as loader:
        bad, good = preview.samples_of(loader, [0, 1], epochs=[0])
        rows = preview.rows_of([bad, good], [("epoch 0",)], Style.of(loader.source, loader.targets), cell=64)
    assert bad.original.annotations is None
    assert good.original.annotations is not None
    assert len(rows) == 2
    assert torch.tensor(bad.augmented[0].annotations.mask).eq(255).all()
