"""The host memory that this process and its workers use, read from /proc; 0 if the system has no /proc."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from typing import Any

from gpuaug import machine
from gpuaug.read.ring import NAME


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of memory that a process and its workers use.

    Pages of libraries and of files on disk do not count, because the system can take these pages back. Shared memory
    is counted by open files, because a batch that is being sent is mapped in no process.
    """

    main: int = 0  # anonymous pages of this process, including those shared with forked workers
    workers: int = 0  # anonymous pages that only workers have
    encoded: int = 0  # the ring of encoded batches
    files: int = 0  # other shared memory, such as the list of samples

    @property
    def host(self) -> int:
        return self.main + self.workers + self.encoded + self.files


def usage() -> Usage:
    """The memory that this process and its workers use now."""
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children() if child.pid is not None)]
    sizes = [_sizes(pid) for pid in pids]  # read each process once, because memory may grow meanwhile
    alone, every = sizes[0].get("Anonymous", 0), sum(size.get("Pss_Anon", 0) for size in sizes)
    return Usage(min(alone, every), max(0, every - alone), *_open_files(pids))


def _open_files(pids: Sequence[int]) -> tuple[int, int]:
    """Bytes of the ring of encoded batches, and of all other open files in shared memory."""
    ring, others = dict[Any, int](), dict[Any, int]()  # by device and inode, because each file counts once
    for pid in pids:
        for link in glob(f"/proc/{pid}/fd/*"):
            with suppress(OSError):  # closed meanwhile
                path = os.readlink(link)
                if path.startswith(("/dev/shm/", "/memfd:")):
                    status, files = os.stat(link), ring if path.startswith(f"/memfd:{NAME}") else others
                    files[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(ring.values()), sum(others.values())


def _sizes(pid: int) -> dict[str, int]:
    """Memory of a process in bytes, by field name of smaps_rollup; {} if the process has ended."""
    text = machine.read(f"/proc/{pid}/smaps_rollup") or ""
    return {name: int(size) * 1024 for name, size in re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE)}
