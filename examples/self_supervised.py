"""Self-supervised training: a small ViT with the losses of DINO and iBOT; prints the k-NN accuracy of its features.

python bench/photographs.py photographs
python examples/self_supervised.py photographs/train photographs/val
"""

import copy
import math
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpuaug

RECIPE = ["augment=dinov2", "augment.views.global1.crop.size=64", "augment.views.global2.crop.size=64",
          "augment.views.local.crop.size=32", "augment.views.local.copies=6", "patch_masks=dinov2",
          "patch_masks.patch=8", "batch_size=64"]  # fmt: skip


class ViT(nn.Module):
    """A small Vision Transformer with a head: images [B, 3, H, W] to tokens [B, 1 + N, width], the first of the image."""

    def __init__(self, patch: int = 8, width: int = 96, depth: int = 4, prototypes: int = 512) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.image, self.hidden = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(width, 256), nn.GELU(), nn.Linear(256, 64))
        self.prototypes = nn.Parameter(torch.randn(prototypes, 64))

    def forward(self, x: Tensor, masks: Tensor | None = None) -> Tensor:
        """``masks``: bool [B, N], the patches that the model does not see."""
        x = self.patches(x)
        y, x_ = (torch.linspace(0, 1, n, device=x.device) for n in x.shape[2:])
        waves = 2.0 ** torch.arange(x.shape[1] // 4, device=x.device).div(8) * math.pi
        place = torch.cartesian_prod(y, x_)[:, :, None] * waves  # [N, 2, width / 4]
        x = x.flatten(2).transpose(1, 2)
        if masks is not None:
            x = torch.where(masks[..., None], self.hidden, x)
        x = x + torch.cat([place.sin(), place.cos()], dim=2).flatten(1)
        return self.blocks(torch.cat([self.image.expand(len(x), 1, -1), x], dim=1))

    def features(self, images: Tensor) -> Tensor:
        """[B, width]."""
        return self(images)[:, 0]

    def scores(self, tokens: Tensor) -> Tensor:
        """Similarity of tokens [..., width] to the prototypes."""
        return F.normalize(self.head(tokens), dim=-1) @ F.normalize(self.prototypes, dim=-1).T


def balanced(scores: Tensor, temperature: float = 0.06) -> Tensor:
    """The teacher's probabilities [n, K], with all prototypes used equally often (Sinkhorn-Knopp, as in DINOv2)."""
    q = torch.softmax(scores.flatten() / temperature, 0).view_as(scores)
    for _ in range(3):
        q = q / q.sum(0, keepdim=True)
        q = q / q.sum(1, keepdim=True)
    return q


def train(root: str, overrides: list[str], *, epochs: int = 30) -> tuple[ViT, ViT]:
    """Returns the trained teacher, and the same network before training."""
    torch.manual_seed(0)
    student = ViT()
    teacher, before = copy.deepcopy(student).requires_grad_(False), copy.deepcopy(student)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3, weight_decay=0.05)
    config = gpuaug.compose("train", [f"source.root={root}", *RECIPE, *overrides])
    with gpuaug.build(config) as loader:
        steps = epochs * len(loader)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps, pct_start=0.1)
        student, teacher = student.to(loader.device), teacher.to(loader.device)
        for _ in range(epochs):
            for batch in loader:
                views, masks = [torch.cat(batch.images[:2]), torch.cat(batch.images[2:])], batch.patch_masks.as_dinov2()
                where, weights = masks["mask_indices_list"], masks["masks_weight"]
                targets = teacher(views[0])
                image = balanced(teacher.scores(targets[:, 0])).chunk(2)
                patch = balanced(teacher.scores(targets[:, 1:].flatten(0, 1)[where]))
                seen = [student(views[0], masks["collated_masks"]), student(views[1])]
                logs = [student.scores(x[:, 0]).div(0.1).log_softmax(1).chunk(len(x) // len(batch)) for x in seen]
                pairs = [(q, p) for k, q in enumerate(image) for p in (logs[0][1 - k], *logs[1])]
                dino = -sum((q * p).sum(1).mean() for q, p in pairs) / len(pairs)
                hidden = student.scores(seen[0][:, 1:].flatten(0, 1)[where]).div(0.1).log_softmax(1)
                ibot = -((patch * hidden).sum(1) * weights).sum() / weights.sum().clamp(min=1)
                optimizer.zero_grad()
                (dino + ibot).backward()
                optimizer.step()
                schedule.step()
                with torch.no_grad():
                    for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                        old.lerp_(new, 0.01)
    return teacher, before


@torch.no_grad()
def knn(features: Callable[[Tensor], Tensor], root: str, held_out: str, *, k: int = 10) -> float:
    """The share of held-out images whose class has the most weight among the k nearest training images."""
    found = []
    for folder in (root, held_out):
        with gpuaug.build(gpuaug.compose("eval", [f"source.root={folder}", "augment.crop.resize=73",
                                                  "augment.crop.size=64"])) as loader:  # fmt: skip
            pairs = [(F.normalize(features(images), dim=1), labels) for images, labels in loader]
            found.append([torch.cat(each) for each in zip(*pairs, strict=True)])
    (known, classes), (asked, labels) = found
    near = (asked @ known.T).topk(k)
    votes = torch.zeros(len(asked), int(classes.max()) + 1, device=asked.device)
    votes.scatter_add_(1, classes[near.indices], near.values.div(0.07).exp())
    return (votes.argmax(1) == labels).float().mean().item()


if __name__ == "__main__":
    root, held_out, *given = sys.argv[1:]
    trained, untrained = train(root, given)
    for name, function in ("pixels", nn.Flatten()), ("untrained", untrained.features), ("trained", trained.features):
        print(f"k-NN accuracy, {name}: {knn(function, root, held_out):.3f}")
