"""Encoded images to augmented batches on the training device.

Workers ship bytes, DALI decodes them on the device, Kornia's operations augment whole batches there, and one Hydra
YAML describes all of it. Names are imported on first use, so ``import gpuaug`` costs nothing.

Every constructor and method raises :class:`ConfigError` for an argument that cannot work; docstrings name other errors.
All of them are :class:`GpuaugError`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors see; the table below is what runs
    from gpuaug.augment.crop import RandomCrop as RandomCrop
    from gpuaug.augment.crop import RandomResizedCrop as RandomResizedCrop
    from gpuaug.augment.crop import Resize as Resize
    from gpuaug.augment.crop import ResizeCenterCrop as ResizeCenterCrop
    from gpuaug.augment.mix import Mix as Mix
    from gpuaug.augment.normalize import Normalize as Normalize
    from gpuaug.augment.policy import OneOf as OneOf
    from gpuaug.augment.recipe import Augment as Augment
    from gpuaug.augment.recipe import MultiView as MultiView
    from gpuaug.batch import Batch as Batch
    from gpuaug.batch import EncodedBatch as EncodedBatch
    from gpuaug.config import build as build
    from gpuaug.config import compose as compose
    from gpuaug.decode.decoder import Decode as Decode
    from gpuaug.errors import ConfigError as ConfigError
    from gpuaug.errors import DataError as DataError
    from gpuaug.errors import FaultBudgetError as FaultBudgetError
    from gpuaug.errors import GpuaugError as GpuaugError
    from gpuaug.errors import ReadError as ReadError
    from gpuaug.errors import SourceError as SourceError
    from gpuaug.errors import StateError as StateError
    from gpuaug.loader.faults import Faults as Faults
    from gpuaug.loader.loader import Loader as Loader
    from gpuaug.read.order import Repeated as Repeated
    from gpuaug.read.order import Sequential as Sequential
    from gpuaug.read.order import Shuffle as Shuffle
    from gpuaug.read.order import Weighted as Weighted
    from gpuaug.source.cache import RamCache as RamCache
    from gpuaug.source.folder import FolderSource as FolderSource
    from gpuaug.source.materialized import MaterializedSource as MaterializedSource
    from gpuaug.source.packed import PackedSource as PackedSource
    from gpuaug.source.parquet import ParquetSource as ParquetSource
    from gpuaug.source.remote.storage import Remote as Remote
    from gpuaug.source.shards import ShardSource as ShardSource
    from gpuaug.source.table import TableSource as TableSource
    from gpuaug.tools.materialize.materialize import Materialize as Materialize

_WHERE = {
    "Augment": "gpuaug.augment.recipe",
    "Batch": "gpuaug.batch",
    "ConfigError": "gpuaug.errors",
    "DataError": "gpuaug.errors",
    "Decode": "gpuaug.decode.decoder",
    "EncodedBatch": "gpuaug.batch",
    "FaultBudgetError": "gpuaug.errors",
    "Faults": "gpuaug.loader.faults",
    "FolderSource": "gpuaug.source.folder",
    "GpuaugError": "gpuaug.errors",
    "Loader": "gpuaug.loader.loader",
    "Materialize": "gpuaug.tools.materialize.materialize",
    "MaterializedSource": "gpuaug.source.materialized",
    "Mix": "gpuaug.augment.mix",
    "MultiView": "gpuaug.augment.recipe",
    "Normalize": "gpuaug.augment.normalize",
    "OneOf": "gpuaug.augment.policy",
    "PackedSource": "gpuaug.source.packed",
    "ParquetSource": "gpuaug.source.parquet",
    "RamCache": "gpuaug.source.cache",
    "RandomCrop": "gpuaug.augment.crop",
    "RandomResizedCrop": "gpuaug.augment.crop",
    "ReadError": "gpuaug.errors",
    "Remote": "gpuaug.source.remote.storage",
    "Repeated": "gpuaug.read.order",
    "Resize": "gpuaug.augment.crop",
    "ResizeCenterCrop": "gpuaug.augment.crop",
    "Sequential": "gpuaug.read.order",
    "ShardSource": "gpuaug.source.shards",
    "Shuffle": "gpuaug.read.order",
    "SourceError": "gpuaug.errors",
    "StateError": "gpuaug.errors",
    "TableSource": "gpuaug.source.table",
    "Weighted": "gpuaug.read.order",
    "build": "gpuaug.config",
    "compose": "gpuaug.config",
}

__all__ = sorted(_WHERE)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'gpuaug' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_WHERE]
