"""Ends threads and workers when their owner is freed or Python ends."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

_calls: dict[weakref.finalize[..., Any], None] = {}  # of `finalize`, not yet made, the oldest first


def finalize(owner: Any, function: Callable[..., None], *args: Any) -> weakref.finalize[..., Any]:
    """Call ``function(*args)`` when ``owner`` is freed or Python ends.

    A forked child does not call it. The threads and workers are the parent's, and locks that they held stay locked.
    """
    pid = os.getpid()

    def call() -> None:
        _calls.pop(made, None)
        if os.getpid() == pid:
            function(*args)

    made = weakref.finalize(owner, call)
    _calls[made] = None
    return made


def end_all() -> None:
    """Make all calls of :func:`finalize` now, the newest first."""
    for call in [*_calls][::-1]:
        try:
            call()
        except Exception:  # the others are still called, as in weakref's own function
            sys.excepthook(*sys.exc_info())
