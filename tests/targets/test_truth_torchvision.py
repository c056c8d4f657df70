"""Targets against other implementations, fed with the same parameters: torchvision, Kornia and Pillow."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from truth import CROPS

import gpuaug

SIZE = (90, 122)  # (height, width); an odd difference would make every pixel of a quarter turn a tie
COUNT = 12  # images
RULES = gpuaug.Targets(
    masks=gpuaug.Masks(),
    boxes=gpuaug.Boxes(min_size=0, min_area=0),
    keypoints=gpuaug.Keypoints(pixel_centers=False),
)
OPS: dict[str, Any] = {
    "hflip": lambda: K.RandomHorizontalFlip(p=1.0),
    "vflip": lambda: K.RandomVerticalFlip(p=1.0),
    "affine": lambda: K.RandomAffine(50.0, (0.2, 0.1), (0.6, 1.5), (-15.0, 15.0, -9.0, 9.0), p=1.0),
    "translate": lambda: K.RandomTranslate((-0.3, 0.3), (-0.2, 0.2), p=1.0),
    "shear": lambda: K.RandomShear((-20.0, 20.0, -15.0, 15.0), p=1.0),
    "rotation": lambda: K.RandomRotation(180.0, p=1.0),
    "rotation 90": lambda: K.RandomRotation90((-2, 3), p=1.0),
    "perspective": lambda: K.RandomPerspective(0.4, p=1.0),
}


@pytest.fixture(scope="module")
def functional(v2: ModuleType) -> Any:
    """``torchvision.transforms.v2.functional``."""
    return v2.functional


def given(seed: int, size: tuple[int, int] = SIZE) -> dict[str, Any]:
    """Masks of noise, and boxes and points that may reach beyond the image."""
    rng = np.random.default_rng(seed)
    corners = np.sort(rng.uniform(-0.1, 1.1, (COUNT, 5, 2, 2)), axis=2) * size[::-1]
    points = rng.uniform(0, 1, (COUNT, 5, 3, 2)) * size[::-1]
    return {
        "masks": torch.from_numpy(rng.integers(0, 255, (COUNT, *size)).astype(np.uint8)),
        "boxes": list(corners.reshape(COUNT, 5, 4).astype(np.float32).clip(0, size[::-1] * 2)),
        "labels": [np.arange(5) + 5 * k for k in range(COUNT)],
        "keypoints": list(np.concatenate([points, np.full((COUNT, 5, 3, 1), 2.0)], axis=3).astype(np.float32)),
    }


def moved(ops: dict[str, Any], what: dict[str, Any], *, crop: Any = None, seed: int = 0) -> tuple[Any, list[Any], Any]:
    """Our targets, the choices of each operation, and the windows."""
    recipe = gpuaug.Augment(crop=crop, ops=ops)
    size = tuple(what["masks"].shape[1:])
    images = torch.zeros((len(what["masks"]), 3, *size), dtype=torch.uint8)
    _, targets = recipe(images, **what, targets=RULES, seed=seed)
    drawn = recipe.draw(seed=seed, epoch=0, indices=np.arange(len(images)))
    objects = None
    if "boxes" in getattr(crop, "needs", ()):
        rows = [np.full(len(b), k) for k, b in enumerate(what["boxes"])]
        objects = type("Table", (), {"boxes": np.concatenate(what["boxes"]), "sample": np.concatenate(rows)})
    sides = np.full((2, len(images)), np.array(size)[:, None])
    (windows,) = recipe.windows(drawn, *sides, objects=objects, masks=list(what["masks"].numpy()))
    return targets, recipe.choose(drawn, [windows.size])[0], windows


def theirs(F: Any, name: str, params: dict[str, np.ndarray], row: int, thing: Any, **more: Any) -> Any:
    """torchvision's functional for one operation of :data:`OPS`; ``more`` is for masks."""
    p = {k: v[row].astype(np.float64).tolist() for k, v in params.items()}
    if name in ("hflip", "vflip"):
        return F.horizontal_flip(thing) if name == "hflip" else F.vertical_flip(thing)
    if name == "perspective":  # corners as pixel indices to edges
        ends = ([[x + 0.5, y + 0.5] for x, y in p[key]] for key in ("start_points", "end_points"))
        return F.perspective(thing, *ends, **more)
    if name.startswith("rotation"):
        angle = p["degrees"] if name == "rotation" else 90 * round(p["times"])
        return F.rotate(thing, angle, **more)
    settings = {"angle": p.get("angle", 0.0), "scale": p.get("scale", [1.0])[0]}
    shift = p.get("translations", [p.get("translate_x", 0.0), p.get("translate_y", 0.0)])
    return F.affine(thing, translate=shift, shear=[p.get("shear_x", 0.0), p.get("shear_y", 0.0)], **settings, **more)


