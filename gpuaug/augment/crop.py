"""Crops: uniform values and image shapes to boxes; which part of an image is read, at what size, and where it lands.

takes: uniforms float32 [B, count] (None where a crop draws nothing), EXIF-oriented heights and widths int64 [B]
(0 for a sample that cannot be decoded: its row is then any valid one).
does: torchvision's algorithms, for the whole batch at once.
gives: :class:`Boxes`, numpy, from which `decode` makes a uint8 view [B, H, W, 3].

Every crop is one rule: ``canvas[y:y+h, x:x+w] = resize(image[top:top+height, left:left+width], (h, w))``, clipped to
the canvas; what the resized box does not cover is `fill`. Crop first, then resize: no pixel outside the box is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from gpuaug.batch import Boxes, Int32, Int64, Interpolation
from gpuaug.errors import ConfigError
from gpuaug.random.keyed import Float

LARGEST_SIDE = 500_000  # pixels: panoramas and scans fit, and what is larger is a mistake
LARGEST_VIEW = 178_000_000  # pixels of a view; `decode.max_pixels` allows an image as many
_TRIES = 10  # of RandomResizedCrop, before the central fallback; torchvision's number


class RandomResizedCrop:
    """A random part of the image, of random area and aspect ratio, resized: torchvision's ``RandomResizedCrop``.

    Ten tries from the draws; where none fits, the central crop whose ratio is clamped to `ratio`.

    Args:
        size: output (H, W); an int is a square.
        scale: lower and upper bound of the part's area as a fraction of the image's, 0 < min <= max <= 1.
        ratio: lower and upper bound of width / height, drawn log-uniformly, 0 < min <= max.
        interpolation: ``bilinear`` or ``bicubic``.
    """

    count = 2 + 2 * _TRIES  # row and column first, then (area, ratio) of every try: each stays where it is

    def __init__(
        self,
        size: int | Sequence[int],
        *,
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        interpolation: Interpolation = "bilinear",
    ) -> None:
        self.size = _pair("size", size)
        self.scale = _range("scale", scale, high=1.0)
        self.ratio = _range("ratio", ratio, high=math.inf)
        self.interpolation = _interpolation(interpolation)

    def __repr__(self) -> str:
        return (
            f"RandomResizedCrop({self.size}, scale={self.scale}, ratio={self.ratio}, "
            f"interpolation={self.interpolation!r})"
        )

    def boxes(self, u: Float | None, heights: Int64, widths: Int64) -> Boxes:
        """Boxes from ``u`` float32 [B, 22] in [0, 1), ``heights`` and ``widths`` int64 [B]."""
        u, heights, widths = _checked(self, u, heights, widths)
        values = u.astype(np.float64)
        area, log_ratio = values[:, 2::2], values[:, 3::2]  # [B, 10]
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        target = (heights * widths)[:, None] * (self.scale[0] + area * (self.scale[1] - self.scale[0]))
        ratio = np.exp(low + log_ratio * (high - low))
        w = np.rint(np.sqrt(target * ratio)).astype(np.int64)  # rint rounds half to even, as Python's round
        h = np.rint(np.sqrt(target / ratio)).astype(np.int64)
        fits = (w > 0) & (w <= widths[:, None]) & (h > 0) & (h <= heights[:, None])
        found = fits.any(axis=1)
        first = fits.argmax(axis=1)
        rows = np.arange(len(u))
        central_h, central_w = self._central(heights, widths)
        height = np.where(found, h[rows, first], central_h)
        width = np.where(found, w[rows, first], central_w)
        top = np.where(found, _integers(values[:, 0], heights - height), (heights - height) // 2)
        left = np.where(found, _integers(values[:, 1], widths - width), (widths - width) // 2)
        box = np.stack([top, left, height, width], axis=1).astype(np.int32)
        return _filled(box, self.size, self.interpolation)

    def _central(self, heights: Int64, widths: Int64) -> tuple[Int64, Int64]:
        """Height and width of the fallback: the whole image, cut to the nearest allowed ratio."""
        in_ratio = widths / np.maximum(heights, 1)
        low, high = self.ratio
        tall, wide = in_ratio < low, in_ratio > high
        h = np.where(tall, np.rint(widths / low), heights).astype(np.int64)
        w = np.where(wide, np.rint(heights * high), widths).astype(np.int64)
        # An image one pixel high or wide can round to nothing; torchvision then fails, here one pixel is kept.
        return np.clip(h, 1, heights), np.clip(w, 1, widths)


class RandomCrop:
    """A part of fixed size at a random place, after padding; nothing is resized: torchvision's ``RandomCrop``.

    Args:
        size: (H, W) of the part; an int is a square.
        padding: pixels added around the image before cropping: one value, (left and right, top and bottom), or
            (left, top, right, bottom).
        fill: 0..255, value of the added pixels.

    Raises:
        ConfigError: from :meth:`boxes`, where a padded image is smaller than `size`.
    """

    count = 2

    def __init__(self, size: int | Sequence[int], *, padding: int | Sequence[int] = 0, fill: int = 0) -> None:
        self.size = _pair("size", size)
        self.padding = _padding(padding)
        self.fill = _fill(fill)

    def __repr__(self) -> str:
        return f"RandomCrop({self.size}, padding={self.padding}, fill={self.fill})"

    def boxes(self, u: Float | None, heights: Int64, widths: Int64) -> Boxes:
        """Boxes from ``u`` float32 [B, 2] in [0, 1), ``heights`` and ``widths`` int64 [B]."""
        known = np.asarray(heights) > 0
        u, heights, widths = _checked(self, u, heights, widths)
        left, top, right, bottom = self.padding
        free_h = heights + top + bottom - self.size[0]
        free_w = widths + left + right - self.size[1]
        small = known & ((free_h < 0) | (free_w < 0))
        if small.any():
            worst = int(small.argmax())
            raise ConfigError(
                f"RandomCrop's `size` must not exceed the padded image. Found: size {self.size}, an image of "
                f"{int(heights[worst])}x{int(widths[worst])} with padding {self.padding} (left, top, right, bottom). "
                "Use a larger `padding`, a smaller `size`, or RandomResizedCrop, which fits every image."
            )
        values = u.astype(np.float64)
        row, column = _integers(values[:, 0], np.maximum(free_h, 0)), _integers(values[:, 1], np.maximum(free_w, 0))
        origin = np.stack([row - top, column - left], axis=1)
        return _window(origin, heights, widths, self.size, self.fill)


class ResizeCenterCrop:
    """The shorter side resized, then the centre: torchvision's ``Resize(resize)`` and ``CenterCrop(size)``.

    Args:
        resize: the shorter side after resizing (the longer one follows, rounded down); (h, w) resizes to exactly that.
        size: output (H, W); an int is a square. What the resized image does not cover is black.
        interpolation: ``bilinear`` or ``bicubic``.
    """

    count = 0

    def __init__(
        self,
        resize: int | Sequence[int],
        size: int | Sequence[int],
        *,
        interpolation: Interpolation = "bilinear",
    ) -> None:
        self.resize = _shorter_side("resize", resize)
        self.size = _pair("size", size)
        self.interpolation = _interpolation(interpolation)

    def __repr__(self) -> str:
        return f"ResizeCenterCrop({self.resize}, {self.size}, interpolation={self.interpolation!r})"

    def boxes(self, u: Float | None, heights: Int64, widths: Int64) -> Boxes:
        """Boxes from ``heights`` and ``widths`` int64 [B]; ``u`` is not used."""
        _, heights, widths = _checked(self, u, heights, widths)
        h, w = _resized(self.resize, heights, widths)
        H, W = self.size
        # CenterCrop pads a smaller image by (H - h) // 2 before it and crops a larger one from int(round((h - H) / 2)),
        # rounding half to even.
        y = np.where(h < H, (H - h) // 2, -np.rint((h - H) / 2.0).astype(np.int64))
        x = np.where(w < W, (W - w) // 2, -np.rint((w - W) / 2.0).astype(np.int64))
        zero = np.zeros_like(heights)
        return Boxes(
            box=np.stack([zero, zero, heights, widths], axis=1).astype(np.int32),
            resized=np.stack([h, w], axis=1).astype(np.int32),
            offset=np.stack([y, x], axis=1).astype(np.int32),
            size=self.size,
            interpolation=self.interpolation,
        )


class Resize:
    """The whole image resized: torchvision's ``Resize``.

    Args:
        size: an int is the shorter side (the longer one follows, rounded down), and all images of a batch must then
            come out equally large; (H, W) is exact.
        interpolation: ``bilinear`` or ``bicubic``.

    Raises:
        ConfigError: from :meth:`boxes`, where an int gives images of different sizes.
    """

    count = 0

    def __init__(self, size: int | Sequence[int], *, interpolation: Interpolation = "bilinear") -> None:
        self.size = _shorter_side("size", size)
        self.interpolation = _interpolation(interpolation)

    def __repr__(self) -> str:
        return f"Resize({self.size}, interpolation={self.interpolation!r})"

    def boxes(self, u: Float | None, heights: Int64, widths: Int64) -> Boxes:
        """Boxes from ``heights`` and ``widths`` int64 [B]; ``u`` is not used."""
        known = np.asarray(heights) > 0
        _, heights, widths = _checked(self, u, heights, widths)
        h, w = _resized(self.size, heights, widths)
        sizes = np.unique(np.stack([h, w], axis=1)[known], axis=0)
        if len(sizes) > 1:
            found = ", ".join(f"{a}x{b}" for a, b in sizes[:3].tolist())
            raise ConfigError(
                f"Resize's `size` as an int keeps aspect ratios, and a batch needs one size. Found: {self.size} gives "
                f"{found}. Use (H, W), which is exact, or ResizeCenterCrop or RandomResizedCrop."
            )
        zero = np.zeros_like(heights)
        box = np.stack([zero, zero, heights, widths], axis=1).astype(np.int32)
        size = (int(sizes[0, 0]), int(sizes[0, 1])) if len(sizes) else _pair("size", self.size)
        return _filled(box, size, self.interpolation)


Crop = RandomResizedCrop | RandomCrop | ResizeCenterCrop | Resize


def _integers(u: NDArray[np.float64], last: Int64) -> Int64:
    """Integers 0..last, both included, from uniforms in [0, 1)."""
    return np.minimum((u * (last + 1)).astype(np.int64), last)


def _filled(box: Int32, size: tuple[int, int], interpolation: Interpolation) -> Boxes:
    """The box resized to the whole canvas."""
    resized = np.broadcast_to(np.array(size, dtype=np.int32), (len(box), 2))
    return Boxes(box, resized, np.zeros_like(resized), size, interpolation)


def _window(origin: Int64, heights: Int64, widths: Int64, size: tuple[int, int], fill: int) -> Boxes:
    """The window of `size` whose corner is at `origin` [B, 2] of the image, unscaled; it may reach over the edges."""
    limits = np.stack([heights, widths], axis=1)
    start = np.clip(origin, 0, limits - 1)
    stop = np.clip(origin + np.array(size), start + 1, limits)  # beside the image: one pixel, that lands off the canvas
    box = np.concatenate([start, stop - start], axis=1).astype(np.int32)
    return Boxes(box, box[:, 2:].copy(), (start - origin).astype(np.int32), size, fill=fill)


def _resized(size: int | tuple[int, int], heights: Int64, widths: Int64) -> tuple[Int64, Int64]:
    """Height and width after torchvision's Resize: an int is the shorter side, and the longer one is truncated."""
    if not isinstance(size, int):
        return np.full_like(heights, size[0]), np.full_like(widths, size[1])
    short, long = np.minimum(heights, widths), np.maximum(heights, widths)
    longer = np.minimum((size * long / short).astype(np.int64), np.iinfo(np.int32).max)
    return np.where(heights <= widths, size, longer), np.where(heights <= widths, longer, size)


