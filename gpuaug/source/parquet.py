"""Parquet files with a column of encoded images, as Hugging Face ``datasets`` write them."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.errors import ConfigError, GpuaugError, ReadError, SourceError
from gpuaug.source.classes import label_column, some
from gpuaug.source.filters import Classes, Listed, Subset
from gpuaug.source.index import Names, share
from gpuaug.source.paths import common_folder, places_of
from gpuaug.source.remote.storage import Found, Range, Remote, Storage, is_url, shown

log = logging.getLogger("gpuaug")

AT_ONCE = 8  # files whose footers and labels are read at a time
OPEN_FILES = 64  # footers that a process keeps
TAIL = 1 << 16  # bytes at the end that are read first, as pyarrow does
WAVE = 64 << 20  # bytes of remote row groups that are held at a time
LARGEST_GROUP = 4 << 30  # bytes of a row group, unpacked


class ParquetSource(Listed):
    """Rows of Parquet files, in the order of the files; an image is read with the row group that it is in.

    So the smaller the row groups, the less is read in vain in a shuffled epoch: with groups of 100 photographs a
    sample costs a hundred, where tar shards cost one. Sequential epochs read everything once, and so does the first one
    with ``cache=ram``, which keeps all images of a row group that was read for one of them.

    Args:
        root: a file, its URL, a list of them, ``train-*.parquet``, ``train-{000..009}.parquet``, or a folder.
        image: the column of the images: binary, or structs with ``bytes``; None: the only one that can be.
        label: the column of the labels (whole numbers, floats, names, lists); ``auto``: ``label`` or ``labels``, or the
            only ClassLabel of ``datasets``; ``none``: no labels. Names of classes in the files' metadata are taken.
        classes, subset, exclude: as in :class:`FolderSource`.
        row_groups: how many of the last ones each process keeps.
        remote: how to read from URLs.

    Raises:
        SourceError: if pyarrow is missing, a file cannot be read, or has no such column.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        image: str | None = None,
        label: str | None = "auto",
        classes: Classes = None,
        subset: Subset = None,
        exclude: str | os.PathLike[str] | None = None,
        row_groups: int = 2,
        remote: Remote | None = None,
    ) -> None:
        arrow()
        if isinstance(row_groups, bool) or not isinstance(row_groups, int) or row_groups < 1:
            raise ConfigError(f"`source.row_groups` must be a whole number >= 1. Found: {row_groups!r}.")
        began = time.monotonic()
        self.row_groups = row_groups
        self._storage = Storage(remote)
        files = places_of(root, self._storage, ending=".parquet")
        self.root, names = common_folder([file.key for file in files])
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="gpuaug-parquet") as pool:
            metadata = list(pool.map(lambda file: _metadata(file, self._storage), files))
            schema = metadata[0].schema.to_arrow_schema()
            self._column = _image_column(schema, image, shown(files[0].key))
            columns = [field.name for field in schema if _leaf(field) is None]
            named = [name for name in columns if _names_of(schema, name)]
            remedy = "Set it to one of them, or to none for no labels."
            column = label_column(label, columns, with_classes=named, place=repr(shown(files[0].key)), remedy=remedy)
            for file, meta in zip(files, metadata, strict=True):
                _check(file, meta, schema, [self._column.split(".")[0], *([column] if column else [])])
            if column is not None:
                tasks = zip(files, metadata, strict=True)
                values = list(pool.map(lambda task: _values(task[0], task[1], column, self._storage), tasks))
        counts = [[meta.row_group(g).num_rows for g in range(meta.num_row_groups)] for meta in metadata]
        self._starts = _shared([0, *np.cumsum([n for groups in counts for n in groups])])  # of row groups, in rows
        self._first = _shared([0, *np.cumsum([len(groups) for groups in counts])])  # of files, in row groups
        bounds = _shared([0, *np.cumsum([sum(groups) for groups in counts])])
        self._files = Names.of([[os.fsencode(file.key) for file in files]])
        self._stamps = Names.of([[f"{file.size} {file.stamp}".encode() for file in files]])
        self._names = _Rows(Names.of([[os.fsencode(name) for name in names]]), bounds)
        if not len(self._names):
            raise SourceError(f"no images in {len(files)} Parquet files of {shown(self.root)!r}: they have no rows.")
        if column is not None:
            flat = any(isinstance(part, list) for part in values)
            joined: Any = [x for part in values for x in (part if isinstance(part, list) else part.tolist())]
            self._label(joined if flat else np.concatenate(values), classes=classes, names=_names_of(schema, column))
        elif classes is not None:
            raise ConfigError("`source.classes` names the labels, but there is no column of labels. Drop it.")
        largest = max((meta.row_group(g).num_rows for meta in metadata for g in range(meta.num_row_groups)), default=0)
        remedy = "; a shuffled order reads them all for each one, unless `cache=ram` keeps them" if largest > 1 else ""
        log.info("source %s: up to %d images in a row group, read together%s", shown(self.root), largest, remedy)
        self._settle()
        self._activate(subset, exclude, began=began)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_open", "_groups", "_pid")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._settle()

    def _settle(self) -> None:
        self._pid = os.getpid()
        self._open: OrderedDict[int, Any] = OrderedDict()  # metadata by file
        self._groups: OrderedDict[int, Any] = OrderedDict()  # images by row group

    def _items(self, numbers: Sequence[int]) -> list[Any]:
        if self._pid != os.getpid():
            self._settle()
        rows: dict[int, list[int]] = {}
        groups = (np.searchsorted(self._starts.numpy(), np.asarray(numbers), side="right") - 1).tolist()
        for at, group in enumerate(groups):
            rows.setdefault(group, []).append(at)
        items: list[Any] = [None] * len(numbers)
        for group, images in self._read_groups(list(rows)):
            begin = int(self._starts.numpy()[group])
            for at in rows[group]:
                items[at] = images if isinstance(images, Exception) else self._item(images, numbers[at], begin)
        # Arrow's pool keeps several times what the groups take: 20 instead of 90 MiB in each worker, at 4 MiB a group
        arrow().default_memory_pool().release_unused()
        return items

    def group_bytes(self, *, sample: int = 16) -> int:
        """Bytes of the images of the largest row group, among ``sample`` of them that are spread evenly."""
        count, column = len(self._starts) - 1, self._column.split(".")[0]
        found = [0]
        for group in np.unique(np.linspace(0, max(0, count - 1), min(sample, count)).round().astype(int)).tolist():
            meta, _, inside = self._metadata_of(group)
            parts = (meta.row_group(inside).column(k) for k in range(meta.num_columns))
            found.append(sum(p.total_uncompressed_size for p in parts if p.path_in_schema.split(".")[0] == column))
        return max(found)

    def along(self, index: int) -> NDArray[np.int64]:
        """Active samples that are in memory since number ``index`` was read, int64 ``[n]``: those of its row group."""
        starts = self._starts.numpy()
        group = int(np.searchsorted(starts, index, side="right")) - 1
        if self._pid != os.getpid() or group not in self._groups:
            return np.zeros(0, dtype=np.int64)
        if self.indices is None:
            return np.arange(starts[group], starts[group + 1])
        active = self.indices.numpy()
        return active[slice(*np.searchsorted(active, starts[group : group + 2]))]

    def _item(self, images: Any, number: int, begin: int) -> Any:
        data = images[number - begin].as_py()
        if data is None:
            return ReadError(f"{self.key(number)!r} has no bytes of an image")
        return data, self._label_of(number)

    def _read_groups(self, groups: list[int]) -> Iterator[tuple[int, Any]]:
        """Images of each row group, or why they cannot be read; those at hand first, remote ones several at a time."""
        missing = []
        for group in groups:
            if group in self._groups:
                self._groups.move_to_end(group)
                yield group, self._groups[group]
            else:
                missing.append(group)
        plans: list[tuple[int, Any, list[Range]]] = []
        held = 0
        for group in missing:
            try:
                meta, file, inside = self._metadata_of(group)
                ranges = _ranges(file, meta, inside, self._column) if is_url(self.root) else []
            except (OSError, GpuaugError) as error:
                yield group, error
                continue
            size = sum(part.size or 0 for part in ranges)
            if plans and held + size > WAVE:
                yield from self._decode(plans)
                plans, held = [], 0
            plans.append((group, (meta, file, inside), ranges))
            held += size
        yield from self._decode(plans)

    def _decode(self, plans: list[tuple[int, Any, list[Range]]]) -> Iterator[tuple[int, Any]]:
        found = iter(self._storage.read([part for _, _, ranges in plans for part in ranges]))
        for group, (meta, file, inside), ranges in plans:
            pieces = {part.begin: next(found) for part in ranges}
            error = next((piece for piece in pieces.values() if isinstance(piece, Exception)), None)
            if error is not None:
                yield group, error
                continue
            try:
                images = _images(file, meta, inside, self._column, pieces, self._storage)
            except (OSError, GpuaugError, arrow().ArrowException) as failed:
                yield group, ReadError(f"row group {inside} of {shown(file.key)!r} cannot be read: {failed}")
                continue
            if len(images) != (rows := meta.row_group(inside).num_rows):
                yield group, ReadError(f"row group {inside} of {shown(file.key)!r} has {len(images)} of {rows} rows")
                continue
            self._groups[group] = images
            if len(self._groups) > self.row_groups:
                self._groups.popitem(last=False)
            yield group, images

    def _metadata_of(self, group: int) -> tuple[Any, Found, int]:
        """Footer of the file that a row group is in, the file, and the group's number there."""
        number = int(np.searchsorted(self._first.numpy(), group, side="right")) - 1
        size, _, stamp = self._stamps[number].decode().partition(" ")
        file = Found(os.fsdecode(self._files[number]), int(size), stamp)
        if number not in self._open:
            try:
                self._open[number] = _metadata(file, self._storage)
            except SourceError as error:  # of this file now, and not of the source
                raise ReadError(str(error)) from error
            if len(self._open) > OPEN_FILES:
                self._open.popitem(last=False)
        return self._open[number], file, group - int(self._first.numpy()[number])


