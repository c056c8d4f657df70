"""Two ways to use Lightning: the whole loader as a DataModule, or only its augmentation for your batches.

python examples/lightning_datamodule.py /data/train /data/val
"""

import sys
from collections.abc import Iterable
from typing import Any

import lightning
import torch

import gpuaug


class Images(lightning.LightningDataModule):
    """Decoding and augmentation on the trainer's device; give the trainer ``use_distributed_sampler=False``.

    Checkpoints include the loader's state. So a run that was stopped inside an epoch continues with the next sample.
    """

    def __init__(self, train: list[str], val: list[str]) -> None:
        super().__init__()
        self.overrides = {"train": train, "eval": val}
        self.loaders: dict[str, gpuaug.Loader] = {}

    def setup(self, stage: str) -> None:
        """Build the loaders, once the trainer knows its device."""
        device = "cpu" if self.trainer is None else self.trainer.strategy.root_device
        for name, overrides in self.overrides.items():
            if name not in self.loaders:
                self.loaders[name] = gpuaug.build(gpuaug.compose(name, [*overrides, f"device={device}"]))

    def train_dataloader(self) -> Iterable[gpuaug.Batch]:
        """Batches of ``(images, labels)``, with ``valid``, ``indices`` and ``keys``."""
        return self.loaders["train"]

    def val_dataloader(self) -> Iterable[gpuaug.Batch]:
        """The same for the held-out images."""
        return self.loaders["eval"]

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints: Lightning drops the loader's own state if the model reads ``estimated_stepping_batches``."""
        return self.loaders["train"].state_dict() if self.loaders else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the saved batch."""
        self.loaders["train"].load_state_dict(state)

    def teardown(self, stage: str) -> None:
        """End the workers."""
        for loader in self.loaders.values():
            loader.close()
        self.loaders.clear()


class OnDevice(lightning.LightningDataModule):
    """Your own loader of uint8 images, labels and sample numbers. Batches are augmented on the trainer's device."""

    def __init__(self, loader: Iterable[Any], augment: gpuaug.Augment) -> None:
        super().__init__()
        self.loader, self.augment = loader, augment

    def train_dataloader(self) -> Iterable[Any]:
        """Batches of ``(uint8 [B, 3, H, W], labels, sample numbers)``."""
        return self.loader

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """``(float [B, 3, h, w], labels)``. Sample numbers decide the augmentation, not batches or workers."""
        images, labels, numbers = batch
        return self.augment(images, epoch=self.trainer.current_epoch, indices=numbers), labels


if __name__ == "__main__":
    from lightning.pytorch.demos.boring_classes import BoringModel

    class Model(BoringModel):
        """A linear layer on the means of 32 columns, to show how a batch is used."""

        def training_step(self, batch: gpuaug.Batch, batch_idx: int) -> torch.Tensor:
            """Images and labels are already on the device."""
            images, _ = batch
            return self.layer(images.mean(dim=(1, 2))[:, :32]).square().mean()

    data = Images([f"source.root={sys.argv[1]}"], [f"source.root={sys.argv[2]}"])
    lightning.Trainer(max_epochs=1, use_distributed_sampler=False, limit_val_batches=0).fit(Model(), data)
