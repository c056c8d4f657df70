"""How much memory a loader will take, before it takes it: term by term, with the numbers; and what fits this machine.

Counted is what cannot be dropped: memory of the processes (anonymous pages), shared memory and memory files. Pages of
libraries and of files that were read are the system's to take back, and are not. The size of this process is measured,
not predicted: it depends on the versions installed. Everything else is the formula in :func:`predict`, out of the
settings and of a sample of the images' sizes.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from gpuaug import distributed, machine, size
from gpuaug.errors import ConfigError
from gpuaug.loader import Loader
from gpuaug.read import Reader
from gpuaug.source.cache import RamCache

log = logging.getLogger("gpuaug")

Place = Literal["host", "shared", "pinned", "device"]

MIB = 2**20
SAMPLED = 48  # images whose sizes stand for all
# of one worker: what it writes to of its parent's memory (fork), or its own Python with torch; measured, CPU build
WORKER = {"fork": 15 * MIB, "forkserver": 150 * MIB, "spawn": 150 * MIB}
SPARE = 0.05  # share of what is available that is left to others
KEPT = 48 * MIB  # what threads and their malloc do not give back between batches and epochs; measured
# glibc maps what is larger by itself and gives it back at once; what is smaller comes from a heap that keeps it.
# Measured with 8 views of 3 to 18 MiB: 170 MiB more than with MALLOC_MMAP_THRESHOLD_=1000000, growing for 8 batches
MAPPED, HEAP = 32 * MIB, 2
CONTEXT = 500 * MIB  # of one process on a GPU, kernels of torch and DALI
# DALI keeps what it once allocated, image by image: where their sizes vary, an image often finds no free piece of its
# size. Measured: 1.2 times the pixels where all are alike, 2.4 with random crops (variation 0.5)
POOL, POOL_BY_VARIATION = 1.2, 2.4
ELEMENT = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}


@dataclass(frozen=True, slots=True)
class Term:
    """One part of the memory: where it is, how much, and the formula with its numbers.

    ``shared`` memory is what stands in /dev/shm, and takes memory of the host all the same.
    """

    name: str
    place: Place
    bytes: int
    formula: str


@dataclass(frozen=True, slots=True)
class Settings:
    """What of a loader decides its memory, and can be made smaller without changing a pixel."""

    num_workers: int
    prefetch: int
    ahead: int | None
    cache: int | None  # bytes; None: no cache

    @staticmethod
    def of(loader: Loader) -> Settings:
        """Those of a loader."""
        cached = loader._cached
        return Settings(loader.num_workers, loader.prefetch, loader.ahead, None if cached is None else cached.capacity)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the images of a source are like, by a sample of them.

    Attributes:
        encoded: bytes of an image, mean; encoded_spread: standard deviation.
        decoded: bytes of the pixels that its views are cut from, mean; variation: standard deviation over mean.
        whole: bytes of all its pixels, mean.
        views: (height, width) of each view.
        keeps_labels: whether the labels of a finished batch keep its encoded bytes in memory.
        sampled: images looked at.
    """

    encoded: float
    encoded_spread: float
    decoded: float
    variation: float
    whole: float
    views: Sequence[tuple[int, int]]
    keeps_labels: bool
    sampled: int

    def batch(self, rows: int) -> int:
        """Encoded bytes of a large batch: the mean and two standard deviations."""
        return int(rows * self.encoded + 2 * math.sqrt(rows) * self.encoded_spread)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every term, and what they add up to."""

    terms: tuple[Term, ...]
    base: int  # of this process, measured

    def total(self, place: Place) -> int:
        """Bytes of one place; ``host`` includes what is in /dev/shm and what is pinned."""
        if place == "host":
            return self.base + sum(t.bytes for t in self.terms if t.place != "device")
        return sum(t.bytes for t in self.terms if t.place == place)

    @property
    def more(self) -> int:
        """Bytes of host memory beyond what this process holds already."""
        return self.total("host") - self.base


# -- predicting -------------------------------------------------------------------------------------------------------


def look(loader: Loader, *, sample: int = SAMPLED) -> Sizes:
    """Look at the headers of some samples, evenly spread over the epoch's order; nothing is decoded."""
    ordered = loader._ordered()
    count = min(sample, len(ordered))
    if not count:
        raise ConfigError("there is nothing to plan: the source has no samples.")
    at = torch.linspace(0, len(ordered) - 1, count).round().long()
    indices, repeats = ordered.indices[at], ordered.repeats[at]
    task = indices, repeats, torch.ones(count, dtype=torch.bool)
    reader = Reader(loader._live.reader.source, num_workers=0)
    encoded = next(iter(reader.batches([task], numbers=loader._numbers(loader.epoch))))
    stages: Any = loader._stages
    seen = stages.decoder.look(encoded)
    good = np.flatnonzero(seen.height * seen.width > 0)
    lengths = np.diff(encoded.offsets.numpy())[good] if len(good) else np.diff(encoded.offsets.numpy())
    kept = good if len(good) else np.arange(1)  # where nothing can be decoded, a view still has its size
    height, width = seen.height[kept].clip(1), seen.width[kept].clip(1)
    drawn = stages.augment.draw(seed=stages.seed, epoch=0, indices=indices.numpy()[kept], repeats=repeats.numpy()[kept])
    boxes = stages.augment.boxes(drawn, height, width)
    area = np.zeros(len(kept))  # what is stored augmented is not decoded
    if boxes:
        corner = np.stack([b.box[:, :2] for b in boxes]).min(axis=0)
        end = np.stack([b.box[:, :2] + b.box[:, 2:] for b in boxes]).max(axis=0)
        area = (end - corner).astype(np.int64).prod(axis=1) * 3.0
    whole = height * width * 3.0
    if loader.device.type == "cuda":
        area = whole  # decoded whole, then sliced
    blob = encoded.labels
    keeps = blob is not None and blob.untyped_storage().nbytes() > blob.nbytes and loader.device.type == "cpu"
    return Sizes(
        encoded=float(lengths.mean()) if len(lengths) else 0.0,
        encoded_spread=float(lengths.std()) if len(lengths) else 0.0,
        decoded=float(area.mean()) if len(good) else 0.0,
        variation=float(area.std() / area.mean()) if len(good) else 0.0,
        whole=float(whole.mean()) if len(good) else 0.0,
        views=[b.size for b in boxes],
        keeps_labels=keeps and loader.mix is None,
        sampled=len(good),
    )


