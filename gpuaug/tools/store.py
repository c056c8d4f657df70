"""The output folder of `gpuaug pack`, its worker processes, arrays as bytes, checksums."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import logging
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from gpuaug import files, machine
from gpuaug.augment.fingerprint import differences
from gpuaug.decode.decoder import Decode
from gpuaug.errors import ConfigError, GpuaugError, SourceError
from gpuaug.files import check_regular
from gpuaug.source.base import checksum
from gpuaug.source.base import digest as digest
from gpuaug.source.local import read_file

log = logging.getLogger("gpuaug")

GO_ON = "Finished work is kept. To continue, run the same command again."
OpenWorker = Callable[[], Any]  # makes an object with write(task, progress) and close()
Done = Generator[tuple[Any, Any, int], None, None]  # task, result, number of samples


def check_out(out: Path, *ours: str) -> None:
    """Raise ConfigError if ``out`` has files, but none with a name in ``ours``."""
    try:
        names = sorted(name for name in os.listdir(out) if not name.endswith(".part"))
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"`out` must be a folder that can be written. Found: {str(out)!r} ({error}).") from error
    if names and not {*names} & {*ours}:
        raise ConfigError(
            f"`out` must be a new or empty folder, or the folder of an earlier run. Found {len(names)} other files in "
            f"{str(out)!r}, such as {names[0]!r}."
        )


def refuse_reduced(decode: Decode) -> None:
    """Raise ConfigError if large images would be decoded at a fraction of their size."""
    if decode.reduced:
        raise ConfigError(
            "`decode.reduced` must be false, because the images are decoded only once for all later runs. Found: true. "
            "Set decode.reduced=false."
        )


def refuse_changes(out: Path, before: Any, here: Any) -> None:
    """Raise ConfigError if ``before``, the job recorded in ``out``, differs from ``here``, the job of this run."""
    if changes := differences(before, json.loads(json.dumps(here))):
        listed = "; ".join(f"{where}: {a!r:.60} there, {b!r:.60} in this run" for where, a, b in changes[:5])
        raise ConfigError(f"`out` holds another job: {str(out)!r}. {listed}. Use those settings, or set another `out`.")


@contextmanager
def only_writer(folder: Path, *, out: Path) -> Iterator[None]:
    """Create a folder, lock it while the block runs, and remove temporary files of a killed run.

    Raises ConfigError if another run has the lock, and GpuaugError if the block raises an OSError, such as a full disk.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"`out` must be a folder that can be written. Found: {str(out)!r} ({error}).") from error
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another run is writing `out`, {str(out)!r}. Wait until that run ends.") from error
        except OSError:  # the file system has no locks
            pass
        for part in folder.rglob("*.part"):
            part.unlink()
        yield
    except OSError as error:
        raise GpuaugError(
            f"the run that writes {str(out)!r} has stopped: {error}. Remove the cause. {GO_ON}"
        ) from error
    finally:
        os.close(descriptor)


# -- tasks --


def results(
    open_worker: OpenWorker,
    tasks: Sequence[Any],
    *,
    on: str,
    progress: Callable[[int], Any],
    num_workers: int | None = None,
) -> Generator[tuple[Any, Any], None, None]:
    """Run tasks on this machine or on Ray. Yields each ``(task, result)`` as soon as the task is done.

    Args:
        open_worker: makes the worker of each process; pickled for other processes.
        tasks: the tasks, which start in this order.
        on: ``local`` or ``ray``.
        progress: called with the number of newly finished samples.
        num_workers: number of processes. None: one for each CPU. 0 with ``local``: this process.
    """
    if on == "local" and num_workers == 0:
        with closing(open_worker()) as worker:
            for task in tasks:
                yield task, worker.write(task, progress)
        return
    run = _on_ray if on == "ray" else _here
    with closing(run(open_worker, tasks, num_workers)) as done:
        for task, result, samples in done:
            progress(samples)
            yield task, result


class _Process:
    def __init__(self, open_worker: OpenWorker) -> None:
        self._worker = open_worker()

    def write(self, task: Any) -> tuple[Any, Any, int]:
        counts = list[int]()
        result = self._worker.write(task, counts.append)
        return task, result, sum(counts)


_process: _Process  # set in each worker process


def _start(open_worker: OpenWorker) -> None:
    global _process
    machine.exit_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    torch.set_num_threads(1)
    _process = _Process(open_worker)


def _write(task: Any) -> tuple[Any, Any, int]:
    return _process.write(task)


