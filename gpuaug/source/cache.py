"""Caches the encoded bytes of a source in memory. All workers and ranks of a machine share one copy.

The memory is one unnamed file (memfd). A page of the file takes memory only after a write. The file holds:

    head      int64 [8]   bytes used, samples stored, 1 if a sample did not fit, 1 if a warning was logged
    index     int64 [N]   0: not stored; above 0: position of the record; below 0: minus the id of the writing process
    records   up to the limit; each: lengths of image and rest, image, rest (pickled label, extra)

A process writes the record first and its position last. If the process is killed, the sample counts as not stored.
"""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import socket
import struct
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import reduction
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gpuaug import checks, machine
from gpuaug.batch import Target
from gpuaug.errors import ConfigError, GpuaugError
from gpuaug.files import format_bytes, parse_bytes
from gpuaug.source import shared_memory
from gpuaug.source.base import Source
from gpuaug.source.objects import checked
from gpuaug.source.remote.disk import locked

log = logging.getLogger("gpuaug")

HEAD_WORDS = 8  # int64
USED, SAMPLES, FULL, WARNED = range(4)  # positions in the head
_LENGTHS = struct.Struct("<qq")  # of an image and of the rest of its sample
FILL_BATCH = 32  # samples that a worker reads at a time with `fill=ahead`

_opened: dict[str, int] = {}  # number of caches opened in this process, by name of the source


@dataclass(frozen=True, slots=True, kw_only=True)
class RamCache:
    """Settings of a memory cache. Each machine has one cache.

    A full cache keeps its samples. The other samples are read from the source in every epoch.

    Args:
        max_bytes: limit in bytes, such as 2147483648 or ``"2GiB"``; None: half of the memory available at the start.
        fill: ``first-use``: store each sample after its first read. ``ahead``: before the first batch, also load
            all samples that this machine reads in the first epoch.

    >>> RamCache(max_bytes="64GiB", fill="ahead").fill
    'ahead'
    """

    max_bytes: int | str | None = None
    fill: Literal["first-use", "ahead"] = "first-use"

    def __post_init__(self) -> None:
        checks.one_of("cache.fill", self.fill, ("first-use", "ahead"))
        if self.max_bytes is not None:
            parse_bytes(self.max_bytes, key="cache.max_bytes")
        if not shared_memory.SUPPORTED:
            raise ConfigError("`cache=ram` needs unnamed memory (memfd), which only Linux has. Set `cache=none`.")

    def open(self, source: Source) -> CachedSource:
        """Return a source that reads ``source`` through a new cache."""
        return CachedSource(source, self)


