"""Operations of a recipe, prepared once: what each is, what it may not be, and which rule draws its parameters."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from gpuaug.augment import policy
from gpuaug.augment.normalize import Normalize
from gpuaug.augment.parameters import (
    ORDERS,
    Alternatives,
    Prepared,
    Size,
    bounds,
    gated,
    jitter,
    needs_noise,
    private,
    rule_of,
)
from gpuaug.augment.policy import OneOf
from gpuaug.errors import ConfigError
from gpuaug.random.keyed import Float, Int

logger = logging.getLogger("gpuaug")


class Whole(nn.Module):
    """Base of what is a whole recipe, and so no operation of one."""


def prepare_all(ops: Mapping[str, Any] | None, *, path: str) -> tuple[Prepared, ...]:
    """The operations of a mapping, in its order; None is an operation switched off.

    Raises:
        ConfigError: not a mapping of names to operations.
    """
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
    """An operation of a recipe, ready to be drawn.

    Args:
        name: its key in ``ops``.
        op: a Kornia operation, one of Kornia's policies, or any module from float [1, 3, H, W] to the same shape.
        path: where ``ops`` stands in the configuration, for messages.

    Raises:
        ConfigError: a setting contradicts per-sample draws, or the module has its place elsewhere in a recipe.
    """
    key = f"{path}.{name}"
    if isinstance(op, OneOf):
        return _prepare_one_of(name, op, key=key)
    _check(key, op)
    import kornia.augmentation as K

    if type(op) in (K.auto.RandAugment, K.auto.TrivialAugment, K.auto.AutoAugment):
        return policy.prepare(name, op, key=key)
    if isinstance(op, (K.ColorJitter, K.ColorJiggle)) and type(op) in (K.ColorJitter, K.ColorJiggle):
        return _prepare_jitter(name, op)
    known = rule_of(op)
    if known is None:
        reason = "its kernel size is one per batch" if type(op) is K.RandomMotionBlur else "no rule for its parameters"
        kind = type(op).__name__
        logger.warning(
            "`%s` (%s) draws per sample from a seed, one image at a time on the thread that iterates: %s",
            key,
            kind,
            reason,
        )
        return Prepared(name, op, ((copy.deepcopy(op),),), 0, _untouched_rule, keyed=True, seeded=reason)
    count, rule = known
    return Prepared(
        name, op, ((private(op),),), 1 + count, partial(gated, p=float(op.p), rule=rule), keyed=needs_noise(op)
    )


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


def _prepare_jitter(name: str, op: Any) -> Prepared:
    """ColorJitter and ColorJiggle; without a given ``order`` every sample has its own.

    Four slots, each offering the four steps as modules of one step: the same bits as one module with the whole order.
    """
    known = rule_of(op)
    assert known is not None
    count, factors = known
    p = float(op.p)
    if op._fixed_order is not None:
        return Prepared(name, op, ((private(op),),), 1 + count, partial(gated, p=p, rule=factors))
    steps = tuple(
        type(op)(op.brightness, op.contrast, op.saturation, op.hue, p=1.0, order=(step,)) for step in range(4)
    )
    assert isinstance(factors, partial)
    low, span = factors.keywords["low"][:, 0], factors.keywords["span"][:, 0]
    idle = [bool(span[k] == 0 and low[k] == neutral) for k, neutral in ((0, 1), (1, 1), (3, 1), (2, 0))]  # per step
    orders = ORDERS
    if not all(idle):  # where all are, the input is still clamped
        orders = np.where(np.array(idle)[ORDERS], -1, ORDERS)
    return Prepared(
        name, op, (steps,) * 4, 2 + count, partial(jitter, p=p, factors=factors, orders=orders, order_column=1 + count)
    )


def _untouched_rule(u: Float, size: Size) -> tuple[Int, tuple[Alternatives, ...]]:
    return np.zeros((len(u), 1), dtype=np.int64), (({},),)


# --- what cannot be an operation of a recipe


def _is_odd(size: Any) -> bool:
    """Whether it is the size of a kernel with a middle: odd and positive, one number or (y, x)."""
    sizes = tuple(size) if isinstance(size, list | tuple) else (size, size)
    return len(sizes) == 2 and all(
        isinstance(n, int) and not isinstance(n, bool) and n >= 1 and n % 2 == 1 for n in sizes
    )


def _check(key: str, op: Any) -> None:
    if not isinstance(op, nn.Module):
        raise ConfigError(
            f"`{key}` must be an operation, such as kornia.augmentation.RandomHorizontalFlip(p=0.5). Found: {op!r}."
        )
    import kornia.augmentation as K
    from kornia.augmentation.auto.base import PolicyAugmentBase
    from kornia.augmentation.container.base import ImageSequentialBase

    kind = type(op).__name__
    resizes = (
        K.Resize, K.LongestMaxSize, K.SmallestMaxSize, K.CenterCrop, K.RandomCrop, K.RandomResizedCrop, K.PadTo,
    )  # fmt: skip
    if isinstance(op, resizes):
        raise ConfigError(
            f"`{key}` must keep the size of the images. Found: {kind}. Sizes are decided before decoding: use `crop`, "
            "for example gpuaug.RandomResizedCrop(224)."
        )
    if isinstance(op, Whole):
        raise ConfigError(
            f"`{key}` must be one operation. Found: {kind}, a whole recipe. Write each of its operations as an entry "
            "of `ops`, or the recipe as a view of gpuaug.MultiView."
        )
    if isinstance(op, (K.Normalize, K.Denormalize, Normalize)):
        raise ConfigError(
            f"`{key}` must leave pixels in 0..1, which later operations expect. Found: {kind}. Use `normalize` instead."
        )
    if isinstance(op, K.MixAugmentationBaseV2):
        raise ConfigError(f"`{key}` must treat each sample alone. Found: {kind}, which mixes. Use `mix` instead.")
    if isinstance(op, K.AugmentationBase3D):
        raise ConfigError(f"`{key}` must take images. Found: {kind}, which takes volumes. Use its 2D counterpart.")
    containers = (
        nn.Sequential, nn.ModuleList, nn.ModuleDict, ImageSequentialBase, K.ManyToManyAugmentationDispather,
        K.ManyToOneAugmentationDispather,
    )  # fmt: skip
    if isinstance(op, containers) and not isinstance(op, PolicyAugmentBase):
        raise ConfigError(
            f"`{key}` must be one operation. Found: {kind}, a container. Write each of its operations as an entry of "
            "`ops` with a name of its own."
        )
    for setting, wanted in (("same_on_batch", False), ("keepdim", False), ("p_batch", 1.0)):
        found = getattr(op, setting, wanted)
        if found is not None and found != wanted:  # containers say None
            raise ConfigError(
                f"`{key}.{setting}` must be {wanted}: every sample draws for itself, whatever batch it is in. "
                f"Found: {found!r}. Remove the setting."
            )
    p = getattr(op, "p", 1.0)
    unset = p is None and not isinstance(op, K.AugmentationBase2D)  # a policy's, or a module's of one's own
    if not unset and (isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p <= 1):
        raise ConfigError(f"`{key}.p` must be a probability from 0 to 1. Found: {p!r}.")
    if isinstance(op, K.RandomGaussianBlur) and not _is_odd(sizes := op.flags["kernel_size"]):
        raise ConfigError(
            f"`{key}.kernel_size` must be odd and positive, a whole number or two of them. Found: {sizes!r}."
        )
    if isinstance(op, K.RandomGamma):  # Kornia finds it only when it is drawn, on a GPU by killing the context
        for name, sampler in vars(op._param_generator)["sampler_dict"].items():
            low, high = bounds(sampler)
            if not 0 <= low <= high:
                raise ConfigError(f"`{key}` must draw `{name}` from 0 <= low <= high. Found: ({low}, {high}).")
