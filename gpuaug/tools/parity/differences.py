"""What `gpuaug parity` found: the numbers and the verdict of every comparison, and notes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuaug.loader.self_check import LEVEL, is_rounding

STAGES = {  # in the order of the table
    "decode": "decode, on the same bytes",
    "crop": "crop and resize, on the same decoded image",
    "policy": "pixels of policies, with the same choices on the same crop",
    "all": "the whole recipe, from the bytes to the view before its normalization",
}
# Limits of the verdicts, in levels
EQUAL = 0.05  # above the rounding of float32
CLOSE = 4.0  # enough for eight operations in uint8, because each truncation loses half a level on average

Image = NDArray[Any]


@dataclass(eq=False)
class Difference:
    """One step, compared over all images, in levels of 1/255."""

    stage: str  # a key of STAGES
    name: str
    reference: str  # the implementation that we compare with
    view: str = ""  # name of the view in a MultiView
    images: int = 0
    pixels: int = 0
    largest: float = 0.0
    mean: float = 0.0  # of the absolute differences
    off: float = 0.0  # share of the pixels above LEVEL
    worst: str = ""  # key of the sample with the largest difference

    @property
    def verdict(self) -> str:
        """How near the two sides are: ``equal``, ``rounding``, ``close`` or ``DIFFERENT``."""
        if self.largest <= EQUAL:
            return "equal"
        if is_rounding(self.largest, self.mean, self.off):
            return "rounding"
        return "close" if self.mean <= CLOSE else "DIFFERENT"

    @property
    def title(self) -> str:
        return ", ".join(filter(None, (self.name, self.view)))

    def add(self, ours: Image, theirs: Image, key: str) -> None:
        """Add one more image, of the sample ``key``. Both sides are [H, W, 3] in levels."""
        gap = ours.astype(np.float32) - theirs.astype(np.float32)
        size = np.abs(gap).max(axis=2)
        if not self.images or size.max() > self.largest:
            self.largest, self.worst = float(size.max()), key
        self.images, self.pixels = self.images + 1, self.pixels + size.size
        for name, values in {"mean": np.abs(gap), "off": size > LEVEL}.items():
            before, mean = getattr(self, name), float(values.mean(dtype=np.float64))
            setattr(self, name, before + (mean - before) * size.size / self.pixels)


@dataclass(eq=False)
class Parity:
    """The result of a comparison."""

    torchvision: str  # its version
    samples: int = 0  # number of compared images
    turned: int = 0  # those with an EXIF orientation
    differences: list[Difference] = field(default_factory=list)
    choices: dict[str, dict[str, Any]] = field(default_factory=dict)  # for each policy: its compared choices
    notes: list[str] = field(default_factory=list)  # what could not be compared, and other remarks

    def at(self, stage: str, name: str, reference: str, *, view: str = "") -> Difference:
        """Return the comparison with these names. Create it if it is missing."""
        for d in self.differences:
            if (d.stage, d.name, d.reference, d.view) == (stage, name, reference, view):
                return d
        self.differences.append(Difference(stage, name, reference, view))
        return self.differences[-1]

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def lines(self) -> list[str]:
        """The lines to print: for each stage a table, then choices and notes."""
        lines = [f"{self.samples} images; differences in levels of 1/255; torchvision {self.torchvision}"]
        wide, refer = (max((len(getattr(d, k)) for d in self.differences), default=0) for k in ("title", "reference"))
        for stage, heading in STAGES.items():
            columns = f"{'largest':>8} {'mean':>8} {'> 1 level':>10}  verdict"
            rows = [f"  {'':{wide}}  {'against':{refer}}  {columns}"]
            for d in (d for d in self.differences if d.stage == stage):
                numbers = f"{d.largest:8.2f} {d.mean:8.3f} {d.off:10.3%}"
                rows.append(f"  {d.title:{wide}}  {d.reference:{refer}}  {numbers}  {d.verdict}")
            if len(rows) > 1:
                lines += ["", f"{heading}:", *rows]
        for policy, operations in self.choices.items():
            lines += ["", f"choices of {policy}:", f"  {'per image:':>24} ours  theirs  distance of levels  verdict"]
            for name, row in operations.items():
                verdict = "equal" if row["equal"] else "DIFFERENT"
                lines.append(f"  {name:18}{row['ours']:11.3f} {row['theirs']:7.3f} {row['levels']:19.3f}  {verdict}")
        return [*lines, "", *(f"note: {note}" for note in self.notes), *[""] * bool(self.notes)]
