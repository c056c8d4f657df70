"""Handles samples that cannot be read or decoded."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from gpuaug import checks
from gpuaug.batch import Fault
from gpuaug.errors import ConfigError, DataError, FaultBudgetError
from gpuaug.files import LARGEST_FILE, check_regular

log = logging.getLogger("gpuaug")
Log = logging.Logger | logging.LoggerAdapter[logging.Logger]

Policy = Literal["raise", "blank", "drop"]


class Faults:
    """Decides what happens to bad samples, and lists them in a file.

    Args:
        policy: ``raise`` stops with a :class:`~gpuaug.errors.DataError`. ``blank`` sets the image to zero and
            ``batch.valid`` to False; the label and the batch size stay. ``drop`` removes the sample from the batch.
        max: maximum number of bad samples in the whole run. More raise :class:`~gpuaug.errors.FaultBudgetError`. None:
            no limit.
        truncated: ``reject`` treats a truncated JPEG as bad. ``accept`` uses the part that is present.
        file: path of a file to which each process appends one JSON line per bad sample, with the fields ``key``,
            ``index``, ``epoch``, ``stage``, ``reason``, ``bytes`` and ``head``. Ranks and runs may share the file.
            ``source.exclude`` accepts the file. If it can no longer be written, the log says so once, and the run goes
            on.

    >>> Faults(policy="blank", max=100).policy
    'blank'
    """

    def __init__(
        self,
        *,
        policy: Policy = "raise",
        max: int | None = None,
        truncated: Literal["reject", "accept"] = "reject",
        file: str | None = None,
    ) -> None:
        checks.one_of("faults.policy", policy, get_args(Policy))
        checks.whole_number("faults.max", max, 0, optional=True)
        checks.one_of("faults.truncated", truncated, ("reject", "accept"))
        self.truncated = truncated
        self.policy, self.max, self.file = policy, max, _writable(file)
        self.count = 0  # bad samples so far; a sample counts again in each epoch
        self._recorded: set[str] = set()  # keys that this process has logged, and written to the file
        self._incomplete = False  # a bad sample could not be written to the file
        self._by_epoch: Counter[int] = Counter()  # bad samples; a pass that was left keeps its count

    def handle(
        self, faults: Sequence[Fault], *, indices: Sequence[int], epoch: int, key_of: Callable[[int], str]
    ) -> None:
        """Record the ``faults`` of a batch in ``epoch``.

        ``indices`` are the sample numbers of the rows. ``key_of`` maps a sample number to a path or name.

        Raises:
            DataError: under policy ``raise``, for the first fault.
            FaultBudgetError: if the bad samples exceed ``max``.
        """
        self.count += len(faults)
        self._by_epoch[epoch] += len(faults)
        for fault in faults:
            self._record(fault, index=indices[fault.row], epoch=epoch, key_of=key_of)
        if faults and self.policy == "raise":
            index = indices[faults[0].row]
            raise DataError(key_of(index), index, faults[0].stage, faults[0].reason)
        if self.max is not None and self.count > self.max:
            where = f"They are listed in {self.file}." if self.file else "Set `faults.file` to list them."
            raise FaultBudgetError(
                f"{self.count} bad samples could not be read or decoded; `faults.max` allows {self.max}. {where} "
                "Then `source.exclude=FILE` leaves the listed samples out."
            )

    def end_of_epoch(self, epoch: int, *, log: Log = log) -> None:
        """Log how many samples of ``epoch`` were bad. ``log``: the logger."""
        if bad := self._by_epoch.pop(epoch, 0):
            where = f", listed in {self.file}" if self.file else ""
            log.warning("epoch %d: %d bad samples (policy %s)%s", epoch, bad, self.policy, where)

    def _record(self, fault: Fault, *, index: int, epoch: int, key_of: Callable[[int], str]) -> None:
        key = key_of(index)
        if key in self._recorded:
            return
        log.warning("sample %d (%r) failed in %s: %s", index, key, fault.stage, fault.reason)
        line = {"key": key, "index": index, "epoch": epoch, "stage": fault.stage, "reason": fault.reason}
        line |= {"bytes": fault.size, "head": fault.head.hex()}
        try:
            if self.file is not None:
                _append(self.file, json.dumps(line).encode())
            self._recorded.add(key)
        except OSError as error:  # for example, the disk is full: this must not end the run
            if not self._incomplete:
                log.warning("`faults.file` cannot be written (%s). Bad samples may be missing in it from now on", error)
            self._incomplete = True


def _append(path: str, line: bytes) -> None:
    """Append a whole line, or nothing. Raises OSError if it cannot be written."""
    with open(path, "a+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # other ranks may write; closing unlocks the file
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        begin = b"\n" if size and file.read() != b"\n" else b""  # a killed run leaves a part of a line
        text = begin + line + b"\n"
        if file.write(text) < len(text):
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def _writable(file: str | os.PathLike[str] | None) -> str | None:
    """Return the absolute path of the file. Raise ConfigError if the file is not writable."""
    if file is None:
        return None
    if not isinstance(file, str | os.PathLike) or not os.fspath(file):
        raise ConfigError(f"`faults.file` must be the path of a file. Found: {file!r}.")
    path = os.path.abspath(os.path.expanduser(os.fspath(file)))
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        is_new = not os.path.exists(path)
        if not is_new:
            check_regular(os.stat(path), path, limit=LARGEST_FILE)  # `source.exclude` will read it
        with open(path, "ab"):
            if is_new:
                os.unlink(path)  # the first bad sample creates the file
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise ConfigError(f"`faults.file` cannot be written: {error}. Name a file in a writable folder.") from error
    return path
