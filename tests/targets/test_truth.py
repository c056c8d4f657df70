"""Targets against what can be measured in the pixels, through whole recipes: every crop and every moving operation."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from pictures import encode, png
from truth import CROPS, SIZES, Sample, batch_of, composed, measured, samples

import gpuaug

BACKENDS = ["fused", "kornia"]


def pairs(some: list[Sample], *, white: bool = False) -> list[tuple[bytes, gpuaug.Target]]:
    forms = ("PNG", "BMP")
    values = [np.full_like(s.pixels, 255) if white else s.pixels for s in some]
    return [(encode(v, forms[k % 2]), s.target()) for k, (v, s) in enumerate(zip(values, some, strict=True))]


def pushed_centroid(pixels: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Centroid (x, y) of [h, w] after a perspective: each pixel at its new place, with its new area."""
    y, x = np.mgrid[: pixels.shape[0], : pixels.shape[1]] + 0.5
    u, v, w = np.tensordot(matrix, np.stack([x, y, np.ones_like(x)]), 1)
    weight = np.where(pixels > 0, pixels / np.abs(w) ** 3, 0)
    return np.array([(u / w * weight).sum(), (v / w * weight).sum()]) / weight.sum()


def check_centroids(images: Any, white: Any, targets: Any, some: list[Sample], *, boxes: bool = True) -> int:
    """Compare keypoints and boxes with the blobs; returns how many blobs could be measured."""
    compared = 0
    for row, sample in enumerate(some):
        found = measured(images[row, 0].double().numpy(), white[row, 0].double().numpy())
        if found is None:
            continue
        own = (targets.sample == row).nonzero().flatten().tolist()
        assert len(own) == 1, f"row {row}: the blob is inside, but its object was dropped"
        matrix = targets.matrices[row].numpy()
        at = found[0]
        x, y, w = matrix @ [*sample.place, 1]
        mapped = np.array([x, y]) / w
        for point in targets.keypoints[own[0]].tolist():
            assert point[2] == 2
            np.testing.assert_allclose(point[:2], mapped - 0.5, atol=1e-4)
        if (matrix[2, :2] != 0).any():  # a perspective moves the centroid off the mapped centre
            np.testing.assert_allclose(at, pushed_centroid(sample.pixels[:, :, 0], matrix), atol=0.05)
        else:
            np.testing.assert_allclose(np.array(point[:2]) + 0.5, at, atol=0.05)
            box = targets.boxes[own[0]].double().numpy()
            if boxes:
                np.testing.assert_allclose((box[:2] + box[2:]) / 2, at, atol=0.05)
        if targets.masks is not None:  # the ellipse around the blob moves with it
            label = targets.masks[row].numpy() == 1
            v, u = np.nonzero(label)
            np.testing.assert_allclose([u.mean() + 0.5, v.mean() + 0.5], at, atol=0.6)
        compared += 1
    return compared


# --- 1: centroids


@pytest.mark.parametrize(("crop", "backend"), zip(CROPS, cycle(BACKENDS)))
def test_keypoint_and_box_are_where_the_blob_is(crop: str, backend: str) -> None:
    compared = 0
    for seed in range(3):
        sizes = SIZES[:1] if crop == "none" else None
        some = samples(12, seed, sizes)
        ops = composed(97 * seed + sum(map(ord, crop)))
        augment = gpuaug.Augment(crop=CROPS[crop](), ops=ops if seed else {}, backend=backend)
        batch, twin = (batch_of(pairs(some, white=w), augment, seed=seed) for w in (False, True))
        assert torch.equal(batch.targets.matrices, twin.targets.matrices)
        compared += check_centroids(batch.images, twin.images, batch.targets, some)
    assert compared >= 12, "too few blobs were inside"


# --- 2: extents


def extent(label: np.ndarray) -> np.ndarray:
    """(x1, y1, x2, y2) of the pixels that are True, in edges."""
    (v, u) = np.nonzero(label)
    return np.array([u.min(), v.min(), u.max() + 1, v.max() + 1], dtype=float)


