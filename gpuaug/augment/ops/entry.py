"""What an entry for a Kornia class consists of, and the parts that many entries share.

Parameters follow Kornia's formulas: given the uniforms that Kornia would have drawn, they are the same to the last bit.
Steps are the instructions of the fused backend. Their formulas are in fused/cpu.cpp, fused/cuda.py and
fused/cuda_steps.py, and equal Kornia's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, Literal

import numpy as np
from torch import Tensor

from gpuaug.augment.ops import kornia_private
from gpuaug.augment.ops.kornia_private import Range
from gpuaug.augment.parameters import Params, Prepared, Rule, Size
from gpuaug.random.keyed import Float

ARGS = 12  # float32 arguments of one step


class Code(IntEnum):
    """The steps; in brackets their arguments. Colours are clamped to 0..1 where Kornia clamps them."""

    NONE = 0
    HFLIP = 1
    VFLIP = 2
    MULTIPLY = 3  # (r, g, b)
    ADD = 4  # (r, g, b)
    CONTRAST = 5  # (factor), around the mean gray of the image at this point
    SATURATION = 6  # (factor), towards gray
    SATURATION_HSV = 7  # (factor)
    HUE = 8  # (turns)
    GRAY = 9  # (weights of r, g, b, 1 where they can leave 0..1)
    SOLARIZE = 10  # (threshold, addition)
    POSTERIZE = 11  # (bits)
    INVERT = 12  # (maximum)
    GAMMA = 13  # (gamma, gain)
    SHUFFLE = 14  # (source of r, of g, of b)
    ERASE = 15  # (x, y, width, height, value)
    NOISE = 16  # (); adds a field
    AUTOCONTRAST = 17  # (1: clamp)
    EQUALIZE = 18
    SHARPNESS = 19  # (factor)
    BLUR = 20  # (taps in x, taps in y, sigma, border: kornia.constants.BorderType)
    WARP = 21  # (matrix row by row from output to input in -1..1, padding: SamplePadding, align_corners, projective)


Write = Callable[[Float, Params, Size], None]  # fills the arguments of n rows: float32 [n, steps, ARGS], zeros before
Parameters = Callable[[Any], tuple[int, Rule]]  # a module to the number of uniforms and the rule
Normal = Callable[[Tensor, int], Tensor]  # keys int64 [B, 2] and n to standard normal values float32 [B, n]


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of one Kornia module, and the function that writes their arguments."""

    codes: tuple[Code, ...]
    write: Write


def uniform(u: Float, size: Size, *, names: tuple[str, ...], low: Float, span: Float) -> Params:
    """Independent uniform parameters; ``low`` and ``span`` are float32 [n, 1]."""
    values = np.multiply(u[:, : len(names)].T, span, order="C")  # one contiguous row per parameter
    values += low
    return dict(zip(names, values, strict=True))


def _uniform(ranges: dict[str, Range]) -> tuple[int, Rule]:
    low, high = np.array(list(ranges.values()), dtype=np.float32).reshape(-1, 2).T[:, :, None]
    return len(ranges), partial(uniform, names=tuple(ranges), low=low, span=high - low)  # as torch's Uniform has them


def all_uniform(op: Any) -> tuple[int, Rule]:
    """Every parameter that Kornia draws is uniform, under Kornia's own name for it; many operations draw none."""
    return _uniform(kornia_private.ranges(op))


def uniform_from(*names: str) -> Parameters:
    """Uniform parameters, in the order in which Kornia draws; ``x`` and ``x_factor`` come from Kornia's ``x_sampler``.

    Those for which the operation's settings have no sampler are missing.
    """

    def parameters(op: Any) -> tuple[int, Rule]:
        samplers = ((name, f"{name.removesuffix('_factor')}_sampler") for name in names)
        drawn = {name: kornia_private.range_of(op, sampler) for name, sampler in samplers}
        return _uniform({name: limits for name, limits in drawn.items() if limits is not None})

    return parameters


def derived(parameters: Parameters, derive: Callable[..., Params]) -> Parameters:
    """What ``derive(u, size, rule=...)`` makes of the rule of other parameters."""

    def both(op: Any) -> tuple[int, Rule]:
        count, rule = parameters(op)
        return count, partial(derive, rule=rule)

    return both


def steps_of(code: Code, *arguments: str | float) -> Steps:
    """One step; its arguments are parameters by name, or the same number for every sample."""

    def write(out: Float, params: Params, size: Size) -> None:
        for column, argument in enumerate(arguments):
            out[:, 0, column] = params[argument] if isinstance(argument, str) else argument

    return Steps((code,), write)


def step(code: Code, *arguments: str | float) -> Callable[[Any], Steps]:
    """The same, for any settings of the module."""
    return lambda op: steps_of(code, *arguments)


@dataclass(frozen=True, slots=True)
class Entry:
    """Everything that gpuaug knows of one Kornia class.

    Attributes:
        affects: what the operation does to a sample. ``pixels``: no pixel moves. ``matrix``: pixels move by Kornia's
            ``compute_transformation``. ``field``: each pixel moves by an offset of its own.
        steps: a module to its fused steps; None where its settings have none, then the module itself runs.
        parameters: a module to the number of uniforms that a sample needs (without the gate), and the rule from them
            to Kornia's parameters; None where settings of the module have no rule.
        check: raises ConfigError for settings that would fail later; gets the module and its key in the configuration.
        prepare: (name, module) to Prepared, for operations of more than one slot; None: one slot, as usual.
        noise: (module, keys int64 [B, 2], size, normal) to parameters per pixel, float32 on the device of the keys.
        one_by_one: whether Kornia's module gets one image at a time, because its pixels depend on the batch otherwise.
    """

    affects: Literal["pixels", "matrix", "field"]
    steps: Callable[[Any], Steps | None] = lambda op: None
    parameters: Callable[[Any], tuple[int, Rule] | None] = all_uniform
    check: Callable[[Any, str], None] | None = None
    prepare: Callable[[str, Any], Prepared | None] | None = None
    noise: Callable[[Any, Tensor, Size, Normal], dict[str, Tensor]] | None = None
    one_by_one: bool = False
