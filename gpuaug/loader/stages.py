"""What happens to a batch between reading and mixing: it is decoded and augmented, or its stored pixels are taken."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpuaug.augment.crop import Boxes
from gpuaug.augment.recipe import Augment, Drawn, MultiView
from gpuaug.batch import EncodedBatch, Fault
from gpuaug.decode.decoder import Decode, Decoder
from gpuaug.decode.plan import HeaderInfo
from gpuaug.errors import ConfigError, StateError
from gpuaug.loader.state import compare, plain
from gpuaug.native import buffers
from gpuaug.random import keyed as draw
from gpuaug.read.order import Order
from gpuaug.source.materialized import Rows

log = logging.getLogger("gpuaug")

NO_DRAWS = Drawn({}, {})


@dataclass(frozen=True, slots=True)
class HeaderBatch:
    """Encoded images, and what their headers and the draws say about decoding them."""

    encoded: EncodedBatch
    faults: Sequence[Fault]  # of the headers
    info: HeaderInfo | None = None  # None where pixels are stored
    drawn: Drawn = NO_DRAWS
    boxes: list[Boxes] = field(default_factory=list)  # of every view


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """Pixels before augmentation, with all that augmentation needs."""

    encoded: EncodedBatch
    images: list[Tensor]  # uint8 [B, H, W, 3] per view, device
    drawn: Drawn
    faults: list[Fault]
    ready: torch.cuda.Event | None = None  # the images are there after it; None on a CPU


@dataclass(eq=False)
class LiveStage:
    """Decodes and augments, in three steps that different threads may take."""

    recipe: Augment | MultiView
    settings: Decode  # of the decoder, which is opened when it is first used
    device: torch.device
    seed: int = 0
    accept_truncated: bool = False
    batch_size: int = 1  # samples that a batch usually has
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
        """Whether :meth:`augment` must run on the thread that iterates: an operation draws from torch's generator."""
        return self.recipe.main_thread

    @property
    def second_chances(self) -> tuple[int, int]:
        """Samples so far that DALI refused and Pillow decoded, and that were accepted without their end."""
        return (0, 0) if self._decoder is None else (self._decoder.rescued, self._decoder.truncated)

    def read_headers(self, encoded: EncodedBatch, epoch: int) -> HeaderBatch:
        """Read the headers, draw, and decide what each view reads of each image."""
        info = self.decoder.read_headers(encoded)
        indices, repeats = encoded.indices.numpy(), encoded.repeats.numpy()
        drawn = self.recipe.draw(seed=self.seed, epoch=epoch, indices=indices, repeats=repeats)
        return HeaderBatch(encoded, info.faults, info, drawn, self.recipe.boxes(drawn, info.height, info.width))

    def decode(self, batch: HeaderBatch) -> tuple[list[Tensor], list[Fault]]:
        """Decode every image once, into uint8 [B, H, W, 3] per view on the device; also the faults of decoding."""
        assert batch.info is not None
        return self.decoder.pixels(batch.encoded, batch.info, batch.boxes)

    def augment(self, batch: DecodedBatch, *, dtype: torch.dtype, memory_format: torch.memory_format) -> list[Tensor]:
        """[B, 3, H, W] of ``dtype`` per view, in memory of its own."""
        views: list[Tensor] = self.recipe.apply(batch.images, batch.drawn, dtype=dtype, memory_format=memory_format)
        return views

    def close(self) -> None:
        """Close the decoder; it is opened again when it is used again."""
        with self._lock:
            if self._decoder is not None:
                self._decoder.close()
                self._decoder = None


