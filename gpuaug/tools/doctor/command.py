"""`gpuaug doctor`: checks whether this machine can run gpuaug, and gives advice.

The results of the tests in :data:`gpuaug.machine.VERDICTS` are stored until the machine or a package changes.
"""

from __future__ import annotations

import json
import logging
import math
import platform
import signal
import sys
import tempfile
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
NOT_AS_KORNIA = (
    "If a package cannot be imported, install it again. Otherwise set augment.backend=kornia, which is slower."
)
SLOW_MACHINE = "If the machine is just slow, raise `timeout`. If the test really hangs: "
TESTS = {  # test: title and status if it fails
    "decoder_cpu": ("DALI on the CPU", BROKEN),
    "decoder_mixed": ("DALI on the GPU", BROKEN),
    "hardware": ("JPEG engine", SLOW),
    "stream": ("stream order", BROKEN),
    "compiler": ("compiled on the CPU", SLOW),
    "fused_cuda": ("compiled on the GPU", SLOW),
}
REMEDIES = {  # finding: advice if it is a warning or BROKEN
    "DALI on the CPU": "Set decode.backend=pillow, or install another release of DALI.",
    "DALI on the GPU": "Set device=cpu or decode.backend=pillow, or install another NVIDIA driver or another "
    "release of DALI.",
    "JPEG engine": "Leave decode.hardware_load at 0.0, its default.",
    "stream order": "Batches may change while the model reads them. Set decode.backend=pillow or device=cpu.",
    "compiled on the CPU": "torch.compile also needs a C++ compiler: apt-get install g++, or conda install "
    "cxx-compiler.",
    "compiled on the GPU": "Set augment.backend=kornia. It needs no compiler, but is many times slower.",
    "start methods": "Set start_method to a method that works, or num_workers=0 to read in the training process.",
    "shared memory": "All processes share the list of a source's samples in /dev/shm. If /dev/shm is full, each worker "
    "has a copy, or cannot start. In Docker, start with --shm-size=1g or --ipc=host. In Kubernetes, mount an emptyDir "
    "of medium Memory.",
    "open files": "Workers, and batches on their way from them, are open files. A run with too many fails: `Too many "
    "open files`. Run `ulimit -n {files}` before you start the training.",
    "CPUs": "OpenMP counts all CPUs and ignores this limit. With too many threads, the kernel slows all threads down. "
    "Set decode.num_threads={threads} num_workers={workers} and OMP_NUM_THREADS={threads}.",
    "memory": "Little memory is left. If memory runs out, the kernel kills processes without a message, also workers. "
    "Lower num_workers, prefetch or batch_size, or give the container more memory.",
    "cache folder": "Nothing can be cached. Every run compiles the augmentations again, and `gpuaug doctor` repeats "
    "its tests. Set XDG_CACHE_HOME to a folder that can be written.",
}
# Limits, below which a finding is BROKEN (LEAST) or a warning (ENOUGH). Python with DALI and eight threads opens about
# 60 files, and each worker about six more. A source of a million files has about 50 MB in /dev/shm. Batches are not
# there, but in memory without a name (memfd).
FILES_LEAST, FILES_ENOUGH, FILES_ADVISED = 128, 1024, 65536
SHARED_LEAST, SHARED_ENOUGH = 2**20, 64 * 2**20
MEMORY_ENOUGH = 2 * 2**30


@dataclass(frozen=True, kw_only=True)
class Settings(Keys):
    """The keys of `gpuaug doctor`."""

    fresh: bool = False
    timeout: float = TIMEOUT

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number("timeout", self.timeout, 0.001, 86400.0)


def main(request: Request) -> int:
    """Print the findings. Returns 0 if gpuaug can be used here, 1 if something is broken."""
    settings = Settings(**request.settings())
    others = [text for _, text in request.others()]
    if others or request.config_name is not None:
        request.loader()  # a wrong argument raises an error, as in other commands
        ignored = ", ".join(others) or f"--config-name {request.config_name}"
        log.info("doctor tests the machine, not a configuration; these arguments are ignored: %s", ignored)
    report = Report(file=settings.json)
    cuda = probe("cuda", timeout=settings.timeout)
    findings = []
    for heading, part in {
        "versions": versions(),
        "devices": devices(cuda),
        "decoding and augmentation": decoding(settings, cuda=bool(cuda.good)),
        "workers and limits": workers(settings),
        "machine": [
            cpus(machine.cpus(), machine.cgroup_cpus()),
            memory(machine.memory(), machine.cgroup_memory()),
            cache_folder(),
        ],
    }.items():
        print(f"\n{heading}:", flush=True)
        for finding in part:
            findings.append(finding)
            print(finding, flush=True)
    broken, slow = ([f.name for f in findings if f.status == status] for status in (BROKEN, SLOW))
    if broken:
        print(f"\ngpuaug does not work reliably on this machine. Broken: {', '.join(broken)}. See the advice above.")
    else:
        better = f" Some things could be better (see the advice above): {', '.join(slow)}." if slow else ""
        print(f"\ngpuaug can be used here.{better}")
    report.values = {"findings": [vars(f) for f in findings], "usable": not broken}
    report.write()
    return 1 if broken else 0


