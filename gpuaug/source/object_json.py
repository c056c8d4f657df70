"""Parses JSON with the objects of one image: a list of COCO's annotations, or one list per field."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuaug.source.classes import shortened
from gpuaug.source.files import LARGEST_TEXT
from gpuaug.source.objects import COLUMNS, array_of, as_arrays, check_points, find_faults

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


def corners(boxes: NDArray[np.float64], name: str) -> NDArray[np.float64]:
    """Boxes [n, 4] as (x1, y1, x2, y2). A field ``bbox`` holds (x, y, width, height), as in COCO."""
    if name == "bbox":
        boxes = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    return boxes


def parse(
    data: bytes,
    *,
    num_keypoints: int | None = None,
    classes: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Fields of a Target; ValueError if the JSON cannot be used. Without ``num_keypoints``, keypoints are ignored."""
    if len(data) > LARGEST_TEXT:
        raise ValueError(f"it has {len(data)} bytes, more than {LARGEST_TEXT}")
    try:
        value = json.loads(data)
        size = _size(value)
        columns, names = _columns(value)
        boxes = array_of(columns["boxes"], f"`{names['boxes']}`", np.float64, (4,))
        columns["boxes"] = corners(boxes.astype(np.float64), names["boxes"])
        if "labels" in columns:
            columns["labels"] = _labels(columns["labels"], names["labels"], classes)
        for field, unknown in (("crowd", 0), ("area", np.nan), ("ids", -1)):
            if field in columns:
                columns[field] = [unknown if value is None else value for value in columns[field]]
        points = columns.pop("keypoints", [None] * len(boxes))
        if num_keypoints is not None:
            columns["keypoints"] = _keypoints(points, num_keypoints)
        quoted = {field: f"`{name}`" for field, name in names.items()}
        arrays = as_arrays(columns, num_keypoints=num_keypoints, names=quoted)
        with np.errstate(over="ignore"):  # `find_faults` refuses infinite coordinates
            target: dict[str, Any] = {name: arrays[name].astype(kind) for name, kind, _, _ in COLUMNS if name in arrays}
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    most = None if classes is None else len(classes)
    if found := find_faults(np.zeros(len(boxes), dtype=np.int64), target, num_classes=most):
        raise ValueError(found[0])
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


def _columns(value: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Columns as lists, and their names in the JSON. The keys of both dicts are fields of a Target."""
    inner = value
    if isinstance(value, dict):
        inner = next((value[name] for name in ("objects", "annotations") if name in value), value)
    if isinstance(inner, list):
        for k, row in enumerate(inner):
            if not isinstance(row, dict):
                raise ValueError(f"object {k} must have named fields, such as bbox. Found: {row!r:.100}")
        names = {"boxes": "bbox", **column_names({name for row in inner for name in row})}
        return {field: [row.get(name) for row in inner] for field, name in names.items()}, names
    if not isinstance(inner, dict):
        raise ValueError(f"it must be a list of objects, or have `objects` or `annotations`. Found: {inner!r:.100}")
    names = column_names(inner)
    if "boxes" not in names:
        raise ValueError(f"it must have a field objects, annotations, bbox or boxes. Found: {shortened([*inner])}")
    columns = {field: inner[name] for field, name in names.items()}
    for field, column in columns.items():
        if not isinstance(column, list):
            raise ValueError(f"`{names[field]}` must be a list with one entry per object. Found: {column!r:.100}")
    return columns, names


def _labels(values: list[Any], name: str, classes: Mapping[str, int] | None) -> list[Any]:
    if values and all(isinstance(value, str) for value in values):
        if classes is None:
            raise ValueError(f"`{name}` is {values[0]!r:.100}: set `source.classes` to give class names their numbers")
        if unknown := [value for value in values if value not in classes]:
            raise ValueError(f"`{name}` is {unknown[0]!r:.100}, which `source.classes` does not have")
        return [classes[value] for value in values]
    return values


def _keypoints(values: list[Any], count: int) -> NDArray[Any]:
    """Keypoints [n, K, 3] of n objects. An object without keypoints has zeros."""
    if reason := check_points(len(values), count):
        raise ValueError(reason)
    try:
        points = [np.zeros((count, 3)) if value is None else np.reshape(value, (count, 3)) for value in values]
        return np.array(points).reshape(-1, count, 3)
    except ValueError:
        wanted = f"`keypoints` of each object must be {3 * count} numbers"
        raise ValueError(f"{wanted}. Found: {values!r:.100}") from None
