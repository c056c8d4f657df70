"""What a recipe was made with, as small JSON: for states, which must tell one recipe from another, and say where."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gpuaug.augment.policy import OneOf

_NOT_SETTINGS = {
    *vars(nn.Module()), "device", "dtype", "_params", "_transform_matrix", "_transform_matrices", "_lazy_matrix_args",
    "_transform_matrix_params", "_transform_matrix_params_snapshot",
}  # fmt: skip


def named(ops: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Operations in their sequence: name, class, the settings a person would read, and a hash of all of them."""
    found = []
    for name, op in ops.items():
        if op is None:
            continue
        whole = settings(op)
        seen = {
            k: v for k, v in whole.items() if k == "class" or (k[0] != "_" and isinstance(v, int | float | str | list))
        }
        text = json.dumps(whole, sort_keys=True)
        short = {k: v for k, v in seen.items() if len(json.dumps(v)) <= 100}
        found.append({"name": name, **short, "digest": hashlib.blake2b(text.encode(), digest_size=8).hexdigest()})
    return found


def settings(value: Any) -> Any:
    """What an object was made with, as JSON: classes by name, tensors and ranges by value; nothing that calls leave."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, int | float | np.number):
        number = value.item() if isinstance(value, np.number) else value
        if isinstance(number, float) and not math.isfinite(number):
            return str(number)
        return int(number) if number == int(number) else number  # 1 and 1.0 are one setting
    if isinstance(value, Tensor | np.ndarray):
        return settings(value.tolist())
    if isinstance(value, OneOf):
        return {"class": "gpuaug.OneOf", "ops": named(value.ops), "p": settings(value.p)}  # the order counts
    if isinstance(value, Mapping):
        return {str(k): settings(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [settings(v) for v in value]
    kind = value if isinstance(value, type) else getattr(value, "__class__", type(value))
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{value.__module__}.{value.__qualname__}"
    name = f"{kind.__module__}.{kind.__qualname__}"
    held = dict(vars(value)) if hasattr(value, "__dict__") else {}
    if isinstance(value, nn.Module):
        held = {k: v for k, v in held.items() if k not in _NOT_SETTINGS}
        held |= value._parameters | value._buffers | value._modules
    elif isinstance(value, torch.distributions.Distribution):
        held = {k: v for k, v in held.items() if not k.startswith("_")}
    return {"class": name, **{k: settings(held[k]) for k in sorted(held)}}
