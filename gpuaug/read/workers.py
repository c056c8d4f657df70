"""Worker processes that read."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import pickle
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from torch.utils.data._utils.signal_handling import _remove_worker_pids
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from gpuaug import machine
from gpuaug.errors import ReadError, SourceError

# number of the iterator, sample numbers of a batch, sample numbers to give to `source.prefetch` (None: none)
Request = tuple[int, NDArray[np.int64], NDArray[np.int64] | None]

TIMEOUT_S = 2.0  # for a worker to end, before it is killed


_owned = weakref.WeakSet["Workers"]()  # those of this process


class EndedError(BaseException):
    """Stops a worker or a thread, because its iterator has ended."""


class Workers(_MultiProcessingDataLoaderIter):
    """DataLoader's workers. A wait for a batch ends soon after a worker has died or the iterator has ended.

    DataLoader itself notices a dead worker after up to ``timeout`` (5 s if it is 0). Its signal handler notices sooner,
    but may raise an error anywhere in the main thread.

    Workers return ``dataset[request]`` for each request of :meth:`begin`, in order. For the other arguments see
    :class:`~gpuaug.read.reader.Reader`.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        num_workers: int,
        timeout: float,
        prefetch_factor: int,
        start_method: str | None,
    ) -> None:
        self.timeout = timeout
        _owned.add(self)
        self.loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=None,  # an item is a whole batch
            sampler=[],  # `begin` sets the requests
            collate_fn=_same,
            worker_init_fn=_settle,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            persistent_workers=True,
            pin_memory=False,  # pinning starts a thread that opens a CUDA context and copies every batch again
            multiprocessing_context=start_method,
            generator=torch.Generator(),  # otherwise DataLoader uses torch's global generator
        )
        try:
            with torch.device("cpu"):  # forked workers would inherit a default device such as cuda
                super().__init__(self.loader)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise SourceError(
                f"the source cannot be sent to worker processes: {error}. Define its class in a module. Keep no open "
                "file or function in the source. Or set `num_workers=0`, or `start_method=fork` if the system has fork."
            ) from error
        except (OSError, AssertionError) as error:  # AssertionError: inside a worker of another DataLoader
            raise ReadError(f"{num_workers} worker processes could not be started: {error}. {remedy(error)}") from error
        _remove_worker_pids(id(self))  # DataLoader's signal handler then ignores these workers
        self._worker_pids_set = False

    @property
    def pids(self) -> list[int]:
        return [int(worker.pid) for worker in self._workers if worker.pid is not None]

    def begin(self, requests: Iterator[Request], ended: Callable[[], bool]) -> None:
        """Drop earlier requests and begin with ``requests``. ``ended()`` is True if nobody waits for them any more."""
        self.ended, self._index_sampler = ended, requests
        self._reset(self.loader)

    def _try_get_data(self, timeout: float = 0.0) -> tuple[bool, Any]:
        """Wait for one message of a worker. Raise EndedError or ReadError if no message comes."""
        messages = self._worker_result_queue._reader  # type: ignore[attr-defined]
        by_sentinel = {worker.sentinel: worker for worker in self._workers}
        deadline = time.monotonic() + self.timeout
        while True:
            ready = connection.wait([messages, *by_sentinel], timeout=0.1)
            if self.ended():
                raise EndedError
            if messages in ready:
                try:
                    return True, self._worker_result_queue.get()
                except (OSError, EOFError, RuntimeError) as error:  # the worker died, or no file descriptor is left
                    ready = connection.wait(list(by_sentinel), timeout=1.0)
                    if not ready:
                        raise ReadError(
                            f"a batch could not be received from its worker ({type(error).__name__}: {error}). If "
                            "too many files are open, raise `ulimit -n`."
                        ) from error
            dead = [by_sentinel[x] for x in ready if x in by_sentinel]
            if dead:
                raise ReadError(_death(dead[0]))
            if time.monotonic() > deadline:
                raise ReadError(
                    f"the reading workers gave no batch for {self.timeout:g} s. If the storage is slow or unreachable, "
                    "raise `timeout` or `num_workers`."
                )

    def stop(self, *, kill: bool) -> None:
        """End all workers within seconds."""
        self._shutdown = True  # DataLoader's own shutdown then does nothing
        if not kill and all(worker.is_alive() for worker in self._workers):
            self._workers_done_event.set()  # would hang if a dead worker held the event's lock
            for queue in self._index_queues:
                queue.put(None)
            deadline = time.monotonic() + TIMEOUT_S
            for worker in self._workers:
                worker.join(max(0.0, deadline - time.monotonic()))
        for worker in self._workers:
            worker.kill()  # no effect on a worker that has ended
        for worker in self._workers:
            worker.join(TIMEOUT_S)
        for queue in [*self._index_queues, self._worker_result_queue]:
            queue.cancel_join_thread()
            queue.close()


def _leave_to_parent() -> None:
    """In a forked child: end no workers of the parent. DataLoader and Python's exit function would do so."""
    for workers in _owned:
        workers._shutdown = True
        multiprocessing.process._children.difference_update(getattr(workers, "_workers", ()))  # type: ignore[attr-defined]
    _owned.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


def remedy(error: Exception) -> str:
    """Advice for an error that the lack of a resource caused."""
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE) or "Too many open files" in str(error):
        return "Allow more open files (`ulimit -n`), or lower `num_workers`."
    if isinstance(error, RuntimeError) or getattr(error, "errno", None) == errno.ENOSPC:
        return "/dev/shm may be full: enlarge it (`docker run --shm-size`), or lower `num_workers` or `batch_size`."
    return "Lower `num_workers`; 0 reads in this process."


def _same(item: Any) -> Any:
    return item


def _settle(worker: int) -> None:
    # Otherwise the first full garbage collection in a forked worker writes to every object of the parent, and so copies
    # the parent's memory (54 MB for a test process).
    gc.freeze()
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():  # under a forkserver, torch notices only the forkserver's end
        machine.exit_with_parent()


def _death(worker: Any) -> str:
    worker.join(1.0)
    code = worker.exitcode
    if code is not None and code < 0:
        how = {
            signal.SIGKILL: "Usually memory ran out. Lower `num_workers` or `batch_size`.",
            signal.SIGBUS: "Usually /dev/shm is full. Enlarge it (`docker run --shm-size`), or lower `num_workers`.",
        }.get(-code, "The worker's own message, if any, is above.")
        return f"a reading worker (pid {worker.pid}) was killed by signal {-code}. {how}"
    return (
        f"a reading worker (pid {worker.pid}) ended with exit code {code}. Its own message, if any, is above. If the "
        'start method is spawn or forkserver, a script must do its work under `if __name__ == "__main__":`.'
    )
