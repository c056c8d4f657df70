"""`gpuaug pack`: writes a source's images into shards, as JPEG, pixels or values, at one or more sizes.

A shard holds a fixed range of samples. So its bytes depend neither on the number of processes nor on restarts.
Until the last file is written, all files are in ``out/.partial``.
"""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from gpuaug import checks, files
from gpuaug.augment.multi_view import MultiView
from gpuaug.augment.recipe import Augment
from gpuaug.batch import Fault
from gpuaug.decode.dali import choose_backend
from gpuaug.decode.decoder import Decode
from gpuaug.errors import ConfigError, DataError, GpuaugError, SourceError
from gpuaug.loader.faults import Faults
from gpuaug.source.adapt import adapt
from gpuaug.source.base import checksum, digest
from gpuaug.source.local import read_file
from gpuaug.source.packed import KIND, MANIFEST, VERSION, parse
from gpuaug.tools.pack.job import GO_ON, Job, Pack, checked_out, finished
from gpuaug.tools.pack.shards import first_type, write_shards
from gpuaug.tools.pack.targets import describe
from gpuaug.tools.report import Report
from gpuaug.tools.request import Keys, Request

log = logging.getLogger("gpuaug")

USED = ("source", "decode", "faults")  # `gpuaug pack` uses these keys of the loader
AUGMENTED = ("augment", "seed")  # and, with `epochs`, these
# columns of the index; a column that differs between the sizes has a name such as `224.offsets`
COLUMNS: dict[str, Any] = {
    "numbers": np.int64, "offsets": np.int64, "lengths": np.int32, "checksums": np.int64, "shapes": np.int32,
    "mask_offsets": np.int64, "mask_lengths": np.int32, "object_bounds": np.int64, "object_labels": np.int64,
    "object_crowd": np.bool_, "object_ids": np.int64, "area": np.float32, "boxes": np.float32, "keypoints": np.float32,
    "corners": np.float32,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings(Keys, Pack):
    """The keys of `gpuaug pack`."""

    out: str | None = None
    num_workers: int | None = None
    on: Literal["local", "ray"] = "local"

    def __post_init__(self) -> None:
        Pack.__post_init__(self)
        super().__post_init__()


def main(request: Request) -> int:
    """Write the folder, or continue a stopped run."""
    settings = Settings(**request.settings())
    if (out := settings.out) is None:
        raise ConfigError("`out`, the output folder, must be given. Set it: out=DIR")
    report = Report(file=settings.json)
    _refuse_overrides_without_effect(request, settings)
    config = request.loader()
    parts = (config.get(name) for name in ("decode", "faults", "augment" if settings.epochs else ""))
    decode, faults, augment = (None if part is None else request.build(part) for part in parts)
    begin = time.monotonic()
    manifest = pack(
        request.build(config.get("source")),
        out,
        what=settings,
        decode=decode,
        faults=faults or Faults(),
        augment=augment,
        seed=config.get("seed", 0),
        num_workers=settings.num_workers,
        on=settings.on,
    )
    _add_result(report, manifest, out, seconds=time.monotonic() - begin)
    report.write()
    return 0


def _add_result(report: Report, manifest: dict[str, Any], out: str, *, seconds: float) -> None:
    total, bad = manifest["samples"], len(manifest["dropped"])
    report.add("images", total, f"{total}{f', {bad} bad samples left out' if bad else ''} ({seconds:.1f} s)")
    report.values |= {"dropped": bad, "seconds": seconds}
    if (targets := manifest.get("targets")) is not None:
        report.add("targets", targets["kinds"], ", ".join(targets["kinds"]))
    more = ", or as WebDataset shards" if manifest["format"] == "jpeg" else ""
    if augmented := manifest["augmented"]:
        used = sum(entry[0] for entry in manifest["files"].values())
        epochs, more = augmented["epochs"], " and the same `augment` and `seed`"
        report.add("epochs", epochs, f"{epochs} augmented versions, {used / 1e6:.1f} MB: {out}")
    for size in () if augmented else manifest["sizes"]:
        used = sum(entry[0] for name, entry in manifest["files"].items() if name.startswith(f"{size}/"))
        text = f"{used / 1e6:.1f} MB in {len(manifest['shards'])} shards: {Path(out) / str(size)}"
        report.add(f"size_{size}", used, text)
    report.add("read_it_with", out, f"source=packed source.root={out}{more}")


def _refuse_overrides_without_effect(request: Request, settings: Settings) -> None:
    """Raise ConfigError for overrides that have no effect on packing, such as those of the recipe."""
    used = (*USED, *AUGMENTED) if settings.epochs else USED
    if request.config_name is not None:
        return  # a user's own configuration may also hold keys for training
    for root, text in request.others():
        if "=" in text and (key := root.split("/")[0]) not in (*used, "hydra"):
            remedy = " Or set `epochs`, to store augmented images." if key in AUGMENTED else ""
            raise ConfigError(
                f"`{root}` has no effect on `gpuaug pack`, which reads its own keys and {', '.join(used)}. Remove it."
                f"{remedy}"
            )


def pack(
    source: Any,
    out: str | os.PathLike[str],
    *,
    what: Pack | None = None,
    decode: Decode | None = None,
    faults: Faults | None = None,
    augment: Augment | MultiView | None = None,
    seed: int = 0,
    num_workers: int | None = None,
    on: Literal["local", "ray"] = "local",
) -> dict[str, Any]:
    """Write ``source`` into the folder ``out``, or continue a stopped run. Returns the manifest.

    By default, a bad sample stops the run. ``augment`` and ``seed`` belong to ``what.epochs``.
    ``conf/gpuaug/command/pack.yaml`` explains ``num_workers`` and ``on``.
    """
    what, decode, faults = what or Pack(), decode or Decode(), faults or Faults(policy="raise")
    source = adapt(source)
    if faults.policy == "blank":
        raise ConfigError("`gpuaug pack` does not support `faults.policy=blank`. Set `faults.policy` to raise or drop.")
    if source.augmented_by or source.row_count > source.sample_count:
        raise ConfigError(
            "`source` must have one image per sample. Found: a packed source of several sizes or versions. Set one "
            "`source.size`, or pack the original source."
        )
    raw = decode.pixels == "raw"
    if raw and what.format is None and not what.epochs:
        what = replace(what, format="npy")
    if raw != (what.form == "npy"):
        wanted = "npy without `epochs`" if raw else "jpeg or uint8"
        raise ConfigError(
            f"`format` must be {wanted} with `decode.pixels={decode.pixels}`. Found: format={what.form}, "
            f"epochs={what.epochs}."
        )
    if decode.reduced:
        raise ConfigError(
            "`decode.reduced` must be false, because the images are decoded only once for all later runs. Found: true. "
            "Set decode.reduced=false."
        )
    targets = describe(source, pixel_centers=what.pixel_centers, orientation=what.orientation, colors=what.colors)
    if what.epochs:
        _check_recipe(augment, targets)
    checks.one_of("on", on, ("local", "ray"))
    checks.whole_number("num_workers", num_workers, 0, optional=True)
    job = Job(
        source=source,
        out=checked_out(Path(out), source),
        what=what,
        # resolve `auto` now, because another machine could choose another backend
        decode=replace(decode, num_threads=1, backend=choose_backend(decode.backend)),  # type: ignore[arg-type]
        truncated=faults.truncated == "accept",
        drop=faults.policy == "drop",
        targets=targets,
        augment=augment if what.epochs else None,
        seed=checks.whole_number("seed", seed, None),
    )
    if raw:
        job = replace(job, dtype=first_type(job))
    if (manifest := finished(job.out)) is not None:
        job.refuse_changes(manifest["job"])
        shutil.rmtree(job.work, ignore_errors=True)  # a run that was killed at its very end leaves this folder
        log.info("pack %s: already finished", job.out)
        return manifest
    with job.only_writer():
        if not (job.work / MANIFEST).exists():
            _write_missing_shards(job, faults, num_workers=num_workers, on=on)
            _write_index(job)
        return _publish(job)


def _check_recipe(augment: Any, targets: dict[str, Any] | None) -> None:
    """Raise ConfigError if the versions cannot be stored. ``targets``: the description of the source's targets."""
    checks.instance("augment", augment, Augment, MultiView)
    if getattr(augment, "sizes", None) is not None:
        raise ConfigError("`epochs` stores versions of one size. Found: a recipe with `sizes`. Remove `augment.sizes`.")
    if len(augment.schedule) > 1:
        raise ConfigError(
            "`epochs` stores versions of one recipe. Found: a recipe that changes at epoch "
            f"{', '.join(str(first) for first in augment.schedule if first)}. Remove `epochs` from the recipe."
        )
    if targets is not None:
        raise ConfigError(
            "`epochs` stores augmented images and labels, but no masks, boxes or keypoints. Found: a source with "
            f"{', '.join(targets['kinds'])}. Pack without `epochs`; training then augments images and targets together."
        )
    for view in augment.views:
        crop = view.augment.crop
        if view.augment.combine.entries:
            raise ConfigError("`augment.combine` must be null with `epochs`, for one sample each. Found: combine.")
        if crop is None or crop.needs or not crop.fixed:
            raise ConfigError(
                "`augment.crop` must give images of one size (H, W) with `epochs`, and cannot depend on targets. "
                f"Found: {crop!r}. Use gpuaug.RandomResizedCrop or gpuaug.Resize((H, W))."
            )


def _write_missing_shards(job: Job, faults: Faults, *, num_workers: int | None, on: str) -> None:
    before = {shard: note["faults"] for shard in range(job.shards) if (note := job.note(shard)) is not None}
    missing = [shard for shard in range(job.shards) if shard not in before]
    if before:
        log.info("pack %s: %d of %d shards are already done", job.out, len(before), job.shards)
    written = write_shards(job, missing, on=on, num_workers=num_workers)
    done = sum(len(job.numbers(shard)) for shard in before)
    with tqdm(total=len(job.source), initial=done, desc="pack", unit="img", disable=None) as bar, closing(written):
        for shard, listed in chain(before.items(), written if missing else ()):
            samples = len(job.numbers(shard))
            if shard not in before:
                bar.update(samples)
            rows = [
                Fault(row, stage, reason, size, bytes.fromhex(head))
                for row, (_, stage, reason, size, head) in enumerate(listed)
            ]
            numbers = [number for number, *_ in listed]
            try:
                faults.handle(rows, indices=numbers, epoch=0, key_of=job.source.key)
            except DataError as error:
                remedy = "To leave out such samples, set `faults.policy=drop`."
                raise DataError(error.key, error.index, error.stage, error.reason, remedy) from None
    faults.end_of_epoch(0)


def _write_index(job: Job) -> None:
    """Write the index, then the manifest."""
    columns, written, dropped = _read_notes(job)
    shards = [len(keys) for keys in columns["keys"]]
    if not any(shards):
        raise SourceError(f"all {len(job.source)} samples are bad, so nothing could be packed.")

    def put(name: str, data: bytes) -> None:
        files.write(job.work / name, data, sync=True)
        written[name] = [len(data), digest(data)]

    def put_array(name: str, values: Any, dtype: Any = None) -> None:
        stream = io.BytesIO()
        np.lib.format.write_array(stream, np.asarray(values, dtype=dtype), version=(2, 0))
        put(f"index/{name}.npy", stream.getvalue())

    for name in ("keys", "extra"):
        lines = [os.fsencode(text) for column in columns.pop(name) for text in column]
        if name == "keys" or any(line != b"null" for line in lines):
            put(f"index/{name}.bin", b"".join(lines))
            put_array(name, np.cumsum([0, *map(len, lines)]), np.int64)
    if (labels := _labels([*chain(*columns.pop("labels"))])) is not None:
        put_array("labels", labels)
    targets = dict(job.targets or {})
    for name, per_shard in columns.items():
        array = _joined(name, per_shard, targets.get("num_keypoints") or 0)
        put_array(name, array)
        if name.endswith(".keypoints"):
            targets["num_keypoints"] = array.shape[1]
        if name == "numbers" and job.source.image_ids is not None:
            put_array("image_ids", job.source.image_ids.numpy()[array])
    if job.source.category_ids is not None:
        put_array("category_ids", job.source.category_ids.numpy())
    classes = None if job.source.classes is None else list(job.source.classes)
    for size in job.what.names if classes is not None else ():
        put(f"{size}/classes.json", json.dumps(classes, indent=1).encode())
    manifest = {
        "kind": KIND,
        "version": VERSION,
        "format": job.what.form,
        "sizes": job.what.names,
        "samples": sum(shards),
        "shards": shards,
        "classes": classes,
        "labels": None if labels is None else labels.dtype.name,
        **({"targets": targets} if targets else {}),
        "augmented": job.augmented,
        "dropped": dropped,
        "job": job.describe(),
        "files": dict(sorted(written.items())),
    }
    write_manifest(job.work / MANIFEST, manifest)


def write_manifest(file: Path, manifest: Mapping[str, Any]) -> None:
    """Write a manifest with its checksum, completely or not at all."""
    files.write(file, json.dumps({**manifest, "checksum": checksum(manifest)}, indent=1) + "\n", sync=True)


def _read_notes(job: Job) -> tuple[dict[str, list[Any]], dict[str, list[Any]], list[dict[str, Any]]]:
    """What the notes list: columns (one array or list per shard), size and digest of each file, bad samples."""
    columns, written, dropped = defaultdict[str, list[Any]](list), dict[str, list[Any]](), list[dict[str, Any]]()
    num_keypoints = set[int]()
    for shard in range(job.shards):
        if (note := job.note(shard)) is None:
            raise GpuaugError(f"shard {shard} of {str(job.out)!r} disappeared while others were written. {GO_ON}")
        for name, values in note["columns"].items():
            if name.endswith(".keypoints"):
                num_keypoints.update(map(len, values))
            if len(num_keypoints) > 1:
                listed = sorted(num_keypoints)
                raise SourceError(f"all objects must have the same number of keypoints. Found: {listed}.")
            kind = COLUMNS.get(name.rpartition(".")[2])
            columns[name].append(values if kind is None else np.array(values, kind))  # lists take more memory
        for size, path in job.files(shard).items():
            written[path.relative_to(job.work).as_posix()] = note["files"][str(size)]
        for number, stage, reason, *_ in note["faults"]:
            dropped.append({"key": job.source.key(number), "index": number, "stage": stage, "reason": reason})
    return columns, written, dropped


def _joined(name: str, per_shard: list[NDArray[Any]], num_keypoints: int) -> NDArray[Any]:
    """Join the arrays of a column. An empty column gets zero rows of the usual shape."""
    if name == "object_bounds":
        return np.cumsum([0, *chain(*per_shard)], dtype=np.int64)
    shape = {"boxes": (0, 4), "corners": (0, 4, 2), "keypoints": (0, num_keypoints, 3)}.get(name.rpartition(".")[2], 0)
    return np.concatenate([array for array in per_shard if len(array)] or [np.zeros(shape, per_shard[0].dtype)])


def _labels(labels: list[Any]) -> NDArray[Any] | None:
    """The labels of all samples, int64 or float32; None if no sample has one."""
    if missing := sum(label is None for label in labels):
        if missing < len(labels):
            raise SourceError("some samples have no label. Label all samples, or set `source.labels=none`.")
        return None
    return np.array(labels, np.int64 if all(isinstance(label, int) for label in labels) else np.float32)


def _publish(job: Job) -> dict[str, Any]:
    """Move every file to its final place, the manifest last. The next run completes an interrupted move."""
    for name in [*map(str, job.what.names), "index", MANIFEST]:
        if (job.work / name).exists():
            os.replace(job.work / name, job.out / name)
    folder = os.open(job.out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)  # the renames must reach the disk before the work folder is removed
    finally:
        os.close(folder)
    shutil.rmtree(job.work)
    return parse(read_file(str(job.out / MANIFEST)))
