"""Augmented epochs on disk: their file format, and the source that reads them.

A complete folder of `gpuaug materialize` contains

- ``manifest.json``: source, recipe, views, numbers of rows, type of the labels,
- ``epoch-0000/order.npy``: int64 [M], the sample number of each row of the epoch,
- ``epoch-0000/00000.npy``: a chunk of these rows, as a structured array with the dtype of :func:`record`,
- ``epoch-0000/00000.json``: the chunk's checksum, and the faults of samples without pixels,
- ``*.npy`` with the keys, labels and numbers of the samples.
"""

from __future__ import annotations

import json
import logging
import operator
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.batch import EncodedBatch, Fault
from gpuaug.errors import ConfigError, SourceError
from gpuaug.files import check_regular
from gpuaug.source.adapt import adapt
from gpuaug.source.base import ListedSource, parse_manifest
from gpuaug.source.filters import Subset, active
from gpuaug.source.index import NO_ARRAY, Names, check_array, locate, occurrences, outside, share
from gpuaug.source.local import read_file
from gpuaug.source.paths import absolute

log = logging.getLogger("gpuaug")

KIND, VERSION = "gpuaug materialize", 1
MANIFEST, PLAN = "manifest.json", ".plan.json"  # an unfinished folder has a PLAN instead
STORES = {"uint8": "|u1", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}  # numpy has no bfloat16
MAPPED_CHUNKS = 64  # chunks that a process keeps mapped; each needs a file descriptor


class MaterializedSource(ListedSource):
    """Replays augmented epochs that `gpuaug materialize` wrote, without decoding or augmentation.

    The loader raises an error if its recipe or seed differs from that of the stored epochs. Samples keep the numbers,
    keys, labels and classes of the original source. So a loader's state is valid for both sources.

    Args:
        root: the folder.
        original: the original source, to check that its samples are still the same; None: no check.
        subset, exclude: as in :class:`FolderSource`, applied to the stored samples.

    Raises:
        SourceError: if the folder is incomplete or damaged, or was not made from ``original``.

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
        self.root = absolute(root)
        self.manifest = read_manifest(Path(self.root))
        self.rows = Rows(self.root, self.manifest)
        self.classes, self.class_to_idx = self.manifest["classes"], self.manifest["class_to_idx"]
        self.labels = self._numbers("labels")
        self._stored = self._numbers("indices")  # sample numbers; None: 0 .. samples - 1
        numbers = None if self._stored is None else self._stored.numpy()
        if numbers is not None and (not len(numbers) or numbers[0] < 0 or (np.diff(numbers) <= 0).any()):
            raise _damaged(os.path.join(self.root, "indices.npy"), "its numbers are not ascending")
        self._names = self._keys()
        if original is not None and (digest := adapt(original).digest()) != self.digest():
            raise SourceError(
                f"`source.original` does not have the samples of the epochs in {self.root!r}: its digest is {digest}, "
                f"not {self.digest()}. Run `gpuaug materialize` into a new folder, or restore the files."
            )
        chosen = active(self._names, subset, exclude, root=self.root, numbers=numbers)
        self.indices = self._stored if chosen is None else chosen
        log.info("source %s: %s", self.root, self)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Stored bytes and label of sample ``index`` in the first stored epoch."""
        self._check(index)
        rows = np.flatnonzero(self.rows.order(0) == operator.index(index))
        if not len(rows):
            raise IndexError(f"sample {index} is not in the first stored epoch of {self.root!r}.")
        return self.rows[int(rows[0])]

    def __repr__(self) -> str:
        m = self.manifest
        last = m["start_epoch"] + m["epochs"] - 1
        return f"MaterializedSource({len(self)} images, epochs {m['start_epoch']}..{last} as {m['store']})"

    @property
    def num_classes(self) -> int | None:
        """The ``num_classes`` of the original source."""
        return self.manifest["num_classes"]

    @property
    def stored(self) -> MaterializedSource:
        """This source. The attribute tells the loader to replay epochs."""
        return self

    def digest(self) -> str:
        """The digest of the original source."""
        return str(self.manifest["made_of"]["source"])

    def _label_of(self, index: int) -> Any:
        return super()._label_of(index if self._stored is None else int(self._stored[index]))

    def _check(self, index: int) -> int:
        """Position of a sample among the stored samples."""
        number = operator.index(index)
        position = number if self._stored is None else int(np.searchsorted(self._stored.numpy(), number))
        if not 0 <= position < len(self._names) or (self._stored is not None and int(self._stored[position]) != number):
            raise IndexError(f"{self.root!r} has no sample {number}.")
        return position

    def _keys(self) -> Names:
        blob, offsets = self._numbers("keys", dtype=np.uint8), self._numbers("key_offsets")
        count = self.manifest["samples"] if self._stored is None else len(self._stored)
        if blob is None or offsets is None or not len(offsets) == count + 1 == self.manifest["samples"] + 1:
            raise _damaged(os.path.join(self.root, "keys.npy"), "its number of keys differs from the manifest")
        ends = offsets.numpy()
        if ends[0] or (np.diff(ends) < 0).any() or ends[-1] > len(blob):
            raise _damaged(os.path.join(self.root, "key_offsets.npy"), "the keys overlap or are missing")
        return Names(blob, offsets)

    def _numbers(self, name: str, *, dtype: Any = np.int64) -> Tensor | None:
        values = _load(Path(self.root, f"{name}.npy"), dtype=dtype, optional=True)
        return None if values is None else share(torch.from_numpy(np.array(values)))


