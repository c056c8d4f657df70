""":class:`Entry`, and helpers that many entries share.

From the same uniform random numbers ("uniforms"), an entry and Kornia compute bit-identical parameters. A step is an
instruction of the fused backend (codes.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from gpuaug.augment.ops import kornia_private
from gpuaug.augment.ops.codes import Code
from gpuaug.augment.ops.kornia_private import Range
from gpuaug.augment.parameters import Params, Prepared, Rule, Size, Tensors
from gpuaug.errors import ConfigError
from gpuaug.random.keyed import Float

Write = Callable[[Float, Params, Size], None]  # fills the arguments of n rows: float32 [n, steps, ARGS], zeros at first
Parameters = Callable[[Any], tuple[int, Rule]]  # from a module to its number of uniforms and its rule
Normal = Callable[[Tensor, int], Tensor]  # from keys int64 [B, 2] and n to standard normal values float32 [B, n]
Fields = Callable[[Any, Tensors, Tensor, Size, Normal], Tensors]
MakeTable = Callable[[Tensors], Tensor]


class RecipeOp(nn.Module):
    """Base of gpuaug's own operations and policies."""

    def forward(self, images: Tensor) -> Tensor:
        """Always raise ConfigError, because only a recipe can draw the random numbers of each sample.

        Args:
            images: float [B, 3, H, W]; not used.
        """
        name = type(self).__name__
        raise ConfigError(
            f"`{name}` must be an entry of a recipe's `ops`. Found: a direct call. "
            f'Use gpuaug.Augment(ops={{"{name.lower()}": gpuaug.{name}()}}).'
        )

    def prepare(self, name: str) -> Prepared:
        """Prepare the operation for the key ``name`` of a recipe's ``ops``."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """All settings."""
        return ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if k[0] != "_" and k != "training")


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of one module, and the function that writes their arguments.

    If a step needs more than ARGS numbers, ``table`` makes the others, float32 [n, ...], from the params of n rows.
    These params include those of ``Entry.fields``.
    """

    codes: tuple[Code, ...]
    write: Write
    table: MakeTable | None = None


def uniform(u: Float, size: Size, *, names: tuple[str, ...], low: Float, span: Float) -> Params:
    """Draw uniform parameters from ``low`` to ``low + span``. ``low`` and ``span``: float32 [len(names), 1]."""
    values = np.multiply(u[:, : len(names)].T, span, order="C")  # one contiguous row per parameter
    values += low
    return dict(zip(names, values, strict=True))


def _uniform(ranges: dict[str, Range]) -> tuple[int, Rule]:
    low, high = np.array(list(ranges.values()), dtype=np.float32).reshape(-1, 2).T[:, :, None]
    return len(ranges), partial(uniform, names=tuple(ranges), low=low, span=high - low)  # float32, as torch's Uniform


def all_uniform(op: Any) -> tuple[int, Rule]:
    """The rule for an operation in which every parameter is uniform."""
    return _uniform(kornia_private.ranges(op))


def uniform_from(*names: str) -> Parameters:
    """The rule for uniform parameters. Kornia draws ``names`` in this order. A name without a sampler is left out.

    The sampler of ``x`` and of ``x_factor`` is called ``x_sampler``.
    """

    def parameters(op: Any) -> tuple[int, Rule]:
        samplers = ((name, f"{name.removesuffix('_factor')}_sampler") for name in names)
        drawn = {name: kornia_private.range_of(op, sampler) for name, sampler in samplers}
        return _uniform({name: limits for name, limits in drawn.items() if limits is not None})

    return parameters


def derived(parameters: Parameters, derive: Callable[..., Params]) -> Parameters:
    """Let ``derive`` compute the parameters. Its argument ``rule`` is the rule that ``parameters`` returns."""

    def both(op: Any) -> tuple[int, Rule]:
        count, rule = parameters(op)
        return count, partial(derive, rule=rule)

    return both


def steps_of(code: Code, *arguments: str | float, table: MakeTable | None = None) -> Steps:
    """One step. Each argument is a parameter's name, or a number for all samples."""

    def write(out: Float, params: Params, size: Size) -> None:
        for column, argument in enumerate(arguments):
            out[:, 0, column] = params[argument] if isinstance(argument, str) else argument

    return Steps((code,), write, table)


def step(code: Code, *arguments: str | float, table: MakeTable | None = None) -> Callable[[Any], Steps]:
    """Like :func:`steps_of`, for a step that does not depend on the module's settings."""
    return lambda op: steps_of(code, *arguments, table=table)


@dataclass(frozen=True, slots=True)
class Matrix:
    """How params become a matrix from pixel indices of the input to pixel indices of the output.

    Attributes:
        write: function that fills float32 [n, 9], zeros at first, for n rows of params.
        elements: True: ``write`` writes the nine elements of the matrix. False: ``write`` writes seven numbers: angle
            (clockwise), scale x, scale y, translation x, translation y (pixels), shear x, shear y. Angles and shears
            are in degrees. The image's centre is the centre of rotation, scale and shear.
    """

    write: Write
    elements: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """Everything that gpuaug knows about one kind of operation.

    Attributes:
        affects: ``pixels``: the operation changes values only. ``matrix``: pixels move by the matrix of Kornia's
            ``compute_transformation``. ``field``: each pixel moves by its own offset.
        matrix: the matrix if ``affects`` is ``matrix``, else None.
        steps: function from a module to its fused steps, or to None if the module's settings have no fused form.
        parameters: function from a module to the number of uniforms per sample (without the one for ``p``) and the
            rule that turns uniforms into Kornia's parameters.
        check: function of (module, configuration key) that raises ConfigError for settings that would fail later.
        prepare: function from (name, module) to Prepared, for operations with several slots or alternatives
            (parameters.py). If the function returns None, the operation has one slot with one alternative.
        fields: function from (module, params of n rows, keys int64 [n, 2], size, normal) to further params, such as
            noise per pixel. ``normal`` makes standard normal values.
        one_by_one: Kornia's module gets one image at a time, because its results depend on the batch size.
    """

    affects: Literal["pixels", "matrix", "field"]
    matrix: Matrix | None = field(default=None, kw_only=True)
    steps: Callable[[Any], Steps | None] = lambda op: None
    parameters: Parameters = all_uniform
    check: Callable[[Any, str], None] | None = None
    prepare: Callable[[str, Any], Prepared | None] | None = None
    fields: Fields | None = None
    one_by_one: bool = False
