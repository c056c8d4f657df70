"""Puts the targets of samples together that a mosaic shows on one canvas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuaug.augment.gather import gather
from gpuaug.augment.mosaic import Layout
from gpuaug.augment.moves import followed, moves
from gpuaug.augment.parameters import Chosen, Prepared
from gpuaug.augment.target_mover import TargetMover, covered_by
from gpuaug.augment.target_view import Origins, TargetView, joined, of_tiles, whole_windows
from gpuaug.batch import Int64
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
    shown, (table, found) = layout.shown.reshape(-1), joined(views)
    sizes, annotated, before = (
        np.concatenate([getattr(view, name) for view in views]) for name in ("sizes", "annotated", "matrices")
    )
    # the objects of each tile, in order; `ids` count within the table of the output
    first, anchors = table.offsets[rows], rows[::tiles]
    at, owner, begin = of_tiles(table, rows, shown)
    table = replace(table.take(at), sample=owner // tiles, sizes=table.sizes[anchors])
    at, tile, _ = of_tiles(found, rows, shown)
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
        windows=whole_windows(count, layout.size),
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
