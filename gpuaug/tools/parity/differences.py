"""What `gpuaug parity` found: the numbers and the verdict of every comparison, and notes."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuaug.targets.batch import BatchTargets

HEADINGS = {  # by stage, in the order of the table
    "decode": "decode, on the same bytes",
    "resize": "crop and resize, on the same decoded image",
    "reduced": "decode.reduced, which decodes at a smaller size if the crop allows this",
    "operation": "each operation of the recipe with its random parameters, on the same crop",
    "normalize": "normalize, on the same crop",
    "mix": "mix, on one batch of the same crops",
    "all": "everything, from the bytes to the normalized view",
    "targets": "masks and boxes, from the same input; boxes in pixels",
}
EPOCHS = 32  # epochs to try until an operation is applied to enough samples
# Limits of the verdicts. EQUAL, LEVEL and CLOSE are in levels, for images.
EQUAL, LEVEL = 0.05, 1.001  # EQUAL: above the rounding of float32. LEVEL: one level plus the rounding of float32
CLOSE = 4.0  # enough for eight operations in uint8, because each truncation loses half a level on average
SAME_BOX, NEAR_BOX = 0.01, 0.5  # pixels, for boxes. SAME_BOX: above the rounding of float32
TIES = 0.002  # share of the mask pixels that rounding may change: at edges, or where two pixels are equally near

Image = NDArray[Any]


@dataclass(eq=False)
class Sample:
    """One sample: its views after the recipe's crop, made by gpuaug (ours) and by Pillow (theirs)."""

    index: int
    key: str
    ours: dict[str, Image] = field(default_factory=dict)  # view name to uint8 [H, W, 3]
    theirs: dict[str, Image] = field(default_factory=dict)
    targets: BatchTargets | None = None  # on the CPU, in pixels of the upright image


@dataclass(frozen=True, eq=False)
class Worst:
    """The image in which a comparison found its largest difference, and the position of this difference."""

    key: str
    index: int
    epoch: int | None  # None if the stage has no random parameters
    y: int
    x: int
    ours: Image  # float32 [H, W, 3] in levels
    theirs: Image
    what: str  # the operation with its parameters


@dataclass(eq=False)
class Difference:
    """One step, compared over all images. Differences of images are in levels of 1/255, those of boxes in pixels."""

    stage: str  # a key of HEADINGS
    name: str  # for an operation: its key in the recipe; for a random choice: `key: alternative`
    reference: str  # the implementation that we compare with
    view: str = ""  # name of the view in a MultiView
    kind: str = ""  # in the stage `targets`: masks or boxes
    why: str = ""  # cause of the difference; "" if there is none
    images: int = 0
    count: int = 0  # pixels or boxes
    largest: float = 0.0
    mean: float = 0.0  # of the absolute differences
    largest_mean: float = 0.0  # the largest mean of one image
    bias: float = 0.0  # mean of ours minus theirs
    off: float = 0.0  # share of pixels above LEVEL, of boxes above NEAR_BOX, or of unequal mask pixels
    worst: Worst | str | None = None  # in the stage `targets`: the key of the sample

    @property
    def verdict(self) -> str:
        """How near the two sides are: ``equal``, ``rounding``, ``close`` or ``other``."""
        if self.kind == "boxes":
            return "equal" if self.largest <= SAME_BOX else "close" if self.largest <= NEAR_BOX else "other"
        if self.kind == "masks":
            limits = (("equal", 0.0), ("rounding", TIES), ("close", 0.01))
            return next((name for name, limit in limits if self.off <= limit), "other")
        if self.largest <= EQUAL:
            return "equal"
        if self.largest <= LEVEL or (self.off <= 0.01 and self.mean <= 1):
            return "rounding"
        return "close" if self.mean <= CLOSE else "other"

    @property
    def title(self) -> str:
        return ", ".join(filter(None, (self.name, self.view, self.kind)))

    @property
    def numbers(self) -> str:
        if self.kind:
            sizes = f"{self.largest:8.3f} {self.mean:8.3f}" if self.kind == "boxes" else " " * 17
            return f"{sizes} {'':8} {self.off:10.3%}"
        return f"{self.largest:8.2f} {self.mean:8.3f} {self.bias:+8.3f} {self.off:10.3%}"

    def add(self, ours: Image, theirs: Image, sample: Sample, *, epoch: int | None = None, what: str = "") -> None:
        """Add the comparison of one more image. Both sides are [H, W, 3] in levels."""
        ours, theirs = ours.astype(np.float32), theirs.astype(np.float32)
        gap = ours - theirs
        size, mean = np.abs(gap).max(axis=2), float(np.abs(gap).mean(dtype=np.float64))
        if self.worst is None or size.max() > self.largest:
            y, x = (int(n) for n in np.unravel_index(size.argmax(), size.shape))
            self.worst = Worst(sample.key, sample.index, epoch, y, x, ours, theirs, what)
        self.largest = max(self.largest, float(size.max()))
        self._include(size > LEVEL, mean=mean, bias=float(gap.mean(dtype=np.float64)))

    def add_targets(self, gaps: NDArray[Any], key: str) -> None:
        """Add one more image. ``gaps``: each box's largest difference in pixels, or whether each mask pixel differs."""
        largest = float(gaps.max(initial=0)) if self.kind == "boxes" else 0.0
        mean = float(gaps.mean()) if gaps.size else 0.0
        if largest > self.largest or (self.kind == "masks" and mean > self.largest_mean):
            self.worst = key
        self.largest = max(self.largest, largest)
        self._include(gaps > NEAR_BOX, mean=mean)

    def _include(self, off: NDArray[np.bool_], **means: float) -> None:
        """Include one more image: whether each pixel or box is off, and means over these."""
        self.images, self.count = self.images + 1, self.count + off.size
        self.largest_mean = max(self.largest_mean, means["mean"])
        for name, mean in {"off": np.count_nonzero(off) / max(1, off.size), **means}.items():
            before = getattr(self, name)
            setattr(self, name, before + (mean - before) * off.size / max(1, self.count))

    def plain(self) -> dict[str, Any]:
        """The fields for JSON. Of the worst image, only the worst pixel."""
        values = {**vars(self), "verdict": self.verdict}
        if isinstance(w := self.worst, Worst):
            values["worst"] = {**vars(w), "ours": w.ours[w.y, w.x].tolist(), "theirs": w.theirs[w.y, w.x].tolist()}
        return values


