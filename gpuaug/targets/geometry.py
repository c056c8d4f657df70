"""Matrices that map points and boxes from an image to the output, and functions that apply the matrices.

Coordinates are pixel edges: pixel i covers i..i+1. A matrix, float64 [3, 3], maps the column vector (x, y, 1).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpuaug.batch import CropWindows, Int64
from gpuaug.decode.plan import FLIPPED

Bool = NDArray[np.bool_]
Float64 = NDArray[np.float64]


def orientation(exif: Int64, stored: Int64) -> Float64:
    """Matrices [B, 3, 3] from stored images to upright images. ``stored``: [B, 2], (height, width)."""
    m = _identities(len(exif))
    flip = FLIPPED[exif, ::-1]  # (x, y); a flip maps x to width - x, or y to height - y
    m[:, (0, 1), (0, 1)] -= 2 * flip
    m[:, :2, 2] = flip * stored[:, ::-1]
    swap = exif > 4
    m[swap, :2] = m[swap, 1::-1]
    return m


def crop(windows: CropWindows) -> Float64:
    """Matrices [B, 3, 3] from upright images to the canvas, which is the output before the operations."""
    m = _identities(len(windows))
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


def points(m: Float64, xy: Float64) -> tuple[Float64, Bool]:
    """Map points ``xy`` [N, K, 2] by matrices ``m`` [N, 3, 3].

    Also return whether each point is in front of the viewer, bool [N, K]. A perspective puts a point behind the viewer
    if the homogeneous coordinate w is not positive. Such a point becomes NaN.
    """
    x, y, in_front = _mapped(m, xy[..., 0].T, xy[..., 1].T)
    return np.array([x, y]).T, in_front.T  # memory order [2, K, N]: the next `_mapped` copies nothing


def hulls(m: Float64, boxes: Float64) -> Float64:
    """Smallest upright boxes [N, 4] around the corners of ``boxes`` [N, 4] after mapping by ``m`` [N, 3, 3].

    A box becomes NaN if a perspective puts one of its corners behind the viewer.
    """
    x1, y1, x2, y2 = boxes.T
    x, y, _ = _mapped(m, np.stack([x1, x2, x2, x1]), np.stack([y1, y1, y2, y2]))
    return np.array([x.min(axis=0), y.min(axis=0), x.max(axis=0), y.max(axis=0)]).T


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


def _mapped(m: Float64, x: Float64, y: Float64) -> tuple[Float64, Float64, Bool]:
    """Map points x and y [K, N] by matrices [N, 3, 3]. The order [K, N] is three times as fast as [N, K]."""
    m = np.ascontiguousarray(m.transpose(1, 2, 0))
    x, y = np.ascontiguousarray(x), np.ascontiguousarray(y)
    with np.errstate(all="ignore"):  # infinite and NaN input gives NaN
        w = m[2, 0] * x + m[2, 1] * y + m[2, 2]
        in_front = w > 0
        w[~in_front] = np.nan
        x, y = ((row[0] * x + row[1] * y + row[2]) / w for row in m[:2])
    return x, y, in_front


def _identities(count: int) -> Float64:
    return np.tile(np.eye(3), (count, 1, 1))
