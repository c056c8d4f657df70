"""The objects of all samples of a source: the check of every object, and flat arrays that all processes share."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuaug.batch import Target
from gpuaug.source.index import Names, bounds_of, share

MOST_CLASSES = 1 << 31
MOST_KEYPOINTS = 1 << 12  # keypoints of an object
MOST_POINTS = 1 << 18  # objects times keypoints of an image; 3 MiB as float32


def check_points(objects: int, keypoints: int) -> str:
    """Why the keypoints of an image with so many objects take too much memory; "" if they do not."""
    if objects * keypoints <= MOST_POINTS:
        return ""
    return f"{objects} objects with {keypoints} keypoints each are more than {MOST_POINTS} keypoints in one image"


def checked(target: Target) -> Target:
    """Mark the target, so that reading does not check its objects again."""
    object.__setattr__(target, "_checked", True)
    return target


def find_faults(
    sample: NDArray[np.int64], columns: Mapping[str, Any], *, num_classes: int | None = None, file: str = ""
) -> dict[int, str]:
    """Why objects cannot be used, by sample.

    ``sample`` is int64 [N], the sample of each object, ascending. ``columns`` are those of :class:`ObjectTable`, with
    float32 for coordinates and areas; a column may be missing. ``file``: the file that messages name.
    """
    boxes, labels, keypoints, pointed, area, ids, corners = (
        columns.get(name) for name in ("boxes", "labels", "keypoints", "pointed", "area", "ids", "corners")
    )
    wrong: list[tuple[str, NDArray[Any], NDArray[np.bool_]]] = []
    if corners is not None:
        wrong.append(("corners of {} must be finite", corners, ~np.isfinite(corners).all(axis=(1, 2))))
    if boxes is not None:
        bad = ~(np.isfinite(boxes).all(axis=1) & (boxes[:, :2] <= boxes[:, 2:]).all(axis=1))
        wrong.append(("box of {} must be finite x1, y1, x2, y2 with x1 <= x2 and y1 <= y2", boxes, bad))
    if labels is not None:
        most = MOST_CLASSES if num_classes is None else num_classes
        wrong.append((f"class of {{}} must be 0 .. {most - 1}", labels, (labels < 0) | (labels >= most)))
    if area is not None:  # NaN: not known
        wrong.append(("area of {} must be finite, in float32", area, np.isinf(area)))
    if ids is not None:
        wrong.append(("id of {} must be at least 0, or -1 if it is not known", ids, ids < -1))
    if keypoints is not None:
        bad = ~(np.isfinite(keypoints).all(axis=2) & np.isin(keypoints[..., 2], (0, 1, 2))).all(axis=1)
        wrong.append(("keypoints of {} must be finite, with visibility 0, 1 or 2", keypoints, bad))
    reasons: dict[int, str] = {}
    for text, values, bad in wrong:
        for row in np.flatnonzero(bad).tolist():
            k = int(pointed[row]) if values is keypoints and pointed is not None else row
            name = f"object {k - np.searchsorted(sample, sample[k])}"
            if ids is not None and ids[k] >= 0:
                name = f"annotation {ids[k]}"
            name += f" in {file!r}" if file else ""
            reasons.setdefault(int(sample[k]), f"the {text.format(name)}. Found: {values[row].tolist()!r:.200}")
    if keypoints is not None and pointed is not None and len(sample):
        counts = np.bincount(sample)
        for i in np.flatnonzero(counts * keypoints.shape[1] > MOST_POINTS).tolist():
            reasons.setdefault(i, check_points(int(counts[i]), keypoints.shape[1]))
    return reasons


# name, dtype, shape per object (-1: any size), default for a missing column (None: no default)
COLUMNS: tuple[tuple[str, Any, tuple[int, ...], Any], ...] = (
    ("boxes", np.float32, (4,), None),
    ("labels", np.int64, (), 0),
    ("keypoints", np.float32, (-1, 3), None),
    ("crowd", np.bool_, (), False),
    ("area", np.float32, (), np.nan),
    ("ids", np.int64, (), -1),
    ("corners", np.float32, (4, 2), None),
)


def array_of(value: Any, name: str, kind: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """A column of numbers as an array of its own dtype; ValueError if ``kind`` and ``shape`` do not fit."""
    try:
        array = np.asarray(value)
    except ValueError:  # numpy's message names neither the column nor the shape
        raise ValueError(f"the entries of {name} must have the same length. Found: {value!r:.200}") from None
    if not array.size:  # from an empty list, numpy makes float64 [0]
        given = array.shape[1:] if array.ndim == 1 + len(shape) else [0] * len(shape)
        array = np.zeros((0, *(m if n < 0 else n for n, m in zip(shape, given, strict=True))), dtype=kind)
    matches = array.ndim == 1 + len(shape) and all(n in (-1, m) for n, m in zip(shape, array.shape[1:], strict=True))
    is_whole = np.dtype(kind).kind in "biu"
    if not matches or array.dtype.kind not in ("biu" if is_whole else "biuf"):
        wanted = "whole numbers" if is_whole else "numbers"
        wanted += f" of shape [{', '.join(['n', *('K' if n < 0 else str(n) for n in shape)])}]"
        raise ValueError(f"{name} must be {wanted}. Found: {array.dtype} {list(array.shape)}")
    if array.dtype == np.uint64 and array.size and array.max() >= 2**63:
        raise ValueError(f"{name} must be below 2**63. Found: {array.max()}")
    return array


def as_arrays(
    given: Mapping[str, Any], *, num_keypoints: int | None = None, names: Mapping[str, str] | None = None
) -> dict[str, NDArray[Any]]:
    """The columns of one image's objects as arrays of their own dtypes; ValueError if a shape or dtype is wrong.

    :func:`find_faults` checks the values. ``names``: the columns' names in messages, if they differ from those of a
    :class:`Target`.
    """
    columns: dict[str, NDArray[Any]] = {}
    for name, kind, shape, _ in COLUMNS:
        if given.get(name) is not None:
            array = array_of(given[name], (names or {}).get(name, name), kind, shape)
            if name == "keypoints" and num_keypoints and len(array) and array.shape[1] != num_keypoints:
                raise ValueError(f"each object must have {num_keypoints} keypoints. Found: {array.shape[1]}")
            columns[name] = array
    if "corners" in columns and "boxes" not in columns:
        corners = columns["corners"]
        columns["boxes"] = np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the columns of the sample's objects differ in length: {lengths}")
    return columns


class ObjectTable:
    """Boxes, labels and keypoints of N objects in the order of their samples. :class:`Target` describes the columns.

    The samples whose objects cannot be used have a reason instead of objects.

    Args:
        counts: number of objects of each sample.
        boxes: float [N, 4]; None: objects have only keypoints.
        labels: int [N].
        keypoints: float [N, K, 3], or [P, K, 3] with ``pointed``. The table stores only objects with keypoints.
        pointed: int [P], ascending numbers of the objects that have keypoints.
        crowd, area, ids: [N].
        corners: float [N, 4, 2], of oriented boxes.
        sizes: int [samples, 2], (height, width) of the annotated images; 0: not known.
        fractions: whether coordinates are fractions of the image's sides instead of pixels.
        num_classes: labels must be below this number.
        reasons: why samples cannot be used, by sample number. The table adds what :func:`find_faults` finds.
        file: the file that messages name.
    """

    def __init__(
        self,
        counts: Sequence[int] | NDArray[Any],
        *,
        boxes: NDArray[Any] | None,
        labels: NDArray[Any],
        keypoints: NDArray[Any] | None = None,
        pointed: NDArray[Any] | None = None,
        crowd: NDArray[Any] | None = None,
        area: NDArray[Any] | None = None,
        ids: NDArray[Any] | None = None,
        corners: NDArray[Any] | None = None,
        sizes: NDArray[Any] | None = None,
        fractions: bool = False,
        num_classes: int | None = None,
        reasons: Mapping[int, str] | None = None,
        file: str = "",
    ) -> None:
        self._fractions = fractions
        self.num_keypoints: int | None = None if keypoints is None else keypoints.shape[1]
        self.bounds = bounds_of(np.asarray(counts).tolist())
        if keypoints is not None and pointed is None:
            pointed = np.flatnonzero((keypoints != 0).any(axis=(1, 2)))
            keypoints = keypoints[pointed]
        small = np.int16 if not len(labels) or int(np.max(labels)) < 2**15 else np.int32
        crowd = None if crowd is None or not crowd.any() else crowd
        given = {"boxes": boxes, "keypoints": keypoints, "pointed": pointed, "crowd": crowd, "area": area, "ids": ids}
        given["corners"] = corners
        self.kinds = {"boxes"} | {name for name in ("keypoints", "corners") if given[name] is not None}
        kinds = {"pointed": np.int64, "crowd": np.bool_, "ids": np.int64}
        with np.errstate(over="ignore"):  # no warning: an infinite number makes a bad sample
            columns: dict[str, Any] = {
                name: np.ascontiguousarray(values, dtype=kinds.get(name, np.float32))
                for name, values in given.items()
                if values is not None
            }
        sample = np.repeat(np.arange(len(counts)), counts)
        found = find_faults(sample, {**columns, "labels": labels}, num_classes=num_classes, file=file)
        found |= reasons or {}
        self.damaged = share(torch.from_numpy(np.array(sorted(found), dtype=np.int64)))  # ascending sample numbers
        self._reasons = Names.of([[found[i].encode(errors="surrogatepass") for i in sorted(found)]])
        columns["labels"] = np.ascontiguousarray(labels, dtype=small)
        self._columns = {name: share(torch.from_numpy(column)) for name, column in sorted(columns.items())}
        self.sizes = None if sizes is None else share(torch.from_numpy(np.ascontiguousarray(sizes, dtype=np.int32)))

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def reason(self, index: int) -> str | None:
        """Why the objects of sample ``index`` cannot be used; None if they can."""
        at = int(np.searchsorted(self.damaged.numpy(), index))
        if at == len(self.damaged) or int(self.damaged[at]) != index:
            return None
        return self._reasons[at].decode(errors="surrogatepass")

    def target(self, index: int, **more: Any) -> Target:
        """The objects of sample ``index``. ``more``: other fields of the :class:`~gpuaug.batch.Target`."""
        begin, end = self.bounds.numpy()[index : index + 2].tolist()
        if len(self.damaged) and self.reason(index) is not None:
            end = begin
        columns: dict[str, Any] = {name: column.numpy() for name, column in self._columns.items()}
        if self.num_keypoints is not None:
            numbers, points = columns.pop("pointed"), columns.pop("keypoints")
            first, last = np.searchsorted(numbers, (begin, end)).tolist()
            whole = np.zeros((end - begin, *points.shape[1:]), dtype=np.float32)
            whole[numbers[first:last] - begin] = points[first:last]
            more["keypoints"] = whole
        if self.sizes is not None and all(size := self.sizes.numpy()[index].tolist()):
            more["size"] = tuple(size)
        columns = {name: column[begin:end] for name, column in columns.items()}
        return checked(Target(**columns, **more, fractions=self._fractions))

    def digest(self) -> str:
        hashed = hashlib.blake2b(self.bounds.numpy().data, digest_size=16)
        for name, column in self._columns.items():
            hashed.update(name.encode())
            hashed.update(column.numpy().reshape(-1).view(np.uint8).data)
        return hashed.hexdigest()
