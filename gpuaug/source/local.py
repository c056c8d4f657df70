"""Reads local files. Refuses files that are not regular or exceed a size limit."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable

from gpuaug.files import LARGEST_FILE, check_regular, sniff
from gpuaug.source.paths import redact

LARGEST_IMAGE = 1 << 29  # bytes; the decoder's limit is 178 million pixels of 3 bytes
LARGE = 1 << 24  # bytes; a larger image must begin with an image signature
LARGEST_BATCH = 1 << 31  # bytes of all images above `LARGE` in a batch

# if a pipe has the name of an image, opening the pipe must not block the worker
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def open_text(path: str, *, errors: str = "strict") -> io.TextIOWrapper:
    """Open a UTF-8 text file, with or without a BOM, with the limits and errors of :func:`read_file`."""
    return io.TextIOWrapper(io.BytesIO(read_file(path)), encoding="utf-8-sig", errors=errors)


def read_file(path: bytes | str, *, image: bool = False, limit: int | None = None) -> bytes:
    """Read all bytes of a regular local file. Raises OSError.

    ``image``: True if the file should be an image. ``limit``: maximum bytes; None: 1 GiB, or 512 MiB for an image.
    """
    # a file of 55 KB takes 50 us; reading directly into the batch's buffer would save only 2 us
    fd = os.open(path, _FLAGS)
    try:
        size = check_regular(os.fstat(fd), path, limit=limit or (LARGEST_IMAGE if image else LARGEST_FILE)).st_size
        return _read(fd, 0, size, path, image=image)
    finally:
        os.close(fd)


def _read(fd: int, begin: int, size: int, path: bytes | str, *, image: bool) -> bytes:
    # AVIF may name its brand behind 15 others
    if image and size > LARGE and sniff(head := os.pread(fd, 80, begin)) is None:
        text = f"not an image: {size} bytes that begin with {head[:8]!r}"
        raise OSError(errno.EINVAL, text, redact(os.fsdecode(path)))
    data = os.pread(fd, size, begin)
    while len(data) < size:  # a network file system may return fewer bytes per call
        more = os.pread(fd, size - len(data), begin + len(data))
        if not more:
            text = f"the file ended after {len(data)} of {size} bytes at position {begin}"
            raise OSError(errno.EIO, text, os.fsdecode(path))
        data += more
    return data


def too_large(size: int, path: bytes | str, *, held: int) -> OSError:
    """The error for an image above a limit. ``held``: bytes of the earlier large images in the batch."""
    if size > LARGEST_IMAGE:
        return OSError(errno.EFBIG, f"{size} bytes, more than {LARGEST_IMAGE}", redact(os.fsdecode(path)))
    text = f"{size} bytes; large images of the batch already take {held} of at most {LARGEST_BATCH}. Lower `batch_size`"
    return OSError(errno.EFBIG, text, redact(os.fsdecode(path)))


def file_version(status: os.stat_result) -> str:
    return f"{status.st_size}-{status.st_mtime_ns}"


def info(path: str) -> tuple[int, str] | Exception:
    """Size and version of a file; an exception if the file is missing or not regular."""
    try:
        status = check_regular(os.stat(path), path)
    except (OSError, ValueError) as error:
        return error
    return status.st_size, file_version(status)


class OpenFile:
    """A local file that stays open, because opening takes longer than reading an image."""

    def __init__(self, path: str) -> None:
        self.fd = -1
        self.path = path
        self.fd = os.open(path, _FLAGS)
        self.version = file_version(check_regular(os.fstat(self.fd), path))

    def read(self, begin: int, size: int, *, version: str, image: bool) -> bytes:
        """Read ``size`` bytes from position ``begin``. ``version``: the version that the file must have; "": any."""
        if version and version != self.version:
            raise OSError(errno.ESTALE, "the file changed since it was indexed", self.path)
        return _read(self.fd, begin, size, self.path, image=image)

    # a default argument, because Python's exit may delete `os.close`
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.fd >= 0:
            close(self.fd)
