"""Matrices of targets: each equals what happens to the pixels, and torchvision's boxes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gpuaug.batch import CropWindows
from gpuaug.decode.plan import oriented_batch
from gpuaug.targets import geometry

SEEDS = st.integers(0, 2**32 - 1)


def shift(x: float, y: float) -> np.ndarray:
    return np.array([[1, 0, x], [0, 1, y], [0, 0, 1.0]])


def random_affine(rng: np.random.Generator) -> np.ndarray:
    """Rotation, shear, scale, mirroring and translation about the middle of 100 x 100 pixels."""
    linear = np.eye(3)
    linear[:2, :2] += rng.uniform(-1.5, 1.5, (2, 2))
    return shift(*rng.uniform(0, 100, 2)) @ linear @ shift(-50, -50)


def random_perspective(rng: np.random.Generator) -> np.ndarray:
    """An affine matrix times a perspective that keeps 0..100 in front of the viewer."""
    bent = np.eye(3)
    bent[2, :2] = rng.uniform(-0.004, 0.004, 2)
    return random_affine(rng) @ bent


def mapped(m: np.ndarray, *xy: float) -> np.ndarray:
    """One point, by the formula written out."""
    x, y, w = m @ [*xy, 1.0]
    return np.array([x / w, y / w])


# -- orientation --


@given(exif=st.integers(1, 8), height=st.integers(1, 6), width=st.integers(1, 6))
def test_orientation_moves_points_as_the_decoder_moves_pixels(exif: int, height: int, width: int) -> None:
    numbers = torch.arange(height * width).reshape(1, height, width, 1)
    upright = oriented_batch(numbers, exif)[0, :, :, 0].numpy()
    m = geometry.orientation(np.array([exif]), np.array([[height, width]]))
    y, x = np.divmod(np.arange(height * width), width)
    xy, in_front = geometry.points(m, np.stack([x, y], axis=1)[None] + 0.5)
    x, y = (xy[0] - 0.5).T.astype(int)
    assert in_front.all()
    np.testing.assert_array_equal(xy[0] % 1, 0.5)
    np.testing.assert_array_equal(upright[y, x], np.arange(height * width))


def test_each_image_has_its_own_orientation() -> None:
    exif, stored = np.arange(9), np.stack([np.arange(10, 19), np.arange(30, 39)], axis=1)
    whole = np.stack([np.zeros(9), np.zeros(9), stored[:, 1], stored[:, 0]], axis=1)
    upright = geometry.hulls(geometry.orientation(exif, stored), whole)
    sides = np.where((exif > 4)[:, None], stored, stored[:, ::-1])
    np.testing.assert_array_equal(upright, np.concatenate([np.zeros((9, 2)), sides], axis=1))


# -- crops --


@given(seed=SEEDS)
def test_crop_is_the_formula_of_crop_windows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    window, resized, offset = rng.integers(1, 999, (9, 4)), rng.integers(1, 999, (9, 2)), rng.integers(-99, 99, (9, 2))
    xy = rng.uniform(-999, 999, (9, 5, 2))
    moved, _ = geometry.points(geometry.crop(CropWindows(window, resized, offset, (9, 9))), xy)
    for i in range(9):
        (top, left, height, width), (h, w), (y, x) = window[i], resized[i], offset[i]
        np.testing.assert_allclose(moved[i, :, 0], (xy[i, :, 0] - left) * w / width + x, rtol=1e-9, atol=1e-6)
        np.testing.assert_allclose(moved[i, :, 1], (xy[i, :, 1] - top) * h / height + y, rtol=1e-9, atol=1e-6)


# -- matrices of pixel indices --


@given(seed=SEEDS)
def test_from_indices_shifts_by_half_a_pixel_on_both_sides(seed: int) -> None:
    rng = np.random.default_rng(seed)
    m = np.stack([random_perspective(rng) for _ in range(6)]).reshape(2, 3, 3, 3)
    before = m.copy()
    expected = shift(0.5, 0.5) @ m @ shift(-0.5, -0.5)
    np.testing.assert_allclose(geometry.from_indices(m), expected, rtol=1e-12, atol=1e-10)
    np.testing.assert_array_equal(m, before)


# -- points, hulls, mirrored --


@given(seed=SEEDS)
def test_points_and_hulls_are_the_formula(seed: int) -> None:
    rng = np.random.default_rng(seed)
    m = np.stack([random_perspective(rng) for _ in range(7)])
    boxes = rng.uniform(-200, 300, (7, 4))
    corners = boxes[:, [[0, 1], [2, 1], [2, 3], [0, 3]]]
    xy, in_front = geometry.points(m, corners)
    hulls = geometry.hulls(m, boxes)
    for i in range(7):
        front = [(m[i] @ [*p, 1])[2] > 0 for p in corners[i]]
        assert in_front[i].tolist() == front
        points = np.array([mapped(m[i], *p) for p in corners[i]])
        np.testing.assert_allclose(xy[i][front], points[front], rtol=1e-9)
        assert np.isnan(xy[i][~in_front[i]]).all()
        if all(front):
            np.testing.assert_allclose(hulls[i], [*points.min(axis=0), *points.max(axis=0)], rtol=1e-9)
        else:
            assert np.isnan(hulls[i]).all()


@given(seed=SEEDS)
def test_mirrored_is_the_sense_of_a_small_triangle(seed: int) -> None:
    """Also where the origin is far away, which changes the determinant of a perspective's linear part."""
    rng = np.random.default_rng(seed)
    m = shift(*rng.uniform(-900, 900, 2)) @ random_perspective(rng) @ shift(*rng.uniform(-900, 900, 2))
    triangle = rng.uniform(-999, 999, 2) + np.array([[0, 0], [0.01, 0], [0, 0.01]])
    xy, in_front = geometry.points(m[None], triangle[None])
    assume(in_front.all() and abs(np.linalg.det(m)) > 1e-3)
    assert geometry.mirrored(m) == (np.linalg.det(np.diff(xy[0], axis=0)) < 0)
