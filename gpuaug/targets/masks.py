"""Masks of a batch: decoded to numbers, then cropped, resized and warped like their images, by nearest neighbour.

The canvas is the output before the operations. It holds the resized window. Row ``i`` of the resized window is row
``top + (2 i + 1) * height // (2 h)`` of the mask. ``top`` and ``height`` are those of the window; ``h`` is its height
after resizing. Columns likewise. Pillow's NEAREST and torch's ``nearest-exact`` do the same, but with rounding errors.

The inverse matrix ``m`` of the operations maps the centre of output pixel (i, j), row i and column j, to the canvas.
The numbers are float64. The order of the steps is fixed. So masks.cpp and torch on every device give the same bits::

    x = (m[0, 0] * (j + .5) + m[0, 1] * (i + .5)) + m[0, 2]
    y = (m[1, 0] * (j + .5) + m[1, 1] * (i + .5)) + m[1, 2]
    w = (m[2, 0] * (j + .5) + m[2, 1] * (i + .5)) + m[2, 2]
    x, y = x / w, y / w                                     if the last row of m is not (0, 0, 1)

The output is the value of canvas pixel (floor(y), floor(x)). The output is ``fill`` if this pixel is outside the canvas
or the resized window, if ``w <= 0``, or if x, y or w is NaN.

The image after each operation is a canvas too, and pixels outside it are lost. A :class:`Warp` therefore has further
matrices, from the output to canvases in between. An output pixel outside one of them becomes ``fill``. An erased
rectangle is an area of a canvas in the same way.
"""

from __future__ import annotations

import ctypes
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.batch import CropWindows, Int64
from gpuaug.decode import header, pillow
from gpuaug.decode.header import HeaderError
from gpuaug.decode.request import oriented_batch
from gpuaug.errors import ConfigError, shown_size
from gpuaug.native import buffers, build
from gpuaug.targets.geometry import Float64, inverse
from gpuaug.targets.rules import Masks

Mask = NDArray[Any]  # uint8 or int32 [h, w]

_RUNS = b"GPUAUGRL"
_RUNS_HEADER = 20  # bytes: magic, then height, width and count as uint32
_MODES = ("L", "P", "1", "I;16", "I")
# bytes per pixel while a mask is decoded, measured: 3 for a PNG of 8-bit gray or palette; up to 17 for 16 bits and run
# lengths, and 20 with a table; 24 for colours
_PLAIN_BYTES, _OTHER_BYTES = 4, 24
_PLAIN_KINDS = {bytes([bits, color]) for bits in (1, 2, 4, 8) for color in (0, 3)}  # in a PNG's header
_LARGEST_KEY = 2**24 - 1  # largest old value in a table: a colour has three bytes
_LARGEST_DEEP = 2**16 - 1  # largest value of a PNG without colours
_LARGEST = 2**31 - 1  # largest int32
_NO_AREA = [1.0, 0, 0, 0, 1, 0, 0, 0, 1, -np.inf, -np.inf, np.inf, np.inf, 0, 0]  # changes no pixel
_PIXELS_AT_ONCE = 2**22  # limit in `gather`, which takes up to 50 bytes per pixel

# labelIds to trainIds: github.com/mcordts/cityscapesScripts, helpers/labels.py
_CITYSCAPES = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
_TABLES = {
    "cityscapes": {k: i for i, k in enumerate(_CITYSCAPES)},
    "ade20k": {k: k - 1 for k in range(1, 151)},  # 0 is "other" and becomes `fill`
}
_LEFT_OUT = {"cityscapes": range(34), "ade20k": (0,)}  # values that become `fill` without a warning
_TASK = np.dtype(  # ``Task`` of masks.cpp
    [("src", np.uint64), ("row", np.int64), ("column", np.int64)]
    + [("inverse", np.uint64), ("areas", np.uint64), ("out", np.uint64)]
    + [(name, np.int32) for name in ("bytes", "top", "left", "height", "width", "to_height", "to_width", "y", "x")]
    + [("count", np.int32)]
)


# -- table --


