"""Reads encoded images with different numbers of workers and threads, and prints the table of docs/guide.md.

    python bench/reading.py                 # minutes
    python bench/reading.py --data FOLDER   # reads the JPEG files of an ImageFolder instead of its own files

Each row has another storage: files in the page cache, and the same files with a delay per read. All combinations run
in turns. A figure is the best of the rounds in images/s, because other programs only slow a round. The last column is
the median of the processor time of the main process per image, with two workers of one thread.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from gpuaug.read.reader import Reader
from gpuaug.source import FolderSource

BATCH = 64
DELAYS_MS = (0.0, 0.2, 1.0, 5.0)
COMBINATIONS = [(0, 1), (0, 16), (1, 1), (1, 4), (1, 16), (2, 1), (2, 4), (2, 16), (4, 16)]  # workers, threads


class Delayed(FolderSource):
    """A folder whose reads wait ``delay`` seconds."""

    delay = 0.0

    def __getitem__(self, index: int) -> Any:
        if self.delay:
            time.sleep(self.delay)
        return super().__getitem__(index)


def epoch(reader: Reader, count: int) -> tuple[float, float]:
    """Read ``count`` batches. Returns images/s, and seconds of processor time per image of this process."""
    numbers, total = torch.arange(BATCH), len(reader.source)
    tasks = [((numbers + k * BATCH) % total, numbers * 0, numbers >= 0) for k in range(count)]
    began, used = time.perf_counter(), time.process_time()
    for _ in reader.batches(tasks):
        pass
    images = count * BATCH
    return images / (time.perf_counter() - began), (time.process_time() - used) / images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="an ImageFolder; default: 1,024 files of 36 KiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="about, per figure and round")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = args.data or Path(folder)
        if args.data is None:
            (root / "a").mkdir()
            for i in range(1024):
                (root / "a" / f"{i:04}.jpg").write_bytes(os.urandom(36 << 10))
        print("| wait per read |", " | ".join(f"{w} × {t}" for w, t in COMBINATIONS), "| main process |")
        print("|---" * (len(COMBINATIONS) + 2) + "|")
        for delay in DELAYS_MS:
            source = Delayed(root)
            source.delay = delay / 1000
            readers = [Reader(source, num_workers=w, read_threads=t) for w, t in COMBINATIONS]
            counts = []
            for reader, (workers, _) in zip(readers, COMBINATIONS, strict=True):  # starts the workers
                epoch(reader, 4)
                counts.append(max(2 * max(1, workers), int(epoch(reader, 4)[0] * args.seconds / BATCH)))
            rounds = [[epoch(r, n) for r, n in zip(readers, counts, strict=True)] for _ in range(args.rounds)]
            rates = [max(rate for rate, _ in column) for column in zip(*rounds, strict=True)]
            used = statistics.median(row[COMBINATIONS.index((2, 1))][1] for row in rounds)
            for reader in readers:
                reader.close()
            print(f"| {delay:g} ms |", " | ".join(f"{rate:,.0f}" for rate in rates), f"| {used * 1e6:.1f} µs |")


if __name__ == "__main__":
    main()
