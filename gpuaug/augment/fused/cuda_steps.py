"""Decides which columns of a program share a Triton kernel, and runs the remaining steps in torch.

A program has a row per sample and a column per step. No step waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.augment.ops import pillow
from gpuaug.augment.ops.codes import PILLOW_FLAG, Code, Trait, having
from gpuaug.native.buffers import to_device
from gpuaug.random.keyed import Float, Int

_STATIC = {  # for each step: indices of the arguments that must be equal for all rows of one call
    Code.BLUR: (0, 1, 3),
    Code.WARP: (9, 10, 11, 12),
    Code.RESAMPLE: (12,),
    **dict.fromkeys(having(Trait.PILLOW), (PILLOW_FLAG,)),
}
_PADDINGS = ("zeros", "border", "reflection")
_COSINES = np.cos(np.outer(2 * np.arange(8) + 1, np.arange(8)) * np.pi / 16) / 2  # of JPEG; by place and frequency
_COSINES[:, 0] = np.sqrt(0.125)
_COSINES = _COSINES.astype(np.float32)
POINTS = having(Trait.KERNEL)  # steps that can share a kernel

# ascending rows [n, T], their column, and float32 values [n, ...]. Each of the n is for T rows: the frames of a clip
Table = tuple[Int, int, Tensor]


class CannotRunError(Exception):
    """Triton cannot compile, load or launch a kernel here, but the device works."""


class Group(NamedTuple):
    """Rows that have the same step and the same static arguments in one column."""

    code: Code
    rows: Int
    static: tuple[float, ...]


def groups(code: NDArray[np.int32], args: Float, among: int = -1) -> list[Group]:
    """Group the rows of one column: ``code`` int32 [B], ``args`` float32 [B, ARGS]; of ``among``, a set of steps."""
    made = []
    for number in _numbers(_union(code) & among):
        step: Code = Code(number)  # type: ignore[call-arg]  # a look-up
        rows = np.flatnonzero(code == number)
        values = args[rows][:, _STATIC.get(step, ())]
        if (values == values[:1]).all():  # nearly always: np.unique takes 50 us
            made.append(Group(step, rows, tuple(values[0].tolist())))
            continue
        for kind in np.unique(values, axis=0):
            made.append(Group(step, rows[(values == kind).all(axis=1)], tuple(kind.tolist())))
    return made


# A set of steps is an integer whose bit k stands for the step with number k.


def _set(codes: Iterable[Code]) -> int:
    return sum(1 << code for code in codes)


def _numbers(steps: int) -> list[int]:
    return [number for number in range(1, steps.bit_length()) if steps >> number & 1]


def _union(code: NDArray[np.int32]) -> Any:
    """The steps of each column, without NONE."""
    found = np.bitwise_or.reduce(np.left_shift(1, code, dtype=np.int64), axis=0)
    return (found & ~1).tolist()


_FLIPS, _ERASE = _set([Code.HFLIP, Code.VFLIP]), _set([Code.ERASE])
_CONTRAST, _LEVELS = _set([Code.CONTRAST]), _set([Code.LEVELS])
_POINTS, _PILLOWS = _set(POINTS), _set(having(Trait.PILLOW) & POINTS)
_COLOURS = _POINTS & ~_FLIPS
_INVERT, _GRAY = _set([Code.INVERT]), _set([Code.GRAY])


class Stretch(NamedTuple):
    """Columns [first, last) of a program. One kernel runs all steps that are in POINTS. Then ``rest`` runs."""

    first: int
    last: int
    colour: bool  # whether some steps in POINTS are not flips
    contrast: bool  # whether some of the steps are contrast steps
    pillow: bool  # whether some steps in POINTS compute with Pillow's arithmetic
    bounded: bool  # whether steps in POINTS keep colours within 0..1
    kernel: str  # what runs `rest`: "blur", "pillow" (Triton kernels, on copies of its samples), or "" for torch
    rest: list[Group]  # steps of the last column that are not in POINTS
    # On the device, filled in by `upload`, for B or more samples: flips int32 (1 mirrored, 2 upside down, 3 both); sums
    # int64, zeros to which a kernel adds gray for contrast; places int32, the row of the sample among the copied
    # samples, or -1. Then rows int32 [n] of each group of `rest`, or of all copied samples.
    inputs: Sequence[Tensor] = ()


def _kernel(group: Group) -> str:
    if group.code is Code.BLUR:
        return "blur"
    return "pillow" if group.code is Code.RESAMPLE or group.static == (1.0,) else ""  # 1: with Pillow's arithmetic


def stretches(code: NDArray[np.int32], args: Float) -> list[Stretch]:
    """Split a program into as few stretches as possible."""
    made: list[Stretch] = []
    columns, flagged = _union(code), _union(np.where(args[..., PILLOW_FLAG] != 0, code, 0))
    contrasts = code == Code.CONTRAST
    twice = (contrasts.sum(1) > 1).any()
    first = 0

    def close(last: int, kernel: str, rest: list[Group]) -> None:
        nonlocal first
        steps, pillows = (reduce(or_, found[first:last], 0) for found in (columns, flagged))
        pillow = pillows & _PILLOWS or steps & _LEVELS
        bounded = not (steps & _INVERT or pillows & _GRAY)  # GRAY's argument PILLOW_FLAG: the result can leave 0..1
        traits = (bool(steps & _COLOURS), bool(steps & _CONTRAST), bool(pillow), bounded)
        made.append(Stretch(first, last, *traits, kernel, rest))
        first = last

    for column, here in enumerate(columns):
        # A kernel has one mean per sample, so a second contrast step of a sample needs another kernel. A kernel flips
        # while it loads pixels, so a flip after erasing needs another kernel.
        second = twice and (contrasts[:, first:column].any(1) & contrasts[:, column]).any()
        if second or (here & _FLIPS and reduce(or_, columns[first:column], 0) & _ERASE):
            close(column, "", [])
        rest = groups(code[:, column], args[:, column], ~_POINTS) if here & ~_POINTS else []
        for kernel in ("", "blur", "pillow"):  # a Triton kernel can write the result, so torch is first
            if own := [group for group in rest if _kernel(group) == kernel]:
                close(column + 1, kernel, own)
    if first < code.shape[1] or not made or not made[-1].kernel:
        close(code.shape[1], "", [])
    return made


class Program(NamedTuple):
    """A batch's program on the device."""

    stretches: list[Stretch]
    code: Tensor  # int32 [B, S]
    args: Tensor  # float32 [B, S, ARGS]
    ends: Tensor  # float32 [2, n, 8]; for inner parts and for the output: scale (3), shift (3), padding
    ramps: Tensor