class Lookup:
    """New values of the values of masks.

    Args:
        pairs: maps old values to new values. All other old values become ``fill``, and are counted.
        fill: a new value.
        colors: whether old values are colours, R + 256 G + 65536 B, instead of class numbers.
        keep: True: other old values stay, and are not counted. ``pairs`` then has all of 0..255.
    """

    def __init__(self, pairs: Mapping[int, int], fill: int, *, colors: bool = False, keep: bool = False) -> None:
        self.fill, self.colors, self._keep = fill, colors, keep
        small = {} if colors else {key: value for key, value in pairs.items() if key < 256}
        self._of_bytes = _table(small, fill, 256)
        # colours never exceed the table; of other values, the last entry stands for all larger ones
        size = _LARGEST_KEY + 1 if colors else max(256, max(pairs) + 1) + 1
        self._of_words = _table(pairs, fill, size, wide=keep)

    def apply(self, mask: Mask, *, unnamed: Counter[int] | None = None) -> Mask:
        """Replace the values of a mask, none of which is negative. The new mask is uint8 if its table permits.

        ``unnamed``: gets the number of pixels of each old value that is not in ``pairs``.
        """
        table, other = self._of_bytes if mask.dtype == np.uint8 else self._of_words
        made = np.take(table, mask, mode="clip")
        missing = made == other
        if missing.any():
            if unnamed is not None and not self._keep:
                values, counts = np.unique(mask[missing], return_counts=True)
                unnamed.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
            made[missing] = mask[missing] if self._keep else self.fill
        return made


def _table(pairs: Mapping[int, int], fill: int, size: int, *, wide: bool = False) -> tuple[Mask, int]:
    """An array of new values, int32 if ``wide``, and the value that stands for old values not in ``pairs``."""
    used = {*pairs.values(), fill}
    other = next((value for value in range(256) if value not in used), -1)
    is_small = not wide and max(used) <= 255 and (other >= 0 or len(pairs) == size)
    table = np.full(size, other if is_small else -1, dtype=np.int32)
    table[list(pairs)] = list(pairs.values())
    return (table.astype(np.uint8), other) if is_small else (table, -1)


def lookup(rules: Masks) -> Lookup | None:
    """The new values of masks; None: all values stay. Keys of ``rules.map`` may be text, as in YAML."""
    map, fill, colors = rules.map, rules.fill, rules.colors
    known: Iterable[int] = ()  # values that a shipped table leaves out on purpose
    if map is None:
        if colors is None:
            same = dict(zip(range(256), range(256), strict=True))
            return Lookup(same | dict.fromkeys(rules.ignore, fill), fill, keep=True) if rules.ignore else None
        pairs: dict[int, Any] = {k: k for k in colors}
    elif isinstance(map, str) and map in _TABLES:
        pairs, known = dict(_TABLES[map]), _LEFT_OUT[map]
    elif isinstance(map, Mapping) and map:
        pairs = {_key(key, map): value for key, value in map.items()}
        if len(pairs) < len(map):
            raise ConfigError(f"`targets.masks.map` must name each value once. Found: {map!r:.200}.")
    elif isinstance(map, Sequence) and not isinstance(map, str | bytes) and 0 < len(map) <= _LARGEST_KEY + 1:
        pairs = dict(enumerate(map))
    else:
        raise ConfigError(
            f"`targets.masks.map` must be null, {', '.join(_TABLES)}, a list such as [255, 0, 1], or a mapping such as "
            f"{{7: 0, 8: 1}}. Found: {map!r:.200}."
        )
    for key, value in pairs.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value <= _LARGEST:
            raise ConfigError(
                f"`targets.masks.map` must give whole numbers from 0 to {_LARGEST}. Found: {value!r:.200} for {key}."
            )
    known = [*known, *((fill,) if fill <= _LARGEST_DEEP else ())]
    pairs = dict.fromkeys(known, fill) | pairs | dict.fromkeys(rules.ignore, fill)
    if colors is not None:
        pairs = {r + (g << 8) + (b << 16): pairs[k] for k, (r, g, b) in colors.items() if k in pairs}
    return Lookup(pairs, fill, colors=colors is not None)


def _key(key: Any, map: Any) -> int:
    whole = isinstance(key, int | np.integer) and not isinstance(key, bool)
    if not whole and not (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 10):
        raise ConfigError(f"`targets.masks.map` must have whole numbers as keys. Found: {key!r:.200} in {map!r:.200}.")
    if not 0 <= int(key) <= _LARGEST_KEY:
        raise ConfigError(f"`targets.masks.map` must have keys from 0 to {_LARGEST_KEY}. Found: {key!r:.200}.")
    return int(key)


# -- decode --