def boxes_of(F: Any, boxes: np.ndarray, size: tuple[int, int]) -> Any:
    from torchvision import tv_tensors

    return F.clamp_bounding_boxes(
        tv_tensors.BoundingBoxes(torch.from_numpy(boxes.astype(np.float64)), format="XYXY", canvas_size=size)
    )


def check_boxes(targets: Any, row: int, expected: np.ndarray, least: float = 1e-3, *, turned: bool = False) -> int:
    """Ours of a row against theirs, one row per object; objects without any area are left out by us.

    ``turned``: a box that torchvision has clipped is not smaller than ours. torchvision clips the hull of the moved
    corners; we clip the polygon, and its hull is smaller or equal.
    """
    own = {int(k) % 5: box for k, box in zip(targets.labels, targets.boxes.numpy(), strict=True) if int(k) // 5 == row}
    size = targets.size[::-1]
    for k, box in enumerate(expected):
        if turned and ((box[:2] <= 1e-4).any() or (box[2:] >= np.array(size) - 1e-4).any()):
            outward = (own.get(k, box) - box) * [1, 1, -1, -1]
            assert (outward >= -1e-4).all()
            continue
        if (box[2:] - box[:2]).min() > least:
            assert k in own, f"object {k} of row {row} is missing: {box}"
        if k in own:
            np.testing.assert_allclose(own[k], box, atol=1e-4)
    return len(own)


# --- 3: torchvision


@pytest.mark.parametrize("name", OPS)
def test_boxes_and_masks_are_torchvisions(name: str, functional: ModuleType) -> None:
    F, seen, differing = functional, 0, []
    for seed in range(3):
        what = given(seed)
        targets, (chosen,), _ = moved({name: OPS[name]()}, what, seed=seed)
        params = chosen.params[0][0]
        for row in range(COUNT):
            boxes = theirs(F, name, params, row, boxes_of(F, what["boxes"][row], SIZE))
            seen += check_boxes(targets, row, F.clamp_bounding_boxes(boxes).numpy(), turned="flip" not in name)
            how: dict[str, Any] = (
                {} if "flip" in name else {"interpolation": F.InterpolationMode.NEAREST, "fill": [255.0]}
            )
            mask = theirs(F, name, params, row, what["masks"][row][None], **how)[0]
            differing.append((mask != targets.masks[row]).float().mean().item())
    assert seen >= 50
    assert np.mean(differing) <= (0 if "flip" in name else 0.002), "masks differ by more than ties"


@pytest.mark.parametrize("crop", [name for name in CROPS if name != "none"])
def test_crops_are_torchvisions_crop_resize_and_pad(crop: str, functional: ModuleType) -> None:
    F, seen, differing = functional, 0, []
    exact = F.InterpolationMode.NEAREST_EXACT
    for seed in range(3):
        what = given(seed)
        if crop == "padded":
            what = given(seed, (110, 131))
        size = tuple(what["masks"].shape[1:])
        targets, _, windows = moved({}, what, crop=CROPS[crop](), seed=seed)
        H, W = windows.size
        placed = np.hstack([windows.window, windows.resized, windows.offset]).tolist()
        for row, (top, left, height, width, h, w, y, x) in enumerate(placed):
            boxes = F.resize(F.crop(boxes_of(F, what["boxes"][row], size), top, left, height, width), [h, w])
            boxes = F.crop(F.pad(boxes, [x, y, 0, 0]), 0, 0, H, W) if x >= 0 and y >= 0 else F.crop(boxes, -y, -x, H, W)
            if (x >= 0) == (y >= 0) and crop != "iou":  # ours has the objects with their centre inside only
                seen += check_boxes(targets, row, F.clamp_bounding_boxes(boxes).numpy())
            cut = F.resize(F.crop(what["masks"][row][None], top, left, height, width), [h, w], interpolation=exact)
            part = np.full((H, W), 255, np.uint8)
            y1, x1 = min(y + h, H), min(x + w, W)
            if y1 > max(y, 0) and x1 > max(x, 0):
                part[max(y, 0) : y1, max(x, 0) : x1] = cut[0].numpy()[max(-y, 0) : y1 - y, max(-x, 0) : x1 - x]
            differing.append((part != targets.masks[row].numpy()).mean())
    assert seen >= 40 or crop == "iou"
    assert np.mean(differing) <= 0.002, "masks differ by more than ties"


# --- 4: Kornia and Pillow
