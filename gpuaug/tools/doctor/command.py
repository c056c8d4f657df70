"""`gpuaug doctor`: checks whether this machine can run gpuaug, and names one remedy for each finding.

The results of the tests in :data:`gpuaug.machine.VERDICTS` are stored until the machine or a package changes.
"""

from __future__ import annotations

import logging
import os
import platform
import resource
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gpuaug import checks, machine
from gpuaug.files import format_bytes
from gpuaug.tools import child
from gpuaug.tools.doctor.report import LOADER, MOVED, as_json, this_machine
from gpuaug.tools.report import Report, output, save
from gpuaug.tools.request import Keys, Request

log = logging.getLogger("gpuaug")

TIMEOUT_S = 180.0  # of each test; a first compilation takes up to a minute on slow machines
CODE = "from gpuaug.tools.doctor.probes import main; main()"
MEASURE = "from gpuaug.tools.doctor.report import main; main()"
OK, NOTE, SLOW, BROKEN, UNTESTED = "ok", "note", "warning", "BROKEN", "untested"
DALI = {  # packages for each version of CUDA
    "12": ("nvidia-dali-cuda120", "nvidia-nvimgcodec-cu12"),
    "13": ("nvidia-dali-cuda130", "nvidia-nvimgcodec-cu13"),
}
UNCOMPILED = "uncompiled"  # details of the test "compiler" if the augmentations work, but were not compiled
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
# 60 files, and each worker about six more.
FILES_LEAST, FILES_ENOUGH, FILES_ADVISED = 128, 1024, 65536


@dataclass(frozen=True, kw_only=True)
class Settings(Keys):
    """The keys of `gpuaug doctor`."""

    fresh: bool = False
    report: str | None = None
    seconds: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number("seconds", self.seconds, 0.0, 120.0)


@dataclass
class Finding:
    """The result of one check, as it is printed."""

    name: str
    text: str  # the result in words
    status: str = OK  # OK, NOTE, SLOW, BROKEN or UNTESTED
    advice: str = ""  # what to do, unless the status is OK or UNTESTED
    stderr: tuple[str, ...] = ()  # the last lines of a test that failed

    def __post_init__(self) -> None:
        if self.status in (OK, UNTESTED):
            self.advice, self.stderr = "", ()

    def __str__(self) -> str:
        text = f"  {self.name:<22} {self.status:<9} {self.text}"
        return f"{text}\n{' ' * 35}{self.advice}" if self.advice else text


class Answer(NamedTuple):
    """The result of a test."""

    good: bool | None  # None: cannot be tested here
    text: str  # the result in words
    details: Any = None
    late: bool = False  # whether the test timed out
    stderr: tuple[str, ...] = ()  # its last lines


def main(request: Request) -> int:
    """Print the findings. Returns 0 if gpuaug can be used here, 1 if something is broken."""
    settings = Settings(**request.settings())
    if others := [text for _, text in request.others()]:
        request.loader()  # a wrong argument raises an error, as in other commands
        log.info("doctor tests the machine, not a configuration; these arguments are ignored: %s", ", ".join(others))
    report = Report(file=settings.json)
    file = None if settings.report is None else output(settings.report, "report")
    cuda = probe("cuda")
    findings: list[Finding] = []
    measured: dict[str, Any] = {}
    sections = {
        "versions": versions(),
        "devices": devices(cuda),
        "decoding and augmentation": decoding(fresh=settings.fresh, cuda=cuda),
        "workers and limits": limits(),
    }
    if file is not None:
        here = this_machine(cuda.details)
        sections["measurements"] = measurements("cuda" if cuda.good else "cpu", settings.seconds, measured)
    for heading, part in sections.items():
        print(f"\n{heading}:", flush=True)
        for finding in part:
            findings.append(finding)
            print(finding, flush=True)
            if file is not None:  # after each finding, because the user may stop a command that hangs
                found = [vars(f) for f in findings]
                attention = [f for f in found if f["status"] not in (OK, NOTE)]
                values = {"attention": attention, "machine": here, "measurements": measured}
                save(file, "report", as_json({**values, "stored": machine.verdicts(), "findings": found}))
    broken = [f.name for f in findings if f.status == BROKEN]
    said = f"does not work reliably on this machine. Broken: {', '.join(broken)}" if broken else "can be used here"
    print(f"\ngpuaug {said}.")
    if file is not None:
        print(f"The report is in {file}. Please read it, and attach it to an issue (form: GPU report).")
    report.values = {"findings": [vars(f) for f in findings], "usable": not broken}
    report.write()
    return 1 if broken else 0


def versions() -> Iterator[Finding]:
    yield Finding("python", platform.python_version())
    for package in ("gpuaug", "torch", "kornia", "hydra-core", "pillow"):  # gpuaug cannot be imported without them
        yield Finding(package, machine.package_version(package) or "not installed, imported from a folder")
    for package, missing in {**dict.fromkeys(dali(), SLOW), "triton": NOTE}.items():
        version = machine.package_version(package)
        yield Finding(package, version or "not installed", OK if version else missing, f"pip install {package}")
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        advice = "On CUDA: apt-get install gcc libc6-dev python3-dev, or conda install -c conda-forge gcc."
        yield Finding("C compiler", "none, and Triton needs one to start its kernels", NOTE, advice)


def dali() -> tuple[str, str]:
    """The names of DALI's packages, for the CUDA version that is installed."""
    return next((names for names in DALI.values() if machine.package_version(names[0])), DALI["12"])


