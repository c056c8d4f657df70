"""gpuaug.PhotometricDistort against torchvision's functions and against mmsegmentation's formulas, pixel by pixel."""

from __future__ import annotations

import colorsys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gpuaug
from gpuaug.augment.policy import prepare
from gpuaug.errors import ConfigError

BACKENDS = ("fused", "kornia")
STYLES = ("torchvision", "mmseg")


@pytest.fixture
def images(photo_batch: Tensor) -> Tensor:
    """uint8 [40, 3, 24, 30]: parts of photographs, gray, black, white and noise."""
    rng = np.random.default_rng(0)
    made = photo_batch[:, :24, :30].repeat(5, 1, 1, 1).clone()
    made[0], made[1] = 0, 255
    made[2] = made[2, ..., :1]
    made[3] = torch.from_numpy(rng.integers(0, 256, (24, 30, 3), dtype=np.uint8))
    return made.permute(0, 3, 1, 2).contiguous()


def drawn(op: gpuaug.PhotometricDistort, recipe: gpuaug.Augment, count: int) -> list[dict[str, Any]]:
    """For each sample: torchvision's parameters, None where the change is not made."""
    prepared = prepare("distort", op)
    u = recipe.draw(seed=4, epoch=0, indices=range(count)).uniforms["", 0, "distort"].astype(np.float64)
    assert prepared.count == u.shape[1] == 13
    rows = []
    for row in u:
        ranges = (op.brightness, op.contrast, op.saturation, op.hue)
        values = [low + v * (high - low) for v, (low, high) in zip(row[6:10], ranges, strict=True)]
        chosen = [v if gate < op.p else None for v, gate in zip(values, row, strict=False)]
        permutation = np.argsort(row[10:]).tolist() if row[4] < op.channels else None
        rows.append(
            {
                **dict(zip(("brightness", "contrast", "saturation", "hue"), chosen, strict=True)),
                "early": row[5] < 0.5,
                "permutation": permutation,
            }
        )
    return rows


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("p", [0.5, 1.0])
def test_pixels_are_those_of_torchvisions_class(v2: ModuleType, images: Tensor, backend: str, p: float) -> None:
    op = gpuaug.PhotometricDistort(p=p, hue=(-0.3, 0.3))
    recipe = gpuaug.Augment(ops={"distort": op}, backend=backend)
    made = recipe(images, seed=4)
    theirs = v2.RandomPhotometricDistort()
    for image, ours, row in zip(images, made, drawn(op, recipe, len(images)), strict=True):
        params = {f"{n}_factor": row[n] for n in ("brightness", "contrast", "saturation", "hue")}
        permutation = None if row["permutation"] is None else torch.tensor(row["permutation"])
        params |= {"contrast_before": row["early"], "channel_permutation": permutation}
        want = theirs.transform(image.float() / 255, params)
        # torchvision's weight of red is 0.2989, Kornia's 0.299: 1e-4 of the gray in contrast and saturation
        assert (ours - want).abs().max() < 3e-4
        steps = sum(row[n] is not None for n in ("brightness", "contrast", "saturation", "hue"))
        whole = theirs.transform(image, params).float()  # uint8, cut to a whole number after each step
        levels = (ours * 255 - whole).abs()
        if row["hue"] is None:  # the hue of an almost gray pixel jumps with one level
            assert levels.max() <= 1.6 * steps + 1
        assert levels.mean() <= steps