def predict(
    loader: Loader,
    sizes: Sizes,
    *,
    settings: Settings | None = None,
    base: int | None = None,
    worker: int | None = None,
) -> Plan:
    """The memory of a loader, at its largest.

    Args:
        loader: not yet iterated.
        sizes: of its images.
        settings: in place of the loader's own.
        base: bytes that this process holds without batches; None: what it holds now.
        worker: bytes of one worker; None: what was measured elsewhere for its start method.
    """
    s = settings or Settings.of(loader)
    rows, cuda = min(loader.batch_size, max(1, len(loader._ordered()))), loader.device.type == "cuda"
    batches = len(loader)
    encoded = sizes.batch(rows)
    views, element = sum(h * w * 3 for h, w in sizes.views), ELEMENT[loader.dtype]
    terms: list[Term] = []

    def add(name: str, place: Place, value: float, formula: str) -> None:
        if value > 0:
            terms.append(Term(name, place, int(value), formula))

    epoch = sizes.encoded * len(loader._ordered())
    if s.cache is not None:
        held = min(float(s.cache), sizes.encoded * len(loader.source) + 24 * len(loader.source))
        add("cache", "host", held,
            f"min(max_bytes {size.text(s.cache)}, {len(loader.source)} samples x {sizes.encoded:.0f} B)")  # fmt: skip
    method = loader._live.reader.start_method or multiprocessing.get_start_method()
    each = WORKER.get(method, WORKER["spawn"]) if worker is None else worker
    add("workers", "host", s.num_workers * each, f"{s.num_workers} workers x {size.text(each)} ({method})")
    factor = loader._live.reader.prefetch_factor
    waiting = min(batches, s.num_workers * factor) if s.num_workers else 0
    making = min(batches, 1 if s.prefetch == 0 else 2)  # the one that is decoded, and the one before, not yet let go
    # decoded and then waiting: encoded bytes stay as long as the labels that lie in the same piece of memory
    finished = (
        min(batches, s.prefetch + 2) - making if sizes.keeps_labels and s.ahead is None else 0
    )  # ahead copies them
    behind = making + max(0, finished)
    why = " of finished batches, by their labels" if finished > 0 else ""
    of_each = f"{size.text(encoded)} ({rows} x {sizes.encoded:.0f} B, and 2 standard deviations)"
    if s.ahead is not None:
        add("ahead", "host", min(s.ahead, epoch), f"min(ahead {size.text(s.ahead)}, one epoch {size.text(epoch)})")
        add("encoded, behind ahead", "host", behind * encoded, f"{behind} in decode{why} x {of_each}")
        behind, why = (1 if s.num_workers else 0), " being copied"
    if s.num_workers:
        text = f"({s.num_workers} workers x {factor} + {behind} behind them{why}) x {of_each}"
        add("encoded batches", "shared", (waiting + behind) * encoded, text)
    else:
        add("encoded batches", "host", behind * encoded, f"{behind} in decode{why} x {of_each}")
    if loader._replay is None:
        pool = POOL + POOL_BY_VARIATION * min(1.0, sizes.variation)
        where: Place = "device" if cuda else "host"
        held = min(rows * sizes.decoded, float(getattr(loader._stages.settings, "max_bytes", math.inf)))
        text = f"pool ({POOL} + {POOL_BY_VARIATION} x variation {sizes.variation:.2f})"
        add("decoded pixels", where, pool * held, f"{text} x {rows} x {sizes.decoded:.0f} B")
        add("encoded, copied by DALI", "pinned" if cuda else "host", 2 * encoded, f"2 x {size.text(encoded)}")
        add("views, uint8", where, 2 * rows * views, f"2 x {rows} x {views} B ({_shapes(sizes.views)})")
    else:
        add("views, uint8", "host", 2 * rows * views, f"2 x {rows} x {views} B ({_shapes(sizes.views)})")
    out = rows * views * element
    copies = min(batches, s.prefetch + 2)
    text = f"({s.prefetch} ahead + 1 in the making + 1 in use)"
    if copies < s.prefetch + 2:
        text = f"{copies} (all of an epoch)"
    add("finished batches", "device" if cuda else "host", copies * out,
        f"{text} x {rows} x {views} x {element} B = {copies} x {size.text(out)}")  # fmt: skip
    small = sum(rows * h * w * 3 * element for h, w in sizes.views if rows * h * w * 3 * element < MAPPED)
    if not cuda:
        text = f"{HEAP} x {size.text(small)}, views below {size.text(MAPPED)} in a finished batch"
        add("kept by malloc", "host", HEAP * small, text)
    if loader.mix is not None:
        add("mix", "device" if cuda else "host", out, f"one more batch, {size.text(out)}")
    add("threads, malloc", "host", KEPT, f"{size.text(KEPT)}, whatever the settings")
    if cuda:
        add("CUDA context", "device", CONTEXT, f"about {size.text(CONTEXT)} per process")
    return Plan(terms=tuple(terms), base=held_by_all() if base is None else base)


