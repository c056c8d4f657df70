"""A thread that produces items ahead of their consumer."""

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

LOW = 0.75  # a full buffer is refilled when it holds no more than this share of the byte limit
END: Any = object()


class Producer(Iterator[T]):
    """Runs an iterator in a thread, ahead of the consumer.

    If the iterator raises an exception, the consumer first gets all earlier items. The thread holds no reference to
    this object, and ends when this object is garbage-collected.

    Args:
        items: the iterator. At the end the thread calls ``items.close()``, if the iterator has this method.
        name: name of the thread.
        count: number of items that may wait while the next item is produced; None: no limit.
        max_bytes: limit of waiting bytes; None: no limit. The items must then be :class:`EncodedBatch` objects. They
            are copied to private memory. A batch larger than the limit waits alone.
        device: the device of the thread, if it is a CUDA device.
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
        weakref.finalize(self, self._buffer.stop)

    @property
    def waiting(self) -> int:
        return len(self._buffer.items)

    @property
    def bytes_waiting(self) -> int:
        """Bytes of the waiting items; 0 without ``max_bytes``."""
        return self._buffer.bytes

    def start(self) -> None:
        """Start the thread. The first ``next`` also starts it."""
        if self._thread.ident is None and not self._buffer.stopped:
            self._thread.start()

    def __next__(self) -> T:
        self.start()
        item: T = self._buffer.take()
        return item

    def close(self) -> None:
        """Drop waiting items. The thread ends after its current item."""
        self._buffer.stop()

    def join(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds. Returns whether the thread has ended."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, timeout))
            return not self._thread.is_alive()
        return True


class _Buffer:
    """All state that the thread shares with its consumer."""

    def __init__(self, count: int | None, max_bytes: int | None) -> None:
        self.count, self.max_bytes = count, max_bytes
        self.items: deque[Any] = deque()
        self.bytes = 0
        self.stopped = self._ended = False
        self._filling = True
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def fill(self, items: Iterator[Any], device: torch.device | None) -> None:
        """Produce the items. The thread keeps no reference to a produced item."""
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
        """Wait until ``ready()``. Returns False if the buffer was stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self.stopped or ready())
            return not self.stopped

    def _reserve(self, size: int, limit: int) -> None:
        """Wait until ``size`` more bytes fit, and reserve ``size`` bytes for the copy."""
        with self._changed:
            self._filling = not self.bytes or self.bytes + size <= limit
            self._wait(lambda: self._filling or not self.bytes)
            # Below LOW there may still be no room for a large item.
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
        """Drop the items and wake all waiting threads."""
        with self._changed:
            self.stopped, self.bytes = True, 0
            self.items.clear()
            self._changed.notify_all()


def private_copy(batch: EncodedBatch) -> EncodedBatch:
    """Copy a batch to private memory, because the workers' shared memory is small in most containers."""
    size = batch.data.nbytes
    data = mapped(size) if size else torch.empty(0).byte()
    data.copy_(batch.data)
    labels = None if batch.labels is None else batch.labels.clone()
    return replace(batch, data=data, offsets=batch.offsets.clone(), labels=labels)
