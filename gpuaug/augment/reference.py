"""``backend="kornia"``: Kornia's own modules, applied to the samples that were chosen for them, with our parameters.

takes: uint8 [B, H, W, 3] on the device, and per operation what was chosen for each sample.
does: float32 in 0..1, [B, 3, H, W]; per operation, slot and alternative the chosen rows are gathered, go through the
module and are put back; then normalization and one cast.
gives: [B, 3, H, W].

It is the reference: slow, and on the CPU bit for bit independent of which samples share a batch. A group is never a
single row: with one row torch takes other paths (a mean over one output is split over threads, a convolution of one
small image takes another kernel), and the last bits differ. So a lone row is doubled. Operations whose entry says
``one_by_one`` are the opposite, always row by row.

On CUDA samples are independent of their batch within 2e-6: torch adds up the mean of an image in an order that depends
on the number of images. Products of matrices and convolutions are taken in float64 there: TF32, which convolutions use
by default, leaves 10 bits of a pixel (5e-4 in a median blur). It is a setting of the whole process: without it for a
moment, another thread would train otherwise.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpuaug.augment.ops import entry_of, noise
from gpuaug.augment.ops.kornia_private import forget
from gpuaug.augment.parameters import Chosen, Params, Prepared, tensors
from gpuaug.errors import ConfigError
from gpuaug.random.keyed import Int

logger = logging.getLogger("gpuaug")


class ReferenceBackend:
    """A recipe's prepared operations, in order, through Kornia; then ``normalize``, in float32, unless it is None."""

    def __init__(self, ops: Sequence[Prepared], normalize: nn.Module | None = None) -> None:
        self.ops = tuple(ops)
        self.normalize = normalize

    def __call__(
        self,
        images: Tensor,
        chosen: Sequence[Chosen],
        *,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> Tensor:
        """uint8 [B, H, W, 3] to [B, 3, H, W] of the given dtype and memory format; arithmetic in float32, one cast."""
        # autocast of the caller would turn matrices and convolutions into half precision
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            x = unit(images)
            if len(x):
                for op, c in zip(self.ops, chosen, strict=True):
                    x = apply(x, op, c)
            if self.normalize is not None:
                x = self.normalize(x)
            return x.to(dtype=dtype, memory_format=memory_format)


def unit(images: Tensor) -> Tensor:
    """uint8 [B, H, W, 3] to float32 [B, 3, H, W] in 0..1, contiguous, in memory of its own."""
    x = torch.empty((len(images), 3, *images.shape[1:3]), dtype=torch.float32, device=images.device)
    return x.copy_(images.permute(0, 3, 1, 2)).div_(255)


def apply(x: Tensor, op: Prepared, chosen: Chosen) -> Tensor:
    """One operation on float32 [B, 3, H, W]; ``x`` is used up.

    Raises:
        ConfigError: Kornia's operation refuses, for example a blur of images smaller than its kernel.
    """
    shape = list(x.shape)
    try:
        with _Float64Products() if x.is_cuda else nullcontext():
            if op.seeded is not None:
                assert chosen.keys is not None
                return _apply_seeded(x, op, chosen.keys)
            for slot, modules in enumerate(op.slots):
                for alternative, module in enumerate(modules):
                    rows = np.flatnonzero(chosen.choice[:, slot] == alternative)
                    if len(rows):
                        x = _apply_rows(x, module, rows, chosen.params[slot][alternative], chosen.keys)
            return x
    except Exception as error:
        kind = type(op.op)
        refused = isinstance(error, ImportError | RuntimeError | TypeError | ValueError)
        lost = isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError | ConfigError)
        if lost or not refused or not kind.__module__.startswith("kornia."):
            error.add_note(f"in operation `{op.name}` ({kind.__name__}) on {shape}")
            raise
        raise ConfigError(
            f"`ops.{op.name}` ({kind.__name__}) cannot be applied to images of {shape[2]}x{shape[3]} pixels: "
            f"{str(error).rstrip('.')}. Change its settings, or the size of the crop."
        ) from error


