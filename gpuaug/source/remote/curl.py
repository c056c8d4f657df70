"""Many GETs at a time, from one thread, by libcurl: 25 us of processor each, 40 where they are signed for S3.

The clients of fsspec take 300 us and more. libcurl keeps connections, speaks TLS, finds proxies and signs; here stands
only what is asked next, and what an answer means.
"""

from __future__ import annotations

import errno
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from gpuaug.errors import ReadError

log = logging.getLogger("gpuaug")

ATTENTIVE = 0.2  # seconds between two looks at all connections, whatever the system says of them
PAUSE = 0.005  # seconds
AT_ONCE = 1 << 19  # bytes that are taken from a connection at once, the most that libcurl allows

_CODED = re.compile(rb"\ncontent-encoding:[ \t]*(?!identity)(\w+)", re.IGNORECASE)
_RANGE = re.compile(rb"\ncontent-range:[ \t]*bytes[ \t]+(\d+)-", re.IGNORECASE)
_SAID = re.compile(rb'<(?:Code|Message)>([^<]*)<|"message":\s*"([^"]*)"')


class StatusError(Exception):
    """A request that failed; ``status`` is the HTTP status of the answer, 0 where there was none."""

    def __init__(self, said: str, status: int) -> None:
        super().__init__(said)
        self.status = status


class Get(NamedTuple):
    """What is asked for: quoted URL, first byte, bytes (None: to the end), their bound, seconds for one try."""

    url: str
    begin: int
    size: int | None
    most: int
    seconds: float


class Login(NamedTuple):
    """As whom: lines of the head, and name and password where the request is signed with them."""

    lines: Sequence[str] = ()
    user: str | None = None
    password: str = ""


class Curl:
    """Connections that are kept, for GETs one login may do.

    Not for a forked child: it makes its own.

    Args:
        connections: bound of them, and so of requests under way.
        login: what is valid now; asked before every request.
        options: of libcurl, by pycurl's numbers.
        coded: whether an answer may be what its ``Content-Encoding`` says, as of S3, or has to be the file itself.

    Raises:
        ImportError: without pycurl.
    """

    def __init__(
        self,
        *,
        connections: int,
        login: Callable[[], Login] = Login,
        options: Mapping[int, Any] | None = None,
        coded: bool = True,
    ) -> None:
        import pycurl

        self._coded = coded
        self._connections, self._login, self._options = connections, login, dict(options or {})
        self._lock = threading.Lock()
        self._curl = pycurl
        self._reset()

    def read(self, now: Sequence[Get], then: Sequence[Get] = ()) -> list[bytes | Exception]:
        """Body of each, or why there is none; ``then`` are begun when connections are free, for the next call.

        A range may be shorter where the file ends. The reason is a FileNotFoundError, PermissionError, TimeoutError,
        ReadError, StatusError, or an OSError of the size.
        """
        with self._lock:
            try:
                return self._read(now, then)
            except BaseException:  # an interrupt of the user leaves nothing half done
                self.close()
                raise

    def close(self) -> None:
        """Close all connections; a later read opens new ones."""
        try:
            for transfer in self._busy.values():
                with suppress(self._curl.error):  # it may not have got so far when an interrupt came
                    self._multi.remove_handle(transfer.easy)
            self._multi.close()
        finally:
            self._reset()

    def _reset(self) -> None:
        c = self._curl
        self._multi = c.CurlMulti()
        self._multi.setopt(c.M_MAXCONNECTS, 2 * self._connections)  # also those to where redirections lead
        self._free: list[_Transfer] = []
        self._made = 0
        self._busy: dict[Get, _Transfer] = {}
        self._done: dict[Get, bytes | Exception] = {}

    def _read(self, now: Sequence[Get], then: Sequence[Get]) -> list[bytes | Exception]:
        wanted = dict.fromkeys([*now, *then])
        self._done = {get: found for get, found in self._done.items() if get in wanted}
        begun = time.monotonic()
        for get, transfer in self._busy.items():
            if get in wanted:  # nobody listened until now
                transfer.deadline = begun + get.seconds
        todo = deque(get for get in wanted if get not in self._busy and get not in self._done)
        missing = set(now)
        while True:
            begun_some = self._begin(todo)
            ended_some = self._advance(wanted)
            missing.difference_update(self._done)
            if not missing and not (todo and ended_some):
                break
            if not begun_some and not ended_some:
                self._wait()
        items = [self._done[get] for get in now]
        for get in set(now):
            del self._done[get]
        return items

    def _begin(self, todo: deque[Get]) -> bool:
        """Ask for what is to be asked for, where a connection is free; whether anything was."""
        begun = False
        while todo and (self._free or self._made < self._connections):
            get = todo.popleft()
            begun = True
            try:
                login = self._login()
            except Exception as error:  # whatever a source of credentials raises
                self._done[get] = StatusError(f"no credentials: {error!r}", 0)
                continue
            transfer = self._free.pop() if self._free else self._new()
            try:
                transfer.ask(get, login)
            except (UnicodeEncodeError, self._curl.error):
                self._done[get] = OSError(errno.EINVAL, "no URL that can be asked for", _shown(get.url))
                self._free.append(transfer)
                continue
            self._busy[get] = transfer
            self._multi.add_handle(transfer.easy)
        return begun

    def _new(self) -> _Transfer:
        self._made += 1
        return _Transfer(self._curl, self._options, self._coded)

    def _advance(self, wanted: Mapping[Get, Any]) -> bool:
        """Send and receive what can be without waiting; whether any request came to its end."""
        self._multi.perform()
        ended = False
        more = 1
        while more:
            more, good, bad = self._multi.info_read()
            for easy, code, said in (*((easy, 0, "") for easy in good), *bad):
                ended = True
                self._end(easy.transfer, easy.transfer.found(code, said), wanted)
        present = time.monotonic()
        for get in [get for get, transfer in self._busy.items() if present >= transfer.deadline]:
            ended = True
            self._end(self._busy[get], TimeoutError(errno.ETIMEDOUT, "no answer in time", _shown(get.url)), wanted)
        return ended

    def _end(self, transfer: _Transfer, found: bytes | Exception, wanted: Mapping[Get, Any]) -> None:
        self._multi.remove_handle(transfer.easy)
        get = transfer.get
        del self._busy[get]
        self._free.append(transfer)
        transfer.forget()
        if get in wanted:
            self._done[get] = found

    def _wait(self) -> None:
        until = min(transfer.deadline for transfer in self._busy.values())
        if self._multi.select(max(0.0, min(ATTENTIVE, until - time.monotonic()))) <= 0:
            time.sleep(
                PAUSE
            )  # it returns at once where it sees no connection: names are looked up, or are files > 1023


