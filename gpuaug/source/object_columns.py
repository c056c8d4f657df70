"""Chooses columns of an Arrow table (a Parquet file, or Hugging Face ``datasets``), and reads objects from a column."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuaug.errors import SourceError
from gpuaug.source.classes import encode, numbers_of, shortened
from gpuaug.source.object_json import column_names, corners
from gpuaug.source.objects import MOST_KEYPOINTS, ObjectTable

BYTES = ("binary", "large_binary", "binary_view")  # Arrow types of encoded images


def read_objects(
    table: Any, name: str, *, classes: Mapping[str, int] | None, place: str
) -> tuple[ObjectTable, list[str] | None]:
    """The objects in the column ``name`` of an Arrow table, and the class names."""
    column, names = table.column(name).combine_chunks(), class_names(table.schema, name, objects=True)
    known = names if classes is None else list(classes)
    fields = _fields(column, place)
    reasons = _damage(fields)
    good = ~np.isin(np.arange(len(column)), list(reasons))
    if reasons:
        fields = _fields(column.filter(import_pyarrow().array(good)), place)
    counts = np.zeros(len(column), dtype=np.int64)
    counts[good] = fields["boxes"].counts
    values = _values(fields)
    if "labels" not in fields:
        values["labels"] = np.zeros(len(fields["boxes"].values), dtype=np.int64)
    elif _is_text((labels := fields["labels"].values).type):
        values["labels"], found = encode(labels.to_pylist(), classes=classes, place=repr(place))
        known = found if known is None else known
    else:
        values["labels"] = _whole(labels)
        if names is not None and classes is not None:
            numbers = np.append(numbers_of(names, classes, f"of the objects in {place}"), -1)  # -1: no class
            inside = (values["labels"] >= 0) & (values["labels"] < len(names))
            values["labels"] = numbers[np.where(inside, values["labels"], -1)]
    most = None if known is None else len(known)
    return ObjectTable(counts, sizes=_sizes(table), num_classes=most, **values, reasons=reasons), known


def import_pyarrow() -> Any:
    """The package pyarrow; SourceError if it is not installed."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as error:
        raise SourceError(f"Parquet needs pyarrow ({error}). Install it: pip install gpuaug[parquet].") from error
    return pyarrow


def early_columns(schema: Any, label: str | None, objects: str | None) -> list[str]:
    """The columns that the constructor reads: labels, objects, and the sizes of images with objects."""
    wanted = {label} if objects is None else {label, objects, "height", "width"}
    return [name for name in schema.names if name in wanted]


def column_values(column: Any, place: str, *, name: Callable[[int], str] = str) -> Any:
    """Values of an Arrow column: an array of int64 or float32, or a list.

    ``place`` and ``name(i)`` name the column and row ``i`` in messages.
    """
    types = import_pyarrow().types
    if column.null_count:
        row = name(column.is_null().index(True).as_py())
        raise SourceError(
            f"{column.null_count} labels in {place} are null, the first in row {row}. Fill in the values."
        )
    if types.is_integer(column.type) or types.is_boolean(column.type):
        try:
            return np.array(column.cast("int64").to_numpy())
        except import_pyarrow().ArrowInvalid as error:  # a uint64 that is too large
            raise SourceError(f"labels in {place} must be below 2**63: {error}.") from error
    return np.array(column.to_numpy(), np.float32) if types.is_floating(column.type) else column.to_pylist()


def _sizes(table: Any) -> NDArray[np.int64] | None:
    """The columns height and width, int64 [N, 2], 0 if not known; None if a column is missing or not integer."""
    columns = [table.column(name) for name in ("height", "width") if name in table.column_names]
    if len(columns) < 2 or not all(import_pyarrow().types.is_integer(column.type) for column in columns):
        return None
    sizes = np.stack([np.asarray(column.cast("int64").fill_null(0)) for column in columns], axis=1)
    return np.where((sizes > 0).all(axis=1, keepdims=True) & (sizes < 2**31), sizes, 0)


def class_names(schema: Any, column: str, *, objects: bool = False) -> list[str] | None:
    """Class names that ``datasets`` stored for a column of labels. ``objects``: the column has objects with labels."""
    try:
        feature = json.loads((schema.metadata or {}).get(b"huggingface", b"null"))["info"]["features"][column]
        if objects:
            feature = feature.get("feature", feature)  # a list of structs
            feature = feature[column_names(feature)["labels"]]
            feature = feature.get("feature", feature)
        names = feature["names"]
        return [str(name) for name in names] if isinstance(names, list) and names else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def is_objects(kind: Any) -> bool:
    """Whether a column of this Arrow type has objects with boxes."""
    return "boxes" in _members(kind)[0]