def _shapes(views: Sequence[tuple[int, int]]) -> str:
    counted: dict[tuple[int, int], int] = {}
    for shape in views:
        counted[shape] = counted.get(shape, 0) + 1
    return " + ".join(f"{n} x {h} x {w} x 3" for (h, w), n in counted.items())


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
        found: list[tuple[int, str]] = []
        if (memory := machine.memory()) is not None:
            found.append((memory[1], "MemAvailable"))
        if (group := machine.cgroup_memory()) is not None:
            found.append((max(0, group[0] - _not_cached(group[1])), "limit of the control group"))
        host = min(found, default=None)
        shm = machine.shared_memory()
        free = torch.cuda.mem_get_info(device)[0] if device is not None and device.type == "cuda" else None
        return Machine(None if host is None else host[0], "" if host is None else host[1], shm and shm[1], free)


def _not_cached(used: int) -> int:
    """What a control group uses, without files that the system can drop."""
    for file, key in (
        ("/sys/fs/cgroup/memory.stat", "inactive_file"),
        ("/sys/fs/cgroup/memory/memory.stat", "total_inactive_file"),
    ):
        for line in (machine.read(file) or "").splitlines():
            name, _, value = line.partition(" ")
            if name == key and value.isdigit():
                return max(0, used - int(value))
    return used


