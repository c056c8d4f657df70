"""Prepares the operations of a recipe: checks them and selects the rules that draw their parameters and choices."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from gpuaug import checks
from gpuaug.augment.ops import color, degradation, geometry
from gpuaug.augment.parameters import Alternatives, Entry, Prepared, RecipeOp, Size
from gpuaug.errors import ConfigError
from gpuaug.random.keyed import Float, Int, exponential, normal_field, pick

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


def fields(
    op: Any, params: Any, keys: Tensor, size: Size, normal: Any = normal_field, channels: int = 3
) -> dict[str, Tensor]:
    """Return the parameters that ``params`` lacks, such as noise per pixel; {} for most operations."""
    entry = entry_of(op)
    if entry is None or entry.fields is None:
        return {}
    return entry.fields(op, params, keys ^ getattr(op, "_noise", 0), size, normal, channels)


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


class SomeOf:
    """Chooses several operations for each sample, none of them twice. Use it as an entry of a recipe's ``ops``.

    The choice is that of ``torch.multinomial`` without replacement: the first operation is chosen with a probability
    proportional to its weight, and each further one in the same way from those that are left. A new operation in
    ``ops`` changes the choices and the random numbers of the others.

    Args:
        n: number of operations per sample, or a range (min, max). Of a range, each sample gets its own number, all
            equally likely; 0 is allowed as min.
        ops: mapping of names to operations; None skips an entry. A chosen operation still applies its own ``p``.
        weights: mapping of names to positive numbers. A name without a weight has weight 1. None: all are 1.
        random_order: False: the chosen operations are applied in the order of ``ops``. True: in a random order for
            each sample, all orders equally likely.
        p: probability that operations are chosen for a sample.

    >>> import gpuaug, kornia.augmentation as K
    >>> ops = {"gray": K.RandomGrayscale(p=1.0), "invert": K.RandomInvert(p=1.0), "flip": K.RandomHorizontalFlip(p=1.0)}
    >>> some = gpuaug.SomeOf(2, ops=ops, weights={"flip": 3})
    >>> list(gpuaug.Augment(ops={"some": some}).ops)
    ['some']
    """

    # no dataclass, as OneOf
    def __init__(
        self,
        n: int | Sequence[int],
        *,
        ops: Mapping[str, Any],
        weights: Mapping[str, float] | None = None,
        random_order: bool = False,
        p: float = 1.0,
    ) -> None:
        self.n, self.ops, self.weights, self.random_order, self.p = n, ops, weights, random_order, p

    def __repr__(self) -> str:
        return f"SomeOf({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def prepare_all(ops: Mapping[str, Any] | None, *, path: str) -> tuple[Prepared, ...]:
    if ops is not None and not isinstance(ops, Mapping):
        raise ConfigError(
            f"`{path}` must be a mapping of names to operations, such as {{'flip': RandomHorizontalFlip(p=0.5)}}. "
            f"Found: a {type(ops).__name__}. The name selects the operation's random numbers. Overrides use it too."
        )
    for name in ops or {}:
        checks.name_in(path, name)
        if name == "crop":
            raise ConfigError(f"`{path}.crop`: the name `crop` is reserved for the recipe's crop. Choose another name.")
    return tuple(prepare(name, op, path=path) for name, op in (ops or {}).items() if op is not None)


def prepare(name: str, op: Any, *, path: str = "augment.ops") -> Prepared:
    """Prepare a Kornia operation, a OneOf or SomeOf, or any module that maps float [B, 3, H, W] to the same shape.

    A module with the attribute ``uniforms = n`` runs on whole batches, with n random numbers for each image.
    """
    key = f"{path}.{name}"
    if isinstance(op, OneOf | SomeOf):
        return _prepare_choice(name, op, key=key)
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


def _prepare_choice(name: str, op: OneOf | SomeOf, *, key: str) -> Prepared:
    """Prepare a choice. A place is where a sample gets one of a group of members, or none.

    Each place has as many slots as its largest member. They contain the alternatives of all members of the group.
    """
    members = prepare_all(op.ops, path=f"{key}.ops")
    if not members:
        raise ConfigError(f"`{key}.ops` must have at least one operation. Found: none. Add one or remove `{key}`.")
    p = float(checks.number(f"{key}.p", op.p, 0, 1))
    for member in members:
        reason = "it mixes several chains" if member.chains else member.seeded
        if reason is not None:
            raise ConfigError(
                f"`{key}.ops.{member.name}` cannot be chosen per sample: {reason}. Found: "
                f"{type(member.op).__name__}. Make it a separate entry of `augment.ops`."
            )
    numbers = range(len(members))
    groups, repeats, starts = [[*numbers]], 1, [2 for _ in numbers]
    draw = partial(_one, p=p, count=len(members))
    if isinstance(op, SomeOf):
        weights, low, high = _checked_settings(op, members, key)
        draw = partial(_some, p=p, low=low, high=high, weights=weights, random_order=op.random_order)
        groups, repeats = (groups, high) if op.random_order else ([[number] for number in numbers], 1)
        counts = [2 + 2 * len(members), *(m.count for m in members)]
        starts = [sum(counts[: 1 + number]) for number in numbers]
        for number, (_, leaf) in enumerate(leaf for m in members for leaf in m.leaves("")):
            modules: list[Any] = [module for slot in leaf.slots for module in slot if leaf.keyed]
            for module in modules:  # members share the sample's key; RandomErasing uses the lower bits
                module._noise = getattr(module, "_noise", 0) & 0xFFFF | number << 16
    places = tuple(tuple(members[k] for k in group) for group in groups) * repeats
    slots = tuple(
        tuple(module for m in place if slot < len(m.slots) for module in m.slots[slot])
        for place in places
        for slot in range(max(len(m.slots) for m in place))
    )
    rule = partial(_chosen, draw=draw, members=members, starts=starts, groups=groups, repeats=repeats)
    count = max(start + m.count for start, m in zip(starts, members, strict=True))
    return Prepared(name, op, slots, count, rule, keyed=any(m.keyed for m in members), members=places)


def _checked_settings(op: SomeOf, members: Sequence[Prepared], key: str) -> tuple[NDArray[np.float64], int, int]:
    """Check the settings that OneOf lacks. Return the members' weights, and the range of ``n``."""
    low, high = op.n if isinstance(op.n, Sequence) and len(op.n) == 2 else (op.n, op.n)
    if not type(low) is type(high) is int or not 0 <= low <= high <= len(members) or high == 0:
        raise ConfigError(
            f"`{key}.n` must be a whole number from 1 to {len(members)}, the number of operations, or a range "
            f"[min, max] with 0 <= min <= max <= {len(members)}. Found: {op.n!r:.200}."
        )
    checks.flag(f"{key}.random_order", op.random_order)
    weights = {} if op.weights is None else op.weights
    if not isinstance(weights, Mapping) or not set(weights) <= set(op.ops):
        raise ConfigError(
            f"`{key}.weights` must be null or a mapping of names in `{key}.ops` to numbers. "
            f"Found: {op.weights!r:.200}. The names are {', '.join(op.ops)}."
        )
    for name, weight in weights.items():
        if weight == 0:
            raise ConfigError(
                f"`{key}.weights.{name}` must be above 0. To switch {name} off, set `{key}.ops.{name}=null`."
            )
        checks.number(f"{key}.weights.{name}", weight, 1e-6, 1e6)
    return np.array([float(weights.get(m.name, 1)) for m in members]), low, high


