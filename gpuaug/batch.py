"""The types that stages pass to each other: encoded images, targets, faults and crop windows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.errors import printable

Images = Tensor | list[Tensor]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Interpolation = Literal["nearest", "bilinear", "bicubic"]  # `nearest` only for batches of tensors
# the types of images, by torch's names, with the value that is white
WHITES = {"uint8": 255.0, "uint16": 65535.0, "float16": 1.0, "bfloat16": 1.0, "float32": 1.0}
Fill = int | tuple[int, ...]  # 0..255, the same for all channels or one for each


@dataclass(frozen=True, slots=True)
class Fault:
    """A sample of a batch that could not be read, decoded or encoded.

    Attributes:
        row: the sample's row in the batch.
        stage: ``read``, ``decode`` or ``encode``.
        reason: the cause of the failure. Control characters are escaped.
        size: number of encoded bytes of the sample.
        head: the first of these bytes.
    """

    row: int
    stage: str
    reason: str
    size: int = 0
    head: bytes = b""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", printable(self.reason))


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The annotations of one image: a mask, objects, or a label of the whole image.

    If ``fractions`` is False, coordinates are in pixels: x is from 0 to W, and y is from 0 to H. For boxes, pixel i
    covers i..i+1. For keypoints, see :class:`Keypoints`.

    Attributes:
        mask: the encoded mask, as in its file.
        boxes: [n, 4], (x1, y1, x2, y2) of each object; None: those around ``corners``.
        corners: [n, 4, 2], (x, y) of the corners of each oriented box, in any order.
        labels: [n], class number of each object.
        keypoints: [n, K, 3], (x, y, visibility 0..2) of each object.
        crowd: [n], True if one annotation covers many objects.
        area: [n], area of each object in pixels.
        ids: [n], id of each annotation in its file.
        size: (height, width) of the image that the annotations were made for; None: not known.
        fractions: True: boxes, corners and keypoints are fractions of the annotated image's sides, as in YOLO's files.
        label: label of the whole image.

    >>> Target(boxes=[[10, 20, 30, 60]], labels=[3], size=(100, 80)).labels
    [3]
    """

    mask: bytes | memoryview | None = None
    boxes: Any = None
    labels: Any = None
    keypoints: Any = None
    crowd: Any = None
    area: Any = None
    ids: Any = None
    size: tuple[int, int] | None = None
    fractions: bool = False
    label: Any = None
    corners: Any = None
    # True: one of gpuaug's sources has checked the objects. `dataclasses.replace` does not copy it
    _checked: bool = field(default=False, init=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Objects:
    """The objects of a batch of B images, in the order of their samples. See also :class:`Target`.

    A worker sends this table, with float32 coordinates. Geometry uses float64.

    Attributes:
        sample: [N], position of each object's image in the batch; ascending.
        boxes: [N, 4], (x1, y1, x2, y2); None: no boxes.
        keypoints: [N, K, 3], (x, y, visibility); None: no keypoints.
        labels, crowd: [N].
        area: [N], as the source gave it, in pixels of the source's image; NaN: not known.
        ids: [N]; -1: not known.
        corners: [N, V, 2], the vertices (x, y) of convex polygons; V is 4 until a canvas has clipped them. None: the
            run has no oriented boxes.
        visible: [N], the share of each box that is left; None: nothing has moved the boxes yet.
        sizes: [B, 2], (height, width) of the image that the annotations were made for; 0: not known.
        fractions: [B], whether coordinates are fractions of the image's sides; None: False for all images.
    """

    sample: Int64
    boxes: NDArray[Any] | None
    labels: Int64
    keypoints: NDArray[Any] | None
    crowd: NDArray[np.bool_]
    area: NDArray[np.float32]
    ids: Int64
    sizes: Int32
    fractions: NDArray[np.bool_] | None = None
    corners: NDArray[Any] | None = None
    visible: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.sample)

    @property
    def counts(self) -> Int64:
        """Number of objects of each image, int64 [B]."""
        return np.bincount(self.sample, minlength=len(self.sizes)).astype(np.int64, copy=False)

    @property
    def offsets(self) -> Int64:
        """Image i has the objects ``offsets[i]:offsets[i + 1]``, int64 [B + 1]."""
        return np.cumsum([0, *self.counts], dtype=np.int64)

    def take(self, keep: NDArray[np.bool_] | Int64) -> Objects:
        """Return some of the objects. ``keep``: bool [N], or indices."""
        columns = {name: column for name in OBJECT_COLUMNS if (column := getattr(self, name)) is not None}
        return replace(self, **{name: column[keep] for name, column in columns.items()})

    def rows(self, keep_rows: Int64) -> Objects:
        """Return the objects of some images. ``keep_rows`` is ascending; image ``keep_rows[i]`` becomes image i."""
        kept = self.take(np.isin(self.sample, keep_rows))
        fractions = None if self.fractions is None else self.fractions[keep_rows]
        sample = np.searchsorted(keep_rows, kept.sample)
        return replace(kept, sample=sample, sizes=self.sizes[keep_rows], fractions=fractions)


