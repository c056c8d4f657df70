"""Outlines of objects in COCO's formats (polygons and run lengths), in memory that all processes share."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuaug.errors import ConfigError, GpuaugError
from gpuaug.source.index import Names

MOST_PIXELS = 178_956_970  # limit for an image with outlines; Pillow refuses larger images too
# The first uint32 of a packed outline: COUNTS (run lengths follow), TEXT (COCO's text follows), or number of polygons
COUNTS, TEXT = 2**32 - 1, 2**32 - 2
LONGEST_OUTLINE = 1 << 22  # pixels; limit for the total length of an object's outlines
BLOCK = 4096  # objects that are packed together, to save memory
LONGEST_CODE = 7  # limit for the characters of one number in COCO's text


def import_pycocotools() -> Any:
    """The module ``pycocotools.mask``; ConfigError if it is not installed."""
    try:
        from pycocotools import mask
    except ImportError as error:
        raise ConfigError("`source.masks=instances` needs pycocotools: pip install 'gpuaug[coco]'.") from error
    return mask


class Segmentations:
    """Outlines of N objects, in the order of their ``ObjectTable``.

    ``values`` are parsed JSON: polygons [x, y, x, y, ...], run lengths ``{"size": [height, width], "counts": ...}``, or
    None.

    Attributes:
        damaged: what is wrong with outlines that are missing or have another form, by position of the object.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self.damaged: dict[int, str] = {}

        def pack(item: tuple[int, Any]) -> bytes:
            number, value = item
            try:
                packed = _pack(value)
            except ValueError as error:
                self.damaged[number] = str(error)
                return b""
            rings = value if isinstance(value, list) else ()
            if reason := _wrong_lengths(map(len, rings)) if packed else "is missing":
                self.damaged[number] = reason
            return packed

        packed = map(pack, enumerate(values))
        self._packed = Names.of(iter(lambda: list(islice(packed, BLOCK)), []))

    def draw(
        self, begin: int, end: int, *, size: tuple[int, int], crowd: Sequence[bool] | None, ids: Sequence[int]
    ) -> NDArray[Any]:
        """The map of an image with the objects begin .. end - 1: 0 is no object, k + 1 is object ``begin + k``.

        Where objects overlap, the object with fewer pixels is on top, and crowds are below all other objects. ``size``
        is (height, width). ``ids`` are for messages. A damaged outline raises GpuaugError.

        Returns:
            Unsigned integers [H, W], not contiguous.
        """
        height, width = size
        if height * width > MOST_PIXELS:
            raise GpuaugError(f"a mask must have at most {MOST_PIXELS} pixels. Found: {shown_size(height, width)}")
        runs = []
        for k in range(end - begin):
            try:
                runs.append(_runs(self._packed[begin + k], height, width))
            except ValueError as error:
                raise GpuaugError(f"the segmentation of annotation {ids[k]} {error}") from error
        pixels = np.array([int((stops - starts).sum()) for starts, stops in runs], dtype=np.int64)
        below = np.zeros(len(runs), dtype=bool) if crowd is None else np.asarray(crowd)
        flat = np.zeros(width * height, dtype=np.min_scalar_type(len(runs)))  # column by column, like COCO's runs
        for k in np.lexsort((-pixels, ~below)).tolist():
            starts, stops = runs[k]
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
                flat[start:stop] = k + 1
        return flat.reshape(width, height).T


def shown_size(height: int, width: int) -> str:
    """The size of an image, for a message."""
    return f"{width} x {height} (width x height)"


def _pack(value: Any) -> bytes:
    """Bytes of one outline: a head of uint32 numbers, then float32 points, run lengths or COCO's text."""
    try:
        if isinstance(value, dict):
            return _pack_runs(value)
        if value is None or value == []:
            return b""
        if isinstance(value, list) and all(_is_numbers(ring) for ring in value):
            lengths = struct.pack(f"<{1 + len(value)}I", len(value), *map(len, value))
            return lengths + array("f", chain.from_iterable(value)).tobytes()
    except (OverflowError, TypeError, KeyError, ValueError, struct.error):
        pass  # such as a run length that uint32 cannot hold
    raise ValueError("must be a list of polygons [x, y, x, y, ...], or run lengths with `size` and `counts`")


