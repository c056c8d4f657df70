"""MixUp, CutMix and label smoothing. Only mixing makes a sample's result depend on other samples of the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from gpuaug import checks
from gpuaug.errors import ConfigError
from gpuaug.native.buffers import to_device
from gpuaug.random.keyed import Stream, uniforms

LARGEST_ALPHA = 1e9  # for any alpha this large, Beta(alpha, alpha) is almost exactly 1/2
_FIXED = 6  # uniforms: mix or not, CutMix or MixUp, 2 for lambda, 2 for the box's centre; those of the pairing follow


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Mixes the images and labels of sample pairs in a batch, with the semantics of timm's ``Mixup``.

    A batch is mixed with probability ``p``, by MixUp (arXiv:1710.09412) or CutMix (arXiv:1905.04899). One lambda (the
    share of a sample's own image) and one pairing apply to the whole batch and all its views. The random numbers depend
    on seed, epoch and the index of the batch's first sample. Returned labels are soft, mixed or not.

    Args:
        mixup_alpha: MixUp's lambda has the distribution Beta(alpha, alpha); 0 switches MixUp off.
        cutmix_alpha: the same for CutMix. The labels' lambda is the share of pixels that the first view keeps.
        p: probability that a batch is mixed.
        switch_p: probability of CutMix if both MixUp and CutMix are on.
        label_smoothing: epsilon. A label y with C classes becomes ``(1 - epsilon) y + epsilon / C``.
        epochs: (first epoch, first epoch without); an end of None: there is none. In other epochs nothing is mixed, and
            labels are soft as before. None: all epochs.

    >>> Mix(mixup_alpha=0.8, cutmix_alpha=1, label_smoothing=0.1).p
    1.0
    """

    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0
    p: float = 1.0
    switch_p: float = 0.5
    label_smoothing: float = 0.0
    epochs: Sequence[int | None] | None = None

    def __post_init__(self) -> None:
        if self.epochs is not None:
            object.__setattr__(self, "epochs", checks.interval("epochs", self.epochs))
        for field in fields(self)[:-1]:
            high = LARGEST_ALPHA if field.name.endswith("alpha") else 1
            value = checks.number(field.name, getattr(self, field.name), 0, high)
            if field.name == "label_smoothing" and value == 1:
                raise ConfigError("`label_smoothing` must be below 1: 1 would erase the label. Found: 1. Use e.g. 0.1.")
            object.__setattr__(self, field.name, float(value))  # 1 and 1.0 are stored alike in a loader's state

    def __repr__(self) -> str:
        """The settings, as in a loader's state; without ``epochs`` if they are not set."""
        named = (field.name for field in fields(self) if field.name != "epochs" or self.epochs is not None)
        return f"Mix({', '.join(f'{name}={getattr(self, name)!r}' for name in named)})"

    def __call__(
        self,
        images: list[Tensor],
        labels: Tensor | None,
        *,
        valid: Tensor,
        num_classes: int | None,
        seed: int,
        epoch: int,
        first_index: int,
    ) -> tuple[list[Tensor], Tensor]:
        """Mix images and labels. The inputs are not modified.

        Args:
            images: float [B, channels, H, W] per view; views may differ in size.
            labels: int64 [B], or float [B, C] (soft or multi-label), on the images' device.
            valid: bool [B], on the CPU. A sample with False is not mixed and is not used as a partner.
            num_classes: C, needed for int64 labels.
            seed, epoch: seed of the random numbers, and the batch's epoch.
            first_index: the first sample's index in the source.

        Returns:
            The mixed views, and soft labels float32 [B, C].
        """
        soft = self._soft(labels, num_classes)
        stream = Stream("", -1, "mix", _FIXED + len(valid))  # copies start at 0, so no other stream has copy -1
        u = uniforms([stream], seed=seed, epoch=epoch, indices=np.array([first_index]))["", -1, "mix"][0]
        rows = valid.nonzero()[:, 0]  # on the CPU, so nothing waits for the device
        cut = u[1] < self.switch_p if self.cutmix_alpha and self.mixup_alpha else self.cutmix_alpha > 0
        off = not checks.within(self.epochs, epoch)
        if off or u[0] >= self.p or not (self.cutmix_alpha or self.mixup_alpha) or len(rows) < 2:
            return images, soft

        order = rows[torch.from_numpy(np.argsort(u[_FIXED:][rows.numpy()], kind="stable"))]
        mates = order.roll(-1)  # one random cycle, so no sample is mixed with itself
        rows, mates = (to_device(x, soft.device) for x in (order, mates))
        lam = symmetric_beta(self.cutmix_alpha if cut else self.mixup_alpha, float(u[2]), float(u[3]))
        if cut:
            boxes = [_box(lam, x.shape[-2], x.shape[-1], float(u[4]), float(u[5])) for x in images]
            top, left, bottom, right = boxes[0]
            lam = 1.0 - (bottom - top) * (right - left) / (images[0].shape[-2] * images[0].shape[-1])
            images = [_paste(x, rows, mates, box) for x, box in zip(images, boxes, strict=True)]
        else:
            images = [_blend(x, rows, mates, lam) for x in images]
        return images, _blend(soft, rows, mates, lam)

    def _soft(self, labels: Tensor | None, num_classes: int | None) -> Tensor:
        """Smoothed labels, float32 [B, C]."""
        if labels is None:
            raise ConfigError("`mix` needs labels, but the batch has none. Set `mix=none` or use a source with labels.")
        if labels.ndim == 2 and labels.is_floating_point():
            soft = labels.float()
        elif labels.ndim == 1 and not labels.is_floating_point() and num_classes is not None:
            # one_hot and scatter would check the labels, and this check would wait for the device
            soft = (labels[:, None] == torch.arange(num_classes, device=labels.device)).float()
        else:
            classes = "" if num_classes is not None else ", and the source has no `num_classes`"
            raise ConfigError(
                "`mix` needs labels int64 [B] from a source with `num_classes`, or labels float [B, C]. "
                f"Found: {str(labels.dtype).removeprefix('torch.')} {list(labels.shape)}{classes}."
            )
        epsilon = self.label_smoothing
        return soft * (1.0 - epsilon) + epsilon / soft.shape[1] if epsilon else soft