_PRODUCTS = frozenset(
    (
        "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "tensordot", "linear",
        "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    )
)  # fmt: skip


class _Float64Products(TorchFunctionMode):
    """In this thread float32 products are taken in float64, and rounded once."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in _PRODUCTS:
            return func(*args, **(kwargs or {}))
        narrow = False

        def wide(value: Any) -> Any:
            nonlocal narrow
            if isinstance(value, Tensor) and value.dtype == torch.float32:
                narrow = True
                return value.double()
            return [wide(v) for v in value] if isinstance(value, list | tuple) else value

        y = func(*map(wide, args), **{k: wide(v) for k, v in (kwargs or {}).items()})
        return y.float() if narrow else y


def _apply_rows(x: Tensor, module: nn.Module, rows: Int, params: Params, keys: Int | None) -> Tensor:
    entry = entry_of(module)
    if entry is not None and entry.one_by_one:
        for row in rows:
            x[row : row + 1] = module(x[row : row + 1], params=_values(params, rows=np.array([row])))
        forget(module)
        return x
    count, whole = len(rows), 1 < len(rows) == len(x)
    group = np.repeat(rows, 2) if count == 1 else rows  # never a single row
    values = _values(params, rows=group)
    if keys is not None:
        values |= noise(module, torch.from_numpy(keys[group]).to(x.device, non_blocking=True), (x.shape[2], x.shape[3]))
    at = torch.from_numpy(group).to(x.device, non_blocking=True)
    y = module(x if whole else x.index_select(0, at), params=values).to(x.dtype)  # some give torch's default
    forget(module)
    return y.contiguous() if whole else x.index_copy_(0, at[:count], y[:count])


def _values(params: Params, *, rows: Int) -> dict[str, Tensor]:
    """Kornia's parameters of some rows, with a gate that is open."""
    return {**tensors(params, rows), "batch_prob": torch.ones(len(rows), dtype=torch.float32, device="cpu")}


def _apply_seeded(x: Tensor, op: Prepared, keys: Int) -> Tensor:
    """An operation that draws by itself: each sample alone, from its own seed."""
    (module,) = op.slots[0]
    number = _batches[module] = _batches.get(module, 0) + 1
    given = x.clone() if number <= CHECKED_BATCHES else x  # an operation may write to what it is given
    seeds = [low | high << 32 for low, high in keys.tolist()]
    with _generators(x.device):
        for row, seed in enumerate(seeds):
            x[row : row + 1] = _seeded(op, x[row : row + 1], seed)
        if number <= CHECKED_BATCHES:
            again = [
                _seeded(op, image[None].clone(), seed)
                for image, seed in zip(given[:CHECKED_SAMPLES], seeds, strict=False)
            ]
            _check_pixels(op, given, x, torch.cat(again).to(x.dtype))
    forget(module)
    return x


def _seeded(op: Prepared, image: Tensor, seed: int) -> Tensor:
    """One image [1, 3, H, W] through the operation, with all global generators seeded."""
    torch.default_generator.manual_seed(seed)
    if image.is_cuda:
        torch.cuda.default_generators[image.device.index or 0].manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
    shape = list(image.shape)
    y = op.slots[0][0](image)
    if not isinstance(y, Tensor) or list(y.shape) != shape or not y.is_floating_point():
        given = f"{y.dtype} {list(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        raise ConfigError(
            f"`ops.{op.name}` must give images as it takes them, floats of shape {shape}. Found: {given}. "
            "Sizes are decided before decoding: use `crop`."
        )
    return y


CHECKED_BATCHES = 3  # of each process and operation; checking later ones would wait for the device
CHECKED_SAMPLES = 8  # of each such batch run twice: of operations with p = 0.1 that differ 99 in 100 are noticed
_batches: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_warned: set[tuple[str, str, str]] = set()


def _check_pixels(op: Prepared, given: Tensor, made: Tensor, again: Tensor) -> None:
    """Warn where one sample and one seed gave two results, or good pixels became NaN or far from 0..1.

    Once, however many views and loaders have the operation. Noise that nobody clamps stays in -1..2; a normalized
    image, or 0..255, does not.
    """
    low, high, least, most = (float(v) for x in (made, given) for v in (x.min(), x.max()))  # NaN where one pixel is
    # sums on a GPU may differ in the last bits
    repeats = torch.allclose(made[: len(again)], again, rtol=0, atol=1e-4, equal_nan=True)
    for good, fact, remedy in (
        (
            repeats,
            "gives other pixels for the same sample and seed",
            ": it holds a generator or a state of its own, so no run can be repeated or resumed. Draw from the global "
            "generators of torch, numpy or Python, which are seeded for every sample.",
        ),
        (
            -1 <= low <= high <= 2 or not -1 <= least <= most <= 2,
            "gives values far outside 0..1",
            f": {low:.3g} to {high:.3g}. Scale its output; mean and standard deviation belong to `normalize`. Where "
            "they are NaN or infinite, check its arithmetic, or clamp what it takes or gives.",
        ),
    ):
        where = (op.name, type(op.op).__name__)
        if not good and (*where, fact) not in _warned:
            _warned.add((*where, fact))
            logger.warning("`ops.%s` (%s) %s%s", *where, fact, remedy)


@contextmanager
def _generators(device: torch.device) -> Iterator[None]:
    """The global generators of torch, numpy and Python, as they were, afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [device.index or 0] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
