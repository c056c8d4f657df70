"""How a recipe's operations move the pixels of each sample, for masks, boxes and keypoints.

Coordinates count from the image's edge: an image spans 0..W x 0..H, and the centre of the first pixel is 0.5. Kornia's
matrices map pixel indices. For them, the flag ``align_corners`` changes only the padding by reflection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import grid_sample
from torch.overrides import TorchFunctionMode

from gpuaug.augment.ops.erasing import RandomErasing
from gpuaug.augment.ops.geometry import pixel_matrices
from gpuaug.augment.parameters import Chosen, Matrix, Params, Prepared, Size, tensors
from gpuaug.augment.policy import entry_of, fields
from gpuaug.augment.reference import exact_products
from gpuaug.errors import ConfigError, shown_size
from gpuaug.native.buffers import to_device
from gpuaug.random.keyed import Float, Int
from gpuaug.targets.fields import Field
from gpuaug.targets.geometry import Bool, Float64, both, from_indices, hulls, inverse
from gpuaug.targets.masks import Erased


class _Nearest(TorchFunctionMode):
    """Lets Kornia sample the nearest pixel, and 0 outside the image. It keeps the positions that Kornia samples."""

    grid: Tensor | None = None  # [n, H, W, 2], in -1..1
    corners = False  # whether -1 and 1 are the centres of the outermost pixels

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is grid_sample:
            self.grid, self.corners = args[1], bool(kwargs["align_corners"])
            kwargs = kwargs | {"mode": "nearest", "padding_mode": "zeros"}
        return func(*args, **kwargs)


@dataclass(frozen=True, slots=True, eq=False)
class FieldMove:
    """An operation that moves each pixel of some samples by its own offset."""

    module: Any  # of Kornia
    rows: Int  # [n], the samples that are moved, ascending
    params: Params  # [n, ...]
    keys: Int | None  # [n, 2], the keys of their noise

    @property
    def group(self) -> Int:
        """Numbers in ``rows``. A single one is there twice, as for the images: alone, its last bits would differ."""
        return np.repeat(np.arange(len(self.rows)), 2 if len(self.rows) == 1 else 1)

    def apply(self, masks: Tensor, fill: int) -> Tensor:
        """Move ``masks`` like the images: integers [B, H, W] up to 2**24. Pixels from outside get ``fill``."""
        at = to_device(torch.from_numpy(self.rows[self.group]), masks.device)
        labels = masks.index_select(0, at).long().sub_(fill).float()[:, None]  # _Nearest fills with 0
        moved, _ = self._moved(labels, self.group)
        moved = moved[: len(self.rows), 0].long().add_(fill).to(masks.dtype)
        return masks.index_copy(0, at[: len(self.rows)], moved)

    def field(self, size: Size) -> Field:
        """The field, for points and boxes. It is computed on the host, so nothing waits for a device."""
        grid = self.module.flags.get("grid")  # of a jigsaw
        pieces = None if grid is None else (size[0] // grid[0], size[1] // grid[1])
        return Field(self.rows, partial(self._positions, size=size), pieces=pieces)

    def _positions(self, size: Size) -> Float:
        """The input positions (x, y) of all pixels, [n, H, W, 2]."""
        indices = torch.from_numpy(np.indices(size)[::-1].astype(np.float32))
        moved, made = self._moved(indices.expand(len(self.group), -1, -1, -1), self.group)
        if made.grid is None:  # a jigsaw, whose pieces show whole pixels
            positions = moved.permute(0, 2, 3, 1) + 0.5
        else:
            sides = torch.tensor(size[::-1], dtype=torch.float32, device="cpu")
            positions = (made.grid + 1) / 2 * (sides - 1) + 0.5 if made.corners else (made.grid + 1) / 2 * sides
        return positions[: len(self.rows)].numpy()

    def _moved(self, x: Tensor, group: Int) -> tuple[Tensor, _Nearest]:
        """Move float32 [n, C, H, W] as the images of the samples ``group``, by the nearest pixel."""
        size, flags, made = (x.shape[2], x.shape[3]), self.module.flags, _Nearest()
        if any(side % count for side, count in zip(size, flags.get("grid", (1, 1)), strict=True)):
            raise ConfigError(
                f"the sides of the images must be divisible by grid {flags['grid']} of {type(self.module).__name__}. "
                f"Found: {shown_size(*size)}. Change `grid` or the crop's size."
            )
        values = tensors(self.params, group)
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False), exact_products(x.device):
            if self.keys is not None:
                values |= fields(self.module, values, to_device(torch.from_numpy(self.keys[group]), x.device), size)
            with torch.device("cpu"), made:  # Kornia makes constants on torch's default device
                return self.module.apply_transform(x, values, flags), made


Move = Float64 | FieldMove | Erased


class _MatrixMove(NamedTuple):
    """The matrices of an alternative, for the rows that take this alternative."""

    matrix: Matrix
    rows: Int
    params: Params


def moves(ops: Sequence[Prepared], chosen: Sequence[Chosen], size: Size) -> list[Move]:
    """List the moves of B samples, in the order of the operations. The list is empty if nothing moves.

    A matrix float64 [B, 3, 3] stands for consecutive operations, and maps (x, y, 1) to the place after them. What is
    outside the canvas after a move is lost. Operations share a matrix only if this loses the same as one after the
    other. So a sample's matrices do not depend on the other samples. If a sample has fewer matrices than others, its
    last ones are the identity. :func:`check_carried` must accept ``ops``.
    """
    parts: list[_MatrixMove | FieldMove | Erased] = []
    for op, c in zip(ops, chosen, strict=True):
        for slot, modules in enumerate(op.slots):
            parts += _taken(modules, c, slot)
    if not parts:
        return []
    steps, count = [part for part in parts if isinstance(part, _MatrixMove)], len(chosen[0].choice)
    matrices = _matrices(steps, size)
    rows = np.concatenate([step.rows for step in steps]) if steps else np.zeros(0, dtype=np.int64)
    if len(steps) == len(parts) and np.bincount(rows).max() < 2:  # no sample has two matrices
        alone = np.tile(np.eye(3), (count, 1, 1))
        alone[rows] = from_indices(matrices)
        return [alone]
    outward, inward = _across_border(matrices, size)
    done, number = list[Move](), 0
    made: list[Float64] = []  # number k holds the matrix k of each sample, or the identity; pixel indices
    length = np.zeros(count, dtype=np.int64)  # number of closed matrices of each sample
    last = np.tile(np.eye(3), (count, 1, 1))  # the matrix that may still grow
    is_open = np.zeros(count, dtype=bool)  # whether an operation has gone into it
    lost = np.zeros(count, dtype=bool)  # whether it has moved something out of the canvas

    def close(rows: Int) -> None:
        rows = rows[is_open[rows]]
        for k in np.unique(length[rows]).tolist():
            if k == len(made):
                made.append(np.tile(np.eye(3), (count, 1, 1)))
            own = rows[length[rows] == k]
            made[k][own] = last[own]
        length[rows] += 1
        last[rows] = np.eye(3)
        is_open[rows] = lost[rows] = False

    for part in parts:
        if isinstance(part, _MatrixMove):
            rows, own = part.rows, slice(number, number := number + len(part.rows))
            close(rows[lost[rows] & inward[own]])
            last[rows] = matrices[own] @ last[rows]
            is_open[rows] = True
            lost[rows] |= outward[own]
            continue
        # only the samples that it changes need a matrix of their own before it
        close(part.rows if isinstance(part, FieldMove) else np.flatnonzero(part.boxes.any(axis=1)))
        done += [*map(from_indices, made), part]
        made.clear()
        length[:] = 0
    close(np.arange(count))
    return [*done, *map(from_indices, made)]


def followed(done: Sequence[Move], size: Size, first: Float64) -> tuple[list[Float64 | Field], Float64]:
    """The moves of points and boxes, and the product of ``first`` [B, 3, 3] and the matrices.

    The product is NaN for the samples that a field moves, because no matrix describes their way.
    """
    steps = [move.field(size) if isinstance(move, FieldMove) else move for move in done if not isinstance(move, Erased)]
    product = reduce(lambda path, step: step @ path, [step for step in steps if not isinstance(step, Field)], first)
    rows = [row for step in steps if isinstance(step, Field) for row in step.rows]
    return steps, np.where(np.isin(np.arange(len(product)), rows)[:, None, None], np.nan, product)


def _taken(modules: Sequence[nn.Module], chosen: Chosen, slot: int) -> list[_MatrixMove | FieldMove | Erased]:
    """List the moves of a slot. No sample takes two alternatives."""
    parts: list[_MatrixMove | FieldMove | Erased] = []
    choice = chosen.choice[:, slot]
    for alternative, module in enumerate(modules):
        entry, params = entry_of(module), chosen.params[slot][alternative]
        if entry is None or not len(rows := np.flatnonzero(choice == alternative)):
            continue
        if entry.matrix is not None:
            parts.append(_MatrixMove(entry.matrix, rows, {name: values[rows] for name, values in params.items()}))
        elif entry.affects == "field":
            own = {name: values[rows] for name, values in params.items()}
            parts.append(FieldMove(module, rows, own, None if chosen.keys is None else chosen.keys[rows]))
        elif isinstance(module, RandomErasing) and module.masks is not None:
            parts.append(Erased(module.rectangles(params, choice == alternative), module.masks))
    return parts


def _matrices(steps: Sequence[_MatrixMove], size: Size) -> Float64:
    """The matrices of all steps, one after the other: float64 [n, 3, 3], for pixel indices."""
    ends = np.cumsum([0] + [len(step.rows) for step in steps])
    values = np.zeros((ends[-1], 9), dtype=np.float32)
    for step, start, end in zip(steps, ends[:-1], ends[1:], strict=True):
        step.matrix.write(values[start:end], step.params, size)
    elements = np.repeat([step.matrix.elements for step in steps], np.diff(ends))
    pixels = np.empty((ends[-1], 3, 3))
    for kind in set(elements.tolist()):
        own = np.flatnonzero(elements == kind)
        pixels[own] = pixel_matrices(torch.from_numpy(values[own]), size, elements=kind).numpy()
    return pixels


_BORDER = 1e-3  # pixels; Kornia's float32 matrices of quarter turns are up to 1e-4 pixels off


def _across_border(matrices: Float64, size: Size) -> tuple[Bool, Bool]:
    """Whether each matrix moves something out of the canvas, and whether it moves something from outside into it."""
    edges, (H, W) = from_indices(matrices), size
    canvas = np.broadcast_to(np.array([0.0, 0, W, H]), (len(edges), 4))
    outward, inward = (
        # NaN, which is behind the viewer, is outside
        ~(both(hull[:, :2] >= -_BORDER) & both(hull[:, 2:] <= (W + _BORDER, H + _BORDER)))
        for hull in (hulls(edges, canvas), hulls(inverse(edges), canvas))
    )
    return outward, inward


# --- operations that targets can follow


def check_carried(ops: Sequence[Prepared], names: Sequence[str], *, path: str = "augment.ops") -> None:
    """Raise ConfigError if an operation cannot move ``names``: masks, boxes, keypoints, corners, matrices."""
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
    kornias = kind.__module__.startswith("kornia.augmentation.")
    if entry is not None and entry.affects == "field" and {"matrices", "corners"} & {*names}:
        other = ", or set `targets.boxes.oriented=false`" if "corners" in names else ""
        raise ConfigError(
            f"`{key}` must move pixels by a matrix, because no matrix describes an offset per pixel. "
            f"Found: {kind.__name__}. Remove `{key}`{other}."
        )
    changes_values = kornias and isinstance(module, IntensityAugmentationBase2D)
    if entry is not None or changes_values or getattr(module, "affects", None) == "pixels":
        return
    remedy = "." if kornias else ', or, if it moves no pixels, give its class the attribute `affects = "pixels"`.'
    raise ConfigError(
        f"`{key}` must be an operation whose movement of pixels gpuaug knows, because {' and '.join(names)} have to "
        f"follow it. Found: {kind.__name__}. Remove `{key}`{remedy}"
    )
