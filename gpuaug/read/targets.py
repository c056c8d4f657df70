"""Joins the targets of a batch in one table. Checks targets that no source of gpuaug has checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from gpuaug.batch import Fault, Objects, Target
from gpuaug.errors import SourceError
from gpuaug.source.objects import COLUMNS, as_arrays

_FIELDS = {field.name for field in fields(Target) if field.init}
_NO_MASK = memoryview(b"")
_NONE = Target()  # of a row with a fault


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
    good, masks, faults = [_NONE] * len(targets), [_NO_MASK] * len(targets), list[Fault]()
    for row, target in enumerate(targets):
        if row in skip:
            continue
        try:
            if target is None:
                raise ValueError("the source gave no target for this sample")
            if not target._checked:
                target = _as_arrays(target, names, num_keypoints)
            count = _count(target, names)
            lacking = [name for name in ("boxes", "keypoints") if name in names and getattr(target, name) is None]
            if lacking and count:
                raise ValueError(f"the source gave no {lacking[0]} for its {count} objects")
            if "masks" in names:
                masks[row] = _mask(target)
            good[row] = target
        except (ValueError, TypeError, OverflowError, RuntimeError) as error:  # torch raises RuntimeErrors
            faults.append(Fault(row, "read", str(error)))
    return _joined(good, names, num_keypoints), masks if "masks" in names else [], faults


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


def _count(target: Target, names: Sequence[str]) -> int:
    """Number of objects."""
    known = (getattr(target, name) for name, _, _, missing in COLUMNS if missing is not None or name in names)
    return len(next((column for column in known if column is not None), ()))


def _as_arrays(target: Target, names: Sequence[str], num_keypoints: int | None) -> Target:
    """The target with arrays as columns, without columns that ``names`` lacks. ValueError if it cannot be used."""
    size = target.size
    if size is not None:
        sides = np.asarray(size)
        if sides.shape != (2,) or sides.dtype.kind not in "iuf" or not ((sides > 0) & (sides < 2**31)).all():
            raise ValueError(f"size must be (height, width) above 0. Found: {size}")
        size = int(sides[0]), int(sides[1])
    given = {name: getattr(target, name) for name, _, _, missing in COLUMNS if missing is not None or name in names}
    arrays = as_arrays(given, num_keypoints=num_keypoints)
    columns: dict[str, Any] = {name: arrays.get(name) for name, *_ in COLUMNS}
    return replace(target, size=size, **columns)


def _joined(targets: Sequence[Target], names: Sequence[str], num_keypoints: int | None) -> Objects:
    """The table of all objects. ``names``: as for :func:`collect`."""
    counts = [_count(target, names) for target in targets]
    table = dict[str, Any]()
    for name, kind, shape, missing in COLUMNS:
        if missing is None and name not in names:
            table[name] = None
            continue
        given = [getattr(target, name) for target in targets]
        parts = [
            np.full((count, *shape), missing, dtype=kind) if column is None else column
            for column, count in zip(given, counts, strict=True)
            if count
        ]
        numbers = {part.shape[1] for part in parts} if name == "keypoints" else set()
        if len(numbers) > 1:
            raise SourceError(f"all objects must have the same number of keypoints. Found: {sorted(numbers)}.")
        if not parts:
            points = num_keypoints or max((x.shape[1] for x in given if x is not None and -1 in shape), default=0)
            parts = [np.zeros((0, *(points if n < 0 else n for n in shape)))]
        table[name] = np.concatenate(parts, dtype=kind, casting="unsafe")
    fractions = np.array([bool(target.fractions) for target in targets], dtype=np.bool_)
    return Objects(
        **table,
        sample=np.repeat(np.arange(len(targets)), counts),
        sizes=np.array([target.size or (0, 0) for target in targets], dtype=np.int32).reshape(-1, 2),
        fractions=fractions if fractions.any() else None,
    )
