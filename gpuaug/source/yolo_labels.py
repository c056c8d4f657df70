"""Parses YOLO label files, many at a time."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

BLOCK_BYTES = 1 << 22  # text that is parsed together; more does not fit into the processor's cache
BORDER = 0.01  # how far a coordinate may lie outside 0..1, as in ultralytics
_SPACE = np.isin(np.arange(256), list(b" \t\n\v\f\r"))
_NUMBER = re.compile(rb"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(nan|inf|infinity)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Labels:
    """The objects of all files in order."""

    counts: Int64  # [files], objects of each file; 0 for a file in `reasons`
    labels: Int64  # [N], class numbers
    boxes: Float64  # [N, 4], (x1, y1, x2, y2) in units of the image's width and height
    keypoints: Float64 | None  # [N, K, 3], (x, y, visibility 0..2)
    reasons: dict[int, str]  # why files cannot be used, by file number


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules for a line."""

    num_classes: int | None
    points: tuple[int, int] | None  # number of keypoints, and 2 or 3 numbers per keypoint


@dataclass(frozen=True, slots=True)
class _Lines:
    """The non-empty lines of a block. The numbers of a line are ``values[start:start + length]``."""

    values: Float64
    start: Int64
    length: Int64
    file: Int64
    number: Int64  # line number in the file, from 1


def parse(files: Iterable[bytes | Exception], rules: Rules, *, name: Callable[[int], str]) -> Labels:
    """Parse label files, as :class:`YoloSource` describes them. ``name(i)`` is the name of file i, for ``reasons``."""
    parts: list[tuple[Any, ...]] = []
    reasons: dict[int, str] = {}
    for first, block in _blocks(files):
        for i, data in enumerate(block):
            if isinstance(data, Exception):
                reasons[first + i] = f"{name(first + i)!r} cannot be read ({data})"
        lines, problems = _tokenized([b"" if isinstance(data, Exception) else data for data in block])
        problems |= _problems(lines, rules)
        for i, reason in problems.items():
            reasons[first + i] = reason.format(file=repr(name(first + i)))
        parts.append(_objects(lines, ~np.isin(lines.file, [*problems]), len(block), rules))
    counts, labels, boxes, keypoints = (
        None if column[0] is None else np.concatenate(column) for column in zip(*parts, strict=True)
    )
    return Labels(counts, labels, boxes, keypoints, reasons)  # type: ignore[arg-type]


def _blocks(files: Iterable[bytes | Exception]) -> Iterator[tuple[int, list[bytes | Exception]]]:
    """Yield (number of the first file, files) for blocks of about `BLOCK_BYTES`."""
    block: list[bytes | Exception] = []
    first = size = 0
    for data in files:
        block.append(data)
        size += 64 if isinstance(data, Exception) else len(data) + 1
        if size >= BLOCK_BYTES:
            yield first, block
            first, block, size = first + len(block), [], 0
    yield first, block


def _tokenized(files: list[bytes]) -> tuple[_Lines, dict[int, str]]:
    """The lines of all usable files, and the reasons why other files cannot be used."""
    lines, reasons = _lines(files), dict[int, str]()
    if lines is None:
        reasons = {i: _wrong_word(data) for i, data in enumerate(files) if _lines([data]) is None}
        lines = _lines([b"" if i in reasons else data for i, data in enumerate(files)])
    assert lines is not None
    return lines, reasons


def _lines(files: list[bytes]) -> _Lines | None:
    """The lines of the files; None if a word is not a number."""
    files = [_plain(data) for data in files]
    text = b"\n".join(files) + b"\n"
    raw = np.frombuffer(text, dtype=np.uint8)
    space = _SPACE[raw]
    words = np.flatnonzero(~space & np.concatenate([[True], space[:-1]]))  # position of each word's first byte
    with warnings.catch_warnings():
        # numpy warns at a word that it cannot read
        warnings.filterwarnings("error", "string or file could not be read", DeprecationWarning)
        try:
            values = np.fromstring(text, dtype=np.float64, sep=" ") if len(words) else np.zeros(0)
        except (ValueError, DeprecationWarning):
            return None
    if len(values) != len(words):  # numpy reads "1-2" as two numbers
        return None
    line = np.searchsorted(np.flatnonzero(raw == ord("\n")), words)
    length = np.bincount(line)
    rows = np.flatnonzero(length)
    length = length[rows]
    first_line = np.cumsum([0, *(data.count(b"\n") + 1 for data in files)])
    file = np.searchsorted(first_line, rows, side="right") - 1
    return _Lines(values, np.cumsum(length) - length, length, file, rows - first_line[file] + 1)


def _plain(data: bytes) -> bytes:
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    return data.removeprefix(b"\xef\xbb\xbf")


