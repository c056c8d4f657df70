"""Kornia's parameters for a batch: the types that recipes, operations and backends share.

Parameters are numpy arrays on the host, float32 and vectorised over the batch. A sample's parameters depend on its own
uniforms only. Both backends execute what :class:`Chosen` says and draw nothing.
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
Params = dict[str, NDArray[Any]]  # Kornia's names to arrays [B, ...]
Rule = Callable[[Float, Size], Params]  # uniforms [B, n] to parameters, without the gate
Alternatives = tuple[Params, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """What happens to each sample of a batch in one operation.

    Attributes:
        choice: int64 [B, S]: the alternative of slot s that a sample goes through; -1: the slot leaves it untouched.
        params: per slot and alternative, Kornia's parameters [B, ...] without ``batch_prob``. Every row is valid, also
            the rows of samples that take another alternative. Slots and alternatives may share one dictionary.
        keys: int64 [B, 2], for per-pixel noise and for seeded operations; None for the others.
    """

    choice: Int
    params: tuple[Alternatives, ...]
    keys: Int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """One operation of a recipe, ready to be drawn. Settings are read once, when it is made.

    Attributes:
        name: its key in ``ops``.
        op: the module as given; never changed.
        slots: S slots, applied one after the other. Each offers alternatives; a sample goes through one or none of
            them. The modules are private copies with ``p = 1``: ``Chosen.choice`` holds the gate.
        count: uniforms that a sample needs, the gate first.
        rule: uniforms [B, count] and (H, W) to ``choice`` and ``params``.
        keyed: whether each sample also needs a key, for per-pixel noise or as a seed.
        seeded: None, or why no rule is known. Then the module itself draws, sample by sample, from torch's global
            generator, which is set from the sample's key and restored afterwards. Its own ``p`` stays in place.
    """

    name: str
    op: Any
    slots: tuple[tuple[nn.Module, ...], ...]
    count: int
    rule: Callable[[Float, Size], tuple[Int, tuple[Alternatives, ...]]]
    keyed: bool = False
    seeded: str | None = None

    def draw(self, u: Float, size: Size, keys: Int | None = None) -> Chosen:
        """Uniforms float32 [B, count], image size (H, W) and, if ``keyed``, int64 keys [B, 2] to choices."""
        return Chosen(*self.rule(u, size), keys)


def always_applied(op: nn.Module) -> Any:
    """A copy of a Kornia operation with ``p = 1``, which skips Kornia's blending; the gate is drawn outside."""
    module = copy.deepcopy(op)
    module.p = 1.0  # type: ignore[assignment]
    return module


def tensors(params: Params, rows: Int | None = None) -> dict[str, Tensor]:
    """Parameters of the given rows (None: all) as CPU tensors, where Kornia wants them."""
    # A value shared by all samples is a read-only view of one row, and torch warns of those.
    return {
        k: torch.from_numpy(np.require(v if rows is None else v[rows], requirements=["C", "W"]))
        for k, v in params.items()
    }
