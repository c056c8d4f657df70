"""Checks of arguments. Each function returns the value if it is valid, and raises ConfigError if not.

If ``optional`` is True, None is valid too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from gpuaug.errors import ConfigError


def whole_number(name: str, value: Any, low: int | None, high: int | None = None, *, optional: bool = False) -> Any:
    """Check that ``value`` is an int with ``low <= value <= high``. A limit of None does not apply."""
    if value is None and optional:
        return value
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or (low is not None and value < low) or (high is not None and value > high):
        allowed = "" if low is None else f" >= {low}" if high is None else f" from {low} to {high}"
        raise ConfigError(f"`{name}` must be a whole number{allowed}{_or_null(optional)}. Found: {value!r}.")
    return value


def number(name: str, value: Any, low: float, high: float = math.inf, *, optional: bool = False) -> Any:
    """Check that ``value`` is an int or float with ``low <= value <= high``."""
    if value is None and optional:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"`{name}` must be a number in [{low:g}, {high:g}]{_or_null(optional)}. Found: {value!r}.")
    return value


def flag(name: str, value: Any, *, optional: bool = False) -> Any:
    """Check that ``value`` is a bool."""
    if not isinstance(value, bool) and not (value is None and optional):
        raise ConfigError(f"`{name}` must be true or false{_or_null(optional)}. Found: {value!r}.")
    return value


def one_of(name: str, value: Any, known: Iterable[str], *, hint: str = "") -> Any:
    """Check that ``value`` is one of the strings ``known``. ``hint`` is added at the end of the error message."""
    known = tuple(known)
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"`{name}` must be one of {', '.join(known)}. Found: {value!r}.{hint}")
    return value


def text(name: str, value: Any, *, optional: bool = False) -> Any:
    """Check that ``value`` is a non-empty string."""
    if not (value is None and optional) and not (isinstance(value, str) and value):
        # Hydra reads `out=2024` as a number
        quoted = f" Quote it: \"{name}='{value}'\"." if isinstance(value, int | float) else ""
        raise ConfigError(f"`{name}` must be text{_or_null(optional)}. Found: {value!r}.{quoted}")
    return value


def instance(name: str, value: Any, *kinds: type, optional: bool = False) -> Any:
    """Check that ``value`` is an object of one of the public classes ``kinds``."""
    if not isinstance(value, kinds) and not (value is None and optional):
        named = " or ".join(f"gpuaug.{kind.__name__}" for kind in kinds)
        remedy = f" A configuration needs {name}._target_." if isinstance(value, Mapping) else ""
        raise ConfigError(f"`{name}` must be a {named}{_or_null(optional)}. Found: {value!r:.200}.{remedy}")
    return value


def _or_null(optional: bool) -> str:
    return " or null" if optional else ""
