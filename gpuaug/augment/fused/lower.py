"""Writes the program of a batch: the steps of every sample, in order, and their arguments."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.augment.ops import entry_of
from gpuaug.augment.ops.codes import ARGS, Code
from gpuaug.augment.ops.entry import Steps
from gpuaug.augment.ops.geometry import pixel_matrices
from gpuaug.augment.parameters import Chosen, Prepared, Size
from gpuaug.random.keyed import Float


class Column(NamedTuple):
    """The program's columns for one slot, from ``start`` on. They hold the steps of each sample's alternative."""

    op: int
    slot: int
    alternatives: tuple[Steps, ...]
    start: int
    table: NDArray[np.int32]  # [alternatives + 1, columns]: codes of each alternative, and NONE in the last row


class Lowering:
    """Turns choices for consecutive operations into a program. ``slots``: each operation's :func:`lowered_slots`."""

    def __init__(self, ops: list[Prepared], slots: list[list[tuple[Steps, ...]]]) -> None:
        self.ops = ops
        self.columns: list[Column] = []
        at = 0
        for number, op_slots in enumerate(slots):
            for slot, alternatives in enumerate(op_slots):
                width = max(len(a.codes) for a in alternatives)
                table = np.zeros((len(alternatives) + 1, width), dtype=np.int32)
                for row, a in enumerate(alternatives):
                    table[row, : len(a.codes)] = a.codes
                self.columns.append(Column(number, slot, alternatives, at, table))
                at += width
        self.steps = at

    def program(self, chosen: list[Chosen], size: Size, batch: int) -> tuple[NDArray[np.int32], Float]:
        """Return ``code`` int32 [B, steps] and ``args`` float32 [B, steps, ARGS]; code 0 is no step."""
        code = np.empty((batch, self.steps), dtype=np.int32)
        args = np.zeros((batch, self.steps, ARGS), dtype=np.float32)
        everything = np.arange(batch)
        values: dict[int, Float] = {}
        for column in self.columns:
            c = chosen[column.op]
            choice, params = c.choice[:, column.slot], c.params[column.slot]
            width = column.table.shape[1]
            where = slice(column.start, column.start + width)
            code[:, where] = column.table[choice]  # choice -1 selects the last row
            if len(column.alternatives) == 1:
                column.alternatives[0].write(args[:, where], params[0], size)
                continue
            # Compute every alternative for all samples: selecting rows would take further calls. The slots of a color
            # jitter share `params`, so their arguments are computed once.
            if id(params) not in values:
                stacked = np.zeros((len(params), batch, width, ARGS), dtype=np.float32)
                for alternative, a in enumerate(column.alternatives):
                    a.write(stacked[alternative][:, : len(a.codes)], params[alternative], size)
                values[id(params)] = stacked
            args[:, where] = values[id(params)][choice, everything]
        finish_warps(code, args, size)
        return code, args


def lowered_slots(op: Prepared) -> list[tuple[Steps, ...]] | str:
    """Return the steps of each slot's alternatives, or the reason why the operation cannot be fused."""
    if op.seeded is not None:
        return op.seeded
    slots = []
    for modules in op.slots:
        entries = [entry_of(module) for module in modules]
        steps = [entry and entry.steps(module) for entry, module in zip(entries, modules, strict=True)]
        if None in steps:
            return f"no fused form of {type(modules[steps.index(None)]).__name__} with these settings"
        slots.append(tuple(s for s in steps if s))
    return slots


# --- warps


def finish_warps(code: NDArray[np.int32], args: Float, size: Size) -> None:
    """Write Kornia's matrix from output to input positions (in -1..1) into the arguments of each warp."""
    sample, step = np.nonzero(code == Code.WARP)
    warps = args[sample, step]
    kind = 2 * warps[:, 10] + warps[:, 11]  # align_corners, projective
    for number in np.unique(kind):
        rows = np.flatnonzero(kind == number)
        m = pixel_matrices(torch.from_numpy(warps[rows, :9]), size, elements=bool(number % 2))
        if number % 2:
            m = m / _projective_scale(m)
        to, back = _normalized(size, number >= 2)
        args[sample[rows], step[rows], :9] = _inverse(to @ (m @ back)).reshape(-1, 9)


@lru_cache(maxsize=32)
def _normalized(size: Size, corners: bool) -> tuple[Tensor, Tensor]:
    """Matrices float32 [1, 3, 3] from pixel indices to -1..1 and back."""
    from kornia.geometry.conversions import normal_transform_pixel

    to = normal_transform_pixel(*size, device=torch.device("cpu"), dtype=torch.float32, align_corners=corners)
    return to, _inverse(to)


@lru_cache(maxsize=16)
def warp_ramps(size: Size) -> Float:
    """Output positions in -1..1, float32 [2, 2, W + H].

    Axis 0: affine, projective. Axis 1: align_corners False, True. Axis 2: all x, then all y.
    """
    from kornia.geometry.grid import create_meshgrid

    kind: Any = {"device": torch.device("cpu"), "dtype": torch.float32}
    ramps = np.zeros((2, 2, size[1] + size[0]), dtype=np.float32)
    for corners in (False, True):
        for start, n in ((0, size[1]), (size[1], size[0])):
            end = 1.0 if corners else 1.0 - 1.0 / n
            if n > 1:
                ramps[0, int(corners), start : start + n] = torch.linspace(-end, end, n, **kind)
        grid = create_meshgrid(*size, normalized_coordinates=True, align_corners=corners, **kind)
        ramps[1, int(corners)] = torch.cat([grid[0, 0, :, 0], grid[0, :, 0, 1]])
    return ramps


def _projective_scale(m: Tensor) -> Tensor:
    """Kornia's divisor for a homography: 1, clamped to the range of the non-zero absolute values in ``m``."""
    magnitude = m.abs()
    smallest = magnitude.masked_fill(magnitude == 0, float("inf")).amin(dim=(-2, -1), keepdim=True)
    return magnitude.amax(dim=(-2, -1), keepdim=True).clamp_max(1).maximum(smallest)


def _inverse(m: Tensor) -> Tensor:
    """Inverses of 3x3 matrices by cross products, as in Kornia."""
    a, b, c = m.unbind(-1)
    rows = [torch.linalg.cross(p, q, dim=-1) for p, q in ((b, c), (c, a), (a, b))]
    return torch.stack(rows, dim=-2) / (a * rows[0]).sum(-1)[..., None, None]
