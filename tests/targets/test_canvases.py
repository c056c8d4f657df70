"""Targets through several operations: what one canvas loses is lost for all later operations, as in the image."""

from __future__ import annotations

from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from test_moves import kornias, taken
from torch.nn.functional import max_pool2d

import gpuaug
from gpuaug.augment.parameters import Chosen, Prepared
from gpuaug.augment.target_mover import TargetMover

SIZE = (104, 128)  # (height, width) of the images
COUNT = 10  # images of a chain
RULES = gpuaug.Targets(
    masks=gpuaug.Masks(),
    boxes=gpuaug.Boxes(min_size=0, min_area=0),
    keypoints=gpuaug.Keypoints(pixel_centers=False),
)
WARPS = {
    "affine": lambda: K.RandomAffine(60.0, (0.4, 0.4), (0.6, 1.4), p=0.8),
    "shift": lambda: K.RandomTranslate((-0.5, 0.5), (-0.5, 0.5), p=0.8),
    "shear": lambda: K.RandomShear((-25.0, 25.0, -25.0, 25.0), p=0.8),
    "perspective": lambda: K.RandomPerspective(0.6, p=0.9),
    "perspective area": lambda: K.RandomPerspective(0.5, sampling_method="area_preserving", p=0.9),
    "zoom": lambda: K.RandomAffine(0.0, None, (0.4, 0.9), p=0.9),
    "turn": lambda: K.RandomRotation90((-1, 2), p=0.9),
    "flip": lambda: K.RandomHorizontalFlip(p=0.5),
    "vflip": lambda: K.RandomVerticalFlip(p=0.5),
    "one": lambda: gpuaug.OneOf(ops={"a": K.RandomRotation(90.0, p=1.0), "b": K.RandomPerspective(0.5, p=1.0)}),
    "gray": lambda: K.RandomGrayscale(p=0.5),
}
CROPS = {
    "none": lambda: None,
    "resized": lambda: gpuaug.RandomResizedCrop((90, 110), scale=(0.3, 1)),
    "letterbox": lambda: gpuaug.Letterbox((120, 100), fill=0),
    "scale": lambda: gpuaug.RandomScaleCrop((100, 112), scale=(0.5, 1.5), base=100),
    "iou": lambda: gpuaug.RandomIoUCrop(104, zoom_out=(1.0, 2.0)),
    "padded": lambda: gpuaug.RandomCrop((110, 110), padding=30),
}


def chain(seed: int, backend: str) -> gpuaug.Augment:
    """A crop and one to four operations that move pixels."""
    rng = np.random.default_rng(seed)
    names = rng.choice(sorted(WARPS), int(rng.integers(1, 5)), replace=False).tolist()
    names = names if seed % 3 else ["affine", "perspective", *(n for n in names if n not in ("affine", "perspective"))]
    crop = CROPS[sorted(CROPS)[seed % len(CROPS)]]()
    return gpuaug.Augment(crop=crop, ops={name: WARPS[name]() for name in names[:4]}, backend=backend)


def given(seed: int) -> dict[str, Any]:
    """Masks of zeros, rectangles anywhere, and points on them."""
    rng = np.random.default_rng(seed)
    corners = np.sort(rng.uniform(0, 1, (COUNT, 6, 2, 2)), axis=2) * SIZE[::-1]
    corners[:, 0] = [[0, 0], SIZE[::-1]]
    points = corners[:, :, :1] + rng.uniform(0, 1, (COUNT, 6, 8, 2)) * np.diff(corners, axis=2)
    return {
        "masks": torch.zeros((COUNT, *SIZE), dtype=torch.uint8),
        "boxes": list(corners.reshape(COUNT, 6, 4)),
        "labels": [np.arange(6)] * COUNT,
        "keypoints": list(np.concatenate([points, np.full((*points.shape[:3], 1), 2.0)], axis=3)),
    }


def near(where: torch.Tensor) -> torch.Tensor:
    """Bool [H, W]: where one of the nine pixels around is True."""
    return max_pool2d(where.float()[None], 3, stride=1, padding=1)[0] > 0


