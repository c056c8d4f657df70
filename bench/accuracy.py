"""Held-out accuracy after training with gpuaug's batches, and with the equal torchvision pipeline.

    python bench/accuracy.py --json accuracy.json      # recipe standard, three seeds each; minutes on two cores
    python bench/accuracy.py --recipe flip --json accuracy.json
    python bench/accuracy.py --table accuracy.json --readme bench/README.md

The same network (SmallNet), with the same first weights per seed, learns the demo's photographs at 64 x 64. In half of
the runs gpuaug loads and augments. In the other half a DataLoader does, with torchvision's transforms (v1) on PIL
images. The same held-out batches evaluate both. Runs take turns: gpuaug, torchvision, gpuaug, ...
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in `gpuaug train`: threads that spin take the workers' cores

import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).resolve().parent))

import photographs
import readme

import gpuaug
from gpuaug import machine
from gpuaug.errors import ConfigError
from gpuaug.tools import peers
from gpuaug.tools.train.model import SmallNet
from gpuaug.tools.train.training import rate

SIZE, BATCH, LR = 64, 32, 0.05
RECIPES = ("standard", "flip", "randaugment_torchvision")
WHO = ("gpuaug", "torchvision")
Batches = Callable[[], Iterable[tuple[Tensor, Tensor]]]  # one epoch per call


def pipeline(recipe: str) -> Any:
    """torchvision's transforms that equal a recipe of gpuaug."""
    if importlib.util.find_spec("torchvision") is None:
        sys.path.append(str(Path(sys.prefix) / "torchvision"))  # where the Makefile puts it
    peers.torchvision()
    from torchvision import transforms as T

    operations = {
        "standard": lambda: [
            T.RandomVerticalFlip(),
            T.RandomHorizontalFlip(),
            T.ColorJitter(0.3, 0.3, 0.3, 0.1),
            T.RandomGrayscale(0.1),
        ],
        "flip": lambda: [T.RandomHorizontalFlip()],
        "randaugment_torchvision": lambda: [
            T.RandomHorizontalFlip(),
            T.RandAugment(interpolation=T.InterpolationMode.BILINEAR),
        ],
    }[recipe]()
    normalize = T.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    ends = [T.PILToTensor(), T.ConvertImageDtype(torch.float32), normalize]
    return T.Compose([T.RandomResizedCrop(SIZE), *operations, *ends])


def upright(path: str) -> Image.Image:
    """Open an image and apply the orientation from EXIF, as gpuaug does."""
    with Image.open(path) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def batches(who: str, recipe: str, root: Path, seed: int, stack: ExitStack) -> Batches:
    """Training batches of one of the two pipelines, each with two workers."""
    if who == "gpuaug":
        words = [f"source.root={root}", f"augment={recipe}", f"augment.crop.size={SIZE}", f"batch_size={BATCH}"]
        words += [f"seed={seed}", "device=cpu", "num_workers=2"]
        loader = stack.enter_context(gpuaug.build(gpuaug.compose("train", words)))
        return lambda: loader
    transform = pipeline(recipe)
    from torchvision.datasets import ImageFolder

    generator = torch.Generator().manual_seed(seed)
    data = torch.utils.data.DataLoader(
        ImageFolder(root, transform, loader=upright), BATCH, shuffle=True, num_workers=2, generator=generator,
        persistent_workers=True,
    )  # fmt: skip
    return lambda: data


