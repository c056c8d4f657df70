"""Keeps names and numbers of all samples in shared memory, and reads numbers from files."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from tokenize import TokenError
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.errors import SourceError
from gpuaug.source.local import open_text, read_file

log = logging.getLogger("gpuaug")

# numpy may raise any of these for a damaged file, because it parses the header as Python
NO_ARRAY = (
    OSError, ValueError, EOFError, TypeError, SyntaxError, TokenError, OverflowError, RecursionError, MemoryError,
)  # fmt: skip


def share(tensor: Tensor) -> Tensor:
    """Return the tensor in memory that the workers of this process share, whatever the size of /dev/shm is."""
    try:
        if not tensor.nbytes or not hasattr(os, "memfd_create"):
            return tensor.share_memory_()
        # not through a mapping: if memory runs out, a write to a mapping would kill the process
        with open(os.memfd_create("gpuaug"), "wb") as file:
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            storage = torch.UntypedStorage._new_shared_fd_cpu(file.fileno(), tensor.nbytes)  # type: ignore[attr-defined]
    except (RuntimeError, OSError) as error:
        log.warning("source index of %d MB cannot be put into shared memory: %s", tensor.nbytes >> 20, error)
        return tensor
    shared: Tensor = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(storage).view(tensor.shape)
    return shared


class Names:
    """Holds byte strings in one uint8 tensor that workers share.

    Workers would copy a list of strings, because reading a Python object changes its reference count (pytorch#13246).
    """

    def __init__(self, blob: Tensor, offsets: Tensor) -> None:
        self.blob = blob  # uint8 [bytes of all names]
        self.offsets = offsets  # int64 [N + 1]

    @classmethod
    def of(cls, blocks: Iterable[list[bytes]]) -> Names:
        """Pack lists of names. If ``blocks`` is a generator, only one list at a time is in memory."""
        blob, lengths = bytearray(), [np.zeros(1, dtype=np.int64)]
        for block in blocks:
            blob += b"".join(block)
            lengths.append(np.fromiter(map(len, block), dtype=np.int64, count=len(block)))
        offsets = np.cumsum(np.concatenate(lengths))
        # torch's constructors would use the default device, which may be cuda
        return cls(share(torch.from_numpy(np.frombuffer(blob, dtype=np.uint8))), share(torch.from_numpy(offsets)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> bytes:
        # a new view each time, because starting workers by spawn may move the tensor
        offsets = self.offsets.numpy()
        return self.blob.numpy()[offsets[index] : offsets[index + 1]].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        data = self.blob.numpy().data
        for begin, end in pairwise(self.offsets.tolist()):
            yield bytes(data[begin:end])

    def digest(self) -> str:
        """Hash of the sorted names."""
        return hashlib.blake2b(b"\0".join(sorted(self)), digest_size=16).hexdigest()


def range_problem(numbers: NDArray[Any], count: int) -> str:
    """The text ``lowest .. highest`` if a number is outside 0 .. count - 1; else ""."""
    if not len(numbers) or 0 <= numbers.min() <= numbers.max() < count:
        return ""
    return f"{numbers.min()} .. {numbers.max()}"


def read_numbers(file: str | os.PathLike[str], *, key: str, dtype: Any) -> NDArray[Any]:
    """Read numbers from a file: .npy, .json (a list), or text with numbers separated by white space.

    ``key``: configuration key, for error messages. If ``dtype`` is an integer type, the file must hold integers.
    """
    path = os.path.expanduser(os.fspath(file))
    try:
        if path.endswith(".npy"):
            # not np.load, which would also open zip files
            values = np.lib.format.read_array(io.BytesIO(read_file(path)), allow_pickle=False)
        elif path.endswith(".json"):
            values = np.asarray(json.load(open_text(path)))
        else:
            values = np.array(open_text(path).read().split(), dtype=dtype)
        if values.ndim != 1 or values.dtype.kind not in ("iu" if np.dtype(dtype).kind == "i" else "iuf"):
            raise ValueError(f"the file holds {values.dtype} of shape {values.shape}")
    except NO_ARRAY as error:
        raise SourceError(
            f"`{key}` must be a file of numbers: .npy, .json (a list), or text with one number per line. "
            f"Found: {path!r} ({error})."
        ) from error
    return values.astype(dtype)


def occurrences(indices: Tensor) -> Tensor:
    """For each index, the number of earlier indices that are equal: int64 [n]."""
    numbers = indices.numpy()
    if not len(numbers) or np.bincount(numbers).max() <= 1:
        return torch.zeros((), dtype=torch.int64, device="cpu").expand(len(numbers))
    by_number = np.argsort(numbers, kind="stable")
    grouped = numbers[by_number]
    count = np.empty_like(numbers)
    count[by_number] = np.arange(len(numbers)) - np.searchsorted(grouped, grouped)
    # random numbers use 16 bits of the count: the 65,537th occurrence gets the random numbers of the first
    return torch.from_numpy(count & 0xFFFF)


def locate(bounds: Tensor, index: int) -> tuple[int, int]:
    """The part that holds a sample, and the sample's position in this part. ``bounds``: see :func:`bounds_of`."""
    numbers = bounds.numpy()
    part = int(np.searchsorted(numbers, index, side="right")) - 1
    return part, index - int(numbers[part])


def bounds_of(counts: Sequence[int]) -> Tensor:
    """Running sums of the counts, starting with 0: int64 [len(counts) + 1] in shared memory."""
    return share(torch.from_numpy(np.cumsum([0, *counts], dtype=np.int64)))
