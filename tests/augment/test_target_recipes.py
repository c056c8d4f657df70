"""Recipes for masks, boxes and keypoints: composed, built, run, and compared with the code or formulas they cite."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import scenes
import torch
import torch.nn.functional as F
from conftest import ROOT
from omegaconf import OmegaConf
from PIL import Image
from test_photometric import mmseg
from test_target_crops import mmseg_corner, torchvisions
from torch import Tensor

import gpuaug
from gpuaug.augment.parameters import Chosen
from gpuaug.augment.recipe import Drawn

FOLDER = ROOT / "conf" / "gpuaug" / "augment"
TRAIN = [
    "seg_torchvision", "seg_ade20k", "seg_cityscapes", "seg_voc", "det_hflip", "det_ssd", "det_rtdetr", "det_lsj",
    "det_detr", "pose_rcnn", "seg_copy_paste",
]  # fmt: skip
# these two work only in a loader: see tests/loader/test_mosaic_batches.py, tests/augment/test_person_crop.py
COMBINED, PERSON = ["det_yolo", "det_yolox", "det_rtmdet"], ["pose_hrnet", "pose_rtmpose"]
LOADED = [*COMBINED, *PERSON, *(f"{name}_eval" for name in PERSON)]
ALL = sorted([*TRAIN, *(f"{name}_eval" for name in [*TRAIN, *COMBINED])])
SIZES = {
    "seg_torchvision": (480, 480), "seg_ade20k": (512, 512), "seg_cityscapes": (512, 1024), "seg_voc": (512, 512),
    "det_hflip": (800, 1088), "det_ssd": (300, 300), "det_rtdetr": (640, 640), "det_lsj": (1024, 1024),
    "det_detr": (800, 1066), "det_detr_eval": (800, 1066), "pose_rcnn": (800, 1088),
    "seg_torchvision_eval": (520, 693), "seg_ade20k_eval": (512, 682),
    "seg_cityscapes_eval": (1024, 1365), "seg_voc_eval": (512, 682), "det_hflip_eval": (800, 1088),
    "det_ssd_eval": (300, 300), "det_rtdetr_eval": (640, 640), "det_lsj_eval": (1024, 1024),
    "pose_rcnn_eval": (800, 1088), "det_yolo_eval": (640, 640),
    "det_yolox_eval": (640, 640), "det_rtmdet_eval": (640, 640),
    "seg_copy_paste": (1024, 1024), "seg_copy_paste_eval": (1024, 1024),
}  # fmt: skip
HEIGHT, WIDTH, COUNT = 150, 200, 6
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
LEVEL = 1.01 / 255  # resizing on uint8 and on floats may differ by one level
RULES = gpuaug.Targets(masks=gpuaug.Masks(), boxes=gpuaug.Boxes(), keypoints=gpuaug.Keypoints(flip=(0, 2, 1)))


@dataclass
class Scenes:
    """Decoded scenes: uint8 [n, 3, H, W], uint8 [n, H, W], and per image [k, 4], [k], [k, 3, 3]."""

    folder: Path
    images: Tensor
    masks: Tensor
    boxes: list[np.ndarray]
    labels: list[np.ndarray]
    keypoints: list[np.ndarray]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    folder = scenes.write(tmp_path_factory.mktemp("scenes"), count=COUNT, size=(HEIGHT, WIDTH), things=5)

    def stack(kind: str, ending: str) -> Tensor:
        return torch.stack([torch.tensor(np.array(Image.open(p))) for p in sorted((folder / kind).glob(f"*{ending}"))])

    coco = json.loads((folder / "instances.json").read_text())
    own = [[a for a in coco["annotations"] if a["image_id"] == image["id"]] for image in coco["images"]]
    xywh = [np.array([a["bbox"] for a in some]) for some in own]
    boxes = [np.concatenate([b[:, :2], b[:, :2] + b[:, 2:]], axis=1).astype(np.float32).astype(float) for b in xywh]
    labels = [np.array([a["category_id"] // 10 - 1 for a in some]) for some in own]
    points = [np.array([a["keypoints"] for a in some]).reshape(-1, 3, 3) for some in own]
    images = stack("images", ".jpg").permute(0, 3, 1, 2).contiguous()
    return Scenes(folder, images, stack("masks", ".png"), boxes, labels, points)


@cache
def recipe(name: str, *overrides: str) -> gpuaug.Augment:
    return gpuaug.build(gpuaug.compose("train", ["source.root=.", f"augment={name}", *overrides]).augment)


@dataclass
class Row:
    """One sample of a batch: its number, what the recipe drew for it, and what came out."""

    number: int
    u: np.ndarray
    chosen: dict[str, Chosen]
    drawn: Drawn
    image: Tensor
    mask: Tensor
    target: dict[str, Tensor]

    @property
    def flipped(self) -> bool:
        return bool(self.chosen["flip"].choice[self.number, 0] == 0)

    def distortion(self) -> dict[str, Any]:
        """Parameters of torchvision's RandomPhotometricDistort."""
        chosen = self.chosen["distort"]
        on = chosen.choice[self.number] == 0
        names = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")
        made = (on[0], on[1] or on[4], on[2], on[3])
        params: dict[str, Any] = {
            name: float(chosen.params[0][0][name][self.number]) if use else None
            for name, use in zip(names, made, strict=True)
        }
        order = torch.from_numpy(chosen.params[5][0]["channels"][self.number])
        return params | {"contrast_before": bool(on[1]), "channel_permutation": order if on[5] else None}


