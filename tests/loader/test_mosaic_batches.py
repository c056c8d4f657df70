"""Mosaics in a loader: the same sample in any batch and run, targets that follow the pixels, and bad tiles."""

from __future__ import annotations

import io
from collections import Counter
from functools import cache
from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from PIL import Image

import gpuaug
from gpuaug.augment import gather as gather_module
from gpuaug.augment.mosaic import Combine

COUNT, SIDE = 100, 48
UNMASKED = {"boxes": gpuaug.Boxes(), "keypoints": gpuaug.Keypoints()}
TARGETS = {**UNMASKED, "masks": gpuaug.Masks(kind="instances")}


def picture(values: np.ndarray) -> bytes:
    data = io.BytesIO()
    Image.fromarray(values).save(data, "PNG")
    return data.getvalue()


@cache
def scenes(count: int = COUNT) -> tuple[tuple[bytes, gpuaug.Target], ...]:
    """Images of one value above 100, with up to three filled rectangles of other values that do not overlap."""
    rng, made = np.random.default_rng(5), []
    for number in range(count):
        height, width = (int(n) for n in rng.integers(30, 90, 2))
        image, mask = (
            np.full((height, width, 3), 101 + number % 50, dtype=np.uint8),
            np.zeros((height, width), np.uint8),
        )
        boxes, points = [], []
        for k in range(int(rng.integers(0, 4))):
            x1, x2 = width * k // 3 + 1, width * (k + 1) // 3 - 1
            y1 = int(rng.integers(0, height - 8))
            y2 = int(rng.integers(y1 + 4, height))
            image[y1:y2, x1:x2] = 200 + k
            mask[y1:y2, x1:x2] = k + 1
            boxes.append((x1, y1, x2, y2))
            points.append([((x1 + x2 - 1) / 2, (y1 + y2 - 1) / 2, 2)])
        labels = [number % 7] * len(boxes)
        target = gpuaug.Target(
            boxes=np.array(boxes).reshape(-1, 4), labels=labels, mask=picture(mask), size=(height, width),
            keypoints=np.array(points, dtype=float).reshape(-1, 1, 3),
        )  # fmt: skip
        made.append((picture(image), target))
    return tuple(made)


def loader(
    source: Any = None,
    *,
    mosaic: dict[str, Any] | None = None,
    affine: dict[str, Any] | None = None,
    mixup: dict[str, Any] | None = None,
    ops: Any = None,
    targets: Any = None,
    epochs: Any = None,
    **more: Any,
) -> gpuaug.Loader:
    entries: dict[str, Any] = {} if mosaic is None else {"mosaic": gpuaug.Mosaic(**{"window": 8, **mosaic})}
    if affine is not None:
        entries["affine"] = gpuaug.CanvasAffine(**{"size": SIDE, **affine})
    if mixup is not None:
        entries["mixup"] = gpuaug.TileMixUp(**{"window": 8, **mixup})
    recipe = gpuaug.Augment(
        crop=gpuaug.Letterbox(SIDE, centre=False),
        combine=entries,
        ops={"flip": K.RandomHorizontalFlip()} if ops is None else ops,
        epochs=epochs,
    )
    rules = gpuaug.Targets(**((TARGETS if mixup is None else UNMASKED) if targets is None else targets))
    usual = {"batch_size": 8, "num_workers": 0, "seed": 3, "device": "cpu", "targets": rules, "augment": recipe}
    if isinstance(more.get("augment"), str):
        more["augment"] = shipped(more["augment"])
    return gpuaug.Loader(list(scenes()) if source is None else source, **usual | more)


def rows_of(batch: gpuaug.Batch) -> dict[int, list[torch.Tensor]]:
    """What a batch has of each valid sample."""
    t, made = batch.targets, {}
    for row, index in enumerate(batch.indices.tolist()):
        own = t.sample == row
        if batch.valid[row]:
            columns = [getattr(t, name)[own] for name in ("boxes", "labels", "keypoints", "source", "tile")]
            columns += [] if t.weights is None else [t.weights[own]]
            mask = batch.images[row] if t.masks is None else t.masks[row]
            made[index] = [batch.images[row], mask, t.matrices[row], t.sources[row], *columns]
    return made


