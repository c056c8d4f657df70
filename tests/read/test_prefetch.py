"""The thread that produces ahead: in order, bounded, and gone when it is closed."""

import time

import pytest
import torch

import gpuaug
from gpuaug.read.prefetch import Producer

CPU = torch.device("cpu")


class Feed:
    """A generator of numbers that notes how many were asked for, and whether it was closed."""

    def __init__(self, number, error=None):
        self.given, self.closed, self.number, self.error = 0, False, number, error

    def __call__(self):
        try:
            for number in range(self.number):
                self.given += 1
                yield number
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


def test_items_come_in_order_and_no_more_are_produced_than_may_wait():
    feed = Feed(20)
    ahead = Producer(feed(), name="ahead", count=3, device=CPU)
    for number in range(20):
        assert next(ahead) == number
        assert ahead.waiting <= 4
        assert feed.given <= number + 1 + 4
    assert next(ahead, None) is None
    assert next(ahead, None) is None


def test_an_error_comes_after_all_earlier_items():
    ahead = Producer(Feed(5, error=ValueError("broken"))(), name="ahead", count=10, device=CPU)
    assert [next(ahead) for _ in range(5)] == list(range(5))
    with pytest.raises(ValueError, match="broken"):
        next(ahead)
    assert next(ahead, None) is None


def test_its_thread_and_what_it_reads_from_end_with_it():
    feed = Feed(100)
    ahead = Producer(feed(), name="ahead", count=3, device=CPU)
    next(ahead)
    ahead.close()
    assert next(ahead, None) is None
    assert ahead.join(60)
    assert feed.closed


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
                           batch_size=8, num_workers=1, order="sequential",
                           faults=gpuaug.Faults(policy="blank"))  # fmt: skip
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 100  # the read takes 600 s
