"""Draws rows of captioned pictures as one picture or as an HTML page, and texts as an HTML table."""

from __future__ import annotations

import base64
import bisect
import html
import io
import unicodedata
from collections.abc import Mapping, Sequence
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
# A click on a picture checks its box, and then its row fills the window: the original, this picture and its details.
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{heading}: gpuaug</title>
<style>
  :root {{ color-scheme: light dark; font: 15px/1.4 system-ui, sans-serif; }}
  h1, h2, p {{ margin: 8px; overflow-wrap: anywhere; }} h2 {{ font-size: 16px; }} p, figcaption {{ font-size: 13px; }}
  img {{ max-width: 100%; }}
  figure {{ margin: 8px; width: {figure}; }} figcaption {{ border-top: 4px solid; }}
  pre {{ display: none; font-size: 13px; }}
  main {{ display: grid; grid-template-columns: repeat({columns}, {width}); overflow-x: auto; }}
  main > h2, main > p {{ grid-column: 1 / -1; margin: 0 8px; }} main > h2 {{ margin-top: 16px; }}
  main > div {{ display: contents; }}
  label {{ cursor: zoom-in; position: relative; }} input {{ position: absolute; opacity: 0; }}
  :focus-visible + img {{ outline: 3px solid; }}
  main > div:has(:checked) {{ display: flex; position: fixed; inset: 0; z-index: 1; overflow: auto; }}
  main > div:has(:checked) {{ background: Canvas; align-content: flex-start; }}
  div:has(:checked) figure:not(:first-child, :has(:checked)) {{ display: none; }}
  div:has(:checked) figure {{ width: auto; }} div:has(:checked) label {{ cursor: zoom-out; }}
  div:has(:checked) figure:not(:has(:checked)) label {{ pointer-events: none; }}
  figure:has(:checked) pre {{ display: block; white-space: pre-wrap; }}
  div:has(:checked) img {{ max-width: 46vw; min-width: min(46vw, 70vh); max-height: 85vh; object-fit: contain; }}
  @media (max-width: 700px) {{
    main {{ display: block; }} main > div, main > div:has(:checked) {{ display: flex; flex-wrap: wrap; }}
    main > div:not(:has(:checked)) > figure {{ width: calc(50% - 16px); }}
    div:has(:checked) img {{ max-width: 94vw; min-width: 80vw; }}
  }}
