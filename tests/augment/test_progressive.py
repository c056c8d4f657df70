"""gpuaug.Progressive: the epoch decides which recipe makes the pixels, in a call, in a loader, and in the tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from common import loader
from torch import Tensor

import gpuaug
from gpuaug.errors import ConfigError, ReadOnlyError, StateError
from gpuaug.tools.plan.command import set_largest_epoch

SIZES = {0: 24, 1: 40, 3: 16}


def fixed(size: int, **more: Any) -> gpuaug.Augment:
    ops = {"flip": K.RandomHorizontalFlip(), "jitter": K.ColorJitter(0.4, 0.4, 0.4, 0.1)}
    return gpuaug.Augment(crop=gpuaug.RandomResizedCrop(size), ops=ops, **more)


def recipe(**more: Any) -> gpuaug.Progressive:
    return gpuaug.Progressive(schedule={first: fixed(size) for first, size in SIZES.items()}, **more)


def size_of(epoch: int) -> int:
    return SIZES[max(first for first in SIZES if first <= epoch)]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(torch.equal(x.images, y.images) for x, y in zip(a, b, strict=True))


def test_the_epoch_decides_which_recipe_runs(photo_batch: Tensor) -> None:
    made = recipe()
    for epoch in range(5):
        want = fixed(size_of(epoch))(photo_batch, seed=3, epoch=epoch, indices=range(8))
        assert torch.equal(made(photo_batch, seed=3, epoch=np.int64(epoch), indices=range(8)), want)
    assert made(photo_batch, seed=3).shape == (8, 3, 24, 24)


@pytest.mark.parametrize(("workers", "prefetch"), [(0, 0), (2, 3)])
def test_a_loader_changes_the_size_between_epochs(photos: Path, workers: int, prefetch: int) -> None:
    how = {"num_workers": workers, "prefetch": prefetch, "batch_size": 13, "limit_batches": 3}
    with loader(photos, augment=recipe(), **how) as mixed:
        for epoch in range(4):
            batches = list(mixed)
            with loader(photos, augment=fixed(size_of(epoch)), **how) as plain:
                plain.set_epoch(epoch)
                assert same(batches, list(plain))
            assert [batch.images.shape[-1] for batch in batches] == [size_of(epoch)] * 3


def test_resume_around_a_change_of_the_recipe(photos: Path) -> None:
    with loader(photos, augment=recipe(), limit_batches=3) as whole:
        passes = [list(whole), list(whole)]
    for taken in (1, 2, 3):  # 3: the state is that of the beginning of epoch 1
        with loader(photos, augment=recipe(), limit_batches=3) as first:
            made = iter(first)
            for _ in range(taken):
                next(made)
            state = json.loads(json.dumps(first.state_dict()))
        with loader(photos, augment=recipe(), limit_batches=3) as second:
            second.load_state_dict(state)
            assert same(passes[0][taken:], list(second) if taken < 3 else [])
            assert same(passes[1], list(second))


def test_a_state_of_another_schedule_is_refused(photos: Path) -> None:
    with loader(photos, augment=recipe()) as first:
        next(iter(first))
        state = first.state_dict()
    other = gpuaug.Progressive(schedule={0: fixed(24), 1: fixed(40), 4: fixed(16)})
    with loader(photos, augment=other) as second, pytest.raises(StateError, match="augment.schedule"):
        second.load_state_dict(state)


def test_targets_follow_the_recipe_of_the_epoch() -> None:
    x = torch.arange(2 * 60 * 50 * 3, dtype=torch.int64).remainder(251).to(torch.uint8).view(2, 60, 50, 3)
    masks = torch.arange(60)[None, :, None].expand(2, 60, 50)
    given = {"masks": masks, "boxes": [[[5, 6, 40, 50]], [[1, 2, 30, 40]]], "seed": 1, "indices": [0, 1]}
    for epoch in (0, 1, 3):
        images, targets = recipe()(x, epoch=epoch, **given)
        want_images, want = fixed(size_of(epoch))(x, epoch=epoch, **given)
        assert torch.equal(images, want_images)
        assert torch.equal(targets.masks, want.masks)
        assert targets.boxes.tolist() == want.boxes.tolist()
        assert targets.masks.shape == (2, size_of(epoch), size_of(epoch))


def test_views_and_backends(photo_batch: Tensor) -> None:
    def views(size: int) -> gpuaug.MultiView:
        return gpuaug.MultiView(views={"a": fixed(size), "b": fixed(12, copies=2)})

    made = gpuaug.Progressive(schedule={"0": views(20), "2": views(30)}, backend="kornia")
    assert {view.augment.backend for each in made.schedule.values() for view in each.views} == {"kornia"}
    assert [tuple(x.shape[-2:]) for x in made(photo_batch, epoch=2)] == [(30, 30), (12, 12), (12, 12)]
    fused = gpuaug.Progressive(schedule={0: views(20), 2: views(30)})
    assert fused.fingerprint() == made.fingerprint()
    for a, b in zip(fused(photo_batch, epoch=2, seed=1), made(photo_batch, epoch=2, seed=1), strict=True):
        assert (a - b).abs().max() < 2e-5


def test_changes_are_noticed() -> None:
    made = recipe()
    with pytest.raises(ReadOnlyError, match=r"`Progressive.schedule` cannot be assigned"):
        made.schedule = {}
    with pytest.raises(TypeError, match="does not support item assignment"):
        made.schedule[2] = fixed(8)
    made.schedule[1].ops["flip"].p = 0.1
    with pytest.raises(ReadOnlyError, match=r"`augment.schedule.1.ops.flip"):
        made.check_unchanged()


def test_an_operation_with_its_own_generator_runs_in_the_main_thread() -> None:
    own = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(16), ops={"dropout": torch.nn.Dropout()})
    assert gpuaug.Progressive(schedule={0: fixed(16), 1: own}).main_thread
    assert not recipe().main_thread


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([], "`augment.schedule` must be a mapping of first epochs to recipes.* Found: a list"),
        ({}, "must have a recipe for epoch 0. Found: none"),
        ({0: fixed(8), "0": fixed(9)}, "one recipe per epoch. Found: two for 0"),
        ({0: fixed(8), -1: fixed(9)}, "`augment.schedule` must have first epochs from 0"),
        ({"a": fixed(8)}, "`augment.schedule` must have first epochs.* Found: 'a'"),
        ({0: fixed(8), 1: fixed(8, copies=2)}, r"same views, in one order. Found, by epoch: \{0: \[0\], 1: \[0, 1\]\}"),
        ({0: gpuaug.Resize(8)}, "`augment.schedule.0` must be a gpuaug.Augment or gpuaug.MultiView"),
    ],
)
def test_refused_schedules(schedule: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gpuaug.Progressive(schedule=schedule)
    assert list(gpuaug.Progressive(schedule={0: fixed(8), 4: None}).schedule) == [0]


def test_it_is_no_operation_and_no_view() -> None:
    with pytest.raises(ConfigError, match="whole recipe"):
        gpuaug.Augment(ops={"x": recipe()})
    with pytest.raises(ConfigError, match="`augment.views.x` must be a gpuaug.Augment"):
        gpuaug.MultiView(views={"x": recipe()})


# --- tools


def test_a_plan_is_for_the_largest_images_that_come(photos: Path) -> None:
    with loader(photos, augment=recipe()) as mixed:
        for first, largest in ((0, 1), (2, 2), (3, 3)):
            mixed.set_epoch(first)
            set_largest_epoch(mixed)
            assert mixed.epoch == largest


GROWING = """
_target_: gpuaug.Progressive
backend: null
schedule:
  "0": {_target_: gpuaug.Augment, crop: {_target_: gpuaug.RandomResizedCrop, size: 24}}
  "2": {_target_: gpuaug.Augment, crop: {_target_: gpuaug.RandomResizedCrop, size: 40},
        ops: {flip: {_target_: kornia.augmentation.RandomHorizontalFlip, p: 0.5}}}
"""


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """A folder with the recipe `growing`."""
    (tmp_path / "conf/augment").mkdir(parents=True)
    (tmp_path / "conf/augment/growing.yaml").write_text(GROWING)
    return tmp_path / "conf"


def test_in_yaml(conf: Path) -> None:
    def build(*overrides: str) -> gpuaug.Progressive:
        return gpuaug.build(gpuaug.compose("train", ["augment=growing", *overrides], config_dir=conf).augment)

    changed = build("augment.schedule.0.crop.size=20", "augment.backend=kornia", "augment.schedule.2.ops.flip.p=0.3")
    assert changed.at(0).crop.size == (20, 20)
    assert changed.at(2).ops["flip"].p == 0.3
    assert changed.at(2).backend == "kornia"
    assert list(build("augment.schedule.2=null").schedule) == [0]
    with pytest.raises(ConfigError, match=r"`augment.schedule.2.crop.size` must be"):
        build("augment.schedule.2.crop.size=-1")
