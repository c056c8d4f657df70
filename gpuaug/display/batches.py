"""Pictures of batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpuaug import checks
from gpuaug.display.annotations import PALETTE, Annotated, Annotations, Style, class_name
from gpuaug.display.sheet import INK, SheetRow, check_pixels, sheet
from gpuaug.errors import ConfigError

if TYPE_CHECKING:  # loaders import this module, but need PIL only to draw
    from PIL import Image

Triple = tuple[float, ...]
SAMPLES = 16  # shown by default
WIDE, CELL = 8, 128  # pictures in a row, and the side of a picture in pixels
WIDE_WITH_TARGETS, CELL_WITH_TARGETS = 4, 240
SMALL, ROWS = 0.6, 4  # in a notebook: factor for the side of a picture, maximum number of rows
WRONG = (200, 30, 40)
HIDDEN, OPACITY = (128, 128, 128), 0.75  # of masked patches
NAMED, LEAST = 3, 0.05  # the text of a soft label names at most 3 classes, with shares of at least 0.05
ROUNDING = 1e-3  # shares may be this far outside 0..1


@dataclass(frozen=True, kw_only=True)
class Appearance:
    """What a batch needs to show itself."""

    views: tuple[str, ...] = ("",)  # name of each view, or ""
    normalize: tuple[tuple[Triple, Triple] | None, ...] = (None,)  # (mean, std) of each view; None: pixels are in 0..1
    style: Style = field(default_factory=Style)
    bad: frozenset[int] | None = None  # rows of the batch that could not be read; None: unknown
    bands: Sequence[int] | None = None  # the channels to draw as red, green and blue; None: there are 1 or 3

    @classmethod
    def of(cls, views: Sequence[Any], style: Style) -> Appearance:
        """The look of batches with these ``views`` (:class:`gpuaug.augment.recipe.View`)."""
        names = tuple(name_of(view) if view.name else "" for view in views)
        steps = (view.augment.normalize for view in views)
        known = (step and (tuple(step.settings["mean"]), tuple(step.settings["std"])) for step in steps)
        return cls(views=names, normalize=tuple(known), style=style)


def name_of(view: Any) -> str:
    """The view's name, with a number if there are several copies."""
    several = view.augment.copies > 1
    return f"{view.name or ('view' if several else '')}{f' {view.copy + 1}' if several else ''}"


def contents(batch: Any, look: Appearance, *, count: int | None = None) -> list[list[Annotated]]:
    """For each of the first ``count`` samples (None: all): the pictures of its views, with their annotations."""
    images, targets = views_of(batch)
    made = [
        pictures(view[:count], normalize, look.bands) for view, normalize in zip(images, look.normalize, strict=True)
    ]
    if (masks := getattr(batch, "patch_masks", None)) is not None:
        for view, planes in zip(masks.views, masks.planes[:, :count].cpu().numpy(), strict=True):
            made[view] = [_masked(*both) for both in zip(made[view], planes, strict=True)]
    return [
        [Annotated(each, Annotations.of(t, row, look.style.rules)) for each, t in zip(views, targets, strict=True)]
        for row, views in enumerate(zip(*made, strict=True))
    ]


def _masked(picture: Image.Image, planes: NDArray[np.bool_]) -> Image.Image:
    """The picture with gray masked patches. ``planes`` [P, H, W]: a row of :class:`~gpuaug.PatchMasks`.

    With I-JEPA, the patches that the encoder does not see are gray, and each target has a color.
    """
    from PIL import Image

    pixels = np.asarray(picture, dtype=np.float32).copy()
    patch = pixels.shape[0] // planes.shape[1]
    mask, *others = planes.repeat(patch, axis=1).repeat(patch, axis=2)
    context, *targets = others or [~mask]
    for where, color in ((~context, HIDDEN), *zip(targets, PALETTE, strict=False)):
        pixels[where] = (1 - OPACITY) * pixels[where] + OPACITY * np.array(color, dtype=np.float32)
    return Image.fromarray(pixels.round().astype(np.uint8))


def views_of(batch: Any) -> tuple[list[Any], list[Any]]:
    """The images and the targets (or None) of each view. Each frame of clips is a view."""
    images = batch.images if isinstance(batch.images, list) else [batch.images]
    if batch.targets is None and batch.look is None:
        images = [frame for view in images for frame in (view.unbind(1) if view.ndim == 5 and view.numel() else [view])]
    return images, batch.targets if isinstance(batch.targets, list) else [batch.targets] * len(images)


def check_bands(bands: Any, channels: int) -> list[int]:
    """The three channels to draw as red, green and blue. ConfigError if ``bands`` must name them, and does not."""
    if bands is None and channels in (1, 3):
        return [0, 1, 2] if channels == 3 else [0, 0, 0]
    good = isinstance(bands, Sequence) and len(bands) == 3
    if not good or not all(type(band) is int and 0 <= band < channels for band in bands):
        raise ConfigError(
            f"`bands` must be the three channels to draw as red, green and blue, from 0 to {channels - 1}, such as "
            f"bands=[{min(3, channels - 1)},{min(2, channels - 1)},{min(1, channels - 1)}]. Found: {bands!r:.100}."
        )
    return list(bands)


