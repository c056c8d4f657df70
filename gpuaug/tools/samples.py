"""The samples that a command shows: how its keys `indices` and `samples` choose them, and what is shown of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from gpuaug.errors import ConfigError


@dataclass(frozen=True)
class Sample:
    """A sample as shown: the original, and what training sees of it in some epochs."""

    index: int
    key: str
    label: str | None
    original: Image.Image | None
    boxes: list[tuple[int, int, int, int]]  # left, top, right, bottom in the original; one per picture
    pictures: list[Image.Image]  # all views of the first epoch, then those of the next
    absent: str = "cannot be decoded"  # why the original is None


def indices_of(given: Any) -> list[int] | None:
    """The key `indices`, given as a list of numbers, one number, or None.

    Raises:
        ConfigError: if it is anything else.
    """
    if isinstance(given, int) and not isinstance(given, bool):
        given = [given]
    if given is not None and (not isinstance(given, list) or not given or any(type(i) is not int for i in given)):
        raise ConfigError(f"`indices` must be a list of sample numbers, as [3,14,15]. Found: {given!r}.")
    return given


def chosen(source: Any, indices: list[int] | None, *, count: int) -> list[int]:
    """Numbers of the samples to show: ``indices``, or ``count`` active samples, evenly spread.

    Raises:
        ConfigError: if an index is not that of an active sample.
    """
    active = np.arange(len(source)) if source.indices is None else source.indices.numpy()
    if indices is None:
        count = min(count, len(active))
        return [int(active[(2 * n + 1) * len(active) // (2 * count)]) for n in range(count)]
    if missing := sorted(set(indices) - set(active.tolist())):
        raise ConfigError(
            f"`indices` must be numbers of samples that the source has and does not leave out: {len(active)} of them, "
            f"from {active[0]} to {active[-1]}. Found: {', '.join(map(str, missing[:5]))}."
        )
    return list(indices)
