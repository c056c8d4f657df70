"""Two published recipes of batched augmentation: gpuaug beside Kornia's operations, run as their users run them.

    python bench/peers_gpu.py --json peers.json                 # on a GPU with the published batches, else smaller ones
    python bench/peers_gpu.py --recipe lerobot --batch 8
    python bench/peers_gpu.py --table peers.json --readme bench/README.md

Ours gets uint8 pixels, and Kornia gets floats in 0..1, each on the device already. Both draw their own random values
and give float32. They run in turns, and a ratio is the median of the rounds' ratios. The differences are those of one
more batch, for which Kornia's operations get our random values.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.augment import MEAN, PAUSE, STD, photographs
from bench.readme import add_arguments, headline, machine, show

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of the crop: area and width / height


@dataclass(frozen=True)
class Recipe:
    """A recipe as its authors wrote it.

    Attributes:
        published: their figures.
        batch: samples of their batch.
        chains: crop (None: no crop) and named operations of each view, in Kornia's classes, for images of a given side.
        copies: views that one chain makes; Kornia then gets the batch repeated.
        cameras: images per sample.
        normalized: whether ImageNet's mean and standard deviation are subtracted and divided by at the end.
    """

    published: str
    batch: int
    chains: Callable[[int], list[tuple[Any, dict[str, Any]]]]
    copies: int = 1
    cameras: int = 1
    normalized: bool = True


def _barlow(side: int, blur: float, solarize: float) -> tuple[Any, dict[str, Any]]:
    import kornia.augmentation as K

    size = side * 7 // 8  # 224 of 256
    ops = {
        "flip": K.RandomHorizontalFlip(p=0.5),
        "jitter": K.ColorJitter(0.4, 0.4, 0.2, 0.1, p=0.8),
        "gray": K.RandomGrayscale(p=0.2),
        "blur": K.RandomGaussianBlur((23, 23), (0.1, 2.0), p=blur),
    }
    if solarize:
        ops["solarize"] = K.RandomSolarize(0.1, 0.1, p=solarize)
    return K.RandomResizedCrop((size, size), scale=SCALE, ratio=RATIO), ops


def _lerobot() -> tuple[Any, dict[str, Any]]:
    """lerobot's seven operations, each with probability 4/7. lerobot takes exactly four: as much work on average."""
    import kornia.augmentation as K

    p = 4 / 7
    return None, {
        "brightness": K.ColorJitter(brightness=(0.8, 1.2), p=p),
        "contrast": K.ColorJitter(contrast=(0.8, 1.2), p=p),
        "saturation": K.ColorJitter(saturation=(0.5, 1.5), p=p),
        "hue": K.ColorJitter(hue=(-0.05, 0.05), p=p),
        "sharpness": K.RandomSharpness((0.5, 1.5), p=p),
        "affine": K.RandomAffine(5.0, (0.05, 0.05), resample="nearest", p=p),
        "noise": K.RandomGaussianNoise(0.0, 15 / 255, p=p),  # lerobot: 5 to 25
    }


RECIPES = {
    # github.com/rbalestr-lab/stable-pretraining: benchmarks/imagenet10/RESULTS.md, and the operations in
    # stable_pretraining/data/gpu_transforms.py
    "barlow_stacked": Recipe("233.6 ms, H200", 256, lambda side: [_barlow(side, 0.5, 0.0)], copies=2),
    "barlow_two_chains": Recipe(
        "226.9 ms, H200", 256, lambda side: [_barlow(side, 1.0, 0.0), _barlow(side, 0.1, 0.2)]
    ),
    # github.com/huggingface/lerobot: pull request 4627, and the operations in src/lerobot/transforms/transforms.py. The
    # pull request does not name its seventh operation. Here it is the noise of that file.
    "lerobot": Recipe(
        "425 to 1,200 samples/s (H100), 188 to 615 (A100), with the training step",
        160, lambda side: [_lerobot()], cameras=2, normalized=False,
    ),
}  # fmt: skip


