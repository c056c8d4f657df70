"""`gpuaug plan`: runs a loader in a child process for a short time, and reports the memory that each stage needed.

:class:`gpuaug.tools.memory.Usage` says which memory counts.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from omegaconf import OmegaConf

from gpuaug import checks, machine
from gpuaug.augment.mosaic import STRIDE
from gpuaug.batch import EncodedBatch
from gpuaug.errors import GpuaugError
from gpuaug.files import format_bytes
from gpuaug.loader.batch import Batch
from gpuaug.loader.loader import Loader
from gpuaug.tools import child
from gpuaug.tools.memory import Usage, usage
from gpuaug.tools.preview.originals import read
from gpuaug.tools.report import Report
from gpuaug.tools.request import Keys, Request, count_batches

Place = Literal["host", "device"]
Left = dict[Place, tuple[int, str]]  # bytes left in each known place, and what limits them
PLACES: tuple[Place, ...] = ("host", "device")
# DALI's initial size of nvJPEG's buffers in bytes; each thread has two pinned buffers
DEVICE_PADDING, PINNED_PADDING = 16 << 20, 8 << 20
# for `python -c`: with `python -m`, spawned workers would run this file again
CODE = "from gpuaug.tools.plan.command import rehearsal; rehearsal()"


@dataclass(frozen=True, kw_only=True)
class Settings(Keys):
    """The keys of `gpuaug plan`."""

    seconds: float = 15.0  # duration of a rehearsal after its first batch

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number("seconds", self.seconds, 1.0, 3600.0)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The memory of one stage."""

    stage: str
    place: Place
    bytes: int
    text: str  # where the number comes from
    key: str = ""  # the setting that makes it smaller


def main(request: Request) -> int:
    settings = Settings(**request.settings())
    report = Report(file=settings.json)
    config = request.loader()
    with request.build(config) as loader:
        count_batches(loader)
        left = memory_left(loader.device)
        limit = left["host"][0] if "host" in left else math.inf
        whole = OmegaConf.to_container(config, resolve=True)
        peak = rehearse({"config": whole, "trust": request.trust, "seconds": settings.seconds, "limit": limit})
        if peak is None:
            here = " and ".join(f"{format_bytes(size)} ({by})" for size, by in left.values())
            text = (
                f"no: the rehearsal needed more than is left: {here}. Lower `batch_size`, `prefetch` or `num_workers`"
            )
            report.add("fits", False, text)
        else:
            _say(report, loader, peak, left, prefix=request.prefix)
    report.write()
    return 0


def _say(report: Report, loader: Loader, peak: Peak, left: Left, *, prefix: str) -> None:
    listed = stages(loader, peak)
    if peak.bad:
        images = peak.batches * loader.batch_size
        text = f"{peak.bad} of {images} images could not be read or decoded, so more memory may be needed; "
        report.add("faults", peak.bad, f"{text}to list them, train with `faults.policy=blank faults.file=FILE`")
    report.add("stages", [asdict(each) for each in listed], _table(listed))
    ranks = machine.local_world_size()
    for place in PLACES:
        if needed := total(listed, place):
            text = f"{format_bytes(needed)}{f' in each of {ranks} ranks' if ranks > 1 else ''}"
            if place in left:
                available, by = left[place]
                text += f", {format_bytes(available)} left here{f' ({by})' if place == 'host' else ''}"
            report.add(f"{place}_memory", needed, text)
    few = peak.batches <= loader.prefetch + 2 and peak.batches < len(loader)
    text = f"{peak.batches} batches{', too few to fill all queues: raise `seconds`' if few else ''}"
    report.add("rehearsal", peak.batches, f"{text}; pages of libraries and files are not counted")
    text = f"{format_bytes(total(peak.cuda, 'device'))} on a GPU with DALI: computed, and not compared with any GPU yet"
    report.add("on_cuda", [asdict(each) for each in peak.cuda], text + _table(peak.cuda))
    short = shortage(listed, left, prefix=prefix)
    report.add("fits", not short, f"no: {short}" if short else "yes")


def _table(listed: Sequence[StageMemory]) -> str:
    lines = [f"{each.stage:<20} {each.place:<7} {format_bytes(each.bytes):>11}   {each.text}" for each in listed]
    return "\n".join(["", *lines])


