"""The recipe and the loader that many tests begin with, and what they need to start workers and processes."""

import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import kornia.augmentation as K
import torch

import gpuaug

PROGRAM = [sys.executable, "-m", "gpuaug.tools"]  # the command line in a process of its own

METHODS = multiprocessing.get_all_start_methods()  # of workers
if "forkserver" in METHODS:
    multiprocessing.set_forkserver_preload(["torch.utils.data"])  # its workers need not import torch

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NORMALIZE = gpuaug.Normalize(mean=MEAN, std=STD)


def recipe(backend: str = "kornia", size: int = 32, **more: Any) -> gpuaug.Augment:
    """A crop, a few operations with `more` behind them, and normalization."""
    ops = {
        "vflip": K.RandomVerticalFlip(p=0.5),
        "flip": K.RandomHorizontalFlip(p=0.5),
        "jitter": K.ColorJitter(0.3, 0.3, 0.3, 0.1, p=0.8),
        "gray": K.RandomGrayscale(p=0.1),
        **more,
    }
    return gpuaug.Augment(crop=gpuaug.RandomResizedCrop(size), ops=ops, normalize=NORMALIZE, backend=backend)


def started_by(method: str) -> dict[str, Any]:
    """Settings of a reader: two workers, but one where each of them imports torch for itself."""
    return {"num_workers": 1 if method == "spawn" else 2, "start_method": method}


def tree(pid: int) -> list[int]:
    """A process and its descendants. Linux only."""
    children: list[str] = []
    with suppress(FileNotFoundError):  # the process has just ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread has just ended
                children += (task / "children").read_text().split()
    return [pid, *(each for child in children for each in tree(int(child)))]


def ended(pids: Iterable[int], timeout: float = 60.0) -> bool:
    """Wait until all these processes have ended; False if one is still there after ``timeout`` seconds. Linux only."""

    def alive(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    deadline = time.monotonic() + timeout
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def torchrun(ranks: int) -> list[str]:
    """The command that runs the program on several ranks of this machine."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*run, *PROGRAM[1:]]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use this many threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def loader(source: Any, **settings: Any) -> gpuaug.Loader:
    """Over a source or a folder of images; `settings` are the loader's, on the CPU and without workers by default."""
    source = gpuaug.FolderSource(source) if isinstance(source, str | Path) else source
    usual = {"batch_size": 7, "num_workers": 0, "seed": 3, "device": "cpu"}
    return gpuaug.Loader(source, **{**usual, "augment": recipe(), **settings})
