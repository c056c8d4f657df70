"""RandAugment, AutoAugment and AugMix from strings of timm (timm/data/auto_augment.py).

A level is the strength of an operation, usually from 0 to 10. Each operation turns the level into its own parameter,
such as an angle.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from gpuaug.augment import auto_pairs
from gpuaug.augment.auto import FACTORS, FREE_DEPTH, GEOMETRIC, MOST, Fill, Float64, Policy, chained, uniforms_of_chains
from gpuaug.augment.parameters import Alternatives, Prepared, Size
from gpuaug.errors import ConfigError
from gpuaug.random.keyed import Float, Int, pick

ALLOWED = (
    "`rand` with any of -mN -nN -pP -mstdX -mmaxN -inc0 -inc1; `original`, `originalr`, `v0` or `v0r`, also "
    "with -mstdX; `augmix` with any of -mN -wN -dN -mstdX. N is a whole number of at most four digits, and at most "
    f"{MOST} for -n, -w and -d; P is from 0 to 1, X is at least 0"
)
_BLUR = " timm's 3-Augment uses a blur of Pillow that gpuaug lacks. Use augment=threeaugment, the recipe of DeiT III."
_HIGHEST = 10.0  # largest level, if the string has no mmax
_SHIFT, _AUGMIX_SHIFT = 0.45, 0.3  # largest translation, as a fraction of the image (from timm's create_transform)


class TimmAugment(Policy):
    """RandAugment, AutoAugment or AugMix from a string of timm, such as ``rand-m9-mstd0.5-inc1``.

    Supported: ``rand`` with any of ``-m -n -p -mstd -mmax -inc``; ``original``, ``originalr``, ``v0`` and
    ``v0r``, also with ``-mstd``; ``augmix`` with any of ``-m -w -d -mstd``. The pixels equal Pillow's. Use the policy
    as an entry of a recipe's ``ops``.

    Args:
        config: the string, as for timm's option ``--aa``.
        interpolation: ``nearest``, ``bilinear``, ``bicubic`` or ``random``, for operations that move pixels. With
            ``random``, timm's default, each operation uses bilinear or bicubic, at random.
        fill: colour of pixels from outside the image: 0..255, one number or three. The default is the mean of ImageNet,
            as in timm.

    >>> TimmAugment("rand-m7-n3-inc1").config
    'rand-m7-n3-inc1'
    """

    def __init__(
        self,
        config: str = "rand-m9-mstd0.5-inc1",
        interpolation: str = "bicubic",
        fill: Fill = (124, 116, 104),
    ) -> None:
        super().__init__(interpolation, fill, also=("random",))
        self.config, self._policy = config, parse(config)

    def prepare(self, name: str) -> Prepared:
        policy = self._policy
        rule: Any = partial(_layers, policy=policy, either=self.interpolation == "random")
        count = (policy.pairs is not None) + _EACH * policy.slots  # the first uniform selects a pair
        if policy.chains:
            rule = partial(chained, layers=rule, chains=policy.chains, free=policy.free)
            count += uniforms_of_chains(policy.chains)
        names = [_ARGUMENTS[each][0] for each in policy.names]
        if self.interpolation == "random":
            moving = [name for name in names if name in GEOMETRIC]
            modules = self.modules_of(names, "bilinear") + self.modules_of(moving, "bicubic")
        else:
            modules = self.modules_of(names)
        slots = (modules,) * policy.slots
        return Prepared(name, self, slots, count, rule, chains=policy.chains, rounds_twice=policy.chains > 0)


# --- timm's strings


@dataclass(frozen=True)
class TimmPolicy:
    """The policy that a string describes."""

    names: tuple[str, ...]  # the operations, as keys of `_ARGUMENTS`
    slots: int = 2  # maximum of operations per image, summed over the chains of AugMix
    magnitude: float = 10.0  # the level before noise is added
    std: float = 0.0  # standard deviation of the normal noise; infinite: the level is uniform from 0 to `magnitude`
    highest: float = _HIGHEST  # largest level
    p: float = 0.5  # probability that a chosen operation is applied
    pairs: tuple[str, str] | None = None  # for AutoAugment: `auto_pairs.read(*pairs)` has levels and probabilities
    chains: int = 0  # number of AugMix's chains
    free: bool = False  # whether chains have a random number of operations


_WHOLE, _COUNT, _DECIMAL = "[0-9]{1,4}", "[1-9][0-9]?|100", r"[0-9]+\.?[0-9]*"
_STD = {"mstd": _DECIMAL}
_RAND = {"m": _WHOLE, "n": _COUNT, "p": r"0\.?[0-9]*|1\.?0*", "mmax": "[1-9][0-9]{0,3}", "inc": _WHOLE}
_AUGMIX = {"m": _WHOLE, "w": _COUNT, "d": f"0|{_COUNT}", "a": r"1\.?0*", "b": "0"}
_PARTS: dict[str, dict[str, str]] = {  # by the first word of a string: keys of its parts, and patterns of their values
    "rand": _RAND | _STD,
    "augmix": _AUGMIX | _STD,
    **dict.fromkeys(("original", "originalr", "v0", "v0r"), _STD),
}


def parse(config: str) -> TimmPolicy:
    """Read a string for timm's option ``--aa``. Raise ConfigError for a part that is not supported."""
    if not isinstance(config, str):
        raise _refused(config, f"a {type(config).__name__}")
    kind, *parts = config.split("-")
    if kind not in _PARTS:
        raise _refused(config, f"{kind!r}", _BLUR if kind == "3a" else "")
    given: dict[str, str] = {}
    for part in parts:
        key = next((k for k, pattern in _PARTS[kind].items() if re.fullmatch(f"{k}({pattern})", part)), None)
        if key is None or key in given:
            reason = _BLUR if part.startswith("t3a") else " This part occurs twice." if key else ""
            raise _refused(config, f"{part!r} in {config!r}" if part else f"an empty part in {config!r}", reason)
        given[key] = part.removeprefix(key)
    return _policy_of(kind, given)


