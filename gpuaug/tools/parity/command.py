"""`gpuaug parity`: compares gpuaug's pixels with those of Pillow and torchvision on a user's images."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image
from numpy.typing import NDArray

from gpuaug import checks
from gpuaug.display.sheet import Cell, Row, printable, scaled, sheet
from gpuaug.errors import ConfigError
from gpuaug.tools.parity import targets
from gpuaug.tools.parity.differences import Difference, Parity, Worst
from gpuaug.tools.parity.pixels import BARE, UINT8, compare
from gpuaug.tools.preview.drawing import chosen, indices_of
from gpuaug.tools.report import Report, png, written
from gpuaug.tools.request import Keys, Request

CELL = 280  # pixels of a picture's longer side


@dataclass(frozen=True, kw_only=True)
class Settings(Keys):
    """The keys of `gpuaug parity`."""

    out: str = "parity.png"
    indices: Any = None
    samples: int = 8
    epoch: int = 0
    rows: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, low in (("samples", 1), ("epoch", 0), ("rows", 1)):
            checks.whole_number(name, getattr(self, name), low)
        object.__setattr__(self, "indices", indices_of(self.indices))


def main(request: Request) -> int:
    settings = Settings(**request.settings())
    out = png(settings.out, "out")
    report = Report(file=settings.json)
    with request.build(request.loader(), num_workers=0, prefetch=0) as loader:  # workers would not change the pixels
        if getattr(loader.source, "augmented_by", None):
            raise ConfigError(
                "`source` must have images to augment. Found: a packed source of augmented images. Compare "
                "the original images: source=folder source.root=DIR."
            )
        indices = chosen(loader.source, settings.indices, count=settings.samples)
        parity = compare(loader, indices=indices, epoch=settings.epoch)
    for line in parity.lines():
        print(printable(line))
    said = summary(parity)
    if parity.samples:
        rows = [row(difference) for difference in worst_cases(parity, settings.rows)]
        picture = sheet(rows, heading=f"Largest pixel differences: {parity.samples} images", lines=[said])
        with written(out, "out"):
            picture.save(out, "PNG", optimize=True)
        report.add("picture", str(out), f"{out} ({picture.width} x {picture.height})")
    print(f"\n{textwrap.fill(said, 110)}", flush=True)
    images = [d.plain() for d in parity.differences if d.stage != "targets"]
    lists = {"differences": images, "targets": [d.plain() for d in parity.targets]}
    report.values |= {"indices": indices, **vars(parity), "summary": said, **lists}
    report.write()
    if not parity.samples:
        raise ConfigError(f"no sample can be decoded. Tried: {indices[:5]}. Choose other samples with `indices`.")
    return 0


def worst_cases(parity: Parity, rows: int) -> list[Difference]:
    """At most ``rows`` unequal comparisons, the largest difference first. If all are equal, one of them."""
    ordered = sorted(parity.nearest, key=lambda d: (d.largest, d.mean), reverse=True)
    return ([d for d in ordered if d.verdict != "equal"] or ordered[:1])[:rows]


def row(difference: Difference) -> Row:
    """The row of a comparison's worst image: ours, theirs, and the amplified difference, gray where both are equal."""
    worst = difference.worst
    assert isinstance(worst, Worst)  # every comparison has at least one image
    amplify = next((k for k in (128, 64, 32, 16, 8, 4, 2) if k * difference.largest <= 128), 1)
    notes = [
        f"against {difference.reference}",
        f"largest {difference.largest:.2f}, mean {difference.mean:.3f} levels, {difference.off:.2%} of the pixels "
        "differ by more than one level",
        f"sample {worst.index}, {worst.key}{'' if worst.epoch is None else f', epoch {worst.epoch}'}",
        f"{worst.what or difference.name}; largest difference at x {worst.x}, y {worst.y}",
        difference.why,
    ]
    gap = 128 + amplify * (worst.ours - worst.theirs)
    captions = ("ours", "theirs", f"difference x {amplify}, signed")
    pictures = zip((worst.ours, worst.theirs, gap), captions, strict=True)
    return Row(difference.title, notes, [Cell(_picture(levels), caption) for levels, caption in pictures])


def _picture(levels: NDArray[Any]) -> PIL.Image.Image:
    image = PIL.Image.fromarray(np.rint(np.clip(levels, 0, 255)).astype(np.uint8))
    return scaled(image, CELL / max(image.size))


def summary(parity: Parity) -> str:
    """A few sentences for users whose model was trained with torchvision's pipeline."""
    first = max((d for d in parity.differences if d.name == BARE), key=lambda d: d.mean, default=None)
    if first is None:
        return "Nothing could be compared."
    text = (
        "For a model that was trained with torchvision's pipeline (Pillow's decode and resize), the inputs from gpuaug "
        f"differ by {first.mean:.3f} levels of 255 on average and by {first.largest:.2f} at most; {first.off:.2%} of "
        "the pixels differ by more than one level. "
    )
    if first.mean <= 1 and first.off <= 0.02:
        text += "This is rounding. Expect the same accuracy. To confirm it, evaluate once with augment=eval."
    else:
        text += "This is more than rounding. Evaluate the model with augment=eval before you rely on it. The table "
        text += "and the picture show which stage causes the difference."
    darker = max((d.bias for d in parity.differences if d.reference == f"Pillow, then {UINT8}"), default=0)
    if darker > 0.75:
        text += f" torchvision's uint8 arithmetic truncates. It makes images up to {darker:.1f} levels darker than "
        text += "torchvision's float arithmetic. gpuaug matches the float arithmetic."
    ops = [d for d in parity.nearest if d.stage == "operation"]
    other = dict.fromkeys(f"`{d.name}`" for d in ops if d.verdict not in ("equal", "rounding"))
    if same := dict.fromkeys(f"`{d.name}`" for d in ops if f"`{d.name}`" not in other):
        text += f" {', '.join(same)} {'match' if len(same) > 1 else 'matches'} torchvision's functions."
    if other:
        text += f" {', '.join(other)} {'differ' if len(other) > 1 else 'differs'} from torchvision's function of the "
        text += "same name. This is fine for training from scratch, but it is not the same recipe."
    return text + targets.summary(parity.targets)
