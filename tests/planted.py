"""Bottlenecks made on purpose, each three times slower or more than what is around it."""

from __future__ import annotations

import fcntl
import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kornia.augmentation as K
import numpy as np
import torch
from PIL import Image

from gpuaug.header import raw_header


def burn(seconds: float) -> None:
    """Keep one core busy for so many CPU-seconds, whoever else is at work."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Source:
    """The same few files again and again, as a hundred thousand samples.

    Args:
        files: encoded images.
        wait: seconds without work per read: storage that answers late.
        turns: FILE; waiting takes turns over all processes: storage with a bandwidth.
        work: CPU-seconds per read.
    """

    def __init__(
        self, files: Sequence[bytes], *, wait: float = 0.0, turns: str | None = None, work: float = 0.0
    ) -> None:
        self.files, self.wait, self.turns, self.work = list(files), wait, turns, work
        self.labels = torch.arange(len(self)) % 10

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        if self.turns is not None:
            with open(self.turns, "a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                time.sleep(self.wait)
        elif self.wait:
            time.sleep(self.wait)
        burn(self.work)
        return self.files[index % len(self.files)], index % 10


class SlowOp(K.RandomInvert):
    """An operation that costs what nobody would think."""

    def apply_transform(self, input: Any, params: Any, flags: Any, transform: Any = None) -> Any:
        burn(0.004 * len(input))
        return super().apply_transform(input, params, flags, transform)


class SlowMix:
    """A callback in Python for every image."""

    def __call__(self, images: Any, labels: Any, *, valid: Any, **rest: Any) -> Any:
        burn(0.006 * len(valid))
        return images, labels


def jpegs(folder: Path, *, count: int = 16, size: tuple[int, int] | None = None) -> list[bytes]:
    """Files of a folder of photographs, enlarged to (width, height)."""
    found = []
    for file in sorted(folder.rglob("*.jpg"))[:count]:
        if size is None:
            found.append(file.read_bytes())
            continue
        with Image.open(file) as image:
            stream = io.BytesIO()
            image.convert("RGB").resize(size).save(stream, "JPEG", quality=90)
        found.append(stream.getvalue())
    return found


def raws(side: int, *, count: int = 4) -> list[bytes]:
    """Pixels of noise that need no decoding: nothing but bytes to be handed over."""
    rng = np.random.default_rng(0)
    return [raw_header(side, side) + rng.bytes(side * side * 3) for _ in range(count)]
