"""Objects of all samples of a source, as flat arrays that all processes of a machine share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.batch import Target
from gpuaug.source.base import bounds_of
from gpuaug.source.index import share


class ObjectTable:
    """Boxes, labels and keypoints of N objects in the order of their samples.

    Args:
        counts: number of objects of each sample.
        boxes: float [N, 4], (x1, y1, x2, y2) in pixels; None: only keypoints.
        labels: int [N].
        keypoints: float [N, K, 3], or None.
        crowd: bool [N]; None: no object is a crowd.
        area: float [N]; None: not known.
        ids: int [N]; None: not known.
        sizes: int [samples, 2], (height, width) that the annotations were made for; None: not known.
    """

    def __init__(
        self,
        counts: Sequence[int] | NDArray[Any],
        *,
        boxes: NDArray[Any] | None,
        labels: NDArray[Any],
        keypoints: NDArray[Any] | None = None,
        crowd: NDArray[Any] | None = None,
        area: NDArray[Any] | None = None,
        ids: NDArray[Any] | None = None,
        sizes: NDArray[Any] | None = None,
    ) -> None:
        self.bounds = bounds_of(np.asarray(counts).tolist())
        small = np.int16 if not len(labels) or int(np.max(labels)) < 2**15 else np.int32
        crowd = None if crowd is None or not crowd.any() else crowd
        self._columns: dict[str, Tensor] = {
            name: share(torch.from_numpy(np.ascontiguousarray(values, dtype=kind)))
            for name, values, kind in (
                ("boxes", boxes, np.float32),
                ("labels", labels, small),
                ("keypoints", keypoints, np.float32),
                ("crowd", crowd, np.bool_),
                ("area", area, np.float32),
                ("ids", ids, np.int64),
            )
            if values is not None
        }
        self.sizes = None if sizes is None else share(torch.from_numpy(np.ascontiguousarray(sizes, dtype=np.int32)))

    def __len__(self) -> int:
        """Number of objects."""
        return int(self.bounds[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        sizes = 0 if self.sizes is None else self.sizes.nbytes
        return self.bounds.nbytes + sizes + sum(column.nbytes for column in self._columns.values())

    def target(self, index: int, **more: Any) -> Target:
        """The objects of sample ``index``; ``more`` are further fields of the :class:`~gpuaug.batch.Target`."""
        begin, end = self.bounds.numpy()[index : index + 2].tolist()
        columns: dict[str, Any] = {name: column.numpy()[begin:end] for name, column in self._columns.items()}
        if self.sizes is not None:
            more["size"] = tuple(self.sizes.numpy()[index].tolist())
        return Target(**columns, **more)

    def digest(self) -> str:
        """Hash of all objects."""
        hashed = hashlib.blake2b(self.bounds.numpy().data, digest_size=16)
        for name, column in self._columns.items():
            hashed.update(name.encode())
            hashed.update(column.numpy().reshape(-1).view(np.uint8).data)
        return hashed.hexdigest()
