"""Batches of any type and any number of channels: fused equals Kornia, types agree, and what cannot be is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from torch import Tensor

import gpuaug
from gpuaug.errors import ConfigError

TYPES = [torch.uint8, torch.uint16, torch.float16, torch.bfloat16, torch.float32]
CHANNELS = [1, 3, 4, 13]
# operations that take any image, with and without values outside 0..1
OPS: dict[str, Any] = {
    "flip": K.RandomHorizontalFlip(),
    "vflip": K.RandomVerticalFlip(),
    "affine": K.RandomAffine(20.0, translate=(0.1, 0.1), p=0.7),
    "perspective": K.RandomPerspective(0.4, p=0.7),
    "brightness": K.RandomBrightness((0.7, 1.3), p=0.7),
    "jitter": K.ColorJitter(brightness=0.4, contrast=0.4, p=0.8),
    "gamma": K.RandomGamma((0.7, 1.4), p=0.7),
    "invert": K.RandomInvert(p=0.5),
    "solarize": K.RandomSolarize(p=0.5),
    "sharpness": K.RandomSharpness(0.5, p=0.7),
    "autocontrast": K.RandomAutoContrast(p=0.7),
    "blur": K.RandomGaussianBlur(5, (0.5, 2.0), p=0.7),
    "noise": K.RandomGaussianNoise(std=0.1, p=0.7),
    "erase": K.RandomErasing(p=0.7, value=0.3),
    "box": gpuaug.RandomErasing(0.7, mean=0.4, std=0.2),
}
GEOMETRY = {name: OPS[name] for name in ("flip", "vflip", "affine")}


def batch(dtype: torch.dtype, channels: int, *, count: int = 6, size: tuple[int, int] = (33, 47)) -> Tensor:
    whole = np.random.default_rng(channels).integers(0, 65536, (count, channels, *size))
    if dtype == torch.uint8:
        return torch.from_numpy((whole // 256).astype(np.uint8))
    if dtype == torch.uint16:
        return torch.from_numpy(whole.astype(np.uint16))
    return torch.from_numpy(whole / 65535).to(dtype)


def recipe(ops: Any = None, **settings: Any) -> gpuaug.Augment:
    return gpuaug.Augment(ops=OPS if ops is None else ops, **settings)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("crop", [None, gpuaug.RandomResizedCrop(40)], ids=["whole", "crop"])
def test_fused_equals_kornia(dtype: torch.dtype, channels: int, crop: Any) -> None:
    images = batch(dtype, channels)
    ours, theirs = (recipe(crop=crop, backend=backend)(images, seed=4) for backend in ("fused", "kornia"))
    assert ours.dtype == torch.float32
    assert ours.shape[:2] == (6, channels)
    assert (ours - theirs).abs().max() <= 3e-6


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("channels", [1, 13])
def test_each_operation_equals_kornias_on_other_channels(name: str, channels: int) -> None:
    images = batch(torch.float32, channels) * 1.5 - 0.25  # Kornia clamps some, and keeps others
    ours, theirs = (recipe({name: OPS[name]}, backend=backend)(images, seed=4) for backend in ("fused", "kornia"))
    assert (ours - theirs).abs().max() <= 3e-6
    assert not torch.equal(ours, images)


@pytest.mark.parametrize("name", OPS)
def test_levels_as_floats_give_the_pixels_of_uint8(name: str) -> None:
    images = batch(torch.uint8, 3)
    augment = recipe({name: OPS[name]})
    assert (augment(images, seed=4) - augment(images.float() / 255, seed=4)).abs().max() <= 1e-7


def test_levels_as_floats_are_cropped_within_the_rounding_of_uint8() -> None:
    """A crop of uint8 has levels, also between its two passes, as Pillow's; one of floats is not rounded."""
    images = batch(torch.uint8, 3)
    crop = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(40))
    apart = (crop(images, seed=4) - crop(images.float() / 255, seed=4)).abs() * 255
    assert apart.max() <= 1.01
    assert apart.mean() <= 0.35


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(20, 24), (33, 47), (70, 61)])
def test_crops_of_floats_equal_torchs_antialiased_resize(interpolation: str, size: tuple[int, int]) -> None:
    images = batch(torch.float32, 4)
    made = gpuaug.Augment(crop=gpuaug.Resize(size, interpolation=interpolation))(images, seed=0)
    want = torch.nn.functional.interpolate(images, size, mode=interpolation, antialias=True)
    assert (made - want).abs().max() <= 4e-6


def test_nearest_gives_values_of_the_image() -> None:
    """As labels need it: the pixels are those of torch's nearest-exact."""
    images = batch(torch.float32, 2)
    made = gpuaug.Augment(crop=gpuaug.Resize((20, 61), interpolation="nearest"))(images, seed=0)
    assert torch.equal(made, torch.nn.functional.interpolate(images, (20, 61), mode="nearest-exact"))
    labels = torch.randint(0, 255, (4, 1, 33, 47), dtype=torch.uint8)
    crop = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(24, interpolation="nearest"))
    assert set(crop(labels, seed=0, dtype="same").unique().tolist()) <= set(labels.unique().tolist())


