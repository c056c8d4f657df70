"""Crops for segmentation and detection: random scale, letterbox, and the IoU crop of SSD.

torchvision's formulas are computed in float32, so that the same uniforms give the same integers as in torchvision.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from gpuaug import checks
from gpuaug.augment.crop import (
    LARGEST_MULTIPLE,
    LARGEST_SIDE,
    Crop,
    Float64,
    Known,
    Reads,
    color,
    integers,
    largest_of,
    pair,
    resized_sides,
    stack_rows,
)
from gpuaug.batch import CropWindows, Int64, Interpolation
from gpuaug.errors import ConfigError
from gpuaug.random.keyed import Float, pick, scale
from gpuaug.targets.geometry import both

LARGEST_SCALE = 100.0  # maximum of `scale`, `zoom_out` and `sampler_options`; more is surely a mistake
_INT32_MAX = int(np.iinfo(np.int32).max)


def missing(crop: Crop, target: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"`augment.crop` ({type(crop).__name__}) needs the {target} of the images. Found: a run without {target}. "
        f"{remedy}"
    )


# --- random scale


class RandomScaleCrop(Crop):
    """Resizes the image by a random factor, keeps its aspect ratio, and crops it at a random position.

    A side that is smaller than ``size`` is padded with ``fill`` at the right or at the bottom. Three recipes:

    - torchvision's segmentation references: ``RandomScaleCrop(480, base=520)``. The shorter side is a random whole
      number from ``int(scale[0] * base)`` to ``int(scale[1] * base)``; the longer side is rounded down.
    - mmsegmentation: ``RandomScaleCrop(512, base=(2048, 512), cat_max_ratio=0.75)``. The limits of the longer and the
      shorter side are ``base`` times one random factor, rounded down. The image gets the largest size within the
      limits; its sides are rounded to nearest.
    - large scale jitter (arXiv:2012.07177; torchvision's ``ScaleJitter`` and ``FixedSizeCrop``):
      ``RandomScaleCrop(1024, scale=(0.1, 2.0), base=None, anchor="diagonal")``. The image is fitted into ``size`` and
      multiplied by a random factor; its sides are rounded down.

    Args:
        size: output (H, W); an int is a square.
        scale: smallest and largest random factor, 0 < min <= max <= 100. The factor is uniform.
        base: size at a factor of 1. An int: the shorter side. Two ints: limits of the longer and the shorter side.
            None: the largest size that fits into ``size``.
        fill: value of the added pixels, 0..255, as of :class:`~gpuaug.RandomCrop`.
        anchor: position of the crop in a resized image that is larger than ``size``. ``random``: top and left are drawn
            independently. ``diagonal``: one fraction is drawn for both, as in ``FixedSizeCrop``.
        cat_max_ratio: mmsegmentation's rule, 0 < cat_max_ratio <= 1. If a class covers at least this share of the
            crop's pixels, or if the crop has only one class, another position is drawn, up to 10 times. 1 switches the
            rule off; the crop then needs no masks.
        ignore: the label of the pixels that do not count for ``cat_max_ratio``.
        interpolation: ``bilinear`` or ``bicubic``; ``nearest`` only for batches of tensors, not in a loader.

    >>> RandomScaleCrop(480, base=520).size
    (480, 480)
    """

    REDRAWS = 10  # as in mmsegmentation, which takes the last position without a check

    def __init__(
        self,
        size: int | Sequence[int],
        *,
        scale: Sequence[float] = (0.5, 2.0),
        base: int | Sequence[int] | None = 520,
        fill: int | Sequence[int] = 0,
        anchor: str = "random",
        cat_max_ratio: float = 1.0,
        ignore: int = 255,
        interpolation: Interpolation = "bilinear",
    ) -> None:
        self.size = pair("size", size)
        self.scale = checks.pair("scale", scale, None, LARGEST_SCALE)
        self.base = _base(base, self.scale)
        self.fill = color(fill)
        self.anchor = checks.one_of("anchor", anchor, ("random", "diagonal"))
        self.cat_max_ratio = float(checks.number("cat_max_ratio", cat_max_ratio, 0, 1))
        if not self.cat_max_ratio:
            raise ConfigError("`cat_max_ratio` must be above 0. Found: 0. Use 1 to switch the rule off.")
        self.ignore = checks.whole_number("ignore", ignore, None)
        self.interpolation = checks.one_of("interpolation", interpolation, get_args(Interpolation))

    @property
    def count(self) -> int:  # type: ignore[override]
        """Number of uniforms: one for the factor, then two for each position."""
        return 3 + 2 * self.REDRAWS * (self.cat_max_ratio < 1)

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """``masks`` if ``cat_max_ratio`` is below 1."""
        return frozenset({"masks"} if self.cat_max_ratio < 1 else ())

    def _windows(self, u: Float64, heights: Int64, widths: Int64, known: Known, reads: Reads) -> CropWindows:
        sides = self._sides(u[:, 0], heights, widths)  # [B, 2]
        free = np.maximum(sides - self.size, 0)
        corner = self._corner(u[:, 1:3], free)
        if self.cat_max_ratio < 1:
            if (masks := reads.masks) is None:
                raise missing(self, "masks", "Use a source with masks, or `cat_max_ratio: 1`.")
            again = np.stack([self._corner(p, free) for p in np.split(u[:, 3:], self.REDRAWS, axis=1)], axis=1)
            for row in np.flatnonzero(known & free.any(axis=1)).tolist():
                if (mask := masks[row]) is not None:
                    corner[row] = self._mixed(mask, sides[row].tolist(), [corner[row], *again[row]])
        whole = stack_rows(len(corner), 0, 0, heights, widths)
        offset = (-corner).astype(np.int32)
        return CropWindows(whole, sides.astype(np.int32), offset, self.size, self.interpolation, self.fill)

    def _sides(self, u: Float64, heights: Int64, widths: Int64) -> Int64:
        """Height and width after resizing, int64 [B, 2]."""
        low, high = self.scale
        if isinstance(self.base, int):
            first, last = int(low * self.base), int(high * self.base)
            h, w = resized_sides(first + integers(u, np.full_like(heights, last - first)), heights, widths)
        elif self.base is None:
            fit = np.minimum(self.size[0] / heights, self.size[1] / widths).astype(np.float32)
            factor = fit * scale(u.astype(np.float32), low, high)
            h, w = (n.astype(np.float32) * factor for n in (heights, widths))
        else:
            longer, shorter = (np.floor(side * (u * (high - low) + low)) for side in self.base)
            factor = np.minimum(longer / np.maximum(heights, widths), shorter / np.minimum(heights, widths))
            h, w = heights * factor + 0.5, widths * factor + 0.5
        return np.clip(np.stack([h, w], axis=1), 1, _INT32_MAX).astype(np.int64)

    def _corner(self, u: Float64, free: Int64) -> Int64:
        """Top and left of the crop in the resized image, int64 [B, 2]."""
        if self.anchor == "random":
            return integers(u, free)
        return (free.astype(np.float32) * u[:, :1].astype(np.float32)).astype(np.int64)  # like FixedSizeCrop

    def _mixed(self, mask: NDArray[Any], sides: list[int], corners: list[Int64]) -> Int64:
        """The first corner whose crop satisfies ``cat_max_ratio``; if there is none, the last."""
        for corner in corners[:-1]:
            rows, columns = (
                ((2 * np.arange(first, min(first + extent, side)) + 1) * given) // (2 * side)  # the nearest pixel
                for first, extent, side, given in zip(corner.tolist(), self.size, sides, mask.shape, strict=True)
            )
            part = mask[rows[0] : rows[-1] + 1].take(columns, axis=1).take(rows - rows[0], axis=0)
            labels, counts = _labels(part)
            counts = counts[labels != self.ignore]
            if len(counts) > 1 and counts.max() / counts.sum() < self.cat_max_ratio:
                return corner
        return corners[-1]


def _labels(part: NDArray[Any]) -> tuple[NDArray[Any], Int64]:
    """The labels that occur in a part of a mask, and the number of pixels of each label."""
    flat = part.reshape(-1)
    # starts of the runs of equal labels: counting runs is faster than counting pixels
    start = np.concatenate([[0], np.flatnonzero(flat[1:] != flat[:-1]) + 1])
    labels, which = np.unique(flat[start], return_inverse=True)
    return labels, np.bincount(which, weights=np.diff(start, append=len(flat))).astype(np.int64)


def _base(value: Any, scales: tuple[float, float]) -> int | tuple[int, int] | None:
    several = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    sides = [] if value is None else list(value) if several else [value]
    whole = all(isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= LARGEST_SIDE for n in sides)
    if not whole or (several and len(sides) != 2):
        raise ConfigError(
            f"`base` must be the shorter side, or [longer side, shorter side], or null. Sides: 1 to {LARGEST_SIDE}. "
            f"Found: {value!r}."
        )
    if sides and not (scales[0] * min(sides) >= 1 and scales[1] * max(sides) <= LARGEST_SIDE):
        raise ConfigError(
            f"`base` times `scale` must be from 1 to {LARGEST_SIDE} pixels. Found: base {value!r}, scale {scales}."
        )
    return (max(sides), min(sides)) if several else value


# --- letterbox


class Letterbox(Crop):
    """Fits the whole image into ``size``, keeps its aspect ratio and pads the rest, as YOLO does.

    The image is resized by ``r = min(H / h, W / w)``. Its sides are rounded half to even. If an odd number of rows is
    added to a centred image, the extra row is at the bottom. An extra column is at the right.

    With ``shorter``, ``r = min(shorter / min(h, w), H / h, W / w)``, and both sides are rounded down. This equals the
    resizing inside torchvision's detectors.

    Args:
        size: output (H, W); an int is a square.
        fill: value of the added pixels, 0..255, as of :class:`~gpuaug.RandomCrop`.
        centre: True: the image lies in the middle of the output. False: the image lies at the top left.
        upscale: whether an image that is smaller than ``size`` is enlarged.
        shorter: length of the shorter side after resizing; less if ``size`` requires it. A list: one of its values is
            drawn for each sample. None: the image is made as large as ``size`` allows.
        pad: ``size``: the output has the sides ``size``. ``batch``: it has the largest height and the largest width of
            the batch's resized images, as in DETR and torchvision's detectors. Then ``centre`` must be False, and an
            image that ``RandomHorizontalFlip`` or ``RandomVerticalFlip`` flips still lies at the top left. All other
            operations see the padding. So those that look at more than one pixel, such as contrast or an affine
            transform, make a sample depend on its batch.
        multiple: with ``pad="batch"``, both sides of the output are rounded up to a multiple of this; otherwise 1.
        interpolation: ``bilinear`` or ``bicubic``; ``nearest`` only for batches of tensors, not in a loader.

    >>> Letterbox(640)
    Letterbox((640, 640), fill=114, centre=True, upscale=True, shorter=None, pad='size', multiple=1, \
interpolation='bilinear')
    """

    def __init__(
        self,
        size: int | Sequence[int],
        *,
        fill: int | Sequence[int] = 114,
        centre: bool = True,
        upscale: bool = True,
        shorter: int | Sequence[int] | None = None,
        pad: str = "size",
        multiple: int = 1,
        interpolation: Interpolation = "bilinear",
    ) -> None:
        self.size = pair("size", size)
        self.fill = color(fill)
        self.centre = checks.flag("centre", centre)
        self.upscale = checks.flag("upscale", upscale)
        self.shorter = _shorter(shorter)
        self.pad = checks.one_of("pad", pad, ("size", "batch"))
        self.multiple = checks.whole_number("multiple", multiple, 1, LARGEST_MULTIPLE)
        if (pad, centre) == ("batch", True):
            raise ConfigError("`centre` must be False with `pad='batch'`. Found: True.")
        if pad == "size" and multiple > 1:
            raise ConfigError(f"`multiple` must be 1 without `pad='batch'`. Found: {multiple}. Round `size` instead.")
        self.interpolation = checks.one_of("interpolation", interpolation, get_args(Interpolation))

    @property
    def count(self) -> int:  # type: ignore[override]
        """Number of uniforms: one if ``shorter`` is a list, else 0."""
        return int(isinstance(self.shorter, tuple))

    def _windows(self, u: Float64, heights: Int64, widths: Int64, known: Known, reads: Reads) -> CropWindows:
        given = np.stack([heights, widths], axis=1)
        factor = (np.array(self.size) / given).min(axis=1, keepdims=True)
        if self.shorter is not None:
            values = np.atleast_1d(self.shorter)
            drawn = values[integers(u, np.array(len(values) - 1))] if self.count else values
            factor = np.minimum(factor, drawn / given.min(axis=1, keepdims=True))
        factor = factor if self.upscale else np.minimum(factor, 1.0)
        sides = given * factor
        sides = np.maximum(np.rint(sides) if self.shorter is None else np.floor(sides), 1).astype(np.int32)
        offset = (np.array(self.size, dtype=np.int32) - sides) // 2 if self.centre else np.zeros_like(sides)
        whole, size = stack_rows(len(sides), 0, 0, heights, widths), self.size
        if self.pad == "batch":
            size = largest_of(sides[known], self.multiple)
        return CropWindows(whole, sides, offset, size, self.interpolation, self.fill)


class RandomSizeCrop(Crop):
    """Crops a part of random sides in half of the images and resizes it, as DETR does (arXiv:2005.12872).

    Equals the authors' ``RandomSelect`` of ``RandomResize(shorter)`` and of ``RandomResize(before)``,
    ``RandomSizeCrop(sides)`` and ``RandomResize(shorter)``. Here the part is cut from the image itself, with sides
    rounded to whole pixels, and resized once. The output has the largest height and width of the batch's images, as
    with ``Letterbox(pad="batch")``, which see.

    Args:
        size: largest length of the longer side after resizing.
        shorter: lengths of the shorter side after resizing, of which one is drawn; less if ``size`` requires it.
        before: lengths of the shorter side before the crop, of which one is drawn.
        sides: smallest and largest side of the crop, after resizing to ``before``. Both sides are drawn.
        p: probability of the crop.
        fill: value of the added pixels, 0..255, as of :class:`~gpuaug.RandomCrop`.
        multiple: both sides of the output are rounded up to a multiple of this.
        interpolation: ``bilinear`` or ``bicubic``; ``nearest`` only for batches of tensors, not in a loader.

    >>> RandomSizeCrop(1333, shorter=[480, 800]).pad
    'batch'
    """

    count = 7  # p, before, height, width, top, left, shorter
    pad = "batch"

    def __init__(
        self,
        size: int,
        *,
        shorter: int | Sequence[int] = (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800),
        before: int | Sequence[int] = (400, 500, 600),
        sides: Sequence[int] = (384, 600),
        p: float = 0.5,
        fill: int | Sequence[int] = 0,
        multiple: int = 1,
        interpolation: Interpolation = "bilinear",
    ) -> None:
        self.size = pair("size", checks.whole_number("size", size, 1, LARGEST_SIDE))
        self.shorter = _lengths("shorter", shorter)
        self.before = _lengths("before", before)
        self.sides = pair("sides", sides)
        if self.sides[0] > self.sides[1]:
            raise ConfigError(f"`sides` must be (smallest, largest). Found: {self.sides}.")
        self.p = float(checks.number("p", p, 0, 1))
        self.fill = color(fill)
        self.multiple = checks.whole_number("multiple", multiple, 1, LARGEST_MULTIPLE)
        self.interpolation = checks.one_of("interpolation", interpolation, get_args(Interpolation))

    def _windows(self, u: Float64, heights: Int64, widths: Int64, known: Known, reads: Reads) -> CropWindows:
        given = np.stack([heights, widths], axis=1)
        resized = _detr_sides(_chosen(self.before, u[:, 1]), given, None)
        low, high = self.sides
        least = np.minimum(resized, low)
        part = least + integers(u[:, 2:4], np.minimum(resized, high) - least)
        start = integers(u[:, 4:6], resized - part)
        first = np.minimum(np.rint(start * given / resized).astype(np.int64), given - 1)
        cut = np.clip(np.rint(part * given / resized).astype(np.int64), 1, given - first)
        crops = (u[:, :1] < self.p) & known[:, None]
        first, cut, part = np.where(crops, first, 0), np.where(crops, cut, given), np.where(crops, part, given)
        sides = _detr_sides(_chosen(self.shorter, u[:, 6]), part, self.size)
        window, none = np.concatenate([first, cut], axis=1).astype(np.int32), np.zeros_like(sides)
        return CropWindows(window, sides, none, largest_of(sides[known], self.multiple), self.interpolation, self.fill)


def _chosen(lengths: tuple[int, ...], u: Float64) -> Int64:
    return np.array(lengths)[integers(u, np.array(len(lengths) - 1))]


def _detr_sides(shorter: Int64, given: Int64, size: tuple[int, int] | None) -> Any:
    """The sides of images after DETR's ``resize``, int32 [B, 2]. ``given``: before, [B, 2]."""
    short, long = given.min(axis=1), given.max(axis=1)
    if size is not None:
        most = np.where(given[:, 0] > given[:, 1], size[0], size[1])
        shorter = np.where(long / short * shorter > most, np.maximum(np.rint(most * short / long), 1), shorter)
    longer = np.minimum((shorter * long / short).astype(np.int64), _INT32_MAX)
    tall = (given[:, 0] > given[:, 1])[:, None]
    sides = np.stack([shorter, longer], axis=1)
    return np.where(tall, sides[:, ::-1], sides).astype(np.int32)


def _lengths(name: str, value: Any) -> tuple[int, ...]:
    found = _shorter(value, name)
    if found is None:
        raise ConfigError(f"`{name}` must be a whole number or a list of them. Found: None.")
    return found if isinstance(found, tuple) else (found,)


def _shorter(value: Any, name: str = "shorter") -> int | tuple[int, ...] | None:
    several = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    sides: list[Any] = list(value) if several else [1 if value is None else value]
    if not 1 <= len(sides) <= 1000 or any(type(n) is not int or not 1 <= n <= LARGEST_SIDE for n in sides):
        raise ConfigError(
            f"`{name}` must be a whole number from 1 to {LARGEST_SIDE}, a list of them, or null. Found: {value!r:.99}."
        )
    return tuple(sides) if several else value


# --- IoU crop


class RandomIoUCrop(Crop):
    """Zooms out, crops a part that overlaps an object, and resizes the crop, as SSD does (arXiv:1512.02325).

    Equals torchvision's ``RandomZoomOut``, ``RandomIoUCrop`` and ``Resize(size)``, applied in this order. Zooming out
    places the image on a larger canvas with a border of value ``fill``. Without zooming out, the canvas is the image.
    Objects whose centre is outside the crop are removed.

    torchvision repeats until it finds a crop. In gpuaug, a sample has at most 16 rounds of ``trials`` crops. If no crop
    fits (0.03 % of images), the image is not cropped. An image without boxes is not cropped either.

    If the crop contains a part of the border, the edges of the image in the output are rounded to whole pixels. These
    edges differ from torchvision's by at most one pixel.

    Args:
        size: output (H, W); an int is a square.
        min_scale: minimum of crop side / canvas side, for height and width, 0 < min_scale <= max_scale.
        max_scale: maximum of crop side / canvas side, for height and width, at most 1.
        min_aspect_ratio: smallest width / height of the crop in pixels.
        max_aspect_ratio: largest width / height of the crop in pixels.
        sampler_options: list of minimum IoUs. Each round draws one. At least one object's IoU with the crop must
            reach this minimum. If 1 or more is drawn, the image is not cropped. None: 0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.
        trials: number of crops per round, 1..1000.
        zoom_out: range of canvas side / image side, 1 <= min <= max <= 100. None: no zooming out.
        zoom_p: probability of zooming out.
        fill: value of the border, 0..255, as of :class:`~gpuaug.RandomCrop`.
        p: probability of the IoU crop.
        interpolation: ``bilinear`` or ``bicubic``; ``nearest`` only for batches of tensors, not in a loader.

    >>> RandomIoUCrop(300, fill=118).needs
    frozenset({'boxes'})
    """

    ROUNDS = 16
    needs = frozenset({"boxes"})
    centres = True  # objects whose centre is outside the window are removed

    def __init__(
        self,
        size: int | Sequence[int],
        *,
        min_scale: float = 0.3,
        max_scale: float = 1.0,
        min_aspect_ratio: float = 0.5,
        max_aspect_ratio: float = 2.0,
        sampler_options: Sequence[float] | None = None,
        trials: int = 40,
        zoom_out: Sequence[float] | None = (1.0, 4.0),
        zoom_p: float = 0.5,
        fill: int | Sequence[int] = 0,
        p: float = 1.0,
        interpolation: Interpolation = "bilinear",
    ) -> None:
        self.size = pair("size", size)
        scales, ratios = (min_scale, max_scale), (min_aspect_ratio, max_aspect_ratio)
        self.min_scale, self.max_scale = checks.pair("min_scale` and `max_scale", scales, None, 1)
        self.min_aspect_ratio, self.max_aspect_ratio = checks.pair(
            "min_aspect_ratio` and `max_aspect_ratio", ratios, None
        )
        self.sampler_options = _options(sampler_options)
        self.trials = checks.whole_number("trials", trials, 1, 1000)
        self.zoom_out = None if zoom_out is None else checks.pair("zoom_out", zoom_out, None, LARGEST_SCALE)
        if self.zoom_out is not None and self.zoom_out[0] < 1:
            raise ConfigError(f"`zoom_out` must be at least 1, because it enlarges the canvas. Found: {zoom_out!r}.")
        self.zoom_p = float(checks.number("zoom_p", zoom_p, 0, 1))
        self.fill = color(fill)
        self.p = float(checks.number("p", p, 0, 1))
        self.interpolation = checks.one_of("interpolation", interpolation, get_args(Interpolation))

    def plain(self) -> RandomIoUCrop:
        """The same crop without zooming out and cropping: it resizes the image."""
        made = copy.copy(self)
        made.zoom_p = made.p = 0.0
        return made

    @property
    def count(self) -> int:  # type: ignore[override]
        """Number of uniforms: crop or not, zoom or not, zoom factor, column, row, option, and four per trial."""
        return 6 + 4 * self.trials

    def _windows(self, u: Float64, heights: Int64, widths: Int64, known: Known, reads: Reads) -> CropWindows:
        objects, redraw = reads.objects, reads.redraw
        if objects is None:
            raise missing(self, "boxes", "Use a source with boxes, or gpuaug.Resize.")
        draws, sizes = u.astype(np.float32), np.stack([heights, widths], axis=1)
        corner, canvas = self._zoomed(draws, sizes)
        crop = np.concatenate([np.zeros_like(canvas), canvas], axis=1)
        order = np.argsort(objects.sample, kind="stable")
        sample = np.asarray(objects.sample)[order]
        boxes = np.asarray(objects.boxes, dtype=np.float64)[order] + np.tile(corner[sample, ::-1], 2)
        first = np.searchsorted(sample, np.arange(len(crop) + 1))
        waiting = np.flatnonzero(known & (np.diff(first) > 0) & (draws[:, 0] < np.float32(self.p)))
        for n in range(1 if redraw is None else self.ROUNDS):
            if not len(waiting):
                break
            own = draws[waiting] if redraw is None or not n else redraw(n, waiting)
            done, found = self._rounds(own[:, 5:], canvas[waiting], boxes, first[waiting], first[waiting + 1])
            crop[waiting[done]] = found[done]
            waiting = waiting[~done]
        return self._placed(crop, corner, sizes)

    def _zoomed(self, u: Float, sizes: Int64) -> tuple[Int64, Int64]:
        """The image's position (top, left) on the canvas, and the canvas's (height, width): int64 [B, 2] each."""
        if self.zoom_out is None:
            return np.zeros_like(sizes), sizes
        factor = scale(u[:, 2:3], *self.zoom_out)
        canvas = (sizes.astype(np.float32) * factor).astype(np.int64)
        corner = ((canvas - sizes).astype(np.float32) * u[:, [4, 3]]).astype(np.int64)
        zoomed = u[:, 1:2] < np.float32(self.zoom_p)
        return np.where(zoomed, corner, 0), np.where(zoomed, canvas, sizes)

    def _rounds(
        self, u: Float, canvas: Int64, boxes: Float64, first: Int64, last: Int64
    ) -> tuple[NDArray[np.bool_], Int64]:
        """Call :meth:`_round` for a few rows at a time, to limit memory. Row i has the boxes ``first[i]:last[i]``."""
        counts = last - first
        group = np.cumsum(counts) * self.trials // 2**18  # about 2 MB per matrix [boxes, trials]
        edges = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(counts)]
        made = []
        for part in itertools.starmap(slice, itertools.pairwise(edges)):
            n = counts[part]
            own = np.arange(n.sum()) + np.repeat(first[part] - (np.cumsum(n) - n), n)
            made.append(self._round(u[part], canvas[part], boxes[own], n))
        done, crops = zip(*made, strict=True)
        return np.concatenate(done), np.concatenate(crops)

    def _round(self, u: Float, canvas: Int64, boxes: Float64, counts: Int64) -> tuple[NDArray[np.bool_], Int64]:
        """Run one round. Return which rows are done, bool [n], and crops (top, left, height, width), int64 [n, 4].

        ``u`` is float32 [n, 1 + 4 * trials]. ``boxes`` [m, 4] are on the canvas. Each row has ``counts >= 1`` boxes.
        """
        options = np.array(self.sampler_options)
        least = options[pick(u[:, 0], len(options))]
        trial = u[:, 1:].reshape(len(u), self.trials, 4)  # width, height, left, top
        shape = np.tile(canvas[:, None, ::-1], (1, self.trials, 1))  # width, height
        span = np.float32(self.max_scale - self.min_scale)
        extent = (shape.astype(np.float32) * (np.float32(self.min_scale) + span * trial[..., :2])).astype(np.int64)
        start = ((shape - extent).astype(np.float32) * trial[..., 2:]).astype(np.int64)
        ratio = extent[..., 0] / np.maximum(extent[..., 1], 1)
        fits = (extent > 0).all(axis=2) & (self.min_aspect_ratio <= ratio) & (ratio <= self.max_aspect_ratio)
        iou = _overlaps(boxes, np.repeat(start, counts, axis=0), np.repeat(start + extent, counts, axis=0))
        best = np.maximum.reduceat(iou, np.cumsum(counts) - counts, axis=0)  # [n, trials]
        good = fits & (best >= least[:, None])
        at = np.arange(len(u)), good.argmax(axis=1)
        crop = np.concatenate([start[at][:, ::-1], extent[at][:, ::-1]], axis=1)
        whole = least >= 1
        crop[whole] = np.concatenate([np.zeros_like(canvas), canvas], axis=1)[whole]
        return whole | good.any(axis=1), crop

    def _placed(self, crop: Int64, corner: Int64, sizes: Int64) -> CropWindows:
        """Turn canvas crops (top, left, height, width) into windows. ``corner``: the image's place on the canvas."""
        origin, extent, size = crop[:, :2] - corner, crop[:, 2:], np.array(self.size)
        start = np.clip(origin, 0, sizes - 1)
        stop = np.clip(origin + extent, start + 1, sizes)
        low, high = (np.rint((edge - origin) * size / extent).astype(np.int64) for edge in (start, stop))
        low = np.minimum(low, size - 1)
        missed = ((origin >= sizes) | (origin + extent <= 0)).any(axis=1, keepdims=True)
        low = np.where(missed, size, low)  # no pixel of the image is in the crop
        window, resized = np.concatenate([start, stop - start], axis=1), np.maximum(high - low, 1)
        made = (window.astype(np.int32), resized.astype(np.int32), low.astype(np.int32))
        return CropWindows(*made, self.size, self.interpolation, self.fill)


