"""Decodes and augments batches, or loads stored pixels in place of both."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpuaug.augment.parameters import Chosen
from gpuaug.augment.progressive import Progressive, Recipe
from gpuaug.augment.recipe import Augment, Drawn
from gpuaug.batch import CropWindows, EncodedBatch, Fault
from gpuaug.decode.decoder import Decode, Decoder
from gpuaug.decode.plan import HeaderInfo
from gpuaug.errors import ConfigError, StateError
from gpuaug.loader.state import compare, plain
from gpuaug.native import buffers
from gpuaug.random import keyed as draw
from gpuaug.read.order import Order
from gpuaug.source.materialized import Rows

if TYPE_CHECKING:  # runs without targets do not import these modules
    from gpuaug.augment.target_stage import TargetBatch, TargetStage
    from gpuaug.targets.batch import BatchTargets

log = logging.getLogger("gpuaug")

NO_DRAWS = Drawn({}, {})


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """A batch between two stages. Each stage adds what the next stages need."""

    encoded: EncodedBatch
    faults: Sequence[Fault]  # found in the headers; after decoding, all faults of the batch
    info: HeaderInfo | None = None  # None if pixels are stored, and after decoding
    drawn: Drawn = NO_DRAWS
    windows: list[CropWindows] = field(default_factory=list)  # per view
    chosen: list[list[Chosen]] | None = None  # choices of each view's operations; None: `augment` makes them
    targets: TargetBatch | None = None
    images: list[Tensor] = field(default_factory=list)  # after decoding: as `decode` returns them
    ready: torch.cuda.Event | None = None  # marks the images complete; None on a CPU


@dataclass(eq=False)
class LiveStage:
    """Decodes and augments in three steps, which may run on different threads."""

    recipe: Recipe
    settings: Decode
    device: torch.device
    seed: int = 0
    accept_truncated: bool = False
    batch_size: int = 1
    targets: TargetStage | None = None
    _decoder: Decoder | None = field(default=None, init=False)
    _lock: Any = field(default_factory=threading.Lock, init=False)

    @property
    def decoder(self) -> Decoder:
        """The decoder, opened at first use."""
        with self._lock:
            if self._decoder is None:
                self._decoder = self.settings.open(
                    self.device, accept_truncated=self.accept_truncated, batch_size=self.batch_size
                )
            return self._decoder

    @property
    def main_thread(self) -> bool:
        """Whether :meth:`augment` must run on the thread that iterates over the loader."""
        return self.recipe.main_thread

    def second_chances(self) -> tuple[int, int]:
        """Counts since the last call: samples that DALI refused and Pillow decoded, and accepted truncated samples."""
        if self._decoder is None:
            return 0, 0
        counts = self._decoder.rescued, self._decoder.truncated
        self._decoder.rescued = self._decoder.truncated = 0
        return counts

    def read_headers(self, encoded: EncodedBatch, epoch: int) -> StagedBatch:
        """Read the headers, draw the random parameters, and compute each view's window in each image."""
        info = self.decoder.read_headers(encoded)
        indices, repeats = encoded.indices.numpy(), encoded.repeats.numpy()
        recipe = self.recipe.at(epoch)
        drawn = recipe.draw(seed=self.seed, epoch=epoch, indices=indices, repeats=repeats)
        if self.targets is None:
            windows = recipe.windows(drawn, info.height, info.width)
            return StagedBatch(encoded, info.faults, info, drawn, windows)
        upright = self.targets.upright(encoded, info, self.decoder)
        windows = recipe.windows(drawn, info.height, info.width, objects=upright.boxed, masks=upright.masks)
        chosen = recipe.choose(drawn, [window.size for window in windows])
        targets = self.targets.place(upright, windows, chosen, epoch=epoch)
        return StagedBatch(encoded, [*info.faults, *upright.faults], info, drawn, windows, chosen, targets)

    def decode(self, batch: StagedBatch) -> tuple[list[Tensor], list[Fault]]:
        """Decode every image once. Returns uint8 [B, H, W, 3] per view on the device, and the faults."""
        assert batch.info is not None
        images, faults = self.decoder.pixels(batch.encoded, batch.info, batch.windows)
        if self.targets is not None and batch.targets is not None:
            faults = [*faults, *self.targets.decode(batch.targets, batch.encoded, batch.info, self.decoder)]
        return images, faults

    def augment(self, batch: StagedBatch, *, dtype: torch.dtype, memory_format: torch.memory_format) -> list[Tensor]:
        """Augment the images. Returns [B, 3, H, W] of ``dtype`` per view, in new memory."""
        views: list[Tensor] = self.recipe.at(batch.drawn.epoch).apply(
            batch.images, batch.drawn, chosen=batch.chosen, dtype=dtype, memory_format=memory_format
        )
        return views

    def finish_targets(
        self, batch: StagedBatch, *, bad: Sequence[int], keep: Tensor | None
    ) -> list[BatchTargets] | None:
        """Return the targets per view, on the device. Rows ``bad`` have a fault. ``keep``: rows to keep; None: all."""
        if self.targets is None or batch.targets is None:
            return None
        return self.targets.finish(batch.targets, batch.encoded.indices, bad=bad, keep=keep, device=self.device)

    def close(self) -> None:
        """Close the decoder. The next use opens it again."""
        with self._lock:
            if self._decoder is not None:
                self._decoder.close()
                self._decoder = None


