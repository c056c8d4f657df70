"""Damaged images without end: whatever the bytes, a sample is pixels or a fault, and its neighbours do not change.

Valid files of every codec are mutated, and each is decoded between two good ones in a process of its own, so that a
death, a hang or a growing memory is seen:

    python tests/fuzz.py --minutes 10 --seed 0 --folder fuzz-failures

Input N of a seed is always the same. What fails is kept in the folder as SEED-N-what.bin; the exit status is then 1.
"""

import argparse
import json
import os
import random
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from hostile import encode, photograph
from PIL import Image

from gpuaug.batch import EncodedBatch
from gpuaug.crop import RandomResizedCrop, Resize
from gpuaug.decode import Decode

HANG = 60.0  # seconds for one batch
MEMORY = 3 << 30  # bytes; the largest image that a header may claim takes half a gigabyte, and a few copies are made
LOGGED = 10.0  # seconds between two lines of progress
HEAD = 700  # bytes in front, where half of the damage is done: headers decide what is allocated


def originals() -> dict[str, bytes]:
    """Valid files: the codecs, and what encoders do differently."""
    photo, small = photograph(), photograph(40, 56, seed=3)
    exif = Image.Exif()
    exif[274] = 6
    frames = [photograph(24, 32, seed=k) for k in range(3)]
    animated = {"save_all": True, "append_images": frames[1:]}
    deep = Image.fromarray(np.asarray(small.convert("L")).astype(np.uint16) * 257)
    return {
        "jpeg 444": encode(small, "JPEG", quality=90, subsampling=0),
        "jpeg 420": encode(photo, "JPEG", quality=85, subsampling=2, exif=exif),
        "jpeg progressive": encode(small, "JPEG", quality=85, progressive=True),
        "jpeg gray": encode(small.convert("L"), "JPEG", quality=85),
        "jpeg cmyk": encode(small.convert("CMYK"), "JPEG", quality=85),
        "jpeg restarts": encode(photo, "JPEG", quality=60, restart_marker_blocks=2),
        "png": encode(small, "PNG", exif=exif),
        "png palette": encode(small.convert("P"), "PNG"),
        "png alpha": encode(small.convert("RGBA"), "PNG"),
        "png 16 bits": encode(deep, "PNG"),
        "png animated": encode(frames[0], "PNG", **animated),
        "webp": encode(photo, "WEBP", quality=80, exif=exif),
        "webp lossless": encode(small, "WEBP", lossless=True),
        "webp alpha": encode(small.convert("RGBA"), "WEBP"),
        "webp animated": encode(frames[0], "WEBP", **animated),
        "bmp": encode(small, "BMP"),
        "bmp palette": encode(small.convert("P"), "BMP"),
        "gif": encode(small, "GIF"),
        "gif animated": encode(frames[0], "GIF", **animated),
    }


