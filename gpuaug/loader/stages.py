"""Decodes and augments batches."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpuaug.augment.parameters import Chosen
from gpuaug.augment.progressive import Recipe
from gpuaug.augment.recipe import Drawn
from gpuaug.batch import CropWindows, EncodedBatch, Fault
from gpuaug.decode.decoder import Decode, Decoder
from gpuaug.decode.request import HeaderInfo

if TYPE_CHECKING:  # runs without targets do not import these modules
    from gpuaug.augment.target_stage import TargetBatch, TargetStage
    from gpuaug.targets.batch import BatchTargets

NO_DRAWS = Drawn({}, {})


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """A batch between two stages. Each stage adds what the next stages need."""

    encoded: EncodedBatch
    faults: Sequence[Fault]  # found in the headers; after decoding, all faults of the batch
    info: HeaderInfo | None = None  # None after decoding
    drawn: Drawn = NO_DRAWS
    windows: list[CropWindows] = field(default_factory=list)  # per view
    chosen: list[list[Chosen]] | None = None  # choices of each view's operations; None: `augment` makes them
    targets: TargetBatch | None = None
    images: list[Tensor] = field(default_factory=list)  # after decoding: as `decode` returns them
    ready: torch.cuda.Event | None = None  # marks the images complete; None on a CPU


@dataclass(eq=False)
class Stage:
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
