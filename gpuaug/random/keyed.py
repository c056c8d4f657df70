"""Keyed random numbers: every value is a function of (seed, epoch, index, repeat, view, copy, operation).

The generator is Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Its key is a
hash of seed, view, copy and operation. Its counter holds index, epoch, repeat and the number of a block of four values.
So a new operation, view or sample does not change the random numbers of the others.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.errors import ConfigError
from gpuaug.native import build

EPOCHS = 2**32  # the counter has one 32-bit word for the epoch
REPEATS = 2**16  # and 16 bits for how often a sample occurred earlier in the epoch
VERSION = 1  # of this scheme; saved in loader states

_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # the paper's multipliers
_W0, _W1 = 0x9E3779B9, 0xBB67AE85  # the paper's increments of the key
_LOW = 0xFFFFFFFF

Float = NDArray[np.float32]
Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stream:
    """``count`` random numbers for one operation of one copy of a view."""

    view: str
    copy: int
    op: str
    count: int


def _key(seed: int, stream: Stream) -> tuple[np.uint64, np.uint64]:
    value = _hash("\0".join(("gpuaug", str(VERSION), str(int(seed)), stream.view, str(stream.copy), stream.op)))
    return np.uint64(value & _LOW), np.uint64(value >> 32)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def seed_of_call() -> int:
    """Draw a seed from torch's default CPU generator.

    The generators of ranks and DataLoader workers may have the same state. So the seed depends on rank and worker.
    """
    value = int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"))
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else os.environ.get("RANK", 0)
    worker = torch.utils.data.get_worker_info()
    return _hash(f"{value} {rank} {None if worker is None else worker.id}")


def philox(counter: Sequence[Any], key: Sequence[Any]) -> list[Any]:
    """Philox 4x32-10: four 32-bit words from four counter words and two key words, which are broadcast.

    Words are uint64 in numpy and int64 in torch. Products of int64 wrap modulo 2**64, so their 32-bit halves are exact.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    number = int if isinstance(c0, Tensor) else np.uint64
    m0, m1, w0, w1, low, shift = map(number, (_M0, _M1, _W0, _W1, _LOW, 32))
    for _ in range(10):
        p0, p1 = c0 * m0, c2 * m1
        c0, c1, c2, c3 = ((p1 >> shift) & low) ^ c1 ^ k0, p1 & low, ((p0 >> shift) & low) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + w0) & low, (k1 + w1) & low
    return [c0, c1, c2, c3]


