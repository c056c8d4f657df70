"""MixUp, CutMix and label smoothing: the one stage whose result depends on which samples share a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from gpuaug import checks
from gpuaug.errors import ConfigError
from gpuaug.random.keyed import Stream, uniforms

_LARGEST_ALPHA = 1e9  # Beta(alpha, alpha) is 1/2 long before
_FIXED = 6  # uniforms of a batch before those of the pairing: apply?, CutMix?, two of lambda, centre of the box


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Blends pairs of samples of a batch, images and labels alike; the semantics of timm's ``Mixup``.

    A batch is mixed with probability ``p``, by MixUp (arXiv:1710.09412) or CutMix (arXiv:1905.04899), with one lambda
    and one pairing for the batch and all its views. Everything is drawn from (seed, epoch, number of the batch's first
    sample). Labels come out soft in every batch, mixed or not.

    Args:
        mixup_alpha: lambda of MixUp is drawn from Beta(alpha, alpha); 0 switches MixUp off.
        cutmix_alpha: the same for CutMix, where lambda is the part of the image that is kept.
        p: probability that a batch is mixed.
        switch_p: probability of CutMix where both are on.
        label_smoothing: epsilon; a label y of C classes becomes ``(1 - epsilon) y + epsilon / C``.

    >>> Mix(mixup_alpha=0.8, cutmix_alpha=1, label_smoothing=0.1).p
    1.0
    """

    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0
    p: float = 1.0
    switch_p: float = 0.5
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            high = _LARGEST_ALPHA if field.name.endswith("alpha") else 1
            value = checks.number(field.name, getattr(self, field.name), 0, high)
            if field.name == "label_smoothing" and value == 1:
                raise ConfigError("`label_smoothing` must be below 1, which leaves nothing of a label. Found: 1.")
            object.__setattr__(self, field.name, float(value))  # 1 and 1.0 are one setting of a loader's state

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
        """New images and soft labels; the arguments stay as they were.

        Args:
            images: float [B, 3, H, W] per view; views may differ in size.
            labels: int64 [B], or float [B, C] (soft or multi-label), on the images' device.
            valid: bool [B], on the CPU. A sample with False stays as it is and is nobody's partner.
            num_classes: C, needed for int64 labels.
            seed, epoch, first_index: of the batch; first_index is the number of its first sample in the source.

        Returns:
            The views, and float32 [B, C]. CutMix's lambda is the area kept in the first view.

        Raises:
            ConfigError: if there are no labels, or they are of another shape.
        """
        soft = self._soft(labels, num_classes)
        stream = Stream("", -1, "mix", _FIXED + len(valid))  # no view's copy, so no operation shares its draws
        u = uniforms([stream], seed=seed, epoch=epoch, indices=np.array([first_index]))["", -1, "mix"][0]
        rows = valid.nonzero()[:, 0]  # on the CPU, so nothing waits for the device
        both = self.cutmix_alpha and self.mixup_alpha
        cut = u[1] < self.switch_p if both else self.cutmix_alpha > 0
        if u[0] >= self.p or not (self.cutmix_alpha or self.mixup_alpha) or len(rows) < 2:
            return images, soft

        order = rows[torch.from_numpy(np.argsort(u[_FIXED:][rows.numpy()], kind="stable"))]
        mates = order.roll(-1)  # one random cycle: nobody is mixed with itself
        rows, mates = (x.to(soft.device, non_blocking=True) for x in (order, mates))
        lam = _symmetric_beta(self.cutmix_alpha if cut else self.mixup_alpha, float(u[2]), float(u[3]))
        if cut:
            boxes = [_box(lam, x.shape[-2], x.shape[-1], float(u[4]), float(u[5])) for x in images]
            top, left, bottom, right = boxes[0]
            lam = 1.0 - (bottom - top) * (right - left) / (images[0].shape[-2] * images[0].shape[-1])
            images = [_paste(x, rows, mates, box) for x, box in zip(images, boxes, strict=True)]
        else:
            images = [_blend(x, rows, mates, lam) for x in images]
        return images, _blend(soft, rows, mates, lam)

    def _soft(self, labels: Tensor | None, num_classes: int | None) -> Tensor:
        """Labels as float32 [B, C], smoothed."""
        if labels is None:
            raise ConfigError("`mix` needs labels, and the batch has none. Set `mix=none` or give a labelled source.")
        if labels.ndim == 2 and labels.is_floating_point():
            soft = labels.float()
        elif labels.ndim == 1 and not labels.is_floating_point() and num_classes is not None:
            # a comparison, because one_hot and scatter check the labels, which waits for the device
            soft = (labels[:, None] == torch.arange(num_classes, device=labels.device)).float()
        else:
            classes = "" if num_classes is not None else ", and the source knows no num_classes"
            raise ConfigError(
                "`mix` takes labels int64 [B] of a source that knows its classes, or float [B, C]. "
                f"Found: {str(labels.dtype).removeprefix('torch.')} {list(labels.shape)}{classes}."
            )
        epsilon = self.label_smoothing
        return soft * (1.0 - epsilon) + epsilon / soft.shape[1] if epsilon else soft


def _symmetric_beta(alpha: float, u: float, v: float) -> float:
    """A value of Beta(alpha, alpha) from two uniforms, for any alpha > 0, without rejection.

    Student's t with 2 alpha degrees of freedom by the polar method (Bailey, Math. Comp. 62, 1994), and
    1/2 + t / (2 sqrt(2 alpha + t^2)), which is Beta distributed.
    """
    half = 2.0**-25  # uniforms are multiples of 2^-24: keep away from 0
    cos = math.cos(2.0 * math.pi * (v + half))
    power = -math.log(u + half) / alpha
    # t^2 / (2 alpha) = (u^(-1/alpha) - 1) cos^2; beyond e^700 the quotient below is 1 in double precision
    square = math.expm1(min(power, 700.0)) * cos * cos
    return 0.5 + math.copysign(0.5, cos) * math.sqrt(square / (1.0 + square))


def _box(lam: float, height: int, width: int, u: float, v: float) -> tuple[int, int, int, int]:
    """Top, left, bottom, right of the pasted box, clipped to the image; torchvision's ``v2.CutMix``."""
    y, x = int(u * height), int(v * width)
    r = 0.5 * math.sqrt(1.0 - lam)
    h, w = int(r * height), int(r * width)
    return max(y - h, 0), max(x - w, 0), min(y + h, height), min(x + w, width)


def _blend(x: Tensor, rows: Tensor, mates: Tensor, lam: float) -> Tensor:
    """``lam x[rows] + (1 - lam) x[mates]``, other rows as they were."""
    out = x.clone()
    return out.index_copy_(0, rows, torch.lerp(x[rows], x[mates], 1.0 - lam))


def _paste(x: Tensor, rows: Tensor, mates: Tensor, box: tuple[int, int, int, int]) -> Tensor:
    """``x`` with the box of ``x[mates]`` in ``x[rows]``."""
    top, left, bottom, right = box
    out = x.clone()
    window = out[:, :, top:bottom, left:right]
    window.index_copy_(0, rows, x[:, :, top:bottom, left:right][mates])
    return out
