"""Checks of the loader's arguments, and the defaults that depend on the machine."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from gpuaug import machine
from gpuaug.errors import ConfigError
from gpuaug.random import keyed as draw

log = logging.getLogger("gpuaug")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MEMORY_FORMATS = {"contiguous_format": torch.contiguous_format, "channels_last": torch.channels_last}


def at_least(name: str, value: int, low: int) -> int:
    """``value``, if it is a whole number that is not below ``low``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"`{name}` must be a whole number >= {low}. Found: {value!r}.")
    return value


def check_epoch(epoch: int) -> int:
    """``epoch``, if it is the number of one."""
    if at_least("epoch", epoch, 0) >= draw.EPOCHS:
        raise ConfigError(f"`epoch` must be below 2**32. Found: {epoch!r}.")
    return epoch


def check_flag(name: str, value: bool | None) -> bool | None:
    """``value``, if it is True, False or None."""
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"`{name}` must be true or false. Found: {value!r}.")
    return value


def check_kind(name: str, value: Any, kind: type) -> Any:
    """``value``, if it is a ``kind`` or None."""
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"`{name}` must be a gpuaug.{kind.__name__} or None. Found: {value!r:.200}.")
    return value


def one_of(name: str, value: Any, known: dict[str, Any]) -> Any:
    """One of the values of ``known``, given itself or by name."""
    if isinstance(value, str):
        value = known.get(value.removeprefix("torch."), value)
    if not any(value is one for one in known.values()):
        raise ConfigError(f"`{name}` must be one of {', '.join(known)}. Found: {value!r}.")
    return value


def whole_numbers(name: str, values: Any) -> Tensor:
    """Whole numbers >= 0 as int64 [n] on the CPU."""
    try:
        numbers = torch.as_tensor(values, device="cpu")
        whole = numbers.ndim == 1 and (not len(numbers) or not (numbers.is_floating_point() or numbers.is_complex()))
        if not whole or numbers.dtype == torch.bool or (len(numbers) and int(numbers.min()) < 0):
            raise ValueError(f"{numbers.dtype} {list(numbers.shape)}")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(f"`{name}` must be whole numbers >= 0. Found: {values!r:.200}.") from error
    return numbers.to(torch.int64)


def choose_order(order: Any, shuffle: bool | None) -> Any:
    """The order that ``order`` and ``shuffle`` mean together."""
    if check_flag("shuffle", shuffle) is None:
        return "shuffle" if order is None else order
    named = "shuffle" if shuffle else "sequential"
    if order is not None and not (isinstance(order, str) and order == named):
        raise ConfigError(f"`shuffle={str(shuffle).lower()}` means `order={named}`, and `order` is {order!r}. Set one.")
    return named


def choose_last(last: str | None, drop_last: bool) -> str | None:
    """What ``last`` and ``drop_last`` mean together; None where neither is set."""
    if not check_flag("drop_last", drop_last):
        return last
    if last not in (None, "drop"):
        raise ConfigError(f"`drop_last=true` means `last=drop`, and `last` is {last!r}. Set one of them.")
    return "drop"


def choose_device(device: str | torch.device) -> torch.device:
    """The CPU, or a CUDA device with its index."""
    if not isinstance(device, str | torch.device):
        raise ConfigError(f"`device` must be auto, cpu, cuda or cuda:N. Found: {device!r:.200}.")
    if device == "auto":
        if not torch.cuda.is_available():
            log.info("device cpu: no CUDA device")
            return torch.device("cpu")
        device = "cuda"
        log.info("device cuda:%d", machine.cuda_device())
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"`device` must be auto, cpu, cuda or cuda:N. Found: {device!r}.") from error
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"`device` is {device!r}, and torch finds no CUDA device. Set `device=auto` or `device=cpu`."
            )
        if chosen.index is None:
            chosen = torch.device("cuda", machine.cuda_device())
    elif chosen.type != "cpu":
        raise ConfigError(f"`device` must be a cpu or cuda device. Found: {device!r}.")
    return chosen


def default_workers(source: Any) -> int:
    """Half of the cores of this rank, at most 4; 0 for a source that is mapped into memory."""
    if getattr(source, "mapped", False):
        log.info("num_workers 0: the source is mapped into memory, and workers would only copy it once more")
        return 0
    cores, ranks = machine.usable_cpus(), machine.local_world_size()
    # workers only read bytes: one keeps several decoding threads busy
    workers = max(1, min(4, cores // (2 * ranks)))
    log.info("num_workers %d (CPUs: %d, ranks on this machine: %d)", workers, cores, ranks)
    return workers
