"""A folder on a local disk that holds what was read from afar, bounded in bytes, shared by any number of processes."""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from gpuaug.errors import SourceError

log = logging.getLogger("gpuaug")

_HEAD = struct.Struct("<8sQI")  # magic, length and CRC-32 of what follows
_MAGIC = b"gpuaug1\n"
_BLOCK = 4096  # bytes in which a file takes up a disk
_KEEP = 0.9  # share of the bound that is left by an eviction, so that the next one is far


class Disk:
    """Bytes by name; a name that was not used for long goes first when there is no more room.

    An entry is written beside its place and then renamed, under a lock on the folder: no reader sees half of one, and
    the files never exceed the bound, whatever is killed when. Reading takes no lock.

    Args:
        folder: made where it is missing; nothing but this cache may be in it.
        max_bytes: bound of all files, counted in blocks of 4 KiB.

    Raises:
        SourceError: if the folder cannot be used, or files cannot be locked here.
    """

    def __init__(self, folder: str | os.PathLike[str], *, max_bytes: int) -> None:
        self.folder, self.max_bytes = os.path.abspath(os.path.expanduser(os.fspath(folder))), max_bytes
        self._told = False
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
        """What was put under this name; None where it is not, or no longer, or not whole."""
        path = self._path(name)
        try:
            with open(path, "rb") as file:
                found = file.read()
        except OSError:
            return None
        data = found[_HEAD.size :]
        if len(found) < _HEAD.size or _HEAD.unpack_from(found) != (_MAGIC, len(data), zlib.crc32(data)):
            with suppress(OSError):  # of a machine that lost power, or of somebody else
                os.unlink(path)
            return None
        with suppress(OSError):
            os.utime(path)  # what eviction goes by; most disks are mounted without times of access
        return data

    def has(self, name: str) -> bool:
        """Whether something was put under this name, and is still here; unread."""
        return os.path.exists(self._path(name))

    def put(self, entries: Sequence[tuple[str, bytes]]) -> None:
        """Keep what fits; a disk that cannot be written costs speed and one warning."""
        try:
            with locked(os.path.join(self.folder, ".lock")) as lock:
                used = self._used(lock)
                for name, data in entries:
                    used = self._put(name, data, used)
                os.pwrite(lock, used.to_bytes(8, "little"), 0)
        except OSError as error:
            if not self._told:
                self._told = True
                log.warning("cache %s cannot be written, and is left as it is: %s", self.folder, error)

    def _put(self, name: str, data: bytes, used: int) -> int:
        path, size = self._path(name), _blocks(_HEAD.size + len(data))
        if size > self.max_bytes or os.path.exists(path):
            return used
        if used + size > self.max_bytes:
            used = self._evict(int(_KEEP * self.max_bytes) - size)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path + ".part", "wb") as file:
            file.write(_HEAD.pack(_MAGIC, len(data), zlib.crc32(data)))
            file.write(data)
        os.replace(path + ".part", path)
        return used + size

    def _used(self, lock: int) -> int:
        known = os.pread(lock, 9, 0)
        os.pwrite(lock, b"?", 0)  # whoever is killed meanwhile leaves a number of one byte, which nobody believes
        os.ftruncate(lock, 1)
        return int.from_bytes(known, "little") if len(known) == 8 else self._evict(self.max_bytes)

    def _evict(self, limit: int) -> int:
        """Bytes in use after removing the longest unused entries, until at most ``limit`` are."""
        entries = []
        for entry in self._files():
            with suppress(OSError):
                if entry.name.endswith(".part"):  # only the holder of the lock writes: its writer is dead
                    os.unlink(entry.path)
                    continue
                status = entry.stat(follow_symlinks=False)
                entries.append((status.st_mtime_ns, _blocks(status.st_size), entry.path))
        used = sum(size for _, size, _ in entries)
        entries.sort()
        for _, size, path in entries:
            if used <= max(0, limit):
                break
            os.unlink(path)
            used -= size
        return used

    def _files(self) -> Iterator[os.DirEntry[str]]:
        with os.scandir(self.folder) as folders:
            below = [entry.path for entry in folders if entry.is_dir(follow_symlinks=False)]
        for folder in below:
            with os.scandir(folder) as files:
                yield from list(files)

    def _path(self, name: str) -> str:
        # a hash: no name can lead out of the folder
        word = hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=16).hexdigest()
        return os.path.join(self.folder, word[:2], word[2:])


@contextmanager
def locked(path: str) -> Iterator[int]:
    """The descriptor of the file, made where it is missing, while no other process or thread holds it.

    Raises:
        OSError: if it cannot be made or locked.
    """
    try:
        import fcntl
    except ImportError as error:  # Windows
        raise OSError("this system has no fcntl to lock files with") from error

    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the process that holds it
        yield lock
    finally:
        os.close(lock)


def _blocks(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
