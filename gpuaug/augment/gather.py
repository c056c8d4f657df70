"""Outputs from tiles that lie on a canvas: one gather per output pixel, whatever an affine transform does afterwards.

Tile k of an output is an image whose first pixel lies at ``origin`` of the canvas, and which shows in the rectangle
``visible``. The rectangles do not overlap. Elsewhere the canvas is ``fill``. The inverse matrix ``m`` maps the centre
of output pixel (i, j), row i and column j, to the canvas, in float64 and in this order::

    x = (m[0, 0] * (j + .5) + m[0, 1] * (i + .5)) + m[0, 2]
    y = (m[1, 0] * (j + .5) + m[1, 1] * (i + .5)) + m[1, 2]

A mask takes canvas pixel (floor(y), floor(x)). An image takes the four pixels around (y - .5, x - .5), which is rounded
to 1/256 pixel. So the weights are whole numbers, and gather.cpp, Triton and torch give the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.augment.fused.backend import triton_kernels, without_triton
from gpuaug.augment.fused.cuda_steps import CannotRunError
from gpuaug.batch import Int64
from gpuaug.native import buffers, build

Float64 = NDArray[np.float64]

_ONE = 256  # steps between two pixels
_PIXELS_AT_ONCE = 2**21  # limit in torch, which takes up to 100 bytes per pixel
_TILE = np.dtype(  # ``Tile`` of gather.cpp
    [("pixels", np.uint64)]
    + [(name, np.int64) for name in ("row", "left", "top", "x1", "y1", "x2", "y2", "add", "most")]
)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled gather.cpp, or None if it cannot be built."""
    built = build.load("augment/gather.cpp", name="gather", without="runs in torch, ten times slower")
    if built is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        built.gpuaug_gather.argtypes = [pointer, pointer, *[number] * 7, pointer, number]
        built.gpuaug_blend.argtypes, built.gpuaug_blend.restype = [pointer, pointer, number, number], None
    return built


def gather(
    tiles: Sequence[Sequence[Tensor]],
    origin: Int64,
    visible: Int64,
    inverse: Float64,
    size: tuple[int, int],
    *,
    fill: int,
    add: Int64 | None = None,
    most: Int64 | None = None,
    threads: int = 1,
) -> Tensor:
    """Gather images [B, H, W, C] or masks [B, H, W] from tiles on canvases.

    Args:
        tiles: for each output, K images uint8 [h, w, C], or masks uint8 or int32 [h, w], contiguous, of one size and
            type, and on one device.
        origin: [B, K, 2], (x, y) of each tile's first pixel on the canvas.
        visible: [B, K, 4], (x1, y1, x2, y2) of the part of the canvas that shows the tile, at least 0 and inside the
            tile; empty if x2 <= x1.
        inverse: [B, 3, 3], affine, from the output to the canvas.
        size: (H, W) of the output.
        fill: value where no tile is.
        add: [B, K], what is added to the values above 0 of each mask; None: nothing.
        most: [B, K], the largest value of each mask; larger ones become 0. None: all stay.
        threads: number of threads on a CPU.
    """
    some, shape = tiles[0][0], origin.shape[:2]
    add = np.zeros(shape, dtype=np.int64) if add is None else add
    most = np.full(shape, 2**31 - 1, dtype=np.int64) if most is None else most
    channels = some.shape[2] if some.ndim == 3 else 0
    if some.is_cuda and (kernels := triton_kernels(some.device)) is not None:
        try:
            return kernels.gather(tiles, origin, visible, inverse, size, fill=fill, add=add, most=most)
        except CannotRunError as error:
            without_triton(str(error))
    if some.is_cuda or (compiled := library()) is None:
        return _by_torch(tiles, some, origin, visible, inverse, size, fill, add, most)
    made = buffers.outputs.take((len(tiles), max(channels, 1), *size), some.dtype, True)
    made = made.permute(0, 2, 3, 1) if channels else made[:, 0]
    table = np.zeros(shape, dtype=_TILE)
    table["pixels"] = [[tile.data_ptr() for tile in own] for own in tiles]
    table["row"], table["add"], table["most"] = some.stride(0) * some.itemsize, add, most
    table["left"], table["top"] = np.moveaxis(origin, -1, 0)
    table["x1"], table["y1"], table["x2"], table["y2"] = np.moveaxis(visible, -1, 0)
    matrices = np.ascontiguousarray(inverse[:, :2], dtype=np.float64)
    failed = compiled.gpuaug_gather(
        table.ctypes.data, matrices.ctypes.data, *shape, *size, channels, some.itemsize, fill, made.data_ptr(),
        threads,
    )  # fmt: skip
    if failed:
        raise MemoryError(f"out of memory while gathering {len(tiles)} outputs")
    return made


