"""The table of objects: moved, clipped and filtered as rules written out for one object at a time say."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaug.batch import OBJECT_COLUMNS, CropWindows, Objects
from gpuaug.targets import geometry
from gpuaug.targets import objects as objects_module
from gpuaug.targets.objects import by_rules, output_keypoints
from gpuaug.targets.rules import Boxes, Keypoints, Masks, Targets

SEEDS = st.integers(0, 2**32 - 1)
FLIP = (0, 2, 1, 4, 3)
H, W = 60, 80  # of images and of the output
MIRROR = np.array([[-1, 0, W], [0, 1, 0], [0, 0, 1.0]])
ALL = Targets(boxes=Boxes(min_size=0, min_area=0), keypoints=Keypoints(pixel_centers=False))


def random_targets(rng: np.random.Generator, counts: list[int], points: int = 5) -> Objects:
    """Objects in and around an image. Labels are the numbers of the objects."""
    n = sum(counts)
    corner = rng.uniform(-30, 90, (n, 2))
    boxes = np.concatenate([corner, corner + rng.uniform(0, 60, (n, 2))], axis=1)
    keypoints = np.concatenate([rng.uniform(-20, 100, (n, points, 2)), rng.integers(0, 3, (n, points, 1))], axis=2)
    return Objects(
        sample=np.repeat(np.arange(len(counts)), counts),
        boxes=boxes.astype(np.float32),
        labels=np.arange(n),
        keypoints=keypoints.astype(np.float32),
        crowd=rng.random(n) < 0.2,
        area=rng.uniform(0, 99, n).astype(np.float32),
        ids=np.arange(n) + 1000,
        sizes=np.tile(np.array([H, W], dtype=np.int32), (len(counts), 1)),
    )


def of(boxes: Any, rules: Targets = ALL, *, keypoints: Any = None, samples: int = 1) -> Objects:
    """Objects of one image after the other, one each if there are several images."""
    n = len(boxes)
    encoded = Objects(
        sample=np.arange(n) if samples > 1 else np.zeros(n, dtype=np.int64),
        boxes=np.array(boxes, dtype=np.float32).reshape(n, 4),
        labels=np.arange(n),
        keypoints=None if keypoints is None else np.array(keypoints, dtype=np.float32),
        crowd=np.zeros(n, dtype=bool),
        area=np.zeros(n, dtype=np.float32),
        ids=np.full(n, -1),
        sizes=np.full((samples, 2), 0, dtype=np.int32),
    )
    return by_rules(encoded, rules)


def carry(
    objects: Objects, *, crop: Any, ops: Any, rules: Targets, windows: CropWindows | None = None, **more: Any
) -> Objects:
    """Without ``windows``, the image covers the whole canvas. ``ops``: a list of canvases, or one."""
    box = np.tile([0, 0, H, W], (len(crop), 1))
    whole = CropWindows(box, box[:, 2:], box[:, :2], (H, W))
    ops = ops if isinstance(ops, list) else [ops]
    part = objects_module.covered_part(windows or whole)
    return objects_module.carry(
        objects, crop=crop, ops=ops, covered=part, size=(H, W), limits=rules.boxes, **{"flip": None, **more}
    )


def moved(objects: Objects, m: Any = None, *, crop: Any = None, rules: Targets = ALL, **more: Any) -> Objects:
    """Carry the objects of one image or of several with the same matrices, on a canvas of H x W."""
    rows = int(objects.sample.max(initial=0)) + 1
    m, crop = (np.eye(3)[None].repeat(rows, 0) if x is None else np.broadcast_to(x, (rows, 3, 3)) for x in (m, crop))
    return carry(objects, crop=crop, ops=m, rules=rules, **{"flip": None, **more})


def random_matrices(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Affine matrices about the middle of the canvas, some with a perspective, some the identity."""
    m = np.eye(3)[None].repeat(rows, axis=0)
    m[:, :2, :2] += rng.uniform(-1, 1, (rows, 2, 2))
    m[:, :2, 2] = rng.uniform(-20, 40, (rows, 2))
    m[:, 2, :2] = rng.uniform(-0.01, 0.01, (rows, 2)) * (rng.random((rows, 1)) < 0.5)
    m[rng.random(rows) < 0.2] = np.eye(3)
    return m


