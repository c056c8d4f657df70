"""A table of image files and labels: CSV, TSV or Parquet."""

from __future__ import annotations

import csv
import io
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from gpuaug import checks
from gpuaug.batch import Target
from gpuaug.errors import ConfigError, ReadError, SourceError
from gpuaug.source.base import Classes
from gpuaug.source.classes import some
from gpuaug.source.extra import Extra, ExtraTable, fields_of
from gpuaug.source.files import Files, FileSource
from gpuaug.source.filters import Subset
from gpuaug.source.index import Names
from gpuaug.source.parquet import import_pyarrow, plain_values
from gpuaug.source.paths import absolute, is_safe, is_url, redact, split
from gpuaug.source.remote.storage import Remote, Storage

_LIMIT = threading.Lock()  # held while the csv module accepts longer values than usual
_WHOLE_NUMBER = re.compile(r"\s*[+-]?\d{1,18}\s*")


class TableSource(FileSource):
    """Image files that a table lists, in the order of its rows.

    Whole numbers in the label column are class numbers. Other numbers stay unchanged. Without ``classes``, class names
    are numbered in sorted order. A Parquet column may also hold lists of class names, or lists of numbers that all have
    the same length. With K label columns, the label is float32 [K], and the column names are the class names.

    Args:
        root: path or URL of the table: .csv, .tsv or .parquet. The first line of a CSV or TSV file names its columns.
        path: column of the image paths. Paths are relative to the table's folder and must stay inside this folder.
        label: column of the labels, or a list of columns; ``none`` or None: no labels.
        mask: column of the masks' paths, in the same form as image paths. With masks, a sample is ``(bytes, Target)``.
        extra: column of extras, such as ``caption``. A list of columns gives each sample a dict. With extras, a sample
            is ``(bytes, label, extra)``. Values from CSV and TSV are text.
        classes, subset, exclude: as in :class:`FolderSource`.
        remote: how to read from a URL.

    Raises:
        SourceError: if the table cannot be read, a column is missing, or a row has no valid path or label.

    >>> source = TableSource("data/train.csv", path="file", label="class")
    >>> source = TableSource("data/captions.tsv", label="none", extra="caption")
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        path: str = "path",
        label: str | Sequence[str] | None = "label",
        mask: str | None = None,
        extra: Extra = None,
        classes: Classes = None,
        subset: Subset = None,
        exclude: str | os.PathLike[str] | None = None,
        remote: Remote | None = None,
    ) -> None:
        several = isinstance(label, Sequence) and not isinstance(label, str)
        is_none = label is None or (isinstance(label, str) and label == "none")
        wanted: list[Any] = [*(label or ())] if several else [] if is_none else [label]
        if not all(isinstance(name, str) and name for name in [path, *wanted]) or (several and not wanted):
            raise ConfigError(f"`source.path` and `source.label` must name columns. Found: {path!r}, {label!r}.")
        if (several or not wanted) and classes is not None:
            raise ConfigError("`source.classes` needs exactly one label column. Remove `source.classes`.")
        self.extra = fields_of(extra)
        masks = [] if checks.text("source.mask", mask, optional=True) is None else [str(mask)]
        began = time.monotonic()
        table = absolute(root)
        self._storage = Storage(remote)
        self.root, _ = split(table)
        paths, *columns = _read(table, [path, *wanted, *masks], self.extra.names if self.extra else (), self._storage)
        place = redact(table)
        self._names = _names(paths, place)
        if not len(self._names):
            raise SourceError(f"no images in {place!r}: the table has no rows.")
        self._files = Files(self.root, self._names, self._storage)
        if self.extra is not None:
            self._extras = ExtraTable(self.extra, [columns.pop() for _ in self.extra.names][::-1])
        if masks:
            self.target_kinds = frozenset({"masks"})
            self._mask_files = Files(self.root, _names(columns.pop(), place), self._storage)
        if several:
            self._set_labels(_matrix(columns, wanted, place), classes=None)
            self._set_classes(wanted)
        elif wanted:
            self._set_labels(columns[0], classes=classes)
        self._activate(subset, exclude, began=began)

    def _label_of(self, index: int) -> Any:
        label = super()._label_of(index)
        return label if self._mask_files is None else Target(label=label)

    def _sample(self, index: int, image: Any, mask: Any = None) -> Any:
        item = super()._sample(index, image, mask)
        return item if self.extra is None or isinstance(item, Exception) else (*item, self._extras[index])


def _read(table: str, names: list[str], extra: Sequence[str], storage: Storage) -> list[Any]:
    """Return the columns ``names`` and ``extra``. Columns of ``names[1:]`` become numbers if possible."""
    kind = os.path.splitext(table.split("?", 1)[0])[1].lower()
    if kind not in (".csv", ".tsv", ".parquet"):
        raise ConfigError(f"`source.root` must end in .csv, .tsv or .parquet. Found: {redact(table)!r}.")
    if not is_url(table) and not os.path.exists(table):
        raise SourceError(f"`source.root` does not exist: {table!r}.")
    table_error = import_pyarrow().ArrowException if kind == ".parquet" else csv.Error
    try:
        data = storage.read_file(table)
        if kind == ".parquet":
            return _parquet(data, names, extra, redact(table))
        return _csv(data, names, extra, kind, redact(table))
    except (OSError, ReadError, table_error) as error:
        raise SourceError(f"the table {redact(table)!r} cannot be read: {error}.") from error


def _csv(data: bytes, names: list[str], extra: Sequence[str], kind: str, place: str) -> list[Any]:
    text = data.decode("utf-8-sig", errors="surrogateescape")
    with _values_of(len(text)):
        lines = _lines(text, kind, place)
        head = [name.strip() for name in next(lines, (1, []))[1]]
        fields_of(list(extra) or None, head, place=repr(place))
        wanted = [*(_column(name, head, place) for name in names), *map(head.index, extra)]
        rows = []
        for number, row in lines:
            if len(row) != len(head):
                raise SourceError(
                    f"line {number} of {place!r} has {len(row)} fields, but the first line has {len(head)}."
                )
            for name, at in zip(extra, wanted[len(names) :], strict=True):
                try:
                    row[at].encode()
                except UnicodeEncodeError as error:  # paths need not be UTF-8, but extras must be
                    found = row[at][error.start : error.start + 20].encode(errors="surrogateescape")
                    raise SourceError(
                        f"line {number} of {place!r}: {name!r} must be UTF-8. Found: {found!r}. Save the table as "
                        "UTF-8."
                    ) from error
            rows.append([row[at] for at in wanted])
    paths, *columns = zip(*rows, strict=True) if rows else [()] * len(wanted)
    typed = [_typed(column, name, place) for column, name in zip(columns, names[1:], strict=False)]
    return [paths, *typed, *columns[len(typed) :]]


@contextmanager
def _values_of(size: int) -> Iterator[None]:
    """Let the csv module read values of up to ``size`` characters. This setting holds for the whole process."""
    with _LIMIT:
        usual = csv.field_size_limit()
        csv.field_size_limit(max(size, usual))
        try:
            yield
        finally:
            csv.field_size_limit(usual)


def _lines(text: str, kind: str, place: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line and all other non-empty lines, with their numbers."""
    lines, begin = csv.reader(io.StringIO(text, newline=""), delimiter="\t" if kind == ".tsv" else ",", strict=True), 1
    try:
        for row in lines:
            if row or begin == 1:
                yield begin, row
            begin = lines.line_num + 1
    except csv.Error as error:
        raise SourceError(
            f"the table {place!r} cannot be read: line {begin}: {error}. If a value begins with a quote, enclose "
            'the value in quotes and double those inside ("""Hi"" said"), or use Parquet.'
        ) from error


