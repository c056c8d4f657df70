"""A table of image files and labels: CSV or TSV."""

from __future__ import annotations

import csv
import io
import os
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from gpuaug import checks
from gpuaug.errors import ConfigError, ReadError, SourceError
from gpuaug.source.base import Classes, ListedSource
from gpuaug.source.classes import shortened
from gpuaug.source.extra import Extra, ExtraValues, fields_of
from gpuaug.source.files import Files
from gpuaug.source.filters import Subset
from gpuaug.source.index import Names
from gpuaug.source.paths import absolute, is_safe, is_url, redact, split
from gpuaug.source.remote.storage import Remote, Storage

_NOT_UTF8 = re.compile("[\ud800-\udfff]")
_WHOLE_NUMBER = re.compile(r"\s*[+-]?\d{1,18}\s*")


class TableSource(ListedSource):
    """Image files that a table lists, in the order of its rows.

    Whole numbers in the label column are class numbers. Other numbers stay unchanged. Without ``classes``, class names
    are numbered in sorted order. With K label columns, the label is float32 [K], and the column names are the class
    names.

    Args:
        root: path or URL of the table: .csv or .tsv. The first line names the columns.
        path: column of the image paths. Paths are relative to the table's folder and must stay inside this folder.
        label: column of the labels, or a list of columns; ``none`` or None: no labels.
        mask: column of the masks' paths, in the same form as image paths. With masks, a sample is ``(bytes, Target)``.
        extra: column of extras, such as ``caption``. A list of columns gives each sample a dict. With extras, a sample
            is ``(bytes, label, extra)``. The values are text.
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
        labels: list[Any] = [*(label or ())] if several else [] if is_none else [label]
        if not all(isinstance(name, str) and name for name in [path, *labels]) or (several and not labels):
            raise ConfigError(f"`source.path` and `source.label` must name columns. Found: {path!r}, {label!r}.")
        if (several or not labels) and classes is not None:
            raise ConfigError("`source.classes` needs exactly one label column. Remove `source.classes`.")
        masks = [] if checks.text("source.mask", mask, optional=True) is None else [str(mask)]
        self.extra = fields_of(extra)
        extras = [] if self.extra is None else [*self.extra.names]
        began = time.monotonic()
        table = absolute(root)
        place = redact(table)
        self._storage = Storage(remote)
        self.root, _ = split(table)
        columns = _read(table, [path, *labels, *masks], extras, self._storage)
        self._names = _names(columns[path], place)
        if not len(self._names):
            raise SourceError(f"no images in {place!r}: the table has no rows.")
        self._files = Files(self.root, self._names, self._storage)
        if masks:
            self.target_kinds = frozenset({"masks"})
            self._mask_files = Files(self.root, _names(columns[masks[0]], place), self._storage)
        self._extras = ExtraValues(columns[name] for name in extras)
        places = [f"the column {name!r} of {place!r}" for name in labels]
        values = [_numbers(columns[name], where) for name, where in zip(labels, places, strict=True)]
        if several:
            self._set_labels(_matrix(values, places), classes=None, place=repr(place))
            self._set_classes(labels)
        elif labels:
            self._set_labels(values[0], classes=classes, place=places[0])
        self._activate(subset, exclude, began=began)

    def _item(self, index: int, image: Any, mask: Any = None, extra: Iterable[Any] = (), **objects: Any) -> Any:
        return super()._item(index, image, mask, self._extras[index], **objects)


def _read(table: str, names: list[str], extras: list[str], storage: Storage) -> dict[str, tuple[str, ...]]:
    kind, place = os.path.splitext(table.split("?", 1)[0])[1].lower(), redact(table)
    if kind not in (".csv", ".tsv"):
        raise ConfigError(f"`source.root` must end in .csv or .tsv. Found: {place!r}.")
    if not is_url(table) and not os.path.exists(table):
        raise SourceError(f"`source.root` does not exist: {table!r}.")
    try:
        text = storage.read_file(table).decode("utf-8-sig", errors="surrogateescape")
    except (OSError, ReadError) as error:
        raise SourceError(f"the table {place!r} cannot be read: {error}.") from error
    delimiter = "\t" if kind == ".tsv" else ","
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    begin, rows = 1, []  # begin: first line of the row that is read
    try:
        head = [name.strip() for name in next(lines, [])]
        other = len(head) == 1 and head[0] not in names and re.search(r"[,;|\t]", head[0])
        if not head or other or "\0" in head[0]:
            raise SourceError(
                f"the first line of {place!r} must name the columns, in UTF-8 and with {delimiter!r} between them. "
                f"Found: {','.join(head)!r:.200}. Save the table in this form."
            )
        for name in names:
            if head.count(name) != 1:
                raise SourceError(
                    f"the table {place!r} must have one column {name!r}. Columns: {shortened(head)}. Set "
                    "`source.path` and `source.label` to names of columns (for no labels: source.label=none)."
                )
        fields_of(extras or None, head, place=repr(place))
        known = {name: head.index(name) for name in (*names, *extras)}
        begin = lines.line_num + 1
        for row in lines:
            if row:
                _check_row(row, head, extras, begin, place)
                rows.append([row[at] for at in known.values()])
            begin = lines.line_num + 1
    except csv.Error as error:
        raise SourceError(
            f"the table {place!r} cannot be read: line {begin}: {error}. If a value begins with a quote, enclose "
            'the value in quotes and double those inside ("""Hi"" said"), or use `source=parquet`.'
        ) from error
    return dict(zip(known, zip(*rows, strict=True) if rows else [()] * len(known), strict=True))


def _check_row(row: list[str], head: list[str], extras: list[str], line: int, place: str) -> None:
    if len(row) != len(head):
        raise SourceError(f"line {line} of {place!r} has {len(row)} fields, but the first line has {len(head)}.")
    for name in extras:
        value = row[head.index(name)]
        if bad := _NOT_UTF8.search(value):  # paths need not be UTF-8, but extras must be
            found = value[bad.start() : bad.start() + 20].encode(errors="surrogateescape")
            raise SourceError(
                f"line {line} of {place!r}: {name!r} must be UTF-8. Found: {found!r}. Save the table as UTF-8."
            )


def _numbers(column: tuple[str, ...], place: str) -> Sequence[Any]:
    """The labels in a column. The text becomes whole numbers or floats, if possible."""
    if "" in column:
        raise SourceError(f"sample {column.index('')} has no label in {place}. Add a value, or remove the row.")
    if all(map(_WHOLE_NUMBER.fullmatch, column)):
        return [int(value) for value in column]
    if any("_" in value for value in column):  # Python's float accepts 1_0
        return column
    try:
        return [float(value) for value in column]
    except ValueError:
        return column


def _names(paths: Sequence[str], place: str) -> Names:
    """The paths without ``./`` at the start."""
    names = []
    for row, path in enumerate(paths):
        short = re.sub(r"^(\./+)+", "", path.strip())
        if not is_safe(short) or short.endswith("/"):
            raise SourceError(
                f"paths in {place!r} must be relative and stay inside the table's folder. Found in row {row}: "
                f"{path!r:.200}."
            )
        names.append(os.fsencode(short))
    return Names.of([names])


def _matrix(columns: list[Any], places: list[str]) -> Any:
    for place, column in zip(places, columns, strict=True):
        if not isinstance(column[0], int | float):
            raise SourceError(f"several label columns must all hold numbers. Found text in {place}.")
    return np.stack([np.asarray(column, dtype=np.float32) for column in columns], axis=1)
