"""Time, CPU time and free cores of this machine."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from gpuaug import machine


def now(pids: Sequence[int] = ()) -> Any:
    """Seconds, float64 [3]: wall time, CPU time of this process, summed CPU time of ``pids``."""
    return np.array([time.perf_counter(), time.process_time(), sum(map(cpu_seconds, pids))])


def cpu_seconds(pid: int) -> float:
    """CPU-seconds of a process so far; 0 if the system does not report them."""
    try:
        # clock_getcpuclockid computes this number on Linux; /proc counts only in steps of 10 ms
        return time.clock_gettime((~pid << 3) | 2)
    except (OSError, OverflowError, AttributeError):
        return 0.0


def waited_for_a_core() -> float:
    """Seconds so far in which this thread waited for a core; 0 if the kernel does not count them."""
    try:
        return int((machine.read("/proc/thread-self/schedstat") or "").split()[1]) / 1e9
    except (ValueError, IndexError):
        return 0.0


def free_cores(seconds: float = 0.08) -> float:
    """The number of cores that this process gets, after affinity, quota and other processes."""
    count, block = machine.usable_cpus(), bytes(1 << 18)
    began = now()

    def busy(_: int) -> None:
        while time.perf_counter() < began[0] + seconds:
            hashlib.sha256(block)  # releases the global interpreter lock

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(busy, range(count)))
    wall, own, _ = (now() - began).tolist()
    # a short measurement may exceed the quota
    return max(0.25, min(count, machine.cgroup_cpus() or count, own / wall))
