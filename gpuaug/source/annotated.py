"""Image files with objects, for sources that parse all annotations at the start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuaug.errors import GpuaugError
from gpuaug.source.files import FileSource
from gpuaug.source.objects import Damaged, ObjectTable
from gpuaug.source.paths import redact


class AnnotatedSource(FileSource):
    """Image files with one :class:`~gpuaug.Target` each. A sample with bad annotations is a fault when it is read.

    A subclass also sets ``_objects`` and ``_damaged``.
    """

    target_kinds = frozenset({"boxes"})
    _objects: ObjectTable
    _damaged: Damaged

    def __repr__(self) -> str:
        counts = np.diff(self._objects.bounds.numpy())
        total = counts.sum() if self.indices is None else counts[self.indices.numpy()].sum()
        named = "" if self.classes is None else f", {len(self.classes)} classes"
        return f"{type(self).__name__}({redact(self.root)!r}: {len(self)} images, {total} objects{named})"

    def _read(self, numbers: Sequence[int]) -> list[Any]:
        found = {i: reason for i in numbers if (reason := self._damaged.reason(i)) is not None}
        usable = [i for i in numbers if i not in found]
        results = iter(super()._read(usable) if usable else ())
        return [GpuaugError(found[i]) if i in found else next(results) for i in numbers]
