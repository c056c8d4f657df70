"""The fused program in torch, a step of a column at a time over the rows that have it; formulas of Kornia 0.9.

takes: float32 [B, 3, H, W] in 0..1, and the program of every sample (on the host).
does: one upload of arguments and row numbers, then per column and step the rows that have it; nothing waits for the
device.
gives: float32 [B, 3, H, W].

Runs on any device; used where there is neither a C++ compiler (CPU) nor Triton (CUDA), and on CUDA for the steps that
are not colours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.augment.ops.entry import Code
from gpuaug.random.keyed import Float, Int

_STATIC = {
    Code.BLUR: (0, 1, 3),
    Code.WARP: (9, 10, 11),
}  # arguments that must be equal within a call, known on the host
_BORDERS = ("constant", "reflect", "replicate", "circular")
_PADDINGS = ("zeros", "border", "reflection")


@dataclass(slots=True, eq=False)
class Group:
    """Rows of a batch that have the same step in the same column."""

    code: Code
    column: int
    rows: Int
    static: tuple[float, ...]


def groups(code: NDArray[np.int32], args: Float, columns: Iterable[int]) -> list[Group]:
    """Which steps the columns hold, in order; a step that no sample has is not among them."""
    found = []
    for column in columns:
        for number in np.unique(code[:, column]):
            if number == Code.NONE:
                continue
            step, rows = Code(number), np.flatnonzero(code[:, column] == number)
            if step not in _STATIC:
                found.append(Group(step, column, rows, ()))
                continue
            values = args[rows, column][:, _STATIC[step]]
            for kind in np.unique(values, axis=0):
                found.append(Group(step, column, rows[(values == kind).all(axis=1)], tuple(kind.tolist())))
    return found


def upload(arrays: list[NDArray[np.float32] | NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """float32 and int32 arrays to the device in one copy (pinned and asynchronous for CUDA)."""
    # Each begins at a multiple of 16 bytes: Triton compiles a kernel anew for pointers that are aligned otherwise, and
    # where an array begins would depend on the batch.
    sizes = [-(-a.size // 4) * 4 for a in arrays]
    packed = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    flat, at = packed.numpy(), 0
    for a, size in zip(arrays, sizes, strict=True):
        flat[at : at + a.size] = np.ascontiguousarray(a).reshape(-1).view(np.int32)
        at += size
    parts = packed.to(device, non_blocking=True).split(sizes)  # the caching host allocator keeps `packed` until copied
    return [
        (p.view(torch.float32) if a.dtype == np.float32 else p)[: a.size].view(a.shape)
        for p, a in zip(parts, arrays, strict=True)
    ]


def run(
    x: Tensor, steps: list[Group], args: Tensor, rows: list[Tensor], *, fields: dict[int, Tensor], ramps: Tensor
) -> Tensor:
    """The groups in order; ``x`` float32 [B, 3, H, W] is used up.

    Args:
        x: float32 [B, 3, H, W].
        steps: from :func:`groups`.
        args: float32 [B, S, ARGS] on the device.
        rows: the groups' row numbers, int32 on the device.
        fields: per column with noise, float32 [rows, 3, H, W].
        ramps: output positions of warps, from :func:`gpuaug.augment.fused.lower.warp_ramps`, on the device.
    """
    for group, at in zip(steps, rows, strict=True):
        extra = fields[group.column] if group.code is Code.NOISE else ramps
        if len(group.rows) == len(x):
            x = step(group, x, args[:, group.column], extra)
        else:
            y = step(group, x.index_select(0, at), args[:, group.column].index_select(0, at), extra)
            x.index_copy_(0, at.long(), y)
    return x


def step(group: Group, x: Tensor, a: Tensor, extra: Tensor | None = None) -> Tensor:
    """One step on float32 [n, 3, H, W], with arguments float32 [n, ARGS]; a new tensor.

    ``extra``: the field of NOISE, the ramps of WARP.
    """
    code = group.code
    if code is Code.BLUR:
        return _blur(x, a, taps=(int(group.static[0]), int(group.static[1])), border=_BORDERS[int(group.static[2])])
    if code is Code.NOISE:
        assert extra is not None
        return x + extra
    if code is Code.WARP:
        assert extra is not None
        padding, corners, projective = group.static
        return _warp(x, a, extra, padding=_PADDINGS[int(padding)], corners=bool(corners), projective=bool(projective))
    if code in _UNCLAMPED:
        return _UNCLAMPED[code](x, a)
    return _CLAMPED[code](x.clamp(0, 1), a)


def _per_sample(a: Tensor, column: int) -> Tensor:
    return a[:, column, None, None, None]


def _gray(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """float32 [n, 1, H, W]; with Kornia's additions, so that a gray pixel has Kornia's bits."""
    if weights is None:
        return torch.add(torch.add(x[:, :1] * 0.299, x[:, 1:2], alpha=0.587), x[:, 2:], alpha=0.114)
    r, g, b = (weights[:, c, None, None, None] for c in range(3))
    return torch.addcmul(torch.addcmul(x[:, :1] * r, x[:, 1:2], g), x[:, 2:], b)


def _saturation(x: Tensor, factor: Tensor) -> Tensor:
    top, bottom = x.amax(1, keepdim=True), x.amin(1, keepdim=True)
    delta = top - bottom
    adjusted = top * (delta / torch.where(top == 0, 1.0, top + 1e-8) * factor).clamp(0, 1)
    return ((x - bottom) * (adjusted / torch.where(delta == 0, 1.0, delta)) + (top - adjusted)).clamp_(0, 1)


def _hue(x: Tensor, a: Tensor) -> Tensor:
    from kornia.enhance import adjust_hue

    return adjust_hue(x, a[:, 0] * 2 * math.pi).clamp_(0, 1)


def _erase(x: Tensor, a: Tensor) -> Tensor:
    ys = torch.arange(x.shape[2], device=x.device)[None, :, None]
    xs = torch.arange(x.shape[3], device=x.device)[None, None, :]
    left, top, width, height, value = (a[:, c, None, None] for c in range(5))
    inside = (xs >= left) & (xs < left + width) & (ys >= top) & (ys < top + height)
    return torch.where(inside[:, None], value[:, None], x)


def _equalize(x: Tensor) -> Tensor:
    n, channels, height, width = x.shape
    index = (x * 255).long().reshape(n * channels, height * width)
    count = torch.zeros((n * channels, 256), dtype=torch.int32, device=x.device)
    count.scatter_add_(1, index, torch.ones_like(index, dtype=torch.int32))
    numbers = torch.arange(256, device=x.device)
    last = torch.where(count > 0, numbers, 0).amax(1, keepdim=True)
    step = (height * width - count.gather(1, last)) // 255
    table = (count.cumsum(1) + step // 2) // step.clamp(min=1)
    table = F.pad(table[:, :-1], (1, 0)).clamp(0, 255)
    y = (table.gather(1, index).float() / 255.0).view_as(x)
    return torch.where((step == 0).view(n, channels, 1, 1), x, y)


def _sharpness(x: Tensor, factor: Tensor) -> Tensor:
    weights = torch.full((3, 1, 3, 3), 1.0, dtype=torch.float32, device=x.device)
    weights[:, :, 1, 1] = 5.0
    weights = weights / 13
    smooth = x.clone()
    smooth[:, :, 1:-1, 1:-1] = F.conv2d(x, weights, groups=3).clamp_(0, 1)
    return (smooth + (x - smooth) * factor).clamp_(0, 1)


def gaussian(sigma: Tensor, taps: int) -> Tensor:
    """Normalised weights float32 [n, taps] (an odd number of them) from float32 [n, 1], as kornia.filters has them."""
    distance = (torch.arange(taps, device=sigma.device, dtype=torch.float32) - taps // 2).pow(2.0)
    width = 2 * sigma.pow(2.0)
    impulse = width == 0
    weights = torch.exp(-distance / torch.where(impulse, 1.0, width))
    weights = torch.where(impulse, (distance == 0).float(), weights)
    return weights / weights.sum(-1, keepdim=True)


def _blur(x: Tensor, a: Tensor, *, taps: tuple[int, int], border: str) -> Tensor:
    n, channels, height, width = x.shape
    for axis, size in ((3, taps[0]), (2, taps[1])):
        kernel = gaussian(a[:, 2:3], size).repeat_interleave(channels, 0)
        pad = (size // 2, size // 2, 0, 0) if axis == 3 else (0, 0, size // 2, size // 2)
        shape = (n * channels, 1, 1, size) if axis == 3 else (n * channels, 1, size, 1)
        padded = F.pad(x, pad, mode=border).view(1, n * channels, height + pad[2] * 2, width + pad[0] * 2)
        x = F.conv2d(padded, kernel.view(shape), groups=n * channels).view(n, channels, height, width)
    return x


def _warp(x: Tensor, a: Tensor, ramps: Tensor, *, padding: str, corners: bool, projective: bool) -> Tensor:
    width = x.shape[3]
    ramp = ramps[int(projective), int(corners)]
    xs, ys = ramp[None, None, :width], ramp[None, width:, None]
    m = [a[:, k, None, None] for k in range(9)]
    gx, gy = m[0] * xs + m[1] * ys + m[2], m[3] * xs + m[4] * ys + m[5]
    if projective:
        w = m[6] * xs + m[7] * ys + m[8]
        gx, gy = gx / w, gy / w
    grid = torch.stack([gx, gy], dim=-1)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode=padding, align_corners=corners)


def _autocontrast(x: Tensor, a: Tensor) -> Tensor:
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    y = (x - low) / (high - low + 1e-6)
    return torch.where(_per_sample(a, 0) > 0, y.clamp(0, 1), y)


def _contrast(x: Tensor, a: Tensor) -> Tensor:
    f = _per_sample(a, 0)
    return (x * f + _gray(x).mean((2, 3), keepdim=True) * (1 - f)).clamp_(0, 1)


def _towards_gray(x: Tensor, a: Tensor) -> Tensor:
    f = _per_sample(a, 0)
    return ((1 - f) * _gray(x) + f * x).clamp_(0, 1)


def _solarize(x: Tensor, a: Tensor) -> Tensor:
    z = (x + _per_sample(a, 1)).clamp_(0, 1)
    return torch.where(z < _per_sample(a, 0), z, 1 - z)


def _posterize(x: Tensor, a: Tensor) -> Tensor:
    shift = 8 - _per_sample(a, 0).int()
    kept = ((x * 255).int() >> shift) << shift
    return torch.where(shift <= 0, x, kept.float() / 255.0)


# Formulas of the steps: float32 [n, 3, H, W] and arguments [n, ARGS] to a new tensor.
_Formula = Callable[[Tensor, Tensor], Tensor]
_UNCLAMPED: dict[Code, _Formula] = {  # colours may lie outside 0..1
    Code.HFLIP: lambda x, a: x.flip(3),
    Code.VFLIP: lambda x, a: x.flip(2),
    Code.GRAY: lambda x, a: _gray(x, a[:, :3]).expand_as(x).contiguous(),
    Code.INVERT: lambda x, a: _per_sample(a, 0) - x,
    Code.SHUFFLE: lambda x, a: x.gather(1, a[:, :3].long()[:, :, None, None].expand_as(x)),
    Code.ERASE: _erase,
    Code.AUTOCONTRAST: _autocontrast,
}
_CLAMPED: dict[Code, _Formula] = {
    Code.MULTIPLY: lambda x, a: (x * a[:, :3, None, None]).clamp_(0, 1),
    Code.ADD: lambda x, a: (x + a[:, :3, None, None]).clamp_(0, 1),
    Code.CONTRAST: _contrast,
    Code.SATURATION: _towards_gray,
    Code.SATURATION_HSV: lambda x, a: _saturation(x, _per_sample(a, 0)),
    Code.HUE: _hue,
    Code.SOLARIZE: _solarize,
    Code.POSTERIZE: _posterize,
    Code.GAMMA: lambda x, a: (_per_sample(a, 1) * x.pow(_per_sample(a, 0))).clamp_(0, 1),
    Code.EQUALIZE: lambda x, a: _equalize(x),
    Code.SHARPNESS: lambda x, a: _sharpness(x, _per_sample(a, 0)),
}