def choices(recipe: gpuaug.Augment, seed: int, what: dict[str, Any]) -> tuple[Any, list[Chosen]]:
    """The windows of the crop, and what every operation draws."""
    drawn = recipe.draw(seed=seed, epoch=0, indices=np.arange(COUNT))
    rows = np.arange(COUNT).repeat(6)
    objects = type("Table", (), {"boxes": np.concatenate(what["boxes"]).astype(np.float32), "sample": rows})
    sides = np.full((2, COUNT), np.array(SIZE)[:, None])
    (windows,) = recipe.windows(drawn, *sides, objects=objects, masks=list(what["masks"].numpy()))
    return windows, recipe.choose(drawn, [windows.size])[0]


def crop_matrix(window: Any, row: int) -> np.ndarray:
    (top, left, height, width), (h, w), (y, x) = window.window[row], window.resized[row], window.offset[row]
    return np.array([[w / width, 0, x - left * w / width], [0, h / height, y - top * h / height], [0, 0, 1]])


def walked(xy: np.ndarray, path: list[Any], *, back: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Points [n, 2] after each matrix of a path, and which of them are inside all its areas. Back: from the end."""
    there = np.ones(len(xy), dtype=bool)

    def hold(area: Any) -> None:
        there[:] &= ((xy >= np.array(area[:2]) - 1e-3) & (xy <= np.array(area[2:]) + 1e-3)).all(axis=1)

    for m, area in path[::-1] if back else path:
        if back:
            hold(area)
        u, v, z = (np.linalg.inv(m) if back else m) @ [*xy.T, np.ones(len(xy))]
        xy, there = np.stack([u / z, v / z], axis=1), there & (z > 0)
        if not back:
            hold(area)
    return xy, there


def path_of(window: Any, row: int, prepared: list[Prepared], chosen: list[Chosen]) -> list[Any]:
    """The matrices of one sample, from Kornia, and the canvas after each: (x1, y1, x2, y2)."""
    (H, W), (h, w), (y, x) = window.size, window.resized[row], window.offset[row]
    path: list[Any] = [(crop_matrix(window, row), (max(x, 0), max(y, 0), min(x + w, W), min(y + h, H)))]
    for op, c in zip(prepared, chosen, strict=True):
        if any(True for _ in taken([op], [c], row)):
            path.append((kornias([op], [c], row, (H, W)), (0, 0, W, H)))
    return path


@pytest.mark.parametrize("backend", ["fused", "kornia"])
@pytest.mark.parametrize("seed", range(6))  # every crop
def test_masks_and_keypoints_are_where_the_image_is_not_empty(seed: int, backend: str) -> None:
    recipe, what = chain(seed, backend), given(seed)
    white = torch.full((COUNT, 3, *SIZE), 255, dtype=torch.uint8)
    images, targets = recipe(white, **what, targets=RULES, seed=seed)
    for row in range(COUNT):
        shown, valid = images[row, 0] > 0.5, targets.masks[row] != 255
        wrong = (shown != valid) & ~(near(valid) & near(~valid))
        assert not wrong.any(), f"{int(wrong.sum())} pixels of row {row}"
        some = near(images[row, 0] > 0)
        for x, y, visibility in targets.keypoints[targets.sample == row].reshape(-1, 3).tolist():
            assert not visibility or some[int(y), int(x)]


@pytest.mark.parametrize("seed", range(6))
def test_boxes_and_keypoints_are_what_every_canvas_has_held(seed: int) -> None:
    """Against points moved one by one: points of the boxes moved forward, and points of the output moved back."""
    recipe, what = chain(seed, "fused"), given(seed)
    _, targets = recipe(torch.zeros((COUNT, 3, *SIZE), dtype=torch.uint8), **what, targets=RULES, seed=seed)
    window, chosen = choices(recipe, seed, what)
    grid = np.stack(np.meshgrid(*[np.linspace(0, 1, 100)] * 2), axis=-1).reshape(-1, 2)
    output = np.stack(np.meshgrid(*(np.arange(0, n + 0.1, 0.2) for n in window.size[::-1])), axis=-1).reshape(-1, 2)
    for row in range(COUNT):
        path = path_of(window, row, recipe.views[0].augment.prepared, chosen)
        source, seen = walked(output, path, back=True)
        own = {int(targets.labels[k]): k for k in (targets.sample == row).nonzero().flatten().tolist()}
        for label, box in enumerate(what["boxes"][row]):
            xy, there = walked(box[:2] + grid * (box[2:] - box[:2]), path)
            inside = seen & ((source >= box[:2]) & (source <= box[2:])).all(axis=1)
            left = np.concatenate([xy[there], output[inside]])
            if label not in own:  # dropped by the crop, or hardly anything is left
                assert isinstance(recipe.views[0].augment.crop, gpuaug.RandomIoUCrop) or len(left) < 5
                continue
            found = targets.boxes[own[label]].double().numpy()
            if len(left):
                np.testing.assert_allclose(found, [*left.min(axis=0), *left.max(axis=0)], atol=0.5)
            else:
                assert (found[2:] - found[:2]).min() < 0.3
            points = targets.keypoints[own[label]].double().numpy()
            xy, there = walked(what["keypoints"][row][label][:, :2], path)
            assert (points[:, 2] == 2).tolist() == there.tolist()
            np.testing.assert_allclose(points[there, :2], xy[there], atol=1e-2)


@pytest.mark.parametrize("backend", ["fused", "kornia"])
def test_an_elastic_transform_has_a_canvas_too(backend: str) -> None:
    bend = K.RandomElasticTransform((63, 63), (16.0, 16.0), (0.5, 0.5), p=0.7)
    warps = {"before": WARPS["affine"](), "bend": bend, "after": WARPS["perspective"](), "last": WARPS["zoom"]()}
    white = torch.full((COUNT, 3, *SIZE), 255, dtype=torch.uint8)
    recipe = gpuaug.Augment(ops=warps, backend=backend)
    images, targets = recipe(white, masks=torch.zeros((COUNT, *SIZE), dtype=torch.uint8), seed=0)
    for image, mask in zip(images[:, 0], targets.masks, strict=True):
        shown, valid = image > 0.5, mask != 255
        assert not ((shown != valid) & ~(near(valid) & near(~valid))).any()


def test_a_mask_does_not_depend_on_the_elastic_transforms_of_others() -> None:
    bend = K.RandomElasticTransform((31, 31), (8.0, 8.0), (0.5, 0.5), p=0.5)
    erase = gpuaug.RandomErasing(p=0.5, mode="const", masks=7)
    ops = {
        "before": WARPS["affine"](),
        "first": WARPS["zoom"](),
        "erase": erase,
        "bend": bend,
        "after": WARPS["affine"](),
    }
    recipe, indices = gpuaug.Augment(ops=ops), torch.arange(COUNT)
    white = torch.full((COUNT, 3, *SIZE), 255, dtype=torch.uint8)
    masks = torch.from_numpy(np.random.default_rng(0).integers(0, 200, (COUNT, *SIZE), dtype=np.uint8))
    _, whole = recipe(white, masks=masks, seed=0, indices=indices)
    for one in (slice(row, row + 1) for row in range(COUNT)):
        _, alone = recipe(white[one], masks=masks[one], seed=0, indices=indices[one])
        assert torch.equal(alone.masks, whole.masks[one])


def test_no_objects_have_as_many_keypoints_as_given() -> None:
    white = torch.full((2, 3, *SIZE), 255, dtype=torch.uint8)
    given = {"boxes": [np.zeros((0, 4)), [[0, 0, 9, 9]]], "keypoints": [np.zeros((0, 8, 3)), np.ones((1, 8, 3))]}
    given["labels"] = [[], [0]]
    for rows, count in ((slice(0, 1), 0), (slice(0, 2), 1)):
        _, targets = gpuaug.Augment()(white[rows], **{name: values[rows] for name, values in given.items()}, seed=0)
        assert targets.keypoints.shape == (count, 8, 3)


@pytest.mark.parametrize("as_on_cuda", [False, True])
@pytest.mark.parametrize("backend", ["fused", "kornia"])
def test_erased_pixels_get_their_value_where_they_move_to(
    backend: str, as_on_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A black box on a white image is where the mask has the value 7, also after later operations."""
    sample = TargetMover.sample
    if as_on_cuda:  # the host only crops
        monkeypatch.setattr(TargetMover, "sample", lambda *a, **k: sample(*a[:3], torch.device("cuda"), **k))
    white = torch.full((COUNT, 3, *SIZE), 255, dtype=torch.uint8)
    given = {"masks": torch.zeros((COUNT, *SIZE), dtype=torch.uint8), "targets": gpuaug.Targets(masks=gpuaug.Masks())}
    settings = {"mode": "const", "mean": (0.5, 0.5, 0.5), "scale": (0.1, 0.3), "count": 2}
    for value in (7, 255, 70_000, None):
        ops = {
            "before": K.RandomAffine(30.0, (0.2, 0.2), (0.9, 1.3), p=0.8),
            "erase": gpuaug.RandomErasing(p=0.8, masks=value, **settings),
            "perspective": K.RandomPerspective(0.4, p=0.8),
            "flip": K.RandomHorizontalFlip(p=0.5),
            "after": K.RandomRotation(40.0, p=0.5),
        }
        images, masks = gpuaug.Augment(ops=ops, backend=backend)(white, **given, seed=3)
        erased = 0
        for image, mask in zip(images[:, 0], masks.masks, strict=True):
            gray = ((image > 0.4) & (image < 0.6)) & ~near((image < 0.4) | (image > 0.6))  # neither border nor white
            found = mask == value if value is not None else torch.zeros_like(gray)
            erased += int((gray & found).sum())
            assert value is None or found[gray].all()
            assert not (found & (image > 0.99) & ~near(image < 0.99)).any()
            assert set(mask.unique().tolist()) <= {0, 255, value}
        assert (erased > 2000) == (value is not None)


def test_erasing_drops_instances_that_it_covers() -> None:
    rng = np.random.default_rng(0)
    numbers = np.zeros((COUNT, *SIZE), dtype=np.uint8)
    numbers[:, 10:14, 20:24], numbers[:, 40:100, 30:120] = 1, 2
    boxes = [[[20.0, 10, 24, 14], [30, 40, 120, 100]]] * COUNT
    rules = gpuaug.Targets(masks=gpuaug.Masks(kind="instances"), boxes=gpuaug.Boxes())
    white = torch.from_numpy(rng.integers(0, 255, (COUNT, 3, *SIZE), dtype=np.uint8))
    given = {"masks": torch.from_numpy(numbers), "boxes": boxes, "labels": [[1, 2]] * COUNT, "targets": rules}
    counts = {}
    for value in (0, None):
        erase = gpuaug.RandomErasing(p=1.0, mode="const", scale=(0.3, 0.5), count=3, masks=value)
        _, targets = gpuaug.Augment(ops={"erase": erase})(white, **given, seed=0)
        counts[value] = targets.counts
        for row, mask in enumerate(targets.masks):
            present = mask.unique()
            assert present[present > 0].tolist() == list(range(1, int(targets.counts[row]) + 1))
    assert (counts[None] == 2).all()
    assert 2 < int((counts[0] < 2).sum()) < COUNT


def test_values_that_masks_cannot_have_are_refused() -> None:
    images, masks = torch.zeros((1, 3, 8, 8), dtype=torch.uint8), torch.zeros((1, 8, 8), dtype=torch.uint8)
    rules = gpuaug.Targets(masks=gpuaug.Masks(kind="instances"), boxes=gpuaug.Boxes())
    erase = gpuaug.OneOf(ops={"erase": gpuaug.RandomErasing(masks=1)})
    with pytest.raises(gpuaug.ConfigError, match="`augment.ops.one.ops.erase.masks`.*1"):
        gpuaug.Augment(ops={"one": erase})(images, masks=masks, targets=rules, boxes=[[]], labels=[[]])
    with pytest.raises(gpuaug.ConfigError, match="`masks`.*-1"):
        gpuaug.RandomErasing(masks=-1)
