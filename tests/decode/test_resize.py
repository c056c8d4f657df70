"""Resizing equals torch's ``F.interpolate(antialias=True)`` on uint8, wherever the part and its canvas lie."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import gpuaug
from gpuaug.batch import CropWindows
from gpuaug.decode import resize

WAYS = ("bilinear", "bicubic")
FILL = (9, 200, 70)
Pair = tuple[int, int]


@pytest.fixture(params=["compiled", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both who can resize."""
    assert resize.library() is not None
    if request.param == "torch":
        monkeypatch.setattr(resize, "library", lambda: None)
    return request.param


def boxes(to: tuple[int, int], at: tuple[int, int], size: tuple[int, int], kind: str, count: int = 1) -> CropWindows:
    def rows(values: tuple[int, ...]) -> np.ndarray:
        return np.tile(np.array(values, dtype=np.int32), (count, 1))

    return CropWindows(rows((0, 0, 1, 1)), rows(to), rows(at), size, kind, fill=FILL)


def expected(
    part: np.ndarray, to: tuple[int, int], at: tuple[int, int], size: tuple[int, int], kind: str
) -> np.ndarray:
    """torch's pixels, laid on a canvas."""
    image = torch.from_numpy(part.copy()).permute(2, 0, 1)[None].contiguous(memory_format=torch.channels_last)
    resized = F.interpolate(image, size=to, mode=kind, antialias=True)[0].permute(1, 2, 0).numpy()
    if part.shape[:2] == to:
        resized = part
    canvas = np.full((*size, 3), FILL, dtype=np.uint8)
    (y, x), (h, w), (H, W) = at, to, size
    y0, x0, y1, x1 = max(y, 0), max(x, 0), min(y + h, H), min(x + w, W)
    if y0 < y1 and x0 < x1:
        canvas[y0:y1, x0:x1] = resized[y0 - y : y1 - y, x0 - x : x1 - x]
    return canvas


def draw(rng: np.random.Generator, most: int) -> tuple[int, int]:
    """Sides from 1 to `most`, as many small as large."""
    return int(most ** rng.random()), int(most ** rng.random())


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("seed", range(8))
def test_any_part_at_any_size_is_torchs_to_the_last_bit(way: str, kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for turn in range(24):
        h, w = draw(rng, 2500 if turn == 0 else 500)
        image = rng.integers(0, 256, (h + 4, w + 6, 3), dtype=np.uint8)
        if turn % 3 == 0:
            image = np.where(image > 127, 255, 0).astype(np.uint8)  # where rounding and clipping show most
        part = image[1 : 1 + h, 2 : 2 + w]
        part = (part, part[::-1], part[:, ::-1], part.transpose(1, 0, 2), part[::-1, ::-1].transpose(1, 0, 2))[turn % 5]
        to = (
            part.shape[0] if turn % 7 == 1 else draw(rng, 400)[0],
            part.shape[1] if turn % 7 > 4 else draw(rng, 400)[1],
        )
        whole = turn % 2 == 0
        size = to if whole else draw(rng, 300)
        at = (0, 0) if whole else (int(rng.integers(-200, 200)), int(rng.integers(-200, 200)))
        out = np.full((3, *size, 3), 77, dtype=np.uint8)
        resize.views([part], boxes(to, at, size, kind), out, np.array([1]), threads=2)
        np.testing.assert_array_equal(out[1], expected(part, to, at, size, kind), err_msg=f"{part.shape} {to} {at}")
        assert (out[[0, 2]] == 77).all()  # its neighbours' canvases are not its own


@pytest.mark.parametrize("kind", WAYS)
def test_a_batch_is_its_rows_on_any_number_of_threads(way: str, kind: str) -> None:
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 256, (*draw(rng, 300), 3), dtype=np.uint8) for _ in range(37)]
    rows = rng.permutation(40)[:37]
    found = []
    for threads in (1, 2, 7):
        out = np.zeros((40, 64, 48, 3), dtype=np.uint8)
        resize.views(parts, boxes((64, 48), (0, 0), (64, 48), kind, 37), out, rows, threads=threads)
        found.append(out)
    for k, row in enumerate(rows):
        np.testing.assert_array_equal(found[0][row], expected(parts[k], (64, 48), (0, 0), (64, 48), kind))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_nothing_is_read_behind_the_last_pixel_of_a_mapped_file(way: str) -> None:
    libc = ctypes.CDLL(None)
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 9 * page)
    view = np.frombuffer(memory, dtype=np.uint8)
    assert libc.mprotect(ctypes.c_void_p(view.ctypes.data + 8 * page), ctypes.c_size_t(page), 0) == 0
    for h, w in ((1, 1), (3, 5), (50, 30), (70, 100), (2, 700)):
        image = view[8 * page - h * w * 3 : 8 * page].reshape(h, w, 3)
        image[:] = np.arange(h * w * 3).reshape(h, w, 3) % 251
        for to in ((20, 20), (h, 20), (20, w)):
            for kind in WAYS:
                out = np.zeros((1, *to, 3), dtype=np.uint8)
                resize.views([image], boxes(to, (0, 0), to, kind), out, np.array([0]), threads=1)
                np.testing.assert_array_equal(out[0], expected(image, to, (0, 0), to, kind))
    assert libc.mprotect(ctypes.c_void_p(view.ctypes.data + 8 * page), ctypes.c_size_t(page), 3) == 0


def test_without_a_compiler_torch_resizes_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    resize.library.cache_clear()
    part = np.arange(30 * 20 * 3, dtype=np.uint8).reshape(30, 20, 3)
    out = np.zeros((1, 8, 8, 3), dtype=np.uint8)
    try:
        with caplog.at_level(logging.WARNING, logger="gpuaug"):
            resize.views([part], boxes((8, 8), (0, 0), (8, 8), "bilinear"), out, np.array([0]), threads=1)
    finally:
        resize.library.cache_clear()
    assert "resize on cpu is torch's" in caplog.text
    np.testing.assert_array_equal(out[0], expected(part, (8, 8), (0, 0), (8, 8), "bilinear"))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs sched_getaffinity")
def test_the_thread_that_calls_keeps_its_processors():
    images = torch.randint(0, 256, (2, 240, 240, 3), dtype=torch.uint8)
    augment = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(240), ops={"flip": K.RandomHorizontalFlip(p=0.5)})
    before = os.sched_getaffinity(0)
    for epoch in range(300):  # helpers that have ended before they are looked at
        augment(images, seed=0, epoch=epoch, indices=torch.arange(2))
    assert os.sched_getaffinity(0) == before
