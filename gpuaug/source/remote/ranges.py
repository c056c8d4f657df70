"""Parts of files, and the errors of requests for them."""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from gpuaug.errors import GpuaugError
from gpuaug.source import local
from gpuaug.source.paths import redact

RETRIED_STATUS = {408, 425, 429, 500, 502, 503, 504}
FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, GpuaugError)
FINAL_ERRNO = {errno.EFBIG, errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG}
BUGS = (TypeError, AttributeError, NotImplementedError, ImportError, AssertionError)


class Range(NamedTuple):
    """A part of a file."""

    path: str  # local path or URL
    begin: int = 0  # first byte
    size: int | None = None  # bytes; None: the whole file
    version: str = ""  # from a listing; a local file with another version is refused
    image: int | None = None  # bytes of an encoded image; 0: not known; None: not an image
    most: int = 0  # limit in bytes; 0: 512 MiB for an image, 1 GiB for other data

    @property
    def limit(self) -> int:
        return self.most or (local.LARGEST_FILE if self.image is None else local.LARGEST_IMAGE)

    @property
    def bound(self) -> int:
        """Maximum number of bytes of the answer."""
        return self.limit if self.size is None else self.size

    def seconds(self, timeout: float) -> float:
        """Timeout of one try: one second more for each megabyte, rounded up so that few different values exist."""
        return timeout + (1 << ((self.size or 0) // 1_000_000).bit_length()) - 1


class StatusError(Exception):
    """A request that failed. ``status`` is the HTTP status; 0 if there was no usable answer."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


def clean(text: str) -> str:
    """Text from a server or a library, for a message: at most 300 characters, none of them a control character.

    Passwords and queries of URLs are removed.
    """
    text = re.sub(r"(://)[^/\s'\"]*@|(://[^\s?'\"]*)\?[^\s'\"]*", r"\1\2", " ".join(text.split()))[:300]
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def status_error(status: int, part: Range, words: str = "") -> Exception:
    """The error that an HTTP status stands for. ``words``: the server's description of the error."""
    url, text = redact(part.path), clean(f"HTTP status {status} {words}")
    if status in (404, 410):
        return FileNotFoundError(errno.ENOENT, "no such object", url)
    if status in (401, 403):
        return PermissionError(errno.EACCES, text, url)
    return StatusError(text, status)


def too_long(part: Range) -> OSError:
    return OSError(errno.EFBIG, f"more than {part.bound} bytes", redact(part.path))


def check_size(data: bytes, part: Range) -> bytes:
    """Return ``data``; OSError if its length is wrong."""
    if part.size is not None and len(data) != part.size:
        text = f"{len(data)} bytes instead of {part.size} at position {part.begin}"
        raise OSError(errno.EIO, text, redact(part.path))
    if len(data) > part.limit:
        raise too_long(part)
    return data


def version_of(size: Any, marks: Sequence[Any]) -> str:
    """A hash that changes with a file. ``marks``: what a store says about the file, such as its ETag."""
    return hashlib.blake2b(f"{size} {[str(x) for x in marks if x is not None]}".encode(), digest_size=8).hexdigest()


def may_pass(error: Exception) -> bool:
    """Whether another try of a read may succeed after ``error``."""
    if status := getattr(error, "status", None):
        return status in RETRIED_STATUS
    return not isinstance(error, FINAL) and getattr(error, "errno", None) not in FINAL_ERRNO
