"""A thread that produces items ahead of their consumer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")

END: Any = object()


class Producer(Iterator[T]):
    """Runs an iterator in a thread, ahead of the consumer. The thread runs until :meth:`close`, or to the end.

    If the iterator raises an exception, the consumer first gets all earlier items.

    Args:
        items: the iterator. At the end the thread calls ``items.close()``, if the iterator has this method.
        name: name of the thread.
        count: number of items that may wait while the next item is produced.
        device: if this is a CUDA device, the thread uses it.
    """

    def __init__(self, items: Iterator[T], *, name: str, count: int, device: torch.device) -> None:
        self._from, self._count, self._device = items, count, device
        self._items: deque[T] = deque()
        self._closed = self._ended = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._fill, name=name, daemon=True)

    @property
    def waiting(self) -> int:
        return len(self._items)

    def start(self) -> None:
        """Start the thread. The first ``next`` also starts it."""
        if self._thread.ident is None and not self._closed:
            self._thread.start()

    def __next__(self) -> T:
        self.start()
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._ended or self._closed)
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            error, self._error = self._error, None
        if error is not None and not self._closed:
            raise error
        raise StopIteration

    def close(self) -> None:
        """Drop waiting items. The thread ends after its current item."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

    def join(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds. Returns whether the thread has ended."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, timeout))
            return not self._thread.is_alive()
        return True

    def _fill(self) -> None:
        """Produce the items. The thread keeps no reference to a produced item."""
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or len(self._items) <= self._count)
                if self._closed:
                    break
                item: Any = next(self._from, END)
                if item is END:
                    break
                with self._changed:
                    if not self._closed:
                        self._items.append(item)
                        self._changed.notify_all()
                del item
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
            if (close := getattr(self._from, "close", None)) is not None:
                close()
