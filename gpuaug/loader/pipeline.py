"""The pipeline of a loader: the stages that make a batch."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from gpuaug.augment.progressive import Recipe
from gpuaug.batch import EncodedBatch, Fault
from gpuaug.decode.decoder import Decoder
from gpuaug.display.batches import Appearance
from gpuaug.errors import GpuaugError
from gpuaug.loader.batch import Batch
from gpuaug.loader.faults import Faults
from gpuaug.loader.partial_batch import Combined, PartialBatch
from gpuaug.loader.self_check import SelfCheck
from gpuaug.loader.tiles import HeldTiles
from gpuaug.native.buffers import to_device
from gpuaug.read.order import Step, Task
from gpuaug.read.reader import Reader

if TYPE_CHECKING:  # runs without targets or patch masks do not import these modules
    from gpuaug.augment.mix_targets import Mixing
    from gpuaug.augment.patch_masks import PatchMasks
    from gpuaug.augment.target_mover import TargetMover
    from gpuaug.targets.batch import BatchTargets

Ready = tuple[Batch, torch.cuda.Event | None]  # a finished batch; on CUDA, also the event that marks it complete


class Streams:
    """Two CUDA streams, one for decoding and one for augmenting. On a CPU there are no streams."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @cached_property
    def _pair(self) -> list[torch.cuda.Stream]:
        return [torch.cuda.Stream(self.device) for _ in range(2)] if self.device.type == "cuda" else []

    @contextmanager
    def on(self, *, decoding: bool = False) -> Iterator[torch.cuda.Stream | None]:
        """Make the device and one of the streams current. Yields the stream, or None on a CPU."""
        if not self._pair:
            yield None
            return
        stream = self._pair[0 if decoding else 1]
        # without `torch.cuda.device`, leaving `torch.cuda.stream` would create a CUDA context on the previous device
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield stream

    def follow_consumer(self) -> None:
        """Let both streams wait for the consumer's earlier work, such as changes of the recipe's tensors.

        One call per pass is enough: torch reuses a batch's memory only after the consumer's work on it.
        """
        for stream in self._pair:
            stream.wait_stream(torch.cuda.current_stream(self.device))


class LazyDecoders:
    """Opens each of ``count`` decoders at its first use, because a fork would lose its threads."""

    def __init__(self, open_decoder: Callable[..., Decoder], count: int = 1) -> None:
        self._open, self._lock, self.count = open_decoder, threading.Lock(), count
        self._decoders: dict[int, Decoder] = {}

    def get(self, number: int = 0) -> Decoder:
        """The first decoder, or another one with its backend."""
        with self._lock:
            for k in {0, number} - self._decoders.keys():
                self._decoders[k] = self._open(decoders=self.count)
            first, decoder = self._decoders[0], self._decoders[number]
        if decoder.backend != first.backend:  # the self-check has found the first one wrong
            decoder.use_pillow()
        return decoder

    @property
    def num_threads(self) -> int:
        """Number of threads of all decoders."""
        return self.count * self.get().num_threads

    def close(self) -> None:
        with self._lock:
            for decoder in self._decoders.values():
                decoder.close()


