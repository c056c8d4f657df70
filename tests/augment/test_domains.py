"""Which images each operation takes, and random numbers and values for any number of channels."""

from __future__ import annotations

import re
from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from test_parameters import OPS, ours
from torch import Tensor, nn

import gpuaug
from gpuaug.augment import reference
from gpuaug.augment.domains import check
from gpuaug.augment.normalize import Normalize
from gpuaug.augment.parameters import RecipeOp
from gpuaug.augment.policy import ENTRIES, OneOf, SomeOf, fields, prepare, prepare_all
from gpuaug.errors import ConfigError
from gpuaug.random.keyed import normal_field, uniform_field

CHANNELS = (1, 3, 4, 13)
SIZE = (24, 26)
TUNED = {
    "jitter without colour": lambda **k: K.ColorJitter(0.4, 0.3, **k),
    "jitter with hue": lambda **k: K.ColorJitter(0.4, 0.3, 0.0, 0.1, **k),
    "jitter of some": lambda **k: K.ColorJitter(0.4, 0.3, 0.2, 0.1, order=(1, 0), **k),
    "jiggle without colour": lambda **k: K.ColorJiggle(0.4, 0.3, **k),
    "gray of four": lambda **k: K.RandomGrayscale(torch.tensor([0.4, 0.3, 0.2, 0.1]), **k),
    "drop three": lambda **k: K.RandomChannelDropout(3, **k),
}
KORNIA = OPS | TUNED
# gpuaug's own: what they take by their definition
POLICIES = ("RandAugment", "TrivialAugmentWide", "AutoAugment", "AugMix", "TimmAugment")
OWN = {name: getattr(gpuaug, name) for name, (_, page) in gpuaug.PUBLIC.items() if page == "operations"}
OWN = {name: kind for name, kind in OWN.items() if issubclass(kind, RecipeOp)}


def refusal(op: Any, channels: int, *, deep: bool = False) -> str:
    """The message of `check`, which begins with the key; "" if it takes the images."""
    message = ""
    try:
        check([prepare("x", op)], channels=channels, deep=deep)
    except ConfigError as error:
        message = str(error)
    assert not message or re.match(r"`augment\.ops\.x[`.]", message)
    return message


def pixels(channels: int, batch: int = 3) -> Tensor:
    return torch.rand((batch, channels, *SIZE), generator=torch.Generator().manual_seed(channels))


def kornia_fails(name: str, channels: int) -> bool:
    """Whether Kornia's module fails on the images, or makes something else of them than its name says."""
    op, x = KORNIA[name](p=1.0), pixels(channels)
    torch.manual_seed(0)
    try:
        y = op(x)
    except Exception:
        return True
    assert y.shape == x.shape
    if isinstance(op, K.RandomGrayscale) and op.rgb_weights is None:  # gray of alpha or infrared, too
        return torch.allclose(y, x.mean(1, keepdim=True).expand_as(y))
    return isinstance(op, K.RandomChannelDropout) and bool((y == op.fill_value).all())  # no image is left


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("name", KORNIA)
def test_what_fails_in_kornia_or_is_silently_wrong_is_refused(name: str, channels: int) -> None:
    expected = kornia_fails(name, channels)
    if name == "shuffle":  # our draws and steps are for three channels
        expected = channels != 3
    message = refusal(KORNIA[name](), channels)
    assert bool(message) == expected, message
    assert not expected or f"Found: {channels} channel" in message


