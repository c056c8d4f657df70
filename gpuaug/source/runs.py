"""Run-length encoding of a map of object numbers, for :attr:`gpuaug.batch.Target.mask`."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"GPUAUGRL"


def encode(objects: NDArray[Any]) -> bytes:
    """Run-length bytes of integers [H, W]: 0 means no object, k + 1 means object k.

    The bytes are ``GPUAUGRL``, uint32 [3] (height, width, number of runs), int32 [runs] (values) and uint32 [runs]
    (lengths in pixels), all little-endian. A run may continue into the next row.

    >>> len(encode(np.zeros((480, 640), dtype=np.int32)))
    28
    """
    flat = objects.reshape(-1)
    starts = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    bounds = np.concatenate([[0], starts, [flat.size]])
    head = struct.pack("<3I", *objects.shape, len(bounds) - 1)
    return MAGIC + head + flat[bounds[:-1]].astype("<i4").tobytes() + np.diff(bounds).astype("<u4").tobytes()
