"""`gpuaug train`: learning, stopping, resuming, ranks."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import torch
from common import PROGRAM, ended, threads, torchrun, tree
from conftest import ROOT
from stopping import StopAfter
from torch.nn.functional import log_softmax

from bench import photographs
from gpuaug.errors import ConfigError, GpuaugError
from gpuaug.tools.main import main
from gpuaug.tools.request import Request
from gpuaug.tools.train import command as train
from gpuaug.tools.train import training
from gpuaug.tools.train.checkpoint import packed
from gpuaug.tools.train.model import SmallNet, build_model
from gpuaug.tools.train.training import Pace

SMALL = ("augment.crop.size=32", "+model.width=8", "batch_size=8", "num_workers=0", "device=cpu")
HELD_OUT = ("val.augment=none", "val.augment.crop.size=[32,32]")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Several threads wait for each other more than they work on images of 32 x 32, above all on a busy machine."""
    with threads(1):
        yield


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photographs.cut(tmp_path_factory.mktemp("photos"), count=80)


def words(photos: Path, out: Path, *more: str) -> list[str]:
    return ["train", f"source.root={photos}/train", f"out={out}", *SMALL, *more]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return torch.load(out / "last.pt", weights_only=True)["model"]


def checkpoint(out: Path) -> dict[str, Any]:
    return torch.load(out / "last.pt", weights_only=True)


