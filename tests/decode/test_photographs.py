"""The ImageFolder that demo and benchmarks are made of."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from PIL import Image, ImageOps

from bench import photographs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photographs.cut(tmp_path_factory.mktemp("photographs"), count=300, seed=0)


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.jpg"))


def test_files_vary_as_promised(folder: Path) -> None:
    sizes, progressive, gray, rotated, sampling = set(), 0, 0, 0, set()
    for path in files(folder):
        with Image.open(path) as image:
            assert image.format == "JPEG"
            sizes.add(ImageOps.exif_transpose(image).size)
            progressive += "progressive" in image.info
            gray += image.mode == "L"
            rotated += image.getexif().get(photographs.ORIENTATION, 1) != 1
            if image.mode == "RGB":
                sampling.add(image.layer[0][1:3])  # type: ignore[attr-defined]
    assert {(500, 375), (375, 500), (640, 480)} <= sizes
    assert 10 <= progressive <= 60  # ten in a hundred
    assert 4 <= gray <= 35  # five in a hundred
    assert 4 <= rotated <= 35
    assert sampling == {(1, 1), (2, 2)}


def test_same_seed_same_bytes_and_a_larger_count_only_adds(folder: Path, tmp_path: Path) -> None:
    def digests(root: Path) -> dict[str, str]:
        return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files(root)}

    command = [sys.executable, str(ROOT / "bench" / "photographs.py"), str(tmp_path / "again"), "--count", "40"]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    again, whole = digests(tmp_path / "again"), digests(folder)
    assert len(again) == 40
    assert again.items() <= whole.items()
    assert again != digests(photographs.cut(tmp_path / "other", count=40, seed=1))
