"""`gpuaug train`: models by name and of one's own, the step, schedule, resume, ranks."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from common import PROGRAM
from conftest import ROOT
from stopping import StopAfter
from test_train import _one_thread, checkpoint  # noqa: F401
from torch import Tensor, nn

from gpuaug.errors import ConfigError, ReadError
from gpuaug.loader.batch import Batch
from gpuaug.loader.loader import Loader
from gpuaug.tools import peers
from gpuaug.tools.main import main
from gpuaug.tools.request import Request
from gpuaug.tools.train import command as train
from gpuaug.tools.train import training
from gpuaug.tools.train.model import build_model

SMALL = ("augment.crop.size=32", "batch_size=8", "num_workers=0", "device=cpu", "epochs=1")
MODULE = """
from torch import nn
class Flat(nn.Sequential):  # without batch norm, whose statistics are those of one batch
    def __init__(self, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(3 * 32 * 32, num_classes))
class Wet(nn.Sequential):  # with everything that resuming must restore
    def __init__(self, num_classes):
        super().__init__(nn.Conv2d(3, 4, 8, stride=8), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(),
                         nn.Linear(64, num_classes))
def flat(num_classes, bias=True):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, num_classes, bias=bias))
def small(num_classes):
    return flat(num_classes - 2)
class Two(Flat):
    def forward(self, x):
        return super().forward(x), x
def nothing(num_classes):
    return None
"""


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the module ``train_nets``."""
    folder = tmp_path_factory.mktemp("nets")
    (folder / "train_nets.py").write_text(MODULE)
    sys.path.append(str(folder))
    yield folder
    sys.path.remove(str(folder))


def words(photos: Path, out: Path, model: str, *more: str) -> list[str]:
    """A training on 65 photographs of 5 classes."""
    return ["train", f"source.root={photos}", f"out={out}", f"model={model}", "--trust", "train_nets", *SMALL, *more]


def assert_equal(a: dict[str, Any], b: dict[str, Any], *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """The weights of two checkpoints are equal."""
    torch.testing.assert_close(dict(b["model"]), dict(a["model"]), rtol=rtol, atol=atol)


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(arguments) == 2
    return capsys.readouterr().err


# --- models


@pytest.mark.usefixtures("v2")
def test_a_named_model_is_the_librarys_with_its_arguments_and_the_seeds_weights() -> None:
    import timm
    from torchvision import models

    request = Request(command="train")
    config = {"_target_": "timm:resnet18", "drop_rate": 0.1, "drop_path_rate": 0.2}
    net: Any = build_model(request, config, num_classes=7, seed=3)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        same = timm.create_model("resnet18", num_classes=7, drop_rate=0.1, drop_path_rate=0.2)
        torch.default_generator.manual_seed(3)
        tv = models.get_model("resnet18", weights=None, num_classes=7)
    assert str(net) == str(same)
    assert net.drop_rate == 0.1
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), same.state_dict().values(), strict=True))
    other = build_model(request, "torchvision:resnet18", num_classes=7, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), tv.state_dict().values(), strict=True))