def described(schema: Any) -> str:
    return shortened([f"{field.name}: {field.type}" for field in schema])


def image_column(
    schema: Any, name: str | None, place: str, *, besides: Collection[str | None] = (), key: str = "source.image",
    remedy: str = "Set `source.image`.",
) -> str:  # fmt: skip
    """Path of the image column, such as ``image.bytes``. ``besides``: columns to ignore."""
    known = {field.name: path for field in schema if (path := bytes_column(field)) and field.name not in besides}
    if name is None and len(known) == 1:
        return next(iter(known.values()))
    if name not in known:
        fact = f"`{key}` must be a column of bytes in {place!r}. Found: {name!r}."
        if name is None:
            fact = f"{len(known)} columns of {place!r} have bytes. {remedy}"
        raise SourceError(f"{fact} Columns: {described(schema)}.")
    return known[name]


def bytes_column(field: Any) -> str | None:
    """Path of the bytes in a column; None if the column cannot hold images."""
    if str(field.type) in BYTES:
        return str(field.name)
    parts = {part.name: str(part.type) for part in field.type} if str(field.type).startswith("struct<") else {}
    return f"{field.name}.bytes" if parts.get("bytes") in BYTES else None


def objects_column(schema: Any, name: str | None, place: str) -> str | None:
    if name is not None and (name not in schema.names or not is_objects(schema.field(name).type)):
        raise SourceError(
            f"`source.objects` must be a column of {place!r} with boxes: a struct of lists, or a list of structs, with "
            f"a field bbox or boxes. Found: {name!r}. Columns: {described(schema)}."
        )
    return name


class _ListColumn(NamedTuple):
    """One field, such as boxes, of the objects of some rows."""

    name: str  # in the table
    counts: NDArray[np.int64]  # number of objects in each row; -1 for a null
    values: Any  # Arrow array with one entry per object