def random_windows(rng: np.random.Generator, rows: int) -> CropWindows:
    start = rng.integers(0, 30, (rows, 2))
    window = np.concatenate([start, rng.integers(10, 30, (rows, 2))], axis=1)
    return CropWindows(window, rng.integers(5, 90, (rows, 2)), rng.integers(-20, 30, (rows, 2)), (H, W))


# -- the reference: one object, rules written out --


def apply(m: np.ndarray, x: float, y: float) -> tuple[float, float] | None:
    x, y, w = m @ [x, y, 1.0]
    return (x / w, y / w) if w > 0 else None


def clip(box: Any, area: Any) -> list[float] | None:
    cut = [max(box[0], area[0]), max(box[1], area[1]), min(box[2], area[2]), min(box[3], area[3])]
    return cut if cut[0] <= cut[2] and cut[1] <= cut[3] else None


def area_of(box: list[float]) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def part(polygon: list[np.ndarray], side: Any) -> list[np.ndarray]:
    """The part of a polygon where ``side @ (x, y, w) >= 0``, in homogeneous coordinates."""
    kept = []
    for before, after in zip(polygon, polygon[1:] + polygon[:1], strict=True):
        d, e = np.dot(side, before), np.dot(side, after)
        kept += [before] if d >= 0 else []
        kept += [before + (after - before) * d / (d - e)] if (d >= 0) != (e >= 0) else []
    return kept


def shoelace(polygon: list[np.ndarray]) -> float:
    xy = np.array([p[:2] / p[2] for p in polygon])
    x, y = (xy - xy[0]).T
    return abs(float(np.sum(x * np.roll(y, -1) - y * np.roll(x, -1)))) / 2


def visible(box: Any, ops: list[np.ndarray]) -> tuple[list[float] | None, float]:
    """The hull of a box after one canvas after the other, and the area of this part on the first canvas."""
    x1, y1, x2, y2 = box
    polygon, total = [np.array([x, y, 1.0]) for x, y in ((x1, y1), (x2, y1), (x2, y2), (x1, y2))], np.eye(3)
    for m in ops:
        polygon, total = [m @ p for p in polygon], m @ total
        for side in ([1, 0, 0], [-1, 0, W], [0, 1, 0], [0, -1, H]):
            polygon = part(polygon, side)
    if not polygon or min(p[2] for p in polygon) <= 0:
        return None, 0.0
    xy = np.array([p[:2] / p[2] for p in polygon])
    first = [np.linalg.solve(total, p) for p in polygon] if len(polygon) > 2 else []
    return [*xy.min(axis=0), *xy.max(axis=0)], shoelace(first) if first else 0.0


def expected_box(
    box: Any, crop: np.ndarray, ops: list[np.ndarray], covered: Any, limits: Boxes, centres: bool
) -> list[float] | None:
    """The box, and the part of it that is visible."""
    ends = [apply(crop, *box[:2]), apply(crop, *box[2:])]
    whole = [*np.min(ends, axis=0), *np.max(ends, axis=0)]
    cut = clip(whole, covered)
    if centres:
        x, y = (whole[0] + whole[2]) / 2, (whole[1] + whole[3]) / 2
        if not (covered[0] < x < covered[2] and covered[1] < y < covered[3]):
            return None
    final, left = visible(cut, ops) if cut else (None, 0.0)
    if final is None or min(final[2] - final[0], final[3] - final[1]) < limits.min_size:
        return None
    share, sides = left / area_of(whole), (final[2] - final[0], final[3] - final[1])
    keep = area_of(final) >= limits.min_area and share >= limits.min_visibility
    keep &= limits.max_aspect is None or max(sides) <= limits.max_aspect * min(sides)
    return [*final, share] if keep else None


