"""What `gpuaug doctor` says of limits, memory, CPUs and folders of this machine. Nothing here starts a process."""

from __future__ import annotations

import math
import tempfile

from gpuaug import files, machine
from gpuaug.files import format_bytes
from gpuaug.tools.doctor.checks import BROKEN, NOTE, SLOW, Finding, judged

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
    """Memory of the machine and of the control group.

    Args:
        sizes: (total, available) in bytes; None if it is not known.
        group: (limit, in use) in bytes; None without a limit.
    """
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
