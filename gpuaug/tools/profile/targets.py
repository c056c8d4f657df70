"""Parts of `gpuaug profile` for loaders with targets: the cost of objects, and other forms of masks."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gpuaug.batch import EncodedBatch
from gpuaug.decode.header import HeaderError
from gpuaug.loader.stages import HeaderBatch, LiveStage
from gpuaug.targets import masks
from gpuaug.tools.pack.targets import encode_mask


def object_seconds(stage: LiveStage, headers: HeaderBatch) -> float:
    """CPU-seconds that targets add to reading headers: for objects, and for masks that a crop needs.

    Does this work again to measure it.
    """
    assert stage.targets is not None
    assert headers.info is not None
    assert headers.chosen is not None
    began = time.thread_time()
    upright = stage.targets.upright(headers.encoded, headers.info, stage.decoder)
    stage.targets.place(upright, headers.windows, headers.chosen, epoch=headers.drawn.epoch)
    return time.thread_time() - began


def as_runs(encoded: EncodedBatch, stage: LiveStage) -> EncodedBatch:
    """The batch with masks as `gpuaug pack format=uint8` would write them, at the same size."""
    info, changed = stage.decoder.read_headers(encoded), list[bytes]()
    sizes = np.stack([info.height, info.width], axis=1).tolist()
    panoptic = stage.targets is not None and stage.targets.panoptic
    for data, exif, (height, width) in zip(encoded.masks, info.orientation.tolist(), sizes, strict=True):
        stored = (width, height) if exif > 4 else (height, width)
        how: dict[str, Any] = {"exif": exif, "max_pixels": stage.settings.max_pixels, "ids_in_rgb": panoptic}
        try:
            mask = masks.decode(data.tobytes(), stored=stored, **how)
            changed.append(encode_mask(mask, raw=True, panoptic=panoptic))
        except HeaderError:  # a bad mask stays unchanged
            changed.append(data.tobytes())
    pieces = [*(image.tobytes() for image in encoded.images), *changed]
    offsets = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    data = np.frombuffer(bytearray(b"".join(pieces)), dtype=np.uint8)
    return replace(encoded, data=torch.from_numpy(data), offsets=torch.from_numpy(offsets))
