"""Test-time augmentation: the average of a model's predictions, back in the pixels of the images."""

from __future__ import annotations

from collections import OrderedDict

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gpuaug
from gpuaug.augment.tta import fused
from gpuaug.errors import ConfigError

FLIP = {"flip": K.RandomHorizontalFlip(p=1.0)}
VIEWS = {
    "plain": gpuaug.Augment(),
    "flip": gpuaug.Augment(ops=FLIP),
    "both": gpuaug.Augment(ops={**FLIP, "vflip": K.RandomVerticalFlip(p=1.0)}),
    "large": gpuaug.Augment(crop=gpuaug.Resize((80, 112))),
}


def images(count=3, seed=0):
    noise = torch.rand(count, 3, 10, 14, generator=torch.Generator().manual_seed(seed))
    return F.interpolate(noise, (40, 56), mode="bicubic").clamp(0, 1).mul(255).byte()


def nets(stride=1):
    torch.manual_seed(0)
    return nn.Conv2d(3, 5, 3, stride=stride, padding=1).requires_grad_(False)


def test_logits_of_classes_are_averaged():
    x, net = images(), nets()
    want = sum(net(v).mean((2, 3)) for v in views_by_hand(x / 255)) / 4
    got = gpuaug.tta(lambda v: net(v).mean((2, 3)), VIEWS)(x)
    assert (got - want).abs().max() < 1e-5


def views_by_hand(x):
    large = VIEWS["large"]((x * 255).round().byte(), seed=0)
    return x, x.flip(-1), x.flip(-1, -2), large


@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"logits": x}])
def test_logits_of_pixels_are_averaged_where_they_belong(stride, wrap):
    """Also of a lower resolution, and in a dictionary."""
    x, net = images(), nets(stride)
    made = [net(view) for view in views_by_hand(x / 255)]
    made = [made[0], made[1].flip(-1), made[2].flip(-1, -2), made[3]]
    want = sum(F.interpolate(each, (40, 56), mode="bilinear") for each in made) / 4
    got = gpuaug.tta(lambda v: OrderedDict(wrap({"out": net(v)})), VIEWS)(x)
    got = got["logits"]["out"] if "logits" in got else got["out"]
    assert got.shape == (3, 5, 40, 56)
    assert (got - want).abs().max() < 1e-5


def test_a_pixel_is_the_average_of_the_views_that_cover_it():
    x = images(2)
    center = gpuaug.Augment(crop=gpuaug.ResizeCenterCrop(40, 20))
    got = gpuaug.tta(lambda v: v[:, :1] * 0 + v.shape[-1], {"plain": gpuaug.Augment(), "center": center})(x)
    want = torch.full((2, 1, 40, 56), 56.0)
    want[:, :, 10:30, 18:38] = 38
    assert torch.allclose(got, want)
    assert (gpuaug.tta(lambda v: v[:, :1] * 0 + 1, {"center": center})(x)[want == 56] == 0).all()  # no view covers them


def test_turns_and_scales_come_back():
    """A model that returns its input: every view gives the image back."""
    ramp = torch.stack(torch.meshgrid(torch.linspace(0, 200, 40), torch.linspace(0, 200, 40), indexing="ij"))
    x = torch.cat([ramp, ramp[:1]])[None].round().byte()
    views = {
        "turned": gpuaug.Augment(ops={"turn": K.RandomRotation90((1, 1), p=1.0)}),
        "small": gpuaug.Augment(crop=gpuaug.Resize(20)),
        "moved": gpuaug.Augment(ops={"affine": K.RandomAffine((20.0, 20.0), scale=(0.5, 0.5), p=1.0)}),
    }
    for name, view in views.items():
        got = gpuaug.tta(lambda v: v, {name: view})(x) * 255
        assert (got - x)[..., 3:-3, 3:-3].abs().max() < 3, name


def detector(view):
    """The box of what is white in each image, with a score that depends on the view."""
    made = []
    for image in view:
        y, x = torch.nonzero(image[0] > 0.9).T
        box = torch.stack([x.min(), y.min(), x.max() + 1, y.max() + 1]).float()
        shift = torch.tensor([1.0, 0, 2, 0])  # not the same in every view: all of them count
        made.append({"boxes": (box + shift)[None], "scores": image.mean()[None], "labels": torch.tensor([3])})
    return made


def test_boxes_are_averaged_by_their_scores():
    x = torch.zeros(2, 3, 40, 56, dtype=torch.uint8)
    x[0, :, 8:30, 12:36] = 255
    x[1, :, 5:25, 30:50] = 255
    views = {**VIEWS, "large": gpuaug.Augment(crop=gpuaug.Resize((80, 112), interpolation="nearest"))}
    got = gpuaug.tta(detector, views)(x)
    for image, (x1, y1, x2, y2) in zip(got, ((12, 8, 36, 30), (30, 5, 50, 25)), strict=True):
        plain, flipped = (x1 + 1, y1, x2 + 2, y2), (x1 - 2, y1, x2 - 1, y2)
        want = np.mean([plain, flipped, flipped, (x1 + 0.5, y1, x2 + 1, y2)], axis=0)  # equal scores
        assert np.abs(image["boxes"].numpy() - want).max() < 1e-4
        assert image["labels"].tolist() == [3]


