"""`gpuaug parity`: our pixels beside Pillow's and torchvision's, as a table and a picture of the worst cases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from tqdm import tqdm

from gpuaug import checks
from gpuaug.decode.decoder import Decode
from gpuaug.errors import ConfigError
from gpuaug.source.materialized import MaterializedSource
from gpuaug.tools.parity.compare import Difference, Parity, Worst, compare, summary
from gpuaug.tools.report import Report, png, printable, written
from gpuaug.tools.request import Request
from gpuaug.tools.samples import chosen, indices_of
from gpuaug.tools.sheet import FAINT, INK, PAPER, fitting, font, scaled, wrapped

MARK = (230, 57, 70)
CELL, GAP, MARGIN = 224, 10, 24
ZOOM = 15  # pixels around the worst one, shown large
STEPS = (1, 2, 4, 8, 16, 32, 64, 128)  # how much a difference is amplified
WORDS = {"equal": "equal", "rounding": "rounding", "close": "close", "other": "DIFFERENT"}
HEADINGS = {
    "decode": "decode, on the same bytes",
    "resize": "crop and resize, on the same decoded image",
    "operation": "each operation of the recipe as it is drawn, on the same crop",
    "normalize": "normalize, on the same crop",
    "mix": "mix, on the same crops as one batch",
    "all": "everything, from the bytes to the normalized view",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to compare; the keys of ``conf/gpuaug/command/parity.yaml``, which says what they mean."""

    out: str = "parity.png"
    indices: Any = None
    samples: int = 8
    epoch: int = 0
    rows: int = 6
    json: str | None = None

    def __post_init__(self) -> None:
        for name, low in (("samples", 1), ("epoch", 0), ("rows", 1)):
            checks.whole_number(name, getattr(self, name), low)
        object.__setattr__(self, "indices", indices_of(self.indices))
        checks.text("out", self.out)
        checks.text("json", self.json, optional=True)


def main(request: Request) -> int:
    """Print the table and write the picture."""
    settings = Settings(**request.settings())
    out = png(settings.out, "out")
    report = Report(file=settings.json)
    config = request.loader()
    decode: Decode = request.build(config.decode) if config.get("decode") is not None else Decode()
    with request.build(config, num_workers=0, prefetch=0) as loader:  # neither changes a pixel
        if isinstance(loader.source, MaterializedSource):
            raise ConfigError(
                "`source` must have encoded images or packed pixels. Found: materialized epochs, which are decoded and "
                "augmented already. Compare what they were made of: source=folder source.root=DIR."
            )
        indices = chosen(loader.source, settings.indices, count=settings.samples)
        parity = compare(loader, decode, indices=indices, epoch=settings.epoch, progress=_progress)
    values = parity.plain()
    for line in table(parity):
        print(printable(line))
    if parity.samples:
        picture = page(parity, rows=settings.rows)
        with written(out, "out"):
            picture.save(out, "PNG", optimize=True)
        report.add("picture", str(out), f"{out} ({picture.width} x {picture.height})")
    print(f"\n{_folded(values['summary'], 110, '')}", flush=True)
    report.values |= {"indices": indices, **values}
    report.write()
    if not parity.samples:
        raise ConfigError(f"none of the samples {indices[:5]} can be decoded. Choose others with `indices`.")
    return 0


def table(parity: Parity) -> list[str]:
    """What is printed: a line for each comparison, why it differs, and the notes."""
    wide = max([24, *(len(d.title) for d in parity.differences)])
    refer = max([9, *(len(d.reference) for d in parity.differences)])
    lines = [f"{parity.samples} images; differences in levels of 1/255; torchvision {parity.torchvision}"]
    head = f"  {'':{wide}}  {'beside':{refer}}  {'largest':>8} {'mean':>8} {'bias':>8} {'> 1 level':>10}  verdict"
    for stage, heading in HEADINGS.items():
        found = [d for d in parity.differences if d.stage == stage]
        if not found:
            continue
        lines += ["", f"{heading}:", head]
        for n, d in enumerate(found):
            name = d.title if n == 0 or found[n - 1].title != d.title else ""
            lines.append(
                f"  {name:{wide}}  {d.reference:{refer}}  {d.largest:8.2f} {d.mean:8.3f} {d.bias:+8.3f} {d.off:10.3%}  "
                f"{WORDS[d.verdict]}"
            )
        for why in dict.fromkeys(d.why for d in found if d.why and not d.step):
            names = dict.fromkeys(d.name for d in found if d.why == why and not d.step)
            lines.append(_folded(f"{', '.join(names)}: {why}.", 112, "    "))
    return [*lines, *([""] if parity.notes else []), *(f"note: {note}" for note in parity.notes), ""]


