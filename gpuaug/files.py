"""Regular files, image formats, atomic writes, the cache folder, and sizes in bytes."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

LARGEST_FILE = 1 << 30  # bytes; limit for a table or another file that is read as a whole
Buffer = bytes | memoryview
CODECS = ("jpeg", "png", "webp", "bmp", "gif", "tiff", "jpeg2000", "ppm", "avif", "heif", "raw")
_SIGNATURES = re.compile(
    rb"(?P<jpeg>\xff\xd8\xff)|(?P<png>\x89PNG\r\n\x1a\n)|(?P<webp>RIFF.{4}WEBP)|(?P<bmp>BM)|(?P<gif>GIF8[79]a)"
    rb"|(?P<tiff>II[*+]\0|MM\0[*+])|(?P<raw>\x89gpuaug\n)|(?P<jpeg2000>\0\0\0\x0cjP  \r\n\x87\n|\xff\x4f\xff\x51)"
    rb"|(?P<ppm>P[56]\s)|(?P<npy>\x93NUMPY)"
    # mif1 and msf1 are brands of both; a file of AVIF then names avif or avis among the brands that follow
    rb"|....ftyp(?:(?P<avif>avi[fs]|m[is]f1.{4}(?:.{4}){0,15}?avi[fs])|(?P<heif>hei[cxms]|hev[cxms]|m[is]f1))",
    re.DOTALL,
)


def check_regular(
    status: os.stat_result, path: bytes | str | os.PathLike[str], *, limit: int = sys.maxsize
) -> os.stat_result:
    """Return ``status``. Raises OSError if the file is not regular, or is larger than ``limit`` bytes."""
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
        kind = kinds.get(stat.S_IFMT(status.st_mode), "a socket")
        raise OSError(errno.EINVAL, f"not a regular file but {kind}", os.fsdecode(path))
    if status.st_size > limit:
        raise OSError(errno.EFBIG, f"{status.st_size} bytes, more than {limit}", os.fsdecode(path))
    return status


def sniff(data: Buffer) -> str | None:
    """The codec, from the first bytes: one of `CODECS`, npy, or None."""
    match = _SIGNATURES.match(data)
    return match and match.lastgroup


def cache_folder() -> Path:
    """Return this user's cache folder, ``$XDG_CACHE_HOME/gpuaug``. The folder may not exist yet."""
    root = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if root.startswith("~"):  # a user without a home, as in some containers
        return Path(tempfile.gettempdir(), f"gpuaug-{os.getuid()}")
    return Path(root, "gpuaug")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], *, sync: bool = False) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` when the block ends without an error.

    Readers see the whole old content or the whole new content. A missing folder is created. A killed process may leave
    a temporary file whose name ends in ``.part``. ``sync``: write the new content to the disk before it replaces the
    old content.
    """
    folder = os.path.dirname(os.path.abspath(path))
    # Compiled code is loaded from the cache folder only if no other user can write there.
    os.makedirs(folder, 0o700 if Path(folder) == cache_folder() else 0o777, exist_ok=True)
    part = os.path.join(folder, f".gpuaug-{uuid.uuid4().hex}.part")
    try:
        with open(part, "xb") as file:  # not `tempfile`, because other users could not read its files
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
        raise


def write(path: str | os.PathLike[str], *parts: bytes | memoryview | str, sync: bool = False) -> None:
    """Write bytes or text to a file, completely or not at all. For ``sync`` see :func:`replacing`."""
    with replacing(path, sync=sync) as file:
        for data in parts:
            file.write(data.encode() if isinstance(data, str) else data)


def format_bytes(size: float) -> str:
    """Format a size as readable text: ``1.25 GiB``, ``37.0 MiB``."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
