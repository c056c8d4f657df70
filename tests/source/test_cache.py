"""Encoded bytes in memory: once per machine, never half, bounded, and gone with the processes."""

import contextlib
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from cache_worker import content
from common import ended

import gpuaug
from gpuaug import machine
from gpuaug.errors import ConfigError
from gpuaug.read.reader import Reader
from gpuaug.source import adapt, shared_memory
from gpuaug.source.cache import RamCache

pytestmark = pytest.mark.skipif(not shared_memory.SUPPORTED, reason="unnamed memory is Linux's")
WORKER = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import cache_worker; cache_worker.main()"


class Counted:
    """Samples of `length` bytes; counts how often each was read, in memory that workers share."""

    labels = None

    def __init__(self, number=20, length=1000, label=lambda i: i % 3):
        self.number, self.length, self.label = number, length, label
        self.reads = torch.zeros(number, dtype=torch.int64).share_memory_()

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        self.reads.numpy()[index] += 1
        return self.bytes(index), self.label(index)

    def bytes(self, index):
        return bytes(np.random.default_rng(index).integers(0, 256, self.length + index, dtype=np.uint8))


def status(cached):
    """Per sample 1: stored, 0: not stored, -1: being written."""
    return np.sign(cached._memory.index)


def third(index):
    return index % 3


def test_the_bound_is_half_of_what_the_tightest_control_group_leaves(tmp_path, monkeypatch, caplog):
    """A job's group below the root of the file system, as Slurm makes it, without a namespace of its own."""
    job = tmp_path / "sys" / "slurm" / "job_7"
    job.mkdir(parents=True)
    (tmp_path / "proc").write_text("0::/slurm/job_7/step_0\n")
    for name, text in (
        ("max", f"{96 << 20}"),
        ("current", f"{80 << 20}"),
        ("stat", f"anon 1\ninactive_file {48 << 20}"),
    ):
        (job / f"memory.{name}").write_text(text + "\n")
    left = machine.cgroup_left
    monkeypatch.setattr(machine, "cgroup_left", lambda: left(proc=str(tmp_path / "proc"), root=str(tmp_path / "sys")))
    with caplog.at_level(logging.INFO, "gpuaug"):
        source = RamCache().open(adapt(Counted()))
    assert source.capacity == (96 - 80 + 48) // 2 << 20  # files that were read and can be dropped are no use of memory
    assert "half of the memory available (limit of the control group)" in caplog.text
    monkeypatch.setattr(machine, "memory_left", lambda: None)
    with pytest.raises(ConfigError, match=r"cache\.max_bytes"):
        RamCache().open(adapt(Counted()))


def batches(numbers, size=4):
    return [
        (c, torch.zeros_like(c), torch.ones(len(c), dtype=torch.bool)) for c in torch.as_tensor(numbers).split(size)
    ]


@pytest.mark.parametrize("label", [lambda i: i, lambda i: float(i), lambda i: None, lambda i: [0.5, i],
                                   lambda i: np.float32(i), lambda i: (i, 1.0)])  # fmt: skip
def test_what_was_read_comes_from_memory_the_second_time_with_its_label(label):
    source = Counted(label=label)
    cached = RamCache(max_bytes="1MiB").open(adapt(source))
    for _ in range(3):
        for i in range(len(source)):
            data, found = cached[i]
            assert bytes(data) == source.bytes(i)
            assert type(found) is type(label(i))
            assert found == label(i)
    assert source.reads.tolist() == [1] * len(source)
    assert cached.samples == 20
    assert status(cached).tolist() == [1] * 20
    assert cached.nbytes <= sum(1000 + i for i in range(20)) + 20 * 200  # labels are small


