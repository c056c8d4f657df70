"""The targets of a batch between two steps, and views that are put together from several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.batch import OBJECT_COLUMNS, CropWindows, Int64, Objects
from gpuaug.targets import geometry
from gpuaug.targets.geometry import Float64

if TYPE_CHECKING:
    from gpuaug.augment.moves import FieldMove
    from gpuaug.targets.masks import Warp


class Origins(NamedTuple):
    """Where the objects of a mosaic come from."""

    source: Int64  # for each row of the view's table, the number of its sample in the source
    tile: Int64  # for each row of the table, the number of its tile
    sources: Int64  # [B, K], numbers of the samples; -1: no tile
    matrices: Float64  # [B, K, 3, 3], from each tile's annotated image to the output
    weights: NDArray[np.float32] | None = None  # for each row of the table, the share of its image


@dataclass(slots=True, kw_only=True)
class TargetView:
    """Targets of a batch on the host: of the upright images, then of one view. Rows with a fault must not be used."""

    table: Objects  # the worker's table, in pixels of the annotated images
    objects: Objects  # upright: in pixels of the annotated images; view: of the output. `ids` are rows of `table`
    matrices: Float64  # [B, 3, 3], from the annotated to the upright image, or to the output
    sizes: Int64  # [B, 2], (height, width) of the upright images; 0 for a sample that cannot be decoded
    annotated: Int64  # [B, 2], the same of the annotated images
    decoded: list[NDArray[Any] | None] | None = None  # upright masks that a crop reads. Element None: no mask
    windows: Any = None  # CropWindows of the view
    covered: Int64 | None = None  # [B, 4], (top, left, bottom, right) of the output that shows the image; None: all
    moves: list[Warp | FieldMove] = field(default_factory=list)  # what masks still have to follow, in order
    masks: Tensor | None = None  # [B, H, W], set by TargetMover.sample
    is_tile: bool = False  # a tile for a mosaic: masks in `matrices`' pixels, objects still in those of the images
    origins: Origins | None = None  # of a view that was put together from tiles

    @property
    def upright_objects(self) -> Objects:
        """The objects in pixels of the upright images, for crops."""
        boxes, keypoints = self.objects.boxes, self.objects.keypoints
        if (self.matrices == np.eye(3)).all():
            return self.objects
        m = self.matrices[self.objects.sample]
        if keypoints is not None:
            xy = geometry.points(m, keypoints[..., :2])
            keypoints = np.concatenate([xy, keypoints[..., 2:]], axis=2)
        return replace(self.objects, boxes=None if boxes is None else geometry.hulls(m, boxes), keypoints=keypoints)


def joined(views: Sequence[TargetView]) -> tuple[Objects, Objects]:
    """The tables and the objects of several batches. ``ids`` of the objects are rows of the whole table."""
    bases = np.cumsum([0] + [len(view.table) for view in views])
    objects = _together([view.objects for view in views])
    ids = objects.ids + np.repeat(bases[:-1], [len(view.objects) for view in views])
    return _together([view.table for view in views]), replace(objects, ids=ids)


def _together(tables: Sequence[Objects]) -> Objects:
    """The objects of several batches in one table."""
    if len(tables) == 1:
        return tables[0]
    columns = dict[str, Any]()
    bases = np.cumsum([0] + [len(table.sizes) for table in tables])
    for name in OBJECT_COLUMNS:
        parts = [getattr(table, name) for table in tables]
        if name == "sample":
            parts = [part + base for part, base in zip(parts, bases, strict=False)]
        if name == "keypoints" and parts[0] is not None:  # a source may not know how many points its objects have
            most = max(part.shape[1] for part in parts)
            parts = [np.pad(part, ((0, 0), (0, most - part.shape[1]), (0, 0))) for part in parts]
        if name == "corners" and parts[0] is not None:  # a polygon may repeat its last vertex
            most = max(part.shape[1] for part in parts)
            parts = [np.pad(part, ((0, 0), (0, most - part.shape[1]), (0, 0)), mode="edge") for part in parts]
        columns[name] = None if parts[0] is None else np.concatenate(parts)
    return Objects(**columns, sizes=np.concatenate([table.sizes for table in tables]))


def with_mates(
    view: TargetView, others: TargetView, mates: Int64, mixed: NDArray[np.bool_], weights: Float64 | None
) -> TargetView:
    """A view whose rows also have the objects of their mates, after their own. Both views must have origins.

    Args:
        view: of B rows.
        others: the view of the mates; it may be the same.
        mates: int64 [B], their rows there.
        mixed: bool [B], whether a row has a mate.
        weights: [B, 2], the shares of both images; None: no object gets a weight.
    """
    own, of, count = view.origins, others.origins, len(mates)
    assert own is not None
    assert of is not None
    rows = np.stack([np.arange(count), count + mates], axis=1).reshape(-1)
    shown = np.stack([np.ones(count, dtype=bool), mixed], axis=1).reshape(-1)
    table, objects = joined([view, others])
    first, (at, owner, begin) = table.offsets[rows], of_tiles(table, rows, shown)
    at_objects, tile, _ = of_tiles(objects, rows, shown)
    objects = objects.take(at_objects)
    ids = objects.ids - first[tile] + begin[tile]
    objects = replace(objects, ids=ids, sample=tile // 2, sizes=view.objects.sizes)
    shares = None if own.weights is None else np.concatenate([own.weights, of.weights])[at]
    if weights is not None:
        given = np.ones(len(at), dtype=np.float32) if shares is None else shares
        shares = (given * weights[owner // 2, owner % 2]).astype(np.float32)
    origins = Origins(
        np.concatenate([own.source, of.source])[at],
        np.concatenate([own.tile, of.tile])[at] + own.sources.shape[1] * (owner % 2),
        np.concatenate([own.sources, np.where(mixed[:, None], of.sources[mates], -1)], axis=1),
        np.concatenate([own.matrices, of.matrices[mates]], axis=1),
        shares,
    )
    table = replace(table.take(at), sample=owner // 2, sizes=view.table.sizes)
    windows = whole_windows(count, view.windows.size)  # the mate may show where the sample does not
    return replace(view, table=table, objects=objects, origins=origins, windows=windows, covered=None)


def of_tiles(table: Objects, rows: Int64, shown: NDArray[np.bool_]) -> tuple[Int64, Int64, Int64]:
    """The objects of some rows: their places in the table, the number of the row, and where each row's begin."""
    offsets = table.offsets
    counts = (offsets[rows + 1] - offsets[rows]) * shown
    begin = np.cumsum(counts) - counts
    at = np.repeat(offsets[rows] - begin, counts) + np.arange(counts.sum())
    return at, np.repeat(np.arange(len(rows)), counts), begin


def whole_windows(count: int, size: tuple[int, int]) -> CropWindows:
    """Windows that cover all of the output."""
    sides = np.tile(np.array(size, dtype=np.int32), (count, 1))
    return CropWindows(np.concatenate([sides * 0, sides], axis=1), sides, sides * 0, size)