class CachedSource(Source):
    """Stores samples at their first read. Later reads of a stored sample return views of the memory, not copies."""

    def __init__(self, source: Source, settings: RamCache) -> None:
        self.source, self.settings = source, settings
        self.indices, self.labels = source.indices, source.labels
        self.classes, self.class_to_idx, self.num_classes = source.classes, source.class_to_idx, source.num_classes
        self.num_keypoints, self.thread_safe = source.num_keypoints, source.thread_safe
        self._filled = False
        numbers = source.row_count or (len(source) if source.indices is None else int(source.indices[-1]) + 1)
        name = ""
        if machine.local_world_size() > 1:  # the n-th cache of a source uses the same memory on all ranks
            name = repr((type(source).__name__, str(source.root), len(source), source.digest()))
            _opened[name] = _opened.get(name, 0) + 1
            name = f"cache {name} {_opened[name]} {settings.max_bytes}"
        if settings.max_bytes:
            limit = parse_bytes(settings.max_bytes, key="cache.max_bytes")
        elif (left := machine.memory_left()) is not None:
            limit = max(1 << 20, left[0] // 2)
            log.info("cache ram: limit %s, half of the memory available (%s)", format_bytes(limit), left[1])
        else:
            raise ConfigError("`cache.max_bytes` must be set: /proc/meminfo does not show the available memory.")
        size = _begin(numbers) + limit
        self._memory = _Memory(numbers, *shared_memory.share_once(name, lambda fd: os.ftruncate(fd, size)))

    def __len__(self) -> int:
        return len(self.source)

    def key(self, index: int) -> str:
        return str(self.source.key(index))

    def digest(self) -> str:
        return str(self.source.digest())

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        (item,) = self._read([index], lambda numbers: [self.source[numbers[0]]])
        return item

    @property
    def read_many(self) -> Callable[[Sequence[int]], list[Any]] | None:
        """Reads only missing samples with the source's ``read_many``; None if the source has no ``read_many``."""
        read = self.source.read_many
        return None if read is None else partial(self._read, read=read)

    @property
    def label(self) -> Callable[[int], Any] | None:
        return self.source.label

    @property
    def nbytes(self) -> int:
        """Bytes that all ranks of this machine have stored."""
        return int(self._memory.head[USED])

    @property
    def samples(self) -> int:
        """Samples that are stored or being written."""
        return int(self._memory.head[SAMPLES])

    @property
    def capacity(self) -> int:
        """Limit in bytes."""
        return self._memory.capacity

    def fill(self, reader: Any, numbers: Tensor) -> None:
        """Load the samples ``numbers``, int64 [M], with the workers of ``reader``. Later calls do nothing."""
        memory = self._memory
        if self._filled or not memory.numbers:
            return
        from tqdm import tqdm

        self._filled = True
        # in ascending order, which most storage reads fastest
        chunks = [c for c in torch.unique(numbers).split(FILL_BATCH) if not bool((memory.index[c.numpy()] > 0).all())]
        tasks = ((c, torch.zeros_like(c), torch.ones(len(c), dtype=torch.bool, device="cpu")) for c in chunks)
        encoded = reader.batches(tasks)
        hidden = None if machine.local_rank() == 0 else True
        with tqdm(total=sum(map(len, chunks)), desc="cache=ram", unit="image", disable=hidden, leave=False) as bar:
            for batch in encoded:
                bar.update(len(batch))
                bar.set_postfix_str(format_bytes(self.nbytes), refresh=False)
                if memory.head[FULL]:
                    encoded.close()
                    break
        log.info("cache ram: %d samples in memory, %s", self.samples, format_bytes(self.nbytes))
        self.warn_if_full()

    def warn_if_full(self) -> None:
        """Log a warning, once per machine, if a sample did not fit."""
        memory = self._memory
        if not memory.head[FULL] or memory.head[WARNED]:
            return
        is_first = False
        with suppress(OSError), memory.locked():
            is_first = not memory.head[WARNED]
            memory.head[WARNED] = 1
        if is_first:
            log.warning(
                "cache ram is full: %d of %d samples are in memory (%s). The others are read from the source. "
                "To store more, raise `cache.max_bytes` (now %s).",
                self.samples, len(self), format_bytes(self.nbytes), format_bytes(self.capacity),
            )  # fmt: skip

    def close(self) -> None:
        """Read only from the source from now on. The memory is released with the last view of its bytes."""
        empty = os.memfd_create("closed")
        os.ftruncate(empty, _begin(0))
        self._memory = _Memory(0, empty)

    def _read(self, numbers: Sequence[int], read: Callable[[Sequence[int]], Sequence[Any]]) -> list[Any]:
        """The samples from memory, or from ``read``."""
        items: list[Any] = [self._memory.get(i) for i in numbers]
        if missing := [row for row, item in enumerate(items) if item is None]:
            for row, item in zip(missing, read([numbers[row] for row in missing]), strict=True):
                items[row] = item
                self._put(numbers[row], item)
                self._put_same_group(numbers[row])
        return items

    def _put(self, index: int, item: Any) -> None:
        """Store the item if it is valid. The reader reports invalid items."""
        if not isinstance(item, tuple | list) or len(item) not in (2, 3):
            return
        data, label, *extra = item
        if isinstance(label, Target) and isinstance(label.mask, memoryview):  # pickle refuses a memoryview
            copied = replace(label, mask=bytes(label.mask))
            label = checked(copied) if label._checked else copied
        try:
            data = data.numpy().data if isinstance(data, Tensor) else memoryview(data)
            rest = pickle.dumps((label, *extra))
        except (TypeError, ValueError, AttributeError, RecursionError, pickle.PicklingError):
            return
        if data.ndim == 1 and data.itemsize == 1 and data.c_contiguous and len(data):
            self._memory.put(index, data.cast("B"), rest)

    def _put_same_group(self, index: int) -> None:
        """Store all samples that the source has read together with this sample."""
        same_group = self.source.same_group
        if same_group is None:
            return
        for number in same_group(index).tolist():
            memory = self._memory
            if memory.head[FULL] or not memory.numbers:
                return
            if not memory.index[number]:
                try:
                    item = self.source[number]
                except (OSError, GpuaugError):  # becomes a fault when the sample is requested
                    continue
                self._put(number, item)


class _Memory:
    """Samples by number in an unnamed file. Forked workers inherit the file, spawned ones get its descriptor."""

    def __init__(self, numbers: int, fd: int, claim: socket.socket | None = None) -> None:
        self.numbers, self.begin, self._fd = numbers, _begin(numbers), fd
        self.capacity = os.fstat(fd).st_size - self.begin
        weakref.finalize(self, os.close, fd)
        if claim is not None:
            weakref.finalize(self, claim.close)  # hides the memory from new ranks
        try:
            mapping = mmap.mmap(fd, 0)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"`cache.max_bytes` of {format_bytes(self.capacity)} cannot be mapped: {error}. Set a lower limit."
            ) from error
        words = np.frombuffer(mapping, dtype=np.int64, count=HEAD_WORDS + numbers)
        self.head, self.index = words[:HEAD_WORDS], words[HEAD_WORDS:]
        self._file = memoryview(mapping).toreadonly()

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.numbers, reduction.DupFd(self._fd))

    def get(self, index: int) -> tuple[Any, ...] | None:
        """The sample; None if it is not stored."""
        if not 0 <= index < self.numbers or (begin := int(self.index[index])) <= 0:
            return None
        image, rest = _LENGTHS.unpack_from(self._file, begin)
        middle = begin + _LENGTHS.size + image
        # unpickling is safe: only our own processes write to this memory
        return self._file[middle - image : middle], *pickle.loads(self._file[middle : middle + rest])

    def put(self, index: int, data: memoryview, rest: bytes) -> None:
        if not 0 <= index < self.numbers or self.index[index] > 0:
            return
        record = b"".join((_LENGTHS.pack(len(data), len(rest)), data, rest))
        try:
            with self.locked():
                entry, position = int(self.index[index]), self.begin + int(self.head[USED])
                if entry > 0 or (entry < 0 and os.path.exists(f"/proc/{-entry}")):
                    return
                reserved = -(-len(record) // 8) * 8
                if position + reserved > len(self._file):
                    self.head[FULL] = 1
                    return
                self.head[USED] += reserved
                self.head[SAMPLES] += entry == 0
                self.index[index] = -os.getpid()
        except OSError:  # this process has no free descriptor for the lock now
            return
        try:
            shared_memory.write(self._fd, record, position)
        except OSError as error:  # the sample stays marked as being written, so this process does not try again
            self.head[FULL] = 1
            log.warning("cache ram cannot store more samples: %s", error)
            return
        self.index[index] = position

    def locked(self) -> AbstractContextManager[int]:
        """Lock out all other threads and processes, with a descriptor that only this thread has."""
        return locked(f"/proc/self/fd/{self._fd}", follow=True)


def _received(numbers: int, fd: Any) -> _Memory:
    return _Memory(numbers, fd.detach())


def _begin(numbers: int) -> int:
    """Position of the first record."""
    return 8 * (HEAD_WORDS + numbers)
