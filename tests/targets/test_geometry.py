"""Matrices of targets: each equals what happens to the pixels, and torchvision's boxes."""

from __future__ import annotations

from typing import Any

import kornia
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from gpuaug.batch import CropWindows
from gpuaug.decode.request import oriented_batch
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


def centroid(image: np.ndarray) -> np.ndarray:
    """Centre of mass (x, y) in pixel edges."""
    y, x = np.indices(image.shape) + 0.5
    return np.array([(image * x).sum(), (image * y).sum()]) / image.sum()


def gaussian(height: int, width: int, at: tuple[float, float], sigma: float) -> np.ndarray:
    y, x = np.indices((height, width)) + 0.5
    return np.exp(-((x - at[0]) ** 2 + (y - at[1]) ** 2) / (2 * sigma**2)).astype(np.float32)


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


@pytest.mark.parametrize("exif", range(1, 9))
def test_orientation_is_pillows(exif: int) -> None:
    stored = Image.fromarray(np.arange(15, dtype=np.uint8).reshape(3, 5))
    stored.getexif()[274] = exif
    upright = np.asarray(ImageOps.exif_transpose(stored))
    m = geometry.orientation(np.array([exif]), np.array([[3, 5]]))[0]
    for number in range(15):
        x, y = mapped(m, number % 5 + 0.5, number // 5 + 0.5) - 0.5
        assert upright[int(y), int(x)] == number


def test_each_image_has_its_own_orientation() -> None:
    exif, stored = np.arange(9), np.stack([np.arange(10, 19), np.arange(30, 39)], axis=1)
    whole = np.stack([np.zeros(9), np.zeros(9), stored[:, 1], stored[:, 0]], axis=1)
    upright = geometry.hulls(geometry.orientation(exif, stored), whole)
    sides = np.where((exif > 4)[:, None], stored, stored[:, ::-1])
    np.testing.assert_array_equal(upright, np.concatenate([np.zeros((9, 2)), sides], axis=1))


# -- crops --

# (window, resized, offset): larger, smaller, unequal sides, moved inside the canvas, partly outside it
WINDOWS = [
    ((0, 0, 200, 300), (200, 300), (0, 0)),
    ((20, 40, 160, 220), (320, 440), (0, 0)),
    ((20, 40, 160, 220), (61, 83), (0, 0)),
    ((7, 13, 171, 240), (233, 97), (30, 50)),
    ((31, 52, 141, 203), (97, 250), (-12, -25)),
    ((3, 5, 190, 290), (101, 99), (11, -3)),
]


@pytest.mark.parametrize(("window", "resized", "offset"), WINDOWS)
@pytest.mark.parametrize("resize", ["torch", "pillow"])
def test_crop_moves_points_as_resizing_moves_a_gaussian(
    window: tuple[int, ...], resized: tuple[int, int], offset: tuple[int, int], resize: str
) -> None:
    size, at = (360, 480), (143.3, 97.8)
    top, left, height, width = window
    part = gaussian(200, 300, at, sigma=8)[top : top + height, left : left + width]
    if resize == "torch":
        pixels = torch.from_numpy(part.copy())[None, None]
        small = torch.nn.functional.interpolate(pixels, resized, mode="bilinear", antialias=True)[0, 0].numpy()
    else:
        small = np.asarray(Image.fromarray(part).resize(resized[::-1], Image.Resampling.BILINEAR))
    canvas = np.zeros((size[0] + 200, size[1] + 200), np.float32)  # with a margin of 100
    y, x = offset[0] + 100, offset[1] + 100
    canvas[y : y + resized[0], x : x + resized[1]] = small
    windows = CropWindows(*(np.array([v], dtype=np.int32) for v in (window, resized, offset)), size)
    xy, _ = geometry.points(geometry.crop(windows), np.array([[at]]))
    np.testing.assert_allclose(centroid(canvas[100:-100, 100:-100]), xy[0, 0], atol=0.05)


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


@pytest.mark.parametrize("seed", range(8))
def test_from_indices_moves_points_as_kornia_moves_a_gaussian(seed: int) -> None:
    rng = np.random.default_rng(seed)
    angle, scale = rng.uniform(-3, 3), rng.uniform(0.7, 1.5)
    c, s = scale * np.cos(angle), scale * np.sin(angle)
    m = shift(79, 63) @ np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]]) @ np.diag([rng.choice([-1, 1]), 1, 1])
    m = m @ shift(-76.2, -60.4)
    pixels = torch.from_numpy(gaussian(128, 160, (85.3, 55.6), sigma=5))[None, None]
    warped = kornia.geometry.warp_affine(pixels, torch.from_numpy(m[None, :2]).float(), (128, 160))[0, 0].numpy()
    expected = mapped(geometry.from_indices(m), 85.3, 55.6)
    np.testing.assert_allclose(centroid(warped), expected, atol=0.05)


