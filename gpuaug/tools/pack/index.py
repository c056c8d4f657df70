"""Writes the index and the manifest of a packed folder from the notes of its shards."""

from __future__ import annotations

import io
import json
import os
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuaug import files
from gpuaug.errors import GpuaugError, SourceError
from gpuaug.source.base import checksum, digest
from gpuaug.source.packed import KIND, MANIFEST, VERSION, shard_name
from gpuaug.tools.pack.job import GO_ON, Job

# columns of the index; a column that differs between the sizes has a name such as `224.offsets`
COLUMNS: dict[str, Any] = {
    "numbers": np.int64, "offsets": np.int64, "lengths": np.int32, "checksums": np.int64, "shapes": np.int32,
    "mask_offsets": np.int64, "mask_lengths": np.int32, "object_bounds": np.int64, "object_labels": np.int64,
    "object_crowd": np.bool_, "object_ids": np.int64, "area": np.float32, "boxes": np.float32, "keypoints": np.float32,
}  # fmt: skip


def write_index(job: Job) -> None:
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
    targets = None if job.targets is None else dict(job.targets)
    for name, per_shard in columns.items():
        array = _joined(name, per_shard, (targets or {}).get("num_keypoints") or 0)
        put_array(name, array)
        if targets is not None and name.endswith(".keypoints"):
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
        **({} if targets is None else {"targets": targets}),
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
        for size, entry in note["files"].items():
            written[shard_name(size, shard, job.what.form)] = entry
        for number, stage, reason, *_ in note["faults"]:
            dropped.append({"key": job.source.key(number), "index": number, "stage": stage, "reason": reason})
    return columns, written, dropped


def _joined(name: str, per_shard: list[NDArray[Any]], num_keypoints: int) -> NDArray[Any]:
    """Join the arrays of a column. An empty column gets zero rows of the usual shape."""
    if name == "object_bounds":
        return np.cumsum([0, *chain(*per_shard)], dtype=np.int64)
    shape = {"boxes": (0, 4), "keypoints": (0, num_keypoints, 3)}.get(name.rpartition(".")[2], 0)
    return np.concatenate([array for array in per_shard if len(array)] or [np.zeros(shape, per_shard[0].dtype)])


def _labels(labels: list[Any]) -> NDArray[Any] | None:
    """The labels of all samples, int64 or float32; None if no sample has one."""
    if missing := sum(label is None for label in labels):
        if missing < len(labels):
            raise SourceError("some samples have no label. Label all samples, or set `source.labels=none`.")
        return None
    return np.array(labels, np.int64 if all(isinstance(label, int) for label in labels) else np.float32)
