"""The Triton kernels of the fused backend; cuda.py launches them.

A thread block works on one sample, so branches on the steps cause no divergence. The instructions of the recipe
`standard`, about a hundred per pixel, take as long as its memory transfers. So a thread handles 8
pixels, a load has 8 bytes, a store has 16 bytes, and clamps are part of the arithmetic instructions (``.sat``).
test_triton_kernels.py compiles the kernels without a GPU and checks the instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpuaug.augment.ops.codes import ARGS, PILLOW_FLAG, Code

_ADD: tl.constexpr = tl.constexpr(int(Code.ADD))
_CONTRAST: tl.constexpr = tl.constexpr(int(Code.CONTRAST))
_SATURATION: tl.constexpr = tl.constexpr(int(Code.SATURATION))
_HUE: tl.constexpr = tl.constexpr(int(Code.HUE))
_GRAY: tl.constexpr = tl.constexpr(int(Code.GRAY))
_SOLARIZE: tl.constexpr = tl.constexpr(int(Code.SOLARIZE))
_POSTERIZE: tl.constexpr = tl.constexpr(int(Code.POSTERIZE))
_INVERT: tl.constexpr = tl.constexpr(int(Code.INVERT))
_GAMMA: tl.constexpr = tl.constexpr(int(Code.GAMMA))
_SHUFFLE: tl.constexpr = tl.constexpr(int(Code.SHUFFLE))
_ERASE: tl.constexpr = tl.constexpr(int(Code.ERASE))
_LEVELS: tl.constexpr = tl.constexpr(int(Code.LEVELS))
# The parts of 1/255. For a level x, x * _PART_1 is exact, so x * _PART_1 + x * _PART_2 is rounded like x / 255.
_PART_1: tl.constexpr = tl.constexpr(257 / 65536)
_PART_2: tl.constexpr = tl.constexpr(1 / 255 - 257 / 65536)
_ARGS: tl.constexpr = tl.constexpr(ARGS)
_PILLOW: tl.constexpr = tl.constexpr(PILLOW_FLAG)
_REST: tl.constexpr = tl.constexpr(65536 / (255 * 257) - 1)
_FIXED: tl.constexpr = tl.constexpr(2.0**24)  # gray becomes an integer in units of 2^-24: sums are exact in any order


@triton.jit
def _unit(x):  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise("cvt.sat.f32.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _reciprocal(x):  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _cos(x):  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _sin(x):  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def over_255(x):  # type: ignore[no-untyped-def]
    """Compute ``x / 255``, correctly rounded, for a level ``x`` in 0..255."""
    return x * _PART_1 + x * _PART_2


@triton.jit
def _value(bits):  # type: ignore[no-untyped-def]
    part = tl.fma(bits, _PART_1, -8388608.0 * _PART_1)  # `bits` is 2^23 + byte, so this is byte * _PART_1 exactly
    return part * _REST + part


# --- one step


@triton.jit
def _product(x, y):  # type: ignore[no-untyped-def]
    """Multiply and round. The compiler cannot merge this product with an addition."""
    code: tl.constexpr = "mul.rn.f32 $0, $1, $2;"
    return tl.inline_asm_elementwise(code, "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _level(x):  # type: ignore[no-untyped-def]
    """The level 0..255 of a pixel in 0..1."""
    return tl.floor(x * 255.0 + 0.5)


@triton.jit
def _gray_level(r, g, b):  # type: ignore[no-untyped-def]
    """The gray level 0..255 that Pillow computes from levels of red, green and blue."""
    return tl.floor((r * 19595.0 + g * 38470.0 + b * 7471.0 + 32768.0) * (1.0 / 65536.0))  # exact: sums are below 2^24


@triton.jit
def _blended(start, v, factor):  # type: ignore[no-untyped-def]
    return tl.floor(tl.minimum(tl.maximum(start + _product(v - start, factor), 0.0), 255.0))


@triton.jit
def _solarized_level(v, threshold, addition, keep):  # type: ignore[no-untyped-def]
    added = tl.floor(tl.minimum(tl.maximum(v + addition, 0.0), 255.0))
    return tl.where(v < threshold, added, tl.where(keep != 0.0, v, 255.0 - v))


@triton.jit
def _kept(level, bits):  # type: ignore[no-untyped-def]
    """The first ``bits`` bits of a level."""
    shift = 8 - tl.minimum(tl.maximum(bits.to(tl.int32), 0), 8)
    return ((level.to(tl.int32) >> shift) << shift).to(tl.float32)


@triton.jit
def _posterized(x, bits):  # type: ignore[no-untyped-def]
    return tl.where(bits >= 8.0, x, over_255(_kept(x * 255.0, bits)))


@triton.jit
def _pillow_step(code, a0, a1, a2, r, g, b, mean_level):  # type: ignore[no-untyped-def]
    """Run one step with Pillow's arithmetic."""
    half = tl.where(code == _LEVELS, a0, 0.5)
    r, g, b = tl.floor(r * 255.0 + half), tl.floor(g * 255.0 + half), tl.floor(b * 255.0 + half)
    if code == _SATURATION:
        gray = _gray_level(r, g, b)
        r, g, b = _blended(gray, r, a0), _blended(gray, g, a0), _blended(gray, b, a0)
    elif code <= _CONTRAST:  # MULTIPLY or CONTRAST
        start = tl.where(code == _CONTRAST, mean_level, 0.0)
        r, g, b = _blended(start, r, a0), _blended(start, g, a0), _blended(start, b, a0)
    elif code == _SOLARIZE:
        r, g, b = _solarized_level(r, a0, a1, a2), _solarized_level(g, a0, a1, a2), _solarized_level(b, a0, a1, a2)
    elif code == _POSTERIZE:
        r, g, b = _kept(r, a0), _kept(g, a0), _kept(b, a0)
    return over_255(r), over_255(g), over_255(b)