def _overlaps(boxes: Float64, start: Int64, stop: Int64) -> Float64:
    """IoU of boxes [m, 4] with crops [m, trials, 2]: float64 [m, trials]; -1 if the box's centre is outside."""
    low, high = boxes[:, None, :2], boxes[:, None, 2:]
    first, last = start.astype(np.float64), stop.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):  # annotations may hold NaN or infinity
        centre = 0.5 * (low + high)
        inside = both((first < centre) & (centre < last))
        common = np.maximum(np.minimum(high, last) - np.maximum(low, first), 0)
        shared, box, crop = (sides[..., 0] * sides[..., 1] for sides in (common, high - low, last - first))
        union = box + crop - shared
        iou = shared / np.where(union > 0, union, 1.0)
    return np.where(inside, np.nan_to_num(iou, nan=0.0), -1.0)


def _options(value: Any) -> tuple[float, ...]:
    if value is None:
        return (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
    several = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    if not several or not 1 <= len(value) <= 1000:
        raise ConfigError(f"`sampler_options` must be a list of minimum IoUs, or null. Found: {value!r:.200}.")
    return tuple(float(checks.number("sampler_options", v, 0, LARGEST_SCALE)) for v in value)


TARGET_CROPS = (RandomScaleCrop, Letterbox, RandomSizeCrop, RandomIoUCrop)
