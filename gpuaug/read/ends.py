"""Ends threads and workers when their owner is freed or Python ends."""

from __future__ import annotations

import itertools
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

_calls: dict[int, weakref.finalize[..., Any]] = {}  # of `finalize`, not yet made
_numbers = itertools.count()


def finalize(owner: Any, function: Callable[..., None], *args: Any) -> weakref.finalize[..., Any]:
    """Call ``function(*args)`` when ``owner`` is freed or Python ends.

    A forked child does not call it. The threads and workers are the parent's, and locks that they held stay locked.
    """
    pid, number = os.getpid(), next(_numbers)

    def call() -> None:
        _calls.pop(number, None)
        if os.getpid() == pid:
            function(*args)

    _calls[number] = made = weakref.finalize(owner, call)
    return made


def end_all() -> None:
    """Make all calls of :func:`finalize` now, the newest first."""
    for call in [*_calls.values()][::-1]:
        try:
            call()
        except Exception:  # the others are still called, as in weakref's own function
            sys.excepthook(*sys.exc_info())
