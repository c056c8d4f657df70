"""Worker processes that read. They are those of torch's DataLoader, and send only numbers through its queues."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import pickle
import queue
import select
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from gpuaug import machine
from gpuaug.errors import ReadError, SourceError
from gpuaug.native.buffers import mapped
from gpuaug.read.order import Task
from gpuaug.read.packing import pack, pack_error
from gpuaug.read.ring import Ring
from gpuaug.read.samples import EndedError, Samples, is_over

TIMEOUT_S = 2.0  # for all workers to end, before they are killed
POLL_S = 0.2  # after this time a wait looks whether a worker is dead or the iterator has ended
HELD = 4  # batches that may stay in the ring while headers are read and pixels decoded; further ones are copied
MESSAGE_BYTES = 512  # POSIX writes so many bytes to a pipe at once: all of them, or none if the worker is killed

_owned = weakref.WeakSet["Workers"]()  # those of this process
# filelock 4, which torch imports, raises an error on Python 3.12 if two threads fork at once
_forking = threading.Lock()
_of_parent: list[Any] = []  # iterators of the parent; if a forked child freed them, they would end the parent's workers

Planned = tuple[Task, NDArray[np.int64]]  # a task, and the sample numbers to read for it

Request = tuple[int, int, int]  # slot, number of the iterator, and how many sample numbers are in the slot
NO_SLOT = -1  # there is no task: nothing to read
Answer = int | str  # bytes in the slot (0: the iterator has ended, and nothing was read), or why there are none


class Workers:
    """Worker processes that send batches in the order of their requests.

    DataLoader iterates only once: its sampler, :class:`_Requests`, has no end. For the arguments see
    :class:`~gpuaug.read.reader.Reader`.
    """

    def __init__(
        self,
        samples: Samples,
        generation: Tensor,
        *,
        num_workers: int,
        timeout: float,
        prefetch_factor: int,
        start_method: str | None,
    ) -> None:
        self.timeout, self._source = timeout, samples.source
        self._ring = Ring(num_workers * prefetch_factor + 1 + HELD)
        self._requests = _Requests(self._ring)
        self._context = _Context(start_method, self._ring)
        self._answers: Any = None
        _owned.add(self)
        loader: DataLoader[Any] = DataLoader(
            _Sender(samples, generation, self._ring),  # type: ignore[arg-type]  # any object with `[]`
            batch_size=None,  # an item is a whole batch
            sampler=self._requests,
            worker_init_fn=_settle,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=False,  # pinning starts a thread that opens a CUDA context and copies every batch again
            multiprocessing_context=self._context,
            generator=torch.Generator(),  # otherwise DataLoader uses torch's global generator
        )
        try:
            with _forking, torch.device("cpu"):  # forked workers would inherit a default device such as cuda
                self._answers = iter(loader)
        except BaseException as error:
            self.stop(kill=True)
            if isinstance(error, TypeError | AttributeError | pickle.PicklingError):
                raise SourceError(
                    f"the source cannot be sent to worker processes: {error}. Define its class in a module. Keep no "
                    "open file or function in the source. Or set `num_workers=0`, or `start_method=fork` if the system "
                    "has fork."
                ) from error
            if isinstance(error, OSError | AssertionError):  # AssertionError: inside a worker of another DataLoader
                text = f"{num_workers} worker processes could not be started: {error}. {remedy(error)}"
                raise ReadError(text) from error
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._context.started]

    def begin(self, generation: int, tasks: Iterator[Planned]) -> None:
        """Read ``tasks`` from now on. What the workers still read for earlier iterators is dropped."""
        self._requests.begin(generation, tasks)
        self._check_alive()

    def receive(self, ended: Callable[[], bool]) -> tuple[Task, NDArray[np.uint8]] | None:
        """The next task and its block of bytes (see :mod:`gpuaug.read.packing`); None at the end.

        Raises:
            EndedError: ``ended()`` is True. Nothing is lost.
            ReadError: a worker died, or gave no answer in time. Call :meth:`stop` after this and any other exception.
        """
        requests, ring = self._requests, self._ring
        while True:
            generation, task, slot = requests.sent[0]
            current = generation == requests.generation
            if current and task is None:
                if requests.error is not None:
                    raise requests.error
                return None
            size = self._answer(ended)
            if current and isinstance(size, str):
                raise self._lost(size)
            requests.sent.popleft()
            if task is None or not current or not isinstance(size, int) or not size:
                if slot != NO_SLOT:
                    ring.release(slot)
                continue
            block = ring.lease(slot, size)
            if not ring.free:  # the next request needs a slot
                block = mapped(size).copy_(torch.from_numpy(block)).numpy()
            return task, block

    def _answer(self, ended: Callable[[], bool]) -> Answer:
        deadline = time.monotonic() + self.timeout

        def check() -> None:
            if ended():
                raise EndedError
            self._check_alive()
            if time.monotonic() > deadline:
                raise self._lost(
                    f"the reading workers gave no batch for {self.timeout:g} s. If the storage is slow or "
                    "unreachable, raise `timeout` or `num_workers`."
                )

        self._context.checks.append(check)
        try:
            answer: Answer = next(self._answers)
            return answer
        except RuntimeError:  # of DataLoader if a worker is dead, or of the signal handler of another DataLoader
            self._check_alive()
            raise
        finally:
            self._context.checks.clear()

    def _lost(self, reason: str) -> ReadError:
        """The error for the first batch of the current iterator that is missing."""
        for generation, task, _ in self._requests.sent:
            if generation == self._requests.generation and task is not None:
                i = int(task[0][0])
                return ReadError(f"{reason} The missing batch begins with sample {i} ({self._source.key(i)!r}).")
        return ReadError(reason)

    def _check_alive(self) -> None:
        for process in self._context.started:
            if not process.is_alive():
                raise self._lost(_death(process))

    def stop(self, *, kill: bool) -> None:
        """End all workers within seconds."""
        for process in self._context.started if kill else ():
            process.kill()
        self._answers = None  # DataLoader then ends the workers
        for process in self._context.started:  # if something else still refers to `_answers`, such as a traceback
            self._context.end(process)


class _Requests(Iterator[Request]):
    """What DataLoader sends to the workers: a request for each task, and one with no slot if there is no task.

    DataLoader takes one item when the process starts each of the workers' requests ahead, then one per answer.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring, self.generation = ring, 0
        self._tasks: Iterator[Planned] = iter(())
        self.sent = deque[tuple[int, Task | None, int]]()  # generation, task and slot of requests without an answer
        self.error: Exception | None = None  # of the iterator of tasks

    def begin(self, generation: int, tasks: Iterator[Planned]) -> None:
        self.generation, self._tasks, self.error = generation, tasks, None

    def __next__(self) -> Request:
        planned = None
        try:
            planned = next(self._tasks, None)
        except Exception as error:  # the consumer gets it after the earlier batches
            self.error = error
        if planned is None:
            self.sent.append((self.generation, None, NO_SLOT))
            return NO_SLOT, 0, 0
        (task, indices), slot = planned, self._ring.take()
        self._ring.write(slot, [indices.tobytes()])
        self.sent.append((self.generation, task, slot))
        return slot, self.generation, len(indices)


