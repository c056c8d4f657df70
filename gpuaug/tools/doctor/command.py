"""`gpuaug doctor`: whether this machine is fit, what each finding means, and what to do about it."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import platform
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from tqdm import tqdm

from gpuaug import files, machine
from gpuaug.errors import ConfigError
from gpuaug.tools.doctor import checks as doctor
from gpuaug.tools.doctor.checks import Verdict
from gpuaug.tools.memory import gib
from gpuaug.tools.report import Report, check_text, folded
from gpuaug.tools.request import Request

log = logging.getLogger("gpuaug")

OK, NOTE, SLOW, BROKEN, UNTESTED = "ok", "note", "warning", "BROKEN", "untested"
MIB = 2**20
# What the machine should have. Files: torch passes every batch in flight between processes as one, and Python with DALI
# and eight threads opens some sixty. Shared memory: 64 photographs of 110 KB are a batch of 7 MB, of which each worker
# has two in flight.
FILES_LEAST, FILES_ENOUGH = 128, 1024
SHARED_LEAST, SHARED_ENOUGH = 16 * MIB, 512 * MIB
MEMORY_ENOUGH = 2 * 2**30
THREADS_ENOUGH = 512
DALI = ("nvidia-dali-cuda120", "nvidia-nvimgcodec-cu12")
DRIVER_OF_CUDA_13 = 580  # the oldest


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to test; the keys of ``conf/gpuaug/command/doctor.yaml``, which says what they mean."""

    fresh: bool = False
    timeout: float = doctor.TIMEOUT
    json: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.fresh, bool):
            raise ConfigError(f"`fresh` must be true or false. Found: {self.fresh!r}.")
        number = isinstance(self.timeout, int | float) and not isinstance(self.timeout, bool)
        if not number or not 0 < self.timeout < math.inf:
            raise ConfigError(f"`timeout` must be a number of seconds above 0. Found: {self.timeout!r}.")
        check_text(self, "json", optional=True)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what.
        status: one of ok, note (worth knowing), warning (works, but worse than it could), BROKEN, untested.
        text: what was found.
        advice: what it means and what to do; "" where nothing has to be done.
        value: what was found, as JSON.
    """

    name: str
    status: str
    text: str
    advice: str = ""
    value: Any = None


def main(request: Request) -> int:
    """Print the findings; 0 where gpuaug can be used here, 1 where something is broken."""
    settings = Settings(**request.settings())
    _say_what_has_no_effect(request)
    report = Report(file=settings.json)
    findings: list[Finding] = []
    for heading, part in (
        ("versions", versions()),
        ("devices", devices(settings)),
        ("decoding and augmentation", decoding(settings)),
        ("workers and limits", workers(settings)),
        ("machine", place()),
    ):
        print(f"\n{heading}:", flush=True)
        for finding in part:
            findings.append(finding)
            print(shown(finding), flush=True)
    report.values = {"findings": [vars(f) for f in findings], "usable": usable(findings)}
    print(f"\n{conclusion(findings)}", flush=True)
    report.write()
    return 0 if usable(findings) else 1


def usable(findings: list[Finding]) -> bool:
    """Whether nothing is broken."""
    return all(f.status != BROKEN for f in findings)


def conclusion(findings: list[Finding]) -> str:
    """The last line."""
    broken = [f.name for f in findings if f.status == BROKEN]
    slow = [f.name for f in findings if f.status == SLOW]
    if broken:
        return f"gpuaug cannot be relied on here. Broken: {', '.join(broken)}. What to do stands beside them."
    more = f" It could do better: {', '.join(slow)}." if slow else ""
    return f"gpuaug can be used here.{more}"


def shown(finding: Finding) -> str:
    """A finding as printed."""
    lines = [folded(finding.text, first=f"  {finding.name:<19} {finding.status:<9} ", indent=32)]
    if finding.advice:
        lines.append(folded(finding.advice, first=" " * 32, indent=32, width=118))
    return "\n".join(lines)


# --- versions


def versions() -> Iterator[Finding]:
    """Python, gpuaug, and what it needs, beside the ranges that it was made for."""
    found = platform.python_version()
    old = sys.version_info < (3, 11)
    yield Finding(
        name="python",
        status=BROKEN if old else OK,
        text=found,
        advice="gpuaug needs Python 3.11 or newer." if old else "",
        value=found,
    )
    needed = _needed()
    ours = machine.package_version("gpuaug")
    yield Finding(name="gpuaug", status=OK, text=ours or "not installed, imported from a folder", value=ours)
    for package, why in (
        ("torch", "nothing works without it"),
        ("kornia", "its operations are the recipes"),
        ("hydra-core", "the command line and gpuaug.compose need it"),
        ("pillow", "it decodes what DALI does not"),
        (_dali()[0], "decoding is left to Pillow, several times slower, and nothing is decoded on a GPU"),
        (_dali()[1], "it comes with DALI, which is not used without it"),
        ("triton", "on a GPU the augmentations run operation by operation, many times slower"),
    ):
        yield _version(package, why, needed.get(package.replace("cuda130", "cuda120")))


def _dali() -> tuple[str, str]:
    """DALI and nvImageCodec, for the CUDA that is installed: 12 where neither is."""
    cuda12, cuda13 = (machine.package_version(f"nvidia-dali-cuda{cuda}") for cuda in (120, 130))
    return ("nvidia-dali-cuda130", "nvidia-nvimgcodec-cu13") if cuda13 and not cuda12 else DALI


def _version(package: str, why: str, wanted: Any) -> Finding:
    found = machine.package_version(package)
    name = {_dali()[0]: "DALI", _dali()[1]: "nvImageCodec", "hydra-core": "hydra"}.get(package, package)
    optional = package.startswith("nvidia-") or package == "triton"
    if found is None:
        status = NOTE if package == "triton" else SLOW if optional else BROKEN
        return Finding(name=name, status=status, text="not installed", advice=f"{why}: pip install {package}")
    if wanted is not None and not wanted.contains(found, prereleases=True):
        advice = f"gpuaug was made for {wanted}: pip install '{package}{wanted}'"
        return Finding(name=name, status=SLOW, text=found, advice=advice, value=found)
    return Finding(name=name, status=OK, text=found, value=found)


def _needed() -> dict[str, Any]:
    """The ranges that gpuaug's own metadata ask for, by package."""
    from packaging.requirements import Requirement

    try:
        given = metadata.requires("gpuaug") or []
    except metadata.PackageNotFoundError:
        return {}
    found = [Requirement(text) for text in given]
    return {r.name.lower(): r.specifier for r in found if r.marker is None or r.marker.evaluate({"extra": ""})}


