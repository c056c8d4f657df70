"""Decides which columns of a program share a Triton kernel, and runs the remaining steps in torch.

A program has a row per sample and a column per step. Only the JPEG step waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.augment.ops import pillow
from gpuaug.augment.ops.codes import PILLOW_FLAG, Code, Trait, having
from gpuaug.augment.reference import exact_products
from gpuaug.random.keyed import Float, Int

_STATIC = {  # for each step: indices of the arguments that must be equal for all rows of one call
    Code.BLUR: (0, 1, 3),
    Code.WARP: (9, 10, 11),
    Code.RESAMPLE: (12,),
    Code.FILTER: (0, 3, 4),
    Code.RAIN: (3, 4),
    **dict.fromkeys(having(Trait.PILLOW), (PILLOW_FLAG,)),
}
_BORDERS = ("constant", "reflect", "replicate", "circular")
_PADDINGS = ("zeros", "border", "reflection")
POINTS = having(Trait.KERNEL)  # steps that can share a kernel

Table = tuple[Int, int, Tensor]  # ascending rows, their column, and float32 values [rows, ...]


class CannotRunError(Exception):
    """Triton cannot compile, load or launch a kernel here, but the device works."""


class Group(NamedTuple):
    """Rows that have the same step and the same static arguments in one column."""

    code: Code
    rows: Int
    static: tuple[float, ...]


def groups(code: NDArray[np.int32], args: Float) -> list[Group]:
    """Group the rows of one column: ``code`` int32 [B], ``args`` float32 [B, ARGS]."""
    made = []
    for number in np.unique(code[code != Code.NONE]):
        step: Code = Code(number)  # type: ignore[call-arg]  # a look-up
        rows = np.flatnonzero(code == number)
        values = args[rows][:, _STATIC.get(step, ())]
        for kind in np.unique(values, axis=0):
            made.append(Group(step, rows[(values == kind).all(axis=1)], tuple(kind.tolist())))
    return made


class Stretch(NamedTuple):
    """Columns [first, last) of a program. One kernel runs all steps that are in POINTS. Then ``rest`` runs."""

    first: int
    last: int
    contrast: bool  # whether some of the steps are contrast steps
    pillow: bool  # whether some steps in POINTS compute with Pillow's arithmetic
    rest: list[Group]  # the steps that are not in POINTS; only the last column has such steps
    # On the device, filled in by `upload`: flips int32 [B] (1 mirrored, 2 upside down, 3 both); sums int64 [B], zeros
    # to which a kernel adds gray for contrast; places int32 [B], the row of the sample among the blurred samples, or
    # -1; then rows int32 [n] of each group of `rest`, or of all blurs together.
    inputs: Sequence[Tensor] = ()

    @property
    def blur(self) -> bool:
        """Whether all steps in ``rest`` are blurs. If so, the blur kernel runs them."""
        return len(self.rest) > 0 and all(group.code is Code.BLUR for group in self.rest)


def stretches(code: NDArray[np.int32], args: Float) -> list[Stretch]:
    """Split a program into as few stretches as possible."""
    made: list[Stretch] = []
    first, contrasts, erased = 0, np.zeros(len(code), dtype=bool), False
    pillows = np.isin(code, list(having(Trait.PILLOW) & POINTS)) & (args[..., PILLOW_FLAG] != 0) | (code == Code.LEVELS)

    def close(last: int, rest: list[Group]) -> None:
        nonlocal first, contrasts, erased
        made.append(Stretch(first, last, bool(contrasts.any()), bool(pillows[:, first:last].any()), rest))
        first, contrasts, erased = last, np.zeros(len(code), dtype=bool), False

    for column, codes in enumerate(code.T):
        here, contrast = {int(c) for c in np.unique(codes)} - {0}, codes == Code.CONTRAST
        # A kernel has one mean per sample, so a second contrast step of a sample needs another kernel. A kernel flips
        # while it loads pixels, so a flip after erasing needs another kernel.
        if (contrasts & contrast).any() or (erased and here & {Code.HFLIP, Code.VFLIP}):
            close(column, [])
        contrasts, erased = contrasts | contrast, erased or Code.ERASE in here
        if here - POINTS:
            close(column + 1, groups(np.where(np.isin(codes, list(POINTS)), 0, codes), args[:, column]))
    if first < code.shape[1] or not made or not made[-1].blur:
        close(code.shape[1], [])
    return made


class Program(NamedTuple):
    """A batch's program on the device."""

    stretches: list[Stretch]
    code: Tensor  # int32 [B, S]
    args: Tensor  # float32 [B, S, ARGS]
    ends: tuple[Tensor, Tensor]  # for inner parts and for the output: scale and shift, float32 [2, 3]
    ramps: Tensor