def all_rows(batches: Any) -> dict[int, list[torch.Tensor]]:
    return {index: row for batch in batches for index, row in rows_of(batch).items()}


def equal(a: dict[int, list[torch.Tensor]], b: dict[int, list[torch.Tensor]]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, y) for k in a for x, y in zip(a[k], b[k], strict=True))


def shipped(name: str) -> gpuaug.Augment:
    """A recipe of the package, with small images and one size."""
    words = [
        f"augment={name}",
        "augment.crop.size=48",
        "augment.combine.affine.size=64",
        "augment.combine.mosaic.window=8",
    ]
    words += ["augment.sizes=null", "augment.combine.mixup.window=9"] if name == "det_yolox" else []
    return gpuaug.build(gpuaug.compose("train", words).augment)


VARIED = [
    {"augment": "det_yolo"},
    {"augment": "det_yolox", "targets": UNMASKED},
    {"augment": "det_rtmdet"},
    {"mosaic": {"partners": "fresh", "tiles": 9, "p": 0.7}, "affine": {"degrees": 10}},
    {"mosaic": {}, "mixup": {"partners": "fresh", "weight": 0.3}},
    {"mixup": {}},
]


@pytest.mark.parametrize("settings", VARIED, ids=str)
def test_a_sample_is_the_same_in_any_batch_rank_and_run(settings: Any) -> None:
    whole = all_rows(loader(**settings))
    assert len(whole) == COUNT
    for more in ({"batch_size": 1}, {"batch_size": 7}, {"batch_size": 16, "num_workers": 2}, {"prefetch": 0}):
        assert equal(whole, all_rows(loader(**settings, **more))), more
    for ranks in (2, 4):
        shares = [all_rows(loader(**settings, batch_size=3, rank=r, world_size=ranks)) for r in range(ranks)]
        assert equal(whole, {index: row for share in shares for index, row in share.items()}), ranks
    state, first = None, loader(**settings)
    for number, _ in enumerate(first):
        if number in (0, 5, 9):
            state = first.state_dict()
            for ranks, size in ((1, 8), (2, 5)):
                rest = {}
                for rank in range(ranks):
                    later = loader(**settings, batch_size=size, rank=rank, world_size=ranks)
                    later.load_state_dict(state)
                    rest |= all_rows(later)
                assert rest
                assert equal(rest, {index: whole[index] for index in rest}), (number, ranks)
    one = loader(**settings)
    for index in (0, 7, 63):
        image, targets = one[index]
        assert torch.equal(image, whole[index][0])
        assert torch.equal(targets.boxes, whole[index][4])
    assert equal(all_rows([one.fetch([3, 3, 99, 4])]), {index: whole[index] for index in (3, 4, 99)})
    assert equal(all_rows(first.replay(4)), {k: whole[k] for k in all_rows(first.replay(4))})


def test_epochs_and_seeds_give_other_mosaics() -> None:
    settings: dict[str, Any] = {"mosaic": {}, "affine": {}}
    made = loader(**settings)
    epochs = [all_rows(made), all_rows(made)]
    ranks = [all_rows(loader(**settings, rank=r, world_size=2)) for r in range(2)]
    seeds = [all_rows(loader(**settings, seed=seed)) for seed in (4, 5)]
    several = [*epochs, *seeds]
    assert len({tuple(map(tuple, (rows[k][3].tolist() for k in range(COUNT)))) for rows in several}) == len(several)
    assert not ranks[0].keys() & ranks[1].keys()