def _given(u: Float, size: Size) -> tuple[Int, tuple[Alternatives, ...]]:
    """Choose the module for all samples. The uniforms are its parameters."""
    return np.zeros((len(u), 1), dtype=np.int64), (({"uniforms": u} if u.shape[1] else {},),)


def _one(u: Float, *, p: float, count: int) -> Int:
    """Choose a member for each sample, [B, 1]; -1: none."""
    which = pick(u[:, 1:2], count)
    which[u[:, 0] >= np.float32(p)] = -1
    return which


def _some(u: Float, *, p: float, low: int, high: int, weights: NDArray[np.float64], random_order: bool) -> Int:
    """Choose ``low`` to ``high`` members for each sample. Return the member of each place, [B, places]; -1: none."""
    count = low + pick(u[:, 1:2], high - low + 1)
    count[u[:, 0] >= np.float32(p)] = 0
    # The order in which exponential times with these rates end is that of draws without replacement (Efraimidis and
    # Spirakis, 2006).
    times = exponential(u[:, 2 : 2 + len(weights)]) / weights
    taken = times.argsort(axis=1, kind="stable").argsort(axis=1) < count
    if not random_order:
        return np.where(taken, np.arange(len(weights)), -1)
    # heavy members end early, so the order needs random numbers of its own
    order = np.where(taken, u[:, 2 + len(weights) : 2 + 2 * len(weights)], 1).argsort(axis=1, kind="stable")
    return np.where(np.arange(high) < count, order[:, :high], -1)


def _chosen(
    u: Float,
    size: Size,
    *,
    draw: Callable[[Float], Int],
    members: Sequence[Prepared],
    starts: Sequence[int],
    groups: Sequence[Sequence[int]],
    repeats: int,
) -> tuple[Int, tuple[Alternatives, ...]]:
    """Choose members, and draw the parameters of all members.

    ``starts``: each member's first uniform. There are ``repeats`` places for each of ``groups``.
    """
    which = draw(u).reshape(len(u), len(groups), repeats, 1)
    choice: list[Int] = []
    params: list[Alternatives] = []
    for number, group in enumerate(groups):
        slots: list[Alternatives] = [()] * max(len(members[k].slots) for k in group)
        table = np.full((len(u), len(members) + 1, len(slots)), -1, dtype=np.int64)  # the last row is for -1: no member
        for k in group:
            chosen, values = members[k].rule(u[:, starts[k] : starts[k] + members[k].count], size)
            for slot in range(len(members[k].slots)):
                column = chosen[:, slot]
                table[:, k, slot] = np.where(column >= 0, column + len(slots[slot]), -1)
                slots[slot] += values[slot]
        own = np.take_along_axis(table, which[:, number], axis=1)
        choice.append(own.reshape(len(u), repeats * len(slots)))
        params += slots * repeats
    return np.concatenate(choice, axis=1), tuple(params)


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
    (
        "kornia.RandomMosaic",
        "process each sample independently",
        "It mixes samples: use gpuaug.Mosaic as an entry of `combine` instead.",
    ),
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