def _checked(crop: Crop, u: Float | None, heights: Int64, widths: Int64) -> tuple[Float, Int64, Int64]:
    heights, widths = np.asarray(heights, dtype=np.int64), np.asarray(widths, dtype=np.int64)
    if u is None:
        u = np.zeros((len(heights), 0), dtype=np.float32)
    if u.shape != (len(heights), crop.count) and crop.count:
        raise ConfigError(
            f"`u` must be float32 [{len(heights)}, {crop.count}] for {type(crop).__name__}. Found: shape {u.shape}."
        )
    # A sample that cannot be decoded has no size; a single pixel keeps its row harmless.
    return u, np.maximum(heights, 1), np.maximum(widths, 1)


def _sides(name: str, value: int | Sequence[int]) -> tuple[int, ...]:
    """One or two positive whole numbers."""
    sides: tuple[Any, ...] = (
        tuple(value) if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else (value,)
    )
    if len(sides) not in (1, 2) or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sides):
        raise ConfigError(f"`{name}` must be a positive int or two of them (H, W). Found: {value!r}.")
    if max(sides) > LARGEST_SIDE:
        raise ConfigError(f"`{name}` must be at most {LARGEST_SIDE} pixels a side. Found: {value}.")
    return sides


def _pair(name: str, value: int | Sequence[int]) -> tuple[int, int]:
    """(H, W); one number is a square."""
    sides = _sides(name, value)
    size = (sides[0], sides[-1])
    if size[0] * size[1] > LARGEST_VIEW:
        raise ConfigError(
            f"`{name}` must be of at most {LARGEST_VIEW} pixels, as many as an image may have. Found: {size[0]} x "
            f"{size[1]}, {size[0] * size[1] * 12 / 1e9:.1f} GB of float32 for each sample."
        )
    return size


