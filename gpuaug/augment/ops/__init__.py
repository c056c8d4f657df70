"""Finds the :class:`Entry` of an operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gpuaug.augment.ops import color, degradation, erasing, geometry, pillow
from gpuaug.augment.ops.entry import Entry, Normal
from gpuaug.augment.parameters import Size, Tensors
from gpuaug.random.keyed import normal_field

ENTRIES: dict[str, Entry] = {**geometry.ENTRIES, **color.ENTRIES, **degradation.ENTRIES}


def by_class(table: Mapping[str, Any], op: Any) -> Any:
    """Look up a Kornia module in a table by the name of its class. Return None for all other modules.

    A user's subclass of a Kornia class is not looked up, because it may draw and compute anything.
    """
    kind = type(op)
    return table.get(kind.__name__) if kind.__module__.startswith("kornia.augmentation.") else None


def entry_of(op: Any) -> Entry | None:
    if isinstance(op, pillow.PillowOp):
        return pillow.ENTRIES[op.name]
    return erasing.ENTRY if isinstance(op, erasing.RandomErasing) else by_class(ENTRIES, op)


def fields(op: Any, params: Tensors, keys: Tensor, size: Size, normal: Normal = normal_field) -> Tensors:
    """Return the parameters that ``params`` lacks, such as noise per pixel; {} for most operations."""
    entry = entry_of(op)
    return {} if entry is None or entry.fields is None else entry.fields(op, params, keys, size, normal)
