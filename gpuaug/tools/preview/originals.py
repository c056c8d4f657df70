"""Reads samples of a loader's source as they are before the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from PIL import Image

from gpuaug.augment.recipe import Augment
from gpuaug.augment.target_stage import TargetStage
from gpuaug.batch import EncodedBatch
from gpuaug.decode.decoder import Decoder
from gpuaug.decode.request import HeaderInfo
from gpuaug.display.annotations import Annotated, Annotations
from gpuaug.display.batches import label_text
from gpuaug.loader.loader import Loader
from gpuaug.loader.stages import NO_DRAWS
from gpuaug.read.reader import Reader
from gpuaug.targets.batch import BatchTargets

GRAY = (240, 240, 240)


@dataclass
class Sample:
    """A sample to show: the upright original image, and its augmented images."""

    index: int
    key: str
    label: str  # "" if there is none
    original: Annotated
    absent: str = ""  # why ``original`` is only a gray picture
    crops: list[tuple[int, ...]] = field(default_factory=list)  # (x1, y1, x2, y2) in the original
    augmented: list[Annotated] = field(default_factory=list)  # all views of an epoch, then all views of the next


def originals(loader: Loader, indices: Sequence[int], *, epoch: int, cropped: Sequence[int] = ()) -> list[Sample]:
    """Read the original images, and compute their crops in the epochs ``cropped``."""
    augmented = loader.source.augmented_by
    absent = "not stored, unlike its augmented images" if augmented else "cannot be decoded"
    decoder, samples = replace(loader.decode, num_threads=1).open("cpu"), []
    for index in indices:
        encoded = read(loader, [index], epoch=epoch)
        headers = decoder.read_headers(encoded)
        pixels = decoder.full(encoded, headers)[0].numpy()  # empty if the image cannot be decoded
        pixels = pixels[:0] if augmented else pixels
        label = label_text(None if encoded.labels is None else encoded.labels.tolist()[0], loader.source.classes)
        sample = Sample(index, loader.source.key(index), label, Annotated(Image.new("RGB", (2, 1), GRAY)), absent)
        if pixels.size:
            known = Annotations.of(upright_targets(loader, decoder, encoded, headers), 0, loader.targets)
            sample.original, sample.absent = Annotated(Image.fromarray(pixels), known), ""
            for each in cropped:
                for window in loader.pipeline.stage.read_headers(encoded, each).windows:
                    top, left, height, width = window.window[0].tolist()
                    sample.crops.append((left, top, left + width, top + height))
        samples.append(sample)
    decoder.close()
    return samples


def upright_targets(
    loader: Loader, decoder: Decoder, encoded: EncodedBatch, headers: HeaderInfo
) -> BatchTargets | None:
    """The targets of one whole upright image, before the recipe. None if it has no usable targets."""
    stage = loader.pipeline.stage
    if stage.targets is None or encoded.faults or headers.faults:
        return None
    recipe = Augment()  # no crop and no operations: the output is the whole image
    whole = TargetStage(stage.targets.rules, recipe, source=loader.source, quiet=True)
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
