"""Stored epochs: which row belongs to which sample, and where its pixels are."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.batch import EncodedBatch, Fault
from gpuaug.errors import ConfigError
from gpuaug.source.index import occurrences
from gpuaug.source.materialized import MaterializedSource, Rows

log = logging.getLogger("gpuaug")

DTYPES = {
    "uint8": torch.uint8, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
}  # fmt: skip


class StoredEpochs:
    """Finds the rows of (epoch, index, repeat) in a materialized source, and the pixels in their bytes.

    Args:
        source: where the epochs are.

    Attributes:
        rows: what a reader reads: stored samples by number of their row.
        dtype: of the stored pixels; uint8 is before normalization.
    """

    def __init__(self, source: MaterializedSource) -> None:
        self.root, self.manifest = source.root, source.manifest
        self.rows: Rows = source.rows
        self.dtype = DTYPES[source.manifest["store"]]
        self._repeats_logged = False
        self._table = lru_cache(maxsize=2)(self._sorted)

    def numbers(self, epoch: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """A function from (indices, repeats, valid) of a batch of this epoch to the numbers of its rows, int64 [B]."""
        slot = self._slot(epoch)
        stored, count = self.stored_epoch(epoch), self.manifest["epochs"]
        if epoch != stored and not self._repeats_logged:
            self._repeats_logged = True
            log.warning(
                "epoch %d shows the augmentations of epoch %d again: %d epochs are stored, from %d on",
                epoch, stored, count, self.manifest["start_epoch"],
            )  # fmt: skip

        def rows(indices: Tensor, repeats: Tensor, valid: Tensor) -> Tensor:
            positions, there = self._find(slot, indices.numpy(), repeats.numpy())
            if (missing := ~there & valid.numpy()).any():
                at = int(missing.argmax())
                raise ConfigError(
                    f"sample {int(indices[at])} (repeat {int(repeats[at])}) is not among the stored ones of epoch "
                    f"{stored}."
                )
            if not there.all():  # what fills a last batch shows a sample of the epoch again
                again, _ = self._find(slot, indices.numpy(), np.zeros_like(positions))
                positions = np.where(there, positions, again)
            return torch.from_numpy(positions + self.rows.first[slot])

        return rows

    def has(self, epoch: int, indices: Tensor) -> bool:
        """Whether all samples of an epoch's order, int64 [M], are stored for it."""
        return bool(self._find(self._slot(epoch), indices.numpy(), occurrences(indices).numpy())[1].all())

    def stored_epoch(self, epoch: int) -> int:
        """The stored epoch that is shown in place of ``epoch``: itself, or another one where it is not stored."""
        return int(self.manifest["start_epoch"]) + self._slot(epoch)

    def faults(self, batch: EncodedBatch) -> list[Fault]:
        """The faults that were stored in place of pixels."""
        unread = {fault.row for fault in batch.faults}
        faults = []
        for row in np.flatnonzero(~self._has_pixels(batch)).tolist():
            if row not in unread:
                stored = json.loads(batch.encoded(row).numpy().tobytes())
                head = bytes.fromhex(stored["head"])
                faults.append(Fault(row, stored["stage"], stored["reason"], stored["size"], head))
        return faults

    def pixels(self, batch: EncodedBatch) -> Tensor:
        """Stored bytes of all views, uint8 [B, bytes]; zero where a sample has no pixels. Copied only for those."""
        good = self._has_pixels(batch)
        if good.all():
            return batch.data.view(len(batch), self.rows.size)
        flat = torch.zeros((len(batch), self.rows.size), dtype=torch.uint8)
        for row in np.flatnonzero(good).tolist():
            flat[row] = batch.encoded(row)
        return flat

    def views(self, pixels: Tensor) -> list[Tensor]:
        """The views in stored bytes, on any device: uint8 [B, H, W, 3], or the stored dtype [B, 3, H, W]."""
        fields: Any = self.rows.record.fields
        views = []
        for number in range(len(self.manifest["views"])):
            kind, begin = fields[f"view{number}"][:2]
            part = pixels[:, begin : begin + kind.itemsize]
            if self.dtype == torch.uint8 or part.stride(0) % self.dtype.itemsize:
                part = part.contiguous()
            if part.storage_offset() % self.dtype.itemsize:
                part = part.clone()  # labels and faults before it moved it off the dtype's alignment
            views.append(part.view(self.dtype).view(len(pixels), *kind.shape))
        return views

    def _has_pixels(self, batch: EncodedBatch) -> NDArray[np.bool_]:
        """Per row; a fault has another number of bytes than pixels have."""
        return np.asarray(np.diff(batch.offsets.numpy()) == self.rows.size)

    def _slot(self, epoch: int) -> int:
        return int((epoch - self.manifest["start_epoch"]) % self.manifest["epochs"])

    def _find(
        self, slot: int, indices: NDArray[np.int64], repeats: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Positions in the stored epoch, and whether the samples are there at all."""
        values, positions = self._table(slot)
        wanted = _value(indices, repeats)
        at = np.minimum(np.searchsorted(values, wanted), len(values) - 1)
        return positions[at], values[at] == wanted

    def _sorted(self, slot: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        indices = self.rows.checked_order(slot)
        values = _value(indices, occurrences(torch.from_numpy(indices)).numpy())
        positions = np.argsort(values, kind="stable")
        return values[positions], positions


def _value(indices: NDArray[np.int64], repeats: NDArray[np.int64]) -> NDArray[np.int64]:
    """One number for (index, repeat); repeats are below 2**16, as the draws require."""
    return (indices.astype(np.int64) << 16) | repeats