def decode(
    data: bytes | memoryview,
    *,
    stored: tuple[int, int],
    exif: int,
    as_stored: bool = False,
    max_pixels: int,
    table: Lookup | None = None,
    unnamed: Counter[int] | None = None,
) -> Mask:
    """Decode the mask of one image.

    Args:
        data: a PNG, or run lengths of object numbers (see `source.runs`).
        stored: (height, width) of the image, as stored.
        exif: EXIF orientation of the image, 1..8. A mask of the stored image is turned like the image. The mask's own
            EXIF data are ignored.
        as_stored: whether a mask whose size is both the stored and the upright size is of the stored image.
        max_pixels: limit of the number of pixels of the mask.
        table: from :func:`lookup`. Without a table of colours, a mask in colour is an error.
        unnamed: see :meth:`Lookup.apply`.

    Returns:
        The upright mask, uint8 or int32 [h, w], contiguous. It may be read-only.

    Raises:
        HeaderError: if the mask is damaged, has another format, mode or size, or has too many pixels.
    """
    data = bytes(data)
    size, info = size_and_header(data)
    if info is not None and info.codec != "png":
        lossy = ": its values are not exact" if info.codec == "jpeg" else ""
        raise HeaderError(f"mask is a {info.codec}{lossy}. Masks must be PNG files")
    upright = stored[::-1] if exif > 4 else stored
    if size not in (upright, stored):
        (height, width), (h, w) = upright, stored
        sizes = f"{width} x {height}" + (f" (stored as {w} x {h})" if upright != stored else "")
        raise HeaderError(f"mask of {size[1]} x {size[0]} pixels (width x height), but its image has {sizes}")
    if size[0] * size[1] > max_pixels:
        raise HeaderError(f"mask of {shown_size(*size)} is larger than `decode.max_pixels` ({max_pixels})")
    colors = table is not None and table.colors
    if info is not None:
        mask = _png(data, info.bits, colors)
    elif colors:
        raise HeaderError("mask of run lengths holds numbers, not colours. Remove `targets.masks.colors`")
    else:
        mask = _runs(data, size)
    if table is not None:
        mask = table.apply(mask, unnamed=unnamed)
    if exif > 1 and size == stored and (as_stored or size != upright):
        mask = oriented_batch(torch.from_numpy(np.array(mask))[None], exif)[0].numpy()
    return np.ascontiguousarray(mask)


def peak_bytes(data: NDArray[np.uint8], pixels: int, *, changed: bool) -> int:
    """Bytes that decoding a mask of ``pixels`` takes at most. ``changed``: the mask gets values from a table."""
    plain = not changed and data[24:26].tobytes() in _PLAIN_KINDS and data[:4].tobytes() == b"\x89PNG"
    return bool(len(data)) * pixels * (_PLAIN_BYTES if plain else _OTHER_BYTES)


def size_and_header(data: bytes) -> tuple[tuple[int, int], header.Header | None]:
    """(height, width) of an encoded mask, and its header; None for run lengths. HeaderError if they are damaged."""
    if not data.startswith(_RUNS):
        info = header.read(data)
        return (info.height, info.width), info
    if len(data) < _RUNS_HEADER:
        raise HeaderError(f"runs truncated: {len(data)} bytes")
    height, width, count = np.frombuffer(data, "<u4", 3, len(_RUNS)).tolist()
    if len(data) != (needed := _RUNS_HEADER + 8 * count):
        raise HeaderError(f"{count} runs must have {needed} bytes. Found: {len(data)}")
    return (height, width), None


def _png(data: bytes, bits: int, in_colors: bool) -> Mask:
    if in_colors and bits > 8:
        raise HeaderError(f"mask with colours of {bits} bits: colours need 8 bits")
    values, mode = pillow.values(_checked(data), colors=in_colors)
    if in_colors:
        return values
    if mode not in _MODES:
        raise HeaderError(
            f"mask of Pillow's mode {mode}: class numbers need one of {', '.join(_MODES)}. If its colours are classes, "
            "set `targets.masks.colors`"
        )
    if bits > 8:
        return values.astype(np.int32)
    values = values.astype(np.uint8, copy=False)
    if data[25] == 0 and bits in (2, 4):  # gray, whose values Pillow has scaled to 0..255
        values = values // np.uint8(255 // ((1 << bits) - 1))
    return values


