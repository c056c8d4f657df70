"""The checkpoint of `gpuaug train`: written whole or not at all, and read as data only."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpuaug import files
from gpuaug.errors import GpuaugError, StateError
from gpuaug.files import check_regular

VERSION = 1


def write(file: Path, parts: dict[str, Any]) -> None:
    """Write a checkpoint of these parts, whole or not at all.

    Raises:
        GpuaugError: if the disk is full or may not be written to.
    """
    try:
        with files.replacing(file, sync=True) as stream:
            torch.save({"version": VERSION, **parts}, stream)
    except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into a RuntimeError
        raise GpuaugError(f"the checkpoint {file} cannot be written: {error}") from error


def read(file: Path) -> dict[str, Any]:
    """Read a checkpoint. Nothing in it is executed.

    Raises:
        StateError: if the file is not a checkpoint, or a part of it is damaged.
    """
    try:
        check_regular(os.stat(file), file)  # torch would wait for ever for the end of a pipe or a device
        parts = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises IndexError, KeyError, ... for files that are not checkpoints
        first = str(error).partition("\n")[0]
        raise StateError(
            f"`resume` must name a checkpoint of `gpuaug train`. Found: {str(file)!r} "
            f"({type(error).__name__}: {first})."
        ) from error
    if not isinstance(parts, dict) or parts.get("version") != VERSION:
        version = parts.get("version") if isinstance(parts, dict) else type(parts).__name__
        raise StateError(f"`resume` must name a checkpoint of version {VERSION}. Found: {str(file)!r}, {version}.")
    for name, (expected, holds) in _PARTS.items():
        if name not in parts or not holds(parts[name]):
            what = f"`{name}` = {str(parts[name])[:60]!r}" if name in parts else f"no `{name}`"
            raise StateError(
                f"{file} is damaged: `{name}` of a checkpoint must be {expected}. Found: {what}. Resume another "
                "one, or start anew with resume=null."
            )
    return parts


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_history(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(entry, dict)
        and {"epoch", "loss", "train_accuracy", "held_out_accuracy"} >= entry.keys() >= {"epoch", "loss"}
        and all(_is_number(v) or (v is None and k == "held_out_accuracy") for k, v in entry.items())
        for entry in value
    )


# what a checkpoint holds beside its version: what it must be, in words and as a check
_PARTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "model": ("a mapping", lambda v: isinstance(v, dict)),
    "optimizer": ("a mapping", lambda v: isinstance(v, dict)),
    "scaler": (
        "a mapping of names to numbers",
        lambda v: isinstance(v, dict) and all(isinstance(k, str) and _is_number(x) for k, x in v.items()),
    ),
    "loader": ("a mapping", lambda v: isinstance(v, dict)),
    "classes": (
        "a list of names or null",
        lambda v: v is None or (isinstance(v, list) and all(isinstance(c, str) for c in v)),
    ),
    "sums": (
        "three numbers (loss, right answers, samples)",
        lambda v: isinstance(v, list) and len(v) == 3 and all(map(_is_number, v)),
    ),
    "steps": ("a whole number >= 0", lambda v: type(v) is int and v >= 0),
    "history": ("a list of one mapping of numbers per epoch", _is_history),
}