def rows(made: gpuaug.Augment, given: Scenes, *, seed: int = 0) -> Iterator[Row]:
    """Run a recipe on all scenes, and yield every sample."""
    images, targets = made(
        given.images,
        masks=given.masks,
        boxes=given.boxes,
        labels=given.labels,
        keypoints=given.keypoints,
        targets=RULES,
        seed=seed,
    )
    drawn = made.draw(seed=seed, epoch=0, indices=range(COUNT))
    (choices,) = made.choose(drawn, [tuple(images.shape[2:])])
    chosen = {p.name: c for p, c in zip(made.prepared, choices, strict=True)}
    split = targets.as_torchvision(first_label=0)
    for k in range(COUNT):
        yield Row(k, drawn.uniforms["", 0, "crop"][k], chosen, drawn, images[k], targets.masks[k], split[k])


def normalized(image: Tensor) -> Tensor:
    """Float [3, H, W] from 0..255."""
    return (image / 255 - MEAN[:, None, None]) / STD[:, None, None]


def padded(image: Tensor, size: tuple[int, int], fill: Any) -> Tensor:
    """[C, h, w] at the top left of a canvas of at least ``size``, filled with one value per channel."""
    h, w = image.shape[1:]
    canvas = torch.tensor(fill).to(image).reshape(-1, 1, 1).repeat(1, max(size[0], h), max(size[1], w))
    canvas[:, :h, :w] = image
    return canvas


def nearly_equal_masks(found: Tensor, want: Tensor) -> None:
    assert (found != want).float().mean() < 0.002  # where the nearest pixel is a tie


# --- files


def test_every_recipe_has_an_evaluation_counterpart() -> None:
    files = sorted(file.stem for file in FOLDER.glob("*.yaml") if file.stem.partition("_")[0] in ("seg", "det", "pose"))
    assert files == sorted([*ALL, *LOADED])
    assert sorted(SIZES) == ALL
    for name in [*TRAIN, *COMBINED, *PERSON]:
        train, counterpart = recipe(name), recipe(f"{name}_eval")
        assert not counterpart.ops
        assert not sum(stream.count for stream in counterpart.draws)
        assert repr(train.normalize) == repr(counterpart.normalize)
        assert train.crop.interpolation == counterpart.crop.interpolation == "bilinear"