def test_uint16_is_exact() -> None:
    """Through flips and crops without resizing; an affine within 1 of 65,535 of float64."""
    images = batch(torch.uint16, 4)
    whole = images.numpy().astype(np.int64)
    flipped = recipe({"flip": K.RandomHorizontalFlip(p=1.0)})(images, seed=0, dtype="same")
    assert flipped.dtype == torch.uint16
    assert (flipped.numpy() == whole[..., ::-1]).all()
    cut = gpuaug.Augment(crop=gpuaug.RandomCrop(20))
    rows = cut.windows(cut.draw(seed=0, epoch=0, indices=range(6)), np.full(6, 33), np.full(6, 47))[0].window
    for made, image, (top, left, height, width) in zip(cut(images, seed=0, dtype="same"), whole, rows, strict=True):
        assert (made.numpy() == image[:, top : top + height, left : left + width]).all()
    affine = {"affine": K.RandomAffine(20.0, p=1.0)}
    made = recipe(affine)(images, seed=0)
    want = recipe(affine, backend="kornia")(images, seed=0).double()
    assert (made.double() - want).abs().max() * 65535 <= 1


@pytest.mark.parametrize("name", [*GEOMETRY, "brightness", "blur", "sharpness"])
def test_channels_do_not_change_each_other(name: str) -> None:
    images = batch(torch.uint8, 13)
    augment = recipe({name: OPS[name]}, crop=gpuaug.RandomResizedCrop(40))
    made = augment(images, seed=4)
    assert all(torch.equal(made[:, c : c + 1], augment(images[:, c : c + 1], seed=4)) for c in range(13))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("channels", [3, 4])
def test_memory_layouts_agree(dtype: torch.dtype, channels: int) -> None:
    images = batch(dtype, channels)
    augment = recipe(crop=gpuaug.RandomResizedCrop(40), copies=2)
    want = augment(images, seed=4)
    last = images.permute(0, 2, 3, 1).contiguous()
    wide = torch.stack([images, images], dim=4)[..., 0]
    for other in (
        last.permute(0, 3, 1, 2),
        wide,
        images.flip(3).contiguous().flip(3) if dtype != torch.uint16 else wide,
    ):
        assert all(torch.equal(a, b) for a, b in zip(want, augment(other, seed=4), strict=True))
    assert torch.equal(want[1], augment(last, seed=4, layout="channels_last")[1])
    out = augment(images, seed=4, memory_format="channels_last", dtype="float16")[0]
    assert torch.equal(out, want[0].half())
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_results_are_new_memory() -> None:
    images = batch(torch.float32, 3)
    before = images.clone()
    made = gpuaug.Augment()(images)
    made.zero_()
    assert torch.equal(images, before)
    recipe(backend="kornia")(images, seed=0)
    assert torch.equal(images, before)


def test_white_is_the_value_that_becomes_one() -> None:
    twelve = torch.tensor([0, 2048, 4095], dtype=torch.uint16).view(1, 1, 1, 3)
    made = gpuaug.Augment()(twelve, white=4095)
    assert torch.equal(made.flatten(), torch.tensor([0, 2048 / 4095, 1]))
    assert torch.equal(gpuaug.Augment()(twelve, white=4095, dtype="same"), twelve)
    assert torch.equal(gpuaug.Augment()(twelve.float() * 2, white=8190), made)
    both = gpuaug.Augment()({"a": twelve, "b": twelve.float()}, white={"a": 4095, "b": 4095.0})
    assert torch.equal(both["a"], both["b"])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_same_type_comes_back(dtype: torch.dtype) -> None:
    images = batch(dtype, 4)
    made = recipe(GEOMETRY)(images, seed=4, dtype="same")
    assert made.dtype == dtype
    assert torch.equal(gpuaug.Augment()(images, dtype="same"), images)
    with pytest.raises(ConfigError, match=r"`augment\.normalize` must be null with dtype='same'"):
        gpuaug.Augment(normalize=gpuaug.Normalize(0.5, 0.5))(images, dtype="same")


def test_normalization_has_a_value_for_each_channel() -> None:
    images = batch(torch.float32, 13)
    mean, std = np.arange(13) * 100.0, 1.0 + np.arange(13)
    made = gpuaug.Augment(normalize=gpuaug.Normalize(mean, std))(images)
    want = (images.double().numpy() - mean[:, None, None]) / std[:, None, None]
    assert np.abs(made.numpy() - want).max() <= 1e-4
    with pytest.raises(ConfigError, match=r"`augment\.normalize` has values for 13 channels. Found: images with 4"):
        gpuaug.Augment(normalize=gpuaug.Normalize(mean, std))(images[:, :4])