# --- devices


def devices(settings: Settings) -> Iterator[Finding]:
    """The driver, and what torch can use."""
    seen, driver = machine.gpus(), machine.driver()
    yield Finding(
        name="driver",
        status=OK if driver else NOTE,
        text=driver or "no NVIDIA driver",
        advice="" if driver else "Everything runs on the CPU.",
        value={"driver": driver, "gpus": seen},
    )
    found = _cuda(settings)
    if found.good:
        for k, device in enumerate(found.value["devices"]):
            memory = gib(device["memory"])
            text = f"{device['name']}, {memory}, compute capability {device['capability']}"
            yield Finding(name=f"cuda:{k}", status=OK, text=f"{text}; {found.text}", value=device)
    elif found.value is None and (driver or seen):
        yield Finding(
            name="cuda",
            status=BROKEN,
            text=f"{len(seen)} devices, and using them {found.text}",
            advice="Look at nvidia-smi and the kernel's log (dmesg): other processes may hold the device, or it needs "
            "a reset. With device=cpu gpuaug can be used meanwhile.",
            value=seen,
        )
    elif driver or seen:
        yield Finding(
            name="cuda",
            status=SLOW,
            text=f"{len(seen)} devices that torch cannot use: {found.text}",
            advice="Training and decoding run on the CPU. Install torch's build for the driver's CUDA "
            "(https://pytorch.org/get-started/locally), or update the driver; start a container with --gpus all.",
            value=seen,
        )
    else:
        yield Finding(name="cuda", status=NOTE, text=f"no CUDA device; {found.text}", value=[])
    if (pair := _pair((found.value or {}).get("build"), driver)) is not None:
        yield pair