def test_partners_come_from_shortly_before_and_are_read_once() -> None:
    class Counted(list):
        def __getitem__(self, at: Any) -> Any:
            reads[at] += 1
            return super().__getitem__(at)

    for ranks in (1, 2, 4, 8):
        for rank in range(ranks):
            reads, entries = Counter[int](), {"mosaic": {}, "affine": {}, "mixup": {} if rank % 2 else None}
            made = loader(Counted(scenes()), **entries, rank=rank, world_size=ranks, last="uneven")
            reads.clear()
            order = made.epoch_order.epoch.indices.tolist()
            for batch in made:
                for index, sources in zip(batch.indices.tolist(), batch.targets.sources.tolist(), strict=True):
                    assert sources[0] == index
                    distances = [(order.index(index) - order.index(other)) % COUNT for other in sources[1:]]
                    assert len(set(distances[:3])) == 3
                    assert len(distances) == 3 + rank % 2
                    assert all(0 < d <= 64 and d % 8 == 0 for d in distances)
            own = -(-(COUNT - rank) // ranks)
            # the epoch's first samples also need up to 64 that come before its beginning
            assert own <= sum(reads.values()) <= own + -(-64 // ranks), (ranks, sum(reads.values()))


def test_fresh_partners_that_no_output_shows_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {
        "mosaic": {"partners": "fresh", "centre": (0.2, 1.8)}, "affine": {"degrees": 10, "scale": (0.8, 3.0)},
        "targets": TARGETS, "ops": {},
    }  # fmt: skip
    skipped, whole = list(loader(**settings)), []
    monkeypatch.setattr(Combine, "unseen", lambda self, uniforms, crop: np.zeros((len(uniforms["mosaic"]), 4), bool))
    whole = list(loader(**settings))
    unread = 0
    for a, b in zip(skipped, whole, strict=True):
        assert torch.equal(a.images, b.images)
        for name in ("masks", "boxes", "labels", "keypoints", "sample", "tile", "matrices"):
            assert torch.equal(getattr(a.targets, name), getattr(b.targets, name)), name
        different = a.targets.sources != b.targets.sources
        assert (a.targets.sources[different] == -1).all()
        assert not different[:, 0].any()
        unread += int(different.sum())
    assert unread > 0.1 * 3 * COUNT


def test_batch_partners_show_every_sample_in_every_place() -> None:
    for batch in loader(mosaic={"partners": "batch"}, affine={}):
        count = len(batch.indices)
        if count >= 4:
            for column in batch.targets.sources.T:
                assert sorted(column.tolist()) == sorted(batch.indices.tolist())
            assert all(len(set(row)) == 4 for row in batch.targets.sources.tolist())
    one = loader(mosaic={"partners": "batch"}, affine={}).fetch([5])
    assert one.targets.sources.tolist() == [[5] * 4]


COMPOSITIONS = [
    {"mosaic": {}, "affine": {"degrees": 30, "shear": 10, "scale": (0.3, 2)}},
    {"mosaic": {"tiles": 9}, "affine": {"degrees": 180, "about": "origin"}},
    {"mosaic": {"p": 0.5}, "affine": {"scale": (0.1, 2)}},
    {"affine": {"degrees": 45}},
    {"mosaic": {}},
    {"mosaic": {}, "affine": {}, "ops": {"warp": K.RandomAffine(20.0, translate=(0.2, 0.2), p=0.8)}},
]


@pytest.mark.parametrize("settings", COMPOSITIONS, ids=str)
def test_targets_follow_the_pixels(settings: Any) -> None:
    limits = gpuaug.Boxes(min_size=3, min_area=9)
    made = loader(**settings, targets={**TARGETS, "boxes": limits})
    shown, points, upright = 0, 0, not settings.get("affine", {}).get("degrees") and "ops" not in settings
    for batch in made:
        t, levels = batch.targets, (batch.images * 255).round()
        for row in range(len(batch.indices)):
            boxes, keypoints = t.boxes[t.sample == row], t.keypoints[t.sample == row]
            empty = levels[row].amax(0) == 0
            assert not t.masks[row][empty].any(), "no object on an empty pixel"
            for k, (x1, y1, x2, y2) in enumerate(boxes.tolist()):
                y, x = (t.masks[row] == k + 1).nonzero().double().T
                outside = np.array([x1 - x.min(), y1 - y.min(), x.max() + 1 - x2, y.max() + 1 - y2])
                assert outside.max() < 1.6  # half a pixel of the mask, enlarged twice, and half of one here
                assert outside.min() > (-1.6 if upright else -6)  # a corner may cover no pixel's centre
                shown += 1
            for x, y, visible in keypoints[:, 0].tolist():
                if visible:
                    assert levels[row, 0, int(y + 0.5), int(x + 0.5)] > 20
                    points += 1
        # the matrices of the tiles lead from the annotations to the boxes
        for n, (source, tile, row) in enumerate(
            zip(t.source.tolist(), t.tile.tolist(), t.sample.tolist(), strict=True)
        ):
            assert t.sources[row, tile] == source
            assert t.labels[n] == source % 7
            m = t.tile_matrices[row, tile].numpy()
            hulls, areas = [], []
            for x1, y1, x2, y2 in scenes()[source][1].boxes.tolist():
                corners = m @ np.array([[x1, y1, 1], [x2, y1, 1], [x2, y2, 1], [x1, y2, 1]]).T
                hulls.append([*corners[:2].min(axis=1), *corners[:2].max(axis=1)])
                areas.append((x2 - x1) * (y2 - y1) * abs(np.linalg.det(m)))
            box = t.boxes[n].numpy()
            around = [
                (box[:2] >= h[:2] - np.float64(0.01)).all() and (box[2:] <= h[2:] + np.float64(0.01)).all()
                for h in map(np.array, hulls)
            ]
            assert any(around)
            pixels = int((t.masks[row] == n - int((t.sample < row).sum()) + 1).sum())
            errors = [abs(pixels - float(t.visible[n]) * area) for area, a in zip(areas, around, strict=True) if a]
            assert (
                min(errors) < 1 + 1.6 * (box[2:] - box[:2]).sum()
            )  # 0.8 pixels all around, of the mask enlarged twice
        assert torch.allclose(batch.matrices[:, :2], t.matrices[:, :2], atol=1e-6)
    assert shown > 30
    assert points > 20


SHOWN_ALONE = {"scale": (1.2, 1.6), "weight": 1.0}  # the mate hides the sample


@pytest.mark.parametrize("mixup", [None, {"mosaic": True}, {"mosaic": False}], ids=["mosaic", "mate", "mate alone"])
def test_centres_of_blobs_stay_within_a_twentieth_of_a_pixel(mixup: dict[str, bool] | None) -> None:
    y, x = np.mgrid[:64, :64]
    source = []
    for number in range(80):
        cx, cy = np.random.default_rng(number).uniform(20, 44, 2)
        blob = 230 * np.exp(-((x - cx) ** 2 + (y - cy) ** 2) / (2 * 4.0**2))
        # the pixel centre of a keypoint is a whole number, and the middle of a box is half a pixel further
        box = [cx - 7.5, cy - 7.5, cx + 8.5, cy + 8.5]
        target = gpuaug.Target(boxes=[box], labels=[0], keypoints=[[(cx, cy, 2)]], size=(64, 64))
        source.append((picture(np.repeat(blob.round().astype(np.uint8)[..., None], 3, axis=2)), target))
    rules = gpuaug.Targets(boxes=gpuaug.Boxes(), keypoints=gpuaug.Keypoints())
    entries: dict[str, Any] = {
        "mosaic": gpuaug.Mosaic(window=8),
        "affine": gpuaug.CanvasAffine(size=192, degrees=20, scale=(1.2, 1.6), translate=0),
    }
    entries = entries if mixup is None or mixup["mosaic"] else {}
    entries |= {} if mixup is None else {"mixup": gpuaug.TileMixUp(window=8, **SHOWN_ALONE)}
    recipe = gpuaug.Augment(crop=gpuaug.Letterbox(64, centre=False), combine=entries)
    gaps = []
    for batch in gpuaug.Loader(source, augment=recipe, targets=rules, batch_size=8, device="cpu", num_workers=0):
        t, side = batch.targets, batch.images.shape[-1]
        seen = t.tile >= 0 if mixup is None else t.tile == t.sources.shape[1] - 1
        for n in seen.nonzero()[:, 0].tolist():
            (px, py, visible), row = t.keypoints[n, 0].tolist(), int(t.sample[n])
            inside = 20 < px < side - 21 and 20 < py < side - 21
            if visible and inside:
                part = (
                    batch.images[row, 0, int(py) - 18 : int(py) + 20, int(px) - 18 : int(px) + 20]
                    .double()
                    .clamp(min=0.02)
                    - 0.02
                )
                v, u = torch.meshgrid(torch.arange(38.0), torch.arange(38.0), indexing="ij")
                gap = [
                    float((part * g).sum() / part.sum()) - p
                    for g, p in ((u + int(px) - 18, px), (v + int(py) - 18, py))
                ]
                gaps.append(gap)
                if t.visible[n] > 0.9999:
                    middle = (t.boxes[n, :2] + t.boxes[n, 2:]) / 2 - 0.5
                    assert torch.allclose(middle, torch.tensor([px, py]), atol=1e-3)
    gaps = np.array(gaps)
    assert len(gaps) > (100 if mixup is None else 30)
    assert np.median(np.abs(gaps), axis=0).max() < 0.05


def levels(batch: gpuaug.Batch) -> np.ndarray:
    return (batch.images * 255).round().permute(0, 2, 3, 1).numpy().astype(int)


MIXUPS = [
    {"mosaic": {}, "affine": {"degrees": 10}, "mixup": {"p": 0.8, "window": 10}},
    {"mosaic": {"p": 0.5}, "mixup": {"partners": "fresh", "weight": 0.3, "scale": (0.3, 4), "fill": 77}},
    {"mixup": {"scale": (0.5, 3), "flip": 0.2}},
]


@pytest.mark.parametrize("settings", MIXUPS, ids=str)
def test_a_mate_is_blended_as_in_yolox(settings: Any) -> None:
    """Pixels, boxes and weights against YOLOX's steps: resize, mirror, paste, crop and add, for what `explain` says."""
    others = {name: own for name, own in settings.items() if name != "mixup"}
    plain = [loader(**others, targets=UNMASKED, ops={}), loader(targets=UNMASKED, ops={})]
    made = loader(**settings, ops={})
    weight, fill = round(256 * made.augment.combine.entries["mixup"].weight), settings["mixup"].get("fill", 0)
    crops = {int(n): image for batch in plain[1] for n, image in zip(batch.indices, levels(batch), strict=True)}
    mixed = mirrored = cut = boxes = 0
    for batch, alone in zip(made, plain[0], strict=True):
        t, own, images = batch.targets, alone.targets, levels(batch)
        count, (height, width) = len(batch.indices), images.shape[1:3]
        last = t.sources.shape[1] - 1
        for row, (image, expected) in enumerate(zip(images, levels(alone), strict=True)):
            (step,) = [step for step in batch.explain(row).steps if step.name == "mixup"]
            of_mate = (t.sample == row) & (t.tile == last)
            assert torch.equal(t.boxes[(t.sample == row) & (t.tile < last)], own.boxes[own.sample == row])
            if not step.applied:
                assert np.array_equal(image, expected)
                assert t.sources[row, last] == -1
                assert (t.weights[t.sample == row] == 1).all()
                continue
            number, scale, flip, corner = (step.values[name] for name in ("sample", "scale", "mirrored", "corner"))
            assert t.sources[row, last] == number
            side = int(SIDE * scale)
            mate = torch.from_numpy(crops[int(number)]).permute(2, 0, 1)[None].double()
            mate = torch.nn.functional.interpolate(mate, (side, side), mode="bilinear")[0].permute(1, 2, 0).numpy()
            mate = mate[:, ::-1] if flip else mate
            x, y = (-int(each) for each in corner)
            assert 0 <= x <= max(side - width - 1, 0)
            assert 0 <= y <= max(side - height - 1, 0)
            canvas = np.full((max(side, height), max(side, width), 3), float(fill))
            canvas[:side, :side] = mate
            canvas = canvas[y : y + height, x : x + width]
            blended = np.floor((expected * (256 - weight) + np.floor(canvas + 0.5) * weight) / 256)
            near = np.ones((max(side, height), max(side, width)), dtype=bool)  # at the border, the mate meets `fill`
            margin = 1 + int(scale)
            for sides in (near, near.T):
                sides[:margin] = sides[max(side - margin, 0) : side + margin] = False
            gap = np.abs(image - blended)[near[y : y + height, x : x + width]]
            assert gap.max(initial=0) <= 1 + 3 * weight / 256  # positions are rounded to 1/256 pixel
            assert gap.mean() < 0.1
            # boxes
            m, ratio = np.eye(3), side / SIDE
            m[0] = [-ratio if flip else ratio, 0, side - x if flip else -x]
            m[1] = [0, ratio, -y]
            target = scenes()[int(number)][1]
            m = m @ np.diag([SIDE / max(target.size)] * 2 + [1])
            assert np.allclose(t.tile_matrices[row, last].numpy(), m, atol=0.5)  # the crop has whole pixels
            ends = np.array(target.boxes, dtype=float).reshape(-1, 2, 2)
            ends = ends * t.tile_matrices[row, last].numpy()[[0, 1], [0, 1]] + t.tile_matrices[row, last].numpy()[:2, 2]
            limits = np.minimum([side - x, side - y], [width, height])
            low, high = ends.min(axis=1).clip(0, limits), ends.max(axis=1).clip(0, limits)
            sides = high - low
            there = (sides >= made.targets.boxes.min_size).all(axis=1) & (sides.prod(1) >= made.targets.boxes.min_area)
            assert np.allclose(t.boxes[of_mate].numpy(), np.concatenate([low, high], axis=1)[there], atol=1e-3)
            assert (t.weights[of_mate] == weight / 256).all()
            assert (t.weights[(t.sample == row) & (t.tile < last)] == 1 - weight / 256).all()
            mixed, mirrored, cut = mixed + 1, mirrored + bool(flip), cut + bool(x or y)
            boxes += int(of_mate.sum())
        assert torch.equal(batch.matrices, alone.matrices)
        assert count == len(t.counts)
    assert mixed > COUNT / 2
    assert 0 < mirrored < mixed
    assert cut
    assert boxes > 30


def test_an_entry_that_is_off_changes_nothing_and_torch_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for others in ({"mosaic": {}, "affine": {}}, {"affine": {"about": "origin"}}, {}):
        for off in (loader(**others, mixup={"p": 0.0}), loader(**others, mixup={}, epochs={"mixup": [1, 2]})):
            for a, b in zip(off, loader(**others, targets=UNMASKED), strict=True):
                assert torch.equal(a.images, b.images)
                for name in ("boxes", "labels", "keypoints", "sample", "matrices"):
                    assert torch.equal(getattr(a.targets, name), getattr(b.targets, name)), name
        mixed = all_rows(loader(**others, mixup={}))
        with monkeypatch.context() as patch:
            patch.setattr(gather_module, "library", lambda: None)
            assert equal(mixed, all_rows(loader(**others, mixup={})))


def test_a_bad_mate_is_left_out() -> None:
    bad, settings = 17, {"mosaic": {}, "affine": {}}
    damaged = list(scenes())
    damaged[bad] = (b"no image", damaged[bad][1])
    good, plain = all_rows(loader(**settings, mixup={})), all_rows(loader(**settings, targets=UNMASKED))
    other = all_rows(loader(damaged, **settings, mixup={}, faults=gpuaug.Faults(policy="blank")))
    assert good.keys() - other.keys() == {bad}
    alone = 0
    for index, row in other.items():
        sources = good[index][3].tolist()
        if bad not in sources:
            assert all(torch.equal(x, y) for x, y in zip(row, good[index], strict=True))
        elif sources.index(bad) == 4:
            assert row[3].tolist() == [*sources[:4], -1]
            assert all(torch.equal(row[k], plain[index][k]) for k in (0, 2, 4, 5, 6, 7, 8))
            assert (row[9] == 1).all()
            alone += 1
    assert alone


def test_a_bad_tile_changes_only_its_own_pixels() -> None:
    bad, settings = 17, {"mosaic": {}, "affine": {}, "ops": {}}
    damaged = list(scenes())
    damaged[bad] = (b"no image", damaged[bad][1])
    good, other = all_rows(loader(**settings)), {}
    faulty = loader(damaged, **settings, faults=gpuaug.Faults(policy="blank"))
    batches = list(faulty)
    other = all_rows(batches)
    assert good.keys() - other.keys() == {bad}
    touched = 0
    for index, row in other.items():
        levels, reference = row[0] * 255, good[index][0] * 255
        if bad not in good[index][3].tolist():
            assert all(torch.equal(x, y) for x, y in zip(row, good[index], strict=True))
            continue
        assert bad not in row[3].tolist()
        changed = (levels != reference).any(0)
        # each changed pixel was the bad tile's, whose gray or rectangles it showed, or lies at its border
        tiles = good[index][3].tolist().index(bad)
        assert (row[8] != tiles).all()
        keeps = good[index][8] != tiles
        assert torch.equal(row[4], good[index][4][keeps])
        touched += int(changed.any())
        assert levels[:, changed].min() >= 0
        assert set((levels[0][changed].round()).int().tolist()) <= set(range(256))
    assert touched > 3
    raising = loader(damaged, **settings, faults=gpuaug.Faults(policy="raise"), order="sequential")
    with pytest.raises(gpuaug.DataError, match="sample 17"):
        list(raising)


def test_no_object_and_many_objects() -> None:
    many = [[x / 8, y / 8, x / 8 + 4, y / 8 + 4] for x in range(100) for y in range(100)]
    source = [list(scenes())[k] for k in range(12)]
    source[3] = (source[3][0], gpuaug.Target(boxes=np.array(many), labels=np.zeros(10_000, int)))
    source[4] = (source[4][0], gpuaug.Target(boxes=np.zeros((0, 4)), labels=[]))
    source = [(data, gpuaug.Target(boxes=t.boxes, labels=t.labels)) for data, t in source]
    made = loader(
        source, mosaic={}, affine={"scale": (0.8, 1.2)}, targets={"boxes": gpuaug.Boxes(min_size=0, min_area=0)}
    )
    counts = torch.cat([batch.targets.counts for batch in made])
    assert counts.max() >= 2000
    none = [(data, gpuaug.Target(boxes=np.zeros((0, 4)), labels=[])) for data, _ in source]
    assert all(
        not len(batch.targets.boxes) for batch in loader(none, mosaic={}, affine={}, targets={"boxes": gpuaug.Boxes()})
    )


def test_the_last_epochs_have_no_mosaic() -> None:
    settings: dict[str, Any] = {"mosaic": {}, "affine": {}}
    made = loader(**settings, epochs={"mosaic": [0, 1]})
    plain = loader(affine={})
    plain.set_epoch(1)
    assert equal(all_rows(made), all_rows(loader(**settings)))
    last = all_rows(made)
    assert equal(
        {k: [*v[:3], *v[4:]] for k, v in last.items()}, {k: [*v[:3], *v[4:]] for k, v in all_rows(plain).items()}
    )
    assert {tuple(row[3].shape) for row in last.values()} == {(1,)}


def test_layouts_for_models_and_what_a_mosaic_refuses() -> None:
    batch = next(iter(loader(mosaic={}, affine={})))
    assert batch.targets.as_ultralytics()["bboxes"].shape == (len(batch.targets.boxes), 4)
    with pytest.raises(gpuaug.ConfigError, match="`restore` needs outputs that show one image each"):
        batch.targets.restore(boxes=[torch.zeros(0, 4)] * 8)
    lines = str(batch.explain(0))
    assert "mosaic: samples (" in lines
    assert "affine: angle 0, scale" in lines
    with pytest.raises(gpuaug.ConfigError, match="a recipe must have no `combine` with `patch_masks`"):
        loader(mosaic={}, patch_masks=gpuaug.RandomMasks(patch=16))
    with pytest.raises(gpuaug.ConfigError, match="`augment.combine` needs images of 8 bits"):
        loader(mosaic={}, decode=gpuaug.Decode(pixels="raw", channels=3))
    with pytest.raises(gpuaug.ConfigError, match="`augment.combine.mixup` .TileMixUp. cannot blend masks"):
        loader(mixup={}, targets=TARGETS)
    assert "mosaic, affine, mixup, flip" in repr(loader(mosaic={}, affine={}, mixup={}))


@pytest.mark.parametrize(("name", "last"), [("det_yolo", 90), ("det_yolox", 285), ("det_rtmdet", 280)])
def test_shipped_recipes_run(name: str, last: int) -> None:
    small = ["augment.crop.size=64", "augment.combine.affine.size=64"]
    small += ["augment.sizes=null"] if name == "det_yolox" else []
    recipe = gpuaug.build(gpuaug.compose("train", [f"augment={name}", *small]).augment)
    assert recipe.schedule.keys() == {0, last}
    boxes = [(data, gpuaug.Target(boxes=t.boxes, labels=t.labels)) for data, t in scenes()]
    rules = gpuaug.Targets(boxes=gpuaug.Boxes(min_size=2, min_visibility=0.1))
    mix = None if name != "det_rtmdet" else gpuaug.MixObjects(lam=0.5, epochs=[0, last])
    made = gpuaug.Loader(boxes, augment=recipe, targets=rules, mix=mix, batch_size=8, device="cpu", num_workers=0)
    for epoch, tiles in ((0, {"det_yolo": 4, "det_yolox": 5, "det_rtmdet": 8}[name]), (last, 1)):
        made.set_epoch(epoch)
        batch = next(iter(made))
        assert batch.images.shape == (8, 3, 64, 64)
        known = batch.targets.sources
        assert (1 if known is None else known.shape[1]) == tiles
        assert len(batch.targets.boxes)
    plain = gpuaug.build(gpuaug.compose("train", [f"augment={name}_eval"]).augment)
    assert plain.crop.size == (640, 640)


def test_plan_knows_the_tiles_that_a_pass_keeps() -> None:
    from gpuaug.loader.tiles import HeldTiles
    from gpuaug.tools.plan.command import _tile_bytes, _tiles

    class Counting(HeldTiles):
        def combine(self, *given: Any, **more: Any) -> Any:
            done = super().combine(*given, **more)
            batches = {id(batch): len(batch.images[0]) for batch, _ in self._held.values()}
            kept.append((len(self._held), sum(batches.values())))
            return done

    for ranks, mixup in ((1, None), (3, None), (1, {"window": 12}), (5, {"partners": "fresh"})):
        more: dict[str, Any] = {"mosaic": {}, "affine": {}, "mixup": mixup, "rank": 0, "world_size": ranks}
        made, kept = loader(list(scenes()) * 9, **more), list[Any]()
        held, pipeline = Counting(), made.pipeline
        for encoded in pipeline.read(made.tasks(made.epoch_order), 0):
            pipeline.finish(pipeline.decode(pipeline.read_headers(encoded, 0)), 0, held)
        most = np.max(kept, axis=0)
        assert most[0] <= most[1] <= _tiles(made) < 2 * most[1]
    made = loader(mosaic={}, affine={})
    assert _tile_bytes(made) == 3 * SIDE * SIDE
    assert _tiles(loader(mosaic={}, affine={}, rank=0, world_size=4)) == 8 * 8 // 4 + 2 * 4 * 8
    assert _tiles(loader(mosaic={"partners": "fresh"})) == _tiles(loader()) == 0


def test_a_mask_number_without_an_object_becomes_no_other_object() -> None:
    source = []
    for number in range(8):
        mask = np.ones((40, 40), dtype=np.uint8)
        mask[20:] = 3  # the sample has one object
        target = gpuaug.Target(boxes=[[0, 0, 40, 20]], labels=[number], mask=picture(mask), size=(40, 40))
        source.append((picture(np.full((40, 40, 3), 100 + number, dtype=np.uint8)), target))
    rules = {"boxes": gpuaug.Boxes(), "masks": gpuaug.Masks(kind="instances")}
    for batch in loader(source, mosaic={}, affine={"scale": (0.5, 0.5), "translate": 0}, ops={}, targets=rules):
        t = batch.targets
        for row in range(len(batch.images)):
            for k, box in enumerate(t.boxes[t.sample == row]):
                y, x = (t.masks[row] == k + 1).nonzero().double().T
                assert (torch.stack([x.min(), y.min(), x.max() + 1, y.max() + 1]) - box).abs().max() < 1.6
