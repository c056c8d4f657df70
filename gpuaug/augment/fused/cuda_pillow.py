"""Triton kernels for Pillow's operations that move pixels, sharpen, or need a histogram: ops/pillow.py, to the bit."""

from __future__ import annotations

import triton
import triton.language as tl

from gpuaug.augment.fused.cuda_kernels import _blended, _level, _store, _unit, over_255
from gpuaug.augment.ops.codes import ARGS, Code

_ARGS: tl.constexpr = tl.constexpr(ARGS)
_AUTOCONTRAST: tl.constexpr = tl.constexpr(int(Code.AUTOCONTRAST))
_EQUALIZE: tl.constexpr = tl.constexpr(int(Code.EQUALIZE))
_SHARPNESS: tl.constexpr = tl.constexpr(int(Code.SHARPNESS))
_RESAMPLE: tl.constexpr = tl.constexpr(int(Code.RESAMPLE))


@triton.jit
def _product64(x, y):  # type: ignore[no-untyped-def]
    """As ``_product``, in float64."""
    code: tl.constexpr = "mul.rn.f64 $0, $1, $2;"
    return tl.inline_asm_elementwise(code, "=d,d,d", [x, y], dtype=tl.float64, is_pure=True, pack=1)


@triton.jit(do_not_specialize=["column", "steps"])
def _levels_kernel(  # type: ignore[no-untyped-def]
    src, table, samples, code, height, width, column, steps, N: tl.constexpr,
):  # fmt: skip
    """Write what AUTOCONTRAST or EQUALIZE makes of each level of a channel to ``table``, float32 [n, 3, 256]."""
    plane, pixels = tl.program_id(0), height * width
    step = tl.load(code + tl.load(samples + plane // 3) * steps + column)
    if (step == _AUTOCONTRAST) | (step == _EQUALIZE):
        count = tl.zeros((512,), dtype=tl.int32)
        for block in range(tl.cdiv(pixels, N)):
            p = block * N + tl.arange(0, N)
            x = tl.load(src + plane.to(tl.int64) * pixels + p, p < pixels, 0.0)
            count += tl.histogram(tl.where(p < pixels, _level(_unit(x)).to(tl.int32), 256), 512)
        level = tl.arange(0, 512)
        count = tl.where(level < 256, count, 0)
        low, high = tl.min(tl.where(count > 0, level, 512), 0), tl.max(tl.where(count > 0, level, 0), 0)
        changed = level.to(tl.float32)
        if step == _AUTOCONTRAST:
            if high > low:
                scale = 255.0 / (high - low).to(tl.float64)
                wide = _product64(level.to(tl.float64), scale) - _product64(low.to(tl.float64), scale)
                changed = tl.floor(tl.minimum(tl.maximum(wide, 0.0), 255.0)).to(tl.float32)
        else:
            each = (pixels - tl.sum(tl.where(level == high, count, 0), 0)) // 255
            if each > 0:
                below = tl.cumsum(count, 0) - count
                changed = tl.minimum((below + each // 2) // each, 255).to(tl.float32)
        tl.store(table + plane * 256 + level, changed, level < 256)


@triton.jit
def _tap(plane, x, y, height, width):  # type: ignore[no-untyped-def]
    """The level of the pixel that is next to (x, y) inside the image."""
    at = tl.minimum(tl.maximum(y, 0), height - 1) * width + tl.minimum(tl.maximum(x, 0), width - 1)
    return _level(_unit(tl.load(plane + at)))


@triton.jit
def _between(v0, v1, d):  # type: ignore[no-untyped-def]
    return v0 + _product64(v1 - v0, d)


@triton.jit
def _cubic(v1, v2, v3, v4, d):  # type: ignore[no-untyped-def]
    third = _product64(d, -v1 + v2 - v3 + v4)
    return v2 + _product64(d, (-v1 + v3) + _product64(d, (2 * (v1 - v2) + v3 - v4) + third))


@triton.jit
def _cubic_line(plane, x, y, d, height, width):  # type: ignore[no-untyped-def]
    v1, v2 = _tap(plane, x - 1, y, height, width), _tap(plane, x, y, height, width)
    v3, v4 = _tap(plane, x + 1, y, height, width), _tap(plane, x + 2, y, height, width)
    return _cubic(v1.to(tl.float64), v2.to(tl.float64), v3.to(tl.float64), v4.to(tl.float64), d)


@triton.jit
def _resampled(plane, x, y, dx, dy, cubic, height, width, CUBIC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Interpolate between levels; nearest if dx and dy are 0. ``CUBIC``: whether ``cubic`` can be 1."""
    if CUBIC and cubic != 0:
        upper, v2 = _cubic_line(plane, x, y - 1, dx, height, width), _cubic_line(plane, x, y, dx, height, width)
        v3, v4 = _cubic_line(plane, x, y + 1, dx, height, width), _cubic_line(plane, x, y + 2, dx, height, width)
        value = _cubic(upper, v2, v3, v4, dy)
    else:
        v00, v01 = _tap(plane, x, y, height, width), _tap(plane, x + 1, y, height, width)
        v10, v11 = _tap(plane, x, y + 1, height, width), _tap(plane, x + 1, y + 1, height, width)
        upper = _between(v00.to(tl.float64), v01.to(tl.float64), dx)
        lower = _between(v10.to(tl.float64), v11.to(tl.float64), dx)
        value = _between(upper, lower, dy)
    return tl.floor(tl.minimum(tl.maximum(value, 0.0), 255.0)).to(tl.float32)


@triton.jit
def _sharpened(plane, x, y, factor, height, width):  # type: ignore[no-untyped-def]
    v = _tap(plane, x, y, height, width)
    total = 4.0 * v
    for k in tl.static_range(9):
        total += _tap(plane, x + k % 3 - 1, y + k // 3 - 1, height, width)
    smooth = ((total * 2 + 13).to(tl.int32) // 26).to(tl.float32)  # rounded half up
    border = (x == 0) | (y == 0) | (x == width - 1) | (y == height - 1)  # is not smoothed
    return _blended(tl.where(border, v, smooth), v, factor)


@triton.jit
def _float64(a):  # type: ignore[no-untyped-def]
    low, high = tl.load(a).to(tl.int32, bitcast=True), tl.load(a + 1).to(tl.int32, bitcast=True)
    return ((high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)).to(tl.float64, bitcast=True)


@triton.jit(do_not_specialize=["column", "steps"])
def _pillow_kernel(  # type: ignore[no-untyped-def]
    src, dst, samples, code, args, table, ends, height, width, column, steps,
    LAYOUT: tl.constexpr, CUBIC: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Run RESAMPLE, SHARPNESS, AUTOCONTRAST or EQUALIZE on a block of ``src``, then apply ``ends``."""
    pixels = height * width
    row, block = tl.program_id(0) // tl.cdiv(pixels, N), tl.program_id(0) % tl.cdiv(pixels, N)
    sample = tl.load(samples + row)
    step, a = tl.load(code + sample * steps + column), args + (sample * steps + column) * _ARGS
    p = block * N + tl.arange(0, N)
    x, y = p % width, p // width
    plane = src + row.to(tl.int64) * pixels * 3
    if step == _RESAMPLE:
        interpolation = tl.load(a + 12).to(tl.int32)  # an index in INTERPOLATIONS
        cubic = (interpolation == 2).to(tl.int32)
        ox, oy = x.to(tl.float64) + 0.5, y.to(tl.float64) + 0.5
        px = _product64(_float64(a), ox) + _product64(_float64(a + 2), oy) + _float64(a + 4)
        py = _product64(_float64(a + 6), ox) + _product64(_float64(a + 8), oy) + _float64(a + 10)
        inside = (px >= 0) & (px < width) & (py >= 0) & (py < height)
        shift = tl.where(interpolation != 0, 0.5, 0.0)
        px, py = tl.where(inside, px - shift, 0.0), tl.where(inside, py - shift, 0.0)
        across, down = tl.floor(px), tl.floor(py)
        dx, dy = px - across, py - down
        dx, dy = tl.where(interpolation != 0, dx, 0.0), tl.where(interpolation != 0, dy, 0.0)
        at_x, at_y = across.to(tl.int32), down.to(tl.int32)
        r = _resampled(plane, at_x, at_y, dx, dy, cubic, height, width, CUBIC)
        g = _resampled(plane + pixels, at_x, at_y, dx, dy, cubic, height, width, CUBIC)
        b = _resampled(plane + 2 * pixels, at_x, at_y, dx, dy, cubic, height, width, CUBIC)
        r, g = tl.where(inside, r, tl.load(a + 13)), tl.where(inside, g, tl.load(a + 14))
        b = tl.where(inside, b, tl.load(a + 15))
    elif step == _SHARPNESS:
        factor = tl.load(a)
        r = _sharpened(plane, x, y, factor, height, width)
        g = _sharpened(plane + pixels, x, y, factor, height, width)
        b = _sharpened(plane + 2 * pixels, x, y, factor, height, width)
    else:
        of = table + row * 768
        r = tl.load(of + _tap(plane, x, y, height, width).to(tl.int32))
        g = tl.load(of + 256 + _tap(plane + pixels, x, y, height, width).to(tl.int32))
        b = tl.load(of + 512 + _tap(plane + 2 * pixels, x, y, height, width).to(tl.int32))
    r = over_255(r) * tl.load(ends) + tl.load(ends + 3)
    g = over_255(g) * tl.load(ends + 1) + tl.load(ends + 4)
    b = over_255(b) * tl.load(ends + 2) + tl.load(ends + 5)
    _store(dst, sample, block, r, g, b, height, width, LAYOUT, N)
