"""Damaged folders of `gpuaug pack`: each is refused, gives faults that name samples, or gives the original batches."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path

import kornia.augmentation as K
import numpy as np
import pytest
from pictures import encode, photograph
from test_pack_targets import ALL, Scenes

import gpuaug
from gpuaug.tools.pack.command import pack
from gpuaug.tools.pack.job import Pack

COUNT = 25  # damaged copies of each folder
IMAGES = 13
RECIPE = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(16), ops={"flip": K.RandomHorizontalFlip()})


class Captions(Scenes):
    """Scenes with masks, boxes, keypoints and extras."""

    def __getitem__(self, index: int) -> tuple:
        return *super().__getitem__(index), {"caption": f"scene {index}"}


class Photos:
    classes = ("a", "b", "c")
    labels = np.arange(IMAGES) % 3

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        return encode(photograph(size=(40 + index, 30)), "JPEG", quality=80), index % 3

    def key(self, index: int) -> str:
        return f"photo/{index}"


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
    settings = {"batch_size": 4, "num_workers": 0, "prefetch": 0, "device": "cpu"}
    settings |= {"targets": ALL if source.target_kinds else None, "decode": gpuaug.Decode(backend="pillow")}
    faults = gpuaug.Faults(policy="blank", file=str(record))
    with gpuaug.Loader(source, augment=RECIPE, faults=faults, **settings) as loader:
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
    """What became of a damaged copy: refused, fault, same, or something that must not be."""
    try:
        found, bad = content(copy, record)
    except gpuaug.GpuaugError as error:
        return "refused" if str(copy) in str(error) else f"unclear: {error}"
    if found.keys() != whole.keys():
        return "silent: other samples"
    wrong = [number for number in whole if number not in bad and found[number] != whole[number]]
    return f"silent: {wrong}" if wrong else "fault" if bad else "same"


FOLDERS = {
    "pixels": (Photos, {"format": "uint8", "sizes": [24, 30]}),
    "jpeg": (Photos, {}),
    "pixels with targets": (Captions, {"format": "uint8", "sizes": [24]}),
    "augmented": (Photos, {"epochs": 2}),
    "jpeg with targets": (Captions, {"sizes": [24]}),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_damage_is_never_silent(name: str, tmp_path: Path) -> None:
    source, what = FOLDERS[name]
    folder = tmp_path / "whole"
    pack(source(), folder, what=Pack(samples=4, **what), augment=RECIPE, num_workers=0)
    whole, _ = content(folder, tmp_path / "none")
    verdicts = Counter[str]()
    for number in range(COUNT):
        shutil.copytree(folder, copy := tmp_path / str(number))
        done = damage(copy, random.Random(number))
        found = verdict(whole, copy, tmp_path / f"{number}.jsonl")
        assert found in ("refused", "fault", "same"), (number, done, found)
        verdicts[found] += 1
        shutil.rmtree(copy)
    assert verdicts["refused"] > 5
    assert verdicts["fault"] > 1
