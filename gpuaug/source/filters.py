"""What sources have in common that keep a list of their samples: numbers, keys, labels, and which ones are active."""

from __future__ import annotations

import json
import logging
import operator
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.errors import ConfigError, SourceError
from gpuaug.source.classes import class_mapping, encode, some
from gpuaug.source.index import outside, read_numbers, share
from gpuaug.source.remote.storage import Range, Storage, is_url, open_text, shown

log = logging.getLogger("gpuaug")

Classes = Sequence[str] | Mapping[str, int] | str | os.PathLike[str] | None
Subset = int | float | Sequence[int] | Tensor | str | os.PathLike[str] | None


class Listed:
    """Samples by number, their keys and labels in tensors that all processes share.

    A subclass sets ``root``, ``_storage`` and ``_names``, calls :meth:`_label` and :meth:`_activate`, and says where
    the bytes of a sample are.
    """

    root: str
    indices: Tensor | None = None
    labels: Tensor | None = None
    classes: list[str] | None = None
    class_to_idx: dict[str, int] | None = None
    _names: Any  # Names, or what has their methods
    _storage: Storage
    _targets: Tensor | None = None  # float32 [N] or [N, K]: labels that are no classes
    _digest: str | None = None

    def __len__(self) -> int:
        return len(self._names) if self.indices is None else len(self.indices)

    def __getitem__(self, index: int) -> tuple[bytes, Any]:
        """Encoded bytes of the sample and its label.

        Raises:
            OSError, GpuaugError: if they cannot be read; the fault of this sample.
            IndexError: if there never was a sample of this number.
        """
        (item,) = self._items([self._check(index)])
        if isinstance(item, Exception):
            raise item
        return item

    def __iter__(self) -> Iterator[tuple[bytes, Any]]:
        return (self[i] for i in (range(len(self)) if self.indices is None else self.indices.tolist()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown(self.root)!r}: {len(self)} images, {self.num_classes} classes)"

    @property
    def num_classes(self) -> int | None:
        """Number of classes or targets, with or without images here; None without them."""
        if self.classes is not None:
            return len(self.classes)
        if self._targets is not None:
            return self._targets.shape[1] if self._targets.ndim == 2 else None
        return None if self.labels is None else int(self.labels.max()) + 1

    @property
    def read_many(self) -> Callable[[Sequence[int]], list[Any]] | None:
        """``read_many(numbers)``: bytes and label, or the exception, of each sample, asked for at the same time.

        None for local files, which are read one by one.
        """
        return self._items if is_url(self.root) else None

    @property
    def expect(self) -> Callable[[Sequence[int]], None] | None:
        """``expect(numbers)`` announces what the ``read_many`` after the next asks for, so that it begins meanwhile.

        None for local files, which gain nothing by it.
        """
        return self._expect if is_url(self.root) and type(self)._range is not Listed._range else None

    def _expect(self, numbers: Sequence[int]) -> None:
        self._storage.expect([self._range(i) for i in numbers])

    def key(self, index: int) -> str:
        """Path of sample number ``index`` below ``root``, with ``/``.

        Bytes that are not UTF-8 stand as Python's ``surrogateescape`` writes them.
        """
        return os.fsdecode(self._names[self._check(index)])

    def label(self, index: int) -> Any:
        """Label of sample number ``index`` (int, float, floats), without reading its bytes; None without labels."""
        return self._label_of(self._check(index))

    def digest(self) -> str:
        """Hash of the sorted keys of all samples; neither ``root`` nor ``subset`` nor ``exclude`` changes it."""
        if self._digest is None:
            self._digest = self._names.digest()
        return self._digest

    def _items(self, numbers: Sequence[int]) -> list[Any]:
        found = self._storage.read([self._range(i) for i in numbers])
        return [
            item if isinstance(item, Exception) else (item, self._label_of(i))
            for i, item in zip(numbers, found, strict=True)
        ]

    def _range(self, index: int) -> Range:
        raise NotImplementedError

    def _label_of(self, index: int) -> Any:
        if self.labels is not None:
            return int(self.labels.numpy()[index])
        return None if self._targets is None else self._targets.numpy()[index].tolist()

    def _check(self, index: int) -> int:
        index = operator.index(index)
        if not 0 <= index < len(self._names):
            raise IndexError(f"sample numbers of {shown(self.root)!r} are 0 .. {len(self._names) - 1}. Found: {index}.")
        return index

    def _label(
        self, values: Sequence[Any] | NDArray[Any], *, classes: Classes, names: Sequence[str] | None = None
    ) -> None:
        """Take the labels of all samples; ``names`` are classes that the data itself names, in order."""
        mapping = None if classes is None else class_mapping(classes)
        if mapping is not None and names is not None and list(mapping) != list(names):
            if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iu":
                raise SourceError(
                    f"`source.classes` differs from the names of the labels in {shown(self.root)!r}: "
                    f"{some(list(names))}. Leave it out."
                )
            if beyond := outside(values, len(names)):
                raise SourceError(
                    f"labels in {shown(self.root)!r} must be 0 .. {len(names) - 1}, as it names {len(names)} classes. "
                    f"Found: {beyond}."
                )
            values = [names[i] for i in values.tolist()]  # by name: the other run counted them differently
        elif mapping is None and names is not None:
            mapping = {name: label for label, name in enumerate(names)}
        found, known = encode(values, classes=mapping, place=shown(self.root))
        tensor = share(torch.from_numpy(found))
        if found.dtype == np.int64:
            self.labels = tensor
        else:
            self._targets = tensor
        if known is not None:
            self.class_to_idx = {name: label for label, name in enumerate(known)}
            self.classes = known

    def _activate(self, subset: Subset, exclude: str | os.PathLike[str] | None, *, began: float) -> None:
        """Choose the active samples, and say what was found."""
        self.indices = active(self._names, subset, exclude, root=self.root)
        found = f"{len(self)} images" if self.indices is None else f"{len(self)} of {len(self._names)} images"
        found += "" if self.classes is None else f", {len(self.classes)} classes"
        log.info("source %s: %s, listed in %.1f s", shown(self.root), found, time.monotonic() - began)


