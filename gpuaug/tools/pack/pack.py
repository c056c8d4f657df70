"""A source prepared once: resized, and written as tar shards of JPEG or as arrays of pixels that need no decoding.

takes: any source, and a folder to write.
does: reads, decodes and resizes with the stages of training; each image once, however many sizes.
gives: ``out/<size>/<shard>.tar`` (WebDataset) or ``.bin`` (`header.raw_header` and pixels, one image after the other),
``out/index/`` (keys, labels, places, shapes and checksums as .npy), and last of all ``out/manifest.json``.

A shard holds a fixed range of samples, is made by one process, and depends on nothing else; so neither the number of
processes nor being killed changes a byte. Until everything is there, all of it is in ``out/.partial``.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import tarfile
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from gpuaug import machine
from gpuaug.augment.crop import Resize
from gpuaug.batch import Boxes, EncodedBatch, Fault, Interpolation
from gpuaug.decode import header
from gpuaug.decode.decoder import Decode, Decoder
from gpuaug.decode.plan import HeaderInfo
from gpuaug.errors import ConfigError, DataError, GpuaugError, SourceError
from gpuaug.loader.faults import Faults
from gpuaug.read.reader import Reader
from gpuaug.source.adapt import adapt
from gpuaug.source.index import NO_ARRAY
from gpuaug.source.packed import ENDINGS, FULL, KIND, MANIFEST, VERSION, Size, checksum, parse_manifest, shard_name
from gpuaug.source.protocol import Source
from gpuaug.tools import on_ray

log = logging.getLogger("gpuaug")

Format = Literal["jpeg", "uint8"]
SUBSAMPLING = ("4:4:4", "4:2:2", "4:2:0")
PARTIAL = ".partial"
Results = Generator[tuple[int, list[Any]], None, None]  # shard, its bad samples

GONE_ON = "What is done is kept: the same command goes on."

_READ = 32  # samples read at a time
_CANVAS = 1 << 28  # bytes of resized images held at a time; larger ones are made alone
_LONGEST = 65_535  # sides of a JPEG
_BLOCK = 512  # of a tar


@dataclass(frozen=True, kw_only=True)
class Pack:
    """What is written.

    Args:
        format: ``jpeg``: WebDataset tar shards, for little space; ``uint8``: pixels, for reading without decoding.
        sizes: shorter sides, one set of files for each; nothing is enlarged. None: one set at the images' own sizes.
        quality: of JPEG, 1..100.
        subsampling: of JPEG's colours: 4:4:4, 4:2:2 or 4:2:0.
        interpolation: ``bilinear`` or ``bicubic``, both antialiased as in Pillow.
        samples: in one shard, which is also what a stopped run may have to do again.

    A JPEG that is small enough already and not EXIF-rotated is copied unchanged into tar shards.
    """

    format: Format = "jpeg"
    sizes: Sequence[int] | int | None = None
    quality: int = 90
    subsampling: str = "4:2:0"
    interpolation: Interpolation = "bicubic"
    samples: int = 1000

    def __post_init__(self) -> None:
        if self.format not in get_args(Format):
            raise ConfigError(f"`format` must be jpeg or uint8. Found: {self.format!r}.")
        sizes = [self.sizes] if isinstance(self.sizes, int) else self.sizes
        if sizes is not None and (
            isinstance(sizes, str)
            or not sizes
            or not all(_is_count(size) for size in sizes)
            or len(set(sizes)) < len(sizes)
        ):
            raise ConfigError(
                f"`sizes` must be shorter sides in pixels, each once, as [128,224]. Found: {self.sizes!r}."
            )
        object.__setattr__(self, "sizes", None if sizes is None else tuple(sorted(sizes)))
        if not _is_count(self.quality) or self.quality > 100:
            raise ConfigError(f"`quality` must be a whole number from 1 to 100. Found: {self.quality!r}.")
        if self.subsampling not in SUBSAMPLING:
            raise ConfigError(
                f"`subsampling` must be one of {', '.join(SUBSAMPLING)}. Found: {self.subsampling!r}. In YAML "
                "it needs quotes."
            )
        if self.interpolation not in get_args(Interpolation):
            raise ConfigError(f"`interpolation` must be bilinear or bicubic. Found: {self.interpolation!r}.")
        if not _is_count(self.samples):
            raise ConfigError(f"`samples` must be a whole number >= 1. Found: {self.samples!r}.")

    @property
    def names(self) -> list[Size]:
        """The sizes as their folders are called, ascending."""
        return [FULL] if self.sizes is None else list(self.sizes)  # type: ignore[arg-type]


def pack(
    source: Any,
    out: str | os.PathLike[str],
    *,
    what: Pack | None = None,
    decode: Decode | None = None,
    faults: Faults | None = None,
    num_workers: int | None = None,
    on: Literal["local", "ray"] = "local",
) -> dict[str, Any]:
    """Write ``source`` into the folder ``out``, or go on where a stopped run was; gives back the manifest.

    Args:
        source: see :mod:`gpuaug.source`; its active samples are packed, in their order.
        out: new, empty, or left by a stopped run of the same job. A finished one of the same job is left as it is.
        what: see :class:`Pack`.
        decode: settings of the decoder.
        faults: ``raise`` stops at a bad sample, ``drop`` leaves it out; ``blank`` has no meaning here.
        num_workers: processes, each with one thread; 0: none beside this one; None: all cores (on Ray: of the cluster).
        on: ``local``, or ``ray``: the Ray that this process is connected to, or that ``RAY_ADDRESS`` names, else one on
            this machine; ``out`` must then be a folder that all its machines share.

    Raises:
        ConfigError: if ``out`` holds something else.
        DataError, FaultBudgetError: as ``faults`` says.
        GpuaugError: if a process dies or a file cannot be written. What is done is kept.
    """
    what, decode, faults = what or Pack(), decode or Decode(), faults or Faults(policy="raise")
    source = adapt(source)
    if faults.policy == "blank":
        raise ConfigError("`faults.policy=blank` has no meaning for `gpuaug pack`. Set raise, or drop.")
    if on not in ("local", "ray"):
        raise ConfigError(f"`on` must be local or ray. Found: {on!r}.")
    if num_workers is not None and (
        isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0
    ):
        raise ConfigError(f"`num_workers` must be a whole number >= 0, or null. Found: {num_workers!r}.")
    place = _checked_out(Path(out), source)
    decode = replace(decode, num_threads=1)
    probe = decode.open("cpu")
    backend: Any = probe.backend
    probe.close()
    job = Job(
        source=source,
        out=place,
        what=what,
        decode=replace(decode, backend=backend),  # what `auto` is here; another machine could differ
        truncated=faults.truncated == "accept",
        drop=faults.policy == "drop",
    )
    if (found := finished(place)) is not None:
        _same(job.describe(), found["job"], place)
        shutil.rmtree(job.work, ignore_errors=True)  # of a run that was killed at its very end
        log.info("pack %s: finished already", place)
        return found
    with _only_one(job.work):
        _begin_or_resume(job)
        if not (job.work / MANIFEST).exists():
            _make_shards(job, faults, num_workers=num_workers, on=on)
            _write_index(job)
        _publish(job)
    return parse_manifest((place / MANIFEST).read_bytes())


def finished(out: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The manifest of a finished folder; None where there is none.

    Raises:
        SourceError: if it is damaged.
    """
    try:
        return parse_manifest((Path(out) / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise SourceError(
            f"{Path(out) / MANIFEST} cannot be used: {error}. Remove the folder and pack again."
        ) from error


def verify(out: str | os.PathLike[str], *, num_workers: int | None = None) -> list[str]:
    """Read everything in a finished folder against its checksums; one line for each damage, naming file and samples.

    Args:
        out: the folder.
        num_workers: threads; None: one per core.
    """
    place = Path(out)
    manifest = finished(place)
    if manifest is None:
        raise SourceError(f"{str(place)!r} has no {MANIFEST}: it is not finished. The same `gpuaug pack` goes on.")
    files: dict[str, list[Any]] = manifest["files"]
    if bad := [name for name in files if not re.fullmatch(r"[\w-]+(/[\w.-]+)?", name) or ".." in name]:
        raise SourceError(f"{place / MANIFEST} names files outside the folder: {bad[:3]}.")
    total = sum(size for size, _ in files.values())
    damage: list[str] = []
    hidden = not sys.stderr.isatty()
    with (
        tqdm(total=total, desc="verify", unit="B", unit_scale=True, disable=hidden) as bar,
        ThreadPoolExecutor(num_workers or machine.usable_cpus()) as pool,
    ):
        found = pool.map(lambda name: _compare(place / name, files[name][0], files[name][1], bar), files)
        for name, text in zip(files, found, strict=True):
            if text is not None:
                damage.append(f"{name}: {text}{_damaged_samples(place, name, manifest)}")
    for name in manifest["sizes"]:  # a stray shard would be read with the others; other files harm nobody
        for path in sorted((place / str(name)).glob(f"*.{ENDINGS[manifest['format']]}")):
            if (stray := f"{name}/{path.name}") not in files:
                damage.append(f"{stray}: does not belong here")
    return damage


# -- the job --


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that a process needs to make a shard; two jobs of one description make the same bytes."""

    source: Source
    out: Path
    what: Pack
    decode: Decode
    truncated: bool
    drop: bool

    @property
    def work(self) -> Path:
        """Where everything is until the end."""
        return self.out / PARTIAL

    @property
    def shards(self) -> int:
        """Number of shards."""
        return math.ceil(len(self.source) / self.what.samples)

    def numbers(self, shard: int) -> NDArray[np.int64]:
        """The shard's samples, by their numbers in the source."""
        first, last = shard * self.what.samples, min((shard + 1) * self.what.samples, len(self.source))
        indices = self.source.indices
        return np.arange(first, last) if indices is None else indices.numpy()[first:last]

    def done(self, shard: int) -> Path:
        """What says that a shard is finished, and what is in it."""
        return self.work / "done" / f"{shard:05d}.json"

    def describe(self) -> dict[str, Any]:
        """What decides the bytes that are written, as JSON."""
        source = self.source
        what = {**asdict(self.what), "sizes": self.what.names}
        if self.what.format == "uint8":
            del what["quality"], what["subsampling"]
        return {
            "source": source.digest(),
            "images": len(source),
            "numbers": None if source.indices is None else _hash(source.indices.numpy().tobytes()),
            "labels": _labels_of(source),
            "classes": source.classes,
            **what,
            "decode": {
                "backend": self.decode.backend,
                "codecs": sorted(self.decode.codecs),
                "max_pixels": self.decode.max_pixels,
                "truncated": "accept" if self.truncated else "reject",
            },
        }


def _labels_of(source: Source) -> str | None:
    """A hash of all labels that are known without reading the samples."""
    if source.labels is not None:
        return _hash(source.labels.numpy().tobytes())
    label: Any = getattr(source, "label", None)
    if not callable(label):
        return None
    numbers = range(len(source)) if source.indices is None else source.indices.tolist()
    found = [label(i) for i in numbers]  # targets: floats, or several for one sample
    return None if all(value is None for value in found) else _hash(repr(found).encode())


def _checked_out(out: Path, source: Source) -> Path:
    place = Path(os.path.abspath(out.expanduser()))
    root = getattr(source, "root", None)
    if isinstance(root, str) and "://" not in root and os.path.isdir(root):
        inside = os.path.realpath(place)
        if os.path.commonpath([inside, os.path.realpath(root)]) == os.path.realpath(root):
            raise ConfigError(
                f"`out` must not be inside `source.root` ({root!r}): it would become part of it. Found: {str(out)!r}."
            )
    try:
        place.mkdir(parents=True, exist_ok=True)
        found = sorted(os.listdir(place))
    except OSError as error:
        raise ConfigError(f"`out` must be a folder that can be written. Found: {str(out)!r} ({error}).") from error
    if found and MANIFEST not in found and PARTIAL not in found:
        raise ConfigError(
            f"`out` must be new, empty, or left by a stopped run. Found {len(found)} other files in {str(place)!r}, "
            f"such as {found[0]!r}."
        )
    return place


def _same(wanted: dict[str, Any], found: dict[str, Any], place: Path) -> None:
    wanted = json.loads(json.dumps(wanted))
    if differ := [k for k in {**wanted, **found} if wanted.get(k) != found.get(k)]:
        shown = "; ".join(f"{k}: {_short(found.get(k))} there, {_short(wanted.get(k))} now" for k in differ[:4])
        raise ConfigError(f"`out` holds another job: {str(place)!r}. {shown}. Choose another folder, or remove it.")


@contextmanager
def _only_one(work: Path) -> Iterator[None]:
    """Refuse a second run on the same folder; the lock ends with the process that holds it."""
    work.mkdir(exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"`out` is being written by another run: {str(work.parent)!r}. Wait for it.") from error
        yield


def _begin_or_resume(job: Job) -> None:
    note = job.work / "job.json"
    if note.exists():
        try:
            found = json.loads(note.read_bytes())
        except ValueError as error:
            raise SourceError(f"{note} cannot be read ({error}). Remove {str(job.work)!r} and pack again.") from error
        _same(job.describe(), found, job.out)
    else:
        _write(note, json.dumps(job.describe(), indent=1).encode())
    for name in job.what.names:
        if not (job.out / str(name)).exists():
            (job.work / str(name)).mkdir(exist_ok=True)
    (job.work / "done").mkdir(exist_ok=True)
    for part in job.work.rglob("*.part"):  # nobody but the holder of the lock writes: their writers are dead
        part.unlink()


# -- in the process that was called --


def _make_shards(job: Job, faults: Faults, *, num_workers: int | None, on: str) -> None:
    todo, samples, bad = [], 0, 0
    hidden = not sys.stderr.isatty()
    with tqdm(total=len(job.source), desc="pack", unit="img", disable=hidden) as bar:
        for shard in range(job.shards):
            if (found := _read_done(job, shard)) is None:
                todo.append(shard)
                continue
            _handle(job, faults, shard, found["faults"])
            bad += len(found["faults"])
            samples += len(job.numbers(shard))
        if samples:
            log.info("pack %s: %d of %d shards are done already", job.out, job.shards - len(todo), job.shards)
            bar.update(samples)
            bar.initial = samples  # the rate is of this run
        if todo:
            results = _on_ray(job, todo, num_workers, bar) if on == "ray" else _local(job, todo, num_workers, bar)
            try:
                for shard, found_faults in results:
                    bad += len(found_faults)
                    bar.set_postfix(bad=bad, refresh=False)
                    _handle(job, faults, shard, found_faults)
            finally:
                results.close()
    faults.end_of_epoch(0, rescued=0, truncated=0)


def _handle(job: Job, faults: Faults, shard: int, found: Sequence[Sequence[Any]]) -> None:
    numbers = job.numbers(shard)
    listed = [Fault(row, stage, reason, size, bytes.fromhex(head)) for row, stage, reason, size, head in found]
    indices = numbers.tolist() if listed else []
    try:
        faults.handle(listed, indices=indices, epoch=0, samples=len(numbers), key_of=job.source.key)
    except DataError as error:
        remedy = "To leave such samples out set `faults.policy=drop`."
        raise DataError(error.key, error.index, error.stage, error.reason, remedy) from None


def _read_done(job: Job, shard: int) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(job.done(shard).read_bytes())
        for name in job.what.names:
            file = shard_name(name, shard, job.what.format)
            path = job.work / file if (job.work / file).exists() else job.out / file
            if path.stat().st_size != found["files"][str(name)]["bytes"]:
                return None
    except (OSError, ValueError, KeyError):
        return None
    return found


def _local(job: Job, todo: list[int], num_workers: int | None, bar: Any) -> Results:
    workers = min(machine.usable_cpus() if num_workers is None else num_workers, len(todo))
    if num_workers is None:
        log.info("pack with num_workers=%d: %d cores, %d shards", workers, machine.usable_cpus(), len(todo))
    if workers == 0:
        packer = Packer(job)
        try:
            for shard in todo:
                yield shard, packer.shard(shard, bar.update)
        finally:
            packer.close()
        return
    context = multiprocessing.get_context("spawn")  # DALI's and torch's threads do not survive a fork
    count, stop = context.Value("q", 0), context.Event()
    seen = 0
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_enter, initargs=(job, count, stop))
    try:
        waiting: dict[Future[list[Any]], int] = {}
        try:
            for shard in todo:
                waiting[pool.submit(_shard, shard)] = shard
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise SourceError(
                f"the source cannot be sent to other processes: {error}. Define its class in a module and keep open "
                "files and functions out of it, or set `num_workers=0`."
            ) from error
        while waiting:
            ready, _ = wait(waiting, timeout=0.3, return_when=FIRST_COMPLETED)
            seen, before = count.value, seen
            bar.update(seen - before)
            for future in ready:
                yield waiting.pop(future), future.result()
        bar.update(count.value - seen)
    except BrokenProcessPool as error:
        raise GpuaugError(
            "a process that packs ended, usually because memory ran out: lower `num_workers`. Where its own message is "
            'above, that is why; a script must begin its work under `if __name__ == "__main__":`. ' + GONE_ON
        ) from error
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


def _on_ray(job: Job, todo: list[int], num_workers: int | None, bar: Any) -> Results:
    with on_ray.cluster() as ray:
        machines = on_ray.machines(ray, "CPU")
        cores = sum(machines) or 1
        workers = max(1, min(cores if num_workers is None else num_workers, len(todo)))
        log.info("pack on ray: %d processes on %d machines with %d cores", workers, len(machines), cores)
        for shard, found in on_ray.results(ray, partial(_packing, job), todo, workers=workers):
            bar.update(len(job.numbers(shard)))
            yield shard, found


def _packing(job: Job) -> Callable[[int], list[Any]]:
    return Packer(job).shard


# -- in the processes that work --

_here: tuple[Packer, Any, Any] | None = None


def _enter(job: Job, count: Any, stop: Any) -> None:
    """Begin a worker: it ends with its parent, leaves interrupts to it, and has one thread."""
    global _here
    machine.exit_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    _here = Packer(job), count, stop


def _shard(shard: int) -> list[Any]:
    assert _here is not None
    packer, count, stop = _here

    def tick(samples: int) -> None:
        with count.get_lock():
            count.value += samples
        if stop.is_set():
            raise GpuaugError(f"packing was stopped. {GONE_ON}")

    return packer.shard(shard, tick)


class Packer:
    """Makes shards of a job, one after the other, with one thread."""

    def __init__(self, job: Job) -> None:
        self.job = job

    @cached_property
    def _decoder(self) -> Decoder:
        return self.job.decode.open("cpu", accept_truncated=self.job.truncated)

    @cached_property
    def _reader(self) -> Reader:
        return Reader(self.job.source, num_workers=0)

    def close(self) -> None:
        """Give back the decoder's memory."""
        if "_decoder" in self.__dict__:
            self._decoder.close()

    def shard(self, shard: int, tick: Any = None) -> list[list[Any]]:
        """Make a shard at all sizes, and then what says that it is done; gives back its bad samples.

        Each is (row, stage, reason, size, head in hex). Where bad samples are not dropped, the first ends it.
        """
        job, numbers = self.job, self.job.numbers(shard)
        files = {name: _Shard(job.work / shard_name(name, shard, job.what.format)) for name in job.what.names}
        keys, kept, labels, faults = [], [], [], []
        try:
            for first in range(0, len(numbers), _READ):
                some = numbers[first : first + _READ]
                batch = self._read(some)
                found, bad = self._encoded(batch)
                faults += [[first + f.row, f.stage, f.reason, f.size, f.head.hex()] for f in bad]
                if faults and not job.drop:
                    return faults
                for row in sorted(found):
                    number = int(some[row])
                    label = None if batch.labels is None else batch.labels[row].tolist()
                    for name, (data, shape) in found[row].items():
                        files[name].add(job.what.format, number, data, shape, label)
                    keys.append(job.source.key(number))
                    kept.append(number)
                    labels.append(label)
                if tick is not None:
                    tick(len(some))
            done = {name: file.finish(job.what.format) for name, file in files.items()}
            note = {"keys": keys, "numbers": kept, "labels": labels, "faults": faults, "files": done}
            _write(job.done(shard), json.dumps(note).encode())
        except OSError as error:
            raise GpuaugError(f"shard {shard} cannot be written to {str(job.work)!r}: {error}. {GONE_ON}") from error
        finally:
            for file in files.values():
                file.discard()
        return faults

    def _read(self, numbers: NDArray[np.int64]) -> EncodedBatch:
        indices = torch.from_numpy(numbers.astype(np.int64))
        nothing = torch.zeros_like(indices)
        return next(self._reader.batches([(indices, nothing, nothing == 0)]))

    def _encoded(self, batch: EncodedBatch) -> tuple[dict[int, dict[Size, tuple[bytes, tuple[int, int]]]], list[Fault]]:
        """Per good row and size: the bytes to write, and (height, width); and the bad rows."""
        what = self.job.what
        look = self._decoder.read_headers(batch)
        faults = {fault.row: fault for fault in [*look.faults, *batch.faults]}
        rows = [row for row in range(len(batch)) if row not in faults]
        boxes = {
            row: [_whole(int(look.height[row]), int(look.width[row]), size, what) for size in what.names]
            for row in rows
        }
        out: dict[int, dict[Size, tuple[bytes, tuple[int, int]]]] = {}
        for group in self._groups(rows, boxes):
            part = _rows(batch, group)
            views = [_joined([boxes[row][k] for row in group]) for k in range(len(what.names))]
            images, found = self._decoder.pixels(part, self._decoder.read_headers(part), views)
            for fault in found:
                faults[group[fault.row]] = replace(fault, row=group[fault.row])
            for at, row in enumerate(group):
                if row in faults:
                    continue
                out[row] = {}
                data = batch.encoded(row).numpy()
                for name, view, image in zip(what.names, views, images, strict=True):
                    height, width = view.resized[at].tolist()
                    if what.format == "jpeg" and _may_stay(data, look, row, height, width):
                        out[row][name] = data.tobytes(), (height, width)
                        continue
                    if what.format == "jpeg" and max(height, width) > _LONGEST:
                        reason = f"{height}x{width} is more than the {_LONGEST} pixels of a side of a JPEG"
                        faults[row] = Fault(row, "encode", reason, len(data), data[:16].tobytes())
                        del out[row]
                        break
                    pixels = np.ascontiguousarray(image[at, :height, :width].numpy())
                    out[row][name] = _written(pixels, what), (height, width)
        return out, [faults[row] for row in sorted(faults)]

    def _groups(self, rows: list[int], boxes: dict[int, list[Boxes]]) -> list[list[int]]:
        """Rows that are decoded together: all, where their canvases are small enough."""
        if not rows:
            return []
        sides = np.array([[box.size for box in boxes[row]] for row in rows])  # [rows, sizes, 2]
        return [rows] if int(sides.max(axis=0).prod(axis=1).sum()) * 3 * len(rows) <= _CANVAS else [[r] for r in rows]


def _rows(batch: EncodedBatch, rows: list[int]) -> EncodedBatch:
    """The batch for some of its rows."""
    parts = [batch.encoded(row) for row in rows]
    at = torch.tensor(rows)
    return EncodedBatch(
        data=torch.cat(parts),
        offsets=torch.from_numpy(np.cumsum([0, *map(len, parts)])),
        labels=None,
        indices=batch.indices[at],
        repeats=batch.repeats[at],
        valid=batch.valid[at],
    )


def _whole(height: int, width: int, size: Size, what: Pack) -> Boxes:
    """The whole image, its shorter side resized, never enlarged."""
    to = size if isinstance(size, int) and size < min(height, width) else (height, width)
    return Resize(to, interpolation=what.interpolation).boxes(None, np.array([height]), np.array([width]))


def _joined(boxes: list[Boxes]) -> Boxes:
    """Boxes of several images as one, on a canvas that holds the largest."""
    height, width = np.array([box.size for box in boxes]).max(axis=0).tolist()
    return Boxes(
        box=np.concatenate([box.box for box in boxes]),
        resized=np.concatenate([box.resized for box in boxes]),
        offset=np.concatenate([box.offset for box in boxes]),
        size=(height, width),
        interpolation=boxes[0].interpolation,
    )


def _may_stay(data: NDArray[np.uint8], look: HeaderInfo, row: int, height: int, width: int) -> bool:
    return (
        (height, width) == (look.height[row], look.width[row])
        and look.orientation[row] == 1
        and row not in look.replaced
        and header.sniff(data[:16].tobytes()) == "jpeg"
    )


def _written(pixels: NDArray[np.uint8], what: Pack) -> bytes:
    if what.format == "uint8":
        return header.raw_header(*pixels.shape[:2]) + pixels.tobytes()
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=what.quality, subsampling=what.subsampling)
    return out.getvalue()


