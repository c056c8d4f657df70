"""Opens and reads damaged copies of a packed folder, and prints a line for each: what became of it.

A process of its own, so that a crash or a hang of one copy is seen. ``python forge_worker.py FOLDER FIRST COUNT``.
"""

import json
import logging
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import kornia.augmentation as K

import gpuaug

RECIPE = {"crop": gpuaug.RandomResizedCrop(16), "ops": {"flip": K.RandomHorizontalFlip()}}
TARGETS = gpuaug.Targets(masks=gpuaug.Masks(), boxes=gpuaug.Boxes(crowd="keep"), keypoints=gpuaug.Keypoints())
TIMEOUT_S = 120  # for one copy; then this process ends


def damage(folder: Path, rng: random.Random) -> str:
    """Change a random file at random places. Returns what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    shards = [path for path in files if path.suffix in (".bin", ".tar") and path.parent.name != "index"]
    path, other = rng.choice(rng.choice((files, shards))), rng.choice(files)
    data, how = bytearray(path.read_bytes()), rng.choice(("flip", "flip", "zero", "cut", "grow", "swap", "files"))
    at, length = rng.randrange(len(data)), rng.choice((1, 2, 8, 100))
    end = min(at + length, len(data))
    if how == "flip":
        data[at] ^= 1 << rng.randrange(8)
    elif how == "zero":
        data[at:end] = bytes(end - at)
    elif how == "cut":
        del data[at:end]
    elif how == "grow":
        data[at:at] = rng.randbytes(length)
    elif how == "swap":  # two ranges of one file, which keeps its size
        to = rng.randrange(len(data) - (end - at) + 1)
        data[at:end], data[to : to + end - at] = data[to : to + end - at], data[at:end]
    else:
        theirs = other.read_bytes()
        other.write_bytes(data)
        data = theirs
    path.write_bytes(data)
    return f"{how} {path.relative_to(folder)} at {at}, {length}, {other.relative_to(folder)}"


def content(folder: Path, record: Path) -> tuple[dict, set]:
    """The values of all samples by number, with those of the whole folder; and the numbers with a named fault."""
    samples, source = {}, gpuaug.PackedSource(folder)
    recipe = gpuaug.Augment(**RECIPE)
    settings = {"batch_size": 4, "num_workers": 0, "prefetch": 0, "device": "cpu"}
    settings |= {"targets": TARGETS if source.target_kinds else None, "decode": gpuaug.Decode(backend="pillow")}
    faults = gpuaug.Faults(policy="blank", file=str(record))
    with gpuaug.Loader(source, augment=recipe, faults=faults, **settings) as loader:
        for batch in loader:
            moved = batch.targets
            for row, number in enumerate(batch.indices.tolist()):
                label = None if batch.labels is None else batch.labels[row].tolist()
                values = [batch.images[row].numpy().tobytes(), label, batch.extra[row], batch.keys[row]]
                if moved is not None:
                    own = moved.sample == row
                    values += [moved.masks[row].numpy().tobytes()]
                    values += [getattr(moved, name)[own].tolist() for name in ("boxes", "labels", "ids", "keypoints")]
                samples[number] = values
    samples[-1] = [source.classes, source.class_to_idx, source.digest(), source.flip_pairs, len(source)]
    lines = record.read_text().splitlines() if record.exists() else []
    named = [json.loads(line) for line in lines]
    assert all(samples[entry["index"]][3] == entry["key"] for entry in named)
    return samples, {entry["index"] for entry in named}


def verdict(whole: dict, copy: Path, record: Path) -> str:
    try:
        found, bad = content(copy, record)
    except gpuaug.GpuaugError as error:
        return "refused" if str(copy) in str(error) else f"unclear: {error}"
    if found.keys() != whole.keys():
        return "silent: other samples"
    wrong = [number for number in whole if number not in bad and found[number] != whole[number]]
    return f"silent: {wrong}" if wrong else "fault" if bad else "same"


def main(folder: Path, first: int, count: int) -> None:
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as scratch:
        whole, _ = content(folder, Path(scratch, "none"))
        for number in range(first, first + count):
            copy, record = Path(scratch, str(number)), Path(scratch, f"{number}.jsonl")
            shutil.copytree(folder, copy)
            done = damage(copy, random.Random(number))
            signal.alarm(TIMEOUT_S)
            print(json.dumps([number, verdict(whole, copy, record), done]), flush=True)
            signal.alarm(0)
            shutil.rmtree(copy)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
