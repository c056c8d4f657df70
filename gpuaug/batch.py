"""What travels between the stages: encoded bytes, boxes to decode, images and labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Images = Tensor | list[Tensor]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Interpolation = Literal["bilinear", "bicubic"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One sample of a batch that could not be read or decoded.

    ``row`` is its place in the batch, ``size`` the number of encoded bytes that were there, ``head`` the first of them.
    """

    row: int
    stage: str
    reason: str
    size: int = 0
    head: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedBatch:
    """The encoded images of a batch, packed one after the other; made by a worker, all tensors on the CPU.

    One buffer, so that a batch is one shared-memory segment instead of one per image.

    Attributes:
        data: uint8 ``[bytes of all images]``.
        offsets: int64 ``[B + 1]``; image i is ``data[offsets[i]:offsets[i + 1]]``.
        labels: int64 ``[B]``, float32 ``[B, K]``, or None.
        indices: int64 ``[B]``, numbers in the source.
        repeats: int64 ``[B]``, how often this epoch yielded the index before.
        valid: bool ``[B]``; False for a repeated sample that only fills the last batch.
        faults: samples that could not be read; their image has no bytes.
        views: the images one by one where they stand, uint8 ``[n]`` out of mapped files, read-only; ``data`` is then
            empty, and ``offsets`` only say how long they are. Empty where the images are in ``data``.
    """

    data: Tensor
    offsets: Tensor
    labels: Tensor | None
    indices: Tensor
    repeats: Tensor
    valid: Tensor
    faults: tuple[Fault, ...] = ()
    views: tuple[NDArray[np.uint8], ...] = ()

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def images(self) -> list[NDArray[np.uint8]]:
        """Bytes of every image, uint8 ``[n]``, where they are."""
        if self.views:
            return list(self.views)
        data, offsets = self.data.numpy(), self.offsets.numpy()
        return [data[a:b] for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]

    def encoded(self, row: int) -> Tensor:
        """Bytes of the image in a ``row``: uint8 ``[n]``, a view into ``data``, or a copy of the view."""
        if self.views:
            return torch.from_numpy(self.views[row].copy())
        return self.data[self.offsets[row] : self.offsets[row + 1]]


@dataclass(frozen=True)
class Boxes:
    """What one view reads of each image and where it goes; rows are samples, pixels are EXIF-oriented.

    Attributes:
        box: int32 [B, 4], (top, left, height, width) of what is read; inside the image, height and width at least 1.
        resized: int32 [B, 2], (h, w) the box is resized to.
        offset: int32 [B, 2], (y, x) where the resized box's corner lands in the canvas; negative: cropped away.
        size: (H, W) of the canvas.
        interpolation: ``bilinear`` or ``bicubic``, both antialiased.
        fill: 0..255, value of the canvas where the resized box does not reach.
    """

    box: Int32
    resized: Int32
    offset: Int32
    size: tuple[int, int]
    interpolation: Interpolation = "bilinear"
    fill: int = 0

    def __len__(self) -> int:
        return len(self.box)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Augmented images and labels on the device; iterating gives exactly ``(images, labels)``.

    Attributes:
        images: float ``[B, 3, H, W]``, or a list of them where the recipe has several views (in the order of the
            mapping, copies next to each other).
        labels: int64 ``[B]``, float ``[B, C]`` (after mix) or ``[B, K]`` (multi-label), None where the source has none.
        indices: int64 ``[B]``, CPU: the samples' numbers in the source.
        valid: bool ``[B]``, CPU: False for a sample that is blank or only fills the batch.
        key_of: number in the source to path or name, for ``keys``.

    >>> numbers, labels = torch.tensor([0, 3]), torch.tensor([5, 6])
    >>> batch = Batch(images=torch.zeros(2, 3, 8, 8), labels=labels, indices=numbers, valid=numbers >= 0)
    >>> images, labels = batch
    >>> batch.keys
    ['0', '3']
    """

    images: Images
    labels: Tensor | None
    indices: Tensor
    valid: Tensor
    key_of: Callable[[int], str] = field(default=str, repr=False)

    def __iter__(self) -> Iterator[Any]:
        yield self.images
        yield self.labels

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def keys(self) -> list[str]:
        """Relative paths or names of the samples."""
        return [self.key_of(i) for i in self.indices.tolist()]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch with images and labels on ``device``; indices and valid stay on the CPU.

        ``non_blocking`` is torch's: from pinned memory the copy does not wait.
        """

        def move(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=non_blocking)

        images = [move(x) for x in self.images] if isinstance(self.images, list) else move(self.images)
        return replace(self, images=images, labels=None if self.labels is None else move(self.labels))