class _Sender:
    """The dataset of DataLoader. Every worker has its own copy, with the source."""

    def __init__(self, samples: Samples, generation: Tensor, ring: Ring) -> None:
        self.samples, self.generation, self.ring = samples, generation, ring

    def __getitem__(self, request: Request) -> Answer:
        slot, generation, count = request
        if slot == NO_SLOT:
            return 0
        stale = partial(is_over, self.generation.numpy(), generation)
        numbers = self.ring.read(slot, 8 * count).view(np.int64).tolist()
        try:
            pieces = pack(*self.samples.batch(numbers, stale))
        except EndedError:
            return 0
        except Exception as error:
            pieces = pack_error(error)
        try:
            return self.ring.write(slot, pieces)
        except OSError as error:
            return f"no shared memory for a batch: {error}. {remedy(error)}"


class _Messages:
    """A queue of short messages between processes, as DataLoader uses it.

    Unlike multiprocessing's queue it has no thread, which takes processor time, and no lock, which a killed process may
    hold.
    """

    def __init__(self, context: Any, checks: list[Callable[[], None]]) -> None:
        self._reader, self._writer = context.Pipe(duplex=False)
        self._checks = checks  # called while this process waits; they raise errors

    def put(self, message: Any) -> None:
        data = pickle.dumps(message)  # unpickling ignores what follows
        if len(data) > MESSAGE_BYTES:
            raise ValueError(f"a message may have {MESSAGE_BYTES} bytes: {message!r}")
        os.write(self._writer.fileno(), data.ljust(MESSAGE_BYTES, b"."))

    def get(self, timeout: float) -> Any:
        ready = select.poll()
        ready.register(self._reader, select.POLLIN)
        while not ready.poll(1000 * (POLL_S if self._checks else timeout)):
            if not self._checks:
                raise queue.Empty
            self._checks[0]()
        return pickle.loads(os.read(self._reader.fileno(), MESSAGE_BYTES))

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def cancel_join_thread(self) -> None:
        """There is no thread."""


