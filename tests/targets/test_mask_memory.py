"""Decoded masks obey `decode.max_bytes`."""

import json
import tracemalloc
from functools import lru_cache
from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from common import loader
from pictures import encode, photograph
from PIL import Image

import gpuaug

SIDE, COUNT = 600, 24


@lru_cache
def files() -> tuple[bytes, list[bytes]]:
    """An image, and masks of it: every third one has 16 bits."""
    rng, masks = np.random.default_rng(0), []
    for k in range(COUNT):
        values = np.kron(rng.integers(0, 5, (12, 12)), np.ones((50, 50))).astype(np.uint8 if k % 3 else np.uint16)
        masks.append(encode(Image.fromarray(values if k % 3 else values * 60), "PNG"))
    return encode(photograph(size=(SIDE, SIDE))), masks


class Masked:
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[bytes, gpuaug.Target]:
        image, masks = files()
        return image, gpuaug.Target(mask=masks[index], boxes=[[0, 0, 50, 50]], labels=[1])

    def key(self, index: int) -> str:
        return str(index)


def made(max_bytes: int, *, crop: Any = None, file: str | None = None, **masks: Any) -> gpuaug.Loader:
    ops = {"rotate": K.RandomRotation(20.0, p=0.5)}
    crop = crop or gpuaug.RandomResizedCrop(32, scale=(0.5, 1.0))
    views = {name: gpuaug.Augment(crop=crop, ops=ops, normalize=None, backend="fused") for name in "ab"}
    return loader(
        Masked(),
        augment=gpuaug.MultiView(views=views),
        targets=gpuaug.Targets(masks=gpuaug.Masks(**masks), boxes=gpuaug.Boxes()),
        decode=gpuaug.Decode(num_threads=2, max_bytes=max_bytes),
        faults=gpuaug.Faults(policy="blank", file=file),
        batch_size=COUNT,
    )


@pytest.mark.parametrize("rules", [{}, {"map": {0: 300, 1: 1}}, {"kind": "instances"}])
def test_parts_change_no_bit(rules):
    """In parts of one, of a few and of all masks."""
    found = []
    for max_bytes in (18_000_000, 40_000_000, 2**30):
        with made(max_bytes, **rules) as batches:
            (batch,) = batches
        assert batch.valid.all()
        found.append([x for view in batch.targets for x in (view.masks, view.counts, view.boxes)])
    assert all(torch.equal(a, b) for other in found[:2] for a, b in zip(other, found[2], strict=True))


def test_masks_take_at_most_max_bytes():
    max_bytes = 18_000_000
    with made(max_bytes, map={0: 300, 1: 1}) as batches:
        batches.fetch([0])
        tracemalloc.start()
        batches.fetch(list(range(COUNT)))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1.25 * max_bytes  # all masks together: 35 MB


def test_a_mask_that_needs_more_is_a_fault(tmp_path):
    record = tmp_path / "faults.jsonl"
    with made(15_000_000, file=str(record)) as batches:
        (batch,) = batches
    assert torch.equal(batch.valid, batch.indices % 3 > 0)
    reasons = [json.loads(line)["reason"] for line in record.read_text().splitlines()]
    assert reasons == [
        "its mask: decoding takes 8640000 bytes, more than half of `decode.max_bytes` (15000000). Raise it"
    ] * (COUNT // 3)


def test_a_crop_that_reads_all_masks_of_a_batch_needs_a_quarter():
    crop = gpuaug.RandomScaleCrop(32, scale=(0.5, 1.0), cat_max_ratio=0.75)
    with made(80_000_000, crop=crop) as batches:
        (batch,) = batches
        assert batch.valid.all()
    with (
        pytest.raises(gpuaug.ConfigError, match="`decode.max_bytes` must hold four times the decoded masks"),
        made(60_000_000, crop=crop) as batches,
    ):
        next(iter(batches))
