"""The operations of RandAugment and its relatives against Pillow: both backends, level for level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pictures import photograph
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from gpuaug.augment.fused.backend import _BETWEEN, FusedBackend, library
from gpuaug.augment.moves import check_carried, moves
from gpuaug.augment.ops.pillow import ENTRIES, INTERPOLATIONS, PillowOp
from gpuaug.augment.parameters import Chosen, Prepared
from gpuaug.augment.reference import ReferenceBackend, apply
from gpuaug.errors import ConfigError

BACKENDS = {"kornia": ReferenceBackend, "fused": FusedBackend}
SIZES = ((1, 1), (1, 4), (2, 7), (3, 5), (37, 29), (32, 32), (3, 600))
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


Step = tuple[PillowOp, Any, Any]  # operation, magnitudes [B], whether a sample takes it [B]


def drawn(steps: list[Step], count: int) -> tuple[list[Prepared], list[Chosen]]:
    prepared, chosen = [], []
    for k, (op, magnitudes, taken) in enumerate(steps):
        prepared.append(Prepared(str(k), op, ((op,),), 0, None))  # type: ignore[arg-type]
        params = {"magnitude": np.broadcast_to(np.float32(magnitudes), count).copy()}
        choice = np.broadcast_to(taken, count).astype(np.int64)[:, None] - 1
        chosen.append(Chosen(choice, ((params,),)))
    return prepared, chosen


def run(backend: str, images: np.ndarray, steps: list[Step]) -> np.ndarray:
    prepared, chosen = drawn(steps, len(images))
    made: Tensor = BACKENDS[backend](prepared)(torch.from_numpy(images), chosen)
    return to_levels(made)


def to_levels(made: Tensor) -> np.ndarray:
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
                assert np.array_equal(found, pillows(name, image, magnitude, how)), (size, how, magnitude)


def random_steps(name: str, rng: np.random.Generator, count: int) -> Step:
    how = INTERPOLATIONS[rng.integers(3)]
    op = PillowOp(name, interpolation=how, fill=FILL)
    return op, rng.choice(np.float32(MAGNITUDES[name]), count), rng.random(count) < 0.7


@pytest.mark.parametrize("backend", BACKENDS)
def test_chains_are_pillows_and_leave_the_other_samples_alone(backend: str) -> None:
    rng = np.random.default_rng(0)
    images = pictures(37, 29)
    for _ in range(40):
        names = rng.choice(sorted(MAGNITUDES), 3)
        steps = [random_steps(name, rng, len(images)) for name in names]
        for row, (image, found) in enumerate(zip(images, run(backend, images, steps), strict=True)):
            for op, magnitudes, taken in steps:
                if taken[row]:
                    image = pillows(op.name, image, magnitudes[row], op.interpolation)
            assert np.array_equal(found, image), (names, row)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", sorted(MAGNITUDES))
def test_pixels_between_levels_are_rounded_first(name: str, backend: str) -> None:
    """After noise, or a blur: also pixels outside 0..1."""
    levels = torch.from_numpy(pictures(9, 8)[:3])
    x = levels.permute(0, 3, 1, 2) / 255 + torch.linspace(-0.4, 0.4, 9)[:, None] / 255
    x[levels.permute(0, 3, 1, 2) == 255] += 0.2
    magnitude = MAGNITUDES[name][len(MAGNITUDES[name]) // 2]
    prepared, chosen = drawn([(PillowOp(name), magnitude, True)], 3)
    if backend == "fused":
        (part,) = FusedBackend(prepared)._parts
        if library() is None:
            pytest.skip("no C++ compiler")
        made = FusedBackend(prepared)._run(x.permute(0, 2, 3, 1), part, chosen, library(), _BETWEEN)
    else:
        made = apply(x.clone(), prepared[0], chosen[0])
    expected = np.stack([pillows(name, image, magnitude, fill=(0, 0, 0)) for image in levels.numpy()])
    assert np.array_equal(to_levels(made), expected)


@pytest.mark.parametrize("name", MOVING)
def test_the_matrix_is_where_pillow_moves_a_spot(name: str) -> None:
    size, magnitudes = (61, 83), {"rotate": (25, -70, 180), "shear_x": (0.3, -0.3), "shear_y": (0.3, -0.3)}
    for magnitude in magnitudes.get(name, (7, -11.5)):
        (matrix,) = moves(*drawn([(PillowOp(name), magnitude, True)], 1), size)
        assert isinstance(matrix, np.ndarray)
        for x, y in ((40, 30), (30, 25), (50, 36)):
            image = np.zeros((*size, 3), dtype=np.uint8)
            image[y - 2 : y + 3, x - 2 : x + 3] = 255
            spot = np.argwhere(pillows(name, image, magnitude, "bilinear", (0, 0, 0))[..., 0] > 127)
            expected = matrix[0] @ (x + 0.5, y + 0.5, 1)  # in edges of pixels
            assert np.abs(spot.mean(axis=0)[::-1] + 0.5 - expected[:2]).max() < 0.3


def test_moves_are_carried_and_values_move_nothing() -> None:
    assert moves(*drawn([(PillowOp("equalize"), 0, True), (PillowOp("rotate"), 30, False)], 2), (8, 9)) == []
    prepared, _ = drawn([(PillowOp(name), 0, True) for name in sorted(MAGNITUDES)], 2)
    check_carried(prepared, ("masks", "boxes", "keypoints"))
    both = [(PillowOp("translate_x"), 3, True), (PillowOp("translate_y"), -2, np.array([True, False]))]
    first, second = moves(*drawn(both, 2), (8, 9))
    assert np.array_equal(second @ first, [[[1, 0, 3], [0, 1, -2], [0, 0, 1]], [[1, 0, 3], [0, 1, 0], [0, 0, 1]]])


def test_errors_say_what_was_found() -> None:
    with pytest.raises(ConfigError, match="`name` must be one of identity.*Found: 'blur'"):
        PillowOp("blur")
    with pytest.raises(ConfigError, match="`interpolation` must be one of nearest.*Found: 'cubic'"):
        PillowOp("rotate", interpolation="cubic")
