"""Runs tasks on a Ray cluster. No other module imports Ray."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from typing import Any

from gpuaug.errors import ConfigError, GpuaugError

log = logging.getLogger("gpuaug")

GO_ON = "What is done is kept: the same command goes on."
OpenWorker = Callable[[], Any]  # makes an object with write(task, progress) and close()


def results(
    open_worker: OpenWorker,
    tasks: Sequence[Any],
    *,
    progress: Callable[[int], Any],
    num_workers: int | None,
    cpus: int,
    gpus: int,
) -> Generator[tuple[Any, Any], None, None]:
    """As :func:`gpuaug.tools.store.results`, on Ray.

    Ray is the connection of this process, else the cluster of ``RAY_ADDRESS``, else one on this machine.

    Raises:
        ConfigError: if Ray cannot be imported.
        GpuaugError: if the cluster fails. A GpuaugError of the work itself is raised unchanged.
    """
    try:
        import ray
        from ray.util import ActorPool
    except ImportError as error:
        raise ConfigError(
            f"`on=ray` needs Ray, which cannot be imported ({error}). pip install 'gpuaug[ray]'"
        ) from error
    mine, actors = not ray.is_initialized(), list[Any]()
    if mine:
        ray.init(logging_level=logging.WARNING, log_to_driver=False)
    try:
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        cores = [int(machine["CPU"]) for machine in machines if machine.get("CPU")]
        cpus = min([cpus, *cores])
        room = sum(int(machine.get("GPU", 0)) for machine in machines) if gpus else sum(n // cpus for n in cores)
        workers = max(1, min(room if num_workers is None else num_workers, len(tasks)))
        log.info("on ray: %d processes with %d cores each, on %d machines", workers, cpus, len(cores))
        shared, actor = ray.put(open_worker), ray.remote(num_cpus=cpus, num_gpus=gpus)(_Process)
        actors += [actor.remote(shared) for _ in range(workers)]
        pool: Any = ActorPool(actors)
        for task, result, samples in pool.map_unordered(lambda process, task: process.write.remote(task), tasks):
            progress(samples)
            yield task, result
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, GpuaugError):
            raise cause from error
        raise GpuaugError(f"the work on Ray failed: {error}. {GO_ON}") from error
    except ray.exceptions.RayError as error:
        raise GpuaugError(f"the work on Ray failed: {error}. {GO_ON}") from error
    finally:
        for each in actors:
            ray.kill(each)
        if mine:
            ray.shutdown()


class _Process:
    """The actor in each process."""

    def __init__(self, open_worker: OpenWorker) -> None:
        self._worker = open_worker()

    def write(self, task: Any) -> tuple[Any, Any, int]:
        counts = list[int]()
        result = self._worker.write(task, counts.append)
        return task, result, sum(counts)
