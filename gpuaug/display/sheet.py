"""Draws rows of captioned pictures as one picture or as an HTML page."""

from __future__ import annotations

import base64
import html
import io
import unicodedata
from collections.abc import Sequence
from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuaug.errors import ConfigError

if TYPE_CHECKING:  # loaders import this module, but need PIL only to draw
    from PIL import Image

Color = tuple[int, int, int]
Legend = Sequence[tuple[Color | None, str]]  # color (None: striped) and name of each class
PAPER, INK, FAINT = (255, 255, 255), (32, 32, 36), (118, 118, 126)
STRIPED, STRIPE = (232, 232, 232), (120, 120, 120)  # pixels without a class
MOST_PIXELS = 200_000_000  # 600 MB; viewers cannot show larger pictures
GAP, MARGIN, NOTES, NARROWEST, LINE, SWATCH = 8, 20, 190, 64, 16, 12  # pixels
# all characters that Pillow's built-in font has
DRAWABLE = frozenset(
    [
        *map(chr, range(32, 127)),
        *"\u00a9\u00ab\u00b0\u00b1\u00b4\u00b7\u00bb\u2018\u2019\u201c\u201d\u2026\u2039\u203a\u2044\u2122",
    ]
)
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{heading}: gpuaug</title>
<style>
  :root {{ color-scheme: light dark; font: 15px/1.4 system-ui, sans-serif; }}
  h1, h2, p {{ margin: 8px; overflow-wrap: anywhere; }} h2 {{ font-size: 16px; }} p, figcaption {{ font-size: 13px; }}
  div {{ display: flex; flex-wrap: wrap; }} figure {{ margin: 8px; }} figcaption {{ border-top: 4px solid; }}
</style></head><body>
<h1>{heading}</h1>
{body}
</body></html>
"""


class Cell(NamedTuple):
    """A picture and the text below it."""

    picture: Image.Image
    caption: str
    color: Color = INK


class Row(NamedTuple):
    """A title, notes below it, and the pictures beside them."""

    title: str
    notes: list[str]
    cells: list[Cell]


def sheet(rows: Sequence[Row], *, heading: str, lines: Sequence[str], legend: Legend = ()) -> Image.Image:
    """Draw rows of pictures below a heading, lines of text and a legend."""
    big, bold, small = font(22), font(15), font(12)
    widths, captions, heights = _measured([row.cells for row in rows])
    starts = [*accumulate([MARGIN + NOTES, *widths], lambda x, width: x + width + GAP)]
    width = max(480, starts[-1] + MARGIN)
    intro = [part for line in lines for part in wrapped(line, small, width - 2 * MARGIN)]
    chips, y = _flowing(legend, MARGIN + 32 + LINE * len(intro) + GAP, width)
    notes = [[part for note in row.notes for part in wrapped(note, small, NOTES - GAP)] for row in rows]
    heights = [3 * GAP + max(20 + LINE * len(text), n) for text, n in zip(notes, heights, strict=True)]
    page, pen = _canvas(width, y + sum(heights) + MARGIN, legend, chips)
    pen.text((MARGIN, MARGIN - 4), fitting(heading, big, width - 2 * MARGIN), INK, big)
    pen.multiline_text((MARGIN, MARGIN + 28), "\n".join(intro), FAINT, small, spacing=4)
    for row, text, below, height in zip(rows, notes, captions, heights, strict=True):
        pen.line((MARGIN, y, width - MARGIN, y), (225, 225, 230))
        pen.text((MARGIN, y + GAP - 2), fitting(row.title, bold, NOTES - GAP, middle=True), INK, bold)
        pen.multiline_text((MARGIN, y + GAP + 20), "\n".join(text), FAINT, small, spacing=4)
        _draw_cells(page, pen, row.cells, below, starts, y + GAP)
        y += height
    return page


def grid(rows: Sequence[Sequence[Cell]], *, legend: Legend = (), groups: int = 1) -> Image.Image:
    """Draw rows of pictures below a legend. If ``groups`` > 1, the gap after every ``groups`` pictures is doubled."""
    widths, captions, heights = _measured(rows)
    gaps = [GAP * (1 + (groups > 1 and n % groups == groups - 1)) for n in range(len(widths))]
    starts = [*accumulate([GAP, *(map(sum, zip(widths, gaps, strict=True)))])]
    chips, y = _flowing(legend, GAP, starts[-1], left=GAP)
    page, pen = _canvas(starts[-1], y + sum(heights) + GAP * len(heights), legend, chips)
    for row, below, height in zip(rows, captions, heights, strict=True):
        _draw_cells(page, pen, row, below, starts, y)
        y += height + GAP
    return page


def _measured(rows: Sequence[Sequence[Cell]]) -> tuple[list[int], list[list[list[str]]], list[int]]:
    """The width of each column, the lines of each cell's caption, and the height of each row."""
    small, columns = font(12), zip_longest(*rows)
    widths = [max(NARROWEST, *(cell.picture.width for cell in column if cell)) for column in columns]
    captions = [[wrapped(cell.caption, small, room) for cell, room in zip(row, widths, strict=False)] for row in rows]
    heights = [
        max(cell.picture.height + LINE * len(text) for cell, text in zip(row, below, strict=True))
        for row, below in zip(rows, captions, strict=True)
    ]
    return widths, captions, heights


