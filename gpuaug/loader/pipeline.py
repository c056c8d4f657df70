"""A reader and the stages behind it, as one object: encoded bytes in, batches on the device out.

This is the only file that touches CUDA streams: one of the pipeline's own for decoding, one for augmenting.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gpuaug.augment.mix import Mix
from gpuaug.batch import Batch, EncodedBatch
from gpuaug.errors import GpuaugError
from gpuaug.loader.faults import Faults
from gpuaug.loader.passes import Pass
from gpuaug.loader.stages import DecodedBatch, HeaderBatch, Stage
from gpuaug.native.buffers import to_device
from gpuaug.read.reader import Reader
from gpuaug.source.cache import CachedSource

Task = tuple[Tensor, Tensor, Tensor]  # indices, repeats and valid of a batch: int64, int64, bool [B]
Numbers = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ReadyBatch:
    """A finished batch and, on CUDA, the event after which it is there."""

    batch: Batch
    ready: torch.cuda.Event | None


class Streams:
    """The two CUDA streams of a pipeline, made at first use; a CPU has none.

    Args:
        device: of the streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._pair: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None

    @property
    def pair(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream] | None:
        """Those of decoding and augmenting; None on a CPU."""
        if self.device.type != "cuda":
            return None
        with self._lock:
            if self._pair is None:
                self._pair = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
            return self._pair

    @contextmanager
    def on(self, *, decoding: bool = False) -> Iterator[torch.cuda.Stream | None]:
        """Within it the device, and one of its streams, are the current ones."""
        if (pair := self.pair) is None:
            yield None
            return
        stream = pair[0 if decoding else 1]
        # the device first: to leave a stream alone opens a context on whichever device was current before
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield stream

    def follow_consumer(self) -> None:
        """Let both streams wait for what the consumer has queued so far, as the recipe's own tensors.

        Once per pass is enough: torch's allocator gives the memory of a batch back only after its last use on any
        stream.
        """
        for stream in self.pair or ():
            stream.wait_stream(torch.cuda.current_stream(self.device))


