"""`gpuaug doctor`: whether this machine is fit for gpuaug, what each finding means, and what to do about it.

Each test of :mod:`gpuaug.tools.doctor.probes` runs in a process of its own, because it may crash or hang. Results of
those in :data:`gpuaug.machine.VERDICTS` are remembered for this machine and these versions.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from tqdm import tqdm

from gpuaug import files, machine
from gpuaug.errors import ConfigError
from gpuaug.files import format_bytes
from gpuaug.tools.report import Report, folded
from gpuaug.tools.request import Keys, Request

log = logging.getLogger("gpuaug")

LATE = "did not answer within"
TIMEOUT = 180.0  # seconds; a first compilation takes up to a minute on slow machines
CUDA = ("decoder_mixed", "hardware", "stream", "fused_cuda")
FRESH = ("cuda", "compiler", "workers")  # never remembered: quick, or changing from day to day
OK, NOTE, SLOW, BROKEN, UNTESTED = "ok", "note", "warning", "BROKEN", "untested"
DALI = {  # distributions by version of CUDA
    12: ("nvidia-dali-cuda120", "nvidia-nvimgcodec-cu12"),
    13: ("nvidia-dali-cuda130", "nvidia-nvimgcodec-cu13"),
}
DRIVER_OF_CUDA_13 = 580  # the oldest
TESTS = {  # test: title, status and advice if it fails
    "decoder_cpu": ("DALI on the CPU", BROKEN, "Set decode.backend=pillow, or install another release of DALI."),
    "decoder_mixed": (
        "DALI on the GPU",
        BROKEN,
        "Set device=cpu or decode.backend=pillow, or install another driver or release of DALI.",
    ),
    "hardware": ("JPEG engine", SLOW, "Leave decode.hardware_load at 0.0, its default."),
    "stream": (
        "stream order",
        BROKEN,
        "Batches may change while the model reads them. Set decode.backend=pillow or device=cpu.",
    ),
    "compiler": (
        "compiled on the CPU",
        SLOW,
        "torch.compile needs a C++ compiler too: apt-get install g++, or conda install cxx-compiler.",
    ),
    "fused_cuda": ("compiled on the GPU", SLOW, "Set augment.backend=kornia, many times slower."),
}
WITHOUT_DALI = ("compiler", "fused_cuda")


@dataclass(frozen=True, kw_only=True)
class Settings(Keys):
    """What to test."""

    fresh: bool = False
    timeout: float = TIMEOUT

    def __post_init__(self) -> None:
        super().__post_init__()
        is_number = isinstance(self.timeout, int | float) and not isinstance(self.timeout, bool)
        if not is_number or not 0 < self.timeout < math.inf:
            raise ConfigError(f"`timeout` must be a number of seconds above 0. Found: {self.timeout!r}.")


def main(request: Request) -> int:
    """Print the findings. Returns 0 if gpuaug can be used here, 1 if something is broken."""
    settings = Settings(**request.settings())
    others = [text for _, text in request.others()]
    if others or request.config_name is not None:
        request.loader()  # checks them as other commands do
        log.info("doctor tests the machine, not a configuration: no effect of %s", ", ".join(others) or "it")
    report = Report(file=settings.json)
    cuda = probe("cuda", timeout=settings.timeout)
    findings = []
    for heading, part in {
        "versions": versions(),
        "devices": devices(cuda),
        "decoding and augmentation": decoding(settings, cuda=bool(cuda.good)),
        "workers and limits": workers(settings),
        "machine": limits(),
    }.items():
        print(f"\n{heading}:", flush=True)
        for finding in part:
            findings.append(finding)
            print(finding, flush=True)
    broken, slow = ([f.name for f in findings if f.status == status] for status in (BROKEN, SLOW))
    if broken:
        print(f"\ngpuaug cannot be relied on here. Broken: {', '.join(broken)}. See the advice above.")
    else:
        print("\ngpuaug can be used here." + (f" It could do better: {', '.join(slow)}." if slow else ""))
    report.values = {"findings": [vars(f) for f in findings], "usable": not broken}
    report.write()
    return 1 if broken else 0


def versions() -> Iterator[Finding]:
    """Versions of Python, gpuaug and what it needs, compared with the ranges that gpuaug was made for."""
    python = platform.python_version()
    bad = BROKEN if sys.version_info < (3, 11) else None
    yield judged("python", python, bad=bad, advice="gpuaug needs Python 3.11 or newer.", value=python)
    version = machine.package_version("gpuaug")
    yield Finding(name="gpuaug", status=OK, text=version or "not installed, imported from a folder", value=version)
    ranges = required_ranges()
    dali, codec = DALI[_dali_cuda()]
    for name, distribution, missing, why in (
        ("torch", "torch", BROKEN, "nothing works without it"),
        ("kornia", "kornia", BROKEN, "its operations are the recipes"),
        ("hydra", "hydra-core", BROKEN, "the command line and gpuaug.compose need it"),
        ("pillow", "pillow", BROKEN, "it decodes what DALI does not"),
        ("DALI", dali, SLOW, "Pillow decodes instead, several times slower, and nothing is decoded on a GPU"),
        ("nvImageCodec", codec, SLOW, "it comes with DALI, which is not used without it"),
        ("triton", "triton", NOTE, "on a GPU the augmentations run operation by operation, many times slower"),
    ):
        version = machine.package_version(distribution)
        wanted = ranges.get(distribution.replace("cuda130", "cuda120"))
        if version is None:
            advice = f"{why}: pip install {distribution}"
            yield Finding(name=name, status=missing, text="not installed", advice=advice)
        else:
            bad = SLOW if wanted is not None and not wanted.contains(version, prereleases=True) else None
            advice = f"gpuaug was made for {wanted}: pip install '{distribution}{wanted}'"
            yield judged(name, version, bad=bad, advice=advice, value=version)


def _dali_cuda() -> int:
    """The version of CUDA of the installed DALI; 12 if none is installed."""
    installed = [cuda for cuda, (package, _) in DALI.items() if machine.package_version(package) is not None]
    return installed[0] if installed else 12


def required_ranges() -> dict[str, Any]:
    """Versions that gpuaug's metadata require, by distribution."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in metadata.requires("gpuaug") or []]
    except metadata.PackageNotFoundError:
        return {}
    return {r.name.lower(): r.specifier for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})}


