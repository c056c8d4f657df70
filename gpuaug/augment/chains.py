"""Mixtures of chains of operations (AugMix, arXiv:1912.02781)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from gpuaug.augment.parameters import Chosen, Prepared
from gpuaug.native.buffers import to_device


def one_chain(op: Prepared) -> Prepared:
    """Make an operation from the slots of one chain. All chains have the same slots."""
    return replace(op, slots=op.slots[: len(op.slots) // op.chains], chains=0)


def mixed(x: Tensor, op: Prepared, chosen: Chosen, run: Callable[[Tensor, Chosen], Tensor]) -> Tensor:
    """Mix images float32 [B, 3, H, W] in 0..1 with the results of their chains. The result has whole levels k / 255.

    ``run`` applies one chain, with the given choices, to a copy of ``x``.
    """
    assert chosen.weights is not None
    weights = to_device(torch.from_numpy(chosen.weights), x.device)
    mix, *shares = weights.T[..., None, None, None]
    image, depth = _levels(x), len(op.slots) // op.chains
    # Multiply and add are separate calls, because addcmul does not round all elements in the same way.
    total = torch.zeros_like(image) if op.rounds_twice else (1 - mix) * image
    for chain, share in enumerate(shares):
        own = slice(chain * depth, (chain + 1) * depth)
        levels = _levels(run(x, replace(chosen, choice=chosen.choice[:, own], params=chosen.params[own], weights=None)))
        total += (share if op.rounds_twice else share * mix) * levels
    total.clamp_(0, 255).floor_()
    if op.rounds_twice:  # timm: the sum of the chains was rounded down, and is now blended with the image
        total = (image + mix * (total - image)).floor_()
    return total.div_(255)


def _levels(x: Tensor) -> Tensor:
    return x.mul(255).add_(0.5).floor_()
