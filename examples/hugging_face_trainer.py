"""Training an image classifier of `transformers` with Hugging Face's Trainer, which takes dictionaries as batches.

python examples/hugging_face_trainer.py /data/train /data/val
"""

import sys
from collections.abc import Iterator
from typing import Any

import transformers

import gpuaug


class Batches:
    """The batches of a loader as dictionaries. A Trainer takes it in place of a DataLoader."""

    def __init__(self, loader: gpuaug.Loader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"pixel_values": batch.images, "labels": batch.labels} for batch in self.loader)

    def set_epoch(self, epoch: int) -> None:
        """The Trainer calls it before each epoch, also when it continues from a checkpoint."""
        self.loader.set_epoch(epoch)


class ImageTrainer(transformers.Trainer):
    """A Trainer whose datasets are :class:`Batches`, which it iterates over as they are.

    The loaders read rank and world size themselves, and put batches on the device.
    """

    def get_train_dataloader(self) -> Any:
        """Batches with ``pixel_values`` and ``labels``."""
        return self.train_dataset

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The same for the held-out images."""
        return eval_dataset or self.eval_dataset


def train(train: list[str], val: list[str], *, resume: bool = False, **settings: Any) -> transformers.Trainer:
    """Train a small network, and evaluate it after each epoch. ``settings`` go to TrainingArguments."""
    with (
        gpuaug.build(gpuaug.compose("train", train)) as loader,
        gpuaug.build(gpuaug.compose("eval", val)) as held_out,
    ):
        config = transformers.ResNetConfig(
            embedding_size=16,
            hidden_sizes=[16, 32],
            depths=[1, 1],
            layer_type="basic",
            num_labels=loader.num_classes or 1,
        )
        arguments = transformers.TrainingArguments(
            per_device_train_batch_size=loader.batch_size,  # only for what the Trainer prints
            save_strategy="epoch",
            eval_strategy="epoch",
            **settings,
        )
        model = transformers.ResNetForImageClassification(config)
        data = {"train_dataset": Batches(loader), "eval_dataset": Batches(held_out)}
        trainer = ImageTrainer(model=model, args=arguments, **data)
        trainer.train(resume_from_checkpoint=resume)
    return trainer


if __name__ == "__main__":
    train([f"source.root={sys.argv[1]}"], [f"source.root={sys.argv[2]}"], output_dir="hugging_face_trainer")
