"""The operations of RandAugment and its relatives against Pillow: both backends, level for level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from pictures import photograph
from torch import Tensor

from gpuaug.augment.fused.backend import FusedBackend
from gpuaug.augment.moves import moves
from gpuaug.augment.ops.pillow import ENTRIES, INTERPOLATIONS, PillowOp
from gpuaug.augment.parameters import Chosen, Prepared
from gpuaug.augment.reference import ReferenceBackend

BACKENDS = {"kornia": ReferenceBackend, "fused": FusedBackend}
SIZES = ((1, 1), (1, 4), (2, 7), (3, 5), (37, 29), (64, 64), (5, 600))
FILL = (124, 116, 104)

SHEARS, PIXELS = (0, 0.3, -0.99, 1, -5.5, 0.0123), (0, 1, -10, 0.4, 12.7, -0.5, 150, 1e6)
FACTORS = (0, 1, 0.1, 0.55, 0.9, 1.1, 1.9, 2, 7.5)
MAGNITUDES: dict[str, tuple[float, ...]] = {
    "identity": (0,),
    "shear_x": SHEARS,
    "shear_y": SHEARS,
    "translate_x": PIXELS,
    "translate_y": PIXELS,
    "rotate": (0, 1, -30, 30, 45, 90, -90, 180, 270, 135.7, 359, -725.3, 1e-3),
    "brightness": FACTORS,
    "color": FACTORS,
    "contrast": FACTORS,
    "sharpness": FACTORS,
    "posterize": tuple(range(9)),
    "solarize": (0, 1, 127.5, 128, 200, 255, 256),
    "solarize_add": (0, 1, 33, 110, 128, 255),
    "auto_contrast": (0,),
    "equalize": (0,),
    "invert": (0,),
}
MOVING = [name for name, entry in ENTRIES.items() if entry.affects == "matrix"]


def affine(coefficients: Callable[[float], tuple[float, ...]]) -> Callable[..., Image.Image]:
    return lambda image, m, how, fill: image.transform(
        image.size, Image.Transform.AFFINE, coefficients(m), how, fillcolor=fill
    )


def solarize_add(image: Image.Image, m: float) -> Image.Image:
    return image.point([min(255, k + int(m)) if k < 128 else k for k in range(256)] * 3)


MOVED = {
    "shear_x": affine(lambda s: (1, s, 0, 0, 1, 0)),
    "shear_y": affine(lambda s: (1, 0, 0, s, 1, 0)),
    "translate_x": affine(lambda pixels: (1, 0, -pixels, 0, 1, 0)),
    "translate_y": affine(lambda pixels: (1, 0, 0, 0, 1, -pixels)),
    "rotate": lambda image, m, how, fill: image.rotate(m, how, fillcolor=fill),
}
COLOURED: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "identity": lambda image, m: image,
    "brightness": lambda image, m: ImageEnhance.Brightness(image).enhance(m),
    "color": lambda image, m: ImageEnhance.Color(image).enhance(m),
    "contrast": lambda image, m: ImageEnhance.Contrast(image).enhance(m),
    "sharpness": lambda image, m: ImageEnhance.Sharpness(image).enhance(m),
    "posterize": lambda image, m: ImageOps.posterize(image, int(m)) if m else image.point(lambda v: 0),
    "solarize": lambda image, m: ImageOps.solarize(image, m),  # type: ignore[arg-type]
    "solarize_add": solarize_add,
    "auto_contrast": lambda image, m: ImageOps.autocontrast(image),
    "equalize": lambda image, m: ImageOps.equalize(image),
    "invert": lambda image, m: ImageOps.invert(image),
}


def pillows(name: str, image: np.ndarray, magnitude: Any, how: str = "nearest", fill: Any = FILL) -> np.ndarray:
    """Pillow's result for uint8 [H, W, 3]."""
    picture, m = Image.fromarray(image), float(np.float32(magnitude))
    if name in MOVED:
        return np.asarray(MOVED[name](picture, m, Image.Resampling[how.upper()], fill))
    return np.asarray(COLOURED[name](picture, m))


def pictures(height: int, width: int) -> np.ndarray:
    """uint8 [7, H, W, 3]: photographs, noise, few levels, gray, one colour, and one other pixel."""
    rng = np.random.default_rng(height + 1000 * width)
    made = [np.asarray(photograph(name, (width, height))) for name in ("china", "chelsea")]
    made.append(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    made.append(rng.integers(100, 104, (height, width, 3), dtype=np.uint8))
    made.append(made[0][..., :1].repeat(3, axis=2))
    made.append(np.full((height, width, 3), (0, 255, 17), dtype=np.uint8))
    made.append(made[-1].copy())
    made[-1][height // 2, width // 3] = (250, 3, 77)
    return np.stack(made)


def run(backend: str, images: np.ndarray, steps: list[tuple[PillowOp, Any, Any]]) -> np.ndarray:
    """Run operations; a step is (operation, magnitudes [B], whether a sample takes it [B])."""
    prepared, chosen = [], []
    for k, (op, magnitudes, taken) in enumerate(steps):
        prepared.append(Prepared(str(k), op, ((op,),), 0, None))  # type: ignore[arg-type]
        params = {"magnitude": np.broadcast_to(np.float32(magnitudes), len(images)).copy()}
        choice = np.broadcast_to(taken, len(images)).astype(np.int64)[:, None] - 1
        chosen.append(Chosen(choice, ((params,),)))
    made: Tensor = BACKENDS[backend](prepared)(torch.from_numpy(images), chosen)
    return levels(made)


def levels(made: Tensor) -> np.ndarray:
    """uint8 [B, H, W, 3] from float32 [B, 3, H, W], which must be k/255."""
    found = made.mul(255).round()
    assert torch.equal(found / 255, made)
    return found.permute(0, 2, 3, 1).numpy().astype(np.uint8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", sorted(MAGNITUDES))
def test_an_operation_is_pillows(name: str, backend: str) -> None:
    for size in SIZES:
        images = pictures(*size)
        every = np.concatenate([images] * len(MAGNITUDES[name]))
        magnitudes = np.repeat(np.float32(MAGNITUDES[name]), len(images))
        for how in INTERPOLATIONS if name in MOVED else ("nearest",):
            op = PillowOp(name, interpolation=how, fill=FILL)
            made = run(backend, every, [(op, magnitudes, True)])
            for image, magnitude, found in zip(every, magnitudes, made, strict=True):
                expected = pillows(name, image, magnitude, how)
                assert np.array_equal(found, expected), (
                    size,
                    how,
                    magnitude,
                    np.abs(found.astype(int) - expected).max(),
                    (found != expected).mean(),
                )
