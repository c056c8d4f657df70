"""`gpuaug doctor` as a whole, and its report: figures are what they say, and nothing private is in it."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import torch
from conftest import ROOT

import gpuaug
from gpuaug import machine
from gpuaug.files import cache_folder
from gpuaug.tools.doctor import command
from gpuaug.tools.doctor import report as reports
from gpuaug.tools.main import main


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `gpuaug doctor` printed and wrote, for a user with a home of its own."""
    pytest.importorskip("nvidia.dali")
    home = tmp_path_factory.mktemp("home") / "jane" / "my files"
    (home / "gpuaug").mkdir(parents=True, mode=0o700)
    for built in cache_folder().glob("augment-*.so"):
        shutil.copy(built, home / "gpuaug")
    names = {"HOME": str(home), "XDG_CACHE_HOME": str(home), "TMPDIR": str(home), "LOGNAME": "jane", "USER": "jane"}
    start = """
import subprocess, sys
import forked
from gpuaug.tools.main import main
subprocess.Popen = lambda c, **how: (forked.SYSTEM if "workers" in c else forked.popen)(c, **how)
sys.exit(main(sys.argv[1:]))
"""
    words = forked.code(start, "doctor", f"json={home}/d.json", f"report={home}/new/r.json", "seconds=0")
    done = forked.run(words, env={**os.environ, **names, "PYTHONPATH": str(ROOT / "tests")}, cwd=ROOT)
    report, values = (home / "new/r.json").read_text(), json.loads((home / "d.json").read_text())
    stored = json.loads(next((home / "gpuaug").glob("doctor-*.json")).read_text())["verdicts"]
    return {
        "done": done,
        "values": values,
        "text": report,
        "report": json.loads(report),
        "home": home,
        "stored": stored,
    }


def test_command(whole: dict[str, Any]) -> None:
    values, done = whole["values"], whole["done"]
    found = {f["name"]: f for f in values["findings"]}
    assert done.returncode == (0 if values["usable"] else 1), done.stderr
    assert values["usable"] == all(f["status"] != command.BROKEN for f in found.values())
    for name in ("compiled on the CPU", "DALI on the CPU", "start methods", "torch"):
        assert found[name]["status"] == command.OK, found[name]
    for finding in found.values():
        assert re.search(rf"^  {re.escape(finding['name'])} +{finding['status']} ", done.stdout, re.MULTILINE)
        if finding["status"] in (command.SLOW, command.BROKEN):
            assert finding["advice"]
    if not machine.gpus():
        assert "stream order" not in found
    assert whole["stored"]["decoder_cpu"]["good"] is True


def test_a_report_says_what_the_machine_is(whole: dict[str, Any]) -> None:
    report = whole["report"]
    here = report["machine"]
    for package, version in here["packages"].items():
        if version is None:
            with pytest.raises(metadata.PackageNotFoundError):
                metadata.version(package)
        else:
            assert version == metadata.version(package)
    assert {"torch", "triton", "kornia"} <= here["packages"].keys()
    assert here["python"] == platform.python_version()
    assert here["environment"].keys() == set(reports.VARIABLES)
    assert report["findings"] == whole["values"]["findings"]
    assert report["stored"] == whole["stored"]
    assert report["attention"] == [f for f in report["findings"] if f["status"] in ("warning", "BROKEN", "untested")]
    if (ROOT / ".git").exists():
        assert here["commit"] == [subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()]


PIXELS = {  # of the views of one sample, as the recipes' papers have them
    "flip": 224**2, "standard": 224**2, "randaugment_torchvision": 224**2, "simclr": 2 * 224**2,
    "dino": 2 * 224**2 + 6 * 96**2,
}  # fmt: skip


def test_the_figures_of_a_report_are_what_they_say(whole: dict[str, Any]) -> None:
    measured = whole["report"]["measurements"]
    assert measured.keys() == {*PIXELS, "loader"} == {*reports.MOVED, "loader"}
    for name, pixels in PIXELS.items():
        figures = measured[name]["details"]
        assert figures["pixels"] == figures["batch"] * pixels
        assert figures["images_per_second"] * figures["milliseconds"] == pytest.approx(1e3 * figures["batch"])
        assert figures["rounds"] >= 3
        assert [d["seed"] for d in figures["differences"]] == [0, 1]
        for d in figures["differences"]:
            assert (d["images"] % 16, d["verdict"]) == (0, "equal")
            assert 0 <= d["mean"] <= d["largest"] < 0.01
        if not machine.gpus():
            assert figures["paper"].startswith("none without a GPU")
    figures = measured["loader"]["details"]
    assert figures["images"] % figures["batch"] == 0 < figures["images"]
    assert figures["images_per_second"] == pytest.approx(figures["images"] / figures["seconds"])
    assert figures["images_per_second"] == sorted(figures["rounds"])[1]
    assert {"read", "decode", "augment"} <= figures["busy"].keys()


