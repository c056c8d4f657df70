"""Targets against what can be measured in the pixels, through whole recipes: every crop and every moving operation."""

from __future__ import annotations

from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from pictures import encode, png
from PIL import Image
from truth import ALL, CROPS, MOVES, SIZES, Sample, batch_of, composed, gaussian, measured, samples

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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("crop", CROPS)
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MOVES)
def test_a_decoded_batch_moves_as_its_blobs(name: str, backend: str) -> None:
    some = samples(10, 3, [(150, 170)])
    images = torch.from_numpy(np.stack([s.pixels for s in some]))
    given = {
        "masks": torch.from_numpy(np.stack([s.mask for s in some])),
        "boxes": [s.target().boxes for s in some],
        "keypoints": [s.target().keypoints for s in some],
    }
    compared = 0
    for crop in ("none", "padded", "resized"):
        recipe = gpuaug.Augment(crop=CROPS[crop](), ops={name: MOVES[name]()}, backend=backend)
        out, targets = recipe(images, **given, seed=1)
        white, _ = recipe(torch.full_like(images, 255), **given, seed=1)
        compared += check_centroids(out, white, targets, some)
    assert compared >= 8


@pytest.mark.parametrize("backend", BACKENDS)
def test_perspectives_in_compositions(backend: str) -> None:
    compared = 0
    for seed in range(4):
        some = samples(10, seed)
        ops = {"perspective": MOVES["perspective"](), **composed(seed, perspective=True, most=2)}
        augment = gpuaug.Augment(crop=gpuaug.Resize((150, 160)), ops=ops, backend=backend)
        batch, twin = (batch_of(pairs(some, white=w), augment) for w in (False, True))
        compared += check_centroids(batch.images, twin.images, batch.targets, some)
    assert compared >= 15


@pytest.mark.parametrize("exif", range(1, 9))
def test_turned_photographs_annotated_as_stored_and_as_shown(exif: int) -> None:
    """JPEGs with an EXIF orientation. Sizes tell which of the two the annotations are for, where they can."""
    tag = Image.Exif()
    tag[274] = exif
    stored = {2: np.s_[:, ::-1], 3: np.s_[::-1, ::-1], 4: np.s_[::-1]}.get(exif, np.s_[:])  # 5 to 8: as annotated
    rng = np.random.default_rng(exif)
    some, source, twins = [], [], []
    for _ in range(8):
        place = rng.uniform(0.4, 0.6, 2) * (150, 120)
        sample = Sample(gaussian((120, 150), place), place, np.zeros((120, 150), np.uint8))
        y, x = np.mgrid[:120, :150] + 0.5
        sample.mask[(x - place[0]) ** 2 + (y - place[1]) ** 2 < 196] = 1
        some.append(sample)
        options = {"quality": 100, "subsampling": 0, "exif": tag}
        source.append((encode(sample.pixels[stored].copy(), "JPEG", **options), sample.target()))
        twins.append((encode(np.full_like(sample.pixels, 255), "JPEG", **options), sample.target()))
    for crop in ("letterbox", "resized"):
        augment = gpuaug.Augment(crop=CROPS[crop](), ops=composed(exif))
        batch, twin = batch_of(source, augment), batch_of(twins, augment)
        if crop == "letterbox":
            assert (batch.targets.sizes == torch.tensor([150, 120] if exif > 4 else [120, 150])).all()
        assert check_centroids(batch.images, twin.images, batch.targets, some) >= 1


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


@pytest.mark.parametrize("resized", [False, True])
def test_a_warped_box_is_the_hull_of_its_mask(resized: bool) -> None:
    """Equal to 1 pixel, with 1 more for the rounding of a resize before the warp; never smaller than the mask."""
    limit, whole, seen = 2.0 if resized else 1.0, 0, 0
    ops_of = {
        "affine": lambda: K.RandomAffine(60.0, (0.1, 0.1), (0.8, 1.2), p=1.0),
        "rotation": lambda: K.RandomRotation(180.0, p=1.0),
        "both": lambda: K.RandomAffine(20.0, None, (0.8, 1.1), 5.0, p=1.0),
    }
    for seed, (name, make) in enumerate(ops_of.items()):
        crop = gpuaug.RandomResizedCrop((120, 130), scale=(0.5, 1)) if resized else gpuaug.RandomCrop((120, 150))
        ops = {name: make(), "flip": K.RandomHorizontalFlip()}
        rules = gpuaug.Targets(masks=gpuaug.Masks(fill=0), boxes=gpuaug.Boxes(min_size=4))
        batch = batch_of(rectangles(40, seed), gpuaug.Augment(crop=crop, ops=ops), targets=rules)
        (height, width), targets = batch.targets.size, batch.targets
        for row, mask in enumerate(targets.masks.numpy()):
            own = targets.boxes[targets.sample == row].double().numpy()
            if not len(own) or not (mask == 1).any():
                continue
            box, found = own[0], extent(mask == 1)
            outward = (found - box) * [-1, -1, 1, 1]
            assert outward.max() <= limit, f"the mask leaves the box: {found} {box}"
            seen += 1
            if (box > 0).all() and (box[2:] < [width, height]).all():  # not clipped at the end
                assert np.abs(found - box).max() <= limit
                whole += 1
    assert seen >= 80
    assert whole >= 30


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


