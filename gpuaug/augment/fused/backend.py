"""``backend="fused"``: a whole recipe in one pass over the images.

takes: uint8 [B, H, W, 3] on the device, and per operation what was chosen for each sample.
does: lowers the choices to one short program per sample (lower.py) and runs the programs: on the CPU in one compiled
call (cpu.cpp), each image staying in cache from its uint8 pixels to the normalised output; on CUDA in a few Triton
kernels (cuda.py). Without a C++ compiler, or without Triton, the whole recipe runs through Kornia (reference.py).
gives: [B, 3, H, W].

On every device a sample's pixels are the same bits in every batch, except through Kornia on CUDA (reference.py).

Because the program is data, another order, gate, policy or batch size compiles nothing. An operation without a lowering
runs through Kornia between two such passes; the log says so once.
"""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpuaug.augment import reference
from gpuaug.augment.fused import cpu as native
from gpuaug.augment.fused.cuda_steps import CannotRunError, groups
from gpuaug.augment.fused.lower import Lowering, lowered_slots, warp_ramps
from gpuaug.augment.ops import noise
from gpuaug.augment.ops.entry import Code, Steps
from gpuaug.augment.parameters import Chosen, Prepared, Size
from gpuaug.random.keyed import Float, normal_field

logger = logging.getLogger("gpuaug")

Three = tuple[float, float, float]


class _Output(NamedTuple):
    """How a pass leaves its pixels: ``x * scale + shift`` per channel, cast and laid out."""

    scale: Three
    shift: Three
    dtype: torch.dtype
    channels_last: bool


