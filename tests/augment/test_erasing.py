"""gpuaug.RandomErasing against timm's class: boxes, colours, noise; both backends; independence of the batch."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

import gpuaug
from gpuaug.augment.policy import prepare
from gpuaug.errors import ConfigError

BACKENDS = ("fused", "kornia")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NORMALIZE = gpuaug.Normalize(MEAN, STD)


@pytest.fixture(scope="module")
def timm(v2: ModuleType) -> Any:
    """timm's module of random erasing."""
    return pytest.importorskip("timm.data.random_erasing")


def recipe(backend: str = "fused", normalize: gpuaug.Normalize | None = NORMALIZE, **given: Any) -> gpuaug.Augment:
    return gpuaug.Augment(ops={"erase": gpuaug.RandomErasing(**given)}, normalize=normalize, backend=backend)


def boxes(images: int, size: tuple[int, int], **given: Any) -> tuple[np.ndarray, np.ndarray]:
    """Whether each box of our draws is used, bool [images, boxes], and x, y, width, height: [images, boxes, 4]."""
    prepared = prepare("erase", gpuaug.RandomErasing(**given))
    u = np.random.default_rng(0).random((images, prepared.count), dtype=np.float32)
    chosen = prepared.draw(u, size)
    drawn = [[slot[0][k] for k in ("xs", "ys", "widths", "heights")] for slot in chosen.params]
    return chosen.choice >= 0, np.array(drawn).transpose(2, 0, 1)


def theirs(timm: Any, count: int, size: tuple[int, int], **given: Any) -> list[list[tuple[int, int, int, int]]]:
    """The boxes of ``count`` images that timm erases."""
    images: list[list[tuple[int, int, int, int]]] = []

    class Noted:  # stands for an image, and notes where it is written to
        def __setitem__(self, at: Any, value: Tensor) -> None:
            _, rows, columns = at
            height, width = rows.stop - rows.start, columns.stop - columns.start
            images[-1].append((columns.start, rows.start, width, height))

    op, state = timm.RandomErasing(probability=1.0, mode="const", device="cpu", **given), random.getstate()
    random.seed(5)
    for _ in range(count):
        images.append([])
        op._erase(Noted(), 3, *size, torch.float32)
    random.setstate(state)
    return images


@pytest.mark.parametrize("size", [(224, 224), (30, 80)])
def test_boxes_have_timms_distribution(timm: Any, size: tuple[int, int]) -> None:
    used, ours = boxes(10_000, size, p=1.0)
    known = np.array([box for image in theirs(timm, 10_000, size, max_area=1 / 3) for box in image])
    assert len(ours[used]) == pytest.approx(len(known), abs=60)
    for name, of in {
        "area": lambda b: b[:, 2] * b[:, 3],
        "aspect": lambda b: b[:, 3] / b[:, 2],
        "x": lambda b: b[:, 0],
        "y": lambda b: b[:, 1],
        "width": lambda b: b[:, 2],
        "height": lambda b: b[:, 3],
    }.items():
        assert scipy.stats.ks_2samp(of(ours[used]), of(known)).pvalue > 1e-3, name


def test_the_number_of_boxes_is_timms(timm: Any) -> None:
    """1 to ``count``, all equally likely; the boxes of an image share its area."""
    used, ours = boxes(10_000, (64, 48), p=1.0, count=3)
    known = theirs(timm, 10_000, (64, 48), min_count=1, max_count=3)
    numbers = used.sum(axis=1)
    assert np.abs(np.bincount(numbers, minlength=4) - np.bincount([*map(len, known)], minlength=4)).max() < 250
    for number in (1, 2, 3):
        area = ours[numbers == number][used[numbers == number]][:, 2:].prod(axis=1)
        their_area = [w * h for image in known if len(image) == number for _, _, w, h in image]
        assert scipy.stats.ks_2samp(area, their_area).pvalue > 1e-3


def test_probability() -> None:
    used, _ = boxes(10_000, (64, 64), p=0.25)
    assert scipy.stats.binomtest(int(used.sum()), 10_000, 0.25).pvalue > 1e-4


