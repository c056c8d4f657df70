"""How fast each stage of a loader is alone, how fast the whole, which stage limits it, and what a change would bring.

takes: a :class:`~gpuaug.Loader` and, if there is a model, a function that makes one training step on a batch.
does: runs every stage alone on batches that are there already, one after the other in several rounds; then the whole;
then the steps on cached batches, which is what a loader that costs nothing would give.
gives: :class:`Measured`, and :func:`diagnose` the limiting stage and the changes worth making.

Stages overlap, and on the CPU they share the cores, so their speeds do not add up. The model behind every prediction:

    seconds per image = max(reading, making, model, CPU-seconds of all stages / cores)

where `reading` is what the workers need together, `making` what the one thread behind them needs (taking over, decode,
augment, host), and `model` the training step. Without workers `reading` belongs to `making`; with ``prefetch=0`` the
model waits for `making`, so both are added.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import logging
import math
import os
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuaug.ahead import Ahead
from gpuaug.augment.recipe import Augment
from gpuaug.batch import Batch, EncodedBatch
from gpuaug.errors import ConfigError, GpuaugError
from gpuaug.loader import Loader, _Background, _Decoded
from gpuaug.read import Reader
from gpuaug.source.index import share

log = logging.getLogger("gpuaug")

Step = Callable[[Batch], None]
Task = tuple[Tensor, Tensor, Tensor]

CHUNK = 32  # samples of a batch where only reading is measured: slow storage would take minutes for larger ones
CACHED = 4  # batches that are kept for the stages behind reading
CACHE_BYTES = 2**28  # bound of what is kept of each kind, beyond the first batch
LONGEST = 6.0  # seconds of one measurement; what is slower is measured on fewer batches
GAIN = 1.07  # a change that is predicted to bring less is not proposed: noise is of this size
NOTHING = 1.1  # where an ideal loader brings less than this, the model is the limit
UNEXPLAINED = 2.0  # the whole takes so many times what its parts explain: threads wait for each other

TITLES = {
    "storage": "storage: the bytes come slowly",
    "workers": "workers: the processes that read are busy",
    "inter-process copy": "inter-process copy: the workers hand over more bytes than they can copy",
    "decode": "decode",
    "augment": "augment",
    "host overhead": "host overhead: Python on the host, between the stages",
    "model": "the model is the limit",
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds per image of one stage: the median of the rounds, their quartiles, and CPU-seconds of all threads."""

    wall: float
    cpu: float
    low: float = 0.0
    high: float = 0.0

    @property
    def rate(self) -> float:
        """Images per second."""
        return 1.0 / max(self.wall, 1e-9)