def _here(open_worker: OpenWorker, tasks: Sequence[Any], num_workers: int | None) -> Done:
    workers = min(num_workers or machine.usable_cpus(), len(tasks))
    log.info("%d processes for %d parts on %d cores", workers, len(tasks), machine.usable_cpus())
    context = multiprocessing.get_context("spawn")  # DALI's and torch's threads do not survive a fork
    before, waiting = {*multiprocessing.active_children()}, set[Future[tuple[Any, Any, int]]]()
    pool = ProcessPoolExecutor(workers, context, _start, (open_worker,))
    try:
        try:
            waiting |= {pool.submit(_write, task) for task in tasks}
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise SourceError(
                f"the source cannot be sent to other processes: {error}. Define its class in a module, and keep no "
                "open files or functions in its attributes. Or set `num_workers=0`."
            ) from error
        for future in as_completed({*waiting}):
            yield future.result()
            waiting.remove(future)
    except BrokenProcessPool as error:
        raise GpuaugError(
            "a worker process died. If it printed an error above, fix that. Otherwise memory probably ran out: lower "
            f'`num_workers`. A script must start its work under `if __name__ == "__main__":`. {GO_ON}'
        ) from error
    finally:
        for process in {*multiprocessing.active_children()} - before if waiting else ():
            process.terminate()  # running tasks could take minutes to end
        pool.shutdown(cancel_futures=True)


def _on_ray(open_worker: OpenWorker, tasks: Sequence[Any], num_workers: int | None) -> Done:
    try:
        import ray
        from ray.util import ActorPool
    except ImportError as error:
        raise ConfigError(
            f"`on=ray` needs Ray, which cannot be imported ({error}). Install it: pip install 'gpuaug[ray]'"
        ) from error
    mine, actors = not ray.is_initialized(), list[Any]()
    if mine:
        ray.init(logging_level=logging.WARNING, log_to_driver=False)
    try:
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        cores = [int(machine["CPU"]) for machine in machines if machine.get("CPU")]
        workers = max(1, min(sum(cores) if num_workers is None else num_workers, len(tasks)))
        log.info("Ray: %d processes on %d machines", workers, len(cores))
        shared, actor = ray.put(open_worker), ray.remote(num_cpus=1, num_gpus=0)(_Process)
        actors += [actor.remote(shared) for _ in range(workers)]
        pool: Any = ActorPool(actors)
        yield from pool.map_unordered(lambda process, task: process.write.remote(task), tasks)
    except ray.exceptions.RayError as error:
        if isinstance(cause := getattr(error, "cause", None), GpuaugError):
            raise cause from error
        raise GpuaugError(f"the work on Ray failed: {error}. {GO_ON}") from error
    finally:
        for each in actors:
            ray.kill(each)
        if mine:
            ray.shutdown()


# -- files --


def read_json(path: Path) -> Any:
    """Read a JSON file. OSError if the file cannot be read, ValueError if the file is not JSON."""
    return json.loads(read_file(str(path)))


def to_json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def write_manifest(file: Path, manifest: Mapping[str, Any]) -> None:
    """Write a manifest with its checksum, completely or not at all."""
    files.write(file, to_json({**manifest, "checksum": checksum(manifest)}), sync=True)


def npy(values: Any, dtype: Any = None) -> tuple[bytes, memoryview]:
    """The two parts of a .npy file: the header, and the array's own memory."""
    array = np.ascontiguousarray(values, dtype=dtype)
    stream = io.BytesIO()
    np.lib.format.write_array_header_2_0(stream, np.lib.format.header_data_from_array_1_0(array))
    return stream.getvalue(), array.reshape(-1).view(np.uint8).data


def file_digest(path: Path) -> str:
    """BLAKE2b of a file, as hex. OSError if the file cannot be read or is not regular."""
    check_regular(os.stat(path), path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def damaged(digests: Mapping[Path, str], *, num_workers: int | None = None) -> dict[Path, str]:
    """The problem of each file that differs from its digest or cannot be read."""

    def problem(path: Path) -> str | None:
        try:
            return None if file_digest(path) == digests[path] else "its content does not match its checksum"
        except OSError as error:
            return f"cannot be read ({error.strerror or error})"

    with ThreadPoolExecutor(num_workers or machine.usable_cpus()) as pool:  # hashing releases the GIL
        problems = tqdm(
            pool.map(problem, digests), "verify", len(digests), unit="file", disable=not sys.stderr.isatty()
        )
        return {path: text for path, text in zip(digests, problems, strict=True) if text is not None}
