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
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.batch import CropWindows, Int32, Int64
from gpuaug.decode import header, pillow
from gpuaug.decode.header import HeaderError
from gpuaug.decode.plan import oriented_batch
from gpuaug.decode.resize import Work, one_by_one
from gpuaug.errors import ConfigError
from gpuaug.native import buffers, build

Mask = NDArray[Any]  # uint8 or int32 [h, w]
Float64 = NDArray[np.float64]

_RUNS = b"GPUAUGRL"
_RUNS_HEADER = 20  # bytes: magic, then height, width and count as uint32
_MODES = ("L", "P", "1", "I;16", "I")
_GRAY = 0  # PNG's colour type
_LARGEST_KEY = 2**24 - 1  # largest old value in a table: a colour has three bytes
_LARGEST = 2**31 - 1  # largest int32
_OUTPUTS = (np.uint8, np.int32, np.int64)
_PIXELS_AT_ONCE = 2**22  # limit in `gather`, which takes up to 50 bytes per pixel

# labelIds to trainIds: github.com/mcordts/cityscapesScripts, helpers/labels.py
_CITYSCAPES = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
_TABLES = {
    "cityscapes": {k: i for i, k in enumerate(_CITYSCAPES)},
    "ade20k": {k: k - 1 for k in range(1, 151)},  # 0 is "other" and becomes `fill`
}
_TASK = np.dtype(  # ``Task`` of masks.cpp
    [("src", np.uint64), ("row", np.int64), ("column", np.int64), ("inverse", np.uint64), ("out", np.uint64)]
    + [(name, np.int32) for name in ("bytes", "top", "left", "height", "width", "to_height", "to_width", "y", "x", "_")]
)


# -- table --


def lookup(map: Any, fill: int) -> Int32 | None:
    """Make a table of new values. The new value of ``value`` is ``table[min(value, len(table) - 1)]``.

    Args:
        map: see :class:`gpuaug.Masks`. Keys of a mapping may be text, as in YAML.
        fill: the new value of all values that ``map`` does not name.
    """
    if map is None:
        return None
    if isinstance(map, str) and map in _TABLES:
        pairs: dict[int, Any] = dict(_TABLES[map])
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
    table = np.full(max(256, max(pairs) + 1) + 1, fill, dtype=np.int32)  # the last entry stands for all larger values
    table[list(pairs)] = list(pairs.values())
    return table


def _key(key: Any, map: Any) -> int:
    whole = isinstance(key, int | np.integer) and not isinstance(key, bool)
    if not whole and not (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 10):
        raise ConfigError(f"`targets.masks.map` must have whole numbers as keys. Found: {key!r:.200} in {map!r:.200}.")
    if not 0 <= int(key) <= _LARGEST_KEY:
        raise ConfigError(f"`targets.masks.map` must have keys from 0 to {_LARGEST_KEY}. Found: {key!r:.200}.")
    return int(key)


def mapped(mask: Mask, table: Int32) -> Mask:
    """Replace the values of a mask by a table of :func:`lookup`. No value of the mask is negative."""
    small = table.max() <= 255
    if mask.dtype == np.uint8:
        return np.take(table[:256].astype(np.uint8) if small else table[:256], mask)
    values = table[np.minimum(mask, len(table) - 1)]
    return values.astype(np.uint8) if small else values


# -- decode --


