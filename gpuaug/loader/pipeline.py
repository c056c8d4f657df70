"""The pipeline of a loader: a reader and the stages after it. A :class:`Pass` runs a pipeline over some batches."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from gpuaug.batch import EncodedBatch
from gpuaug.display.batches import Appearance
from gpuaug.errors import GpuaugError
from gpuaug.loader.batch import Batch
from gpuaug.loader.faults import Faults
from gpuaug.loader.stages import Stage, StagedBatch
from gpuaug.native.buffers import to_device
from gpuaug.read.ends import finalize
from gpuaug.read.order import Task as Task
from gpuaug.read.prefetch import END, Producer
from gpuaug.read.reader import Reader
from gpuaug.source.cache import CachedSource

NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
TIMEOUT_S = 5.0  # longest wait for the threads of a pass to end
Ready = tuple[Batch, torch.cuda.Event | None]  # a finished batch; on CUDA, also the event that marks it complete


class PassEndedError(GpuaugError):
    """A batch was requested from an iterator that was closed before its last batch."""


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


@dataclass(kw_only=True, eq=False)
class Pipeline:
    """Reads, decodes, augments and mixes batches.

    A pipeline holds no reference to its loader, so that the loader can be garbage-collected while threads run.

    Attributes:
        running: weak reference to the loader's newest pass; None before the first pass and after :meth:`stop`.
        closed: whether :meth:`close` was called.
    """

    reader: Reader
    stage: Stage
    mix: Callable[..., tuple[list[Tensor], Tensor]] | None  # a Mix with its settings
    faults: Faults
    device: torch.device
    streams: Streams
    dtype: torch.dtype
    memory_format: torch.memory_format
    key_of: Callable[[int], str]
    appearance_at: Callable[[int], Appearance]  # maps an epoch to `Batch.look`
    first_row: Callable[[int], int]  # maps an epoch to what is added to sample numbers before reading
    running: weakref.ref[Pass] | None = field(default=None, init=False)
    closed: bool = field(default=False, init=False)

    @property
    def cache(self) -> CachedSource | None:
        source = self.reader.source
        return source if isinstance(source, CachedSource) else None

    def read(self, tasks: Iterable[Task], epoch: int, *, zero_copy: bool = True) -> Iterator[EncodedBatch]:
        return self.reader.batches(tasks, first=self.first_row(epoch), zero_copy=zero_copy)

    def decode_pixels(self, batch: StagedBatch) -> StagedBatch:
        """Decode the pixels, and collect all faults of the batch so far."""
        with self.streams.on(decoding=True) as stream:
            images, late = self.stage.decode(batch)
            ready = None if stream is None else stream.record_event()
        faults = {fault.row: fault for fault in [*late, *batch.faults, *batch.encoded.faults]}
        # no later stage needs the encoded bytes, and the workers wait for their memory
        encoded = replace(batch.encoded, data=NOTHING, offsets=NOTHING, views=())
        faults_in_order = [faults[row] for row in sorted(faults)]
        return replace(batch, encoded=encoded, info=None, images=images, faults=faults_in_order, ready=ready)

    def decode(self, encoded: EncodedBatch, epoch: int) -> StagedBatch:
        return self.decode_pixels(self.stage.read_headers(encoded, epoch))

    def finish(self, decoded: StagedBatch, epoch: int) -> Ready | None:
        """Augment and mix a batch; None if policy ``drop`` removes all its samples.

        Raises:
            DataError, FaultBudgetError: depending on the policy.
        """
        encoded, faults = decoded.encoded, decoded.faults
        self.faults.handle(
            [fault for fault in faults if encoded.valid[fault.row]],  # padding does not count
            indices=encoded.indices.tolist() if faults else [],
            epoch=epoch,
            samples=len(encoded),
            key_of=self.key_of,
        )
        bad = [fault.row for fault in faults]
        valid, indices, labels, keep = encoded.valid, encoded.indices, encoded.labels, None
        extra = encoded.extra or [None] * len(encoded)
        if bad:
            valid = valid.index_fill(0, torch.tensor(bad, device="cpu"), False)
        if bad and self.faults.policy != "blank":  # with `raise`, `handle` has refused all others but padding
            keep = torch.tensor([row for row in range(len(encoded)) if row not in bad], device="cpu")
            if not len(keep):
                return None
            valid, indices = valid[keep], indices[keep]
            labels = None if labels is None else labels[keep]
            extra = [extra[row] for row in keep.tolist()]
        with self.streams.on() as stream:
            if stream is not None and decoded.ready is not None:
                stream.wait_event(decoded.ready)
                for view in decoded.images:
                    view.record_stream(stream)  # allocated on the other stream
            images = self.stage.augment(decoded, dtype=self.dtype, memory_format=self.memory_format)
            images = self._without_bad(images, bad, keep)
            labels = None if labels is None else to_device(labels, self.device)
            targets: Any = self.stage.finish_targets(decoded, bad=bad, keep=keep)
            if self.mix is not None:
                images, labels = self.mix(
                    images,
                    labels,
                    valid=valid,
                    epoch=epoch,
                    first_index=int(encoded.indices[0]),
                )
            batch = Batch(
                images=_one(images),
                labels=labels,
                indices=indices,
                valid=valid,
                key_of=self.key_of,
                targets=_one(targets),
                extra=extra,
                look=replace(self.appearance_at(epoch), bad=frozenset(bad if keep is None else ())),
            )
            return batch, None if stream is None else stream.record_event()

    def _without_bad(self, images: list[Tensor], bad: Sequence[int], keep: Tensor | None) -> list[Tensor]:
        """Return the rows ``keep`` of the views. If ``keep`` is None, return all rows, with the rows ``bad`` zero."""
        if keep is not None:
            rows = to_device(keep, self.device)
            return [view.index_select(0, rows).contiguous(memory_format=self.memory_format) for view in images]
        if bad:
            rows = to_device(torch.tensor(bad, device="cpu"), self.device)
            return [view.index_fill(0, rows, 0) for view in images]
        return images

    def hand_over(self, ready: Ready) -> Batch:
        """Let the consumer's current stream wait for the batch."""
        batch, event = ready
        if event is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(event)
            images = batch.images if isinstance(batch.images, list) else [batch.images]
            targets = batch.targets if isinstance(batch.targets, list) else [batch.targets]
            moved = [tensor for view in targets if view is not None for tensor in view.on_device]
            for tensor in [*images, batch.labels, *moved]:
                if tensor is not None:
                    tensor.record_stream(current)  # allocated on another stream
        return batch

    def check_open(self) -> None:
        if self.closed:
            raise GpuaugError("this loader is closed. Build a new one.")

    def stop(self) -> None:
        """Close the running pass."""
        last, self.running = self.running, None
        if last is not None and (running := last()) is not None:
            running.close()

    def close(self, *, keep_cache: bool = False) -> None:
        """Close the running pass, the workers and the decoder, and the cache except if ``keep_cache``."""
        if not self.closed:
            self.closed = True
            self.stop()
            self.reader.close()
            self.stage.close()
            if self.cache is not None and not keep_cache:
                self.cache.close()


