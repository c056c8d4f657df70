"""Hostile files without end: whatever the bytes, no death, no hang, no foreign error, no work or memory without bounds.

Three kinds of trials, in child processes of which every death is counted:

    python tests/fuzz.py images --count 20000      # odd files and mutants, 32 of them in each batch of 64
    python tests/fuzz.py tars --count 5000         # tar shards, each of them indexed and read
    python tests/fuzz.py epochs --count 50         # processes: three shuffled epochs over a folder with ten bad files

Input N of a seed is always the same. What fails is narrowed down to the file and kept in the folder as SEED-N-what; the
exit status is then 1. The other samples of a batch must not change, and a fault has a reason and no pixels.
"""

import argparse
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from io import BytesIO
from pathlib import Path

import hostile
import torch
from fuzz_child import HANG, Child, memory, say, serve
from hostile import BAD, EITHER, GOOD, window
from hostile_tars import tar
from pictures import encode

import gpuaug
from gpuaug.files import CODECS

BATCH, THREADS = 64, 4
SIZE = (32, 40)  # of the images
MUTANTS = 32  # of a batch; the others are good ones
CPU = 2.0  # seconds of one core that a file below 1 MiB may take
HANG_CPU = {"images": 100.0, "tars": 10.0}  # seconds of the child's processors without an answer
TRIES = 20  # of a part of what failed, as deaths are a matter of chance
LOGGED = 20.0  # seconds between two lines of progress
HEAD = 700  # bytes in front, where half of the damage is done: headers decide what is allocated
SETTINGS = {
    "default": {},
    "every codec": {"codecs": CODECS},
    "pillow": {"codecs": CODECS, "backend": "pillow"},
    "reduced": {"codecs": CODECS, "backend": "pillow", "reduced": True, "max_bytes": 2**27},
}
FAMILIES = ("jpeg", "jpeg", "png", "png", "webp", "bmp", "bmp", "gif", "tiff", "jpeg2000", "avif", "heif")


# -- inputs


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
    return with_checksums(bytes(out)) if rng.random() < 0.5 else bytes(out)


def with_checksums(data: bytes) -> bytes:
    """A PNG whose chunks have right checksums, so that their damage is read; anything else as it is."""
    out, at = bytearray(data), 8
    while data.startswith(b"\x89PNG\r\n\x1a\n") and at + 12 <= len(out):
        end = at + 8 + int.from_bytes(out[at : at + 4], "big")
        out[end : end + 4] = zlib.crc32(out[at + 4 : end]).to_bytes(4, "big") if end + 4 <= len(out) else b""
        at = end + 4
    return bytes(out)


class Images:
    """Inputs of `images`: valid files, hostile ones, and from number ``len(self)`` on mutants.

    ``share`` of the hostile ones, for a short run.
    """

    def __init__(self, seed: int, share: float = 1.0) -> None:
        self.seed, valid = seed, hostile.originals()
        self.fixed = [(name, data, GOOD) for name, data in valid.items()]
        others = [(name, data, EITHER) for name, data in hostile.odd().items()]
        self.fixed += others if share == 1 else random.Random(seed).sample(others, round(share * len(others)))
        self.fixed += hostile.corpus(share)
        self.families = {family: [n for n in valid if n.split()[0] == family] for family in FAMILIES}
        self.families = {family: names for family, names in self.families.items() if names}  # HEIF is an extra
        self.valid = valid

    def __len__(self) -> int:
        return len(self.fixed)

    def __getitem__(self, number: int) -> tuple[str, bytes, str]:
        """Name, bytes, and what is expected of it."""
        if number < len(self.fixed):
            return self.fixed[number]
        rng = random.Random(f"{self.seed} {number - len(self.fixed)}")
        family = rng.choice([family for family in FAMILIES if family in self.families])
        name = rng.choice(self.families[family])
        other = rng.choice(self.families[family if rng.random() < 0.5 else rng.choice([*self.families])])
        return f"mutant of {name}", mutated(self.valid[name], self.valid[other], rng), EITHER


