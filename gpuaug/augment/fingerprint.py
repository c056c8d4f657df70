"""The settings of a recipe as JSON. A loader's state stores this JSON to detect and to name changed settings.

The JSON usually stays the same if a class moves to another file, or if a Kornia release changes private attributes.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Uniform

from gpuaug.augment.ops.kornia_private import fixed_order, generator_values
from gpuaug.augment.policy import OneOf, SomeOf

_NOT_SETTINGS = {*vars(nn.Module()), "device", "dtype"}
_LARGEST_LIST = 100  # elements; a larger tensor is stored as a hash


def settings(value: Any) -> Any:
    """Convert an object and its settings to JSON."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, int | float | np.number):
        number = np.asarray(value).item()
        if isinstance(number, float) and not math.isfinite(number):
            return str(number)
        return int(number) if number == int(number) else number  # 1 and 1.0 are the same setting
    if isinstance(value, Tensor | np.ndarray):
        return _array(value)
    if isinstance(value, OneOf | SomeOf):
        ops = [{"name": k, **settings(op)} for k, op in value.ops.items() if op is not None]
        return {"class": _public_name(type(value)), **settings(vars(value)), "ops": ops}
    if isinstance(value, Mapping):
        return {str(k): settings(v) for k, v in value.items()}
    if isinstance(value, Sequence):  # also the lists of a Hydra configuration
        return [settings(v) for v in value]
    if isinstance(value, partial):
        return [settings(v) for v in (value.func, value.args, value.keywords)]
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return _public_name(value)
    if isinstance(value, Uniform):
        return [settings(value.low), settings(value.high)]
    kind: type = value.__class__
    attributes = dict(vars(value)) if hasattr(value, "__dict__") else {}
    if isinstance(value, nn.Module):
        attributes = {k: v for k, v in attributes.items() if k not in _NOT_SETTINGS}
        attributes |= value._parameters | value._buffers | value._modules
    kornias = [k for k in kind.__mro__ if k.__module__.startswith("kornia.")]
    if kornias or kind.__module__.startswith(("gpuaug.", "torch.")):
        attributes = {k: v for k, v in attributes.items() if not k.startswith("_")}
    if kornias:
        attributes = _of_kornia(value, kornias[0], attributes)
    return {"class": _public_name(kind), **{k: settings(attributes[k]) for k in sorted(attributes)}}


def differences(a: Any, b: Any, where: str = "") -> list[tuple[str, Any, Any]]:
    """Differences of two JSON values: (path, value in a, value in b). A path shows a list entry's name or position."""
    if a == b:  # in every call of a recipe
        return []
    if isinstance(a, dict) and isinstance(b, dict):
        names = [*a, *(name for name in b if name not in a)]
        pairs = [(f"{where}.{name}" if where else name, a.get(name), b.get(name)) for name in names]
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = [
            (f"{where}.{x.get('name', k) if isinstance(x, dict) else k}", x, y)
            for k, (x, y) in enumerate(zip(a, b, strict=True))
        ]
    else:
        return [(where or "value", a, b)]
    return [difference for path, x, y in pairs for difference in differences(x, y, path)]


@cache
def _parameters(kind: type) -> Mapping[str, Any]:
    return inspect.signature(kind).parameters


def _of_kornia(op: Any, kind: type, public: dict[str, Any]) -> dict[str, Any]:
    """Collect from ``op`` the constructor arguments of Kornia's class ``kind``, and the random ranges."""
    import kornia.augmentation as K

    if not isinstance(op, K.AugmentationBase2D | K.RandomJigsaw):
        return public
    names = _parameters(kind)
    order = {"order": fixed_order(op)} if "order" in names else {}
    ranges = {k: v for k, v in generator_values(op).items() if k in names or isinstance(v, Distribution)}
    flags = {k: v for k, v in op.flags.items() if k in names}
    if kind is type(op):  # Kornia's own class; a subclass keeps all public attributes
        public = {k: v for k, v in public.items() if k in names or k in op._buffers}
    ranges |= {k: v for k, v in vars(op).items() if isinstance(v, Distribution)}  # of RandomThinPlateSpline
    return ranges | order | flags | public


def _array(value: Tensor | np.ndarray[Any, Any]) -> Any:
    tensor = torch.as_tensor(value, device="cpu").detach()
    if tensor.numel() <= _LARGEST_LIST:
        return settings(tensor.tolist())
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype), list(tensor.shape), hashlib.blake2b(data, digest_size=8).hexdigest()]


def _public_name(value: Any) -> str:
    """The shortest import path of a class or function, such as ``gpuaug.Resize``."""
    parts, name = value.__module__.split("."), value.__qualname__
    for length in range(1, len(parts)):
        package = ".".join(parts[:length])
        if getattr(sys.modules.get(package), name, None) is value:
            return f"{package}.{name}"
    return f"{value.__module__}.{name}"
