"""Pose estimation: trains a small network of heat maps on a COCO file from scratch. Needs pycocotools.

python bench/people.py people/train --count 600
python bench/people.py people/val --count 60 --seed 1
python examples/pose.py people/train people/val batch_size=32
"""

import sys
from itertools import pairwise
from typing import Any

import torch
from PIL import Image, ImageDraw
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor, nn

import gpuaug

SIZE = [128, 96]  # of the network's input, (H, W)
CELL = 4  # pixels of the input that a cell of a heat map has, in each direction


class PoseNet(nn.Module):
    """A small U-Net: images [B, 3, H, W] to the logits of heat maps [B, points, H / 4, W / 4]."""

    def __init__(self, points: int, widths: tuple[int, ...] = (24, 48, 64, 96, 128)) -> None:
        super().__init__()
        self.down = nn.ModuleList(self.block(i, o, stride=2) for i, o in pairwise((3, *widths)))
        self.up = nn.ModuleList(self.block(a + b, a) for a, b in pairwise(widths[1:]))
        self.head = nn.Conv2d(widths[1], points, 1)

    @staticmethod
    def block(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
        first = [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        return nn.Sequential(*first, nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for block in self.down:
            skips.append(x := block(x))
        skips.pop()
        for block in reversed(self.up):
            skip = skips.pop()
            x = block(torch.cat([skip, nn.functional.interpolate(x, skip.shape[2:])], dim=1))
        return self.head(x)


def positions(maps: Tensor) -> Tensor:
    """Centres (x, y) of the cells, in pixel indices of the input: [H * W, 2]."""
    y, x = (torch.arange(side, device=maps.device) * CELL + (CELL - 1) / 2 for side in maps.shape[2:])
    return torch.cartesian_prod(y, x).flip(1)


def loss_of(maps: Tensor, keypoints: Tensor) -> Tensor:
    """Cross entropy with a Gaussian of one cell around each visible keypoint; both [N, K, ...]."""
    seen = keypoints[..., 2] > 0
    distances = torch.cdist(keypoints[seen][:, :2], positions(maps)) / CELL
    return nn.functional.cross_entropy(maps.flatten(2)[seen], (-distances.square() / 2).softmax(1))


def located(maps: Tensor) -> Tensor:
    """Each point is the mean of its heat map around the maximum: [N, K, 3], x, y and the probability."""
    cells, chances = positions(maps), maps.flatten(2).softmax(2)
    near = torch.cdist(cells, cells)[chances.argmax(2)] < 2 * CELL  # [N, K, H * W]
    score = (chances * near).sum(2, keepdim=True)
    return torch.cat([(chances * near) @ cells / score, score], dim=2)


@torch.no_grad()
def predict(net: nn.Module, loader: gpuaug.Loader) -> list[dict[str, Any]]:
    """COCO's list of results: the keypoints of each person, in pixels of the file."""
    net.eval()
    results = []
    for images, targets in loader:
        people = targets.restore(keypoints=located(net(images)).cpu()[:, None])  # one person in each image
        for image_id, person in zip(targets.image_ids.tolist(), people, strict=True):
            score, points = person["keypoints"][0, :, 2].mean().item(), person["keypoints"].flatten().tolist()
            results.append({"image_id": image_id, "category_id": 1, "keypoints": points, "score": score})
    return results


def train(root: str, held_out: str, overrides: list[str], *, epochs: int = 20, picture: str = "pose.png") -> float:
    """Train on the people below ``root``; returns COCO's average precision, of OKS 0.5 to 0.95, on ``held_out``."""
    common = ["source=coco", "source.split=images", "source.annotations=person_keypoints.json", "source.unit=object"]
    common += ["targets=pose", f"augment.crop.size={SIZE}"]
    recipe = [f"source.root={root}", "augment=pose_hrnet", "last=drop", *overrides]
    whole = [f"source.root={held_out}", "augment=pose_hrnet_eval", "num_workers=0"]
    with (
        gpuaug.build(gpuaug.compose("train", [*common, *recipe])) as loader,
        gpuaug.build(gpuaug.compose("eval", [*common, *whole])) as val,
    ):
        net = PoseNet(17).to(loader.device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=epochs * len(loader))
        for epoch in range(epochs):
            total = 0.0
            for images, targets in loader:
                loss = loss_of(net(images)[targets.sample], targets.keypoints)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                total += loss.item() / len(loader)
            print(f"epoch {epoch}: loss {total:.3f}")
        results = predict(net, val)
    coco = COCOeval(truth := COCO(f"{held_out}/person_keypoints.json"), truth.loadRes(results), "keypoints")
    coco.evaluate(), coco.accumulate(), coco.summarize()
    # draw(results, truth, f"{held_out}/images", picture)
    print(f"held-out images: AP {coco.stats[0]:.2f}; predictions are in {picture}")
    return float(coco.stats[0])


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], sys.argv[3:])