class Tars:
    """Inputs of `tars`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __getitem__(self, number: int) -> tuple[str, bytes, str]:
        return "tar", tar(self.seed, number), EITHER


# -- the process that decodes


class Slots:
    """A source of one batch: good photographs, and behind them what is put there."""

    def __init__(self, count: int) -> None:
        kinds = [("JPEG", {"quality": 90}), ("PNG", {}), ("WEBP", {}), ("BMP", {}), ("JPEG", {"progressive": True})]
        self.good = []
        for k in range(BATCH - count):
            kind, options = kinds[k % len(kinds)]
            self.good.append(encode(window(50 + k, 70 + k, seed=k), kind, **options))
        self.files, self.turn = [self.good[0]] * count, 0

    def __len__(self) -> int:
        return BATCH

    def __getitem__(self, i: int) -> tuple[bytes, int]:
        return [*self.good, *self.files][i], 0

    def key(self, i: int) -> str:
        return f"{self.turn} {i}"  # a record names each key once


class Decoding:
    """Decodes inputs among good photographs, and compares these to what they are without them."""

    def __init__(self, inputs: Images, settings: str) -> None:
        self.inputs, self.source, self.settings = inputs, Slots(MUTANTS), settings
        self.record = "faults.jsonl"
        self.loader = self._loader()
        self.good = list(range(BATCH - MUTANTS))
        self.expected, invalid = self._fetch(self.good)
        if invalid:
            raise AssertionError(f"the good ones are faults: {invalid}")

    def check(self, numbers: Sequence[int], *, alone: bool) -> dict[int, str]:
        """What became of each: pixels, fault, or what is wrong with it; AssertionError if it is no single one's."""
        inputs = [self.inputs[number] for number in numbers]
        self.source.files[: len(inputs)] = [data for _, data, _ in inputs]
        slots = range(len(self.good), len(self.good) + len(inputs))
        rows = [*slots] if alone else [*self.good, *slots]
        random.Random(numbers[0]).shuffle(rows)
        images, reasons = self._fetch(rows)
        place = {slot: row for row, slot in enumerate(rows)}
        if not alone and any(not torch.equal(images[place[k]], self.expected[k]) for k in self.good):
            raise AssertionError("another sample's pixels have changed")
        if reasons.keys() - set(slots):
            raise AssertionError(f"faults of other samples: {reasons}")
        verdicts = {}
        for slot, number, (_, _, expectation) in zip(slots, numbers, inputs, strict=True):
            bad = slot in reasons
            verdict = "fault" if bad else "pixels"
            if bad and images[place[slot]].any():
                verdict = "blank: a fault has pixels"
            elif bad and not reasons[slot]:
                verdict = "reason: a fault has none"
            elif self.settings != "default" and expectation == (GOOD if bad else BAD):
                verdict = f"unexpected: {expectation}, and found to be {verdict} {reasons.get(slot, '')}"
            verdicts[number] = verdict
        return verdicts

    def promised(self) -> int:
        """Bytes that a batch of what is in the slots may take: for decoding, for the files, and for the images."""
        files = sum(map(len, [*self.source.good, *self.source.files]))
        images = BATCH * 3 * SIZE[0] * SIZE[1] * (1 + 2 * 4)  # bytes, and floats before and after an operation
        return int(1.25 * self.loader.decode.max_bytes) + 2 * files + images

    def _loader(self) -> gpuaug.Loader:
        augment = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(SIZE), backend="kornia")
        return gpuaug.Loader(
            self.source, augment=augment, batch_size=BATCH, num_workers=0, prefetch=0, device="cpu", seed=1,
            decode=gpuaug.Decode(num_threads=THREADS, **SETTINGS[self.settings]),
            faults=gpuaug.Faults(policy="blank", file=self.record),
        )  # fmt: skip

    def _fetch(self, rows: Sequence[int]) -> tuple[torch.Tensor, dict[int, str]]:
        """Images of these slots, and why some of them have none."""
        self.source.turn += 1
        batch = self.loader.fetch(rows)
        reasons = {}
        if os.path.exists(self.record):
            with open(self.record) as lines:
                reasons = {line["index"]: line["reason"] for line in map(json.loads, lines)}
            os.unlink(self.record)
        invalid = {slot for slot, valid in zip(rows, batch.valid.tolist(), strict=True) if not valid}
        if invalid != reasons.keys():
            raise AssertionError(f"blank are {sorted(invalid)}, and recorded {sorted(reasons)}")
        return batch.images, reasons


