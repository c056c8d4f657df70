"""Items made ahead of their consumer by a thread, bounded by their number or their bytes."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch

from gpuaug.batch import EncodedBatch
from gpuaug.native.buffers import mapped

T = TypeVar("T")

LOW = 0.75  # share of the bound in bytes below which the buffer is filled again
END: Any = object()


class Producer(Iterator[T]):
    """Runs an iterator in a thread, ahead of whoever takes the items.

    Items come in order. An exception arrives in its turn, with its own type. The thread does not refer to this object:
    it ends when this object is garbage.

    Args:
        items: the iterator. The thread closes it in the end, if it has a ``close``.
        name: of the thread.
        count: items that may wait beside the one being made; with 0 the next one is begun when the last was taken.
            None: no bound.
        max_bytes: for :class:`EncodedBatch` items, the bytes that may wait; after that the buffer is filled again below
            75 % of them. A larger batch waits alone. Waiting batches are copied into private memory. None: no bound.
        device: the current device of the thread, if it is CUDA. A new thread's is the first one, whoever uses it.

    The thread starts at :meth:`start`, or when the first item is asked for.

    >>> list(Producer(iter([1, 2, 3]), name="numbers", count=1))
    [1, 2, 3]
    """

    def __init__(
        self,
        items: Iterator[T],
        *,
        name: str,
        count: int | None = None,
        max_bytes: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._buffer = _Buffer(count, max_bytes)
        self._thread = threading.Thread(target=self._buffer.fill, args=(items, device), name=name, daemon=True)
        self._started = False
        weakref.finalize(self, self._buffer.stop)

    @property
    def waiting(self) -> int:
        """Items that wait."""
        return len(self._buffer.items)

    @property
    def bytes_waiting(self) -> int:
        """Bytes of the items that wait; 0 without ``max_bytes``."""
        return self._buffer.bytes

    def start(self) -> None:
        """Start the thread."""
        if not self._started:
            self._started = True
            self._thread.start()

    def __next__(self) -> T:
        if not self._buffer.stopped:
            self.start()
        item: T = self._buffer.take()
        return item

    def close(self) -> None:
        """Drop what waits, and let the thread end after the item that it is making."""
        self._buffer.stop()

    def join(self, timeout: float) -> bool:
        """Wait for the thread to end, at most ``timeout`` seconds; True if it has."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, timeout))
            return not self._thread.is_alive()
        return True


class _Buffer:
    """The items that wait, and how the thread ended: all that a thread and its consumer share."""

    def __init__(self, count: int | None, max_bytes: int | None) -> None:
        self.count, self.max_bytes = count, max_bytes
        self.items: deque[Any] = deque()
        self.bytes = 0
        self.stopped = self._ended = False
        self._filling = True
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def fill(self, items: Iterator[Any], device: torch.device | None) -> None:
        """What the thread runs. It keeps no reference to an item that it has handed over."""
        try:
            if device is not None and device.type == "cuda":
                torch.cuda.set_device(device)
            while self._wait(lambda: self.count is None or len(self.items) <= self.count):
                item = next(items, END)
                if item is END:
                    break
                if self.max_bytes is not None:
                    self._reserve(item.data.nbytes, self.max_bytes)
                    item = private_copy(item)
                with self._changed:
                    if not self.stopped:
                        self.items.append(item)
                        self._changed.notify_all()
                del item
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
            if (close := getattr(items, "close", None)) is not None:
                close()

    def _wait(self, ready: Callable[[], bool]) -> bool:
        """Wait until ``ready()``; False if nobody wants another item."""
        with self._changed:
            self._changed.wait_for(lambda: self.stopped or ready())
            return not self.stopped

    def _reserve(self, size: int, limit: int) -> None:
        """Wait until ``size`` bytes are free and count them, before the item is copied: the bound holds at any time."""
        with self._changed:
            self._filling = not self.bytes or self.bytes + size <= limit
            self._wait(lambda: self._filling or not self.bytes)
            # below the low mark there is room for an item of a usual size; a larger one waits on
            if self._wait(lambda: not self.bytes or self.bytes + size <= limit):
                self.bytes += size

    def take(self) -> Any:
        """The next item; StopIteration after the last one, and after :meth:`stop`."""
        with self._changed:
            self._changed.wait_for(lambda: self.items or self._ended or self.stopped)
            if self.items and not self.stopped:
                item = self.items.popleft()
                if self.max_bytes is not None:
                    self.bytes -= item.data.nbytes
                    self._filling = self.bytes <= LOW * self.max_bytes
                self._changed.notify_all()
                return item
            error, self._error = self._error, None
        if error is not None and not self.stopped:
            raise error
        raise StopIteration

    def stop(self) -> None:
        """Drop the items and wake whoever waits."""
        with self._changed:
            self.stopped, self.bytes = True, 0
            self.items.clear()
            self._changed.notify_all()


def buffered(batches: Iterator[EncodedBatch], *, max_bytes: int) -> Producer[EncodedBatch]:
    """Encoded batches read ahead, up to ``max_bytes``, so that storage may stall for a while without anyone waiting."""
    return Producer(batches, name="gpuaug-ahead", max_bytes=max_bytes)


def private_copy(batch: EncodedBatch) -> EncodedBatch:
    """The same batch in private memory, not in the workers' shared memory, which is small in most containers.

    Its memory returns to the system as soon as it is freed. malloc would keep it.
    """
    size = batch.data.nbytes
    data = mapped(size) if size else torch.empty(0).byte()
    data.copy_(batch.data)
    labels = None if batch.labels is None else batch.labels.clone()
    return replace(batch, data=data, offsets=batch.offsets.clone(), labels=labels)