# one entry per object
OBJECT_COLUMNS = ("sample", "boxes", "labels", "keypoints", "crowd", "area", "ids", "corners", "visible")
LONGEST = 2**16  # patches of a sequence


NO_TILE = -(2**62)


class Tiles(NamedTuple):
    """Which samples the outputs of a batch are put together from. Each sample has a number, its ``key``."""

    keys: Int64  # [T], of the samples of the batch and then of others that are read for them
    of: Int64  # [B, K], keys of the tiles of each output, also of samples of earlier batches; NO_TILE: none
    oldest: int | None  # later batches may use these keys, from `oldest` to the largest of the B samples; None: none


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedBatch:
    """The encoded images of a batch. All tensors are on the CPU.

    Attributes:
        images: B arrays, uint8 ``[n]``: the bytes of each image. They may be the memory of the source or of a worker.
        masks: the bytes of each mask, in the same form; empty if the run has no masks.
        labels: int64 ``[B]``, float32 ``[B, K]``, or None.
        indices: int64 ``[B]``, index of each sample in the source.
        repeats: int64 ``[B]``, how often the sample occurred earlier in the epoch.
        valid: bool ``[B]``; False for a repeated sample that only fills the last batch.
        faults: samples that could not be read. Their images have no bytes.
        targets: annotations of the samples; None if the run has no targets.
        extra: B extra values, as the source gave them; None if no sample of the batch has one.
        tiles: how the outputs are put together from the samples of this and earlier batches; None: each is its own.

    >>> import torch
    >>> images = tuple(np.frombuffer(data, dtype=np.uint8) for data in (b"first", b"second"))
    >>> rows = torch.arange(2)
    >>> batch = EncodedBatch(images=images, labels=None, indices=rows, repeats=rows * 0, valid=rows >= 0)
    >>> batch.images[1].tobytes(), batch.nbytes
    (b'second', 11)
    """

    images: tuple[NDArray[np.uint8], ...]
    masks: tuple[NDArray[np.uint8], ...] = ()
    labels: Tensor | None
    indices: Tensor
    repeats: Tensor
    valid: Tensor
    faults: tuple[Fault, ...] = ()
    targets: Objects | None = None
    extra: list[Any] | None = None
    tiles: Tiles | None = None

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def nbytes(self) -> int:
        """Number of bytes of all images and masks."""
        return sum(map(len, (*self.images, *self.masks)))


@dataclass(frozen=True)
class CropWindows:
    """For one view: the window of each image, and the place of each window on the canvas.

    Attributes:
        window: [B, 4], (top, left, height, width) in the image after EXIF orientation. The window is inside the image,
            and its sides are at least 1 pixel.
        resized: [B, 2], (h, w) of the window after resizing.
        offset: [B, 2], (y, x) of the resized window's top left corner on the canvas. Pixels outside the canvas are cut
            off.
        size: (H, W) of the canvas, and of the view if there is no ``rest``.
        interpolation: ``nearest``; or ``bilinear`` or ``bicubic``, with antialiasing.
        fill: value of canvas pixels that the resized window does not cover.
        rest: [B, 3, 3], from positions on the canvas to positions in the view; None: the canvas is the view.
    """

    window: Int32
    resized: Int32
    offset: Int32
    size: tuple[int, int]
    interpolation: Interpolation = "bilinear"
    fill: Fill = 0
    rest: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.window)

    def take(self, rows: Int64) -> CropWindows:
        """The windows of some rows."""
        parts = {name: getattr(self, name) for name in ("window", "resized", "offset", "rest")}
        return replace(self, **{name: part[rows] for name, part in parts.items() if part is not None})