def symmetric_beta(alpha: float, u: float, v: float) -> float:
    """A sample of Beta(alpha, alpha) from two uniforms, for any alpha > 0, without rejection."""
    # The polar method gives t of Student's t distribution with 2 alpha degrees of freedom (Bailey, Math. Comp. 62,
    # 1994). Then 1/2 + t / (2 sqrt(2 alpha + t^2)) has the distribution Beta(alpha, alpha).
    half = 2.0**-25  # half a step of the uniforms, to avoid log(0)
    cos = math.cos(2.0 * math.pi * (v + half))
    power = -math.log(u + half) / alpha
    # square = t^2 / (2 alpha) = (u^(-1/alpha) - 1) cos^2. The limit of 700 avoids overflow; no result changes.
    square = math.expm1(min(power, 700.0)) * cos * cos
    return 0.5 + math.copysign(0.5, cos) * math.sqrt(square / (1.0 + square))


def _box(lam: float, height: int, width: int, u: float, v: float) -> tuple[int, int, int, int]:
    """Top, left, bottom, right of the pasted box, clipped to the image, as in torchvision's ``v2.CutMix``."""
    y, x = int(u * height), int(v * width)
    r = 0.5 * math.sqrt(1.0 - lam)
    h, w = int(r * height), int(r * width)
    return max(y - h, 0), max(x - w, 0), min(y + h, height), min(x + w, width)


def _blend(x: Tensor, rows: Tensor, mates: Tensor, lam: float) -> Tensor:
    """``lam x[rows] + (1 - lam) x[mates]``; other rows are unchanged."""
    out = x.clone()
    return out.index_copy_(0, rows, torch.lerp(x[rows], x[mates], 1.0 - lam))


def _paste(x: Tensor, rows: Tensor, mates: Tensor, box: tuple[int, int, int, int]) -> Tensor:
    """A copy of ``x`` with the box of ``x[mates]`` pasted into ``x[rows]``."""
    top, left, bottom, right = box
    out = x.clone()
    window = out[:, :, top:bottom, left:right]
    window.index_copy_(0, rows, x[:, :, top:bottom, left:right][mates])
    return out