@pytest.mark.parametrize("method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.long)])
def test_workers_of_every_start_method_fill_and_read_one_memory(method):
    source = Counted(label=third)
    cached = RamCache(max_bytes="1MiB").open(adapt(source))
    reader = Reader(cached, num_workers=2, start_method=method)
    for _ in range(2):
        for batch in reader.batches(batches(range(20))):
            for row, index in enumerate(batch.indices.tolist()):
                assert batch.images[row].tobytes() == source.bytes(index)
    reader.close()
    assert source.reads.tolist() == [1] * 20
    assert bytes(cached[7][0]) == source.bytes(7)  # written by a worker, seen here
    assert source.reads.tolist() == [1] * 20


def test_what_does_not_fit_is_read_as_before_and_said_once(caplog):
    source = Counted()
    cached = RamCache(max_bytes=10_000).open(adapt(source))
    with caplog.at_level(logging.INFO, logger="gpuaug"):
        for _ in range(3):
            for i in range(20):
                assert bytes(cached[i][0]) == source.bytes(i)
                cached.warn_if_full()
    held = int(status(cached).sum())
    assert 8 <= held < 20
    assert source.reads.sum() == held + 3 * (20 - held)
    assert cached.nbytes <= 10_000
    said = [r.getMessage() for r in caplog.records if "cache ram is full" in r.getMessage()]
    assert len(said) == 1
    assert f"{held} of 20 samples" in said[0]
    assert "`cache.max_bytes`" in said[0]


def test_what_failed_or_is_empty_is_asked_for_again():
    source = Counted()
    failing = adapt(source)
    answers = {3: [OSError("away"), b"there"], 4: [b"", b"now"]}

    def read(index):
        answer = answers[index].pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer, 0

    cached = RamCache(max_bytes="1MiB").open(failing)
    source.__class__ = type("Failing", (Counted,), {"__getitem__": lambda self, index: read(index)})
    with pytest.raises(OSError, match="away"):
        cached[3]
    assert cached[4][0] == b""
    assert cached.samples == 0
    assert [bytes(cached[i][0]) for i in (3, 4, 3, 4)] == [b"there", b"now", b"there", b"now"]


def test_sources_that_read_many_at_a_time_are_asked_only_for_what_is_missing():
    class Many(Counted):
        def __init__(self):
            super().__init__()
            self.asked = []

        def read_many(self, numbers):
            self.asked.append(list(numbers))
            return [OSError("away") if i == 5 else (self.bytes(i), i) for i in numbers]

    source = Many()
    cached = RamCache(max_bytes="1MiB").open(adapt(source))
    first = cached.read_many([1, 5, 2])
    second = cached.read_many([2, 3, 5, 1])
    assert source.asked == [[1, 5, 2], [3, 5]]
    assert isinstance(first[1], OSError)
    assert isinstance(second[2], OSError)
    assert [bytes(second[r][0]) for r in (0, 1, 3)] == [source.bytes(i) for i in (2, 3, 1)]
    assert RamCache(max_bytes="1MiB").open(adapt(Counted())).read_many is None


def test_a_writer_that_died_leaves_a_sample_that_is_not_there():
    source = Counted()
    cached = RamCache(max_bytes="1MiB").open(adapt(source))
    memory = cached._memory
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    memory.index[6] = -gone.pid  # it took room, and was killed while it wrote
    memory.head[0] += 4096
    assert status(cached)[6] == -1
    assert memory.get(6) is None
    assert bytes(cached[6][0]) == source.bytes(6)
    assert status(cached)[6] == 1  # taken over
    memory.index[7] = -os.getppid()  # alive: it is writing, whoever else reads it keeps out
    assert bytes(cached[7][0]) == source.bytes(7)
    assert status(cached)[7] == -1


def test_killed_writers_never_show_half_a_sample():
    """Processes that only write are killed at random; whatever is published is whole."""
    length, label = 200_000, pickle.dumps(("label",))
    cached = RamCache(max_bytes="256MiB").open(adapt(Counted(number=1000, length=length)))
    memory = cached._memory
    for attempt in range(6):
        pids = []
        for k in range(2):
            if (pid := os.fork()) == 0:
                for index in range(k, 1000, 2):
                    memory.put(index, memoryview(index.to_bytes(8, "little") * (length // 8)), label)
                os._exit(0)
            pids.append(pid)
        time.sleep(0.003 * (attempt + 1))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for index in (memory.index > 0).nonzero()[0].tolist():
            data, found = memory.get(index)
            assert bytes(data) == index.to_bytes(8, "little") * (length // 8)
            assert found == "label"
    with memory.locked():  # nobody who is gone holds it
        pass
    for index in range(1000):
        memory.put(index, memoryview(index.to_bytes(8, "little") * (length // 8)), label)
    assert int((memory.index > 0).sum()) == 1000


def test_threads_and_processes_exclude_each_other():
    cached = RamCache(max_bytes="64MiB").open(adapt(Counted(number=4000, length=0)))
    memory, label = cached._memory, pickle.dumps(())

    def put(first):
        for index in range(first, 4000, 3):
            memory.put(index, memoryview(b"%d" % index), label)
            memory.put(index - first, memoryview(b"%d" % (index - first)), label)

    pid = os.fork()
    if pid == 0:
        try:
            put(0)
            os._exit(0)
        finally:  # not back to the test session
            os._exit(1)
    threads = [threading.Thread(target=put, args=(k,)) for k in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert os.waitpid(pid, 0)[1] == 0
    assert [bytes(memory.get(i)[0]) for i in range(4000)] == [b"%d" % i for i in range(4000)]
    begins = np.sort(memory.index)
    assert np.all(np.diff(begins) >= 24)  # no two records in one place
    assert memory.head[1] == 4000


def memories():
    """Which of our unnamed memories this process has open."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if "memfd:gpuaug" in os.readlink(f"/proc/self/fd/{number}"):
                found.add(os.fstat(int(number)).st_ino)
    return found


def test_the_memory_ends_with_its_last_user():
    others = memories()
    cached = RamCache(max_bytes="1MiB").open(adapt(Counted()))
    assert cached[3]
    view = cached[3][0]
    assert memories() - others
    cached.close()
    assert bytes(view) == Counted().bytes(3)  # what was handed out stays
    assert bytes(cached[3][0]) == Counted().bytes(3)  # and the source is still there
    assert cached.samples == cached.nbytes == 0
    del view
    assert not memories() - others


def test_settings_are_checked_where_they_enter():
    with pytest.raises(ConfigError, match=r"`cache.fill`.*first-use, ahead.*Found: 'behind'"):
        RamCache(fill="behind")
    with pytest.raises(ConfigError, match=r"`cache.max_bytes` must be a size"):
        RamCache(max_bytes="lots")
    pickle.loads(pickle.dumps(RamCache(max_bytes="2GiB")))


# -- in the loader


def built(photos, *overrides):
    cfg = gpuaug.compose("train", [f"source.root={photos}", "augment=flip", "augment.crop.size=32", "batch_size=8",
                                   "device=cpu", "augment.backend=kornia", *overrides])  # fmt: skip
    return gpuaug.build(cfg)


def epoch(loader):
    seen = {}
    for batch in loader:
        for row, index in enumerate(batch.indices.tolist()):
            seen[index] = batch.images[row].clone(), int(batch.labels[row])
    return seen


@pytest.mark.parametrize("more", [[], ["cache.fill=ahead"], ["cache.fill=ahead", "num_workers=0"],
                                  ["cache.max_bytes=200k"]])  # fmt: skip
def test_no_pixel_changes_and_files_are_read_once(photos, tmp_path, more, caplog):
    with built(photos, "num_workers=1") as plain:
        expected = [epoch(plain), epoch(plain)]
    with caplog.at_level(logging.INFO, logger="gpuaug"), built(photos, "cache=ram", "num_workers=2", *more) as loader:
        found = [epoch(loader), epoch(loader)]
        held = loader.pipeline.cache.samples
    for a, b in zip(expected, found, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[i][0], b[i][0]) and a[i][1] == b[i][1] for i in a)
    bounded = "cache.max_bytes=200k" in more
    assert (held < 65) == bounded
    said = [r.getMessage() for r in caplog.records if "cache ram" in r.getMessage()]
    assert sum("is full" in line for line in said) == bounded
    assert any("65 samples in memory" in line for line in said) == ("cache.fill=ahead" in more)


def test_filled_ahead_the_files_may_go(photos, tmp_path):
    import shutil

    root = shutil.copytree(photos, tmp_path / "train")
    with built(root, "cache=ram", "cache.fill=ahead", "num_workers=1", "faults.policy=raise") as loader:
        iterator = iter(loader)
        assert loader.pipeline.cache.samples == 65
        shutil.rmtree(root)
        assert sum(len(batch) for batch in iterator) == 65
        assert len(loader.fetch([3, 60])) == 2


def test_filled_ahead_under_another_default_device(photos):
    with built(photos, "cache=ram", "cache.fill=ahead", "num_workers=0") as loader, torch.device("meta"):
        assert sum(len(batch) for batch in loader) == 65


def test_ahead_is_the_share_of_this_machine_and_later_shares_stay(photos):
    """The first of two machines with one rank each: other samples in every epoch, each of them read once."""
    words = ["source.root=" + str(photos), "augment=flip", "augment.crop.size=32", "batch_size=8", "device=cpu"]
    source = gpuaug.FolderSource(photos)
    read = []

    class Spied:
        indices, labels = None, source.labels
        classes, class_to_idx, num_classes = source.classes, source.class_to_idx, source.num_classes
        key, digest = source.key, source.digest

        def __len__(self):
            return len(source)

        def __getitem__(self, index):
            read.append(index)
            return source[index]

    cfg = gpuaug.compose("train", [*words, "cache=ram", "cache.fill=ahead", "num_workers=0", "last=uneven"])
    with gpuaug.build(cfg, source=Spied(), rank=0, world_size=2) as loader:
        iterator = iter(loader)
        first = set(read)
        assert len(first) == loader.pipeline.cache.samples == 33
        assert {i for batch in iterator for i in batch.indices.tolist()} == first
        second = {i for batch in loader for i in batch.indices.tolist()}
        assert second - first
        assert len(read) == len(set(read)) == loader.pipeline.cache.samples == len(first | second)


# -- ranks


def ranks(settings, number=3, **env):
    processes = []
    for rank in range(number):
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number,
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 20000 + os.getpid() % 20000}  # fmt: skip
        environment = {**os.environ, **{name: str(value) for name, value in world.items()}, **env}
        command, pipe = forked.code(WORKER, json.dumps(settings)), subprocess.PIPE
        processes.append(forked.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment))
    return processes


def answers(processes):
    return [process.stdout.readline().strip() for process in processes]


def go_on(processes):
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()


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
def test_three_ranks_with_two_workers_hold_the_bytes_and_the_index_once(tmp_path, method):
    number = 1200
    for k in range(number):
        path = tmp_path / "train" / "ab"[k // 600] / f"{'x' * 100}{k:05d}.jpg"  # so long that the index counts
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content(k))
    processes = ranks({"folder": str(tmp_path / "train"), "start_method": method})
    try:
        for word in ("ready", "filled", "read"):
            assert answers(processes) == [word] * 3
            go_on(processes)
        reports = [json.loads(line) for line in answers(processes)]
        pids = [pid for r in reports for pid in r["pids"]]
        encoded, names = sum(len(content(k)) for k in range(number)), number * (2 + 105 + 4)
        assert [r["samples"] for r in reports] == [number] * 3
        assert len({r["bytes"] for r in reports}) == 1
        assert reports[0]["bytes"] <= 1.05 * encoded
        assert len(pids) == 9
        assert 0.9 * encoded < sum(r["cache"] for r in reports) <= 1.1 * encoded
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
