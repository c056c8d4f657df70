"""``backend="fused"``: runs a recipe in as few passes over the images as possible.

A program says what happens to a batch: one row per sample, one column per step. cpu.cpp runs it on the CPU, and the
kernels of cuda.py run it on CUDA. An operation without fused steps runs through Kornia, between two programs. Without a
C++ compiler (CPU) or Triton (CUDA), the whole recipe runs through Kornia (reference.py).

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
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpuaug.augment import reference
from gpuaug.augment.chains import mixed, one_chain
from gpuaug.augment.cut import fill_of, keeps_levels
from gpuaug.augment.fused.cuda_steps import CannotRunError, Table, groups, upload
from gpuaug.augment.images import WHITE, NotFiniteError, is_finite, size_of, unit
from gpuaug.augment.ops.codes import ARGS, Code, as_cpp
from gpuaug.augment.ops.geometry import finish_warps, warp_ramps
from gpuaug.augment.parameters import Chosen, Normal, Prepared, Size, Steps, tensors
from gpuaug.augment.policy import entry_of, fields
from gpuaug.batch import CropWindows, Interpolation
from gpuaug.decode import resize
from gpuaug.errors import shown_size
from gpuaug.native import build
from gpuaug.native.buffers import outputs, to_device
from gpuaug.random.keyed import Float, normal_field

logger = logging.getLogger("gpuaug")

_Output = tuple[Any, Any, torch.dtype, bool]  # scale, shift (per channel: x * scale + shift), dtype, channels last
_BETWEEN: _Output = (1.0,), (0.0,), torch.float32, False


class Reading(NamedTuple):
    """How the first kernel reads the images. Between kernels, images are floats in 0..1 of their final size.

    Attributes:
        white: the value that becomes 1; None: that of the images' type.
        crop: windows that cpu.cpp cuts out and resizes first, one image at a time; None: no crop.
        refuses: whether cpu.cpp raises NotFiniteError if values are NaN or infinite.
    """

    white: float | None = None
    crop: CropWindows | None = None
    refuses: bool = False


_PLAIN = Reading()


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
        white: float | None = None,
        crop: CropWindows | None = None,
        refuses: bool = False,
    ) -> Tensor:
        """Do what :class:`~gpuaug.augment.reference.ReferenceBackend` does. Only the final float32 result is cast."""
        size_of(images)
        compiled = (library() if images.device.type == "cpu" else None) or triton_kernels(images.device)
        if images.numel() and compiled is not None:
            last = (*self._affine, dtype, memory_format == torch.channels_last)
            device = torch.cuda.device(images.device) if images.is_cuda else nullcontext()
            try:
                with torch.no_grad(), torch.autocast(images.device.type, enabled=False), device:
                    x, reading = images, Reading(white, crop, refuses)
                    if images.is_cuda:
                        if refuses and not is_finite(images):
                            raise NotFiniteError
                        if crop is not None:
                            x, white = compiled.crop(x, crop, WHITE[x.dtype] if white is None else white)
                        reading = Reading(white)
                    elif (crop or refuses) and (self._parts[0].columns is None or self._parts[0].chains):
                        x = _run_on_cpu(compiled, x, *_no_steps(len(x)), _BETWEEN, reading).permute(0, 2, 3, 1)
                        reading = _PLAIN
                    for part in self._parts:
                        output = last if part is self._parts[-1] else _BETWEEN
                        if output == _BETWEEN and not part.numbers and x is not images:
                            break  # no operation, normalization or cast is left
                        x = self._run(x, part, chosen, compiled, output, reading).permute(0, 2, 3, 1)
                        reading = _PLAIN
                    return x.permute(0, 3, 1, 2)
            except CannotRunError as error:
                without_triton(str(error))
        wanted: dict[str, Any] = {"dtype": dtype, "memory_format": memory_format}
        return self._reference(images, chosen, white=white, crop=crop, refuses=refuses, **wanted)

    def _run(
        self,
        x: Tensor,
        part: Part,
        chosen: Sequence[Chosen],
        compiled: Any,
        output: _Output,
        reading: Reading = _PLAIN,
    ) -> Tensor:
        """Run a part on [B, H, W, C]. Returns [B, C, H, W]."""
        own = [chosen[number] for number in part.numbers]
        if part.columns is not None and not part.chains:
            return part.run(x, own, compiled, output, reading)
        op = self._reference.ops[part.numbers[0]]
        y = unit(x, reading.white)
        if part.columns is None:
            return reference.apply(y, op, own[0])
        return mixed(y, op, own[0], lambda y, chain: part.run(y.permute(0, 2, 3, 1), [chain], compiled, _BETWEEN))


class Part:
    """Consecutive operations with fused steps, one operation with chains, or one operation that runs through Kornia.

    Attributes:
        numbers: of the operations, counted from the recipe's first.
        ops: the operations; one chain of an operation with chains.
        chains: whether the operation has chains.
        columns: None if the operation runs through Kornia. Otherwise, for each slot: its operation in ``ops``, its
            number there, the steps of its alternatives, the program's columns for them, and the codes int32
            [alternatives + 1, columns] of each alternative. The last row is for samples without an alternative.
        formulas: of steps that only gpuaug's own operations have.
    """

    def __init__(self, numbers: range, ops: Sequence[Prepared], slots: Sequence[Any]) -> None:
        """``ops`` and ``slots``: of the whole recipe."""
        self.numbers, self.chains = numbers, any(ops[number].chains for number in numbers)
        self.ops = [one_chain(ops[number]) if self.chains else ops[number] for number in numbers]
        self.columns: list[tuple[int, int, tuple[Steps, ...], slice, NDArray[np.int32]]] | None = None
        self.formulas: dict[Code, Any] = {}
        self.width = 0  # of the program
        if any(slots[number] is None for number in numbers):
            return
        self.columns = []
        for op, number in enumerate(numbers):
            for slot, alternatives in enumerate(slots[number]):
                self.formulas |= {code: a.formula for a in alternatives for code in a.codes if a.formula is not None}
                codes = np.zeros((len(alternatives) + 1, max(len(a.codes) for a in alternatives)), dtype=np.int32)
                for row, a in enumerate(alternatives):
                    codes[row, : len(a.codes)] = a.codes
                start, self.width = self.width, self.width + codes.shape[1]
                self.columns.append((op, slot, alternatives, slice(start, self.width), codes))

    def run(self, x: Tensor, chosen: list[Chosen], compiled: Any, output: _Output, reading: Reading = _PLAIN) -> Tensor:
        """Run the program on [B, H, W, C]. ``compiled``: cpu.cpp or Triton's kernels."""
        size, channels = size_of(x) if reading.crop is None else reading.crop.size, x.shape[3]
        code, args = self.program(chosen, size, len(x))
        ramps = warp_ramps(size) if (code == Code.WARP).any() else np.zeros(1, dtype=np.float32)
        if isinstance(compiled, ctypes.CDLL):
            tables = self.tables(chosen, size, x.device, channels=channels) + _weights(code, args)
            return _run_on_cpu(compiled, x, code, args, tables, ramps, output, reading)
        scale, shift, dtype, channels_last = output
        tables = self.tables(chosen, size, x.device, compiled.normal_field, channels)
        program = upload(code, args, ramps, scale, shift, x.device, channels)
        more = {"tables": tables, "formulas": self.formulas, "white": reading.white}
        return compiled.launch(x, program, dtype=dtype, channels_last=channels_last, **more)

    def program(self, chosen: list[Chosen], size: Size, batch: int) -> tuple[NDArray[np.int32], Float]:
        """Return ``code`` int32 [B, steps] and ``args`` float32 [B, steps, ARGS]; code 0 is no step."""
        code = np.empty((batch, self.width), dtype=np.int32)
        args = np.zeros((batch, self.width, ARGS), dtype=np.float32)
        everything = np.arange(batch)
        values: dict[int, Float] = {}
        for op, slot, alternatives, where, codes in self.columns or ():
            choice, params = chosen[op].choice[:, slot], chosen[op].params[slot]
            code[:, where] = codes[choice]  # choice -1 selects the last row
            if len(alternatives) == 1:
                alternatives[0].write(args[:, where], params[0], size)
                continue
            # Compute every alternative for all samples: selecting rows would take further calls. The slots of a color
            # jitter share `params`, so their arguments are computed once.
            if id(params) not in values:
                stacked = np.zeros((len(params), batch, codes.shape[1], ARGS), dtype=np.float32)
                for alternative, a in enumerate(alternatives):
                    a.write(stacked[alternative][:, : len(a.codes)], params[alternative], size)
                values[id(params)] = stacked
            args[:, where] = values[id(params)][choice, everything]
        finish_warps(code, args, size)
        return code, args

    def tables(
        self, chosen: list[Chosen], size: Size, device: torch.device, normal: Normal = normal_field, channels: int = 3
    ) -> list[Table]:
        """Make tables for steps that need more numbers than ``args`` holds."""
        tables = []
        for op, slot, alternatives, where, _ in self.columns or ():
            c = chosen[op]
            for alternative, steps in enumerate(alternatives):
                if steps.table is None or not len(rows := np.flatnonzero(c.choice[:, slot] == alternative)):
                    continue
                first = rows[:: c.frames]  # frames of a clip share a row of the table
                values = tensors(c.params[slot][alternative], first)
                if c.keys is not None:
                    key = to_device(torch.from_numpy(c.keys[first]), device)
                    values |= fields(self.ops[op].slots[slot][alternative], values, key, size, normal, channels)
                table = to_device(steps.table(values), device).contiguous()
                tables.append((rows.reshape(len(first), -1), where.start, table))
        return tables


