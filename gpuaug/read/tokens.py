"""Batches of sequences: the longer the sequences of a step, the fewer samples it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuaug import checks
from gpuaug.batch import LONGEST
from gpuaug.errors import ConfigError
from gpuaug.random.keyed import Stream, uniforms


class Plan(NamedTuple):
    """The steps of an epoch from a position on.

    Attributes:
        lengths: int64 [S], the length of the sequences of each step.
        bounds: int64 [S + 1], how many samples each rank has consumed before each step, and after the last one.
        first: number of the first of these steps in the epoch.
    """

    lengths: NDArray[np.int64]
    bounds: NDArray[np.int64]
    first: int


@dataclass(frozen=True)
class Tokens:
    """The ``batch_size`` of a loader whose steps have a number of patches, as NaFlex trains (arXiv:2502.14786, timm).

    Each step has sequences of one length, and as many samples as fit into ``tokens``. All ranks have the same length in
    a step. Steps come in rounds, each with every length once, in an order drawn from seed and epoch. So all epochs have
    the same number of steps. A run that resumes on another number of ranks begins new rounds, and may have a few more
    or fewer steps in this epoch. The recipe needs the crop :class:`~gpuaug.ResizeToSequence`.

    Args:
        tokens: patches of a step on each rank, with padding.
        lengths: patches of a sequence. One that is listed twice comes twice in each round.
        multiple: the number of samples is rounded down to a multiple of this, but is at least 1.

    >>> tokens = Tokens(4096, lengths=[128, 256, 576])
    >>> [tokens.samples(length) for length in tokens.lengths]
    [32, 16, 1]
    """

    tokens: int
    lengths: Sequence[int] = (128, 256, 576, 784, 1024)
    multiple: int = 8

    def __post_init__(self) -> None:
        checks.whole_number("batch_size.tokens", self.tokens, 1, 2**31)
        given = self.lengths
        several = isinstance(given, Sequence) and not isinstance(given, str) and 0 < len(given) <= 1000
        if not several or any(type(n) is not int or not 1 <= n <= min(LONGEST, self.tokens) for n in given):
            raise ConfigError(
                f"`batch_size.lengths` must be a list of numbers from 1 to {LONGEST}, and at most `tokens`. "
                f"Found: {given!r:.99}, tokens {self.tokens}."
            )
        object.__setattr__(self, "lengths", tuple(given))
        checks.whole_number("batch_size.multiple", self.multiple, 1, 2**31)

    @property
    def row(self) -> list[int]:
        """The settings, for a state."""
        return [self.tokens, self.multiple, *self.lengths]

    @property
    def most(self) -> int:
        """Largest number of samples of a rank in a step."""
        return self.samples(min(self.lengths))

    def samples(self, length: int) -> int:
        """Number of samples of a rank in a step with sequences of ``length`` patches."""
        fit = self.tokens // length
        return max(fit // self.multiple * self.multiple, 1)

    def _plan(
        self, total: int, *, ranks: int, seed: int, epoch: int, start: int = 0, origin: int = 0, whole: bool = False
    ) -> Plan:
        """The steps from position ``start`` to the end of an epoch of ``total`` samples.

        ``origin``: where a run on as many ranks has begun rounds of its own; 0: nowhere. ``whole``: whether to leave
        out the samples at the end that do not reach all ranks.
        """
        counts = np.array([self.samples(length) for length in self.lengths])
        first = 0
        for begin in sorted({0, origin, start}):  # at `start` new rounds can always begin
            lengths, bounds = self._rounds(counts, total - begin, ranks=ranks, seed=seed, epoch=epoch, start=begin)
            done = int(np.searchsorted(ranks * bounds, start - begin))
            first = first if begin else done
            if ranks * bounds[done] == start - begin:
                break
        lengths, bounds = lengths[done:], bounds[done:] - bounds[done]
        left = total - start
        most = left // ranks if whole else -(-left // ranks)  # samples of a rank
        steps = int(np.searchsorted(bounds, most))
        return Plan(lengths[:steps], np.minimum(bounds[: steps + 1], most), first)

    def _rounds(
        self, counts: NDArray[np.int64], total: int, *, ranks: int, seed: int, epoch: int, start: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Lengths and bounds of rounds for at least ``total`` samples. The last round has the order of ``lengths``."""
        rounds = total // (ranks * int(counts.sum()))
        stream = Stream("", -1, "tokens", len(counts))
        u = uniforms([stream], seed=seed, epoch=epoch, indices=start + np.arange(rounds))["", -1, "tokens"]
        turn = np.concatenate([np.argsort(u, axis=1, kind="stable"), [np.arange(len(counts))]]).ravel()
        return np.array(self.lengths)[turn], np.concatenate([[0], np.cumsum(counts[turn])])
