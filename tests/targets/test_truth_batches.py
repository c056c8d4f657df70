"""A sample's targets belong to its image and to nothing else: not to its batch, its neighbours, or its colours."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from conftest import SHARED
from pictures import encode, png
from test_parameters import OPS
from truth import ALL, CROPS, batch_of, composed, samples, targets_loader

import gpuaug
from gpuaug.augment.policy import entry_of
from gpuaug.read.order import Repeated, Weighted

COLOURS = [name for name, make in OPS.items() if entry_of(make()).affects == "pixels"]
OPS_OF_ALL = {
    "colour": lambda: K.ColorJitter(0.3, 0.3, 0.3, 0.1, p=0.8),
    "flip": lambda: K.RandomHorizontalFlip(),
    "rand": lambda: gpuaug.RandAugment(interpolation="bilinear"),
    "trivial": lambda: gpuaug.TrivialAugmentWide(interpolation="bilinear"),
    "warp": lambda: K.RandomPerspective(0.3, p=0.7),
    "distort": lambda: gpuaug.PhotometricDistort(),
}


def everything(backend: str = "fused") -> gpuaug.MultiView:
    """A view for every second crop, all policies, and a OneOf."""
    views = {}
    for number, crop in enumerate([*CROPS][2::2]):
        names = list(OPS_OF_ALL)[number % 6 :][:2]
        ops = {name: OPS_OF_ALL[name]() for name in names} | composed(number, perspective=True, most=2)
        views[crop] = gpuaug.Augment(crop=CROPS[crop](), ops=ops, copies=1 + (crop == "iou"), backend=backend)
    return gpuaug.MultiView(views=views)


def source_of(count: int, bad: dict[int, dict[str, Any]] | None = None) -> list[Any]:
    """PNGs and BMPs with masks of their own, zero to four objects, and two keypoints of each."""
    made, rng = [], np.random.default_rng(3)
    for k, sample in enumerate(samples(count, 4)):
        n = k % 5
        corner = rng.uniform(0, 0.7, (n, 2)) * sample.size[::-1]
        boxes = np.concatenate([corner, corner + rng.uniform(3, 60, (n, 2))], axis=1)
        points = np.concatenate([rng.uniform(-9, 150, (n, 2, 2)), rng.integers(0, 3, (n, 2, 1))], axis=2)
        fields = {"mask": png(sample.mask), "boxes": boxes, "keypoints": points, "labels": np.arange(n) + k}
        fields |= {"ids": 100 * k + np.arange(n), "crowd": np.arange(n) == 3, "size": sample.size}
        made.append((encode(sample.pixels, ("PNG", "BMP")[k % 2]), gpuaug.Target(**fields | (bad or {}).get(k, {}))))
    return made


PER_OBJECT = ("boxes", "labels", "keypoints", "ids", "crowd", "area")
PER_IMAGE = ("masks", "sizes", "covered", "matrices")


def collected(batches: Any) -> dict[int, list[tuple[bytes, ...]]]:
    """For each sample the bytes of all its targets, in all views, once for each time that it came."""
    found: dict[int, list[tuple[bytes, ...]]] = {}
    for batch in batches:
        views = batch.targets if isinstance(batch.targets, list) else [batch.targets]
        for row, index in enumerate(batch.indices.tolist()):
            parts = []
            for view in views:
                own = view.sample == row
                assert int(own.sum()) == int(view.counts[row])
                parts += [getattr(view, name)[own].numpy().tobytes() for name in PER_OBJECT]
                parts += [getattr(view, name)[row].numpy().tobytes() for name in PER_IMAGE]
            found.setdefault(index, []).append(tuple(parts))
    return found


def run(source: Any, backend: str = "fused", **settings: Any) -> dict[int, list[tuple[bytes, ...]]]:
    with targets_loader(source, everything(backend), **{"order": "shuffle", "batch_size": 5} | settings) as made:
        return collected(made)


# --- 6: bit-equality


def test_targets_are_the_same_in_every_way_to_load_them() -> None:
    source = source_of(11)
    want = run(source)
    assert len(want) == 11
    assert run(source, "kornia") == want
    for settings in ({"batch_size": 1}, {"batch_size": 11, "prefetch": 2}, {"batch_size": 4, "num_workers": 2}):
        assert run(source, last="uneven", **settings) == want
    found: dict[int, Any] = {}
    for rank in range(2):
        found |= run(source, last="uneven", rank=rank, world_size=2, batch_size=3)
    assert found == want
    with targets_loader(source, everything(), order="shuffle", batch_size=4) as made:
        passing = iter(made)
        first, state = collected([next(passing), next(passing)]), made.state_dict()
    with targets_loader(source, everything(), order="shuffle", batch_size=3) as made:
        made.load_state_dict(state)
        assert first | collected(made) == want
    with targets_loader(source, everything(), order="shuffle") as made:
        assert collected([made.fetch([10, 2, 7], epoch=0)]).items() <= want.items()


@pytest.mark.parametrize("policy", ["drop", "blank"])
def test_a_neighbour_that_is_dropped_or_blank_changes_nothing(policy: str) -> None:
    want = run(source_of(11))
    bad = {2: {"mask": b"not a png"}, 5: {"boxes": [[9, 9, 1, 1]], "ids": None}, 7: {"size": (3, 3)}}
    source = source_of(11, bad)
    source[9] = (source[9][0][:60], source[9][1])  # a truncated PNG or BMP
    for settings in ({"batch_size": 11}, {"batch_size": 4, "num_workers": 1}):
        with targets_loader(
            source, everything(), order="shuffle", faults=gpuaug.Faults(policy=policy, max=None), **settings
        ) as made:
            batches = list(made)
        found = collected(batches)
        assert {k: v for k, v in found.items() if k not in (2, 5, 7, 9)} == {
            k: v for k, v in want.items() if k not in (2, 5, 7, 9)
        }
        assert found.keys() == (want.keys() if policy == "blank" else want.keys() - {2, 5, 7, 9})
        for batch in batches:
            for row, index in enumerate(batch.indices.tolist()):
                good = index not in (2, 5, 7, 9)
                assert bool(batch.valid[row]) == good
                for view, images in zip(batch.targets, batch.images, strict=True):
                    if not good:
                        assert not images[row].any()
                        assert (view.masks[row] == 255).all()
                        assert view.counts[row] == 0


@pytest.mark.parametrize("order", [Weighted(np.linspace(0.1, 3, 11)), Repeated(3)], ids=["weighted", "repeated"])
def test_repeats_of_a_sample_have_targets_of_their_own(order: Any) -> None:
    source = source_of(11)
    found = run(source, order=order, last="uneven")
    again = {k: v for k, v in found.items() if len(v) > 1}
    assert again
    for values in again.values():
        assert len(set(values)) == len(values), "a repeat is augmented anew"
    assert run(source, order=order, last="uneven", batch_size=4, num_workers=2) == found
    first = {k: v[0] for k, v in run(source).items()}
    assert all(v[0] == first[k] for k, v in found.items())


def test_colours_change_no_target() -> None:
    """Every operation that changes only values, between two that move pixels."""
    some = samples(3, 1, [(60, 80)])
    images = torch.from_numpy(np.stack([s.pixels // [1, 2, 3] for s in some]).astype(np.uint8))
    given = {
        "masks": torch.from_numpy(np.stack([s.mask for s in some])),
        "boxes": [s.target().boxes for s in some],
        "keypoints": [s.target().keypoints for s in some],
        "targets": ALL,
    }
    moving = {"flip": K.RandomHorizontalFlip(), "warp": K.RandomAffine(20.0, (0.1, 0.1), p=1.0)}
    crop = CROPS["resized"]()
    plain, want = gpuaug.Augment(crop=crop, ops=moving)(images, **given, seed=2)
    colours = {name: OPS[name](p=1.0) for name in COLOURS} | {"photometric": gpuaug.PhotometricDistort()}
    one = gpuaug.OneOf(ops={"jitter": K.ColorJitter(0.3, p=1.0), "gray": K.RandomGrayscale(p=1.0)})
    ops = {"flip": moving["flip"], "one": one, **colours, "warp": moving["warp"]}
    out, targets = gpuaug.Augment(crop=crop, ops=ops)(images, **given, seed=2)
    assert not torch.equal(out, plain)
    for field in ("masks", "boxes", "labels", "keypoints", "sample", "counts", "matrices"):
        assert torch.equal(getattr(targets, field), getattr(want, field)), field


# --- 8: hostile

POINTS = 2
_SIDE = (48, 64)  # (height, width)


class Strange:
    """Not an array."""

    def __array__(self, *args: Any, **more: Any) -> Any:
        raise RuntimeError("no array")


def _truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _huge_header() -> bytes:
    data = bytearray(png(np.zeros(_SIDE, np.uint8)))
    data[16:24] = (2**31 - 1).to_bytes(4, "big") * 2
    return bytes(data)


_OBJECT = {"labels": [0], "ids": [0], "keypoints": np.ones((1, POINTS, 3))}
_GRAY = np.zeros(_SIDE, np.uint8)
BAD: dict[str, dict[str, Any]] = {
    "nan": {**_OBJECT, "boxes": [[0, 0, np.nan, 4]]},
    "too large for float32": {**_OBJECT, "boxes": [[0, 0, 1e300, 4]]},
    "inverted": {**_OBJECT, "boxes": [[9, 9, 1, 1]]},
    "nan point": {**_OBJECT, "boxes": [[0, 0, 4, 4]], "keypoints": np.full((1, POINTS, 3), np.nan)},
    "more points": {**_OBJECT, "boxes": [[0, 0, 4, 4]], "keypoints": np.ones((1, POINTS + 3, 3))},
    "no points": {**_OBJECT, "boxes": [[0, 0, 4, 4]], "keypoints": None},
    "shape": {**_OBJECT, "boxes": np.zeros((1, 5))},
    "text": {**_OBJECT, "boxes": [["a", "b", "c", "d"]]},
    "ragged": {**_OBJECT, "boxes": [[1, 2, 3, 4], [1, 2]]},
    "object": {**_OBJECT, "boxes": object()},
    "strange": {**_OBJECT, "boxes": Strange()},
    "a gradient": {**_OBJECT, "boxes": torch.ones((1, 4), requires_grad=True)},
    "bfloat16": {**_OBJECT, "boxes": torch.ones((1, 4), dtype=torch.bfloat16)},
    "label of 70 bits": {**_OBJECT, "boxes": [[0, 0, 4, 4]], "labels": [2**70]},
    "fraction as label": {**_OBJECT, "boxes": [[0, 0, 4, 4]], "labels": [0.5]},
    "other size": {"size": (7, 7)},
    "negative size": {"size": (-48, 64)},
    "side as number": {"size": 48},
    "mask none": {"mask": None},
    "mask empty": {"mask": b""},
    "mask of text": {"mask": "a mask"},
    "mask as array": {"mask": _GRAY},
    "mask garbage": {"mask": bytes(range(256)) * 8},
    "mask truncated": {"mask": _truncated(png(np.arange(48 * 64, dtype=np.uint8).reshape(_SIDE)))},
    "mask of another size": {"mask": png(np.zeros((5, 6), np.uint8))},
    "mask in colour": {"mask": png(np.zeros((*_SIDE, 3), np.uint8))},
    "mask jpeg": {"mask": encode(_GRAY, "JPEG")},
    "mask huge": {"mask": _huge_header()},
    "runs truncated": {"mask": b"GPUAUGRL" + bytes(9)},
    "runs of nothing": {"mask": b"GPUAUGRL" + np.array([*_SIDE, 0], "<u4").tobytes()},
    "runs negative": {"mask": b"GPUAUGRL" + np.array([*_SIDE, 1, -1, 48 * 64], "<i4").tobytes()},
    "runs overflow": {"mask": b"GPUAUGRL" + np.array([*_SIDE, 2, 1, 1, 2**32 - 1, 3073], "<u4").tobytes()},
}  # fmt: skip
BAD_BYTES = {"empty": b"", "garbage": bytes(range(256)), "cut": None}
FINE: list[dict[str, Any]] = [
    {"boxes": None, "labels": None, "ids": None, "keypoints": None},
    {"boxes": np.zeros((0, 4)), "labels": [], "ids": [], "keypoints": np.zeros((0, POINTS, 3))},
    {"boxes": [[-50, -50, -9, -9]], **_OBJECT},  # outside
    {"boxes": [[900, 900, 950, 950]], **_OBJECT},
    {"boxes": [[5, 5, 5, 5]], **_OBJECT},  # no area
    {"boxes": [[-1e30, -1e30, 1e30, 1e30]], **_OBJECT},
]


class Items(list):
    """A source that knows how many points an object has."""

    target_kinds = frozenset({"masks", "boxes", "keypoints"})
    num_keypoints = POINTS


def number_of(k: int) -> int:
    """The number that a sample carries in its pixels, mask, labels and ids."""
    return 10 + 7 * k % 240


def hostile_source(count: int, seed: int) -> tuple[list[Any], set[int]]:
    """Samples that carry their number, and the numbers of those that are bad."""
    rng, items, bad = random.Random(seed), Items(), set()
    kinds = [*BAD, *BAD_BYTES]
    for k in range(count):
        n = number_of(k)
        data = encode(np.full((*_SIDE, 3), n, np.uint8), ("PNG", "BMP")[k % 2])
        many = 10_000 if k == 5 else 1 + k % 4
        corner = np.random.default_rng(k).uniform(0, 30, (many, 2))
        fields: dict[str, Any] = {
            "mask": png(np.full(_SIDE, n, np.uint8)),
            "boxes": np.concatenate([corner, corner + 10], axis=1),
            "labels": np.full(many, n),
            "ids": np.full(many, n),
            "keypoints": np.concatenate([corner[:, None] + [[0, 0], [5, 5]], np.full((many, 2, 1), 2)], axis=2),
            "size": _SIDE,
        }
        choice = rng.random()
        if choice < 0.5:
            kind = kinds[k % len(kinds)] if choice < 0.4 else rng.choice(kinds)
            bad.add(k)
            if kind in BAD_BYTES:
                data = _truncated(data)[:40] if BAD_BYTES[kind] is None else BAD_BYTES[kind]
            else:
                fields |= BAD[kind]
        elif choice < 0.65:
            fields |= rng.choice(FINE)
            if fields["labels"] is not None and len(fields["labels"]):
                fields |= {"labels": [n], "ids": [n]}
        items.append((data, gpuaug.Target(**fields) if k % 3 else fields))
    return items, bad


def hostile(seed: int) -> int:
    """Run batches of a hostile source under every policy; returns how many good samples came."""
    items, bad = hostile_source(75, seed)
    names = list(CROPS)
    seen = 0
    for number, (policy, workers) in enumerate([("drop", 0), ("blank", 1), ("drop", 2)]):
        views = {
            name: gpuaug.Augment(
                crop=CROPS[name](), ops={"h": K.RandomHorizontalFlip(), "turn": K.RandomRotation(20.0)}
            )
            for name in [names[1 + (3 * number + seed) % 12], "iou", "letterbox"]
        }
        settings = {"num_workers": workers, "batch_size": 11, "order": "shuffle", "prefetch": 2 * (number % 2)}
        faults = gpuaug.Faults(policy=policy, max=None)
        with targets_loader(items, gpuaug.MultiView(views=views), faults=faults, **settings) as made:
            batches = list(made)
        came = [k for batch in batches for k in batch.indices[batch.valid].tolist()]
        assert sorted(came) == sorted(set(range(len(items))) - bad), set(came) ^ (set(range(len(items))) - bad)
        for batch in batches:
            for images, targets in zip(batch.images, batch.targets, strict=True):
                check_pairs(batch, images, targets)
        seen += len(came)
    return seen


def check_pairs(batch: Any, images: Any, targets: Any) -> None:
    """Every row's mask and objects carry the number of its image."""
    assert torch.equal(targets.indices, batch.indices)
    assert int(targets.counts.sum()) == len(targets.labels) == len(targets.boxes) == len(targets.keypoints)
    assert torch.equal(torch.repeat_interleave(torch.arange(len(batch)), targets.counts), targets.sample)
    for row, index in enumerate(batch.indices.tolist()):
        n, mask = number_of(index), targets.masks[row]
        own = targets.sample == row
        if not batch.valid[row]:
            assert (mask == 255).all()
            assert not own.any()
            continue
        assert set(mask.unique().tolist()) <= {n, 255}
        assert set(targets.labels[own].tolist()) | set(targets.ids[own].tolist()) <= {n}
        pixels = (images[row, 0] * 255).round()
        inside = mask == n
        if int(inside.sum()) > 400:
            assert (pixels[inside] == n).float().mean() > 0.8, (index, pixels[inside].unique())
        assert torch.isfinite(targets.boxes[own]).all()


