"""Encoded bytes of whole batches, read by workers that never decode.

A batch travels as one tensor in shared memory: offsets, pickled labels and faults, and bytes one after the other. So it
costs one segment and one file descriptor, whatever its size, and the message about it is too short to be torn by a
dying worker.
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
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from gpuaug import checks
from gpuaug.batch import EncodedBatch, Fault
from gpuaug.errors import ConfigError, GpuaugError, ReadError, SourceError
from gpuaug.read.workers import EndedError, SilentError, Task, Workers, remedy
from gpuaug.source.adapt import Source, adapt
from gpuaug.source.index import share
from gpuaug.source.local import LARGE, LARGEST_BATCH, LARGEST_IMAGE, too_large

log = logging.getLogger("gpuaug")

TIMEOUT = 120.0  # seconds
PAUSES = (0.0, 0.05, 0.2)  # seconds before each try of a read; storage over a network stumbles
FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
FINAL_ERRNO = {errno.EINVAL, errno.EFBIG, errno.ELOOP, errno.ENAMETOOLONG}
LONGEST_REASON = 500  # characters
EXAMPLES = 4  # samples that are asked for the kind of labels, where a first batch has none

_MISSING: Any = object()  # stands for the label of a sample that failed
_Samples = tuple[list[memoryview], NDArray[Any] | None, tuple[Fault, ...]]  # bytes, labels, faults
_Order = tuple[Tensor, Tensor, Tensor]  # indices, repeats, valid of a batch


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
        checks.whole_number("num_workers", num_workers, 0)
        checks.whole_number("prefetch_factor", prefetch_factor, 1)
        if start_method is not None:
            checks.one_of("start_method", start_method, multiprocessing.get_all_start_methods())
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
            raise ConfigError(
                f"`timeout` must be a number of seconds above 0; `.inf` waits for ever. Found: {timeout!r:.200}."
            )
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
        epoch_order: Iterable[_Order],
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
        _advance(self._generation)
        zero_copy = zero_copy and self.num_workers == 0 and bool(getattr(self.source, "zero_copy", False))
        return self._batches(int(self._generation.numpy()[0]), epoch_order, numbers, zero_copy)

    def close(self) -> None:
        """End the workers, and the iterator under way; a later call of ``batches`` starts new ones."""
        _advance(self._generation)
        with self._lock:
            self._stop()

    def _batches(
        self,
        generation: int,
        epoch_order: Iterable[_Order],
        numbers: Callable[[Tensor, Tensor, Tensor], Tensor] | None,
        zero_copy: bool,
    ) -> Iterator[EncodedBatch]:
        asked: deque[_Order] = deque()
        # a source with `prefetch` gets the samples of a worker's next batch with each batch: workers take turns
        lookahead = self.num_workers if getattr(self.source, "prefetch", None) is not None else 0

        def tasks() -> Generator[Task, None, None]:
            known: deque[NDArray[np.int64]] = deque()
            for order in epoch_order:
                asked.append(order)
                known.append((order[0] if numbers is None else numbers(*order)).numpy())
                if len(known) > lookahead:
                    yield generation, known.popleft(), known[-1] if lookahead else None
            while known:
                yield generation, known.popleft(), None

        # no self: the workers hold this, and the reader holds them
        ended = partial(_is_over, self._generation, generation)
        todo, begun = tasks(), False
        try:
            while not ended():
                if self.num_workers == 0:
                    if (task := next(todo, None)) is None:
                        return
                    samples = self._encode.batch(task[1])
                    fields = _views(*samples) if zero_copy else _unpack(*_pack(*samples))
                else:
                    with self._lock:
                        if ended() or (packed := self._next(todo, ended, asked, begin=not begun)) is None:
                            return
                    begun = True
                    fields = _unpack(*packed)
                indices, repeats, valid = asked.popleft()
                yield EncodedBatch(indices=indices, repeats=repeats, valid=valid, **fields)
        finally:
            todo.close()  # the workers' DataLoader keeps the first one, which would keep its epoch
            if not ended():
                _advance(self._generation)  # workers skip what was asked ahead

    def _next(
        self, todo: Iterator[Task], ended: Callable[[], bool], asked: Sequence[_Order], *, begin: bool
    ) -> _Packed | None:
        """The next batch of the workers, which start or go on with ``todo`` to ``begin``; None if it has ended."""
        try:
            if begin and self._workers is not None:
                self._workers.restart(todo, ended)
            elif begin:
                self._workers = Workers(
                    self._encode,
                    todo,
                    ended,
                    num_workers=self.num_workers,
                    timeout=self.timeout,
                    prefetch_factor=self.prefetch_factor,
                    start_method=self.start_method,
                )
            # without workers: another thread has closed the reader
            message = None if self._workers is None else next(self._workers, None)
        except EndedError:
            return None
        except SilentError as silent:
            self._stop(kill=True)
            first = asked[0][0].tolist()[:1] if asked else []
            at = [f" The batch that is missing begins with sample {i} ({self.source.key(i)!r})." for i in first]
            raise ReadError(f"{silent}{''.join(at)}") from None
        except BaseException:
            self._stop(kill=True)  # an interrupted wait may have lost a batch
            raise
        if message is not None and isinstance(message[0], bytes):
            raise _raised(*message)
        return message

    def _stop(self, *, kill: bool = False) -> None:
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.stop(kill=kill)


def _advance(generation: Tensor) -> None:
    generation.numpy()[0] += 1  # by numpy: it may be made, or ended, in torch.inference_mode


def _is_over(present: Tensor, generation: int) -> bool:
    # by numpy: torch lets go of the interpreter's lock, and a daemon thread that wants it back while the interpreter
    # ends aborts the process
    return int(present.numpy()[0]) != generation


class _Encode:
    """What workers run: numbers of samples in, one packed batch out. Pickled with the source into every worker."""

    def __init__(self, source: Source, generation: Tensor) -> None:
        self.source, self.generation = source, generation
        self._bounded = not getattr(source, "mapped", False)
        self._like: Any = _MISSING  # a row of the labels of an earlier batch; None where samples have no label

    def __getitem__(self, task: Task) -> _Packed | _Raised | None:
        generation, indices, after = task

        stale = partial(_is_over, self.generation, generation)
        try:
            if after is not None:
                self.source.prefetch(after.tolist())  # type: ignore[attr-defined]
            return _pack(*self.batch(indices, stale))
        except EndedError:
            return None
        except Exception as error:
            try:
                data = pickle.dumps(error)
            except Exception:  # it holds what cannot travel
                data = b""
            return data, "".join(traceback.format_exception(error))

    def batch(self, indices: NDArray[np.int64], stale: Callable[[], bool] = lambda: False) -> _Samples:
        """Bytes where they are, labels and faults of the samples ``indices``, int64 [B]."""
        numbers = indices.tolist()
        encoded: list[memoryview] = []
        labels: list[Any] = []
        faults: list[Fault] = []
        for row, (number, item) in enumerate(zip(numbers, self._read(numbers, stale), strict=True)):
            if isinstance(item, Exception):
                faults.append(Fault(row, "read", f"{type(item).__name__}: {item}"[:LONGEST_REASON]))
                item = memoryview(b""), self._unread(number)
            elif not len(item[0]):
                faults.append(Fault(row, "read", "0 bytes"))
            encoded.append(item[0])
            labels.append(item[1])
        return encoded, self._labels(labels, numbers, stale), tuple(faults)

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
        return 0

    def _read(self, numbers: list[int], stale: Callable[[], bool]) -> list[Any]:
        """Per sample its bytes and label, or the exception that makes it a fault."""
        items: list[Any] = [None] * len(numbers)
        rows, large = list(range(len(numbers))), 0  # bytes of large images
        for pause in PAUSES:
            time.sleep(pause)
            for row, item in zip(rows, self._ask([numbers[row] for row in rows], stale), strict=True):
                if not isinstance(item, Exception):
                    item = _checked(item, numbers[row])
                    if self._bounded and (size := len(item[0])) > LARGE:
                        if size > LARGEST_IMAGE or large + size > LARGEST_BATCH:
                            item = too_large(size, self.source.key(numbers[row]), held=large)
                        else:
                            large += size
                items[row] = item
            rows = [row for row in rows if _may_pass(items[row])]
            if not rows:
                break
        return items

    def _ask(self, numbers: list[int], stale: Callable[[], bool]) -> Iterator[Any]:
        """Per sample what the source gives, or the exception that makes it a fault."""
        many = getattr(self.source, "read_many", None)
        if many is None:
            for number in numbers:
                if stale():
                    raise EndedError
                try:
                    yield self.source[number]
                except (OSError, GpuaugError) as error:
                    yield error
            return
        if stale():
            raise EndedError
        try:
            items = list(many(numbers))
        except (OSError, GpuaugError) as error:
            items = [error] * len(numbers)
        if len(items) != len(numbers):
            raise SourceError(f"`source.read_many` must give {len(numbers)} items. Found: {len(items)}.")
        for item in items:
            if isinstance(item, BaseException) and not isinstance(item, OSError | GpuaugError):
                raise item
        yield from items

    def _labels(self, labels: list[Any], numbers: list[int], stale: Callable[[], bool]) -> NDArray[Any] | None:
        """int64 [B], float32 [B], float32 [B, K], or None; zero where a sample failed and its label is not known."""
        present = [label is not _MISSING for label in labels]
        known = [label for label in labels if label is not _MISSING]
        values = None
        if known or self._like is _MISSING:
            values = _label_array(known or [self._example(numbers, stale)])
            self._like = None if values is None else values[:1]
        if self._like is None or all(present):
            return values
        filled = np.zeros((len(labels), *self._like.shape[1:]), dtype=self._like.dtype)
        if known:
            filled[present] = values
        return filled


_Packed = tuple[Tensor, int, int]  # one piece of memory, its images, and bytes of its pickled labels and faults
_Raised = tuple[bytes, str]  # a pickled exception, and its traceback


def _pack(encoded: list[memoryview], labels: NDArray[Any] | None, faults: tuple[Fault, ...]) -> _Packed:
    """One piece of memory: offsets int64 [B + 1], labels and faults, images. Empties ``encoded``."""
    rest = pickle.dumps((labels, faults))
    offsets = _offsets(encoded)
    blob = _memory(offsets.nbytes + len(rest) + int(offsets[-1]))
    target, begin = blob.numpy().data, 0
    rows = len(encoded)
    pieces: list[Any] = [offsets.tobytes(), rest, *encoded][::-1]
    encoded.clear()
    while pieces:  # one by one: the bytes of a batch are in memory once
        piece = pieces.pop()
        target[begin : begin + len(piece)] = piece
        begin += len(piece)
    return blob, rows, len(rest)


def _unpack(blob: Tensor, rows: int, size: int) -> dict[str, Any]:
    """Fields of an EncodedBatch: views into the one piece, which lives as long as any of them; labels are copied."""
    begin = 8 * (rows + 1)
    labels, faults = pickle.loads(blob[begin : begin + size].numpy().tobytes())
    return {
        "data": blob[begin + size :],
        "offsets": blob[:begin].view(torch.int64),
        "labels": None if labels is None else torch.from_numpy(labels),
        "faults": faults,
    }


def _views(encoded: list[memoryview], labels: NDArray[Any] | None, faults: tuple[Fault, ...]) -> dict[str, Any]:
    """Fields of an EncodedBatch whose images stay where they are, in the memory of a source with ``zero_copy``."""
    return {
        "data": torch.empty(0, dtype=torch.uint8, device="cpu"),
        "offsets": torch.from_numpy(_offsets(encoded)),
        "labels": None if labels is None else torch.from_numpy(labels),
        "faults": faults,
        "views": tuple(np.frombuffer(data, dtype=np.uint8) for data in encoded),
    }


def _offsets(encoded: list[memoryview]) -> NDArray[np.int64]:
    return np.cumsum([0, *map(len, encoded)], dtype=np.int64)


def _raised(data: bytes, text: str) -> BaseException:
    """The source's exception with its own type, the worker's traceback as a note; RuntimeError if it cannot travel."""
    error: BaseException
    try:
        error = pickle.loads(data)
    except Exception:  # its constructor takes other arguments, or only the worker can import its class
        error = RuntimeError("the source raised an exception that cannot be pickled")
    error.add_note(f"raised in a worker that reads:\n{text}")
    return error


def _may_pass(item: Any) -> bool:
    return isinstance(item, OSError) and not isinstance(item, FINAL) and item.errno not in FINAL_ERRNO


def _checked(item: Any, number: int) -> tuple[memoryview, Any]:
    """Bytes and label of what a source gave."""
    kind = type(item).__name__
    if isinstance(item, tuple | list) and len(item) == 2:
        data, label = item
        if isinstance(data, Tensor) and data.dtype == torch.uint8 and data.device.type == "cpu":
            data = data.numpy()
        try:
            view = memoryview(data)
            if view.ndim == 1 and view.itemsize == 1 and view.c_contiguous:
                return view.cast("B") if len(view) else memoryview(b""), label
        except (TypeError, ValueError):
            pass
        kind = f"({type(data).__name__}, {type(label).__name__})"
    raise SourceError(
        f"`source[{number}]` must give (bytes, label), the bytes as they stand in the file: images are decoded on the "
        f"device. Found: {kind}."
    )


def _label_array(labels: list[Any]) -> NDArray[Any] | None:
    """int64 [n], float32 [n] or float32 [n, K]; None where all labels are."""
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


def _memory(size: int) -> Tensor:
    """uint8 [size], in a worker in shared memory, so that sending it copies nothing."""
    if get_worker_info() is None:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    try:
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(torch.UntypedStorage._new_shared(size))
    except RuntimeError as error:
        raise ReadError(f"no shared memory for a batch of {size} bytes: {error}. {remedy(error)}") from error
