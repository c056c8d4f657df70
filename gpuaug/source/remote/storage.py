"""Reads local files and URLs. Many URLs are read at a time, with retries, timeouts and a disk cache."""

from __future__ import annotations

import errno
import glob
import logging
import os
import random
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, NamedTuple

from gpuaug import checks
from gpuaug.errors import ConfigError, GpuaugError, ReadError, SourceError
from gpuaug.source import local
from gpuaug.source.paths import absolute, expand_braces, is_safe, is_url, join, redact, split
from gpuaug.source.remote.disk import Disk
from gpuaug.source.remote.objects import SCHEMES, Bucket
from gpuaug.source.remote.ranges import BUGS, Range, clean, may_pass

log = logging.getLogger("gpuaug")

PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # first and longest pause between tries; pauses double
GAP_BYTES = 1 << 16  # two ranges with at most this gap are requested together, because two requests take longer
OPEN_FILES = 32  # local files that a process keeps open
DEEPEST = 32  # limit for levels of folders, because a server may list a folder in itself

_ABANDONED: list[Any] = []  # the parent's clients; closing them after a fork would wait for threads that do not exist


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """How a source reads from URLs (``s3://``, ``gs://``, ``hdfs://``, ``https://``). Ignored for local paths.

    Args:
        options: options of obstore's store (S3, Google, Azure) or of the fsspec file system (other URLs), such as
            ``{endpoint_url: ..., anon: true}``. None: from the environment, and for S3 also from ``~/.aws``. Put
            credentials there.
        concurrency: maximum number of requests at a time in each worker.
        tries: maximum number of tries of a request.
        redirects: follow redirects of web servers and object stores to other hosts. With False they are errors, and
            object stores cannot be read through a proxy. For object stores, a host below the store's own, such as
            ``photos.example.org`` below ``example.org``, is not another host.
        timeout: seconds for one try, plus at least one second for each megabyte of a range. All tries of a batch
            together should take less than the ``timeout`` of the loader.
        cache: folder on a local disk that stores what was read. Processes and runs may share it. None: no cache.
        cache_bytes: limit of the cache folder in bytes. The least recently used entries are removed first.

    >>> Remote(options={"anon": True}, cache="/scratch/images").concurrency
    64
    """

    options: Mapping[str, Any] | None = field(default=None, repr=False)
    concurrency: int = 64
    tries: int = 4
    redirects: bool = False
    timeout: float = 10.0
    cache: str | os.PathLike[str] | None = None
    cache_bytes: int = 100_000_000_000

    def __post_init__(self) -> None:
        for name in ("concurrency", "tries", "cache_bytes"):
            checks.whole_number(f"source.remote.{name}", getattr(self, name), 1)
        checks.flag("source.remote.redirects", self.redirects)
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, int | float) or not self.timeout > 0:
            raise ConfigError(f"`source.remote.timeout` must be above 0 seconds. Found: {self.timeout!r}.")
        if self.options is not None and not isinstance(self.options, Mapping):
            raise ConfigError(f"`source.remote.options` must be a mapping. Found: {type(self.options).__name__}.")
        is_local = isinstance(self.cache, str | os.PathLike) and not is_url(self.cache) and "\0" not in str(self.cache)
        if self.cache is not None and not is_local:
            raise ConfigError(f"`source.remote.cache` must be a local folder. Found: {self.cache!r}.")


class FileInfo(NamedTuple):
    """A file of a listing."""

    path: str  # path or URL; in a listing by `Storage.find`, relative to the listed folder
    size: int  # bytes; -1: not known
    version: str  # changes when the file changes


