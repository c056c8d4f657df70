"""Restores the global random generators after other code has run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def restore_generators(device: torch.device | None = None) -> Iterator[None]:
    """Restore on exit the global generators of Python, numpy and torch, and the generator of a CUDA ``device``."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [device] if device is not None and device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
