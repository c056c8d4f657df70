"""Runs a part of a command in a child process, because the part may crash or hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple


class Ended(NamedTuple):
    """How a child process ended."""

    status: int | None = None  # exit status; -n: killed by signal n; None: timeout
    answer: Any = None  # the last line of stdout, read as JSON; None: not JSON
    errors: str = ""  # stderr


def run(
    command: Sequence[str], *, timeout: float, job: Any = None, environment: Mapping[str, str] | None = None
) -> Ended:
    """Run a process that gets ``job`` as JSON on stdin. At the end, kill the process and its children."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace", env=environment,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, errors = process.communicate(json.dumps(job), timeout=timeout)
    except subprocess.TimeoutExpired:
        return Ended()
    finally:
        # wait at most 10 s, because a process that hangs in a driver ignores SIGKILL
        with suppress(ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=10)
    with suppress(ValueError, IndexError):
        return Ended(process.returncode, json.loads(out.strip().splitlines()[-1]), errors)
    return Ended(process.returncode, None, errors)
