"""Every private attribute of Kornia that gpuaug reads or resets, as they are in Kornia 0.9.0.

Kornia keeps the ranges of an operation as samplers of a generator module (``_param_generator``), and names differ
between operations. After an upgrade of Kornia, check this file first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor, nn

Range = tuple[Any, Any]  # np.float32: lowest and highest value of a sampler


def setting(op: Any, name: str) -> Any:
    """An attribute of the generator that draws an operation's parameters; None where it has no such attribute."""
    return getattr(op._param_generator, name, None)


def range_of(op: Any, sampler: str) -> Range:
    """Lowest and highest value of a sampler."""
    return _range(setting(op, sampler))


def optional_range(op: Any, sampler: str) -> Range | None:
    """The same; None where the operation's settings draw no such value."""
    return None if setting(op, sampler) is None else range_of(op, sampler)


def ranges(op: Any) -> dict[str, Range]:
    """Parameter name to range, in the order in which Kornia draws; for operations whose draws are all alike."""
    return {name: _range(sampler) for name, sampler in op._param_generator.sampler_dict.items()}


def _range(sampler: Any) -> Range:
    return np.float32(float(sampler.low)), np.float32(float(sampler.high))


def generator_values(op: Any) -> dict[str, Any]:
    """All attributes of an operation's generator, its samplers among them; {} where it draws no parameters."""
    values = {} if op._param_generator is None else dict(vars(op._param_generator))
    return values | values.get("sampler_dict", {})


def fixed_order(op: Any) -> tuple[int, ...] | None:
    """``order`` of a ColorJitter or ColorJiggle; None where the order is random, and for other operations."""
    order: tuple[int, ...] | None = getattr(op, "_fixed_order", None)
    return order


def policy_factor(operation: Any) -> str | None:
    """The parameter that has a magnitude, of an operation of a policy; None where it has none."""
    name: str | None = operation._factor_name
    return name


def policy_mapping(operation: Any) -> Callable[[Tensor], Tensor] | None:
    """Kornia's function from magnitude to parameter, without the random sign, of an operation of a policy."""
    mapping: Callable[[Tensor], Tensor] | None = getattr(operation._magnitude_fn, "fn", operation._magnitude_fn)
    return mapping


def forget(module: nn.Module) -> None:
    """Drop what a module keeps of a call: noise as large as the batch, matrices, the input of a lazy matrix."""
    state = vars(module)
    if "_params" in state:
        state["_params"] = {}
    for name in (
        "_transform_matrix", "_lazy_matrix_args", "_transform_matrix_params", "_transform_matrix_params_snapshot",
    ):  # fmt: skip
        if name in state:
            state[name] = None
