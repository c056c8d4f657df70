"""The samples that `gpuaug preview` shows: the originals, and what training sees of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor
from tqdm import tqdm

from gpuaug.augment.recipe import View
from gpuaug.decode.decoder import Decode
from gpuaug.errors import ConfigError
from gpuaug.loader.loader import Loader
from gpuaug.read.reader import Reader
from gpuaug.source.materialized import MaterializedSource
from gpuaug.tools.samples import Sample
from gpuaug.tools.sheet import Cell, Row, scaled

COLORS = (
    (230, 57, 70), (29, 130, 200), (42, 157, 90), (244, 140, 30),
    (140, 82, 190), (20, 160, 160), (214, 70, 150), (120, 120, 20),
)  # fmt: skip


def samples_of(loader: Loader, decode: Decode, *, indices: Sequence[int], epochs: Sequence[int]) -> list[Sample]:
    """The originals of samples, and what training sees of them in some epochs.

    Args:
        loader: what training would iterate.
        decode: settings of the decoder of the originals.
        indices: numbers in the source.
        epochs: the epochs to show.
    """
    source = loader.source
    why = "not stored, only what was made of it" if isinstance(source, MaterializedSource) else "cannot be decoded"
    originals = _originals(loader, decode, indices)
    samples = [
        Sample(i, source.key(i), None, Image.fromarray(image) if image.size else None, [], [], why)
        for i, image in zip(indices, originals, strict=True)
    ]
    heights, widths = np.array([np.maximum(image.shape[:2], 1) for image in originals]).T
    for epoch in tqdm(epochs, desc="preview", unit="epoch", leave=False, disable=None):
        batch = loader.fetch(list(indices), epoch=epoch)
        images = batch.images if isinstance(batch.images, list) else [batch.images]
        drawn = loader.augment.draw(seed=loader.seed, epoch=epoch, indices=indices)
        crops = loader.augment.boxes(drawn, heights, widths)
        for view, tensor, crop in zip(loader.augment.views, images, crops, strict=True):
            pixels = tensor.detach().float().cpu()
            if (normalize := view.augment.normalize) is not None:
                mean, std = (b.float().cpu().view(3, 1, 1) for b in (normalize.mean, normalize.std))
                pixels = pixels * std + mean
            pictures = pixels.clamp(0, 1).mul(255).round().byte().permute(0, 2, 3, 1).numpy()
            for sample, picture, (top, left, height, width) in zip(samples, pictures, crop.box.tolist(), strict=True):
                sample.pictures.append(Image.fromarray(picture))
                sample.boxes.append((left, top, left + width, top + height))
    labels = [None] * len(indices) if batch.labels is None else batch.labels.tolist()
    return [replace(s, label=_label(source, v)) for s, v in zip(samples, labels, strict=True)]


def _label(source: Any, value: Any) -> str | None:
    if isinstance(value, int) and source.classes is not None:
        return str(source.classes[value])
    values = value if isinstance(value, list) else [value]
    return None if value is None else f"label {', '.join(f'{v:.3g}' for v in values)}"


def rows(samples: Sequence[Sample], *, epochs: Sequence[int], views: Sequence[str], cell: int | None) -> list[Row]:
    """A row for each sample: the original with the boxes that were read, then the views of each epoch.

    Args:
        samples: the samples.
        epochs: the epochs of their pictures.
        views: titles of the views of an epoch.
        cell: pixels of the longer side of the largest picture, others in proportion; None: pictures as they are.
    """
    largest = max(max(p.size) for s in samples for p in s.pictures)
    scale = 1 if cell is None else cell / largest
    captions = [", ".join(filter(None, (f"epoch {epoch}", view))) for epoch in epochs for view in views]
    made = []
    for sample in samples:
        cells = [_original(sample, 1.35 * scale * largest)]  # larger, because boxes are drawn on it
        for n, (picture, caption) in enumerate(zip(sample.pictures, captions, strict=True)):
            cells.append(Cell(scaled(picture, scale), caption, COLORS[n % len(COLORS)]))
        made.append(Row(sample.label or sample.key, [f"{sample.index}: {sample.key}"], cells))
    return made


def _original(sample: Sample, size: float) -> Cell:
    if sample.original is None:
        return Cell(Image.new("RGB", (round(size), round(size / 2)), (240, 240, 240)), f"original: {sample.absent}")
    scale = size / max(sample.original.size)
    image = scaled(sample.original, scale)
    pen = ImageDraw.Draw(image)
    for corners, color in reversed(list(zip(sample.boxes, COLORS, strict=False))):  # the first epoch on top
        left, top, right, bottom = (round(v * scale) for v in corners)
        pen.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=color, width=2)
    return Cell(image, "original")


def whole(loader: Loader, decode: Decode, *, views: Sequence[View], indices: Sequence[int]) -> list[list[Tensor]]:
    """The middle of each image at the size of each view, per view and sample: uint8 [H, W, 3] on the loader's device.

    Raises:
        ConfigError: if a sample cannot be decoded.
    """
    originals = _originals(loader, decode, indices)
    for index, image in zip(indices, originals, strict=True):
        if not image.size:
            raise ConfigError(
                "`indices` must name samples that can be decoded, with show=operations. Found: sample "
                f"{index} ({loader.source.key(index)!r}), which cannot."
            )
    made = []
    for view in views:
        crop = view.augment.crop
        images = [Image.fromarray(image) for image in originals]
        fitted = [image if crop is None else ImageOps.fit(image, crop.size[::-1]) for image in images]
        made.append([torch.from_numpy(np.array(image)).to(loader.device) for image in fitted])
    return made


def colorful(loader: Loader, decode: Decode, *, indices: Sequence[int]) -> int:
    """The sample whose channels differ most: half of the operations change nothing on a gray one."""
    images = _originals(loader, decode, indices)
    spread = [float(np.ptp(image, axis=2).mean()) if image.size else -1.0 for image in images]
    return indices[int(np.argmax(spread))]


def _originals(loader: Loader, decode: Decode, indices: Sequence[int]) -> list[Any]:
    """Whole images, uint8 [H, W, 3] on the CPU; of a bad sample an array without pixels."""
    number = torch.tensor(list(indices))
    encoded = next(Reader(loader.source).batches([(number, number * 0, number == number)]))
    decoder = decode.open("cpu")
    images = [image.numpy() for image in decoder.full(encoded, decoder.read_headers(encoded))]
    decoder.close()
    return images