def mmseg(image: Tensor, row: dict[str, Any]) -> np.ndarray:
    """``PhotoMetricDistortion`` on floats, pixel by pixel: x + beta, x * alpha, S * alpha, H + shift."""
    x = image.permute(1, 2, 0).double().numpy() / 255

    def hsv(x: np.ndarray, change: Any) -> np.ndarray:
        flat = [colorsys.hsv_to_rgb(*change(*colorsys.rgb_to_hsv(*pixel))) for pixel in x.reshape(-1, 3).tolist()]
        return np.array(flat).reshape(x.shape)

    if row["brightness"] is not None:
        x = np.clip(x + row["brightness"], 0, 1)
    if row["contrast"] is not None and row["early"]:
        x = np.clip(x * row["contrast"], 0, 1)
    if row["saturation"] is not None:
        x = hsv(x, lambda h, s, v: (h, min(s * row["saturation"], 1), v))
    if row["hue"] is not None:
        x = hsv(x, lambda h, s, v: ((h + row["hue"]) % 1, s, v))
    if row["contrast"] is not None and not row["early"]:
        x = np.clip(x * row["contrast"], 0, 1)
    return x if row["permutation"] is None else x[..., row["permutation"]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("more", [{}, {"hue": (-0.05, 0.05), "channels": 0.5}])  # mmsegmentation, mmdetection
def test_pixels_are_those_of_mmsegmentations_formulas(images: Tensor, backend: str, more: dict[str, Any]) -> None:
    op = gpuaug.PhotometricDistort(style="mmseg", **more)
    recipe = gpuaug.Augment(ops={"distort": op}, backend=backend)
    made = recipe(images, seed=4)
    for image, ours, row in zip(images, made, drawn(op, recipe, len(images)), strict=True):
        assert np.abs(ours.permute(1, 2, 0).double().numpy() - mmseg(image, row)).max() < 1e-5


@pytest.mark.parametrize("style", STYLES)
def test_gates_and_values_have_their_distribution(style: str) -> None:
    op = gpuaug.PhotometricDistort(style=style, p=0.3, channels=0.6)
    prepared = prepare("distort", op)
    count = 20_000
    u = np.random.default_rng(0).random((count, prepared.count), dtype=np.float32)
    chosen = prepared.draw(u, (8, 8))
    on = chosen.choice == 0
    assert set(np.unique(chosen.choice)) == {-1, 0}
    assert not (on[:, 1] & on[:, 4]).any()  # contrast comes once
    assert np.abs(on.mean(axis=0) - (0.3, 0.15, 0.3, 0.3, 0.15, 0.6)).max() < 0.02
    assert np.abs(np.corrcoef(on[:, [0, 2, 3, 5]].T) - np.eye(4)).max() < 0.03
    for slot, (name, limits) in enumerate(
        [("brightness", op.brightness), ("contrast", op.contrast), ("saturation", op.saturation), ("hue", op.hue)]
    ):
        values = np.sort(chosen.params[slot][0][f"{name}_factor"]) - (slot == 0 and style == "mmseg")
        assert np.abs(values - np.linspace(*limits, count)).max() < 0.03 * (limits[1] - limits[0])
    orders = np.unique(chosen.params[5][0]["channels"], axis=0, return_counts=True)
    assert len(orders[0]) == 6
    assert np.abs(orders[1] / count - 1 / 6).max() < 0.01


def test_defaults_are_those_of_the_cited_work(v2: ModuleType) -> None:
    ours, theirs = gpuaug.PhotometricDistort(), v2.RandomPhotometricDistort()
    for name in ("brightness", "contrast", "saturation", "hue", "p"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.channels == theirs.p
    mm = gpuaug.PhotometricDistort(style="mmseg")
    assert np.allclose(mm.brightness, np.array([-32, 32]) / 255)
    assert np.allclose(mm.hue, np.array([-18, 18]) / 180)
    assert (mm.contrast, mm.saturation, mm.channels, mm.p) == ((0.5, 1.5), (0.5, 1.5), 0, 0.5)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"style": "ssd"}, "`style` must be one of torchvision, mmseg. Found: 'ssd'"),
        ({"brightness": (-0.1, 1)}, r"`brightness` must satisfy 0 <= min <= max. Found: \(-0.1, 1\)"),
        ({"brightness": (-1.1, 1), "style": "mmseg"}, r"`brightness` must satisfy -1 <= min <= max <= 1. Found"),
        ({"contrast": 0.5}, "`contrast` must satisfy 0 <= min <= max. Found: 0.5"),
        ({"hue": (-0.6, 0)}, r"`hue` must satisfy -0.5 <= min <= max <= 0.5. Found: \(-0.6"),
        ({"channels": 2}, r"`channels` must be a number in \[0, 1\]. Found: 2"),
        ({"p": -1}, r"`p` must be a number in \[0, 1\]. Found: -1"),
    ],
)
def test_errors_say_what_was_found(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        gpuaug.PhotometricDistort(**given)
