"""Runs the fused program on CUDA with Triton kernels (cuda_crop.py, cuda_gather.py, cuda_kernels.py, cuda_pillow.py).

One kernel runs a stretch of consecutive colour steps. Before it, another kernel computes the mean gray for contrast
steps. A blur takes one more kernel, and Pillow's operations that move pixels, sharpen or need a histogram take one or
two. torch runs the other steps (cuda_steps.py).

A CUDA graph would save about 30 µs of host time per batch. But copies to and from the graph's memory would move more
bytes than the kernels of `standard`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from subprocess import SubprocessError
from traceback import walk_tb
from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F
import triton
from numpy.typing import NDArray
from torch import Tensor
from triton.errors import TritonError

from gpuaug.augment.cut import CHUNK_BYTES, cut, fill_of, keeps_levels
from gpuaug.augment.fused.cuda_crop import _axis_kernel, _crop_kernel
from gpuaug.augment.fused.cuda_gather import _gather_kernel
from gpuaug.augment.fused.cuda_kernels import _blur_kernel, _mean_kernel, _normal_kernel, _points_kernel
from gpuaug.augment.fused.cuda_pillow import _levels_kernel, _pillow_kernel
from gpuaug.augment.fused.cuda_steps import CannotRunError, Program, Table, pack, run_step, samples_of, table_of
from gpuaug.augment.images import WHITE, size_of
from gpuaug.augment.ops.codes import Code
from gpuaug.batch import CropWindows, Int64, Interpolation
from gpuaug.random.keyed import Int

BLOCK = 512  # pixels per Triton program: 224 x 224 take 98 programs, 96 x 96 take 18
# 64 threads, so 8 pixels and 69 to 80 registers per thread. 16 pixels take 128 to 168, and 7 % fewer instructions.
WARPS = 2
TILE = (64, 32, 16)  # rows and columns per Triton program of a blur, step of its products (32: 128 registers)
BLUR_WARPS = 4
NORMAL_WARPS = LEVELS_WARPS = 8
AXIS_BLOCK, AXIS_WARPS = 128, 4
CROP_BLOCK, CROP_WARPS = 256, 4
GATHER_BLOCK, GATHER_WARPS = 256, 4
PILLOW_WARPS = (8, 8, 16)  # by interpolation: 2 pixels per thread, 1 if cubic (2 take up to 113 registers)
LEVELS_BLOCK = 2048

# Triton's own errors, a missing libcuda or Python header, a folder or compiler that fails, and a refused launch. Triton
# raises TypeError, ValueError or KeyError for wrong arguments of a launch, which are faults of this file.
_TRITONS = (TritonError, AssertionError, ImportError, OSError, RuntimeError, SubprocessError)


def _queue(
    kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, fuses: bool = True,
    reads: Sequence[Tensor] = (), **constants: Any,
) -> None:  # fmt: skip
    """Launch a kernel. Errors of Triton, its C compiler, its folders or libcuda become CannotRunError.

    ``fuses``: whether the compiler may merge a product and a sum, which are then rounded once. ``reads``: tensors that
    the kernel reads without being given them; tests count them as read.
    """
    try:
        kernel[grid](*args, enable_fp_fusion=fuses, **constants)
    except (torch.AcceleratorError, torch.OutOfMemoryError):
        raise
    except _TRITONS as error:
        packages = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(error.__traceback__)]
        if [name for name in packages if name in ("gpuaug", "triton")][-1] != "triton":
            raise  # code of this package raised it, or a library that this package called
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # if the device failed, this raises the device's error
        raise CannotRunError(f"{type(error).__name__}: {error}") from error


def normal_field(keys: Tensor, count: int) -> Tensor:
    """:func:`gpuaug.random.keyed.normal_field` in one kernel. The values differ by at most 1e-5."""
    values = torch.empty((len(keys), count), dtype=torch.float32, device=keys.device)
    half = -(-count // 2)
    grid = (triton.cdiv(half, BLOCK) * len(keys),)
    _queue(_normal_kernel, grid, keys.device, keys, values, count, half, N=BLOCK, num_warps=NORMAL_WARPS)
    return values


def crop(images: Tensor, windows: CropWindows, white: float) -> tuple[Tensor, float]:
    """Do what :func:`~gpuaug.augment.cut.cut` does, in two kernels for the whole batch."""
    batch, height, width, channels = images.shape
    image, row, pixel, channel = images.stride()
    levels, (H, W) = keeps_levels(images, windows, white), windows.size
    kind = get_args(Interpolation).index(windows.interpolation)
    scale = (windows.window[:, 2:] / windows.resized).max(initial=1)
    taps, most = (2 * math.ceil(max(kind, 1) * scale) + 1) if kind else 1, max(H, W)
    step = max(1, CHUNK_BYTES // (8 * taps * most))
    if (height - 1) * row + (width - 1) * pixel + (channels - 1) * channel >= 2**31 or taps * most * step >= 2**31:
        return cut(images, windows, white)  # the kernel counts in 32 bits
    fill = fill_of(windows, channels) * np.float32(255 if levels else 1)
    table = np.hstack([windows.window, windows.resized, windows.offset]).astype(np.int32)
    table_, fill_ = pack([table, fill], images.device)
    shape, dtype = ((batch, H, W, 3), torch.uint8) if levels else ((batch, channels, H, W), torch.float32)
    out = torch.empty(shape, dtype=dtype, device=images.device)
    for start in range(0, batch, step):
        part, own, device = images[start : start + step], table_[start : start + step], images.device
        count = len(part)
        starts = torch.empty((2, count, most), dtype=torch.int32, device=device)
        weights = torch.empty((2, count, taps, most), dtype=torch.int32 if levels else torch.float32, device=device)
        counts, shifts = (torch.empty((2, count), dtype=torch.int32, device=device) for _ in range(2))
        tables, size = (own, starts, weights, counts, shifts), (count, H, W, taps, most)
        _queue(
            _axis_kernel, (2 * count,), device, *tables, *size, INTERPOLATION=kind, LEVELS=levels, N=AXIS_BLOCK,
            num_warps=AXIS_WARPS, fuses=False,
        )  # fmt: skip
        grid = (count * -(-channels // 3) * triton.cdiv(H * W, CROP_BLOCK),)
        _queue(
            _crop_kernel, grid, device, part, out[start : start + step], *tables, fill_, image, row, pixel, channel,
            *size, float(white), channels, LEVELS=levels, N=CROP_BLOCK, num_warps=CROP_WARPS,
        )  # fmt: skip
    return (out, 255.0) if levels else (out.permute(0, 2, 3, 1), 1.0)


def gather(
    tiles: Sequence[Sequence[Tensor]],
    origin: Int64,
    visible: Int64,
    inverse: NDArray[np.float64],
    size: tuple[int, int],
    *,
    fill: int,
    add: Int64,
    most: Int64,
) -> Tensor:
    """Do what :func:`gpuaug.augment.gather.gather` does, in one kernel for the whole batch."""
    some, (batch, count) = tiles[0][0], origin.shape[:2]
    row, pixel = some.stride()[:2]
    starts = np.array([[tile.data_ptr() for tile in own] for own in tiles], dtype=np.int64) - some.data_ptr()
    bases = starts // some.itemsize - origin[..., 1] * row - origin[..., 0] * pixel
    limits = np.concatenate([visible, add[..., None], most[..., None]], axis=-1).astype(np.int32)
    matrices = np.ascontiguousarray(inverse[:, :2], dtype=np.float64)
    out = torch.empty((batch, *size, *some.shape[2:]), dtype=some.dtype, device=some.device)
    _queue(
        _gather_kernel, (batch * triton.cdiv(size[0] * size[1], GATHER_BLOCK),), some.device, some, out,
        *pack([bases, limits, matrices], some.device), *size, row, fill, COUNT=count,
        CHANNELS=some.shape[2] if some.ndim == 3 else 0, N=GATHER_BLOCK, num_warps=GATHER_WARPS, fuses=False,
        reads=[tile for own in tiles for tile in own],
    )  # fmt: skip
    return out


def launch(
    x: Tensor, program: Program, *, dtype: torch.dtype, channels_last: bool, tables: Sequence[Table] = (),
    formulas: Mapping[Code, Any] | None = None, white: float | None = None,
) -> Tensor:  # fmt: skip
    """Queue the program's kernels on the current device. Maps [B, H, W, C] to [B, C, H, W].

    ``x``: of a type in :data:`~gpuaug.augment.images.WHITE`; kernels read it where it lies if its planes, or the
    pixels of an RGB image, are dense. ``white``: its value that becomes 1; None: that of its type. For other numbers of
    channels than 3, three channels of an image are a sample of the kernels.
    """
    (height, width), channels, parts = size_of(x), x.shape[3], samples_of(x.shape[3])
    if len(program.code) != parts * len(x):  # the kernels would read other memory
        raise TypeError(f"expected a program of {parts * len(x)} samples, but got {len(program.code)}")
    white = float(WHITE[x.dtype] if white is None else white)
    loose = x.is_floating_point() or white != WHITE[x.dtype]
    divides, kind = white != (255 if x.dtype == torch.uint8 else 1), 1
    high = float(np.float32(1 / white))
    inverse = high, 1 / white - high  # a correctly rounded division takes a call and 40 instructions
    if channels != 3 or not x.is_contiguous():
        x, kind = x.permute(0, 3, 1, 2), 0
        missing = 3 * parts - channels
        x = (torch.cat([x, x[:, -1:].expand(-1, missing, -1, -1)], dim=1) if missing else x.contiguous()).flatten(0, 1)
    batch, steps, eights = len(program.code), program.code.shape[1], width % 8 == 0
    if channels != 3:
        tables = [(_rows_of(rows, parts), column, _padded(values, parts)) for rows, column, values in tables]
    layout_of_result = channels_last and channels == 3
    memory_format = torch.channels_last if layout_of_result else torch.contiguous_format
    out = torch.empty((batch, 3, height, width), dtype=dtype, device=x.device, memory_format=memory_format)

    def planes(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((count, 3, height, width), dtype=dtype, device=x.device)

    for number, stretch in enumerate(program.stretches):
        flips, sums, places, *groups = stretch.inputs
        last = number == len(program.stretches) - 1
        final = last and bool(stretch.kernel or not stretch.rest)  # a Triton kernel writes the result
        y, ends = out if final else planes(batch), program.ends[int(final)]
        if kind == 1 and x.dtype == torch.uint8 and not divides and eights and x.data_ptr() % 8 == 0:
            x, kind = x.view(-1).view(torch.int64), 2
        layout = (2 if eights else 1) if final and layout_of_result else 0
        mid = y
        if stretch.kernel:
            # 16 bits are exact to 8e-6, where the result has 8 or 11 bits
            short = stretch.kernel == "blur" and stretch.bounded and not loose and y.dtype.itemsize == 2
            mid = planes(len(groups[0]), torch.uint16 if short else torch.float32)
        reading: dict[str, Any] = {"KIND": kind, "DIVIDES": divides, "LOOSE": loose, "CHANNELS": channels}
        grid = (triton.cdiv(height * width, BLOCK) * batch,)
        if stretch.contrast:
            _queue(
                _mean_kernel, grid, x.device, x, program.code, program.args, flips, sums, height, width, *inverse,
                stretch.first, stretch.last, steps, **reading, PILLOW=stretch.pillow, N=BLOCK, num_warps=WARPS,
            )  # fmt: skip
        _queue(
            _points_kernel, grid, x.device, x, y, mid, program.code, program.args, flips, sums, places,
            ends, height, width, *inverse, stretch.first, stretch.last, steps, **reading, LAYOUT=layout,
            STEPS=stretch.colour, MEAN=stretch.contrast, PILLOW=stretch.pillow, COPIES=bool(stretch.kernel),
            N=BLOCK, num_warps=WARPS,
        )  # fmt: skip
        x, kind, divides, loose = y, 0, False, True
        if stretch.kernel == "blur":
            tiles = 3 * triton.cdiv(height, TILE[0]) * triton.cdiv(width, TILE[1])
            _queue(
                _blur_kernel, (tiles * len(mid),), x.device, mid, y, groups[0], program.args, ends, height, width,
                stretch.last - 1, steps, CHANNELS=channels, CHANNELS_LAST=layout > 0, R=TILE[0], C=TILE[1], K=TILE[2],
                num_warps=BLUR_WARPS,
            )  # fmt: skip
        elif stretch.kernel:
            column = stretch.last - 1
            most = max([0, *(int(group.static[0]) for group in stretch.rest if group.code is Code.RESAMPLE)])
            levels = torch.empty((len(mid), 3, 256), dtype=torch.float32, device=x.device)
            if any(group.code in (Code.AUTOCONTRAST, Code.EQUALIZE) for group in stretch.rest):
                _queue(
                    _levels_kernel, (3 * len(mid),), x.device, mid, levels, groups[0], program.code, height, width,
                    column, steps, N=LEVELS_BLOCK, num_warps=LEVELS_WARPS,
                )  # fmt: skip
            _queue(
                _pillow_kernel, (triton.cdiv(height * width, BLOCK) * len(mid),), x.device, mid, y, groups[0],
                program.code, program.args, levels, ends, height, width, column, steps, LAYOUT=layout,
                INTERPOLATION=most, N=BLOCK, num_warps=PILLOW_WARPS[most],
            )  # fmt: skip
        elif stretch.rest:
            column = stretch.last - 1
            for group, rows in zip(stretch.rest, groups, strict=True):
                table, a = table_of(group, column, tables), program.args[:, column]
                more: dict[str, Any] = {"ramps": program.ramps, "formulas": formulas, "channels": channels}
                x = run_step(group, x, a, rows, table=table, **more)
    if channels != 3:
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        x = x.view(-1, 3 * parts, height, width)[:, :channels].contiguous(memory_format=memory_format)
    return x


def _rows_of(rows: Int, parts: int) -> Int:
    """Rows [n, T] of images as rows [n, T * parts] of samples."""
    return (rows[:, :, None] * parts + np.arange(parts)).reshape(len(rows), -1)


def _padded(values: Tensor, parts: int) -> Tensor:
    """The table of a step. If it has values for each pixel [n, C, H, W]: with channels for all samples of an image."""
    return F.pad(values, (0, 0, 0, 0, 0, 3 * parts - values.shape[1])) if values.dim() == 4 else values
