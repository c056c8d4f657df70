"""Masks are sampled once, by nearest neighbour, with the same bits from C++, numpy and torch."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from pictures import photograph
from PIL import Image
from torch.nn import functional as F

from gpuaug.batch import CropWindows
from gpuaug.targets import masks

Pair = tuple[int, int]


@pytest.fixture(params=["compiled", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setattr(masks, "library", lambda: None)
    elif masks.library() is None:
        pytest.skip("no compiler")
    return request.param


def shapes(size: Pair = (251, 187)) -> np.ndarray:
    """A label map with the shapes of a photograph: seven classes and the border 255; uint8 [h, w]."""
    labels = np.asarray(photograph("coffee", size).convert("L")) // 40
    return np.where(np.asarray(photograph("coffee", size))[:, :, 0] > 200, 255, labels).astype(np.uint8)


def windows(window: Any, resized: Any, offset: Any, size: Pair) -> CropWindows:
    rows = (np.array(x, dtype=np.int32).reshape(-1, n) for x, n in ((window, 4), (resized, 2), (offset, 2)))
    return CropWindows(*rows, size)


def whole(size: Pair, to: Pair | None = None, count: int = 1) -> CropWindows:
    """The whole image, resized to the canvas."""
    return windows([(0, 0, *size)] * count, [to or size] * count, [(0, 0)] * count, to or size)


def warp(inverse: np.ndarray) -> masks.Warp:
    """No canvas but the first loses anything."""
    return masks.Warp(inverse, np.zeros((len(inverse), 0, 15)))


def placed(parts: list, rows: CropWindows, inverse: Any = None, *, fill: int = 255, **more: Any) -> Any:
    inverse = warp(inverse) if isinstance(inverse, np.ndarray) else inverse
    dtype = np.int32 if any(part is not None and part.dtype == np.int32 for part in parts) else np.uint8
    out = np.full((len(parts), *rows.size), 77, dtype=more.pop("dtype", dtype))
    masks.place(parts, rows, out, warp=inverse, fill=fill, **more)
    return out


def position(m: list[list[float]], i: int, j: int) -> tuple[float, float]:
    """Where a matrix maps the centre of pixel (i, j) to; NaN behind the viewer."""
    x, y, z = ((a * (j + 0.5) + b * (i + 0.5)) + c for a, b, c in m)
    return (x / z, y / z) if z > 0 else (math.nan, math.nan)


def written_out(mask: np.ndarray, rows: CropWindows, k: int, moved: masks.Warp | None, fill: int) -> np.ndarray:
    """The formula of the module, pixel by pixel, with Python's integers and floats."""
    (H, W), (top, left, height, width) = rows.size, rows.window[k].tolist()
    (h, w), (y0, x0) = rows.resized[k].tolist(), rows.offset[k].tolist()
    m = (np.eye(3) if moved is None else moved.inverse[k]).tolist()
    out = np.full((H, W), fill, dtype=np.int64)
    for i in range(H):
        for j in range(W):
            x, y = position(m, i, j)
            if 0 <= x < W and 0 <= y < H:
                row, column = math.floor(y) - y0, math.floor(x) - x0
                if 0 <= row < h and 0 <= column < w:
                    at = top + (2 * row + 1) * height // (2 * h), left + (2 * column + 1) * width // (2 * w)
                    out[i, j] = mask[at]
            for area in [] if moved is None else moved.areas[k].tolist():
                x, y = position([area[:3], area[3:6], area[6:9]], i, j)
                x1, y1, x2, y2, inside, value = area[9:]
                if (x1 <= x < x2 and y1 <= y < y2) == inside:
                    out[i, j] = value
    return out


# -- place: crop and resize


def noise(rng: np.random.Generator, size: Pair, dtype: Any = np.uint8) -> np.ndarray:
    return rng.integers(0, 250 if dtype == np.uint8 else 2**31 - 1, size).astype(dtype)


@pytest.mark.parametrize("to", [(480, 480), (520, 693), (224, 224), (100, 750), (375, 500), (37, 41), (1, 1), (750, 3)])
def test_crop_and_resize_is_pillows_and_torchs_but_for_ties(way: str, to: Pair) -> None:
    mask = noise(np.random.default_rng(0), (375, 500))
    for top, left, height, width in ((0, 0, 375, 500), (13, 40, 300, 401), (374, 0, 1, 500)):
        part = mask[top : top + height, left : left + width]
        rows = windows((top, left, height, width), to, (0, 0), to)
        ours = placed([mask], rows)[0]
        pillow = np.asarray(Image.fromarray(part).resize(to[::-1], Image.Resampling.NEAREST))
        exact = F.interpolate(torch.from_numpy(part.copy())[None, None], size=to, mode="nearest-exact")[0, 0].numpy()
        rows_off, columns_off = (  # not on the edge of two pixels, where float rounding decides for the others
            (2 * np.arange(n) + 1) * extent % (2 * n) != 0 for n, extent in zip(to, part.shape, strict=True)
        )
        for other in (pillow, exact):
            np.testing.assert_array_equal(ours[rows_off][:, columns_off], other[rows_off][:, columns_off])
        assert (ours != exact).mean() <= 0.002


