"""Parses YOLO label files."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from gpuaug.source.objects import ObjectTable

BORDER = 0.01  # how far a coordinate may lie outside 0..1, as in ultralytics


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules for a line."""

    num_classes: int | None
    points: tuple[int, int] | None  # number of keypoints, and 2 or 3 numbers per keypoint


def parse(
    files: Iterable[bytes | Exception],
    rules: Rules,
    *,
    name: Callable[[int], str],
    numbers: NDArray[np.int64] | None = None,
) -> ObjectTable:
    """The objects of label files as :class:`YoloSource` describes them.

    ``name(i)`` is the name of file i, for messages. ``numbers``: the label of each class number; None: the same number.
    """
    labels, boxes, keypoints = array("q"), array("d"), array("d")
    counts, reasons = list[int](), dict[int, str]()
    for i, data in enumerate(files):
        try:
            objects = _objects(data, rules, partial(name, i))
        except ValueError as error:
            reasons[i], objects = str(error), []
        counts.append(len(objects))
        for label, box, points in objects:
            labels.append(label)
            boxes.extend(box)
            keypoints.extend(points)
    return ObjectTable(
        counts,
        boxes=np.array(boxes).reshape(-1, 4),
        labels=np.array(labels) if numbers is None else numbers[np.array(labels)],
        keypoints=None if rules.points is None else np.array(keypoints).reshape(-1, rules.points[0], 3),
        fractions=True,
        reasons=reasons,
    )


def _objects(
    data: bytes | Exception, rules: Rules, name: Callable[[], str]
) -> list[tuple[int, Sequence[float], Sequence[float]]]:
    """What :func:`_object` returns for each line. ``name()`` is the file, for messages."""
    if isinstance(data, Exception):
        raise ValueError(f"{name()!r} cannot be read ({data})")
    objects = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").splitlines(), start=1):
        try:
            objects += [_object(line, rules)] if line.strip() else []
        except ValueError as error:
            raise ValueError(f"line {number} of {name()!r} {error}") from error
    return objects


def _object(line: bytes, rules: Rules) -> tuple[int, Sequence[float], Sequence[float]]:
    """Class, box and keypoints (x, y, visibility, ...) of a line; ValueError if the line is not valid."""
    try:
        label, *values = map(float, line.split())
    except ValueError:
        label, values = math.nan, []
    if not values or b"_" in line:  # Python's float accepts 1_0
        _check_words(line.split())
    count = len(values)
    if rules.points is None:
        is_box, fits = count == 4, count >= 4 and count % 2 == 0
    else:
        is_box, fits = True, count == 4 + rules.points[0] * rules.points[1]
    if not fits:
        raise ValueError(f"must have {_wanted(rules)}. Found {1 + count} numbers")
    if not (math.isfinite(label) and all(map(math.isfinite, values))):
        raise ValueError("must hold finite numbers")
    most = 2**31 if rules.num_classes is None else rules.num_classes
    if not 0 <= label < most or label != int(label):
        names = "0, 1, ..." if rules.num_classes is None else f"0 .. {most - 1}, because there are {most} classes"
        raise ValueError(f"must begin with a class number {names}. Found: {label:g}")
    seen = values[6::3] if rules.points is not None and rules.points[1] == 3 else []
    coordinates = [*values[:4], *values[4::3], *values[5::3]] if seen else values
    if min(coordinates) < -BORDER or max(coordinates) > 1 + BORDER:
        found = f"Found: {min(coordinates)} .. {max(coordinates)}"
        raise ValueError(f"must hold coordinates 0 .. 1, in units of the image's size. {found}")
    if not is_box:
        xs, ys = values[::2], values[1::2]
        return int(label), (min(xs), min(ys), max(xs), max(ys)), ()
    x, y, width, height = values[:4]
    if width < 0 or height < 0:
        raise ValueError(f"must have a width and a height of at least 0. Found: {width:g}, {height:g}")
    if not {0, 1, 2}.issuperset(seen):
        raise ValueError("must have visibilities 0, 1 or 2")
    box = x - width / 2, y - height / 2, x + width / 2, y + height / 2
    return int(label), box, _points(values[4:], seen) if count > 4 else ()


def _points(values: list[float], seen: list[float]) -> list[float]:
    """Keypoints as x, y, visibility. An invisible point is (0, 0, 0)."""
    each = 3 if seen else 2
    points: list[float] = []
    for at in range(0, len(values), each):
        x, y = values[at : at + 2]
        # without visibilities, a point is visible unless it is (0, 0) or has a negative coordinate
        visibility = values[at + 2] if seen else 2.0 * (x >= 0 and y >= 0 and (x, y) != (0, 0))
        points += [x, y, visibility] if visibility else [0.0, 0.0, 0.0]
    return points


def _wanted(rules: Rules) -> str:
    if rules.points is None:
        return "5 numbers (class, cx, cy, w, h), or a class and at least 3 points"
    points, each = rules.points
    return f"{5 + points * each} numbers: class, cx, cy, w, h, and {points} keypoints of {each} numbers"


def _check_words(words: list[bytes]) -> None:
    for word in words:
        try:
            float(word.replace(b"_", b"x"))
        except ValueError:
            raise ValueError(f"must hold only numbers. Found: {repr(word[:40])[1:]}") from None
