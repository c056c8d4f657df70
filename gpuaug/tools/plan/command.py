"""`gpuaug plan`: finds out how much memory a run needs. :class:`gpuaug.tools.memory.Usage` says which memory counts.

An upper bound is computed from the headers of some images. Then a child process runs the loader for a short time. The
values measured in this rehearsal replace the bound. Formulas add the cache, the buffer ``ahead``, and other ranks.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from omegaconf import OmegaConf
from torch import nn

from gpuaug import checks, machine
from gpuaug.augment.progressive import views_of
from gpuaug.errors import ConfigError, GpuaugError
from gpuaug.files import format_bytes
from gpuaug.loader.batch import Batch
from gpuaug.loader.loader import Loader
from gpuaug.read.reader import Reader
from gpuaug.tools import child
from gpuaug.tools.epoch import count_batches
from gpuaug.tools.memory import Usage, usage
from gpuaug.tools.report import Report
from gpuaug.tools.request import Keys, Request

log = logging.getLogger("gpuaug")

Place = Literal["host", "shared", "device"]
Left = dict[Place, tuple[int, str]]  # bytes left in each known place, and what limits them
PLACES: dict[Place, str] = {"host": "host memory", "shared": "part in /dev/shm", "device": "device memory"}
SECONDS = 15.0  # duration of a rehearsal after its first batch


@dataclass(frozen=True, kw_only=True)
class Settings(Keys):
    """The keys of `gpuaug plan`."""

    seconds: float = SECONDS
    sample: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number("seconds", self.seconds, 1.0, 3600.0)
        checks.whole_number("sample", self.sample, 1)


def main(request: Request) -> int:
    settings = Settings(**request.settings())
    report = Report(file=settings.json)
    config = request.loader()
    loader: Loader
    with request.build(config) as loader:
        bound, left = upper_bound(loader, sample=settings.sample), memory_left(loader.device)
        run = Run(loader=loader, costs=bound, config=config, prefix=request.prefix)
        run = _rehearse(request, run, left, seconds=settings.seconds)
        report.add("image", bound.image, f"{bound.image / 1024:.0f} KiB encoded, mean of <= {settings.sample} images")
        if bound.faults:
            text = (
                f"{bound.faults} of {bound.sampled} images could not be read or decoded, so more memory may be needed; "
            )
            text += "to list them, train with `faults.policy=blank faults.file=FILE`"
            report.add("faults", bound.faults, text)
        _report(report, run, left)
        batches = run.costs.batches
        few = batches <= loader.prefetch + 2 and batches < len(loader)
        text = f"{batches} batches{', too few to fill all queues: raise `seconds`' if few else ''}"
        if not batches:
            text = "stopped, because it needed more memory than is left: the values above are upper bounds"
        report.add("rehearsal", batches, f"{text}; pages of libraries and files are not counted")
        short = shortage([run], left)
        report.add("fits", short is None, "yes" if short is None else f"no: {short.text}")
        report.values["overrides"] = [] if short is None else list(short.overrides)
    report.write()
    return 0


def _rehearse(request: Request, run: Run, left: Left, *, seconds: float, model: Any = None) -> Run:
    """Return the run with measured costs, or ``run`` itself if it needs more memory than is left."""
    config = OmegaConf.to_container(run.config, resolve=True)
    job = {"config": config, "classes": run.classes, "trust": request.trust, "model": model, "epoch": run.costs.epoch}
    peak = rehearse({**job, "left": {place: available for place, (available, _) in left.items()}, "seconds": seconds})
    return run if peak is None else replace(run, costs=peak.costs(run.loader, run.costs))


def _report(report: Report, run: Run, left: Left) -> None:
    terms = run.terms()
    lines = [f"{t.name:<26} {t.place:<7} {format_bytes(t.bytes):>11}   {t.formula}" for t in terms]
    report.add("terms", [asdict(term) for term in terms], "\n".join(["", *lines]))
    ranks = machine.local_world_size()
    for place, title in PLACES.items():
        if bytes_there := total(terms, place):
            text = format_bytes(bytes_there)
            text += f" in each of {ranks} ranks" if ranks > 1 else ""
            if place in left:
                available, by = left[place]
                text += f", {format_bytes(available)} left here"
                text += f" ({by})" if place == "host" else ""
            report.add(title.replace(" ", "_"), bytes_there, text)


def check(request: Request, runs: Sequence[Run], settings: Any) -> None:
    """Raise ConfigError if the runs clearly need more memory than is left. Warn if the memory may not suffice.

    ``runs`` are the loaders that run at the same time, the training loader first. If the upper bounds exceed half of
    the memory left, the first rank of each machine rehearses the runs.
    """
    left = memory_left(runs[0].loader.device)
    if machine.local_rank() or not lacking(runs, left, share=0.5):
        return
    log.info("memory may be short: a rehearsal measures this run first, for about %.0f s", (SECONDS + 5) * len(runs))
    how = {**asdict(settings), "profiling": False, "resume": None, "compile": False}
    trained = {"classes": runs[0].loader.num_classes, "settings": how}
    measured: list[Run] = []
    try:
        for run in runs:
            measured.append(_rehearse(request, run, left, seconds=SECONDS, model=None if measured else trained))
    except GpuaugError as error:
        log.warning("memory may not suffice, and the memory of this run could not be measured. %s", error)
        return
    short = shortage(measured, left)
    if short is not None and (short.clear or not all(run.costs.batches for run in measured)):
        raise ConfigError(f"{short.text} `check_memory=false` starts the run anyway.")
    if short is not None:
        log.warning("memory may not suffice: %s", short.text)


MIB = 2**20
SPARE = 0.1  # a plan leaves this share of the free memory for other processes and wrong estimates
CLEARLY = 1.15  # a run that needs more than 1.15 x the memory left is refused, because a plan may be wrong by 15 %
BEHIND = 4  # encoded batches that left the workers: 1 waits, 1 is in header reading, 1 in decoding, 1 in augmentation
MASK_BYTES = {"int64": 8, "int32": 4, "uint8": 1}
CHUNK = 16  # number of images whose headers are read together
PATIENCE_S = 2.0  # time limit for reading headers
ENOUGH = 64  # batches that a rehearsal tries to run, because malloc's heaps grow until then
START_S = 60.0  # timeout for imports and opening the source in the child
# for `python -c`: with `python -m`, spawned workers would run this file again
CODE = "from gpuaug.tools.plan.command import rehearsal; rehearsal()"


def limits_of(loader: Loader) -> dict[str, Any]:
    """The settings that decide how much memory a loader needs, by key. Lowering them changes no pixel."""
    cache = loader.pipeline.cache
    limits = {"ahead": loader.ahead, "cache.max_bytes": None if cache is None else cache.capacity}
    return {**limits, "prefetch": loader.prefetch, "num_workers": loader.num_workers}


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Bytes of each part of a run."""

    image: float  # mean of the encoded images
    sampled: int = 0  # number of images whose headers were read
    faults: int = 0  # number of these images that cannot be read or decoded
    ready: int  # the images of a finished batch in the prefetch queue
    masks: int = 0  # the masks of a finished batch
    mask_work: int = 0  # decoded masks, and cropped masks that wait for the next thread
    base: int = 0  # this process before the first batch
    worker: int = 0  # one worker
    encoded: int = 0  # one encoded batch in /dev/shm
    work: int = 0  # decoding, augmenting and everything else in this process
    step: int = 0  # a step of the model, on the host
    device: int = 0  # device memory without the ready batches
    batches: int = 0  # batches of the rehearsal; 0: all values are upper bounds
    epoch: int = 0  # the epoch with the largest images, from the loader's epoch on