def random_row(rng: np.random.Generator, size: Pair, canvas: Pair) -> tuple[tuple, tuple, tuple]:
    h, w = (int(rng.integers(1, side + 1)) for side in size)
    window = (int(rng.integers(0, size[0] - h + 1)), int(rng.integers(0, size[1] - w + 1)), h, w)
    if rng.random() < 0.2:  # far away and huge
        far = tuple(int(rng.integers(-(2**31), 2**31 - 1)) for _ in range(2))
        return window, tuple(int(x) for x in rng.integers(1, 2**31 - 1, 2)), far
    to = (h, w) if rng.random() < 0.2 else tuple(int(x) for x in rng.integers(1, 2 * max(canvas), 2))
    return window, to, tuple(int(rng.integers(-side, side)) for side in canvas)


def random_inverse(rng: np.random.Generator, size: Pair) -> np.ndarray:
    """Flips, shifts, scalings, quarter turns, affine and perspective ones, singular ones, and NaN and infinity."""
    (H, W), m = size, np.eye(3)
    kind = int(rng.integers(0, 10))
    if kind in (1, 2):
        m[0, 0], m[0, 2] = -1, W
    if kind in (2, 3):
        m[1, 1], m[1, 2] = -1, H
    if kind == 4:
        m[[0, 1], [0, 1]], m[:2, 2] = rng.uniform(-2, 2, 2), rng.uniform(-W, W, 2)
    if kind == 5:
        m = np.array([[0, -1, W], [1, 0, 0], [0, 0, 1.0]])
    if kind >= 6:
        m[:2, :2] += rng.normal(0, 0.5, (2, 2))
        m[:2, 2] = rng.normal(0, max(size) / 4, 2)
    if kind >= 8:
        m[2] += rng.normal(0, 0.02, 3)
    if kind == 9:
        m[tuple(rng.integers(0, 3, 2))] = rng.choice([0, np.nan, np.inf, -np.inf, 1e300, -1, 1e-310])
        if rng.random() < 0.5:
            m[int(rng.integers(0, 3))] = 0
    return m


def random_warp(rng: np.random.Generator, size: Pair, count: int) -> masks.Warp:
    """Up to three areas per mask, some without any pixel."""
    areas = np.empty((count, 3, 15))
    areas[..., :9] = [[random_inverse(rng, size).reshape(9) for _ in range(3)] for _ in range(count)]
    areas[..., 9:13] = rng.integers(-5, max(size) + 5, (count, 3, 4))
    areas[..., 13], areas[..., 14] = rng.random((count, 3)) < 0.5, rng.integers(0, 255, (count, 3))
    areas[rng.random((count, 3)) < 0.3] = masks._NO_AREA
    areas[0, :, 9:13], areas[0, :, 13] = [0, 0, *size[::-1]], 0  # canvases
    return masks.Warp(np.stack([random_inverse(rng, size) for _ in range(count)]), areas)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