class Indexing:
    """Indexes tars, and reads their samples."""

    def __init__(self, inputs: Tars) -> None:
        self.inputs, self.folder = inputs, os.getcwd()

    def check(self, numbers: Sequence[int], *, alone: bool) -> dict[int, str]:
        """What became of each: indexed, refused, or what is wrong with it."""
        return {number: self._one(number) for number in numbers}

    def _one(self, number: int) -> str:
        say({"at": number})
        data = self.inputs[number][1]
        path = os.path.join(self.folder, f"{number}.tar")
        Path(path).write_bytes(data)
        try:
            source = gpuaug.ShardSource(path, labels="none", index=self.folder)
            keys = [source.key(i) for i in range(len(source))]
            found = [source[i][0] for i in range(len(source))]
        except gpuaug.SourceError:
            return "refused"
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:300]
        finally:
            os.unlink(path)
        if len(set(keys)) < len(keys):
            return f"keys: not unique: {keys}"
        if any(".." in key.split("/") or key.startswith("/") for key in keys):
            return f"keys: outside: {keys}"
        return "bytes: tarfile finds others" if self._others(data, dict(zip(keys, found, strict=True))) else "indexed"

    def _others(self, data: bytes, found: dict[str, bytes]) -> bool:
        """Whether a member of the same name has other bytes for tarfile."""
        try:
            with tarfile.open(fileobj=BytesIO(data)) as standard:
                members = [member for member in standard if member.isfile()]
                # tarfile merges several pax headers in a row, and applies global ones; ours takes the last, and none
                if any("size" in member.pax_headers for member in members) or "path" in standard.pax_headers:
                    return False
                there = [(member.name, standard.extractfile(member).read()) for member in members]
        except (tarfile.TarError, ValueError, OSError, RecursionError):
            return False
        once = Counter(name for name, _ in there)
        ours = {key.partition("/")[2]: value for key, value in found.items()}
        return any(once[name] == 1 and ours.get(name, value) != value for name, value in there)


# -- the process that watches