@pytest.mark.parametrize("name", [*ALL, *LOADED])
def test_a_file_writes_out_every_key_and_cites_its_source(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    first = text.splitlines()[0]
    assert any(
        cited in first
        for cited in (
            "torchvision",
            "mmsegmentation",
            "RT-DETR",
            "detectron2",
            "ultralytics",
            "YOLOX",
            "mmdetection",
            "mmpose",
            "detr",
        )
    ), first
    node = OmegaConf.create(text)
    if "defaults" in node:
        assert node.keys() == {"defaults"}
        return
    parts = [
        node,
        node.crop,
        *node.get("combine", {}).values(),
        *node.ops.values(),
        *([] if node.normalize is None else [node.normalize]),
    ]
    for part in parts:
        kind, _, cls = part._target_.rpartition(".")
        if kind == "gpuaug":
            # for clips and cameras, which no file has, and what few recipes need
            elsewhere = {"same_on_frame", "same_on_camera", "epochs", "sizes", "combine"} if cls == "Augment" else set()
            wanted = set(inspect.signature(getattr(gpuaug, cls)).parameters)
            assert wanted - elsewhere <= set(part) - {"_target_"} <= wanted


# --- runs

ONE_SIZE = {
    "det_rtdetr": ["augment.sizes=null"], "pose_rcnn": ["augment.crop.shorter=800"],
    "det_detr": ["augment.crop.shorter=800", "augment.crop.p=0"],
}  # fmt: skip


def loader(given: Scenes, name: str, *overrides: str) -> gpuaug.Loader:
    source = ["source=coco", f"source.annotations={given.folder}/instances.json", f"source.root={given.folder}/images"]
    kind = {"det": "detection", "pose": "pose"}.get(name.partition("_")[0], "segmentation")
    if kind == "segmentation":
        source = ["source=masks", f"source.root={given.folder}"]
    run = ["device=cpu", "num_workers=0", "prefetch=0", "batch_size=2", "limit_batches=1", "order=sequential"]
    config = "eval" if name.endswith("_eval") else "train"
    return gpuaug.build(gpuaug.compose(config, [*source, f"targets={kind}", f"augment={name}", *run, *overrides]))


@pytest.mark.parametrize("name", ALL)
def test_a_recipe_runs_at_its_size(given: Scenes, name: str) -> None:
    with loader(given, name, *ONE_SIZE.get(name, [])) as made:
        (batch,) = made
    assert batch.images.shape == (2, 3, *SIZES[name])
    assert batch.images.isfinite().all()
    assert batch.images.std() > 0.05
    assert batch.targets.size == SIZES[name]
    if name.startswith("seg"):
        assert batch.targets.masks.shape == (2, *SIZES[name])
        assert set(batch.targets.masks.unique().tolist()) <= {0, 1, 2, 3, 255}
    else:
        assert batch.targets.counts.sum() == len(batch.targets.boxes) > 0
        height, width = SIZES[name]
        assert (batch.targets.boxes <= torch.tensor([width, height, width, height])).all()
    if name.startswith("pose"):
        assert batch.targets.keypoints.shape[1:] == (3, 3)


@pytest.mark.parametrize("name", ALL)
def test_a_size_can_be_overridden_and_backends_agree(given: Scenes, name: str) -> None:
    found = []
    for backend in ("fused", "kornia"):
        size = ["augment.crop.size=96", *ONE_SIZE.get(name, [])]
        with loader(given, name, *size, f"augment.backend={backend}") as made:
            found += list(made)
    fused, kornia = found
    assert 96 in fused.images.shape[2:]
    assert ((fused.images - kornia.images).abs() > 1e-4).float().mean() < 1e-3
    for part in ("masks", "boxes", "labels", "keypoints", "matrices"):
        a, b = getattr(fused.targets, part), getattr(kornia.targets, part)
        assert (a is None and b is None) or torch.equal(a, b), part


# --- segmentation


def test_seg_torchvision_is_resize_pad_crop_and_flip(given: Scenes, v2: ModuleType) -> None:
    made, sides = recipe("seg_torchvision"), set()
    exact = v2.InterpolationMode.NEAREST_EXACT
    for row in rows(made, given):
        first, *at = row.u.astype(np.float64).tolist()
        size = 260 + min(int(first * 781), 780)  # random.randint(260, 1040)
        sides.add(size < 480)
        image = v2.Resize(size)(given.images[row.number])
        mask = v2.Resize(size, interpolation=exact)(given.masks[row.number][None])
        image, mask = padded(image, (480, 480), (0, 0, 0)), padded(mask, (480, 480), 255)
        corner = [int(value * (n - 480 + 1)) for value, n in zip(at, image.shape[1:], strict=True)]
        image, mask = (v2.functional.crop(part, *corner, 480, 480) for part in (image, mask))
        if row.flipped:
            image, mask = (v2.functional.hflip(part) for part in (image, mask))
        assert ((row.image - normalized(image)) * STD[:, None, None]).abs().max() <= LEVEL
        nearly_equal_masks(row.mask, mask[0])
    assert sides == {False, True}  # padded, and not padded


@pytest.mark.parametrize(
    ("name", "base", "size"),
    [
        ("seg_ade20k", (2048, 512), (512, 512)),
        ("seg_voc", (2048, 512), (512, 512)),
        ("seg_cityscapes", (2048, 1024), (512, 1024)),
    ],
)
def test_mmsegmentations_pipeline_written_out(given: Scenes, name: str, base: Any, size: Any) -> None:
    made, flips = recipe(name, "~augment.ops.distort"), set()
    assert (made.crop.cat_max_ratio, made.crop.ignore) == (0.75, 255)
    for row in rows(made, given):
        flips.add(row.flipped)
        ratio = float(row.u[0]) * (2.0 - 0.5) + 0.5
        scale = [int(side * ratio) for side in base]
        factor = min(max(scale) / max(HEIGHT, WIDTH), min(scale) / min(HEIGHT, WIDTH))
        sides = [int(side * factor + 0.5) for side in (HEIGHT, WIDTH)]
        image = F.interpolate(given.images[row.number][None], size=sides, mode="bilinear", antialias=True)[0]
        mask = given.masks[row.number].numpy()
        y, x = mmseg_corner(row.u, mask, made.crop, sides)
        mask = torch.from_numpy(np.array(Image.fromarray(mask).resize(sides[::-1], Image.Resampling.NEAREST)))[None]
        image, mask = (part[:, y : y + size[0], x : x + size[1]] for part in (image, mask))
        whole = padded(normalized(image), size, (0.0, 0.0, 0.0))  # the mean color, which `fill` rounds
        mask = padded(mask, size, 255)
        if row.flipped:
            whole, mask = whole.flip(2), mask.flip(2)
        assert ((row.image - whole) * STD[:, None, None]).abs().max() <= LEVEL
        nearly_equal_masks(row.mask, mask[0])
    assert flips == {False, True}


def test_distortion_of_colors_is_mmsegmentations(given: Scenes) -> None:
    made = recipe("seg_ade20k", "augment.crop.size=24")
    still = recipe("seg_ade20k", "augment.crop.size=24", "~augment.ops.distort", "augment.normalize=null")
    for row, plain in zip(rows(made, given), rows(still, given), strict=True):
        p = row.distortion()
        values = [p[f"{n}_factor"] for n in ("brightness", "contrast", "saturation", "hue")]
        names = dict(zip(("brightness", "contrast", "saturation", "hue"), values, strict=True))
        if names["brightness"] is not None:
            names["brightness"] -= 1  # Kornia's additive brightness adds `factor - 1`
            assert abs(names["brightness"]) <= 32 / 255
        want = mmseg(plain.image * 255, {**names, "early": p["contrast_before"], "permutation": None})
        found = row.image.permute(1, 2, 0) * STD + MEAN
        assert np.abs(found.numpy() - want).max() < 1e-5


@pytest.mark.parametrize(
    ("name", "size", "limit"),
    [
        ("seg_torchvision_eval", 520, None),
        ("seg_ade20k_eval", 512, 2048),
        ("seg_voc_eval", 512, 2048),
        ("seg_cityscapes_eval", 1024, 2048),
    ],
)
def test_evaluation_of_segmentation_is_torchvisions_resize(
    given: Scenes, v2: ModuleType, name: str, size: int, limit: int | None
) -> None:
    made, theirs = recipe(name), v2.Resize(size, max_size=limit)
    for height, width in ((HEIGHT, WIDTH), (HEIGHT, 33), (20, WIDTH)):
        image = given.images[:1, :, :height, :width].contiguous()
        want = theirs(image)
        assert limit is None or max(want.shape) <= limit
        assert ((made(image)[0] - normalized(want[0])) * STD[:, None, None]).abs().max() <= LEVEL


# --- detection


def boxes_of(row: Row, given: Scenes) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(given.boxes[row.number]), torch.from_numpy(given.labels[row.number])


def kept(boxes: Tensor) -> Tensor:
    """SanitizeBoundingBoxes(min_size=1, min_area=1)."""
    w, h = (boxes[:, 2:] - boxes[:, :2]).T
    return (w >= 1) & (h >= 1) & (w * h >= 1)


@pytest.mark.parametrize(("name", "size", "p"), [("det_ssd", 300, 1.0), ("det_rtdetr", 640, 0.8)])
def test_ssd_and_rtdetr_are_torchvisions_classes(
    given: Scenes, v2: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, size: int, p: float
) -> None:
    from torchvision import tv_tensors

    made, seen = recipe(name), set()
    assert (made.crop.p, made.crop.zoom_p, made.crop.zoom_out) == (p, 0.5, (1.0, 4.0))
    distort = v2.RandomPhotometricDistort()
    fill = made.crop.fill if name == "det_ssd" else (0, 0, 0)
    for seed in range(3):
        for row in rows(made, given, seed=seed):
            at = (row.number, (HEIGHT, WIDTH), given.boxes[row.number], monkeypatch)
            top, left, height, width, _ = torchvisions(v2, made.crop, row.drawn, made, *at)
            boxes, labels = boxes_of(row, given)
            centre = (boxes[:, :2] + boxes[:, 2:]) / 2
            low, high = torch.tensor([left, top]), torch.tensor([left + width, top + height])
            inside = ((low < centre) & (centre < high)).all(dim=1)
            border = [max(-left, 0), max(-top, 0), max(left + width - WIDTH, 0), max(top + height - HEIGHT, 0)]
            parts = [
                tv_tensors.Image(given.images[row.number]),
                tv_tensors.BoundingBoxes(boxes[inside], format="XYXY", canvas_size=(HEIGHT, WIDTH)),
            ]
            for k, part in enumerate(parts):
                part = v2.functional.pad(part, border, fill=list(map(float, fill)))
                part = v2.functional.crop(part, max(top, 0), max(left, 0), height, width)
                parts[k] = v2.Resize((size, size))(part)
                parts[k] = v2.functional.hflip(parts[k]) if row.flipped else parts[k]
            image = distort.transform(parts[0].float() / 255, row.distortion())
            keep = kept(parts[1])
            assert row.target["labels"].tolist() == labels[inside][keep].tolist()
            seen.add(any(border))
            off = (row.target["boxes"] - parts[1][keep]).abs()
            difference = (row.image - image).abs()
            if any(border):  # the edges of the image are rounded to whole pixels of the output
                assert (off <= 1).all()
                assert difference.mean() < 0.05
            else:
                assert (off <= 1e-4).all()
                assert difference.mean() < 0.2 * LEVEL
                assert difference.max() < 0.02
    assert seen == {False, True}


def test_det_lsj_is_scale_jitter_and_fixed_size_crop(
    given: Scenes, v2: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, larger = recipe("det_lsj"), set()
    for row in rows(made, given, seed=2):
        u = torch.from_numpy(row.u)
        monkeypatch.setattr(torch, "rand", lambda n, u=u: u[:1])
        sides = v2.ScaleJitter((1024, 1024), (0.1, 2.0)).make_params([given.images[row.number]])["size"]
        monkeypatch.undo()
        larger.add(max(sides) > 1024)
        image = v2.Resize(sides)(given.images[row.number])
        boxes, labels = boxes_of(row, given)
        boxes = boxes * torch.tensor([sides[1] / WIDTH, sides[0] / HEIGHT]).double().repeat(2)
        y, x = (int(max(side - 1024, 0) * u[1]) for side in sides)
        image = padded(image[:, y : y + 1024, x : x + 1024], (1024, 1024), (123, 117, 104))
        boxes = (boxes - torch.tensor([x, y, x, y])).clamp(0, 1024)
        if row.flipped:
            image = image.flip(2)
            boxes = torch.stack([1024 - boxes[:, 2], boxes[:, 1], 1024 - boxes[:, 0], boxes[:, 3]], dim=1)
        assert (row.image - image / 255).abs().max() <= LEVEL
        assert row.target["labels"].tolist() == labels[kept(boxes)].tolist()
        assert (row.target["boxes"] - boxes[kept(boxes)]).abs().max() <= 1e-4
    assert larger == {False, True}


@pytest.mark.parametrize("name", ["det_hflip", "det_hflip_eval", "pose_rcnn", "pose_rcnn_eval"])
def test_letterboxes_are_the_resizing_of_torchvisions_models(given: Scenes, v2: ModuleType, name: str) -> None:
    from torchvision.models.detection.transform import _resize_image_and_masks, resize_boxes, resize_keypoints

    made = recipe(name)
    choices = (640, 672, 704, 736, 768, 800) if name == "pose_rcnn" else (800,)
    largest = [0, 0]
    for row in rows(made, given):
        shorter = choices[int(row.u[0] * len(choices)) if len(row.u) else 0]
        float_image = given.images[row.number] / 255
        image, _ = _resize_image_and_masks(float_image, shorter, 1333)
        size = tuple(image.shape[1:])
        assert size == (math.floor(HEIGHT * (shorter / HEIGHT)), math.floor(WIDTH * (shorter / HEIGHT)))
        boxes, labels = boxes_of(row, given)
        boxes = resize_boxes(boxes, [HEIGHT, WIDTH], list(size))
        points = torch.from_numpy(given.keypoints[row.number].copy()).double()
        points[..., :2] += 0.5  # edges; index i is the centre of pixel i
        points = resize_keypoints(points, [HEIGHT, WIDTH], list(size))
        largest = [max(pair) for pair in zip(largest, size, strict=True)]
        if "flip" in row.chosen and row.flipped:  # before the padding, as there
            image, width = image.flip(2), size[1]
            boxes = torch.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], dim=1)
            points[..., 0] = width - points[..., 0]
            points = points[:, [0, 2, 1]]
        canvas = padded(image, tuple(row.image.shape[1:]), (124 / 255, 116 / 255, 104 / 255))
        points[..., :2] -= 0.5
        points[points[..., 2] == 0] = 0
        assert (row.image - canvas).abs().max() <= LEVEL
        assert row.target["labels"].tolist() == labels.tolist()
        assert (row.target["boxes"] - boxes).abs().max() <= 1e-4
        assert (row.target["keypoints"] - points).abs().max() <= 1e-4
    assert list(row.image.shape[1:]) == [math.ceil(side / 32) * 32 for side in largest]


