"""Kornia's policies, with choices for each sample: its pixels and parameters, and every choice equally likely."""

from __future__ import annotations

from collections import Counter

import kornia.augmentation as K
import numpy as np
import pytest
import scipy.stats
import torch
from kornia.augmentation.container.params import ParamItem
from test_reference import images
from torch import Tensor

from gpuaug.augment.parameters import Prepared, tensors
from gpuaug.augment.policy import OneOf, prepare
from gpuaug.augment.reference import ReferenceBackend, unit
from gpuaug.errors import ConfigError

POLICIES = {
    "randaugment": lambda: K.auto.RandAugment(n=2, m=9),
    "randaugment strong": lambda: K.auto.RandAugment(n=5, m=29),
    "randaugment own": lambda: K.auto.RandAugment(
        n=1, m=20, policy=[[("translate_x", -0.4, 0.4)], [("translate_y", -0.3, 0.3)], [("posterize", 0, 8)]]
    ),
    "trivialaugment": lambda: K.auto.TrivialAugment(),
}
SIZE = (40, 28)


def drawn(prepared: Prepared, batch: int, *, size: tuple[int, int] = SIZE, seed: int = 0):
    u = np.random.default_rng(seed).random((batch, prepared.count), dtype=np.float32)
    return prepared.draw(u, size), u


@pytest.mark.parametrize("name", POLICIES)
def test_a_sample_has_the_pixels_of_kornias_policy_with_the_same_operations(name: str) -> None:
    op = POLICIES[name]()
    prepared = prepare(name, op)
    x = images(90, SIZE)
    chosen, _ = drawn(prepared, 90)
    got = ReferenceBackend([prepared])(x, [chosen])
    children = [(name, next(child.named_children())[0]) for name, child in op.named_children()]
    for row in range(90):
        items = []
        for alternatives, taken in zip(chosen.params, chosen.choice[row], strict=True):
            params: dict[str, Tensor] = tensors(alternatives[taken], np.array([row, row]))
            child, operation = children[taken]
            items.append(ParamItem(child, [ParamItem(operation, params | {"batch_prob": torch.ones(2)})]))
        assert torch.equal(op(unit(x[[row, row]]), params=items)[0], got[row]), row
    assert len(np.unique(chosen.choice)) == len(children)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("size", [SIZE, (224, 160)])
def test_the_parameters_are_kornias(name: str, size: tuple[int, int]) -> None:
    op = POLICIES[name]()
    chosen, _ = drawn(prepare(name, op), 2000, size=size)
    seen: dict[str, dict[str, Tensor]] = {}
    torch.manual_seed(0)
    while len(seen) < len(op):  # Kornia chooses for a batch: until it has chosen every operation
        for item in op.forward_parameters(torch.Size((2000, 3, *size))):
            seen[item.name] = item.data[0].data
    for number, (child, _) in enumerate(op.named_children()):
        theirs = seen[child]
        ours = chosen.params[0][number]
        assert ours.keys() == theirs.keys() - {"batch_prob", "forward_input_shape"}
        for k, v in ours.items():
            want = theirs[k].numpy()
            assert v.dtype == want.dtype, (child, k)
            assert v.shape[1:] == want.shape[1:]
            if len(np.unique(want)) <= 12:  # a magnitude and its sign, a constant, or numbers of bits
                assert set(np.unique(v)) == set(np.unique(want)), (child, k)
            else:
                assert scipy.stats.ks_2samp(v, want).pvalue > 1e-4, (child, k)


def test_randaugment_takes_distinct_operations_in_random_order_all_pairs_equally_likely() -> None:
    prepared = prepare("ra", K.auto.RandAugment(n=2, m=9))
    chosen, _ = drawn(prepared, 21000)
    assert (chosen.choice[:, 0] != chosen.choice[:, 1]).all()
    pairs, counts = np.unique(chosen.choice, axis=0, return_counts=True)
    assert len(pairs) == 15 * 14
    assert scipy.stats.chisquare(counts).pvalue > 1e-4
    signs = np.sign(chosen.params[0][3]["degrees"])  # rotate
    assert scipy.stats.binomtest(int((signs > 0).sum()), 21000).pvalue > 1e-4
    other = np.sign(chosen.params[1][3]["degrees"])
    assert abs(np.corrcoef(signs, other)[0, 1]) < 0.05


def test_all_of_randaugment_is_a_permutation() -> None:
    chosen, _ = drawn(prepare("ra", K.auto.RandAugment(n=15, m=9)), 50)
    assert (np.sort(chosen.choice, axis=1) == np.arange(15)).all()


@pytest.mark.parametrize(("m", "bits"), [(7, 7), (15, 6), (29, 4)])
def test_posterize_keeps_fewer_bits_with_more_magnitude(m: int, bits: int) -> None:
    chosen, _ = drawn(prepare("ra", K.auto.RandAugment(n=1, m=m)), 8)
    assert (chosen.params[0][4]["bits_factor"] == bits).all()


def test_trivialaugment_takes_every_operation_equally_often() -> None:
    chosen, _ = drawn(prepare("ta", K.auto.TrivialAugment()), 6000)
    counts = np.unique(chosen.choice, return_counts=True)[1]
    assert len(counts) == len(K.auto.TrivialAugment())
    assert scipy.stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("policy", ["imagenet", [[("rotate", 0.5, 3)], [("equalize", 0.5, None)]]])
def test_kornias_autoaugment_is_refused_with_ours(policy: object) -> None:
    for op, key in (
        (K.auto.AutoAugment(policy), "`augment.ops.auto` "),
        (OneOf(ops={"kornia": K.auto.AutoAugment(policy)}), "`augment.ops.auto.ops.kornia` "),
    ):
        with pytest.raises(ConfigError, match=r"AutoAugment\. .* use gpuaug\.AutoAugment") as caught:
            prepare("auto", op)
        assert str(caught.value).startswith(key)


@pytest.mark.parametrize("name", POLICIES)
def test_a_sample_draws_the_same_in_any_batch_and_no_generator_moves(name: str) -> None:
    prepared = prepare(name, POLICIES[name]())
    state = torch.get_rng_state()
    whole, u = drawn(prepared, 40)
    assert torch.equal(torch.get_rng_state(), state)
    part = prepared.draw(u[[7, 31]], SIZE)
    np.testing.assert_array_equal(part.choice, whole.choice[[7, 31]])
    for slot in range(len(prepared.slots)):
        for row, full in ((0, 7), (1, 31)):
            alternative = part.choice[row, slot]
            for k, v in part.params[slot][alternative].items() if alternative >= 0 else ():
                np.testing.assert_array_equal(v[row], whole.params[slot][alternative][k][full])
    for batch in (0, 1):
        empty = prepared.draw(u[:batch], SIZE)
        assert empty.choice.shape == (batch, len(prepared.slots))
        assert all(len(v) == batch for slot in empty.params for p in slot for v in p.values())


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
    jitter, policy = K.ColorJitter(0.4, 0.4, 0.4, 0.1), K.auto.RandAugment(n=2, m=9)
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
