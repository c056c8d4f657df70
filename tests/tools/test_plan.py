"""`gpuaug plan`: what a rehearsal measures, and what is said where a machine is too small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import PIL.Image
import planted
import pytest
from common import PROGRAM
from conftest import ROOT

import gpuaug
from gpuaug import machine
from gpuaug.loader.loader import Loader
from gpuaug.tools.main import main
from gpuaug.tools.memory import Usage
from gpuaug.tools.plan import command as plan
from gpuaug.tools.plan.command import Left, Peak, Run

MIB = 2**20
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


def left(host: int, *, by: str = "test") -> Left:
    """Bytes left in host memory."""
    return {"host": (host, by)}


def build(photos: Path, *overrides: str) -> Loader:
    base = [f"source.root={photos}", "device=cpu", "augment=flip", "num_workers=1", "batch_size=16"]
    made: Loader = gpuaug.build(gpuaug.compose("train", [*base, *overrides]))
    return made


def peak(**measured: Any) -> Peak:
    """60 MiB of work, 20 of workers, 10 of encoded batches; every queue was full."""
    most = Usage(main=100 * MIB, workers=20 * MIB, encoded=10 * MIB)
    plain = {"base": Usage(main=40 * MIB), "most": most, "ready": 99, "batches": 99, "image": 1e4}
    return Peak(**{**plain, **measured})


def sizes(loader: Loader, **measured: Any) -> dict[str, int]:
    found = plan.parts(loader, peak(**measured))
    assert len({part.name for part in found}) == len(found)
    return {part.name: part.bytes for part in found}


def test_parts_are_what_was_measured(photos: Path) -> None:
    with build(photos) as loader:
        assert sizes(loader, step=15 * MIB) == {
            "this process": 40 * MIB, "workers": 20 * MIB, "encoded batches": 10 * MIB,
            "decoding, augmentation, batches": 45 * MIB, "model step": 15 * MIB,
        }  # fmt: skip
        assert plan.total(plan.parts(loader, peak()), "host") == 130 * MIB


def test_batches_cache_and_ahead_that_come_later_are_added(photos: Path) -> None:
    files = [file.stat().st_size for file in photos.rglob("*.jpg")]
    image = sum(files) / len(files)
    with build(photos, "prefetch=3") as loader:  # an epoch has five batches
        assert sizes(loader, ready=1, batch=MIB)["batches that wait later"] == 2 * MIB
        assert "batches that wait later" not in sizes(loader, ready=3, batch=MIB)
    with build(photos, "prefetch=50") as loader:
        assert sizes(loader, ready=1, batch=MIB)["batches that wait later"] == 2 * MIB
    with build(photos, "cache=ram", "cache.max_bytes=1MiB", "ahead=1KiB") as loader:
        assert sizes(loader, image=image)["cache"] == MIB
        assert sizes(loader, image=image)["ahead"] == 1024
    with build(photos, "cache=ram", "cache.max_bytes=1GiB", "ahead=1GiB", "prefetch=1") as loader:
        assert sizes(loader, image=image)["cache"] == pytest.approx(sum(files) + 24 * len(files), abs=1)
        assert sizes(loader, image=image)["ahead"] == pytest.approx(2 * 16 * image, abs=1)


def test_shortage_names_the_largest_part_and_its_setting(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with build(photos) as loader:
        run = Run(loader=loader, peak=peak(), prefix="train_data.")
        assert plan.shortage([run], left(int(90 * MIB / 0.9) + MIB)) == ""
        said = plan.shortage([run], left(95 * MIB))
        assert "needs 90.0 MiB of memory, but test has 95.0 MiB left" in said
        assert "decoding, augmentation, batches, takes 60.0 MiB" in said
        assert "`train_data.prefetch` or `train_data.batch_size`" in said
        held_out = Run(loader=loader, peak=peak(), prefix="val.")
        assert "needs 180.0 MiB" in plan.shortage([run, held_out], left(95 * MIB))
    with build(photos, "cache=ram", "cache.max_bytes=1MiB") as loader:
        monkeypatch.setattr(machine, "local_world_size", lambda: 4)  # ranks of a machine have one cache
        run = Run(loader=loader, peak=peak(image=1e6))
        assert "needs 361.0 MiB" in plan.shortage([run], left(MIB))


def group(folder: Path, *, limit: int, used: int) -> dict[str, str]:
    """Files of a control group as the system has them, for :func:`machine.cgroup_left`."""
    (folder / "sys" / "job").mkdir(parents=True, exist_ok=True)
    (folder / "proc").write_text("0::/job\n")
    for name, value in (("max", limit), ("current", used + 7 * MIB)):
        (folder / "sys" / "job" / f"memory.{name}").write_text(f"{value}\n")
    (folder / "sys" / "job" / "memory.stat").write_text(f"anon {used}\ninactive_file {7 * MIB}\n")
    return {"proc": str(folder / "proc"), "root": str(folder / "sys")}


def test_the_smallest_limit_counts(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group_left = machine.cgroup_left
    with build(photos) as loader:
        run = Run(loader=loader, peak=peak())
        for limit, short in ((401 * MIB, False), (380 * MIB, True)):
            files = group(tmp_path, limit=limit, used=300 * MIB)
            monkeypatch.setattr(machine, "cgroup_left", lambda files=files: group_left(**files))
            said = plan.shortage([run], plan.memory_left(loader.device))
            assert ("limit of the control group has" in said) == short


def test_training_rehearses_on_request_and_is_refused_with_the_numbers(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs: list[Any] = []

    def rehearse(job: Any) -> Peak:
        jobs.append(job)
        return peak(step=20 * MIB)

    def room(size: float) -> None:
        monkeypatch.setattr(plan, "memory_left", lambda device: left(int(size)))

    monkeypatch.setattr(plan, "rehearse", rehearse)
    small = ["augment.crop.size=32", "+model.width=8", "num_workers=0", "device=cpu", "last=drop", "batch_size=2"]
    call = ["train", f"source.root={photos}", f"out={tmp_path}", "epochs=1", "augment=flip", *small]
    room(MIB)
    assert main(call) == 0
    assert not jobs
    room(90 * MIB)  # 10 % of it are left to others, and a plan is not that exact: it may go on
    assert main([*call, "check_memory=true"]) == 0
    assert "memory may not suffice" in capsys.readouterr().err
    assert jobs[-1]["model"]["settings"]["model"]["width"] == 8
    room(78 * MIB)
    assert main([*call, "check_memory=true"]) == 2
    said = capsys.readouterr().err
    assert "test has 78.0 MiB" in said
    assert "`check_memory=false`" in said
    room(170 * MIB)  # held-out images are counted too
    assert main([*call, "check_memory=true"]) == 0
    room(150 * MIB)
    assert main([*call, "check_memory=true", f"val.source.root={photos}"]) == 2
    monkeypatch.setattr(plan, "rehearse", lambda job: None)  # it took more than there is, and was ended
    assert main([*call, "check_memory=true"]) == 2
    assert main([*call, "check_memory=2"]) == 2


# -- the rehearsal ----------------------------------------------------------------------------------------------------


def test_command_writes_every_term(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    call = ["plan", f"source.root={photos}", "augment=flip", "batch_size=16", "num_workers=1", "device=cpu"]
    assert main([*call, f"json={file}", "seconds=4", "cache=ram", "ahead=1MiB"]) == 0
    printed, values = capsys.readouterr().out, json.loads(file.read_text())
    names = {part["name"]: part["bytes"] for part in values["parts"]}
    for name in ("this process", "workers", "encoded batches", "decoding, augmentation, batches", "cache"):
        assert name in printed
        assert names[name] > 0
    assert "2 prefetched" in printed
    assert values["host_memory"] == sum(names.values())
    assert values["rehearsal"] >= 5
    assert values["fits"] is True


def job(photos: Path, *overrides: str, **changed: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf

    config = gpuaug.compose("train", [f"source.root={photos}", "device=cpu", "augment.crop.size=32", *overrides])
    parts = {"config": OmegaConf.to_container(config, resolve=True), "classes": None, "trust": (), "model": None}
    return {**parts, "left": {}, "seconds": 2.0, **changed}


@pytest.fixture
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rehearsals whose process need not import torch."""
    monkeypatch.setattr(subprocess, "Popen", forked.popen)