def versions() -> Iterator[Finding]:
    python, version = platform.python_version(), machine.package_version("gpuaug")
    yield judged("python", python, value=python)
    yield judged("gpuaug", version or "not installed, imported from a folder", value=version)
    ranges = required_ranges()
    dali, codec = DALI[_dali_cuda()]
    for name, distribution, missing, why in (
        ("torch", "torch", BROKEN, "nothing works without it"),
        ("kornia", "kornia", BROKEN, "recipes are built from its operations"),
        ("hydra", "hydra-core", BROKEN, "the command line and gpuaug.compose need it"),
        ("pillow", "pillow", BROKEN, "it decodes the images that DALI cannot decode"),
        ("DALI", dali, SLOW, "without it, Pillow decodes on the CPU, several times slower"),
        ("nvImageCodec", codec, SLOW, "DALI needs it and normally installs it; without it, gpuaug decodes with Pillow"),
        ("triton", "triton", NOTE, "without it, operations on a GPU run one at a time, many times slower"),
    ):
        version, wanted = machine.package_version(distribution), ranges.get(distribution.replace("cuda130", "cuda120"))
        if version is None:
            yield judged(name, "not installed", missing, advice=f"{why}: pip install {distribution}")
            continue
        fits = wanted is None or wanted.contains(version, prereleases=True)
        advice = f"gpuaug supports {wanted}: pip install '{distribution}{wanted}'"
        yield judged(name, version, OK if fits else SLOW, advice=advice, value=version)


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
    status, advice = OK if driver else NOTE, "Everything runs on the CPU."
    yield judged("driver", driver or "no NVIDIA driver", status, advice=advice, value=value)
    for k, device in enumerate(cuda.value["devices"] if cuda.good else ()):
        text = f"{device['name']}, {format_bytes(device['memory'])}, compute capability {device['capability']}"
        yield judged(f"cuda:{k}", f"{text}; {cuda.text}", value=device)
    if not cuda.good:
        if not (driver or gpus):
            status, text, advice = NOTE, f"no CUDA device; {cuda.text}", ""
        elif cuda.value is None:
            status, text = BROKEN, f"{len(gpus)} devices, but the test that uses them failed: {cuda.text}"
            advice = "See nvidia-smi and the kernel's log (dmesg). Other processes may use the device, or the device "
            advice += "needs a reset. Until then, use gpuaug with device=cpu."
        else:
            status, text = SLOW, f"{len(gpus)} devices that torch cannot use: {cuda.text}"
            advice = "Training and decoding run on the CPU. Install the torch build for the driver's CUDA version "
            advice += "(https://pytorch.org/get-started/locally), or update the driver. Start containers with "
            advice += "--gpus all."
        yield judged("cuda", text, status, advice=advice, value=gpus)
    if (finding := dali_and_torch((cuda.value or {}).get("build"), driver)) is not None:
        yield finding


def dali_and_torch(torch_cuda: str | None, driver: str | None) -> Finding | None:
    """Compare the CUDA versions of DALI and torch. None if DALI is not installed, or torch has no CUDA."""
    dali_cuda = _dali_cuda()
    package = DALI[dali_cuda][0]
    if torch_cuda is None or machine.package_version(package) is None:
        return None
    major = int(torch_cuda.partition(".")[0])
    status, advice = OK, ""
    if dali_cuda == 13 and driver is not None and int(driver.partition(".")[0]) < DRIVER_OF_CUDA_13:
        status = SLOW
        advice = f"CUDA 13 needs driver {DRIVER_OF_CUDA_13} or newer: install {DALI[12][0]}, or update the driver."
    elif dali_cuda != major and major in DALI:
        status = NOTE
        advice = "Both use the same driver and should work together. To be sure, use DALI for torch's CUDA version: "
        advice += f"pip uninstall -y {package}; pip install '{DALI[major][0]}{required_ranges().get(DALI[12][0], '')}'"
    text = f"DALI for CUDA {dali_cuda}, torch for CUDA {torch_cuda}"
    value = {"dali": dali_cuda, "torch": torch_cuda, "driver": driver}
    return judged("DALI and torch", text, status, advice=advice, value=value)


def decoding(settings: Settings, *, cuda: bool) -> Iterator[Finding]:
    for name in tqdm([*filter(testable, TESTS)], desc="testing", leave=False, disable=None):
        yield tested(examine(name, cuda=cuda, fresh=settings.fresh, timeout=settings.timeout))


def testable(name: str) -> bool:
    """Whether the packages that a test needs are installed."""
    return name in ("compiler", "fused_cuda") or all(machine.package_version(p) is not None for p in DALI[_dali_cuda()])


