"""Image files with objects, for sources that parse all annotations at the start."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuaug.batch import Target
from gpuaug.errors import GpuaugError, SourceError
from gpuaug.source.files import FileSource
from gpuaug.source.index import Names, share
from gpuaug.source.objects import ObjectTable
from gpuaug.source.paths import redact

log = logging.getLogger("gpuaug")


class AnnotatedSource(FileSource):
    """Image files with one :class:`Target` each. A sample with bad annotations is a fault when it is read.

    A subclass also sets ``_objects`` and ``_files``, and calls :meth:`_set_damaged`.
    """

    target_kinds: frozenset[str] = frozenset({"boxes"})
    num_keypoints: int | None = None
    flip_pairs: tuple[int, ...] | None = None
    _objects: ObjectTable
    _damaged: Tensor  # int64, ascending numbers of the samples with bad annotations
    _reasons: Names  # the reason for each of them

    def __repr__(self) -> str:
        counts = np.diff(self._objects.bounds.numpy())
        total = counts.sum() if self.indices is None else counts[self.indices.numpy()].sum()
        named = "" if self.classes is None else f", {len(self.classes)} classes"
        return f"{type(self).__name__}({redact(self.root)!r}: {len(self)} images, {total} objects{named})"

    def objects_digest(self) -> str:
        """Hash of all objects."""
        return self._objects.digest()

    def _set_damaged(self, reasons: Mapping[int, str]) -> None:
        """Keep the reasons by sample number, and log their count. SourceError if no sample is left."""
        numbers = sorted(reasons)
        self._damaged = share(torch.from_numpy(np.array(numbers, dtype=np.int64)))
        self._reasons = Names.of([[reasons[i].encode(errors="surrogateescape") for i in numbers]])
        if not numbers:
            return
        text = f"the annotations of {len(numbers)} of {len(self._names)} images cannot be used; {reasons[numbers[0]]}"
        if len(numbers) == len(self._names):
            raise SourceError(f"{text}. Check the format of the annotations.")
        log.warning("source %s: %s", redact(self.root), text)

    def _read(self, numbers: Sequence[int]) -> list[Any]:
        found = {i: reason for i in numbers if (reason := self._reason(i)) is not None}
        usable = [i for i in numbers if i not in found]
        results = iter(super()._read(usable) if usable else ())
        return [GpuaugError(found[i]) if i in found else next(results) for i in numbers]

    def _reason(self, index: int) -> str | None:
        at = int(np.searchsorted(self._damaged.numpy(), index))
        if at == len(self._damaged) or int(self._damaged[at]) != index:
            return None
        return self._reasons[at].decode(errors="surrogateescape")

    def _label_of(self, index: int) -> Target:
        return self._objects.target(index)
