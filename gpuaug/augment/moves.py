"""How a recipe's operations move the pixels of each sample, for masks, boxes and keypoints.

Coordinates count from the image's edge: an image spans 0..W x 0..H, and the centre of the first pixel is 0.5. Kornia's
matrices map pixel indices. For them, the flag ``align_corners`` changes only the padding by reflection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpuaug.augment.ops import entry_of, fields
from gpuaug.augment.ops.entry import Matrix
from gpuaug.augment.ops.geometry import pixel_matrices
from gpuaug.augment.parameters import Chosen, Params, Prepared, Size
from gpuaug.augment.reference import exact_products
from gpuaug.errors import ConfigError
from gpuaug.random.keyed import Int
from gpuaug.targets.geometry import from_indices

Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """An elastic transform of some samples: each pixel moves by its own offset. Only masks can follow it."""

    module: Any  # Kornia's RandomElasticTransform
    rows: Int  # [n], the samples that are transformed, ascending
    keys: Int  # [n, 2], the keys of their noise

    def apply(self, masks: Tensor, fill: int) -> Tensor:
        """Move ``masks`` like the images: integers [B, H, W] up to 2**24. Pixels from outside get ``fill``."""
        from kornia.geometry.transform import elastic_transform2d

        size = (masks.shape[1], masks.shape[2])
        # A single sample is duplicated, as for the images: with one sample, the last bits would differ.
        group = np.repeat(np.arange(len(self.rows)), 2 if len(self.rows) == 1 else 1)
        at, keys = (torch.from_numpy(v[group]).to(masks.device, non_blocking=True) for v in (self.rows, self.keys))
        labels = masks.index_select(0, at).long().sub_(fill).float()[:, None]  # grid_sample fills with 0
        flags = self.module.flags
        settings = (flags["kernel_size"], flags["sigma"], flags["alpha"], flags["align_corners"])
        with torch.no_grad(), torch.autocast(masks.device.type, enabled=False), exact_products(masks.device):
            field = fields(self.module, {}, keys, size)["noise"]
            moved = elastic_transform2d(labels, field, *settings, mode="nearest", padding_mode="zeros")
        moved = moved[: len(self.rows), 0].long().add_(fill).to(masks.dtype)
        return masks.index_copy(0, at[: len(self.rows)], moved)


class _Step(NamedTuple):
    """The matrices of an alternative, for the rows that take this alternative."""

    matrix: Matrix
    rows: Int
    params: Params


def moves(ops: Sequence[Prepared], chosen: Sequence[Chosen], size: Size) -> list[Float64 | Field]:
    """List the moves of B samples, in the order of the operations. The list is empty if no pixel moves.

    A matrix float64 [B, 3, 3] stands for consecutive operations, and maps (x, y, 1) to the place after them. An elastic
    transform is a :class:`Field`. :func:`check_carried` must accept ``ops``.
    """
    parts: list[list[_Step] | Field] = []
    for op, c in zip(ops, chosen, strict=True):
        for slot, modules in enumerate(op.slots):
            steps, fields = _taken(modules, c, slot)
            if steps and parts and isinstance(parts[-1], list):
                parts[-1] += steps
            elif steps:
                parts.append(steps)
            parts += fields
    products = [part for part in parts if isinstance(part, list)]
    matrices = iter(_matrices(products, size, len(chosen[0].choice)) if products else ())
    return [part if isinstance(part, Field) else next(matrices) for part in parts]


def _taken(modules: Sequence[nn.Module], chosen: Chosen, slot: int) -> tuple[list[_Step], list[Field]]:
    """List the steps and fields of a slot. No sample takes two alternatives."""
    steps, fields = [], []
    choice = chosen.choice[:, slot]
    for alternative, module in enumerate(modules):
        entry = entry_of(module)
        if entry is None or entry.affects == "pixels" or not len(rows := np.flatnonzero(choice == alternative)):
            continue
        if entry.matrix is not None:
            params = {name: values[rows] for name, values in chosen.params[slot][alternative].items()}
            steps.append(_Step(entry.matrix, rows, params))
        else:
            assert chosen.keys is not None
            fields.append(Field(module, rows, chosen.keys[rows]))
    return steps, fields


def _matrices(products: list[list[_Step]], size: Size, batch: int) -> list[Float64]:
    """Multiply the matrices of each list of steps: float64 [batch, 3, 3], for coordinates from the image's edge."""
    steps = [step for product in products for step in product]
    ends = np.cumsum([0] + [len(step.rows) for step in steps])
    values = np.zeros((ends[-1], 9), dtype=np.float32)
    for step, start, end in zip(steps, ends[:-1], ends[1:], strict=True):
        step.matrix.write(values[start:end], step.params, size)
    elements = np.repeat([step.matrix.elements for step in steps], np.diff(ends))
    pixels = np.empty((ends[-1], 3, 3))
    for kind in set(elements.tolist()):
        own = np.flatnonzero(elements == kind)
        pixels[own] = pixel_matrices(torch.from_numpy(values[own]), size, elements=kind).numpy()
    made, number = [], 0
    for product in products:
        composed = np.broadcast_to(np.eye(3), (batch, 3, 3)).copy()
        for step in product:
            own = pixels[ends[number] : ends[number + 1]]
            composed[step.rows] = own @ composed[step.rows]
            number += 1
        made.append(from_indices(composed))
    return made


# --- operations that targets can follow


def check_carried(ops: Sequence[Prepared], names: Sequence[str], *, path: str = "augment.ops") -> None:
    """Raise ConfigError if the targets ``names`` (masks, boxes, keypoints) cannot follow an operation."""
    for key, op in (leaf for entry in ops if names for leaf in entry.leaves(f"{path}.{entry.name}")):
        if op.chains:
            raise ConfigError(
                f"`{key}` must give one image, because {' and '.join(names)} have to follow it. Found: "
                f"{type(op.op).__name__}, which mixes differently moved copies of an image. Remove `{key}`."
            )
        for module in {type(module): module for modules in op.slots for module in modules}.values():
            _check_module(module, names, key)


def _check_module(module: nn.Module, names: Sequence[str], key: str) -> None:
    from kornia.augmentation import IntensityAugmentationBase2D

    kind, entry = type(module), entry_of(module)
    if entry is not None and entry.affects == "field" and entry.fields is None:
        entry = None  # Field.apply knows only the elastic transform
    kornias = kind.__module__.startswith("kornia.augmentation.")
    points = [name for name in names if name != "masks"]
    if entry is not None and entry.affects == "field" and points:
        raise ConfigError(
            f"`{key}` must move pixels by a matrix, because {' and '.join(points)} cannot follow an offset per pixel. "
            f"Found: {kind.__name__}. Remove `{key}`, or use masks as the only target."
        )
    changes_values = kornias and isinstance(module, IntensityAugmentationBase2D)
    if entry is not None or changes_values or getattr(module, "affects", None) == "pixels":
        return
    remedy = "." if kornias else ', or, if it moves no pixels, give its class the attribute `affects = "pixels"`.'
    raise ConfigError(
        f"`{key}` must be an operation whose movement of pixels gpuaug knows, because {' and '.join(names)} have to "
        f"follow it. Found: {kind.__name__}. Remove `{key}`{remedy}"
    )
