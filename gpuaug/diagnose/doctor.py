"""Tests of what may crash, hang or lie on a machine, each in a process of its own; and what they found, remembered.

A test is a name of :mod:`gpuaug.diagnose.probes`. It is good, or not: because the pixels are wrong, because it said
why, because the process crashed, or because it did not answer in time. What decoders do depends on processor,
devices, driver and versions, so those verdicts are kept as JSON in the user's cache folder under a name made of them,
and :func:`verdict`
tells them to whoever has to choose between a fast and a safe way. It only reads: it never starts a test.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from gpuaug import machine
from gpuaug.errors import ConfigError

log = logging.getLogger("gpuaug")

TIMEOUT = 180.0  # seconds; a first compilation takes up to a minute on slow machines
VERSION = 1  # of the cache file
# name: what a good verdict allows; those that need CUDA
KEPT = {
    "decoder_cpu": "DALI decodes on the CPU as Pillow does",
    "decoder_mixed": "DALI decodes on the GPU as the CPU does",
    "roi": "DALI decodes a part of an image on the GPU (ROI) as the CPU does",
    "hardware": "the GPU's JPEG engine decodes as the CPU does",
    "stream": "decoding keeps its order with a busy consumer's stream",
    "stream_hardware": "the same with the JPEG engine",
    "fused_cuda": "the compiled augmentations on the GPU equal Kornia's",
}
CUDA = ("decoder_mixed", "roi", "hardware", "stream", "stream_hardware", "fused_cuda")
FRESH = ("cuda", "header", "compiler", "workers")  # quick, or of things that change from day to day
PACKAGES = (
    "torch",
    "kornia",
    "nvidia-dali-cuda120",
    "nvidia-dali-cuda130",
    "nvidia-nvimgcodec-cu12",
    "nvidia-nvimgcodec-cu13",
    "hydra-core",
    "triton",
    "pillow",
    "numpy",
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a test found.

    Attributes:
        good: None where it cannot be tested here.
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


def verdict(name: str) -> bool | None:
    """What `gpuaug doctor` found on a machine like this with these versions; None where it was never asked.

    Reads one small file, once. Starts neither CUDA nor a test.

    Raises:
        ConfigError: if there is no test of that name.
    """
    if name not in KEPT:
        raise ConfigError(f"`{name}` is no test whose verdict is kept. Those are: {', '.join(KEPT)}.")
    found = _remembered().get(name)
    return None if found is None else found.good


def examine(names: Sequence[str], *, cuda: bool, fresh: bool = False, timeout: float = TIMEOUT) -> list[Verdict]:
    """Run tests one after the other; those whose verdicts are kept only once per machine and versions.

    Args:
        names: of :data:`KEPT` and :data:`FRESH`.
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
            if name in KEPT and found[-1].good is not None:
                keep(found[-1])
    return found


def probe(name: str, *, timeout: float = TIMEOUT, command: Sequence[str] | None = None) -> Verdict:
    """Run one test in a process of its own, and whatever comes of it is a verdict.

    Args:
        name: of the test.
        timeout: seconds until it is ended, with all its children.
        command: what to run instead of the test; its last line of output is the answer, as JSON.
    """
    # appended, not PYTHONPATH: this package's folder must not come before the standard library
    root = str(Path(__file__).parents[2])
    start = f"import sys; sys.path.append({root!r}); from gpuaug.diagnose.probes import main; main()"
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
        return Verdict(
            name=name, good=False, text=f"did not answer within {timeout:g} s and was ended", seconds=timeout
        )
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


# --- what is remembered


def here() -> dict[str, Any]:
    """What verdicts depend on: processor, devices, driver, versions. Machines that are alike share them."""
    models = machine.gpus()
    alike = len(set(models)) < 2
    return {
        "cpu": machine.cpu_model(),
        "gpus": sorted(set(models)) if alike else models,
        "visible": None if alike else os.environ.get("CUDA_VISIBLE_DEVICES"),
        "driver": machine.driver(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("gpuaug", *PACKAGES)},
    }


def version(package: str) -> str | None:
    """Version of an installed distribution."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cache_file() -> Path:
    """Where the verdicts of machines like this are kept."""
    text = json.dumps(here(), sort_keys=True)
    name = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    return folder() / f"doctor-{name}.json"


def folder() -> Path:
    """The user's cache folder, ``$XDG_CACHE_HOME/gpuaug``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpuaug"


def load() -> dict[str, Verdict]:
    """The verdicts that are remembered; whatever the file holds that is none is left out."""
    try:
        found = json.loads(cache_file().read_text(encoding="utf-8"))
        entries = found["verdicts"] if found["version"] == VERSION else {}
        return {
            name: Verdict(name=name, good=e["good"], text=str(e["text"]), seconds=float(e["seconds"]), kept=True)
            for name, e in entries.items()
            if name in KEPT and isinstance(e["good"], bool)
        }
    except FileNotFoundError:
        return {}
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.info("doctor's verdicts cannot be read and are left out: %s: %s", type(error).__name__, error)
        return {}


@lru_cache(maxsize=1)
def _remembered() -> dict[str, Verdict]:
    return load()


def keep(found: Verdict) -> None:
    """Remember a verdict, beside the others of this machine; in one step, so that readers see all or nothing."""
    known = {**load(), found.name: found}
    entries = {n: {"good": v.good, "text": v.text, "seconds": v.seconds} for n, v in known.items()}
    try:
        file = cache_file()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = file.with_name(f".{file.name}.{os.getpid()}.part")
        part.write_text(json.dumps({"version": VERSION, "machine": here(), "verdicts": entries}, indent=1) + "\n")
        os.replace(part, file)
    except (OSError, RuntimeError) as error:
        log.info("doctor's verdicts are not kept: %s", error)
    _remembered.cache_clear()
