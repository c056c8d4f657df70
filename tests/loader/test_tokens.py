"""Sequences of patches: as many samples per step as fit, the same lengths on all ranks, resumed and replayed."""

from __future__ import annotations

from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from common import loader
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import encode, photograph
from test_replay import Run, assert_equal

import gpuaug
from gpuaug.errors import ConfigError
from gpuaug.read.order import EpochOrder, Ordered

PATCH = 8
TOKENS = gpuaug.Tokens(128, lengths=[8, 16, 40], multiple=2)


def pictures(count: int, seed: int = 0) -> list[tuple[bytes, int]]:
    sides = np.random.default_rng(seed).integers(9, 70, (count, 2)).tolist()
    return [(encode(photograph("china", tuple(side)), "PNG"), n) for n, side in enumerate(sides)]


def recipe(**more: Any) -> gpuaug.Augment:
    return gpuaug.Augment(crop=gpuaug.ResizeToSequence(16, patch=PATCH), **more)


RECIPE = recipe(ops={"flip": K.RandomHorizontalFlip(p=0.5), "jitter": K.ColorJitter(0.2, 0.0, 0.2)})


def orders(total: int, ranks: int, tokens: gpuaug.Tokens, **more: Any) -> list[EpochOrder]:
    epoch = Ordered(torch.arange(total))
    return [EpochOrder(epoch, rank=r, world_size=ranks, tokens=tokens, **more) for r in range(ranks)]


some_tokens = st.builds(
    gpuaug.Tokens, st.just(96), lengths=st.lists(st.integers(1, 96), min_size=1, max_size=4), multiple=st.integers(1, 9)
)


@given(some_tokens, st.integers(0, 300), st.integers(1, 4), st.sampled_from(["pad", "drop", "uneven"]), st.floats(0, 1))
@settings(max_examples=150, deadline=None)
def test_steps_have_one_length_and_show_every_sample_once(tokens, total, ranks, last, begin):
    start, where = int(begin * total), {"seed": 3, "number": 2}
    each = orders(total, ranks, tokens, start=start, last=last, **where)
    shown, longest = [], max(map(len, each))
    assert last == "uneven" or len({len(own) for own in each}) == 1
    for k in range(longest):
        steps = [(own.step(k), own[k], own.positions(k)) for own in each if k < len(own)]
        assert len({step for step, _, _ in steps}) == 1
        sizes = [len(task[0]) for _, task, _ in steps]
        assert max(sizes) <= tokens.samples(steps[0][0].length)
        assert last == "uneven" or len(set(sizes)) == 1
        if k < longest - 1:
            assert sizes == [tokens.samples(steps[0][0].length)] * ranks
        before = len(shown)
        shown += sorted(int(i) for _, (indices, _, valid), _ in steps for i in indices[valid])
        assert shown[before:] == list(range(start + before, start + len(shown)))
        assert each[0].position(k + 1) == min(start + len(shown), total)
    assert len(shown) in (range(total - start - ranks + 1, total - start + 1) if last == "drop" else [total - start])


