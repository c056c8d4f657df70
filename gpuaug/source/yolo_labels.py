"""Parses YOLO label files."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BORDER = 0.01  # how far a coordinate may lie outside 0..1, as in ultralytics


@dataclass(frozen=True, slots=True)
class Labels:
    """The objects of all files in order."""

    counts: NDArray[np.int64]  # [files], objects of each file; 0 for a file in `reasons`
    labels: NDArray[np.int64]  # [N], class numbers
    boxes: NDArray[np.float64]  # [N, 4], (x1, y1, x2, y2) in units of the image's width and height
    keypoints: NDArray[np.float64] | None  # [N, K, 3], (x, y, visibility 0..2)
    reasons: dict[int, str]  # why files cannot be used, by file number
    outlines: int  # number of objects that are polygons
    quadrilaterals: int  # number of them with 4 points, as oriented boxes have


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules for a line."""

    num_classes: int | None
    points: tuple[int, int] | None  # number of keypoints, and 2 or 3 numbers per keypoint


def parse(files: Iterable[bytes | Exception], rules: Rules, *, name: Callable[[int], str]) -> Labels:
    """Parse label files, as :class:`YoloSource` describes them. ``name(i)`` is the name of file i, for ``reasons``."""
    counts, labels, boxes, keypoints = array("q"), array("q"), array("d"), array("d")
    reasons: dict[int, str] = {}
    outlines = quadrilaterals = 0
    for i, data in enumerate(files):
        objects, reason = [], ""
        if isinstance(data, Exception):
            reason = f"{name(i)!r} cannot be read ({data})"
        else:
            for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").splitlines(), start=1):
                try:
                    objects += [_object(line, rules)] if line.strip() else []
                except ValueError as error:
                    reason = f"line {number} of {name(i)!r} {error}"
                    break
        if reason:
            reasons[i], objects = reason, []
        counts.append(len(objects))
        for label, box, points, corners in objects:
            outlines += corners > 0
            quadrilaterals += corners == 4
            labels.append(label)
            boxes.extend(box)
            keypoints.extend(points)
    shaped = None if rules.points is None else np.array(keypoints).reshape(-1, rules.points[0], 3)
    boxed = np.array(boxes).reshape(-1, 4)
    return Labels(np.array(counts), np.array(labels), boxed, shaped, reasons, outlines, quadrilaterals)


def _object(line: bytes, rules: Rules) -> tuple[int, Sequence[float], Sequence[float], int]:
    """Class, box, keypoints (x, y, visibility, ...) and number of polygon points of a line.

    ValueError if the line is not valid.
    """
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
        return int(label), (min(xs), min(ys), max(xs), max(ys)), (), len(xs)
    x, y, width, height = values[:4]
    if width < 0 or height < 0:
        raise ValueError(f"must have a width and a height of at least 0. Found: {width:g}, {height:g}")
    if not {0, 1, 2}.issuperset(seen):
        raise ValueError("must have visibilities 0, 1 or 2")
    box = x - width / 2, y - height / 2, x + width / 2, y + height / 2
    return int(label), box, _points(values[4:], seen) if count > 4 else (), 0


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
