"""Encoded bytes of whole batches, read by workers that never decode.

A batch travels as one tensor in shared memory: offsets, labels, faults and bytes one after the other. So it costs one
segment and one file descriptor, whatever its size, and the message about it is too short to be torn by a dying worker.
"""

from __future__ import annotations

import errno
import logging
import multiprocessing
import pickle
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from gpuaug.batch import EncodedBatch, Fault
from gpuaug.errors import ConfigError, GpuaugError, ReadError, SourceError
from gpuaug.read.workers import EndedError, SilentError, Task, Workers, remedy, start_workers
from gpuaug.source.adapt import Source, adapt
from gpuaug.source.index import share
from gpuaug.source.local import LARGE, LARGEST_BATCH, LARGEST_IMAGE, too_large

log = logging.getLogger("gpuaug")

TIMEOUT = 120.0  # seconds
TRIES = 3  # of a read that fails; storage over a network stumbles
PAUSE = 0.05  # seconds before the second try, four times as long before the third
FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
FINAL_ERRNO = {errno.EINVAL, errno.EFBIG, errno.ELOOP, errno.ENAMETOOLONG}
LONGEST_REASON = 500  # characters
EXAMPLES = 4  # samples that are asked for the kind of labels, where a first batch has none


class Reader:
    """Reads batches in the order it is given, in worker processes that live for many epochs.

    An image of more than 512 MiB, or of more than 16 MiB that the 2 GiB for such images in a batch do not hold beside
    the others, is a fault of its row. Pixels out of mapped files are under no such bound: their size is that of their
    maker.

    Args:
        source: see :mod:`gpuaug.source`; pickled into every worker, where the start method is not fork.
        num_workers: processes; 0 reads in this one.
        timeout: seconds to wait for a batch of the workers; ``math.inf`` waits for ever.
        prefetch_factor: batches that each worker reads ahead.
        start_method: fork, forkserver or spawn; None: Python's default.
    """

    def __init__(
        self,
        source: Any,
        *,
        num_workers: int = 0,
        timeout: float = TIMEOUT,
        prefetch_factor: int = 2,
        start_method: str | None = None,
    ) -> None:
        if num_workers < 0:
            raise ConfigError(f"`num_workers` must be at least 0. Found: {num_workers}.")
        number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if not number or not timeout > 0:
            raise ConfigError(
                f"`timeout` must be a number of seconds above 0; `.inf` waits for ever. Found: {timeout!r:.200}."
            )
        if prefetch_factor < 1:
            raise ConfigError(f"`prefetch_factor` must be at least 1. Found: {prefetch_factor}.")
        methods = multiprocessing.get_all_start_methods()
        if start_method is not None and (not isinstance(start_method, str) or start_method not in methods):
            raise ConfigError(f"`start_method` must be one of {', '.join(methods)}. Found: {start_method!r}.")
        if num_workers == 0 and timeout not in (TIMEOUT, float("inf")):
            log.warning("`timeout` of %g s has no effect: num_workers=0 reads in this process, and waits", timeout)
        self.source = adapt(source)
        self.num_workers, self.timeout = num_workers, timeout
        self.prefetch_factor, self.start_method = prefetch_factor, start_method
        self._generation = share(torch.from_numpy(np.zeros(1, dtype=np.int64)))  # of iterators; workers see it
        self._lock = threading.RLock()  # held while waiting for a batch; ending a generation needs no lock
        self._encode = _Encode(self.source, self._generation)
        self._workers: Workers | None = None
        weakref.finalize(self, _advance, self._generation)  # at exit, before multiprocessing ends the workers

    @property
    def pids(self) -> list[int]:
        """Processes that read now; [] without workers, and before the first batch."""
        return [] if self._workers is None else self._workers.pids

    def batches(
        self,
        epoch_order: Iterable[tuple[Tensor, Tensor, Tensor]],
        *,
        numbers: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
        zero_copy: bool = False,
    ) -> Iterator[EncodedBatch]:
        """One batch for each ``(indices, repeats, valid)``, in this order.

        ``numbers`` gives what the source is asked for, int64 [B], where that is not ``indices``. With ``zero_copy`` and
        without workers, a source with ``zero_copy`` (its bytes stay valid and unchanged) has them copied nowhere.

        An iterator that was begun before ends, in whatever thread it is. A sample that cannot be read (OSError, which
        includes connections and timeouts, and this project's own errors; after three tries where it may help) is a
        Fault of its row, without bytes.

        Raises:
            ReadError: if a worker dies or nothing arrives in time. The next call starts new workers.
            SourceError: if the source gives something else than ``(bytes, label)``, or cannot be pickled.
            Exception: what else the source raises, with its own type.
        """
        self._end()
        zero_copy = zero_copy and self.num_workers == 0 and bool(getattr(self.source, "zero_copy", False))
        return self._batches(int(self._generation.numpy()[0]), epoch_order, numbers, zero_copy)

    def close(self) -> None:
        """End the workers, and the iterator under way; a later call of ``batches`` starts new ones."""
        self._end()
        with self._lock:
            self._stop()

    def _batches(
        self,
        generation: int,
        epoch_order: Iterable[tuple[Tensor, Tensor, Tensor]],
        numbers: Callable[[Tensor, Tensor, Tensor], Tensor] | None,
        zero_copy: bool,
    ) -> Iterator[EncodedBatch]:
        asked: deque[tuple[Tensor, Tensor, Tensor]] = deque()

        far = self.num_workers if getattr(self.source, "prefetch", None) is not None else 0

        def tasks() -> Iterator[Task]:
            known: deque[NDArray[np.int64]] = deque()
            for indices, repeats, valid in epoch_order:
                asked.append((indices, repeats, valid))
                known.append((indices if numbers is None else numbers(indices, repeats, valid)).numpy())
                if len(known) > far:  # workers take turns
                    yield generation, known.popleft(), known[-1] if far else None
            while known:
                yield generation, known.popleft(), None

        def ended(present: Tensor = self._generation) -> bool:
            # no self: the workers hold this, and the reader holds them. By numpy: torch lets go of the interpreter's
            # lock, and a daemon thread that wants it back while the interpreter ends aborts the process
            return int(present.numpy()[0]) != generation

        todo, begun = tasks(), False
        try:
            while not ended():
                if self.num_workers == 0:
                    found: Any = next(todo, None)
                    if found is not None:
                        found = self._encode.batch(found[1], zero_copy=zero_copy)
                else:
                    with self._lock:
                        if ended():
                            return
                        found = self._next(todo, ended, asked, begin=not begun)
                        begun = True
                if found is None:
                    return
                yield found.unpack(*asked.popleft())
        finally:
            if not ended():
                self._end()  # workers leave off what was asked ahead

    def _end(self) -> None:
        """End the present iterator and let the workers skip what it asked for."""
        _advance(self._generation)

    def _next(
        self, todo: Iterator[Task], ended: Callable[[], bool], asked: Sequence[tuple[Tensor, ...]], *, begin: bool
    ) -> _Packed | None:
        try:
            if begin:
                self._begin(todo, ended)
            if self._workers is None:  # closed by another thread
                return None
            found = next(self._workers, None)
        except EndedError:
            return None
        except SilentError as silent:
            self._stop(kill=True)
            at = ""
            if asked and len(asked[0][0]):
                first = int(asked[0][0][0])
                at = f" The batch that is missing begins with sample {first} ({self.source.key(first)!r})."
            raise ReadError(f"{silent}{at}") from None
        except BaseException:
            self._stop(kill=True)  # an interrupted wait may have lost a batch
            raise
        if isinstance(found, _Raised):
            raise found.error()
        return found

    def _begin(self, tasks: Iterator[Task], ended: Callable[[], bool]) -> None:
        """Give the tasks to the living workers, or to new ones."""
        if self._workers is not None:
            self._workers.restart(tasks, ended)
            return
        self._workers = start_workers(
            self._encode,
            tasks,
            ended,
            num_workers=self.num_workers,
            timeout=self.timeout,
            prefetch_factor=self.prefetch_factor,
            start_method=self.start_method,
        )

    def _stop(self, *, kill: bool = False) -> None:
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.stop(kill=kill)


