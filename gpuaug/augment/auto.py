"""torchvision's RandAugment, TrivialAugmentWide, AutoAugment and AugMix, with separate choices for each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gpuaug import checks
from gpuaug.augment import auto_pairs
from gpuaug.augment.crop import color
from gpuaug.augment.ops.pillow import INTERPOLATIONS, PillowOp
from gpuaug.augment.parameters import Alternatives, Prepared, RecipeOp, Size
from gpuaug.errors import ConfigError
from gpuaug.random.keyed import Float, Int, exponential, pick

GEOMETRIC = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
FACTORS = ("brightness", "color", "contrast", "sharpness")
_OTHERS = ("posterize", "solarize", "auto_contrast", "equalize")
MOST = 100  # maximum of `num_ops`, `mixture_width` and `chain_depth`
_BINS = 1000  # largest `num_magnitude_bins`
FREE_DEPTH = 3  # AugMix: largest random number of operations in a chain

Float64 = NDArray[np.float64]
Fill = float | Sequence[float] | None


class Policy(RecipeOp):
    """Base of the policies."""

    def __init__(self, interpolation: str, fill: Fill, *, also: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.interpolation = checks.one_of("interpolation", interpolation, (*INTERPOLATIONS, *also))
        made = color(0 if fill is None else fill, channels=3)
        self.fill = made if isinstance(made, tuple) else (made, made, made)

    def modules_of(self, names: Sequence[str], interpolation: str | None = None) -> tuple[nn.Module, ...]:
        """Make a :class:`PillowOp` for each of ``names``. ``interpolation`` replaces the policy's own setting."""
        interpolation = interpolation or self.interpolation
        return tuple(PillowOp(name, interpolation=interpolation, fill=self.fill) for name in names)


class RandAugment(Policy):
    """RandAugment (arXiv:1909.13719) as ``torchvision.transforms.RandAugment`` runs it on Pillow images.

    Each image gets ``num_ops`` of 14 operations. All 14 are equally likely, and an image can get the same operation
    more than once. Use the policy as an entry of a recipe's ``ops``.

    Args:
        num_ops: number of operations per image.
        magnitude: magnitude of every operation, 0 to ``num_magnitude_bins - 1``.
        num_magnitude_bins: number of magnitudes. Magnitude 0 is the weakest form of an operation.
        interpolation: ``nearest``, ``bilinear`` or ``bicubic``, for operations that move pixels.
        fill: colour of pixels from outside the image: 0..255, one number or three. None: black.

    >>> import gpuaug
    >>> list(gpuaug.Augment(ops={"randaugment": RandAugment(2, 9)}).ops)
    ['randaugment']
    """

    def __init__(
        self,
        num_ops: int = 2,
        magnitude: int = 9,
        num_magnitude_bins: int = 31,
        interpolation: str = "nearest",
        fill: Fill = None,
    ) -> None:
        super().__init__(interpolation, fill)
        self.num_ops = checks.whole_number("num_ops", num_ops, 1, MOST)
        self.num_magnitude_bins = checks.whole_number("num_magnitude_bins", num_magnitude_bins, 2, _BINS)
        self.magnitude = checks.whole_number("magnitude", magnitude, 0, num_magnitude_bins - 1)

    def prepare(self, name: str) -> Prepared:
        space = _Space(bins=self.num_magnitude_bins)
        rule = partial(_layers, space=space, slots=self.num_ops, low=self.magnitude, high=self.magnitude + 1)
        return Prepared(name, self, (self.modules_of(space.names),) * self.num_ops, _EACH * self.num_ops, rule)


class TrivialAugmentWide(Policy):
    """TrivialAugmentWide (arXiv:2103.10158) as torchvision's class of this name runs it on Pillow images.

    Each image gets one of 14 operations with a random magnitude. All operations and all magnitudes are equally likely.
    Use the policy as an entry of a recipe's ``ops``.

    Args:
        num_magnitude_bins: number of magnitudes. Magnitude 0 is the weakest form of an operation.
        interpolation: ``nearest``, ``bilinear`` or ``bicubic``, for operations that move pixels.
        fill: colour of pixels from outside the image: 0..255, one number or three. None: black.

    >>> TrivialAugmentWide(interpolation="bilinear").fill
    (0, 0, 0)
    """

    def __init__(self, num_magnitude_bins: int = 31, interpolation: str = "nearest", fill: Fill = None) -> None:
        super().__init__(interpolation, fill)
        self.num_magnitude_bins = checks.whole_number("num_magnitude_bins", num_magnitude_bins, 2, _BINS)

    def prepare(self, name: str) -> Prepared:
        space = _Space(
            bins=self.num_magnitude_bins,
            shear=0.99,
            shift=32.0,
            per=None,
            rotate=135.0,
            factor=0.99,
            dropped=6,
        )
        rule = partial(_layers, space=space, slots=1, low=0, high=self.num_magnitude_bins)
        return Prepared(name, self, (self.modules_of(space.names),), _EACH, rule)


