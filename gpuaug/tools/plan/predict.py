"""How much memory a loader will take, before it takes it: term by term, with the numbers; and what fits this machine.

Counted is what cannot be dropped: memory of the processes (anonymous pages), shared memory and memory files. Pages of
libraries and of files that were read are the system's to take back, and are not. The size of this process is measured,
not predicted: it depends on the versions installed. Everything else is the formula in :func:`predict`, out of the
settings and of a sample of the images' sizes.
"""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from gpuaug import machine
from gpuaug.augment.fused import backend as fused
from gpuaug.batch import EncodedBatch
from gpuaug.decode import dali
from gpuaug.decode.plan import Route, num_parts
from gpuaug.errors import ConfigError, GpuaugError
from gpuaug.files import cache_folder, format_bytes
from gpuaug.loader.loader import Loader
from gpuaug.machine import package_version
from gpuaug.read.reader import Reader

log = logging.getLogger("gpuaug")

Place = Literal["host", "shared", "pinned", "device"]

MIB = 2**20
SAMPLED = 128  # images whose sizes stand for all
# of one worker beside the batch that it packs: what it writes to of its parent's memory (fork), and its own Python with
# torch (the others; where it cannot be measured: Python 3.11, torch 2.13 without CUDA). bench/plan.py has the figures
FORKED, IMPORTED = 13 * MIB, 147 * MIB
SPARE = 0.1  # share of what is available that is left to others, and to what is predicted too low
CLEARLY = 1.15  # of what is available, from which on a run is refused: predictions are within 15 % (tests/test_plan.py)
# Pages of this process that it has written to since its workers were forked: the old ones stay, for all of them once
INHERITED = 4 * MIB
# Python's and torch's own objects, stacks and small buffers, of this process and of each thread that decodes
KEPT, KEPT_BY_THREAD = 8 * MIB, 2 * MIB
# glibc maps what is larger by itself and gives it back at once. Smaller batches that this process makes one after the
# other come from a heap that grows for a dozen of them: by 62 MiB with batches of 9 MiB, by 49 with 15
MAPPED, HEAP = 32 * MIB, 5
# DALI's pixels of a part of a batch are allocated anew each time, in one piece, by one of two threads; smaller ones
# than MAPPED come from these threads' heaps. A piece that fits into none of its holes makes a heap grow by one more:
# after 64 batches 3 to 5 pieces of 7 MiB in each, 2 to 3 of 15 (a heap has 64 MiB at most)
PIECES, PIECES_MOST = 3.5, 36 * MIB
# What one thread decodes in: the image, and for a progressive JPEG its coefficients
AT_WORK = 2.7
BETWEEN = 4  # batches of float32 around an operation of Kornia: what it takes, what it gives, and two of its own
BLEND, PASTE = 4, 2  # batches beside the mixed one: unmixed, two halves of each pair, their sum; or the pasted boxes
# Batches of the largest activation beside all that autograd saves, while a step goes back through it: gradients of it
# and of what follows, and the copies that oneDNN sorts anew; 5.2 to 6.2 measured. Below MAPPED malloc keeps more
BACKWARD, BACKWARD_KEPT = 6, 3
TRIED = 2  # samples of a real forward pass, for a model that cannot be run without data
CONTEXT = 500 * MIB  # of one process on a GPU, kernels of torch and DALI
# DALI on a GPU keeps what it once allocated, image by image: where their sizes vary, an image often finds no free piece
# of its size. Taken over from measurements on a CPU, as no GPU was there: 1.2 times the pixels where all are alike, 2.4
# with random crops (variation 0.5)
POOL, POOL_BY_VARIATION = 1.2, 2.4
READING = 1  # row groups of Parquet beside those that are kept: the one that is read
LONG = 64  # batches of a measurement, where there is time: heaps grow for that long
CHUNK, LEAST, PATIENCE = 16, 32, 2.0  # images looked at together; as many at least, for so many seconds at most
ELEMENT = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that a process and its workers hold and nobody can take back, each page and each file once.

    Counted are anonymous pages (``Pss_Anon``; /proc knows no better measure of what a process owns) and, by their
    files, shared memory and memory files: a batch on its way between two processes is in no one's address space.
    Resident pages of libraries and of mapped data are the system's page cache, which it drops when memory is short;
    RSS would count them as often as there are processes, and PSS would make a run on a warm machine look larger.

    Attributes:
        main: of this process, with all that its workers have inherited.
        workers: what its workers have beside that.
        shared: in /dev/shm.
        files: in unnamed memory files, as the cache and indices are.
    """

    main: int
    workers: int
    shared: int
    files: int

    @property
    def host(self) -> int:
        """All of it."""
        return self.main + self.workers + self.shared + self.files


NOTHING = Held(0, 0, 0, 0)
PARTS = {"main": "this process", "workers": "workers", "shared": "/dev/shm", "files": "memory files"}


@dataclass(frozen=True, slots=True)
class Term:
    """One part of the memory: where it is, how much, and the formula with its numbers.

    ``shared`` memory is what stands in /dev/shm, and takes memory of the host all the same.
    """

    name: str
    place: Place
    bytes: int
    formula: str

    @property
    def part(self) -> str | None:
        """Which of `PARTS` it belongs to; None on a device."""
        if self.place in ("device", "shared"):
            return "shared" if self.place == "shared" else None
        return {"workers": "workers", "cache": "files"}.get(self.name, "main")


@dataclass(frozen=True, slots=True)
class Settings:
    """What of a loader decides its memory, and may be smaller without changing a pixel."""

    num_workers: int
    prefetch: int
    ahead: int | None
    cache: int | None  # bytes; None: no cache

    @staticmethod
    def of(loader: Loader) -> Settings:
        """Those of a loader."""
        cached = loader.pipeline.cache
        return Settings(loader.num_workers, loader.prefetch, loader.ahead, None if cached is None else cached.capacity)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the images of a source are like, by a sample of them.

    Attributes:
        encoded: bytes of an image, mean; encoded_spread: standard deviation.
        decoded: bytes of the pixels that its views are cut from, mean; variation: standard deviation over mean. 0 where
            nothing is decoded: raw pixels are read where they lie.
        whole: bytes of all its pixels, mean.
        largest: bytes of all pixels of the largest image looked at.
        views: (height, width) of each view.
        stored: bytes of one value of a view before augmentation: 1, or that of materialized epochs.
        sampled: images looked at.
    """

    encoded: float
    encoded_spread: float
    decoded: float
    variation: float
    whole: float
    largest: float
    views: Sequence[tuple[int, int]]
    stored: int
    sampled: int

    def batch(self, rows: int, *, batches: int = 1) -> int:
        """Encoded bytes of so many large batches together: the mean and two standard deviations."""
        images = rows * batches
        return int(images * self.encoded + 2 * math.sqrt(images) * self.encoded_spread)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every term, and what they add up to."""

    terms: tuple[Term, ...]
    base: Held  # of this process, measured

    def total(self, place: Place) -> int:
        """Bytes of one place; ``host`` includes what is in /dev/shm and what is pinned."""
        if place == "host":
            return self.base.host + self.more
        return sum(t.bytes for t in self.terms if t.place == place)

    def part(self, name: str) -> int:
        """Bytes of one of `PARTS`, as :class:`Held` counts them."""
        return getattr(self.base, name) + sum(t.bytes for t in self.terms if t.part == name)

    @property
    def more(self) -> int:
        """Bytes of host memory beyond what this process holds already."""
        return sum(t.bytes for t in self.terms if t.place != "device")


# -- predicting -------------------------------------------------------------------------------------------------------


def look(loader: Loader, *, sample: int = SAMPLED) -> Sizes:
    """Look at the headers of some samples, evenly spread over the epoch's order; nothing is decoded."""
    order = loader.epoch_order
    count = min(sample, len(order.order))
    if not count:
        raise ConfigError("there is nothing to plan: the source has no samples.")
    at = torch.linspace(0, len(order.order) - 1, count).round().long()
    # every k-th in one chunk: each is spread over the epoch, and no more than one is in memory
    chunks = [at[k :: -(-count // CHUNK)] for k in range(-(-count // CHUNK))]
    tasks = [(order.order[c], order.repeats[c], torch.ones(len(c), dtype=torch.bool)) for c in chunks]
    pipeline, stored = loader.pipeline, getattr(loader.source, "stored", None)
    reader = Reader(pipeline.reader.source, num_workers=0)
    lengths: list[Any] = []
    areas: list[Any] = [np.zeros(0)]
    wholes: list[Any] = [np.zeros(0)]
    views: list[tuple[int, int]] = []
    begin = time.monotonic()
    for encoded in replace(pipeline, reader=reader).read(tasks, loader.epoch, zero_copy=False):
        length = np.diff(encoded.offsets.numpy())
        if stored is None:
            found: Any = pipeline.stage.read_headers(encoded, loader.epoch).info
            good = np.flatnonzero(found.height * found.width > 0)
            length = length[good] if len(good) else length
            area, whole, views = _areas(loader, encoded, found, good)
            areas.append(area)
            wholes.append(whole)
        lengths.append(length)
        if time.monotonic() - begin > PATIENCE and len(lengths) * CHUNK >= LEAST:
            break
    reader.close()
    element = 1
    if stored is not None:
        views = [tuple(view["size"]) for view in stored.manifest["views"]]
        element = {"uint8": 1, "float32": 4}.get(stored.manifest["store"], 2)
    size_of, area, whole = np.concatenate(lengths), np.concatenate(areas), np.concatenate(wholes)
    return Sizes(
        encoded=float(size_of.mean()),
        encoded_spread=float(size_of.std()),
        decoded=float(area.mean()) if len(area) else 0.0,
        variation=float(area.std() / area.mean()) if len(area) and area.any() else 0.0,
        whole=float(whole.mean()) if len(whole) else 0.0,
        largest=float(whole.max()) if len(whole) else 0.0,
        views=views,
        stored=element,
        sampled=len(size_of),
    )


def warm(loader: Loader) -> None:
    """Decode and augment one sample: what is imported, compiled and opened for it is held from then on."""
    order, pipeline = loader.epoch_order, loader.pipeline
    tasks = [(order.order[:1], order.repeats[:1], torch.ones(1, dtype=torch.bool))]
    reader = Reader(pipeline.reader.source, num_workers=0)
    try:
        for encoded in replace(pipeline, reader=reader).read(tasks, loader.epoch, zero_copy=False):
            made = pipeline.decode(encoded, loader.epoch)
            pipeline.stage.augment(made, dtype=loader.dtype, memory_format=loader.memory_format)
    except (GpuaugError, OSError) as error:
        log.info("one sample could not be made beforehand: %s", error)
    finally:
        reader.close()


def _areas(loader: Loader, encoded: EncodedBatch, found: Any, good: Any) -> tuple[Any, Any, list[tuple[int, int]]]:
    """Bytes of pixels that are decoded for the views of each sample [n], of all its pixels [n], and sizes of views."""
    recipe = loader.augment
    kept = good if len(good) else np.arange(1)  # where nothing can be decoded, a view still has its size
    height, width = found.height[kept].clip(1), found.width[kept].clip(1)
    indices, repeats = encoded.indices.numpy()[kept], encoded.repeats.numpy()[kept]
    drawn = recipe.draw(seed=loader.seed, epoch=loader.epoch, indices=indices, repeats=repeats)
    boxes = recipe.boxes(drawn, height, width)
    views = [b.size for b in boxes]
    if not len(good):
        return np.zeros(0), np.zeros(0), views
    corner = np.stack([b.box[:, :2] for b in boxes]).min(axis=0)
    end = np.stack([b.box[:, :2] + b.box[:, 2:] for b in boxes]).max(axis=0)
    area, whole = (end - corner).astype(np.int64).prod(axis=1) * 3.0, height * width * 3.0
    if loader.device.type == "cuda":
        area = whole  # decoded whole, then sliced
    return np.where(found.route[good] == Route.RAW, 0.0, area), whole, views


def predict(
    loader: Loader,
    sizes: Sizes,
    *,
    settings: Settings | None = None,
    base: Held | None = None,
    worker: int | None = None,
) -> Plan:
    """The memory of a loader, at its largest.

    Args:
        loader: not yet iterated.
        sizes: of its images.
        settings: in place of the loader's own.
        base: what this process holds without batches; None: what it holds now.
        worker: bytes of one worker without batches; None: by its start method, see :func:`fresh_worker`.
    """
    s = settings or Settings.of(loader)
    samples = len(loader.epoch_order.order)
    rows, cuda = min(loader.batch_size, max(1, samples)), loader.device.type == "cuda"
    batches = len(loader)
    encoded = sizes.batch(rows)
    stored = getattr(loader.source, "stored", None) is not None
    terms: list[Term] = []

    def add(name: str, place: Place, value: float, formula: str) -> None:
        if value > 0:
            terms.append(Term(name, place, int(value), formula))

    where: Place = "device" if cuda else "host"
    if s.cache is not None:
        held_there = min(float(s.cache), (sizes.encoded + 24) * len(loader.source))
        add("cache", "host", held_there,
            f"min(max_bytes {format_bytes(s.cache)}, {len(loader.source)} x {sizes.encoded:.0f} B)")  # fmt: skip
    _reading(loader, sizes, s, rows=rows, worker=worker, add=add)
    views = sum(h * w * 3 for h, w in sizes.views)
    shapes = _shapes(sizes.views)
    element = ELEMENT[loader.dtype]
    out = rows * views * element
    flight = _flight(loader, s, batches)
    if not stored and sizes.decoded:
        if cuda:
            pool = POOL + POOL_BY_VARIATION * min(1.0, sizes.variation)
            text = f"pool ({POOL} + {POOL_BY_VARIATION} x variation {sizes.variation:.2f})"
            add(
                "decoded pixels",
                "device",
                pool * _decoded(loader, sizes, rows),
                f"{text} x {rows} x {sizes.decoded:.0f} B",
            )
            add("encoded, copied by DALI", "pinned", 2 * encoded, f"2 x {format_bytes(encoded)}")
            decoder: Any = loader.pipeline.stage.decoder
            if decoder.backend == "dali":  # nvJPEG's buffers, allocated with the pipeline
                each, pinned, threads = dali.DEVICE_PADDING, 2 * dali.PINNED_PADDING, decoder.num_threads
                add("decoder's buffers", "device", threads * each, f"{threads} threads x {format_bytes(each)}")
                add(
                    "decoder's buffers, pinned",
                    "pinned",
                    threads * pinned,
                    f"{threads} threads x {format_bytes(pinned)}",
                )
        else:
            _decoding(loader, sizes, rows=rows, add=add)
    if not stored or (len(sizes.views) > 1 and sizes.stored == 1):  # else they are read where they lie
        name = "views, stored" if stored else "views, uint8"
        add(name, where, flight.decoded * rows * views, f"({flight.said}) x {rows} x {views} B ({shapes})")
    text = f"({s.prefetch} ahead + 1 in the making + 1 in use)"
    if flight.made < s.prefetch + 2:
        text = f"{flight.made} ({'1 in the making + 1 in use' if batches > flight.made else 'all of an epoch'})"
    add("finished batches", where, flight.made * out,
        f"{text} x {rows} x {views} x {element} B = {flight.made} x {format_bytes(out)}")  # fmt: skip
    rest = _rest(loader, samples, rows)
    if rest and not cuda:
        kept = views * ((0 if stored else 1) + element)
        add("last batch, kept", "host", rest * kept, f"{rest} samples x {kept} B: its memory fits no other batch")
    unfused = [] if stored else _unfused(loader)
    if unfused:
        one = rows * max(h * w * 3 for h, w in sizes.views) * 4
        add("between operations", where, BETWEEN * one,
            f"{BETWEEN} x {format_bytes(one)}, a view's float32, for {', '.join(unfused)}")  # fmt: skip
    if loader.mix is not None:
        blends = loader.mix.mixup_alpha > 0
        beside = BLEND if blends else PASTE
        text = "unmixed, both of each pair, and their sum" if blends else "unmixed, and what is pasted"
        add("mix", where, beside * out, f"{beside} x {format_bytes(out)}: {text}")
    _heaps(loader, sizes, s, rows=rows, add=add)
    if cuda:
        add("CUDA context", "device", CONTEXT, f"about {format_bytes(CONTEXT)} per process")
    return Plan(terms=tuple(terms), base=held() if base is None else base)


@dataclass(frozen=True, slots=True)
class _Flight:
    """Batches that exist at the same time: before augmentation, in words, and after it."""

    decoded: int
    said: str
    made: int


def _flight(loader: Loader, s: Settings, batches: int) -> _Flight:
    """As many as the threads of a pass have in hand and between them, when all of them wait."""
    if s.prefetch == 0:
        decoded, said, made = 1, "1 in hand", 2
    elif loader.pipeline.stage.main_thread:
        decoded, said, made = s.prefetch + 2, f"{s.prefetch} ahead + 1 in decode + 1 in augmentation", 2
    else:
        decoded, said, made = 3, "1 in augmentation + 1 waiting + 1 in decode", s.prefetch + 2
    if batches < decoded:
        said = f"all {batches} of an epoch"
    return _Flight(min(batches, decoded), said, min(batches, made))


def _rest(loader: Loader, samples: int, rows: int) -> int:
    """Samples of an epoch's last batch where it is smaller than the others, and larger than what is simply freed."""
    if loader.last != "uneven" or len(loader) < 2 or loader.limit_batches is not None:
        return 0
    ranks = loader.epoch_order.world_size
    return -(-samples // ranks) % rows


def _unfused(loader: Loader) -> list[str]:
    """Names of operations that are no part of a kernel: they take and leave whole batches of float32."""
    views = {id(view.augment): view.augment for view in loader.augment.views}.values()
    names = [
        p.name for a in views for p in a.prepared if a.backend == "kornia" or isinstance(fused.lowered_slots(p), str)
    ]
    return list(dict.fromkeys(names))


def _reading(
    loader: Loader, sizes: Sizes, s: Settings, *, rows: int, worker: int | None, add: Callable[..., None]
) -> None:
    """Workers, and encoded batches wherever they are."""
    batches, reader = len(loader), loader.pipeline.reader
    encoded = sizes.batch(rows)
    groups = _row_groups(loader)
    if s.num_workers:
        method = reader.start_method or multiprocessing.get_start_method()
        each = fresh_worker(method) if worker is None else worker
        text = f"{s.num_workers} workers x ({format_bytes(each)} by {method}"
        text += f" + {format_bytes(groups)} of row groups)" if groups else ")"
        # out of mapped files nothing is copied but into the batch; of the others as many are packed as there are cores
        packing = 0 if getattr(reader.source, "mapped", False) else min(s.num_workers, machine.usable_cpus())
        text += f" + {packing} x {format_bytes(encoded)}, batches being packed" if packing else ""
        inherited = INHERITED if method == "fork" else 0
        text += f" + {format_bytes(inherited)} that this process has changed since" if inherited else ""
        add("workers", "host", s.num_workers * (each + groups) + packing * encoded + inherited, text)
    else:
        text = f"{getattr(loader.source, 'row_groups', 0)} kept, {READING} while one is read"
        add("row groups", "host", groups, text)
    waiting = s.num_workers * reader.prefetch_factor
    # each of these has its encoded images until it is augmented; of the one behind them the headers are read
    behind = _flight(loader, s, batches).decoded + (1 if s.prefetch else 0)
    why = ""
    lent = not s.num_workers and s.ahead is None and bool(getattr(reader.source, "zero_copy", False))

    def of(count: int) -> tuple[int, str]:
        count = min(batches, count)
        return sizes.batch(rows, batches=count), f"x {rows} x {sizes.encoded:.0f} B, and 2 standard deviations"

    if s.ahead is not None:
        flight = _flight(loader, s, batches)
        left = max(0, batches - flight.made - behind + 1)  # one of them is counted in both
        whole = left * rows * sizes.encoded
        add("ahead", "host", min(s.ahead, whole),
            f"min(ahead {format_bytes(s.ahead)}, {left} batches of an epoch {format_bytes(whole)})")  # fmt: skip
        value, text = of(behind)
        add("encoded, behind ahead", "host", value, f"{behind} in decode {text}")
        behind, why = (1 if s.num_workers else 0), " being copied"
    value, text = of(waiting + behind)
    if s.num_workers:
        text = f"({s.num_workers} workers x {reader.prefetch_factor} + {behind} behind them{why}) {text}"
        add("encoded batches", "shared", value, text if waiting + behind <= batches else f"all {batches} {text}")
    elif not lent:  # else they stay in the mapped file
        add("encoded batches", "host", value, f"{behind} in decode {text}")


def _row_groups(loader: Loader) -> float:
    """Bytes of row groups that each process that reads Parquet keeps, and has in hand while it reads the next."""
    source: Any = loader.source
    kept = getattr(source, "row_groups", None)
    return 0.0 if kept is None else (kept + READING) * source.group_bytes()


def _decoded(loader: Loader, sizes: Sizes, rows: int) -> float:
    """Bytes of decoded pixels that so many samples have at a time: all, or two chunks of ``decode.max_bytes``."""
    most = float(loader.decode.max_bytes)
    whole = rows * sizes.whole
    return rows * sizes.decoded * (1.0 if whole <= most else min(1.0, 2 * most / whole))


def _decoding(loader: Loader, sizes: Sizes, *, rows: int, add: Callable[..., None]) -> None:
    """Decoding on the CPU: the pixels of a part of a batch, what malloc keeps of earlier ones, and work in hand."""
    decoder: Any = loader.pipeline.stage.decoder
    threads = decoder.num_threads
    if decoder.backend == "dali":
        parts = num_parts(rows, rows * sizes.whole, threads)
        most = float(loader.decode.max_bytes)
        piece = rows / parts * sizes.decoded * min(1.0, most / max(1.0, rows / parts * sizes.whole))
        text = f"{rows} / {parts} parts x {sizes.decoded:.0f} B"
        add("decoded pixels", "host", piece, text)
        if piece < MAPPED:
            text = f"2 threads x min({PIECES} x {format_bytes(piece)}, {format_bytes(PIECES_MOST)})"
            add("kept of decoded pixels", "host", 2 * min(PIECES * piece, PIECES_MOST), text)
        encoded = sizes.batch(-(-rows // parts))
        add("encoded, copied by DALI", "host", encoded, f"{format_bytes(encoded)}, of a part")
    add("images at work", "host", AT_WORK * threads * sizes.largest,
        f"{AT_WORK} x {threads} threads x {format_bytes(sizes.largest)}, the largest image")  # fmt: skip


def _heaps(loader: Loader, sizes: Sizes, s: Settings, *, rows: int, add: Callable[..., None]) -> None:
    """What malloc keeps of what was given back, in each of its threads' heaps."""
    encoded = sizes.batch(rows)
    lent = s.ahead is None and bool(getattr(loader.pipeline.reader.source, "zero_copy", False))
    if not s.num_workers and not lent and encoded < MAPPED:
        add(
            "kept of encoded batches", "host", HEAP * encoded, f"{HEAP} x {format_bytes(encoded)}, made in this process"
        )
    threads = int(getattr(loader.pipeline.stage.decoder, "num_threads", 1))
    text = f"{format_bytes(KEPT)} + {threads} threads that decode x {format_bytes(KEPT_BY_THREAD)}"
    add("threads, malloc", "host", KEPT + threads * KEPT_BY_THREAD, text)


def _shapes(views: Sequence[tuple[int, int]]) -> str:
    counted: dict[tuple[int, int], int] = {}
    for shape in views:
        counted[shape] = counted.get(shape, 0) + 1
    return " + ".join(f"{n} x {h} x {w} x 3" for (h, w), n in counted.items())


def fresh_worker(method: str) -> int:
    """Bytes of one worker before it has read anything, by start method."""
    return FORKED if method == "fork" else FORKED + imported()


@lru_cache(maxsize=1)
def imported() -> int:
    """Bytes of a Python that has imported what a worker needs, measured by a process of its own, once per versions."""
    versions = [sys.version, torch.__version__, np.__version__, package_version("gpuaug"), sys.executable]
    file = cache_folder() / "imported.json"
    try:
        found = json.loads(machine.read(file) or "{}")
        if isinstance(found, dict) and found.get("versions") == versions and type(found.get("bytes")) is int:
            return int(found["bytes"])
    except ValueError:
        pass
    code = (
        "import gpuaug.read.reader, re;"
        "print(re.search('Pss_Anon: +([0-9]+)', open('/proc/self/smaps_rollup').read())[1])"
    )
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        measured = int(done.stdout) * 1024
    except (OSError, ValueError, subprocess.SubprocessError):
        return IMPORTED
    with suppress(OSError):  # a folder that cannot be written: measured again next time
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({"versions": versions, "bytes": measured}), encoding="utf-8")
        part.replace(file)
    return measured


# -- a training step --------------------------------------------------------------------------------------------------


def step(
    model: nn.Module,
    *,
    views: Sequence[tuple[int, int]],
    rows: int,
    device: torch.device,
    amp: torch.dtype = torch.float32,
    given: torch.dtype = torch.float32,
    states: int = 1,
    parallel: bool = False,
) -> tuple[Term, ...]:
    """What training takes beside its batches: gradients, the optimizer's values, and what a step keeps for going back.

    One forward pass on tensors without data counts what autograd saves; a model that cannot be run so is run on two
    blank samples. Neither its parameters nor its buffers change, nor torch's random generator.

    Args:
        model: on the CPU, its parameters are taken as held already; a device gets them as well.
        views: (height, width) of each view of a batch, all of which go through the model before going back.
        rows: samples of a batch.
        device: of the training.
        amp: what the model computes in, under autocast where that is not float32.
        given: dtype of the loader's images.
        states: values that the optimizer keeps of each parameter: 0 or 1 of SGD, 2 of AdamW.
        parallel: whether DistributedDataParallel copies gradients into buckets.
    """
    where: Place = "device" if device.type == "cuda" else "host"
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    every = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    saved, largest = _saved(model, views=views, rows=rows, device=device, amp=amp)
    terms = [
        Term("model", "device", every, "its parameters and buffers") if where == "device" else None,
        Term("gradients", where, (2 if parallel else 1) * trained,
             f"{'2 x, with buckets, ' if parallel else ''}{format_bytes(trained)} of parameters"),
        Term("optimizer", where, states * trained, f"{states} x {format_bytes(trained)}"),
    ]  # fmt: skip
    if amp is torch.float32 and given is not torch.float32:
        pixels = sum(h * w * 3 for h, w in views)
        terms.append(Term("images, float32", where, rows * pixels * 4, f"{rows} x {pixels} x 4 B"))
    text = f"{format_bytes(saved)}, what autograd saves in a forward pass of {rows} x {len(views)} views"
    terms.append(Term("activations", where, saved, text))
    factor = BACKWARD + (BACKWARD_KEPT if largest < MAPPED and where == "host" else 0)
    text = f"{factor} x {format_bytes(largest)}, the largest of them"
    terms.append(Term("going back", where, factor * largest, text))
    return tuple(t for t in terms if t is not None and t.bytes)


def _saved(
    model: nn.Module, *, views: Sequence[tuple[int, int]], rows: int, device: torch.device, amp: torch.dtype
) -> tuple[int, int]:
    """Bytes of what autograd saves in one forward pass of a batch, and of the largest tensor among it."""
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode

        mode = FakeTensorMode()
        own: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
        state: dict[str, Tensor] = {n: mode.from_tensor(t) for n, t in own}
        with mode:
            return _forward(model, state, views, rows, amp)
    except Exception as error:  # whatever a model does that needs values
        log.info("memory of a step: measured on %d samples (%s: %.200s)", TRIED, type(error).__name__, error)
    state = {**dict(model.named_parameters()), **{n: t.clone() for n, t in model.named_buffers()}}
    try:
        saved, largest = _forward(model, state, views, TRIED, amp)
    except Exception as error:
        log.warning("memory of a step is not known: the model cannot be run (%s: %.200s)", type(error).__name__, error)
        return 0, 0
    return saved * rows // TRIED, largest * rows // TRIED


def _forward(
    model: nn.Module, state: Mapping[str, Tensor], views: Sequence[tuple[int, int]], rows: int, amp: torch.dtype
) -> tuple[int, int]:
    given = [torch.zeros(rows, 3, *view) for view in views]
    known = {t.untyped_storage()._cdata for t in [*state.values(), *given]}
    saved: dict[int, torch.UntypedStorage] = {}  # held, so that no number of a storage is given twice

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in known:
            saved[storage._cdata] = storage
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    training = model.training
    with torch.random.fork_rng(devices=[]), hooks, torch.autocast("cpu", dtype=amp, enabled=amp is not torch.float32):
        model.train()
        try:
            results = [torch.func.functional_call(model, dict(state), (view,)) for view in given]
        finally:
            model.train(training)
    del results
    sizes = [storage.nbytes() for storage in saved.values()]
    return sum(sizes), max(sizes, default=0)


# -- what there is ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes that are left, and what says so; None: not known."""

    host: int | None
    host_by: str
    shared: int | None
    device: int | None = None

    @staticmethod
    def here(device: torch.device | None = None) -> Machine:
        """What this machine, or this container, has left now."""
        host, host_by = machine.memory_left() or (None, "")
        shm = machine.shared_memory()
        free = torch.cuda.mem_get_info(device)[0] if device is not None and device.type == "cuda" else None
        return Machine(host, host_by, shm and shm[1], free)


@dataclass(frozen=True, slots=True)
class Shortage:
    """What a run needs beyond what this machine has left.

    Attributes:
        text: the numbers, and what to set.
        clear: whether that is more than a prediction is ever wrong by.
        overrides: with which it would fit; () if only a smaller batch helps.
    """

    text: str
    clear: bool
    overrides: tuple[str, ...]


def shortage(
    loader: Loader,
    *,
    here: Machine | None = None,
    sizes: Sizes | None = None,
    beside: Sequence[Loader] = (),
    also: Callable[[Sizes], Sequence[Term]] | None = None,
    prefix: str = "",
) -> Shortage | None:
    """Whether a loader needs more memory than this machine has left; None where it fits. Nothing of it changes.

    All ranks of a machine are taken to be alike.

    Args:
        loader: not yet iterated.
        here: what the machine has left.
        sizes: of the images; None: looks at some.
        beside: loaders that will run at the same time; not yet iterated.
        also: what else will be held then, given the sizes of this loader's images.
        prefix: of the loader's keys in overrides, as ``val.``.
    """
    found = sizes or look(loader)
    more = Plan(terms=() if also is None else tuple(also(found)), base=NOTHING)
    here = here or Machine.here(loader.device)  # only now: looking has imported and opened what decodes
    ranks = machine.local_world_size()
    others = [predict(other, look(other), base=NOTHING) for other in beside]

    def lacks(settings: Settings, *, share: float) -> dict[str, str]:
        planned = [predict(loader, found, settings=settings, base=NOTHING), *others, more]
        needs: list[tuple[Place, str, int, int | None, str]] = [
            ("host", "", sum(p.more * ranks - _once(p, ranks) for p in planned), here.host, here.host_by),
            ("shared", "shared ", sum(p.total("shared") for p in planned) * ranks, here.shared, "/dev/shm"),
            ("device", "device ", sum(p.total("device") for p in planned), here.device, "the device"),
        ]
        return {
            place: f"{format_bytes(need)} of {kind}memory, and {by} has {format_bytes(left)}"
            for place, kind, need, left, by in needs
            if left is not None and need > share * left
        }

    wanted = Settings.of(loader)
    first = lacks(wanted, share=1 - SPARE)
    if not first:
        return None
    smaller: Settings | None = wanted
    while smaller is not None and (lacking := lacks(smaller, share=1 - SPARE)):
        smaller = _smaller(smaller, lacking, batch=found.batch(loader.batch_size))
    overrides = () if smaller is None else tuple(prefix + text for text in _overrides(wanted, smaller))
    step = max(more.more, more.total("device"))
    of_it = f" A step of the model takes {format_bytes(step)} of it." if step else ""
    remedy = f"Make `{prefix}batch_size` smaller, now {loader.batch_size}: nothing else suffices"
    if overrides:
        remedy = f"Set `{' '.join(overrides)}`, which fits"
    text = f"this run needs {'; '.join(first.values())}.{of_it} {remedy}; `gpuaug plan` shows what takes it."
    return Shortage(text, bool(lacks(wanted, share=CLEARLY)), overrides)


def _once(planned: Plan, ranks: int) -> int:
    """What all ranks of a machine hold together once: the cache."""
    return sum(t.bytes for t in planned.terms if t.name == "cache") * (ranks - 1)


def _smaller(now: Settings, lacking: Container[str], *, batch: int) -> Settings | None:
    """The next smaller settings that help where memory lacks; None where there are none.

    Args:
        now: what is too large.
        lacking: where: host, shared, device.
        batch: bytes of an encoded batch.
    """
    host = "host" in lacking
    if host and now.ahead is not None:
        return replace(now, ahead=now.ahead // 2 if now.ahead // 2 > 2 * batch else None)
    if host and now.cache is not None and now.cache > 8 * batch:
        return replace(now, cache=now.cache // 2)
    prefetch = host or "device" in lacking
    workers = host or "shared" in lacking
    for least in (1, 0):
        if prefetch and now.prefetch > least:
            return replace(now, prefetch=now.prefetch - 1)
        if workers and now.num_workers > least:
            return replace(now, num_workers=now.num_workers - 1)
    return None


def _overrides(before: Settings, after: Settings) -> list[str]:
    """The words of a command line that make one out of the other."""
    keys = {"ahead": "ahead", "cache": "cache.max_bytes", "prefetch": "prefetch", "num_workers": "num_workers"}
    values = {key: getattr(after, name) for name, key in keys.items() if getattr(before, name) != getattr(after, name)}
    return [f"{key}={'null' if value is None else value}" for key, value in values.items()]


# -- measuring --------------------------------------------------------------------------------------------------------


def held() -> Held:
    """What this process and its workers hold now; zero where /proc does not say."""
    pids = [os.getpid(), *(c.pid for c in multiprocessing.active_children() if c.pid is not None)]
    looks = [_anonymous(pid) for pid in pids]  # each once: it grows meanwhile
    alone, every = looks[0][0], sum(part for _, part in looks)
    shared = shared_by(pids, where=("/dev/shm/",))
    return Held(min(alone, every), max(0, every - alone), shared, shared_by(pids, where=("/memfd:",)))


def held_by_all() -> int:
    """Bytes of :func:`held` in all."""
    return held().host


def _anonymous(pid: int) -> tuple[int, int]:
    """Anonymous memory of a process: all that it sees, and its part where pages are shared (PSS)."""
    found = {"Anonymous:": 0, "Pss_Anon:": 0}
    for line in (machine.read(f"/proc/{pid}/smaps_rollup") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in found:
            found[name] = int(value.split()[0]) * 1024
    return found["Anonymous:"], found["Pss_Anon:"]


def shared_by(pids: Sequence[int], *, where: tuple[str, ...] = ("/dev/shm/", "/memfd:")) -> int:
    """Bytes of shared memory and memory files that these processes have open, each once."""
    found: dict[tuple[int, int], int] = {}
    for pid in pids:
        try:
            names = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for name in names:
            path = f"/proc/{pid}/fd/{name}"
            try:
                if os.readlink(path).startswith(where):
                    status = os.stat(path)
                    found[status.st_dev, status.st_ino] = status.st_blocks * 512
            except OSError:
                continue
    return sum(found.values())


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that was held at any time, in bytes; and what it was made of when ``host`` was highest."""

    host: int
    shared: int
    device: int
    batches: int
    parts: Held


def measure(loader: Loader, *, seconds: float = 30.0) -> Peak:
    """Run the loader for a while, now and then so slowly that everything fills up, and see what it takes at most."""
    looks: list[Held] = [held()]
    most = {"shared": 0, "device": 0}
    done = threading.Event()

    def watch() -> None:
        while True:
            now = held()
            if now.host > looks[0].host:
                looks[0] = now
            most["shared"] = max(most["shared"], now.shared)
            if loader.device.type == "cuda":
                free, total = torch.cuda.mem_get_info(loader.device)
                most["device"] = max(most["device"], total - free)
            if done.wait(0.03):
                return

    watcher = threading.Thread(target=watch, name="gpuaug-watch", daemon=True)
    watcher.start()
    filled = 3 * (loader.prefetch + 2) + 2
    wanted = max(filled + 2, LONG)
    full = loader.pipeline.cache is not None or loader.ahead is not None
    begin, count = time.perf_counter(), 0
    try:
        while time.perf_counter() - begin < seconds and (count < wanted or (full and loader.epoch == 0)):
            before = count
            for batch in loader:
                count += 1
                if count in (2, 6, filled, wanted - 2):
                    _settle(loader, min(0.25 * seconds, begin + seconds - time.perf_counter()))
                del batch
                if time.perf_counter() - begin > seconds or (not full and count >= wanted):
                    break
            if count == before:
                break
    finally:
        done.set()
        watcher.join()
    return Peak(looks[0].host, most["shared"], most["device"], count, looks[0])


def _settle(loader: Loader, seconds: float) -> None:
    """Wait until the memory in use grows no more."""
    end, last, calm = time.perf_counter() + seconds, 0, 0.0
    while time.perf_counter() < end and calm < 4:
        time.sleep(0.15)
        now = held_by_all()
        full = loader.prefetch_level >= loader.prefetch or calm >= 3
        calm = calm + 1 if now <= 1.01 * last and full else calm + 0.25 if now <= 1.01 * last else 0.0
        last = max(last, now)


def one_worker(loader: Loader) -> int | None:
    """Bytes that one more worker takes on this machine, measured; None where there are none or it cannot be told."""
    if not loader.num_workers or not Path("/proc/self/smaps_rollup").exists():
        return None
    reader: Any = loader.pipeline.reader
    tasks = [(i[:2], r[:2], v[:2]) for i, r, v in [loader.epoch_order[0]]] * 8
    before = held_by_all()
    probe = Reader(reader.source, num_workers=1, timeout=reader.timeout, start_method=reader.start_method)
    try:
        batches = replace(loader.pipeline, reader=probe).read(tasks, loader.epoch)
        for _ in range(4):
            next(batches)
        return max(MIB, held_by_all() - before)
    finally:
        probe.close()