def test_pairs_swap_exactly_where_the_image_is_mirrored() -> None:
    some = samples(24)
    points = np.array([[[-9.0, 0, 2], [9, 0, 1]]])
    for crop in ("letterbox corner", "resized"):
        source = []
        for sample in some:
            own = points + np.array([*sample.place, 0])
            source.append((encode(sample.pixels, "PNG"), {"keypoints": own, "labels": [0]}))
        ops = {"h": K.RandomHorizontalFlip(), "v": K.RandomVerticalFlip(), "turn": K.RandomRotation90((-1, 2), p=0.8)}
        rules = gpuaug.Targets(keypoints=gpuaug.Keypoints(flip=[1, 0], pixel_centers=False))
        targets = batch_of(source, gpuaug.Augment(crop=CROPS[crop](), ops=ops), targets=rules).targets
        mirrored = torch.linalg.det(targets.matrices) < 0
        assert 4 < int(mirrored.sum()) < 20
        assert targets.counts.tolist() == [1] * len(some)
        for row, sample in enumerate(some):
            order = [1, 0] if mirrored[row] else [0, 1]
            for point, place in zip(targets.keypoints[row].tolist(), points[0, order], strict=True):
                at = targets.matrices[row].numpy() @ [*(place[:2] + sample.place), 1]
                if point[2]:
                    np.testing.assert_allclose([*point[:2], point[2]], [*at[:2], place[2]], atol=1e-4)
                else:
                    assert point[:2] == [0, 0]
                    height, width = targets.size
                    assert not (0.01 < at[0] < width - 0.01 and 0.01 < at[1] < height - 0.01)


# --- 7: the IoU crop


@pytest.mark.parametrize("zoom", [None, (1.0, 3.0)])
def test_an_iou_crop_keeps_the_objects_whose_centre_is_inside(zoom: Any) -> None:
    rng, size = np.random.default_rng(0), (120, 160)
    source, boxes = [], []
    for k in range(40):
        corners = np.sort(rng.uniform(0, 1, (5, 2, 2)), axis=1) * size[::-1]
        boxes.append(corners.reshape(5, 4).astype(np.float32))
        target = {"boxes": boxes[-1], "labels": np.arange(5), "ids": np.arange(5) + 5 * k, "size": size}
        source.append((encode(np.full((*size, 3), 255, np.uint8), "BMP"), target))
    rules = gpuaug.Targets(boxes=gpuaug.Boxes(min_size=0, min_area=0))
    crop = gpuaug.RandomIoUCrop(100, zoom_out=zoom)
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


# --- matrices and masks


@pytest.mark.parametrize("crop", [name for name in CROPS if name != "none"])
def test_matrices_map_source_points_to_the_output_and_back(crop: str) -> None:
    rng, some = np.random.default_rng(0), samples(9)
    source, points = [], []
    for sample in some:
        own = rng.uniform(0, 1, (3, 6, 2)) * sample.size[::-1]
        points.append(own)
        table = np.concatenate([own, np.full((3, 6, 1), 2.0)], axis=2)
        boxes = np.concatenate([own.min(axis=1), own.max(axis=1)], axis=1)
        target = {"mask": png(sample.mask), "boxes": boxes, "keypoints": table, "labels": [0, 1, 2], "ids": [0, 1, 2]}
        source.append((encode(sample.pixels, "BMP"), target))
    rules = gpuaug.Targets(masks=ALL.masks, boxes=ALL.boxes, keypoints=gpuaug.Keypoints(pixel_centers=False))
    targets = batch_of(source, gpuaug.Augment(crop=CROPS[crop](), ops=composed(7)), targets=rules).targets
    seen = 0
    for number, (row, own) in enumerate(zip(targets.sample.tolist(), targets.ids.tolist(), strict=True)):
        for point, place in zip(targets.keypoints[number].numpy(), points[row][own], strict=True):
            matrix = targets.matrices[row].numpy()
            if point[2]:
                to, back = matrix @ [*place, 1], np.linalg.inv(matrix) @ [*point[:2], 1]
                np.testing.assert_allclose(to[:2] / to[2], point[:2], atol=1e-3)
                np.testing.assert_allclose(back[:2] / back[2], place, atol=1e-3)
                x, y = int(point[0]), int(point[1])
                around = targets.masks[row, max(y - 1, 0) : y + 2, max(x - 1, 0) : x + 2].unique().tolist()
                near = some[row].mask[max(int(place[1]) - 4, 0) : int(place[1]) + 5]
                near = near[:, max(int(place[0]) - 4, 0) : int(place[0]) + 5]
                assert np.isin(around, near).any()  # a visible point is on the image, if only just
                seen += 1
    assert seen > 40


@pytest.mark.parametrize("crop", CROPS)
def test_labels_of_masks_never_become_others(crop: str) -> None:
    sizes = SIZES[:1] if crop == "none" else None
    some = samples(12, 5, sizes)
    rng = np.random.default_rng(1)
    for k, sample in enumerate(some):
        sample.mask = rng.choice(np.array([3 * k, 3 * k + 1, 200], np.uint8), sample.size)
    for seed in range(2):
        batch = batch_of(pairs(some), gpuaug.Augment(crop=CROPS[crop](), ops=composed(seed, perspective=True)))
        for row, mask in enumerate(batch.targets.masks):
            assert set(mask.unique().tolist()) <= {3 * row, 3 * row + 1, 200, 255}
