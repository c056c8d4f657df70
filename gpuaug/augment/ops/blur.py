"""Blurs and sharpness."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from gpuaug.augment.ops.entry import Code, Entry, Steps, all_uniform, uniform_from
from gpuaug.augment.ops.kornia_private import setting
from gpuaug.augment.parameters import Params, Rule, Size
from gpuaug.errors import ConfigError
from gpuaug.random.keyed import Float

_LEAST = {1: 1, 3: 0}  # border type: pixels an image needs beyond half the kernel: reflect 1, circular 0, others any


def _check_kernel(op: Any, key: str) -> None:
    given = op.flags["kernel_size"]
    sizes = tuple(given) if isinstance(given, list | tuple) else (given, given)
    if len(sizes) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 or n % 2 == 0 for n in sizes):
        raise ConfigError(
            f"`{key}.kernel_size` must be odd and positive, a whole number or two of them. Found: {given!r}."
        )


def _gaussian(op: Any) -> Steps:
    size = op.flags["kernel_size"]
    ky, kx = (size, size) if isinstance(size, int) else size
    return Steps((Code.BLUR,), partial(_write_gaussian, taps=(kx, ky), border=op.flags["border_type"].value))


def _write_gaussian(out: Float, params: Params, size: Size, *, taps: tuple[int, int], border: int) -> None:
    least = _LEAST.get(border)
    if least is not None and (size[1] < taps[0] // 2 + least or size[0] < taps[1] // 2 + least):
        raise ConfigError(
            f"RandomGaussianBlur with `kernel_size` {taps[::-1]} needs images larger than half of it. Found: "
            f"{size[0]}x{size[1]}. Choose a smaller kernel."
        )
    out[:, 0, 0], out[:, 0, 1], out[:, 0, 2], out[:, 0, 3] = taps[0], taps[1], params["sigma"], border


def _motion(op: Any) -> tuple[int, Rule] | None:
    kernel_size = setting(op, "kernel_size")
    if not isinstance(kernel_size, int):
        return None  # a range of sizes: Kornia draws one size for the whole batch
    count, rule = uniform_from(angle_factor="angle_sampler", direction_factor="direction_sampler")(op)
    return count, partial(_motion_parameters, rule=rule, kernel_size=kernel_size)


def _motion_parameters(u: Float, size: Size, *, rule: Rule, kernel_size: int) -> Params:
    return {"ksize_factor": np.full(len(u), kernel_size, dtype=np.int32), **rule(u, size)}


def _write_sharpness(out: Float, params: Params, size: Size) -> None:
    if min(size) < 3:
        raise ConfigError(f"RandomSharpness needs images of at least 3x3 pixels. Found: {size[0]}x{size[1]}.")
    out[:, 0, 0] = params["sharpness"]


ENTRIES = {
    "RandomGaussianBlur": Entry(
        "pixels", parameters=uniform_from(sigma="sigma_sampler"), steps=_gaussian, check=_check_kernel
    ),
    "RandomBoxBlur": Entry("pixels"),
    "RandomMedianBlur": Entry("pixels"),
    "RandomMotionBlur": Entry("pixels", parameters=_motion, without_rule="its kernel size is one per batch"),
    "RandomSharpness": Entry(
        "pixels", parameters=all_uniform, steps=lambda op: Steps((Code.SHARPNESS,), _write_sharpness)
    ),
}
