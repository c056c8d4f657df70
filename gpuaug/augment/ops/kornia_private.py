"""All access to private attributes of Kornia 0.9.0. After an upgrade of Kornia, check this file first.

Kornia stores an operation's ranges as samplers in a generator (``_param_generator``).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

Range = tuple[Any, Any]  # lowest and highest value of a sampler, both np.float32


def setting(op: Any, name: str) -> Any:
    """An attribute of an operation's generator; None if the attribute does not exist."""
    return getattr(op._param_generator, name, None)


def range_of(op: Any, sampler: str) -> Any:
    """The range of a sampler; None if the operation has no such sampler."""
    return None if setting(op, sampler) is None else _range(setting(op, sampler))


def ranges(op: Any) -> dict[str, Range]:
    """The range of each parameter in Kornia's drawing order; {} for a generator without ``sampler_dict``."""
    return {name: _range(sampler) for name, sampler in (setting(op, "sampler_dict") or {}).items()}


def _range(sampler: Any) -> Range:
    return np.float32(float(sampler.low)), np.float32(float(sampler.high))


class _Given:
    """A sampler that takes its values from given uniforms."""

    def __init__(self, sampler: Any, columns: Iterator[Tensor]) -> None:
        self.low, self.high, self.columns = sampler.low, sampler.high, columns

    def rsample(self, shape: Any) -> Tensor:
        """The next uniforms, scaled as in torch's Uniform."""
        return self.low + next(self.columns).reshape(shape) * (self.high - self.low)


def generated(op: Any, u: Tensor, size: tuple[int, int], samplers: Sequence[str]) -> dict[str, Tensor]:
    """What Kornia's generator makes from uniforms float32 [B, n], one column per draw. Fields have one channel."""
    generator, columns = copy.copy(op._param_generator), iter(u.unbind(1))
    for name in samplers:
        setattr(generator, name, _Given(getattr(generator, name), columns))
    made: dict[str, Tensor] = generator.forward((len(u), 1, *size))
    return made


def generator_values(op: Any) -> dict[str, Any]:
    """All attributes and samplers of an operation's generator; {} if the operation draws no parameters."""
    values = {} if op._param_generator is None else dict(vars(op._param_generator))
    return values | values.get("sampler_dict", {})


def fixed_order(op: Any) -> Any:
    """The ``order`` of a ColorJitter or ColorJiggle; None if the order is random or ``op`` is another operation."""
    return getattr(op, "_fixed_order", None)


def forget(module: nn.Module) -> None:
    """Free the tensors that a module keeps after a call, such as noise as large as the batch."""
    state = vars(module)
    names = ("_transform_matrix", "_lazy_matrix_args", "_transform_matrix_params", "_transform_matrix_params_snapshot")
    state.update({name: None for name in names if name in state} | ({"_params": {}} if "_params" in state else {}))
