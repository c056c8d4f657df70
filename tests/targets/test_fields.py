"""Boxes, keypoints and masks through fields, against images whose pixels say which position they show."""

from __future__ import annotations

from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from torch.nn.functional import grid_sample

import gpuaug
from gpuaug.targets import fields
from gpuaug.targets.fields import RESIDUAL

SIZE, COUNT = (96, 128), 12
BOXES, KEYPOINTS = gpuaug.Boxes(min_size=0, min_area=0), gpuaug.Keypoints(pixel_centers=False)
RULES = gpuaug.Targets(boxes=BOXES, keypoints=KEYPOINTS)


def fisheye(low: float, high: float) -> K.RandomFisheye:
    return K.RandomFisheye(*torch.tensor([[-0.3, 0.3], [-0.3, 0.3], [low, high]]), p=0.9)


MODERATE = {
    "elastic": lambda: K.RandomElasticTransform((31, 31), (9.0, 9.0), (0.5, 0.5), p=0.9),
    "elastic corners": lambda: K.RandomElasticTransform((31, 21), (9.0, 7.0), (0.4, 0.6), align_corners=True, p=0.9),
    "elastic reflected": lambda: K.RandomElasticTransform((31, 31), (9.0, 9.0), padding_mode="reflection", p=0.9),
    "spline": lambda: K.RandomThinPlateSpline(0.2, p=0.9),
    "spline corners": lambda: K.RandomThinPlateSpline(0.1, align_corners=True, p=0.9),
    "fisheye": lambda: fisheye(0.9, 1.1),
    "jigsaw": lambda: K.RandomJigsaw((3, 4), p=0.9),
}
STRONG = {
    "elastic": lambda: K.RandomElasticTransform((31, 31), (5.0, 5.0), (2.0, 2.0), p=0.9),
    "rough": lambda: K.RandomElasticTransform((9, 9), (2.0, 2.0), (1.0, 1.0), p=0.9),
    "spline": lambda: K.RandomThinPlateSpline(0.8, p=0.9),
    "fisheye": lambda: fisheye(0.2, 3.0),
    "jigsaw": lambda: K.RandomJigsaw((96, 128), p=0.9),  # each pixel moves alone
}
EACH = [(MODERATE, name) for name in MODERATE] + [(STRONG, name) for name in STRONG]


def positions(count: int = COUNT) -> torch.Tensor:
    """Images in 0..1 whose pixels are x / W and y / H of their centres, and 1."""
    y, x = np.mgrid[: SIZE[0], : SIZE[1]] + 0.5
    image = np.stack([x / SIZE[1], y / SIZE[0], np.ones(SIZE)]).astype(np.float32)
    return torch.from_numpy(image).expand(count, -1, -1, -1)


def given(seed: int = 0) -> dict[str, Any]:
    """Rectangles and points anywhere; the first rectangle is the image."""
    rng = np.random.default_rng(seed)
    corners = np.sort(rng.uniform(0, 1, (COUNT, 6, 2, 2)), axis=2) * SIZE[::-1]
    corners[:, 0] = [[0, 0], SIZE[::-1]]
    points = np.concatenate([rng.uniform(0, 1, (COUNT, 6, 9, 2)) * SIZE[::-1], np.full((COUNT, 6, 9, 1), 2.0)], axis=3)
    return {"boxes": corners.reshape(COUNT, 6, 4), "labels": [np.arange(6)] * COUNT, "keypoints": points}


def run(ops: dict[str, Any], what: dict[str, Any], seed: int = 0, backend: str = "fused") -> tuple[Any, Any, Any]:
    """Input positions that the output's pixels show, [B, H, W, 2]; whether they show nothing else; the targets."""
    recipe = gpuaug.Augment(ops=ops, backend=backend)
    images, targets = recipe(positions(), **what, targets=RULES, seed=seed, indices=range(COUNT))
    shown = images[:, :2].permute(0, 2, 3, 1).double().numpy() * SIZE[::-1]
    return shown, images[:, 2].numpy() > 1 - 1e-4, targets


def check_points(shown: Any, valid: Any, targets: Any, what: dict[str, Any], *, whole: bool, pieces: bool) -> int:
    """A visible point is where the image shows it, and a point that the image shows is visible."""
    found, compared = targets.keypoints.double().numpy(), 0
    for points, label, row in zip(found, targets.labels.tolist(), targets.sample.tolist(), strict=True):
        for (x, y, visible), place in zip(points, what["keypoints"][row][label][:, :2], strict=True):
            near = np.hypot(*(shown[row] - place).transpose(2, 0, 1))[valid[row]].min(initial=np.inf)
            if not visible:
                assert not whole or near > 0.2
                continue
            column, line = int(x), int(y)
            around = valid[row][max(line - 1, 0) : line + 2, max(column - 1, 0) : column + 2]
            if min(x, y, SIZE[1] - x, SIZE[0] - y) < 0.5 or not around.all():
                continue
            if min(*place, *(SIZE[::-1] - place)) < 2:  # pixels that are mixed with reflected ones
                continue
            if pieces:
                there = shown[row, line, column] + (x - column - 0.5, y - line - 0.5)
                assert np.hypot(*(there - place)) < 1e-3
                compared += 1
                continue
            at = torch.tensor([[[[2 * x / SIZE[1] - 1, 2 * y / SIZE[0] - 1]]]])
            pixels = torch.from_numpy(shown[row]).permute(2, 0, 1)[None]
            there = grid_sample(pixels, at, align_corners=False)[0, :, 0, 0].numpy()
            assert np.hypot(*(there - place)) < RESIDUAL + 0.01
            compared += 1
    return compared


