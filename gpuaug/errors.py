"""All exceptions of gpuaug. Each message says what is wrong, which value was found, and what to do."""

from __future__ import annotations

import re

# control characters but the end of a line, and characters that change the direction of text
_UNSAFE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""Escape control characters, because messages quote servers and files, and a terminal would obey: ``\x1b[2J``."""
    return _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text)


def shown_size(height: int, width: int) -> str:
    """The size of an image, for a message."""
    return f"{width} x {height} (width x height)"


class GpuaugError(Exception):
    """Base class of all gpuaug errors. Control characters in a message are escaped.

    >>> import gpuaug
    >>> try:
    ...     source = gpuaug.FolderSource("data/missing")
    ... except gpuaug.GpuaugError as error:
    ...     print(type(error).__name__)
    SourceError
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(each) if isinstance(each, str) else each for each in args))


class ConfigError(GpuaugError, ValueError):
    """An invalid configuration, or an invalid argument of a constructor or method.

    With :func:`gpuaug.build`, the message names the key, such as ``augment.crop.scale``.

    >>> import gpuaug
    >>> gpuaug.RandomResizedCrop(224, scale=(1.2, 0.5))
    Traceback (most recent call last):
    ...
    gpuaug.errors.ConfigError: `scale` must satisfy 0 < min <= max <= 1. Found: (1.2, 0.5).
    """


class ReadOnlyError(ConfigError, AttributeError):
    """A setting was changed after the loader or recipe was created, or `dataset` of a loader was read.

    As an AttributeError, it lets ``hasattr(loader, "dataset")`` be False.
    """


class SourceError(GpuaugError, ValueError):
    """A source cannot be used. For example, its root is missing, or it has no images.

    >>> import gpuaug
    >>> try:
    ...     gpuaug.FolderSource("data/missing")
    ... except gpuaug.SourceError as error:
    ...     print(str(error).partition(":")[0])
    `source.root` does not exist
    """


class StateError(GpuaugError, ValueError):
    """A loader state that does not belong to this loader.

    >>> import gpuaug
    >>> loader = gpuaug.Loader(gpuaug.FolderSource("data/train"), augment=gpuaug.Augment(crop=gpuaug.Resize((8, 8))))
    >>> try:
    ...     loader.load_state_dict({})
    ... except gpuaug.StateError as error:
    ...     print(error)
    not a loader state: expected version, epoch, position and fingerprint. Found: '{}'.
    """


class ReadError(GpuaugError, RuntimeError):
    """A reading worker died or did not answer in time. The message says what to change.

    >>> import gpuaug
    >>> recipe = gpuaug.Augment(crop=gpuaug.Resize((8, 8)))
    >>> loader = gpuaug.Loader(gpuaug.FolderSource("data/train"), augment=recipe, num_workers=1, timeout=60)
    >>> while loader.epoch < 1:
    ...     try:
    ...         for images, labels in loader:
    ...             pass
    ...     except gpuaug.ReadError as error:
    ...         print(error)  # the next pass continues with the next sample
    >>> loader.close()
    """


class DataError(GpuaugError, RuntimeError):
    """One sample cannot be read, decoded or encoded.

    Attributes:
        key: relative path or name of the sample.
        index: index of the sample in the source.
        stage: ``read``, ``decode`` or ``encode``. Only `gpuaug pack` encodes.
        reason: the cause of the failure.

    >>> import gpuaug
    >>> recipe = gpuaug.Augment(crop=gpuaug.Resize((8, 8)))
    >>> try:
    ...     next(iter(gpuaug.Loader([(b"no image", 0)], augment=recipe, num_workers=0)))
    ... except gpuaug.DataError as error:
    ...     print(error.index, error.stage)
    0 decode
    """

    REMEDY = (
        "To continue without such samples, set `faults.policy=blank` (keeps the batch size and sets `batch.valid` to "
        "False) or `faults.policy=drop`."
    )

    def __init__(self, key: str, index: int, stage: str, reason: str, remedy: str = REMEDY) -> None:
        self.key, self.index, self.stage, self.reason, self._remedy = key, index, stage, printable(reason), remedy
        super().__init__(f"sample {index} ({key!r}) failed in {stage}: {reason}. {remedy}")

    def __reduce__(self) -> tuple[type, tuple[str, int, str, str, str]]:
        return type(self), (self.key, self.index, self.stage, self.reason, self._remedy)


class FaultBudgetError(GpuaugError, RuntimeError):
    """There were more bad samples than `faults.max` allows.

    >>> import gpuaug
    >>> recipe = gpuaug.Augment(crop=gpuaug.Resize((8, 8)))
    >>> faults = gpuaug.Faults(policy="drop", max=1)
    >>> loader = gpuaug.Loader([(b"no image", 0), (b"none", 1)], augment=recipe, faults=faults, num_workers=0)
    >>> try:
    ...     batches = list(loader)
    ... except gpuaug.FaultBudgetError as error:
    ...     print(str(error).partition(";")[0])
    2 bad samples could not be read or decoded
    """