def devices(cuda: Verdict) -> Iterator[Finding]:
    """The driver, and what torch can use, by the result of the test ``cuda``."""
    gpus, driver = machine.gpus(), machine.driver()
    value = {"driver": driver, "gpus": gpus}
    bad = None if driver else NOTE
    yield judged("driver", driver or "no NVIDIA driver", bad=bad, advice="Everything runs on the CPU.", value=value)
    if cuda.good:
        for k, device in enumerate(cuda.value["devices"]):
            text = f"{device['name']}, {format_bytes(device['memory'])}, compute capability {device['capability']}"
            yield Finding(name=f"cuda:{k}", status=OK, text=f"{text}; {cuda.text}", value=device)
    elif not (driver or gpus):
        yield Finding(name="cuda", status=NOTE, text=f"no CUDA device; {cuda.text}", value=[])
    elif cuda.value is None:
        text = f"{len(gpus)} devices, and using them {cuda.text}"
        advice = "See nvidia-smi and the kernel's log (dmesg): other processes may use the device, or it "
        advice += "needs a reset. With device=cpu gpuaug can be used meanwhile."
        yield Finding(name="cuda", status=BROKEN, text=text, advice=advice, value=gpus)
    else:
        text = f"{len(gpus)} devices that torch cannot use: {cuda.text}"
        advice = "Training and decoding run on the CPU. Install torch's build for the driver's CUDA "
        advice += "(https://pytorch.org/get-started/locally), or update the driver; start a container with --gpus all."
        yield Finding(name="cuda", status=SLOW, text=text, advice=advice, value=gpus)
    if (finding := dali_and_torch((cuda.value or {}).get("build"), driver)) is not None:
        yield finding