def fit(
    loader: Loader, *, here: Machine | None = None, sizes: Sizes | None = None
) -> tuple[dict[str, Any], str | None]:
    """Settings with which a loader fits this machine, and the line to log; nothing and None where it fits as it is.

    Made smaller, in this order: ``ahead``, the cache, ``prefetch``, ``num_workers``; never the batch size. All ranks of
    a machine are taken to be alike.

    Args:
        loader: not yet iterated.
        here: what the machine has left.
        sizes: of the images; None: looks at some.

    Returns:
        arguments of :class:`~gpuaug.Loader` to build it anew with, and what to say about them.

    Raises:
        ConfigError: if it does not fit whatever is made smaller.
    """
    here = here or Machine.here(loader.device)
    found = sizes or look(loader)
    ranks = distributed.local_world_size()
    wanted = now = Settings.of(loader)

    def lacks(settings: Settings) -> list[str]:
        planned = predict(loader, found, settings=settings, base=0)
        needs: list[tuple[str, int, int | None, str]] = [
            ("host", planned.more * ranks - _once(planned, ranks), here.host, here.host_by),
            ("shared", planned.total("shared") * ranks, here.shared, "/dev/shm"),
        ]
        if here.device is not None:
            needs.append(("device", planned.total("device"), here.device, "the device"))
        return [
            f"{size.text(need)} of {'shared ' if place == 'shared' else 'device ' if place == 'device' else ''}memory, "
            f"and {by} has {size.text(left)}"
            for place, need, left, by in needs
            if left is not None and need > (1 - SPARE) * left
        ]

    first = lacks(now)
    if not first:
        return {}, None
    for smaller in _smaller(now, found.batch(loader.batch_size)):
        now = smaller
        if not lacks(now):
            break
    else:
        raise ConfigError(
            f"this run needs {'; '.join(first)}. Even with num_workers={now.num_workers}, prefetch={now.prefetch}, no "
            f"`ahead` and no cache it needs {'; '.join(lacks(now))}. Make `batch_size` smaller, now "
            f"{loader.batch_size}, or give it more; `gpuaug plan` shows what takes it."
        )
    changes = _changes(loader, wanted, now)
    said = ", ".join(f"{name} {before} -> {after}" for name, before, after in _words(wanted, now))
    return changes, f"memory: made smaller to fit this machine: {said} (needed {'; '.join(first)})"


def _once(planned: Plan, ranks: int) -> int:
    """What all ranks of a machine hold together once: the cache."""
    return sum(t.bytes for t in planned.terms if t.name == "cache") * (ranks - 1)


