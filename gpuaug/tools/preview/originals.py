"""Reads the encoded images and targets of a loader's source, before the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from gpuaug.augment.recipe import Augment
from gpuaug.augment.target_stage import TargetStage
from gpuaug.batch import EncodedBatch
from gpuaug.decode.decoder import Decoder
from gpuaug.decode.plan import HeaderInfo
from gpuaug.loader.loader import Loader
from gpuaug.loader.stages import NO_DRAWS, LiveStage
from gpuaug.read.reader import Reader
from gpuaug.targets.batch import BatchTargets


def upright_targets(
    loader: Loader, decoder: Decoder, encoded: EncodedBatch, headers: HeaderInfo
) -> BatchTargets | None:
    """The targets of one whole upright image, before the recipe. None if it has no usable targets."""
    stage = loader.pipeline.stage
    if not isinstance(stage, LiveStage) or stage.targets is None or encoded.faults or headers.faults:
        return None
    recipe = Augment()  # no crop and no operations: the output is the whole image
    whole = TargetStage(stage.targets.rules, recipe, panoptic=stage.targets.panoptic)
    upright = whole.upright(encoded, headers, decoder)
    batch = whole.place(upright, recipe.windows(NO_DRAWS, headers.height, headers.width), [[]], epoch=0)
    if upright.faults or whole.decode(batch, encoded, headers, decoder):
        return None
    return whole.finish(batch, encoded.indices, bad=[], keep=None, device=torch.device("cpu"))[0]


def read(loader: Loader, indices: Sequence[int], *, epoch: int) -> EncodedBatch:
    """The encoded images and targets of some samples. The size of packed images can depend on ``epoch``."""
    number, pipeline = torch.tensor(list(indices)), loader.pipeline
    reader = Reader(pipeline.reader.source, targets=pipeline.reader.targets)
    return next(iter(replace(pipeline, reader=reader).read([(number, number * 0, number == number)], epoch)))
