"""The Triton kernels that crop and resize batches of images; cuda.py launches them.

One kernel computes the weights of all images, another one the pixels. Images of uint8 keep their levels: weights,
sums and rounding are those of resize.cpp, to the bit. Others become floats.

Each pixel of the result adds up its own rows and columns. That reads every value of the windows about four times, from
the caches, and takes no memory between columns and rows.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _triangle(x):  # type: ignore[no-untyped-def]
    return tl.maximum(1.0 - x, 0.0)


@triton.jit
def _cubic(x):  # type: ignore[no-untyped-def]
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    return tl.where(x < 1.0, near, tl.where(x < 2.0, far, 0.0))


@triton.jit
def _weight(begin, n, center, inverse, t, CUBIC: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.abs(((begin + t).to(tl.float64) - center + 0.5) * inverse)
    return tl.where(t < n, _cubic(x) if CUBIC else _triangle(x), 0.0)


@triton.jit
def _taken(i, size, resized, REACH: tl.constexpr):  # type: ignore[no-untyped-def]
    """For positions ``i`` of the resized window: their centres in the window, first pixels and numbers of pixels."""
    scale = size.to(tl.float64) / resized.to(tl.float64)
    support = tl.where(scale >= 1.0, REACH * scale, REACH)
    inverse = tl.where(scale >= 1.0, 1.0 / scale, 1.0)
    center = scale * (i.to(tl.float64) + 0.5)
    begin = tl.maximum((center - support + 0.5).to(tl.int32), 0)
    n = tl.maximum(tl.minimum((center + support + 0.5).to(tl.int32), size) - begin, 0)
    return center, begin, n, inverse


@triton.jit(do_not_specialize=["batch", "height", "width", "taps", "most"])
def _axis_kernel(  # type: ignore[no-untyped-def]
    windows, starts, weights, counts, shifts, batch, height, width, taps, most,
    INTERPOLATION: tl.constexpr, LEVELS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write what each row (axis 0) or column (axis 1) of the canvas takes of its image.

    ``windows``: int32 [B, 8], window, resized, offset of CropWindows. ``starts``: int32 [2, B, most], the first pixel
    in the image; -1: none. ``weights``: [2, B, taps, most], of which ``counts``, int32 [2, B], are used; if ``LEVELS``,
    they are int32 in units of 2^-shift, with ``shifts`` int32 [2, B].

    INTERPOLATION 0: nearest, 1: bilinear, 2: bicubic.
    """
    REACH: tl.constexpr = 2.0 if INTERPOLATION == 2 else 1.0
    axis, sample = tl.program_id(0) // batch, tl.program_id(0) % batch
    own = windows + sample * 8 + axis
    start, size, resized, offset = tl.load(own), tl.load(own + 2), tl.load(own + 4), tl.load(own + 6)
    count = tl.where(axis == 0, height, width)
    row = axis * batch + sample
    starts += row.to(tl.int64) * most
    weights += row.to(tl.int64) * taps * most
    lanes = tl.arange(0, N)
    unit = 1.0
    own_taps = tl.minimum(taps, (2.0 * REACH * tl.maximum(size, resized) / resized).to(tl.int32) + 2)
    if LEVELS:  # the largest weight of all positions, also of those outside the canvas, has 15 bits
        largest = tl.zeros((N,), tl.float64)
        for first in range(0, resized, N):
            i = tl.minimum(first + lanes, resized - 1)
            center, begin, n, inverse = _taken(i, size, resized, REACH)
            total, peak = tl.zeros((N,), tl.float64), tl.zeros((N,), tl.float64)
            for t in range(0, own_taps):
                w = _weight(begin, n, center, inverse, t, INTERPOLATION == 2)
                total += w
                peak = tl.maximum(peak, w)
            largest = tl.maximum(largest, peak / total)
        shift = tl.arange(0, 32)
        scaled = 0.5 + tl.max(largest, axis=0) * (tl.full((32,), 2, tl.int64) << shift).to(tl.float64)
        small = (scaled.to(tl.int64) < 32768) & (shift < 22)
        shift = tl.sum(small.to(tl.int32), axis=0)
        tl.store(shifts + row, shift)
        unit = (tl.full((1,), 1, tl.int64) << shift).to(tl.float64)
    longest = tl.zeros((N,), tl.int32)
    for first in range(0, count, N):
        at = first + lanes
        i = at - offset
        covered = (i >= 0) & (i < resized)
        i = tl.minimum(tl.maximum(i, 0), resized - 1)
        center, begin, n, inverse = _taken(i, size, resized, REACH)
        if INTERPOLATION == 0:
            begin, n = tl.minimum(center.to(tl.int32), size - 1), n * 0 + 1
        tl.store(starts + at, tl.where(covered, start + begin, -1), at < count)
        longest = tl.maximum(longest, n)
        total = tl.zeros((N,), tl.float64)
        for t in range(0, own_taps):
            total += _weight(begin, n, center, inverse, t, INTERPOLATION == 2)
        for t in range(0, own_taps):
            w = _weight(begin, n, center, inverse, t, INTERPOLATION == 2) / total
            if INTERPOLATION == 0:
                w = tl.full((N,), 1.0, tl.float64)
            if LEVELS:
                w = w * unit
                w = (w + tl.where(w < 0.0, -0.5, 0.5)).to(tl.int32)
            tl.store(weights + t * most + at, w.to(weights.dtype.element_ty), at < count)
    tl.store(counts + row, tl.max(longest, axis=0))


