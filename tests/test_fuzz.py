"""Damaged images by hypothesis: pixels or a fault, neighbours bit-identical. `tests/fuzz.py` goes on for longer."""

import os
import signal
import subprocess
import time

import pytest
from fuzz import Between, Run, damaged, main, mutated, originals
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FILES = originals()
BUDGET = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@pytest.fixture(scope="module", params=["dali", "pillow"])
def between(request):
    found = Between(backend=request.param, max_pixels=4_000_000)
    yield found
    found.close()


def test_the_originals_are_pixels(between):
    assert {name: between.check(data) for name, data in FILES.items()} == dict.fromkeys(FILES, "pixels")


@BUDGET
@given(
    first=st.sampled_from(sorted(FILES)), second=st.sampled_from(sorted(FILES)), rng=st.randoms(use_true_random=False)
)
def test_mutations(between, first, second, rng):
    assert between.check(mutated(FILES[first], FILES[second], rng)) in ("pixels", "fault")


@BUDGET
@given(name=st.sampled_from(sorted(FILES)), data=st.data())
def test_flips_and_cuts_in_the_header(between, name, data):
    out = bytearray(FILES[name])
    for at in data.draw(st.lists(st.integers(0, min(len(out), 200) - 1), max_size=4)):
        out[at] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(out)))
    assert between.check(bytes(out[:end] if data.draw(st.booleans()) else out)) in ("pixels", "fault")


def test_an_input_is_known_by_its_number():
    assert damaged(FILES, 3, 14) == damaged(originals(), 3, 14) != damaged(FILES, 3, 15)


def test_the_command(tmp_path, capsys):
    assert main(["--count=60", "--minutes=20", "--seed=1", f"--folder={tmp_path / 'none'}"]) == 0
    assert "60 inputs of seed 1" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


def test_what_fails_is_kept(tmp_path, monkeypatch):
    run, pids = Run(seed=2, folder=tmp_path / "kept", backend="pillow"), []

    class Watched(subprocess.Popen):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            pids.append(self.pid)

    def killing(line, seconds, ended=run._ended):
        ended(line, seconds)
        if line["end"] == 5:
            os.kill(pids[-1], signal.SIGKILL)

    monkeypatch.setattr(subprocess, "Popen", Watched)
    monkeypatch.setattr(run, "_ended", killing)
    run.until(time.monotonic() + 1200, count=400)
    assert run.next >= 400
    (failure,) = run.failures
    assert "death with exit code -9" in failure
    (kept,) = (tmp_path / "kept").iterdir()
    number = int(kept.name.split("-")[1])
    assert number > 5
    assert kept.read_bytes() == damaged(FILES, 2, number)
    assert run.counts.total() == run.next