def dali_and_torch(torch_cuda: str | None, driver: str | None) -> Finding | None:
    """Compare the versions of CUDA of DALI and torch; None if one of them has none."""
    dali_cuda = _dali_cuda()
    package = DALI[dali_cuda][0]
    if torch_cuda is None or machine.package_version(package) is None:
        return None
    major = int(torch_cuda.partition(".")[0])
    bad, advice = None, ""
    if dali_cuda == 13 and driver is not None and int(driver.partition(".")[0]) < DRIVER_OF_CUDA_13:
        bad = SLOW
        advice = f"CUDA 13 needs driver {DRIVER_OF_CUDA_13} or newer: take {DALI[12][0]}, or update the driver."
    elif dali_cuda != major and major in DALI:
        bad = NOTE
        advice = "They share one driver and should work together. To be sure, install that of torch's CUDA: pip "
        advice += f"uninstall -y {package}; pip install '{DALI[major][0]}{required_ranges().get(DALI[12][0], '')}'"
    text = f"DALI for CUDA {dali_cuda}, torch for CUDA {torch_cuda}"
    value = {"dali": dali_cuda, "torch": torch_cuda, "driver": driver}
    return judged("DALI and torch", text, bad=bad, advice=advice, value=value)


def decoding(settings: Settings, *, cuda: bool) -> Iterator[Finding]:
    """Every test whose packages are installed. Missing ones are reported with the versions."""
    for name in tqdm([*filter(testable, TESTS)], desc="testing", leave=False, disable=None):
        yield tested(examine(name, cuda=cuda, fresh=settings.fresh, timeout=settings.timeout))


def testable(name: str) -> bool:
    """Whether the packages of a test are installed."""
    return name in WITHOUT_DALI or all(machine.package_version(p) is not None for p in DALI[_dali_cuda()])


def tested(verdict: Verdict) -> Finding:
    """The finding of a test."""
    title, bad, advice = TESTS[verdict.name]
    value = {"test": verdict.name} | {k: getattr(verdict, k) for k in ("good", "value", "seconds", "kept")}
    if verdict.good is None:
        return Finding(name=title, status=UNTESTED, text=verdict.text, value=value)
    if verdict.late:
        advice = f"Where this machine is only slow, raise `timeout`. Where the test hangs: {advice}"
    text = f"{verdict.text}{' (remembered; fresh=true tests again)' if verdict.kept else ''}"
    return judged(title, text, bad=None if verdict.good else bad, advice=advice, value=value)


def workers(settings: Settings) -> Iterator[Finding]:
    """The loader's workers by every start method, shared memory, open files."""
    verdict = probe("workers", timeout=settings.timeout)
    results = verdict.value or {}
    late = "Where this machine is only slow, raise `timeout`. Else: " if verdict.late else ""
    yield judged(
        "start methods",
        verdict.text,
        bad=None if verdict.good else SLOW if results.get(results.get("default")) else BROKEN,
        advice=f"{late}Set start_method to one that works, or num_workers=0 to read in the training's own process.",
        value=verdict.value,
    )
    yield shared_memory(machine.shared_memory())
    yield open_files(machine.limit("NOFILE"))


def limits() -> Iterator[Finding]:
    """CPUs, memory, control groups, and the cache folder."""
    yield cpus(machine.cpus(), machine.cgroup_cpus())
    yield memory(machine.memory(), machine.cgroup_memory())
    yield cache_folder()


# What the machine should have. Files: torch passes every batch in flight between processes as one, and Python with DALI
# and eight threads opens some sixty. Shared memory: 64 photographs of 110 KB are a batch of 7 MB, of which each worker
# has two in flight.
FILES_LEAST, FILES_ENOUGH, FILES_ADVISED = 128, 1024, 65536
SHARED_LEAST, SHARED_ENOUGH = 16 * 2**20, 512 * 2**20
MEMORY_ENOUGH = 2 * 2**30


