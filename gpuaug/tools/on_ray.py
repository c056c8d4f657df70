"""Work spread over a Ray cluster: the same objects as on one machine, made once per process; the only file for Ray."""

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
    """Ray, connected: as this process is already, or to what ``RAY_ADDRESS`` names, or one on this machine.

    Raises:
        ConfigError: if Ray cannot be imported.
        GpuaugError: if the cluster fails; this project's own errors arrive as they were raised.
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
    """How much of a resource (``CPU``, ``GPU``) the living machines of the cluster have, those that have any."""
    found = (int(node["Resources"].get(resource, 0)) for node in ray.nodes() if node["Alive"])
    return [count for count in found if count]


def results(
    ray: Any, make: Callable[[], Any], items: Sequence[Any], *, workers: int, cpus: int = 1, gpus: int = 0
) -> Iterator[tuple[Any, Any]]:
    """``(item, make()(item))`` for every item, as they come, from processes that call ``make`` once each.

    Args:
        ray: from :func:`cluster`.
        make: gives what is called with an item; pickled into each process.
        items: what to do; the first ones begin first.
        workers: processes at most.
        cpus, gpus: what one of them needs.
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
            each, item = running.pop(ready)
            give(each)
            yield item, ray.get(ready)
    finally:
        for each in actors:
            ray.kill(each)


class _Process:
    """What runs on a machine of the cluster."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._do = make()

    def do(self, item: Any) -> Any:
        return self._do(item)
