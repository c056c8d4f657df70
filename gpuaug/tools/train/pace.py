"""Measures the speed of `gpuaug train`, and how long the training waits for data."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch


class Pace:
    """Counts images, seconds of training, and the seconds in which the device waited for a batch.

    On CUDA, the host may wait for a batch while the device still works. So the waiting time on CUDA is the gap between
    two steps on the training's stream. The time before the first batch does not count: workers start in that time.
    """

    def __init__(self, device: torch.device) -> None:
        self.images, self.waited, self.seconds = 0, 0.0, 1e-9
        self._device = device
        self._last: float | None = None  # time up to which `seconds` counts; None between epochs
        self._asked: Any = None  # time of the request for the next batch
        self._gaps: deque[tuple[Any, Any]] | None = None  # (begin, end) of waits not yet in `waited`; None at first

    def ask(self) -> None:
        """Call before you request the next batch."""
        self._asked = self._mark()

    def have(self) -> None:
        """Call when the batch has arrived."""
        there = self._mark()
        if self._gaps is None:
            self._gaps, self.seconds = deque(), 1e-9
            return
        self._gaps.append((self._asked, there))
        self._take(2 if self._device.type == "cuda" else 0)  # the host runs at most two steps ahead

    def stop(self) -> None:
        """Call after an epoch. Waits until the device has finished."""
        self._take(0)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._mark()
        self._last = None

    def _mark(self) -> Any:
        now = time.perf_counter()
        self.seconds += now - (self._last or now)
        self._last = now
        if self._device.type != "cuda":
            return now
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _take(self, left: int) -> None:
        while self._gaps and len(self._gaps) > left:
            asked, there = self._gaps.popleft()
            if self._device.type == "cuda":
                there.synchronize()
            self.waited += asked.elapsed_time(there) / 1000 if self._device.type == "cuda" else there - asked
