"""``backend="fused"``: a whole recipe in one pass over the images.

takes: uint8 [B, H, W, 3] on the device, and per operation what was chosen for each sample.
does: lowers the choices to one short program per sample (lower.py) and runs the programs: on the CPU in one compiled
call (cpu.cpp), each image staying in cache from its uint8 pixels to the normalised output; on CUDA in a few Triton
kernels (cuda.py); elsewhere in torch (batched.py).
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
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpuaug.augment import reference
from gpuaug.augment.fused import batched
from gpuaug.augment.fused import cpu as native
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
_NATIVE = (torch.float32, torch.bfloat16, torch.float16)  # what native.run writes


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
        self.ops = tuple(ops)
        self.normalize = normalize
        self._parts = _parts(self.ops)
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
        size: Size = (images.shape[1], images.shape[2])
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            x = images
            if not images.numel():
                return reference.unit(images).to(dtype=dtype, memory_format=memory_format)
            for part in self._parts[:-1]:
                x = self._run(x, part, chosen, size, _BETWEEN)
            output = _Output(self._scale, self._shift, dtype, memory_format == torch.channels_last)
            return self._run(x, self._parts[-1], chosen, size, output)

    def _run(self, x: Tensor, part: _Part, chosen: Sequence[Chosen], size: Size, output: _Output) -> Tensor:
        if part.lowering is None:
            (number,) = part.numbers
            return reference.apply(reference.unit(x) if x.dtype == torch.uint8 else x, self.ops[number], chosen[number])
        own = [chosen[number] for number in part.numbers]
        code, args = part.lowering.program(own, size)
        if not own:
            code, args = np.zeros((len(x), 0), dtype=np.int32), np.zeros((len(x), 0, 1), dtype=np.float32)
        known = part.lowering.codes
        fields = partial(_fields, part.lowering, own, code, size, x.device)
        warps = Code.WARP in known and (code == Code.WARP).any()
        library = native.library() if x.device.type == "cpu" else None
        if library is not None:
            tables = [*_noise_tables(fields(), code), *(_blur_tables(code, args) if Code.BLUR in known else ())]
            ramps = warp_ramps(size) if warps else None
            narrow = output if output.dtype in _NATIVE else output._replace(dtype=torch.float32)
            y = native.run(library, x, code, args, tables=tables, ramps=ramps, **narrow._asdict())
            return y.to(output.dtype)
        kernels = _triton_kernels(x.device)
        if kernels is not None:
            ramps = warp_ramps(size) if warps else np.zeros(1, dtype=np.float32)
            try:
                noise_fields = fields(normal=kernels.normal_field)
                return kernels.run(x, code, args, fields=noise_fields, ramps=ramps, **output._asdict())
            except kernels.CannotRunError as error:
                _without_triton(str(error))
        return _batched(x, code, args, size, fields(), output)


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


def _batched(
    x: Tensor, code: NDArray[np.int32], args: Float, size: Size, fields: dict[int, Tensor], output: _Output
) -> Tensor:
    steps = batched.groups(code, args, range(code.shape[1]))
    ends = np.array([output.scale, output.shift], dtype=np.float32)
    numbers = [g.rows.astype(np.int32) for g in steps]
    ramps = warp_ramps(size) if any(g.code is Code.WARP for g in steps) else np.zeros(1, dtype=np.float32)
    values, affine, on_device, *rows = batched.upload([args, ends, ramps, *numbers], x.device)
    x = reference.unit(x) if x.dtype == torch.uint8 else x
    x = batched.run(x, steps, values, rows, fields=fields, ramps=on_device)
    memory_format = torch.channels_last if output.channels_last else torch.contiguous_format
    y = x * affine[0, :, None, None] + affine[1, :, None, None]
    return y.to(dtype=output.dtype, memory_format=memory_format)


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


Table = tuple[NDArray[np.int64], int, Tensor]


def _noise_tables(fields: dict[int, Tensor], code: NDArray[np.int32]) -> list[Table]:
    return [(np.flatnonzero(code[:, column] == Code.NOISE), column, values) for column, values in fields.items()]


def _blur_tables(code: NDArray[np.int32], args: Float) -> list[Table]:
    """The weights of the blurs, both directions in one row."""
    tables = []
    columns = np.flatnonzero((code == Code.BLUR).any(axis=0))
    for group in batched.groups(np.where(code == Code.BLUR, code, 0), args, columns.tolist()):
        sigma = torch.from_numpy(args[group.rows, group.column, 2:3])
        weights = [batched.gaussian(sigma, int(taps)) for taps in group.static[:2]]
        tables.append((group.rows, group.column, torch.cat(weights, dim=1).contiguous()))
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
