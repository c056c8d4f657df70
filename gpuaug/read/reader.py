"""Reads encoded bytes of whole batches, in workers that never decode."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuaug import checks
from gpuaug.batch import EncodedBatch
from gpuaug.errors import ConfigError, SourceError
from gpuaug.read.ends import finalize
from gpuaug.read.order import Task
from gpuaug.read.samples import PICKLABLE, THREADS, EndedError, Rest, Samples, is_over, join, offsets_of, packed
from gpuaug.read.workers import TIMEOUT_S, Planned, Workers, raised
from gpuaug.source.adapt import adapt
from gpuaug.source.index import share

log = logging.getLogger("gpuaug")

TIMEOUT = 120.0  # seconds


class Reader:
    """Reads batches in a given order, in worker processes that live for many epochs.

    An image above 512 MiB is a fault. In a batch, the images above 16 MiB may have 2 GiB in total. An image that would
    exceed the total is a fault, too. Memory-mapped sources have no limits.

    Args:
        source: see :mod:`gpuaug.source`. With a start method other than fork, every worker gets a pickled copy.
        num_workers: number of processes; 0 reads in this process.
        timeout: seconds to wait for a batch from the workers; ``math.inf`` waits forever.
        read_threads: the largest number of reads at a time in each worker, or in this process without workers. Threads
            are used if the source is ``thread_safe`` and a read takes longer than 0.5 ms.
        prefetch_factor: batches that each worker reads ahead.
        start_method: fork, forkserver or spawn; None: Python's default.
        targets: the kinds of targets to read: masks, boxes, keypoints.
    """

    def __init__(
        self,
        source: Any,
        *,
        num_workers: int = 0,
        timeout: float = TIMEOUT,
        read_threads: int = THREADS,
        prefetch_factor: int = 2,
        start_method: str | None = None,
        targets: Sequence[str] = (),
    ) -> None:
        checks.whole_number("num_workers", num_workers, 0)
        checks.whole_number("read_threads", read_threads, 1)
        checks.whole_number("prefetch_factor", prefetch_factor, 1)
        if start_method is not None:
            checks.one_of("start_method", start_method, multiprocessing.get_all_start_methods())
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
            raise ConfigError(
                f"`timeout` must be a number of seconds above 0; `.inf` waits forever. Found: {timeout!r:.200}."
            )
        if num_workers == 0 and timeout not in (TIMEOUT, float("inf")):
            log.warning("`timeout` of %g s has no effect: num_workers=0 reads in this process and waits", timeout)
        self.source = adapt(source)
        self.num_workers, self.timeout = num_workers, timeout
        self.prefetch_factor, self.start_method = prefetch_factor, start_method
        self.targets, self.read_threads = tuple(targets), read_threads
        self._own()

    def _own(self) -> None:
        """Make what only this process may change. A forked child must not end its parent's iterator or workers."""
        self._numbers = itertools.count(1)  # of the iterators; two threads cannot get the same number
        # the number of the current iterator; 0: none
        self._generation = share(torch.from_numpy(np.zeros(1, dtype=np.int64)))
        self._lock = threading.RLock()  # held while waiting for a batch; `_end` needs no lock
        self._samples = Samples(self.source, self.targets, self.read_threads)
        self._workers: Workers | None = None
        finalize(self, _leave, self._generation, self._lock)
        self._pid = os.getpid()  # at the end, because other threads look here

    @property
    def pids(self) -> list[int]:
        return [] if self._workers is None else self._workers.pids

    def batches(
        self,
        tasks: Iterable[Task],
        *,
        first: int = 0,
        zero_copy: bool = False,
    ) -> Iterator[EncodedBatch]:
        """Yield one batch for each ``(indices, repeats, valid)``. This call ends an earlier iterator of any thread.

        ``first`` is added to the sample numbers that the source reads. ``zero_copy`` avoids copies if there are no
        workers and the source's own ``zero_copy`` is True.

        If reading a sample raises OSError, MemoryError or an error of gpuaug, the row has no bytes and gets a Fault.

        Raises:
            ReadError: if a worker dies or no batch arrives in time. The next call starts new workers.
            SourceError: if a sample has the wrong form, or if the source or an extra cannot be pickled.
            Exception: any other exception of the source; RuntimeError if it cannot be pickled.
        """
        if self._pid != os.getpid():
            self._own()
        generation = self._generation.numpy()[0] = next(self._numbers)
        zero_copy = zero_copy and self.num_workers == 0 and self.source.zero_copy
        return self._batches(generation, tasks, first, zero_copy)

    def close(self) -> None:
        """End the workers and the current iterator. The next call of ``batches`` starts new workers."""
        if self._pid == os.getpid():
            _end(self._generation)
            with self._lock:
                self._stop()

    def _batches(
        self,
        generation: int,
        tasks: Iterable[Task],
        first: int,
        zero_copy: bool,
    ) -> Iterator[EncodedBatch]:
        todo = ((task, task[0].numpy() + first) for task in tasks)
        ended, begun, pid = partial(is_over, self._generation, generation), False, self._pid
        try:
            while not ended():
                if self.num_workers == 0:
                    if (planned := next(todo, None)) is None:
                        return
                    task, samples = planned[0], self._samples.batch(planned[1])
                    fields = _views(*samples) if zero_copy else self._unpacked(task, *_joined(*samples))
                else:
                    with self._lock:
                        if ended() or (received := self._receive(None if begun else todo, generation, ended)) is None:
                            return
                    begun = True
                    task, fields = received
                indices, repeats, valid = task
                yield EncodedBatch(indices=indices, repeats=repeats, valid=valid, **fields)
        finally:
            todo.close()  # to free the tasks: the workers keep `todo`
            if not ended() and pid == os.getpid():
                _end(self._generation)  # the workers then skip the batches that were requested ahead

    def _receive(
        self, todo: Iterator[Planned] | None, generation: int, ended: Callable[[], bool]
    ) -> tuple[Task, dict[str, Any]] | None:
        """The next task and the fields of its batch; None at the end. ``todo``: given to the workers before."""
        try:
            if todo is not None:
                if self._workers is None:
                    self._workers = Workers(
                        self._samples,
                        self._generation,
                        num_workers=self.num_workers,
                        timeout=self.timeout,
                        prefetch_factor=self.prefetch_factor,
                        start_method=self.start_method,
                    )
                self._workers.begin(generation, todo)
            # `_workers` is None if another thread has closed the reader.
            received = None if self._workers is None else self._workers.receive(ended)
        except EndedError:
            return None
        except BaseException:
            self._stop(kill=True)  # an interrupted wait may have lost a batch
            raise
        if received is None:
            return None
        task, data, answer = received
        if answer.rows < 0:
            raise raised(data)
        return task, self._unpacked(task, data, answer.rows, answer.pickled)

    def _unpacked(self, task: Task, data: Tensor, rows: int, pickled: int) -> dict[str, Any]:
        """Fields of an EncodedBatch whose images and offsets are views of ``data``, the joined pieces of a batch."""
        begin = 8 * (rows + 1)
        try:
            rest = pickle.loads(data[begin : begin + pickled].numpy().data)
        except Exception as error:  # unpickling calls the classes of the extras
            first, last = (self.source.key(i) for i in task[0][[0, -1]].tolist())
            raise SourceError(
                f"an extra, the third value of a sample, cannot be unpickled: {type(error).__name__}: {error}. The "
                f"sample is in the batch from {first!r} to {last!r}. {PICKLABLE}"
            ) from error
        return _fields(rest, data=data[begin + pickled :], offsets=data[:begin].view(torch.int64))

    def _stop(self, *, kill: bool = False) -> None:
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.stop(kill=kill)


