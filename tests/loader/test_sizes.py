"""A size per step: the same on all ranks, and again after a resume and in a replay."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from common import loader
from pictures import encode, photograph

import gpuaug
from gpuaug.errors import ConfigError

SOURCE = [(encode(photograph(name, (60, 48)), "PNG"), n) for n, name in enumerate(("china", "flower") * 12)]
SIZES = [16, 24, (20, 28), 24]
OPS = {"flip": K.RandomHorizontalFlip(p=0.5), "noise": K.RandomGaussianNoise(p=0.5)}


def recipe(size: Any = 32, **more: Any) -> gpuaug.Augment:
    return gpuaug.Augment(crop=gpuaug.RandomResizedCrop(size), ops=OPS, **more)


def sized(**more: Any) -> gpuaug.Augment:
    return recipe(sizes=gpuaug.Sizes(choose=SIZES, **more))


def test_every_size_is_drawn_as_often_as_it_is_listed():
    sizes = gpuaug.Sizes(choose=SIZES)
    found = Counter(sizes.of(seed=3, epoch=epoch, step=step) for epoch in range(40) for step in range(100))
    assert found.keys() == {(16, 16), (24, 24), (20, 28)}
    assert [abs(found[size] / 4000 - share) < 0.03 for size, share in (((16, 16), 0.25), ((24, 24), 0.5))] == [True] * 2
    held = gpuaug.Sizes(choose=SIZES, hold=5)
    drawn = [held.of(seed=3, epoch=0, step=step) for step in range(100)]
    assert drawn == [sizes.of(seed=3, epoch=0, step=step // 5) for step in range(100)]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_recipes_with_this_size(workers):
    """On two ranks: both have one size in each step, and the pixels of a crop of this size."""
    seen = []
    for rank in range(2):
        how = {"batch_size": 3, "rank": rank, "world_size": 2, "num_workers": workers, "prefetch": workers}
        with loader(SOURCE, augment=sized(), **how) as made:
            batches = [list(made) for _ in range(3)]
        seen.append([[tuple(batch.images.shape[2:]) for batch in each] for each in batches])
        for epoch, each in enumerate(batches):
            for batch in each:
                with loader(SOURCE, augment=recipe(tuple(batch.images.shape[2:]))) as plain:
                    assert torch.equal(plain.fetch(batch.indices, epoch=epoch).images, batch.images)
    assert seen[0] == seen[1]
    expected = gpuaug.Sizes(choose=SIZES)
    assert seen[0] == [[expected.of(seed=3, epoch=epoch, step=step) for step in range(4)] for epoch in range(3)]
    assert len({size for each in seen[0] for size in each}) == 3


def test_resume_replay_and_single_samples():
    with loader(SOURCE, augment=sized(), batch_size=3) as whole:
        passes = [[batch.images for batch in whole] for _ in range(2)]
        for step in (0, 3, 9, 15):
            (again,) = whole.replay(step)
            assert torch.equal(again.images, passes[step // 8][step % 8])
        assert whole[0][0].shape == (3, 32, 32)  # the crop's own size
        assert "one of 4 sizes for each step, from (16, 16) to (24, 24)" in repr(whole)
    for taken in (1, 3, 7):
        with loader(SOURCE, augment=sized(), batch_size=3) as first:
            made = iter(first)
            for _ in range(taken):
                next(made)
            state = json.loads(json.dumps(first.state_dict()))
        with loader(SOURCE, augment=sized(), batch_size=3, num_workers=2, prefetch=2) as second:
            second.load_state_dict(state)
            rest = [batch.images for batch in second] + [batch.images for batch in second]
            assert all(map(torch.equal, rest, passes[0][taken:] + passes[1]))


def test_epochs_and_progressive_stages():
    last = recipe(sizes=gpuaug.Sizes(choose=[16], epochs=[0, 1]), epochs={"noise": [0, 1]})
    with loader(SOURCE, augment=gpuaug.Progressive(schedule={0: sized(), 1: last}), batch_size=12) as made:
        sizes = [{tuple(batch.images.shape[2:]) for batch in made} for _ in range(2)]
    assert sizes[0] < {(16, 16), (24, 24), (20, 28)}
    assert sizes[1] == {(32, 32)}


def test_targets_follow_and_explanations_tell():
    class Boxed(list):
        target_kinds = frozenset({"boxes"})

    rows = Boxed((data, gpuaug.Target(boxes=np.array([[10.0, 8, 40, 40]]), labels=[1])) for data, _ in SOURCE)
    crop = gpuaug.Resize((32, 32))
    plan = gpuaug.Augment(crop=crop, ops=OPS, sizes=gpuaug.Sizes(choose=[30, 60]))
    with loader(rows, augment=plan, targets=gpuaug.Targets(boxes=gpuaug.Boxes()), batch_size=4) as made:
        for batch in made:
            side = batch.images.shape[-1]
            assert batch.targets.size == (side, side)
            widths = batch.targets.boxes[:, 2] - batch.targets.boxes[:, 0]
            assert torch.allclose(widths, torch.full_like(widths, side * 30 / 60), atol=1e-3)
            assert batch.explain(0).size == (side, side)


@pytest.mark.parametrize("mosaic", [False, True])
def test_finished_batches_are_resized_with_their_targets(mosaic):
    """Pixels against the bilinear formula written out, targets against those of the batch without sizes."""
    mask = encode(np.kron(np.arange(12).reshape(3, 4), np.ones((16, 15))).astype(np.uint8), "PNG")
    points = [[[10.0, 8, 2], [0, 0, 0]]]
    target = gpuaug.Target(boxes=[[10.0, 8, 40, 40]], labels=[1], mask=mask, keypoints=points)
    rows = [(data, target) for data, _ in SOURCE]
    rules = {"boxes": gpuaug.Boxes(), "masks": gpuaug.Masks(), "keypoints": gpuaug.Keypoints()}
    own: dict[str, Any] = {"crop": gpuaug.Letterbox(32), "ops": OPS}
    if mosaic:
        own["combine"] = {"mosaic": gpuaug.Mosaic(), "affine": gpuaug.CanvasAffine(32)}
    more: dict[str, Any] = {"targets": gpuaug.Targets(**rules), "batch_size": 4, "mix": gpuaug.MixObjects(lam=0.5)}
    sizes = gpuaug.Sizes(choose=[16, (24, 48)], how="resize")
    with (
        loader(rows, augment=gpuaug.Augment(**own, sizes=sizes), **more) as made,
        loader(rows, augment=gpuaug.Augment(**own), **more) as plain,
    ):
        seen = set()
        for batch, whole in zip(made, plain, strict=True):
            H, W = batch.images.shape[2:]
            seen.add((H, W))
            y, x = ((torch.arange(n) + 0.5) * (32 / n) for n in (H, W))
            for axis, at in ((2, y), (3, x)):
                low, part = (at - 0.5).clamp(min=0).floor(), (at - 0.5).clamp(min=0) % 1
                part = part.view(-1, 1) if axis == 2 else part
                first, second = (whole.images.index_select(axis, (low + k).clamp(max=31).long()) for k in (0, 1))
                whole = replace(whole, images=first * (1 - part) + second * part)
            assert (batch.images - whole.images).abs().max() < 1e-5
            t, u, scale = batch.targets, whole.targets, torch.tensor([W / 32, H / 32])
            assert t.size == (H, W)
            assert torch.equal(t.masks, u.masks[:, y.long()][:, :, x.long()])
            assert torch.allclose(t.boxes, u.boxes * scale.repeat(2))
            there = u.keypoints[..., 2] > 0
            assert torch.allclose(t.keypoints[there][:, :2] + 0.5, (u.keypoints[there][:, :2] + 0.5) * scale, atol=1e-4)
            assert not t.keypoints[~there].any()
            diagonal = torch.diag(torch.tensor([*scale, 1]).double())
            assert torch.allclose(batch.matrices, diagonal @ whole.matrices)
            assert torch.allclose(t.tile_matrices, diagonal @ u.tile_matrices)
            assert "sizes: height" in str(batch.explain(0))
        assert seen == {(16, 16), (24, 48)}


def test_plan_bounds_the_largest_size():
    from gpuaug.tools.plan.command import _keep_largest

    config = {"augment": {"sizes": {"choose": [16, [20, 28], 22], "epochs": [0, 3]}}}
    _keep_largest(config)
    assert config["augment"]["sizes"] == {"choose": [[20, 28]], "epochs": None}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gpuaug.Sizes(choose=[]), "`choose` must be a list of 1 to 1000 sizes"),
        (lambda: gpuaug.Sizes(choose=32), "`choose` must be a list"),
        (lambda: gpuaug.Sizes(choose=[0]), "`choose`"),
        (lambda: gpuaug.Sizes(choose=[32], hold=0), "`hold`"),
        (lambda: gpuaug.Sizes(choose=[32], epochs=[3, 3]), "`epochs` must be"),
        (lambda: gpuaug.Augment(sizes=gpuaug.Sizes(choose=[32])), "needs a crop with a size"),
        (lambda: gpuaug.Augment(crop=gpuaug.Resize(8), sizes=gpuaug.Sizes(choose=[32])), "needs a crop with a size"),
        (lambda: gpuaug.MultiView(views={"a": sized()}), "`augment.views.a` must have no `sizes`"),
        (
            lambda: loader(SOURCE, augment=sized(), patch_masks=gpuaug.RandomMasks(patch=8)),
            "a recipe must have no `sizes` with `patch_masks`",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_in_yaml():
    words = ["augment=standard", "+augment.sizes={_target_:gpuaug.Sizes,choose:[96,[64,96]],hold:2}"]
    made = gpuaug.build(gpuaug.compose("train", words).augment)
    assert made.sizes == gpuaug.Sizes(choose=[96, [64, 96]], hold=2)
    assert made.fingerprint()["sizes"] == {"choose": [[96, 96], [64, 96]], "hold": 2, "epochs": None}
    assert "sizes" not in gpuaug.build(gpuaug.compose("train", words[:1]).augment).fingerprint()


def test_buckets_need_less_padding_and_a_resume_on_other_ranks_goes_on() -> None:
    shapes = [(40, 60), (60, 40)] * 20
    source = [(encode(photograph("china", shape), "PNG"), n) for n, shape in enumerate(shapes)]
    pad = gpuaug.Augment(crop=gpuaug.Letterbox(64, shorter=32, centre=False, pad="batch"))
    order = gpuaug.Buckets(8, ratios=[h / w for h, w in shapes])
    shuffled, bucketed = [], []
    for found, how in ((shuffled, "shuffle"), (bucketed, order)):
        with loader(source, augment=pad, order=how, batch_size=4) as made:
            found += [(tuple(batch.images.shape[2:]), batch.indices.tolist()) for batch in made]
    area = [sum(h * w for (h, w), _ in found) for found in (shuffled, bucketed)]
    assert area[1] < 0.85 * area[0]
    with loader(source, augment=pad, order=order, batch_size=4) as made:
        steps = iter(made)
        first = [next(steps) for _ in range(2)]
        state = made.state_dict()
    assert [batch.indices.tolist() for batch in first] == [indices for _, indices in bucketed[:2]]
    rest = []
    for rank in range(2):
        with loader(source, augment=pad, order=order, batch_size=2, rank=rank, world_size=2) as made:
            made.load_state_dict(state)
            rest.append([batch.indices.tolist() for batch in made])
    together = [sorted(a + b) for a, b in zip(*rest, strict=True)]
    assert together == [sorted(indices) for _, indices in bucketed[2:]]


def test_sides_are_those_of_the_resized_batch() -> None:
    crop = gpuaug.Letterbox(64, pad="batch", centre=False)
    resize = gpuaug.Augment(crop=crop, sizes=gpuaug.Sizes(choose=[32], how="resize"))
    with loader(SOURCE, augment=resize, batch_size=4) as made:
        for batch in made:
            assert batch.images.shape[2:] == (32, 32)
            assert batch.sides.tolist() == [[32, 32]] * len(batch)
