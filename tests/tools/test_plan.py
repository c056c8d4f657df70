"""`gpuaug plan`: what a rehearsal measures, the formulas around it, and what is said where a machine is too small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import PIL.Image
import planted
import pytest
import torch
from common import PROGRAM
from conftest import ROOT
from torch import nn

import gpuaug
from gpuaug import machine
from gpuaug.loader.loader import Loader
from gpuaug.tools.main import main
from gpuaug.tools.plan import command as predict
from gpuaug.tools.plan.command import MIB, Left, Run, limits_of, total
from gpuaug.tools.train import training

MARGIN = 1.01 / (1 - predict.SPARE)  # of what has to be there over what is needed


def left(host: int, shared: int = 1 << 40, *, by: str = "test") -> Left:
    """Bytes left in host memory and in /dev/shm."""
    return {"host": (host, by), "shared": (shared, "/dev/shm")}


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


def build(photos: Path, *overrides: str) -> Loader:
    base = [f"source.root={photos}", "device=cpu", "augment=flip", "num_workers=1", "batch_size=16"]
    made: Loader = gpuaug.build(gpuaug.compose("train", [*base, *overrides]))
    return made


def run_of(loader: Loader, **costs: int) -> Run:
    """A run whose parts cost 10 MiB each, and what is given."""
    bound = predict.upper_bound(loader)
    parts = {"worker": 10 * MIB, "encoded": 10 * MIB, "work": 10 * MIB, "base": 10 * MIB, "batches": 1, **costs}
    return Run(loader=loader, costs=replace(bound, **parts))


def need(run: Run, place: predict.Place = "host", **changed: Any) -> int:
    """Bytes beyond this process, with other settings."""
    terms = replace(run, changed=changed).terms()
    return total([t for t in terms if t.name != "this process"], place)


def terms(loader: Loader) -> dict[str, int]:
    found = run_of(loader).terms()
    assert len({t.name for t in found}) == len(found)
    return {t.name: t.bytes for t in found}


def test_ready_batches_are_counted_by_prefetch_views_and_dtype(photos: Path) -> None:
    view = 16 * 224 * 224 * 3
    with build(photos) as loader:
        assert terms(loader)["ready batches"] == 4 * view * 4
    with build(photos, "prefetch=0", "dtype=bfloat16", "last=drop") as loader:
        assert terms(loader)["ready batches"] == 2 * view * 2
    with build(photos, "prefetch=50") as loader:  # an epoch has five batches
        assert terms(loader)["ready batches"] == 5 * view * 4
    with build(photos, "augment=dino", "memory_format=channels_last", "dtype=float16") as loader:
        assert terms(loader)["ready batches"] == 4 * 16 * 3 * (2 * 224 * 224 + 6 * 96 * 96) * 2


def test_workers_have_batches_in_shared_memory(photos: Path) -> None:
    with build(photos, "num_workers=0") as loader:
        assert "workers" not in terms(loader)
        assert total(run_of(loader).terms(), "shared") == 0
    with build(photos, "batch_size=2") as loader:
        run, behind = run_of(loader), predict.BEHIND
        assert total(run.terms(), "shared") == (2 + behind) * 10 * MIB
        assert need(run, "shared", num_workers=3) == (6 + behind) * 10 * MIB
        assert need(run, num_workers=3) - need(run) == (2 + 4) * 10 * MIB
    with build(photos, "batch_size=32", "num_workers=8") as loader:  # an epoch has three batches
        assert total(run_of(loader).terms(), "shared") == 3 * 10 * MIB


def test_row_groups_of_parquet_are_in_the_bound_of_every_worker(photos: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    files = sorted(photos.rglob("*.jpg"))[:60]
    table = pyarrow.table({"image": [f.read_bytes() for f in files], "label": [0] * len(files)})
    parquet.write_table(table, tmp_path / "train.parquet", row_group_size=20)
    with build(photos, "source=parquet", f"source.root={tmp_path / 'train.parquet'}") as loader:
        worker = predict.upper_bound(loader).worker
    group = max(sum(f.stat().st_size for f in files[k : k + 20]) for k in (0, 20, 40))
    assert worker > 64 * MIB + 3 * group


def test_stored_pixels_have_the_size_that_was_stored(photos: Path, tmp_path: Path) -> None:
    words = ["epochs=1", "augment=simclr", "source.subset=20", "num_workers=0"]
    assert main(["pack", f"source.root={photos}", f"out={tmp_path}/epochs", *words]) == 0
    with build(photos, "source=packed", f"source.root={tmp_path}/epochs", "augment=simclr", "device=cpu") as loader:
        bound = predict.upper_bound(loader)
    assert bound.image == 16 + 2 * 3 * 224 * 224
    assert bound.ready == 16 * 4 * 2 * 3 * 224 * 224


def test_sizes_are_those_of_the_files(photos: Path) -> None:
    files = sorted(photos.rglob("*.jpg"))
    with build(photos, "augment=none", "~augment.crop", "order=sequential", "batch_size=1") as loader:
        assert predict.upper_bound(loader, sample=1).image == files[0].stat().st_size
        assert loader.pipeline.stage.second_chances() == (0, 0)


def test_cache_and_ahead_are_bounded_by_what_there_is(photos: Path) -> None:
    every = sum(f.stat().st_size for f in photos.rglob("*.jpg"))
    with build(photos, "cache=ram", "ahead=1GiB") as loader:
        assert 0.6 * every < terms(loader)["cache"] < 1.7 * every
    with build(photos, "ahead=1GiB", "batch_size=2") as loader:
        assert 0.4 * every < terms(loader)["ahead"] < 1.5 * every
    with build(photos, "cache=ram", "cache.max_bytes=100KiB", "ahead=64KiB", "batch_size=2") as loader:
        found = terms(loader)
    assert found["cache"] == 100 * 1024
    assert found["ahead"] == 64 * 1024


def test_ranks_of_a_machine_have_one_cache(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with build(photos, "cache=ram", "cache.max_bytes=100KiB") as loader:
        run = run_of(loader)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
        room = 3 * need(run) - 2 * 100 * 1024
        assert not predict.lacking([run], left(room), share=1.0)
        assert predict.lacking([run], left(room - 1), share=1.0)


def test_what_fits_is_not_spoken_of(photos: Path) -> None:
    with build(photos) as loader:
        assert predict.shortage([run_of(loader)], left(1 << 40)) is None


def test_says_what_would_fit_and_never_a_smaller_batch(photos: Path) -> None:
    given = ("batch_size=4", "prefetch=5", "num_workers=4", "cache=ram", "cache.max_bytes=64MiB", "ahead=64MiB")
    with build(photos, *given) as loader:
        run = run_of(loader)
        least = need(run, prefetch=3, ahead=None, **{"cache.max_bytes": 4 << 10})
        here = left(int(least * MARGIN) + 2 * MIB, by="MemAvailable")
        short = predict.shortage([run], here)
        assert short is not None
        assert "MemAvailable has" in short.text
        assert f"`{' '.join(short.overrides)}`" in short.text
        assert "\n" not in short.text
        assert "ahead=null" in short.overrides
        assert not any("batch_size" in text for text in short.overrides)
        tight = left(1 << 40, int(need(run, "shared", num_workers=2) * MARGIN))
        few = predict.shortage([replace(run, prefix="val.")], tight)
        assert few is not None
        assert [text.partition("=")[0] for text in few.overrides] == ["val.num_workers"]
        assert "/dev/shm has" in few.text
    with build(photos, *given, *short.overrides) as loader:  # what the user gets who copies them
        assert predict.shortage([run_of(loader)], here) is None
    with build(photos, *given, few.overrides[0].removeprefix("val.")) as loader:
        assert predict.shortage([run_of(loader)], tight) is None


def test_a_second_loader_is_counted_beside_the_first(photos: Path) -> None:
    with build(photos, "prefetch=1") as first, build(photos, "prefetch=6", "batch_size=8") as second:
        runs = [run_of(first), replace(run_of(second), prefix="val.")]
        here = left(int((need(runs[0]) + need(runs[1], prefetch=3)) * MARGIN))
        assert predict.shortage(runs[1:], here) is None
        short = predict.shortage(runs, here)
    assert short is not None
    assert short.overrides == ("val.prefetch=3",)


def test_what_cannot_fit_asks_for_smaller_batches(photos: Path) -> None:
    with build(photos) as loader:
        short = predict.shortage([run_of(loader)], left(MIB))
    assert short is not None
    assert short.clear
    assert not short.overrides
    assert "`batch_size`, now 16" in short.text


def test_what_a_step_takes_is_counted(photos: Path) -> None:
    with build(photos, "prefetch=3") as loader:
        run = run_of(loader)
        here = left(int(need(run) / (1 - predict.SPARE)) + MIB)
        assert predict.shortage([run], here) is None
        short = predict.shortage([run_of(loader, step=12 * MIB)], here)
    assert short is not None
    assert any(text.startswith("prefetch=") for text in short.overrides)
    assert "step needs 12.0 MiB" in short.text


def test_training_is_refused_with_the_override_that_fits(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[dict[str, Any]] = []
    jobs: list[Any] = []
    before = training.Training.__init__

    def noting(self: training.Training, loader: Loader, **rest: Any) -> None:
        seen.append(limits_of(loader))
        before(self, loader, **rest)

    def rehearse(job: Any) -> predict.Peak:
        """As if it had been measured: 20 MiB of work, 20 of a step, and the ready batches."""
        jobs.append(job)
        batch = 2 * 32 * 32 * 3 * 4
        more = (job["config"]["prefetch"] + 2) * batch + 40 * MIB
        return predict.Peak(predict.Usage(), predict.Usage(more), step=20 * MIB, ready=99, batches=99)

    monkeypatch.setattr(training.Training, "__init__", noting)
    monkeypatch.setattr(predict, "rehearse", rehearse)
    small = ["augment.crop.size=32", "+model.width=8", "num_workers=1", "device=cpu", "last=drop", "batch_size=2"]
    call = ["train", f"source.root={photos}", f"out={tmp_path}", "epochs=1", "augment=flip", *small]

    def room(size: float) -> None:
        monkeypatch.setattr(predict, "memory_left", lambda device: left(int(size)))

    needs = 32 * 2 * 32 * 32 * 3 * 4 + 40 * MIB
    room(1 << 40)
    assert main([*call, "prefetch=30"]) == 0
    assert not jobs  # there is much more than an upper bound
    room(needs)  # 10 % of it are left to others, and a plan is not that exact: it may go on
    assert main([*call, "prefetch=30"]) == 0
    assert "memory may not suffice" in capsys.readouterr().err
    assert seen[-1]["prefetch"] == 30
    assert jobs[-1]["model"]["settings"]["model"]["width"] == 8
    room((needs - 2 * MIB) / 1.15)
    assert main([*call, "prefetch=30"]) == 2
    said = capsys.readouterr().err
    assert "test has" in said
    assert "step needs 20.0 MiB" in said
    assert "`check_memory=false`" in said
    assert len(seen) == 2
    monkeypatch.setattr(predict, "rehearse", lambda job: None)  # it took more than there is, and was ended
    assert main([*call, "prefetch=30"]) == 2
    assert main([*call, "prefetch=30", "check_memory=false"]) == 0
    assert seen[-1]["prefetch"] == 30
    assert "memory may not suffice" not in capsys.readouterr().err
    assert main([*call, "check_memory=2"]) == 2


def test_held_out_images_are_counted_too(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(predict, "memory_left", lambda device: left(100 * MIB))
    monkeypatch.setattr(predict, "rehearse", lambda job: predict.Peak(predict.Usage(), predict.Usage(60 * MIB)))
    call = ["train", f"source.root={photos}", f"out={tmp_path}", "epochs=1", "+model.width=8", "num_workers=0"]
    call += ["device=cpu", "last=drop", "batch_size=2", "augment.crop.size=32"]
    assert main([*call, f"val.source.root={photos}"]) == 2
    assert "test has 100.0 MiB" in capsys.readouterr().err


class Thinking(nn.Module):
    """Cannot be run without data: it looks at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images [B, 3, H, W] to [B, 8]."""
        y = self.norm(self.first(x)).relu()
        return y.mean(dim=(2, 3)) if float(y.sum().detach()) >= 0 else y.amax(dim=(2, 3))


def test_a_step_is_bounded_by_what_autograd_saves(photos: Path) -> None:
    model, state = Thinking().eval(), torch.random.get_rng_state()
    with build(photos, "augment.crop.size=32") as loader:
        bound = predict.upper_bound(loader, model=model).step
    maps = 16 * 8 * 32 * 32 * 4
    assert 2 * maps <= bound <= 12 * maps
    assert int(model.norm.num_batches_tracked) == 0
    assert not model.training
    assert torch.equal(torch.random.get_rng_state(), state)


def group(folder: Path, *, limit: int, used: int) -> dict[str, str]:
    """Files of a control group as the system has them, for :func:`machine.cgroup_left`."""
    (folder / "sys" / "job").mkdir(parents=True, exist_ok=True)
    (folder / "proc").write_text("0::/job\n")
    for name, value in (("max", limit), ("current", used + 7 * MIB)):
        (folder / "sys" / "job" / f"memory.{name}").write_text(f"{value}\n")
    (folder / "sys" / "job" / "memory.stat").write_text(f"anon {used}\ninactive_file {7 * MIB}\n")
    return {"proc": str(folder / "proc"), "root": str(folder / "sys")}


def test_the_smallest_limit_counts(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("batch_size=4", "prefetch=6", "num_workers=3", "ahead=64MiB")
    with build(photos, *given) as loader:
        run = run_of(loader)
        steps: list[dict[str, Any]] = [{}, {"ahead": None}, {"ahead": None, "prefetch": 2}]
        steps += [{"ahead": None, "prefetch": 1, "num_workers": 1}]
        group_left, order = machine.cgroup_left, ["ahead", "prefetch", "num_workers"]
        for at, changed in enumerate(steps):
            used = 300 * MIB
            limit = used + int(need(run, **changed) / (1 - predict.SPARE)) + MIB // 8
            files = group(tmp_path, limit=limit, used=used)
            monkeypatch.setattr(machine, "cgroup_left", lambda files=files: group_left(**files))
            short = predict.shortage([run], predict.memory_left(loader.device))
            if not at:
                assert short is None
                continue
            assert short is not None
            assert [text.partition("=")[0] for text in short.overrides] == order[:at]
            assert "limit of the control group has" in short.text


# -- the rehearsal ----------------------------------------------------------------------------------------------------


def test_command_writes_every_term(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    call = ["plan", f"source.root={photos}", "augment=flip", "batch_size=16", "num_workers=1", "device=cpu"]
    assert main([*call, f"json={file}", "seconds=4", "cache=ram", "ahead=1MiB"]) == 0
    printed, values = capsys.readouterr().out, json.loads(file.read_text())
    names = {t["name"]: t["bytes"] for t in values["terms"]}
    for name in ("this process", "workers", "encoded batches", "ready batches", "decoding, augmentation", "cache"):
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
    return {**parts, "epoch": 0, "left": {}, "seconds": 2.0, **changed}


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
    assert "2 of 3 images could not be read or decoded" in capsys.readouterr().out
    assert json.loads((tmp_path / "plan.json").read_text())["faults"] == 2


@pytest.mark.usefixtures("_forked")
def test_a_rehearsal_takes_steps_of_the_model(photos: Path, tmp_path: Path) -> None:
    faults = (f"faults.file={tmp_path / 'faults'}", "faults.policy=blank")
    model = {"_target_": "gpuaug.tools.train.model.SmallNet", "width": 32}
    given = {"classes": 5, "settings": {"model": model, "optimizer": "adamw"}}
    peak = predict.rehearse(job(photos, "num_workers=0", "batch_size=32", "last=drop", *faults, model=given))
    assert peak is not None
    assert peak.step > MIB
    assert peak.batches >= 3
    assert not os.listdir(tmp_path)  # nothing is recorded


@pytest.mark.usefixtures("_forked")
def test_a_rehearsal_that_needs_too_much_is_ended(photos: Path) -> None:
    assert predict.rehearse(job(photos, "num_workers=1", "prefetch=8", left={"host": 20 * MIB})) is None


@pytest.mark.usefixtures("_forked")
def test_the_error_of_a_rehearsal_is_that_of_the_run(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(gpuaug.GpuaugError, match="does not exist"):
        predict.rehearse(job(tmp_path / "none"))


def test_an_epoch_without_batches_is_refused_before_the_rehearsal(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(predict, "rehearse", None)
    assert main(["plan", f"source.root={photos}", "device=cpu", "last=drop", "batch_size=100"]) == 2
    assert "an epoch has no batches: 65 samples, `batch_size=100`, `last=drop`." in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["seconds=0", "sample=0", "json=3"])
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
