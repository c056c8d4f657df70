"""Reads the positions of a tar file's members from the headers, without unpacking the members.

:mod:`tarfile` takes 1.6 to 2.8 times as long, and treats a damaged header as the end of the archive. In Python 3.11,
:mod:`tarfile` never returns for some headers with a negative size.
"""

from __future__ import annotations

import logging
import tarfile
from collections.abc import Callable, Iterator
from tarfile import nti  # type: ignore[attr-defined]
from typing import NamedTuple

from gpuaug.errors import SourceError

log = logging.getLogger("gpuaug")

BLOCK = 512  # bytes of a header; the content of a member is padded to a multiple of this
LONGEST_NAME = 1 << 16  # largest extended header in bytes; Linux allows paths of up to 4 KiB
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zX")
_NOT_FILES = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a pipe"}


class Member(NamedTuple):
    """A regular file in a tar: its name, and the position and number of its bytes."""

    name: bytes
    offset: int
    size: int


class _TarError(Exception):
    def __init__(self, fault: str, remedy: str = "Write it again.") -> None:
        super().__init__(fault)
        self.remedy = remedy


def members(read: Callable[[int, int], bytes], size: int, *, path: str) -> Iterator[Member]:
    """Yield the regular files of an uncompressed tar (ustar, GNU or pax) in their order, and skip folders.

    ``read(at, n)`` returns at most ``n`` bytes. If the tar ends without empty blocks, a warning is logged.

    Raises:
        SourceError: if the file is not a tar, is cut off inside a member, or has a member that cannot be read.
    """
    at, long_name, pax = 0, b"", dict[bytes, bytes]()
    try:
        while at < size:
            head = read(at, BLOCK)
            if at == 0 and head.startswith(_COMPRESSED):
                raise _TarError("it is compressed", "Decompress it: random access needs a plain tar.")
            if len(head) < BLOCK:
                raise _TarError("it is cut off in a header")
            if head.count(0) == BLOCK:
                return
            length, begin, kind = _length(head), at + BLOCK, head[156:157]
            if kind in (b"L", b"K", b"x", b"g"):  # L and x describe the next member; K and g are ignored
                text = _extension(read, begin, length)
                if kind == b"L":
                    long_name = text.split(b"\0", 1)[0]
                elif kind == b"x":
                    pax = _records(text)
            else:
                name, length = _name_and_length(head, long_name, pax, length)
                if _is_file(kind, name):
                    if begin + length > size:
                        raise _TarError(f"it is cut off: {_text(name)} ends at byte {begin + length}")
                    yield Member(_relative(name), begin, length)
                elif kind == b"5":
                    length = 0
                long_name, pax = b"", {}
            at = begin + -(-length // BLOCK) * BLOCK
        if at > size:
            raise _TarError("it is cut off in the padding of the last member")
    except _TarError as error:
        raise SourceError(f"shard {path!r}: {error}. Position: byte {at} of {size}. {error.remedy}") from None
    if size:
        log.warning("shard %r lacks the empty blocks that end a tar. It may be cut off and lack members", path)


def _length(head: bytes) -> int:
    """Check the checksum of a header, and return the number of bytes of its member."""
    try:
        if nti(head[148:156]) != sum(head) - sum(head[148:156]) + 8 * 32:
            raise ValueError
        length: int = nti(head[124:136])
    except (ValueError, tarfile.HeaderError):
        raise _TarError("it has no valid tar header here") from None
    if length < 0:  # would move the position backwards, in an endless loop
        raise _TarError(f"a member has a size of {length} bytes")
    return length


def _extension(read: Callable[[int, int], bytes], begin: int, length: int) -> bytes:
    if length > LONGEST_NAME:
        raise _TarError(f"an extended header has {length} bytes, more than {LONGEST_NAME}")
    text = read(begin, length)
    if len(text) < length:
        raise _TarError("it is cut off in an extended header")
    return text


def _name_and_length(head: bytes, long_name: bytes, pax: dict[bytes, bytes], length: int) -> tuple[bytes, int]:
    name, prefix = head[:100].split(b"\0", 1)[0], head[345:500].split(b"\0", 1)[0]
    if prefix and head[257:263] == b"ustar\0":
        name = prefix + b"/" + name
    name = pax.get(b"path", long_name or name)
    if b"size" in pax:
        if not pax[b"size"].isdigit() or len(pax[b"size"]) > 20:
            raise _TarError("an extended header cannot be read")
        length = int(pax[b"size"])
    if head[156:157] == b"S" or any(key.startswith(b"GNU.sparse") for key in pax):
        raise _TarError(f"{_text(name)} is a sparse file", "Write the tar without --sparse.")
    return name, length


def _is_file(kind: bytes, name: bytes) -> bool:
    """True for a regular file, False for a folder. Other members raise an error."""
    if kind in _NOT_FILES:
        remedy = "Only regular files can be read. Write the tar with --dereference."
        raise _TarError(f"{_text(name)} is {_NOT_FILES[kind]}", remedy)
    if kind == b"5" or name.endswith(b"/"):
        return False
    if kind not in (b"0", b"\0", b"7"):
        raise _TarError(f"{_text(name)} is a member of unknown kind {kind!r}")
    return True


def _relative(name: bytes) -> bytes:
    while name.startswith(b"./"):
        name = name[2:].lstrip(b"/")
    if name.startswith(b"/") or b"\0" in name or b".." in name.split(b"/"):
        raise _TarError(f"the name {_text(name)} leads outside the shard", "Write the tar with relative names.")
    return name


def _text(name: bytes) -> str:
    return f"{name.decode(errors='surrogateescape')!r:.200}"


def _records(text: bytes) -> dict[bytes, bytes]:
    """Records of a pax header; each record is ``length key=value`` and a newline."""
    records, at, text = {}, 0, text.rstrip(b"\0")
    try:
        while at < len(text):
            end = at + int(text[at : text.index(b" ", at)])
            if not at + 5 <= end <= len(text) or text[end - 1 : end] != b"\n":
                raise ValueError
            key, equal, value = text[at : end - 1].split(b" ", 1)[1].partition(b"=")
            if not equal:
                raise ValueError
            records[key] = value
            at = end
    except ValueError:
        raise _TarError("an extended header cannot be read") from None
    return records