def upload(
    code: NDArray[np.int32], args: Float, ramps: Float, scale: Sequence[float], shift: Sequence[float],
    device: torch.device,
) -> Program:  # fmt: skip
    """Copy the program, and zeros for ``sums``, to the device in one transfer."""
    split = stretches(code, args)
    ends = [np.array(pair, dtype=np.float32) for pair in (((1, 1, 1), (0, 0, 0)), (scale, shift))]
    arrays: list[NDArray[np.int32] | Float] = [code, args, *ends, ramps]
    for stretch in split:
        within = code[:, stretch.first : stretch.last]
        turned = (within == Code.HFLIP).sum(1) % 2 + 2 * ((within == Code.VFLIP).sum(1) % 2)
        places = np.full(len(code), -1, dtype=np.int32)
        rows = [group.rows.astype(np.int32) for group in stretch.rest]
        if stretch.blur:
            rows = [np.concatenate(rows)]
            places[rows[0]] = np.arange(len(rows[0]))
        arrays += [turned.astype(np.int32), np.zeros((len(code), 2), dtype=np.int32), places, *rows]
    packed = iter(pack(arrays, device))
    code_, args_, between, last, ramps_ = (next(packed) for _ in range(5))
    for number, stretch in enumerate(split):
        flips, sums, places_ = next(packed), next(packed).view(torch.int64), next(packed)
        count = 1 if stretch.blur else len(stretch.rest)
        split[number] = stretch._replace(inputs=[flips, sums, places_, *(next(packed) for _ in range(count))])
    return Program(split, code_, args_, (between, last), ramps_)


