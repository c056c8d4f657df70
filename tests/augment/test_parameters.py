"""Draws to Kornia's parameters: Kornia's formulas to the last bit, its distributions, and what is refused."""

from __future__ import annotations

import itertools
import logging

import kornia.augmentation as K
import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn

import gpuaug
from gpuaug.augment.policy import fields, prepare, prepare_all
from gpuaug.errors import ConfigError
from gpuaug.random.keyed import Stream, sample_keys, uniforms

SIZE = (37, 29)

# Every operation with a rule, in the forms of arguments that change the rule.
OPS = {
    "hflip": lambda **k: K.RandomHorizontalFlip(**k),
    "vflip": lambda **k: K.RandomVerticalFlip(**k),
    "gray": lambda **k: K.RandomGrayscale(**k),
    "equalize": lambda **k: K.RandomEqualize(**k),
    "invert": lambda **k: K.RandomInvert(**k),
    "autocontrast": lambda **k: K.RandomAutoContrast(**k),
    "boxblur": lambda **k: K.RandomBoxBlur(**k),
    "medianblur": lambda **k: K.RandomMedianBlur(**k),
    "jitter": lambda **k: K.ColorJitter(0.4, 0.3, 0.2, 0.1, **k),
    "jitter ordered": lambda **k: K.ColorJitter(0.4, (0.5, 1.5), 0.2, (0.0, 0.1), order=(3, 1, 0), **k),
    "jiggle": lambda **k: K.ColorJiggle(0.4, 0.3, 0.2, 0.1, **k),
    "jiggle ordered": lambda **k: K.ColorJiggle(0.4, 0.3, 0.2, 0.1, order=(0, 1, 2, 3), **k),
    "solarize": lambda **k: K.RandomSolarize(0.3, 0.2, **k),
    "solarize pair": lambda **k: K.RandomSolarize((0.4, 0.6), (0.0, 0.0), **k),
    "posterize": lambda **k: K.RandomPosterize(3, **k),
    "posterize pair": lambda **k: K.RandomPosterize((2.5, 6.0), **k),
    "sharpness": lambda **k: K.RandomSharpness(2.0, **k),
    "brightness": lambda **k: K.RandomBrightness((0.6, 1.4), **k),
    "contrast": lambda **k: K.RandomContrast((0.6, 1.4), **k),
    "saturation": lambda **k: K.RandomSaturation((0.0, 2.0), **k),
    "hue": lambda **k: K.RandomHue((-0.2, 0.3), **k),
    "gamma": lambda **k: K.RandomGamma((0.5, 2.0), (0.8, 1.2), **k),
    "blur": lambda **k: K.RandomGaussianBlur(5, (0.1, 2.0), **k),
    "blur joint": lambda **k: K.RandomGaussianBlur((3, 5), (0.5, 0.5), separable=False, **k),
    "noise": lambda **k: K.RandomGaussianNoise(0.05, 0.1, **k),
    "erase": lambda **k: K.RandomErasing(**k),
    "erase wide": lambda **k: K.RandomErasing(scale=(0.1, 1.0), ratio=(1.5, 3.0), value=0.5, **k),
    "affine": lambda **k: K.RandomAffine(30.0, **k),
    "affine all": lambda **k: K.RandomAffine((-10.0, 20.0), (0.1, 0.2), (0.8, 1.2), (-5.0, 5.0, -3.0, 9.0), **k),
    "affine scales": lambda **k: K.RandomAffine(5.0, scale=(0.8, 1.2, 0.5, 0.9), shear=7.0, **k),
    "affine moved": lambda **k: K.RandomAffine(0.0, translate=(0.3, 0.1), padding_mode="reflection", **k),
    "rotation": lambda **k: K.RandomRotation(45.0, **k),
    "rotation 90": lambda **k: K.RandomRotation90((0, 3), **k),
    "shear": lambda **k: K.RandomShear(10.0, **k),
    "shear both": lambda **k: K.RandomShear((-10.0, 10.0, 3.0, 6.0), **k),
    "translate": lambda **k: K.RandomTranslate((-0.1, 0.3), (-0.2, 0.0), **k),
    "translate x": lambda **k: K.RandomTranslate((-0.1, 0.3), **k),
    "translate y": lambda **k: K.RandomTranslate(None, (-0.2, 0.2), **k),
    "perspective": lambda **k: K.RandomPerspective(0.4, **k),
    "perspective area": lambda **k: K.RandomPerspective(0.4, sampling_method="area_preserving", **k),
    "shuffle": lambda **k: K.RandomChannelShuffle(**k),
    "rgbshift": lambda **k: K.RandomRGBShift(0.2, (-0.1, 0.3), 0.0, **k),
    "jpeg": lambda **k: K.RandomJPEG((20.0, 90.0), **k),
    "planckian": lambda **k: K.RandomPlanckianJitter("CIED", **k),
    "motion": lambda **k: K.RandomMotionBlur(5, 35.0, 0.5, **k),
    "elastic": lambda **k: K.RandomElasticTransform((9, 9), (4.0, 4.0), **k),
    "snow": lambda **k: K.RandomSnow((0.2, 0.6), (1.0, 2.0), **k),
    "rain": lambda **k: K.RandomRain((10, 40), (2, 5), (-3, 4), **k),
    "specks": lambda **k: K.RandomSaltAndPepperNoise((0.1, 0.3), **k),
    "plasma brightness": lambda **k: K.RandomPlasmaBrightness(**k),
    "plasma contrast": lambda **k: K.RandomPlasmaContrast((0.2, 0.5), **k),
    "plasma shadow": lambda **k: K.RandomPlasmaShadow(**k),
    "light": lambda **k: K.RandomGaussianIllumination(**k),
    "light linear": lambda **k: K.RandomLinearIllumination((0.1, 0.3), **k),
    "light corner": lambda **k: K.RandomLinearCornerIllumination(**k),
    "spline": lambda **k: K.RandomThinPlateSpline(0.3, **k),
    "fisheye": lambda **k: K.RandomFisheye(*torch.tensor([[-0.3, 0.3], [-0.2, 0.1], [0.9, 1.1]]), **k),
    # one piece: Kornia's permutations come from no uniforms (test_fitting_in.py tests them)
    "jigsaw": lambda **k: K.RandomJigsaw((1, 1), ensure_perm=False, **k),
    "channel dropout": lambda **k: K.RandomChannelDropout(2, 0.3, **k),
    "clahe": lambda **k: K.RandomClahe((1.0, 20.0), grid_size=(2, 2), **k),
}  # fmt: skip
# gpuaug's own operations that have an entry, found by their page of the reference
OWN = {name: getattr(gpuaug, name) for name, (_, page) in gpuaug.PUBLIC.items() if page == "operations"}
OWN = {name: kind for name, kind in OWN.items() if getattr(kind, "entry", None) is not None}


