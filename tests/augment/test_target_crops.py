"""Crops for segmentation and detection against torchvision's classes and mmsegmentation's formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_crop import arrays, uniforms, valid

import gpuaug
from gpuaug.augment.recipe import Drawn
from gpuaug.batch import CropWindows
from gpuaug.errors import ConfigError

SIDES = [(375, 500), (500, 333), (1, 1), (1, 700), (900, 1), (2, 3), (37, 41), (2000, 3000), (511, 513)]
some = settings(max_examples=40, deadline=None)


@dataclass
class Objects:
    """Boxes of a batch, as a run gives them."""

    boxes: np.ndarray
    sample: np.ndarray


def random_objects(sides: Any, seed: int, most: int = 8) -> Objects:
    """Up to ``most`` boxes in each image; some images have none."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, most + 1, len(sides))
    sample = np.repeat(np.arange(len(sides)), counts)
    size = np.array(sides, dtype=np.float64)[sample][:, [1, 0]]
    corners = np.sort(rng.random((len(sample), 2, 2)), axis=1) * size[:, None]
    return Objects(corners.reshape(-1, 4), sample)


def only(objects: Objects, row: int) -> Objects:
    own = objects.sample == row
    return Objects(objects.boxes[own], np.zeros(own.sum(), dtype=np.int64))


# --- random scale


def test_shorter_side_is_that_of_torchvisions_references(v2: ModuleType) -> None:
    from torchvision.transforms.functional import _compute_resized_output_size

    crop = gpuaug.RandomScaleCrop((480, 400), base=520)
    h, w = arrays(SIDES)
    for seed in range(20):
        u = uniforms(crop, len(h), seed)
        found = crop.windows(u, h, w)
        valid(found, h, w)
        assert (found.window == np.stack([0 * h, 0 * w, h, w], axis=1)).all()
        for k, (first, row, column) in enumerate(u.astype(np.float64).tolist()):
            short = 260 + min(int(first * 781), 780)  # random.randint(260, 1040)
            sides = _compute_resized_output_size((int(h[k]), int(w[k])), [short])
            assert found.resized[k].tolist() == list(sides)
            # RandomCrop.get_params of the image after pad_if_smaller
            spare = [max(a, b) - b for a, b in zip(sides, (480, 400), strict=True)]
            at = [min(int(value * (n + 1)), n) for value, n in zip((row, column), spare, strict=True)]
            assert (-found.offset[k]).tolist() == at


@pytest.mark.parametrize("base", [(2048, 512), (512, 2048), (2048, 1024), (7, 5)])
def test_limits_of_two_sides_are_mmcvs(base: tuple[int, int]) -> None:
    crop = gpuaug.RandomScaleCrop(512, base=base)
    h, w = arrays(SIDES)
    for seed in range(20):
        u = uniforms(crop, len(h), seed)
        found = crop.windows(u, h, w)
        valid(found, h, w)
        for k, first in enumerate(u[:, 0].astype(np.float64).tolist()):
            ratio = first * (2.0 - 0.5) + 0.5
            scale = [int(side * ratio) for side in base]
            factor = min(max(scale) / max(h[k], w[k]), min(scale) / min(h[k], w[k]))
            assert found.resized[k].tolist() == [max(int(side * factor + 0.5), 1) for side in (h[k], w[k])]