def devices(cuda: Answer) -> Iterator[Finding]:
    gpus, driver = machine.gpus(), machine.driver()
    yield Finding("driver", driver or "no NVIDIA driver: everything runs on the CPU", OK if driver else NOTE)
    for k, device in enumerate(cuda.details or ()):
        text = f"{device['name']}, {format_bytes(device['memory'])}, compute capability {device['capability']}"
        yield Finding(f"cuda:{k}", f"{text}; {cuda.text}")
    if not cuda.good and (driver or gpus):
        status, advice = SLOW, "Install torch for the driver's CUDA: https://pytorch.org/get-started/locally."
        if cuda.details is None:
            status, advice = BROKEN, "Set device=cpu, and look at nvidia-smi: the test of the devices failed."
        yield Finding("cuda", f"{len(gpus)} devices; {cuda.text}", status, advice)


def limits() -> Iterator[Finding]:
    good, text, default_works, *_ = probe("workers")
    advice = "Set start_method to a method that works, or num_workers=0."
    yield Finding("start methods", text, OK if good else SLOW if default_works else BROKEN, advice)
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield cpus(machine.cpus(), machine.cgroup_cpus())


def open_files(soft: int, hard: int) -> Finding:
    status = BROKEN if soft < FILES_LEAST else SLOW if soft < FILES_ENOUGH else OK
    return Finding("open files", f"{soft} per process", status, f"Run `ulimit -n {min(FILES_ADVISED, hard)}` first.")


def cpus(count: int, quota: float | None) -> Finding:
    """Compare the number of CPUs with the limit of the cgroup, ``quota``; None: no limit. OpenMP ignores this limit."""
    few = count if quota is None else min(count, quota)
    text = f"{count} CPUs for this process ({machine.cpu_model()})" + f"; its cgroup allows {few:g}" * (few < count)
    threads, workers = max(1, min(8, int(few))), max(1, min(4, int(few // 2)))
    advice = f"Set decode.num_threads={threads} num_workers={workers} and OMP_NUM_THREADS={threads}."
    return Finding("CPUs", text, SLOW if few < count else OK, advice)


def decoding(*, fresh: bool, cuda: Answer) -> Iterator[Finding]:
    """Take the stored result of each test that can run here, or run it. ``cuda`` is the result of the test "cuda"."""
    if fresh:
        machine.store(dict.fromkeys(machine.verdicts().keys() - {*machine.VERDICTS}))
    has_dali = all(map(machine.package_version, dali()))
    for name in TESTS:
        if (has_dali or name in WITHOUT_DALI) and (cuda.good or name in WITHOUT_CUDA):
            finding = tested(name, examine(name, fresh=fresh))
            if name == "decoder_mixed" and finding.status == BROKEN:
                finding.advice = other_dali(cuda.details[0]["cuda"]) or finding.advice
            yield finding
    for name, entry in machine.verdicts().items():
        if name not in machine.VERDICTS:  # of a loader
            advice = "Please report it: gpuaug doctor report=FILE. After fresh=true, the next loader checks again."
            yield Finding("self-check", f"{name}: {entry['text']}", OK if entry["good"] else SLOW, advice)


def other_dali(torch_cuda: str) -> str:
    """How to install DALI for torch's version of CUDA, such as 13.0; "" if there is no other DALI."""
    major = torch_cuda.partition(".")[0]
    have, wanted = dali(), DALI.get(major, dali())
    if have == wanted:
        return ""
    remove, install = " ".join(have), f"{wanted[0]}=={machine.package_version(have[0])}"
    return (
        f"Install DALI for CUDA {major}, for which torch is built: `pip uninstall -y {remove}`, then "
        f"`pip install {install}`. `pip check` then reports {have[0]} as missing, but gpuaug works with either. Or set "
        "decode.backend=pillow."
    )


def measurements(device: str, seconds: float, measured: dict[str, Any]) -> Iterator[Finding]:
    """Measure the recipes and the loader. Each answer becomes an entry of ``measured``."""
    for part in (*MOVED, LOADER):
        share = seconds / 2 / (1 if part == LOADER else len(MOVED))
        answer = probe(part, command=(sys.executable, "-c", MEASURE, part, device, str(share)))
        machine.verdicts.cache_clear()  # the loader has checked itself
        measured[part] = answer._asdict()
        advice = "Send the report." if part == LOADER else "Set augment.backend=kornia, and send the report."
        status = OK if answer.good else SLOW if answer.late else BROKEN
        yield Finding(f"{part} on {device}", answer.text, status, advice, answer.stderr)


def tested(name: str, answer: Answer) -> Finding:
    title, bad, advice = TESTS[name]
    if name == "compiler" and answer.details != UNCOMPILED:
        bad, advice = BROKEN, "Set augment.backend=kornia, which is slower."
    status = UNTESTED if answer.good is None else OK if answer.good else bad
    return Finding(title, answer.text, status, advice, answer.stderr)


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
    machine.store({name: {"good": answer.good, "text": answer.text}})


def probe(name: str, *, command: Sequence[str] | None = None) -> Answer:
    """Run one test, or a ``command``, in its own process, because a test may crash or hang."""
    ended = child.run(command or (sys.executable, "-c", CODE, name), timeout=TIMEOUT_S)
    if ended.status is None:
        return Answer(False, f"did not answer within {TIMEOUT_S:g} s and was killed", late=True)
    stderr = tuple(ended.errors.splitlines()[-40:])
    if ended.status == 0 and ended.answer is not None:
        return Answer(*ended.answer)._replace(stderr=stderr)
    if ended.status < 0:
        memory = " (perhaps out of memory)" if ended.status == -signal.SIGKILL else ""
        return Answer(False, f"crashed: killed by {signal.Signals(-ended.status).name}{memory}", stderr=stderr)
    last = ended.errors.strip().rpartition("\n")[2].strip() or "no output on stderr"
    return Answer(False, f"failed with exit status {ended.status}: {last[:300]}", stderr=stderr)
