"""A step of a run, again: equal pixels, whatever ranks, workers and resumes led to it."""

from __future__ import annotations

import json
from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from common import loader
from pictures import encode

import gpuaug
from gpuaug.errors import ConfigError, StateError
from gpuaug.loader.state import Row
from gpuaug.source.base import checksum


class Images(list[tuple[bytes, int]]):
    num_classes = 3


def source(count: int, *, broken: tuple[int, ...] = ()) -> Images:
    rng = np.random.default_rng(0)
    made = [(encode(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8), "PNG"), n % 3) for n in range(count)]
    return Images((b"broken", y) if n in broken else (x, y) for n, (x, y) in enumerate(made))


RECIPE = gpuaug.Augment(
    crop=gpuaug.RandomResizedCrop(8),
    ops={"flip": K.RandomHorizontalFlip(p=0.5), "noise": K.RandomGaussianNoise(p=0.5)},
)


class Run:
    """A training that records what each rank got, step by step."""

    def __init__(self, samples: Any, **settings: Any) -> None:
        self.samples, self.settings = samples, settings
        self.steps: list[list[Any]] = []
        self.state: dict[str, Any] | None = None

    def segment(self, *, ranks: int, steps: int, **more: Any) -> None:
        """Run so many steps on so many ranks, from the state on."""
        made = [loader(self.samples, **{**self.settings, **more}, rank=rank, world_size=ranks) for rank in range(ranks)]
        for each in made:
            if self.state is not None:
                each.load_state_dict(json.loads(json.dumps(self.state)))
        while steps > 0 and len(made[0].epoch_order):
            passes = [iter(each) for each in made]
            while steps > 0:
                batches = [next(each, None) for each in passes]
                if batches[0] is None:
                    break
                self.steps.append([batch for batch in batches if batch is not None])
                steps -= 1
        self.state = made[0].state_dict()
        for each in made:
            each.close()


def assert_equal(replayed: list[Any], recorded: list[Any]) -> None:
    assert len(replayed) == len(recorded)
    for a, b in zip(replayed, recorded, strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.labels, b.labels)
        assert torch.equal(a.indices, b.indices)
        assert torch.equal(a.valid, b.valid)


@pytest.mark.parametrize("seed", range(30))
def test_any_step_of_any_run(seed):
    """Thirty runs of about 34 steps: ranks, workers, samples per batch, `last`, limits and resume points vary."""
    rng = np.random.default_rng(seed)
    orders = ("shuffle", "sequential", gpuaug.Repeated(2), list(range(5)) * 2)
    mix = gpuaug.Mix(mixup_alpha=1.0, cutmix_alpha=1.0, p=0.8) if rng.random() < 0.4 else None
    run = Run(
        source(int(rng.integers(5, 24))),
        augment=RECIPE,
        mix=mix,
        seed=seed,
        order=orders[seed % 4],
    )
    while len(run.steps) < 34:
        run.segment(
            ranks=int(rng.integers(1, 4)),
            steps=int(rng.integers(1, 12)),
            batch_size=int(rng.integers(1, 5)),
            last=str(rng.choice(["pad", "drop", "uneven"], p=[0.6, 0.1, 0.3])),
            limit_batches=None if rng.random() < 0.7 else int(rng.integers(1, 5)),
            num_workers=2 if rng.random() < 0.05 else 0,
            prefetch=int(rng.integers(0, 3)),
        )
    with loader(run.samples, **run.settings, batch_size=7) as made:
        made.load_state_dict(run.state)
        before = made.state_dict()
        for step in rng.permutation(len(run.steps)):
            assert_equal(made.replay(int(step)), run.steps[step])
        assert made.state_dict() == before


def test_steps_of_the_future():
    with loader(source(10), augment=RECIPE, batch_size=4) as made:
        promised = [made.replay(step) for step in range(7)]
        for step, batch in enumerate([*made, *made][:6]):
            assert_equal(promised[step], [batch])


def test_a_pass_that_was_left():
    with loader(source(10), augment=RECIPE, batch_size=3) as made:
        seen = []
        for stop in (2, 1, 9):
            for number, batch in enumerate(made, 1):
                seen.append(batch)
                if number == stop:
                    break
        made.set_epoch(0)
        seen += list(made)
        for step, batch in enumerate(seen):
            assert_equal(made.replay(step), [batch])
        assert made.state_dict()["step"] == len(seen)


