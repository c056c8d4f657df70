"""Mixing of images with masks, boxes and keypoints: against loops and formulas written out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import gpuaug
from gpuaug.augment.mix_targets import TargetMix
from gpuaug.targets import masks as masks_module

sys.path.insert(0, str(Path(__file__).parents[1] / "loader"))
from test_mosaic_batches import COUNT, TARGETS, loader, picture, scenes

BOXES, CLASSES = {"boxes": gpuaug.Boxes(), "keypoints": gpuaug.Keypoints()}, {"masks": gpuaug.Masks()}


def both(mix: TargetMix, **more: Any) -> list[tuple[gpuaug.Batch, gpuaug.Batch]]:
    """The batches of an epoch without and with the mix."""
    return list(zip(loader(**more), loader(mix=mix, **more), strict=True))


def mates_of(targets: Any, batch: gpuaug.Batch) -> list[int]:
    """The row of each row's mate; -1: it is not mixed."""
    rows = {index: row for row, index in enumerate(batch.indices.tolist())}
    return [rows.get(mate, -1) for mate in targets.sources[:, 1].tolist()]


@pytest.mark.parametrize("lam", [None, 0.3])
def test_mixup_blends_images_and_keeps_all_objects(lam: float | None) -> None:
    shares = []
    for plain, mixed in both(gpuaug.MixObjects(alpha=2, lam=lam, p=0.7), targets=BOXES):
        a, b = plain.targets, mixed.targets
        mates = mates_of(b, mixed)
        for row, mate in enumerate(mates):
            own, of_mate = a.sample == row, a.sample == mate
            here = b.sample == row
            if mate < 0:
                assert torch.equal(mixed.images[row], plain.images[row])
                assert torch.equal(b.boxes[here], a.boxes[own])
                assert (b.weights[here] == 1).all()
                continue
            count = int(own.sum())
            for name in ("boxes", "labels", "keypoints", "ids", "area"):
                x, y = getattr(a, name), getattr(b, name)[here]
                assert torch.equal(torch.nan_to_num(y), torch.nan_to_num(torch.cat([x[own], x[of_mate]])))
            assert b.source[here].tolist() == [int(a.indices[row])] * count + [int(a.indices[mate])] * int(
                of_mate.sum()
            )
            assert b.tile[here].tolist() == [0] * count + [1] * int(of_mate.sum())
            x, y, z = plain.images[row].double(), plain.images[mate].double(), mixed.images[row].double()
            share = float(((z - y) * (x - y)).sum() / ((x - y) ** 2).sum())
            assert torch.allclose(z, share * x + (1 - share) * y, atol=1e-5)
            expected = [share] * count + [1 - share] * int(of_mate.sum())
            assert np.allclose(b.weights[here].numpy(), expected, atol=1e-4)
            shares.append(share)
    assert len(shares) > 50
    if lam is None:
        assert stats.kstest(shares, "beta", (2, 2)).pvalue > 1e-3
    else:
        assert np.allclose(shares, lam, atol=1e-4)


def test_mates_are_one_cycle_and_shares_are_the_samples_own() -> None:
    mix, keys = gpuaug.MixObjects(), {"seed": 3, "epoch": 1}
    indices = np.random.default_rng(0).permutation(1000)[:16]
    good = np.ones(16, dtype=bool)
    whole = mix.mixing(good=good, indices=indices, repeats=indices * 0, **keys)
    row, seen = 0, []
    for _ in range(16):
        seen.append(row)
        row = int(whole.mates[row])
    assert sorted(seen) == list(range(16))
    part = mix.mixing(good=good[:5], indices=indices[3:8], repeats=indices[3:8] * 0, **keys)
    assert np.array_equal(part.u, whole.u[3:8])
    good[4] = False
    without = mix.mixing(good=good, indices=indices, repeats=indices * 0, **keys)
    assert np.array_equal(without.mates, whole.mates), "a bad sample changes no other mate"
    changed = np.flatnonzero(without.mixed != whole.mixed)
    assert set(changed.tolist()) == {4, int(np.flatnonzero(whole.mates == 4)[0])}
    alone = mix.mixing(good=good[:1], indices=indices[:1], repeats=indices[:1] * 0, **keys)
    assert not alone.mixed.any()
    later = gpuaug.MixObjects(epochs=[2, None])
    assert later.mixing(good=good, indices=indices, repeats=indices * 0, **keys) is None


