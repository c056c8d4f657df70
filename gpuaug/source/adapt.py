"""The interface of a source, and an adapter from any map-style object to this interface."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from gpuaug.errors import SourceError
from gpuaug.source.base import Source as Source
from gpuaug.source.huggingface import DatasetSource, is_dataset
from gpuaug.source.index import Names, share

log = logging.getLogger("gpuaug")

# members that a MapSource takes from its object, if the object has them
OPTIONAL = tuple(name for name in vars(Source) if name[0] != "_" and name not in ("key", "digest", "labels"))


class MapSource(Source):
    """Makes a source from an object with ``len(object)`` and ``object[i] -> (bytes, label)``.

    ``object[i]`` may also be ``(bytes, label, extra)``. The source uses these attributes of the object: ``key``,
    ``digest``, ``labels`` (or torchvision's ``targets``), ``classes``, ``class_to_idx`` and ``num_classes``.

    Args:
        samples: the object.
        indices: int64 ``[len]``, numbers of the samples to use, in any order; None: all.

    Attributes:
        positions: ``indices`` in the given order. Positions of samplers and weights refer to it.

    >>> source = MapSource([(b"...", 0), (b"...", 1)])
    >>> source[1], source.key(1)
    ((b'...', 1), '1')
    """

    def __init__(self, samples: Any, *, indices: Tensor | None = None) -> None:
        for name in OPTIONAL:
            if hasattr(samples, name):
                setattr(self, name, getattr(samples, name))
        self.samples, self.positions = samples, indices
        self.indices = None if indices is None else share(indices.sort().values)
        labels = getattr(samples, "labels", None)
        self.labels = _labels(getattr(samples, "targets", None) if labels is None else labels, len(samples))
        self.image_ids = _labels(self.image_ids, len(samples))
        if self.num_classes is None and self.classes is not None:
            self.num_classes = len(self.classes)

    def __len__(self) -> int:
        return len(self.samples) if self.indices is None else len(self.indices)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return self.samples[index]

    def __repr__(self) -> str:
        return f"MapSource({type(self.samples).__name__}: {len(self)} samples)"

    def key(self, index: int) -> str:
        """The object's ``key(index)``; the number of the sample if the object has no ``key``.

        Raises:
            IndexError: the object has no ``key`` and no such sample.
        """
        own = getattr(self.samples, "key", None)
        if callable(own):
            return str(own(index))
        if not 0 <= (number := operator.index(index)) < len(self.samples):
            raise IndexError(f"the source has {len(self.samples)} samples. Found: number {number}.")
        return str(number)

    def digest(self) -> str:
        """The object's digest, or a hash of the sorted keys of all samples."""
        own = getattr(self.samples, "digest", None)
        if callable(own):
            return str(own())
        return Names.of([[os.fsencode(self.key(i)) for i in range(len(self.samples))]]).digest()


def active_numbers(source: Any) -> NDArray[np.int64]:
    """Ascending numbers of the active samples of a source, or of any object with a length: int64 ``[len]``."""
    indices = getattr(source, "indices", None)
    return np.arange(len(source), dtype=np.int64) if indices is None else indices.numpy()


def numbers_by_position(source: Any) -> NDArray[np.int64]:
    """Numbers of the active samples, int64 ``[len]``: of a torch Subset in its own order, else ascending."""
    positions = source.positions if isinstance(source, MapSource) else None
    return active_numbers(source) if positions is None else positions.numpy()


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
    if not callable(getattr(source, "key", None)) and not callable(getattr(source, "digest", None)):
        log.info(
            "source %s has neither `key(i)` nor `digest()`. Samples are named by their numbers, and a loader's state "
            "cannot tell this source from another source of %d samples. Add one of the two methods.",
            type(source).__name__, length,
        )  # fmt: skip
    return MapSource(source)


def _subset(subset: Subset[Any]) -> Source:
    """Adapt a Subset. The positions in ``subset.indices`` count only the active samples of its dataset."""
    base = adapt(subset.dataset)
    positions = np.asarray(subset.indices, dtype=np.int64).reshape(-1)
    if not len(positions) or positions.min() < 0 or positions.max() >= len(base):
        raise SourceError(f"a Subset must have at least one position, all in 0 .. {len(base) - 1}. Found: {positions}.")
    if len(np.unique(positions)) < len(positions):
        raise SourceError("a Subset must not repeat a position. To repeat samples, use `order=weighted` or a Sampler.")
    numbers = share(torch.from_numpy(numbers_by_position(base)[positions]))
    return MapSource(base.samples if isinstance(base, MapSource) else base, indices=numbers)


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


def _labels(labels: Any, length: int) -> Tensor | None:
    """Labels or ids by sample number as int64; None if a sample's label is not one integer."""
    try:
        values = np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels)
    except (TypeError, ValueError):
        return None
    if values.ndim != 1 or len(values) < length or values.dtype.kind not in "iu":
        return None
    return share(torch.from_numpy(values.astype(np.int64)))
