"""bench/roofline.py: what it counts, and what its table says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import forked
import pytest
import roofline as bench
import torch
from conftest import ROOT


def test_bytes_come_from_the_kernels(tmp_path: Path) -> None:
    """In a process of its own, because Triton decides for its interpreter when it is first imported."""
    pytest.importorskip("triton")
    report = tmp_path / "roofline.json"
    command = [sys.executable, str(ROOT / "bench/roofline.py"), "--recipe", "flip", "standard", "--batch", "8"]
    done = forked.run([*command, "--traced", "4", "--json", str(report)])
    assert done.returncode == 0, done.stderr
    assert "**Paper: no GPU ran.**" in done.stdout
    flip, standard = json.loads(report.read_text())["results"]
    assert (flip["launches"], flip["torch_launches"]) == (1, 0)
    assert flip["least_bytes"] == 8 * 224 * 224 * (3 + 6)
    assert 1 < flip["bytes"] / flip["least_bytes"] < 1.01  # the rest is the program
    assert 1 < standard["bytes"] / standard["least_bytes"] < 2  # read once more for the mean of gray
    for row in (flip, standard):
        assert row["host_milliseconds"] > 0
        assert row["paper_microseconds"]["T4"] == pytest.approx(row["bytes"] / 320e3)
        assert row["limit_microseconds"]["B200"] == pytest.approx(row["least_bytes"] / 8e6)


def test_operations_of_torch_are_launches() -> None:
    x, host = torch.zeros(4, 10), torch.zeros(4, 10)
    trace = bench.Trace(None, None)
    trace.put([x])
    with trace:
        host = host * 2  # no image: the host's own
        y = x.view(2, 20) + 1
        y.mul_(2)
        z = y.view(4, 10).index_select(0, torch.tensor([1]))
        z.copy_(torch.ones(1, 1).expand(1, 10))
        (z * z).sum()
    names = [(launch.name, launch.moved) for launch in trace.launches]
    assert names == [
        ("add", 160 + 160), ("mul_", 160 + 160), ("index_select", 40 + 8 + 40), ("copy_", 4 + 40),
        ("mul", 40 + 40), ("sum", 40 + 4),
    ]  # fmt: skip
