"""Ranges of files, on a local disk or behind a URL of fsspec: many at a time, with retries, timeouts and a disk cache.

A file system that asks over a network lives in one process only: it is made where it is first used, and neither
travels with a source nor survives a fork.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import inspect
import io
import logging
import os
import posixpath
import random
import re
import stat
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from gpuaug.decode import header
from gpuaug.errors import ConfigError, GpuaugError, ReadError, SourceError
from gpuaug.source.remote import objects
from gpuaug.source.remote.curl import Get, StatusError
from gpuaug.source.remote.disk import Disk

log = logging.getLogger("gpuaug")

LARGEST_FILE = 1 << 30  # bytes, of tables and other files that are read as a whole
LARGEST_IMAGE = (
    1 << 29
)  # bytes; 178 million pixels, the most that are decoded, take 3 bytes each where nothing is packed
LARGE = 1 << 24  # bytes; what is larger is read as a whole only if it begins as an image
LARGEST_BATCH = 1 << 31  # bytes of images above `LARGE` that are held at a time
SIGNATURE = 16  # bytes that tell what a file is
OPEN_FILES = 32  # local ones that a process keeps open
PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds before the second try, doubled for each further one, up to the longest
DEEPEST = 32  # folders in folders; a server that lists itself in itself has no end
FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
BUGS = (TypeError, AttributeError, NotImplementedError, ImportError, AssertionError)
VERSIONS = ["ETag", "etag", "generation", "md5Hash", "Content-MD5", "LastModified", "Last-Modified", "last_modified"]
VERSIONS += ["mtime", "modified", "updated"]  # what stores say about the version of a file
AGAIN = {408, 425, 429, 500, 502, 503, 504}  # HTTP status that another try may change

NEEDS = {"gs": "gcsfs", "gcs": "gcsfs", "hdfs": "pyarrow", "az": "adlfs", "abfs": "adlfs"}  # packages, by protocol

_ABANDONED: list[Any] = []  # file systems of a parent process: their end would wait for threads that are not here


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """How a source reads from URLs (``s3://``, ``gs://``, ``hdfs://``, ``https://``); local ones ask nothing of it.

    Args:
        options: of the fsspec file system, as ``{endpoint_url: ..., anon: true}``; else its own configuration and
            environment (credentials belong there).
        concurrency: requests under way at a time, in each worker.
        tries: of a request that fails, with a pause in between that doubles from 0.1 s.
        timeout: seconds for one try, and one more for each megabyte of a range. What all tries of a batch may take
            should stay below the ``timeout`` of the loader.
        cache: a folder on a local disk that keeps what was read; processes and runs may share it. None: none.
        cache_bytes: bound of that folder in bytes; what was not used for longest goes first.
    """

    options: Mapping[str, Any] | None = field(default=None, repr=False)
    concurrency: int = 64
    tries: int = 4
    timeout: float = 10.0
    cache: str | os.PathLike[str] | None = None
    cache_bytes: int = 100_000_000_000

    def __post_init__(self) -> None:
        for name in ("concurrency", "tries", "cache_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"`source.remote.{name}` must be a whole number >= 1. Found: {value!r}.")
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, int | float) or not self.timeout > 0:
            raise ConfigError(f"`source.remote.timeout` must be above 0 seconds. Found: {self.timeout!r}.")
        if self.options is not None and not isinstance(self.options, Mapping):
            raise ConfigError(f"`source.remote.options` must be a mapping. Found: {type(self.options).__name__}.")
        local = isinstance(self.cache, str | os.PathLike) and not is_url(self.cache) and "\0" not in str(self.cache)
        if self.cache is not None and not local:
            raise ConfigError(f"`source.remote.cache` must be a local folder. Found: {self.cache!r}.")


class Range(NamedTuple):
    """A part of a file: local path or URL, first byte, number of bytes (None: the whole file), and its version.

    ``image``: it is an encoded image, of so many bytes as far as is known; None: something else.
    """

    place: str
    begin: int = 0
    size: int | None = None
    stamp: str = ""  # of `Storage.stat`: part of the name in the disk cache; a local file must still have it
    image: int | None = None

    @property
    def most(self) -> int:
        """Bytes above which it is refused."""
        return LARGEST_FILE if self.image is None else LARGEST_IMAGE


class Found(NamedTuple):
    """A file below a root: its key relative to it, bytes (-1: not known), and its version."""

    key: str
    size: int
    stamp: str


class _Call(NamedTuple):
    """What to ask a file system about a place; a coroutine where it has an event loop."""

    place: str
    of: Callable[[Any, str], Any]
    size: int = 0  # bytes that are expected
    part: Range | None = None  # that it reads

    def seconds(self, remote: Remote) -> float:
        """For one try."""
        return _seconds(self.size, remote)


class Storage:
    """Reads and lists files wherever they are. Pickles to its settings; every process opens its own connections."""

    _next: list[Range]  # of the read after the next

    def __init__(self, remote: Remote | None = None) -> None:
        if remote is not None and not isinstance(remote, Remote):
            raise ConfigError(f"`source.remote` must be a gpuaug.Remote or null. Found: {type(remote).__name__}.")
        self.remote = remote or Remote()
        self._reset()

    def __getstate__(self) -> Remote:
        return self.remote

    def __setstate__(self, remote: Remote) -> None:
        self.remote = remote
        self._reset()

    def read(self, ranges: Sequence[Range]) -> list[bytes | Exception]:
        """Bytes of each range, or why they cannot be read: an OSError, or a ReadError after the last try."""
        self._settle()
        found: list[Any] = [None] * len(ranges)
        away: list[int] = []
        held = 0  # bytes of large images
        for i, part in enumerate(ranges):
            if part.image is not None and (size := max(part.image, part.size or 0)) > LARGE:
                if size > LARGEST_IMAGE or held + size > LARGEST_BATCH:
                    found[i] = too_large(size, part.place, held=held)
                    continue
                held += size
            if part.size == 0:
                found[i] = b""
            elif is_url(part.place):
                away.append(i)
            else:
                try:
                    found[i] = self._read_local(part)
                except OSError as error:
                    found[i] = error
        if away and self._disk is not None:
            for i in away:
                found[i] = self._disk.get(_name(ranges[i]))
            away = [i for i in away if found[i] is None]
        self._begin([ranges[i] for i in away])
        if away:
            items = self._all([_reading(ranges[i]) for i in away], self._reader)
            for i, item in zip(away, items, strict=True):
                found[i] = item
            if self._disk is not None:
                fresh = {_name(ranges[i]): found[i] for i in away if isinstance(found[i], bytes)}
                if fresh:
                    self._disk.put(list(fresh.items()))
        return found

    def expect(self, ranges: Sequence[Range]) -> None:
        """Small ranges that the read after the next will be for: of objects they are asked for behind that."""
        self._settle()
        self._next = [part for part in ranges if is_url(part.place) and max(part.image or 0, part.size or 0) <= LARGE]

    def whole(self, place: str) -> bytes:
        """All bytes of a file.

        Raises:
            OSError, ReadError: if it cannot be read.
        """
        (item,) = self.read([Range(place)])
        if isinstance(item, Exception):
            raise item
        return item

    def stat(self, places: Sequence[str]) -> list[Found]:
        """Bytes and version of each file; its place stands for the key.

        Raises:
            SourceError: if one of them cannot be found.
        """
        self._settle()
        found: list[Any] = []
        for place in places:
            if is_url(place):
                found.append(None)
                continue
            try:
                status = check_regular(os.stat(place), place)
                found.append(Found(place, status.st_size, local_stamp(status)))
            except OSError as error:
                raise SourceError(f"{shown(place)!r} cannot be used: {error}.") from error
        away = [i for i, item in enumerate(found) if item is None]
        items = self._all([_Call(places[i], _asking_info) for i in away], self._system)
        for i, item in zip(away, items, strict=True):
            if isinstance(item, Exception):
                raise SourceError(f"{shown(places[i])!r} cannot be used: {_said(item)}.") from item
            found[i] = Found(places[i], *_version(item))
        return found

    def find(self, root: str) -> list[Found]:
        """Every file below a URL, folders asked for at the same time; in no order.

        Raises:
            SourceError: if a folder cannot be listed.
        """
        self._settle()
        found: list[Found] = []
        folders, depth = [""], 0
        while folders:
            if depth > DEEPEST:
                raise SourceError(
                    f"{shown(root)!r} has more than {DEEPEST} folders in each other, such as {folders[0]!r}. Does the "
                    "server list a folder in itself?"
                )
            places = [join(root, folder) if folder else root for folder in folders]
            below: list[str] = []
            items = self._all([_Call(place, _asking_list) for place in places], self._system)
            for folder, place, item in zip(folders, places, items, strict=True):
                if isinstance(item, FileNotFoundError) and not folder:
                    raise SourceError(f"`source.root` does not exist, or is empty: {shown(root)!r}.") from item
                if isinstance(item, Exception):
                    raise SourceError(f"{shown(place)!r} cannot be listed: {_said(item)}.") from item
                for name, kind, size, stamp in item:
                    if not safe(name) or "/" in name:
                        if name:
                            log.warning("source: %r in %s is no name of a file; left out", name, shown(place))
                    elif kind == "directory":
                        below.append(f"{folder}{name}/")
                    else:
                        found.append(Found(folder + name, size, stamp))
            folders, depth = below, depth + 1
        return found

    # -- local files

    def _read_local(self, part: Range) -> bytes:
        if part.size is None and not part.begin:
            return read_file(part.place, image=part.image is not None)
        file = self._open(part.place)
        fd = file.fd
        if part.stamp and part.stamp != file.stamp:
            raise OSError(errno.ESTALE, "changed since it was indexed", part.place)
        size = part.most if part.size is None else part.size
        if size > part.most:
            raise OSError(errno.EFBIG, f"{size} bytes, more than {part.most}", part.place)
        if part.image is not None and size > LARGE:
            _check_signature(os.pread(fd, SIGNATURE, part.begin), size, part.place)
        data = os.pread(fd, size, part.begin)
        while part.size is not None and len(data) < size:  # a network file system may give less at once
            more = os.pread(fd, size - len(data), part.begin + len(data))
            if not more:
                raise OSError(errno.EIO, f"ended after {len(data)} of {size} bytes at {part.begin}", part.place)
            data += more
        return data

    def _open(self, path: str) -> _File:
        """A local file; opened once, as that costs more than the reading of an image."""
        with self._lock:
            if path in self._files:
                self._files.move_to_end(path)
                return self._files[path]
            file = self._files[path] = _File(path)
            if len(self._files) > OPEN_FILES:
                self._files.popitem(last=False)
            return file

    # -- URLs

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._systems: dict[str, Any] = {}
        self._readers: dict[str, Any] = {}
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._threads: ThreadPoolExecutor | None = None
        self._next = []
        self._then: dict[int, list[Range]] = {}  # expected, by who asks for it
        self._disk = None
        if self.remote.cache is not None:
            self._disk = Disk(self.remote.cache, max_bytes=self.remote.cache_bytes)

    def _settle(self) -> None:
        if self._pid != os.getpid():
            _ABANDONED.append((self._systems, self._readers, self._threads))
            self._reset()

    def _system(self, place: str) -> Any:
        """The file system of fsspec: it lists, and reads where nothing else can."""
        with self._lock:
            if (key := _bucket(place)) not in self._systems:
                self._systems[key] = _file_system(place, self.remote)
            return self._systems[key]

    def _reader(self, place: str) -> Any:
        """What reads objects: an Objects, or the file system."""
        with self._lock:
            if (key := _bucket(place)) not in self._readers:
                system = self._system(place)
                self._readers[key] = objects.opened(system, place, connections=self.remote.concurrency) or system
            return self._readers[key]

    def _all(self, asked: Sequence[_Call], by: Callable[[str], Any]) -> list[Any]:
        """What each call gives for its place, or the exception that its last try ended with."""
        items: list[Any] = [None] * len(asked)
        groups: dict[int, tuple[Any, list[int]]] = {}
        for i, call in enumerate(asked):
            system = by(call.place)
            groups.setdefault(id(system), (system, []))[1].append(i)
        for system, rows in groups.values():
            calls = [asked[i] for i in rows]
            many: Callable[[Any, list[_Call]], list[Any]] = self._by_threads
            if isinstance(system, objects.Objects):
                many = self._by_curl
            elif getattr(system, "async_impl", False):
                many = self._by_loop
            for i, item in zip(rows, many(system, calls), strict=True):
                if isinstance(item, BUGS):
                    raise item
                items[i] = item
        return items

    def _by_loop(self, system: Any, calls: list[_Call]) -> list[Any]:
        remote = self.remote

        async def all_of_them() -> list[Any]:
            gate = asyncio.Semaphore(remote.concurrency)

            async def one(call: _Call) -> Any:
                for attempt in range(remote.tries):
                    try:
                        async with gate:
                            return await asyncio.wait_for(call.of(system, call.place), call.seconds(remote))
                    except Exception as error:
                        last = attempt + 1 == remote.tries
                        if last or not _may_pass(error):
                            return _reason(error, call, attempt + 1, remote)
                        log.debug("try %d of %s: %r", attempt + 1, shown(call.place), error)
                    await asyncio.sleep(_pause(attempt))
                raise AssertionError

            return await asyncio.gather(*(one(call) for call in calls))

        future = asyncio.run_coroutine_threadsafe(all_of_them(), system.loop)
        try:
            return future.result()
        except BaseException:  # an interrupt of the user
            future.cancel()
            raise

    def _by_curl(self, reader: objects.Objects, calls: list[_Call]) -> list[Any]:
        """Reads of objects, with what is expected behind them; of odd keys through the file system."""
        remote = self.remote
        gets = [_get(reader, call.part, remote) for call in calls]
        then = [get for part in self._then.pop(id(reader), []) if (get := _get(reader, part, remote))]
        items: list[Any] = [None] * len(calls)
        rows = [row for row, get in enumerate(gets) if get is not None]
        for attempt in range(remote.tries):
            if attempt:
                time.sleep(_pause(attempt - 1))
            found = reader.curl.read([get for row in rows if (get := gets[row])], then)
            again = []
            for row, item in zip(rows, found, strict=True):
                call = calls[row]
                items[row] = item = _fitting(item, call.part)
                if not isinstance(item, Exception):
                    continue
                if attempt + 1 < remote.tries and _may_pass(item):
                    log.debug("try %d of %s: %r", attempt + 1, shown(call.place), item)
                    again.append(row)
                else:
                    items[row] = _reason(item, call, attempt + 1, remote)
            if not again:
                break
            rows = again
        if odd := [row for row, get in enumerate(gets) if get is None]:
            for row, item in zip(odd, self._all([calls[row] for row in odd], self._system), strict=True):
                items[row] = item
        return items

    def _begin(self, now: list[Range]) -> None:
        """What is expected behind what is read now, so that the line is never idle between batches."""
        expected, self._next = self._next, []
        self._then = {}
        reading = set(now)
        for part in dict.fromkeys(expected):
            if part in reading or part.size == 0 or (self._disk is not None and self._disk.has(_name(part))):
                continue
            reader = self._reader(part.place)
            if isinstance(reader, objects.Objects):
                self._then.setdefault(id(reader), []).append(part)

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self.remote.concurrency, thread_name_prefix="gpuaug-remote")
            return self._threads

    def _try(self, system: Any, call: _Call) -> Any:
        remote = self.remote
        for attempt in range(remote.tries):
            try:
                return _finish(call.of(system, call.place))
            except Exception as error:
                if attempt + 1 == remote.tries or not _may_pass(error):
                    return _reason(error, call, attempt + 1, remote)
                log.debug("try %d of %s: %r", attempt + 1, shown(call.place), error)
            time.sleep(_pause(attempt))
        raise AssertionError

    def _by_threads(self, system: Any, calls: list[_Call]) -> list[Any]:
        """For file systems without an event loop, as HDFS."""
        remote, pool = self.remote, self._pool()
        futures = [pool.submit(self._try, system, call) for call in calls]
        items: list[Any] = []
        try:
            for future, call in zip(futures, calls, strict=True):
                try:
                    items.append(future.result(timeout=remote.tries * (call.seconds(remote) + LONGEST_PAUSE)))
                except TimeoutError as error:
                    items.append(_reason(error, call, remote.tries, remote))
        finally:
            for future in futures:
                future.cancel()  # after an interrupt of the user
        return items


class _File:
    """An open local file; closed with the object."""

    def __init__(self, path: str) -> None:
        self.fd = -1
        # non-blocking: a pipe with such a name must not hold the worker for ever
        self.fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        self.stamp = local_stamp(check_regular(os.fstat(self.fd), path))

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # a default outlives the module
        if self.fd >= 0:
            close(self.fd)


def check_regular(
    status: os.stat_result, path: bytes | str | os.PathLike[str], *, most: int = sys.maxsize
) -> os.stat_result:
    """The same status; OSError if it is that of a folder, pipe or device, or of more than ``most`` bytes."""
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
        kind = kinds.get(stat.S_IFMT(status.st_mode), "a socket")
        raise OSError(errno.EINVAL, f"not a regular file but {kind}", os.fsdecode(path))
    if status.st_size > most:
        raise OSError(errno.EFBIG, f"{status.st_size} bytes, more than {most}", os.fsdecode(path))
    return status


def open_text(path: str, *, errors: str = "strict") -> io.TextIOWrapper:
    """The text of a list that a user names, as ``open`` would give it. OSError as of :func:`read_file`."""
    return io.TextIOWrapper(io.BytesIO(read_file(path)), encoding="utf-8", errors=errors)


def read_file(path: bytes | str, *, image: bool = False, most: int | None = None) -> bytes:
    """All bytes of a regular local file; of one that should be an image, only if it may be one.

    Raises:
        OSError: if it cannot be read, is no regular file, is larger than ``most`` (None: 1 GiB, an image 512 MiB), or
            is an image larger than 16 MiB and does not begin as one.
    """
    # non-blocking: a pipe with an image's name must not hold the worker for ever. Reading straight into the batch's
    # buffer would save 2 us of the 50 that a file of 55 KB takes: not worth a second way to read
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        status = check_regular(os.fstat(fd), path, most=most or (LARGEST_IMAGE if image else LARGEST_FILE))
        if image and status.st_size > LARGE:
            _check_signature(os.read(fd, SIGNATURE), status.st_size, path)
            os.lseek(fd, 0, os.SEEK_SET)
        data = os.read(fd, status.st_size + 1)
        while len(data) < status.st_size:  # a network file system may give less at once
            more = os.read(fd, status.st_size - len(data))
            if not more:
                raise OSError(errno.EIO, f"ended after {len(data)} of {status.st_size} bytes", os.fsdecode(path))
            data += more
        return data
    finally:
        os.close(fd)


def too_large(size: int, place: bytes | str, *, held: int) -> OSError:
    """Why an image is not read: by itself, or beside so many bytes of others."""
    if size > LARGEST_IMAGE:
        return OSError(errno.EFBIG, f"{size} bytes, more than {LARGEST_IMAGE}", shown(os.fsdecode(place)))
    said = f"{size} bytes, and large images of this batch take {held} of at most {LARGEST_BATCH}. Lower `batch_size`"
    return OSError(errno.EFBIG, said, shown(os.fsdecode(place)))


def _check_signature(head: bytes, size: int, place: bytes | str) -> None:
    if header.sniff(head) is None:
        text = f"no image: {size} bytes that begin with {head[:8]!r}"
        raise OSError(errno.EINVAL, text, shown(os.fsdecode(place)))


def is_url(place: Any) -> bool:
    """Whether fsspec has to read it."""
    return "://" in os.fsdecode(place)


def locate(place: Any, *, key: str = "source.root") -> str:
    """An absolute local path (out of ``file://`` too), or a URL without an end of ``/``.

    Raises:
        ConfigError: if it is neither.
    """
    if not isinstance(place, str | os.PathLike) or not os.fspath(place):
        raise ConfigError(f"`{key}` must be a path or a URL. Found: {place!r}.")
    text = os.fspath(place)
    for scheme in ("file://", "local://"):
        if text.startswith(scheme):
            text = "/" + unquote(text.removeprefix(scheme), errors="surrogateescape").lstrip("/")
    if is_url(text):
        return text.rstrip("/")
    return os.path.abspath(os.path.expanduser(text))  # workers, and later chdir calls, must find the same place


def join(root: str, key: str) -> str:
    """The place of what has this key below a root; the key must be :func:`safe`."""
    if not is_url(root):
        return os.path.join(root, key)
    if root.startswith(("http://", "https://")):  # a store's key is what it is; a URL's path is quoted
        key = quote(os.fsencode(key))
    return f"{root}/{key}"


def split(place: str) -> tuple[str, str]:
    """The folder of a place, and its name in there."""
    if not is_url(place):
        return os.path.split(place)
    scheme, rest = place.split("://", 1)
    above, name = posixpath.split(rest)
    if scheme in ("http", "https"):
        name = unquote(name, errors="surrogateescape")
    return f"{scheme}://{above}", name


def safe(key: str) -> bool:
    """Whether a relative path stays below the place that it is relative to."""
    parts = key.rstrip("/").split("/")
    if "\0" in key or "://" in key or os.path.isabs(key) or any(part in ("", ".", "..") for part in parts):
        return False
    return os.sep == "/" or ("\\" not in key and ":" not in key)  # other ways to leave, on Windows


def shown(place: str) -> str:
    """A place without what may be secret in it: a user's name and password, or the signature of a URL."""
    return re.sub(r"(?<=://)[^/@]*@", "", place.split("?", 1)[0]) if is_url(place) else place


def local_stamp(status: os.stat_result) -> str:
    """Version of a local file."""
    return f"{status.st_size}-{status.st_mtime_ns}"


def _seconds(size: int, remote: Remote) -> float:
    return remote.timeout + size / 1e6  # a slow line brings a megabyte a second


def _bucket(place: str) -> str:
    found = re.match(r"\w[\w.+-]*://[^/]*", place)
    if found is None or "::" in place:
        raise ConfigError(f"a URL must be as s3://bucket/path. Found: {shown(place)!r}.")
    return found[0]


def _name(part: Range) -> str:
    return f"{part.place}\n{part.begin}\n{part.size}\n{part.stamp}"


def _version(info: Mapping[str, Any]) -> tuple[int, str]:
    """Bytes and version out of what a file system says about a file."""
    size = info.get("size")
    marks = [str(info[name]) for name in VERSIONS if info.get(name) is not None]
    word = hashlib.blake2b(f"{size} {marks}".encode(), digest_size=8).hexdigest()
    return -1 if size is None else int(size), word


def _file_system(place: str, remote: Remote) -> Any:
    import fsspec
    from fsspec.core import url_to_fs

    protocol = place.split("://", 1)[0]
    options = dict(remote.options or {})
    if protocol in ("s3", "s3a"):
        # ten connections are botocore's default; and one place to retry is enough, as its pauses are seconds
        config = {"max_pool_connections": max(10, remote.concurrency), "retries": {"max_attempts": 0}}
        options["config_kwargs"] = {**config, **(options.get("config_kwargs") or {})}
    if protocol not in fsspec.available_protocols():
        raise ConfigError(
            f"fsspec knows no {protocol}://. It knows: {', '.join(sorted(fsspec.available_protocols()))}."
        )
    try:
        # no cache of listings: one of a million files takes a gigabyte
        system, _ = url_to_fs(place, skip_instance_cache=True, use_listings_cache=False, **options)
    except ImportError as error:
        raise SourceError(
            f"{protocol}:// needs another package: {error}. Do `pip install {NEEDS.get(protocol, 'gpuaug[remote]')}`."
        ) from error
    except OSError as error:
        said = f"{protocol}:// cannot be opened: {str(error).splitlines()[0] if str(error) else error!r}."
        if protocol == "hdfs":
            said += (
                " It needs Java and Hadoop's libhdfs: set JAVA_HOME, HADOOP_HOME and CLASSPATH, or read by webhdfs://."
            )
        raise SourceError(said) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"`source.remote.options` do not fit {type(error).__name__}: {error}.") from error
    unknown: set[str] = set()  # what these two would find out at the first request, or never
    if protocol in ("s3", "s3a"):
        from botocore.session import Session

        system.retries = 1
        unknown = set(system.kwargs) - set(inspect.signature(Session).parameters) - objects.UNUSED
    elif protocol in ("gs", "gcs"):
        makers = [vars(cls)["__init__"] for cls in type(system).__mro__ if "__init__" in vars(cls)]
        known = {name for maker in makers for name in inspect.signature(maker).parameters}
        unknown = set(remote.options or {}) - known - objects.UNUSED
    if unknown:
        raise ConfigError(
            f"`source.remote.options` has what {protocol}:// does not know: {', '.join(sorted(unknown))}."
        )
    return system


def _reading(part: Range) -> _Call:
    """The call that reads a range through a file system: a coroutine where it has an event loop."""

    def check(data: Any) -> bytes:
        return _whole(data, part)

    async def read(system: Any, place: str) -> bytes:
        if place.startswith(("http://", "https://")):
            return check(await _http(system, part))
        end = part.begin + part.size if part.size is not None else None
        if end is None and place.startswith(("s3:", "s3a:", "gs:", "gcs:")):
            end = part.most + 1  # bounds what arrives; and without it s3fs asks for the size first
        try:
            return check(await system._cat_file(system._strip_protocol(place), start=part.begin or 0, end=end))
        except OSError as error:
            if part.size is None and "range" in str(error).lower():  # the first byte of an empty object
                return b""
            raise

    def read_now(system: Any, place: str) -> bytes:
        begin, end = (None, None) if part.size is None else (part.begin, part.begin + part.size)
        return check(system.cat_file(system._strip_protocol(place), start=begin, end=end))

    def call(system: Any, place: str) -> Any:
        if part.size is not None and part.size > part.most:
            raise OSError(errno.EFBIG, f"{part.size} bytes, more than {part.most}", shown(place))
        return read(system, place) if getattr(system, "async_impl", False) else read_now(system, place)

    return _Call(part.place, call, part.size or 0, part)


def _whole(data: Any, part: Range) -> bytes:
    """What came for a range, if it is all of it."""
    if part.size is not None and len(data) != part.size:
        raise OSError(errno.EIO, f"{len(data)} bytes instead of {part.size} at {part.begin}", shown(part.place))
    if len(data) > part.most:
        raise OSError(errno.EFBIG, f"more than {part.most} bytes", shown(part.place))
    return bytes(data)


def _fitting(item: bytes | Exception, part: Range | None) -> bytes | Exception:
    """The same, where the reason may have come instead."""
    assert part is not None
    try:
        return item if isinstance(item, Exception) else _whole(item, part)
    except OSError as error:
        return error


def _get(reader: objects.Objects, part: Range | None, remote: Remote) -> Get | None:
    assert part is not None
    return reader.get(part.place, part.begin, part.size, most=part.most, seconds=_seconds(part.size or 0, remote))


async def _http(system: Any, part: Range) -> bytes:
    """By hand, as fsspec takes a whole file for a range of it, and a file of any size."""
    session = await system.set_session()
    options = dict(system.kwargs)
    headers = {**(options.pop("headers", None) or {}), "Accept-Encoding": "identity"}
    if part.size is not None:
        headers["Range"] = f"bytes={part.begin}-{part.begin + part.size - 1}"
    async with session.get(system.encode_url(part.place), headers=headers, **options) as response:
        if response.status in (404, 410):
            raise FileNotFoundError(errno.ENOENT, "no such file", shown(part.place))
        if response.status in (401, 403):
            raise PermissionError(errno.EACCES, f"HTTP status {response.status}", shown(part.place))
        if response.status >= 400:
            raise StatusError(f"HTTP status {response.status}", response.status)
        if part.size is not None and response.status != 206:
            raise ReadError(f"the server of {shown(part.place)!r} gives no ranges of files. Use one that does.")
        limit = part.most if part.size is None else part.size
        data = bytearray()
        async for piece in response.content.iter_any():
            data += piece
            if len(data) > limit:
                raise OSError(errno.EFBIG, f"more than {limit} bytes", shown(part.place))
        return bytes(data)


def _asking_info(system: Any, place: str) -> Any:
    path = system._strip_protocol(place)
    return system._info(path) if getattr(system, "async_impl", False) else system.info(path)


def _asking_list(system: Any, place: str) -> Any:
    """Name, kind, bytes and version of what is in a folder."""
    path = system._strip_protocol(place)
    by_url = place.startswith(("http://", "https://"))

    def tell(entries: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, int, str]]:
        found, prefix = [], path.rstrip("/") + "/"
        for entry in entries:
            full = str(entry["name"])
            if not full.startswith(prefix) or full == prefix:  # the folder itself, or a link to elsewhere
                continue
            name = full[len(prefix) :].rstrip("/")
            if by_url:
                if "?" in name or "#" in name:  # the same page, sorted another way
                    continue
                name = unquote(name, errors="surrogateescape")
            kind = "directory" if entry["type"] == "directory" or full.endswith("/") else "file"
            found.append((name, kind, *_version(entry)))
        return found

    async def ask() -> list[tuple[str, str, int, str]]:
        return tell(await system._ls(path + "/" if by_url else path, detail=True))

    return ask() if getattr(system, "async_impl", False) else tell(system.ls(path, detail=True))