@triton.jit
def _power(x, gamma):  # type: ignore[no-untyped-def]
    positive = tl.exp2(gamma * tl.log2(tl.maximum(x, 1e-30)))
    return tl.where(x > 0.0, positive, tl.where(gamma == 0.0, 1.0, 0.0))


@triton.jit
def _solarized(x, threshold, addition):  # type: ignore[no-untyped-def]
    z = _unit(x + addition)
    return tl.where(z < threshold, z, 1.0 - z)


@triton.jit
def _linear(code, x, own, a0, around):  # type: ignore[no-untyped-def]
    """Run MULTIPLY, ADD or CONTRAST on a channel with the argument ``own``."""
    add, contrast = code == _ADD, code == _CONTRAST
    scale = tl.where(add, 1.0, tl.where(contrast, a0, own))
    return _unit(x * scale + tl.where(add, own, tl.where(contrast, around, 0.0)))


@triton.jit
def _in_hsv(code, a0, r, g, b):  # type: ignore[no-untyped-def]
    """Run SATURATION_HSV or HUE."""
    top, bottom = tl.maximum(tl.maximum(r, g), b), tl.minimum(tl.minimum(r, g), b)
    delta = top - bottom
    if code == _HUE:
        red, green = r == top, g == top
        difference = tl.where(red, g - b, tl.where(green, b - r, r - g))
        turns = 6.0 * a0
        start = tl.where(red, turns, tl.where(green, turns + 2.0, turns + 4.0))
        h = difference * _reciprocal(tl.maximum(delta, 1e-30)) + start
        h = h - 6.0 * tl.floor(h * (1.0 / 6.0))
        r = top - delta * _unit(2.0 - tl.abs(h - 3.0))
        g = top - delta * _unit(tl.abs(h - 2.0) - 1.0)
        b = top - delta * _unit(tl.abs(h - 4.0) - 1.0)
    else:
        adjusted = top * _unit(delta / tl.where(top == 0.0, 1.0, top + 1e-8) * a0)
        ratio, base = adjusted / tl.where(delta == 0.0, 1.0, delta), top - adjusted
        r = _unit((r - bottom) * ratio + base)
        g = _unit((g - bottom) * ratio + base)
        b = _unit((b - bottom) * ratio + base)
    return r, g, b


