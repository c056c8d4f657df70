"""Run-length encoding of a map of object numbers, for :attr:`gpuaug.batch.Target.mask`."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"GPUAUGRL"


def encode(objects: NDArray[Any]) -> bytes:
    """Run-length bytes of a map of object numbers.

    The bytes are ``GPUAUGRL``, uint32 height, width and number of runs, then int32 values [runs], then uint32 lengths
    [runs]. All numbers are little endian; runs go row by row and may continue into the next row.

    Args:
        objects: integers [H, W], at least one pixel; 0 is no object, k + 1 is object k.

    >>> len(encode(np.zeros((480, 640), dtype=np.int32)))
    28
    """
    flat = objects.reshape(-1)
    starts = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    bounds = np.concatenate([[0], starts, [flat.size]])
    head = struct.pack("<3I", *objects.shape, len(bounds) - 1)
    return MAGIC + head + flat[bounds[:-1]].astype("<i4").tobytes() + np.diff(bounds).astype("<u4").tobytes()
