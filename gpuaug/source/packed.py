"""What `gpuaug pack` has written: decoded uint8 arrays or JPEG shards, memory-mapped, at the size that is asked for."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.errors import ConfigError, SourceError
from gpuaug.source.filters import Classes, Listed, Subset
from gpuaug.source.index import NO_ARRAY, Names, share
from gpuaug.source.remote.storage import Range, Remote, Storage, is_url, join, locate, read_file, shown

MANIFEST = "manifest.json"  # written last: without it a folder is not finished
KIND, VERSION = "gpuaug pack", 1
ENDINGS = {"uint8": "bin", "jpeg": "tar"}
FULL = "full"  # in place of a size, where nothing was resized

Size = int | str


class PackedSource(Listed):
    """The folder of `gpuaug pack`, with the keys, labels and classes of the source it was made of.

    Arrays are read through the page cache. With ``num_workers=0``, which they get by default, `decode` cuts its views
    out of the mapped files and nothing is copied; a worker would have to make shared memory for every batch. Samples
    are numbered 0 .. N - 1 in the order of the source they were made of.

    Args:
        root: the folder, or its URL, which is read in ranges instead of memory-mapped.
        size: the shorter side to read, one of the packed ones; None: the largest. A mapping from epoch to size changes
            it during the training: ``{0: 128, 30: 160}`` reads 128 in the epochs 0 .. 29 and 160 from then on.
        classes: the mapping of another run, for evaluation: names in the order of their labels, a mapping from name to
            label, or a FILE with either; the labels here follow it, by name.
        subset: a count, a fraction, or a FILE or sequence of sample numbers.
        exclude: a FILE of samples to leave out: JSON lines with ``key``, as ``faults.file`` holds them.
        remote: how to read from a URL.

    Raises:
        SourceError: if it is not a whole, finished folder of `gpuaug pack`, or has no such size.
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
        self.root = locate(root)
        self._storage = Storage(remote)
        self.manifest = self._read_manifest()
        self.format: str = self.manifest["format"]
        # reading is at most a copy out of the page cache
        self.mapped = self.format == "uint8" and "://" not in str(self.root)
        self.lends = self.mapped  # what is read stays where it is, unchanged, for as long as anyone looks at it
        self.sizes: list[Size] = list(self.manifest["sizes"])
        self._plan = self._sizes_by_epoch(size)
        self._total = int(self.manifest["samples"])
        counts = self.manifest["shards"]
        self._first = np.cumsum([0, *counts])  # int64 [shards + 1], number of each shard's first sample
        try:
            keys = self._load("index/keys.bin", most=sys.maxsize)
        except OSError as error:
            raise SourceError(f"index/keys.bin in {shown(self.root)!r} cannot be read: {error}. {_REPAIR}") from error
        self._names = Names(
            share(torch.from_numpy(np.frombuffer(keys, dtype=np.uint8).copy())),
            share(torch.from_numpy(self._array("index/keys.npy", np.int64, self._total + 1))),
        )
        self._begins = {size: self._shared(f"index/{size}.offsets.npy", np.int64) for size in self._used()}
        self._bytes = {size: self._shared(f"index/{size}.lengths.npy", np.int32) for size in self._used()}
        self._check_places()
        self._opened: dict[tuple[Size, int], mmap.mmap] = {}
        self._take_labels(classes)
        self._activate(subset, exclude, began=began)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}}  # every process maps the files itself, when it needs them

    @property
    def size(self) -> Size:
        """The shorter side that is read, or ``full``; RuntimeError where it depends on the epoch."""
        if len(self._plan) > 1:
            plan = ", ".join(f"{epoch}: {size}" for epoch, size in self._plan)
            raise RuntimeError(  # no error of ours: those are faults of a sample, and this is all samples' error
                f"`source.size` depends on the epoch ({plan}), and no epoch was named. Read `source.at_epoch(epoch)`."
            )
        return self._plan[0][1]

    @property
    def read_many(self) -> Callable[[Sequence[int]], list[Any]]:
        """``read_many(numbers)``: bytes and label, or the exception, of each sample, asked for at the same time."""
        return self._items

    @property
    def by_epoch(self) -> Rows | None:
        """What the loader reads from where the size depends on the epoch; None where it does not."""
        return Rows(self) if len(self._plan) > 1 else None

    def at_epoch(self, epoch: int) -> PackedSource:
        """The same samples at the size that ``epoch`` reads; maps of the files are shared with it."""
        return self.at_size(self.size_of(epoch))

    def at_size(self, size: Size) -> PackedSource:
        """The same samples at ``size``, a shorter side or ``full``, one of those that are read."""
        found = copy.copy(self)
        found._plan = [(0, size)]
        return found

    def size_of(self, epoch: int) -> Size:
        """The shorter side that ``epoch`` reads, or ``full``."""
        return [size for first, size in self._plan if first <= epoch][-1]

    def shapes(self, size: Size | None = None) -> NDArray[np.int32]:
        """Height and width of every sample, int32 [N, 2], at ``size``; None: the size that is read."""
        return self._array(f"index/{self.size if size is None else size}.shapes.npy", np.int32, (self._total, 2))

    # -- bytes --

    def _items(self, numbers: Sequence[int]) -> list[Any]:
        if is_url(self.root):
            return super()._items(numbers)
        places: list[memoryview | Exception] = []
        size = self.size
        for number in numbers:
            try:
                file, begin, length = self._place(size, number)
                # all are asked for before the first is waited for; 2 us each where they are in memory
                start = begin - begin % mmap.PAGESIZE
                file.madvise(mmap.MADV_WILLNEED, start, begin + length - start)
                places.append(memoryview(file)[begin : begin + length])
            except (OSError, SourceError) as error:
                places.append(error)
        return [
            place if isinstance(place, Exception) else (place, self._label_of(number))
            for number, place in zip(numbers, places, strict=True)
        ]

    def _where(self, size: Size, number: int) -> tuple[int, int, int]:
        """Shard, first byte and number of bytes."""
        shard = int(np.searchsorted(self._first, number, side="right")) - 1
        return shard, int(self._begins[size].numpy()[number]), int(self._bytes[size].numpy()[number])

    def _range(self, index: int) -> Range:
        shard, begin, length = self._where(self.size, index)
        name = shard_name(self.size, shard, self.format)
        return Range(join(self.root, name), begin, length, self.manifest["files"][name][1])

    def _place(self, size: Size, number: int) -> tuple[mmap.mmap, int, int]:
        shard, begin, length = self._where(size, number)
        key = size, shard
        if key not in self._opened:
            name = shard_name(size, shard, self.format)
            with open(os.path.join(self.root, name), "rb") as file:
                # a map that reaches over the end of its file would end the process
                if (found := os.fstat(file.fileno()).st_size) != (expected := self.manifest["files"][name][0]):
                    raise SourceError(f"{name} in {self.root!r} has {found} bytes instead of {expected}. {_REPAIR}")
                self._opened[key] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._opened[key], begin, length

    # -- what is there --

    def _read_manifest(self) -> dict[str, Any]:
        if not is_url(self.root) and not os.path.isdir(self.root):
            raise SourceError(f"`source.root` must be a folder that `gpuaug pack` has made. Found: {self.root!r}.")
        try:
            manifest = parse_manifest(self._load(MANIFEST))
        except FileNotFoundError as error:
            raise SourceError(
                f"`source.root` must be a finished folder of `gpuaug pack`. Found no {MANIFEST} in "
                f"{shown(self.root)!r}. The same `gpuaug pack` command goes on where a stopped one was."
            ) from error
        except (OSError, ValueError, RecursionError) as error:
            raise SourceError(f"{MANIFEST} in {shown(self.root)!r} cannot be used: {error}. {_REPAIR}") from error
        if not is_url(self.root):
            for name, (expected, _) in manifest["files"].items():
                try:
                    found = os.stat(os.path.join(self.root, name)).st_size
                except OSError:
                    found = -1
                if found != expected:
                    text = "is missing" if found < 0 else f"has {found} bytes instead of {expected}"
                    raise SourceError(f"{name} in {self.root!r} {text}. {_REPAIR}")
        return manifest

    def _load(self, name: str, *, most: int | None = None) -> bytes:
        place = join(self.root, name)
        return self._storage.whole(place) if is_url(place) else read_file(place, most=most)

    def _array(self, name: str, dtype: Any, shape: int | tuple[int, ...] | None) -> NDArray[Any]:
        try:
            found = np.lib.format.read_array(io.BytesIO(self._load(name, most=sys.maxsize)), allow_pickle=False)
        except NO_ARRAY as error:
            raise SourceError(f"{name} in {shown(self.root)!r} cannot be read: {error}. {_REPAIR}") from error
        wanted = found.shape if shape is None else (shape,) if isinstance(shape, int) else shape
        if found.dtype != dtype or found.shape != wanted:
            raise SourceError(
                f"{name} in {shown(self.root)!r} must hold {np.dtype(dtype)} {wanted}. Found: {found.dtype} "
                f"{found.shape}. {_REPAIR}"
            )
        return found

    def _shared(self, name: str, dtype: Any) -> Tensor:
        return share(torch.from_numpy(self._array(name, dtype, self._total)))

    def _used(self) -> list[Size]:
        return sorted({size for _, size in self._plan}, key=str)

    def _check_places(self) -> None:
        for size in self._used():
            begins, lengths = self._begins[size].numpy(), self._bytes[size].numpy()
            names = [shard_name(size, k, self.format) for k in range(len(self._first) - 1)]
            room = np.repeat([self.manifest["files"][name][0] for name in names], np.diff(self._first))
            if ((begins < 0) | (lengths < 0) | (begins + lengths > room)).any():
                raise SourceError(
                    f"the index of size {size} in {shown(self.root)!r} points outside its files. {_REPAIR}"
                )

    def _take_labels(self, classes: Classes) -> None:
        if self.manifest["labels"] is None:
            if classes is not None:
                raise ConfigError("`source.classes` names labels, and this packed source has none. Drop it.")
            return
        values = self._array("index/labels.npy", np.dtype(self.manifest["labels"]), None)
        if len(values) != self._total:
            raise SourceError(f"index/labels.npy in {shown(self.root)!r} does not fit its {MANIFEST}. {_REPAIR}")
        self._label(values, classes=classes, names=self.manifest["classes"])

    def _sizes_by_epoch(self, size: Any) -> list[tuple[int, Size]]:
        """(first epoch, size), ascending, beginning with epoch 0."""
        if size is None:
            return [(0, self.sizes[-1])]
        plan = []
        for epoch, chosen in size.items() if isinstance(size, Mapping) else [(0, size)]:
            text = str(epoch)
            if isinstance(epoch, bool) or not text.isascii() or not text.isdecimal():
                raise ConfigError(f"`source.size` as a mapping needs epochs 0, 1, ... as keys. Found: {epoch!r}.")
            if isinstance(chosen, bool) or chosen not in self.sizes:
                known = ", ".join(map(str, self.sizes))
                raise ConfigError(f"`source.size` must be one of the packed sizes: {known}. Found: {chosen!r}.")
            plan.append((int(text), chosen))
        plan.sort(key=lambda item: item[0])
        if not plan or plan[0][0] != 0:
            raise ConfigError(f"`source.size` as a mapping must begin with epoch 0. Found: {dict(size)!r}.")
        if len({epoch for epoch, _ in plan}) < len(plan):
            raise ConfigError(f"`source.size` must name every epoch once. Found: {dict(size)!r}.")
        return plan