class Storage:
    """Reads and lists files, local or behind URLs. Every process opens its own connections, also after a fork."""

    _disk: Disk | None

    def __init__(self, remote: Remote | None = None) -> None:
        self.remote: Remote = checks.instance("source.remote", remote, Remote, optional=True) or Remote()
        self._reset()

    def __reduce__(self) -> tuple[Any, ...]:
        return Storage, (self.remote,)

    def read(self, ranges: Sequence[Range]) -> list[bytes | Exception]:
        """The bytes of each range, or an exception: an OSError, or a ReadError after the last try."""
        self._reset_after_fork()
        answers: dict[Range, Any] = dict.fromkeys(ranges)
        held = 0  # bytes of large images so far
        for part in answers:
            size = max(part.image or 0, part.size or 0)
            large = 0 if part.image is None or size <= local.LARGE else size
            if large > local.LARGEST_IMAGE or held + large > local.LARGEST_BATCH:
                answers[part] = local.too_large(size, part.path, held=held)
            elif size > part.limit:
                answers[part] = OSError(errno.EFBIG, f"{size} bytes, more than {part.limit}", redact(part.path))
            else:
                held += large
                answers[part] = self._read_locally(part)
        if remote := [part for part, answer in answers.items() if answer is None]:
            new = self._ask(remote, "read")
            if self._disk is not None:
                self._disk.put([(_cache_name(part), data) for part, data in new.items() if isinstance(data, bytes)])
            answers |= new
        return [answers[part] for part in ranges]

    def _read_locally(self, part: Range) -> bytes | OSError | None:
        """The answer for a range of a local file, or for a range in the disk cache; None for other ranges."""
        if part.size == 0:
            return b""
        if is_url(part.path):
            return None if self._disk is None else self._disk.get(_cache_name(part))
        try:
            is_image = part.image is not None
            if part.size is None:
                return local.read_file(part.path, image=is_image, limit=part.limit)
            return self._open_file(part.path).read(part.begin, part.size, version=part.version, image=is_image)
        except OSError as error:
            return error

    def read_file(self, path: str, *, limit: int = 0, version: str = "") -> bytes:
        """All bytes of a file; OSError or ReadError if it cannot be read. ``limit``: in bytes; 0: 1 GiB.

        The disk cache returns only bytes that it stored with the same ``version``.
        """
        (data,) = self.read([Range(path, most=limit, version=version)])
        if isinstance(data, Exception):
            raise data
        return data

    def stat(self, paths: Sequence[str]) -> list[FileInfo]:
        """Size and version of each file; SourceError if a file is missing or is not a regular file."""
        self._reset_after_fork()
        answers = self._ask([Range(path) for path in paths if is_url(path)], "info")
        files = []
        for path in paths:
            answer = answers[Range(path)] if is_url(path) else local.info(path)
            if isinstance(answer, Exception):
                raise SourceError(f"{redact(path)!r} cannot be used: {_text(answer)}.") from answer
            files.append(FileInfo(path, *answer))
        return files

    def find(self, root: str, *, key: str = "source.root") -> list[FileInfo]:
        """All files below a URL, in no fixed order; SourceError if a folder cannot be listed."""
        self._reset_after_fork()
        files: list[FileInfo] = []
        folders = [""]
        for _ in range(DEEPEST + 1):
            parts = {folder: Range(join(root, folder) if folder else root) for folder in folders}
            answers = self._ask(parts.values(), "find")
            folders = []
            for folder, part in parts.items():
                url, entries = redact(part.path), answers[part]
                if isinstance(entries, FileNotFoundError) and not folder:
                    raise SourceError(f"`{key}` does not exist, or is empty: {redact(root)!r}.") from entries
                if isinstance(entries, Exception):
                    raise SourceError(f"{url!r} cannot be listed: {_text(entries)}.") from entries
                for name, is_folder, size, version in entries:
                    if not is_safe(name):
                        log.warning("source: %r in %s is not a valid file name and is left out", name, url)
                    elif is_folder:
                        folders.append(f"{folder}{name}/")
                    else:
                        files.append(FileInfo(folder + name, size, version))
            if not folders:
                return files
        raise SourceError(
            f"{redact(root)!r} has more than {DEEPEST} levels of folders, such as {folders[0]!r}. Check whether "
            "the server lists a folder in itself."
        )

    def expand(self, root: Any, *, ending: str) -> list[FileInfo]:
        """The files that ``root`` names, in order, with full paths or URLs; SourceError if there are none.

        ``root`` is a path, a URL, or a list of these. Each names a file or folder, and may contain ``{000..099}``,
        ``{a,b}`` or ``*``. In folders, only files with ``ending`` are listed.
        """
        files: list[FileInfo] = []
        for item in list(root) if isinstance(root, Sequence) and not isinstance(root, str) else [root]:
            if not isinstance(item, str | os.PathLike) or not os.fspath(item) or "\0" in str(item):
                raise ConfigError(f"`source.root` must be paths or URLs of {ending} files. Found: {item!r}.")
            for path in map(absolute, expand_braces(os.fspath(item))):
                named = self._match(path, ending)
                if not named:
                    raise SourceError(
                        f"`source.root` must name {ending} files, or a folder of them. Found: {redact(path)!r}."
                    )
                files += sorted(named)
        if not files:
            raise ConfigError(f"`source.root` must name {ending} files. Found: {root!r}.")
        path, count = Counter(info.path for info in files).most_common(1)[0]
        if count > 1:
            raise SourceError(f"`source.root` must name each file once. Found twice: {redact(path)!r}.")
        more = {info.path: info for info in self.stat([info.path for info in files if info.size < 0])}
        found = [more.get(info.path, info) for info in files]
        if unknown := [info.path for info in found if info.size < 0]:
            raise SourceError(f"{redact(unknown[0])!r}: the server reports no size. Use another server, or a copy.")
        return found

    def _match(self, path: str, ending: str) -> list[FileInfo]:
        """The files that a path, a folder or a pattern names. Size -1: not known yet."""
        pattern = None
        if "*" in path:
            path, pattern = split(path)
            if "*" in path:
                raise ConfigError(f"`source.root` may contain * only in its last part. Found: {redact(path)!r}.")
        elif path.split("?", 1)[0].lower().endswith(ending) and (is_url(path) or not os.path.isdir(path)):
            return [FileInfo(path, -1, "")]
        if is_url(path):
            return [
                FileInfo(join(path, key), size, version)
                for key, size, version in self.find(path)  # an HTML listing has no sizes
                if (key.lower().endswith(ending) if pattern is None else fnmatchcase(key, pattern) and "/" not in key)
            ]
        if pattern is not None:
            return [FileInfo(x, -1, "") for x in glob.iglob(os.path.join(glob.escape(path), pattern))]
        paths = (os.path.join(above, x) for above, _, names in os.walk(path) for x in names)
        return [FileInfo(x, -1, "") for x in paths if x.lower().endswith(ending)]

    def _reset(self) -> None:
        self._system = lru_cache(None)(self._open)
        self._threads = ThreadPoolExecutor(self.remote.concurrency, thread_name_prefix="gpuaug-remote")
        self._open_file = lru_cache(OPEN_FILES)(local.OpenFile)
        self._stop = threading.Event()  # set by Ctrl-C, to end pauses between tries
        self._disk = None if self.remote.cache is None else Disk(self.remote.cache, max_bytes=self.remote.cache_bytes)
        self._pid = os.getpid()  # last: a thread that sees it uses the new pool. The parent's has no threads here

    def _reset_after_fork(self) -> None:
        if self._pid != os.getpid():
            _ABANDONED.append((self._system, self._threads))
            self._reset()

    def _open(self, bucket: str) -> Any:
        """The client for a bucket or server (its URL without a path)."""
        scheme = bucket.split("://", 1)[0]
        try:
            if scheme in SCHEMES:
                return Bucket(bucket, self.remote)
            from gpuaug.source.remote.filesystem import FileSystem

            return FileSystem(bucket, self.remote)
        except GpuaugError:
            raise
        except ImportError as error:
            raise SourceError(
                f"{scheme}:// needs another package: {error}. Run `pip install gpuaug[remote]` for s3, gs, az, https."
            ) from error
        except OSError as error:
            text = clean(str(error).partition("\n")[0] or repr(error))
            raise SourceError(f"{scheme}:// cannot be opened: {text}.") from error
        except (TypeError, ValueError) as error:
            text = clean(str(error).partition("\n")[0])
            raise ConfigError(f"`source.remote.options` are not valid for {scheme}://. {text}.") from error

    def _ask(self, parts: Iterable[Range], call: str) -> dict[Range, Any]:
        """The answer of ``call`` for each range, or the exception of its last try."""
        groups: dict[Any, list[Range]] = {}  # by client
        for part in dict.fromkeys(parts):
            groups.setdefault(self._system(_bucket(part.path)), []).append(part)
        begun = {x: x.begin(group) for x, group in groups.items() if call == "read" and hasattr(x, "begin")}
        try:
            first = {part: answer for x in begun for part, answer in zip(groups[x], begun[x].result(), strict=True)}
            answers = {part: answer for part, answer in first.items() if not isinstance(answer, BaseException)}
            left = [(getattr(x, call), part) for x, group in groups.items() for part in group if part not in answers]
            tried = self._threads.map(lambda job: self._try(*job, first=first.get(job[1])), left)
            return answers | {part: answer for (_, part), answer in zip(left, tried, strict=True)}
        except BaseException:  # for example Ctrl-C; `map` cancels what has not begun
            self._stop.set()
            self._stop = threading.Event()
            for future in begun.values():
                future.cancel()
            raise

    def _try(self, call: Callable[[Range], Any], part: Range, *, first: BaseException | None) -> Any:
        """The answer of ``call``, or its exception: for a temporary error a ReadError, which no caller retries.

        ``first``: the error of the first try, if it was already made.
        """
        stop = self._stop
        for attempt in range(1, self.remote.tries + 1):
            try:
                if first is not None and attempt == 1:
                    raise first
                return call(part)
            except BUGS:
                raise
            except Exception as caught:
                error = caught
            if isinstance(error, OSError | GpuaugError) and not may_pass(error):
                return error
            # random, so that workers do not retry together. The global generator belongs to the user
            pause = min(LONGEST_PAUSE_S, PAUSE_S * 2 ** (attempt - 1)) * random.Random().uniform(0.75, 1.25)
            if not may_pass(error) or attempt == self.remote.tries or stop.wait(pause):
                break
        late = f"no answer within {part.seconds(self.remote.timeout):.3g} s"
        text = late if isinstance(error, TimeoutError) else _text(error)
        failed = ReadError(f"{redact(part.path)!r} cannot be read, tried {attempt} times: {text}")
        failed.__cause__ = error
        return failed


def joined(ranges: Iterable[Range], *, most: int = sys.maxsize) -> list[Range]:
    """Sort ranges of one file by position, and join neighbours up to ``most`` bytes."""
    parts: list[Range] = []
    for part in sorted(ranges, key=lambda part: part.begin):
        if parts:
            last = parts[-1]
            size, gap = part.begin + (part.size or 0) - last.begin, part.begin - last.begin - (last.size or 0)
            if 0 <= gap <= GAP_BYTES and size <= most:
                parts[-1] = last._replace(size=size)
                continue
        parts.append(part)
    return parts


def _bucket(url: str) -> str:
    """Protocol and bucket (or server) of a URL."""
    match = re.match(r"\w[\w.+-]*://[^/]*", url)
    if match is None or "::" in url:
        raise ConfigError(f"a URL must have the form s3://bucket/path. Found: {redact(url)!r}.")
    return match[0]


def _cache_name(part: Range) -> str:
    return f"{part.path}\n{part.begin}\n{part.size}\n{part.version}"


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, GpuaugError) else f"{type(error).__name__}: {clean(str(error))}"
