"""Files of numbers: whatever their headers say, what comes of it is this project's own error."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import gpuaug
from gpuaug.source.index import share
from gpuaug.tools.pack.command import pack
from gpuaug.tools.pack.job import Pack

# numpy reads a header as Python: each of these raises something else in there
HEADERS = [b"'''", b"(((", b"\\x\n", b"{1:2", b"\n  \n ", b"0o9,", b"[]:[]", b"1e999"]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for n in range(6):
        file = tmp_path / "images" / "ab"[n % 2] / f"{n}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((9, 12, 3), 40 * n, dtype=np.uint8)).save(file)
    return tmp_path / "images"


def read_all(source: gpuaug.FolderSource | gpuaug.PackedSource) -> None:
    augment = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(8))
    with gpuaug.Loader(source, augment=augment, batch_size=4, num_workers=0, prefetch=0, device="cpu") as loader:
        list(loader)


def attack(folder: Path, use: Callable[[], None]) -> None:
    use()
    refused: list[str] = []
    files = sorted(folder.rglob("*.npy"))
    assert files
    for file in files:
        whole = file.read_bytes()
        start = 10 if whole[6] == 1 else 12
        for text in HEADERS:
            for at in (start, start + 1, start + 20):
                file.write_bytes(whole[:at] + text + whole[at + len(text) :])
                try:
                    use()  # what is only there to be verified is not read
                except gpuaug.GpuaugError as error:
                    refused.append(str(error))
        file.write_bytes(whole)
    use()
    assert all(any(file.name in text for file in files) for text in refused)
    assert refused


def test_packed(images: Path, tmp_path: Path) -> None:
    pack(gpuaug.FolderSource(images), tmp_path / "out", what=Pack(format="uint8"), num_workers=0)
    attack(tmp_path / "out", lambda: read_all(gpuaug.PackedSource(tmp_path / "out")))


def test_subset(images: Path, tmp_path: Path) -> None:
    (tmp_path / "numbers").mkdir()
    file = tmp_path / "numbers" / "subset.npy"
    np.save(file, np.array([1, 4]))
    attack(tmp_path / "numbers", lambda: read_all(gpuaug.FolderSource(images, subset=file)))
    with open(file, "wb") as zipped:  # numpy takes an archive under this name for several arrays
        np.savez(zipped, numbers=np.array([1, 4]))
    with pytest.raises(gpuaug.SourceError, match=r"`source.subset` must be a file of numbers.*subset\.npy"):
        gpuaug.FolderSource(images, subset=file)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has memory without a name")
def test_an_index_that_cannot_be_shared_stays_private(caplog: pytest.LogCaptureFixture) -> None:
    tensor = torch.arange(1 << 18)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        private = share(tensor)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert torch.equal(private, tensor)
    assert not private.is_shared()
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == [
        "source index of 2 MB cannot be put into shared memory"
    ]