def kornias_uniforms(op: nn.Module, count: int, batch: int) -> np.ndarray:
    """The uniforms that Kornia draws, from the global generator, in its order: float32 [batch, 1 + count]."""
    gate = torch.rand(batch, 1) if 0 < op.p < 1 else torch.zeros(batch, 1)
    if isinstance(op, K.RandomPerspective | K.RandomChannelShuffle | K.RandomChannelDropout | K.RandomThinPlateSpline):
        return torch.cat([gate, torch.rand(batch, count)], dim=1).numpy()
    return torch.cat([gate, *(torch.rand(batch, 1) for _ in range(count))], dim=1).numpy()


def ours(op: nn.Module, batch: int, *, size: tuple[int, int] = SIZE, seed: int = 0, name: str = "x"):
    """A batch of our own draws, as a loader makes them."""
    prepared = prepare(name, op)
    stream = Stream("", 0, name, prepared.count)
    keyed = {"seed": seed, "epoch": 0, "indices": np.arange(batch)}
    u = uniforms([stream], **keyed)["", 0, name]
    return prepared, prepared.draw(u, size, sample_keys(stream, **keyed) if prepared.keyed else None)


def expected(op: nn.Module, params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Kornia's parameters without those that are one per batch or per pixel."""
    per_batch = {"order", "batch_prob", "forward_input_shape", "batch_idx"}
    per_batch |= {"gaussian_noise", "noise", "mask_salt", "mask_pepper", "plasma", "coordinates_factor"}  # per pixel
    if isinstance(op, K.RandomMotionBlur):
        per_batch.add("idx")
    if "gradient" in params:  # equal in all channels, so ours has one
        assert torch.equal(params["gradient"], params["gradient"][:, :1].expand_as(params["gradient"]))
        params = params | {"gradient": params["gradient"][:, :1]}
    return {k: v for k, v in params.items() if k not in per_batch}


@pytest.mark.parametrize(("size", "p"), [(SIZE, 0.0), (SIZE, 0.3), (SIZE, 1.0), ((1, 5), 0.3), ((224, 224), 0.3)])
@pytest.mark.parametrize("name", OPS)
def test_given_kornias_uniforms_the_parameters_are_kornias(name: str, p: float, size: tuple[int, int]) -> None:
    op = OPS[name](p=p)
    prepared = prepare(name, op)
    ordered = len(prepared.slots) == 4
    torch.manual_seed(7)
    u = kornias_uniforms(op, prepared.count - 1 - ordered, 33)
    if ordered:
        u = np.concatenate([u, np.zeros((33, 1), dtype=np.float32)], axis=1)
    torch.manual_seed(7)
    theirs = op.forward_parameters(torch.Size((33, 3, *size)))
    chosen = prepared.draw(u, size)
    assert chosen.choice.dtype == np.int64
    assert chosen.choice.shape == (33, len(prepared.slots))
    np.testing.assert_array_equal((chosen.choice >= 0).any(axis=1), theirs["batch_prob"].numpy() > 0.5)
    theirs = expected(op, theirs)
    for params in itertools.chain.from_iterable(chosen.params):
        assert params.keys() == theirs.keys()
        for k, v in params.items():
            assert v.shape == theirs[k].shape, k
            assert torch.from_numpy(np.array(v)).dtype == theirs[k].dtype, k
            np.testing.assert_array_equal(v, theirs[k].numpy(), err_msg=k)


@pytest.mark.parametrize("kind", [K.ColorJitter, K.ColorJiggle])
def test_every_sample_of_a_jitter_has_its_own_order_all_equally_likely(kind: type) -> None:
    prepared, chosen = ours(kind(0.4, 0.3, 0.2, 0.1, p=1.0), 4800)
    orders, counts = np.unique(chosen.choice, axis=0, return_counts=True)
    assert {tuple(o) for o in orders} == set(itertools.permutations(range(4)))
    assert scipy.stats.chisquare(counts).pvalue > 1e-4
    for slot in prepared.slots:
        assert [m._fixed_order for m in slot] == [(0,), (1,), (2,), (3,)]
    factors = chosen.params[0][0]["hue_factor"]
    first = chosen.choice[:, 0]
    assert scipy.stats.f_oneway(*(factors[first == k] for k in range(4))).pvalue > 1e-4  # the order is independent


@pytest.mark.parametrize("op", [K.RandomRain(drop_height=(0, 3)), K.RandomMotionBlur((3, 5), 9.0, 0.0)])
def test_settings_that_would_fail_for_some_samples_are_refused(op: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"augment\.ops\.x\."):
        prepare("x", op)


def test_a_step_that_can_only_be_neutral_is_left_out_of_the_order() -> None:
    _, chosen = ours(K.ColorJitter(0.4, 0.0, 0.3, 0.0), 500)
    assert set(np.unique(chosen.choice)) == {-1, 0, 2}
    assert ((chosen.choice >= 0).sum(axis=1) == 2).all()
    _, chosen = ours(K.ColorJitter(), 50)  # nothing but the clamp
    assert (chosen.choice >= 0).all()


@pytest.mark.parametrize(
    ("op", "factor", "neutral"),
    [
        (K.ColorJitter(0, 0, 0, (0.0, 0.2)), "hue_factor", 0),
        (K.ColorJitter(0, 0, 0, (-0.2, 0.2), order=(3,)), "hue_factor", 0),
        (K.ColorJiggle(0, 0, 0, (-0.2, 0.2)), "hue_factor", 0),
        (K.ColorJiggle(0, 0, (0.0, 2.0), 0), "saturation_factor", 1),
        (K.ColorJiggle(0, 0, (1.0, 2.0), 0), "saturation_factor", 1),
    ],
)
def test_no_factor_is_drawn_exactly_neutral(op: nn.Module, factor: str, neutral: float) -> None:
    prepared = prepare("jitter", op)
    for value in (0.0, 0.5):  # the uniforms that give the neutral factor of the ranges above
        chosen = prepared.draw(np.full((3, prepared.count), value, dtype=np.float32), SIZE)
        got = chosen.params[0][0][factor]
        assert (got != neutral).all()
        assert got.dtype == np.float32
    degenerate = prepare("jitter", type(op)(0.1, 0, 0, 0))
    chosen = degenerate.draw(np.full((3, degenerate.count), 0.5, dtype=np.float32), SIZE)
    assert (chosen.params[0][0][factor] == neutral).all()


@pytest.mark.parametrize("name", OPS | OWN)
@pytest.mark.parametrize("size", [(1, 1), (3, 5), (1, 300)])
@pytest.mark.parametrize("batch", [0, 1, 2])
def test_extreme_uniforms_give_finite_parameters_of_full_shape(name: str, size: tuple[int, int], batch: int) -> None:
    prepared = prepare(name, (OPS | OWN)[name]())
    for value in (0.0, 1 - 2**-24):
        chosen = prepared.draw(np.full((batch, prepared.count), value, dtype=np.float32), size)
        assert chosen.choice.shape == (batch, len(prepared.slots))
        for params in itertools.chain.from_iterable(chosen.params):
            for k, v in params.items():
                assert len(v) == batch, k
                assert np.isfinite(v).all(), k


def test_noise_has_kornias_distribution_and_belongs_to_the_sample() -> None:
    _, chosen = ours(K.RandomGaussianNoise(0.05, 0.1, p=1.0), 6)
    keys = torch.from_numpy(chosen.keys)
    values = fields(K.RandomGaussianNoise(0.05, 0.1), {}, keys, (40, 31))["gaussian_noise"]
    assert values.shape == (6, 3, 40, 31)
    assert values.dtype == torch.float32
    assert scipy.stats.kstest(values.numpy().ravel(), scipy.stats.norm(0.05, 0.1).cdf).pvalue > 1e-4
    assert torch.equal(
        fields(K.RandomGaussianNoise(0.05, 0.1), {}, keys[2:3], (40, 31))["gaussian_noise"][0], values[2]
    )
    field = fields(K.RandomElasticTransform(), {}, keys, (40, 31))["noise"]
    assert field.shape == (6, 2, 40, 31)
    assert scipy.stats.kstest(field.numpy().ravel(), scipy.stats.uniform(-1, 2).cdf).pvalue > 1e-4


def test_settings_are_read_once_and_the_given_module_is_never_changed() -> None:
    op = K.RandomRotation(45.0, p=0.3)
    prepared = prepare("rotation", op)
    assert prepared.op is op
    assert prepared.slots[0][0] is not op
    assert prepared.slots[0][0].p == 1.0
    assert op.p == 0.3
    u = np.random.default_rng(0).random((50, prepared.count), dtype=np.float32)
    before = prepared.draw(u, SIZE)
    op.p = 1.0
    np.testing.assert_array_equal(prepared.draw(u, SIZE).choice, before.choice)


@pytest.mark.parametrize(
    ("op", "words"),
    [
        (K.ColorJitter(same_on_batch=True), ["augment.ops.x.same_on_batch", "True"]),
        (K.RandomErasing(keepdim=True), ["augment.ops.x.keepdim", "True"]),
        (K.Resize((8, 8)), ["augment.ops.x", "Resize", "`crop`"]),
        (K.RandomResizedCrop((8, 8)), ["augment.ops.x", "`crop`"]),
        (K.PadTo((8, 8)), ["augment.ops.x", "`crop`"]),
        (K.Normalize((0.5,) * 3, (0.5,) * 3), ["augment.ops.x", "`normalize`"]),
        (K.RandomMixUpV2(), ["augment.ops.x", "`mix`"]),
        (K.AugmentationSequential(K.RandomHorizontalFlip()), ["augment.ops.x", "AugmentationSequential", "name"]),
        (K.RandomHorizontalFlip3D(), ["augment.ops.x", "volumes"]),
        (nn.Sequential(K.RandomHorizontalFlip()), ["augment.ops.x", "name"]),
        (K.RandomHorizontalFlip, ["augment.ops.x", "RandomHorizontalFlip"]),
        ({"_target_": "RandomFlip"}, ["augment.ops.x", "_target_"]),
        ("flip", ["augment.ops.x", "'flip'"]),
        (0.5, ["augment.ops.x", "0.5"]),
    ],
)
def test_what_has_no_place_among_operations_is_refused_with_a_remedy(op: object, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare("x", op)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("p", -0.1), ("p", 1.5), ("p", float("nan")), ("p_batch", 0.5)])
def test_a_changed_probability_is_refused(name: str, value: float) -> None:
    op = K.RandomHorizontalFlip()
    setattr(op, name, value)
    with pytest.raises(ConfigError, match=rf"augment\.ops\.x\.{name}`"):
        prepare("x", op)


