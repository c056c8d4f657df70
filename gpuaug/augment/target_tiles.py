"""Puts the targets of samples together that a mosaic shows on one canvas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.augment.gather import gather
from gpuaug.augment.mosaic import Layout
from gpuaug.augment.moves import followed, moves
from gpuaug.augment.parameters import Chosen, Prepared
from gpuaug.augment.target_mover import Origins, TargetMover, TargetView, covered_by
from gpuaug.batch import OBJECT_COLUMNS, CropWindows, Int64, Objects
from gpuaug.targets.geometry import Float64
from gpuaug.targets.objects import carry

Place = tuple[TargetView, int]  # a tile: its batch, and its row there


def combine(
    mover: TargetMover,
    places: Sequence[Sequence[Place]],
    numbers: Int64,
    layout: Layout,
    ops: Sequence[Prepared],
    chosen: Sequence[Chosen],
    *,
    threads: int = 1,
) -> TargetView:
    """The targets of B outputs of K tiles each.

    An object is clipped at what the canvas shows of its tile, then at every later canvas. The limits of the rules
    compare with what the canvas shows.

    Args:
        mover: which targets there are.
        places: [B, K]. A tile that ``layout`` does not show is left out.
        numbers: int64 [B, K], numbers of the samples; -1: no tile.
        layout: where the tiles are.
        ops: the operations after the canvas.
        chosen: what they do to each output.
        threads: number of threads.
    """
    count, tiles = len(places), len(places[0])
    views = list({id(view): view for own in places for view, _ in own}.values())
    starts = dict(zip(map(id, views), np.cumsum([0] + [len(view.sizes) for view in views]), strict=False))
    rows = np.array([starts[id(view)] + row for own in places for view, row in own])  # of all batches together
    shown, (table, found) = layout.shown.reshape(-1), _joined(views)
    sizes, annotated, before = (
        np.concatenate([getattr(view, name) for view in views]) for name in ("sizes", "annotated", "matrices")
    )
    # the objects of each tile, in order; `ids` count within the table of the output
    first, anchors = table.offsets[rows], rows[::tiles]
    at, owner, begin = _of_tiles(table, rows, shown)
    table = replace(table.take(at), sample=owner // tiles, sizes=table.sizes[anchors])
    at, tile, _ = _of_tiles(found, rows, shown)
    objects = found.take(at)
    objects = replace(objects, ids=objects.ids - first[tile] + begin[tile], sample=tile)
    onto = np.tile(np.eye(3), (count * tiles, 1, 1))
    onto[:, :2, 2] = layout.origin.reshape(-1, 2)
    onto = onto @ before[rows]
    flip: Any = mover.flip
    objects = replace(objects, sizes=np.zeros((count * tiles, 2), dtype=np.int32))
    part = layout.visible.reshape(-1, 4).astype(np.float64)
    objects = carry(objects, crop=onto, ops=[], covered=part, size=layout.size, limits=None, flip=flip)
    objects = replace(objects, sample=objects.sample // tiles, sizes=table.sizes)
    done = moves(ops, chosen, layout.size)
    path, whole = followed([layout.matrices, *done], layout.size, np.tile(np.eye(3), (count, 1, 1)))
    canvas = np.concatenate([layout.canvas * 0, layout.canvas], axis=1).astype(np.float64)
    still = np.tile(np.eye(3), (count, 1, 1))
    limits = mover.rules.boxes
    objects = carry(objects, crop=still, ops=path, covered=canvas, size=layout.size, limits=limits, flip=flip)
    each = whole[:, None] @ onto.reshape(count, tiles, 3, 3)
    view = TargetView(
        table=table,
        objects=objects,
        matrices=each[:, 0],
        sizes=sizes[anchors],
        annotated=annotated[anchors],
        windows=_whole(count, layout.size),
        moves=mover.warps(done, layout.size),
        covered=covered_by(path, part, layout.size) if tiles == 1 else None,
        origins=Origins(numbers.reshape(-1)[owner], owner % tiles, numbers, each),
    )
    if mover.rules.masks is not None:
        add = most = None
        if mover.instances:
            add = begin.reshape(count, tiles) - begin[::tiles, None]
            most = np.bincount(owner, minlength=count * tiles).reshape(count, tiles)
        _add_masks(view, mover, places, layout, add, most, threads)
    return view


def _joined(views: Sequence[TargetView]) -> tuple[Objects, Objects]:
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
    table, objects = _joined([view, others])
    first, (at, owner, begin) = table.offsets[rows], _of_tiles(table, rows, shown)
    at_objects, tile, _ = _of_tiles(objects, rows, shown)
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
    windows = _whole(count, view.windows.size)  # the mate may show where the sample does not
    return replace(view, table=table, objects=objects, origins=origins, windows=windows, covered=None)


def _of_tiles(table: Objects, rows: Int64, shown: NDArray[np.bool_]) -> tuple[Int64, Int64, Int64]:
    """The objects of some rows: their places in the table, the number of the row, and where each row's begin."""
    offsets = table.offsets
    counts = (offsets[rows + 1] - offsets[rows]) * shown
    begin = np.cumsum(counts) - counts
    at = np.repeat(offsets[rows] - begin, counts) + np.arange(counts.sum())
    return at, np.repeat(np.arange(len(rows)), counts), begin


def _whole(count: int, size: tuple[int, int]) -> CropWindows:
    """Windows that cover all of the output."""
    sides = np.tile(np.array(size, dtype=np.int32), (count, 1))
    return CropWindows(np.concatenate([sides * 0, sides], axis=1), sides, sides * 0, size)


def _add_masks(
    view: TargetView,
    mover: TargetMover,
    places: Sequence[Sequence[Place]],
    layout: Layout,
    add: Int64 | None,
    most: Int64 | None,
    threads: int,
) -> None:
    parts = [[_mask(tile, row) for tile, row in own] for own in places]
    if add is not None or len({part.dtype for own in parts for part in own}) > 1:
        parts = [[part.to(torch.int32) for part in own] for own in parts]
    where = layout.origin, layout.visible, layout.inverse, layout.size
    view.masks = gather(parts, *where, fill=mover.fill, add=add, most=most, threads=threads)
    if mover.instances:
        mover.finish_instances(view)


def _mask(tile: TargetView, row: int) -> Tensor:
    assert tile.masks is not None
    return tile.masks[row]