def test_detrs_crop_is_that_of_the_authors(given: Scenes, v2: ModuleType) -> None:
    """The authors resize, crop and resize again; one resize of whole source pixels differs by less than a pixel."""
    made, scales, cropped = recipe("det_detr", "augment.normalize=null"), list(range(480, 801, 32)), 0
    for seed in range(6):
        for row in rows(made, given, seed=seed):
            p, before, *part, shorter = row.u.tolist()
            at, size = (0, 0), (HEIGHT, WIDTH)
            if p < 0.5:
                cropped += 1
                short = (400, 500, 600)[int(before * 3)]
                whole = short, int(short * WIDTH / HEIGHT)
                sides = [384 + int(v * (min(side, 600) - 384 + 1)) for v, side in zip(part[:2], whole, strict=True)]
                start = [int(v * (side - n + 1)) for v, side, n in zip(part[2:], whole, sides, strict=True)]
                scale = [n / side for n, side in zip((HEIGHT, WIDTH), whole, strict=True)]
                at = tuple(round(n * s) for n, s in zip(start, scale, strict=True))
                size = tuple(max(round(n * s), 1) for n, s in zip(sides, scale, strict=True))
                assert max(abs(n * s - a) for n, s, a in zip(start, scale, at, strict=True)) <= 0.5
            given_size, (h, w) = (tuple(sides) if p < 0.5 else size), size
            out = authors_size(given_size, scales[int(shorter * len(scales))])
            image = given.images[row.number][:, at[0] : at[0] + h, at[1] : at[1] + w]
            image = v2.functional.resize(image, list(out), antialias=True)
            boxes, labels = boxes_of(row, given)
            boxes = (boxes - torch.tensor([*at[::-1], *at[::-1]])) * torch.tensor([out[1] / w, out[0] / h] * 2)
            if row.flipped:
                image = image.flip(2)
                boxes = torch.stack([out[1] - boxes[:, 2], boxes[:, 1], out[1] - boxes[:, 0], boxes[:, 3]], dim=1)
            boxes = boxes.clamp(torch.zeros(4), torch.tensor([*out[::-1], *out[::-1]]))
            canvas = padded(image, tuple(row.image.shape[1:]), (124, 116, 104))
            assert (row.image - canvas / 255).abs().max() <= LEVEL
            assert row.target["labels"].tolist() == labels[kept(boxes)].tolist()
            assert (row.target["boxes"] - boxes[kept(boxes)]).abs().max() <= 1e-3
    assert 8 < cropped < 28


