"""`gpuaug plan`: what a rehearsal measures, and what is said where a machine is too small."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import PIL.Image
import planted
import pytest
from conftest import ROOT
from scenes import write

import gpuaug
from gpuaug import machine
from gpuaug.loader.loader import Loader
from gpuaug.tools.main import main
from gpuaug.tools.memory import Usage
from gpuaug.tools.plan import command as plan
from gpuaug.tools.plan.command import Left, Peak

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
    plain = {"base": Usage(main=40 * MIB), "most": most, "ready": 99, "batches": 99}
    return Peak(**{**plain, **measured})


def sizes(loader: Loader, **measured: Any) -> dict[str, int]:
    return {each.stage: each.bytes for each in plan.stages(loader, peak(**measured))}


def test_stages_are_what_was_measured(photos: Path) -> None:
    with build(photos) as loader:
        assert sizes(loader) == {
            "start": 40 * MIB, "read: workers": 20 * MIB, "read: bytes": 10 * MIB, "decode, augment": 60 * MIB,
        }  # fmt: skip
        assert plan.total(plan.stages(loader, peak()), "host") == 130 * MIB


def test_batches_that_come_later_are_added(photos: Path) -> None:
    with build(photos, "prefetch=3") as loader:  # an epoch has five batches
        assert sizes(loader, ready=1, batch=MIB)["prefetch"] == 2 * MIB
        assert "prefetch" not in sizes(loader, ready=3, batch=MIB)
    with build(photos, "prefetch=50") as loader:
        assert sizes(loader, ready=1, batch=MIB)["prefetch"] == 2 * MIB


def test_what_cuda_would_need_grows_with_threads_images_and_views(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for k in range(8):
        PIL.Image.new("RGB", (60, 40)).save(tmp_path / "a" / f"{k}.jpg")
    words = ["~augment.crop", "+augment.crop={_target_: gpuaug.Resize, size: [16, 16]}", "prefetch=1"]

    def needs(*overrides: str) -> dict[tuple[str, str], int]:
        with build(tmp_path, *words, *overrides) as loader:
            return {(each.stage, each.place): each.bytes for each in plan.on_cuda(loader, MIB)}

    first = needs("batch_size=2", "decode.num_threads=2")
    assert first == {
        ("nvJPEG", "device"): 2 * 16 * MIB,
        ("nvJPEG", "host"): 2 * 2 * 8 * MIB,
        ("decode", "device"): 2 * 2 * 3 * 60 * 40,  # two decoders
        ("resize", "device"): 2 * 2 * 3 * (60 * 40 + 16 * 16),
        ("views", "device"): 7 * 2 * 3 * 16 * 16,  # seven batches
        ("augment", "device"): 4 * 2 * 3 * 16 * 16,  # float32
        ("batches", "device"): 3 * MIB,
    }
    second = needs("batch_size=4", "decode.num_threads=5", "augment.crop.size=[32,32]", "prefetch=0")
    for (stage, place), factor in zip(first, (2.5, 2.5, 1, 0, 32 / 7, 8, 2 / 3), strict=True):
        assert not factor or second[stage, place] == factor * first[stage, place]
    assert needs("batch_size=2", "decode.max_bytes=10000")["decode", "device"] == 2 * 10000


def test_shortage_names_the_largest_part_and_its_setting(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with build(photos) as loader:
        listed = plan.stages(loader, peak())
        assert plan.shortage(listed, left(int(90 * MIB / 0.9) + MIB)) == ""
        said = plan.shortage(listed, left(95 * MIB), prefix="train_data.")
        assert "needs 90.0 MiB of memory, but test has 95.0 MiB left" in said
        assert "The largest stage, `decode, augment`, takes 60.0 MiB" in said
        assert "`train_data.prefetch` or `train_data.batch_size`" in said
        monkeypatch.setattr(machine, "local_world_size", lambda: 4)
        assert "needs 360.0 MiB" in plan.shortage(listed, left(MIB))


def test_the_smallest_limit_counts(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with build(photos) as loader:
        listed = plan.stages(loader, peak())
        for of_group, short in ((101 * MIB, False), (80 * MIB, True)):
            monkeypatch.setattr(machine, "cgroup_left", lambda of_group=of_group: of_group)
            said = plan.shortage(listed, plan.memory_left(loader.device))
            assert ("limit of the control group has" in said) == short


# -- the rehearsal ----------------------------------------------------------------------------------------------------


def test_command_writes_every_term(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    call = ["plan", f"source.root={photos}", "augment=flip", "batch_size=16", "num_workers=1", "device=cpu"]
    assert main([*call, f"json={file}", "seconds=4"]) == 0
    printed, values = capsys.readouterr().out, json.loads(file.read_text())
    sizes = {each["stage"]: each["bytes"] for each in values["stages"]}
    for name in ("start", "read: workers", "read: bytes", "decode, augment"):
        assert f"\n{name} " in printed
        assert sizes[name] > 0
    assert "2 prefetched" in printed
    assert values["host_memory"] == sum(sizes.values())
    assert values["rehearsal"] >= 5
    assert values["fits"] is True
    assert {each["stage"] for each in values["on_cuda"]} >= {"nvJPEG", "decode", "resize", "views", "batches"}
    assert "not compared with any GPU yet" in printed


def job(photos: Path, *overrides: str, **changed: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf

    composed = gpuaug.compose("train", [f"source.root={photos}", "device=cpu", "augment.crop.size=32", *overrides])
    config = OmegaConf.to_container(composed, resolve=True)
    return {"config": config, "trust": (), "limit": math.inf, "seconds": 2.0, **changed}


@pytest.fixture
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rehearsals whose process need not import torch."""
    monkeypatch.setattr(subprocess, "Popen", forked.popen)


