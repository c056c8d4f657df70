"""Reads encoded bytes of whole batches, in workers that never decode.

A worker sends a batch as one tensor in shared memory, so that each batch needs only one file descriptor. The message
that announces the batch is so short that a dying worker cannot send half of the message.
"""

from __future__ import annotations

import errno
import itertools
import logging
import multiprocessing
import os
import pickle
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from gpuaug import checks
from gpuaug.batch import EncodedBatch, EncodedTargets, Fault, Target
from gpuaug.errors import ConfigError, GpuaugError, ReadError, SourceError
from gpuaug.read.ends import finalize
from gpuaug.read.order import Task
from gpuaug.read.workers import TIMEOUT_S, EndedError, Request, Workers, remedy
from gpuaug.source.adapt import Source, adapt
from gpuaug.source.index import share
from gpuaug.source.local import FINAL, LARGE, LARGEST_BATCH, LARGEST_IMAGE, too_large

log = logging.getLogger("gpuaug")

TIMEOUT = 120.0  # seconds
PAUSES = (0.0, 0.05, 0.2)  # seconds before each try of a read; network storage sometimes fails briefly
FINAL_ERRNO = {errno.EINVAL, errno.EFBIG, errno.ELOOP, errno.ENAMETOOLONG}
FAULTS = (OSError, MemoryError, GpuaugError)  # errors of a source that concern one sample
LONGEST_REASON = 500  # characters
EXAMPLES = 4  # samples that are read to learn the type of labels, if the first batch has no known label
PICKLABLE = "Give text, bytes, numbers, lists, dictionaries or numpy arrays."

_MISSING: Any = object()  # an unknown label
# labels, faults, targets and extras of a batch
_Rest = tuple[NDArray[Any] | None, tuple[Fault, ...], EncodedTargets | None, list[Any] | None]
_Samples = tuple[list[memoryview], _Rest]  # bytes of the images, then of the masks; and the rest