def _canvas(width: int, height: int, legend: Legend, places: Sequence[tuple[int, int]]) -> tuple[Image.Image, Any]:
    """A page with a legend, and a pen for the page."""
    from PIL import Image, ImageDraw

    check_pixels(width * height)
    page = Image.new("RGB", (width, height), PAPER)
    pen, small = ImageDraw.Draw(page), font(12)
    for (color, name), (x, y) in zip(legend, places, strict=True):
        page.paste(_swatch(color), (x, y))
        pen.text((x + SWATCH + 5, y + SWATCH / 2), fitting(name, small, width / 2), INK, small, anchor="lm")
    return page, pen


def _draw_cells(
    page: Image.Image, pen: Any, cells: Sequence[Cell], captions: Sequence[list[str]], starts: Sequence[int], y: int
) -> None:
    small = font(12)
    for cell, text, x in zip(cells, captions, starts, strict=False):
        page.paste(cell.picture, (x, y))
        pen.multiline_text((x, y + cell.picture.height), "\n".join(text), cell.color, small, spacing=4)


def _flowing(legend: Legend, y: int, width: int, *, left: int = MARGIN) -> tuple[list[tuple[int, int]], int]:
    """The place (x, y) of each entry of a legend, and the y below the legend. ``y``: top of the legend."""
    places, x, small = [], left, font(12)
    for _, text in legend:
        needed = SWATCH + 5 + round(small.getlength(fitting(text, small, width / 2))) + 2 * GAP
        if x > left and x + needed > width - left:
            x, y = left, y + SWATCH + 6
        places.append((x, y))
        x += needed
    return places, y + (SWATCH + 2 * GAP if legend else 0)


def _swatch(color: Color | None) -> Image.Image:
    from PIL import Image, ImageDraw

    swatch = Image.new("RGB", (SWATCH, SWATCH), color or STRIPED)
    if color is None:
        pen = ImageDraw.Draw(swatch)
        for start in range(2, 2 * SWATCH, 8):
            pen.line((start, 0, 0, start), STRIPE, 2)
    return swatch


