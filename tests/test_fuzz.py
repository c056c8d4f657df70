"""Hostile images, tars and epochs in child processes: a short run of each; `tests/fuzz.py` goes on for longer."""

import math
import time
from collections import Counter

import fuzz
import pytest
from conftest import cut
from fuzz import BAD_FILES, Images, Run, run_epochs
from fuzz_child import Child
from hostile_tars import tar


def ended(what, folder, count, **settings):
    """Failures, and the numbers of each verdict."""
    with Run(what, folder=folder, cpu=settings.pop("cpu", math.inf), **settings) as run:
        run.until(time.monotonic() + 3600, count=count)
    assert run.counts.total() >= count
    return run.failures, run.counts


def test_hostile_images_are_pixels_or_faults(tmp_path):
    with Run("images", folder=tmp_path / "kept", cpu=math.inf, share=0.1) as run:
        for settings in fuzz.SETTINGS:
            run.settings, run.next, run.counts = settings, 0, Counter()
            run.until(time.monotonic() + 3600, count=100)
            assert run.failures == [], settings
            assert run.counts.total() >= 100
            assert run.counts["pixels"] >= 15
            assert run.counts["fault"] >= 15
    assert run.child.started == 1
    assert not (tmp_path / "kept").exists()


@pytest.mark.long
@pytest.mark.parametrize("settings", list(fuzz.SETTINGS))
def test_more_hostile_images(tmp_path, settings):
    failures, _ = ended("images", tmp_path / "kept", 3000, settings=settings, seed=1, cpu=fuzz.CPU)
    assert failures == []


@pytest.mark.parametrize("count", [100, pytest.param(5000, marks=pytest.mark.long)])
def test_hostile_tars_are_indexed_or_refused(tmp_path, count):
    failures, counts = ended("tars", tmp_path / "kept", count, seed=count)
    assert failures == []
    assert counts["indexed"] > count / 10
    assert counts["refused"] > count / 10


@pytest.mark.parametrize("count", [1, pytest.param(50, marks=pytest.mark.long)])
def test_epochs_with_bad_files_go_through(tmp_path, count):
    failures, bad = run_epochs(cut(tmp_path / "photographs", 48 if count > 1 else 20), tmp_path, count=count)
    assert failures == []
    assert len(bad) > len(BAD_FILES) / 2  # some may be decoded


def test_an_input_is_known_by_its_number():
    first, again = Images(3, 0.1), Images(3, 0.1)
    n = len(first) + 14
    assert first[n] == again[n] != first[n + 1]
    again.seed = 4
    assert first[n] != again[n]
    assert tar(3, 14) == tar(3, 14) != tar(4, 14)


PLANTED = """
import os, sys
sys.path.insert(0, {tests!r})
import fuzz_child

class Planted:
    def check(self, numbers, *, alone):
        if 5 in numbers:
            raise ValueError("foreign")
        if {{40, 60}} <= set(numbers):
            raise KeyError("together")
        if 66 in numbers:
            os.kill(os.getpid(), 11)
        if 68 in numbers:
            fuzz_child.say({{"at": 68}})
            while True:
                pass
        if 69 in numbers:
            sum(range(2 * 10**7))
        return {{n: "wrong: pixels" if n == 70 else "pixels" for n in numbers}}

fuzz_child.serve(lambda settings: Planted())
"""


def test_what_fails_is_narrowed_down_and_kept(tmp_path):
    script = tmp_path / "planted.py"
    script.write_text(PLANTED.format(tests=str(fuzz.__file__).rpartition("/")[0]))
    with Run("images", seed=2, folder=tmp_path / "kept", share=0.1, cpu=0.1) as run:
        run.child = Child(str(script), hang_cpu=3.0)
        run.until(time.monotonic() + 1200, count=72)
    groups = {failure.split(": ", 1)[0].split(" (")[0]: failure.split(": ", 1)[1] for failure in run.failures}
    together = list(range(32, 64))  # neither half of the batch fails
    assert groups.keys() == {"5", f"one of {together}, or several", "66", "68", "69", "70"}
    starts = {"5": "ValueError: foreign", "66": "death: exit code -11", "68": "hang: ", "69": "slow: "}
    assert {key: groups[key][: len(start)] for key, start in starts.items()} == starts
    kept = {path.name: path.read_bytes() for path in (tmp_path / "kept").iterdir()}
    assert kept["2-66-death.bin"] == Images(2, 0.1)[66][1]
    assert {int(name.split("-")[1]) for name in kept} == {5, 66, 68, 69, 70, *together}
    assert run.counts["pixels"] == 72 - len(kept) + 1  # a slow one is pixels
