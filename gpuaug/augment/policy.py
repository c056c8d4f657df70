"""Prepares the operations of a recipe: checks them and selects the rules that draw their parameters and choices."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from gpuaug import checks
from gpuaug.augment.ops import color, degradation, geometry
from gpuaug.augment.parameters import Alternatives, Entry, Prepared, RecipeOp, Size
from gpuaug.errors import ConfigError
from gpuaug.random.keyed import Float, Int, normal_field, pick

logger = logging.getLogger("gpuaug")

ENTRIES: dict[str, Entry] = {**geometry.ENTRIES, **color.ENTRIES, **degradation.ENTRIES}


def by_class(table: Mapping[str, Any], op: Any) -> Any:
    """Look up a Kornia module in a table by the name of its class. Return None for all other modules.

    A user's subclass of a Kornia class is not looked up, because it may draw and compute anything.
    """
    kind = type(op)
    return table.get(kind.__name__) if kind.__module__.startswith("kornia.augmentation.") else None


def entry_of(op: Any) -> Entry | None:
    return op.entry if isinstance(op, RecipeOp) else by_class(ENTRIES, op)


def fields(op: Any, params: Any, keys: Tensor, size: Size, normal: Any = normal_field) -> dict[str, Tensor]:
    """Return the parameters that ``params`` lacks, such as noise per pixel; {} for most operations."""
    entry = entry_of(op)
    return {} if entry is None or entry.fields is None else entry.fields(op, params, keys, size, normal)


class OneOf:
    """Chooses one of several operations for each sample, all equally likely. Use it as an entry of a recipe's ``ops``.

    Args:
        ops: mapping of names to operations; None skips an entry. A chosen operation still applies its own ``p``.
        p: probability that one of the operations is chosen for a sample.

    >>> import gpuaug, kornia.augmentation as K
    >>> blur = gpuaug.OneOf(ops={"gaussian": K.RandomGaussianBlur(3, (0.1, 2)), "box": K.RandomBoxBlur()}, p=0.5)
    >>> list(gpuaug.Augment(ops={"blur": blur}).ops)
    ['blur']
    """

    # no dataclass: Hydra's `instantiate` would turn it back into a configuration
    def __init__(self, *, ops: Mapping[str, Any], p: float = 1.0) -> None:
        self.ops, self.p = ops, p

    def __repr__(self) -> str:
        return f"OneOf(ops={self.ops!r}, p={self.p})"


def prepare_all(ops: Mapping[str, Any] | None, *, path: str) -> tuple[Prepared, ...]:
    if ops is not None and not isinstance(ops, Mapping):
        raise ConfigError(
            f"`{path}` must be a mapping of names to operations, such as {{'flip': RandomHorizontalFlip(p=0.5)}}. "
            f"Found: a {type(ops).__name__}. The name selects the operation's random numbers. Overrides use it too."
        )
    for name in ops or {}:
        if not isinstance(name, str) or not name or "\0" in name:
            raise ConfigError(f"`{path}` must have non-empty strings as names. Found: {name!r}.")
        if name == "crop":
            raise ConfigError(f"`{path}.crop`: the name `crop` is reserved for the recipe's crop. Choose another name.")
    return tuple(prepare(name, op, path=path) for name, op in (ops or {}).items() if op is not None)


def prepare(name: str, op: Any, *, path: str = "augment.ops") -> Prepared:
    """Prepare a Kornia operation, a OneOf, or any module that maps float [B, 3, H, W] to the same shape.

    A module with the attribute ``uniforms = n`` runs on whole batches, with n random numbers for each image.
    """
    key = f"{path}.{name}"
    if isinstance(op, OneOf):
        return _prepare_one_of(name, op, key=key)
    _check(key, op)
    if isinstance(op, RecipeOp):
        return op.prepare(name)
    entry = entry_of(op)
    if entry is not None:
        if entry.check is not None:
            entry.check(op, key)
        prepared = None if entry.prepare is None else entry.prepare(name, op)
        return entry.gated(name, op) if prepared is None else prepared
    if (count := getattr(op, "uniforms", None)) is not None:
        checks.whole_number(f"{key}.uniforms", count, 0)
        return Prepared(name, op, ((copy.deepcopy(op),),), count, _given)
    reason = "gpuaug has no rule for its parameters"
    logger.warning(
        "`%s` (%s) runs one image at a time in the iterating thread, which is slow. Reason: %s. If its output depends "
        "only on its input and on random numbers per image, the module can run on whole batches: see `uniforms` in "
        "docs/guide.md",
        *(key, type(op).__name__, reason),
    )
    return Prepared(name, op, ((copy.deepcopy(op),),), 0, _given, keyed=True, seeded=reason)


def _prepare_one_of(name: str, op: OneOf, *, key: str) -> Prepared:
    """Prepare a :class:`OneOf`. Each slot contains the alternatives of all members."""
    members = prepare_all(op.ops, path=f"{key}.ops")
    if not members:
        raise ConfigError(f"`{key}.ops` must have at least one operation. Found: none. Add one or remove `{key}`.")
    checks.number(f"{key}.p", op.p, 0, 1)
    for member in members:
        reason = "it mixes several chains" if member.chains else member.seeded
        if reason is not None:
            raise ConfigError(
                f"`{key}.ops.{member.name}` cannot be chosen per sample: {reason}. Found: "
                f"{type(member.op).__name__}. Make it a separate entry of `augment.ops`."
            )
    slots = tuple(
        tuple(module for m in members if slot < len(m.slots) for module in m.slots[slot])
        for slot in range(max(len(m.slots) for m in members))
    )
    rule = partial(_one_of, p=float(op.p), members=members)
    count, keyed = 2 + max(m.count for m in members), any(m.keyed for m in members)
    return Prepared(name, op, slots, count, rule, keyed=keyed, members=members)


def _given(u: Float, size: Size) -> tuple[Int, tuple[Alternatives, ...]]:
    """Choose the module for all samples. The uniforms are its parameters."""
    return np.zeros((len(u), 1), dtype=np.int64), (({"uniforms": u} if u.shape[1] else {},),)


def _one_of(u: Float, size: Size, *, p: float, members: Sequence[Prepared]) -> tuple[Int, tuple[Alternatives, ...]]:
    """Choose a member for each sample. The first uniform is compared with ``p``, the second selects the member."""
    which = pick(u[:, 1], len(members))
    which[u[:, 0] >= np.float32(p)] = -1
    choice = np.full((len(u), max(len(m.slots) for m in members)), -1, dtype=np.int64)
    params: list[Alternatives] = [()] * choice.shape[1]
    for number, member in enumerate(members):
        chosen, values = member.rule(u[:, 2 : 2 + member.count], size)
        rows = which == number
        for slot in range(len(member.slots)):
            column = chosen[:, slot]
            choice[:, slot] = np.where(rows & (column >= 0), column + len(params[slot]), choice[:, slot])
            params[slot] += values[slot]
    return choice, tuple(params)


# --- modules that `ops` refuses

# (classes as "package.class", requirement, remedy). Of the module's MRO, the first class in this table decides.
_REFUSED = (
    (
        "kornia.Resize kornia.LongestMaxSize kornia.SmallestMaxSize kornia.CenterCrop kornia.RandomCrop "
        "kornia.RandomResizedCrop kornia.PadTo",
        "keep the size of the images",
        "Image sizes are set before decoding: use `crop`, for example gpuaug.RandomResizedCrop(224).",
    ),
    (
        "gpuaug.Augment gpuaug.MultiView gpuaug.Progressive",
        "be one operation",
        "It is a whole recipe: make each of its operations an entry of `ops`, or make the recipe a view of "
        "gpuaug.MultiView.",
    ),
    (
        "kornia.Normalize kornia.Denormalize gpuaug.Normalize",
        "keep pixels in 0..1 for later operations",
        "Use `normalize` instead.",
    ),
    ("kornia.RandomJigsaw", None, None),  # allowed, although it is a subclass of MixAugmentationBaseV2
    ("kornia.MixAugmentationBaseV2", "process each sample independently", "It mixes samples: use `mix` instead."),
    ("kornia.AugmentationBase3D", "take images", "It takes 3D volumes: use its 2D counterpart."),
    (
        "kornia.PolicyAugmentBase",
        "be a policy that chooses for each sample",
        "Instead of Kornia's class, use gpuaug.RandAugment, TrivialAugmentWide or AutoAugment, which are "
        "torchvision's, or gpuaug.TimmAugment.",
    ),
    (
        "torch.Sequential torch.ModuleList torch.ModuleDict kornia.ImageSequentialBase "
        "kornia.ManyToManyAugmentationDispather kornia.ManyToOneAugmentationDispather",
        "be one operation",
        "It is a container: make each of its operations a separate entry of `ops`, with its own name.",
    ),
)


def _check(key: str, op: Any) -> None:
    if not isinstance(op, nn.Module):
        raise ConfigError(
            f"`{key}` must be an operation, such as kornia.augmentation.RandomHorizontalFlip(p=0.5). Found: {op!r}."
        )
    names = [f"{kind.__module__.split('.')[0]}.{kind.__name__}" for kind in type(op).__mro__]
    rows = (row for name in names for row in _REFUSED if name in row[0].split())
    _, required, remedy = next(rows, (None, None, None))
    if required is not None:
        raise ConfigError(f"`{key}` must {required}. Found: {type(op).__name__}. {remedy}")
    for setting, wanted in (("same_on_batch", False), ("keepdim", False), ("p_batch", 1.0)):
        value = getattr(op, setting, wanted)
        if value != wanted:
            raise ConfigError(
                f"`{key}.{setting}` must be {wanted}, because each sample is augmented independently of its batch. "
                f"Found: {value!r}. Remove the setting."
            )
    checks.number(f"{key}.p", getattr(op, "p", 1.0), 0, 1, optional="kornia.AugmentationBase2D" not in names)
