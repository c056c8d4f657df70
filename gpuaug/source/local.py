"""Reading local files: only regular ones, never more than a limit, and opened once."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from functools import lru_cache

from gpuaug.files import LARGEST_FILE, check_regular
from gpuaug.source.paths import redact

LARGEST_IMAGE = 1 << 29  # bytes; 178 million pixels, the most that are decoded, take 3 bytes each if uncompressed
LARGE = 1 << 24  # bytes; a larger file is read as an image only if it begins with the signature of one
LARGEST_BATCH = 1 << 31  # bytes that all images above `LARGE` of a batch may take
SIGNATURE = 16  # bytes that identify an image format
OPEN_FILES = 32  # files that a process keeps open

# non-blocking: opening a pipe that has the name of an image must not block the worker
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
# JPEG, PNG, BMP, GIF, TIFF, gpuaug's raw pixels, JPEG 2000. The decode stage tells the formats apart.
_IMAGE_STARTS = (
    b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"BM", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*", b"II+\0", b"MM\0+",
    b"\x89gpuaug\n", b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51",
)  # fmt: skip


def open_text(path: str, *, errors: str = "strict") -> io.TextIOWrapper:
    """Open a UTF-8 text file, with the limits and errors of :func:`read_file`."""
    return io.TextIOWrapper(io.BytesIO(read_file(path)), encoding="utf-8", errors=errors)


def read_file(path: bytes | str, *, image: bool = False, limit: int | None = None) -> bytes:
    """All bytes of a regular local file.

    Args:
        path: the file.
        image: the file should be an image: if it is larger than 16 MiB, check its signature first.
        limit: in bytes; None: 1 GiB, or 512 MiB for an image.

    Raises:
        OSError: if the file cannot be read, is not a regular file, is too large, or is not an image.
    """
    # Reading straight into the batch's buffer would save 2 us of the 50 that a file of 55 KB takes
    fd = os.open(path, _FLAGS)
    try:
        size = check_regular(os.fstat(fd), path, limit=limit or (LARGEST_IMAGE if image else LARGEST_FILE)).st_size
        if image and size > LARGE:
            check_signature(os.read(fd, SIGNATURE), size, path)
            os.lseek(fd, 0, os.SEEK_SET)
        data = os.read(fd, size + 1)
        while len(data) < size:  # a network file system may return fewer bytes per call
            more = os.read(fd, size - len(data))
            if not more:
                raise OSError(errno.EIO, f"ended after {len(data)} of {size} bytes", os.fsdecode(path))
            data += more
        return data
    finally:
        os.close(fd)


def too_large(size: int, path: bytes | str, *, held: int) -> OSError:
    """The error for an image that exceeds `LARGEST_IMAGE`, or `LARGEST_BATCH` with the ``held`` bytes of others."""
    if size > LARGEST_IMAGE:
        return OSError(errno.EFBIG, f"{size} bytes, more than {LARGEST_IMAGE}", redact(os.fsdecode(path)))
    text = f"{size} bytes, and large images of this batch take {held} of at most {LARGEST_BATCH}. Lower `batch_size`"
    return OSError(errno.EFBIG, text, redact(os.fsdecode(path)))


def check_signature(head: bytes, size: int, path: bytes | str) -> None:
    """Raise OSError unless ``head`` begins as an image of a known format."""
    is_webp = head.startswith(b"RIFF") and head[8:12] == b"WEBP"
    is_ppm = head.startswith((b"P5", b"P6")) and head[2:3].isspace()
    if not (head.startswith(_IMAGE_STARTS) or is_webp or is_ppm):
        text = f"not an image: {size} bytes that begin with {head[:8]!r}"
        raise OSError(errno.EINVAL, text, redact(os.fsdecode(path)))


def file_version(status: os.stat_result) -> str:
    """Version of a local file: its size and time of modification."""
    return f"{status.st_size}-{status.st_mtime_ns}"


class OpenFiles:
    """Reads ranges of local files and keeps the last used files open: opening takes longer than reading an image."""

    def __init__(self) -> None:
        self._open = lru_cache(maxsize=OPEN_FILES)(_File)

    def read(self, path: str, begin: int, size: int, *, version: str, image: bool) -> bytes:
        """``size`` bytes from ``begin``.

        Raises:
            OSError: if the file cannot be read, ends before, has another version, or should be an image and is not.
        """
        file = self._open(path)
        if version and version != file.version:
            raise OSError(errno.ESTALE, "changed since it was indexed", path)
        if image and size > LARGE:
            check_signature(os.pread(file.fd, SIGNATURE, begin), size, path)
        data = os.pread(file.fd, size, begin)
        while len(data) < size:
            more = os.pread(file.fd, size - len(data), begin + len(data))
            if not more:
                raise OSError(errno.EIO, f"ended after {len(data)} of {size} bytes at {begin}", path)
            data += more
        return data


class _File:
    """An open file, closed when the last reader lets go of it."""

    def __init__(self, path: str) -> None:
        self.fd = -1
        self.fd = os.open(path, _FLAGS)
        self.version = file_version(check_regular(os.fstat(self.fd), path))

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # a default argument outlives the module
        if self.fd >= 0:
            close(self.fd)
