"""Draws masks, boxes and keypoints on pictures."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuaug.display.sheet import INK, STRIPE, STRIPED, Cell, Color, drawable, fitting, font, scaled

if TYPE_CHECKING:  # loaders import this module, but need PIL only to draw
    from PIL import Image

    from gpuaug.targets.batch import BatchTargets
    from gpuaug.targets.rules import Targets

Crops = Iterable[tuple[Sequence[int], Color]]  # boxes (x1, y1, x2, y2) in pixels of a picture, each with a color
PALETTE = (
    (230, 25, 75), (60, 180, 75), (255, 225, 25), (0, 130, 200), (245, 130, 48), (145, 30, 180), (70, 240, 240),
    (240, 50, 230), (210, 245, 60), (250, 190, 212), (0, 128, 128), (220, 190, 255), (170, 110, 40), (128, 0, 0),
    (170, 255, 195), (128, 128, 0), (255, 215, 180), (0, 0, 128),
)  # fmt: skip
BACKGROUND = (24, 24, 32)  # for class 0 of a mask: the background in most datasets
LEGEND = 48  # maximum number of classes in the legend
TEXT, DOT = 11, 3  # pixels: height of a label's text, radius of a dot
# COCO's skeleton of a person, for a source with 17 keypoints
PERSON = (
    (15, 13), (13, 11), (16, 14), (14, 12), (11, 12), (5, 11), (6, 12), (5, 6), (5, 7), (6, 8), (7, 9), (8, 10),
    (1, 2), (0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 6),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Annotations:
    """Mask and objects of one picture. Coordinates are in pixels; pixel i covers i..i+1."""

    mask: NDArray[Any] | None  # integers [H, W]
    boxes: NDArray[np.float32] | None  # [n, 4], (x1, y1, x2, y2)
    keypoints: NDArray[np.float32] | None  # [n, K, 3], (x, y, visibility)
    labels: NDArray[np.int64]  # [n]
    crowd: NDArray[np.bool_]  # [n]
    ids: NDArray[np.int64]  # [n], id of each annotation in its file; -1: none
    corners: NDArray[np.float64] | None = None  # [n, 4, 2], of oriented boxes, which are drawn instead of `boxes`

    @classmethod
    def of(cls, targets: BatchTargets | None, row: int, rules: Targets | None) -> Annotations | None:
        """The annotations of one row of a batch. ``rules``: None means the default rules."""
        if targets is None:
            return None
        own = (targets.sample == row).cpu()
        boxes, keypoints = (None if x is None else x.cpu()[own].numpy() for x in (targets.boxes, targets.keypoints))
        others = (x.cpu()[own].numpy() for x in (targets.labels, targets.crowd, targets.ids))
        points = None if rules is None else rules.keypoints
        if keypoints is not None and (points is None or points.pixel_centers):
            keypoints = keypoints + np.array([0.5, 0.5, 0], dtype=np.float32)
        mask = None if targets.masks is None else targets.masks[row].int().cpu().numpy()
        corners = None
        if targets.oriented is not None:
            from gpuaug.targets.geometry import corners_of

            corners = corners_of(targets.oriented.cpu()[own].double().numpy())
        labels, crowd, ids = others
        return cls(mask, boxes, keypoints, labels, crowd, ids, corners)

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Style:
    """How annotations are drawn."""

    rules: Targets | None = None
    classes: Sequence[str] | None = None
    skeleton: Sequence[tuple[int, int]] = ()  # keypoints that a line connects
    numbers: Mapping[int, int] | None = None  # color number of each annotation id; None: use the object's position

    @classmethod
    def of(cls, source: Any, rules: Targets | None) -> Style:
        """The style for the samples of a source. ``rules``: None if there are no targets."""
        return cls(rules, source.classes, PERSON if source.num_keypoints == 17 else ())

    @property
    def by_object(self) -> bool:
        """Whether colors distinguish objects instead of classes."""
        return self.rules is not None and self.rules.masks is not None and self.rules.masks.kind == "instances"

    @property
    def ignored(self) -> int | None:
        """The mask value that losses ignore, or None."""
        return None if self.rules is None or self.rules.masks is None else self.rules.masks.fill or None

    def for_sample(self, *shown: Annotations | None) -> Style:
        """Give each object the same color in all pictures of a sample, if colors distinguish objects."""
        ids = sorted({k for each in shown if each is not None for k in each.ids.tolist() if k >= 0})
        return replace(self, numbers={k: n for n, k in enumerate(ids)}) if self.by_object and ids else self

    def color(self, annotations: Annotations, number: int) -> Color:
        if not self.by_object:
            return color_of(int(annotations.labels[number]))
        return color_of((self.numbers or {}).get(int(annotations.ids[number]), number))

    def legend(self, shown: Iterable[Annotations | None]) -> list[tuple[Color | None, str]]:
        """Color (None: striped) and name of each class in the pictures; [] if colors distinguish objects."""
        known = [each for each in shown if each is not None]
        if self.by_object or not known:
            return []
        color = color_of if known[0].mask is None else of_class
        parts = [np.unique(each.labels if each.mask is None else each.mask) for each in known]
        values = np.unique(np.concatenate(parts)).tolist()
        chips: list[tuple[Color | None, str]] = [(color(n), self._numbered(n)) for n in values if n != self.ignored]
        more = [(BACKGROUND, f"and {len(chips) - LEGEND} more classes")] if len(chips) > LEGEND else []
        rest = [(None, f"{self.ignored}: ignored")] if self.ignored in values else []
        return [*chips[:LEGEND], *more, *rest]

    def _numbered(self, label: int) -> str:
        name = str(self.classes[label]) if self.classes is not None and 0 <= label < len(self.classes) else str(label)
        return name if name == str(label) else f"{label}: {name}"


class Annotated(NamedTuple):
    """A picture and its annotations, if it has any."""

    picture: Image.Image
    annotations: Annotations | None = None

    def cell(self, scale: float, style: Style, *caption: str, color: Color = INK, crops: Crops = ()) -> Cell:
        """The drawn picture. With boxes or keypoints, the caption ends with the number of objects."""
        parts, known = [*caption], self.annotations
        if known is not None and (known.boxes is not None or known.keypoints is not None):
            parts.append(f"{len(known)} object{'s' * (len(known) != 1)}")
        return Cell(self.drawn(scale, style, crops=crops), ", ".join(filter(None, parts)), color)

    def drawn(self, scale: float, style: Style, *, crops: Crops = ()) -> Image.Image:
        """The scaled picture with its annotations and ``crops`` on it."""
        from PIL import ImageDraw

        image, annotations = scaled(self.picture, scale), self.annotations
        if annotations is not None and annotations.mask is not None:
            image = _tinted(image, annotations, style)
        pen = ImageDraw.Draw(image, "RGBA")
        for corners, color in crops:
            left, top, right, bottom = (round(v * scale) for v in corners)
            pen.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=color, width=2)
        if annotations is None:
            return image
        factors = image.width / self.picture.width, image.height / self.picture.height
        if annotations.boxes is not None:
            boxes = np.rint(annotations.boxes * (factors * 2)).astype(int)
            areas = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
            by_area = {k: boxes[k].tolist() for k in np.argsort(-areas, kind="stable").tolist()}  # small ones on top
            for k, box in by_area.items():
                if annotations.corners is None:
                    _box(pen, box, style.color(annotations, k))
                else:
                    _rectangle(pen, annotations.corners[k] * factors, style.color(annotations, k))
            _labels(pen, image.size, by_area, annotations, style)
        if annotations.keypoints is not None:
            for k, points in enumerate(annotations.keypoints * (*factors, 1)):
                _points(pen, points, style.color(annotations, k), style.skeleton)
        return image


def class_name(number: int, classes: Sequence[str] | None, other: str) -> str:
    """The name of a class, or ``other`` if it has none.

    The number comes first if the font lacks a character of the name, because two such names could look the same.
    """
    name = str(classes[number]) if classes is not None and 0 <= number < len(classes) else other
    return name if drawable(name) == name else f"{number}: {name}"


def color_of(number: int) -> Color:
    """The color of an object or of a class of boxes. The first 18 colors differ clearly."""
    if 0 <= number < len(PALETTE):
        return PALETTE[number]
    hue = number * 0.6180339887 % 1  # the golden ratio spreads any number of hues evenly
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.5 + 0.25 * (number % 3), 1 - 0.2 * (number // 3 % 3))
    return round(255 * red), round(255 * green), round(255 * blue)


def of_class(value: int) -> Color:
    """The color of a class in a mask; 0 is dark."""
    return BACKGROUND if value == 0 else color_of(value - 1)


def _tinted(image: Image.Image, annotations: Annotations, style: Style) -> Image.Image:
    from PIL import Image

    assert annotations.mask is not None
    mask = np.asarray(Image.fromarray(annotations.mask).resize(image.size, Image.Resampling.NEAREST))
    values, number = np.unique(mask, return_inverse=True)
    tints, shares = zip(*(_tint(value, annotations, style) for value in values.tolist()), strict=True)
    number = number.reshape(mask.shape)
    color, share = np.array(tints, dtype=np.float32)[number], np.array(shares, dtype=np.float32)[number]
    changes_down, changes_right = np.diff(mask, axis=0) != 0, np.diff(mask, axis=1) != 0
    edge = np.pad(changes_down, ((0, 1), (0, 0))) | np.pad(changes_right, ((0, 0), (0, 1)))
    share[edge & (share > 0)] = 0.9
    y, x = np.indices(mask.shape)
    color[(color == STRIPED).all(axis=2) & ((x + y) % 8 < 2)] = STRIPE
    pixels = np.asarray(image.convert("RGB"), dtype=np.float32)
    return Image.fromarray(np.rint(pixels + (color - pixels) * share[..., None]).astype(np.uint8))


def _tint(value: int, annotations: Annotations, style: Style) -> tuple[Color, float]:
    """The color and opacity (0..1) of a value of the mask."""
    if value == style.ignored:
        return STRIPED, 0.8
    if not style.by_object:
        return of_class(value), 0.5 if value else 0.4
    return (style.color(annotations, value - 1), 0.5) if 0 < value <= len(annotations) else (BACKGROUND, 0.0)


def _box(pen: Any, box: Sequence[int], color: Color) -> None:
    """Draw a box between two thin black or white boxes, so that it is visible on any image."""
    x1, y1, x2, y2 = box[0], box[1], max(box[0], box[2] - 1), max(box[1], box[3] - 1)
    for grow, tone, width in ((1, (*_contrast(color), 150), 1), (-2, (*_contrast(color), 110), 1), (0, color, 2)):
        corners = (x1 - grow, y1 - grow, x2 + grow, y2 + grow)
        if corners[0] <= corners[2] and corners[1] <= corners[3]:
            pen.rectangle(corners, outline=tone, width=width)


def _rectangle(pen: Any, corners: NDArray[Any], color: Color) -> None:
    """Draw the rectangle with ``corners`` [4, 2] on a wider black or white one."""
    places = [(x, y) for x, y in [*corners.tolist(), *corners[:2].tolist()]]
    for width, tone in ((4, (*_contrast(color), 150)), (2, color)):
        pen.line(places, fill=tone, width=width)


def _labels(
    pen: Any, size: tuple[int, int], boxes: Mapping[int, Sequence[int]], annotations: Annotations, style: Style
) -> None:
    """Write the class of each box at the first free place, if there is one. ``boxes``: corners by object number."""
    face, taken = font(TEXT), list[tuple[int, int, int, int]]()
    for number, (x1, y1, x2, y2) in boxes.items():
        label = int(annotations.labels[number])
        crowd = ", crowd" if annotations.crowd[number] else ""
        text = fitting(class_name(label, style.classes, str(label)) + crowd, face, min(120, size[0] - 4))
        width, height = round(face.getlength(text)) + 4, TEXT + 3
        if width * height > (x2 - x1) * (y2 - y1):  # the text is larger than the box
            continue
        left = max(0, min(x1, size[0] - width))
        places = [(left, y1 - height), (left, y1), (left, y2), (left, y2 - height), (max(0, x2 - width), y1)]
        for x, y in places:
            here = (x, y, x + width, y + height)
            is_free = not any(x < c and a < here[2] and y < d and b < here[3] for a, b, c, d in taken)
            if y >= 0 and here[3] <= size[1] and is_free:
                color = style.color(annotations, number)
                pen.rectangle((x, y, here[2] - 1, here[3] - 1), fill=color)
                pen.text((x + 2, y + height / 2), text, _contrast(color), face, anchor="lm")
                taken.append(here)
                break


def _points(pen: Any, points: NDArray[Any], color: Color, skeleton: Sequence[tuple[int, int]]) -> None:
    """Draw the lines and points of an object. A hidden point is a ring."""
    places = [(x, y) for x, y, _ in points.tolist()]
    visible = points[:, 2] > 0
    for width, tone in ((4, (*_contrast(color), 150)), (2, color)):
        for a, b in skeleton:
            if max(a, b) < len(places) and visible[a] and visible[b]:
                pen.line((*places[a], *places[b]), fill=tone, width=width)
    for k in np.flatnonzero(visible).tolist():
        x, y = places[k]
        dot = color_of(k)
        pen.ellipse((x - DOT - 1, y - DOT - 1, x + DOT + 1, y + DOT + 1), fill=_contrast(dot))
        pen.ellipse((x - DOT, y - DOT, x + DOT, y + DOT), fill=dot)
        if points[k, 2] == 1:  # hidden
            pen.ellipse((x - 1.5, y - 1.5, x + 1.5, y + 1.5), fill=_contrast(dot))


def _contrast(color: Color) -> Color:
    """Black or white: the one that is easier to see beside ``color``."""
    return (0, 0, 0) if 0.3 * color[0] + 0.59 * color[1] + 0.11 * color[2] > 110 else (255, 255, 255)
