"""Memory of batches: reused buffers, memory mappings, and copies to a device."""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

_SMALL = 1 << 20  # bytes; for smaller tensors malloc is good enough
_HUGE = 4 << 20  # bytes; larger mappings have huge pages
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of glibc's settings for `mallopt`


class Outputs:
    """Reuses the memory of freed batches, because mapping new pages takes as long as augmenting.

    Args:
        most: largest number of bytes to keep. The oldest memory is released first.
        age: number of batches after which unused memory is released.
    """

    def __init__(self, most: int = 512 << 20, age: int = 64) -> None:
        self.most, self.age = most, age
        self._taken = 0
        # no lock: the garbage collector may append inside `take`, and would wait for the lock forever
        self._free: deque[tuple[int, Tensor]] = deque()

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool) -> Tensor:
        """An uninitialised tensor [B, C, H, W]. From 1 MiB on, its memory is reused when no tensor uses it."""
        size = dtype.itemsize * math.prod(shape)
        if size < _SMALL:
            memory_format = torch.channels_last if channels_last else torch.contiguous_format
            return torch.empty(shape, dtype=dtype, device="cpu", memory_format=memory_format)
        self._taken += 1
        memory, kept, room = None, list[tuple[int, Tensor]](), self.most
        while self._free:
            try:
                freed, candidate = self._free.pop()  # the CPU cache may still hold the newest memory
            except IndexError:  # another thread took the last one
                break
            if memory is None and candidate.numel() == size:
                memory = candidate
            elif self._taken - freed < self.age and candidate.numel() <= room:
                room -= candidate.numel()
                kept.append((freed, candidate))
        self._free.extendleft(kept)
        reused = mapped(size) if memory is None else memory
        lease = reused.numpy()  # this array is freed together with the last tensor that is made from it
        weakref.finalize(lease, lambda: self._free.append((self._taken, reused))).atexit = False
        flat = torch.from_numpy(lease).view(dtype)
        batch, channels, height, width = shape
        if channels_last:
            return flat.view(batch, height, width, channels).permute(0, 3, 1, 2)
        return flat.view(shape)


def mapped(size: int) -> Tensor:
    """A uint8 tensor [size] in its own memory mapping. Freeing the tensor returns the memory to the system.

    malloc may take blocks below 32 MiB from the heap of the calling thread, and a heap keeps freed memory. Large
    tensors have huge pages, because mapping them in pages of 4 KB takes longer than augmenting or resizing.
    """
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    memory = mmap.mmap(-1, size, **flags)
    if size > _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # some kernels have no huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))


def return_freed_memory(pool: ThreadPoolExecutor, num_threads: int, keep: int) -> None:
    """Return the freed memory of all heaps to the system. From then on, each heap keeps at most about ``keep`` bytes.

    Only glibc keeps freed memory, with one heap per thread. `malloc_trim` leaves the end of each heap, which is up to
    64 MiB. glibc returns it when a block is freed while the threshold is 0. ``num_threads``: the threads of ``pool``.
    """
    try:
        mallopt, malloc_trim = ctypes.CDLL(None).mallopt, ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    tasks = list[Future[None]]()
    mallopt(_TRIM_THRESHOLD, 0)
    with ThreadPoolExecutor(2 * num_threads) as new:  # new threads take over the heaps of threads that have ended
        for threads, count in (pool, num_threads), (new, 2 * num_threads):
            met = threading.Barrier(count)  # so that each thread gets one task

            def free_block(met: threading.Barrier = met) -> None:
                bytes(100_000)  # glibc looks at the heap's end if at least 64 KiB are freed
                met.wait()

            try:
                tasks += [threads.submit(free_block) for _ in range(count)]
            except RuntimeError:  # no new threads while the interpreter shuts down
                met.abort()
        wait(tasks)
    bytes(100_000)
    malloc_trim(0)
    keep = min(max(keep, 1 << 20), 32 << 20)  # smaller: the whole process becomes slow; larger: glibc refuses
    mallopt(_MMAP_THRESHOLD, keep)
    mallopt(_TRIM_THRESHOLD, keep)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device without waiting for the device.

    A copy from unpinned memory to CUDA may wait for all earlier work of the device, so the tensor is pinned first.
    """
    if device.type == "cuda" and tensor.is_cpu and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


outputs = Outputs()
