"""Parquet files with a column of encoded images, as Hugging Face ``datasets`` writes them."""

from __future__ import annotations

import io
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from gpuaug import checks
from gpuaug.errors import ConfigError, GpuaugError, ReadError, SourceError
from gpuaug.source.base import Classes, FileKeys, ListedSource
from gpuaug.source.classes import label_column, shortened
from gpuaug.source.extra import Extra, fields_of
from gpuaug.source.filters import Subset
from gpuaug.source.index import Names, bounds_of, locate
from gpuaug.source.object_columns import (
    BYTES,
    bytes_column,
    class_names,
    described,
    early_columns,
    image_column,
    import_pyarrow,
    objects_column,
)  # fmt: skip
from gpuaug.source.paths import common_folder, is_url, redact
from gpuaug.source.remote.storage import FileInfo, Range, Remote, Storage, joined

log = logging.getLogger("gpuaug")

INDEX_THREADS = 8  # files whose footers, labels and objects are read at the same time
OPEN_FILES = 64  # files whose footers a process keeps
ROW_GROUPS = 2  # row groups that a process keeps in memory
WAVE_BYTES = 64 << 20  # remote row groups are collected up to this size, then requested together
LARGEST_GROUP = 4 << 30  # uncompressed bytes


class ParquetSource(ListedSource):
    """Rows of Parquet files, in the order of the files. Reading an image reads its whole row group.

    In a shuffled order, large row groups are slow: with 100 images per group, reading one sample reads 100 images. A
    sequential epoch reads each group once.

    With ``mask`` or ``objects``, a sample is ``(bytes, Target)``. The column of objects is a struct of lists or a list
    of structs, as in Hugging Face's COCO. Objects have the same fields as in :class:`ShardSource`. The columns
    ``width`` and ``height`` hold the size of the annotated image. A damaged row becomes a fault when it is read.

    Args:
        root: path or URL of a file, such as ``train-*.parquet`` or ``train-{000..009}.parquet``; a list of them; or a
            folder.
        image: column of the images: binary, or a struct with the field ``bytes``; None: the only column of these types,
            apart from ``mask`` and ``extra``.
        label: column of the labels (whole numbers, floats, names, lists); ``none``: no labels; ``auto``: ``label`` or
            ``labels``, else the only column with class names. With ``mask``, ``objects`` or ``extra``, ``auto`` takes
            no column of another name. Class names are read from the files' metadata.
        mask: column of the encoded masks, of the same types as images.
        objects: column of the objects.
        extra: column of the extras, such as ``caption``. A sample is then ``(bytes, label, extra)``. With a list of
            columns, the extra is a dict.
        classes: as in :class:`FolderSource`; with ``objects``, the classes of the objects.
        subset, exclude: as in :class:`FolderSource`.
        remote: how to read from URLs.

    Raises:
        SourceError: if pyarrow is missing, a file cannot be read, or a column is missing.

    >>> source = ParquetSource("data/train-*.parquet", label="none")
    >>> source = ParquetSource("data/train-*.parquet", image="image", objects="objects")
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        image: str | None = None,
        label: str | None = "auto",
        mask: str | None = None,
        objects: str | None = None,
        extra: Extra = None,
        classes: Classes = None,
        subset: Subset = None,
        exclude: str | os.PathLike[str] | None = None,
        remote: Remote | None = None,
    ) -> None:
        import_pyarrow()
        began = time.monotonic()
        for key, value in (("mask", mask), ("objects", objects)):
            checks.text(f"source.{key}", value, optional=True)
        self._storage = Storage(remote)
        files = self._storage.expand(root, ending=".parquet")
        self.root, names = common_folder([file.path for file in files])
        self._parquet_files = files
        place = redact(files[0].path)
        metadata = _in_threads(partial(_metadata, storage=self._storage), files)
        schema = metadata[0].schema.to_arrow_schema()
        masks = [] if mask is None else [image_column(schema, mask, place, key="source.mask")]
        self.target_kinds = frozenset() if mask is None else frozenset({"masks"})
        self.extra = fields_of(extra, schema.names, place=repr(place))
        more = () if self.extra is None else self.extra.names
        images = [image_column(schema, image, place, besides=(mask, *more)), *masks]
        optional = bool(mask or objects or more)
        columns = [field.name for field in schema if bytes_column(field) is None and field.name != objects]
        named = [] if optional else [name for name in columns if class_names(schema, name)]
        remedy = "Set `source.label` to one of these, or to none for no labels."
        column = label_column(label, columns, with_classes=named, optional=optional, place=repr(place), remedy=remedy)
        early = early_columns(schema, column, objects_column(schema, objects, place))
        for file, meta in zip(files, metadata, strict=True):
            _check(file, meta, schema, [*images, *more, *early])
        self._columns = [*images, *more]
        self._set_rows(metadata, names)
        if not early and classes is not None:
            raise ConfigError("the files have no label column. Remove `source.classes`, or set `source.label`.")
        tables = _in_threads(partial(_table, columns=early, storage=self._storage), files, metadata) if early else []
        table = import_pyarrow().concat_tables(tables, promote_options="default") if early else None
        self._set_columns(table, column, objects, classes)
        self._reset()
        self._activate(subset, exclude, began=began)

    def _set_rows(self, metadata: Sequence[Any], names: Sequence[str]) -> None:
        rows = [[meta.row_group(g).num_rows for g in range(meta.num_row_groups)] for meta in metadata]
        self._starts = bounds_of([n for groups in rows for n in groups])  # first row of each row group
        self._first = bounds_of([len(groups) for groups in rows])  # first row group of each file
        self._names = FileKeys(Names.of([[os.fsencode(name) for name in names]]), bounds_of([sum(g) for g in rows]))
        if not len(self._names):
            raise SourceError(f"no images in {len(names)} Parquet files of {redact(self.root)!r}: they have no rows.")
        largest = max(n for groups in rows for n in groups)
        remedy = ". In shuffled order, each image reads a whole group: write small row groups" if largest > 1 else ""
        log.info("source %s: row groups have up to %d images and are read whole%s", redact(self.root), largest, remedy)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_footer", "_groups")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def _reset(self) -> None:
        self._footer = lru_cache(maxsize=OPEN_FILES)(partial(_metadata, storage=self._storage))
        self._groups: OrderedDict[int, Any] = OrderedDict()  # columns of images, masks and extras by row group

    def _read(self, numbers: Sequence[int]) -> list[Any]:
        starts, rows = self._starts.numpy(), dict[int, list[int]]()
        for row, group in enumerate((np.searchsorted(starts, np.asarray(numbers), side="right") - 1).tolist()):
            rows.setdefault(group, []).append(row)
        items: list[Any] = [None] * len(numbers)
        for group, columns in self._read_groups(list(rows)):
            for row in rows[group]:
                if isinstance(columns, Exception):
                    items[row] = columns
                else:
                    at = numbers[row] - int(starts[group])
                    image, *rest = (column[at].as_py() for column in columns)
                    mask = rest.pop(0) if "masks" in self.target_kinds else None
                    items[row] = self._item(numbers[row], image, mask, rest)
        # otherwise Arrow's memory pool would keep 90 instead of 20 MiB for groups of 4 MiB
        import_pyarrow().default_memory_pool().release_unused()
        return items

    def _read_groups(self, groups: list[int]) -> Iterator[tuple[int, Any]]:
        """Yield each group with its columns or error. Groups in memory come first, because a read may drop them."""
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
            size = sum(part.size or 0 for place in wave.values() for part in place.parts)
            if not is_url(self.root) or size > WAVE_BYTES:
                yield from self._read_wave(wave)
                wave = {}
        yield from self._read_wave(wave)

    def _read_wave(self, wave: dict[int, _Group]) -> Iterator[tuple[int, Any]]:
        parts = [part for place in wave.values() for part in place.parts]
        pieces = iter(self._storage.read(parts) if is_url(self.root) else [b""] * len(parts))
        for group, place in wave.items():
            own: list[Any] = [next(pieces) for _ in place.parts]
            if failed := [piece for piece in own if isinstance(piece, Exception)]:
                yield group, failed[0]
                continue
            try:
                known = [(part.begin, piece) for part, piece in zip(place.parts, own, strict=True)]
                data = _RangeFile(place.file, self._storage, known)
                images = [_images(place, column, data) for column in self._columns]
            except (OSError, GpuaugError, import_pyarrow().ArrowException) as error:
                reason = f"row group {place.number} of {redact(place.file.path)!r} cannot be read: {error}"
                yield group, ReadError(reason)
            else:
                self._groups[group] = images
                if len(self._groups) > ROW_GROUPS:
                    self._groups.popitem(last=False)
                yield group, images

    def _locate(self, group: int) -> _Group:
        number, inside = locate(self._first, group)
        file = self._parquet_files[number]
        try:
            meta = self._footer(file)
        except SourceError as error:  # the file was readable at the start, so only its samples fail
            raise ReadError(str(error)) from error
        parts = {part for column in self._columns for part in _ranges(file, meta, inside, column)}
        return _Group(meta, file, inside, joined(parts))


class _Group(NamedTuple):
    """A row group of a file."""

    meta: Any  # the footer of the file
    file: FileInfo
    number: int  # position of the group in the file
    parts: list[Range]  # byte ranges of the columns to read


class _RangeFile(io.RawIOBase):
    """A file for pyarrow. ``known``: positions and bytes that are in memory. Other bytes are read when needed."""

    def __init__(self, file: FileInfo, storage: Storage, known: Sequence[tuple[int, bytes]] = ()) -> None:
        self.file, self.storage, self.position, self.known = file, storage, 0, known

    def readable(self) -> bool:
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + (0, self.position, self.file.size)[whence]
        return self.position

    def tell(self) -> int:
        return self.position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self.file.size - self.position)
        size = left if size < 0 else min(size, left)
        start = self.position
        self.position += size
        for begin, data in self.known:
            if begin <= start and start + size <= begin + len(data):
                return data[start - begin : start - begin + size]
        (item,) = self.storage.read([Range(self.file.path, start, size, self.file.version)])
        if isinstance(item, Exception):
            raise item if isinstance(item, OSError) else OSError(str(item))
        return item


def _in_threads(work: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
    with ThreadPoolExecutor(INDEX_THREADS, thread_name_prefix="gpuaug-parquet") as pool:
        return list(pool.map(work, *arguments))


def _metadata(file: FileInfo, storage: Storage) -> Any:
    pyarrow = import_pyarrow()
    try:
        meta = pyarrow.parquet.read_metadata(pyarrow.PythonFile(_RangeFile(file, storage), mode="r"))
        str(meta.schema.to_arrow_schema())  # UnicodeDecodeError if a column's name is not UTF-8
        return meta
    except (OSError, GpuaugError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise SourceError(f"{redact(file.path)!r} cannot be read as a Parquet file: {error}.") from error


def _check(file: FileInfo, meta: Any, schema: Any, columns: list[str]) -> None:
    own = meta.schema.to_arrow_schema()
    for path in columns:
        name = path if path in schema.names else path.removesuffix(".bytes")
        if name not in own.names or not own.field(name).type.equals(schema.field(name).type):
            raise SourceError(
                f"{redact(file.path)!r} must have the columns of the first file, such as {name!r}: "
                f"{schema.field(name).type}. Found: {described(own)}."
            )
    size = max((meta.row_group(g).total_byte_size for g in range(meta.num_row_groups)), default=0)
    if size > LARGEST_GROUP:
        raise SourceError(
            f"row groups must have at most {LARGEST_GROUP >> 30} GiB, because each is read whole. Found: {size} bytes "
            f"in {redact(file.path)!r}. Write the file with smaller row groups (`row_group_size`)."
        )


def _table(file: FileInfo, meta: Any, columns: list[str], storage: Storage) -> Any:
    pyarrow = import_pyarrow()
    try:
        table = _open(_RangeFile(file, storage), meta).read(columns, use_threads=False).select(columns)
    except (OSError, GpuaugError, pyarrow.ArrowException) as error:
        raise SourceError(f"{shortened(columns)} in {redact(file.path)!r} cannot be read: {error}.") from error
    if table.num_rows != meta.num_rows:
        raise SourceError(
            f"{shortened(columns)} in {redact(file.path)!r} must have {meta.num_rows} rows. Found: {table.num_rows}. "
            "Write the file again."
        )
    return table


def _ranges(file: FileInfo, meta: Any, group: int, column: str) -> list[Range]:
    inside, ranges = meta.row_group(group), []
    for chunk in map(inside.column, range(inside.num_columns)):
        # a column of lists or structs may have several parts
        if f"{chunk.path_in_schema}.".startswith(f"{column}."):
            begin = chunk.data_page_offset
            if chunk.has_dictionary_page and chunk.dictionary_page_offset:
                begin = min(begin, chunk.dictionary_page_offset)
            if not 0 <= begin <= begin + chunk.total_compressed_size <= file.size:
                raise ReadError(f"row group {group} of {redact(file.path)!r} lies outside the file")
            ranges.append(Range(file.path, begin, chunk.total_compressed_size, file.version))
    if not ranges:
        raise ReadError(f"row group {group} of {redact(file.path)!r} has no column {column!r}")
    return ranges


def _images(place: _Group, column: str, data: _RangeFile) -> Any:
    """A column of a row group, such as the encoded images."""
    images = _open(data, place.meta).read_row_group(place.number, columns=[column], use_threads=False).column(0)
    if len(images) != (rows := place.meta.row_group(place.number).num_rows):
        raise ReadError(f"it has {len(images)} rows instead of {rows}")
    is_struct = column.endswith(".bytes") and str(images.type) not in BYTES
    return images.flatten()[0] if is_struct else images  # the field `bytes`, because only this field was read


def _open(data: _RangeFile, meta: Any) -> Any:
    pyarrow = import_pyarrow()
    return pyarrow.parquet.ParquetFile(pyarrow.PythonFile(data, mode="r"), metadata=meta, pre_buffer=False)
