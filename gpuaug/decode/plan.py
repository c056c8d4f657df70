"""What the stages of decoding share: headers of a batch, the rows to decode and the boxes needed, EXIF orientation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.batch import Boxes, EncodedBatch, Fault, Int32, Int64
from gpuaug.decode.header import RAW_HEADER
from gpuaug.errors import ConfigError

Pixels = NDArray[np.uint8]

# The CPU decodes a batch in parts of this size per thread, and makes a part's views before it decodes the next one.
# DALI allocates the pixels of a part in one piece, of another size each time, and malloc keeps several of those: whole
# batches of 30 MiB grow to 250 MiB after 50 batches and 450 after 300, parts to 60 to 90, in the same processor time
# (64 files of 700 x 525).
SAMPLES_PER_THREAD, BYTES_PER_THREAD = 8, 8 << 20


class Route(IntEnum):
    """Which decoder a row takes."""

    BAD = 0  # none: the row has a fault
    DALI = 1
    PILLOW = 2
    REFUSED = 3  # Pillow, because DALI refused it
    RAW = 4  # none: the bytes are the pixels


@dataclass(frozen=True)
class HeaderInfo:
    """What the headers of a batch say; rows are samples.

    Attributes:
        height, width: int64 [B], after orientation; 0 where the sample cannot be decoded.
        orientation: int64 [B], EXIF's 1..8.
        faults: the rows that cannot be decoded, without those that could not be read.
        route: int8 [B], the :class:`Route` of each row.
        replaced: row to the bytes that are decoded in place of the sample's: a JPEG with the end marker that it lacked,
            a PNG without long texts and profiles.
    """

    height: Int64
    width: Int64
    orientation: Int64
    faults: list[Fault]
    route: NDArray[np.int8]
    replaced: dict[int, Pixels] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """Rows of a batch to decode, and the part of each image that is needed.

    Attributes:
        rows: int64 [n], numbers in the batch.
        route: int8 [n], the :class:`Route` of each row.
        encoded: n uint8 arrays, views into the packed buffer or into mapped files.
        orientation: int64 [n].
        stored: int64 [n, 2], height and width before orientation.
        union: int32 [n, 4], the smallest box that holds the boxes of all views, before orientation.
        boxes: per view, n rows, after orientation.
        parts: per view int32 [n, 4], its box before orientation.
    """

    rows: Int64
    route: NDArray[np.int8]
    encoded: list[Pixels]
    orientation: Int64
    stored: Int64
    union: Int32
    boxes: list[Boxes]
    parts: list[Int32]

    @classmethod
    def of(cls, batch: EncodedBatch, headers: HeaderInfo, boxes: Sequence[Boxes]) -> Plan:
        """The plan for all rows of a batch that can be decoded; ``boxes`` has B rows for each view, one at least."""
        rows = np.flatnonzero(headers.route != Route.BAD)
        orientation, h, w = headers.orientation[rows], headers.height[rows], headers.width[rows]
        swapped = orientation > 4
        stored = np.stack([np.where(swapped, w, h), np.where(swapped, h, w)], axis=1)
        taken = [_take_boxes(b, rows) for b in boxes]
        corner = np.stack([b.box[:, :2] for b in taken]).min(axis=0)
        end = np.stack([b.box[:, :2] + b.box[:, 2:] for b in taken]).max(axis=0)
        union = np.concatenate([corner, end - corner], axis=1)
        inside = (corner >= 0).all(axis=1) & (union[:, 2:] > 0).all(axis=1) & (end <= np.stack([h, w], 1)).all(axis=1)
        if not inside.all():
            k = int((~inside).argmax())
            raise ConfigError(
                f"A crop's boxes must lie inside the image. Found: {union[k].tolist()} (top, left, height, width) in "
                f"an image of {h[k]}x{w[k]}. Clip them in the crop's `boxes`."
            )
        images = batch.images
        return cls(
            rows=rows,
            route=headers.route[rows],
            encoded=[headers.replaced.get(row, images[row]) for row in rows.tolist()],
            orientation=orientation,
            stored=stored,
            union=to_stored(union, stored, orientation),
            boxes=taken,
            parts=[to_stored(b.box, stored, orientation) for b in taken],
        )

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def swapped(self) -> NDArray[np.bool_]:
        """bool [n], rows whose stored height is the width of the oriented image."""
        return self.orientation > 4

    def take(self, keep: Int64) -> Plan:
        """The plan for some of its rows."""
        arrays = {name: getattr(self, name)[keep] for name in ("rows", "route", "orientation", "stored", "union")}
        return Plan(
            **arrays,
            encoded=[self.encoded[k] for k in keep],
            boxes=[_take_boxes(b, keep) for b in self.boxes],
            parts=[part[keep] for part in self.parts],
        )

    def raw_region(self, k: int) -> Pixels:
        """The pixels of ``union`` of row ``k``, whose bytes are pixels, where they are."""
        (h, w), (y, x, height, width) = self.stored[k].tolist(), self.union[k].tolist()
        return self.encoded[k][RAW_HEADER:].reshape(h, w, 3)[y : y + height, x : x + width]

    def view_parts(self, view: int, regions: Sequence[Pixels]) -> list[Pixels]:
        """A view's part of every row, oriented; ``regions`` holds each row's pixels of ``union``."""
        corner = self.parts[view][:, :2] - self.union[:, :2]
        edges = np.concatenate([corner, corner + self.parts[view][:, 2:]], axis=1).tolist()
        rows = zip(regions, edges, self.orientation.tolist(), strict=True)
        return [_oriented(region[top:bottom, left:right], o) for region, (top, left, bottom, right), o in rows]


def _take_boxes(boxes: Boxes, rows: Int64) -> Boxes:
    return replace(boxes, box=boxes.box[rows], resized=boxes.resized[rows], offset=boxes.offset[rows])


def num_parts(samples: int, size: float, threads: int) -> int:
    """Number of parts in which the CPU decodes ``samples`` images whose pixels have ``size`` bytes together."""
    return max(1, min(samples // (SAMPLES_PER_THREAD * threads), int(size // (BYTES_PER_THREAD * threads))))


def split_by_bytes(rows: Int64, sizes: Int64, max_bytes: int) -> list[Int64]:
    """Rows in groups of at most `max_bytes`, where a row has ``sizes[row]`` bytes; a larger row is a group alone."""
    groups: list[Int64] = []
    while len(rows):
        count = max(1, int(np.searchsorted(np.cumsum(sizes[rows]), max_bytes, side="right")))
        groups.append(rows[:count])
        rows = rows[count:]
    return groups


def decode_fault(row: int, encoded: Pixels, reason: str) -> Fault:
    """The fault of a row that cannot be decoded."""
    return Fault(row, "decode", reason, len(encoded), encoded[:16].tobytes())


# -- orientation: the oriented image is the stored one flipped, then transposed for the numbers above 4 --

_FLIP_Y = np.array([0, 0, 0, 1, 1, 0, 1, 1, 0], dtype=bool)  # by EXIF's number 1..8
_FLIP_X = np.array([0, 0, 1, 1, 0, 0, 0, 1, 1], dtype=bool)


def to_stored(box: Int32, size: Int64, orientation: Int64) -> Int32:
    """Boxes [n, 4] of oriented images in coordinates of the stored ones, whose (height, width) are ``size`` [n, 2]."""
    swap = (orientation > 4)[:, None]
    corner = np.where(swap, box[:, 1::-1], box[:, :2])
    extent = np.where(swap, box[:, :1:-1], box[:, 2:])
    flip = np.stack([_FLIP_Y[orientation], _FLIP_X[orientation]], axis=1)
    return np.concatenate([np.where(flip, size - corner - extent, corner), extent], axis=1).astype(np.int32)


def _oriented(image: Pixels, orientation: int) -> Pixels:
    """A stored image or a part of it, uint8 [h, w, 3], oriented; a view."""
    if orientation == 1:
        return image
    image = image[:: -1 if _FLIP_Y[orientation] else 1, :: -1 if _FLIP_X[orientation] else 1]
    return image.transpose(1, 0, 2) if orientation > 4 else image


def oriented_batch(images: Tensor, orientation: int) -> Tensor:
    """Stored images uint8 [n, h, w, 3] of one orientation, oriented."""
    dims = [d for d, flip in ((1, _FLIP_Y), (2, _FLIP_X)) if flip[orientation]]
    images = images.flip(dims) if dims else images
    return images.transpose(1, 2) if orientation > 4 else images