def _smaller(start: Settings, batch: int) -> Iterator[Settings]:
    """Ever smaller settings, each as large as can be."""
    now = start
    while now.ahead is not None:
        now = replace(now, ahead=now.ahead // 2 if now.ahead // 2 > 2 * batch else None)
        yield now
    while now.cache is not None:
        now = replace(now, cache=now.cache // 2 if now.cache // 2 > 4 * batch else None)
        yield now
    while now.prefetch > 1:
        now = replace(now, prefetch=now.prefetch - 1)
        yield now
    while now.num_workers > 1:
        now = replace(now, num_workers=now.num_workers - 1)
        yield now
    if now.prefetch:
        now = replace(now, prefetch=0)
        yield now
    if now.num_workers:
        now = replace(now, num_workers=0)
        yield now


def _changes(loader: Loader, before: Settings, after: Settings) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for name in ("num_workers", "prefetch", "ahead"):
        if getattr(before, name) != getattr(after, name):
            changes[name] = getattr(after, name)
    if before.cache != after.cache:
        assert loader._cached is not None
        fill = loader._cached.settings.fill
        changes["cache"] = None if after.cache is None else RamCache(max_bytes=after.cache, fill=fill)
    return changes


def _words(before: Settings, after: Settings) -> list[tuple[str, str, str]]:
    def text(name: str, value: int | None) -> str:
        if value is None:
            return "none"
        return size.text(value) if name in ("ahead", "cache") else str(value)

    pairs = [(n, getattr(before, n), getattr(after, n)) for n in ("ahead", "cache", "prefetch", "num_workers")]
    return [(n, text(n, a), text(n, b)) for n, a, b in pairs if a != b]


# -- measuring --------------------------------------------------------------------------------------------------------


def held_by_all() -> int:
    """Bytes that this process and its workers hold and nobody can take back; pages they share count once (PSS).

    Shared memory counts by its files, as a batch on the way between two processes is in no one's address space.
    """
    pids = [os.getpid(), *(c.pid for c in multiprocessing.active_children() if c.pid is not None)]
    return sum(map(_anonymous, pids)) + shared_by(pids)


def _anonymous(pid: int) -> int:
    for line in (machine.read(f"/proc/{pid}/smaps_rollup") or "").splitlines():
        if line.startswith("Pss_Anon:"):
            return int(line.split()[1]) * 1024
    return 0


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
    """The most that was held at any time, in bytes."""

    host: int
    shared: int
    device: int
    batches: int


def measure(loader: Loader, *, seconds: float = 30.0) -> Peak:
    """Run the loader for a while, now and then so slowly that everything fills up, and see what it takes at most."""
    peak = {"host": 0, "shared": 0, "device": 0}
    done = threading.Event()

    def watch() -> None:
        while True:
            pids = [os.getpid(), *(c.pid for c in multiprocessing.active_children() if c.pid is not None)]
            peak["host"] = max(peak["host"], sum(map(_anonymous, pids)) + shared_by(pids))
            peak["shared"] = max(peak["shared"], shared_by(pids, where=("/dev/shm/",)))
            if loader.device.type == "cuda":
                free, total = torch.cuda.mem_get_info(loader.device)
                peak["device"] = max(peak["device"], total - free)
            if done.wait(0.03):
                return

    watcher = threading.Thread(target=watch, name="gpuaug-watch", daemon=True)
    watcher.start()
    wanted = 3 * (loader.prefetch + 2) + 4
    full = loader._cached is not None or loader.ahead is not None
    begin, count = time.perf_counter(), 0
    try:
        while time.perf_counter() - begin < seconds and (count < wanted or (full and loader.epoch == 0)):
            before = count
            for batch in loader:
                count += 1
                if count in (2, 6, wanted - 2):
                    _settle(loader, min(0.25 * seconds, begin + seconds - time.perf_counter()))
                del batch
                if time.perf_counter() - begin > seconds or (not full and count >= wanted):
                    break
            if count == before:
                break
    finally:
        done.set()
        watcher.join()
    return Peak(peak["host"], peak["shared"], peak["device"], count)


def _settle(loader: Loader, seconds: float) -> None:
    """Wait until the memory in use grows no more."""
    end, last, calm = time.perf_counter() + seconds, 0, 0.0
    while time.perf_counter() < end and calm < 4:
        time.sleep(0.15)
        now = held_by_all()
        waiting: Any = getattr(loader._live.running, "_queue", None)
        full = waiting is None or waiting.full() or calm >= 3
        calm = calm + 1 if now <= 1.01 * last and full else calm + 0.25 if now <= 1.01 * last else 0.0
        last = max(last, now)


def one_worker(loader: Loader) -> int | None:
    """Bytes that one more worker takes on this machine, measured; None where there are none or it cannot be told."""
    if not loader.num_workers or not Path("/proc/self/smaps_rollup").exists():
        return None
    reader: Any = loader._live.reader
    tasks = [(i[:2], r[:2], v[:2]) for i, r, v in [next(iter(loader._plan(0)))]] * 8
    before = held_by_all()
    probe = Reader(reader.source, num_workers=1, timeout=reader.timeout, start_method=reader.start_method)
    try:
        batches = probe.batches(iter(tasks), numbers=loader._numbers(loader.epoch))
        for _ in range(4):
            next(batches)
        return max(MIB, held_by_all() - before)
    finally:
        probe.close()
