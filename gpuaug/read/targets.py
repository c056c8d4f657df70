"""Joins the targets of a batch in one table. Checks targets that no source of gpuaug has checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuaug.batch import EncodedTargets, Fault, Target
from gpuaug.errors import SourceError
from gpuaug.source.objects import find_faults

_FIELDS = {field.name for field in fields(Target) if field.init}
_NO_MASK = memoryview(b"")
# name, dtype, shape per object (-1: any size), default for a missing column (None: no default)
_COLUMNS: tuple[tuple[str, Any, tuple[int, ...], Any], ...] = (
    ("boxes", np.float32, (4,), None),
    ("labels", np.int64, (), 0),
    ("keypoints", np.float32, (-1, 3), None),
    ("crowd", np.bool_, (), False),
    ("area", np.float32, (), np.nan),
    ("ids", np.int64, (), -1),
)


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
) -> tuple[EncodedTargets, list[memoryview], list[Fault]]:
    """Join the targets of a batch, one per sample. Rows ``skip`` already have a fault, and get no objects.

    Returns:
        The table of all objects, the encoded mask of each sample ([] if ``names`` lacks masks), and one fault for each
        row with bad targets.
    """
    faults, masks, sizes = dict[int, str](), [_NO_MASK] * len(targets), np.zeros((len(targets), 2), dtype=np.int32)
    rows: list[dict[str, NDArray[Any]]] = [{} for _ in targets]  # columns; {} for a row with a fault
    is_checked = True
    for row, target in enumerate(targets):
        if row in skip:
            continue
        try:
            if target is None:
                raise ValueError("the source gave no target for this sample")
            is_checked &= target._checked
            columns = _columns(target, names, num_keypoints)
            count = len(next(iter(columns.values()), ()))
            if lacking := [name for name in ("boxes", "keypoints") if name in names and name not in columns and count]:
                raise ValueError(f"the source gave no {lacking[0]} for its {count} objects")
            masks[row] = _mask(target) if "masks" in names else _NO_MASK
            if target.size is not None:
                sizes[row] = target.size
            rows[row] = columns
        except (ValueError, TypeError, OverflowError, RuntimeError) as error:  # torch raises RuntimeErrors
            faults[row] = str(error)
    table, counts = _joined(rows, names, num_keypoints)
    if not is_checked and (found := find_faults(np.repeat(np.arange(len(rows)), counts), table)):
        for row in found:
            rows[row], masks[row] = {}, _NO_MASK
        faults |= found
        table, counts = _joined(rows, names, num_keypoints)
    fractions = np.array([target is not None and bool(target.fractions) for target in targets], dtype=np.bool_)
    encoded = EncodedTargets(
        offsets=np.cumsum([0, *counts], dtype=np.int64),
        boxes=table.get("boxes"),
        labels=table["labels"],
        keypoints=table.get("keypoints"),
        crowd=table["crowd"],
        area=table["area"],
        ids=table["ids"],
        sizes=sizes,
        masks="masks" in names,
        fractions=fractions if fractions.any() else None,
    )
    found_faults = [Fault(row, "read", reason) for row, reason in sorted(faults.items())]
    return encoded, masks if encoded.masks else [], found_faults


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


def _columns(target: Target, names: Sequence[str], num_keypoints: int | None) -> dict[str, NDArray[Any]]:
    """The columns as arrays; ValueError if a shape or dtype is wrong. :func:`find_faults` checks the values."""
    columns = {
        name: value
        for name, _, _, missing in _COLUMNS
        if (value := getattr(target, name)) is not None and (missing is not None or name in names)
    }
    if target._checked:
        return columns
    for name, kind, shape, _ in _COLUMNS:
        if name not in columns:
            continue
        value = columns[name]
        try:
            array = np.asarray(value)
        except ValueError:  # numpy's message names neither the column nor the shape
            raise ValueError(f"the entries of {name} must have the same length. Found: {value!r:.200}") from None
        if not array.size:  # from an empty list, numpy makes float64 [0]
            given = array.shape[1:] if array.ndim == 1 + len(shape) else [0] * len(shape)
            array = np.zeros((0, *(m if n < 0 else n for n, m in zip(shape, given, strict=True))), dtype=kind)
        matches = array.ndim == 1 + len(shape) and all(
            n in (-1, m) for n, m in zip(shape, array.shape[1:], strict=True)
        )
        is_whole = np.dtype(kind).kind in "biu"
        if not matches or array.dtype.kind not in ("biu" if is_whole else "biuf"):
            wanted = "whole numbers" if is_whole else "numbers"
            wanted += f" of shape [{', '.join(['n', *('K' if n < 0 else str(n) for n in shape)])}]"
            raise ValueError(f"{name} must be {wanted}. Found: {array.dtype} {list(array.shape)}")
        if name == "keypoints" and num_keypoints and len(array) and array.shape[1] != num_keypoints:
            raise ValueError(f"each object must have {num_keypoints} keypoints. Found: {array.shape[1]}")
        if array.dtype == np.uint64 and array.size and array.max() >= 2**63:
            raise ValueError(f"{name} must be below 2**63. Found: {array.max()}")
        with np.errstate(over="ignore"):  # `find_faults` refuses infinite coordinates
            columns[name] = array.astype(kind)
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the columns of the sample's objects differ in length: {lengths}")
    if target.size is not None:
        sides = np.asarray(target.size)
        if sides.shape != (2,) or sides.dtype.kind not in "iuf" or not ((sides > 0) & (sides < 2**31)).all():
            raise ValueError(f"size must be (height, width) above 0. Found: {target.size}")
    return columns


def _joined(
    rows: Sequence[dict[str, NDArray[Any]]], names: Sequence[str], num_keypoints: int | None
) -> tuple[dict[str, NDArray[Any]], list[int]]:
    """Join the columns of all samples, and count the objects of each. ``names``: as for :func:`collect`."""
    table, counts = {}, [len(next(iter(columns.values()), ())) for columns in rows]
    for name, kind, shape, missing in _COLUMNS:
        if missing is None and name not in names:
            continue
        parts = [
            columns[name] if name in columns else np.full((count, *shape), missing, dtype=kind)
            for columns, count in zip(rows, counts, strict=True)
            if count
        ]
        numbers = {part.shape[1] for part in parts} if name == "keypoints" else set()
        if len(numbers) > 1:
            raise SourceError(f"all objects must have the same number of keypoints. Found: {sorted(numbers)}.")
        points = num_keypoints or max(
            (columns[name].shape[1] for columns in rows if name in columns and -1 in shape), default=0
        )
        empty = np.zeros((0, *(points if n < 0 else n for n in shape)), dtype=kind)
        table[name] = np.concatenate(parts, dtype=kind) if parts else empty
    return table, counts