def mutated(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """The file after one to four kinds of damage; ``other`` is what a splice takes its end from."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(out) if rng.random() < 0.5 else min(len(out), HEAD)) if out else 0
        size = min(rng.choice((1, 2, 4, 16, 64, 1000)), len(out) - at)
        kind = rng.choice(("flip", "set", "cut", "end", "insert", "repeat", "move", "splice"))
        if not out:
            out += rng.randbytes(8)
        elif kind == "flip":
            for _ in range(rng.choice((1, 2, 8))):
                out[min(len(out) - 1, at + rng.randrange(16))] ^= 1 << rng.randrange(8)
        elif kind == "set":  # lengths, counts and sizes of the values at which something turns over
            word = rng.choice((0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF))
            width = rng.choice((1, 2, 4))
            out[at : at + width] = (word & (1 << 8 * width) - 1).to_bytes(width, rng.choice(("big", "little")))
        elif kind == "cut":
            del out[at : at + size]
        elif kind == "end":
            del out[rng.randrange(len(out)) :]
        elif kind == "insert":
            out[at:at] = rng.choice((rng.randbytes(size), bytes(size), b"\xff" * size))
        elif kind == "repeat":
            out[at:at] = bytes(out[at : at + size]) * rng.choice((1, 2, 50))
        elif kind == "move":
            part = bytes(out[at : at + size])
            del out[at : at + size]
            to = rng.randrange(len(out) + 1)
            out[to:to] = part
        else:
            out[at:] = other[rng.randrange(len(other)) :]
    return bytes(out)


def damaged(files: dict[str, bytes], seed: int, number: int) -> bytes:
    """Input ``number`` of a seed."""
    rng = random.Random(f"{seed} {number}")
    names = sorted(files)
    first = rng.choice(names)
    alike = [name for name in names if name.split()[0] == first.split()[0]]
    return mutated(files[first], files[rng.choice(alike if rng.random() < 0.5 else names)], rng)


class Between:
    """Decodes a file between two good ones, a JPEG and a PNG, and compares these to what they are without it."""

    def __init__(self, **settings) -> None:
        self.decoder = Decode(num_threads=1, **settings).open("cpu")
        photo = photograph(50, 70, seed=5)
        self.good = [encode(photo, "JPEG", quality=90), encode(photo, "PNG")]
        self.crops = Resize((32, 40)), RandomResizedCrop((24, 24))
        fault, views = self._decode(encode(photo, "BMP"))
        if fault:
            raise AssertionError(f"the good ones are a fault: {fault}")
        self.expected = [view[[0, 2]].clone() for view in views]

    def check(self, data: bytes) -> str:
        """``pixels``, or ``fault``; AssertionError if it is neither, or a neighbour is another."""
        fault, views = self._decode(data)
        for view, expected in zip(views, self.expected, strict=True):
            if not torch.equal(view[[0, 2]], expected):
                raise AssertionError("a neighbour's pixels have changed")
            if fault and view[1].any():
                raise AssertionError(f"a fault has pixels: {fault}")
        return "fault" if fault else "pixels"

    def close(self) -> None:
        """Close the decoder."""
        self.decoder.close()

    def _decode(self, data: bytes):
        images = [self.good[0], data, self.good[1]]
        batch = EncodedBatch(
            data=torch.frombuffer(bytearray(b"".join(images)), dtype=torch.uint8),
            offsets=torch.tensor([0, *np.cumsum([len(image) for image in images]).tolist()]),
            labels=None,
            indices=torch.arange(3),
            repeats=torch.zeros(3, dtype=torch.int64),
            valid=torch.ones(3, dtype=torch.bool),
        )
        look = self.decoder.look(batch)
        u = np.random.default_rng(0).random((3, self.crops[1].count), dtype=np.float32)
        boxes = [crop.boxes(u if crop.count else None, look.height, look.width) for crop in self.crops]
        views, found = self.decoder.pixels(batch, look, boxes)
        faults = [*look.faults, *found]
        if {fault.row for fault in faults} - {1} or len(faults) > 1:
            raise AssertionError(f"faults of other rows, or several: {faults}")
        if faults and not faults[0].reason:
            raise AssertionError("a fault without a reason")
        return (faults[0].reason if faults else ""), views


# -- the process that decodes


def highest() -> int:
    """Bytes of memory at the highest; getrusage's begins with the peak of the process that started this one."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def work(seed: int, first: int, pipe: int, backend: str) -> None:
    """Decode one input after the other; say each number before, and what became of it afterwards."""
    torch.set_num_threads(1)
    files, between = originals(), Between(backend=backend)
    number = first
    with os.fdopen(pipe, "w", buffering=1) as out:
        while True:
            data = damaged(files, seed, number)
            print(json.dumps({"begin": number}), file=out)
            try:
                verdict = between.check(data)
            except Exception as error:
                verdict = f"{type(error).__name__}: {error}"[:300]
            peak = highest()
            print(json.dumps({"end": number, "verdict": verdict, "peak": peak}), file=out)
            number += 1


# -- the process that watches


class Run:
    """Starts the decoding process again after each failure, and keeps what made it fail."""

    def __init__(self, *, seed: int, folder: Path, backend: str) -> None:
        self.seed, self.folder, self.backend = seed, folder, backend
        self.files, self.counts, self.failures = originals(), Counter[str](), list[str]()
        self.next, self.peak, self.slowest = 0, 0, 0.0

    def until(self, deadline: float, *, count: int | None = None) -> None:
        """Go on until then, or until so many inputs."""
        told = time.monotonic()
        while time.monotonic() < deadline and (count is None or self.next < count):
            read, write = os.pipe()
            command = [sys.executable, __file__, f"--seed={self.seed}", f"--first={self.next}", f"--pipe={write}"]
            said = tempfile.TemporaryFile()  # noqa: SIM115 -- closed below; a pipe that nobody reads would hold it
            process = subprocess.Popen(
                [*command, f"--backend={self.backend}"], pass_fds=[write], stderr=said, stdout=subprocess.DEVNULL
            )
            os.close(write)
            try:
                with os.fdopen(read, "rb", buffering=0) as messages:
                    buffer, begun, at, done = b"", None, time.monotonic(), 0
                    while time.monotonic() < deadline and (count is None or self.next < count):
                        if time.monotonic() - told > LOGGED:
                            told = time.monotonic()
                            print(self, flush=True)
                        ready, _, _ = select.select([messages], [], [], 1.0)
                        if not ready:
                            if time.monotonic() - at > HANG:
                                self._failed(self.next if begun is None else begun, f"hang of {HANG:g} s")
                                break
                            continue
                        more = messages.read(1 << 16)
                        if not more:
                            process.wait(HANG)
                            said.seek(0)
                            last = said.read().decode(errors="replace")[-300:]
                            what = f"death with exit code {process.returncode}: {last}"
                            if begun is None and not done:
                                raise SystemExit(f"the decoding process cannot work: {what}")
                            self._failed(self.next if begun is None else begun, what)
                            break
                        *lines, buffer = (buffer + more).split(b"\n")
                        for line in map(json.loads, lines):
                            if "begin" in line:
                                begun, at = line["begin"], time.monotonic()
                            else:
                                self._ended(line, time.monotonic() - at)
                                begun, at, done = None, time.monotonic(), done + 1
                        if self.peak > MEMORY:
                            self.peak = 0
                            break
            finally:
                process.kill()
                process.wait()
                said.close()

    def _ended(self, line: dict, seconds: float) -> None:
        self.next, verdict = line["end"] + 1, line["verdict"]
        self.slowest = max(self.slowest, seconds)
        if verdict in ("pixels", "fault"):
            self.counts[verdict] += 1
        else:
            self._failed(line["end"], verdict)
        if line["peak"] > MEMORY >= self.peak:
            self._failed(line["end"], f"memory of {line['peak'] >> 20} MB")
        self.peak = max(self.peak, line["peak"])

    def _failed(self, number: int, what: str) -> None:
        self.next = number + 1
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"{self.seed}-{number}-{what.split()[0].strip(':')}.bin"
        (self.folder / name).write_bytes(damaged(self.files, self.seed, number))
        self.counts[what.split()[0].strip(":")] += 1
        self.failures.append(f"{self.folder / name}: {what}")
        print(self.failures[-1], flush=True)

    def __str__(self) -> str:
        found = ", ".join(f"{count} {what}" for what, count in self.counts.most_common())
        return (
            f"{self.next} inputs of seed {self.seed}: {found}; slowest {self.slowest:.2f} s, peak {self.peak >> 20} MB"
        )


def main(arguments: list[str] | None = None) -> int:
    """Run for some minutes; 0 if nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, help="stop after so many inputs")
    parser.add_argument("--folder", type=Path, default=Path("fuzz-failures"), help="for inputs that fail")
    parser.add_argument("--backend", default="auto", choices=["auto", "dali", "pillow"])
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--pipe", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.pipe is not None:
        work(given.seed, given.first, given.pipe, given.backend)
    run = Run(seed=given.seed, folder=given.folder, backend=given.backend)
    run.next = given.first
    run.until(time.monotonic() + 60 * given.minutes, count=given.count)
    print(run)
    print(f"{len(run.failures)} failures" + (f", kept in {given.folder}" if run.failures else ""))
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