def decode(
    data: bytes | memoryview,
    *,
    stored: tuple[int, int],
    exif: int,
    max_pixels: int,
    table: Int32 | None = None,
    ids_in_rgb: bool = False,
) -> Mask:
    """Decode the mask of one image.

    Args:
        data: a PNG, or run lengths of object numbers (see `source.runs`).
        stored: (height, width) of the image, as stored.
        exif: EXIF orientation of the image, 1..8. If the mask has the stored size, and not the upright size, the
            mask is turned like the image. The mask's own EXIF data are ignored.
        max_pixels: limit of the number of pixels of the mask.
        table: from :func:`lookup`.
        ids_in_rgb: True: colours are ids, R + 256 G + 65536 B, as in COCO's panoptic masks. False: a mask in colour is
            an error.

    Returns:
        The upright mask, uint8 or int32 [h, w], contiguous. It may be read-only.

    Raises:
        HeaderError: if the mask is damaged, has another format, mode or size, or has too many pixels.
    """
    data = bytes(data)
    if data.startswith(_RUNS):
        info = None
        size = _runs_size(data)
    else:
        info = header.read(data)
        size = info.height, info.width
        if info.codec != "png":
            lossy = ": its values are not exact" if info.codec == "jpeg" else ""
            raise HeaderError(f"mask is a {info.codec}{lossy}. Masks must be PNG files")
    upright = stored[::-1] if exif > 4 else stored
    if size not in (upright, stored):
        (height, width), (h, w) = upright, stored
        sizes = f"{width} x {height}" + (f" (stored as {w} x {h})" if upright != stored else "")
        raise HeaderError(f"mask of {size[1]} x {size[0]} pixels (width x height), but its image has {sizes}")
    if size[0] * size[1] > max_pixels:
        raise HeaderError(f"mask of {size[0]}x{size[1]} is larger than `decode.max_pixels` ({max_pixels})")
    mask = _runs(data, size) if info is None else _png(data, info.bits, size, ids_in_rgb)
    if table is not None:
        mask = mapped(mask, table)
    if size != upright:
        mask = oriented_batch(torch.from_numpy(np.array(mask))[None], exif)[0].numpy()
    return np.ascontiguousarray(mask)


def _png(data: bytes, bits: int, size: tuple[int, int], ids_in_rgb: bool) -> Mask:
    values, mode = pillow.values(_checked(data))
    if values.shape[:2] != size:
        raise HeaderError(f"mask of {values.shape[0]}x{values.shape[1]}, but its header says {size[0]}x{size[1]}")
    if mode == "RGB" and ids_in_rgb:
        if bits > 8:
            raise HeaderError(f"mask with colours of {bits} bits: object numbers need 8 bits")
        red, green, blue = (values[:, :, c].astype(np.int32) for c in range(3))
        return red + (green << 8) + (blue << 16)
    if mode not in _MODES:
        raise HeaderError(f"mask of Pillow's mode {mode}: class numbers need one of {', '.join(_MODES)}")
    if bits > 8:
        return values.astype(np.int32)
    values = values.astype(np.uint8, copy=False)
    if data[25] == _GRAY and bits in (2, 4):
        values = values // np.uint8(255 // ((1 << bits) - 1))  # Pillow has scaled the values to 0..255
    return values


def _checked(png: bytes) -> bytes:
    """Keep and check only the chunks that pixels need. Texts and profiles may inflate to 1,000 times their size."""
    pieces, kind, end = [png[:8]], b"", 8
    for kind, at, _, end in header.chunks(png, "png", 8):
        if end <= len(png) and (kind in (b"PLTE", b"IDAT", b"IEND") or at == 16):
            # Pillow does not check the checksums of pixels, and a damaged mask can look like a valid mask
            if zlib.crc32(memoryview(png)[at - 4 : end - 4]) != int.from_bytes(png[end - 4 : end], "big"):
                raise HeaderError(f"png is damaged: the checksum of its {kind.decode()} chunk is wrong")
            pieces.append(png[at - 8 : end])
    if kind != b"IEND" or end > len(png):
        raise HeaderError(f"png truncated: {len(png)} bytes")
    return b"".join(pieces)


def _runs_size(data: bytes) -> tuple[int, int]:
    if len(data) < _RUNS_HEADER:
        raise HeaderError(f"runs truncated: {len(data)} bytes")
    height, width, count = np.frombuffer(data, "<u4", 3, len(_RUNS)).tolist()
    if len(data) != (needed := _RUNS_HEADER + 8 * count):
        raise HeaderError(f"{count} runs must have {needed} bytes. Found: {len(data)}")
    return height, width


def _runs(data: bytes, size: tuple[int, int]) -> Mask:
    count = (len(data) - _RUNS_HEADER) // 8
    values = np.frombuffer(data, "<i4", count, _RUNS_HEADER)
    lengths = np.frombuffer(data, "<u4", count, _RUNS_HEADER + 4 * count)
    total, pixels = int(lengths.sum(dtype=np.uint64)), size[0] * size[1]
    if total != pixels:
        raise HeaderError(f"runs of {total} pixels in a mask of {size[0]}x{size[1]}, {pixels} pixels")
    if count and values.min() < 0:
        raise HeaderError(f"runs with a negative object number: {values.min()}")
    small = not count or values.max() <= 255
    return np.repeat(values.astype(np.uint8 if small else np.int32), lengths).reshape(size)


