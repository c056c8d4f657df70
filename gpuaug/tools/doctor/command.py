"""`gpuaug doctor`: whether this machine is fit for gpuaug, what each finding means, and what to do about it."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from gpuaug import checks, machine
from gpuaug.errors import ConfigError
from gpuaug.files import format_bytes
from gpuaug.tools.doctor import checks as doctor
from gpuaug.tools.doctor import host
from gpuaug.tools.doctor.checks import Verdict
from gpuaug.tools.doctor.findings import (
    BROKEN,
    NOTE,
    OK,
    SLOW,
    UNTESTED,
    Finding,
    conclusion,
    judged,
    shown,
    usable,
)
from gpuaug.tools.report import Report
from gpuaug.tools.request import Request

log = logging.getLogger("gpuaug")

DALI = {  # distributions by version of CUDA
    12: ("nvidia-dali-cuda120", "nvidia-nvimgcodec-cu12"),
    13: ("nvidia-dali-cuda130", "nvidia-nvimgcodec-cu13"),
}
DRIVER_OF_CUDA_13 = 580  # the oldest


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
    _log_overrides_without_effect(request)
    report = Report(file=settings.json)
    findings: list[Finding] = []

    def show(heading: str, part: Iterable[Finding]) -> None:
        print(f"\n{heading}:", flush=True)
        for finding in part:
            findings.append(finding)
            print(shown(finding), flush=True)

    show("versions", versions())
    cuda = doctor.probe("cuda", timeout=settings.timeout)
    show("devices", devices(cuda))
    show("decoding and augmentation", decoding(settings, cuda=bool(cuda.good)))
    show("workers and limits", workers(settings))
    show("machine", host.place())
    report.values = {"findings": [vars(f) for f in findings], "usable": usable(findings)}
    print(f"\n{conclusion(findings)}", flush=True)
    report.write()
    return 0 if usable(findings) else 1


# --- versions


class Package(NamedTuple):
    """A distribution that gpuaug needs or can use."""

    name: str
    distribution: str
    missing: str  # status if it is not installed
    why: str


def packages() -> list[Package]:
    """The distributions to check. DALI's depend on the version of CUDA that is installed."""
    dali, codec = DALI[_dali_cuda()]
    return [
        Package("torch", "torch", BROKEN, "nothing works without it"),
        Package("kornia", "kornia", BROKEN, "its operations are the recipes"),
        Package("hydra", "hydra-core", BROKEN, "the command line and gpuaug.compose need it"),
        Package("pillow", "pillow", BROKEN, "it decodes what DALI does not"),
        Package("DALI", dali, SLOW, "Pillow decodes instead, several times slower, and nothing is decoded on a GPU"),
        Package("nvImageCodec", codec, SLOW, "it comes with DALI, which is not used without it"),
        Package("triton", "triton", NOTE, "on a GPU the augmentations run operation by operation, many times slower"),
    ]


def versions() -> Iterator[Finding]:
    """Versions of Python, gpuaug and what it needs, compared with the ranges that gpuaug was made for."""
    python = platform.python_version()
    bad = BROKEN if sys.version_info < (3, 11) else None
    yield judged("python", python, bad=bad, advice="gpuaug needs Python 3.11 or newer.", value=python)
    version = machine.package_version("gpuaug")
    yield Finding(name="gpuaug", status=OK, text=version or "not installed, imported from a folder", value=version)
    ranges = required_ranges()
    for name, distribution, missing, why in packages():
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
    return (
        13 if machine.package_version(DALI[12][0]) is None and machine.package_version(DALI[13][0]) is not None else 12
    )


