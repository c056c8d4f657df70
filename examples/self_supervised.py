"""Self-supervised training: a small ViT with the losses of DINO and iBOT; prints the k-NN accuracy of its features.

python bench/photographs.py photographs
python examples/self_supervised.py photographs/train photographs/val
# three minutes on two cores; pixels 0.42, untrained 0.58, trained 0.66
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gpuaug

RECIPE = ["augment=dinov2", "augment.views.local.copies=6", "patch_masks=dinov2", "patch_masks.patch=8"]
RECIPE += [f"augment.views.{view}.crop.size={n}" for view, n in (("global1", 64), ("global2", 64), ("local", 32))]


class ViT(nn.Module):
    """A small Vision Transformer. Its first token is that of the whole image."""

    def __init__(self, patch: int = 8, width: int = 96, depth: int = 4, prototypes: int = 512) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(3, width, patch, patch), nn.Parameter(torch.randn(1, width, 8, 8) / 10)
        self.image, self.hidden = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(width, 256), nn.GELU(), nn.Linear(256, 64))
        self.prototypes = nn.Parameter(torch.randn(prototypes, 64))

    def forward(self, x: Tensor, masks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Tokens [B, 1 + N, width] and their similarity to prototypes. ``masks``: bool [B, N], patches to hide."""
        x = self.patches(x)
        both = x, F.interpolate(self.places, x.shape[2:], mode="bilinear")
        x, places = (each.flatten(2).transpose(1, 2) for each in both)
        x = places + (x if masks is None else torch.where(masks[..., None], self.hidden, x))
        tokens = self.blocks(torch.cat([self.image.expand(len(x), 1, -1), x], dim=1))
        return tokens, F.normalize(self.head(tokens), dim=2) @ F.normalize(self.prototypes, dim=1).T


def balanced(scores: Tensor) -> Tensor:
    """The teacher's probabilities, with all prototypes used equally often (Sinkhorn-Knopp, as in DINOv2)."""
    q = torch.softmax(scores.flatten() / 0.06, 0).view_as(scores)
    for _ in range(3):
        q = F.normalize(F.normalize(q, p=1.0, dim=0), p=1.0, dim=1)
    return q


def train(root: str, overrides: list[str], *, epochs: int = 14) -> nn.Module:
    """Returns the trained teacher."""
    with gpuaug.build(gpuaug.compose("train", [f"source.root={root}", "batch_size=32", *RECIPE, *overrides])) as loader:
        student = ViT().to(loader.device)
        teacher = AveragedModel(student, multi_avg_fn=get_ema_multi_avg_fn(0.95)).requires_grad_(False)
        optimizer = torch.optim.AdamW(student.parameters(), lr=5e-4, weight_decay=0.05)
        for batch in (batch for _ in range(epochs) for batch in loader):
            large, small, masks = *map(torch.cat, (batch.images[:2], batch.images[2:])), batch.patch_masks.as_dinov2()
            known, seen, parts = teacher(large)[1], student(large, masks["collated_masks"])[1], student(small)[1]
            first, second = balanced(known[:, 0]).chunk(2)
            views = torch.cat([seen[:, 0], parts[:, 0]]).div(0.1).split(len(batch))
            pairs = [(views[1], first), (views[0], second), *((view, q) for view in views[2:] for q in (first, second))]
            dino = torch.stack([F.cross_entropy(view, q) for view, q in pairs]).mean()
            patches, guesses = (tokens[:, 1:].flatten(0, 1)[masks["mask_indices_list"]] for tokens in (known, seen))
            losses = F.cross_entropy(guesses / 0.1, balanced(patches), reduction="none") * masks["masks_weight"]
            optimizer.zero_grad()
            (dino + losses.sum() / len(large)).backward()
            optimizer.step()
            teacher.update_parameters(student)
    return teacher.module


@torch.no_grad()
def knn(net: nn.Module | None, root: str, held_out: str, *, k: int = 5) -> float:
    """The share of held-out images with the class of most of the k nearest training images; of pixels without a net."""
    found: list[tuple[Tensor, ...]] = []
    for folder in (root, held_out):
        config = gpuaug.compose("eval", [f"source.root={folder}", "augment.crop.resize=73", "augment.crop.size=64"])
        with gpuaug.build(config) as loader:
            pairs = [(net.to(x.device)(x)[0][:, 0] if net else x.flatten(1), labels) for x, labels in loader]
        found.append(tuple(map(torch.cat, zip(*pairs, strict=True))))
    (known, classes), (asked, labels) = found
    nearest = (F.normalize(asked) @ F.normalize(known).T).topk(k).indices
    return (classes[nearest].mode(1).values == labels).float().mean().item()


if __name__ == "__main__":
    root, held_out, *given = sys.argv[1:]
    for name, net in {"pixels": None, "an untrained ViT": ViT(), "the trained ViT": train(root, given)}.items():
        print(f"k-NN accuracy of {name}: {knn(net, root, held_out):.3f}")