class Rows:
    """The source that workers read. Its rows are the samples of all stored epochs, in the order of the epochs.

    ``rows[n]`` is ``(data, label)``. ``data`` holds the pixels of all views in mapped memory. For a sample
    without pixels, ``data`` is the fault as JSON, whose length always differs from that of pixels.
    """

    indices = labels = classes = class_to_idx = num_classes = None
    mapped = True

    def __init__(self, root: str, manifest: dict[str, Any]) -> None:
        self.root, self.manifest = root, manifest
        self.dtype: torch.dtype = getattr(torch, manifest["store"])  # uint8 pixels are not normalized yet
        self.record = record(manifest)
        fields: Any = self.record.fields
        self.size: int = fields["label"][1] if "label" in fields else self.record.itemsize  # bytes of a sample's pixels
        self.first = torch.from_numpy(np.cumsum([0, *manifest["rows"]]))  # int64 [K + 1], first row of each epoch
        self._labels = _load(Path(root, "labels.npy"), dtype=np.int64, optional=True)
        # None: labels, if there are any, are in the chunks
        self.label = None if self._labels is None else self._label
        self._repeats_logged = False
        self._chunk = lru_cache(maxsize=MAPPED_CHUNKS)(self._mapped)
        self._table = lru_cache(maxsize=2)(self._sorted)

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, (self.root, self.manifest)

    def __len__(self) -> int:
        return int(self.first[-1])

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        """Stored bytes and label of one row; SourceError if its chunk is missing or damaged."""
        slot, position = locate(self.first, row)  # slot: stored epoch, counted from 0; position: row in this epoch
        number, within = divmod(position, self.manifest["chunk"])
        samples, pixels, faults = self._chunk(slot, number)
        label = None if self.manifest["label"] is None else samples["label"][within]
        if within in faults:
            text = json.dumps(faults[within]).encode()
            return text if len(text) != self.size else text + b" ", label
        return pixels[within].data, label

    def key(self, index: int) -> str:
        return str(index)

    def digest(self) -> str:
        """Hash of source, seed and recipe."""
        return str(self.manifest["key"])

    def order(self, slot: int) -> NDArray[np.int64]:
        """Sample numbers in the order of a stored epoch: int64 [M], memory-mapped."""
        file = epoch_folder(Path(self.root), self.manifest, slot) / "order.npy"
        numbers = _load(file, dtype=np.int64)
        if len(numbers) != self.manifest["rows"][slot]:
            raise _damaged(file, f"it has {len(numbers)} numbers, not {self.manifest['rows'][slot]}")
        return numbers

    def numbers(self, epoch: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return the function ``rows(indices, repeats, valid)``, which gives the row numbers of a batch, int64 [B]."""
        stored = self.stored_epoch(epoch)
        if epoch != stored and not self._repeats_logged:
            self._repeats_logged = True
            log.warning(
                "epoch %d repeats the images of epoch %d: only %d epochs are stored, the first is epoch %d",
                epoch, stored, self.manifest["epochs"], self.manifest["start_epoch"],
            )  # fmt: skip

        def rows(indices: Tensor, repeats: Tensor, valid: Tensor) -> Tensor:
            positions, there = self._find(stored, indices.numpy(), repeats.numpy())
            if (missing := ~there & valid.numpy()).any():
                at = int(missing.argmax())
                sample = f"sample {int(indices[at])} (repeat {int(repeats[at])})"
                raise ConfigError(f"{sample} is not stored in epoch {stored}.")
            if not there.all():  # samples that pad the last batch: use their first row in the epoch
                again, _ = self._find(stored, indices.numpy(), np.zeros_like(positions))
                positions = np.where(there, positions, again)
            return torch.from_numpy(positions) + self.first[stored - self.manifest["start_epoch"]]

        return rows

    def has(self, epoch: int, indices: Tensor) -> bool:
        """Whether the stored epoch for ``epoch`` has all samples of ``indices``, int64 [M]."""
        return bool(self._find(self.stored_epoch(epoch), indices.numpy(), occurrences(indices).numpy())[1].all())

    def stored_epoch(self, epoch: int) -> int:
        """The stored epoch whose images ``epoch`` uses."""
        first, count = int(self.manifest["start_epoch"]), int(self.manifest["epochs"])
        return first + (epoch - first) % count

    def faults(self, batch: EncodedBatch) -> list[Fault]:
        """The faults that were stored in place of pixels."""
        without = set(np.flatnonzero(~self._has_pixels(batch)).tolist()) - {fault.row for fault in batch.faults}
        stored = [(row, json.loads(batch.encoded(row).numpy().tobytes())) for row in sorted(without)]
        return [Fault(row, f["stage"], f["reason"], f["size"], bytes.fromhex(f["head"])) for row, f in stored]

    def pixels(self, batch: EncodedBatch) -> Tensor:
        """Stored bytes of all views, uint8 [B, bytes of a sample]. A sample without pixels has zeros."""
        good = self._has_pixels(batch)
        if good.all():
            return batch.data.view(len(batch), self.size)
        flat = torch.zeros((len(batch), self.size), dtype=torch.uint8, device="cpu")
        for row in np.flatnonzero(good).tolist():
            flat[row] = batch.encoded(row)
        return flat

    def views(self, pixels: Tensor) -> list[Tensor]:
        """The views as tensors on the device of ``pixels``: uint8 [B, H, W, 3], or the stored dtype [B, 3, H, W]."""
        fields: Any = self.record.fields
        views = []
        for number in range(len(self.manifest["views"])):
            kind, begin = fields[f"view{number}"][:2]
            part = pixels[:, begin : begin + kind.itemsize]
            if self.dtype == torch.uint8:
                part = part.contiguous()
            if part.storage_offset() % self.dtype.itemsize:
                part = part.clone()  # the view's offset in the record may not be aligned for the dtype
            views.append(part.view(self.dtype).view(len(pixels), *kind.shape))
        return views

    def _has_pixels(self, batch: EncodedBatch) -> NDArray[np.bool_]:
        return np.asarray(np.diff(batch.offsets.numpy()) == self.size)

    def _find(
        self, epoch: int, indices: NDArray[np.int64], repeats: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The position of each sample in the stored epoch, and whether that epoch has the sample."""
        values, positions = self._table(epoch - self.manifest["start_epoch"])
        # index and repeat in one number; `gpuaug.random` requires repeats below 2**16
        wanted = (indices << 16) | repeats
        at = np.minimum(np.searchsorted(values, wanted), len(values) - 1)
        return positions[at], values[at] == wanted

    def _sorted(self, slot: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        indices = np.array(self.order(slot))
        stored = _load(Path(self.root, "indices.npy"), dtype=np.int64, optional=True)
        last = self.manifest["samples"] - 1 if stored is None else int(stored[-1])
        if beyond := outside(indices, last + 1):
            raise _damaged(self.root, f"order.npy must hold numbers in 0 .. {last}, but holds {beyond}")
        values = (indices << 16) | occurrences(torch.from_numpy(indices)).numpy()
        positions = np.argsort(values, kind="stable")
        return values[positions], positions

    def _label(self, row: int) -> int:
        slot, position = locate(self.first, row)
        return int(self._labels[self.order(slot)[position]])

    def _mapped(self, slot: int, number: int) -> tuple[Any, NDArray[np.uint8], dict[int, Any]]:
        """The records of a chunk, their pixels as uint8 [n, size], and the faults by row of the chunk."""
        chunk = Chunk.of(Path(self.root), self.manifest, slot, number)
        file, rows = chunk
        try:
            check_regular(os.stat(file), file)
            samples = np.lib.format.open_memmap(file, mode="r")
            faults = {int(fault.pop("row")): fault for fault in chunk.note()["faults"]}
            check_array(samples, self.record, (rows,))
        except NO_ARRAY as error:
            raise SourceError(
                f"the chunk {str(file)!r} is missing or damaged ({error}). Remove it, and run the same "
                "`gpuaug materialize` command again. The command writes only this chunk again."
            ) from error
        pixels = np.asarray(samples).view(np.uint8).reshape(rows, -1)[:, : self.size]
        return samples, pixels, faults


def record(manifest: dict[str, Any]) -> np.dtype[Any]:
    """Dtype of a stored sample: ``view0``, ``view1``, ..., and ``label`` if there are labels.

    A view is uint8 [H, W, 3] before normalization, or [3, H, W] of the final dtype after normalization.
    """
    store, label = manifest["store"], manifest["label"]
    fields: list[tuple[str, str, tuple[int, ...]]] = []
    for number, view in enumerate(manifest["views"]):
        height, width = view["size"]
        fields.append((f"view{number}", STORES[store], (height, width, 3) if store == "uint8" else (3, height, width)))
    if label is not None:
        fields.append(("label", {"int64": "<i8", "float32": "<f4"}[label["dtype"]], tuple(label["shape"])))
    return np.dtype(fields)


def epoch_folder(root: Path, manifest: dict[str, Any], slot: int) -> Path:
    return root / f"epoch-{manifest['start_epoch'] + slot:04d}"


def chunk_count(manifest: dict[str, Any], slot: int) -> int:
    return int(-(-manifest["rows"][slot] // manifest["chunk"]))


class Chunk(NamedTuple):
    """A file of consecutive rows of a stored epoch."""

    file: Path
    rows: int

    @classmethod
    def of(cls, root: Path, manifest: dict[str, Any], slot: int, number: int) -> Chunk:
        rows = min(manifest["chunk"], manifest["rows"][slot] - number * manifest["chunk"])
        return cls(epoch_folder(root, manifest, slot) / f"{number:05d}.npy", rows)

    @property
    def note_file(self) -> Path:
        """The file with the chunk's checksum and faults, which is written after the chunk."""
        return self.file.with_suffix(".json")

    def note(self) -> dict[str, Any]:
        """The content of the note; OSError or ValueError if the note is missing or wrong."""
        note = json.loads(read_file(str(self.note_file)))
        if not isinstance(note, dict) or note.get("rows") != self.rows or not isinstance(note.get("faults"), list):
            raise ValueError(f"its .json file has {str(note)[:100]}")
        for fault in note["faults"]:
            kinds = {"row": int, "stage": str, "reason": str, "size": int, "head": str}
            if not isinstance(fault, dict) or {name: type(value) for name, value in fault.items()} != kinds:
                raise ValueError(f"its .json file has an invalid fault: {str(fault)[:100]}")
            bytes.fromhex(fault["head"])
        return note


def read_manifest(root: Path) -> dict[str, Any]:
    """The manifest of a complete folder; SourceError if it cannot be used."""
    try:
        return parse_manifest(read_file(str(root / MANIFEST)), KIND, VERSION)
    except FileNotFoundError as error:
        text = f"must be a folder that `gpuaug materialize` wrote. Found no {MANIFEST} in {str(root)!r}."
        if (root / PLAN).exists():
            text = f"is not finished: {str(root)!r}. To continue, run the same `gpuaug materialize` command again."
        raise SourceError(f"`source.root` {text}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(root / MANIFEST, error) from error


def _load(file: Path, *, dtype: Any, optional: bool = False) -> Any:
    try:
        check_regular(os.stat(file), file)
        return check_array(np.lib.format.open_memmap(file, mode="r"), dtype)
    except NO_ARRAY as error:
        if optional and isinstance(error, FileNotFoundError):
            return None
        raise _damaged(file, error) from error


def _damaged(file: str | os.PathLike[str], what: Any) -> SourceError:
    return SourceError(f"{os.fspath(file)!r} is damaged: {what}. Run the same `gpuaug materialize` again.")