class Run:
    """Asks a child about one batch of inputs after the other, and narrows down what fails."""

    def __init__(
        self, what: str, *, seed: int = 0, settings: str = "default", folder: Path, cpu: float = CPU, share: float = 1.0
    ) -> None:
        self.what, self.seed, self.settings, self.folder, self.cpu = what, seed, settings, folder, cpu
        self.share, self.size = share, MUTANTS if what == "images" else 50
        self.child = Child(__file__, what, f"--seed={seed}", f"--share={share}", hang_cpu=HANG_CPU[what])
        self.counts, self.failures = Counter[str](), list[str]()
        self.next, self.told = 0, time.monotonic()
        self.slowest, self.peak = (0.0, ""), (0, 0, 0)

    @cached_property
    def inputs(self) -> "Images | Tars":
        """What the child has too."""
        return Images(self.seed, self.share) if self.what == "images" else Tars(self.seed)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.child.close()

    def until(self, deadline: float, *, count: int | None = None) -> None:
        """Go on until then, or until so many inputs."""
        while time.monotonic() < deadline and (count is None or self.next < count):
            end = self.next + self.size if count is None else min(self.next + self.size, count)
            self._batch(list(range(self.next, end)))
            self.next = end
            if time.monotonic() - self.told > LOGGED:
                self.told = time.monotonic()
                print(self, flush=True)

    def _batch(self, numbers: list[int]) -> None:
        while numbers:
            answer = self._ask(numbers)
            if not answer["error"]:
                self._tally(answer["verdicts"])
                if answer["cpu"] > min(self.cpu, self.slowest[0]):
                    self._slow(numbers)
                return
            for culprits, error in self._culprits(numbers, answer):
                self._failed(culprits, error)
                numbers = [number for number in numbers if number not in culprits]

    def _ask(self, numbers: list[int]) -> dict:
        answer = self.child.ask(numbers, settings=self.settings)
        self.peak = max(self.peak, (answer["more"], answer["promised"], answer["peak"]))
        return answer

    def _culprits(self, numbers: list[int], answer: dict) -> list[tuple[list[int], str]]:
        """The smallest groups found that fail among good ones."""
        error = answer["error"]
        if answer.get("at") is not None:
            return [([answer["at"]], error)]
        if len(numbers) > 1:
            found = []
            for half in (numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]):
                for _ in range(TRIES if error.startswith("death") else 1):
                    if (again := self._ask(half))["error"]:
                        found += self._culprits(half, again)
                        break
            if found:
                return found
        return [(numbers, error)]

    def _slow(self, numbers: list[int]) -> None:
        """Each file's own processor time."""
        for number in numbers:
            answer = self.child.ask([number], settings=self.settings, alone=True)
            name, data, _ = self.inputs[number]
            self.slowest = max(self.slowest, (answer["cpu"], f"{number}, {name}, {len(data)} bytes"))
            if answer["error"] or (answer["cpu"] > self.cpu and len(data) < 1 << 20):
                self._failed([number], answer["error"] or f"slow: {answer['cpu']:.1f} s of processors")

    def _tally(self, verdicts: dict[int, str]) -> None:
        for number, verdict in verdicts.items():
            if ": " in verdict:
                self._failed([number], verdict)
            else:
                self.counts[verdict] += 1

    def _failed(self, numbers: list[int], what: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        kind = what.split(":")[0].split()[0]
        for number in numbers:
            name, data, _ = self.inputs[number]
            (self.folder / f"{self.seed}-{number}-{kind}.bin").write_bytes(data)
        self.counts[kind] += 1
        names = f"{numbers[0]} ({name})" if len(numbers) == 1 else f"one of {numbers}, or several"
        self.failures.append(f"{names}: {what}")
        print(f"FAILED {self.failures[-1]}", flush=True)

    def __str__(self) -> str:
        found = ", ".join(f"{count} {what}" for what, count in self.counts.most_common())
        more, promised, peak = (value >> 20 for value in self.peak)
        return (
            f"{self.what} ({self.settings}): {self.next} inputs of seed {self.seed}: {found}; "
            f"slowest {self.slowest[0]:.2f} s of processors (input {self.slowest[1]}); "
            f"a batch took {more} MiB at most (promised: {promised}; peak {peak})"
        )


# -- whole epochs

BAD_FILES: dict[str, Callable[[], bytes]] = {
    "rgb555.bmp": lambda: hostile.bmp(16),
    "no_bits.bmp": lambda: hostile.bmp(0, body=bytes(4000)),
    "palette.bmp": lambda: hostile.bmp(8, colors=2**31 - 1),
    **{
        f"precision_{p}.jpg": lambda p=p: hostile.with_frame(encode(window(), "JPEG"), precision=p)
        for p in (7, 9, 16, 255)
    },
    "idle_lines.bmp": hostile.idle_lines,
    "large.webp": hostile.plain_webp,
    "bomb.png": lambda: hostile.png(8, 8, hostile.zeros(960 << 20)),
}


def epochs(root: str, record: str) -> dict:
    """Three shuffled epochs over a folder: checksums of the good images, and the keys of the bad ones."""
    pixels, bad = {}, set()
    augment = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(32), backend="kornia")
    with gpuaug.Loader(
        gpuaug.FolderSource(root, labels="none"), augment=augment, batch_size=BATCH, num_workers=0, device="cpu",
        seed=2, decode=gpuaug.Decode(num_threads=THREADS), faults=gpuaug.Faults(policy="blank", file=record),
    ) as loader:  # fmt: skip
        for epoch in range(3):
            for batch in loader:
                for key, image, valid in zip(batch.keys, batch.images, batch.valid.tolist(), strict=True):
                    if valid:
                        pixels[f"{epoch} {key}"] = zlib.crc32(image.numpy().tobytes())
                    else:
                        bad.add(key)
    lines = Path(record).read_text().splitlines() if os.path.exists(record) else []
    recorded = sorted(json.loads(line)["key"] for line in lines)
    return {"pixels": pixels, "bad": sorted(bad), "recorded": recorded, "peak": memory("VmHWM")}


