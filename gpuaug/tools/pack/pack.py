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
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from gpuaug import checks, files
from gpuaug.batch import Fault
from gpuaug.decode.dali import choose_backend
from gpuaug.decode.decoder import Decode
from gpuaug.errors import ConfigError, DataError, GpuaugError, SourceError
from gpuaug.loader.faults import Faults
from gpuaug.source.adapt import adapt
from gpuaug.source.base import checksum, parse_manifest
from gpuaug.source.local import read_file
from gpuaug.source.packed import KIND, MANIFEST, VERSION, shard_name
from gpuaug.tools.pack.job import Job, Pack, Packer, checked_out, finished
from gpuaug.tools.store import GO_ON, digest, npy, only_writer, results, to_json

log = logging.getLogger("gpuaug")


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
    place = checked_out(Path(out), source)
    job = Job(
        source=source,
        out=place,
        what=what,
        # what `auto` is here; another machine could differ
        decode=replace(decode, num_threads=1, backend=choose_backend(decode.backend)),  # type: ignore[arg-type]
        truncated=faults.truncated == "accept",
        drop=faults.policy == "drop",
    )
    if (manifest := finished(place)) is not None:
        job.check_same(manifest["job"])
        shutil.rmtree(job.work, ignore_errors=True)  # left by a run that was killed at its very end
        log.info("pack %s: finished already", place)
        return manifest
    with only_writer(job.work, out=place):
        job.begin()
        if not (job.work / MANIFEST).exists():
            _write_shards(job, faults, num_workers=num_workers, on=on)
            _write_index(job)
        return _publish(job)


def _write_shards(job: Job, faults: Faults, *, num_workers: int | None, on: str) -> None:
    notes = {shard: job.note(shard) for shard in range(job.shards)}
    todo = [shard for shard, note in notes.items() if note is None]
    before = [(shard, note["faults"]) for shard, note in notes.items() if note is not None]
    samples, bad = sum(len(job.numbers(shard)) for shard, _ in before), 0
    if before:
        log.info("pack %s: %d of %d shards are done already", job.out, len(before), job.shards)
    with tqdm(total=len(job.source), initial=samples, desc="pack", unit="img", disable=not sys.stderr.isatty()) as bar:
        made = results(partial(Packer, job), todo, on=on, progress=bar.update, num_workers=num_workers)
        with closing(made):
            for shard, shard_faults in chain(before, made if todo else ()):
                bad += len(shard_faults)
                bar.set_postfix(bad=bad, refresh=False)
                _handle(job, faults, shard, shard_faults)
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

    def put(name: str, *parts: bytes | memoryview) -> None:
        files.write(job.work / name, *parts, sync=True)
        written[name] = [sum(map(len, parts)), digest(*parts)]

    keys = [os.fsencode(key) for note in notes for key in note["keys"]]
    put("index/keys.bin", b"".join(keys))
    put("index/keys.npy", *npy(np.cumsum([0, *map(len, keys)]), np.int64))
    put("index/numbers.npy", *npy([n for note in notes for n in note["numbers"]], np.int64))
    labels = [label for note in notes for label in note["labels"]]
    label_dtype = _label_dtype(labels)
    if label_dtype is not None:
        put("index/labels.npy", *npy(labels, label_dtype))
    classes = None if job.source.classes is None else list(job.source.classes)
    fields = {"offsets": np.int64, "lengths": np.int32, "checksums": np.uint32, "shapes": np.int32}
    for size in job.what.names:
        shards = [note["files"][str(size)] for note in notes]
        for field, dtype in fields.items():
            put(f"index/{size}.{field}.npy", *npy([value for shard in shards for value in shard[field]], dtype))
        if classes is not None:
            put(f"{size}/classes.json", json.dumps(classes, indent=1).encode())
        for number, shard in enumerate(shards):
            written[shard_name(size, number, job.what.format)] = [shard["bytes"], shard["hash"]]
    manifest = {
        "kind": KIND,
        "version": VERSION,
        "format": job.what.format,
        "sizes": job.what.names,
        "samples": len(keys),
        "shards": [len(note["keys"]) for note in notes],
        "classes": classes,
        "labels": None if label_dtype is None else np.dtype(label_dtype).name,
        "dropped": _dropped(job, notes),
        "job": job.describe(),
        "files": dict(sorted(written.items())),
    }
    manifest = json.loads(json.dumps(manifest))
    files.write(job.work / MANIFEST, to_json({**manifest, "checksum": checksum(manifest)}), sync=True)


def _dropped(job: Job, notes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The samples that were left out."""
    dropped = []
    for shard, note in enumerate(notes):
        for row, stage, reason, *_ in note["faults"]:
            index = int(job.numbers(shard)[row])
            dropped.append({"key": job.source.key(index), "index": index, "stage": stage, "reason": reason})
    return dropped


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
