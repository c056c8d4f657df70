"""The encoded bytes of a source in memory: one copy for all workers and all ranks of a machine.

The memory is one unnamed file (memfd) of the bound's size, of which only what is written exists:

    head      int64 [8]   bytes taken, samples taken, whether something did not fit, whether that was said
    index     int64 [N]   per sample: 0 not here; > 0 where its record begins; < 0 being written, by this process
    records   length of the bytes, length of the label, bytes, label

A record is written first and its place published after, so whoever dies while writing leaves a sample that is not here.
Space is taken under a lock of the kernel's, which ends with its process.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gpuaug import machine, size
from gpuaug.errors import ConfigError, GpuaugError
from gpuaug.source import shared_memory
from gpuaug.source.protocol import Source

log = logging.getLogger("gpuaug")

HEAD = 8  # int64 words
TAKEN, SAMPLES, FULL, SAID = range(4)
FILL_BATCH = 32  # samples that a worker reads at a time when filling ahead

_made: dict[str, int] = {}  # how often this process made a cache of the same source


@dataclass(frozen=True, slots=True, kw_only=True)
class RamCache:
    """Encoded bytes in memory, once per machine. Nothing is evicted: what does not fit is read as before.

    Args:
        max_bytes: bound in bytes, as 2147483648 or ``"2GiB"``; None: half of the memory that is available at the start.
        fill: ``first-use``: what is read stays; ``ahead``: before the first batch, what this machine shows in this
            epoch. Of several machines each has another share in every epoch: what is new then is read once, and stays,
            so room for the whole source on each of them ends all reading after some epochs.
    """

    max_bytes: int | str | None = None
    fill: Literal["first-use", "ahead"] = "first-use"

    def __post_init__(self) -> None:
        if not isinstance(self.fill, str) or self.fill not in ("first-use", "ahead"):
            raise ConfigError(f"`cache.fill` must be first-use or ahead. Found: {self.fill!r}.")
        if self.max_bytes is not None:
            size.parse(self.max_bytes, key="cache.max_bytes")
        if not shared_memory.SUPPORTED:
            raise ConfigError("`cache=ram` needs unnamed memory (memfd), which only Linux has. Set `cache=none`.")

    def open(self, source: Source) -> CachedSource:
        """``source`` with this memory in front of it."""
        return CachedSource(source, self)


class CachedSource:
    """A source whose bytes are read once and then come from memory, as views that copy nothing.

    Only what was read whole stays: a sample that raised or has no bytes is asked for again.
    """

    def __init__(self, source: Source, settings: RamCache) -> None:
        self.source, self.settings = source, settings
        self.indices, self.labels = source.indices, source.labels
        self.classes, self.class_to_idx, self.num_classes = source.classes, source.class_to_idx, source.num_classes
        self._told = self._filled = False
        numbers = len(source) if source.indices is None else int(source.indices[-1]) + 1
        self._memory: _Memory | None = _Memory(numbers, self._bound(), what=self._what())

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Bytes and label, from memory or else from the source."""
        found = self._get(index)
        if found is not None:
            return found
        item = self._kept(index, self.source[index])
        self._keep_along(index)
        return item

    def __repr__(self) -> str:
        return f"CachedSource({self.source!r})"

    def key(self, index: int) -> str:
        """The source's."""
        return self.source.key(index)

    def digest(self) -> str:
        """The source's."""
        return self.source.digest()

    @property
    def read_many(self) -> Callable[[Sequence[int]], list[Any]] | None:
        """As the source's own, for what is not in memory; None where the source reads one at a time."""
        return None if getattr(self.source, "read_many", None) is None else self._read_many

    @property
    def label(self) -> Callable[[int], Any] | None:
        """As the source's own; None where it has none."""
        return getattr(self.source, "label", None)

    @property
    def nbytes(self) -> int:
        """Bytes taken, by all ranks of this machine."""
        return 0 if self._memory is None else int(self._memory.head[TAKEN])

    @property
    def samples(self) -> int:
        """Samples in memory, or about to be."""
        return 0 if self._memory is None else int(self._memory.head[SAMPLES])

    @property
    def capacity(self) -> int:
        """Bytes that there is room for."""
        return 0 if self._memory is None else self._memory.capacity

    def status(self) -> Tensor:
        """Per sample number int8 [N]: 1 in memory, 0 not, -1 being written."""
        if self._memory is None:
            return torch.zeros(0, dtype=torch.int8)
        return torch.from_numpy(np.sign(self._memory.index).astype(np.int8))

    def fill(self, reader: Any, numbers: Tensor) -> None:
        """Read samples by the workers of ``reader`` into memory, once; further calls do nothing.

        Args:
            reader: a :class:`~gpuaug.read.reader.Reader` of this source.
            numbers: int64 [M], what this rank reads of the epoch.
        """
        memory = self._memory
        if self._filled or memory is None:
            return
        from tqdm import tqdm

        self._filled = True
        # ascending: the order in which most storage is fastest
        chunks = [c for c in torch.unique(numbers).split(FILL_BATCH) if not bool((memory.index[c.numpy()] > 0).all())]
        tasks = ((c, torch.zeros_like(c), torch.ones(len(c), dtype=torch.bool)) for c in chunks)
        encoded = reader.batches(tasks)
        hidden = None if machine.local_rank() == 0 else True
        with tqdm(total=sum(map(len, chunks)), desc="cache=ram", unit="image", disable=hidden, leave=False) as bar:
            for batch in encoded:
                bar.update(len(batch))
                bar.set_postfix_str(size.text(self.nbytes), refresh=False)
                if memory.head[FULL]:
                    encoded.close()
                    break
        log.info("cache ram: %d samples in memory, %s", self.samples, size.text(self.nbytes))
        self.tell()

    def tell(self) -> None:
        """Say that something did not fit: one line in one rank, the first time."""
        if self._told or self._memory is None or not self._memory.head[FULL]:
            return
        self._told = True
        with self._memory.locked():
            said = int(self._memory.head[SAID])
            self._memory.head[SAID] = 1
        if not said:
            log.warning(
                "cache ram is full: %d of %d samples are in memory (%s); the others are read as before. "
                "Raise `cache.max_bytes`, now %s, to hold more.",
                self.samples, len(self), size.text(self.nbytes), size.text(self.capacity),
            )  # fmt: skip

    def close(self) -> None:
        """Give the memory back; from now on everything is read from the source."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _get(self, index: int) -> tuple[Any, Any] | None:
        memory = self._memory
        found = None if memory is None else memory.get(index)
        if found is None:
            return None
        data, label = found
        if label is not None:
            return data, pickle.loads(label)  # of our own making, in memory that only our processes have
        assert self.labels is not None
        return data, int(self.labels.numpy()[index])

    def _kept(self, index: int, item: Any) -> Any:
        """Put an item into memory if it is one; what a source may give is the reader's to judge."""
        memory = self._memory
        if memory is None or not isinstance(item, tuple | list) or len(item) != 2:
            return item
        data, label = item
        try:
            data = data.numpy().data if isinstance(data, Tensor) else memoryview(data)
        except (TypeError, ValueError):
            return item
        if data.ndim == 1 and data.itemsize == 1 and data.c_contiguous and len(data):
            known = self.labels is not None and type(label) is int and int(self.labels.numpy()[index]) == label
            memory.put(index, data.cast("B"), None if known else pickle.dumps(label))
        return item

    def _read_many(self, numbers: Sequence[int]) -> list[Any]:
        items: list[Any] = [self._get(i) for i in numbers]
        missing = [row for row, item in enumerate(items) if item is None]
        if missing:
            many: Any = getattr(self.source, "read_many", None)
            for row, item in zip(missing, many([numbers[row] for row in missing]), strict=True):
                items[row] = self._kept(numbers[row], item)
                self._keep_along(numbers[row])
        return items

    def _keep_along(self, index: int) -> None:
        """Keep too what the source had to read for this sample: rows of Parquet are read by the group."""
        along: Any = getattr(self.source, "along", None)
        if along is None:
            return
        for number in along(index).tolist():
            memory = self._memory
            if memory is None or memory.head[FULL]:
                return
            if not memory.index[number]:
                try:
                    item = self.source[number]
                except (OSError, GpuaugError):  # a fault of that sample, when it is asked for
                    continue
                self._kept(number, item)

    def _bound(self) -> int:
        if self.settings.max_bytes is not None:
            return size.parse(self.settings.max_bytes, key="cache.max_bytes")
        left = machine.memory_left()
        if left is None:
            raise ConfigError("`cache.max_bytes` must be given: /proc/meminfo does not say how much memory there is.")
        bound = max(1 << 20, left[0] // 2)
        log.info("cache ram: at most %s, half of the memory available (%s)", size.text(bound), left[1])
        return bound

    def _what(self) -> str:
        """What the ranks share one memory for; the n-th cache of the same source on each of them."""
        if machine.local_world_size() == 1:
            return ""
        source = self.source
        what = repr((type(source).__name__, str(getattr(source, "root", "")), len(source), source.digest()))
        _made[what] = _made.get(what, 0) + 1
        return f"cache {what} {_made[what]} {self.settings.max_bytes}"


class _Memory:
    """Records in an unnamed file, by sample number. Workers get it by fork, or its descriptor by spawn."""

    def __init__(self, numbers: int, capacity: int, *, what: str) -> None:
        self.numbers = numbers
        begin = -(-8 * (HEAD + numbers) // mmap.PAGESIZE) * mmap.PAGESIZE
        found = shared_memory.once(what, lambda fd: os.ftruncate(fd, begin + capacity))
        self._claim = found.claim
        self._map(found.fd)

    def _map(self, fd: int) -> None:
        self.begin = -(-8 * (HEAD + self.numbers) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.capacity = os.fstat(fd).st_size - self.begin
        try:
            table = mmap.mmap(fd, self.begin)
            self._records = memoryview(mmap.mmap(fd, self.begin + self.capacity, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            os.close(fd)
            raise ConfigError(
                f"`cache.max_bytes` of {size.text(self.capacity)} cannot be mapped: {error}. Make it smaller."
            ) from error
        words = np.frombuffer(table, dtype=np.int64)
        self.head, self.index = words[:HEAD], words[HEAD : HEAD + self.numbers]
        self._fd, self._lock, self._pid = fd, threading.Lock(), os.getpid()
        self._close = weakref.finalize(self, os.close, fd)

    def __getstate__(self) -> dict[str, Any]:
        return {"numbers": self.numbers, "fd": reduction.DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.numbers, self._claim = state["numbers"], None
        self._map(state["fd"].detach())

    def get(self, index: int) -> tuple[memoryview, bytes | None] | None:
        """A view of the bytes, and the label's bytes where it has some; None if they are not here."""
        if not 0 <= index < self.numbers or (begin := int(self.index[index])) <= 0:
            return None
        length, label = np.frombuffer(self._records, dtype=np.int64, count=2, offset=begin).tolist()
        end = begin + 16 + length
        return self._records[begin + 16 : end], bytes(self._records[end : end + label]) if label else None

    def put(self, index: int, data: memoryview, label: bytes | None) -> None:
        """Keep a sample, if there is room and nobody else does."""
        if not 0 <= index < self.numbers or self.index[index] > 0:
            return
        record: list[Any] = [
            np.array([len(data), len(label or b"")], dtype=np.int64).data.cast("B"),
            data,
            label or b"",
        ]
        needed = -(-(16 + len(data) + len(label or b"")) // 8) * 8
        with self.locked():
            entry = int(self.index[index])
            if entry > 0 or (entry < 0 and _alive(-entry)):
                return
            taken = int(self.head[TAKEN])
            if taken + needed > self.capacity:
                self.head[FULL] = 1
                return
            self.head[TAKEN] = taken + needed
            self.head[SAMPLES] += entry == 0
            self.index[index] = -os.getpid()
        place = self.begin + taken
        try:
            # by write and not through a map: no memory left is an error here, and a fatal signal there
            done = os.pwritev(self._fd, record, place)
            if done < sum(map(len, record)):
                whole = b"".join(record)
                while done < len(whole):
                    done += os.pwrite(self._fd, whole[done:], place + done)
        except OSError as error:
            self.index[index] = 0
            self.head[FULL] = 1
            log.warning("cache ram takes no more: %s", error)
            return
        self.index[index] = place

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other thread or process of this machine is inside; a process that is killed leaves it."""
        if self._pid != os.getpid():  # another thread of the parent may have held it at the fork
            self._lock, self._pid = threading.Lock(), os.getpid()
        with self._lock:
            fcntl.lockf(self._fd, fcntl.LOCK_EX, 1)
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1)

    def close(self) -> None:
        """No rank that comes now finds it; it ends with the last view of its bytes."""
        if self._claim is not None:
            self._claim.close()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
