"""Object detection: torchvision's FCOS with a small backbone, trained on a COCO file from scratch. Needs pycocotools.

python bench/scenes.py scenes/train --count 300 --size 96 128 --things 3 --tint 0.6
python bench/scenes.py scenes/val --count 60 --size 96 128 --things 3 --tint 0.6 --seed 1
python examples/detection.py scenes/train scenes/val batch_size=8 augment.crop.zoom_p=0
"""

import sys
from itertools import pairwise
from typing import Any

import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import nn
from torchvision.models.detection import FCOS
from torchvision.models.detection.anchor_utils import AnchorGenerator

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


@torch.no_grad()
def average_precision(net: nn.Module, loader: Any, annotations: str) -> float:
    """COCO's average precision, of IoU 0.5 to 0.95. ``annotations``: the file of the images in ``loader``."""
    net.eval()
    results: list[dict[str, Any]] = []
    for images, targets in loader:
        found = net(list(images))
        originals = targets.restore(boxes=[row["boxes"].cpu() for row in found])
        for row, original, image_id in zip(found, originals, targets.image_ids.tolist(), strict=True):
            low, high = original["boxes"].split(2, dim=1)
            boxes = torch.cat([low, high - low], dim=1).tolist()  # x, y, width, height
            categories = loader.source.category_ids[row["labels"].cpu() - 1].tolist()  # label 0 is the background
            for bbox, category_id, score in zip(boxes, categories, row["scores"].tolist(), strict=True):
                results.append({"image_id": image_id, "category_id": category_id, "bbox": bbox, "score": score})
    if not results:
        return 0.0
    coco = COCOeval(truth := COCO(annotations), truth.loadRes(results), "bbox")
    coco.evaluate(), coco.accumulate(), coco.summarize()
    return float(coco.stats[0])


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
        print(f"held-out images: AP {average_precision(net, val, f'{held_out}/instances.json'):.2f}")
    return net, means


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], sys.argv[3:])
