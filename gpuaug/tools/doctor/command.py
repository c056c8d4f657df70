"""`gpuaug doctor`: checks whether this machine can run gpuaug, and names one remedy for each finding.

The results of the tests in :data:`gpuaug.machine.VERDICTS` are stored until the machine or a package changes.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import resource
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gpuaug import files, machine
from gpuaug.files import format_bytes
from gpuaug.tools import child
from gpuaug.tools.report import Report
from gpuaug.tools.request import Keys, Request

log = logging.getLogger("gpuaug")

TIMEOUT_S = 180.0  # of each test; a first compilation takes up to a minute on slow machines
OK, NOTE, SLOW, BROKEN, UNTESTED = "ok", "note", "warning", "BROKEN", "untested"
DALI = [("nvidia-dali-cuda120", "nvidia-nvimgcodec-cu12"), ("nvidia-dali-cuda130", "nvidia-nvimgcodec-cu13")]
UNCOMPILED = {"compiled": False}  # value of the test "compiler" if the augmentations work, but were not compiled
TESTS = {  # test: title, status if it fails, remedy
    "decoder_cpu": ("DALI on the CPU", BROKEN, "Set decode.backend=pillow."),
    "decoder_mixed": ("DALI on the GPU", BROKEN, "Set decode.backend=pillow."),
    "hardware": ("JPEG engine", SLOW, "Leave decode.hardware_load at 0.0, its default."),
    "stream": ("stream order", BROKEN, "Set decode.backend=pillow: batches may change while the model reads them."),
    "compiler": ("compiled on the CPU", SLOW, "Install a C++ compiler, such as apt-get install g++."),
    "fused_cuda": ("compiled on the GPU", SLOW, "Set augment.backend=kornia, which is many times slower."),
}
WITHOUT_DALI = ("compiler", "fused_cuda")
WITHOUT_CUDA = ("decoder_cpu", "compiler")
# Limits, below which a finding is BROKEN (LEAST) or a warning (ENOUGH). Python with DALI and eight threads opens about
# 60 files, and each worker about six more. A source of a million files has about 50 MB in /dev/shm. Batches are not
# there, but in memory without a name (memfd).
FILES_LEAST, FILES_ENOUGH, FILES_ADVISED = 128, 1024, 65536
SHARED_LEAST, SHARED_ENOUGH = 2**20, 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Settings(Keys):
    """The keys of `gpuaug doctor`."""

    fresh: bool = False


@dataclass
class Finding:
    """The result of one check, as it is printed."""

    name: str
    text: str  # the result in words
    status: str = OK  # OK, NOTE, SLOW, BROKEN or UNTESTED
    advice: str = ""  # what to do, unless the status is OK or UNTESTED

    def __post_init__(self) -> None:
        if self.status in (OK, UNTESTED):
            self.advice = ""

    def __str__(self) -> str:
        text = f"  {self.name:<22} {self.status:<9} {self.text}"
        return f"{text}\n{' ' * 35}{self.advice}" if self.advice else text


class Answer(NamedTuple):
    """The result of a test."""

    good: bool | None  # None: cannot be tested here
    text: str  # the result in words
    details: Any = None
    late: bool = False  # whether the test timed out


def main(request: Request) -> int:
    """Print the findings. Returns 0 if gpuaug can be used here, 1 if something is broken."""
    settings = Settings(**request.settings())
    if others := [text for _, text in request.others()]:
        request.loader()  # a wrong argument raises an error, as in other commands
        log.info("doctor tests the machine, not a configuration; these arguments are ignored: %s", ", ".join(others))
    report = Report(file=settings.json)
    cuda = probe("cuda")
    findings = []
    for heading, part in {
        "versions": versions(),
        "devices": devices(cuda),
        "decoding and augmentation": decoding(fresh=settings.fresh, cuda=bool(cuda.good)),
        "workers and limits": limits(),
    }.items():
        print(f"\n{heading}:", flush=True)
        for finding in part:
            findings.append(finding)
            print(finding, flush=True)
    broken = [f.name for f in findings if f.status == BROKEN]
    said = f"does not work reliably on this machine. Broken: {', '.join(broken)}" if broken else "can be used here"
    print(f"\ngpuaug {said}.")
    report.values = {"findings": [vars(f) for f in findings], "usable": not broken}
    report.write()
    return 1 if broken else 0


# -- versions and devices ---------------------------------------------------------------------------------------------


def versions() -> Iterator[Finding]:
    yield Finding("python", platform.python_version())
    yield Finding("gpuaug", machine.package_version("gpuaug") or "not installed, imported from a folder")
    missing = {**dict.fromkeys(dali(), SLOW), "triton": NOTE}
    for package in ("torch", "kornia", "hydra-core", "pillow", *missing):
        version = machine.package_version(package)
        status = OK if version else missing.get(package, BROKEN)
        yield Finding(package, version or "not installed", status, f"pip install {package}")


def dali() -> tuple[str, str]:
    """The names of DALI's packages, for the CUDA version that is installed."""
    return next((names for names in DALI if machine.package_version(names[0])), DALI[0])


def devices(cuda: Answer) -> Iterator[Finding]:
    """Check the driver and the devices. ``cuda`` is the result of the test "cuda"."""
    gpus, driver = machine.gpus(), machine.driver()
    yield Finding("driver", driver or "no NVIDIA driver: everything runs on the CPU", OK if driver else NOTE)
    for k, device in enumerate(cuda.details or ()):
        text = f"{device['name']}, {format_bytes(device['memory'])}, compute capability {device['capability']}"
        yield Finding(f"cuda:{k}", f"{text}; {cuda.text}")
    if not cuda.good:
        status, advice = SLOW, "Install torch for the driver's CUDA: https://pytorch.org/get-started/locally."
        if not (driver or gpus):
            status, advice = NOTE, ""
        elif cuda.details is None:
            status, advice = BROKEN, "Set device=cpu, and look at nvidia-smi: the test of the devices failed."
        yield Finding("cuda", f"{len(gpus)} devices; {cuda.text}", status, advice)


