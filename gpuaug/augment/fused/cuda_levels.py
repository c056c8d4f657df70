"""Triton functions: colour steps with Pillow's arithmetic, and conversions between levels 0..255 and pixels 0..1."""

from __future__ import annotations

import triton
import triton.language as tl

from gpuaug.augment.ops.codes import Code

_CONTRAST: tl.constexpr = tl.constexpr(int(Code.CONTRAST))
_SATURATION: tl.constexpr = tl.constexpr(int(Code.SATURATION))
_SOLARIZE: tl.constexpr = tl.constexpr(int(Code.SOLARIZE))
_POSTERIZE: tl.constexpr = tl.constexpr(int(Code.POSTERIZE))
_LEVELS: tl.constexpr = tl.constexpr(int(Code.LEVELS))
# PART_1 + PART_2 is 1/255. For a level x, x * PART_1 is exact, so x * PART_1 + x * PART_2 is rounded like x / 255.
PART_1: tl.constexpr = tl.constexpr(257 / 65536)
PART_2: tl.constexpr = tl.constexpr(1 / 255 - 257 / 65536)


@triton.jit
def over_255(x):  # type: ignore[no-untyped-def]
    """Compute ``x / 255``, correctly rounded, for a level ``x`` in 0..255."""
    return x * PART_1 + x * PART_2


@triton.jit
def _product(x, y):  # type: ignore[no-untyped-def]
    """Multiply and round. The compiler cannot merge this product with an addition."""
    code: tl.constexpr = "mul.rn.f32 $0, $1, $2;"
    return tl.inline_asm_elementwise(code, "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def level(x):  # type: ignore[no-untyped-def]
    """The level 0..255 of a pixel in 0..1."""
    return tl.floor(x * 255.0 + 0.5)


@triton.jit
def gray_level(r, g, b):  # type: ignore[no-untyped-def]
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
def pillow_step(code, a0, a1, a2, r, g, b, mean_level):  # type: ignore[no-untyped-def]
    """Run one step with Pillow's arithmetic."""
    half = tl.where(code == _LEVELS, a0, 0.5)
    r, g, b = tl.floor(r * 255.0 + half), tl.floor(g * 255.0 + half), tl.floor(b * 255.0 + half)
    if code == _SATURATION:
        gray = gray_level(r, g, b)
        r, g, b = _blended(gray, r, a0), _blended(gray, g, a0), _blended(gray, b, a0)
    elif code <= _CONTRAST:  # MULTIPLY or CONTRAST
        start = tl.where(code == _CONTRAST, mean_level, 0.0)
        r, g, b = _blended(start, r, a0), _blended(start, g, a0), _blended(start, b, a0)
    elif code == _SOLARIZE:
        r, g, b = _solarized_level(r, a0, a1, a2), _solarized_level(g, a0, a1, a2), _solarized_level(b, a0, a1, a2)
    elif code == _POSTERIZE:
        mask = 255 << (8 - tl.minimum(tl.maximum(a0.to(tl.int32), 0), 8))
        r = (r.to(tl.int32) & mask).to(tl.float32)
        g = (g.to(tl.int32) & mask).to(tl.float32)
        b = (b.to(tl.int32) & mask).to(tl.float32)
    return over_255(r), over_255(g), over_255(b)
