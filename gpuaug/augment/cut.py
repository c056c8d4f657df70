"""Crops and resizes images of any type, for recipes that are called with a batch of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gpuaug.augment.crop import LARGEST_VIEW
from gpuaug.augment.reference import unit
from gpuaug.batch import CropWindows
from gpuaug.decode import resize
from gpuaug.errors import ConfigError, shown_size
from gpuaug.native.buffers import outputs, to_device
from gpuaug.random.keyed import Float

CHUNK_BYTES = 256 << 20  # largest float32 copy of images; `resample` has up to three at a time


def cut(
    images: Tensor, windows: CropWindows, white: float, *, later: bool = False
) -> tuple[Tensor, float, CropWindows | None]:
    """Crop and resize images [B, H, W, C]. Returns [B, h, w, C], its value that is white, and None.

    RGB images of uint8 stay uint8, as the decoder makes them on the CPU. Others become float32, where 1 is white;
    with ``later`` they are returned as they are, with the windows that the caller then has to cut.
    """
    H, W = windows.size
    placed = np.hstack([windows.window, windows.resized, windows.offset])
    if images.shape[1:3] == (H, W) and (placed == (0, 0, H, W, H, W, 0, 0)).all():
        return images, white, None
    pixels = windows.resized.prod(axis=1, dtype=np.int64)
    if pixels.max(initial=0) > LARGEST_VIEW:  # torch resizes the whole window before it is cut
        height, width = windows.resized[pixels.argmax()].tolist()
        raise ConfigError(
            f"`augment.crop` must resize images to at most {LARGEST_VIEW} pixels. Found: image {pixels.argmax()} of "
            f"{shown_size(*images.shape[1:3])} becomes {shown_size(height, width)}. Leave out thin images or change "
            "the crop."
        )
    levels = (
        images.dtype == torch.uint8 and images.shape[3] == 3 and white == 255 and windows.interpolation != "nearest"
    )
    if levels and images.device.type != "cpu":
        return resample(images, windows), white, None
    if not levels:
        if later and len(images):
            return images, white, windows
        fill = np.resize(np.asarray(windows.fill, dtype=np.float32) / np.float32(255), images.shape[3])
        return resample(unit(images, white).permute(0, 2, 3, 1), windows, fill), 1.0, None
    out = outputs.take((len(images), H, W, 3), torch.uint8, channels_last=False)
    boxes = zip(images.numpy(), windows.window.tolist(), strict=True)
    parts = [image[top : top + height, left : left + width] for image, (top, left, height, width) in boxes]
    # a thread costs about 50 us, so one thread is faster below 100,000 pixels
    threads = torch.get_num_threads() if len(images) * H * W >= 100_000 else 1

    def each(rows: Sequence[int], work: resize.Work) -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, rows))  # raises the first error

    resize.views(parts, windows, out.numpy(), np.arange(len(images)), threads=threads, each=each)
    return out, white, None


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
