"""Measures a loader: every stage alone, the whole, and what changes would bring; tries settings on the whole.

takes: a :class:`~gpuaug.Loader` and, if there is a model, a function that makes one training step on a batch.
does: runs every stage alone on batches that are there already, one after the other in several rounds; then the whole;
then the steps on cached batches, which is what a loader that costs nothing would give.
gives: :class:`~gpuaug.tools.profile.bottleneck.Measured`, and the trials that
:func:`~gpuaug.tools.profile.bottleneck.diagnose` asks for.

On a machine with others at work the clock says little by itself: what is compared runs in turns, medians count, CPU
time is counted beside the clock, and waiting for bytes is told from waiting for a core by what the system notes of a
thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import logging
import os
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpuaug import machine
from gpuaug.augment.recipe import Augment
from gpuaug.batch import Batch, EncodedBatch
from gpuaug.errors import ConfigError, GpuaugError
from gpuaug.loader.faults import Faults
from gpuaug.loader.loader import Loader
from gpuaug.loader.passes import Pass
from gpuaug.loader.pipeline import Pipeline, Task
from gpuaug.loader.stages import DecodedBatch, HeaderBatch, LiveStage, Stage
from gpuaug.read.reader import Reader
from gpuaug.source.index import share
from gpuaug.tools.profile.bottleneck import FREE, GAIN, Cost, Measured

log = logging.getLogger("gpuaug")

Step = Callable[[Batch], None]

CHUNK = 32  # samples of a batch where only reading is measured: slow storage would take minutes for larger ones
CACHED = 4  # batches that are kept for the stages behind reading, at least
IMAGES = 64  # images that are kept, at least: of small batches more
CACHE_BYTES = 2**28  # bound of what is kept of each kind, beyond the first batch
LONGEST = 6.0  # seconds of one measurement; what is slower is measured on fewer batches
PACKED = 16  # images that are prepared as `gpuaug pack` would, to see what it brings


# -- measuring --------------------------------------------------------------------------------------------------------


class Profiler:
    """Measures a loader; it must not be iterated meanwhile.

    Args:
        loader: what is to be measured. Nothing of it changes; samples that cannot be decoded end nothing, are not
            recorded, and count in :attr:`faults` alone.
        step: one training step on a batch; it must wait for nothing but its own device. None: the loader alone.
        repeats: rounds over all stages; medians over them are what counts.
        seconds: of each stage in each round, at least one batch.
        batches: of the whole, in all rounds together; None: as many as take ``seconds``.
        progress: called with the name of what is measured and the share that is done.

    Attributes:
        faults: of the first images, how many could not be read or decoded; ``looked``: how many those are.
    """

    def __init__(
        self,
        loader: Loader,
        *,
        step: Step | None = None,
        repeats: int = 5,
        seconds: float = 0.2,
        batches: int | None = None,
        progress: Callable[[str, float], None] = lambda name, share: None,
    ) -> None:
        self.loader, self.step, self.repeats, self.seconds, self.progress = loader, step, repeats, seconds, progress
        self.batches = batches
        self.pipeline = lenient(loader)
        self.stage: Any = self.pipeline.stage
        self.reader = self.pipeline.reader
        if not len(loader):
            raise ConfigError(
                f"an epoch has no batch: {len(loader.source)} samples, `batch_size={loader.batch_size}`, "
                f"`last={loader.last}`. Make `batch_size` smaller or set `last=uneven`."
            )
        self._ending = contextlib.ExitStack()
        self._ending.callback(self.reader.batches, [])  # ends what is under way
        try:
            self._prepare()
        except BaseException:
            self._ending.close()
            raise

    def _prepare(self) -> None:
        """What the stages are measured on."""
        loader = self.loader
        self.tasks = endless(loader)
        taken = list(islice(endless(loader), max(CACHED, -(-IMAGES // loader.batch_size))))
        numbers = self.pipeline.numbers
        self._numbers = None if numbers is None else numbers(loader.epoch)
        self.encoded = _bounded(self.reader.batches(iter(taken), numbers=self._numbers), lambda b: b.data.nbytes)
        if self.pipeline.cache is not None:  # as once the cache is filled: the same samples again and again
            self.tasks = _again(taken[: len(self.encoded)])
        few = self.encoded[: max(2, -(-IMAGES // (2 * loader.batch_size)))]
        self.decoded = [self.pipeline.decode(batch, loader.epoch) for batch in few]
        self.faults = sum(len(item.faults) for item in self.decoded)
        self.looked = sum(map(len, few))
        made = [self.pipeline.finish(decoded, loader.epoch) for decoded in self.decoded]
        self.ready = [self.pipeline.hand_over(item) for item in made if item is not None]
        if not self.ready or self.faults == self.looked:
            raise GpuaugError(
                f"none of the first {self.looked} images could be read and decoded: there is nothing to measure. "
                "`gpuaug train faults.policy=blank faults.file=FILE` lists them with their reasons."
            )
        self.sync()

    def close(self) -> None:
        """End the workers that were started for measuring; the loader stays open, and is as it was."""
        self._ending.close()

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def sync(self) -> None:
        """Wait for the device."""
        _sync(self.loader.device)

    def measure(self) -> Measured:
        """Every stage alone, and the whole, in rounds."""
        loader = self.loader
        notes: dict[str, Notes] = {}
        parts: dict[str, list[float]] = {}
        busy: list[float] = []
        stages: list[tuple[str, Callable[[Notes], None]]] = [
            ("source", lambda notes: busy.append(self._source(notes))),
            ("read", lambda notes: self._read(notes, self.reader, self.tasks, numbers=self._numbers)),
            ("decode", lambda notes: self._decode(notes, self.encoded, parts)),
            ("augment", self._augment),
            ("mix", lambda notes: self._mix(notes, parts)),
        ]
        if loader.num_workers:
            of_memory = Reader(_InMemory(self.encoded), num_workers=loader.num_workers, **self._starting())
            self._ending.callback(of_memory.close)
            again = _again(_numbered(self.encoded))
            stages.insert(2, ("copy", lambda notes: self._read(notes, of_memory, again)))
        if self.step is not None:
            stages.append(("step", self._step))
        stages.append(("whole", self._whole))
        free: list[float] = []
        for number in range(-1, self.repeats):  # the first round warms up: workers start, kernels are compiled
            if number == 0:
                notes, free = {}, []
                parts.clear()
                busy.clear()
            free.append(free_cores())
            for k, (name, run) in enumerate(stages):
                self.progress(name, (number + 1 + k / len(stages)) / (self.repeats + 1))
                run(notes.setdefault(name, Notes()))
        self.progress("done", 1.0)
        costs = {name: found.cost() for name, found in notes.items()}
        host_parts = {name: statistics.median(values) for name, values in parts.items()}
        on_host = sum(host_parts.values())
        # Python on one thread, so its CPU-seconds are seconds; what mix does may wait
        on_host_cpu = on_host - host_parts.get("mix", 0.0) + costs.get("mix", FREE).cpu
        return Measured(
            batch_size=loader.batch_size,
            workers=loader.num_workers,
            prefetch=loader.prefetch,
            main_thread=bool(self.stage.main_thread),
            device_type=loader.device.type,
            source=costs["source"],
            read=costs["read"],
            copy=costs.get("copy"),
            take=notes["read"].own_cpu() if loader.num_workers else 0.0,
            decode=costs["decode"],
            augment=costs["augment"],
            host=Cost(on_host, on_host_cpu, on_host, on_host),
            host_parts=host_parts,
            step=costs.get("step"),
            whole=costs["whole"],
            cores=statistics.median(free),
            busy=statistics.median(busy),
            bytes_per_image=sum(b.data.nbytes for b in self.encoded) / sum(map(len, self.encoded)),
        )

    # -- each stage for a moment --

    def _source(self, notes: Notes) -> float:
        """Read samples in this process; the share of that time in which it computed, without waits for a core."""
        source: Any = self.reader.source
        many = getattr(source, "read_many", None)
        begin, count, size = _now(), 0, 8 if many is None else CHUNK
        worked, waited = time.thread_time(), _waited_for_a_core()
        while not count or begin.since().wall < self.seconds:
            indices, repeats, valid = _head(next(self.tasks), size)
            numbers = (indices if self._numbers is None else self._numbers(indices, repeats, valid)).tolist()
            with contextlib.suppress(OSError, GpuaugError):  # a fault is read's to report
                if many is not None:
                    list(many(numbers))
            if many is None:
                for number in numbers:
                    with contextlib.suppress(OSError, GpuaugError):
                        source[number]
            count += len(numbers)
        spent, worked, waited = begin.since(), time.thread_time() - worked, _waited_for_a_core() - waited
        notes.add(spent, count)
        if many is not None:  # such a source may have threads of its own
            worked = max(worked, spent.own)
        return min(1.0, worked / max(spent.wall - waited, worked, 1e-9))

    def _read(self, notes: Notes, reader: Reader, tasks: Iterator[Task], *, numbers: Any = None) -> None:
        workers = reader.num_workers
        small = (_head(task, CHUNK) for task in tasks)
        batches = reader.batches(small, numbers=numbers, zero_copy=self.loader.ahead is None)
        started = time.perf_counter()
        for _ in range(workers):  # the workers begin together, and their first batches arrive together
            next(batches)
        began, count, done = _now(reader.pids), 0, 0
        while done < max(1, 2 * workers) or began.since().wall < self.seconds:
            batch = next(batches)
            batch.data[::4096].sum()  # the thread that takes it over is who maps its pages
            count += len(batch)
            done += 1
            if time.perf_counter() - started > LONGEST and done >= workers:
                break
        notes.add(began.since(reader.pids), count)
        batches.close()  # type: ignore[attr-defined]

    def _decode(
        self, notes: Notes, encoded: Sequence[EncodedBatch], parts: dict[str, list[float]], stage: Stage | None = None
    ) -> None:
        stage, epoch = stage or self.stage, self.loader.epoch
        pixels, count = _Spent(), 0
        spent = {"reading headers": 0.0, "draws": 0.0, "crops": 0.0}
        begin = time.perf_counter()
        while not count or time.perf_counter() - begin < self.seconds:
            batch = encoded[(count // len(encoded[0])) % len(encoded)]
            with self.pipeline.streams.on():
                headers = _read_headers(stage, batch, epoch, spent)
                self.sync()
                before = _now()
                stage.decode(headers)
                self.sync()
                pixels = pixels + before.since()
            count += len(batch)
        notes.add(pixels, count)
        for name, value in spent.items():
            parts.setdefault(name, []).append(value / count)

    def _augment(self, notes: Notes) -> None:
        self._apply(notes, self.stage.augment)

    def _apply(self, notes: Notes, apply: Any, decoded: Sequence[DecodedBatch] | None = None) -> None:
        decoded, loader, count = decoded or self.decoded, self.loader, 0
        begin = _now()
        while not count or begin.since().wall < self.seconds:
            item = decoded[(count // len(decoded[0].encoded)) % len(decoded)]
            with self.pipeline.streams.on():
                apply(item, dtype=loader.dtype, memory_format=loader.memory_format)
            count += len(item.encoded)
            if count // len(item.encoded) % 8 == 7:
                self.sync()  # else the host would queue without end
        self.sync()
        notes.add(begin.since(), count)

    def _mix(self, notes: Notes, parts: dict[str, list[float]]) -> None:
        """What is done to a batch behind augmentation."""
        mix: Any = self.loader.mix
        if mix is None:
            return
        item = self.decoded[0]
        with self.pipeline.streams.on():
            images = self.stage.augment(item, dtype=self.loader.dtype, memory_format=self.loader.memory_format)
            labels = item.encoded.labels.to(self.loader.device) if item.encoded.labels is not None else None
        self.sync()
        begin, count = _now(), 0
        while not count or begin.since().wall < self.seconds / 2:
            mix(
                images,
                labels,
                valid=item.encoded.valid,
                num_classes=self.loader.num_classes,
                seed=self.loader.seed,
                epoch=self.loader.epoch,
                first_index=int(item.encoded.indices[0]),
            )
            self.sync()
            count += len(item.encoded)
        spent = begin.since()
        notes.add(spent, count)
        parts.setdefault("mix", []).append(spent.wall / count)

    def _step(self, notes: Notes) -> None:
        assert self.step is not None
        begin, count = _now(), 0
        while not count or begin.since().wall < self.seconds:
            batch = self.ready[(count // self.loader.batch_size) % len(self.ready)]
            self.step(batch)
            count += len(batch)
            if count // self.loader.batch_size % 8 == 7:
                self.sync()  # else the host would queue without end
        self.sync()
        notes.add(begin.since(), count)

    def _whole(self, notes: Notes) -> None:
        batches = None if self.batches is None else -(-self.batches // self.repeats)
        run_whole(notes, self.loader, self.tasks, self.step, seconds=2 * self.seconds, batches=batches)

    def _starting(self) -> dict[str, Any]:
        return {"timeout": self.reader.timeout, "start_method": self.reader.start_method}

    # -- what a change would bring: see `Trials` --

    @property
    def cores(self) -> int:
        """That workers and threads can be spread over."""
        return machine.usable_cpus()

    @property
    def threads(self) -> int | None:
        """That decode; None where nothing is decoded."""
        decoder = self.stage.decoder
        return None if decoder is None else int(decoder.num_threads)

    @property
    def kornia(self) -> bool:
        """Whether a view is augmented by Kornia's modules."""
        return any(view.augment.backend == "kornia" for view in getattr(self.stage.recipe, "views", []))

    def with_workers(self, m: Measured, count: int) -> Measured:
        """The same with so many workers."""
        reader = Reader(self.reader.source, num_workers=count, **self._starting())
        now, then = Notes(), Notes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's, that there are more workers than cores
            try:
                self._read(then, reader, self.tasks, numbers=self._numbers)
                self._read(now, self.reader, self.tasks, numbers=self._numbers)
                self._read(then, reader, self.tasks, numbers=self._numbers)
            finally:
                reader.close()
        # by the ratio of what was measured side by side, so that a busier machine changes nothing
        ratio = then.cost().wall / max(now.cost().wall, 1e-9)
        cpu = min(2.0, max(0.5, then.cost().cpu / max(now.cost().cpu, 1e-9)))
        return replace(m, workers=count, read=m.read.scaled(ratio, cpu), take=then.own_cpu() if count else 0.0)

    def with_threads(self, m: Measured, count: int) -> Measured:
        """The same with so many threads that decode."""
        return self._with_decoder(m, num_threads=count)

    @property
    def pillow(self) -> bool:
        """Whether Pillow decodes although DALI is installed."""
        return getattr(self.stage.decoder, "backend", None) == "pillow" and find_spec("nvidia.dali") is not None

    def with_dali(self, m: Measured) -> Measured:
        """The same with DALI as the decoder."""
        return self._with_decoder(m, backend="dali")

    def _with_decoder(self, m: Measured, **changed: Any) -> Measured:
        now: LiveStage = self.stage
        then = LiveStage(
            now.recipe,
            replace(now.settings, **changed),
            device=now.device,
            seed=now.seed,
            accept_truncated=now.accept_truncated,
        )
        with contextlib.closing(then):
            return self._compared_decode(m, then, self.encoded)

    def with_cache(self, m: Measured) -> tuple[Measured, float, float] | None:
        """Encoded bytes in memory, how many all of them are, and the share that fits; None where they are there."""
        from gpuaug.source.shared_memory import SUPPORTED

        source = self.loader.source
        stored = getattr(source, "stored", None) is not None  # augmented epochs, mapped into memory
        if stored or self.pipeline.cache is not None or getattr(source, "mapped", False) or not SUPPORTED:
            return None
        if m.copy is not None:
            kept = m.copy
        else:
            notes = Notes()
            with contextlib.closing(Reader(_InMemory(self.encoded), num_workers=0)) as reader:
                self._read(notes, reader, _again(_numbered(self.encoded)))
            kept = notes.cost()
        needed = m.bytes_per_image * len(source)
        left, _ = machine.memory_left() or (0, "")
        share = min(1.0, left / 2 / max(needed, 1.0))  # `cache.max_bytes` by default
        wall, cpu = (share * a + (1 - share) * b for a, b in ((kept.wall, m.read.wall), (kept.cpu, m.read.cpu)))
        return replace(m, read=Cost(wall, cpu)), needed, share

    def with_packed(self, m: Measured, *, read: bool) -> tuple[Measured, int] | None:
        """Images as `gpuaug pack` would store them, and their shorter side; None where they are not large."""
        found = _packed(self.encoded, self.decoded[0])
        if found is None:
            return None
        encoded, side = found
        then = self._compared_decode(m, self.stage, encoded)
        if read:
            less = sum(b.data.nbytes for b in encoded) / sum(map(len, encoded)) / m.bytes_per_image
            then = replace(then, read=m.read.scaled(max(less, 0.05), max(less, 0.05)))
        return then, side

    def _compared_decode(self, m: Measured, stage: Stage, encoded: Sequence[EncodedBatch]) -> Measured:
        now, then = Notes(), Notes()
        self._decode(Notes(), encoded, {}, stage)
        for _ in range(3):
            self._decode(now, self.encoded, {})
            self._decode(then, encoded, {}, stage)
        ratio = then.cost().wall / max(now.cost().wall, 1e-9)
        cpu = then.cost().cpu / max(now.cost().cpu, 1e-9)
        return replace(m, decode=m.decode.scaled(ratio, cpu))

    def with_recipe(self, m: Measured, change: Callable[[Augment], Augment]) -> Measured:
        """The same with every view's recipe changed, measured on a few rows."""
        few = [_rows(item, 16) for item in self.decoded[:1]]
        views = self.stage.recipe.views
        made = {id(view.augment): change(view.augment) for view in views}

        def plain(item: DecodedBatch, **how: Any) -> None:
            for x, view in zip(item.images, views, strict=True):
                view.augment.run(x, item.drawn, view, **how)

        def other(item: DecodedBatch, **how: Any) -> None:
            for x, view in zip(item.images, views, strict=True):
                made[id(view.augment)].run(x, item.drawn, view, **how)

        now, then = Notes(), Notes()
        with silent():  # what no kernel was made for is known, and said, of the recipe as it is
            self._apply(Notes(), other, few)
        self._apply(Notes(), plain, few)
        for _ in range(3):
            self._apply(now, plain, few)
            self._apply(then, other, few)
        ratio = min(1.5, then.cost().wall / max(now.cost().wall, 1e-9))
        cpu = min(1.5, then.cost().cpu / max(now.cost().cpu, 1e-9))
        return replace(m, augment=m.augment.scaled(ratio, cpu))

    def with_fused(self, m: Measured) -> Measured:
        """Fused kernels instead of Kornia's modules."""
        return self.with_recipe(m, _fused)

    def op_costs(self, m: Measured) -> dict[str, float]:
        """Per operation of the recipe, its share of the augmentation."""
        views = getattr(self.stage.recipe, "views", [])
        names = list(dict.fromkeys(p.name for v in views for p in v.augment.prepared))
        shares = {}
        for name in names:
            less = self.with_recipe(m, partial(_left_out, name=name))
            shares[name] = min(1.0, 1 - less.augment.wall / max(m.augment.wall, 1e-9))
        return shares

    def op_keys(self, name: str) -> list[str]:
        """Where an operation stands in the configuration, in every view that has it."""
        return [
            f"augment.views.{view.name}.ops.{name}" if view.name else f"augment.ops.{name}"
            for view in self.loader.augment.views
            if view.copy == 0 and name in view.augment.ops
        ]

    def trace(self, file: Path, *, batches: int = 8) -> None:
        """Write torch's profile of some batches of the whole, all threads, for chrome://tracing or Perfetto."""
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self.loader.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        found: dict[str, Any] = {}
        with contextlib.suppress(AttributeError, TypeError):  # ask for all threads where this torch can
            from torch._C._profiler import _ExperimentalConfig

            found["experimental_config"] = _ExperimentalConfig(profile_all_threads=True)
        reader: Any = _Traced(self.reader, batches="read")
        stage: Any = _Traced(self.stage, read_headers="headers", decode="decode", augment="augment")
        traced = replace(self.pipeline, reader=reader, stage=stage)
        run = _run(traced, self.loader, self.tasks)
        try:
            for _ in range(2):
                self._one(run)
            with profile(activities=activities, **found) as profiled:
                for _ in range(batches):
                    self._one(run)
                self.sync()
        finally:
            run.close()
        part = file.with_name(f".{file.name}.part{'.gz' if file.suffix == '.gz' else ''}")
        profiled.export_chrome_trace(str(part))
        os.replace(part, file)

    def _one(self, run: Pass) -> None:
        with torch.profiler.record_function("wait for batch"):
            batch = next(run)
        if self.step is not None:
            with torch.profiler.record_function("step"):
                self.step(batch)