def _by_torch(
    tiles: Sequence[Sequence[Tensor]],
    some: Tensor,
    origin: Int64,
    visible: Int64,
    inverse: Float64,
    size: tuple[int, int],
    fill: int,
    add: Int64,
    most: Int64,
) -> Tensor:
    """What gather.cpp does, on any device, without waiting for it."""
    made = torch.empty((len(tiles), *size, *some.shape[2:]), dtype=some.dtype, device=some.device)
    rows = max(1, _PIXELS_AT_ONCE // size[1])
    for b, own in enumerate(tiles):
        stacked = torch.stack(list(own))
        m, begin, area, more, limit = (
            buffers.to_device(torch.from_numpy(np.array(x)), some.device)
            for x in (inverse[b], origin[b], visible[b], add[b], most[b])
        )
        for i in range(0, size[0], rows):
            out = made[b, i : i + rows]
            u = torch.arange(size[1], dtype=torch.float64, device=some.device) + 0.5
            v = torch.arange(i, i + len(out), dtype=torch.float64, device=some.device)[:, None] + 0.5
            x, y = ((m[r, 0] * u + m[r, 1] * v).add_(m[r, 2]) for r in (0, 1))  # a fused multiply-add rounds otherwise
            if some.ndim == 2:
                out.copy_(_taken(stacked, begin, area, more, limit, x.floor().long(), y.floor().long(), fill))
                continue
            x, y = ((p - 0.5).mul_(_ONE).add_(0.5).floor_().long() for p in (x, y))
            fx, fy = (x & (_ONE - 1))[..., None], (y & (_ONE - 1))[..., None]
            x, y = x >> 8, y >> 8
            total = torch.full((*x.shape, some.shape[2]), 32768, dtype=torch.int64, device=some.device)
            for dx, dy, weight in (
                (0, 0, (_ONE - fx) * (_ONE - fy)), (1, 0, fx * (_ONE - fy)), (0, 1, (_ONE - fx) * fy), (1, 1, fx * fy)
            ):  # fmt: skip
                total += weight * _taken(stacked, begin, area, more, limit, x + dx, y + dy, fill)
            out.copy_(total >> 16)
    return made


def _taken(
    tiles: Tensor, origin: Tensor, visible: Tensor, add: Tensor, most: Tensor, x: Tensor, y: Tensor, fill: int
) -> Tensor:
    """Canvas pixels (y, x) of one output, int64 [rows, W], or [rows, W, C] for images."""
    inside = [(x >= a) & (y >= b) & (x < c) & (y < d) for a, b, c, d in (area.unbind() for area in visible)]
    number, none = torch.zeros_like(x), ~torch.stack(inside).any(0)
    for k, here in enumerate(inside):
        number.masked_fill_(here, k)
    row, column = (p - origin[number, axis] for axis, p in ((1, y), (0, x)))
    row, column = row.masked_fill_(none, 0), column.masked_fill_(none, 0)
    values = tiles[number, row, column].long()
    if tiles.ndim == 4:
        return values.masked_fill_(none[..., None], fill)
    kept = (values > 0) & (values <= most[number])
    return torch.where(kept, values + add[number], 0).masked_fill_(none, fill)


def blend(images: Tensor, others: Tensor, rows: Int64, steps: int) -> None:
    """Blend rows of images uint8 [B, H, W, C] with ``others`` [len(rows), H, W, C], in place.

    ``steps``: the share of the others, in 1/256. The result is rounded down.
    """
    compiled = None if images.is_cuda else library()
    for row, other in zip(rows.tolist(), others, strict=True):  # a whole batch in int32 takes much memory
        own = images[row]
        if compiled is not None and own.is_contiguous() and other.is_contiguous():
            compiled.gpuaug_blend(own.data_ptr(), other.data_ptr(), own.numel(), steps)
        else:
            own.copy_((own.int().mul_(_ONE - steps).add_(other.int(), alpha=steps)) >> 8)
