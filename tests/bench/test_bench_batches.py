"""bench/batches.py: every case runs, the pixels are Kornia's, and what the table says."""

from __future__ import annotations

import json
from pathlib import Path

import batches as bench
import pytest


def test_every_case_runs_and_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--quick", "--device", "cpu", "--json", str(tmp_path / "batches.json")]) == 0
    rows = {row["case"]: row for row in json.loads((tmp_path / "batches.json").read_text())["results"]}
    assert rows.keys() == bench.CASES.keys()
    for name, row in rows.items():
        assert row["difference"]["max"] < 1e-5
        (who,) = row["ratios"]  # without the peers' packages
        work = bench.BANDS / 3 if name == "channels" else 1
        assert row["ratios"][who] == [pytest.approx(work * row["ms"][who] / row["ms"]["ours"])]  # of one round
    assert "| channels | 4 |" in capsys.readouterr().out
