"""Photometric distortion as in SSD, computed by Kornia's modules."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from torch import nn

from gpuaug import checks
from gpuaug.augment.parameters import Alternatives, Prepared, RecipeOp, Size
from gpuaug.random.keyed import Float, Int, scale

_GATES = 6  # uniforms: five for the gates of the changes, one for whether contrast precedes saturation
_NAMES = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")


class PhotometricDistort(RecipeOp):
    """Changes brightness, contrast, saturation, hue and the order of channels, independently of each other.

    The order is: brightness, contrast (in half of the samples), saturation, hue, contrast (in the other half),
    channels. Pixels are clamped to 0..1 after each change. ``style`` selects the formulas:

    - ``torchvision``: torchvision's ``RandomPhotometricDistort``. Brightness multiplies, contrast blends with the mean
      gray of the image, and saturation blends with the gray of the pixel.
    - ``mmseg``: mmsegmentation's ``PhotoMetricDistortion`` on floats. Brightness is added, contrast multiplies, and
      saturation multiplies the S of HSV. The hue is not rounded to steps of 1/180. For the version of mmdetection, use
      ``hue=(-0.05, 0.05), channels=0.5``.

    Use the class as an entry of a recipe's ``ops``.

    Args:
        style: ``torchvision`` or ``mmseg``.
        brightness: range of the factor, >= 0. For ``mmseg``, range of the added value, within -1..1. None:
            (0.875, 1.125), or (-32/255, 32/255) for ``mmseg``.
        contrast: range of the factor, >= 0.
        saturation: range of the factor, >= 0.
        hue: range of the shift in turns, within -0.5..0.5. None: (-0.05, 0.05), or (-0.1, 0.1) for ``mmseg``.
        channels: probability of a random order of channels. None: ``p``, or 0 for ``mmseg``.
        p: probability of each of the other changes.

    >>> PhotometricDistort(style="mmseg").hue
    (-0.1, 0.1)
    """

    def __init__(
        self,
        *,
        style: str = "torchvision",
        brightness: Sequence[float] | None = None,
        contrast: Sequence[float] = (0.5, 1.5),
        saturation: Sequence[float] = (0.5, 1.5),
        hue: Sequence[float] | None = None,
        channels: float | None = None,
        p: float = 0.5,
    ) -> None:
        super().__init__()
        self.style = checks.one_of("style", style, ("torchvision", "mmseg"))
        added = style == "mmseg"
        brightness = ((-32 / 255, 32 / 255) if added else (0.875, 1.125)) if brightness is None else brightness
        self.brightness = checks.pair("brightness", brightness, *((-1, 1) if added else (0,)))
        self.contrast = checks.pair("contrast", contrast, 0)
        self.saturation = checks.pair("saturation", saturation, 0)
        self.hue = checks.pair("hue", ((-0.1, 0.1) if added else (-0.05, 0.05)) if hue is None else hue, -0.5, 0.5)
        self.p = float(checks.number("p", p, 0, 1))
        self.channels = float(checks.number("channels", (0 if added else p) if channels is None else channels, 0, 1))

    def prepare(self, name: str) -> Prepared:
        import kornia.augmentation as K

        # `_drawn` replaces these ranges of 0.5. The fused program skips changes with a range of 0.
        three: tuple[nn.Module, ...] = tuple(K.ColorJitter(0.5, 0.5, 0.5, p=1.0, order=(k,)) for k in range(3))
        if self.style == "mmseg":
            three = K.RandomBrightness(p=1.0), K.RandomContrast(p=1.0), K.RandomSaturation(p=1.0)
        brightness, contrast, saturation = three
        hue, channels = K.RandomHue((-0.5, 0.5), p=1.0), K.RandomChannelShuffle(p=1.0)
        modules = (brightness, contrast, saturation, hue, contrast, channels)
        rule = partial(
            _drawn,
            ranges=(self.brightness, self.contrast, self.saturation, self.hue),
            gates=np.array([self.p, self.p, self.p, self.p, self.channels], dtype=np.float32),
            shift=np.float32(self.style == "mmseg"),  # because Kornia's RandomBrightness adds `factor - 1`
        )
        return Prepared(name, self, tuple((module,) for module in modules), _GATES + 7, rule)


def _drawn(
    u: Float, size: Size, *, ranges: Sequence[tuple[float, float]], gates: Float, shift: np.float32
) -> tuple[Int, tuple[Alternatives, ...]]:
    on, early = u[:, :5] < gates, u[:, 5] < np.float32(0.5)
    slots = (on[:, 0], on[:, 1] & early, on[:, 2], on[:, 3], on[:, 1] & ~early, on[:, 4])
    values = [scale(u[:, _GATES + k], *ranges[k]) for k in range(4)]
    values[0] = values[0] + shift
    factors = (dict(zip(_NAMES, values, strict=True)),)
    channels = ({"channels": np.argsort(u[:, _GATES + 4 :], axis=1, kind="stable")},)
    return np.stack(slots, axis=1).astype(np.int64) - 1, (factors,) * 5 + (channels,)