def run_whole(
    notes: Notes,
    loader: Loader,
    tasks: Iterator[Task],
    step: Step | None,
    *,
    seconds: float,
    batches: int | None = None,
) -> None:
    """The loader as training runs it, and the steps, from when the first batches of all workers are through."""
    pipeline = lenient(loader)
    run, reader, workers = _run(pipeline, loader, tasks), pipeline.reader, loader.num_workers

    def one() -> int:
        batch = next(run)
        if step is not None:
            step(batch)
        return len(batch)

    try:
        started = time.perf_counter()
        for _ in range(max(1, workers)):
            one()
        _sync(loader.device)
        begin, count, done = _now(reader.pids), 0, 0
        least = max(3, 2 * workers) if batches is None else batches
        while done < least or (batches is None and begin.since().wall < seconds):
            count += one()
            done += 1
            if time.perf_counter() - started > 2 * LONGEST and done >= max(2, workers):
                break
        _sync(loader.device)
        notes.add(begin.since(reader.pids), count)
    finally:
        run.close()


def side_by_side(
    loaders: Sequence[Loader],
    step: Step | None = None,
    *,
    rounds: int = 3,
    seconds: float = 0.4,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Notes]:
    """The whole of several loaders in turns, after one round that does not count."""
    notes, tasks = [Notes() for _ in loaders], [endless(loader) for loader in loaders]
    for n in range(-1, rounds):
        progress((n + 1) / (rounds + 1))
        for loader, note, task in zip(loaders, notes, tasks, strict=True):
            run_whole(note if n >= 0 else Notes(), loader, task, step, seconds=seconds)
    return notes


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Nothing but warnings is logged within: what is tried is not what was configured."""
    level = log.level
    log.setLevel(max(logging.WARNING, level))
    try:
        yield
    finally:
        log.setLevel(level)


class _Uncounted(Faults):
    """A policy that the training will apply and record itself."""

    def handle(self, *_: Any, **__: Any) -> None:
        """Nothing."""


def lenient(loader: Loader) -> Pipeline:
    """The loader's pipeline where bad samples end nothing: they are left out, or blank, and not recorded."""
    faults = loader.faults
    policy: Any = "drop" if faults.policy == "drop" else "blank"
    return replace(loader.pipeline, faults=_Uncounted(policy=policy, truncated=faults.truncated))


