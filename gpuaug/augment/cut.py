"""Crops of batches of tensors: which are needed, and how torch does them where no kernel runs."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gpuaug.augment.crop import LARGEST_VIEW
from gpuaug.augment.images import unit
from gpuaug.batch import CropWindows
from gpuaug.decode import resize
from gpuaug.errors import ConfigError, shown_size
from gpuaug.native.buffers import to_device
from gpuaug.random.keyed import Float

CHUNK_BYTES = 256 << 20  # largest float32 copy of images; `resample` has up to three at a time


def crop_of(images: Tensor, windows: CropWindows) -> CropWindows | None:
    """Return ``windows``; None if they leave images [B, H, W, C] as they are.

    Raises ConfigError for images that would become too large: :func:`resample` resizes whole windows.
    """
    H, W = windows.size
    placed = np.hstack([windows.window, windows.resized, windows.offset])
    if images.shape[1:3] == (H, W) and (placed == (0, 0, H, W, H, W, 0, 0)).all():
        return None
    pixels = windows.resized.prod(axis=1, dtype=np.int64)
    if pixels.max(initial=0) > LARGEST_VIEW:
        height, width = windows.resized[pixels.argmax()].tolist()
        raise ConfigError(
            f"`augment.crop` must resize images to at most {LARGEST_VIEW} pixels. Found: image {pixels.argmax()} of "
            f"{shown_size(*images.shape[1:3])} becomes {shown_size(height, width)}. Leave out thin images or change "
            "the crop."
        )
    return windows


def keeps_levels(images: Tensor, windows: CropWindows, white: float | None) -> bool:
    """Whether images stay uint8, as the decoder crops them: RGB, unless the nearest pixels are taken."""
    rgb = images.dtype == torch.uint8 and images.shape[3] == 3 and white in (None, 255)
    return rgb and windows.interpolation != "nearest"


def fill_of(windows: CropWindows, channels: int) -> Float:
    """The fill of each channel, float32 [C] in 0..1."""
    return np.resize(np.asarray(windows.fill, dtype=np.float32) / np.float32(255), channels)


def cut(images: Tensor, windows: CropWindows, white: float | None) -> tuple[Tensor, float]:
    """Crop and resize images [B, H, W, C] without the kernels that do this before they augment.

    Returns [B, h, w, C] and its value that is white: uint8 if :func:`keeps_levels`, else float32, where 1 is white.
    """
    if not keeps_levels(images, windows, white):
        fill = fill_of(windows, images.shape[3])
        return resample(unit(images, white).permute(0, 2, 3, 1), windows, fill), 1.0
    if images.device.type != "cpu":
        return resample(images, windows), 255.0
    out = torch.empty((len(images), *windows.size, 3), dtype=torch.uint8, device="cpu")
    boxes = zip(images.numpy(), windows.window.tolist(), strict=True)
    parts = [image[top : top + height, left : left + width] for image, (top, left, height, width) in boxes]
    resize.views(parts, windows, out.numpy(), np.arange(len(images)), threads=torch.get_num_threads())
    return out, 255.0


def resample(images: Tensor, windows: CropWindows, fill: Float | None = None) -> Tensor:
    """Do what :func:`cut` does, on any device, with a few calls for the whole batch.

    ``fill``: None for uint8 images; else [C], and images are float32, which are not rounded.

    Weights and rounding are those of resize.cpp. With random windows, 8 of 5 million levels differ, by 1: sums have
    only the 24 bits of float32, and the precision of weights depends on those inside the canvas. Memory bandwidth
    limits the speed: all results read as many pixels per axis as the largest reduction of the batch needs (bilinear: 5
    for up to 2 times, 9 for up to 4).
    """
    (height, width), (H, W) = images.shape[1:3], windows.size
    step = max(1, CHUNK_BYTES // (12 * max(height, H) * max(width, W)))
    levels, color = fill is None, windows.fill if fill is None else fill
    outside = to_device(torch.as_tensor(color, dtype=images.dtype, device="cpu"), images.device)
    out = images.new_empty((len(images), H, W, images.shape[3]))
    for first in range(0, len(images), step):
        chunk = windows.take(np.arange(first, min(first + step, len(images))))
        in_x, *columns = _neighbours(chunk, 1, images.device, levels)
        in_y, *rows = _neighbours(chunk, 0, images.device, levels)
        part = images[first : first + step].transpose(1, 2)
        x = _weighted(part.to(torch.float32, memory_format=torch.contiguous_format), *columns, levels=levels)
        x = _weighted(x.transpose(1, 2), *rows, levels=levels).to(images.dtype)
        out[first : first + step] = torch.where(in_y[..., None] & in_x[:, None], x, outside)
    return out


def _neighbours(windows: CropWindows, axis: int, device: torch.device, levels: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The pixels of the image that each row (axis 0) or column (axis 1) of the canvas takes, as `Axis` of resize.cpp.

    Returns whether the window covers it, bool [B, n, 1]; the pixels, int64 [B, n, taps]; weights, float32 [B, n, taps].
    """
    cubic, count = windows.interpolation == "bicubic", windows.size[axis]
    start, size, resized = windows.window[:, axis], windows.window[:, 2 + axis], windows.resized[:, axis]
    taps = 2 * int(np.ceil((1 + cubic) * (size / resized).max(initial=1))) + 1
    table = torch.from_numpy(np.stack([start, size, resized, windows.offset[:, axis], size / resized]))
    first, length, to, offset, scale = to_device(table, device)[:, :, None, None]
    i = torch.arange(count, device=device)[:, None] - offset
    center = (i.clamp(min=0).minimum(to - 1) + 0.5) * scale
    scale = scale.clamp(min=1)
    reach = scale * (1 + cubic)
    if windows.interpolation == "nearest":
        at = (first + center.trunc().minimum(length - 1)).long()
        return (i >= 0) & (i < to), at, torch.ones(at.shape, dtype=torch.float32, device=device)
    k = (center - reach + 0.5).trunc().clamp(min=0) + torch.arange(taps, device=device)
    x = ((k - center + 0.5) / scale).abs()
    weights = (1 - x).clamp(min=0)
    if cubic:
        far = ((-0.5 * x + 2.5) * x - 4) * x + 2
        weights = torch.where(x < 1, (1.5 * x - 2.5) * x * x + 1, torch.where(x < 2, far, 0))
    weights = weights * (k < (center + reach + 0.5).trunc().minimum(length))
    weights = weights / weights.sum(2, keepdim=True)
    if not levels:
        return (i >= 0) & (i < to), (first + k.minimum(length - 1)).long(), weights.float()
    bits = (32767.5 / weights.amax((1, 2), keepdim=True)).log2().ceil().clamp(1, 23) - 1  # the weights fill 15 bits
    weights = (weights.abs().ldexp(bits) + 0.5).floor().ldexp(-bits).copysign(weights)
    return (i >= 0) & (i < to), (first + k.minimum(length - 1)).long(), weights.float()


def _weighted(x: Tensor, index: Tensor, weights: Tensor, *, levels: bool) -> Tensor:
    """The weighted sums of ``x``, float32 [B, n, ...], along its second axis: [B, count, ...]. ``levels``: rounded.

    ``embedding_bag`` is one kernel on CUDA. A matrix product would read all rows, and could use TF32.
    """
    batch, n = x.shape[:2]
    index = index + torch.arange(batch, device=x.device)[:, None, None] * n
    flat = index.flatten(0, 1), x.reshape(batch * n, -1)
    y = F.embedding_bag(*flat, per_sample_weights=weights.flatten(0, 1), mode="sum")
    return (y.add_(0.5).floor_().clamp_(0, 255) if levels else y).view(batch, -1, *x.shape[2:])
