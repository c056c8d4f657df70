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
from gpuaug.decode.header import HeaderError
from gpuaug.decode.plan import Plan
from gpuaug.errors import GpuaugError
from gpuaug.loader.batch import Batch
from gpuaug.loader.faults import Faults
from gpuaug.loader.loader import Loader
from gpuaug.loader.pipeline import Pass, Pipeline, Task
from gpuaug.read.reader import Reader
from gpuaug.source.adapt import MapSource
from gpuaug.source.index import share
from gpuaug.source.shared_memory import SUPPORTED
from gpuaug.targets import masks
from gpuaug.tools.epoch import count_batches
from gpuaug.tools.pack.targets import encode_mask
from gpuaug.tools.profile.clock import free_cores, now, waited_for_a_core
from gpuaug.tools.profile.costs import Cost, Measured, costs_of, ratios

log = logging.getLogger("gpuaug")

Step = Callable[[Batch], None]
# for each stage, seconds per image: wall time, own CPU time, workers' CPU time, and often the wait for a core
Round = dict[str, Any]

CHUNK = 32  # samples per batch if only reading is measured, because slow storage takes minutes for larger batches
FEW_READS = 8  # samples per batch if one process reads them one by one
CACHED = 4  # batches kept for the stages after reading
IMAGES = 64  # if CACHED batches have fewer images, more batches are kept
CACHE_BYTES = 2**28  # after so many bytes, no further batch is kept
LONGEST_S = 6.0  # time limit of one measurement, if `seconds` is not longer
FEW = 16  # images for testing changes of a recipe


