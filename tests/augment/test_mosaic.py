"""Mosaic and the affine transform of its canvas: placement, partners, matrices, and the gather against a paste."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import stats

import gpuaug
from gpuaug.augment import gather as gather_module
from gpuaug.augment.gather import gather
from gpuaug.augment.mosaic import Combine, Layout


def uniforms(rng: np.random.Generator, rows: int, count: int) -> np.ndarray:
    return rng.random((rows, count), dtype=np.float32)


def laid(rng: np.random.Generator, *, size: tuple[int, int], tiles: int, rows: int, **affine: Any) -> Layout:
    """A random layout: tiles of random sides at a random place of their crops, some of them missing."""
    mosaic, canvas = gpuaug.Mosaic(tiles=tiles), gpuaug.CanvasAffine(**{"size": size, **affine})
    combine = Combine({"mosaic": mosaic, "affine": canvas})
    low = np.stack([rng.integers(0, side, (rows, tiles)) for side in size[::-1]], axis=-1)
    high = np.stack([rng.integers(low[..., k] + 1, size[1 - k] + 1) for k in (0, 1)], axis=-1)
    covered = np.concatenate([low, high], axis=-1) * (rng.random((rows, tiles, 1)) < 0.9)
    values = {"mosaic": uniforms(rng, rows, mosaic.count), "affine": uniforms(rng, rows, canvas.count)}
    return combine.lay(values, size, covered)


def pasted(tiles: list[np.ndarray], layout: Layout, row: int, fill: int) -> np.ndarray:
    """The canvas of one output, made by pasting, with a border of 4 pixels."""
    width, height = layout.canvas[row]
    canvas = np.full((height + 8, width + 8, *tiles[0].shape[2:]), fill, dtype=tiles[0].dtype)
    for tile, (x, y), (x1, y1, x2, y2) in zip(tiles, layout.origin[row], layout.visible[row], strict=True):
        if x1 < x2:
            canvas[y1 + 4 : y2 + 4, x1 + 4 : x2 + 4] = tile[y1 - y : y2 - y, x1 - x : x2 - x]
    return canvas


def warped(canvas: np.ndarray, inverse: np.ndarray, size: tuple[int, int], fill: int) -> np.ndarray:
    """The affine transform written out in float64, rounded to 1/256 pixel."""
    v, u = np.mgrid[: size[0], : size[1]] + 0.5
    x, y = ((inverse[r, 0] * u + inverse[r, 1] * v) + inverse[r, 2] - 0.5 for r in (0, 1))
    x, y = (np.floor(p * 256 + 0.5).astype(int) for p in (x, y))
    (left, fx), (top, fy) = np.divmod(x, 256), np.divmod(y, 256)

    def at(i: np.ndarray, j: np.ndarray) -> np.ndarray:
        inside = (i >= -4) & (j >= -4) & (i < canvas.shape[0] - 4) & (j < canvas.shape[1] - 4)
        found = canvas[np.where(inside, i, 0) + 4, np.where(inside, j, 0) + 4].astype(int)
        return np.where(inside[..., None], found, fill)

    fx, fy = fx[..., None], fy[..., None]
    above = at(top, left) * (256 - fx) + at(top, left + 1) * fx
    below = at(top + 1, left) * (256 - fx) + at(top + 1, left + 1) * fx
    return ((above * (256 - fy) + below * fy + 32768) >> 16).astype(np.uint8)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([4, 9]), st.sampled_from([1, 3, 4]), st.booleans())
def test_the_gather_equals_pasting_and_an_affine_transform(seed: int, tiles: int, channels: int, turn: bool) -> None:
    rng = np.random.default_rng(seed)
    size, rows, fill = (int(rng.integers(2, 40)), int(rng.integers(2, 40))), 3, int(rng.integers(0, 256))
    about = ["centre", "origin"][seed % 2]
    layout = laid(
        rng,
        size=size,
        tiles=tiles,
        rows=rows,
        scale=(0.1, 2),
        about=about,
        **({"degrees": 180.0, "shear": 20.0} if turn else {}),
    )
    images = [rng.integers(0, 256, (rows, *size, channels), dtype=np.uint8) for _ in range(tiles)]
    given_tiles = [[torch.from_numpy(images[k][row]) for k in range(tiles)] for row in range(rows)]
    where = layout.origin, layout.visible, layout.inverse, layout.size
    made = gather(given_tiles, *where, fill=fill, threads=2)
    for row in range(rows):
        canvas = pasted([images[k][row] for k in range(tiles)], layout, row, fill)
        assert np.array_equal(made[row].numpy(), warped(canvas, layout.inverse[row], layout.size, fill))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([4, 9]), st.sampled_from([np.uint8, np.int32]))
def test_masks_follow_by_the_nearest_pixel(seed: int, tiles: int, dtype: Any) -> None:
    rng = np.random.default_rng(seed)
    size, rows = (int(rng.integers(2, 40)), int(rng.integers(2, 40))), 3
    layout = laid(rng, size=size, tiles=tiles, rows=rows, degrees=90, scale=(0.3, 2))
    masks = [rng.integers(0, 20, (rows, *size)).astype(dtype) for _ in range(tiles)]
    add = rng.integers(0, 10, (rows, tiles))
    given_tiles = [[torch.from_numpy(masks[k][row]) for k in range(tiles)] for row in range(rows)]
    made = gather(given_tiles, layout.origin, layout.visible, layout.inverse, layout.size, fill=255, add=add)
    v, u = np.mgrid[: layout.size[0], : layout.size[1]] + 0.5
    for row in range(rows):
        shifted = [np.where(mask[row] > 0, mask[row] + more, 0) for mask, more in zip(masks, add[row], strict=True)]
        canvas, m = pasted(shifted, layout, row, 255)[4:-4, 4:-4], layout.inverse[row]
        x, y = (np.floor((m[r, 0] * u + m[r, 1] * v) + m[r, 2]).astype(int) for r in (0, 1))
        inside = (x >= 0) & (y >= 0) & (x < canvas.shape[1]) & (y < canvas.shape[0])
        expected = np.where(inside, canvas[np.where(inside, y, 0), np.where(inside, x, 0)], 255)
        assert np.array_equal(made[row].numpy(), expected)


@pytest.mark.parametrize("masks", [False, True])
def test_torch_gives_the_bits_of_the_compiled_gather(masks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gather_module.library() is not None
    for seed in range(20):
        rng = np.random.default_rng(seed)
        layout = laid(rng, size=(31, 45), tiles=4, rows=4, degrees=float(seed % 2 * 40), scale=(0.1, 2))
        shape, last = ((31, 45), 20) if masks else ((31, 45, 3), 256)
        tiles = [[torch.from_numpy(rng.integers(0, last, shape, dtype=np.uint8)) for _ in range(4)] for _ in range(4)]
        inverse = layout.inverse.copy()
        if seed % 3 == 0:  # mirrored
            inverse[:, 0] = [0, 0, layout.canvas[0, 0]] - inverse[:, 0]
        where = layout.origin, layout.visible, inverse, layout.size
        more = {"fill": 114, "add": rng.integers(0, 9, (4, 4)) if masks else None}
        compiled = gather(tiles, *where, **more)
        with monkeypatch.context() as patch:
            patch.setattr(gather_module, "library", lambda: None)
            assert torch.equal(compiled, gather(tiles, *where, **more)), seed


@pytest.mark.parametrize("steps", [0, 1, 100, 128, 255, 256])
def test_blends_are_rounded_down(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(steps)
    images, others = (rng.integers(0, 256, (3, 17, 31, 3), dtype=np.uint8) for _ in range(2))
    expected, rows = images.copy(), np.array([0, 2])
    expected[rows] = (images[rows].astype(int) * (256 - steps) + others[rows].astype(int) * steps) // 256
    for library in (gather_module.library, lambda: None):
        monkeypatch.setattr(gather_module, "library", library)
        made = torch.from_numpy(images.copy())
        gather_module.blend(made, torch.from_numpy(others[rows]), rows, steps)
        assert np.array_equal(made.numpy(), expected)


def test_the_gather_is_within_a_level_of_pillows_affine_transform() -> None:
    rng = np.random.default_rng(3)
    low = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
    image = np.array(Image.fromarray(low).resize((64, 64), Image.Resampling.BICUBIC))
    layout = laid(rng, size=(64, 64), tiles=4, rows=5, degrees=30)
    made = gather(
        [[torch.from_numpy(image)] * 4] * 5, layout.origin, layout.visible, layout.inverse, (64, 64), fill=114
    )
    for row in range(5):
        canvas = Image.fromarray(pasted([image] * 4, layout, row, 114)[4:-4, 4:-4])
        data = layout.inverse[row][:2].reshape(-1).tolist()
        theirs = canvas.transform(
            (64, 64), Image.Transform.AFFINE, data, Image.Resampling.BILINEAR, fillcolor=(114,) * 3
        )
        gap = np.abs(made[row].numpy().astype(int) - np.array(theirs).astype(int))
        assert gap.mean() < 1
        assert np.quantile(gap, 0.9) <= 1


def test_tiles_lie_as_ultralytics_puts_them() -> None:
    """Ultralytics' offsets (data/augment.py), for 10,000 draws; the canvas of 9 is cut by half a crop on each side."""
    rng, s, rows = np.random.default_rng(0), 640, 10_000
    for tiles in (4, 9):
        mosaic = gpuaug.Mosaic(tiles=tiles)
        u, sides = uniforms(rng, rows, mosaic.count), rng.integers(1, s + 1, (rows, tiles, 2))
        placed = mosaic._place(u, sides, (s, s))
        for row in range(0, rows, 50):
            if tiles == 4:
                xc, yc = (int(s * (0.5 + float(v))) for v in u[row, 1:3])
                for k, (w, h) in enumerate(sides[row].tolist()):
                    expected = (xc - w if k in (0, 2) else xc), (yc - h if k in (0, 1) else yc)
                    assert tuple(placed[row, k]) == expected
                continue
            hp = wp = h0 = w0 = 0
            for k, (w, h) in enumerate(sides[row].tolist()):
                if k == 0:
                    h0, w0 = h, w
                x, y = [
                    (s, s), (s, s - h), (s + wp, s - h), (s + w0, s), (s + w0, s + hp), (s + w0 - w, s + h0),
                    (s + w0 - wp - w, s + h0), (s - w, s + h0 - h), (s - w, s + h0 - hp - h),
                ][k]  # fmt: skip
                hp, wp = h, w
                assert tuple(placed[row, k]) == (x - s // 2, y - s // 2)


def test_nine_tiles_never_overlap() -> None:
    rng = np.random.default_rng(0)
    layout = laid(rng, size=(30, 40), tiles=9, rows=50)
    for boxes in layout.visible:
        shown = np.zeros((60, 80), dtype=int)
        for x1, y1, x2, y2 in boxes:
            shown[y1:y2, x1:x2] += 1
        assert shown.max() <= 1


def test_draws_have_their_distributions() -> None:
    rng, rows = np.random.default_rng(1), 100_000
    affine = gpuaug.CanvasAffine(size=(100, 200), degrees=10, translate=0.1, scale=(0.5, 1.5), shear=2)
    values = affine._values(uniforms(rng, rows, affine.count))
    for name, low, high in (("angle", -10, 10), ("scale", 0.5, 1.5)):
        assert stats.kstest(values[name], "uniform", (low, high - low)).pvalue > 1e-3
    for name, most in (("shear", 2), ("shift", 0.1)):
        for column in values[name].T:
            assert stats.kstest(column, "uniform", (-most, 2 * most)).pvalue > 1e-3
    mosaic = gpuaug.Mosaic(p=0.3)
    u = uniforms(rng, rows, mosaic.count)
    assert abs(mosaic._applied(u).mean() - 0.3) < 0.01
    distances = mosaic._distances(u, 32)
    assert (np.diff(np.sort(distances, axis=1), axis=1) > 0).all(), "partners differ"
    for column in distances.T:
        counts = np.bincount(column, minlength=33)[1:]
        assert len(counts) == 32
        assert stats.chisquare(counts).pvalue > 1e-3


def test_too_few_samples_repeat() -> None:
    mosaic = gpuaug.Mosaic()
    u = uniforms(np.random.default_rng(0), 50, mosaic.count)
    assert set(mosaic._distances(u, 1).ravel().tolist()) == {1}
    two = mosaic._distances(u, 2)
    assert set(two.ravel().tolist()) <= {1, 2}
    assert (two[:, 0] != two[:, 1]).all()


def test_matrices_are_the_authors_formula() -> None:
    """Ultralytics: T S R C. YOLOX: shear, rotation and scale about the corner, then the translation."""
    rng, size = np.random.default_rng(0), (300, 400)
    u, canvas = uniforms(rng, 40, 6), np.tile([800, 600], (40, 1))
    more: dict[str, Any] = {"degrees": 30, "translate": 0.2, "scale": (0.1, 2), "shear": 15}
    for about in ("centre", "origin"):
        affine = gpuaug.CanvasAffine(size=size, about=about, **more)
        values, made = affine._values(u), affine._matrices(u, canvas)
        for row in range(40):
            a, s = np.deg2rad(values["angle"][row]), values["scale"][row]
            r, sheared, c, t = (np.eye(3) for _ in range(4))
            r[:2, :2] = [[s * np.cos(a), s * np.sin(a)], [-s * np.sin(a), s * np.cos(a)]]  # cv2.getRotationMatrix2D
            sheared[0, 1], sheared[1, 0] = np.tan(np.deg2rad(values["shear"][row]))
            shift = 0.5 * (about == "centre") + values["shift"][row]
            t[:2, 2] = shift * (400, 300)
            c[:2, 2] = -canvas[row] / 2 * (about == "centre")
            assert np.allclose(made[row], t @ sheared @ r @ c)


def test_a_crop_of_the_scaled_canvas_is_that_of_mmdetection() -> None:
    rng, out = np.random.default_rng(0), 100
    affine = gpuaug.CanvasAffine(out, scale=(0.1, 2), translate=0, about="crop")
    u, canvas = uniforms(rng, 20_000, 6), np.tile([200, 160], (20_000, 1))
    made, scale = affine._matrices(u, canvas), affine._values(u)["scale"]
    assert np.allclose(made[:, [0, 1], [0, 1]], scale[:, None])
    margin = np.maximum(np.floor(canvas * scale[:, None]) - out, 0)
    offset = -made[:, :2, 2]
    assert (offset == np.floor(offset)).all()
    assert (offset >= 0).all()
    assert (offset <= margin).all()
    for axis in (0, 1):
        wide = margin[:, axis] > 50
        share = (offset[wide, axis] + rng.random(wide.sum())) / (margin[wide, axis] + 1)
        assert stats.kstest(share, "uniform").pvalue > 1e-3
    # without a mosaic it is a crop of the image
    layout = Combine({"affine": affine}).lay({"affine": u[:1]}, (64, 64), np.array([[[0, 0, 64, 30]]]))
    assert layout.canvas.tolist() == [[64, 30]]
    assert layout.visible[0, 0].tolist() == [0, 0, 64, 30]


def test_without_a_mosaic_the_sample_is_centred_or_stays() -> None:
    covered = np.array([[[0, 0, 60, 100]]])
    u = {"affine": np.full((1, 6), 0.5, dtype=np.float32)}
    for about, x in (("centre", 20), ("origin", 0)):
        combine = Combine({"affine": gpuaug.CanvasAffine(size=100, scale=(1, 1), about=about)})
        layout = combine.lay(u, (100, 100), covered)
        assert layout.origin[0, 0].tolist() == [x, 0]
        assert layout.visible[0, 0].tolist() == [x, 0, x + 60, 100]
        assert np.allclose(layout.matrices[0], np.eye(3))


BAD = [
    (lambda: gpuaug.Mosaic(tiles=5), "`tiles` must be 4 or 9"),
    (lambda: gpuaug.Mosaic(centre=(0.5, 3)), "`centre` must satisfy 0 <= min <= max <= 2"),
    (lambda: gpuaug.Mosaic(partners="all"), "`partners` must be one of window, fresh, batch"),
    (lambda: gpuaug.Mosaic(window=2), "`window` must be a whole number from 8 to 1000"),
    (lambda: gpuaug.CanvasAffine(size=0), "`size`"),
    (lambda: gpuaug.CanvasAffine(size=64, scale=(0, 1)), "`scale` must satisfy 0.001 <= min"),
    (lambda: gpuaug.CanvasAffine(size=64, about="middle"), "`about` must be one of centre, origin, crop"),
    (lambda: gpuaug.CanvasAffine(size=64, about="crop"), "must be 0 with `about: crop`. Found: 0.0, 0.1 and 0.0"),
    (lambda: gpuaug.TileMixUp(weight=2), "`weight`"),
    (lambda: gpuaug.TileMixUp(scale=(0, 1)), "`scale` must satisfy 0.001 <= min"),
    (lambda: gpuaug.TileMixUp(fill=300), "`fill` must be a whole number from 0 to 255"),
    (lambda: gpuaug.TileMixUp(partners="batch"), "`partners` must be one of window, fresh. Found: 'batch'"),
    (lambda: _recipe(crop=None), "`augment.combine` needs a crop with a size"),
    (lambda: _recipe(crop=gpuaug.RandomIoUCrop(64)), "does not choose objects by their centre"),
    (lambda: _recipe(crop=gpuaug.Letterbox(64, fill=(1, 2, 3))), "`augment.crop.fill` must be one number"),
    (lambda: _recipe(copies=2), "`augment.copies` must be 1 with `combine`"),
    (lambda: _recipe(sizes=gpuaug.Sizes(choose=[64])), "`augment.sizes.how` must be resize with `combine`"),
    (lambda: _recipe(combine=[gpuaug.Mosaic()]), "`augment.combine` must be a mapping of names. Found: a list"),
    (lambda: _recipe(combine={"a": gpuaug.Resize(8)}), "`augment.combine.a` must be a gpuaug.Mosaic or gpuaug.Canvas"),
    (lambda: _recipe(combine={"a": gpuaug.Mosaic(), "b": gpuaug.Mosaic()}), "must have one of each kind"),
    (lambda: _recipe(combine={"crop": gpuaug.Mosaic()}), "must have different names. Found: 'crop'"),
    (lambda: gpuaug.MultiView(views={"a": _recipe()}), "`augment.views.a` must have no `combine`"),
    (lambda: _recipe()(torch.zeros(2, 3, 8, 8)), "`augment.combine` works only in a loader"),
    (lambda: gpuaug.export(_recipe(), "x.onnx"), "`augment.combine` must be null for an export"),
]  # fmt: skip


def _recipe(**changes: Any) -> gpuaug.Augment:
    given_settings: dict[str, Any] = {
        "crop": gpuaug.Letterbox(64, centre=False),
        "combine": {"mosaic": gpuaug.Mosaic()},
    }
    return gpuaug.Augment(**given_settings | changes)


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_wrong_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(gpuaug.ConfigError) as caught:
        make()
    assert message in str(caught.value)


def test_the_fingerprint_knows_combine_and_other_recipes_stay() -> None:
    plain = gpuaug.Augment(crop=gpuaug.Letterbox(64))
    assert "combine" not in plain.fingerprint()
    made = [_recipe(combine={"mosaic": each}).fingerprint() for each in (gpuaug.Mosaic(), gpuaug.Mosaic(p=0.5))]
    made += [_recipe(combine={"mixup": gpuaug.TileMixUp(flip=p)}).fingerprint() for p in (0, 1)]
    assert made[2] != made[3]
    assert made[0] != made[1]
    assert made[0]["combine"]["mosaic"]["tiles"] == 4
    assert (
        _recipe().replace(combine=None).fingerprint()
        == gpuaug.Augment(crop=gpuaug.Letterbox(64, centre=False)).fingerprint()
    )


def test_epochs_switch_the_mosaic_off() -> None:
    affine = gpuaug.CanvasAffine(size=64)
    recipe = _recipe(combine={"mosaic": gpuaug.Mosaic(), "affine": affine}, epochs={"mosaic": [0, 3]})
    assert [list(recipe.at(epoch).combine.entries) for epoch in (2, 3)] == [["mosaic", "affine"], ["affine"]]
    assert recipe.output_size == (64, 64)
    assert _recipe().output_size == (128, 128)
