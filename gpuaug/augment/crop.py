"""torchvision's crops, vectorized over the batch. The decoder makes the views from the :class:`CropWindows`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from gpuaug import checks
from gpuaug.batch import LONGEST, CropWindows, Fill, Int32, Int64, Interpolation, Objects
from gpuaug.errors import ConfigError, shown_size
from gpuaug.random.keyed import Float

LARGEST_SIDE = 500_000  # pixels; enough for panoramas and scans, so a larger value is a mistake
LARGEST_VIEW = 178_000_000  # largest number of pixels of a view; equals the default of `decode.max_pixels`
LARGEST_MULTIPLE = 4096
_TRIES = 10  # tries of RandomResizedCrop before it takes a central crop, as in torchvision
Float64 = NDArray[np.float64]
Known = NDArray[np.bool_]  # [B], False for a sample that cannot be decoded
Redraw = Callable[[int, Int64], Float]


class Reads(NamedTuple):
    """Inputs that some crops need besides sizes and uniforms; see :meth:`Crop.windows`."""

    objects: Objects | None
    masks: Sequence[NDArray[Any] | None] | None
    redraw: Redraw | None


class Crop:
    """Base of the crops."""

    count = 0  # uniforms per sample
    needs: frozenset[str] = frozenset()  # targets that the crop reads: `boxes`, `masks`, or none
    pad = "size"  # `batch`: the output of a batch is only as large as its largest image, and `size` is a limit
    size: Any
    interpolation: Interpolation

    @property
    def fixed(self) -> bool:
        """Whether all outputs have the sides ``size``, (H, W)."""
        return isinstance(self.size, tuple) and self.pad == "size"

    def __repr__(self) -> str:
        (_, first), *others = vars(self).items()
        return f"{type(self).__name__}({', '.join([repr(first), *(f'{k}={v!r}' for k, v in others)])})"

    def windows(
        self,
        u: Float | None,
        heights: Int64,
        widths: Int64,
        *,
        objects: Objects | None = None,
        masks: Sequence[NDArray[Any] | None] | None = None,
        redraw: Redraw | None = None,
    ) -> CropWindows:
        """Compute the windows of a batch. A sample that cannot be decoded gets any valid window.

        Args:
            u: float32 [B, count] in [0, 1); None if the crop is not random.
            heights, widths: int64 [B] after EXIF orientation; 0 for a sample that cannot be decoded.
            objects: the boxes of all samples, in pixels after EXIF orientation. Needed if ``needs`` has ``boxes``.
            masks: B label arrays [h, w] after EXIF orientation. Needed if ``needs`` has ``masks``. A sample that cannot
                be decoded has None.
            redraw: function of (round, rows int64 [n]) that draws further uniforms float32 [n, count] for these rows.
                The first round is 1. None: the crop uses only ``u``.
        """
        known = np.asarray(heights) > 0
        # A sample that cannot be decoded has size 0. Size 1 gives its row a valid box.
        heights, widths = (np.maximum(np.asarray(n, dtype=np.int64), 1) for n in (heights, widths))
        u = np.zeros((len(heights), 0), dtype=np.float32) if u is None or not self.count else u
        if u.shape != (len(heights), self.count):
            raise ConfigError(
                f"`u` must be float32 [{len(heights)}, {self.count}] for {type(self).__name__}. Found: shape {u.shape}."
            )
        return self._windows(u.astype(np.float64), heights, widths, known, Reads(objects, masks, redraw))

    def _windows(self, u: Float64, heights: Int64, widths: Int64, known: Known, reads: Reads) -> CropWindows:
        raise NotImplementedError


class RandomResizedCrop(Crop):
    """Crops a random area with a random aspect ratio and resizes it, like torchvision's ``RandomResizedCrop``.

    Ten random shapes are tried. If no shape fits into the image, the result is the largest central crop whose aspect
    ratio is in the range ``ratio``.

    Args:
        size: output (H, W); an int is a square.
        scale: minimum and maximum area of the crop as a fraction of the image's area, 0 < min <= max <= 1.
        ratio: minimum and maximum of width / height, 0 < min <= max. The logarithm of the ratio is uniform.
        interpolation: ``bilinear`` or ``bicubic``; ``nearest`` only for batches of tensors, not in a loader.

    >>> RandomResizedCrop(224, scale=(0.2, 1)).size
    (224, 224)
    """

    count = 2 + 2 * _TRIES  # uniforms for top and left, then (area, ratio) of each try

    def __init__(
        self,
        size: int | Sequence[int],
        *,
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        interpolation: Interpolation = "bilinear",
    ) -> None:
        self.size = pair("size", size)
        self.scale = checks.pair("scale", scale, None, 1)
        self.ratio = checks.pair("ratio", ratio, None)
        self.interpolation = checks.one_of("interpolation", interpolation, get_args(Interpolation))

    def _windows(self, u: Float64, heights: Int64, widths: Int64, known: Known, reads: Reads) -> CropWindows:
        area, log_ratio = u[:, 2::2], u[:, 3::2]  # [B, 10]
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        target = (heights * widths)[:, None] * (self.scale[0] + area * (self.scale[1] - self.scale[0]))
        ratio = np.exp(low + log_ratio * (high - low))
        w = np.rint(np.sqrt(target * ratio)).astype(np.int64)  # rint rounds half to even, like Python's round
        h = np.rint(np.sqrt(target / ratio)).astype(np.int64)
        fits = (w > 0) & (w <= widths[:, None]) & (h > 0) & (h <= heights[:, None])
        fitting, at = fits.any(axis=1), (np.arange(len(u)), fits.argmax(axis=1))
        # Fallback: the image, cut to the nearest allowed ratio. A side that rounds to 0 becomes 1; torchvision fails.
        narrowest, widest = self.ratio
        tall, wide = widths / heights < narrowest, widths / heights > widest
        central_h = np.clip(np.where(tall, np.rint(widths / narrowest), heights).astype(np.int64), 1, heights)
        central_w = np.clip(np.where(wide, np.rint(heights * widest), widths).astype(np.int64), 1, widths)
        height, width = np.where(fitting, h[at], central_h), np.where(fitting, w[at], central_w)
        top = np.where(fitting, integers(u[:, 0], heights - height), (heights - height) // 2)
        left = np.where(fitting, integers(u[:, 1], widths - width), (widths - width) // 2)
        box, resized, offset = (stack_rows(len(u), *v) for v in ((top, left, height, width), self.size, (0, 0)))
        return CropWindows(box, resized, offset, self.size, self.interpolation)


class RandomCrop(Crop):
    """Pads the image and crops a fixed size at a random position, without resizing, like torchvision's ``RandomCrop``.

    Args:
        size: (H, W) of the crop, not larger than the padded image; an int is a square.
        padding: pixels around the image: one value, (left and right, top and bottom) or (left, top, right, bottom).
        fill: value of the added pixels, 0..255: one number, or one for each channel, such as (red, green, blue). 255 is
            white in images of any type.

    >>> RandomCrop(32, padding=4)
    RandomCrop((32, 32), padding=(4, 4, 4, 4), fill=0)
    """

    count = 2

    def __init__(
        self, size: int | Sequence[int], *, padding: int | Sequence[int] = 0, fill: int | Sequence[int] = 0
    ) -> None:
        self.size = pair("size", size)
        values: list[int] = list(padding) if isinstance(padding, Sequence) else [padding]
        if len(values) not in (1, 2, 4) or any(type(v) is not int or not 0 <= v <= LARGEST_SIDE for v in values):
            raise ConfigError(
                f"`padding` must be an int from 0 to {LARGEST_SIDE}, two ints (left and right, top and bottom) or four "
                f"ints (left, top, right, bottom). Found: {padding!r}."
            )
        self.padding = tuple(values * (4 // len(values)))
        self.fill = color(fill)

    def _windows(self, u: Float64, heights: Int64, widths: Int64, known: Known, reads: Reads) -> CropWindows:
        left, top, right, bottom = self.padding
        limits = np.stack([heights, widths], axis=1)
        free = limits - self.size + np.array([top + bottom, left + right])
        small = known & (free < 0).any(axis=1)
        if small.any():
            height, width = limits[small.argmax()].tolist()
            raise ConfigError(
                f"RandomCrop's `size` must not exceed the padded image. Found: size {self.size}, an image of "
                f"{shown_size(height, width)} with padding {self.padding} (left, top, right, bottom). "
                "Use a larger `padding`, a smaller `size`, or RandomResizedCrop, which fits every image."
            )
        # top left corner of the crop window; the window may extend beyond the image
        origin = integers(u, np.maximum(free, 0)) - np.array([top, left])
        start = np.clip(origin, 0, limits - 1)
        # If the window is outside the image, a box one pixel high or wide lands outside the output.
        stop = np.clip(origin + self.size, start + 1, limits)
        box = np.concatenate([start, stop - start], axis=1).astype(np.int32)
        return CropWindows(box, box[:, 2:].copy(), (start - origin).astype(np.int32), self.size, fill=self.fill)


class ResizeCenterCrop(Crop):
    """Resizes the image and crops its center, like torchvision's ``Resize(resize)`` and ``CenterCrop(size)``.

    Args:
        resize: size before the crop. (h, w) is the exact size. An int is the new shorter side; the longer side follows
            from the aspect ratio, rounded down.
        size: output (H, W); an int is a square. Pixels outside the resized image are black.
        interpolation: ``bilinear`` or ``bicubic``; ``nearest`` only for batches of tensors, not in a loader.

    >>> ResizeCenterCrop(256, 224)
    ResizeCenterCrop(256, size=(224, 224), interpolation='bilinear')
    """

    def __init__(
        self,
        resize: int | Sequence[int],
        size: int | Sequence[int],
        *,
        interpolation: Interpolation = "bilinear",
    ) -> None:
        self.resize = _shorter_side("resize", resize)
        self.size = pair("size", size)
        self.interpolation = checks.one_of("interpolation", interpolation, get_args(Interpolation))

    def _windows(self, u: Float64, heights: Int64, widths: Int64, known: Known, reads: Reads) -> CropWindows:
        h, w = resized_sides(self.resize, heights, widths)
        H, W = self.size
        # If h < H, CenterCrop pads (H - h) // 2 pixels at the top. If h > H, the crop starts at row
        # int(round((h - H) / 2)). Columns likewise. Python's round and rint round half to even.
        y = np.where(h < H, (H - h) // 2, -np.rint((h - H) / 2.0))
        x = np.where(w < W, (W - w) // 2, -np.rint((w - W) / 2.0))
        box, resized, offset = (stack_rows(len(u), *v) for v in ((0, 0, heights, widths), (h, w), (y, x)))
        return CropWindows(box, resized, offset, self.size, self.interpolation)


class Resize(Crop):
    """Resizes the whole image, like torchvision's ``Resize``.

    Args:
        size: (H, W) is the exact size. An int is the new shorter side; the longer side follows from the aspect ratio,
            rounded down. With an int, all resized images of a batch must have the same size.
        max_size: maximum of the longer side; None: no maximum. With a maximum, ``size`` must be an int below it. A
            longer side above the maximum becomes ``max_size``; the shorter side shrinks in proportion, rounded down.
        interpolation: ``bilinear`` or ``bicubic``; ``nearest`` only for batches of tensors, not in a loader.

    >>> Resize((224, 224))
    Resize((224, 224), max_size=None, interpolation='bilinear')
    """

    def __init__(
        self,
        size: int | Sequence[int],
        *,
        max_size: int | None = None,
        interpolation: Interpolation = "bilinear",
    ) -> None:
        self.size = _shorter_side("size", size)
        self.max_size = checks.whole_number("max_size", max_size, 1, LARGEST_SIDE, optional=True)
        if max_size is not None and not (isinstance(self.size, int) and self.size < max_size):
            raise ConfigError(
                "`max_size` must be above `size`, and `size` must be an int (the shorter side). "
                f"Found: size {size!r}, max_size {max_size}."
            )
        self.interpolation = checks.one_of("interpolation", interpolation, get_args(Interpolation))

    def _windows(self, u: Float64, heights: Int64, widths: Int64, known: Known, reads: Reads) -> CropWindows:
        h, w = resized_sides(self.size, heights, widths, longest=self.max_size)
        sizes = np.unique(np.stack([h, w], axis=1)[known], axis=0).tolist()
        if len(sizes) > 1:
            examples = ", ".join(shown_size(*each) for each in sizes[:3])
            raise ConfigError(
                "Resize's `size` must be (H, W) if aspect ratios differ, because all images of a batch need one size. "
                f"Found: {self.size} gives {examples}. Use (H, W), ResizeCenterCrop, RandomResizedCrop or batch_size=1."
            )
        height, width = sizes[0] if sizes else pair("size", self.size)
        box, resized, offset = (stack_rows(len(u), *v) for v in ((0, 0, heights, widths), (height, width), (0, 0)))
        return CropWindows(box, resized, offset, (height, width), self.interpolation)


class ResizeToSequence(Crop):
    """Resizes the whole image to at most ``length`` patches and keeps its aspect ratio, as NaFlex (arXiv:2502.14786).

    The image is made as large as ``length`` allows; each side is rounded up to a multiple of ``patch``, as by timm's
    transform of this name. No side gets more than ``2 * sqrt(length)`` patches: a longer image is squeezed. The images
    of a batch lie at the top left of outputs as large as the largest of them; for operations, see ``pad="batch"`` of
    :class:`Letterbox`. ``batch.patches()`` cuts the images into sequences. With ``batch_size`` as
    :class:`~gpuaug.Tokens`, each step has its own ``length``.

    Args:
        length: largest number of patches.
        patch: side of a patch, in pixels.
        fill: value of the added pixels, 0..255, as of :class:`~gpuaug.RandomCrop`.
        interpolation: ``bilinear`` or ``bicubic``.

    >>> ResizeToSequence(256).size
    (512, 512)
    """

    pad = "batch"

    def __init__(
        self,
        length: int,
        *,
        patch: int = 16,
        fill: int | Sequence[int] = 0,
        interpolation: Interpolation = "bicubic",
    ) -> None:
        self.length = checks.whole_number("length", length, 1, LONGEST)
        self.patch = checks.whole_number("patch", patch, 1, LARGEST_MULTIPLE)
        self.fill = color(fill)
        self.interpolation = checks.one_of("interpolation", interpolation, get_args(Interpolation))

    @property
    def size(self) -> tuple[int, int]:
        """Largest sides of an output."""
        side = self.patch * min(math.ceil(2 * math.sqrt(self.length)), self.length)
        return side, side

    def _windows(self, u: Float64, heights: Int64, widths: Int64, known: Known, reads: Reads) -> CropWindows:
        given = np.stack([heights, widths], axis=1) / self.patch
        low, high = np.zeros((len(given), 1)), np.full((len(given), 1), float(self.length * self.patch))
        for _ in range(60):  # the largest factor with at most `length` patches
            middle = (low + high) / 2
            fits = np.ceil(given * middle).prod(axis=1, keepdims=True) <= self.length
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        sides = np.clip(np.ceil(given * low), 1, self.size[0] // self.patch).astype(np.int32) * self.patch
        whole, none = stack_rows(len(sides), 0, 0, heights, widths), np.zeros_like(sides)
        return CropWindows(whole, sides, none, largest_of(sides[known], self.patch), self.interpolation, self.fill)


class Window(Crop):
    """Cuts a window from images that hold several views side by side, as `gpuaug pack epochs=K` stores them."""

    interpolation = "bilinear"  # has no effect: a window keeps its size

    def __init__(self, corner: tuple[int, int], size: tuple[int, int]) -> None:
        self.corner, self.size = corner, size

    def _windows(self, u: Float64, heights: Int64, widths: Int64, known: Known, reads: Reads) -> CropWindows:
        box, resized, offset = (stack_rows(len(u), *v) for v in ((*self.corner, *self.size), self.size, (0, 0)))
        return CropWindows(box, resized, offset, self.size, self.interpolation)


def side_by_side(sizes: Sequence[tuple[int, int]]) -> tuple[list[Window], tuple[int, int]]:
    """Place views of these sizes (H, W) in rows on one canvas. Returns a window per view, and (H, W) of the canvas."""
    width, top, left, bottom, windows = max(w for _, w in sizes), 0, 0, 0, []
    for h, w in sizes:
        if left + w > width:
            top, left = bottom, 0
        windows.append(Window((top, left), (h, w)))
        left, bottom = left + w, max(bottom, top + h)
    return windows, (bottom, width)


CROPS = (RandomResizedCrop, RandomCrop, ResizeCenterCrop, Resize, ResizeToSequence)


def largest_of(sides: Any, multiple: int) -> tuple[int, int]:
    """The largest height and width, rounded up to a multiple."""
    height, width = (-(-sides.max(axis=0, initial=1) // multiple) * multiple).tolist()
    return height, width


def stack_rows(count: int, *columns: Any) -> Int32:
    """Stack columns to int32 [count, columns]; a scalar is repeated in every row."""
    return np.stack([np.broadcast_to(c, count) for c in columns], axis=1).astype(np.int32)


def integers(u: Float64, last: Int64) -> Int64:
    """Integers from 0 to ``last`` inclusive, from uniforms in [0, 1)."""
    return np.minimum((u * (last + 1)).astype(np.int64), last)


def resized_sides(
    size: int | tuple[int, int] | Int64, heights: Int64, widths: Int64, *, longest: int | None = None
) -> tuple[Any, Any]:
    """Height and width after torchvision's ``Resize(size, max_size=longest)``. ``size`` may differ between images."""
    if isinstance(size, tuple):
        return np.full_like(heights, size[0]), np.full_like(widths, size[1])
    short, long = np.minimum(heights, widths), np.maximum(heights, widths)
    longer = np.minimum((size * long / short).astype(np.int64), np.iinfo(np.int32).max)
    if longest is not None:
        shrunk = np.maximum((longest * size / np.maximum(longer, 1)).astype(np.int64), 1)
        size, longer = np.where(longer > longest, shrunk, size), np.minimum(longer, longest)
    return np.where(heights <= widths, size, longer), np.where(heights <= widths, longer, size)