@triton.jit
def _sum(at, weight, r, g, b, green, blue):  # type: ignore[no-untyped-def]
    kind: tl.constexpr = weight.dtype
    r += tl.load(at).to(kind) * weight
    g += tl.load(at + green).to(kind) * weight
    b += tl.load(at + blue).to(kind) * weight
    return r, g, b


@triton.jit
def _rounded(x, shift, LEVELS: tl.constexpr):  # type: ignore[no-untyped-def]
    if LEVELS:
        x = tl.minimum(tl.maximum((x + ((1 << shift) >> 1)) >> shift, 0), 255)
    return x


@triton.jit(
    do_not_specialize=[
        "image", "row", "pixel", "channel", "batch", "height", "width", "taps", "most", "white", "channels"
    ]
)  # fmt: skip
def _crop_kernel(  # type: ignore[no-untyped-def]
    src, dst, windows, starts, weights, counts, shifts, fill, image, row, pixel, channel, batch, height, width, taps,
    most, white, channels, LEVELS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Crop three channels of each image: to bytes [B, H, W, 3] if ``LEVELS``, else to floats [B, C, H, W].

    ``image``, ``row``, ``pixel``, ``channel``: values of ``src`` from one to the next. ``fill``: [C].
    """
    pixels, groups = height * width, tl.cdiv(channels, 3)
    blocks = tl.cdiv(pixels, N)
    number, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    sample, first = number // groups, number % groups * 3
    p = block * N + tl.arange(0, N)
    mask = p < pixels
    y, x = p // width, p % width
    y = tl.minimum(y, height - 1)
    last_y = tl.load(windows + sample * 8) + tl.load(windows + sample * 8 + 2) - 1
    last_x = tl.load(windows + sample * 8 + 1) + tl.load(windows + sample * 8 + 3) - 1
    other = batch + sample
    top, left = tl.load(starts + sample * most + y), tl.load(starts + other * most + x)
    covered = (top >= 0) & (left >= 0)
    weights_y = weights + sample.to(tl.int64) * taps * most + y
    weights_x = weights + other.to(tl.int64) * taps * most + x
    shift_y, shift_x = 0, 0
    if LEVELS:
        shift_y, shift_x = tl.load(shifts + sample), tl.load(shifts + other)
    kind: tl.constexpr = weights.dtype.element_ty
    green = tl.minimum(1, channels - 1 - first) * channel
    blue = tl.minimum(2, channels - 1 - first) * channel
    src += sample.to(tl.int64) * image + first.to(tl.int64) * channel
    r, g, b = tl.zeros((N,), kind), tl.zeros((N,), kind), tl.zeros((N,), kind)
    for ty in range(0, tl.load(counts + sample)):
        line = src + tl.minimum(tl.maximum(top + ty, 0), last_y) * row
        red, grn, blu = tl.zeros((N,), kind), tl.zeros((N,), kind), tl.zeros((N,), kind)
        for tx in range(0, tl.load(counts + other)):
            at = line + tl.minimum(tl.maximum(left + tx, 0), last_x) * pixel
            red, grn, blu = _sum(at, tl.load(weights_x + tx * most), red, grn, blu, green, blue)
        weight = tl.load(weights_y + ty * most)
        r += _rounded(red, shift_x, LEVELS) * weight
        g += _rounded(grn, shift_x, LEVELS) * weight
        b += _rounded(blu, shift_x, LEVELS) * weight
    if LEVELS:
        r, g, b = _rounded(r, shift_y, True), _rounded(g, shift_y, True), _rounded(b, shift_y, True)
    else:
        r, g, b = r / white, g / white, b / white
    r = tl.where(covered, r, tl.load(fill + first).to(kind)).to(dst.dtype.element_ty)
    g = tl.where(covered, g, tl.load(fill + tl.minimum(first + 1, channels - 1)).to(kind)).to(dst.dtype.element_ty)
    b = tl.where(covered, b, tl.load(fill + tl.minimum(first + 2, channels - 1)).to(kind)).to(dst.dtype.element_ty)
    to = p * 3 if LEVELS else first.to(tl.int64) * pixels + p
    apart = 1 if LEVELS else pixels
    to += sample.to(tl.int64) * channels * pixels
    tl.store(dst + to, r, mask)
    if first + 1 < channels:
        tl.store(dst + to + apart, g, mask)
    if first + 2 < channels:
        tl.store(dst + to + 2 * apart, b, mask)
