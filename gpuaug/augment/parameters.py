"""Choices and parameters of a batch's operations, drawn before a backend executes the operations.

A slot is one position in an operation, where each sample takes one of several alternatives or none. The gate decides,
with probability ``p``, whether a sample is changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpuaug.random.keyed import Float, Int

Size = tuple[int, int]  # H, W of the images an operation is applied to
Params = dict[str, NDArray[Any]]  # Kornia's parameter names to arrays [B, ...] on the host
Rule = Callable[[Float, Size], Params]  # uniforms [B, n] (without the gate's) to parameters
Alternatives = tuple[Params, ...]
Tensors = dict[str, Tensor]  # Kornia's parameter names to tensors [B, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """Choices and parameters of one operation for each sample of a batch.

    Attributes:
        choice: int64 [B, S], the alternative that the sample takes in each slot; -1: none.
        params: per slot and alternative, Kornia's parameters [B, ...] without ``batch_prob``, also for samples that do
            not take the alternative. Slots and alternatives may share one dictionary.
        keys: int64 [B, 2], for per-pixel noise and for seeded operations; None for other operations.
        weights: float32 [B, 1 + chains]. Column 0: share of all chains in the mixture. Others: share of each chain in
            that part. None for an operation without chains.
    """

    choice: Int
    params: tuple[Alternatives, ...]
    keys: Int | None = None
    weights: Float | None = None

    def rows(self, at: Int | slice) -> Chosen:
        """The choices and parameters of some samples."""
        params = tuple(tuple({k: v[at] for k, v in a.items()} for a in slot) for slot in self.params)
        keys = None if self.keys is None else self.keys[at]
        return Chosen(self.choice[at], params, keys, None if self.weights is None else self.weights[at])


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """One operation of a recipe, ready to draw parameters. Its settings are read once, at construction.

    Attributes:
        name: the operation's key in ``ops``.
        op: the given module; never modified.
        slots: S slots, applied one after the other. Each slot is a tuple of alternatives: private copies of modules.
            Their ``p`` is 1, because ``Chosen.choice`` already contains the gate's result.
        count: number of uniforms per sample. The first is for the gate, if there is one.
        rule: function from uniforms [B, count] and (H, W) to ``choice``, ``params`` and, with chains, ``weights``.
        keyed: whether each sample also needs a key, for per-pixel noise or as a seed.
        seeded: reason why gpuaug cannot draw the parameters; None: it can. A seeded module keeps its own ``p`` and
            runs on one sample at a time. The sample's key seeds the global generators.
        members: the prepared operations that a OneOf chooses from; () for other operations.
        chains: number of chains, or 0. ``slots`` holds the slots of all chains, chain after chain. Each chain starts
            from the unchanged image, and the results are mixed (chains.py).
        rounds_twice: True: the mixture is rounded twice, as in timm. False: once, as in torchvision.
    """

    name: str
    op: Any
    slots: tuple[tuple[nn.Module, ...], ...]
    count: int
    rule: Callable[[Float, Size], Any]
    keyed: bool = False
    seeded: str | None = None
    members: tuple[Prepared, ...] = ()
    chains: int = 0
    rounds_twice: bool = False

    def leaves(self, key: str) -> list[tuple[str, Prepared]]:
        """This operation and its configuration key; for a OneOf: all operations that it can choose."""
        leaves = [leaf for member in self.members for leaf in member.leaves(f"{key}.ops.{member.name}")]
        return leaves or [(key, self)]

    def draw(self, u: Float, size: Size, keys: Int | None = None) -> Chosen:
        """Draw from uniforms float32 [B, count] for images of ``size``. ``keys``, int64 [B, 2], are only stored."""
        choice, params, *weights = self.rule(u, size)
        return Chosen(choice, params, keys, *weights)


def always_applied(op: nn.Module) -> Any:
    """Copy a Kornia operation and set ``p = 1``. The caller applies the gate."""
    module = copy.deepcopy(op)
    module.p = 1.0  # type: ignore[assignment]
    return module


def tensors(params: Params, rows: Int | None = None) -> Tensors:
    """Parameters of ``rows`` (None: all) as CPU tensors, because Kornia expects them on the CPU."""
    # A value shared by all samples is a read-only view of one row. It is copied, because torch warns about such views.
    return {
        k: torch.from_numpy(np.require(v if rows is None else v[rows], requirements=["C", "W"]))
        for k, v in params.items()
    }