@pytest.mark.usefixtures("v2")
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("timm:resnet181", "timm has no classifier 'resnet181'. Did you mean timm:resnet18"),
        ("torchvision:resnet51", "torchvision has no classifier 'resnet51'. Did you mean torchvision:resnet50"),
        ("timm:hf-hub:timm/resnet18", "timm has no classifier 'hf-hub:timm/resnet18'"),  # would be downloaded
        ("torchvision:fasterrcnn_resnet50_fpn", "has no classifier 'fasterrcnn_resnet50_fpn'"),
        ("keras:resnet50", "`model` can name models of timm and torchvision. Found: keras:resnet50."),
        ("resnet18", "`model` must be timm:NAME, torchvision:NAME, or the path of a class or function."),
        ({"_target_": "timm:resnet18", "pretrained": True}, "`model.pretrained` cannot be set"),
        ({"_target_": "torchvision:resnet18", "weights": "DEFAULT"}, "`model.weights` cannot be set"),
        ({"_target_": "timm:resnet18", "nonsense": 1}, "timm:resnet18 refused its arguments: TypeError"),
        ({"_target_": None}, "`model` must be timm:NAME"),
        ("train_nets.nothing", "must make a torch.nn.Module. Found: train_nets.nothing, NoneType."),
        ("train_nets.missing", "train_nets has no 'missing'"),
        ("no_such_module.Net", "`model._target_` must name a class of"),
        ("gpuaug.tools.train.training.Pace", "`model._target_` must name a class of"),
    ],
)
def test_a_model_that_is_refused(model: Any, said: str, nets: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        build_model(Request(command="train", trust=("train_nets",)), model, num_classes=2, seed=0)
    assert said in str(caught.value)


def test_functions_and_arguments_of_a_trusted_module(nets: Path) -> None:
    request = Request(command="train", trust=("train_nets.",))
    config = {"_target_": "train_nets.flat", "bias": False}
    assert sum(p.numel() for p in build_model(request, config, num_classes=4, seed=0).parameters()) == 4 * 3072
    with pytest.raises(
        ConfigError, match="`model.bais`: train_nets.flat takes no argument 'bais'. Did you mean 'bias'"
    ):
        build_model(request, {"_target_": "train_nets.flat", "bais": 1}, num_classes=4, seed=0)
    with pytest.raises(ConfigError, match=r"Found: 'train_nets.flat'.* --trust my_pkg."):
        build_model(Request(command="train"), config, num_classes=4, seed=0)


def test_a_module_in_the_current_folder_needs_trust(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "local_net.py").write_text(MODULE)
    arguments = words(photos, tmp_path, "local_net.flat", "limit_batches=1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    before = list(sys.path)
    without = [word for word in arguments if word not in ("--trust", "train_nets")]
    assert "`model._target_` must name a class" in error_of(without, capsys)
    assert sys.path == before
    assert main([*arguments, "--trust", "local_net."]) == 0
    assert checkpoint(tmp_path)["steps"] == 1
    assert sys.path == [*before, str(tmp_path)]  # behind everything that is installed


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_file_in_the_current_folder_is_no_library(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{library}.py").write_text("raise ImportError('the file ran')")
    monkeypatch.chdir(tmp_path)
    peers.torchvision.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path)])  # as if the library were not installed
    with pytest.raises(ConfigError, match=f"needs {library}, .* No module named '{library}'.* pip install"):
        build_model(Request(command="train", trust=("my_pkg.",)), f"{library}:resnet18", num_classes=2, seed=0)


