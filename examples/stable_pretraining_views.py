"""stable-pretraining: train one of its methods on views that gpuaug makes. For stable-pretraining 0.1.8.

python examples/stable_pretraining_views.py /data/train /data/val
"""

import sys
from typing import Any

import lightning
import stable_pretraining as spt
from stable_pretraining.forward import simclr
from torch import nn

import gpuaug


def as_dict(images: Any, labels: Any = None, names: list[str] | None = None) -> dict[str, Any]:
    """``{"image": ..., "label": ...}``; of a list of views ``{"views": ...}``, a list or a dictionary by ``names``."""
    label = {} if labels is None else {"label": labels}
    if not isinstance(images, list):
        return {"image": images, **label}
    views = [{"image": view, **label} for view in images]
    # `dino` and `dinov2` of stable-pretraining need names that begin with `global` or `local`
    return {"views": views if names is None else dict(zip(names, views, strict=True))}


class Images(lightning.LightningDataModule):
    """Replaces ``spt.data.DataModule``; give the trainer ``use_distributed_sampler=False``."""

    def __init__(self, train: list[str], val: list[str], *, names: list[str] | None = None) -> None:
        super().__init__()
        self.overrides, self.names = {"train": train, "eval": val}, names
        self.loaders: dict[str, gpuaug.Loader] = {}

    def setup(self, stage: str) -> None:
        """Build the loaders, once the trainer knows its device."""
        device = f"device={self.trainer.strategy.root_device}"
        for name in self.overrides.keys() - self.loaders.keys():
            self.loaders[name] = gpuaug.build(gpuaug.compose(name, [*self.overrides[name], device]))

    def train_dataloader(self) -> Any:
        return self.loaders["train"]

    def val_dataloader(self) -> Any:
        return self.loaders["eval"]

    def on_before_batch_transfer(self, batch: gpuaug.Batch, dataloader_idx: int) -> dict[str, Any]:
        return {**as_dict(batch.images, batch.labels, self.names), "sample_idx": batch.indices}

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints: Lightning drops the loader's own state if the model reads ``estimated_stepping_batches``."""
        return self.loaders["train"].state_dict() if self.loaders else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaders["train"].load_state_dict(state)

    def teardown(self, stage: str) -> None:
        for loader in self.loaders.values():
            loader.close()
        self.loaders.clear()


class Views(nn.Module):
    """Only the augmentation: the ``gpu_transform`` of your dataset, instead of ``StackedMultiView`` or ``MultiView``.

    Random numbers depend on ``sample_idx`` and on the number of the batch, because persistent workers send a wrong
    ``current_epoch``. A resumed run needs another ``seed``, or it repeats random numbers.
    """

    def __init__(self, recipe: gpuaug.Augment | gpuaug.MultiView, *, seed: int = 0) -> None:
        super().__init__()
        self.recipe, self.seed, self.batches = recipe, seed, 0

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Takes images [B, C, H, W] on the device: uint8, or floats in 0..1."""
        made = self.recipe(batch.pop("image"), seed=self.seed, epoch=self.batches, indices=batch["sample_idx"])
        self.batches += 1
        return {**batch, **as_dict(made, batch.get("label"))}


def train(data: Images, **trainer: Any) -> spt.Module:
    backbone = nn.Sequential(nn.Conv2d(3, 64, 8, stride=8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    parts = {"backbone": backbone, "projector": nn.Linear(256, 128), "simclr_loss": spt.losses.NTXEntLoss(0.5)}
    module = spt.Module(forward=simclr, **parts, optim={"optimizer": {"type": "AdamW", "lr": 1e-3}})
    lightning.Trainer(**{"max_epochs": 10, "use_distributed_sampler": False, **trainer}).fit(module, data)
    return module


if __name__ == "__main__":
    train(Images([f"source.root={sys.argv[1]}", "augment=simclr", "drop_last=true"], [f"source.root={sys.argv[2]}"]))
