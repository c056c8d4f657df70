"""Runs each test of :mod:`gpuaug.tools.doctor.probes` in a process of its own, because tests may crash or hang.

A test fails if it says so, if its process crashes, or if it does not answer in time. Results of the tests in
:data:`gpuaug.machine.VERDICTS` are remembered for this machine and these versions.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuaug import files, machine
from gpuaug.tools.report import folded

log = logging.getLogger("gpuaug")

LATE = "did not answer within"
TIMEOUT = 180.0  # seconds; a first compilation takes up to a minute on slow machines
CUDA = ("decoder_mixed", "hardware", "stream", "fused_cuda")
FRESH = ("cuda", "compiler", "workers")  # never remembered: quick, or changing from day to day
OK, NOTE, SLOW, BROKEN, UNTESTED = "ok", "note", "warning", "BROKEN", "untested"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of one test."""

    name: str
    good: bool | None  # None where it cannot be tested here
    text: str  # what was seen
    value: Any = None  # more of it, as JSON
    seconds: float = 0.0  # how long it took; 0.0 where it was not run
    kept: bool = False  # whether it is remembered from an earlier run

    @property
    def late(self) -> bool:
        """Whether the test did not answer in time. The machine may only be slow."""
        return self.good is False and self.text.startswith(LATE)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was checked."""

    name: str
    status: str  # ok, note (worth knowing), warning (works, but worse than it could), BROKEN or untested
    text: str  # what was seen
    advice: str = ""  # what it means and what to do; "" where nothing has to be done
    value: Any = None  # what was seen, as JSON

    def __str__(self) -> str:
        lines = [folded(self.text, first=f"  {self.name:<19} {self.status:<9} ", indent=32)]
        if self.advice:
            lines.append(folded(self.advice, first=" " * 32, indent=32, width=118))
        return "\n".join(lines)


def judged(name: str, text: str, *, bad: str | None, advice: str, value: Any = None) -> Finding:
    """A finding of status ``bad`` with its advice; if ``bad`` is None, one that is ok and needs no advice."""
    return Finding(name=name, status=bad or OK, text=text, advice=advice if bad else "", value=value)


def keep(verdict: Verdict) -> None:
    """Remember a verdict for this machine; with ``good`` None an earlier one of its test is forgotten."""
    machine.verdicts.cache_clear()
    entry = {"good": verdict.good, "text": verdict.text, "seconds": verdict.seconds}
    entries = {**machine.verdicts(), verdict.name: entry}
    values = {"version": machine.VERDICTS_VERSION, "machine": machine.identity(), "verdicts": entries}
    try:
        file = machine.verdicts_file()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # compiled code is kept there too
        files.write(file, json.dumps(values, indent=1) + "\n")
    except (OSError, RuntimeError) as error:
        log.info("doctor's verdicts are not kept: %s", error)
    machine.verdicts.cache_clear()


def examine(name: str, *, cuda: bool, fresh: bool = False, timeout: float = TIMEOUT) -> Verdict:
    """The result of a test: remembered, or by running it now.

    Args:
        name: of the test.
        cuda: whether there is a CUDA device. Without one its tests are not run, and ``good`` is None.
        fresh: ignore the remembered result.
        timeout: seconds for the test.
    """
    if name in CUDA and not cuda:
        return Verdict(name=name, good=None, text="not testable here: no CUDA device")
    machine.verdicts.cache_clear()
    if not fresh and name in machine.verdicts():
        return Verdict(name=name, kept=True, **machine.verdicts()[name])
    verdict = probe(name, timeout=timeout)
    if name in machine.VERDICTS and verdict.good is not None:
        # a timeout says that the machine is slow today: forget the earlier result, and remember none
        keep(replace(verdict, good=None) if verdict.late else verdict)
    return verdict


def probe(name: str, *, timeout: float = TIMEOUT, command: Sequence[str] | None = None) -> Verdict:
    """Run one test in a process of its own. A crash or a timeout is a result like others.

    Args:
        name: name of the test.
        timeout: seconds after which the process and its children are killed.
        command: a command to run instead of the test. Its last line of output is the result, as JSON.
    """
    # appended to sys.path: PYTHONPATH would put this package's folder before the standard library
    root = str(Path(__file__).parents[3])
    start = f"import sys; sys.path.append({root!r}); from gpuaug.tools.doctor.probes import main; main()"
    began = time.perf_counter()
    process = subprocess.Popen(
        list(command or (sys.executable, "-c", start, name)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return Verdict(name=name, good=False, text=f"{LATE} {timeout:g} s and was ended", seconds=timeout)
    finally:  # the children may hold the device; a process that hangs in the driver gets no signal
        with contextlib.suppress(ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=10)
    seconds = round(time.perf_counter() - began, 2)
    if process.returncode == 0 and (answer := _answer(out)) is not None:
        return Verdict(name=name, good=answer["good"], text=answer["text"], value=answer.get("value"), seconds=seconds)
    if process.returncode < 0:
        number = -process.returncode
        named = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        text = f"crashed: killed by {named}{' (perhaps out of memory)' if number == signal.SIGKILL else ''}"
    else:
        last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), "it said nothing")
        text = f"failed with exit status {process.returncode}: {last[:300]}"
    return Verdict(name=name, good=False, text=text, seconds=seconds)


def _answer(out: str) -> dict[str, Any] | None:
    """The result in the last line of output; None if it is not one."""
    try:
        answer = json.loads(out.strip().splitlines()[-1])
        known = isinstance(answer["text"], str) and (answer["good"] is None or isinstance(answer["good"], bool))
    except (ValueError, LookupError, TypeError):
        return None
    return answer if known else None
