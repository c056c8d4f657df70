"""Where operations move pixels: the matrices of a recipe against Kornia's own matrices and against its pixels."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kornia.constants import Resample
from test_parameters import OPS
from torch import Tensor, nn

import gpuaug
from gpuaug.augment.fused.backend import FusedBackend
from gpuaug.augment.moves import FieldMove, Float64, check_carried, moves
from gpuaug.augment.parameters import Chosen, Prepared, tensors
from gpuaug.augment.policy import OneOf, SomeOf, prepare_all
from gpuaug.augment.reference import ReferenceBackend

BACKENDS = {"kornia": ReferenceBackend, "fused": FusedBackend}
WITHOUT_FUSED_FORM: dict[str, Callable[..., Any]] = {
    "affine nearest": lambda **k: K.RandomAffine(30.0, (0.1, 0.2), resample="nearest", **k),
    "affine filled": lambda **k: K.RandomAffine(30.0, shear=9.0, padding_mode="fill", fill_value=0.3, **k),
    "rotation nearest": lambda **k: K.RandomRotation(45.0, resample="nearest", **k),
    "shear filled": lambda **k: K.RandomShear(10.0, padding_mode="fill", **k),
    "perspective nearest": lambda **k: K.RandomPerspective(0.4, resample="nearest", **k),
}
KNOWN = OPS | WITHOUT_FUSED_FORM
FIELDS = {"elastic", "spline", "fisheye", "jigsaw"}  # not moved by a matrix


def drawn(ops: dict[str, Any], batch: int, size: tuple[int, int], seed: int = 0) -> tuple[list[Prepared], list[Chosen]]:
    prepared, random = list(prepare_all(ops, path="augment.ops")), np.random.default_rng(seed)
    uniforms = [random.random((batch, p.count), dtype=np.float32) for p in prepared]
    keys = [random.integers(0, 2**32, (batch, 2)) if p.keyed else None for p in prepared]
    return prepared, [p.draw(u, size, k) for p, u, k in zip(prepared, uniforms, keys, strict=True)]


def product(moved: list[Any], batch: int) -> Float64:
    """The product of the matrices of all canvases."""
    assert all(isinstance(move, np.ndarray) and move.dtype == np.float64 for move in moved)
    return reduce(lambda path, move: move @ path, moved, np.broadcast_to(np.eye(3), (batch, 3, 3)))


def taken(prepared: Iterable[Prepared], chosen: Iterable[Chosen], row: int) -> Iterable[tuple[nn.Module, Any]]:
    """The modules that one sample goes through, with its parameters."""
    for op, c in zip(prepared, chosen, strict=True):
        for slot, modules in enumerate(op.slots):
            if (alternative := c.choice[row, slot]) >= 0:
                params = c.params[slot][alternative]
                yield modules[alternative], {k: v[row : row + 1] for k, v in params.items()}


def kornias(prepared: Iterable[Prepared], chosen: Iterable[Chosen], row: int, size: tuple[int, int]) -> Float64:
    """The product of Kornia's matrices for one sample, in pixel edges."""
    half = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])
    product = np.eye(3)
    image = torch.empty((1, 3, *size))
    for module, params in taken(prepared, chosen, row):
        if isinstance(module, K.GeometricAugmentationBase2D):
            values = tensors(params) | {"forward_input_shape": torch.tensor(image.shape)}
            matrix = module.compute_transformation(image, values, module.flags)[0].double().numpy()
            product = half @ matrix @ np.linalg.inv(half) @ product
    return product


# --- matrices

SINGLE = st.sampled_from(sorted(KNOWN.keys() - FIELDS)).flatmap(
    lambda name: st.sampled_from((0.5, 1.0)).map(lambda p: (name, lambda: KNOWN[name](p=p)))
)
MEMBERS = st.lists(SINGLE, min_size=1, max_size=4, unique_by=lambda item: item[0])
CHOICE = MEMBERS.map(lambda items: ("one of", lambda: OneOf(ops={name: make() for name, make in items}, p=0.8)))
SEVERAL = st.tuples(MEMBERS, st.booleans()).map(
    lambda given: (
        "some of",
        lambda: SomeOf((1, len(given[0])), ops={name: make() for name, make in given[0]}, random_order=given[1]),
    )
)