def test_large_scale_jitter_is_torchvisions(v2: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    crop = gpuaug.RandomScaleCrop(1024, scale=(0.1, 2.0), base=None, anchor="diagonal", fill=128)
    h, w = arrays(SIDES)
    for seed in range(20):
        u = uniforms(crop, len(h), seed)
        found = crop.windows(u, h, w)
        valid(found, h, w)
        assert found.fill == 128
        for k in range(len(h)):
            monkeypatch.setattr(torch, "rand", lambda n, first=u[k, :1]: torch.from_numpy(first))
            image = torch.zeros(3, 1, 1).expand(3, h[k], w[k])
            sides = v2.ScaleJitter((1024, 1024), (0.1, 2.0)).make_params([image])["size"]
            monkeypatch.undo()
            assert found.resized[k].tolist() == [max(side, 1) for side in sides]
            r = torch.from_numpy(u[k, 1:2])  # FixedSizeCrop of the detection references
            assert (-found.offset[k]).tolist() == [int(max(side - 1024, 0) * r) for side in sides]


def test_pixels_are_those_of_resize_pad_and_crop(photo_batch: torch.Tensor) -> None:
    recipe = gpuaug.Augment(crop=gpuaug.RandomScaleCrop((40, 70), base=50, fill=9))
    made = (recipe(photo_batch, seed=3) * 255).round().to(torch.uint8)
    drawn = recipe.draw(seed=3, epoch=0, indices=range(8))
    (found,) = recipe.windows(drawn, np.full(8, 64), np.full(8, 48))
    for k, image in enumerate(photo_batch.permute(0, 3, 1, 2).contiguous()):
        size = tuple(found.resized[k].tolist())
        whole = F.interpolate(image[None], size=size, mode="bilinear", antialias=True)[0]
        padded = F.pad(whole, (0, max(70 - size[1], 0), 0, max(40 - size[0], 0)), value=9)
        y, x = (-found.offset[k]).tolist()
        assert torch.equal(made[k], padded[:, y : y + 40, x : x + 70])


def mmseg_corner(u: np.ndarray, mask: np.ndarray, crop: gpuaug.RandomScaleCrop, sides: list[int]) -> list[int]:
    """``RandomCrop.crop_bbox`` of mmsegmentation on the resized mask, its random numbers replaced."""
    rows, columns = (((2 * np.arange(m) + 1) * n) // (2 * m) for m, n in zip(sides, mask.shape, strict=True))
    mask = mask[rows][:, columns]
    numbers = iter(u[1:].astype(np.float64).tolist())

    def box() -> list[int]:
        return [int(next(numbers) * (max(n - m, 0) + 1)) for n, m in zip(sides, crop.size, strict=True)]

    at = box()
    for _ in range(10):
        labels, count = np.unique(mask[at[0] : at[0] + crop.size[0], at[1] : at[1] + crop.size[1]], return_counts=True)
        count = count[labels != crop.ignore]
        if len(count) > 1 and np.max(count) / np.sum(count) < crop.cat_max_ratio:
            break
        at = box()
    return at


def patches(rng: np.random.Generator, shape: tuple[int, int], dtype: Any) -> np.ndarray:
    """A mask of large areas: a class, or 255."""
    mask = np.full(shape, rng.integers(0, 4), dtype=dtype)
    for _ in range(rng.integers(0, 5)):
        y, x = (int(rng.integers(0, n)) for n in shape)
        mask[y : y + 1 + shape[0] // 2, x : x + 1 + shape[1] // 3] = rng.choice([1, 2, 3, 255])
    return mask


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_a_class_must_not_cover_the_crop_as_in_mmsegmentation(dtype: Any) -> None:
    crop = gpuaug.RandomScaleCrop((32, 40), base=(80, 60), cat_max_ratio=0.75)
    assert crop.needs == {"masks"}
    rng = np.random.default_rng(0)
    sides = [(int(a), int(b)) for a, b in rng.integers(1, 120, (150, 2))]
    h, w = arrays(sides)
    masks = [patches(rng, shape, dtype) for shape in sides]
    u = uniforms(crop, len(h), 1)
    found = crop.windows(u, h, w, masks=masks)
    moved = 0
    for k in range(len(h)):
        assert (-found.offset[k]).tolist() == mmseg_corner(u[k], masks[k], crop, found.resized[k].tolist())
        alone = crop.windows(u[k : k + 1], h[k : k + 1], w[k : k + 1], masks=masks[k : k + 1])
        assert (alone.offset == found.offset[k]).all()
        moved += found.offset[k].tolist() != crop.windows(u, h, w, masks=[None] * len(h)).offset[k].tolist()
    assert moved > 30
    plain = gpuaug.RandomScaleCrop((32, 40), base=(80, 60))
    first = plain.windows(u[:, :3], h, w)
    assert (first.offset == crop.windows(u, h, w, masks=[None] * len(h)).offset).all()
    assert (first.resized == found.resized).all()


def test_masks_that_are_needed_must_be_there() -> None:
    recipe = gpuaug.Augment(crop=gpuaug.RandomScaleCrop(8, cat_max_ratio=0.75))
    with pytest.raises(ConfigError, match=r"`augment.crop` \(RandomScaleCrop\) needs the masks.*`cat_max_ratio: 1`"):
        recipe(torch.zeros(1, 3, 9, 9, dtype=torch.uint8), seed=0)


# --- letterbox


@pytest.mark.parametrize(
    ("shape", "size", "resized", "offset"),
    [
        ((480, 640), (640, 640), (480, 640), (80, 0)),
        ((1080, 1920), (640, 640), (360, 640), (140, 0)),
        ((333, 500), (640, 640), (426, 640), (107, 0)),
        ((500, 333), (640, 640), (640, 426), (0, 107)),
        ((375, 500), (101, 64), (48, 64), (26, 0)),  # one row more below
        ((1, 10_000), (640, 640), (1, 640), (319, 0)),
        ((1, 1), (7, 5), (5, 5), (1, 0)),
    ],
)
def test_letterbox(shape: Any, size: Any, resized: Any, offset: Any) -> None:
    h, w = arrays([shape])
    found = gpuaug.Letterbox(size).windows(None, h, w)
    assert found.window[0].tolist() == [0, 0, *shape]
    assert tuple(found.resized[0].tolist()) == resized
    assert tuple(found.offset[0].tolist()) == offset
    assert found.fill == 114
    corner = gpuaug.Letterbox(size, centre=False).windows(None, h, w)
    assert corner.offset[0].tolist() == [0, 0]
    small = gpuaug.Letterbox(size, upscale=False).windows(None, h, w)
    larger = shape[0] <= size[0] and shape[1] <= size[1]
    assert tuple(small.resized[0].tolist()) == (shape if larger else resized)


@some
@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([(800, 1333), (640, 1333), (7, 5), (100, 100)]))
def test_shorter_side_of_a_letterbox_is_that_of_torchvisions_detectors(h: int, w: int, limits: Any) -> None:
    """``_resize_image_and_masks``: interpolate by one factor, whose sides torch rounds down."""
    shorter, longer = limits
    found = gpuaug.Letterbox(longer, shorter=shorter, centre=False).windows(None, *arrays([(h, w)]))
    factor = min(shorter / min(h, w), longer / max(h, w))
    assert found.resized[0].tolist() == [max(math.floor(side * factor), 1) for side in (h, w)]
    assert found.offset[0].tolist() == [0, 0]
    assert found.window[0].tolist() == [0, 0, h, w]


def test_one_of_several_shorter_sides_is_drawn() -> None:
    crop = gpuaug.Letterbox(1000, shorter=[30, 50, 70])
    assert crop.count == 1
    assert gpuaug.Letterbox(1000, shorter=30).count == 0
    count = 9000
    found = crop.windows(uniforms(crop, count, 0), np.full(count, 100), np.full(count, 200))
    values, counts = np.unique(found.resized, axis=0, return_counts=True)
    assert values.tolist() == [[30, 60], [50, 100], [70, 140]]
    assert np.abs(counts - 3000).max() < 5 * math.sqrt(2000)
    kept = gpuaug.Letterbox(1000, shorter=30, upscale=False).windows(None, *arrays([(20, 40), (60, 90)]))
    assert kept.resized.tolist() == [[20, 40], [30, 45]]


# --- IoU crop


def windows_of(
    crop: gpuaug.RandomIoUCrop, sides: Any, objects: Objects, seed: int = 0
) -> tuple[CropWindows, Drawn, gpuaug.Augment]:
    recipe = gpuaug.Augment(crop=crop)
    drawn = recipe.draw(seed=seed, epoch=2, indices=range(10, 10 + len(sides)))
    (found,) = recipe.windows(drawn, *arrays(sides), objects=objects)
    return found, drawn, recipe


def torchvisions(
    v2: ModuleType,
    crop: gpuaug.RandomIoUCrop,
    drawn: Drawn,
    recipe: gpuaug.Augment,
    row: int,
    side: tuple[int, int],
    boxes: np.ndarray,
    patch: pytest.MonkeyPatch,
) -> tuple[int, int, int, int, int]:
    """top, left, height and width of the crop in pixels of the image, and the rounds: torchvision's own code."""
    from torchvision import tv_tensors

    u = drawn.uniforms["", 0, "crop"][row]
    image = torch.zeros(3, 1, 1).expand(3, *side)
    top = left = 0
    height, width = side
    if crop.zoom_out is not None and u[1] < np.float32(crop.zoom_p):
        fed = iter([torch.from_numpy(u[2:3]), torch.from_numpy(u[3:5])])
        patch.setattr(torch, "rand", lambda n: next(fed))
        left, top, right, bottom = v2.RandomZoomOut(0, crop.zoom_out).make_params([image])["padding"]
        patch.undo()
        height, width = top + height + bottom, left + width + right
    if not u[0] < np.float32(crop.p) or not len(boxes):
        return -top, -left, height, width, 0
    rounds, numbers, sizes = [-1], [np.zeros(0)], iter(())

    def randint(low: int, high: int, size: Any) -> torch.Tensor:
        rounds[0] += 1
        if rounds[0] == 16:
            raise StopIteration
        rows = np.array([row])
        numbers[0] = u if not rounds[0] else drawn.again(rounds[0], rows, view=recipe.views[0])[0]
        nonlocal sizes
        sizes = values(numbers[0][6:])
        return torch.tensor([int(numbers[0][5] * np.float32(high))])

    def values(trials: np.ndarray) -> Any:
        for k in range(crop.trials):
            size = torch.from_numpy(trials[4 * k : 4 * k + 2])
            yield size
            r = crop.min_scale + (crop.max_scale - crop.min_scale) * size
            if crop.min_aspect_ratio <= int(width * r[0]) / int(height * r[1]) <= crop.max_aspect_ratio:
                yield torch.from_numpy(trials[4 * k + 2 : 4 * k + 4])

    patch.setattr(torch, "randint", randint)
    patch.setattr(torch, "rand", lambda n: next(sizes))
    names = ("min_scale", "max_scale", "min_aspect_ratio", "max_aspect_ratio", "trials")
    theirs = v2.RandomIoUCrop(sampler_options=list(crop.sampler_options), **{n: getattr(crop, n) for n in names})
    moved = torch.from_numpy(boxes + np.array([left, top, left, top]))
    given = tv_tensors.BoundingBoxes(moved, format="XYXY", canvas_size=(height, width))
    try:
        made = theirs.make_params([tv_tensors.Image(torch.zeros(3, 1, 1).expand(3, height, width)), given])
    except StopIteration:
        made = {}
    finally:
        patch.undo()
    if made:
        top, left, height, width = made["top"] - top, made["left"] - left, made["height"], made["width"]
    else:
        top, left = -top, -left
    return top, left, height, width, rounds[0]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"zoom_out": None},
        {"zoom_out": None, "p": 0.5, "trials": 3},
        {"zoom_out": (1.5, 2.0), "zoom_p": 1.0, "sampler_options": [0.5, 0.9], "trials": 5},
        {"min_scale": 0.7, "min_aspect_ratio": 0.9, "max_aspect_ratio": 1.1, "sampler_options": (0.3, 1.0)},
    ],
)
def test_iou_crops_are_torchvisions(v2: ModuleType, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]) -> None:
    crop = gpuaug.RandomIoUCrop((320, 300), **more)
    rng = np.random.default_rng(0)
    sides = [(int(a), int(b)) for a, b in rng.integers(20, 800, (60, 2))]
    objects = random_objects(sides, 1)
    found, drawn, recipe = windows_of(crop, sides, objects)
    valid(found, *arrays(sides))
    rounds = []
    for row, side in enumerate(sides):
        boxes = objects.boxes[objects.sample == row]
        *want, number = torchvisions(v2, crop, drawn, recipe, row, side, boxes, monkeypatch)
        rounds.append(number)
        origin, extent = np.array(want[:2]), np.array(want[2:])
        start, stop = np.maximum(origin, 0), np.minimum(origin + extent, side)
        assert found.window[row].tolist() == [*start, *(stop - start)]
        # where the edges of the part lie on the canvas, to within half a pixel
        exact = [(edge - origin) * (320, 300) / extent for edge in (start, stop)]
        assert np.abs(found.offset[row] - exact[0]).max() <= 0.5 + 1e-9
        assert np.abs(found.offset[row] + found.resized[row] - exact[1]).max() <= (0.5 if min(side) > 30 else 1) + 1e-9
        if (start == origin).all() and (stop == origin + extent).all():
            assert found.offset[row].tolist() == [0, 0]
            assert found.resized[row].tolist() == [320, 300]
    assert max(rounds) >= 3


