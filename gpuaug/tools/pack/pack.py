"""`gpuaug.tools.pack.pack.pack`: write a source once, resized, as tar shards of JPEG or as pixels.

takes: any source, and a folder to write.
does: reads, decodes and resizes with the stages of training. Each image is decoded once, for all sizes.
gives: ``out/<size>/<shard>.tar`` (WebDataset) or ``.bin`` (`header.raw_header` and pixels, one image after the other),
``out/index/`` (keys, labels, offsets, shapes and checksums as .npy), and ``out/manifest.json``, which is written last.

A shard holds a fixed range of samples and depends on nothing else. So neither the number of processes nor a killed run
changes a byte. Until the last file is written, all files are in ``out/.partial``.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tqdm import tqdm

from gpuaug import checks, files, machine
from gpuaug.batch import Fault
from gpuaug.decode.decoder import Decode
from gpuaug.errors import ConfigError, DataError, GpuaugError, SourceError
from gpuaug.loader.faults import Faults
from gpuaug.source.adapt import adapt
from gpuaug.source.base import checksum, parse_manifest
from gpuaug.source.local import read_file
from gpuaug.source.packed import KIND, MANIFEST, VERSION, shard_name
from gpuaug.tools import on_ray
from gpuaug.tools.pack.job import Job, Pack, finished, prepare_out
from gpuaug.tools.pack.shards import GO_ON, Packer
from gpuaug.tools.store import digest, npy, only_writer, to_json

log = logging.getLogger("gpuaug")

Results = Generator[tuple[int, list[Any]], None, None]  # shard, its bad samples


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
    """Write ``source`` into the folder ``out``, or go on where a stopped run was. Returns the manifest.

    Args:
        source: see :mod:`gpuaug.source`. Its active samples are packed, in their order.
        out: a folder that is new, empty, or left by a run of the same job. A finished one is not changed.
        what: see :class:`Pack`.
        decode: settings of the decoder.
        faults: ``raise`` stops at a bad sample, ``drop`` leaves it out. ``blank`` is refused.
        num_workers: processes, each with one thread; 0: only this one; None: one per core (on Ray: of the cluster).
        on: ``local``, or ``ray``: the Ray that this process is connected to, or that ``RAY_ADDRESS`` names, else one on
            this machine; ``out`` must then be a folder that all its machines share.

    Raises:
        ConfigError: if a setting is wrong, or ``out`` holds something else.
        DataError, FaultBudgetError: as ``faults`` says.
        GpuaugError: if a process dies or a file cannot be written. What is done is kept.
    """
    what, decode, faults = what or Pack(), decode or Decode(), faults or Faults(policy="raise")
    source = adapt(source)
    if faults.policy == "blank":
        raise ConfigError("`faults.policy=blank` has no meaning for `gpuaug pack`. Set raise, or drop.")
    checks.one_of("on", on, ("local", "ray"))
    checks.whole_number("num_workers", num_workers, 0, optional=True)
    place = prepare_out(Path(out), source)
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
    if (manifest := finished(place)) is not None:
        job.check_same(manifest["job"])
        shutil.rmtree(job.work, ignore_errors=True)  # left by a run that was killed at its very end
        log.info("pack %s: finished already", place)
        return manifest
    job.work.mkdir(exist_ok=True)
    with only_writer(job.work, out=place):
        job.begin()
        if not (job.work / MANIFEST).exists():
            _write_shards(job, faults, num_workers=num_workers, on=on)
            _write_index(job)
        return _publish(job)


def _write_shards(job: Job, faults: Faults, *, num_workers: int | None, on: str) -> None:
    todo, samples, bad = [], 0, 0
    hidden = not sys.stderr.isatty()
    with tqdm(total=len(job.source), desc="pack", unit="img", disable=hidden) as bar:
        for shard in range(job.shards):
            if (note := job.note(shard)) is None:
                todo.append(shard)
                continue
            _handle(job, faults, shard, note["faults"])
            bad += len(note["faults"])
            samples += len(job.numbers(shard))
        if samples:
            log.info("pack %s: %d of %d shards are done already", job.out, job.shards - len(todo), job.shards)
            bar.update(samples)
            bar.initial = samples  # the rate is of this run
        if todo:
            results = _on_ray(job, todo, num_workers, bar) if on == "ray" else _local(job, todo, num_workers, bar)
            try:
                for shard, shard_faults in results:
                    bad += len(shard_faults)
                    bar.set_postfix(bad=bad, refresh=False)
                    _handle(job, faults, shard, shard_faults)
            finally:
                results.close()
    faults.end_of_epoch(0, rescued=0, truncated=0)


def _handle(job: Job, faults: Faults, shard: int, bad: Sequence[Sequence[Any]]) -> None:
    numbers = job.numbers(shard)
    listed = [Fault(row, stage, reason, size, bytes.fromhex(head)) for row, stage, reason, size, head in bad]
    indices = numbers.tolist() if listed else []
    try:
        faults.handle(listed, indices=indices, epoch=0, samples=len(numbers), key_of=job.source.key)
    except DataError as error:
        remedy = "To leave such samples out set `faults.policy=drop`."
        raise DataError(error.key, error.index, error.stage, error.reason, remedy) from None


def _local(job: Job, todo: list[int], num_workers: int | None, bar: Any) -> Results:
    workers = min(machine.usable_cpus() if num_workers is None else num_workers, len(todo))
    if num_workers is None:
        log.info("pack with num_workers=%d: %d cores, %d shards", workers, machine.usable_cpus(), len(todo))
    if workers == 0:
        packer = Packer(job)
        try:
            for shard in todo:
                yield shard, packer.write(shard, bar.update)
        finally:
            packer.close()
        return
    context = multiprocessing.get_context("spawn")  # DALI's and torch's threads do not survive a fork
    count, stop = context.Value("q", 0), context.Event()
    seen = 0
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(job, count, stop))
    try:
        waiting: dict[Future[list[Any]], int] = {}
        try:
            for shard in todo:
                waiting[pool.submit(_write_shard, shard)] = shard
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
            'above, that is why; a script must begin its work under `if __name__ == "__main__":`. ' + GO_ON
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
        for shard, faults in on_ray.results(ray, partial(_packing, job), todo, workers=workers):
            bar.update(len(job.numbers(shard)))
            yield shard, faults


def _packing(job: Job) -> Callable[[int], list[Any]]:
    return Packer(job).write


_worker: tuple[Packer, Any, Any] | None = None  # of this process: packer, counter of samples, whether to stop


def _start_worker(job: Job, count: Any, stop: Any) -> None:
    """Prepare a worker process. It ends with its parent, leaves interrupts to the parent, and has one thread."""
    global _worker
    machine.exit_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    _worker = Packer(job), count, stop


def _write_shard(shard: int) -> list[Any]:
    assert _worker is not None
    packer, count, stop = _worker

    def progress(samples: int) -> None:
        with count.get_lock():
            count.value += samples
        if stop.is_set():
            raise GpuaugError(f"packing was stopped. {GO_ON}")

    return packer.write(shard, progress)


def _write_index(job: Job) -> None:
    """Write the index, from the notes of the shards, and then the manifest."""
    notes = []
    for shard in range(job.shards):
        if (note := job.note(shard)) is None:
            raise GpuaugError(f"shard {shard} of {str(job.out)!r} vanished while the others were written. {GO_ON}")
        notes.append(note)
    if not any(note["keys"] for note in notes):
        raise SourceError(f"none of the {len(job.source)} samples could be packed: all of them are bad.")
    written: dict[str, list[Any]] = {}  # bytes and digest of every file

    def put(name: str, data: bytes) -> None:
        files.write(job.work / name, data, sync=True)
        written[name] = [len(data), digest(data)]

    keys = [os.fsencode(key) for note in notes for key in note["keys"]]
    put("index/keys.bin", b"".join(keys))
    put("index/keys.npy", npy(np.cumsum([0, *map(len, keys)]), np.int64))
    put("index/numbers.npy", npy([n for note in notes for n in note["numbers"]], np.int64))
    labels = [label for note in notes for label in note["labels"]]
    label_dtype = _label_dtype(labels)
    if label_dtype is not None:
        put("index/labels.npy", npy(labels, label_dtype))
    fields = {"offsets": np.int64, "lengths": np.int32, "checksums": np.uint32, "shapes": np.int32}
    for size in job.what.names:
        shards = [note["files"][str(size)] for note in notes]
        for field, dtype in fields.items():
            put(f"index/{size}.{field}.npy", npy([value for shard in shards for value in shard[field]], dtype))
        if job.source.classes is not None:
            put(f"{size}/classes.json", json.dumps(list(job.source.classes), indent=1).encode())
        for number, shard in enumerate(shards):
            written[shard_name(size, number, job.what.format)] = [shard["bytes"], shard["hash"]]
    manifest = _manifest(job, notes, label_dtype)
    manifest = json.loads(json.dumps({**manifest, "files": dict(sorted(written.items()))}))
    files.write(job.work / MANIFEST, to_json({**manifest, "checksum": checksum(manifest)}), sync=True)


def _manifest(job: Job, notes: list[dict[str, Any]], label_dtype: Any) -> dict[str, Any]:
    """What the manifest says, without the list of files."""
    dropped = []
    for shard, note in enumerate(notes):
        numbers = job.numbers(shard)
        for row, stage, reason, *_ in note["faults"]:
            index = int(numbers[row])
            dropped.append({"key": job.source.key(index), "index": index, "stage": stage, "reason": reason})
    return {
        "kind": KIND,
        "version": VERSION,
        "format": job.what.format,
        "sizes": job.what.names,
        "samples": sum(len(note["keys"]) for note in notes),
        "shards": [len(note["keys"]) for note in notes],
        "classes": None if job.source.classes is None else list(job.source.classes),
        "labels": None if label_dtype is None else np.dtype(label_dtype).name,
        "dropped": dropped,
        "job": job.describe(),
    }


def _label_dtype(labels: list[Any]) -> Any:
    """dtype of the labels; None if no sample has one."""
    if all(label is None for label in labels):
        return None
    if any(label is None for label in labels):
        raise SourceError("some samples have labels and some have none. Set `source.labels=none`, or label all.")
    return np.int64 if all(isinstance(label, int) for label in labels) else np.float32


def _publish(job: Job) -> dict[str, Any]:
    """Move every file to its place, the manifest last. The next run completes a move that was killed half-way."""
    for name in [*map(str, job.what.names), "index", MANIFEST]:
        if (job.work / name).exists():
            os.replace(job.work / name, job.out / name)
    if hasattr(os, "O_DIRECTORY"):  # the renames must be on the disk before the work folder goes
        folder = os.open(job.out, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    shutil.rmtree(job.work)
    return parse_manifest(read_file(str(job.out / MANIFEST)), KIND, VERSION)
