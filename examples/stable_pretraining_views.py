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
    numbers depend on ``sample_idx``, which the datasets add, and on the number of the batch. ``current_epoch`` is not
    used: only stable-pretraining's ``DataModule`` sets it, and persistent workers send 0 in every epoch. A resumed run
    needs another ``seed``, or it repeats the random numbers of the first batches.
    """

    def __init__(self, recipe: gpuaug.Augment | gpuaug.MultiView, *, seed: int = 0) -> None:
        super().__init__()
        self.recipe, self.seed, self.batches = recipe, seed, 0

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Takes images [B, C, H, W] on the device: uint8, or floats in 0..1."""
        made = self.recipe(batch.pop("image"), seed=self.seed, epoch=self.batches, indices=batch["sample_idx"])
        self.batches += 1
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
