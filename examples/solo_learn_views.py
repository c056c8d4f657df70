"""solo-learn: train one of its methods on views that gpuaug makes. For version 1.0.6, which PyPI does not have.

git clone https://github.com/vturrisi/solo-learn
PYTHONPATH=solo-learn python examples/solo_learn_views.py /data/train
"""

import sys
from collections.abc import Iterable
from typing import Any

import lightning
import torch
from omegaconf import OmegaConf
from solo.methods import METHODS

import gpuaug


class Views(lightning.LightningDataModule):
    """Replaces solo-learn's training loader; give the trainer ``use_distributed_sampler=False``.

    Images are decoded and augmented on the trainer's device. Checkpoints include the loader's state. So a run that was
    stopped inside an epoch continues with the next sample.
    ``val``: batches of ``(images, labels)``, such as solo-learn's own validation loader.
    """

    def __init__(self, overrides: list[str], val: Iterable[Any] | None = None) -> None:
        super().__init__()
        self.overrides, self.val = overrides, val
        self.loader: gpuaug.Loader | None = None

    def setup(self, stage: str) -> None:
        """Build the loader, once the trainer knows its device."""
        # solo-learn drops the last batch, too: some losses need the same number of samples in every batch
        overrides = [*self.overrides, "drop_last=true", f"device={self.trainer.strategy.root_device}"]
        self.loader = self.loader or gpuaug.build(gpuaug.compose("train", overrides))

    def train_dataloader(self) -> Any:
        """Batches of gpuaug, which ``on_before_batch_transfer`` converts."""
        return self.loader

    def val_dataloader(self) -> Any:
        """The batches of ``val``."""
        return [] if self.val is None else self.val

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """``(indices, [view1, view2, ...], labels)``. Without labels all are -1, which solo-learn leaves out."""
        if not isinstance(batch, gpuaug.Batch):  # of `val`
            return batch
        labels = torch.full_like(batch.indices, -1) if batch.labels is None else batch.labels
        return batch.indices, batch.images, labels

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints: Lightning drops the loader's own state if the model reads ``estimated_stepping_batches``."""
        return {} if self.loader is None else self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the saved batch."""
        self.loader.load_state_dict(state)

    def teardown(self, stage: str) -> None:
        """End the workers."""
        if self.loader is not None:
            self.loader.close()
        self.loader = None


def train(overrides: list[str], changes: dict[str, Any], **trainer: Any) -> lightning.LightningModule:
    """Barlow Twins with solo-learn's classes. ``changes`` are to the configuration of its ``main_pretrain.py``."""
    classes = gpuaug.build(gpuaug.compose("train", overrides).source).num_classes
    settings = {
        "method": "barlow_twins",
        "method_kwargs": {"proj_hidden_dim": 512, "proj_output_dim": 512, "scale_loss": 0.1},
        "backbone": {"name": "resnet18"},
        # `num_large_crops` and `num_small_crops`: how many views the recipe makes of each size
        "data": {"dataset": "custom", "num_classes": classes or 1, "num_large_crops": 2, "num_small_crops": 0},
        "optimizer": {"name": "adamw", "batch_size": 64, "lr": 5e-4, "weight_decay": 1e-4, "classifier_lr": 1e-3},
        "scheduler": {"name": "warmup_cosine", "warmup_epochs": 1},
        "max_epochs": 10,
    }
    cfg = OmegaConf.merge(settings, changes)
    model = METHODS[cfg.method](cfg)
    data = Views([f"batch_size={cfg.optimizer.batch_size}", *overrides])
    lightning.Trainer(max_epochs=cfg.max_epochs, use_distributed_sampler=False, **trainer).fit(model, data)
    return model


if __name__ == "__main__":
    train([f"source.root={sys.argv[1]}", "augment=barlowtwins"], {})