@dataclass(frozen=True, slots=True)
class Term:
    """One part of the memory."""

    name: str
    place: Place
    bytes: int
    formula: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """A loader that will run, and its memory."""

    loader: Loader  # not yet iterated
    costs: Costs
    config: Any = None  # of the loader
    prefix: str = ""  # prefix of the loader's keys on the command line, such as `val.`
    classes: Sequence[str] | None = None  # class names for the loader's source; None: the source finds the names
    changed: Mapping[str, Any] = field(default_factory=dict)  # values to try instead of those of `limits_of`

    @property
    def limits(self) -> dict[str, Any]:
        return {**limits_of(self.loader), **self.changed}

    def terms(self) -> list[Term]:
        loader, costs = self.loader, self.costs
        prefetch, workers = self.limits["prefetch"], self.limits["num_workers"]
        ahead, cache = self.limits["ahead"] or 0, self.limits["cache.max_bytes"] or 0
        batches, samples, kind = len(loader), len(loader.source), "measured" if costs.batches else "at most"
        sent, made = on_their_way(loader, workers), min(batches, prefetch + 2)
        left = max(0, batches - made) * loader.batch_size * costs.image
        dtype = None if loader.targets is None or loader.targets.masks is None else loader.targets.masks.dtype
        there: Place = "host" if loader.device.type == "cpu" else "device"
        text = f"({prefetch} prefetched + 1 in preparation + 1 in use)"
        text = text if made == prefetch + 2 else f"{made} batches of an epoch"
        terms = [
            Term("this process", "host", costs.base, "measured: Python, torch, the source"),
            Term("workers", "host", workers * costs.worker,
                 f"{workers} workers x {format_bytes(costs.worker)} {kind}"),
            Term("encoded batches", "shared", sent * costs.encoded,
                 f"{sent} batches in transit x {format_bytes(costs.encoded)} {kind}"),
            Term("ready batches", there, made * costs.ready, f"{text} x {format_bytes(costs.ready)}"),
            Term("ready masks", there, made * costs.masks, f"{text} x {format_bytes(costs.masks)} as {dtype}"),
            Term("decoding, augmentation", "host", costs.work, f"{kind}, with freed memory that malloc keeps"),
            Term("decoding of masks", "host", costs.mask_work, "at most: decoded masks and 3 batches of cropped masks"),
            Term("model step", "host", costs.step, f"{kind}, forward and backward"),
            Term("ahead", "host", int(min(ahead, left)),
                 f"min(ahead {format_bytes(ahead)}, rest of an epoch {format_bytes(left)})"),
            Term("cache", "host", int(min(cache, samples * (costs.image + 24))),
                 f"min(max_bytes {format_bytes(cache)}, {samples} samples x {costs.image:.0f} B)"),
            Term("device", "device", costs.device, f"{kind}, without the CUDA context"),
        ]  # fmt: skip
        return [term for term in terms if term.bytes]