def _typed(column: Sequence[str], name: str, place: str) -> Sequence[Any]:
    """Convert a column of text to whole numbers or floats, if possible."""
    if "" in column:
        raise SourceError(f"sample {column.index('')} in {place!r} has no {name!r}. Add a value, or remove the row.")
    if all(map(_WHOLE_NUMBER.fullmatch, column)):
        return [int(value) for value in column]
    try:
        return [float(value) for value in column]
    except ValueError:
        return column


def _parquet(data: bytes, names: list[str], extra: Sequence[str], place: str) -> list[Any]:
    pyarrow = import_pyarrow()
    file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(data))
    for name in names:
        _column(name, file.schema_arrow.names, place)
    fields_of(list(extra) or None, file.schema_arrow.names, place=repr(place))
    columns = file.read(list(dict.fromkeys([*names, *extra])), use_threads=False)
    typed = [plain_values(columns.column(name), place) for name in names[1:]]
    return [columns.column(names[0]).to_pylist(), *typed, *(columns.column(name).to_pylist() for name in extra)]


def _column(name: str, head: list[str], place: str) -> int:
    if head.count(name) != 1:
        raise SourceError(
            f"the table {place!r} must have one column {name!r}. Columns: {some(head)}. Set `source.path` and "
            "`source.label` to names of columns (for no labels: source.label=none)."
        )
    return head.index(name)


def _names(paths: Iterable[Any], place: str) -> Names:
    """The paths without ``./`` at the start."""
    names = []
    for row, path in enumerate(paths):
        short = re.sub(r"^(\./+)+", "", path.strip()) if isinstance(path, str) else ""
        if not is_safe(short) or short.endswith("/"):
            raise SourceError(
                f"paths in {place!r} must be relative and stay inside the table's folder. Found in row {row}: "
                f"{path!r:.200}."
            )
        names.append(os.fsencode(short))
    return Names.of([names])


def _matrix(columns: list[Any], names: list[str], place: str) -> Any:
    for name, column in zip(names, columns, strict=True):
        if len(column) and not isinstance(column[0], int | float | np.number):
            raise SourceError(
                f"several label columns must all hold numbers. Found in {place!r}, column {name!r}: {column[0]!r}."
            )
    return np.stack([np.asarray(column, dtype=np.float32) for column in columns], axis=1)
