"""What `gpuaug doctor` says of limits, memory, CPUs and folders of this machine. Nothing here starts a process."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator

from gpuaug import files, machine
from gpuaug.files import format_bytes
from gpuaug.tools.doctor.findings import BROKEN, NOTE, OK, SLOW, Finding, judged

MIB = 2**20
# What the machine should have. Files: torch passes every batch in flight between processes as one, and Python with DALI
# and eight threads opens some sixty. Shared memory: 64 photographs of 110 KB are a batch of 7 MB, of which each worker
# has two in flight.
FILES_LEAST, FILES_ENOUGH, FILES_ADVISED = 128, 1024, 65536
SHARED_LEAST, SHARED_ENOUGH = 16 * MIB, 512 * MIB
MEMORY_ENOUGH = 2 * 2**30
THREADS_ENOUGH = 512


def limits() -> Iterator[Finding]:
    """Shared memory, and the limits of this process."""
    yield shared_memory(machine.shared_memory())
    yield open_files(machine.limit("NOFILE"))
    yield processes(machine.limit("NPROC"))


def place() -> Iterator[Finding]:
    """CPUs, memory, control groups, NUMA nodes, and the cache folder."""
    yield cpus(machine.cpus(), machine.cgroup_cpus())
    yield memory(machine.memory(), machine.cgroup_memory())
    yield numa(machine.numa_nodes())
    yield cache_folder()


def shared_memory(sizes: tuple[int, int] | None) -> Finding:
    """/dev/shm, through which workers pass batches.

    Args:
        sizes: (size, free) in bytes; None if there is none.
    """
    if sizes is None:
        return Finding(name="shared memory", status=NOTE, text="no /dev/shm on this system")
    size, free = sizes
    return judged(
        "shared memory",
        f"/dev/shm of {format_bytes(size)}, {format_bytes(free)} free",
        bad=_too_small(free, least=SHARED_LEAST, enough=SHARED_ENOUGH),
        advice="Workers hand over batches there, and die of a bus error where it is full. In Docker start with "
        "--shm-size=8g or --ipc=host, in Kubernetes mount an emptyDir of medium Memory; else lower num_workers or "
        "batch_size, or read without workers: num_workers=0.",
        value=list(sizes),
    )


def open_files(limits: tuple[int, int] | None) -> Finding:
    """The limit of open files: (soft, hard), -1 is unlimited; None if there is none."""
    if limits is None:
        return Finding(name="open files", status=NOTE, text="no such limit on this system")
    soft, hard = _unlimited(limits)
    return judged(
        "open files",
        f"{_text(soft)} per process, may be raised to {_text(hard)}",
        bad=_too_small(soft, least=FILES_LEAST, enough=FILES_ENOUGH),
        advice="Every batch on its way from a worker is an open file: `Too many open files` ends a run that has many. "
        f"Before it: ulimit -n {_text(min(FILES_ADVISED, hard))}",
        value=list(limits),
    )


def processes(limits: tuple[int, int] | None) -> Finding:
    """The limit of processes and threads of the user: (soft, hard), -1 is unlimited; None if there is none."""
    if limits is None:
        return Finding(name="processes", status=NOTE, text="no such limit on this system")
    soft, hard = _unlimited(limits)
    return judged(
        "processes",
        f"{_text(soft)} processes and threads of this user, may be raised to {_text(hard)}",
        bad=_too_small(soft, enough=THREADS_ENOUGH),
        advice="Each rank starts workers and some thirty threads, all of the user's processes together. Before a run: "
        f"ulimit -u {_text(hard)}",
        value=list(limits),
    )


def _too_small(amount: float, *, least: float = 0, enough: float) -> str | None:
    return BROKEN if amount < least else SLOW if amount < enough else None


def _unlimited(limits: tuple[int, int]) -> list[float]:
    return [math.inf if limit < 0 else limit for limit in limits]


def _text(limit: float) -> str:
    return "unlimited" if limit == math.inf else f"{limit:.0f}"


def cpus(count: int, quota: float | None) -> Finding:
    """CPUs that may be used, and how much of their time.

    Args:
        count: CPUs of this process.
        quota: the number of CPUs whose time a control group allows; None: all.
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


def memory(sizes: tuple[int, int] | None, group: tuple[int, int] | None) -> Finding:
    """Memory of the machine and of the control group.

    Args:
        sizes: (total, available) in bytes; None if it is not known.
        group: (limit, in use) in bytes; None without a limit.
    """
    if sizes is None:
        return Finding(name="memory", status=NOTE, text="not known on this system")
    total, available = sizes
    text, left = f"{format_bytes(total)}, {format_bytes(available)} available", available
    if group is not None and group[0] < total:
        limit, used = group
        left = min(available, limit - used)
        text += f"; a control group allows {format_bytes(limit)}, of which {format_bytes(used)} are in use"
        text += " (files it read among them)"
    return judged(
        "memory",
        text,
        bad=_too_small(left, enough=MEMORY_ENOUGH),
        advice="Little is left, and where it is full the kernel ends processes without a word, workers among them. "
        "Lower num_workers, prefetch or batch_size, or give the container more.",
        value={"total": total, "available": available, "cgroup": None if group is None else list(group)},
    )


def numa(nodes: dict[int, str]) -> Finding:
    """NUMA nodes.

    Args:
        nodes: CPUs of each, as ``0-3,8``.
    """
    if len(nodes) < 2:
        return Finding(name="NUMA", status=OK, text=f"{len(nodes) or 1} node", value=nodes)
    listed = "; ".join(f"{node}: CPUs {text}" for node, text in nodes.items())
    mine = os.sched_getaffinity(0)  # nodes are only known on Linux, which has it
    return judged(
        "NUMA",
        f"{len(nodes)} nodes ({listed})",
        bad=NOTE if sum(bool(_cpus_of(text) & mine) for text in nodes.values()) > 1 else None,
        advice="This process may run on several nodes, and memory of another one is slower. Bind each rank to the node "
        "of its GPU: numactl --cpunodebind=N --membind=N, or torchrun's --numa-binding=node. `nvidia-smi topo -m` "
        "shows which is near.",
        value=nodes,
    )


def _cpus_of(text: str) -> set[int]:
    """``0-3,8`` as numbers."""
    parts = [part.partition("-") for part in text.split(",") if part]
    return {k for first, dash, last in parts for k in range(int(first), int(last if dash else first) + 1)}


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
