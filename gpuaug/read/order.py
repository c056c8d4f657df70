"""The order of an epoch, a rank's share of it, and the position in it.

An order is a function of (seed, epoch) and the source, never of ranks, workers or batch size. All ranks hold the same
order and take turns: from position ``start`` on, rank r of R takes r, r + R, r + 2R, … So after k steps the ranks
together have consumed ``start .. start + k * batch_size * R``, and any other number of ranks can go on from there.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.errors import ConfigError, SourceError
from gpuaug.random import keyed as draw
from gpuaug.source.index import occurrences, outside, read_numbers

log = logging.getLogger("gpuaug")

Last = Literal["uneven", "drop", "pad"]
LASTS = ("uneven", "drop", "pad")

_CHUNK = 1 << 16  # values per call of the generator: 21 ms for 1.28 million, against 300 ms in one call


class Order(Protocol):
    """Decides which samples an epoch has and in which order; ``repr`` says all that decides it."""

    def order(self, seed: int, epoch: int, source: Any) -> Tensor:
        """Numbers of samples, int64 ``[M]``, in the order of the epoch; a number may come again.

        Args:
            seed: any integer.
            epoch: 0 <= epoch < 2**32.
            source: whose active samples are put in order.
        """
        ...


@dataclass(frozen=True)
class Shuffle:
    """A new permutation of the active samples every epoch.

    Samples are sorted by a random value that belongs to their number, so leaving one out moves no other past another.
    """

    def order(self, seed: int, epoch: int, source: Any) -> Tensor:
        """Every active number once, int64 ``[len(source)]``; another permutation for every ``seed`` and ``epoch``."""
        numbers = _numbers(source)
        values = _values("order", seed, epoch, int(numbers[-1]) + 1 if len(numbers) else 0)
        return torch.from_numpy(numbers[np.argsort(values[numbers], kind="stable")])

    def position(self, seed: int, epoch: int, order: Tensor, after: int) -> int:
        """Where ``order``, int64 ``[n]``, goes on after sample ``after``, which may have been left out since.

        ``order`` is the one of this ``seed`` and ``epoch``.
        """
        numbers = order.numpy()
        values = _values("order", seed, epoch, max(int(numbers.max(initial=0)), after) + 1)
        return int(np.searchsorted(values[numbers], values[after], side="right"))


@dataclass(frozen=True)
class Sequential:
    """The active samples in the order of the source."""

    def order(self, seed: int, epoch: int, source: Any) -> Tensor:
        """Every active number once, ascending, int64 ``[len(source)]``; ``seed`` and ``epoch`` change nothing."""
        return torch.from_numpy(_numbers(source))

    def position(self, seed: int, epoch: int, order: Tensor, after: int) -> int:
        """Where ``order``, int64 ``[n]``, goes on after sample ``after``, which may have been left out since.

        ``order`` is the same for any ``seed`` and ``epoch``.
        """
        return int(np.searchsorted(order.numpy(), after, side="right"))


class Weighted:
    """As many samples as the source has, drawn with replacement in proportion to weights.

    Args:
        weights: ``class``: every class equally often; else one weight >= 0 per sample of the source, as a sequence or
            a FILE (.npy, .json, or text with one number per line).
    """

    def __init__(self, weights: str | os.PathLike[str] | Sequence[float] | Tensor = "class") -> None:
        self.weights: NDArray[np.float64] | None = None
        self._name = "class"
        if isinstance(weights, str) and weights == "class":
            return
        if isinstance(weights, str | os.PathLike):
            values = read_numbers(weights, key="order.weights", dtype=np.float64)
        else:
            try:
                values = np.asarray(weights, dtype=np.float64)
            except (TypeError, ValueError, OverflowError, RuntimeError) as error:
                raise ConfigError(
                    f"`order.weights` must be `class`, a FILE, or one number per sample. Found: {weights!r:.200}."
                ) from error
        if values.ndim != 1 or not np.isfinite(values).all() or (values < 0).any():
            raise ConfigError(
                "`order.weights` must be `class`, or one finite weight >= 0 per sample. "
                f"Found: shape {values.shape}, from {values.min(initial=0)} to {values.max(initial=0)}."
            )
        self.weights = values
        self._name = hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest()

    def __repr__(self) -> str:
        return f"Weighted(weights={self._name})"

    def order(self, seed: int, epoch: int, source: Any) -> Tensor:
        """Numbers with repetition, int64 ``[len(source)]``; others for every ``seed`` and ``epoch``."""
        numbers = _numbers(source)
        bounds = np.cumsum(self._of(source, numbers))
        if not bounds.size or bounds[-1] <= 0:
            raise ConfigError("`order.weights` must be above 0 for one sample at least. Found: all are 0.")
        u = (_values("weighted", seed, epoch, len(numbers)) >> np.uint64(11)) * 2.0**-53
        # right: a sample of weight 0 has no interval; the product may round up to the last bound
        last = np.searchsorted(bounds, bounds[-1], side="left")
        return torch.from_numpy(numbers[np.minimum(np.searchsorted(bounds, u * bounds[-1], side="right"), last)])

    def _of(self, source: Any, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        if self.weights is None:
            labels = getattr(source, "labels", None)
            if labels is None:
                raise ConfigError(
                    "`order=weighted` with `order.weights=class` needs a source whose labels are known without reading "
                    f"it. Found: {source!r}. Give a FILE of weights, one per sample."
                )
            own = labels.numpy()[numbers]
            if own.min(initial=0) < 0:
                raise SourceError(f"labels must be >= 0 to weight by class. Found: {own.min()}.")
            return 1.0 / np.bincount(own)[own]
        if len(self.weights) == len(numbers):
            return self.weights
        if getattr(source, "indices", None) is None or (len(numbers) and len(self.weights) <= numbers[-1]):
            raise ConfigError(
                f"`order.weights` must hold one weight per sample of the source: {len(numbers)}. "
                f"Found: {len(self.weights)}."
            )
        return self.weights[numbers]


@dataclass(frozen=True)
class Repeated:
    """Repeated augmentation (arXiv:1901.09335, arXiv:1902.05509) in epochs of the usual length, as DeiT and timm do it.

    A new permutation every epoch, each sample ``repeats`` times in a row, cut after as many as the source has: an
    epoch shows one ``repeats``-th of the samples, and neighbouring ranks get copies of the same ones.
    """

    repeats: int = 3

    def __post_init__(self) -> None:
        if isinstance(self.repeats, bool) or not isinstance(self.repeats, int) or not 1 <= self.repeats <= 0xFFFF:
            raise ConfigError(f"`order.repeats` must be a whole number from 1 to {0xFFFF}. Found: {self.repeats!r}.")

    def order(self, seed: int, epoch: int, source: Any) -> Tensor:
        """Numbers with repetition, int64 ``[len(source)]``; others for every ``seed`` and ``epoch``."""
        once = Shuffle().order(seed, epoch, source)
        return once[: -(-len(once) // self.repeats)].repeat_interleave(self.repeats)[: len(once)]


class Sampler:
    """The order of a torch Sampler, or of any iterable of positions 0 .. len(source) - 1.

    So that an epoch can be resumed, its draws are a function of (seed, epoch) and of the seed of its own generator: the
    global generators of torch, numpy and Python are seeded for it and given back their state.
    """

    def __init__(self, sampler: Iterable[int]) -> None:
        ranks = getattr(sampler, "num_replicas", 1)
        if isinstance(ranks, int) and ranks > 1:
            raise ConfigError(
                f"`order` must give the whole epoch: gpuaug shares it among the ranks. Found: "
                f"{type(sampler).__name__} with num_replicas={ranks}. Use `order=shuffle`."
            )
        if isinstance(sampler, Iterator):
            raise ConfigError(
                f"`order` must give an order for every epoch, and an iterator has only one. Found: "
                f"{type(sampler).__name__}. Pass a Sampler, or a list."
            )
        self.sampler = sampler
        generator = getattr(sampler, "generator", None)
        self._generator = generator if isinstance(generator, torch.Generator) else None
        self._own_seed = 0 if self._generator is None else self._generator.initial_seed()

    def __repr__(self) -> str:
        return f"Sampler({type(self.sampler).__qualname__}, seed={self._own_seed})"

    def order(self, seed: int, epoch: int, source: Any) -> Tensor:
        """What the sampler yields, as numbers of the source, int64 ``[M]``."""
        set_epoch = getattr(self.sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        value = int(draw.integers(f"sampler {self._own_seed}", seed=seed, epoch=epoch, count=1)[0]) >> 1
        kept = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
        try:
            random.seed(value)
            np.random.seed(value & 0xFFFFFFFF)
            torch.default_generator.manual_seed(value)
            if self._generator is not None:
                self._generator.manual_seed(value)
            found = list(self.sampler)
        finally:
            random.setstate(kept[0])
            np.random.set_state(kept[1])
            torch.default_generator.set_state(kept[2])
        try:
            positions = np.asarray(found) if found else np.zeros(0, dtype=np.int64)
        except ValueError:  # batches of different lengths
            positions = np.zeros((0, 0))
        numbers = _numbers(source)
        if positions.ndim != 1 or positions.dtype.kind not in "iu":
            raise ConfigError(
                f"`order` must yield single positions; gpuaug makes the batches. Found: {type(self.sampler).__name__} "
                f"yields {type(found[0]).__name__}."
            )
        if beyond := outside(positions, len(numbers)):
            raise ConfigError(
                f"`order` must yield positions 0 .. {len(numbers) - 1}. Found: {type(self.sampler).__name__} yields "
                f"{beyond}."
            )
        return torch.from_numpy(numbers[positions])


def adapt(order: Any) -> Order:
    """An order out of ``shuffle``, ``sequential``, an order of this module, or a torch Sampler.

    Raises:
        ConfigError: if it is none of them.
    """
    if isinstance(order, str) and order in ("shuffle", "sequential"):
        return Shuffle() if order == "shuffle" else Sequential()
    if callable(getattr(order, "order", None)):
        return order
    scalar = isinstance(order, Tensor | np.ndarray) and order.ndim == 0
    if hasattr(order, "__iter__") and not isinstance(order, str | bytes | dict) and not scalar:
        return Sampler(order)
    raise ConfigError(
        "`order` must be shuffle, sequential, gpuaug.Shuffle, Sequential, Weighted or Repeated, or a torch Sampler. "
        f"Found: {order!r:.200}."
    )


def check_last(last: str) -> Last:
    """``last`` itself, if it is one of uneven, drop and pad."""
    if not isinstance(last, str) or last not in LASTS:
        raise ConfigError(f"`last` must be one of {', '.join(LASTS)}. Found: {last!r}.")
    return last  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class Ordered:
    """A whole epoch, the same on every rank."""

    indices: Tensor  # int64 [M], numbers in the source
    repeats: Tensor = field(default=None)  # type: ignore[assignment]  # int64 [M], how often the number came before

    def __post_init__(self) -> None:
        if self.repeats is None:
            object.__setattr__(self, "repeats", occurrences(self.indices))

    def __len__(self) -> int:
        return len(self.indices)

    @cached_property
    def digest(self) -> str:
        """Hash of the order, which tells epochs apart whose orders have the same settings."""
        return hashlib.blake2b(self.indices.numpy().tobytes(), digest_size=8).hexdigest()


def describe(order: Order) -> str:
    """What a fingerprint says of an order; of one without a ``repr`` of its own only the class."""
    own = type(order).__repr__ is not object.__repr__
    return repr(order) if own else f"{type(order).__module__}.{type(order).__qualname__}"


def ordered(order: Order, seed: int, epoch: int, source: Any) -> Ordered:
    """The epoch of ``order``, with how often each sample came before."""
    return Ordered(order.order(seed, epoch, source))


@dataclass(frozen=True, eq=False, kw_only=True)
class EpochOrder(Sequence[tuple[Tensor, Tensor, Tensor]]):
    """The batches of one rank in what remains of an epoch from ``start`` on.

    Each is ``(indices, repeats, valid)``: int64 ``[b]``, int64 ``[b]``, bool ``[b]``, on the CPU.

    ``last`` says what becomes of samples that do not fill a batch on every rank. ``uneven``: all come, ranks may differ
    by one sample, and so by one batch. ``drop``: left out; all ranks have the same number of full batches. ``pad``: all
    come, and full batches are made with samples from the beginning of the epoch, ``valid`` False.
    """

    epoch: Ordered | Tensor = field(kw_only=False)
    start: int = 0
    rank: int = 0
    world_size: int = 1
    batch_size: int = 64
    last: Last = "uneven"

    def __post_init__(self) -> None:
        if isinstance(self.epoch, Tensor):
            object.__setattr__(self, "epoch", Ordered(self.epoch))
        check_last(self.last)
        if self.batch_size < 1:
            raise ConfigError(f"`batch_size` must be at least 1. Found: {self.batch_size}.")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"`rank` must satisfy 0 <= rank < world_size = {self.world_size}. Found: {self.rank}.")
        if not 0 <= self.start <= len(self.order):
            raise ConfigError(f"`start` must lie in 0 .. {len(self.order)}, the epoch. Found: {self.start}.")

    @property
    def order(self) -> Tensor:
        """Numbers in the source of the whole epoch, int64 ``[M]``."""
        assert isinstance(self.epoch, Ordered)
        return self.epoch.indices

    @property
    def repeats(self) -> Tensor:
        """How often each number came before in the epoch, int64 ``[M]``."""
        assert isinstance(self.epoch, Ordered)
        return self.epoch.repeats

    @property
    def remaining(self) -> int:
        """Samples from ``start`` on, over all ranks."""
        return len(self.order) - self.start

    def __len__(self) -> int:
        """Batches of this rank from ``start`` on."""
        step = self.batch_size * self.world_size
        if self.last == "drop":
            return self.remaining // step
        if self.last == "pad":
            return -(-self.remaining // step)
        mine = max(0, -(-(self.remaining - self.rank) // self.world_size))
        return -(-mine // self.batch_size)

    def __getitem__(self, k: Any) -> Any:
        """Batch ``k`` of this rank, counted from ``start``."""
        if isinstance(k, slice):
            return [self[i] for i in range(*k.indices(len(self)))]
        if not 0 <= k < len(self):
            raise IndexError(f"this epoch has batches 0 .. {len(self) - 1} from sample {self.start} on. Found: {k}.")
        total = len(self.order)
        begin = self.start + self.rank + k * self.batch_size * self.world_size
        end = begin + self.batch_size * self.world_size
        if end - self.world_size < total or self.last == "uneven":  # nothing beyond the end, or only left out
            indices, repeats = self.order[begin : end : self.world_size], self.repeats[begin : end : self.world_size]
            return indices.clone(), repeats.clone(), torch.ones(len(indices), dtype=torch.bool, device="cpu")
        positions = torch.arange(begin, end, self.world_size, device="cpu")
        again = positions // total
        positions %= total
        # beyond every occurrence in the epoch itself, so that what fills the batch is augmented anew
        repeats = self.repeats[positions] + again * (int(self.repeats.max()) + 1)
        return self.order[positions], repeats & 0xFFFF, again == 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        return (self[k] for k in range(len(self)))

    def position(self, k: int) -> int:
        """Samples of the epoch that all ranks together have consumed after ``k`` steps from ``start``."""
        return self.start + min(k * self.batch_size * self.world_size, self.remaining)


def _numbers(source: Any) -> NDArray[np.int64]:
    """Numbers of the active samples, ascending."""
    indices = getattr(source, "indices", None)
    return np.arange(len(source), dtype=np.int64) if indices is None else indices.numpy()


def _values(name: str, seed: int, epoch: int, count: int) -> NDArray[np.uint64]:
    values = np.empty(count, dtype=np.uint64)
    for start in range(0, count, _CHUNK):
        size = min(_CHUNK, count - start)
        values[start : start + size] = draw.integers(name, seed=seed, epoch=epoch, count=size, start=start)
    return values