def test_a_report_has_no_private_data(whole: dict[str, Any]) -> None:
    text = whole["text"]
    for private in (
        str(whole["home"]),
        "jane",
        "my files",
        str(ROOT),
        f"{tempfile.gettempdir()}/",
    ):
        assert private not in text, private
    host = socket.gethostname()  # as a word: random names of folders may have its letters
    assert re.search(rf"\b{re.escape(host)}\b", text) is None
    assert "source .../" in text  # that of the loader, in the user's temporary folder


def test_private_data_in_any_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.lab")
    monkeypatch.setenv("HOME", "/data/Jane Doe")
    monkeypatch.setenv("LOGNAME", "torch")
    said = {  # in a report
        "/data/Jane Doe/.venv/x.so: no": ".../x.so: no",
        'File "/mnt/a/gpuaug/b.py", line 3': 'File ".../b.py", line 3',
        "of torch on node7 or node7.lab; pytorch": "of *** on *** or ***; pytorch",
        "see https://pytorch.org/get-started/locally": "see https://pytorch.org/get-started/locally",
    }
    values = json.loads(reports.as_json({"torch": [*said], "number": 3}))
    assert values["torch"] == [*said.values()]
    assert values["number"] == 3


def test_parts_that_crash_or_hang_stop_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Planted: parts that end in every way, results of doctor that are damaged, a device that cannot be used."""
    how = {
        "flip": "import os; print('last words', file=sys.stderr, flush=True); os.kill(os.getpid(), 11)",
        "standard": "raise OSError(2, 'no file', os.path.expanduser('~/secret/a.jpg'))",
        "simclr": "import time; time.sleep(600)",
    }
    good = "print('[true, \"well\", {}]')"
    cases = "".join(f"if sys.argv[1] == {name!r}:\n    {code}\n" for name, code in how.items())
    monkeypatch.setattr(command, "MEASURE", f"import os, sys\n{cases}{good}")
    monkeypatch.setattr(command, "CODE", "import sys; print('why', file=sys.stderr); print('[false, \"planted\", []]')")
    monkeypatch.setattr(command, "TIMEOUT_S", 4.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "gpuaug").mkdir()
    machine.verdicts.cache_clear()
    machine.verdicts_file().write_text("damaged")
    assert main(["doctor", f"report={tmp_path}/r.json"]) == 1
    report = json.loads((tmp_path / "r.json").read_text())
    measured = report["measurements"]
    assert {name: part["good"] for name, part in measured.items()} == {
        name: name not in how for name in (*reports.MOVED, "loader")
    }
    assert measured["flip"]["text"] == "crashed: killed by SIGSEGV"
    assert measured["flip"]["stderr"] == report["attention"][-3]["stderr"] == ["last words"]
    assert measured["standard"]["text"].endswith("FileNotFoundError: [Errno 2] no file: '.../a.jpg'")
    assert (measured["simclr"]["late"], measured["simclr"]["text"]) == (
        True,
        "did not answer within 4 s and was killed",
    )
    assert {f["name"]: f["stderr"] for f in report["attention"]}["compiled on the CPU"] == ["why"]
    attention = {f["name"]: f["status"] for f in report["attention"]}
    assert attention["flip on cpu"] == attention["standard on cpu"] == command.BROKEN
    assert attention["simclr on cpu"] == command.SLOW
    if report["stored"]:  # the tests that run here have replaced the damaged results
        assert report["stored"] == {"decoder_cpu": {"good": False, "text": "planted"}}
    assert "form: GPU report" in capsys.readouterr().out
    machine.verdicts.cache_clear()


def test_wrong_pixels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: of every batch, the kernels mirror the sample 3."""

    class Wrong(reports.FusedBackend):
        def __call__(self, *given: Any, **how: Any) -> Any:
            images = super().__call__(*given, **how)
            images[3] = images[3].flip(-1)
            return images

    monkeypatch.setattr(reports, "FusedBackend", Wrong)
    good, words, figures = reports.recipe("standard", torch.device("cpu"), 0.0)
    assert not good
    assert re.search(r"at most \d+ levels \((DIFFERENT|close): seed [01], sample 3, view 0\)", words), words
    assert {d["worst"] for d in figures["differences"]} == {"sample 3, view 0"}


