"""What processes hold: as the kernel counts it, and what an index of ImageNet's size may cost."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT

import gpuaug
from gpuaug.read.reader import Reader

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="reads /proc")


def private(pid):
    """Bytes of memory that only this process has written to."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


COUNTED = """
import json, multiprocessing, sys
import numpy as np
from gpuaug.tools import memory

def hold(size, ready, done):
    block = b"x" * size
    ready.set()
    done.wait(300)
    del block

size = int(sys.argv[1])
context = multiprocessing.get_context("fork")
done, ready = context.Event(), [context.Event(), context.Event()]
inherited = np.ones(4 * size, dtype=np.uint8)
before = memory.usage().host
children = [context.Process(target=hold, args=(size, r, done), daemon=True) for r in ready]
for child in children:
    child.start()
for event in ready:
    assert event.wait(300)
print(json.dumps({"workers": memory.usage().workers, "more": memory.usage().host - before}))
done.set()
for child in children:
    child.join()
"""


def test_what_a_worker_holds_is_counted_and_shared_pages_only_once():
    """In a process of its own: what others allocate and free meanwhile is not counted."""
    size = 64 << 20
    done = subprocess.run([sys.executable, "-c", COUNTED, str(size)], capture_output=True, text=True, timeout=600,
                          cwd=ROOT)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 1.5 * size < found["workers"] < 3 * size  # and not the pages that they share with this process
    assert 1.5 * size < found["more"] < 3 * size  # not twice what they have of this process


@pytest.mark.long
def test_an_index_of_imagenets_size_costs_path_and_sixteen_bytes_and_does_not_grow(tmp_path):
    classes, each = 1000, 1280
    began = time.monotonic()
    files = [tmp_path / f"file{k}" for k in range(64)]  # a file may have 65,000 links
    for file in files:
        file.write_bytes(b"encoded")
    names = 0
    for c in range(classes):
        folder = tmp_path / "train" / f"n{c:08d}"
        folder.mkdir(parents=True)
        for k in range(each):
            name = f"n{c:08d}_{k}.JPEG"
            os.link(files[c % 64], folder / name)
            names += len(f"n{c:08d}/{name}")
    made = time.monotonic() - began
    source = gpuaug.FolderSource(tmp_path / "train")
    total = classes * each
    tensors = (source._names.blob, source._names.offsets, source.labels)
    cost = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert all(tensor.is_shared() for tensor in tensors)
    assert cost <= names + 16 * total + 4096
    reader = Reader(source, num_workers=2)
    numbers = torch.randperm(total, generator=torch.Generator().manual_seed(0)).split(256)
    tasks = [(c, torch.zeros_like(c), torch.ones(len(c), dtype=torch.bool)) for c in numbers]
    first: list[int] = []
    begun = time.monotonic()
    for step, batch in enumerate(reader.batches(tasks)):
        assert not batch.faults
        if step == 20:
            pids = [child.pid for child in multiprocessing.active_children()]
            assert len(pids) == 2
            first = [private(pid) for pid in pids]
    last = [private(pid) for pid in pids]
    print(f"\n{total} links in {made:.0f} s, epoch in {time.monotonic() - begun:.0f} s, index {cost / 2**20:.1f} MiB, "
          f"workers' private memory {first} -> {last}")  # fmt: skip
    reader.close()
    for a, b in zip(first, last, strict=True):
        assert b - a < 0.05 * cost