class Pass(Iterator[Batch]):
    """Iterates over the batches of ``tasks``, without changing the position of a loader.

    With ``prefetch`` above 0, different threads read headers, decode, and augment. The threads hold no reference to
    this object, and end when this object is garbage-collected.

    Args:
        tasks: ``(indices, repeats, valid)`` of each batch; may be infinite.
        prefetch: number of finished batches that may wait while the next batch is made; 0: each batch is made when it
            is requested.
        buffer_bytes: size of a buffer for encoded batches; None: only the workers read ahead.

    Attributes:
        done: number of tasks whose batch was handed out, or was dropped by the faults policy.
        waited: seconds that the consumer waited for batches.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        tasks: Iterator[Task],
        *,
        epoch: int,
        prefetch: int = 2,
        buffer_bytes: int | None = None,
    ) -> None:
        self._pipeline, self._epoch = pipeline, epoch
        self.done, self.waited = 0, 0.0
        self._exhausted, self._pid = False, os.getpid()
        self._producers: list[Producer[Any]] = []
        pipeline.streams.follow_consumer()
        # Without copies, a buffer would hold mapped files, which the system reads only when their bytes are used.
        encoded: Any = pipeline.read(tasks, epoch, zero_copy=buffer_bytes is None)
        if buffer_bytes is not None:
            encoded = Producer(encoded, name="gpuaug-ahead", max_bytes=buffer_bytes)
            self._producers.append(encoded)
        headers = _each(encoded, partial(pipeline.stage.read_headers, epoch=epoch))
        if prefetch:
            headers = self._thread(headers, "headers", 0)
        decoded = _each(headers, pipeline.decode_pixels)
        main_thread = pipeline.stage.main_thread
        if prefetch and not main_thread:
            decoded = self._thread(decoded, "decoding", 1)
        # With `main_thread`, `__next__` augments in the consumer's thread.
        self._items: Any = decoded if main_thread else _each(decoded, partial(pipeline.finish, epoch=epoch))
        if prefetch:
            self._items = self._thread(self._items, "loader", prefetch)
        self._end = finalize(self, _end, self._items, self._producers, pipeline.reader)

    def start(self) -> None:
        """Start prefetching. The first ``next`` also starts it."""
        if isinstance(self._items, Producer):
            self._items.start()

    @property
    def waiting(self) -> int:
        """Number of prefetched batches."""
        return self._items.waiting if isinstance(self._items, Producer) else 0

    def __next__(self) -> Batch:
        while not self._exhausted:
            if not self._end.alive or self._pid != os.getpid():
                raise PassEndedError(
                    "this iterator has ended: an error occurred, its loader was closed or started another pass, or a "
                    "fork left its threads in the parent. Use the newest iterator, or build a second loader."
                )
            began = time.perf_counter()
            try:
                item = next(self._items, END)
                if isinstance(item, StagedBatch):
                    item = self._pipeline.finish(item, self._epoch)
            except BaseException:
                self.close()
                raise
            if item is END:
                self._exhausted = self._end.alive  # if another thread closed this pass, the loop goes on and raises
                self.close()
                continue
            self.waited += time.perf_counter() - began
            self.done += 1
            self._note()
            if item is not None:  # None: policy `drop` removed the whole batch
                return self._pipeline.hand_over(item)
        raise StopIteration

    def _note(self) -> None:
        """Called when ``done`` has grown."""

    def close(self) -> None:
        """Stop the threads within seconds. The workers keep running, except if a read hangs."""
        self._end()

    def _thread(self, items: Any, name: str, count: int) -> Any:
        producer: Producer[Any] = Producer(items, name=f"gpuaug-{name}", count=count, device=self._pipeline.device)
        self._producers.append(producer)
        return producer


def _one(views: list[Any] | None) -> Any:
    """Return the view if there is only one; else return ``views`` unchanged."""
    return views[0] if views is not None and len(views) == 1 else views


def _each(items: Any, work: Callable[[Any], Any]) -> Iterator[Any]:
    """Yield ``work(item)`` for every item, and release each item before taking the next.

    This is no method of the pass, because the thread that runs the generator must not keep the pass alive.
    """
    with closing(items):
        for item in items:
            yield work(item)
            del item


def _end(items: Any, producers: Sequence[Producer[Any]], reader: Reader) -> None:
    """Stop the threads of a pass. This is no method of the pass, because it runs after the pass is freed."""
    for producer in producers:
        producer.close()
    with suppress(ValueError):  # another thread is running the generator, and ends it at the next batch
        items.close()
    if not _joined(producers):
        reader.close()  # a hanging read blocks a thread until the workers are stopped
        _joined(producers)


def _joined(producers: Sequence[Producer[Any]]) -> bool:
    deadline = time.monotonic() + TIMEOUT_S
    return all(producer.join(deadline - time.monotonic()) for producer in producers)
