"""Fits masks, boxes and keypoints to the images that `gpuaug pack` writes.

Objects are neither clipped nor dropped here, because training does this later.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from gpuaug.augment.recipe import Augment
from gpuaug.augment.target_mover import TargetMover
from gpuaug.batch import CropWindows, EncodedBatch, Fault, Objects
from gpuaug.decode.decoder import Decoder
from gpuaug.decode.request import HeaderInfo
from gpuaug.errors import GpuaugError
from gpuaug.read.targets import as_target
from gpuaug.source import runs
from gpuaug.source.adapt import Source, active_numbers
from gpuaug.source.packed import Size
from gpuaug.targets import geometry, masks
from gpuaug.targets.colors import Color
from gpuaug.targets.objects import output_keypoints
from gpuaug.targets.rules import Boxes, Keypoints, Masks, Orientation, Targets

EXAMPLES = 4  # number of samples to try if a source does not declare its targets
# for each kind, the field of `Target`
KINDS = {"masks": "mask", "boxes": "boxes", "keypoints": "keypoints", "corners": "corners"}


def describe(
    source: Source, *, pixel_centers: bool, orientation: Orientation, colors: Mapping[int, Color] | None
) -> dict[str, Any] | None:
    """Describe a source's targets as JSON for the manifest. Returns None if the source has no targets."""
    found = _of_example(source) if source.target_kinds is None else source.target_kinds
    kinds = [kind for kind in KINDS if kind in found]
    if not kinds:
        return None
    flip, objects = source.flip_pairs, source.objects_digest
    return {
        "kinds": kinds,
        "flip_pairs": None if flip is None or "keypoints" not in kinds else list(flip),
        "num_keypoints": source.num_keypoints if "keypoints" in kinds else None,
        "pixel_centers": pixel_centers if "keypoints" in kinds else None,
        "orientation": orientation,
        "colors": None if colors is None else {str(number): [*color] for number, color in colors.items()},
        "objects": objects() if callable(objects) else None,
    }


def _of_example(source: Source) -> set[str]:
    """The kinds of targets of the first sample that can be read."""
    # if the labels are class numbers, there are no targets
    for number in active_numbers(source)[:EXAMPLES].tolist() if source.labels is None else ():
        with suppress(OSError, GpuaugError):
            target = as_target(source[number][1], number)
            return {kind for kind, field in KINDS.items() if getattr(target, field, None) is not None}
    return set()


class TargetPacker:
    """Encodes the targets of batches. With ``raw``, most masks become run lengths, which need no PNG decoder."""

    def __init__(self, described: Mapping[str, Any], source: Source, decoder: Decoder, *, raw: bool) -> None:
        self.kinds: tuple[str, ...] = tuple(described["kinds"])
        self._decoder, self._raw = decoder, raw
        self._rules = Targets(
            masks=Masks(colors=described["colors"]) if "masks" in self.kinds else None,
            boxes=Boxes(crowd="keep", oriented="corners" in self.kinds) if "boxes" in self.kinds else None,
            keypoints=Keypoints(pixel_centers=described["pixel_centers"]) if "keypoints" in self.kinds else None,
            orientation=described["orientation"],
        )
        self._mover = TargetMover(self._rules, Augment(), source=source)

    def encode(
        self, batch: EncodedBatch, headers: HeaderInfo, windows: Sequence[CropWindows]
    ) -> tuple[list[Fault], dict[int, list[bytes]], list[Objects]]:
        """The targets of a batch at every size. ``windows[k]`` resizes the whole images to size k.

        Returns the faults; for each row that has a mask, the encoded mask at every size; the objects at every size.
        """
        upright, faults = self._mover.upright(batch, headers, self._decoder)
        objects = replace(upright.objects, ids=upright.table.ids[upright.objects.ids])
        encoded = dict[int, list[bytes]]()
        for row in range(len(batch.masks)):  # one at a time, because masks can be large
            read, bad = self._mover.read_masks(batch, headers, self._decoder, rows=[row])
            faults += bad
            if (mask := read[row]) is not None:
                encoded[row] = [self._resized(mask, window.take(np.array([row]))) for window in windows]
        sizes = []
        for window in windows:
            matrices, scale = geometry.crop(window) @ upright.matrices, window.resized / window.window[:, 2:]
            sizes.append(_moved(objects, matrices, scale.prod(axis=1)))
        return faults, encoded, sizes

    def columns(self, sizes: Sequence[Objects], kept: Sequence[int], names: Sequence[Size]) -> dict[str, NDArray[Any]]:
        """Columns of the index for the objects of the rows ``kept``. But ``object_bounds`` counts objects per row."""
        columns: dict[str, NDArray[Any]] = {}
        for name, whole in zip(names, sizes, strict=True) if self._rules.boxes or self._rules.keypoints else ():
            objects = whole.rows(np.array(kept, dtype=np.int64))
            columns |= {"object_bounds": objects.counts, "object_labels": objects.labels}
            columns |= {"object_crowd": objects.crowd, "object_ids": objects.ids, f"{name}.area": objects.area}
            if objects.boxes is not None:
                columns[f"{name}.boxes"] = objects.boxes.astype(np.float32)
            if objects.corners is not None:
                columns[f"{name}.corners"] = objects.corners.astype(np.float32)
            if (keypoints := output_keypoints(objects, self._rules)) is not None:
                columns[f"{name}.keypoints"] = keypoints
        return columns

    def _resized(self, mask: NDArray[Any], window: CropWindows) -> bytes:
        """A mask at one size. ``window``: that of its image."""
        height, width = window.resized[0].tolist()
        out = np.empty((1, height, width), dtype=mask.dtype)
        masks.place([mask], replace(window, size=(height, width)), out, fill=0)
        return encode_mask(out[0], raw=self._raw)


def _moved(objects: Objects, matrices: NDArray[np.float64], scale: NDArray[np.float64]) -> Objects:
    """Move objects by one matrix per image, and multiply their areas by ``scale`` [B]."""
    own, boxes, keypoints = matrices[objects.sample], objects.boxes, objects.keypoints
    if boxes is not None:
        boxes = geometry.hulls(own, boxes)
    if keypoints is not None:
        xy = geometry.points(own, keypoints[..., :2])
        visibility = keypoints[..., 2:]
        keypoints = np.concatenate([np.where(visibility > 0, xy, 0), visibility], axis=2)
    corners = None if objects.corners is None else geometry.points(own, objects.corners)
    area = (objects.area * scale[objects.sample]).astype(np.float32)
    return replace(objects, boxes=boxes, keypoints=keypoints, corners=corners, area=area)


def encode_mask(mask: NDArray[Any], *, raw: bool) -> bytes:
    """Encode a mask, uint8 or int32 [H, W], without loss: as gray PNG, or as runs (see `source.runs`)."""
    largest = int(mask.max())
    if raw and len(made := runs.encode(mask)) <= mask.nbytes:
        return made
    if largest > 0xFFFF:
        return runs.encode(mask)
    stream = io.BytesIO()
    Image.fromarray(mask.astype(np.uint8 if largest <= 0xFF else np.uint16)).save(stream, "PNG")
    return stream.getvalue()