def _pair(build: str | None, driver: str | None) -> Finding | None:
    """The CUDA of DALI beside torch's; None where one of them has none."""
    package = _dali()[0]
    found, theirs = machine.package_version(package), {DALI[0]: 12}.get(package, 13)
    if build is None or found is None:
        return None
    ours = int(build.partition(".")[0])
    other = {12: DALI[0], 13: "nvidia-dali-cuda130"}.get(ours)
    old = theirs == 13 and driver is not None and int(driver.partition(".")[0]) < DRIVER_OF_CUDA_13
    advice = ""
    if old:
        advice = f"CUDA 13 needs driver {DRIVER_OF_CUDA_13} or newer: take {DALI[0]}, or update the driver."
    elif theirs != ours and other is not None:
        advice = (
            f"They share one driver and should work together. To be sure, take torch's: pip uninstall -y {package}; "
        )
        advice += f"pip install '{other}{_needed().get(DALI[0], '')}'"
    return Finding(
        name="DALI and torch",
        status=SLOW if old else NOTE if advice else OK,
        text=f"DALI for CUDA {theirs}, torch for CUDA {build}",
        advice=advice,
        value={"dali": theirs, "torch": build, "driver": driver},
    )


_SEEN: dict[float, Verdict] = {}


def _cuda(settings: Settings) -> Verdict:
    if settings.timeout not in _SEEN:
        _SEEN[settings.timeout] = doctor.probe("cuda", timeout=settings.timeout)
    return _SEEN[settings.timeout]


# --- decoding and augmentation

# by test: what it is about, how bad it is where it fails, and what that means
TESTS = {
    "header": ("header parser", BROKEN, "Sizes of images cannot be relied on. Please report this, with json=FILE."),
    "decoder_cpu": ("DALI on the CPU", BROKEN, "Set decode.backend=pillow, or install another release of DALI."),
    "decoder_mixed": (
        "DALI on the GPU",
        BROKEN,
        "Set device=cpu or decode.backend=pillow, or install another driver or release of DALI.",
    ),
    "roi": ("ROI decode on GPU", NOTE, "Whole images are decoded on this GPU, not parts of them: safe, and slower."),
    "hardware": ("JPEG engine", SLOW, "Leave decode.hardware_load at 0.0, its default."),
    "stream": (
        "stream order",
        BROKEN,
        "Batches may change while the model reads them. Set decode.backend=pillow or device=cpu.",
    ),
    "stream_hardware": (
        "order, JPEG engine",
        SLOW,
        "Leave decode.hardware_load at 0.0: the engine writes while others read.",
    ),
    "compiler": ("compiled on the CPU", SLOW, "Augmentations on the CPU run uncompiled, many times slower."),
    "fused_cuda": (
        "compiled on the GPU",
        SLOW,
        "Set augment.backend=kornia, many times slower; or give Triton what it needs, above.",
    ),
}
MEANS = {
    "roi": "Reading only the crop of an image is safe on this GPU.",
    "stream_hardware": "Where the JPEG engine is ok too, decode.hardware_load may be raised above 0; pixels then "
    "depend on the batch by a level or so.",
}


def decoding(settings: Settings) -> Iterator[Finding]:
    """Compilers, then every test; the risky ones have kept verdicts."""
    yield from compilers(cuda=bool(_cuda(settings).good))
    names = [name for name in TESTS if _testable(name)]
    for name in tqdm(names, desc="testing", leave=False, disable=None):
        (found,) = doctor.examine(
            [name], cuda=bool(_cuda(settings).good), fresh=settings.fresh, timeout=settings.timeout
        )
        yield _tested(found)


def _testable(name: str) -> bool:
    """Whether what a test is about is there at all; its absence is told among the versions."""
    return all(machine.package_version(package) is not None for package in _dali()) or name in (
        "header",
        "compiler",
        "fused_cuda",
    )


def _tested(found: Verdict) -> Finding:
    name, bad, advice = TESTS[found.name]
    kept = " (remembered; fresh=true tests again)" if found.kept else ""
    value = {"test": found.name, "good": found.good, "value": found.value, "seconds": found.seconds, "kept": found.kept}
    if found.good is None:
        return Finding(name=name, status=UNTESTED, text=found.text, value=value)
    means = MEANS.get(found.name, "") if found.good else advice
    if doctor.is_late(found):
        means = f"Where this machine is only slow, raise `timeout`. Where the test hangs: {advice}"
    return Finding(name=name, status=OK if found.good else bad, text=found.text + kept, advice=means, value=value)


