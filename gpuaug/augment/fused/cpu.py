"""Runs the fused program on the CPU with cpu.cpp."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.augment.ops.codes import as_cpp
from gpuaug.native import build
from gpuaug.native.buffers import outputs
from gpuaug.random.keyed import Float

# makes the recipe `standard` a fifth faster, because min and max become one instruction each
_FLAGS = (*build.FLAGS, "-ffinite-math-only")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Job(ctypes.Structure):
    """The struct ``Job`` of cpu.cpp."""

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
    """Run the program and return ``result * scale + shift``, [B, 3, H, W].

    Args:
        images: uint8 [B, H, W, 3] or float32 [B, 3, H, W].
        code, args: from :meth:`gpuaug.augment.fused.lower.Lowering.program`.
        tables: (samples int64 [n], number of the step, float32 [n, ...]) for each step that needs a table.
        ramps: from :func:`gpuaug.augment.fused.lower.warp_ramps`; not used if the program has no warp.
    """
    images = images.contiguous()
    whole = images.dtype == torch.uint8
    batch, height, width = (len(images), *images.shape[1:3]) if whole else (len(images), *images.shape[2:])
    out = outputs.take((batch, 3, height, width), dtype, channels_last)
    pointers = np.zeros(code.shape, dtype=np.int64)
    for rows, column, values in tables:
        pointers[rows, column] = values.data_ptr() + np.arange(len(rows)) * (values[0].numel() * 4)
    # a thread costs about 50 us, so one thread is faster below 100,000 pixels
    threads = torch.get_num_threads() if batch * height * width >= 100_000 else 1
    job = _Job(
        *(images.data_ptr(), out.data_ptr(), code.ctypes.data, args.ctypes.data),
        *(pointers.ctypes.data if tables else None, ramps.ctypes.data),
        *(batch, height, width, code.shape[1]),
        *(not whole, _DTYPES[dtype], channels_last, threads),
        *((ctypes.c_float * 3)(*scale), (ctypes.c_float * 3)(*shift)),
    )
    if library.gpuaug_augment(ctypes.byref(job)):  # ctypes releases the GIL
        raise MemoryError(f"Out of memory while augmenting {height}x{width} images. Free memory or use smaller images.")
    return out


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled cpu.cpp, or None if it cannot be compiled."""
    source = Path(__file__).with_name("cpu.cpp")
    return build.load(
        source, name="augment", flags=_FLAGS, definitions=as_cpp(), without="runs uncompiled, many times slower"
    )
