"""The number of batches of an epoch on this rank. ConfigError if the number is 0."""

from __future__ import annotations

from gpuaug.errors import ConfigError
from gpuaug.loader.loader import Loader


def count_batches(loader: Loader) -> int:
    if count := len(loader):
        return count
    ranks = loader.epoch_order.world_size
    raise ConfigError(
        f"an epoch has no batches: {len(loader.source)} samples, `batch_size={loader.batch_size}`"
        f"{f' on {ranks} ranks' if ranks > 1 else ''}, `last={loader.last}`. Lower `batch_size` or set `last=pad`."
    )