def test_blended_class_masks_take_the_larger_share() -> None:
    rules = {"masks": gpuaug.Masks(), "boxes": gpuaug.Boxes()}
    for plain, mixed in both(gpuaug.MixObjects(alpha=1), targets=rules):
        for row, mate in enumerate(mates_of(mixed.targets, mixed)):
            x, y, z = (images.double() for images in (plain.images[row], plain.images[mate], mixed.images[row]))
            share = float(((z - y) * (x - y)).sum() / ((x - y) ** 2).sum().clamp(min=1e-9))
            if abs(share - 0.5) > 0.01 and not torch.equal(x, y):
                taken = row if share > 0.5 else mate
                assert torch.equal(mixed.targets.masks[row], plain.targets.masks[taken])


def test_cutmix_takes_a_rectangle_of_half_of_the_area() -> None:
    size, rows = (100, 160), 5000
    u = np.random.default_rng(0).random((rows, 4), dtype=np.float32)
    top, left, bottom, right = gpuaug.CutMixMasks()._rectangles(u, size).T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (bottom <= 100).all()
    assert (right <= 160).all()
    area = (bottom - top) * (right - left)
    assert np.abs(area - 8000).max() <= 160 / 2 + 100 / 2 + 1  # sides are rounded
    assert stats.kstest(np.log((bottom - top) / 100) / np.log(0.5), "uniform").pvalue > 1e-6
    pairs = both(gpuaug.CutMixMasks(p=0.8), targets=CLASSES)
    half = 0
    for plain, mixed in pairs:
        for row in range(len(plain.images)):
            changed = (plain.images[row] != mixed.images[row]).any(0) | (
                plain.targets.masks[row] != mixed.targets.masks[row]
            )
            if not changed.any():
                continue
            y, x = changed.nonzero().T
            window = slice(int(y.min()), int(y.max()) + 1), slice(int(x.min()), int(x.max()) + 1)
            fits = [
                mate
                for mate in range(len(plain.images))
                if mate != row
                and torch.equal(plain.images[mate][:, *window], mixed.images[row][:, *window])
                and torch.equal(plain.targets.masks[mate][window], mixed.targets.masks[row][window])
            ]
            assert fits
            half += 1
    assert half > 40