@dataclass(kw_only=True, eq=False)
class Pipeline:
    """Reads, decodes, augments and mixes batches. Different threads may run the stages.

    A pipeline holds no reference to its loader, so that the loader can be garbage-collected while threads run.

    Attributes:
        running: weak reference to the loader's newest pass; None before the first pass and after :meth:`stop`.
        closed: whether :meth:`close` was called.
    """

    reader: Reader
    decoders: LazyDecoders
    recipe: Recipe
    targets: TargetMover | None
    mix: Callable[..., tuple[list[Tensor], Tensor]] | None  # a Mix with its settings
    mix_targets: Callable[..., Mixing | None] | None  # TargetMix.mixing with the seed
    patch_masks: Callable[..., PatchMasks] | None  # draws the masks of the recipe's views
    faults: Faults
    device: torch.device
    streams: Streams
    seed: int
    dtype: torch.dtype
    memory_format: torch.memory_format
    key_of: Callable[[int], str]
    appearance_at: Callable[[int], Appearance]  # maps an epoch to `Batch.look`
    first_row: Callable[[int], int]  # maps an epoch to what is added to sample numbers before reading
    self_check: SelfCheck | None  # None: off, or on the CPU
    running: weakref.ref[Any] | None = field(default=None, init=False)
    closed: bool = field(default=False, init=False)

    @property
    def decoder(self) -> Decoder:
        return self.decoders.get()

    def read(self, tasks: Iterable[Task], epoch: int) -> Iterator[EncodedBatch]:
        return self.reader.batches(tasks, first=self.first_row(epoch))

    def read_headers(self, encoded: EncodedBatch, epoch: int, step: Step | None = None) -> PartialBatch:
        """Read the headers, draw the random parameters, and compute each view's window in each image.

        ``step``: None: this is a batch of chosen samples.
        """
        info = self.decoder.read_headers(encoded)
        indices, repeats = encoded.indices.numpy(), encoded.repeats.numpy()
        recipe = self.recipe.at(epoch).for_step(seed=self.seed, epoch=epoch, step=step)
        drawn = recipe.draw(seed=self.seed, epoch=epoch, indices=indices, repeats=repeats)
        hidden = self.patch_masks and self.patch_masks(indices, epoch=epoch, repeats=repeats)
        if self.targets is None:
            windows = recipe.windows(drawn, info.height, info.width)
            return PartialBatch(encoded, info.faults, info, recipe, drawn, windows, patch_masks=hidden)
        upright, faults = self.targets.upright(encoded, info, self.decoder)
        objects, masks = upright.upright_objects, upright.decoded
        windows = recipe.windows(drawn, info.height, info.width, objects=objects, masks=masks)
        if encoded.tiles is not None:
            tiles, faults = [self.targets.tile(upright, windows[0])], [*info.faults, *faults]
            return PartialBatch(encoded, faults, info, recipe, drawn, windows, targets=tiles, patch_masks=hidden)
        chosen = recipe.choose(drawn, [window.size for window in windows])
        targets = self.targets.place(upright, windows, chosen, views=recipe.views)
        return PartialBatch(encoded, [*info.faults, *faults], info, recipe, drawn, windows, chosen, targets, hidden)

    def decode(self, batch: PartialBatch, number: int = 0) -> PartialBatch:
        """Decode every image and mask once, and collect all faults of the batch so far. ``number``: of the decoder."""
        with self.streams.on(decoding=True) as stream:
            if self.self_check is not None:
                self.self_check.decode(self.decoder, batch)
            decoder = self.decoders.get(number)
            images, bad = self.decode_images(batch, decoder)
            bad = [*bad, *self.decode_masks(batch, decoder)]
            ready = None if stream is None else stream.record_event()
        faults = {fault.row: fault for fault in [*bad, *batch.faults, *batch.encoded.faults]}
        # no later stage needs the encoded bytes, and the workers wait for their memory
        encoded = replace(batch.encoded, images=(), masks=())
        faults_in_order = [faults[row] for row in sorted(faults)]
        return replace(batch, encoded=encoded, info=None, images=images, faults=faults_in_order, ready=ready)

    def decode_images(self, batch: PartialBatch, decoder: Decoder) -> tuple[list[Tensor], list[Fault]]:
        """Returns the views on the device, as `PartialBatch.images`, and the faults."""
        assert batch.info is not None
        return decoder.pixels(batch.info, batch.windows)

    def decode_masks(self, batch: PartialBatch, decoder: Decoder) -> list[Fault]:
        if self.targets is None or batch.targets is None or batch.info is None:
            return []
        return self.targets.decode(batch.targets, batch.encoded, batch.info, decoder)

    def augment(self, batch: PartialBatch) -> list[Tensor]:
        """Augment the images. Returns [B, 3, H, W] of ``dtype`` per view, in new memory."""
        recipe = batch.recipe
        output: dict[str, Any] = {"dtype": self.dtype, "memory_format": self.memory_format}
        if self.decoder.settings.pixels == "raw":  # the type is that of the files
            for images in batch.images:
                recipe.check_images(images)
        if (white := self.decoder.settings.white) is not None:
            output["white"] = white
        if self.self_check is not None:
            self.self_check.augment(recipe, batch, **output)
        return recipe.render(batch.images, batch.drawn, chosen=batch.chosen, **output)

    def finish_targets(
        self, batch: PartialBatch, bad: Sequence[int], keep: Tensor | None, mixing: Mixing | None = None
    ) -> list[BatchTargets] | None:
        """Return the targets per view, on the device. Rows ``bad`` have a fault. ``keep``: rows to keep; None: all."""
        if self.targets is None or batch.targets is None:
            return None
        views = batch.targets
        if mixing is not None:
            views = [mixing.objects(view) for view in views]
        how: dict[str, Any] = {"mixing": mixing, "size": batch.recipe.resized}
        return self.targets.finish(views, batch.encoded.indices, bad=bad, keep=keep, device=self.device, **how)

    def finish(self, decoded: PartialBatch, epoch: int, held: HeldTiles | None = None) -> Ready | None:
        """Augment and mix a batch; None if policy ``drop`` removes all its samples.

        ``held``: tiles of earlier batches of the pass; None: there is no pass.

        Raises:
            DataError, FaultBudgetError: depending on the policy.
        """
        if decoded.encoded.tiles is not None:
            decoded = self._combine(decoded, HeldTiles() if held is None else held)
        encoded, faults = decoded.encoded, decoded.faults
        self.faults.handle(
            [fault for fault in faults if encoded.valid[fault.row]],  # padding does not count
            indices=encoded.indices.tolist(),
            epoch=epoch,
            key_of=self.key_of,
        )
        bad = [fault.row for fault in faults]
        valid, indices, labels, keep = encoded.valid, encoded.indices, encoded.labels, None
        extra, masks = encoded.extra or [None] * len(encoded), decoded.patch_masks
        if bad:
            valid = valid.index_fill(0, torch.tensor(bad, device="cpu"), False)
        if bad and self.faults.policy != "blank":  # with `raise`, `handle` has refused all others but padding
            keep = torch.tensor([row for row in range(len(encoded)) if row not in bad], device="cpu")
            if not len(keep):
                return None
            valid, indices = valid[keep], indices[keep]
            labels = None if labels is None else labels[keep]
            extra = [extra[row] for row in keep.tolist()]
            masks = masks and masks.take(keep)
        with self.streams.on() as stream:
            self._wait_for(decoded, stream)
            images, mixing = self.augment(decoded), None
            if self.mix_targets is not None:
                good = np.isin(np.arange(len(encoded)), bad, invert=True)
                rows = {"indices": encoded.indices.numpy(), "repeats": encoded.repeats.numpy()}
                mixing = self.mix_targets(good=good, epoch=epoch, **rows)
            labels = None if labels is None else to_device(labels, self.device)
            targets: Any = self.finish_targets(decoded, bad, keep, mixing)
            if mixing is not None:
                images = [mixing.images(view) for view in images]
            images = self._without_bad(images, bad, keep)
            masks = masks and replace(masks, planes=to_device(masks.planes, self.device))
            if self.mix is not None:
                first = int(encoded.indices[0])
                images, labels = self.mix(images, labels, valid=valid, epoch=epoch, first_index=first)
            if (size := decoded.recipe.resized) is not None:
                resized = (interpolate(view, size, mode="bilinear", align_corners=False) for view in images)
                images = [view.contiguous(memory_format=self.memory_format) for view in resized]
            made = decoded.recipe, decoded.drawn, decoded.windows, decoded.combined, keep
            batch = Batch(
                images=_one(images),
                labels=labels,
                indices=indices,
                valid=valid,
                key_of=self.key_of,
                targets=_one(targets),
                extra=extra,
                patch_masks=masks,
                **_padding(decoded, keep),
                positions=partial(_positions, *made),
                explained=partial(_explained, *made, images[0].shape[1]),
                look=replace(self.appearance_at(epoch), bad=frozenset(bad if keep is None else ())),
            )
            return batch, None if stream is None else stream.record_event()

    def _combine(self, decoded: PartialBatch, held: HeldTiles) -> PartialBatch:
        with self.streams.on() as stream:
            self._wait_for(decoded, stream)
            return held.combine(decoded, self.targets, threads=self.decoder.num_threads)

    def _wait_for(self, decoded: PartialBatch, stream: torch.cuda.Stream | None) -> None:
        if stream is not None and decoded.ready is not None:
            stream.wait_event(decoded.ready)
            for view in decoded.images:
                view.record_stream(stream)  # allocated on the other stream

    def _without_bad(self, images: list[Tensor], bad: Sequence[int], keep: Tensor | None) -> list[Tensor]:
        """Return the rows ``keep`` of the views. If ``keep`` is None, return all rows, with the rows ``bad`` zero."""
        if not bad:
            return images
        rows = to_device(torch.tensor(bad, device="cpu") if keep is None else keep, self.device)
        if keep is None:
            return [view.index_fill(0, rows, 0) for view in images]
        return [view.index_select(0, rows).contiguous(memory_format=self.memory_format) for view in images]

    def hand_over(self, ready: Ready) -> Batch:
        """Let the consumer's current stream wait for the batch."""
        batch, event = ready
        if event is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(event)
            images = batch.images if isinstance(batch.images, list) else [batch.images]
            targets = batch.targets if isinstance(batch.targets, list) else [batch.targets]
            moved = [tensor for view in targets if view is not None for tensor in view.on_device]
            moved += [] if batch.patch_masks is None else [batch.patch_masks.planes]
            for tensor in [*images, batch.labels, *moved]:
                if tensor is not None:
                    tensor.record_stream(current)  # allocated on another stream
        return batch

    def check_open(self) -> None:
        if self.closed:
            raise GpuaugError("this loader is closed. Build a new one.")

    def newest_pass(self) -> Any:
        running = self.running  # another thread may stop the pass meanwhile
        return None if running is None else running()

    def stop(self) -> None:
        """Close the running pass."""
        running, self.running = self.newest_pass(), None
        if running is not None:
            running.close()

    def close(self) -> None:
        """Close the running pass, the workers and the decoder."""
        if not self.closed:
            self.closed = True
            self.stop()
            self.reader.close()
            self.decoders.close()