def pictures(
    images: Any, normalize: tuple[Triple, Triple] | None, bands: Sequence[int] | None = None
) -> list[Image.Image]:
    """Images [n, C, H, W] as pictures. ``normalize`` (mean, std) is undone, except in uint8 images."""
    from PIL import Image

    chosen = check_bands(bands, images.shape[1])
    pixels = images.detach()[:, chosen].float().cpu().numpy()
    if str(images.dtype) == "torch.uint8":
        pixels = pixels / 255
    elif normalize is not None:
        mean, std = (np.resize(np.array(v, np.float32), images.shape[1])[chosen, None, None] for v in normalize)
        pixels = pixels * std + mean
    levels = np.rint(np.nan_to_num(pixels).clip(0, 1) * 255).astype(np.uint8).transpose(0, 2, 3, 1)
    return [Image.fromarray(np.ascontiguousarray(each)) for each in levels]


def label_text(value: Any, classes: Sequence[str] | None) -> str:
    """A label as text: a class name, the classes with the largest shares, or numbers."""

    def name(number: int) -> str:
        return class_name(number, classes, f"label {number}")

    if value is None or isinstance(value, int):
        return "" if value is None else name(value)
    values = value if isinstance(value, list) else [value]
    if len(values) == 1 or not all(-ROUNDING <= v <= 1 + ROUNDING for v in values):
        return f"label {', '.join(f'{v:.3g}' for v in values[: NAMED + 1])}{', ...' * (len(values) > NAMED + 1)}"
    order = [k for k in sorted(range(len(values)), key=lambda k: -values[k]) if values[k] >= LEAST]
    parts = [name(k) + (f" {values[k]:.2f}" if values[k] < 1 else "") for k in order[:NAMED]]
    return ", ".join([*parts, *([f"{len(order) - NAMED} more"] if len(order) > NAMED else [])]) or "no label"


def picture(
    batch: Any, *, rows: int | None, columns: int | None, size: int | None, bands: Any = None, small: bool = False
) -> Image.Image:
    """The picture of :meth:`gpuaug.Batch.show`. ``small``: fewer and smaller images by default."""
    views, _ = views_of(batch)
    wide, side = (WIDE, CELL) if batch.targets is None else (WIDE_WITH_TARGETS, CELL_WITH_TARGETS)
    columns = checks.whole_number("columns", columns, 1, optional=True) or max(1, wide // len(views))
    most = ROWS if small else SAMPLES
    rows = checks.whole_number("rows", rows, 1, optional=True) or min(-(-SAMPLES // columns), most)
    size = checks.whole_number("size", size, 16, optional=True) or round(side * (SMALL if small else 1))
    for view in views:
        if view.ndim != 4 or not view.numel():
            raise ConfigError(
                "a batch shows images [B, C, H, W] with at least one sample and one pixel, and without targets also "
                f"clips [B, T, C, H, W]. Found: {list(view.shape)}. Show another batch."
            )
    look: Appearance = batch.look or Appearance(views=("",) * len(views), normalize=(None,) * len(views))
    if len(look.views) != len(views):
        raise ConfigError(
            f"`images` and `look` of a batch must have the same number of views. Found: {len(views)} and "
            f"{len(look.views)}. Set `look=None`, and give images in 0..1."
        )
    look = replace(look, bands=bands)
    count = min(len(batch), rows * columns)
    largest = max(max(view.shape[2:]) for view in views)
    check_pixels(count * sum(view.shape[2] * view.shape[3] for view in views) * size**2 // largest**2)
    scale, valid = size / largest, batch.valid.tolist()
    cells, shown = [], []
    samples = zip(_captions(batch, count, look), contents(batch, look, count=count), valid, strict=False)
    for row, (text, sample, is_valid) in enumerate(samples):
        known = [each.annotations for each in sample]
        shown += known
        style = look.style.for_sample(*known)
        for n, (each, name) in enumerate(zip(sample, look.views, strict=True)):
            cell = each.cell(scale, style, "" if n else text, name, color=INK if is_valid else WRONG)
            blank = not is_valid and (row in look.bad if look.bad is not None else not views[n][row].any())
            if blank:
                cross(cell.picture)
            if not is_valid and n == 0:
                why = "cannot be read" if blank else "only fills the batch"
                cell = cell._replace(caption=f"{cell.caption} (not valid: {why})")
            cells.append(cell)
    wide = columns * len(views)
    drawn = [SheetRow("", [], cells[k : k + wide]) for k in range(0, len(cells), wide)]
    return sheet(drawn, legend=look.style.legend(shown), groups=len(views))


def _captions(batch: Any, count: int, look: Appearance) -> list[str]:
    numbers = batch.indices[:count].tolist()
    if batch.labels is None or batch.targets is not None:
        keys = [batch.key_of(index) for index in numbers]
        return [key if key == str(index) else f"{index}: {key}" for index, key in zip(numbers, keys, strict=True)]
    labels = batch.labels[:count].tolist()
    return [f"{index}: {label_text(label, look.style.classes)}" for index, label in zip(numbers, labels, strict=True)]


def cross(image: Image.Image) -> None:
    from PIL import ImageDraw

    pen, (right, bottom) = ImageDraw.Draw(image), (image.width - 1, image.height - 1)
    pen.rectangle((0, 0, right, bottom), outline=WRONG, width=2)
    for line in ((0, 0, right, bottom), (0, bottom, right, 0)):
        pen.line(line, fill=WRONG, width=2)
