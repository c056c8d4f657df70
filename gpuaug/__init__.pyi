"""The public names. Read by ``__init__.py``, by type checkers, and for the reference.

A comment names the page in docs/reference that has the names below it, in this order.
"""

__version__: str
PUBLIC: dict[str, tuple[str, str]]

# loader
from gpuaug.loader.loader import Loader as Loader
from gpuaug.loader.batch import Batch as Batch
from gpuaug.augment.explain import Explanation as Explanation
from gpuaug.augment.explain import Step as Step
from gpuaug.read.order import Shuffle as Shuffle
from gpuaug.read.order import Sequential as Sequential
from gpuaug.read.order import Weighted as Weighted
from gpuaug.read.order import Repeated as Repeated
from gpuaug.read.order import Buckets as Buckets
from gpuaug.read.order import Grouped as Grouped
from gpuaug.read.tokens import Tokens as Tokens
from gpuaug.decode.decoder import Decode as Decode
from gpuaug.loader.faults import Faults as Faults
from gpuaug.batch import EncodedBatch as EncodedBatch

# sources
from gpuaug.source.folder import FolderSource as FolderSource
from gpuaug.source.shards import ShardSource as ShardSource
from gpuaug.source.parquet import ParquetSource as ParquetSource
from gpuaug.source.table import TableSource as TableSource
from gpuaug.source.packed import PackedSource as PackedSource
from gpuaug.source.masks import MaskFolderSource as MaskFolderSource
from gpuaug.source.coco import CocoSource as CocoSource
from gpuaug.source.yolo import YoloSource as YoloSource
from gpuaug.source.voc import VocSource as VocSource
from gpuaug.source.remote.storage import Remote as Remote

# recipes
from gpuaug.augment.recipe import Augment as Augment
from gpuaug.augment.multi_view import MultiView as MultiView
from gpuaug.augment.cameras import Cameras as Cameras
from gpuaug.augment.progressive import Progressive as Progressive
from gpuaug.augment.crop import RandomResizedCrop as RandomResizedCrop
from gpuaug.augment.crop import RandomCrop as RandomCrop
from gpuaug.augment.crop import Resize as Resize
from gpuaug.augment.crop import ResizeCenterCrop as ResizeCenterCrop
from gpuaug.augment.crop import ResizeToSequence as ResizeToSequence
from gpuaug.augment.target_crops import RandomScaleCrop as RandomScaleCrop
from gpuaug.augment.target_crops import Letterbox as Letterbox
from gpuaug.augment.target_crops import RandomIoUCrop as RandomIoUCrop
from gpuaug.augment.target_crops import RandomSizeCrop as RandomSizeCrop
from gpuaug.augment.person_crop import PersonCrop as PersonCrop
from gpuaug.augment.sizes import Sizes as Sizes
from gpuaug.augment.mosaic import Mosaic as Mosaic
from gpuaug.augment.mosaic import CanvasAffine as CanvasAffine
from gpuaug.augment.mosaic import TileMixUp as TileMixUp
from gpuaug.augment.normalize import Normalize as Normalize
from gpuaug.augment.mix import Mix as Mix
from gpuaug.augment.mix_targets import MixObjects as MixObjects
from gpuaug.augment.mix_targets import CutMixMasks as CutMixMasks
from gpuaug.augment.mix_targets import ClassMix as ClassMix
from gpuaug.augment.mix_targets import class_mix as class_mix
from gpuaug.augment.mix_targets import CopyPaste as CopyPaste
from gpuaug.augment.patch_masks import BlockMasks as BlockMasks
from gpuaug.augment.patch_masks import MultiBlockMasks as MultiBlockMasks
from gpuaug.augment.patch_masks import RandomMasks as RandomMasks
from gpuaug.augment.patch_masks import PatchMasks as PatchMasks
from gpuaug.augment.positions import match_patches as match_patches
from gpuaug.augment.tta import tta as tta

# operations
from gpuaug.augment.auto import RandAugment as RandAugment
from gpuaug.augment.auto import TrivialAugmentWide as TrivialAugmentWide
from gpuaug.augment.auto import AutoAugment as AutoAugment
from gpuaug.augment.auto import AugMix as AugMix
from gpuaug.augment.auto_timm import TimmAugment as TimmAugment
from gpuaug.augment.policy import OneOf as OneOf
from gpuaug.augment.policy import SomeOf as SomeOf
from gpuaug.augment.ops.photometric import PhotometricDistort as PhotometricDistort
from gpuaug.augment.ops.erasing import RandomErasing as RandomErasing

# targets
from gpuaug.targets.rules import Targets as Targets
from gpuaug.targets.rules import Masks as Masks
from gpuaug.targets.rules import Boxes as Boxes
from gpuaug.targets.rules import Keypoints as Keypoints
from gpuaug.targets.batch import BatchTargets as BatchTargets
from gpuaug.batch import Target as Target

# pictures
from gpuaug.tools.preview.drawing import preview as preview
from gpuaug.tools.preview.server import preview_page as preview_page

# export
from gpuaug.deploy.graph import export as export

# configuration
from gpuaug.config import compose as compose
from gpuaug.config import build as build

# errors
from gpuaug.errors import GpuaugError as GpuaugError
from gpuaug.errors import ConfigError as ConfigError
from gpuaug.errors import SourceError as SourceError
from gpuaug.errors import StateError as StateError
from gpuaug.errors import ReadError as ReadError
from gpuaug.errors import DataError as DataError
from gpuaug.errors import FaultBudgetError as FaultBudgetError