@pytest.mark.usefixtures("_forked")
def test_images_that_cannot_be_read_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").mkdir()
    for name in ("1.jpg", "2.jpg"):
        (tmp_path / "a" / name).write_bytes(b"no image")
    PIL.Image.new("RGB", (40, 30)).save(tmp_path / "a" / "3.jpg")
    words = [f"source.root={tmp_path}", "device=cpu", "num_workers=0", "augment.crop.size=32", "seconds=1"]
    assert main(["plan", *words, f"json={tmp_path}/plan.json"]) == 0
    assert "images could not be read or decoded" in capsys.readouterr().out
    assert json.loads((tmp_path / "plan.json").read_text())["faults"] >= 2


@pytest.mark.usefixtures("_forked")
def test_a_rehearsal_takes_steps_of_the_model(photos: Path, tmp_path: Path) -> None:
    faults = (f"faults.file={tmp_path / 'faults'}", "faults.policy=blank")
    model = {"_target_": "gpuaug.tools.train.model.SmallNet", "width": 32}
    given = {"classes": 5, "settings": {"model": model, "optimizer": "adamw"}}
    found = plan.rehearse(job(photos, "num_workers=0", "batch_size=32", "last=drop", *faults, model=given))
    assert found is not None
    assert found.step > MIB
    assert found.batches >= 3
    assert not os.listdir(tmp_path)  # nothing is recorded


