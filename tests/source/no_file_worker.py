"""Lists and tables that are no files: pipes, devices, folders, endless ones. One line for each that is refused by name.

A process of its own, because a pipe that nobody writes to would hold the tests for ever, and /dev/zero their machine.
"""

import json
import logging
import os
import resource
import signal
import sys
import traceback
from pathlib import Path

import gpuaug
from gpuaug.errors import GpuaugError
from gpuaug.source import FolderSource, ParquetSource, ShardSource, TableSource

KINDS = {"pipe": "a pipe", "device": "a device", "folder": "", "endless": "bytes, more than"}
LARGE = ("train.parquet", "train.tar")  # may have any size


def made(path: Path, kind: str) -> Path:
    """Something of this kind at the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 1 << 40)  # no block of it is on the disk
    return path


def users(images: Path):
    """(name of the file, what opens it)."""

    def folder(**more):
        return FolderSource(images, **more)

    for ending in ("txt", "npy", "json"):
        yield f"subset.{ending}", lambda path: folder(subset=path)
        yield f"weights.{ending}", lambda path: gpuaug.Weighted(path)
    yield "bad.jsonl", lambda path: folder(exclude=path)
    yield "classes.txt", lambda path: folder(classes=path)
    yield "classes.json", lambda path: folder(classes=path)
    for ending in ("csv", "tsv"):
        yield f"table.{ending}", lambda path: TableSource(path)
    yield "train.parquet", lambda path: ParquetSource([path])
    yield "train.tar", lambda path: ShardSource([path], labels="none")
    yield "packed/manifest.json", lambda path: gpuaug.PackedSource(path.parent)
    yield "faults.jsonl", lambda path: gpuaug.Faults(file=str(path))


def main(place: Path) -> None:
    """Try all of them."""
    logging.disable(logging.CRITICAL)
    images = place / "images"
    (images / "a").mkdir(parents=True)
    (images / "a" / "x.jpg").write_bytes(b"x")
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (2 << 30),) * 2)
    for name, use in users(images):
        for kind, word in KINDS.items():
            if kind == "endless" and name in LARGE:
                continue
            path = made(place / kind / name, kind)
            signal.alarm(20)  # ends this process
            try:
                use(path)
                said = "accepted"
            except GpuaugError as error:
                said = str(error)
                said = "refused" if path.name in said and word in said else said
            except BaseException:
                said = traceback.format_exc()[-1500:]
            signal.alarm(0)
            print(json.dumps([name, kind, said]), flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