class _Encode:
    """What workers run: numbers of samples in, one packed batch out. Pickled with the source into every worker."""

    def __init__(self, source: Source, generation: Tensor) -> None:
        self.source, self.generation = source, generation
        self._bounded = not getattr(source, "mapped", False)
        self._like: NDArray[Any] | None = None  # labels of an earlier batch, for one that has none to go by
        self._unlabelled = False

    def __getitem__(self, task: Task) -> _Packed | _Unpacked | _Raised | None:
        generation, indices, after = task

        def stale() -> bool:
            return int(self.generation.numpy()[0]) != generation

        try:
            if after is not None:
                self.source.prefetch(after.tolist())  # type: ignore[attr-defined]
            return self.batch(indices, stale)
        except EndedError:
            return None
        except Exception as error:
            return _Raised.of(error)

    def batch(
        self, indices: NDArray[np.int64], stale: Callable[[], bool] = lambda: False, *, zero_copy: bool = False
    ) -> _Packed | _Unpacked:
        """Read and pack the samples ``indices``, int64 [B], or leave them where they are."""
        numbers = indices.tolist()
        items = self._read(numbers, stale)
        encoded: list[memoryview] = []
        labels: list[Any] = []
        faults: list[Fault] = []
        for row, (number, item) in enumerate(zip(numbers, items, strict=True)):
            if isinstance(item, Exception):
                reason = f"{type(item).__name__}: {item}"[:LONGEST_REASON]
                faults.append(Fault(row, "read", reason))
                encoded.append(memoryview(b""))
                labels.append(self._unread(number))
                continue
            items[row] = None  # `_pack` gives back what it has copied
            data, label = _checked(item, number)
            if not len(data):
                faults.append(Fault(row, "read", "0 bytes"))
            encoded.append(data)
            labels.append(label)
        values = self._labels(labels, numbers, stale)
        return _Unpacked(encoded, values, tuple(faults)) if zero_copy else _pack(encoded, values, faults)

    def _unread(self, number: int) -> Any:
        """Label of a sample that cannot be read, as far as the source knows it."""
        label = getattr(self.source, "label", None)
        try:
            if callable(label):
                return label(number)
            return _MISSING if self.source.labels is None else int(self.source.labels[number])
        except (OSError, GpuaugError):
            return _MISSING

    def _example(self, failed: list[int], stale: Callable[[], bool]) -> Any:
        """Label of any other sample: its kind is that of all."""
        active = self.source.indices
        numbers = np.arange(len(self.source)) if active is None else active.numpy()
        others = np.setdiff1d(numbers, failed)
        some = others[:: max(1, len(others) // EXAMPLES)][:EXAMPLES].tolist()
        for number, item in zip(some, self._ask(some, stale), strict=True):
            if not isinstance(item, Exception):
                return _checked(item, number)[1]
        return _MISSING

    def _read(self, numbers: list[int], stale: Callable[[], bool]) -> list[Any]:
        """Per sample what the source gives, or the exception that makes it a fault."""
        items: list[Any] = [None] * len(numbers)
        held = 0  # bytes of large images

        def admit(number: int, item: Any) -> Any:
            nonlocal held
            size = _size(item) if self._bounded else 0
            if size > LARGE:
                if size > LARGEST_IMAGE or held + size > LARGEST_BATCH:
                    return too_large(size, self.source.key(number), held=held)
                held += size
            return item

        rows = list(range(len(numbers)))
        for attempt in range(TRIES):
            if attempt:
                time.sleep(PAUSE * 4 ** (attempt - 1))
            for row, item in zip(rows, self._ask([numbers[row] for row in rows], stale, admit), strict=True):
                items[row] = item
            rows = [row for row in rows if _may_pass(items[row])]
            if not rows:
                break
        return items

    def _ask(
        self,
        numbers: list[int],
        stale: Callable[[], bool],
        admit: Callable[[int, Any], Any] = lambda number, item: item,
    ) -> list[Any]:
        if stale():
            raise EndedError
        many = getattr(self.source, "read_many", None)
        if many is not None:
            try:
                found = list(many(numbers))
            except (OSError, GpuaugError) as error:
                return [error] * len(numbers)
            if len(found) != len(numbers):
                raise SourceError(f"`source.read_many` must give {len(numbers)} items. Found: {len(found)}.")
            for item in found:
                if isinstance(item, BaseException) and not isinstance(item, OSError | GpuaugError):
                    raise item
            return [admit(number, item) for number, item in zip(numbers, found, strict=True)]
        items: list[Any] = []
        for number in numbers:
            if stale():
                raise EndedError
            try:
                items.append(admit(number, self.source[number]))
            except (OSError, GpuaugError) as error:
                items.append(error)
        return items

    def _labels(self, labels: list[Any], numbers: list[int], stale: Callable[[], bool]) -> NDArray[Any] | None:
        """int64 [B], float32 [B], float32 [B, K], or None; zero where a sample failed and its label is not known."""
        known = [label for label in labels if label is not _MISSING]
        if not known:
            if self._like is None and not self._unlabelled and numbers:
                example = self._example(numbers, stale)
                self._labels([0 if example is _MISSING else example], [], stale)  # the kind of all labels from now on
            if self._unlabelled:
                return None
            like = np.zeros(1, dtype=np.int64) if self._like is None else self._like
            return np.zeros((len(labels), *like.shape[1:]), dtype=like.dtype)
        if all(label is None for label in known):
            self._unlabelled = True
            return None
        try:
            values = np.asarray([label.numpy() if isinstance(label, Tensor) else label for label in known])
        except ValueError:
            values = np.asarray(None)
        if values.dtype.kind not in "biuf" or values.ndim not in (1, 2):
            kinds = ", ".join(sorted({type(label).__name__ for label in known}))
            raise SourceError(
                "labels of a batch must be integers, floats, float vectors of one length, or all None. "
                f"Found: {kinds}, such as {known[0]!r:.100}."
            )
        values = values.astype(np.float32 if values.ndim == 2 or values.dtype.kind == "f" else np.int64)
        self._like = values[:1]
        if len(known) == len(labels):
            return values
        filled = np.zeros((len(labels), *values.shape[1:]), dtype=values.dtype)
        filled[[label is not _MISSING for label in labels]] = values
        return filled


@dataclass(frozen=True, slots=True)
class _Packed:
    """A batch in one piece of memory: offsets int64 [B + 1], labels, pickled faults, bytes of the images."""

    blob: Tensor  # uint8, in shared memory where a worker made it
    rows: int
    labels: tuple[torch.dtype, tuple[int, ...]] | None  # dtype and shape
    faults: int  # bytes

    def unpack(self, indices: Tensor, repeats: Tensor, valid: Tensor) -> EncodedBatch:
        """Views into the one piece, which lives as long as any of them; labels are copied."""
        end = 8 * (self.rows + 1)
        offsets, labels, faults = self.blob[:end].view(torch.int64), None, ()
        if self.labels is not None:
            dtype, shape = self.labels
            begin, end = end, end + dtype.itemsize * int(np.prod(shape))
            labels = self.blob[begin:end].view(dtype).view(shape).clone()  # else a finished batch keeps all of it
        if self.faults:
            begin, end = end, end + self.faults
            faults = pickle.loads(self.blob[begin:end].numpy().tobytes())
        return EncodedBatch(
            data=self.blob[end:],
            offsets=offsets,
            labels=labels,
            indices=indices,
            repeats=repeats,
            valid=valid,
            faults=faults,
        )


@dataclass(frozen=True, slots=True)
class _Unpacked:
    """A batch whose images stay where they are: in the memory of a source that lends it."""

    encoded: list[memoryview]
    labels: NDArray[Any] | None
    faults: tuple[Fault, ...]

    def unpack(self, indices: Tensor, repeats: Tensor, valid: Tensor) -> EncodedBatch:
        """Nothing is copied."""
        offsets = np.zeros(len(self.encoded) + 1, dtype=np.int64)
        np.cumsum([len(data) for data in self.encoded], out=offsets[1:])
        return EncodedBatch(
            data=torch.empty(0, dtype=torch.uint8, device="cpu"),
            offsets=torch.from_numpy(offsets),
            labels=None if self.labels is None else torch.from_numpy(self.labels),
            indices=indices,
            repeats=repeats,
            valid=valid,
            faults=self.faults,
            views=tuple(np.frombuffer(data, dtype=np.uint8) if len(data) else _NOTHING for data in self.encoded),
        )


@dataclass(frozen=True, slots=True)
class _Raised:
    """An exception of the user's source on its way out of a worker; pickled apart, as it may not come back whole."""

    data: bytes | None
    text: str

    @classmethod
    def of(cls, error: Exception) -> _Raised:
        text = "".join(traceback.format_exception(error))
        try:
            data = pickle.dumps(error)
            pickle.loads(data)
        except Exception:  # its constructor takes other arguments, or it holds what cannot travel
            return cls(None, text)
        return cls(data, text)

    def error(self) -> BaseException:
        """The exception with its own type and, as a note, the worker's traceback; RuntimeError if it cannot travel."""
        error: BaseException | None = None
        if self.data is not None:
            try:
                error = pickle.loads(self.data)
            except Exception:  # a class that only the worker can import
                error = None
        if not isinstance(error, BaseException):
            error = RuntimeError("the source raised an exception that cannot be pickled")
        error.add_note(f"raised in a worker that reads:\n{self.text}")
        return error


_NOTHING: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)


class _Missing:
    """Stands for the label of a sample that failed."""


_MISSING = _Missing()


def _advance(generation: Tensor) -> None:
    generation.numpy()[0] += 1  # by numpy: it may be made, or ended, in torch.inference_mode


def _may_pass(item: Any) -> bool:
    return isinstance(item, OSError) and not isinstance(item, FINAL) and item.errno not in FINAL_ERRNO


def _size(item: Any) -> int:
    """Bytes of what a source gave, as far as it is what it should be."""
    try:
        return memoryview(item[0]).nbytes if not isinstance(item[0], Tensor) else item[0].nbytes
    except (TypeError, ValueError, IndexError, KeyError, AttributeError):
        return 0


def _checked(item: Any, number: int) -> tuple[memoryview, Any]:
    """Bytes and label of what a source gave."""
    if isinstance(item, tuple | list) and len(item) == 2:
        data, label = item
        if isinstance(data, Tensor) and data.dtype == torch.uint8 and data.device.type == "cpu":
            data = data.numpy()
        try:
            view = memoryview(data)
        except (TypeError, ValueError):
            view = None
        if view is not None and view.ndim == 1 and view.itemsize == 1 and view.c_contiguous:
            return view.cast("B") if len(view) else memoryview(b""), label
        found = f"({type(data).__name__}, {type(label).__name__})"
    else:
        found = f"{type(item).__name__}"
    raise SourceError(
        f"`source[{number}]` must give (bytes, label), the bytes as they stand in the file: images are decoded on the "
        f"device. Found: {found}."
    )


def _pack(encoded: list[memoryview], labels: NDArray[Any] | None, faults: list[Fault]) -> _Packed:
    offsets = np.zeros(len(encoded) + 1, dtype=np.int64)
    np.cumsum([len(data) for data in encoded], out=offsets[1:])
    named = pickle.dumps(tuple(faults)) if faults else b""
    parts: list[Any] = [offsets.tobytes(), b"" if labels is None else labels.tobytes(), named]
    blob = _memory(sum(len(part) for part in [*parts, *encoded]))
    target, begin = blob.numpy().data, 0
    for pieces in (parts, encoded):
        for k, part in enumerate(pieces):
            target[begin : begin + len(part)] = part
            begin += len(part)
            pieces[k] = memoryview(b"")  # one by one: the bytes of a batch are in memory once
    kind = None
    if labels is not None:
        kind = (torch.float32 if labels.dtype == np.float32 else torch.int64), labels.shape
    return _Packed(blob, len(encoded), kind, len(named))


def _memory(size: int) -> Tensor:
    """uint8 [size], in a worker in shared memory, so that sending it copies nothing."""
    if get_worker_info() is None:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    try:
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(torch.UntypedStorage._new_shared(size))
    except RuntimeError as error:
        raise ReadError(f"no shared memory for a batch of {size} bytes: {error}. {remedy(error)}") from error
