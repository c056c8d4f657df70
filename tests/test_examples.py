"""The examples run, and go on where they stopped: every sample once in every epoch."""

from __future__ import annotations

import logging
import os
import re
import shlex
import socket
import subprocess
import sys
import warnings
from dataclasses import replace
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from conftest import ROOT, TORCHVISION
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import gpuaug
from gpuaug.tools.peers import torchvision

FOLDER = ROOT / "examples"


def example(name: str) -> Any:
    spec = spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def overrides(photos: Path) -> list[str]:
    small = ["augment=flip", "augment.crop.size=32", "batch_size=16", "num_workers=0", "device=cpu"]
    return [f"source.root={photos}", *small]


@pytest.fixture
def consumed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the samples that loaders handed out."""
    numbers: list[int] = []
    whole = gpuaug.Loader.__iter__

    def watched(self: gpuaug.Loader) -> Any:
        for batch in whole(self):
            numbers.extend(batch.indices[batch.valid].tolist())
            yield batch

    monkeypatch.setattr(gpuaug.Loader, "__iter__", watched)
    return numbers


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_at_most_a_page(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 90
    assert lines[0].startswith('"""')
    assert any(f"examples/{path.name}" in line for line in lines[:6])  # how it is run


def test_a_plain_loop_goes_on_with_the_next_sample(overrides: list[str], consumed: list[int], tmp_path: Path) -> None:
    plain = example("plain_loop")

    class Stop(Exception):
        pass

    def save(*args: Any) -> None:
        torch_save(*args)
        raise Stop

    torch_save, plain.torch.save = torch.save, save
    try:
        with pytest.raises(Stop):  # before the file was renamed: a killed run
            plain.train(overrides, epochs=1, checkpoint=tmp_path / "c.pt", every=2)
    finally:
        plain.torch.save = torch_save
    assert not (tmp_path / "c.pt").exists()
    (tmp_path / "c.part").replace(tmp_path / "c.pt")
    assert len(consumed) == 32
    plain.train([*overrides, "batch_size=10"], epochs=2, checkpoint=tmp_path / "c.pt", every=2)
    assert sorted(consumed) == sorted([*range(65), *range(65)])


def test_accelerate(overrides: list[str], consumed: list[int], tmp_path: Path) -> None:
    state = pytest.importorskip("accelerate.state")
    state.AcceleratorState._reset_state(reset_partial_state=True)  # of an earlier test in this process
    loop = example("accelerate_loop")
    loop.train(overrides, epochs=1, checkpoint=tmp_path / "c", cpu=True, mixed_precision="bf16")
    assert sorted(consumed) == list(range(65))
    loop.train(overrides, epochs=2, checkpoint=tmp_path / "c", cpu=True, mixed_precision="bf16")
    assert sorted(consumed) == sorted([*range(65), *range(65)])


def test_self_supervised_training_changes_the_features(overrides: list[str]) -> None:
    module = example("self_supervised")
    torch.manual_seed(0)
    root, start = overrides[0].removeprefix("source.root="), module.ViT()
    torch.manual_seed(0)
    trained = module.train(
        root, ["device=cpu", "num_workers=0", "batch_size=13", "augment.views.local.copies=2"], epochs=1
    )
    moved = [(a - b).abs().max().item() for a, b in zip(start.parameters(), trained.parameters(), strict=True)]
    assert all(0 < change < 1 for change in moved)  # NaN is not
    known = [module.knn(net, root, root) for net in (None, start, trained)]  # five classes; an image finds itself
    assert all(0.2 < accuracy <= 1 for accuracy in known)


def test_hugging_face(overrides: list[str], consumed: list[int], v2: Any, tmp_path: Path) -> None:
    """The import of transformers needs torchvision's operators, which the fixture `v2` declares."""
    pytest.importorskip("transformers")
    held_out = [overrides[0], "num_workers=0", "device=cpu", "batch_size=16", "augment.crop.size=32"]
    settings = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "output_dir": str(tmp_path)}
    module = example("hugging_face_trainer")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        first = module.train(overrides, held_out, num_train_epochs=1, **settings)
        assert consumed == [*epoch_of(overrides, 0), *range(65)]
        consumed.clear()
        second = module.train(overrides, held_out, num_train_epochs=2, resume=True, **settings)
    assert consumed == [*epoch_of(overrides, 1), *range(65)]
    assert (first.state.global_step, second.state.global_step) == (5, 10)
    assert all(0 < trainer.state.log_history[-2]["eval_loss"] < 9 for trainer in (first, second))


