"""Checkpoints of `gpuaug train`: they are read without executing their content, and checked part by part."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from gpuaug.errors import StateError
from gpuaug.files import check_regular

VERSION = 2  # of the format


def read_checkpoint(file: Path) -> dict[str, Any]:
    """Read a checkpoint without executing its content. StateError if it is invalid or damaged."""
    try:
        check_regular(os.stat(file), file)  # torch would read a pipe or device forever
        with zipfile.ZipFile(file) as members:  # torch does not compare the checksums
            if damaged := members.testzip():
                raise OSError(f"the checksum of {damaged} is wrong")
        parts = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises IndexError, KeyError, ... for files that are not checkpoints
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if isinstance(error, UnpicklingError):  # torch would recommend to execute the content
            reason = "it holds more than tensors, numbers and text"
        raise StateError(
            f"`resume` must name a checkpoint of `gpuaug train`. Found: {str(file)!r} ({reason})."
        ) from error
    version = parts.get("version") if isinstance(parts, dict) else type(parts).__name__
    if version != VERSION:
        raise StateError(f"`resume` must name a checkpoint of version {VERSION}. Found: {str(file)!r}, {version}.")
    for name, (expected, holds) in _PARTS.items():
        if name not in parts or not holds(parts[name]):
            what = f"`{name}` = {str(parts[name])[:60]!r}" if name in parts else f"no `{name}`"
            raise StateError(
                f"{file} is damaged: `{name}` of a checkpoint must be {expected}. Found: {what}. Resume from "
                "another checkpoint, or start again with resume=null."
            )
    return parts


def _numbers(values: Iterable[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _is_epoch(entry: Any) -> bool:
    if not isinstance(entry, dict) or not _EPOCH >= entry.keys() >= {"epoch", "loss"}:
        return False
    return _numbers(v for k, v in entry.items() if v is not None or k != "held_out_accuracy")


_EPOCH = {"epoch", "loss", "train_accuracy", "held_out_accuracy"}
_MAPPING: tuple[str, Callable[[Any], bool]] = ("a mapping", lambda v: isinstance(v, dict))
# parts of a checkpoint besides the version: description and check of each
_PARTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "model": _MAPPING,
    "ema": ("a mapping or null", lambda v: v is None or isinstance(v, dict)),
    "optimizer": _MAPPING,
    "scaler": (
        "a mapping of names to numbers",
        lambda v: isinstance(v, dict) and all(isinstance(k, str) for k in v) and _numbers(v.values()),
    ),
    "loader": _MAPPING,
    "classes": (
        "a list of names or null",
        lambda v: v is None or (isinstance(v, list) and all(isinstance(name, str) for name in v)),
    ),
    "sums": (
        "three numbers (loss, correct predictions, samples)",
        lambda v: isinstance(v, list) and len(v) == 3 and _numbers(v),
    ),
    "steps": ("a whole number >= 0", lambda v: type(v) is int and v >= 0),
    "history": (
        "a list of one mapping of numbers per epoch",
        lambda v: isinstance(v, list) and all(map(_is_epoch, v)),
    ),
}
