"""A batch between two stages of the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gpuaug.augment.mosaic import Layout
from gpuaug.augment.parameters import Chosen
from gpuaug.augment.recipe import Drawn
from gpuaug.batch import CropWindows, EncodedBatch, Fault, Int64
from gpuaug.decode.request import HeaderInfo

if TYPE_CHECKING:  # runs without targets or patch masks do not import these modules
    from gpuaug.augment.patch_masks import PatchMasks
    from gpuaug.augment.target_view import TargetView
    from gpuaug.targets.geometry import Float64

NO_DRAWS = Drawn({}, {})


class Combined(NamedTuple):
    """How the outputs of a batch were put together."""

    numbers: Int64  # [B, K], numbers of the samples in the tiles, the last of a mate; -1: no tile
    layout: Layout
    matrices: Float64  # [B, 3, 3], from each sample's upright image to the output before the operations


@dataclass(frozen=True, slots=True)
class PartialBatch:
    """A batch between two stages. Each stage adds what the next stages need."""

    encoded: EncodedBatch
    faults: Sequence[Fault]  # found in the headers; after decoding, all faults of the batch
    info: HeaderInfo | None = None  # None after decoding
    recipe: Any = None  # of the batch's epoch and step
    drawn: Drawn = NO_DRAWS
    windows: list[CropWindows] = field(default_factory=list)  # per view
    chosen: list[list[Chosen]] | None = None  # choices of each view's operations; None: `augment` makes them
    targets: list[TargetView] | None = None
    patch_masks: PatchMasks | None = None  # on the CPU
    # after decoding: [B, H, W, channels] per view, on the device; uint8, with pixels=raw also uint16 or float32
    images: list[Tensor] = field(default_factory=list)
    ready: torch.cuda.Event | None = None  # marks the images complete; None on a CPU
    combined: Combined | None = None  # after `combine`, with recipes that have it
