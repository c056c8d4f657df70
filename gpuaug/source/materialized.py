"""Augmented epochs on disk: the format, and the source that reads it.

A complete folder of `gpuaug materialize` contains

- ``manifest.json``: what the epochs were made from, views, sizes and labels; written last,
- ``epoch-0000/order.npy``: int64 [M], sample numbers in the order of that epoch, one per row,
- ``epoch-0000/00000.npy``: a chunk of these rows, a structured array with a field per view (``view0`` ...: uint8
  [H, W, 3] before normalization, or the final dtype [3, H, W], bfloat16 as uint16) and ``label``,
- ``epoch-0000/00000.json``: the chunk's checksum, and the faults of samples without pixels,
- keys, labels and numbers of the samples, as in their source.

``numpy.load(chunk, mmap_mode="r")["view0"]`` shows the stored images.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import operator
import os
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.errors import ConfigError, SourceError
from gpuaug.source.adapt import adapt
from gpuaug.source.filters import Subset, active
from gpuaug.source.index import NO_ARRAY, Names, check_array, outside, share
from gpuaug.source.local import check_regular, open_text

log = logging.getLogger("gpuaug")

KIND, VERSION = "gpuaug materialize", 1  # of the format
MANIFEST, PLAN = "manifest.json", ".plan.json"  # of a complete folder; of one that is being written
STORES = {"uint8": "|u1", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}  # numpy has no bfloat16
MAPPED_CHUNKS = 64  # that a process keeps mapped: each needs a file descriptor


class MaterializedSource:
    """Augmented epochs that `gpuaug materialize` wrote, replayed without decoding or augmentation.

    The loader needs the recipe and seed that made them, and refuses others. Samples keep the numbers, keys, labels and
    classes of their source, and a loader's state fits both.

    Args:
        root: the folder.
        original: the source that the epochs were made from, to check that it has the same samples; None: no check.
        subset, exclude: as in :class:`FolderSource`, among the stored samples.

    Raises:
        SourceError: if the folder is incomplete or damaged, or was made from another source.

    >>> source = MaterializedSource("data/epochs")
    >>> loader = gpuaug.Loader(source, augment=recipe, seed=0, batch_size=256)
    """

    mapped = True

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        original: Any = None,
        subset: Subset = None,
        exclude: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(root, str | os.PathLike) or not os.fspath(root):
            raise ConfigError(f"`source.root` must be the path of a folder. Found: {root!r}.")
        self.root = os.path.abspath(os.path.expanduser(os.fspath(root)))
        self.manifest = read_manifest(Path(self.root))
        self.rows = Rows(self.root, self.manifest)
        self.classes: list[str] | None = self.manifest["classes"]
        self.class_to_idx: dict[str, int] | None = self.manifest["class_to_idx"]
        self.num_classes: int | None = self.manifest["num_classes"]
        self._stored, self.labels = self._numbers("indices"), self._numbers("labels")  # numbers; None: 0 .. samples - 1
        if self._stored is not None:
            numbers = self._stored.numpy()
            if not len(numbers) or numbers[0] < 0 or (np.diff(numbers) <= 0).any():
                raise _damaged(os.path.join(self.root, "indices.npy"), "its numbers are not ascending")
        self._names = self._keys()
        if original is not None and (digest := adapt(original).digest()) != self.digest():
            raise SourceError(
                f"`source.original` has other samples than the epochs in {self.root!r} were made of: digest {digest}, "
                f"and {self.digest()} there. Materialize anew, or restore the files."
            )
        stored = None if self._stored is None else self._stored.numpy()
        chosen = active(self._names, subset, exclude, root=self.root, numbers=stored)
        self.indices = self._stored if chosen is None else chosen
        log.info("source %s: %s", self.root, self)

    def __len__(self) -> int:
        return len(self._names) if self.indices is None else len(self.indices)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Stored bytes of sample number ``index`` in the first epoch, and its label."""
        self._position(index)
        rows = np.flatnonzero(self.rows.order(0) == operator.index(index))
        if not len(rows):
            raise IndexError(f"sample {index} is not in the first epoch of {self.root!r}.")
        return self.rows[int(rows[0])]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return (self[i] for i in (range(len(self)) if self.indices is None else self.indices.tolist()))

    def __repr__(self) -> str:
        m = self.manifest
        last = m["start_epoch"] + m["epochs"] - 1
        return f"MaterializedSource({len(self)} images, epochs {m['start_epoch']}..{last} as {m['store']})"

    @property
    def stored(self) -> MaterializedSource:
        """This source. A loader replays a source with this attribute instead of decoding it."""
        return self

    def key(self, index: int) -> str:
        """Key of sample number ``index`` in its source."""
        return os.fsdecode(self._names[self._position(index)])

    def digest(self) -> str:
        """The digest of the source that the epochs were made from."""
        return str(self.manifest["made_of"]["source"])

    def _position(self, index: int) -> int:
        """Position of a sample number among the stored ones; IndexError if it is not stored."""
        number = operator.index(index)
        position = number if self._stored is None else int(np.searchsorted(self._stored.numpy(), number))
        known = 0 <= position < len(self._names)
        if not known or (self._stored is not None and int(self._stored[position]) != number):
            raise IndexError(f"{self.root!r} has no sample {number}.")
        return position

    def _keys(self) -> Names:
        blob, offsets = self._numbers("keys", dtype=np.uint8), self._numbers("key_offsets")
        stored = None if self._stored is None else len(self._stored)
        if blob is None or offsets is None or len(offsets) != self.manifest["samples"] + 1:
            raise _damaged(os.path.join(self.root, "keys.npy"), "its keys are not those of the manifest")
        ends = offsets.numpy()
        if stored not in (None, len(ends) - 1) or ends[0] or (np.diff(ends) < 0).any() or ends[-1] > len(blob):
            raise _damaged(os.path.join(self.root, "key_offsets.npy"), "the keys overlap or are missing")
        return Names(blob, offsets)

    def _numbers(self, name: str, *, dtype: Any = np.int64) -> Tensor | None:
        file = Path(self.root, f"{name}.npy")
        return share(torch.from_numpy(np.array(_load(file, dtype=dtype)))) if file.exists() else None


