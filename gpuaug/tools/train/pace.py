"""How fast `gpuaug train` runs: images per second, time spent waiting for batches, peak of host memory."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from gpuaug.tools import memory


class Pace:
    """Counts images and seconds between ``start`` and ``stop``, and the seconds in which the device waited for a batch.

    On the CPU that is the time between asking for a batch and having it. On CUDA it is the gap between two steps on the
    training's stream, because the host may wait for a batch while the device still works on the one before.

    Attributes:
        start_up: seconds until the first batch, in which workers start and kernels are compiled. Not counted otherwise.
        peak: largest number of bytes of host memory of this process and its workers.
    """

    def __init__(self, device: torch.device) -> None:
        self.images, self.waited, self.peak = 0, 0.0, 0
        self.start_up: float | None = None
        self._device = device
        self._counted, self._begun = 0.0, 0.0  # seconds until the last stop; time of the start, 0 after a stop
        self._next_peak = 0.0
        self._asked: Any = None
        self._gaps: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @property
    def seconds(self) -> float:
        """Seconds counted so far; never 0."""
        running = time.perf_counter() - self._begun if self._begun else 0.0
        return max(1e-9, self._counted + running)

    def start(self) -> None:
        """Begin to count."""
        self._begun = time.perf_counter()

    def ask(self) -> None:
        """Note that the last step is queued and the next batch is asked for."""
        self._asked = self._mark()

    def have(self) -> None:
        """Note that the batch is there."""
        if self.start_up is None:
            self.start_up, self._counted = self.seconds, 0.0
            self.start()
            return
        mark = self._mark()
        if self._device.type != "cuda":
            self.waited += mark - self._asked
            return
        self._gaps.append((self._asked, mark))
        if len(self._gaps) > 2:  # waiting for the oldest keeps the host at most two steps ahead
            self._take()

    def stop(self) -> None:
        """Wait until the last step is done, and count no further."""
        while self._gaps:
            self._take()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._counted, self._begun = self.seconds, 0.0
        self.update_peak()

    def update_peak(self, *, every: float = 0.0) -> None:
        """Update ``peak``, at most once in ``every`` seconds: reading it costs milliseconds."""
        if time.monotonic() >= self._next_peak or not every:
            self.peak = max(self.peak, memory.host())
            self._next_peak = time.monotonic() + every

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _take(self) -> None:
        asked, there = self._gaps.popleft()
        there.synchronize()
        self.waited += asked.elapsed_time(there) / 1000
