"""Joins the targets of a batch in one table. Checks targets that no source of gpuaug has checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from gpuaug.batch import Fault, Objects, Target
from gpuaug.errors import SourceError
from gpuaug.source.objects import COLUMNS, as_arrays, find_faults

_FIELDS = {field.name for field in fields(Target) if field.init}
_NO_MASK = memoryview(b"")


def as_target(label: Any, number: int) -> Target | None:
    """Return ``label`` as a Target, if it is a Target or a dictionary of a Target's fields; else None."""
    if isinstance(label, Target) or label is None:
        return label
    if not isinstance(label, Mapping):
        return None
    if unknown := [name for name in label if name not in _FIELDS]:
        raise SourceError(
            f"the target of sample {number} must have only the keys {', '.join(sorted(_FIELDS))}. Found: {unknown}."
        )
    return Target(**label)


def collect(
    targets: Sequence[Target | None], names: Sequence[str], *, skip: Sequence[int], num_keypoints: int | None
) -> tuple[Objects, list[memoryview], list[Fault]]:
    """Join the targets of a batch, one per sample. Rows ``skip`` already have a fault, and get no objects.

    Returns:
        The table of all objects, the encoded mask of each sample ([] if ``names`` lacks masks), and one fault for each
        row with bad targets.
    """
    rows, masks = [dict[str, Any]() for _ in targets], [_NO_MASK] * len(targets)
    sizes, fractions = np.zeros((len(targets), 2), dtype=np.int32), np.zeros(len(targets), dtype=np.bool_)
    used = [name for name, _, _, missing in COLUMNS if missing is not None or name in names]
    used += ["corners"] if "boxes" in names and "corners" not in names else []  # of which boxes can be made
    needed = [name for name in ("boxes", "keypoints", "corners") if name in names]
    faults, is_checked = dict[int, str](), True
    for row, target in enumerate(targets):
        if row in skip:
            continue
        try:
            if target is None:
                raise ValueError("the source gave no target for this sample")
            columns = {name: value for name in used if (value := getattr(target, name)) is not None}
            size = target.size
            if not target._checked:
                size, columns = _size(size), as_arrays(columns, num_keypoints=num_keypoints)
                is_checked = False
            count = len(next(iter(columns.values()), ()))
            if count and (lacking := [name for name in needed if name not in columns]):
                raise ValueError(f"the source gave no {lacking[0]} for its {count} objects")
            if "masks" in names:
                masks[row] = _mask(target)
            rows[row], sizes[row], fractions[row] = columns, size or 0, bool(target.fractions)
        except (ValueError, TypeError, OverflowError, RuntimeError) as error:  # torch raises RuntimeErrors
            faults[row] = str(error)
    table = join(rows, names, num_keypoints=num_keypoints)
    if not is_checked and (found := find_faults(table.sample, {name: getattr(table, name) for name in used})):
        for row in found:
            rows[row], masks[row], sizes[row], fractions[row] = {}, _NO_MASK, 0, False
        faults |= found
        table = join(rows, names, num_keypoints=num_keypoints)
    table = replace(table, sizes=sizes, fractions=fractions if fractions.any() else None)
    return table, masks if "masks" in names else [], [Fault(row, "read", faults[row]) for row in sorted(faults)]


def join(rows: Sequence[Mapping[str, Any]], names: Sequence[str], *, num_keypoints: int | None = None) -> Objects:
    """The table of the objects of a batch, without sizes. A column that an image lacks gets its default.

    ``rows``: arrays of any numbers, named as in :data:`COLUMNS`, for each image. ``names``: as for :func:`collect`.
    """
    counts = [len(next(iter(columns.values()), ())) for columns in rows]  # of objects
    table = dict[str, Any]()
    for name, kind, shape, missing in COLUMNS:
        if missing is None and name not in names:
            table[name] = None
            continue
        given = [columns[name] for columns in rows if name in columns]
        parts = [part for part in given if len(part)]
        numbers = {part.shape[1] for part in parts} if name == "keypoints" else set()
        if len(numbers) > 1:
            raise SourceError(f"all objects must have the same number of keypoints. Found: {sorted(numbers)}.")
        if not parts:
            points = num_keypoints or max((part.shape[1] for part in given if -1 in shape), default=0)
            parts = [np.zeros((0, *(points if n < 0 else n for n in shape)))]
        with np.errstate(over="ignore"):  # `find_faults` refuses infinite coordinates
            column = np.concatenate(parts, dtype=kind, casting="unsafe")
        if len(column) < sum(counts):
            table[name] = np.full((sum(counts), *shape), missing, dtype=kind)
            table[name][np.repeat([name in columns for columns in rows], counts)] = column
        else:
            table[name] = column
    sizes = np.zeros((len(rows), 2), dtype=np.int32)
    return Objects(**table, sample=np.repeat(np.arange(len(rows)), counts), sizes=sizes)


def _mask(target: Target) -> memoryview:
    if target.mask is None:
        raise ValueError("the source gave no mask for this sample")
    try:
        mask = memoryview(target.mask).cast("B")
    except TypeError:
        raise ValueError(f"mask must be the bytes of a file. Found: a {type(target.mask).__name__}") from None
    if not len(mask):
        raise ValueError("the source gave an empty mask for this sample")
    return mask


def _size(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    sides = np.asarray(size).tolist()
    if not isinstance(sides, list) or [type(side) in (int, float) and 0 < side < 2**31 for side in sides] != [True] * 2:
        raise ValueError(f"size must be (height, width) above 0. Found: {size}")
    return int(sides[0]), int(sides[1])
