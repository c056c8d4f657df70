"""The samples that `gpuaug preview` shows: the originals, and what training sees of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from gpuaug.augment.crop import RandomResizedCrop
from gpuaug.augment.recipe import View
from gpuaug.batch import Boxes, EncodedBatch, Fault
from gpuaug.decode.decoder import Decode
from gpuaug.errors import ConfigError
from gpuaug.loader.loader import Loader
from gpuaug.read.reader import Reader
from gpuaug.source.materialized import MaterializedSource
from gpuaug.tools.samples import Sample


def look(loader: Loader, decode: Decode, *, indices: Sequence[int], epochs: Sequence[int]) -> list[Sample]:
    """The originals of samples, and what training sees of them in some epochs.

    Args:
        loader: what training would iterate.
        decode: settings of the decoder of the originals.
        indices: numbers in the source.
        epochs: the epochs to show.
    """
    number = np.array(indices, dtype=np.int64)
    originals = _originals(loader, decode, indices)
    sizes = np.array([image.shape[:2] for image in originals])
    heights, widths = np.maximum(sizes, 1).T
    boxes: list[list[tuple[int, int, int, int]]] = [[] for _ in indices]
    pictures: list[list[Image.Image]] = [[] for _ in indices]
    labels = None
    absent = {"absent": "not stored, only what was made of it"} if isinstance(loader.source, MaterializedSource) else {}
    for epoch in tqdm(epochs, desc="preview", unit="epoch", leave=False, disable=None):
        batch = loader.fetch(list(indices), epoch=epoch)
        labels = batch.labels
        images = batch.images if isinstance(batch.images, list) else [batch.images]
        drawn = loader.augment.draw(seed=loader.seed, epoch=epoch, indices=number)
        crops = loader.augment.boxes(drawn, heights, widths)
        for view, tensor, crop in zip(loader.augment.views, images, crops, strict=True):
            for row, picture in enumerate(_pictures(tensor, view)):
                pictures[row].append(picture)
                boxes[row].append(_corners(crop, row))
    return [
        Sample(
            index=int(index),
            key=loader.source.key(int(index)),
            label=_label(loader.source, labels, row),
            original=Image.fromarray(originals[row]) if originals[row].size else None,
            boxes=boxes[row],
            pictures=pictures[row],
            **absent,
        )
        for row, index in enumerate(indices)
    ]


def whole(loader: Loader, decode: Decode, *, views: Sequence[View], indices: Sequence[int]) -> list[list[Tensor]]:
    """The middle of each image at the size of each view, per view and sample: uint8 [H, W, 3] on the loader's device.

    Raises:
        ConfigError: if a sample cannot be decoded.
    """
    encoded = _read(loader, indices)
    decoder = decode.open(loader.device)
    seen = decoder.read_headers(encoded)
    _check_whole(loader, indices, [*encoded.faults, *seen.faults])
    made: list[list[Tensor]] = []
    for view in views:
        crop = view.augment.crop
        if crop is None:
            made.append([torch.as_tensor(image).to(loader.device) for image in decoder.full(encoded, seen)])
            continue
        u = None
        if crop.count:  # a random crop, of which no draw fits: it falls back to the middle
            height, width = crop.size
            crop = RandomResizedCrop(crop.size, scale=(1, 1), ratio=(width / height,) * 2)
            u = np.full((len(indices), crop.count), 0.5, dtype=np.float32)
        images, faults = decoder.pixels(encoded, seen, [crop.boxes(u, seen.height, seen.width)])
        _check_whole(loader, indices, faults)
        made.append(list(images[0]))
    decoder.close()
    return made


def _check_whole(loader: Loader, indices: Sequence[int], faults: Sequence[Fault]) -> None:
    if faults:
        index = indices[faults[0].row]
        raise ConfigError(
            "`indices` must name samples that can be decoded, with show=operations. Found: sample "
            f"{index} ({loader.source.key(index)!r}), {faults[0].reason}."
        )


def colorful(loader: Loader, decode: Decode, *, indices: Sequence[int]) -> int:
    """The sample whose channels differ most: half of the operations change nothing on a gray one."""
    images = _originals(loader, decode, indices)
    spread = [float(np.ptp(image, axis=2).mean()) if image.size else -1.0 for image in images]
    return indices[int(np.argmax(spread))]


def _originals(loader: Loader, decode: Decode, indices: Sequence[int]) -> list[Any]:
    """Whole images, uint8 [H, W, 3] on the CPU; of a bad sample an array without pixels."""
    encoded = _read(loader, indices)
    decoder = decode.open("cpu")
    images = [torch.as_tensor(image).numpy() for image in decoder.full(encoded, decoder.read_headers(encoded))]
    decoder.close()
    return images


def _read(loader: Loader, indices: Sequence[int]) -> EncodedBatch:
    number = torch.tensor(list(indices), dtype=torch.int64)
    zeros = torch.zeros_like(number)
    return next(iter(Reader(loader.source, num_workers=0).batches([(number, zeros, zeros == 0)])))


def _pictures(images: Tensor, view: View) -> list[Image.Image]:
    """Images [B, 3, H, W] of a recipe as pictures, without its normalization."""
    pixels = images.detach().float().cpu()
    if (normalize := view.augment.normalize) is not None:
        mean, std = (b.float().cpu().view(3, 1, 1) for b in (normalize.mean, normalize.std))
        pixels = pixels * std + mean
    array = pixels.clamp(0, 1).mul(255).round().byte().permute(0, 2, 3, 1).numpy()
    return [Image.fromarray(image) for image in array]


def _corners(boxes: Boxes, row: int) -> tuple[int, int, int, int]:
    top, left, height, width = boxes.box[row].tolist()
    return left, top, left + width, top + height


def _label(source: Any, labels: Tensor | None, row: int) -> str | None:
    if labels is None:
        return None
    value = labels[row].tolist()
    if isinstance(value, int) and source.classes is not None:
        return str(source.classes[value])
    return f"label {value:g}" if isinstance(value, int | float) else f"label {[round(v, 2) for v in value]}"