def test_one_row_for_an_uninterrupted_run():
    with loader(source(10), augment=RECIPE, batch_size=3) as made:
        for _ in range(5):
            list(made)
        state = made.state_dict()
        assert state["passes"] == [[0, 0, 0, 10, 3, 1, "uneven", None]]
        next(iter(made))
        inside = made.state_dict()
    with loader(source(10), augment=RECIPE, batch_size=3) as again:  # resumed with the same settings
        again.load_state_dict(inside)
        list(again)
        assert again.state_dict()["passes"] == state["passes"]


def test_bad_samples():
    samples = source(9, broken=(2, 3, 4, 5))
    for policy in ("blank", "drop"):
        with loader(
            samples, augment=RECIPE, batch_size=2, order="sequential", faults=gpuaug.Faults(policy=policy)
        ) as made:
            seen = list(made)
            replayed = [made.replay(step) for step in (0, 3, 4)]
            assert_equal([x for each in replayed for x in each], [seen[0], *seen[-2:]])
            if policy == "drop":
                with pytest.raises(ConfigError, match="`step` must be one with a batch. Found: 2"):
                    made.replay(2)


def test_a_rank_whose_batch_was_dropped_is_missing():
    faults = gpuaug.Faults(policy="drop")
    how = {"batch_size": 2, "order": "sequential", "last": "uneven", "faults": faults}
    run = Run(source(8, broken=(0, 2)), augment=RECIPE, **how)
    run.segment(ranks=2, steps=1)
    with loader(run.samples, **run.settings) as made:
        made.load_state_dict(run.state)
        found = made.by_rank(0)
        assert {rank: batch.indices.tolist() for rank, batch in found.items()} == {1: [1, 3]}
        assert len(made.replay(0)) == 1


def test_states_with_absurd_numbers():
    with loader(source(9), augment=RECIPE, batch_size=2) as made:
        state = made.state_dict()
        row = [0, 0, 0, 9, 2, 1, "pad", None]
        for place, value in ((5, 10**15), (4, 2**61), (2, 10)):
            wrong = {**state, "passes": [[*row[:place], value, *row[place + 1 :]]]}
            wrong["checksum"] = checksum(wrong)
            with pytest.raises(StateError, match="the passes of the loader state are damaged"):
                made.load_state_dict(wrong)


def test_wrong_steps_and_damaged_states():
    with loader(source(9), augment=RECIPE, batch_size=2) as made:
        for wrong in (-1, 1.5, "0", None, True, 10**30):
            with pytest.raises(ConfigError):
                made.replay(wrong)
        next(iter(made))
        good = made.state_dict()
        rows = [
            5,
            [5],
            [[1]],
            [[0, 0, 0, 9, 0, 1, "pad", None]],
            [[0, 0, 0, 9, 2, 1, "other", None]],
            [[0] * 8],
            {},
            None,
        ]
        for passes in rows:
            state = {**good, "passes": passes}
            state["checksum"] = checksum(state)
            with pytest.raises(StateError, match="damaged"):
                made.load_state_dict(state)
        without = {k: v for k, v in good.items() if k not in ("step", "passes")}  # of an older version
        made.load_state_dict({**without, "checksum": checksum(without)})


def test_a_row_says_where_a_step_is():
    row = Row(100, 4, 6, 20, 3, 2, "pad", None)  # 14 samples left: 3 steps, then 4 per epoch
    assert [row.place(100 + n, seed=0) for n in (0, 2, 3, 6, 7, 11)] == [
        (4, 6, 0), (4, 6, 2), (5, 0, 0), (5, 0, 3), (6, 0, 0), (7, 0, 0),
    ]  # fmt: skip
    assert row.leads_to(row._replace(step=103, epoch=5, position=0), seed=0)
    assert row.leads_to(row._replace(step=102, epoch=4, position=18), seed=0)
    assert not row.leads_to(row._replace(step=103, epoch=5, position=0, samples=21), seed=0)
    assert not row.leads_to(row._replace(step=101, epoch=5, position=0), seed=0)
