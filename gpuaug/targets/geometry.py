"""Matrices in float64 that map points and boxes from an image to the output, and functions that apply the matrices.

Coordinates are continuous pixel edges (x, y): an image spans 0..W x 0..H, and pixel i covers i..i+1. A matrix [3, 3]
maps the column vector (x, y, 1) of the input to the output.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpuaug.batch import CropWindows, Int64

Bool = NDArray[np.bool_]
Float64 = NDArray[np.float64]

# _UPRIGHT[k] is the matrix of EXIF orientation k, from 1 to 8. _UPRIGHT[0] is for images without an orientation.
# Row 0 gives x of the upright image, row 1 gives y. Column 0 multiplies x of the stored image, column 1 multiplies y.
_UPRIGHT = np.array(
    [
        [[1, 0], [0, 1]],
        [[1, 0], [0, 1]],
        [[-1, 0], [0, 1]],
        [[-1, 0], [0, -1]],
        [[1, 0], [0, -1]],
        [[0, 1], [1, 0]],
        [[0, -1], [1, 0]],
        [[0, -1], [-1, 0]],
        [[0, 1], [-1, 0]],
    ],
    dtype=np.float64,
)


def orientation(exif: Int64, stored: Int64) -> Float64:
    """Matrices from stored images to upright images.

    Args:
        exif: int64 [B], EXIF's orientation 1..8. Use 1 where the annotations were made for the upright image.
        stored: int64 [B, 2], (height, width) of the stored image.

    Returns:
        float64 [B, 3, 3].

    >>> orientation(np.array([2]), np.array([[100, 80]]))[0].tolist()  # mirrored: x' = 80 - x
    [[-1.0, 0.0, 80.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    m = _identities(len(exif))
    m[:, :2, :2] = _UPRIGHT[exif]
    # an axis that is mirrored starts at the far side of the stored image, so the length of this side is added
    m[:, :2, 2] = (np.maximum(-m[:, :2, :2], 0) * np.asarray(stored)[:, None, ::-1]).sum(axis=2)
    return m


def crop(windows: CropWindows) -> Float64:
    """Matrices float64 [B, 3, 3] from upright images to the canvas (the output before the operations).

    >>> halved = CropWindows(np.array([[0, 20, 40, 60]]), np.array([[20, 30]]), np.array([[0, 5]]), (20, 40))
    >>> crop(halved)[0].tolist()  # x' = (x - 20) / 2 + 5
    [[0.5, 0.0, -5.0], [0.0, 0.5, 0.0], [0.0, 0.0, 1.0]]
    """
    m = _identities(len(windows))
    scale = windows.resized / windows.window[:, 2:]  # (y, x)
    start = windows.offset - windows.window[:, :2] * scale
    for axis, row in ((1, 0), (0, 1)):
        m[:, row, row], m[:, row, 2] = scale[:, axis], start[:, axis]
    return m


def from_indices(m: Float64) -> Float64:
    """Convert matrices [.., 3, 3] from pixel indices to pixel edges: ``T(1/2) m T(-1/2)``, where T is a translation.

    Kornia's matrices use pixel indices: the centre of pixel i is at i. In pixel edges, it is at i + 1/2.

    >>> from_indices(np.diag([-1.0, 1.0, 1.0]) + [[0, 0, 79], [0, 0, 0], [0, 0, 0]])[0].tolist()  # a flip of 80 pixels
    [-1.0, 0.0, 80.0]
    """
    m = np.array(m, dtype=np.float64)
    m[..., 2] -= (m[..., 0] + m[..., 1]) / 2
    m[..., :2, :] += m[..., 2:, :] / 2
    return m


def points(m: Float64, xy: Float64) -> tuple[Float64, Bool]:
    """Map points by one matrix per row.

    Args:
        m: float64 [N, 3, 3].
        xy: float64 [N, K, 2].

    Returns:
        The mapped points, float64 [N, K, 2], and bool [N, K]: whether each point is in front of the viewer. A
        perspective can put a point behind the viewer (its homogeneous coordinate w is <= 0). Such a point becomes NaN.

    >>> points(np.diag([2.0, 2.0, 1.0])[None], np.array([[[3.0, 4.0]]]))[0].tolist()
    [[[6.0, 8.0]]]
    """
    x, y, in_front = _mapped(m, xy[..., 0].T, xy[..., 1].T)
    return np.array([x, y]).T, in_front.T  # in memory [2, K, N], which is faster for the next call


def hulls(m: Float64, boxes: Float64) -> Float64:
    """Smallest upright boxes around the mapped corners of boxes.

    Args:
        m: float64 [N, 3, 3].
        boxes: float64 [N, 4], (x1, y1, x2, y2).

    Returns:
        float64 [N, 4]. A box becomes NaN if a perspective puts one of its corners behind the viewer.

    >>> hulls(np.array([[[0.0, -1, 100], [1, 0, 0], [0, 0, 1]]]), np.array([[10.0, 20, 30, 60]])).tolist()
    [[40.0, 10.0, 80.0, 30.0]]
    """
    x1, y1, x2, y2 = boxes.T
    x, y, _ = _mapped(m, np.stack([x1, x2, x2, x1]), np.stack([y1, y1, y2, y2]))
    return np.array([x.min(axis=0), y.min(axis=0), x.max(axis=0), y.max(axis=0)]).T


def mirrored(m: Float64) -> Bool:
    """Whether matrices [.., 3, 3] mirror an image: bool [..].

    The sign of the determinant of the 3 x 3 matrix is right at every point in front of the viewer. The determinant of
    the upper left 2 x 2 matrix can be wrong, because under a perspective it depends on the position of the origin.

    >>> mirrored(np.stack([np.diag([-1.0, 1.0, 1.0]), np.diag([-1.0, -1.0, 1.0])])).tolist()
    [True, False]
    """
    return np.asarray(np.linalg.det(m) < 0)


def inverse(m: Float64) -> Float64:
    """Invert matrices [.., 3, 3]. A matrix without an inverse becomes NaN.

    The inverse of an affine matrix has exactly (0, 0, 1) as its last row.

    >>> inverse(np.diag([2.0, 4.0, 1.0])).tolist()
    [[0.5, 0.0, 0.0], [0.0, 0.25, 0.0], [0.0, 0.0, 1.0]]
    """
    a, b, c = np.moveaxis(np.asarray(m, dtype=np.float64), -2, 0)
    adjugate = np.stack([np.cross(b, c), np.cross(c, a), np.cross(a, b)], axis=-1)
    determinant = (c * adjugate[..., :, 2]).sum(axis=-1)
    with np.errstate(all="ignore"):
        return np.asarray(
            np.where(determinant == 0, np.nan, 1)[..., None, None] * adjugate / determinant[..., None, None]
        )


def _mapped(m: Float64, x: Float64, y: Float64) -> tuple[Float64, Float64, Bool]:
    """Map points, given as x and y [K, N], by matrices [N, 3, 3]. The order [K, N] is three times as fast as [N, K]."""
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
