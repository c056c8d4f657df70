"""The sample order of an epoch, and the share of each rank.

All ranks hold the same order. Rank r of R takes the positions ``start + r``, ``start + r + R``, ... After each
step, the ranks together have consumed all samples up to a position. Any number of ranks can continue there.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import WeightedRandomSampler

from gpuaug import checks
from gpuaug.batch import Tiles
from gpuaug.errors import ConfigError, SourceError
from gpuaug.random import keyed as draw
from gpuaug.read.tokens import Plan, Tokens
from gpuaug.source.adapt import active_numbers, numbers_by_position
from gpuaug.source.adapt import adapt as adapt_source
from gpuaug.source.index import occurrences, range_problem, read_numbers

Last = Literal["uneven", "drop", "pad"]
# indices, repeats, valid of a batch: int64, int64, bool [B], on the CPU. With tiles, they have T rows, and `valid` is
# False for samples that are only tiles of others.
Task = tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tiles]


_CHUNK = 1 << 16  # values per generator call; 1.28 million values take 21 ms in such calls, but 300 ms in one call


class Order(Protocol):
    """Decides which samples an epoch has, and in which order. ``repr`` must contain all settings."""

    def order(self, seed: int, epoch: int, source: Any) -> Tensor:
        """Return numbers of active samples of ``source``, int64 ``[M]``. Repeats are allowed."""
        ...


@dataclass(frozen=True)
class Shuffle:
    """A new permutation of the active samples in each epoch.

    If a sample is left out, the other samples keep their order.

    >>> Shuffle().order(seed=0, epoch=0, source=range(5))
    tensor([2, 0, 4, 3, 1])
    """

    def order(self, seed: int, epoch: int, source: Any) -> Tensor:
        """Each active number once, int64 ``[len(source)]``; a new permutation for each ``seed`` and ``epoch``."""
        numbers = active_numbers(adapt_source(source))
        values = _values("order", seed, epoch, int(numbers[-1]) + 1 if len(numbers) else 0)
        return torch.from_numpy(numbers[np.argsort(values[numbers], kind="stable")])

    def position(self, seed: int, epoch: int, order: Tensor, after: int) -> int:
        """Count the samples of ``order``, int64 ``[n]``, up to and including sample number ``after``.

        ``order`` may lack ``after``. ``seed`` and ``epoch`` are those of ``order``.
        """
        numbers = order.numpy()
        values = _values("order", seed, epoch, int(numbers.max(initial=0)) + 1)
        value = draw.integers("order", seed=seed, epoch=epoch, count=1, start=after)
        return int(np.searchsorted(values[numbers], value[0], side="right"))


@dataclass(frozen=True)
class Sequential:
    """The active samples in the order of the source, ascending by number also in a torch Subset.

    >>> Sequential().order(seed=0, epoch=0, source=range(5))
    tensor([0, 1, 2, 3, 4])
    """

    def order(self, seed: int, epoch: int, source: Any) -> Tensor:
        """Each active number once, ascending, int64 ``[len(source)]``; ``seed`` and ``epoch`` have no effect."""
        return torch.from_numpy(active_numbers(adapt_source(source)))

    def position(self, seed: int, epoch: int, order: Tensor, after: int) -> int:
        """Count the samples of ``order``, int64 ``[n]``, up to and including sample number ``after``.

        ``order`` may lack ``after``. ``seed`` and ``epoch`` have no effect.
        """
        return int(np.searchsorted(order.numpy(), after, side="right"))


class Weighted:
    """Draws ``len(source)`` samples with replacement, with probabilities proportional to weights.

    Args:
        weights: ``class`` draws every class equally often. Otherwise one weight >= 0 per sample of the source, as a
            sequence or a FILE (.npy, .json, or text with one number per line).

    >>> Weighted([0, 1, 1, 2, 2, 4]).order(seed=0, epoch=0, source=range(6))
    tensor([5, 3, 5, 5, 5, 3])
    """

    def __init__(self, weights: str | os.PathLike[str] | Sequence[float] | Tensor = "class") -> None:
        self.weights: NDArray[np.float64] | None = None
        if isinstance(weights, str) and weights == "class":
            return
        self.weights = _numbers(weights, "order.weights", "`class`, a FILE, or one finite number >= 0 per sample")

    def __repr__(self) -> str:
        return f"Weighted(weights={'class' if self.weights is None else _digest(self.weights)})"

    def order(self, seed: int, epoch: int, source: Any) -> Tensor:
        """Sample numbers with repeats, int64 ``[len(source)]``; new ones for each ``seed`` and ``epoch``."""
        source = adapt_source(source)
        numbers = active_numbers(source)
        bounds = np.cumsum(self._weights(source, numbers))
        if not bounds.size or bounds[-1] <= 0:
            raise ConfigError("`order.weights` must be above 0 for at least one sample. Found: all are 0.")
        u = (_values("weighted", seed, epoch, len(numbers)) >> np.uint64(11)) * 2.0**-53
        # `side="right"` skips weight 0. `minimum` is needed if the product rounds up to the last bound.
        last = np.searchsorted(bounds, bounds[-1], side="left")
        return torch.from_numpy(numbers[np.minimum(np.searchsorted(bounds, u * bounds[-1], side="right"), last)])

    def _weights(self, source: Any, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        if self.weights is None:
            if source.labels is None:
                raise ConfigError(
                    "`order=weighted` with `order.weights=class` needs a source that knows its labels without reading "
                    f"the samples. Found: {source!r}. Give a FILE with one weight per sample."
                )
            own = source.labels.numpy()[numbers]
            if own.min(initial=0) < 0:
                raise SourceError(f"`order.weights=class` needs labels >= 0. Found: {own.min()}.")
            return 1.0 / np.bincount(own)[own]
        return _of_samples(self.weights, source, numbers, "`order.weights` must hold one weight")


@dataclass(frozen=True)
class Repeated:
    """Repeated augmentation (arXiv:1901.09335, arXiv:1902.05509), as in DeiT and timm.

    Each epoch shows ``1 / repeats`` of the samples, in a new permutation, each sample ``repeats`` times in a row.
    Neighbouring ranks get copies of the same sample. The length of an epoch stays ``len(source)``.

    >>> Repeated(repeats=2).order(seed=0, epoch=0, source=range(6))
    tensor([2, 2, 5, 5, 0, 0])
    """

    repeats: int = 3

    def __post_init__(self) -> None:
        checks.whole_number("order.repeats", self.repeats, 1, 0xFFFF)

    def order(self, seed: int, epoch: int, source: Any) -> Tensor:
        """Sample numbers with repeats, int64 ``[len(source)]``; new ones for each ``seed`` and ``epoch``."""
        once = Shuffle().order(seed, epoch, source)
        return once[: -(-len(once) // self.repeats)].repeat_interleave(self.repeats)[: len(once)]


class Buckets:
    """A new permutation in each epoch, in which samples of similar shape are neighbours: batches need less padding.

    Samples are put into buckets by height / width, in the order of a permutation. When a bucket has ``samples`` of
    them, these come next in the epoch. What is left at the end comes last. So do torchvision's ``GroupedBatchSampler``
    and detectron2's ``AspectRatioGroupedDataset``, but each rank on its own.

    Args:
        samples: how many samples of one bucket are neighbours. If it is a multiple of ``batch_size`` times the number
            of ranks, each step shows samples of one bucket on all ranks. The order does not depend on these two
            numbers, so a run can resume with others.
        edges: ascending height / width at which a new bucket begins. The default has a bucket for images that are wider
            than high, and one for all others, as detectron2. torchvision: 0.5, 0.63, 0.79, 1, 1.26, 1.59, 2.
        ratios: height / width of each sample, as a sequence or a FILE (.npy, .json, or text with one number per line);
            None: those that the source knows (COCO, VOC, and folders of ``gpuaug pack``).

    >>> Buckets(2, ratios=[0.7, 1.5, 0.7, 1.5, 0.7]).order(seed=0, epoch=0, source=range(5))
    tensor([2, 0, 3, 1, 4])
    """

    def __init__(
        self,
        samples: int,
        *,
        edges: Sequence[float] = (1.0,),
        ratios: str | os.PathLike[str] | Sequence[float] | Tensor | None = None,
    ) -> None:
        self.samples = checks.whole_number("order.samples", samples, 1, 2**31)
        self.edges = _numbers(edges, "order.edges", "a list of numbers >= 0")
        if (np.diff(self.edges) <= 0).any():
            raise ConfigError(f"`order.edges` must be ascending. Found: {edges!r:.200}.")
        self.ratios = None if ratios is None else _numbers(ratios, "order.ratios", "a FILE or one number per sample")

    def __repr__(self) -> str:
        ratios = "" if self.ratios is None else f", ratios={_digest(self.ratios)}"
        return f"Buckets({self.samples}, edges={self.edges.tolist()}{ratios})"

    def order(self, seed: int, epoch: int, source: Any) -> Tensor:
        """Each active number once, int64 ``[len(source)]``; a new permutation for each ``seed`` and ``epoch``."""
        source = adapt_source(source)
        numbers, shuffled = active_numbers(source), Shuffle().order(seed, epoch, source)
        bucket = np.searchsorted(self.edges, self._ratios(source, numbers), side="right")
        own = bucket[np.searchsorted(numbers, shuffled.numpy())]
        last = np.full(len(own), len(own))
        for each in range(len(self.edges) + 1):
            at = np.flatnonzero(own == each)
            whole = at[: len(at) // self.samples * self.samples].reshape(-1, self.samples)
            last[whole] = whole[:, -1:]  # a group comes when its last sample is found
        return shuffled[torch.from_numpy(np.argsort(last, kind="stable"))]

    def _ratios(self, source: Any, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        if self.ratios is not None:
            return _of_samples(self.ratios, source, numbers, "`order.ratios` must hold one number")
        shapes = getattr(source, "shapes", None)
        if shapes is None or (known := shapes()) is None:
            raise ConfigError(
                "`order=buckets` needs a source that knows the sizes of its images without reading them. Found: "
                f"{source!r}. Set `order.ratios` to a FILE with height / width of each sample, or use `gpuaug pack`."
            )
        height, width = known[numbers].T.astype(np.float64)
        return np.where(width > 0, height / np.maximum(width, 1), 1.0)


@dataclass(frozen=True)
class Grouped:
    """A new permutation of the images in each epoch, in which the samples of one image are neighbours.

    For a source with several samples of one image, such as ``source.unit=object``: on the CPU, equal files of a batch
    are decoded once. But the samples of a batch are then more alike. Samples have the same image if the source's
    ``image_ids`` are equal.

    Args:
        streams: the epoch consists of this many streams, which take turns: position p belongs to stream
            ``p % streams``. In each stream, the samples of one image stand in a row; at most ``streams - 1`` images are
            cut by the end of a stream. If the number of ranks divides ``streams``, each other image is on one rank.
            With one rank, 1 decodes fewest images. The order does not depend on the ranks, so a run can resume with
            others.

    >>> class People(list):
    ...     image_ids = [5, 5, 5, 7, 7, 9]
    >>> Grouped(streams=1).order(seed=0, epoch=0, source=People([(b"...", 0)] * 6))
    tensor([5, 0, 1, 2, 3, 4])
    """

    streams: int = 8

    def __post_init__(self) -> None:
        checks.whole_number("order.streams", self.streams, 1, 2**16)

    def order(self, seed: int, epoch: int, source: Any) -> Tensor:
        """Each active number once, int64 ``[len(source)]``; a new permutation for each ``seed`` and ``epoch``."""
        source = adapt_source(source)
        ids = np.empty(0) if source.image_ids is None else source.image_ids.numpy()
        _, first, image = np.unique(ids, return_index=True, return_inverse=True)
        if len(first) == len(ids):
            raise ConfigError(
                "`order=grouped` needs a source with several samples of one image, which have equal `image_ids`. "
                f"Found: {source!r}. Set `source.unit=object` (COCO), or use `order=shuffle`."
            )
        numbers = active_numbers(source)
        values = _values("order", seed, epoch, len(ids))[first[image[numbers]]]
        order = numbers[np.argsort(values, kind="stable")]
        streams = np.array_split(order.copy(), self.streams)
        for stream, part in enumerate(streams):
            order[stream :: self.streams] = part
        return torch.from_numpy(order)


class Positions:
    """The same order in each epoch: a list or array of positions 0 .. len(source) - 1."""

    def __init__(self, values: Any) -> None:
        positions = np.array(values)
        if not positions.size:
            positions = positions.astype(np.int64)
        if positions.ndim != 1 or positions.dtype.kind not in "iu":
            raise ValueError
        self._positions = positions

    def __repr__(self) -> str:
        return f"Positions({_digest(self._positions.astype(np.int64))})"

    def order(self, seed: int, epoch: int, source: Any) -> Tensor:
        """The sample numbers at the positions, int64 ``[M]``; ``seed`` and ``epoch`` have no effect."""
        numbers = numbers_by_position(adapt_source(source))
        if wrong := range_problem(self._positions, len(numbers)):
            raise ConfigError(f"`order` must have positions 0 .. {len(numbers) - 1}. Found: {wrong}.")
        return torch.from_numpy(numbers[self._positions])


def adapt(order: Any) -> Order:
    """Make an order from ``shuffle``, ``sequential``, an order, or a list or array of positions."""
    if isinstance(order, str) and order in ("shuffle", "sequential"):
        return Shuffle() if order == "shuffle" else Sequential()
    if callable(getattr(order, "order", None)):
        return order
    if isinstance(order, Sequence | np.ndarray | Tensor):
        with suppress(ValueError, TypeError, RuntimeError):  # lists of different lengths, a tensor on another device
            return Positions(order)
    remedy = "For another order, give an object with the method `order(seed, epoch, source)`."
    if isinstance(order, WeightedRandomSampler):
        remedy = "Use order=weighted, or gpuaug.Weighted(weights)."
    raise ConfigError(
        "`order` must be shuffle, sequential, gpuaug.Shuffle, Sequential, Weighted, Repeated, Buckets or Grouped, or a "
        f"list of positions in the source. Found: {order!r:.200}. {remedy}"
    )


def describe(order: Order) -> str:
    """Text of an order in a loader's fingerprint."""
    own = type(order).__repr__ is not object.__repr__
    return repr(order) if own else f"{type(order).__module__}.{type(order).__qualname__}"


