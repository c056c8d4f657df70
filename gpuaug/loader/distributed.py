"""The rank of this process, and a check that all ranks describe the same epoch."""

from __future__ import annotations

import json
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