class _Transfer:
    """One request under way."""

    def __init__(self, c: Any, options: Mapping[int, Any], coded: bool) -> None:
        self._curl, self._coded = c, coded
        self.easy = easy = c.Curl()
        easy.transfer = self
        easy.setopt(c.NOSIGNAL, 1)
        easy.setopt(c.HTTP_VERSION, c.CURL_HTTP_VERSION_1_1)  # one connection for each: what is large delays nothing
        easy.setopt(c.PROTOCOLS, c.PROTO_HTTP | c.PROTO_HTTPS)
        easy.setopt(c.BUFFERSIZE, AT_ONCE)
        easy.setopt(c.USERAGENT, "gpuaug")
        for name, value in options.items():
            easy.setopt(name, value)
        self._as: Login | None = None
        self.get = Get("", 0, None, 0, 0.0)
        self.deadline = 0.0
        self._head: list[bytes] = []
        self._body: list[bytes] = []

    def ask(self, get: Get, login: Login) -> None:
        c, easy = self._curl, self.easy
        self.get, self.deadline = get, time.monotonic() + get.seconds
        self._head, self._body = [], []
        easy.setopt(c.URL, get.url)
        easy.setopt(c.WRITEFUNCTION, self._body.append)
        easy.setopt(c.HEADERFUNCTION, self._head.append)
        easy.setopt(c.MAXFILESIZE_LARGE, get.most if get.size is None else min(get.size, get.most))
        if get.size is None and not get.begin:
            easy.unsetopt(c.RANGE)
        else:
            easy.setopt(c.RANGE, f"{get.begin}-" + ("" if get.size is None else str(get.begin + get.size - 1)))
        if login != self._as:
            for name in (c.HTTPHEADER, c.USERNAME, c.PASSWORD):
                easy.unsetopt(name)
            if login.lines:
                easy.setopt(c.HTTPHEADER, list(login.lines))
            if login.user is not None:
                easy.setopt(c.USERNAME, login.user)
                easy.setopt(c.PASSWORD, login.password)
            self._as = login

    def found(self, code: int, said: str) -> bytes | Exception:
        """What the end of the transfer means."""
        c, get = self._curl, self.get
        status, body, head = self.easy.getinfo(c.RESPONSE_CODE), b"".join(self._body), b"".join(self._head)
        if status in (404, 410):
            return FileNotFoundError(errno.ENOENT, "no such object", _shown(get.url))
        if status >= 300:
            words = b": ".join(a or b for a, b in _SAID.findall(body[:65536])).decode(errors="replace")
            said = " ".join(f"HTTP status {status} {words}".split())[:300]
            return (
                PermissionError(errno.EACCES, said, _shown(get.url))
                if status in (401, 403)
                else StatusError(said, status)
            )
        part = get.size is not None or get.begin > 0
        if part and status == 200:
            return ReadError(f"the server of {_shown(get.url)!r} gives no ranges of files. Use one that does.")
        if code == c.E_FILESIZE_EXCEEDED:
            return OSError(
                errno.EFBIG, f"more than {get.most if get.size is None else get.size} bytes", _shown(get.url)
            )
        if code:
            return StatusError(f"{said or 'the connection was lost'} ({code})", 0)
        if part:
            at = _RANGE.search(head)
            if status != 206 or at is None or int(at[1]) != get.begin:
                return StatusError(f"HTTP status {status} with another range than asked for", 0)
        if not self._coded and (how := _CODED.search(head)):
            said = how[1].decode(errors="replace")
            return ReadError(
                f"{_shown(get.url)!r} comes as {said}, and not as it is. Serve it without Content-Encoding."
            )
        return body

    def forget(self) -> None:
        """Drop what has come; libcurl keeps the lists until the next request."""
        self._head.clear()
        self._body.clear()


def _shown(url: str) -> str:
    """Without passwords: those before the host, and those of signed URLs."""
    return re.sub(r"^(\w+://)[^/@]*@", r"\1", url).partition("?")[0]
