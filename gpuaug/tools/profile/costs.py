"""The measured costs of a loader's stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds per image of one stage: wall time, and CPU time of all its threads and workers."""

    wall: float
    cpu: float

    @property
    def rate(self) -> float:
        """Images per second."""
        return 1.0 / max(self.wall, 1e-9)

    def scaled(self, wall: float, cpu: float) -> Cost:
        return Cost(self.wall * wall, self.cpu * cpu)


FREE = Cost(0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of each stage alone, and of the complete loader."""

    batch_size: int
    workers: int
    prefetch: int
    main_thread: bool  # augmentation runs in the training thread
    device_type: str
    source: Cost  # reading samples in one process
    read: Cost  # reading batches with the configured workers; without workers, in this process
    copy: Cost | None = None  # as `read`, but the samples are already in memory; None: no workers
    take: float  # CPU-seconds per image that this process needs to receive batches from the workers
    decode: Cost
    masks: Cost | None = None  # decoding, cropping and moving masks; None: the loader has no targets
    augment: Cost
    finish: Cost = FREE  # converting targets to their dtype and moving them to the device
    host: Cost  # headers, random values, crops and mix
    host_parts: Mapping[str, float]  # seconds per image of each part of `host`
    step: Cost | None = None  # the training step alone, on finished batches; None: no model
    whole: Cost | None = None  # the complete loader and the step; None: not measured
    cores: float  # cores that this process gets
    busy: float = 1.0  # share of the reading time in which a core is busy
    bytes_per_image: float = 0.0

    @property
    def loader_cpu(self) -> float:
        """CPU-seconds per image of the whole loader."""
        masks = self.masks or FREE
        return sum(cost.cpu for cost in (self.read, self.decode, masks, self.augment, self.finish, self.host))