@dataclass(eq=False)
class Parity:
    """The result of a comparison."""

    torchvision: str  # its version
    samples: int = 0  # number of compared images
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what could not be compared, and other remarks

    @property
    def targets(self) -> list[Difference]:
        """The comparisons of masks and boxes."""
        return [d for d in self.differences if d.stage == "targets"]

    @property
    def nearest(self) -> list[Difference]:
        """For each step, the comparison with the smallest mean difference. No targets."""
        best: dict[tuple[str, str], Difference] = {}
        for d in sorted(self.differences, key=lambda d: d.mean):
            best.setdefault((d.stage, d.title), d)
        return [d for d in self.differences if d.stage != "targets" and best[d.stage, d.title] is d]

    def at(self, stage: str, name: str, reference: str, why: str = "", *, view: str = "", kind: str = "") -> Difference:
        """Return the comparison with these names. Create it if it is missing."""
        names = stage, name, reference, view, kind
        for d in self.differences:
            if (d.stage, d.name, d.reference, d.view, d.kind) == names:
                return d
        self.differences.append(Difference(*names, why))
        return self.differences[-1]

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def lines(self) -> list[str]:
        """The lines to print: for each stage a table and causes of differences, then the notes."""
        lines = [f"{self.samples} images; differences in levels of 1/255; torchvision {self.torchvision}"]
        for stage, heading in HEADINGS.items():
            if not (differences := [d for d in self.differences if d.stage == stage]):
                continue
            wide = max(24, *(len(d.title) for d in self.differences))
            refer = max(9, *(len(d.reference) for d in self.differences))
            columns = f"{'largest':>8} {'mean':>8} {'bias':>8} {'differ' if stage == 'targets' else '> 1 level':>10}"
            lines += ["", f"{heading}:", f"  {'':{wide}}  {'against':{refer}}  {columns}  verdict"]
            for d in differences:
                verdict = "DIFFERENT" if d.verdict == "other" else d.verdict
                lines.append(f"  {d.title:{wide}}  {d.reference:{refer}}  {d.numbers}  {verdict}")
            for why in dict.fromkeys(d.why for d in differences if d.why):
                names = ", ".join(dict.fromkeys(d.name for d in differences if d.why == why))
                lines += textwrap.wrap(f"{names}: {why}.", 112, initial_indent="    ", subsequent_indent="    ")
        return [*lines, *([""] if self.notes else []), *(f"note: {note}" for note in self.notes), ""]
