"""bench/gpu.py and bench/hazards.py: no part takes another one down, and each says what its end means."""

from __future__ import annotations

import json
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu as bench
import hazards
import pytest
from conftest import ROOT


def part(name: str, code: str, limit: int = 60, **more: Any) -> Any:
    return bench.Part(name, [sys.executable, "-c", code], f"Is {name} well?", 1, limit, **more)


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parts: list[Any], *words: str) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(bench, "parts", lambda *_, **__: parts)
    monkeypatch.setattr(sys, "argv", ["gpu.py", str(tmp_path / "out"), "--work", str(tmp_path / "work"), *words])
    code = bench.main()
    return code, json.loads((tmp_path / "out" / "summary.json").read_text())


def test_a_part_that_hangs_leaves_its_traceback_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = tmp_path / "ran"
    parts = [
        part("hangs", "import time\ndef stuck_here(): time.sleep(600)\nstuck_here()", limit=3),
        part("crashes", "import os; os.kill(os.getpid(), 11)"),
        part("fails", "raise RuntimeError('the device is on fire')"),
        part("goes", f"open({str(ran)!r}, 'a').write('x')"),
    ]
    code, summary = run(monkeypatch, tmp_path, parts)
    assert code == 1
    assert summary["hangs"]["exit"] == "out of time after 3 s"
    assert (summary["crashes"]["exit"], summary["fails"]["exit"], summary["goes"]["exit"]) == (-11, 1, 0)
    report = (tmp_path / "out" / "report.txt").read_text()
    assert "in stuck_here" in report
    assert "the device is on fire" in report
    assert "Is goes well? Yes." in report
    assert "Is crashes well? No, or not answered: exit status -11." in report
    with tarfile.open(tmp_path / "out" / "results.tar.gz") as tar:
        assert {"hangs.log", "crashes.log", "fails.log", "goes.log", "summary.json"} <= set(tar.getnames())
    code, summary = run(monkeypatch, tmp_path, parts[1:])  # what is done is not done again
    assert ran.read_text() == "x"
    assert summary["hangs"]["exit"] == "out of time after 3 s"
    run(monkeypatch, tmp_path, parts[3:], "--again")
    assert ran.read_text() == "xx"
    for made in (ran, tmp_path / "gone"):  # what later parts need is made again
        run(monkeypatch, tmp_path, [replace(parts[3], makes=made)])
    assert ran.read_text() == "xxx"


def test_every_part_has_a_question_and_time(tmp_path: Path) -> None:
    for rehearse in (False, True):
        parts = bench.parts(tmp_path, tmp_path, rehearse=rehearse)
        names = [p.name for p in parts]
        assert len(set(names)) == len(names)
        assert all(p.asks.endswith("?") and p.expected < p.limit <= 400 for p in parts)
        files = {f"tests_{p.stem.removeprefix('test_')}" for p in (ROOT / "tests").rglob("test_*.py")}
        assert {n for n in names if n.startswith("tests_")} <= files
        assert {"tests_gpu", "tests_decode", "tests_doctor"} < set(names)
        assert {n.removeprefix("hazard_") for n in names if n.startswith("hazard_")} == set(hazards.HAZARDS)
    known = "photographs import decode doctor kernels cases tests standard data loader large profile augment train"
    for name in f"{known} peers roofline".split():
        assert any(bench._named(p, name) for p in parts), name


def test_a_hazard_that_dies_or_hangs_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = hazards.ask("paging")  # without a device it fails, with one it answers
    assert ("answer" in found) != ("Traceback" in found.get("end", ""))
    monkeypatch.setitem(hazards.HAZARDS, "feed", (hazards.feed, 1))
    late = hazards.ask("feed")
    assert late["reason"] == "not there after 1 s"
    assert ", line " in late["end"]  # where it was
