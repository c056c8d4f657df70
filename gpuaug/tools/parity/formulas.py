"""torchvision's operations, written out: what ``torchvision.transforms.v2.functional`` does to a tensor.

Each function has the name and keywords of torchvision's, takes one image [H, W, 3] as numpy and gives the same dtype
back: uint8 in 0..255 with torchvision's own rounding (most operations cut the fraction off, some round to even), or
floating point in 0..1 in the precision given. They share no code with what they are compared with and are meant to be
read beside it: https://github.com/pytorch/vision/tree/main/torchvision/transforms/v2/functional (release 0.29).

:func:`resize` is the exception: there torchvision calls torch, so it is the formula that Pillow and torch share, in
float64, with a switch for each thing in which resizes differ.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Image = NDArray[Any]  # [H, W, 3], uint8 in 0..255 or floating in 0..1


# --- what they share


def _is_float(image: Image) -> bool:
    return bool(np.issubdtype(image.dtype, np.floating))


def _bound(image: Image) -> float:
    return 1.0 if _is_float(image) else 255.0


def _work(image: Image) -> Image:
    """The image in the precision that torchvision computes in; a copy."""
    return image.astype(image.dtype if _is_float(image) else np.float32)


def _cut(values: Image, like: Image) -> Image:
    """Into range and into the dtype of ``like``; a fraction of a uint8 is cut off, as ``Tensor.to`` does."""
    return np.clip(values, 0, _bound(like)).astype(like.dtype)


def _rounded(values: Image, like: Image) -> Image:
    return values if _is_float(like) else np.rint(values).astype(like.dtype)


def to_float(image: Image, dtype: Any = np.float64) -> Image:
    """``to_dtype(image, torch.float32, scale=True)``: uint8 to 0..1."""
    return image if _is_float(image) else image.astype(dtype) * dtype(1 / 255)


def to_uint8(image: Image) -> Image:
    """``to_dtype(image, torch.uint8, scale=True)``: 256 equal intervals of 0..1, not the nearest level."""
    return image if not _is_float(image) else (image * image.dtype.type(255.999)).astype(np.uint8)


def _gray(image: Image) -> Image:
    x = _work(image)
    weights = [x.dtype.type(w) for w in (0.2989, 0.587, 0.114)]
    return x[..., :1] * weights[0] + x[..., 1:2] * weights[1] + x[..., 2:] * weights[2]


def _blend(image: Image, other: Image, ratio: float) -> Image:
    x = _work(image)
    return _cut(x * x.dtype.type(ratio) + other * x.dtype.type(1.0 - ratio), image)


# --- flips, crops


def horizontal_flip(image: Image) -> Image:
    """Left and right exchanged."""
    return image[:, ::-1]


def vertical_flip(image: Image) -> Image:
    """Top and bottom exchanged."""
    return image[::-1]


def erase(image: Image, i: int, j: int, h: int, w: int, v: float) -> Image:
    """``v``, in the image's own range, in h rows and w columns from row i and column j."""
    out = image.copy()
    out[i : i + h, j : j + w] = v
    return out


# --- colour


def rgb_to_grayscale(image: Image, num_output_channels: int = 3) -> Image:
    """Weighted sum of the channels, three times: 0.2989 R + 0.587 G + 0.114 B."""
    return np.repeat(_cut(_gray(image), image), num_output_channels, axis=-1)


def adjust_brightness(image: Image, brightness_factor: float) -> Image:
    """Multiplied by the factor."""
    x = _work(image)
    return _cut(x * x.dtype.type(brightness_factor), image)


def adjust_contrast(image: Image, contrast_factor: float) -> Image:
    """Away from, or towards, the mean of the image's gray (whose fractions are cut off in uint8)."""
    gray = _gray(image)
    mean = (gray if _is_float(image) else np.floor(gray)).mean(dtype=np.float64).astype(gray.dtype)
    return _blend(image, mean, contrast_factor)


def adjust_saturation(image: Image, saturation_factor: float) -> Image:
    """Away from, or towards, each pixel's gray."""
    gray = _gray(image)
    return _blend(image, gray if _is_float(image) else np.floor(gray), saturation_factor)


