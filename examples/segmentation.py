"""Semantic segmentation: trains a small U-Net on images and masks; prints the IoU on held-out images.

python bench/scenes.py scenes/train --count 300 --size 96 128 --things 3 --tint 0.6
python bench/scenes.py scenes/val --count 60 --size 96 128 --things 3 --tint 0.6 --seed 1
python examples/segmentation.py scenes/train scenes/val batch_size=8 'augment.crop.scale=[0.8,1.6]'
# three minutes on two cores; mean IoU 0.84 to 0.87 on held-out scenes, at the size of the files
"""

import sys
from functools import partial
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
    def block(inputs: int, outputs: int, layers: tuple[nn.Module, ...] = ()) -> nn.Module:
        for i, o in ((inputs, outputs), (outputs, outputs)):
            layers += (nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for block in self.down:
            skips.append(block(nn.functional.max_pool2d(skips[-1], 2) if skips else x))
        x = skips.pop()
        for block in reversed(self.up):
            skip = skips.pop()
            x = block(torch.cat([skip, nn.functional.interpolate(x, skip.shape[2:])], dim=1))
        return self.head(x)


@torch.no_grad()
def iou(net: nn.Module, val: gpuaug.Loader, files: gpuaug.Loader, classes: int) -> Tensor:
    """Intersection over union of each class at the size of the ``files``, over all pixels that are not 255."""
    net.eval()
    confusion = torch.zeros(classes, classes, device=val.device)
    for batch, (_, masks) in zip(val, files, strict=True):
        (image,) = batch.targets.restore(logits=net(batch.images))
        pairs = masks[0] * classes + image["logits"].argmax(0)
        confusion += pairs[masks[0] != 255].bincount(minlength=classes**2).view(classes, classes)
    return confusion.diagonal() / (confusion.sum(0) + confusion.sum(1) - confusion.diagonal())


def loader(name: str, root: str, *words: str) -> gpuaug.Loader:
    """A loader of the images and masks below ``root``."""
    return gpuaug.build(gpuaug.compose(name, [f"source.root={root}", "source=masks", "targets=segmentation", *words]))


def train(root: str, held_out: str, overrides: list[str], *, classes: int = 4, epochs: int = 8) -> list[float]:
    """Train on the masks below ``root``; returns the loss of each epoch."""
    recipe = ["augment=seg_torchvision", f"augment.crop.size={SIZE}", f"augment.crop.base={SIZE}", "last=drop"]
    small = ["augment=seg_torchvision_eval", f"augment.crop.size={SIZE}", "batch_size=1", "num_workers=0"]
    whole = ["augment=none", "augment.crop=null", "batch_size=1", "num_workers=0"]
    val_of = partial(loader, "eval", held_out)
    with loader("train", root, *recipe, *overrides) as train, val_of(*small) as val, val_of(*whole) as files:
        net = UNet(classes).to(train.device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=epochs * len(train))
        means = [0.0] * epochs
        for epoch in range(epochs):
            for images, masks in train:  # float [B, 3, H, W] and int64 [B, H, W], 255 outside the image
                loss = nn.functional.cross_entropy(net(images), masks, ignore_index=255)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                means[epoch] += loss.item() / len(train)
            print(f"epoch {epoch}: loss {means[epoch]:.3f}")
        ious = iou(net, val, files, classes)
        print(f"held-out images: mean IoU {ious.mean():.2f}; of each class {[round(v, 2) for v in ious.tolist()]}")
    return means


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], sys.argv[3:])