class _Context(BaseContext):
    """Makes the processes and queues of a DataLoader."""

    def __init__(self, start_method: str | None, ring: Ring) -> None:
        self._real: Any = multiprocessing.get_context(start_method)
        self._ring, self._processes = ring, list[Any]()
        self._deadline: float | None = None  # for the end of all workers
        self.checks = list[Callable[[], None]]()  # while this process waits for an answer

    @property
    def started(self) -> list[Any]:
        return [process for process in self._processes if process.pid is not None]

    def end(self, process: Any) -> None:
        """Wait for the end of a process, and kill it if all together take longer than ``TIMEOUT_S``."""
        now = time.monotonic()
        self._deadline = self._deadline or now + TIMEOUT_S
        process.join(max(0.0, self._deadline - now))
        process.kill()  # no effect on a process that has ended
        process.join(TIMEOUT_S)

    def Process(self, **given: Any) -> _Worker:  # noqa: N802
        self._processes.append(self._real.Process(daemon=True, **given))
        return _Worker(self._processes[-1], self)

    def Queue(self, maxsize: int = 0) -> Any:  # noqa: N802
        return _Messages(self._real, self.checks)

    def Event(self) -> Any:  # noqa: N802
        return self._ring


class _Worker:
    """A worker process, as DataLoader sees it.

    If a process dies whose ``pid`` DataLoader knows, its signal handler raises an error anywhere in the main thread.
    No process has the number 0.
    """

    pid = 0

    def __init__(self, process: Any, context: _Context) -> None:
        self._process, self._context = process, context
        self.start, self.is_alive, self.terminate = process.start, process.is_alive, process.kill

    def join(self, timeout: float | None = None) -> None:
        if self._process.pid is not None:
            self._context.end(self._process)


def _leave_to_parent() -> None:
    """In a forked child: end no workers of the parent. DataLoader and Python's exit function would do so."""
    global _forking
    _forking = threading.Lock()  # another thread may have held it during the fork
    for workers in _owned:
        _of_parent.append(workers._answers)
        multiprocessing.process._children.difference_update(workers._context.started)  # type: ignore[attr-defined]
    _owned.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def remedy(error: Exception) -> str:
    """Advice for an error that the lack of a resource caused."""
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE) or "Too many open files" in str(error):
        return "Allow more open files (`ulimit -n`), or lower `num_workers`."
    return "Lower `num_workers`; 0 reads in this process."


def _settle(worker: int) -> None:
    # Otherwise the first full garbage collection in a forked worker writes to every object of the parent, and so copies
    # the parent's memory (54 MB for a test process).
    gc.freeze()
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():  # under a forkserver, torch notices only the forkserver's end
        machine.exit_with_parent()


def _death(process: Any) -> str:
    process.join(1.0)
    code = process.exitcode
    if code is not None and code < 0:
        memory = "Usually memory ran out. Lower `num_workers` or `batch_size`."
        how = memory if -code == signal.SIGKILL else "The worker's own message, if any, is above."
        return f"a reading worker (pid {process.pid}) was killed by signal {-code}. {how}"
    return (
        f"a reading worker (pid {process.pid}) ended with exit code {code}. Its own message, if any, is above. If the "
        'start method is spawn or forkserver, a script must do its work under `if __name__ == "__main__":`.'
    )
