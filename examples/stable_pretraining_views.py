"""stable-pretraining: make the views of a batch on the device, as the dataset's ``gpu_transform``.

python examples/stable_pretraining_views.py
"""

from typing import Any

import torch
from stable_pretraining.data import FromTorchDataset
from torch import nn

import gpuaug


class Views(nn.Module):
    """Makes a view for each view of ``recipe``, as stable-pretraining's ``StackedMultiView`` and ``MultiView`` do.

    ``batch["image"]`` becomes ``batch["views"]``, a list of dictionaries with ``image`` and ``label``. The random
    numbers depend on ``sample_idx`` and ``current_epoch``, which the datasets add, and not on the batch.
    """

    def __init__(self, recipe: gpuaug.Augment | gpuaug.MultiView, *, seed: int = 0) -> None:
        super().__init__()
        self.recipe, self.seed = recipe, seed

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Takes images [B, C, H, W] on the device: uint8, or floats in 0..1."""
        images, epoch = batch.pop("image"), int(batch["current_epoch"][0]) if "current_epoch" in batch else 0
        made = self.recipe(images, seed=self.seed, epoch=epoch, indices=batch["sample_idx"])
        views = made if isinstance(made, list) else [made]
        return {**batch, "views": [{"image": view, "label": batch.get("label")} for view in views]}


if __name__ == "__main__":
    recipe = gpuaug.build(gpuaug.compose("train", ["source.root=unused", "augment=barlowtwins"]).augment)
    images, labels = torch.randint(0, 256, (16, 3, 256, 256), dtype=torch.uint8), torch.arange(16)
    data = FromTorchDataset(
        torch.utils.data.TensorDataset(images, labels), names=["image", "label"], gpu_transform=Views(recipe)
    )
    # stable_pretraining.Module finds `gpu_transform`, and calls it after Lightning has moved the batch
    batch = next(iter(torch.utils.data.DataLoader(data, batch_size=8)))
    made = data.gpu_transform(batch)
    print([tuple(view["image"].shape) for view in made["views"]], made["views"][0]["label"].tolist())
