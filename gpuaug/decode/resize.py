"""Parts of uint8 images resized onto their canvases: resize.cpp where the processor has AVX-512 VBMI, else torch.

Both are ``F.interpolate(antialias=True)`` on uint8, which is Pillow's resize, bit for bit.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from gpuaug.batch import Boxes, Int64, Interpolation
from gpuaug.native import build as compiled

log = logging.getLogger("gpuaug")

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
Each = Callable[[Sequence[int], Callable[[int], None]], None]


class _Job(ctypes.Structure):
    """``Job`` of resize.cpp."""

    _fields_ = (
        ("tasks", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("memory", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("threads", ctypes.c_int32),
        ("fresh", ctypes.c_int32),
    )


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled resizing, or None where there is no compiler or the processor lacks the instructions."""
    found = compiled.load(Path(__file__).with_name("resize.cpp"), name="resize", without="is torch's, half as fast")
    if found is None or not found.gpuaug_resize_fast():
        return None
    return found


def views(
    parts: Sequence[Pixels], boxes: Boxes, canvases: Pixels, rows: Int64, *, threads: int, each: Each | None = None
) -> None:
    """Every part resized and laid on its canvas where its box says.

    Args:
        parts: n parts uint8 [h, w, 3] of images, any strides from row to row and pixel to pixel.
        boxes: n rows; its ``box`` is not looked at.
        canvases: uint8 [B, H, W, 3], contiguous.
        rows: int64 [n], canvas of each part.
        threads: to use.
        each: how to call ``work(k)`` for many k where torch resizes; None: one after the other.
    """
    found = library()
    if found is None:

        def work(k: int) -> None:
            _place(canvases[rows[k]], parts[k], boxes, k)

        if each is not None:
            each(range(len(parts)), work)
        else:
            for k in range(len(parts)):
                work(k)
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
    job = _Job(
        tasks=tasks.ctypes.data,
        count=len(tasks),
        memory=canvases.ctypes.data,
        bytes=canvases.nbytes,
        threads=threads,
        fresh=1,
    )
    if found.gpuaug_resize(ctypes.byref(job)):  # without the interpreter's lock
        raise MemoryError(f"no memory for resizing {len(parts)} images")


def _place(canvas: Pixels, part: Pixels, boxes: Boxes, k: int) -> None:
    """One view: ``part`` uint8 [h, w, 3] resized by torch, and laid on the canvas where its box says."""
    (h, w), (y, x) = boxes.resized[k].tolist(), boxes.offset[k].tolist()
    H, W = boxes.size
    if (y, x, h, w) == (0, 0, H, W):
        if part.shape[:2] == (h, w):
            canvas[:] = part
        else:
            _resize(part, canvas, boxes.interpolation)
        return
    canvas[:] = boxes.fill
    y0, x0, y1, x1 = max(y, 0), max(x, 0), min(y + h, H), min(x + w, W)
    if y0 >= y1 or x0 >= x1:
        return
    if part.shape[:2] != (h, w):
        resized = np.empty((h, w, 3), dtype=np.uint8)
        _resize(part, resized, boxes.interpolation)
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
