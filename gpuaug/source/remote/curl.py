"""Sends many GET requests at a time from one thread, through libcurl.

A request takes 25 us of CPU time, or 40 us if it is signed for S3. The clients of fsspec take 300 us and more.
Import this module only after a check that pycurl is installed.
"""

from __future__ import annotations

import errno
import re
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import pycurl

from gpuaug.errors import ReadError
from gpuaug.source.paths import redact
from gpuaug.source.remote.filesystem import Range, StatusError, check_size, status_error, too_long
from gpuaug.source.remote.objects import Access

LONGEST_WAIT_S = 0.2  # longest time between two checks of all connections
PAUSE_S = 0.005
BUFFER_BYTES = 1 << 19  # receive buffer of a connection, the largest that libcurl allows

_ENCODED = re.compile(rb"\ncontent-encoding:[ \t]*(?!identity)(\w+)", re.IGNORECASE)
_RANGE = re.compile(rb"\ncontent-range:[ \t]*bytes[ \t]+(\d+)-", re.IGNORECASE)
_ERROR_TEXT = re.compile(rb'<(?:Code|Message)>([^<]*)<|"message":\s*"([^"]*)"')


class Curl:
    """Sends GET requests over connections that stay open. A forked process must create its own Curl.

    Args:
        access: how to reach the objects.
        connections: maximum number of requests at a time.
        timeout: see :class:`gpuaug.Remote`.
    """

    def __init__(self, access: Access, *, connections: int, timeout: float) -> None:
        self._access, self._connections, self._timeout = access, connections, timeout
        self._lock = threading.Lock()
        self._reset()

    def read(self, now: Sequence[Range], then: Sequence[Range] = ()) -> list[bytes | Exception | None]:
        """Return the bytes of each range in ``now``, or an exception. Also start ``then`` on free connections.

        The answers to ``then`` are kept for the next call. An answer is None if libcurl cannot request a key.
        """
        with self._lock:
            try:
                login = self._access.login()
            except Exception as error:  # credential providers may raise any exception
                return [ReadError(f"{redact(x.path)!r} cannot be read: no credentials: {error!r}") for x in now]
            try:
                return self._read(now, then, login)
            except BaseException:  # for example Ctrl-C
                self.close()
                raise

    def close(self) -> None:
        """Close all connections. A later read opens new connections."""
        try:
            for transfer in self._busy.values():
                with suppress(pycurl.error):  # the handle may not have been added yet
                    self._multi.remove_handle(transfer.easy)
            self._multi.close()
        finally:
            self._reset()

    def _reset(self) -> None:
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_MAXCONNECTS, 2 * self._connections)  # redirects need connections too
        self._login: Mapping[str, Any] = {}
        self._free: list[_Transfer] = []  # all with `_login`
        self._busy: dict[Range, _Transfer] = {}
        self._done: dict[Range, bytes | Exception | None] = {}

    def _read(
        self, now: Sequence[Range], then: Sequence[Range], login: Mapping[str, Any]
    ) -> list[bytes | Exception | None]:
        if login != self._login:
            self._login, self._free = login, []
        wanted = dict.fromkeys([*now, *then])
        self._done = {part: answer for part, answer in self._done.items() if part in wanted}
        for part in self._busy.keys() - wanted.keys():
            self._end(part)
        for transfer in self._busy.values():  # prefetched, so their timeout begins now
            transfer.deadline = time.monotonic() + transfer.part.seconds(self._timeout)
        todo = deque(part for part in wanted if part not in self._busy and part not in self._done)
        missing = set(now)
        while True:
            begun_some = self._begin(todo)
            ended_some = self._advance()
            missing.difference_update(self._done)
            if not missing and not (todo and ended_some):
                break
            if not begun_some and not ended_some:
                self._wait()
        answers = [self._done[part] for part in now]
        for part in set(now):
            del self._done[part]
        return answers

    def _begin(self, todo: deque[Range]) -> bool:
        """Start requests on free connections. Return whether any request was started."""
        begun = False
        while todo and len(self._busy) < self._connections:
            part = todo.popleft()
            begun = True
            if (url := self._access.url(part.path)) is None:
                self._done[part] = None
                continue
            try:
                transfer = self._free.pop() if self._free else _Transfer(self._access, self._login)
                transfer.start(url, part, self._timeout)
            except (UnicodeEncodeError, pycurl.error):
                self._done[part] = OSError(errno.EINVAL, "this URL cannot be requested", redact(part.path))
                continue
            self._busy[part] = transfer
            self._multi.add_handle(transfer.easy)
        return begun

    def _advance(self) -> bool:
        """Send and receive without waiting. Return whether any request ended."""
        self._multi.perform()
        busy = len(self._busy)
        more = 1
        while more:
            more, good, bad = self._multi.info_read()
            for easy, code, text in (*((easy, 0, "") for easy in good), *bad):
                part = easy.transfer.part
                self._done[part] = easy.transfer.answer(code, text)
                self._end(part)
        now = time.monotonic()
        for part in [part for part, transfer in self._busy.items() if now >= transfer.deadline]:
            self._done[part] = TimeoutError(errno.ETIMEDOUT, "no answer in time", redact(part.path))
            self._end(part)
        return len(self._busy) < busy

    def _end(self, part: Range) -> None:
        transfer = self._busy.pop(part)
        self._multi.remove_handle(transfer.easy)
        transfer.clear()
        if transfer.login == self._login:
            self._free.append(transfer)

    def _wait(self) -> None:
        until = min(transfer.deadline for transfer in self._busy.values())
        if self._multi.select(max(0.0, min(LONGEST_WAIT_S, until - time.monotonic()))) <= 0:
            # select returns at once if it cannot watch a connection: during DNS look-ups, or for descriptors above 1023
            time.sleep(PAUSE_S)


