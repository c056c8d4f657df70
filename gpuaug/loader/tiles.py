"""Puts the outputs of a mosaic together from the decoded tiles of this and earlier batches."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuaug.augment.gather import blend, gather
from gpuaug.augment.mosaic import Layout, TileMixUp
from gpuaug.batch import NO_TILE
from gpuaug.loader.partial_batch import Combined, PartialBatch

if TYPE_CHECKING:
    from gpuaug.augment.target_mover import TargetMover


class HeldTiles:
    """The decoded tiles of a pass that later batches may show. Batches come in the order of their tasks."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[PartialBatch, int]] = {}  # by key: the batch, and the row there

    def combine(self, batch: PartialBatch, targets: TargetMover | None, *, threads: int) -> PartialBatch:
        """Make the outputs of a decoded batch, without the rows that are only tiles.

        A tile that could not be read is left out.
        """
        from gpuaug.targets import geometry  # runs without tiles do not import these modules
        from gpuaug.targets.objects import covered_part

        encoded, recipe = batch.encoded, batch.recipe
        assert encoded.tiles is not None
        keys, of, oldest = encoded.tiles
        count = len(of)
        here = {key: (batch, row) for row, key in enumerate(keys.tolist())}
        known = self._held | here
        places = [
            [known[key] if key != NO_TILE else (batch, row) for key in own] for row, own in enumerate(of.tolist())
        ]
        self._held, newest = {}, int(keys[:count].max())
        if oldest is not None:
            self._held = {key: place for key, place in known.items() if oldest <= key <= newest}
        crop = batch.windows[0].size
        bad = {id(each): {fault.row for fault in each.faults} for own in places for each, _ in own}
        parts = {id(each): covered_part(each.windows[0]).astype(np.int64) for own in places for each, _ in own}
        there = (of != NO_TILE) & [[row not in bad[id(each)] for each, row in own] for own in places]
        covered = np.array([[parts[id(each)][row] for each, row in own] for own in places]) * there[..., None]
        numbers = np.array([[int(each.encoded.indices[row]) for each, row in own] for own in places])
        numbers[~there] = -1
        uniforms = {name: batch.drawn.uniforms["", 0, name][:count] for name in recipe.combine.entries}
        windows = batch.windows[0].take(np.arange(count))
        mixup = recipe.combine.named(TileMixUp)[1]
        tiles = of.shape[1] - (mixup is not None)  # without the mate
        layout = recipe.combine.lay(uniforms, crop, covered[:, :tiles], windows.rest)
        mates = recipe.combine.lay_mates(uniforms, crop, covered[:, tiles:])
        pixels = [[each.images[0][row] for each, row in own] for own in places]
        images = gather(
            [own[:tiles] for own in pixels],
            layout.origin, layout.visible, layout.inverse, layout.size,
            fill=getattr(recipe.crop, "fill", 0), threads=threads,
        )  # fmt: skip
        if mates is not None and len(mixed := np.flatnonzero(mates.shown)):
            visible = np.concatenate([mates.canvas * 0, mates.canvas], axis=1)[mixed, None]  # padding too
            others = gather(
                [pixels[row][tiles:] for row in mixed], mates.origin[mixed], visible, mates.inverse[mixed], mates.size,
                fill=mixup.fill, threads=threads,
            )  # fmt: skip
            blend(images, others, mixed, round(256 * mixup.weight))
        drawn = batch.drawn.first(count)
        (chosen,) = recipe.choose(drawn, [layout.size])
        made: Any = None
        if targets is not None:
            from gpuaug.augment.target_tiles import combine  # runs without targets do not import these modules
            from gpuaug.augment.target_view import with_mates

            ops = recipe.prepared
            views = [[((each.targets or [])[0], row) for each, row in own] for own in places]

            def moved(part: slice, own: Layout) -> Any:
                given = [each[part] for each in views], numbers[:, part], own
                return combine(targets, *given, ops, chosen, threads=threads)

            view = moved(slice(tiles), layout)
            if mates is not None:
                share = mates.shown * mixup.weight  # [B, 1]
                of_mates = moved(slice(tiles, None), mates)
                shares = np.concatenate([1 - share, share], axis=1)
                view = with_mates(view, of_mates, np.arange(count), mates.shown[:, 0], shares)
            made = [view]
        rows = slice(count)
        onto = geometry.crop(windows)
        onto[:, :2, 2] += layout.origin[:, 0]
        needed: dict[str, Any] = {name: getattr(encoded, name)[rows] for name in ("indices", "repeats", "valid")}
        needed["labels"] = None if encoded.labels is None else encoded.labels[rows]
        needed["extra"] = None if encoded.extra is None else encoded.extra[rows]
        return replace(
            batch,
            encoded=replace(encoded, tiles=None, **needed),
            faults=[fault for fault in batch.faults if fault.row < count],
            drawn=drawn,
            windows=[windows],
            chosen=[chosen],
            targets=made,
            images=[images],
            combined=Combined(numbers, layout, layout.matrices @ onto),
        )