def expected_keypoints(points: Any, crop: np.ndarray, ops: list[np.ndarray], covered: Any, flip: Any) -> np.ndarray:
    result = np.zeros_like(points)
    for k, (x, y, v) in enumerate(points):
        place: Any = (x, y)
        for m, (x1, y1, x2, y2) in ((crop, covered), *((m, (0, 0, W, H)) for m in ops)):
            place = place and apply(m, *place)
            place = place if place and x1 <= place[0] < x2 and y1 <= place[1] < y2 else None
        if v > 0 and place:
            result[k] = *place, v
    swap = flip and np.linalg.det(reduce(lambda path, m: m @ path, ops, crop)) < 0
    return result[list(flip)] if swap else result


@pytest.mark.parametrize("with_windows", [False, True])
@pytest.mark.parametrize("centres", [False, True])
@given(seed=SEEDS)
def test_every_object_follows_the_rules_written_out(seed: int, centres: bool, with_windows: bool) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 5, 6).tolist()
    encoded, rows = random_targets(rng, counts), len(counts)
    windows, ops = random_windows(rng, rows), [random_matrices(rng, rows) for _ in range(rng.integers(0, 4))]
    limits = Boxes(
        min_size=float(rng.choice([0, 1, 5])),
        min_area=float(rng.choice([0, 1, 40])),
        min_visibility=float(rng.choice([0, 0.1, 0.7])),
        max_aspect=rng.choice([None, 2.5]),
        crowd=str(rng.choice(["drop", "keep"])),
    )
    rules = Targets(boxes=limits, keypoints=Keypoints(pixel_centers=False))
    crop = geometry.crop(windows) @ geometry.orientation(rng.integers(1, 9, rows), np.tile([H, W], (rows, 1)))
    found = carry(
        by_rules(encoded, rules), crop=crop, ops=ops, rules=rules, flip=FLIP, centres=centres,
        windows=windows if with_windows else None,
    )  # fmt: skip
    expected = []
    for i, sample in enumerate(np.repeat(range(rows), counts)):
        (y, x), (h, w) = windows.offset[sample], windows.resized[sample]
        covered = [max(x, 0), max(y, 0), min(x + w, W), min(y + h, H)] if with_windows else [0, 0, W, H]
        own = [m[sample] for m in ops]
        box = expected_box(encoded.boxes[i].astype(float), crop[sample], own, covered, limits, centres)
        if box and not (encoded.crowd[i] and limits.crowd == "drop"):
            points = expected_keypoints(encoded.keypoints[i].astype(float), crop[sample], own, covered, FLIP)
            expected.append((i, sample, box, points))
    assert found.labels.tolist() == [i for i, *_ in expected]
    assert found.sample.tolist() == [sample for _, sample, *_ in expected]
    np.testing.assert_array_equal(found.ids, found.labels + 1000)
    np.testing.assert_array_equal(found.area, encoded.area[found.labels])
    np.testing.assert_array_equal(found.crowd, encoded.crowd[found.labels])
    boxes, points = (np.array([e[k] for e in expected]) for k in (2, 3))
    boxes = boxes.reshape(-1, 5)
    np.testing.assert_allclose(found.boxes, boxes[:, :4], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.visible, boxes[:, 4], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.keypoints, points.reshape(-1, 5, 3), rtol=1e-9, atol=1e-9)


# -- what comes in, what goes out --


def test_coordinates_that_the_run_does_not_ask_for_are_left_out() -> None:
    encoded = random_targets(np.random.default_rng(0), [2, 3])
    only_boxes = by_rules(encoded, Targets(boxes=Boxes(crowd="keep")))
    assert (only_boxes.keypoints, only_boxes.boxes.dtype, len(only_boxes)) == (None, np.float64, 5)
    only_points = by_rules(encoded, Targets(keypoints=Keypoints()))
    assert (only_points.boxes, only_points.keypoints.dtype) == (None, np.float64)
    neither = by_rules(encoded, Targets(masks=Masks()))
    assert (neither.boxes, neither.keypoints) == (None, None)
    no_points = by_rules(replace(encoded, keypoints=None, boxes=None), ALL)
    assert (no_points.boxes, no_points.keypoints) == (None, None)