def samples_of(channels: int) -> int:
    """Number of samples of the kernels that an image consists of: they have three channels each."""
    return -(-channels // 3)


def upload(
    code: NDArray[np.int32], args: Float, ramps: Float, scale: Sequence[float], shift: Sequence[float],
    device: torch.device, channels: int = 3,
) -> Program:  # fmt: skip
    """Copy the program, and zeros for ``sums``, to the device in one transfer."""
    parts = samples_of(channels)
    if parts > 1:
        code, args = np.repeat(code, parts, axis=0), np.repeat(args, parts, axis=0)
    split, batch = stretches(code, args), len(code)
    ends = np.zeros((2, parts, 8), dtype=np.float32)  # each pair begins at a multiple of 16 bytes
    ends[0, :, :3] = 1
    ends[1, :, :6] = np.hstack([np.resize(np.resize(v, channels), (parts, 3)) for v in (scale, shift)])
    arrays: list[NDArray[np.int32] | Float] = [code, args, ends, ramps]
    for stretch in split:
        own = np.zeros((4, -(-batch // 4) * 4), dtype=np.int32)  # flips; places; sums in two rows
        within = code[:, stretch.first : stretch.last]
        np.bitwise_xor.reduce(within * (within <= Code.VFLIP), axis=1, out=own[0, :batch])  # HFLIP is 1, VFLIP 2
        rows = [group.rows.astype(np.int32) for group in stretch.rest]
        if stretch.kernel:
            rows = [np.concatenate(rows)]
            own[1] = -1
            own[1, rows[0]] = np.arange(len(rows[0]))
        arrays += [own, *rows]
    code_, args_, ends_, ramps_, *packed = pack(arrays, device)
    for number, stretch in enumerate(split):
        count = 2 if stretch.kernel else 1 + len(stretch.rest)
        (own_, *rows_), packed = packed[:count], packed[count:]
        split[number] = stretch._replace(inputs=[own_[0], own_[2:].view(torch.int64), own_[1], *rows_])
    return Program(split, code_, args_, ends_, ramps_)


def pack(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Move arrays of 4 or 8 bytes per value to the device in one copy (pinned and asynchronous for CUDA)."""
    # Each array starts at a multiple of 16 bytes. Otherwise its alignment would depend on the batch, and Triton would
    # compile a kernel again for each alignment.
    sizes = [-(-a.nbytes // 16) * 4 for a in arrays]
    packed = torch.empty(sum(sizes), dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    host, start = packed.numpy(), 0
    for a, size in zip(arrays, sizes, strict=True):
        host[start : start + a.nbytes // 4] = np.ascontiguousarray(a).reshape(-1).view(np.int32)
        start += size
    parts = packed.to(device, non_blocking=True).split(sizes)  # torch reuses `packed` only after the copy
    return [
        p[: a.nbytes // 4].view(getattr(torch, a.dtype.name)).view(a.shape) for p, a in zip(parts, arrays, strict=True)
    ]


# --- steps in torch


def run_step(
    group: Group, x: Tensor, a: Tensor, rows: Tensor, *, table: Any, ramps: Tensor, formulas: Any = None,
    channels: int = 3,
) -> Tensor:  # fmt: skip
    """Run a group's step on ``x``, float32 [B, 3, H, W], which may be overwritten.

    ``a``: arguments of the column; ``channels``: of the images that the samples belong to.
    """
    whole = len(group.rows) == len(x)
    y, own = (x, a) if whole else (x.index_select(0, rows), a.index_select(0, rows))
    if group.code is Code.NOISE:  # a row of the table can be for several rows of `y`
        y = (y.view(len(table), -1, *table.shape[1:]) + table[:, None]).view_as(y)
    elif group.code is Code.ERASE_NOISE:
        y = _erase(y, own, table, rows % samples_of(channels) * 3, channels)
    elif group.code is Code.JPEG:
        y = _jpeg(y.clamp(0, 1), table)
    elif group.code is Code.WARP:
        y = _warp(y, own, ramps, group.static)
    elif group.code is Code.AUTOCONTRAST:
        low, high = y.amin((2, 3), keepdim=True), y.amax((2, 3), keepdim=True)
        y = (y - low) / (high - low + 1e-6)
        y = torch.where(own[:, 0, None, None, None] > 0, y.clamp(0, 1), y)
    elif group.code is Code.EQUALIZE:
        y = y.clamp(0, 1)
        levels, flat = pillow.equalized((y * 255).long())
        y = torch.where(flat, y, levels.float() / 255.0)
    elif group.code is Code.SHARPNESS:
        y = _sharpness(y.clamp(0, 1), own[:, 0, None, None, None])
    else:
        y = formulas[group.code](y.clamp(0, 1), own)  # an operation of gpuaug's own
    return y.contiguous() if whole else x.index_copy_(0, rows.long(), y)


def _erase(x: Tensor, a: Tensor, table: Tensor | None, first: Tensor, channels: int) -> Tensor:
    """Fill each box with colour + std * noise. A row of ``table`` begins with the noise of its box.

    ``first``: [B], the channel of its image that a sample begins with.
    """
    left, top, width, height = (a[:, k, None, None] for k in range(4))
    right = torch.arange(x.shape[3], device=x.device)[None, None, :] - left
    down = torch.arange(x.shape[2], device=x.device)[None, :, None] - top
    inside = (right >= 0) & (right < width) & (down >= 0) & (down < height)
    value = a[:, 4:7, None, None]
    if table is not None:
        channel = (first[:, None] + torch.arange(3, device=x.device)).clamp(max=channels - 1)[:, :, None, None]
        at = ((channel * height[:, None] + down[:, None]) * width[:, None] + right[:, None]).long()
        # the table is as wide as the largest box with noise; a box without (std 0) may be larger
        at = torch.where(inside[:, None], at, 0).flatten(1).clamp(max=table.shape[1] - 1)
        value = value + a[:, 7:10, None, None] * table.gather(1, at.view(len(table), -1)).view_as(x)
    return torch.where(inside[:, None], value, x)


def table_of(group: Group, column: int, tables: Sequence[Table]) -> Tensor | None:
    """The table of a group, float32 [n, ...]; None if the group's step has no table. Each row is for as many samples.

    The tables of several operations are joined, with a row for each sample. Missing values are 0.
    """
    own = [(rows, values) for rows, at, values in tables if at == column and rows[0, 0] in group.rows]
    if not own or own[0][0].size == len(group.rows):
        return own[0][1] if own else None
    each = []
    for rows, values in own:
        # in noise, three of an image's channels belong to a sample
        shape = (3, *values.shape[2:]) if group.code is Code.NOISE else values.shape[1:]
        times = rows.size * math.prod(shape) // values.numel()
        each.append(values[:, None].expand(-1, times, *values.shape[1:]).reshape(rows.size, *shape))
    joined = each[0].new_zeros((len(group.rows), *max(values.shape[1:] for values in each)))
    for (rows, _), values in zip(own, each, strict=True):
        at = to_device(torch.from_numpy(np.searchsorted(group.rows, rows.ravel())), values.device)
        joined[:, : values.shape[1]].index_copy_(0, at, values)
    return joined


def _sharpness(x: Tensor, factor: Tensor) -> Tensor:
    weights = torch.full((3, 1, 3, 3), 1.0, dtype=torch.float32, device=x.device)
    weights[:, :, 1, 1] = 5.0
    weights = weights / 13
    smooth = x.clone()
    smooth[:, :, 1:-1, 1:-1] = F.conv2d(x, weights, groups=3).clamp_(0, 1)
    return (smooth + (x - smooth) * factor).clamp_(0, 1)


def _jpeg(x: Tensor, divisors: Tensor) -> Tensor:
    """Kornia's JPEG codec, with sums in one order: in matrix products of torch, a sample depends on its batch.

    ``divisors``: [B, 128], for luma and chroma.
    """
    height, width = x.shape[2:]
    r, g, b = F.pad(x, (0, -width % 16, 0, -height % 16), "replicate").unbind(1)
    luma = 0.299 * r + 0.587 * g + 0.114 * b
    chroma = torch.stack(((b - luma) * 0.564, (r - luma) * 0.713), 1) + 0.5
    luma = _coded(255 * luma[:, None], divisors[:, :64])[:, 0] / 255
    chroma = _coded(_halved(255 * chroma), divisors[:, 64:])
    blue, red = (F.interpolate(chroma, scale_factor=2, mode="bilinear") / 255 - 0.5).unbind(1)
    green = luma - 0.7144034731 * red - 0.3443401356 * blue
    y = torch.stack((luma + 1.4025245442 * red, green, luma + 1.7730496454 * blue), 1)
    return y[:, :, :height, :width].clamp(0, 1)


def _halved(x: Tensor) -> Tensor:
    """Blur with a Gaussian (3 taps, sigma 0.5), then take the mean of 2 x 2 pixels."""
    side = 0.10650697891920077
    height, width = x.shape[2:]
    x = F.pad(x, (1, 1, 1, 1), "reflect")
    first, second, third, fourth = (x[:, :, k : k + height : 2] for k in range(4))
    x = side / 2 * (first + fourth) + (1 - side) / 2 * (second + third)
    first, second, third, fourth = (x[..., k : k + width : 2] for k in range(4))
    return side / 2 * (first + fourth) + (1 - side) / 2 * (second + third)


def _coded(x: Tensor, divisors: Tensor) -> Tensor:
    """Encode and decode blocks of 8 x 8. Kornia rounds x to round(x) + (x - round(x))^3."""
    basis = to_device(torch.from_numpy(_COSINES), x.device)
    blocks = x.reshape(*x.shape[:2], -1, 8, x.shape[3] // 8, 8) - 128
    divisors = divisors.view(-1, 1, 1, 8, 1, 8)
    values = _transformed(blocks, basis) / divisors
    whole = values.round()
    values = (whole + (values - whole) ** 3) * divisors
    return (_transformed(values, basis.T) + 128).view_as(x)


def _transformed(x: Tensor, basis: Tensor) -> Tensor:
    """Multiply the last axis and the third last one by ``basis``."""
    for dim, weights in ((5, basis), (3, basis[:, :, None, None])):
        total = x.narrow(dim, 0, 1) * weights[0]
        for k in range(1, 8):
            total = torch.addcmul(total, x.narrow(dim, k, 1), weights[k])
        x = total
    return x


def _warp(x: Tensor, a: Tensor, ramps: Tensor, static: tuple[float, ...]) -> Tensor:
    padding, corners, projective, nearest = (int(v) for v in static)
    width, ramp = x.shape[3], ramps[projective, corners]
    xs, ys = ramp[None, None, :width], ramp[None, width:, None]
    m = [a[:, k, None, None] for k in range(9)]
    gx, gy = m[0] * xs + m[1] * ys + m[2], m[3] * xs + m[4] * ys + m[5]
    if projective:
        w = m[6] * xs + m[7] * ys + m[8]
        gx, gy = gx / w, gy / w
    grid = torch.stack([gx, gy], dim=-1)
    mode = "nearest" if nearest else "bilinear"
    return F.grid_sample(x, grid, mode=mode, padding_mode=_PADDINGS[padding], align_corners=bool(corners))
