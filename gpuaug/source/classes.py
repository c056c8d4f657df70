"""Makes arrays of labels from class numbers, class names, other numbers, or lists of these."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuaug.errors import SourceError
from gpuaug.source.index import range_problem
from gpuaug.source.local import open_text

log = logging.getLogger("gpuaug")


def class_mapping(classes: Any) -> dict[str, int]:
    """Convert ``source.classes`` to a mapping from name to label, in the order of the labels 0 .. C - 1."""
    given = classes
    if isinstance(classes, str | os.PathLike):
        path = os.path.expanduser(os.fspath(classes))
        try:
            text = open_text(path, errors="surrogateescape").read()
            lines = filter(None, map(str.strip, text.split("\n")))
            classes = json.loads(text) if path.endswith(".json") else list(lines)
        except (OSError, ValueError, RecursionError) as error:
            raise SourceError(
                "`source.classes` must be names, a mapping, or a FILE (.json: names or a mapping; otherwise one name "
                f"per line). Found: {path!r} ({error})."
            ) from error
    if isinstance(classes, Mapping):
        names, numbers = [str(name) for name in classes], list(classes.values())
    elif isinstance(classes, Sequence) and all(isinstance(name, str | int) for name in classes):
        names, numbers = [str(name) for name in classes], list(range(len(classes)))
    else:
        raise SourceError(f"`source.classes` must list names, or map names to labels. Found: {given!r:.200}.")
    if any(type(number) is not int for number in numbers) or sorted(numbers) != list(range(len(numbers))):
        raise SourceError(
            f"the labels in `source.classes` must be 0 .. {len(numbers) - 1}, each once. Found: {shortened(numbers)}."
        )
    if len(set(names)) != len(names) or not names:
        raise SourceError(f"`source.classes` must name each class once. Found {len(names)} names: {shortened(names)}.")
    return dict(sorted(zip(names, numbers, strict=True), key=lambda item: item[1]))


def numbers_of(
    names: Sequence[str], classes: Mapping[str, int], what: str, *, remedy: str = "Add them to `source.classes`."
) -> NDArray[np.int64]:
    """The label of each name, int64 [n]; SourceError if ``classes`` lacks one. The error calls the names ``what``."""
    if unknown := [name for name in names if name not in classes]:
        raise SourceError(
            f"`source.classes` has {len(classes)} classes, but lacks {len(unknown)} {what}: {shortened(unknown)}. "
            f"{remedy}"
        )
    return np.array([classes[name] for name in names], dtype=np.int64)


def label_column(
    label: str | None, columns: Sequence[str], *, with_classes: Sequence[str], optional: bool, place: str, remedy: str
) -> str | None:
    """The label column; None if there are no labels. ``with_classes``: columns whose numbers have class names.

    ``optional``: no error if ``auto`` finds no column.
    """
    known = ["label", "labels", *(with_classes if len(with_classes) == 1 else ())] if label == "auto" else [label]
    column = next((name for name in known if name in columns), None)
    if label in (None, "none") or (label == "auto" and column is None and (optional or not columns)):
        return None
    if column is None:
        wanted = "label or labels" if label == "auto" else repr(label)
        among = ", ".join(columns) or "none"
        raise SourceError(
            f"`source.label` must be a column of {place}, or none. There is no {wanted}, only: {among:.1000}. {remedy}"
        )
    if label == "auto":
        log.info("source %s: reading labels from the column %r", place, column)
    return column


def encode(
    values: Sequence[Any] | NDArray[Any], *, classes: Mapping[str, int] | None, place: str
) -> tuple[NDArray[Any], list[str] | None]:
    """The labels of all samples, and the class names (None if there are no names).

    ==================  ==================================================
    values              labels
    ==================  ==================================================
    whole numbers       int64 [N], class numbers
    other numbers       float32 [N], unchanged
    names               int64 [N], class numbers
    lists of numbers    float32 [N, K], unchanged
    lists of names      float32 [N, C], 1 for a class in the list, else 0
    ==================  ==================================================

    Without ``classes``, the names are sorted and numbered from 0. Raises SourceError if the values mix numbers, names
    and lists, or a name is not in ``classes``. ``place``: where the labels are, for messages.
    """
    kinds: set[Any] = {values.dtype.type} if isinstance(values, np.ndarray) else set(map(type, values))
    named = None if classes is None else list(classes)
    if all(issubclass(kind, int | np.integer | np.bool_) for kind in kinds):
        try:
            numbers = np.asarray(values, dtype=np.int64)
        except OverflowError as error:
            raise _refused(values, kinds, place) from error
        if classes is not None and (beyond := range_problem(numbers, len(classes))):
            raise SourceError(
                f"labels in {place} must be 0 .. {len(classes) - 1}, because there are {len(classes)} classes. "
                f"Found: {beyond}."
            )
        return numbers, named
    if all(issubclass(kind, int | float | np.number) for kind in kinds):
        return _finite(np.asarray(values, dtype=np.float32), place), None
    if kinds == {str}:
        mapping = _mapping(set(values), classes, place)
        return np.array([mapping[value] for value in values], dtype=np.int64), list(mapping)
    if all(issubclass(kind, list | tuple) for kind in kinds):
        inside = {type(value) for row in values for value in row}
        if inside == {str}:
            mapping = _mapping({value for row in values for value in row}, classes, place)
            sets = np.zeros((len(values), len(mapping)), dtype=np.float32)
            for i, row in enumerate(values):
                sets[i, [mapping[value] for value in row]] = 1
            return sets, list(mapping)
        lengths = {len(row) for row in values}
        if len(lengths) > 1:
            raise SourceError(
                f"if labels are lists of numbers, all must have the same length. Found in {place}: lengths "
                f"{min(lengths)} .. {max(lengths)}. For sets of classes, list class names instead of numbers."
            )
        if inside and all(issubclass(kind, int | float) for kind in inside):
            return _finite(np.asarray(values, dtype=np.float32), place), named
    raise _refused(values, kinds, place)


def _finite(values: NDArray[np.float32], place: str) -> NDArray[np.float32]:
    bad = ~np.isfinite(values.reshape(len(values), -1)).all(1)
    if bad.any():
        raise SourceError(f"labels in {place} must be finite. {bad.sum()} are not; the first is row {bad.argmax()}.")
    return values


def _mapping(names: set[str], classes: Mapping[str, int] | None, place: str) -> Mapping[str, int]:
    if classes is None:
        return {name: label for label, name in enumerate(sorted(names))}
    numbers_of(sorted(names), classes, f"labels of {place}")
    return classes


def _refused(values: Sequence[Any] | NDArray[Any], kinds: set[Any], place: str) -> SourceError:
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    firsts = {type(value): value for value in reversed(list(values))}
    return SourceError(
        f"labels in {place} must all be numbers, all be names, all be lists of numbers, or all be lists of names. "
        f"Found: {names}, such as {shortened(list(firsts.values()))}."
    )


def shortened(names: Sequence[Any]) -> str:
    """The first five names as text for a message."""
    return ", ".join(repr(name) for name in names[:5]) + (", …" if len(names) > 5 else "")
