"""Web servers and other URLs through fsspec. aiohttp sends the requests to web servers.

obstore would take a third of the CPU time per request to a web server. But it can refuse no redirect behind a proxy,
needs a client for each signature in a URL, lists no HTML pages, and refuses answers without Content-Length.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import unquote
from urllib.request import getproxies

import fsspec
from fsspec.asyn import get_loop
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

from gpuaug.errors import ConfigError, ReadError
from gpuaug.source.paths import redact
from gpuaug.source.remote.ranges import Range, StatusError, check_size, clean, status_error, too_long, version_of

T = TypeVar("T")

# protocols of fsspec whose URLs do not begin with a server
UNFIT = {"data", "dir", "file", "local", "reference", "generic", "tar", "zip", "libarchive", "cached", "blockcache"}
UNFIT |= {"filecache", "simplecache", "async_wrapper", "asynclocal", "asyncwrapper"}
VERSIONS = ["ETag", "etag", "Content-MD5", "LastModified", "Last-Modified", "mtime", "modified", "updated"]


class FileSystem:
    """Reads and lists the files of one server.

    Args:
        url: the URL of the server, without a path.
        remote: the :class:`gpuaug.Remote`.
    """

    def __init__(self, url: str, remote: Any) -> None:
        self._seconds, self._slots = remote.timeout, asyncio.Semaphore(remote.concurrency)
        protocol, settings = url.split("://", 1)[0], dict(remote.options or {})
        self._is_web = protocol in ("http", "https")
        self._bytes = self._read_web if self._is_web else self._read
        known = {*fsspec.available_protocols(), "s3", "gs", "az"} - UNFIT
        if protocol not in known:
            text = f"{protocol}:// is not supported: {redact(url)!r}. Supported: {', '.join(sorted(known))}."
            raise ConfigError(text)
        if self._is_web:
            # proxies of the environment, which take 200 us of CPU time per request to look up
            more = {"headers": {"User-Agent": "gpuaug"}, "trust_env": bool(getproxies())}
            more |= {} if remote.redirects else {"trace_configs": [_refuse_redirects()]}
            settings["client_kwargs"] = {**more, **(settings.get("client_kwargs") or {})}
        # no cache of listings, because it takes a gigabyte for a million files
        system, _ = fsspec.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False, **settings)
        self._strip = system._strip_protocol  # older wrappers lack it
        self._system: Any = system if system.async_impl else AsyncFileSystemWrapper(system)

    def read(self, part: Range) -> bytes:
        return self._wait(self._bytes, part)

    def begin(self, parts: Sequence[Range]) -> Future[list[bytes | BaseException]]:
        """Begin to read. With a thread that waits for each part, requests would take twice the CPU time."""

        async def read() -> list[bytes | BaseException]:
            return await asyncio.gather(*(self._timed(self._bytes, part) for part in parts), return_exceptions=True)

        return asyncio.run_coroutine_threadsafe(read(), get_loop())

    def info(self, part: Range) -> tuple[int, str]:
        """Size and version of a file."""
        return _size_and_version(self._wait(self._headers if self._is_web else self._info, part))

    def find(self, part: Range) -> list[tuple[str, bool, int, str]]:
        """The entries of a folder: name, whether it is a folder, size in bytes (-1: unknown), version."""
        return self._wait(self._find, part)

    def _wait(self, work: Callable[[Range], Coroutine[Any, Any, T]], part: Range) -> T:
        """Run on fsspec's event loop, which can stop a request that takes too long."""
        return asyncio.run_coroutine_threadsafe(self._timed(work, part), get_loop()).result()

    async def _timed(self, work: Callable[[Range], Coroutine[Any, Any, T]], part: Range) -> T:
        async with self._slots, asyncio.timeout(part.seconds(self._seconds)):
            return await work(part)

    async def _read(self, part: Range) -> bytes:
        end = None if part.size is None else part.begin + part.size
        return check_size(bytes(await self._system._cat_file(self._strip(part.path), start=part.begin, end=end)), part)

    async def _info(self, part: Range) -> Mapping[str, Any]:
        return dict(await self._system._info(self._strip(part.path)))

    @asynccontextmanager
    async def _get(self, part: Range, method: str = "GET") -> AsyncIterator[Any]:
        """The answer to a request on fsspec's session. fsspec's own GET has no size limit, and takes a whole file."""
        session, options = await self._system.set_session(), dict(self._system.kwargs)
        headers = {**(options.pop("headers", None) or {}), "Accept-Encoding": "identity"}
        if part.size is not None:
            headers["Range"] = f"bytes={part.begin}-{part.begin + part.size - 1}"
        url = self._system.encode_url(part.path)
        async with session.request(method, url, headers=headers, **options) as response:
            if response.status >= 300:
                raise status_error(response.status, part, response.reason or "")
            yield response

    async def _headers(self, part: Range) -> Mapping[str, Any]:
        try:
            async with self._get(part, "HEAD") as response:
                return {**response.headers, "size": response.content_length}
        except (PermissionError, StatusError):  # some servers and signatures of URLs allow only GET
            async with self._get(part) as response:
                return {**response.headers, "size": response.content_length}

    async def _read_web(self, part: Range) -> bytes:
        async with self._get(part) as response:
            url = redact(part.path)
            if part.size is not None:
                if response.status == 200:
                    raise ReadError(f"the server of {url!r} supports no range requests. Use a server that does.")
                if not response.headers.get("Content-Range", "").startswith(f"bytes {part.begin}-"):
                    raise status_error(response.status, part, "but the answer is not the requested range")
            if (encoding := response.headers.get("Content-Encoding", "identity").lower()) != "identity":
                text = f"{url!r} has Content-Encoding {clean(encoding)}. Serve the file without Content-Encoding."
                raise ReadError(text)
            if (response.content_length or 0) > part.bound:
                raise too_long(part)
            data = bytearray()
            async for piece in response.content.iter_any():
                data += piece
                if len(data) > part.bound:
                    raise too_long(part)
            return check_size(bytes(data), part)

    async def _find(self, part: Range) -> list[tuple[str, bool, int, str]]:
        path = self._strip(part.path)
        entries, prefix = [], path.rstrip("/") + "/"
        for item in await self._system._ls(path + "/" if self._is_web else path, detail=True):
            full = str(item["name"])
            name = full[len(prefix) :].rstrip("/")
            if not full.startswith(prefix) or not name:  # the folder itself, or another place
                continue
            if self._is_web and ("?" in name or "#" in name):  # a link to the same listing in another order
                continue
            name = unquote(name, errors="surrogateescape") if self._is_web else name
            entries.append((name, item["type"] == "directory" or full.endswith("/"), *_size_and_version(item)))
        return entries


def _refuse_redirects() -> Any:
    """A trace of aiohttp that raises ReadError before a redirect to another host, or from https to http."""
    from aiohttp import TraceConfig
    from yarl import URL

    async def check(session: Any, context: Any, params: Any) -> None:
        url = params.response.url
        target = url.join(URL(params.response.headers.get("Location", "")))
        if target.host != url.host or (url.scheme, target.scheme) == ("https", "http"):
            text = f"the server of {redact(str(url))!r} redirects to {clean(f'{target.scheme}://{target.host}')}"
            raise ReadError(f"{text}. If you trust it, set `source.remote.redirects=true`.")

    trace = TraceConfig()
    trace.on_request_redirect.append(check)
    return trace


def _size_and_version(info: Mapping[str, Any]) -> tuple[int, str]:
    size = info.get("size")
    return -1 if size is None else int(size), version_of(size, [info.get(name) for name in VERSIONS])
