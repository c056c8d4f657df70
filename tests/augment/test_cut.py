"""Crops of decoded batches: the bits of torch's resize of each image; without kernels on CUDA, within one level."""

from __future__ import annotations

from collections.abc import Callable

import kornia.augmentation as K
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpuaug.augment import cut as cuts
from gpuaug.augment.fused.backend import FusedBackend, library
from gpuaug.augment.policy import prepare
from gpuaug.batch import CropWindows
from gpuaug.decode import resize

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {  # of a contiguous batch [B, H, W, 3]
    "contiguous": lambda x: x,
    "planes": lambda x: x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced": lambda x: x.repeat_interleave(2, 1).repeat_interleave(3, 2)[:, 1::2, ::3],
    "planes, sliced": lambda x: x.permute(0, 3, 1, 2).repeat_interleave(2, 3)[..., ::2].permute(0, 2, 3, 1),
    "one image": lambda x: x[:1].expand(len(x), -1, -1, -1),
    "gray": lambda x: x[..., :1].expand(-1, -1, -1, 3),
}


def one_by_one(images: Tensor, windows: CropWindows) -> Tensor:
    """The definition: cut each image, resize it with torch, and lay it on a filled canvas."""
    H, W = windows.size
    out = torch.tensor(windows.fill, dtype=torch.uint8).expand(len(images), H, W, 3).clone()
    placed = np.hstack([windows.window, windows.resized, windows.offset])
    for i, (top, left, height, width, h, w, y, x) in enumerate(placed.tolist()):
        part = images[i, top : top + height, left : left + width]
        if (h, w) != (height, width):
            channels_last = part.contiguous().permute(2, 0, 1)[None]  # torch's rounding depends on the layout
            part = F.interpolate(channels_last, size=(h, w), mode=windows.interpolation, antialias=True)
            part = part[0].permute(1, 2, 0)
        y0, x0, y1, x1 = max(y, 0), max(x, 0), min(y + h, H), min(x + w, W)
        if y0 < y1 and x0 < x1:
            out[i, y0:y1, x0:x1] = part[y0 - y : y1 - y, x0 - x : x1 - x]
    return out


def some(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    """Noise, noise of two levels, where rounding and clipping show most, and smooth images."""
    noise = rng.integers(0, 256, shape, dtype=np.uint8)
    noise[1::3] = np.where(noise[1::3] > 127, 255, 0)
    noise[2::3] = np.linspace(0, 255, shape[1] * shape[2]).reshape(*shape[1:3], 1)
    return torch.from_numpy(noise)


def random_windows(rng: np.random.Generator, sides: tuple[int, int], batch: int, kind: str) -> CropWindows:
    """Windows of every size, resized to between 1 pixel and twice the canvas, some of them beside the canvas."""
    size = np.array([int(150 ** rng.random()), int(150 ** rng.random())])
    extent = np.ceil(np.array(sides) ** rng.random((batch, 2))).astype(np.int32)
    corner = (rng.random((batch, 2)) * (np.array(sides) - extent + 1)).astype(np.int32)
    resized = np.ceil((2 * size) ** rng.random((batch, 2))).astype(np.int32)
    resized[rng.random((batch, 2)) < 0.3] = 1
    keep = rng.random((batch, 2)) < 0.2
    resized[keep] = extent[keep]
    whole = rng.random(batch) < 0.4
    resized[whole] = size
    offset = rng.integers(-size, size, (batch, 2), dtype=np.int32)
    offset[whole] = 0
    fill = (9, 200, 70) if rng.random() < 0.5 else 114
    return CropWindows(np.hstack([corner, extent]), resized, offset, tuple(size.tolist()), kind, fill)


def cases(layout: str) -> list[tuple[Tensor, CropWindows]]:
    rng = np.random.default_rng(list(layout.encode()))
    made = []
    for sides in ((1, 1), (1, 300), (200, 2), (24, 31), (130, 90), (500, 300)):
        for kind in ("bilinear", "bicubic"):
            batch = int(rng.integers(1, 9))
            images = LAYOUTS[layout](some(rng, (batch, *sides, 3)))
            made.append((images, random_windows(rng, sides, batch, kind)))
    return made


@pytest.mark.parametrize("way", ["with the operations", "alone", "torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_is_cut_to_the_bits_of_its_images_one_by_one(
    layout: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert library() is not None
    if way == "torch":
        monkeypatch.setattr(resize, "library", lambda: None)
    flip, invert = (prepare("op", op) for op in (K.RandomVerticalFlip(p=1.0), K.RandomInvert(p=1.0)))
    for images, windows in cases(layout):
        before, want = images.clone(), one_by_one(images, windows)
        if way == "with the operations":
            ops = (flip, invert)
            chosen = [op.draw(np.zeros((len(images), op.count), dtype=np.float32), windows.size) for op in ops]
            made = FusedBackend(ops)(images, chosen, crop=windows, white=255.0).permute(0, 2, 3, 1)
            assert torch.equal(made, 1 - want.flip(1).float() / 255), (images.shape, windows)
        else:
            assert torch.equal(cuts.cut(images, windows, 255.0)[0], want), (images.shape, windows)
        assert torch.equal(images, before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_torchs_calls_for_any_device_differ_by_at_most_one_level(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    differing = []
    for images, windows in cases(layout):
        want = one_by_one(images, windows)
        made = cuts.resample(images, windows)
        off = (made.int() - want.int()).abs()
        assert off.max() <= 1, (images.shape, windows)
        differing.append(off.float().mean().item())
        with monkeypatch.context() as patch:
            patch.setattr(cuts, "CHUNK_BYTES", 1)  # one image at a time
            assert torch.equal(cuts.resample(images, windows), made)
    assert np.mean(differing) < 1e-3, differing


def test_an_empty_batch_gets_the_size_of_the_crop() -> None:
    none = np.zeros((0, 4), dtype=np.int32)
    windows = CropWindows(none, none[:, :2], none[:, :2], (7, 5))
    empty = torch.zeros((0, 9, 8, 3), dtype=torch.uint8)
    for made in (cuts.cut(empty, windows, 255.0)[0], cuts.cut(empty, windows, 200.0)[0], cuts.resample(empty, windows)):
        assert made.shape == (0, 7, 5, 3)
