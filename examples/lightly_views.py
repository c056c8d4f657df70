"""lightly: train SimCLR with its head and loss on views from a gpuaug.Loader, in place of its transforms and datasets.

python bench/photographs.py photographs
python examples/lightly_views.py photographs/train batch_size=32
"""

import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from torch import Tensor, nn

import gpuaug


class Views:
    """The batches of a loader as lightly's training code takes them: (views, labels, names of the files).

    Each pass is the next epoch. With Lightning: ``Trainer(use_distributed_sampler=False)``, because the loader deals
    the samples to the ranks.
    """

    def __init__(self, loader: gpuaug.Loader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[list[Tensor], Any, list[str]]]:
        for batch in self.loader:
            yield batch.images if isinstance(batch.images, list) else [batch.images], batch.labels, batch.keys


def backbone(width: int = 32) -> nn.Module:
    """A small convolutional network: images [B, 3, H, W] to features [B, 4 * width]."""
    sides = (3, width, 2 * width, 4 * width)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sides):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def train(root: str, overrides: list[str], *, epochs: int = 3) -> list[float]:
    """Returns the mean loss of each epoch."""
    losses: list[float] = []
    config = gpuaug.compose("train", [f"source.root={root}", "augment=simclr", "last=drop", *overrides])
    with gpuaug.build(config) as loader:
        net = nn.Sequential(backbone(), SimCLRProjectionHead(128, 128, 64)).to(loader.device)
        criterion, optimizer = NTXentLoss(temperature=0.5), torch.optim.Adam(net.parameters(), lr=1e-3)
        for _ in range(epochs):
            total = torch.zeros((), device=loader.device)
            for views, _labels, _names in Views(loader):
                loss = criterion(*map(net, views))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.detach()
            losses.append(total.item() / len(loader))
    return losses


if __name__ == "__main__":
    print([round(loss, 3) for loss in train(sys.argv[1], sys.argv[2:])])