class Reader:
    """Reads batches in a given order, in worker processes that live for many epochs.

    An image above 512 MiB is a fault. In a batch, the images above 16 MiB may have 2 GiB in total. An image that would
    exceed the total is a fault, too. Memory-mapped sources have no limits.

    Args:
        source: see :mod:`gpuaug.source`. With a start method other than fork, every worker gets a pickled copy.
        num_workers: number of processes; 0 reads in this process.
        timeout: seconds to wait for a batch from the workers; ``math.inf`` waits forever.
        prefetch_factor: batches that each worker reads ahead.
        start_method: fork, forkserver or spawn; None: Python's default.
        targets: the kinds of targets to read: masks, boxes, keypoints.
    """

    def __init__(
        self,
        source: Any,
        *,
        num_workers: int = 0,
        timeout: float = TIMEOUT,
        prefetch_factor: int = 2,
        start_method: str | None = None,
        targets: Sequence[str] = (),
    ) -> None:
        checks.whole_number("num_workers", num_workers, 0)
        checks.whole_number("prefetch_factor", prefetch_factor, 1)
        if start_method is not None:
            checks.one_of("start_method", start_method, multiprocessing.get_all_start_methods())
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
            raise ConfigError(
                f"`timeout` must be a number of seconds above 0; `.inf` waits forever. Found: {timeout!r:.200}."
            )
        if num_workers == 0 and timeout not in (TIMEOUT, float("inf")):
            log.warning("`timeout` of %g s has no effect: num_workers=0 reads in this process and waits", timeout)
        self.source = adapt(source)
        self.num_workers, self.timeout = num_workers, timeout
        self.prefetch_factor, self.start_method = prefetch_factor, start_method
        self.targets = tuple(targets)
        self._own()

    def _own(self) -> None:
        """Make what only this process may change. A forked child must not end its parent's iterator or workers."""
        self._numbers = itertools.count(1)  # of the iterators; two threads cannot get the same number
        # the number of the current iterator; 0: none
        self._generation = share(torch.from_numpy(np.zeros(1, dtype=np.int64)))
        self._lock = threading.RLock()  # held while waiting for a batch; `_end` needs no lock
        self._encode = _Encode(self.source, self._generation, self.targets)
        self._workers: Workers | None = None
        finalize(self, _leave, self._generation, self._lock)
        self._pid = os.getpid()  # at the end, because other threads look here

    @property
    def pids(self) -> list[int]:
        return [] if self._workers is None else self._workers.pids

    def batches(
        self,
        tasks: Iterable[Task],
        *,
        first: int = 0,
        zero_copy: bool = False,
    ) -> Iterator[EncodedBatch]:
        """Yield one batch for each ``(indices, repeats, valid)``. This call ends an earlier iterator of any thread.

        ``first`` is added to the sample numbers that the source reads. ``zero_copy`` avoids copies if there are no
        workers and the source's own ``zero_copy`` is True.

        If reading a sample raises OSError, MemoryError or an error of gpuaug, the row has no bytes and gets a Fault.

        Raises:
            ReadError: if a worker dies or no batch arrives in time. The next call starts new workers.
            SourceError: if a sample has the wrong form, or if the source or an extra cannot be pickled.
            Exception: any other exception of the source; RuntimeError if it cannot be pickled.
        """
        if self._pid != os.getpid():
            self._own()
        generation = self._generation.numpy()[0] = next(self._numbers)
        zero_copy = zero_copy and self.num_workers == 0 and bool(getattr(self.source, "zero_copy", False))
        return self._batches(generation, tasks, first, zero_copy)

    def close(self) -> None:
        """End the workers and the current iterator. The next call of ``batches`` starts new workers."""
        if self._pid == os.getpid():
            _end(self._generation)
            with self._lock:
                self._stop()

    def _batches(
        self,
        generation: int,
        tasks: Iterable[Task],
        first: int,
        zero_copy: bool,
    ) -> Iterator[EncodedBatch]:
        asked: deque[Task] = deque()
        # Workers take turns, so a worker's next batch is `num_workers` places later.
        lookahead = self.num_workers if callable(getattr(self.source, "prefetch", None)) else 0

        def requests() -> Generator[Request, None, None]:
            known: deque[NDArray[np.int64]] = deque()
            for task in tasks:
                asked.append(task)
                known.append(task[0].numpy() + first)
                if len(known) > lookahead:
                    yield generation, known.popleft(), known[-1] if lookahead else None
            while known:
                yield generation, known.popleft(), None

        # `ended` must not refer to self: the workers hold `ended`, and the reader holds the workers (a cycle).
        ended = partial(_is_over, self._generation, generation)
        todo, begun, pid = requests(), False, self._pid
        try:
            while not ended():
                if self.num_workers == 0:
                    if (request := next(todo, None)) is None:
                        return
                    samples = self._encode.batch(request[1])
                    fields = _views(*samples) if zero_copy else self._unpacked(_pack(*samples), asked[0])
                else:
                    with self._lock:
                        if ended() or (packed := self._next(todo, ended, asked, begin=not begun)) is None:
                            return
                    begun = True
                    fields = self._unpacked(packed, asked[0])
                indices, repeats, valid = asked.popleft()
                yield EncodedBatch(indices=indices, repeats=repeats, valid=valid, **fields)
        finally:
            todo.close()  # to free the tasks: the workers keep `todo`
            if not ended() and pid == os.getpid():
                _end(self._generation)  # the workers then skip the batches that were requested ahead

    def _next(
        self, todo: Iterator[Request], ended: Callable[[], bool], asked: Sequence[Task], *, begin: bool
    ) -> _Packed | None:
        """The workers' next batch; None at the end. ``begin``: the workers must first get ``todo``."""
        try:
            if begin:
                if self._workers is None:
                    self._workers = Workers(
                        self._encode,
                        num_workers=self.num_workers,
                        timeout=self.timeout,
                        prefetch_factor=self.prefetch_factor,
                        start_method=self.start_method,
                    )
                self._workers.begin(todo, ended)
            # `_workers` is None if another thread has closed the reader.
            message = None if self._workers is None else next(self._workers, None)
        except EndedError:
            if begin:
                self._stop()  # DataLoader would take a late answer to `begin` for a batch
            return None
        except BaseException as error:
            self._stop(kill=True)  # an interrupted wait may have lost a batch
            if isinstance(error, ReadError) and asked:
                i = int(asked[0][0][0])
                at = f"The missing batch begins with sample {i} ({self.source.key(i)!r})."
                raise ReadError(f"{error} {at}") from None
            raise
        if message is not None and isinstance(message[0], bytes):
            raise _raised(*message)
        return message

    def _unpacked(self, packed: _Packed, task: Task) -> dict[str, Any]:
        try:
            return _unpack(*packed)
        except Exception as error:  # unpickling calls the classes of the extras
            first, last = (self.source.key(i) for i in task[0][[0, -1]].tolist())
            raise SourceError(
                f"an extra, the third value of a sample, cannot be unpickled: {type(error).__name__}: {error}. The "
                f"sample is in the batch from {first!r} to {last!r}. {PICKLABLE}"
            ) from error

    def _stop(self, *, kill: bool = False) -> None:
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.stop(kill=kill)