# -- limits -----------------------------------------------------------------------------------------------------------


def limits() -> Iterator[Finding]:
    good, text, default_works, _ = probe("workers")
    advice = "Set start_method to a method that works, or num_workers=0."
    yield Finding("start methods", text, OK if good else SLOW if default_works else BROKEN, advice)
    yield shared_memory(shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None)
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield cpus(machine.cpus(), machine.cgroup_cpus())


def shared_memory(sizes: tuple[int, int, int] | None) -> Finding:
    """Check /dev/shm, which holds the list of samples. ``sizes``: (size, used, free) in bytes; None: no /dev/shm."""
    if sizes is None:
        return Finding("shared memory", "no /dev/shm on this system", NOTE)
    size, _, free = sizes
    status = BROKEN if free < SHARED_LEAST else SLOW if free < SHARED_ENOUGH else OK
    advice = "Start Docker with --shm-size=1g: workers copy their source, or cannot start."
    return Finding("shared memory", f"{format_bytes(free)} of {format_bytes(size)} free", status, advice)


def open_files(soft: int, hard: int) -> Finding:
    """Check the limit of open files. Unlimited is -1 on Linux, and ``sys.maxsize`` on macOS."""
    soft, hard = (sys.maxsize if limit < 0 else limit for limit in (soft, hard))
    status = BROKEN if soft < FILES_LEAST else SLOW if soft < FILES_ENOUGH else OK
    text = f"{soft} per process, can be raised to {hard}".replace(str(sys.maxsize), "unlimited")
    return Finding("open files", text, status, f"Run `ulimit -n {min(FILES_ADVISED, hard)}` first.")


def cpus(count: int, quota: float | None) -> Finding:
    """Compare the number of CPUs with the limit of the cgroup, ``quota``; None: no limit. OpenMP ignores this limit."""
    few = count if quota is None else min(count, quota)
    text = f"{count} CPUs for this process ({machine.cpu_model()})" + f"; its cgroup allows {few:g}" * (few < count)
    threads, workers = max(1, min(8, int(few))), max(1, min(4, int(few // 2)))
    advice = f"Set decode.num_threads={threads} num_workers={workers} and OMP_NUM_THREADS={threads}."
    return Finding("CPUs", text, SLOW if few < count else OK, advice)


# -- tests that run in a process of their own -------------------------------------------------------------------------


def decoding(*, fresh: bool, cuda: bool) -> Iterator[Finding]:
    """Take the stored result of each test that can run here, or run it. ``cuda``: whether a CUDA device works."""
    has_dali = all(map(machine.package_version, dali()))
    for name in TESTS:
        if (has_dali or name in WITHOUT_DALI) and (cuda or name in WITHOUT_CUDA):
            yield tested(name, examine(name, fresh=fresh))


def tested(name: str, answer: Answer) -> Finding:
    title, bad, advice = TESTS[name]
    if name == "compiler" and answer.details != UNCOMPILED:
        bad, advice = BROKEN, "Set augment.backend=kornia, which is slower."
    return Finding(title, answer.text, UNTESTED if answer.good is None else OK if answer.good else bad, advice)


def examine(name: str, *, fresh: bool = False) -> Answer:
    """The stored result of a test, or a new result."""
    if not fresh and (stored := machine.verdicts().get(name)):
        return Answer(stored["good"], f"{stored['text']} (stored result; fresh=true tests again)")
    answer = probe(name)
    if name in machine.VERDICTS and answer.good is not None and not answer.late:  # the machine may just be slow now
        keep(name, answer)
    return answer


def keep(name: str, answer: Answer) -> None:
    """Store the result of a test."""
    entries = {**machine.verdicts(), name: {"good": answer.good, "text": answer.text}}
    values = {"version": machine.VERDICTS_VERSION, "machine": machine.identity(), "verdicts": entries}
    try:
        files.write(machine.verdicts_file(), json.dumps(values, indent=1) + "\n")
    except (OSError, RuntimeError) as error:
        log.info("the results of doctor could not be stored: %s", error)
    machine.verdicts.cache_clear()


def probe(name: str, *, command: Sequence[str] | None = None) -> Answer:
    """Run one test, or a ``command``, in its own process, because a test may crash or hang."""
    # PYTHONPATH would put this folder before the standard library
    root = str(Path(__file__).parents[3])
    start = f"import sys; sys.path.append({root!r}); from gpuaug.tools.doctor.probes import main; main()"
    ended = child.run(command or (sys.executable, "-c", start, name), timeout=TIMEOUT_S)
    if ended.status is None:
        return Answer(False, f"did not answer within {TIMEOUT_S:g} s and was killed", late=True)
    if ended.status == 0 and ended.answer is not None:
        return Answer(*ended.answer)
    if ended.status < 0:
        memory = " (perhaps out of memory)" if ended.status == -signal.SIGKILL else ""
        return Answer(False, f"crashed: killed by {signal.Signals(-ended.status).name}{memory}")
    lines = [line.strip() for line in ended.errors.splitlines() if line.strip()] or ["no output on stderr"]
    return Answer(False, f"failed with exit status {ended.status}: {lines[-1][:300]}")