def _checked(png: bytes) -> bytes:
    """Keep and check only the chunks that pixels need. Texts and profiles may inflate to 1,000 times their size."""
    pieces, kind, end = [png[:8]], b"", 8
    for kind, at, _, end in header.chunks(png):
        if end <= len(png) and (kind in (b"PLTE", b"IDAT", b"IEND") or at == 16):
            # Pillow does not check the checksums of pixels, and a damaged mask can look like a valid mask
            if zlib.crc32(memoryview(png)[at - 4 : end - 4]) != int.from_bytes(png[end - 4 : end], "big"):
                raise HeaderError(f"png is damaged: the checksum of its {kind.decode()} chunk is wrong")
            pieces.append(png[at - 8 : end])
    if kind != b"IEND" or end > len(png):
        raise HeaderError(f"png truncated: {len(png)} bytes")
    return b"".join(pieces)


def _runs(data: bytes, size: tuple[int, int]) -> Mask:
    count = (len(data) - _RUNS_HEADER) // 8
    values = np.frombuffer(data, "<i4", count, _RUNS_HEADER)
    lengths = np.frombuffer(data, "<u4", count, _RUNS_HEADER + 4 * count)
    total, pixels = int(lengths.sum(dtype=np.uint64)), size[0] * size[1]
    if total != pixels:
        raise HeaderError(f"runs of {total} pixels in a mask of {shown_size(*size)}, {pixels} pixels")
    if count and values.min() < 0:
        raise HeaderError(f"runs with a negative object number: {values.min()}")
    small = not count or values.max() <= 255
    return np.repeat(values.astype(np.uint8 if small else np.int32), lengths).reshape(size)


# -- crop, resize and warp --


class Erased(NamedTuple):
    """Rectangles of masks [n, H, W] that get a value."""

    boxes: Float64  # [n, 4], (x1, y1, x2, y2) in pixel edges; no area: nothing is erased
    value: int


class Warp(NamedTuple):
    """How masks [n, H, W] move.

    Attributes:
        inverse: [n, 3, 3], from the output to the canvas before all operations.
        areas: [n, k, 15], rectangles of later canvases, in order: nine elements of the matrix from the output to this
            canvas, then x1, y1, x2, y2, whether pixels inside (1) or outside (0) change, and their new value. An area
            with an infinite x1 changes nothing.
    """

    inverse: Float64
    areas: Float64

    @classmethod
    def of(cls, moves: Sequence[Float64 | Erased], size: tuple[int, int], fill: int) -> Warp:
        """Compose moves. Between two matrices [n, 3, 3], pixels outside 0..W x 0..H are lost."""
        count = len(moves[0].boxes if isinstance(moves[0], Erased) else moves[0])
        canvas = np.array([[0, 0, size[1], size[0]]], dtype=np.float64)
        after, still, areas, used = None, np.eye(3), list[Float64](), list[Any]()
        for move in reversed(moves):
            back = None if after is None else inverse(after)
            if isinstance(move, Erased):
                used.append((move.boxes[:, :2] < move.boxes[:, 2:]).all(axis=1))
                areas.append(_areas(back, move.boxes, 1, move.value))
                continue
            if after is not None:
                # if this matrix is the identity, the canvas before it has the same borders
                used.append((after != still).any(axis=(1, 2)) & (move != still).any(axis=(1, 2)))
                areas.append(_areas(back, np.broadcast_to(canvas, (count, 4)), 0, fill))
            after = move if after is None else after @ move
        back = np.broadcast_to(still, (count, 3, 3)) if after is None else inverse(after)
        if not areas:
            return cls(back, np.empty((count, 0, 15)))
        there, stacked = np.stack(used[::-1], axis=1), np.stack(areas[::-1], axis=1)
        stacked[~there] = _NO_AREA
        return cls(back, stacked[:, there.any(axis=0)])

    def rows(self, at: Int64) -> Warp:
        return Warp(self.inverse[at], self.areas[at])