def _finish(found: Any) -> Any:
    if isinstance(found, Coroutine):  # a file system that has no loop gives values
        found.close()
        raise NotImplementedError("a file system with coroutines and no event loop")
    return found


def _may_pass(error: Exception) -> bool:
    status = getattr(error, "status", None)
    if isinstance(status, int) and status:
        return status in AGAIN
    if isinstance(error, (*FINAL, *BUGS, GpuaugError)):
        return False
    return getattr(error, "errno", None) not in (errno.EFBIG, errno.EINVAL, errno.ENAMETOOLONG)


def _reason(error: Exception, call: _Call, tries: int, remote: Remote) -> Exception:
    """What a sample's fault says; no OSError where it was tried again, so that the read stage does not start over."""
    if isinstance(error, (*BUGS, GpuaugError)) or (isinstance(error, OSError) and not _may_pass(error)):
        return error
    said = f"no answer within {call.seconds(remote):.3g} s" if isinstance(error, TimeoutError) else _said(error)
    failed = ReadError(f"{shown(call.place)!r} cannot be read, tried {tries} times: {said}")
    failed.__cause__ = error
    return failed


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, GpuaugError) else f"{type(error).__name__}: {error}"


def _pause(attempt: int) -> float:
    # not all workers at the same moment; a generator of its own, as the global one is the user's
    return min(LONGEST_PAUSE, PAUSE * 2**attempt) * random.Random().uniform(0.75, 1.25)
