"""Mixtures of chains of operations (AugMix, arXiv:1912.02781)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from gpuaug.augment.parameters import Chosen, Prepared


def one_chain(op: Prepared) -> Prepared:
    """Make an operation from the slots of one chain. All chains have the same slots."""
    return replace(op, slots=op.slots[: len(op.slots) // op.chains], chains=0)


def mixed(x: Tensor, op: Prepared, chosen: Chosen, run: Callable[[Tensor, Chosen], Tensor]) -> Tensor:
    """Mix images float32 [B, 3, H, W] in 0..1 with the results of their chains. The result has whole levels k / 255.

    ``run`` applies one chain, with the given choices, to a copy of ``x``.
    """
    assert chosen.weights is not None
    weights = torch.from_numpy(chosen.weights).to(x.device, non_blocking=True)
    mix, *shares = weights.T[..., None, None, None]
    made = (_levels(run(x, own)) for own in _each(op, chosen))
    image = _levels(x)
    # Multiply and add are separate calls, because addcmul does not round all elements in the same way.
    total = torch.zeros_like(image) if op.rounds_twice else (1 - mix) * image
    for share, levels in zip(shares, made, strict=True):
        total += (share if op.rounds_twice else share * mix) * levels
    total.clamp_(0, 255).floor_()
    if op.rounds_twice:  # timm: the sum of the chains was rounded down, and is now blended with the image
        total = (image + mix * (total - image)).floor_()
    return total.div_(255)


def _each(op: Prepared, chosen: Chosen) -> Iterator[Chosen]:
    depth = len(op.slots) // op.chains
    for first in range(0, len(op.slots), depth):
        own = slice(first, first + depth)
        yield Chosen(chosen.choice[:, own], chosen.params[own], chosen.keys)


def _levels(x: Tensor) -> Tensor:
    return x.mul(255).add_(0.5).floor_()
