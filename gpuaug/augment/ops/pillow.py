"""Operations of RandAugment and similar policies, with Pillow's arithmetic on uint8, as in torchvision and timm.

Each operation rounds its input to levels k/255 and returns levels. The results are bit-identical to Pillow's. The torch
functions below run in the reference backend and, on CUDA, in the fused backend for steps without a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from gpuaug import checks
from gpuaug.augment.ops.codes import Code
from gpuaug.augment.parameters import Entry, Matrix, Params, RecipeOp, Size, Steps, step
from gpuaug.random.keyed import Float

INTERPOLATIONS = ("nearest", "bilinear", "bicubic")
_Float64 = NDArray[np.float64]


class PillowOp(RecipeOp):
    """One operation of RandAugment or a similar policy. Its parameter is ``magnitude``.

    Args:
        name: a key of :data:`ENTRIES`.
        interpolation: nearest, bilinear or bicubic, for operations that move pixels.
        fill: colour (three values, 0..255) of pixels from outside the image.
    """

    def __init__(self, name: str, *, interpolation: str = "nearest", fill: Sequence[int] = (0, 0, 0)) -> None:
        super().__init__()
        self.name = checks.one_of("name", name, ENTRIES)
        self.interpolation = checks.one_of("interpolation", interpolation, INTERPOLATIONS)
        self.fill = tuple(fill)

    @property
    def entry(self) -> Entry:  # type: ignore[override]
        return ENTRIES[self.name]


# --- matrices float64 [n, 6] from output to input positions, as for Pillow's Image.transform. Pixel k covers k to k + 1


def _element(m: _Float64, value: _Float64, size: Size, *, at: int, sign: int) -> None:
    m[:, at] = sign * value


def _rotate(m: _Float64, degrees: _Float64, size: Size) -> None:
    angle = -np.radians(degrees % 360)
    # round to 15 digits as Pillow does; numpy's round gives another value for one angle in twelve
    cos, sin = (np.rint(f(angle).astype(np.longdouble) * 1e15).astype(np.float64) / 1e15 for f in (np.cos, np.sin))
    x, y = size[1] / 2, size[0] / 2
    m[:] = np.stack([cos, sin, cos * -x + sin * -y + x, -sin, cos, -sin * -x + cos * -y + y], axis=1)


_Fill = Callable[[_Float64, _Float64, Size], None]  # changes identity matrices [n, 6] by magnitudes [n]


def _backward(params: Params, size: Size, *, fill: _Fill) -> _Float64:
    magnitude = params["magnitude"].astype(np.float64)
    m = np.zeros((len(magnitude), 6))
    m[:, (0, 4)] = 1
    fill(m, magnitude, size)
    return m


def _write_forward(out: Float, params: Params, size: Size, *, fill: _Fill) -> None:
    """Write the matrices from input to output. The centre of pixel 0 is at 0."""
    a, b, c, d, e, f = _backward(params, size, fill=fill).T
    c, f = c + (a + b) / 2 - 0.5, f + (d + e) / 2 - 0.5
    inverse = np.stack([e, -b, b * f - c * e, -d, a, c * d - a * f], axis=1) / (a * e - b * d)[:, None]
    out[:, :6], out[:, 8] = inverse, 1


def _fixed(v: _Float64) -> _Float64:
    return np.floor(v * 65536 + 0.5) / 65536


def _write_resample(out: Float, params: Params, size: Size, *, fill: _Fill, interpolation: int, color: Any) -> None:
    m = _backward(params, size, fill=fill)
    if interpolation == 0:  # for nearest, Pillow rounds a matrix to multiples of 2^-16, but not a pure translation
        rows = (m[:, 1] != 0) | (m[:, 3] != 0)
        whole = m[rows].reshape(-1, 2, 3)
        half = whole[..., :2].sum(2) / 2  # from the edge of a pixel to its centre
        start = _fixed(whole[..., 2] + half)
        whole[..., :2] = _fixed(whole[..., :2])
        whole[..., 2] = start - whole[..., :2].sum(2) / 2
        m[rows] = whole.reshape(-1, 6)
    out[:, 0, :12] = m.view(np.float32)
    out[:, 0, 12], out[:, 0, 13:16] = interpolation, color


def _resampled(op: PillowOp, *, fill: _Fill) -> Steps:
    interpolation = INTERPOLATIONS.index(op.interpolation)
    write = partial(_write_resample, fill=fill, interpolation=interpolation, color=op.fill)
    return Steps((Code.RESAMPLE,), write, formula=partial(run, Code.RESAMPLE, interpolation=interpolation))


# --- steps in torch, on levels 0..255: v float32 [B, 3, H, W]; a: all arguments; f: the first argument, [B, 1, 1, 1]


def run(code: Code, x: Tensor, a: Tensor, *, interpolation: int = 0) -> Tensor:
    """Run LEVELS, RESAMPLE or a step of :data:`_STEPS` on float32 [B, 3, H, W].

    ``a``: arguments, float32 [B, ARGS]. ``interpolation``: an index in :data:`INTERPOLATIONS`, for RESAMPLE.
    """
    f = a[:, :1, None, None]
    v = (x.clamp(0, 1) * 255 + (f if code is Code.LEVELS else 0.5)).floor()
    if code is Code.RESAMPLE:
        v = _resample(v, a, interpolation)
    elif code is not Code.LEVELS:
        v = _STEPS[code](v, f, a)
    # Divide by a tensor: on CUDA, torch's division by a number is not exact.
    return v / torch.full((), 255.0, dtype=v.dtype, device=v.device)


def _blend(start: Any, v: Tensor, f: Tensor) -> Tensor:
    return (start + f * (v - start)).clamp(0, 255).floor()


def _gray(v: Tensor) -> Tensor:
    weighted = v[:, :1] * 19595 + v[:, 1:2] * 38470 + v[:, 2:] * 7471  # exact: below 2^24
    return ((weighted + 32768) / 65536).floor()


def _contrast(v: Tensor, f: Tensor, a: Tensor) -> Tensor:
    pixels = v.shape[2] * v.shape[3]
    mean = (2 * _gray(v).sum((2, 3), keepdim=True, dtype=torch.int64) + pixels) // (2 * pixels)  # rounded half up
    return _blend(mean.float(), v, f)


def _sharpness(v: Tensor, f: Tensor, a: Tensor) -> Tensor:
    if min(v.shape[2:]) < 3:
        return v
    weights = torch.full((3, 1, 3, 3), 1.0, dtype=torch.float32, device=v.device)
    weights[:, :, 1, 1] = 5.0
    smooth = v.clone()  # the border is not smoothed
    smooth[:, :, 1:-1, 1:-1] = ((F.conv2d(v, weights, groups=3) * 2 + 13) / 26).floor()  # half up; sums are exact
    return _blend(smooth, v, f)


def _posterize(v: Tensor, f: Tensor, a: Tensor) -> Tensor:
    step = torch.exp2(8 - f.trunc().clamp(0, 8))
    return (v / step).floor() * step


def _solarize(v: Tensor, f: Tensor, a: Tensor) -> Tensor:
    add, keep = a[:, 1, None, None, None], a[:, 2, None, None, None]
    return torch.where(v < f, (v + add).clamp(0, 255).floor(), torch.where(keep > 0, v, 255 - v))


def _auto_contrast(v: Tensor, f: Tensor, a: Tensor) -> Tensor:
    low, high = v.amin((2, 3), keepdim=True).double(), v.amax((2, 3), keepdim=True).double()
    scale = torch.full_like(high, 255) / (high - low).clamp(min=1)  # torch would compute 255 / x with a reciprocal
    stretched = (v.double() * scale + -low * scale).clamp(0, 255).floor().float()
    return torch.where(high > low, stretched, v)


def equalized(levels: Tensor) -> tuple[Tensor, Tensor]:
    """Equalize the histogram of each channel; int64 [B, 3, H, W] in 0..255.

    Also returns bool [B, 3, 1, 1]: True for a channel that Pillow does not change, because fewer than 255 of its pixels
    are below its brightest level.
    """
    n, channels, height, width = levels.shape
    index = levels.reshape(n * channels, height * width)
    count = torch.zeros((n * channels, 256), dtype=torch.int32, device=levels.device)
    count.scatter_add_(1, index, torch.ones_like(index, dtype=torch.int32))
    numbers = torch.arange(256, device=levels.device)
    last = torch.where(count > 0, numbers, 0).amax(1, keepdim=True)
    step = (height * width - count.gather(1, last)) // 255
    table = (count.cumsum(1) + step // 2) // step.clamp(min=1)
    table = F.pad(table[:, :-1], (1, 0)).clamp(0, 255)
    return table.gather(1, index).view_as(levels), (step == 0).view(n, channels, 1, 1)


def _equalize(v: Tensor, f: Tensor, a: Tensor) -> Tensor:
    levels, flat = equalized(v.long())
    return torch.where(flat, v, levels.float())


_STEPS: dict[Code, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    Code.MULTIPLY: lambda v, f, a: _blend(0.0, v, f),
    Code.SATURATION: lambda v, f, a: _blend(_gray(v), v, f),
    Code.CONTRAST: _contrast,
    Code.SHARPNESS: _sharpness,
    Code.POSTERIZE: _posterize,
    Code.SOLARIZE: _solarize,
    Code.AUTOCONTRAST: _auto_contrast,
    Code.EQUALIZE: _equalize,
}


def _resample(v: Tensor, a: Tensor, interpolation: int) -> Tensor:
    n, channels, height, width = v.shape
    m = a[:, :12].contiguous().view(torch.float64)[:, :, None, None]
    # centres of output pixels, measured from the edge of pixel 0
    x, y = (torch.arange(k, dtype=torch.float64, device=v.device) + 0.5 for k in (width, height))
    px, py = (m[:, k] * x + m[:, k + 1] * y[:, None] + m[:, k + 2] for k in (0, 3))
    inside = (px >= 0) & (px < width) & (py >= 0) & (py < height)
    shift = 0.5 if interpolation else 0.0
    column, line = (px - shift).floor(), (py - shift).floor()
    dx, dy = ((p - shift - whole)[:, None] for p, whole in ((px, column), (py, line)))
    flat = v.view(n, channels, -1)

    def tap(i: int, j: int) -> Tensor:
        at = (line + j).clamp(0, height - 1).long() * width + (column + i).clamp(0, width - 1).long()
        return flat.gather(2, at.view(n, 1, -1).expand(-1, channels, -1)).view_as(v).double()

    if interpolation == 0:
        values = tap(0, 0)
    elif interpolation == 1:
        upper, lower = (tap(0, j) + (tap(1, j) - tap(0, j)) * dx for j in (0, 1))
        values = upper + (lower - upper) * dy
    else:
        values = _cubic([_cubic([tap(i, j) for i in range(-1, 3)], dx) for j in range(-1, 3)], dy)
    fill = a[:, 13:16, None, None]
    return torch.where(inside[:, None], values.clamp(0, 255).floor().float(), fill)


def _cubic(taps: Sequence[Tensor], d: Tensor) -> Tensor:
    """Pillow's cubic interpolation between the second and the third of four taps."""
    v1, v2, v3, v4 = taps
    return v2 + d * ((-v1 + v3) + d * ((2 * (v1 - v2) + v3 - v4) + d * (-v1 + v2 - v3 + v4)))


