"""Writes checkpoints of `gpuaug train`, and reads them without executing their content."""

from __future__ import annotations

import io
import json
import os
import zipfile
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from gpuaug.errors import StateError
from gpuaug.files import check_regular

VERSION = 4


def read_checkpoint(file: Path, *, key: str = "resume") -> dict[str, Any]:
    """Read a checkpoint without executing its content. Raises StateError if it is invalid or damaged.

    ``key``: the configuration key that names the file, for messages.
    """
    try:
        check_regular(os.stat(file), file)  # torch would read a pipe or device forever
        with zipfile.ZipFile(file) as members:  # torch does not check the checksums
            if damaged := members.testzip():
                raise OSError(f"the checksum of {damaged} is wrong")
            unchanged = members.comment == _digest(members)
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises IndexError, KeyError, ... for files that are not checkpoints
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if isinstance(error, UnpicklingError):  # torch's message advises the user to execute the content
            reason = "it holds more than tensors, numbers and text"
        raise StateError(
            f"`{key}` must name a checkpoint of `gpuaug train`. Found: {str(file)!r} ({reason})."
        ) from error
    version = checkpoint.get("version") if isinstance(checkpoint, dict) else None
    if version != VERSION:
        raise StateError(
            f"`{key}` must name a checkpoint of version {VERSION}. Found: version {version} in {str(file)!r}."
        )
    if not unchanged:
        raise StateError(
            f"{file} was changed after `gpuaug train` wrote it. Resume from another checkpoint, or start again with "
            "resume=null."
        )
    return checkpoint


def about(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of its run: version of gpuaug, model, recipes, fingerprint, number of classes."""
    found = checkpoint.get("gpuaug")
    return found if isinstance(found, dict) and isinstance(found.get("recipes"), dict) else {"recipes": {}}


def packed(checkpoint: dict[str, Any]) -> memoryview:
    """The content of the file of a checkpoint: torch's format, with a digest as the comment of the zip file."""
    stream = io.BytesIO()  # written to a file, torch hides why a disk refuses it
    torch.save(checkpoint, stream)
    with zipfile.ZipFile(stream, "a") as members:
        members.comment = _digest(members)
    return stream.getbuffer()


def digests_in(text: str) -> dict[int, str]:
    """The hash of the batch of each step in a file of digests. Torn lines are left out, such as the last of a crash."""
    found: dict[int, str] = {}
    for line in text.splitlines():
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            each = json.loads(line)
            found[int(each["step"])] = str(each["digest"])
    return found


def _digest(members: zipfile.ZipFile) -> bytes:
    """A hash of the names and checksums of all members."""
    return blake2b(repr([(x.filename, x.CRC) for x in members.infolist()]).encode()).hexdigest().encode()