def slow_class_mix(labels: np.ndarray, ranks: np.ndarray, ignore: int) -> np.ndarray:
    found = np.zeros(labels.shape, dtype=bool)
    for row, label in enumerate(labels):
        classes = [c for c in np.unique(label).tolist() if c != ignore]
        for c in sorted(classes, key=lambda c: (ranks[row, c], c))[: len(classes) // 2]:
            found[row] |= label == c
    return found


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_class_mix_keeps_half_of_the_classes(seed: int) -> None:
    from gpuaug.augment.mix_targets import _half_of_classes

    rng = np.random.default_rng(seed)
    shape = int(rng.integers(1, 5)), int(rng.integers(1, 9)), int(rng.integers(1, 9))
    labels = rng.choice([0, 1, 2, 7, 200, 254, 255], shape)
    ranks = rng.random((shape[0], 256), dtype=np.float32)
    stay = _half_of_classes(torch.from_numpy(labels), torch.from_numpy(ranks), 255).numpy()
    assert np.array_equal(stay, slow_class_mix(labels, ranks, 255))
    images = torch.from_numpy(rng.random((shape[0], 3, *shape[1:]), dtype=np.float32))
    mixed, target = gpuaug.class_mix(images, torch.from_numpy(labels), seed=seed)
    again = gpuaug.class_mix(images, torch.from_numpy(labels), seed=seed)
    assert torch.equal(mixed, again[0])
    for row in range(shape[0]):
        mate = (row + 1) % shape[0]
        own = (mixed[row] == images[row]).all(0).numpy()
        assert ((target[row].numpy() == labels[row]) | ~own | (labels[row] == labels[mate])).all()
        assert (own | (mixed[row] == images[mate]).all(0).numpy()).all()


def test_class_mix_in_a_loader() -> None:
    mix, changed = gpuaug.ClassMix(ignore=9), 0
    for plain, mixed in both(mix, targets=CLASSES):
        keys = {"seed": 3, "epoch": 0, "indices": plain.indices.numpy(), "repeats": plain.indices.numpy() * 0}
        drawn = mix.mixing(good=np.ones(len(plain.indices), dtype=bool), **keys)
        from gpuaug.augment.mix_targets import _ranks

        stay = slow_class_mix(plain.targets.masks.numpy(), _ranks(keys), 9)
        for row, mate in enumerate(drawn.mates.tolist()):
            own = torch.from_numpy(stay[row])
            assert torch.equal(mixed.images[row], torch.where(own, plain.images[row], plain.images[mate]))
            assert torch.equal(
                mixed.targets.masks[row], torch.where(own, plain.targets.masks[row], plain.targets.masks[mate])
            )
            changed += int((~own).any())
    assert changed > 50


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_pasting_equals_loops(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape, own, mate = tuple(rng.integers(1, 20, 2).tolist()), int(rng.integers(0, 5)), int(rng.integers(0, 5))
    a, b = (rng.integers(0, n + 1, shape).astype(np.int32) for n in (own, mate))
    renumber = np.concatenate([[0], rng.integers(0, 2, mate) * (own + 1 + np.arange(mate))]).astype(np.int32)
    compiled = masks_module.paste(a, b, renumber, own + 1)
    library, masks_module.library = masks_module.library, lambda: None
    try:
        plain = masks_module.paste(a, b, renumber, own + 1)
    finally:
        masks_module.library = library
    for x, y in zip(compiled, plain, strict=True):
        assert np.array_equal(x, y)
    assert np.array_equal(compiled[1], renumber[b] > 0)
    assert np.array_equal(compiled[2][1, 1:, 0], np.bincount(a[~compiled[1]], minlength=own + 1)[1:])


def test_copy_paste_moves_objects_with_their_pixels() -> None:
    mix = gpuaug.CopyPaste(min_area=0, moved=0)
    pasted = covered = hidden = 0
    for plain, mixed in both(mix, targets=TARGETS):
        a, b = plain.targets, mixed.targets
        for row, mate in enumerate(mates_of(b, mixed)):
            here, own = b.sample == row, a.sample == row
            tile, boxes = b.tile[here], b.boxes[here]
            assert b.masks[row].unique().tolist() in ([*range(len(boxes) + 1)], [*range(1, len(boxes) + 1)])
            new = torch.zeros_like(b.masks[row], dtype=torch.bool)
            for k, box in enumerate(boxes):
                mask = b.masks[row] == k + 1
                y, x = mask.nonzero().double().T
                hull = torch.stack([x.min(), y.min(), x.max() + 1, y.max() + 1])
                assert (hull - box).abs().max() < 1.5
                if tile[k] == 1:
                    new |= mask
                    pasted += 1
            assert torch.equal(mixed.images[row], torch.where(new, plain.images[mate], plain.images[row]))
            # what was not covered has its bits
            assert torch.equal((b.masks[row] > 0) & ~new, (a.masks[row] > 0) & ~new)
            fewer = int(own.sum()) - int((tile == 0).sum())
            covered += fewer
            visible = b.keypoints[here][tile == 0][:, 0]
            for x, y, v in visible.tolist():
                under = bool(new[int(y + 0.5), int(x + 0.5)]) if v else False
                assert v == (0 if not v else 1 if under else 2)
                hidden += under
    assert pasted > 30
    assert covered > 0
    assert hidden > 0


def test_copy_paste_drops_by_the_rule_and_never_pastes_crowds() -> None:
    strict, lenient = (
        sum(int((batch.targets.tile == 0).sum()) for batch in loader(mix=gpuaug.CopyPaste(objects="all", **rule)))
        for rule in ({"min_area": 10**6, "moved": 0}, {"min_area": 0, "moved": 100})
    )
    assert strict < lenient
    crowds = []
    for data, t in scenes():
        crowd = np.arange(len(t.boxes)) == 0
        crowds.append((data, gpuaug.Target(boxes=t.boxes, labels=t.labels, mask=t.mask, size=t.size, crowd=crowd)))
    rules = {"boxes": gpuaug.Boxes(crowd="keep"), "masks": gpuaug.Masks(kind="instances")}
    for batch in loader(crowds, targets=rules, mix=gpuaug.CopyPaste(objects="all")):
        assert not (batch.targets.crowd & (batch.targets.tile == 1)).any()
    none = loader(mix=gpuaug.CopyPaste(max=0))
    assert all(not (batch.targets.tile == 1).any() for batch in none)


MIXES = {
    "mixup": (gpuaug.MixObjects(p=0.5), BOXES),
    "cutmix": (gpuaug.CutMixMasks(), CLASSES),
    "classmix": (gpuaug.ClassMix(), CLASSES),
    "paste": (gpuaug.CopyPaste(), TARGETS),
}


def contents(batch: gpuaug.Batch) -> list[torch.Tensor]:
    t = batch.targets
    more = [t.source, t.sources, t.tile_matrices]
    return [each for each in (batch.images, *t.on_device, *more) if each is not None]


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("mosaic", [False, True])
def test_workers_prefetch_resume_and_replay_give_the_same_batches(name: str, mosaic: bool) -> None:
    mix, rules = MIXES[name]
    more: dict[str, Any] = {"mix": mix, "targets": rules, **({"mosaic": {}, "affine": {}} if mosaic else {})}
    first = loader(**more)
    state, whole = None, []
    for batch in first:
        whole.append(contents(batch))
        state = first.state_dict() if len(whole) == 5 else state
    for other in ({"num_workers": 2}, {"prefetch": 0}):
        for batch, expected in zip(loader(**more, **other), whole, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(contents(batch), expected, strict=True))
    resumed = loader(**more)
    resumed.load_state_dict(state)
    for batch, expected in zip(resumed, whole[5:], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(contents(batch), expected, strict=True))
    (again,) = first.replay(7)
    assert all(torch.equal(x, y) for x, y in zip(contents(again), whole[7], strict=True))


@pytest.mark.parametrize("policy", ["blank", "drop"])
@pytest.mark.parametrize("name", MIXES)
def test_a_bad_sample_is_no_mate(name: str, policy: str) -> None:
    mix, rules = MIXES[name]
    damaged = list(scenes())
    damaged[17] = (b"no image", damaged[17][1])
    seen = 0
    for good, batch in zip(
        loader(mix=mix, targets=rules), loader(damaged, mix=mix, targets=rules, faults=gpuaug.Faults(policy=policy)),
        strict=True,
    ):  # fmt: skip
        rows = {index: row for row, index in enumerate(good.indices.tolist())}
        bad = rows.get(17)
        drawn = mix.mixing(
            good=np.ones(len(rows), dtype=bool), seed=3, epoch=0, indices=good.indices.numpy(),
            repeats=good.indices.numpy() * 0,
        )  # fmt: skip
        for row, index in enumerate(batch.indices.tolist()):
            if index == 17:
                assert not batch.images[row].any()
            elif bad is None or drawn is None or drawn.mates[rows[index]] != bad:
                assert torch.equal(batch.images[row], good.images[rows[index]])
                seen += 1
        assert len(batch.images) == len(rows) - (bad is not None and policy == "drop")
    assert seen > COUNT - 5


def test_layouts_with_weights() -> None:
    batch = next(iter(loader(mix=gpuaug.MixObjects(), targets={"boxes": gpuaug.Boxes()})))
    t = batch.targets
    assert torch.equal(torch.cat([image["weights"] for image in t.as_torchvision(weighted=True)]), t.weights)
    assert torch.equal(torch.cat([image["weights"] for image in t.as_detr(weighted=True)]), t.weights)
    assert torch.equal(t.as_ultralytics(weighted=True)["weights"], t.weights)
    assert "weights" not in t.as_torchvision()[0]
    plain = next(iter(loader(targets={"boxes": gpuaug.Boxes()}))).targets
    assert (plain.as_ultralytics(weighted=True)["weights"] == 1).all()


WRONG = [
    ({"mix": gpuaug.Mix(mixup_alpha=1), "targets": BOXES}, "use a mix for targets: mix=mixup_objects"),
    ({"mix": gpuaug.MixObjects(), "targets": TARGETS}, "cannot mix masks of objects"),
    ({"mix": gpuaug.CutMixMasks(), "targets": BOXES}, "`mix` (CutMixMasks) needs targets, of these kinds: masks"),
    ({"mix": gpuaug.ClassMix(), "targets": TARGETS}, "Found: masks, boxes, keypoints"),
    ({"mix": gpuaug.CopyPaste(), "targets": CLASSES}, "needs boxes and masks of objects. Found: masks"),
    ({"mix": gpuaug.CopyPaste(), "targets": BOXES}, "Set `targets=instances`"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=[message[:30] for _, message in WRONG])
def test_mixes_that_do_not_fit_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(gpuaug.ConfigError) as caught:
        loader(**settings)
    assert message in str(caught.value)


def test_other_refusals() -> None:
    with pytest.raises(gpuaug.ConfigError, match=r"`mix` \(MixObjects\) needs targets"):
        gpuaug.Loader(
            [(scenes()[0][0], 0)], augment=gpuaug.Augment(crop=gpuaug.Resize((8, 8))), mix=gpuaug.MixObjects()
        )
    with pytest.raises(gpuaug.ConfigError, match="`alpha` must be above 0"):
        gpuaug.MixObjects(alpha=0)
    with pytest.raises(gpuaug.ConfigError, match="`objects` must be one of random, all"):
        gpuaug.CopyPaste(objects="some")
    with pytest.raises(gpuaug.ConfigError, match=r"integers \[B, H, W\]. Found: float32 \[2, 3, 4, 4\] and float32"):
        gpuaug.class_mix(torch.rand(2, 3, 4, 4), torch.rand(2, 4, 4))


def test_every_batch_has_weights_and_mates() -> None:
    some = list(scenes()[:9])
    batches = list(loader(some, targets={"boxes": gpuaug.Boxes()}, mix=gpuaug.MixObjects(p=0.3), batch_size=4))
    assert [batch.targets.sources.shape[1] for batch in batches] == [2, 2, 2]
    assert all(batch.targets.weights.shape == batch.targets.labels.shape for batch in batches)
    assert (batches[-1].targets.weights == 1).all()
    assert (batches[0].targets.pixel_mask() == 1).all(), "the mate may show where the sample does not"


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (((0, 10, 40, 30), (20, 10, 30, 30)), (0, 0, 5, 64), [20, 10, 30, 30]),  # the box is inside the mask
        (((0, 10, 20, 30), (30, 10, 40, 30)), (10, 0, 64, 64), None),  # they are apart
    ],
)
def test_covering_never_enlarges_or_turns_a_box(first: Any, second: Any, expected: Any) -> None:
    def scene(area: Any, box: Any) -> Any:
        mask = np.zeros((64, 64), dtype=np.uint8)
        mask[area[1] : area[3], area[0] : area[2]] = 1
        target = gpuaug.Target(boxes=[box], labels=[0], mask=picture(mask), size=(64, 64))
        return picture(np.full((64, 64, 3), 100, dtype=np.uint8)), target

    made = gpuaug.Loader(
        [scene(*first), scene(second, second)],
        augment=gpuaug.Augment(crop=gpuaug.Letterbox(64, centre=False)),
        targets=gpuaug.Targets(boxes=gpuaug.Boxes(), masks=gpuaug.Masks(kind="instances")),
        mix=gpuaug.CopyPaste(objects="all", min_area=0), batch_size=2, device="cpu", num_workers=0, order="sequential",
    )  # fmt: skip
    targets = next(iter(made)).targets
    own = targets.boxes[(targets.sample == 0) & (targets.tile == 0)]
    assert own.tolist() == ([] if expected is None else [expected])
    visible = targets.visible[(targets.sample == 0) & (targets.tile == 0)]
    assert visible.tolist() == ([] if expected is None else [700 / 800])  # pixels of the mask