class Profiler(contextlib.ExitStack):
    """Measures a loader without changing it. Do not iterate the loader at the same time.

    Of the first ``tried`` images, ``faults`` could not be read or decoded. Nothing else records these.

    Args:
        loader: the loader to measure.
        step: runs one training step on a batch, and waits for no other rank. None: measure the loader alone.
        repeats, seconds, batches: as in ``profile.yaml``.
        progress: called with the name of the current measurement and the share done so far.

    Attributes:
        threads: number of decoding threads; None if nothing is decoded.
        kornia: whether Kornia's backend augments a view.
        pillow: whether Pillow decodes although DALI is installed.
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
        count_batches(loader)
        self.loader, self.step, self.repeats, self.seconds, self.progress = loader, step, repeats, seconds, progress
        self.batches, self.cores, self.encoded = batches, machine.usable_cpus(), list[EncodedBatch]()
        self.pipeline = pipeline = lenient(loader)
        self.reader = pipeline.reader
        self.stage: Any = pipeline.stage
        self._first = pipeline.first_row(loader.epoch)
        taken = list(itertools.islice(endless(loader), max(CACHED, -(-IMAGES // loader.batch_size))))
        with contextlib.closing(self.reader.batches(taken, first=self._first)) as batches_read:  # type: ignore
            for batch in batches_read:
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
        self.bytes_per_image = sum(b.data.nbytes for b in self.encoded) / sum(map(len, self.encoded))
        self._views: list[View] = self.stage.recipe.at(loader.epoch).views
        self.kornia = any(view.augment.backend == "kornia" for view in self._views)
        decoder = self.stage.decoder
        self.threads = int(decoder.num_threads)
        self.pillow = decoder.backend == "pillow" and find_spec("nvidia.dali") is not None

    def measure(self) -> Measured:
        stages, rounds, cores = self._stages(), list[Round](), list[float]()
        for number in range(self.repeats + 1):
            found = Round()
            cores.append(free_cores())
            for k, (name, run) in enumerate(stages.items()):
                self.progress(name, (number + k / len(stages)) / (self.repeats + 1))
                found |= run()
            rounds.append(found)
        del rounds[0], cores[0]  # the first round warms up: workers start, kernels are compiled
        return Measured(
            **costs_of(rounds),
            batch_size=self.loader.batch_size,
            workers=self.loader.num_workers,
            prefetch=self.loader.prefetch,
            main_thread=bool(self.stage.main_thread),
            device_type=self.loader.device.type,
            cores=statistics.median(cores),
            busy=busy(rounds),
            bytes_per_image=self.bytes_per_image,
        )

    def _stages(self) -> dict[str, Callable[[], Round]]:
        loader, step = self.loader, self.step
        stages: dict[str, Callable[[], Round]] = {"source": self.read_samples, "read": partial(self._read, self.reader)}
        if loader.num_workers:
            in_memory = self._reader(MapSource(_InMemory(self.encoded)), loader.num_workers)
            self.callback(in_memory.close)
            stages["copy"] = lambda: {"copy": self._read(in_memory)["read"]}
        stages["decode"] = self._decode
        decoded = [(item, len(item.encoded)) for item in self.decoded]
        stages["augment"] = lambda: {"augment": self._repeat(self._augmented, decoded)}
        if loader.targets is not None:
            stages["finish"] = lambda: {"finish": self._repeat(self._finished, decoded)}
        if loader.mix is not None:
            stages["mix"] = self._mix
        if step is not None:
            ready = [(batch, len(batch)) for batch in self.ready]
            stages["step"] = lambda: {"step": self._repeat(step, ready)}
        stages["whole"] = self.whole
        return stages

    def sync(self) -> None:
        if self.loader.device.type == "cuda":
            torch.cuda.synchronize(self.loader.device)

    # -- a short measurement of each stage --

    def _time(
        self,
        work: Callable[[], int],
        *,
        seconds: float,
        skip: int = 0,
        least: int = 1,
        longest_s: float = LONGEST_S,
        reader: Reader | None = None,
    ) -> Any:
        """Call ``work`` for ``seconds``, and at least ``least`` times. ``work`` returns its number of images.

        The first ``skip`` calls are not measured. After ``max(seconds, longest_s)`` seconds, ``skip`` measured calls
        are enough. Returns seconds per image, float64 [4]: wall time, own CPU time, CPU time of ``reader``'s workers,
        and this thread's wait for a core.
        """
        started = time.perf_counter()
        for _ in range(skip):
            work()
        self.sync()
        pids = () if reader is None else reader.pids
        waited, began, images, calls = waited_for_a_core(), now(pids), 0, 0
        while calls < least or time.perf_counter() - began[0] < seconds:
            images, calls = images + work(), calls + 1
            if calls >= skip and time.perf_counter() - started > max(seconds, longest_s):
                break
        self.sync()
        return np.append(now(pids) - began, waited_for_a_core() - waited) / images

    def read_samples(self) -> Round:
        """Read samples in this process."""
        source: Any = self.reader.source
        many = getattr(source, "read_many", None)
        get, count = (source.__getitem__, FEW_READS) if many is None else (many, CHUNK)

        def read() -> int:
            task = _head(next(self.tasks), count)
            numbers = (task[0] + self._first).tolist()
            for part in numbers if many is None else [numbers]:
                with contextlib.suppress(OSError, GpuaugError):  # `__init__` counts faults
                    get(part)
            return len(numbers)

        return {"source": self._time(read, seconds=self.seconds)}

    def _read(self, reader: Reader) -> Round:
        workers, small = reader.num_workers, (_head(task, CHUNK) for task in self.tasks)
        batches: Any = reader.batches(small, first=self._first, zero_copy=self.loader.ahead is None)

        def take() -> int:
            batch = next(batches)
            batch.data[::4096].sum()  # maps every page, as the thread that receives a batch has to do
            return len(batch)

        with contextlib.closing(batches):
            # skip the first batches: all workers start together, so these come in a burst
            spent = self._time(take, seconds=self.seconds, skip=workers, least=max(1, 2 * workers), reader=reader)
        return {"read": spent, "take": [spent[1] if workers else 0.0, 0.0, 0.0]}

    def _decode(self, stage: Any = None, encoded: Sequence[EncodedBatch] = ()) -> Round:
        """Measure headers, objects, and the decoding of images and masks."""
        stage, batches, images = stage or self.stage, itertools.cycle(encoded or self.encoded), list[int]()
        spent: dict[str, Any] = defaultdict(lambda: np.zeros(3))

        def one() -> int:
            batch = next(batches)
            worked = time.thread_time()
            headers = stage.read_headers(batch, self.loader.epoch)
            seconds = time.thread_time() - worked
            spent["headers"] += [seconds, seconds, 0.0]  # one Python thread: its CPU time also counts as wall time
            self.sync()
            before = now()
            stage.decode(replace(headers, targets=None))
            self.sync()
            between = now()
            spent["decode"] += between - before
            if headers.targets is not None:
                stage.targets.decode(headers.targets, batch, headers.info, stage.decoder)
                spent["masks"] += now() - between
                seconds = _object_seconds(stage, headers)
                spent["objects"] += [seconds, seconds, 0.0]
            images.append(len(batch))
            return len(batch)

        with self.pipeline.streams.on():
            self._time(one, seconds=self.seconds)
        spent["headers"] = np.maximum(0.0, spent["headers"] - spent["objects"])
        return {name: seconds / sum(images) for name, seconds in spent.items()}

    def _finished(self, item: Any) -> Any:
        with self.pipeline.streams.on():
            return self.stage.finish_targets(item, bad=[fault.row for fault in item.faults], keep=None)

    def _augmented(self, item: Any) -> Any:
        with self.pipeline.streams.on():
            return self.stage.augment(item, dtype=self.loader.dtype, memory_format=self.loader.memory_format)

    def _repeat(self, do: Callable[[Any], Any], items: Iterable[tuple[Any, int]]) -> Any:
        """Measure ``do`` on items that are repeated. Each item comes with its number of images."""
        numbered = enumerate(itertools.cycle(items), start=1)

        def one() -> int:
            number, (item, images) = next(numbered)
            do(item)
            if number % 8 == 0:
                self.sync()  # limits the work queued on the device
            return images

        return self._time(one, seconds=self.seconds)

    def _mix(self) -> Round:
        loader, item = self.loader, self.decoded[0]
        images, encoded, mix = self._augmented(item), item.encoded, loader.mix
        labels = encoded.labels.to(loader.device) if encoded.labels is not None else None
        same: dict[str, Any] = {"num_classes": loader.num_classes, "seed": loader.seed, "epoch": loader.epoch}

        def one(first: int) -> None:
            assert mix is not None
            mix(images, labels, valid=encoded.valid, first_index=first, **same)

        return {"mix": self._repeat(one, [(int(encoded.indices[0]), len(encoded))])}

    def whole(self) -> Round:
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
            spent = self._time(
                one,
                seconds=0.0 if batches else 2 * self.seconds,
                skip=max(1, workers),
                least=batches or max(3, 2 * workers),
                longest_s=2 * LONGEST_S,
                reader=self.reader,
            )
        return {"whole": spent}

    def _reader(self, source: Any, workers: int, targets: Sequence[str] = ()) -> Reader:
        how: dict[str, Any] = {name: getattr(self.reader, name) for name in ("timeout", "start_method", "read_threads")}
        return Reader(source, num_workers=workers, targets=targets, **how)

    # -- the effect of a change --

    def with_workers(self, m: Measured, count: int) -> Measured:
        with (
            warnings.catch_warnings(),
            contextlib.closing(self._reader(self.reader.source, count, self.reader.targets)) as reader,
        ):
            warnings.simplefilter("ignore", UserWarning)  # torch warns of more workers than cores
            first, before, last = (self._read(which) for which in (reader, self.reader, reader))
        wall, cpu = ratios([before], [first, last])["read"]
        then = m.scaled({"read": Cost(wall, min(2.0, max(0.5, cpu)))})
        return replace(then, workers=count, take=costs_of([first, last])["take"])

    def with_decoder(self, m: Measured, **changed: Any) -> Measured:
        """The measurements with other decoder settings, such as ``num_threads``."""
        with self._other_stage(**changed) as stage:
            self._decode(stage)  # opens the decoder
            return self._with_decoding(m, ("decode", "masks"), stage=stage)

    def with_runs(self, m: Measured) -> Measured | None:
        """The measurements with masks as `gpuaug pack format=uint8` stores them; None without masks."""
        if not self.encoded[0].masks:
            return None
        encoded = [_as_runs(batch, self.stage) for batch in self.encoded[: len(self.decoded)]]
        return self._with_decoding(m, ("masks",), encoded=encoded)

    def _with_decoding(self, m: Measured, stages: Sequence[str], **changed: Any) -> Measured:
        before, then = zip(*((self._decode(), self._decode(**changed)) for _ in range(3)), strict=True)
        found = ratios(before, then)
        return m.scaled({name: found[name] for name in stages if name in found})

    def _other_stage(self, **changed: Any) -> contextlib.closing[Any]:
        """The stage with other decoder settings."""
        return contextlib.closing(replace(self.stage, settings=replace(self.stage.settings, **changed)))

    @property
    def reducible(self) -> bool:
        """Whether `decode.reduced=true` would decode some images at a smaller size."""
        if self.stage.settings.reduced or self.loader.device.type != "cpu":
            return False
        with self._other_stage(reduced=True) as stage:
            headers = stage.read_headers(self.encoded[0], self.loader.epoch)
        return bool((Plan.of(self.encoded[0], headers.info, headers.windows).scale > 1).any())

    def cache_bytes(self) -> tuple[float, float] | None:
        """Bytes of all encoded images, and of those that a cache would hold; None if a cache cannot help."""
        source = self.loader.source
        if self.pipeline.cache is not None or getattr(source, "mapped", False) or not SUPPORTED:
            return None
        needed = self.bytes_per_image * len(source)
        left, _ = machine.memory_left() or (0, "")
        return needed, min(needed, left / 2)  # as the default of `cache.max_bytes`

    def packed(self) -> tuple[int, float] | None:
        """The shorter side that `gpuaug pack` would store, and the share of pixels kept. None: packing saves little."""
        side = round(max(max(x.shape[1:3]) for x in self.decoded[0].images) * 256 / 224)
        headers = self.stage.decoder.read_headers(self.encoded[0])
        shorter = float(np.median(np.minimum(headers.height, headers.width)))
        return (side, (side / shorter) ** 2) if side < 0.67 * shorter else None

    def with_fused(self, m: Measured) -> Measured:
        fused = self._recipe_seconds(lambda augment: augment.replace(backend="fused"))
        ratio = min(1.5, fused / self._recipe_seconds())
        return m.scaled({"augment": Cost(ratio, ratio)})

    def op_costs(self) -> dict[str, float]:
        """Each operation's share of the augmentation time, by name."""
        names = dict.fromkeys(p.name for view in self._views for p in view.augment.prepared)
        every = self._recipe_seconds()
        return {name: min(1.0, 1 - self._recipe_seconds(partial(_without, name)) / every) for name in names}

    def _recipe_seconds(self, change: Callable[[Augment], Augment] = lambda augment: augment) -> float:
        """Seconds to augment a few images in all views, with recipes changed by ``change``."""
        loader, item, best = self.loader, self.decoded[0], math.inf
        indices = item.encoded.indices[:FEW].numpy()
        # the recipe of a view also makes the view's copies
        made = [
            (x[:FEW], change(view.augment)) for x, view in zip(item.images, self._views, strict=True) if not view.copy
        ]
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


