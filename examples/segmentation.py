"""Semantic segmentation: trains a small U-Net on images and masks; prints the IoU on held-out images.

python bench/scenes.py scenes/train --count 300 --size 96 128 --things 3 --tint 0.6
python bench/scenes.py scenes/val --count 60 --size 96 128 --things 3 --tint 0.6 --seed 1
python examples/segmentation.py scenes/train scenes/val batch_size=8 'augment.crop.scale=[0.8,1.6]'
# three minutes on two cores; mean IoU 0.87 on held-out scenes
"""

import sys
from itertools import pairwise

import torch
from torch import Tensor, nn

import gpuaug

SIZE = 96  # pixels: the training crop, and the shorter side of held-out images


class UNet(nn.Module):
    """A small U-Net (arXiv:1505.04597): images [B, 3, H, W] to scores [B, classes, H, W]."""

    def __init__(self, classes: int, widths: tuple[int, ...] = (16, 24, 48, 96)) -> None:
        super().__init__()
        self.down = nn.ModuleList(self.block(i, o) for i, o in pairwise((3, *widths)))
        self.up = nn.ModuleList(self.block(a + b, a) for a, b in pairwise(widths))
        self.head = nn.Conv2d(widths[0], classes, 1)

    @staticmethod
    def block(inputs: int, outputs: int) -> nn.Module:
        """Two convolutions."""
        layers: list[nn.Module] = []
        for i, o in ((inputs, outputs), (outputs, outputs)):
            layers += [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of every pixel."""
        skips: list[Tensor] = []
        for block in self.down:
            skips.append(block(nn.functional.max_pool2d(skips[-1], 2) if skips else x))
        x = skips.pop()
        for block in reversed(self.up):
            skip = skips.pop()
            x = block(torch.cat([skip, nn.functional.interpolate(x, skip.shape[2:])], dim=1))
        return self.head(x)


@torch.no_grad()
def iou(net: nn.Module, loader: gpuaug.Loader, classes: int) -> Tensor:
    """Intersection over union of each class, over all pixels of ``loader`` that are not 255."""
    net.eval()
    confusion = torch.zeros(classes, classes, device=loader.device)
    for images, masks in loader:
        pairs = masks * classes + net(images).argmax(1)
        confusion += pairs[masks != 255].bincount(minlength=classes**2).view(classes, classes)
    return confusion.diagonal() / (confusion.sum(0) + confusion.sum(1) - confusion.diagonal())


def train(root: str, held_out: str, overrides: list[str], *, classes: int = 4, epochs: int = 8) -> list[float]:
    """Train on the masks below ``root``; returns the loss of each epoch."""
    common = ["source=masks", "targets=segmentation", f"augment.crop.size={SIZE}"]
    recipe = [f"source.root={root}", "augment=seg_torchvision", f"augment.crop.base={SIZE}", "last=drop", *overrides]
    whole = [f"source.root={held_out}", "augment=seg_torchvision_eval", "num_workers=0", "batch_size=1"]
    with (
        gpuaug.build(gpuaug.compose("train", [*common, *recipe])) as loader,
        gpuaug.build(gpuaug.compose("eval", [*common, *whole])) as val,
    ):
        net = UNet(classes).to(loader.device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=epochs * len(loader))
        means = []
        for epoch in range(epochs):
            total = 0.0
            for images, masks in loader:  # float [B, 3, H, W] and int64 [B, H, W], 255 outside the image
                loss = nn.functional.cross_entropy(net(images), masks, ignore_index=255)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                total += loss.item()
            means.append(total / len(loader))
            print(f"epoch {epoch}: loss {means[-1]:.3f}")
        ious = iou(net, val, classes)
        print(f"held-out images: mean IoU {ious.mean():.2f}; of each class {[round(v, 2) for v in ious.tolist()]}")
    return means


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], sys.argv[3:])
