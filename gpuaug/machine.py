"""This machine's CPUs, memory, NVIDIA devices and local rank, and the results of ``gpuaug doctor``.

Only :func:`choose_device` may start CUDA or import large packages. Missing files in /proc and /sys raise no errors.
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
from collections.abc import Iterator
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
    for folder in _groups("memory", proc, Path(root)):
        for limit, used, key in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            text = read(folder / limit)
            if text is not None and text.isdigit() and int(text) < 1 << 60:  # version 1: a huge number means no limit
                match = re.search(rf"^{key} (\d+)$", read(folder / "memory.stat") or "", re.MULTILINE)
                held = int(read(folder / used) or 0) - (int(match[1]) if match else 0)
                left.append(max(0, int(text) - max(0, held)))
    return min(left, default=None)


def cgroup_cpus(*, proc: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> float | None:
    """CPU quota of the strictest control group, as a number of CPUs; None without a quota."""
    quotas: list[float] = []
    for folder in _groups("cpu", proc, Path(root)):
        quota, _, period = (read(folder / "cpu.max") or "").partition(" ")
        if not quota:
            quota, period = read(folder / "cpu.cfs_quota_us") or "", read(folder / "cpu.cfs_period_us") or ""
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _groups(controller: str, proc: str, root: Path) -> Iterator[Path]:
    """Folders of this process's control group and all its parents, for cgroup versions 1 and 2."""
    for line in (read(proc) or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            base = root
        elif controller in controllers.split(","):
            base = next((p for p in (root / controllers, root / controller) if p.is_dir()), root)
        else:
            continue
        here = base / path.lstrip("/")
        while here != base and base in here.parents:
            yield here
            here = here.parent
        yield base  # in a container, /proc may name a path that only the host has, so all folders above are missing


def gpus(root: str = NVIDIA) -> list[str]:
    """Models of the NVIDIA devices."""
    texts = [read(file) or "" for file in sorted(Path(root).glob("gpus/*/information"))]
    models = re.findall(r"^Model:\s*(.*\S)", "\n".join(texts), re.MULTILINE)
    return models or [line.partition(",")[0].strip() for line in _smi(root)]


def driver(root: str = NVIDIA) -> str | None:
    """Version of NVIDIA's kernel driver."""
    match = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", read(Path(root) / "version") or "")
    return match[1] if match else next((line.partition(",")[2].strip() for line in _smi(root)), None)


def _smi(root: str) -> list[str]:
    """One line "model, driver version" per device, from nvidia-smi. Some systems have no /proc/driver."""
    program = shutil.which("nvidia-smi")
    if program is None or root != NVIDIA or not Path("/dev/nvidia0").exists():
        return []
    command = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")[:-1]
    except (OSError, subprocess.SubprocessError):
        return []


# -- stored results of `gpuaug doctor`, used for automatic choices; gpuaug/tools/doctor runs the checks --

# Checks with a stored result, which is called a verdict. tools/doctor/command.py says what each one checks.
VERDICTS = ("decoder_cpu", "decoder_mixed", "hardware", "stream", "fused_cuda")
VERDICTS_VERSION = 3  # files of other versions are ignored; increase it when a check becomes stricter
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
            if name in VERDICTS and isinstance(entry["good"], bool)
        }
    except FileNotFoundError:
        return {}
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.info("doctor's stored results cannot be read and are ignored: %s: %s", type(error).__name__, error)
        return {}


def verdicts_file() -> Path:
    """The JSON file with the verdicts for this kind of machine."""
    digest = hashlib.blake2b(json.dumps(identity(), sort_keys=True).encode(), digest_size=12).hexdigest()
    return files.cache_folder() / f"doctor-{digest}.json"


def identity() -> dict[str, Any]:
    """What verdicts depend on: processor, devices, driver and versions. Equal machines share verdicts."""
    models = gpus()
    alike = len(set(models)) < 2
    return {
        "cpu": cpu_model(),
        "gpus": sorted(set(models)) if alike else models,
        "visible": None if alike else os.environ.get("CUDA_VISIBLE_DEVICES"),
        "driver": driver(),
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in ("gpuaug", *PACKAGES)},
    }


def package_version(name: str) -> str | None:
    """Version of an installed package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def local_rank() -> int:
    """Local rank of this process, from torchrun, Slurm or Open MPI; 0 without them."""
    names = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
    return next((int(os.environ[name]) for name in names if name in os.environ), 0)


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
