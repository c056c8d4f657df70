"""`gpuaug profile`: planted bottlenecks are named, and what is recommended brings what was predicted."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import planted
import pytest
import torch
from PIL import Image

import gpuaug
from gpuaug.batch import Batch
from gpuaug.cli import main
from gpuaug.diagnose import profiling
from gpuaug.diagnose.profiling import Cost, Measured, Profiler, bottleneck, diagnose, predict, run_whole
from gpuaug.errors import ConfigError
from gpuaug.loader import Loader

ROOT = Path(__file__).parent.parent
BASE = ("device=cpu", "num_workers=1", "batch_size=16", "augment=flip", "augment.crop.size=64", "~source")


def build(source: Any, *overrides: str, **objects: Any) -> Loader:
    config = gpuaug.compose("train", [*BASE, *overrides])
    made: Loader = gpuaug.build(config, source=source, trust=["planted."], **objects)
    return made


def judged(loader: Loader, step: Any = None, **how: Any) -> tuple[Measured, profiling.Verdict]:
    with Profiler(loader, step=step, **{"repeats": 3, "seconds": 0.1, **how}) as profiler:
        measured = profiler.measure()
        return measured, diagnose(profiler, measured)


def gain(before: Loader, after: Loader, step: Any = None, *, rounds: int = 3) -> float:
    """How many times as fast the second is, both measured in turns."""
    notes = [profiling._Notes(), profiling._Notes()]
    endless = [profiling._endless(loader) for loader in (before, after)]
    for _ in range(rounds):
        for note, loader, tasks in zip(notes, (before, after), endless, strict=True):
            run_whole(note, loader, tasks, step, seconds=0.5, sync=lambda: None)
    return notes[0].cost().wall / notes[1].cost().wall


def plant(
    source: Any,
    *overrides: str,
    named: str,
    brings: float | None = None,
    other: str | None = None,
    step: Any = None,
    cores: float = 1.0,
    **objects: Any,
) -> profiling.Verdict:
    """Require the name, and that the recommended overrides bring at least half of the gain that was predicted.

    Args:
        source, overrides, objects: the loader.
        named: the bottleneck.
        brings: the overrides must be predicted to bring at least this factor; None: none are expected.
        other: what must stand in an override that changes what is trained on; then that one is tried.
        step: the training step.
        cores: that must be free for anything to be gained; on a busier machine the name alone is required.
    """
    with build(source, *overrides, **objects) as loader:
        measured, verdict = judged(loader, step)
        said = f"{verdict.bottleneck}: {verdict.text} {verdict.evidence} {verdict.changes} {verdict.others} {measured}"
        assert verdict.bottleneck == named, said
        if measured.cores >= cores and (brings is not None or other is not None):
            change, predicted = verdict.overrides, verdict.gain
            if other is not None:
                found = next((c for c in verdict.others if any(other in o for o in c.overrides)), None)
                assert found is not None, said
                change, predicted = [*change, *found.overrides], predicted * found.gain
            assert predicted >= (brings or 1.5), said
            mixed = {"mix": None} if "mix=none" in change else {}
            with build(source, *overrides, *change, **{**objects, **mixed}) as changed:
                brought = gain(loader, changed, step)
            assert brought - 1 >= 0.5 * (predicted - 1), f"{brought:.2f} of {predicted:.2f}. {said}"
    return verdict


def sleeping(seconds: float) -> Callable[[Batch], None]:
    """A model on a device of its own: the host only waits for it."""

    def step(batch: Batch) -> None:
        time.sleep(seconds)

    return step


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def small(photos: Path) -> list[bytes]:
    return planted.jpegs(photos)


# -- the formula ------------------------------------------------------------------------------------------------------


def cost(ms: float, cpu: float | None = None) -> Cost:
    return Cost(ms / 1e3, (ms if cpu is None else cpu) / 1e3)


def measured(**changed: Any) -> Measured:
    plain = Measured(
        batch_size=16, workers=2, prefetch=2, main_thread=False, device_type="cpu", cores=2.0,
        source=cost(1.0), read=cost(0.6, 1.1), copy=cost(0.1), take=0.0001, decode=cost(1.0), augment=cost(0.5),
        host=cost(0.1), host_parts={"reading headers": 0.0001}, step=None, whole=None,
    )  # fmt: skip
    return replace(plain, **changed)


def test_prediction_is_the_longest_of_the_parallel_ways() -> None:
    assert predict(measured()).seconds == pytest.approx(1.7e-3)  # 0.1 take over + 1.0 + 0.5 + 0.1
    assert predict(measured(workers=0)).seconds == pytest.approx(2.2e-3)  # reads in the same thread
    assert predict(measured(step=cost(3.0, 0.1))).seconds == pytest.approx(3.0e-3)
    assert predict(measured(step=cost(3.0, 6.0))).seconds == pytest.approx((1.1 + 1.0 + 0.5 + 0.1 + 6.0) / 2 * 1e-3)
    assert predict(measured(step=cost(3.0, 0.1), prefetch=0)).seconds == pytest.approx(4.7e-3)
    assert predict(measured(step=cost(3.0, 0.1), main_thread=True)).seconds == pytest.approx(3.6e-3)
    assert "= 1.7 ms" in predict(measured()).text


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"read": cost(9, 0.2), "source": cost(18, 0.2)}, "storage"),
        ({"read": cost(9, 18), "source": cost(18)}, "workers"),
        ({"read": cost(9, 18), "source": cost(4, 0.2), "copy": cost(8)}, "inter-process copy"),
        ({"decode": cost(5)}, "decode"),
        ({"augment": cost(5)}, "augment"),
        ({"host": cost(5)}, "host overhead"),
        ({"step": cost(5)}, "model"),
        ({"step": cost(2, 0.1), "prefetch": 0}, "host overhead"),
        ({"step": cost(20, 0.1), "prefetch": 0}, "model"),
        ({"whole": cost(9)}, "host overhead"),  # nothing explains it
        ({"source": cost(18, 8), "read": cost(9, 18), "alone": 0.5}, "workers"),  # busy, on a machine with others
    ],
)
def test_bottleneck_is_the_stage_whose_absence_would_bring_most(changed: dict[str, Any], name: str) -> None:
    assert bottleneck(measured(**changed))[0] == name


# -- planted ----------------------------------------------------------------------------------------------------------


def test_storage_that_more_workers_hide(small: list[bytes]) -> None:
    verdict = plant(planted.Source(small, wait=0.005), named="storage", brings=2.0)
    assert any(o.startswith("num_workers=") for o in verdict.overrides)


def test_kornia_backend_instead_of_fused(small: list[bytes]) -> None:
    recipe = ("augment=standard", "augment.crop.size=160", "augment.backend=kornia")
    verdict = plant(planted.Source(small), *recipe, named="augment", brings=2.0)
    assert "augment.backend=fused" in verdict.overrides


def test_slow_model_is_the_limit_and_nothing_is_recommended(small: list[bytes]) -> None:
    verdict = plant(planted.Source(small), named="model", step=sleeping(0.25))
    assert "nothing in the loader would help" in verdict.text
    assert verdict.changes == []
    assert verdict.others == []


@pytest.mark.long
def test_storage_with_a_bandwidth(small: list[bytes], tmp_path: Path) -> None:
    source = planted.Source(small, wait=0.012, turns=str(tmp_path / "lock"))
    verdict = plant(source, "num_workers=2", named="storage")
    assert verdict.gain < 1.5  # more workers only queue
    assert any(c.overrides == ("cache=ram",) for c in verdict.others)


@pytest.mark.long
def test_busy_worker(small: list[bytes]) -> None:
    verdict = plant(planted.Source(small, work=0.012), named="workers", brings=1.2, cores=1.6)
    assert verdict.overrides in ([], ["num_workers=2"])  # with no core free, more workers help nobody


@pytest.mark.long
def test_large_copies_between_processes() -> None:
    plant(planted.Source(planted.raws(1800)), "~augment.crop", "+augment.crop={_target_: gpuaug.RandomCrop, size: 32}",
          named="inter-process copy")  # fmt: skip


@pytest.mark.long
def test_large_images(photos: Path) -> None:
    verdict = plant(planted.Source(planted.jpegs(photos, count=6, size=(2000, 1500))), named="decode")
    assert any("gpuaug pack" in c.text and c.gain > 3 for c in verdict.others)


@pytest.mark.long
def test_slow_operation(small: list[bytes]) -> None:
    op = "+augment.ops.slow={_target_: planted.SlowOp, p: 0.9}"
    verdict = plant(planted.Source(small), op, named="augment", other="~augment.ops.slow")
    assert any("`slow`" in c.text for c in verdict.others)


@pytest.mark.long
def test_slow_callback_on_the_host(small: list[bytes]) -> None:
    verdict = plant(planted.Source(small), named="host overhead", other="mix=none", mix=planted.SlowMix())
    assert any("mix" in text for text in verdict.evidence)


@pytest.mark.long
def test_one_thread_that_decodes(photos: Path) -> None:
    files = planted.jpegs(photos, count=8, size=(1200, 900))
    plant(planted.Source(files), "decode.num_threads=1", named="decode", brings=1.15, cores=1.6)


@pytest.mark.long
def test_nothing_is_made_ahead(photos: Path) -> None:
    files = planted.jpegs(photos, count=8, size=(1200, 900))
    with build(planted.Source(files)) as loader:
        made = judged(loader)[0]
    step = sleeping(16 * (made.decode.wall + made.augment.wall))  # as long as making a batch takes
    verdict = plant(planted.Source(files), "prefetch=0", named="host overhead", brings=1.2, step=step)
    assert "prefetch=2" in verdict.overrides


# -- the command ------------------------------------------------------------------------------------------------------


def test_command_prints_draws_and_writes(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "app.yaml").write_text(
        "defaults:\n  - gpuaug@train_data: train\n  - _self_\n"
        f"train_data:\n  source:\n    root: {photos}\n  batch_size: 8\n  device: cpu\n  num_workers: 1\n"
        "  augment: {crop: {size: 32}}\n"
    )
    out, file, trace = tmp_path / "p.png", tmp_path / "p.json", tmp_path / "t.json"
    call = ["profile", "--config-dir", str(folder), "--config-name", "app", "--at", "train_data"]
    call += ["model._target_=gpuaug.cli.model.SmallNet", "+model.width=8", f"out={out}", f"json={file}"]
    assert main([*call, f"trace={trace}", "repeats=1", "seconds=0.02"]) == 0
    printed, values = capsys.readouterr().out, json.loads(file.read_text())
    for word in (
        "each alone",
        "decode",
        "augment",
        "training step",
        "the whole",
        "bottleneck",
        "seconds per image = max(",
    ):
        assert word in printed
    assert set(values["stages"]) == {"source", "read", "copy", "decode", "augment", "host", "step", "whole"}
    assert values["bottleneck"] in profiling.TITLES
    for name in values["overrides"]:
        assert name.startswith("train_data.")
    with Image.open(out) as picture:
        colors = {color for _, color in picture.convert("RGB").getcolors(1 << 16) or []}
        assert picture.width == 960
        # the limiting stage in red, unless it is the model
        assert colors >= {(29, 130, 200), (42, 157, 90) if values["bottleneck"] == "model" else (230, 57, 70)}
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"read", "decode", "augment", "step"} <= names


def test_profiling_changes_nothing_of_the_loader(photos: Path) -> None:
    def pixels(loader: Loader) -> list[torch.Tensor]:
        return [batch.images for batch in loader]

    settings = {"augment": gpuaug.Augment(crop=gpuaug.RandomResizedCrop(24)), "batch_size": 16, "device": "cpu"}
    with gpuaug.Loader(gpuaug.FolderSource(photos), **settings, num_workers=0) as loader:
        before, state, generator = pixels(loader), loader.state_dict(), torch.get_rng_state()
        loader.set_epoch(0)
        judged(loader, repeats=1, seconds=0.02)
        assert torch.equal(generator, torch.get_rng_state())
        assert all(torch.equal(a, b) for a, b in zip(before, pixels(loader), strict=True))
        assert loader.state_dict() == state


def test_training_can_be_profiled_and_stays_the_same(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpuaug.cli import profile

    whole = profile.Settings
    monkeypatch.setattr(profile, "Settings", lambda **given: whole(**{**given, "repeats": 1, "seconds": 0.02}))
    small = ["augment=flip", "augment.crop.size=32", "+model.width=8", "batch_size=8", "last=drop", "num_workers=0"]
    call = ["train", f"source.root={photos}", "device=cpu", "epochs=1", *small]
    losses = []
    for number, more in enumerate(([], ["profiling=true"])):
        out = tmp_path / str(number)
        assert main([*call, f"out={out}", f"json={out}/r.json", *more]) == 0
        losses.append(json.loads((out / "r.json").read_text())["history"][0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert "bottleneck" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["repeats=0", "seconds=-1", "tune=maybe", "optimizer=lion", "out=7"])
def test_wrong_keys_are_refused(photos: Path, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", f"source.root={photos}", wrong]) == 2
    assert f"`{wrong.partition('=')[0]}` must be" in capsys.readouterr().err


def test_no_batch_is_an_error(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["profile", f"source.root={photos}", "batch_size=1000", "last=drop", "num_workers=0", "device=cpu"]
    assert main(call) == 2
    assert "an epoch has no batch" in capsys.readouterr().err


def test_help_is_fast() -> None:
    begin = time.process_time(), time.perf_counter()
    shown = subprocess.run(
        [sys.executable, "-m", "gpuaug.cli", "profile", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "hardware decoder" in shown.stdout
    assert time.perf_counter() - begin[1] < 5  # under one second where nobody else is at work


@pytest.mark.long
def test_tune_finds_the_workers_that_slow_storage_needs(small: list[bytes]) -> None:
    source = planted.Source(small, wait=0.012)

    def make(chosen: Any) -> Loader:
        return build(source, *(f"{k}={v}" for k, v in chosen.items()))

    best, tried = profiling.tune(
        make,
        start={"num_workers": 1, "prefetch": 2},
        candidates={"num_workers": [0, 1, 4, 8], "prefetch": [0, 2]},
        seconds=0.3,
    )
    assert best["num_workers"] == 8
    assert len(tried) == 6


def test_step_needs_a_known_model(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["profile", f"source.root={photos}", "model._target_=os.system", "device=cpu", "num_workers=0"]
    assert main(call) == 2
    assert "os.system" in capsys.readouterr().err


def test_settings_reject_text_for_numbers() -> None:
    from gpuaug.cli.profile import Settings

    with pytest.raises(ConfigError, match="num_classes"):
        Settings(num_classes="ten")  # type: ignore[arg-type]