def pack(arrays: list[NDArray[np.int32] | Float], device: torch.device) -> list[Tensor]:
    """Move float32 and int32 arrays to the device in one copy (pinned and asynchronous for CUDA)."""
    # Each array starts at a multiple of 16 bytes. Otherwise its alignment would depend on the batch, and Triton would
    # compile a kernel again for each alignment.
    sizes = [-(-a.size // 4) * 4 for a in arrays]
    packed = torch.empty(sum(sizes), dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    for a, part in zip(arrays, packed.split(sizes), strict=True):
        part.numpy()[: a.size] = np.ascontiguousarray(a).reshape(-1).view(np.int32)
    parts = packed.to(device, non_blocking=True).split(sizes)  # torch reuses `packed` only after the copy
    return [
        (p.view(torch.float32) if a.dtype == np.float32 else p)[: a.size].view(a.shape)
        for p, a in zip(parts, arrays, strict=True)
    ]


# --- steps in torch


def run_step(
    group: Group, x: Tensor, a: Tensor, rows: Tensor, *, table: Any, ramps: Tensor, formulas: Any = None
) -> Tensor:
    """Run a group's step on ``x``, float32 [B, 3, H, W], which may be overwritten. ``a``: arguments of the column."""
    from kornia.enhance import jpeg_codec_differentiable
    from kornia.filters import filter2d, filter2d_separable, get_gaussian_kernel1d

    whole = len(group.rows) == len(x)
    y, own = (x, a) if whole else (x.index_select(0, rows), a.index_select(0, rows))
    if group.code is Code.NOISE:
        y = y + table
    elif group.code is Code.ERASE_NOISE:
        y = _erase(y, own, table)
    elif group.code is Code.BLUR:  # the column has other steps too, so the blur kernel cannot run
        *taps, border = (int(v) for v in group.static)
        across, down = (get_gaussian_kernel1d(n, own[:, 2:3]) for n in taps)
        y = filter2d_separable(y, across, down, _BORDERS[border])
    elif group.code is Code.FILTER:
        y = filter2d(y, motion_kernels(own, group.static), _BORDERS[int(group.static[2])])
    elif group.code is Code.RAIN:
        y = _rain(y, own, table, int(group.static[1]))
    elif group.code is Code.REPLACE:
        y = torch.where(table < 0, y, table)
    elif group.code is Code.FILL:
        y = torch.where(own[:, 1:4, None, None] > 0, own[:, 0, None, None, None], y)
    elif group.code is Code.SNOW:
        y = _snow(y.clamp(0, 1), own)
    elif group.code is Code.JPEG:  # waits for the device, because Kornia checks the quality
        with exact_products(y.device):
            y = jpeg_codec_differentiable(y.clamp(0, 1), own[:, 0])
    elif group.code is Code.WARP:
        y = _warp(y, own, ramps, group.static)
    elif group.code is Code.RESAMPLE or group.static == (1.0,):
        y = pillow.run(group.code, y, own, interpolation=int(group.static[0]))
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


def _erase(x: Tensor, a: Tensor, table: Tensor | None) -> Tensor:
    """Fill each box with colour + std * noise. A row of ``table`` begins with the noise of its box."""
    left, top, width, height = (a[:, k, None, None] for k in range(4))
    right = torch.arange(x.shape[3], device=x.device)[None, None, :] - left
    down = torch.arange(x.shape[2], device=x.device)[None, :, None] - top
    inside = (right >= 0) & (right < width) & (down >= 0) & (down < height)
    value = a[:, 4:7, None, None]
    if table is not None:
        channel = torch.arange(3, device=x.device)[None, :, None, None]
        at = ((channel * height[:, None] + down[:, None]) * width[:, None] + right[:, None]).long()
        at = torch.where(inside[:, None], at, 0).flatten(1)
        value = value + a[:, 7:10, None, None] * table.gather(1, at).view_as(x)
    return torch.where(inside[:, None], value, x)


def table_of(group: Group, column: int, tables: Sequence[Table]) -> Tensor | None:
    """The table of a group, float32 [rows, ...]; None if the group's step has no table.

    The tables of several operations are joined. Missing values are 0.
    """
    own = [(rows, values) for rows, at, values in tables if at == column and rows[0] in group.rows]
    if not own or len(own[0][0]) == len(group.rows):
        return own[0][1] if own else None
    joined = own[0][1].new_zeros((len(group.rows), *max(values.shape[1:] for _, values in own)))
    for rows, values in own:
        at = torch.from_numpy(np.searchsorted(group.rows, rows)).to(values.device, non_blocking=True)
        joined[:, : values.shape[1]].index_copy_(0, at, values)
    return joined


def motion_kernels(a: Tensor, static: tuple[float, ...]) -> Tensor:
    """Kernels float32 [n, k, k] of motion blurs with the arguments [n, ARGS]."""
    from kornia.constants import Resample
    from kornia.filters import get_motion_kernel2d

    size, mode = int(static[0]), Resample(int(static[1])).name.lower()
    two = a.repeat(2, 1) if len(a) == 1 else a  # a single row would give other last bits
    with a.device:
        return get_motion_kernel2d(size, two[:, 1], two[:, 2], mode)[: len(a)]


def _rain(x: Tensor, a: Tensor, coordinates: Tensor, longest: int) -> Tensor:
    """Draw lines of up to ``longest`` pixels. ``coordinates``: starts of the lines in 0..1, float32 [n, 2 * lines]."""
    n, _, height, width = x.shape
    drops, tall, drawn = (a[:, k, None].double() for k in range(3))
    tall, across = tall - 1, drawn - drawn.sign()
    steps = torch.maximum(tall + 1, drawn.abs())
    i = torch.arange(longest, device=x.device)[None]
    lines = []
    for last in (tall, across):  # rounded as by torch.linspace: from both ends to the middle
        step = last / (steps - 1).clamp(min=1)
        lines.append(
            torch.where(i < steps.div(2, rounding_mode="floor"), step * i, last - step * (steps - 1 - i)).long()
        )
    room = torch.stack([height - tall, width - across.abs()], dim=2)
    start = torch.minimum((coordinates.view(n, -1, 2) * room.float()).long(), room.long() - 1)
    start[:, :, 1] += (-across).clamp(min=0).long()
    valid = (torch.arange(start.shape[1], device=x.device)[None, :, None] < drops[..., None]) & (i < steps)[:, None]
    y, z = start[:, :, :1] + lines[0][:, None], start[:, :, 1:] + lines[1][:, None]
    at = (y.clamp(0, height - 1) * width + z.clamp(0, width - 1)).flatten(1)
    hits = torch.zeros((n, height * width), dtype=torch.int32, device=x.device).scatter_add_(
        1, at, valid.flatten(1).int()
    )
    return torch.where((hits > 0).view(n, 1, height, width), 200 / 255, x)


def _snow(x: Tensor, a: Tensor) -> Tensor:
    top, bottom = x.amax(1, keepdim=True), x.amin(1, keepdim=True)
    total, delta = top + bottom, top - bottom
    light, room = total / 2, torch.where(total < 1, total, 2 - total)
    to = torch.where(light < a[:, 0, None, None, None], (light * a[:, 1, None, None, None]).clamp(max=1), light)
    saturation = delta / torch.where(room == 0, 1.0, room + 1e-8)
    ratio = 2 * saturation * torch.minimum(to, 1 - to) / torch.where(delta == 0, 1.0, delta)
    return (to + (x - light) * ratio).clamp_(0, 1)


def _sharpness(x: Tensor, factor: Tensor) -> Tensor:
    weights = torch.full((3, 1, 3, 3), 1.0, dtype=torch.float32, device=x.device)
    weights[:, :, 1, 1] = 5.0
    weights = weights / 13
    smooth = x.clone()
    smooth[:, :, 1:-1, 1:-1] = F.conv2d(x, weights, groups=3).clamp_(0, 1)
    return (smooth + (x - smooth) * factor).clamp_(0, 1)


def _warp(x: Tensor, a: Tensor, ramps: Tensor, static: tuple[float, ...]) -> Tensor:
    padding, corners, projective = (int(v) for v in static)
    width, ramp = x.shape[3], ramps[projective, corners]
    xs, ys = ramp[None, None, :width], ramp[None, width:, None]
    m = [a[:, k, None, None] for k in range(9)]
    gx, gy = m[0] * xs + m[1] * ys + m[2], m[3] * xs + m[4] * ys + m[5]
    if projective:
        w = m[6] * xs + m[7] * ys + m[8]
        gx, gy = gx / w, gy / w
    grid = torch.stack([gx, gy], dim=-1)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode=_PADDINGS[padding], align_corners=bool(corners))
