"""What a recipe did to one sample: the crop window, and the operations with their parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gpuaug.augment.mosaic import Combine, Mosaic, TileMixUp, TilesOp
from gpuaug.augment.ops.kornia_private import fixed_order
from gpuaug.augment.ops.pillow import PillowOp
from gpuaug.augment.parameters import Chosen, Prepared, tensors
from gpuaug.augment.policy import fields
from gpuaug.augment.recipe import Drawn, RecipeBase
from gpuaug.batch import CropWindows

FACTORS = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")  # of a jitter, by position
WITHOUT_MAGNITUDE = ("identity", "auto_contrast", "equalize", "invert")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One operation of a recipe, and what it drew for a sample.

    Attributes:
        name: its name in ``ops``; for a policy and a choice, followed by what was chosen: ``policy.rotate``.
        kind: its class, such as ``ColorJitter``.
        applied: whether it changed the sample. False: its ``p`` decided against it, or a choice took nothing.
        module: Kornia's or gpuaug's module that makes the sample's pixels: ``step.module(images, params=step.params)``
            with images float32 [1, C, H, W] in 0..1. None if ``applied`` is False.
        params: its parameters [1, ...] by Kornia's names and in Kornia's units, with noise per pixel.
        values: the parameters that are numbers or short lists.
        seeded: the operation draws its own random numbers, which gpuaug only seeds; ``params`` is empty.
        share: for a chain of AugMix, its share of the result; else None.

    >>> print(Step(name="jitter", kind="ColorJitter", applied=True, values={"brightness_factor": 1.0849}))
    jitter: brightness 1.08
    """

    name: str
    kind: str
    applied: bool
    module: nn.Module | None = field(default=None, repr=False)
    params: dict[str, Tensor] = field(default_factory=dict, repr=False)
    values: dict[str, float | list[float]] = field(default_factory=dict)
    seeded: bool = False
    share: float | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.text or 'applied'}"

    @property
    def text(self) -> str:
        """The values as text, such as ``brightness 1.08``; empty for an operation without parameters."""
        if not self.applied:
            return "not applied"
        parts = [f"{name.removesuffix('_factor').replace('_', ' ')} {_short(x)}" for name, x in self.values.items()]
        parts += ["its own random numbers"] * self.seeded
        parts += [] if self.share is None else [f"share {self.share:.3g} of the result"]
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a recipe did to one sample, for one view. ``print`` shows it as text, one line per step.

    Attributes:
        view: the view's name; empty if the recipe has one view.
        copy: number of the view's copy.
        window: (top, left, height, width) of the crop in the image, in pixels, after EXIF orientation; all 0 if the
            sample could not be read.
        resized: (height, width) of the window after resizing.
        offset: (y, x) of the resized window's top left corner in the view; above 0: the view was padded.
        size: (height, width) of the view.
        steps: the operations in their order.

    >>> flip = Step(name="flip", kind="RandomHorizontalFlip", applied=False)
    >>> window = {"window": (37, 16, 211, 187), "resized": (224, 224), "offset": (0, 0), "size": (224, 224)}
    >>> print(Explanation(view="", copy=0, steps=[flip], **window))
    crop: 187 x 211 at (16, 37), resized to 224 x 224
    flip: not applied
    """

    view: str
    copy: int
    window: tuple[int, ...]
    resized: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, int]
    steps: list[Step]

    @property
    def lines(self) -> list[str]:
        """The text, one line for the crop and for each operation."""
        top, left, height, width = self.window
        if not height:
            return ["could not be read"]
        text = f"crop: {width} x {height} at ({left}, {top})"
        text += f", resized to {self.resized[1]} x {self.resized[0]}" if self.resized != self.window[2:] else ""
        placed = self.resized != self.size or any(self.offset)
        text += f", placed at ({self.offset[1]}, {self.offset[0]}) of {self.size[1]} x {self.size[0]}" if placed else ""
        # a jitter has one step for each of its factors
        groups = [(name, [step.text for step in steps]) for name, steps in groupby(self.steps, lambda step: step.name)]
        return [text, *(f"{name}: {', '.join(filter(None, texts)) or 'applied'}" for name, texts in groups)]

    def __str__(self) -> str:
        name = ", ".join(filter(None, [self.view, f"copy {self.copy + 1}" * bool(self.copy)]))
        return "\n".join([f"{name}:"] * bool(name) + self.lines)


def explain(
    recipe: RecipeBase, drawn: Drawn, windows: list[CropWindows], row: int, channels: int, *, combined: Any = None
) -> list[Explanation]:
    """What each view of ``recipe`` did to the sample at ``row``.

    Args:
        recipe: the recipe of the batch's epoch.
        drawn: the batch's random numbers.
        windows: of each view.
        row: the sample's row in ``drawn``.
        channels: of the images.
        combined: how the outputs were put together from tiles; None: they were not.
    """
    made = []
    sizes = [window.size for window in windows] if combined is None else [combined.layout.size]
    chosen = recipe.choose(drawn, sizes)
    for view, window, choices in zip(recipe.views, windows, chosen, strict=True):
        box, resized, offset = (tuple(x[row].tolist()) for x in (window.window, window.resized, window.offset))
        steps = [] if combined is None else _combine_steps(view.augment.combine, drawn, combined, row, window.size)
        steps += [
            step
            for op, own in zip(view.augment.prepared, choices, strict=True)
            for step in _steps(op, own, row, sizes[-1] if combined is not None else window.size, channels)
        ]
        if recipe.resized is not None:
            values: dict[str, Any] = {"height": float(recipe.resized[0]), "width": float(recipe.resized[1])}
            steps.append(Step(name="sizes", kind="Sizes", applied=True, values=values))
        more: dict[str, Any] = {"view": view.name, "copy": view.copy, "size": window.size, "steps": steps}
        made.append(Explanation(window=box, resized=resized, offset=offset, **more))
    return made


def _combine_steps(combine: Combine, drawn: Drawn, combined: Any, row: int, crop: tuple[int, int]) -> list[Step]:
    """What the operations of ``combine`` did, or a crop that turns its window. ``crop``: (H, W) of the crops."""
    steps = []
    if combine.crop is not None:
        x, y = combined.matrices[row, 0, :2]
        turned: Any = {"angle": math.degrees(math.atan2(y, x)), "scale": math.hypot(x, y)}
        steps.append(Step(name="person", kind=type(combine.crop).__name__, applied=True, values=turned))
    for name, op in combine.entries.items():
        u = drawn.uniforms["", 0, name][row : row + 1]
        applied = not isinstance(op, TilesOp) or bool(op._applied(u)[0])
        if isinstance(op, Mosaic):
            numbers = zip(combined.numbers[row].tolist(), combined.layout.shown[row].tolist(), strict=False)
            values: dict[str, Any] = {"samples": [float(n) if shown else -1.0 for n, shown in numbers]}
        else:
            sizes = (crop, combined.layout.size) if isinstance(op, TileMixUp) else ()
            own = {"sample": combined.numbers[row, -1:].astype(float)} if sizes else {}
            values = {k: v[0].tolist() for k, v in {**own, **op._values(u, *sizes)}.items()}
        values = values if applied else {}
        steps.append(Step(name=name, kind=type(op).__name__, applied=applied, values=values))
    return steps


def _steps(op: Prepared, chosen: Chosen, row: int, size: tuple[int, int], channels: int) -> Iterator[Step]:
    """What one operation of a recipe did: one step, or one for each choice."""
    if op.seeded is not None:
        yield Step(name=op.name, kind=type(op.op).__name__, applied=True, module=op.slots[0][0], seeded=True)
        return
    some = False
    depth = len(op.slots) // op.chains if op.chains else 0
    for slot, (choice, modules) in enumerate(zip(chosen.choice[row].tolist(), _named(op, op.name), strict=True)):
        if choice < 0:
            continue
        some, (name, module) = True, modules[choice]
        share, chain = None, ""
        if depth:
            assert chosen.weights is not None
            number = slot // depth
            share, chain = float(chosen.weights[row, 0] * chosen.weights[row, 1 + number]), f".chain {number + 1}"
        of_policy = isinstance(module, PillowOp)
        if of_policy:
            name = f"{name}{chain}.{module.name}"
        params = _params(module, chosen, slot, choice, row, size, channels)
        yield Step(
            name=name,
            kind=type(op.op if of_policy else module).__name__,
            applied=True,
            module=module,
            params=params,
            values=_values(module, params),
            share=share,
        )
    if not some:
        yield Step(name=op.name, kind=type(op.op).__name__, applied=False)


def _named(op: Prepared, name: str) -> list[list[tuple[str, nn.Module]]]:
    """For each slot, the alternatives with their names. See ``_prepare_choice`` in policy.py."""
    if not op.members:
        return [[(name, module) for module in slot] for slot in op.slots]
    slots = []
    for place in op.members:
        inner = [_named(member, f"{name}.{member.name}") for member in place]
        for slot in range(max(map(len, inner))):
            slots.append([each for member in inner if slot < len(member) for each in member[slot]])
    return slots


def _params(
    module: Any, chosen: Chosen, slot: int, choice: int, row: int, size: tuple[int, int], channels: int
) -> dict[str, Tensor]:
    params = tensors(chosen.params[slot][choice], np.array([row]))
    if chosen.keys is not None:
        params |= fields(module, params, torch.from_numpy(chosen.keys[row : row + 1]), size, channels=channels)
    return {**params, "batch_prob": torch.ones(1)}


def _values(module: Any, params: dict[str, Tensor]) -> dict[str, float | list[float]]:
    if isinstance(module, PillowOp) and module.name in WITHOUT_MAGNITUDE:
        return {}
    order = fixed_order(module)
    read = None if order is None else {FACTORS[k] for k in order}  # a jitter draws factors that it does not use
    made: dict[str, float | list[float]] = {}
    for name, value in params.items():
        unused = name == "batch_prob" or (read is not None and name in FACTORS and name not in read)
        if not unused and value[0].ndim <= 1 and value[0].numel() <= 4:
            made[name] = value[0].tolist()
    return made


def _short(value: float | list[float]) -> str:
    if isinstance(value, list):
        return f"({', '.join(map(_short, value))})"
    return f"{value + 0.0:.3g}" if not isinstance(value, float) or abs(value) > 1e-20 else "0"