</style></head><body>
<h1>{heading}</h1>
{intro}
<main>
{body}
</main>
</body></html>
"""


class Cell(NamedTuple):
    """A picture, the text below it, and lines of details, which only a page shows."""

    picture: Image.Image
    caption: str
    color: Color = INK
    details: str = ""


class SheetRow(NamedTuple):
    """A title, notes below it, and the pictures beside them."""

    title: str
    notes: list[str]
    cells: list[Cell]


def sheet(
    rows: Sequence[SheetRow],
    *,
    heading: str = "",
    lines: Sequence[str] = (),
    legend: Legend = (),
    groups: int = 1,
    columns: int | None = None,
) -> Image.Image:
    """Draw rows of pictures below a heading, lines of text and a legend.

    Without a heading, the page has only the pictures and the legend. If ``groups`` > 1, the gap after every ``groups``
    pictures is doubled. A row of more than ``columns`` pictures goes on below.
    """
    from PIL import Image, ImageDraw

    wide = columns or max((len(row.cells) for row in rows), default=1)
    rows = [
        SheetRow("" if k else row.title, [] if k else row.notes, row.cells[k : k + wide])
        for row in rows
        for k in range(0, len(row.cells), wide)
    ]
    big, bold, small = font(22), font(15), font(12)
    margin, left, above = (MARGIN, MARGIN + NOTES, GAP) if heading else (GAP, GAP, 0)
    widths = [
        max(NARROWEST, *(cell.picture.width for cell in column if cell))
        for column in zip_longest(*(row.cells for row in rows))
    ]
    steps = [width + GAP * (2 if groups > 1 and n % groups == 0 else 1) for n, width in enumerate(widths, 1)]
    starts = [*accumulate(steps, initial=left)]
    width = max(480, starts[-1] + MARGIN) if heading else starts[-1]
    intro = [part for line in lines for part in wrapped(line, small, width - 2 * MARGIN)]
    chips, y = _chips(legend, margin, margin + (32 + LINE * len(intro) + GAP if heading else 0), width)
    notes = [[part for note in row.notes for part in wrapped(note, small, NOTES - GAP)] for row in rows]
    captions = [[wrapped(cell.caption, small, w) for cell, w in zip(row.cells, widths, strict=False)] for row in rows]
    heights = []
    for row, note, below in zip(rows, notes, captions, strict=True):
        cells = [cell.picture.height + LINE * len(caption) for cell, caption in zip(row.cells, below, strict=True)]
        heights.append(2 * above + GAP + max(20 + LINE * len(note) if heading else 0, *cells))
    height = y + sum(heights) + (MARGIN if heading else 0)
    check_pixels(width * height)
    page = Image.new("RGB", (width, height), PAPER)
    pen = ImageDraw.Draw(page)
    for swatch, x, top, text in chips:
        page.paste(swatch, (x, top))
        pen.text((x + SWATCH + 5, top + SWATCH / 2), text, INK, small, anchor="lm")
    pen.text((MARGIN, MARGIN - 4), fitting(heading, big, width - 2 * MARGIN), INK, big)
    pen.text((MARGIN, MARGIN + 28), "\n".join(intro), FAINT, small)
    for row, note, below, height in zip(rows, notes, captions, heights, strict=True):
        if row.title:
            pen.line((MARGIN, y, width - MARGIN, y), (225, 225, 230))
            pen.text((MARGIN, y + GAP - 2), fitting(row.title, bold, NOTES - GAP, middle=True), INK, bold)
            pen.text((MARGIN, y + GAP + 20), "\n".join(note), FAINT, small)
        for cell, caption, x in zip(row.cells, below, starts, strict=False):
            page.paste(cell.picture, (x, y + above))
            pen.text((x, y + above + cell.picture.height), "\n".join(caption), cell.color, small)
        y += height
    return page


def _chips(legend: Legend, left: int, y: int, width: int) -> tuple[list[tuple[Image.Image, int, int, str]], int]:
    """Swatch, x, y and text of each entry of a legend whose top is ``y``, and the y below the legend."""
    chips, x, small = [], left, font(12)
    for color, name in legend:
        text = fitting(name, small, width / 2)
        needed = SWATCH + 5 + round(small.getlength(text)) + 2 * GAP
        if x > left and x + needed > width - left:
            x, y = left, y + SWATCH + 6
        chips.append((_swatch(color), x, y, text))
        x += needed
    return chips, y + (SWATCH + 2 * GAP if legend else 0)


def _swatch(color: Color | None) -> Image.Image:
    from PIL import Image, ImageDraw

    swatch = Image.new("RGB", (SWATCH, SWATCH), color or STRIPED)
    if color is None:
        pen = ImageDraw.Draw(swatch)
        for start in range(2, 2 * SWATCH, 8):
            pen.line((start, 0, 0, start), STRIPE, 2)
    return swatch


def page(
    rows: Sequence[SheetRow],
    *,
    heading: str,
    lines: Sequence[str],
    legend: Legend = (),
    columns: int | None = None,
    live: bool = False,
) -> str:
    """Like :func:`sheet`, but as one HTML file that needs no network and no scripts.

    ``live``: the columns fill the window's width, and the pictures are encoded in less time, as larger files.
    """
    kind, options = "webp", {"lossless": True, "method": 2, "exact": True}
    if live:
        kind, options = "png", {"compress_level": 1}
    intro, body = [f"<p>{html.escape(line)}</p>" for line in lines], list[str]()
    if legend:
        intro.append(f"<p>{' '.join(_chip(color, text) for color, text in legend)}</p>")
    for row in rows:
        body += [f"<h2>{html.escape(row.title)}</h2>"] * bool(row.title)
        body += [*(f"<p>{html.escape(note)}</p>" for note in row.notes), "<div>"]
        name = html.escape(f"{row.title}, ") if row.title else ""
        for cell in row.cells:
            stream = io.BytesIO()
            cell.picture.save(stream, kind, **options)
            uri = f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"
            caption, details = html.escape(cell.caption), html.escape(cell.details)
            color = "#{:02x}{:02x}{:02x}".format(*cell.color)
            body.append(
                f'<figure><label title="{details}"><input type="checkbox"><img src="{uri}" alt="{name}{caption}">'
            )
            body.append(f'</label><figcaption style="border-color:{color}">{caption}</figcaption>')
            body.append(f"<pre>{details}</pre></figure>" if details else "</figure>")
        body.append("</div>")
    columns = columns or max((len(row.cells) for row in rows), default=1)
    parts = {"intro": "\n".join(intro), "body": "\n".join(body)}
    parts["width"] = "minmax(64px, 1fr)" if live else "max-content"
    parts["figure"] = "auto" if live else "min-content"
    text = PAGE.format(heading=html.escape(heading), columns=columns, **parts)
    return text.encode("utf-8", "replace").decode()  # file names may not be valid UTF-8


def _chip(color: Color | None, text: str) -> str:
    code, line = "#{:02x}{:02x}{:02x}".format(*(color or STRIPE)), "dotted" if color is None else "solid"
    return f'<span style="border-left: 14px {line} {code}">&nbsp;{html.escape(text)}</span>&ensp;'


def table(rows: Mapping[str, str]) -> str:
    """An HTML table of names and values, for notebooks."""
    left = 'style="text-align: left"'
    cells = (["<br>".join(html.escape(printable(line)) for line in x.split("\n")) for x in row] for row in rows.items())
    lines = (f"<tr><th {left}>{name}</th><td {left}>{text}</td></tr>" for name, text in cells)
    return f"<table>{''.join(lines)}</table>"


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
    """The text in ASCII, which the font has: accents are left out, and "?" replaces other characters."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return printable(plain).encode("ascii", "replace").decode()


def fitting(text: str, face: Any, width: float, *, middle: bool = False) -> str:
    """Shorten the text to at most ``width`` pixels, at the end or in the ``middle``."""
    text = _cut(drawable(text), width)
    if len(text) < 3 or face.getlength(text) <= width:
        return text

    def shortened(keep: int) -> str:
        behind = keep - keep // 2 if middle else 0
        return f"{text[: keep - behind]}...{text[len(text) - behind :]}"

    longer = range(3, len(text))  # numbers of characters to keep; at least 2 are kept
    return shortened(2 + bisect.bisect(longer, width, key=lambda keep: face.getlength(shortened(keep))))


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
