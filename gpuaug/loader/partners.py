"""Adds to each batch of a loader the samples that a mosaic shows beside the batch's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from gpuaug.augment.mosaic import STRIDE, Combine
from gpuaug.batch import NO_TILE, Int64, Tiles
from gpuaug.random.keyed import Stream, pick, uniforms
from gpuaug.read.order import EpochOrder, Ordered, Task


@dataclass(kw_only=True, eq=False)
class Partners:
    """Chooses the samples of an epoch's mosaics.

    Attributes:
        combine, crop: of the epoch's recipe.
        ordered: the epoch, the same on every rank.
        seed, epoch: of the random numbers.
    """

    combine: Combine
    crop: tuple[int, int]
    ordered: Ordered
    seed: int
    epoch: int
    _held: set[int] = field(default_factory=set)  # keys of samples whose tiles the pass still has

    def tasks(self, tasks: EpochOrder) -> Iterator[Task]:
        """The tasks of a pass. Samples of its earlier batches are not read again while the pass holds their tiles."""
        for k in range(len(tasks)):
            yield self._with_tiles(tasks[k], tasks.positions(k).numpy(), hold=True)

    def task(self, task: Task, positions: Int64 | None = None) -> Task:
        """One task alone. ``positions`` in the epoch; None: of the first occurrence of each sample."""
        if positions is None:
            order, indices = self.ordered.indices.numpy(), task[0].numpy()
            # a sample that the epoch does not have gets the partners of the epoch's first one, and a key of its own
            positions = NO_TILE + 1 + np.arange(len(indices))
            if len(order):
                sort = np.argsort(order, kind="stable")
                at = sort[np.searchsorted(order, indices, sorter=sort).clip(max=len(order) - 1)]
                positions = np.where(order[at] == indices, at, positions)
        return self._with_tiles(task, positions, hold=False)

    def _with_tiles(self, task: Task, keys: Int64, *, hold: bool) -> Task:
        total = max(len(self.ordered), 1)
        partners = self._partners(task, keys, np.where(keys < 0, 0, keys) % total)
        oldest, own = None, set(keys.tolist())
        others = sorted(set(partners.ravel().tolist()) - own - self._held - {NO_TILE})
        windows = [op.window for _, op in self.combine.showing if op.partners == "window"]
        if hold and windows:
            oldest, newest = int(keys[0]) - STRIDE * max(windows), int(keys.max())
            self._held = {key for key in self._held | own | set(others) if oldest <= key <= newest}
        at = torch.tensor(others, dtype=torch.int64, device="cpu") % total
        of = np.concatenate([keys[:, None], partners], axis=1)
        return (
            torch.cat([task[0], self.ordered.indices[at]]),
            torch.cat([task[1], self.ordered.repeats[at]]),
            torch.cat([task[2], torch.zeros(len(at), dtype=torch.bool, device="cpu")]),
            Tiles(np.concatenate([keys, np.array(others, dtype=np.int64)]), of, oldest),
        )

    def _partners(self, task: Task, keys: Int64, positions: Int64) -> Int64:
        """Keys of the other tiles, int64 [B, K - 1], of one operation after the other. NO_TILE: no tile.

        A key is a position in the epoch. Before the epoch's first position are the last ones of the same epoch.
        """
        total, count, ops = len(self.ordered), len(task[0]), self.combine.showing
        made = np.full((count, sum(op.tiles - 1 for _, op in ops)), NO_TILE)
        if not ops or not total:
            return made
        indices, repeats = task[0].numpy(), task[1].numpy()
        streams = [Stream("", 0, key, op.count) for key, op in self.combine.entries.items()]
        drawn = uniforms(streams, seed=self.seed, epoch=self.epoch, indices=indices, repeats=repeats)
        first = 0
        for name, op in ops:
            u, last = drawn["", 0, name], first + op.tiles - 1
            if op.partners == "fresh":
                found = pick(u[:, 3 : 2 + op.tiles], total)
                if op.tiles == 4:  # unseen ones need not be read
                    unseen = self.combine.unseen({key: drawn["", 0, key] for key in self.combine.entries}, self.crop)
                    found = np.where(unseen[:, 1:], NO_TILE, found)
            elif op.partners == "window":
                few = total <= STRIDE * op.window
                distances = op._distances(u, max(min(op.window, total - 1), 1))
                found = positions[:, None] - distances * (1 if few else STRIDE)
            else:
                mixed = Stream("", -1, name, count)  # copies start at 0, so no other stream has copy -1
                values = uniforms([mixed], seed=self.seed, epoch=self.epoch, indices=indices[:1])["", -1, name][0]
                order = np.argsort(values, kind="stable")
                place = np.argsort(order)  # of each row
                found = keys[order[(place[:, None] + np.arange(1, op.tiles)) % count]]
            made[:, first:last], first = np.where(op._applied(u)[:, None], found, NO_TILE), last
        return made
