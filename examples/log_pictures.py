"""Logs what the network sees, as pictures, to TensorBoard, MLflow or Weights & Biases.

python examples/log_pictures.py tensorboard runs source.root=/data/train augment=standard
python examples/log_pictures.py mlflow sqlite:///mlflow.db source.root=/data/train augment=standard
python examples/log_pictures.py wandb my-project source.root=/data/train  # WANDB_MODE=offline: sends nothing

Every 500 steps, rank 0 logs a picture of 16 samples, and as text what the recipe did to the first one. Each time costs
about 0.2 s on one CPU core, and 0.5 MB. Meanwhile the other ranks wait for rank 0.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from textwrap import indent

import numpy as np
import torch
from PIL.Image import Image

import gpuaug

Log = Callable[[int, Image, str], None]  # of a step: a picture and a text


@contextmanager
def to_tensorboard(folder: str) -> Iterator[Log]:
    from torch.utils.tensorboard import SummaryWriter

    def log(step: int, picture: Image, text: str) -> None:
        writer.add_image("batch", np.asarray(picture), step, dataformats="HWC")
        writer.add_text("first sample", indent(text, "    "), step)  # Markdown keeps indented lines as they are

    with SummaryWriter(folder) as writer:
        yield log


@contextmanager
def to_mlflow(uri: str) -> Iterator[Log]:
    import mlflow

    def log(step: int, picture: Image, text: str) -> None:
        mlflow.log_image(picture, f"batch_{step:07}.png")
        mlflow.log_text(text, f"batch_{step:07}.txt")

    mlflow.set_tracking_uri(uri)
    with mlflow.start_run():
        yield log


@contextmanager
def to_wandb(project: str) -> Iterator[Log]:
    import wandb

    with wandb.init(project=project) as run:
        yield lambda step, picture, text: run.log({"batch": wandb.Image(picture, caption=text)}, step=step)


def what_was_done(batch: gpuaug.Batch, row: int) -> str:
    """The sample's name, and for each of its views the crop and the operations."""
    made = batch.explain(row)
    return "\n\n".join([batch.keys[row], *map(str, made if isinstance(made, list) else [made])])


def train(overrides: list[str], log_to: AbstractContextManager[Log], *, epochs: int = 3, every: int = 500) -> None:
    """Train a linear classifier."""
    begun = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if begun else int(os.environ.get("RANK", 0))  # of torchrun
    with gpuaug.build(gpuaug.compose("train", overrides)) as loader, log_to if rank == 0 else nullcontext() as log:
        layers = torch.nn.AdaptiveAvgPool2d(8), torch.nn.Flatten(), torch.nn.Linear(192, loader.num_classes or 1)
        net = torch.nn.Sequential(*layers).to(loader.device)
        optimizer, step = torch.optim.AdamW(net.parameters()), 0
        for _ in range(epochs):
            for batch in loader:
                if log and step % every == 0:
                    log(step, batch.show(), what_was_done(batch, row=0))
                images = batch.images[0] if isinstance(batch.images, list) else batch.images
                loss = torch.nn.functional.cross_entropy(net(images.float()), batch.labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1


if __name__ == "__main__":
    loggers = {"tensorboard": to_tensorboard, "mlflow": to_mlflow, "wandb": to_wandb}
    train(sys.argv[3:], loggers[sys.argv[1]](sys.argv[2]))
