"""How much the policies of gpuaug, torchvision, timm and Kornia change an image.

    PYTHONPATH=.venv/torchvision python bench/policies.py --json policies.json    # two minutes; needs torchvision, timm
    python bench/policies.py --table policies.json --readme bench/README.md

The mean absolute change of a pixel in levels of 255, over parts of the demo's photographs (bench/photographs.py) at
224 x 224. Both sides get the same images, the arguments of the training scripts, and their own random numbers. Equal
figures mean that a recipe is equally strong, not that pixels are equal (see tests/augment/test_auto.py).
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import photographs
import readme
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SIZE = 224
MEAN = (124, 116, 104)
BATCH = 50
Theirs = Callable[[], Callable[[Image.Image], Any]]  # makes their transform of one Pillow image


def policies() -> dict[str, tuple[Any, Theirs]]:
    """Our operation and their transform, by name."""
    import gpuaug
    from gpuaug.tools.peers import torchvision

    torchvision()
    from timm.data import auto_augment
    from torchvision import transforms as T

    bilinear = T.InterpolationMode.BILINEAR
    timm = "rand-m9-mstd0.5-inc1"
    hparams = {"translate_const": 100, "img_mean": MEAN, "interpolation": Image.Resampling.BICUBIC}

    def randaugment(m: int) -> tuple[Any, Theirs]:
        ours = gpuaug.RandAugment(magnitude=m, interpolation="bilinear")
        return ours, lambda: T.RandAugment(magnitude=m, interpolation=bilinear)

    def by_timm() -> Callable[[Image.Image], Any]:
        transform = auto_augment.rand_augment_transform(timm, dict(hparams))

        def one(image: Image.Image) -> Any:
            try:
                return transform(image)
            except ValueError:  # Pillow 13 refuses to posterize to 0 bits; older releases make it black
                return Image.new("RGB", image.size)

        return one

    return {
        "torchvision's RandAugment, magnitude 5": randaugment(5),
        "torchvision's RandAugment, magnitude 9 (`randaugment_torchvision`)": randaugment(9),
        "torchvision's RandAugment, magnitude 15": randaugment(15),
        "TrivialAugmentWide (`trivialaugment_torchvision`)": (
            gpuaug.TrivialAugmentWide(interpolation="bilinear"),
            lambda: T.TrivialAugmentWide(interpolation=bilinear),
        ),
        "AutoAugment, ImageNet (`autoaugment`)": (
            gpuaug.AutoAugment(interpolation="bilinear"),
            lambda: T.AutoAugment(interpolation=bilinear),
        ),
        "AugMix, severity 3 (`augmix`)": (gpuaug.AugMix(), lambda: T.AugMix(interpolation=bilinear)),
        f"timm's `{timm}` (`timm`)": (
            gpuaug.TimmAugment(timm),
            by_timm,
        ),
    }


def images(count: int) -> Iterator[Image.Image]:
    """Parts of the photographs, one photograph after the other."""
    rng, names = random.Random(0), sorted(photographs.PHOTOGRAPHS)
    whole = {name: photographs.photograph(name) for name in names}
    for number in range(count):
        yield photographs.window(whole[names[number % len(names)]], rng).resize((SIZE, SIZE))


def mean_of(changes: list[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    return float(np.mean(changes)), float(np.std(changes) / np.sqrt(len(changes)))


def measure(ours: Any, make: Theirs, windows: list[Image.Image]) -> dict[str, tuple[float, float]]:
    """Mean change and standard error of both sides."""
    import gpuaug

    recipe, transform = gpuaug.Augment(ops={"policy": ours}), make()
    found: dict[str, list[float]] = {"ours": [], "theirs": []}
    for start in range(0, len(windows), BATCH):
        pixels = torch.from_numpy(np.stack([np.asarray(image) for image in windows[start : start + BATCH]]))
        made = recipe(pixels, seed=0, indices=range(start, start + len(pixels))) * 255
        found["ours"] += (made - pixels.permute(0, 3, 1, 2)).abs().mean((1, 2, 3)).tolist()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    for image in windows:
        made = np.asarray(transform(image), dtype=np.float32)
        found["theirs"].append(float(np.abs(made - np.asarray(image, dtype=np.float32)).mean()))
    return {side: mean_of(changes) for side, changes in found.items()}


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = [
        f"{report['count']:,} images, {report['date']}; "
        + ", ".join(f"{k} {v}" for k, v in report["versions"].items()),
        "",
        "| policy | ours | theirs |",
        "|---|---|---|",
    ]
    for row in report["rows"]:
        ours, theirs = (f"{mean:.1f} ± {error:.1f}" for mean, error in (row["ours"], row["theirs"]))
        lines.append(f"| {row['name']} | {ours} | {theirs} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, or print the table of an earlier run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1500, help="images for each policy (default: 1500)")
    readme.add_arguments(parser)
    args = parser.parse_args()
    if readme.show(args, "policies.py", table):
        return
    from importlib.metadata import version

    torch.set_num_threads(1)  # most of the work is image by image
    windows, rows = list(images(args.count)), []
    for name, (ours, theirs) in policies().items():
        rows.append({"name": name, **measure(ours, theirs, windows)})
        print(rows[-1], flush=True)
    versions = {name: version(name) for name in ("torchvision", "timm", "pillow")}
    today = datetime.date.today().isoformat()
    report = {"count": args.count, "date": today, "versions": versions, "rows": rows}
    print(table(report))
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
