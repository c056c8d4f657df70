"""Reads the folder that `gpuaug pack` writes: JPEG shards, pixels or values, at several sizes or in augmented versions.

Row k * N + i of a source is its sample i at the k-th size or in the k-th version.
"""

from __future__ import annotations

import io
import json
import mmap
import operator
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.errors import ConfigError, SourceError
from gpuaug.source.base import Classes, ListedSource, checksum, digest
from gpuaug.source.classes import class_mapping, numbers_of
from gpuaug.source.filters import Subset
from gpuaug.source.index import NO_ARRAY, Names, bounds_of, locate, share
from gpuaug.source.objects import ObjectTable, checked
from gpuaug.source.paths import absolute, is_url, join, redact
from gpuaug.source.remote.storage import Range, Remote, Storage

MANIFEST = "manifest.json"  # an unfinished folder has none
KIND, VERSION = "gpuaug pack", 2
ENDINGS = {"uint8": "bin", "jpeg": "tar", "npy": "bin"}
FULL = "full"  # the size of images that are not resized
MAPPED_FILES = 256  # that a process keeps open; the usual limit of a process is 1024 files
# A local sample is compared with its checksum at its 1st, 17th, 33rd, ... read in a process. Each time would take 4 to
# 7 % of the time of a batch that is only cropped, flipped and normalized.
CHECKED_EVERY = 16

Size = int | str


