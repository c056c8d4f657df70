"""Measures a loader: every stage alone, all stages together, and the effect of changes."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from gpuaug import machine
from gpuaug.augment.progressive import views_of
from gpuaug.augment.recipe import Augment, View
from gpuaug.batch import EncodedBatch
from gpuaug.decode.plan import Plan
from gpuaug.errors import GpuaugError
from gpuaug.loader.batch import Batch
from gpuaug.loader.faults import Faults
from gpuaug.loader.loader import Loader
from gpuaug.loader.pipeline import Pass, Pipeline, Task
from gpuaug.loader.stages import LiveStage
from gpuaug.read.reader import Reader
from gpuaug.source.adapt import MapSource
from gpuaug.source.index import share
from gpuaug.source.shared_memory import SUPPORTED
from gpuaug.tools.epoch import count_batches
from gpuaug.tools.profile import targets
from gpuaug.tools.profile.clock import free_cores, now, waited_for_a_core
from gpuaug.tools.profile.costs import FREE, Cost, Measured

log = logging.getLogger("gpuaug")

Step = Callable[[Batch], None]

CHUNK = 32  # samples per batch if only reading is measured, because slow storage takes minutes for larger batches
FEW_READS = 8  # samples per batch if one process reads them one by one
CACHED = 4  # batches for the stages after reading: at least so many, up to CACHE_BYTES
IMAGES = 64  # images kept: at least so many, up to CACHE_BYTES
CACHE_BYTES = 2**28  # after so many bytes, no further batch is kept
LONGEST_S = 6.0  # time limit of one measurement, if `seconds` is not longer
FEW = 16  # images for testing changes of a recipe


class Notes(list[Any]):
    """Rounds of one stage, each float64 [3]: seconds per image of wall time, own CPU time and workers' CPU time."""

    def measure(
        self,
        work: Callable[[], int],
        *,
        seconds: float,
        skip: int = 0,
        least: int = 1,
        longest_s: float = LONGEST_S,
        reader: Reader | None = None,
        sync: Callable[[], None] = lambda: None,
    ) -> Any:
        """Measure a round and add it: call ``work`` for ``seconds``, and at least ``least`` times.

        ``work`` returns its number of images. The first ``skip`` calls are not measured. After
        ``max(seconds, longest_s)`` seconds, the round ends as soon as ``skip`` calls were measured. The CPU time of
        ``reader``'s workers is included. Returns the round's three times in seconds.
        """
        started = time.perf_counter()
        for _ in range(skip):
            work()
        sync()
        pids = () if reader is None else reader.pids
        began, images, calls = now(pids), 0, 0
        while calls < least or time.perf_counter() - began[0] < seconds:
            images, calls = images + work(), calls + 1
            if calls >= skip and time.perf_counter() - started > max(seconds, longest_s):
                break
        sync()
        spent = now(pids) - began
        self.append(spent / images)
        return spent

    def cost(self) -> Cost:
        """The median wall time and the mean CPU time of the rounds."""
        wall, own, workers = np.transpose(self)
        return Cost(float(np.median(wall)), float(np.mean(own + workers)))

    def own_cpu(self) -> float:
        """CPU-seconds per image of this process."""
        return float(np.mean(np.transpose(self)[1]))