class Ordered:
    """A whole epoch, the same on every rank.

    Attributes:
        indices: int64 ``[M]``, numbers in the source.
        repeats: int64 ``[M]``, how often each number occurred earlier in the epoch.
    """

    def __init__(self, indices: Tensor) -> None:
        self.indices, self.repeats = indices, occurrences(indices)

    def __len__(self) -> int:
        return len(self.indices)

    @cached_property
    def digest(self) -> str:
        """Hash of ``indices``."""
        return _digest(self.indices.numpy())


class Step(NamedTuple):
    """A step of training.

    Attributes:
        number: in the epoch, from 0.
        length: patches of each sequence; None: the batches have ``batch_size`` samples.
    """

    number: int
    length: int | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class EpochOrder(Sequence[Task]):
    """The batches of one rank, from position ``start`` to the end of an epoch, each as ``(indices, repeats, valid)``.

    For ``last`` see :class:`gpuaug.Loader`. ``pad`` repeats the first samples of the epoch. ``limit`` is the largest
    number of batches from the beginning of the epoch; None: no limit. ``tokens``: decides the size of each batch, in
    place of ``batch_size``; it needs ``seed``, ``number``, that of the epoch, and ``origin``, as its ``_plan``.
    """

    epoch: Ordered = field(kw_only=False)
    start: int = 0
    rank: int = 0
    world_size: int = 1
    batch_size: int = 64
    last: Last = "uneven"
    limit: int | None = None
    tokens: Tokens | None = None
    seed: int = 0
    number: int = 0
    origin: int = 0

    @cached_property
    def plan(self) -> Plan | None:
        """The steps, if ``tokens`` decides their sizes."""
        if self.tokens is None:
            return None
        place: dict[str, Any] = {"start": self.start, "origin": self.origin, "seed": self.seed, "epoch": self.number}
        return self.tokens._plan(len(self.epoch), ranks=self.world_size, **place, whole=self.last == "drop")

    def before(self, k: int) -> int:
        """How many samples each rank has consumed before batch ``k``, counted from ``start``."""
        return k * self.batch_size if self.plan is None else int(self.plan.bounds[k])

    @property
    def remaining(self) -> int:
        """Number of samples of all ranks from ``start`` on."""
        return len(self.epoch) - self.start

    def __len__(self) -> int:
        """Number of batches of this rank from ``start`` on."""
        if self.plan is None:
            step = self.batch_size * self.world_size
            count, first = -(-self.remaining // step), -(-self.start // step)
            count -= self.last == "drop" and self.remaining % step > 0
        else:
            count, first = len(self.plan.lengths), self.plan.first
        if self.last == "uneven" and count:  # the last batch of a rank may be empty
            count -= self.world_size * self.before(count - 1) + self.rank >= self.remaining
        return count if self.limit is None else max(0, min(count, self.limit - first))

    def __getitem__(self, k: Any) -> Any:
        if isinstance(k, slice):
            return [self[i] for i in range(*k.indices(len(self)))]
        if not 0 <= k < len(self):
            raise IndexError(f"`k` must be 0 .. {len(self) - 1}, a batch from position {self.start} on. Found: {k}.")
        positions, total = self.positions(k), len(self.epoch)
        again = positions // total
        positions %= total
        indices, repeats = self.epoch.indices[positions], self.epoch.repeats[positions]
        if again[-1]:  # padding gets new repeat numbers, and so other random parameters
            repeats = (repeats + again * (int(self.epoch.repeats.max()) + 1)) & 0xFFFF
        return indices, repeats, again == 0

    def positions(self, k: int) -> Tensor:
        """The positions of batch ``k`` in the epoch, int64; from ``len(self.epoch)`` on, the epoch begins again."""
        begin, end = (self.start + self.rank + self.world_size * self.before(i) for i in (k, k + 1))
        end = end if self.last == "pad" else min(end, len(self.epoch))
        return torch.arange(begin, end, self.world_size, device="cpu")

    def step(self, k: int) -> Step:
        """What batch ``k`` has in common on all ranks."""
        if self.plan is not None:
            return Step(self.plan.first + k, int(self.plan.lengths[k]))
        return Step(self.start // (self.batch_size * self.world_size) + k)

    def position(self, k: int) -> int:
        """The position of all ranks together after ``k`` steps from ``start``."""
        return self.start + min(self.world_size * self.before(k), self.remaining)


def _numbers(given: Any, key: str, allowed: str) -> NDArray[np.float64]:
    """The numbers >= 0 of a list, an array or a FILE."""
    if isinstance(given, str | os.PathLike):
        values = read_numbers(given, key=key, dtype=np.float64)
    else:
        try:
            values = np.array(given, dtype=np.float64)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            values = np.asarray(np.nan)
    if values.ndim != 1 or not np.isfinite(values).all() or (values < 0).any():
        raise ConfigError(f"`{key}` must be {allowed}. Found: {given!r:.200}.")
    return values


def _of_samples(values: NDArray[np.float64], source: Any, numbers: NDArray[np.int64], what: str) -> NDArray[np.float64]:
    """The values of the active samples ``numbers``. ``values``: of these, by position, or of the whole source."""
    if len(values) == len(numbers):
        return values[np.argsort(numbers_by_position(source))]
    if source.indices is None or (len(numbers) and len(values) <= numbers[-1]):
        raise ConfigError(f"{what} per sample of the source: {len(numbers)}. Found: {len(values)}.")
    return values[numbers]


def _values(name: str, seed: int, epoch: int, count: int) -> NDArray[np.uint64]:
    values = np.empty(count, dtype=np.uint64)
    for start in range(0, count, _CHUNK):
        size = min(_CHUNK, count - start)
        values[start : start + size] = draw.integers(name, seed=seed, epoch=epoch, count=size, start=start)
    return values


def _digest(values: NDArray[Any]) -> str:
    return hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest()