class AutoAugment(Policy):
    """AutoAugment (arXiv:1805.09501) as ``torchvision.transforms.AutoAugment`` runs it on Pillow images.

    Each image gets one of 25 pairs of operations. Each operation of a pair has its own probability and magnitude. Use
    the policy as an entry of a recipe's ``ops``.

    Args:
        policy: the dataset for which the pairs were found: ``imagenet`` or ``cifar10``.
        interpolation: ``nearest``, ``bilinear`` or ``bicubic``, for operations that move pixels.
        fill: colour of pixels from outside the image: 0..255, one number or three. None: black.

    >>> AutoAugment("cifar10").policy
    'cifar10'
    """

    def __init__(self, policy: str = "imagenet", interpolation: str = "nearest", fill: Fill = None) -> None:
        super().__init__(interpolation, fill)
        self.policy = checks.one_of("policy", policy, ("imagenet", "cifar10"))

    def prepare(self, name: str) -> Prepared:
        pairs = auto_pairs.read(self.policy)
        space = _Space(names=pairs.names, bins=10)
        slots = (self.modules_of(space.names),) * 2
        return Prepared(name, self, slots, 5, partial(_of_pairs, space=space, pairs=pairs))


class AugMix(Policy):
    """AugMix (arXiv:1912.02781) with the distributions of ``torchvision.transforms.AugMix`` and the pixels of Pillow.

    ``mixture_width`` copies of the image go through separate chains of operations. The results and the unchanged image
    are mixed with random weights. Use the policy as an entry of a recipe's ``ops``, but not with masks, boxes or
    keypoints. torchvision's own pixels differ by 0.1 of 255 levels on average, because it computes on tensors.

    Args:
        severity: largest magnitude of an operation, 1 to 10.
        mixture_width: number of chains.
        chain_depth: number of operations per chain. Below 1: each chain gets 1 to 3 operations, at random.
        alpha: parameter of the Dirichlet and Beta distributions of the weights. It must be 1, as in the paper.
        all_ops: whether chains also use brightness, color, contrast and sharpness.
        interpolation: ``nearest``, ``bilinear`` or ``bicubic``, for operations that move pixels.
        fill: colour of pixels from outside the image: 0..255, one number or three. None: black.

    >>> AugMix(severity=5).mixture_width
    3
    """

    def __init__(
        self,
        severity: int = 3,
        mixture_width: int = 3,
        chain_depth: int = -1,
        alpha: float = 1.0,
        all_ops: bool = True,
        interpolation: str = "bilinear",
        fill: Fill = None,
    ) -> None:
        super().__init__(interpolation, fill)
        self.severity = checks.whole_number("severity", severity, 1, 10)
        self.mixture_width = checks.whole_number("mixture_width", mixture_width, 1, MOST)
        self.chain_depth = checks.whole_number("chain_depth", chain_depth, -1, MOST)
        self.alpha = checks.number("alpha", alpha, 0)
        self.all_ops = checks.flag("all_ops", all_ops)
        if alpha != 1:
            raise ConfigError(
                f"`alpha` must be 1, the value of AugMix's authors. gpuaug supports no other value. Found: {alpha!r}."
            )

    def prepare(self, name: str) -> Prepared:
        space = _Space(
            names=(*GEOMETRIC, *_OTHERS, *(FACTORS if self.all_ops else ())),
            bins=10,
            shift=1.0,
            per=3.0,
            bits=4,
        )
        depth = self.chain_depth if self.chain_depth > 0 else FREE_DEPTH
        slots = (self.modules_of(space.names),) * (self.mixture_width * depth)
        layers = partial(_layers, space=space, slots=len(slots), low=0, high=self.severity)
        rule = partial(chained, layers=layers, chains=self.mixture_width, free=self.chain_depth < 1)
        count = uniforms_of_chains(self.mixture_width) + _EACH * len(slots)
        return Prepared(name, self, slots, count, rule, chains=self.mixture_width)


# --- torchvision's magnitudes


