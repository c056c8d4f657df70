"""OneOf and SomeOf: what they choose for each sample, and what they refuse; Kornia's policies are refused."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from typing import Any

import hydra
import kornia.augmentation as K
import numpy as np
import pytest
import scipy.stats
import torch
from test_reference import images

import gpuaug
from gpuaug.augment.fused.backend import FusedBackend
from gpuaug.augment.images import unit
from gpuaug.augment.parameters import Prepared, tensors
from gpuaug.augment.policy import OneOf, SomeOf, prepare
from gpuaug.augment.reference import ReferenceBackend
from gpuaug.errors import ConfigError

SIZE = (40, 28)


def drawn(prepared: Prepared, batch: int, *, size: tuple[int, int] = SIZE, seed: int = 0):
    u = np.random.default_rng(seed).random((batch, prepared.count), dtype=np.float32)
    return prepared.draw(u, size), u


@pytest.mark.parametrize("policy", [K.auto.RandAugment(2, 9), K.auto.TrivialAugment(), K.auto.AutoAugment()])
def test_kornias_policies_are_refused_with_ours(policy: Any) -> None:
    name = type(policy).__name__
    for op, key in ((policy, "`augment.ops.auto` "), (OneOf(ops={"kornia": policy}), "`augment.ops.auto.ops.kornia` ")):
        with pytest.raises(ConfigError, match=rf"{name}\. .* use gpuaug\.RandAugment, Triv") as caught:
            prepare("auto", op)
        assert str(caught.value).startswith(key)


def test_one_of_takes_one_operation_with_its_own_gate() -> None:
    gray, flip = K.RandomGrayscale(p=1.0), K.RandomHorizontalFlip(p=1.0)
    ops = {"gray": gray, "solarize": K.RandomSolarize(p=0.5), "off": None, "flip": flip}
    prepared = prepare("choice", OneOf(ops=ops, p=0.9))
    assert [type(m) for m in prepared.slots[0]] == [K.RandomGrayscale, K.RandomSolarize, K.RandomHorizontalFlip]
    chosen, _ = drawn(prepared, 6000)
    counts = Counter(chosen.choice[:, 0].tolist())
    expected = [6000 * p for p in (0.1 + 0.15, 0.3, 0.15, 0.3)]
    assert scipy.stats.chisquare([counts[k] for k in (-1, 0, 1, 2)], expected).pvalue > 1e-4


def test_one_of_takes_whole_jitters_and_policies() -> None:
    jitter, policy = K.ColorJitter(0.4, 0.4, 0.4, 0.1), gpuaug.RandAugment()
    prepared = prepare("choice", OneOf(ops={"jitter": jitter, "policy": policy, "gray": K.RandomGrayscale(p=1.0)}))
    x = images(30, SIZE)
    chosen, u = drawn(prepared, 30)
    got = ReferenceBackend([prepared])(x, [chosen])
    which = (u[:, 1] * 3).astype(int)
    for number, op in enumerate((jitter, policy, K.RandomGrayscale(p=1.0))):
        alone = prepare("x", op)
        want = ReferenceBackend([alone])(x, [alone.draw(u[:, 2 : 2 + alone.count], SIZE)])
        assert torch.equal(got[which == number], want[which == number])


@pytest.mark.parametrize(
    ("ops", "p", "words"),
    [
        ({}, 1.0, ["augment.ops.choice.ops", "at least one"]),
        ([K.RandomGrayscale()], 1.0, ["augment.ops.choice.ops", "mapping"]),
        ({"a": K.RandomGrayscale()}, 1.5, ["augment.ops.choice.p", "1.5"]),
        ({"own": torch.nn.Dropout()}, 1.0, ["augment.ops.choice.ops.own", "Dropout"]),
        ({"a": K.ColorJitter(same_on_batch=True)}, 1.0, ["augment.ops.choice.ops.a.same_on_batch"]),
    ],
)
def test_one_of_refuses_with_the_full_key(ops: object, p: object, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare("choice", OneOf(ops=ops, p=p))
    for word in words:
        assert word in str(caught.value)


def sets(weights: dict[str, float], n: int) -> dict[tuple[str, ...], float]:
    """The probability of each set when ``n`` names are drawn one after the other, without replacement."""
    found: dict[tuple[str, ...], float] = Counter()
    for order in permutations(weights, n):
        left, p = sum(weights.values()), 1.0
        for name in order:
            p, left = p * weights[name] / left, left - weights[name]
        found[tuple(sorted(order))] += p
    return found


@pytest.mark.parametrize("random_order", [False, True])
@pytest.mark.parametrize("weights", [None, {"a": 4, "c": 0.25}])
def test_some_of_draws_by_weight_without_replacement_and_all_orders_alike(weights: Any, random_order: bool) -> None:
    ops = {name: K.RandomInvert(p=1.0) for name in "abcd"}
    prepared = prepare("some", SomeOf(3, ops={**ops, "off": None}, weights=weights, random_order=random_order))
    choice = drawn(prepared, 20_000)[0].choice
    if random_order:
        counts = Counter("".join("abcd"[k] for k in row) for row in choice.tolist())
        expected = {"".join(o): p / 6 for s, p in sets(dict.fromkeys("abcd", 1) | (weights or {}), 3).items()
                    for o in permutations(s)}  # fmt: skip
    else:
        counts = Counter(
            "".join(name for name, k in zip("abcd", row, strict=True) if k == 0) for row in choice.tolist()
        )
        expected = {"".join(s): p for s, p in sets(dict.fromkeys("abcd", 1) | (weights or {}), 3).items()}
    assert counts.keys() <= expected.keys()
    assert scipy.stats.chisquare([counts[k] for k in expected], [20_000 * p for p in expected.values()]).pvalue > 1e-4


def test_some_of_draws_its_number_and_keeps_each_operations_own_p() -> None:
    ops = {"a": K.RandomInvert(p=1.0), "b": K.RandomInvert(p=1.0), "half": K.RandomInvert(p=0.5)}
    for random_order in (False, True):
        prepared = prepare("some", SomeOf((0, 2), ops=ops, p=0.9, random_order=random_order))
        taken = (drawn(prepared, 20_000)[0].choice >= 0).sum(axis=1)
        # a half of the third of single choices, and of two thirds of the pairs, loses one operation
        one, two = 0.3, 0.3
        expected = [0.1 + 0.3 + one / 6, one * 5 / 6 + two / 3, two * 2 / 3]
        assert scipy.stats.chisquare(np.bincount(taken, minlength=3), 20_000 * np.array(expected)).pvalue > 1e-4


@pytest.mark.parametrize("random_order", [False, True])
def test_some_of_applies_kornias_modules_one_after_the_other(random_order: bool) -> None:
    ops = {
        "brightness": K.ColorJitter(brightness=0.4, order=(0,), p=1.0),
        "affine": K.RandomAffine(20.0, (0.1, 0.1), p=1.0),
        "gray": K.RandomGrayscale(p=0.6),
        "blur": K.RandomGaussianBlur(5, (0.5, 2.0), p=1.0),
        "hue": K.RandomHue((-0.2, 0.2), p=1.0),
    }
    prepared = prepare("some", SomeOf((1, 3), ops=ops, weights={"gray": 3}, random_order=random_order))
    x = images(40, SIZE)
    chosen, _ = drawn(prepared, len(x))
    got = ReferenceBackend([prepared])(x, [chosen])
    assert (FusedBackend([prepared])(x, [chosen]) - got).abs().max() <= 1e-5
    for row in range(len(x)):
        want = unit(x[[row, row]])
        for slot, alternative in enumerate(chosen.choice[row].tolist()):
            if alternative >= 0:
                op = [*ops.values()][alternative if random_order else slot]
                params = tensors(chosen.params[slot][alternative], np.array([row, row]))
                want = op(want, params={**params, "batch_prob": torch.ones(2)})
        assert torch.equal(got[row], want[0])
    for count in (0, 1):
        some = prepared.draw(np.zeros((count, prepared.count), np.float32), SIZE)
        assert FusedBackend([prepared])(x[:count], [some]).shape == (count, 3, *SIZE)


def test_members_of_some_of_have_independent_noise() -> None:
    noise = K.RandomGaussianNoise(std=0.05, p=1.0)
    ops = {"a": noise, "inner": SomeOf(2, ops={"b": noise, "c": noise})}
    x = torch.full((4, 64, 64, 3), 128, dtype=torch.uint8)
    for backend in ("fused", "kornia"):
        recipe = gpuaug.Augment(ops={"some": SomeOf(2, ops=ops)}, backend=backend)
        assert float(recipe(x, seed=0).std()) == pytest.approx(0.05 * 3**0.5, rel=0.02)


GRAY = {"a": K.RandomGrayscale(p=1.0), "b": K.RandomInvert(p=1.0), "off": None}
BASE = "augment.ops.choice."


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"n": 3}, [f"`{BASE}n`", "1 to 2", "Found: 3"]),
        ({"n": (0, 0)}, [f"`{BASE}n`", r"Found: (0, 0)"]),
        ({"n": (2, 1)}, [f"`{BASE}n`", "min <= max <= 2"]),
        ({"n": (1, 3)}, [f"`{BASE}n`", "Found: (1, 3)"]),
        ({"n": "12"}, [f"`{BASE}n`", "'12'"]),
        ({"weights": [1, 2]}, [f"`{BASE}weights`", "mapping", "[1, 2]", "a, b"]),
        ({"weights": {"c": 2}}, [f"`{BASE}weights`", "'c'", "names are a, b"]),
        ({"weights": {"a": 0}}, [f"`{BASE}weights.a`", "0"]),
        ({"weights": {"off": "2"}}, [f"`{BASE}weights.off`", "'2'"]),
        ({"random_order": 1}, [f"`{BASE}random_order`", "1"]),
        ({"p": 2}, [f"`{BASE}p`", "2"]),
        ({"ops": {"a": None}}, [f"`{BASE}ops`", "at least one"]),
        ({"ops": {"mixed": gpuaug.AugMix()}}, [f"`{BASE}ops.mixed`", "AugMix"]),
    ],
)
def test_some_of_refuses_with_the_full_key(given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare("choice", SomeOf(**{"n": 1, "ops": GRAY, **given}))
    for word in words:
        assert word in str(caught.value)


def test_a_choice_can_be_changed_by_overrides(photo_batch: torch.Tensor) -> None:
    words = ["augment=lerobot", "augment.ops.choice.weights.hue=2", "augment.ops.choice.ops.affine=null"]
    augment = gpuaug.compose("train", words).augment
    for recipe in (gpuaug.build(augment), hydra.utils.instantiate(augment)):
        assert (recipe.ops["choice"].n, recipe.ops["choice"].weights["hue"]) == (3, 2)
        assert len(recipe.prepared[0].leaves("choice")) == 5
        fused, kornia = (recipe.replace(backend=backend)(photo_batch, seed=0) for backend in ("fused", "kornia"))
        assert (fused - kornia).abs().max() < 1e-4
