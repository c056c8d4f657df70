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

log = logging.getLogger("gpuaug")

LATE = "did not answer within"
TIMEOUT = 180.0  # seconds; a first compilation takes up to a minute on slow machines
CUDA = ("decoder_mixed", "roi", "hardware", "stream", "stream_hardware", "fused_cuda")
FRESH = ("cuda", "header", "compiler", "workers")  # never remembered: quick, or changing from day to day


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a check found.

    Attributes:
        good: None where it cannot be checked here.
        text: what was seen.
        value: more of it, as JSON.
        seconds: how long it took; 0.0 where it was not run.
        kept: whether it is remembered from an earlier run.
    """

    name: str
    good: bool | None
    text: str
    value: Any = None
    seconds: float = 0.0
    kept: bool = False


def load() -> dict[str, Verdict]:
    """The verdicts that are kept, read anew."""
    machine.verdicts.cache_clear()
    return {name: Verdict(name=name, kept=True, **entry) for name, entry in machine.verdicts().items()}


def keep(verdict: Verdict) -> None:
    """Keep a verdict beside the others of this machine; with ``good`` None an earlier one of its check is forgotten."""
    entry = {"good": verdict.good, "text": verdict.text, "seconds": verdict.seconds}
    machine.verdicts.cache_clear()
    entries = {**machine.verdicts(), verdict.name: entry}
    values = {"version": machine.VERDICTS_VERSION, "machine": machine.identity(), "verdicts": entries}
    try:
        file = machine.verdicts_file()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # compiled code is kept there too
        files.write(file, json.dumps(values, indent=1) + "\n")
    except (OSError, RuntimeError) as error:
        log.info("doctor's verdicts are not kept: %s", error)
    machine.verdicts.cache_clear()


def examine(names: Sequence[str], *, cuda: bool, fresh: bool = False, timeout: float = TIMEOUT) -> list[Verdict]:
    """Run tests one after the other, except those whose results are remembered.

    Args:
        names: of tests, from :data:`gpuaug.machine.VERDICTS` and :data:`FRESH`.
        cuda: whether there is a CUDA device. Without one its tests are not run, and ``good`` is None.
        fresh: ignore remembered results.
        timeout: seconds for each test.
    """
    known = {} if fresh else load()
    results = []
    for name in names:
        if name in CUDA and not cuda:
            results.append(Verdict(name=name, good=None, text="not testable here: no CUDA device"))
        elif name in known:
            results.append(known[name])
        else:
            results.append(probe(name, timeout=timeout))
            if name in machine.VERDICTS and results[-1].good is not None:
                # a timeout says that the machine is slow today: forget the earlier result, and remember none
                keep(replace(results[-1], good=None) if is_late(results[-1]) else results[-1])
    return results


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
    finally:
        _end(process)
    seconds = round(time.perf_counter() - began, 2)
    answer = _answer(out)
    if process.returncode == 0 and answer is not None:
        return Verdict(name=name, good=answer["good"], text=answer["text"], value=answer.get("value"), seconds=seconds)
    if process.returncode < 0:
        try:
            text = f"crashed: killed by {signal.Signals(-process.returncode).name}"
        except ValueError:
            text = f"crashed: killed by signal {-process.returncode}"
        if process.returncode == -signal.SIGKILL:
            text += " (perhaps for want of memory)"
    else:
        last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), "it said nothing")
        text = f"failed with exit status {process.returncode}: {last[:300]}"
    return Verdict(name=name, good=False, text=text, seconds=seconds)


def is_late(verdict: Verdict) -> bool:
    """Whether a test did not answer in time. The machine may only be slow."""
    return verdict.good is False and verdict.text.startswith(LATE)


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the test and its children, which may hold the device."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.poll() is None:
        process.kill()
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:  # it hangs in the driver, where no signal reaches it
            log.warning("process %d of a test cannot be killed", process.pid)


def _answer(out: str) -> dict[str, Any] | None:
    """The result in the last line of output; None if it is not one."""
    lines = out.strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    if not isinstance(answer, dict) or not isinstance(answer.get("text"), str):
        return None
    good = answer.get("good")
    return answer if good is None or isinstance(good, bool) else None
