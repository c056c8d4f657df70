"""Runs those parts of a command that may crash or hang, each in a child process."""

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

    status: int | None = None  # exit status; -n: killed by signal n; None: killed after the timeout
    answer: Any = None  # the last line of its stdout, read as JSON; None if this line is not JSON
    errors: str = ""  # its stderr


def run(
    command: Sequence[str], *, timeout: float, job: Any = None, environment: Mapping[str, str] | None = None
) -> Ended:
    """Run a process that gets ``job`` on stdin as JSON. Then kill the process and its children, if they still run."""
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
        # children may still use the device; the wait ends after 10 s, because a hang in the driver ignores SIGKILL
        with suppress(ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=10)
    with suppress(ValueError, IndexError):
        return Ended(process.returncode, json.loads(out.strip().splitlines()[-1]), errors)
    return Ended(process.returncode, None, errors)
