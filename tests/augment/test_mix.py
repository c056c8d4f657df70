"""MixUp, CutMix and label smoothing against their definitions."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from gpuaug.augment.mix import Mix, symmetric_beta
from gpuaug.errors import ConfigError
from gpuaug.random import keyed as draw

C = 5


def call(mix, images, labels, *, valid=None, seed=0, epoch=0, first_index=0, num_classes=C):
    valid = torch.ones(len(labels), dtype=torch.bool) if valid is None else valid
    return mix(images, labels, valid=valid, num_classes=num_classes, seed=seed, epoch=epoch, first_index=first_index)


def batch(size=6, shapes=((8, 12),), dtype=torch.float32):
    """Views whose sample i is constant i + 1, and labels i % C."""
    value = torch.arange(1, size + 1, dtype=dtype)[:, None, None, None]
    return [value.expand(size, 3, *shape).clone() for shape in shapes], torch.arange(size) % C


def onehot(labels):
    return torch.eye(C)[labels]


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.5, 0.8, 1.0, 2.0, 32.0])
def test_lambda_has_the_beta_distribution(alpha):
    u = draw.uniforms([draw.Stream("", 0, "mix", 4)], seed=7, epoch=0, indices=np.arange(4000))["", 0, "mix"]
    values = [symmetric_beta(alpha, float(a), float(b)) for a, b in u[:, 2:4]]
    assert min(values) >= 0
    assert max(values) <= 1
    assert stats.kstest(values, stats.beta(alpha, alpha).cdf).pvalue > 1e-3


def test_mixup_blends_images_and_labels_with_one_lambda_and_one_pairing_for_all_views():
    images, labels = batch(shapes=((8, 12), (4, 4)))
    (a, b), soft = call(Mix(mixup_alpha=1.0), images, labels, first_index=3)
    # sample i is i + 1 everywhere, so the blend gives lambda and partner away
    assert torch.equal(a[:, 0, 0, 0], b[:, 0, 0, 0])
    solutions = []
    for i in range(6):
        weights = soft[i].double().numpy()
        found = [
            (lam, j)
            for j in range(6)
            if j != i
            for lam in [(float(a[i, 0, 0, 0]) - (j + 1)) / (i - j)]
            if np.allclose(lam * np.eye(C)[i % C] + (1 - lam) * np.eye(C)[j % C], weights, atol=1e-5)
        ]
        solutions.append({(round(lam, 4), j) for lam, j in found})
    lams = set.intersection(*({lam for lam, _ in s} for s in solutions))
    assert len(lams) == 1
    partners = [{j for lam, j in s if lam in lams} for s in solutions]
    assert all(partners)
    assert soft.sum(1).allclose(torch.ones(6))


def test_cutmix_pastes_a_box_and_labels_follow_its_true_area():
    images, labels = batch(shapes=((32, 48), (16, 24)))
    for first_index in range(20):
        (a, b), soft = call(Mix(cutmix_alpha=1.0), images, labels, first_index=first_index)
        partners = []
        for i in range(6):
            foreign = a[i, 0] != i + 1
            area = foreign.float().mean()
            mine = float((soft[i] * onehot(labels)[i]).sum())
            if foreign.any():
                ys, xs = foreign.nonzero(as_tuple=True)
                assert foreign.sum() == (ys.max() - ys.min() + 1) * (xs.max() - xs.min() + 1)
                (j,) = set((a[i, 0][foreign] - 1).long().tolist())
                partners.append(j)
                expected = (1 - area) * onehot(labels)[i] + area * onehot(labels)[j]
                assert soft[i].allclose(expected, atol=1e-6)
                smaller = b[i, 0] != i + 1
                assert abs(float(smaller.float().mean() - area)) < 0.2
                assert set(b[i, 0].unique().tolist()) <= {i + 1.0, j + 1.0}
            else:
                assert mine == 1
        assert sorted(partners) in (list(range(6)), [])


def test_switch_p_chooses_between_both():
    images, labels = batch()

    def cut(mix, first_index):
        (x,), _ = call(mix, images, labels, first_index=first_index)
        return len(x[0].unique()) > 1 or torch.equal(x, images[0])

    both = {"mixup_alpha": 1.0, "cutmix_alpha": 1.0}
    assert all(cut(Mix(**both, switch_p=1.0), i) for i in range(20))
    assert not any(cut(Mix(**both, switch_p=0.0), i) for i in range(20))
    share = np.mean([cut(Mix(**both), i) for i in range(300)])
    assert 0.4 < share < 0.6


def test_p_is_the_share_of_mixed_batches_and_labels_stay_soft():
    images, labels = batch()
    mixed = 0
    for first_index in range(300):
        (x,), soft = call(Mix(mixup_alpha=1.0, p=0.3, label_smoothing=0.1), images, labels, first_index=first_index)
        assert soft.dtype == torch.float32
        if torch.equal(x, images[0]):
            assert soft.allclose(0.9 * onehot(labels) + 0.1 / C)
        else:
            mixed += 1
    assert 60 < mixed < 120


@pytest.mark.parametrize("mix", [Mix(mixup_alpha=1.0), Mix(cutmix_alpha=1.0)])
def test_invalid_samples_stay_and_are_nobodys_partner(mix):
    images, labels = batch()
    valid = torch.tensor([True, False, True, True, False, True])
    images[0][~valid] = float("nan")  # would show in whatever it is mixed into
    for first_index in range(20):
        (x,), soft = call(mix, images, labels, valid=valid, first_index=first_index)
        assert x[valid].isfinite().all()
        assert x[~valid].isnan().all()
        assert torch.equal(soft[~valid], onehot(labels)[~valid])
        assert not soft[valid][:, labels[1]].any() or labels[1] in labels[valid]
    alone = torch.tensor([True, False, False, False, False, False])
    (x,), soft = call(mix, images, labels, valid=alone)
    assert torch.equal(x.nan_to_num(), images[0].nan_to_num())
    assert torch.equal(soft, onehot(labels))


def test_everybody_has_another_partner_and_pairings_differ():
    images, labels = batch()
    seen = set()
    for first_index in range(40):
        (x,), _ = call(Mix(cutmix_alpha=1000.0), images, labels, first_index=first_index)  # lambda near 1/2
        partners = tuple(int(x[i].max() - 1) if x[i].max() != i + 1 else int(x[i].min() - 1) for i in range(6))
        assert all(i != j for i, j in enumerate(partners))
        assert sorted(partners) == list(range(6))
        seen.add(partners)
    assert len(seen) > 20


@pytest.mark.parametrize("kind", ["soft", "multilabel"])
def test_float_labels_are_mixed_as_they_are(kind):
    images, _ = batch()
    g = torch.Generator().manual_seed(0)
    labels = torch.rand(6, C, generator=g)
    labels = labels / labels.sum(1, keepdim=True) if kind == "soft" else (labels > 0.5).float()
    (x,), soft = call(Mix(mixup_alpha=1.0, label_smoothing=0.2), images, labels, num_classes=None)
    smooth = 0.8 * labels + 0.2 / C
    order = (x[:, 0, 0, 0].double() - torch.arange(1, 7)).abs()
    assert order.gt(0).all()
    # images and labels are the same affine combination: one matrix explains both
    lam_partner = [
        (lam, j)
        for j in range(1, 6)
        for lam in [(float(x[0, 0, 0, 0]) - (j + 1)) / -j]
        if (lam * smooth[0] + (1 - lam) * smooth[j]).allclose(soft[0], atol=1e-5)
    ]
    assert len(lam_partner) == 1


def test_draws_depend_on_seed_epoch_and_first_index_only():
    images, labels = batch()
    mix = Mix(mixup_alpha=1.0, cutmix_alpha=1.0)
    (x,), soft = call(mix, images, labels, seed=1, epoch=2, first_index=3)
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    (again,), same = call(mix, images, labels, seed=1, epoch=2, first_index=3)
    assert torch.equal(x, again)
    assert torch.equal(soft, same)
    assert torch.equal(state[0], torch.get_rng_state())
    assert (state[1] == np.random.get_state()[1]).all()
    for other in ({"seed": 2}, {"epoch": 3}, {"first_index": 4}):
        (y,), _ = call(mix, images, labels, **{"seed": 1, "epoch": 2, "first_index": 3, **other})
        assert not torch.equal(x, y)


@pytest.mark.parametrize("mix", [Mix(mixup_alpha=1.0), Mix(cutmix_alpha=1000.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_dtype_and_memory_format_stay_and_inputs_are_not_written(mix, dtype, memory_format):
    images, labels = batch(dtype=dtype)
    images = [x.contiguous(memory_format=memory_format) for x in images]
    before = [x.clone() for x in images]
    (x,), soft = call(mix, images, labels, first_index=1)
    assert x.dtype == dtype
    assert x.is_contiguous(memory_format=memory_format)
    assert torch.equal(images[0], before[0])
    assert soft.dtype == torch.float32
    assert not torch.equal(x, images[0])


def test_labels_that_cannot_be_mixed_are_refused():
    images, labels = batch()
    mix = Mix(mixup_alpha=1.0)
    valid = torch.ones(6, dtype=torch.bool)
    more = {"valid": valid, "seed": 0, "epoch": 0, "first_index": 0}
    with pytest.raises(ConfigError, match="needs labels"):
        mix(images, None, num_classes=C, **more)
    with pytest.raises(ConfigError, match="num_classes"):
        mix(images, labels, num_classes=None, **more)
    with pytest.raises(ConfigError, match=r"float32 \[6\]"):
        mix(images, labels.float(), num_classes=C, **more)
    with pytest.raises(ConfigError, match=r"int64 \[6, 2\]"):
        mix(images, torch.zeros(6, 2, dtype=torch.int64), num_classes=C, **more)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mixup_alpha", -1), ("cutmix_alpha", math.inf), ("p", 1.5), ("switch_p", -0.1), ("label_smoothing", 1.0),
        ("p", "high"), ("p", None), ("mixup_alpha", math.nan), ("p", True),
    ],
)  # fmt: skip
def test_settings_are_checked(name, value):
    with pytest.raises(ConfigError, match=rf"`{name}` must be.*Found"):
        Mix(**{name: value})
    assert repr(Mix(mixup_alpha=1, p=1)) == repr(Mix(mixup_alpha=1.0, p=1.0))  # one setting, one text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mix", [Mix(mixup_alpha=1.0), Mix(cutmix_alpha=1.0, label_smoothing=0.1)])
def test_on_cuda_equals_cpu_without_waiting(mix):
    images, labels = batch(shapes=((32, 48), (16, 16)))
    expected, soft = call(mix, images, labels)
    device = [x.cuda() for x in images], labels.cuda()
    call(mix, *device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found, soft_found = call(mix, *device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(found, expected, strict=True):
        assert a.cpu().allclose(b, atol=1e-6)
    assert soft_found.cpu().allclose(soft, atol=1e-6)