@settings(max_examples=40)
@given(
    items=st.lists(st.one_of(SINGLE, CHOICE, SEVERAL), min_size=1, max_size=4, unique_by=lambda item: item[0]),
    size=st.sampled_from([(33, 47), (64, 40), (224, 224), (2, 5)]),
    seed=st.integers(0, 1000),
)
def test_the_matrix_of_a_recipe_is_the_product_of_kornias(items: Any, size: tuple[int, int], seed: int) -> None:
    prepared, chosen = drawn({name: make() for name, make in items}, 5, size, seed)
    check_carried(prepared, ("masks", "boxes", "keypoints"))
    found = product(moves(prepared, chosen, size), 5)
    expected = np.stack([kornias(prepared, chosen, row, size) for row in range(5)])
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9 * np.abs(expected).max())


def test_operations_that_change_only_values_or_are_not_chosen_move_nothing() -> None:
    ops = {"jitter": K.ColorJitter(0.1, 0.1, 0.1, 0.1), "erase": K.RandomErasing(p=1.0)}
    assert moves(*drawn(ops, 6, (8, 9)), (8, 9)) == []
    assert moves(*drawn({}, 0, (8, 9)), (8, 9)) == []
    assert moves(*drawn({name: KNOWN[name](p=0.0) for name in KNOWN}, 6, (8, 9)), (8, 9)) == []
    never = OneOf(ops={"flip": K.RandomHorizontalFlip(p=1.0)}, p=0.0)
    assert moves(*drawn({"one": never}, 6, (8, 9)), (8, 9)) == []


def test_operations_share_a_matrix_if_no_canvas_in_between_loses_anything() -> None:
    size = (40, 40)
    flip, turn = K.RandomHorizontalFlip(p=1.0), K.RandomRotation90((1, 3), p=1.0)
    warp, smaller = K.RandomAffine(30.0, p=1.0), K.RandomAffine(0.0, None, (0.5, 0.5), p=1.0)
    for count, ops in (
        (1, [flip, turn, K.RandomVerticalFlip(p=1.0)]),
        (1, [flip, warp, turn]),
        (2, [warp, flip, K.RandomPerspective(p=1.0)]),
        (1, [smaller, warp]),
        (2, [warp, smaller]),
        (3, [warp, warp, warp]),
    ):
        named = {f"op{k}": copy.deepcopy(op) for k, op in enumerate(ops)}
        assert len(moves(*drawn(named, 4, size), size)) == count


# --- pixels follow the matrix

SPREAD = 2.5  # pixels, standard deviation of the blob
GEOMETRIC: dict[str, Callable[[bool], Any]] = {
    "hflip": lambda c: K.RandomHorizontalFlip(p=0.7),
    "vflip": lambda c: K.RandomVerticalFlip(p=0.7),
    "affine": lambda c: K.RandomAffine(
        40.0, (0.1, 0.1), (0.7, 1.4), (-9.0, 9.0, -9.0, 9.0), align_corners=c, p=0.8
    ),
    "affine border": lambda c: K.RandomAffine(20.0, scale=(0.7, 1.4), padding_mode="border", align_corners=c, p=0.8),
    "affine nearest": lambda c: K.RandomAffine((20.0, 60.0), resample="nearest", align_corners=c, p=0.8),
    "rotation": lambda c: K.RandomRotation(60.0, align_corners=c, p=0.8),
    "rotation 90": lambda c: K.RandomRotation90((-2, 3), align_corners=c, p=0.8),
    "shear": lambda c: K.RandomShear((-15.0, 15.0, -15.0, 15.0), align_corners=c, p=0.8),
    "translate": lambda c: K.RandomTranslate((-0.15, 0.15), (-0.15, 0.15), align_corners=c, p=0.8),
    "perspective": lambda c: K.RandomPerspective(0.3, align_corners=c, p=0.8),
    "perspective area": lambda c: K.RandomPerspective(
        0.2, sampling_method="area_preserving", align_corners=c, p=0.8
    ),
}  # fmt: skip


def blob(size: tuple[int, int], place: tuple[float, float]) -> Float64:
    """A Gaussian with its centre at (x, y) in pixel edges, float64 [H, W] in 0..1."""
    y, x = np.mgrid[: size[0], : size[1]] + 0.5
    return np.exp(-((x - place[0]) ** 2 + (y - place[1]) ** 2) / (2 * SPREAD**2))


def warped_centroid(matrix: Float64, place: tuple[float, float]) -> tuple[Float64, Float64]:
    """Centroid and standard deviation of the Gaussian after a perspective map, by integration over the source."""
    y, x = (np.mgrid[-40:41, -40:41] / 40 * 4 * SPREAD).reshape(2, -1)
    weight = np.exp(-(x**2 + y**2) / (2 * SPREAD**2))
    u, v, w = matrix @ np.stack([x + place[0], y + place[1], np.ones_like(x)])
    density = weight * np.abs(np.linalg.det(matrix)) / w**3
    points = np.stack([u / w, v / w])
    centroid = (points * density).sum(axis=1) / density.sum()
    return centroid, np.sqrt((((points - centroid[:, None]) ** 2) * density).sum(axis=1) / density.sum())


