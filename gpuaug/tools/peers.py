"""Imports torchvision and timm. Some commands need these packages, but gpuaug does not install them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch

from gpuaug.errors import ConfigError

# keeps torchvision's operators alive, because torch removes operators together with their `Library`
_operators: list[Any] = []


@contextmanager
def _importing(name: str, remedy: str) -> Iterator[None]:
    """Raise ConfigError if an import in the block fails. Nothing is imported from the current folder.

    A user's file there may have the name of a package.
    """
    before, here = sys.path, os.path.realpath(os.getcwd())
    sys.path = [folder for folder in before if os.path.realpath(folder) != here]
    try:
        yield
    except ConfigError:  # about a package that this one needs
        raise
    except Exception as error:
        raise ConfigError(
            f"this needs {name}, which cannot be imported ({type(error).__name__}: {error}). {remedy}"
        ) from error
    finally:
        sys.path = before


@lru_cache(maxsize=1)
def torchvision() -> tuple[Any, str]:
    """``torchvision.transforms.v2`` and torchvision's version. Raises ConfigError if torchvision cannot be imported."""
    with _importing("torchvision", "Install the release for your torch: pip install torchvision"):
        try:
            import torchvision
        except RuntimeError:  # a build for another torch lacks two operators, which no transform or classifier uses
            for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
            _operators.append(torch.library.Library("torchvision", "DEF"))
            for name in ("nms", "qnms"):
                _operators[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            import torchvision
        from torchvision.transforms import v2
    return v2, str(torchvision.__version__)


def timm() -> Any:
    """The package ``timm``. Raises ConfigError if timm or torchvision cannot be imported."""
    with _importing("timm", "Install it: pip install timm"):
        if find_spec("timm") is None:  # said first: pip installs torchvision with timm
            raise ModuleNotFoundError("No module named 'timm'")
        torchvision()  # timm imports it
        import timm
    return timm