@pytest.mark.parametrize("name", KORNIA)
def test_what_cannot_tell_16_bits_from_8_is_refused_for_uint16(name: str) -> None:
    channels = 4 if name == "gray of four" else 13 if name == "drop three" else 3
    op, levels = KORNIA[name](p=1.0), torch.randint(0, 255, (2, channels, *SIZE))
    low, high = ((levels + part) / 255 for part in (0.2, 0.202))  # the same of 256 levels, by any rounding
    torch.manual_seed(0)
    y = op(low)
    blind = torch.equal(y, op(high, params=op._params))
    message = refusal(KORNIA[name](), channels, deep=True)
    assert bool(message) == blind, message
    assert not blind or message.startswith("`augment.ops.x` works on 256 levels. Found: uint16 images. Convert")
    assert refusal(KORNIA[name](), channels) == ""  # 8 bits and floats


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("name", OWN)
def test_own_operations_take_rgb_and_policies_256_levels(name: str, channels: int, deep: bool) -> None:
    levels = name in POLICIES
    assert levels or name in ("PhotometricDistort", "RandomErasing")
    assert bool(refusal(OWN[name](), channels, deep=deep)) == (channels != 3 or (levels and deep))


def test_every_entry_is_in_the_table() -> None:
    assert set(ENTRIES) == {type(make()).__name__ for make in KORNIA.values()}


@pytest.mark.parametrize(
    ("op", "channels", "message"),
    [
        (K.ColorJitter(0.1, 0.1, 0.1, 0.1), 4, "`augment.ops.x.saturation` needs RGB images. Found: 4 channels."),
        (K.ColorJiggle(0.1, 0.1, 0.0, 0.1), 1, "`augment.ops.x.hue` needs RGB images. Found: 1 channel."),
        (K.RandomSnow(), 13, "`augment.ops.x` needs RGB images. Found: 13 channels."),
        (K.RandomGrayscale(), 4, "`augment.ops.x.rgb_weights` needs images with 3 channels. Found: 4 channels."),
        (K.RandomRain(), 4, "`augment.ops.x` needs images with 1 or 3 channels. Found: 4 channels."),
        (
            K.RandomChannelDropout(4),
            4,
            "`augment.ops.x.num_drop_channels` needs images with more than 4 channels. Found: 4 channels.",
        ),
        (gpuaug.RandomErasing(), 4, "`augment.ops.x.mean` needs images with 3 channels. Found: 4 channels."),
        (gpuaug.PhotometricDistort(), 4, "`augment.ops.x.saturation` needs RGB images. Found: 4 channels."),
        (
            OneOf(ops={"a": K.RandomInvert(), "b": SomeOf(1, ops={"c": K.RandomHue((-0.1, 0.1))})}),
            4,
            "`augment.ops.x.ops.b.ops.c` needs RGB images. Found: 4 channels.",
        ),
    ],
)
def test_the_message_names_the_setting(op: Any, channels: int, message: str) -> None:
    assert refusal(op, channels).startswith(message)


def test_erasing_takes_as_many_channels_as_it_has_values() -> None:
    four = gpuaug.RandomErasing(mean=(0.1, 0.2, 0.3, 0.4), std=0.2)
    assert [refusal(four, channels) == "" for channels in CHANNELS] == [False, False, True, False]
    assert not any(refusal(gpuaug.RandomErasing(mean=0.5, std=0.2), channels) for channels in CHANNELS)


def test_modules_without_an_entry_are_not_refused() -> None:
    class Own(K.RandomHue):
        pass

    check(prepare_all({"a": nn.Identity(), "b": Own()}, path="augment.ops"), channels=4, deep=True)


@pytest.mark.parametrize("name", [name for name in KORNIA if name not in ("rain", "clahe")])
@pytest.mark.parametrize("channels", [1, 4, 13])
def test_what_is_taken_runs_with_our_random_numbers(name: str, channels: int) -> None:
    if refusal(KORNIA[name](), channels):
        return
    prepared, chosen = ours(KORNIA[name](p=1.0), 3, size=SIZE, name="x")
    x = pixels(channels)
    y = reference.apply(x.clone(), prepared, chosen)
    assert y.shape == x.shape
    assert y.isfinite().all()
    assert (y != x).any() or name == "jigsaw"  # of one piece


# --- random fields