def _padding(decoded: PartialBatch, keep: Tensor | None) -> dict[str, Any]:
    """What a batch says of outputs that are as large as the largest of its images."""
    crops = [view.augment.crop for view in decoded.recipe.views]
    if len(crops) > 1 or crops[0] is None or crops[0].pad == "size":
        return {}
    windows, last = decoded.windows[0], decoded.recipe.resized or decoded.windows[0].size
    scaled = np.minimum(windows.resized, windows.size) * np.array(last) / windows.size
    sides = torch.from_numpy(np.rint(scaled).astype(np.int64))
    made = {name: getattr(crops[0], name, None) for name in ("patch", "length")}
    return {"sides": sides if keep is None else sides[keep], **made}


def _positions(*given: Any) -> list[Tensor]:
    from gpuaug.augment.positions import matrices  # other runs do not need it

    return matrices(*given)


def _explained(
    recipe: Any, drawn: Any, windows: Any, combined: Combined | None, keep: Tensor | None, channels: int, row: int
) -> list[Any]:
    from gpuaug.augment.explain import explain  # other runs do not need it

    return explain(recipe, drawn, windows, row if keep is None else int(keep[row]), channels, combined=combined)


def _one(views: list[Any] | None) -> Any:
    """Return the view if there is only one; else return ``views`` unchanged."""
    return views[0] if views is not None and len(views) == 1 else views
