"""Bottlenecks made on purpose, each several times slower than what is around it.

Most wait instead of working, so that a machine with others at work finds the same bottleneck.
"""

from __future__ import annotations

import fcntl
import io
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kornia.augmentation as K
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import gpuaug
from gpuaug.decode.header import raw_header


def burn(seconds: float) -> None:
    """Keep one core busy for so many CPU-seconds, whoever else is at work."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Source:
    """The same few files again and again, as so many samples."""

    def __init__(
        self,
        files: Sequence[bytes],
        *,
        count: int = 100_000,
        wait: float = 0.0,  # seconds without work per read: storage that answers late
        turns: str | None = None,  # a file; waiting takes turns over all processes: storage with a bandwidth
        work: float = 0.0,  # CPU-seconds per read
        broken: int | None = None,  # every so many-th sample cannot be read
    ) -> None:
        self.files, self.count = list(files), count
        self.wait, self.turns, self.work, self.broken = wait, turns, work, broken
        self.labels = torch.arange(count) % 10

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        if self.broken is not None and index % self.broken == 0:
            raise FileNotFoundError(f"sample {index} is not there")
        if self.turns is not None:
            with open(self.turns, "a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                time.sleep(self.wait)
        elif self.wait:
            time.sleep(self.wait)
        burn(self.work)
        return self.files[index % len(self.files)], index % 10


class Files(Source):
    """The files of a folder, for a configuration."""

    def __init__(self, folder: str, *, count: int, work: float) -> None:
        super().__init__(jpegs(Path(folder)), count=count, work=work)


class SlowOp(K.RandomInvert):
    """An operation that costs what nobody would think: ``work`` CPU-seconds or ``wait`` seconds per image."""

    def __init__(self, *, work: float = 0.004, wait: float = 0.0, p: float = 0.5) -> None:
        super().__init__(p=p)
        self.work, self.wait = work, wait

    def apply_transform(self, input: Any, params: Any, flags: Any, transform: Any = None) -> Any:
        burn(self.work * len(input))
        time.sleep(self.wait * len(input))
        return super().apply_transform(input, params, flags, transform)


class SlowMix(gpuaug.Mix):
    """A callback in Python for every image."""

    def __init__(self, *, work: float = 0.006, wait: float = 0.0) -> None:
        super().__init__()
        self.work, self.wait = work, wait

    def __call__(self, images: Any, labels: Any, *, valid: Any, **rest: Any) -> Any:
        burn(self.work * len(valid))
        time.sleep(self.wait * len(valid))
        return images, labels


class Noting(nn.Module):
    """A model that appends the sum of every batch it is shown to a file, and waits for so many seconds."""

    def __init__(self, *, num_classes: int, file: str, wait: float = 0.0) -> None:
        super().__init__()
        self.file, self.wait = file, wait
        self.head = nn.Linear(3, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.wait)
        with open(self.file, "a") as file:
            file.write(f"{os.getpid()} {self.training:d} {x.double().sum().item()!r}\n")
        return self.head(x.mean(dim=(2, 3)))


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