def test_fields_of_three_channels_have_the_bits_that_they_had() -> None:
    keys = torch.tensor([[1, 2], [3, 4]])
    h, w = SIZE
    params = {name: torch.full((2,), 0.4) for name in ("amount_factor", "salt_and_pepper_factor", "roughness")}
    noise = fields(K.RandomGaussianNoise(0.1, 0.2), {}, keys, SIZE)["gaussian_noise"]
    assert torch.equal(noise, normal_field(keys, 3 * h * w).view(2, 3, h, w) * 0.2 + 0.1)
    specks = fields(K.RandomSaltAndPepperNoise(), params, keys, SIZE)
    u = uniform_field(keys, 2 * h * w).view(2, 2, h, w) < 0.4
    for name, salt in (("mask_salt", u[:, 1]), ("mask_pepper", ~u[:, 1])):
        assert torch.equal(specks[name], (u[:, 0] & salt)[:, None].expand(2, 3, h, w))
    erase = gpuaug.RandomErasing()
    largest = int(erase.scale[1] * h * w + (h + w) / 2) + 1
    assert torch.equal(fields(erase, {}, keys, SIZE)["gaussian_noise"], normal_field(keys, 3 * largest))
    drawn = torch.tensor([[1, 2], [2, 0]])
    assert torch.equal(fields(K.RandomChannelDropout(2), {"channel_idx": drawn}, keys, SIZE)["channel_idx"], drawn)


def test_fields_have_as_many_channels_as_the_images() -> None:
    keys = torch.tensor([[1, 2], [3, 4]])
    params = {name: torch.full((2,), 0.4) for name in ("amount_factor", "salt_and_pepper_factor", "roughness")}
    for op, name, channels in [
        (K.RandomGaussianNoise(), "gaussian_noise", 13),
        (K.RandomSaltAndPepperNoise(), "mask_salt", 13),
        (K.RandomPlasmaBrightness(), "plasma", 13),
        (K.RandomPlasmaShadow(), "plasma", 1),
        (K.RandomElasticTransform(), "noise", 2),
    ]:
        made, one = (fields(op, {k: v[:n] for k, v in params.items()}, keys[:n], SIZE, channels=13) for n in (2, 1))
        assert made[name].shape == (2, channels, *SIZE)
        assert torch.equal(made[name][:1], one[name])  # a sample does not depend on its batch


def test_dropout_drops_each_channel_equally_often() -> None:
    prepared, chosen = ours(K.RandomChannelDropout(5, 0.5, p=1.0), 400)
    y = reference.apply(torch.ones((400, 13, 2, 2)), prepared, chosen)
    dropped = (y == 0.5).all(dim=(2, 3))
    assert (dropped.sum(1) == 5).all()
    assert ((y == 1) | (y == 0.5)).all()
    assert (dropped.float().mean(0) - 5 / 13).abs().max() < 0.1


def test_gray_with_a_list_of_weights() -> None:
    prepared, chosen = ours(K.RandomGrayscale([0.4, 0.3, 0.2, 0.1], p=1.0), 3)  # as from a YAML file
    x = pixels(4)
    want = np.einsum("bchw,c->bhw", x.numpy(), [0.4, 0.3, 0.2, 0.1])[:, None].repeat(4, 1)
    np.testing.assert_allclose(reference.apply(x.clone(), prepared, chosen), want, atol=1e-6)


@pytest.mark.parametrize(("mean", "std"), [((0.1, 0.2, 0.3, 40.0), (1, 2, 3, 0.25)), (0.5, 0.25)])
@pytest.mark.parametrize("mode", ["const", "pixel"])
def test_erasing_fills_each_channel_with_its_values(mean: Any, std: Any, mode: str) -> None:
    op = gpuaug.RandomErasing(p=1.0, mode=mode, mean=mean, std=std)
    prepared, chosen = ours(op, 40)
    x = torch.full((40, 4, 37, 29), -100.0)
    y = reference.apply(x.clone(), prepared, chosen)
    erased = y != x
    assert torch.equal(erased, erased[:, :1].expand_as(erased))
    for c, (m, s) in enumerate(zip(np.broadcast_to(mean, 4), np.broadcast_to(std, 4), strict=True)):
        values = y[:, c][erased[:, c]]
        assert len(values) > 1000
        assert values.mean().item() == pytest.approx(m, abs=0.1 * s + 1e-6)
        assert values.std().item() == pytest.approx(s if mode == "pixel" else 0, abs=0.1 * s)


