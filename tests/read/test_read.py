"""Reading: packed batches, faults, workers that die, hang, raise, and are left in the middle."""

import errno
import gc
import math
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import forked
import numpy as np
import pytest
import torch
from common import METHODS, started_by
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset

import gpuaug.read.samples
from gpuaug.errors import ConfigError, DataError, ReadError, SourceError
from gpuaug.read.order import EpochOrder, Ordered, Sequential, Shuffle
from gpuaug.read.reader import Reader
from gpuaug.read.ring import Ring
from gpuaug.source import FolderSource, TableSource


def content(i):
    return b"%d:" % i + b"x" * (i * 37 % 101)


class Bytes:
    """Sample i as bytes; ``act`` is called first, with the source and i."""

    def __init__(self, count, act=None, label=lambda i: i % 5, wrap=bytes):
        self.count, self.act, self.target, self.wrap = count, act, label, wrap

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        if self.act is not None:
            self.act(i)
        return self.wrap(content(i)), self.target(i)


def plan(source, batch_size=4, epoch=0, order=Shuffle, **more):
    return EpochOrder(Ordered(order().order(0, epoch, source)), batch_size=batch_size, **more)


def read(batch):
    return [image.tobytes() for image in batch.images]


def check(batches, expected, label=lambda i: i % 5):
    """The batches hold what the order said, and nothing else."""
    batches = list(batches)
    assert len(batches) == len(expected)
    for batch, (indices, repeats, valid) in zip(batches, expected, strict=True):
        assert torch.equal(batch.indices, indices)
        assert torch.equal(batch.repeats, repeats)
        assert torch.equal(batch.valid, valid)
        assert batch.labels.dtype == torch.int64
        assert all(image.dtype == np.uint8 for image in batch.images)
        assert read(batch) == [content(i) for i in indices.tolist()]
        assert batch.labels.tolist() == [label(i) for i in indices.tolist()]
        assert batch.faults == ()


@pytest.fixture
def reading():
    """Makes readers and closes them; no process is left."""
    readers, others = [], set(multiprocessing.active_children())

    def make(source, **settings):
        readers.append(Reader(source, **{"timeout": 60.0, **settings}))
        return readers[-1]

    yield make
    for reader in readers:
        reader.close()
    deadline = time.monotonic() + 30  # on a busy machine, a killed process takes longer than `TIMEOUT_S` to vanish
    while set(multiprocessing.active_children()) - others and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(multiprocessing.active_children()) - others


@given(total=st.integers(1, 30), batch_size=st.integers(1, 40), last=st.sampled_from(["uneven", "pad", "drop"]))
@settings(max_examples=30, deadline=None)
def test_batches_hold_what_the_order_says(total, batch_size, last):
    source = Bytes(total)
    expected = plan(source, batch_size, last=last)
    check(Reader(source).batches(expected), expected)


def test_workers_change_nothing(reading):
    source = Bytes(31)
    reader = reading(source, num_workers=2)
    pids = set()
    for epoch in range(3):
        expected = plan(source, epoch=epoch)
        check(reader.batches(expected), expected)
        pids |= {worker.pid for worker in multiprocessing.active_children()}
    assert len(pids) == 2  # they persist
    reader.close()
    assert not multiprocessing.active_children()
    expected = plan(source, 64)
    check(reader.batches(expected), expected)  # and come back


