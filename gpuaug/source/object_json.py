"""Parses JSON with the objects of one image: a list of COCO's annotations, or one list per field."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gpuaug.source.classes import shortened
from gpuaug.source.files import LARGEST_TEXT
from gpuaug.source.objects import check_points, find_faults

BoxFormat = Literal["xywh", "xyxy"]

# possible names of each field of a Target; the first of them that exists is used
NAMES: dict[str, tuple[str, ...]] = {
    "boxes": ("bbox", "boxes"),
    "labels": ("category_id", "category", "label", "labels"),
    "keypoints": ("keypoints",),
    "crowd": ("iscrowd", "crowd"),
    "area": ("area",),
    "ids": ("id", "ids"),
}


def column_names(given: Collection[str]) -> dict[str, str]:
    """Map fields of a Target to their names in ``given``. Fields without such a name are left out."""
    present = {field: [name for name in names if name in given] for field, names in NAMES.items()}
    return {field: names[0] for field, names in present.items() if names}


def corners(boxes: NDArray[np.float64], name: str, box_format: BoxFormat) -> NDArray[np.float64]:
    """Boxes [n, 4] as (x1, y1, x2, y2). Only a field named ``bbox`` is converted."""
    if name == "bbox" and box_format == "xywh":
        boxes = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    return boxes


def parse(
    data: bytes,
    *,
    num_keypoints: int | None = None,
    classes: Mapping[str, int] | None = None,
    box_format: BoxFormat = "xywh",
) -> dict[str, Any]:
    """Fields of a Target; ValueError if the JSON cannot be used. Without ``num_keypoints``, keypoints are ignored."""
    if len(data) > LARGEST_TEXT:
        raise ValueError(f"it has {len(data)} bytes, more than {LARGEST_TEXT}")
    try:
        value = json.loads(data)
        size = _size(value)
        columns, names = _columns(value)
        count = len(columns["boxes"])
        with np.errstate(over="ignore"):  # no warning: an infinite number makes a bad sample
            boxes = corners(_numbers(columns["boxes"], names["boxes"], (count, 4)), names["boxes"], box_format)
            target: dict[str, Any] = {"boxes": boxes.astype(np.float32)}
            if "labels" in columns:
                target["labels"] = _labels(columns["labels"], names["labels"], classes)
            if num_keypoints is not None:
                target["keypoints"] = _keypoints(columns.get("keypoints", [None] * count), num_keypoints)
            if "area" in columns:
                area = [np.nan if value is None else value for value in columns["area"]]
                target["area"] = _numbers(area, names["area"], (count,)).astype(np.float32)
        if "crowd" in columns:
            if not all(value in (None, 0, 1) for value in columns["crowd"]):
                raise ValueError(f"`{names['crowd']}` must be 0 or 1")
            target["crowd"] = np.array([bool(value) for value in columns["crowd"]])
        if "ids" in columns:
            known = [k for k, value in enumerate(columns["ids"]) if value is not None]
            target["ids"] = np.full(count, -1, dtype=np.int64)
            target["ids"][known] = _whole([columns["ids"][k] for k in known], names["ids"])
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    faults = find_faults(np.zeros(count, dtype=np.int64), target, num_classes=None if classes is None else len(classes))
    if faults:
        raise ValueError(faults[0])
    return target if size is None else {**target, "size": size}


def _size(value: Any) -> tuple[int, int] | None:
    """The image's (height, width), from the JSON or its field ``image``; None if not known."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("image"), dict) and not ("width" in value and "height" in value):
        value = value["image"]
    height, width = value.get("height"), value.get("width")
    if height is None or width is None:
        return None
    if type(height) is not int or type(width) is not int or not (0 < height < 2**31 and 0 < width < 2**31):
        raise ValueError(f"`height` and `width` must be whole numbers above 0. Found: {height!r:.50}, {width!r:.50}")
    return height, width


def _columns(value: Any) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Columns of equal length, and their names in the JSON. The keys of both dicts are fields of a Target."""
    inner = value
    if isinstance(value, dict):
        inner = next((value[name] for name in ("objects", "annotations") if name in value), value)
    if isinstance(inner, list):
        return _from_rows(inner)
    if not isinstance(inner, dict):
        raise ValueError(f"it must be a list of objects, or have `objects` or `annotations`. Found: {inner!r:.100}")
    names = column_names(inner)
    if "boxes" not in names:
        raise ValueError(f"it must have a field objects, annotations, bbox or boxes. Found: {shortened([*inner])}")
    columns = {field: inner[name] for field, name in names.items()}
    for field, column in columns.items():
        if not isinstance(column, list):
            raise ValueError(f"`{names[field]}` must be a list with one entry per object. Found: {column!r:.100}")
        if len(column) != len(columns["boxes"]):
            raise ValueError(
                f"`{names[field]}` has {len(column)} entries, but `{names['boxes']}` has {len(columns['boxes'])}"
            )
    return columns, names


def _from_rows(rows: list[Any]) -> tuple[dict[str, list[Any]], dict[str, str]]:
    for k, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"object {k} must have named fields, such as bbox. Found: {row!r:.100}")
    names = {"boxes": "bbox", **column_names({name for row in rows for name in row})}
    columns = {field: [row.get(name) for row in rows] for field, name in names.items()}
    for field in ("boxes", "labels"):  # `labels` must be in all objects or in none
        if field in columns and None in columns[field]:
            raise ValueError(f"object {columns[field].index(None)} has no `{names[field]}`")
    return columns, names


def _numbers(values: list[Any], name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    try:
        array = np.asarray(values) if values else np.zeros(shape)
    except ValueError:  # the lists differ in length
        array = np.zeros(0, dtype=object)
    if array.dtype.kind not in "iuf" or array.shape != shape:
        wanted = "a number" if len(shape) == 1 else f"{shape[1]} numbers"
        raise ValueError(f"`{name}` of each object must be {wanted}. Found: {values!r:.100}")
    return array.astype(np.float64)


def _whole(values: list[Any], name: str) -> NDArray[np.int64]:
    if not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise ValueError(f"`{name}` of each object must be a whole number >= 0. Found: {values!r:.100}")
    return np.array(values, dtype=np.int64)


def _labels(values: list[Any], name: str, classes: Mapping[str, int] | None) -> NDArray[np.int64]:
    if values and all(isinstance(value, str) for value in values):
        if classes is None:
            raise ValueError(f"`{name}` is {values[0]!r:.100}: set `source.classes` to give class names their numbers")
        if unknown := [value for value in values if value not in classes]:
            raise ValueError(f"`{name}` is {unknown[0]!r:.100}, which `source.classes` does not have")
        return np.array([classes[value] for value in values], dtype=np.int64)
    return _whole(values, name)


def _keypoints(values: list[Any], count: int) -> NDArray[np.float32]:
    """Keypoints of n objects, float32 [n, K, 3]. An object without keypoints has zeros."""
    if reason := check_points(len(values), count):
        raise ValueError(reason)
    points = np.zeros((len(values), count, 3), dtype=np.float32)
    for k, value in enumerate(values):
        if value is None:
            continue
        flat = [*value] if isinstance(value, list) else []
        flat = [x for point in flat for x in point] if all(isinstance(point, list) for point in flat) else flat
        points[k] = _numbers([flat], "keypoints", (1, 3 * count)).reshape(count, 3)
    return points