def check_pixels(
    ops: dict[str, Any], backend: str, size: tuple[int, int], seed: int, *, least: int, tolerance: float = 0.05
) -> None:
    place = (size[1] * 0.55, size[0] * 0.43)
    image = np.rint(255 * blob(size, place)).astype(np.uint8)
    batch = 16
    prepared, chosen = drawn(ops, batch, size, seed)
    matrices = product(moves(prepared, chosen, size), batch)
    images = torch.from_numpy(image)[None, :, :, None].repeat(batch, 1, 1, 3)
    pixels = BACKENDS[backend](prepared)(images, chosen)[:, 0].double().numpy()
    y, x = np.mgrid[: size[0], : size[1]] + 0.5
    compared = 0
    for matrix, made in zip(matrices, pixels, strict=True):
        (cx, cy), spread = warped_centroid(matrix, place)
        margin = 3.7 * spread + 1.5
        if (np.array([cx, cy]) > margin).all() and (np.array([size[1] - cx, size[0] - cy]) > margin).all():
            found = np.array([(x * made).sum(), (y * made).sum()]) / made.sum()
            np.testing.assert_allclose(found, [cx, cy], atol=tolerance)
            compared += 1
    assert compared >= least


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", GEOMETRIC)
def test_the_centroid_of_a_blob_moves_by_the_matrix(name: str, backend: str, align_corners: bool) -> None:
    for seed, size in enumerate([(81, 112), (96, 77)]):
        tolerance = 0.15 if "nearest" in name else 0.05  # about 80 pixels, each moved by up to half a pixel
        ops = {"op": GEOMETRIC[name](align_corners)}
        check_pixels(ops, backend, size, seed, least=12, tolerance=tolerance)


# --- fields

ELASTIC = {
    "plain": lambda: K.RandomElasticTransform((9, 9), (4.0, 4.0), (2.0, 2.0), p=1.0),
    "uneven": lambda: K.RandomElasticTransform((7, 11), (3.0, 5.0), (3.0, 1.0), align_corners=True, p=1.0),
    "some": lambda: K.RandomElasticTransform((9, 9), (4.0, 4.0), (2.0, 2.0), p=0.5),
}