def test_without_rules_of_boxes_crowds_are_dropped() -> None:
    encoded = replace(random_targets(np.random.default_rng(0), [2]), crowd=np.array([True, False]))
    assert by_rules(encoded, Targets(keypoints=Keypoints())).labels.tolist() == [1]


@pytest.mark.parametrize(("pixel_centers", "inside"), [(True, 3.5), (False, 3.0)])
def test_pixel_indices_become_edges_and_indices_again(pixel_centers: bool, inside: float) -> None:
    rules = Targets(keypoints=Keypoints(pixel_centers=pixel_centers))
    objects = of([[0, 0, 9, 9]], rules, keypoints=[[[3, 3, 2], [7, 7, 0], [np.nan, 5, 0]]])
    assert objects.keypoints.tolist() == [[[inside, inside, 2], [0, 0, 0], [0, 0, 0]]]
    shown = output_keypoints(objects, rules)
    assert shown.dtype == np.float32
    assert shown.tolist() == [[[3, 3, 2], [0, 0, 0], [0, 0, 0]]]
    assert output_keypoints(of([[0, 0, 9, 9]]), rules) is None


@pytest.mark.parametrize("counts", [[], [0], [0, 0, 0]])
def test_no_object_keeps_shapes_and_types(counts: list[int]) -> None:
    encoded = random_targets(np.random.default_rng(0), counts)
    objects = by_rules(encoded, ALL)
    rows, eye = len(counts), np.eye(3)[None].repeat(len(counts), axis=0)
    for empty in (objects, carry(objects, crop=eye, ops=eye, rules=ALL, flip=FLIP, centres=True)):
        columns = [column for name in OBJECT_COLUMNS if (column := getattr(empty, name)) is not None]
        assert [column.dtype for column in columns[:7]] == [
            np.int64, np.float64, np.int64, np.float64, np.bool_, np.float32, np.int64,
        ]  # fmt: skip
        assert (empty.boxes.shape, empty.keypoints.shape) == ((0, 4), (0, 5, 3))
        assert empty.counts.tolist() == counts
        assert len(empty.rows(np.arange(rows))) == 0


# -- one table --


@given(seed=SEEDS)
def test_an_image_does_not_depend_on_the_others(seed: int) -> None:
    """To the last bit, in any batch."""
    rng = np.random.default_rng(seed)
    counts, rules = rng.integers(0, 9, 8), Targets(boxes=Boxes(min_visibility=0.2), keypoints=Keypoints())
    objects = by_rules(random_targets(rng, counts.tolist()), rules)
    crop, ops = geometry.crop(random_windows(rng, 8)), [random_matrices(rng, 8) for _ in range(3)]
    together = carry(objects, crop=crop, ops=ops, rules=rules, flip=FLIP)
    for row in range(8):
        one = np.array([row])
        alone = carry(objects.rows(one), crop=crop[one], ops=[m[one] for m in ops], rules=rules, flip=FLIP)
        for name in OBJECT_COLUMNS:
            np.testing.assert_array_equal(getattr(alone, name), getattr(together.rows(one), name))


# -- moving --


def test_keypoints_are_never_moved_to_the_border() -> None:
    points = [[[0, 0, 2], [79.5, 59.5, 1], [80, 5, 2], [5, 60, 2], [-0.1, 5, 1]]]
    found = moved(of([[0, 0, 80, 60]], keypoints=points))
    assert found.keypoints.tolist() == [[[0, 0, 2], [79.5, 59.5, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]]]


def test_objects_without_boxes_are_all_kept() -> None:
    objects = replace(of([[0, 0, 1, 1]] * 2, keypoints=[[[500, 5, 2]], [[5, 5, 2]]]), boxes=None)
    found = moved(objects, rules=Targets(keypoints=Keypoints()))
    assert found.keypoints.tolist() == [[[0, 0, 0]], [[5, 5, 2]]]