def _parts(ops: tuple[Prepared, ...]) -> list[Part]:
    """Split the operations into parts. The last part is always a fused one, because it also normalises and casts."""
    slots = [_slots(one_chain(op) if op.chains else op) for op in ops]
    parts, first = [], 0
    for number in range(len(ops) + 1):
        end = number == len(ops)
        if not end and slots[number] is not None and not ops[number].chains:
            continue
        if end or first < number:
            parts.append(Part(range(first, number), ops, slots))
        if not end:
            parts.append(Part(range(number, number + 1), ops, slots))
        first = number + 1
    return parts


def _slots(op: Prepared) -> list[tuple[Steps, ...]] | None:
    """The steps of each slot's alternatives; None if the operation has no fused form, which is logged."""
    slots = []
    why = op.seeded
    for modules in op.slots if why is None else ():
        entries = [entry_of(module) for module in modules]
        steps = [entry and entry.steps(module) for entry, module in zip(entries, modules, strict=True)]
        if None in steps:
            why = f"no fused form of {type(modules[steps.index(None)]).__name__} with these settings"
            break
        slots.append(tuple(s for s in steps if s))
    if why is not None:
        say(op.name, type(op.op).__name__, why)
        return None
    return slots


@lru_cache(maxsize=1024)
def say(name: str, kind: str, why: str) -> None:
    """Log once why an operation runs through Kornia."""
    logger.info("`%s` (%s) runs through Kornia: %s", name, kind, why)


