"""The formulas that stand for torchvision: against torchvision where it imports, else against what they must be."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps

from gpuaug.tools.parity import formulas as F


def noise(height: int = 24, width: int = 31, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


CASES = [
    ("horizontal_flip", {}),
    ("vertical_flip", {}),
    ("rgb_to_grayscale", {"num_output_channels": 3}),
    ("adjust_brightness", {"brightness_factor": 1.23}),
    ("adjust_contrast", {"contrast_factor": 0.63}),
    ("adjust_saturation", {"saturation_factor": 1.7}),
    ("adjust_hue", {"hue_factor": -0.43}),
    ("adjust_gamma", {"gamma": 0.6, "gain": 1.1}),
    ("posterize", {"bits": 3}),
    ("invert", {}),
    ("autocontrast", {}),
    ("equalize", {}),
    ("adjust_sharpness", {"sharpness_factor": 2.2}),
    ("gaussian_blur", {"kernel_size": [5, 9], "sigma": [1.2, 0.7]}),
    ("affine", {"angle": 20, "translate": [3.5, -7], "scale": 1.2, "shear": [10, -5]}),
    ("affine", {"angle": 0, "translate": [0, 0], "scale": 1.0, "shear": [17, 0], "center": [9.0, 6.0]}),
    ("rotate", {"angle": 33}),
    ("elastic", {"displacement": np.random.default_rng(4).normal(0, 0.1, (24, 31, 2))}),
    (
        "perspective",
        {"startpoints": [[0, 0], [30, 0], [30, 23], [0, 23]], "endpoints": [[2, 1], [27, 3], [29, 20], [1, 22]]},
    ),
]


@pytest.mark.parametrize(("name", "given"), CASES, ids=[name for name, _ in CASES])
def test_equals_torchvision(name: str, given: dict) -> None:
    """Where torchvision can be imported; its uint8 sums end in another order, so a cut may fall a level lower."""
    try:
        import torchvision.transforms.v2.functional as theirs
    except Exception as error:
        pytest.skip(f"torchvision cannot be imported: {type(error).__name__}")
    more = {"interpolation": Image.Resampling.BILINEAR} if name in ("affine", "rotate", "perspective") else {}
    image = noise()
    x = torch.from_numpy(image).permute(2, 0, 1).contiguous()
    for ours, other, unit in ((image, x, 1), (F.to_float(image), theirs.to_dtype(x, torch.float32, scale=True), 255)):
        if name == "elastic":
            more = {"displacement": torch.from_numpy(given["displacement"]).float()[None]}
        expected = getattr(theirs, name)(other, **{**given, **more}).permute(1, 2, 0).numpy().astype(np.float64) * unit
        gap = np.abs(getattr(F, name)(ours, **given).astype(np.float64) * unit - expected)
        assert gap.max() <= (1 if unit == 1 else 0.05)
        assert (gap > 0.5).mean() <= 0.01


@pytest.mark.parametrize(("name", "given"), CASES, ids=[name for name, _ in CASES])
def test_uint8_and_float_agree_up_to_rounding(name: str, given: dict) -> None:
    image = noise(seed=3)
    whole, fine = getattr(F, name)(image, **given), getattr(F, name)(F.to_float(image), **given)
    assert whole.dtype == np.uint8
    assert fine.dtype == np.float64
    assert whole.shape == fine.shape == image.shape
    assert fine.min() >= 0
    assert fine.max() <= 1
    # posterize is the one that torchvision defines twice
    limit = 36.0 if name == "posterize" else 2.6
    assert np.abs(fine * 255 - whole).max() <= limit


@given(factor=st.floats(0, 3), seed=st.integers(0, 50))
@settings(max_examples=15, deadline=None)
def test_colour_is_pillows_up_to_rounding(factor: float, seed: int) -> None:
    """ImageEnhance has the same formulas as torchvision; Pillow's gray and mean are rounded."""
    image = noise(seed=seed)
    pillow = Image.fromarray(image)
    for ours, enhance in (
        (F.adjust_brightness(image, factor), ImageEnhance.Brightness),
        (F.adjust_contrast(image, factor), ImageEnhance.Contrast),
        (F.adjust_saturation(image, factor), ImageEnhance.Color),
    ):
        gap = np.abs(ours.astype(int) - np.asarray(enhance(pillow).enhance(factor)).astype(int))
        assert gap.max() <= 2 + abs(1 - factor)


