"""Views that use each other's random numbers or crop windows, and the positions of views in the image."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import gpuaug
from gpuaug.errors import ConfigError


def view(size: int = 32, copies: int = 1, scale: tuple[float, float] = (0.2, 0.8), **ops: Any) -> gpuaug.Augment:
    return gpuaug.Augment(crop=gpuaug.RandomResizedCrop(size, scale=scale), ops=ops, copies=copies)


def flip() -> Any:
    return K.RandomHorizontalFlip(p=0.5)


def jitter() -> Any:
    return K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8)


def images(count: int = 6, sides: tuple[int, int] = (70, 90)) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (count, 3, *sides), dtype=np.uint8))


def windows(recipe: Any, count: int = 6, sides: tuple[int, int] = (70, 90)) -> list[np.ndarray]:
    drawn = recipe.draw(seed=1, epoch=0, indices=np.arange(count))
    return [each.window for each in recipe.windows(drawn, *np.full((count, 2), sides).T)]


def test_a_view_like_another_shows_the_same_part_of_the_image_with_the_same_flip() -> None:
    views = {"a": view(flip=flip(), jitter=jitter()), "b": view(64, flip=flip()), "c": view(flip=flip())}
    recipe = gpuaug.MultiView(views=views, like={"b": "a", "c": "a"})
    first, second, third = windows(recipe)
    assert np.array_equal(first, second)
    assert np.array_equal(first, third)
    plain = gpuaug.MultiView(views={"a": view(flip=flip()), "b": views["b"], "c": view(flip=flip())}, like={"c": "a"})
    made = plain(images(), seed=1)
    assert torch.equal(made[0], made[2])
    assert torch.equal(recipe(images(), seed=1)[0], gpuaug.MultiView(views=views)(images(), seed=1)[0])
    assert not np.array_equal(*windows(gpuaug.MultiView(views=views))[:2])


def test_copies_follow_the_copies_of_the_same_number() -> None:
    recipe = gpuaug.MultiView(views={"a": view(copies=3), "b": view(copies=2)}, like={"b": "a"})
    a0, a1, a2, b0, b1 = windows(recipe)
    assert np.array_equal(a0, b0)
    assert np.array_equal(a1, b1)
    assert not np.array_equal(a1, a2)


def test_noise_is_the_same_too() -> None:
    noisy = {name: view(noise=K.RandomGaussianNoise(std=0.2, p=1.0)) for name in "ab"}
    made = gpuaug.MultiView(views=noisy, like={"b": "a"})(images(), seed=4)
    assert torch.equal(*made)


def test_views_share_single_operations() -> None:
    views = {"a": view(copies=2, jitter=jitter(), flip=flip()), "b": view(jitter=jitter(), flip=flip())}
    recipe = gpuaug.MultiView(views=views, share={"jitter": ["a", "b"]})
    drawn = recipe.draw(seed=0, epoch=0, indices=np.arange(50))
    one, two, three = (drawn.uniforms[at] for at in (("a", 0, "jitter"), ("a", 1, "jitter"), ("b", 0, "jitter")))
    assert np.array_equal(one, two)
    assert np.array_equal(one, three)
    for name in ("crop", "flip"):
        assert not np.array_equal(drawn.uniforms["a", 0, name], drawn.uniforms["b", 0, name])
    own = gpuaug.MultiView(views=views).draw(seed=0, epoch=0, indices=np.arange(50))
    assert np.array_equal(own.uniforms["a", 0, "jitter"], one)
    assert own.uniforms["b", 0, "flip"].tolist() == drawn.uniforms["b", 0, "flip"].tolist()


@settings(deadline=None, max_examples=40)
@given(sides=st.tuples(st.integers(1, 300), st.integers(1, 300)), copies=st.integers(1, 5))
def test_crops_lie_inside_those_of_the_views_in_turn(sides: tuple[int, int], copies: int) -> None:
    views = {"large": view(copies=2), "wide": view(), "small": view(8, copies, scale=(0.05, 0.5))}
    recipe = gpuaug.MultiView(views=views, inside={"small": ["large", "wide"]})
    outer, inner = (made := windows(recipe, 5, sides))[:3], made[3:]
    for number, own in enumerate(inner):
        parent = outer[number % 3]
        assert (own[:, :2] >= parent[:, :2]).all()
        assert (own[:, :2] + own[:, 2:] <= parent[:, :2] + parent[:, 2:]).all()
        assert (own[:, 2:] >= 1).all()
    assert all(map(np.array_equal, outer, windows(gpuaug.MultiView(views=views), 5, sides)[:3]))


def test_relations_are_settings_of_the_recipe() -> None:
    views, relations = {"a": view(flip=flip()), "b": view(flip=flip())}, {"share": {"flip": ["a", "b"]}}
    recipe = gpuaug.MultiView(views=views, **relations)
    assert recipe.fingerprint() != gpuaug.MultiView(views=views).fingerprint()
    assert "share" not in gpuaug.MultiView(views=views).fingerprint()
    for other in (recipe.replace(backend="kornia"), copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe))):
        assert other.share == recipe.share
        assert (other(images(), seed=2)[1] - recipe(images(), seed=2)[1]).abs().max() <= 3e-6
    assert "share={'flip': ['a', 'b']}" in repr(recipe)


@pytest.mark.parametrize(
    ("relations", "words"),
    [
        ({"like": {"b": "x"}}, "augment.like.*a, b, c.*'x'"),
        ({"like": {"b": "c", "c": "a"}}, "augment.like.b.*'c'"),
        ({"like": {"c": "a"}}, "augment.like.c.*2 copies|augment.like.c.*copies"),
        ({"like": {"b": 3}}, "augment.like.b.*str.*3"),
        ({"like": ["a"]}, "augment.like.*mapping.*list"),
        ({"like": {"b": "a"}}, "augment.like.b.*same kind of `op`.*RandomGaussianNoise.*RandomHorizontalFlip"),
        ({"share": {"blur": ["a", "b"]}}, "augment.share.blur.*'a'"),
        ({"share": {"op": ["a", "z"]}}, "augment.share.op.*a, b, c.*'z'"),
        ({"share": {"op": "a"}}, "augment.share.op.*list of views.*'a'"),
        ({"share": {"op": []}}, "augment.share.op.*list of views"),
        ({"inside": {"a": ["b"]}}, "augment.inside.a.*before 'a'"),
        ({"inside": {"d": ["a"]}}, "augment.inside.*'d'"),
        ({"inside": {"c": ["a"]}}, "augment.inside.c.*RandomResizedCrop.*Resize"),
    ],
)
def test_wrong_relations_are_named(relations: dict[str, Any], words: str) -> None:
    views = {
        "a": view(op=flip()), "b": view(op=K.RandomGaussianNoise(p=1.0)),
        "c": gpuaug.Augment(crop=gpuaug.Resize((32, 32)), copies=2),
    }  # fmt: skip
    with pytest.raises(ConfigError, match=words):
        gpuaug.MultiView(views=views, **relations)


# --- positions


@pytest.fixture
def ramps(tmp_path: Path) -> Path:
    """Images whose red is x and whose green is y, in pixels; blue is white."""
    y, x = np.mgrid[0:200, 0:240]
    (tmp_path / "ramps").mkdir()
    for k in range(8):
        Image.fromarray(np.stack([x, y, y * 0 + 255], axis=2).astype(np.uint8)).save(tmp_path / f"ramps/{k}.png")
    return tmp_path


def first_batch(root: Path, augment: Any) -> gpuaug.Batch:
    with gpuaug.Loader(gpuaug.FolderSource(root), augment=augment, batch_size=8, num_workers=0, device="cpu") as loader:
        return next(iter(loader))


MOVING = {
    "flip": flip,
    "vflip": lambda: K.RandomVerticalFlip(p=0.5),
    "affine": lambda: K.RandomAffine(25.0, (0.1, 0.1), p=0.7),
    "perspective": lambda: K.RandomPerspective(0.3, p=0.5),
}


def test_matrices_lead_to_the_pixels(ramps: Path) -> None:
    views = {name: view(64, copies=2, **{k: op() for k, op in MOVING.items()}) for name in ("a", "b")}
    batch = first_batch(ramps, gpuaug.MultiView(views=views))
    assert len(batch.matrices) == 4
    centres = torch.arange(64, dtype=torch.float64) + 0.5
    grid = torch.stack([*torch.meshgrid(centres, centres, indexing="xy"), torch.ones(64, 64)], -1)
    for made, matrix in zip(batch.images, batch.matrices, strict=True):
        assert matrix.shape == (8, 3, 3)
        assert matrix.dtype == torch.float64
        back = torch.einsum("bij,hwj->bhwi", torch.linalg.inv(matrix), grid)
        place = back[..., :2] / back[..., 2:]
        seen = made.permute(0, 2, 3, 1)[..., :2].double() * 255 + 0.5
        inner = ((place > 2) & (place < torch.tensor([238.0, 198]))).all(-1) & (made[:, 2] > 0.999)
        assert inner.float().mean() > 0.3
        assert (place - seen)[inner].abs().max() < 1.0  # levels are rounded, and a warp blends with black
        assert (place - seen)[inner].abs().median() < 0.4
    for other in (pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch), batch.to("cpu")):
        assert all(map(torch.equal, other.matrices, batch.matrices))


def test_patches_match_where_they_show_the_same(ramps: Path) -> None:
    views = {"a": view(64, flip=flip()), "b": view(32, flip=flip())}
    batch = first_batch(ramps, gpuaug.MultiView(views=views))
    (a, b), patch = batch.matrices, 8
    places, inside = gpuaug.match_patches(a, b, size=64, other=32, patch=patch)
    assert places.shape == (8, 8, 8, 2)
    assert inside.any()
    assert not inside.all()
    for n in range(8):
        for i, j in ((0, 0), (3, 5), (7, 7)):
            x, y, w = b[n] @ torch.linalg.inv(a[n]) @ torch.tensor([(j + 0.5) * patch, (i + 0.5) * patch, 1.0]).double()
            assert torch.allclose(places[n, i, j] * patch, torch.stack([x, y]) / w)
            assert bool(inside[n, i, j]) == (0 <= x < 32 and 0 <= y < 32)
            if inside[n, i, j]:  # both views have the same levels there
                u, v = (int(t) for t in (x, y))
                one = batch.images[0][n, :2, int((i + 0.5) * patch), int((j + 0.5) * patch)]
                assert (one - batch.images[1][n, :2, v, u]).abs().max() * 255 < 12
    with pytest.raises(ConfigError, match="`patch` must divide"):
        gpuaug.match_patches(a, b, size=64, other=32, patch=7)


def test_one_view_has_one_tensor_and_fields_have_no_matrix(ramps: Path) -> None:
    assert first_batch(ramps, view(16)).matrices.shape == (8, 3, 3)
    batch = first_batch(ramps, view(16, elastic=K.RandomElasticTransform(p=1.0)))
    with pytest.raises(ConfigError, match=r"`augment.ops.elastic` must move pixels by a matrix"):
        _ = batch.matrices
    assert len(pickle.loads(pickle.dumps(batch))) == 8
    with pytest.raises(ConfigError, match="`matrices` needs a batch"):
        _ = gpuaug.Batch(images=batch.images, labels=None, indices=batch.indices, valid=batch.valid).matrices