def _end(generation: Tensor) -> None:
    generation.numpy()[0] = 0  # torch may refuse the change, depending on torch.inference_mode


def _leave(generation: Tensor, lock: threading.RLock) -> None:
    """End the current iterator, and wait until no thread is in torch's code for workers.

    At exit, this runs before multiprocessing ends the workers. torch releases the GIL, and a daemon thread that
    reacquires it while Python ends aborts the process.
    """
    _end(generation)
    lock.acquire(timeout=TIMEOUT_S)  # kept, so that no thread begins again


def _is_over(present: Tensor, generation: int) -> bool:
    # read by numpy, because torch would release the GIL: see `_leave`
    return int(present.numpy()[0]) != generation


class _Encode:
    """The dataset of the workers. Every worker has its own copy, with the source."""

    def __init__(self, source: Source, generation: Tensor, targets: tuple[str, ...]) -> None:
        self.source, self.generation, self.targets = source, generation, targets
        self._bounded = not getattr(source, "mapped", False)
        self._like: Any = _MISSING  # an array of labels of the same type and shape; None if samples have no label

    def __getitem__(self, request: Request) -> _Packed | _Raised | None:
        generation, indices, after = request
        stale = partial(_is_over, self.generation, generation)
        try:
            if after is not None:
                self.source.prefetch(after.tolist())
            return _pack(*self.batch(indices, stale))
        except EndedError:
            return None
        except Exception as error:
            try:
                data = pickle.dumps(error)
            except Exception:  # some attribute of the exception cannot be pickled
                data = b""
            return data, "".join(traceback.format_exception(error))

    def batch(self, indices: NDArray[np.int64], stale: Callable[[], bool] = lambda: False) -> _Samples:
        """Read the samples ``indices``, int64 [B], without a copy of their bytes."""
        numbers = indices.tolist()
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
                bad, known = [fault.row for fault in faults], getattr(self.source, "num_keypoints", None)
                targets, masks, more = collect(found, self.targets, skip=bad, num_keypoints=known)
                encoded += masks
                faults += more
            labels = [label if target is None else target.label for label, target in zip(labels, found, strict=True)]
        return encoded, (self._labels(labels, numbers, stale), tuple(faults), targets, extra)

    def _unread(self, number: int) -> Any:
        """Label of a sample that cannot be read; ``_MISSING`` if the source does not know the label."""
        label = getattr(self.source, "label", None)
        try:
            if callable(label):
                return label(number)
            return _MISSING if self.source.labels is None else int(self.source.labels[number])
        except FAULTS:
            return _MISSING

    def _example(self, failed: list[int], stale: Callable[[], bool]) -> Any:
        """Return the label of a sample outside ``failed``, to learn the type of labels; 0 if none can be read."""
        active = self.source.indices
        numbers = np.arange(len(self.source)) if active is None else active.numpy()
        others = np.setdiff1d(numbers, failed)
        some = others[:: max(1, len(others) // EXAMPLES)][:EXAMPLES].tolist()
        for number, item in zip(some, self._ask(some, stale), strict=True):
            if not isinstance(item, Exception):
                label = _checked(item, number)[1]
                return label.get("label") if isinstance(label, Mapping) else getattr(label, "label", label)
        return 0

    def _read(self, numbers: list[int], stale: Callable[[], bool]) -> list[Any]:
        """Return, for each sample, its bytes, label and extra, or the exception that becomes its fault."""
        items: list[Any] = [None] * len(numbers)
        rows, large = list(range(len(numbers))), 0  # `large`: bytes of all large images
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
        """Yield, for each sample, the item from the source, or the exception that becomes its fault."""
        many = getattr(self.source, "read_many", None)
        for some in [[number] for number in numbers] if many is None else [numbers]:
            if stale():
                raise EndedError
            try:
                items = [self.source[number] for number in some] if many is None else list(many(some))
            except FAULTS as error:
                items = [error] * len(some)
            if len(items) != len(some):
                raise SourceError(f"`source.read_many` must give {len(some)} items. Found: {len(items)}.")
            for item in items:
                if isinstance(item, BaseException) and not isinstance(item, FAULTS):
                    raise item
                yield item

    def _labels(self, labels: list[Any], numbers: list[int], stale: Callable[[], bool]) -> NDArray[Any] | None:
        """Return labels as int64 [B], float32 [B] or [B, K], or None. Unknown labels of failed samples are 0."""
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


_Packed = tuple[Tensor, int, int]  # a memory block, number of images and masks, size of the pickled part in bytes
_Raised = tuple[bytes, str]  # a pickled exception and its traceback


def _pack(encoded: list[memoryview], rest: _Rest) -> _Packed:
    """Move a batch into one memory block. ``encoded`` (images and masks) is empty afterwards.

    The block holds, in this order, the offsets, the pickled ``rest``, and ``encoded``.
    """
    try:
        pickled = pickle.dumps(rest)
    except (TypeError, AttributeError, RecursionError, pickle.PicklingError) as error:
        raise SourceError(
            f"an extra, the third value of a sample, cannot be pickled for the other process: {error}. {PICKLABLE}"
        ) from error
    offsets = _offsets(encoded)
    blob = _memory(offsets.nbytes + len(pickled) + int(offsets[-1]))
    target, begin = blob.numpy().data, 0
    rows = len(encoded)
    pieces: list[Any] = [offsets.tobytes(), pickled, *encoded][::-1]
    encoded.clear()
    while pieces:  # each piece is freed after its copy, because a batch should be in memory only once
        piece = pieces.pop()
        target[begin : begin + len(piece)] = piece
        begin += len(piece)
    return blob, rows, len(pickled)


def _fields(rest: _Rest, **fields: Any) -> dict[str, Any]:
    """Fields of an EncodedBatch."""
    labels, faults, targets, extra = rest
    tensor = None if labels is None else torch.from_numpy(labels)
    return {**fields, "labels": tensor, "faults": faults, "targets": targets, "extra": extra}


def _unpack(blob: Tensor, rows: int, size: int) -> dict[str, Any]:
    """Fields of an EncodedBatch whose images and offsets are views into the block."""
    begin = 8 * (rows + 1)
    rest = pickle.loads(blob[begin : begin + size].numpy().tobytes())
    return _fields(rest, data=blob[begin + size :], offsets=blob[:begin].view(torch.int64))


def _views(encoded: list[memoryview], rest: _Rest) -> dict[str, Any]:
    """Fields of an EncodedBatch whose images stay in the memory of the source."""
    views = tuple(np.frombuffer(data, dtype=np.uint8) for data in encoded)
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    return _fields(rest, data=nothing, offsets=torch.from_numpy(_offsets(encoded)), views=views)


def _offsets(encoded: list[memoryview]) -> NDArray[np.int64]:
    return np.cumsum([0, *map(len, encoded)], dtype=np.int64)


def _raised(data: bytes, text: str) -> BaseException:
    """The source's exception, with the worker's traceback as a note; RuntimeError if it cannot be pickled."""
    error: BaseException
    try:
        error = pickle.loads(data)
    except Exception:  # the constructor needs other arguments, or only the worker can import the class
        error = RuntimeError("the source raised an exception that cannot be pickled")
    error.add_note(f"raised in a reading worker:\n{text}")
    return error


def _may_pass(item: Any) -> bool:
    return isinstance(item, OSError) and not isinstance(item, FINAL) and item.errno not in FINAL_ERRNO


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


def _memory(size: int) -> Tensor:
    """Allocate uint8 [size]. A worker gets shared memory, which it can send without a copy."""
    if get_worker_info() is None:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    try:
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(torch.UntypedStorage._new_shared(size))
    except RuntimeError as error:
        raise ReadError(f"no shared memory for a batch of {size} bytes: {error}. {remedy(error)}") from error