# --- entries


def _moves(fill: _Fill) -> Entry:
    matrix = Matrix(partial(_write_forward, fill=fill), elements=True)
    return Entry("matrix", partial(_resampled, fill=fill), matrix=matrix, takes="rgb levels")


def _color(code: Code, *arguments: str | float) -> Entry:
    return Entry("pixels", step(code, *arguments, formula=partial(run, code)), takes="rgb levels")


_M = "magnitude"
ENTRIES = {
    "identity": _color(Code.LEVELS, 0.5),
    "shear_x": _moves(partial(_element, at=1, sign=1)),  # magnitude s: Image.transform with (1, s, 0, 0, 1, 0)
    "shear_y": _moves(partial(_element, at=3, sign=1)),  # magnitude s: (1, 0, 0, s, 1, 0)
    "translate_x": _moves(partial(_element, at=2, sign=-1)),  # pixels to the right: (1, 0, -pixels, 0, 1, 0)
    "translate_y": _moves(partial(_element, at=5, sign=-1)),  # pixels down
    "rotate": _moves(_rotate),  # degrees counter-clockwise: Image.rotate
    "brightness": _color(Code.MULTIPLY, _M, _M, _M, 1),  # magnitude here and in the next 3: ImageEnhance's factor
    "color": _color(Code.SATURATION, _M, 0, 0, 1),
    "contrast": _color(Code.CONTRAST, _M, 0, 0, 1),
    "sharpness": _color(Code.SHARPNESS, _M, 0, 0, 1),
    "posterize": _color(Code.POSTERIZE, _M, 0, 0, 1),  # bits kept, 0..8
    "solarize": _color(Code.SOLARIZE, _M, 0, 0, 1),  # threshold t in 0..256: levels below t are kept
    "solarize_add": _color(Code.SOLARIZE, 128, _M, 1, 1),  # value added to levels below 128
    "auto_contrast": _color(Code.AUTOCONTRAST, 1, 0, 0, 1),
    "equalize": _color(Code.EQUALIZE, 0, 0, 0, 1),
    "invert": _color(Code.SOLARIZE, 0, 0, 0, 1),
}
