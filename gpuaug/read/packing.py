"""Packs what was read of a batch into one block of bytes, as workers send it, and unpacks the block."""

from __future__ import annotations

import pickle
import traceback
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuaug.batch import Fault, Objects
from gpuaug.errors import SourceError
from gpuaug.source.adapt import Source

PICKLABLE = "Give text, bytes, numbers, lists, dictionaries or numpy arrays."
FAILED = -1  # in place of the number of images: the block holds an exception

# labels, faults, targets and extras of a batch
Rest = tuple[NDArray[Any] | None, tuple[Fault, ...], Objects | None, list[Any] | None]
Pieces = tuple[NDArray[np.uint8], ...]  # the bytes of each image, then of each mask


def pack(encoded: list[memoryview], rest: Rest) -> list[Any]:
    """The parts of a block: two numbers (see :func:`unpack`), the offsets, the pickled ``rest``, ``encoded``."""
    try:
        pickled = pickle.dumps(rest)
    except (TypeError, AttributeError, RecursionError, pickle.PicklingError) as error:
        raise SourceError(
            f"an extra, the third value of a sample, cannot be pickled for the other process: {error}. {PICKLABLE}"
        ) from error
    return [_int64(len(encoded), len(pickled), 0, *accumulate(map(len, encoded))), pickled, *encoded]


def pack_error(error: Exception) -> list[Any]:
    """The parts of a block that holds an exception and its traceback."""
    try:
        data = pickle.dumps(error)
    except Exception:  # some attribute of the exception cannot be pickled
        data = b""
    pickled = pickle.dumps((data, "".join(traceback.format_exception(error))))
    return [_int64(FAILED, len(pickled)), pickled]


def unpack(block: NDArray[np.uint8], *, source: Source, indices: NDArray[np.int64]) -> tuple[Pieces, Rest]:
    """What :func:`pack` has packed. The pieces are views of ``block``, uint8 [n].

    Raises:
        SourceError: if an extra of the samples ``indices`` of ``source`` cannot be unpickled.
        Exception: the exception in the block; RuntimeError if it cannot be unpickled.
    """
    count, size = block[:16].view(np.int64).tolist()
    begin = 16 + 8 * (count + 1)
    pickled = block[begin : begin + size].data
    if count == FAILED:
        failed, text = pickle.loads(pickled)
        error: BaseException
        try:
            error = pickle.loads(failed)
        except Exception:  # the constructor needs other arguments, or only the worker can import the class
            error = RuntimeError("the source raised an exception that cannot be pickled")
        error.add_note(f"raised in a reading worker:\n{text}")
        raise error
    try:
        rest = pickle.loads(pickled)
    except Exception as cause:  # unpickling calls the classes of the extras
        first, last = (source.key(i) for i in indices[[0, -1]].tolist())
        raise SourceError(
            f"an extra, the third value of a sample, cannot be unpickled: {type(cause).__name__}: {cause}. The "
            f"sample is in the batch from {first!r} to {last!r}. {PICKLABLE}"
        ) from cause
    offsets = block[16:begin].view(np.int64) + begin + size
    return tuple(block[a:b] for a, b in pairwise(offsets.tolist())), rest


def _int64(*values: int) -> bytes:
    return np.array(values, dtype=np.int64).tobytes()
