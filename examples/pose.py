"""Pose estimation: trains a small network of heat maps on the people of a COCO file. Needs pycocotools.

python bench/people.py people/train --count 600
python bench/people.py people/val --count 80 --seed 1
python examples/pose.py people/train people/val batch_size=32
# five minutes of processor time; AP 0.81 on held-out people; pose.png shows predictions
"""

import sys
from dataclasses import replace

import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor, nn

from gpuaug import Loader, build, compose

SIZE, CELL = [128, 96], 4  # pixels: (H, W) of the network's input, and the side of a cell of its heat maps
CENTRES = torch.cartesian_prod(*(torch.arange(1.5, side, CELL) for side in SIZE)).flip(1)  # (x, y) of each cell


def network(points: int) -> nn.Module:
    """A small "simple baseline" (arXiv:1804.06208): images [B, 3, H, W] to logits [B, points, H / 4, W / 4]."""
    layers: list[nn.Module] = []
    for i, o, rate in ((3, 24, 1), (24, 48, 1), (48, 96, 2), (96, 128, 3)):  # in the end, a cell sees the whole person
        layers += [nn.Conv2d(i, o, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
        layers += [nn.Conv2d(o, o, 3, padding=rate, dilation=rate, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
    for i, o in ((128, 96), (96, 64)):
        layers += [nn.ConvTranspose2d(i, o, 4, stride=2, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(64, points, 1))


def loss_of(maps: Tensor, keypoints: Tensor) -> Tensor:
    """Cross entropy with a Gaussian around each visible keypoint. ``keypoints``: [B, K, 3], x, y and visibility."""
    seen = keypoints[..., 2] > 0
    distances = torch.cdist(keypoints[seen][:, :2], CENTRES.to(maps.device)) / CELL
    return nn.functional.cross_entropy(maps.flatten(2)[seen], (-distances.square() / 2).softmax(1))


def located(maps: Tensor) -> Tensor:
    """The mean of each heat map around its maximum, and its probability: [B, K, 3], x, y and score."""
    places, chances = CENTRES.to(maps.device), maps.flatten(2).softmax(2)
    chances = chances * (torch.cdist(places, places)[chances.argmax(2)] < 2 * CELL)
    score = chances.sum(2, keepdim=True)
    return torch.cat([chances @ places / score, score], dim=2)


@torch.no_grad()
def average_precision(net: nn.Module, loader: Loader, annotations: str, picture: str) -> float:
    """COCO's average precision, of OKS 0.5 to 0.95. The first predictions are drawn into the file ``picture``."""
    results = []
    for batch in loader:
        points = located(net(batch.images)).cpu()
        if not results:
            shown = torch.cat([points[..., :2], 2 * (points[..., 2:] > 0.3)], dim=2)  # x, y and visibility
            replace(batch, targets=replace(batch.targets, keypoints=shown)).show().save(picture)
        people = batch.targets.restore(keypoints=points[:, None])  # one person in each image
        for image_id, person in zip(batch.targets.image_ids.tolist(), people, strict=True):
            numbers = person["keypoints"].flatten().tolist()
            results.append({"image_id": image_id, "category_id": 1, "keypoints": numbers, "score": sum(numbers[2::3])})
    coco = COCOeval(truth := COCO(annotations), truth.loadRes(results), "keypoints")
    coco.evaluate(), coco.accumulate(), coco.summarize()
    return float(coco.stats[0])


def train(root: str, held_out: str, overrides: list[str], *, epochs: int = 14, picture: str = "pose.png") -> None:
    """Train on the people below ``root``, and print the average precision on the people below ``held_out``."""
    common = ["source=coco", "source.split=images", "source.annotations=person_keypoints.json", "source.unit=object"]
    common += ["targets=pose", f"augment.crop.size={SIZE}"]
    recipe = [f"source.root={root}", "augment=pose_hrnet", "last=drop", *overrides]
    whole = [f"source.root={held_out}", "augment=pose_hrnet_eval", "num_workers=0"]
    with build(compose("train", [*common, *recipe])) as loader, build(compose("eval", [*common, *whole])) as val:
        net = network(17).to(loader.device)
        optimizer = torch.optim.AdamW(net.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=epochs * len(loader))
        for epoch in range(epochs):
            for images, targets in loader:
                loss = loss_of(net(images)[targets.sample], targets.keypoints)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step(), schedule.step()
            print(f"epoch {epoch}: loss {loss.item():.3f}")
        ap = average_precision(net.eval(), val, f"{held_out}/person_keypoints.json", picture)
        print(f"held-out people: AP {ap:.2f}; predictions in {picture}")


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], sys.argv[3:])
