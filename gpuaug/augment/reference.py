"""``backend="kornia"``: applies Kornia's own modules to the chosen samples, with gpuaug's parameters.

This backend is the reference and is slow. On the CPU, a sample's result is bit-identical in every batch. On CUDA,
results in different batches differ by up to 2e-6, because torch's order of sums depends on the number of images.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpuaug.augment.chains import mixed, one_chain
from gpuaug.augment.cut import cut
from gpuaug.augment.images import NotFiniteError, is_finite, unit
from gpuaug.augment.ops.kornia_private import forget
from gpuaug.augment.parameters import Chosen, Params, Prepared, tensors
from gpuaug.augment.policy import entry_of, fields
from gpuaug.batch import CropWindows
from gpuaug.errors import ConfigError, shown_size
from gpuaug.native.buffers import to_device
from gpuaug.random.generators import restore_generators
from gpuaug.random.keyed import Int

logger = logging.getLogger("gpuaug")


class ReferenceBackend:
    """Runs a recipe's prepared operations in order through Kornia, then ``normalize``, in float32."""

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
        white: float | None = None,
        crop: CropWindows | None = None,
        refuses: bool = False,
    ) -> Tensor:
        """Map [B, H, W, C] of a type in :data:`~gpuaug.augment.images.WHITE` to [B, C, H, W], in new memory.

        Args:
            images: the images.
            chosen: the choices of each operation.
            dtype: of the result.
            memory_format: of the result.
            white: the value that becomes 1; None: that of the type.
            crop: windows that are cut out and resized first; None: no crop.
            refuses: whether values that are NaN or infinite raise NotFiniteError.
        """
        if refuses and not is_finite(images):
            raise NotFiniteError
        if crop is not None:
            images, white = cut(images, crop, white)
        # the caller's autocast would run matrix products and convolutions in half precision
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            x = unit(images, white)
            if len(x):
                for op, c in zip(self.ops, chosen, strict=True):
                    x = apply(x, op, c)
            if self.normalize is not None:
                x = self.normalize(x)
            return x.to(dtype=dtype, memory_format=memory_format)


def apply(x: Tensor, op: Prepared, chosen: Chosen) -> Tensor:
    """Apply one operation to ``x``, float32 [B, 3, H, W], which may be overwritten.

    Raise ConfigError if Kornia's operation rejects the images, for example because they are too small.
    """
    shape = list(x.shape)
    try:
        with exact_products(x.device):
            if op.seeded is not None:
                assert chosen.keys is not None
                return _apply_seeded(x, op, chosen.keys)
            if op.chains:
                return mixed(x, op, chosen, lambda images, own: apply(images.clone(), one_chain(op), own))
            for slot, modules in enumerate(op.slots):
                for alternative, module in enumerate(modules):
                    rows = np.flatnonzero(chosen.choice[:, slot] == alternative)
                    params = chosen.params[slot][alternative]
                    if len(rows) and entry_of(module) is None:
                        x = _apply_users(x, op, module, rows, params)
                    elif len(rows):
                        with torch.device("cpu"):  # Kornia makes constants on torch's default device
                            x = _apply_rows(x, module, rows, params, chosen.keys)
            return x
    except Exception as error:
        kind = type(op.op)
        refused = isinstance(error, ImportError | RuntimeError | TypeError | ValueError)
        lost = isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError | ConfigError)
        if lost or not refused or not kind.__module__.startswith("kornia."):
            error.add_note(f"in operation `{op.name}` ({kind.__name__}) on images of shape {shape}")
            raise
        raise ConfigError(
            f"`ops.{op.name}` ({kind.__name__}) cannot be applied to images of {shown_size(*shape[2:])} pixels: "
            f"{str(error).rstrip('.')}. Change the operation's settings or the crop's size."
        ) from error


