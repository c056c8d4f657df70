"""The Triton kernel that makes outputs of tiles on canvases; cuda.py launches it. gather.py states the formulas."""

from __future__ import annotations

import triton
import triton.language as tl

_NONE: tl.constexpr = tl.constexpr(-(2**62))  # no tile
_FAR: tl.constexpr = tl.constexpr(2.0**22)  # no canvas is as large, and 256 times as much fits into 32 bits


@triton.jit
def _position(m, i, j, shift, unit):  # type: ignore[no-untyped-def]
    at = (tl.load(m) * (j.to(tl.float64) + 0.5) + tl.load(m + 1) * (i.to(tl.float64) + 0.5)) + tl.load(m + 2)
    return tl.floor((tl.minimum(tl.maximum(at, -_FAR), _FAR) - shift) * unit + shift).to(tl.int32)


@triton.jit
def _blended(src, at00, at01, at10, at11, w00, w01, w10, w11, fill, mask):  # type: ignore[no-untyped-def]
    total = tl.load(src + at00, mask & (at00 > _NONE // 2), other=fill).to(tl.int32) * w00 + 32768
    total += tl.load(src + at01, mask & (at01 > _NONE // 2), other=fill).to(tl.int32) * w01
    total += tl.load(src + at10, mask & (at10 > _NONE // 2), other=fill).to(tl.int32) * w10
    total += tl.load(src + at11, mask & (at11 > _NONE // 2), other=fill).to(tl.int32) * w11
    return total >> 16


@triton.jit(do_not_specialize=["height", "width", "row", "fill"])
def _gather_kernel(  # type: ignore[no-untyped-def]
    src, dst, bases, limits, inverses, height, width, row, fill,
    COUNT: tl.constexpr, CHANNELS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Make images [B, H, W, C], or masks [B, H, W] if ``CHANNELS`` is 0.

    ``bases``: int64 [B, COUNT], where the first pixel of the canvas would be in each tile, in values from ``src``.
    ``limits``: int32 [B, COUNT, 6], ``visible``, ``add`` and ``most``. ``inverses``: float64 [B, 6]. ``row``: values
    from a pixel of a tile to the one below.
    """
    pixels = height * width
    blocks = tl.cdiv(pixels, N)
    output, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    p = block * N + tl.arange(0, N)
    mask = p < pixels
    i, j, m = p // width, p % width, inverses + output * 6
    limits += output * COUNT * 6
    bases += output * COUNT
    if CHANNELS == 0:
        x, y = _position(m, i, j, 0.0, 1.0), _position(m + 3, i, j, 0.0, 1.0)
        at, add, most = tl.full((N,), _NONE, tl.int64), tl.zeros((N,), tl.int32), tl.zeros((N,), tl.int32)
        for k in tl.static_range(COUNT):
            own = limits + 6 * k
            here = (x >= tl.load(own)) & (x < tl.load(own + 2)) & (y >= tl.load(own + 1)) & (y < tl.load(own + 3))
            at = tl.where(here, tl.load(bases + k), at)
            add = tl.where(here, tl.load(own + 4), add)
            most = tl.where(here, tl.load(own + 5), most)
        shown = at > _NONE
        value = tl.load(src + at + y.to(tl.int64) * row + x, mask & shown, other=0).to(tl.int32)
        value = tl.where((value > 0) & (value <= most), value + add, 0)
        tl.store(dst + output.to(tl.int64) * pixels + p, tl.where(shown, value, fill).to(dst.dtype.element_ty), mask)
        return
    x, y = _position(m, i, j, 0.5, 256.0), _position(m + 3, i, j, 0.5, 256.0)
    fx, fy, x, y = x & 255, y & 255, x >> 8, y >> 8
    at00, at01 = tl.full((N,), _NONE, tl.int64), tl.full((N,), _NONE, tl.int64)
    at10, at11 = tl.full((N,), _NONE, tl.int64), tl.full((N,), _NONE, tl.int64)
    for k in tl.static_range(COUNT):
        own = limits + 6 * k
        x1, y1, x2, y2 = tl.load(own), tl.load(own + 1), tl.load(own + 2), tl.load(own + 3)
        base = tl.load(bases + k)
        left, right = (x >= x1) & (x < x2), (x + 1 >= x1) & (x + 1 < x2)
        above, below = (y >= y1) & (y < y2), (y + 1 >= y1) & (y + 1 < y2)
        at00, at01 = tl.where(left & above, base, at00), tl.where(right & above, base, at01)
        at10, at11 = tl.where(left & below, base, at10), tl.where(right & below, base, at11)
    first = y.to(tl.int64) * row + x * CHANNELS
    at00, at01, at10, at11 = at00 + first, at01 + first + CHANNELS, at10 + first + row, at11 + first + row + CHANNELS
    w00, w01, w10, w11 = (256 - fx) * (256 - fy), fx * (256 - fy), (256 - fx) * fy, fx * fy
    dst += output.to(tl.int64) * pixels * CHANNELS
    for c in tl.static_range(CHANNELS):
        value = _blended(src + c, at00, at01, at10, at11, w00, w01, w10, w11, fill, mask)
        tl.store(dst + p.to(tl.int64) * CHANNELS + c, value.to(dst.dtype.element_ty), mask)