def _areas(m: Float64 | None, boxes: Float64, inside: int, value: int) -> Float64:
    out = np.empty((len(boxes), 15))
    out[:, :9] = _NO_AREA[:9] if m is None else m.reshape(-1, 9)
    out[:, 9:13], out[:, 13], out[:, 14] = boxes, inside, value
    return out


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled masks.cpp, or None if it cannot be built."""
    built = build.load("targets/masks.cpp", name="masks", without="move in numpy, ten times slower")
    if built is not None:
        pointer, number, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        built.gpuaug_place.argtypes = [pointer, number, number, number, small, small, small]
        built.gpuaug_paste.argtypes = [pointer] * 3 + [number] * 3 + [pointer] * 3
        built.gpuaug_paste.restype = None
    return built


def place(
    masks: Sequence[Mask | None],
    windows: CropWindows,
    out: Mask,
    *,
    warp: Warp | None = None,
    fill: int,
    threads: int = 1,
) -> None:
    """Crop, resize and warp each mask into its row of ``out``, as described at the top of this module.

    Args:
        masks: n masks, uint8 or int32 [h, w], upright, with any strides; None: the row becomes ``fill``.
        windows: n rows. Their ``interpolation`` and ``fill`` are not used.
        out: uint8, int32 or int64 [n, H, W], contiguous; not uint8 if any mask is int32.
        warp: how operations move the n masks; None: they do not.
        fill: value of output pixels that no mask pixel covers.
        threads: number of threads of masks.cpp.

    Raises:
        ValueError: if a window is not inside its mask.
    """
    _check(masks, windows)
    count, (H, W) = len(masks), windows.size
    if out.size == 0:
        return
    compiled = library() if H * W <= _LARGEST else None  # masks.cpp numbers pixels by int32
    if compiled is None:
        for k in range(count):
            _place(masks[k], windows, k, out[k], warp, fill)
        return
    tasks = np.zeros(count, dtype=_TASK)
    some = [mask if mask is not None else np.empty((0, 0), dtype=np.uint8) for mask in masks]
    tasks["src"] = [0 if mask is None else mask.__array_interface__["data"][0] for mask in masks]
    tasks["row"], tasks["column"] = np.array([mask.strides for mask in some]).T
    tasks["bytes"] = [mask.itemsize for mask in some]
    tasks["out"] = out.ctypes.data + np.arange(count, dtype=np.int64) * (H * W * out.itemsize)
    if warp is not None:
        matrices, areas = (np.ascontiguousarray(x, dtype=np.float64) for x in warp[:2])  # alive until the call
        tasks["inverse"] = matrices.ctypes.data + np.arange(count, dtype=np.int64) * 72
        tasks["areas"] = areas.ctypes.data + np.arange(count, dtype=np.int64) * areas[0].nbytes
        tasks["count"] = areas.shape[1]
    tasks["top"], tasks["left"], tasks["height"], tasks["width"] = windows.window.T
    tasks["to_height"], tasks["to_width"] = windows.resized.T
    tasks["y"], tasks["x"] = windows.offset.T
    arguments = tasks.ctypes.data, count, H, W, out.itemsize, int(fill), threads
    if compiled.gpuaug_place(*arguments):  # releases the GIL
        raise MemoryError(f"out of memory while moving {count} masks")


def paste(own: Mask, mate: Mask, renumber: NDArray[np.int32], count: int) -> tuple[Mask, NDArray[np.bool_], Int64]:
    """Paste objects of one mask of object numbers into another.

    Args:
        own, mate: int32 [H, W], contiguous.
        renumber: the new number of each number of ``mate``; 0: the object is not pasted.
        count: 1 + the largest number of ``own``.

    Returns:
        The new mask, the pixels that were pasted, and int64 [2, count, 5]: for each number of ``own``, before and
        after, its pixels and (x1, y1, x2, y2) around them; x2 < x1 if there are none.
    """
    out, pasted = np.empty_like(own), np.empty(own.shape, dtype=np.bool_)
    extents = np.tile(np.array([0, *own.shape[::-1], -1, -1], dtype=np.int64), (2, count, 1))
    if (compiled := library()) is not None:
        arrays = [x.ctypes.data for x in (own, mate, renumber, out, pasted, extents)]
        compiled.gpuaug_paste(*arrays[:3], *own.shape, count, *arrays[3:])
    else:
        pasted[:] = renumber[mate] != 0
        out[:] = np.where(pasted, renumber[mate], own)
        for after, k in np.ndindex(2, count - 1):
            y, x = np.nonzero((own == k + 1) & ~(pasted & bool(after)))
            if len(x):
                extents[after, k + 1] = len(x), x.min(), y.min(), x.max(), y.max()
    extents[..., 3:] += 1
    return out, pasted, extents


def _check(masks: Sequence[Mask | None], windows: CropWindows) -> None:
    """Check the windows, which a user's crop may have made. In C++, a wrong window would kill the process."""
    there = np.array([mask is not None for mask in masks], dtype=bool)
    sizes = np.array([mask.shape for mask in masks if mask is not None], dtype=np.int64).reshape(-1, 2)
    window = windows.window[there].astype(np.int64)
    inside = (window[:, :2] >= 0) & (window[:, 2:] > 0) & (window[:, :2] + window[:, 2:] <= sizes)
    if not inside.all() or not (windows.resized[there] > 0).all():
        raise ValueError(f"windows {window.tolist()} are not inside masks of {sizes.tolist()}")