@given(some_tokens, st.integers(1, 200), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_all_epochs_have_the_same_number_of_steps_and_a_resume_goes_on(tokens, total, ranks):
    epochs = [orders(total, ranks, tokens, last="pad", seed=5, number=epoch)[0] for epoch in range(4)]
    assert len({len(each) for each in epochs}) == 1
    for k in range(len(epochs[1])):
        rest = orders(total, ranks, tokens, last="pad", seed=5, number=1, start=epochs[1].position(k))[0]
        assert [rest.step(i) for i in range(len(rest))] == [epochs[1].step(i) for i in range(k, len(epochs[1]))]


def test_rounds_have_every_length_once_in_an_order_of_their_own():
    (own,) = orders(3000, 1, TOKENS, last="pad", seed=1)
    lengths = [own.step(k).length for k in range(len(own))]
    rounds = [tuple(lengths[k : k + 3]) for k in range(0, len(lengths) - 3, 3)]
    assert {tuple(sorted(each)) for each in rounds} == {(8, 16, 40)}
    assert len(set(rounds)) == 6


def test_sizes_and_patches_are_those_of_timm(v2):
    from timm.data.naflex_transforms import get_image_size_for_seq, patchify_image

    rng, equal = np.random.default_rng(0), 0
    for _ in range(300):
        h, w = rng.integers(40, 900, 2).tolist()
        if max(h, w) > 4 * min(h, w):
            continue
        length, patch = int(rng.integers(16, 1024)), int(rng.choice([8, 14, 16]))
        crop = gpuaug.ResizeToSequence(length, patch=patch)
        ours = crop.windows(None, np.array([h]), np.array([w])).resized[0]
        _, theirs = get_image_size_for_seq((h, w), patch, length)
        equal += tuple(ours) == theirs
        assert np.prod(theirs) // patch**2 <= np.prod(ours) // patch**2 <= length  # their search ends earlier
    assert equal > 240
    samples = pictures(24)
    with loader(samples, augment=RECIPE, batch_size=TOKENS, num_workers=0) as made:
        for batch in made:
            found = batch.patches()
            assert found["patches"].shape == (len(batch), batch.length, PATCH * PATCH * 3)
            for row, (height, width) in enumerate(batch.sides.tolist()):
                patches, coord, valid = patchify_image(batch.images[row, :, :height, :width], (PATCH, PATCH))
                count = len(valid)
                assert count <= batch.length
                assert torch.equal(found["patches"][row, :count], patches)
                assert torch.equal(found["patch_coord"][row, :count], coord)
                assert found["patch_valid"][row].tolist() == [True] * count + [False] * (batch.length - count)
                assert not found["patches"][row, count:].any()
                assert not found["patch_coord"][row, count:].any()


def test_pixels_are_those_of_the_image_alone():
    """A sample depends on seed, epoch, its number and the length, not on its batch."""
    samples = pictures(30)
    with loader(samples, augment=RECIPE, batch_size=TOKENS, num_workers=2) as made:
        made.set_epoch(3)
        for batch in made:
            crop = gpuaug.ResizeToSequence(batch.length, patch=PATCH)
            with loader(samples, augment=RECIPE.replace(crop=crop), num_workers=0) as plain:
                for row in range(0, len(batch), 3):
                    own = plain.fetch([int(batch.indices[row])], epoch=3)
                    height, width = batch.sides[row].tolist()
                    assert own.images.shape[2:] == (height, width)
                    assert torch.equal(own.images[0], batch.images[row, :, :height, :width])


def test_steps_of_any_run_are_replayed():
    """Ranks change, the run is resumed anywhere, and even the token budget changes."""
    for seed in range(6):
        rng = np.random.default_rng(seed)
        run = Run(pictures(int(rng.integers(20, 60)), seed), augment=RECIPE, mix=None, seed=seed, order="shuffle")
        while len(run.steps) < 30:
            run.segment(
                ranks=int(rng.integers(1, 4)),
                steps=int(rng.integers(1, 10)),
                batch_size=TOKENS if rng.random() < 0.7 else gpuaug.Tokens(64, lengths=[32, 4], multiple=1),
                last=str(rng.choice(["pad", "uneven"])),
                limit_batches=None,
                num_workers=0,
                prefetch=int(rng.integers(0, 3)),
            )
        with loader(run.samples, **run.settings, batch_size=7) as made:
            made.load_state_dict(run.state)
            for step in rng.permutation(len(run.steps)):
                assert_equal(made.replay(int(step)), run.steps[step])


def test_a_second_resume_on_the_same_ranks_goes_on():
    samples, tokens = pictures(240), gpuaug.Tokens(64, lengths=[4, 8, 16, 32], multiple=1)

    def resumed(state, steps=None):
        with loader(samples, augment=RECIPE, batch_size=tokens, rank=0, world_size=2) as made:
            made.load_state_dict(state)
            batches = [batch for _, batch in zip(range(steps or 999), made, strict=False)]
            return [(batch.length, batch.indices.tolist()) for batch in batches], made.state_dict()

    with loader(samples, augment=RECIPE, batch_size=tokens, rank=0, world_size=3) as made:
        next(iter(made))
        state = made.state_dict()
    whole, _ = resumed(state)
    head, after = resumed(state, 2)
    middle, after = resumed(after, 1)
    tail, _ = resumed(after)
    assert whole == head + middle + tail
    assert len(after["passes"]) == 2


def test_states_with_large_budgets_load():
    tokens = gpuaug.Tokens(2**22, lengths=[8])
    with loader(pictures(4), augment=RECIPE, batch_size=tokens) as made:
        next(iter(made))
        state = made.state_dict()
    with loader(pictures(4), augment=RECIPE, batch_size=tokens) as made:
        made.load_state_dict(state)
        assert made.state_dict()["passes"] == state["passes"]


def test_bad_samples_and_drop():
    samples = pictures(20)
    samples[3] = (b"no image", 3)
    for policy, rows in (("blank", 20), ("drop", 19)):
        faults = gpuaug.Faults(policy=policy)
        with loader(samples, augment=RECIPE, batch_size=TOKENS, faults=faults, num_workers=0) as made:
            batches = list(made)
        assert sum(map(len, batches)) == rows
        for batch in batches:
            assert batch.patches()["patch_valid"].any(dim=1)[batch.valid].all()
            assert not batch.patches()["patches"][~batch.valid].any()


BAD = [
    (lambda: gpuaug.Tokens(0), "`batch_size.tokens` must be"),
    (lambda: gpuaug.Tokens(100, lengths=[128]), "`batch_size.lengths` must be a list of numbers from 1 to 65536"),
    (lambda: gpuaug.Tokens(100, lengths=[]), "`batch_size.lengths` must be"),
    (lambda: gpuaug.ResizeToSequence(0), "`length` must be"),
    (lambda: loader(pictures(2), augment=gpuaug.Augment(crop=gpuaug.Resize((8, 8))), batch_size=TOKENS),
     "needs a recipe with one view and the crop gpuaug.ResizeToSequence. Found: 1 views, `augment.crop` Resize"),
    (lambda: loader(pictures(2), augment=recipe(ops={"turn": K.RandomAffine(9.0)})),
     "`augment.ops.turn` must not move the image inside its padding with gpuaug.ResizeToSequence. Found: RandomAffine"),
    (lambda: loader(pictures(2), augment=recipe(ops={"x": gpuaug.OneOf(ops={"f": K.RandomHorizontalFlip()})})),
     "`augment.ops.x.ops.f` must not move the image"),
    (lambda: gpuaug.Tokens(2**40), "`batch_size.tokens` must be"),
    (lambda: loader(pictures(2), augment=RECIPE, batch_size=TOKENS, mix=gpuaug.Mix(mixup_alpha=1.0)),
     "`mix` must be none if `batch_size` is gpuaug.Tokens"),
    (lambda: loader(pictures(2), augment=recipe(sizes=gpuaug.Sizes(choose=[8]))), "`augment.sizes`"),
    (lambda: next(iter(loader(pictures(2), augment=gpuaug.Augment(crop=gpuaug.Resize((8, 8)))))).patches(),
     "`patches` needs a batch with the crop gpuaug.ResizeToSequence"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_what_does_not_fit_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert message in str(caught.value)
