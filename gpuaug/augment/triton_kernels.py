"""The fused program on CUDA: hand-written Triton kernels that run another list of colour steps for every sample.

takes: uint8 [B, H, W, 3] (or float32 [B, 3, H, W]) on the device, and the program of every sample on the host.
does: one upload; then per stretch of colours one kernel (two where a contrast needs the mean gray of the image at that
point), reading the pixels once and writing them once; per blur two kernels; other steps through torch over the rows
that have them. Nothing waits for the device.
gives: [B, 3, H, W], normalised.

A block of threads belongs to one sample, so that branching on its steps costs no divergence.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.augment import batched
from gpuaug.augment.lower import ARGS, Code
from gpuaug.draw import Float

BLOCK = 1024  # pixels per program

POINTS = frozenset(
    (
        Code.HFLIP, Code.VFLIP, Code.MULTIPLY, Code.ADD, Code.CONTRAST, Code.SATURATION, Code.SATURATION_HSV, Code.HUE,
        Code.GRAY, Code.SOLARIZE, Code.POSTERIZE, Code.INVERT, Code.GAMMA, Code.SHUFFLE, Code.ERASE,
    )
)  # fmt: skip

_MULTIPLY: tl.constexpr = tl.constexpr(int(Code.MULTIPLY))
_ADD: tl.constexpr = tl.constexpr(int(Code.ADD))
_CONTRAST: tl.constexpr = tl.constexpr(int(Code.CONTRAST))
_SATURATION: tl.constexpr = tl.constexpr(int(Code.SATURATION))
_SATURATION_HSV: tl.constexpr = tl.constexpr(int(Code.SATURATION_HSV))
_HUE: tl.constexpr = tl.constexpr(int(Code.HUE))
_GRAY: tl.constexpr = tl.constexpr(int(Code.GRAY))
_SOLARIZE: tl.constexpr = tl.constexpr(int(Code.SOLARIZE))
_POSTERIZE: tl.constexpr = tl.constexpr(int(Code.POSTERIZE))
_INVERT: tl.constexpr = tl.constexpr(int(Code.INVERT))
_GAMMA: tl.constexpr = tl.constexpr(int(Code.GAMMA))
_SHUFFLE: tl.constexpr = tl.constexpr(int(Code.SHUFFLE))
_ERASE: tl.constexpr = tl.constexpr(int(Code.ERASE))
_BLUR: tl.constexpr = tl.constexpr(int(Code.BLUR))
_ARGS: tl.constexpr = tl.constexpr(ARGS)


@triton.jit
def _unit(x):  # type: ignore[no-untyped-def]
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def _sextant(k):  # type: ignore[no-untyped-def]
    k = k - 6.0 * tl.floor(k / 6.0)
    return _unit(tl.minimum(k, 4.0 - k))


@triton.jit
def _power(x, gamma):  # type: ignore[no-untyped-def]
    positive = tl.exp2(gamma * tl.log2(tl.maximum(x, 1e-30)))
    return tl.where(x > 0.0, positive, tl.where(gamma == 0.0, 1.0, 0.0))


@triton.jit
def _posterized(x, bits):  # type: ignore[no-untyped-def]
    shift = 8 - tl.minimum(tl.maximum(bits, 0), 8)
    kept = ((x * 255.0).to(tl.int32) >> shift) << shift
    return tl.where(bits >= 8, x, tl.div_rn(kept.to(tl.float32), 255.0))


@triton.jit
def _solarized(x, threshold, addition):  # type: ignore[no-untyped-def]
    z = _unit(x + addition)
    return tl.where(z < threshold, z, 1.0 - z)


@triton.jit
def _step(code, a, r, g, b, x, y, mean):  # type: ignore[no-untyped-def]
    """One step on a block of pixels at (x, y); formulas of native.cpp."""
    if (code != _GRAY) & (code != _INVERT) & (code != _SHUFFLE) & (code != _ERASE):
        r, g, b = _unit(r), _unit(g), _unit(b)
    a0, a1, a2 = tl.load(a), tl.load(a + 1), tl.load(a + 2)
    if code == _MULTIPLY:
        r, g, b = _unit(r * a0), _unit(g * a1), _unit(b * a2)
    elif code == _ADD:
        r, g, b = _unit(r + a0), _unit(g + a1), _unit(b + a2)
    elif code == _CONTRAST:
        add = mean * (1.0 - a0)
        r, g, b = _unit(r * a0 + add), _unit(g * a0 + add), _unit(b * a0 + add)
    elif code == _SATURATION:
        gray = (1.0 - a0) * (r * 0.299 + g * 0.587 + b * 0.114)
        r, g, b = _unit(gray + a0 * r), _unit(gray + a0 * g), _unit(gray + a0 * b)
    elif code == _SATURATION_HSV:
        top, bottom = tl.maximum(tl.maximum(r, g), b), tl.minimum(tl.minimum(r, g), b)
        delta = top - bottom
        adjusted = top * _unit(delta / tl.where(top == 0.0, 1.0, top + 1e-8) * a0)
        ratio, base = adjusted / tl.where(delta == 0.0, 1.0, delta), top - adjusted
        r, g, b = (
            _unit((r - bottom) * ratio + base),
            _unit((g - bottom) * ratio + base),
            _unit((b - bottom) * ratio + base),
        )
    elif code == _HUE:
        top, bottom = tl.maximum(tl.maximum(r, g), b), tl.minimum(tl.minimum(r, g), b)
        delta = top - bottom
        red, green = (r >= g) & (r >= b), g >= b
        difference = tl.where(red, g - b, tl.where(green, b - r, r - g))
        h = difference / tl.where(delta == 0.0, 1.0, delta) + tl.where(red, 0.0, tl.where(green, 2.0, 4.0)) + 6.0 * a0
        r = _unit(top - delta * _sextant(h + 5.0))
        g = _unit(top - delta * _sextant(h + 3.0))
        b = _unit(top - delta * _sextant(h + 1.0))
    elif code == _GRAY:
        gray = r * a0 + g * a1 + b * a2
        r, g, b = gray, gray, gray
    elif code == _SOLARIZE:
        r, g, b = _solarized(r, a0, a1), _solarized(g, a0, a1), _solarized(b, a0, a1)
    elif code == _POSTERIZE:
        bits = a0.to(tl.int32)
        r, g, b = _posterized(r, bits), _posterized(g, bits), _posterized(b, bits)
    elif code == _INVERT:
        r, g, b = a0 - r, a0 - g, a0 - b
    elif code == _GAMMA:
        r, g, b = _unit(a1 * _power(r, a0)), _unit(a1 * _power(g, a0)), _unit(a1 * _power(b, a0))
    elif code == _SHUFFLE:
        p = tl.where(a0 == 0.0, r, tl.where(a0 == 1.0, g, b))
        q = tl.where(a1 == 0.0, r, tl.where(a1 == 1.0, g, b))
        s = tl.where(a2 == 0.0, r, tl.where(a2 == 1.0, g, b))
        r, g, b = p, q, s
    elif code == _ERASE:
        inside = (x >= a0) & (x < a0 + a2) & (y >= a1) & (y < a1 + tl.load(a + 3))
        value = tl.load(a + 4)
        r, g, b = tl.where(inside, value, r), tl.where(inside, value, g), tl.where(inside, value, b)
    return r, g, b


@triton.jit
def _load(src, sample, p, mask, flips, height, width, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of pixels of the flipped image, and where they lie in it."""
    pixels = height * width
    x, y = p % width, p // width
    flip = tl.load(flips + sample)
    sx = tl.where((flip & 1) != 0, width - 1 - x, x)
    sy = tl.where((flip & 2) != 0, height - 1 - y, y)
    at = sy * width + sx
    base = sample.to(tl.int64) * pixels * 3
    if BYTES:
        r = tl.div_rn(tl.load(src + base + at * 3, mask=mask, other=0).to(tl.float32), 255.0)
        g = tl.div_rn(tl.load(src + base + at * 3 + 1, mask=mask, other=0).to(tl.float32), 255.0)
        b = tl.div_rn(tl.load(src + base + at * 3 + 2, mask=mask, other=0).to(tl.float32), 255.0)
    else:
        r = tl.load(src + base + at, mask=mask, other=0.0)
        g = tl.load(src + base + pixels + at, mask=mask, other=0.0)
        b = tl.load(src + base + 2 * pixels + at, mask=mask, other=0.0)
    return r, g, b, x, y


