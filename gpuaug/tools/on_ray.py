"""Runs work on a Ray cluster. No other module imports Ray."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gpuaug.errors import ConfigError, GpuaugError

log = logging.getLogger("gpuaug")

_FAILED = "the work on Ray failed"
_KEPT = "What is done is kept: the same command goes on."


@contextmanager
def cluster() -> Iterator[Any]:
    """Connect to Ray: the connection of this process, else the cluster of ``RAY_ADDRESS``, else one on this machine.

    Raises:
        ConfigError: if Ray cannot be imported.
        GpuaugError: if the cluster fails. A GpuaugError of the work itself is raised unchanged.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"`on=ray` needs Ray, which cannot be imported ({error}). pip install 'gpuaug[ray]'"
        ) from error
    mine = not ray.is_initialized()
    if mine:
        ray.init(logging_level=logging.WARNING, log_to_driver=False)
    try:
        yield ray
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        raise (cause if isinstance(cause, GpuaugError) else GpuaugError(f"{_FAILED}: {error}. {_KEPT}")) from error
    except ray.exceptions.RayError as error:
        raise GpuaugError(f"{_FAILED}: {error}. {_KEPT}") from error
    finally:
        if mine:
            ray.shutdown()


def machines(ray: Any, resource: str) -> list[int]:
    """Amount of a resource (``CPU``, ``GPU``) of each machine of the cluster that has any."""
    counts = (int(node["Resources"].get(resource, 0)) for node in ray.nodes() if node["Alive"])
    return [count for count in counts if count]


def results(
    ray: Any, make: Callable[[], Any], items: Sequence[Any], *, workers: int, cpus: int = 1, gpus: int = 0
) -> Iterator[tuple[Any, Any]]:
    """Yield ``(item, make()(item))`` for every item, in the order they finish. Each process calls ``make`` once.

    Args:
        ray: from :func:`cluster`.
        make: returns the function to call with each item. It is pickled.
        items: the arguments; the first ones start first.
        workers: the largest number of processes.
        cpus, gpus: what one process needs.
    """
    shared = ray.put(make)
    actor = ray.remote(num_cpus=cpus, num_gpus=gpus)(_Process)
    actors = [actor.remote(shared) for _ in range(min(workers, len(items)))]
    queue, running = list(reversed(items)), dict[Any, Any]()

    def give(to: Any) -> None:
        if queue:
            item = queue.pop()
            running[to.do.remote(item)] = to, item

    try:
        for each in actors:
            give(each)
        while running:
            (ready,), _ = ray.wait(list(running), num_returns=1)
            idle, item = running.pop(ready)
            give(idle)
            yield item, ray.get(ready)
    finally:
        for each in actors:
            ray.kill(each)


class _Process:
    """The actor in each process."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._do = make()

    def do(self, item: Any) -> Any:
        return self._do(item)
