"""Reads COCO's JSON files into arrays of images, categories and objects, in the order of the image ids."""

from __future__ import annotations

import json
import logging
import os
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuaug.errors import SourceError
from gpuaug.source.object_json import corners
from gpuaug.source.paths import is_safe, redact

log = logging.getLogger("gpuaug")

LARGE_JSON = 100_000_000  # bytes; for larger files, Python's json needs seconds and gigabytes of memory
BOM = b"\xef\xbb\xbf"

Int64 = NDArray[np.int64]


class Field(NamedTuple):
    """One field of the JSON objects in a list, such as ``width`` of the images."""

    types: tuple[type, ...]  # allowed types of a value that Python's json returned
    kind: Any  # type that msgspec requires
    default: Any = ...  # value of an absent field; Ellipsis: the field is required


WHOLE, NUMBER, TEXT = Field((int,), int), Field((int, float), float), Field((str,), str)
BOX = Field((list, tuple), tuple[float, float, float, float])
OPTIONAL_NUMBER = Field((int, float, type(None)), float | None, None)
CROWD = Field((int, bool), int | bool, 0)
LATER = Field((object,), None, None)  # msgspec keeps the JSON text until the value is needed

IMAGE = {"id": WHOLE, "file_name": TEXT, "width": NUMBER, "height": NUMBER}
CATEGORY = {"id": WHOLE, "name": TEXT, "keypoints": Field((list, tuple), list[str], ()), "skeleton": LATER}
SEGMENT = {"id": WHOLE, "category_id": WHOLE, "bbox": BOX, "area": OPTIONAL_NUMBER, "iscrowd": CROWD}
OBJECT = {
    **SEGMENT,
    "id": Field((int, type(None)), int | None, None),
    "image_id": WHOLE,
    "keypoints": LATER,
}
PANOPTIC = {"image_id": WHOLE, "file_name": TEXT, "segments_info": Field((list,), None)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotations:
    """Content of a file of annotations: N images and M objects."""

    names: list[bytes]  # paths of the images, relative to their folder
    image_ids: Int64  # [N], ascending
    sizes: NDArray[np.int32]  # [N, 2], (height, width)
    counts: Int64  # [N], number of objects in each image
    columns: dict[str, Any]  # columns of an ObjectTable, [M, ...] or None; `labels` are positions in `categories`
    categories: list[str]  # names, by ascending id
    category_ids: Int64
    points: list[str]  # names of the K keypoints
    skeleton: tuple[tuple[int, int], ...]  # pairs of keypoint indices
    outlines: Iterable[Any]  # value of `segmentation` of each object; can be read only once
    masks: list[bytes] | None  # path of each image's panoptic mask; b"": no mask; None: not panoptic


def parse(data: bytes | bytearray, *, masks: str | None, place: str) -> Annotations:
    """Parse COCO's JSON of instances, person_keypoints or panoptic segments; SourceError if it is not valid.

    ``masks``: masks to read (``instances``, ``panoptic`` or None). ``place``: path for error messages.
    """
    try:
        return _annotations(data, masks)
    except RecursionError as error:
        raise refused(place, "the lists in the file are nested too deeply") from error
    except (ValueError, OverflowError, UnicodeError) as error:
        raise refused(place, f"{error}{_found(data, str(error))}") from error


def _found(data: bytes | bytearray, message: str) -> str:
    """The bytes that msgspec's ``message`` is about; "" if it is not about the JSON's syntax."""
    match = re.search(r"\(byte (\d+)\)$", message)
    if match is None and message != "Input data was truncated":
        return ""
    at = len(data) if match is None else int(match[1]) + len(BOM) * data.startswith(BOM)
    return f". Found there: {bytes(data[max(0, at - 20) : at + 20])!r}"


def refused(place: str, reason: str) -> SourceError:
    """The error for a file of annotations that cannot be used."""
    return SourceError(
        f"the annotations {redact(place)!r} cannot be used: {reason:.400}. Correct the file, or name another one in "
        "`source.annotations`."
    )


def _annotations(data: bytes | bytearray, kind: str | None) -> Annotations:
    panoptic = kind == "panoptic"
    fields = PANOPTIC if panoptic else OBJECT if kind is None else {**OBJECT, "segmentation": LATER}
    document, later = _document(data, fields)
    categories, categories_of = _by_id(document("categories", CATEGORY), "categories")
    images, images_of = _by_id(document("images", IMAGE), "images")
    if not len(images_of) or not len(categories_of):
        raise ValueError(f"the file has {len(images_of)} images and {len(categories_of)} categories")
    if len(set(categories["name"])) < len(categories_of):
        twice = next(name for i, name in enumerate(categories["name"]) if name in categories["name"][:i])
        raise ValueError(f"two categories have the same name. Found twice: {twice!r:.100}")
    names = [_path(name, "images", int(i)) for name, i in zip(images["file_name"], images_of, strict=True)]
    rows, masks = _segments(document, images_of) if panoptic else (document("annotations", fields), None)
    sizes = np.array([_side(images["height"], images_of), _side(images["width"], images_of)], dtype=np.int32).T
    owners = _find(rows["image_id"], images_of, "image_id", "images")
    order = np.argsort(owners, kind="stable")
    with np.errstate(over="ignore"):  # no warning: an infinite number makes a bad sample
        columns = _objects(rows, owners, panoptic)
    columns["labels"] = _find(rows["category_id"], categories_of, "category_id", "categories")
    columns = {name: None if values is None else values[order] for name, values in columns.items()}
    columns["keypoints"], points = (None, []) if panoptic else _keypoints(rows["keypoints"], later, categories, order)
    outlines = rows.get("segmentation", [])
    return Annotations(
        names=names,
        image_ids=images_of,
        sizes=sizes,
        counts=np.bincount(owners, minlength=len(images_of)),
        columns=columns,
        categories=categories["name"],
        category_ids=categories_of,
        points=points,
        skeleton=_skeleton(map(later, categories["skeleton"]), len(points)),
        outlines=[] if not outlines else (later(outlines[i]) for i in order.tolist()),
        masks=masks,
    )


# -- columns: a list of values for each field


def _document(
    data: bytes | bytearray, fields: Mapping[str, Field]
) -> tuple[Callable[..., dict[str, list[Any]]], Callable[..., Any]]:
    """Return two functions: one returns the columns of a list such as ``images``, the other parses `LATER` values."""
    text = memoryview(data)[len(BOM) if data.startswith(BOM) else 0 :]
    try:
        import msgspec
    except ImportError:
        if len(text) > LARGE_JSON:
            log.info("source: parsing %d MB of JSON with Python's json. msgspec is faster and needs less memory: "
                     "pip install gpuaug[coco]", len(text) // 10**6)  # fmt: skip
        content = json.loads(str(text, "utf-8"), parse_constant=_no_constant)
        if not isinstance(content, dict):
            raise ValueError("the file does not hold a JSON object") from None
        return partial(_columns, content), lambda value: value
    if "segments_info" in fields:
        fields = {**fields, "segments_info": Field((list,), list[_struct("segment", SEGMENT)])}  # type: ignore[misc]
    lists = {"images": IMAGE, "categories": CATEGORY, "annotations": fields}
    kinds = [(name, list[_struct(name, fields)]) for name, fields in lists.items()]  # type: ignore[misc]
    parsed = msgspec.json.decode(text, type=msgspec.defstruct("file", kinds))
    return partial(_columns, msgspec.structs.asdict(parsed)), msgspec.json.decode


def _struct(name: str, fields: Mapping[str, Field]) -> Any:
    import msgspec

    kinds: list[Any] = []
    for key, field in fields.items():
        if field is LATER:
            kinds.append((key, msgspec.Raw, msgspec.Raw(b"null")))
        else:
            kinds.append((key, field.kind) if field.default is ... else (key, field.kind, field.default))
    return msgspec.defstruct(name, kinds, gc=False, kw_only=True)


def _columns(
    content: Mapping[str, Any], what: str, fields: Mapping[str, Field], rows: Any = None
) -> dict[str, list[Any]]:
    """The values of each field in ``rows``, a list of dicts or structs; by default the file's list ``what``."""
    rows = content.get(what) if rows is None else rows
    kinds = set(map(type, rows)) if isinstance(rows, list) else {None}
    are_structs = len(kinds) == 1 and hasattr(next(iter(kinds)), "__struct_fields__")
    if not are_structs and not kinds <= {dict}:
        raise ValueError(f"`{what}` must be a list of objects")
    columns = {}
    for key, field in fields.items():
        if are_structs:
            columns[key] = list(map(attrgetter(key), rows))  # msgspec has checked the types
            continue
        values = columns[key] = [row.get(key, field.default) for row in rows]
        if object not in field.types and not set(map(type, values)) <= set(field.types):
            at = next(i for i, value in enumerate(values) if type(value) not in field.types)
            found = "nothing" if values[at] is ... else type(values[at]).__name__
            wanted = " or ".join(kind.__name__ for kind in field.types[:2])
            raise ValueError(f"`{what}[{at}].{key}` must be {wanted}. Found: {found}")
    return columns


def _no_constant(text: str) -> None:
    raise ValueError(f"the file has {text}, which is not JSON")


# -- records


def _by_id(columns: dict[str, list[Any]], what: str) -> tuple[dict[str, list[Any]], Int64]:
    """The rows sorted by id, and the ids."""
    ids = _ids(columns["id"], what)
    order = np.argsort(ids, kind="stable")
    _unique(ids, what)
    places = order.tolist()
    return {key: [values[i] for i in places] for key, values in columns.items()}, ids[order]


def _ids(values: Sequence[Any], what: str, low: int = 0, high: int = 2**63 - 1) -> Int64:
    if values and not low <= min(values) <= max(values) <= high:
        at = next(i for i, value in enumerate(values) if not low <= value <= high)
        raise ValueError(f"ids must be {low} .. {high}, but the id of record number {at} in `{what}` is not")
    return np.array(values, dtype=np.int64)


def _unique(ids: Int64, what: str, groups: Int64 | None = None) -> None:
    """Raise ValueError if an id occurs twice (with ``groups``: twice in one group)."""
    order = np.argsort(ids, kind="stable") if groups is None else np.lexsort((ids, groups))
    same = ids[order][1:] == ids[order][:-1]
    if groups is not None:
        same &= groups[order][1:] == groups[order][:-1]
    if same.any():
        raise ValueError(f"ids in `{what}` must differ. Found twice: {ids[order][int(same.argmax())]}")


def _find(values: Sequence[int], known: Int64, field: str, what: str) -> Int64:
    """The position of each value in the ascending ids ``known``."""
    numbers = _ids(values, f"annotations.{field}")
    at = np.minimum(np.searchsorted(known, numbers), len(known) - 1)
    if (wrong := known[at] != numbers).any():
        first = int(wrong.argmax())
        raise ValueError(f"`{field}` of object {first} is {numbers[first]}, but `{what}` has no such id")
    return at


def _path(name: str, what: str, number: int) -> bytes:
    if not is_safe(name) or name.endswith("/"):
        raise ValueError(
            f"`file_name` must be relative and stay in its folder. Found in `{what}`, id {number}: {name!r:.200}"
        )
    return os.fsencode(name)


def _side(values: Sequence[Any], ids: Int64) -> Int64:
    sides = np.array(values, dtype=np.float64)
    wrong = ~((sides >= 1) & (sides < 2**31) & (sides == np.floor(sides)))
    if wrong.any():
        first = int(wrong.argmax())
        raise ValueError(
            f"`width` and `height` must be whole numbers >= 1. Found in `images`, id {ids[first]}: {sides[first]:g}"
        )
    return sides.astype(np.int64)


def _segments(document: Callable[..., Any], images: Int64) -> tuple[dict[str, list[Any]], list[bytes]]:
    """The columns of all segments, and the path of each image's mask."""
    rows = document("annotations", PANOPTIC)
    owners = _find(rows["image_id"], images, "image_id", "images")
    _unique(images[owners], "annotations.image_id")
    masks = [b""] * len(images)
    for name, owner in zip(rows["file_name"], owners.tolist(), strict=True):
        masks[owner] = _path(name, "annotations", int(images[owner]))
    columns = document("segments_info", SEGMENT, list(chain.from_iterable(rows["segments_info"])))
    counts = list(map(len, rows["segments_info"]))
    columns["image_id"] = np.repeat(images[owners], counts).tolist()
    return columns, masks


def _objects(rows: Mapping[str, list[Any]], owners: Int64, panoptic: bool) -> dict[str, Any]:
    """The columns of all objects as arrays. ``owners``: for each object the position of its image."""
    boxes, ids, area = rows["bbox"], rows["id"], rows["area"]
    if not set(map(len, boxes)) <= {4} or not set(map(type, chain.from_iterable(boxes))) <= {int, float}:
        raise ValueError("`bbox` of every object must be [x, y, width, height]")
    xywh = np.fromiter(chain.from_iterable(boxes), dtype=np.float64, count=4 * len(boxes)).reshape(-1, 4)
    columns: dict[str, Any] = {
        "boxes": corners(xywh, "bbox", "xywh").astype(np.float32),
        "crowd": np.array(rows["iscrowd"], dtype=np.int64) != 0, "area": None, "ids": None,
    }  # fmt: skip
    missing = ids.count(None)
    if 0 < missing < len(ids):
        raise ValueError(f"{missing} of {len(ids)} objects have no `id`")
    if not missing:
        what = "segments_info" if panoptic else "annotations"
        columns["ids"] = _ids(ids, what, 1, 2**24 - 1) if panoptic else _ids(ids, what)
        _unique(columns["ids"], what, owners if panoptic else None)  # unique per image if panoptic
    if area.count(None) < len(area):
        known = np.array([np.nan if value is None else value for value in area], dtype=np.float64)
        columns["area"] = np.where(np.isnan(known), xywh[:, 2] * xywh[:, 3], known).astype(np.float32)
    return columns


def _keypoints(
    values: list[Any], later: Callable[[Any], Any], categories: dict[str, list[Any]], order: Int64
) -> tuple[NDArray[np.float32] | None, list[str]]:
    """The keypoints of all objects in the given order, [M, K, 3], and the K names."""
    lists = [list(names) for names in categories["keypoints"] if names]
    if not lists:
        return None, []
    if lists.count(lists[0]) < len(lists):
        raise ValueError("all categories that have `keypoints` must have the same `keypoints`")
    if set(map(type, lists[0])) != {str}:
        raise ValueError("`categories.keypoints` must be names of points")
    count = 3 * len(lists[0])
    points = np.zeros((len(values), count), dtype=np.float32)
    for row, at in enumerate(order.tolist()):
        numbers = later(values[at])
        if numbers in (None, []):
            continue
        if not isinstance(numbers, list) or len(numbers) != count or not set(map(type, numbers)) <= {int, float}:
            raise ValueError(f"`keypoints` of object {at} must be {count} numbers: x, y and visibility of each point")
        with np.errstate(over="ignore"):  # no warning: an infinite point makes a bad sample
            points[row] = array("d", numbers)
    return points.reshape(len(values), len(lists[0]), 3), lists[0]


def _skeleton(lists: Iterable[Any], count: int) -> tuple[tuple[int, int], ...]:
    """The first skeleton of the categories; () and no error if it is invalid, because only drawings use skeletons."""
    pairs: Any = next((value for value in lists if value), [])
    known = range(1, count + 1)
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is type(pair[1]) is int and set(pair) <= {*known}
        for pair in pairs
    ):
        return ()
    return tuple((a - 1, b - 1) for a, b in pairs)


def mirror_images(names: Sequence[str]) -> tuple[int, ...] | None:
    """For each name, the position of the name with left and right swapped; None if the names do not form pairs."""
    swap = {"left": "right", "right": "left", "Left": "Right", "Right": "Left", "LEFT": "RIGHT", "RIGHT": "LEFT"}
    places = {name: i for i, name in enumerate(names)}
    mirrored = [re.sub("|".join(swap), lambda match: swap[match[0]], name) for name in names]
    if len(places) < len(names) or mirrored == list(names) or any(name not in places for name in mirrored):
        return None
    return tuple(places[name] for name in mirrored)