def test_a_part_that_hangs_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    start = "from gpuaug.tools.doctor import report\nimport time\ndef stuck_here(*_): time.sleep(600)\n"
    start += "report.recipe, report.LIMIT_S = stuck_here, 0.1\nreport.main()"
    monkeypatch.setattr(subprocess, "Popen", forked.popen)
    answer = command.probe("flip", command=forked.code(start, "flip", "cpu", 0))
    assert answer.good is False
    assert answer.stderr[0].startswith("Timeout (")
    assert any("in stuck_here" in line for line in answer.stderr)


def test_a_report_that_cannot_be_written_is_said_first(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(command, "probe", None)  # nothing runs
    assert main(["doctor", "report=/proc/none/r.json"]) == 2
    assert "`report` must be the path of a file that can be written" in capsys.readouterr().err


def test_every_image_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels get as many images and pixels as the report says."""
    given: list[tuple[int, ...]] = []
    monkeypatch.setattr(reports, "FusedBackend", lambda *_: lambda x, *_, **__: given.append(tuple(x.shape)))
    augment = gpuaug.build(gpuaug.compose("train", ["augment=dino", "source.root=."]).augment)
    figures = reports.kernels(augment, torch.device("cpu"), 0.0, moved=1.0)
    calls = figures["rounds"] + 1  # one to compile
    assert sum(math.prod(shape[:3]) for shape in given) == calls * figures["pixels"]
    assert {shape[0] for shape in given} == {figures["batch"]}
    assert len(given) == calls * 8


@pytest.mark.parametrize("name", ["standard", "randaugment_torchvision"])
def test_one_wrong_pixel_is_bad_where_no_operation_jumps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Spoiled(reports.FusedBackend):
        def __call__(self, *args: Any, **more: Any) -> torch.Tensor:
            found = super().__call__(*args, **more)
            found[:, :, -1, -1] = 1.0 - found[:, :, -1, -1].round()
            return found

    monkeypatch.setattr(reports, "FusedBackend", Spoiled)
    monkeypatch.setattr(reports, "SAMPLES", 4)
    monkeypatch.setattr(reports, "BATCH", {"cpu": 2})
    good, words, _ = reports.recipe(name, torch.device("cpu"), 0.0)
    assert good == (name != "standard")
    assert ("(DIFFERENT" if name == "standard" else "(rounding") in words


def test_on_paper_as_in_the_benchmark() -> None:
    """The bytes are those that bench/roofline.py counted, and the times of an H100 those of its table."""
    pretended_cuda = pytest.importorskip("pretended_cuda")  # itself skips without Triton
    table = (ROOT / "bench/README.md").read_text().partition("<!-- roofline.py -->")[2].partition("<!-- end")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    rows = [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]
    moved = {row["recipe"]: float(row["bytes per pixel: moved, least"].split(",")[0]) for row in rows}
    assert moved == reports.MOVED  # else copy the table's figures to MOVED
    timer = SimpleNamespace(record=lambda: None, elapsed_time=lambda other: 0.5)

    def measured(**properties: int) -> Any:
        gpu = SimpleNamespace(L2_cache_size=50 << 20, **properties)
        with pretended_cuda.pretended_cuda(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_properties", lambda *_: gpu)
            patch.setattr(torch.cuda, "_sleep", lambda cycles: None)
            patch.setattr(torch.cuda, "Event", lambda **_: timer)
            patch.setattr(reports, "SAMPLES", 1)
            return reports.recipe("standard", torch.device("cuda", 0), 0.0)

    _, words, figures = measured(memory_clock_rate=2_619_000, memory_bus_width=5120)  # H100 SXM
    assert (figures["milliseconds"], figures["images_per_second"]) == (0.5, 512_000)
    row = next(row for row in rows if row["recipe"] == "standard")
    paper, least = map(float, row["H100"].split(" / "))
    assert int(row["B"]) == figures["batch"]
    assert 1e3 * figures["paper_milliseconds"] == pytest.approx(paper, abs=0.6)
    assert 1e3 * figures["paper_least_milliseconds"] == pytest.approx(least, abs=0.6)
    assert "0.5 ms for 256 images (0.046 on paper)" in words
    # a GPU or a torch that does not tell the clock: all figures but those on paper
    for properties in ({"memory_clock_rate": 0, "memory_bus_width": 64}, {}):
        _, words, figures = measured(**properties)
        assert "0.5 ms for 256 images" in words
        assert "paper_milliseconds" not in figures
        assert "peak bandwidth" in figures["paper"]


@pytest.mark.gpu
@pytest.mark.parametrize("part", [*reports.MOVED, "loader"])
def test_measurements_on_a_gpu(part: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    answer = command.probe(part, command=[sys.executable, "-c", command.MEASURE, part, "cuda", "1"])
    assert answer.good, answer
    if part != "loader":
        assert 0 < answer.details["paper_least_milliseconds"] < answer.details["milliseconds"]