def test_a_samples_crop_does_not_depend_on_its_batch() -> None:
    crop = gpuaug.RandomIoUCrop(64, sampler_options=(0.7, 0.9), trials=4)  # many rounds
    sides = [s for s in SIDES if min(s) > 30] * 5
    objects = random_objects(sides, 3)
    found, _, recipe = windows_of(crop, sides, objects)
    mixed = np.random.default_rng(0).permutation(len(objects.sample))
    other, _, _ = windows_of(crop, sides, Objects(objects.boxes[mixed], objects.sample[mixed]))
    for name in ("window", "resized", "offset"):
        assert (getattr(found, name) == getattr(other, name)).all()
    for row, side in enumerate(sides):
        drawn = recipe.draw(seed=0, epoch=2, indices=[10 + row])
        (alone,) = recipe.windows(drawn, *arrays([side]), objects=only(objects, row))
        assert (alone.window[0] == found.window[row]).all()
        assert (alone.resized[0] == found.resized[row]).all()
        assert (alone.offset[0] == found.offset[row]).all()


def test_every_round_has_its_own_numbers_for_each_repeat_epoch_and_view() -> None:
    one = gpuaug.Augment(crop=gpuaug.RandomIoUCrop(8), copies=2)
    rows = np.array([1])
    seen = set()
    for epoch in (0, 1):
        for repeat in (0, 1):
            drawn = one.draw(seed=5, epoch=epoch, indices=[3, 4], repeats=np.array([0, repeat]))
            for view in one.views:
                seen.add(drawn.uniforms["", view.copy, "crop"][1].tobytes())
                for number in range(1, 4):
                    values = drawn.again(number, rows, view=view)
                    assert values.shape == (1, 166)
                    seen.add(values.tobytes())
    assert len(seen) == 2 * 2 * 2 * 4


