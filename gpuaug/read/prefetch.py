"""Encoded batches in memory ahead of the training, so that storage may stumble for a while without anyone waiting."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import replace

import torch

from gpuaug.batch import EncodedBatch
from gpuaug.native.buffers import mapped

LOW = 0.75  # share of the bound below which it is filled again
PATIENCE = 5.0  # seconds that ``close`` waits for a read under way


class Ahead(Iterator[EncodedBatch]):
    """Reads batches in a thread of its own while fewer than ``limit`` bytes of them wait.

    Batches are copied out of the workers' shared memory, which is small in most containers, into memory that the system
    has back as soon as a batch is consumed. A batch larger than ``limit`` waits alone. Exceptions arrive in their turn.

    Args:
        encoded: the batches.
        limit: bytes.
    """

    def __init__(self, encoded: Generator[EncodedBatch], *, limit: int) -> None:
        self._shelf = _Shelf(limit)
        self._thread = threading.Thread(target=_fill, args=(encoded, self._shelf), name="gpuaug-ahead", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._shelf.stop)  # the thread refers to the shelf only

    @property
    def level(self) -> int:
        """Bytes that wait."""
        return self._shelf.level

    def __next__(self) -> EncodedBatch:
        return self._shelf.take()

    def close(self) -> None:
        """Let go of what waits, and end the thread."""
        self._shelf.stop()
        if self._thread is not threading.current_thread():
            self._thread.join(PATIENCE)


class _Shelf:
    """What both sides see: the batches that wait, their bytes, and how it ended."""

    def __init__(self, limit: int) -> None:
        self.limit, self.level = limit, 0
        self._batches: deque[EncodedBatch] = deque()
        self._filling, self._ended, self._stopped = True, False, False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def put(self, batch: EncodedBatch) -> bool:
        """Wait for room, then take a copy; False if nobody wants it any more."""
        needed = batch.data.nbytes
        with self._changed:
            if self.level and self.level + needed > self.limit:
                self._filling = False
            self._changed.wait_for(lambda: self._stopped or self._filling or not self.level)
            # the low mark leaves room for a batch of a usual size; a larger one waits on
            self._changed.wait_for(lambda: self._stopped or not self.level or self.level + needed <= self.limit)
            self._filling = True
            if self._stopped:
                return False
            self.level += needed  # before the copy, so that the bound holds at any time
        copied = _copied(batch)
        with self._changed:
            self._batches.append(copied)
            self._changed.notify_all()
        return True

    def take(self) -> EncodedBatch:
        with self._changed:
            self._changed.wait_for(lambda: self._batches or self._ended or self._stopped)
            if self._batches and not self._stopped:
                batch = self._batches.popleft()
                self.level -= batch.data.nbytes
                if self.level <= LOW * self.limit:
                    self._filling = True
                self._changed.notify_all()
                return batch
            error, self._error = self._error, None
        if error is not None and not self._stopped:
            raise error
        raise StopIteration

    def end(self, error: BaseException | None) -> None:
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopped, self.level = True, 0
            self._batches.clear()
            self._changed.notify_all()


def _fill(encoded: Generator[EncodedBatch], shelf: _Shelf) -> None:
    try:
        for batch in encoded:
            if not shelf.put(batch):
                break
            del batch  # the segment it came in is free while the next one is awaited
        shelf.end(None)
    except BaseException as error:
        shelf.end(error)
    finally:
        encoded.close()


def _copied(batch: EncodedBatch) -> EncodedBatch:
    """The same batch in private memory, which goes back to the system at once when it is freed (malloc keeps it)."""
    size = batch.data.nbytes
    data = mapped(size) if size else torch.empty(0).byte()
    data.copy_(batch.data)
    labels = None if batch.labels is None else batch.labels.clone()
    return replace(batch, data=data, offsets=batch.offsets.clone(), labels=labels)
