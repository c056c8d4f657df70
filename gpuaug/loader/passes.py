"""A pass of a loader over some batches: its threads, and how they end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import repeat
from typing import Any

from gpuaug.errors import GpuaugError
from gpuaug.loader.batch import Batch
from gpuaug.loader.partial_batch import PartialBatch
from gpuaug.loader.pipeline import Pipeline
from gpuaug.loader.tiles import HeldTiles
from gpuaug.read.ends import finalize
from gpuaug.read.order import Step, Task
from gpuaug.read.prefetch import END, Producer
from gpuaug.read.reader import Reader

TIMEOUT_S = 5.0  # longest wait for the threads of a pass to end


class PassEndedError(GpuaugError):
    """A batch was requested from an iterator that was closed before its last batch."""


class Pass(Iterator[Batch]):
    """Iterates over the batches of ``tasks``, without changing the position of a loader.

    With ``prefetch`` above 0, different threads read headers, decode, and augment. The threads hold no reference to
    this object, and end when this object is garbage-collected.

    Args:
        tasks: ``(indices, repeats, valid)`` of each batch; may be infinite.
        prefetch: number of finished batches that may wait while the next batch is made; 0: each batch is made when it
            is requested.
        steps: for each task, its step in the epoch; None: they are no steps of an epoch.

    Attributes:
        done: number of tasks whose batch was handed out, or was dropped by the faults policy.
        waited: seconds that the consumer waited for batches.
        decoders: number of decoders that take turns.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        tasks: Iterator[Task],
        *,
        epoch: int,
        prefetch: int = 2,
        steps: Iterator[Step | None] | None = None,
    ) -> None:
        self._pipeline, self._epoch = pipeline, epoch
        self.done, self.waited = 0, 0.0
        self._exhausted, self._pid = False, os.getpid()
        self._producers: list[Producer[Any]] = []
        pipeline.streams.follow_consumer()
        numbers = repeat(None) if steps is None else steps
        headers = _each(
            pipeline.read(tasks, epoch), lambda encoded: pipeline.read_headers(encoded, epoch, next(numbers))
        )
        if prefetch:
            headers = self._thread(headers, "headers", 0)
        main_thread = pipeline.recipe.main_thread
        # On CUDA, two threads take turns, each with a decoder: one feeds a batch to DALI while the other waits for it.
        self.decoders, decoded = pipeline.decoders.count if prefetch and not main_thread else 1, headers
        for number in range(self.decoders):
            decoded = _each(decoded, partial(pipeline.decode, number=number), number, self.decoders)
            if prefetch and not main_thread:
                decoded = self._thread(decoded, f"decoding-{number}" if number else "decoding", 1)
        # With `main_thread`, `__next__` augments in the consumer's thread.
        self._finish = partial(pipeline.finish, epoch=epoch, held=HeldTiles())
        self._items: Any = decoded if main_thread else _each(decoded, self._finish)
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
                if isinstance(item, PartialBatch):
                    item = self._finish(item)
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


def _each(items: Any, work: Callable[[Any], Any], turn: int = 0, turns: int = 1) -> Iterator[Any]:
    """Yield ``work(item)`` for every item, and release each item before taking the next.

    Of every ``turns`` items, only the one with number ``turn`` is worked on. The others are yielded as they are.

    This is no method of the pass, because the thread that runs the generator must not keep the pass alive.
    """
    with closing(items):
        for number, item in enumerate(items):
            yield work(item) if number % turns == turn else item
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
