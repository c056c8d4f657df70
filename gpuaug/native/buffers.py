"""Memory of batches that nobody holds any more, for the next ones: mapping pages takes longer than filling them."""

from __future__ import annotations

import math
import mmap
from collections import deque

import numpy as np
import torch
from torch import Tensor


class Outputs:
    """Memory of batches that nobody holds any more, for the next ones: mapping fresh pages takes as long as a recipe.

    Args:
        most: bytes that are kept at most; what was freed first goes first.
        age: what was not needed for so many batches is given back.
    """

    def __init__(self, most: int = 512 << 20, age: int = 64) -> None:
        self.most, self.age = most, age
        self._taken = 0
        # Appended to wherever a batch dies, also inside the garbage collector: nothing here may take a lock.
        self._free: deque[tuple[int, Tensor]] = deque()

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool) -> Tensor:
        """An uninitialised tensor [B, 3, H, W]; its memory comes back when the last tensor on it is gone."""
        size = dtype.itemsize * math.prod(shape)
        if size < _SMALL:
            memory_format = torch.channels_last if channels_last else torch.contiguous_format
            return torch.empty(shape, dtype=dtype, memory_format=memory_format)
        self._taken += 1
        found, kept = None, []
        while self._free:
            try:
                freed, memory = self._free.pop()  # the newest first: more of it may be in cache
            except IndexError:  # another thread was faster
                break
            if found is None and memory.numel() == size:
                found = memory
            elif self._taken - freed < self.age:
                kept.append((freed, memory))
        room = self.most
        for freed, memory in kept:
            room -= memory.numel()
            if room >= 0:
                self._free.appendleft((freed, memory))
        lease = _Lease(mapped(size) if found is None else found, self)
        flat = torch.from_numpy(np.asarray(lease)).view(dtype)  # holds the lease
        batch, channels, height, width = shape
        if channels_last:
            return flat.view(batch, height, width, channels).permute(0, 3, 1, 2)
        return flat.view(shape)

    def give(self, memory: Tensor) -> None:
        """Memory that is free again."""
        self._free.append((self._taken, memory))


class _Lease:
    """Gives memory back when numpy, and so torch, lets go of it."""

    def __init__(self, memory: Tensor, outputs: Outputs) -> None:
        self._memory, self._outputs = memory, outputs
        self.__array_interface__ = {
            "version": 3,
            "shape": (memory.numel(),),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
        }

    def __del__(self) -> None:
        self._outputs.give(self._memory)


def mapped(size: int) -> Tensor:
    """uint8 [size] in a mapping of its own, which the system has back as soon as it is freed.

    Not by malloc: below 32 MiB it would come out of the heap of whichever thread asks, and every thread's heap keeps
    what was freed into it.
    """
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, size, **flags), dtype=np.uint8))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The same on the device, without waiting for it.

    On CUDA it goes through pinned memory, which torch uses again only once the copy is done: out of other memory the
    copy may hold the thread until the device has finished all earlier work.
    """
    if device.type == "cuda" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


_SMALL = 1 << 20
outputs = Outputs()
