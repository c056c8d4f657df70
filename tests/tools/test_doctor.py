"""`gpuaug doctor`: planted crashes, time-outs, missing compilers and small limits are found, named and remembered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from common import ended
from conftest import ROOT

from gpuaug import machine
from gpuaug.decode.decoder import Decode, Decoder, _without_broken_engine
from gpuaug.tools.doctor import command, probes
from gpuaug.tools.doctor.command import Answer
from gpuaug.tools.main import main

GOOD, BAD = Answer(True, "planted"), Answer(False, "planted")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    machine.verdicts.cache_clear()
    yield tmp_path / "cache" / "gpuaug"
    machine.verdicts.cache_clear()


# --- tests in processes


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["sh", "-c", "kill -SEGV $$"], "crashed: killed by SIGSEGV"),
        (["sh", "-c", "kill -KILL $$"], "crashed: killed by SIGKILL (perhaps out of memory)"),
        (["sh", "-c", "echo trace >&2; echo 'the device is on fire' >&2; exit 3"],
         "failed with exit status 3: the device is on fire"),
        (["echo", "no json"], "failed with exit status 0: no output on stderr"),
    ],
)  # fmt: skip
def test_a_test_that_ends_without_an_answer_has_failed(words: list[str], text: str) -> None:
    assert command.probe("planted", command=words)[:2] == (False, text)


def test_the_last_line_is_the_answer() -> None:
    answer = command.probe("planted", command=["printf", 'chatter\n[true, "well", [1]]\n'])
    assert answer == Answer(True, "well", [1])


def test_a_test_that_is_late_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a child holds the output open."""
    file = tmp_path / "pid"
    for timeout in (0.5, 5.0, 50.0):  # so that a busy machine comes to write the number
        monkeypatch.setattr(command, "TIMEOUT_S", timeout)
        answer = command.probe("x", command=["sh", "-c", f"sleep 600 & echo $! > '{file}'; wait"])
        assert (answer.good, answer.late) == (False, True)
        assert answer.text == f"did not answer within {timeout:g} s and was killed"
        if file.exists() and file.read_text().strip():
            break
    assert ended([int(file.read_text())])