class Rows:
    """The source that workers read: stored samples by row number, one epoch after the other.

    ``rows[n]`` returns the pixels of all views as one view of mapped memory. For a sample without pixels it returns the
    JSON of its fault, whose length differs. Pickles to the path and the manifest.
    """

    indices = labels = classes = class_to_idx = num_classes = None
    mapped = True

    def __init__(self, root: str, manifest: dict[str, Any]) -> None:
        self.root, self.manifest = root, manifest
        self.record = record(manifest)
        self.size = pixel_bytes(self.record)  # of all views of a sample
        self.first = np.concatenate([[0], np.cumsum(manifest["rows"])])  # int64 [K + 1], first row of each epoch
        self._chunk = lru_cache(maxsize=MAPPED_CHUNKS)(self._mapped)

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, (self.root, self.manifest)

    def __len__(self) -> int:
        return int(self.first[-1])

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        """Stored bytes and label of one row.

        Raises:
            SourceError: if its chunk is missing or damaged.
        """
        slot, position = self.locate(row)
        number, within = divmod(position, self.manifest["chunk"])
        samples, pixels, faults = self._chunk(slot, number)
        label = None if "label" not in (self.record.names or ()) else samples["label"][within]
        if within in faults:
            text = json.dumps(faults[within]).encode()
            return text if len(text) != self.size else text + b" ", label
        return pixels[within].data, label

    def order(self, slot: int) -> NDArray[np.int64]:
        """Sample numbers in the order of a stored epoch, int64 [M], mapped."""
        file = epoch_folder(Path(self.root), self.manifest, slot) / "order.npy"
        numbers = _load(file, dtype=np.int64)
        if len(numbers) != self.manifest["rows"][slot]:
            raise _damaged(file, f"{len(numbers)} numbers")
        return numbers

    def checked_order(self, slot: int) -> NDArray[np.int64]:
        """As :meth:`order`, in memory and with every number checked.

        Raises:
            SourceError: if a number is not that of a sample.
        """
        numbers = np.array(self.order(slot))
        indices = Path(self.root, "indices.npy")
        last = int(_load(indices, dtype=np.int64)[-1]) if indices.exists() else self.manifest["samples"] - 1
        if beyond := outside(numbers, last + 1):
            file = epoch_folder(Path(self.root), self.manifest, slot) / "order.npy"
            raise _damaged(file, f"samples have the numbers 0 .. {last}, and it holds {beyond}")
        return numbers

    @property
    def label(self) -> Callable[[int], int] | None:
        """``label(row)``, for samples that cannot be read; None if only reading a sample shows its label."""
        return None if self._labels is None else self._label

    @cached_property
    def _labels(self) -> NDArray[np.int64] | None:
        file = Path(self.root, "labels.npy")
        return _load(file, dtype=np.int64) if file.exists() else None

    def _label(self, row: int) -> int:
        slot, position = self.locate(row)
        assert self._labels is not None
        return int(self._labels[self.order(slot)[position]])

    def key(self, index: int) -> str:
        """The row number; :class:`MaterializedSource` knows the keys."""
        return str(index)

    def digest(self) -> str:
        """Hash of source, seed and recipe."""
        return str(self.manifest["key"])

    def locate(self, row: int) -> tuple[int, int]:
        """The stored epoch of a row, counted from 0, and the position in it."""
        if not 0 <= row < len(self):
            raise IndexError(f"rows are 0 .. {len(self) - 1}. Found: {row}.")
        slot = int(np.searchsorted(self.first, row, side="right")) - 1
        return slot, int(row - self.first[slot])

    def _mapped(self, slot: int, number: int) -> tuple[Any, NDArray[np.uint8], dict[int, Any]]:
        """A chunk: its records, their pixels uint8 [n, size], and the faults by row."""
        file = chunk_file(Path(self.root), self.manifest, slot, number)
        rows = chunk_rows(self.manifest, slot, number)
        try:
            check_regular(os.stat(file), file)
            samples = np.lib.format.open_memmap(file, mode="r")
            faults = {int(fault.pop("row")): fault for fault in read_marker(file, rows=rows)["faults"]}
            check_array(samples, self.record, (rows,))
        except NO_ARRAY as error:
            raise SourceError(
                f"the chunk {str(file)!r} is missing or damaged ({error}). Remove it, and run the same "
                "`gpuaug materialize` once more: only that chunk is made anew."
            ) from error
        pixels = np.asarray(samples).view(np.uint8).reshape(rows, -1)[:, : self.size]
        return samples, pixels, faults


