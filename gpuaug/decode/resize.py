"""Parts of uint8 images resized onto their canvases: resize.cpp where the processor has AVX-512 VBMI, else torch.

Both are ``F.interpolate(antialias=True)`` on uint8, which is Pillow's resize, bit for bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from gpuaug.batch import Boxes, Int64, Interpolation
from gpuaug.native import build

Pixels = NDArray[np.uint8]

_TORCH = {
    "bilinear": torch.ops.aten._upsample_bilinear2d_aa.out,  # what F.interpolate(antialias=True) calls, with `out`
    "bicubic": torch.ops.aten._upsample_bicubic2d_aa.out,
}
_TASK = np.dtype(  # ``Task`` of resize.cpp
    [("src", np.uint64), ("row", np.int64), ("column", np.int64), ("canvas", np.uint64)]
    + [(name, np.int32) for name in ("height", "width", "to_height", "to_width", "top", "left", "H", "W")]
    + [("fill", np.int32), ("cubic", np.int32)]
)
Work = Callable[[int], None]


def one_by_one(rows: Sequence[int], work: Work) -> None:
    """Call ``work(k)`` for every k of ``rows``."""
    for k in rows:
        work(k)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled resizing, or None where there is no compiler or the processor lacks the instructions."""
    built = build.load(Path(__file__).with_name("resize.cpp"), name="resize", without="is torch's, half as fast")
    if built is None or not built.gpuaug_resize_fast():
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    built.gpuaug_resize.argtypes = [pointer, number, pointer, number, ctypes.c_int32]
    return built


def views(
    parts: Sequence[Pixels],
    boxes: Boxes,
    canvases: Pixels,
    rows: Int64,
    *,
    threads: int,
    each: Callable[[Sequence[int], Work], None] = one_by_one,
) -> None:
    """Every part resized and laid on its canvas where its box says.

    Args:
        parts: n parts uint8 [h, w, 3] of images, any strides from row to row and pixel to pixel.
        boxes: n rows; its ``box`` is not used.
        canvases: uint8 [B, H, W, 3], contiguous.
        rows: int64 [n], canvas of each part.
        threads: to use.
        each: calls ``work(k)`` for many k, where torch resizes.
    """
    compiled = library()
    if compiled is None:
        each(range(len(parts)), lambda k: _place(canvases[rows[k]], parts[k], boxes, k))
        return
    if not len(parts):
        return
    H, W = boxes.size
    tasks = np.zeros(len(parts), dtype=_TASK)
    interfaces = [part.__array_interface__ for part in parts]
    tasks["src"] = [x["data"][0] for x in interfaces]
    tasks["row"], tasks["column"] = np.array([part.strides[:2] for part in parts]).T
    tasks["height"], tasks["width"] = np.array([part.shape[:2] for part in parts]).T
    tasks["canvas"] = canvases.ctypes.data + np.asarray(rows) * (H * W * 3)
    tasks["to_height"], tasks["to_width"] = boxes.resized.T
    tasks["top"], tasks["left"] = boxes.offset.T
    tasks["H"], tasks["W"], tasks["fill"], tasks["cubic"] = H, W, boxes.fill, boxes.interpolation == "bicubic"
    arguments = tasks.ctypes.data, len(tasks), canvases.ctypes.data, canvases.nbytes, threads
    if compiled.gpuaug_resize(*arguments):  # without the interpreter's lock
        raise MemoryError(f"no memory for resizing {len(parts)} images")


def _place(canvas: Pixels, part: Pixels, boxes: Boxes, k: int) -> None:
    """One view: ``part`` uint8 [h, w, 3] resized by torch, and laid on the canvas where its box says."""
    (h, w), (y, x) = boxes.resized[k].tolist(), boxes.offset[k].tolist()
    H, W = boxes.size
    y0, x0, y1, x1 = max(y, 0), max(x, 0), min(y + h, H), min(x + w, W)
    whole = (y0, x0, y1, x1) == (0, 0, H, W)
    if not whole:
        canvas[:] = boxes.fill
    if y0 >= y1 or x0 >= x1:
        return
    if part.shape[:2] != (h, w):
        resized = canvas if whole and (h, w) == (H, W) else np.empty((h, w, 3), dtype=np.uint8)
        _resize(part, resized, boxes.interpolation)
        if resized is canvas:
            return
        part = resized
    canvas[y0:y1, x0:x1] = part[y0 - y : y1 - y, x0 - x : x1 - x]


def _resize(part: Pixels, out: Pixels, interpolation: Interpolation) -> None:
    """``F.interpolate(antialias=True)`` on uint8; 11,000 images/s to 224 on one thread."""
    part = np.require(part, requirements=["C", "W"])  # Pillow's arrays are read-only, which torch warns about
    if min(part.strides) < 0:  # of one row, mirrored: numpy calls that contiguous
        part = part.copy()
    source = torch.from_numpy(part).permute(2, 0, 1)[None]
    target = torch.from_numpy(out).permute(2, 0, 1)[None]
    _TORCH[interpolation](source, list(out.shape[:2]), False, None, None, out=target)