def active(
    names: Any,
    subset: Subset,
    exclude: str | os.PathLike[str] | None,
    *,
    root: str,
    numbers: NDArray[np.int64] | None = None,
) -> Tensor | None:
    """Numbers of the samples that ``subset`` takes and ``exclude`` leaves, int64, ascending; None: all.

    Args:
        names: keys of the samples.
        subset, exclude: what the user asked for.
        root: place of the source, for messages.
        numbers: of the samples, ascending; None: 0 .. len(names) - 1.

    Raises:
        SourceError: if they name other samples, or leave none.
    """
    known = np.arange(len(names)) if numbers is None else numbers
    chosen = known if subset is None else _subset(subset, known)
    if exclude is not None:
        keys = _excluded(exclude)
        out = known[[place for place, name in enumerate(names) if name in keys]]
        if len(out) < len(keys):
            log.warning(
                "source %s: %d of %d keys in `source.exclude` are not here",
                shown(root),
                len(keys) - len(out),
                len(keys),
            )
        left = chosen[~np.isin(chosen, out)]
        log.info("source %s: %d samples left out by %s", shown(root), len(chosen) - len(left), os.fspath(exclude))
        if not len(left):
            raise SourceError(f"`source.exclude` leaves no samples: {os.fspath(exclude)!r} names all {len(chosen)}.")
        chosen = left
    return None if len(chosen) == len(known) else share(torch.from_numpy(chosen))


def extensions_of(extensions: Sequence[str]) -> tuple[str, ...]:
    """What names must end in: lower case, with a dot."""
    several = isinstance(extensions, Iterable) and not isinstance(extensions, str | bytes | Tensor | np.ndarray)
    if not several or not extensions or not all(isinstance(x, str) and x for x in extensions):
        raise ConfigError(f"`source.extensions` must be a list such as ['.jpg', '.png']. Found: {extensions!r}.")
    return tuple(x.lower() if x.startswith(".") else f".{x.lower()}" for x in extensions)


def _subset(subset: Any, known: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ascending sample numbers, of the ``known`` ones, for what a user gives as ``source.subset``."""
    total = len(known)
    if isinstance(subset, bool):
        raise SourceError(f"`source.subset` must be a count, a fraction, or a FILE of sample numbers. Found: {subset}.")
    if isinstance(subset, float):
        if not 0 < subset <= 1:
            raise SourceError(f"a fraction in `source.subset` must satisfy 0 < fraction <= 1. Found: {subset}.")
        subset = max(1, round(subset * total))
    if isinstance(subset, int):
        if not 1 <= subset <= total:
            raise SourceError(f"a count in `source.subset` must lie in 1 .. {total}, what there is. Found: {subset}.")
        return known[np.arange(subset, dtype=np.int64) * total // subset]
    if isinstance(subset, str | os.PathLike):
        numbers = read_numbers(subset, key="source.subset", dtype=np.int64)
    else:
        try:
            numbers = np.asarray(subset)
        except (TypeError, ValueError, RuntimeError) as error:
            raise SourceError(f"`source.subset` must hold sample numbers. Found: {subset!r:.200}.") from error
        if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in "iu"):
            raise SourceError(f"`source.subset` must hold sample numbers. Found: {numbers.dtype} {numbers.shape}.")
    ascending = np.unique(numbers).astype(np.int64)
    if not len(ascending) or len(ascending) < len(numbers) or not np.isin(ascending, known).all():
        found = f"{len(numbers)} numbers, {len(ascending)} of them distinct"
        if len(ascending):
            found += f", from {ascending[0]} to {ascending[-1]}"
        gaps = "" if known[-1] == total - 1 else f", those {total} that are stored"
        raise SourceError(
            f"sample numbers in `source.subset` must be {known[0]} .. {known[-1]}{gaps}, each once. Found: {found}."
        )
    return ascending


def _excluded(file: str | os.PathLike[str]) -> set[bytes]:
    """Keys in JSON lines; a last line without its end, cut by a killed run, names nobody."""
    if not isinstance(file, str | os.PathLike):
        raise SourceError(f"`source.exclude` must be a FILE, as `faults.file` writes it. Found: {file!r:.200}.")
    path = os.path.expanduser(os.fspath(file))
    keys = set()
    try:
        with open_text(path) as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    keys.add(os.fsencode(json.loads(line)["key"]))
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    if not line.endswith("\n"):
                        log.warning("source: the last line of %s is cut off; it excludes nothing", path)
                        continue
                    raise ValueError(f"line {number}: {line.strip()[:100]!r}") from error
    except (OSError, ValueError) as error:
        raise SourceError(
            f'`source.exclude` must be a FILE of JSON lines with "key", as `faults.file` holds them. '
            f"Found: {path!r} ({error})."
        ) from error
    return keys
