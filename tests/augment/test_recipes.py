"""Every shipped recipe: composed, built, run on photographs on the CPU; and interpolation of the cited work."""

from pathlib import Path

import pytest
import torch

import gpuaug

FOR_TARGETS = ("seg", "det", "pose")  # test_target_recipes.py
FILES = (Path(gpuaug.__file__).parent.parent / "conf/gpuaug/augment").glob("*.yaml")
RECIPES = sorted(file.stem for file in FILES if file.stem.partition("_")[0] not in FOR_TARGETS)
SHAPES = {
    **dict.fromkeys(("simclr", "byol", "mocov3", "barlowtwins", "vicreg"), [224] * 2),
    "dino": [224] * 2 + [96] * 6,
    "swav": [224] * 2 + [96] * 6,
    "ibot": [224] * 2 + [96] * 10,
    "dinov2": [224] * 2 + [96] * 8,
    "dinov2_patch14": [224] * 2 + [98] * 8,
    "dinov3": [256] * 2 + [112] * 8,
    "dinov3_gram": [256] * 2 + [112] * 8 + [512] * 2,
    "dinov3_highres": [768] * 2 + [168] * 8 + [1152] * 2,
    "data2vec": [224] * 2,
    "beit_tokenizer": [224, 112],
    "efficientnetv2": [171],  # in epoch 0
}
INTERPOLATION = {
    "none": "bilinear", "eval": "bilinear", "flip": "bilinear", "standard": "bilinear", "mocov3": "bilinear",
    "simclr": "bicubic", "byol": "bicubic", "dino": "bicubic", "threeaugment": "bicubic",
    "dinov2": "bicubic", "mae": "bicubic", "barlowtwins": "bicubic", "vicreg": "bicubic",
    "clip": "bicubic", "swav": "bilinear", "convnext": "bicubic", "efficientnetv2": "bilinear",
    "randaugment_torchvision": "bilinear", "trivialaugment_torchvision": "bilinear", "autoaugment": "bilinear",
    "augmix": "bilinear", "timm": "bicubic", "dinov3": "bicubic", "dinov2_patch14": "bicubic", "ibot": "bicubic",
    "dinov3_gram": "bicubic", "dinov3_highres": "bicubic", "data2vec": "bicubic", "beit_tokenizer": "bicubic",
    "beit": "bicubic", "ijepa": "bilinear", "simmim": "bilinear", "lerobot": None,  # without a crop
    "naflex": "bicubic", "naflex_eval": "bicubic",
}  # fmt: skip


def build(photos, *overrides):
    fixed = [f"source.root='{photos}'", "device=cpu", "num_workers=0", "prefetch=0", "batch_size=4", "limit_batches=1"]
    return gpuaug.build(gpuaug.compose("train", [*fixed, *overrides]))


def crops(node):
    if node.get("crop"):
        yield node.crop
    for view in (node.get("views") or node.get("schedule") or {}).values():
        yield view.crop


def test_recipes_are_the_promised_ones():
    assert set(RECIPES) == set(INTERPOLATION)


@pytest.mark.parametrize("recipe", RECIPES)
def test_interpolation_is_that_of_the_cited_work(recipe):
    used = {crop.interpolation for crop in crops(gpuaug.compose("train", [f"augment={recipe}"]).augment)}
    assert used == {INTERPOLATION[recipe]} - {None}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_yields_a_finite_batch_of_the_promised_shape(photos, recipe):
    crop = [] if INTERPOLATION[recipe] else ["augment.crop={_target_: gpuaug.Resize, size: [224, 224]}"]
    with build(photos, f"augment={recipe}", *crop) as loader:
        (batch,) = loader
    images = batch.images if isinstance(batch.images, list) else [batch.images]
    if recipe.startswith("naflex"):  # as large as the batch's largest image
        assert max(h * w for h, w in batch.sides.tolist()) <= 576 * 16 * 16
    else:
        assert [tuple(x.shape) for x in images] == [(4, 3, s, s) for s in SHAPES.get(recipe, [224])]
    for x in images:
        assert x.dtype == torch.float32
        assert x.is_contiguous()
        assert x.isfinite().all()
        assert x.std() > 0.05
    assert batch.labels.dtype == torch.int64
    assert batch.valid.all()
    assert not torch.equal(images[0][0], images[0][1])
    if recipe not in ("none", "eval"):
        assert len(images) == 1 or not torch.equal(images[0], images[1])


@pytest.mark.parametrize("override", ["order=weighted", "mix=mixup", "mix=cutmix", "faults.policy=drop"])
def test_options_that_no_test_of_a_command_names_are_built_and_iterated(photos, override):
    with build(photos, override, "augment=flip", "augment.crop.size=32") as loader:
        (batch,) = loader
    assert batch.images.shape == (4, 3, 32, 32)
    assert batch.images.isfinite().all()
    if override.startswith("mix="):
        assert tuple(batch.labels.shape) == (4, 5)
        assert batch.labels.sum(1).allclose(torch.ones(4))
