"""Sizes of memory as people write them."""

from __future__ import annotations

import re

from gpuaug.errors import ConfigError

_UNITS = {"": 1} | {
    letter + suffix: base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}


def parse(value: int | float | str, *, key: str) -> int:
    """Bytes out of ``2147483648``, ``"2GiB"`` (2 x 1024^3), ``"2G"`` (the same) or ``"2GB"`` (2 x 1000^3).

    Args:
        value: the size.
        key: full configuration key, for errors.

    Raises:
        ConfigError: if it is no size above 0.
    """
    size = value
    if isinstance(value, str):
        found = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-z]*)", value.strip().lower())
        unit = _UNITS.get(found[2].removesuffix("b") if found and found[2] == "b" else found[2]) if found else None
        size = 0 if found is None or unit is None else float(found[1]) * unit
    if isinstance(size, bool) or not isinstance(size, int | float) or not 1 <= size < 2**62:
        raise ConfigError(f"`{key}` must be a size of memory, as 2147483648 or 2GiB. Found: {value!r}.")
    return int(size)


def text(size: float) -> str:
    """Bytes for people: ``1.25 GiB``, ``37.0 MiB``."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
