"""Crops against torchvision's algorithms, written out per image with the same uniforms."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpuaug
from gpuaug.augment.crop import RandomCrop, RandomResizedCrop, Resize, ResizeCenterCrop
from gpuaug.batch import CropWindows
from gpuaug.errors import ConfigError

SIDES = st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), min_size=1, max_size=20)
SMALL = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=6)
some = settings(max_examples=60, deadline=None)


def uniforms(crop, count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**24, (count, crop.count)).astype(np.float32) * np.float32(2**-24)


def arrays(sides) -> tuple[np.ndarray, np.ndarray]:
    h, w = np.array(sides, dtype=np.int64).reshape(-1, 2).T
    return h, w


def valid(found: CropWindows, h: np.ndarray, w: np.ndarray) -> None:
    top, left, height, width = found.window.astype(np.int64).T
    for start, extent, side in ((top, height, h), (left, width, w)):
        assert (start >= 0).all()
        assert (extent >= 1).all()
        assert (start + extent <= side).all()
    assert (found.resized >= 1).all()
    assert found.window.dtype == found.resized.dtype == found.offset.dtype == np.int32


def torchvision_resized_crop(u, height, width, scale, ratio):
    """``RandomResizedCrop.get_params`` of torchvision 0.26, its random calls replaced by uniforms."""

    def randint(value, high):
        return min(int(value * high), high - 1)

    area = height * width
    log_ratio = math.log(ratio[0]), math.log(ratio[1])
    for k in range(10):
        target_area = area * (scale[0] + u[2 + 2 * k] * (scale[1] - scale[0]))
        aspect_ratio = math.exp(log_ratio[0] + u[3 + 2 * k] * (log_ratio[1] - log_ratio[0]))
        w = round(math.sqrt(target_area * aspect_ratio))
        h = round(math.sqrt(target_area / aspect_ratio))
        if 0 < w <= width and 0 < h <= height:
            return randint(u[0], height - h + 1), randint(u[1], width - w + 1), h, w
    in_ratio = width / height
    if in_ratio < min(ratio):
        w = width
        h = round(w / min(ratio))
    elif in_ratio > max(ratio):
        h = height
        w = round(h * max(ratio))
    else:
        w = width
        h = height
    return (height - h) // 2, (width - w) // 2, h, w


@settings(max_examples=25, deadline=None)  # of up to 20 images
@given(SIDES, st.integers(0, 10**6), st.sampled_from([((0.08, 1.0), (3 / 4, 4 / 3)), ((0.9, 1.0), (1.5, 3.0))]))
def test_resized_crop_is_torchvisions(sides, seed, ranges):
    scale, ratio = ranges
    crop = RandomResizedCrop(224, scale=scale, ratio=ratio)
    h, w = arrays(sides)
    u = uniforms(crop, len(h), seed)
    found = crop.windows(u, h, w)
    for k in range(len(h)):
        want = torchvision_resized_crop([float(x) for x in u[k]], int(h[k]), int(w[k]), scale, ratio)
        if want[2] >= 1 and want[3] >= 1:  # a one pixel wide fallback rounds to nothing, there torchvision fails
            assert tuple(found.window[k].tolist()) == want
    assert (found.resized == 224).all()
    assert (found.offset == 0).all()


@some
@given(SIDES, st.integers(0, 10**6))
def test_every_box_lies_inside(sides, seed):
    h, w = arrays(sides)
    small = min(h.min(), w.min())
    crops = [
        RandomResizedCrop((64, 96)),
        RandomResizedCrop(64, ratio=(20.0, 30.0)),
        RandomCrop(int(small) + 3, padding=2),
        ResizeCenterCrop(256, 224),
        Resize((31, 17)),
    ]
    for crop in crops:
        valid(crop.windows(uniforms(crop, len(h), seed), h, w), h, w)


@some
@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 900), st.integers(1, 900))
def test_resize_to_a_limit_is_torchvisions(height, width, size, more):
    """``_compute_resized_output_size`` of torchvision; it fails where a side becomes 0, and gpuaug keeps one pixel."""
    found = Resize(size, max_size=size + more).windows(None, *arrays([(height, width)]))
    shorter, longer = size, int(size * max(height, width) / min(height, width))
    if longer > size + more:
        shorter, longer = max(int((size + more) * shorter / longer), 1), size + more
    want = (shorter, longer) if height <= width else (longer, shorter)
    assert tuple(found.resized[0].tolist()) == found.size == want
    assert found.window[0].tolist() == [0, 0, height, width]


@some
@given(SMALL, st.integers(0, 10**6), st.sampled_from([0, 4, (3, 1), (1, 2, 3, 4)]))
def test_random_crop_is_torchvisions(sides, seed, padding):
    h, w = arrays(sides)
    left, top, right, bottom = {1: lambda p: p * 4, 2: lambda p: p * 2, 4: lambda p: p}[
        1 if isinstance(padding, int) else len(padding)
    ]((padding,) if isinstance(padding, int) else tuple(padding))
    size = int((h + top + bottom).min()), int((w + left + right).min())
    crop = RandomCrop(size, padding=padding, fill=7)
    u = uniforms(crop, len(h), seed)
    found = crop.windows(u, h, w)
    for k in range(len(h)):
        image = np.arange(1, h[k] * w[k] + 1).reshape(h[k], w[k])
        padded = np.pad(image, ((top, bottom), (left, right)), constant_values=7)
        i = min(int(float(u[k, 0]) * (padded.shape[0] - size[0] + 1)), padded.shape[0] - size[0])
        j = min(int(float(u[k, 1]) * (padded.shape[1] - size[1] + 1)), padded.shape[1] - size[1])
        assert (placed(image, found, k) == padded[i : i + size[0], j : j + size[1]]).all()


def placed(image: np.ndarray, boxes, k: int) -> np.ndarray:
    """The rule of `CropWindows`, for views that are not resized."""
    canvas = np.full(boxes.size, boxes.fill, dtype=np.int64)
    top, left, h, w = boxes.window[k].tolist()
    y, x = boxes.offset[k].tolist()
    assert (h, w) == tuple(boxes.resized[k].tolist())
    b0, b1 = max(x, 0), min(x + w, boxes.size[1])
    if b0 < b1:
        for a in range(max(y, 0), min(y + h, boxes.size[0])):
            canvas[a, b0:b1] = image[top + a - y, left + b0 - x : left + b1 - x]
    return canvas


@pytest.mark.parametrize(
    ("shape", "resize", "resized"),
    [
        ((375, 500), 256, (256, 341)),  # int(256 * 500 / 375) truncates 341.33
        ((500, 333), 256, (384, 256)),
        ((100, 65_000), 224, (224, 145_600)),
        ((375, 500), (100, 50), (100, 50)),
        ((375, 500), [256], (256, 341)),
    ],
)
def test_resize_is_torchvisions(shape, resize, resized):
    h, w = arrays([shape])
    assert tuple(ResizeCenterCrop(resize, 224).windows(None, h, w).resized[0].tolist()) == resized
    found = Resize(resize).windows(None, h, w)
    assert tuple(found.resized[0].tolist()) == found.size == resized


def test_center_crop_is_torchvisions():
    """torchvision pads by (size - height) // 2 in front, or crops from int(round((height - size) / 2.0))."""
    for height, size in itertools.product(range(1, 12), repeat=2):
        found = ResizeCenterCrop(height, size).windows(None, *arrays([(height, height)]))
        front = (size - height) // 2 if size > height else -round((height - size) / 2.0)
        assert found.offset[0].tolist() == [front] * 2


