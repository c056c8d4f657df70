"""The fused program on the CPU: cpu.cpp, built once per machine by native/build.py.

Without a compiler :func:`library` gives None and says so; the recipe then runs through Kornia (reference.py).
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.native import build
from gpuaug.native.buffers import outputs
from gpuaug.random.keyed import Float

_FLAGS = (*build.FLAGS, "-ffinite-math-only")  # minimum and maximum in one instruction: a fifth of `standard`'s time
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Job(ctypes.Structure):
    """``Job`` of cpu.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("src", "dst", "code", "args", "tables", "ramps")),
        *((name, ctypes.c_int64) for name in ("batch", "height", "width", "steps")),
        *((name, ctypes.c_int32) for name in ("src_float", "dst_type", "channels_last", "threads")),
        *((name, ctypes.c_float * 3) for name in ("scale", "shift")),
    )


def run(
    library: ctypes.CDLL,
    images: Tensor,
    code: NDArray[np.int32],
    args: Float,
    tables: list[tuple[NDArray[np.int64], int, Tensor]],
    ramps: Float,
    scale: tuple[float, float, float],
    shift: tuple[float, float, float],
    dtype: torch.dtype,
    channels_last: bool,
) -> Tensor:
    """Every sample through its own program, on torch's number of threads.

    Args:
        library: from :func:`library`.
        images: uint8 [B, H, W, 3] or float32 [B, 3, H, W], CPU.
        code, args: from :meth:`gpuaug.augment.fused.lower.Lowering.program`.
        tables: (rows, column, float32 [rows, n]) for the steps that read more than their arguments.
        ramps: output positions for warps, see lower.py; unused where there are none.
        scale, shift: the result [B, 3, H, W] is ``x * scale + shift`` per channel.
        dtype: of the result: float32, bfloat16 or float16.
        channels_last: memory format of the result.
    """
    images = images.contiguous()
    whole = images.dtype == torch.uint8
    batch, height, width = (len(images), *images.shape[1:3]) if whole else (len(images), *images.shape[2:])
    out = outputs.take((batch, 3, height, width), dtype, channels_last)
    pointers = np.zeros(code.shape, dtype=np.int64)
    for rows, column, values in tables:
        pointers[rows, column] = values.data_ptr() + np.arange(len(rows)) * (values[0].numel() * 4)
    # a thread takes some 50 us to start and to end: less than 100,000 pixels are sooner done without it
    threads = torch.get_num_threads() if batch * height * width >= 100_000 else 1
    job = _Job(
        *(images.data_ptr(), out.data_ptr(), code.ctypes.data, args.ctypes.data),
        *(pointers.ctypes.data if tables else None, ramps.ctypes.data),
        *(batch, height, width, code.shape[1]),
        *(not whole, _DTYPES[dtype], channels_last, threads),
        *((ctypes.c_float * 3)(*scale), (ctypes.c_float * 3)(*shift)),
    )
    if library.gpuaug_augment(ctypes.byref(job)):  # without the interpreter's lock
        raise MemoryError(f"no memory for augmenting images of {height}x{width} pixels")
    return out


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled program, or None where it cannot be compiled; logs once which and why."""
    source = Path(__file__).with_name("cpu.cpp")
    return build.load(source, name="augment", flags=_FLAGS, without="runs uncompiled, many times slower")
