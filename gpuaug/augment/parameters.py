"""What gpuaug knows about an operation, in the order of its way through a recipe.

:class:`Entry`: one kind of operation. :class:`Prepared`: one operation of a recipe. :class:`Chosen`: what was drawn for
a batch. :class:`Steps`: what the fused backend executes. The entries are in ops/.

A slot is one position in an operation, where each sample takes one of several alternatives or none. The gate decides,
with probability ``p``, whether a sample is changed. A step is an instruction of the fused backend (ops/codes.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpuaug.augment.ops.codes import ARGS, Code
from gpuaug.augment.ops.kornia_private import Range, range_of, ranges
from gpuaug.errors import ConfigError
from gpuaug.native.buffers import to_device
from gpuaug.random.keyed import Float, Int

Size = tuple[int, int]  # H, W of the images an operation is applied to
Params = dict[str, NDArray[Any]]  # Kornia's parameter names to arrays [B, ...] on the host
Alternatives = tuple[Params, ...]
Rule = Callable[[Float, Size], Params]  # uniforms [B, n] (without the gate's) to parameters
Parameters = Callable[[Any], tuple[int, Rule]]  # from a module to its number of uniforms and its rule
Tensors = dict[str, Tensor]  # Kornia's parameter names to tensors [B, ...]
Normal = Callable[[Tensor, int], Tensor]  # from keys int64 [B, 2] and n to standard normal values float32 [B, n]
Fields = Callable[[Any, Tensors, Tensor, Size, Normal, int], Tensors]
Takes = Literal["any", "rgb", "levels", "rgb levels"] | Callable[[Any, int], tuple[str, str] | None]
Write = Callable[[Float, Params, Size], None]  # fills the arguments of n rows: float32 [n, steps, ARGS], zeros at first


# --- one kind of operation


def all_uniform(op: Any) -> tuple[int, Rule]:
    """The rule for an operation in which every parameter is uniform."""
    return uniform(ranges(op))


def uniform(limits: dict[str, Range]) -> tuple[int, Rule]:
    """The rule for uniform parameters with these limits. It computes in float32, as torch's Uniform."""
    low, high = np.array(list(limits.values()), dtype=np.float32).reshape(-1, 2).T[:, :, None]
    return len(limits), partial(_uniform, names=tuple(limits), low=low, span=high - low)


def _uniform(u: Float, size: Size, *, names: tuple[str, ...], low: Float, span: Float) -> Params:
    values = np.multiply(u[:, : len(names)].T, span, order="C")  # one contiguous row per parameter
    values += low
    return dict(zip(names, values, strict=True))


def uniform_from(*names: str) -> Parameters:
    """The rule for uniform parameters. Kornia draws ``names`` in this order. A name without a sampler is left out.

    The sampler of ``x`` and of ``x_factor`` is called ``x_sampler``.
    """

    def parameters(op: Any) -> tuple[int, Rule]:
        drawn = {name: range_of(op, f"{name.removesuffix('_factor')}_sampler") for name in names}
        return uniform({name: limits for name, limits in drawn.items() if limits is not None})

    return parameters


