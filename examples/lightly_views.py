"""lightly: train its modules and losses on views that gpuaug makes, with Lightning. For lightly 1.6.

python examples/lightly_views.py /data/train
"""

import sys
from typing import Any

import lightning
import torch
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from torch import Tensor, nn

import gpuaug


class Views(lightning.LightningDataModule):
    """Replaces ``LightlyDataset`` and its DataLoader; give the trainer ``use_distributed_sampler=False``.

    Images are decoded and augmented on the trainer's device. Lightning's checkpoints include the loader's state. So a
    run that was stopped inside an epoch continues with the next sample.
    """

    def __init__(self, overrides: list[str]) -> None:
        super().__init__()
        self.overrides = overrides
        self.loader: gpuaug.Loader | None = None

    def setup(self, stage: str) -> None:
        """Build the loader, once the trainer knows its device."""
        device = f"device={self.trainer.strategy.root_device}"
        self.loader = self.loader or gpuaug.build(gpuaug.compose("train", [*self.overrides, device]))

    def train_dataloader(self) -> Any:
        """Batches of gpuaug, which ``on_before_batch_transfer`` converts."""
        return self.loader

    def on_before_batch_transfer(self, batch: gpuaug.Batch, dataloader_idx: int) -> tuple[list[Tensor], Any, list[str]]:
        """``(views, labels, filenames)``, as lightly's datasets and collate functions give. Labels may be None."""
        views = batch.images if isinstance(batch.images, list) else [batch.images]
        return views, batch.labels, batch.keys

    def teardown(self, stage: str) -> None:
        """End the workers."""
        if self.loader is not None:
            self.loader.close()
        self.loader = None


class SimCLR(lightning.LightningModule):
    """SimCLR as in lightly's documentation. ``backbone`` maps images to features ``[B, dim]``."""

    def __init__(self, backbone: nn.Module, dim: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = SimCLRProjectionHead(dim, dim, 128)
        self.criterion = NTXentLoss(temperature=0.5, gather_distributed=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of a batch with two views."""
        (view0, view1), _, _ = batch
        loss = self.criterion(self.head(self.backbone(view0)), self.head(self.backbone(view1)))
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW for all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def backbone(dim: int = 256) -> nn.Module:
    """Four convolutions, to show how a batch is used. Replace them by your model."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128), (128, dim)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def train(overrides: list[str], **trainer: Any) -> SimCLR:
    """Train SimCLR. The last batch is dropped: the loss needs other images in the batch."""
    model = SimCLR(backbone(), 256)
    data = Views(["drop_last=true", *overrides])
    lightning.Trainer(**{"max_epochs": 10, "use_distributed_sampler": False, **trainer}).fit(model, data)
    return model


if __name__ == "__main__":
    train([f"source.root={sys.argv[1]}", "augment=simclr"])
