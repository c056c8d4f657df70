"""All exceptions of gpuaug. Each message gives the fact, the value found and the remedy."""

from __future__ import annotations


class GpuaugError(Exception):
    """Base class of all gpuaug errors."""


class ConfigError(GpuaugError, ValueError):
    """An invalid configuration, or an invalid argument of a constructor or method. Names the full key."""


class ReadOnlyError(ConfigError, AttributeError):
    """A setting that cannot be changed was assigned. Says how to get an object with another value."""


class SourceError(GpuaugError, ValueError):
    """The whole source cannot be used: missing root, no images, or a class mapping that does not match."""


class StateError(GpuaugError, ValueError):
    """A loader state that does not belong to this loader."""


class ReadError(GpuaugError, RuntimeError):
    """A reading worker died or did not answer in time. Says what to change."""


class DataError(GpuaugError, RuntimeError):
    """One sample cannot be read or decoded.

    Attributes:
        key: relative path or name of the sample.
        index: its number in the source.
        stage: ``read`` or ``decode``.
        reason: the cause of the failure.
    """

    REMEDY = (
        "To continue without such samples, set `faults.policy=blank` (keeps the batch size and sets `batch.valid` to "
        "False) or `faults.policy=drop`."
    )

    def __init__(self, key: str, index: int, stage: str, reason: str, remedy: str = REMEDY) -> None:
        self.key, self.index, self.stage, self.reason, self._remedy = key, index, stage, reason, remedy
        super().__init__(f"sample {index} ({key!r}) failed in {stage}: {reason}. {remedy}")

    def __reduce__(self) -> tuple[type, tuple[str, int, str, str, str]]:
        return type(self), (self.key, self.index, self.stage, self.reason, self._remedy)


class FaultBudgetError(GpuaugError, RuntimeError):
    """There were more bad samples than `faults.max` allows."""
