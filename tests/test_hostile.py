"""Whatever the bytes: no death, no foreign exception, bounded memory, neighbours unchanged, all accounted for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hostile import BAD, GOOD, corpus, encode, photograph

WORKER = Path(__file__).with_name("hostile_worker.py")


def run(tmp_path, files, backend, timeout):
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name, data, _ in files:
        (folder / name).write_bytes(data)
    good = []
    for k in range(3):
        good.append(tmp_path / f"good{k}.jpg")
        good[-1].write_bytes(encode(photograph(80, 100, seed=k), "JPEG", quality=90))
    command = [sys.executable, str(WORKER), f"--backend={backend}", str(folder), *map(str, good)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def check(report, files):
    assert report["changed"] == []
    assert report["slowest"][0] < 30, report["slowest"]  # seconds of processors
    assert report["peak_bytes"] < 3 * 2**30
    verdicts = report["verdicts"]
    assert verdicts.keys() == {name for name, _, _ in files}
    assert [name for name, found in verdicts.items() if len(set(found.values())) != 1 or len(found) != 3] == []
    wrong = {name: (expected, verdicts[name]["blank"]) for name, _, expected in files if expected in (GOOD, BAD)}
    assert {name: pair for name, pair in wrong.items() if pair[0] != pair[1]} == {}


def test_a_tenth_of_the_corpus(tmp_path):
    files = list(corpus(share=0.1))
    check(run(tmp_path, files, "dali", 1200), files)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["dali", "pillow"])
def test_the_whole_corpus(tmp_path, backend):
    files = list(corpus())
    assert len(files) > 400
    check(run(tmp_path, files, backend, 3600), files)
