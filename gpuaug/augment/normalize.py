"""Normalization by mean and standard deviation per channel, the last step of a recipe."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from gpuaug.errors import ConfigError


class Normalize(nn.Module):
    """Computes ``(x - mean) / std`` per channel, for float32 images [B, 3, H, W] in 0..1.

    The attributes ``mean`` and ``std`` are tuples, rounded to float32. They do not change if the module is cast.

    Args:
        mean: three values, for pixels in 0..1.
        std: three positive values, for pixels in 0..1.

    >>> Normalize(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))(torch.ones(1, 3, 1, 1)).flatten()
    tensor([2., 2., 2.])
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        for name, given in (("mean", mean), ("std", std)):
            values = given.tolist() if isinstance(given, Tensor | np.ndarray) else given
            numbers = isinstance(values, Sequence) and all(
                isinstance(v, int | float | np.integer | np.floating) and not isinstance(v, bool) and math.isfinite(v)
                for v in values
            )
            if not numbers or len(values) != 3:
                raise ConfigError(f"`augment.normalize.{name}` must be three numbers, for R, G, B. Found: {given!r}.")
            if name == "std" and min(values) <= 0:
                raise ConfigError(f"`augment.normalize.std` must be positive. Found: {given!r}.")
            if max(abs(v) for v in values) > 2:
                raise ConfigError(
                    f"`augment.normalize.{name}` must be given for pixel values in 0..1. Found: {given!r}. "
                    "If the values are for 0..255, divide by 255."
                )
            setattr(self, name, tuple(np.array(values, dtype=np.float32).tolist()))

    def _constants(self, images: Tensor) -> list[Tensor]:
        """Mean and std, float32 [3, 1, 1], on the device of ``images``."""
        both = torch.tensor([self.mean, self.std], dtype=torch.float32, device="cpu").view(2, 3, 1, 1)
        return list(both.to(images.device, non_blocking=True))

    def forward(self, images: Tensor) -> Tensor:
        """Normalize float32 ``images`` [B, 3, H, W] in 0..1."""
        mean, std = self._constants(images)
        return (images - mean).div_(std)

    def inverse(self, images: Tensor) -> Tensor:
        """Undo the normalization: float32 ``images * std + mean``. The result is not clamped.

        Args:
            images: normalized images of any float dtype, [B, 3, H, W] or [3, H, W].

        >>> normalize = Normalize(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
        >>> normalize.inverse(torch.tensor([2.0, 0.0, -2.0]).view(3, 1, 1)).flatten()
        tensor([1.0000, 0.5000, 0.0000])
        """
        if not isinstance(images, Tensor) or not images.is_floating_point() or images.shape[-3:-2] != (3,):
            found = f"{images.dtype} {list(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
            raise ConfigError(
                f"`images` must be a float tensor [B, 3, H, W] or [3, H, W]. Found: {found}. "
                "If they come from several views, pass one view at a time."
            )
        mean, std = self._constants(images)
        return images.float() * std + mean

    def extra_repr(self) -> str:
        """Mean and standard deviation."""
        return f"mean={self.mean}, std={self.std}"
