"""Index arrays in memory: once per machine, the same for all ranks and workers, and gone with the processes."""

import contextlib
import json
import os
import subprocess
from pathlib import Path

import forked
import pytest
import torch
from common import ended

from gpuaug.source import shared_memory

pytestmark = pytest.mark.skipif(not shared_memory.SUPPORTED, reason="unnamed memory is Linux's")

RANK = """
import json, multiprocessing, os, re, sys
import torch
import gpuaug
from gpuaug import machine
from gpuaug.read.reader import Reader

def index_bytes(pid):  # the share of a process in the memory of index arrays
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", machine.read(f"/proc/{pid}/smaps"), flags=re.M)
    ours = [each for each in maps if "memfd:gpuaug" in each.partition("\\n")[0]]
    return sum(1024 * int(re.search(r"Pss: +(\\d+)", each)[1]) for each in ours)

def barrier(word):
    print(word, flush=True)
    sys.stdin.readline()

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.5  # else workers look for their parent every 5 s
    source = gpuaug.FolderSource(sys.argv[1])
    reader = Reader(source, num_workers=2, start_method=sys.argv[2])
    barrier("ready")
    numbers = torch.arange(len(source)).split(100)
    for (task, batch) in zip(numbers, reader.batches([(c, c * 0, c == c) for c in numbers])):
        assert not batch.faults, batch.faults
        assert [int(bytes(image)) for image in batch.images] == task.tolist()
        assert batch.labels.tolist() == [i // 600 for i in task.tolist()]
    barrier("read")
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    barrier(json.dumps({"pids": pids, "index": sum(map(index_bytes, pids))}))
"""


def ranks(*words, number=3):
    processes = []
    for rank in range(number):
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number,
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 20000 + os.getpid() % 20000}  # fmt: skip
        environment = {**os.environ, **{name: str(value) for name, value in world.items()}}
        command, pipe = forked.code(RANK, *words), subprocess.PIPE
        processes.append(forked.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment))
    return processes


def left_behind(pids):
    """Names in /dev/shm of ours; torch's hold the number of their process. Python's semaphores have their sweeper."""
    return [x for x in os.listdir("/dev/shm") if "gpuaug" in x or any(f"_{pid}_" in x for pid in pids)]


def sockets():
    """Names of the abstract sockets of this machine by their inodes."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {fields[6]: fields[7] for fields in lines if len(fields) > 7 and fields[7].startswith("@gpuaug")}


def claimed(pids):
    """Those that these processes hold."""
    found, names = set(), sockets()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                found |= {name for inode, name in names.items() if os.readlink(link) == f"socket:[{inode}]"}
    return found


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_three_ranks_with_two_workers_hold_the_index_once(tmp_path, method):
    number = 1200
    for k in range(number):
        path = tmp_path / "ab"[k // 600] / f"{'x' * 100}{k:05d}.jpg"  # so long that the ranks share the names
        path.parent.mkdir(exist_ok=True)
        path.write_text(str(k))
    processes = ranks(tmp_path, method)
    try:
        for word in ("ready", "read"):
            for process in processes:
                assert process.stdout.readline().strip() == word
            for process in processes:
                process.stdin.write("\n")
                process.stdin.flush()
        reports = [json.loads(process.stdout.readline()) for process in processes]
        pids = [pid for r in reports for pid in r["pids"]]
        names = number * (2 + 105 + 4)
        assert len(pids) == 9
        assert 0.5 * names < sum(r["index"] for r in reports) <= 1.1 * names + 9 * 4096
        sockets_of_ranks = claimed(pids)
        assert sockets_of_ranks
        for rank, process in enumerate(processes):  # the first of them owns the name
            process.kill()
            process.wait()
            assert not left_behind(pids), rank
        assert ended(pids)  # workers notice that their parent is gone
        assert not sockets_of_ranks & set(sockets().values())
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_tensors_of_equal_values_are_one_and_others_are_not(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", str(os.getpid()))
    first, again, other = (
        shared_memory.share(torch.arange(10_000)),
        shared_memory.share(torch.arange(10_000)),
        shared_memory.share(torch.zeros(9)),
    )
    assert torch.equal(first, torch.arange(10_000))
    assert first.dtype == torch.int64
    first.numpy()[5] = 77  # never done; shows that it is one memory
    assert again[5] == 77
    assert torch.equal(other, torch.zeros(9))
    assert other.is_shared()
    del first
    assert shared_memory.share(torch.arange(10_000))[5] == 5  # the name went with its owner; what others have stays
    assert again[5] == 77