class Profiler(contextlib.ExitStack):
    """Measures a loader without changing it. Do not iterate the loader at the same time.

    ``faults`` counts those of the first ``tried`` images that could not be read or decoded. Nothing else records them.

    Args:
        loader: the loader to measure.
        step: runs one training step on a batch, and waits for no other rank. None: measure the loader alone.
        repeats, seconds, batches: as in ``profile.yaml``.
        progress: called with the name of the current measurement and the share done so far.
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
        super().__init__()
        self.sync = partial(sync, loader.device)
        self.loader, self.step, self.repeats, self.seconds, self.progress = loader, step, repeats, seconds, progress
        self.batches, self.cores = batches, machine.usable_cpus()
        self.pipeline = lenient(loader)
        self.stage: Any = self.pipeline.stage
        self.reader = self.pipeline.reader
        self._notes: dict[str, Notes] = defaultdict(Notes)  # by stage
        self._values: dict[str, list[float]] = defaultdict(list)  # one value per round
        count_batches(loader)
        self._prepare()

    def _prepare(self) -> None:
        loader, pipeline, self.encoded = self.loader, self.pipeline, list[EncodedBatch]()
        taken = list(itertools.islice(endless(loader), max(CACHED, -(-IMAGES // loader.batch_size))))
        self._numbers = None if pipeline.numbers is None else pipeline.numbers(loader.epoch)
        with contextlib.closing(self.reader.batches(taken, numbers=self._numbers)) as batches:  # type: ignore
            for batch in batches:
                self.encoded.append(replace(batch, data=batch.data.clone(), offsets=batch.offsets.clone()))
                if sum(kept.data.nbytes for kept in self.encoded) > CACHE_BYTES:
                    break
        # with a cache, the same samples are repeated, so that reading from a full cache is measured
        self.tasks = endless(loader) if pipeline.cache is None else itertools.cycle(taken[: len(self.encoded)])
        few = self.encoded[: max(2, -(-IMAGES // (2 * loader.batch_size)))]
        self.decoded = [pipeline.decode(batch, loader.epoch) for batch in few]
        self.faults, self.tried = sum(len(item.faults) for item in self.decoded), sum(map(len, few))
        made = [pipeline.finish(decoded, loader.epoch) for decoded in self.decoded]
        self.ready = [pipeline.hand_over(item) for item in made if item is not None]
        if not self.ready or self.faults == self.tried:
            raise GpuaugError(
                f"none of the first {self.tried} images could be read and decoded, so nothing can be measured. "
                "To list them with reasons, run `gpuaug train faults.policy=blank faults.file=FILE`."
            )

    def measure(self) -> Measured:
        stages = self._stages()
        for number in range(-1, self.repeats):  # the first round warms up: workers start, kernels are compiled
            if number <= 0:
                self._notes.clear()
                self._values.clear()
            self._values["cores"].append(free_cores())
            for k, (name, run) in enumerate(stages.items()):
                self.progress(name, (number + 1 + k / len(stages)) / (self.repeats + 1))
                run(self._notes[name])
        costs = {name: notes.cost() for name, notes in self._notes.items() if notes}
        host_parts = {name: statistics.median(values) for name, values in self._values.items()}
        cores, busy = host_parts.pop("cores"), host_parts.pop("busy")
        host = sum(host_parts.values())  # one Python thread does this, so its CPU time is the wall time
        loader, mix = self.loader, costs.pop("mix", FREE)
        if loader.mix is not None:
            host_parts["mix"] = mix.wall
        return Measured(
            **costs,
            batch_size=loader.batch_size,
            workers=loader.num_workers,
            prefetch=loader.prefetch,
            main_thread=bool(self.stage.main_thread),
            device_type=loader.device.type,
            take=self._notes["read"].own_cpu() if loader.num_workers else 0.0,
            host=Cost(host + mix.wall, host + mix.cpu),
            host_parts=host_parts,
            cores=cores,
            busy=busy,
            bytes_per_image=self._bytes_per_image,
        )

    def _stages(self) -> dict[str, Callable[[Notes], None]]:
        loader, step = self.loader, self.step
        stages: dict[str, Callable[[Notes], None]] = {
            "source": lambda notes: self._values["busy"].append(self.read_samples(notes)),
            "read": lambda notes: self._read(notes, self.reader),
        }
        if loader.num_workers:
            in_memory = self._reader(MapSource(_InMemory(self.encoded)), loader.num_workers)
            self.callback(in_memory.close)
            parts_of = torch.arange(len(in_memory.source)).split([len(batch) for batch in self.encoded])
            again = itertools.cycle([(part, part * 0, part >= 0) for part in parts_of])
            stages["copy"] = lambda notes: self._read(notes, in_memory, tasks=again)
        decoded, ready = [(d, len(d.encoded)) for d in self.decoded], [(batch, len(batch)) for batch in self.ready]
        stages["decode"] = lambda notes: self._decode(notes, self._notes["masks"])
        stages["augment"] = lambda notes: self._again(notes, self._augmented, decoded)
        if loader.targets is not None:
            stages["finish"] = lambda notes: self._again(notes, self._finished, decoded)
        if loader.mix is not None:
            stages["mix"] = self._mix
        if step is not None:
            stages["step"] = lambda notes: self._again(notes, step, ready)
        stages["whole"] = self.run_whole
        return stages

    # -- a short measurement of each stage --

    def read_samples(self, notes: Notes) -> float:
        """Read samples in this process. Returns computing time / (wall time - time waiting for a core)."""
        source: Any = self.reader.source
        many = getattr(source, "read_many", None)

        def read() -> int:
            indices, repeats, valid = _head(next(self.tasks), FEW_READS if many is None else CHUNK)
            numbers = (indices if self._numbers is None else self._numbers(indices, repeats, valid)).tolist()
            for part in [numbers] if many is not None else [[number] for number in numbers]:
                with contextlib.suppress(OSError, GpuaugError):  # `_prepare` counts faults
                    list(many(part)) if many is not None else source[part[0]]
            return len(numbers)

        worked, waited = time.thread_time(), waited_for_a_core()
        wall, own, _ = notes.measure(read, seconds=self.seconds).tolist()
        worked, waited = time.thread_time() - worked, waited_for_a_core() - waited
        if many is not None:  # `read_many` may use threads
            worked = max(worked, own)
        return min(1.0, worked / max(wall - waited, worked, 1e-9))

    def _read(self, notes: Notes, reader: Reader, *, tasks: Iterator[Task] | None = None) -> None:
        numbers = self._numbers if tasks is None else None
        small = (_head(task, CHUNK) for task in tasks or self.tasks)
        batches: Any = reader.batches(small, numbers=numbers, zero_copy=self.loader.ahead is None)

        def take() -> int:
            batch = next(batches)
            batch.data[::4096].sum()  # maps every page, as the thread that receives a batch has to do
            return len(batch)

        with contextlib.closing(batches):
            workers = reader.num_workers
            # skip the first batches: all workers start together, so these come in a burst
            notes.measure(take, seconds=self.seconds, skip=workers, least=max(1, 2 * workers), reader=reader)

    def _decode(self, notes: Notes, masks: Notes, *, stage: Any = None, encoded: Any = None) -> None:
        """Measure the decoding of images and masks. Adds the seconds for headers and objects to ``_values``."""
        stage, epoch, batches = stage or self.stage, self.loader.epoch, itertools.cycle(encoded or self.encoded)
        began, pixels, moved, on_host, objects, count = time.perf_counter(), np.zeros(3), np.zeros(3), 0.0, 0.0, 0
        while not count or time.perf_counter() - began < self.seconds:
            batch = next(batches)
            with self.pipeline.streams.on():
                worked = time.thread_time()
                headers = stage.read_headers(batch, epoch)
                on_host += time.thread_time() - worked
                self.sync()
                before = now()
                if self.loader.targets is None:
                    stage.decode(headers)
                else:
                    stage.decoder.pixels(batch, headers.info, headers.windows)
                self.sync()
                between = now()
                pixels += between - before
                if self.loader.targets is not None:
                    stage.targets.decode(headers.targets, batch, headers.info, stage.decoder)
                    moved += now() - between
                    objects += targets.object_seconds(stage, headers)
            count += len(batch)
        notes.append(pixels / count)
        self._values["headers, draws and crops"].append(max(0.0, on_host - objects) / count)
        if self.loader.targets is not None:
            masks.append(moved / count)
            self._values["targets"].append(objects / count)

    def _finished(self, item: Any) -> Any:
        with self.pipeline.streams.on():
            return self.stage.finish_targets(item, bad=[fault.row for fault in item.faults], keep=None)

    def _augmented(self, item: Any) -> Any:
        with self.pipeline.streams.on():
            return self.stage.augment(item, dtype=self.loader.dtype, memory_format=self.loader.memory_format)

    def _again(self, notes: Notes, do: Callable[[Any], Any], items: Iterable[tuple[Any, int]]) -> None:
        """Measure ``do`` on items that are repeated. Each item comes with its number of images."""
        numbered = enumerate(itertools.cycle(items), start=1)

        def one() -> int:
            number, (item, images) = next(numbered)
            do(item)
            if number % 8 == 0:
                self.sync()  # limits the work queued on the device
            return images

        notes.measure(one, seconds=self.seconds, sync=self.sync)

    def _mix(self, notes: Notes) -> None:
        loader, item = self.loader, self.decoded[0]
        images, encoded, mix = self._augmented(item), item.encoded, loader.mix
        labels = encoded.labels.to(loader.device) if encoded.labels is not None else None
        same: dict[str, Any] = {"num_classes": loader.num_classes, "seed": loader.seed, "epoch": loader.epoch}

        def one() -> int:
            assert mix is not None
            mix(images, labels, valid=encoded.valid, first_index=int(encoded.indices[0]), **same)
            self.sync()
            return len(encoded)

        notes.measure(one, seconds=self.seconds, sync=self.sync)

    def run_whole(self, notes: Notes) -> None:
        """Measure loader and training steps together."""
        loader, workers = self.loader, self.loader.num_workers
        run = Pass(self.pipeline, self.tasks, epoch=loader.epoch, prefetch=loader.prefetch, buffer_bytes=loader.ahead)
        batches = self.batches and -(-self.batches // self.repeats)

        def one() -> int:
            batch = next(run)
            if self.step is not None:
                self.step(batch)
            return len(batch)

        with contextlib.closing(run):
            notes.measure(
                one,
                seconds=0.0 if batches else 2 * self.seconds,
                skip=max(1, workers),
                least=batches or max(3, 2 * workers),
                longest_s=2 * LONGEST_S,
                reader=self.reader,
                sync=self.sync,
            )

    def _reader(self, source: Any, workers: int, targets: Sequence[str] = ()) -> Reader:
        how: dict[str, Any] = {"timeout": self.reader.timeout, "start_method": self.reader.start_method}
        return Reader(source, num_workers=workers, targets=targets, **how)

    # -- the effect of a change --

    @property
    def threads(self) -> int | None:
        """Number of decoding threads; None if nothing is decoded."""
        decoder = self.stage.decoder
        return None if decoder is None else int(decoder.num_threads)

    @property
    def _views(self) -> list[View]:
        return [] if self.stage.recipe is None else self.stage.recipe.at(self.loader.epoch).views

    @property
    def kornia(self) -> bool:
        return any(view.augment.backend == "kornia" for view in self._views)

    @property
    def pillow(self) -> bool:
        """Whether Pillow decodes although DALI is installed."""
        return getattr(self.stage.decoder, "backend", None) == "pillow" and find_spec("nvidia.dali") is not None

    @property
    def reducible(self) -> bool:
        """Whether `decode.reduced=true` would decode some images at a smaller size."""
        if self.stage.decoder is None or self.stage.settings.reduced or self.loader.device.type != "cpu":
            return False
        batch, reduced = self.encoded[0], replace(self.stage.settings, reduced=True)
        with contextlib.closing(reduced.open("cpu")) as decoder:
            headers = decoder.read_headers(batch)
        windows = self.stage.read_headers(batch, self.loader.epoch).windows
        return bool((Plan.of(batch, headers, windows).scale > 1).any())

    def with_workers(self, m: Measured, count: int) -> Measured:
        before, then = Notes(), Notes()
        with (
            warnings.catch_warnings(),
            contextlib.closing(self._reader(self.reader.source, count, self.reader.targets)) as reader,
        ):
            warnings.simplefilter("ignore", UserWarning)  # torch warns of more workers than cores
            for notes, which in ((then, reader), (before, self.reader), (then, reader)):
                self._read(notes, which)
        wall, cpu = _ratios(then, before)
        read = m.read.scaled(wall, min(2.0, max(0.5, cpu)))
        return replace(m, workers=count, read=read, take=then.own_cpu() if count else 0.0)

    def with_decoder(self, m: Measured, **changed: Any) -> Measured:
        """The measurements with other decoder settings, such as ``num_threads``."""
        stage, before, then, masks, masks_then = self.stage, *(Notes() for _ in range(4))
        same = {name: getattr(stage, name) for name in ("device", "seed", "accept_truncated", "targets")}
        with contextlib.closing(LiveStage(stage.recipe, replace(stage.settings, **changed), **same)) as other:
            self._decode(Notes(), Notes(), stage=other)  # opens the decoder
            for _ in range(3):
                self._decode(before, masks)
                self._decode(then, masks_then, stage=other)
        scaled = None if m.masks is None else m.masks.scaled(*_ratios(masks_then, masks))
        return replace(m, decode=m.decode.scaled(*_ratios(then, before)), masks=scaled)

    def with_runs(self, m: Measured) -> Measured | None:
        """The measurements with masks as `gpuaug pack format=uint8` stores them; None without masks."""
        if m.masks is None or self.loader.targets is None or self.loader.targets.masks is None:
            return None
        before, then = Notes(), Notes()
        encoded = [targets.as_runs(batch, self.stage) for batch in self.encoded[: len(self.decoded)]]
        for _ in range(3):
            self._decode(Notes(), before)
            self._decode(Notes(), then, encoded=encoded)
        return replace(m, masks=m.masks.scaled(*_ratios(then, before)))

    @property
    def _bytes_per_image(self) -> float:
        return sum(b.data.nbytes for b in self.encoded) / sum(map(len, self.encoded))

    def cache_bytes(self) -> tuple[float, float] | None:
        """Bytes of all encoded images, and of those that a cache would hold; None if a cache cannot help."""
        source = self.loader.source
        stored = getattr(source, "stored", None) is not None  # stored epochs are already mapped into memory
        if stored or self.pipeline.cache is not None or getattr(source, "mapped", False) or not SUPPORTED:
            return None
        needed = self._bytes_per_image * len(source)
        left, _ = machine.memory_left() or (0, "")
        return needed, min(needed, left / 2)  # as the default of `cache.max_bytes`

    def packed(self) -> tuple[int, float] | None:
        """The shorter side that `gpuaug pack` would store, and the share of pixels kept. None: packing saves little."""
        if self.stage.decoder is None:
            return None
        side = round(max(max(x.shape[1:3]) for x in self.decoded[0].images) * 256 / 224)
        headers = self.stage.decoder.read_headers(self.encoded[0])
        shorter = float(np.median(np.minimum(headers.height, headers.width)))
        return (side, (side / shorter) ** 2) if side < 0.67 * shorter else None

    def with_fused(self, m: Measured) -> Measured:
        fused = self._recipe_seconds(lambda augment: augment.replace(backend="fused"))
        ratio = min(1.5, fused / self._recipe_seconds())
        return replace(m, augment=m.augment.scaled(ratio, ratio))

    def op_costs(self) -> dict[str, float]:
        """The share of the augmentation time of each operation, by name."""
        names = dict.fromkeys(p.name for view in self._views for p in view.augment.prepared)
        every = self._recipe_seconds()
        return {name: min(1.0, 1 - self._recipe_seconds(partial(_without, name)) / every) for name in names}

    def _recipe_seconds(self, change: Callable[[Augment], Augment] = lambda augment: augment) -> float:
        """Seconds to augment a few images in all views, with recipes changed by ``change``."""
        loader, item, best = self.loader, self.decoded[0], math.inf
        indices, views = item.encoded.indices[:FEW].numpy(), self._views
        # the recipe of a view also makes the view's copies
        made = [(x[:FEW], change(view.augment)) for x, view in zip(item.images, views, strict=True) if not view.copy]
        drawn = [recipe.draw(seed=loader.seed, epoch=loader.epoch, indices=indices) for _, recipe in made]
        level = log.level
        log.setLevel(max(logging.WARNING, level))  # messages about trial recipes would mislead
        try:
            for _ in range(5):  # the first round compiles
                began = time.perf_counter()
                for (x, recipe), draws in zip(made, drawn, strict=True):
                    recipe.apply([x] * len(recipe.views), draws, dtype=loader.dtype, memory_format=loader.memory_format)
                self.sync()
                best = min(best, time.perf_counter() - began)
        finally:
            log.setLevel(level)
        return max(best, 1e-9)

    def op_keys(self, name: str) -> list[str]:
        """The configuration keys of an operation, one for each view that uses the operation."""
        views = views_of(self.loader.augment)
        return [f"{key}.ops.{name}" for key, view in views if view.copy == 0 and name in view.augment.ops]


def _without(name: str, augment: Augment) -> Augment:
    return augment.replace(ops={key: op for key, op in augment.ops.items() if key != name})


def _ratios(then: Notes, before: Notes) -> tuple[float, float]:
    """Ratios ``then`` / ``before`` of wall time and CPU time. If the rounds alternate, other load slows both."""
    new, old = then.cost(), before.cost()
    return new.wall / max(old.wall, 1e-9), new.cpu / max(old.cpu, 1e-9)


def lenient(loader: Loader) -> Pipeline:
    """The loader's pipeline, in which bad samples raise no error and are not recorded."""
    policy: Any = "drop" if loader.faults.policy == "drop" else "blank"
    faults: Any = Faults(policy=policy, truncated=loader.faults.truncated)
    faults.handle = lambda *_, **__: None  # training itself records bad samples
    return replace(loader.pipeline, faults=faults)


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _InMemory:
    """A source with all bytes in shared memory."""

    def __init__(self, batches: Sequence[EncodedBatch]) -> None:
        # bytes of each sample, with its mask
        lengths = [np.diff(b.offsets.numpy()).reshape(-1, len(b)).sum(axis=0) for b in batches]
        self.offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
        self.data = share(torch.cat([b.data for b in batches]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.data.numpy()[self.offsets[index] : self.offsets[index + 1]].data, 0


def endless(loader: Loader) -> Iterator[Task]:
    """The batches of the epoch that are as long as the first one, repeated forever."""
    whole = len(loader.epoch_order[0][0])
    while True:
        yield from (task for task in loader.epoch_order if len(task[0]) == whole)


def _head(task: Task, count: int) -> Task:
    indices, repeats, valid = task
    return indices[:count], repeats[:count], valid[:count]