def _weights(code: NDArray[np.int32], args: Float) -> list[Table]:
    """The weights of blurs: first those in x, then those in y."""
    from kornia.filters import get_gaussian_kernel1d

    tables = []
    blurs = np.where(code == Code.BLUR, code, 0)
    for column in np.flatnonzero(blurs.any(axis=0)).tolist():
        for group in groups(blurs[:, column], args[:, column]):
            sigma = torch.from_numpy(args[group.rows, column, 2:3])
            weights = torch.cat([get_gaussian_kernel1d(int(taps), sigma) for taps in group.static[:2]], dim=1)
            tables.append((group.rows[:, None], column, weights.contiguous()))
    return tables


def _affine(normalize: Any) -> tuple[Any, Any]:
    """Scale and shift per channel of the normalization ``x * scale + shift``."""
    if normalize is None:
        return _BETWEEN[:2]
    mean, std = (v.double().cpu() for v in (normalize.mean, normalize.std))
    return tuple((1 / std).tolist()), tuple((-mean / std).tolist())


# --- cpu.cpp

# makes the recipe `standard` a fifth faster, because min and max become one instruction each
_FLAGS = (*build.FLAGS, "-ffinite-math-only")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.uint8: 3, torch.uint16: 4}


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled cpu.cpp, or None if it cannot be compiled, or resize.cpp, which it calls."""
    built = build.load(
        "augment/fused/cpu.cpp", name="augment", flags=_FLAGS, definitions=as_cpp(),
        without="runs uncompiled, many times slower",
    )  # fmt: skip
    return None if built is None or resize.library() is None else built


class _Images(ctypes.Structure):
    """The struct ``Images`` of cpu.cpp."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("height", ctypes.c_int64), ("width", ctypes.c_int64),
        ("apart", ctypes.c_int64 * 4), ("white", ctypes.c_float), ("type", ctypes.c_int32),
    )  # fmt: skip


