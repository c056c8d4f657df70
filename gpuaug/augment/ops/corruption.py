"""Erasing, noise, JPEG artefacts and snow."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from gpuaug.augment.ops.entry import Code, Entry, Normal, all_uniform, step, uniform_from
from gpuaug.augment.ops.kornia_private import optional_range, range_of, setting
from gpuaug.augment.parameters import Params, Rule, Size
from gpuaug.random.keyed import Float, scale


def _erasing(op: Any) -> tuple[int, Rule]:
    ratios: tuple[Any, ...] | None = optional_range(op, "ratio_sampler")
    if ratios is None:  # a range around 1 is drawn in two halves
        ratios = (*range_of(op, "ratio_sampler1"), range_of(op, "ratio_sampler2")[1])
    area, value = range_of(op, "scale_sampler"), float(setting(op, "value"))
    return 2 * len(ratios), partial(_erased_box, area=area, ratios=ratios, value=value)


def _erased_box(u: Float, size: Size, *, area: tuple[Any, Any], ratios: tuple[Any, ...], value: float) -> Params:
    height, width = size
    target = scale(u[:, 0], *area) * np.float32(height * width)
    if len(ratios) == 3:  # low < 1 < high: a coin decides for wide or tall
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
    return {"gaussian_noise": values.mul_(setting(op, "std")).add_(setting(op, "mean"))}  # as large as the batch


ENTRIES = {
    "RandomErasing": Entry(
        "pixels", parameters=_erasing, steps=step(Code.ERASE, "xs", "ys", "widths", "heights", "values")
    ),
    "RandomGaussianNoise": Entry("pixels", steps=step(Code.NOISE), noise=_gaussian_noise),
    "RandomJPEG": Entry("pixels", parameters=uniform_from(jpeg_quality="jpeg_quality_sampler")),
    "RandomSnow": Entry("pixels", parameters=all_uniform),
}
