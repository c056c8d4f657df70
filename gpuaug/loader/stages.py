"""What happens to a batch between reading and mixing: it is decoded and augmented, or its stored pixels are taken."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from gpuaug.augment.crop import Boxes
from gpuaug.augment.recipe import Augment, Drawn, MultiView
from gpuaug.batch import EncodedBatch, Fault
from gpuaug.decode.decoder import Decode, Decoder
from gpuaug.decode.plan import HeaderInfo
from gpuaug.errors import ConfigError, StateError
from gpuaug.loader.state import differences, plain
from gpuaug.native import buffers
from gpuaug.random import keyed as draw
from gpuaug.read import order as orders
from gpuaug.source.materialized import Rows

log = logging.getLogger("gpuaug")

NO_DRAWS = Drawn({}, {})


@dataclass(frozen=True, slots=True)
class HeaderBatch:
    """Encoded images, and what their headers and the draws say about decoding them."""

    encoded: EncodedBatch
    faults: Sequence[Fault]  # found in the headers
    look: HeaderInfo | None = None
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


class Stage(Protocol):
    """Turns encoded batches into augmented views, in three steps that different threads may take."""

    @property
    def main_thread(self) -> bool:
        """Whether :meth:`augment` must run on the thread that iterates."""
        ...

    @property
    def rescued(self) -> int:
        """Samples so far that one decoder refused and another one decoded."""
        ...

    @property
    def truncated(self) -> int:
        """Samples so far without their end that were accepted."""
        ...

    @property
    def recipe(self) -> Augment | MultiView | None:
        """What augments; None where pixels are stored."""
        ...

    @property
    def decoder(self) -> Decoder | None:
        """What decodes; None where pixels are stored."""
        ...

    def read_headers(self, encoded: EncodedBatch, epoch: int) -> HeaderBatch:
        """Read headers and draw; on the host."""
        ...

    def decode(self, batch: HeaderBatch) -> tuple[list[Tensor], list[Fault]]:
        """Pixels of every view on the device, and the faults that were found only now."""
        ...

    def augment(self, batch: DecodedBatch, *, dtype: torch.dtype, memory_format: torch.memory_format) -> list[Tensor]:
        """[B, 3, H, W] of ``dtype`` per view, in memory of its own."""
        ...

    def close(self) -> None:
        """Give back threads and memory."""
        ...


class LiveStage:
    """Decodes and augments.

    Args:
        recipe: what happens to the images.
        settings: of the decoder, which is opened when it is first used.
        device: where images are decoded and augmented.
        seed: of the draws.
        accept_truncated: whether a JPEG without its end is shown as far as it goes.
        batch_size: samples that a batch usually has.
    """

    def __init__(
        self,
        recipe: Augment | MultiView,
        settings: Decode,
        *,
        device: torch.device,
        seed: int = 0,
        accept_truncated: bool = False,
        batch_size: int = 1,
    ) -> None:
        self.recipe, self.settings, self.device, self.seed = recipe, settings, device, seed
        self.accept_truncated, self.batch_size = accept_truncated, batch_size
        self._decoder: Decoder | None = None
        self._lock = threading.Lock()

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
        """Whether an operation draws from torch's global generator."""
        return self.recipe.main_thread

    @property
    def rescued(self) -> int:
        """Samples that DALI refused and Pillow decoded."""
        return 0 if self._decoder is None else self._decoder.rescued

    @property
    def truncated(self) -> int:
        """Samples without their end that were accepted."""
        return 0 if self._decoder is None else self._decoder.truncated

    def read_headers(self, encoded: EncodedBatch, epoch: int) -> HeaderBatch:
        """Read the headers, draw, and decide what each view reads of each image."""
        look = self.decoder.read_headers(encoded)
        indices, repeats = encoded.indices.numpy(), encoded.repeats.numpy()
        drawn = self.recipe.draw(seed=self.seed, epoch=epoch, indices=indices, repeats=repeats)
        return HeaderBatch(encoded, look.faults, look, drawn, self.recipe.boxes(drawn, look.height, look.width))

    def decode(self, batch: HeaderBatch) -> tuple[list[Tensor], list[Fault]]:
        """Decode every image once, into uint8 [B, H, W, 3] per view."""
        assert batch.look is not None
        return self.decoder.pixels(batch.encoded, batch.look, batch.boxes)

    def augment(self, batch: DecodedBatch, *, dtype: torch.dtype, memory_format: torch.memory_format) -> list[Tensor]:
        """[B, 3, H, W] per view."""
        views: list[Tensor] = self.recipe.apply(batch.images, batch.drawn, dtype=dtype, memory_format=memory_format)
        return views

    def close(self) -> None:
        """Close the decoder; it is opened again when it is used again."""
        with self._lock:
            if self._decoder is not None:
                self._decoder.close()
                self._decoder = None


class StoredStage:
    """Shows stored epochs: nothing is decoded, and of the recipe only normalization is left.

    Args:
        stored: the epochs.
        recipe: the recipe of the loader, which must be the one that made them.
        source: digest of the source.
        seed: of the loader, which must be the one that made them.
        device: where the images are wanted.
        dtype: of the loader. bfloat16 and float16 that were stored cannot become another.

    Raises:
        StateError: if the epochs were made of another recipe, seed or source, saying what differs.
        ConfigError: if the dtype does not fit.
    """

    main_thread = False  # nothing draws
    rescued = truncated = 0  # nothing is decoded
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
        return [_empty(view, dtype, memory_format).copy_(view) for view in batch.images]

    def close(self) -> None:
        """Nothing to give back."""


def _empty(like: Tensor, dtype: torch.dtype, memory_format: torch.memory_format) -> Tensor:
    if like.device.type == "cpu":
        return buffers.outputs.take(tuple(like.shape), dtype, memory_format == torch.channels_last)
    return torch.empty(like.shape, dtype=dtype, device=like.device, memory_format=memory_format)


class StoredOrder:
    """An order whose samples are stored: that of the epoch, or of the stored epoch that is shown in its place."""

    def __init__(self, order: orders.Order, stored: Rows) -> None:
        self._order, self._stored = order, stored
        if (position := getattr(order, "position", None)) is not None:  # such orders have every active sample
            self.position = position

    def __repr__(self) -> str:
        return repr(self._order)

    def order(self, seed: int, epoch: int, source: Any) -> Tensor:
        """Numbers of samples, int64 [M]; where an epoch has others than the stored one, those of the stored one."""
        shown = self._stored.stored_epoch(epoch)
        for candidate in dict.fromkeys((epoch, shown)):
            indices = self._order.order(seed, candidate, source)
            if self._stored.has(epoch, indices):
                return indices
        raise ConfigError(
            f"`order` ({self!r}) shows samples that were not stored for epoch {shown}: it was materialized with "
            f"{self._stored.manifest['order']}. Set the same order, or materialize anew."
        )


def made_of(source: str, augment: Augment | MultiView, seed: int) -> dict[str, Any]:
    """What decides the pixels of materialized epochs, as JSON; ``source`` is its digest."""
    return dict(plain({"source": source, "seed": seed, "augment": augment.fingerprint(), "draw": draw.VERSION}))


def refuse_others(root: str, stored: dict[str, Any], here: dict[str, Any]) -> None:
    """Raise StateError where the epochs in ``root`` were made of something else."""
    different = differences(stored, here)
    shown = [d for d in different if not d[0].endswith(".digest")] or different  # a hash tells a person nothing
    if shown:
        listed = "; ".join(f"{where}: {_short(a)} stored, {_short(b)} here" for where, a, b in shown[:5])
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
