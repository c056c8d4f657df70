"""OneOf: what it chooses for each sample, and what it refuses; Kornia's policies are refused with gpuaug's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import scipy.stats
import torch
from test_reference import images

import gpuaug
from gpuaug.augment.parameters import Prepared
from gpuaug.augment.policy import OneOf, prepare
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
        ({"a": None}, 1.0, ["augment.ops.choice.ops", "at least one"]),
        ([K.RandomGrayscale()], 1.0, ["augment.ops.choice.ops", "mapping"]),
        ({"a": K.RandomGrayscale()}, 1.5, ["augment.ops.choice.p", "1.5"]),
        ({"a": K.RandomGrayscale()}, "high", ["augment.ops.choice.p", "high"]),
        ({"own": torch.nn.Dropout()}, 1.0, ["augment.ops.choice.ops.own", "Dropout"]),
        ({"a": K.ColorJitter(same_on_batch=True)}, 1.0, ["augment.ops.choice.ops.a.same_on_batch"]),
    ],
)
def test_one_of_refuses_with_the_full_key(ops: object, p: object, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare("choice", OneOf(ops=ops, p=p))
    for word in words:
        assert word in str(caught.value)
