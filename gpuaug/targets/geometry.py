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
    lines = _borders([path[rows] for path in paths], limits)
    polygon = _clipped(np.array([[x1, x2, x2, x1, x1], [y1, y1, y2, y2, y1]]), np.concatenate(lines))
    area[rows] = _area(polygon)
    x, y = _mapped(paths[-1][rows], *polygon)
    left = np.array([x.min(axis=0), y.min(axis=0), x.max(axis=0), y.max(axis=0)]).T
    hull[rows] = left.clip(0, [*limits, *limits])
    return hull, area


def visible_polygons(
    paths: Sequence[Float64], polygons: Float64, parts: Float64, size: tuple[int, int]
) -> tuple[Float64, Float64, Float64]:
    """Clip convex polygons [N, V, 2] to ``parts`` of the first canvas, then at canvas after canvas.

    Args:
        paths: as for :func:`visible`.
        polygons: in pixels of the first canvas.
        parts: (x1, y1, x2, y2) [N, 4] of the first canvas. If one is empty, nothing is left.
        size: (H, W) of each later canvas.

    Returns:
        What is left on the last canvas, [N, W, 2]; the areas [N] of this part and of the whole polygon, both on the
        first canvas. What is left and its area are NaN if nothing is left.
    """
    limits, closed = np.array([size[1], size[0]], dtype=np.float64), polygons.T
    closed = np.concatenate([closed, closed[:, :1]], axis=1)
    x1, y1, x2, y2 = parts.T
    zero, one = np.zeros_like(x1), np.ones_like(x1)
    inside = [[one, zero, -x1], [-one, zero, x2], [zero, one, -y1], [zero, -one, y2]]
    left = _clipped(closed, np.concatenate([np.array(inside), *_borders(paths, limits)]))
    left = left.clip(parts.T[:2, None], parts.T[2:, None])  # rounding errors
    area, low = _area(left), (x1 <= x2) & (y1 <= y2)
    if paths:
        left = np.array(_mapped(paths[-1], *left)).clip(0, limits[:, None, None])
    return left.T, np.where(low, area, np.nan), _area(closed)


def convex(corners: Float64) -> Float64:
    """The convex hulls of four points each [N, 4, 2]: points in order. A hull of three points repeats one."""
    each = corners[:, _ORDERS]  # [N, 7, 4, 2]
    (ax, ay), (bx, by) = np.moveaxis(each[:, :, 2:] - each[:, :, :2], (2, 3), (0, 1))  # the diagonals
    return each[np.arange(len(each)), np.abs(ax * by - ay * bx).argmax(axis=1)]


# of four points, one of these quadrilaterals and triangles is the hull: the one with the largest area
_ORDERS = np.array([[0, 1, 2, 3], [0, 1, 3, 2], [0, 2, 1, 3], [1, 2, 3, 3], [0, 2, 3, 3], [0, 1, 3, 3], [0, 1, 2, 2]])


def rectangles(polygons: Float64) -> Float64:
    """Smallest rectangles of any angle around convex polygons [N, V, 2]; consecutive vertices may be equal.

    Returns:
        [N, 5]: centre x, centre y, width, height, angle. The width is the longer side, along the angle. The angle is
        in radians, from x towards y, in -pi/4 .. 3 pi/4, as in ``xyxyxyxy2xywhr`` of ultralytics. One side of such a
        rectangle is along a side of the polygon.
    """
    x, y = np.ascontiguousarray(polygons.T)  # [V, N]
    origin_x, origin_y = x[0], y[0]
    x, y = x - origin_x, y - origin_y
    dx, dy = np.roll(x, -1, axis=0) - x, np.roll(y, -1, axis=0) - y
    length = np.sqrt(dx * dx + dy * dy)
    there = length > 0
    c, s = (np.divide(d, length, out=np.full_like(d, e), where=there) for d, e in ((dx, 1.0), (dy, 0.0)))
    along, across = c[:, None] * x + s[:, None] * y, c[:, None] * y - s[:, None] * x  # [side, vertex, N]
    ends = np.array([along.min(axis=1), along.max(axis=1), across.min(axis=1), across.max(axis=1)])
    area = np.where(there, (ends[1] - ends[0]) * (ends[3] - ends[2]), np.inf)
    # of equal ones the first, whatever the rounding errors: a right triangle has two
    best = (area <= area.min(axis=0) * (1 + 1e-9)).argmax(axis=0), np.arange(len(polygons))
    c, s, (u1, u2, v1, v2) = c[best], s[best], (end[best] for end in ends)
    u, v, width, height = (u1 + u2) / 2, (v1 + v2) / 2, u2 - u1, v2 - v1
    tall = height > width * (1 + 1e-9)
    angle = (np.arctan2(s, c) + np.where(tall, 0.75, 0.25) * np.pi) % np.pi - np.pi / 4
    sides = np.where(tall, (height, width), (width, height))
    return np.stack([origin_x + u * c - v * s, origin_y + u * s + v * c, *sides, angle], axis=1)


def corners_of(oriented: Float64) -> Float64:
    """The corners [N, 4, 2], in order, of rectangles [N, 5] as :func:`rectangles` returns them."""
    x, y, width, height, angle = oriented.T[:, None]
    u, v = width / 2 * [[-1], [1], [1], [-1]], height / 2 * [[-1], [-1], [1], [1]]
    c, s = np.cos(angle), np.sin(angle)
    return np.stack([x + u * c - v * s, y + u * s + v * c]).T


def _borders(paths: Sequence[Float64], limits: Float64) -> list[Float64]:
    """The sides of each later canvas as lines [4, 3, N] on the first one. ``limits``: width and height."""
    lines, before = list[Float64](), np.eye(3)[..., None]
    for path in paths:
        m = path.transpose(1, 2, 0)
        borders = np.array([m[0], limits[0] * m[2] - m[0], m[1], limits[1] * m[2] - m[1]])
        borders[..., (m == before).all(axis=(0, 1))] = [[0.0], [0.0], [1.0]]  # the canvas before it had the same ones
        lines, before = [*lines, borders], m
    return lines


def _area(polygon: Float64) -> Float64:
    """Areas [N] of polygons [x or y, V, N] whose last vertex is their first."""
    x, y = polygon - polygon[:, :1]
    parts = x[1:-2] * y[2:-1] - x[2:-1] * y[1:-2]  # twice the areas of triangles
    # not np.sum, whose order depends on the number of boxes
    return np.asarray(np.abs(np.add.accumulate(parts)[-1]) / 2)


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
