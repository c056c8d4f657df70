"""Samples whose right answer can be measured in the pixels, and all crops and moving operations for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import kornia.augmentation as K
import numpy as np
from common import loader
from pictures import png
from test_moves import GEOMETRIC

import gpuaug

SIZES = [(120, 150), (151, 117), (128, 128)]  # (height, width)
SPREAD = 7.0  # pixels, standard deviation of a blob: wide, so that resizing to a third keeps its centroid
ALL = gpuaug.Targets(masks=gpuaug.Masks(), boxes=gpuaug.Boxes(min_size=0, min_area=0), keypoints=gpuaug.Keypoints())

CROPS = {
    "none": lambda: None,
    "resized": lambda: gpuaug.RandomResizedCrop((96, 112), scale=(0.5, 1)),
    "resized bicubic": lambda: gpuaug.RandomResizedCrop(100, scale=(0.6, 1), interpolation="bicubic"),
    "padded": lambda: gpuaug.RandomCrop((110, 125), padding=20),
    "center": lambda: gpuaug.ResizeCenterCrop(120, (100, 110)),
    "center padded": lambda: gpuaug.ResizeCenterCrop(90, (112, 131)),
    "resize": lambda: gpuaug.Resize((110, 90)),
    "scale": lambda: gpuaug.RandomScaleCrop((110, 120), scale=(0.7, 1.4), base=110),
    "scale mixed": lambda: gpuaug.RandomScaleCrop(112, scale=(0.8, 1.3), base=(160, 120), cat_max_ratio=0.75),
    "jitter": lambda: gpuaug.RandomScaleCrop(128, scale=(0.5, 1.5), base=None, anchor="diagonal"),
    "letterbox": lambda: gpuaug.Letterbox((100, 128), fill=0),
    "letterbox corner": lambda: gpuaug.Letterbox((160, 160), fill=0, centre=False, upscale=False),
    "iou": lambda: gpuaug.RandomIoUCrop(112, zoom_out=(1.0, 1.5)),
}
_WITH_ZEROS = {name: make for name, make in GEOMETRIC.items() if "border" not in name and "nearest" not in name}
MOVES = {name: lambda make=make: make(False) for name, make in _WITH_ZEROS.items()} | {
    "affine aligned": lambda: GEOMETRIC["affine"](True),
    "one": lambda: gpuaug.OneOf(
        ops={
            "flip": K.RandomHorizontalFlip(p=0.9),
            "turn": K.RandomRotation90((0, 3), p=1.0),
            "gray": K.RandomGrayscale(p=1.0),
            "warp": K.RandomAffine(20.0, (0.1, 0.1), shear=10.0, p=1.0),
        },
        p=0.8,
    ),
    "some": lambda: gpuaug.SomeOf(
        (1, 3),
        ops={
            "warp": K.RandomAffine(20.0, (0.1, 0.1), shear=10.0, p=1.0),
            "flip": K.RandomHorizontalFlip(p=0.9),
            "gray": K.RandomGrayscale(p=1.0),
            "turn": K.RandomRotation90((0, 3), p=1.0),
        },
        random_order=True,
    ),
}


def composed(seed: int, *, perspective: bool = False, most: int = 3) -> dict[str, Any]:
    """Some of the moving operations, in random order."""
    rng = np.random.default_rng(seed)
    names = [name for name in MOVES if ("perspective" in name) <= perspective]
    count = int(rng.integers(1, most + 1))
    return {name: MOVES[name]() for name in rng.permutation(names)[:count].tolist()}


def gaussian(size: tuple[int, int], place: Any, spread: float = SPREAD) -> np.ndarray:
    """uint8 [h, w, 3] with a Gaussian whose centre is at ``place`` (x, y), in pixel edges."""
    y, x = np.mgrid[: size[0], : size[1]] + 0.5
    values = 250 * np.exp(-((x - place[0]) ** 2 + (y - place[1]) ** 2) / (2 * spread**2))
    return np.repeat(np.rint(values).astype(np.uint8)[:, :, None], 3, axis=2)


@dataclass
class Sample:
    """One image with a blob, its twin in white, and the blob's place."""

    pixels: np.ndarray
    place: np.ndarray
    mask: np.ndarray

    @property
    def size(self) -> tuple[int, int]:
        return self.pixels.shape[:2]

    def target(self) -> gpuaug.Target:
        half = np.array([1.0, 0.7]) * SPREAD
        box = np.concatenate([self.place - half, self.place + half])
        point = [*(self.place - 0.5), 2.0]  # as COCO: whole numbers are the centres of pixels
        return gpuaug.Target(
            mask=png(self.mask), boxes=[box], labels=[1], keypoints=np.array([[point, point]]), size=self.size
        )


def samples(count: int, seed: int = 0, sizes: Any = None) -> list[Sample]:
    """Blobs around the middle of images. The masks have an ellipse around the blob and a few other classes."""
    rng = np.random.default_rng(seed)
    made = []
    for k in range(count):
        h, w = size = (sizes or SIZES)[k % len(sizes or SIZES)]
        place = rng.uniform(0.38, 0.62, 2) * (w, h)
        y, x = np.mgrid[:h, :w] + 0.5
        mask = rng.integers(2, 6, (4, 4)).astype(np.uint8)[np.arange(h) * 4 // h][:, np.arange(w) * 4 // w]
        mask[(x - place[0]) ** 2 + (y - place[1]) ** 2 <= (2 * SPREAD) ** 2] = 1
        made.append(Sample(gaussian(size, place), place, mask))
    return made


def targets_loader(source: Any, augment: Any, **settings: Any) -> gpuaug.Loader:
    """All targets of a source, in its order."""
    usual = {"batch_size": 64, "order": "sequential", "prefetch": 0, "seed": 5, "targets": ALL}
    return loader(source, augment=augment, **usual | settings)


def batch_of(source: Any, augment: Any, **settings: Any) -> gpuaug.Batch:
    """Everything in one batch."""
    with targets_loader(source, augment, **settings) as made:
        (batch,) = made
    return batch


def measured(pixels: np.ndarray, white: np.ndarray) -> tuple[np.ndarray, float] | None:
    """Centroid (x, y) and spread of a blob [H, W]; None where a part of it may have left the image on the way.

    ``white`` is the twin: below 1 where pixels come from outside.
    """
    y, x = np.mgrid[: pixels.shape[0], : pixels.shape[1]] + 0.5
    mass = pixels.sum()
    if mass < 5:
        return None
    at = np.array([(x * pixels).sum(), (y * pixels).sum()]) / mass
    dx, dy = x - at[0], y - at[1]
    moments = np.array([[(dx * dx * pixels).sum(), (dx * dy * pixels).sum()], [0, (dy * dy * pixels).sum()]]) / mass
    least, most = np.sqrt(np.maximum(np.linalg.eigvalsh(moments, UPLO="U"), 0))
    reach = 3.6 * most + 2
    sides = np.array(pixels.shape[::-1])
    if least < 2 or (at < reach).any() or (sides - at < reach).any():
        return None
    return None if white[dx**2 + dy**2 < reach**2].min() < 0.999 else (at, float(most))