def test_a_sample_without_size_disturbs_nobody():
    h, w = arrays([(375, 500), (0, 0), (375, 500)])
    for crop in (RandomResizedCrop(224), RandomCrop(300), ResizeCenterCrop(256, 224), Resize(256), Resize((8, 9))):
        u = uniforms(crop, 3, 0)
        found = crop.windows(u, h, w)
        alone = crop.windows(u[:1], h[:1], w[:1])
        assert found.size == alone.size
        assert (found.window[0] == alone.window[0]).all()
        assert crop.windows(u[:0], h[:0], w[:0]).window.shape == (0, 4)


def test_one_size_per_batch():
    with pytest.raises(ConfigError, match=r"`size`.*341 x 256 .*\(H, W\)"):
        Resize(256).windows(None, *arrays([(375, 500), (256, 256)]))
    with pytest.raises(ConfigError, match=r"`size`.*200 x 100 .*padding"):
        RandomCrop(128).windows(np.zeros((2, 2), np.float32), *arrays([(300, 300), (100, 200)]))
    with pytest.raises(ConfigError, match=r"`u` must be float32 \[1, 22\]"):
        RandomResizedCrop(8).windows(None, *arrays([(300, 300)]))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: RandomResizedCrop(0), r"`size` must be a positive int.*Found: 0"),
        (lambda: RandomResizedCrop((1, 2, 3)), r"`size`.*Found: \(1, 2, 3\)"),
        (lambda: RandomResizedCrop(True), "`size`.*Found: True"),
        (lambda: RandomResizedCrop(8, scale=(1.2, 0.5)), r"`scale` must satisfy 0 < min <= max <= 1. Found: \(1.2"),
        (lambda: RandomResizedCrop(8, scale=0.5), "`scale`.*Found: 0.5"),
        (lambda: RandomResizedCrop(8, ratio=(0, 1)), r"`ratio` must satisfy 0 < min <= max. Found: \(0, 1\)"),
        (lambda: RandomResizedCrop(8, ratio=(1, float("inf"))), "`ratio`.*Found"),
        (lambda: RandomResizedCrop(8, interpolation="area"), "`interpolation`.*Found: 'area'"),
        (lambda: RandomCrop(8, padding=-1), "`padding`.*Found: -1"),
        (lambda: RandomCrop(8, padding=(1, 2, 3)), r"`padding`.*Found: \(1, 2, 3\)"),
        (lambda: RandomCrop(8, fill=256), "`fill`.*Found: 256"),
        (lambda: RandomCrop(8, fill=()), r"`fill` must be .* or one for each channel.*Found: \(\)"),
        (lambda: gpuaug.RandAugment(fill=(1, 2)), r"`fill` must be .* or 3 of them.*Found: \(1, 2\)"),
        (lambda: RandomCrop(8, fill=(1, 2, 256)), r"`fill`.*Found: \(1, 2, 256\)"),
        (lambda: Resize((8, 8), max_size=9), r"`max_size` must be above `size`.*size \(8, 8\), max_size 9"),
        (lambda: Resize(8, max_size=8), "`max_size` must be above `size`.*size 8, max_size 8"),
        (lambda: Resize(8, max_size=9.5), "`max_size` must be a whole number.*Found: 9.5"),
        (lambda: ResizeCenterCrop(0, 8), "`resize`.*Found: 0"),
        (lambda: Resize(1.5), "`size`.*Found: 1.5"),
    ],
)
def test_errors_say_what_was_found(make, text):
    with pytest.raises(ConfigError, match=text):
        make()
