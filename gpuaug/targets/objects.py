"""The objects of a batch on the host: what the rules keep, and where crops and operations move them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from gpuaug.batch import CropWindows, Int64, Objects
from gpuaug.errors import ConfigError
from gpuaug.targets import fields, geometry
from gpuaug.targets.fields import Field
from gpuaug.targets.geometry import Bool, Float64, both
from gpuaug.targets.rules import Boxes, Targets

_ROUNDING = 1e-9  # pixels; tolerance for rounding errors, so that a box of exactly the smallest size is kept


def covered_part(windows: CropWindows) -> Float64:
    """The part of each canvas that the image covers, (x1, y1, x2, y2) [B, 4]; empty if x2 <= x1 or y2 <= y1."""
    start, stop = np.maximum(windows.offset, 0), np.minimum(windows.offset + windows.resized, windows.size)
    return np.concatenate([start[:, ::-1], stop[:, ::-1]], axis=1).astype(np.float64)


def by_rules(table: Objects, rules: Targets) -> Objects:
    """The objects with float64 coordinates. Objects and coordinates that the rules leave out are dropped.

    Pixel edges have whole-number coordinates. A keypoint that is not visible becomes (0, 0, 0).
    """
    boxes, keypoints = table.boxes, table.keypoints
    boxes = None if boxes is None or rules.boxes is None else boxes.astype(np.float64)
    keypoints = None if keypoints is None or rules.keypoints is None else keypoints.astype(np.float64)
    corners = None
    if table.corners is not None and rules.boxes is not None and rules.boxes.oriented:
        corners = geometry.convex(table.corners.astype(np.float64))
        boxes = _around(corners)
    if keypoints is not None:
        keypoints[..., :2] += half(rules)
        keypoints[~(keypoints[..., 2] > 0)] = 0
    objects = replace(table, boxes=boxes, keypoints=keypoints, corners=corners)
    if table.crowd.any() and (rules.boxes is None or rules.boxes.crowd == "drop"):
        return objects.take(~table.crowd)
    return objects


def output_keypoints(objects: Objects, rules: Targets) -> NDArray[np.float32] | None:
    """Keypoints float32 [N, K, 3], in the coordinates that the rules' ``pixel_centers`` asks for."""
    if objects.keypoints is None:
        return None
    shown = objects.keypoints.astype(np.float32)
    shown[..., :2] -= np.float32(half(rules)) * (shown[..., 2:] > 0)
    return shown