@pytest.mark.parametrize("method", METHODS)
def test_start_methods(reading, method, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(3):
            (tmp_path / name / f"{i}.jpg").write_bytes(name.encode() * (i + 1))
    (tmp_path / "b" / "0.jpg").unlink()
    (tmp_path / "b" / "0.jpg").symlink_to(tmp_path / "nowhere")
    folder = FolderSource(tmp_path, subset=[1, 3, 5])
    reader = reading(folder, **started_by(method))
    list(reader.batches(plan(folder, 1)))
    (batch,) = reader.batches(plan(folder, 8, order=Sequential))
    assert batch.indices.tolist() == [1, 3, 5]
    assert batch.labels.tolist() == [0, 1, 1]
    assert read(batch) == [b"aa", b"", b"bbb"]
    assert batch.nbytes == 5
    (fault,) = batch.faults
    assert (fault.row, fault.stage, fault.size) == (1, "read", 0)
    assert "FileNotFoundError" in fault.reason


def test_the_memory_of_a_batch_is_reused_when_nothing_uses_it(reading):
    """And only then: not while an image of the batch, or a part of it, is alive."""
    source = Bytes(120, wrap=lambda data: data + bytes(1 << 20))
    reader = reading(source, num_workers=1)
    faults, parts = [], []
    for batch in reader.batches(plan(source, 2, order=Sequential)):
        assert not max(image[1000::4096].max() for image in batch.images)  # touches every page
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        if len(faults) in (3, 30):
            parts.append((batch.images[1][:90], content(int(batch.indices[1]))))
        del batch
    assert faults[-1] - faults[-21] < 20 * 16  # a new mapping of 2 MiB gives at least 32 page faults per batch
    for part, expected in parts:
        assert part.tobytes().startswith(expected[:90])


def test_slots_grow_with_the_batches_and_large_ones_return_their_memory(monkeypatch):
    monkeypatch.setattr("gpuaug.read.ring.KEPT_BYTES", 4 << 20)
    ring, rng = Ring(2), np.random.default_rng(0)

    def held():  # bytes
        return os.fstat(ring._fd).st_blocks * 512

    for size in (1, 5000, 3 << 20, 9 << 20, 100):
        pieces = [rng.integers(0, 256, n, dtype=np.uint8).tobytes() for n in (size // 3, 0, size - size // 3)]
        expected, slot = b"".join(pieces), ring.take()
        assert ring.write(slot, pieces) == size
        assert not pieces
        other, view = ring.take(), ring.lease(slot, size)
        ring.write(other, [b"other" * 99])
        assert view.tobytes() == expected
        assert held() >= size
        ring.release(other)
        part = view[-1:]
        del view
        assert ring.free == 1
        assert part[0] == expected[-1]
        del part
        assert ring.free == 2
        assert sys.platform != "linux" or held() <= 8 << 20
    assert not ring.is_set()
    ring.set()
    assert ring.is_set()


@pytest.mark.parametrize("read_only", [True, False])
def test_without_workers_only_memory_that_may_change_is_copied(read_only):
    memory = np.frombuffer(b"".join(map(content, range(9))), dtype=np.uint8).copy()
    view = memory.view()
    view.flags.writeable = not read_only
    ends = np.cumsum([len(content(i)) for i in range(9)])
    source = [(view[end - len(content(i)) : end], i % 5) for i, end in enumerate(ends)]
    batches = list(Reader(source).batches(plan(source)))
    assert all(np.shares_memory(image, memory) == read_only for batch in batches for image in batch.images)
    memory[:] = memory if read_only else 0  # the next sample in the same memory
    check(batches, plan(source))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_reading_leaks_neither_descriptors_nor_memory(reading):
    source = Bytes(64)
    reader = reading(source, num_workers=2)

    def descriptors():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    found = []
    for _ in range(6):
        for _batch in reader.batches(plan(source, 2)):
            pass
        found.append(descriptors())
    assert found[-1] <= found[1] + 2
    held = list(reader.batches(plan(source, 4)))
    assert descriptors() < found[-1] + 2 * len(held) + 5
    check(held, plan(source, 4))  # still whole after the workers went on


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_left_in_the_middle_leaves_nothing_behind(reading, num_workers):
    source = Bytes(40)
    reader = reading(source, num_workers=num_workers)
    for epoch, taken in enumerate((0, 1, 3, 0)):
        batches = reader.batches(plan(source, 3, epoch=epoch))
        for _ in range(taken):
            next(batches)
        del batches
    first, second = reader.batches(plan(source, 3, epoch=7)), None
    next(first)
    second = reader.batches(plan(source, 5, epoch=8))
    assert list(first) == []  # ended by the second one
    check(second, plan(source, 5, epoch=8))
    assert list(second) == []


def test_a_new_epoch_does_not_wait_for_what_was_asked_ahead(reading, monkeypatch):
    monkeypatch.setattr("gpuaug.read.workers.TIMEOUT_S", 0.1)
    read, gate = torch.zeros(60, dtype=torch.int64).share_memory_(), multiprocessing.Event()

    def held(i):
        read[i] += 1
        if 2 <= i < 50:
            assert gate.wait(100)

    source = Bytes(60, held)
    reader = reading(source, num_workers=1, prefetch_factor=4)
    next(reader.batches(plan(source, 2, order=Sequential)))
    expected = [batch for batch in plan(source, 2, order=Sequential) if batch[0][0] >= 50]
    batches = reader.batches(expected)  # from here on nobody wants the four batches that were asked for ahead
    gate.set()
    check(batches, expected)
    assert read[:2].tolist() == [1, 1]
    assert read[2] <= 1  # was under way
    assert not read[3:50].any()
    gate.clear()
    begin = time.monotonic()
    next(reader.batches(plan(source, 2, order=Sequential)))
    reader.close()
    assert time.monotonic() - begin < 60  # the read under way takes 100 s


@pytest.mark.parametrize("num_workers", [0, 1])
def test_threads_read_a_source_that_allows_it_and_whose_reads_wait(reading, num_workers):
    """Samples 1 to 8 of a batch wait until four of them are being read, so fewer threads would wait forever."""
    together = threading.Barrier(4)
    errors = {14: FileNotFoundError("gone"), 17: DataError("key", 17, "read", "torn")}

    def wait(i):
        time.sleep(0.01) if i % 9 == 0 else together.wait(60)
        if i in errors:
            raise errors[i]

    source = Bytes(18, wait)
    source.thread_safe = True
    source.targets = [i % 5 for i in range(18)]
    reader = reading(source, num_workers=num_workers, read_threads=4)
    first, second = reader.batches(plan(source, 9, order=Sequential))
    check([first], plan(source, 9, order=Sequential)[:1])
    assert [fault.row for fault in second.faults] == [5, 8]
    assert second.labels.tolist() == [i % 5 for i in range(9, 18)]
    for row in range(8):
        assert second.images[row].tobytes() == (b"" if row == 5 else content(9 + row))
    source.act = fail_with({3: KeyError("later"), 2: KeyError("first")})
    with pytest.raises(KeyError, match="first"):
        list(Reader(source).batches(plan(source, 9, order=Sequential)))


@pytest.mark.parametrize("settings", [{}, {"thread_safe": False}, {"thread_safe": True, "threads": 1}])
def test_a_source_that_does_not_allow_threads_is_read_by_one(settings):
    inside, most = [], []

    def act(i):
        inside.append(i)
        time.sleep(0.002)
        most.append(len(inside))
        inside.remove(i)

    source = Bytes(12, act)
    if "thread_safe" in settings:
        source.thread_safe = settings["thread_safe"]
    check(Reader(source, read_threads=settings.get("threads", 16)).batches(plan(source, 6)), plan(source, 6))
    assert set(most) == {1}


def fail_with(errors):
    def act(i):
        if i in errors:
            raise errors[i]

    return act


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_cannot_be_read_is_a_fault_of_its_row(reading, num_workers):
    errors = {
        1: FileNotFoundError(errno.ENOENT, "gone"),
        2: ConnectionResetError("reset"),
        5: TimeoutError("too late"),
        6: DataError("key", 6, "read", "torn"),
        7: OSError(errno.EIO, "x" * 5000),
    }
    source = Bytes(8, fail_with(errors), label=lambda i: 10 + i)
    source.targets = [20 + i for i in range(8)]
    first, second = reading(source, num_workers=num_workers).batches(plan(source, 4, order=Sequential))
    assert [fault.row for fault in first.faults] == [1, 2]
    assert [fault.row for fault in second.faults] == [1, 2, 3]
    assert all(fault.stage == "read" and len(fault.reason) <= 500 for fault in first.faults + second.faults)
    assert "gone" in first.faults[0].reason
    assert first.faults[1].reason == "ConnectionResetError: reset"
    assert second.faults[0].reason.startswith("TimeoutError")
    for batch in (first, second):
        bad = {fault.row for fault in batch.faults}
        for row, i in enumerate(batch.indices.tolist()):
            assert batch.images[row].tobytes() == (b"" if row in bad else content(i))
            assert int(batch.labels[row]) == (20 if row in bad else 10) + i  # known without reading
    assert first.valid.all()  # what a fault means is for the loader to say


def test_a_read_is_tried_again_where_that_may_help():
    tries = {}

    def act(i):
        tries[i] = tries.get(i, 0) + 1
        if i == 1 and tries[i] < 3:
            raise OSError(errno.EIO, "stumbled")
        if i == 2:
            raise ConnectionError("down")
        if i == 3:
            raise PermissionError(errno.EACCES, "no")
        if i == 4:
            raise OSError(errno.EINVAL, "not a regular file")

    source = Bytes(5, act)
    begin = time.monotonic()
    (batch,) = Reader(source).batches(plan(source, 5, order=Sequential))
    assert time.monotonic() - begin > 0.2  # it pauses between them
    assert tries == {0: 1, 1: 3, 2: 3, 3: 1, 4: 1}
    assert [fault.row for fault in batch.faults] == [2, 3, 4]
    assert batch.images[1].tobytes() == content(1)


def test_labels_that_a_source_knows_are_kept_where_bytes_are_not(reading, tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.jpg").write_bytes(content(i))
    (tmp_path / "none.csv").write_text("path,label\n0.jpg,3\ngone.jpg,5\n")
    (tmp_path / "several.csv").write_text("path,a,b\n0.jpg,1,0.5\ngone.jpg,0,0.25\n")
    for source, expected in (
        (TableSource(tmp_path / "none.csv"), torch.tensor([5, 3])),
        (TableSource(tmp_path / "several.csv", label=["a", "b"]), torch.tensor([[0, 0.25], [1, 0.5]])),
        (TableSource(tmp_path / "several.csv", label="b"), torch.tensor([0.25, 0.5])),
        (TableSource(tmp_path / "several.csv", label="none"), None),
    ):
        for offered in (source, Subset(source, [1, 0])):
            one = torch.tensor([1]), torch.tensor([0]), torch.tensor([True])
            two = torch.tensor([1, 0]), torch.tensor([0, 0]), torch.tensor([True, True])
            alone, both = Reader(offered).batches([one, two])
            assert [fault.row for fault in both.faults] == [0]
            if expected is None:
                assert alone.labels is both.labels is None
            else:
                assert torch.equal(alone.labels, expected[:1])
                assert torch.equal(both.labels, expected)
                assert alone.labels.dtype == both.labels.dtype == expected.dtype


@pytest.mark.parametrize("how", ["source[i]", "read_many", "threads"])
def test_large_images_of_a_batch_are_bounded(monkeypatch, how):
    monkeypatch.setattr(gpuaug.read.samples, "SLOW_S", -1.0)
    monkeypatch.setattr(gpuaug.read.samples, "LARGE", 100)
    monkeypatch.setattr(gpuaug.read.samples, "LARGEST_BATCH", 500)
    monkeypatch.setattr(gpuaug.read.samples, "LARGEST_IMAGE", 400)
    monkeypatch.setattr("gpuaug.source.local.LARGEST_BATCH", 500)
    monkeypatch.setattr("gpuaug.source.local.LARGEST_IMAGE", 400)
    sizes = [100, 300, 401, 201, 200, 101, 100]

    class Sized(Bytes):
        def __getitem__(self, i):
            return bytearray(sizes[i]), i

    source = Sized(len(sizes))
    source.thread_safe = how == "threads"
    if how == "read_many":
        source.read_many = lambda numbers: [source[i] for i in numbers]
    (batch,) = Reader(source).batches(plan(source, batch_size=7, order=Sequential))
    assert [*map(len, batch.images)] == [100, 300, 0, 0, 200, 0, 100]
    assert [fault.row for fault in batch.faults] == [2, 3, 5]
    assert "401 bytes, more than 400" in batch.faults[0].reason
    assert "300 of at most 500" in batch.faults[1].reason
    assert "batch_size" in batch.faults[1].reason
    source.mapped = True  # their size is that of their maker
    (batch,) = Reader(source).batches(plan(source, batch_size=7, order=Sequential))
    assert not batch.faults


def test_a_timeout_that_nothing_waits_for_is_told(caplog):
    with caplog.at_level("INFO", "gpuaug"):
        Reader(Bytes(1))
        Reader(Bytes(1), timeout=math.inf)
        Reader(Bytes(1), timeout=5.0, num_workers=1)
        assert "timeout" not in caplog.text
        Reader(Bytes(1), timeout=5.0)
    assert "`timeout` of 5 s has no effect: num_workers=0" in caplog.text


class OwnError(Exception):
    def __init__(self, what, number):
        super().__init__(what)
        self.number = number


class Awkward(Exception):
    def __init__(self, one, two):
        super().__init__("only one")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_other_errors_arrive_with_their_own_type(reading, num_workers):
    error = KeyError("name")
    source = Bytes(20, fail_with({7: error}))
    reader = reading(source, num_workers=num_workers)
    batches = reader.batches(plan(source, 2, order=Sequential))
    assert [next(batches).indices.tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(type(error)) as raised:
        next(batches)
    assert raised.value.args == error.args
    if num_workers:
        assert "in act" in raised.value.__notes__[0]  # the worker's traceback
    assert list(batches) == []
    good = [batch for batch in plan(source, 2, order=Sequential) if 7 not in batch[0]]
    check(reader.batches(good), good)


def test_errors_that_do_not_pickle_still_say_what_happened(reading):
    source = Bytes(4, fail_with({1: OwnError("mine", 5), 3: Awkward(1, 2)}))
    reader = reading(source, num_workers=1)
    for number, name in ((1, "OwnError: mine"), (3, "Awkward: only one")):
        with pytest.raises(RuntimeError) as raised:
            list(reader.batches([tuple(torch.tensor([number]) for _ in range(3))]))
        assert name in raised.value.__notes__[0]


def test_an_error_of_the_order_arrives(reading):
    def broken():
        yield next(iter(plan(range(4), 2)))
        raise LookupError("the order")

    for num_workers in (0, 1):
        batches = reading(Bytes(4), num_workers=num_workers).batches(broken())
        check([next(batches)], plan(range(4), 2)[:1])  # the batch before the error
        with pytest.raises(LookupError, match="the order"):
            next(batches)


@pytest.mark.parametrize("code", [signal.SIGKILL, "exit"])
def test_a_dead_worker_is_an_error_at_once(reading, code):
    def act(i):
        if i == 9:
            os._exit(3) if code == "exit" else os.kill(os.getpid(), code)

    source = Bytes(20, act)
    reader = reading(source, num_workers=2, timeout=600.0)
    batches = reader.batches(plan(source, 2, order=Sequential))
    begin = time.monotonic()
    with pytest.raises(ReadError, match="exit code 3" if code == "exit" else f"signal {int(code)}") as raised:
        list(batches)
    assert time.monotonic() - begin < 100
    assert "begins with sample" in str(raised.value)
    assert "num_workers" in str(raised.value) or code == "exit"
    assert not multiprocessing.active_children()
    good = [batch for batch in plan(source, 2, order=Sequential) if 9 not in batch[0]]
    check(reader.batches(good), good)  # with new workers


def hang(i):
    if i == 5:
        time.sleep(600)


def test_silence_is_an_error_in_time(reading):
    source = Bytes(20, hang)
    reader = reading(source, num_workers=2)
    found = []

    def consume():
        try:
            for batch in reader.batches(plan(source, 2, order=Sequential)):
                found.append(batch)
                if len(found) == 2:  # the next one never comes
                    assert reader._workers.timeout == 60.0
                    reader._workers.timeout = 0.5
        except ReadError as error:
            found.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    consumer.join(100)
    assert not consumer.is_alive()  # the read takes 600 s
    check(found[:2], [plan(source, 2, order=Sequential)[k] for k in (0, 1)])
    assert isinstance(found[-1], ReadError)
    assert "gave no batch for 0.5 s" in str(found[-1])
    assert "begins with sample 4 ('4')" in str(found[-1])
    assert "raise `timeout`" in str(found[-1])


def test_an_iterator_that_is_ended_while_workers_are_busy_disturbs_no_later_one(reading):
    opened = torch.zeros(1).share_memory_()  # no Event: a worker that waits for it may be killed, and `set` would hang

    busy = torch.zeros(1).share_memory_()

    def held(i):
        while i >= 2 and not opened:
            busy.fill_(1)
            time.sleep(0.01)

    source = Bytes(40, held)
    reader = reading(source, num_workers=1)
    first = reader.batches(plan(source, 2, order=Sequential))
    next(first)
    while not busy:
        time.sleep(0.01)
    del first
    second, left = reader.batches(plan(source, 2, order=Sequential)), []
    consumer = threading.Thread(target=lambda: left.extend(second))
    consumer.start()  # the worker is still busy with the first iterator
    time.sleep(1)
    third = reader.batches(plan(source, 3))
    consumer.join(100)
    assert not left
    opened.fill_(1)
    check(third, plan(source, 3))


@pytest.mark.parametrize("thread_safe", [False, True])
def test_close_does_not_wait_for_a_read_that_hangs(reading, monkeypatch, thread_safe):
    monkeypatch.setattr("gpuaug.read.workers.TIMEOUT_S", 0.1)
    monkeypatch.setattr(gpuaug.read.samples, "SLOW_S", -1.0)
    source = Bytes(20, hang)
    source.thread_safe = thread_safe
    reader = reading(source, num_workers=1)
    found = []
    consumer = threading.Thread(target=lambda: found.extend(reader.batches(plan(source, 2, order=Sequential))))
    consumer.start()
    while len(found) < 2:
        assert consumer.is_alive()
        time.sleep(0.01)
    time.sleep(0.3)
    begin = time.monotonic()
    reader.close()
    consumer.join(100)
    assert not consumer.is_alive()
    assert time.monotonic() - begin < 100  # the read takes 600 s
    assert len(found) == 2


def test_a_worker_that_dies_raises_nothing_in_the_main_thread(reading):
    from torch.utils.data import DataLoader

    for _ in DataLoader(range(4), num_workers=1):  # installs DataLoader's signal handler
        pass
    source, others = Bytes(40), set(multiprocessing.active_children())
    reader = reading(source, num_workers=1)
    found, begun, go_on = [], threading.Event(), threading.Event()

    def consume():
        batches = reader.batches(plan(source, 2, order=Sequential))
        next(batches)
        begun.set()
        go_on.wait(100)
        try:
            list(batches)
        except ReadError as error:
            found.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    assert begun.wait(100)
    (victim,) = set(multiprocessing.active_children()) - others
    os.kill(victim.pid, signal.SIGKILL)
    # ended, and nobody has asked how: DataLoader's signal handler would still find it
    os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOWAIT)
    time.sleep(0.1)
    go_on.set()
    consumer.join(100)
    assert "signal 9" in str(found[0])


def test_iterators_that_threads_begin_at_once_differ_in_number():
    """With the same number, both would go on, and get each other's batches."""
    reader, before = Reader(Bytes(9)), sys.getswitchinterval()

    def begin(_):
        return [reader.batches(()).gi_frame.f_locals["generation"] for _ in range(2000)]

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            numbers = [number for some in pool.map(begin, range(4)) for number in some]
    finally:
        sys.setswitchinterval(before)
    assert len(set(numbers)) == 8000


def test_a_process_that_ends_while_a_thread_reads():
    code = """
import threading, time, torch
from torch.autograd.profiler import record_function
from gpuaug.read.reader import Reader

class Source:
    def __len__(self):
        return 100
    def __getitem__(self, i):
        time.sleep(1000 if i == 9 else 0)
        return b"ab", i

def slowly(*args, exit=record_function.__exit__):  # DataLoader's iterator calls it; torch releases the GIL
    if args[1] is not None:
        torch.mm(ones, ones)
    return exit(*args)

record_function.__exit__, ones = slowly, torch.ones(1500, 1500)

def consume():
    for batch in reader.batches((torch.tensor([k]), torch.zeros(1).long(), torch.ones(1).bool()) for k in range(100)):
        seen.append(batch)

reader, seen = Reader(Source(), num_workers=1), []
threading.Thread(target=consume, daemon=True).start()
while len(seen) < 9:
    time.sleep(0.01)
"""
    done = forked.run(forked.code(code))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_worker_of_another_loader_cannot_have_workers(reading, monkeypatch):
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    source = Bytes(8)
    with pytest.raises(ReadError, match=r"could not be started: daemonic.*; 0 reads in this process"):
        next(reading(source, num_workers=1).batches(plan(source)))


def test_threads_start_their_workers_in_turn():
    """Packages such as filelock, which torch imports, refuse a fork during another thread's fork."""
    code = """
import os, threading, time, torch
from gpuaug.read.reader import Reader

forking, most = [], []

def enter():
    forking.append(1)
    most.append(len(forking))

def leave():
    time.sleep(0.01)  # other threads run
    forking.pop()

def read():
    reader = Reader([(b"ab", 0)], num_workers=2, start_method="fork")
    begin.wait()
    for _ in reader.batches([(torch.tensor([0]), torch.zeros(1).long(), torch.ones(1).bool())]):
        pass

os.register_at_fork(before=enter, after_in_parent=leave)
begin = threading.Barrier(4)
threads = [threading.Thread(target=read) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(max(most), len(most))
"""
    assert forked.run(forked.code(code)).stdout == "1 8\n"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_default_device_and_inference_mode_change_nothing(reading, num_workers, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.jpg").write_bytes(content(0))
    torch.set_default_device("meta")
    try:
        with torch.inference_mode():
            source = FolderSource(tmp_path)
            reader = reading(source, num_workers=num_workers)
            expected = plan(source, 3, last="pad")
            check(reader.batches(expected), expected)
        check(reader.batches(expected), expected)
        source = Many(4)
        source.targets = [i % 5 for i in range(4)]
        expected = plan(source, 3)
        check(reading(source, num_workers=num_workers).batches(expected), expected)
    finally:
        torch.set_default_device(None)


LABELS = (
    (lambda i: np.int32(i), torch.int64, [0, 1, 2]),
    (lambda i: torch.tensor(i), torch.int64, [0, 1, 2]),
    (lambda i: i > 0, torch.int64, [0, 1, 1]),
    (lambda i: i / 2, torch.float32, [0, 0.5, 1]),
    (lambda i: [i, 0.5], torch.float32, [[0, 0.5], [1, 0.5], [2, 0.5]]),
    (lambda i: np.array([i]), torch.float32, [[0], [1], [2]]),
    (lambda i: torch.tensor([i, i]), torch.float32, [[0, 0], [1, 1], [2, 2]]),
    (lambda i: None, None, None),
)
ITEMS = (
    (np.zeros((2, 2, 3), np.uint8), 0), (np.zeros(4, np.float32), 0), ("text", 0), (b"ab",), b"ab", None, (None, 0),
    (torch.zeros(3, 2, 2), 1),
)  # fmt: skip


def test_labels_and_bytes_in_many_forms():
    for label, dtype, expected in LABELS:
        source = Bytes(3, label=label)
        (batch,) = Reader(source).batches(plan(source, order=Sequential))
        assert (None if batch.labels is None else batch.labels.tolist()) == expected
        assert (None if batch.labels is None else batch.labels.dtype) == dtype
    for wrap in (bytearray, memoryview, lambda b: np.frombuffer(b, np.uint8), lambda b: torch.tensor(list(b)).byte()):
        source = Bytes(6, wrap=wrap)
        check(Reader(source).batches(plan(source)), plan(source))
    (batch,) = Reader([(b"", 3), (b"ab", 4)]).batches(plan([0, 1], 2, order=Sequential))
    assert [(fault.row, fault.reason) for fault in batch.faults] == [(0, "0 bytes")]
    assert batch.labels.tolist() == [3, 4]
    assert read(batch) == [b"", b"ab"]


def test_items_that_are_not_encoded_images(reading):
    for item in ITEMS:
        with pytest.raises(SourceError, match=r"`source\[0\]` must give \(bytes, label\)"):
            list(Reader([item]).batches(plan([item])))
    with pytest.raises(SourceError, match=r"`source\[0\]` must give \(bytes, label\)"):
        list(reading([None], num_workers=1).batches(plan([None])))


def test_labels_of_samples_that_failed():
    one = {"act": fail_with({1: FileNotFoundError()})}
    for label, expected in (
        (lambda i: i + 1, [1, 0, 3]),
        (lambda i: [i, 1.0], [[0, 1], [0, 0], [2, 1]]),
        (lambda i: None, None),
    ):
        source = Bytes(3, label=label, **one)
        reader = Reader(source)
        (batch,) = reader.batches(plan(source, order=Sequential))
        assert batch.labels is None if expected is None else batch.labels.tolist() == expected
        only_bad = [tuple(x[1:2] for x in plan(source, order=Sequential)[0])]
        (bad,) = reader.batches(only_bad)
        assert bad.labels is None if expected is None else bad.labels.tolist() == [expected[1]]
    all_bad = Bytes(2, fail_with({0: FileNotFoundError(), 1: FileNotFoundError()}))
    (batch,) = Reader(all_bad).batches(plan(all_bad))
    assert len(batch.faults) == 2
    assert batch.labels.tolist() == [0, 0]
    assert read(batch) == [b"", b""]
    for label in (lambda i: "cat", lambda i: [0] * (i + 1), lambda i: None if i else 1, lambda i: np.zeros((2, 2))):
        source = Bytes(3, label=label)
        with pytest.raises(SourceError, match="labels of a batch"):
            list(Reader(source).batches(plan(source)))


class Many(Bytes):
    """Reads a batch at once, as remote sources do."""

    def __init__(self, count, failing=()):
        super().__init__(count, label=lambda i: i % 5)
        self.failing, self.asked = dict(failing), []

    def __getitem__(self, i):
        raise AssertionError("read_many is there")

    def read_many(self, indices):
        self.asked.append(list(indices))
        return [self.failing.get(i, (content(i), i % 5)) for i in indices]


def test_read_many():
    source = Many(10)
    check(Reader(source).batches(plan(source)), plan(source))
    assert sorted(map(len, source.asked)) == [2, 4, 4]
    source = Many(4, {1: ConnectionError("down"), 2: FileNotFoundError("gone")})
    (batch,) = Reader(source).batches(plan(source, order=Sequential))
    assert source.asked == [[0, 1, 2, 3], [1], [1]]
    assert [(fault.row, fault.reason) for fault in batch.faults] == [
        (1, "ConnectionError: down"),
        (2, "FileNotFoundError: gone"),
    ]
    with pytest.raises(KeyError):
        list(Reader(Many(4, {1: KeyError("x")})).batches(plan(source)))
    source.read_many = lambda indices: []
    with pytest.raises(SourceError, match="must give 4 items"):
        list(Reader(source).batches(plan(source)))

    def refuse(indices):
        raise ConnectionRefusedError("refused")

    source.read_many = refuse
    (batch,) = Reader(source).batches(plan(source))
    assert len(batch.faults) == 4


@pytest.mark.skipif("spawn" not in METHODS, reason="needs spawn")
def test_a_source_that_cannot_be_pickled(reading):
    with pytest.raises(SourceError, match="cannot be sent to worker processes"):
        list(reading(Bytes(3), num_workers=1, start_method="spawn").batches(plan(Bytes(3))))


def test_settings_that_cannot_work():
    for bad in (
        {"num_workers": -1},
        {"timeout": 0},
        {"timeout": math.nan},
        {"prefetch_factor": 0},
        {"start_method": "thread"},
    ):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            Reader(Bytes(3), **bad)
    check(Reader(Bytes(3), timeout=math.inf).batches(plan(Bytes(3))), plan(Bytes(3)))
    with pytest.raises(SourceError):
        Reader(iter([]))


def test_an_interrupt_ends_workers(reading):
    source = Bytes(20, hang)
    reader = reading(source, num_workers=1)
    batches = reader.batches(plan(source, 2, order=Sequential))
    next(batches)
    next(batches)
    main = threading.get_ident()

    def interrupt():
        while "_try_get_data" not in "".join(traceback.format_stack(sys._current_frames()[main])):
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt, daemon=True)
    with pytest.raises(KeyboardInterrupt):
        interrupter.start()
        next(batches)
    interrupter.join()
    assert not multiprocessing.active_children()
    good = [batch for batch in plan(source, 2, order=Sequential) if 5 not in batch[0]]
    check(reader.batches(good), good)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.long
def test_workers_do_not_grow(reading, tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    for i in range(20_000):
        (folder / f"a_rather_long_name_for_a_file_{i:06}.jpg").symlink_to("/dev/null/x")
    first = folder / "a_rather_long_name_for_a_file_000000.jpg"
    first.unlink()
    first.write_bytes(b"one")
    source = FolderSource(tmp_path)
    reader = reading(source, num_workers=1, start_method="fork")

    def private():
        (worker,) = multiprocessing.active_children()
        with open(f"/proc/{worker.pid}/smaps_rollup") as lines:
            return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))  # KiB

    found = []
    for epoch in range(4):
        for _batch in reader.batches(plan(source, 200, epoch=epoch)):
            pass
        found.append(private())
    assert found[-1] - found[1] < 1024, found