def authors_size(size: tuple[int, ...], shorter: int, longest: int = 1333) -> tuple[int, int]:
    """DETR's get_size_with_aspect_ratio."""
    h, w = size
    if max(h, w) / min(h, w) * shorter > longest:
        shorter = round(longest * min(h, w) / max(h, w))
    return (shorter, int(shorter * w / h)) if h <= w else (int(shorter * h / w), shorter)


def test_flips_leave_images_at_the_top_left_and_the_pixel_mask_is_theirs(given: Scenes) -> None:
    for name in ("det_detr", "pose_rcnn", "det_lsj"):
        seen = set()
        with loader(given, name, "limit_batches=null", "batch_size=3", "augment.crop.fill=7") as made:
            for batch in [*made, *made, *made]:
                images, t = batch.images, batch.targets
                empty = torch.tensor(7 / 255)
                if name == "det_detr":
                    empty = ((7 / 255 - MEAN) / STD).view(1, 3, 1, 1)
                shown = ((images - empty).abs() > 1e-3).any(dim=1).long()
                mask = t.pixel_mask()
                assert mask.shape == shown.shape
                assert (mask >= shown).all()
                assert (mask - shown).float().mean() < 0.01
                seen |= {tuple(row) for row in t.covered[:, :2].tolist()}
                if name == "det_detr":
                    assert {*t.covered.amax(dim=0)[2:].tolist()} == {*images.shape[2:]}
        assert (seen == {(0, 0)}) == (name != "det_lsj")