def _pack_runs(value: dict[str, Any]) -> bytes:
    (height, width), counts = value["size"], value["counts"]
    if isinstance(counts, str):
        return struct.pack("<3I", TEXT, height, width) + counts.encode("ascii")
    if _is_numbers(counts):
        return struct.pack("<3I", COUNTS, height, width) + array("I", counts).tobytes()
    raise TypeError


def _wrong_lengths(lengths: Iterable[int]) -> str:
    """Why polygons of these numbers of coordinates cannot be drawn; "" if they can."""
    bad = next((length for length in lengths if length < 6 or length % 2), None)
    return "" if bad is None else f"must have polygons of at least 3 points, as x, y pairs. Found: {bad} numbers"


def _is_numbers(values: Any) -> bool:
    return isinstance(values, list) and set(map(type, values)) <= {int, float}


def _runs(packed: bytes, height: int, width: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Starts and stops of the pixel runs of an object, column by column."""
    if not packed:
        raise ValueError("is missing")
    (kind,) = struct.unpack_from("<I", packed)
    if kind not in (COUNTS, TEXT):
        counts = _counts(_rasterize(packed, kind, height, width))
    else:
        if (size := struct.unpack_from("<2I", packed, 4)) != (height, width):
            found = f"{size[1]} x {size[0]} pixels, but this image has {shown_size(height, width)}"
            raise ValueError(f"is for an image of {found}")
        counts = (
            _counts(packed[12:]) if kind == TEXT else np.frombuffer(packed, dtype="<u4", offset=12).astype(np.int64)
        )
    if (counts < 0).any() or counts.sum() != height * width:
        raise ValueError(
            f"must have run lengths >= 0 with the sum {width} * {height} = {height * width}. Found: {counts.sum()}"
        )
    ends = np.cumsum(counts)
    return ends[: len(ends) // 2 * 2 : 2], ends[1::2]


def _rasterize(packed: bytes, rings: int, height: int, width: int) -> bytes:
    """Run lengths of the pixels inside any of the polygons, as COCO's text."""
    lengths = np.frombuffer(packed, dtype="<u4", count=rings, offset=4)
    points = np.frombuffer(packed, dtype="<f4", offset=4 + 4 * rings).astype(np.float64)
    far = 2 * max(height, width)  # pycocotools takes memory in proportion to a polygon's extent
    if not (np.abs(points) <= far).all():  # also refuses NaN
        raise ValueError(f"has a point far outside the image of {shown_size(height, width)} pixels")
    mask = import_pycocotools()
    polygons = np.split(points, np.cumsum(lengths[:-1], dtype=np.int64))
    around = sum(float(np.abs(ring - np.roll(ring, 2)).reshape(-1, 2).max(axis=1).sum()) for ring in polygons)
    if around > LONGEST_OUTLINE:  # pycocotools needs 100 bytes per pixel, and crashes if memory runs out
        raise ValueError(f"must have outlines of at most {LONGEST_OUTLINE} pixels. Found: {around:.0f}")
    encoded = mask.frPyObjects(polygons, height, width)
    return bytes((encoded[0] if rings == 1 else mask.merge(encoded))["counts"])


def _counts(text: bytes) -> NDArray[np.int64]:
    """Run lengths from COCO's text, as ``rleFrString`` in pycocotools' maskApi.c, but with checks.

    Each character holds 5 bits of a number. From the fourth number on, the text has the difference from the number two
    places before.
    """
    codes = np.frombuffer(text, dtype=np.uint8).astype(np.int64) - 48
    if not len(codes) or (codes < 0).any() or (codes > 63).any() or codes[-1] & 32:
        raise ValueError("has run lengths with invalid text")
    last = np.flatnonzero(codes < 32)
    first = np.concatenate([[0], last[:-1] + 1])
    sizes = last - first + 1
    if sizes.max() > LONGEST_CODE:
        raise ValueError("has run lengths with a number that is too large")
    place = np.arange(len(codes)) - np.repeat(first, sizes)
    counts = np.add.reduceat((codes & 31) << (5 * place), first)
    counts -= np.where(codes[last] & 16, 1 << (5 * sizes), 0)
    counts[1::2] = np.cumsum(counts[1::2])
    counts[2::2] = np.cumsum(counts[2::2])
    return counts
