"""Makes sources of map-style objects, of torch's Subsets and of Hugging Face's Datasets."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Subset

from gpuaug.errors import SourceError
from gpuaug.source.base import Source as Source
from gpuaug.source.base import has_method
from gpuaug.source.huggingface import DatasetSource, is_dataset
from gpuaug.source.index import share

log = logging.getLogger("gpuaug")


def active_numbers(source: Source) -> NDArray[np.int64]:
    """Ascending numbers of the active samples of a source: int64 ``[len]``."""
    return np.arange(len(source), dtype=np.int64) if source.indices is None else source.indices.numpy()


def numbers_by_position(source: Source) -> NDArray[np.int64]:
    """Numbers of the active samples, int64 ``[len]``: of a torch Subset in its own order, else ascending."""
    return active_numbers(source) if source.positions is None else source.positions.numpy()


def adapt(source: Any) -> Source:
    """Make a source of a map-style object that returns ``(bytes, label)``. A complete source is returned unchanged.

    In a ``torch.utils.data.Subset``, samples keep their numbers in the full source.

    Raises:
        SourceError: if the object has no length or cannot be indexed, or a ConcatDataset has a part that leaves out
            samples.
    """
    if isinstance(source, Subset):
        return _subset(source)
    if isinstance(source, Source):
        return source
    if isinstance(source, ConcatDataset):
        _check_parts(source)
    if is_dataset(source):
        return DatasetSource(source)
    given = f"Found: {source!r:.200} ({type(source).__name__})."
    if not hasattr(source, "__getitem__") or isinstance(source, str | bytes):
        raise SourceError(f"a source must have `source[i] -> (bytes, label)`. Iterables cannot be shuffled. {given}")
    try:
        length = len(source)
    except (TypeError, NotImplementedError) as error:
        raise SourceError(f"a source must have a length, `len(source)`. {given}") from error
    if isinstance(source, Mapping) and set(source) != set(range(length)):
        raise SourceError(f"if a source is a mapping, its keys must be the numbers 0 .. {length - 1}. {given}")
    if not length:
        raise SourceError(f"the source is empty: len(source) is 0. {given}")
    if not has_method(source, "key") and not has_method(source, "digest"):
        log.info(
            "source %s has neither `key(i)` nor `digest()`. Samples are named by their numbers, and a loader's state "
            "cannot tell this source from another source of %d samples. Add one of the two methods.",
            type(source).__name__, length,
        )  # fmt: skip
    return Source(source)


def _subset(subset: Subset[Any]) -> Source:
    """Adapt a Subset. The positions in ``subset.indices`` count only the active samples of its dataset."""
    base = adapt(subset.dataset)
    positions = np.asarray(subset.indices, dtype=np.int64).reshape(-1)
    if not len(positions) or positions.min() < 0 or positions.max() >= len(base):
        raise SourceError(f"a Subset must have at least one position, all in 0 .. {len(base) - 1}. Found: {positions}.")
    if len(np.unique(positions)) < len(positions):
        raise SourceError(
            "a Subset must not repeat a position. To repeat samples, use `order=weighted` or a list of positions."
        )
    numbers = share(torch.from_numpy(numbers_by_position(base)[positions]))
    return Source(base if base.wrapped is None else base.wrapped, indices=numbers)


def _check_parts(dataset: Any) -> None:
    """Raise SourceError if torch would read samples that ``subset`` or ``exclude`` of a source leaves out."""
    for part in dataset.datasets if isinstance(dataset, ConcatDataset) else [dataset.dataset]:
        if isinstance(part, ConcatDataset | Subset):
            _check_parts(part)
        elif isinstance(part, Source) and part.indices is not None:
            raise SourceError(
                "a ConcatDataset reads samples by position, so its sources cannot leave out samples. Found: "
                f"{part!r:.200}, {len(part)} samples in use. Remove `subset` and `exclude` of the source, and use a "
                "torch Subset of the ConcatDataset."
            )