class StoredStage:
    """Loads the pixels of stored epochs in place of a :class:`LiveStage`.

    The stored pixels are already augmented. Only uint8 pixels are normalized here. ``source`` is the digest of the
    source.
    """

    main_thread = False  # no operation runs
    recipe = decoder = None

    def __init__(
        self,
        stored: Rows,
        recipe: Recipe,
        *,
        source: str,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.stored, self.device = stored, device
        if isinstance(recipe, Progressive):
            raise ConfigError(
                "`augment` must be the recipe of the stored epochs. Found: a gpuaug.Progressive, whose epochs "
                "cannot be stored. Set the recipe that was materialized."
            )
        refuse_others(stored.root, stored.manifest["made_of"], made_of(source, recipe, seed))
        if stored.dtype not in (torch.uint8, torch.float32, dtype):
            store = stored.manifest["store"]
            raise ConfigError(
                f"`dtype` must be {store}, the dtype of the epochs stored in {stored.root!r}. Found: "
                f"{str(dtype).removeprefix('torch.')}. Set `dtype={store}`, or materialize again."
            )
        backends = [view.augment.backend for view in recipe.views]
        if backends != (made_by := [view["backend"] for view in stored.manifest["views"]]):
            names = "/".join(set(made_by))
            log.info("replay: the stored pixels were made by backend %s; `augment.backend` has no effect", names)
        self._normalize = [
            Augment(normalize=view.augment.normalize, backend=view.augment.backend) for view in recipe.views
        ]

    def read_headers(self, encoded: EncodedBatch, epoch: int) -> StagedBatch:
        """Load the faults of samples that have no stored pixels."""
        return StagedBatch(encoded, self.stored.faults(encoded))

    def decode(self, batch: StagedBatch) -> tuple[list[Tensor], list[Fault]]:
        """Copy the pixels to the device, per view: uint8 [B, H, W, 3], or the stored dtype [B, 3, H, W]."""
        return self.stored.views(buffers.to_device(self.stored.pixels(batch.encoded), self.device)), []

    def augment(self, batch: StagedBatch, *, dtype: torch.dtype, memory_format: torch.memory_format) -> list[Tensor]:
        """Normalize uint8 pixels. Copy other pixels, which were stored normalized."""
        if self.stored.dtype == torch.uint8:
            return [
                last.apply([view], NO_DRAWS, dtype=dtype, memory_format=memory_format)[0]
                for view, last in zip(batch.images, self._normalize, strict=True)
            ]
        # Each thread has its own malloc heap, and several threads allocate and free the batches. Without reuse of
        # memory, the heaps grew to 1.8 GiB after 120 batches of 18 MiB, although only 260 MiB were in use.
        images = []
        for view in batch.images:
            if view.device.type == "cpu":
                channels_last = memory_format == torch.channels_last
                images.append(buffers.outputs.take(tuple(view.shape), dtype, channels_last).copy_(view))
            else:
                images.append(view.to(dtype, memory_format=memory_format, copy=True))
        return images

    def finish_targets(self, batch: StagedBatch, *, bad: Sequence[int], keep: Tensor | None) -> None:
        """Stored epochs have no targets."""

    def second_chances(self) -> tuple[int, int]:
        """Nothing is decoded."""
        return 0, 0

    def close(self) -> None:
        """Do nothing."""


Stage = LiveStage | StoredStage


def stored_order(order: Order, stored: Rows, seed: int, epoch: int, source: Any) -> Tensor:
    """Order of ``epoch``, int64 [M]. If its samples are not all stored: of the stored epoch that ``epoch`` repeats."""
    shown = stored.stored_epoch(epoch)
    for candidate in dict.fromkeys((epoch, shown)):
        indices = order.order(seed, candidate, source)
        if stored.has(epoch, indices):
            return indices
    raise ConfigError(
        f"`order` ({order!r}) needs samples that were not stored for epoch {shown}. The epoch was materialized with "
        f"{stored.manifest['order']}. Set the same order, or materialize again."
    )


def made_of(source: str, augment: Recipe, seed: int) -> dict[str, Any]:
    """Everything that decides the pixels of stored epochs, as JSON. ``source`` is the digest of the source."""
    return dict(plain({"source": source, "seed": seed, "augment": augment.fingerprint(), "draw": draw.VERSION}))


def refuse_others(root: str, stored: dict[str, Any], here: dict[str, Any]) -> None:
    """Raise StateError if the epochs in ``root`` were made with another recipe, seed or source."""
    if different := compare(stored, here, "stored", "here"):
        raise StateError(
            f"the epochs in {root!r} were made with another recipe, seed or source. {different}. Restore what "
            "differs, or materialize into another folder."
        )
