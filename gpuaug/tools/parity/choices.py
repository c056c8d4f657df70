"""Compares how often, and with which levels, a policy and the library that it reproduces choose each operation."""

from __future__ import annotations

import inspect
import random
import re
from functools import partial
from typing import Any

import numpy as np
import PIL.Image
import torch

from gpuaug.augment.auto import FACTORS, Policy
from gpuaug.augment.auto_timm import TimmAugment
from gpuaug.augment.parameters import Chosen, Prepared, Size
from gpuaug.random.generators import restore_generators
from gpuaug.tools import peers
from gpuaug.tools.parity.counterpart import NO_LEVEL

DRAWS, DRAWS_OF_CHAINS = 10_000, 1_000  # AugMix computes pixels for each draw
# Limits that chance exceeds in less than 1 of 10,000 policies
SIGMAS = 5.0  # of the difference between two numbers of choices
DISTANCE = 2.5  # Kolmogorov-Smirnov distance, times sqrt(n m / (n + m))

Levels = dict[str, list[float]]  # operation: its level each time it was chosen


def compare_choices(op: Prepared, chosen: Chosen, size: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """Compare our choices, of many samples, with as many choices of the library. ``size`` begins with H, W.

    For each operation: times per image (``ours``, ``theirs``), the Kolmogorov-Smirnov distance of the levels
    (``levels``), and whether both are equal, except for chance.
    """
    count, made, theirs = len(chosen.choice), {}, Levels()
    library = _timm if isinstance(op.op, TimmAugment) else _torchvision
    transform, image = library(op.op, (size[0], size[1]), theirs)
    with restore_generators():
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        for _ in range(count):
            transform(image)
    ours = _ours(op, chosen)
    for name in sorted(ours.keys() | theirs.keys()):
        a, b = (np.sort(np.round(levels.get(name, []), 3)) for levels in (ours, theirs))
        distance, both = 0.0, np.concatenate([a, b])
        if len(a) and len(b) and name not in NO_LEVEL:
            below = [np.searchsorted(each, both, "right") / len(each) for each in (a, b)]
            distance = float(np.abs(below[0] - below[1]).max())
        as_often = abs(len(a) - len(b)) <= SIGMAS * len(both) ** 0.5
        equal = as_often and distance * (len(a) * len(b) / len(both)) ** 0.5 <= DISTANCE
        made[name] = {"ours": len(a) / count, "theirs": len(b) / count, "levels": distance, "equal": equal}
    return made


def _ours(op: Prepared, chosen: Chosen) -> Levels:
    levels: Levels = {}
    for slot, modules in enumerate(op.slots):
        for alternative, module in enumerate(modules):
            values = chosen.params[slot][alternative]["magnitude"][chosen.choice[:, slot] == alternative]
            levels.setdefault(str(module.name), []).extend(values.tolist())
    return {name: values for name, values in levels.items() if values}


def _torchvision(policy: Policy, size: Size, levels: Levels) -> tuple[Any, PIL.Image.Image]:
    """torchvision's policy, which adds to ``levels`` what it chooses, and an image for it."""
    v2 = peers.torchvision()[0]

    class Recorder(getattr(v2, type(policy).__name__)):  # type: ignore[misc]
        def _apply_image_or_video_transform(self, image: Any, transform_id: str, magnitude: float, **_: Any) -> Any:
            name = _name(transform_id)
            value = magnitude * (255 if name == "solarize" else 1) + (name in FACTORS)
            whole = name.startswith(("translate", "posterize"))
            levels.setdefault(name, []).append(int(value) if whole else value)
            return image

    given = {k: getattr(policy, k) for k in inspect.signature(Recorder.__init__).parameters if hasattr(policy, k)}
    if "policy" in given:
        given["policy"] = v2.AutoAugmentPolicy(given["policy"])
    given["interpolation"] = v2.InterpolationMode(policy.interpolation)
    return Recorder(**given), PIL.Image.new("RGB", size[::-1])


def _timm(policy: TimmAugment, size: Size, levels: Levels) -> tuple[Any, PIL.Image.Image]:
    """As :func:`_torchvision`, for timm's policies."""
    peers.timm()
    from timm.data import auto_augment

    def record(image: Any, level: float = 0.0, *, theirs: str, **_: Any) -> Any:
        name, scale = _name(theirs), {"TranslateXRel": -size[1], "TranslateYRel": -size[0]}.get(theirs, 1)
        levels.setdefault(name, []).append(min(level, 8) if name == "posterize" else level * scale)
        return image

    makers = {"rand": auto_augment.rand_augment_transform, "augmix": auto_augment.augment_and_mix_transform}
    kind, extra = policy.config.partition("-")[0], {"translate_pct": 0.3} if policy.config.startswith("augmix") else {}
    transform = makers.get(kind, auto_augment.auto_augment_transform)(policy.config, {"img_mean": policy.fill, **extra})
    for op in getattr(transform, "ops", None) or [op for pair in transform.policy for op in pair]:
        op.aug_fn = partial(record, theirs=op.name)
    return transform, PIL.Image.new("RGB", (1, 1))


def _name(theirs: str) -> str:
    """The name of the PillowOp, such as ``shear_x`` for ``ShearX`` or ``color`` for timm's ``ColorIncreasing``."""
    theirs = re.sub("(Increasing|Original|Rel)$", "", theirs)
    return re.sub("(?<!^)([A-Z])", r"_\1", theirs).lower()