def _shorter_side(name: str, value: int | Sequence[int]) -> int | tuple[int, int]:
    """Check a size. One int, plain or in a list, is the shorter side; two ints are (h, w)."""
    sides: tuple[Any, ...] = tuple(value) if isinstance(value, Sequence) else (value,)
    if len(sides) not in (1, 2) or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sides):
        raise ConfigError(f"`{name}` must be a positive int or two positive ints (H, W). Found: {value!r}.")
    if max(sides) > LARGEST_SIDE:
        raise ConfigError(f"`{name}` must be at most {LARGEST_SIDE} pixels per side. Found: {value}.")
    pixels = sides[0] * sides[-1]
    if len(sides) == 2 and pixels > LARGEST_VIEW:
        raise ConfigError(
            f"`{name}` must be at most {LARGEST_VIEW} pixels in total. Found: {sides[0]} x "
            f"{sides[1]}, which needs {pixels * 12 / 1e9:.1f} GB of float32 per sample."
        )
    return (sides[0], sides[1]) if len(sides) == 2 else sides[0]


def pair(name: str, value: int | Sequence[int]) -> tuple[int, int]:
    """Check a size and return (H, W); one int is a square."""
    side = _shorter_side(name, value)
    return pair(name, (side, side)) if isinstance(side, int) else side


def color(value: float | Sequence[float], *, channels: int | None = None) -> Fill:
    """Check a colour: one whole number 0..255, or one for each of ``channels`` (None: any). 128.0 becomes 128."""
    given = list(value) if isinstance(value, Sequence) else [value]
    values: list[Any] = [int(v) if isinstance(v, float) and v.is_integer() else v for v in given]
    counts = (1, channels or max(len(values), 1))
    if len(values) not in counts or any(type(v) is not int or not 0 <= v <= 255 for v in values):
        several = f"{channels} of them" if channels else "one for each channel"
        raise ConfigError(f"`fill` must be a whole number from 0 to 255, or {several}. Found: {value!r:.99}.")
    return values[0] if len(values) == 1 else tuple(values)
