"""Object detection: torchvision's FCOS with a small backbone, trained on a COCO file from scratch.

python bench/scenes.py scenes/train --count 300 --size 96 128 --things 3 --tint 0.6
python bench/scenes.py scenes/val --count 60 --size 96 128 --things 3 --tint 0.6 --seed 1
python examples/detection.py scenes/train scenes/val batch_size=8 augment.crop.zoom_p=0
"""

import sys
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection import FCOS
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import box_iou

import gpuaug

SIZE = 160  # of the network's input; a cell of its only feature map has 8 x 8 pixels


def detector(classes: int) -> FCOS:
    """FCOS for ``classes`` classes and the background, which is class 0."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((3, 24, 48, 96)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers += [nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    backbone: Any = nn.Sequential(*layers)
    backbone.out_channels = 96
    grid = AnchorGenerator(sizes=((8,),), aspect_ratios=((1.0,),))
    # The recipe has resized the images: with these sizes the model keeps them as they are.
    return FCOS(backbone, classes + 1, min_size=SIZE, max_size=SIZE, anchor_generator=grid)


def to_source(boxes: Tensor, matrix: Tensor) -> Tensor:
    """Map boxes [n, 4] on the network's input to the source image. ``matrix`` [3, 3]: its row of targets.matrices."""
    corners = nn.functional.pad(boxes.cpu().double().view(-1, 2), (0, 1), value=1.0)  # [2 n, 3]: x, y, 1
    mapped = corners @ matrix.inverse().T
    return (mapped[:, :2] / mapped[:, 2:]).view(-1, 4)


@torch.no_grad()
def evaluate(net: FCOS, loader: gpuaug.Loader, *, score: float = 0.4) -> tuple[float, float]:
    """Recall and precision of boxes above ``score``. A match has the same class and an IoU of at least 0.5."""
    net.eval()
    found, objects, right, made = 0, 0, 0, 0
    source: Any = loader.source
    for images, targets in loader:
        for row, index, matrix in zip(net(list(images)), targets.indices.tolist(), targets.matrices, strict=True):
            truth = source.label(index)  # as the file says, in pixels of the source
            kept = row["scores"] > score
            boxes, labels = to_source(row["boxes"][kept], matrix), row["labels"][kept].cpu() - 1
            match = box_iou(boxes, torch.as_tensor(truth.boxes).double()) >= 0.5
            match &= labels[:, None] == torch.as_tensor(truth.labels)
            found, objects = found + int(match.any(dim=0).sum()), objects + match.shape[1]
            right, made = right + int(match.any(dim=1).sum()), made + match.shape[0]
    return found / max(objects, 1), right / max(made, 1)


def train(root: str, held_out: str, overrides: list[str], *, epochs: int = 10) -> tuple[FCOS, list[float]]:
    """Train on the boxes below ``root``; returns the network, and the loss of each epoch."""
    common = ["source=coco", "source.split=images", "source.annotations=instances.json", "targets=detection"]
    common += [f"augment.crop.size=[{SIZE},{SIZE}]"]
    recipe = [f"source.root={root}", "augment=det_ssd", *overrides]
    whole = [f"source.root={held_out}", "augment=det_ssd_eval", "num_workers=0"]
    with (
        gpuaug.build(gpuaug.compose("train", [*common, *recipe])) as loader,
        gpuaug.build(gpuaug.compose("eval", [*common, *whole])) as val,
    ):
        net = detector(loader.num_classes or 1).to(loader.device).train()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        means = []
        for epoch in range(epochs):
            total = 0.0
            for images, targets in loader:
                loss: Any = sum(net(list(images), targets.as_torchvision()).values())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item()
            means.append(total / len(loader))
            print(f"epoch {epoch}: loss {means[-1]:.3f}")
        recall, precision = evaluate(net, val)
        print(f"held-out images: recall {recall:.2f}, precision {precision:.2f} at IoU 0.5")
    return net, means


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], sys.argv[3:])
