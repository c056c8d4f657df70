"""The pictures of `gpuaug preview`: a grid of samples, and a sheet of operations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from gpuaug.tools.preview.operations import Row
from gpuaug.tools.samples import Sample
from gpuaug.tools.sheet import FAINT, INK, blank, fitting, font, scaled, wrapped

COLORS = (
    (230, 57, 70),
    (29, 130, 200),
    (42, 157, 90),
    (244, 140, 30),
    (140, 82, 190),
    (20, 160, 160),
    (214, 70, 150),
    (120, 120, 20),
)
LINE = (225, 225, 230)
GAP, MARGIN, CAPTION = 8, 20, 34  # pixels
INTRO_HEIGHT = 18
MIN_SHEET_CELL = 96  # captions are below the pictures
NAMES_WIDTH = 190  # of the sheet's column of names


def color(number: int) -> tuple[int, int, int]:
    """The color of a picture's box."""
    return COLORS[number % len(COLORS)]


class _Page:
    """A page with a heading and lines of text above its body."""

    def __init__(self, width: int, heading: str, lines: Sequence[str]) -> None:
        self.width, self.heading = width, heading
        self.big, self.bold, self.small = font(22), font(15), font(12)
        self.intro = [part for line in lines for part in wrapped(line, self.small, width - 2 * MARGIN)]
        self.top = MARGIN + 32 + INTRO_HEIGHT * len(self.intro) + GAP

    def draw(self, height: int) -> None:
        """Make the image, ``height`` pixels high, and draw the heading."""
        self.image = blank(self.width, height)
        self.pen = ImageDraw.Draw(self.image)
        self.pen.text((MARGIN, MARGIN - 4), self.heading, INK, self.big)
        for n, line in enumerate(self.intro):
            self.pen.text((MARGIN, MARGIN + 30 + INTRO_HEIGHT * n), line, FAINT, self.small)


def grid(
    samples: Sequence[Sample],
    *,
    heading: str,
    lines: Sequence[str],
    epochs: Sequence[int],
    views: Sequence[str],
    cell: int,
) -> Image.Image:
    """Draw a row for each sample: the original with the boxes that were read, then the views of each epoch.

    Args:
        samples: the rows.
        heading, lines: text above the grid.
        epochs: one group of columns each.
        views: titles of the columns in a group.
        cell: pixels of the longer side of the largest picture. Others keep their size relative to it.
    """
    scale = cell / max(max(p.size) for s in samples for p in s.pictures)
    original_width = round(cell * 1.35)  # the original is larger, because boxes are drawn on it
    widths = [
        max(64, round(scale * max(p.width for p in column)))
        for column in zip(*(s.pictures for s in samples), strict=True)
    ]
    starts = [MARGIN + original_width + 2 * GAP]
    for n, width in enumerate(widths, start=1):
        starts.append(starts[-1] + width + (3 * GAP if n % len(views) == 0 and len(views) > 1 else GAP))
    page = _Page(max(starts[len(widths) - 1] + widths[-1] + MARGIN, 480), heading, lines)
    top = page.top + GAP
    body = top + 28 + (18 if any(views) else 0)
    pitch = cell + CAPTION + 2 * GAP
    page.draw(body + pitch * len(samples) + MARGIN - 2 * GAP)
    pen = page.pen

    pen.text((MARGIN, top), "original", INK, page.bold)
    for n, (x, width) in enumerate(zip(starts, widths, strict=False)):
        epoch, view = divmod(n, len(views))
        if view == 0:
            pen.text((x, top), f"epoch {epochs[epoch]}", INK, page.bold)
        pen.text((x, top + 21), fitting(views[view], page.small, width, middle=True), FAINT, page.small)
        pen.line((x, body - 5, x + width - 1, body - 5), color(n), 3)

    for row, sample in enumerate(samples):
        y = body + row * pitch
        _paste_original(page.image, sample, x=MARGIN, y=y, width=original_width, height=cell)
        note = f"{sample.index}: {Path(sample.key).name}" if sample.label else f"sample {sample.index}"
        name = fitting(sample.label or sample.key, page.bold, original_width, middle=True)
        pen.text((MARGIN, y + cell + 3), name, INK, page.bold)
        note = fitting(note, page.small, original_width, middle=True)
        pen.text((MARGIN, y + cell + 20), note, FAINT, page.small)
        for x, picture in zip(starts, sample.pictures, strict=False):
            page.image.paste(_scaled(picture, scale), (x, y))
    return page.image


def sheet(rows: Sequence[Row], *, heading: str, lines: Sequence[str], cell: int) -> Image.Image:
    """Draw a row for each operation: its notes, the image before, and the image at every value.

    Args:
        rows: the operations.
        heading, lines: text above them.
        cell: pixels of the longer side of a picture.
    """
    cell = max(cell, MIN_SHEET_CELL)
    pitch = cell + GAP
    most = max(len(pictures) for row in rows for pictures in row.pictures)
    page = _Page(2 * MARGIN + NAMES_WIDTH + most * pitch, heading, lines)
    notes = [[part for n in row.notes for part in wrapped(n, page.small, NAMES_WIDTH - GAP)] for row in rows]
    captions = [[wrapped(text, page.small, cell) for text in ("before", *row.captions)] for row in rows]
    heights = [
        2 * GAP + max(len(row.pictures) * pitch + 16 * max(map(len, below)), 22 + 16 * len(beside))
        for row, below, beside in zip(rows, captions, notes, strict=True)
    ]
    page.draw(page.top + sum(heights) + MARGIN - GAP)
    pen, y = page.pen, page.top
    for row, below, beside, height in zip(rows, captions, notes, heights, strict=True):
        pen.line((MARGIN, y, page.width - MARGIN, y), LINE, 1)
        at = y + GAP
        pen.text((MARGIN, at - 2), fitting(row.name, page.bold, NAMES_WIDTH - GAP, middle=True), INK, page.bold)
        for n, text in enumerate(beside):
            pen.text((MARGIN, at + 20 + 16 * n), text, FAINT, page.small)
        for pictures in row.pictures:
            for n, picture in enumerate(pictures):
                shown = _scaled(picture, cell / max(picture.size))
                page.image.paste(shown, (MARGIN + NAMES_WIDTH + n * pitch, at))
            at += pitch
        for n, parts in enumerate(below):
            for k, text in enumerate(parts):
                x = MARGIN + NAMES_WIDTH + n * pitch
                pen.text((x, at - 4 + 16 * k), text, INK if n else FAINT, page.small)
        y += height
    return page.image


def _paste_original(page: Image.Image, sample: Sample, *, x: int, y: int, width: int, height: int) -> None:
    pen = ImageDraw.Draw(page)
    if sample.original is None:
        pen.rectangle((x, y, x + width - 1, y + height - 1), (240, 240, 240))
        pen.text((x + GAP, y + GAP), sample.absent, FAINT, font(12))
        return
    scale = min(width / sample.original.width, height / sample.original.height)
    page.paste(_scaled(sample.original, scale), (x, y))
    # the first epoch on top; boxes beyond the number of colors would look alike
    for n in reversed(range(min(len(COLORS), len(sample.boxes)))):
        corners = [round(v * scale) for v in sample.boxes[n]]
        at = (x + corners[0], y + corners[1], x + max(corners[0], corners[2] - 1), y + max(corners[1], corners[3] - 1))
        pen.rectangle(at, outline=color(n), width=2)


def _scaled(image: Image.Image, scale: float) -> Image.Image:
    return scaled(image, (max(1, round(image.width * scale)), max(1, round(image.height * scale))))
