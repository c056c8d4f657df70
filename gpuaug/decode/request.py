"""Data that the decoding stages share: headers of a batch, rows to decode, and EXIF orientation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.batch import CropWindows, Fault, Int32, Int64
from gpuaug.decode.header import RAW_HEADER
from gpuaug.errors import ConfigError, shown_size

Pixels = NDArray[np.uint8]

# Chunk size per thread on the CPU. DALI allocates the pixels of a chunk in one block, and malloc keeps several old
# blocks. Without chunks, the process holds 450 MiB after 300 batches of 64 files (700 x 525, 30 MiB per batch). With
# chunks, it holds 60 to 90 MiB. The CPU time is the same.
SAMPLES_PER_THREAD, BYTES_PER_THREAD = 8, 8 << 20


class Route(IntEnum):
    """The decoder of a row."""

    BAD = 0  # no decoder: the row has a fault
    DALI = 1
    PILLOW = 2
    REFUSED = 3  # Pillow, because DALI refused the image
    RAW = 4  # no decoder: the bytes are the pixels
    VALUES = 5  # `values`, for pixels=raw


@dataclass(frozen=True)
class HeaderInfo:
    """Header information of a batch. Each row is a sample.

    Attributes:
        codec: [B], one of `files.CODECS`; "" if the sample cannot be decoded.
        height, width: [B], after orientation; 0 if the sample cannot be decoded.
        orientation: [B], EXIF's 1..8.
        faults: rows that cannot be decoded. Rows that could not be read are only in ``EncodedBatch.faults``.
        route: [B], the :class:`Route` of each row.
        memory: [B], bytes that Pillow takes to decode the image.
        image: [B], which rows have the same bytes, and are decoded once: the number of the first of them.
        encoded: [B], the bytes to decode, uint8 arrays: the batch's own, except for a JPEG to which an end marker was
            added, or a PNG from which long texts and profiles were removed.
    """

    codec: list[str]
    height: Int64
    width: Int64
    orientation: Int64
    faults: list[Fault]
    route: NDArray[np.int8]
    memory: Int64
    image: Int64
    encoded: list[Pixels]

    def __len__(self) -> int:
        return len(self.codec)

    @property
    def swapped(self) -> NDArray[np.bool_]:
        """Whether orientation swaps height and width, bool [B]."""
        return self.orientation > 4

    @property
    def stored(self) -> Int64:
        """(height, width) before orientation, [B, 2]."""
        upright = np.stack([self.height, self.width], axis=1)
        return np.where(self.swapped[:, None], upright[:, ::-1], upright)

    def take(self, rows: Int64) -> HeaderInfo:
        """The information on some rows, without faults."""
        codec, encoded = [self.codec[row] for row in rows], [self.encoded[row] for row in rows]
        arrays: dict[str, Any] = {k: v[rows] for k, v in vars(self).items() if isinstance(v, np.ndarray)}
        return replace(self, codec=codec, encoded=encoded, faults=[], **arrays)


@dataclass(frozen=True)
class DecodeRequest:
    """The rows of a batch to decode, and the regions that the views need.

    Attributes:
        rows: [n], row numbers in the batch.
        headers: of these rows.
        union: [n, 4], before orientation, the smallest box that holds all windows of a row's image: of all its views,
            and of all rows that have this image.
        windows: per view, n windows after orientation.
        parts: per view, [n, 4], the same windows before orientation.
    """

    rows: Int64
    headers: HeaderInfo
    union: Int32
    windows: list[CropWindows]
    parts: list[Int32]

    @classmethod
    def of(cls, headers: HeaderInfo, windows: Sequence[CropWindows]) -> DecodeRequest:
        """Ask for all rows that can be decoded. ``windows``: B rows for each view. There is at least one view."""
        rows = np.flatnonzero(headers.route != Route.BAD)
        headers, taken = headers.take(rows), [b.take(rows) for b in windows]
        h, w, stored, orientation = headers.height, headers.width, headers.stored, headers.orientation
        corner = np.stack([b.window[:, :2] for b in taken]).min(axis=0)
        end = np.stack([b.window[:, :2] + b.window[:, 2:] for b in taken]).max(axis=0)
        union = np.concatenate([corner, end - corner], axis=1)
        inside = (corner >= 0).all(axis=1) & (union[:, 2:] > 0).all(axis=1) & (end <= np.stack([h, w], 1)).all(axis=1)
        if not inside.all():
            k = int((~inside).argmax())
            raise ConfigError(
                f"A crop's windows must lie inside the image. Found: {union[k].tolist()} (top, left, height, width) in "
                f"an image of {shown_size(h[k], w[k])}. Clip them in the crop's `windows()` method."
            )
        _, first, image = np.unique(headers.image, return_index=True, return_inverse=True)
        if len(first) < len(rows):
            low, high = corner[first], end[first]
            np.minimum.at(low, image, corner)
            np.maximum.at(high, image, end)
            union = np.concatenate([low, high - low], axis=1)[image]
        parts = [to_stored(b.window, stored, orientation) for b in taken]
        return cls(rows, headers, to_stored(union, stored, orientation), taken, parts)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def largest_view(self) -> Int64:
        """Number of pixels of each image's largest window after resizing, [n]."""
        return np.max([b.resized.astype(np.int64).prod(axis=1) for b in self.windows], axis=0)

    def take(self, keep: Int64) -> DecodeRequest:
        """A request for the rows at positions ``keep`` of this request."""
        windows, parts = [b.take(keep) for b in self.windows], [part[keep] for part in self.parts]
        return DecodeRequest(self.rows[keep], self.headers.take(keep), self.union[keep], windows, parts)

    def sharing(self, part: DecodeRequest, regions: Sequence[Pixels]) -> tuple[DecodeRequest, list[Pixels]]:
        """The rows of this request with the images of ``part``, and the region of each. ``regions``: of ``part``."""
        of = dict(zip(part.headers.image.tolist(), regions, strict=True))
        rows = np.flatnonzero(np.isin(self.headers.image, list(of)))
        return self.take(rows), [of[image] for image in self.headers.image[rows].tolist()]

    def raw_region(self, k: int) -> Pixels:
        """The pixels of row ``k`` inside its ``union`` box, without a copy. Only for rows with `Route.RAW`."""
        y, x, height, width = self.union[k].tolist()
        return self.headers.encoded[k][RAW_HEADER:].reshape(*self.headers.stored[k], 3)[y : y + height, x : x + width]

    def view_parts(self, view: int, regions: Sequence[Pixels]) -> list[Pixels]:
        """The view's region of every row, upright. ``regions``: the pixels of each row's ``union`` box."""
        corner = self.parts[view][:, :2] - self.union[:, :2]
        edges = np.concatenate([corner, corner + self.parts[view][:, 2:]], axis=1).tolist()
        rows = zip(regions, edges, self.headers.orientation.tolist(), strict=True)
        return [oriented(region[top:bottom, left:right], o) for region, (top, left, bottom, right), o in rows]


