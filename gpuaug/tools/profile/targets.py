"""Measurements that only loaders with targets need."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gpuaug.batch import EncodedBatch
from gpuaug.decode.header import HeaderError
from gpuaug.loader.stages import LiveStage, StagedBatch
from gpuaug.targets import masks
from gpuaug.tools.pack.targets import encode_mask


def object_seconds(stage: Any, headers: StagedBatch) -> float:
    """Repeat what `read_headers` does with objects and with masks that decide crops. Returns CPU-seconds."""
    began, placing = time.thread_time(), stage.targets
    upright = placing.upright(headers.encoded, headers.info, stage.decoder)
    placing.place(upright, headers.windows, headers.chosen, epoch=headers.drawn.epoch)
    return time.thread_time() - began


def as_runs(encoded: EncodedBatch, stage: LiveStage) -> EncodedBatch:
    """The batch with masks encoded as in `gpuaug pack format=uint8`, but not resized."""
    info, changed = stage.decoder.read_headers(encoded), list[bytes]()
    sizes = np.stack([info.height, info.width], axis=1).tolist()
    panoptic = stage.targets is not None and stage.targets.panoptic
    for data, exif, (height, width) in zip(encoded.masks, info.orientation.tolist(), sizes, strict=True):
        stored = (width, height) if exif > 4 else (height, width)
        how: dict[str, Any] = {"exif": exif, "max_pixels": stage.settings.max_pixels, "ids_in_rgb": panoptic}
        try:
            mask = masks.decode(data.tobytes(), stored=stored, **how)
            changed.append(encode_mask(mask, raw=True, panoptic=panoptic))
        except HeaderError:
            changed.append(data.tobytes())
    pieces = [*(image.tobytes() for image in encoded.images), *changed]
    offsets = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    data = np.frombuffer(bytearray(b"".join(pieces)), dtype=np.uint8)
    return replace(encoded, data=torch.from_numpy(data), offsets=torch.from_numpy(offsets))