class _Rows:
    """Keys of all samples as ``file/row``, made when asked for."""

    def __init__(self, files: Names, bounds: Tensor) -> None:
        self.files, self.bounds = files, bounds

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def __getitem__(self, index: int) -> bytes:
        file = int(np.searchsorted(self.bounds.numpy(), index, side="right")) - 1
        return self.files[file] + b"/%d" % (index - int(self.bounds.numpy()[file]))

    def __iter__(self) -> Iterator[bytes]:
        counts = np.diff(self.bounds.numpy()).tolist()
        return (file + b"/%d" % row for file, count in zip(self.files, counts, strict=True) for row in range(count))

    def digest(self) -> str:
        """As of Names."""
        return hashlib.blake2b(b"\0".join(sorted(self)), digest_size=16).hexdigest()


class _Pieces(io.RawIOBase):
    """A file for pyarrow, of which some pieces are at hand; what else it asks for is read."""

    def __init__(self, file: Found, storage: Storage, pieces: dict[int, bytes]) -> None:
        self.file, self.storage, self.pieces, self.at = file, storage, pieces, 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of any file."""
        self.at = offset + (0, self.at, self.file.size)[whence]
        return self.at

    def tell(self) -> int:
        """As of any file."""
        return self.at

    def read(self, size: int = -1) -> bytes:
        """Exactly so many bytes; fewer at the end only."""
        left = max(0, self.file.size - self.at)
        size = left if size < 0 else min(size, left)
        for begin, data in self.pieces.items():
            if begin <= self.at and self.at + size <= begin + len(data):
                found = data[self.at - begin : self.at - begin + size]
                break
        else:
            (item,) = self.storage.read([Range(self.file.key, self.at, size, self.file.stamp)])
            if isinstance(item, Exception):
                raise item if isinstance(item, OSError) else OSError(str(item))
            found = item
        self.at += size
        return found


def arrow() -> Any:
    """The module pyarrow.

    Raises:
        SourceError: if it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise SourceError(f"Parquet needs pyarrow ({error}). Install it: pip install gpuaug[parquet].") from error
    return pyarrow