def learn(epoch_of: Batches, held_out: list[tuple[Tensor, Tensor]], *, epochs: int, classes: int, seed: int) -> float:
    """Train a network as `gpuaug train` does by default. Returns its held-out accuracy."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        net = SmallNet(num_classes=classes).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9, weight_decay=5e-4, nesterov=True)
    for epoch in range(epochs):
        net.train()
        data = epoch_of()
        for step, (images, labels) in enumerate(data):
            progress = (epoch + step / len(data)) / epochs  # type: ignore[arg-type]
            for group in optimizer.param_groups:
                group["lr"] = LR * rate(progress, warmup=0.1)
            optimizer.zero_grad()
            cross_entropy(net(images.contiguous(memory_format=torch.channels_last)), labels).backward()
            optimizer.step()
    return accuracy(net, held_out)


@torch.no_grad()
def accuracy(net: nn.Module, held_out: list[tuple[Tensor, Tensor]]) -> float:
    """Share of the held-out images that are classified correctly."""
    net.eval()
    right = sum(int((net(images).argmax(dim=1) == labels).sum()) for images, labels in held_out)
    return right / sum(len(labels) for _, labels in held_out)


def measure(recipe: str, folder: Path, *, seeds: int, epochs: int, count: int) -> dict[str, Any]:
    """Train with both pipelines and every seed. Returns the accuracy and the seconds of each run."""
    photographs.cut(folder, count=count)
    words = [f"source.root={folder}/val", "augment.crop.resize=73", f"augment.crop.size={SIZE}", "device=cpu"]
    with gpuaug.build(gpuaug.compose("eval", [*words, "num_workers=0"])) as loader:
        held_out = [(images.clone(), labels.clone()) for images, labels in loader]
        classes = loader.num_classes
    found: dict[str, Any] = {who: {"accuracy": [], "seconds": []} for who in WHO}
    for seed in range(seeds):
        for who in WHO:
            began = time.perf_counter()
            with ExitStack() as stack:
                epoch_of = batches(who, recipe, folder / "train", seed, stack)
                found[who]["accuracy"].append(learn(epoch_of, held_out, epochs=epochs, classes=classes, seed=seed))
            found[who]["seconds"].append(time.perf_counter() - began)
            print(f"{recipe} seed {seed} {who:12} {found[who]['accuracy'][-1]:.1%}", flush=True)
    return {
        "recipe": recipe,
        "epochs": epochs,
        "images": [count - round(count * photographs.VAL_SHARE), sum(len(labels) for _, labels in held_out)],
        "machine": f"{machine.cpu_model()}, {machine.usable_cpus()} cores",
        "date": datetime.date.today().isoformat(),
        "runs": found,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The section of bench/README.md."""
    first = rows[0]
    lines = [
        f"{first['machine']}, {first['date']}. {first['images'][0]} training images, {first['images'][1]} held-out "
        f"images, {first['epochs']} epochs.",
        "",
        "| recipe | pipeline | seeds | held-out accuracy, mean | lowest to highest | standard deviation | s per run |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for who, run in row["runs"].items():
            values = run["accuracy"]
            spread = f"{statistics.stdev(values):.1%}" if len(values) > 1 else ""
            lines.append(
                f"| {row['recipe']} | {who} | {len(values)} | {statistics.mean(values):.1%} | {min(values):.1%} to "
                f"{max(values):.1%} | {spread} | {statistics.median(run['seconds']):.0f} |"
            )
    return "\n".join(lines)


def main() -> int:
    """Measure, or print the table of an earlier run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="standard", choices=RECIPES, help="gpuaug's recipe (default: standard)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each pipeline (default: 3)")
    parser.add_argument("--epochs", type=int, default=20, help="of each run (default: 20)")
    parser.add_argument("--count", type=int, default=800, help="photographs; a fifth is held out (default: 800)")
    parser.add_argument("--data", type=Path, help="folder that keeps the photographs (default: made and removed)")
    readme.add_arguments(parser, "; those of the same recipe are replaced")
    args = parser.parse_args()
    if readme.show(args, "accuracy.py", table):
        return 0
    how = {"seeds": args.seeds, "epochs": args.epochs, "count": args.count}
    with tempfile.TemporaryDirectory() as made:
        try:
            found = measure(args.recipe, args.data or Path(made), **how)
        except ConfigError as error:
            raise SystemExit(str(error)) from error
    rows = json.loads(args.json.read_text()) if args.json is not None and args.json.exists() else []
    rows = [*(row for row in rows if row["recipe"] != args.recipe), found]
    print(table(rows))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
