"""Time of patch masks for a batch, beside the authors' code, and whether both have the same distribution.

    python bench/patch_masks.py                       # ours, seconds
    python bench/patch_masks.py --authors DIR         # DIR has clones: dinov2, ibot, unilm, SimMIM

One thread. `draw` is the host's time for the masks of a batch, `layout` that of the layout for the authors' training
code, on the CPU. Each is measured in a row; after other work, which empties the caches, a draw takes up to 0.5 ms more.
The authors' files are run as they are, with their own random numbers; nothing of them is part of this repository.
Columns of the comparison: the p-value of a Kolmogorov-Smirnov test on the number of masked patches, that of a
chi-squared test on the sides of the box around the mask, and the largest |z| of the patches' shares (of 196 patches,
below 4 is usual).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import scipy.stats
import torch

import gpuaug

TWO = [("global1", 0), ("global2", 0)]
ONE = [("", 0)]
OURS = {  # name: generator, views, layout
    "ibot": (gpuaug.BlockMasks(smallest=None, largest=1.0), TWO, "as_dinov2"),
    "dinov2": (gpuaug.BlockMasks(), TWO, "as_dinov2"),
    "dinov2 per=batch": (gpuaug.BlockMasks(per="batch"), TWO, "as_dinov2"),
    "dinov3": (gpuaug.BlockMasks(fill=True, strata=16), TWO, "as_dinov2"),
    "beit": (gpuaug.BlockMasks(p=1.0, ratio=(0.383, 0.383), smallest=16, largest=1.0), ONE, "flat"),
    "beit fill": (gpuaug.BlockMasks(p=1.0, ratio=(0.383, 0.383), smallest=16, largest=1.0, fill=True), ONE, "flat"),
    "ijepa": (gpuaug.MultiBlockMasks(), ONE, "as_ijepa"),
    "ijepa context=random": (gpuaug.MultiBlockMasks(context="random"), ONE, "as_ijepa"),
    "mae": (gpuaug.RandomMasks(), ONE, "as_mae"),
    "simmim": (gpuaug.RandomMasks(ratio=0.6, cell=2), ONE, "flat"),
}
Masks = Callable[[int], np.ndarray]  # a number of masks to bool [n, 14, 14]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--grids", type=int, nargs="+", default=[14, 16, 48])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--masks", type=int, default=20_000, help="masks of each side in the comparison")
    parser.add_argument("--authors", type=Path, help="folder with clones of the authors' repositories")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    print(f"B={args.batch}\n| | views | " + " | ".join(f"{g} x {g}: draw, layout ms" for g in args.grids) + " |")
    print("|---" * (2 + len(args.grids)) + "|")
    for name, (made, views, layout) in OURS.items():
        cells = []
        for grid in args.grids:
            draw, laid = measured(made, views, layout, args.batch, grid, args.rounds)
            found[f"{name} {grid}"] = {"draw_ms": draw, "layout_ms": laid}
            cells.append(f"{draw:.2f}, {laid:.2f}")
        print(f"| {name} | {len(views)} | " + " | ".join(cells) + " |", flush=True)
    if args.authors:
        print(
            "\n| 14 x 14 | authors' ms per 1024 masks | ours | KS p | chi-squared p | largest z |\n" + "|---" * 6 + "|"
        )
        for name, theirs in authors(args.authors).items():
            row = compared(name, theirs, args.masks)
            found[f"{name} authors"] = row
            print(f"| {name} | " + " | ".join(f"{value:.3g}" for value in row.values()) + " |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


def measured(made: Any, views: Any, layout: str, batch: int, grid: int, rounds: int) -> tuple[float, float]:
    """Milliseconds to draw the masks, and to make the layout."""
    draw = partial(made, np.arange(batch), size=made.patch * grid, views=views)
    drawn = milliseconds([partial(draw, epoch=epoch) for epoch in range(rounds)])
    return drawn, 0.0 if layout == "flat" else milliseconds([getattr(draw(), layout)] * rounds)


def milliseconds(calls: list[Callable[[], Any]]) -> float:
    """The median time of the calls, one after the other."""
    took = []
    for call in calls:
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return 1e3 * float(np.median(took))


def compared(name: str, theirs: Masks, count: int) -> dict[str, float]:
    made = OURS[name][0]
    start = time.perf_counter()
    b = theirs(count)
    took = (time.perf_counter() - start) / count * 1024e3
    start = time.perf_counter()
    a = made(range(count), size=(14 * made.patch,) * 2, seed=1).masks[0].numpy()
    ours = (time.perf_counter() - start) / count * 1024e3
    shares = [x.reshape(len(x), -1).mean(axis=0) for x in (a, b)]
    mean = sum(shares) / 2
    z = (shares[0] - shares[1]) / np.sqrt(np.maximum(mean * (1 - mean), 1e-9) * 2 / count)
    return {
        "authors_ms": took,
        "ours_ms": ours,
        "ks": float(scipy.stats.ks_2samp(*(x.sum(axis=(1, 2)) for x in (a, b))).pvalue),
        "chi2": chi_squared(sides(a), sides(b)),
        "z": float(np.abs(z).max()),
    }


def sides(masks: np.ndarray) -> np.ndarray:
    """Height and width of the box around each mask, as one number."""
    rows, columns = masks.any(axis=2), masks.any(axis=1)
    spans = [x.shape[1] - x[:, ::-1].argmax(1) - x.argmax(1) for x in (rows, columns)]
    return np.where(rows.any(axis=1), 100 * spans[0] + spans[1], 0)


def chi_squared(a: np.ndarray, b: np.ndarray) -> float:
    values, counts = np.unique(np.concatenate([a, b]), return_counts=True)
    common = values[counts >= 20]
    table = np.array([[*(np.sum(x == v) for v in common), np.sum(~np.isin(x, common))] for x in (a, b)])
    table = table[:, table.sum(axis=0) > 0]
    return 1.0 if table.shape[1] < 2 else float(scipy.stats.chi2_contingency(table).pvalue)


def authors(folder: Path) -> dict[str, Masks]:
    """The authors' generators, as functions of a number of masks."""
    random.seed(0)
    np.random.seed(0)
    dinov2 = load(folder / "dinov2/dinov2/data/masking.py").MaskingGenerator((14, 14), max_num_patches=98)
    collate = load(folder / "dinov2/dinov2/data/collate.py").collate_data_and_cast
    beit = load(folder / "unilm/beit2/masking_generator.py").MaskingGenerator  # beit's own needs numpy < 1.24
    fill = beit((14, 14), 75, min_num_patches=16)
    simmim = load(folder / "SimMIM/data/data_simmim.py").MaskGenerator(224, 32, 16, 0.6)

    def collated(count: int) -> np.ndarray:
        crop = torch.zeros(1)
        samples = [({"global_crops": [crop, crop], "local_crops": [crop]}, None)] * 64
        masks = []
        for _ in range(-(-count // 128)):
            made = collate(samples, (0.1, 0.5), 0.5, torch.float32, 196, dinov2)
            masks.append(made["collated_masks"].view(-1, 14, 14).numpy())
        return np.concatenate(masks)[:count]

    def ibot(count: int) -> np.ndarray:
        given = {"patch_size": 16, "pred_ratio": [0.0, 0.3], "pred_ratio_var": [0.0, 0.2]}
        made = load(folder / "ibot/loader.py").ImageFolderMask(**given, pred_aspect_ratio=(0.3, 1 / 0.3))
        return np.array([made[0][-1][0] for _ in range(count)])

    return {
        "ibot": ibot,
        "dinov2": collated,
        "beit fill": lambda count: np.array([fill() for _ in range(count)], dtype=bool),
        "simmim": lambda count: np.array([simmim() for _ in range(count)], dtype=bool),
    }


def load(path: Path) -> Any:
    """Run a file as a module. What it imports for other purposes than masks is replaced."""

    class ImageFolder:
        def __getitem__(self, index: int) -> tuple[Any, ...]:
            return ([torch.empty(3, 224, 224)],)

    datasets = types.ModuleType("torchvision.datasets")
    datasets.ImageFolder = ImageFolder  # type: ignore[attr-defined]
    names = ("torchvision", "torchvision.transforms", "timm", "timm.data")
    module = types.ModuleType(path.stem)
    with mock.patch.dict(sys.modules, {**{name: mock.MagicMock() for name in names}, "torchvision.datasets": datasets}):
        exec(compile(path.read_text(), str(path), "exec"), vars(module))
    return module


if __name__ == "__main__":
    main()
