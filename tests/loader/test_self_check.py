"""The self-check of loaders on CUDA; its cases run in a process of their own."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, tests/test_gpu.py shows that nothing differs")
def test_wrong_pixels_are_found_and_replaced() -> None:
    """Triton decides for its interpreter when it is first imported."""
    options = ["-q", "-p", "no:cacheprovider", str(ROOT / "tests/loader/self_check_cases.py")]
    command = [sys.executable, "-m", "pytest", *options]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
