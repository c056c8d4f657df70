"""Object detection: torchvision's FCOS with a small backbone, trained on mosaics of a COCO file. Needs pycocotools.

python bench/scenes.py scenes/train --count 300 --size 96 128 --things 3 --tint 0.6
python bench/scenes.py scenes/val --count 60 --size 96 128 --things 3 --tint 0.6 --seed 1
python examples/detection.py scenes/train scenes/val batch_size=8
# three minutes of processor time; AP 0.63 on held-out scenes; boxes.png shows predictions
"""

import sys
from itertools import pairwise
from typing import Any

import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor, nn
from torchvision.models.detection import FCOS
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.utils import draw_bounding_boxes, save_image

from gpuaug import build, compose

SIZE = 160  # of the network's input; a cell of its only feature map has 8 x 8 pixels


def detector(classes: int) -> FCOS:
    """FCOS for ``classes`` classes and the background, which is class 0."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((3, 24, 48, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers += [nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    backbone: Any = nn.Sequential(*layers)
    backbone.out_channels = 64
    grid = AnchorGenerator(sizes=((8,),), aspect_ratios=((1.0,),))
    # The recipe has resized the images: with these sizes the model keeps them as they are.
    net: Any = FCOS(backbone, classes + 1, min_size=SIZE, max_size=SIZE, anchor_generator=grid)
    nn.init.ones_(net.head.regression_head.bbox_reg.bias)  # a box without area has no gradient
    return net


@torch.no_grad()
def average_precision(net: nn.Module, loader: Any, annotations: str, picture: str) -> float:
    """COCO's average precision, of IoU 0.5 to 0.95. The first predictions are drawn into the file ``picture``."""
    results, drawn = list[dict[str, Any]](), list[Tensor]()
    for images, targets in loader:
        found = net(list(images))
        originals = targets.restore(boxes=[row["boxes"].cpu() for row in found])
        for image, row, original, image_id in zip(images, found, originals, targets.image_ids.tolist(), strict=True):
            low, high = original["boxes"].split(2, dim=1)
            boxes = torch.cat([low, high - low], dim=1).tolist()  # x, y, width, height
            labels, sure = row["labels"].cpu() - 1, (row["scores"] > 0.5).cpu()  # label 0 is the background
            categories = loader.source.category_ids[labels].tolist()
            for bbox, category_id, score in zip(boxes, categories, row["scores"].tolist(), strict=True):
                results.append({"image_id": image_id, "category_id": category_id, "bbox": bbox, "score": score})
            names = [loader.source.classes[label] for label in labels[sure].tolist()]
            large = image.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
            drawn.append(draw_bounding_boxes(large, 2 * row["boxes"][sure], names, colors="yellow"))
    save_image(drawn[:18], picture, nrow=6)
    if not results:
        return 0.0
    coco = COCOeval(truth := COCO(annotations), truth.loadRes(results), "bbox")
    coco.evaluate(), coco.accumulate(), coco.summarize()
    return float(coco.stats[0])


def train(root: str, held_out: str, overrides: list[str], *, epochs: int = 12, picture: str = "boxes.png") -> None:
    """Train on the boxes below ``root``, and print the average precision on the boxes below ``held_out``."""
    common = ["source=coco", "source.split=images", "source.annotations=instances.json", "targets=detection"]
    common += [f"augment.crop.size={SIZE}", "augment.crop.upscale=true"]
    recipe = [f"source.root={root}", "augment=det_yolo", f"augment.combine.affine.size={SIZE}", "last=drop"]
    recipe += [f"augment.epochs.mosaic=[0,{epochs - 3}]", "targets.boxes.min_size=2"]
    recipe += ["targets.boxes.min_visibility=0.1", *overrides]
    whole = [f"source.root={held_out}", "augment=det_yolo_eval", "num_workers=0"]
    with build(compose("train", [*common, *recipe])) as loader, build(compose("eval", [*common, *whole])) as val:
        net = detector(loader.num_classes or 1).to(loader.device).train()
        optimizer = torch.optim.AdamW(net.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=epochs * len(loader))
        for epoch in range(epochs):
            for images, targets in loader:
                loss: Any = sum(net(list(images), targets.as_torchvision()).values())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step(), schedule.step()
            print(f"epoch {epoch}: loss {loss.item():.3f}")
        ap = average_precision(net.eval(), val, f"{held_out}/instances.json", picture)
        print(f"held-out images: AP {ap:.2f}; predictions in {picture}")


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], sys.argv[3:])
