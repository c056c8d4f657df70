"""`gpuaug parity`: our pixels beside Pillow's and torchvision's, as a table and a picture of the worst cases."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from gpuaug import checks
from gpuaug.decode.decoder import Decode
from gpuaug.errors import ConfigError
from gpuaug.source.materialized import MaterializedSource
from gpuaug.tools.parity.compare import Difference, Parity, compare, nearest, summary
from gpuaug.tools.report import Report, png, printable, written
from gpuaug.tools.request import Request
from gpuaug.tools.samples import chosen, indices_of
from gpuaug.tools.sheet import Cell, Row, scaled, sheet

CELL = 280  # pixels of a picture's longer side
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
        parity = compare(loader, decode, indices=indices, epoch=settings.epoch)
    for line in table(parity):
        print(printable(line))
    if parity.samples:
        rows = [row(difference) for difference in worst_cases(parity, settings.rows)]
        heading = f"Where pixels differ most: {parity.samples} images"
        picture = sheet(rows, heading=heading, lines=[summary(parity)])
        with written(out, "out"):
            picture.save(out, "PNG", optimize=True)
        report.add("picture", str(out), f"{out} ({picture.width} x {picture.height})")
    print(f"\n{textwrap.fill(summary(parity), 110)}", flush=True)
    report.values |= {"indices": indices, **parity.plain()}
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
        differences = [d for d in parity.differences if d.stage == stage]
        if differences:
            lines += ["", f"{heading}:", head]
        for d in differences:
            lines.append(
                f"  {d.title:{wide}}  {d.reference:{refer}}  {d.largest:8.2f} {d.mean:8.3f} {d.bias:+8.3f} "
                f"{d.off:10.3%}  {'DIFFERENT' if d.verdict == 'other' else d.verdict}"
            )
        for why in dict.fromkeys(d.why for d in differences if d.why):
            names = dict.fromkeys(d.name for d in differences if d.why == why)
            lines += textwrap.wrap(f"{', '.join(names)}: {why}.", 112, initial_indent="    ", subsequent_indent="    ")
    return [*lines, *([""] if parity.notes else []), *(f"note: {note}" for note in parity.notes), ""]


def worst_cases(parity: Parity, rows: int) -> list[Difference]:
    """The comparisons that are not equal, each once, the largest difference first; one at least."""
    ordered = sorted(nearest(parity), key=lambda d: (d.largest, d.mean), reverse=True)
    return ([d for d in ordered if d.verdict != "equal"] or ordered[:1])[:rows]


def row(difference: Difference) -> Row:
    """The worst image of a comparison: ours, theirs, and the signed difference around gray, amplified."""
    worst = difference.worst
    assert worst is not None  # every comparison has an image
    amplify = next((k for k in (128, 64, 32, 16, 8, 4, 2) if k * difference.largest <= 128), 1)
    notes = [
        f"beside {difference.reference}",
        f"largest {difference.largest:.2f}, mean {difference.mean:.3f} levels, {difference.off:.2%} of the pixels off "
        "by more than one",
        f"sample {worst.index}, {worst.key}{'' if worst.epoch is None else f', epoch {worst.epoch}'}",
        f"{worst.what or difference.name}; largest at x {worst.x}, y {worst.y}",
        difference.why,
    ]
    gap = 128 + amplify * (worst.ours - worst.theirs)
    captions = ("ours", "theirs", f"difference x {amplify}, signed")
    pictures = zip((worst.ours, worst.theirs, gap), captions, strict=True)
    return Row(difference.title, notes, [Cell(_picture(levels), caption) for levels, caption in pictures])


def _picture(levels: NDArray[Any]) -> Image.Image:
    image = Image.fromarray(np.rint(np.clip(levels, 0, 255)).astype(np.uint8))
    return scaled(image, CELL / max(image.size))