def test_evaluation_of_detection(given: Scenes, v2: ModuleType) -> None:
    for name, size in (("det_ssd_eval", 300), ("det_rtdetr_eval", 640)):
        want = v2.Resize((size, size))(given.images)
        assert (recipe(name)(given.images) - want / 255).abs().max() <= LEVEL
    fitted = recipe("det_lsj_eval")(given.images)  # ResizeShortestEdge(1024, max_size=1024): 768 x 1024
    want = v2.Resize((768, 1024))(given.images)
    assert (fitted[:, :, :768] - want / 255).abs().max() <= LEVEL
    assert (fitted[:, :, 768:] == torch.tensor([124, 116, 104])[:, None, None] / 255).all()


def test_overrides_that_the_files_name(given: Scenes, v2: ModuleType) -> None:
    for row in rows(recipe("det_rtdetr").at(71), given):  # the last epoch
        want = v2.Resize((640, 640))(given.images[row.number]) / 255
        assert (row.image - (want.flip(2) if row.flipped else want)).abs().max() <= LEVEL
    sides = "augment.crop.shorter=[480,512,544,576,608,640,672,704,736,768,800]"
    assert sides in (FOLDER / "det_hflip.yaml").read_text()
    assert recipe("det_hflip", sides).crop.shorter == tuple(range(480, 801, 32))
