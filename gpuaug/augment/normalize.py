"""Normalization by mean and standard deviation per channel, the last step of a recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gpuaug.errors import ConfigError


class Normalize(nn.Module):
    """Computes ``(x - mean) / std`` per channel, for float32 images [B, C, H, W].

    ``.to(device)`` moves the buffers ``mean`` and ``std``. They stay float32 even if the module is cast.

    Args:
        mean: C values, or one for all channels. Those of RGB images are for pixels in 0..1, those of other images for
            the pixels as they are after the operations, such as raw reflectance in float images.
        std: the same, positive.

    >>> Normalize(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))(torch.ones(1, 3, 1, 1)).flatten()
    tensor([2., 2., 2.])
    """

    mean: Tensor  # float32 [C], or [1] for any C
    std: Tensor

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        super().__init__()
        made: dict[str, list[Any]] = {}
        for name, given in (("mean", mean), ("std", std)):
            values: Any = given.tolist() if isinstance(given, Tensor | np.ndarray) else given
            values = [values] if isinstance(values, int | float | np.number) else values
            numbers = isinstance(values, Sequence) and all(
                isinstance(v, int | float | np.integer | np.floating) and not isinstance(v, bool) and math.isfinite(v)
                for v in values
            )
            if not numbers or not len(values):
                raise ConfigError(f"`augment.normalize.{name}` must be a number, or one per channel. Found: {given!r}.")
            if name == "std" and min(values) <= 0:
                raise ConfigError(f"`augment.normalize.std` must be positive. Found: {given!r}.")
            made[name] = list(values)
        counts = [len(values) for values in made.values()]
        if min(counts) not in (1, max(counts)):
            raise ConfigError(
                "`augment.normalize.mean` and `std` must have equally many numbers, if neither is one number. "
                f"Found: {counts[0]} and {counts[1]} numbers."
            )
        for name, values in made.items():
            every = values * (max(counts) // len(values))
            if len(every) == 3:
                _check_unit(name, every)
            self.register_buffer(name, torch.tensor(every, dtype=torch.float32, device="cpu"), persistent=False)
        self.settings = {"mean": self.mean.tolist(), "std": self.std.tolist()}

    def values(self) -> dict[str, list[float]]:
        """Mean and std as lists. On a GPU: the constructor's values, because reading buffers would wait for the GPU."""
        return {k: b.tolist() if (b := getattr(self, k)).device.type == "cpu" else v for k, v in self.settings.items()}

    def check_channels(self, channels: int) -> None:
        """Raise ConfigError if the values are not for images with ``channels``, a number."""
        if (count := len(self.mean)) not in (1, channels):
            raise ConfigError(
                f"`augment.normalize` has values for {count} channels. Found: images with {channels}. "
                "Give one value per channel, or one for all."
            )
        for name, values in self.settings.items() if count == 1 and channels == 3 else ():
            _check_unit(name, values)

    def forward(self, images: Tensor) -> Tensor:
        """Normalize float32 ``images`` [B, C, H, W]."""
        self.check_channels(images.shape[-3])
        mean, std = (b.to(images.device, torch.float32).view(-1, 1, 1) for b in (self.mean, self.std))
        return (images - mean).div_(std)

    def inverse(self, images: Tensor) -> Tensor:
        """Undo the normalization: float32 ``images * std + mean``. The result is not clamped.

        Args:
            images: normalized images of any float dtype, [B, C, H, W] or [C, H, W].

        >>> normalize = Normalize(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
        >>> normalize.inverse(torch.tensor([2.0, 0.0, -2.0]).view(3, 1, 1)).flatten()
        tensor([1.0000, 0.5000, 0.0000])
        """
        if not isinstance(images, Tensor) or not images.is_floating_point() or images.dim() < 3:
            found = f"{images.dtype} {list(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
            raise ConfigError(
                f"`images` must be a float tensor [B, C, H, W] or [C, H, W]. Found: {found}. "
                "If they come from several views, pass one view at a time."
            )
        self.check_channels(images.shape[-3])
        mean, std = (b.to(images.device, torch.float32).view(-1, 1, 1) for b in (self.mean, self.std))
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


def _check_unit(name: str, values: Sequence[float]) -> None:
    """Check the values of RGB images."""
    if max(abs(v) for v in values) > 2:
        raise ConfigError(
            f"`augment.normalize.{name}` must be given for pixel values in 0..1. Found: {tuple(values)!r}. "
            "If the values are for 0..255, divide by 255."
        )