# -- points, hulls, mirrored --


@given(seed=SEEDS, count=st.integers(1, 5))
def test_points_of_a_product_are_points_of_each_matrix_in_turn(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    xy = rng.uniform(0, 100, (4, 6, 2))
    product, in_turn, in_front = np.eye(3)[None].repeat(4, axis=0), xy, np.ones((4, 6), bool)
    for _ in range(count):
        m = np.stack([(random_perspective if rng.random() < 0.3 else random_affine)(rng) for _ in range(4)])
        product = m @ product
        in_turn, here = geometry.points(m, in_turn)
        in_front &= here
        np.testing.assert_array_equal(np.isfinite(in_turn).all(axis=2), in_front)
    at_once, visible = geometry.points(product, xy)
    assert (visible | ~in_front).all()
    near = in_front & (np.abs(in_turn) < 1e6).all(axis=2)  # a point close to w = 0 has no accurate place
    np.testing.assert_allclose(at_once[near], in_turn[near], rtol=1e-6, atol=1e-6)


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


def test_a_row_does_not_depend_on_the_other_rows() -> None:
    rng = np.random.default_rng(0)
    m, boxes = np.stack([random_perspective(rng) for _ in range(101)]), rng.uniform(0, 100, (101, 4))
    alone = np.concatenate([geometry.hulls(m[i : i + 1], boxes[i : i + 1]) for i in range(101)])
    np.testing.assert_array_equal(geometry.hulls(m, boxes), alone)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e308])
def test_values_without_a_place_give_no_warning(value: float, recwarn: pytest.WarningsRecorder) -> None:
    m = np.array([[[2.0, -3, 1], [1, 1, 5], [1e-3, 1e-3, 1]]])
    geometry.hulls(m, np.array([[value, 0, 1, 1]]))
    assert not recwarn


def test_nothing_in_nothing_out() -> None:
    none = np.zeros((0, 3, 3))
    assert geometry.hulls(none, np.zeros((0, 4))).shape == (0, 4)
    xy, in_front = geometry.points(none, np.zeros((0, 17, 2)))
    assert (xy.shape, xy.dtype, in_front.shape, in_front.dtype) == ((0, 17, 2), np.float64, (0, 17), np.bool_)
    assert geometry.orientation(np.zeros(0, int), np.zeros((0, 2), int)).shape == (0, 3, 3)


@given(seed=SEEDS)
def test_mirrored_is_the_sense_of_a_small_triangle(seed: int) -> None:
    """Also where the origin is far away, which changes the determinant of a perspective's linear part."""
    rng = np.random.default_rng(seed)
    m = shift(*rng.uniform(-900, 900, 2)) @ random_perspective(rng) @ shift(*rng.uniform(-900, 900, 2))
    triangle = rng.uniform(-999, 999, 2) + np.array([[0, 0], [0.01, 0], [0, 0.01]])
    xy, in_front = geometry.points(m[None], triangle[None])
    assume(in_front.all() and abs(np.linalg.det(m)) > 1e-3)
    assert geometry.mirrored(m) == (np.linalg.det(np.diff(xy[0], axis=0)) < 0)


def test_the_linear_part_alone_can_say_the_opposite() -> None:
    m = shift(400, 0) @ np.array([[1, 0, 0], [0, 1, 0], [-0.004, 0, 1]])
    assert np.linalg.det(m[:2, :2]) < 0
    assert not geometry.mirrored(m)


def test_four_quarter_turns_are_the_identity() -> None:
    turn = geometry.orientation(np.array([6]), np.array([[50, 50]]))
    boxes = np.array([[3.0, 7, 20, 41]])
    turned = boxes
    for _ in range(4):
        turned = geometry.hulls(turn, turned)
    np.testing.assert_array_equal(turned, boxes)


# -- torchvision --

SIZE = (120, 160)  # H, W


@pytest.fixture(scope="module")
def peer(v2: Any) -> Any:
    """torchvision.transforms.v2.functional."""
    return v2.functional


def spin(degrees: float) -> np.ndarray:
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    return np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]])


def about_center(m: np.ndarray) -> np.ndarray:
    return shift(SIZE[1] / 2, SIZE[0] / 2) @ m @ shift(-SIZE[1] / 2, -SIZE[0] / 2)