def _place(mask: Mask | None, windows: CropWindows, k: int, out: Mask, warp: Warp | None, fill: int) -> None:
    """Do in numpy and torch what masks.cpp does, for one mask."""
    out[:] = fill
    if mask is None:
        return
    top, left, height, width = windows.window[k].tolist()
    (h, w), (y, x) = windows.resized[k].tolist(), windows.offset[k].tolist()
    (y0, rows), (x0, columns) = (
        (max(at, 0), start + (2 * np.arange(max(-at, 0), min(to, size - at)) + 1) * extent // (2 * to))
        for at, to, size, start, extent in ((y, h, out.shape[0], top, height), (x, w, out.shape[1], left, width))
    )
    out[y0 : y0 + len(rows), x0 : x0 + len(columns)] = mask[rows][:, columns]
    if warp is not None:
        out[:] = gather(torch.from_numpy(out)[None], warp.rows(np.array([k])), fill)[0].numpy()


def gather(masks: Tensor, warp: Warp, fill: int) -> Tensor:
    """Warp masks [n, H, W] on their device, bit-equal to :func:`place`. Does not wait for the device."""
    _, H, W = masks.shape
    out = torch.empty_like(masks, memory_format=torch.contiguous_format)
    samples, rows = max(1, _PIXELS_AT_ONCE // max(1, H * W)), max(1, _PIXELS_AT_ONCE // max(1, W))
    matrices, areas = (
        buffers.to_device(torch.from_numpy(np.array(x, dtype=np.float64)), masks.device)
        for x in (warp.inverse, warp.areas)
    )
    for k in range(0, len(masks), samples):
        own = slice(k, k + samples)
        for i in range(0, H, rows):
            part = out[own, i : i + rows]
            _gather(masks[own], matrices[own], i, part, fill)
            for number in range(areas.shape[1]):
                _cover(areas[own, number], i, part)
    return out


def _gather(masks: Tensor, inverse: Tensor, first: int, out: Tensor, fill: int) -> None:
    """Fill ``out`` with rows of the warped masks, from row ``first`` on."""
    _, H, W = masks.shape
    x, y, w = _positions(inverse, first, out)
    inside = w > 0
    for condition in (x >= 0, x < W, y >= 0, y < H):
        inside.logical_and_(condition)
    pixel = y.floor_().mul_(W).add_(x.floor_()).masked_fill_(~inside, 0).long()
    values = masks.reshape(len(masks), -1).gather(1, pixel.flatten(1)).view_as(pixel)
    out.copy_(values.masked_fill_(~inside, fill))


def _cover(area: Tensor, first: int, out: Tensor) -> None:
    """Write the values of one area [15] per mask into ``out``, which holds rows from ``first`` on."""
    x, y, w = _positions(area[:, :9].view(-1, 3, 3), first, out)
    x1, y1, x2, y2, inside, value = area[:, 9:, None, None].unbind(1)
    at = (w > 0) & (x >= x1) & (x < x2) & (y >= y1) & (y < y2)
    out.copy_(torch.where(at == (inside > 0), value.to(out.dtype), out))


def _positions(m: Tensor, first: int, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where matrices [n, 3, 3] map the pixels of ``out`` [n, rows, W] to: x, y and w."""
    m = m[:, :, :, None, None]
    u = torch.arange(out.shape[2], dtype=torch.float64, device=out.device) + 0.5
    v = torch.arange(first, first + out.shape[1], dtype=torch.float64, device=out.device)[:, None] + 0.5

    def row(r: int) -> Tensor:  # a fused multiply-add would round differently
        return (m[:, r, 0] * u + m[:, r, 1] * v).add_(m[:, r, 2])

    w = row(2)
    return row(0).div_(w), row(1).div_(w), w
