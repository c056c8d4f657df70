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
def _bits(a):  # type: ignore[no-untyped-def]
    """The bits of a float64 argument."""
    low, high = tl.load(a).to(tl.int32, bitcast=True), tl.load(a + 1).to(tl.int32, bitcast=True)
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _fixed(a, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A float64 argument below 2^52 as an integer, in units of 2^-BITS. If it has lower bits, the last bit is set."""
    bits = _bits(a)
    exponent = (bits >> 52) & 2047
    mantissa = (bits & (2**52 - 1)) | tl.where(exponent > 0, 2**52, 0)
    shift = tl.minimum(tl.maximum(1075 - BITS - exponent, 0), 63)
    value = mantissa >> shift
    value |= ((value << shift) != mantissa).to(tl.int64)
    return tl.where(bits < 0, -value, value)


@triton.jit
def _position(a, x, y, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the matrix moves the centre of a pixel, in units of 2^-(BITS + 1), along one axis.

    Also returns 0 if that is the centre of a pixel for all pixels, else 1; whether all positions have at most 31 bits
    below 1; and whether the matrix is too large.
    """
    across, down, shift = _fixed(a, BITS), _fixed(a + 2, BITS), 2 * _fixed(a + 4, BITS)
    apart = ((across | down) & (2**BITS - 1)) | (((across + down + shift) & (2 ** (BITS + 1) - 1)) ^ 2**BITS)
    large = ((tl.abs(across) | tl.abs(down)) >> (BITS + 6)) | (tl.abs(shift) >> 53)
    exact = ((across | down | shift) & (2 ** (BITS - 30) - 1)) == 0
    return across * (2 * x + 1) + down * (2 * y + 1) + shift, (apart != 0).to(tl.int32), exact, large != 0


@triton.jit
def _position64(a, x, y):  # type: ignore[no-untyped-def]
    """As ``_position``, in float64 and rounded as Pillow does."""
    across, down, shift = _bits(a), _bits(a + 2), _bits(a + 4)
    ox, oy = x.to(tl.float64) + 0.5, y.to(tl.float64) + 0.5
    moved = _product64(across.to(tl.float64, bitcast=True), ox) + _product64(down.to(tl.float64, bitcast=True), oy)
    return moved + shift.to(tl.float64, bitcast=True)


@triton.jit
def _times(v, d):  # type: ignore[no-untyped-def]
    """Multiply: float64, or integers in units of 2^-20 and 2^-31, rounded down."""
    if d.dtype == tl.float64:
        return _product64(v, d)
    else:
        return ((v.to(tl.int64) * d.to(tl.int64)) >> 31).to(tl.int32)


@triton.jit
def _between(v0, v1, d):  # type: ignore[no-untyped-def]
    """Interpolate. The second result says whether the values differ."""
    return v0 + _times(v1 - v0, d), v0 != v1


@triton.jit
def _cubic(v1, v2, v3, v4, d):  # type: ignore[no-untyped-def]
    third = _times(-v1 + v2 - v3 + v4, d)
    value = v2 + _times((-v1 + v3) + _times((2 * (v1 - v2) + v3 - v4) + third, d), d)
    return value, (v1 != v2) | (v1 != v3) | (v1 != v4)


@triton.jit
def _value_at(plane, x, y, d, height, width):  # type: ignore[no-untyped-def]
    level = _tap(plane, x, y, height, width)
    if d.dtype == tl.float64:
        return level.to(tl.float64)
    else:
        return level.to(tl.int32) << 20


@triton.jit
def _line(plane, x, y, d, next_x, reach, height, width, CUBIC: tl.constexpr):  # type: ignore[no-untyped-def]
    v2, v3 = _value_at(plane, x, y, d, height, width), _value_at(plane, x + next_x, y, d, height, width)
    if CUBIC and reach == 2:
        v1 = _value_at(plane, x - next_x, y, d, height, width)
        value, differ = _cubic(v1, v2, v3, _value_at(plane, x + 2 * next_x, y, d, height, width), d)
    else:
        value, differ = _between(v2, v3, d)
    return value, differ


@triton.jit
def _resampled(plane, x, y, dx, dy, next_x, next_y, reach, height, width, CUBIC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Interpolate between levels. The second result says whether they differ.

    ``next_x``, ``next_y``: 1, or 0 along an axis where all pixels move by whole pixels.
    """
    # Triton takes a name whose value the first turn does not change for a constant of the loop: each has its own zeros
    v1, v2, v3, v4 = tl.zeros_like(dx), tl.zeros_like(dx), tl.zeros_like(dx), tl.zeros_like(dx)
    differ = dx != dx
    for j in range(1 - reach, 1 + reach):  # a loop takes fewer registers
        line, uneven = _line(plane, x, y + j * next_y, dx, next_x, reach, height, width, CUBIC)
        v1, v2, v3, v4, differ = v2, v3, v4, line, differ | uneven
    if CUBIC and reach == 2:
        value, uneven = _cubic(v1, v2, v3, v4, dy)
    else:
        value, uneven = _between(v3, v4, dy)
    return value, differ | uneven


@triton.jit
def _within(p, size):  # type: ignore[no-untyped-def]
    return (p >= 0) & ((p >> 41) < size)


@triton.jit
def _interpolated(plane, a, x, y, reach, height, width, CUBIC: tl.constexpr):  # type: ignore[no-untyped-def]
    """RESAMPLE between pixels.

    Many GPUs run float64 at 1/64 of the speed of float32. So integers give the levels. A block where their error could
    change a level is computed again, in float64. ``reach``: 1, or 2 for cubic interpolation.
    """
    pixels = height * width
    px, next_x, exact_x, large_x = _position(a, x, y, 40)
    py, next_y, exact_y, large_y = _position(a + 6, x, y, 40)
    # of a position, in units of 2^-41: the matrix is rounded to 2^-40
    error_x = tl.where(exact_x, 0, (height + width + 16) * 4)
    error_y = tl.where(exact_y, 0, (height + width + 16) * 4)
    inside = _within(px, width) & _within(py, height)
    again = _within(px - error_x, width) != _within(px + error_x, width)
    again |= _within(py - error_y, height) != _within(py + error_y, height)
    px, py = px - 2**40, py - 2**40  # from the centre of pixel 0
    # the neighbours are perhaps other ones
    others = (((px - error_x) >> 41) != ((px + error_x) >> 41)) | (((py - error_y) >> 41) != ((py + error_y) >> 41))
    at_x, at_y = (px >> 41).to(tl.int32), (py >> 41).to(tl.int32)
    dx, dy = ((px >> 10) & (2**31 - 1)).to(tl.int32), ((py >> 10) & (2**31 - 1)).to(tl.int32)
    # of a value, in units of 2^-20: each product is rounded down. Rounding down once does not change the level
    exact = exact_x & exact_y & ((next_x & next_y) == 0) & (reach == 1)
    error = tl.where(exact, 0, 4 * reach + ((height + width) >> 10))
    r, g, b = x.to(tl.float32), x.to(tl.float32), x.to(tl.float32)
    for c in range(3):
        value, differ = _resampled(plane + c * pixels, at_x, at_y, dx, dy, next_x, next_y, reach, height, width, CUBIC)
        r, g, b = g, b, tl.minimum(tl.maximum(value >> 20, 0), 255).to(tl.float32)
        again |= inside & (differ | others) & (((value - error) >> 20) != ((value + error) >> 20))
    if large_x | large_y | (tl.max(again.to(tl.int32), 0) > 0):
        qx, qy = _position64(a, x, y), _position64(a + 6, x, y)
        inside = (qx >= 0) & (qx < width) & (qy >= 0) & (qy < height)
        qx, qy = tl.where(inside, qx - 0.5, 0.0), tl.where(inside, qy - 0.5, 0.0)
        across, down = tl.floor(qx), tl.floor(qy)
        ex, ey, at_x, at_y = qx - across, qy - down, across.to(tl.int32), down.to(tl.int32)
        for c in range(3):
            value, _ = _resampled(plane + c * pixels, at_x, at_y, ex, ey, next_x, next_y, reach, height, width, CUBIC)
            r, g, b = g, b, tl.floor(tl.minimum(tl.maximum(value, 0.0), 255.0)).to(tl.float32)
    return r, g, b, inside


@triton.jit
def _sharpened(plane, x, y, factor, height, width):  # type: ignore[no-untyped-def]
    v = _tap(plane, x, y, height, width)
    total = 4.0 * v
    for k in tl.static_range(9):
        total += _tap(plane, x + k % 3 - 1, y + k // 3 - 1, height, width)
    smooth = ((total * 2 + 13).to(tl.int32) // 26).to(tl.float32)  # rounded half up
    border = (x == 0) | (y == 0) | (x == width - 1) | (y == height - 1)  # is not smoothed
    return _blended(tl.where(border, v, smooth), v, factor)


@triton.jit(do_not_specialize=["column", "steps"])
def _pillow_kernel(  # type: ignore[no-untyped-def]
    src, dst, samples, code, args, table, ends, height, width, column, steps,
    LAYOUT: tl.constexpr, INTERPOLATION: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Run RESAMPLE, SHARPNESS, AUTOCONTRAST or EQUALIZE on a block of ``src``, then apply ``ends``.

    ``INTERPOLATION``: the largest index in INTERPOLATIONS of any sample.
    """
    pixels = height * width
    row, block = tl.program_id(0) // tl.cdiv(pixels, N), tl.program_id(0) % tl.cdiv(pixels, N)
    sample = tl.load(samples + row)
    step, a = tl.load(code + sample * steps + column), args + (sample * steps + column) * _ARGS
    p = block * N + tl.arange(0, N)
    x, y = p % width, p // width
    plane = src + row.to(tl.int64) * pixels * 3
    if step == _RESAMPLE:
        interpolation = tl.load(a + 12).to(tl.int32)  # an index in INTERPOLATIONS
        if INTERPOLATION > 0 and interpolation != 0:
            r, g, b, inside = _interpolated(plane, a, x, y, interpolation, height, width, INTERPOLATION == 2)
        else:  # the matrix has multiples of 2^-17, or it only shifts
            at_x, at_y = _position(a, x, y, 30)[0] >> 31, _position(a + 6, x, y, 30)[0] >> 31
            inside = (at_x >= 0) & (at_x < width) & (at_y >= 0) & (at_y < height)
            at_x, at_y = tl.where(inside, at_x, 0).to(tl.int32), tl.where(inside, at_y, 0).to(tl.int32)
            r = _tap(plane, at_x, at_y, height, width)
            g = _tap(plane + pixels, at_x, at_y, height, width)
            b = _tap(plane + 2 * pixels, at_x, at_y, height, width)
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
