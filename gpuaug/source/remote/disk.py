"""A cache folder on a local disk. It has a limit in bytes, and any number of processes can share it."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import logging
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from gpuaug import files
from gpuaug.errors import SourceError

log = logging.getLogger("gpuaug")

_HEAD = struct.Struct("<8sQI")  # magic, then length and CRC-32 of the data that follow
_MAGIC = b"gpuaug1\n"
_BLOCK = 4096  # bytes; files occupy whole blocks
_KEEP = 0.9  # an eviction leaves at most this share in use, so that evictions are rare


class Disk:
    """Stores bytes by name in ``folder``, which must contain no other files.

    If the folder is full, the least recently used entries are removed. Writers lock the folder, and rename files when
    the files are complete. So readers need no lock.
    """

    def __init__(self, folder: str | os.PathLike[str], *, max_bytes: int) -> None:
        self.folder, self.max_bytes = os.path.abspath(os.path.expanduser(os.fspath(folder))), max_bytes
        self._warned = False
        try:
            os.makedirs(self.folder, exist_ok=True)
            with locked(os.path.join(self.folder, ".lock")):
                pass
        except OSError as error:
            raise SourceError(
                f"`source.remote.cache` must be a folder that can be written and locked. Found: {self.folder!r} "
                f"({error})."
            ) from error

    def get(self, name: str) -> bytes | None:
        """The bytes stored under this name; None if the entry is missing or damaged."""
        path = self._path(name)
        try:
            with open(path, "rb") as file:
                entry = file.read()
        except OSError:
            return None
        data = entry[_HEAD.size :]
        if entry[: _HEAD.size] != _HEAD.pack(_MAGIC, len(data), zlib.crc32(data)):
            with suppress(OSError):
                os.unlink(path)
            return None
        with suppress(OSError):
            os.utime(path)  # eviction uses this time, because most disks are mounted without access times
        return data

    def put(self, entries: Sequence[tuple[str, bytes]]) -> None:
        """Store pairs (name, bytes). If the disk cannot be written, log one warning."""
        if not entries:
            return
        try:
            with locked(os.path.join(self.folder, ".lock")) as lock:
                known = os.pread(lock, 9, 0)
                os.pwrite(lock, b"?", 0)  # if this process is killed, the next one finds 1 byte and adds up the files
                os.ftruncate(lock, 1)
                used = int.from_bytes(known, "little") if len(known) == 8 else self._evict(self.max_bytes)
                for name, data in entries:
                    path, size = self._path(name), _blocks(_HEAD.size + len(data))
                    if size > self.max_bytes or os.path.exists(path):
                        continue
                    if used + size > self.max_bytes:
                        used = self._evict(int(_KEEP * self.max_bytes) - size)
                    files.write(path, _HEAD.pack(_MAGIC, len(data), zlib.crc32(data)) + data)
                    used += size
                os.pwrite(lock, used.to_bytes(8, "little"), 0)
        except OSError as error:
            if not self._warned:
                self._warned = True
                log.warning("cache %s cannot be written, so new data is not stored: %s", self.folder, error)

    def _evict(self, limit: int) -> int:
        """Remove entries until at most ``limit`` bytes are in use. Return the bytes in use."""
        entries = []
        for path in glob.iglob(os.path.join(glob.escape(self.folder), "*", "*"), include_hidden=True):
            with suppress(OSError):
                if path.endswith(".part"):  # a killed process left it; no other process writes now
                    os.unlink(path)
                    continue
                status = os.lstat(path)
                entries.append((status.st_mtime_ns, _blocks(status.st_size), path))
        used = sum(size for _, size, _ in entries)
        entries.sort()
        for _, size, path in entries:
            if used <= max(0, limit):
                break
            with suppress(FileNotFoundError):  # a reader removes damaged entries
                os.unlink(path)
            used -= size
        return used

    def _path(self, name: str) -> str:
        word = hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=16).hexdigest()
        return os.path.join(self.folder, word[:2], word[2:])


@contextmanager
def locked(path: str) -> Iterator[int]:
    """Lock a file, which must not be a link, against other processes and threads, and yield its descriptor."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases the lock when the process ends
        try:
            yield lock
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough: a child forked meanwhile has the file open too
    finally:
        os.close(lock)


def _blocks(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