def test_no_compiler(tmp_path: Path) -> None:
    """Planted: a PATH without any."""
    environment = {**os.environ, "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("CXX", None)
    code = "from gpuaug.tools.doctor.probes import main; main()"
    done = forked.run([sys.executable, "-c", code, "compiler"], env=environment, cwd=ROOT)
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer[0] is False
    assert "no C++ compiler found" in answer[1]
    assert command.tested("compiler", Answer(*answer)).status == command.SLOW


def test_augmentations_that_fail_or_differ_are_broken() -> None:
    for answer in (
        Answer(False, "failed with exit status 1: ImportError"),
        Answer(False, "differ by at most 9 levels"),
    ):
        finding = command.tested("compiler", answer)
        assert finding.status == command.BROKEN
        assert "augment.backend=kornia" in finding.advice


# --- verdicts


def test_verdicts_are_remembered_as_json(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def planted(name: str) -> Answer:
        asked.append(name)
        return Answer(name != "decoder_mixed", "planted")

    monkeypatch.setattr(command, "probe", planted)
    names = ("decoder_mixed", "stream", "compiler")
    assert machine.verdict("decoder_mixed") is None
    assert [command.examine(name).good for name in names] == [False, True, True]
    assert [machine.verdict(name) for name in ("decoder_mixed", "stream", "hardware")] == [False, True, None]
    assert ["stored result" in command.examine(name).text for name in names] == [True, True, False]
    assert asked == [*names, "compiler"]  # what changes from day to day is asked again
    command.examine("stream", fresh=True)
    assert asked[-1] == "stream"
    (file,) = cache.iterdir()
    values = json.loads(file.read_text())
    assert values["verdicts"]["decoder_mixed"] == {"good": False, "text": "planted"}
    assert values["machine"]["packages"]["torch"]
    assert cache.stat().st_mode & 0o077 == 0
    # a machine that was busy for three minutes must not run fifty times slower ever after
    monkeypatch.setattr(command, "probe", lambda name: Answer(False, "planted", late=True))
    assert command.examine("stream", fresh=True).late
    assert machine.verdict("stream") is True


def test_other_versions_and_machines_are_other_verdicts(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command.keep("stream", GOOD)
    for name, planted in (
        ("driver", lambda: "999.1"),
        ("gpus", lambda: ["NVIDIA Planted"]),
        ("cpu_model", lambda: "another"),
        ("package_version", lambda package: "9.9"),
        ("_smi", lambda query, root="": ["GPU 0: X (UUID: 1)", "  MIG 3g.40gb Device 0: (UUID: 2)"] * (query == "-L")),
        ("_smi", lambda query, root="": ["9.0"] * ("compute_cap" in query)),
        ("torch.version.cuda", "99.9"),
    ):
        with monkeypatch.context() as here:
            here.setattr(*((name, planted) if "." in name else (machine, name, planted)))
            machine.verdicts.cache_clear()
            assert machine.verdict("stream") is None
    machine.verdicts.cache_clear()
    assert machine.verdict("stream") is True


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "[]",
        '{"version": 99, "verdicts": {"stream": {"good": true, "text": ""}}}',
        '{"version": 5, "verdicts": []}',
        '{"version": 5, "verdicts": {"stream": true}}',
        '{"version": 5, "verdicts": {"stream": {"good": "yes", "text": ""}}}',
        '{"version": 5, "verdicts": {"stream": {"text": ""}}}',
    ],
)
def test_a_damaged_file_is_no_verdict(text: str, cache: Path) -> None:
    cache.mkdir(parents=True)
    machine.verdicts_file().write_text(text)
    assert machine.verdicts() == {}
    command.keep("stream", BAD)
    assert machine.verdict("stream") is False


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level("INFO", logger="gpuaug"):
        command.keep("stream", GOOD)
    assert "could not be stored" in caplog.text
    machine.verdicts.cache_clear()


def test_a_bad_jpeg_engine_is_left_out(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = Decode(hardware_load=0.5)
    assert _without_broken_engine(settings) == settings
    command.keep("hardware", GOOD)
    assert _without_broken_engine(settings) == settings
    assert not caplog.records
    command.keep("hardware", BAD)
    assert _without_broken_engine(settings) == Decode(hardware_load=0.0)
    assert "hardware_load=0: the JPEG engine failed" in caplog.text


def test_self_checks_of_loaders_are_listed_and_forgotten(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, answer in {"decode 1": GOOD, "stream": GOOD, "augment (flip) 2": BAD}.items():
        command.keep(name, answer)
    monkeypatch.setattr(command, "examine", lambda name, fresh: GOOD)
    none = Answer(False, "")
    found = [f for f in command.decoding(fresh=False, cuda=none) if f.name == "self-check"]
    assert [(f.status, f.text) for f in found] == [
        (command.OK, "decode 1: planted"),
        (command.SLOW, "augment (flip) 2: planted"),
    ]
    assert not [f for f in command.decoding(fresh=True, cuda=none) if f.name == "self-check"]
    assert [*machine.verdicts()] == ["stream"]


# --- the tests themselves, where no GPU is needed


def test_wrong_pixels_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nvidia.dali")
    real = probes._truth
    monkeypatch.setattr(probes, "_truth", lambda data: real(data) ^ 16)
    good, text, *_ = probes.TESTS["decoder_cpu"]()
    assert not good
    assert "differs from Pillow by 16 levels" in text


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_batches_that_change_when_decoded_in_a_row_are_seen(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a decoder that writes each batch over the one before, which is then used late."""
    pytest.importorskip("nvidia.dali")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    good, text, *_ = probes._order(0.0, 0, device=device)
    if device == "cpu":  # here a copy that waits for nothing has the right pixels
        assert (good, "not busy enough" in text) == (None, True)
        with monkeypatch.context() as patch:
            on_busy_device(patch)
            good, text, *_ = probes._order(0.0, 0, device="cpu")
        assert "32 are wrong, as they must be" in text
    assert good, text
    real, calls = Decoder.pixels, []

    def planted(self: Decoder, *arguments: Any) -> Any:
        views, faults = real(self, *arguments)
        calls.append(views[0])
        if len(calls) == 2 * probes.IN_A_ROW:
            views[0][:2] ^= 16
        return views, faults

    monkeypatch.setattr(Decoder, "pixels", planted)
    good, text, *_ = probes._order(0.0, 4, device=device)
    assert not good
    assert "1 of 32 batches" in text


def on_busy_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted on a CPU: decoded pixels appear when the consumer's stream goes on, the fourth stream of each batch."""
    real, waiting = Decoder.pixels, []
    entered, inside = count(1), [False]

    def pixels(self: Decoder, *arguments: Any) -> Any:
        views, faults = real(self, *arguments)
        if inside[0]:
            waiting.append((views[0], views[0].clone()))
            views[0].zero_()
        return views, faults

    @contextmanager
    def stream(_: Any) -> Iterator[None]:
        if next(entered) % 4 == 0:
            view, right = waiting.pop()
            view.copy_(right)
        inside[0] = True
        yield
        inside[0] = False

    monkeypatch.setattr(Decoder, "pixels", pixels)
    monkeypatch.setattr(torch.cuda, "stream", stream)


def test_the_engine_is_looked_for_before_a_decoder_hides_it() -> None:
    pytest.importorskip("nvidia.nvimgcodec")
    with pytest.raises(AssertionError, match="before this process opens a decoder"):
        probes._engine()


def test_the_engine_is_recommended_only_if_it_keeps_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_engine", lambda: True)
    monkeypatch.setattr(probes, "_decode", lambda *_, **__: Answer(True, "decodes"))
    for ordered in (True, False):
        monkeypatch.setattr(probes, "_order", lambda *_, ordered=ordered: Answer(ordered, "planted"))
        good, text, *_ = probes.hardware()
        assert good is ordered
        assert ("hardware_load may be raised" in text) == ordered
    monkeypatch.setattr(probes, "_engine", lambda: False)
    monkeypatch.setenv("NVIDIA_DRIVER_CAPABILITIES", "compute,utility")
    good, text, *_ = probes.hardware()
    assert good is None
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility,video. Found: compute,utility" in text


def test_every_test_is_told_about() -> None:
    assert {*command.TESTS, "cuda", "workers"} == set(probes.TESTS)
    # the other results are never stored: these tests are quick, or their results may change daily
    assert set(probes.TESTS) - set(machine.VERDICTS) == {"cuda", "compiler", "workers"}
    assert {*command.WITHOUT_DALI, *command.WITHOUT_CUDA} <= set(command.TESTS)


# --- the machine


def test_limits_of_control_groups(tmp_path: Path) -> None:
    group = tmp_path / "sys" / "a" / "b"
    group.mkdir(parents=True)
    proc = tmp_path / "cgroup"
    proc.write_text("0::/a/b\n")
    where = {"proc": str(proc), "root": str(tmp_path / "sys")}
    (group / "memory.max").write_text("max\n")
    (group / "cpu.max").write_text("max 100000\n")
    assert machine.cgroup_left(**where) is None
    assert machine.cgroup_cpus(**where) is None
    (group.parent / "memory.max").write_text("8000000\n")
    (group.parent / "memory.current").write_text("1000\n")
    (group.parent / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "sys" / "memory.max").write_text("9000000\n")
    assert machine.cgroup_left(**where) == 8000000 - 1000
    (tmp_path / "sys" / "memory.current").write_text("8500000\n")  # the outer group is the tighter one now
    (tmp_path / "sys" / "memory.stat").write_text("anon 1\ninactive_file 200000\n")
    assert machine.cgroup_left(**where) == 9000000 - 8300000
    assert machine.cgroup_cpus(**where) == 1.5


def test_driver_and_devices_without_cuda(tmp_path: Path) -> None:
    assert machine.gpus(str(tmp_path)) == []
    assert machine.driver(str(tmp_path)) is None
    for k in range(2):
        (tmp_path / "gpus" / f"0000:0{k}:00.0").mkdir(parents=True)
        (tmp_path / "gpus" / f"0000:0{k}:00.0" / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: 3\n")
    for text in (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\nGCC version: 12.2\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.104.05  Release Build\n",
    ):
        (tmp_path / "version").write_text(text)
        assert machine.driver(str(tmp_path)) == "535.104.05"
    assert machine.gpus(str(tmp_path)) == ["NVIDIA H200"] * 2


GIB = 2**30


@pytest.mark.parametrize(
    ("finding", "status", "word"),
    [
        (command.open_files(64, 4096), command.BROKEN, "ulimit -n 4096"),
        (command.open_files(256, 2**63 - 1), command.SLOW, "ulimit -n 65536"),
        (command.open_files(4096, 4096), command.OK, ""),
        (command.cpus(64, 6.5), command.SLOW, "decode.num_threads=6 num_workers=3"),
        (command.cpus(8, None), command.OK, ""),
    ],
)
def test_limits_are_judged(finding: command.Finding, status: str, word: str) -> None:
    assert finding.status == status
    assert word in finding.advice
    assert bool(finding.advice) == (status in (command.SLOW, command.BROKEN))


@pytest.mark.parametrize("there", command.DALI.values())
def test_missing_packages_are_named(there: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "package_version", lambda package: "2.4" if package == there[0] else None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    found = {f.name: f for f in command.versions()}
    assert "apt-get install gcc" in found["C compiler"].advice
    assert (found[there[0]].text, found[there[0]].status) == ("2.4", command.OK)
    assert (found[there[1]].status, found[there[1]].advice) == (command.SLOW, f"pip install {there[1]}")
    assert found["triton"].status == command.NOTE


@pytest.mark.parametrize(
    ("cuda", "there"), [("13.2", "12"), ("12.8", "12"), ("13.0", "13"), ("12.9", "13"), ("14.0", "12")]
)
def test_the_other_dali_is_proposed_only_if_the_pair_fails(
    cuda: str, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = command.DALI[there]
    monkeypatch.setattr(machine, "package_version", lambda package: "2.4.0" if package in installed else None)
    for good in (True, False):
        monkeypatch.setattr(command, "examine", lambda name, fresh, good=good: Answer(good, "planted"))
        found = command.decoding(fresh=False, cuda=Answer(True, "", [{"cuda": cuda}]))
        (finding,) = (f for f in found if f.name == "DALI on the GPU")
        assert bool(finding.advice) != good
        assert finding.advice.startswith("Install DALI") == (
            not good and (cuda, there) in (("13.2", "12"), ("12.9", "13"))
        )
        if (cuda, good) == ("13.2", False):
            assert "`pip uninstall -y nvidia-dali-cuda120 nvidia-nvimgcodec-cu12`" in finding.advice
            assert "`pip install nvidia-dali-cuda130==2.4.0`" in finding.advice


def test_devices_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: ["NVIDIA H200"])
    monkeypatch.setattr(machine, "driver", lambda: "535.104.05")
    device = {"name": "X", "memory": GIB, "capability": "9.0"}
    for answer, status in (
        (Answer(False, "no", []), command.SLOW),
        (Answer(False, "crashed: killed by SIGABRT"), command.BROKEN),
        (Answer(True, "", [device]), command.OK),
    ):
        driver, cuda, *_ = command.devices(answer)
        assert (driver.status, cuda.status) == (command.OK, status)


# --- the command


def test_small_limits_and_time_outs_are_broken(tmp_path: Path) -> None:
    """Planted: few files, and no time for any test; exit status 1."""
    start = "from gpuaug.tools.doctor import command; from gpuaug.tools.main import main; command.TIMEOUT_S = 0.01"
    words = f"ulimit -n 90; exec {sys.executable} -c '{start}; exit(main())' doctor json={tmp_path}/d.json"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1, done.stderr
    found = {f["name"]: f for f in json.loads((tmp_path / "d.json").read_text())["findings"]}
    assert found["open files"]["status"] == command.BROKEN
    assert "90 per process" in found["open files"]["text"]
    assert "did not answer within 0.01 s" in found["compiled on the CPU"]["text"]
    assert found["start methods"]["status"] == command.BROKEN
    assert "Broken: " in done.stdout


def test_overrides_of_the_loader_have_no_effect_and_are_checked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "probe", lambda name, **_: Answer(True, ""))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["doctor", "source.root=/data", "augment=simclr"]) in (0, 1)
    assert "source.root=/data, augment=simclr" in capsys.readouterr().err
    machine.verdicts.cache_clear()
    assert main(["doctor", "agument=simclr"]) == 2
    assert "agument" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted({*command.TESTS} - {*command.WITHOUT_CUDA}))
def test_on_a_gpu(name: str, cache: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    found = command.probe(name)
    assert not found.late
    if name in ("decoder_mixed", "stream", "fused_cuda"):
        assert found.good is True, found.text
    elif found.good is False:  # the JPEG engine is then left out
        command.keep(name, found)
        assert Decode(hardware_load=1.0).open("cuda").settings.hardware_load == 0.0