def test_a_box_that_ends_just_outside_is_dropped_although_there_are_no_limits() -> None:
    """Not kept with x1 > x2 for being near enough to the smallest size."""
    beside = np.array([[1, 0, W + 1e-10], [0, 1, 0], [0, 0, 1]])
    assert len(moved(of([[0, 0, 5, 5]]), beside)) == 0


def test_boxes_move_without_rules_of_boxes() -> None:
    objects = of([[0, 0, 5, 5], [100, 0, 105, 5]], keypoints=[[[1, 1, 2]]] * 2)
    found = moved(objects, MIRROR, rules=Targets(keypoints=Keypoints()))
    assert found.boxes.tolist() == [[75, 0, 80, 5]]


def test_an_object_behind_the_viewer_is_dropped() -> None:
    m = np.array([[1, 0, 0], [0, 1, 0], [-0.02, 0, 1]])  # w' <= 0 right of x = 50
    objects = of([[5, 5, 10, 10], [40, 5, 60, 10], [60, 5, 70, 10]], keypoints=[[[8, 8, 2], [60, 8, 2]]] * 3)
    found = moved(objects, m)
    assert found.labels.tolist() == [0]
    assert found.keypoints[0, :, 2].tolist() == [2, 0]


# -- filters --


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"min_size": 2}, [0, 2, 3]),
        ({"min_area": 20}, [0, 1]),
        ({"min_area": 20.1}, [0]),
        ({"max_aspect": 20}, [0, 1, 2, 3, 4]),
        ({"max_aspect": 19.9}, [0, 2, 3, 4]),
        ({"min_visibility": 0.5}, [0, 1, 2, 4]),
        ({"min_visibility": 0.51}, [0, 1, 4]),
        ({"min_visibility": 1}, [0, 1, 4]),
    ],
)
def test_limits(limits: dict[str, float], kept: list[int]) -> None:
    boxes = [
        [0, 0, 30, 30],
        [10, 10, 30, 11],  # thin
        [78, 0, 82, 4],  # half of it inside
        [78, 20, 98, 24],  # a tenth of it
        [5, 5, 5, 5],  # no area
        [80.5, 0, 90, 10],  # outside
        [-20, -20, -5, -5],
    ]
    rules = Targets(boxes=Boxes(**{"min_size": 0, "min_area": 0, **limits}))
    found = moved(of(boxes, rules), rules=rules)
    assert found.labels.tolist() == kept


def test_limits_hold_in_pixels_of_the_output() -> None:
    third = np.diag([1 / 3, 1 / 3, 1])
    found = moved(of([[1, 1, 4, 4], [1, 1, 3.9, 4]], Targets(boxes=Boxes())), crop=third, rules=Targets(boxes=Boxes()))
    assert found.labels.tolist() == [0]  # exactly one pixel, in spite of rounding


def test_centres_on_the_border_of_the_crop_are_outside() -> None:
    window = CropWindows(np.array([[7, 13, 30, 41]]), np.array([[H, W]]), np.array([[0, 0]]), (H, W))
    at = [[13, 20], [13.25, 20], [54, 20], [53.75, 20], [20, 7], [20, 7.25], [20, 37], [20, 36.75]]
    boxes = [[x - 2, y - 2, x + 2, y + 2] for x, y in at]
    found = moved(of(boxes), crop=geometry.crop(window), windows=window, centres=True)
    assert found.labels.tolist() == [1, 3, 5, 7]
    assert len(moved(of(boxes), crop=geometry.crop(window), windows=window)) == 8


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_values_without_a_place_are_dropped_without_a_warning(value: float, recwarn: pytest.WarningsRecorder) -> None:
    keypoints = [[[value, value, 2], [1, 1, 2]]] * 2
    m = np.array([[1, 0.1, 0], [0.1, 1, 0], [0, 0, 1]])
    rules = Targets(boxes=Boxes(min_visibility=0.01), keypoints=Keypoints())
    found = moved(of([[value, 0, value, 5], [0, 0, 5, 5]], rules, keypoints=keypoints), m, rules=rules, flip=(1, 0))
    assert found.labels.tolist() == [1]
    assert found.keypoints[0, :, 2].tolist() == [0, 2]
    assert not recwarn