@pytest.mark.parametrize("channels", [3, 5])
def test_an_empty_batch_keeps_its_sizes(channels: int) -> None:
    empty = torch.zeros((0, channels, 24, 32), dtype=torch.float32)
    assert gpuaug.Augment()(empty).shape == (0, channels, 24, 32)
    assert recipe(GEOMETRY, crop=gpuaug.RandomResizedCrop(8))(empty).shape == (0, channels, 8, 8)
    assert gpuaug.Augment()(empty[:, None].expand(-1, 2, -1, -1, -1)).shape == (0, 2, channels, 24, 32)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("backend", ["fused", "kornia"])
def test_values_that_are_no_numbers(bad: float, backend: str) -> None:
    images = batch(torch.float32, 4)
    images[2, 1, 3, 3] = bad
    with pytest.raises(ConfigError, match=r"1 values that are NaN or infinite, first in image 2\. Set nan='zero'"):
        recipe(backend=backend)(images)
    zero = images.clone()
    zero[2, 1, 3, 3] = 0
    augment = recipe(backend=backend, crop=gpuaug.RandomResizedCrop(40))
    assert torch.equal(augment(images, seed=4, nan="zero"), augment(zero, seed=4))


@pytest.mark.parametrize("dtype", TYPES[2:], ids=str)
@pytest.mark.parametrize("layout", ["planes", "pixels", "sliced"])
def test_a_value_that_is_no_number_is_found_wherever_it_lies(dtype: torch.dtype, layout: str) -> None:
    random = np.random.default_rng(7)
    images = batch(dtype, 5)
    if layout == "pixels":
        images = images.contiguous(memory_format=torch.channels_last)
    elif layout == "sliced":
        images = torch.stack([images, images], dim=-1)[:, ::2, :, 1:, 0]
    largest = torch.finfo(dtype).max
    first = {"fused": K.RandomInvert(), "Kornia's": K.RandomMotionBlur(3, 35.0, 0.5)}
    recipes = [
        gpuaug.Augment(crop=crop, ops=op and {"op": op})
        for crop in (None, gpuaug.RandomResizedCrop(8, scale=(0.01, 0.02)))
        for op in (None, *first.values())
    ]
    for augment in recipes:
        for bad in (float("nan"), float("inf"), -float("inf"), largest, -largest):
            at = tuple(int(random.integers(n)) for n in images.shape)
            spoiled = images.clone()
            spoiled[at] = bad
            if abs(bad) == largest:
                augment(spoiled, white=1e9)  # else the sums of a blur would be infinite
                continue
            with pytest.raises(ConfigError, match=rf"1 values that are NaN or infinite, first in image {at[0]}\. "):
                augment(spoiled)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    "crop",
    [
        *(gpuaug.Resize((17, 50), interpolation=name) for name in ("nearest", "bilinear", "bicubic")),
        gpuaug.Resize((90, 21), interpolation="bicubic"),
        gpuaug.RandomResizedCrop((64, 80), scale=(0.01, 0.05)),
        gpuaug.RandomCrop((100, 170), padding=20, fill=[10, 20, 30, 40]),
        gpuaug.Letterbox((64, 200), fill=[10, 20, 30, 40]),
    ],
    ids=str,
)
def test_crops_equal_those_of_torch(dtype: torch.dtype, crop: Any) -> None:
    """Kornia's backend crops with torch's functions. The sizes are those of all loops of cpu.cpp."""
    images = batch(dtype, 4, size=(101, 157))
    for layout in (torch.contiguous_format, torch.channels_last):
        given = images.contiguous(memory_format=layout)
        ours, theirs = (recipe(GEOMETRY, crop=crop, backend=backend)(given, seed=4) for backend in ("fused", "kornia"))
        assert (ours - theirs).abs().max() <= 3e-6


@pytest.mark.parametrize("name", ["saturation", "hue"])
def test_operations_on_colors_are_refused_by_their_key(name: str) -> None:
    jitter = gpuaug.Augment(ops={"tint": K.ColorJitter(**{name: 0.3})})
    for view, key in ((jitter, "augment"), (gpuaug.MultiView(views={"a": jitter}), "augment.views.a")):
        with pytest.raises(ConfigError, match=rf"`{key}\.ops\.tint\.{name}` needs RGB images\. Found: 4 channels"):
            view(batch(torch.uint8, 4))
    with pytest.raises(ConfigError, match=r"`augment\.ops\.levels` works on 256 levels\. Found: uint16 images"):
        gpuaug.Augment(ops={"levels": K.RandomPosterize()})(batch(torch.uint16, 3))