def compilers(*, cuda: bool) -> Iterator[Finding]:
    """The C++ compiler of the fused backend, and what torch.compile and Triton need beside it."""
    given = os.environ.get("CXX")
    names = given.split()[:1] if given else ["g++", "clang++", "c++"]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        wanted = f"CXX is {given!r}, which is not found" if given else "no g++, clang++ or c++ on PATH"
        yield Finding(
            name="C++ compiler",
            status=SLOW,
            text=wanted,
            advice="The fused backend then runs uncompiled on the CPU, many times slower; torch.compile not at all. "
            "Install g++ (apt-get install g++, or conda install cxx-compiler), or set CXX to a compiler.",
        )
    else:
        yield Finding(name="C++ compiler", status=OK, text=found, value=found)
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    c = next((path for name in (os.environ.get("CC") or "gcc", "clang", "cc") if (path := shutil.which(name))), None)
    missing = [what for what, there in (("a C compiler", c), (f"{header}", header.exists())) if not there]
    if missing:
        yield Finding(
            name="Triton's needs",
            status=SLOW if cuda else NOTE,
            text=f"missing: {' and '.join(missing)}",
            advice="Triton and torch.compile build small C extensions: on a GPU the compiled augmentations need both. "
            "Install gcc and Python's headers (apt-get install gcc python3-dev).",
            value=missing,
        )
    else:
        yield Finding(name="Triton's needs", status=OK, text=f"{c}, {header}")


# --- workers and limits


def workers(settings: Settings) -> Iterator[Finding]:
    """Start methods, shared memory, and the limits of this process."""
    found = doctor.probe("workers", timeout=settings.timeout)
    default = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    bad = BROKEN if not (found.value or {}).get(default) or "loader's workers" in found.text else SLOW
    yield Finding(
        name="start methods",
        status=OK if found.good else bad,
        text=found.text,
        advice=""
        if found.good
        else f"{'Where this machine is only slow, raise `timeout`. Else: ' if doctor.is_late(found) else ''}Set "
        "start_method to one that works, or num_workers=0 to read in the training's own process.",
        value=found.value,
    )
    yield shared_memory(machine.shared_memory())
    yield open_files(machine.limit("NOFILE"))
    yield processes(machine.limit("NPROC"))


def shared_memory(found: tuple[int, int] | None) -> Finding:
    """/dev/shm, through which batches travel from the workers.

    Args:
        found: (size, free) in bytes; None where there is none.
    """
    if found is None:
        return Finding(name="shared memory", status=NOTE, text="no /dev/shm on this system")
    size, free = found
    return _amount(
        "shared memory",
        found,
        free,
        least=SHARED_LEAST,
        enough=SHARED_ENOUGH,
        text=f"/dev/shm of {gib(size)}, {gib(free)} free",
        advice="Workers hand over batches there, and die of a bus error where it is full. In Docker start with "
        "--shm-size=8g or --ipc=host, in Kubernetes mount an emptyDir of medium Memory; else lower num_workers or "
        "batch_size, or read without workers: num_workers=0.",
    )


def open_files(found: tuple[int, int] | None) -> Finding:
    """The limit of open files: (soft, hard), -1 is unlimited; None where there is none."""
    return _limited(
        "open files",
        found,
        least=FILES_LEAST,
        enough=FILES_ENOUGH,
        text="per process",
        advice="Every batch on its way from a worker is an open file: `Too many open files` ends a run that has many. "
        "Before it: ulimit -n",
        most=65536,
    )


def processes(found: tuple[int, int] | None) -> Finding:
    """The limit of processes and threads of the user: (soft, hard), -1 is unlimited; None where there is none."""
    return _limited(
        "processes",
        found,
        enough=THREADS_ENOUGH,
        text="processes and threads of this user",
        advice="Each rank starts workers and some thirty threads, all of the user's processes together. Before a run: "
        "ulimit -u",
    )


def _limited(
    name: str,
    found: tuple[int, int] | None,
    *,
    least: int = 0,
    enough: int,
    text: str,
    advice: str,
    most: int | None = None,
) -> Finding:
    """A limit of this process; ``advice`` ends with the command that raises it, to ``most`` where that is allowed."""
    if found is None:
        return Finding(name=name, status=NOTE, text="no such limit on this system")
    soft, hard = (math.inf if limit < 0 else limit for limit in found)
    raised = hard if most is None else min(most, hard)
    return _amount(
        name,
        found,
        soft,
        least=least,
        enough=enough,
        text=f"{_limit(soft)} {text}, may be raised to {_limit(hard)}",
        advice=f"{advice} {_limit(raised)}",
    )


def _amount(
    name: str, value: tuple[int, int], amount: float, *, least: float, enough: float, text: str, advice: str
) -> Finding:
    """What there should be ``enough`` of, and must be the ``least``."""
    good = amount >= enough
    status = OK if good else BROKEN if amount < least else SLOW
    return Finding(name=name, status=status, text=text, advice="" if good else advice, value=list(value))


