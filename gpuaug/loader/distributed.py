"""The rank of this process, and a check that all ranks have the same configuration, source and state."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from gpuaug.errors import ConfigError
from gpuaug.loader.state import compare


def active() -> bool:
    """Whether torch.distributed is initialised with more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank_and_world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return the arguments if they are given, else the values of torch.distributed, else (0, 1)."""
    if rank is None and world_size is None:
        return (dist.get_rank(), dist.get_world_size()) if active() else (0, 1)
    if type(rank) is not int or type(world_size) is not int or not 0 <= rank < world_size < 2**31:
        raise ConfigError(
            "`rank` and `world_size` must be given together, as whole numbers with 0 <= rank < world_size < 2**31. "
            f"Found: rank={rank!r}, world_size={world_size!r}."
        )
    return rank, world_size


def agree(what: dict[str, Any], *, device: torch.device) -> None:
    """Raise ConfigError on every rank if ``what`` differs between ranks. Every rank must call this function."""
    if not active():
        return
    each: list[Any] = [None] * dist.get_world_size()
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # NCCL gathers on the current device
        dist.all_gather_object(each, what)
    for rank, other in enumerate(each):
        if different := compare(each[0], other, "on rank 0", f"on rank {rank}"):
            raise ConfigError(
                f"the ranks differ in configuration, files or state. {different}. "
                "Give every rank the same configuration, files and state."
            )