def total(terms: Sequence[Term], place: Place) -> int:
    """Total bytes of one place. ``host`` includes ``shared``."""
    return sum(t.bytes for t in terms if t.place == place or (place == "host" and t.place == "shared"))


def on_their_way(loader: Loader, workers: int) -> int:
    """The largest number of encoded batches in /dev/shm at one time."""
    return min(len(loader), workers * loader.pipeline.reader.prefetch_factor + BEHIND) if workers else 0


# -- an upper bound ---------------------------------------------------------------------------------------------------


def upper_bound(loader: Loader, *, model: nn.Module | None = None, averaged: bool = False, sample: int = 128) -> Costs:
    """An upper bound of a run's memory, from the batch size and the headers of at most ``sample`` images.

    ``averaged``: the training keeps averaged weights of the model.
    """
    order, pipeline, stage = loader.epoch_order.epoch, loader.pipeline, loader.pipeline.stage
    if not (count := min(sample, len(order))):
        raise ConfigError("the source has no samples, so there is nothing to plan. Check `source`.")
    count_batches(loader)
    at = torch.linspace(0, len(order) - 1, count).round().long()
    chunks = [at[k :: -(-count // CHUNK)] for k in range(-(-count // CHUNK))]  # each chunk is spread over the epoch
    tasks = [(order.indices[c], order.repeats[c], torch.ones(len(c), dtype=torch.bool)) for c in chunks]
    images, faults, bytes_read, pixels, largest, epoch = 0, 0, 0, 0.0, 0.0, loader.epoch
    later = [first for first in loader.augment.stages if first > epoch]
    views: list[tuple[int, int]] = []
    deadline = time.monotonic() + PATIENCE_S
    reader = Reader(pipeline.reader.source, num_workers=0, targets=pipeline.reader.targets)
    for encoded in replace(pipeline, reader=reader).read(tasks, loader.epoch, zero_copy=False):
        headers = stage.read_headers(encoded, loader.epoch)
        images, bytes_read = images + len(encoded), bytes_read + encoded.data.nbytes
        faults += len({fault.row for fault in (*encoded.faults, *headers.faults)})
        stage.decoder.truncated = 0  # only training counts truncated images
        assert headers.info is not None
        areas = 3.0 * headers.info.height * headers.info.width
        pixels, largest = pixels + float(areas.sum()), max(largest, float(areas.max()))
        stages = [(loader.epoch, headers), *((first, stage.read_headers(encoded, first)) for first in later)]
        sizes = [(first, [window.size for window in each.windows]) for first, each in stages]
        epoch, views = max(sizes, key=lambda each: sum(height * width for height, width in each[1]))
        if time.monotonic() > deadline:
            break
    reader.close()
    rows, image = min(loader.batch_size, len(loader.source)), bytes_read / images
    values, encoded_bytes = rows * sum(height * width * 3 for height, width in views), int(2 * rows * image)
    source: Any = pipeline.reader.source
    kept = getattr(source, "row_groups", None)  # Parquet row groups that each reading process keeps in memory
    groups = 0 if kept is None else (kept + 1) * source.group_bytes()
    decoded = min(rows * pixels / images, 2 * loader.decode.max_bytes)
    decoded += 4 * stage.decoder.num_threads * largest
    # 3 batches of uint8 wait between threads; mix and uncompiled operations use 9 batches of float32
    work = 200 * MIB + int(2 * decoded) + 10 * encoded_bytes + groups + (3 + 9 * 4) * values
    masks, mask_work = _mask_bytes(loader, views, rows, pixels / 3 / images)
    step, cuda = 0 if model is None else _step_bound(model, views, rows, averaged), loader.device.type == "cuda"
    return Costs(
        image=image,
        sampled=images,
        faults=faults,
        ready=values * (1 if stage.main_thread else loader.dtype.itemsize),
        masks=masks,
        mask_work=mask_work,
        worker=(64 if (reader.start_method or "fork") == "fork" else 400) * MIB + groups + encoded_bytes,
        encoded=encoded_bytes,
        work=200 * MIB + 10 * encoded_bytes + groups if cuda else work,
        step=0 if cuda else step,
        device=2 * work + 2 * masks + step if cuda else 0,
        epoch=epoch,
    )


def _mask_bytes(loader: Loader, views: Sequence[tuple[int, ...]], rows: int, pixels: float) -> tuple[int, int]:
    """Bytes of a batch's finished masks, and of all unfinished masks. ``pixels``: mean per image."""
    if loader.targets is None or loader.targets.masks is None:
        return 0, 0
    wide = 4 if getattr(loader.source, "panoptic", False) else 1  # bytes per pixel; 16-bit masks are too rare to count
    early = any("masks" in getattr(view.augment.crop, "needs", ()) for _, view in views_of(loader.augment))
    values = rows * sum(height * width for height, width in views)
    decoded = int(rows * pixels) * (3 if early else 1)  # if a crop needs masks, 3 batches are decoded early
    ready = wide if loader.pipeline.stage.main_thread else MASK_BYTES[loader.targets.masks.dtype]
    return values * ready, wide * (decoded + 3 * values)


def _step_bound(model: nn.Module, views: Sequence[tuple[int, ...]], rows: int, averaged: bool) -> int:
    """An upper bound of the bytes of a training step.

    It counts gradients, DDP's buckets, optimizer state, averaged weights, and twice the tensors that autograd saves.
    """
    saved = 0

    def pack(x: torch.Tensor) -> torch.Tensor:
        nonlocal saved
        saved += x.nbytes
        return x

    tried = copy.deepcopy(model).train()  # a forward pass changes batch norm's running statistics
    try:
        with torch.random.fork_rng(devices=[]), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            for view in views:
                tried(torch.zeros(2, 3, *view))
    except Exception as error:  # a model may fail in any way on an input of zeros
        log.warning("memory of a step is unknown: the model failed on zeros (%s: %.200s)", type(error).__name__, error)
    return (5 + averaged) * sum(t.nbytes for t in [*model.parameters(), *model.buffers()]) + saved * rows


# -- the rehearsal ----------------------------------------------------------------------------------------------------


@dataclass
class Peak:
    """Peak memory of a run in bytes."""

    base: Usage = field(default_factory=usage)  # before the first batch
    most: Usage = field(default_factory=usage)  # at the peak of host memory
    shared: int = 0
    step: int = 0  # host memory added by steps of the model
    device: int = 0  # growth since the beginning of the run
    ready: int = 0  # largest number of ready batches
    batches: int = 0  # number of all batches
    began: float = 0.0  # time of the first batch

    def costs(self, loader: Loader, bound: Costs) -> Costs:
        """Return ``bound`` with measured values instead of bounds."""
        ready = min(self.batches, self.ready + 2) * (bound.ready + bound.masks)
        work, device = self.most.main + self.most.files - self.base.main - self.base.files - self.step, self.device
        if loader.device.type == "cpu":
            work -= ready
        else:
            device -= ready
        mask_work = min(bound.mask_work, max(0, work))
        return replace(
            bound,
            mask_work=mask_work,
            base=self.base.host,
            worker=self.most.workers // max(1, loader.num_workers),
            encoded=self.shared // max(1, on_their_way(loader, loader.num_workers)),
            work=max(0, work) - mask_work,
            step=self.step,
            device=max(0, device),
            batches=self.batches,
        )


def measure(
    loader: Loader,
    *,
    seconds: float,
    step: Callable[[Batch], None] | None = None,
    watch: Callable[[Peak], None] = lambda peak: None,
) -> Peak:
    """Run a loader that has not been iterated yet, and measure its peak memory.

    No batch is requested later than ``seconds`` after the first batch. ``step`` runs on the last batches. Another
    thread calls ``watch`` about every 30 ms.
    """
    peak, cuda, done = Peak(), loader.device.type == "cuda", threading.Event()
    before = torch.cuda.mem_get_info(loader.device)[0] if cuda else 0

    def sample() -> None:
        while not done.wait(0.03):
            now = usage()
            peak.most = max(peak.most, now, key=lambda each: each.host)
            peak.shared, peak.ready = max(peak.shared, now.shared), max(peak.ready, loader.prefetch_level)
            if cuda:
                peak.device = max(peak.device, before - torch.cuda.mem_get_info(loader.device)[0])
            watch(peak)

    sampler = threading.Thread(target=sample, name="gpuaug-memory", daemon=True)
    sampler.start()
    filled, alone, steps, end = 3 * (loader.prefetch + 2) + 2, 0, 0, math.inf
    wanted = max(filled + 2, ENOUGH)
    try:
        while steps < 3 and time.monotonic() < end:
            for batch in loader:
                peak.batches, peak.began = peak.batches + 1, peak.began or time.monotonic()
                end = peak.began + seconds
                if peak.batches in (2, filled, wanted - 2):  # pause, so that the queues fill up
                    time.sleep(min(0.1 * seconds, max(0.0, end - time.monotonic())))
                if peak.batches >= wanted or time.monotonic() > end - 0.25 * seconds:
                    alone, steps = alone or peak.most.host, steps + 1
                    if step is not None:
                        step(batch)
                del batch
                if steps == 3 or time.monotonic() > end:
                    break
    finally:
        done.set()
        sampler.join()
    peak.step = 0 if step is None or not alone else max(0, peak.most.host - alone)
    return peak


def rehearse(job: Mapping[str, Any]) -> Peak | None:
    """Run a job of :func:`rehearsal` in a child process; None if the job needed more memory than is left."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}  # the child is not a rank
    command = (sys.executable, "-c", CODE)
    ended = child.run(command, timeout=2 * job["seconds"] + START_S, job=job, environment=environment)
    answer = ended.answer or {}
    if ended.status is None:
        raise GpuaugError("the rehearsal of this run gave no answer in time. Is the source slow to open?")
    if "over" in answer or (not answer and ended.status == -signal.SIGKILL):  # killed by `watch` or by the kernel
        return None
    if "peak" not in answer:
        raise GpuaugError(answer.get("error") or f"the rehearsal of this run failed: {ended.errors.strip()[-1000:]}")
    values = answer["peak"]
    return Peak(**{**values, "base": Usage(**values["base"]), "most": Usage(**values["most"])})


def rehearsal() -> None:
    """In the child process: run the job on stdin, and print the answer as the last line. Job and answer are JSON.

    The job's ``left`` holds the bytes left in each known place. Its ``model`` is null, or holds the number of
    ``classes`` and the ``settings`` of the training.
    """
    from gpuaug.tools.profile.command import training_step
    from gpuaug.tools.train.training import Settings as Training

    job = json.load(sys.stdin)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, the kernel kills this process

    def say(**values: Any) -> None:
        print(f"\n{json.dumps(values)}", flush=True)

    def watch(peak: Peak) -> None:
        more = peak.most.host - peak.base.host
        if more > left.get("host", math.inf) or peak.shared > 0.9 * left.get("shared", math.inf):
            say(over=True)
        elif peak.began and time.monotonic() > peak.began + 1.3 * job["seconds"]:  # a batch or a step is too slow
            say(peak=asdict(peak))
        else:
            return
        os.killpg(os.getpid(), signal.SIGKILL)

    request = Request(command="train", trust=tuple(job["trust"]))
    model, config, left = job["model"], job["config"], job["left"]
    faults = {**(config.get("faults") or {"_target_": "gpuaug.Faults"}), "policy": "blank", "file": None, "max": None}
    # a buffer `ahead` of 1 byte still holds one batch
    config |= {"cache": None, "ahead": config.get("ahead") and 1, "faults": faults}
    try:
        with request.build_held_out(config, classes=job["classes"]) as loader:
            loader.set_epoch(job["epoch"])
            step = None
            if model is not None:
                step = training_step(request, loader, Training(**model["settings"]), num_classes=model["classes"])
            say(peak=asdict(measure(loader, seconds=job["seconds"], step=step, watch=watch)))
    except GpuaugError as error:
        say(error=str(error))


# -- memory left -----------------------------------------------------------------------------------------------------


def memory_left(device: torch.device) -> Left:
    """The memory that is left now on this machine or in this container. Unknown places are missing."""
    left: Left = {}
    if (host := machine.memory_left()) is not None:
        left["host"] = host
    if (shm := machine.shared_memory()) is not None:
        left["shared"] = shm[1], "/dev/shm"
    if device.type == "cuda":
        left["device"] = torch.cuda.mem_get_info(device)[0], "the device"
    return left


@dataclass(frozen=True, slots=True)
class Shortage:
    """Message and remedy for runs that need more memory than is left."""

    text: str
    clear: bool  # the shortage is larger than a possible error of the plan
    overrides: tuple[str, ...]  # they make the runs fit; empty: only a smaller batch helps


def lacking(runs: Sequence[Run], left: Left, *, share: float) -> dict[Place, str]:
    """A message for each place in which the runs together need more than ``share`` of the memory left.

    All ranks of the machine are assumed to need the same memory, and to share one cache.
    """
    lacks: dict[Place, str] = {}
    ranks = machine.local_world_size()
    terms = [term for run in runs for term in run.terms() if term.name != "this process"]
    once = [term for term in terms if term.name == "cache"]
    for place, (available, by) in left.items():
        need = total(terms, place) * (1 if place == "device" else ranks) - total(once, place) * (ranks - 1)
        if need > share * available:
            kind = "" if place == "host" else f"{place} "
            lacks[place] = f"{format_bytes(need)} of {kind}memory, but {by} has {format_bytes(available)} left"
    return lacks


def shortage(runs: Sequence[Run], left: Left) -> Shortage | None:
    """The shortage of loaders that run at the same time; None if the loaders fit."""
    if not (lacks := lacking(runs, left, share=1 - SPARE)):
        return None
    first, fitting = lacks, list(runs)
    while lacks:
        lower = [(k, less) for k, run in enumerate(fitting) if (less := _lower(run, lacks))]
        if not lower:
            fitting = list(runs)  # no settings suffice
            break
        k, less = lower[-1]  # the training loader is the last one to change
        fitting[k] = replace(fitting[k], changed={**fitting[k].changed, **less})
        lacks = lacking(fitting, left, share=1 - SPARE)
    changed = [(f"{run.prefix}{key}", value) for run in fitting for key, value in run.changed.items()]
    overrides = tuple(f"{key}={'null' if value is None else value}" for key, value in changed)
    step = sum(run.costs.step for run in runs)
    of_it = f" A model step needs {format_bytes(step)} of this." if step else ""
    size = f"Lower `{runs[-1].prefix}batch_size`, now {runs[-1].loader.batch_size}"
    remedy = f"Set `{' '.join(overrides)}`, which fits" if overrides else f"{size}: nothing else suffices"
    text = f"this run needs {'; '.join(first.values())}.{of_it} {remedy}. `gpuaug plan` lists the memory of each part."
    return Shortage(text, bool(lacking(runs, left, share=CLEARLY)), overrides)


def _lower(run: Run, lacks: Container[Place]) -> dict[str, Any]:
    """One limit with a lower value that saves memory in a place of ``lacks``; {} if there is none."""
    limits, batch = run.limits, run.costs.image * run.loader.batch_size
    ahead, cache = limits["ahead"], limits["cache.max_bytes"] or 0
    if "host" in lacks and ahead is not None:
        return {"ahead": ahead // 2 if ahead // 2 > 2 * batch else None}
    if "host" in lacks and cache > 8 * batch:
        return {"cache.max_bytes": cache // 2}
    for least in (1, 0):
        for key, place in (("prefetch", "device"), ("num_workers", "shared")):
            if ("host" in lacks or place in lacks) and limits[key] > least:
                return {key: limits[key] - 1}
    return {}