def page(parity: Parity, *, rows: int) -> Image.Image:
    """The worst cases, one a row: ours, theirs, the difference amplified, and the worst place of both enlarged.

    Args:
        parity: what was found.
        rows: at most so many; the largest differences first, each operation once.
    """
    cases = worst_cases(parity, rows)
    big, bold, small = map(font, (24, 16, 13))
    columns = ("ours", "theirs", "difference", "ours enlarged", "theirs enlarged")
    width = 2 * MARGIN + len(columns) * CELL + (len(columns) - 1) * GAP
    text = wrapped(summary(parity), small, width - 2 * MARGIN)
    top = MARGIN + 40 + 19 * len(text) + 2 * GAP
    heights = [80 + max(60, _fit(worst.ours.shape)[1]) + 3 * GAP for _, worst in cases]
    sheet = Image.new("RGB", (width, top + sum(heights) + MARGIN), PAPER)
    pen = ImageDraw.Draw(sheet)
    pen.text((MARGIN, MARGIN - 6), f"Where pixels differ most: {parity.samples} images", INK, big)
    for n, line in enumerate(text):
        pen.text((MARGIN, MARGIN + 34 + 19 * n), line, FAINT, small)
    y = top
    for (difference, worst), height in zip(cases, heights, strict=True):
        pen.line((MARGIN, y - GAP, width - MARGIN, y - GAP), (222, 222, 226))
        title = f"{difference.title}, beside {difference.reference}"
        numbers = (
            f"largest {difference.largest:.2f}, mean {difference.mean:.3f} levels, {difference.off:.2%} of the pixels "
            "off by more than one"
        )
        pen.text((MARGIN, y), title, INK, bold)
        pen.text((MARGIN + pen.textlength(title, bold) + 14, y + 2), numbers, MARK, small)
        pen.text((MARGIN, y + 22), fitting(_caption(worst), small, width - 2 * MARGIN), FAINT, small)
        pen.text((MARGIN, y + 40), fitting(difference.why, small, width - 2 * MARGIN), FAINT, small)
        amplify = _amplification(worst)
        shown = pictures(worst, amplify)
        x = MARGIN
        for name, picture in zip(columns, shown, strict=True):
            label = f"difference x {amplify}, signed" if name == "difference" else name
            if name.endswith("enlarged"):
                label += f": {_values(worst.ours if name.startswith('ours') else worst.theirs, worst)}"
            pen.text((x, y + 59), fitting(label, small, CELL), INK, small)
            sheet.paste(picture, (x, y + 78))
            x += CELL + GAP
        for n in range(3):  # where the enlarged part is
            _frame(pen, worst, MARGIN + n * (CELL + GAP), y + 78)
        y += height
    return sheet


def worst_cases(parity: Parity, rows: int) -> list[tuple[Difference, Worst]]:
    """The comparisons that are not equal, each (stage, name) once, the largest difference first; one at least."""
    best: dict[tuple[str, str], Difference] = {}
    for d in parity.differences:
        at = d.stage, d.title
        if d.worst is not None and not d.step and (at not in best or d.mean < best[at].mean):
            best[at] = d  # of torchvision's two arithmetics the nearer one
    ordered = sorted(best.values(), key=lambda d: (d.largest, d.mean), reverse=True)
    ordered = [d for d in ordered if d.verdict != "equal"] or ordered[:1]
    return [(d, d.worst) for d in ordered[:rows] if d.worst is not None]


def pictures(worst: Worst, amplify: int) -> list[Image.Image]:
    """Ours, theirs, the signed difference around gray times ``amplify``, and both enlarged around the worst pixel."""
    size = _fit(worst.ours.shape)
    images = [_picture(v) for v in (worst.ours, worst.theirs)]
    gap = _picture(128 + amplify * (worst.ours - worst.theirs))
    whole = [scaled(image, size) for image in (*images, gap)]
    left, up, right, down = _window(worst)
    side = min(CELL, max(size[1], 60))
    near = [i.crop((left, up, right, down)).resize((side, side), Image.Resampling.NEAREST) for i in images]
    return [*whole, *near]


def _picture(levels: NDArray[Any]) -> Image.Image:
    return Image.fromarray(np.rint(np.clip(levels, 0, 255)).astype(np.uint8))


def _fit(shape: tuple[int, ...]) -> tuple[int, int]:
    """Width and height of a picture in its cell."""
    scale = CELL / max(shape[:2])
    return max(1, round(shape[1] * scale)), max(1, round(shape[0] * scale))


def _window(worst: Worst) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of the part that is enlarged: inside the image where that is large enough."""
    height, width = worst.ours.shape[:2]
    left = max(0, min(worst.x - ZOOM // 2, width - ZOOM))
    top = max(0, min(worst.y - ZOOM // 2, height - ZOOM))
    return left, top, left + min(ZOOM, width), top + min(ZOOM, height)


def _frame(pen: ImageDraw.ImageDraw, worst: Worst, x: int, y: int) -> None:
    scale = CELL / max(worst.ours.shape[:2])
    left, top, right, bottom = (v * scale for v in _window(worst))
    pen.rectangle((x + left - 1, y + top - 1, x + right, y + bottom), outline=MARK, width=2)


def _amplification(worst: Worst) -> int:
    """So much that the largest difference stays within half of the range."""
    largest = float(np.abs(worst.ours - worst.theirs).max())
    return max((k for k in STEPS if k * largest <= 128), default=1)


def _caption(worst: Worst) -> str:
    drawn = "" if worst.epoch is None else f", epoch {worst.epoch}"
    what = f"; {worst.what}" if worst.what else ""
    return f"sample {worst.index}, {worst.key}{drawn}{what}; largest at x {worst.x}, y {worst.y}"


def _values(levels: NDArray[Any], worst: Worst) -> str:
    return " ".join(f"{round(float(v), 1):g}" for v in levels[worst.y, worst.x])


def _progress(items: Iterable[Any], what: str) -> Iterable[Any]:
    return tqdm(items, desc=what, leave=False, disable=None)


def _folded(text: str, width: int, indent: str) -> str:
    import textwrap

    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent)