class _Transfer:
    """A libcurl handle with a login, reused for one request after another."""

    part: Range
    deadline: float

    def __init__(self, access: Access, login: Mapping[str, Any]) -> None:
        self.login, self._encoded = login, access.encoded
        self._head: list[bytes] = []
        self._body: list[bytes] = []
        self.easy = pycurl.Curl()
        self.easy.transfer = self
        options = {
            "NOSIGNAL": 1,
            "HTTP_VERSION": pycurl.CURL_HTTP_VERSION_1_1,  # one request at a time per connection
            "PROTOCOLS": pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS,
            "BUFFERSIZE": BUFFER_BYTES,
            "USERAGENT": "gpuaug",
            "HEADERFUNCTION": self._head.append,
            "WRITEFUNCTION": self._body.append,
            **access.options,
            **login,
        }
        for name, value in options.items():
            self.easy.setopt(getattr(pycurl, name), value)

    def start(self, url: str, part: Range, timeout: float) -> None:
        self.part, self.deadline = part, time.monotonic() + part.seconds(timeout)
        self.easy.setopt(pycurl.URL, url)
        self.easy.setopt(pycurl.MAXFILESIZE_LARGE, part.bound)
        if part.size is None:
            self.easy.unsetopt(pycurl.RANGE)
        else:
            self.easy.setopt(pycurl.RANGE, f"{part.begin}-{part.begin + part.size - 1}")

    def answer(self, code: int, text: str) -> bytes | Exception:
        """The bytes of the ended request, or an exception. ``code``, ``text``: libcurl's error."""
        status, part = self.easy.getinfo(pycurl.RESPONSE_CODE), self.part
        head, body = b"".join(self._head), b"".join(self._body)
        words = _ERROR_TEXT.findall(body[:65536]) if status >= 300 else []
        error = status_error(status, part, b": ".join(a or b for a, b in words).decode(errors="replace"))
        if error is not None:
            return error
        if code == pycurl.E_FILESIZE_EXCEEDED:
            return too_long(part)
        if code:
            return StatusError(f"{text or 'the connection was lost'} ({code})", 0)
        if part.size is not None:
            content_range = _RANGE.search(head)
            if status != 206 or content_range is None or int(content_range[1]) != part.begin:
                return StatusError(f"HTTP status {status}, but the answer is not the requested range", 0)
        if not self._encoded and (encoding := _ENCODED.search(head)):
            name = encoding[1].decode(errors="replace")
            url = redact(part.path)
            return ReadError(f"{url!r} has Content-Encoding {name}. Serve the file without Content-Encoding.")
        return check_size(body, part)

    def clear(self) -> None:
        self._head.clear()
        self._body.clear()
