"""The crop of top-down pose estimation: one person, turned upright by one affine transform."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from gpuaug import checks
from gpuaug.augment.crop import Crop, Float64, Known, Reads, pair
from gpuaug.augment.target_crops import missing
from gpuaug.batch import CropWindows, Int64, Interpolation, Objects
from gpuaug.errors import ConfigError
from gpuaug.targets import geometry

FINEST = 2.0  # largest scale of the decoded part, as a multiple of the output's
MARGIN = 6  # pixels of the decoded part beyond the turned output: the pixels around each position, and rounding
LEAST = np.array([2, 3])  # labelled keypoints of the upper and the lower half that half body needs, as in mmpose
LABELLED = 9  # keypoints of the person that half body needs
HALF_PADDING = 1.5  # side of the box / extent of the half's keypoints


class PersonCrop(Crop):
    """Crops one person with a random place, size and angle, as mmpose's top-down pose estimation does.

    The sample's only object is the person: use ``source=coco source.unit=object``. A sample without an object shows the
    whole image. Works only in a loader. In this order:

    - The box of the person gets ``padding``, as a factor of both sides. A side below 1 pixel becomes 1 pixel first.
    - Half body: with probability ``half_body``, if at least 9 keypoints are labelled. The new box is around the mean of
      the labelled keypoints of one half; its sides are 1.5 times their extent. With probability ``upper_p`` it is the
      upper half. A half with fewer than 2 (upper) or 3 (lower) labelled keypoints is replaced by the other one.
    - The box moves by ``v * shift`` of its sides, its sides become ``1 + v * scale`` times as long, and it turns by
      ``v * rotation`` degrees. Each ``v`` is a standard normal value that is truncated to -1..1.
    - One side is enlarged to the aspect ratio of ``size``. The box is resized to ``size``; outside the image is black.

    As in mmpose without UDP, the centre of the box, in pixel indices, goes to the position (W / 2, H / 2), in pixel
    indices. The image is resized once, without antialiasing, as by mmpose. Only if the box is more than twice as large
    as the output, its part of the image is reduced before, with antialiasing.

    Args:
        size: output (H, W); an int is a square.
        padding: factor of the box's sides.
        half_body: probability of half body; 0: never. It needs keypoints.
        upper: numbers of the keypoints of the upper half; all others are the lower half. The default is COCO's.
        upper_p: probability of the upper half.
        shift: largest shift, as a fraction of the box's sides.
        shift_p: probability of a shift.
        scale: largest change of the box's sides, as a fraction.
        rotation: largest angle in degrees, in both directions.
        rotation_p: probability of a rotation.
        interpolation: ``bilinear`` or ``bicubic``, of the reduction before.

    >>> sorted(PersonCrop((256, 192), half_body=0.3).needs)
    ['boxes', 'keypoints']
    """

    turns = True  # the window is not the output: `CropWindows.rest` maps it there

    def __init__(
        self,
        size: int | Sequence[int],
        *,
        padding: float = 1.25,
        half_body: float = 0.0,
        upper: Sequence[int] = tuple(range(11)),
        upper_p: float = 0.7,
        shift: float = 0.0,
        shift_p: float = 0.3,
        scale: float = 0.0,
        rotation: float = 0.0,
        rotation_p: float = 0.6,
        interpolation: Interpolation = "bilinear",
    ) -> None:
        self.size = pair("size", size)
        self.padding = float(checks.number("padding", padding, 0.1, 10))
        self.half_body = float(checks.number("half_body", half_body, 0, 1))
        self.upper = _numbers(upper)
        self.upper_p = float(checks.number("upper_p", upper_p, 0, 1))
        self.shift = float(checks.number("shift", shift, 0, 1))
        self.shift_p = float(checks.number("shift_p", shift_p, 0, 1))
        self.scale = float(checks.number("scale", scale, 0, 0.9))
        self.rotation = float(checks.number("rotation", rotation, 0, 180))
        self.rotation_p = float(checks.number("rotation_p", rotation_p, 0, 1))
        self.interpolation = checks.one_of("interpolation", interpolation, get_args(Interpolation))

    @property
    def count(self) -> int:  # type: ignore[override]
        """Uniforms: half body, upper; shift in x and y, scale, angle; whether shifted, whether turned."""
        is_random = self.half_body or self.shift * self.shift_p or self.scale or self.rotation * self.rotation_p
        return 8 if is_random else 0

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """``boxes``, and ``keypoints`` with half body."""
        return frozenset({"boxes", "keypoints"} if self.half_body else {"boxes"})

    def _windows(self, u: Float64, heights: Int64, widths: Int64, known: Known, reads: Reads) -> CropWindows:
        if (objects := reads.objects) is None or objects.boxes is None:
            raise missing(self, "boxes", "Use a source with one person per sample and targets=pose, or gpuaug.Resize.")
        u = u if self.count else np.full((len(heights), 8), 0.5)
        m = self._matrices(u, *self._boxes(u, heights, widths, objects))
        height, width = self.size
        reach = geometry.hulls(geometry.inverse(m), np.tile([0.0, 0.0, width, height], (len(m), 1)))
        scale = np.minimum(FINEST * np.hypot(m[:, 0, 0], m[:, 0, 1]), 1)[:, None]
        low, high = np.floor(reach[:, 1::-1] - 1 / scale), np.ceil(reach[:, :1:-1] + 1 / scale)  # (y, x)
        sides = np.stack([heights, widths], axis=1)
        outside = np.any((low >= sides) | (high <= 0), axis=1)
        start = np.clip(low, 0, sides - 1)
        extent = np.clip(high, start + 1, sides) - start
        canvas = (height, width) if not self.rotation * self.rotation_p else (np.hypot(height, width),) * 2
        tile = int(FINEST * canvas[0]) + MARGIN, int(FINEST * canvas[1]) + MARGIN
        resized = np.clip(np.rint(extent * scale), 1, tile)
        offset = np.where(outside[:, None], tile, 0)
        window = np.concatenate([start, extent], axis=1).astype(np.int32)
        placed = resized.astype(np.int32), offset.astype(np.int32)
        made = CropWindows(window, *placed, tile, self.interpolation)
        return replace(made, rest=m @ geometry.inverse(geometry.crop(made)))

    def _boxes(self, u: Float64, heights: Int64, widths: Int64, objects: Objects) -> tuple[Float64, Float64]:
        """Centre and sides (x, y) of each person's box, float64 [B, 2], with padding; after half body."""
        counts = objects.counts
        if (counts > 1).any():
            raise ConfigError(
                f"`augment.crop` (PersonCrop) needs samples of one person. Found: {counts.max()} objects in a sample. "
                "Use `source.unit: object`."
            )
        own, boxes = objects.sample, np.stack([widths * 0, heights * 0, widths, heights], axis=1).astype(np.float64)
        boxes[own] = objects.boxes
        centre, sides = (boxes[:, :2] + boxes[:, 2:]) / 2, np.maximum(boxes[:, 2:] - boxes[:, :2], 1) * self.padding
        if not self.half_body or not len(own):
            return centre, sides
        if (points := objects.keypoints) is None:
            raise missing(self, "keypoints", "Use targets=pose, or `half_body: 0`.")
        if max(self.upper) >= points.shape[1]:
            raise ConfigError(
                f"`upper` must be numbers of keypoints, 0 to {points.shape[1] - 1}. Found: {max(self.upper)}."
            )
        labelled, upper = points[..., 2] > 0, np.isin(np.arange(points.shape[1]), self.upper)
        halves = np.stack([labelled & upper, labelled & ~upper], axis=1)  # [N, 2, K]
        enough = halves.sum(axis=2) >= LEAST
        rows, first = np.arange(len(own)), np.where(u[own, 1] < self.upper_p, 0, 1)
        taken = np.flatnonzero((u[own, 0] < self.half_body) & (labelled.sum(axis=1) >= LABELLED) & enough.any(axis=1))
        half = halves[rows, np.where(enough[rows, first], first, 1 - first)][taken, :, None]
        xy = points[taken, :, :2] - 0.5  # pixel indices
        total = np.add.accumulate(np.where(half, xy, 0), axis=1)[:, -1]  # the order of `sum` depends on the batch
        extent = np.where(half, xy, -np.inf).max(axis=1) - np.where(half, xy, np.inf).min(axis=1)
        centre[own[taken]] = total / half.sum(axis=1)
        sides[own[taken]] = np.maximum(extent, 1) * HALF_PADDING
        return centre, sides

    def _matrices(self, u: Float64, centre: Float64, sides: Float64) -> Float64:
        """From positions in the image to positions in the output, float64 [B, 3, 3]."""
        v = truncated(u[:, 2:6])
        centre = centre + v[:, :2] * self.shift * sides * (u[:, 6:7] < self.shift_p)
        sides = sides * (1 + v[:, 2:3] * self.scale)
        angle = np.deg2rad(v[:, 3] * self.rotation * (u[:, 7] < self.rotation_p))
        height, width = self.size
        factor = np.minimum(width / sides[:, 0], height / sides[:, 1])  # one side is enlarged
        cos, sin = factor * np.cos(angle), factor * np.sin(angle)
        m = np.tile(np.eye(3), (len(u), 1, 1))
        m[:, :2, :2] = np.stack([np.stack([cos, sin], -1), np.stack([-sin, cos], -1)], -2)
        m[:, :2, 2] = np.array([width, height]) / 2 - (m[:, :2, :2] @ centre[..., None])[..., 0]
        return geometry.from_indices(m)


def truncated(u: Float64) -> Float64:
    """Standard normal values, truncated to -1..1, from uniforms in [0, 1)."""
    normal = NormalDist()
    low, high = normal.cdf(-1), normal.cdf(1)
    values = [normal.inv_cdf(low + each * (high - low)) for each in u.reshape(-1).tolist()]
    return np.array(values, dtype=np.float64).reshape(u.shape)


def _numbers(value: Any) -> tuple[int, ...]:
    given: NDArray[Any] | None = None
    several = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    if several and all(type(n) is int and 0 <= n < 4096 for n in value):
        given = np.array(value, dtype=np.int64)
    if given is None or not len(given) or len(np.unique(given)) < len(given):
        raise ConfigError(f"`upper` must be a list of different numbers of keypoints. Found: {value!r:.99}.")
    return tuple(given.tolist())
