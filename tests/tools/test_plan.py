"""`gpuaug plan`: the formula, what a run really takes, and what is said where a machine is too small."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import planted
import pytest
import torch
from conftest import ROOT
from torch import nn

import gpuaug
from gpuaug import machine
from gpuaug.decode import dali
from gpuaug.decode.plan import num_parts
from gpuaug.loader.loader import Loader
from gpuaug.tools.main import main
from gpuaug.tools.plan import predict as plan
from gpuaug.tools.plan.predict import MIB, Machine, Settings
from gpuaug.tools.train import training
from gpuaug.tools.train.model import SmallNet

MARGIN = 1.01 / (1 - plan.SPARE)  # of what has to be there over what is needed
ROOMY = Machine(host=1 << 40, host_by="test", shared=1 << 40)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


def build(photos: Path, *overrides: str) -> Loader:
    base = [f"source.root={photos}", "device=cpu", "augment=flip", "num_workers=1", "batch_size=16"]
    made: Loader = gpuaug.build(gpuaug.compose("train", [*base, *overrides]))
    return made


def terms(loader: Loader, **how: Any) -> dict[str, int]:
    sizes = how.pop("sizes", None) or plan.look(loader)
    found = plan.predict(loader, sizes, base=plan.NOTHING, **how).terms
    assert len({t.name for t in found}) == len(found)
    return {t.name: t.bytes for t in found}


def test_finished_batches_are_counted_by_prefetch_views_and_dtype(photos: Path) -> None:
    view = 16 * 224 * 224 * 3
    with build(photos) as loader:
        assert terms(loader)["finished batches"] == 4 * view * 4
        assert terms(loader)["views, uint8"] == 3 * view  # in augmentation, waiting, in decode
        rest = 65 % 16
        assert terms(loader)["last batch, kept"] == rest * 224 * 224 * 3 * (1 + 4)
    with build(photos, "prefetch=0", "dtype=bfloat16", "last=drop") as loader:
        assert terms(loader)["finished batches"] == 2 * view * 2
        assert terms(loader)["views, uint8"] == view
        assert "last batch, kept" not in terms(loader)
    with build(photos, "prefetch=50") as loader:  # an epoch has five batches
        assert terms(loader)["finished batches"] == 5 * view * 4
    with build(photos, "augment=dino", "memory_format=channels_last", "dtype=float16") as loader:
        assert terms(loader)["finished batches"] == 4 * 16 * 3 * (2 * 224 * 224 + 6 * 96 * 96) * 2
        assert terms(loader)["views, uint8"] == 3 * 16 * 3 * (2 * 224 * 224 + 6 * 96 * 96)


def test_workers_hold_batches_in_shared_memory(photos: Path) -> None:
    with build(photos, "num_workers=0") as loader:
        none = terms(loader)
    assert "workers" not in none
    assert plan.predict(loader, plan.look(loader), base=plan.NOTHING).total("shared") == 0
    with build(photos, "batch_size=2") as loader:
        sizes = plan.look(loader)
        one = plan.predict(loader, sizes, base=plan.NOTHING, worker=MIB)
        three = plan.predict(
            loader, sizes, base=plan.NOTHING, worker=MIB, settings=Settings(3, loader.prefetch, None, None)
        )
    behind = 4  # in augmentation, waiting for it, in decode, waiting for that
    assert one.total("shared") == pytest.approx(sizes.batch(2, batches=2 + behind), abs=4)
    assert three.total("shared") == pytest.approx(sizes.batch(2, batches=6 + behind), abs=4)
    packed = min(3, machine.usable_cpus())
    assert three.part("workers") == pytest.approx(3 * MIB + packed * sizes.batch(2) + plan.INHERITED, abs=4)
    assert one.part("workers") == pytest.approx(MIB + sizes.batch(2) + plan.INHERITED, abs=4)
    with build(photos, "batch_size=32", "num_workers=8") as loader:  # an epoch has three batches
        sizes = plan.look(loader)
        assert plan.predict(loader, sizes, base=plan.NOTHING).total("shared") == sizes.batch(32, batches=3)


def test_workers_of_other_start_methods_have_their_own_python(photos: Path) -> None:
    alone = plan.imported()
    assert 30 * MIB < alone < 1000 * MIB
    with build(photos, "start_method=spawn") as loader:
        spawned = terms(loader)["workers"]
    with build(photos, "start_method=fork") as loader:
        assert spawned - terms(loader)["workers"] == pytest.approx(alone - plan.INHERITED, abs=4)


def test_row_groups_of_parquet_are_held_by_every_worker(photos: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    files = sorted(photos.rglob("*.jpg"))[:60]
    table = pyarrow.table({"image": [f.read_bytes() for f in files], "label": [0] * len(files)})
    parquet.write_table(table, tmp_path / "train.parquet", row_group_size=20)
    with build(photos, "source=parquet", f"source.root={tmp_path / 'train.parquet'}", "num_workers=3") as loader:
        sizes = plan.look(loader)
        workers = plan.predict(loader, sizes, base=plan.NOTHING, worker=MIB).part("workers")
    group = max(sum(f.stat().st_size for f in files[k : k + 20]) for k in (0, 20, 40))
    packed = min(3, machine.usable_cpus()) * sizes.batch(16)
    expected = 3 * (MIB + (2 + plan.READING) * group) + packed + plan.INHERITED
    assert workers == pytest.approx(expected, rel=0.01)


def test_raw_pixels_and_materialized_epochs_are_not_decoded(photos: Path, tmp_path: Path) -> None:
    pack = ["pack", f"source.root={photos}", f"out={tmp_path}/packed", "format=uint8", "sizes=[64]", "num_workers=0"]
    assert main(pack) == 0
    with build(photos, "source=packed", f"source.root={tmp_path}/packed", "num_workers=0") as loader:
        found, sizes = terms(loader), plan.look(loader)
    assert "decoded pixels" not in found
    assert "encoded, copied by DALI" not in found
    assert sizes.encoded > 64 * 64 * 3
    recipe = ["augment=simclr", "device=cpu"]
    assert main(["materialize", f"source.root={photos}", f"out={tmp_path}/epochs", "store=final", *recipe]) == 0
    with build(photos, "source=materialized", f"source.root={tmp_path}/epochs", *recipe) as loader:
        found, sizes = terms(loader), plan.look(loader)
    each = 2 * 3 * 224 * 224 * 4
    assert sizes.encoded == each
    assert sizes.views == [(224, 224), (224, 224)]
    assert "views, stored" not in found  # read where they lie
    assert found["finished batches"] == 4 * 16 * each


def test_large_batches_are_decoded_in_parts(photos: Path) -> None:
    with build(photos, "decode.num_threads=1") as loader:
        sizes = plan.look(loader)
        assert num_parts(16, 16 * sizes.whole, 1) == 1
        assert terms(loader, sizes=sizes)["decoded pixels"] == int(16 * sizes.decoded)
        large = replace(sizes, decoded=1e6, whole=2e6, largest=2e6)
        found = terms(loader, sizes=large)
        assert found["decoded pixels"] == 8e6  # two parts of 8 samples
        assert found["kept of decoded pixels"] == 2 * plan.PIECES * 8e6
        larger = replace(sizes, decoded=1e7, whole=1e8, largest=1e8)
        found = terms(loader, sizes=larger)
        assert found["decoded pixels"] == 8e7
        assert "kept of decoded pixels" not in found  # pieces so large are given back at once
        largest = replace(sizes, decoded=1e9, whole=1e9, largest=1e9)
        assert terms(loader, sizes=largest)["decoded pixels"] == pytest.approx(2**30, rel=1e-6)


def test_on_cuda_the_decoders_own_buffers_are_counted(photos: Path) -> None:
    pytest.importorskip("nvidia.dali")
    with build(photos, "decode.num_threads=3") as loader:
        sizes = plan.look(loader)
        assert "decoder's buffers" not in terms(loader, sizes=sizes)
        vars(loader)["device"] = torch.device("cuda", 0)  # for the formula alone: nothing is started there
        found = plan.predict(loader, sizes, base=plan.NOTHING)
    of = {(t.name, t.place): t.bytes for t in found.terms}
    assert of["decoder's buffers", "device"] == 3 * 16 * MIB
    assert of["decoder's buffers, pinned", "pinned"] == 3 * 2 * 8 * MIB
    assert found.total("pinned") >= 48 * MIB + 2 * sizes.batch(16)


def test_the_buffers_are_those_that_dali_allocates() -> None:
    """By the schema of its operator: a release with other defaults changes nothing of ours, but should be looked at."""
    pytest.importorskip("nvidia.dali")
    from nvidia.dali import backend

    schema = backend.GetSchema("decoders__Image")
    assert schema.GetArgumentDefaultValueString("device_memory_padding") == str(dali.DEVICE_PADDING)
    assert schema.GetArgumentDefaultValueString("host_memory_padding") == str(dali.PINNED_PADDING)


def test_operations_outside_the_kernels_have_batches_of_their_own(photos: Path) -> None:
    with build(photos, "augment=standard") as loader:
        assert "between operations" not in terms(loader)
    with build(photos, "augment=standard", "augment.backend=kornia") as loader:
        assert terms(loader)["between operations"] == plan.BETWEEN * 16 * 224 * 224 * 3 * 4


def test_sizes_are_those_of_the_files(photos: Path) -> None:
    files = sorted(photos.rglob("*.jpg"))
    with build(photos, "augment=none", "~augment.crop", "order=sequential", "batch_size=1") as loader:
        found = plan.look(loader, sample=1)
    assert found.encoded == files[0].stat().st_size
    assert found.decoded == found.whole == found.views[0][0] * found.views[0][1] * 3


def test_cache_and_ahead_are_bounded_by_what_there_is(photos: Path) -> None:
    every = sum(f.stat().st_size for f in photos.rglob("*.jpg"))
    with build(photos, "cache=ram", "ahead=1GiB") as loader:
        found = terms(loader)
    assert 0.6 * every < found["cache"] < 1.7 * every
    assert "ahead" not in found  # five batches are all in decode, in augmentation or finished
    with build(photos, "ahead=1GiB", "batch_size=2") as loader:
        assert 0.4 * every < terms(loader)["ahead"] < 1.5 * every
    with build(photos, "cache=ram", "cache.max_bytes=100KiB", "ahead=64KiB", "batch_size=2") as loader:
        found = terms(loader)
    assert found["cache"] == 100 * 1024
    assert found["ahead"] == 64 * 1024


def test_what_fits_is_not_spoken_of(photos: Path) -> None:
    with build(photos) as loader:
        assert plan.shortage(loader, here=ROOMY) is None


def rebuilt(photos: Path, given: tuple[str, ...], found: plan.Shortage) -> Loader:
    """What the user gets who copies the overrides."""
    return build(photos, *given, *found.overrides)


def test_says_what_would_fit_and_never_a_smaller_batch(photos: Path) -> None:
    given = ("batch_size=4", "prefetch=5", "num_workers=4", "cache=ram", "cache.max_bytes=64MiB", "ahead=64MiB")
    with build(photos, *given) as loader:
        sizes, cache = plan.look(loader), 4 << 10
        least = plan.predict(loader, sizes, base=plan.NOTHING, settings=Settings(4, 3, None, cache)).more
        here = Machine(int(least * MARGIN) + 2 * MIB, "MemAvailable", 1 << 40)
        found = plan.shortage(loader, here=here, sizes=sizes)
        assert found is not None
        assert "MemAvailable has" in found.text
        assert f"`{' '.join(found.overrides)}`" in found.text
        assert "\n" not in found.text
        assert "ahead=null" in found.overrides
        assert not any("batch_size" in text for text in found.overrides)
        shared = plan.predict(loader, sizes, base=plan.NOTHING, settings=Settings(2, 5, 64 * MIB, cache))
        tight = Machine(1 << 40, "", int(shared.total("shared") * MARGIN))
        few = plan.shortage(loader, here=tight, sizes=sizes, prefix="val.")
        assert few is not None
        assert [text.partition("=")[0] for text in few.overrides] == ["val.num_workers"]
        assert "/dev/shm has" in few.text
    with rebuilt(photos, given, found) as loader:
        assert plan.shortage(loader, here=here, sizes=sizes) is None
    with build(photos, *given, few.overrides[0].removeprefix("val.")) as loader:
        assert plan.shortage(loader, here=tight, sizes=sizes) is None


def test_a_second_loader_is_counted_beside_the_first(photos: Path) -> None:
    with build(photos, "prefetch=1") as first, build(photos, "prefetch=6", "batch_size=8") as second:
        beside = plan.predict(first, plan.look(first), base=plan.NOTHING).more
        least = plan.predict(second, plan.look(second), base=plan.NOTHING, settings=Settings(1, 3, None, None)).more
        here = Machine(int((beside + least) * MARGIN), "MemAvailable", 1 << 40)
        assert plan.shortage(second, here=here) is None
        found = plan.shortage(second, here=here, beside=[first])
    assert found is not None
    assert found.overrides == ("prefetch=3",)


def test_what_cannot_fit_asks_for_smaller_batches(photos: Path) -> None:
    with build(photos) as loader:
        found = plan.shortage(loader, here=Machine(MIB, "limit of the control group", 1 << 40))
    assert found is not None
    assert found.clear
    assert not found.overrides
    assert "Make `batch_size` smaller, now 16" in found.text


def test_training_is_refused_with_the_override_that_fits(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Settings] = []
    before = training.Training.__init__

    def noting(self: training.Training, loader: Loader, **rest: Any) -> None:
        seen.append(Settings.of(loader))
        before(self, loader, **rest)

    monkeypatch.setattr(training.Training, "__init__", noting)
    small = ["augment.crop.size=32", "+model.width=8", "num_workers=1", "device=cpu", "last=drop", "batch_size=2"]
    call = ["train", f"source.root={photos}", f"out={tmp_path}", "epochs=1", "augment=flip", *small]

    def needs(prefetch: int) -> int:
        with build(photos, "augment.crop.size=32", "batch_size=2", f"prefetch={prefetch}") as loader:
            step = training.step_memory(SmallNet(num_classes=5, width=8), training.Settings(), loader)
            sizes = plan.look(loader)
            return plan.predict(loader, sizes, base=plan.NOTHING).more + sum(t.bytes for t in step(sizes))

    def room(size: float) -> None:
        monkeypatch.setattr(Machine, "here", staticmethod(lambda device=None: Machine(int(size), "test", 1 << 40)))

    room(needs(30))  # 10 % of it are left to others, and a prediction is not that exact: it may go on
    assert main([*call, "prefetch=30"]) == 0
    assert "memory may not suffice: this run needs" in capsys.readouterr().err
    assert seen[-1].prefetch == 30
    room(needs(30) / 1.3)
    assert main([*call, "prefetch=30"]) == 2
    said = capsys.readouterr().err
    assert "of memory, and test has" in said
    assert "`check_memory=false` starts it all the same" in said
    assert len(seen) == 1
    assert main([*call, "prefetch=30", *said.partition("Set `")[2].partition("`")[0].split()]) == 0
    assert seen[-1].prefetch < 30
    assert main([*call, "prefetch=30", "check_memory=false"]) == 0
    assert seen[-1].prefetch == 30
    assert "memory may not suffice" not in capsys.readouterr().err
    assert main([*call, "check_memory=2"]) == 2


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


def test_a_step_keeps_what_autograd_saves() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 20 * 30, 5))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    weights = sum(p.nbytes for p in model.parameters())
    maps = 8 * 20 * 30 * 4  # of ReLU, which the last layer saves too; images and weights are not counted again
    cpu = torch.device("cpu")

    def of(**how: Any) -> dict[str, int]:
        return {t.name: t.bytes for t in plan.step(model, views=[(20, 30)], rows=7, device=cpu, **how)}

    found = of()
    assert found["gradients"] == found["optimizer"] == weights
    assert found["activations"] == 7 * maps
    assert found["going back"] == (plan.BACKWARD + plan.BACKWARD_KEPT) * 7 * maps
    assert of(states=2)["optimizer"] == 2 * weights
    assert "optimizer" not in of(states=0)
    assert of(parallel=True)["gradients"] == 2 * weights
    assert of(given=torch.bfloat16)["images, float32"] == 7 * 3 * 20 * 30 * 4
    assert 7 * maps / 2 <= of(amp=torch.bfloat16)["activations"] < 7 * maps + weights
    two = {t.name: t.bytes for t in plan.step(model, views=[(20, 30)] * 2, rows=7, device=cpu)}
    assert two["activations"] == 2 * 7 * maps
    assert all(torch.equal(before[n], t) and t.device == cpu for n, t in model.state_dict().items())


def test_a_model_that_needs_data_is_tried_on_two_samples() -> None:
    model, state = Thinking().eval(), torch.random.get_rng_state()
    found = {t.name: t.bytes for t in plan.step(model, views=[(20, 30)], rows=10, device=torch.device("cpu"))}
    maps = 10 * 8 * 20 * 30 * 4
    assert 2 * maps <= found["activations"] <= 3 * maps  # of the convolution and ReLU; norms save a few values more
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
        sizes, wanted = plan.look(loader), Settings.of(loader)
        steps = [wanted, replace(wanted, ahead=None), replace(wanted, ahead=None, prefetch=2)]
        steps += [replace(wanted, ahead=None, prefetch=1, num_workers=1)]
        left, order = machine.cgroup_left, ["ahead", "prefetch", "num_workers"]
        for at, settings in enumerate(steps):
            need = plan.predict(loader, sizes, base=plan.NOTHING, settings=settings).more
            used = 300 * MIB
            files = group(tmp_path, limit=used + int(need / (1 - plan.SPARE)) + MIB // 8, used=used)
            monkeypatch.setattr(machine, "cgroup_left", lambda files=files: left(**files))
            found = plan.shortage(loader, sizes=sizes)
            if not at:
                assert found is None
                continue
            assert found is not None
            assert [text.partition("=")[0] for text in found.overrides] == order[:at]
            assert "limit of the control group has" in found.text
            with rebuilt(photos, given, found) as fitting:
                assert plan.shortage(fitting, sizes=sizes) is None


def test_what_a_step_takes_is_counted(photos: Path) -> None:
    with build(photos, "prefetch=3") as loader:
        sizes = plan.look(loader)
        need = plan.predict(loader, sizes, base=plan.NOTHING).more
        here = Machine(int(need / (1 - plan.SPARE)) + MIB, "test", 1 << 40)
        assert plan.shortage(loader, here=here, sizes=sizes) is None

        def step(_: plan.Sizes) -> list[plan.Term]:
            return [plan.Term("activations", "host", 12 * MIB, "12 MiB")]

        found = plan.shortage(loader, here=here, sizes=sizes, also=step)
        assert found is not None
        assert any(text.startswith("prefetch=") for text in found.overrides)
        assert "A step of the model takes 12.0 MiB of it" in found.text


def test_command_writes_every_term(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    call = ["plan", f"source.root={photos}", "augment=flip", "batch_size=16", "num_workers=1", "device=cpu"]
    assert main([*call, f"json={file}", "measure=true", "seconds=4"]) == 0
    printed, values = capsys.readouterr().out, json.loads(file.read_text())
    for name in ("this process", "workers", "encoded batches", "decoded pixels", "finished batches"):
        assert name in printed
    assert "(2 ahead + 1 in the making + 1 in use) x 16 x 150528 x 4 B" in printed
    assert values["host_memory"] == values["base"] + sum(t["bytes"] for t in values["terms"])
    assert values["fits"] is True
    assert abs(values["measured_host"]["off"]) < 0.3  # within 0.15 where everything has time to fill up, below


@pytest.mark.parametrize("wrong", ["measure=2", "seconds=0", "sample=0", "json=3"])
def test_wrong_keys_are_refused(photos: Path, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"source.root={photos}", wrong]) == 2
    assert f"`{wrong.partition('=')[0]}` must be" in capsys.readouterr().err


def test_help_answers_without_torch() -> None:
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "gpuaug.tools", "plan", "--help"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "measure: false" in shown.stdout
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
    file = tmp_path / "plan.json"
    call = [sys.executable, "-m", "gpuaug.tools", "plan", f"source.root={camera}", "device=cpu", "measure=true"]
    subprocess.run([*call, f"json={file}", *overrides], cwd=ROOT, check=True, capture_output=True, text=True)
    values = json.loads(file.read_text())
    found = values["measured_host"]
    assert abs(found["off"]) < 0.15, values
    grown = found["measured"] - values["base"]
    assert abs(found["planned"] - values["base"] - grown) < 0.35 * grown, values  # not only the part that was measured
