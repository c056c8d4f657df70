"""Memory through which workers send batches. It is reused, because mapping new memory takes longer than reading."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections import deque
from multiprocessing import reduction
from typing import Any

import numpy as np
from numpy.typing import NDArray

NAME = "batches"  # of the memory in /proc
SLOT_BYTES = 1 << 36  # distance of slots; a page of the file takes memory only after a write
KEPT_BYTES = 1 << 26  # a slot with a larger batch returns its memory to the system after use


class Ring:
    """Slots for one batch each, in one unnamed file, which all processes map. /dev/shm does not limit it on Linux.

    The reading process decides which slot is free.
    """

    def __init__(self, slots: int, received: Any = None) -> None:
        self._slots, self._free = slots, deque(range(slots))
        self._maps: dict[int, mmap.mmap] = {}
        self._fd = _unnamed_file((slots + 1) * SLOT_BYTES) if received is None else received.detach()
        weakref.finalize(self, os.close, self._fd).atexit = False  # at exit, DataLoader still calls `set`

    def __reduce__(self) -> tuple[Any, ...]:
        return Ring, (self._slots, reduction.DupFd(self._fd))

    # -- in all processes

    def write(self, slot: int, parts: list[Any]) -> int:
        """Join the parts in the slot and return their total size. ``parts`` is empty afterwards."""
        size, begin = sum(map(len, parts)), 0
        target = memoryview(self._map(slot, size))  # `os.pwrite` takes 4 instead of 1 us for 36 KiB
        parts.reverse()
        while parts:  # each part is freed after its copy, because a batch should be in memory only once
            part = parts.pop()
            target[begin : begin + len(part)] = part
            begin += len(part)
        return size

    def read(self, slot: int, size: int) -> NDArray[np.uint8]:
        """The first ``size`` bytes of a slot, uint8 [size], without a copy."""
        return np.frombuffer(self._map(slot, size), dtype=np.uint8, count=size)

    def _map(self, slot: int, size: int) -> mmap.mmap:
        """The memory of a slot, at least ``size`` bytes."""
        if len(self._maps.get(slot, b"")) < size:
            length = max(1 << 20, 1 << (size - 1).bit_length())
            self._maps[slot] = mmap.mmap(self._fd, length, offset=slot * SLOT_BYTES)
        return self._maps[slot]

    def set(self) -> None:
        """Tell the workers to end. With ``is_set`` this replaces an Event, whose lock a killed worker may hold."""
        os.pwrite(self._fd, b"1", self._slots * SLOT_BYTES)

    def is_set(self) -> bool:
        return os.pread(self._fd, 1, self._slots * SLOT_BYTES) == b"1"

    # -- in the reading process

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def take(self) -> int:
        """A free slot, the one that was used last: its memory exists."""
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Make a slot free. The garbage collector may call this at any time, so there is no lock."""
        if len(self._maps.get(slot, b"")) > KEPT_BYTES and hasattr(mmap, "MADV_REMOVE"):
            self._maps.pop(slot).madvise(mmap.MADV_REMOVE)
        self._free.append(slot)

    def lease(self, slot: int, size: int) -> NDArray[np.uint8]:
        """As :meth:`read`. When nothing uses the array any more, the slot is free."""
        leased = self.read(slot, size)
        weakref.finalize(leased, self.release, slot).atexit = False
        return leased


def _unnamed_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd
