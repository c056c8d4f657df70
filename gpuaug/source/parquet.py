"""Parquet files with a column of encoded images, as Hugging Face ``datasets`` writes them."""

from __future__ import annotations

import io
import json
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuaug import checks
from gpuaug.errors import ConfigError, GpuaugError, ReadError, SourceError
from gpuaug.source.base import Classes, FileKeys, ListedSource, bounds_of, locate
from gpuaug.source.classes import label_column, some
from gpuaug.source.filters import Subset
from gpuaug.source.index import Names
from gpuaug.source.paths import common_folder, is_url, redact
from gpuaug.source.remote.storage import FileInfo, Range, Remote, Storage

log = logging.getLogger("gpuaug")

INDEX_THREADS = 8  # threads that read footers and labels
OPEN_FILES = 64  # files whose footers a process keeps
WAVE_BYTES = 64 << 20  # of remote row groups that are requested together, without the last one
BYTES = ("binary", "large_binary", "binary_view")  # Arrow types of encoded images
LARGEST_GROUP = 4 << 30  # bytes of a row group, uncompressed


class ParquetSource(ListedSource):
    """Rows of Parquet files, in the order of the files. Reading an image reads its whole row group.

    So small row groups are best for a shuffled order: with 100 photographs per group, each sample needs a read of 100
    photographs (in a tar shard: of one). A sequential epoch reads everything once. So does the first epoch with
    ``cache=ram``, because the cache stores all images of each row group that is read.

    Args:
        root: a file, its URL, a list of them, ``train-*.parquet``, ``train-{000..009}.parquet``, or a folder.
        image: column of the images, of type binary or a struct with ``bytes``; None: the only column of these types.
        label: column of the labels (whole numbers, floats, names, lists); ``auto``: ``label`` or ``labels``, or the
            only ClassLabel of ``datasets``; ``none``: no labels. Class names are read from the files' metadata.
        classes, subset, exclude: as in :class:`FolderSource`.
        row_groups: number of recently used row groups that each process keeps in memory.
        remote: how to read from URLs.

    Raises:
        SourceError: if pyarrow is missing, a file cannot be read, or a column is missing.

    >>> source = ParquetSource("data/train-*.parquet", label="none")
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
        import_pyarrow()
        began = time.monotonic()
        self.row_groups: int = checks.whole_number("source.row_groups", row_groups, 1)
        self._storage = Storage(remote)
        files = self._storage.expand(root, ending=".parquet")
        self.root, names = common_folder([file.path for file in files])
        self._files = files
        place = redact(files[0].path)
        with ThreadPoolExecutor(INDEX_THREADS, thread_name_prefix="gpuaug-parquet") as pool:
            metadata = list(pool.map(partial(_metadata, storage=self._storage), files))
            schema = metadata[0].schema.to_arrow_schema()
            self._column = _image_column(schema, image, place)
            columns = [field.name for field in schema if _bytes_column(field) is None]
            named = [name for name in columns if _class_names(schema, name)]
            remedy = "Set `source.label` to one of these, or to none for no labels."
            column = label_column(label, columns, with_classes=named, place=repr(place), remedy=remedy)
            for file, meta in zip(files, metadata, strict=True):
                _check(file, meta, schema, [self._column.split(".")[0], *([column] if column else [])])
            if column is not None:
                values = list(pool.map(partial(_values, column=column, storage=self._storage), files, metadata))
        rows = [[meta.row_group(g).num_rows for g in range(meta.num_row_groups)] for meta in metadata]
        self._starts = bounds_of([n for groups in rows for n in groups])  # first row of each row group
        self._first = bounds_of([len(groups) for groups in rows])  # first row group of each file
        self._names = FileKeys(Names.of([[os.fsencode(name) for name in names]]), bounds_of([sum(g) for g in rows]))
        if not len(self._names):
            raise SourceError(f"no images in {len(files)} Parquet files of {redact(self.root)!r}: they have no rows.")
        if column is not None:
            are_arrays = isinstance(values[0], np.ndarray)
            labels: Any = np.concatenate(values) if are_arrays else [x for part in values for x in part]
            self._set_labels(labels, classes=classes, names=_class_names(schema, column))
        elif classes is not None:
            raise ConfigError("the files have no label column. Remove `source.classes`, or set `source.label`.")
        largest = max(n for groups in rows for n in groups)
        remedy = ". In shuffled order each image costs a whole group, except with `cache=ram`" if largest > 1 else ""
        log.info("source %s: row groups have up to %d images and are read whole%s", redact(self.root), largest, remedy)
        self._reset()
        self._activate(subset, exclude, began=began)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_footer", "_groups")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def _reset(self) -> None:
        self._footer = lru_cache(maxsize=OPEN_FILES)(partial(_metadata, storage=self._storage))
        self._groups: OrderedDict[int, Any] = OrderedDict()  # images by row group

    def _read(self, numbers: Sequence[int]) -> list[Any]:
        starts, rows = self._starts.numpy(), dict[int, list[int]]()
        for row, group in enumerate((np.searchsorted(starts, np.asarray(numbers), side="right") - 1).tolist()):
            rows.setdefault(group, []).append(row)
        items: list[Any] = [None] * len(numbers)
        for group, images in self._read_groups(list(rows)):
            for row in rows[group]:
                if isinstance(images, Exception):
                    items[row] = images
                elif (data := images[numbers[row] - int(starts[group])].as_py()) is None:
                    items[row] = ReadError(f"{self.key(numbers[row])!r} has no image bytes")
                else:
                    items[row] = data, self._label_of(numbers[row])
        # else Arrow's pool keeps several times the groups' size: with groups of 4 MiB, 90 instead of 20 MiB per worker
        import_pyarrow().default_memory_pool().release_unused()
        return items

    def group_bytes(self) -> int:
        """Bytes of the images in the largest of 16 evenly spread row groups."""
        sizes = [0]
        for group in np.linspace(0, len(self._starts) - 2, 16).round().astype(int).tolist():
            place = self._locate(group)
            parts = map(place.meta.row_group(place.number).column, range(place.meta.num_columns))
            sizes += [part.total_uncompressed_size for part in parts if part.path_in_schema == self._column]
        return max(sizes)

    def same_group(self, index: int) -> NDArray[np.int64]:
        """Active samples in the row group of sample ``index``, int64 ``[n]``; empty if the group is not in memory."""
        group, _ = locate(self._starts, index)
        if group not in self._groups:
            return np.zeros(0, dtype=np.int64)
        begin, end = self._starts[group : group + 2].tolist()
        if self.indices is None:
            return np.arange(begin, end)
        active = self.indices.numpy()
        return active[slice(*np.searchsorted(active, (begin, end)))]

    def _read_groups(self, groups: list[int]) -> Iterator[tuple[int, Any]]:
        """Images or error of each row group: groups in memory first, then the others, of which remote ones together."""
        missing = [group for group in groups if group not in self._groups]
        for group in groups:
            if group in self._groups:
                self._groups.move_to_end(group)
                yield group, self._groups[group]
        wave: dict[int, _Group] = {}
        for group in missing:
            try:
                wave[group] = self._locate(group)
            except (OSError, GpuaugError) as error:
                yield group, error
            if not is_url(self.root) or sum(place.part.size or 0 for place in wave.values()) > WAVE_BYTES:
                yield from self._read_wave(wave)
                wave = {}
        yield from self._read_wave(wave)

    def _read_wave(self, wave: dict[int, _Group]) -> Iterator[tuple[int, Any]]:
        parts = [place.part for place in wave.values()]
        pieces: list[Any] = self._storage.read(parts) if is_url(self.root) else [b""] * len(parts)
        for (group, place), piece in zip(wave.items(), pieces, strict=True):
            if isinstance(piece, Exception):
                yield group, piece
                continue
            try:
                data = _RangeFile(place.file, self._storage, place.part.begin, piece)
                images = _images(place, self._column, data)
            except (OSError, GpuaugError, import_pyarrow().ArrowException) as error:
                reason = f"row group {place.number} of {redact(place.file.path)!r} cannot be read: {error}"
                yield group, ReadError(reason)
            else:
                self._groups[group] = images
                if len(self._groups) > self.row_groups:
                    self._groups.popitem(last=False)
                yield group, images

    def _locate(self, group: int) -> _Group:
        number, inside = locate(self._first, group)
        file = self._files[number]
        try:
            meta = self._footer(file)
        except SourceError as error:  # only its samples fail: the file was readable at the start
            raise ReadError(str(error)) from error
        return _Group(meta, file, inside, _range(file, meta, inside, self._column))


class _Group(NamedTuple):
    """A row group: the file's footer, the file, the group's number in the file, and the byte range of its images."""

    meta: Any
    file: FileInfo
    number: int
    part: Range


class _RangeFile(io.RawIOBase):
    """A file for pyarrow. ``data``, the bytes from ``begin`` on, is in memory; other bytes are read on demand."""

    def __init__(self, file: FileInfo, storage: Storage, begin: int = 0, data: bytes = b"") -> None:
        self.file, self.storage, self.position, self.begin, self.data = file, storage, 0, begin, data

    def readable(self) -> bool:
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + (0, self.position, self.file.size)[whence]
        return self.position

    def tell(self) -> int:
        return self.position

    def read(self, size: int = -1) -> bytes:
        """Exactly ``size`` bytes; fewer only at the end of the file."""
        left = max(0, self.file.size - self.position)
        size = left if size < 0 else min(size, left)
        start = self.position
        self.position += size
        if self.begin <= start and start + size <= self.begin + len(self.data):
            return self.data[start - self.begin : start - self.begin + size]
        (item,) = self.storage.read([Range(self.file.path, start, size, self.file.version)])
        if isinstance(item, Exception):
            raise item if isinstance(item, OSError) else OSError(str(item))
        return item


def import_pyarrow() -> Any:
    """The package pyarrow; SourceError if it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise SourceError(f"Parquet needs pyarrow ({error}). Install it: pip install gpuaug[parquet].") from error
    return pyarrow


def _metadata(file: FileInfo, storage: Storage) -> Any:
    """The footer of a file; SourceError if it cannot be read."""
    pyarrow = import_pyarrow()
    if file.size < 0:
        raise SourceError(f"{redact(file.path)!r}: the server reports no size. Use another server, or a copy.")
    try:
        return pyarrow.parquet.read_metadata(pyarrow.PythonFile(_RangeFile(file, storage), mode="r"))
    except (OSError, GpuaugError, pyarrow.ArrowException) as error:
        raise SourceError(f"{redact(file.path)!r} cannot be read as a Parquet file: {error}.") from error


def _check(file: FileInfo, meta: Any, schema: Any, columns: list[str]) -> None:
    own = meta.schema.to_arrow_schema()
    for name in columns:
        if name not in own.names or not own.field(name).type.equals(schema.field(name).type):
            raise SourceError(
                f"{redact(file.path)!r} must have the columns of the first file, such as {name!r}: "
                f"{schema.field(name).type}. Found: {_columns(own)}."
            )
    size = max((meta.row_group(g).total_byte_size for g in range(meta.num_row_groups)), default=0)
    if size > LARGEST_GROUP:
        raise SourceError(
            f"row groups must have at most {LARGEST_GROUP >> 30} GiB, because each is read whole. Found: {size} bytes "
            f"in {redact(file.path)!r}. Write the file with smaller row groups (`row_group_size`)."
        )


def _columns(schema: Any) -> str:
    return some([f"{field.name}: {field.type}" for field in schema])


def _image_column(schema: Any, name: str | None, place: str) -> str:
    """Path of the image column, such as ``image.bytes``."""
    known = {field.name: path for field in schema if (path := _bytes_column(field))}
    if name is None and len(known) != 1:
        text = f"set `source.image`: {len(known)} columns of {place!r} have bytes. All columns: {_columns(schema)}."
        raise SourceError(text)
    if name is not None and name not in known:
        raise SourceError(
            f"`source.image` must be a column of bytes in {place!r}. Found: {name!r}. Columns: {_columns(schema)}."
        )
    return next(iter(known.values())) if name is None else known[name]


def _bytes_column(field: Any) -> str | None:
    """Path of the bytes in a column; None if the column cannot hold images."""
    if str(field.type) in BYTES:
        return str(field.name)
    parts = {part.name: str(part.type) for part in field.type} if str(field.type).startswith("struct<") else {}
    return f"{field.name}.bytes" if parts.get("bytes") in BYTES else None


def _class_names(schema: Any, column: str) -> list[str] | None:
    """Class names of a column; None if ``datasets`` did not write them into the metadata."""
    try:
        metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"null"))
        names = metadata["info"]["features"][column]["names"]
        return [str(name) for name in names] if isinstance(names, list) and names else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _values(file: FileInfo, meta: Any, column: str, storage: Storage) -> Any:
    """The labels of a file: an array of numbers, or a list."""
    pyarrow = import_pyarrow()
    try:
        table = _open(_RangeFile(file, storage), meta).read([column], use_threads=False)
    except (OSError, GpuaugError, pyarrow.ArrowException) as error:
        raise SourceError(f"the labels in {redact(file.path)!r} cannot be read: {error}.") from error
    if table.num_rows != meta.num_rows:
        raise SourceError(
            f"{redact(file.path)!r} has {table.num_rows} labels for {meta.num_rows} rows. Write the file again."
        )
    return plain_values(table.column(column), redact(file.path))


def plain_values(column: Any, place: str) -> Any:
    """Values of an Arrow column: an array of int64 or float32, or a list."""
    types = import_pyarrow().types
    if column.null_count:
        row = column.is_null().index(True).as_py()
        raise SourceError(
            f"{column.null_count} labels in {place!r} are null, the first in row {row}. Fill in their values."
        )
    if types.is_integer(column.type) or types.is_boolean(column.type):
        try:
            return np.array(column.cast("int64").to_numpy())
        except import_pyarrow().ArrowInvalid as error:  # a uint64 that is too large
            raise SourceError(f"labels in {place!r} must be below 2**63: {error}.") from error
    return np.array(column.to_numpy(), np.float32) if types.is_floating(column.type) else column.to_pylist()


def _range(file: FileInfo, meta: Any, group: int, column: str) -> Range:
    """The byte range of the image column in a row group."""
    inside = meta.row_group(group)
    for chunk in map(inside.column, range(inside.num_columns)):
        if chunk.path_in_schema == column:
            begin = chunk.data_page_offset
            if chunk.has_dictionary_page and chunk.dictionary_page_offset:
                begin = min(begin, chunk.dictionary_page_offset)
            if not 0 <= begin <= begin + chunk.total_compressed_size <= file.size:
                raise ReadError(f"row group {group} of {redact(file.path)!r} lies outside the file")
            return Range(file.path, begin, chunk.total_compressed_size, file.version)
    raise ReadError(f"row group {group} of {redact(file.path)!r} has no column {column!r}")


def _images(place: _Group, column: str, data: _RangeFile) -> Any:
    """The encoded images of a row group: an Arrow column of bytes."""
    images = _open(data, place.meta).read_row_group(place.number, columns=[column], use_threads=False).column(0)
    if len(images) != (rows := place.meta.row_group(place.number).num_rows):
        raise ReadError(f"it has {len(images)} of {rows} rows")
    if not column.endswith(".bytes") or str(images.type) in BYTES:
        return images
    chunks = [chunk.field("bytes") if not chunk.null_count else chunk.flatten()[0] for chunk in images.chunks]
    return import_pyarrow().chunked_array(chunks)


def _open(data: _RangeFile, meta: Any) -> Any:
    pyarrow = import_pyarrow()
    return pyarrow.parquet.ParquetFile(pyarrow.PythonFile(data, mode="r"), metadata=meta, pre_buffer=False)