def adjust_hue(image: Image, hue_factor: float) -> Image:
    """Turned around the HSV cone by ``hue_factor`` turns, -0.5..0.5."""
    x = to_float(image, np.float32)
    low, high = x.min(axis=-1), x.max(axis=-1)
    delta = high - low
    gray = delta == 0
    safe = np.where(gray, x.dtype.type(1), delta)
    r, g, b = ((high - x[..., k]) / safe for k in range(3))
    hue = np.select([x[..., 0] == high, x[..., 1] == high], [b - g, 2 + r - b], 4 + g - r)
    hue = np.where(gray, 0, np.mod(hue / 6 + 1, 1))
    saturation = delta / np.where(gray, x.dtype.type(1), high)
    sector = np.mod(hue + x.dtype.type(hue_factor), 1) * 6
    whole = np.floor(sector)
    f, k = sector - whole, whole.astype(np.int64) % 6
    p, q, t = high * (1 - saturation), high * (1 - saturation * f), high * (1 - saturation * (1 - f))
    out = np.stack(
        [
            np.choose(k, [high, q, p, p, t, high]),
            np.choose(k, [t, high, high, q, p, p]),
            np.choose(k, [p, p, t, high, high, q]),
        ],
        axis=-1,
    )
    out = np.clip(out, 0, 1).astype(x.dtype)
    return out if _is_float(image) else to_uint8(out)


def adjust_gamma(image: Image, gamma: float, gain: float = 1.0) -> Image:
    """``gain * x ** gamma``."""
    out = np.clip(to_float(image, np.float32) ** gamma * gain, 0, 1)
    return out if _is_float(image) else to_uint8(out)


def posterize(image: Image, bits: int) -> Image:
    """The highest bits of uint8; of floats ``floor(x * 2**bits) / 2**bits``, which is not the same."""
    if not _is_float(image):
        return image & np.uint8(256 - (1 << (8 - bits)))
    levels = 1 << bits
    return np.clip(np.floor(image * levels), 0, levels - 1) / levels


def solarize(image: Image, threshold: float) -> Image:
    """Inverted where a value is at least ``threshold``, in the image's own range."""
    return np.where(image >= threshold, invert(image), image)


def invert(image: Image) -> Image:
    """White minus the image."""
    return (1 if _is_float(image) else np.uint8(255)) - image


def autocontrast(image: Image) -> Image:
    """Each channel stretched to the whole range; a constant channel stays as it is."""
    x = _work(image)
    low, high = x.min(axis=(0, 1)), x.max(axis=(0, 1))
    flat = low == high
    scale = np.where(flat, 1, (high - low) / x.dtype.type(_bound(image)))
    return _cut((x - np.where(flat, 0, low)) / scale, image)