@pytest.mark.parametrize("seed", range(2))
def test_every_window_and_matrix_is_the_formula_in_cpp_numpy_and_torch(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    compiled = masks.library()
    for _ in range(6):
        size, count = (int(rng.integers(1, 40)), int(rng.integers(1, 40))), 12
        sources = [(int(rng.integers(1, 50)), int(rng.integers(1, 50))) for _ in range(count)]
        parts = [noise(rng, source, dtype) for source in sources]
        rows = windows(*zip(*(random_row(rng, source, size) for source in sources), strict=True), size)
        moved = random_warp(rng, size, count)
        for m in (None, warp(moved.inverse), moved):
            expected = np.stack([written_out(part, rows, k, m, 254) for k, part in enumerate(parts)])
            for native in (compiled, None):
                monkeypatch.setattr(masks, "library", lambda native=native: native)
                for out in (dtype, np.int32, np.int64):
                    made = placed(parts, rows, m, fill=254, threads=2, dtype=out)
                    np.testing.assert_array_equal(made, expected)
        canvas = placed(parts, rows, fill=254)
        for kind in (torch.uint8, torch.int32, torch.int64):
            if kind != torch.uint8 or dtype == np.uint8:
                warped = masks.gather(torch.from_numpy(canvas).to(kind), moved, 254)
                assert warped.dtype == kind
                np.testing.assert_array_equal(warped.numpy(), expected)


@pytest.mark.parametrize("seed", range(2))
def test_large_warps_are_equal_in_cpp_and_torch(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, count = (151, 217), 5
    parts = [noise(rng, (375, 500)) for _ in range(count)]
    rows = windows(*zip(*(random_row(rng, (375, 500), size) for _ in parts), strict=True), size)
    moved = random_warp(rng, size, count)
    expected = placed(parts, rows, moved)
    canvas = torch.from_numpy(placed(parts, rows))
    assert torch.equal(masks.gather(canvas, moved, 255), torch.from_numpy(expected))
    monkeypatch.setattr(masks, "_PIXELS_AT_ONCE", 1000)  # parts of two rows
    assert torch.equal(masks.gather(canvas, moved, 255), torch.from_numpy(expected))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gathers_the_same_bits_and_does_not_wait() -> None:
    rng = np.random.default_rng(0)
    canvas = torch.from_numpy(noise(rng, (200, 123, 231)))
    moved = random_warp(rng, (123, 231), 200)
    on_device = canvas.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        warped = masks.gather(on_device, moved, 255)
        affine = masks.gather(on_device, warp(np.tile(np.eye(3), (200, 1, 1))), 255)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(warped.cpu(), masks.gather(canvas, moved, 255))
    assert torch.equal(affine, on_device)


def test_gather_leaves_its_input_and_takes_any_strides() -> None:
    canvas = torch.from_numpy(noise(np.random.default_rng(0), (2, 9, 9)))
    before, quarter = canvas.clone(), np.array([[[0, -1, 9], [1, 0, 0], [0, 0, 1.0]]] * 2)
    warped = masks.gather(canvas.transpose(1, 2), warp(quarter), 0)
    assert torch.equal(canvas, before)
    assert torch.equal(warped, masks.gather(canvas.transpose(1, 2).contiguous(), warp(quarter), 0))
    assert masks.gather(canvas[:0], warp(quarter[:0]), 0).shape == (0, 9, 9)


def test_masks_of_any_strides_and_types_in_one_batch(way: str) -> None:
    rng = np.random.default_rng(2)
    base = noise(rng, (40, 40))
    parts = [
        base,
        base[::-1],
        base.T,
        base[:, ::-1],
        base[::2, ::3],
        base.astype(np.int32),
        None,
        np.asfortranarray(base),
    ]
    parts += [np.frombuffer(base.tobytes(), np.uint8).reshape(40, 40)]  # read-only
    rows = windows([(1, 2, 17, 11)] * len(parts), [(23, 31)] * len(parts), [(-3, 4)] * len(parts), (20, 30))
    ours = placed(parts, rows, fill=9, threads=3)
    assert ours.dtype == np.int32
    for k, part in enumerate(parts):
        expected = np.full((20, 30), 9) if part is None else written_out(part, rows, k, None, 9)
        np.testing.assert_array_equal(ours[k], expected)


def test_a_batch_is_its_rows_with_any_number_of_threads() -> None:
    rng, size, count = np.random.default_rng(3), (60, 50), 33
    parts = [noise(rng, (int(rng.integers(1, 90)), int(rng.integers(1, 90)))) for _ in range(count)]
    rows = windows(*zip(*(random_row(rng, part.shape, size) for part in parts), strict=True), size)
    inverse = np.stack([random_inverse(rng, size) for _ in range(count)])
    alone = [
        placed([part], windows(rows.window[k], rows.resized[k], rows.offset[k], size), inverse[k : k + 1])[0]
        for k, part in enumerate(parts)
    ]
    for threads in (1, 4, 64):
        np.testing.assert_array_equal(placed(parts, rows, inverse, threads=threads), alone)
    with ThreadPoolExecutor(4) as pool:
        for batch in pool.map(lambda _: placed(parts, rows, inverse, threads=2), range(8)):
            np.testing.assert_array_equal(batch, alone)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"parts": [np.zeros((9, 9), np.uint8)]}, "not inside masks of"),
        ({"rows": windows((0, 0, 0, 5), (4, 4), (0, 0), (4, 4))}, "not inside"),
        ({"rows": windows((0, 0, 5, 5), (4, 0), (0, 0), (4, 4))}, "not inside"),
        ({"rows": windows((-1, 0, 5, 5), (4, 4), (0, 0), (4, 4))}, "not inside"),
        ({"rows": windows((2**31 - 1, 0, 2**31 - 1, 5), (4, 4), (0, 0), (4, 4))}, "not inside"),
    ],
)
def test_what_would_read_foreign_memory_is_refused(change: dict, fact: str) -> None:
    given = {"parts": [np.zeros((10, 10), np.uint8)], "rows": whole((10, 10), (4, 4)), **change}
    with pytest.raises(ValueError, match=fact):
        placed(given.pop("parts"), given.pop("rows"), given.pop("inverse", None), **given)