def tested(verdict: Verdict) -> Finding:
    title, bad = TESTS[verdict.name]
    value = {"test": verdict.name} | {k: getattr(verdict, k) for k in ("good", "value", "seconds", "kept")}
    text = f"{verdict.text}{' (stored result; fresh=true tests again)' if verdict.kept else ''}"
    status, advice = UNTESTED if verdict.good is None else OK if verdict.good else bad, REMEDIES[title]
    if status == bad and verdict.name == "compiler" and not (verdict.late or verdict.value == UNCOMPILED):
        status, advice = BROKEN, NOT_AS_KORNIA
    return judged(title, text, status, advice=verdict.late * SLOW_MACHINE + advice, value=value)


def workers(settings: Settings) -> Iterator[Finding]:
    name, verdict = "start methods", probe("workers", timeout=settings.timeout)
    results = verdict.value or {}
    status = OK if verdict.good else SLOW if results.get(results.get("default")) else BROKEN
    advice = verdict.late * SLOW_MACHINE + REMEDIES[name]
    yield judged(name, verdict.text, status, advice=advice, value=verdict.value)
    yield shared_memory(machine.shared_memory())
    yield open_files(machine.limit("NOFILE"))


def shared_memory(sizes: tuple[int, int] | None) -> Finding:
    """Check /dev/shm. ``sizes``: (size, free) in bytes; None: no /dev/shm."""
    if sizes is None:
        return judged("shared memory", "no /dev/shm on this system", NOTE)
    size, free = sizes
    status = BROKEN if free < SHARED_LEAST else SLOW if free < SHARED_ENOUGH else OK
    text = f"/dev/shm of {format_bytes(size)}, {format_bytes(free)} free"
    return judged("shared memory", text, status, value=list(sizes))


def open_files(limits: tuple[int, int] | None) -> Finding:
    """Check the limit of open files. ``limits``: (soft, hard), -1: unlimited; None: the system has no limits."""
    if limits is None:
        return judged("open files", "no such limit on this system", NOTE)
    soft, hard = (math.inf if limit < 0 else limit for limit in limits)
    status = BROKEN if soft < FILES_LEAST else SLOW if soft < FILES_ENOUGH else OK
    text = f"{soft:.0f} per process, can be raised to {hard:.0f}".replace("inf", "unlimited")
    return judged("open files", text, status, value=list(limits), files=min(FILES_ADVISED, hard))


def cpus(count: int, quota: float | None) -> Finding:
    """Compare the number of CPUs with the limit of the cgroup, ``quota``; None: no limit."""
    text = f"{count} CPUs for this process ({machine.cpu_model()})"
    few = count if quota is None else min(count, quota)
    if few < count:
        text += f", but its control group (cgroup) limits it to the CPU time of {few:g} CPUs"
    status, value = SLOW if few < count else OK, {"cpus": count, "quota": quota}
    threads, workers = max(1, min(8, int(few))), max(1, min(4, int(few // 2)))
    return judged("CPUs", text, status, value=value, threads=threads, workers=workers)


def memory(sizes: tuple[int, int] | None, group: tuple[int, int] | None) -> Finding:
    """Check memory in bytes. ``sizes``: the machine's (total, available). ``group``: the cgroup's (limit, in use)."""
    if sizes is None:
        return judged("memory", "not known on this system", NOTE)
    total, left = sizes
    value = {"total": total, "available": left, "cgroup": None if group is None else list(group)}
    text = f"{format_bytes(total)}, {format_bytes(left)} available"
    if group is not None and group[0] < total:
        limit, used = group
        left = min(left, limit - used)
        text += f"; its control group (cgroup) allows {format_bytes(limit)}, {format_bytes(used)} in use"
    return judged("memory", text, SLOW if left < MEMORY_ENOUGH else OK, value=value)


def cache_folder() -> Finding:
    folder, name = files.cache_folder(), "cache folder"
    try:  # a check of permissions tells nothing if the user is root
        tempfile.TemporaryFile(dir=next(p for p in (folder, *folder.parents) if p.exists())).close()
    except OSError:
        return judged(name, f"{folder} cannot be written", SLOW, value=str(folder))
    return judged(name, str(folder), value=str(folder))


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


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check, as it is printed."""

    name: str
    status: str  # OK, NOTE, SLOW, BROKEN or UNTESTED
    text: str  # the result in words
    advice: str  # what to do; "": nothing
    value: Any  # the result, as JSON

    def __str__(self) -> str:
        lines = [folded(self.text, first=f"  {self.name:<19} {self.status:<9} ", indent=32)]
        if self.advice:
            lines.append(folded(self.advice, first=" " * 32, indent=32, width=118))
        return "\n".join(lines)


def judged(
    name: str, text: str, status: str = OK, *, advice: str | None = None, value: Any = None, **facts: object
) -> Finding:
    """A finding. If ``advice`` is None, SLOW and BROKEN get the remedy of ``name``. OK and UNTESTED get no advice."""
    if status in (OK, UNTESTED) or (advice is None and status == NOTE):
        advice = ""
    elif advice is None:
        advice = REMEDIES[name].format(**facts)
    return Finding(name=name, status=status, text=text, advice=advice, value=value)


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
