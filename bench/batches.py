"""Batches that are on the device already: gpuaug beside the code of lerobot and stable-pretraining, and beside Kornia.

    pip install --no-deps --target PEERS lerobot stable-pretraining
    python bench/batches.py --peers PEERS --json batches.json         # CUDA if there is a device; else the CPU
    python bench/batches.py --table batches.json --readme bench/README.md

`lerobot` takes clips of two frames and applies three of its six operations. Its own code gets one clip at a time,
because torchvision draws one value for all images of a call. `barlow` makes two views of a batch. The contestants of
these two get floats in 0..1 and draw their own random values. `float`, `uint16` and `channels` are other images beside
RGB images of uint8, for a recipe that any image can take; `channels` has 13. Contestants run in turns, and a ratio is
the median of the rounds' ratios. The differences are those from Kornia's operations with our random values.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.augment import MEAN, PAUSE, STD, photographs
from bench.contestants import torchvision_there
from bench.peers_gpu import RECIPES, Case
from bench.readme import add_arguments, headline, machine, show

Run = Callable[[int], Any]  # one batch, with this seed
BANDS = 13  # of Sentinel-2


def _module(peers: Path | None, file: str) -> ModuleType | None:
    """A module of a peer, without the package's other dependencies."""
    if peers is None:
        return None
    spec = importlib.util.spec_from_file_location(Path(file).stem + "_peer", peers / file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lerobot(batch: int, side: int, device: str, peers: Path | None) -> tuple[dict[str, Run], dict[str, float]]:
    import kornia.augmentation as K

    import gpuaug

    frames = photographs(2 * batch, side).permute(0, 3, 1, 2).contiguous().float().div(255)
    clips = frames.unflatten(0, (batch, 2)).to(device)
    recipe = gpuaug.build(gpuaug.compose("train", ["augment=lerobot"]).augment)
    ops = recipe.ops["choice"].ops.values()
    video = K.VideoSequential(*ops, data_format="BTCHW", same_on_frame=True, random_apply=3)
    runs: dict[str, Run] = {"ours": lambda seed: recipe(clips, seed=seed), "Kornia": lambda seed: video(clips)}
    if (module := _module(peers, "lerobot/datasets/transforms.py")) is not None:
        theirs = module.ImageTransforms(module.ImageTransformsConfig(enable=True, max_num_transforms=3))
        runs["their own"] = lambda seed: torch.stack([theirs(clip) for clip in clips])
    return runs, _difference(recipe, clips)


def barlow(batch: int, side: int, device: str, peers: Path | None) -> tuple[dict[str, Run], dict[str, float]]:
    case = Case(RECIPES["barlow_stacked"], batch, side, device)
    (augment,) = case.augments
    runs: dict[str, Run] = {"ours": lambda seed: augment(case.floats, seed=seed), "Kornia": case.kornia}
    module: Any = _module(peers, "stable_pretraining/data/gpu_transforms.py")
    if module is not None:
        size = side * 7 // 8
        theirs = module.StackedMultiView(
            module.GPUCompose(
                [
                    module.GPURandomResizedCrop((size, size), scale=(0.08, 1.0)),
                    module.GPURandomHorizontalFlip(p=0.5),
                    module.GPUColorJitter(brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1, p=0.8),
                    module.GPURandomGrayscale(p=0.2),
                    module.GPUGaussianBlur(kernel_size=(23, 23), sigma=(0.1, 2.0), p=0.5),
                    module.GPUNormalize(mean=MEAN, std=STD),
                ]
            ),
            n_views=2,
        )
        runs["their own"] = lambda seed: theirs({"image": case.floats})
    return runs, _difference(augment, case.floats)


def _moving(size: int) -> Any:
    """A recipe for any number of channels."""
    import kornia.augmentation as K

    import gpuaug

    ops = {
        "flip": K.RandomHorizontalFlip(p=0.5),
        "affine": K.RandomAffine(15.0, (0.1, 0.1), p=0.5),
        "brightness": K.RandomBrightness((0.8, 1.2), p=0.5),
        "blur": K.RandomGaussianBlur(5, (0.5, 2.0), p=0.2),
    }
    return gpuaug.Augment(crop=gpuaug.RandomResizedCrop(size), ops=ops)


def _inputs(kind: str) -> Callable[..., tuple[dict[str, Run], dict[str, float]]]:
    def make(batch: int, side: int, device: str, peers: Path | None) -> tuple[dict[str, Run], dict[str, float]]:
        recipe = _moving(side * 7 // 8)
        rgb = photographs(batch, side).permute(0, 3, 1, 2).contiguous().to(device)
        if kind == "channels":
            other = rgb[:, [k % 3 for k in range(BANDS)]].contiguous()
        else:
            other = rgb.float().div(255) if kind == "float" else rgb.to(torch.int32).mul(257).to(torch.uint16)
        runs: dict[str, Run] = {
            "ours": lambda seed: recipe(other, seed=seed),
            "RGB": lambda seed: recipe(rgb, seed=seed),
        }
        return runs, _difference(recipe, other)

    return make


CASES: dict[str, Callable[..., tuple[dict[str, Run], dict[str, float]]]] = {
    "lerobot": lerobot, "barlow": barlow, **{kind: _inputs(kind) for kind in ("float", "uint16", "channels")},
}  # fmt: skip
BATCHES = {
    "lerobot": (160, 160),
    "barlow": (64, 64),
    "float": (64, 32),
    "uint16": (64, 32),
    "channels": (64, 16),
}  # CUDA, CPU


def _difference(recipe: Any, images: torch.Tensor) -> dict[str, float]:
    ours, reference = (each(images, seed=0) for each in (recipe, recipe.replace(backend="kornia")))
    pairs = zip(ours, reference, strict=True) if isinstance(ours, list) else [(ours, reference)]
    apart = torch.cat([(a - b).abs().flatten() for a, b in pairs])
    return {"max": float(apart.max()), "mean": float(apart.mean())}


def measure(name: str, batch: int, side: int, rounds: int, device: str, peers: Path | None) -> dict[str, Any]:
    runs, difference = CASES[name](batch, side, device, peers)
    # on the CPU, other work on the machine would lengthen the elapsed time
    clock = time.process_time if device == "cpu" else time.perf_counter
    took: dict[str, list[float]] = {who: [] for who in runs}
    with torch.no_grad():
        for number in range(rounds + 1):  # the first round is not counted: it compiles
            for who, run in runs.items():
                time.sleep(PAUSE)
                start = clock()
                run(number)
                if device != "cpu":
                    torch.cuda.synchronize(device)
                took[who].append(1e3 * (clock() - start))
    work = BANDS / 3 if name == "channels" else 1.0  # ours has so many times as many channels
    ratios = {
        who: [work * b / a for a, b in zip(took["ours"][1:], took[who][1:], strict=True)]
        for who in runs
        if who != "ours"
    }
    return {
        "case": name, "batch": batch, "side": side, "difference": difference, "ratios": ratios,
        "ms": {who: statistics.median(found[1:]) for who, found in took.items()},
    }  # fmt: skip


def table(report: dict[str, Any]) -> str:
    lines = [
        headline(report),
        "",
        "| case | B | milliseconds | speed of ours, per image and channel | difference |",
        "|" + "---|" * 5,
    ]
    for r in report["results"]:
        took = ", ".join(f"{who} {ms:.1f}" for who, ms in r["ms"].items())
        ratios = "; ".join(
            f"{statistics.median(found):.2f} × {who} ({min(found):.2f} to {max(found):.2f})"
            for who, found in r["ratios"].items()
        )
        apart = f"{r['difference']['max']:.1e} (mean {r['difference']['mean']:.0e})"
        lines.append(f"| {r['case']} | {r['batch']} | {took} | {ratios} | {apart} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--peers", type=Path, help="folder with the packages of the peers; without it they are left out"
    )
    parser.add_argument(
        "--batch", type=int, help="default: 160 clips, and 64 images on a GPU, 64, 32 and 16 on the CPU"
    )
    parser.add_argument("--side", type=int, default=256, help="of the square images (default: 256)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="tiny images: shows that it runs")
    add_arguments(parser)
    args = parser.parse_args(arguments)
    if show(args, "batches.py", table):
        return 0
    if args.quick:
        args.batch, args.side, args.rounds = 4, 40, 1
    if args.peers is not None:
        torchvision_there()
    report: dict[str, Any] = {**machine(args.device), "results": []}
    for name in args.case:
        batch = args.batch or BATCHES[name][args.device == "cpu"]
        report["results"].append(measure(name, batch, args.side, args.rounds, args.device, args.peers))
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
