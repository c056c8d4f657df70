"""Turns encoded images into augmented batches on the training device.

``__init__.pyi`` lists the public names. They are imported on first use, so ``import gpuaug`` is fast. Every constructor
and method raises :class:`ConfigError` for an invalid argument. All other errors are named in docstrings. Every error is
a :class:`GpuaugError`.
"""

import re
from importlib import import_module
from pkgutil import get_data
from typing import Any

__version__ = "0.1.0"


def _public() -> dict[str, tuple[str, str]]:
    names, page = {}, ""
    text = (get_data(__name__, "__init__.pyi") or b"").decode()
    for heading, module, name in re.findall(r"^(?:# (\w+)|from (\S+) import (\w+) as \w+)$", text, re.MULTILINE):
        page = heading or page
        if name:
            names[name] = module, page
    return names


PUBLIC = _public()  # name: its module, and its page in docs/reference
__all__ = sorted(PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'gpuaug' has no attribute {name!r}")
    value = getattr(import_module(PUBLIC[name][0]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