@triton.jit
def _step(code, a, r, g, b, loose, p, width, mean, mean_level, PILLOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Run one step on the pixels ``p`` of an image. ``loose``: colours may be outside 0..1."""
    a0, a1, a2 = tl.load(a), tl.load(a + 1), tl.load(a + 2)
    pillow = False
    if PILLOW:
        pillow = (code == _LEVELS) | ((tl.load(a + _PILLOW) != 0.0) & (code != _GRAY) & (code != _ERASE))
    if (loose != 0) & (code != _GRAY) & (code != _INVERT) & (code != _SHUFFLE) & (code != _ERASE):
        r, g, b = _unit(r), _unit(g), _unit(b)
        loose = 0
    if pillow:
        r, g, b = _pillow_step(code, a0, a1, a2, r, g, b, mean_level)
    elif code <= _CONTRAST:  # MULTIPLY, ADD and CONTRAST are all x * scale + shift
        around = mean * (1.0 - a0)
        r, g, b = _linear(code, r, a0, a0, around), _linear(code, g, a1, a0, around), _linear(code, b, a2, a0, around)
    elif code == _SATURATION:
        gray = (1.0 - a0) * (r * 0.299 + g * 0.587 + b * 0.114)
        r, g, b = _unit(gray + a0 * r), _unit(gray + a0 * g), _unit(gray + a0 * b)
    elif code <= _HUE:
        r, g, b = _in_hsv(code, a0, r, g, b)
    elif code == _GRAY:
        gray = r * a0 + g * a1 + b * a2
        r, g, b = gray, gray, gray
        loose = tl.where(tl.load(a + 3) != 0.0, 1, loose)
    elif code == _SOLARIZE:
        r, g, b = _solarized(r, a0, a1), _solarized(g, a0, a1), _solarized(b, a0, a1)
    elif code == _POSTERIZE:
        r, g, b = _posterized(r, a0), _posterized(g, a0), _posterized(b, a0)
    elif code == _INVERT:
        r, g, b = a0 - r, a0 - g, a0 - b
        loose = 1
    elif code == _GAMMA:
        r, g, b = _unit(a1 * _power(r, a0)), _unit(a1 * _power(g, a0)), _unit(a1 * _power(b, a0))
    elif code == _SHUFFLE:
        c0 = tl.where(a0 == 0.0, r, tl.where(a0 == 1.0, g, b))
        c1 = tl.where(a1 == 0.0, r, tl.where(a1 == 1.0, g, b))
        c2 = tl.where(a2 == 0.0, r, tl.where(a2 == 1.0, g, b))
        r, g, b = c0, c1, c2
    elif code == _ERASE:
        x, y = p % width, p // width
        inside = (x >= a0) & (x < a0 + a2) & (y >= a1) & (y < a1 + tl.load(a + 3))
        value = tl.load(a + 4)
        r, g, b = tl.where(inside, value, r), tl.where(inside, value, g), tl.where(inside, value, b)
        loose = 1
    return r, g, b, loose


@triton.jit
def _byte(low, high, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert byte ``K`` (0..7) to a float in 0..1. The bits 0x4B000000 | byte are the float 2^23 + byte."""
    word = low if K < 4 else high
    bits = ((word >> (8 * (K % 4))) & 255) | 0x4B000000
    return _value(bits.to(tl.float32, bitcast=True))


@triton.jit
def _in_a_row(x0, x1, x2, x3, x4, x5, x6, x7, BACKWARDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Interleave eight blocks [n] into one block [8 n]."""
    if BACKWARDS:
        x0, x1, x2, x3, x4, x5, x6, x7 = x7, x6, x5, x4, x3, x2, x1, x0
    even = tl.join(tl.join(x0, x4), tl.join(x2, x6))
    odd = tl.join(tl.join(x1, x5), tl.join(x3, x7))
    return tl.reshape(tl.join(even, odd), (8 * x0.shape[0],))


@triton.jit
def _unpacked(low0, high0, low1, high1, low2, high2, BACKWARDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Extract red, green and blue of 8 pixels from three words of 8 bytes, each given as two halves."""
    r = _in_a_row(
        _byte(low0, high0, 0), _byte(low0, high0, 3), _byte(low0, high0, 6), _byte(low1, high1, 1),
        _byte(low1, high1, 4), _byte(low1, high1, 7), _byte(low2, high2, 2), _byte(low2, high2, 5), BACKWARDS,
    )  # fmt: skip
    g = _in_a_row(
        _byte(low0, high0, 1), _byte(low0, high0, 4), _byte(low0, high0, 7), _byte(low1, high1, 2),
        _byte(low1, high1, 5), _byte(low2, high2, 0), _byte(low2, high2, 3), _byte(low2, high2, 6), BACKWARDS,
    )  # fmt: skip
    b = _in_a_row(
        _byte(low0, high0, 2), _byte(low0, high0, 5), _byte(low1, high1, 0), _byte(low1, high1, 3),
        _byte(low1, high1, 6), _byte(low2, high2, 1), _byte(low2, high2, 4), _byte(low2, high2, 7), BACKWARDS,
    )  # fmt: skip
    return r, g, b


@triton.jit
def _fraction(x, high, low, DIVIDES: tl.constexpr):  # type: ignore[no-untyped-def]
    if DIVIDES:
        return tl.fma(x.to(tl.float32), high, x.to(tl.float32) * low)
    if x.dtype == tl.uint8:
        return over_255(x.to(tl.float32))
    return x.to(tl.float32)


@triton.jit
def _load(  # type: ignore[no-untyped-def]
    src, sample, block, flip, height, width, high, low, KIND: tl.constexpr, DIVIDES: tl.constexpr, N: tl.constexpr
):
    """Load a block of the flipped image as fractions of white.

    KIND 0: planes; 1: channels last; 2: bytes, channels last, in words of 8 bytes (if width % 8 == 0). ``DIVIDES``:
    whether white is another value than 1 of floats or 255 of bytes; its inverse is ``high + low``.
    """
    pixels = height * width
    if KIND == 2:
        group = block * (N // 8) + tl.arange(0, N // 8)
        mask = group * 8 < pixels
        if flip != 0:
            across = width // 8
            x, y = group % across, group // across
            x = tl.where((flip & 1) != 0, across - 1 - x, x)
            y = tl.where((flip & 2) != 0, height - 1 - y, y)
            group = y * across + x
        at = src + sample.to(tl.int64) * (pixels // 8 * 3) + group * 3
        w0, w1, w2 = tl.load(at, mask, 0), tl.load(at + 1, mask, 0), tl.load(at + 2, mask, 0)
        low0, low1, low2 = w0.to(tl.int32), w1.to(tl.int32), w2.to(tl.int32)
        high0, high1, high2 = (w0 >> 32).to(tl.int32), (w1 >> 32).to(tl.int32), (w2 >> 32).to(tl.int32)
        if (flip & 1) != 0:
            r, g, b = _unpacked(low0, high0, low1, high1, low2, high2, True)
        else:
            r, g, b = _unpacked(low0, high0, low1, high1, low2, high2, False)
    else:
        p = block * N + tl.arange(0, N)
        mask = p < pixels
        if flip != 0:
            x, y = p % width, p // width
            x = tl.where((flip & 1) != 0, width - 1 - x, x)
            y = tl.where((flip & 2) != 0, height - 1 - y, y)
            p = y * width + x
        at = src + sample.to(tl.int64) * pixels * 3
        at += p * 3 if KIND else p
        apart = 1 if KIND else pixels
        r = _fraction(tl.load(at, mask, 0), high, low, DIVIDES)
        g = _fraction(tl.load(at + apart, mask, 0), high, low, DIVIDES)
        b = _fraction(tl.load(at + 2 * apart, mask, 0), high, low, DIVIDES)
    return r, g, b


@triton.jit(do_not_specialize=["high", "low", "first", "last", "steps"])
def _mean_kernel(  # type: ignore[no-untyped-def]
    src, code, args, flips, sums, height, width, high, low, first, last, steps,
    KIND: tl.constexpr, DIVIDES: tl.constexpr, LOOSE: tl.constexpr, CHANNELS: tl.constexpr, PILLOW: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Add each sample's sum of gray before its contrast step to ``sums``, int64 [B] in units of 2^-24.

    With other ``CHANNELS`` than 3, a sample is three channels of an image, and all channels are added to the sum of the
    image's first sample.
    """
    SAMPLES: tl.constexpr = (CHANNELS + 2) // 3  # of an image
    blocks = tl.cdiv(height * width, N)
    sample, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    place = last
    erased = 0
    for s in range(first, last):
        number = tl.load(code + sample * steps + s)
        if number == _CONTRAST:
            place = s
        if number == _ERASE:
            erased = 1
    if place < last:
        flip = tl.where(erased != 0, tl.load(flips + sample), 0)  # a flip changes the mean only if a box is erased
        r, g, b = _load(src, sample, block, flip, height, width, high, low, KIND, DIVIDES, N)
        p = block * N + tl.arange(0, N)
        loose = 1 if LOOSE else 0
        for s in range(first, place):
            number = tl.load(code + sample * steps + s)
            if number > 2:
                a = args + (sample * steps + s) * _ARGS
                r, g, b, loose = _step(number, a, r, g, b, loose, p, width, 0.0, 0.0, PILLOW)
        r, g, b = _unit(r), _unit(g), _unit(b)
        if CHANNELS == 3:
            gray = r * 0.299 + g * 0.587 + b * 0.114
        else:  # the last sample of an image can have copies of its last channel
            left = CHANNELS - sample % SAMPLES * 3
            sample = sample // SAMPLES * SAMPLES
            gray = r + tl.where(left > 1, g, 0.0) + tl.where(left > 2, b, 0.0)
        pillow = False
        if PILLOW:
            pillow = tl.load(args + (sample * steps + place) * _ARGS + _PILLOW) != 0.0
        if pillow:
            gray = _gray_level(_level(r), _level(g), _level(b)) * (
                1.0 / 256.0
            )  # a multiple of 2^-8: its sums are exact
        total = tl.sum(tl.where(p < height * width, gray, 0.0), axis=0)
        tl.atomic_add(sums + sample, (total * _FIXED).to(tl.int64), sem="relaxed")


@triton.jit
def _apart(x):  # type: ignore[no-untyped-def]
    """The inverse of `_in_a_row`."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0] // 8, 2, 2, 2)))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x2, x6 = tl.split(x26)
    x1, x5 = tl.split(x15)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _store(dst, sample, block, r, g, b, height, width, LAYOUT: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store a block. LAYOUT 0: planes; 1: channels last; 2: channels last in groups of 8 (if width % 8 == 0)."""
    pixels = height * width
    p = block * N + tl.arange(0, N)
    mask = p < pixels
    base = dst + sample.to(tl.int64) * pixels * 3
    kind = dst.dtype.element_ty
    if kind == tl.uint16:
        r, g, b = _unit(r) * 65535.0 + 0.5, _unit(g) * 65535.0 + 0.5, _unit(b) * 65535.0 + 0.5
    r, g, b = r.to(kind), g.to(kind), b.to(kind)
    if LAYOUT < 2:
        at = base + (p * 3 if LAYOUT else p)
        apart = 1 if LAYOUT else pixels
        tl.store(at, r, mask)
        tl.store(at + apart, g, mask)
        tl.store(at + 2 * apart, b, mask)
    else:  # the 24 values of 8 pixels, in three stores of 8
        r0, r1, r2, r3, r4, r5, r6, r7 = _apart(r)
        g0, g1, g2, g3, g4, g5, g6, g7 = _apart(g)
        b0, b1, b2, b3, b4, b5, b6, b7 = _apart(b)
        at = base + (p // 8) * 24 + p % 8
        tl.store(at, _in_a_row(r0, g0, b0, r1, g1, b1, r2, g2, False), mask)
        tl.store(at + 8, _in_a_row(b2, r3, g3, b3, r4, g4, b4, r5, False), mask)
        tl.store(at + 16, _in_a_row(g5, b5, r6, g6, b6, r7, g7, b7, False), mask)


@triton.jit(do_not_specialize=["high", "low", "first", "last", "steps"])
def _points_kernel(  # type: ignore[no-untyped-def]
    src, dst, mid, code, args, flips, sums, places, ends, height, width, high, low, first, last, steps,
    KIND: tl.constexpr, DIVIDES: tl.constexpr, LOOSE: tl.constexpr, CHANNELS: tl.constexpr, LAYOUT: tl.constexpr,
    STEPS: tl.constexpr, MEAN: tl.constexpr, PILLOW: tl.constexpr, COPIES: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Run the steps [first, last) of every sample, then scale and shift each channel by ``ends``, float32 [n, 8].

    ``STEPS``: whether any sample has other steps than flips. ``LOOSE``: whether colours of ``src`` may be outside 0..1.
    An image of other ``CHANNELS`` than 3 consists of n samples.

    ``COPIES``: if ``place = places[sample]`` is not -1, the sample is stored in row ``place`` of ``mid``. Another
    kernel continues there and applies ``ends``.
    """
    SAMPLES: tl.constexpr = (CHANNELS + 2) // 3
    if KIND == 2 or LAYOUT == 2:
        width = tl.multiple_of(width, 8)
    # start with the last pixels: they are still in the cache, because the mean kernel ended there
    at, pixels = tl.num_programs(0) - 1 - tl.program_id(0), height * width
    sample, block = at // tl.cdiv(pixels, N), at % tl.cdiv(pixels, N)
    r, g, b = _load(src, sample, block, tl.load(flips + sample), height, width, high, low, KIND, DIVIDES, N)
    p = block * N + tl.arange(0, N)
    loose = 1 if LOOSE else 0
    mean, mean_level = 0.0, 0.0
    if MEAN:
        if CHANNELS == 3:
            total, count = tl.load(sums + sample), pixels
        else:
            total, count = tl.load(sums + sample // SAMPLES * SAMPLES), pixels * CHANNELS
        mean = total.to(tl.float32) * (1.0 / _FIXED) / count
        if PILLOW:  # round half up; an integer remainder then corrects the float quotient
            nearest = tl.floor(mean * 256.0 + 0.5).to(tl.int64)
            rest = (total >> 15) + pixels - 2 * pixels * nearest
            nearest += (rest >= 2 * pixels).to(tl.int64) - (rest < 0).to(tl.int64)
            mean_level = nearest.to(tl.float32)
    if STEPS:
        for s in range(first, last):
            number = tl.load(code + sample * steps + s)
            if ((number > 2) & (number <= _ERASE)) | (number == _LEVELS):
                a = args + (sample * steps + s) * _ARGS
                r, g, b, loose = _step(number, a, r, g, b, loose, p, width, mean, mean_level, PILLOW)
    place = -1
    if COPIES:
        place = tl.load(places + sample)
    if place >= 0:
        _store(mid, place, block, r, g, b, height, width, 0, N)
    else:
        if CHANNELS != 3:
            ends += sample % SAMPLES * 8
        r = r * tl.load(ends) + tl.load(ends + 3)
        g = g * tl.load(ends + 1) + tl.load(ends + 4)
        b = b * tl.load(ends + 2) + tl.load(ends + 5)
        _store(dst, sample, block, r, g, b, height, width, LAYOUT, N)


@triton.jit
def _border(i, size, border):  # type: ignore[no-untyped-def]
    """Move a position from -size..2*size-1 into the image. The second result is False in a border of zeros."""
    last = size - 1
    j = i
    if border == 1:
        j = last - tl.abs(last - tl.abs(i))
    elif border == 3:
        j = tl.where(i < 0, i + size, tl.where(i > last, i - size, i))
    j = tl.minimum(tl.maximum(j, 0), last)
    return j, (i == j).to(tl.int32) + border > 0


@triton.jit
def _weights(distance, half, rate):  # type: ignore[no-untyped-def]
    return tl.where(tl.abs(distance) <= half, tl.exp2(distance * distance * rate), 0.0)


@triton.jit
def _sum_of_weights(half, rate):  # type: ignore[no-untyped-def]
    total = 1.0
    for d in range(1, half + 1):
        total += 2.0 * tl.exp2(rate * d * d)
    return total


@triton.jit(do_not_specialize=["column", "steps"])
def _blur_kernel(  # type: ignore[no-untyped-def]
    src, dst, samples, args, ends, height, width, column, steps,
    CHANNELS: tl.constexpr, CHANNELS_LAST: tl.constexpr, R: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Blur a tile of one plane of ``src``, float32 or uint16, along x and then y, and apply ``ends``.

    Each direction is a product with a matrix of weights, K pixels at a time. tf32x3 has errors near those of float32,
    and runs on tensor cores; without them (sm_75), it is float32.
    """
    SAMPLES: tl.constexpr = (CHANNELS + 2) // 3
    across = tl.cdiv(width, C)
    tiles = across * tl.cdiv(height, R)
    plane, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    sample, channel = tl.load(samples + plane // 3), plane % 3
    a = args + (sample * steps + column) * _ARGS
    half_x, half_y = tl.load(a).to(tl.int32) // 2, tl.load(a + 1).to(tl.int32) // 2
    sigma, border = tl.load(a + 2), tl.load(a + 3).to(tl.int32)
    rate = -0.7213475204444817 / tl.maximum(sigma * sigma, 1e-30)  # exp2(d^2 rate) = exp(-d^2 / (2 sigma^2))
    pixels = height * width
    src += plane.to(tl.int64) * pixels
    top, left = tile // across * R, tile % across * C
    y, x, k = tl.arange(0, R), tl.arange(0, C), tl.arange(0, K)
    apart = (k[:, None] - x[None, :]).to(tl.float32)
    value = tl.zeros((R, C), tl.float32)
    for from_y in tl.range(-half_y, R + half_y, K, num_stages=1):
        at_y, counts_y = _border(top + from_y + k, height, border)
        counts_y = (counts_y & (from_y + k < R + half_y))[:, None]
        line = src + (at_y * width)[:, None]
        rows = tl.zeros((K, C), tl.float32)  # blurred along x
        for from_x in tl.range(-half_x, C + half_x, K, num_stages=1):
            at_x, counts_x = _border(left + from_x + k, width, border)
            counts_x = (counts_x & (from_x + k < C + half_x))[None, :]
            block = tl.load(line + at_x[None, :], counts_y & counts_x, 0).to(tl.float32)
            rows = tl.dot(block, _weights(apart + from_x, half_x, rate), rows, input_precision="tf32x3")
        weights = _weights((from_y + k[None, :] - y[:, None]).to(tl.float32), half_y, rate)
        value = tl.dot(weights, rows, value, input_precision="tf32x3")
    total = _sum_of_weights(half_x, rate) * _sum_of_weights(half_y, rate)
    if src.dtype.element_ty == tl.uint16:
        total *= 65535.0
    if CHANNELS != 3:
        ends += sample % SAMPLES * 8
    value = value * (tl.load(ends + channel) / total) + tl.load(ends + 3 + channel)
    y, x = (top + y)[:, None], (left + x)[None, :]
    to = (y * width + x) * 3 + channel if CHANNELS_LAST else channel * pixels + y * width + x
    dst += sample.to(tl.int64) * pixels * 3
    tl.store(dst + to, value.to(dst.dtype.element_ty), (y < height) & (x < width))


# --- noise


@triton.jit
def _uniforms(words):  # type: ignore[no-untyped-def]
    return ((words >> 8).to(tl.float32) + 0.5) * (2.0**-24)


@triton.jit
def _philox(seed, position):  # type: ignore[no-untyped-def]
    """Compute value ``position`` (uint32) of a sample's stream. A Philox block gives four values."""
    block = (position // 4).to(tl.uint32)
    zero = block * 0
    w0, w1, w2, w3 = tl.philox(seed, block, zero, zero, zero)
    lane = position % 4
    return tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))


@triton.jit
def _normal_kernel(keys, dst, count, half, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write normal noise from ``keys`` int64 [B, 2] to ``dst`` float32 [B, count]; half = (count + 1) // 2."""
    row = tl.program_id(0) // tl.cdiv(half, N)
    at = tl.program_id(0) % tl.cdiv(half, N) * N + tl.arange(0, N)
    mask = at < half
    seed = tl.load(keys + 2 * row) | (tl.load(keys + 2 * row + 1) << 32)
    radius = tl.sqrt(-2.0 * tl.log(_uniforms(_philox(seed, at))))
    # in -pi..pi, errors of _sin and _cos are below 2^-20.9
    angle = 6.283185307179586 * (_uniforms(_philox(seed, half + at)) - 0.5)
    to = dst + row.to(tl.int64) * count
    tl.store(to + at, -radius * _cos(angle), mask)
    tl.store(to + half + at, -radius * _sin(angle), mask & (half + at < count))