@given(seed=st.integers(0, 100), bits=st.integers(1, 8), threshold=st.integers(0, 255))
@settings(max_examples=15, deadline=None)
def test_tables_are_pillows(seed: int, bits: int, threshold: int) -> None:
    image = noise(40, 50, seed) // 3 + 20
    pillow = Image.fromarray(image)
    np.testing.assert_array_equal(F.posterize(image, bits), np.asarray(ImageOps.posterize(pillow, bits)))
    np.testing.assert_array_equal(F.solarize(image, threshold), np.asarray(ImageOps.solarize(pillow, threshold)))
    np.testing.assert_array_equal(F.equalize(image), np.asarray(ImageOps.equalize(pillow)))
    np.testing.assert_array_equal(F.invert(image), np.asarray(ImageOps.invert(pillow)))
    np.testing.assert_allclose(
        F.autocontrast(image).astype(int), np.asarray(ImageOps.autocontrast(pillow)).astype(int), atol=1
    )


def test_hue_is_a_turn_of_the_cone() -> None:
    pure = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255], [90, 90, 90]]], dtype=np.uint8)
    third = F.adjust_hue(pure, 1 / 3)
    np.testing.assert_array_equal(third, [[[0, 255, 0], [0, 0, 255], [255, 0, 0], [90, 90, 90]]])
    image = F.to_float(noise(), np.float32)
    np.testing.assert_allclose(F.adjust_hue(F.adjust_hue(image, 0.3), -0.3), image, atol=2e-6)


def test_geometry_of_whole_pixels_is_exact() -> None:
    image = noise(20, 20)
    np.testing.assert_array_equal(F.rotate(image, 90), np.rot90(image))
    moved = F.affine(image, 0, (3, -2), 1.0, (0, 0))
    np.testing.assert_array_equal(moved[:18, 3:], image[2:, :17])
    assert not moved[18:].any()
    assert not moved[:, :3].any()
    corners = [[0, 0], [20, 0], [20, 20], [0, 20]]
    mirrored = [[20, 0], [0, 0], [0, 20], [20, 20]]
    np.testing.assert_array_equal(F.perspective(image, corners, mirrored), image[:, ::-1])


def test_neutral_parameters_change_nothing() -> None:
    image = noise()
    for out in (
        F.adjust_brightness(image, 1.0),
        F.adjust_contrast(image, 1.0),
        F.adjust_saturation(image, 1.0),
        F.adjust_hue(image, 0.0),
        F.adjust_sharpness(image, 1.0),
        F.affine(image, 0, (0, 0), 1.0, (0, 0)),
        F.gaussian_blur(image, [3, 3], [0.01, 0.01]),
        F.posterize(image, 8),
        F.to_uint8(F.to_float(image)),
        F.resize(image, image.shape[:2]),
    ):
        np.testing.assert_array_equal(out, image)


def test_blur_and_sharpness_of_a_dot() -> None:
    dot = np.zeros((9, 9, 3))
    dot[4, 4] = 1
    blurred = F.gaussian_blur(dot, [3, 3], [1.0, 1.0])
    side = math.exp(-0.5) / (1 + 2 * math.exp(-0.5))
    assert blurred[4, 3, 0] == pytest.approx(side * (1 - 2 * side))
    assert blurred.sum() == pytest.approx(3)
    assert F.adjust_sharpness(dot, 0.0)[3, 4, 1] == pytest.approx(1 / 13)


