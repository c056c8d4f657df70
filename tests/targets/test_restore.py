"""Predictions in the pixels of the original images: what a batch yields comes back as it was."""

from __future__ import annotations

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from common import loader
from pictures import encode, png
from torch.nn.functional import interpolate

import gpuaug
from gpuaug.errors import ConfigError

RULES = gpuaug.Targets(masks=gpuaug.Masks(), boxes=gpuaug.Boxes(), keypoints=gpuaug.Keypoints())


class Scenes(list[gpuaug.Target]):
    """Images of any size with a mask of blocks, a box and keypoints."""

    def __init__(self, sizes: list[tuple[int, int]]) -> None:
        self.sizes, rng = sizes, np.random.default_rng(0)
        self.masks = [np.kron(rng.integers(0, 9, (5, 7)), np.ones((h // 5 + 1, w // 7 + 1)))[:h, :w] for h, w in sizes]

    num_classes = 9

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, n):
        h, w = self.sizes[n]
        image = encode(np.random.default_rng(n).integers(0, 256, (h, w, 3), dtype=np.uint8), "PNG")
        box = [w * 0.2, h * 0.3, w * 0.7, h * 0.9]
        points = [[[w * 0.4, h * 0.5, 2], [w * 0.25, h * 0.8, 1]]]
        target = gpuaug.Target(
            mask=png(self.masks[n].astype(np.uint8)), boxes=[box], labels=[3], keypoints=points, size=(h, w)
        )
        return image, target


SIZES = [(60, 80), (80, 61), (33, 121)]
RECIPES = {
    "letterbox": gpuaug.Augment(crop=gpuaug.Letterbox(150)),
    "resize": gpuaug.Augment(crop=gpuaug.Resize((133, 140))),
    "crop": gpuaug.Augment(crop=gpuaug.ResizeCenterCrop(120, 100)),
    "flip": gpuaug.Augment(crop=gpuaug.Letterbox(150), ops={"flip": K.RandomHorizontalFlip(p=1.0)}),
    "affine": gpuaug.Augment(
        crop=gpuaug.Letterbox(200), ops={"a": K.RandomAffine(20.0, (0.05, 0.05), (0.8, 0.9), p=1.0)}
    ),
    "perspective": gpuaug.Augment(crop=gpuaug.Letterbox(200), ops={"p": K.RandomPerspective(0.3, p=1.0)}),
}


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_batch_yields_comes_back(name):
    scenes = Scenes(SIZES)
    with loader(scenes, augment=RECIPES[name], targets=RULES) as made:
        batch = made.fetch(range(len(SIZES)))
    targets = batch.targets
    counts = targets.counts.tolist()
    back = targets.restore(
        boxes=targets.boxes.split(counts), keypoints=targets.keypoints.split(counts), masks=targets.masks
    )
    for n, ((h, w), image) in enumerate(zip(SIZES, back, strict=True)):
        assert image["masks"].shape == (h, w)
        known = image["masks"] != 255
        wrong = (image["masks"].numpy() != scenes.masks[n]) & known.numpy()
        edges = np.zeros((h, w), dtype=bool)  # a pixel beside another class may get that class
        for axis in (0, 1):
            edges |= np.roll(scenes.masks[n], 1, axis) != scenes.masks[n]
            edges |= np.roll(scenes.masks[n], -1, axis) != scenes.masks[n]
        assert not (wrong & ~edges).any()
        assert known.float().mean() > {"crop": 0.1, "affine": 0.4, "perspective": 0.4}.get(name, 0.99)
        if name in ("letterbox", "resize", "flip"):
            np.testing.assert_allclose(image["boxes"][0], [w * 0.2, h * 0.3, w * 0.7, h * 0.9], atol=1e-3)
        if name != "crop":
            np.testing.assert_allclose(
                image["keypoints"][0], [[w * 0.4, h * 0.5, 2], [w * 0.25, h * 0.8, 1]], atol=0.01
            )
            x1, y1, x2, y2 = image["boxes"][0].tolist()  # the box around the moved box contains it
            assert max(x1 - w * 0.2, y1 - h * 0.3, w * 0.7 - x2, h * 0.9 - y2) < 1


@pytest.mark.parametrize("stride", [1, 4])
def test_logits_are_resized_as_by_torch(stride):
    scenes = Scenes(SIZES[:1])
    with loader(scenes, augment=RECIPES["resize"], targets=RULES) as made:
        targets = made.fetch([0]).targets
    logits = torch.rand(1, 5, 133 // stride, 140 // stride)
    (image,) = targets.restore(logits=logits)
    expected = interpolate(logits, SIZES[0], mode="bilinear", align_corners=False)[0]
    torch.testing.assert_close(image["logits"], expected, atol=1e-4, rtol=0)


def test_a_letterbox_is_cut_off():
    scenes = Scenes([(40, 80)])
    with loader(scenes, augment=gpuaug.Augment(crop=gpuaug.Letterbox(80)), targets=RULES) as made:
        targets = made.fetch([0]).targets
    logits = torch.rand(1, 2, 80, 80)
    (image,) = targets.restore(logits=logits, masks=logits.argmax(1))
    torch.testing.assert_close(image["logits"], logits[0, :, 20:60], atol=1e-5, rtol=0)
    assert torch.equal(image["masks"], logits[0, :, 20:60].argmax(0))


def test_predictions_of_other_images_are_refused():
    with loader(Scenes(SIZES), augment=RECIPES["resize"], targets=RULES) as made:
        targets = made.fetch([0, 1]).targets
    with pytest.raises(ConfigError, match="`masks` must be those of 2 images. Found: 3"):
        targets.restore(masks=torch.zeros(3, 9, 9, dtype=torch.int64))
    assert targets.restore() == [{}, {}]
    (first, _) = targets.restore(boxes=[torch.zeros(0, 4)] * 2, keypoints=[torch.zeros(0, 3, 3)] * 2)
    assert first["boxes"].shape == (0, 4)
    assert first["keypoints"].shape == (0, 3, 3)