def _members(kind: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """Names and Arrow types of the fields of one object. The keys of both dicts are fields of a Target."""
    types = import_pyarrow().types
    if _is_list(kind) and types.is_struct(kind.value_type):
        inner = {field.name: field.type for field in kind.value_type}
    elif types.is_struct(kind):
        inner = {field.name: field.type.value_type for field in kind if _is_list(field.type)}
    else:
        return {}, {}
    names = column_names(inner)
    return names, {field: inner[name] for field, name in names.items()}


def _fields(column: Any, place: str) -> dict[str, _ListColumn]:
    names, kinds = _members(column.type)
    if "boxes" not in names:
        raise SourceError(
            f"the objects in {place} must be a struct of lists, or a list of structs, with 4 numbers in each `bbox` "
            f"(x, y, width, height) or `boxes` (x1, y1, x2, y2). Found: {column.type}."
        )
    types = import_pyarrow().types
    for field, kind in kinds.items():
        inner = kind
        while field in ("boxes", "keypoints") and _is_list(inner):
            inner = inner.value_type
        good = types.is_integer(inner) or (field == "crowd" and types.is_boolean(inner))
        good |= field not in ("labels", "ids", "crowd") and types.is_floating(inner)
        good |= (field == "labels" and _is_text(inner)) or types.is_null(inner)
        if field == "ids" and not good:
            del names[field]  # ids are optional, so ids that are no integers are ignored
        elif not good or (field in ("boxes", "keypoints") and not _is_list(kind) and not types.is_null(kind)):
            raise SourceError(f"the objects in {place} must hold numbers. Found: {names[field]} of type {kind}.")
    has_lists = types.is_struct(column.type)
    rows = column if has_lists else _flattened(column)
    parts = dict(zip((field.name for field in rows.type), rows.flatten(), strict=True))
    return {
        field: _ListColumn(name, _lengths(part if has_lists else column), _flattened(part) if has_lists else part)
        for field, name in names.items()
        for part in [parts[name]]
    }


def _damage(fields: dict[str, _ListColumn]) -> dict[int, str]:
    """Why rows cannot be in an ObjectTable. A row has the first reason that is found."""
    boxes, reasons = fields["boxes"], dict[int, str]()
    for name, counts, _ in fields.values():
        for row in np.flatnonzero((counts < 0) | (counts != boxes.counts)).tolist():
            text = f"has {counts[row]} entries, but `{boxes.name}` has {boxes.counts[row]}"
            reasons.setdefault(row, f"`{name}` {'is null' if counts[row] < 0 else text}")

    def add(field: str, bad: NDArray[np.bool_], text: str) -> None:
        name, counts, _ = fields[field]
        rows = np.repeat(np.arange(len(counts)), np.maximum(counts, 0))[bad]
        reasons.update({row: f"`{name}` {text}" for row in rows.tolist() if row not in reasons})

    add("boxes", _lengths(boxes.values) != 4, "of each object must be 4 numbers")
    if "labels" in fields:
        add("labels", fields["labels"].values.is_null().to_numpy(zero_copy_only=False), "of an object is null")
    if "keypoints" in fields:
        lengths = _amounts(fields["keypoints"].values)
        add("keypoints", lengths > 3 * MOST_KEYPOINTS, f"must have at most {MOST_KEYPOINTS} points for an object")
        wanted = _points(lengths)
        text = f"of each object must be {wanted} numbers: for each point x, y and visibility (0, 1 or 2)"
        add("keypoints", (lengths == -2) | ((lengths > 0) & (lengths != wanted)) | (wanted % 3 != 0), text)
    return reasons


def _values(fields: dict[str, _ListColumn]) -> dict[str, Any]:
    """The columns of an :class:`ObjectTable`, except labels."""
    name, _, values = fields["boxes"]
    columns: dict[str, Any] = {"boxes": corners(_floats(_flat(values)).reshape(-1, 4), name)}
    if "keypoints" in fields:
        values = fields["keypoints"].values
        lengths = _amounts(values)
        if wanted := _points(lengths):
            columns["keypoints"] = _floats(_flat(values)).reshape(-1, wanted // 3, 3)
            columns["pointed"] = np.flatnonzero(lengths > 0)
    if "crowd" in fields:
        columns["crowd"] = np.nan_to_num(_floats(fields["crowd"].values)) != 0
    if "area" in fields:
        columns["area"] = _floats(fields["area"].values)
    if "ids" in fields:
        columns["ids"] = _whole(fields["ids"].values)
    return columns


def _points(lengths: NDArray[np.int64]) -> int:
    """The most frequent length that is possible; 0 if no object has keypoints."""
    possible = lengths[(lengths > 0) & (lengths <= 3 * MOST_KEYPOINTS)]
    return int(np.bincount(possible).argmax()) if len(possible) else 0


def _is_list(kind: Any) -> bool:
    return str(kind).startswith(("list<", "large_list<", "fixed_size_list<"))


def _is_text(kind: Any) -> bool:
    return str(kind) in ("string", "large_string", "string_view")


def _lengths(values: Any) -> NDArray[np.int64]:
    """Number of entries of each list; -1 for a null."""
    if not _is_list(values.type):  # the type is null
        return np.full(len(values), -1)
    lengths = import_pyarrow().compute.list_value_length(values).cast("int64").fill_null(-1)
    return np.array(lengths.to_numpy(zero_copy_only=False))


def _amounts(values: Any) -> NDArray[np.int64]:
    """How many numbers the keypoints of each object have; -1 for a null; -2 if a point does not have 3 numbers."""
    lengths = _lengths(values)
    if _is_list(values.type) and _is_list(values.type.value_type):
        owner = np.repeat(np.arange(len(lengths)), np.maximum(lengths, 0))
        wrong = owner[_lengths(_flattened(values)) != 3]
        lengths = np.where(lengths > 0, 3 * lengths, lengths)
        lengths[wrong] = -2
    return lengths


def _flat(values: Any) -> Any:
    """The numbers in all nested lists, as one flat Arrow array."""
    while _is_list(values.type):
        values = _flattened(values)
    return values


def _flattened(values: Any) -> Any:
    return import_pyarrow().compute.list_flatten(values)


def _floats(values: Any) -> NDArray[np.float64]:
    """The values as float64. A null becomes NaN."""
    return np.array(values.cast("float64").to_numpy(zero_copy_only=False), dtype=np.float64)


def _whole(values: Any) -> NDArray[np.int64]:
    """The values as int64. A null becomes -1, and a uint64 above the range becomes negative."""
    return np.array(values.cast("int64", safe=False).fill_null(-1).to_numpy(zero_copy_only=False))