class _Shard:
    """One file of samples, written beside its place and renamed when it is whole."""

    def __init__(self, path: Path) -> None:
        self.path, self.part = path, path.with_name(f"{path.name}.{os.getpid()}.part")
        self._file: BinaryIO | None = None
        self._hash = hashlib.blake2b(digest_size=16)
        self._at = 0
        self.offsets: list[int] = []
        self.lengths: list[int] = []
        self.shapes: list[tuple[int, int]] = []
        self.checksums: list[int] = []

    def add(self, form: Format, number: int, data: bytes, shape: tuple[int, int], label: Any) -> None:
        if form == "jpeg":
            self._write(_tar_header(f"{number:09d}.jpg", len(data)))
        self.offsets.append(self._at)
        self.lengths.append(len(data))
        self.shapes.append(shape)
        self.checksums.append(zlib.crc32(data))
        self._write(data)
        if form == "jpeg":
            self._write(bytes(-len(data) % _BLOCK))
            if label is not None:
                ending, text = _label(label)
                self._write(_tar_header(f"{number:09d}.{ending}", len(text)))
                self._write(text + bytes(-len(text) % _BLOCK))

    def finish(self, form: Format) -> dict[str, Any]:
        if form == "jpeg":
            self._write(bytes(2 * _BLOCK))
            self._write(bytes(-self._at % tarfile.RECORDSIZE))
        else:
            self._write(b"")
        assert self._file is not None
        _sync(self._file)
        self._file.close()
        os.replace(self.part, self.path)
        return {
            "bytes": self._at,
            "hash": self._hash.hexdigest(),
            "offsets": self.offsets,
            "lengths": self.lengths,
            "shapes": self.shapes,
            "checksums": self.checksums,
        }

    def discard(self) -> None:
        """Close, and remove what is not finished."""
        if self._file is not None:
            self._file.close()
        self.part.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        if self._file is None:
            self._file = self.part.open("wb")
        self._file.write(data)
        self._hash.update(data)
        self._at += len(data)