@pytest.mark.usefixtures("_forked")
def test_a_rehearsal_that_needs_too_much_is_ended(photos: Path) -> None:
    assert plan.rehearse(job(photos, "num_workers=1", "prefetch=8", left={"host": 20 * MIB})) is None


@pytest.mark.usefixtures("_forked")
def test_the_error_of_a_rehearsal_is_that_of_the_run(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(gpuaug.GpuaugError, match="does not exist"):
        plan.rehearse(job(tmp_path / "none"))


def test_an_epoch_without_batches_is_refused_before_the_rehearsal(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "rehearse", None)
    assert main(["plan", f"source.root={photos}", "device=cpu", "last=drop", "batch_size=100"]) == 2
    assert "an epoch has no batches: 65 samples, `batch_size=100`, `last=drop`." in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["seconds=0", "json=3"])
def test_wrong_keys_are_refused(photos: Path, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"source.root={photos}", wrong]) == 2
    assert f"`{wrong.partition('=')[0]}` must be" in capsys.readouterr().err


def test_help_answers_without_torch() -> None:
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "gpuaug.tools", "plan", "--help"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "seconds: 15" in shown.stdout
    assert "torch" not in shown.stderr


@pytest.fixture(scope="module")
def camera(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 files of 700 x 525 pixels and more."""
    root = tmp_path_factory.mktemp("camera") / "all"
    root.mkdir()
    files = planted.jpegs(photos, count=60, size=(700, 525))
    for k in range(600):
        (root / f"{k:04d}.jpg").write_bytes(files[k % len(files)])
    return root.parent


@pytest.mark.long
@pytest.mark.parametrize(
    "overrides",
    [
        ("num_workers=1",),
        ("num_workers=6",),
        ("num_workers=1", "prefetch=12", "batch_size=32"),
        ("augment=dino", "batch_size=32"),
        ("cache=ram", "augment=simclr", "prefetch=1"),
        ("num_workers=2", "ahead=64MiB"),
    ],
    ids=["few workers", "many workers", "large prefetch", "multi-view", "ram cache", "ahead"],
)
def test_plan_is_within_fifteen_percent(camera: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    file, words = tmp_path / "plan.json", [f"source.root={camera}", "device=cpu", *overrides]
    call = [*PROGRAM, "plan", *words, f"json={file}"]
    subprocess.run(call, cwd=ROOT, check=True, capture_output=True, text=True)
    planned = json.loads(file.read_text())["host_memory"]
    code = (
        "import sys, gpuaug; from gpuaug.tools.plan.command import measure\n"
        "with gpuaug.build(gpuaug.compose('train', sys.argv[1:])) as loader:\n"
        "    print(measure(loader, seconds=40).most.host)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, check=True, capture_output=True, text=True)
    assert abs(planned / int(done.stdout) - 1) < 0.15