@dataclass(frozen=True)
class _Space:
    """The operations of a policy and their strongest magnitudes. The defaults are those of RandAugment."""

    bins: int
    names: tuple[str, ...] = ("identity", *GEOMETRIC, *FACTORS, *_OTHERS)
    shear: float = 0.3
    shift: float = 150.0 / 331.0  # largest translation in pixels: `shift * side / per`, or `shift` if `per` is None
    per: float | None = 1.0
    rotate: float = 30.0
    factor: float = 0.9
    bits: int = 8  # bits that the weakest posterize keeps; the strongest keeps `bits - dropped`
    dropped: int = 4

    def magnitudes(self, bins: Int, negative: NDArray[np.bool_], size: Size) -> tuple[Alternatives, ...]:
        """Compute the parameters of each slot and operation. ``bins`` and ``negative``: [slots, B]."""
        by_bin = _by_bin(self, size)
        params = []
        for row, name in enumerate(self.names):
            values = by_bin[row][bins]
            if name in GEOMETRIC or name in FACTORS:
                values = np.where(negative, -values, values)
            if name.startswith("translate"):
                values = np.trunc(values)
            elif name in FACTORS:
                values = 1.0 + values
            params.append(values.astype(np.float32))
        return tuple(tuple({"magnitude": values[slot]} for values in params) for slot in range(len(bins)))


@lru_cache(maxsize=64)
def _by_bin(space: _Space, size: Size) -> Float64:
    """Magnitudes without sign, computed in float32 as in torchvision, stored as float64 [operations, bins]."""
    pixels = [space.shift if space.per is None else space.shift * extent / space.per for extent in size]
    ends = dict.fromkeys(FACTORS, space.factor) | dict.fromkeys(("shear_x", "shear_y"), space.shear)
    ends |= {"rotate": space.rotate, "translate_x": pixels[1], "translate_y": pixels[0]}
    line = partial(torch.linspace, steps=space.bins, dtype=torch.float32, device="cpu")
    rows = {name: line(0.0, end) for name, end in ends.items()} | {"solarize": line(255.0, 0.0)}
    position = torch.arange(space.bins, dtype=torch.float32, device="cpu")
    rows["posterize"] = space.bits - (position / ((space.bins - 1) / space.dropped)).round()
    return torch.stack([rows.get(name, 0 * position).double() for name in space.names]).numpy()


# --- choices

_EACH = 3  # uniforms per slot: operation, sign, magnitude


def _layers(
    u: Float, size: Size, *, space: _Space, slots: int, low: int, high: int
) -> tuple[Int, tuple[Alternatives, ...]]:
    """Draw one operation per slot, with a magnitude bin from ``low`` to ``high - 1``."""
    which, sign, level = u.reshape(len(u), slots, _EACH).transpose(2, 0, 1)
    params = space.magnitudes(low + pick(level, high - low).T, (sign < 0.5).T, size)
    return pick(which, len(space.names)), params


def _of_pairs(u: Float, size: Size, *, space: _Space, pairs: auto_pairs.Pairs) -> tuple[Int, tuple[Alternatives, ...]]:
    taken = pick(u[:, 0], len(pairs.p))
    choice = np.where(u[:, 1:3] < pairs.p[taken], pairs.ops[taken], -1)
    return choice, space.magnitudes(pairs.magnitudes[taken].T, (u[:, 3:5] < 0.5).T, size)


def uniforms_of_chains(chains: int) -> int:
    """Number of uniforms for the weight of all chains together, and for the weight and depth of each chain."""
    return 1 + 2 * chains


def chained(
    u: Float, size: Size, *, layers: Any, chains: int, free: bool
) -> tuple[Int, tuple[Alternatives, ...], Float]:
    """Draw the operations and weights of all chains. If ``free``, each chain has 1 to 3 operations."""
    choice, params = layers(u[:, uniforms_of_chains(chains) :], size)
    if free:
        depths = 1 + pick(u[:, 1 + chains : 1 + 2 * chains], FREE_DEPTH)
        position = np.arange(choice.shape[1])
        choice = np.where(position % FREE_DEPTH < depths[:, position // FREE_DEPTH], choice, -1)
    shares = exponential(u[:, 1 : 1 + chains])
    shares /= shares.sum(axis=1, keepdims=True)  # distributed as Dirichlet(1, ..., 1)
    return choice, params, np.concatenate([u[:, :1], shares.astype(np.float32)], axis=1)  # Beta(1, 1) is uniform
