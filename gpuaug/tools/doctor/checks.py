"""Tests of what may crash, hang or lie on a machine, each in a process of its own.

A test is a name of :mod:`gpuaug.tools.doctor.probes`. It is good, or not: because the pixels are wrong, because it said
why, because the process crashed, or because it did not answer in time. Those of :data:`gpuaug.machine.VERDICTS` run
only once per machine and versions: their verdicts are kept as JSON in the cache folder.
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
FRESH = ("cuda", "header", "compiler", "workers")  # quick, or of things that change from day to day


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
    """Run tests one after the other; those whose verdicts are kept only once per machine and versions.

    Args:
        names: of :data:`gpuaug.machine.VERDICTS` and :data:`FRESH`.
        cuda: whether there is a CUDA device; without one its tests have no verdict.
        fresh: test again what is remembered.
        timeout: seconds for each test.
    """
    known = {} if fresh else load()
    found = []
    for name in names:
        if name in CUDA and not cuda:
            found.append(Verdict(name=name, good=None, text="not testable here: no CUDA device"))
        elif name in known:
            found.append(known[name])
        else:
            found.append(probe(name, timeout=timeout))
            if name in machine.VERDICTS and found[-1].good is not None:
                # a machine that was slow today is not broken for ever, nor is what was known before still sure
                keep(replace(found[-1], good=None) if is_late(found[-1]) else found[-1])
    return found


def probe(name: str, *, timeout: float = TIMEOUT, command: Sequence[str] | None = None) -> Verdict:
    """Run one test in a process of its own, and whatever comes of it is a verdict.

    Args:
        name: of the test.
        timeout: seconds until it is ended, with all its children.
        command: what to run instead of the test; its last line of output is the answer, as JSON.
    """
    # appended, not PYTHONPATH: this package's folder must not come before the standard library
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


def is_late(found: Verdict) -> bool:
    """Whether a test did not answer in time: the machine may be slow, not broken."""
    return found.good is False and found.text.startswith(LATE)


def _end(process: subprocess.Popen[str]) -> None:
    """End what is left of a test: it may have started processes that hold the device."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.poll() is None:
        process.kill()
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:  # in the driver, where no signal reaches it
            log.warning("process %d of a test cannot be ended", process.pid)


def _answer(out: str) -> dict[str, Any] | None:
    lines = out.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("text"), str):
        return None
    good = found.get("good")
    return found if good is None or isinstance(good, bool) else None