def homography(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The matrix that maps four points to four others, from its eight equations."""
    rows = []
    for (x, y), (u, v) in zip(start, end, strict=True):
        rows += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
    return np.append(np.linalg.solve(np.array(rows), end.reshape(-1)), 1).reshape(3, 3)


def windows(window: list[int], resized: list[int], offset: list[int], size: tuple[int, int]) -> CropWindows:
    return CropWindows(*(np.array([v]) for v in (window, resized, offset)), size)


def affine(rng: np.random.Generator) -> tuple[np.ndarray, dict[str, Any], tuple[int, int]]:
    angle, scale = rng.uniform(-180, 180), rng.uniform(0.5, 1.5)
    translate, shear = rng.uniform(-20, 20, 2), rng.uniform(-30, 30, 2)
    tan_x, tan_y = np.tan(np.radians(shear))
    upright, tilted = np.array([[1, 0, 0], [-tan_y, 1, 0], [0, 0, 1]]), np.array([[1, -tan_x, 0], [0, 1, 0], [0, 0, 1]])
    m = shift(*translate) @ about_center(spin(angle) @ np.diag([scale, scale, 1]) @ upright @ tilted)
    settings = {"angle": angle, "translate": translate.tolist(), "scale": scale, "shear": shear.tolist()}
    return m, settings, SIZE


def perspective(rng: np.random.Generator) -> tuple[np.ndarray, dict[str, Any], tuple[int, int]]:
    """Kornia's matrix is of pixel indices, torchvision applies its own to pixel edges."""
    start = np.array([[0.0, 0], [SIZE[1] - 1, 0], [SIZE[1] - 1, SIZE[0] - 1], [0, SIZE[0] - 1]])
    end = start + rng.uniform(-25, 25, (4, 2))
    m = kornia.geometry.get_perspective_transform(*(torch.from_numpy(p)[None] for p in (start, end)))[0].numpy()
    np.testing.assert_allclose(m, homography(start, end), atol=1e-7)
    settings = {"startpoints": (start + 0.5).tolist(), "endpoints": (end + 0.5).tolist()}
    return geometry.from_indices(m), settings, SIZE


def crop(rng: np.random.Generator) -> tuple[np.ndarray, dict[str, Any], tuple[int, int]]:
    top, left, height, width = 13, 22, int(rng.integers(20, 90)), int(rng.integers(20, 120))
    settings = {"top": top, "left": left, "height": height, "width": width}
    taken = windows([top, left, height, width], [height, width], [0, 0], (height, width))
    return geometry.crop(taken)[0], settings, (height, width)


def pad(rng: np.random.Generator) -> tuple[np.ndarray, dict[str, Any], tuple[int, int]]:
    left, top, right, bottom = (int(n) for n in rng.integers(0, 30, 4))
    size = (SIZE[0] + top + bottom, SIZE[1] + left + right)
    taken = windows([0, 0, *SIZE], [*SIZE], [top, left], size)
    return geometry.crop(taken)[0], {"padding": [left, top, right, bottom]}, size


def resize(rng: np.random.Generator) -> tuple[np.ndarray, dict[str, Any], tuple[int, int]]:
    size = (int(rng.integers(20, 300)), int(rng.integers(20, 300)))
    return geometry.crop(windows([0, 0, *SIZE], [*size], [0, 0], size))[0], {"size": list(size)}, size


def rotate(rng: np.random.Generator) -> tuple[np.ndarray, dict[str, Any], tuple[int, int]]:
    angle = float(rng.choice([rng.uniform(-180, 180), 90, 180]))
    return about_center(spin(-angle)), {"angle": angle}, SIZE  # counter-clockwise, but y points down


def horizontal_flip(rng: np.random.Generator) -> tuple[np.ndarray, dict[str, Any], tuple[int, int]]:
    return geometry.from_indices(np.array([[-1, 0, SIZE[1] - 1], [0, 1, 0], [0, 0, 1]])), {}, SIZE


def vertical_flip(rng: np.random.Generator) -> tuple[np.ndarray, dict[str, Any], tuple[int, int]]:
    return geometry.from_indices(np.array([[1, 0, 0], [0, -1, SIZE[0] - 1], [0, 0, 1]])), {}, SIZE


@pytest.mark.parametrize(
    "case", [horizontal_flip, vertical_flip, crop, pad, resize, affine, rotate, perspective], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("seed", range(4))
def test_hulls_are_torchvisions_boxes(case: Any, seed: int, peer: Any) -> None:
    from torchvision import tv_tensors

    rng = np.random.default_rng(seed)
    m, settings, size = case(rng)
    corner = rng.uniform(0, 90, (40, 2))
    boxes = np.concatenate([corner, corner + rng.uniform(1, 60, (40, 2))], axis=1).clip(0, [*SIZE[::-1]] * 2)
    given_boxes = tv_tensors.BoundingBoxes(torch.from_numpy(boxes), format="XYXY", canvas_size=SIZE)
    expected = getattr(peer, case.__name__)(given_boxes, **settings)
    assert tuple(expected.canvas_size) == size
    clipped = geometry.hulls(m[None].repeat(40, axis=0), boxes).clip(0, [*size[::-1]] * 2)
    np.testing.assert_allclose(clipped, expected.numpy(), atol=1e-4)