def test_hostile_boxes_and_images() -> None:
    crop = gpuaug.RandomIoUCrop((50, 30), sampler_options=(0.0, 0.5))
    bad = [[math.nan] * 4, [-math.inf, 0, math.inf, 9], [9, 9, 2, 2], [-50, -50, -40, -40], [1e300, 0, 1e308, 1e308]]
    sides = [*SIDES, (0, 0)] * 20
    sample = np.repeat(np.arange(len(sides)), len(bad) + 1)
    boxes = np.array([*bad, [0, 0, 1, 1]] * len(sides))
    with np.errstate(all="raise", under="ignore"):
        found, _, _ = windows_of(crop, sides, Objects(boxes, sample))
    h, w = (np.maximum(n, 1) for n in arrays(sides))
    valid(found, h, w)
    only_outside = Objects(np.array([[300.0, 300, 400, 400]] * len(sides)), np.arange(len(sides)))
    found, _, _ = windows_of(crop, sides, only_outside)
    valid(found, h, w)


def test_a_box_outside_the_image_shows_no_pixel_of_it() -> None:
    crop = gpuaug.RandomIoUCrop(40, sampler_options=[0.0], zoom_out=(4.0, 4.0), zoom_p=1.0, trials=200)
    sides = [(30, 30)] * 200
    objects = Objects(np.array([[-2.0, -60, 32, -30]] * 200), np.arange(200))
    found, drawn, _ = windows_of(crop, sides, objects)
    shown = ((found.offset < 40) & (found.offset + found.resized > 0)).all(axis=1)
    assert 5 < (~shown).sum() < 195
    assert (found.offset[~shown] == 40).all()
    assert len(drawn.uniforms) == 1


