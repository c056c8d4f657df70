"""``backend="fused"``: runs a recipe in as few passes over the images as possible.

lower.py writes one short program per sample. cpu.cpp runs the programs on the CPU, and the kernels of cuda.py run them
on CUDA. An operation without fused steps runs through Kornia, between two passes. Without a C++ compiler (CPU) or
Triton (CUDA), the whole recipe runs through Kornia (reference.py).

On one device, a sample's pixels are bit-identical in every batch. Operations that run through Kornia on CUDA are an
exception.
"""

from __future__ import annotations

import ctypes
import logging
import textwrap
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpuaug.augment import reference
from gpuaug.augment.chains import mixed, one_chain
from gpuaug.augment.fused import cpu as native
from gpuaug.augment.fused.cuda_steps import CannotRunError, Table, groups, motion_kernels, upload
from gpuaug.augment.fused.lower import Lowering, lowered_slots, warp_ramps
from gpuaug.augment.ops import fields
from gpuaug.augment.ops.codes import Code
from gpuaug.augment.ops.entry import Normal
from gpuaug.augment.parameters import Chosen, Prepared, Size, tensors
from gpuaug.random.keyed import Float, normal_field

logger = logging.getLogger("gpuaug")

_Output = tuple[Any, Any, torch.dtype, bool]  # scale, shift (per channel: x * scale + shift), dtype, channels last
_LARGEST_GRID = 65535  # CUDA's limit for the dimension of a grid that counts the samples
_BETWEEN: _Output = (1.0, 1.0, 1.0), (0.0, 0.0, 0.0), torch.float32, False


class _Part(NamedTuple):
    """Consecutive operations with fused steps, one operation with chains, or one operation that runs through Kornia."""

    numbers: tuple[int, ...]
    lowering: Lowering | None = None
    chain: Lowering | None = None