def _wrong_word(data: bytes) -> str:
    for number, line in enumerate(_plain(data).split(b"\n"), start=1):
        for word in line.split():
            if not _NUMBER.fullmatch(word):
                shown = repr(word[:40])[1:].replace("{", "{{").replace("}", "}}")
                return f"line {number} of {{file}} must hold only numbers. Found: {shown}"
    return "{file} must hold only numbers"


def _problems(lines: _Lines, rules: Rules) -> dict[int, str]:
    """What is wrong in each file's first bad line, by file number. ``{file}`` stands for the file's name."""
    if not len(lines.start):
        return {}
    values, start, length = lines.values, lines.start, lines.length
    classes = values[start]
    finite = np.logical_and.reduceat(np.isfinite(values), start)
    if rules.points is None:
        counted = (length == 5) | ((length >= 7) & (length % 2 == 1))
        wanted = "5 numbers (class, cx, cy, w, h), or a class and at least 3 points"
    else:
        numbers = 5 + rules.points[0] * rules.points[1]
        counted = length == numbers
        wanted = f"{numbers} numbers: class, cx, cy, w, h, and {rules.points[0]} keypoints of {rules.points[1]} numbers"
    most = 2**31 if rules.num_classes is None else rules.num_classes
    with np.errstate(invalid="ignore"):
        known = (classes >= 0) & (classes < most) & (classes == np.floor(classes))
        inside = (values >= -BORDER) & (values <= 1 + BORDER)
        inside[start] = True
        seen = np.ones(len(values), dtype=np.bool_)
        if rules.points is not None and rules.points[1] == 3:
            at = start[counted & finite][:, None] + np.arange(7, 5 + rules.points[0] * 3, 3)
            seen[at] = np.isin(values[at], (0, 1, 2))
            inside[at] = True
        is_box = counted & ((length == 5) | (rules.points is not None))
        sides = start[is_box][:, None] + (3, 4)
        positive = np.ones(len(values), dtype=np.bool_)
        positive[sides] = values[sides] >= 0
    names = "" if rules.num_classes is None else f"0 .. {most - 1}, because there are {most} classes"
    checks = (
        (counted, f"must have {wanted}. Found {{count}} numbers"),
        (finite, "must hold finite numbers"),
        (known, f"must begin with a class number {names or '0, 1, ...'}. Found: {{word:g}}"),
        (np.logical_and.reduceat(inside, start), "must hold coordinates 0 .. 1, in units of the image's size"),
        (np.logical_and.reduceat(positive, start), "must have a width and a height of at least 0"),
        (np.logical_and.reduceat(seen, start), "must have visibilities 0, 1 or 2"),
    )
    bad: dict[int, tuple[int, str]] = {}
    for valid, text in checks:
        for row in np.flatnonzero(~valid).tolist():
            file = int(lines.file[row])
            if file not in bad or row < bad[file][0]:
                shown = text.format(count=length[row], word=classes[row])
                bad[file] = row, f"line {lines.number[row]} of {{file}} {shown}"
    return {file: reason for file, (_, reason) in bad.items()}


def _objects(
    lines: _Lines, keep: NDArray[np.bool_], files: int, rules: Rules
) -> tuple[Int64, Int64, Float64, Float64 | None]:
    """Counts, labels, boxes and keypoints of the lines in ``keep``. These lines must be valid."""
    values, start, length = lines.values, lines.start[keep], lines.length[keep]
    is_box = (length == 5) | (rules.points is not None)
    boxes = np.empty((len(start), 4))
    centre = values[start[is_box][:, None] + (1, 2)]
    half = values[start[is_box][:, None] + (3, 4)] / 2
    boxes[is_box] = np.concatenate([centre - half, centre + half], axis=1)
    if not is_box.all():
        boxes[~is_box] = _hulls(values, start[~is_box] + 1, length[~is_box] - 1)
    keypoints = None
    if rules.points is not None:
        count, numbers = rules.points
        keypoints = values[start[:, None] + np.arange(5, 5 + count * numbers)].reshape(-1, count, numbers)
        if numbers == 2:  # without visibilities, a point is visible unless it is (0, 0) or has a negative coordinate
            seen = (keypoints >= 0).all(axis=2) & keypoints.any(axis=2)
            keypoints = np.concatenate([keypoints, 2.0 * seen[..., None]], axis=2)
        keypoints = np.where(keypoints[..., 2:] > 0, keypoints, 0)
    counts = np.bincount(lines.file[keep], minlength=files)
    return counts, values[start].astype(np.int64), boxes, keypoints


def _hulls(values: Float64, start: Int64, length: Int64) -> Float64:
    """Boxes around polygons; ``values[start:start + length]`` are x1, y1, x2, y2, ..."""
    bounds = np.cumsum(length) - length
    points = values[np.repeat(start - bounds, length) + np.arange(int(length.sum()))].reshape(-1, 2)
    low, high = (fold.reduceat(points, bounds // 2, axis=0) for fold in (np.minimum, np.maximum))
    return np.concatenate([low, high], axis=1)