def num_parts(samples: int, size: float, threads: int) -> int:
    """Number of chunks in which the CPU decodes ``samples`` images, which together have ``size`` bytes of pixels."""
    return max(1, min(samples // (SAMPLES_PER_THREAD * threads), int(size // (BYTES_PER_THREAD * threads))))


def split_by_bytes(rows: Int64, sizes: Int64, max_bytes: int) -> list[Int64]:
    """Split rows into groups of at most ``max_bytes``. Row k has ``sizes[k]`` bytes. A larger row is its own group."""
    groups: list[Int64] = []
    while len(rows):
        count = max(1, int(np.searchsorted(np.cumsum(sizes[rows]), max_bytes, side="right")))
        groups.append(rows[:count])
        rows = rows[count:]
    return groups


def decode_fault(row: int, encoded: Pixels, reason: str) -> Fault:
    return Fault(row, "decode", reason, len(encoded), encoded[:16].tobytes())


# -- orientation: flip the stored image; if the EXIF number is above 4, also transpose the result --

# FLIPPED[k]: whether EXIF number k, from 1 to 8, flips (y, x)
FLIPPED = np.array([(0, 0), (0, 0), (0, 1), (1, 1), (1, 0), (0, 0), (1, 0), (1, 1), (0, 1)], dtype=bool)


def to_stored(box: Int32, size: Int64, orientation: Int64) -> Int32:
    """Convert windows [n, 4] of upright images to windows of stored images. ``size`` [n, 2]: stored (height, width)."""
    swap = (orientation > 4)[:, None]
    corner = np.where(swap, box[:, 1::-1], box[:, :2])
    extent = np.where(swap, box[:, :1:-1], box[:, 2:])
    corner = np.where(FLIPPED[orientation], size - corner - extent, corner)
    return np.concatenate([corner, extent], axis=1).astype(np.int32)


def oriented(image: Pixels, orientation: int) -> Pixels:
    """A stored image or region turned upright, without a copy: uint8 [h, w, 3]."""
    if orientation == 1:
        return image
    y, x = FLIPPED[orientation].tolist()
    image = image[:: -1 if y else 1, :: -1 if x else 1]
    return image.transpose(1, 0, 2) if orientation > 4 else image


def oriented_batch(images: Tensor, orientation: int) -> Tensor:
    """Upright images, from stored images uint8 [n, h, w, 3] of the same EXIF orientation."""
    dims = (1 + np.flatnonzero(FLIPPED[orientation])).tolist()
    images = images.flip(dims) if dims else images
    return images.transpose(1, 2) if orientation > 4 else images