def _label(label: Any) -> tuple[str, bytes]:
    """A member's ending and content: WebDataset's `cls` is a whole number."""
    return ("cls", b"%d" % label) if isinstance(label, int) else ("json", json.dumps({"label": label}).encode())


def _tar_header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644  # times and owners would make every run's bytes different
    return info.tobuf(tarfile.USTAR_FORMAT)


# -- the end --


def _write_index(job: Job) -> None:
    """Everything beside the shards, out of what the shards' makers noted; the manifest last."""
    work, names = job.work, job.what.names
    notes = []
    for shard in range(job.shards):
        if (note := _read_done(job, shard)) is None:
            raise GpuaugError(f"shard {shard} of {str(job.out)!r} vanished while the others were made. {GONE_ON}")
        notes.append(note)
    total = sum(len(note["keys"]) for note in notes)
    if not total:
        raise SourceError(f"none of the {len(job.source)} samples could be packed: all of them are bad.")
    index = work / "index"
    index.mkdir(exist_ok=True)
    files: dict[str, list[Any]] = {}

    def put(name: str, data: bytes) -> None:
        _write(work / name, data)
        files[name] = [len(data), _hash(data)]

    keys = [os.fsencode(key) for note in notes for key in note["keys"]]
    put("index/keys.bin", b"".join(keys))
    put("index/keys.npy", _npy(np.cumsum([0, *map(len, keys)]), np.int64))
    put("index/numbers.npy", _npy([n for note in notes for n in note["numbers"]], np.int64))
    labels = [label for note in notes for label in note["labels"]]
    kind = _kind_of(labels)
    if kind is not None:
        put("index/labels.npy", _npy(labels, kind))
    for name in names:
        for field, dtype in (
            ("offsets", np.int64),
            ("lengths", np.int32),
            ("checksums", np.uint32),
            ("shapes", np.int32),
        ):
            values = [value for note in notes for value in note["files"][str(name)][field]]
            put(f"index/{name}.{field}.npy", _npy(values, dtype))
        if job.source.classes is not None:
            put(f"{name}/classes.json", json.dumps(list(job.source.classes), indent=1).encode())
        for shard, note in enumerate(notes):
            found = note["files"][str(name)]
            files[shard_name(name, shard, job.what.format)] = [found["bytes"], found["hash"]]
    manifest: dict[str, Any] = {
        "kind": KIND,
        "version": VERSION,
        "format": job.what.format,
        "sizes": names,
        "samples": total,
        "shards": [len(note["keys"]) for note in notes],
        "classes": None if job.source.classes is None else list(job.source.classes),
        "labels": None if kind is None else np.dtype(kind).name,
        "dropped": [
            {"key": job.source.key(n), "index": n, "stage": fault[1], "reason": fault[2]}
            for shard, note in enumerate(notes)
            for fault in note["faults"]
            for n in [int(job.numbers(shard)[fault[0]])]
        ],
        "job": job.describe(),
        "files": dict(sorted(files.items())),
    }
    manifest = json.loads(json.dumps(manifest))
    _write(work / MANIFEST, json.dumps({**manifest, "checksum": checksum(manifest)}, indent=1).encode())


