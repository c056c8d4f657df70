"""What a source keeps per sample, in a few tensors that all workers share; and lists of numbers in files."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
from collections.abc import Iterable, Iterator
from itertools import pairwise
from tokenize import TokenError
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug import machine
from gpuaug.errors import SourceError
from gpuaug.source import shared_memory
from gpuaug.source.remote.storage import open_text, read_file

log = logging.getLogger("gpuaug")

LARGE = 1 << 16  # bytes; below, a rank may as well have its own

# What numpy raises over a file that is no .npy, or a damaged one: it reads the header as Python.
NO_ARRAY = (
    OSError, ValueError, EOFError, TypeError, SyntaxError, TokenError, OverflowError, RecursionError, MemoryError,
)  # fmt: skip


class Names:
    """Byte strings, one after the other in one uint8 tensor.

    A list of strings would be copied into every forked worker page by page, because reading a Python object writes its
    reference count (pytorch#13246).
    """

    def __init__(self, blob: Tensor, offsets: Tensor) -> None:
        self.blob = blob  # uint8 [bytes of all names]
        self.offsets = offsets  # int64 [N + 1]

    @classmethod
    def of(cls, blocks: Iterable[list[bytes]]) -> Names:
        """Pack blocks of names, in order; only one block at a time lives as Python objects."""
        blob, lengths = bytearray(), [np.zeros(1, dtype=np.int64)]
        for block in blocks:
            blob += b"".join(block)
            lengths.append(np.fromiter(map(len, block), dtype=np.int64, count=len(block)))
        offsets = np.cumsum(np.concatenate(lengths))
        # from numpy, as torch's own constructors would follow a default device of cuda
        data = torch.from_numpy(np.frombuffer(blob, dtype=np.uint8))
        return cls(share(data), share(torch.from_numpy(offsets)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> bytes:
        # numpy views are made anew each time: spawning workers may move a tensor's memory
        offsets = self.offsets.numpy()
        return self.blob.numpy()[offsets[index] : offsets[index + 1]].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        data = self.blob.numpy().data
        for begin, end in pairwise(self.offsets.tolist()):
            yield bytes(data[begin:end])

    def digest(self) -> str:
        """Hex BLAKE2b of the sorted names; equal for equal sets of names."""
        return hashlib.blake2b(b"\0".join(sorted(self)), digest_size=16).hexdigest()


def share(tensor: Tensor) -> Tensor:
    """The same values in shared memory, so that workers of every start method see them without a copy.

    What is large is there once for all ranks of a machine, and must not be written to.
    """
    try:
        if tensor.nbytes >= LARGE and machine.local_world_size() > 1 and shared_memory.SUPPORTED:
            return shared_memory.tensor(tensor)
        return tensor.share_memory_()
    except (RuntimeError, OSError) as error:  # a container's /dev/shm may be 64 MB
        log.warning("source index of %d MB stays outside shared memory: %s", tensor.nbytes >> 20, error)
        return tensor


def outside(numbers: NDArray[Any], count: int) -> str:
    """``lowest .. highest`` of numbers that are not all in 0 .. count - 1; "" where they are."""
    if not len(numbers) or 0 <= numbers.min() <= numbers.max() < count:
        return ""
    return f"{numbers.min()} .. {numbers.max()}"


def read_numbers(file: str | os.PathLike[str], *, key: str, dtype: Any) -> NDArray[Any]:
    """Numbers out of a file: .npy, .json (a list), or text with numbers between white space.

    Args:
        file: the file.
        key: full configuration key, for errors.
        dtype: of the result; whole numbers must be whole.

    Raises:
        SourceError: if the file is missing or holds anything else.
    """
    path = os.path.expanduser(os.fspath(file))
    try:
        if path.endswith(".npy"):
            values = np.lib.format.read_array(io.BytesIO(read_file(path)), allow_pickle=False)  # np.load opens zips
        elif path.endswith(".json"):
            values = np.asarray(json.load(open_text(path)))
        else:
            values = np.array(open_text(path).read().split(), dtype=dtype)
        if values.ndim != 1 or values.dtype.kind not in ("iu" if np.dtype(dtype).kind == "i" else "iuf"):
            raise ValueError(f"it holds {values.dtype} of shape {values.shape}")
    except NO_ARRAY as error:
        raise SourceError(
            f"`{key}` must be a file of numbers: .npy, .json (a list), or text with one number per line. "
            f"Found: {path!r} ({error})."
        ) from error
    return values.astype(dtype)


def occurrences(indices: Tensor) -> Tensor:
    """For each place, how often its number came before; int64 [n], without memory where every number comes once."""
    numbers = indices.numpy()
    if not len(numbers) or np.bincount(numbers).max() <= 1:
        return torch.zeros((), dtype=torch.int64, device="cpu").expand(len(numbers))
    by_number = np.argsort(numbers, kind="stable")
    grouped = numbers[by_number]
    first = np.concatenate([[True], grouped[1:] != grouped[:-1]])
    place = np.arange(len(numbers))
    count = np.empty_like(numbers)
    count[by_number] = place - np.maximum.accumulate(np.where(first, place, 0))
    # the draw scheme has 16 bits for it: one sample 65,536 times in an epoch would begin again
    return torch.from_numpy(count & 0xFFFF)
