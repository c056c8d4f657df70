"""Which rank this process is, and whether all ranks mean the same epoch."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import torch
import torch.distributed as dist

from gpuaug.errors import ConfigError
from gpuaug.loader.state import differences


def active() -> bool:
    """Whether torch.distributed is initialised with more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank_and_world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """The arguments if given, else torch.distributed's, else (0, 1).

    Raises:
        ConfigError: if only one of them is given, or rank is not below world_size.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError(
            f"`rank` and `world_size` must be given together. Found: rank={rank}, world_size={world_size}."
        )
    if rank is None or world_size is None:
        return (dist.get_rank(), dist.get_world_size()) if active() else (0, 1)
    if not (type(rank) is type(world_size) is int) or not 0 <= rank < world_size:
        raise ConfigError(
            "`rank` and `world_size` must be whole numbers, 0 <= rank < world_size. "
            f"Found: rank={rank!r}, world_size={world_size!r}."
        )
    return rank, world_size


def local_rank() -> int:
    """Number of this process on its machine, as torchrun, Slurm or Open MPI says; 0 without."""
    names = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
    return next((int(os.environ[name]) for name in names if name in os.environ), 0)


def local_world_size() -> int:
    """Processes of this run on this machine, as torchrun, Slurm or Open MPI says; 1 without."""
    env = os.environ
    if "LOCAL_WORLD_SIZE" in env:
        return max(1, int(env["LOCAL_WORLD_SIZE"]))
    if "SLURM_PROCID" in env and "SLURM_LOCALID" in env:
        # of this step, node by node, as "4(x2),3": the job may have room for more than the step has tasks
        text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_NTASKS_PER_NODE", "")
        found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
        tasks = [int(count) for count, nodes in found for _ in range(int(nodes or 1))]
        return tasks[min(int(env.get("SLURM_NODEID", "0")), len(tasks) - 1)] if tasks else 1
    return max(1, int(env.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")))


def cuda_device() -> int:
    """Index of the device that ``cuda`` means: LOCAL_RANK's where it is set, else torch's current one.

    Without torchrun a script has called ``torch.cuda.set_device``, or sees one device only.
    """
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    return torch.cuda.current_device()


def agree(what: dict[str, Any], *, device: torch.device) -> None:
    """Compare a JSON-able description over all ranks; every rank must call it.

    Raises:
        ConfigError: on every rank, if a rank's description differs from rank 0's, saying where.
    """
    if not active():
        return
    place = device if dist.get_backend() == "nccl" else torch.device("cpu")
    text = json.dumps(what).encode()
    sizes = [torch.zeros(1, dtype=torch.int64, device=place) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(text)], dtype=torch.int64, device=place))
    longest = max(int(size.item()) for size in sizes)
    mine = torch.zeros(longest, dtype=torch.uint8, device=place)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = [torch.zeros_like(mine) for _ in sizes]
    dist.all_gather(texts, mine)
    each = [
        json.loads(bytes(t[: int(size.item())].cpu().numpy()).decode()) for t, size in zip(texts, sizes, strict=True)
    ]
    for rank, other in enumerate(each):
        if found := differences(each[0], other):
            listed = "; ".join(f"{where}: {a!r} on rank 0, {b!r} on rank {rank}" for where, a, b in found[:5])
            raise ConfigError(
                f"the ranks do not describe the same epoch. {listed}. "
                "Give every rank the same configuration, files and state."
            )
