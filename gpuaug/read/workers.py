"""Worker processes that read: torch's, with a wait that ends at once when one dies or is no longer needed."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import pickle
import time
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

# generation, numbers of the samples of one batch, and of the next one of the same worker where the source wants to know
Task = tuple[int, NDArray[np.int64], NDArray[np.int64] | None]

TIMEOUT_S = 2.0  # that a worker has to end by itself


class EndedError(BaseException):
    """The iterator that a worker or a thread worked for has ended."""


class SilentError(BaseException):
    """No batch will come: a worker died, or the time is over."""


class Workers(_MultiProcessingDataLoaderIter):
    """DataLoader's workers, with a wait that ends at once when a worker dies or the iterator is given up.

    DataLoader itself notices a death after 5 s, with a timeout only after that, or by a signal handler that raises
    wherever the main thread happens to be; and it ends no wait for a read that hangs.

    Every worker gets ``dataset`` and gives ``dataset[task]`` for its ``tasks``; results come in order. ``ended()`` is
    whether nobody waits any more. The other arguments are those of :class:`~gpuaug.read.reader.Reader`.

    Raises:
        SourceError: if the source cannot be pickled.
        ReadError: if processes cannot be started.
    """

    def __init__(
        self,
        dataset: Any,
        tasks: Iterator[Task],
        ended: Callable[[], bool],
        *,
        num_workers: int,
        timeout: float,
        prefetch_factor: int,
        start_method: str | None,
    ) -> None:
        self.timeout, self.ended = timeout, ended
        self.loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=None,  # an item is a whole batch
            sampler=tasks,
            collate_fn=_same,
            worker_init_fn=_settle,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            persistent_workers=True,
            pin_memory=False,  # its thread would open a CUDA context and copy every batch once more
            multiprocessing_context=start_method,
            generator=torch.Generator(),  # else it draws from torch's global one
        )
        try:
            with torch.device("cpu"):  # forked workers would inherit a default device of cuda
                super().__init__(self.loader)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise SourceError(
                f"the source cannot be sent to worker processes: {error}. Define its class in a module and keep open "
                "files and functions out of it, or set `num_workers=0`, or `start_method=fork` where there is fork."
            ) from error
        except OSError as error:
            raise ReadError(f"{num_workers} worker processes could not be started: {error}. {remedy(error)}") from error
        _remove_worker_pids(id(self))  # from the list of that signal handler
        self._worker_pids_set = False

    @property
    def pids(self) -> list[int]:
        """Processes that read."""
        return [int(worker.pid) for worker in self._workers if worker.pid is not None]

    def restart(self, tasks: Iterator[Task], ended: Callable[[], bool]) -> None:
        """Go on with other tasks."""
        self.ended, self._index_sampler = ended, tasks
        self._reset(self.loader)

    def _try_get_data(self, timeout: float = 0.0) -> tuple[bool, Any]:
        """One message of a worker; EndedError or SilentError where none comes."""
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
                except (OSError, EOFError, RuntimeError) as error:  # it died meanwhile, or there is no descriptor left
                    ready = connection.wait(list(by_sentinel), timeout=1.0)
                    if not ready:
                        raise SilentError(
                            f"a batch could not be taken over from its worker ({type(error).__name__}: {error}). If "
                            "too many files are open, raise `ulimit -n`."
                        ) from error
            dead = [by_sentinel[x] for x in ready if x in by_sentinel]
            if dead:
                raise SilentError(_death(dead[0]))
            if time.monotonic() > deadline:
                raise SilentError(
                    f"the workers that read gave no batch for {self.timeout:g} s. Is the storage slow or unreachable? "
                    "Then raise `timeout`, or `num_workers`."
                )

    def stop(self, *, kill: bool) -> None:
        """End all workers within seconds, and leave no process."""
        self._shutdown = True  # nothing is left to do for DataLoader's own way
        if not kill and all(worker.is_alive() for worker in self._workers):
            self._workers_done_event.set()  # could wait for ever for a lock that a killed worker held
            for tasks in self._index_queues:
                tasks.put(None)
            deadline = time.monotonic() + TIMEOUT_S
            for worker in self._workers:
                worker.join(max(0.0, deadline - time.monotonic()))
        for worker in self._workers:
            worker.kill()  # does nothing to one that has ended
        for worker in self._workers:
            worker.join(TIMEOUT_S)
        for queue in [*self._index_queues, self._worker_result_queue]:
            queue.cancel_join_thread()
            queue.close()


def remedy(error: Exception) -> str:
    """What to change where the machine has no more of something."""
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE) or "Too many open files" in str(error):
        return "Allow more open files (`ulimit -n`), or lower `num_workers`."
    if isinstance(error, RuntimeError) or getattr(error, "errno", None) == errno.ENOSPC:
        return "Is /dev/shm full? Allow more (`docker run --shm-size`), or lower `num_workers` or `batch_size`."
    return "Lower `num_workers`; 0 reads in this process."


def _same(item: Any) -> Any:
    return item


def _settle(worker: int) -> None:
    # else the first full collection in a forked worker writes to, and so copies, every object of the parent (54 MB of
    # a test process)
    gc.freeze()
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():  # a forkserver's child: torch looks at that alone
        machine.exit_with_parent()


def _death(worker: Any) -> str:
    worker.join(1.0)
    code = worker.exitcode
    if code is not None and code < 0:
        how = {
            9: "Usually memory ran out: lower `num_workers` or `batch_size`.",
            7: "Usually /dev/shm is full: give the container more (`docker run --shm-size`), or lower `num_workers`.",
        }.get(-code, "Its own message, if any, is above.")
        return f"a worker that reads (pid {worker.pid}) was killed by signal {-code}. {how}"
    return (
        f"a worker that reads (pid {worker.pid}) ended with exit code {code}; its own message, if any, is above. Where "
        'workers start by spawn or forkserver, a script must begin its work under `if __name__ == "__main__":`.'
    )