FREE = Cost(0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured; each stage alone, in seconds per image.

    Attributes:
        source: bytes of a sample, read in one process.
        read: batches through the workers as configured; without workers, in this process.
        copy: the same with bytes that are in memory already: what packing and handing over cost. None: no workers.
        take: what reading costs the thread that takes the batches over.
        decode, augment: as named. host: headers, draws, crops and mix.
        host_parts: the same in parts, seconds per image.
        step: the training step on cached batches, the ideal loader; None without a model.
        whole: all of it, as training runs it. None: not measured.
        cores: how many were really free, as a calibration saw it.
        alone: share of one core that a single busy thread got.
        device_type: cpu or cuda.
    """

    batch_size: int
    workers: int
    prefetch: int
    main_thread: bool
    device_type: str
    source: Cost
    read: Cost
    copy: Cost | None
    take: float
    decode: Cost
    augment: Cost
    host: Cost
    host_parts: Mapping[str, float]
    step: Cost | None
    whole: Cost | None
    cores: float
    alone: float = 1.0
    bytes_per_image: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds per image, and the terms that they are the largest of."""

    seconds: float
    terms: Mapping[str, float]
    text: str


@dataclass(frozen=True, slots=True)
class Change:
    """Something to change, and the factor it is predicted to bring together with those before it.

    ``overrides`` are what to put on the command line; empty where it takes more than that. ``same`` tells whether the
    training still sees the same pixels.
    """

    overrides: tuple[str, ...]
    text: str
    gain: float
    same: bool = True


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Which stage limits the whole, why, and what to do.

    Attributes:
        bottleneck: a key of ``TITLES``.
        text: the answer in one or two sentences.
        evidence: numbers behind it.
        changes: to be made together, in this order; the last one's gain is the gain of all.
        others: what also would help but changes what is trained on, or takes more than an override; gains are each
            one's own.
        prediction: of the whole as it is.
        ideal_gain: what a loader that costs nothing would bring; None without a model.
    """

    bottleneck: str
    text: str
    evidence: list[str]
    changes: list[Change]
    others: list[Change]
    prediction: Prediction
    ideal_gain: float | None

    @property
    def gain(self) -> float:
        """What all changes together are predicted to bring, as a factor."""
        return self.changes[-1].gain if self.changes else 1.0

    @property
    def overrides(self) -> list[str]:
        """Everything to put on the command line, without changing what is trained on."""
        return [text for change in self.changes for text in change.overrides]


# -- the model of the pipeline ----------------------------------------------------------------------------------------


def predict(m: Measured) -> Prediction:
    """Seconds per image that the parts explain; the formula stands at the top of this file."""
    step = m.step or FREE
    reading, making = m.read.wall, [m.decode.wall]
    names = ["decode"]
    behind = [("augment", m.augment.wall), ("host", m.host.wall)]
    training = [("model", step.wall)]
    if m.main_thread:  # augmentation on the thread that trains
        training = behind + training
    else:
        names += [name for name, _ in behind]
        making += [value for _, value in behind]
    if m.workers:
        names, making = ["take over", *names], [m.take, *making]
    else:
        names, making = ["read", *names], [reading, *making]
    terms: dict[str, float] = {"reading": reading} if m.workers else {}
    lines = [f"reading {_ms(reading)}"] if m.workers else []
    if m.prefetch == 0:
        names, making = names + [n for n, _ in training], making + [v for _, v in training]
        terms["making and model"] = sum(making)
        lines.append(f"making and model, one after the other: {_sum(names, making)}")
    else:
        terms["making"] = sum(making)
        lines.append(f"making {_sum(names, making)}")
        if m.step is not None or m.main_thread:
            if m.device_type == "cuda" and not m.main_thread:
                training = [("augment", m.augment.wall), *training]  # they share the device
            terms["model"] = sum(value for _, value in training)
            lines.append(f"model {_sum([n for n, _ in training], [v for _, v in training])}")
    cpu = m.read.cpu + m.decode.cpu + m.augment.cpu + m.host.cpu + step.cpu
    terms["cores"] = cpu / m.cores
    lines.append(f"CPU {cpu * 1e3:.3g} ms / {m.cores:.2g} cores = {_ms(cpu / m.cores)}")
    seconds = max(terms.values())
    return Prediction(seconds, terms, f"seconds per image = max({'; '.join(lines)}) = {_ms(seconds)}")


def _without(m: Measured, stage: str) -> Measured:
    """The same with a stage that costs nothing."""
    if stage == "reading":
        return replace(m, read=FREE, take=0.0)
    free: dict[str, Any] = {stage: FREE}
    return replace(m, **free)


def bottleneck(m: Measured) -> tuple[str, list[str]]:
    """The stage whose absence would bring most, and the evidence in numbers."""
    now = predict(m)
    stages = ["reading", "decode", "augment", "host", *(["step"] if m.step is not None else [])]
    gains = {stage: now.seconds / max(predict(_without(m, stage)).seconds, 1e-9) for stage in stages}
    evidence = [now.text]
    own = {"reading": m.read, "decode": m.decode, "augment": m.augment, "host": m.host, "step": m.step or FREE}
    # where two ways are equally long no single stage would help: then the one that is longest itself
    first = max(stages, key=lambda stage: (round(gains[stage], 2), own[stage].wall))
    if m.prefetch == 0 and m.step is not None:
        ahead = now.seconds / predict(replace(m, prefetch=2)).seconds
        if ahead >= 1.25 and ahead >= 0.7 * gains[first]:
            evidence.append(
                "prefetch=0 makes a batch only when it is asked for: model and loader wait for each other; "
                f"at the same time they would be {ahead:.2g} times as fast."
            )
            return "host overhead", evidence
    evidence.append(f"If {_WORDS[first]} cost nothing, the whole would be {_times(gains[first])} as fast.")
    if m.whole is not None and m.whole.wall > UNEXPLAINED * now.seconds:
        evidence.append(
            f"The whole takes {_ms(m.whole.wall)} per image, its parts explain {_ms(now.seconds)}: threads wait for "
            "each other, most likely for the interpreter's lock."
        )
        return "host overhead", evidence
    if first == "host":
        part = max(m.host_parts, key=lambda name: m.host_parts[name])
        evidence.append(f"Most of it is {part}: {_ms(m.host_parts[part])} per image.")
        return "host overhead", evidence
    if first == "reading":
        return _why_reading(m, evidence)
    return ("model" if first == "step" else first), evidence


def _why_reading(m: Measured, evidence: list[str]) -> tuple[str, list[str]]:
    if m.copy is not None and m.copy.wall > 0.55 * m.read.wall:
        evidence.append(
            f"Handing over bytes that are in memory already takes {_ms(m.copy.wall)} of the {_ms(m.read.wall)} per "
            f"image ({m.bytes_per_image / 2**20:.2g} MiB each)."
        )
        return "inter-process copy", evidence
    busy = min(1.0, m.source.cpu / max(m.source.wall * m.alone, 1e-9))
    evidence.append(f"Reading a sample keeps a core busy for {busy:.0%} of its {_ms(m.source.wall)}.")
    return ("storage" if busy < 0.5 else "workers"), evidence


_WORDS = {
    "reading": "reading",
    "decode": "decoding",
    "augment": "augmentation",
    "host": "the host",
    "step": "the model",
}


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _sum(names: Sequence[str], values: Sequence[float]) -> str:
    parts = " + ".join(f"{name} {value * 1e3:.3g}" for name, value in zip(names, values, strict=True))
    return f"{parts} = {_ms(sum(values))}" if len(values) > 1 else _ms(values[0])


def _times(gain: float) -> str:
    return "many times" if gain > 50 else f"{gain:.2g} times"


# -- measuring --------------------------------------------------------------------------------------------------------


class Profiler:
    """Measures a loader; it must not be iterated meanwhile.

    Args:
        loader: what is to be measured. Nothing of it changes, but samples that cannot be decoded count as faults.
        step: one training step on a batch; it must wait for nothing but its own device. None: the loader alone.
        repeats: rounds over all stages; medians over them are what counts.
        seconds: of each stage in each round, at least one batch.
        progress: called with the name of what is measured and the share that is done.
    """

    def __init__(
        self,
        loader: Loader,
        *,
        step: Step | None = None,
        repeats: int = 5,
        seconds: float = 0.2,
        progress: Callable[[str, float], None] = lambda name, share: None,
    ) -> None:
        self.loader, self.step, self.repeats, self.seconds, self.progress = loader, step, repeats, seconds, progress
        self.stages: Any = loader._stages
        self.reader: Reader = loader._live.reader
        if not len(loader):
            raise ConfigError(
                f"an epoch has no batch: {len(loader.source)} samples, `batch_size={loader.batch_size}`, "
                f"`last={loader.last}`. Make `batch_size` smaller or set `last=uneven`."
            )
        self.tasks = _endless(loader)
        cached = loader._cached is not None
        taken = list(islice(_endless(loader), CACHED))
        self._numbers = loader._numbers(loader.epoch)
        self.encoded = _bounded(self.reader.batches(iter(taken), numbers=self._numbers), lambda b: b.data.nbytes)
        if cached:  # what it is like once the cache is filled: the same samples again and again
            self.tasks = _again(taken[: len(self.encoded)])
        self.decoded = [self.stages.decode(batch, loader.epoch) for batch in self.encoded[:2]]
        made = [self.stages.finish(decoded, loader.epoch) for decoded in self.decoded]
        self.ready = [self.stages.hand_over(item) for item in made if item is not None]
        if not self.ready:
            raise GpuaugError("none of the first images could be decoded: there is nothing to measure.")
        self._memory: Reader | None = None
        self.sync()

    def close(self) -> None:
        """End the workers that were started for measuring; the loader stays open."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        self.reader.batches([])  # ends what is under way

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def sync(self) -> None:
        """Wait for the device."""
        if self.loader.device.type == "cuda":
            torch.cuda.synchronize(self.loader.device)

    def measure(self) -> Measured:
        """Every stage alone, and the whole, in rounds."""
        loader = self.loader
        notes: dict[str, _Notes] = {}
        parts: dict[str, list[float]] = {}
        stages: list[tuple[str, Callable[[_Notes], None]]] = [
            ("source", self._source),
            ("read", lambda notes: self._read(notes, self.reader, self.tasks, numbers=self._numbers)),
            ("decode", lambda notes: self._decode(notes, self.encoded, parts)),
            ("augment", self._augment),
            ("mix", lambda notes: self._mix(notes, parts)),
        ]
        if loader.num_workers:
            self._memory = Reader(_InMemory(self.encoded), num_workers=loader.num_workers, **self._starting())
            of_memory, again = self._memory, _again(_numbered(self.encoded))
            stages.insert(2, ("copy", lambda notes: self._read(notes, of_memory, again)))
        if self.step is not None:
            stages.append(("step", self._step))
        stages.append(("whole", self._whole))
        free: list[tuple[float, float]] = []
        for number in range(-1, self.repeats):  # the first round warms up: workers start, kernels are compiled
            if number == 0:
                notes, free = {}, []
                parts.clear()
            free.append(_free_cores())
            for k, (name, run) in enumerate(stages):
                self.progress(name, (number + 1 + k / len(stages)) / (self.repeats + 1))
                run(notes.setdefault(name, _Notes()))
        self.progress("done", 1.0)
        costs = {name: found.cost() for name, found in notes.items()}
        host_parts = {name: statistics.median(values) for name, values in parts.items()}
        headers = sum(host_parts.values())
        # what a batch costs the host: as it is Python on one thread, CPU-seconds are seconds
        return Measured(
            batch_size=loader.batch_size,
            workers=loader.num_workers,
            prefetch=loader.prefetch,
            main_thread=bool(self.stages.augment.main_thread),
            device_type=loader.device.type,
            source=costs["source"],
            read=costs["read"],
            copy=costs.get("copy"),
            take=notes["read"].own_cpu() if loader.num_workers else 0.0,
            decode=costs["decode"],
            augment=costs["augment"],
            host=Cost(headers, headers, headers, headers),
            host_parts=host_parts,
            step=costs.get("step"),
            whole=costs["whole"],
            cores=max(1.0, statistics.median(all_cores for all_cores, _ in free)),
            alone=statistics.median(alone for _, alone in free),
            bytes_per_image=sum(b.data.nbytes for b in self.encoded) / sum(map(len, self.encoded)),
        )

    # -- each stage for a moment --

    def _source(self, notes: _Notes) -> None:
        source: Any = self.reader.source
        many = getattr(source, "read_many", None)
        begin, count, size = _now(), 0, 8 if many is None else CHUNK
        while not count or begin.since().wall < self.seconds:
            indices, repeats, valid = _head(next(self.tasks), size)
            numbers = (indices if self._numbers is None else self._numbers(indices, repeats, valid)).tolist()
            if many is not None:
                list(many(numbers))
            else:
                for number in numbers:
                    with contextlib.suppress(OSError, GpuaugError):  # a fault is read's to report
                        source[number]
            count += len(numbers)
        notes.add(begin.since(), count)

    def _read(self, notes: _Notes, reader: Reader, tasks: Iterator[Task], *, numbers: Any = None) -> None:
        workers = reader.num_workers
        small = (_head(task, CHUNK) for task in tasks)
        batches = reader.batches(small, numbers=numbers)
        started = time.perf_counter()
        for _ in range(workers):  # the workers begin together, and their first batches arrive together
            next(batches)
        began, count, done = _now(_pids(reader)), 0, 0
        while done < max(1, 2 * workers) or began.since().wall < self.seconds:
            batch = next(batches)
            batch.data[::4096].sum()  # the thread that takes it over is who maps its pages
            count += len(batch)
            done += 1
            if time.perf_counter() - started > LONGEST and done >= workers:
                break
        notes.add(began.since(_pids(reader)), count)
        batches.close()  # type: ignore[attr-defined]

    def _decode(self, notes: _Notes, encoded: Sequence[EncodedBatch], parts: dict[str, list[float]]) -> None:
        stages, epoch = self.stages, self.loader.epoch
        pixels, count = _Spent(), 0
        spent = {"reading headers": 0.0, "draws": 0.0, "crops": 0.0}
        decoder, recipe, begin = stages.decoder, stages.augment, time.perf_counter()
        while not count or time.perf_counter() - begin < self.seconds:
            batch = encoded[(count // len(encoded[0])) % len(encoded)]
            with stages._on_stream():
                a = time.thread_time()
                look = decoder.look(batch)
                b = time.thread_time()
                drawn = recipe.draw(
                    seed=stages.seed, epoch=epoch, indices=batch.indices.numpy(), repeats=batch.repeats.numpy()
                )
                c = time.thread_time()
                boxes = recipe.boxes(drawn, look.height, look.width)
                d = time.thread_time()
                self.sync()
                before = _now()
                decoder.pixels(batch, look, boxes)
                self.sync()
                pixels = pixels + before.since()
            for name, value in zip(spent, (b - a, c - b, d - c), strict=True):
                spent[name] += value
            count += len(batch)
        notes.add(pixels, count)
        for name, value in spent.items():
            parts.setdefault(name, []).append(value / count)

    def _augment(self, notes: _Notes) -> None:
        self._apply(notes, self.stages.augment.apply)

    def _apply(self, notes: _Notes, apply: Any, decoded: Sequence[_Decoded] | None = None) -> None:
        decoded, loader, count = decoded or self.decoded, self.loader, 0
        begin = _now()
        while not count or begin.since().wall < self.seconds:
            item = decoded[(count // len(decoded[0].encoded)) % len(decoded)]
            with self.stages._on_stream():
                apply(item.images, item.drawn, dtype=loader.dtype, memory_format=loader.memory_format)
            count += len(item.encoded)
            if count // len(item.encoded) % 8 == 7:
                self.sync()  # else the host would queue without end
        self.sync()
        notes.add(begin.since(), count)

    def _mix(self, notes: _Notes, parts: dict[str, list[float]]) -> None:
        """What is done to a batch behind augmentation."""
        mix: Any = self.loader.mix
        if mix is None:
            return
        item = self.decoded[0]
        with self.stages._on_stream():
            images = self.stages.augment.apply(
                item.images, item.drawn, dtype=self.loader.dtype, memory_format=self.loader.memory_format
            )
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

    def _step(self, notes: _Notes) -> None:
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

    def _whole(self, notes: _Notes) -> None:
        run_whole(notes, self.loader, self.tasks, self.step, seconds=2 * self.seconds, sync=self.sync)

    def _starting(self) -> dict[str, Any]:
        return {"timeout": self.reader.timeout, "start_method": self.reader.start_method}

    # -- what a change would bring --

    def with_workers(self, m: Measured, count: int) -> Measured:
        """The same with so many workers."""
        reader = Reader(self.reader.source, num_workers=count, **self._starting())
        now, then = _Notes(), _Notes()
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
        cpu = m.read.cpu * min(2.0, max(0.5, then.cost().cpu / max(now.cost().cpu, 1e-9)))
        return replace(m, workers=count, read=replace(m.read, wall=m.read.wall * ratio, cpu=cpu), take=then.own_cpu())

    def with_threads(self, m: Measured, count: int) -> Measured:
        """The same with so many threads that decode."""
        settings = replace(self.stages.settings, num_threads=count)
        decoder = settings.open(self.loader.device, accept_truncated=self.stages.decoder.accept_truncated)
        try:
            return self._compared_decode(m, lambda: _exchanged(self.stages, "_decoder", decoder), self.encoded)
        finally:
            decoder.close()

    def with_batches(self, m: Measured, encoded: Sequence[EncodedBatch]) -> Measured:
        """The same with other images."""
        return self._compared_decode(m, contextlib.nullcontext, encoded)

    def _compared_decode(self, m: Measured, changed: Callable[[], Any], encoded: Sequence[EncodedBatch]) -> Measured:
        now, then = _Notes(), _Notes()
        with changed():
            self._decode(_Notes(), encoded, {})
        for _ in range(3):
            self._decode(now, self.encoded, {})
            with changed():
                self._decode(then, encoded, {})
        ratio = then.cost().wall / max(now.cost().wall, 1e-9)
        cpu = then.cost().cpu / max(now.cost().cpu, 1e-9)
        return replace(m, decode=replace(m.decode, wall=m.decode.wall * ratio, cpu=m.decode.cpu * cpu))

    def with_recipe(self, m: Measured, change: Callable[[Augment], Augment]) -> Measured:
        """The same with every view's recipe changed, measured on a few rows."""
        few = [_rows(item, 16) for item in self.decoded[:1]]
        views = self.stages.augment.views
        made = {id(view.augment): change(view.augment) for view in views}

        def plain(images: Any, drawn: Any, **how: Any) -> None:
            for x, view in zip(images, views, strict=True):
                view.augment._run(x, drawn, view, **how)

        def other(images: Any, drawn: Any, **how: Any) -> None:
            for x, view in zip(images, views, strict=True):
                made[id(view.augment)]._run(x, drawn, view, **how)

        now, then = _Notes(), _Notes()
        self._apply(_Notes(), other, few)
        self._apply(_Notes(), plain, few)
        for _ in range(3):
            self._apply(now, plain, few)
            self._apply(then, other, few)
        ratio = min(1.5, then.cost().wall / max(now.cost().wall, 1e-9))
        cpu = min(1.5, then.cost().cpu / max(now.cost().cpu, 1e-9))
        return replace(m, augment=replace(m.augment, wall=m.augment.wall * ratio, cpu=m.augment.cpu * cpu))

    def op_costs(self, m: Measured) -> dict[str, float]:
        """Per operation of the recipe, its share of the augmentation."""
        names = list(dict.fromkeys(p.name for v in self.stages.augment.views for p in v.augment.prepared))
        shares = {}
        for name in names:
            less = self.with_recipe(m, partial(_left_out, name=name))
            shares[name] = 1 - less.augment.wall / max(m.augment.wall, 1e-9)
        return shares

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
        run = _Run(self.loader, self.tasks)
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

    def _one(self, run: _Run) -> None:
        with torch.profiler.record_function("wait for batch"):
            batch = next(run)
        if self.step is not None:
            with torch.profiler.record_function("step"):
                self.step(batch)


def run_whole(
    notes: _Notes, loader: Loader, tasks: Iterator[Task], step: Step | None, *, seconds: float, sync: Callable[[], None]
) -> None:
    """The loader as training runs it, and the steps, from when the first batches of all workers are through."""
    run, workers = _Run(loader, tasks), loader.num_workers
    try:
        started = time.perf_counter()
        for _ in range(max(1, workers)):
            batch = next(run)
            if step is not None:
                step(batch)
        sync()
        begin, count, done = _now(_pids(loader._live.reader)), 0, 0
        while done < max(3, 2 * workers) or begin.since().wall < seconds:
            batch = next(run)
            if step is not None:
                step(batch)
            count += len(batch)
            done += 1
            if time.perf_counter() - started > 2 * LONGEST and done >= max(2, workers):
                break
        sync()
        notes.add(begin.since(_pids(loader._live.reader)), count)
    finally:
        run.close()


class _Run(Iterator[Batch]):
    """The loader's own stages, threads and workers over an order without end; no state of the loader changes."""

    def __init__(self, loader: Loader, tasks: Iterator[Task]) -> None:
        self._stages: Any = loader._stages
        self._epoch = loader.epoch
        self._stages.start_pass()
        encoded: Any = loader._live.reader.batches(tasks, numbers=loader._numbers(self._epoch))
        if loader.ahead is not None:
            encoded = Ahead(encoded, limit=loader.ahead)
        items = self._made(encoded)
        self._items: Any = _Background(items, ahead=loader.prefetch) if loader.prefetch else items

    def _made(self, encoded: Any) -> Iterator[Any]:
        record, stages = torch.profiler.record_function, self._stages
        try:
            while True:
                with record("read"):
                    batch = next(encoded, None)
                if batch is None:
                    return
                with record("decode"):
                    decoded = stages.decode(batch, self._epoch)
                if stages.augment.main_thread:
                    yield decoded
                    continue
                with record("augment"):
                    made = stages.finish(decoded, self._epoch)
                yield made
        finally:
            encoded.close()

    def __next__(self) -> Batch:
        while True:
            item = next(self._items, _Background.END)
            if item is _Background.END:
                raise GpuaugError("reading ended while it was measured.")
            if isinstance(item, _Decoded):
                item = self._stages.finish(item, self._epoch)
            if item is not None:
                batch: Batch = self._stages.hand_over(item)
                return batch

    def close(self) -> None:
        if isinstance(self._items, _Background):
            self._items.stop()
            self._items.join(LONGEST)
        else:
            self._items.close()


class _InMemory:
    """A source whose bytes are in shared memory: what is left of reading is packing and handing over."""

    def __init__(self, batches: Sequence[EncodedBatch]) -> None:
        self.offsets = np.concatenate([[0], np.cumsum([b.encoded(k).numel() for b in batches for k in range(len(b))])])
        self.data = share(torch.cat([b.data for b in batches]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.data.numpy()[self.offsets[index] : self.offsets[index + 1]].data, 0


def on_host(
    encoded: Sequence[EncodedBatch], decoder: Any, recipe: Any, *, seed: int, dtype: torch.dtype
) -> tuple[float, int]:
    """Seconds of decode and augment on the CPU, the best of three passes, and the images of one pass."""
    best = math.inf
    for _ in range(4):  # the first compiles
        begin = time.perf_counter()
        for batch in encoded:
            found = decoder.look(batch)
            drawn = recipe.draw(seed=seed, epoch=0, indices=batch.indices.numpy(), repeats=batch.repeats.numpy())
            images, _ = decoder.pixels(batch, found, recipe.boxes(drawn, found.height, found.width))
            recipe.apply(images, drawn, dtype=dtype)
        best = min(best, time.perf_counter() - begin)
    return best, sum(map(len, encoded))


# -- what to change ---------------------------------------------------------------------------------------------------


def diagnose(profiler: Profiler, m: Measured, *, prefix: str = "") -> Verdict:
    """Name the bottleneck and the changes that are predicted to help; candidates are measured, not guessed.

    Args:
        profiler: of the same loader.
        m: what it measured.
        prefix: put before every override, where the loader is a part of a larger configuration: ``train_data.``.
    """
    name, evidence = bottleneck(m)
    now = predict(m)
    # the formula's answer, scaled to what was measured of the whole
    ceiling = math.inf if m.step is None else now.seconds / max(m.step.wall, 1e-9)
    changes: list[Change] = []
    current, tried, stage = m, set[str](), name
    while stage not in tried and len(tried) < 4:
        tried.add(stage)
        best: tuple[Measured, str, str] | None = None
        for then, override, text in _options(profiler, current, stage):
            if best is None or predict(then).seconds < 0.95 * predict(best[0]).seconds:
                best = then, override, text
        if best is not None and predict(current).seconds / predict(best[0]).seconds >= GAIN:
            current = best[0]
            gain = min(ceiling, now.seconds / predict(current).seconds)
            changes.append(Change((prefix + best[1],), best[2], gain))
            if stage == "host overhead":
                tried.discard(stage)
        stage, _ = bottleneck(replace(current, whole=None))
    others = _others(profiler, current, bottleneck(replace(current, whole=None))[0], prefix=prefix)
    ideal = None if m.step is None or m.whole is None else m.whole.wall / m.step.wall
    return Verdict(
        bottleneck=name,
        text=_answer(m, name, changes, others, ideal),
        evidence=evidence,
        changes=changes,
        others=others,
        prediction=now,
        ideal_gain=ideal,
    )


def _options(profiler: Profiler, m: Measured, stage: str) -> Iterator[tuple[Measured, str, str]]:
    """Settings that may relieve a stage without changing a pixel, the cheapest first; each measured."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    if stage in ("storage", "workers", "inter-process copy"):
        most = max(16, 2 * cores) if stage == "storage" else cores
        rest = max(value for term, value in predict(replace(m, workers=1)).terms.items() if term != "reading")
        # as many as would hide reading behind everything else, with some to spare, if they did not disturb each other
        wanted = max(2 * m.workers, 1, math.ceil(1.5 * max(1, m.workers) * m.read.wall / max(rest, 1e-9)))
        counts = {min(most, 1 << (wanted - 1).bit_length()), min(most, 2 * max(1, m.workers))}
        for count in sorted(counts, reverse=True):
            if count > m.workers:
                then = profiler.with_workers(m, count)
                text = f"{count} workers instead of {m.workers}: {1 / then.read.wall:.0f} images/s read"
                yield then, f"num_workers={count}", text
                if then.read.wall < 0.7 * m.read.wall:
                    break
        if stage == "inter-process copy":
            then = profiler.with_workers(m, 0)
            yield then, "num_workers=0", f"read in this process, without a copy: {1 / then.read.wall:.0f} images/s read"
    elif stage == "decode":
        decoder = profiler.stages.decoder
        threads = getattr(decoder, "num_threads", None)
        if threads is not None and threads < cores:
            for count in sorted({min(cores, 2 * threads), min(cores, 4 * threads), min(8, cores)}):
                if count > threads:
                    then = profiler.with_threads(m, count)
                    yield then, f"decode.num_threads={count}", f"{count} threads decode, instead of {threads}"
        if m.workers == 0:
            then = profiler.with_workers(m, 1)
            yield then, "num_workers=1", "a worker reads while this process decodes"
    elif stage == "augment":
        views = getattr(profiler.stages.augment, "views", [])
        if any(view.augment.backend == "kornia" for view in views):
            then = profiler.with_recipe(m, _fused)
            yield then, "augment.backend=fused", "the fused backend does the same in one pass"
    elif stage == "host overhead" and m.prefetch == 0:
        yield replace(m, prefetch=2), "prefetch=2", "batches are made while the model works"
    if stage != "host overhead" and m.prefetch == 0 and m.step is not None:
        yield replace(m, prefetch=2), "prefetch=2", "batches are made while the model works"


def _others(profiler: Profiler, m: Measured, stage: str, *, prefix: str) -> list[Change]:
    """What would help and changes pixels or needs more than an override; each alone."""
    now, found = predict(m).seconds, list[Change]()

    def propose(then: Measured, overrides: tuple[str, ...], text: str, *, same: bool = False) -> None:
        gain = now / predict(then).seconds
        if gain >= GAIN:
            found.append(
                Change(
                    tuple(prefix + o if not o.startswith("~") else f"~{prefix}{o[1:]}" for o in overrides),
                    text,
                    gain,
                    same,
                )
            )

    loader = profiler.loader
    if stage == "augment" and getattr(profiler.stages.augment, "views", None):
        costs = profiler.op_costs(m)
        for name in sorted(costs, key=lambda n: -costs[n])[:1]:
            if costs[name] > 0.25:
                less = 1 - costs[name]
                then = replace(m, augment=replace(m.augment, wall=m.augment.wall * less, cpu=m.augment.cpu * less))
                propose(
                    then, _op_overrides(loader, name), f"operation `{name}` is {costs[name]:.0%} of the augmentation"
                )
    if stage in ("storage", "workers") and loader._cached is None and m.copy is not None:
        from gpuaug.source.cache import _available

        needed = m.bytes_per_image * len(loader.source)
        if needed < _available() / 2:
            then = replace(m, read=replace(m.copy, low=0.0, high=0.0))
            propose(
                then,
                ("cache=ram",) if not prefix else (),
                f"bytes stay in memory ({needed / 2**30:.2g} GiB, estimated); from the second epoch on",
                same=True,
            )
    if stage in ("decode", "inter-process copy", "storage"):
        smaller = _packed(profiler)
        if smaller is not None:
            encoded, side = smaller
            then = profiler.with_batches(m, encoded)
            less = sum(b.data.nbytes for b in encoded) / sum(map(len, encoded)) / m.bytes_per_image
            if stage != "decode":
                then = replace(then, read=Cost(m.read.wall * max(less, 0.05), m.read.cpu * max(less, 0.05)))
            text = f"prepare the images once with a shorter side of {side}: gpuaug pack sizes=[{side}] out=DIR, then "
            propose(then, (), text + f"{prefix}source=shards source.root=DIR")
    if stage == "host overhead" and m.host_parts.get("mix", 0) > 0.5 * m.host.wall > 0:
        left = m.host.wall - m.host_parts["mix"]
        propose(replace(m, host=Cost(left, left)), ("mix=none",) if not prefix else ("mix=null",), "without mix")
    return found


def _answer(m: Measured, name: str, changes: Sequence[Change], others: Sequence[Change], ideal: float | None) -> str:
    if name == "model":
        if ideal is not None and ideal < NOTHING:
            text = f"{TITLES[name]}: nothing in the loader would help; one that costs nothing would bring "
            text += f"{max(0.0, ideal - 1):.0%}."
        else:
            text = f"{TITLES[name]}."
            if ideal is not None and m.device_type == "cpu":
                text += f" Loader and model share the cores: a loader that costs nothing would bring {ideal - 1:.0%}."
        return text
    text = f"{TITLES[name]}."
    if changes:
        return f"{text} Change what is listed: predicted {_times(changes[-1].gain)} as fast."
    if others:
        return f"{text} No setting helps alone; see what else would."
    return f"{text} No setting that was tried helps."


def _fused(augment: Augment) -> Augment:
    changed = copy.copy(augment)
    changed.backend, changed._executor = "fused", None
    return changed


def _left_out(augment: Augment, name: str) -> Augment:
    changed = copy.copy(augment)
    changed.prepared, changed._executor = tuple(p for p in augment.prepared if p.name != name), None
    return changed


def _op_overrides(loader: Loader, name: str) -> tuple[str, ...]:
    views = loader.augment.views
    found = []
    for view in views:
        if view.copy == 0 and name in view.augment.ops:
            found.append(f"~augment.views.{view.name}.ops.{name}" if view.name else f"~augment.ops.{name}")
    return tuple(found)


def _packed(profiler: Profiler) -> tuple[list[EncodedBatch], int] | None:
    """The first images as `gpuaug pack` would store them, and their shorter side; None where they are not large."""
    from PIL import Image

    batch, item = profiler.encoded[0], profiler.decoded[0]
    side = round(max(max(x.shape[1:3]) for x in item.images) * 256 / 224)
    count = min(16, len(batch))
    images = []
    for row in range(count):
        try:
            with Image.open(io.BytesIO(batch.encoded(row).numpy().tobytes())) as opened:
                image = opened.convert("RGB")
        except Exception:  # raw pixels, or what only our own decoder takes
            return None
        scale = side / min(image.size)
        if scale > 0.67:
            return None
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
        stream = io.BytesIO()
        image.save(stream, "JPEG", quality=90)
        images.append(np.frombuffer(stream.getvalue(), dtype=np.uint8))
    packed = replace(
        batch,
        data=torch.from_numpy(np.concatenate(images)),
        offsets=torch.from_numpy(np.cumsum([0, *map(len, images)])),
        labels=None if batch.labels is None else batch.labels[:count],
        indices=batch.indices[:count],
        repeats=batch.repeats[:count],
        valid=batch.valid[:count],
        faults=(),
    )
    return [packed], side


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
        found = []
        with contextlib.ExitStack() as stack:
            loaders = [stack.enter_context(make({**best, key: value})) for value in values]
            notes, tasks = [_Notes() for _ in values], [_endless(loader) for loader in loaders]
            for n in range(-1, repeats):
                progress(f"{key}", (k + (n + 1) / (repeats + 1)) / len(candidates))
                for loader, note, task in zip(loaders, notes, tasks, strict=True):

                    def sync(loader: Loader = loader) -> None:
                        if loader.device.type == "cuda":
                            torch.cuda.synchronize(loader.device)

                    into = note if n >= 0 else _Notes()
                    run_whole(into, loader, task, step, seconds=seconds, sync=sync)
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
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _pids(reader: Reader) -> list[int]:
    workers = reader._workers
    return [] if workers is None else [int(w.pid) for w in workers._workers if w.pid is not None]


@dataclass
class _Notes:
    """What the rounds of one stage took."""

    spent: list[tuple[_Spent, int]] = field(default_factory=list)

    def add(self, spent: _Spent, images: int) -> None:
        self.spent.append((spent, images))

    def cost(self) -> Cost:
        if not self.spent:
            return FREE
        walls = sorted(spent.wall / images for spent, images in self.spent)
        # the system counts other processes' CPU in steps of 10 ms: over all rounds, not per round
        cpu = sum(s.own + s.others for s, _ in self.spent) / sum(images for _, images in self.spent)
        quarter = len(walls) // 4
        return Cost(statistics.median(walls), cpu, walls[quarter], walls[-1 - quarter])

    def beats(self, other: _Notes) -> bool:
        """Whether this was faster in every round, and clearly so in the middle one."""
        pairs = zip(self.spent, other.spent, strict=True)
        gains = [(b.wall / n) / (a.wall / m) for (a, m), (b, n) in pairs]
        return min(gains) > 1.0 and statistics.median(gains) >= GAIN

    def own_cpu(self) -> float:
        return sum(s.own for s, _ in self.spent) / max(1, sum(images for _, images in self.spent))


def _free_cores(seconds: float = 0.08) -> tuple[float, float]:
    """Cores that busy threads of this process really get, all together and one alone; others may be at work here."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    block = bytes(1 << 18)

    def busy(until: float) -> None:
        while time.perf_counter() < until:
            hashlib.sha256(block)  # without the interpreter's lock

    found = []
    for threads in (count, 1):
        begin = _now()
        until = time.perf_counter() + seconds
        others = [threading.Thread(target=busy, args=(until,)) for _ in range(threads - 1)]
        for thread in others:
            thread.start()
        busy(until)
        for thread in others:
            thread.join()
        spent = begin.since()
        found.append(min(float(threads), spent.own / spent.wall))
    return found[0], max(0.05, found[1])


def _endless(loader: Loader) -> Iterator[Task]:
    """The batches of the epoch, again and again; without the last one, where it is shorter than the others."""
    whole = len(next(iter(loader._plan(0)))[0])
    while True:
        yield from (task for task in loader._plan(0) if len(task[0]) == whole)


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


def _rows(item: _Decoded, count: int) -> _Decoded:
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
    return _Decoded(few, [x[:count] for x in item.images], drawn, [])


@contextlib.contextmanager
def _exchanged(of: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(of, name)
    setattr(of, name, value)
    try:
        yield
    finally:
        setattr(of, name, before)