def stages(loader: Loader, peak: Peak) -> list[StageMemory]:
    """The memory of a run by stage: what a rehearsal measured, and what grows later."""
    workers, prefetch = loader.num_workers, loader.prefetch
    there: Place = "host" if loader.device.type == "cpu" else "device"
    made = min(len(loader), prefetch + 2)
    waiting = max(0, made - min(peak.batches, peak.ready + 2))  # batches that did not wait at the same time
    tiles = max(0, _tiles(loader) - peak.batches * loader.batch_size) * _tile_bytes(loader)
    work = peak.most.main + peak.most.files - peak.base.main - peak.base.files
    every = [
        StageMemory("start", "host", peak.base.host, "this process before its first batch: Python, torch, the source"),
        StageMemory("read: workers", "host", peak.most.workers, f"processes: {workers}", "num_workers"),
        StageMemory("read: bytes", "host", peak.most.encoded, "encoded batches, read ahead by the workers",
                    "num_workers"),
        StageMemory("decode, augment", "host", max(0, work),
                    f"{prefetch} prefetched + 1 in preparation + 1 in use; with freed memory that malloc keeps",
                    "prefetch"),
        StageMemory("prefetch", there, waiting * peak.batch,
                    f"{waiting} more batches of {format_bytes(peak.batch)}, if the model is the limit", "prefetch"),
        StageMemory("tiles", there, tiles, "tiles of earlier batches for mosaics that the rehearsal did not keep yet",
                    "augment.combine.mosaic.window"),
        StageMemory("device", "device", peak.device, "without the CUDA context", "batch_size"),
    ]  # fmt: skip
    return [each for each in every if each.bytes]