def epoch_of(overrides: list[str], epoch: int) -> list[int]:
    """The order of the samples of an epoch."""
    with gpuaug.build(gpuaug.compose("train", overrides)) as loader:
        loader.set_epoch(epoch)
        return [index for indices, _, _ in loader.epoch_order for index in indices.tolist()]


@pytest.mark.long
def test_accelerate_launches_two_processes(overrides: list[str], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=2", "--num_machines=1"]
    launch += [f"--main_process_port={port}", "--mixed_precision=no", "--dynamo_backend=no"]
    path = os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")])
    program = [*launch, str(FOLDER / "accelerate_loop.py"), *overrides]
    done = subprocess.run(program, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"epoch (\d+): loss \d", done.stdout) == ["0", "1", "2"]  # said once, not by both
    assert (tmp_path / "accelerate_loop").is_dir()


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    lightning = pytest.importorskip("lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    fixed = {"accelerator": "cpu", "enable_checkpointing": False, "use_distributed_sampler": False}
    return lambda **more: lightning.Trainer(**{"default_root_dir": tmp_path, **fixed, **quiet, **more})


def model() -> Any:
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 5)
            self.trained: list[int] = []
            self.held_out: list[int] = []
            self.images: list[torch.Tensor] = []
            self.stop_at: int | None = None
            self.counts_steps = False

        def loss(self, batch: Any) -> torch.Tensor:
            images, labels = batch
            return torch.nn.functional.cross_entropy(self.layer(images.mean(dim=(2, 3))), labels)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.stop_at is not None and len(self.trained) >= self.stop_at:
                raise KeyError("killed")
            if isinstance(batch, gpuaug.Batch):
                self.trained += batch.indices[batch.valid].tolist()
            else:
                self.images.append(batch[0])
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.held_out += batch.indices[batch.valid].tolist()
            self.loss(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            if self.counts_steps:  # for a schedule; this loads the data before Lightning restores its loops
                assert self.trainer.estimated_stepping_batches > 0
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Model()


@pytest.mark.parametrize("counts_steps", [False, True])
def test_lightning_resumes_inside_an_epoch(
    counts_steps: bool, overrides: list[str], trainer: Any, tmp_path: Path
) -> None:
    module = example("lightning_datamodule")
    from lightning.pytorch.callbacks import ModelCheckpoint

    held_out = [overrides[0], "batch_size=16", "num_workers=0"]
    first, second = model(), model()
    first.counts_steps = second.counts_steps = counts_steps
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = ModelCheckpoint(tmp_path, "c", every_n_train_steps=2)
        run = trainer(max_epochs=2, limit_val_batches=0, callbacks=[saved], enable_checkpointing=True)
        first.stop_at = 32
        with pytest.raises(KeyError, match="killed"):
            run.fit(first, module.Images(overrides, held_out))
        data = module.Images(overrides, held_out)
        trainer(max_epochs=2).fit(second, data, ckpt_path=tmp_path / "c.ckpt", weights_only=True)
    assert len(first.trained) == 32
    assert sorted([*first.trained, *second.trained]) == sorted([*range(65), *range(65)])
    assert set(second.held_out) == set(range(65))
    assert not data.loaders


def test_lightning_sees_other_samples_after_a_limited_epoch(overrides: list[str], trainer: Any) -> None:
    module, net = example("lightning_datamodule"), model()
    held_out = [overrides[0], "batch_size=16", "num_workers=0"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        limits = {"limit_train_batches": 2, "limit_val_batches": 1, "num_sanity_val_steps": 1}
        trainer(max_epochs=3, **limits).fit(net, module.Images(overrides, held_out))
    with gpuaug.build(gpuaug.compose("train", [*overrides, "limit_batches=2"])) as loader:
        expected = [index for _ in range(3) for batch in loader for index in batch.indices.tolist()]
    assert net.trained == expected
    assert net.held_out == list(range(16)) * 4


def test_lightning_augments_after_the_transfer(trainer: Any, photo_batch: torch.Tensor) -> None:
    module = example("lightning_datamodule")
    images = photo_batch.permute(0, 3, 1, 2)
    dataset = TensorDataset(images, torch.arange(8) % 5, torch.arange(8))
    augment = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(24))
    net = model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(max_epochs=2, limit_val_batches=0).fit(net, module.OnDevice(DataLoader(dataset, 4), augment))
    expected = [augment(images, epoch=epoch, indices=range(8)) for epoch in range(2)]
    assert torch.equal(torch.cat(net.images), torch.cat(expected))  # whatever the batches: 2 of 4, or 1 of 8


# -- self-supervised training

SELF_SUPERVISED = {  # what each example imports of its library
    "solo_learn_views": ["solo", "solo.methods"],
    "lightly_views": ["lightly", "lightly.loss", "lightly.models", "lightly.models.modules"],
    "stable_pretraining_views": ["stable_pretraining", "stable_pretraining.forward"],
}
VIEWS = ["augment=simclr", "augment.crop.size=32"]


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports an example of `SELF_SUPERVISED`, also where its library is not installed."""
    pytest.importorskip("lightning")

    def imported(name: str) -> Any:
        for part in SELF_SUPERVISED[name]:
            monkeypatch.setitem(sys.modules, part, MagicMock())
        return example(name)

    return imported


@pytest.fixture
def two_views(overrides: list[str]) -> gpuaug.Batch:
    with gpuaug.build(gpuaug.compose("train", [*overrides, *VIEWS])) as loader:
        return next(iter(loader))


def test_batches_of_solo_learn(without_library: Any, two_views: gpuaug.Batch) -> None:
    data = without_library("solo_learn_views").Views([])
    indices, views, labels = data.on_before_batch_transfer(two_views, 0)
    assert [view.shape for view in views] == [(16, 3, 32, 32)] * 2
    assert torch.equal(indices, two_views.indices)
    assert labels is two_views.labels
    assert data.on_before_batch_transfer(replace(two_views, labels=None), 0)[2].tolist() == [-1] * 16
    held_out = [torch.zeros(2, 3, 8, 8), torch.zeros(2)]
    assert data.on_before_batch_transfer(held_out, 0) is held_out


def test_batches_of_lightly(without_library: Any, two_views: gpuaug.Batch) -> None:
    data = without_library("lightly_views").Views([])
    views, labels, filenames = data.on_before_batch_transfer(two_views, 0)
    assert [view.shape for view in views] == [(16, 3, 32, 32)] * 2
    assert labels is two_views.labels
    assert filenames == two_views.keys
    assert all(re.fullmatch(r"\w+/\d+\.jpg", name) for name in filenames)
    one, _, _ = data.on_before_batch_transfer(replace(two_views, images=views[0]), 0)
    assert one == [views[0]]


def test_batches_of_stable_pretraining(without_library: Any, two_views: gpuaug.Batch) -> None:
    module = without_library("stable_pretraining_views")
    made = module.Images([], []).on_before_batch_transfer(two_views, 0)
    assert type(made) is dict
    assert [view["image"].shape for view in made["views"]] == [(16, 3, 32, 32)] * 2
    assert all(view["label"] is two_views.labels for view in made["views"])
    assert torch.equal(made["sample_idx"], two_views.indices)
    named = module.Images([], [], names=["global_1", "global_2"]).on_before_batch_transfer(two_views, 0)
    assert [*named["views"]] == ["global_1", "global_2"]
    assert module.as_dict(two_views.images[0]).keys() == {"image"}
    assert module.as_dict(two_views.images)["views"][0].keys() == {"image"}


def test_views_of_stable_pretraining_are_those_of_the_recipe(without_library: Any, photo_batch: torch.Tensor) -> None:
    recipe = gpuaug.build(gpuaug.compose("train", ["source.root=unused", *VIEWS]).augment)
    images = photo_batch.permute(0, 3, 1, 2)
    gpu_transform = without_library("stable_pretraining_views").Views(recipe, seed=3)
    for number in range(2):
        batch = {"image": images, "label": torch.arange(8), "sample_idx": torch.arange(8)}
        made = gpu_transform(batch)
        assert made.keys() == {"views", "label", "sample_idx"}
        expected = recipe(images, seed=3, epoch=number, indices=range(8))
        assert all(torch.equal(a["image"], b) for a, b in zip(made["views"], expected, strict=True))


def parts(batch: Any) -> tuple[list[Any], list[torch.Tensor], torch.Tensor]:
    """Names or numbers of the samples, views and labels of a library's batch."""
    if isinstance(batch, dict):
        return batch["sample_idx"].tolist(), [view["image"] for view in batch["views"]], batch["views"][0]["label"]
    first, second, third = batch
    return (third, first, second) if isinstance(first, list) else (first.tolist(), second, third)


@pytest.mark.parametrize("name", SELF_SUPERVISED)
def test_self_supervised_training_goes_on_with_the_next_sample(
    name: str, without_library: Any, overrides: list[str], trainer: Any, tmp_path: Path
) -> None:
    module = without_library(name)
    from lightning.pytorch.callbacks import ModelCheckpoint

    def data() -> Any:
        train = [*overrides, *VIEWS, "drop_last=true"]
        held_out = [overrides[0], "num_workers=0"]
        return module.Images(train, held_out) if hasattr(module, "Images") else module.Views(train)

    class Net(type(model())):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if len(self.trained) == self.stop_at:
                raise KeyError("killed")
            samples, views, labels = parts(batch)
            self.trained += samples
            return sum(self.loss((view, labels)) for view in views)

    first, second = Net(), Net()
    first.counts_steps = second.counts_steps = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = ModelCheckpoint(tmp_path, "c", every_n_train_steps=2)
        first.stop_at = 32
        limits = {"max_epochs": 1, "limit_val_batches": 0}
        with pytest.raises(KeyError, match="killed"):
            trainer(**limits, callbacks=[saved], enable_checkpointing=True).fit(first, data())
        trainer(**limits).fit(second, data(), ckpt_path=tmp_path / "c.ckpt", weights_only=True)
    assert (len(first.trained), len(second.trained)) == (32, 32)
    assert len({*first.trained, *second.trained}) == 64  # of 65: the last batch is dropped


@pytest.fixture
def quiet(tmp_path: Path) -> dict[str, Any]:
    """Arguments of Lightning's trainer."""
    fixed = {"accelerator": "cpu", "max_epochs": 2, "default_root_dir": tmp_path, "logger": False}
    return {**fixed, **dict.fromkeys(["enable_progress_bar", "enable_model_summary", "enable_checkpointing"], False)}


@pytest.mark.filterwarnings("ignore")
def test_solo_learn(v2: Any, overrides: list[str], consumed: list[int], quiet: dict[str, Any]) -> None:
    pytest.importorskip("solo.methods.base")
    changes = {"max_epochs": quiet.pop("max_epochs"), "optimizer": {"batch_size": 16}}
    trained = example("solo_learn_views").train([*overrides, *VIEWS], changes, **quiet)
    assert len(consumed) == 128  # of 65 images, the last batch is dropped
    metrics = trained.trainer.callback_metrics
    assert 0 < float(metrics["train_barlow_loss"]) < 1000
    assert 0 < float(metrics["train_class_loss"]) < 10


@pytest.mark.filterwarnings("ignore")
def test_lightly(v2: Any, overrides: list[str], consumed: list[int], quiet: dict[str, Any]) -> None:
    pytest.importorskip("lightly.loss")
    trained = example("lightly_views").train([*overrides, *VIEWS], **quiet)
    assert len(consumed) == 128
    assert 0 < float(trained.trainer.callback_metrics["train_loss"]) < 4


@pytest.mark.filterwarnings("ignore")
def test_stable_pretraining(v2: Any, overrides: list[str], consumed: list[int], quiet: dict[str, Any]) -> None:
    pytest.importorskip("stable_pretraining.forward")
    module = example("stable_pretraining_views")
    held_out = [overrides[0], "num_workers=0", "batch_size=16", "augment.crop.size=32"]
    trained = module.train(module.Images([*overrides, *VIEWS, "drop_last=true"], held_out), **quiet)
    assert len(consumed) == 32 + 2 * (64 + 65)  # two batches before the first epoch, then both sets in each epoch
    assert 0 < float(trained.trainer.callback_metrics["fit/loss"]) < 4


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Twelve photographs with two or three things each; masks, and boxes in COCO's format."""
    return drawn("scenes", tmp_path_factory.mktemp("scenes"), count=12, size=(96, 128), things=3, tint=0.6)


def drawn(kind: str, folder: Path, **settings: Any) -> str:
    """A folder that bench/scenes.py or bench/people.py wrote."""
    pytest.importorskip("skimage")
    pytest.importorskip("sklearn")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench"))
        return str(example(f"../bench/{kind}").write(folder, **settings))


# average precision on held-out images that each example reaches at least
DETECTION_BAR, POSE_BAR = 0.5, 0.7
LEARN = ["batch_size=4", "num_workers=0", "device=cpu"]


def test_segmentation_learns(scenes: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    means = example("segmentation").train(scenes, scenes, LEARN, epochs=4)
    assert means[-1] < 0.9 * means[0]
    (mean,) = re.findall(r"mean IoU (\d\.\d\d); of each class \[.+\]", capsys.readouterr().out)
    assert 0 < float(mean) < 1


def test_iou_counts_pixels_that_are_not_255() -> None:
    class Batches(list[Any]):
        device = "cpu"

    class Net(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            guesses = torch.tensor([[[0, 1, 1, 2], [1, 0, 2, 1]]])
            return torch.nn.functional.one_hot(guesses, 3).permute(0, 3, 1, 2).float()

    masks = torch.tensor([[[0, 0, 1, 255], [1, 1, 2, 2]]])
    targets = SimpleNamespace(restore=lambda logits: [{"logits": logits[0]}])
    batch = SimpleNamespace(images=torch.zeros(1, 3, 2, 4), targets=targets)
    found = example("segmentation").iou(Net(), Batches([batch]), [(batch.images, masks)], 3)
    assert found.tolist() == pytest.approx([1 / 3, 2 / 5, 1 / 2])


def suppress(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """Non-maximum suppression, written out: a box stays if no better one that stays overlaps it too much."""
    from torchvision.ops import box_iou

    overlaps, kept = box_iou(boxes, boxes), list[int]()
    for row in scores.argsort(descending=True).tolist():
        if not (overlaps[row, kept] > threshold).any():
            kept.append(row)
    return torch.tensor(kept, dtype=torch.int64)


@pytest.fixture
def detection(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example, with torchvision's Python code: its compiled operators are for another torch."""
    if find_spec("torchvision") is None:
        sys.path.append(str(TORCHVISION))
    try:
        torchvision()
    except gpuaug.ConfigError:
        pytest.skip("no torchvision")
    module = example("detection")
    monkeypatch.setattr("torchvision.ops.boxes.nms", suppress)
    return module


def learned(output: str, picture: Path) -> float:
    """The average precision that an example printed, after the loss fell and its picture of predictions was written."""
    losses = [float(loss) for loss in re.findall(r"epoch \d+: loss (\d+\.\d+)", output)]
    assert losses[-1] < 0.9 * losses[0]
    with Image.open(picture) as image:
        assert len(image.convert("RGB").getcolors(image.width * image.height) or ()) > 1000
    (score,) = re.findall(r"AP (\d\.\d\d); predictions in ", output)
    return float(score)


def test_detection_learns(detection: Any, scenes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    detection.train(scenes, scenes, LEARN, epochs=4, picture=str(tmp_path / "boxes.png"))
    assert learned(capsys.readouterr().out, tmp_path / "boxes.png") < 1


def test_pose_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = drawn("people", tmp_path, count=12)
    torch.manual_seed(0)
    plain = [f"augment.crop.{name}=0" for name in ("half_body", "shift", "scale", "rotation")]
    example("pose").train(root, root, [*LEARN, *plain], epochs=8, picture=str(tmp_path / "pose.png"))
    assert learned(capsys.readouterr().out, tmp_path / "pose.png") < 1


def commands(name: str) -> list[list[str]]:
    """The commands in the first lines of an example, as words."""
    lines = (FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("python ")]


@pytest.mark.long
def test_pose_reaches_its_average_precision(tmp_path: Path) -> None:
    """The commands in the first lines of the example, as a user types them."""
    pytest.importorskip("skimage")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    for script, *words in commands("pose"):
        program = [sys.executable, str(ROOT / script), *words]
        done = subprocess.run(
            program, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert learned(done.stdout, tmp_path / "pose.png") >= POSE_BAR


@pytest.mark.long
def test_detection_reaches_its_average_precision(
    detection: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands in the first lines of the example; in this process, because of the fixture."""
    pytest.importorskip("skimage")
    monkeypatch.chdir(tmp_path)
    *draw, (_, *words) = commands("detection")
    for script, *rest in draw:
        subprocess.run([sys.executable, str(ROOT / script), *rest], check=True)
    detection.train(words[0], words[1], words[2:])
    assert learned(capsys.readouterr().out, tmp_path / "boxes.png") >= DETECTION_BAR


@pytest.mark.parametrize("crop", ["augment=det_ssd_eval", "augment=det_lsj_eval"])
def test_detections_are_compared_in_pixels_of_the_source(
    detection: Any, scenes: str, crop: str, tmp_path: Path
) -> None:
    """A net that finds every object: each of its boxes is at its place in the file."""

    class Perfect(torch.nn.Module):
        def forward(self, images: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
            return [{**row, "scores": torch.ones(len(row["boxes"]))} for row in targets.as_torchvision()]

    given = ["source=coco", f"source.root={scenes}", "source.split=images", "source.annotations=instances.json"]
    plain = [*given, "targets=detection", crop, "augment.crop.size=[160,160]", "batch_size=12", *LEARN[1:]]
    with gpuaug.build(gpuaug.compose("eval", plain)) as loader:
        ((_, targets),) = list(loader)
        score = detection.average_precision(Perfect(), loader, f"{scenes}/instances.json", tmp_path / "boxes.png")
        assert score == pytest.approx(1)
        truth: Any = loader.source
        for row, index in enumerate(targets.indices.tolist()):
            boxes = targets.restore(boxes=targets.boxes.split(targets.counts.tolist()))[row]["boxes"]
            assert boxes.numpy() == pytest.approx(truth.label(index).boxes, abs=1e-3)
