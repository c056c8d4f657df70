"""Resizes regions of uint8 images onto canvases: with resize.cpp, or without a C++ compiler with torch.

On processors with AVX2, both give the same bits, which are those of Pillow's resize; on others, torch's own are up to
20 levels away from Pillow's. Other types are resized in float32 by torch, and rounded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from gpuaug.batch import CropWindows, Int64, Interpolation
from gpuaug.decode.request import Pixels
from gpuaug.native import build

_TORCH = {
    "bilinear": torch.ops.aten._upsample_bilinear2d_aa.out,  # F.interpolate(antialias=True) calls this op
    "bicubic": torch.ops.aten._upsample_bicubic2d_aa.out,
}
_TASK = np.dtype(  # ``Task`` of resize.cpp
    [("src", np.uint64), ("row", np.int64), ("column", np.int64), ("channel", np.int64), ("canvas", np.uint64)]
    + [(name, np.int32) for name in ("height", "width", "to_height", "to_width", "top", "left", "H", "W")]
    + [("fill", np.int32), ("cubic", np.int32)]
)
Work = Callable[[int], None]


def one_by_one(rows: Sequence[int], work: Work) -> None:
    """Call ``work(k)`` for every k of ``rows``, in the calling thread."""
    for k in rows:
        work(k)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled resize.cpp, or None if it cannot be built."""
    built = build.load("decode/resize.cpp", name="resize", without="is torch's, which is slower")
    if built is not None:
        built.gpuaug_resize.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32]
    return built


def views(
    parts: Sequence[Pixels],
    windows: CropWindows,
    canvases: Pixels,
    rows: Int64,
    *,
    threads: int,
    each: Callable[[Sequence[int], Work], None] = one_by_one,
) -> None:
    """Resize every part to ``windows.resized`` and put it at ``windows.offset`` on its canvas.

    Args:
        parts: n regions of images, [h, w, channels], with any strides; of the type of ``canvases``, in any byte order.
        windows: n rows; ``windows.window`` is not used.
        canvases: uint8, uint16 or float32 [B, H, W, channels], contiguous. The fill has the same unit.
        rows: [n], canvas number of each part.
        threads: number of threads of resize.cpp.
        each: a function that calls ``work(k)`` for every k. Only torch's resize uses it.
    """
    compiled = library() if canvases.dtype == np.uint8 and canvases.shape[3] == 3 else None
    if compiled is None:
        each(range(len(parts)), lambda k: _place(canvases[rows[k]], parts[k], windows, k))
        return
    if not len(parts):
        return
    H, W = windows.size
    tasks = _tasks(windows)
    interfaces = [part.__array_interface__ for part in parts]
    tasks["src"] = [x["data"][0] for x in interfaces]
    tasks["row"], tasks["column"], tasks["channel"] = np.array([part.strides for part in parts]).T
    tasks["height"], tasks["width"] = np.array([part.shape[:2] for part in parts]).T
    tasks["canvas"] = canvases.ctypes.data + np.asarray(rows) * (H * W * 3)
    if compiled.gpuaug_resize(tasks.ctypes.data, len(tasks), threads):  # releases the GIL
        raise MemoryError(f"out of memory while resizing {len(parts)} images")


def tasks_of(images: torch.Tensor, windows: CropWindows) -> NDArray[np.void]:
    """What resize.cpp has to do for uint8 images [B, H, W, 3] on the CPU, with any strides: a ``Task`` each."""
    tasks = _tasks(windows)
    top, left, tasks["height"], tasks["width"] = windows.window.T.astype(np.int64)
    each, tasks["row"], tasks["column"], tasks["channel"] = images.stride()
    tasks["src"] = images.data_ptr() + np.arange(len(images)) * each + top * tasks["row"] + left * tasks["column"]
    return tasks


def _tasks(windows: CropWindows) -> NDArray[np.void]:
    """The parts of tasks that ``windows`` decide."""
    tasks = np.zeros(len(windows), dtype=_TASK)
    tasks["to_height"], tasks["to_width"] = windows.resized.T
    tasks["top"], tasks["left"] = windows.offset.T
    (tasks["H"], tasks["W"]), tasks["cubic"] = windows.size, windows.interpolation == "bicubic"
    tasks["fill"] = np.broadcast_to(windows.fill, 3) @ (1, 1 << 8, 1 << 16)
    return tasks


def _place(canvas: Pixels, part: Pixels, windows: CropWindows, k: int) -> None:
    """Do with torch what resize.cpp does, for one part."""
    (h, w), (y, x) = windows.resized[k].tolist(), windows.offset[k].tolist()
    H, W = windows.size
    y0, x0, y1, x1 = max(y, 0), max(x, 0), min(y + h, H), min(x + w, W)
    whole = (y0, x0, y1, x1) == (0, 0, H, W)
    if not whole:
        canvas[:] = windows.fill
    if y0 >= y1 or x0 >= x1:
        return
    if part.shape[:2] != (h, w):
        resized = canvas if whole and (h, w) == (H, W) else np.empty((h, w, canvas.shape[2]), dtype=canvas.dtype)
        _resize(part, resized, windows.interpolation)
        if resized is canvas:
            return
        part = resized
    canvas[y0:y1, x0:x1] = part[y0 - y : y1 - y, x0 - x : x1 - x]


def _resize(part: Pixels, out: Pixels, interpolation: Interpolation) -> None:
    """``F.interpolate(antialias=True)``: of uint8 by torch's kernel for uint8, of other types in float32."""
    exact = part.dtype == np.uint8
    # torch would warn about read-only arrays, such as Pillow's
    part = np.require(part, dtype=np.uint8 if exact else np.float32, requirements=["C", "W"])
    if min(part.strides) < 0:  # numpy calls one row contiguous even with a negative stride
        part = part.copy()
    source = torch.from_numpy(part).permute(2, 0, 1)[None]
    resized = out if out.dtype == part.dtype else np.empty(out.shape, dtype=np.float32)
    target = torch.from_numpy(resized).permute(2, 0, 1)[None]
    _TORCH[interpolation](source, list(out.shape[:2]), False, None, None, out=target)
    if resized is not out:  # bicubic weights can lead below 0 and above white
        out[:] = np.rint(resized, out=resized).clip(0, np.iinfo(out.dtype).max, out=resized)
