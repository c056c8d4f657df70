"""Refuses a loader that is given to a DataLoader, which would index the loader or send it to workers."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from gpuaug.errors import ConfigError

REMEDY = (
    "it is the DataLoader: pass it as it is. Lightning's trainer takes it. With Accelerate and Fabric, iterate over "
    "it. For Hugging Face's Trainer, see examples/hugging_face_trainer.py."
)
DATALOADERS = ("torch.utils.data.", "torchdata.")  # modules that read a dataset by number


class NoDatasetError(ConfigError, AttributeError):
    """``loader.dataset`` was read. An AttributeError too, because ``hasattr(loader, "dataset")`` must be False."""


class AsItIs:
    """Base of a loader: refuses to be a dataset of another DataLoader."""

    __reversed__ = __contains__ = None  # Python would index the loader for these

    def _check_caller(self) -> None:
        """Raise ConfigError if a DataLoader wants a sample by its number, as with ``batch_size=None``."""
        if sys._getframe(2).f_globals.get("__name__", "").startswith(DATALOADERS):
            raise ConfigError(f"a gpuaug.Loader is not a dataset: {REMEDY}")

    @property
    def dataset(self) -> NoReturn:  # accelerate.skip_first_batches reads it
        """A loader has no dataset: reading this raises an error that says how to resume."""
        raise NoDatasetError(
            f"a gpuaug.Loader has no `dataset`: {REMEDY} To continue inside an epoch, call "
            "`loader.load_state_dict(state)` with an earlier `loader.state_dict()`. This takes the place of "
            "`skip_first_batches`."
        )

    def __getitems__(self, indices: Any) -> NoReturn:  # torch's DataLoader reads a dataset by this method
        raise ConfigError(f"a gpuaug.Loader is not a dataset: {REMEDY}")

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            f"a gpuaug.Loader cannot be copied or sent to another process: {REMEDY} For a second loader, build "
            "another. To save its position, use `state_dict`."
        )
