"""Entries for blurs, sharpness, noise, erasing, JPEG artefacts and snow."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from gpuaug.augment.ops.entry import Code, Entry, Normal, Steps, step, steps_of, uniform_from
from gpuaug.augment.ops.kornia_private import range_of, setting
from gpuaug.augment.parameters import Params, Rule, Size
from gpuaug.errors import ConfigError
from gpuaug.random.keyed import Float, scale

_LEAST = {1: 1, 3: 0}  # border type to least image side, minus half the kernel: 1 reflect, 3 circular; others: any


def _check_kernel(op: Any, key: str) -> None:
    given = op.flags["kernel_size"]
    sizes = tuple(given) if isinstance(given, list | tuple) else (given, given)
    if len(sizes) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 or n % 2 == 0 for n in sizes):
        raise ConfigError(f"`{key}.kernel_size` must be an odd, positive integer or two of them. Found: {given!r}.")


def _gaussian(op: Any) -> Steps:
    size, border = op.flags["kernel_size"], op.flags["border_type"].value
    ky, kx = (size, size) if isinstance(size, int) else size
    arguments = steps_of(Code.BLUR, kx, ky, "sigma", border)

    def write(out: Float, params: Params, size: Size) -> None:
        least = _LEAST.get(border)
        if least is not None and (size[1] < kx // 2 + least or size[0] < ky // 2 + least):
            raise ConfigError(
                f"RandomGaussianBlur needs images larger than half its `kernel_size` {(ky, kx)}. Found: "
                f"{size[0]}x{size[1]} pixels. Choose a smaller kernel."
            )
        arguments.write(out, params, size)

    return Steps(arguments.codes, write)


def _motion(op: Any) -> tuple[int, Rule] | None:
    kernel_size = setting(op, "kernel_size")
    if not isinstance(kernel_size, int):
        return None  # a range of sizes: Kornia would draw one size for the whole batch
    count, rule = uniform_from("angle_factor", "direction_factor")(op)
    return count, partial(_motion_parameters, rule=rule, kernel_size=kernel_size)


def _motion_parameters(u: Float, size: Size, *, rule: Rule, kernel_size: int) -> Params:
    return {"ksize_factor": np.full(len(u), kernel_size, dtype=np.int32), **rule(u, size)}


def _write_sharpness(out: Float, params: Params, size: Size) -> None:
    if min(size) < 3:
        raise ConfigError(f"RandomSharpness needs images of at least 3x3 pixels. Found: {size[0]}x{size[1]}.")
    out[:, 0, 0] = params["sharpness"]


def _erasing(op: Any) -> tuple[int, Rule]:
    ratios: tuple[Any, ...] | None = range_of(op, "ratio_sampler")
    if ratios is None:  # if the range contains 1, Kornia uses two samplers: below 1 and above 1
        ratios = (*range_of(op, "ratio_sampler1"), range_of(op, "ratio_sampler2")[1])
    area, value = range_of(op, "scale_sampler"), float(setting(op, "value"))
    return 2 * len(ratios), partial(_erased_box, area=area, ratios=ratios, value=value)


def _erased_box(u: Float, size: Size, *, area: tuple[Any, Any], ratios: tuple[Any, ...], value: float) -> Params:
    height, width = size
    target = scale(u[:, 0], *area) * np.float32(height * width)
    if len(ratios) == 3:  # low < 1 < high: choose between the two ranges with equal probability
        wide, tall = scale(u[:, 1], ratios[0], ratios[1]), scale(u[:, 2], ratios[1], ratios[2])
        ratio = np.where(np.rint(u[:, 3]) != 0, wide, tall)
        at = 4
    else:
        ratio, at = scale(u[:, 1], *ratios), 2
    h = np.clip(np.rint(np.sqrt(target * ratio)), 1, height).astype(np.float32)
    w = np.clip(np.rint(np.sqrt(target / ratio)), 1, width).astype(np.float32)
    one = np.float32(1)
    return {
        "widths": w,
        "heights": h,
        "xs": np.floor(u[:, at] * (np.float32(width) - w + one)),
        "ys": np.floor(u[:, at + 1] * (np.float32(height) - h + one)),
        "values": np.full(len(u), value, dtype=np.float32),
    }


def _gaussian_noise(op: Any, keys: Tensor, size: Size, normal: Normal) -> dict[str, Tensor]:
    values = normal(keys, 3 * size[0] * size[1]).view(-1, 3, *size)
    return {"gaussian_noise": values.mul_(setting(op, "std")).add_(setting(op, "mean"))}  # in place, to save memory


ENTRIES = {
    "RandomGaussianBlur": Entry("pixels", _gaussian, uniform_from("sigma"), check=_check_kernel),
    "RandomBoxBlur": Entry("pixels"),
    "RandomMedianBlur": Entry("pixels"),
    "RandomMotionBlur": Entry("pixels", parameters=_motion),
    "RandomSharpness": Entry("pixels", lambda op: Steps((Code.SHARPNESS,), _write_sharpness)),
    "RandomErasing": Entry("pixels", step(Code.ERASE, "xs", "ys", "widths", "heights", "values"), _erasing),
    "RandomGaussianNoise": Entry("pixels", step(Code.NOISE), noise=_gaussian_noise),
    # torch's matrix products round differently for other batch sizes (a difference of 1.2e-7)
    "RandomJPEG": Entry("pixels", parameters=uniform_from("jpeg_quality"), one_by_one=True),
    "RandomSnow": Entry("pixels"),
}