def run_epochs(photographs: Path, folder: Path, *, count: int) -> tuple[list[str], set[str]]:
    """So many processes, one after the other, over the photographs and ten bad files; what failed, and the faults."""
    good, mixed, failures, faults = folder / "good", folder / "mixed", list[str](), set[str]()
    shutil.copytree(photographs, good)
    shutil.copytree(photographs, mixed)
    (mixed / "zz").mkdir()  # behind the others: samples keep their numbers
    for name, make in BAD_FILES.items():
        (mixed / "zz" / name).write_bytes(make())

    def once(root: Path, record: Path) -> dict | str:
        command = [sys.executable, __file__, "epochs", "--serve", str(root), str(record)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
        except subprocess.TimeoutExpired:
            return f"hang of {HANG:.0f} s"
        return json.loads(done.stdout) if done.returncode == 0 else f"exit code {done.returncode}: {done.stderr[-300:]}"

    expected = once(good, folder / "none.jsonl")
    if isinstance(expected, str) or expected["bad"]:
        raise SystemExit(f"the good ones alone: {expected}")
    every = {f"zz/{name}" for name in BAD_FILES}
    for k in range(count):
        found = once(mixed, folder / f"{k}.jsonl")
        if isinstance(found, str):
            what = found
        elif {key: found["pixels"].get(key) for key in expected["pixels"]} != expected["pixels"]:
            what = "good samples have changed"
        elif found["recorded"] != found["bad"] or not set(found["bad"]) <= every:
            what = f"faults are {found['bad']}, and recorded {found['recorded']}"
        else:
            what = ""
            faults |= set(found["bad"])
        failures += [f"process {k}: {what}"] if what else []
        print(f"process {k}: {what or 'went through'}", flush=True)
    return failures, faults


def main(arguments: list[str] | None = None) -> int:
    """0 if nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["images", "tars", "epochs"])
    parser.add_argument("--count", type=int, help="stop after so many inputs, or processes")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the first input")
    parser.add_argument("--settings", choices=list(SETTINGS), default="default", help="of the decoder")
    parser.add_argument("--share", type=float, default=1.0, help="of the hostile images that are no mutants")
    parser.add_argument("--folder", type=Path, default=Path("fuzz-failures"), help="for inputs that fail")
    parser.add_argument("--serve", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve is not None:
        if given.what == "epochs":
            say(epochs(*given.serve))
        elif given.what == "images":
            inputs = Images(given.seed, given.share)
            serve(cache(lambda settings: Decoding(inputs, settings)))
        else:
            job = Indexing(Tars(given.seed))
            serve(lambda _: job)
        return 0
    if given.what == "epochs":
        from conftest import cut

        with tempfile.TemporaryDirectory() as folder:
            photographs = cut(Path(folder) / "photographs", 48)
            failures, faults = run_epochs(photographs, Path(folder), count=given.count or 50)
            print(f"faults: {sorted(faults)}")
    else:
        run = Run(given.what, seed=given.seed, settings=given.settings, folder=given.folder, share=given.share)
        run.next = given.first
        with run:
            run.until(time.monotonic() + 60 * given.minutes, count=given.count)
        failures = run.failures
        print(run)
    print(f"{len(failures)} failures")
    return 1 if failures else 0


if "--serve" in sys.argv:
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)

if __name__ == "__main__":
    sys.exit(main())
