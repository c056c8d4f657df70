"""Traces a pass of a loader: how long each stage works, waits, and keeps processors busy."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from glob import glob
from typing import Any

import numpy as np
import torch

from gpuaug import machine
from gpuaug.batch import EncodedBatch
from gpuaug.decode.decoder import Decoder
from gpuaug.errors import GpuaugError
from gpuaug.loader.batch import Batch
from gpuaug.loader.faults import Faults
from gpuaug.loader.loader import Loader
from gpuaug.loader.partial_batch import PartialBatch
from gpuaug.loader.passes import Pass
from gpuaug.loader.pipeline import Pipeline
from gpuaug.read import order as orders
from gpuaug.read.order import Task

Step = Callable[[Batch], None]
Seconds = defaultdict[str, float]  # by stage
_zeros = functools.partial(Seconds, float)

# The stages of each thread; the last is the consumer's. Without prefetching, one thread runs everything.
THREADS = (("read", "headers"), ("decode", "masks"), ("augment", "targets", "mix"), ("step",))
STAGES = tuple(itertools.chain(*THREADS))
WARMUP = 2  # batches before the first measured one: they start workers, and compile kernels
FEWEST = 3  # batches that are measured, even if they take longer than asked
REPEATED = 64  # images that a pass repeats if the source has a disk cache, so that it holds them
LONGEST_S = 20.0  # a pass ends after this time, even before FEWEST batches


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What the stages did while a pass made ``images`` images in ``seconds``."""

    images: int
    seconds: float
    busy: dict[str, float]  # seconds of each stage; `read`: in which the headers' thread waited for encoded batches
    cpu: dict[str, float]  # CPU seconds per image of each stage, over all threads and workers
    # processor time of a worker by its time, without the time in which it waited for a free processor; without
    # workers: the same for `read`
    reading: float
    shorter: float  # median of the images' shorter sides, in pixels; 0: unknown
    largest: int  # the largest side of a view, in pixels; 0: unknown
    faults: int  # number of bad images
    tried: int  # number of all images

    @property
    def rate(self) -> float:
        return self.images / self.seconds

    def share(self, *stages: str) -> float:
        """The share of the pass in which a stage worked."""
        return sum(self.busy.get(stage, 0.0) for stage in stages) / self.seconds


@dataclass
class _Clock:
    """Adds up the seconds of the stages from :meth:`start` to :meth:`stop`. Several threads use it."""

    device: torch.device
    cpu_time: Callable[[], float]  # of the stage's own thread, or of this process: exact if nothing else runs
    began: float = 0.0
    ended: float = math.inf
    busy: Seconds = field(default_factory=_zeros)
    cpu: Seconds = field(default_factory=_zeros)
    queued: Seconds = field(default_factory=_zeros)  # in which the stage's own thread waited for a free processor
    events: list[tuple[str, Any, Any]] = field(default_factory=list)  # CUDA: begin and end of a stage's kernels
    decoders: int = 1  # threads that decode

    def start(self) -> None:
        self.busy, self.cpu, self.queued, self.events = _zeros(), _zeros(), _zeros(), []
        self.began = time.perf_counter()

    def stop(self) -> float:
        """Returns the seconds since :meth:`start`. What runs now still adds its part, when it ends."""
        self.ended = time.perf_counter()
        for stage in set(THREADS[1]) & self.busy.keys():
            self.busy[stage] /= self.decoders
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            kernels = _zeros()
            for stage, first, last in list(self.events):
                kernels[stage] += first.elapsed_time(last) / 1e3
            for stage, took in kernels.items():  # the host only queues the kernels
                self.busy[stage] = max(self.busy[stage], min(took, self.ended - self.began))
        return self.ended - self.began

    @contextlib.contextmanager
    def stage(self, name: str, *, kernels: bool = False) -> Iterator[None]:
        kernels = kernels and self.device.type == "cuda"
        first = torch.cuda.current_stream(self.device).record_event(_timed()) if kernels else None
        queued, cpu, since = queued_seconds(), self.cpu_time(), time.perf_counter()
        try:
            yield
        finally:
            now = time.perf_counter()
            self.busy[name] += max(0.0, min(now, self.ended) - max(since, self.began))
            if now <= self.ended:
                self.cpu[name] += self.cpu_time() - cpu
                self.queued[name] += queued_seconds() - queued
                if kernels:
                    self.events.append((name, first, torch.cuda.current_stream(self.device).record_event(_timed())))


def _timed() -> Any:
    return torch.cuda.Event(enable_timing=True)


@dataclass(kw_only=True, eq=False)
class _Traced(Pipeline):
    clock: _Clock
    largest = 0
    shorter = 0.0

    @classmethod
    def of(cls, pipeline: Pipeline, clock: _Clock, faults: Faults) -> _Traced:
        """The same stages, which tell the clock when they work."""
        mix = pipeline.mix

        def mixed(*args: Any, **given: Any) -> Any:
            assert mix is not None
            with clock.stage("mix"):
                return mix(*args, **given)

        parts = {each.name: getattr(pipeline, each.name) for each in fields(Pipeline) if each.init}
        return cls(**{**parts, "faults": faults, "mix": None if mix is None else mixed}, clock=clock)

    def read(self, *args: Any, **given: Any) -> Iterator[EncodedBatch]:
        with contextlib.closing(super().read(*args, **given)) as batches:  # type: ignore[type-var]
            while True:
                with self.clock.stage("read"):
                    batch = next(batches, None)
                if batch is None:
                    return
                yield batch

    def read_headers(self, encoded: EncodedBatch, epoch: int, step: orders.Step | None = None) -> PartialBatch:
        with self.clock.stage("headers"):
            batch = super().read_headers(encoded, epoch, step)
        if batch.info is not None:
            self.shorter = float(np.median(np.minimum(batch.info.height, batch.info.width)))
            self.largest = max(max(window.size) for window in batch.windows)
        return batch

    def decode_images(self, batch: PartialBatch, decoder: Decoder) -> Any:
        with self.clock.stage("decode", kernels=True):
            return super().decode_images(batch, decoder)

    def decode_masks(self, batch: PartialBatch, decoder: Decoder) -> Any:
        with contextlib.nullcontext() if batch.targets is None else self.clock.stage("masks"):
            return super().decode_masks(batch, decoder)

    def augment(self, batch: PartialBatch) -> Any:
        with self.clock.stage("augment", kernels=True):
            return super().augment(batch)

    def _combine(self, *given: Any) -> PartialBatch:
        with self.clock.stage("augment", kernels=True):
            return super()._combine(*given)

    def finish_targets(self, batch: PartialBatch, *given: Any) -> Any:
        with contextlib.nullcontext() if batch.targets is None else self.clock.stage("targets"):
            return super().finish_targets(batch, *given)


