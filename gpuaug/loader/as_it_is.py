"""Raises an error if a loader is used as the dataset of a DataLoader."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from gpuaug.errors import ConfigError

REMEDY = (
    "the loader takes the place of a DataLoader. Pass the loader itself. Lightning's trainer takes the loader. With "
    "Accelerate and Fabric, iterate over the loader. For Hugging Face's Trainer, see "
    "examples/hugging_face_trainer.py."
)
DATALOADERS = ("torch.utils.data.", "torchdata.")  # modules whose loaders read a dataset by sample number


class NoDatasetError(ConfigError, AttributeError):
    """``loader.dataset`` was read. The base class AttributeError makes ``hasattr(loader, "dataset")`` False."""


class AsItIs:
    """Base class of the loader."""

    __reversed__ = __contains__ = None  # else Python would implement `reversed` and `in` with indices

    def _check_caller(self) -> None:
        """Raise ConfigError if a DataLoader called ``loader[i]``, as with ``batch_size=None``."""
        if sys._getframe(2).f_globals.get("__name__", "").startswith(DATALOADERS):
            raise ConfigError(f"a gpuaug.Loader is not a dataset: {REMEDY}")

    @property
    def dataset(self) -> NoReturn:  # accelerate.skip_first_batches reads it
        """Always raises :class:`NoDatasetError`."""
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
            "another. To save the loader's position, use `state_dict`."
        )