class PackedSource(ListedSource):
    """Reads the folder that `gpuaug pack` wrote, with the keys, labels, classes and targets of the original source.

    Samples 0 .. N - 1 are in the order of the original source. Local arrays are memory-mapped and cropped
    without a copy. For them, ``num_workers`` is 0 by default: workers would copy every batch into shared memory.

    If the original source had masks, boxes or keypoints, a sample is ``(bytes, Target)``. Coordinates are pixels of
    the packed image. If the original source had extras, a sample is ``(bytes, label, extra)``.

    The constructor compares the index with its checksums. The first read of a sample in a process, and every 16th read
    after it, compares the sample with its checksum; from a URL, every read. A damaged sample is handled as any bad
    sample, see :class:`Faults`.

    Args:
        root: the folder, or its URL.
        size: shorter side in pixels, one of the packed sizes; None: the largest. A mapping from epoch to size
            changes the size during training: ``{0: 128, 30: 160}`` reads 160 from epoch 30 on.
        classes: class mapping of another run, as in :class:`FolderSource`; labels are converted by name.
        subset, exclude: as in :class:`FolderSource`.
        remote: how to read from a URL.

    If the folder holds augmented versions of each sample (``gpuaug pack epochs=K``), the loader reads version
    (epoch mod K), and only normalizes and mixes it. Its ``augment`` and ``seed`` must be those of the packing.

    Attributes:
        augmented_by: None, or the settings that made the versions, as JSON.

    Raises:
        SourceError: if ``root`` is not a complete folder of `gpuaug pack`.

    >>> source = PackedSource("data/packed", size={0: 128, 30: 160})
    >>> source.size_of(30)
    160
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        size: Size | Mapping[Any, Size] | None = None,
        classes: Classes = None,
        subset: Subset = None,
        exclude: str | os.PathLike[str] | None = None,
        remote: Remote | None = None,
    ) -> None:
        began = time.monotonic()
        self.root = absolute(root)
        self._storage = Storage(remote)
        self._checked_every = 1 if is_url(self.root) else CHECKED_EVERY
        self.manifest = self._read_manifest()
        self.format: str = self.manifest["format"]
        self.mapped = self.format != "jpeg" and not is_url(self.root)
        self.sizes: list[Size] = list(self.manifest["sizes"])
        self.augmented_by: dict[str, Any] | None = self.manifest.get("augmented")
        if self.augmented_by is not None and size is not None:
            raise ConfigError(f"`source.size` must be null for augmented images, which have one size. Found: {size!r}.")
        self._schedule = self._sizes_by_epoch(size)
        # sizes or versions that some epoch reads
        self.used = sorted({size for _, size in self._schedule}, key=str)
        self.sample_count = int(self.manifest["samples"])  # includes excluded samples
        self.row_count = self.sample_count * len(self.used)
        shards = self.manifest["shards"]
        # the file of each size and shard, and the first row of this file
        self._parts = [shard_name(size, shard, self.format) for size in self.used for shard in range(len(shards))]
        self._first = bounds_of(shards * len(self.used))
        self._names = self._texts("keys")
        self._extras = self._texts("extra") if "index/extra.npy" in self.manifest["files"] else None  # JSON
        self._images = self._places("offsets", "lengths")
        self._checksums = share(torch.from_numpy(self._column("checksums", np.int64)))
        self._start_reading()
        self._take_labels(classes)
        self._take_targets()
        self._take_ids()
        self._activate(subset, exclude, began=began)

    def _start_reading(self) -> None:
        """Make what each process has for itself."""
        # batches that still refer to a file keep it mapped
        self._open = lru_cache(MAPPED_FILES)(partial(_map, self.root, self.manifest["files"]))
        self._reads = bytearray(len(self._checksums))  # of each row since the last check of its checksum

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_open", "_reads")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_reading()

    @property
    def size(self) -> Size:
        """The shorter side that is read, or ``full``; RuntimeError if it depends on the epoch."""
        if len(self._schedule) > 1:
            schedule = ", ".join(f"{epoch}: {size}" for epoch, size in self._schedule)
            # a GpuaugError would be recorded as a fault of one sample, but this is a programming error
            raise RuntimeError(
                f"`source.size` depends on the epoch ({schedule}). Use `source.size_of(epoch)`, or set one size."
            )
        return self._schedule[0][1]

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Encoded bytes and label; then the extra values, if there are any.

        Raises:
            RuntimeError: if the size depends on the epoch, or the images are already augmented.
        """
        if self.augmented_by:
            raise RuntimeError(
                f"the images in {self.root!r} are already augmented, and depend on the epoch. Give this source itself, "
                "or a torch Subset of it, to a gpuaug.Loader."
            )
        _ = self.size  # raises RuntimeError if the size depends on the epoch
        return super().__getitem__(index)

    @property
    def read_many(self) -> Callable[[Sequence[int]], list[Any]]:
        """``read_many(rows)`` returns a list of samples or exceptions."""
        return self._read

    def first_row(self, epoch: int) -> int:
        """The row of sample 0 in ``epoch``. The rows of the other samples follow."""
        return self.used.index(self.size_of(epoch)) * self.sample_count

    def key(self, index: int) -> str:
        """Path of a sample below the original ``root``. ``index``: its number or its row."""
        return os.fsdecode(self._names[self._check(index) % self.sample_count])

    def _check(self, index: int) -> int:
        if not 0 <= (row := operator.index(index)) < self.row_count:
            raise IndexError(
                f"sample numbers of {redact(self.root)!r} must be 0 .. {self.sample_count - 1}. Found: {index}."
            )
        return row

    def size_of(self, epoch: int) -> Size:
        """The shorter side that ``epoch`` reads, or ``full``; the name of the version, if images are augmented."""
        epoch = epoch % len(self.sizes) if self.augmented_by else epoch
        return [size for first, size in self._schedule if first <= epoch][-1]

    def objects_digest(self) -> str:
        """Hash of all objects, at the sizes that are read."""
        return " ".join(table.digest() for table in self._tables)

    def shapes(self, size: Size | None = None) -> NDArray[np.int32]:
        """Height and width of every sample, int32 [N, 2], at ``size`` (None: the size that is read)."""
        return self._array(f"index/{self.size if size is None else size}.shapes.npy", np.int32, self.sample_count, 2)

    def _read(self, rows: Sequence[int]) -> list[Any]:
        if is_url(self.root):
            read = self._storage.read([self._range(row) for row in rows])
            results = zip(rows, read, strict=True)
            return [data if isinstance(data, Exception) else self._sample(row, data) for row, data in results]
        items: list[Any] = []
        for row in rows:
            name, begin, end = self._locate(row)
            try:
                file = self._open(name)
                # read the whole sample ahead; this call takes 2 us if the sample is already in memory
                start = begin - begin % mmap.PAGESIZE
                file.madvise(mmap.MADV_WILLNEED, start, end - start)
                items.append(self._sample(row, memoryview(file)[begin:end]))
            except (OSError, SourceError) as error:
                items.append(error)
        return items

    def _locate(self, row: int) -> tuple[str, int, int]:
        """The file of a row, and begin and end of its image and mask together, in bytes."""
        begin, end = _place(self._images, row)
        if self._masks is not None:
            _, end = _place(self._masks, row)
        return self._parts[locate(self._first, row)[0]], begin, end

    def _sample(self, row: int, data: Any) -> Any:
        label, view = self._target_of(row), memoryview(data)
        image, masks = view, []
        if self._masks is not None:
            (begin, end), (mask, _) = _place(self._images, row), _place(self._masks, row)
            image, masks = view[: end - begin], [view[mask - begin :]]
            label = checked(replace(label, mask=masks[0]))
        reads = self._reads[row]
        if not reads and sample_checksum(image, *masks) != self._checksums.numpy()[row]:
            number = row % self.sample_count
            return SourceError(
                f"{self._locate(row)[0]} in {redact(self.root)!r} is damaged: the bytes of sample {number} "
                f"({self.key(number)!r}) do not match their checksum. {_REPAIR}"
            )
        self._reads[row] = (reads + 1) % self._checked_every
        return image, label, *([] if self._extras is None else [json.loads(self._extras[row % self.sample_count])])

    def _label_of(self, row: int) -> Any:
        position, number = divmod(row, self.sample_count)
        label = super()._label_of(number)
        return self._tables[position].target(number, label=label) if self._tables else label

    def _range(self, index: int) -> Range:
        name, begin, end = self._locate(index)
        return Range(join(self.root, name), begin, end - begin, str(self._checksums.numpy()[index]))

    def _read_manifest(self) -> dict[str, Any]:
        try:
            # without the disk cache, which would return the old manifest after another run of `gpuaug pack`
            uncached = Storage(replace(self._storage.remote, cache=None))
            manifest = parse(uncached.read_file(join(self.root, MANIFEST)))
        except FileNotFoundError as error:
            raise SourceError(
                f"`source.root` must be a folder that `gpuaug pack` has finished. Found no {MANIFEST} in "
                f"{redact(self.root)!r}. To finish a stopped run, start the same `gpuaug pack` command again."
            ) from error
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise SourceError(f"{MANIFEST} in {redact(self.root)!r} cannot be used: {error}. {_REPAIR}") from error
        if not is_url(self.root):
            for name, (expected, *_) in manifest["files"].items():
                path = os.path.join(self.root, name)
                actual = os.stat(path).st_size if os.path.exists(path) else -1
                if actual != expected:
                    text = "is missing" if actual < 0 else f"has {actual} bytes instead of {expected}"
                    raise SourceError(f"{name} in {self.root!r} {text}. {_REPAIR}")
        return manifest

    def _array(self, name: str, dtype: Any, *shape: int) -> NDArray[Any]:
        size, expected = self.manifest["files"].get(name, (0, ""))
        try:
            data = self._storage.read_file(join(self.root, name), limit=size, version=expected)
            if digest(data) != expected:
                raise ValueError("its content does not match its checksum")
            if name.endswith(".bin"):
                return np.frombuffer(data, dtype).copy()
            array = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
            if array.dtype != dtype or array.shape != (shape or array.shape):
                raise ValueError(f"expected {np.dtype(dtype)} of shape {shape}, found {array.dtype} of {array.shape}")
            return array
        except NO_ARRAY as error:
            raise SourceError(f"{name} in {redact(self.root)!r} cannot be read: {error}. {_REPAIR}") from error

    def _texts(self, name: str) -> Names:
        blob = self._array(f"index/{name}.bin", np.uint8)
        ends = self._array(f"index/{name}.npy", np.int64, self.sample_count + 1)
        return Names(share(torch.from_numpy(blob)), share(torch.from_numpy(ends)))

    def _column(self, name: str, dtype: Any) -> NDArray[Any]:
        """A column of the index: one value for each row."""
        return np.concatenate([self._array(f"index/{size}.{name}.npy", dtype, self.sample_count) for size in self.used])

    def _places(self, offsets: str, lengths: str) -> tuple[Tensor, Tensor]:
        """For each row: position and length of its image or mask in its file, in bytes."""
        begin, count = self._column(offsets, np.int64), self._column(lengths, np.int32)
        room = np.repeat([self.manifest["files"][name][0] for name in self._parts], np.diff(self._first.numpy()))
        if (outside := (begin < 0) | (count < 0) | (begin > room - count)).any():
            size = self.used[int(outside.argmax()) // self.sample_count]
            raise SourceError(f"the index of size {size} in {redact(self.root)!r} points outside its files. {_REPAIR}")
        return share(torch.from_numpy(begin)), share(torch.from_numpy(count))

    def _take_targets(self) -> None:
        described = self.manifest.get("targets") or {"kinds": (), "flip_pairs": None}
        flip = described["flip_pairs"]
        self.target_kinds = frozenset(described["kinds"])
        self.flip_pairs = None if flip is None else tuple(flip)
        self._masks = self._places("mask_offsets", "mask_lengths") if "masks" in self.target_kinds else None
        if self._masks is not None and (self._masks[0] < self._images[0] + self._images[1]).any():
            raise SourceError(f"masks in {redact(self.root)!r} must come after their images. {_REPAIR}")
        self._tables = self._read_objects() if self.target_kinds - {"masks"} else []

    def _read_objects(self) -> list[ObjectTable]:
        """The objects at each used size."""
        bounds = self._array("index/object_bounds.npy", np.int64, self.sample_count + 1)
        counts, total = np.diff(bounds), int(bounds[-1])
        if bounds[0] or (counts < 0).any():
            raise SourceError(f"index/object_bounds.npy in {redact(self.root)!r} must ascend from 0. {_REPAIR}")
        common = {
            name: self._array(f"index/object_{name}.npy", dtype, total)
            for name, dtype in (("labels", np.int64), ("crowd", np.bool_), ("ids", np.int64))
        }
        common["labels"] = self._renumbered(common["labels"])
        tables = []
        for size in self.used:
            columns: dict[str, Any] = {"boxes": None, **common}
            columns["area"] = self._array(f"index/{size}.area.npy", np.float32, total)
            if "boxes" in self.target_kinds:
                columns["boxes"] = self._array(f"index/{size}.boxes.npy", np.float32, total, 4)
            if "corners" in self.target_kinds:
                columns["corners"] = self._array(f"index/{size}.corners.npy", np.float32, total, 4, 2)
            if "keypoints" in self.target_kinds:
                number = self.manifest["targets"]["num_keypoints"]
                columns["keypoints"] = self._array(f"index/{size}.keypoints.npy", np.float32, total, number, 3)
                self.num_keypoints = number
            tables.append(ObjectTable(counts, **columns, sizes=self.shapes(size)))
        return tables

    def _renumbered(self, labels: NDArray[np.int64]) -> NDArray[np.int64]:
        """Class numbers of objects, converted by name to the numbers in `source.classes`."""
        names, mapping = self.manifest["classes"], self.class_to_idx
        if self.labels is not None or names is None or mapping is None or names == [*mapping]:
            return labels
        numbers = numbers_of(names, mapping, f"of the classes in {redact(self.root)!r}")
        if len(labels) and not 0 <= labels.min() <= labels.max() < len(names):
            raise SourceError(f"index/object_labels.npy in {redact(self.root)!r} has unknown classes. {_REPAIR}")
        return numbers[labels]

    def _take_ids(self) -> None:
        """The ids of images and classes for evaluation, if the original source had them."""
        files = self.manifest["files"]
        if (file := "index/image_ids.npy") in files:
            self.image_ids = share(torch.from_numpy(self._array(file, np.int64, self.sample_count)))
        if (file := "index/category_ids.npy") in files:
            ids = dict(zip(self.manifest["classes"], self._array(file, np.int64).tolist(), strict=True))
            self.category_ids = torch.tensor([ids.get(name, -1) for name in self.classes or ids], dtype=torch.int64)

    def _take_labels(self, classes: Classes) -> None:
        if self.manifest["labels"] is None:
            names = self.manifest["classes"] if "targets" in self.manifest else None
            if classes is not None and names is None:
                raise ConfigError("this packed source has no labels. Remove `source.classes`.")
            if names is not None:  # the classes of objects
                self._set_classes(class_mapping(names if classes is None else classes))
            return
        values = self._array("index/labels.npy", np.dtype(self.manifest["labels"]))
        if len(values) != self.sample_count:
            raise SourceError(f"index/labels.npy in {redact(self.root)!r} does not match {MANIFEST}. {_REPAIR}")
        self._set_labels(values, classes=classes, names=self.manifest["classes"])

    def _sizes_by_epoch(self, size: Any) -> list[tuple[int, Size]]:
        """Pairs (first epoch, size), sorted by epoch; the first epoch is 0."""
        if self.augmented_by:
            return list(enumerate(self.sizes))
        if size is None:
            return [(0, self.sizes[-1])]
        schedule: list[tuple[int, Size]] = []
        for epoch, chosen in size.items() if isinstance(size, Mapping) else [(0, size)]:
            if isinstance(epoch, bool) or not re.fullmatch("[0-9]{1,10}", str(epoch)) or int(epoch) >= 2**32:
                raise ConfigError(
                    f"if `source.size` is a mapping, its keys must be epochs from 0 to {2**32 - 1}. "
                    f"Found: {epoch!r:.200}."
                )
            if isinstance(chosen, bool) or chosen not in self.sizes:
                known = ", ".join(map(str, self.sizes))
                raise ConfigError(f"`source.size` must be one of the packed sizes: {known}. Found: {chosen!r}.")
            schedule.append((int(epoch), chosen))
        schedule.sort(key=lambda item: item[0])
        if not schedule or schedule[0][0] != 0 or len(dict(schedule)) < len(schedule):
            raise ConfigError(
                f"if `source.size` is a mapping, it must have the key 0 and no epoch twice. Found: {dict(size)!r}."
            )
        return schedule


_REPAIR = "Pack again into a new folder."


def _map(root: str, files: dict[str, list[Any]], name: str) -> mmap.mmap:
    """Map a file of the folder into memory. ``files``: those of the manifest."""
    with open(os.path.join(root, name), "rb") as file:
        # access beyond the end of a mapped file would kill the process
        actual, expected = os.fstat(file.fileno()).st_size, files[name][0]
        if actual != expected:
            raise SourceError(f"{name} in {root!r} has {actual} bytes instead of {expected}. {_REPAIR}")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _place(places: tuple[Tensor, Tensor], row: int) -> tuple[int, int]:
    """Begin and end of a row's image or mask in its file."""
    begins, counts = places
    begin = int(begins.numpy()[row])
    return begin, begin + int(counts.numpy()[row])


def sample_checksum(image: bytes | memoryview, *masks: bytes | memoryview) -> int:
    """Checksum of a sample's image and perhaps its mask, 0 .. 2**63 - 1."""
    # for images of 36 to 150 KiB, xxh3 takes 2 to 9 us, CRC32C 4 to 18 us, zlib's CRC32 13 to 55 us
    total = xxhash.xxh3_64_intdigest(image)
    for mask in masks:
        total = xxhash.xxh3_64_intdigest(mask, total)
    return total >> 1


def parse(data: bytes) -> dict[str, Any]:
    """Parse the manifest; ValueError if its kind, version, checksum, sizes or file names are wrong."""
    manifest = json.loads(data)
    if not isinstance(manifest, dict) or manifest.get("kind") != KIND:
        raise ValueError(f"it was not written by `{KIND}`")
    if manifest.get("version") != VERSION:
        raise ValueError(f"its version is {manifest.get('version')!r}, but this gpuaug reads version {VERSION}")
    if manifest.get("checksum") != checksum(manifest):
        raise ValueError("its content does not match its checksum")
    sizes, names = manifest["sizes"], manifest["files"]
    if bad := [size for size in sizes if not re.fullmatch(rf"[0-9]+|{FULL}|epoch-[0-9]+", str(size))]:
        raise ValueError(f"it has sizes that are no numbers: {bad[:3]}")
    if bad := [name for name in names if not re.fullmatch(r"[\w-]+(/[\w.-]+)?", name) or ".." in name]:
        raise ValueError(f"it names files outside the folder: {bad[:3]}")
    return manifest


def shard_name(size: Size, shard: int, form: str) -> str:
    return f"{size}/{shard:05d}.{ENDINGS[form]}"
