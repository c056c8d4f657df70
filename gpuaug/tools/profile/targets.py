"""Parts of `gpuaug profile` for loaders with targets: the cost of objects, and other forms of masks."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gpuaug.augment.target_stage import TargetStage
from gpuaug.batch import EncodedBatch
from gpuaug.decode.header import HeaderError
from gpuaug.loader.stages import HeaderBatch, LiveStage
from gpuaug.source import runs
from gpuaug.targets import masks
from gpuaug.targets.rules import Masks, Targets


def object_seconds(stage: LiveStage, headers: HeaderBatch) -> float:
    """CPU-seconds that targets add to reading headers: for objects, and for masks that a crop needs."""
    if stage.targets is None or headers.info is None or headers.chosen is None:
        return 0.0
    began = time.thread_time()
    upright = stage.targets.upright(headers.encoded, headers.info, stage.decoder)
    stage.targets.place(upright, headers.windows, headers.chosen, epoch=headers.drawn.epoch)
    return time.thread_time() - began


def with_dtype(stage: LiveStage, dtype: Any) -> LiveStage | None:
    """The stage with masks of another dtype; None if it has no masks, or has this dtype already."""
    targets = stage.targets
    rules = None if targets is None else targets.rules.masks
    if targets is None or rules is None or rules.dtype == dtype or rules.fill > np.iinfo(dtype).max:
        return None
    other = Targets(
        masks=Masks(fill=rules.fill, map=rules.map, dtype=dtype, kind=rules.kind),
        boxes=targets.rules.boxes,
        keypoints=targets.rules.keypoints,
    )
    return replace(stage, targets=TargetStage(other, targets.recipe, flip=targets.flip, panoptic=targets.panoptic))


def as_runs(encoded: EncodedBatch, stage: LiveStage) -> EncodedBatch:
    """The batch with masks as `gpuaug pack format=uint8` would write them, at the same size."""
    info, changed = stage.decoder.read_headers(encoded), list[bytes]()
    for row, data in enumerate(encoded.masks):
        height, width, exif = int(info.height[row]), int(info.width[row]), int(info.orientation[row])
        try:
            mask = masks.decode(
                data.tobytes(),
                stored=(width, height) if exif > 4 else (height, width),
                exif=exif,
                max_pixels=stage.settings.max_pixels,
                ids_in_rgb=stage.targets is not None and stage.targets.panoptic,
            )
            made = runs.encode(mask)
            changed.append(made if len(made) <= mask.nbytes else data.tobytes())
        except HeaderError:  # a bad mask stays unchanged
            changed.append(data.tobytes())
    pieces = [*(image.tobytes() for image in encoded.images), *changed]
    offsets = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    data = np.frombuffer(bytearray(b"".join(pieces)), dtype=np.uint8)
    return replace(encoded, data=torch.from_numpy(data), offsets=torch.from_numpy(offsets))
