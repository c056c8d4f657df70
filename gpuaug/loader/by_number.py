"""Makes a batch or one sample from given sample numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gpuaug.errors import ConfigError, GpuaugError
from gpuaug.loader.arguments import whole_numbers
from gpuaug.loader.batch import Batch
from gpuaug.loader.faults import Faults, Policy
from gpuaug.loader.pipeline import Pipeline
from gpuaug.random.keyed import REPEATS
from gpuaug.read.reader import Reader


def fetch(
    loader: Any,
    indices: Sequence[int],
    *,
    epoch: int,
    repeats: Sequence[int] | None = None,
    mix: bool = False,
    faults: Faults | None = None,
) -> Batch:
    """See :meth:`gpuaug.Loader.fetch`. ``faults``: None means the Faults of the loader."""
    loader.pipeline.check_open()
    loader.augment.check_unchanged()
    number = whole_numbers("indices", indices)
    repeat = torch.zeros_like(number) if repeats is None else whole_numbers("repeats", repeats)
    if not len(number) or len(repeat) != len(number):
        raise ConfigError(
            "`indices` must not be empty, and `repeats` must have the same length. "
            f"Found lengths: {len(number)}, {len(repeat)}."
        )
    if int(repeat.max()) >= REPEATS:
        raise ConfigError(f"`repeats` must be whole numbers from 0 to {REPEATS - 1}. Found: {int(repeat.max())}.")
    try:
        for index in number.tolist():
            loader.source.key(index)
            # a packed source also has keys for its rows of other sizes
            if index >= (loader.source.sample_count or math.inf):
                raise IndexError("it has fewer samples")
    except IndexError as error:
        raise ConfigError(f"`indices` must be sample numbers of the source. Found: {index} ({error}).") from error
    task = number, repeat, torch.ones(len(number), dtype=torch.bool, device="cpu")
    pipeline: Pipeline = loader.pipeline
    reader = Reader(pipeline.reader.source, targets=pipeline.reader.targets)
    pipeline = replace(pipeline, reader=reader, faults=faults or pipeline.faults, mix=pipeline.mix if mix else None)
    (encoded,) = pipeline.read([task], epoch)
    pipeline.streams.follow_consumer()
    ready = pipeline.finish(pipeline.decode(pipeline.read_headers(encoded, epoch)), epoch)
    if ready is None:
        raise GpuaugError(f"none of the samples {list(indices)} could be decoded, and `faults.policy` is drop.")
    return pipeline.hand_over(ready)


def uncounted(faults: Faults, policy: Policy) -> Faults:
    """Return Faults without ``max`` and without a file, for a user who only looks at samples."""
    return Faults(policy=policy, truncated=faults.truncated)


def sample(loader: Any, index: Any) -> tuple[Any, Any]:
    try:
        number = operator.index(index)
    except TypeError as error:
        raise ConfigError(
            f"`loader[index]` needs the number of one sample. Found: {index!r:.100}. "
            "For several samples, use `loader.fetch([...])` or `loader.fetch(range(...))`."
        ) from error
    source = loader.source
    count = len(source)
    if not -count <= number < (count if source.indices is None else math.inf):
        raise IndexError(f"the source has {count} samples. Found: number {number}. Use one from 0 to {count - 1}.")
    if number < 0:
        number = count + number if source.indices is None else int(source.indices[number])
    source.key(number)  # raises IndexError for an unknown number
    batch = fetch(loader, [number], epoch=loader.epoch, faults=uncounted(loader.faults, loader.faults.policy))
    images, second = batch
    if isinstance(second, Tensor) and second.ndim == 1 and not second.is_floating_point():
        return _first(images), int(second[0])  # a class number
    return _first(images), _first(second)


def _first(value: Any) -> Any:
    if isinstance(value, list):
        return [_first(view) for view in value]
    return value[0] if isinstance(value, Tensor) else value