def _refused(config: Any, found: str, reason: str = "") -> ConfigError:
    return ConfigError(f"`config` must be a string of timm that gpuaug knows: {ALLOWED}. Found: {found:.200}.{reason}")


def _policy_of(kind: str, given: dict[str, str]) -> TimmPolicy:
    std = float(given.get("mstd", 0))
    if kind == "augmix":
        chains, depth = int(given.get("w", 3)), int(given.get("d", 0))
        slots = chains * (depth or FREE_DEPTH)
        magnitude, std = float(given.get("m", 3)), float(given.get("mstd", math.inf))
        return TimmPolicy(_AUGMIX_NAMES, slots, magnitude, std, p=1.0, chains=chains, free=depth == 0)
    if kind == "rand":
        return TimmPolicy(
            _RAND_INCREASING if int(given.get("inc", 0)) else _RAND_NAMES,
            slots=int(given.get("n", 2)),
            magnitude=float(given.get("m", _HIGHEST)),
            std=math.inf if std > 100 else std,
            highest=float(given.get("mmax", _HIGHEST)),
            p=float(given.get("p", 0.5)),
        )
    pairs = {
        "original": ("imagenet", "posterize_original"),
        "originalr": ("imagenet", "posterize_increasing"),
        "v0": ("v0", "posterize"),
        "v0r": ("v0", "posterize_increasing"),
    }[kind]
    return TimmPolicy(auto_pairs.read(*pairs).names, std=std, pairs=pairs)


# --- timm's operations

# arguments: level / 10, sign, and the largest translation in pixels (horizontal, vertical)
_Argument = Callable[[Float64, Float64, tuple[float, float]], Any]