def page(rows: Sequence[Row], *, heading: str, lines: Sequence[str], legend: Legend = ()) -> str:
    """Like :func:`sheet`, but as one HTML file that needs no network and no scripts."""
    body = [f"<p>{html.escape(line)}</p>" for line in lines]
    if legend:
        body.append(f"<p>{' '.join(_chip(color, text) for color, text in legend)}</p>")
    for row in rows:
        body += [f"<h2>{html.escape(row.title)}</h2>", *(f"<p>{html.escape(note)}</p>" for note in row.notes), "<div>"]
        for cell in row.cells:
            stream = io.BytesIO()
            cell.picture.save(stream, "WEBP", lossless=True, method=2, exact=True)
            uri = f"data:image/webp;base64,{base64.b64encode(stream.getvalue()).decode()}"
            caption, color = html.escape(cell.caption), "#{:02x}{:02x}{:02x}".format(*cell.color)
            body.append(f'<figure><img src="{uri}" alt=""><figcaption style="border-color:{color}">{caption}')
            body.append("</figcaption></figure>")
        body.append("</div>")
    text = PAGE.format(heading=html.escape(heading), body="\n".join(body))
    return text.encode("utf-8", "replace").decode()  # file names may not be valid UTF-8


def _chip(color: Color | None, text: str) -> str:
    code, line = "#{:02x}{:02x}{:02x}".format(*(color or STRIPE)), "dotted" if color is None else "solid"
    return f'<span style="border-left: 14px {line} {code}">&nbsp;{html.escape(text)}</span>&ensp;'


def check_pixels(count: int) -> None:
    """Raise ConfigError if a picture would have more than ``MOST_PIXELS`` pixels."""
    if count > MOST_PIXELS:
        raise ConfigError(
            f"the picture would have {count // 10**6:,} million pixels. The limit is {MOST_PIXELS / 1e6:.0f} million. "
            "Show fewer pictures, or smaller ones."
        )


def font(size: int) -> Any:
    """Pillow's built-in font. Its text looks the same on every machine."""
    from PIL import ImageFont

    return ImageFont.load_default(size)


def printable(text: str) -> str:
    """Replace unprintable characters. File names may contain line breaks, escape codes, and bytes not in UTF-8."""
    return "".join(c if c.isprintable() else "?" for c in text)


def drawable(text: str) -> str:
    """The text in characters of the font: accents are left out, and "?" replaces other characters."""
    if DRAWABLE.issuperset(text):
        return text
    made = list[str]()
    for each in text:
        plain = [c for c in unicodedata.normalize("NFKD", each) if not unicodedata.combining(c)]
        made += each if each in DRAWABLE else plain if DRAWABLE.issuperset(plain) else "?"
    return "".join(made)


def fitting(text: str, face: Any, width: float, *, middle: bool = False) -> str:
    """Shorten the text to at most ``width`` pixels, at the end or in the ``middle``."""
    text = _cut(drawable(text), width)
    if len(text) < 3 or face.getlength(text) <= width:
        return text

    def shortened(keep: int) -> str:
        behind = keep - keep // 2 if middle else 0
        return f"{text[: keep - behind]}...{text[len(text) - behind :]}"

    low, high = 2, len(text) - 1  # number of characters to keep, by bisection
    while low < high:
        keep = (low + high + 1) // 2
        low, high = (keep, high) if face.getlength(shortened(keep)) <= width else (low, keep - 1)
    return shortened(low)


def wrapped(text: str, face: Any, width: float) -> list[str]:
    """Lines of at most ``width`` pixels. A wider word is shortened in its middle."""
    lines = [""]
    for word in map(drawable, text.split()):
        longer = f"{lines[-1]} {_cut(word, width)}".strip()
        if not lines[-1] or face.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(_cut(word, width))
    return [fitting(line, face, width, middle=True) for line in lines]


def _cut(text: str, width: float) -> str:
    """Leave out the middle of a text that is much too long to fit, because measuring a long text is slow."""
    most = max(8, round(width))
    return text if len(text) <= 2 * most else text[:most] + text[-most:]


def scaled(image: Image.Image, scale: float) -> Image.Image:
    """Resize the image by ``scale``: smooth when it shrinks, nearest neighbor when it grows."""
    from PIL import Image

    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.NEAREST)
