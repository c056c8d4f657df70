"""Runs the fused program on CUDA with Triton kernels (cuda_kernels.py, cuda_pillow.py).

One kernel runs a stretch of consecutive colour steps. Before it, another kernel computes the mean gray for contrast
steps. A blur takes one more kernel, and Pillow's operations that move pixels, sharpen or need a histogram take one or
two. torch runs the other steps (cuda_steps.py).

A CUDA graph would save about 30 µs of host time per batch. But copies to and from the graph's memory would move more
bytes than the kernels of `standard`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from subprocess import SubprocessError
from traceback import walk_tb
from typing import Any

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from gpuaug.augment.fused.cuda_kernels import _blur_kernel, _mean_kernel, _normal_kernel, _points_kernel
from gpuaug.augment.fused.cuda_pillow import _levels_kernel, _pillow_kernel
from gpuaug.augment.fused.cuda_steps import CannotRunError, Program, Table, run_step, table_of
from gpuaug.augment.ops.codes import Code

BLOCK = 512  # pixels per Triton program: 224 x 224 take 98 programs, 96 x 96 take 18
# 64 threads, so 8 pixels and 69 to 80 registers per thread. 16 pixels take 128 to 168, and 7 % fewer instructions.
WARPS = 2
TILE = (64, 32, 16)  # rows and columns per Triton program of a blur, step of its products (32: 128 registers)
BLUR_WARPS = 4
NORMAL_WARPS = LEVELS_WARPS = 8
PILLOW_WARPS = (8, 8, 16)  # by interpolation: 2 pixels per thread, 1 if cubic (2 take up to 113 registers)
LEVELS_BLOCK = 2048

# Triton's own errors, a missing libcuda or Python header, a folder or compiler that fails, and a refused launch. Triton
# raises TypeError, ValueError or KeyError for wrong arguments of a launch, which are faults of this file.
_TRITONS = (TritonError, AssertionError, ImportError, OSError, RuntimeError, SubprocessError)


def _queue(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **constants: Any) -> None:
    """Launch a kernel. Errors of Triton, its C compiler, its folders or libcuda become CannotRunError."""
    try:
        kernel[grid](*args, enable_fp_fusion=True, **constants)
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


def _cached(x: Tensor, batch: int) -> int:
    """How many samples the mean and the colour kernel take at a time, so that the second finds them in the L2 cache.

    They fill a third of it, because the results pass through it too. A small cache (T4) would take a launch for every
    few samples, which costs more than the second read: then all samples.
    """
    if x.device.type != "cuda":
        return batch
    size = torch.cuda.get_device_properties(x.device).L2_cache_size
    samples = size // 3 * batch // (x.numel() * x.element_size())
    return samples if samples >= 32 else batch


def launch(
    x: Tensor, program: Program, *, dtype: torch.dtype, channels_last: bool, tables: Sequence[Table] = (),
    formulas: Mapping[Code, Any] | None = None,
) -> Tensor:  # fmt: skip
    """Queue the program's kernels on the current device; ``x``: uint8 [B, H, W, 3] or float32 [B, 3, H, W]."""
    axis = {torch.uint8: 3, torch.float32: 1}.get(x.dtype)
    if axis is None or x.dim() != 4 or x.shape[axis] != 3:  # the kernels would misread it
        raise TypeError(f"expected uint8 [B, H, W, 3] or float32 [B, 3, H, W], but got {x.dtype} {list(x.shape)}")
    x = x.contiguous()
    batch, (height, width) = len(x), x.shape[1:3] if axis == 3 else x.shape[2:]
    steps, eights = program.code.shape[1], width % 8 == 0
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    out = torch.empty((batch, 3, height, width), dtype=dtype, device=x.device, memory_format=memory_format)

    def planes(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((count, 3, height, width), dtype=dtype, device=x.device)

    for number, stretch in enumerate(program.stretches):
        flips, sums, places, *groups = stretch.inputs
        last = number == len(program.stretches) - 1
        final = last and bool(stretch.kernel or not stretch.rest)  # a Triton kernel writes the result
        y, ends = out if final else planes(batch), program.ends[int(final)]
        kind = 0
        if x.dtype == torch.uint8:
            kind = 2 if eights and x.data_ptr() % 8 == 0 else 1
            x = x.view(-1).view(torch.int64) if kind == 2 else x
        layout = (2 if eights else 1) if final and channels_last else 0
        mid = y
        if stretch.kernel:
            # 16 bits are exact to 8e-6, where the result has 8 or 11 bits
            short = stretch.kernel == "blur" and stretch.bounded and kind and y.dtype.itemsize == 2
            mid = planes(len(groups[0]), torch.uint16 if short else torch.float32)
        samples = _cached(x, batch) if stretch.contrast else batch
        for start in range(0, batch, samples):
            grid = (triton.cdiv(height * width, BLOCK) * min(samples, batch - start),)
            if stretch.contrast:
                _queue(
                    _mean_kernel, grid, x.device, x, program.code, program.args, flips, sums, height, width, start,
                    stretch.first, stretch.last, steps, KIND=kind, PILLOW=stretch.pillow, N=BLOCK, num_warps=WARPS,
                )  # fmt: skip
            _queue(
                _points_kernel, grid, x.device, x, y, mid, program.code, program.args, flips, sums, places,
                ends, height, width, start, stretch.first, stretch.last, steps, KIND=kind, LAYOUT=layout,
                STEPS=stretch.colour, MEAN=stretch.contrast, PILLOW=stretch.pillow, COPIES=bool(stretch.kernel),
                N=BLOCK, num_warps=WARPS,
            )  # fmt: skip
        x = y
        if stretch.kernel == "blur":
            tiles = 3 * triton.cdiv(height, TILE[0]) * triton.cdiv(width, TILE[1])
            _queue(
                _blur_kernel, (tiles * len(mid),), x.device, mid, y, groups[0], program.args, ends, height, width,
                stretch.last - 1, steps, CHANNELS_LAST=layout > 0, R=TILE[0], C=TILE[1], K=TILE[2],
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
                x = run_step(group, x, a, rows, table=table, ramps=program.ramps, formulas=formulas)
    return x
