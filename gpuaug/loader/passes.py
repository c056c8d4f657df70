"""One way through some batches: a thread for each stage, each a few batches ahead of the next one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gpuaug.batch import Batch, EncodedBatch
from gpuaug.errors import GpuaugError
from gpuaug.loader.stages import DecodedBatch, HeaderBatch
from gpuaug.read.prefetch import END, Producer, buffered

if TYPE_CHECKING:
    from gpuaug.loader.pipeline import Pipeline, ReadyBatch, Task

TIMEOUT_S = 5.0  # for the threads of a pass to end by themselves


class PassEndedError(GpuaugError):
    """The iterator was ended by something else than its own last batch."""


class Pass(Iterator[Batch]):
    """Batches of a :class:`~gpuaug.loader.pipeline.Pipeline`; nothing outside of it changes.

    Headers are read while the batch before is decoded and the one before that is augmented. The threads do not refer
    to this object: they end when it is forgotten.

    Args:
        pipeline, tasks, epoch, prefetch, buffer_bytes: as of :meth:`Pipeline.run`.

    Attributes:
        done: tasks whose batches were handed out, or dropped by the faults policy.
        waited: seconds that the consumer waited for batches.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        tasks: Iterator[Task],
        *,
        epoch: int,
        prefetch: int,
        buffer_bytes: int | None,
    ) -> None:
        self._pipeline, self._epoch = pipeline, epoch
        self.done, self.waited = 0, 0.0
        self._closed = self._exhausted = False
        self._producers: list[Producer[Any]] = []
        pipeline.streams.follow_consumer()
        # what is kept ahead in memory must have been read
        encoded = pipeline.read(tasks, epoch, zero_copy=buffer_bytes is None)
        self._encoded: Producer[EncodedBatch] | None = None
        if buffer_bytes is not None:
            encoded = self._encoded = buffered(encoded, max_bytes=buffer_bytes)
            self._producers.append(self._encoded)
        headers: Iterator[HeaderBatch] = _headers(encoded, pipeline, epoch)
        if prefetch:
            headers = self._thread(headers, "headers", 0)
        decoded: Iterator[DecodedBatch] = _decoded(headers, pipeline)
        main_thread = pipeline.stage.main_thread
        if prefetch and not main_thread:
            decoded = self._thread(decoded, "decoding", 1)
        # where augmentation must run on the thread that iterates, decoded batches are what is made ahead
        self._items: Iterator[Any] = decoded if main_thread else _finished(decoded, pipeline, epoch)
        if prefetch:
            self._items = self._thread(self._items, "loader", prefetch)

    def start(self) -> None:
        """Start making batches ahead; asking for the first one does so as well."""
        if isinstance(self._items, Producer):
            self._items.start()

    @property
    def waiting(self) -> int:
        """Batches that are made ahead and wait."""
        return self._items.waiting if isinstance(self._items, Producer) else 0

    @property
    def bytes_waiting(self) -> int:
        """Bytes of encoded batches that wait in memory."""
        return 0 if self._encoded is None else self._encoded.bytes_waiting

    def __next__(self) -> Batch:
        while not self._exhausted:
            if self._closed:
                raise PassEndedError(
                    "this iterator has ended: after an error, or because its loader was closed or iterated anew. "
                    "Use the newest iterator, or build a second loader."
                )
            began = time.perf_counter()
            try:
                item = next(self._items, END)
                if isinstance(item, DecodedBatch):
                    item = self._pipeline.finish(item, self._epoch)
            except BaseException:
                self.close()
                raise
            if item is END:
                self._exhausted = not self._closed  # else another thread has ended it
                self.close()
                continue
            self.waited += time.perf_counter() - began
            self.done += 1
            if item is not None:  # None: policy `drop` left nothing of the batch
                return self._pipeline.hand_over(item)
        raise StopIteration

    def close(self) -> None:
        """End the threads within seconds; the workers stay."""
        if self._closed:
            return
        self._closed = True
        for producer in self._producers:
            producer.close()
        with suppress(ValueError):  # another thread is inside of the iterator, which ends at its next batch
            self._items.close()  # type: ignore[attr-defined]
        if not self._join():
            self._pipeline.reader.close()  # a read that does not return holds a thread; without workers it ends
            self._join()

    def __del__(self) -> None:
        if hasattr(self, "_items"):
            self.close()

    def _thread(self, items: Iterator[Any], name: str, count: int) -> Producer[Any]:
        producer = Producer(items, name=f"gpuaug-{name}", count=count, device=self._pipeline.device)
        self._producers.append(producer)
        return producer

    def _join(self) -> bool:
        deadline = time.monotonic() + TIMEOUT_S
        return all(producer.join(deadline - time.monotonic()) for producer in self._producers)


# No part of these refers to the pass or the loader: a thread that runs them must not keep either alive. Each lets go of
# a batch before it takes the next one.


def _headers(encoded: Any, pipeline: Pipeline, epoch: int) -> Iterator[HeaderBatch]:
    try:
        for batch in encoded:
            yield pipeline.read_headers(batch, epoch)
            del batch
    finally:
        encoded.close()


def _decoded(headers: Any, pipeline: Pipeline) -> Iterator[DecodedBatch]:
    try:
        for batch in headers:
            yield pipeline.decode_pixels(batch)
            del batch
    finally:
        headers.close()


def _finished(decoded: Any, pipeline: Pipeline, epoch: int) -> Iterator[ReadyBatch | None]:
    try:
        for batch in decoded:
            yield pipeline.finish(batch, epoch)
            del batch
    finally:
        decoded.close()
