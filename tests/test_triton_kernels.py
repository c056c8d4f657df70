"""The CUDA kernels: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_fused import NORMALIZE, POINTWISE, SPACE, SPATIAL, draw, photographs

from gpuaug.augment import fused
from gpuaug.augment.prepare import prepare

pytest.importorskip("triton", reason="Triton is not installed")


def test_the_kernels_equal_the_reference() -> None:
    """In a process of its own: Triton decides for its interpreter when it is first imported."""
    folder = Path(__file__).parent
    environment = dict(os.environ) if torch.cuda.is_available() else {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / "triton_cases.py")]
    done = subprocess.run(
        command, cwd=folder.parent, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_equals_the_cpu_without_waiting_for_the_device() -> None:
    ops = {"jitter": POINTWISE["jitter"](), "gray": POINTWISE["gray"](), "blur": SPATIAL["blur"]()}
    prepared = [prepare(name, op) for name, op in ops.items()]
    images = photographs(96)
    chosen = [draw(p, len(images), (96, 96), k) for k, p in enumerate(prepared)]
    backend = fused.FusedBackend(prepared, NORMALIZE)
    expected = backend(images, chosen)
    on_device = images.cuda()
    backend(on_device, chosen)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = backend(on_device, chosen)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (found.cpu() - expected).abs().max() <= SPACE
