"""Reads checkpoints of `gpuaug train` without executing their content, and checks each part."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import xxhash
from torch import Tensor

from gpuaug.errors import StateError
from gpuaug.files import check_regular

VERSION = 3


def read_checkpoint(file: Path) -> dict[str, Any]:
    """Read a checkpoint without executing its content. Raises StateError if it is invalid or damaged."""
    try:
        check_regular(os.stat(file), file)  # torch would read a pipe or device forever
        with zipfile.ZipFile(file) as members:  # torch does not check the checksums
            if damaged := members.testzip():
                raise OSError(f"the checksum of {damaged} is wrong")
        parts = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises IndexError, KeyError, ... for files that are not checkpoints
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if isinstance(error, UnpicklingError):  # torch's message advises the user to execute the content
            reason = "it holds more than tensors, numbers and text"
        raise StateError(
            f"`resume` must name a checkpoint of `gpuaug train`. Found: {str(file)!r} ({reason})."
        ) from error
    version = parts.get("version") if isinstance(parts, dict) else None
    if version != VERSION:
        raise StateError(
            f"`resume` must name a checkpoint of version {VERSION}. Found: version {version} in {str(file)!r}."
        )
    for name, holds in _PARTS.items():
        if not holds(part := parts.get(name, _MISSING)):
            found = "is missing" if part is _MISSING else f"is {str(part)[:60]!r}"
            raise StateError(
                f"{file} is damaged: `{name}` {found}. Resume from another checkpoint, or start again with resume=null."
            )
    found = digest({name: part for name, part in parts.items() if name != "digest"})
    if found != (written := parts.get("digest")):
        raise StateError(
            f"{file} was changed after `gpuaug train` wrote it: its content has the digest {found}, not "
            f"{written!r:.60}. Resume from another checkpoint, or start again with resume=null."
        )
    return parts


def digest(parts: Any) -> str:
    """Hash of dictionaries, lists, numbers, text and tensors, as hex."""
    total, todo = xxhash.xxh3_128(), [parts]
    while todo:
        value = todo.pop()
        if isinstance(value, Tensor):
            text = f"{value.dtype} {list(value.shape)}"
            total.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(value, dict | list | tuple):
            text = f"{len(value)} {isinstance(value, dict)}"
            todo += [part for pair in value.items() for part in pair] if isinstance(value, dict) else value
        else:
            text = f"{type(value).__name__} {value!r}"
        total.update(text.encode())
    return total.hexdigest()


def _list_of(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(v, kind) and not isinstance(v, bool) for v in values)


def _is_epoch(entry: Any) -> bool:
    names = {"epoch", "loss", "train_accuracy", "held_out_accuracy"}
    return (
        isinstance(entry, dict)
        and {"epoch", "loss"} <= entry.keys() <= names
        and _list_of(Real, [value for name, value in entry.items() if value is not None or name != "held_out_accuracy"])
    )


_MISSING = object()
_PARTS: dict[str, Callable[[Any], bool]] = {  # for each part: is it what `Training.save` writes?
    "model": lambda v: isinstance(v, dict),
    "ema": lambda v: isinstance(v, dict | None),
    "optimizer": lambda v: isinstance(v, dict),
    "scaler": lambda v: isinstance(v, dict) and _list_of(str, [*v]) and _list_of(Real, [*v.values()]),
    "loader": lambda v: isinstance(v, dict),
    "classes": lambda v: v is None or _list_of(str, v),
    "sums": lambda v: _list_of(Real, v) and len(v) == 3,
    "steps": lambda v: type(v) is int and 0 <= v < 2**53,  # a float holds it exactly
    "history": lambda v: _list_of(dict, v) and all(map(_is_epoch, v)),
}