_NO_SCALE: tuple[Three, Three] = (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)
_BETWEEN = _Output(*_NO_SCALE, torch.float32, channels_last=False)


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive operations: either all lowered, or a single one that runs through Kornia."""

    numbers: tuple[int, ...]
    lowering: Lowering | None


class FusedBackend:
    """A recipe's operations in as few passes as they allow.

    Args:
        ops: the prepared operations, in order.
        normalize: has ``mean`` and ``std``, three values each in 0..1; applied at the end; None: nothing.
    """

    def __init__(self, ops: Sequence[Prepared], normalize: nn.Module | None = None) -> None:
        self._reference = reference.ReferenceBackend(ops, normalize)
        self._parts = _parts(tuple(ops))
        self._scale, self._shift = _affine(normalize)

    def __call__(
        self,
        images: Tensor,
        chosen: Sequence[Chosen],
        *,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> Tensor:
        """uint8 [B, H, W, 3] to [B, 3, H, W] of the given dtype and memory format; arithmetic in float32, one cast."""
        library = native.library() if images.device.type == "cpu" else None
        kernels = _triton_kernels(images.device) if library is None else None
        if images.numel() and (library or kernels) is not None:
            *between, last = self._parts
            output = _Output(self._scale, self._shift, dtype, memory_format == torch.channels_last)
            try:
                with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
                    x = images
                    for part in between:
                        x = self._run(x, part, chosen, _BETWEEN, library, kernels)
                    return self._run(x, last, chosen, output, library, kernels)
            except CannotRunError as error:
                _without_triton(str(error))
        return self._reference(images, chosen, dtype=dtype, memory_format=memory_format)

    def _run(
        self, x: Tensor, part: _Part, chosen: Sequence[Chosen], output: _Output, library: Any, kernels: Any
    ) -> Tensor:
        if part.lowering is None:
            (number,) = part.numbers
            x = reference.unit(x) if x.dtype == torch.uint8 else x
            return reference.apply(x, self._reference.ops[number], chosen[number])
        size = (x.shape[1], x.shape[2]) if x.dtype == torch.uint8 else (x.shape[2], x.shape[3])
        own = [chosen[number] for number in part.numbers]
        code, args = part.lowering.program(own, size)
        if not own:
            code, args = np.zeros((len(x), 0), dtype=np.int32), np.zeros((len(x), 0, 1), dtype=np.float32)
        ramps = warp_ramps(size) if (code == Code.WARP).any() else None
        if library is None:
            fields = _fields(part.lowering, own, code, size, x.device, kernels.normal_field)
            ramps = np.zeros(1, dtype=np.float32) if ramps is None else ramps
            return kernels.run(x, code, args, fields=fields, ramps=ramps, **output._asdict())
        noise_tables = [
            (np.flatnonzero(code[:, column] == Code.NOISE), column, values)
            for column, values in _fields(part.lowering, own, code, size, x.device).items()
        ]
        tables = noise_tables + _blur_tables(code, args)
        return native.run(library, x, code, args, tables=tables, ramps=ramps, **output._asdict())


_no_triton: list[str] = []  # why, once Triton has failed


def _triton_kernels(device: torch.device) -> Any:
    """The module of CUDA kernels, or None: for another device, and where Triton cannot be imported or has failed."""
    if device.type != "cuda" or _no_triton:
        return None
    try:
        from gpuaug.augment.fused import cuda as triton_kernels
    except Exception as error:  # a library or a folder that Triton lacks, as well as Triton itself
        _without_triton(f"{type(error).__name__}: {error}")
        return None
    return triton_kernels


def _without_triton(why: str) -> None:
    """Go on without Triton in this process; says so once."""
    if not _no_triton:
        logger.warning(
            "augment on cuda runs operation by operation, many times slower: Triton cannot run (%s). It needs gcc (or "
            "CC) and Python's headers (python3-dev), libcuda.so.1 among the libraries of `ldconfig -p`, a folder to "
            "write to (TRITON_CACHE_DIR), and a release that knows this GPU.",
            textwrap.shorten(why, 500),
        )
    _no_triton.append(why)


def _parts(ops: tuple[Prepared, ...]) -> list[_Part]:
    """The operations in runs; the last part is always a fused one, which also normalises and casts."""
    parts: list[_Part] = []
    numbers: list[int] = []
    slots: list[list[tuple[Steps, ...]]] = []

    def close() -> None:
        parts.append(_Part(tuple(numbers), Lowering([ops[n] for n in numbers], list(slots))))
        numbers.clear()
        slots.clear()

    for number, op in enumerate(ops):
        lowered = lowered_slots(op)
        if isinstance(lowered, str):
            say(op.name, type(op.op).__name__, lowered)
            if numbers:
                close()
            parts.append(_Part((number,), None))
        else:
            numbers.append(number)
            slots.append(lowered)
    close()
    return parts


@lru_cache(maxsize=1024)
def say(name: str, kind: str, why: str) -> None:
    """Once, however many views and loaders have it."""
    logger.info("`%s` (%s) runs through Kornia: %s", name, kind, why)


def _fields(
    lowering: Lowering,
    chosen: list[Chosen],
    code: NDArray[np.int32],
    size: Size,
    device: torch.device,
    normal: Callable[[Tensor, int], Tensor] = normal_field,
) -> dict[int, Tensor]:
    """Per column with noise, the values to add to its rows: float32 [rows, 3, H, W] on the device."""
    fields: dict[int, Tensor] = {}
    for column in lowering.columns if Code.NOISE in lowering.codes else ():
        op, c = lowering.ops[column.op], chosen[column.op]
        rows = np.flatnonzero(code[:, column.start] == Code.NOISE)
        if not len(rows):
            continue
        assert c.keys is not None
        for alternative, module in enumerate(op.slots[column.slot]):
            of = np.flatnonzero(c.choice[rows, column.slot] == alternative)
            if len(of) and column.table[alternative, 0] == Code.NOISE:
                # keys and an index that are not on the device yet would be waited for
                keys = torch.from_numpy(c.keys[rows[of]]).to(device, non_blocking=True)
                drawn = noise(module, keys, size, normal)["gaussian_noise"]
                if len(of) == len(rows):
                    fields[column.start] = drawn
                    break
                if column.start not in fields:
                    fields[column.start] = drawn.new_empty((len(rows), *drawn.shape[1:]))
                fields[column.start].index_copy_(0, torch.from_numpy(of).to(device, non_blocking=True), drawn)
    return fields


def _blur_tables(code: NDArray[np.int32], args: Float) -> list[tuple[NDArray[np.int64], int, Tensor]]:
    """The weights of the blurs, both directions in one row."""
    from kornia.filters import get_gaussian_kernel1d

    tables = []
    for column in np.flatnonzero((code == Code.BLUR).any(axis=0)).tolist():
        for group in groups(np.where(code[:, column] == Code.BLUR, code[:, column], 0), args[:, column]):
            sigma = torch.from_numpy(args[group.rows, column, 2:3])
            weights = [get_gaussian_kernel1d(int(taps), sigma) for taps in group.static[:2]]
            tables.append((group.rows, column, torch.cat(weights, dim=1)))
    return tables


def _affine(normalize: Any) -> tuple[Three, Three]:
    """Normalization as ``x * scale + shift``."""
    if normalize is None:
        return _NO_SCALE
    mean, std = (
        torch.as_tensor(v, dtype=torch.float64).flatten().expand(3).tolist() for v in (normalize.mean, normalize.std)
    )
    scale, shift = [1 / s for s in std], [-m / s for m, s in zip(mean, std, strict=True)]
    return (scale[0], scale[1], scale[2]), (shift[0], shift[1], shift[2])
