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

    Images are decoded and augmented on the trainer's device. Checkpoints include the loader's state. So a run that was
    stopped inside an epoch continues with the next sample.
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


class SimCLR(lightning.LightningModule):
    """SimCLR as in lightly's documentation. ``backbone`` makes features [B, dim] of images [B, 3, H, W]."""

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


def train(overrides: list[str], **trainer: Any) -> SimCLR:
    """Train a small network. The last batch is dropped, as a single image has no others to compare it with."""
    first, second = nn.Conv2d(3, 64, 8, stride=8), nn.Conv2d(64, 256, 3, padding=1)
    model = SimCLR(nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()), 256)
    data = Views(["drop_last=true", *overrides])
    lightning.Trainer(**{"max_epochs": 10, "use_distributed_sampler": False, **trainer}).fit(model, data)
    return model


if __name__ == "__main__":
    train([f"source.root={sys.argv[1]}", "augment=simclr"])
