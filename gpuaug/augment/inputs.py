"""What a recipe is called with: batches of any type, checked, as views [B, H, W, C]."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuaug import checks
from gpuaug.augment.images import WHITE
from gpuaug.errors import ConfigError

LAYOUTS = ("channels_first", "channels_last")
_WANTED = "`images` must be uint8, uint16, float16, bfloat16 or float32 [B, C, H, W], or clips [B, T, C, H, W]"


def pixels(
    images: Any, *, layout: str | None, white: float | None, nan: str | None
) -> tuple[Tensor, float, int | None, bool]:
    """Check a batch, but for values that are NaN or infinite.

    The arguments are those of :class:`gpuaug.Augment`'s ``forward``. Returns a view [B, H, W, C], the value that is
    white, T of clips, whose frames are rows, and whether such values are left to refuse.
    """
    if not isinstance(images, Tensor) or images.dtype not in WHITE or images.dim() not in (4, 5):
        given = f"{images.dtype} {list(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        raise ConfigError(f"{_WANTED}. Found: {given}.{_conversion(images)}")
    if images.is_meta:
        raise ConfigError("`images` must be on a device that stores pixels, such as cpu or cuda. Found: meta.")
    if not _is_stored(images):
        raise ConfigError(
            "`images` must be a tensor whose values lie in memory. Found: one that is sparse, nested, fake or traced, "
            "as in FakeTensorMode, torch.func and torch.export. Pass a usual tensor, outside of these."
        )
    images = images.resolve_neg()  # the kernels read memory, where such values have the other sign
    last = is_channels_last(images, layout)
    frames = images.shape[1] if images.dim() == 5 else None
    if 0 in images.shape[1:]:
        raise ConfigError(f"{_WANTED}, without empty axes after the first. Found: {list(images.shape)}.")
    checks.number("white", white, 1e-6, 1e9, optional=True)
    nan = "refuse" if nan is None else checks.one_of("nan", nan, ("refuse", "zero"))
    if images.is_floating_point() and nan == "zero":
        images = images.nan_to_num(0.0, 0.0, 0.0)
    x = images if frames is None else images.flatten(0, 1)
    white, refuses = WHITE[x.dtype] if white is None else float(white), images.is_floating_point() and nan == "refuse"
    return x if last else x.permute(0, 2, 3, 1), white, frames, refuses


def _is_stored(images: Tensor) -> bool:
    if images.layout is not torch.strided or images.is_nested or torch._is_functional_tensor(images):
        return False
    try:
        return images.untyped_storage().device == images.device
    except (RuntimeError, NotImplementedError):
        return False


def is_channels_last(images: Tensor, layout: str | None) -> bool:
    """Whether the channels are the last axis of images [B, C, H, W] or [B, H, W, C]."""
    if layout is not None:
        return checks.one_of("layout", layout, LAYOUTS) == "channels_last"
    first, last = images.shape[-3] == 3, images.shape[-1] == 3
    if images.dtype == torch.uint8 and first and last:
        raise ConfigError(
            f"`images` {list(images.shape)} could be [B, C, H, W] or [B, H, W, C]. Set `layout` to channels_first or "
            "channels_last."
        )
    return images.dtype == torch.uint8 and last and not first


def not_finite(images: Tensor, frames: int) -> ConfigError:
    """The error of values [B * frames, H, W, C] that are NaN or infinite: kernels would make any number of them."""
    finite = images.isfinite()
    first = int((~finite).flatten(1).any(1).nonzero()[0])
    return ConfigError(
        f"`images` must be finite. Found: {int((~finite).sum())} values that are NaN or infinite, first in image "
        f"{first // frames}. Set nan='zero' to replace them by 0."
    )


def same_type(made: Tensor, dtype: torch.dtype, white: float) -> Tensor:
    """From float32, where 1 is white, to the type of the given images, with its largest value as a limit."""
    scaled = made * white
    if dtype.is_floating_point:
        return scaled.to(dtype)
    limits = np.iinfo(np.uint8 if dtype == torch.uint8 else np.uint16)
    return scaled.round_().clamp_(0, float(limits.max)).to(torch.int32).to(dtype)


def _conversion(images: Any) -> str:
    """Sentences that say how to convert ``images``."""
    if not isinstance(images, Tensor):
        return (
            " Convert an array by `torch.from_numpy(images)`, and a list of tensors of one size by "
            "`torch.stack(images)`. A gpuaug.Loader reads files of any size."
        )
    dtype = "" if images.dtype in WHITE else _TYPES.get(images.dtype, " Use `images.float()`.")
    return dtype + _AXES.get(images.dim(), "")


_INTEGERS = " Use `images.float()`, and set `white` to the value that is white, such as white=4095 for 12 bits."
_TYPES = {
    torch.bool: " If True is white, use `images.to(torch.uint8).mul(255)`.",
    **dict.fromkeys((torch.int8, torch.int16, torch.int32, torch.int64, torch.uint32, torch.uint64), _INTEGERS),
}
_AXES = {
    2: " For a single image of one channel, use `images[None, None]`.",
    3: " For a single image, use `images[None]`.",
}