def record(manifest: dict[str, Any]) -> np.dtype[Any]:
    """Dtype of a stored sample: ``view0``, ``view1``, ..., and ``label`` if there are labels."""
    store, label = manifest["store"], manifest["label"]
    fields: list[tuple[str, str, tuple[int, ...]]] = []
    for number, view in enumerate(manifest["views"]):
        height, width = view["size"]
        fields.append((f"view{number}", STORES[store], (height, width, 3) if store == "uint8" else (3, height, width)))
    if label is not None:
        fields.append(("label", {"int64": "<i8", "float32": "<f4"}[label["dtype"]], tuple(label["shape"])))
    return np.dtype(fields)


def pixel_bytes(of: np.dtype[Any]) -> int:
    """Bytes of all views of a record, which precede its label."""
    assert of.fields is not None
    return int(of.fields["label"][1]) if "label" in of.fields else of.itemsize


def epoch_folder(root: Path, manifest: dict[str, Any], slot: int) -> Path:
    """Folder of the chunks of a stored epoch."""
    return root / f"epoch-{manifest['start_epoch'] + slot:04d}"


def chunk_file(root: Path, manifest: dict[str, Any], slot: int, number: int) -> Path:
    """File of the samples of a chunk."""
    return epoch_folder(root, manifest, slot) / f"{number:05d}.npy"