class Case:
    """A recipe on a batch, for both contestants."""

    def __init__(self, recipe: Recipe, batch: int, side: int, device: str) -> None:
        import gpuaug

        self.recipe, self.device = recipe, torch.device(device)
        self.images = photographs(batch * recipe.cameras, side).permute(0, 3, 1, 2).contiguous().to(device)
        self.floats = self.images.float() / 255
        self.chains = recipe.chains(side)
        self.mean, self.std = (torch.tensor(v, device=device)[:, None, None] for v in (MEAN, STD))
        self.augments = [
            gpuaug.Augment(
                crop=None if crop is None else gpuaug.RandomResizedCrop(crop.flags["size"], scale=SCALE, ratio=RATIO),
                ops=ops,
                normalize=gpuaug.Normalize(mean=MEAN, std=STD) if recipe.normalized else None,
                copies=recipe.copies,
            )
            for crop, ops in self.chains
        ]

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def ours(self, seed: int) -> list[torch.Tensor]:
        made = [augment(self.images, seed=seed) for augment in self.augments]
        return made[0] if self.recipe.copies > 1 else made

    def kornia(self, seed: int) -> list[torch.Tensor]:
        """Operation by operation, as ``GPUCompose`` of stable-pretraining does."""
        made = []
        for crop, ops in self.chains:
            x = self.floats.repeat(self.recipe.copies, 1, 1, 1)
            for op in (crop, *ops.values()):
                x = x if op is None else op(x)
            made += self.finished(x).split(len(self.floats))
        return made

    def finished(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.mean) / self.std if self.recipe.normalized else x

    def differences(self) -> dict[str, float]:
        """How far our pixels are from those of Kornia's operations for our random values.

        ``operations``: both get our crops. ``whole``: Kornia crops the same windows itself.
        """
        apart: dict[str, list[torch.Tensor]] = {"operations": [], "whole": []}
        for (crop, _), augment in zip(self.chains, self.augments, strict=True):
            same = augment.replace(backend="kornia")
            ours, reference = (_listed(each(self.images, seed=0)) for each in (augment, same))
            apart["operations"] += [(a - b).abs() for a, b in zip(ours, reference, strict=True)]
            if crop is not None:
                whole = self._cropped_by_kornia(augment, crop)
                apart["whole"] += [(a - b).abs() for a, b in zip(ours, whole, strict=True)]
        every = {name: torch.cat([d.flatten() for d in found]) for name, found in apart.items() if found}
        return {
            f"{name}_{kind}": float(d)
            for name, x in every.items()
            for kind, d in (("max", x.max()), ("mean", x.mean()))
        }

    def _cropped_by_kornia(self, augment: Any, crop: Any) -> list[torch.Tensor]:
        from gpuaug.augment import reference

        count, (height, width) = len(self.images), self.images.shape[2:]
        drawn = augment.draw(seed=0, epoch=0, indices=np.arange(count))
        made = []
        cropped = augment.windows(drawn, np.full(count, height), np.full(count, width))
        for view, windows in zip(augment.views, cropped, strict=True):
            top, left, h, w = (torch.from_numpy(v).float() for v in windows.window.T)
            right, bottom = left + w - 1, top + h - 1
            params = crop.forward_parameters(self.floats.shape)
            corners = ((left, top), (right, top), (right, bottom), (left, bottom))
            params["src"] = torch.stack([torch.stack(corner, dim=1) for corner in corners], dim=1)
            x, size, at = crop(self.floats, params=params), windows.size, (view.name, view.copy)
            for p in augment.prepared:
                x = reference.apply(x, p, p.draw(drawn.uniforms[*at, p.name], size, drawn.keys.get((*at, p.name))))
            made.append(self.finished(x))
        return made


def _listed(made: Any) -> list[torch.Tensor]:
    return made if isinstance(made, list) else [made]


def measure(name: str, batch: int | None, side: int, rounds: int, device: str) -> dict[str, Any]:
    recipe = RECIPES[name]
    batch = batch or (recipe.batch if device != "cpu" else 32)
    case = Case(recipe, batch, side, device)
    # on the CPU, other work on the machine would lengthen the elapsed time
    clock = time.process_time if device == "cpu" else time.perf_counter
    took: dict[str, list[float]] = {"ours": [], "kornia": []}
    with torch.no_grad():
        differences = case.differences()
        for number in range(rounds + 1):  # the first round is not counted: it compiles
            for who, run in (("ours", case.ours), ("kornia", case.kornia)):
                time.sleep(PAUSE)
                start = clock()
                run(number)
                case.synchronize()
                took[who].append(1e3 * (clock() - start))
    ratios = [theirs / ours for ours, theirs in zip(took["ours"][1:], took["kornia"][1:], strict=True)]
    return {
        "recipe": name, "batch": batch, "images": batch * recipe.cameras, "side": side, "rounds": rounds,
        **{f"{who}_ms": statistics.median(found[1:]) for who, found in took.items()},
        "ratio": statistics.median(ratios), "ratios": ratios, **differences,
        "published": recipe.published, "published_batch": recipe.batch,
    }  # fmt: skip


def table(report: dict[str, Any]) -> str:
    lines = [
        headline(report),
        "",
        "| recipe | B | ours | Kornia, eager | ours is faster by (all rounds) | difference: operations | with the crop "
        "| published |",
        "|" + "---|" * 8,
    ]
    for r in report["results"]:
        apart = [
            f"{r[f'{kind}_max']:.1e} (mean {r[f'{kind}_mean']:.0e})" if f"{kind}_max" in r else ""
            for kind in ("operations", "whole")
        ]
        cells = [
            r["recipe"], r["batch"], f"{r['ours_ms']:.1f}", f"{r['kornia_ms']:.1f}",
            f"{r['ratio']:.1f}× ({min(r['ratios']):.1f} to {max(r['ratios']):.1f})", *apart,
            f"B = {r['published_batch']}: {r['published']}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--batch", type=int, help="samples; default: the published batch on a GPU, 32 on the CPU")
    parser.add_argument("--side", type=int, default=256, help="of the square images (default: 256)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="tiny images: shows that it runs")
    add_arguments(parser)
    args = parser.parse_args(arguments)
    if show(args, "peers_gpu.py", table):
        return 0
    if args.quick:
        args.batch, args.side, args.rounds = 4, 40, 1
    report: dict[str, Any] = {**machine(args.device), "results": []}
    for name in args.recipe:
        report["results"].append(measure(name, args.batch, args.side, args.rounds, args.device))
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
