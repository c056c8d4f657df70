"""How much host memory a run takes: this process and its workers."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

from gpuaug.files import format_bytes


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


def _pss(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0


def host(root: int | None = None) -> int:
    """Bytes of this process (or ``root``) and its descendants. Shared pages count once: it is the sum of their PSS.

    Without /proc: the peak RSS of this process.
    """
    if sys.platform == "linux":
        return sum(_pss(pid) for pid in tree(root))
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def workers() -> list[int]:
    """Bytes of each worker of this process, with its part of shared pages (PSS). Linux only."""
    if sys.platform != "linux":
        return []
    return [_pss(child.pid) for child in multiprocessing.active_children() if child.pid is not None]


def waiting(level: int, bound: int | None) -> str:
    """For a progress bar: how full the buffer of encoded batches is; "" if there is none."""
    return "" if bound is None else f", ahead {gib(level)} ({level / bound:.0%})"


def gib(size: float) -> str:
    """Bytes as text: ``1.25 GiB``, ``37.0 MiB``."""
    return format_bytes(size)