def _shorter_side(name: str, value: int | Sequence[int]) -> int | tuple[int, int]:
    """An int, alone or in a list of one, is the shorter side; two are (h, w)."""
    sides = _sides(name, value)
    return sides[0] if len(sides) == 1 else _pair(name, value)


def _range(name: str, value: Sequence[float], *, high: float) -> tuple[float, float]:
    numbers = (
        isinstance(value, Sequence)
        and len(value) == 2
        and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in value)
    )
    if not numbers or not 0 < value[0] <= value[1] <= high or not math.isfinite(value[1]):
        bound = f" <= {high:g}" if high < math.inf else ""
        raise ConfigError(f"`{name}` must satisfy 0 < min <= max{bound}. Found: {value!r}.")
    return float(value[0]), float(value[1])


def _padding(value: int | Sequence[int]) -> tuple[int, int, int, int]:
    values: list[int] = list(value) if isinstance(value, Sequence) else [value]
    if len(values) not in (1, 2, 4) or any(
        isinstance(v, bool) or not isinstance(v, int) or not 0 <= v <= LARGEST_SIDE for v in values
    ):
        raise ConfigError(
            f"`padding` must be an int from 0 to {LARGEST_SIDE}, two (left and right, top and bottom) or four (left, "
            f"top, right, bottom). Found: {value!r}."
        )
    left, top, right, bottom = values * (4 // len(values))
    return left, top, right, bottom


def _fill(value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 255:
        raise ConfigError(f"`fill` must be an int from 0 to 255. Found: {value!r}.")
    return value


def _interpolation(value: str) -> Interpolation:
    if not isinstance(value, str) or value not in get_args(Interpolation):
        raise ConfigError(f"`interpolation` must be 'bilinear' or 'bicubic'. Found: {value!r}.")
    return value  # type: ignore[return-value]