def test_learns_and_reports(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    more = [f"val.source.root={photos}/val", *HELD_OUT, "epochs=8", "optimizer=adamw", "lr=0.01", f"json={file}"]
    assert main(words(photos, tmp_path, *more, "augment=flip", "augment.crop.scale=[0.5,1]")) == 0
    values = json.loads(file.read_text())
    printed = capsys.readouterr().out
    for name in ("images_per_second", "waiting_for_data", "train_accuracy", "held_out_accuracy"):
        assert name.replace("_", " ") in printed
    assert f"{values['images_per_second']:.0f} (" in printed
    assert 0 <= values["waiting_for_data"] <= 1
    assert values["train_accuracy"] > 0.4  # ten classes
    assert values["held_out_accuracy"] > 0.25
    assert [entry["epoch"] for entry in values["history"]] == list(range(8))
    assert values["history"][-1]["loss"] < values["history"][0]["loss"]
    assert checkpoint(tmp_path)["classes"] == sorted(photographs.PHOTOGRAPHS)


def test_stop_during_held_out_images_finishes_them(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate = training.Training._evaluate

    def stopping(self: training.Training, loader: Any) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, loader)

    monkeypatch.setattr(training.Training, "_evaluate", stopping)
    more = (f"val.source.root={photos}/val", *HELD_OUT, "epochs=2")
    assert main(words(photos, tmp_path, *more)) == training.TERMINATED
    assert "SIGTERM: stopped in epoch 2." in capsys.readouterr().err
    found = checkpoint(tmp_path)
    assert (found["loader"]["epoch"], found["loader"]["position"]) == (1, 8)
    assert [entry["held_out_accuracy"] is not None for entry in found["history"]] == [True]


def test_sigterm_does_not_replace_good_weights_by_nan(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(photos, tmp_path, "limit_batches=2", "epochs=1")) == 0
    monkeypatch.setattr(train, "Stop", StopAfter)
    StopAfter.left = 4
    assert main(words(photos, tmp_path, "epochs=2", "resume=auto", "lr=1e30")) == 2
    assert "the loss of epoch 2 is nan. Lower `lr`" in capsys.readouterr().err
    assert all(value.isfinite().all() for value in weights(tmp_path).values())


def test_sigterm_of_the_real_kind(photos: Path, tmp_path: Path) -> None:
    command = [*PROGRAM, *words(photos, tmp_path, "epochs=100000", "num_workers=1")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with forked.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("epoch 2:"):
                break
        workers = tree(process.pid)
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(timeout=300) == training.TERMINATED
    assert "SIGTERM: stopped in epoch" in rest
    found = checkpoint(tmp_path)
    assert found["loader"]["epoch"] >= 2
    assert ended(workers), "a worker outlived the run"
    assert main(words(photos, tmp_path, "resume=auto", f"epochs={found['loader']['epoch'] + 1}")) == 0


def test_amp_on_the_cpu(photos: Path, tmp_path: Path) -> None:
    assert main(words(photos, tmp_path, "amp=bfloat16", "epochs=1", "limit_batches=3", "dtype=bfloat16")) == 0
    assert all(value.isfinite().all() for value in weights(tmp_path).values())


@pytest.mark.parametrize(
    "more",
    [
        ("mix=mixup_cutmix",),
        ("augment=dino", "batch_size=2", "limit_batches=2"),
        ("faults.policy=blank", "order=repeated", "last=drop"),
    ],
)
def test_other_recipes_labels_and_orders(more: tuple[str, ...], photos: Path, tmp_path: Path) -> None:
    first = [word for word in words(photos, tmp_path) if more[0] != "augment=dino" or "crop.size" not in word]
    assert main([*first, "epochs=1", "limit_batches=3", *more]) == 0
    assert math.isfinite(checkpoint(tmp_path)["history"][0]["loss"])


def test_weights_are_a_function_of_the_seed_and_torchs_generator_stays() -> None:
    before = torch.get_rng_state()
    request = Request(command="train")
    config = {"_target_": "gpuaug.tools.train.model.SmallNet", "width": 4}
    a, b, c = (build_model(request, config, num_classes=3, seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["0.weight"], c["0.weight"])


@pytest.mark.parametrize("size", [(32, 32), (33, 70), (224, 224)])
def test_small_net_takes_any_size(size: tuple[int, int]) -> None:
    assert SmallNet(num_classes=7, width=4)(torch.rand(2, 3, *size)).shape == (2, 7)


def test_a_damaged_or_changed_checkpoint_is_refused(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(words(photos, tmp_path, "epochs=1", "limit_batches=1")) == 0
    whole, bad = checkpoint(tmp_path), tmp_path / "bad.pt"
    again = words(photos, tmp_path / "other", "epochs=2", "limit_batches=1", f"resume={bad}")
    request = Request(command="train", overrides=tuple(again[1:]))
    settings, loader = request.settings(), request.loader()  # composed once, because forty runs have them
    monkeypatch.setattr(Request, "settings", lambda self: settings)
    monkeypatch.setattr(Request, "loader", lambda self: loader)

    def refused() -> str:
        with pytest.raises(GpuaugError) as caught:
            train.main(request)
        return str(caught.value)

    for changed, said in (
        ({"classes": ["a", "b"]}, "was trained on the classes ['a', 'b']"),
        ({"optimizer": {}}, "another model or optimizer"),
        ({"model": {3: 4}}, "another model or optimizer"),
        ({"loader": {}}, "loader state"),
        ({"loader": {**whole["loader"], "epoch": "x"}}, "state"),
    ):
        bad.write_bytes(packed({**whole, **changed}))
        assert said in refused(), changed
        torch.save({**whole, **changed}, bad)
        assert "was changed after `gpuaug train` wrote it" in refused(), changed
    for content in (b"abc", b"", b"\x80\x02.", b"PK\x03\x04", (tmp_path / "last.pt").read_bytes()[:5000]):
        bad.write_bytes(content)
        assert "`resume` must name a checkpoint of `gpuaug train`" in refused(), content[:9]
    for other in (torch.zeros(3), {"version": 99}):
        torch.save(other, bad)
        assert "of version 4" in refused()
    torch.save({**whole, "classes": Path("x")}, bad)
    assert "(it holds more than tensors, numbers and text)" in refused()
    content = bytearray((tmp_path / "last.pt").read_bytes())
    content[content.index(next(iter(whole["model"].values())).numpy().tobytes())] ^= 1  # one bit of a weight
    bad.write_bytes(content)
    assert "the checksum of archive/data/0 is wrong" in refused()
    bad.unlink()
    assert "bad.pt" in refused()
    os.mkfifo(bad)
    assert "not a regular file but a pipe" in refused()


def test_what_cannot_be_trained_says_so(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*more: str) -> str:
        assert main(words(photos, tmp_path, "epochs=1", *more)) == 2
        return capsys.readouterr().err

    assert "needs labels" in refused("source.labels=none")
    assert "an epoch has no batch" in refused("last=drop", "batch_size=100")
    assert "Lower `lr`" in refused("lr=1e30", "epochs=2", "momentum=0")
    assert "source.root" in refused("val.batch_size=3")
    other = ",".join(sorted(photographs.PHOTOGRAPHS, reverse=True))
    found = refused(f"val.source.root={photos}/val", f"val.source.classes=[{other}]")
    assert "must have the training classes" in found
    assert "Set `last=drop`" in refused("batch_size=9")  # 64 leaves a last batch of one


def test_uneven_ranks_are_refused(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert main(words(photos, tmp_path, "last=uneven")) == 2


def test_broken_images_cost_nothing_but_themselves(photos: Path, tmp_path: Path) -> None:
    for name in ("cat", "coffee"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for file in sorted((photos / "train" / name).iterdir())[:4]:
            (tmp_path / "images" / name / file.name).write_bytes(file.read_bytes())
        (tmp_path / "images" / name / "a_broken.jpg").write_bytes(b"\xff\xd8 no image")
    more = ("epochs=1", "batch_size=2", f"source.root={tmp_path}/images")
    for policy in ("blank", "drop"):
        assert main(words(photos, tmp_path, *more, f"faults.policy={policy}")) == 0
        assert math.isfinite(checkpoint(tmp_path)["history"][0]["loss"])
    assert main(words(photos, tmp_path, *more)) == 2


def test_loss_is_the_formula_and_views_count_equally() -> None:
    generator = torch.Generator().manual_seed(0)
    views = [torch.randn(6, 4, generator=generator) for _ in range(2)]
    hard = torch.tensor([0, 1, 2, 3, 0, 1])
    soft = torch.rand(6, 4, generator=generator).softmax(dim=1)
    losses, right = training.outcome(views, hard)
    expected = sum(-log_softmax(view, dim=1)[torch.arange(6), hard] for view in views) / 2
    torch.testing.assert_close(losses, expected)
    assert right.tolist() == ((views[0] + views[1]).argmax(dim=1) == hard).float().tolist()
    losses, right = training.outcome(views[:1], soft)
    torch.testing.assert_close(losses, -(soft * log_softmax(views[0], dim=1)).sum(dim=1))
    assert right.tolist() == (views[0].argmax(dim=1) == soft.argmax(dim=1)).float().tolist()
    with pytest.raises(ConfigError, match="needs labels"):
        training.outcome(views, None)


def test_a_checkpoint_for_which_there_is_no_space_says_so(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(photos, tmp_path, "epochs=1", "limit_batches=1")) == 0
    content = (tmp_path / "last.pt").read_bytes()
    given = words(photos, tmp_path, "epochs=1", "limit_batches=1", "+model.width=32")
    given.remove("+model.width=8")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))  # bytes; the checkpoint has 2.5 MB
    try:
        assert main(given) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "last.pt cannot be written: [Errno 27] File too large. Free space" in capsys.readouterr().err
    assert (tmp_path / "last.pt").read_bytes() == content
    assert sorted(os.listdir(tmp_path)) == ["last.pt", "spikes.json"]


def test_digests_that_cannot_be_written(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "digests.rank0.jsonl").mkdir()
    assert main(words(photos, tmp_path, "epochs=1", "limit_batches=1", "digests=true")) == 2
    assert "digests.rank0.jsonl cannot be written: [Errno 21]" in capsys.readouterr().err


@pytest.mark.long
def test_sigterm_under_torchrun_and_resume_on_one_rank(photos: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    arguments = words(photos, tmp_path, "epochs=100000", "num_workers=1")
    with subprocess.Popen([*torchrun(2), *arguments], stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("epoch 2:"):
                break
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(timeout=300) != 0
    assert "SIGTERM: stopped in epoch" in rest
    epoch = checkpoint(tmp_path)["loader"]["epoch"]
    assert main(words(photos, tmp_path, "resume=auto", f"epochs={epoch + 1}", "batch_size=4")) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("amp", ["auto", "float32"])
def test_on_the_gpu(amp: str, photos: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    more = [f"val.source.root={photos}/val", *HELD_OUT, "epochs=3", f"json={file}", "memory_format=channels_last"]
    given = [word for word in words(photos, tmp_path) if word != "device=cpu"]
    assert main([*given, "device=cuda", f"amp={amp}", *more]) == 0
    values = json.loads(file.read_text())
    assert 0 <= values["waiting_for_data"] <= 1
    assert math.isfinite(values["history"][-1]["loss"])


def test_the_first_rate_waits_for_a_measured_time() -> None:
    """The time before the first batch does not count; 64 images in no time were 64,000,000,000 images/s."""
    pace, sums = Pace(torch.device("cpu")), torch.tensor([2.0, 1.0, 64.0])
    shown = []
    for _ in pace.measured(["one", "two"]):
        pace.images += 64
        shown.append(training.Training._postfix(SimpleNamespace(pace=pace, sums=sums)))
    assert "images/s" not in shown[0]
    assert "loss 0.031" in shown[0]
    assert shown[1].split()[1] == "images/s,"
