"""The interface of a source, as the later stages use it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Source(Protocol):
    """A complete source: what :func:`~gpuaug.source.adapt` returns, and what the later stages rely on.

    Attributes:
        indices: int64 ``[len]``, ascending numbers of the active samples; None: 0 .. len - 1.
        labels: int64 ``[N]`` by sample number; None if there are no labels, or only reading a sample shows its label.
        classes: class names in the order of their labels.

    A source may also have these:
        label: ``source.label(i)`` returns the label of a sample without reading its bytes. A sample that cannot be read
            keeps its label this way. Otherwise such a label comes from ``labels``, or is 0.
        read_many: ``source.read_many(numbers)`` reads several samples at once and returns a list of ``(bytes, label)``
            or exceptions.
        prefetch: ``source.prefetch(numbers)`` names the samples of the ``read_many`` after the next. The source may
            start to read them in the background.
        same_group: ``source.same_group(i)`` returns the numbers of samples that were read together with sample ``i``
            and are in memory now.
        mapped: True if reading is at most a copy out of the page cache.
        zero_copy: True if the returned bytes stay valid and unchanged for as long as they are referenced, so that a
            batch need not copy them.
    """

    indices: Tensor | None
    labels: Tensor | None
    classes: list[str] | None
    class_to_idx: dict[str, int] | None
    num_classes: int | None

    def __len__(self) -> int:
        """Number of active samples."""
        ...

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Encoded bytes and label (int, float, floats, or None) of sample number ``index``.

        An OSError or GpuaugError becomes a fault of this sample; any other exception ends the epoch.
        """
        ...

    def key(self, index: int) -> str:
        """Relative path or name of sample number ``index``."""
        ...

    def digest(self) -> str:
        """Hash of the keys of all samples, whichever are active and wherever they are stored."""
        ...
