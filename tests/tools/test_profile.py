"""`gpuaug profile`: planted bottlenecks are named, and each change that it proposes was tried.

Whether all twelve planted bottlenecks are named on a quiet machine is a measurement: `bench/bottlenecks.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import planted
import pytest
import torch
from common import threads
from servers import files, proxied

import gpuaug
from gpuaug.errors import GpuaugError
from gpuaug.loader.batch import Batch
from gpuaug.loader.loader import Loader
from gpuaug.tools.main import main
from gpuaug.tools.profile import advice
from gpuaug.tools.profile import command as profile
from gpuaug.tools.profile.advice import TITLES, Remedy, Verdict, diagnose
from gpuaug.tools.profile.trace import cpu_seconds, trace

BASE = ("device=cpu", "num_workers=1", "batch_size=8", "augment=flip", "augment.crop.size=32")
FEW = "batch_size=2"  # of images that each wait


def build(source: Any, *overrides: str, **objects: Any) -> Loader:
    """A loader of a source object, or of a folder."""
    given = {} if isinstance(source, Path) else {"source": source}
    words = [f"source.root={source}"] if isinstance(source, Path) else ["~source"]
    config = gpuaug.compose("train", [*BASE, *words, *overrides])
    made: Loader = gpuaug.build(config, trust=["planted."], **given, **objects)
    return made


def judged(source: Any, *overrides: str, step: Any = None, objects: Any = None, **how: Any) -> Verdict:
    def other(more: tuple[str, ...] = ()) -> Loader:
        return build(source, *overrides, *more, **(objects or {}))

    with other() as loader:
        return diagnose(loader, step, other, **{"repeats": 1, "seconds": 0.05, **how})


def plant(source: Any, *overrides: str, named: str, helps: str | None = None, **how: Any) -> Verdict:
    """Require the name, and that a remedy was measured to help; None: that none was found."""
    verdict = judged(source, *overrides, **how)
    helping = [" ".join(remedy.overrides) for remedy in verdict.helping]
    assert verdict.bottleneck == named, verdict
    assert helping == [] if helps is None else any(helps in text for text in helping), verdict
    return verdict


def sleeping(seconds: float) -> Callable[[Batch], None]:
    """A model on a device of its own: the host only waits for it."""

    def step(batch: Batch) -> None:
        time.sleep(seconds)

    return step


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with threads(2):
        yield


@pytest.fixture(scope="module")
def small(photos: Path) -> list[bytes]:
    return planted.jpegs(photos)


# -- the trace --------------------------------------------------------------------------------------------------------


def test_stages_of_a_thread_take_no_longer_than_the_pass(small: list[bytes]) -> None:
    """And the stage that waits 20 ms per image takes 20 ms per image, with threads and without."""
    op = "+augment.ops.slow={_target_: planted.SlowOp, work: 0.0, wait: 0.02, p: 1.0}"
    for prefetch in (0, 2):
        with build(planted.Source(small), FEW, op, f"prefetch={prefetch}") as loader:
            found = trace(loader, sleeping(0.004), seconds=0.3)
        assert found.share("augment", "mix", "targets") <= 1.0
        assert 0.02 <= found.busy["augment"] / found.images < 0.03 + 1.0 / found.rate
        assert found.busy["step"] / found.images >= 0.002 * 0.9
        assert sum(found.busy.values()) <= found.seconds * (1.001 if prefetch == 0 else 4)
        assert found.rate <= 50


def test_processor_time_counts_the_threads_of_a_stage(small: list[bytes]) -> None:
    with build(planted.Source(small, work=0.005), FEW, "augment.crop.size=200", mix=planted.SlowMix()) as loader:
        found = trace(loader, seconds=0.2, lockstep=True)
    assert found.cpu["mix"] >= 0.0059
    assert found.cpu["read"] >= 0.0049  # of the worker


def test_waiting_for_bytes_is_told_from_work(small: list[bytes]) -> None:
    shares = []
    for source in (planted.Source(small, wait=0.02), planted.Source(small, work=0.02)):
        for workers in (0, 1):
            with build(source, FEW, f"num_workers={workers}") as loader:
                shares.append(trace(loader, seconds=0.05).reading)
    assert max(shares[:2]) + 0.3 < min(shares[2:])  # near 0 and 1 where nobody else is at work


def test_cpu_time_of_another_process_is_seen() -> None:
    code = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nprint(1, flush=True)"
    with subprocess.Popen([sys.executable, "-c", f"{code}\ninput()"], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        spent = cpu_seconds(process.pid)
        process.communicate(b"\n")
    assert 0.3 <= spent < 3.0
    assert cpu_seconds(process.pid) == 0.0


# -- planted ----------------------------------------------------------------------------------------------------------


def test_slow_storage(small: list[bytes]) -> None:
    slow = planted.Source(small, wait=0.02, count=64)
    plant(slow, "batch_size=4", "num_workers=0", named="storage", helps="num_workers=16")


def test_slow_callback_on_the_host(small: list[bytes]) -> None:
    mix = {"mix": planted.SlowMix(work=0.0, wait=0.02)}
    verdict = plant(planted.Source(small), FEW, named="host overhead", objects=mix, seconds=0.3)
    assert verdict.tried == []
    assert "`mix` works" in verdict.evidence


def test_the_first_sentence_names_a_remedy_that_keeps_the_pixels(photos: Path) -> None:
    threads = Remedy(("decode.num_threads=2",), "", gain=1.5)
    packed = Remedy(("source=packed",), "", same=False, gain=4.0)
    with build(photos, "num_workers=0") as loader:
        measured = trace(loader, seconds=0.01)
        both, one = (
            Verdict(loader=loader, trace=measured, bottleneck="decode", evidence="", tried=tried)
            for tried in ([packed, threads], [packed, replace(threads, gain=1.0)])
        )
    assert both.text == "decode. decode.num_threads=2 is 1.5 times as fast, measured."
    assert one.text == (
        "decode. No change that was tried keeps all pixels and helps. "
        "source=packed is 4 times as fast, measured; pixels change a little."
    )


def test_slow_model_is_the_limit_and_nothing_is_recommended(small: list[bytes]) -> None:
    verdict = plant(planted.Source(small), FEW, named="model", step=sleeping(0.08))
    assert verdict.tried == []
    assert "There is no setting to try" in verdict.text


def test_nothing_is_made_ahead(small: list[bytes]) -> None:
    mix = {"mix": planted.SlowMix(work=0.0, wait=0.02)}  # as long as the model
    plant(planted.Source(small), FEW, "prefetch=0", named="host overhead", helps="prefetch=2", step=sleeping(0.04),
          objects=mix, seconds=0.4)  # fmt: skip


def test_kornia_backend_instead_of_fused(small: list[bytes]) -> None:
    recipe = ("augment=standard", "augment.crop.size=160", "augment.backend=kornia", "batch_size=4")
    plant(planted.Source(small), *recipe, named="augment", helps="augment.backend=fused")


def test_large_images(photos: Path, tmp_path: Path) -> None:
    for k, data in enumerate(planted.jpegs(photos, count=3, size=(1600, 1200))):
        (tmp_path / "all").mkdir(exist_ok=True)
        (tmp_path / "all" / f"{k}.jpg").write_bytes(data)
    verdict = plant(tmp_path, FEW, named="decode", helps="source=packed source.root=DIR")
    packed = next(remedy for remedy in verdict.tried if "source=packed" in remedy.overrides)
    assert "gpuaug pack sizes=[37] out=DIR" in packed.text
    assert not packed.same
    assert tempfile.gettempdir() not in str(packed)  # the folder of the trial is gone


def test_slow_urls(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "TRIED", 1)
    with files(photos) as port, proxied(port, latency=0.2) as (_, url):
        plant(photos, f"source.root={url}/", "batch_size=16", named="storage", helps="source.remote.cache=DIR")


def test_a_slow_dataset_may_be_packed(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "gpuaug/source").mkdir(parents=True)
    text = f"_target_: planted.Files\nfolder: {photos}\ncount: 32\nwork: 0.02\n"
    (tmp_path / "gpuaug/source/slow.yaml").write_text(text)

    def made(more: tuple[str, ...] = ()) -> Loader:
        config = gpuaug.compose(
            "train", [*BASE, FEW, "augment.crop.size=160", "source=slow", *more], config_dir=str(tmp_path)
        )
        loader: Loader = gpuaug.build(config, trust=["planted."])
        return loader

    with made() as loader:
        verdict = diagnose(loader, None, made, repeats=1, seconds=0.05)
    assert verdict.bottleneck == "workers", verdict
    packed = next(remedy for remedy in verdict.helping if "source=packed" in remedy.overrides)
    assert "gpuaug pack out=DIR" in packed.text


@pytest.mark.parametrize("workers", [0, 1])
def test_busy_worker(workers: int, small: list[bytes]) -> None:
    with build(planted.Source(small, work=0.02), FEW, f"num_workers={workers}") as loader:
        assert advice.bottleneck(loader, trace(loader, seconds=0.05))[0] == "workers"


def test_overrides_name_the_place_of_the_loader(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "app.yaml").write_text("defaults:\n  - gpuaug@train_data: train\n  - _self_\n")
    with build(photos) as loader:
        found = replace(trace(loader, seconds=0.01), shorter=200.0)
        *_, packed = advice.remedies(loader, found, "decode", "train_data.", str(tmp_path))
    words = [word.replace("=DIR", f"={tmp_path}") for word in packed.overrides]
    with gpuaug.build(gpuaug.compose("app", words, config_dir=str(tmp_path)).train_data) as loader:
        assert isinstance(loader.source, gpuaug.PackedSource)


def test_a_trial_that_fails_is_logged(small: list[bytes], caplog: pytest.LogCaptureFixture) -> None:
    def failing(more: tuple[str, ...]) -> Loader:
        raise GpuaugError("no more processes")

    caplog.set_level("INFO")
    with build(planted.Source(small, wait=0.02, count=64), "batch_size=4", "num_workers=0") as loader:
        assert diagnose(loader, None, failing, repeats=1, seconds=0.05).tried == []
    assert "profile: this failed: no more processes" in caplog.text


# -- loaders of all kinds ---------------------------------------------------------------------------------------------


def sensible(verdict: Verdict) -> None:
    found = verdict.trace
    assert verdict.bottleneck in TITLES
    assert found.rate > 0
    for thread in (("read", "headers"), ("decode", "masks"), ("augment", "targets", "mix"), ("step",)):
        assert 0 <= found.share(*thread) <= 1.001, found
    assert all(value >= 0 for value in found.cpu.values())
    assert all(remedy.rate > 0 < remedy.gain for remedy in verdict.tried)


@pytest.mark.parametrize(
    "overrides",
    [
        ("num_workers=0", "prefetch=0"),
        ("batch_size=1000", "num_workers=0"),  # more than there are
        ("num_workers=2",),
        ("augment=dino", "batch_size=4", "num_workers=0"),
        ("mix=mixup_cutmix", "last=pad", "num_workers=0", "dtype=bfloat16", "memory_format=channels_last"),
    ],
    ids=" ".join,
)
def test_loaders_of_all_kinds(overrides: tuple[str, ...], photos: Path) -> None:
    base = [o for o in BASE if "crop" not in o or "augment=dino" not in overrides]

    def made(more: tuple[str, ...] = ()) -> Loader:
        loader: Loader = gpuaug.build(gpuaug.compose("train", [*base, f"source.root={photos}", *overrides, *more]))
        return loader

    with made() as loader:
        sensible(diagnose(loader, sleeping(0.001), made, repeats=1, seconds=0.02))
        assert len(next(iter(loader)))  # it still runs


def test_a_packed_source_is_not_packed_again(photos: Path, tmp_path: Path) -> None:
    few = f"source.root={tmp_path / 'few'}"
    for file in sorted(photos.rglob("00[0-3].jpg")):
        copy = tmp_path / "few" / file.relative_to(photos)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.symlink_to(file)
    assert main(["pack", few, f"out={tmp_path / 'p'}", "format=uint8", "sizes=[48]", "num_workers=0"]) == 0
    words = ["source=packed", f"source.root={tmp_path / 'p'}"]

    def made(more: tuple[str, ...]) -> Loader:
        loader: Loader = gpuaug.build(gpuaug.compose("train", [*BASE, *words, *more]))
        return loader

    with made(()) as loader:
        verdict = diagnose(loader, None, made, repeats=1, seconds=0.02)
    sensible(verdict)
    assert not any("packed" in str(remedy) for remedy in verdict.tried)


def test_bad_samples_end_nothing_and_are_not_recorded(small: list[bytes], tmp_path: Path) -> None:
    source = planted.Source([*small[:3], b"no image"], broken=5, count=64)
    file = tmp_path / "faults.jsonl"
    for policy in ("raise", "blank", "drop"):
        how = (f"faults.policy={policy}", f"faults.file={file}", "faults.max=0")
        with build(source, *how, "num_workers=0", "order=sequential") as loader:
            found = trace(loader, seconds=0.02)
            assert 0 < found.faults < found.tried
            assert not file.exists()
            assert loader.faults.count == 0
            with pytest.raises(GpuaugError):  # the loader itself is as strict as before
                next(iter(loader))
        file.unlink(missing_ok=True)


def test_nothing_but_bad_samples_is_an_error(small: list[bytes]) -> None:
    for policy in ("blank", "drop"):
        with (
            build(planted.Source([b"no image"]), f"faults.policy={policy}") as loader,
            pytest.raises(GpuaugError, match="none of the first"),
        ):
            trace(loader, seconds=0.02)


# -- the command ------------------------------------------------------------------------------------------------------


def test_command_prints_and_writes(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def planted(*args: Any, **given: Any) -> Verdict:
        verdict = diagnose(*args, **given)
        verdict.loader.pipeline.self_check = "decode: planted"  # a loader on CUDA has one
        return verdict

    monkeypatch.setattr(profile, "diagnose", planted)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "app.yaml").write_text(
        "defaults:\n  - gpuaug@train_data: train\n  - _self_\n"
        f"train_data:\n  source:\n    root: {photos}\n  batch_size: 8\n  device: cpu\n  num_workers: 1\n"
        "  augment: {crop: {size: 32}}\n"
    )
    file = tmp_path / "p.json"
    call = ["profile", "--config-dir", str(folder), "--config-name", "app", "--at", "train_data"]
    call += ["model._target_=gpuaug.tools.train.model.SmallNet", "+model.width=8", f"json={file}"]
    assert main([*call, "repeats=1", "seconds=0.05"]) == 0
    written, values = capsys.readouterr(), json.loads(file.read_text())
    printed = written.out
    assert "has neither `key(i)`" not in written.err  # the log speaks of the user's source only
    for word in ("images/s", "decode", "augment", "training step", "bottleneck", "because"):
        assert word in printed
    assert {"read", "headers", "decode", "augment", "step"} <= set(values["stages"])
    assert values["bottleneck"] in TITLES
    assert "self check         decode: planted" in printed
    for tried in values["tried"]:
        assert all("train_data." in text for text in tried["overrides"])
        assert f"{tried['gain']:.2f} x" in printed


def test_profiling_changes_nothing_of_the_loader(photos: Path) -> None:
    def pixels(loader: Loader) -> list[torch.Tensor]:
        return [batch.images for batch in loader]

    settings = {"augment": gpuaug.Augment(crop=gpuaug.RandomResizedCrop(24)), "batch_size": 16, "device": "cpu"}
    with gpuaug.Loader(gpuaug.FolderSource(photos), **settings, num_workers=0) as loader:
        before, state, generator = pixels(loader), loader.state_dict(), torch.get_rng_state()
        loader.set_epoch(0)
        trace(loader, seconds=0.02)
        assert torch.equal(generator, torch.get_rng_state())
        assert all(torch.equal(a, b) for a, b in zip(before, pixels(loader), strict=True))
        after = loader.state_dict()
        assert (state["step"], after["step"]) == (5, 10)  # two passes, without that of the profile
        counts = ("step", "passes", "checksum")
        assert all(after[name] == value for name, value in state.items() if name not in counts)


def test_labels_that_are_no_classes_are_an_error(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "photos").symlink_to(photos)
    names = [f"photos/{file.relative_to(photos)}" for file in sorted(photos.rglob("*.jpg"))[:4]]
    (tmp_path / "table.csv").write_text("path,label\n" + "".join(f"{name},{k + 0.5}\n" for k, name in enumerate(names)))
    call = ["profile", "source=table", f"source.root={tmp_path}/table.csv", "num_workers=0", "device=cpu"]
    assert main([*call, "model._target_=gpuaug.tools.train.model.SmallNet", "seconds=0.01"]) == 2
    assert "Cross entropy needs classes" in capsys.readouterr().err
