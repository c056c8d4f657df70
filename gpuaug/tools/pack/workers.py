"""Writes the shards of a job: in this process, in several processes of this machine, or on a Ray cluster."""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import signal
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from typing import Any

import torch

from gpuaug import machine
from gpuaug.errors import ConfigError, GpuaugError, SourceError
from gpuaug.tools.pack.job import GO_ON, Job
from gpuaug.tools.pack.shards import Packer, Written

log = logging.getLogger("gpuaug")

_packer: Packer  # set in each worker process


def write_shards(
    job: Job, shards: Sequence[int], *, on: str, num_workers: int | None
) -> Generator[Written, None, None]:
    """Yield each shard as soon as it is written.

    ``on``: ``local`` or ``ray``. ``num_workers``: number of processes; None: one for each CPU; 0 with ``local``: only
    this process.
    """
    if on == "ray":
        yield from _on_ray(job, shards, num_workers)
    elif num_workers == 0:
        with closing(Packer(job)) as packer:
            yield from map(packer.write, shards)
    else:
        yield from _in_processes(job, shards, num_workers)


def _start(job: Job) -> None:
    global _packer
    machine.exit_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    torch.set_num_threads(1)
    _packer = Packer(job)


def _write(shard: int) -> Written:
    return _packer.write(shard)


def _in_processes(job: Job, shards: Sequence[int], num_workers: int | None) -> Generator[Written, None, None]:
    workers = min(num_workers or machine.usable_cpus(), len(shards))
    log.info("%d processes for %d shards on %d cores", workers, len(shards), machine.usable_cpus())
    context = multiprocessing.get_context("spawn")  # DALI's and torch's threads do not survive a fork
    before, finished = {*multiprocessing.active_children()}, False
    pool = ProcessPoolExecutor(workers, context, _start, (job,))
    try:
        try:
            writing = [pool.submit(_write, shard) for shard in shards]
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise SourceError(
                f"the source cannot be sent to other processes: {error}. Define its class in a module, and keep no "
                "open files or functions in its attributes. Or set `num_workers=0`."
            ) from error
        for future in as_completed(writing):
            yield future.result()
        finished = True
    except BrokenProcessPool as error:
        raise GpuaugError(
            "a worker process died. If it printed an error above, fix that. Otherwise memory probably ran out: lower "
            f'`num_workers`. A script must start its work under `if __name__ == "__main__":`. {GO_ON}'
        ) from error
    finally:
        for process in () if finished else {*multiprocessing.active_children()} - before:
            process.terminate()  # running tasks could take minutes to end
        pool.shutdown(cancel_futures=True)


def _on_ray(job: Job, shards: Sequence[int], num_workers: int | None) -> Generator[Written, None, None]:
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
        cores = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        workers = max(1, min(sum(cores) if num_workers is None else num_workers, len(shards)))
        log.info("Ray: %d processes on %d machines", workers, sum(map(bool, cores)))
        shared, actor = ray.put(job), ray.remote(num_cpus=1, num_gpus=0)(Packer)
        actors += [actor.remote(shared) for _ in range(workers)]
        pool: Any = ActorPool(actors)
        yield from pool.map_unordered(lambda packer, shard: packer.write.remote(shard), shards)
    except ray.exceptions.RayError as error:
        if isinstance(cause := getattr(error, "cause", None), GpuaugError):
            raise cause from error
        raise GpuaugError(f"the work on Ray failed: {error}. {GO_ON}") from error
    finally:
        for each in actors:
            ray.kill(each)
        if mine:
            ray.shutdown()