def rectangles(count: int, seed: int, size: tuple[int, int] = (128, 160), grid: int = 1) -> list[Any]:
    """Masks with one filled box, whose edges are multiples of ``grid``."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        (x1, x2), (y1, y2) = (
            np.sort(rng.choice(np.arange(n // 6 // grid, n * 5 // 6 // grid), 2, replace=False)) * grid
            for n in size[::-1]
        )
        x2, y2 = max(x2, x1 + 8), max(y2, y1 + 8)
        mask = np.zeros(size, np.uint8)
        mask[y1:y2, x1:x2] = 1
        points = [[[x1, y1, 2], [x2, y1, 1], [x2, y2, 2]]]
        target = gpuaug.Target(mask=png(mask), boxes=[[x1, y1, x2, y2]], labels=[4], keypoints=points, size=size)
        made.append((encode(np.repeat(mask[:, :, None] * 255, 3, 2), "BMP"), target))
    return made


EXACT = {
    "nothing": (CROPS["none"], {}),
    "flips": (CROPS["none"], {"h": K.RandomHorizontalFlip(), "v": K.RandomVerticalFlip()}),
    "crop": (lambda: gpuaug.RandomCrop((100, 90), padding=(9, 30)), {"h": K.RandomHorizontalFlip()}),
    "center": (lambda: gpuaug.ResizeCenterCrop(128, (101, 91)), {"v": K.RandomVerticalFlip()}),
    "letterbox half": (lambda: gpuaug.Letterbox(80), {"h": K.RandomHorizontalFlip()}),
    "letterbox as it is": (lambda: gpuaug.Letterbox((170, 211), upscale=False), {}),
    "resize double": (lambda: gpuaug.Resize((256, 320)), {"v": K.RandomVerticalFlip()}),
    "turns": (lambda: gpuaug.RandomCrop(128), {"turn": K.RandomRotation90((0, 3), p=1.0)}),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_filled_box_has_exactly_its_extent(name: str) -> None:
    crop, ops = EXACT[name]
    rules = gpuaug.Targets(masks=gpuaug.Masks(fill=0), boxes=gpuaug.Boxes(), keypoints=gpuaug.Keypoints())
    for backend in BACKENDS:
        batch = batch_of(
            rectangles(16, 1, grid=2), gpuaug.Augment(crop=crop(), ops=ops, backend=backend), targets=rules
        )
        targets = batch.targets
        seen = 0
        for row, mask in enumerate(targets.masks.numpy()):
            own = targets.boxes[targets.sample == row].double().numpy()
            assert len(own) == (mask == 1).any()
            if len(own):
                np.testing.assert_allclose(own[0], extent(mask == 1), atol=1e-4 if name == "turns" else 0)
                seen += 1
            if name != "center":  # flips and whole pixels: the image is the mask
                inside = batch.images[row, 0].numpy()
                whole = (inside < 0.01) | (inside > 0.99)
                assert ((inside > 0.5) == (mask == 1))[whole].mean() > (0.97 if "double" in name else 0.999)
        assert seen >= 12


# --- 5: identities


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_flips_and_four_turns_are_the_identity(backend: str) -> None:
    source = rectangles(6, 2, (120, 120))
    rules = gpuaug.Targets(
        masks=gpuaug.Masks(), boxes=gpuaug.Boxes(), keypoints=gpuaug.Keypoints(flip=[2, 1, 0], pixel_centers=False)
    )
    still = batch_of(source, gpuaug.Augment(backend=backend), targets=rules)
    flips = [K.RandomHorizontalFlip(p=1.0), K.RandomVerticalFlip(p=1.0)]
    for ops in (
        {"a": flips[0], "b": K.RandomHorizontalFlip(p=1.0)},
        {"a": flips[1], "b": K.RandomVerticalFlip(p=1.0)},
        {"a": flips[0], "b": flips[1], "turn": K.RandomRotation90((2, 2), p=1.0)},
        {name: K.RandomRotation90((1, 1), p=1.0) for name in "abcd"},
        {name: K.RandomRotation90((-1, -1), p=1.0) for name in "abcd"},
    ):
        found = batch_of(source, gpuaug.Augment(ops=ops, backend=backend), targets=rules).targets
        assert torch.equal(found.masks, still.targets.masks)
        assert torch.allclose(found.boxes, still.targets.boxes, atol=1e-4)
        assert torch.allclose(found.keypoints, still.targets.keypoints, atol=1e-4)
    once = batch_of(source, gpuaug.Augment(ops={"a": flips[0]}, backend=backend), targets=rules).targets
    mirrored = still.targets.keypoints[:, [2, 1, 0]] * torch.tensor([-1.0, 1, 1]) + torch.tensor([120.0, 0, 0])
    assert torch.equal(once.keypoints, mirrored)  # pairs have swapped, with their visibility


# --- 7: the IoU crop


def test_an_iou_crop_keeps_the_objects_whose_centre_is_inside() -> None:
    rng, size = np.random.default_rng(0), (120, 160)
    source, boxes = [], []
    for k in range(40):
        corners = np.sort(rng.uniform(0, 1, (5, 2, 2)), axis=1) * size[::-1]
        boxes.append(corners.reshape(5, 4).astype(np.float32))
        target = {"boxes": boxes[-1], "labels": np.arange(5), "ids": np.arange(5) + 5 * k, "size": size}
        source.append((encode(np.full((*size, 3), 255, np.uint8), "BMP"), target))
    rules = gpuaug.Targets(boxes=gpuaug.Boxes(min_size=0, min_area=0))
    crop = gpuaug.RandomIoUCrop(100, zoom_out=(1.0, 3.0))
    batch = batch_of(source, gpuaug.Augment(crop=crop), targets=rules)
    targets, kept, dropped = batch.targets, 0, 0
    present = set(targets.ids.tolist())
    for row in range(40):
        for k, box in enumerate(boxes[row].astype(np.float64)):
            matrix = targets.matrices[row].numpy()
            (x1, y1, _), (x2, y2, _) = matrix @ [*box[:2], 1], matrix @ [*box[2:], 1]
            centre = np.array([(x1 + x2) / 2, (y1 + y2) / 2])
            inside = ((centre > 0) & (centre < 100)).all()
            assert (5 * row + k in present) == inside
            kept, dropped = kept + inside, dropped + (not inside)
            if inside:
                found = targets.boxes[(targets.ids == 5 * row + k).nonzero()[0, 0]]
                want = np.clip([x1, y1, x2, y2], 0, 100)
                np.testing.assert_allclose(found, want, atol=1e-3)
    assert kept > 40
    assert dropped > 40


# --- several views


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_view_and_copy_has_the_targets_of_its_own_image(backend: str) -> None:
    some = samples(10, 8)
    views = {
        "large": gpuaug.Augment(crop=CROPS["resized"](), ops=composed(1), copies=2, backend=backend),
        "small": gpuaug.Augment(crop=CROPS["letterbox"](), ops=composed(2), backend=backend),
        "iou": gpuaug.Augment(crop=CROPS["iou"](), ops=composed(3), copies=2, backend=backend),
    }
    for recipe in (gpuaug.MultiView(views=views), gpuaug.Augment(crop=CROPS["scale"](), ops=composed(4), copies=3)):
        batch, twin = (batch_of(pairs(some, white=w), recipe) for w in (False, True))
        assert len(batch.images) == len(batch.targets) == len(recipe.views)
        for images, white, targets in zip(batch.images, twin.images, batch.targets, strict=True):
            assert check_centroids(images, white, targets, some) >= 3
        first, second = batch.targets[:2]
        assert not torch.equal(first.matrices, second.matrices)
