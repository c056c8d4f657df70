"""One rank of several on one machine: an epoch through `cache=ram`, then what its processes hold. Run by test_cache."""

import json
import multiprocessing
import os
import sys
from pathlib import Path

import torch

import gpuaug
from gpuaug.source.cache import RamCache


def mapped(pid):
    """Bytes of unnamed memory of ours that this process maps: share (PSS) of the cache and of index tensors."""
    found = {"cache": 0, "index": 0}
    kind = None
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first = line.split(maxsplit=5)
        if "-" in first[0] and not first[0].endswith(":"):
            kind = None
            if len(first) == 6 and "memfd:gpuaug" in first[5]:
                begin, end = (int(x, 16) for x in first[0].split("-"))
                kind = "cache" if end - begin > LARGE else "index"
        elif kind and line.startswith("Pss:"):
            found[kind] += int(line.split()[1]) * 1024
    return found


LARGE = 48 << 20


def content(index):
    return index.to_bytes(8, "little") * (500 + index % 100)


def main():
    settings = json.loads(sys.argv[1])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    from gpuaug.read.reader import Reader

    torch.set_num_threads(1)
    torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.5  # else forked workers look for their parent every 5 s
    source = gpuaug.FolderSource(settings["folder"])
    cached = RamCache(max_bytes="64MiB").open(source)
    reader = Reader(cached, num_workers=2, start_method=settings.get("start_method"))

    def epoch(shift):
        numbers = (torch.arange(rank, len(source), ranks) + shift) % len(source)
        tasks = [(c, c * 0, c == c) for c in numbers.split(8)]
        for (task, _, _), batch in zip(tasks, reader.batches(tasks), strict=True):
            assert not batch.faults, batch.faults
            for row, index in enumerate(task.tolist()):
                assert batch.images[row].tobytes() == content(index)
                assert batch.labels[row] == index // (len(source) // 2)

    def barrier(word):
        print(word, flush=True)
        sys.stdin.readline()

    barrier("ready")
    epoch(0)
    barrier("filled")
    for shift in range(ranks):  # every worker of every rank may touch every sample
        epoch(shift)
    barrier("read")
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    found = [mapped(pid) for pid in pids]
    sums = {kind: sum(f[kind] for f in found) for kind in ("cache", "index")}
    print(json.dumps({"pids": pids, "bytes": cached.nbytes, "samples": cached.samples, **sums}), flush=True)
    sys.stdin.readline()
    reader.close()
    cached.close()


if __name__ == "__main__":
    main()