# --- the rest of a recipe


def test_normalize_of_13_values_equals_numpy_and_is_undone() -> None:
    rng = np.random.default_rng(0)
    mean, std, x = rng.normal(800, 500, 13), rng.uniform(10, 900, 13), rng.uniform(0, 5000, (2, 13, 5, 4))
    normalize = Normalize(mean, std)
    images = torch.from_numpy(x).float()
    want = (x - mean[:, None, None]) / std[:, None, None]
    np.testing.assert_allclose(normalize(images), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(normalize.inverse(normalize(images)), images, rtol=1e-5, atol=1e-2)
    assert torch.equal(normalize.inverse(images[0]), normalize.inverse(images)[0])


@pytest.mark.parametrize("channels", CHANNELS)
def test_one_number_normalizes_all_channels(channels: int) -> None:
    x = pixels(channels)
    for one in (Normalize(0.5, 0.25), Normalize([0.5], (0.25,)), Normalize(np.float32(0.5), torch.tensor(0.25))):
        assert torch.equal(one(x), Normalize([0.5] * channels, [0.25] * channels)(x))
    assert torch.equal(
        Normalize([0.1, 0.2, 0.3, 0.4], 0.5)(pixels(4)), Normalize([0.1, 0.2, 0.3, 0.4], [0.5] * 4)(pixels(4))
    )


def test_values_for_other_images_are_refused() -> None:
    for call in (Normalize([1] * 13, 1), Normalize([1] * 13, 1).inverse):
        with pytest.raises(ConfigError, match=r"`augment\.normalize` has values for 13 channels\. Found: .* with 4\."):
            call(pixels(4))
    with pytest.raises(ConfigError, match=r"`augment\.normalize\.mean` must .* 0\.\.1\. Found: \(127\.5,\)"):
        Normalize(127.5, 0.5)(pixels(3))
    with pytest.raises(ConfigError, match=r"`augment\.normalize\.std` must .* 0\.\.1"):
        Normalize([0.5, 0.5, 0.5], 58)
    crop = gpuaug.RandomCrop(8, padding=2, fill=(1, 2, 3, 4))
    check([], channels=4, deep=False, crop=crop, normalize=Normalize(127.5, 1000))
    with pytest.raises(ConfigError, match=r"`augment\.crop\.fill` has values for 4 channels\. Found: .* with 3\."):
        check([], channels=3, deep=False, crop=crop)
    with pytest.raises(ConfigError, match="13 channels"):
        check([], channels=3, deep=False, normalize=Normalize([1] * 13, 1))


@pytest.mark.parametrize("alphas", [{"mixup_alpha": 1.0}, {"cutmix_alpha": 1.0}])
def test_mix_treats_all_channels_alike(alphas: dict[str, float]) -> None:
    x = pixels(13, batch=6)
    with_labels: dict[str, Any] = {"valid": torch.ones(6, dtype=torch.bool), "num_classes": 6}
    with_labels |= {"seed": 3, "epoch": 0, "first_index": 0}
    mix = gpuaug.Mix(**alphas)
    (made,), soft = mix([x], torch.arange(6), **with_labels)
    (three,), same = mix([x[:, 10:]], torch.arange(6), **with_labels)
    assert torch.equal(made[:, 10:], three)
    assert torch.equal(soft, same)
    assert (made != x).flatten(2).any(2).any(0).all()