@lru_cache(maxsize=64)
def keys(seed: int, streams: tuple[Stream, ...]) -> NDArray[np.uint32]:
    """Each block's two key words and its number within the stream; [3, blocks]."""
    rows = [(*_key(seed, s), number) for s in streams for number in range(-(-s.count // 4))]
    return np.array(rows, dtype=np.uint32).reshape(-1, 3).T.copy()


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled keyed.cpp, or None if it cannot be compiled. numpy and torch give the same bits."""
    native = build.load("random/keyed.cpp", name="draw", without="runs in numpy, ten times slower")
    if native is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        native.gpuaug_uniforms.argtypes = [pointer, number, pointer, pointer, number, ctypes.c_uint32, pointer]
        native.gpuaug_uniforms.restype = None
        native.gpuaug_field.argtypes = [pointer, number, number, number, pointer]
        native.gpuaug_field.restype = None
    return native


def uniforms(
    streams: Sequence[Stream], *, seed: int, epoch: int, indices: Int, repeats: Int | None = None
) -> dict[tuple[str, int, str], Float]:
    """Uniform values in [0, 1) for every stream and sample.

    Args:
        streams: streams with distinct (view, copy, op).
        seed: any integer.
        epoch: 0 <= epoch < 2**32.
        indices: int64 [B], the numbers of the samples in their source.
        repeats: int64 [B] below 65536, how often the index occurred earlier in the epoch; None: 0.

    Returns:
        float32 [B, count] for each (view, copy, op), multiples of 2**-24.
    """
    if isinstance(epoch, bool) or not isinstance(epoch, int | np.integer) or not 0 <= epoch < EPOCHS:
        raise ConfigError(f"`epoch` must satisfy 0 <= epoch < 2**32. Found: {epoch!r}.")
    streams = tuple(streams)
    words = keys(int(seed), streams)
    indices = np.ascontiguousarray(indices, dtype=np.int64)
    again = None if repeats is None else np.ascontiguousarray(repeats, dtype=np.int64)
    batch, blocks = len(indices), words.shape[1]
    values = np.empty((batch, blocks, 4), dtype=np.float32)
    if (native := library()) is not None:
        pointers = [None if a is None else a.ctypes.data for a in (words, indices, again, values)]
        native.gpuaug_uniforms(pointers[0], blocks, *pointers[1:3], batch, int(epoch), pointers[3])
    else:
        k0, k1, number = words.astype(np.uint64)[:, None, :]
        extra = number if again is None else number | (again.astype(np.uint64)[:, None] << np.uint64(16))
        for lane, word in enumerate(_counted(indices.astype(np.uint64)[:, None], int(epoch), extra, (k0, k1))):
            values[:, :, lane] = (word >> np.uint64(8)).astype(np.uint32)  # 24 bits are exact in float32
        values *= np.float32(2.0**-24)
    flat = values.reshape(batch, 4 * blocks)
    named, start = {}, 0
    for s in streams:
        named[s.view, s.copy, s.op] = flat[:, start : start + s.count]
        start += -(-s.count // 4) * 4
    return named


def _counted(index: NDArray[np.uint64], epoch: int, extra: Any, key: Sequence[Any]) -> list[NDArray[np.uint64]]:
    """Four words per index. ``extra`` holds the repeat and the block."""
    return philox((index & np.uint64(_LOW), index >> np.uint64(32), np.uint64(epoch), extra), key)


def integers(name: str, *, seed: int, epoch: int, count: int, start: int = 0) -> NDArray[np.uint64]:
    """``count`` 64-bit values for the order of an epoch, from position ``start`` of the stream ``name``."""
    position = np.arange(start, start + count, dtype=np.uint64)
    low, high, _, _ = _counted(position, epoch, np.uint64(0), _key(seed, Stream("", 0, name, 1)))
    return (high << np.uint64(32)) | low


def sample_keys(
    stream: Stream, *, seed: int, epoch: int, indices: Int, repeats: Int | None = None
) -> NDArray[np.int64]:
    """Two 32-bit key words per sample, int64 [B, 2], for :func:`uniform_field`."""
    index = np.asarray(indices, dtype=np.int64).astype(np.uint64)
    again = np.zeros_like(index) if repeats is None else np.asarray(repeats).astype(np.uint64)
    extra = (again << np.uint64(16)) | np.uint64(0xFFFF)
    return np.stack(_counted(index, epoch, extra, _key(seed, stream))[:2], axis=1).astype(np.int64)


_AT_ONCE = 2**21  # values per call; each value needs about 40 bytes of temporary memory


def uniform_field(keys: Tensor, count: int) -> Tensor:
    """Uniform values in (0, 1], float32 [B, count], on the device of ``keys``. :func:`sample_keys` makes ``keys``."""
    if keys.device.type == "cpu" and (native := library()) is not None:
        keys, values = keys.contiguous(), torch.empty((len(keys), count), dtype=torch.float32, device="cpu")
        threads = torch.get_num_threads() if values.numel() >= 100_000 else 1
        native.gpuaug_field(keys.data_ptr(), *values.shape, threads, values.data_ptr())
        return values
    if len(keys) > (rows := max(1, _AT_ONCE // max(count, 1))):
        return torch.cat([uniform_field(some, count) for some in keys.split(rows)])
    block = torch.arange(-(-count // 4), device=keys.device)[None, :].expand(len(keys), -1)
    zero = torch.zeros_like(block)
    made = philox((block, zero, zero, zero), (keys[:, :1], keys[:, 1:]))
    words = torch.stack(made, dim=2).reshape(len(keys), -1)[:, :count]
    return ((words >> 8).float() + 0.5) * 2.0**-24


def normal_field(keys: Tensor, count: int) -> Tensor:
    """Standard normal values, float32 [B, count], by the Box-Muller transform."""
    if len(keys) > (rows := max(1, _AT_ONCE // max(count, 1))):
        return torch.cat([normal_field(some, count) for some in keys.split(rows)])
    half = -(-count // 2)
    u = uniform_field(keys, 2 * half)
    radius = torch.sqrt(-2.0 * torch.log(u[:, :half]))
    angle = 2.0 * torch.pi * u[:, half:]
    return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)], dim=1)[:, :count].contiguous()


def pick(u: Float, count: int) -> Int:
    """Whole numbers from 0 to ``count - 1``, all equally likely."""
    return (u * np.float32(count)).astype(np.int64)


def exponential(u: Float) -> NDArray[np.float64]:
    """Exponentially distributed values with mean 1."""
    return -np.log(u.astype(np.float64) + 2.0**-25)  # + 2^-25, because a uniform can be 0


def scale(u: Float, low: float, high: float) -> Float:
    """``low + u * (high - low)`` in float32, as torch's Uniform computes it."""
    return np.float32(low) + u * (np.float32(high) - np.float32(low))