def required_ranges() -> dict[str, Any]:
    """Versions that gpuaug's metadata require, by distribution."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in metadata.requires("gpuaug") or []]
    except metadata.PackageNotFoundError:
        return {}
    return {r.name.lower(): r.specifier for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})}


# --- devices


def devices(cuda: Verdict) -> Iterator[Finding]:
    """The driver, and what torch can use.

    Args:
        cuda: of the test ``cuda``.
    """
    gpus, driver = machine.gpus(), machine.driver()
    yield judged(
        "driver",
        driver or "no NVIDIA driver",
        bad=None if driver else NOTE,
        advice="Everything runs on the CPU.",
        value={"driver": driver, "gpus": gpus},
    )
    if cuda.good:
        for k, device in enumerate(cuda.value["devices"]):
            text = f"{device['name']}, {format_bytes(device['memory'])}, compute capability {device['capability']}"
            yield Finding(name=f"cuda:{k}", status=OK, text=f"{text}; {cuda.text}", value=device)
    elif not (driver or gpus):
        yield Finding(name="cuda", status=NOTE, text=f"no CUDA device; {cuda.text}", value=[])
    elif cuda.value is None:
        yield Finding(
            name="cuda",
            status=BROKEN,
            text=f"{len(gpus)} devices, and using them {cuda.text}",
            advice="Look at nvidia-smi and the kernel's log (dmesg): other processes may hold the device, or it needs "
            "a reset. With device=cpu gpuaug can be used meanwhile.",
            value=gpus,
        )
    else:
        yield Finding(
            name="cuda",
            status=SLOW,
            text=f"{len(gpus)} devices that torch cannot use: {cuda.text}",
            advice="Training and decoding run on the CPU. Install torch's build for the driver's CUDA "
            "(https://pytorch.org/get-started/locally), or update the driver; start a container with --gpus all.",
            value=gpus,
        )
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
        advice = (
            "They share one driver and should work together. To be sure, install that of torch's CUDA: pip uninstall "
            f"-y {package}; pip install '{DALI[major][0]}{required_ranges().get(DALI[12][0], '')}'"
        )
    return judged(
        "DALI and torch",
        f"DALI for CUDA {dali_cuda}, torch for CUDA {torch_cuda}",
        bad=bad,
        advice=advice,
        value={"dali": dali_cuda, "torch": torch_cuda, "driver": driver},
    )


# --- decoding and augmentation


class Test(NamedTuple):
    """How to report a test of :mod:`.probes`."""

    title: str
    bad: str  # status if it fails
    advice: str  # if it fails
    good: str = ""  # what it means if it succeeds
    dali: bool = True  # whether it needs DALI


TESTS = {
    "header": Test(
        "header parser",
        BROKEN,
        "Sizes of images cannot be relied on. Please report this, with json=FILE.",
        dali=False,
    ),
    "decoder_cpu": Test("DALI on the CPU", BROKEN, "Set decode.backend=pillow, or install another release of DALI."),
    "decoder_mixed": Test(
        "DALI on the GPU",
        BROKEN,
        "Set device=cpu or decode.backend=pillow, or install another driver or release of DALI.",
    ),
    "roi": Test(
        "ROI decode on GPU",
        NOTE,
        "Whole images are decoded on this GPU, not parts of them: safe, and slower.",
        good="Reading only the crop of an image is safe on this GPU.",
    ),
    "hardware": Test("JPEG engine", SLOW, "Leave decode.hardware_load at 0.0, its default."),
    "stream": Test(
        "stream order",
        BROKEN,
        "Batches may change while the model reads them. Set decode.backend=pillow or device=cpu.",
    ),
    "stream_hardware": Test(
        "order, JPEG engine",
        SLOW,
        "Leave decode.hardware_load at 0.0: the engine writes while others read.",
        good="Where the JPEG engine is ok too, decode.hardware_load may be raised above 0; pixels then depend on the "
        "batch by a level or so.",
    ),
    "compiler": Test(
        "compiled on the CPU", SLOW, "Augmentations on the CPU run uncompiled, many times slower.", dali=False
    ),
    "fused_cuda": Test(
        "compiled on the GPU",
        SLOW,
        "Set augment.backend=kornia, many times slower; or give Triton what it needs, above.",
        dali=False,
    ),
}


def decoding(settings: Settings, *, cuda: bool) -> Iterator[Finding]:
    """The compilers, and every test. Results of the tests that may crash are remembered."""
    yield from compilers(cuda=cuda)
    for name in tqdm([*filter(testable, TESTS)], desc="testing", leave=False, disable=None):
        (verdict,) = doctor.examine([name], cuda=cuda, fresh=settings.fresh, timeout=settings.timeout)
        yield tested(verdict)


def testable(name: str) -> bool:
    """Whether the packages of a test are installed. Missing ones are reported with the versions."""
    return not TESTS[name].dali or all(machine.package_version(package) is not None for package in DALI[_dali_cuda()])


def tested(verdict: Verdict) -> Finding:
    """The finding of a test."""
    test = TESTS[verdict.name]
    value = {"test": verdict.name} | {k: getattr(verdict, k) for k in ("good", "value", "seconds", "kept")}
    if verdict.good is None:
        return Finding(name=test.title, status=UNTESTED, text=verdict.text, value=value)
    advice = test.good if verdict.good else test.advice
    if doctor.is_late(verdict):
        advice = f"Where this machine is only slow, raise `timeout`. Where the test hangs: {advice}"
    kept = " (remembered; fresh=true tests again)" if verdict.kept else ""
    status = OK if verdict.good else test.bad
    return Finding(name=test.title, status=status, text=verdict.text + kept, advice=advice, value=value)


def compilers(*, cuda: bool) -> Iterator[Finding]:
    """The C++ compiler of the fused backend, and what torch.compile and Triton need besides."""
    cxx = os.environ.get("CXX")
    path = _first_on_path(cxx.split()[:1] if cxx else ["g++", "clang++", "c++"])
    missing_cxx = f"CXX is {cxx!r}, which is not found" if cxx else "no g++, clang++ or c++ on PATH"
    yield judged(
        "C++ compiler",
        path or missing_cxx,
        bad=None if path else SLOW,
        advice="The fused backend then runs uncompiled on the CPU, many times slower; torch.compile not at all. "
        "Install g++ (apt-get install g++, or conda install cxx-compiler), or set CXX to a compiler.",
        value=path,
    )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    c = _first_on_path([os.environ.get("CC") or "gcc", "clang", "cc"])
    missing = [what for what, there in (("a C compiler", c), (f"{header}", header.exists())) if not there]
    yield judged(
        "Triton's needs",
        f"missing: {' and '.join(missing)}" if missing else f"{c}, {header}",
        bad=(SLOW if cuda else NOTE) if missing else None,
        advice="Triton and torch.compile build small C extensions: on a GPU the compiled augmentations need both. "
        "Install gcc and Python's headers (apt-get install gcc python3-dev).",
        value=missing or None,
    )


def _first_on_path(names: list[str]) -> str | None:
    return next((path for name in names if (path := shutil.which(name))), None)


# --- workers


def workers(settings: Settings) -> Iterator[Finding]:
    """Start methods, shared memory, and the limits of this process."""
    verdict = doctor.probe("workers", timeout=settings.timeout)
    default = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    bad = BROKEN if not (verdict.value or {}).get(default) or "loader's workers" in verdict.text else SLOW
    late = "Where this machine is only slow, raise `timeout`. Else: " if doctor.is_late(verdict) else ""
    yield judged(
        "start methods",
        verdict.text,
        bad=None if verdict.good else bad,
        advice=f"{late}Set start_method to one that works, or num_workers=0 to read in the training's own process.",
        value=verdict.value,
    )
    yield from host.limits()


def _log_overrides_without_effect(request: Request) -> None:
    """Check overrides of the loader as other commands do, and log that they change nothing here."""
    others = [text for _, text in request.others()]
    if others or request.config_name is not None:
        request.loader()
        log.info("doctor looks at the machine, not at a configuration: no effect of %s", ", ".join(others) or "it")
