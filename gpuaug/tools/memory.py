"""How much memory a run holds: this process with its workers, and the device."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

from gpuaug.size import text


def tree(root: int | None = None) -> list[int]:
    """Process numbers of ``root`` (default: this process) and of all that descend from it; Linux."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended meanwhile
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [os.getpid() if root is None else root]
    for pid in found:
        found += children.get(pid, [])
    return found


def _pss(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0


def host(root: int | None = None) -> int:
    """Bytes that this process (or ``root``) and its workers hold, pages they share counted once (the sum of their PSS).

    Where there is no /proc: the highest RSS of this process so far.
    """
    if sys.platform == "linux":
        return sum(_pss(pid) for pid in tree(root))
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def workers() -> list[int]:
    """Bytes that each worker of this process holds: its own, and its part of what is shared (PSS); Linux."""
    if sys.platform != "linux":
        return []
    return [_pss(child.pid) for child in multiprocessing.active_children() if child.pid is not None]


def waiting(level: int, bound: int | None) -> str:
    """For a progress bar: how full the buffer of encoded batches is; nothing where there is none."""
    return "" if bound is None else f", ahead {gib(level)} ({level / bound:.0%})"


def gib(size: float) -> str:
    """Bytes as text: ``1.25 GiB``, ``37.0 MiB``."""
    return text(size)
