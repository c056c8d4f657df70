"""Prints a digest of what the C++ libraries of a wheel compute, for each level that this processor can run."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path += [str(Path(__file__).with_name(name)) for name in ("augment", "targets", "decode")]

import numpy as np
import test_fused
import test_masks
import test_recipes
import test_resize
import torch

import gpuaug
from gpuaug.augment.fused import backend as augment
from gpuaug.augment.policy import prepare
from gpuaug.decode import resize
from gpuaug.native import build
from gpuaug.random import keyed
from gpuaug.targets import masks

USERS = (augment, resize, masks, keyed)


def digest() -> str:
    """Of the pixels of every recipe and of every fused operation, of draws, masks and resized images."""
    sums = hashlib.blake2b()
    for values in (*_operations(), *_recipes(), *_others()):
        sums.update(np.ascontiguousarray(values).tobytes())
    return sums.hexdigest()


def _operations() -> Iterator[Any]:
    for name, make in (test_fused.KNOWN | test_fused.POLICIES).items():
        prepared = prepare(name, make())
        halves = test_fused.photographs(64), (torch.float16, torch.bfloat16)
        for images, dtypes in (halves, (test_fused.adversarial(33, 47), (torch.float32,))):
            chosen = test_fused.draw(prepared, len(images), tuple(images.shape[1:3]), 0)
            for dtype in dtypes:
                made = augment.FusedBackend([prepared], test_fused.NORMALIZE)(images, [chosen], dtype=dtype)
                yield made.view(torch.uint8)


@cache
def _recipe(name: str) -> gpuaug.Augment:
    return gpuaug.build(gpuaug.compose("train", ["source.root=.", f"augment={name}"]).augment)


def _recipes() -> Iterator[Any]:
    for name in test_recipes.INTERPOLATION:
        made = _recipe(name)(test_fused.photographs(64)[:2], seed=0, indices=range(2))  # with draws
        yield from made if isinstance(made, list | tuple) else [made]


def _others() -> Iterator[Any]:
    rng = np.random.default_rng(0)
    yield keyed.uniform_field(torch.arange(6).view(3, 2), 99)
    for kind in test_resize.WAYS:
        for to in ((20, 31), (150, 90)):
            out = np.zeros((1, *to, 3), dtype=np.uint8)
            part = rng.integers(0, 256, (71, 103, 3), dtype=np.uint8)
            resize.views([part], test_resize.boxes(to, (0, 0), to, kind), out, np.array([0]), threads=1)
            yield out
    for dtype in (np.uint8, np.int32):
        parts, size = [test_masks.noise(rng, (75, 100), dtype) for _ in range(12)], (51, 67)
        rows = test_masks.windows(
            *zip(*(test_masks.random_row(rng, (75, 100), size) for _ in parts), strict=True), size
        )
        yield test_masks.placed(parts, rows, test_masks.random_warp(rng, size, len(parts)))


def main() -> None:
    found, levels = {}, build.LEVELS[platform.machine()]
    flags = set(Path("/proc/cpuinfo").read_text().split())
    for level, (march, needed) in levels.items():
        if flags.issuperset(needed.split()):
            build.LEVELS = {platform.machine(): {level: (march, needed)}}
            for user in USERS:
                user.library.cache_clear()
            found[level] = digest()
            loaded = [library._name for user in USERS if (library := user.library()) is not None]
            assert len(loaded) == len(USERS), loaded
            assert {Path(path).parent for path in loaded} == {build.INSTALLED / level}
    print(json.dumps(found))
    sys.exit(len(set(found.values())) != 1)


if __name__ == "__main__":
    main()
