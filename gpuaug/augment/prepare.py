"""Operations of a recipe, prepared once: what is refused, and what draws each operation's parameters."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from gpuaug.augment import ops as kornia_ops
from gpuaug.augment import policy
from gpuaug.augment.parameters import Alternatives, Prepared, Rule, Size, always_applied
from gpuaug.augment.policy import OneOf
from gpuaug.errors import ConfigError
from gpuaug.random.keyed import Float, Int

logger = logging.getLogger("gpuaug")


def prepare_all(ops: Mapping[str, Any] | None, *, path: str) -> tuple[Prepared, ...]:
    """The operations of a mapping, in its order; None is an operation switched off."""
    if ops is not None and not isinstance(ops, Mapping):
        raise ConfigError(
            f"`{path}` must be a mapping of names to operations, such as {{'flip': RandomHorizontalFlip(p=0.5)}}: the "
            f"name keys an operation's draws and lets it be overridden. Found: a {type(ops).__name__}."
        )
    for name in ops or {}:
        if not isinstance(name, str) or not name or "\0" in name:
            raise ConfigError(f"`{path}` must have names that are text. Found: {name!r}.")
        if name == "crop":
            raise ConfigError(f"`{path}.crop` is the name of the crop's own draws. Choose another name.")
    return tuple(prepare(name, op, path=path) for name, op in (ops or {}).items() if op is not None)


def prepare(name: str, op: Any, *, path: str = "augment.ops") -> Prepared:
    """A Kornia operation or policy, a OneOf, or a module from float [1, 3, H, W] to the same shape, ready to be drawn.

    Raises:
        ConfigError: a setting contradicts per-sample draws, or the module has its place elsewhere in a recipe.
    """
    key = f"{path}.{name}"
    if isinstance(op, OneOf):
        return _prepare_one_of(name, op, key=key)
    _check(key, op)
    if (prepare_policy := kornia_ops.by_class(policy.POLICIES, op)) is not None:
        return prepare_policy(name, op, key=key)
    entry = kornia_ops.entry_of(op)
    if entry is not None and entry.check is not None:
        entry.check(op, key)
    if entry is not None and entry.prepare is not None and (prepared := entry.prepare(name, op)) is not None:
        return prepared
    if entry is None or (known := entry.parameters(op)) is None:
        reason = "no rule for its parameters" if entry is None else entry.without_rule
        why = (key, type(op).__name__, reason)
        logger.warning(
            "`%s` (%s) draws per sample from a seed, one image at a time on the thread that iterates: %s", *why
        )
        return Prepared(name, op, ((copy.deepcopy(op),),), 0, _every_sample, keyed=True, seeded=reason)
    count, rule = known
    gate = partial(_gated, p=float(op.p), rule=rule)
    return Prepared(name, op, ((always_applied(op),),), 1 + count, gate, keyed=entry.noise is not None)


def _prepare_one_of(name: str, op: OneOf, *, key: str) -> Prepared:
    """A :class:`OneOf`, ready to be drawn: its slots offer the alternatives of all its operations."""
    members = prepare_all(op.ops, path=f"{key}.ops")
    if not members:
        raise ConfigError(f"`{key}.ops` must have at least one operation. Found: none. Remove `{key}` instead.")
    if isinstance(op.p, bool) or not isinstance(op.p, int | float) or not 0 <= op.p <= 1:
        raise ConfigError(f"`{key}.p` must satisfy 0 <= p <= 1. Found: {op.p!r}.")
    for member in members:
        if member.seeded is not None:
            raise ConfigError(
                f"`{key}.ops.{member.name}` cannot be chosen per sample: {member.seeded}. Found: "
                f"{type(member.op).__name__}. Use it as an operation of its own."
            )
    slots = tuple(
        tuple(module for m in members if slot < len(m.slots) for module in m.slots[slot])
        for slot in range(max(len(m.slots) for m in members))
    )
    rule = partial(policy.one_of, p=float(op.p), members=members)
    keyed = any(m.keyed for m in members)
    return Prepared(name, op, slots, 2 + max(m.count for m in members), rule, keyed=keyed)


def _gated(u: Float, size: Size, *, p: float, rule: Rule) -> tuple[Int, tuple[Alternatives, ...]]:
    """The rule's parameters; chosen are the samples whose first uniform is below ``p``."""
    choice = (u[:, :1] < np.float32(p)).astype(np.int64) - 1
    return choice, ((rule(u[:, 1:], size),),)


def _every_sample(u: Float, size: Size) -> tuple[Int, tuple[Alternatives, ...]]:
    return np.zeros((len(u), 1), dtype=np.int64), (({},),)


# --- what cannot be an operation of a recipe

# Package and class: what an operation must do, and the remedy. The first class of a module's MRO that is here decides.
_REFUSED = {
    name: (required, remedy)
    for names, required, remedy in (
        (
            "kornia.Resize kornia.LongestMaxSize kornia.SmallestMaxSize kornia.CenterCrop kornia.RandomCrop "
            "kornia.RandomResizedCrop kornia.PadTo",
            "keep the size of the images",
            "Sizes are decided before decoding: use `crop`, for example gpuaug.RandomResizedCrop(224).",
        ),
        (
            "gpuaug.Augment gpuaug.MultiView",
            "be one operation",
            "It is a whole recipe: write each of its operations as an entry of `ops`, or the recipe as a view of "
            "gpuaug.MultiView.",
        ),
        (
            "kornia.Normalize kornia.Denormalize gpuaug.Normalize",
            "leave pixels in 0..1, which later operations expect",
            "Use `normalize` instead.",
        ),
        ("kornia.MixAugmentationBaseV2", "treat each sample alone", "It mixes samples: use `mix` instead."),
        ("kornia.AugmentationBase3D", "take images", "It takes volumes: use its 2D counterpart."),
        ("kornia.PolicyAugmentBase", None, None),  # allowed, though it is an ImageSequentialBase
        (
            "torch.Sequential torch.ModuleList torch.ModuleDict kornia.ImageSequentialBase "
            "kornia.ManyToManyAugmentationDispather kornia.ManyToOneAugmentationDispather",
            "be one operation",
            "It is a container: write each of its operations as an entry of `ops` with a name of its own.",
        ),
    )
    for name in names.split()
}


def _check(key: str, op: Any) -> None:
    if not isinstance(op, nn.Module):
        raise ConfigError(
            f"`{key}` must be an operation, such as kornia.augmentation.RandomHorizontalFlip(p=0.5). Found: {op!r}."
        )
    names = [f"{kind.__module__.split('.')[0]}.{kind.__name__}" for kind in type(op).__mro__]
    required, remedy = next((_REFUSED[name] for name in names if name in _REFUSED), (None, None))
    if required is not None:
        raise ConfigError(f"`{key}` must {required}. Found: {type(op).__name__}. {remedy}")
    for setting, wanted in (("same_on_batch", False), ("keepdim", False), ("p_batch", 1.0)):
        value = getattr(op, setting, wanted)
        if value is not None and value != wanted:  # containers say None
            raise ConfigError(
                f"`{key}.{setting}` must be {wanted}: every sample draws for itself, whatever batch it is in. "
                f"Found: {value!r}. Remove the setting."
            )
    p = getattr(op, "p", 1.0)
    is_kornias = any(name == "kornia.AugmentationBase2D" for name in names)
    if p is None and not is_kornias:  # a policy, or a module of the user's own
        return
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p <= 1:
        raise ConfigError(f"`{key}.p` must be a probability from 0 to 1. Found: {p!r}.")