def test_fusion_is_that_of_the_paper():
    """Two views. Two boxes of one object, one alone, and one of another label on the same place."""
    boxes = torch.tensor([[0.0, 0, 10, 10], [1, 0, 11, 10], [30, 30, 40, 40], [0, 0, 10, 10]])
    scores, labels = torch.tensor([0.6, 0.9, 0.5, 0.4]), torch.tensor([1, 1, 1, 2])
    got = fused(boxes, scores, labels, views=2, iou=0.55)
    both = (0.9 * boxes[1] + 0.6 * boxes[0]) / 1.5
    assert torch.allclose(got["boxes"], torch.stack([both, boxes[2], boxes[3]]))
    assert torch.allclose(got["scores"], torch.tensor([0.75, 0.25, 0.2]))
    assert got["labels"].tolist() == [1, 1, 2]
    assert torch.equal(fused(boxes, scores, labels, views=1, iou=1.0)["boxes"], boxes[[1, 0, 2, 3]])
    none = fused(boxes[:0], scores[:0], labels[:0], views=2, iou=0.5)
    assert {name: list(value.shape) for name, value in none.items()} == {"boxes": [0, 4], "scores": [0], "labels": [0]}


def test_a_recipe_and_float_images():
    """Normalized images that a loader yielded: their values are those of the model."""
    x, net = torch.randn(2, 3, 16, 24), nets()
    got = gpuaug.tta(net, gpuaug.Augment(ops=FLIP))(x)
    assert torch.allclose(got, net(x.flip(-1)).flip(-1), atol=1e-5)


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (lambda v: v.argmax(1), r"\[2, 40, 56\] of torch.int64"),
        (lambda v: 3, "int"),
        (lambda v: [{"boxes": torch.zeros(1, 4), "masks": 1}] * 2, "a list of dictionaries with boxes, masks"),
        (lambda v: {"aux": [v]}, "list"),
    ],
)
def test_other_outputs_are_refused(output, found):
    with pytest.raises(ConfigError, match=f"the model must return floats .* Found: {found}"):
        gpuaug.tta(output, VIEWS)(images(2))
    elastic = gpuaug.Augment(ops={"elastic": K.RandomElasticTransform(p=1.0)})
    with pytest.raises(ConfigError, match="must move pixels by a matrix"):
        gpuaug.tta(nn.Identity(), {"elastic": elastic})(images(2))


def test_one_box_in_all_and_values_that_are_not_finite():
    x = torch.zeros(1, 3, 8, 12, dtype=torch.uint8)
    one = {"boxes": torch.tensor([[1.0, 1, 4, 4]]), "scores": torch.tensor([0.9]), "labels": torch.tensor([1])}
    (found,) = gpuaug.tta(lambda v: [one], gpuaug.Augment())(x)
    assert found["boxes"].tolist() == [[1, 1, 4, 4]]
    assert found["scores"].tolist() == pytest.approx([0.9])
    scores = torch.tensor([0.9, float("nan"), 0.5])
    got = fused(one["boxes"].repeat(3, 1), scores, torch.ones(3, dtype=torch.int64), views=1, iou=0.5)
    assert got["scores"].tolist() == pytest.approx([0.7])
    with pytest.raises(ConfigError, match="equally many. Found: 1 boxes, 2 scores, 1 labels"):
        gpuaug.tta(lambda v: [{**one, "scores": torch.ones(2)}], gpuaug.Augment())(x)


@pytest.mark.parametrize(
    "ops",
    [
        {"affine": K.RandomAffine((20.0, 20.0), scale=(0.5, 0.5), p=1.0)},
        {"perspective": K.RandomPerspective(0.6, p=1.0)},
        {"there": K.RandomRotation((45.0, 45.0), p=1.0), "back": K.RandomRotation((-45.0, -45.0), p=1.0)},
    ],
)
def test_padding_of_a_view_does_not_count(ops):
    """What a crop or an earlier operation has left out is black in the view, and no prediction."""
    x = torch.full((2, 3, 60, 84), 200, dtype=torch.uint8)
    view = gpuaug.Augment(crop=gpuaug.ResizeCenterCrop(60, 30), ops=ops)
    got = gpuaug.tta(lambda v: torch.cat([v, v * 0 + 1], 1), {"view": view})(x)
    covered = got[:, 3] > 0.99
    assert 50 < int(covered.sum()) < 2 * 960
    border = F.max_pool2d((~covered).float()[:, None], 3, stride=1, padding=1)[:, 0] > 0
    assert (got[:, :3].transpose(0, 1)[:, covered & ~border] > 0.5).all()


def test_logits_that_are_not_finite_stay_where_they_are():
    x = images(1)
    shifted = gpuaug.Augment(crop=gpuaug.ResizeCenterCrop(40, 20))

    def model(view):
        made = torch.ones(1, 2, *view.shape[2:])
        made[:, 0, 0, 0] = float("nan")
        return made

    assert 1 <= int(gpuaug.tta(model, {"view": shifted})(x)[:, 0].isnan().sum()) <= 4


def test_a_progressive_recipe_is_refused():
    with pytest.raises(ConfigError, match="take the recipe of an epoch"):
        gpuaug.tta(nn.Identity(), gpuaug.Progressive(schedule={0: gpuaug.Augment()}))