@triton.jit
def _mean_kernel(  # type: ignore[no-untyped-def]
    src, code, args, flips, sums, height, width, first, last, steps, blocks, BYTES: tl.constexpr, N: tl.constexpr
):
    """Sums of the gray that a sample's contrast sees, one per block: float32 [B, blocks]."""
    sample, block = tl.program_id(1), tl.program_id(0)
    place = last
    for s in range(first, last):
        if tl.load(code + sample * steps + s) == _CONTRAST:
            place = s
    if place < last:
        p = block * N + tl.arange(0, N)
        mask = p < height * width
        r, g, b, x, y = _load(src, sample, p, mask, flips, height, width, BYTES)
        for s in range(first, place):
            number = tl.load(code + sample * steps + s)
            if number > 2:
                r, g, b = _step(number, args + (sample * steps + s) * _ARGS, r, g, b, x, y, 0.0)
        gray = _unit(r) * 0.299 + _unit(g) * 0.587 + _unit(b) * 0.114
        tl.store(sums + sample * blocks + block, tl.sum(tl.where(mask, gray, 0.0), axis=0))


@triton.jit
def _points_kernel(  # type: ignore[no-untyped-def]
    src, dst, code, args, flips, sums, ends, height, width, first, last, steps, blocks,
    BYTES: tl.constexpr, CHANNELS_LAST: tl.constexpr, MEAN: tl.constexpr, N: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """The steps [first, last) of every sample; ``ends`` float32 [2, 3]: scale and shift per channel."""
    sample, block = tl.program_id(1), tl.program_id(0)
    pixels = height * width
    p = block * N + tl.arange(0, N)
    mask = p < pixels
    r, g, b, x, y = _load(src, sample, p, mask, flips, height, width, BYTES)
    for s in range(first, last):
        number = tl.load(code + sample * steps + s)
        if (number > 2) & (number <= _ERASE):
            mean = 0.0
            if MEAN:  # noqa: SIM102 (decided when compiling)
                if number == _CONTRAST:
                    k = tl.arange(0, NB)
                    parts = tl.load(sums + sample * blocks + k, mask=k < blocks, other=0.0)
                    mean = tl.sum(parts, axis=0) / pixels
            r, g, b = _step(number, args + (sample * steps + s) * _ARGS, r, g, b, x, y, mean)
    r = r * tl.load(ends) + tl.load(ends + 3)
    g = g * tl.load(ends + 1) + tl.load(ends + 4)
    b = b * tl.load(ends + 2) + tl.load(ends + 5)
    base = sample.to(tl.int64) * pixels * 3
    kind = dst.dtype.element_ty
    if CHANNELS_LAST:
        tl.store(dst + base + p * 3, r.to(kind), mask=mask)
        tl.store(dst + base + p * 3 + 1, g.to(kind), mask=mask)
        tl.store(dst + base + p * 3 + 2, b.to(kind), mask=mask)
    else:
        tl.store(dst + base + p, r.to(kind), mask=mask)
        tl.store(dst + base + pixels + p, g.to(kind), mask=mask)
        tl.store(dst + base + 2 * pixels + p, b.to(kind), mask=mask)


@triton.jit
def _blur_kernel(  # type: ignore[no-untyped-def]
    src, other, dst, code, args, ends, height, width, column, steps,
    VERTICAL: tl.constexpr, CHANNELS_LAST: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One direction of a blur: rows first (``dst`` float32 [B, 3, H, W], blurred samples only), then columns.

    The second call reads ``src`` where a sample was blurred and ``other`` where it was not, and applies ``ends``.
    """
    sample, block = tl.program_id(1) // 3, tl.program_id(0)
    channel = tl.program_id(1) % 3
    pixels = height * width
    p = block * N + tl.arange(0, N)
    mask = p < pixels
    x, y = p % width, p // width
    base = sample.to(tl.int64) * pixels * 3
    plane = base + channel * pixels
    blurred = tl.load(code + sample * steps + column) == _BLUR
    value = tl.zeros((N,), dtype=tl.float32)
    if blurred:
        a = args + (sample * steps + column) * _ARGS
        taps = tl.load(a + VERTICAL).to(tl.int32)
        sigma, border = tl.load(a + 2), tl.load(a + 3).to(tl.int32)
        width_squared = 2.0 * sigma * sigma
        size = height if VERTICAL else width
        at = y if VERTICAL else x
        total = 0.0
        for t in range(0, taps):
            d = (t - taps // 2).to(tl.float32)
            w = tl.where(
                width_squared == 0.0, tl.where(d == 0.0, 1.0, 0.0), tl.exp(-d * d / tl.maximum(width_squared, 1e-30))
            )
            i = at + t - taps // 2
            reflected = tl.where(i < 0, -i, tl.where(i >= size, 2 * size - 2 - i, i))
            replicated = tl.minimum(tl.maximum(i, 0), size - 1)
            wrapped = (i + size) % size
            j = tl.where(border == 1, reflected, tl.where(border == 3, wrapped, replicated))
            counts = ((i >= 0) & (i < size)).to(tl.int32) + border.to(tl.int32)
            inside = mask & (counts > 0)  # border 0: nothing outside
            where = j * width + x if VERTICAL else y * width + j
            value += w * tl.load(src + plane + where, mask=inside, other=0.0)
            total += w
        value = value / total
    elif VERTICAL:
        value = tl.load(other + plane + p, mask=mask, other=0.0)
    if VERTICAL:
        value = value * tl.load(ends + channel) + tl.load(ends + 3 + channel)
        to = base + p * 3 + channel if CHANNELS_LAST else plane + p
        tl.store(dst + to, value.to(dst.dtype.element_ty), mask=mask)
    elif blurred:
        tl.store(dst + plane + p, value, mask=mask)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Columns [first, last) whose colours run in one kernel, and the other steps of the last column, which follow."""

    first: int
    last: int
    contrast: bool
    rest: list[batched.Group]


def stretches(code: NDArray[np.int32], args: Float) -> list[Stretch]:
    """The program of a batch as few kernels; only steps that some sample has count."""
    columns = code.shape[1]
    found: list[Stretch] = []
    first, contrasts, erased = 0, np.zeros(len(code), dtype=np.int64), False
    for column in range(columns):
        here = {int(c) for c in np.unique(code[:, column])} - {0}
        again = Code.CONTRAST in here and bool((contrasts[code[:, column] == Code.CONTRAST] > 0).any())
        # One mean per kernel and sample; flips happen at the load, before an erased rectangle.
        if again or (erased and here & {Code.HFLIP, Code.VFLIP}):
            found.append(Stretch(first, column, bool(contrasts.any()), []))
            first, contrasts, erased = column, np.zeros(len(code), dtype=np.int64), False
        contrasts += code[:, column] == Code.CONTRAST
        erased = erased or Code.ERASE in here
        if here - POINTS:
            others = np.where(np.isin(code[:, column], list(POINTS)), 0, code[:, column])[:, None]
            rest = batched.groups(others.astype(np.int32), args[:, column : column + 1], range(1))
            for group in rest:
                group.column = column
            found.append(Stretch(first, column + 1, bool(contrasts.any()), rest))
            first, contrasts, erased = column + 1, np.zeros(len(code), dtype=np.int64), False
    if first < columns or not found or not _is_blur(found[-1]):
        found.append(Stretch(first, columns, bool(contrasts.any()), []))
    return found


def _is_blur(stretch: Stretch) -> bool:
    return len(stretch.rest) > 0 and all(group.code is Code.BLUR for group in stretch.rest)


def run(
    images: Tensor,
    code: NDArray[np.int32],
    args: Float,
    *,
    fields: dict[int, Tensor],
    ramps: Float,
    scale: tuple[float, float, float],
    shift: tuple[float, float, float],
    dtype: torch.dtype,
    channels_last: bool,
) -> Tensor:
    """Every sample through its own program; arguments as those of :func:`gpuaug.augment.native.run`."""
    images = images.contiguous()
    bytes_in = images.dtype == torch.uint8
    batch, height, width = (len(images), *images.shape[1:3]) if bytes_in else (len(images), *images.shape[2:])
    parts = stretches(code, args)
    steps = code.shape[1]
    flips = np.zeros((len(parts), batch), dtype=np.int32)
    for k, part in enumerate(parts):
        within = code[:, part.first : part.last]
        flips[k] = (within == Code.HFLIP).sum(1) % 2 + 2 * ((within == Code.VFLIP).sum(1) % 2)
    ends = np.array([(1, 1, 1), (0, 0, 0), scale, shift], dtype=np.float32)
    rows = [group.rows.astype(np.int32) for part in parts for group in part.rest]
    on_host = [code, args, flips, ends, ramps, *rows]
    code_d, args_d, flips_d, ends_d, ramps_d, *rows_d = batched.upload(on_host, images.device)
    at = 0

    blocks = triton.cdiv(height * width, BLOCK)
    grid = (blocks, batch)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    out = torch.empty((batch, 3, height, width), dtype=dtype, device=images.device, memory_format=memory_format)
    x = images
    with torch.cuda.device(images.device) if images.device.type == "cuda" else nullcontext():
        for k, part in enumerate(parts):
            last = k == len(parts) - 1
            final = last and not part.rest
            y = out if final else torch.empty(out.shape, dtype=torch.float32, device=images.device)
            sums = torch.empty((batch, blocks), dtype=torch.float32, device=images.device) if part.contrast else ends_d
            as_bytes = x.dtype == torch.uint8
            if part.contrast:
                _mean_kernel[grid](
                    x, code_d, args_d, flips_d[k], sums, height, width, part.first, part.last, steps, blocks,
                    BYTES=as_bytes, N=BLOCK,
                )  # fmt: skip
            _points_kernel[grid](
                x, y, code_d, args_d, flips_d[k], sums, ends_d[2:] if final else ends_d, height, width,
                part.first, part.last, steps, blocks,
                BYTES=as_bytes, CHANNELS_LAST=final and channels_last, MEAN=part.contrast, N=BLOCK,
                NB=triton.next_power_of_2(blocks),
            )  # fmt: skip
            x = y
            mine, at = rows_d[at : at + len(part.rest)], at + len(part.rest)
            if _is_blur(part):
                between = torch.empty_like(x)
                y = out if last else torch.empty_like(x)
                for vertical, source, target in ((0, x, between), (1, between, y)):
                    _blur_kernel[(blocks, batch * 3)](
                        source, x, target, code_d, args_d, ends_d[2:] if last else ends_d, height, width,
                        part.last - 1, steps, VERTICAL=vertical, CHANNELS_LAST=last and channels_last, N=BLOCK,
                    )  # fmt: skip
                x = y
            elif part.rest:
                x = batched.run(x, part.rest, args_d, mine, fields=fields, ramps=ramps_d)
    return x