@pytest.mark.parametrize(
    ("images", "settings", "message"),
    [
        (torch.zeros(2, 3, 8, 8, dtype=torch.float64), {}, r"float64 \[2, 3, 8, 8\]\. Use `images.float\(\)`"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.int16), {}, "int16 .*set `white` to the value that is white"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.bool), {}, r"bool .*mul\(255\)"),
        (torch.zeros(3, 8, 8), {}, r"float32 \[3, 8, 8\].*images\[None\]"),
        (torch.zeros(2, 3, 8, 8, device="meta"), {}, "device that stores pixels"),
        (torch.zeros(2, 3, 8, 0), {}, "without empty axes"),
        (torch.zeros(2, 0, 3, 8, 8), {}, "without empty axes"),
        (torch.zeros(2, 3, 8, 3, dtype=torch.uint8), {}, "could be .*Set `layout`"),
        (torch.zeros(2, 3, 8, 8), {"layout": "NHWC"}, "`layout` must be one of channels_first, channels_last"),
        (torch.zeros(2, 3, 8, 8), {"white": 0}, r"`white` must be a number in \[1e-06, 1e\+09\] or null. Found: 0"),
        (torch.zeros(2, 3, 8, 8), {"nan": "keep"}, "`nan` must be one of refuse, zero"),
        (torch.zeros(2, 3, 8, 8), {"dtype": "float64"}, "`dtype` must be one of float32, bfloat16, float16"),
        (np.zeros((2, 3, 8, 8), dtype=np.float32), {}, "ndarray.*from_numpy"),
    ],
    ids=range(13),
)
def test_what_cannot_be_taken_is_said(images: Any, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gpuaug.Augment()(images, **settings)


@pytest.mark.parametrize("channels", [1, 4])
def test_without_a_compiler_torch_does_the_same(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    images = batch(torch.float32, channels)
    augment = recipe(crop=gpuaug.RandomResizedCrop(40, interpolation="bicubic"))
    want = augment(images, seed=4)
    monkeypatch.setattr("gpuaug.augment.fused.backend.library", lambda: None)
    assert (augment(images, seed=4) - want).abs().max() <= 1e-5


def test_values_with_the_negative_bit_keep_their_sign() -> None:
    images = batch(torch.float32, 3)
    negated = torch.complex(torch.zeros_like(images), -images).conj().imag
    assert negated.is_neg()
    for augment in (recipe(), recipe(crop=gpuaug.RandomResizedCrop(20))):
        assert torch.equal(augment(negated, seed=1), augment(images, seed=1))


@pytest.mark.filterwarnings("ignore")
def test_tensors_without_memory_of_their_own_are_refused() -> None:
    """Kernels would read address zero."""
    from torch._subclasses import FakeTensorMode

    augment, images = recipe(), batch(torch.float32, 3)
    with FakeTensorMode():
        fake = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    calls: list[Callable[[], Any]] = [
        lambda: augment(fake, seed=1),
        lambda: augment(images.to_sparse(), seed=1),
        lambda: augment(images.to_mkldnn(), seed=1),
        lambda: augment(torch.nested.nested_tensor([torch.rand(3, 8, 8)] * 2), seed=1),
        lambda: torch.func.functionalize(lambda x: augment(x, seed=1))(images),
        lambda: torch.vmap(lambda x: augment(x, seed=1))(images[None]),
        lambda: torch.func.grad(lambda x: augment(x, seed=1).sum())(images),
    ]
    for call in calls:
        with pytest.raises(gpuaug.ConfigError, match="`images` must be a tensor whose values lie in memory"):
            call()


def test_cameras_are_copied_and_their_names_are_checked() -> None:
    images = batch(torch.float32, 3)
    cameras = gpuaug.Cameras(cameras={"top": recipe(), "map": None})
    inside = copy.deepcopy(torch.nn.Sequential(cameras))[0]
    for other in (copy.deepcopy(cameras), pickle.loads(pickle.dumps(cameras)), inside):
        assert torch.equal(other({"top": images}, seed=2)["top"], cameras({"top": images}, seed=2)["top"])
    cameras({"top": images}, seed=0, white={"map": 1.0})  # a camera that is missing in this batch
    for call, words in (
        (lambda: cameras({"top": images}, seed=0, white={"tap": 1.0}), "`white` must have names .*: top, map.*'tap'"),
        (lambda: recipe()({"top": images}, seed=0, masks={"tip": None}), "`masks` must have names .*: top.*'tip'"),
        (lambda: cameras({"top": images.long()}, seed=0), "camera 'top': `images` must be uint8"),
        (lambda: recipe()({1: images}, seed=0, white={1: 1.0}), "`images` must have non-empty strings as names.*1"),
        (lambda: gpuaug.Cameras(cameras={1: None}), "`augment.cameras` must have non-empty strings as names.*1"),
    ):
        with pytest.raises(gpuaug.ConfigError, match=words):
            call()
