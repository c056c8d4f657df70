"""How fast `gpuaug train` runs: images per second, time spent waiting for batches, peak of host memory."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from gpuaug.tools import memory


class Pace:
    """Counts images and seconds, and the seconds in which the device waited for a batch.

    On the CPU that is the time between asking for a batch and having it. On CUDA it is the gap between two steps on the
    training's stream, because the host may wait for a batch while the device still works on the one before.

    Args:
        device: where the steps run.
        skip_start: begin to count with the first batch. The time until then, in which workers start and kernels are
            compiled, becomes ``start_up``.
    """

    def __init__(self, device: torch.device, *, skip_start: bool) -> None:
        self.images, self.waited = 0, 0.0
        self.start_up: float | None = None
        self._device, self._skip_start = device, skip_start
        self._begun = time.perf_counter()
        self._ended: float | None = None
        self._asked: Any = None
        self._gaps: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @property
    def seconds(self) -> float:
        """From the start until now, or until ``stop``; never 0."""
        return max(1e-9, (self._ended or time.perf_counter()) - self._begun)

    def ask(self) -> None:
        """Note that the last step is queued and the next batch is asked for."""
        self._asked = self._mark()

    def have(self) -> None:
        """Note that the batch is there."""
        if self._skip_start:
            self._skip_start, self.start_up = False, self.seconds
            self._begun = time.perf_counter()
            return
        mark = self._mark()
        if self._device.type != "cuda":
            self.waited += mark - self._asked
            return
        self._gaps.append((self._asked, mark))
        if len(self._gaps) > 2:  # waiting for the oldest keeps the host at most two steps ahead
            self._take()

    def stop(self) -> None:
        """Wait until the last step is done."""
        while self._gaps:
            self._take()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._ended = time.perf_counter()

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


@dataclass
class Usage:
    """Time and memory of the run so far, without checkpoints and held-out images."""

    images: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    start_up: float | None = None
    peak: int = 0  # bytes of host memory of this process and its workers
    _next_update: float = field(default=0.0, repr=False)

    def add(self, pace: Pace) -> None:
        """Add the pace of one epoch, or of the rest of one."""
        self.images += pace.images
        self.seconds += pace.seconds
        self.waited += pace.waited
        self.start_up = pace.start_up if self.start_up is None else self.start_up
        self.update_peak()

    def update_peak(self, *, every: float = 0.0) -> None:
        """Update the peak of memory, at most once in ``every`` seconds: reading it costs milliseconds."""
        if time.monotonic() >= self._next_update or not every:
            self.peak = max(self.peak, memory.host())
            self._next_update = time.monotonic() + every
