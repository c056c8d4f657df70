"""Reads checkpoints of `gpuaug train` without executing their content, and checks their digest."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import xxhash
from torch import Tensor

from gpuaug.errors import StateError
from gpuaug.files import check_regular

VERSION = 4
LARGEST = 10**7  # values; a list that contains itself never ends


def read_checkpoint(file: Path) -> dict[str, Any]:
    """Read a checkpoint without executing its content. Raises StateError if it is invalid or damaged."""
    try:
        check_regular(os.stat(file), file)  # torch would read a pipe or device forever
        with zipfile.ZipFile(file) as members:  # torch does not check the checksums
            if damaged := members.testzip():
                raise OSError(f"the checksum of {damaged} is wrong")
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises IndexError, KeyError, ... for files that are not checkpoints
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if isinstance(error, UnpicklingError):  # torch's message advises the user to execute the content
            reason = "it holds more than tensors, numbers and text"
        raise StateError(
            f"`resume` must name a checkpoint of `gpuaug train`. Found: {str(file)!r} ({reason})."
        ) from error
    version = checkpoint.get("version") if isinstance(checkpoint, dict) else None
    if version != VERSION:
        raise StateError(
            f"`resume` must name a checkpoint of version {VERSION}. Found: version {version} in {str(file)!r}."
        )
    written = checkpoint.pop("digest", None)
    if (found := digest(checkpoint)) != written:
        raise StateError(
            f"{file} was changed after `gpuaug train` wrote it: its content has the digest {found}, not "
            f"{written!r:.60}. Resume from another checkpoint, or start again with resume=null."
        )
    return checkpoint


def digest(checkpoint: Any) -> str:
    """Hash of dictionaries, lists, numbers, text and tensors, as hex. StateError if they have too many values."""
    total, todo = xxhash.xxh3_128(), [checkpoint]
    for _ in range(LARGEST):
        if not todo:
            return total.hexdigest()
        value = todo.pop()
        if isinstance(value, Tensor):
            text = f"{value.dtype} {list(value.shape)}"
            total.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(value, dict | list | tuple):
            text = f"{len(value)} {isinstance(value, dict)}"
            todo += [each for pair in value.items() for each in pair] if isinstance(value, dict) else value
        else:
            text = f"{type(value).__name__} {value!r}"
        total.update(text.encode())
    raise StateError(f"a checkpoint must have fewer than {LARGEST} values. Resume from another checkpoint.")
