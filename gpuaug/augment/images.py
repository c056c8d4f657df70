"""What both backends expect of images: their types, shapes and values."""

from __future__ import annotations

import torch
from torch import Tensor

from gpuaug.batch import WHITES

WHITE = {getattr(torch, name): white for name, white in WHITES.items()}


class NotFiniteError(ValueError):
    """Images have values that are NaN or infinite."""


def is_finite(images: Tensor) -> bool:
    """Whether no value is NaN or infinite. On CUDA, this waits for the device."""
    stored = images.permute(sorted(range(images.dim()), key=images.stride, reverse=True))  # else torch would copy it
    limits = torch.stack(stored.aminmax()) if images.numel() else images.new_zeros(2)  # NaN if a value is NaN
    return bool(limits.isfinite().all())


def size_of(x: Tensor) -> tuple[int, int]:
    """(H, W) of [B, H, W, C]. Raises TypeError for other types and shapes, because kernels would misread them."""
    if x.dtype not in WHITE or x.dim() != 4:
        raise TypeError(f"expected [B, H, W, C] of {', '.join(map(str, WHITE))}, but got {x.dtype} {list(x.shape)}")
    return x.shape[1], x.shape[2]


def unit(images: Tensor, white: float | None = None) -> Tensor:
    """Copy [B, H, W, C] to a new, contiguous float32 tensor [B, C, H, W], where ``white`` (None: the type's) is 1."""
    shape = len(images), images.shape[3], *images.shape[1:3]
    x = torch.empty(shape, dtype=torch.float32, device=images.device).copy_(images.permute(0, 3, 1, 2))
    white = WHITE[images.dtype] if white is None else white
    return x if white == 1 else x.div_(white)