def exact_products(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which matrix products and convolutions on CUDA keep the precision of float32.

    By default, torch's convolutions use TF32, which keeps only 10 bits of a pixel (error 1e-3 in a blur). Switching
    TF32 off would change the training, because this setting belongs to the whole process. float64 would take 32 to 64
    times as long on most GPUs.
    """
    return _SplitProducts() if device.type == "cuda" else nullcontext()


_CONVOLUTIONS = frozenset(
    ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
)
_PRODUCTS = _CONVOLUTIONS | {"matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "einsum", "tensordot"}


class _SplitProducts(TorchFunctionMode):
    """Computes this thread's float32 products as the sum of three products.

    The three are of the factors' first 11 bits, which TF32 keeps, and of the rest of one with the first bits of the
    other. Without the fourth product, the error is at most 2^-21 of the sum of the absolute products.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        at = 1 if name == "einsum" else 0  # behind the equation
        before, factors, after = args[:at], args[at : at + 2], args[at + 2 :]
        narrow = [isinstance(v, Tensor) and v.dtype == torch.float32 for v in factors]
        if name not in _PRODUCTS or narrow != [True, True] or (name == "einsum" and after):
            return func(*args, **kwargs)
        x, w = ((v.view(torch.int32) + 0x1000 & -0x2000).view(torch.float32) for v in factors)
        whole = func(*before, x, w, *after, **kwargs)
        if name in _CONVOLUTIONS:  # the bias is added once
            after, kwargs = (None, *after[1:]), {k: v for k, v in kwargs.items() if k != "bias"}
        rest = func(*before, factors[0] - x, w, *after, **kwargs)
        return whole + (rest + func(*before, x, factors[1] - w, *after, **kwargs))


def _apply_rows(x: Tensor, module: nn.Module, rows: Int, params: Params, keys: Int | None) -> Tensor:
    entry = entry_of(module)
    if entry is not None and entry.one_by_one:
        for row in rows:
            x[row : row + 1] = module(x[row : row + 1], params=_values(params, rows=np.array([row])))
        forget(module)
        return x
    count, whole = len(rows), 1 < len(rows) == len(x)
    # A single row is duplicated: with one image, the last bits of torch's means and convolutions would differ.
    group = np.repeat(rows, 2) if count == 1 else rows
    values = _values(params, rows=group)
    if keys is not None:
        key, size = to_device(torch.from_numpy(keys[group]), x.device), (x.shape[2], x.shape[3])
        values |= fields(module, values, key, size, channels=x.shape[1])
    at = to_device(torch.from_numpy(group), x.device)
    y = module(x if whole else x.index_select(0, at), params=values).to(x.dtype)  # some modules return another dtype
    forget(module)
    return y.contiguous() if whole else x.index_copy_(0, at[:count], y[:count])


def _values(params: Params, *, rows: Int) -> dict[str, Tensor]:
    """Kornia's parameters of the given rows. ``batch_prob`` is 1, so that the module changes every row."""
    return {**tensors(params, rows), "batch_prob": torch.ones(len(rows), dtype=torch.float32, device="cpu")}


def _apply_users(x: Tensor, op: Prepared, module: Any, rows: Int, params: Params) -> Tensor:
    """Run a user's module once on all chosen rows, with the random numbers of each row."""
    group = np.repeat(rows, 2) if len(rows) == 1 else rows  # as in _apply_rows
    images = x.index_select(0, to_device(torch.from_numpy(group), x.device))  # modules may modify this copy
    uniforms = [to_device(u, x.device) for u in tensors(params, group).values()]
    some = slice(_samples_to_check(module, len(group)))
    given = images[some].clone()
    y = _checked(op, module(images, *uniforms), list(images.shape)).to(x.dtype)
    if len(given):
        turned = module(given.flip(0), *(u[some].flip(0) for u in uniforms)).to(x.dtype)
        _check_repeats(op, y[some], turned.flip(0))
    at = to_device(torch.from_numpy(rows), x.device)
    return x.index_copy_(0, at, y[: len(rows)])


def _apply_seeded(x: Tensor, op: Prepared, keys: Int) -> Tensor:
    """Run an operation that draws its own random numbers: one sample at a time, each with its own seed."""
    (module,) = op.slots[0]
    given = x[: _samples_to_check(module, len(x))].clone()  # an operation may modify its input
    seeds = [low | high << 32 for low, high in keys.tolist()]
    with restore_generators(x.device):
        for row, seed in enumerate(seeds):
            x[row : row + 1] = _seeded(op, x[row : row + 1], seed)
        again = [_seeded(op, image[None], seed) for image, seed in zip(given, seeds, strict=False)]
    if again:
        _check_repeats(op, x[: len(again)], torch.cat(again).to(x.dtype))
    forget(module)
    return x


def _seeded(op: Prepared, image: Tensor, seed: int) -> Tensor:
    """Run the operation on one image [1, 3, H, W], with all global generators seeded."""
    torch.default_generator.manual_seed(seed)
    if image.is_cuda:
        torch.cuda.default_generators[image.device.index or 0].manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
    shape = list(image.shape)
    return _checked(op, op.slots[0][0](image), shape)


def _checked(op: Prepared, y: Any, shape: list[int]) -> Tensor:
    """Check that ``y``, the result of a user's module, has ``shape`` and is floating-point."""
    if not isinstance(y, Tensor) or list(y.shape) != shape or not y.is_floating_point():
        given = f"{y.dtype} {list(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        raise ConfigError(
            f"`ops.{op.name}` must return floats of its input's shape {shape}. Found: {given}. "
            "If it changes the image size, use `crop` instead."
        )
    return y


CHECKED_BATCHES = 3  # checked batches per operation and process; not more, because a check waits for the device
# In each checked batch, this many samples run twice. Suppose that an operation changes a sample with probability 0.1,
# and that its random numbers do not repeat. The check finds 9 of 10 such operations.
CHECKED_SAMPLES = 8
_batches: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_warned: set[tuple[str, str]] = set()

_IMPURE = (
    "`ops.%s` (%s) gives different pixels for the same sample, so a run cannot be repeated or resumed. The pixels "
    "depend on other samples, or on a generator or state of the operation. An operation with the attribute `uniforms` "
    "must use only the random numbers of its second argument. Others get one image at a time, and must use the global "
    "generators of torch, numpy or Python, which gpuaug seeds for every sample."
)


def _samples_to_check(module: nn.Module, count: int) -> int:
    """How many of ``count`` samples run twice: none after the first batches of a module."""
    number = _batches[module] = _batches.get(module, 0) + 1
    return min(CHECKED_SAMPLES, count) if number <= CHECKED_BATCHES else 0


def _check_repeats(op: Prepared, first: Tensor, again: Tensor) -> None:
    """Warn once per operation if its two runs gave different results."""
    where = (op.name, type(op.op).__name__)
    # sums on a GPU may differ in the last bits
    if where not in _warned and not torch.allclose(first, again, rtol=0, atol=1e-4, equal_nan=True):
        _warned.add(where)
        logger.warning(_IMPURE, *where)
