"""Choices between operations, per sample: OneOf, and the policies of ``kornia.augmentation.auto``.

Kornia's RandAugment, TrivialAugment and AutoAugment choose one path for a batch; here each sample has its own, from its
own uniforms. What is chosen from, the magnitudes, their mapping and their random sign are Kornia's: a sample replayed
alone through Kornia's policy with the same path and parameters has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from gpuaug.augment.ops import entry_of
from gpuaug.augment.ops.kornia_private import policy_parameter
from gpuaug.augment.parameters import Alternatives, Params, Prepared, Rule, Size, always_applied
from gpuaug.errors import ConfigError
from gpuaug.random.keyed import Float, Int


class OneOf:
    """One of several operations for each sample, with equal chances; an entry of a recipe's ``ops``.

    Args:
        ops: names to operations; their own ``p`` applies once they are chosen. None is switched off.
        p: chance that a sample goes through any of them.

    >>> import gpuaug, kornia.augmentation as K
    >>> blur = gpuaug.OneOf(ops={"gaussian": K.RandomGaussianBlur(3, (0.1, 2)), "box": K.RandomBoxBlur()}, p=0.5)
    >>> list(gpuaug.Augment(ops={"blur": blur}).ops)
    ['blur']
    """

    def __init__(self, *, ops: Mapping[str, Any], p: float = 1.0) -> None:
        self.ops, self.p = ops, p

    def __repr__(self) -> str:
        return f"OneOf(ops={self.ops!r}, p={self.p})"


def one_of(u: Float, size: Size, *, p: float, members: Sequence[Prepared]) -> tuple[Int, tuple[Alternatives, ...]]:
    """One member per sample, where the first uniform is below ``p``; the second says which."""
    which = (u[:, 1] * np.float32(len(members))).astype(np.int64)
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


Member = tuple[int, float, Rule]  # one operation of a policy: its uniforms (the sign first), its p, its rule


def _member(operation: Any, key: str, magnitude: Any = None) -> Member:
    """One operation of a policy, its settings read once; ``magnitude`` overrides its own."""
    entry = entry_of(operation.op)
    known = None if entry is None else entry.parameters(operation.op)
    if known is None:
        raise ConfigError(
            f"`{key}` can choose only between operations whose parameters gpuaug draws. Found: "
            f"{type(operation.op).__name__} in its policy. Use it as an operation of its own."
        )
    count, rule = known
    factor, mapping = policy_parameter(operation)
    if factor is not None and magnitude is None and operation.magnitude is not None:
        magnitude = np.float32(float(operation.magnitude))
    symmetric = bool(operation.symmetric_megnitude)
    rule = partial(_magnified, rule=rule, factor=factor, magnitude=magnitude, mapping=mapping, symmetric=symmetric)
    return 1 + count, float(operation.op.p), rule


def _magnified(
    u: Float, size: Size, *, rule: Rule, factor: str | None, magnitude: Any, mapping: Any, symmetric: bool
) -> Params:
    """The rule's parameters, but ``factor``: a given magnitude (None: as drawn), through Kornia's mapping, with a sign.

    A given magnitude of a translation is a fraction of the image's width or height.
    """
    params = rule(u[:, 1:], size)
    if factor is None:
        return params
    value = params[factor]
    if magnitude is not None:
        pixels = {"translate_x": size[1], "translate_y": size[0]}.get(factor, 1)
        value = np.full(len(u), magnitude * np.float32(pixels), dtype=np.float32)
    if mapping is not None:
        value = mapping(torch.from_numpy(value)).numpy()
    if symmetric:
        value = value * np.where(u[:, 0] > 0.5, np.float32(1), np.float32(-1)).astype(value.dtype)
    return {**params, factor: value}


def _prepare_distinct(name: str, op: Any, *, key: str, rand: bool) -> Prepared:
    """RandAugment has `n` slots and one magnitude for all operations; TrivialAugment one slot and draws magnitudes."""
    operations = [operation for child in op.children() for operation in child.children()]
    members = tuple(_member(o, key, _magnitude(op, o) if rand else None) for o in operations)
    slots = op.n if rand else 1
    width = max(count for count, _, _ in members)
    first = len(members) if slots > 1 else 1
    rule = partial(_distinct, members=members, slots=slots, first=first, width=width)
    modules = tuple(always_applied(operation.op) for operation in operations)
    return Prepared(name, op, (modules,) * slots, first + slots * width, rule)


def _distinct(
    u: Float, size: Size, *, members: Sequence[Member], slots: int, first: int, width: int
) -> tuple[Int, tuple[Alternatives, ...]]:
    """``slots`` distinct members per sample, in random order."""
    if slots > 1:
        choice = np.argsort(u[:, :first], axis=1, kind="stable")[:, :slots].astype(np.int64)
    else:
        choice = (u[:, :1] * np.float32(len(members))).astype(np.int64)
    # One call for all slots: it takes about as long for two as for one.
    blocks = u[:, first : first + slots * width].reshape(len(u), slots, width).swapaxes(0, 1).reshape(-1, width)
    drawn = [rule(blocks, size) for _, _, rule in members]
    rows = [slice(slot * len(u), (slot + 1) * len(u)) for slot in range(slots)]
    return choice, tuple(tuple({k: v[own] for k, v in params.items()} for params in drawn) for own in rows)


def _prepare_auto(name: str, op: Any, *, key: str) -> Prepared:
    """AutoAugment: the slots of its sub-policies, each slot with one module per class of operation."""
    policies = [list(child.children()) for child in op.children()]
    members = tuple(tuple(_member(operation, key) for operation in operations) for operations in policies)
    width = 1 + max(count for path in members for count, _, _ in path)  # the gate, then the member's own
    slots, columns = [], []
    for slot in range(max(len(path) for path in members)):
        inner: list[Any] = [path[slot].op if slot < len(path) else None for path in policies]
        kinds = [type(op) for op in inner]
        distinct = list(dict.fromkeys(kind for kind in kinds if kind is not type(None)))  # others differ in parameters
        slots.append(tuple(always_applied(inner[kinds.index(kind)]) for kind in distinct))
        columns.append(np.array([distinct.index(kind) if kind in distinct else -1 for kind in kinds]))
    rule = partial(_paths, members=members, columns=tuple(columns), width=width)
    return Prepared(name, op, tuple(slots), 1 + len(slots) * width, rule)


def _paths(
    u: Float, size: Size, *, members: Sequence[Sequence[Member]], columns: Sequence[Int], width: int
) -> tuple[Int, tuple[Alternatives, ...]]:
    """One path of ``members`` per sample; every operation of a path has a gate of its own."""
    taken = (u[:, 0] * np.float32(len(members))).astype(np.int64)
    rows = [np.flatnonzero(taken == number) for number in range(len(members))]
    choice, params = [], []
    for slot, column in enumerate(columns):
        block = u[:, 1 + slot * width : 1 + (slot + 1) * width]
        p = np.array([path[slot][1] if slot < len(path) else 0 for path in members], dtype=np.float32)
        choice.append(np.where(block[:, 0] < p[taken], column[taken], -1))
        alternatives: dict[int, Params] = {}
        for number, alternative in enumerate(column):
            if alternative < 0:
                continue
            rule = members[number][slot][2]
            if alternative not in alternatives:  # values that are valid in every row
                alternatives[alternative] = {k: np.array(v) for k, v in rule(block[:, 1:], size).items()}
            elif len(rows[number]):
                for k, v in rule(block[rows[number], 1:], size).items():
                    alternatives[alternative][k][rows[number]] = v
        params.append(tuple(alternatives[a] for a in range(len(alternatives))))
    return np.stack(choice, axis=1), tuple(params)


def _magnitude(op: Any, operation: Any) -> Any:
    """RandAugment's magnitude for one operation, by Kornia's own arithmetic; None where it has none."""
    if operation.magnitude_range is None:
        return None
    low, high = operation.magnitude_range
    m = torch.tensor([op.m / 30], dtype=torch.float32)
    if policy_parameter(operation)[0] == "bits_factor":  # more magnitude, fewer bits
        m = 1 - m
    return np.float32((m * float(high - low) + low).item())


# Kornia's classes to (name, op, key=key in the configuration) -> Prepared.
POLICIES: dict[str, Callable[..., Prepared]] = {
    "RandAugment": partial(_prepare_distinct, rand=True),
    "TrivialAugment": partial(_prepare_distinct, rand=False),
    "AutoAugment": _prepare_auto,
}
