"""Measures the speed of `gpuaug train`, and how long the training waits for data."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from gpuaug.loader.batch import Batch


class Pace:
    """Counts the seconds of training, and those in which the device waited for a batch.

    On CUDA, the host may wait for a batch while the device still works. So the waiting time on CUDA is the gap between
    two steps on the training's stream. The time before the first batch does not count: workers start then.
    """

    def __init__(self, device: torch.device) -> None:
        self.images, self.waited, self.seconds = 0, 0.0, 0.0
        self._device, self._on_cuda = device, device.type == "cuda"
        self._last = 0.0  # time up to which `seconds` counts
        self._gaps: deque[tuple[Any, Any]] = deque()  # (begin, end) of waits not yet in `waited`

    def measured(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches. The caller adds to ``images``, and calls :meth:`stop` after the epoch."""
        self._last = time.perf_counter()
        iterator = iter(batches)
        while True:
            begin = self._mark()
            batch = next(iterator, None)
            end = self._mark()
            if batch is None:
                return
            if self.images:
                self._gaps.append((begin, end))
                self._settle(2 if self._on_cuda else 0)  # the host runs at most two steps ahead
            else:
                self.seconds = 0.0
            yield batch

    def stop(self) -> None:
        """Call after an epoch. Waits until the device has finished."""
        self._settle(0)
        if self._on_cuda:
            torch.cuda.synchronize(self._device)
        self._mark()

    def _mark(self) -> Any:
        now = time.perf_counter()
        self.seconds += now - self._last
        self._last = now
        if not self._on_cuda:
            return now
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _settle(self, left: int) -> None:
        """Add the oldest gaps to ``waited`` until ``left`` remain."""
        while len(self._gaps) > left:
            begin, end = self._gaps.popleft()
            if self._on_cuda:
                end.synchronize()
            self.waited += begin.elapsed_time(end) / 1000 if self._on_cuda else end - begin
