"""Targets through the whole loader: what a batch holds, faults, workers, ranks, resume, several views."""

import io

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from common import loader
from pictures import encode, photograph, png
from PIL import Image
from test_truth_batches import collected

import gpuaug
from gpuaug.augment.target_mover import TargetMover
from gpuaug.errors import ConfigError

COUNT, K_POINTS = 12, 4
SIZES = [(96, 128), (131, 97), (64, 64), (150, 211)]  # (height, width)


class Pairs:
    """Photographs with a mask of few classes, some boxes and keypoints."""

    target_kinds = frozenset({"masks", "boxes", "keypoints"})
    num_keypoints = K_POINTS
    flip_pairs = (1, 0, 2, 3)

    def __init__(self, change=None) -> None:
        rng = np.random.default_rng(0)
        self.items = []
        for i in range(COUNT):
            h, w = SIZES[i % len(SIZES)]
            count = int(rng.integers(0, 5))
            corner = rng.uniform(0, 0.6, (count, 2)) * (w, h)
            boxes = np.concatenate([corner, corner + rng.uniform(0.1, 0.4, (count, 2)) * (w, h)], axis=1)
            points = np.concatenate(
                [rng.uniform(0, 1, (count, K_POINTS, 2)) * (w, h), np.full((count, K_POINTS, 1), 2.0)], 2
            )
            fields = {
                "mask": png(np.kron(rng.integers(0, 5, (4, 4)), np.ones((h, w)))[:h, :w].astype(np.uint8)),
                "boxes": boxes,
                "labels": rng.integers(0, 9, count),
                "keypoints": points,
                "ids": np.arange(count) + 100 * i,
                "size": (h, w),
            }
            fields |= (change or {}).get(i, {})
            self.items.append((encode(photograph(size=(w, h)), quality=90), gpuaug.Target(**fields)))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int):
        return self.items[index]

    def key(self, index: int) -> str:
        return f"pair/{index}"


ALL = gpuaug.Targets(masks=gpuaug.Masks(), boxes=gpuaug.Boxes(), keypoints=gpuaug.Keypoints())
MASKS = gpuaug.Targets(masks=gpuaug.Masks())


def moving(size: int = 48, backend: str = "fused", **more) -> gpuaug.Augment:
    ops = {
        "flip": K.RandomHorizontalFlip(p=0.5),
        "affine": K.RandomAffine(degrees=20.0, translate=(0.1, 0.1), scale=(0.8, 1.2), p=0.7),
        "jitter": K.ColorJitter(0.3, 0.3, 0.3, 0.1, p=0.8),
    }
    return gpuaug.Augment(crop=gpuaug.RandomResizedCrop(size, scale=(0.4, 1)), ops=ops, backend=backend, **more)


def targets_loader(source=None, targets=ALL, **settings) -> gpuaug.Loader:
    usual = {"augment": moving(), "batch_size": 5, "targets": targets}
    return loader(Pairs() if source is None else source, **usual | settings)


def test_what_a_batch_holds():
    with targets_loader() as made:
        batch = next(iter(made))
    images, targets = batch
    assert isinstance(targets, gpuaug.BatchTargets)
    assert images.shape == (5, 3, 48, 48)
    assert targets.masks.shape == (5, 48, 48)
    assert targets.masks.dtype == torch.int64
    assert targets.counts.sum() == len(targets.boxes) == len(targets.labels) == len(targets.keypoints)
    assert (targets.sample == torch.repeat_interleave(torch.arange(5), targets.counts)).all()
    assert targets.boxes.dtype == targets.keypoints.dtype == torch.float32
    assert targets.size == (48, 48)
    assert (targets.boxes >= 0).all()
    assert (targets.boxes <= 48).all()
    assert (targets.ids // 100 == batch.indices[targets.sample]).all()
    assert targets.matrices.shape == (5, 3, 3)
    assert set(targets.masks.unique().tolist()) <= {0, 1, 2, 3, 4, 255}


def test_without_targets_nothing_changes():
    """The same pixels and labels; the labels of the samples are those of their targets."""
    labelled = Pairs({i: {"label": i} for i in range(COUNT)})
    with targets_loader(labelled) as one, targets_loader(labelled, targets=None) as other:
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a.images, b.images)
            assert torch.equal(a.labels, b.labels)
            assert b.targets is None
            assert b.labels.tolist() == b.indices.tolist()