def carry(
    objects: Objects,
    *,
    crop: Float64,
    ops: Sequence[Float64 | Field],
    covered: Float64,
    size: tuple[int, int],
    limits: Boxes | None,
    flip: tuple[int, ...] | None,
    centres: bool = False,
) -> Objects:
    """Move the objects of a batch through the crop and the operations, and drop objects that the limits leave out.

    The image after the crop and after each operation is a canvas. No operation can bring back what is outside a
    canvas. A keypoint stays visible if it is inside every canvas. A box is clipped at every canvas, as the polygon that
    it has become. If there are no boxes, all objects stay. ``corners`` become the polygons that are left.

    Args:
        objects: in pixels of their images.
        crop: matrices [B, 3, 3] from the annotated image to the first canvas. A crop can only scale, move, mirror and
            transpose.
        ops: matrices [B, 3, 3] and fields from each canvas to the next. The last canvas is the output.
        covered: [B, 4], (x1, y1, x2, y2) of the first canvas that shows the image; empty if x2 <= x1 or y2 <= y1.
        size: (H, W) of every later canvas.
        limits: of boxes; None: none.
        flip: for each keypoint, the index of its mirror image. If the crop and the operations together mirror the
            image, the keypoints of each pair are exchanged.
        centres: whether to drop objects whose box has its centre outside the crop, as SSD's crop does.
    """
    canvas = np.array([[0, 0, *size[::-1]]], dtype=np.float64)
    if objects.boxes is not None:
        part, corners = covered[objects.sample], objects.corners
        cut = geometry.hulls(crop[objects.sample], objects.boxes)
        keep = np.ones(len(cut), dtype=bool)
        if centres:  # on the border is outside, as in torchvision's RandomIoUCrop
            centre = (cut[:, :2] + cut[:, 2:]) / 2
            keep &= both((centre > part[:, :2] + _ROUNDING) & (centre < part[:, 2:] - _ROUNDING))
        if corners is None:
            start, stop = np.maximum(cut[:, :2], part[:, :2]), np.minimum(cut[:, 2:], part[:, 2:])
            keep &= both(start <= stop)  # NaN is not kept
            boxes, left = fields.visible(ops, np.concatenate([start, stop], axis=1), objects.sample, size)
            whole, sides = (cut[:, 2] - cut[:, 0]) * (cut[:, 3] - cut[:, 1]), boxes[:, 2:] - boxes[:, :2]
        else:
            polygons = geometry.points(crop[objects.sample], corners)
            paths = fields.paths(ops, objects.sample)  # without fields, see `check_carried`
            corners, left, whole = geometry.visible_polygons(paths, polygons, part, size)
            boxes, sides = _around(corners), geometry.rectangles(corners)[:, 2:4]
        keep &= (left >= 0) & _large_enough(sides, left, whole, limits)  # NaN: nothing is left
        share = np.divide(left, whole, out=np.ones_like(left), where=whole > 0).clip(max=1)
        share *= 1 if objects.visible is None else objects.visible
        objects = replace(objects, boxes=np.ascontiguousarray(boxes), corners=corners, visible=share).take(keep)
    if objects.keypoints is not None:
        path = [(crop, covered[objects.sample]), *((op, canvas) for op in ops)]
        keypoints = _moved_keypoints(objects.keypoints, objects.sample, path)
        if flip is not None and len(flip) != keypoints.shape[1] and len(keypoints):
            raise ConfigError(
                f"`targets.keypoints.flip` must name the mirror image of each of the {keypoints.shape[1]} keypoints. "
                f"Found: {len(flip)} numbers."
            )
        if flip is not None and len(keypoints):
            mirrored = (geometry.mirrored(op) for op in [crop, *ops] if not isinstance(op, Field))
            swap = np.flatnonzero(reduce(np.not_equal, mirrored)[objects.sample])
            keypoints[swap] = keypoints[swap][:, flip]
        objects = replace(objects, keypoints=keypoints)
    return objects


def half(rules: Targets) -> float:
    """0.5 if whole-number keypoint coordinates are pixel centres in the source, else 0."""
    return 0.5 if rules.keypoints is not None and rules.keypoints.pixel_centers else 0.0


def _around(corners: Float64) -> Float64:
    """The upright boxes [N, 4] around polygons [N, V, 2]."""
    return np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)


def _large_enough(sides: Float64, left: Float64, whole: Float64, limits: Boxes | None) -> Bool:
    """Whether boxes of the output satisfy the limits. ``sides``: their widths and heights, [N, 2].

    ``left``, ``whole`` [N]: the areas of their visible part and of the unclipped boxes, on the first canvas.
    """
    if limits is None:
        return np.ones(len(sides), dtype=bool)
    keep = both(sides >= limits.min_size - _ROUNDING) & (sides[:, 0] * sides[:, 1] >= limits.min_area - _ROUNDING)
    if limits.max_aspect is not None:
        keep &= sides.max(axis=1) / limits.max_aspect <= sides.min(axis=1) + _ROUNDING
    if limits.min_visibility > 0:
        keep &= left >= limits.min_visibility * whole - _ROUNDING
    return keep


def _moved_keypoints(keypoints: Float64, sample: Int64, path: Sequence[tuple[Float64 | Field, Float64]]) -> Float64:
    """Keypoints [N, K, 3] after the matrices [B, 3, 3] and fields of ``path``. Those outside a canvas become (0, 0, 0).

    ``path`` also has the canvas after each of them, [N or 1, 4].
    """
    visible, xy = keypoints[..., 2] > 0, keypoints[..., :2]
    for op, area in path:
        xy = op.points(xy, sample) if isinstance(op, Field) else geometry.points(op[sample], xy)
        visible = visible & both((xy >= area[:, None, :2]) & (xy < area[:, None, 2:]))
    moved = np.zeros_like(keypoints)
    moved[..., :2], moved[..., 2] = np.where(visible[..., None], xy, 0), keypoints[..., 2] * visible
    return moved