@pytest.mark.parametrize("size", [(7, 9), (40, 55), (12, 60), (24, 31)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("antialias", [True, False])
def test_resize_is_torchs_in_float(size: tuple[int, int], interpolation: str, antialias: bool) -> None:
    image = np.asarray(Image.fromarray(noise()).resize((31, 24)))
    x = torch.from_numpy(image.copy()).permute(2, 0, 1)[None].double()
    expected = torch.nn.functional.interpolate(x, size=size, mode=interpolation, antialias=antialias)
    gap = np.abs(
        F.resize(image, size, interpolation, antialias=antialias) - expected[0].permute(1, 2, 0).numpy().clip(0, 255)
    )
    # torch repeats the edge where it does not antialias; the formula leaves taps beyond it out
    inner = gap if antialias or interpolation == "bilinear" else gap[6:-6, 6:-6]
    assert inner.max(initial=0) < 1e-2


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_resize_rounded_between_passes_is_pillows(interpolation: str) -> None:
    photo = noise(60, 60, 5)
    expected = np.asarray(Image.fromarray(photo).resize((35, 35), Image.Resampling[interpolation.upper()])).astype(int)
    gaps = [
        np.abs(np.rint(F.resize(photo, (35, 35), interpolation, between=between)) - expected)
        for between in ("columns", "rows")
    ]
    assert min(g.max() for g in gaps) <= 1
    exact = np.abs(np.rint(F.resize(photo, (35, 35), interpolation)) - expected)
    assert min(g.mean() for g in gaps) < exact.mean() / 4


def test_corners_can_be_aligned() -> None:
    ramp = np.repeat(np.arange(0, 250, 10, dtype=np.uint8)[None, :, None], 3, axis=2).repeat(4, axis=0)
    aligned = F.resize(ramp, (4, 49), "bilinear", half_pixel=False)
    np.testing.assert_allclose(aligned[0, :, 0], np.linspace(0, 240, 49))


def test_normalize() -> None:
    image = noise()
    out = F.normalize(image, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
    np.testing.assert_allclose(out[3, 4], (image[3, 4] / 255 - (0.4, 0.5, 0.6)) / (0.2, 0.25, 0.3))


def test_noise_is_added_and_clipped() -> None:
    image, field = noise(), np.random.default_rng(1).normal(0.02, 0.1, (24, 31, 3))
    fine = F.to_float(image)
    np.testing.assert_array_equal(F.gaussian_noise(fine, field), np.clip(fine + field, 0, 1))
    np.testing.assert_array_equal(F.gaussian_noise(fine, field, clip=False), fine + field)
    whole = F.gaussian_noise(image, field)
    assert whole.dtype == np.uint8
    assert np.abs(whole - F.gaussian_noise(fine, field) * 255).max() < 1
    np.testing.assert_array_equal(F.gaussian_noise(image, field * 0), image)


@pytest.mark.parametrize("size", [(20, 20), (17, 30)])
def test_elastic_moves_by_its_displacement(size: tuple[int, int]) -> None:
    """By whole pixels it is a shift; by anything, what torch's grid_sample makes of the same grid."""
    height, width = size
    image = noise(height, width)
    shift = np.zeros((height, width, 2))
    shift[..., 0], shift[..., 1] = 2 * 3 / width, 2 * -2 / height
    moved = F.elastic(image, shift)
    np.testing.assert_array_equal(moved[2:, : width - 3], image[:-2, 3:])
    field = np.random.default_rng(2).normal(0, 0.1, (height, width, 2))
    x, y = ((2 * np.arange(n) + 1) / n - 1 for n in (width, height))
    grid = torch.from_numpy(np.stack(np.meshgrid(x, y), axis=-1) + field)[None]
    fine = F.to_float(image)
    pixels = torch.from_numpy(fine).permute(2, 0, 1)[None]
    expected = torch.nn.functional.grid_sample(pixels, grid, align_corners=False)
    np.testing.assert_allclose(F.elastic(fine, field), expected[0].permute(1, 2, 0).numpy(), atol=1e-12)


def test_torchvisions_own_displacements() -> None:
    flat = np.ones((30, 40, 2)) * [1.0, -0.5]
    field = F.elastic_displacement(flat, [3.0, 4.0], [2.0, 2.0])
    np.testing.assert_allclose(field, flat * [3 / 30, 4 / 40], atol=1e-12)  # a constant stays, edges are reflected


@given(lam=st.floats(0, 1), x=st.floats(0, 0.999), y=st.floats(0, 0.999), size=st.tuples(*[st.integers(1, 40)] * 2))
@settings(max_examples=50, deadline=None)
def test_boxes_of_cutmix_are_ours(lam: float, x: float, y: float, size: tuple[int, int]) -> None:
    from gpuaug.augment.mix import _box

    height, width = size
    x1, y1, x2, y2 = F.cutmix_box(lam, int(x * width), int(y * height), size)
    assert _box(lam, height, width, y, x) == (y1, x1, y2, x2)


def test_mixes_take_the_one_before() -> None:
    images = np.stack([np.full((4, 6, 3), float(n)) for n in range(3)])
    labels = np.eye(3)
    mixed, soft = F.mixup(images, labels, 0.75)
    np.testing.assert_allclose(mixed[:, 0, 0, 0], [0.5, 0.75, 1.75])
    np.testing.assert_allclose(soft[1], [0.25, 0.75, 0])
    mixed, soft = F.cutmix(images, labels, (1, 2, 4, 4))
    assert (mixed[1, 2:4, 1:4] == 0).all()
    assert mixed[1].sum() == 3 * (24 - 6)
    np.testing.assert_allclose(soft[1], [0.25, 0.75, 0])


def test_mixes_equal_torchvision() -> None:
    """Where torchvision can be imported, with what it drew read off its labels and pixels."""
    try:
        from torchvision.transforms import v2
    except Exception as error:
        pytest.skip(f"torchvision cannot be imported: {type(error).__name__}")
    images = torch.rand(3, 3, 12, 16, dtype=torch.float64)
    for kind in (v2.MixUp, v2.CutMix):
        made, soft = kind(alpha=1.0, num_classes=3)(images, torch.arange(3))
        arrays = images.permute(0, 2, 3, 1).numpy()
        if kind is v2.MixUp:
            mixed, labels = F.mixup(arrays, np.eye(3), float(soft[0, 0]))
        else:
            rows, columns = np.nonzero((made[0] != images[0]).any(dim=0).numpy())
            box = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1) if len(rows) else (0, 0, 0, 0)
            mixed, labels = F.cutmix(arrays, np.eye(3), box)
        np.testing.assert_allclose(made.permute(0, 2, 3, 1).numpy(), mixed, atol=1e-6)
        np.testing.assert_allclose(soft.numpy(), labels, atol=1e-6)


def test_noise_equals_torchvision() -> None:
    """Where torchvision can be imported, whose generator is asked for the same field once more."""
    try:
        import torchvision.transforms.v2.functional as theirs
    except Exception as error:
        pytest.skip(f"torchvision cannot be imported: {type(error).__name__}")
    image = noise()
    x = torch.from_numpy(image).permute(2, 0, 1).contiguous()
    with torch.random.fork_rng(devices=[]):
        for given, ours in ((x, image), (x.float() / 255, F.to_float(image, np.float32))):
            torch.manual_seed(3)
            expected = theirs.gaussian_noise(given, mean=0.02, sigma=0.1)
            torch.manual_seed(3)
            field = (0.02 + 0.1 * torch.randn(given.shape)).permute(1, 2, 0).numpy()
            made = torch.from_numpy(F.gaussian_noise(ours, field)).permute(2, 0, 1)
            np.testing.assert_allclose(made.float().numpy(), expected.float().numpy(), atol=1e-6)
