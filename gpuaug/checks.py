"""Checks of arguments. Each function returns the value if it is valid, and raises ConfigError if not.

If ``optional`` is True, None is valid too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpuaug.errors import ConfigError

LARGEST = 2**63 - 1  # torch and numpy count with int64


def whole_number(name: str, value: Any, low: int | None, high: int | None = None, *, optional: bool = False) -> Any:
    """Check that ``value`` is an int with ``low <= value <= high``.

    ``low`` None: any int. ``high`` None: ints below 2**63.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    good = whole and (low is None or low <= value <= (LARGEST if high is None else high))
    limits = "" if low is None else f" >= {low}" if high is None else f" from {low} to {high}"
    if whole and high is None and value > LARGEST:
        limits = f" from {low} to 2**63 - 1"
    return _checked(good, name, value, f"a whole number{limits}", optional=optional)


def number(name: str, value: Any, low: float, high: float = math.inf, *, optional: bool = False) -> Any:
    """Check that ``value`` is an int or float with ``low <= value <= high``."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    return _checked(good, name, value, f"a number in [{low:g}, {high:g}]", optional=optional)


_HUGE = 1e30  # the numbers of a pair become float32


def pair(name: str, value: Any, low: float | None, high: float = _HUGE) -> tuple[float, float]:
    """Check that ``value`` is two numbers (min, max) with ``low <= min <= max <= high``. ``low`` None: ``0 < min``."""
    given = tuple(value) if isinstance(value, Sequence) else ()
    numbers = len(given) == 2 and all(isinstance(v, int | float) and not isinstance(v, bool) for v in given)
    if not numbers or not (low or 0) <= given[0] <= given[1] <= high or (low is None and given[0] == 0):
        least, most = "0 < min" if low is None else f"{low:g} <= min", "" if high == _HUGE else f" <= {high:g}"
        raise ConfigError(f"`{name}` must satisfy {least} <= max{most}. Found: {value!r:.200}.")
    return float(given[0]), float(given[1])


def interval(name: str, value: Any) -> tuple[int, int | None]:
    """Check that ``value`` is [first epoch, first epoch without]. The second may be None: there is none."""
    first, end = value if isinstance(value, Sequence) and len(value) == 2 else (None, None)
    good = type(first) is int and first >= 0 and (end is None or (type(end) is int and first < end < 2**32))
    _checked(good, name, value, "[first epoch, first epoch without it], such as [0, 90] or [10, null]")
    return first, end  # type: ignore[return-value]


def within(interval: Sequence[int | None] | None, epoch: int) -> bool:
    """Whether an epoch is in an :func:`interval`; None: of all epochs."""
    first, end = (0, None) if interval is None else interval
    return (first or 0) <= epoch and (end is None or epoch < end)


def flag(name: str, value: Any, *, optional: bool = False) -> Any:
    """Check that ``value`` is a bool."""
    return _checked(isinstance(value, bool), name, value, "true or false", optional=optional)


def one_of(name: str, value: Any, known: Iterable[str]) -> Any:
    """Check that ``value`` is one of the strings ``known``."""
    known = tuple(known)
    good = isinstance(value, str) and value in known
    return _checked(good, name, value, f"one of {', '.join(known)}")


_OF_TORCH = {
    "dtype": ("float32", "bfloat16", "float16"),
    "memory_format": ("contiguous_format", "channels_last"),
}


def torch_constant(name: str, value: Any) -> Any:
    """Return torch's constant for the argument ``name=value``, such as torch.float32 for ``dtype="float32"``."""
    import torch  # the other checks do not need it

    known, text = _OF_TORCH[name], str(value).removeprefix("torch.")  # str(torch.float32) is "torch.float32"
    return getattr(torch, text if text in known else one_of(name, value, known))


def text(name: str, value: Any, *, optional: bool = False) -> Any:
    """Check that ``value`` is a non-empty string."""
    # Hydra reads `out=2024` as a number
    quoted = f" Quote it: \"{name}='{value}'\"." if isinstance(value, int | float) else ""
    return _checked(isinstance(value, str) and value, name, value, "text", optional=optional, remedy=quoted)


def name_in(mapping: str, name: Any) -> Any:
    """Check a key of ``mapping``: names go into the random numbers, where a null character separates them."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise ConfigError(f"`{mapping}` must have non-empty strings as names. Found: {name!r}.")
    return name


def instance(name: str, value: Any, *kinds: type, optional: bool = False) -> Any:
    """Check that ``value`` is an object of one of the public classes ``kinds``."""
    named = " or ".join(f"gpuaug.{kind.__name__}" for kind in kinds)
    remedy = f" A configuration needs {name}._target_." if isinstance(value, Mapping) else ""
    return _checked(isinstance(value, kinds), name, value, f"a {named}", optional=optional, remedy=remedy)


def _checked(good: object, name: str, value: Any, allowed: str, *, optional: bool = False, remedy: str = "") -> Any:
    if good or (optional and value is None):
        return value
    or_null, found = " or null" if optional else "", f"{value!r:.200}"
    found = f"a {type(value).__name__}" if "\n" in found else found  # such as a module: many lines
    raise ConfigError(f"`{name}` must be {allowed}{or_null}. Found: {found}.{remedy}")
