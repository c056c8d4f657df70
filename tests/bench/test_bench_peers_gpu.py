"""bench/peers_gpu.py: both contestants do the same work, and what the table says."""

from __future__ import annotations

import json
from pathlib import Path

import peers_gpu as bench
import pytest


def test_every_recipe_runs_and_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--quick", "--device", "cpu", "--json", str(tmp_path / "peers.json")]) == 0
    report = json.loads((tmp_path / "peers.json").read_text())
    rows = {row["recipe"]: row for row in report["results"]}
    assert rows.keys() == bench.RECIPES.keys()
    for name, row in rows.items():
        assert row["ours_ms"] > 0
        assert row["ratio"] == pytest.approx(row["kornia_ms"] / row["ours_ms"])  # of one round
        assert row["operations_max"] < 1e-5
        # ours antialiases and has whole levels; another window would differ by 0.3 on average
        assert ("whole_mean" in row) == name.startswith("barlow")
        assert row.get("whole_mean", 0) < 0.1
    assert "| lerobot | 4 |" in capsys.readouterr().out