def test_what_cannot_be_carried_is_refused():
    class Own(torch.nn.Module):
        def forward(self, x):
            return x

    with pytest.raises(ConfigError, match=r"augment\.ops\.own"):
        targets_loader(augment=gpuaug.Augment(crop=gpuaug.Resize((8, 8)), ops={"own": Own()}))
    with pytest.raises(ConfigError, match=r"augment\.views\.a\.ops\.own"):
        own = gpuaug.Augment(crop=gpuaug.Resize((64, 64)), ops={"own": Own()})
        targets_loader(augment=gpuaug.MultiView(views={"a": own}))
    with pytest.raises(ConfigError, match="mix"):
        targets_loader(mix=gpuaug.Mix(mixup_alpha=0.2))
    with pytest.raises(ConfigError, match=r"augment\.crop.*boxes"):
        targets_loader(augment=gpuaug.Augment(crop=gpuaug.RandomIoUCrop(32)), targets=MASKS)

    class MasksOnly(Pairs):
        target_kinds = frozenset({"masks"})

    with pytest.raises(ConfigError, match=r"targets\.boxes"):
        targets_loader(MasksOnly())


def test_layouts_of_frameworks():
    with targets_loader() as made:
        batch = next(iter(made))
    targets = batch.targets
    assert [len(image["boxes"]) for image in targets.as_torchvision()] == targets.counts.tolist()
    assert torch.equal(torch.cat([image["labels"] for image in targets.as_torchvision()]), targets.labels + 1)
    theirs = targets.as_ultralytics()
    assert torch.equal(theirs["batch_idx"].long(), targets.sample)
    x1, y1, x2, y2 = targets.boxes.T / 48
    want = torch.stack([(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1], dim=1)
    assert torch.allclose(theirs["bboxes"], want)
    detr = targets.as_detr()
    assert torch.allclose(torch.cat([image["boxes"] for image in detr]), want)
    assert [image["orig_size"].tolist() for image in detr] == [list(SIZES[i % 4]) for i in batch.indices.tolist()]
    assert targets.pixel_mask().shape == (5, 48, 48)


def test_a_decoded_batch_is_augmented_as_in_the_loader():
    """Whole images of one size, without a decoder: equal pixels, masks, boxes and keypoints."""
    source = Pairs()
    rows = [i for i in range(COUNT) if SIZES[i % 4] == (96, 128)]
    bmp = [(encode(Image.open(io.BytesIO(source[i][0])), "BMP"), source[i][1]) for i in rows]
    rules = gpuaug.Targets(
        masks=gpuaug.Masks(), boxes=gpuaug.Boxes(), keypoints=gpuaug.Keypoints(flip=Pairs.flip_pairs)
    )
    with targets_loader(bmp, targets=rules, batch_size=len(bmp), order="sequential") as made:
        want = next(iter(made))
    images = torch.from_numpy(np.stack([np.asarray(Image.open(io.BytesIO(data))) for data, _ in bmp]))
    labels = [target.labels for _, target in bmp]
    found, targets = moving()(
        images,
        masks=torch.from_numpy(np.stack([np.asarray(Image.open(io.BytesIO(target.mask))) for _, target in bmp])),
        boxes=[torch.from_numpy(target.boxes) for _, target in bmp],
        labels=labels,
        keypoints=[target.keypoints for _, target in bmp],
        targets=rules,
        seed=3,
    )
    assert torch.equal(found, want.images)
    for name in ("masks", "boxes", "labels", "keypoints", "sample", "counts", "matrices"):
        assert torch.equal(getattr(targets, name), getattr(want.targets, name)), name
    alone, masks = moving()(images, masks=torch.zeros(images.shape[:3], dtype=torch.int64), seed=3)
    assert torch.equal(alone, found)
    assert masks.masks.dtype == torch.int64
    for wrong in (
        {"boxes": [np.zeros((1, 4))]},
        {"masks": torch.zeros(3, 4, 5)},
        {"boxes": [[[9, 0, 3, 4]]] * len(images)},
    ):
        with pytest.raises(ConfigError):
            moving()(images, **wrong)


def test_masks_that_the_device_moves_are_those_that_the_host_moves(monkeypatch):
    """As on CUDA: the host only crops, and torch moves the masks where the images are."""
    with targets_loader() as made:
        want = collected(made)
    sample = TargetMover.sample

    def as_on_cuda(self, batch, decoded, device, **more):
        sample(self, batch, decoded, torch.device("cuda"), **more)
        assert all(view.moves for view in batch)

    monkeypatch.setattr(TargetMover, "sample", as_on_cuda)
    with targets_loader() as made:
        assert collected(made) == want