def chunk_count(manifest: dict[str, Any], slot: int) -> int:
    """Number of chunks of a stored epoch."""
    return math.ceil(manifest["rows"][slot] / manifest["chunk"])


def chunk_rows(manifest: dict[str, Any], slot: int, number: int) -> int:
    """Number of samples in a chunk; the last chunk of an epoch may be shorter."""
    return int(min(manifest["chunk"], manifest["rows"][slot] - number * manifest["chunk"]))


def read_marker(file: Path, *, rows: int) -> dict[str, Any]:
    """The note that is written after a chunk: rows, digest, faults.

    Raises:
        OSError, ValueError: if the chunk is incomplete, or the note is damaged.
    """
    note = json.load(open_text(str(file.with_suffix(".json"))))
    if not isinstance(note, dict) or note.get("rows") != rows or not isinstance(note.get("faults"), list):
        raise ValueError(f"its note is {str(note)[:100]}")
    for fault in note["faults"]:
        kinds = {"row": int, "stage": str, "reason": str, "size": int, "head": str}
        if not isinstance(fault, dict) or {name: type(value) for name, value in fault.items()} != kinds:
            raise ValueError(f"its note names the fault {str(fault)[:100]}")
        bytes.fromhex(fault["head"])
    return note


def read_manifest(root: Path) -> dict[str, Any]:
    """The manifest of a complete folder.

    Raises:
        SourceError: if it is missing or damaged, or has another version.
    """
    try:
        manifest = json.load(open_text(str(root / MANIFEST)))
    except FileNotFoundError as error:
        if (root / PLAN).exists():
            raise SourceError(
                f"`source.root` is not finished: {str(root)!r}. Run the same `gpuaug materialize` once more: it goes "
                "on where it stopped."
            ) from error
        raise SourceError(
            f"`source.root` must be a folder that `gpuaug materialize` wrote. Found no {MANIFEST} in {str(root)!r}."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{str(root / MANIFEST)!r} cannot be read: {error}.") from error
    kind, version = (manifest.get("kind"), manifest.get("version")) if isinstance(manifest, dict) else (None, None)
    if (kind, version) != (KIND, VERSION):
        raise SourceError(
            f"{str(root)!r} must be a folder of `{KIND}`, version {VERSION}. Found: {kind!r}, version {version!r}."
        )
    try:
        _check_manifest(manifest)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _damaged(root / MANIFEST, error) from error
    return manifest


def _check_manifest(manifest: dict[str, Any]) -> None:
    """KeyError, TypeError, ValueError or OverflowError if a field is missing or has a wrong value."""
    counts = [manifest.get(name) for name in ("samples", "epochs", "chunk", "start_epoch")]
    rows: Any = manifest.get("rows")
    valid = all(type(n) is int and n >= 0 for n in [*counts, *rows]) and len(rows) == manifest["epochs"] > 0
    if not valid or not manifest["chunk"] or not pixel_bytes(record(manifest)):
        raise ValueError(f"samples, epochs, chunk, start_epoch and rows are {counts}, {rows}")
    if missing := {"classes", "class_to_idx", "num_classes", "key", "order"} - manifest.keys():
        raise ValueError(f"it has no {', '.join(sorted(missing))}")
    str(manifest["made_of"]["source"]), [view["backend"] for view in manifest["views"]]


def _load(file: Path, *, dtype: Any) -> NDArray[Any]:
    """A list of numbers, mapped."""
    try:
        check_regular(os.stat(file), file)
        return check_array(np.lib.format.open_memmap(file, mode="r"), dtype)
    except NO_ARRAY as error:
        raise _damaged(file, error) from error


def _damaged(file: str | os.PathLike[str], what: Any) -> SourceError:
    return SourceError(f"{os.fspath(file)!r} is damaged: {what}. Run the same `gpuaug materialize` once more.")


def key_of(made_of: dict[str, Any]) -> str:
    """Hash of source, seed and recipe."""
    return hashlib.blake2b(json.dumps(made_of, sort_keys=True).encode(), digest_size=16).hexdigest()
