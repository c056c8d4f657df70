"""Reads samples of a loader's source as they are before the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from PIL import Image

from gpuaug.augment.recipe import Augment
from gpuaug.augment.target_mover import TargetMover
from gpuaug.batch import EncodedBatch
from gpuaug.display.annotations import Annotated, Annotations
from gpuaug.display.batches import label_text, pictures
from gpuaug.loader.loader import Loader
from gpuaug.loader.pipeline import LazyDecoders, Streams
from gpuaug.read.reader import Reader

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
    details: list[str] = field(default_factory=list)  # for each of these, what the recipe did
    notes: list[str] = field(default_factory=list)  # lines beside the pictures


def originals(
    loader: Loader,
    indices: Sequence[int],
    *,
    epoch: int,
    cropped: Sequence[int] = (),
    bands: Sequence[int] | None = None,
) -> list[Sample]:
    """Read the original images, and compute their crops in the epochs ``cropped``. ``bands``: channels to draw."""
    augmented, own, cpu = loader.source.augmented_by, loader.pipeline, torch.device("cpu")
    absent = "not stored, unlike its augmented images" if augmented else "cannot be decoded"
    decode, accepted = replace(loader.decode, num_threads=1), loader.faults.truncated == "accept"
    decoders = LazyDecoders(partial(decode.open, cpu, accept_truncated=accepted))
    # without a crop and without operations, the output is the whole image
    whole = replace(own, recipe=Augment(), decoders=decoders, device=cpu, streams=Streams(cpu), targets=None)
    pipelines = [] if augmented else [whole]
    if loader.targets is not None:
        targets = TargetMover(loader.targets, Augment(), source=loader.source, quiet=True)
        pipelines.insert(0, replace(whole, targets=targets))
    samples = []
    for index in indices:
        encoded = read(loader, [index], epoch=epoch)
        label = label_text(None if encoded.labels is None else encoded.labels.tolist()[0], loader.source.classes)
        sample = Sample(index, loader.source.key(index), label, Annotated(Image.new("RGB", (2, 1), GRAY)), absent)
        for pipeline in pipelines:  # a sample with damaged targets is shown without them
            decoded = pipeline.decode(pipeline.read_headers(encoded, epoch))
            if not decoded.faults:
                known = pipeline.finish_targets(decoded, [], None)
                annotations = Annotations.of(known[0] if known else None, 0, loader.targets)
                view = decoded.images[0].permute(0, 3, 1, 2).float() / decoders.get().white
                sample.original = Annotated(pictures(view, None, bands)[0], annotations)
                sample.absent = ""
                break
        for each in () if sample.absent else cropped:
            for window in own.read_headers(encoded, each).windows:
                top, left, height, width = window.window[0].tolist()
                sample.crops.append((left, top, left + width, top + height))
        samples.append(sample)
    decoders.close()
    return samples


def read(loader: Loader, indices: Sequence[int], *, epoch: int) -> EncodedBatch:
    """The encoded images and targets of some samples. The size of packed images can depend on ``epoch``."""
    number, pipeline = torch.tensor(list(indices)), loader.pipeline
    reader = Reader(pipeline.reader.source, targets=pipeline.reader.targets)
    return next(iter(replace(pipeline, reader=reader).read([(number, number * 0, number == number)], epoch)))