class _Crop(ctypes.Structure):
    """The struct ``Crop`` of cpu.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("window", "resized", "offset", "fill")),
        *(("interpolation", ctypes.c_int32), ("tasks", ctypes.c_void_p), ("resize", ctypes.c_void_p)),
    )


class _Job(ctypes.Structure):
    """The struct ``Job`` of cpu.cpp."""

    _fields_ = (
        ("from", _Images),
        *((name, ctypes.c_void_p) for name in ("dst", "code", "args", "tables", "ramps", "scale", "shift")),
        *((name, ctypes.c_int64) for name in ("batch", "channels", "height", "width", "steps")),
        *((name, ctypes.c_int32) for name in ("dst_type", "channels_last", "threads", "refuses")),
        ("crop", ctypes.POINTER(_Crop)),
    )


def _no_steps(batch: int) -> tuple[NDArray[np.int32], Float, list[Table], Float]:
    """A program that changes nothing."""
    return np.zeros((batch, 0), dtype=np.int32), np.zeros(1, dtype=np.float32), [], np.zeros(1, dtype=np.float32)


def _run_on_cpu(
    library: ctypes.CDLL, images: Tensor, code: NDArray[np.int32], args: Float, tables: list[Table], ramps: Float,
    output: _Output, reading: Reading,
) -> Tensor:  # fmt: skip
    (scale, shift, dtype, channels_last), (white, crop, refuses) = output, reading
    batch, height, width, channels = images.shape
    white = WHITE[images.dtype] if white is None else white
    image, row, pixel, channel = images.stride()
    apart = (ctypes.c_int64 * 4)(image, channel, row, pixel)
    source = _Images(images.data_ptr(), height, width, apart, white, _DTYPES[images.dtype])
    windows = None
    if crop is not None:
        height, width = crop.size
        arrays: list[NDArray[Any]] = [
            np.ascontiguousarray(v, dtype=np.int32) for v in (crop.window, crop.resized, crop.offset)
        ]
        arrays.append(fill_of(crop, channels))
        place = _Crop(*(array.ctypes.data for array in arrays), get_args(Interpolation).index(crop.interpolation))
        if keeps_levels(images, crop, white):
            resizing = resize.library()
            assert resizing is not None  # else `library` is None
            arrays.append(resize.tasks_of(images, crop))
            place.tasks = arrays[-1].ctypes.data
            place.resize = ctypes.cast(resizing.gpuaug_resize_one, ctypes.c_void_p)
        windows = ctypes.pointer(place)
    out = outputs.take((batch, channels, height, width), dtype, channels_last)
    pointers = np.zeros(code.shape, dtype=np.int64)
    for rows, column, values in tables:
        pointers[rows, column] = values.data_ptr() + np.arange(len(rows))[:, None] * (values[0].numel() * 4)
    if len(scale) not in (1, channels):  # the kernel would read other memory
        raise TypeError(f"expected a normalization of {channels} channels, but got {len(scale)} values")
    affine = np.array([values * (channels // len(values)) for values in (scale, shift)], dtype=np.float32)
    # a thread costs about 50 us, so one thread is faster below 100,000 pixels
    threads = torch.get_num_threads() if batch * height * width >= 100_000 else 1
    job = _Job(
        *(source, out.data_ptr(), code.ctypes.data, args.ctypes.data),
        *(pointers.ctypes.data if tables else None, ramps.ctypes.data, affine[0].ctypes.data, affine[1].ctypes.data),
        *(batch, channels, height, width, code.shape[1]),
        *(_DTYPES[dtype], channels_last, threads, refuses and images.is_floating_point(), windows),
    )
    failed = library.gpuaug_augment(ctypes.byref(job))  # ctypes releases the GIL
    if failed == 2:
        raise NotFiniteError
    if failed:
        raise MemoryError(
            f"Out of memory while augmenting images of {shown_size(height, width)}. Free memory or use smaller images."
        )
    return out


# --- Triton

_no_triton: list[str] = []  # why Triton failed; empty if it did not


def triton_kernels(device: torch.device) -> Any:
    """The module cuda.py; None for a CPU, or if Triton cannot run in this process."""
    if device.type != "cuda" or _no_triton:
        return None
    try:
        from gpuaug.augment.fused import cuda
    except (ImportError, OSError) as error:  # Triton or something that Triton needs is missing
        if (getattr(error, "name", None) or "").startswith("gpuaug"):
            raise
        without_triton(f"{type(error).__name__}: {error}")
        return None
    return cuda


def without_triton(why: str) -> None:
    """Stop using Triton in this process, and log a warning once."""
    if not _no_triton:
        logger.warning(
            "augment on cuda runs operation by operation, which is many times slower, because Triton cannot run (%s). "
            "Triton needs a C compiler and Python's headers (apt-get install gcc libc6-dev python3-dev), libcuda.so.1 "
            "in the list of `ldconfig -p`, a writable TRITON_CACHE_DIR, and a Triton release that supports this GPU.",
            textwrap.shorten(why, 500),
        )
    _no_triton.append(why)
