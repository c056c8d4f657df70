"""Opens the fsspec file system of a URL, and gets bytes, sizes and listings from it."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import inspect
from collections.abc import Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import unquote

from gpuaug.errors import ConfigError, ReadError, SourceError
from gpuaug.source import local
from gpuaug.source.paths import redact

PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "hdfs": "pyarrow", "az": "adlfs", "abfs": "adlfs"}  # package by protocol
VERSIONS = ["ETag", "etag", "generation", "md5Hash", "Content-MD5", "LastModified", "Last-Modified", "last_modified"]
VERSIONS += ["mtime", "modified", "updated"]  # fields that change with the file; each store has some of them
# fsspec settings that do not change which bytes are read
UNUSED = {"use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache", "asynchronous", "loop"}
UNUSED |= {"default_block_size", "default_fill_cache", "default_cache_type", "cache_regions", "max_concurrency"}
UNUSED |= {"fixed_upload_size", "local_expiry_check", "block_size", "cache_timeout", "check_connection"}
BYTES_PER_S = 1e6  # speed of a slow connection, for timeouts


class StatusError(Exception):
    """A request that failed. ``status`` is the HTTP status; 0 if there was no usable answer."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


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
        """Timeout of one try."""
        return timeout + (self.size or 0) / BYTES_PER_S


def open_filesystem(url: str, options: Mapping[str, Any], *, connections: int) -> Any:
    """The fsspec file system of a URL; ConfigError or SourceError if it cannot be opened."""
    import fsspec
    from fsspec.core import url_to_fs

    protocol, settings = url.split("://", 1)[0], dict(options)
    if protocol in ("s3", "s3a"):
        # no retries by botocore: gpuaug retries, and botocore's pauses take seconds
        config = {"max_pool_connections": max(10, connections), "retries": {"max_attempts": 0}}
        settings["config_kwargs"] = {**config, **(settings.get("config_kwargs") or {})}
    if protocol not in fsspec.available_protocols():
        raise ConfigError(
            f"fsspec does not support {protocol}://. Supported: {', '.join(sorted(fsspec.available_protocols()))}."
        )
    try:
        # no cache of listings, because it takes a gigabyte for a million files
        system, _ = url_to_fs(url, skip_instance_cache=True, use_listings_cache=False, **settings)
    except ImportError as error:
        package = PACKAGES.get(protocol, "gpuaug[remote]")
        raise SourceError(f"{protocol}:// needs another package: {error}. Run `pip install {package}`.") from error
    except OSError as error:
        text = f"{protocol}:// cannot be opened: {str(error).splitlines()[0] if str(error) else error!r}."
        if protocol == "hdfs":
            text += " It needs Java and Hadoop's libhdfs. Set JAVA_HOME, HADOOP_HOME and CLASSPATH, or use webhdfs://."
        raise SourceError(text) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"`source.remote.options` are not valid. {type(error).__name__}: {error}.") from error
    if protocol in ("s3", "s3a"):
        system.retries = 1  # one try, because gpuaug retries
    if unknown := _unknown_options(system, protocol, options):
        raise ConfigError(
            f"`source.remote.options` must be options of {protocol}://. Unknown options: {', '.join(sorted(unknown))}."
        )
    return system


def _unknown_options(system: Any, protocol: str, options: Mapping[str, Any]) -> set[str]:
    """Names of unknown options. s3fs refuses them only at the first request, and gcsfs never."""
    if protocol in ("s3", "s3a"):
        from botocore.session import Session

        return set(system.kwargs) - set(inspect.signature(Session).parameters) - UNUSED
    if protocol in ("gs", "gcs"):
        makers = [vars(cls)["__init__"] for cls in type(system).__mro__ if "__init__" in vars(cls)]
        return set(options) - UNUSED - {name for maker in makers for name in inspect.signature(maker).parameters}
    return set()


async def _call(system: Any, threads: Executor, method: str, path: str, **settings: Any) -> Any:
    try:
        if getattr(system, "async_impl", False):
            return await getattr(system, f"_{method}")(path, **settings)
        call = partial(getattr(system, method), path, **settings)
        return await asyncio.get_running_loop().run_in_executor(threads, call)
    except NotImplementedError as error:  # for example, data:// has no folders
        raise SourceError(f"this kind of URL does not support `{method}`: use another") from error