def _publish(job: Job) -> None:
    """Move everything to its place, the manifest last; a run that is killed in between is finished by the next."""
    for name in [*map(str, job.what.names), "index", MANIFEST]:
        if (job.work / name).exists():
            os.replace(job.work / name, job.out / name)
    _sync_folder(job.out)
    shutil.rmtree(job.work)


def _kind_of(labels: list[Any]) -> Any:
    """dtype of labels, None where there are none."""
    if all(label is None for label in labels):
        return None
    if any(label is None for label in labels):
        raise SourceError("some samples have labels and some have none. Set `source.labels=none`, or label all.")
    return np.int64 if all(isinstance(label, int) for label in labels) else np.float32


def _compare(path: Path, size: int, digest: str, bar: Any) -> str | None:
    """What is wrong with a file, None if nothing is."""
    found = hashlib.blake2b(digest_size=16)
    read = 0
    try:
        with path.open("rb") as file:
            while data := file.read(1 << 22):
                found.update(data)
                read += len(data)
                bar.update(len(data))
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    if read != size:
        return f"has {read} bytes instead of {size}"
    return None if found.hexdigest() == digest else "its content does not fit its checksum"


def _damaged_samples(place: Path, name: str, manifest: dict[str, Any]) -> str:
    """The keys of the samples in a damaged shard that are damaged themselves, as text."""
    match = re.fullmatch(rf"(\w+)/(\d+)\.({'|'.join(ENDINGS.values())})", name)
    if match is None:
        return ""
    size, shard = match[1], int(match[2])
    try:
        with (place / name).open("rb") as file:
            offsets, lengths, checksums, keys = (
                np.load(place / "index" / f, allow_pickle=False)
                for f in (f"{size}.offsets.npy", f"{size}.lengths.npy", f"{size}.checksums.npy", "keys.npy")
            )
            blob = (place / "index" / "keys.bin").read_bytes()
            first = sum(manifest["shards"][:shard])
            bad = []
            for i in range(first, first + manifest["shards"][shard]):
                file.seek(offsets[i])
                if zlib.crc32(file.read(lengths[i])) != checksums[i]:
                    bad.append(os.fsdecode(blob[keys[i] : keys[i + 1]]))
    except (*NO_ARRAY, IndexError):
        return ""
    listed = ", ".join(map(repr, bad[:5])) + (", …" if len(bad) > 5 else "")
    return f"; {len(bad)} damaged samples: {listed}" if bad else "; no sample's own bytes are damaged"


# -- small things --


def _write(path: Path, data: bytes) -> None:
    """The whole file or none."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with part.open("wb") as file:
        file.write(data)
        _sync(file)
    os.replace(part, path)


def _sync(file: BinaryIO) -> None:
    """Have it on the disk before what says that it is there."""
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    if hasattr(os, "O_DIRECTORY"):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _npy(values: Any, dtype: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, np.asarray(values, dtype=dtype), allow_pickle=False)
    return out.getvalue()


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