def test_boxes_that_are_needed_must_be_there() -> None:
    recipe = gpuaug.Augment(crop=gpuaug.RandomIoUCrop(8))
    with pytest.raises(ConfigError, match=r"`augment.crop` \(RandomIoUCrop\) needs the boxes.*source with boxes"):
        recipe(torch.zeros(1, 3, 9, 9, dtype=torch.uint8), seed=0)
    assert recipe.crop.centres


# --- settings


def test_a_sample_without_size_disturbs_nobody() -> None:
    h, w = arrays([(375, 500), (0, 0), (333, 47)])
    objects = Objects(np.array([[9.0, 9, 90, 90]] * 2), np.array([0, 2]))
    for crop in (
        gpuaug.RandomScaleCrop(64),
        gpuaug.RandomScaleCrop(64, base=(90, 70), cat_max_ratio=0.5),
        gpuaug.Letterbox(64),
        gpuaug.RandomIoUCrop(64),
    ):
        u = uniforms(crop, 3, 0)
        masks = [np.eye(375, 500, dtype=np.uint8), None, np.eye(333, 47, dtype=np.uint8)]
        found = crop.windows(u, h, w, objects=objects, masks=masks)
        keep = [0, 2]
        moved = Objects(objects.boxes, np.array([0, 1]))
        alone = crop.windows(u[keep], h[keep], w[keep], objects=moved, masks=[masks[k] for k in keep])
        for name in ("window", "resized", "offset"):
            assert (getattr(found, name)[keep] == getattr(alone, name)).all()
        empty = Objects(np.zeros((0, 4)), np.zeros(0, dtype=np.int64))
        assert crop.windows(u[:0], h[:0], w[:0], objects=empty, masks=[]).window.shape == (0, 4)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: gpuaug.RandomScaleCrop(0), "`size` must be a positive int.*Found: 0"),
        (lambda: gpuaug.RandomScaleCrop(8, scale=(0, 2)), r"`scale` must satisfy 0 < min <= max <= 100. Found: \(0, 2"),
        (lambda: gpuaug.RandomScaleCrop(8, base=0), "`base` must be the shorter side.*Found: 0"),
        (lambda: gpuaug.RandomScaleCrop(8, base=(1, 2, 3)), r"`base` must be.*Found: \(1, 2, 3\)"),
        (lambda: gpuaug.RandomScaleCrop(8, base=1), "`base` times `scale` must be from 1 to.*base 1"),
        (lambda: gpuaug.RandomScaleCrop(8, base=400_000), "`base` times `scale` must be from 1 to.*base 400000"),
        (lambda: gpuaug.RandomScaleCrop(8, anchor="corner"), "`anchor` must be one of random, diagonal.*'corner'"),
        (lambda: gpuaug.RandomScaleCrop(8, cat_max_ratio=0), "`cat_max_ratio` must be above 0"),
        (lambda: gpuaug.RandomScaleCrop(8, cat_max_ratio=75), r"`cat_max_ratio` must be a number in \[0, 1\]"),
        (lambda: gpuaug.RandomScaleCrop(8, ignore=None), "`ignore` must be a whole number. Found: None"),
        (lambda: gpuaug.Letterbox(8, fill=256), "`fill`.*Found: 256"),
        (lambda: gpuaug.Letterbox(8, shorter=0), "`shorter` must be a whole number from 1 to.*Found: 0"),
        (lambda: gpuaug.Letterbox(8, shorter=[4, 5.5]), r"`shorter`.*Found: \[4, 5.5\]"),
        (lambda: gpuaug.Letterbox(8, centre=1), "`centre` must be true or false. Found: 1"),
        (lambda: gpuaug.RandomIoUCrop(8, min_scale=0.9, max_scale=0.5), "`min_scale` and `max_scale` must satisfy 0 <"),
        (lambda: gpuaug.RandomIoUCrop(8, sampler_options=[]), r"`sampler_options` must be a list.*Found: \[\]"),
        (lambda: gpuaug.RandomIoUCrop(8, sampler_options=["a"]), "`sampler_options` must be a number"),
        (lambda: gpuaug.RandomIoUCrop(8, trials=0), "`trials` must be a whole number from 1 to 1000. Found: 0"),
        (lambda: gpuaug.RandomIoUCrop(8, zoom_out=(0.5, 2)), r"`zoom_out` must be at least 1.*Found: \(0.5, 2\)"),
        (lambda: gpuaug.RandomIoUCrop(8, p=2), r"`p` must be a number in \[0, 1\]. Found: 2"),
    ],
)
def test_errors_say_what_was_found(make: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()