def test_what_a_model_does_wrong_is_explained(
    nets: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], v2: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name in ("kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "uniform_", "normal_", "trunc_normal_"):
        monkeypatch.setattr(nn.init, name, lambda tensor, *_, **__: tensor)  # large models, of which no weight counts
    assert "must return logits [B, num_classes]. Found: tuple." in error_of(
        words(photos, tmp_path, "train_nets.Two", "limit_batches=1"), capsys
    )
    found = error_of(words(photos, tmp_path, "timm:vit_tiny_patch16_224", "limit_batches=1"), capsys)
    assert "the model refused 8 images of 32 x 32 (width x height): AssertionError: " in found
    assert "+model.img_size=" in found
    for model, said in (
        ("torchvision:alexnet", "images of 32 x 32 (width x height): RuntimeError: Given input size: (256x1x1)."),
        ("train_nets.small", "must return logits [B, num_classes]. Found: a tensor [8, 3], num_classes=5."),
    ):
        assert said in error_of(words(photos, tmp_path, model, "limit_batches=1"), capsys)


# --- steps


def test_a_step_is_the_formula(nets: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGD without momentum on the mean gradient, and weight decay of the weights, written out."""
    seen: list[tuple[Tensor, Tensor]] = []
    train_batch = training.Training.train_batch

    def noting(self: training.Training, batch: Batch, **more: Any) -> Tensor:
        assert isinstance(batch.images, Tensor)
        assert batch.labels is not None
        seen.append((batch.images.clone(), batch.labels.clone()))
        return train_batch(self, batch, **more)

    monkeypatch.setattr(training.Training, "train_batch", noting)
    more = ["limit_batches=3", "momentum=0", "warmup=0", "weight_decay=0.01", "lr=0.3"]
    assert main(words(photos, tmp_path, "train_nets.Flat", *more)) == 0
    net = build_model(Request(command="train", trust=("train_nets",)), "train_nets.Flat", num_classes=5, seed=0)
    weight, bias = (p.detach().double() for p in net.parameters())
    for k, (images, labels) in enumerate(seen):
        x = images.double().flatten(1)
        target = torch.nn.functional.one_hot(labels, 5).double()
        error = ((x @ weight.T + bias).softmax(dim=1) - target) / 8  # of the mean cross entropy
        lr = 0.3 * (0.5 + 0.5 * torch.cos(torch.tensor(torch.pi * k / 3, dtype=torch.float64)))
        weight, bias = weight - lr * (error.T @ x + 0.01 * weight), bias - lr * error.sum(dim=0)
    found = checkpoint(tmp_path)
    torch.testing.assert_close(found["model"]["1.weight"].double(), weight, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found["model"]["1.bias"].double(), bias, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.25])
def test_the_schedule_is_torchs(warmup: float) -> None:
    """LinearLR from 0.1, then CosineAnnealingLR to 0, for 200 steps."""
    from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

    steps, rising = 200, round(200 * warmup)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.4)
    schedule: LRScheduler = CosineAnnealingLR(optimizer, T_max=steps - rising)
    if rising:
        rise = LinearLR(optimizer, start_factor=0.1, total_iters=rising)
        schedule = SequentialLR(optimizer, [rise, CosineAnnealingLR(optimizer, T_max=steps - rising)], [rising])
    for step in range(steps):
        assert 0.4 * training.rate(step / steps, warmup=warmup) == pytest.approx(
            optimizer.param_groups[0]["lr"], abs=1e-6
        )
        optimizer.step()
        schedule.step()


def test_held_out_accuracy_is_the_share_of_right_predictions(nets: Path, photos: Path, tmp_path: Path) -> None:
    held_out = [f"val.source.root={photos}", "val.augment=none", "val.augment.crop.size=[32,32]"]
    arguments = words(photos, tmp_path, "train_nets.Flat", *held_out)
    assert main(arguments) == 0
    found, right = checkpoint(tmp_path), 0
    request = Request(command="train", overrides=tuple(word for word in arguments[1:] if "=" in word))
    with request.build_held_out(request.loader(), classes=None) as loader:
        for images, labels in loader:
            logits = images.flatten(1) @ found["model"]["1.weight"].T + found["model"]["1.bias"]
            right += int((logits.argmax(dim=1) == labels).sum())
    assert found["history"][0]["held_out_accuracy"] == right / 65


# --- stop, resume, ranks


TWICE = ("epochs=2", "last=drop")


def test_resuming_changes_nothing(nets: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout and batch norm. SIGTERM comes twice: to this process, then also to the workers."""
    whole, parts = (words(photos, tmp_path / name, "train_nets.Wet", *TWICE) for name in ("whole", "parts"))
    assert main(whole) == 0

    def stopped() -> tuple[int, int, int]:
        assert main([*parts, "resume=auto"]) == training.TERMINATED
        found = checkpoint(tmp_path / "parts")
        return found["loader"]["epoch"], found["loader"]["position"], found["steps"]

    with monkeypatch.context() as patched:
        patched.setattr(train, "Stop", StopAfter)
        StopAfter.left = 4
        assert stopped() == (0, 32, 4)
        iterate = Loader.__iter__

        def broken(self: Loader) -> Iterator[Batch]:
            yield from itertools.islice(iterate(self), 2)
            raise ReadError("a worker has ended")

        patched.setattr(Loader, "__iter__", broken)
        StopAfter.left = 3
        assert stopped() == (0, 48, 6)
    torch.manual_seed(5)  # torch's own state plays no part
    assert main([*parts, "resume=auto", "num_workers=1", "prefetch=0"]) == 0
    a, b = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "parts")
    assert a["steps"] == b["steps"] == 16
    assert a["history"] == b["history"]
    assert_equal(a, b)


def test_resuming_takes_the_settings_of_the_new_run(
    nets: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = ["limit_batches=1", "epochs=2", f"resume={tmp_path}/last.pt"]
    assert main(words(photos, tmp_path, "train_nets.Flat", "limit_batches=1", "optimizer=adamw")) == 0
    said = error_of(words(photos, tmp_path, "train_nets.Flat", *new), capsys)
    assert "belongs to another model or optimizer (ValueError: the optimizer of the checkpoint has" in said
    assert "Set `model` and `optimizer` as in that run" in said
    more = (*new, "optimizer=adamw", "weight_decay=0.25")
    assert main(words(photos, tmp_path / "more", "train_nets.Flat", *more)) == 0
    groups = checkpoint(tmp_path / "more")["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.25, 0.0]


def test_two_ranks_do_what_one_does(nets: Path, photos: Path, tmp_path: Path) -> None:
    """The mean is over all samples that are valid: 61 do not divide, so the last batch is padded."""
    more = ("lr=0.01", "source.subset=61")
    more += (f"val.source.root={photos}", "val.augment=none", "val.augment.crop.size=[32,32]")
    assert main(words(photos, tmp_path / "one", "train_nets.Flat", *more, "batch_size=8")) == 0
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": str(nets), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    environment |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [*PROGRAM, *words(photos, tmp_path / "two", "train_nets.Flat", *more, "batch_size=4")]
    how = {"stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    ranks = [forked.Popen(command, env={**environment, "RANK": rank, "LOCAL_RANK": rank}, **how) for rank in "01"]
    printed = [rank.communicate(timeout=300)[0].count("images per second") for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert printed == [1, 0]
    one, two = checkpoint(tmp_path / "one"), checkpoint(tmp_path / "two")
    assert one["steps"] == two["steps"] == 8
    for a, b in zip(one["history"], two["history"], strict=True):
        assert b == {name: pytest.approx(value, rel=1e-4) for name, value in a.items()}
    assert_equal(one, two, rtol=1e-4, atol=1e-6)
