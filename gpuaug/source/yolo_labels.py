"""Parses YOLO label files."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from gpuaug.source.objects import ObjectTable

BORDER = 0.01  # how far a coordinate may lie outside 0..1, as in ultralytics


def parse(
    files: Iterable[bytes | Exception],
    *,
    num_classes: int | None,
    points: tuple[int, int] | None,
    name: Callable[[int], str],
    numbers: NDArray[np.int64] | None,
) -> tuple[ObjectTable, Counter[int]]:
    """The objects of label files as :class:`YoloSource` describes them, and counts of polygons by number of points.

    ``points``: number of keypoints, and 2 or 3 numbers per keypoint. ``name(i)`` is the name of file i, for messages.
    ``numbers``: the label of each class number; None: the same number.
    """
    labels, boxes, keypoints = array("q"), array("d"), array("d")
    counts, reasons, polygons = list[int](), dict[int, str](), Counter[int]()
    for i, data in enumerate(files):
        objects, number = [], 0
        if isinstance(data, Exception):
            reasons[i], data = f"{name(i)!r} cannot be read ({data})", b""
        try:
            for line in data.removeprefix(b"\xef\xbb\xbf").splitlines():
                number += 1
                objects += [_object(line, num_classes, points)] if line.strip() else []
        except ValueError as error:
            reasons[i], objects = f"line {number} of {name(i)!r} {error}", []
        counts.append(len(objects))
        for label, box, visible, corners in objects:
            polygons[corners] += corners > 0
            labels.append(label)
            boxes.extend(box)
            keypoints.extend(visible)
    table = ObjectTable(
        counts,
        boxes=np.array(boxes).reshape(-1, 4),
        labels=np.array(labels) if numbers is None else numbers[np.array(labels)],
        keypoints=None if points is None else np.array(keypoints).reshape(-1, points[0], 3),
        fractions=True,
        reasons=reasons,
    )
    return table, polygons


def _object(
    line: bytes, num_classes: int | None, points: tuple[int, int] | None
) -> tuple[int, Sequence[float], Sequence[float], int]:
    """Class, box, keypoints (x, y, visibility, ...) and number of polygon points of a line.

    ValueError if the line is not valid.
    """
    if b"_" in line:  # Python's float accepts 1_0
        raise ValueError("must hold only numbers. Found: _")
    try:
        label, *values = map(float, line.split())
    except ValueError as error:
        raise ValueError(f"must hold only numbers: {error!s:.80}") from None
    count = len(values)
    if points is None:
        is_box, fits = count == 4, count >= 4 and count % 2 == 0
    else:
        is_box, fits = True, count == 4 + points[0] * points[1]
    if not fits:
        wanted = "5 numbers (class, cx, cy, w, h), or a class and at least 3 points"
        if points is not None:
            number, each = points
            wanted = f"{5 + number * each} numbers: class, cx, cy, w, h, and {number} keypoints of {each} numbers"
        raise ValueError(f"must have {wanted}. Found {1 + count} numbers")
    if not (math.isfinite(label) and all(map(math.isfinite, values))):
        raise ValueError("must hold finite numbers")
    most = 2**31 if num_classes is None else num_classes
    if not 0 <= label < most or label != int(label):
        names = "0, 1, ..." if num_classes is None else f"0 .. {most - 1}, because there are {most} classes"
        raise ValueError(f"must begin with a class number {names}. Found: {label:g}")
    seen = values[6::3] if points is not None and points[1] == 3 else []
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