def on_cuda(loader: Loader, batch: int) -> list[StageMemory]:
    """What this run needs on CUDA for its images: computed from a few of them. ``batch``: bytes of a finished batch."""
    headers, decoder = loader.pipeline.read_headers(_some_images(loader), loader.epoch), loader.pipeline.decoder
    info, views, threads = headers.info, headers.windows, loader.pipeline.decoders.num_threads
    assert info is not None

    stored, channels = decoder.stored, 3 if decoder.stored is None else decoder.stored.channels
    each = channels * (1 if stored is None else np.dtype(stored.dtype).itemsize)  # bytes of a pixel

    def pixels(sides: Any, count: int = loader.batch_size) -> int:  # bytes of a batch of images, whose sides are [n, 2]
        return each * count * round(sides.prod(axis=1).mean())

    count = loader.batch_size  # images as large as these in a batch
    if loader.tokens is not None:
        count = -(-loader.tokens.tokens // loader.augment.at(loader.epoch).views[0].augment.crop.length)
    decoded = min(pixels(info.stored), loader.decode.max_bytes)
    resized = sum(pixels(view.window[:, 2:]) + pixels(view.resized, count) for view in views)
    canvases = [each * count * math.prod(view.size) for view in views]
    tiles = _tiles(loader) * _tile_bytes(loader)
    made = min(len(loader), loader.prefetch + 2)
    decoders = 2 if stored is None and loader.prefetch else 1
    decoding = [
        StageMemory("nvJPEG", "device", threads * DEVICE_PADDING, f"buffers of {threads} threads"),
        StageMemory("nvJPEG", "host", 2 * threads * PINNED_PADDING, f"pinned buffers of {threads} threads"),
        StageMemory("decode", "device", decoders * decoded, f"{decoders * loader.batch_size} whole images"),
        StageMemory("resize", "device", decoders * resized, "the windows of all views, before and after resizing"),
    ]
    held = f"DALI's {decoders} results, and {2 * decoders + 1} batches from decoding to augmenting"
    return [
        *(decoding if stored is None else ()),  # the CPU decodes stored values
        StageMemory("views", "device", (3 * decoders + 1) * sum(canvases), held),
        *([StageMemory("tiles", "device", tiles, "tiles of earlier batches for mosaics")] if tiles else ()),
        StageMemory("augment", "device", 4 * channels * max(canvases) // each, "the largest view as float32"),
        StageMemory("batches", "device", made * batch, f"{made} finished batches"),
    ]


def _tiles(loader: Loader) -> int:
    """How many tiles of earlier batches a pass keeps for mosaics."""
    ops = [op for _, op in loader.augment.at(loader.epoch).combine.showing]
    window = STRIDE * max((op.window for op in ops if op.partners == "window"), default=0)
    if not window:
        return 0
    ranks, most = loader.epoch_order.world_size, 1 + sum(op.tiles - 1 for op in ops)
    # a batch stays, with the fresh partners that it has, as long as one of its tiles is needed
    fresh = sum(op.tiles - 1 for op in ops if op.partners == "fresh")
    held = (window if STRIDE % ranks else window // ranks) + fresh * window // ranks  # else partners are on all ranks
    return min(held + 2 * most * loader.batch_size, (1 + fresh) * ranks * len(loader) * loader.batch_size)


def _tile_bytes(loader: Loader) -> int:
    return 3 * math.prod(loader.augment.at(loader.epoch).views[0].augment.crop.size) if _tiles(loader) else 0


def total(listed: Sequence[StageMemory], place: Place) -> int:
    """Total bytes of one place."""
    return sum(each.bytes for each in listed if each.place == place)


def shortage(listed: Sequence[StageMemory], left: Left, *, prefix: str = "") -> str:
    """A message if a run with these stages needs more than 90 % of the memory left, else an empty string.

    All ranks of the machine are assumed to need the same memory. ``prefix`` is the start of the loader's keys.
    """
    ranks, lacks = machine.local_world_size(), list[str]()
    needed = [each for each in listed if each.stage != "start"]
    for place, (available, by) in left.items():
        need = total(needed, place) * (1 if place == "device" else ranks)
        if need > 0.9 * available:  # the rest is for other processes and wrong estimates
            kind = "" if place == "host" else f"{place} "
            lacks.append(f"{format_bytes(need)} of {kind}memory, but {by} has {format_bytes(available)} left")
    if not lacks:
        return ""
    largest = max(needed, key=lambda each: each.bytes)
    keys = " or ".join(f"`{prefix}{key}`" for key in dict.fromkeys((largest.key, "batch_size")))
    return (
        f"this run needs {'; '.join(lacks)}. The largest stage, `{largest.stage}`, takes "
        f"{format_bytes(largest.bytes)}. Lower {keys}."
    )


@dataclass
class Peak:
    """Peak memory of a run in bytes, and what the run was made of."""

    base: Usage = field(default_factory=usage)  # before the first batch
    most: Usage = field(default_factory=usage)  # at the peak of host memory
    device: int = 0  # growth since the beginning of the run
    ready: int = 0  # largest number of ready batches
    batches: int = 0  # number of all batches
    batch: int = 0  # the images, labels and targets of a finished batch
    bad: int = 0  # images that could not be read or decoded
    cuda: Sequence[StageMemory] = ()  # of `on_cuda`


def measure(loader: Loader, *, seconds: float, limit: float = math.inf) -> Peak:
    """Run a loader that has not been iterated yet, and measure its peak memory.

    No batch is requested later than ``seconds`` after the first batch. If the host memory grows by more than ``limit``
    bytes, this process and its workers are killed.
    """
    peak, cuda, done, lock = Peak(), loader.device.type == "cuda", threading.Event(), threading.Lock()
    before = torch.cuda.mem_get_info(loader.device)[0] if cuda else 0

    def record() -> None:
        with lock:
            peak.most = max(peak.most, usage(), key=lambda each: each.host)
            peak.ready = max(peak.ready, loader.prefetch_level)
            if cuda:
                peak.device = max(peak.device, before - torch.cuda.mem_get_info(loader.device)[0])

    def sample() -> None:
        while not done.wait(0.03):
            record()
            if peak.most.host - peak.base.host > limit:
                os.killpg(os.getpid(), signal.SIGKILL)

    sampler = threading.Thread(target=sample, name="gpuaug-memory", daemon=True)
    sampler.start()
    filled, end = 3 * (loader.prefetch + 2) + 2, math.inf
    wanted = max(filled + 2, 64)  # malloc's heaps grow until the 64th batch

    def pause(batches_left: int) -> None:
        """Let the queues fill up: at most 30 % of the time, and on a quick machine 10 %."""
        began = time.monotonic()
        while (spent := time.monotonic() - began) < 0.3 * seconds and began + spent < end:
            if spent > 0.1 * seconds and loader.prefetch_level >= min(loader.prefetch, batches_left):
                break
            time.sleep(0.03)
        record()

    try:
        while peak.batches < wanted and time.monotonic() < end:
            for number, batch in enumerate(loader, start=1):
                peak.batches += 1
                peak.batch = max(peak.batch, _bytes_of(batch))
                end = min(end, time.monotonic() + seconds)
                if peak.batches in (2, filled, wanted - 2):
                    pause(len(loader) - number)
                del batch
                if peak.batches == wanted or time.monotonic() > end:
                    break
    finally:
        done.set()
        sampler.join()
    peak.bad = loader.faults.count
    return peak


def rehearse(job: Mapping[str, Any]) -> Peak | None:
    """Run a job of :func:`rehearsal` in a child process; None if the job needed more memory than is left."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}  # the child is not a rank
    timeout = 60.0 + 2 * job["seconds"]  # 60 s for imports and opening the source
    ended = child.run((sys.executable, "-c", CODE), timeout=timeout, job=job, environment=environment)
    answer = ended.answer or {}
    if ended.status is None:
        raise GpuaugError("the rehearsal of this run gave no answer in time. Is the source slow to open?")
    if not answer and ended.status == -signal.SIGKILL:  # by itself above `limit`, or by the kernel
        return None
    if "peak" not in answer:
        raise GpuaugError(answer.get("error") or f"the rehearsal of this run failed: {ended.errors.strip()[-1000:]}")
    values = answer["peak"]
    cuda = [StageMemory(**each) for each in values["cuda"]]
    return Peak(**{**values, "base": Usage(**values["base"]), "most": Usage(**values["most"]), "cuda": cuda})


def rehearsal() -> None:
    """In the child process: run the job on stdin, and print the answer as the last line. Job and answer are JSON."""
    job = json.load(sys.stdin)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, the kernel kills this process

    config = job["config"]
    faults = {**(config.get("faults") or {"_target_": "gpuaug.Faults"}), "policy": "blank", "file": None, "max": None}
    config |= {"faults": faults}
    _keep_largest(config.get("augment"))
    try:
        with Request(command="plan", trust=tuple(job["trust"])).build(config) as loader:
            set_largest_epoch(loader)
            peak = measure(loader, seconds=job["seconds"], limit=job["limit"])
            peak.cuda = on_cuda(loader, peak.batch)
            answer: dict[str, Any] = {"peak": asdict(peak)}
    except GpuaugError as error:
        answer = {"error": str(error)}
    print(f"\n{json.dumps(answer)}", flush=True)


def _keep_largest(recipe: Any) -> None:
    """Let a recipe draw only the largest of its sizes, and make each batch as large as its crop allows."""
    if isinstance(recipe, dict) and recipe.get("pad") == "batch":
        most = recipe["size"] if isinstance(recipe["size"], list) else [recipe["size"]] * 2
        recipe |= {"size": [-(-n // recipe["multiple"]) * recipe["multiple"] for n in most], "pad": "size"}
        recipe["multiple"] = 1
    for name, value in recipe.items() if isinstance(recipe, dict) else ():
        if name == "sizes" and value:
            value |= {"choose": [max(value["choose"], key=lambda x: np.prod(x) if isinstance(x, list) else x * x)]}
            value["epochs"] = None
        else:
            _keep_largest(value)


def set_largest_epoch(loader: Loader) -> None:
    """Set the epoch in which 16 images of this one are largest."""
    epochs = [loader.epoch, *(epoch for epoch in loader.augment.schedule if epoch > loader.epoch)]
    if len(epochs) == 1:
        return
    encoded = _some_images(loader)

    def pixels(epoch: int) -> int:
        windows = loader.pipeline.read_headers(encoded, epoch).windows
        return sum(height * width for height, width in (window.size for window in windows))

    loader.set_epoch(max(epochs, key=pixels))


def _some_images(loader: Loader) -> EncodedBatch:
    """16 samples of this epoch, or all if there are fewer."""
    numbers = loader.epoch_order.epoch.indices
    some = torch.linspace(0, len(numbers) - 1, min(16, len(numbers))).round().long()
    return read(loader, numbers[some].tolist(), epoch=loader.epoch)


def _bytes_of(batch: Batch) -> int:
    images = batch.images if isinstance(batch.images, list) else [batch.images]
    targets = batch.targets if isinstance(batch.targets, list) else [batch.targets]
    moved = [tensor for view in targets if view is not None for tensor in view.on_device]
    return sum(tensor.nbytes for tensor in [*images, *moved])


def memory_left(device: torch.device) -> Left:
    """The memory that is left now on this machine or in this container. Unknown places are missing."""
    left: Left = {}
    if (host := machine.memory_left()) is not None:
        left["host"] = host
    if device.type == "cuda":
        left["device"] = torch.cuda.mem_get_info(device)[0], "the device"
    return left
