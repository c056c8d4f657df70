"""`gpuaug doctor`: checks whether this machine can run gpuaug, and names one remedy for each finding.

The results of the tests in :data:`gpuaug.machine.VERDICTS` are stored until the machine or a package changes.
"""

from __future__ import annotations

import json
import logging
import platform
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from tqdm import tqdm

from gpuaug import checks, files, machine
from gpuaug.files import format_bytes
from gpuaug.tools import child
from gpuaug.tools.report import Report, folded
from gpuaug.tools.request import Keys, Request

log = logging.getLogger("gpuaug")

LATE = "did not answer within"
TIMEOUT = 180.0  # seconds; a first compilation takes up to a minute on slow machines
CUDA = ("decoder_mixed", "hardware", "stream", "fused_cuda")
OK, NOTE, SLOW, BROKEN, UNTESTED = "ok", "note", "warning", "BROKEN", "untested"
DALI = {  # CUDA version: packages
    12: ("nvidia-dali-cuda120", "nvidia-nvimgcodec-cu12"),
    13: ("nvidia-dali-cuda130", "nvidia-nvimgcodec-cu13"),
}
DRIVER_OF_CUDA_13 = 580  # the oldest driver that supports CUDA 13
UNCOMPILED = {"compiled": False}  # value of the test "compiler" if the augmentations work, but were not compiled
TESTS = {  # test: title, status if it fails, remedy
    "decoder_cpu": ("DALI on the CPU", BROKEN, "Set decode.backend=pillow."),
    "decoder_mixed": ("DALI on the GPU", BROKEN, "Set decode.backend=pillow."),
    "hardware": ("JPEG engine", SLOW, "Leave decode.hardware_load at 0.0, its default."),
    "stream": ("stream order", BROKEN, "Set decode.backend=pillow: batches may change while the model reads them."),
    "compiler": ("compiled on the CPU", SLOW, "Install a C++ compiler, such as apt-get install g++."),
    "fused_cuda": ("compiled on the GPU", SLOW, "Set augment.backend=kornia, which is many times slower."),
}
# Limits, below which a finding is BROKEN (LEAST) or a warning (ENOUGH). Python with DALI and eight threads opens about
# 60 files, and each worker about six more. A source of a million files has about 50 MB in /dev/shm. Batches are not
# there, but in memory without a name (memfd).
FILES_LEAST, FILES_ENOUGH, FILES_ADVISED = 128, 1024, 65536
SHARED_LEAST, SHARED_ENOUGH = 2**20, 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Settings(Keys):
    """The keys of `gpuaug doctor`."""

    fresh: bool = False
    timeout: float = TIMEOUT

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number("timeout", self.timeout, 0.001, 86400.0)


@dataclass(frozen=True)
class Finding:
    """The result of one check, as it is printed."""

    name: str
    text: str  # the result in words
    status: str = OK  # OK, NOTE, SLOW, BROKEN or UNTESTED
    advice: str = ""  # what to do
    value: Any = None  # the result, as JSON

    def __post_init__(self) -> None:
        if self.status in (OK, UNTESTED):
            object.__setattr__(self, "advice", "")

    def __str__(self) -> str:
        lines = [folded(self.text, first=f"  {self.name:<19} {self.status:<9} ", indent=32)]
        if self.advice:
            lines.append(folded(self.advice, first=" " * 32, indent=32, width=118))
        return "\n".join(lines)


