"""How much host memory this process and its workers take. Read from /proc; 0 where the system has none."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gpuaug import machine


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes that a process and its workers have and the system cannot take back, each page and each file once.

    Counted are anonymous pages and, by their files, shared memory and memory files: a batch on its way between two
    processes is in no one's address space. Pages of libraries and of files that were read are the system's to drop.
    """

    main: int = 0  # of this process, with all that its workers have inherited
    workers: int = 0  # what its workers have beside that
    shared: int = 0  # in /dev/shm
    files: int = 0  # in unnamed memory files, as the cache and indices are

    @property
    def host(self) -> int:
        """All of it."""
        return self.main + self.workers + self.shared + self.files


def usage() -> Usage:
    """What this process and its workers have now."""
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children() if child.pid is not None)]
    sizes = [_sizes(pid) for pid in pids]  # each once: it grows meanwhile
    alone, every = sizes[0].get("Anonymous", 0), sum(size.get("Pss_Anon", 0) for size in sizes)
    shared, files = (_open_files(pids, where) for where in ("/dev/shm/", "/memfd:"))
    return Usage(min(alone, every), max(0, every - alone), shared, files)


def _open_files(pids: Sequence[int], where: str) -> int:
    """Bytes of the files below ``where`` that these processes have open, each once."""
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


def _sizes(pid: int) -> dict[str, int]:
    """Memory of a process by the names of smaps_rollup, in bytes; {} where it has ended."""
    text = machine.read(f"/proc/{pid}/smaps_rollup") or ""
    return {name: int(size) * 1024 for name, size in re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE)}
