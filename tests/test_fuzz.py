"""Hostile images, tars and epochs in child processes: a short run of each; `tests/fuzz.py` goes on for longer."""

import math
import time
from collections import Counter

import fuzz
import pytest
from conftest import cut
from fuzz import BAD_FILES, Run, run_epochs


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