def main(request: Request) -> int:
    """Print the findings. Returns 0 if gpuaug can be used here, 1 if something is broken."""
    settings = Settings(**request.settings())
    if others := [text for _, text in request.others()]:
        request.loader()  # a wrong argument raises an error, as in other commands
        log.info("doctor tests the machine, not a configuration; these arguments are ignored: %s", ", ".join(others))
    report = Report(file=settings.json)
    cuda = probe("cuda", timeout=settings.timeout)
    findings = []
    for heading, part in {
        "versions": versions(),
        "devices": devices(cuda),
        "decoding and augmentation": decoding(settings, cuda=bool(cuda.good)),
        "workers and limits": limits(settings),
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


def versions() -> Iterator[Finding]:
    yield Finding("python", platform.python_version(), value=platform.python_version())
    version = machine.package_version("gpuaug")
    yield Finding("gpuaug", version or "not installed, imported from a folder", value=version)
    ranges = required_ranges()
    dali, codec = DALI[_dali_cuda()]
    needed = {"torch": "torch", "kornia": "kornia", "hydra": "hydra-core", "pillow": "pillow"}
    for name, distribution in {**needed, "DALI": dali, "nvImageCodec": codec, "triton": "triton"}.items():
        version, wanted = machine.package_version(distribution), ranges.get(distribution.replace("cuda130", "cuda120"))
        if version is None:
            status = BROKEN if name in needed else NOTE if name == "triton" else SLOW
            yield Finding(name, "not installed", status, f"pip install {distribution}")
            continue
        fits = wanted is None or wanted.contains(version, prereleases=True)
        yield Finding(name, version, OK if fits else SLOW, f"pip install '{distribution}{wanted}'", version)


def _dali_cuda() -> int:
    return next((cuda for cuda, (package, _) in DALI.items() if machine.package_version(package) is not None), 12)


def required_ranges() -> dict[str, Any]:
    """Version ranges from gpuaug's package metadata, by package name."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in metadata.requires("gpuaug") or []]
    except metadata.PackageNotFoundError:
        return {}
    return {r.name.lower(): r.specifier for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})}


def devices(cuda: Verdict) -> Iterator[Finding]:
    """Check the driver and the devices. ``cuda`` is the result of the test "cuda"."""
    gpus, driver = machine.gpus(), machine.driver()
    value = {"driver": driver, "gpus": gpus}
    yield Finding("driver", driver or "no NVIDIA driver: everything runs on the CPU", OK if driver else NOTE, "", value)
    for k, device in enumerate(cuda.value["devices"] if cuda.good else ()):
        text = f"{device['name']}, {format_bytes(device['memory'])}, compute capability {device['capability']}"
        yield Finding(f"cuda:{k}", f"{text}; {cuda.text}", value=device)
    if not cuda.good:
        status, advice = NOTE, ""
        if (driver or gpus) and cuda.value is None:
            status, advice = BROKEN, "Set device=cpu, and look at nvidia-smi: the test of the devices failed."
        elif driver or gpus:
            status, advice = SLOW, "Install torch for the driver's CUDA: https://pytorch.org/get-started/locally."
        yield Finding("cuda", f"{len(gpus)} devices; {cuda.text}", status, advice, gpus)
    if (finding := dali_and_torch((cuda.value or {}).get("build"), driver)) is not None:
        yield finding


def dali_and_torch(torch_cuda: str | None, driver: str | None) -> Finding | None:
    """Compare the CUDA versions of DALI and torch. None if DALI is not installed, or torch has no CUDA."""
    dali_cuda = _dali_cuda()
    package = DALI[dali_cuda][0]
    if torch_cuda is None or machine.package_version(package) is None:
        return None
    major, status, other = int(torch_cuda.partition(".")[0]), OK, DALI[12][0]
    if dali_cuda == 13 and driver is not None and int(driver.partition(".")[0]) < DRIVER_OF_CUDA_13:
        status = SLOW  # CUDA 13 needs a newer driver
    elif dali_cuda != major and major in DALI:
        status, other = NOTE, DALI[major][0]  # both use the same driver and should work together
    advice = f"pip uninstall -y {package}; pip install '{other}{required_ranges().get(DALI[12][0], '')}'"
    value = {"dali": dali_cuda, "torch": torch_cuda, "driver": driver}
    return Finding("DALI and torch", f"DALI for CUDA {dali_cuda}, torch for CUDA {torch_cuda}", status, advice, value)


def decoding(settings: Settings, *, cuda: bool) -> Iterator[Finding]:
    for name in tqdm([*filter(testable, TESTS)], desc="testing", leave=False, disable=None):
        yield tested(examine(name, cuda=cuda, fresh=settings.fresh, timeout=settings.timeout))


def testable(name: str) -> bool:
    """Whether the packages that a test needs are installed."""
    return name in ("compiler", "fused_cuda") or all(machine.package_version(p) is not None for p in DALI[_dali_cuda()])


def tested(verdict: Verdict) -> Finding:
    title, bad, advice = TESTS[verdict.name]
    text = f"{verdict.text}{' (stored result; fresh=true tests again)' if verdict.kept else ''}"
    if verdict.name == "compiler" and not (verdict.late or verdict.value == UNCOMPILED):
        bad, advice = BROKEN, "Set augment.backend=kornia, which is slower."
    status = UNTESTED if verdict.good is None else OK if verdict.good else bad
    value = {"test": verdict.name} | {k: getattr(verdict, k) for k in ("good", "value", "seconds", "kept")}
    return Finding(
        title, text, status, "Raise `timeout`, if the machine is just slow." if verdict.late else advice, value
    )


def limits(settings: Settings) -> Iterator[Finding]:
    verdict = probe("workers", timeout=settings.timeout)
    results = verdict.value or {}
    status = OK if verdict.good else SLOW if results.get(results.get("default")) else BROKEN
    advice = "Set start_method to a method that works, or num_workers=0."
    yield Finding("start methods", verdict.text, status, advice, verdict.value)
    yield shared_memory(machine.shared_memory())
    yield open_files(machine.limit("NOFILE"))
    yield cpus(machine.cpus(), machine.cgroup_cpus())


def shared_memory(sizes: tuple[int, int] | None) -> Finding:
    """Check /dev/shm, which holds the list of samples. ``sizes``: (size, free) in bytes; None: no /dev/shm."""
    size, free = sizes or (0, SHARED_ENOUGH)
    status = NOTE if sizes is None else BROKEN if free < SHARED_LEAST else SLOW if free < SHARED_ENOUGH else OK
    text = "no /dev/shm on this system" if sizes is None else f"{format_bytes(free)} of {format_bytes(size)} free"
    advice = "" if sizes is None else "Start Docker with --shm-size=1g: workers copy their source, or cannot start."
    return Finding("shared memory", text, status, advice, sizes and list(sizes))


def open_files(limits: tuple[int, int] | None) -> Finding:
    """Check the limit of open files. ``limits``: (soft, hard), -1: unlimited; None: the system has no limits."""
    if limits is None:
        return Finding("open files", "no such limit on this system", NOTE)
    soft, hard = (sys.maxsize if limit < 0 else limit for limit in limits)
    status = BROKEN if soft < FILES_LEAST else SLOW if soft < FILES_ENOUGH else OK
    text = f"{soft} per process, can be raised to {hard}".replace(str(sys.maxsize), "unlimited")
    return Finding("open files", text, status, f"Run `ulimit -n {min(FILES_ADVISED, hard)}` first.", list(limits))


def cpus(count: int, quota: float | None) -> Finding:
    """Compare the number of CPUs with the limit of the cgroup, ``quota``; None: no limit. OpenMP ignores this limit."""
    few = count if quota is None else min(count, quota)
    text = f"{count} CPUs for this process ({machine.cpu_model()})" + f"; its cgroup allows {few:g}" * (few < count)
    threads, workers = max(1, min(8, int(few))), max(1, min(4, int(few // 2)))
    advice = f"Set decode.num_threads={threads} num_workers={workers} and OMP_NUM_THREADS={threads}."
    return Finding("CPUs", text, SLOW if few < count else OK, advice, {"cpus": count, "quota": quota})


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of one test."""

    name: str
    good: bool | None  # None: cannot be tested here
    text: str  # the result in words
    value: Any = None  # details, as JSON
    seconds: float = 0.0  # duration; 0.0: the test did not run
    kept: bool = False  # an earlier run stored this result

    @property
    def late(self) -> bool:
        """Whether the test timed out."""
        return self.good is False and self.text.startswith(LATE)


def keep(verdict: Verdict) -> None:
    """Store the result of a test. If ``verdict.good`` is None, delete the earlier result."""
    machine.verdicts.cache_clear()
    entry = {"good": verdict.good, "text": verdict.text, "seconds": verdict.seconds}
    entries = {**machine.verdicts(), verdict.name: entry}
    values = {"version": machine.VERDICTS_VERSION, "machine": machine.identity(), "verdicts": entries}
    try:
        file = machine.verdicts_file()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # private, because compiled code is there too
        files.write(file, json.dumps(values, indent=1) + "\n")
    except (OSError, RuntimeError) as error:
        log.info("the results of doctor could not be stored: %s", error)
    machine.verdicts.cache_clear()


def examine(name: str, *, cuda: bool, fresh: bool = False, timeout: float = TIMEOUT) -> Verdict:
    """The stored result of a test, or a new result. ``cuda``: whether a CUDA device works."""
    if name in CUDA and not cuda:
        return Verdict(name=name, good=None, text="not testable here: no CUDA device")
    machine.verdicts.cache_clear()
    if not fresh and name in machine.verdicts():
        return Verdict(name=name, kept=True, **machine.verdicts()[name])
    verdict = probe(name, timeout=timeout)
    if name in machine.VERDICTS and verdict.good is not None:
        # a timeout only deletes the stored result, because the machine may just be slow now
        keep(replace(verdict, good=None) if verdict.late else verdict)
    return verdict


def probe(name: str, *, timeout: float = TIMEOUT, command: Sequence[str] | None = None) -> Verdict:
    """Run one test, or a ``command``, in its own process, because a test may crash or hang."""
    # PYTHONPATH would put this folder before the standard library
    root = str(Path(__file__).parents[3])
    start = f"import sys; sys.path.append({root!r}); from gpuaug.tools.doctor.probes import main; main()"
    began = time.perf_counter()
    ended = child.run(command or (sys.executable, "-c", start, name), timeout=timeout)
    seconds = round(time.perf_counter() - began, 2)
    if ended.status is None:
        return Verdict(name=name, good=False, text=f"{LATE} {timeout:g} s and was killed", seconds=timeout)
    answer = ended.answer
    known = isinstance(answer, dict) and isinstance(answer.get("text"), str)
    if ended.status == 0 and known and isinstance(answer.get("good", ""), bool | None):
        return Verdict(name=name, seconds=seconds, **answer)
    if ended.status < 0:
        number = -ended.status
        named = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        text = f"crashed: killed by {named}{' (perhaps out of memory)' if number == signal.SIGKILL else ''}"
    else:
        lines = [line.strip() for line in ended.errors.splitlines() if line.strip()]
        text = f"failed with exit status {ended.status}: {lines[-1][:300] if lines else 'no output on stderr'}"
    return Verdict(name=name, good=False, text=text, seconds=seconds)
