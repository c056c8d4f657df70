"""Memory of batches: reused, mapped, and pinned for copies to a device."""

from __future__ import annotations

import math
import mmap
import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

_SMALL = 1 << 20  # bytes below which malloc is good enough


class Outputs:
    """Reuses the memory of freed batches, because mapping fresh pages takes as long as a recipe.

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
        memory, kept, room = None, list[tuple[int, Tensor]](), self.most
        while self._free:
            try:
                freed, candidate = self._free.pop()  # the newest first: more of it may be in cache
            except IndexError:  # another thread was faster
                break
            if memory is None and candidate.numel() == size:
                memory = candidate
            elif self._taken - freed < self.age and candidate.numel() <= room:
                room -= candidate.numel()
                kept.append((freed, candidate))
        self._free.extendleft(kept)
        reused = mapped(size) if memory is None else memory
        lease = reused.numpy()  # dies with the last tensor made from it
        weakref.finalize(lease, lambda: self._free.append((self._taken, reused))).atexit = False
        flat = torch.from_numpy(lease).view(dtype)
        batch, channels, height, width = shape
        if channels_last:
            return flat.view(batch, height, width, channels).permute(0, 3, 1, 2)
        return flat.view(shape)


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


outputs = Outputs()
