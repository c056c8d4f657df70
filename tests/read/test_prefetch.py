"""A buffer of encoded batches: bounded in bytes, in order, full up to the bound, and gone when it is closed."""

import json
import os
import threading
import time

import forked
import numpy as np
import pytest
import torch

import gpuaug
from gpuaug.batch import EncodedBatch
from gpuaug.read.prefetch import Producer


def batch(number, size):
    return EncodedBatch(
        images=(np.full(size, number % 256, dtype=np.uint8),),
        labels=torch.tensor([number]),
        indices=torch.tensor([number]),
        repeats=torch.zeros(1, dtype=torch.int64),
        valid=torch.ones(1, dtype=torch.bool),
    )


class Feed:
    """A generator of batches that notes how many were asked for, and whether it was closed."""

    def __init__(self, sizes, error=None):
        self.given, self.closed, self.sizes, self.error = 0, threading.Event(), sizes, error

    def __call__(self):
        try:
            for number, size in enumerate(self.sizes):
                self.given += 1
                yield batch(number, size)
            if self.error is not None:
                raise self.error
        finally:
            self.closed.set()


def settled(look, expected, patience=60.0):
    """The value of ``look()`` a while after it was what is expected, or when patience is over."""
    deadline = time.monotonic() + patience
    while look() != expected and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.1)  # it may go on
    return look()


def test_batches_come_whole_and_in_order_and_never_more_bytes_than_the_bound():
    sizes = [(37 * k) % 500 + 1 for k in range(200)]
    ahead = Producer(Feed(sizes)(), name="ahead", max_bytes=2000)
    ahead.start()
    for number, size in enumerate(sizes):
        assert ahead.bytes_waiting <= 2000
        found = next(ahead)
        assert found.images[0].tolist() == [number % 256] * size
        assert found.labels.item() == found.indices.item() == number
    assert next(ahead, None) is None
    assert next(ahead, None) is None
    assert ahead.bytes_waiting == 0


def test_it_is_filled_up_to_the_bound():
    feed = Feed([100] * 100)
    ahead = Producer(feed(), name="ahead", max_bytes=1000)
    ahead.start()
    assert settled(lambda: feed.given, 11) == 11  # ten wait, one is in hand
    assert ahead.bytes_waiting == 1000
    next(ahead), next(ahead)
    assert settled(lambda: feed.given, 13) == 13
    assert ahead.bytes_waiting == 1000
    ahead.close()


def test_a_batch_larger_than_the_bound_waits_alone():
    feed = Feed([10, 5000, 10, 5000])
    ahead = Producer(feed(), name="ahead", max_bytes=100)
    ahead.start()
    assert settled(lambda: ahead.bytes_waiting, 10) == 10
    assert len(next(ahead).images[0]) == 10
    assert settled(lambda: ahead.bytes_waiting, 5000) == 5000
    assert [len(next(ahead).images[0]) for _ in range(3)] == [5000, 10, 5000]
    assert next(ahead, None) is None


def test_its_thread_and_what_it_reads_from_end_with_it():
    feed = Feed([100] * 100)
    ahead = Producer(feed(), name="ahead", max_bytes=1000)
    ahead.start()
    next(ahead)
    thread = ahead._thread
    ahead.close()
    assert ahead.bytes_waiting == 0
    assert next(ahead, None) is None
    thread.join(60)
    assert not thread.is_alive()
    assert feed.closed.is_set()


MEMORY = """
import json, sys, time
from pathlib import Path
import torch
from gpuaug.read.prefetch import Producer
from gpuaug.read.reader import Reader
from gpuaug.source import adapt

length, rows, waiting = map(int, sys.argv[1:])

class Samples:
    labels = None
    def __len__(self):
        return 2 * waiting * rows
    def __getitem__(self, index):
        return bytes(length), 0

def private():
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) * 1024

if __name__ == "__main__":
    reader = Reader(adapt(Samples()), num_workers=2)
    numbers = torch.arange(2 * waiting * rows).split(rows)
    encoded = reader.batches([(c, c * 0, c == c) for c in numbers])
    del (first := [next(encoded)])[:]
    before = private()
    ahead = Producer(encoded, name="ahead", max_bytes=waiting * rows * length)
    ahead.start()
    deadline = time.monotonic() + 200
    while ahead.waiting < waiting and time.monotonic() < deadline:
        time.sleep(0.01)
    level = ahead.bytes_waiting
    held = private() - before
    taken = sum(len(batch) for batch in ahead)
    print(json.dumps({"level": level, "held": held, "taken": taken, "left": private() - before}))
    reader.close()
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="reads /proc")
def test_what_waits_is_private_memory_and_goes_back_to_the_system():
    """In a process of its own: what others allocate and free meanwhile is not counted."""
    length, rows, waiting = 1_000_000, 2, 40
    done = forked.run(forked.code(MEMORY, length, rows, waiting))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    batch = rows * length
    assert found["level"] == waiting * batch
    assert 0.7 < found["held"] / found["level"] < 1.1  # the first batches stay in the memory of the workers
    assert found["taken"] == (2 * waiting - 1) * rows
    assert found["left"] < 0.2 * found["level"]


# -- in the loader


def built(photos, **more):
    augment = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(32), backend="kornia")
    settings = {"batch_size": 8, "num_workers": 1, "device": "cpu", **more}
    return gpuaug.Loader(gpuaug.FolderSource(photos), augment=augment, **settings)


@pytest.mark.parametrize("settings", [{"num_workers": 0}, {"num_workers": 2, "ahead": 1}])
def test_no_pixel_changes_and_every_epoch_is_whole(photos, settings):
    with built(photos) as plain, built(photos, **{"ahead": "1MiB", **settings}) as buffered:
        for _ in range(2):
            for a, b in zip(plain, buffered, strict=True):
                assert torch.equal(a.images, b.images)
                assert torch.equal(a.indices, b.indices)


class Stalling:
    labels = None

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index >= 32:
            time.sleep(600)
        return b"x", 0


def test_closing_takes_seconds_even_while_a_read_stalls(monkeypatch):
    monkeypatch.setattr("gpuaug.loader.passes.TIMEOUT_S", 0.5)
    monkeypatch.setattr("gpuaug.read.workers.TIMEOUT_S", 0.5)
    loader = gpuaug.Loader(Stalling(), augment=gpuaug.Augment(crop=gpuaug.Resize(8), backend="kornia"), device="cpu",
                           batch_size=8, num_workers=1, order="sequential", ahead="1MiB",
                           faults=gpuaug.Faults(policy="blank"))  # fmt: skip
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 100  # the read takes 600 s
