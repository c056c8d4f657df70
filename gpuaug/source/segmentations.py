"""Outlines of objects in COCO's formats (polygons and run lengths), in memory that all processes share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpuaug.errors import ConfigError, GpuaugError, shown_size
from gpuaug.source.index import Names

MOST_PIXELS = 178_956_970  # limit for an image with outlines; Pillow refuses larger images too
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


class _Runs(msgspec.Struct, gc=False):
    size: tuple[int, int]  # height, width
    counts: str | list[Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]]  # COCO's text, or run lengths


_DECODER: Any = msgspec.json.Decoder(list[list[float]] | _Runs | None)


class Segmentations:
    """Outlines of N objects, in the order of their ``ObjectTable``.

    ``values`` are JSON: polygons [x, y, x, y, ...], or run lengths ``{"size": [height, width], "counts": ...}``.
    """

    def __init__(self, values: Iterable[msgspec.Raw]) -> None:
        texts = map(bytes, values)
        self._texts = Names.of(iter(lambda: list(islice(texts, BLOCK)), []))

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
                runs.append(_runs(self._texts[begin + k], height, width))
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


def _runs(text: bytes, height: int, width: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Starts and stops of the pixel runs of an object, column by column."""
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        wanted = "a list of polygons [x, y, x, y, ...], or run lengths with `size` and `counts`"
        raise ValueError(f"must be {wanted}: {error}") from error
    if not value:
        raise ValueError("is missing")
    if isinstance(value, list):
        counts = _counts(_rasterize(value, height, width))
    elif value.size != (height, width):
        found = f"{value.size[1]} x {value.size[0]} pixels, but this image has {shown_size(height, width)}"
        raise ValueError(f"is for an image of {found}")
    else:
        counts = _counts(value.counts.encode()) if isinstance(value.counts, str) else np.array(value.counts, np.int64)
    if (counts < 0).any() or counts.sum() != height * width:
        raise ValueError(
            f"must have run lengths >= 0 with the sum {width} * {height} = {height * width}. Found: {counts.sum()}"
        )
    ends = np.cumsum(counts)
    return ends[: len(ends) // 2 * 2 : 2], ends[1::2]


def _rasterize(rings: list[list[float]], height: int, width: int) -> bytes:
    """Run lengths of the pixels inside any of the polygons, as COCO's text."""
    bad = next((len(ring) for ring in rings if len(ring) < 6 or len(ring) % 2), None)
    if bad is not None:
        raise ValueError(f"must have polygons of at least 3 points, as x, y pairs. Found: {bad} numbers")
    with np.errstate(over="ignore"):  # no warning: an infinite point is refused below
        polygons = [np.array(ring).astype(np.float32).astype(np.float64) for ring in rings]  # float32 as boxes
    far = 2 * max(height, width)  # pycocotools takes memory in proportion to a polygon's extent
    if not all((np.abs(ring) <= far).all() for ring in polygons):  # also refuses NaN
        raise ValueError(f"has a point far outside the image of {shown_size(height, width)} pixels")
    mask = import_pycocotools()
    around = sum(float(np.abs(ring - np.roll(ring, 2)).reshape(-1, 2).max(axis=1).sum()) for ring in polygons)
    if around > LONGEST_OUTLINE:  # pycocotools needs 100 bytes per pixel, and crashes if memory runs out
        raise ValueError(f"must have outlines of at most {LONGEST_OUTLINE} pixels. Found: {around:.0f}")
    encoded = mask.frPyObjects(polygons, height, width)
    return bytes((encoded[0] if len(rings) == 1 else mask.merge(encoded))["counts"])


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
