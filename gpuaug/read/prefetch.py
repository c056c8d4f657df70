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
    it ends when this object is forgotten.

    Args:
        items: the iterator. The thread closes it in the end, if it has a ``close``.
        name: of the thread.
        count: items that may wait beside the one being made; with 0 the next one is begun when the last was taken.
            None: no bound.
        max_bytes: bytes that may wait; after that the buffer is filled again below 75 % of them. A larger item waits
            alone. None: no bound.
        size_of: bytes of an item, for ``max_bytes``.
        keep: called with an item when there is room for it; what it returns is kept in the item's place.
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
        size_of: Callable[[T], int] = lambda item: 0,
        keep: Callable[[T], T] = lambda item: item,
        device: torch.device | None = None,
    ) -> None:
        self._buffer = _Buffer(count, max_bytes, size_of, keep)
        self._thread = threading.Thread(target=_produce, args=(items, self._buffer, device), name=name, daemon=True)
        self._started = False
        weakref.finalize(self, self._buffer.stop)

    @property
    def waiting(self) -> int:
        """Items that wait."""
        return len(self._buffer.items)

    @property
    def bytes_waiting(self) -> int:
        """Bytes of the items that wait."""
        return self._buffer.bytes

    def start(self) -> None:
        """Start the thread."""
        if not self._started:
            self._started = True
            self._thread.start()

    def __next__(self) -> T:
        if not self._started and not self._buffer.stopped:
            self.start()
        item: T = self._buffer.take()
        return item

    def close(self) -> None:
        """Let go of what waits, and let the thread end after the item that it is making."""
        self._buffer.stop()

    def join(self, timeout: float) -> bool:
        """Wait for the thread to end, at most ``timeout`` seconds; True if it has."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, timeout))
            return not self._thread.is_alive()
        return True


class _Buffer:
    """The items that wait, and how the thread ended: all that a thread and its consumer share."""

    def __init__(
        self,
        count: int | None,
        max_bytes: int | None,
        size_of: Callable[[Any], int],
        keep: Callable[[Any], Any],
    ) -> None:
        self.count, self.max_bytes, self.size_of, self.keep = count, max_bytes, size_of, keep
        self.items: deque[Any] = deque()
        self._sizes: deque[int] = deque()
        self.bytes = 0
        self.stopped = False
        self._filling, self._ended = True, False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def wait(self) -> bool:
        """Wait until another item may be made; False if nobody wants one."""
        with self._changed:
            self._changed.wait_for(lambda: self.stopped or self.count is None or len(self.items) <= self.count)
            return not self.stopped

    def put(self, item: Any) -> None:
        """Wait until there are bytes free for an item, then keep it."""
        size = self.size_of(item)
        if self.max_bytes is not None:
            self._wait_for_bytes(size, self.max_bytes)
        kept = self.keep(item)
        with self._changed:
            if self.stopped:
                return
            self.items.append(kept)
            self._sizes.append(size)
            self._changed.notify_all()

    def _wait_for_bytes(self, size: int, limit: int) -> None:
        with self._changed:
            if self.bytes and self.bytes + size > limit:
                self._filling = False
            self._changed.wait_for(lambda: self.stopped or self._filling or not self.bytes)
            # below the low mark there is room for an item of a usual size; a larger one waits on
            self._changed.wait_for(lambda: self.stopped or not self.bytes or self.bytes + size <= limit)
            self._filling = True
            if not self.stopped:
                self.bytes += size  # before the item is copied, so that the bound holds at any time

    def take(self) -> Any:
        """The next item; StopIteration after the last one, and after :meth:`stop`."""
        with self._changed:
            self._changed.wait_for(lambda: self.items or self._ended or self.stopped)
            if self.items and not self.stopped:
                if self.max_bytes is not None:
                    self.bytes -= self._sizes[0]
                    if self.bytes <= LOW * self.max_bytes:
                        self._filling = True
                self._sizes.popleft()
                self._changed.notify_all()
                return self.items.popleft()
            error, self._error = self._error, None
        if error is not None and not self.stopped:
            raise error
        raise StopIteration

    def end(self, error: BaseException | None) -> None:
        """Note that no more items come, and why."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def stop(self) -> None:
        """Drop the items and wake whoever waits."""
        with self._changed:
            self.stopped, self.bytes = True, 0
            self.items.clear()
            self._sizes.clear()
            self._changed.notify_all()


def _produce(items: Iterator[Any], buffer: _Buffer, device: torch.device | None) -> None:
    """What the thread runs. It keeps no reference to an item that it has handed over."""
    try:
        if device is not None and device.type == "cuda":
            torch.cuda.set_device(device)
        while buffer.wait():
            item = next(items, END)
            if item is END:
                break
            buffer.put(item)
            del item
        buffer.end(None)
    except BaseException as error:
        buffer.end(error)
    finally:
        if (close := getattr(items, "close", None)) is not None:
            close()


def buffered(batches: Iterator[EncodedBatch], *, max_bytes: int) -> Producer[EncodedBatch]:
    """Encoded batches read ahead, so that storage may stall for a while without anyone waiting.

    Batches are copied out of the workers' shared memory, which is small in most containers.

    Args:
        batches: the batches.
        max_bytes: bytes that may wait.
    """
    return Producer(
        batches, name="gpuaug-ahead", max_bytes=max_bytes, size_of=lambda batch: batch.data.nbytes, keep=private_copy
    )


def private_copy(batch: EncodedBatch) -> EncodedBatch:
    """The same batch in private memory, which returns to the system as soon as it is freed. malloc would keep it."""
    size = batch.data.nbytes
    data = mapped(size) if size else torch.empty(0).byte()
    data.copy_(batch.data)
    labels = None if batch.labels is None else batch.labels.clone()
    return replace(batch, data=data, offsets=batch.offsets.clone(), labels=labels)
