"""Everything gpuaug raises by itself. Each message says fact, value found, remedy."""

from __future__ import annotations


class GpuaugError(Exception):
    """Base of every error that gpuaug raises by itself."""


class ConfigError(GpuaugError, ValueError):
    """A configuration or an argument that cannot work, of a constructor or a method; names the full key."""


class ReadOnlyError(ConfigError, AttributeError):
    """An assignment to a setting that is fixed; says how to get an object with another one."""


class SourceError(GpuaugError, ValueError):
    """A source as a whole cannot be used: missing root, no images, a class mapping that does not fit."""


class StateError(GpuaugError, ValueError):
    """A loader state that does not belong to this loader."""


class ReadError(GpuaugError, RuntimeError):
    """The workers that read died or did not answer in time; says what to change."""


class DataError(GpuaugError, RuntimeError):
    """One sample cannot be read or decoded.

    Attributes:
        key: relative path or name of the sample.
        index: its number in the source.
        stage: ``read`` or ``decode``.
        reason: what was found.
    """

    REMEDY = (
        "To go on without such samples set `faults.policy=blank` (keeps the batch size, `batch.valid` is False there) "
        "or `faults.policy=drop`."
    )

    def __init__(self, key: str, index: int, stage: str, reason: str, remedy: str = REMEDY) -> None:
        self.key, self.index, self.stage, self.reason, self._remedy = key, index, stage, reason, remedy
        super().__init__(f"sample {index} ({key!r}) failed in {stage}: {reason}. {remedy}")

    def __reduce__(self) -> tuple[type, tuple[str, int, str, str, str]]:
        return type(self), (self.key, self.index, self.stage, self.reason, self._remedy)


class FaultBudgetError(GpuaugError, RuntimeError):
    """More samples were bad than `faults.max` allows."""