def equalize(image: Image) -> Image:
    """Each channel's histogram levelled, by Pillow's lookup table; floats go through uint8."""
    levels = to_uint8(image)
    out = levels.copy()
    for channel in range(levels.shape[-1]):
        histogram = np.bincount(levels[..., channel].ravel(), minlength=256)
        used = np.flatnonzero(histogram)
        step = (histogram.sum() - histogram[used[-1]]) // 255
        if step:
            before = np.cumsum(histogram) - histogram
            out[..., channel] = np.clip((before + step // 2) // step, 0, 255).astype(np.uint8)[levels[..., channel]]
    return to_float(out, image.dtype.type) if _is_float(image) else out


# --- neighbourhoods


def adjust_sharpness(image: Image, sharpness_factor: float) -> Image:
    """Away from, or towards, a 3x3 smoothing; the outermost pixels stay."""
    x = _work(image)
    h, w = x.shape[:2]
    if h <= 2 or w <= 2:
        return image
    smooth = sum(x[i : h - 2 + i, j : w - 2 + j] for i in range(3) for j in range(3)) + 4 * x[1:-1, 1:-1]
    smooth = _work(smooth / x.dtype.type(13))
    if not _is_float(image):
        smooth = np.rint(smooth)
    x[1:-1, 1:-1] += (smooth - x[1:-1, 1:-1]) * x.dtype.type(1.0 - sharpness_factor)
    return _cut(x, image)


def gaussian_blur(image: Image, kernel_size: Sequence[int], sigma: Sequence[float]) -> Image:
    """Gaussian of (width, height) pixels and (x, y) sigmas; the edge is reflected."""
    x = _work(image)
    for axis, size, s in ((1, kernel_size[0], sigma[0]), (0, kernel_size[1], sigma[1])):
        at = np.arange(size) - (size - 1) / 2
        weights = np.exp(-0.5 * (at / s) ** 2)
        weights = (weights / weights.sum()).astype(x.dtype)
        pad = [(size // 2, size // 2) if a == axis else (0, 0) for a in range(3)]
        padded, length = np.pad(x, pad, mode="reflect"), x.shape[axis]
        taps = (np.take(padded, range(k, k + length), axis=axis) * weights[k] for k in range(size))
        x = sum(taps, np.zeros_like(x))
    return _rounded(x, image)


def jpeg(image: Image, quality: int) -> Image:
    """Through libjpeg and back; torchvision does so for uint8 only."""
    from PIL import Image as Pillow

    stream = io.BytesIO()
    Pillow.fromarray(to_uint8(image)).save(stream, "JPEG", quality=quality)
    out = np.asarray(Pillow.open(stream).convert("RGB"))
    return to_float(out, image.dtype.type) if _is_float(image) else out


def gaussian_noise(image: Image, noise: Image, clip: bool = True) -> Image:
    """``noise`` added, and the sum clipped; of uint8 the noise's fraction is cut off first.

    Args:
        noise: [H, W, 3] of an image in 0..1; torchvision draws it, mean + sigma * normal, from torch's generator.
    """
    if _is_float(image):
        out = image + noise.astype(image.dtype)
        return np.clip(out, 0, 1) if clip else out
    out = image.astype(np.int16) + (noise.astype(np.float32) * np.float32(255)).astype(np.int16)
    return (np.clip(out, 0, 255) if clip else out).astype(np.uint8)


# --- whole batches: [B, H, W, 3] floating, labels [B, C]; each is mixed with the one before it


def mixup(images: Image, labels: Image, lam: float) -> tuple[Image, Image]:
    """``lam`` of each image and label, and the rest of the one before: ``v2.MixUp``."""
    return tuple(x * lam + np.roll(x, 1, axis=0) * (1.0 - lam) for x in (images, labels))  # type: ignore[return-value]


def cutmix_box(lam: float, r_x: int, r_y: int, size: Sequence[int]) -> tuple[int, int, int, int]:
    """x1, y1, x2, y2 of the box that ``v2.CutMix`` pastes around (r_x, r_y) into an image of (h, w)."""
    height, width = size
    r = 0.5 * math.sqrt(1.0 - lam)
    half_w, half_h = int(r * width), int(r * height)
    return max(r_x - half_w, 0), max(r_y - half_h, 0), min(r_x + half_w, width), min(r_y + half_h, height)


def cutmix(images: Image, labels: Image, box: Sequence[int]) -> tuple[Image, Image]:
    """The box of the image before pasted into each, and the labels by its area: ``v2.CutMix``."""
    x1, y1, x2, y2 = box
    out = images.copy()
    out[:, y1:y2, x1:x2] = np.roll(images, 1, axis=0)[:, y1:y2, x1:x2]
    lam = 1.0 - (x2 - x1) * (y2 - y1) / (images.shape[1] * images.shape[2])
    return out, mixup(images[:, :1, :1], labels, lam)[1]


# --- geometry: bilinear, black outside, pixel centres at half coordinates


def affine(
    image: Image,
    angle: float,
    translate: Sequence[float],
    scale: float,
    shear: Sequence[float],
    center: Sequence[float] | None = None,
) -> Image:
    """Sheared, scaled, rotated clockwise by ``angle`` degrees around the centre, then moved by ``translate`` pixels."""
    h, w = image.shape[:2]
    turn, x, y = (math.radians(v) for v in (angle, *shear))
    rotation = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    forward = scale * rotation @ [[1, 0], [-math.tan(y), 1]] @ [[1, -math.tan(x)], [0, 1]]
    middle = np.array([w / 2, h / 2] if center is None else center)
    columns, rows = np.meshgrid(np.arange(w) + 0.5, np.arange(h) + 0.5)
    found = np.stack([columns, rows], axis=-1) - middle - np.asarray(translate)
    return _sampled(image, found @ np.linalg.inv(forward).T + middle)


def rotate(image: Image, angle: float) -> Image:
    """Rotated counter-clockwise by ``angle`` degrees around the centre, the size kept."""
    return affine(image, -angle, (0, 0), 1.0, (0, 0))


def perspective(image: Image, startpoints: Sequence[Sequence[float]], endpoints: Sequence[Sequence[float]]) -> Image:
    """The homography that takes four points (x, y) to four others; torchvision applies it at half coordinates."""
    rows = []
    for (u, v), (x, y) in zip(endpoints, startpoints, strict=True):
        rows += [[u, v, 1, 0, 0, 0, -x * u, -x * v], [0, 0, 0, u, v, 1, -y * u, -y * v]]
    eight = np.linalg.solve(np.array(rows, dtype=np.float64), np.asarray(startpoints, dtype=np.float64).ravel())
    matrix = np.append(eight, 1).reshape(3, 3)
    h, w = image.shape[:2]
    columns, lines = np.meshgrid(np.arange(w) + 0.5, np.arange(h) + 0.5)
    found = np.stack([columns, lines, np.ones_like(columns)], axis=-1) @ matrix.T
    return _sampled(image, found[..., :2] / found[..., 2:])


def elastic(image: Image, displacement: NDArray[Any]) -> Image:
    """Each pixel taken from elsewhere: ``displacement`` [H, W, 2] is (x, y) in halves of width and height."""
    h, w = image.shape[:2]
    columns, rows = np.meshgrid(np.arange(w) + 0.5, np.arange(h) + 0.5)
    return _sampled(image, np.stack([columns, rows], axis=-1) + displacement * np.array([w / 2, h / 2]))


def elastic_displacement(noise: NDArray[Any], alpha: Sequence[float], sigma: Sequence[float]) -> NDArray[Any]:
    """The displacement [H, W, 2] that ``v2.ElasticTransform`` makes of noise [H, W, 2] in -1..1.

    Blurred over 8 sigma and reflected at the edge; ``alpha[0]`` is divided by the height, ``alpha[1]`` by the width.
    """
    fields = []
    for k in (0, 1):
        size = int(8 * sigma[k] + 1) | 1
        field = noise[..., k : k + 1]
        fields.append(gaussian_blur(field, [size, size], sigma) * alpha[k] / noise.shape[k])
    return np.concatenate(fields, axis=-1)


def _sampled(image: Image, at: NDArray[np.float64]) -> Image:
    """Bilinear samples at (x, y) [H, W, 2], where the first pixel's centre is at 0.5; 0 outside the image."""
    h, w = image.shape[:2]
    padded = np.pad(image.astype(np.float64), ((1, 1), (1, 1), (0, 0)))
    x, y = at[..., 0] + 0.5, at[..., 1] + 0.5  # of the padded image, at its pixels' centres
    left, top = np.floor(x), np.floor(y)
    fx, fy = (x - left)[..., None], (y - top)[..., None]
    out = np.zeros(image.shape)
    for dy, wy in ((0, 1 - fy), (1, fy)):
        for dx, wx in ((0, 1 - fx), (1, fx)):
            row, column = top + dy, left + dx
            inside = (row >= 0) & (row < h + 2) & (column >= 0) & (column < w + 2)
            taps = padded[np.where(inside, row, 0).astype(np.int64), np.where(inside, column, 0).astype(np.int64)]
            out += taps * wx * wy * inside[..., None]
    return _rounded(out, image).astype(image.dtype)


# --- the ends of a pipeline


def resize(
    image: Image,
    size: Sequence[int],
    interpolation: str = "bilinear",
    *,
    antialias: bool = True,
    half_pixel: bool = True,
    between: str | None = None,
) -> Image:
    """A uint8 image resized to (h, w) in float64: float64 in 0..255.

    Args:
        image: uint8 [H, W, 3].
        size: (h, w).
        interpolation: ``bilinear`` (triangle) or ``bicubic`` (Keys, a = -0.5).
        antialias: widen the filter by the scale where the image shrinks.
        half_pixel: coordinates of pixel centres are k + 0.5; otherwise the corner pixels' centres stay where they are.
        between: round to uint8 between the passes, after the ``columns`` or after the ``rows``. With uint8 torch rounds
            after the columns, and so did Pillow until it began to take first what is cheaper (seen in release 13).
    """
    rows, columns = (
        _taps(n, m, interpolation, antialias, half_pixel) for n, m in zip(image.shape[:2], size, strict=True)
    )
    passes = [("columns", "ow,hwc->hoc", columns), ("rows", "oh,hwc->owc", rows)]
    x = image.astype(np.float64)
    for name, product, taps in passes[:: -1 if between == "rows" else 1]:
        x = np.einsum(product, taps, x, optimize=True)
        if name == between:
            x = np.clip(np.rint(x), 0, 255)
    return np.clip(x, 0, 255)


def _taps(n: int, m: int, interpolation: str, antialias: bool, half_pixel: bool) -> NDArray[np.float64]:
    """Weights [m, n] from n pixels to m; those beyond the edge are left out and the rest scaled to a sum of 1."""
    if n == m:
        return np.eye(n)
    scale = n / m
    centre = (np.arange(m) + 0.5) * scale if half_pixel else np.arange(m) * ((n - 1) / max(m - 1, 1)) + 0.5
    wide = max(scale, 1.0) if antialias else 1.0
    away = np.abs((np.arange(n) + 0.5) - centre[:, None]) / wide
    if interpolation == "bilinear":
        weights = np.clip(1 - away, 0, None)
    else:
        a = -0.5 if antialias else -0.75  # as torch has it
        near = ((a + 2) * away - (a + 3)) * away**2 + 1
        far = ((away - 5) * away + 8) * a * away - 4 * a
        weights = np.where(away < 1, near, np.where(away < 2, far, 0))
    return weights / weights.sum(axis=1, keepdims=True)


def normalize(image: Image, mean: Sequence[float], std: Sequence[float]) -> Image:
    """``(x - mean) / std`` per channel, on floats in 0..1."""
    x = to_float(image)
    return (x - np.asarray(mean, dtype=x.dtype)) / np.asarray(std, dtype=x.dtype)