class StoredStage:
    """Takes stored epochs, in the steps of a :class:`LiveStage`: of the recipe only normalization is left.

    Args:
        stored: the epochs.
        recipe, source, seed: recipe, digest of the source and seed of the loader: those that made the epochs.
        device: where the images are wanted.
        dtype: of the loader. bfloat16 and float16 that were stored cannot become another.

    Raises:
        StateError: if the epochs were made of another recipe, seed or source, saying what differs.
        ConfigError: if the dtype does not fit.
    """

    main_thread = False  # nothing draws
    second_chances = 0, 0  # nothing is decoded
    recipe = decoder = None

    def __init__(
        self,
        stored: Rows,
        recipe: Augment | MultiView,
        *,
        source: str,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.stored, self.device = stored, device
        refuse_others(stored.root, stored.manifest["made_of"], made_of(source, recipe, seed))
        if stored.dtype not in (torch.uint8, torch.float32, dtype):
            store = stored.manifest["store"]
            raise ConfigError(
                f"`dtype` must be {store}, as the epochs in {stored.root!r} are stored. Found: "
                f"{str(dtype).removeprefix('torch.')}. Set `dtype={store}`, or materialize anew."
            )
        backends = [view.augment.backend for view in recipe.views]
        if backends != (made_by := [view["backend"] for view in stored.manifest["views"]]):
            names = "/".join(set(made_by))
            log.info("replay: pixels are those of backend %s; `augment.backend` changes nothing", names)
        self._normalize = [
            Augment(normalize=view.augment.normalize, backend=view.augment.backend) for view in recipe.views
        ]

    def read_headers(self, encoded: EncodedBatch, epoch: int) -> HeaderBatch:
        """Find the faults that were stored in place of pixels."""
        return HeaderBatch(encoded, self.stored.faults(encoded))

    def decode(self, batch: HeaderBatch) -> tuple[list[Tensor], list[Fault]]:
        """Stored pixels per view on the device: uint8 [B, H, W, 3], or the stored dtype [B, 3, H, W]."""
        return self.stored.views(buffers.to_device(self.stored.pixels(batch.encoded), self.device)), []

    def augment(self, batch: DecodedBatch, *, dtype: torch.dtype, memory_format: torch.memory_format) -> list[Tensor]:
        """Normalize uint8; copy what is normalized already."""
        if self.stored.dtype == torch.uint8:
            return [
                last.apply([view], NO_DRAWS, dtype=dtype, memory_format=memory_format)[0]
                for view, last in zip(batch.images, self._normalize, strict=True)
            ]
        # in memory that is used again: allocated and freed by several threads, batches of 18 MiB made malloc's heaps
        # grow to 1.8 GiB within 120 of them, where 260 MiB were in use
        images = []
        for view in batch.images:
            if view.device.type == "cpu":
                channels_last = memory_format == torch.channels_last
                images.append(buffers.outputs.take(tuple(view.shape), dtype, channels_last).copy_(view))
            else:
                images.append(view.to(dtype, memory_format=memory_format, copy=True))
        return images

    def close(self) -> None:
        """Nothing to give back."""


Stage = LiveStage | StoredStage


def stored_order(order: Order, stored: Rows, seed: int, epoch: int, source: Any) -> Tensor:
    """An epoch's order, int64 [M]; of samples that were not stored, that of the stored epoch shown in its place."""
    shown = stored.stored_epoch(epoch)
    for candidate in dict.fromkeys((epoch, shown)):
        indices = order.order(seed, candidate, source)
        if stored.has(epoch, indices):
            return indices
    raise ConfigError(
        f"`order` ({order!r}) shows samples that were not stored for epoch {shown}: it was materialized with "
        f"{stored.manifest['order']}. Set the same order, or materialize anew."
    )


def made_of(source: str, augment: Augment | MultiView, seed: int) -> dict[str, Any]:
    """What decides the pixels of materialized epochs, as JSON; ``source`` is its digest."""
    return dict(plain({"source": source, "seed": seed, "augment": augment.fingerprint(), "draw": draw.VERSION}))


def refuse_others(root: str, stored: dict[str, Any], here: dict[str, Any]) -> None:
    """Raise StateError where the epochs in ``root`` were made of something else."""
    if different := compare(stored, here, "stored", "here"):
        raise StateError(
            f"the epochs in {root!r} were made of another recipe, seed or source. {different}. Restore what differs, "
            "or materialize into another folder."
        )
