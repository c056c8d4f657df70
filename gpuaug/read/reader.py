"""Reads encoded bytes of whole batches, in workers that never decode."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuaug import checks
from gpuaug.batch import EncodedBatch
from gpuaug.read.ends import finalize
from gpuaug.read.order import Task
from gpuaug.read.packing import Pieces, Rest, unpack
from gpuaug.read.samples import THREADS, EndedError, Samples, is_over
from gpuaug.read.workers import TIMEOUT_S, Planned, Workers
from gpuaug.source.adapt import adapt
from gpuaug.source.index import share

log = logging.getLogger("gpuaug")

TIMEOUT = 120.0  # seconds

Made = tuple[Task, tuple[Pieces, Rest]]


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
        targets: the kinds of targets to read: masks, boxes, keypoints, corners.
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
        checks.number("timeout", timeout, 1e-3)
        if num_workers == 0 and timeout not in (TIMEOUT, float("inf")):
            log.warning("`timeout` of %g s has no effect: num_workers=0 reads in this process and waits", timeout)
        self.source, self.targets = adapt(source), tuple(targets)
        self._samples = Samples(self.source, self.targets, read_threads)
        self._settings: dict[str, Any] = {
            "num_workers": num_workers,
            "timeout": timeout,
            "prefetch_factor": prefetch_factor,
            "start_method": start_method,
        }
        self._own()

    def _own(self) -> None:
        """Make what only this process may change. A forked child must not end its parent's iterator or workers."""
        self._numbers = itertools.count(1)  # of the iterators; two threads cannot get the same number
        # the number of the current iterator; 0: none. An array, because torch would release the GIL: see `_leave`
        self._shared = share(torch.from_numpy(np.zeros(1, dtype=np.int64)))
        self._generation = self._shared.numpy()
        self._lock = threading.RLock()  # held while waiting for a batch
        self._workers: Workers | None = None
        finalize(self, _leave, self._generation, self._lock)
        self._pid = os.getpid()  # at the end, because other threads look here

    @property
    def pids(self) -> list[int]:
        return [] if self._workers is None else self._workers.pids

    def batches(self, tasks: Iterable[Task], *, first: int = 0) -> Iterator[EncodedBatch]:
        """Yield one batch for each ``(indices, repeats, valid)``. This call ends an earlier iterator of any thread.

        ``first`` is added to the sample numbers that the source reads. Without workers, read-only bytes of the source,
        such as ``bytes``, are not copied.

        If reading a sample raises OSError, MemoryError or an error of gpuaug, the row has no bytes and gets a Fault.

        Raises:
            ReadError: if a worker dies or no batch arrives in time. The next call starts new workers.
            SourceError: if a sample has the wrong form, or if the source or an extra cannot be pickled.
            Exception: any other exception of the source; RuntimeError if it cannot be pickled.
        """
        if self._pid != os.getpid():
            self._own()
        generation = self._generation[0] = next(self._numbers)
        return self._batches(generation, tasks, first)

    def close(self) -> None:
        """End the workers and the current iterator. The next call of ``batches`` starts new workers."""
        if self._pid == os.getpid():
            self._generation[0] = 0
            with self._lock:
                self._stop()

    def _batches(self, generation: int, tasks: Iterable[Task], first: int) -> Iterator[EncodedBatch]:
        todo = ((task, task[0].numpy() + first) for task in tasks)
        ended, pid = partial(is_over, self._generation, generation), self._pid
        read = self._received(generation, todo, ended) if self._settings["num_workers"] else self._read_here(todo)
        try:
            while not ended() and (made := next(read, None)) is not None:
                (indices, repeats, valid, *tiles), (pieces, (labels, faults, targets, extra)) = made
                yield EncodedBatch(
                    images=pieces[: len(indices)],
                    masks=pieces[len(indices) :],
                    labels=None if labels is None else torch.from_numpy(labels),
                    indices=indices,
                    repeats=repeats,
                    valid=valid,
                    faults=faults,
                    targets=targets,
                    extra=extra,
                    tiles=tiles[0] if tiles else None,
                )
        finally:
            todo.close()  # to free the tasks: the workers keep `todo`
            if not ended() and pid == os.getpid():
                self._generation[0] = 0  # the workers then skip the batches that were requested ahead

    def _read_here(self, todo: Iterator[Planned]) -> Iterator[Made]:
        for task, indices in todo:
            encoded, rest = self._samples.batch(indices.tolist())
            # a source may write the next sample into the same memory, if it is not read-only
            kept = (data if data.readonly else data.tobytes() for data in encoded)
            yield task, (tuple(np.frombuffer(data, dtype=np.uint8) for data in kept), rest)

    def _received(self, generation: int, todo: Iterator[Planned], ended: Callable[[], bool]) -> Iterator[Made]:
        begun = False
        while True:
            with self._lock:
                if ended():
                    return
                try:
                    if not begun:
                        if self._workers is None:
                            self._workers = Workers(self._samples, self._shared, **self._settings)
                        self._workers.begin(generation, todo)
                        begun = True
                    # `_workers` is None if another thread has closed the reader.
                    received = None if self._workers is None else self._workers.receive(ended)
                except EndedError:
                    return
                except BaseException:
                    self._stop(kill=True)  # an interrupted wait may have lost a batch
                    raise
            if received is None:
                return
            task, block = received
            yield task, unpack(block, source=self.source, indices=task[0].numpy())

    def _stop(self, *, kill: bool = False) -> None:
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.stop(kill=kill)


def _leave(generation: NDArray[np.int64], lock: threading.RLock) -> None:
    """End the current iterator, and wait until no thread is in torch's code for workers.

    At exit, this runs before multiprocessing ends the workers. torch releases the GIL, and a daemon thread that
    reacquires it while Python ends aborts the process.
    """
    generation[0] = 0
    lock.acquire(timeout=TIMEOUT_S)  # kept, so that no thread begins again