def _run(pipeline: Pipeline, loader: Loader, tasks: Iterator[Task]) -> Pass:
    """A pass as training makes it, over other batches than the epoch's."""
    return pipeline.run(tasks, epoch=loader.epoch, prefetch=loader.prefetch, buffer_bytes=loader.ahead)


def _read_headers(stage: Stage, batch: EncodedBatch, epoch: int, spent: dict[str, float]) -> HeaderBatch:
    """As :meth:`Stage.read_headers`; the seconds of CPU of its parts are added to ``spent``."""
    a = time.thread_time()
    if not isinstance(stage, LiveStage):
        headers = stage.read_headers(batch, epoch)
        spent["reading headers"] += time.thread_time() - a
        return headers
    recipe, look = stage.recipe, stage.decoder.read_headers(batch)
    b = time.thread_time()
    drawn = recipe.draw(seed=stage.seed, epoch=epoch, indices=batch.indices.numpy(), repeats=batch.repeats.numpy())
    c = time.thread_time()
    headers = HeaderBatch(batch, look.faults, look, drawn, recipe.boxes(drawn, look.height, look.width))
    for name, value in zip(spent, (b - a, c - b, time.thread_time() - c), strict=True):
        spent[name] += value
    return headers


class _Traced:
    """An object whose calls of some methods carry a name in torch's profile; of generators, every item."""

    def __init__(self, of: Any, **named: str) -> None:
        self._of, self._named = of, named

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._of, name)
        return found if name not in self._named else partial(self._call, found, self._named[name])

    def _call(self, method: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(name):
            found = method(*args, **kwargs)
        return self._items(found, name) if inspect.isgenerator(found) else found

    @staticmethod
    def _items(items: Any, name: str) -> Iterator[Any]:
        with contextlib.closing(items):
            while True:
                with torch.profiler.record_function(name):
                    item = next(items, None)
                if item is None:
                    return
                yield item


class _InMemory:
    """A source whose bytes are in shared memory: what is left of reading is packing and handing over."""

    def __init__(self, batches: Sequence[EncodedBatch]) -> None:
        self.offsets = np.concatenate([[0], np.cumsum([b.encoded(k).numel() for b in batches for k in range(len(b))])])
        self.data = share(torch.cat([b.data for b in batches]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.data.numpy()[self.offsets[index] : self.offsets[index + 1]].data, 0

    def digest(self) -> str:
        """Of nobody's interest: no state of it is taken."""
        return ""

    def key(self, index: int) -> str:
        """Its number; without a name the log would speak of this source, which no user has."""
        return str(index)


def on_host(
    encoded: Sequence[EncodedBatch], decoder: Any, recipe: Any, *, seed: int, dtype: torch.dtype, device: torch.device
) -> Cost:
    """Decode and augment on the CPU, and the images' way to ``device``; the best of three passes."""
    best: tuple[_Spent, int] | None = None
    for n in range(4):  # the first compiles
        begin = _now()
        for batch in encoded:
            found = decoder.read_headers(batch)
            drawn = recipe.draw(seed=seed, epoch=0, indices=batch.indices.numpy(), repeats=batch.repeats.numpy())
            images, _ = decoder.pixels(batch, found, recipe.boxes(drawn, found.height, found.width))
            for view in recipe.apply(images, drawn, dtype=dtype):
                view.to(device)
        _sync(device)
        spent = begin.since()
        if n and (best is None or spent.wall < best[0].wall):
            best = spent, sum(map(len, encoded))
    assert best is not None
    return Cost(best[0].wall / best[1], best[0].own / best[1])


def _packed(batches: Sequence[EncodedBatch], item: DecodedBatch) -> tuple[list[EncodedBatch], int] | None:
    """The first images as `gpuaug pack` would store them, and their shorter side; None where they are not large."""
    side = round(max(max(x.shape[1:3]) for x in item.images) * 256 / 224)
    found: list[EncodedBatch] = []
    smaller = 0
    for batch in batches:
        rows = min(len(batch), PACKED - sum(map(len, found)))
        if rows < 1:
            break
        images = [_smaller(batch.encoded(row).numpy().tobytes(), side) for row in range(rows)]
        smaller += sum(len(image) < batch.encoded(row).numel() for row, image in enumerate(images))
        arrays = [np.frombuffer(image, dtype=np.uint8) for image in images]
        found.append(
            replace(
                batch,
                data=torch.from_numpy(np.concatenate(arrays)),
                offsets=torch.from_numpy(np.cumsum([0, *map(len, arrays)])),
                labels=None if batch.labels is None else batch.labels[:rows],
                indices=batch.indices[:rows],
                repeats=batch.repeats[:rows],
                valid=batch.valid[:rows],
                faults=tuple(fault for fault in batch.faults if fault.row < rows),
            )
        )
    return (found, side) if smaller > sum(map(len, found)) / 2 else None


def _smaller(encoded: bytes, side: int) -> bytes:
    """An image with this shorter side, as a JPEG; as it is where it is hardly larger, or no file that Pillow opens."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(encoded)) as opened:
            scale = side / min(opened.size)
            if scale > 0.67:
                return encoded
            image = opened.convert("RGB")
    except Exception:  # raw pixels, a damaged file, or what only our own decoder takes
        return encoded
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=90)
    return stream.getvalue()


def _fused(augment: Augment) -> Augment:
    return augment.replace(backend="fused")


def _left_out(augment: Augment, name: str) -> Augment:
    return augment.replace(ops={k: op for k, op in augment.ops.items() if k != name})


# -- tuning -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tried:
    """One setting of the whole, and how fast it was."""

    overrides: tuple[str, ...]
    rate: float  # images per second


def tune(
    make: Callable[[Mapping[str, Any]], contextlib.AbstractContextManager[Loader]],
    *,
    start: Mapping[str, Any],
    candidates: Mapping[str, Sequence[Any]],
    step: Step | None = None,
    repeats: int = 3,
    seconds: float = 0.4,
    progress: Callable[[str, float], None] = lambda name, share: None,
) -> tuple[dict[str, Any], list[Tried]]:
    """Try settings one after the other, each at the best of those before it, on the whole.

    Args:
        make: a loader with the given settings, as a context.
        start: the settings to begin with.
        candidates: per setting its values, the cheapest first; a dearer one must be faster than a cheaper one in every
            round, and 7 % in the middle one.
        step: the training step, or None.
        repeats: rounds, in which all values of a setting take turns.
        seconds: of each value in each round.
        progress: called with the name of what is tried and the share that is done.

    Returns:
        the best settings, and everything that was tried.
    """
    best, tried = dict(start), list[Tried]()
    for k, (key, values) in enumerate(candidates.items()):
        values = list(dict.fromkeys([*values, best[key]] if best[key] not in values else values))
        with contextlib.ExitStack() as stack:
            loaders = [stack.enter_context(make({**best, key: value})) for value in values]

            def told(share: float, key: str = key, k: int = k) -> None:
                progress(key, (k + share) / len(candidates))

            notes = side_by_side(loaders, step, rounds=repeats, seconds=seconds, progress=told)
            found = [note.cost().rate for note in notes]
        chosen = 0
        for n in range(1, len(values)):
            if notes[n].beats(notes[chosen]):
                chosen = n
        tried += [
            Tried(tuple(f"{name}={value}" for name, value in {**best, key: value}.items()), rate)
            for value, rate in zip(values, found, strict=True)
        ]
        best[key] = values[chosen]
    progress("done", 1.0)
    return best, tried


# -- small things -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Spent:
    """Seconds: on the clock, of this process's CPU, and of other processes' CPU."""

    wall: float = 0.0
    own: float = 0.0
    others: float = 0.0

    def __add__(self, other: _Spent) -> _Spent:
        return _Spent(self.wall + other.wall, self.own + other.own, self.others + other.others)


@dataclass(frozen=True, slots=True)
class _Now:
    wall: float
    own: float
    others: float

    def since(self, pids: Sequence[int] = ()) -> _Spent:
        now = _now(pids)
        return _Spent(now.wall - self.wall, now.own - self.own, now.others - self.others)


def _now(pids: Sequence[int] = ()) -> _Now:
    return _Now(time.perf_counter(), time.process_time(), sum(map(_cpu, pids)))


def _cpu(pid: int) -> float:
    """CPU-seconds of a process so far; 0 where the system does not say."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # Linux: clock_getcpuclockid; /proc counts in steps of 10 ms
    except (OSError, OverflowError, AttributeError):
        return 0.0


def _waited_for_a_core() -> float:
    """Seconds that this thread could have run so far, while others had the cores."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # a kernel that does not count it: busy machines look like slow storage
        return 0.0


@dataclass
class Notes:
    """What the rounds of one stage took."""

    spent: list[tuple[_Spent, int]] = field(default_factory=list)

    def add(self, spent: _Spent, images: int) -> None:
        """One round."""
        self.spent.append((spent, images))

    def cost(self) -> Cost:
        """Median and quartiles on the clock, and CPU-seconds over all rounds."""
        if not self.spent:
            return FREE
        walls = sorted(spent.wall / images for spent, images in self.spent)
        cpu = sum(s.own + s.others for s, _ in self.spent) / sum(images for _, images in self.spent)
        quarter = len(walls) // 4
        return Cost(statistics.median(walls), cpu, walls[quarter], walls[-1 - quarter])

    def beats(self, other: Notes) -> bool:
        """Whether this was faster in every round, and clearly so in the middle one."""
        pairs = zip(self.spent, other.spent, strict=True)
        gains = [(b.wall / n) / (a.wall / m) for (a, m), (b, n) in pairs]
        return min(gains) > 1.0 and statistics.median(gains) >= GAIN

    def own_cpu(self) -> float:
        """CPU-seconds per image of this process, without the workers'."""
        return sum(s.own for s, _ in self.spent) / max(1, sum(images for _, images in self.spent))


def free_cores(seconds: float = 0.08) -> float:
    """Cores that busy threads of this process really get: by affinity, quota and what others leave."""
    count = machine.usable_cpus()
    quota = machine.cgroup_cpus()
    block = bytes(1 << 18)

    def busy(until: float) -> None:
        while time.perf_counter() < until:
            hashlib.sha256(block)  # without the interpreter's lock

    begin = _now()
    until = time.perf_counter() + seconds
    others = [threading.Thread(target=busy, args=(until,)) for _ in range(count - 1)]
    for thread in others:
        thread.start()
    busy(until)
    for thread in others:
        thread.join()
    spent = begin.since()
    most = float(count) if quota is None else min(float(count), quota)  # a quota lets short bursts pass
    return max(0.25, min(most, spent.own / spent.wall))


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def endless(loader: Loader) -> Iterator[Task]:
    """The batches of the epoch, again and again; without the last one, where it is shorter than the others."""
    whole = len(loader.epoch_order[0][0])
    while True:
        yield from (task for task in loader.epoch_order if len(task[0]) == whole)


def _again(tasks: Sequence[Task]) -> Iterator[Task]:
    while True:
        yield from tasks


def _numbered(batches: Sequence[EncodedBatch]) -> list[Task]:
    """Tasks for :class:`_InMemory`, whose samples are numbered as they come."""
    found, begin = [], 0
    for batch in batches:
        number = torch.arange(begin, begin + len(batch))
        found.append((number, torch.zeros_like(number), torch.ones(len(batch), dtype=torch.bool)))
        begin += len(batch)
    return found


def _head(task: Task, count: int) -> Task:
    indices, repeats, valid = task
    return indices[:count], repeats[:count], valid[:count]


def _bounded(batches: Iterator[EncodedBatch], size: Callable[[EncodedBatch], int]) -> list[EncodedBatch]:
    """The first batches, in memory of this process; no more than fit."""
    found: list[EncodedBatch] = []
    held = 0
    for batch in batches:
        found.append(replace(batch, data=batch.data.clone(), offsets=batch.offsets.clone()))
        held += size(batch)
        if held > CACHE_BYTES:
            break
    batches.close()  # type: ignore[attr-defined]
    return found


def _rows(item: DecodedBatch, count: int) -> DecodedBatch:
    """The first rows of a decoded batch."""
    encoded = item.encoded
    few = replace(
        encoded, indices=encoded.indices[:count], repeats=encoded.repeats[:count], valid=encoded.valid[:count]
    )
    drawn = item.drawn
    if hasattr(drawn, "uniforms"):
        drawn = replace(
            drawn,
            uniforms={k: v[:count] for k, v in drawn.uniforms.items()},
            keys={k: v[:count] for k, v in drawn.keys.items()},
        )
    return replace(item, encoded=few, images=[x[:count] for x in item.images], drawn=drawn, faults=[])