def derived(parameters: Parameters, derive: Callable[..., Params]) -> Parameters:
    """Let ``derive`` compute the parameters. Its argument ``rule`` is the rule that ``parameters`` returns."""

    def both(op: Any) -> tuple[int, Rule]:
        count, rule = parameters(op)
        return count, partial(derive, rule=rule)

    return both


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of one module.

    Attributes:
        codes: the steps.
        write: function that writes their arguments.
        table: if a step needs more than ARGS numbers, this function makes the others, float32 [n, ...], from the params
            of n rows. These params include those of ``Entry.fields``.
        formula: a step of gpuaug's own in torch: from pixels float32 [n, 3, H, W] in 0..1, which stay unchanged, and
            arguments float32 [n, ARGS] to new pixels. It runs in the reference backend and on CUDA.
    """

    codes: tuple[Code, ...]
    write: Write
    table: Callable[[Tensors], Tensor] | None = None
    formula: Callable[[Tensor, Tensor], Tensor] | None = None


Argument = str | float | Callable[[Params], NDArray[Any]]  # a parameter's name, a number, or values of the parameters


def steps_of(code: Code, *arguments: Argument, **more: Any) -> Steps:
    """One step with these arguments. ``more``: ``table`` and ``formula``."""

    def write(out: Float, params: Params, size: Size) -> None:
        for column, argument in enumerate(arguments):
            if isinstance(argument, str):
                out[:, 0, column] = params[argument]
            else:
                out[:, 0, column] = argument(params) if callable(argument) else argument

    return Steps((code,), write, **more)


def step(code: Code, *arguments: Argument, **more: Any) -> Callable[[Any], Steps]:
    """Like :func:`steps_of`, for a step that does not depend on the module's settings."""
    return lambda op: steps_of(code, *arguments, **more)


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
            rule that turns uniforms into Kornia's parameters. The rule and Kornia make bit-identical parameters of the
            same uniforms.
        check: function of (module, configuration key) that raises ConfigError for settings that would fail later.
        prepare: function from (name, module) to Prepared, for operations with several slots or alternatives. If the
            function returns None, the operation has one slot with one alternative.
        fields: function from (module, params of n rows, keys int64 [n, 2], size, normal, C) to further params, such as
            noise per pixel. ``normal`` makes standard normal values. C is the number of channels.
        one_by_one: Kornia's module gets one image at a time, because its results depend on the batch size.
        takes: the images that the operation takes. ``rgb``: three channels, with the meaning of red, green and blue.
            ``levels``: not uint16, because the operation has 256 levels. A function from (module, C): None if it takes
            C channels, else the name of the setting that forbids them ("": all settings do), and what it needs.
    """

    affects: Literal["pixels", "matrix", "field"]
    matrix: Matrix | None = field(default=None, kw_only=True)
    steps: Callable[[Any], Steps | None] = lambda op: None
    parameters: Parameters = all_uniform
    check: Callable[[Any, str], None] | None = None
    prepare: Callable[[str, Any], Prepared | None] | None = None
    fields: Fields | None = None
    one_by_one: bool = False
    takes: Takes = "any"

    def gated(self, name: str, op: Any) -> Prepared:
        """Prepare an operation with one slot. The first uniform is compared with ``op.p``."""
        count, rule = self.parameters(op)
        gate = partial(_gated, p=float(op.p), rule=rule)
        module = copy.deepcopy(op)
        module.p = 1.0  # the gate decides
        return Prepared(name, op, ((module,),), 1 + count, gate, keyed=self.fields is not None)


def _gated(u: Float, size: Size, *, p: float, rule: Rule) -> tuple[Int, tuple[Alternatives, ...]]:
    choice = (u[:, :1] < np.float32(p)).astype(np.int64) - 1
    return choice, ((rule(u[:, 1:], size),),)


class RecipeOp(nn.Module):
    """Base of gpuaug's own operations and policies.

    An operation has an ``entry`` and an attribute ``p``. A policy has its own :meth:`prepare`.
    """

    entry: Entry | None = None

    def forward(self, images: Tensor, params: Tensors | None = None) -> Tensor:
        """Run the operation's formula. Only a recipe calls this, because it draws the random numbers of each sample.

        Args:
            images: float32 [B, 3, H, W] in 0..1.
            params: the drawn parameters [B, ...], on the CPU.

        Raises:
            ConfigError: ``params`` is None, as in a direct call.
        """
        steps = None if self.entry is None else self.entry.steps(self)
        if params is None or steps is None or steps.formula is None:
            name = type(self).__name__
            raise ConfigError(
                f"`{name}` must be an entry of a recipe's `ops`. Found: a direct call. "
                f'Use gpuaug.Augment(ops={{"{name.lower()}": gpuaug.{name}()}}).'
            )
        args = np.zeros((len(images), 1, ARGS), dtype=np.float32)
        steps.write(args, {k: v.numpy() for k, v in params.items()}, (images.shape[2], images.shape[3]))
        return steps.formula(images, to_device(torch.from_numpy(args[:, 0]), images.device))

    def prepare(self, name: str) -> Prepared:
        """Prepare the operation for the key ``name`` of a recipe's ``ops``."""
        assert self.entry is not None
        return self.entry.gated(name, self)

    def extra_repr(self) -> str:
        """All settings."""
        return ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if k[0] != "_" and k != "training")


# --- one operation of a recipe


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
        members: for a OneOf or SomeOf, the places where a sample gets one operation or none, one after the other, each
            with the operations that it can get there; () for other operations.
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
    members: tuple[tuple[Prepared, ...], ...] = ()
    chains: int = 0
    rounds_twice: bool = False

    def leaves(self, key: str) -> list[tuple[str, Prepared]]:
        """This operation and its configuration key; for a OneOf or SomeOf: all operations that it can choose."""
        return list(dict.fromkeys(leaf for place in self.places(key) for leaf in place))

    def places(self, key: str) -> list[list[tuple[str, Prepared]]]:
        """Like :meth:`leaves`, but one list for each place, so an operation may be in several lists."""
        found = [] if self.members else [[(key, self)]]
        for place in self.members:
            inner = [member.places(f"{key}.ops.{member.name}") for member in place]
            found += [[leaf for leaves in each for leaf in leaves] for each in zip_longest(*inner, fillvalue=[])]
        return found

    def draw(self, u: Float, size: Size, keys: Int | None = None) -> Chosen:
        """Draw from uniforms float32 [B, count] for images of ``size``. ``keys``, int64 [B, 2], are only stored."""
        choice, params, *weights = self.rule(u, size)
        return Chosen(choice, params, keys, *weights)


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
        frames: how many neighbouring rows have the same choices, params and keys: the frames of a clip.
    """

    choice: Int
    params: tuple[Alternatives, ...]
    keys: Int | None = None
    weights: Float | None = None
    frames: int = 1


def tensors(params: Params, rows: Int | None = None) -> Tensors:
    """Parameters of ``rows`` (None: all) as CPU tensors, because Kornia expects them on the CPU."""
    # A value shared by all samples is a read-only view of one row. It is copied, because torch warns about such views.
    return {
        k: torch.from_numpy(np.require(v if rows is None else v[rows], requirements=["C", "W"]))
        for k, v in params.items()
    }