class Rows:
    """The samples of a packed source at several sizes, one size after the other: row = place of the size * N + number.

    So the epoch travels with what is asked for, and no worker has to be told of it.
    """

    indices = None

    def __init__(self, source: PackedSource) -> None:
        self.source, self.total = source, source._total
        self.mapped, self.lends = source.mapped, source.lends
        self.sizes = source._used()
        self.views = [source.at_size(size) for size in self.sizes]
        labels = source.labels
        self.labels = None if labels is None else share(labels.repeat(len(self.sizes)))
        self.classes, self.class_to_idx, self.num_classes = source.classes, source.class_to_idx, source.num_classes

    def __len__(self) -> int:
        return self.total * len(self.sizes)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        """Encoded bytes of the row's sample at the row's size, and its label."""
        return self.views[row // self.total][row % self.total]

    def read_many(self, rows: Sequence[int]) -> list[Any]:
        """The same for several rows, asked of the disk at the same time."""
        found: list[Any] = [None] * len(rows)
        for place, view in enumerate(self.views):
            mine = [k for k, row in enumerate(rows) if row // self.total == place]
            for k, item in zip(mine, view.read_many([rows[k] % self.total for k in mine]), strict=True):
                found[k] = item
        return found

    def numbers(self, epoch: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """(indices, repeats, valid) of a batch of this epoch to its rows, int64 [B]."""
        first = self.sizes.index(self.source.size_of(epoch)) * self.total
        return lambda indices, repeats, valid: indices + first

    def label(self, row: int) -> Any:
        """The sample's."""
        return self.source.label(row % self.total)

    def key(self, row: int) -> str:
        """The sample's."""
        return self.source.key(row % self.total)

    def digest(self) -> str:
        """The source's."""
        return self.source.digest()


_REPAIR = "`gpuaug pack out=DIR verify=true` says what is damaged; pack again into a new folder."


def shard_name(size: Size, shard: int, form: str) -> str:
    """Path of a shard below the folder."""
    return f"{size}/{shard:05d}.{ENDINGS[form]}"


def checksum(manifest: Mapping[str, Any]) -> str:
    """Hash of a manifest's content without its own ``checksum``."""
    text = json.dumps({k: v for k, v in manifest.items() if k != "checksum"}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def parse_manifest(data: bytes) -> dict[str, Any]:
    """The content of `MANIFEST`.

    Raises:
        ValueError: if it is none, of a later version, or was changed after it was written.
    """
    manifest = json.loads(data)
    if not isinstance(manifest, dict) or manifest.get("kind") != KIND:
        raise ValueError("it was not written by `gpuaug pack`")
    if manifest.get("version") != VERSION:
        raise ValueError(f"it is of version {manifest.get('version')!r}, and this gpuaug knows {VERSION}")
    if manifest.get("checksum") != checksum(manifest):
        raise ValueError("its content does not fit its checksum")
    return manifest