# -- crop, resize and warp --


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled masks.cpp, or None if it cannot be built."""
    built = build.load(Path(__file__).with_name("masks.cpp"), name="masks", without="move in numpy, ten times slower")
    if built is not None:
        pointer, number, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        built.gpuaug_place.argtypes = [pointer, number, number, number, small, small, small]
    return built


def place(
    masks: Sequence[Mask | None],
    windows: CropWindows,
    out: Mask,
    *,
    inverse: Float64 | None = None,
    fill: int,
    threads: int = 1,
    each: Callable[[Sequence[int], Work], None] = one_by_one,
) -> None:
    """Crop, resize and warp each mask into its row of ``out``, as described at the top of this module.

    Args:
        masks: n masks, uint8 or int32 [h, w], upright, with any strides; None: the row becomes ``fill``.
        windows: n rows. Their ``interpolation`` and ``fill`` are not used.
        out: uint8, int32 or int64 [n, H, W], contiguous; not uint8 if any mask is int32.
        inverse: matrices [n, 3, 3] from the output to the canvas; None: no operation moves the masks.
        fill: value of output pixels that no mask pixel covers.
        threads: number of threads of masks.cpp.
        each: a function that calls ``work(k)`` for every k. It is used only without masks.cpp.

    Raises:
        ValueError: if shapes or types do not fit, or a window is not inside its mask.
    """
    _check(masks, windows, out, inverse, fill)
    count, (H, W) = len(masks), windows.size
    if out.size == 0:
        return
    matrices = None if inverse is None else np.ascontiguousarray(inverse, dtype=np.float64)
    compiled = library() if H * W <= _LARGEST else None  # masks.cpp numbers pixels by int32
    if compiled is None:
        each(range(count), lambda k: _place(masks[k], windows, k, out[k], matrices, fill))
        return
    tasks = np.zeros(count, dtype=_TASK)
    some = [mask if mask is not None else np.empty((0, 0), dtype=np.uint8) for mask in masks]
    tasks["src"] = [0 if mask is None else mask.__array_interface__["data"][0] for mask in masks]
    tasks["row"], tasks["column"] = np.array([mask.strides for mask in some]).T
    tasks["bytes"] = [mask.itemsize for mask in some]
    tasks["out"] = out.ctypes.data + np.arange(count, dtype=np.int64) * (H * W * out.itemsize)
    if matrices is not None:
        tasks["inverse"] = matrices.ctypes.data + np.arange(count, dtype=np.int64) * 72
    tasks["top"], tasks["left"], tasks["height"], tasks["width"] = windows.window.T
    tasks["to_height"], tasks["to_width"] = windows.resized.T
    tasks["y"], tasks["x"] = windows.offset.T
    arguments = tasks.ctypes.data, count, H, W, out.itemsize, int(fill), threads
    if compiled.gpuaug_place(*arguments):  # releases the GIL
        raise MemoryError(f"out of memory while moving {count} masks")


def _check(masks: Sequence[Mask | None], windows: CropWindows, out: Mask, inverse: Float64 | None, fill: int) -> None:
    """Check shapes and types, because a wrong task in C++ would kill the process."""
    count = len(masks)
    if out.shape != (count, *windows.size) or out.dtype not in _OUTPUTS or not out.flags.c_contiguous:
        kinds = "uint8, int32 or int64"
        raise ValueError(f"out must be a contiguous {kinds} {(count, *windows.size)}: {out.dtype} {out.shape}")
    if len(windows) != count or (inverse is not None and inverse.shape != (count, 3, 3)):
        matrices = "no matrices" if inverse is None else f"matrices of shape {inverse.shape}"
        raise ValueError(f"{count} masks, but {len(windows)} windows and {matrices}")
    if not 0 <= fill <= min(np.iinfo(out.dtype).max, _LARGEST):
        raise ValueError(f"fill {fill} does not fit into {out.dtype}")
    found = {mask.dtype for mask in masks if mask is not None}
    if not found <= {np.dtype(np.uint8), *((np.dtype(np.int32),) if out.itemsize > 1 else ())}:
        raise ValueError(f"masks of {', '.join(map(str, found))} do not fit into {out.dtype}")
    there = np.array([mask is not None for mask in masks], dtype=bool)
    sizes = np.array([mask.shape for mask in masks if mask is not None], dtype=np.int64).reshape(-1, 2)
    window = windows.window[there].astype(np.int64)
    inside = (window[:, :2] >= 0) & (window[:, 2:] > 0) & (window[:, :2] + window[:, 2:] <= sizes)
    if not inside.all() or not (windows.resized[there] > 0).all():
        raise ValueError(f"windows {window.tolist()} are not inside masks of {sizes.tolist()}")


def _place(mask: Mask | None, windows: CropWindows, k: int, out: Mask, inverse: Float64 | None, fill: int) -> None:
    """Do in numpy and torch what masks.cpp does, for one mask."""
    out[:] = fill
    if mask is None:
        return
    top, left, height, width = windows.window[k].tolist()
    (h, w), (y, x) = windows.resized[k].tolist(), windows.offset[k].tolist()
    (y0, rows), (x0, columns) = (
        _sources(at, to, size, start, extent)
        for at, to, size, start, extent in ((y, h, out.shape[0], top, height), (x, w, out.shape[1], left, width))
    )
    out[y0 : y0 + len(rows), x0 : x0 + len(columns)] = mask[rows][:, columns]
    if inverse is not None and not np.array_equal(inverse[k], np.eye(3)):
        out[:] = gather(torch.from_numpy(out)[None], inverse[k : k + 1], fill)[0].numpy()


def _sources(at: int, to: int, size: int, start: int, extent: int) -> tuple[int, Int64]:
    """The first canvas row in the resized window, and the mask row of each canvas row in it. Likewise for columns."""
    first, last = max(at, 0), min(at + to, size)
    i = np.arange(first - at, max(last, first) - at, dtype=np.int64)
    return first, start + (2 * i + 1) * extent // (2 * to)


def gather(masks: Tensor, inverse: Float64, fill: int) -> Tensor:
    """Warp masks [n, H, W] on their device, bit-equal to :func:`place`. Does not wait for the device.

    ``inverse``: matrices [n, 3, 3] from the output to the input.
    """
    _, H, W = masks.shape
    out = torch.empty_like(masks, memory_format=torch.contiguous_format)
    samples, rows = max(1, _PIXELS_AT_ONCE // max(1, H * W)), max(1, _PIXELS_AT_ONCE // max(1, W))
    affine = bool((inverse[:, 2] == (0.0, 0.0, 1.0)).all())
    matrices = buffers.to_device(torch.from_numpy(np.array(inverse, dtype=np.float64)), masks.device)
    for k in range(0, len(masks), samples):
        for i in range(0, H, rows):
            part = out[k : k + samples, i : i + rows]
            _gather(masks[k : k + samples], matrices[k : k + samples], i, part, fill, affine)
    return out


def _gather(masks: Tensor, inverse: Tensor, first: int, out: Tensor, fill: int, affine: bool) -> None:
    """Fill ``out`` with rows of the warped masks, from row ``first`` on."""
    _, H, W = masks.shape
    m = inverse[:, :, :, None, None]
    u = torch.arange(W, dtype=torch.float64, device=masks.device) + 0.5
    v = torch.arange(first, first + out.shape[1], dtype=torch.float64, device=masks.device)[:, None] + 0.5

    def row(r: int) -> Tensor:  # a fused multiply-add would round differently
        return (m[:, r, 0] * u + m[:, r, 1] * v).add_(m[:, r, 2])

    x, y = row(0), row(1)
    if affine:
        inside = x >= 0
    else:
        w = row(2)
        x, y = x.div_(w), y.div_(w)
        inside = (w > 0).logical_and_(x >= 0)
    for condition in (x < W, y >= 0, y < H):
        inside.logical_and_(condition)
    pixel = y.floor_().mul_(W).add_(x.floor_()).masked_fill_(~inside, 0).long()
    values = masks.reshape(len(masks), -1).gather(1, pixel.flatten(1)).view_as(pixel)
    out.copy_(values.masked_fill_(~inside, fill))
