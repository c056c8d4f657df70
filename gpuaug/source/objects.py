"""The objects of all samples of a source, as flat arrays that all processes of a machine share."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.batch import Target
from gpuaug.errors import SourceError
from gpuaug.source.index import Names, bounds_of, share

log = logging.getLogger("gpuaug")


class ObjectTable:
    """Boxes, labels and keypoints of N objects in the order of their samples. :class:`Target` describes the columns.

    Args:
        counts: number of objects of each sample.
        boxes: float [N, 4]; None: objects have only keypoints.
        labels: int [N].
        keypoints: float [N, K, 3].
        crowd, area, ids: [N].
        sizes: int [samples, 2], (height, width) of the annotated images; 0: not known.
        fractions: whether coordinates are fractions of the image's sides instead of pixels.
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
        fractions: bool = False,
    ) -> None:
        self._fractions = fractions
        self.num_keypoints: int | None = None if keypoints is None else keypoints.shape[1]
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

    def target(self, index: int, **more: Any) -> Target:
        """The objects of sample ``index``. ``more``: other fields of the :class:`~gpuaug.batch.Target`."""
        begin, end = self.bounds.numpy()[index : index + 2].tolist()
        columns: dict[str, Any] = {name: column.numpy()[begin:end] for name, column in self._columns.items()}
        if self.sizes is not None and all(size := self.sizes.numpy()[index].tolist()):
            more["size"] = tuple(size)
        return Target(**columns, **more, fractions=self._fractions)

    def digest(self) -> str:
        hashed = hashlib.blake2b(self.bounds.numpy().data, digest_size=16)
        for name, column in self._columns.items():
            hashed.update(name.encode())
            hashed.update(column.numpy().reshape(-1).view(np.uint8).data)
        return hashed.hexdigest()


class Damaged:
    """The samples whose objects cannot be used. Raises SourceError if all ``total`` samples are damaged.

    ``reasons`` maps numbers of damaged samples to reasons.
    """

    def __init__(self, reasons: Mapping[int, str], total: int, *, place: str) -> None:
        numbers = sorted(reasons)
        self._numbers = share(torch.from_numpy(np.array(numbers, dtype=np.int64)))
        self._reasons = Names.of([[reasons[i].encode(errors="surrogatepass") for i in numbers]])
        if numbers:
            text = f"the objects of {len(numbers)} of {total} samples cannot be used; sample {numbers[0]}: "
            text += reasons[numbers[0]]
            if len(numbers) == total:
                raise SourceError(f"{text}. Check the format of the annotations.")
            log.warning("source %s: %s", place, text)

    def reason(self, index: int) -> str | None:
        """Why the objects of sample ``index`` cannot be used; None if the sample is not damaged."""
        at = int(np.searchsorted(self._numbers.numpy(), index))
        if at == len(self._numbers) or int(self._numbers[at]) != index:
            return None
        return self._reasons[at].decode(errors="surrogatepass")