def _limit(value: float) -> str:
    return "unlimited" if value == math.inf else f"{value:.0f}"


# --- machine


def place() -> Iterator[Finding]:
    """CPUs, memory, control groups, NUMA nodes, and where things are kept."""
    yield cpus(machine.cpus(), machine.cgroup_cpus())
    yield memory(machine.memory(), machine.cgroup_memory())
    yield numa(machine.numa_nodes())
    folder = files.cache_folder()
    there = next(p for p in (folder, *folder.parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=there):  # rights say little: root has all, and /proc takes no file
            good = True
    except OSError:
        good = False
    yield Finding(
        name="cache folder",
        status=OK if good else SLOW,
        text=f"{folder}{'' if good else ' cannot be written'}",
        advice=""
        if good
        else "Compiled augmentations and these verdicts are made again every time. Set XDG_CACHE_HOME.",
        value=str(folder),
    )


def cpus(count: int, quota: float | None) -> Finding:
    """CPUs that may be used, and how much of their time.

    Args:
        count: CPUs of this process.
        quota: CPUs' worth of time that a control group allows; None: all.
    """
    text = f"{count} CPUs for this process ({machine.cpu_model()})"
    value = {"cpus": count, "quota": quota}
    if quota is None or quota >= count:
        return Finding(name="CPUs", status=OK, text=text, value=value)
    threads, ranks = max(1, min(8, int(quota))), max(1, min(4, int(quota // 2)))
    return Finding(
        name="CPUs",
        status=SLOW,
        text=f"{text}, of which a control group allows the time of {quota:g}",
        advice=f"Threads and workers are counted by CPUs, and too many of them are throttled together: set "
        f"decode.num_threads={threads} num_workers={ranks}, and OMP_NUM_THREADS={threads}.",
        value=value,
    )


def memory(found: tuple[int, int] | None, group: tuple[int, int] | None) -> Finding:
    """Memory of the machine and of the control group.

    Args:
        found: (total, available) in bytes; None where it is not known.
        group: (limit, in use) in bytes; None without a limit.
    """
    if found is None:
        return Finding(name="memory", status=NOTE, text="not known on this system")
    total, available = found
    text, left = f"{gib(total)}, {gib(available)} available", available
    if group is not None and group[0] < total:
        left = min(available, group[0] - group[1])
        text += (
            f"; a control group allows {gib(group[0])}, of which {gib(group[1])} are in use (files it read among them)"
        )
    few = left < MEMORY_ENOUGH
    return Finding(
        name="memory",
        status=SLOW if few else OK,
        text=text,
        advice="Little is left, and where it is full the kernel ends processes without a word, workers among them. "
        "Lower num_workers, prefetch or batch_size, or give the container more."
        if few
        else "",
        value={"total": total, "available": available, "cgroup": None if group is None else list(group)},
    )


def numa(nodes: dict[int, str]) -> Finding:
    """NUMA nodes.

    Args:
        nodes: CPUs of each, as text.
    """
    if len(nodes) < 2:
        return Finding(name="NUMA", status=OK, text=f"{len(nodes) or 1} node", value=nodes)
    listed = "; ".join(f"{node}: CPUs {text}" for node, text in nodes.items())
    mine = sum(bool(_cpus_of(text) & _affinity()) for text in nodes.values())
    return Finding(
        name="NUMA",
        status=NOTE if mine > 1 else OK,
        text=f"{len(nodes)} nodes ({listed})",
        advice="This process may run on several nodes, and memory of another one is slower. Bind each rank to the node "
        "of its GPU: numactl --cpunodebind=N --membind=N, or torchrun's --numa-binding=node. `nvidia-smi topo -m` "
        "shows which is near."
        if mine > 1
        else "",
        value=nodes,
    )


def _affinity() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _cpus_of(text: str) -> set[int]:
    """``0-3,8`` as numbers."""
    parts = [part.partition("-") for part in text.split(",") if part]
    return {k for first, dash, last in parts for k in range(int(first), int(last if dash else first) + 1)}


def _say_what_has_no_effect(request: Request) -> None:
    """The loader's overrides are checked as everywhere, and have nothing to say about a machine."""
    mine = set(request.settings())
    others = [text for text in request.overrides if re.split(r"[.=@]", text.lstrip("+~"))[0] not in mine]
    if others or request.config_name is not None:
        request.loader()
        log.info("doctor looks at the machine, not at a configuration: no effect of %s", ", ".join(others) or "it")
