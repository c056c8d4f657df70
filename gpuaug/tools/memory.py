"""How much host memory processes take: this one and its workers. Read from /proc; Linux only, elsewhere mostly 0."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuaug import machine
from gpuaug.files import format_bytes


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes that a process and its workers have and the system cannot take back, each page and each file once.

    Counted are anonymous pages and, by their files, shared memory and memory files: a batch on its way between two
    processes is in no one's address space. Pages of libraries and of files that were read are the system's to drop.

    Attributes:
        main: of this process, with all that its workers have inherited.
        workers: what its workers have beside that.
        shared: in /dev/shm.
        files: in unnamed memory files, as the cache and indices are.
    """

    main: int = 0
    workers: int = 0
    shared: int = 0
    files: int = 0

    @property
    def host(self) -> int:
        """All of it."""
        return self.main + self.workers + self.shared + self.files


def usage() -> Usage:
    """What this process and its workers have now."""
    pids = [os.getpid(), *_workers()]
    sizes = [_sizes(pid) for pid in pids]  # each once: it grows meanwhile
    alone, every = sizes[0].get("Anonymous", 0), sum(size.get("Pss_Anon", 0) for size in sizes)
    shared = shared_by(pids, where=("/dev/shm/",))
    return Usage(min(alone, every), max(0, every - alone), shared, shared_by(pids, where=("/memfd:",)))


def shared_by(pids: Sequence[int], *, where: tuple[str, ...] = ("/dev/shm/", "/memfd:")) -> int:
    """Bytes of shared memory and memory files that these processes have open, each once."""
    files: dict[tuple[int, int], int] = {}
    for pid in pids:
        try:
            names = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for name in names:
            path = f"/proc/{pid}/fd/{name}"
            try:
                if os.readlink(path).startswith(where):
                    status = os.stat(path)
                    files[status.st_dev, status.st_ino] = status.st_blocks * 512
            except OSError:
                continue
    return sum(files.values())


def tree(root: int | None = None) -> list[int]:
    """Process IDs of ``root`` (default: this process) and of all its descendants. Linux only."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # the process has ended
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    pids = [os.getpid() if root is None else root]
    for pid in pids:
        pids += children.get(pid, [])
    return pids


def host(root: int | None = None) -> int:
    """Bytes of this process (or ``root``) and its descendants. Shared pages count once: it is the sum of their PSS.

    Without /proc: the peak RSS of this process.
    """
    if sys.platform == "linux":
        return sum(_sizes(pid).get("Pss", 0) for pid in tree(root))
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def workers() -> list[int]:
    """Bytes of each worker of this process, with its part of shared pages (PSS). Linux only."""
    return [_sizes(pid).get("Pss", 0) for pid in _workers()] if sys.platform == "linux" else []


def waiting(level: int, bound: int | None) -> str:
    """For a progress bar: how full the buffer of encoded batches is; "" if there is none."""
    return "" if bound is None else f", ahead {format_bytes(level)} ({level / bound:.0%})"


def _workers() -> list[int]:
    return [child.pid for child in multiprocessing.active_children() if child.pid is not None]


def _sizes(pid: int) -> dict[str, int]:
    """Memory of a process by the names of smaps_rollup, in bytes; {} where it has ended."""
    text = machine.read(f"/proc/{pid}/smaps_rollup") or ""
    return {name: int(size) * 1024 for name, size in re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE)}