async def read(system: Any, threads: Executor, part: Range) -> bytes | Exception:
    """The bytes of a range, or an exception if the answer cannot be used."""
    if part.path.startswith(("http://", "https://")):
        return await _read_http(system, part)
    end = None if part.size is None else part.begin + part.size
    if end is None and part.path.startswith(("s3:", "s3a:", "gs:", "gcs:")):
        end = part.limit + 1  # without an end, s3fs first requests the size
    try:
        data = await _call(system, threads, "cat_file", system._strip_protocol(part.path), start=part.begin, end=end)
    except OSError as error:
        if part.size is None and "range" in str(error).lower():  # the object is empty
            return b""
        raise
    return check_size(data, part)


async def _read_http(system: Any, part: Range) -> bytes | Exception:
    """Send a GET on fsspec's session. fsspec's own GET has no size limit, and takes a whole file for a range."""
    session = await system.set_session()
    options = dict(system.kwargs)
    headers = {**(options.pop("headers", None) or {}), "Accept-Encoding": "identity"}
    if part.size is not None:
        headers["Range"] = f"bytes={part.begin}-{part.begin + part.size - 1}"
    async with session.get(system.encode_url(part.path), headers=headers, **options) as response:
        if error := status_error(response.status, part):
            return error
        data = bytearray()
        async for piece in response.content.iter_any():
            data += piece
            if len(data) > part.bound:
                return too_long(part)
        return check_size(data, part)


def status_error(status: int, part: Range, words: str = "") -> Exception | None:
    """The error that an HTTP status stands for, or None. ``words``: the server's description of the error."""
    url, text = redact(part.path), " ".join(f"HTTP status {status} {words}".split())[:300]
    if status in (404, 410):
        return FileNotFoundError(errno.ENOENT, "no such object", url)
    if status in (401, 403):
        return PermissionError(errno.EACCES, text, url)
    if status >= 300:
        return StatusError(text, status)
    if part.size is not None and status == 200:
        return ReadError(f"the server of {url!r} supports no range requests. Use a server that does.")
    return None


def too_long(part: Range) -> OSError:
    return OSError(errno.EFBIG, f"more than {part.bound} bytes", redact(part.path))


def check_size(data: Any, part: Range) -> bytes | OSError:
    """Return ``data``, or an OSError if its length is wrong."""
    if part.size is not None and len(data) != part.size:
        text = f"{len(data)} bytes instead of {part.size} at position {part.begin}"
        return OSError(errno.EIO, text, redact(part.path))
    return too_long(part) if len(data) > part.limit else bytes(data)


async def info(system: Any, threads: Executor, part: Range) -> tuple[int, str]:
    """Size and version of a file, as in :func:`list_folder`."""
    try:
        return _size_and_version(await _call(system, threads, "info", system._strip_protocol(part.path)))
    except FileNotFoundError as error:
        cause = error.__cause__
        if not part.path.startswith(("http://", "https://")) or not isinstance(cause, Exception):
            raise
        # fsspec's HTTP client raises FileNotFoundError with the full URL after any failure
        status = 404 if isinstance(cause, FileNotFoundError) else getattr(cause, "status", 0)
        raise status_error(status, part) or cause from None


async def list_folder(system: Any, threads: Executor, part: Range) -> list[tuple[str, bool, int, str]]:
    """The entries of a folder: name, whether it is a folder, size in bytes (-1: unknown), version."""
    path, is_http = system._strip_protocol(part.path), part.path.startswith(("http://", "https://"))
    entries, prefix = [], path.rstrip("/") + "/"
    for item in await _call(system, threads, "ls", path + "/" if is_http else path, detail=True):
        full = str(item["name"])
        if not full.startswith(prefix) or not full[len(prefix) :].strip("/"):  # the folder itself, or another place
            continue
        name = full[len(prefix) :].rstrip("/")
        if is_http:
            if "?" in name or "#" in name:  # a link to the same listing in another order
                continue
            name = unquote(name, errors="surrogateescape")
        is_folder = item["type"] == "directory" or full.endswith("/")
        entries.append((name, is_folder, *_size_and_version(item)))
    return entries


def _size_and_version(info: Mapping[str, Any]) -> tuple[int, str]:
    """Size in bytes (-1: unknown), and a hash that changes with the content."""
    size = info.get("size")
    marks = [str(info[name]) for name in VERSIONS if info.get(name) is not None]
    version = hashlib.blake2b(f"{size} {marks}".encode(), digest_size=8).hexdigest()
    return -1 if size is None else int(size), version