def shared_memory(sizes: tuple[int, int] | None) -> Finding:
    """/dev/shm, through which workers pass batches: (size, free) in bytes; None if there is none."""
    if sizes is None:
        return Finding(name="shared memory", status=NOTE, text="no /dev/shm on this system")
    size, free = sizes
    return judged(
        "shared memory",
        f"/dev/shm of {format_bytes(size)}, {format_bytes(free)} free",
        bad=BROKEN if free < SHARED_LEAST else SLOW if free < SHARED_ENOUGH else None,
        advice="Workers hand over batches there, and die of a bus error where it is full. In Docker start with "
        "--shm-size=8g or --ipc=host, in Kubernetes mount an emptyDir of medium Memory; else lower num_workers or "
        "batch_size, or read without workers: num_workers=0.",
        value=list(sizes),
    )


def open_files(limits: tuple[int, int] | None) -> Finding:
    """The limit of open files: (soft, hard), -1 is unlimited; None if there is none."""
    if limits is None:
        return Finding(name="open files", status=NOTE, text="no such limit on this system")
    soft, hard = (math.inf if limit < 0 else limit for limit in limits)
    return judged(
        "open files",
        f"{soft:.0f} per process, may be raised to {hard:.0f}".replace("inf", "unlimited"),
        bad=BROKEN if soft < FILES_LEAST else SLOW if soft < FILES_ENOUGH else None,
        advice="Every batch on its way from a worker is an open file: `Too many open files` ends a run that has many. "
        f"Before it: ulimit -n {min(FILES_ADVISED, hard)}",
        value=list(limits),
    )


def cpus(count: int, quota: float | None) -> Finding:
    """CPUs of this process, and the number of CPUs whose time a control group allows it; None: all."""
    text = f"{count} CPUs for this process ({machine.cpu_model()})"
    few = count if quota is None else min(count, quota)
    if few < count:
        text += f", of which a control group allows the time of {few:g}"
    threads, workers = max(1, min(8, int(few))), max(1, min(4, int(few // 2)))
    return judged(
        "CPUs",
        text,
        bad=SLOW if few < count else None,
        advice="Threads and workers are counted by CPUs, and too many of them are throttled together: set "
        f"decode.num_threads={threads} num_workers={workers}, and OMP_NUM_THREADS={threads}.",
        value={"cpus": count, "quota": quota},
    )


def memory(sizes: tuple[int, int] | None, group: tuple[int, int] | None) -> Finding:
    """Memory of the machine, (total, available) in bytes, and of the control group, (limit, in use)."""
    if sizes is None:
        return Finding(name="memory", status=NOTE, text="not known on this system")
    total, left = sizes
    text = f"{format_bytes(total)}, {format_bytes(left)} available"
    if group is not None and group[0] < total:
        limit, used = group
        left = min(left, limit - used)
        text += f"; a control group allows {format_bytes(limit)}, of which {format_bytes(used)} are in use"
    return judged(
        "memory",
        text,
        bad=SLOW if left < MEMORY_ENOUGH else None,
        advice="Little is left, and where it is full the kernel ends processes without a word, workers among them. "
        "Lower num_workers, prefetch or batch_size, or give the container more.",
        value={"total": total, "available": sizes[1], "cgroup": None if group is None else list(group)},
    )


def cache_folder() -> Finding:
    """Whether the cache folder can be written."""
    folder = files.cache_folder()
    nearest = next(p for p in (folder, *folder.parents) if p.exists())
    bad = None
    try:
        with tempfile.TemporaryFile(dir=nearest):  # permissions say little: root has all, and /proc takes no file
            pass
    except OSError:
        bad = SLOW
    return judged(
        "cache folder",
        f"{folder} cannot be written" if bad else str(folder),
        bad=bad,
        advice="Compiled augmentations and these verdicts are made again every time. Set XDG_CACHE_HOME.",
        value=str(folder),
    )


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
    """The result of a test: remembered unless ``fresh``, or by running it now. ``cuda``: whether there is a device."""
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
    """Run one test, or a ``command``, in a process of its own. A crash or a timeout is a result like others.

    The last line of its output is the result, as JSON. After ``timeout`` seconds it is killed with its children.
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
