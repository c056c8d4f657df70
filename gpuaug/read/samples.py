"""Reads the samples of a batch, in a worker or in the training process: threads, retries, faults, labels."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.batch import Fault, Target
from gpuaug.errors import GpuaugError, SourceError
from gpuaug.read.packing import Rest
from gpuaug.source.adapt import Source
from gpuaug.source.local import LARGE, LARGEST_BATCH, LARGEST_IMAGE, too_large
from gpuaug.source.remote.ranges import may_pass

THREADS = 16
SLOW_S = 0.0005  # after a read that waits longer for its storage, threads read; see bench/reading.py

PAUSES = (0.0, 0.05, 0.2)  # seconds before each try of a read; network storage sometimes fails briefly
FAULTS = (OSError, MemoryError, GpuaugError)  # errors of a source that concern one sample
LONGEST_REASON = 500  # characters

_MISSING: Any = object()  # an unknown label


class EndedError(BaseException):
    """Stops a worker or a thread, because its iterator has ended."""


def is_over(present: NDArray[np.int64], generation: int) -> bool:
    return bool(present[0] != generation)


class Samples:
    """Reads the samples of a source, batch by batch. ``threads``: the largest number of reads at a time."""

    def __init__(self, source: Source, targets: tuple[str, ...], threads: int) -> None:
        self.source, self.targets = source, targets
        self.threads = threads if source.thread_safe else 1
        self._bounded = not source.mapped
        # no labels, of the labels' type and shape; None if samples have no label. At first: class numbers
        self._like: NDArray[Any] | None = np.zeros(0, dtype=np.int64)

    def batch(self, numbers: list[int], stale: Callable[[], bool] = lambda: False) -> tuple[list[memoryview], Rest]:
        """Read samples: the bytes of the images, then of the masks, without a copy; and the rest."""
        items, faults = self._read(numbers, stale), list[Fault]()
        for row, item in enumerate(items):
            if isinstance(item, Exception):
                faults.append(Fault(row, "read", f"{type(item).__name__}: {item}"[:LONGEST_REASON]))
                items[row] = memoryview(b""), self._unread(numbers[row]), None
            elif not len(item[0]):
                faults.append(Fault(row, "read", "0 bytes"))
        encoded, labels, extras = ([item[k] for item in items] for k in range(3))
        extra = extras if any(each is not None for each in extras) else None
        targets = None
        if self.targets or any(isinstance(label, Target | Mapping) for label in labels):
            from gpuaug.read.targets import as_target, collect  # runs without targets do not import it

            found = [as_target(label, number) for number, label in zip(numbers, labels, strict=True)]
            if self.targets:
                bad, known = [fault.row for fault in faults], self.source.num_keypoints
                targets, masks, more = collect(found, self.targets, skip=bad, num_keypoints=known)
                encoded += masks
                faults += more
            labels = [label if target is None else target.label for label, target in zip(labels, found, strict=True)]
        return encoded, (self._labels(labels), tuple(faults), targets, extra)

    def _unread(self, number: int) -> Any:
        """Label of a sample that cannot be read; ``_MISSING`` if the source does not know the label."""
        label = self.source.label
        try:
            if callable(label):
                return label(number)
            return _MISSING if self.source.labels is None else int(self.source.labels[number])
        except FAULTS:
            return _MISSING

    def _read(self, numbers: list[int], stale: Callable[[], bool]) -> list[Any]:
        """Return, for each sample, its bytes, label and extra, or the exception that becomes its fault."""
        items: list[Any] = [None] * len(numbers)
        rows, large = list(range(len(numbers))), 0  # `large`: bytes of all large images
        for pause in PAUSES:
            time.sleep(pause)
            asked, many = [numbers[row] for row in rows], self.source.read_many
            found = self._one_by_one(asked, stale) if many is None else self._at_once(many, asked, stale)
            for row, item in zip(rows, found, strict=True):
                if isinstance(item, BaseException) and not isinstance(item, FAULTS):
                    raise item
                if not isinstance(item, Exception):
                    item = _checked(item, numbers[row])
                    if self._bounded and (size := len(item[0])) > LARGE:
                        if size > LARGEST_IMAGE or large + size > LARGEST_BATCH:
                            item = too_large(size, self.source.key(numbers[row]), held=large)
                        else:
                            large += size
                items[row] = item
            rows = [row for row in rows if isinstance(items[row], OSError) and may_pass(items[row])]
            if not rows:
                break
        return items

    def _at_once(self, many: Callable[[list[int]], Any], numbers: list[int], stale: Callable[[], bool]) -> list[Any]:
        if stale():
            raise EndedError
        try:
            items = list(many(numbers))
        except FAULTS as error:
            return [error] * len(numbers)
        if len(items) != len(numbers):
            raise SourceError(f"`source.read_many` must give {len(numbers)} items. Found: {len(items)}.")
        return items

    def _one_by_one(self, numbers: list[int], stale: Callable[[], bool]) -> Iterator[Any]:
        """Yield the item or the exception of each sample. After a slow read, threads read ahead."""
        left = deque(numbers)
        while left:
            began = time.perf_counter() - time.thread_time()
            items = deque([self._item(left.popleft(), stale)])
            waited = time.perf_counter() - time.thread_time() - began
            if waited > SLOW_S and self.threads > 1 and not _is_large(items[0]):
                items += self._in_threads(left, stale)
            while items:
                yield items.popleft()

    def _in_threads(self, left: deque[int], stale: Callable[[], bool]) -> list[Any]:
        """Take samples from ``left`` and return their items. Stops after a large image, to hold few of them."""
        numbers, items = [*left], dict[int, Any]()
        rows = iter(range(len(numbers)))  # no two threads get the same row of it

        def work() -> None:
            for row in rows:
                items[row] = self._item(numbers[row], stale)
                if _is_large(items[row]):
                    deque(rows, maxlen=0)  # takes the other rows

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(self.threads, len(left)))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            deque(rows, maxlen=0)  # after an interrupt
        for _ in items:
            left.popleft()
        return [items[row] for row in range(len(items))]

    def _item(self, number: int, stale: Callable[[], bool]) -> Any:
        try:
            return EndedError() if stale() else self.source[number]
        except BaseException as error:
            return error

    def _labels(self, labels: list[Any]) -> NDArray[Any] | None:
        """Return labels as int64 [B], float32 [B] or [B, K], or None. Unknown labels of failed samples are 0."""
        known = [row for row, label in enumerate(labels) if label is not _MISSING]
        if known:
            values = _label_array([labels[row] for row in known])
            self._like = None if values is None else values[:0]
            if len(known) == len(labels):
                return values
        if self._like is None:
            return None
        filled = np.zeros((len(labels), *self._like.shape[1:]), dtype=self._like.dtype)
        if known:
            filled[known] = values
        return filled


def _is_large(item: Any) -> bool:
    return isinstance(item, tuple | list) and len(item) > 0 and hasattr(item[0], "__len__") and len(item[0]) > LARGE


def _checked(item: Any, number: int) -> tuple[memoryview, Any, Any]:
    """Return bytes, label and extra (or None) of a source's item. Raise SourceError if the item has another form."""
    kind = type(item).__name__
    if isinstance(item, tuple | list) and len(item) in (2, 3):
        data, label, extra = (*item, None)[:3]
        if isinstance(data, Tensor) and data.dtype == torch.uint8 and data.device.type == "cpu":
            data = data.numpy()
        try:
            view = memoryview(data)
            if view.ndim == 1 and view.itemsize == 1 and view.c_contiguous:
                return view.cast("B") if len(view) else memoryview(b""), label, extra
        except (TypeError, ValueError):
            pass
        kind = f"({', '.join(type(part).__name__ for part in item)})"
    raise SourceError(
        f"`source[{number}]` must give (bytes, label) or (bytes, label, extra) with the undecoded bytes of the file, "
        f"because the loader decodes them. Found: {kind}."
    )


def _label_array(labels: list[Any]) -> NDArray[Any] | None:
    """Return labels as int64 [n], float32 [n] or float32 [n, K]; None if all labels are None."""
    if all(label is None for label in labels):
        return None
    try:
        values = np.asarray([label.numpy() if isinstance(label, Tensor) else label for label in labels])
    except ValueError:
        values = np.asarray(None)
    if values.dtype.kind not in "biuf" or values.ndim not in (1, 2):
        kinds = ", ".join(sorted({type(label).__name__ for label in labels}))
        raise SourceError(
            "labels of a batch must be integers, floats, float vectors of one length, or all None. "
            f"Found: {kinds}, such as {labels[0]!r:.100}."
        )
    return values.astype(np.float32 if values.ndim == 2 or values.dtype.kind == "f" else np.int64)