def test_hostile_batches_end_no_process_and_part_no_pair() -> None:
    paths = os.pathsep.join([*map(str, SHARED), os.path.dirname(__file__)])
    child = subprocess.run(
        [sys.executable, __file__, "0"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert child.returncode == 0, child.stderr[-3000:]
    assert int(child.stdout.split()[-1]) > 100


def test_each_bad_target_is_a_fault_with_a_reason(tmp_path: Path) -> None:
    good = {"mask": png(_GRAY), "boxes": [[0, 0, 9, 9]], **_OBJECT, "size": _SIDE}
    data = encode(np.zeros((*_SIDE, 3), np.uint8), "BMP")
    items = Items((data, gpuaug.Target(**good | change)) for kind in BAD for change in ({}, BAD[kind]))
    faults = gpuaug.Faults(policy="drop", max=None, file=tmp_path / "faults.jsonl")
    with targets_loader(items, gpuaug.Augment(), faults=faults, batch_size=len(items)) as made:
        (batch,) = made
    assert batch.indices.tolist() == list(range(0, len(items), 2))
    lines = map(json.loads, (tmp_path / "faults.jsonl").read_text().splitlines())
    reasons = {line["index"]: line["reason"] for line in lines}
    assert sorted(reasons) == list(range(1, len(items), 2))
    named = ("box", "label", "point", "mask", "size", "annotations", "length", "known codec", "png", "runs", "pixels")
    for number, kind in enumerate(BAD):
        known = any(word in reasons[2 * number + 1] for word in named)
        assert known or kind in ("object", "ragged", "strange", "a gradient", "bfloat16"), reasons[2 * number + 1]
    with targets_loader(items, gpuaug.Augment()) as made, pytest.raises(gpuaug.DataError) as caught:
        list(made)
    assert caught.value.index == 1


def test_empty_lists_are_an_image_without_objects() -> None:
    data = encode(np.zeros((*_SIDE, 3), np.uint8), "BMP")
    rules = gpuaug.Targets(boxes=gpuaug.Boxes(), keypoints=gpuaug.Keypoints())
    some = {"boxes": [[1, 2, 9, 9]], "labels": [4], "keypoints": [[[1, 2, 2]]]}
    for empty in ({"boxes": [], "labels": [], "keypoints": [], "ids": [], "crowd": [], "area": []}, {}, {"labels": []}):
        batch = batch_of([(data, empty), (data, some), (data, empty)], gpuaug.Augment(), targets=rules)
        assert batch.targets.counts.tolist() == [0, 1, 0]
        assert batch.targets.labels.tolist() == [4]
    images = torch.zeros((2, 3, *_SIDE), dtype=torch.uint8)
    _, targets = gpuaug.Augment()(images, boxes=[[], [[1, 2, 9, 9]]], labels=[[], [4]])
    assert targets.counts.tolist() == [0, 1]


@pytest.mark.parametrize("data", [b"", bytes(range(256))], ids=["empty", "garbage"])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("targets", [None, ALL], ids=["no targets", "targets"])
def test_a_bad_image_is_a_fault_without_a_crop_too(data: bytes, at: int, targets: Any) -> None:
    items = Items()
    for k in range(3):
        fields = {"mask": png(_GRAY), "boxes": [[0, 0, 9, 9]], **_OBJECT, "size": _SIDE}
        items.append((data if k == at else encode(np.zeros((*_SIDE, 3), np.uint8), "BMP"), gpuaug.Target(**fields)))
    for policy, count in (("drop", 2), ("blank", 3)):
        faults = gpuaug.Faults(policy=policy, max=None)
        with targets_loader(items, gpuaug.Augment(), faults=faults, targets=targets) as made:
            (batch,) = made
        assert batch.images.shape == (count, 3, *_SIDE)
        assert int(batch.valid.sum()) == 2


if __name__ == "__main__":
    print(*(hostile(int(seed)) for seed in sys.argv[1:]))
