"""The size of the output, drawn for each step of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuaug import checks
from gpuaug.augment.crop import pair
from gpuaug.augment.parameters import Size
from gpuaug.errors import ConfigError
from gpuaug.random.keyed import Stream, uniforms


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Draws the size of the output for each step, as RT-DETR and YOLOX train. All ranks have the same size in a step.

    The size depends on seed, epoch and the number of the step in the epoch. So a run that resumes with other ranks or
    another number of samples per batch has other sizes from there on. No random number of the recipe changes with the
    size. Outside of steps, as in ``loader[i]`` and in previews, images have the recipe's own size.

    Args:
        choose: sizes (H, W), or ints for squares. Each is equally likely; one that is listed twice, twice as likely.
        hold: number of steps with one size.
        epochs: (first epoch, first epoch without); an end of None: there is none. In other epochs, images have the
            recipe's own size. None: all epochs.
        how: ``crop``: the crop writes the size, so pixels are resized only once. ``resize``: the finished batch is
            resized with its targets, bilinear and without antialiasing, as in YOLOX; masks take the nearest pixel.

    >>> sizes = Sizes(choose=[480, 512, 544])
    >>> [sizes.of(seed=0, epoch=0, step=step) for step in range(3)]
    [(544, 544), (480, 480), (544, 544)]
    """

    choose: Sequence[Any]
    hold: int = 1
    epochs: Sequence[int | None] | None = None
    how: str = "crop"

    def __post_init__(self) -> None:
        if not isinstance(self.choose, Sequence) or isinstance(self.choose, str) or not 0 < len(self.choose) <= 1000:
            raise ConfigError(
                f"`choose` must be a list of 1 to 1000 sizes, such as [480, 512]. Found: {self.choose!r:.99}."
            )
        object.__setattr__(self, "choose", tuple(pair("choose", each) for each in self.choose))
        checks.whole_number("hold", self.hold, 1)
        checks.one_of("how", self.how, ("crop", "resize"))
        if self.epochs is not None:
            object.__setattr__(self, "epochs", checks.interval("epochs", self.epochs))

    def of(self, *, seed: int, epoch: int, step: int) -> Size | None:
        """The size (H, W) of a step; None in epochs without.

        Args:
            seed: of the loader.
            epoch: of the step.
            step: its number in the epoch.
        """
        if not checks.within(self.epochs, epoch):
            return None
        stream = Stream("", -1, "sizes", 1)
        u = uniforms([stream], seed=seed, epoch=epoch, indices=np.array([step // self.hold]))["", -1, "sizes"]
        return self.choose[int(float(u[0, 0]) * len(self.choose))]

    def settings(self) -> dict[str, Any]:
        """The arguments, as JSON."""
        made = {"choose": [list(each) for each in self.choose], "hold": self.hold, "epochs": self.epochs}
        return made if self.how == "crop" else {**made, "how": self.how}
