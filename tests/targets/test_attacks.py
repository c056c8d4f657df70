"""Targets of an attacker or a careless user: each gives an error of gpuaug with the value, or a fault of its row."""

import numpy as np
import pytest
import torch
from pictures import png

import gpuaug
from gpuaug.errors import ConfigError, DataError

IMAGES = torch.zeros(2, 3, 40, 60, dtype=torch.uint8)
RECIPE = gpuaug.Augment(crop=gpuaug.Resize((32, 32)), normalize=None)
MASKS = torch.full((2, 40, 60), 7)


class Listed(list):
    """A list that takes attributes."""


def first(samples, targets, **settings):
    loader = gpuaug.Loader(samples, augment=RECIPE, targets=targets, num_workers=0, device="cpu", **settings)
    return next(iter(loader)).targets


def only_masks(**settings) -> gpuaug.Targets:
    return gpuaug.Targets(masks=gpuaug.Masks(**settings))


@pytest.mark.parametrize(("table", "value"), [("cityscapes", 0), ([9] * 20, 9), ({7: 5}, 5), ({8: 5}, 255), (None, 7)])
def test_masks_of_a_call_are_mapped(table, value) -> None:
    _, targets = RECIPE(IMAGES, masks=MASKS, targets=only_masks(map=table))
    assert targets.masks.unique().tolist() == [value]


def test_masks_of_a_call_may_be_arrays_or_lists() -> None:
    for masks in (MASKS, MASKS.numpy(), list(MASKS), MASKS.to(torch.uint8)):
        assert RECIPE(IMAGES, masks=masks)[1].masks.unique().tolist() == [7]


BOX = [[1.0, 2, 30, 40]]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"masks": MASKS - 8}, "-1"),
        ({"masks": MASKS.float()}, "float32"),
        ({"masks": MASKS[0, 0, 0]}, "7"),
        ({"masks": MASKS.to("meta")}, "meta"),
        ({"masks": MASKS, "targets": "segmentation"}, "segmentation"),
        ({"targets": only_masks()}, "none"),
        ({"boxes": 5}, "5"),
        ({"boxes": [[[1, 2, 3, 4], [1]], []]}, "inhomogeneous"),
        ({"boxes": [BOX, BOX], "labels": torch.zeros(3, 1)}, "tensor"),
        ({"boxes": [BOX, BOX], "labels": [np.array([2**64 - 1], dtype=np.uint64), [0]]}, str(2**64 - 1)),
        ({"keypoints": np.ones((2, 1, 3, 3)), "targets": gpuaug.Targets(keypoints=gpuaug.Keypoints(flip=[1, 0]))}, "2"),
    ],
)
def test_what_a_call_cannot_use_is_named(given, found) -> None:
    with pytest.raises(ConfigError) as error:
        RECIPE(IMAGES, **given)
    assert found in str(error.value)


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ({"boxes": [[1, 2, 3, 4], [1, 2]], "labels": [0, 1]}, r"entries of boxes .* same length. Found: .*\[1, 2\]\]"),
        ({"boxes": BOX, "labels": [1.0]}, r"labels must be whole numbers of shape \[n\]. Found: float64"),
        ({"boxes": BOX[0], "labels": [1]}, r"boxes must be numbers of shape \[n, 4\]. Found: float64 \[4\]"),
    ],
)
def test_what_a_sample_of_a_user_has_wrong_is_named(target, text) -> None:
    with pytest.raises(DataError, match=text):
        first([(png(np.zeros((40, 60, 3), dtype=np.uint8)), target)], gpuaug.Targets(boxes=gpuaug.Boxes()))


def test_a_crop_that_needs_boxes_says_so() -> None:
    recipe = gpuaug.Augment(crop=gpuaug.RandomIoUCrop(32), normalize=None)
    with pytest.raises(ConfigError, match="needs boxes. Found: masks"):
        recipe(IMAGES, masks=MASKS)


def test_boxes_that_need_gradients() -> None:
    assert len(RECIPE(IMAGES, boxes=torch.tensor([BOX, BOX], requires_grad=True))[1].boxes) == 2


def test_values_above_255_do_not_wrap() -> None:
    samples = [(png(np.zeros((4, 4, 3), np.uint8)), {"mask": png(np.full((4, 4), v, np.uint16))}) for v in (3, 300)]
    assert first(samples, only_masks(), shuffle=False).masks.amax(dim=(1, 2)).tolist() == [3, 300]


def test_a_source_with_other_keypoints_than_flip() -> None:
    samples = Listed([(png(np.zeros((4, 4, 3), np.uint8)), {"keypoints": np.ones((1, 3, 3))})])
    rules = gpuaug.Targets(keypoints=gpuaug.Keypoints(flip=[1, 0]))
    with pytest.raises(ConfigError, match="3 keypoints"):
        first(samples, rules)
    samples.num_keypoints = 3
    with pytest.raises(ConfigError, match="3 keypoints of the source"):
        gpuaug.Loader(samples, augment=RECIPE, targets=rules, num_workers=0, device="cpu")


def test_pixels_that_claim_to_be_fractions() -> None:
    samples = [(png(np.zeros((40, 60, 3), np.uint8)), {"boxes": BOX, "size": (1, 1)})]
    with pytest.raises(DataError, match="1 \\(width\\) x 1 pixels, but the image has 60 \\(width\\) x 40"):
        first(samples, gpuaug.Targets(boxes=gpuaug.Boxes()))


def test_a_folder_of_classes_has_no_targets(tmp_path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/0.png").write_bytes(png(np.zeros((4, 4, 3), np.uint8)))
    with pytest.raises(ConfigError, match="Found: FolderSource with no targets. Set `targets=none`"):
        gpuaug.Loader(gpuaug.FolderSource(tmp_path), augment=RECIPE, targets=only_masks())
