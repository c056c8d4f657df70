"""solo-learn: train one of its methods on views from a gpuaug.Loader, in place of its own datasets.

python bench/photographs.py photographs
python examples/solo_learn_views.py photographs/train batch_size=32
"""

import sys
from collections.abc import Iterator
from typing import Any

from solo.methods import BarlowTwins

import gpuaug

SETTINGS = {  # of solo-learn's command line
    "encoder": "resnet18", "backbone_args": {"cifar": True, "zero_init_residual": False}, "max_epochs": 2,
    "optimizer": "sgd", "extra_optimizer_args": {"momentum": 0.9}, "lr": 0.01, "classifier_lr": 0.01,
    "weight_decay": 1e-5, "lars": False,
    "exclude_bias_n_norm": False, "accumulate_grad_batches": 1, "scheduler": "none", "min_lr": 0.0,
    "warmup_start_lr": 0.0, "warmup_epochs": 0, "num_small_crops": 0, "proj_hidden_dim": 256, "proj_output_dim": 256,
    "lamb": 0.005, "scale_loss": 0.025,
}  # fmt: skip


class Crops:
    """The batches of a loader as solo-learn's methods take them: (indices, list of crops, labels).

    Large crops are first, as in ``augment=dino``. Each pass is the next epoch. Lightning must not add a sampler:
    ``replace_sampler_ddp=False``, because the loader deals the samples to the ranks.
    """

    def __init__(self, loader: gpuaug.Loader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Any, list[Any], Any]]:
        for batch in self.loader:
            images = batch.images if isinstance(batch.images, list) else [batch.images]
            yield batch.indices, images, batch.labels


def train(root: str, overrides: list[str], **settings: Any) -> Any:
    """Train Barlow Twins. ``settings``: other values than those above."""
    import pytorch_lightning

    config = gpuaug.compose("train", [f"source.root={root}", "augment=barlowtwins", "device=auto", *overrides])
    with gpuaug.build(config) as loader:
        views = loader.augment.views
        given = {"num_classes": len(loader.source.classes), "batch_size": loader.batch_size, **SETTINGS, **settings}
        method = BarlowTwins(num_large_crops=len(views) - given["num_small_crops"], **given)
        trainer = pytorch_lightning.Trainer(
            max_epochs=given["max_epochs"], accelerator=loader.device.type, devices=1, logger=False,
            enable_checkpointing=False, replace_sampler_ddp=False,
        )  # fmt: skip
        trainer.fit(method, Crops(loader))
        return trainer.callback_metrics


if __name__ == "__main__":
    print(train(sys.argv[1], sys.argv[2:]))
