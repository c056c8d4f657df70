"""Turns encoded images into augmented batches on the training device.

Names are imported on first use, so ``import gpuaug`` is fast. Every constructor and method raises :class:`ConfigError`
for an invalid argument. All other errors are named in docstrings. Every error is a :class:`GpuaugError`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors only; at run time, `__getattr__` uses `_NAMES`
    from gpuaug.augment.auto import AugMix as AugMix
    from gpuaug.augment.auto import AutoAugment as AutoAugment
    from gpuaug.augment.auto import RandAugment as RandAugment
    from gpuaug.augment.auto import TrivialAugmentWide as TrivialAugmentWide
    from gpuaug.augment.auto_timm import TimmAugment as TimmAugment
    from gpuaug.augment.crop import RandomCrop as RandomCrop
    from gpuaug.augment.crop import RandomResizedCrop as RandomResizedCrop
    from gpuaug.augment.crop import Resize as Resize
    from gpuaug.augment.crop import ResizeCenterCrop as ResizeCenterCrop
    from gpuaug.augment.mix import Mix as Mix
    from gpuaug.augment.normalize import Normalize as Normalize
    from gpuaug.augment.ops.erasing import RandomErasing as RandomErasing
    from gpuaug.augment.ops.photometric import PhotometricDistort as PhotometricDistort
    from gpuaug.augment.policy import OneOf as OneOf
    from gpuaug.augment.progressive import Progressive as Progressive
    from gpuaug.augment.recipe import Augment as Augment
    from gpuaug.augment.recipe import MultiView as MultiView
    from gpuaug.augment.target_crops import Letterbox as Letterbox
    from gpuaug.augment.target_crops import RandomIoUCrop as RandomIoUCrop
    from gpuaug.augment.target_crops import RandomScaleCrop as RandomScaleCrop
    from gpuaug.batch import EncodedBatch as EncodedBatch
    from gpuaug.batch import Target as Target
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
    from gpuaug.loader.batch import Batch as Batch
    from gpuaug.loader.faults import Faults as Faults
    from gpuaug.loader.loader import Loader as Loader
    from gpuaug.read.order import Repeated as Repeated
    from gpuaug.read.order import Sequential as Sequential
    from gpuaug.read.order import Shuffle as Shuffle
    from gpuaug.read.order import Weighted as Weighted
    from gpuaug.source.cache import RamCache as RamCache
    from gpuaug.source.coco import CocoSource as CocoSource
    from gpuaug.source.folder import FolderSource as FolderSource
    from gpuaug.source.masks import MaskFolderSource as MaskFolderSource
    from gpuaug.source.materialized import MaterializedSource as MaterializedSource
    from gpuaug.source.packed import PackedSource as PackedSource
    from gpuaug.source.parquet import ParquetSource as ParquetSource
    from gpuaug.source.remote.storage import Remote as Remote
    from gpuaug.source.shards import ShardSource as ShardSource
    from gpuaug.source.table import TableSource as TableSource
    from gpuaug.source.voc import VocSource as VocSource
    from gpuaug.source.yolo import YoloSource as YoloSource
    from gpuaug.targets.batch import BatchTargets as BatchTargets
    from gpuaug.targets.rules import Boxes as Boxes
    from gpuaug.targets.rules import Keypoints as Keypoints
    from gpuaug.targets.rules import Masks as Masks
    from gpuaug.targets.rules import Targets as Targets
    from gpuaug.tools.materialize.command import Materialize as Materialize
    from gpuaug.tools.preview.drawing import preview as preview
    from gpuaug.tools.preview.notebook import preview_page as preview_page

_NAMES = {  # module: its public names
    "gpuaug.augment.auto": "AugMix AutoAugment RandAugment TrivialAugmentWide",
    "gpuaug.augment.auto_timm": "TimmAugment",
    "gpuaug.augment.crop": "RandomCrop RandomResizedCrop Resize ResizeCenterCrop",
    "gpuaug.augment.mix": "Mix",
    "gpuaug.augment.normalize": "Normalize",
    "gpuaug.augment.ops.erasing": "RandomErasing",
    "gpuaug.augment.ops.photometric": "PhotometricDistort",
    "gpuaug.augment.policy": "OneOf",
    "gpuaug.augment.progressive": "Progressive",
    "gpuaug.augment.recipe": "Augment MultiView",
    "gpuaug.augment.target_crops": "Letterbox RandomIoUCrop RandomScaleCrop",
    "gpuaug.batch": "EncodedBatch Target",
    "gpuaug.loader.batch": "Batch",
    "gpuaug.config": "build compose",
    "gpuaug.decode.decoder": "Decode",
    "gpuaug.errors": "ConfigError DataError FaultBudgetError GpuaugError ReadError SourceError StateError",
    "gpuaug.loader.faults": "Faults",
    "gpuaug.loader.loader": "Loader",
    "gpuaug.read.order": "Repeated Sequential Shuffle Weighted",
    "gpuaug.source.cache": "RamCache",
    "gpuaug.source.coco": "CocoSource",
    "gpuaug.source.folder": "FolderSource",
    "gpuaug.source.materialized": "MaterializedSource",
    "gpuaug.source.packed": "PackedSource",
    "gpuaug.source.parquet": "ParquetSource",
    "gpuaug.source.remote.storage": "Remote",
    "gpuaug.source.shards": "ShardSource",
    "gpuaug.source.table": "TableSource",
    "gpuaug.source.masks": "MaskFolderSource",
    "gpuaug.source.voc": "VocSource",
    "gpuaug.source.yolo": "YoloSource",
    "gpuaug.targets.batch": "BatchTargets",
    "gpuaug.targets.rules": "Boxes Keypoints Masks Targets",
    "gpuaug.tools.materialize.command": "Materialize",
    "gpuaug.tools.preview.notebook": "preview_page",
    "gpuaug.tools.preview.drawing": "preview",
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_WHERE)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'gpuaug' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
