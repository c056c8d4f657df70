"""What a source offers to the later stages."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Source(Protocol):
    """A complete source: what :func:`adapt` returns, and what the later stages rely on.

    Attributes:
        indices: int64 ``[len]``, ascending: numbers of the samples that are active; None: 0 .. len - 1.
        labels: int64 ``[N]`` by number, known without reading bytes; None where they are not, or there are none.
        classes: names in the order of their labels.

    What a source may have beside that:
        label: ``source.label(i)``, the label of a sample without reading its bytes: it stays where those cannot be
            read. Without it ``labels`` are asked, and else such a label is 0, or as many of them as other samples have.
        along: ``source.along(number)``, numbers that had to be read with this one, and now cost nothing more.
        read_many: ``source.read_many(numbers)``, a list of ``(bytes, label)`` or exceptions, read at the same time.
        expect: ``source.expect(numbers)``: what the ``read_many`` after the next will be for; it may begin.
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

        What it raises of OSError and GpuaugError is a fault of this sample; anything else ends the epoch.
        """
        ...

    def key(self, index: int) -> str:
        """Relative path or name of sample number ``index``."""
        ...

    def digest(self) -> str:
        """Hash of the keys of all samples, whatever their place and whichever are active."""
        ...
