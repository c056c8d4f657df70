"""The page of `gpuaug preview out=FILE.html`: one file with a slider over epochs. It makes no requests.

Views are embedded without loss, so the page shows the exact pixels. Originals only show where the boxes are, and are
embedded as small JPEGs. Names and labels of the data set are escaped.
"""

from __future__ import annotations

import base64
import html
import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image

from gpuaug.tools.samples import Sample

TEMPLATE = Path(__file__).with_name("page.html")
LARGE, WIDE = 224, 320  # CSS pixels of the largest view's and the original's longer side


def page(
    samples: Sequence[Sample],
    *,
    heading: str,
    lines: Sequence[str],
    epochs: Sequence[int],
    views: Sequence[str],
    color: Callable[[int], tuple[int, int, int]],
) -> str:
    """The HTML of the page.

    Args:
        samples: the rows.
        heading, lines: text above them.
        epochs: stops of the slider.
        views: titles of the views.
        color: returns the color of a view's box, by the number of the view.
    """
    largest = max(max(p.size) for s in samples for p in s.pictures)
    scale = LARGE / largest
    colors = ["#{:02x}{:02x}{:02x}".format(*color(n)) for n in range(len(views))]
    data = {"epochs": list(epochs), "samples": [_data(sample, len(views)) for sample in samples]}
    fields = {
        "title": html.escape(f"{heading}: gpuaug preview"),
        "heading": html.escape(heading),
        "lines": "\n".join(f"<p>{html.escape(line)}</p>" for line in lines),
        "last": str(len(epochs) - 1),
        "rows": "\n".join(_row(n, s, views=views, colors=colors, scale=scale) for n, s in enumerate(samples)),
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),  # no `</script>` inside
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fields[match[1]], TEMPLATE.read_text(encoding="utf-8"))


def _data(sample: Sample, count: int) -> dict[str, object]:
    """Pictures and boxes by epoch, then view."""
    starts = range(0, len(sample.pictures), count)
    pictures = [_uri(picture, "WEBP", lossless=True, method=2, exact=True) for picture in sample.pictures]
    return {
        "pictures": [pictures[start : start + count] for start in starts],
        "boxes": [[list(box) for box in sample.boxes[start : start + count]] for start in starts],
    }


def _row(number: int, sample: Sample, *, views: Sequence[str], colors: Sequence[str], scale: float) -> str:
    key = html.escape(_text(sample.key))
    name = html.escape(_text(sample.label)) if sample.label else key
    figures = [f"<figure>{_original(sample, colors)}<figcaption>original</figcaption></figure>"]
    for view, color, picture in zip(views, colors, sample.pictures, strict=False):
        width, height = (max(1, round(side * scale)) for side in picture.size)
        said = html.escape(f"sample {sample.index}{f', {view}' if view else ''}", quote=True)
        figures.append(
            f'<figure><img data-view="{said}" alt="" width="{width}" height="{height}">'
            f'<figcaption style="border-color:{color}">{html.escape(view or "augmented")}</figcaption></figure>'
        )
    return (
        f'<article id="sample-{number}"><h2>{name}</h2><p>{sample.index}: {key}</p>'
        f'<div class="row">\n{chr(10).join(figures)}\n</div></article>'
    )


def _original(sample: Sample, colors: Sequence[str]) -> str:
    if sample.original is None:
        return f'<div class="absent">{html.escape(sample.absent)}</div>'
    image = sample.original.copy()
    scale = min(WIDE / image.width, LARGE / image.height)
    width, height = (max(1, round(side * scale)) for side in image.size)
    image.thumbnail((2 * width, 2 * height))  # sharp on screens of two pixels per CSS pixel
    # the first view on top, as in the PNG
    rects = "".join(f'<rect style="stroke:{color}"/>' for color in colors)
    return (
        f'<div class="original"><img src="{_uri(image, "JPEG", quality=85)}" alt="sample {sample.index}, original" '
        f'width="{width}" height="{height}"><svg viewBox="0 0 {sample.original.width} {sample.original.height}" '
        f'preserveAspectRatio="none" aria-hidden="true">{rects}</svg></div>'
    )


def _uri(image: Image.Image, kind: str, **options: object) -> str:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(stream.getvalue()).decode()}"


def _text(name: str) -> str:
    """Replace bytes that are not UTF-8, which file names may hold."""
    return name.encode("utf-8", "replace").decode()
