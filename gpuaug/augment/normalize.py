"""Normalization by mean and standard deviation per channel, the last step of a recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from gpuaug.errors import ConfigError


class Normalize(nn.Module):
    """Computes ``(x - mean) / std`` per channel, for float32 images [B, 3, H, W] in 0..1.

    ``.to(device)`` moves the buffers ``mean`` and ``std``. They stay float32 even if the module is cast.

    Args:
        mean: three values, for pixels in 0..1.
        std: three positive values, for pixels in 0..1.

    >>> Normalize(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))(torch.ones(1, 3, 1, 1)).flatten()
    tensor([2., 2., 2.])
    """

    mean: Tensor  # float32 [3]
    std: Tensor

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
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32, device="cpu"), persistent=False)
        self.settings = {"mean": self.mean.tolist(), "std": self.std.tolist()}

    def values(self) -> dict[str, list[float]]:
        """Mean and std as lists. On a GPU: the constructor's values, because reading buffers would wait for the GPU."""
        return {k: b.tolist() if (b := getattr(self, k)).device.type == "cpu" else v for k, v in self.settings.items()}

    def forward(self, images: Tensor) -> Tensor:
        """Normalize float32 ``images`` [B, 3, H, W] in 0..1."""
        mean, std = (b.to(images.device, torch.float32).view(3, 1, 1) for b in (self.mean, self.std))
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
        mean, std = (b.to(images.device, torch.float32).view(3, 1, 1) for b in (self.mean, self.std))
        return images.float() * std + mean

    def extra_repr(self) -> str:
        """Mean and standard deviation."""
        return ", ".join(f"{k}={v}" for k, v in self.settings.items())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Normalize:
        super()._apply(fn, recurse)
        for name, values in self.settings.items():  # restore the given values, because a cast to half rounds
            device = getattr(self, name).device
            setattr(self, name, torch.tensor(values, dtype=torch.float32, device=device))
        return self