def check_boxes(shown: Any, valid: Any, targets: Any, what: dict[str, Any], *, outer: float) -> None:
    """A box has all pixels that show something of it, and reaches beyond their centres by at most ``outer``."""
    found = {
        (row, label): k
        for k, (row, label) in enumerate(zip(targets.sample.tolist(), targets.labels.tolist(), strict=True))
    }
    for row in range(COUNT):
        for label, (x1, y1, x2, y2) in enumerate(what["boxes"][row]):
            x, y = shown[row].transpose(2, 0, 1)
            inside = valid[row] & (x > x1 + 0.02) & (x < x2 - 0.02) & (y > y1 + 0.02) & (y < y2 - 0.02)
            if not inside.any():
                continue
            rows, columns = np.nonzero(inside)
            hull = np.array([columns.min(), rows.min(), columns.max(), rows.max()]) + 0.5
            box = targets.boxes[found[row, label]].double().numpy()
            assert (box[:2] <= hull[:2] + 1e-2).all()
            assert (box[2:] >= hull[2:] - 1e-2).all()
            if min(x2 - x1, y2 - y1) > 8:
                assert np.abs(box - hull).max() < outer, (row, label, box, hull)


@pytest.mark.parametrize("backend", ["fused", "kornia"])
@pytest.mark.parametrize("name", MODERATE)
def test_targets_follow_a_moderate_field(name: str, backend: str) -> None:
    what = given()
    shown, valid, targets = run({"op": MODERATE[name]()}, what, backend=backend)
    assert check_points(shown, valid, targets, what, whole=True, pieces=name == "jigsaw") > 300
    check_boxes(shown, valid, targets, what, outer=1.5)


@pytest.mark.parametrize("name", STRONG)
def test_targets_follow_a_strong_field(name: str) -> None:
    what = given()
    shown, valid, targets = run({"op": STRONG[name]()}, what)
    kind = {"whole": name not in ("rough", "elastic"), "pieces": name == "jigsaw"}
    assert check_points(shown, valid, targets, what, **kind) > 60
    check_boxes(shown, valid, targets, what, outer=np.inf)


def test_covered_is_the_part_that_shows_the_image_without_the_fields() -> None:
    ops = {"field": MODERATE["elastic"](), "turn": K.RandomAffine(30.0, (0.3, 0.3), p=0.7)}
    shown, _, targets = run(ops, given())
    inside = (shown > 0.5).all(axis=3)
    for row, (top, left, bottom, right) in enumerate(targets.covered.tolist()):
        lines, columns = np.nonzero(inside[row])
        hull = lines.min(), columns.min(), lines.max() + 1, columns.max() + 1
        assert np.abs(np.subtract((top, left, bottom, right), hull)).max() <= 4  # the field moves the borders
    assert targets.matrices.isnan().any(dim=(1, 2)).sum() > COUNT // 2


def test_a_sliver_of_a_piece_does_not_enlarge_a_box() -> None:
    """Two of four pieces are exchanged, then a shift leaves 0.02 pixels of what one of them shows of a box."""
    y, x = np.indices((16, 16)) + 0.5
    exchanged = 8 * ((x < 8) & (y < 8)) - 8 * ((x > 8) & (y > 8))
    shift = np.eye(3)
    shift[:2, 2] = 1.98
    shown = np.stack([x + exchanged, y + exchanged], axis=-1)[None].astype(np.float32)
    steps = [np.eye(3)[None], fields.Field(np.array([0]), lambda: shown, pieces=(8, 8)), shift[None]]
    hulls, area = fields.visible(steps, np.array([[6.0, 6, 10, 10]]), np.array([0]), (16, 16))
    np.testing.assert_allclose(hulls, [[1.98, 1.98, 11.98, 11.98]], atol=0.6)
    assert area == pytest.approx(12, abs=0.01)  # of 16


def test_boxes_of_a_sample_do_not_depend_on_its_batch() -> None:
    recipe = gpuaug.Augment(ops={"field": MODERATE["spline"](), "turn": K.RandomAffine(20.0)})
    what = given()
    _, together = recipe(positions(), **what, targets=RULES, seed=1, indices=range(COUNT))
    for row in range(COUNT):
        own = {name: each[row : row + 1] for name, each in what.items()}
        _, alone = recipe(positions(1), **own, targets=RULES, seed=1, indices=[row])
        assert torch.equal(alone.boxes, together.boxes[together.sample == row])
        assert torch.equal(alone.keypoints, together.keypoints[together.sample == row])


@pytest.mark.parametrize("count", [0, 1])
def test_samples_may_have_no_objects(count: int) -> None:
    boxes = [torch.rand(count, 4).sort().values * 90] * 2
    recipe = gpuaug.Augment(ops={"field": MODERATE["elastic"]()})
    _, targets = recipe(positions(2), boxes=boxes, targets=gpuaug.Targets(boxes=BOXES), indices=[0, 1])
    assert len(targets.boxes) <= 2 * count


def test_what_needs_matrices_refuses_fields() -> None:
    recipe = gpuaug.Augment(ops={"field": MODERATE["elastic"]()})
    with pytest.raises(gpuaug.ConfigError, match="`ops.field` must .* no matrix .* Found: RandomElastic"):
        gpuaug.tta(lambda images: images, recipe)
    _, targets = recipe(positions(), boxes=given()["boxes"], targets=gpuaug.Targets(boxes=BOXES), indices=range(COUNT))
    with pytest.raises(gpuaug.ConfigError, match="`restore` needs outputs that only matrices have moved"):
        targets.restore(boxes=targets.boxes)