class FusedBackend:
    """Runs prepared operations in order, then ``normalize``, a module with ``mean`` and ``std``."""

    def __init__(self, ops: Sequence[Prepared], normalize: nn.Module | None = None) -> None:
        self._reference = reference.ReferenceBackend(ops, normalize)
        self._parts = _parts(tuple(ops))
        self._affine = _affine(normalize)

    def __call__(
        self,
        images: Tensor,
        chosen: Sequence[Chosen],
        *,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> Tensor:
        """Map uint8 [B, H, W, 3] to [B, 3, H, W]. Only the final float32 result is cast."""
        library = native.library() if images.device.type == "cpu" else None
        compiled = library or _triton_kernels(images.device)
        if compiled is not library and len(images) > _LARGEST_GRID:
            output: Any = {"dtype": dtype, "memory_format": memory_format}
            pieces = (slice(at, at + _LARGEST_GRID) for at in range(0, len(images), _LARGEST_GRID))
            return torch.cat([self(images[own], [c.rows(own) for c in chosen], **output) for own in pieces])
        if images.numel() and compiled is not None:
            last = (*self._affine, dtype, memory_format == torch.channels_last)
            outputs = [_BETWEEN] * (len(self._parts) - 1) + [last]
            device = torch.cuda.device(images.device) if images.is_cuda else nullcontext()
            try:
                with torch.no_grad(), torch.autocast(images.device.type, enabled=False), device:
                    x = images
                    for part, output in zip(self._parts, outputs, strict=True):
                        if output == _BETWEEN and not part.numbers and x.dtype == torch.float32:
                            continue  # no operation, normalization or cast is left
                        x = self._run(x, part, chosen, compiled, output)
                    return x
            except CannotRunError as error:
                _without_triton(str(error))
        return self._reference(images, chosen, dtype=dtype, memory_format=memory_format)

    def _run(self, x: Tensor, part: _Part, chosen: Sequence[Chosen], compiled: Any, output: _Output) -> Tensor:
        if part.lowering is None:
            (number,) = part.numbers
            x = reference.unit(x) if x.dtype == torch.uint8 else x
            op = self._reference.ops[number]
            if part.chain is None:
                return reference.apply(x, op, chosen[number])
            one = _Part((0,), part.chain)
            return mixed(x, op, chosen[number], lambda x, own: self._run(x, one, [own], compiled, _BETWEEN))
        size = (x.shape[1], x.shape[2]) if x.dtype == torch.uint8 else (x.shape[2], x.shape[3])
        own = [chosen[number] for number in part.numbers]
        code, args = part.lowering.program(own, size, len(x))
        ramps = warp_ramps(size) if (code == Code.WARP).any() else np.zeros(1, dtype=np.float32)
        scale, shift, dtype, channels_last = output
        if isinstance(compiled, ctypes.CDLL):
            tables = _tables(part.lowering, own, size, x.device) + _weights(code, args)
            return native.run(compiled, x, code, args, tables, ramps, scale, shift, dtype, channels_last)
        tables = _tables(part.lowering, own, size, x.device, compiled.normal_field)
        program = upload(code, args, ramps, scale, shift, x.device)
        return compiled.launch(x, program, tables=tables, dtype=dtype, channels_last=channels_last)


_no_triton: list[str] = []  # why Triton failed; empty if it did not


def _triton_kernels(device: torch.device) -> Any:
    if device.type != "cuda" or _no_triton:
        return None
    try:
        from gpuaug.augment.fused import cuda as triton_kernels
    except Exception as error:  # Triton or something that Triton needs is missing
        _without_triton(f"{type(error).__name__}: {error}")
        return None
    return triton_kernels


def _without_triton(why: str) -> None:
    """Stop using Triton in this process, and log a warning once."""
    if not _no_triton:
        logger.warning(
            "augment on cuda runs operation by operation, which is many times slower, because Triton cannot run (%s). "
            "Triton needs gcc (or CC), Python's headers (python3-dev), libcuda.so.1 in the list of `ldconfig -p`, a "
            "writable folder (TRITON_CACHE_DIR), and a Triton release that supports this GPU.",
            textwrap.shorten(why, 500),
        )
    _no_triton.append(why)


def _parts(ops: tuple[Prepared, ...]) -> list[_Part]:
    """Split the operations into parts. The last part is always a fused one, because it also normalises and casts."""
    slots = [lowered_slots(one_chain(op) if op.chains else op) for op in ops]
    alone = [number for number, lowered in enumerate(slots) if isinstance(lowered, str) or ops[number].chains]
    parts, first = [], 0
    for number in (*alone, len(ops)):
        if first < number or number == len(ops):
            own = range(first, number)
            parts.append(_Part(tuple(own), Lowering([ops[n] for n in own], [slots[n] for n in own])))  # type: ignore[misc]
        if number < len(ops) and not isinstance(slots[number], str):
            parts.append(_Part((number,), chain=Lowering([one_chain(ops[number])], [slots[number]])))  # type: ignore[list-item]
        elif number < len(ops):
            say(ops[number].name, type(ops[number].op).__name__, str(slots[number]))
            parts.append(_Part((number,)))
        first = number + 1
    return parts


@lru_cache(maxsize=1024)
def say(name: str, kind: str, why: str) -> None:
    """Log once why an operation runs through Kornia."""
    logger.info("`%s` (%s) runs through Kornia: %s", name, kind, why)


def _tables(
    lowering: Lowering, chosen: list[Chosen], size: Size, device: torch.device, normal: Normal = normal_field
) -> list[Table]:
    """Make tables for modules that need more numbers than ``args`` holds."""
    tables = []
    for column in lowering.columns:
        c = chosen[column.op]
        for alternative, steps in enumerate(column.alternatives):
            if steps.table is None or not len(rows := np.flatnonzero(c.choice[:, column.slot] == alternative)):
                continue
            values = tensors(c.params[column.slot][alternative], rows)
            if c.keys is not None:
                key = torch.from_numpy(c.keys[rows]).to(device, non_blocking=True)
                module = lowering.ops[column.op].slots[column.slot][alternative]
                values |= fields(module, values, key, size, normal)
            tables.append((rows, column.start, steps.table(values).to(device, non_blocking=True).contiguous()))
    return tables


def _weights(code: NDArray[np.int32], args: Float) -> list[Table]:
    """The weights of blurs: first those in x, then those in y. The weights of a motion blur form a square."""
    from kornia.filters import get_gaussian_kernel1d

    tables = []
    weighted = np.where((code == Code.BLUR) | (code == Code.FILTER), code, 0)
    for column in np.flatnonzero(weighted.any(axis=0)).tolist():
        for group in groups(weighted[:, column], args[:, column]):
            own = torch.from_numpy(args[group.rows, column])
            if group.code is Code.FILTER:
                weights = motion_kernels(own, group.static)
            else:
                weights = torch.cat([get_gaussian_kernel1d(int(taps), own[:, 2:3]) for taps in group.static[:2]], dim=1)
            tables.append((group.rows, column, weights.contiguous()))
    return tables


def _affine(normalize: Any) -> tuple[Any, Any]:
    """Scale and shift per channel of the normalization ``x * scale + shift``."""
    if normalize is None:
        return _BETWEEN[:2]
    mean, std = (v.double().cpu() for v in (normalize.mean, normalize.std))
    return tuple((1 / std).tolist()), tuple((-mean / std).tolist())
