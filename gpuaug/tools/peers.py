"""Imports torchvision and timm. Some commands need these packages, but gpuaug does not install them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from gpuaug.errors import ConfigError

# Two operators that are missing if torchvision was built for another torch. They get no implementation, because no
# transform or classifier uses them. The list keeps them alive: torch removes operators with their `Library`.
_operators: list[Any] = []


@contextmanager
def _without_current_folder() -> Iterator[None]:
    """Import only from other folders: a file in the current one, which is trusted for `model`, may have any name."""
    before, here = sys.path, os.path.realpath(os.getcwd())
    sys.path = [folder for folder in before if os.path.realpath(folder) != here]
    try:
        yield
    finally:
        sys.path = before


@lru_cache(maxsize=1)
def torchvision() -> tuple[Any, str]:
    """``torchvision.transforms.v2`` and torchvision's version. Raises ConfigError if torchvision cannot be imported."""
    try:
        with _without_current_folder():
            try:
                import torchvision
            except RuntimeError:  # a build for another torch lacks two operators; no transform or classifier uses them
                for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
                    del sys.modules[name]
                _operators.append(torch.library.Library("torchvision", "DEF"))
                for name in ("nms", "qnms"):
                    _operators[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                import torchvision
            from torchvision.transforms import v2
    except Exception as error:
        raise ConfigError(
            f"this needs torchvision, which cannot be imported ({type(error).__name__}: {error}). Install the release "
            "for your torch: pip install torchvision"
        ) from error
    return v2, str(torchvision.__version__)


def timm() -> Any:
    """The package ``timm``. Raises ConfigError if timm or torchvision, which timm uses, cannot be imported."""
    torchvision()
    try:
        with _without_current_folder():
            import timm
    except Exception as error:
        raise ConfigError(
            f"this needs timm, which cannot be imported ({type(error).__name__}: {error}). Install it: pip install timm"
        ) from error
    return timm