def _metadata(file: Found, storage: Storage) -> Any:
    """The footer of a file.

    Raises:
        SourceError: if it has none.
    """
    pyarrow = arrow()
    if file.size < 0:
        raise SourceError(f"{shown(file.key)!r}: its server says no size. Use one that does, or a copy.")
    tail = max(0, file.size - TAIL)
    (end,) = storage.read([Range(file.key, tail, file.size - tail, file.stamp)])
    try:
        if isinstance(end, Exception):
            raise end
        pieces = pyarrow.PythonFile(_Pieces(file, storage, {tail: end}), mode="r")
        return pyarrow.parquet.read_metadata(pieces)
    except (OSError, GpuaugError, pyarrow.ArrowException) as error:
        raise SourceError(f"{shown(file.key)!r} is no Parquet file that can be read: {error}.") from error


def _check(file: Found, meta: Any, schema: Any, columns: list[str]) -> None:
    own = meta.schema.to_arrow_schema()
    for name in columns:
        if name not in own.names or not own.field(name).type.equals(schema.field(name).type):
            raise SourceError(
                f"{shown(file.key)!r} must have the columns of the first file, as {name!r}: {schema.field(name).type}. "
                f"Found: {some([f'{field.name}: {field.type}' for field in own])}."
            )
    for g in range(meta.num_row_groups):
        if (size := meta.row_group(g).total_byte_size) > LARGEST_GROUP:
            raise SourceError(
                f"row groups must be of at most {LARGEST_GROUP >> 30} GiB, as they are read as a whole. Found: {size} "
                f"bytes in {shown(file.key)!r}. Write it with smaller ones (`row_group_size`)."
            )