def labels(batch: int, size: tuple[int, int], count: int = 6, seed: int = 0) -> Tensor:
    """int64 [B, H, W] of blocks with labels 1 to ``count``."""
    coarse = np.random.default_rng(seed).integers(1, count + 1, (batch, 8, 8))
    rows, columns = (np.arange(n) * 8 // n for n in size)
    return torch.from_numpy(coarse[:, rows][:, :, columns])


def only_field(prepared: list[Prepared], chosen: list[Chosen], size: tuple[int, int]) -> FieldMove:
    (field,) = moves(prepared, chosen, size)
    assert isinstance(field, FieldMove)
    return field


NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", [1, 2, 7])
@pytest.mark.parametrize("name", ELASTIC)
def test_an_elastic_mask_moves_as_its_image(name: str, batch: int, backend: str, device: str) -> None:
    size, masks = (41, 56), labels(batch, (41, 56), 200).to(device)
    op = ELASTIC[name]()
    op.flags["resample"] = Resample.NEAREST
    prepared, chosen = drawn({"elastic": op}, batch, size, seed=1)
    images = masks.to(torch.uint8)[..., None].repeat(1, 1, 1, 3)
    pixels = BACKENDS[backend](prepared)(images, chosen)[:, 0].mul(255).round().long()
    assert torch.equal(only_field(prepared, chosen, size).apply(masks, 0), pixels)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_labels_stay_exact_and_masks_are_not_modified(dtype: torch.dtype) -> None:
    size, top = (40, 40), 255 if dtype == torch.uint8 else 2**24
    random = np.random.default_rng(0)
    values = torch.from_numpy(random.choice([0, 1, 7, top - 1, top], (5, *size))).to(dtype)
    prepared, chosen = drawn({"elastic": ELASTIC["some"]()}, 5, size)
    field, before = only_field(prepared, chosen, size), values.clone()
    for fill in (0, 13, top):
        found = field.apply(values, fill)
        assert found.dtype == dtype
        assert set(found.unique().tolist()) <= {0, 1, 7, top - 1, top, fill}
        others = np.setdiff1d(np.arange(5), field.rows)
        assert 0 < len(others) < 5
        assert torch.equal(found[others], values[others])
        assert torch.equal(values, before)


def test_a_field_stands_between_the_matrices_before_and_after_it() -> None:
    size = (30, 42)
    ops = {
        "flip": K.RandomHorizontalFlip(p=1.0),
        "gray": K.RandomGrayscale(p=1.0),
        "elastic": ELASTIC["plain"](),
        "jitter": K.ColorJitter(0.1, 0.1, 0.1, 0.1),
        "rotation": K.RandomRotation(30.0, p=1.0),
        "shear": K.RandomShear(9.0, p=1.0),
    }
    prepared, chosen = drawn(ops, 3, size)
    before, field, *after = moves(prepared, chosen, size)
    assert isinstance(field, FieldMove)
    np.testing.assert_array_equal(before, moves(prepared[:2], chosen[:2], size)[0])
    np.testing.assert_array_equal(after, moves(prepared[3:], chosen[3:], size))
    np.testing.assert_array_equal(field.keys, chosen[2].keys)


def test_alternatives_of_one_slot_may_be_a_matrix_a_field_or_neither() -> None:
    size, batch = (30, 42), 40
    members = {
        "elastic": ELASTIC["plain"](),
        "flip": K.RandomHorizontalFlip(p=1.0),
        "noise": K.RandomGaussianNoise(p=1.0),
        "turn": K.RandomRotation(45.0, p=1.0),
    }
    prepared, chosen = drawn({"one": OneOf(ops=members, p=0.8)}, batch, size)
    found = moves(prepared, chosen, size)
    (field,) = (move for move in found if isinstance(move, FieldMove))
    matrices = [move for move in found if move is not field]
    np.testing.assert_array_equal(field.rows, np.flatnonzero(chosen[0].choice[:, 0] == 0))
    for matrix in matrices:
        np.testing.assert_array_equal(matrix[field.rows], np.broadcast_to(np.eye(3), (len(field.rows), 3, 3)))
    expected = np.stack([kornias(prepared, chosen, row, size) for row in range(batch)])
    np.testing.assert_allclose(product(matrices, batch), expected, rtol=1e-6, atol=1e-6)


# --- what targets can follow


class Users(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class UsersPixels(Users):
    affects = "pixels"


BOXES = ("masks", "boxes")


def test_targets_follow_every_known_operation_and_what_changes_only_values() -> None:
    for name in sorted(KNOWN):
        check_carried(prepare_all({name: KNOWN[name]()}, path="augment.ops"), ("masks", "boxes", "keypoints"))
    for op in (UsersPixels(), K.RandomMotionBlur(3, 9.0, 0.5), K.RandomSaltAndPepperNoise(), K.RandomErasing()):
        prepared = prepare_all({"op": op}, path="augment.ops")
        check_carried(prepared, ("masks", "boxes", "keypoints"))
        assert moves(prepared, [p.draw(np.zeros((2, p.count), np.float32), (9, 9)) for p in prepared], (9, 9)) == []


@pytest.mark.parametrize(
    ("op", "names", "facts"),
    [
        (Users(), ("masks",), ("Users", "masks have", 'affects = "pixels"')),
        (type("Flip", (K.RandomHorizontalFlip,), {})(), BOXES, ("Flip", "affects")),
        (type("Gray", (K.RandomGrayscale,), {})(), BOXES, ("Gray", "affects")),
        (type("Bend", (K.RandomElasticTransform,), {})(), BOXES, ("Bend", "masks and boxes have", "Remove")),
        (K.RandomElasticTransform(), ("matrices",), ("RandomElasticTransform", "no matrix describes", "Remove")),
    ],
)
def test_what_targets_cannot_follow_is_refused(op: nn.Module, names: tuple[str, ...], facts: tuple[str, ...]) -> None:
    prepared = prepare_all({"flip": K.RandomHorizontalFlip(), "op": op}, path="augment.ops")
    check_carried(prepared, ())
    with pytest.raises(gpuaug.ConfigError, match=re.escape("`views.a.ops.op`")) as caught:
        check_carried(prepared, names, path="views.a.ops")
    for fact in facts:
        assert fact in str(caught.value)


def test_the_message_names_a_member_of_one_of_by_its_full_key() -> None:
    inner = OneOf(ops={"flip": K.RandomHorizontalFlip(), "bend": K.RandomElasticTransform()})
    ops = {"one": OneOf(ops={"auto": gpuaug.RandAugment(), "inner": inner})}
    prepared = prepare_all(ops, path="augment.ops")
    with pytest.raises(gpuaug.ConfigError, match=re.escape("`augment.ops.one.ops.inner.ops.bend`")):
        check_carried(prepared, ("matrices",))