_ARGUMENTS: dict[str, tuple[str, _Argument]] = {  # name of the PillowOp, and the function that computes its parameter
    **{name: (name, lambda f, s, shift: np.zeros_like(f)) for name in ("auto_contrast", "equalize", "invert")},
    **{name: (name, lambda f, s, shift: f * 1.8 + 0.1) for name in FACTORS},
    **{f"{name}_increasing": (name, lambda f, s, shift: np.maximum(0.1, 1.0 + s * (f * 0.9))) for name in FACTORS},
    "rotate": ("rotate", lambda f, s, shift: s * (f * 30.0)),
    "shear_x": ("shear_x", lambda f, s, shift: s * (f * 0.3)),
    "shear_y": ("shear_y", lambda f, s, shift: s * (f * 0.3)),
    # a positive shift of timm moves the content left or up
    "translate_x": ("translate_x", lambda f, s, shift: -s * f * shift[0]),
    "translate_y": ("translate_y", lambda f, s, shift: -s * f * shift[1]),
    "posterize": ("posterize", lambda f, s, shift: np.trunc(f * 4).clip(0, 8)),
    "posterize_increasing": ("posterize", lambda f, s, shift: (4 - np.trunc(f * 4)).clip(0, 8)),
    "posterize_original": ("posterize", lambda f, s, shift: (np.trunc(f * 4) + 4).clip(0, 8)),
    "solarize": ("solarize", lambda f, s, shift: np.minimum(256, np.trunc(f * 256))),
    "solarize_increasing": ("solarize", lambda f, s, shift: 256 - np.minimum(256, np.trunc(f * 256))),
    "solarize_add": ("solarize_add", lambda f, s, shift: np.minimum(128, np.trunc(f * 110))),
}
_RAND_NAMES = (
    *("auto_contrast", "equalize", "invert", "rotate", "posterize", "solarize", "solarize_add"),
    *("color", "contrast", "brightness", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y"),
)
_RAND_INCREASING = tuple(
    f"{name}_increasing" if name in (*FACTORS, "posterize", "solarize") else name for name in _RAND_NAMES
)
_AUGMIX_NAMES = tuple(name for name in _RAND_INCREASING if name not in ("invert", "solarize_add"))

# --- choices

_EACH = 6  # random values per slot: operation, applied or not, two for the level, sign, interpolation


def _layers(u: Float, size: Size, *, policy: TimmPolicy, either: bool) -> tuple[Int, tuple[Alternatives, ...]]:
    """Draw one operation per slot. If ``either``, operations that move pixels are bilinear or bicubic, at random."""
    slots = u[:, -_EACH * policy.slots :].reshape(len(u), policy.slots, _EACH).transpose(2, 0, 1)
    p, magnitude = np.full((1, 1), policy.p, dtype=np.float32), np.full((1, 1), policy.magnitude)
    if policy.pairs:
        pairs = auto_pairs.read(*policy.pairs)
        taken = pick(u[:, 0], len(pairs.p))
        choice, p, magnitude = pairs.ops[taken], pairs.p[taken], pairs.magnitudes[taken].astype(np.float64)
    else:
        choice = pick(slots[0], len(policy.names))
    if policy.std == math.inf:
        level = magnitude * slots[2]
    else:  # normal noise, by Box-Muller
        radius = np.sqrt(-2.0 * np.log1p(-slots[2].astype(np.float64)))
        level = magnitude + policy.std * radius * np.cos(2.0 * np.pi * slots[3])
    level = (level.clip(0, policy.highest) / 10.0).T
    moving = [k for k, name in enumerate(policy.names) if name in GEOMETRIC] if either else []
    sign = np.where(slots[4] > 0.5, -1.0, 1.0).T  # timm negates if its random number is above 1/2
    part = _AUGMIX_SHIFT if policy.chains else _SHIFT
    arguments = [_ARGUMENTS[name][1] for name in (*policy.names, *(policy.names[k] for k in moving))]
    values = [argument(level, sign, (part * size[1], part * size[0])).astype(np.float32) for argument in arguments]
    if either:
        other = np.arange(len(policy.names))
        other[moving] = len(policy.names) + np.arange(len(moving))
        choice = np.where(slots[5] < np.float32(0.5), choice, other[choice])
    params = tuple(tuple({"magnitude": each[slot]} for each in values) for slot in range(policy.slots))
    return np.where(slots[1] < p, choice, -1), params
