"""The measured costs of a loader's stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

# each stage's name in the report: its fields of `Measured`
STAGES = {
    "reading": ("read", "take"),
    "decode": ("decode",),
    "augment": ("augment",),
    "host": ("headers", "objects", "mix"),
    "masks": ("masks", "finish"),
    "step": ("step",),
}
LOADER = [field for stage, fields in STAGES.items() if stage != "step" for field in fields]


class Cost(NamedTuple):
    """Seconds per image of one stage: wall time, and CPU time of all its threads and workers."""

    wall: float
    cpu: float

    @property
    def rate(self) -> float:
        """Images per second."""
        return 1.0 / max(self.wall, 1e-9)


FREE = Cost(0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of each stage alone, and of the complete loader. FREE: the loader has no such stage."""

    batch_size: int
    workers: int
    prefetch: int
    main_thread: bool  # augmentation runs in the training thread
    device_type: str
    source: Cost  # reading samples in one process
    read: Cost  # reading batches with the configured workers; without workers, in this process
    take: Cost = FREE  # receiving batches from the workers, in this process; its CPU time is part of `read`
    copy: Cost = FREE  # as `read`, but the samples are already in memory; only with workers
    headers: Cost  # headers, random values and crops
    objects: Cost = FREE  # boxes, keypoints, and masks that decide crops
    decode: Cost
    masks: Cost = FREE  # decoding, cropping and moving masks
    augment: Cost
    finish: Cost = FREE  # converting targets to their dtype and moving them to the device
    mix: Cost = FREE
    step: Cost = FREE  # the training step alone, on finished batches
    whole: Cost = FREE  # the complete loader and the step; FREE: not measured
    cores: float  # cores that this process gets
    busy: float = 1.0  # share of the reading time in which a core is busy
    bytes_per_image: float = 0.0

    @property
    def host(self) -> Cost:
        """The sum of headers, objects and mixing."""
        return self.total(STAGES["host"])

    def total(self, stages: Sequence[str]) -> Cost:
        """The sum of some stages."""
        costs = [getattr(self, name) for name in stages]
        return Cost(sum(cost.wall for cost in costs), sum(cost.cpu for cost in costs))

    def scaled(self, factors: Mapping[str, Cost]) -> Measured:
        """The measurements with the costs of some stages multiplied by factors for wall time and CPU time."""
        changed: dict[str, Any] = {}
        for name, factor in factors.items():
            cost = getattr(self, name)
            changed[name] = Cost(cost.wall * factor.wall, cost.cpu * factor.cpu)
        return replace(self, **changed)


def costs_of(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Cost]:
    """The cost of each stage: the median wall time and the mean CPU time of the rounds.

    A round holds for each stage the seconds per image: wall time, own CPU time, workers' CPU time, and other values.
    """
    costs = {}
    for name in rounds[0]:
        wall, own, workers = np.transpose([found[name][:3] for found in rounds])
        costs[name] = Cost(float(np.median(wall)), float(np.mean(own + workers)))
    return costs


def ratios(before: Sequence[Mapping[str, Any]], then: Sequence[Mapping[str, Any]]) -> dict[str, Cost]:
    """Ratios ``then`` / ``before`` of each stage's cost. Alternate the rounds, so that other load slows both alike."""
    old, new = costs_of(before), costs_of(then)
    return {name: Cost(*(np.array(new[name]) / np.maximum(old[name], 1e-9)).tolist()) for name in old}
