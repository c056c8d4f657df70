"""Augmented versions of a batch, for `gpuaug pack epochs=K`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpuaug import checks
from gpuaug.augment.crop import side_by_side
from gpuaug.augment.recipe import Augment, MultiView
from gpuaug.batch import CropWindows, EncodedBatch
from gpuaug.decode.request import HeaderInfo
from gpuaug.errors import ConfigError
from gpuaug.loader.augmented import before_normalization


def check_recipe(augment: Any, targets: dict[str, Any] | None) -> None:
    """Raise ConfigError if the versions cannot be stored. ``targets``: the description of the source's targets."""
    checks.instance("augment", augment, Augment, MultiView)
    if targets is not None:
        raise ConfigError(
            "`epochs` stores augmented images and labels, but no masks, boxes or keypoints. Found: a source with "
            f"{', '.join(targets['kinds'])}. Pack without `epochs`; training then augments images and targets together."
        )
    for view in augment.views:
        crop = view.augment.crop
        if crop is None or crop.needs or isinstance(crop.size, int):
            raise ConfigError(
                "`augment.crop` must give images of one size (H, W) with `epochs`, and cannot depend on targets. "
                f"Found: {crop!r}. Use gpuaug.RandomResizedCrop or gpuaug.Resize((H, W))."
            )


class Versions:
    """Makes ``count`` versions of images. Version e has the random parameters of epoch e."""

    def __init__(self, augment: Augment | MultiView, seed: int, *, count: int) -> None:
        self._recipe, self._seed, self._count = before_normalization(augment), seed, count
        self._places, self._size = side_by_side([view.augment.crop.size for view in augment.views])

    def windows(self, batch: EncodedBatch, headers: HeaderInfo) -> list[CropWindows]:
        """The windows of each view in each version: the views of version 0, then those of version 1, ..."""
        each = (self._recipe.draw(seed=self._seed, epoch=e, indices=batch.indices) for e in range(self._count))
        return [window for drawn in each for window in self._recipe.windows(drawn, headers.height, headers.width)]

    def augment(self, batch: EncodedBatch, images: Sequence[Tensor]) -> list[NDArray[np.uint8]]:
        """The versions, each uint8 [B, H, W, 3], with all views side by side. ``images``: one tensor per window."""
        views, versions = len(self._places), []
        for epoch in range(self._count):
            drawn = self._recipe.draw(seed=self._seed, epoch=epoch, indices=batch.indices)
            made = self._recipe.apply(images[epoch * views : (epoch + 1) * views], drawn)
            canvas = np.zeros((len(batch), *self._size, 3), dtype=np.uint8)
            for place, view in zip(self._places, made, strict=True):
                (top, left), (height, width) = place.corner, place.size
                canvas[:, top : top + height, left : left + width] = _levels(view)
            versions.append(canvas)
        return versions


def _levels(view: Tensor) -> NDArray[np.uint8]:
    """Pixels float32 [B, 3, H, W] in 0..1, rounded to uint8 [B, H, W, 3]."""
    low, high = (float(value) for value in view.aminmax())
    if not (low >= -0.5 / 255 and high <= 1 + 0.5 / 255):
        raise ConfigError(
            f"`epochs` stores pixels from 0 to 1. Found: {low:.3f} to {high:.3f} before normalization. For example, "
            "RandomGaussianNoise can give such pixels. Leave out such an operation, or pack without `epochs`."
        )
    levels: NDArray[np.uint8] = view.mul(255).round_().clamp_(0, 255).byte().permute(0, 2, 3, 1).numpy()
    return levels
