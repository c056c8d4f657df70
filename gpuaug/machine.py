"""This machine's CPUs, memory, NVIDIA devices and local ranks, and the results of ``gpuaug doctor``.

Only :func:`choose_device` may start CUDA, and only it and :func:`identity` import torch. Missing files in /proc and
/sys raise no errors.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuaug import files
from gpuaug.errors import ConfigError

if TYPE_CHECKING:
    import torch

log = logging.getLogger("gpuaug")

NVIDIA = "/proc/driver/nvidia"


def read(path: Path | str) -> str | None:
    """The text of a small file, stripped; None if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def cpus() -> int:
    """Number of CPUs that this process may run on. CPU quotas do not count."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cpus() -> int:
    """Number of CPUs that this process may run on, limited by the container's CPU quota."""
    quota = cgroup_cpus()
    return cpus() if quota is None else max(1, min(cpus(), math.ceil(quota)))


def cpu_model() -> str:
    match = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", read("/proc/cpuinfo") or "", re.MULTILINE)
    return match[1] if match else platform.machine()


def memory_left() -> tuple[int, str] | None:
    """Bytes of memory that this process can still get, and what limits them: MemAvailable or a control group."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", read("/proc/meminfo") or "", re.MULTILINE)
    both = [(match and int(match[1]) * 1024, "MemAvailable"), (cgroup_left(), "limit of the control group")]
    return min(((left, by) for left, by in both if left is not None), default=None)


def cgroup_left(*, proc: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> int | None:
    """Bytes that this process can still use under all limits of its control groups; None without a limit.

    File cache that the system can drop does not count as used.
    """
    left: list[int] = []
    for folder in _groups(proc, Path(root)):
        if (limit := read(folder / "memory.max") or "").isdigit():  # no limit: "max"
            match = re.search(r"^inactive_file (\d+)$", read(folder / "memory.stat") or "", re.MULTILINE)
            held = int(read(folder / "memory.current") or 0) - (int(match[1]) if match else 0)
            left.append(max(0, int(limit) - max(0, held)))
    return min(left, default=None)


def cgroup_cpus(*, proc: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> float | None:
    """CPU quota of the strictest control group, as a number of CPUs; None without a quota."""
    quotas: list[float] = []
    for folder in _groups(proc, Path(root)):
        quota, _, period = (read(folder / "cpu.max") or "").partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _groups(proc: str, root: Path) -> Iterator[Path]:
    """Folders of this process's control group (version 2) and all its parents."""
    if match := re.search(r"^0::/(.*)$", read(proc) or "", re.MULTILINE):
        here = root / match[1]
        while here != root and root in here.parents:
            yield here
            here = here.parent
        yield root  # in a container, /proc may name a path that only the host has, so all folders above are missing


def gpus(root: str = NVIDIA) -> list[str]:
    """Models of the NVIDIA devices."""
    texts = [read(file) or "" for file in sorted(Path(root).glob("gpus/*/information"))]
    models = re.findall(r"^Model:\s*(.*\S)", "\n".join(texts), re.MULTILINE)
    return models or _smi("--query-gpu=name", root)


def driver(root: str = NVIDIA) -> str | None:
    """Version of NVIDIA's kernel driver."""
    match = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", read(Path(root) / "version") or "")
    return match[1] if match else next(iter(_smi("--query-gpu=driver_version", root)), None)


@lru_cache(maxsize=8)
def _smi(query: str, root: str = NVIDIA) -> list[str]:
    """The lines that nvidia-smi prints. Some systems have no /proc/driver, and MIG is not in it."""
    program = shutil.which("nvidia-smi")
    if program is None or root != NVIDIA or not next(Path("/dev").glob("nvidia[0-9]*"), None):
        return []
    command = [program, query, *["--format=csv,noheader"] * (query != "-L")]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


# -- stored results, used for automatic choices: gpuaug/tools/doctor and gpuaug/loader/self_check.py run the checks --

# Checks of doctor with a stored result, which is called a verdict. tools/doctor/command.py says what each one checks.
VERDICTS = ("decoder_cpu", "decoder_mixed", "hardware", "stream", "fused_cuda")
VERDICTS_VERSION = 5  # files of other versions are ignored; increase it when a check becomes stricter
PACKAGES = (
    "torch", "kornia", "nvidia-dali-cuda120", "nvidia-dali-cuda130", "nvidia-nvimgcodec-cu12", "nvidia-nvimgcodec-cu13",
    "hydra-core", "triton", "pillow", "numpy",
)  # fmt: skip


def verdict(name: str) -> bool | None:
    """Stored result of a check on this kind of machine; None if the check was not run."""
    return verdicts()[name]["good"] if name in verdicts() else None


