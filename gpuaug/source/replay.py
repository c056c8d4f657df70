"""Stored epochs in place of decoding and augmentation.

takes: the pixels of stored samples, as bytes; the recipe that made them.
does: finds the row of (epoch, index, repeat); on the device one pass that normalizes uint8, or only a copy.
gives: what the recipe would give: float [B, 3, H, W] per view.

A :class:`Replay` stands in the loader where decoder and recipe stand otherwise, so order, prefetch, faults, mix and
state stay the loader's own. It draws nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.augment.recipe import Augment, Drawn, MultiView
from gpuaug.batch import EncodedBatch, Fault
from gpuaug.decode.decoder import Look
from gpuaug.errors import ConfigError, StateError
from gpuaug.loader.state import differences, plain
from gpuaug.native import buffers as recycled
from gpuaug.random import keyed as draw
from gpuaug.read import order as orders
from gpuaug.source.materialized import MaterializedSource, Rows

log = logging.getLogger("gpuaug")

_DTYPES = {
    "uint8": torch.uint8, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
}  # fmt: skip


class Replay:
    """Stored epochs of a recipe.

    Args:
        source: where they are.
        augment: the recipe; must be the one that made them.
        seed: likewise.
        dtype: of the loader; bfloat16 and float16 that were stored cannot become another.

    Raises:
        StateError: if they were made of another recipe or seed, saying what differs.
        ConfigError: if the dtype does not fit.
    """

    main_thread = False  # nothing draws
    rescued = truncated = 0  # nothing is decoded

    def __init__(
        self, source: MaterializedSource, *, augment: Augment | MultiView, seed: int, dtype: torch.dtype
    ) -> None:
        self.rows: Rows = source.rows
        self._manifest = source.manifest
        self._store = source.manifest["store"]
        refuse_others(source.root, source.manifest["made_of"], made_of(source.digest(), augment, seed))
        if self._store != "uint8" and _DTYPES[self._store] not in (torch.float32, dtype):
            raise ConfigError(
                f"`dtype` must be {self._store}, as the epochs in {source.root!r} are stored. Found: "
                f"{str(dtype).removeprefix('torch.')}. Set `dtype={self._store}`, or materialize anew."
            )
        backends = [view.augment.backend for view in augment.views]
        if backends != (stored := [view["backend"] for view in source.manifest["views"]]):
            log.info("replay: pixels are those of backend %s; `augment.backend` changes nothing", "/".join(set(stored)))
        # what is left of a recipe for uint8 pixels
        self._last = [Augment(normalize=v.augment.normalize, backend=v.augment.backend) for v in augment.views]
        self._device = torch.device("cpu")
        self._repeats_said = False
        self._table = lru_cache(maxsize=2)(self._sorted)

    # -- which row is whose

    def order(self, order: orders.Order) -> orders.Order:
        """The same order, checked against what is stored."""
        return _Stored(order, self)

    def numbers(self, epoch: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """(indices, repeats, valid) of a batch of this epoch to the numbers of their rows, int64 [B]."""
        slot = self._slot(epoch)
        start, count = self._manifest["start_epoch"], self._manifest["epochs"]
        if epoch != start + slot and not self._repeats_said:
            self._repeats_said = True
            log.warning(
                "epoch %d shows the augmentations of epoch %d again: %d epochs are stored, from %d on",
                epoch,
                start + slot,
                count,
                start,
            )

        def rows(indices: Tensor, repeats: Tensor, valid: Tensor) -> Tensor:
            found, there = self._find(slot, indices.numpy(), repeats.numpy())
            if (missing := ~there & valid.numpy()).any():
                at = int(missing.argmax())
                raise ConfigError(
                    f"sample {int(indices[at])} (repeat {int(repeats[at])}) is not among the stored ones of epoch "
                    f"{start + slot}."
                )
            if not there.all():  # what fills a last batch shows a sample of the epoch again
                again, _ = self._find(slot, indices.numpy(), np.zeros_like(found))
                found = np.where(there, found, again)
            return torch.from_numpy(found + self.rows.first[slot])

        return rows

    def has(self, epoch: int, indices: Tensor) -> bool:
        """Whether all samples of an epoch's order are stored for it."""
        ordered = orders.Ordered(indices)
        return bool(self._find(self._slot(epoch), ordered.indices.numpy(), ordered.repeats.numpy())[1].all())

    def stored_epoch(self, epoch: int) -> int:
        """The epoch that is shown in its place: itself, or one of the stored ones."""
        return int(self._manifest["start_epoch"]) + self._slot(epoch)

    def _slot(self, epoch: int) -> int:
        return int((epoch - self._manifest["start_epoch"]) % self._manifest["epochs"])

    def _find(
        self, slot: int, indices: NDArray[np.int64], repeats: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Positions in the stored epoch, and whether they are there at all."""
        values, positions = self._table(slot)
        wanted = _value(indices, repeats)
        at = np.minimum(np.searchsorted(values, wanted), len(values) - 1)
        return positions[at], values[at] == wanted

    def _sorted(self, slot: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        ordered = orders.Ordered(torch.from_numpy(self.rows.checked_order(slot)))
        values = _value(ordered.indices.numpy(), ordered.repeats.numpy())
        positions = np.argsort(values, kind="stable")
        return values[positions], positions

    # -- in the place of Decode and its decoder

    def open(self, device: torch.device, *, accept_truncated: bool = False, batch_size: int = 1) -> Replay:
        """Itself, for one device."""
        self._device = device
        return self

    def look(self, batch: EncodedBatch) -> Look:
        """The faults that were stored instead of pixels."""
        read = {fault.row for fault in batch.faults}
        faults = []
        for row in np.flatnonzero(np.diff(batch.offsets.numpy()) != self.rows.size).tolist():
            if row not in read:
                found = json.loads(batch.encoded(row).numpy().tobytes())
                head = bytes.fromhex(found["head"])
                faults.append(Fault(row, found["stage"], found["reason"], found["size"], head))
        none = np.zeros(len(batch), dtype=np.int64)
        return Look(height=none, width=none, orientation=none, faults=faults, route=none.astype(np.int8))

    def pixels(self, batch: EncodedBatch, _look: Look, _boxes: Sequence[Any]) -> tuple[list[Tensor], list[Fault]]:
        """Stored pixels per view: uint8 [B, H, W, 3], or the stored dtype [B, 3, H, W]; zero where there are none."""
        size, good = self.rows.size, np.diff(batch.offsets.numpy()) == self.rows.size
        if good.all():
            flat = batch.data.view(len(batch), size)
        else:
            flat = torch.zeros((len(batch), size), dtype=torch.uint8)
            for row in np.flatnonzero(good).tolist():
                flat[row] = batch.encoded(row)
        flat = recycled.to_device(flat, self._device)
        fields: Any = self.rows.record.fields
        views, dtype = [], _DTYPES[self._store]
        for number in range(len(self._last)):
            kind, begin = fields[f"view{number}"][:2]
            part, whole = flat[:, begin : begin + kind.itemsize], dtype.itemsize
            if dtype == torch.uint8 or part.stride(0) % whole:
                part = part.contiguous()
            if part.storage_offset() % whole:
                part = part.clone()  # labels and faults before it moved it off the dtype's alignment
            views.append(part.view(dtype).view(len(batch), *kind.shape))
        return views, []

    def close(self) -> None:
        """Nothing to give back."""

    # -- in the place of the recipe

    def draw(self, **_: Any) -> Drawn:
        """Nothing."""
        return Drawn({}, {})

    def boxes(self, _drawn: Drawn, _heights: Any, _widths: Any) -> list[Any]:
        """None: the pixels are cropped."""
        return []

    def apply(
        self, images: Sequence[Tensor], drawn: Drawn, *, dtype: torch.dtype, memory_format: torch.memory_format
    ) -> list[Tensor]:
        """What :meth:`pixels` gives to [B, 3, H, W] of ``dtype``, in memory of its own."""
        if self._store == "uint8":
            return [
                last.apply([x], drawn, dtype=dtype, memory_format=memory_format)[0]
                for x, last in zip(images, self._last, strict=True)
            ]
        # in memory that is used again: allocated and freed by several threads, batches of 18 MiB made malloc's heaps
        # grow to 1.8 GiB within 120 of them, where 260 MiB were in use
        return [self._empty(x, dtype, memory_format).copy_(x) for x in images]

    def _empty(self, like: Tensor, dtype: torch.dtype, memory_format: torch.memory_format) -> Tensor:
        if like.device.type == "cpu":
            return recycled.outputs.take(tuple(like.shape), dtype, memory_format == torch.channels_last)
        return torch.empty(like.shape, dtype=dtype, device=like.device, memory_format=memory_format)


class _Stored:
    """An order whose samples are stored: that of the epoch, or of the stored one that is shown in its place."""

    def __init__(self, order: orders.Order, replay: Replay) -> None:
        self._order, self._replay = order, replay
        if (position := getattr(order, "position", None)) is not None:  # such orders have every active sample
            self.position = position

    def __repr__(self) -> str:
        return repr(self._order)

    def order(self, seed: int, epoch: int, source: Any) -> Tensor:
        """Numbers of samples, int64 [M]; where an epoch has others than the stored one, those of the stored one."""
        for e in dict.fromkeys((epoch, self._replay.stored_epoch(epoch))):
            found = self._order.order(seed, e, source)
            if self._replay.has(epoch, found):
                return found
        raise ConfigError(
            f"`order` ({self!r}) shows samples that were not stored for epoch {self._replay.stored_epoch(epoch)}: it "
            f"was materialized with {self._replay._manifest['order']}. Set the same order, or materialize anew."
        )


def made_of(source: str, augment: Augment | MultiView, seed: int) -> dict[str, Any]:
    """What decides the pixels of materialized epochs, as JSON; ``source`` is its digest."""
    return dict(plain({"source": source, "seed": seed, "augment": augment.fingerprint(), "draw": draw.VERSION}))


def refuse_others(root: str, stored: dict[str, Any], here: dict[str, Any]) -> None:
    """Raise StateError where the epochs in ``root`` were made of something else."""
    found = differences(stored, here)
    told = [d for d in found if not d[0].endswith(".digest")] or found  # a hash tells a person nothing
    if told:
        listed = "; ".join(f"{where}: {_short(a)} stored, {_short(b)} here" for where, a, b in told[:5])
        raise StateError(
            f"the epochs in {root!r} were made of another recipe, seed or source. {listed}. Restore what differs, or "
            "materialize into another folder."
        )


def _short(value: Any) -> str:
    """A setting as text; of whole operations and views only their names."""
    if isinstance(value, list) and value and all(isinstance(x, dict) and "name" in x for x in value):
        value = [x["name"] for x in value]
    if isinstance(value, dict) and "class" in value:
        value = value["class"].rpartition(".")[2]
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:99]}…"


def _value(indices: NDArray[np.int64], repeats: NDArray[np.int64]) -> NDArray[np.int64]:
    """One number for (index, repeat); repeats are below 2**16, as the draws require."""
    return (indices.astype(np.int64) << 16) | repeats
