"""Stopping anywhere and going on with other batch sizes, workers and ranks: nothing lost, nothing twice."""

import hashlib
import json
import random
from collections import Counter

import pytest
import torch
from common import loader

import gpuaug


def consume(batches, steps=None):
    """The multiset of (index, digest of the augmented image) of the next batches."""
    seen = Counter()
    for step, batch in enumerate(batches, start=1):
        for row, index in enumerate(batch.indices.tolist()):
            if batch.valid[row]:
                data = batch.images[row].contiguous().view(torch.uint8).numpy().tobytes()
                seen[index, hashlib.blake2b(data, digest_size=8).hexdigest()] += 1
        if step == steps:
            break
    return seen


@pytest.fixture(scope="module")
def whole(photos):
    found = {}
    for name, order in [("shuffle", gpuaug.Shuffle()), ("repeated", gpuaug.Repeated(repeats=3))]:
        with loader(photos, order=order, seed=11, faults=None, num_workers=0, batch_size=13) as ours:
            ours.set_epoch(2)
            found[name] = order, consume(ours)
    return found


def stop_and_resume(photos, order, expected, rng):
    seen, state = Counter(), None
    for part in range(3):
        world_size, batch_size = rng.randint(1, 3), rng.randint(1, 9)
        steps = None if part == 2 else rng.randint(0, 20 // (world_size * batch_size) + 1)
        states = []
        for rank in range(world_size):
            settings = {
                "batch_size": batch_size,
                "num_workers": rng.choice([0, 0, 1, 2]),
                "prefetch": rng.choice([0, 1, 3]),
                "last": "uneven",
            }
            with loader(
                photos, order=order, seed=11, faults=None, rank=rank, world_size=world_size, **settings
            ) as ours:
                if state is None:
                    ours.set_epoch(2)
                else:
                    ours.load_state_dict(json.loads(state))
                if steps != 0:
                    seen += consume(iter(ours), steps)
                states.append(json.dumps(ours.state_dict()))
        state = states[0]
        if len({json.loads(s)["position"] for s in states}) > 1:  # a rank had nothing left to hand out
            assert json.loads(state)["epoch"] >= 2
        if json.loads(state)["epoch"] == 3:
            break
    assert seen == expected
    assert len(state) < 8000


@pytest.mark.parametrize("run", [*range(6), *(pytest.param(run, marks=pytest.mark.long) for run in range(6, 200))])
def test_random_stops(photos, whole, run):
    stop_and_resume(photos, *whole["repeated" if run % 3 == 2 else "shuffle"], random.Random(run))


def test_a_state_that_is_changed_changes_no_loader(photos):
    with loader(photos) as ours:
        consume(ours, steps=1)
        before = json.dumps(ours.state_dict())
        ours.state_dict()["fingerprint"].clear()
        assert json.dumps(ours.state_dict()) == before


def test_set_epoch_at_the_last_batch_goes_on_with_that_epoch(photos):
    with loader(photos, batch_size=32) as ours:
        for step, _ in enumerate(ours, start=1):
            if step == len(ours):
                ours.set_epoch(1)
        assert ours.epoch == 1


def test_all_ranks_have_the_same_state_at_the_same_step(photos):
    """Also if the first rank has one more batch than the others."""
    states = []
    for rank in range(4):
        with loader(photos, batch_size=16, last="uneven", rank=rank, world_size=4) as ours:
            next(iter(ours))
            states.append(ours.state_dict())
    assert all(state == states[0] for state in states)
