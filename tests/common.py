"""The recipe and the loader that many tests begin with."""

from pathlib import Path
from typing import Any

import kornia.augmentation as K

import gpuaug

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NORMALIZE = gpuaug.Normalize(mean=MEAN, std=STD)


def recipe(backend: str = "kornia", size: int = 32, **more: Any) -> gpuaug.Augment:
    """A crop, a few operations with `more` behind them, and normalization."""
    ops = {
        "vflip": K.RandomVerticalFlip(p=0.5),
        "flip": K.RandomHorizontalFlip(p=0.5),
        "jitter": K.ColorJitter(0.3, 0.3, 0.3, 0.1, p=0.8),
        "gray": K.RandomGrayscale(p=0.1),
        **more,
    }
    return gpuaug.Augment(crop=gpuaug.RandomResizedCrop(size), ops=ops, normalize=NORMALIZE, backend=backend)


def tree(pid: int) -> list[int]:
    """A process and its descendants. Linux only."""
    children = [
        text for task in Path(f"/proc/{pid}/task").iterdir() for text in (task / "children").read_text().split()
    ]
    return [pid, *(each for child in children for each in tree(int(child)))]


def loader(source: Any, **settings: Any) -> gpuaug.Loader:
    """Over a source or a folder of images; `settings` are the loader's, on the CPU and without workers by default."""
    source = gpuaug.FolderSource(source) if isinstance(source, str | Path) else source
    usual = {"batch_size": 7, "num_workers": 0, "seed": 3, "device": "cpu"}
    return gpuaug.Loader(source, **{**usual, "augment": recipe(), **settings})