@dataclass(kw_only=True, eq=False)
class Pipeline:
    """Reads, decodes, augments and mixes batches. A :class:`~gpuaug.Loader` has one and adds the order of epochs.

    ``dataclasses.replace(pipeline, faults=...)`` is a pipeline that shares everything else; close one of the two.
    No thread of it refers to a loader, so that a loader that was forgotten can end.

    Attributes:
        reader: takes bytes out of the source.
        stage: decodes and augments, or takes stored pixels.
        mix: of whole batches, or None.
        faults: decides over bad samples.
        device, dtype, memory_format: of the images.
        streams: the CUDA streams of the device.
        seed: of the draws.
        num_classes: of the source, None where it has none.
        key_of: number of a sample to its path or name.
        numbers: gives, for an epoch, what the source is asked for in place of the samples' numbers, or None.

    >>> import gpuaug
    >>> def images_per_epoch(loader: gpuaug.Loader) -> int:
    ...     done = loader.pipeline.run(iter(loader.epoch_order), epoch=loader.epoch)
    ...     return sum(len(batch) for batch in done)
    """

    reader: Reader
    stage: Stage
    mix: Mix | None = None
    faults: Faults
    device: torch.device
    streams: Streams
    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format
    seed: int = 0
    num_classes: int | None = None
    key_of: Callable[[int], str] = str
    numbers: Callable[[int], Numbers] | None = None

    @property
    def cache(self) -> CachedSource | None:
        """The source's bytes in memory; None where they are not kept."""
        source = self.reader.source
        return source if isinstance(source, CachedSource) else None

    def read(self, tasks: Iterable[Task], epoch: int, *, zero_copy: bool = True) -> Iterator[EncodedBatch]:
        """Encoded batches, one for each ``(indices, repeats, valid)``; see :meth:`Reader.batches`."""
        numbers = None if self.numbers is None else self.numbers(epoch)
        return self.reader.batches(tasks, numbers=numbers, zero_copy=zero_copy)

    def read_headers(self, encoded: EncodedBatch, epoch: int) -> HeaderBatch:
        """Read the headers and draw; all on the host."""
        return self.stage.read_headers(encoded, epoch)

    def decode_pixels(self, batch: HeaderBatch) -> DecodedBatch:
        """Decode every image once, into one uint8 batch per view."""
        encoded = batch.encoded
        with self.streams.on(decoding=True) as stream:
            images, late = self.stage.decode(batch)
            ready = None if stream is None else stream.record_event()
        faults = {fault.row: fault for fault in [*late, *batch.faults, *encoded.faults]}
        return DecodedBatch(encoded, images, batch.drawn, [faults[row] for row in sorted(faults)], ready)

    def decode(self, encoded: EncodedBatch, epoch: int) -> DecodedBatch:
        """Read the headers, draw, and decode."""
        return self.decode_pixels(self.read_headers(encoded, epoch))

    def finish(self, decoded: DecodedBatch, epoch: int, *, mix: bool = True) -> ReadyBatch | None:
        """Augment and mix; None where policy ``drop`` leaves nothing.

        Raises:
            DataError, FaultBudgetError: as the policy says.
        """
        encoded, faults = decoded.encoded, decoded.faults
        self.faults.handle(
            [fault for fault in faults if encoded.valid[fault.row]],  # a repeat that fills a batch does not count
            indices=encoded.indices.tolist() if faults else [],
            epoch=epoch,
            samples=len(encoded),
            key_of=self.key_of,
        )
        with self.streams.on() as stream:
            if stream is not None and decoded.ready is not None:
                stream.wait_event(decoded.ready)
                for view in decoded.images:
                    view.record_stream(stream)  # allocated on the other stream
            images = self.stage.augment(decoded, dtype=self.dtype, memory_format=self.memory_format)
            valid, indices, labels = encoded.valid, encoded.indices, encoded.labels
            if faults:
                bad = torch.tensor([fault.row for fault in faults])
                valid = valid.index_fill(0, bad, False)
                if self.faults.policy == "blank":
                    images = [view.index_fill(0, to_device(bad, self.device), 0) for view in images]
                else:
                    keep = torch.ones(len(encoded), dtype=torch.bool).index_fill(0, bad, False).nonzero().flatten()
                    if not len(keep):
                        return None
                    images = [self._rows(view, keep) for view in images]
                    valid, indices = valid[keep], indices[keep]
                    labels = None if labels is None else labels[keep]
            if labels is not None:
                labels = to_device(labels, self.device)
            if self.mix is not None and mix:
                images, labels = self.mix(
                    images,
                    labels,
                    valid=valid,
                    num_classes=self.num_classes,
                    seed=self.seed,
                    epoch=epoch,
                    first_index=int(encoded.indices[0]),
                )
            of_views = images if len(images) > 1 else images[0]
            batch = Batch(images=of_views, labels=labels, indices=indices, valid=valid, key_of=self.key_of)
            return ReadyBatch(batch, None if stream is None else stream.record_event())

    def hand_over(self, ready: ReadyBatch) -> Batch:
        """Let the consumer's current stream wait for the batch."""
        if ready.ready is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(ready.ready)
            images = ready.batch.images if isinstance(ready.batch.images, list) else [ready.batch.images]
            for tensor in [*images, ready.batch.labels]:
                if tensor is not None:
                    tensor.record_stream(current)  # allocated on the pipeline's stream, used on this one
        return ready.batch

    def run(self, tasks: Iterator[Task], *, epoch: int, prefetch: int = 2, buffer_bytes: int | None = None) -> Pass:
        """Go through some batches, with threads that work ahead of the consumer.

        Args:
            tasks: ``(indices, repeats, valid)`` of each batch; may be without end.
            epoch: whose draws.
            prefetch: finished batches that wait at most; with 0 each batch is made when it is asked for.
            buffer_bytes: bytes of encoded batches that wait in memory; None: only what the workers read ahead.
        """
        return Pass(self, tasks, epoch=epoch, prefetch=prefetch, buffer_bytes=buffer_bytes)

    def close(self) -> None:
        """End the workers and the decoder; both start again when they are used again."""
        self.reader.close()
        self.stage.close()

    def _rows(self, view: Tensor, rows: Tensor) -> Tensor:
        kept = view.index_select(0, to_device(rows, self.device))
        return kept.contiguous(memory_format=self.memory_format)


class Resources:
    """What a loader has to end: the pass under way, the pipeline, the cache. It does not refer to the loader.

    Args:
        pipeline: of the loader.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.closed = False
        self._running: weakref.ref[Pass] | None = None  # a pass that was forgotten ends by itself

    @property
    def running(self) -> Pass | None:
        """The pass under way."""
        return None if self._running is None else self._running()

    @running.setter
    def running(self, running: Pass) -> None:
        self._running = weakref.ref(running)

    def check_open(self) -> None:
        """Raise where the loader was closed."""
        if self.closed:
            raise GpuaugError("this loader is closed. Build a new one.")

    def stop(self) -> None:
        """End the pass under way, and its threads, within seconds."""
        running, self._running = self.running, None
        if running is not None:
            running.close()

    def close(self, *, keep_cache: bool = False) -> None:
        """End everything, once."""
        if not self.closed:
            self.closed = True
            self.stop()
            self.pipeline.close()
            if (cache := self.pipeline.cache) is not None and not keep_cache:
                cache.close()