@pytest.mark.usefixtures("_forked")
def test_images_that_cannot_be_read_are_counted_and_not_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").mkdir()
    for name in ("1.jpg", "2.jpg"):
        (tmp_path / "a" / name).write_bytes(b"no image")
    PIL.Image.new("RGB", (40, 30)).save(tmp_path / "a" / "3.jpg")
    words = [f"source.root={tmp_path}", "device=cpu", "num_workers=0", "augment.crop.size=32", "seconds=1"]
    words += [f"faults.file={tmp_path}/faults.jsonl", "faults.policy=raise"]
    assert main(["plan", *words, f"json={tmp_path}/plan.json"]) == 0
    assert "images could not be read or decoded" in capsys.readouterr().out
    assert json.loads((tmp_path / "plan.json").read_text())["faults"] >= 2
    assert not (tmp_path / "faults.jsonl").exists()


def test_a_rehearsal_waits_until_the_queues_are_full(photos: Path) -> None:
    """Also where a batch takes 5 % of the time, as on a busy machine."""
    source = planted.Source(planted.jpegs(photos, count=4), wait=0.04)
    words = ["~source", "device=cpu", "augment=flip", "augment.crop.size=32", "num_workers=0", "prefetch=3"]
    with gpuaug.build(gpuaug.compose("train", [*words, "batch_size=4"]), source=source) as loader:
        assert plan.measure(loader, seconds=3.0).ready >= 3


@pytest.mark.usefixtures("_forked")
def test_a_rehearsal_that_needs_too_much_is_ended(photos: Path) -> None:
    assert plan.rehearse(job(photos, "num_workers=1", "prefetch=8", limit=20 * MIB)) is None


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


def test_a_plan_with_masks_is_within_fifteen_percent(tmp_path: Path) -> None:
    """`bench/plan.py` compares more runs."""
    write(tmp_path / "scenes", count=64)
    words = ["source=masks", f"source.root={tmp_path}/scenes", "targets=segmentation", "device=cpu", "num_workers=1",
             "batch_size=8", "augment=standard", "augment.crop.size=320", "order=repeated",
             "order.repeats=3"]  # fmt: skip
    file = tmp_path / "plan.json"
    assert main(["plan", *words, "seconds=3", f"json={file}"]) == 0
    values = json.loads(file.read_text())
    assert values["rehearsal"] >= 6
    code = (
        "import sys, gpuaug; from gpuaug.tools.plan.command import measure\n"
        "with gpuaug.build(gpuaug.compose('train', sys.argv[1:])) as loader:\n"
        "    print(measure(loader, seconds=3).most.host)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, check=True, capture_output=True, text=True)
    assert abs(values["host_memory"] / int(done.stdout) - 1) < 0.15, (values, done.stdout)
