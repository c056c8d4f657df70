"""Rules for the targets of a run: which targets it has, the fill value of masks, and which objects are kept."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from gpuaug import checks
from gpuaug.errors import ConfigError
from gpuaug.targets.colors import color_table

MaskKind = Literal["classes", "instances"]
Orientation = Literal["displayed", "stored"]
Table = str | Sequence[int] | Mapping[Any, int] | None


class Masks:
    """Rules for masks. A mask moves with its image, by nearest neighbour. A batch has int64 masks, as losses expect.

    Args:
        fill: value of pixels outside the image, and of all pixels of a sample that cannot be decoded. None: 255, which
            is the usual ``ignore_index`` of losses. With ``kind="instances"``, None means 0.
        map: table of new values: ``cityscapes``, ``ade20k``, a list (the new values of 0, 1, ...), or a mapping such as
            {7: 0, 8: 1}. Values that ``map`` does not name become ``fill``, and the log warns once. None: values stay.
        ignore: values that become ``fill``, whatever ``map`` says about them.
        colors: the colour of each class, such as {0: [128, 64, 128]}, for masks in RGB, RGBA or palette colours. Or the
            path of a CSV file with one class per line and the columns r, g, b, such as CamVid's class_dict.csv. Other
            colours become ``fill``, and the log warns once. ``map`` and ``ignore`` then refer to these classes. None:
            masks hold class numbers.
        kind: ``classes``: values are class numbers. ``instances``: 0 is no object, k + 1 is object k of the sample.

    >>> Masks(map="cityscapes").fill
    255
    >>> Masks(colors={0: [128, 64, 128], 1: [70, 70, 70]}, ignore=[1]).colors[0]
    (128, 64, 128)
    """

    def __init__(
        self,
        *,
        fill: int | None = None,
        map: Table = None,
        ignore: Sequence[int] | None = None,
        colors: Mapping[Any, Sequence[int]] | str | os.PathLike[str] | None = None,
        kind: MaskKind = "classes",
    ) -> None:
        instances = checks.one_of("targets.masks.kind", kind, get_args(MaskKind)) == "instances"
        checks.whole_number("targets.masks.fill", fill, 0, 2**31 - 1, optional=True)
        fill = (0 if instances else 255) if fill is None else fill
        if instances and (fill or any(value is not None for value in (map, ignore, colors))):
            raise ConfigError(
                "`targets.masks.fill` must be 0 and `map`, `ignore` and `colors` null if `targets.masks.kind` is "
                f"instances, because such masks hold object numbers. Found: {fill}, {map!r:.100}, {ignore!r:.100} and "
                f"{colors!r:.100}."
            )
        if not isinstance(ignore, Sequence | None) or not all(type(v) is int and 0 <= v < 2**24 for v in ignore or ()):
            raise ConfigError(f"`targets.masks.ignore` must be a list of values such as [11]. Found: {ignore!r:.100}.")
        self.fill, self.map, self.kind = fill, map, kind
        self.ignore, self.colors = tuple(ignore or ()), None if colors is None else color_table(colors)

    def __repr__(self) -> str:
        names = ("fill", "map", "ignore", "colors", "kind")
        return f"Masks({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


@dataclass(frozen=True, kw_only=True)
class Boxes:
    """Rules for boxes.

    The crop and every operation that moves pixels clip a box as the polygon that it has become. The result is the
    smallest upright box around what is left. If it is below one of the limits, the whole object is dropped.

    With ``oriented``, a box begins as the polygon of its four corners, and the limits are for the oriented box. This
    needs a source with corners, such as YOLO's files for oriented boxes, and operations that move pixels by a matrix.

    Args:
        min_size: smallest width and height in pixels of the output.
        min_area: smallest area of the upright box in pixels of the output.
        min_visibility: smallest area of what is left, as a fraction of the box's whole area; 0..1. Both are areas
            right after the crop, before rotations and perspectives: polygons, not the upright boxes around them.
            ``targets.visible`` has this fraction. With ``combine``, the whole is what the mosaic shows of the box.
        max_aspect: largest ratio of the longer to the shorter side in the output; None: any. Ultralytics: 100.
        oriented: whether ``targets.oriented`` has the smallest rectangle of any angle around what is left.
        crowd: whether to ``drop`` or ``keep`` annotations that cover many objects (COCO's iscrowd).

    >>> Boxes(min_visibility=0.1).min_size
    1.0
    """

    min_size: float = 1.0
    min_area: float = 1.0
    min_visibility: float = 0.0
    max_aspect: float | None = None
    oriented: bool = False
    crowd: Literal["drop", "keep"] = "drop"

    def __post_init__(self) -> None:
        for name, high in (("min_size", math.inf), ("min_area", math.inf), ("min_visibility", 1)):
            value = checks.number(f"targets.boxes.{name}", getattr(self, name), 0, high)
            object.__setattr__(self, name, float(value))  # 1 and 1.0 must be equal in a loader's state
        if self.max_aspect is not None:
            aspect = checks.number("targets.boxes.max_aspect", self.max_aspect, 1, math.inf)
            object.__setattr__(self, "max_aspect", float(aspect))
        checks.flag("targets.boxes.oriented", self.oriented)
        checks.one_of("targets.boxes.crowd", self.crowd, ("drop", "keep"))


@dataclass(frozen=True, kw_only=True)
class Keypoints:
    """Rules for keypoints. A keypoint that leaves the image at the crop or at any operation gets visibility 0.

    Its position becomes (0, 0). A later operation does not bring it back, because the image is empty there too.

    Args:
        flip: for each point, the index of its mirror image. For example, the left eye has the index of the right eye.
            If an image is mirrored, the points of each pair are exchanged. None: use the pairs of the source, such as
            COCO's. If the source has no pairs, no points are exchanged.
        pixel_centers: True: whole-number coordinates are the centres of pixels, as in COCO. False: they are the edges
            of pixels, as in boxes.

    >>> Keypoints(flip=[0, 2, 1]).flip
    (0, 2, 1)
    """

    flip: Sequence[int] | None = None
    pixel_centers: bool = True

    def __post_init__(self) -> None:
        checks.flag("targets.keypoints.pixel_centers", self.pixel_centers)
        flip = self.flip
        if flip is not None and (
            isinstance(flip, str)
            or not isinstance(flip, Sequence)
            or sorted(flip) != list(range(len(flip)))
            or any(flip[k] != i for i, k in enumerate(flip))
        ):
            raise ConfigError(
                "`targets.keypoints.flip` must name every point's mirror image once, in pairs such as [0, 2, 1]. "
                f"Found: {flip!r:.200}."
            )
        object.__setattr__(self, "flip", None if flip is None else tuple(flip))


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The targets of a run. Kinds that are None are left out, also if the source has them.

    Args:
        masks: rules of masks.
        boxes: rules of boxes.
        keypoints: rules of keypoints.
        orientation: the image that annotations were made for, if its EXIF data turn or mirror it. ``displayed``: the
            image as viewers show it. ``stored``: the pixels in the file, which OpenCV and Pillow give without EXIF. If
            the size of a mask, or of a Target, fits only one of the two, the size decides.

    >>> Targets(masks=Masks()).names
    ('masks',)
    """

    masks: Masks | None = None
    boxes: Boxes | None = None
    keypoints: Keypoints | None = None
    orientation: Orientation = "displayed"

    def __post_init__(self) -> None:
        checks.one_of("targets.orientation", self.orientation, get_args(Orientation))
        for name, kind in (("masks", Masks), ("boxes", Boxes), ("keypoints", Keypoints)):
            checks.instance(f"targets.{name}", getattr(self, name), kind, optional=True)
        if self.masks is not None and self.masks.kind == "instances" and self.boxes is None:
            raise ConfigError(
                "`targets.boxes` must be set if `targets.masks.kind` is instances. Set targets=instances."
            )
        if not self.names:
            raise ConfigError(
                "`targets` must have masks, boxes or keypoints. Found: none of them. To read none, set targets=none."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The kinds of targets: masks, boxes, keypoints, corners (of oriented boxes)."""
        names = tuple(name for name in ("masks", "boxes", "keypoints") if getattr(self, name) is not None)
        return (*names, "corners") if self.boxes is not None and self.boxes.oriented else names