def _image_column(schema: Any, name: str | None, place: str) -> str:
    """The leaf column that holds the bytes, as ``image.bytes``."""
    found = {field.name: leaf for field in schema if (leaf := _leaf(field)) is not None}
    columns = some([f"{field.name}: {field.type}" for field in schema])
    if name is not None and name not in found:
        raise SourceError(f"`source.image` must be a column of bytes in {place!r}. Found {name!r} among {columns}.")
    if name is None and len(found) != 1:
        raise SourceError(f"`source.image` must be given: {len(found)} columns of {place!r} have bytes: {columns}.")
    return str(found[name] if name is not None else next(iter(found.values())))


def _leaf(field: Any) -> str | None:
    """The path of the bytes in a column that can be one of images."""
    types = arrow().types

    def is_bytes(kind: Any) -> bool:
        return types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)

    if is_bytes(field.type):
        return str(field.name)
    inside = {part.name: part.type for part in field.type} if types.is_struct(field.type) else {}
    return f"{field.name}.bytes" if "bytes" in inside and is_bytes(inside["bytes"]) else None


def _names_of(schema: Any, column: str) -> list[str] | None:
    """Names of the classes, where ``datasets`` wrote them into the metadata."""
    try:
        told = json.loads((schema.metadata or {}).get(b"huggingface", b"null"))
        names = told["info"]["features"][column]["names"]
        return [str(name) for name in names] if isinstance(names, list) and names else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _values(file: Found, meta: Any, column: str, storage: Storage) -> Any:
    """The labels of a file: an array of numbers, or a list."""
    pyarrow = arrow()
    try:
        data = pyarrow.PythonFile(_Pieces(file, storage, {}), mode="r")
        found = pyarrow.parquet.ParquetFile(data, metadata=meta, pre_buffer=False).read([column], use_threads=False)
    except (OSError, GpuaugError, pyarrow.ArrowException) as error:
        raise SourceError(f"the labels in {shown(file.key)!r} cannot be read: {error}.") from error
    if found.num_rows != meta.num_rows:
        raise SourceError(f"{shown(file.key)!r} has {found.num_rows} labels for {meta.num_rows} rows. Write it again.")
    return plain(found.column(column), shown(file.key))


def plain(column: Any, place: str) -> Any:
    """Values of an Arrow column: an array of int64 or float32, or a list."""
    types = arrow().types
    if column.null_count:
        row = column.is_null().index(True).as_py()
        raise SourceError(
            f"{column.null_count} labels in {place!r} are null, the first in row {row}. Give them a value."
        )
    if types.is_integer(column.type) or types.is_boolean(column.type):
        try:
            return np.array(column.cast("int64").to_numpy())
        except arrow().ArrowInvalid as error:  # uint64
            raise SourceError(f"labels in {place!r} must be below 2**63: {error}.") from error
    return np.array(column.to_numpy(), np.float32) if types.is_floating(column.type) else column.to_pylist()


def _ranges(file: Found, meta: Any, group: int, column: str) -> list[Range]:
    """Where the images of a row group are."""
    inside = meta.row_group(group)
    for i in range(inside.num_columns):
        chunk = inside.column(i)
        if chunk.path_in_schema == column:
            begin = chunk.data_page_offset
            if chunk.has_dictionary_page and chunk.dictionary_page_offset:
                begin = min(begin, chunk.dictionary_page_offset)
            if not 0 <= begin <= begin + chunk.total_compressed_size <= file.size:
                raise ReadError(f"row group {group} of {shown(file.key)!r} lies outside of the file")
            return [Range(file.key, begin, chunk.total_compressed_size, file.stamp)]
    raise ReadError(f"row group {group} of {shown(file.key)!r} has no column {column!r}")


def _images(file: Found, meta: Any, group: int, column: str, pieces: dict[int, Any], storage: Storage) -> Any:
    """The encoded images of a row group: an Arrow column of bytes."""
    pyarrow = arrow()
    source = pyarrow.PythonFile(_Pieces(file, storage, pieces), mode="r")
    opened = pyarrow.parquet.ParquetFile(source, metadata=meta, pre_buffer=False)
    found = opened.read_row_group(group, columns=[column], use_threads=False).column(0)
    if not pyarrow.types.is_struct(found.type):
        return found
    chunks = [chunk.field("bytes") if not chunk.null_count else chunk.flatten()[0] for chunk in found.chunks]
    return pyarrow.chunked_array(chunks)


def _shared(values: list[Any]) -> Tensor:
    return share(torch.from_numpy(np.array(values, dtype=np.int64)))
