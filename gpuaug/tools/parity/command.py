"""`gpuaug parity`: compares gpuaug's pixels with those of Pillow, torchvision and timm on a user's images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpuaug import checks
from gpuaug.display.sheet import printable
from gpuaug.errors import ConfigError
from gpuaug.tools.parity.compare import BARE, compare
from gpuaug.tools.parity.differences import Parity
from gpuaug.tools.preview.drawing import check_samples, chosen
from gpuaug.tools.report import Report
from gpuaug.tools.request import Keys, Request


@dataclass(frozen=True, kw_only=True)
class Settings(Keys):
    """The keys of `gpuaug parity`."""

    samples: Any = 8
    epoch: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_samples(self.samples)
        checks.whole_number("epoch", self.epoch, 0)


def main(request: Request) -> int:
    settings = Settings(**request.settings())
    report = Report(file=settings.json)
    with request.build(request.loader(), num_workers=0, prefetch=0) as loader:  # workers would not change the pixels
        if loader.decode.pixels == "raw":
            raise ConfigError("`decode.pixels` must be rgb8, because Pillow and torchvision have no other. Found: raw.")
        if loader.source.augmented_by:
            raise ConfigError(
                "`source` must have images to augment. Found: a packed source of augmented images. Compare the "
                "original images: source=folder source.root=DIR."
            )
        indices = chosen(loader.source, settings.samples, count=8)
        parity = compare(loader, indices=indices, epoch=settings.epoch)
    for line in parity.lines():
        print(printable(line))
    said = summary(parity)
    print(said, flush=True)
    differences = [{**vars(d), "verdict": d.verdict} for d in parity.differences]
    report.values |= {"numbers": indices, **vars(parity), "summary": said, "differences": differences}
    report.write()
    if not parity.samples:
        raise ConfigError(f"no sample can be decoded. Tried: {indices[:5]}. Choose others with `samples`.")
    return 0


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
    rounding = "This is rounding. Expect the same accuracy. To confirm it, evaluate once with augment=eval."
    more = "This is more than rounding. Evaluate the model with augment=eval before you rely on it."
    text += rounding if first.mean <= 1 and first.off <= 0.02 else more
    odd = [
        f"{name} of {policy}" for policy, of in parity.choices.items() for name, row in of.items() if not row["equal"]
    ]
    return text + f" The choices differ: {'; '.join(odd)}." * bool(odd)
