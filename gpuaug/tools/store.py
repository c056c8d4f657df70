"""What `pack` and `materialize` share: one writer per folder, arrays as bytes, checksums of files."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuaug.errors import ConfigError
from gpuaug.source.local import check_regular, read_file

DIGEST_BYTES = 16
_CHUNK_BYTES = 1 << 22


@contextmanager
def only_writer(folder: Path, *, out: Path) -> Iterator[None]:
    """Lock a folder while the block runs. The lock ends with the process that holds it.

    Where the system or the file system has no locks, nothing is locked.

    Raises:
        ConfigError: if another run holds the lock.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"`out` is being written by another run: {str(out)!r}. Wait for it.") from error
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)


def read_json(path: Path) -> Any:
    """The content of a JSON file that a user's folder holds.

    Raises:
        OSError: if the file cannot be read, or is a pipe or device.
        ValueError: if it is not JSON.
    """
    return json.loads(read_file(str(path)))


def to_json(value: Any) -> bytes:
    """JSON as it is stored."""
    return (json.dumps(value, indent=1) + "\n").encode()


def npy(values: Any, dtype: Any = None) -> bytes:
    """An array as the bytes of a .npy file."""
    stream = io.BytesIO()
    np.save(stream, np.ascontiguousarray(values, dtype=dtype), allow_pickle=False)
    return stream.getvalue()


def npy_header(values: NDArray[Any]) -> bytes:
    """The first bytes of the array's .npy file. The rest are the array's own bytes, which need no copy."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_2_0(stream, np.lib.format.header_data_from_array_1_0(values))
    return stream.getvalue()


def digest(*parts: bytes | memoryview) -> str:
    """BLAKE2b of bytes, as hex."""
    total = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for data in parts:
        total.update(data)
    return total.hexdigest()


def file_digest(path: Path, progress: Callable[[int], Any] = lambda _: None) -> tuple[int, str]:
    """Number of bytes of a file, and their BLAKE2b as hex. ``progress`` gets the number of bytes of each part read.

    Raises:
        OSError: if the file cannot be read, or is a pipe or device.
    """
    total = hashlib.blake2b(digest_size=DIGEST_BYTES)
    size = 0
    check_regular(os.stat(path), path)
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            total.update(data)
            size += len(data)
            progress(len(data))
    return size, total.hexdigest()