@lru_cache(maxsize=1)
def verdicts() -> dict[str, dict[str, Any]]:
    """Map each check to ``good`` and ``text``; {} if the file cannot be read."""
    try:
        values = json.loads(verdicts_file().read_text(encoding="utf-8"))
        entries = values["verdicts"] if values["version"] == VERDICTS_VERSION else {}
        return {
            name: {"good": entry["good"], "text": str(entry["text"])}
            for name, entry in entries.items()
            if isinstance(entry["good"], bool)
        }
    except FileNotFoundError:
        return {}
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.info("the stored results of checks cannot be read and are ignored: %s: %s", type(error).__name__, error)
        return {}


def store(entries: Mapping[str, dict[str, Any] | None]) -> None:
    """Add entries to the stored :func:`verdicts`. None removes an entry."""
    verdicts.cache_clear()  # other processes may have added some
    merged = {name: entry for name, entry in {**verdicts(), **entries}.items() if entry}
    values = {"version": VERDICTS_VERSION, "machine": identity(), "verdicts": merged}
    try:
        files.write(verdicts_file(), json.dumps(values, indent=1) + "\n")
    except (OSError, RuntimeError) as error:
        log.info("the results of checks could not be stored: %s", error)
    verdicts.cache_clear()


def verdicts_file() -> Path:
    """The JSON file with the verdicts for this kind of machine."""
    return files.cache_folder() / f"doctor-{digest(identity())}.json"


def digest(value: Any) -> str:
    """A short hash of a JSON value."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=12).hexdigest()


def identity() -> dict[str, Any]:
    """What verdicts depend on: processor, devices, driver and versions. Equal machines share verdicts."""
    from torch.version import cuda

    models, mig = gpus(), re.findall(r"^ +MIG (\S+)", "\n".join(_smi("-L")), re.MULTILINE)
    alike = len(set(models)) < 2 and len(set(mig)) < 2
    return {
        "cpu": cpu_model(),
        "gpus": sorted(set(models)) if alike else models,
        "capability": sorted(set(_smi("--query-gpu=compute_cap"))),
        "mig": sorted(set(mig)) if alike else mig,
        "visible": None if alike else os.environ.get("CUDA_VISIBLE_DEVICES"),
        "driver": driver(),
        "cuda": cuda,
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in ("gpuaug", *PACKAGES)},
    }


def package_version(name: str) -> str | None:
    """Version of an installed package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def local_world_size() -> int:
    """Number of processes of this run on this machine, from torchrun, Slurm or Open MPI; 1 without them."""
    env = os.environ
    if "LOCAL_WORLD_SIZE" in env:
        return max(1, int(env["LOCAL_WORLD_SIZE"]))
    if "SLURM_PROCID" in env and "SLURM_LOCALID" in env:
        # tasks per node, such as "4(x2),3"; a Slurm step may have fewer tasks than its job
        text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_NTASKS_PER_NODE", "")
        groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
        tasks = [int(count) for count, nodes in groups for _ in range(int(nodes or 1))]
        return tasks[min(int(env.get("SLURM_NODEID", "0")), len(tasks) - 1)] if tasks else 1
    return max(1, int(env.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")))


def choose_device(device: str | torch.device) -> torch.device:
    """Return the CPU, or a CUDA device with its index. ``auto``: ``cuda`` if torch finds a CUDA device, else the CPU.

    ``cuda``: torch's current device. If LOCAL_RANK is set, the index is LOCAL_RANK modulo the number of devices.
    """
    import torch

    if automatic := isinstance(device, str) and device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device) if isinstance(device, str | torch.device) else None
    except RuntimeError:  # torch's own message would list all its device types
        chosen = None
    if chosen is None or chosen.type not in ("cpu", "cuda"):
        remedy = ""
        if chosen is not None:
            remedy = f" Set `device=cpu`, and move each batch to the device of the model: `batch.to('{chosen.type}')`."
        raise ConfigError(f"`device` must be auto, cpu, cuda or cuda:N. Found: {device!r:.200}.{remedy}")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"`device` is {device!r}, but torch finds no CUDA device. Set `device=auto` or `device=cpu`.")
    if chosen.type == "cuda" and chosen.index is None:
        rank = os.environ.get("LOCAL_RANK")
        index = torch.cuda.current_device() if rank is None else int(rank) % torch.cuda.device_count()
        chosen = torch.device("cuda", index)
    if automatic:
        log.info("device %s%s", chosen, "" if chosen.type == "cuda" else ": no CUDA device")
    return chosen


def exit_with_parent() -> None:
    """Exit when the parent exits, also when the parent is killed."""
    import multiprocessing
    import threading
    from multiprocessing import connection

    parent = multiprocessing.parent_process()  # with forkserver too, this is the process that asked for this one
    if parent is None:
        return

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, name="gpuaug-parent", daemon=True).start()