class _Faults(Faults):
    """Counts bad samples. They raise no error and are not recorded."""

    bad = tried = 0

    def handle(self, faults: Sequence[Any], *, indices: Sequence[int], **_: Any) -> None:
        self.bad, self.tried = self.bad + len(faults), self.tried + len(indices)
        if self.bad == self.tried >= min(REPEATED, 2 * len(indices)):
            raise GpuaugError(
                f"none of the first {self.tried} images could be read and decoded, so nothing can be measured. "
                "To list them with reasons, run `gpuaug train faults.policy=blank faults.file=FILE`."
            )


def trace(loader: Loader, step: Step | None = None, *, seconds: float, lockstep: bool = False) -> Trace:
    """Run a pass of ``loader``, with a training step per batch, and trace its stages.

    The loader does not change. Do not iterate it at the same time.

    Args:
        loader: the loader. Its workers stay for the next trace.
        step: a training step. On CUDA the trace waits for its kernels.
        seconds: duration of the traced part of the pass.
        lockstep: make each batch when it is requested, so that ``cpu`` is exact and the rest is not that of the loader.

    Raises:
        GpuaugError: if no image can be read and decoded.
    """
    clock = _Clock(loader.device, cpu_time=time.process_time if lockstep else time.thread_time)
    reader = loader.pipeline.reader
    faults = _Faults(policy="drop" if loader.faults.policy == "drop" else "blank", truncated=loader.faults.truncated)
    pipeline = _Traced.of(loader.pipeline, clock, faults)
    order, skip = loader.epoch_order, max(WARMUP, loader.num_workers)
    whole = len(order[0][0])
    again = itertools.chain.from_iterable(loader.tasks(order) for _ in itertools.count())
    tasks: Iterator[Task] = (task for task in again if len(task[3].of if len(task) > 3 else task[0]) == whole)
    if loader.source.remote is not None and loader.source.remote.cache is not None:
        first = list(itertools.islice(tasks, max(2, -(-REPEATED // loader.batch_size))))
        tasks, skip = itertools.cycle(first), skip + len(first)
    run = Pass(pipeline, tasks, epoch=loader.epoch, prefetch=0 if lockstep else loader.prefetch)
    clock.decoders = run.decoders
    fewest = skip + max(FEWEST, loader.num_workers)
    images, done, began = 0, 0, time.perf_counter()
    with contextlib.closing(run):
        while True:
            if done == skip:
                clock.start()
                images, before = 0, _worker_seconds(reader)
            batch = next(run)
            if step is not None:
                with clock.stage("step"):
                    step(batch)
                    if loader.device.type == "cuda":
                        torch.cuda.current_stream(loader.device).synchronize()
            images, done, now = images + len(batch), done + 1, time.perf_counter()
            enough = done >= fewest and now > clock.began + seconds
            if done > skip and (enough or now > began + max(seconds, LONGEST_S)):
                break
            del batch
        spent, queued = (now - then for now, then in zip(_worker_seconds(reader), before, strict=True))
        took = clock.stop()
    cpu = {name: clock.cpu[name] / images for name in clock.busy}
    cpu["read"] += spent / images
    used, unqueued = clock.cpu["read"], clock.busy["read"] - clock.queued["read"]
    if loader.num_workers:
        used, unqueued = spent, took * loader.num_workers - queued
    return Trace(
        images=images,
        seconds=took,
        busy=dict(clock.busy),
        cpu=cpu,
        reading=used / max(used, unqueued, 1e-9),
        shorter=pipeline.shorter,
        largest=pipeline.largest,
        faults=faults.bad,
        tried=faults.tried,
    )


def _worker_seconds(reader: Any) -> tuple[float, float]:
    """CPU seconds of all workers so far, and seconds in which their threads waited for a free processor."""
    tasks = [path for pid in reader.pids for path in glob(f"/proc/{pid}/task/*/schedstat")]
    return sum(map(cpu_seconds, reader.pids)), sum(map(queued_seconds, tasks))


def queued_seconds(path: str = "/proc/thread-self/schedstat") -> float:
    """Seconds so far in which a thread waited for a free processor; 0 if the kernel does not count them."""
    try:
        return int((machine.read(path) or "").split()[1]) / 1e9
    except (ValueError, IndexError):
        return 0.0


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process so far; 0 if the system does not report them."""
    try:
        # clock_getcpuclockid computes this number on Linux; /proc counts only in steps of 10 ms
        return time.clock_gettime((~pid << 3) | 2)
    except (OSError, OverflowError, AttributeError):
        return 0.0
