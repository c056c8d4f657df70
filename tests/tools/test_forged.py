"""Damaged folders of `gpuaug pack`: each is refused, gives faults that name samples, or gives the original batches."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import forked
import numpy as np
import pytest
from conftest import ROOT
from forge_worker import RECIPE
from pictures import encode, photograph
from test_pack_targets import Scenes

import gpuaug
from gpuaug.tools.pack.command import pack
from gpuaug.tools.pack.job import Pack

WORKER = ROOT / "tests" / "tools" / "forge_worker.py"
COUNT = 80  # damaged copies of each folder
IMAGES = 13


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
    recipe = gpuaug.Augment(**RECIPE)
    pack(source(), tmp_path / "out", what=Pack(samples=4, **what), augment=recipe, num_workers=0)
    command = [sys.executable, str(WORKER), str(tmp_path / "out"), "0", str(COUNT)]
    made = forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, error = made.communicate(timeout=1200)
    found = [json.loads(line) for line in out.splitlines()]
    assert made.returncode == 0, (len(found), error[-2000:])
    assert [number for number, *_ in found] == [*range(COUNT)]
    verdicts = Counter(verdict for _, verdict, _ in found)
    assert not verdicts.keys() - {"refused", "fault", "same"}, [each for each in found if ":" in each[1]]
    assert verdicts["refused"] > 10
    assert verdicts["fault"] > 3