def test_a_box_that_never_fits_erases_nothing(timm: Any) -> None:
    used, _ = boxes(50, (20, 20), p=1.0, scale=(1, 1), ratio=(1, 1))
    assert not used.any()
    assert theirs(timm, 50, (20, 20), min_area=1, max_area=1, min_aspect=1, max_aspect=1) == [[]] * 50
    x = torch.zeros((2, 1, 1, 3), dtype=torch.uint8)
    assert torch.equal(recipe(p=1.0)(x, seed=0), NORMALIZE(torch.zeros(2, 3, 1, 1)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_const_is_timms_zero_after_normalization(photo_batch: Tensor, backend: str) -> None:
    made = recipe(backend, p=1.0, mode="const", count=2)(photo_batch, seed=2)
    plain = gpuaug.Augment(normalize=NORMALIZE, backend=backend)(photo_batch)
    given = recipe(p=1.0, mode="const", count=2)
    (chosen,) = given.choose(given.draw(seed=2, epoch=0, indices=range(8)), [photo_batch.shape[1:3]])[0]
    for row, want in enumerate(plain):
        for slot in np.flatnonzero(chosen.choice[row] >= 0):
            params = chosen.params[slot][0]
            x, y, w, h = (int(params[k][row]) for k in ("xs", "ys", "widths", "heights"))
            want[:, y : y + h, x : x + w] = 0  # timm's mode "const"
    assert (made - plain).abs().max() < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_noise_is_standard_normal_after_normalization(backend: str) -> None:
    x = torch.full((40, 48, 48, 3), 128, dtype=torch.uint8)
    untouched = NORMALIZE(torch.full((1, 3, 1, 1), 128 / 255))
    made = recipe(backend, p=1.0, scale=(0.3, 0.33))(x, seed=1)
    inside = ((made - untouched).abs() > 1e-6).any(dim=1)
    for channel in range(3):
        values = made[:, channel][inside].numpy()
        assert scipy.stats.kstest(values, "norm").pvalue > 1e-3
    r, g, b = (made[:, c][inside] for c in range(3))
    assert torch.corrcoef(torch.stack([r, g, b])).triu(1).abs().max() < 0.03
    assert not torch.equal(made[0], made[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_box_has_its_own_noise(backend: str) -> None:
    x = torch.zeros((40, 40, 40, 3), dtype=torch.uint8)
    given = recipe(backend, None, p=1.0, count=2, scale=(0.2, 0.2), ratio=(1, 1))  # all pairs of boxes: 13 x 13
    made = given(x, seed=0)
    (chosen,) = given.choose(given.draw(seed=0, epoch=0, indices=range(40)), [(40, 40)])[0]
    pairs = []
    for row in np.flatnonzero((chosen.choice >= 0).all(axis=1)):
        (left, top), (right, bottom) = ([int(s[0][k][row]) for k in ("xs", "ys")] for s in chosen.params)
        if abs(left - right) >= 13 or abs(top - bottom) >= 13:  # the boxes do not overlap
            pairs.append([made[row, :, y : y + 13, v : v + 13].flatten() for v, y in ((left, top), (right, bottom))])
    first, second = (torch.cat(boxes) for boxes in zip(*pairs, strict=True))
    mean = torch.tensor(MEAN).repeat_interleave(169).repeat(len(pairs))
    assert len(pairs) > 3
    assert abs(torch.corrcoef(torch.stack([first - mean, second - mean]))[0, 1]) < 0.1


def test_masks_and_boxes_stay() -> None:
    x = torch.full((2, 32, 32, 3), 9, dtype=torch.uint8)
    masks = torch.arange(32)[None, :, None].expand(2, 32, 32)
    _, targets = recipe(p=1.0)(x, masks=masks, boxes=[[[1, 2, 9, 8]], []], seed=0)
    assert torch.equal(targets.masks.long(), masks)
    assert targets.boxes.tolist() == [[1, 2, 9, 8]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"p": 1.5}, r"`p` must be a number in \[0, 1\]. Found: 1.5"),
        ({"scale": (0, 0.3)}, r"`scale` must satisfy 0 < min <= max <= 1. Found: \(0, 0.3\)"),
        ({"ratio": (3, 0.3)}, r"`ratio` must satisfy 0 < min <= max. Found: \(3, 0.3\)"),
        ({"mode": "rand"}, "`mode` must be one of const, pixel. Found: 'rand'"),
        ({"count": 0}, "`count` must be a whole number from 1"),
        ({"mean": (1, 2)}, "^`mean` and `std` must have equally many numbers"),
        ({"std": (0, 1, 1)}, "^`std` must be positive"),
    ],
)
def test_refused_settings(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gpuaug.RandomErasing(**given)


def test_a_direct_call_is_refused() -> None:
    with pytest.raises(ConfigError, match="entry of a recipe's `ops`"):
        gpuaug.RandomErasing()(torch.zeros(1, 3, 4, 4))


@pytest.mark.parametrize("inside", [False, True])
def test_noise_that_would_not_be_standard_normal_is_refused(inside: bool) -> None:
    erase, flip = gpuaug.RandomErasing(), K.RandomHorizontalFlip()
    choice = gpuaug.OneOf(ops={"inner": gpuaug.OneOf(ops={"e": erase, "none": flip})})
    op, key = (choice, r"augment\.ops\.c\.ops\.inner\.ops\.e") if inside else (erase, r"augment\.ops\.c")
    with pytest.raises(ConfigError, match=rf"`{key}` must have the mean and std.*0\.5.*Set `{key}\.mean`"):
        gpuaug.Augment(ops={"c": op}, normalize=gpuaug.Normalize((0.5,) * 3, (0.5,) * 3))
    with pytest.raises(ConfigError, match=rf"`{key}` must be after .*Found: `augment\.ops\.flip` can come later"):
        gpuaug.Augment(ops={"c": op, "flip": flip}, normalize=NORMALIZE)
    const = gpuaug.RandomErasing(mode="const")
    gpuaug.Augment(ops={"const": const, "flip": flip, "c": op, "more": erase}, normalize=NORMALIZE)


def test_noise_in_some_of_is_refused_if_another_member_can_come_later() -> None:
    members = {"flip": K.RandomHorizontalFlip(), "e": gpuaug.RandomErasing()}
    for n, ops, random_order in ((2, members, False), (1, dict(reversed(members.items())), True)):
        gpuaug.Augment(ops={"s": gpuaug.SomeOf(n, ops=ops, random_order=random_order)})
    for ops, random_order in ((members, True), (dict(reversed(members.items())), False)):
        with pytest.raises(
            ConfigError, match=r"`augment\.ops\.s\.ops\.e` must be after.*`augment\.ops\.s\.ops\.flip` can"
        ):
            gpuaug.Augment(ops={"s": gpuaug.SomeOf(2, ops=ops, random_order=random_order)})
