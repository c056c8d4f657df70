"""The examples run, and go on where they stopped: every sample once in every epoch."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
import warnings
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from torch.utils.data import DataLoader, TensorDataset

import gpuaug

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
    pytest.importorskip("accelerate")
    loop = example("accelerate_loop")
    loop.train(overrides, epochs=1, checkpoint=tmp_path / "c", cpu=True, mixed_precision="bf16")
    assert sorted(consumed) == list(range(65))
    loop.train(overrides, epochs=2, checkpoint=tmp_path / "c", cpu=True, mixed_precision="bf16")
    assert sorted(consumed) == sorted([*range(65), *range(65)])


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
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Model()


def test_lightning_resumes_inside_an_epoch(overrides: list[str], trainer: Any, tmp_path: Path) -> None:
    module = example("lightning_datamodule")
    from lightning.pytorch.callbacks import ModelCheckpoint

    held_out = [overrides[0], "batch_size=16", "num_workers=0"]
    first, second = model(), model()
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
