"""Reads COCO's JSON files: images, categories, and one table of objects in the order of the image ids."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpuaug.errors import SourceError
from gpuaug.source.classes import numbers_of
from gpuaug.source.object_json import corners
from gpuaug.source.objects import MOST_KEYPOINTS, ObjectTable
from gpuaug.source.paths import is_safe, redact
from gpuaug.source.segmentations import Segmentations

log = logging.getLogger("gpuaug")

BOM = b"\xef\xbb\xbf"
# Python's json writes NaN and Infinity, which are not JSON; strings are matched first, because they may hold such words
STRING_OR_NAN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|-?(?:NaN|Infinity)', re.DOTALL)
NULL = msgspec.Raw(b"null")

Int64 = NDArray[np.int64]
Id = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Box = tuple[float, float, float, float]
_Damaged = list[tuple[dict[str, Any], str]]  # rows of a list: their fields, and what is wrong


class _Image(msgspec.Struct, gc=False):
    id: Id
    file_name: str
    width: float = math.nan
    height: float = math.nan


class _Category(msgspec.Struct, gc=False):
    id: Id
    name: str
    keypoints: list[str] = []


class _Object(msgspec.Struct, gc=False, kw_only=True):
    id: Id | None = None
    image_id: Id
    category_id: Id
    bbox: Box
    area: float | None = None
    iscrowd: Id | bool = 0
    keypoints: msgspec.Raw = NULL  # stays text until its value is needed


class _Outlined(_Object, gc=False, kw_only=True):
    segmentation: msgspec.Raw = NULL


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotations:
    """Content of a file of annotations: N samples and their objects."""

    names: list[bytes]  # the key of each sample
    files: list[bytes]  # path of each sample's image, relative to the images' folder
    image_ids: Int64  # [N], ascending
    objects: ObjectTable
    categories: list[str]  # names, by ascending id
    category_ids: Int64
    points: list[str]  # names of the K keypoints
    outlines: Segmentations | None


def parse(
    data: bytes,
    *,
    place: str,
    masks: str | None = None,
    empty: str = "keep",
    unit: str = "image",
    classes: Mapping[str, int] | None = None,
) -> Annotations:
    """Parse COCO's JSON of instances or person_keypoints.

    A damaged image or object is a fault of its sample. SourceError if the file has no valid lists of images,
    categories and annotations. ``place``: path of the file, for messages. The other arguments are those of
    :class:`CocoSource`.
    """
    try:
        return _annotations(data, redact(place), masks, empty, unit, classes)
    except RecursionError as error:
        raise _refused(place, "the lists in the file are nested too deeply") from error
    except SourceError:
        raise
    except (ValueError, OverflowError) as error:
        raise _refused(place, str(error)) from error


def _refused(place: str, reason: str) -> SourceError:
    return SourceError(
        f"the annotations {redact(place)!r} cannot be used: {reason:.400}. Correct the file, or name another one in "
        "`source.annotations`."
    )


def _annotations(
    data: bytes, file: str, masks: str | None, empty: str, unit: str, classes: Mapping[str, int] | None
) -> Annotations:
    kind = _Object if masks is None else _Outlined
    lists, damaged = _rows(data, {"images": _Image, "categories": _Category, "annotations": kind})
    categories = _categories(lists["categories"])
    images, faults = _images(lists["images"], damaged, file)
    if not images or not categories:
        raise ValueError(f"the file has {len(images)} images and {len(categories)} categories")
    image_ids = _column(images, "id")
    rows: list[Any] = lists["annotations"]
    numbers = _column(rows, "image_id")
    sample = _positions(numbers, image_ids)
    _warn_left_out(numbers[sample < 0], damaged["annotations"], image_ids, file)
    order = np.argsort(sample, kind="stable")[int((sample < 0).sum()) :]  # without the annotations left out
    columns: dict[str, Any] = {name: None if x is None else x[order] for name, x in _columns(rows).items()}
    sample = sample[order]
    counts = np.bincount(sample, minlength=len(images))
    reasons = {i: faults[image.id] for i, image in enumerate(images) if image.id in faults}
    kept = np.arange(len(images))
    if empty == "drop":
        kept = np.flatnonzero((counts > 0) | np.isin(kept, list(reasons)))
        if not len(kept):
            raise SourceError(f"no image in {file!r} has objects, and `source.empty` is drop.")
        reasons = {int(np.searchsorted(kept, i)): reason for i, reason in reasons.items()}
        images, counts, sample = [images[i] for i in kept.tolist()], counts[kept], np.searchsorted(kept, sample)

    bad: dict[int, str] = {}  # by object

    def fault(k: int, reason: str) -> None:
        number = rows[order[k]].id
        name = f"object {k - np.searchsorted(sample, sample[k])}" if number is None else f"annotation {number}"
        bad.setdefault(k, f"{name} in {file!r} {reason}")

    columns["labels"] = _labels(columns["labels"], categories, classes, file, fault)
    points, columns["keypoints"], columns["pointed"] = _keypoints(
        (rows[i].keypoints for i in order.tolist()), categories, fault
    )
    if (ids := columns["ids"]) is not None:
        repeated = (ids >= 0) & np.isin(ids, _twice(ids.tolist()))
        for k in np.flatnonzero(repeated).tolist():
            fault(k, "has an id that another object has too")
    names = files = [os.fsencode(image.file_name) for image in images]
    if unit == "object":
        taken = _persons(columns, bad)
        if not len(taken):
            raise SourceError(f"no object in {file!r} has a labelled keypoint, and `source.unit` is object.")
        owner, known = sample[taken], ids is not None and (ids >= 0).all()
        if lost := len(set(reasons) - set(owner.tolist())):
            log.warning("source: %d damaged images in %r are left out: no object of theirs is known", lost, file)
        numbers = ids[taken] if known else taken - np.searchsorted(sample, owner)
        bad = {n: reason for n, k in enumerate(taken.tolist()) if (reason := bad.get(k))}
        reasons = {n: reason for n, i in enumerate(owner.tolist()) if (reason := reasons.get(i))}
        columns = _rows_of(columns, taken)
        images, kept, order, files = [images[i] for i in owner], kept[owner], order[taken], [files[i] for i in owner]
        names = [b"%b/%d" % pair for pair in zip(files, numbers.tolist(), strict=True)]
        counts, sample = np.ones_like(taken), np.arange(len(taken))
    for k in sorted(bad):
        reasons.setdefault(int(sample[k]), bad[k])
    columns["sizes"] = np.array([(image.height, image.width) for image in images])
    outlines = None if masks is None else Segmentations(rows[i].segmentation for i in order.tolist())
    return Annotations(
        names=names,
        files=files,
        image_ids=image_ids[kept],
        objects=ObjectTable(counts, **columns, reasons=reasons, file=file),
        categories=[category.name for category in categories],
        category_ids=_column(categories, "id"),
        points=points,
        outlines=outlines,
    )


# -- rows of the file


def _rows(data: bytes, kinds: Mapping[str, type]) -> tuple[dict[str, list[Any]], dict[str, _Damaged]]:
    """The rows of each list, and the damaged rows."""
    text = memoryview(data)[len(BOM) if data.startswith(BOM) else 0 :]
    damaged: dict[str, _Damaged] = {name: [] for name in kinds}
    try:
        return msgspec.structs.asdict(_decode(text, [(name, list[kind]) for name, kind in kinds.items()])), damaged  # type: ignore[valid-type]
    except msgspec.ValidationError:  # a row is damaged
        raw = _decode(text, [(name, list[msgspec.Raw]) for name in kinds])
    lists: dict[str, list[Any]] = {name: [] for name in kinds}
    for name, kind in kinds.items():
        decoder: Any = msgspec.json.Decoder(kind)
        for row in getattr(raw, name):
            try:
                lists[name].append(decoder.decode(row))
            except msgspec.ValidationError as error:
                fields = json.loads(bytes(row))
                damaged[name].append((fields if isinstance(fields, dict) else {}, str(error)))
    for _, wrong in damaged["categories"]:
        raise ValueError(f"`categories`: {wrong}")
    return lists, damaged


def _decode(text: memoryview, fields: list[tuple[str, Any]]) -> Any:
    """Decode JSON to a struct with these fields. NaN and Infinity are read as null."""
    decoder: Any = msgspec.json.Decoder(msgspec.defstruct("file", fields))
    try:
        return decoder.decode(text)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        changed = STRING_OR_NAN.sub(lambda match: match[0] if match[0][:1] == b'"' else b"null", text)
        if changed == text:
            raise
        log.warning("source: the annotations have NaN or Infinity, which JSON does not know. They are read as null")
        return decoder.decode(changed)


def _categories(rows: list[_Category]) -> list[_Category]:
    """The categories by ascending id."""
    for what in ("id", "name"):
        if twice := _twice(map(attrgetter(what), rows)):
            raise ValueError(f"two categories have the same {what}. Found twice: {twice[0]!r:.100}")
    return sorted(rows, key=attrgetter("id"))


def _images(rows: list[_Image], damaged: Mapping[str, _Damaged], file: str) -> tuple[list[_Image], dict[int, str]]:
    """All images by ascending id, and faults by image id. The sides of a damaged image become 0."""
    faults: dict[int, str] = {}
    for row, error in damaged["images"]:
        number, path = row.get("id"), row.get("file_name")
        if type(number) is not int or not -(2**63) <= number < 2**63 or not isinstance(path, str):
            raise ValueError(f"`images`: {error}. Each image needs `id` and `file_name`")
        rows.append(_Image(number, path))
        faults[number] = f"image {number} in {file!r}: {error}"
    for image in rows:
        if not is_safe(image.file_name) or image.file_name.endswith("/"):
            found = f"Found in `images`, id {image.id}: {image.file_name!r:.200}"
            raise ValueError(f"`file_name` must be relative and stay in its folder. {found}")
        width, height = image.width, image.height
        if not (1 <= width < 2**31 and 1 <= height < 2**31 and width % 1 == height % 1 == 0):
            found = f"{width:g} x {height:g} (width x height)"
            reason = f"`width` and `height` of image {image.id} in {file!r} must be whole numbers >= 1. Found: {found}"
            faults.setdefault(image.id, reason)
            image.width = image.height = 0
    for number in _twice([image.id for image in rows]):
        faults[number] = f"two images in {file!r} have the id {number}"
    for row, error in damaged["annotations"]:
        if type(number := row.get("image_id")) is int:
            faults.setdefault(number, f"annotation {row.get('id')!r:.50} in {file!r}: {error}")
    return sorted(rows, key=lambda image: image.id), faults


def _warn_left_out(unknown: Int64, damaged: _Damaged, images: Int64, file: str) -> None:
    """Log how many annotations belong to no image of the file."""
    known = set(images.tolist())
    numbers = [row.get("image_id") for row, _ in damaged]
    lost = [*unknown.tolist(), *(number for number in numbers if type(number) is not int or number not in known)]
    if lost:
        log.warning(
            "source: %d annotations in %r are left out, because their `image_id` is not in `images`; the first: %.100r",
            len(lost), file, lost[0],
        )  # fmt: skip


def _twice(values: Iterable[Any]) -> list[Any]:
    """The values that occur more than once."""
    return [value for value, count in Counter(values).items() if count > 1]


def _positions(numbers: Int64, known: Int64) -> Int64:
    """The position of each number in the ascending ``known``; -1 for a number that it lacks."""
    at = np.minimum(np.searchsorted(known, numbers), len(known) - 1)
    return np.where(known[at] == numbers, at, -1)


# -- columns of the objects


def _persons(columns: Mapping[str, Any], bad: Mapping[int, str]) -> Int64:
    """The objects that are samples of their own: with a labelled keypoint and no crowd, or damaged."""
    taken = np.zeros(len(columns["labels"]), dtype=bool)
    if (points := columns["keypoints"]) is not None:
        taken[columns["pointed"]] = (points[..., 2] != 0).any(axis=1)
    taken &= ~columns["crowd"]
    taken[list(bad)] = True
    return np.flatnonzero(taken)


def _rows_of(columns: Mapping[str, Any], taken: Int64) -> dict[str, Any]:
    """The columns of some objects."""
    made = {name: None if x is None or name in ("keypoints", "pointed") else x[taken] for name, x in columns.items()}
    if (pointed := columns["pointed"]) is not None:
        inside = np.isin(pointed, taken)
        made |= {"keypoints": columns["keypoints"][inside], "pointed": np.searchsorted(taken, pointed[inside])}
    return made


def _column(rows: Iterable[Any], name: str) -> Int64:
    return np.array(list(map(attrgetter(name), rows)), dtype=np.int64)


def _columns(rows: Sequence[_Object]) -> dict[str, Any]:
    """Columns of an ObjectTable; ``labels`` are ids of categories."""
    numbers = chain.from_iterable(map(attrgetter("bbox"), rows))
    xywh = np.fromiter(numbers, dtype=np.float64, count=4 * len(rows)).reshape(-1, 4)
    area = np.array(list(map(attrgetter("area"), rows)), dtype=np.float64)  # None becomes NaN
    ids = list(map(attrgetter("id"), rows))
    known = [-1 if number is None else number for number in ids] if None in ids else ids
    return {
        "boxes": corners(xywh, "bbox"),
        "labels": _column(rows, "category_id"),
        "crowd": _column(rows, "iscrowd") != 0,
        "area": None if np.isnan(area).all() else np.where(np.isnan(area), xywh[:, 2] * xywh[:, 3], area),
        "ids": None if ids.count(None) == len(ids) else np.array(known, dtype=np.int64),
    }


def _labels(
    ids: Int64,
    categories: Sequence[_Category],
    classes: Mapping[str, int] | None,
    file: str,
    fault: Callable[[int, str], None],
) -> Int64:
    """Class numbers of the objects. ``ids``: their categories."""
    labels = _positions(ids, _column(categories, "id"))
    for k in np.flatnonzero(labels < 0).tolist():
        fault(k, f"has `category_id` {ids[k]}, which `categories` lacks")
    if classes is not None:
        names = [category.name for category in categories]
        labels = numbers_of(names, classes, f"of the {len(names)} categories in {file!r}")[labels]
    return np.maximum(labels, 0)


def _keypoints(
    values: Iterable[msgspec.Raw], categories: Sequence[_Category], fault: Callable[[int, str], None]
) -> tuple[list[str], NDArray[np.float32] | None, Int64 | None]:
    """The K names, the keypoints [P, K, 3] of objects that have some, and the positions of these objects."""
    lists = [category.keypoints for category in categories if category.keypoints]
    if not lists:
        return [], None, None
    if lists.count(lists[0]) < len(lists):
        raise ValueError("all categories that have `keypoints` must have the same `keypoints`")
    if len(lists[0]) > MOST_KEYPOINTS:
        raise ValueError(f"categories must have at most {MOST_KEYPOINTS} `keypoints`. Found: {len(lists[0])}")
    count = 3 * len(lists[0])
    decoder: Any = msgspec.json.Decoder(list[float] | None)
    flat, pointed = array("d"), array("q")
    for k, value in enumerate(values):
        try:
            numbers = decoder.decode(value)
        except (ValueError, RecursionError) as error:
            fault(k, f"has `keypoints` that are not numbers: {error}")
            continue
        if numbers and len(numbers) != count:
            fault(k, f"must have {count} numbers in `keypoints`: x, y and visibility of each point")
        elif numbers and any(numbers):
            flat.extend(numbers)
            pointed.append(k)
    with np.errstate(over="ignore"):  # no warning: an infinite point makes a bad sample
        points = np.array(flat).astype(np.float32).reshape(-1, count // 3, 3)
    return lists[0], points, np.array(pointed, dtype=np.int64)


def mirror_images(names: Sequence[str]) -> tuple[int, ...] | None:
    """For each name, the position of the name with left and right swapped; None if the names do not form pairs."""
    swap = {"left": "right", "right": "left", "Left": "Right", "Right": "Left", "LEFT": "RIGHT", "RIGHT": "LEFT"}
    places = {name: i for i, name in enumerate(names)}
    mirrored = [re.sub("|".join(swap), lambda match: swap[match[0]], name) for name in names]
    if len(places) < len(names) or mirrored == list(names) or any(name not in places for name in mirrored):
        return None
    return tuple(places[name] for name in mirrored)