def _end(generation: Tensor) -> None:
    generation.numpy()[0] = 0  # torch may refuse the change, depending on torch.inference_mode


def _leave(generation: Tensor, lock: threading.RLock) -> None:
    """End the current iterator, and wait until no thread is in torch's code for workers.

    At exit, this runs before multiprocessing ends the workers. torch releases the GIL, and a daemon thread that
    reacquires it while Python ends aborts the process.
    """
    _end(generation)
    lock.acquire(timeout=TIMEOUT_S)  # kept, so that no thread begins again


def _joined(encoded: list[memoryview], rest: Rest) -> tuple[Tensor, int, int]:
    """The joined pieces of a batch, and what :func:`packed` returns with them. ``encoded`` is empty afterwards."""
    pieces, rows, pickled = packed(encoded, rest)
    encoded.clear()
    data = torch.empty(sum(map(len, pieces)), dtype=torch.uint8, device="cpu")
    join(pieces, data.numpy().data)
    return data, rows, pickled


def _views(encoded: list[memoryview], rest: Rest) -> dict[str, Any]:
    """Fields of an EncodedBatch whose images stay in the memory of the source."""
    views = tuple(np.frombuffer(data, dtype=np.uint8) for data in encoded)
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    return _fields(rest, data=nothing, offsets=torch.from_numpy(offsets_of(encoded)), views=views)


def _fields(rest: Rest, **fields: Any) -> dict[str, Any]:
    labels, faults, targets, extra = rest
    tensor = None if labels is None else torch.from_numpy(labels)
    return {**fields, "labels": tensor, "faults": faults, "targets": targets, "extra": extra}