def busy(rounds: Sequence[Round]) -> float:
    """The share of the reading time in which a core is busy. Reading time excludes waiting for a free core."""
    wall, own, _, waited = np.transpose([found["source"] for found in rounds])
    return float(np.median(own / np.maximum(np.maximum(wall - waited, own), 1e-9)))


def lenient(loader: Loader) -> Pipeline:
    """The loader's pipeline, in which bad samples raise no error and are not recorded."""
    policy: Any = "drop" if loader.faults.policy == "drop" else "blank"
    faults: Any = Faults(policy=policy, truncated=loader.faults.truncated)
    faults.handle = lambda *_, **__: None  # training itself records bad samples
    return replace(loader.pipeline, faults=faults)


def _object_seconds(stage: Any, headers: Any) -> float:
    """Repeat what `read_headers` does with objects and with masks that decide crops. Returns CPU-seconds."""
    began, placing = time.thread_time(), stage.targets
    upright = placing.upright(headers.encoded, headers.info, stage.decoder)
    placing.place(upright, headers.windows, headers.chosen, epoch=headers.drawn.epoch)
    return time.thread_time() - began


def _as_runs(encoded: EncodedBatch, stage: Any) -> EncodedBatch:
    """The batch with masks encoded as in `gpuaug pack format=uint8`, but not resized."""
    info, pieces = stage.decoder.read_headers(encoded), [image.tobytes() for image in encoded.images]
    how = {"max_pixels": stage.settings.max_pixels, "ids_in_rgb": stage.targets.panoptic}
    for row, data in enumerate(encoded.masks):
        size, exif = (int(info.height[row]), int(info.width[row])), int(info.orientation[row])
        try:
            mask = masks.decode(data.tobytes(), stored=size[::-1] if exif > 4 else size, exif=exif, **how)
            pieces.append(encode_mask(mask, raw=True, panoptic=stage.targets.panoptic))
        except HeaderError:
            pieces.append(data.tobytes())
    offsets = torch.tensor([0, *itertools.accumulate(map(len, pieces))])
    data = np.frombuffer(bytearray(b"".join(pieces)), dtype=np.uint8)  # torch.frombuffer refuses 0 bytes
    return replace(encoded, data=torch.from_numpy(data), offsets=offsets)


class _InMemory:
    """A source in shared memory. Each sample has the mean size of the given samples."""

    def __init__(self, batches: Sequence[EncodedBatch]) -> None:
        data, count = torch.cat([batch.data for batch in batches]), sum(map(len, batches))
        size = len(data) // count
        self.samples = share(data[: size * count].view(count, size))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.samples[index % len(self)].numpy().data, 0


def endless(loader: Loader) -> Iterator[Task]:
    """The batches of the epoch that are as long as the first one, repeated forever."""
    whole = len(loader.epoch_order[0][0])
    while True:
        yield from (task for task in loader.epoch_order if len(task[0]) == whole)


def _head(task: Task, count: int) -> Task:
    indices, repeats, valid = task
    return indices[:count], repeats[:count], valid[:count]