@pytest.mark.parametrize("op", [K.RandomGamma((-1.0, 1.0)), K.RandomGamma((1.0, 1.0), (-0.5, 0.0))])
def test_a_range_that_would_fail_in_mid_epoch_is_refused(op: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"augment\.ops\.x.*(gamma|gain)_factor.*Found: \(-"):
        prepare("x", op)


def test_operations_come_as_a_mapping_with_names() -> None:
    flip = K.RandomHorizontalFlip()
    assert [p.name for p in prepare_all({"a": flip, "b": None, "c": flip}, path="ops")] == ["a", "c"]
    assert prepare_all(None, path="ops") == ()
    with pytest.raises(ConfigError, match="mapping"):
        prepare_all([flip], path="augment.ops")
    with pytest.raises(ConfigError, match="mapping"):
        prepare_all(flip, path="augment.ops")
    for name in ("", 3, "a\0b", "crop"):
        with pytest.raises(ConfigError, match=r"augment\.ops"):
            prepare_all({name: flip}, path="augment.ops")


class Own(K.RandomBrightness):
    """A subclass may draw what it likes."""


@pytest.mark.parametrize("op", [Own(), nn.Identity()])
def test_an_operation_without_a_rule_is_seeded_and_says_so_once(
    op: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="gpuaug"):
        prepared, chosen = ours(op, 4, name="rain")
    assert prepared.seeded
    assert chosen.keys.shape == (4, 2)
    (record,) = caplog.records
    assert "augment.ops.rain" in record.getMessage()
    assert prepared.seeded in record.getMessage()
