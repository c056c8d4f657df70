"""Matrices that map points and boxes from an image to the output, and functions that apply the matrices.

Coordinates are pixel edges: pixel i covers i..i+1. A matrix, float64 [3, 3], maps the column vector (x, y, 1).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpuaug.batch import CropWindows, Int64
from gpuaug.decode.request import FLIPPED

Bool = NDArray[np.bool_]
Float64 = NDArray[np.float64]


def orientation(exif: Int64, stored: Int64) -> Float64:
    """Matrices [B, 3, 3] from stored images to upright images. ``stored``: [B, 2], (height, width)."""
    m = np.tile(np.eye(3), (len(exif), 1, 1))
    flip = FLIPPED[exif, ::-1]  # (x, y); a flip maps x to width - x, or y to height - y
    m[:, (0, 1), (0, 1)] -= 2 * flip
    m[:, :2, 2] = flip * stored[:, ::-1]
    swap = exif > 4
    m[swap, :2] = m[swap, 1::-1]
    return m


def crop(windows: CropWindows) -> Float64:
    """Matrices [B, 3, 3] from upright images to the canvas, which is the output before the operations."""
    m = np.tile(np.eye(3), (len(windows), 1, 1))
    scale = windows.resized / windows.window[:, 2:]  # (y, x)
    start = windows.offset - windows.window[:, :2] * scale
    for axis, row in ((1, 0), (0, 1)):
        m[:, row, row], m[:, row, 2] = scale[:, axis], start[:, axis]
    return m


def from_indices(m: Float64) -> Float64:
    """Convert matrices [.., 3, 3] from pixel indices to pixel edges: ``T(1/2) m T(-1/2)``, where T is a translation.

    In Kornia's matrices, the centre of pixel i is at i, not at i + 1/2.
    """
    m = np.array(m, dtype=np.float64)
    m[..., 2] -= (m[..., 0] + m[..., 1]) / 2
    m[..., :2, :] += m[..., 2:, :] / 2
    return m


def points(m: Float64, xy: Float64) -> Float64:
    """Map points ``xy`` [N, K, 2] by matrices ``m`` [N, 3, 3]. A point behind the viewer becomes NaN.

    A perspective puts a point behind the viewer if the homogeneous coordinate w is not positive.
    """
    return np.array(_mapped(m, xy[..., 0].T, xy[..., 1].T)).T  # in memory [2, K, N]: the next `_mapped` copies nothing


def hulls(m: Float64, boxes: Float64) -> Float64:
    """Smallest upright boxes [N, 4] around the corners of ``boxes`` [N, 4] after mapping by ``m`` [N, 3, 3].

    A box becomes NaN if a perspective puts one of its corners behind the viewer; see :func:`visible`.
    """
    x1, y1, x2, y2 = boxes.T
    x, y = _mapped(m, np.stack([x1, x2, x2, x1]), np.stack([y1, y1, y2, y2]))
    return np.array([x.min(axis=0), y.min(axis=0), x.max(axis=0), y.max(axis=0)]).T


def visible(paths: Sequence[Float64], boxes: Float64, size: tuple[int, int]) -> tuple[Float64, Float64]:
    """Clip ``boxes`` [N, 4] as polygons at canvas after canvas.

    Args:
        paths: for each later canvas, matrices [N, 3, 3] from the first canvas to it.
        boxes: in pixels of the first canvas, and inside it. The result for a box with x2 < x1 or y2 < y1 is undefined.
        size: (H, W) of each canvas.

    Returns:
        The smallest upright boxes [N, 4] around what is left on the last canvas, and the area [N] of this part on the
        first canvas. Both are NaN if nothing is left. A part behind the viewer is lost.
    """
    limits = np.array([size[1], size[0]], dtype=np.float64)
    area, hull = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]), boxes
    inside = np.ones(len(boxes), dtype=bool)
    for path in paths:
        hull = hulls(path, boxes)
        inside &= both(hull[:, :2] >= 0) & both(hull[:, 2:] <= limits)
    rows = np.flatnonzero(~inside & both(boxes[:, :2] <= boxes[:, 2:]))
    if not len(rows):
        return hull, area
    x1, y1, x2, y2 = boxes[rows].T
    lines, before = list[Float64](), np.eye(3)[..., None]
    for path in paths:
        m = path[rows].transpose(1, 2, 0)
        borders = np.array([m[0], limits[0] * m[2] - m[0], m[1], limits[1] * m[2] - m[1]])
        borders[..., (m == before).all(axis=(0, 1))] = [[0.0], [0.0], [1.0]]  # the canvas before it had the same ones
        lines, before = [*lines, borders], m
    polygon = _clipped(np.array([[x1, x2, x2, x1, x1], [y1, y1, y2, y2, y1]]), np.concatenate(lines))
    x, y = polygon - polygon[:, :1]
    parts = x[1:-2] * y[2:-1] - x[2:-1] * y[1:-2]  # twice the areas of triangles
    area[rows] = np.abs(np.add.accumulate(parts)[-1]) / 2  # not np.sum, whose order depends on the number of boxes
    x, y = _mapped(paths[-1][rows], *polygon)
    left = np.array([x.min(axis=0), y.min(axis=0), x.max(axis=0), y.max(axis=0)]).T
    hull[rows] = left.clip(0, [*limits, *limits])
    return hull, area


def _clipped(polygon: Float64, lines: Float64) -> Float64:
    """Clip convex polygons to the sides ``a x + b y + c >= 0`` of lines [L, 3, N], line after line.

    ``polygon`` is [x or y, V, N]. Its last vertex is its first. A polygon with few vertices repeats the first one. An
    empty polygon becomes NaN.

    Each round clips every polygon at the next line that cuts it. So there are about two rounds, not L. `take` is four
    times as fast as an index of two arrays.
    """
    (_, vertices, count), number = polygon.shape, np.arange(len(lines))[:, None]
    rows, last = np.arange(count), np.full(count, -1)
    out = np.concatenate([polygon, polygon[:, :1].repeat(len(lines), axis=1)], axis=1)
    while True:
        d = lines[:, :1] * polygon[0] + lines[:, 1:2] * polygon[1] + lines[:, 2:]  # [L, V, n]
        cut = ~(d >= 0).all(axis=1) & (number > last)
        (going,) = np.nonzero(cut.any(axis=0) & (polygon[0, 0] == polygon[0, 0]))  # NaN: nothing is left to clip
        if not len(going):
            return out[:, :vertices]
        last = cut.take(going, axis=1).argmax(axis=0)
        at = (last * d.shape[1] + np.arange(d.shape[1])[:, None]) * len(rows) + going
        polygon = _halved(polygon.take(going, axis=2), d.take(at))
        rows, lines, vertices = rows[going], lines.take(going, axis=2), max(vertices, polygon.shape[1])
        out[:, : polygon.shape[1], rows], out[:, polygon.shape[1] :, rows] = polygon, polygon[:, :1]


def _halved(polygon: Float64, d: Float64) -> Float64:
    """Clip polygons [2, V, N] to where ``d`` [V, N] is at least 0: one step of Sutherland and Hodgman."""
    kept, start = d >= 0, polygon[:, :-1]
    there = np.empty((2 * len(d) - 2, d.shape[1]), dtype=bool)
    there[::2], there[1::2] = kept[:-1], kept[:-1] != kept[1:]  # vertices, and the points where edges cross the line
    points = np.empty((2, *there.shape))
    with np.errstate(all="ignore"):  # an edge along the line crosses it nowhere
        points[:, ::2], points[:, 1::2] = start, start + d[:-1] / (d[:-1] - d[1:]) * (polygon[:, 1:] - start)
    count = there.sum(axis=0)
    points[..., count == 0] = np.nan
    order = there.argmax(axis=0)[:, None].repeat(max(count.max(), 1) + 1, axis=1)  # [N, vertices]
    order[np.arange(order.shape[1]) < count[:, None]] = there.T.nonzero()[1]
    return points.reshape(2, -1).take(order.T * len(count) + np.arange(len(count)), axis=1)


def mirrored(m: Float64) -> Bool:
    """Whether matrices [.., 3, 3] mirror an image, bool [..]."""
    # with a perspective, the upper left 2 x 2 matrix alone is not enough
    return np.asarray(np.linalg.det(m) < 0)


def inverse(m: Float64) -> Float64:
    """Invert matrices [.., 3, 3]. A matrix without an inverse becomes NaN.

    The inverse of an affine matrix has exactly (0, 0, 1) as its last row.
    """
    a, b, c = np.moveaxis(np.asarray(m, dtype=np.float64), -2, 0)
    adjugate = np.stack([np.cross(b, c), np.cross(c, a), np.cross(a, b)], axis=-1)
    determinant = (c * adjugate[..., :, 2]).sum(axis=-1)
    with np.errstate(all="ignore"):
        return np.asarray(adjugate / np.where(determinant == 0, np.nan, determinant)[..., None, None])


def both(true: Bool) -> Bool:
    """Whether x and y are both True. This is faster than ``all``."""
    return true[..., 0] & true[..., 1]


def _mapped(m: Float64, x: Float64, y: Float64) -> tuple[Float64, Float64]:
    """Map points x and y [K, N] by matrices [N, 3, 3]. The order [K, N] is three times as fast as [N, K]."""
    m = np.ascontiguousarray(m.transpose(1, 2, 0))
    x, y = np.ascontiguousarray(x), np.ascontiguousarray(y)
    with np.errstate(all="ignore"):  # infinite and NaN input gives NaN
        w = m[2, 0] * x + m[2, 1] * y + m[2, 2]
        w[~(w > 0)] = np.nan
        return (m[0, 0] * x + m[0, 1] * y + m[0, 2]) / w, (m[1, 0] * x + m[1, 1] * y + m[1, 2]) / w
