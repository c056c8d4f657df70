"""`gpuaug doctor`: whether this machine is fit for gpuaug, what each finding means, and what to do about it."""

from __future__ import annotations

import logging
import math
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from tqdm import tqdm

from gpuaug import checks, machine
from gpuaug.errors import ConfigError
from gpuaug.files import format_bytes
from gpuaug.tools.doctor import checks as doctor
from gpuaug.tools.doctor import host
from gpuaug.tools.doctor.checks import BROKEN, NOTE, OK, SLOW, UNTESTED, Finding, Verdict, judged
from gpuaug.tools.report import Report
from gpuaug.tools.request import Request

log = logging.getLogger("gpuaug")

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
class Settings:
    """What to test; the keys of ``conf/gpuaug/command/doctor.yaml``, which says what they mean."""

    fresh: bool = False
    timeout: float = doctor.TIMEOUT
    json: str | None = None

    def __post_init__(self) -> None:
        checks.flag("fresh", self.fresh)
        is_number = isinstance(self.timeout, int | float) and not isinstance(self.timeout, bool)
        if not is_number or not 0 < self.timeout < math.inf:
            raise ConfigError(f"`timeout` must be a number of seconds above 0. Found: {self.timeout!r}.")
        checks.text("json", self.json, optional=True)


def main(request: Request) -> int:
    """Print the findings. Returns 0 if gpuaug can be used here, 1 if something is broken."""
    settings = Settings(**request.settings())
    others = [text for _, text in request.others()]
    if others or request.config_name is not None:
        request.loader()  # checks them as other commands do
        log.info("doctor tests the machine, not a configuration: no effect of %s", ", ".join(others) or "it")
    report = Report(file=settings.json)
    cuda = doctor.probe("cuda", timeout=settings.timeout)
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
        yield tested(doctor.examine(name, cuda=cuda, fresh=settings.fresh, timeout=settings.timeout))


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
    verdict = doctor.probe("workers", timeout=settings.timeout)
    results = verdict.value or {}
    late = "Where this machine is only slow, raise `timeout`. Else: " if verdict.late else ""
    yield judged(
        "start methods",
        verdict.text,
        bad=None if verdict.good else SLOW if results.get(results.get("default")) else BROKEN,
        advice=f"{late}Set start_method to one that works, or num_workers=0 to read in the training's own process.",
        value=verdict.value,
    )
    yield host.shared_memory(machine.shared_memory())
    yield host.open_files(machine.limit("NOFILE"))


def limits() -> Iterator[Finding]:
    """CPUs, memory, control groups, and the cache folder."""
    yield host.cpus(machine.cpus(), machine.cgroup_cpus())
    yield host.memory(machine.memory(), machine.cgroup_memory())
    yield host.cache_folder()
