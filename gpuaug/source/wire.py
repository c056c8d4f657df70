"""Plain GETs over kept HTTP/1.1 connections, many at a time by one thread, for half of a library's processor time.

It knows one kind of answer, a body of stated length, and the errors that stores give instead. Whatever else comes (a
redirect, a body of unknown length, a server that cannot be reached or trusted this way) is :class:`OddError`: somebody
who knows all of HTTP has to ask.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import selectors
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

log = logging.getLogger("gpuaug")

LARGEST = 1 << 24  # bytes of a body; larger ones are rare, and the library streams them
USUAL_HEAD = 1 << 11  # bytes
LARGEST_HEAD = 1 << 16  # bytes; also of what a server says about an error
ARRIVING = 1 << 18  # bytes that are taken from a connection at once
RESOLVED = 60.0  # seconds that the addresses of a host are believed
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
PORTS = {"http": 80, "https": 443}

_STATUS = re.compile(rb"http/1\.([01]) (\d{3})[ \r]")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*\r\n")
_RANGE = re.compile(rb"\r\ncontent-range:[ \t]*bytes (\d+)-(\d+)/")


class OddError(Exception):
    """An answer, or a way to it, that only a whole HTTP client knows."""


class StatusError(Exception):
    """A request that failed; ``status`` is the HTTP status of the answer, 0 where there was none."""

    def __init__(self, said: str, status: int) -> None:
        super().__init__(said)
        self.status = status


class Get(NamedTuple):
    """What is asked for: quoted path, first byte, bytes (None: all), their bound, seconds for one try."""

    path: str
    begin: int
    size: int | None
    most: int
    seconds: float


class Wire:
    """Connections to one server, for whatever thread reads.

    Args:
        endpoint: ``http://host:port`` or ``https://host``; a path in it is no part of what is asked for.
        headers: gives lines for the head of a request for a path, each with its end; raises OddError if it has none.
        connections: bound of them, and so of requests under way.
        context: of TLS.

    Raises:
        OddError: if the endpoint is reached through a proxy, or is none of these.
    """

    def __init__(
        self, endpoint: str, *, headers: Callable[[str], str], connections: int, context: ssl.SSLContext | None = None
    ) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme not in PORTS or not parts.hostname or parts.username is not None or parts.query:
            raise OddError("endpoint of this kind")
        if {parts.scheme, "all"} & getproxies().keys() and not proxy_bypass(parts.netloc):
            raise OddError("proxy")
        self._host, self._port = parts.hostname, parts.port or PORTS[parts.scheme]
        self._name = host_of(endpoint)
        self._context = (context or ssl.create_default_context()) if parts.scheme == "https" else None
        self._headers, self._connections = headers, connections
        self._lock = Lock()
        self._view = memoryview(bytearray(ARRIVING))
        self._addresses: list[Any] = []
        self._resolved = 0.0
        self._turns = 0
        self._refused = ""
        self._reset()

    def read(self, now: Sequence[Get], then: Sequence[Get] = ()) -> list[bytes | Exception]:
        """Body of each, or why there is none; ``then`` are begun when connections are free, for the next call.

        A range may be shorter where the file ends. The reason is a FileNotFoundError, PermissionError, TimeoutError,
        StatusError, OddError, or an OSError of the size.
        """
        if not self._lock.acquire(blocking=False):
            return [OddError("another thread reads")] * len(now)
        try:
            return self._read(now, then)
        except BaseException:  # an interrupt of the user leaves nothing half done
            self.close()
            raise
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close all connections; a later read opens new ones."""
        for connection in self._open:
            connection.socket.close()
        self._selector.close()
        self._reset()

    def _reset(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._open: set[_Connection] = set()
        self._idle: list[_Connection] = []
        self._busy: dict[Get, _Connection] = {}
        self._todo: deque[Get] = deque()
        self._done: dict[Get, bytes | Exception] = {}
        self._wanted: dict[Get, None] = {}

    def _read(self, now: Sequence[Get], then: Sequence[Get]) -> list[bytes | Exception]:
        self._wanted = dict.fromkeys([*now, *then])
        self._done = {get: found for get, found in self._done.items() if get in self._wanted}
        self._todo = deque(get for get in self._wanted if get not in self._busy and get not in self._done)
        if self._busy or self._idle:
            begun = time.monotonic()
            for get, connection in self._busy.items():
                connection.deadline = begun + get.seconds  # nobody listened until now
            self._turn(0.0)  # what has come meanwhile, and which connections have ended
        missing = set(now)
        while True:
            self._send()
            missing.difference_update(self._done)
            if not missing:
                break
            until = min(connection.deadline for connection in self._busy.values())
            self._turn(max(0.0, until - time.monotonic()))
            present = time.monotonic()
            if present >= until:
                for get, connection in [item for item in self._busy.items() if present >= item[1].deadline]:
                    self._end(connection, TimeoutError(errno.ETIMEDOUT, "no answer in time", get.path))
        items = [self._done[get] for get in now]
        for get in set(now):
            del self._done[get]
        return items

    def _turn(self, seconds: float) -> None:
        """Go on with the connections on which something happened, or happens within so many seconds."""
        for key, _ in self._selector.select(seconds):
            connection: _Connection = key.data
            try:
                self._advance(connection)
            except (BlockingIOError, ssl.SSLWantReadError):
                self._listen(connection, READ)
            except ssl.SSLWantWriteError:
                self._listen(connection, WRITE)
            except (OSError, StatusError, OddError) as error:
                self._end(connection, error)

    def _listen(self, connection: _Connection, to: int) -> None:
        if connection.listens != to:
            connection.listens = to
            self._selector.modify(connection.fd, to, connection)

    # -- asking

    def _send(self) -> None:
        """Ask for what is to be asked for, on connections that are free, or new ones."""
        while self._todo and (self._refused or self._idle or len(self._open) < self._connections):
            get = self._todo.popleft()
            if self._refused:
                self._done[get] = OddError(self._refused)
                continue
            try:
                connection = self._idle.pop() if self._idle else self._connect()
            except (OSError, UnicodeError) as error:
                self._done[get] = OddError(f"no connection to {self._name}: {error}")
                continue
            connection.get, connection.deadline = get, time.monotonic() + get.seconds
            self._busy[get] = connection
            if connection.ready:
                try:
                    self._ask(connection)
                except (BlockingIOError, ssl.SSLWantWriteError):
                    self._listen(connection, WRITE)
                except (OSError, OddError) as error:
                    self._end(connection, error)

    def _ask(self, connection: _Connection) -> None:
        get = connection.get
        assert get is not None
        part = "" if get.size is None else f"Range: bytes={get.begin}-{get.begin + get.size - 1}\r\n"
        connection.out = (
            f"GET {get.path} HTTP/1.1\r\nHost: {self._name}\r\nUser-Agent: gpuaug\r\nAccept: */*\r\n"
            f"{part}{self._headers(get.path)}\r\n"
        ).encode()
        self._write(connection)

    def _write(self, connection: _Connection) -> None:
        while connection.out:
            connection.out = connection.out[connection.socket.send(connection.out) :]

    def _connect(self) -> _Connection:
        """A connection on its way to the next of the host's addresses."""
        while True:
            if not self._addresses or time.monotonic() - self._resolved > RESOLVED:
                found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
                self._addresses, self._resolved = list(dict.fromkeys(found)), time.monotonic()
            self._turns += 1
            address = self._addresses[self._turns % len(self._addresses)]
            family, kind, protocol, _, place = address
            try:
                end = socket.socket(family, kind, protocol)
                end.setblocking(False)
                if (code := end.connect_ex(place)) not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
                    end.close()
                    raise OSError(code, os.strerror(code))
            except OSError:
                self._addresses.remove(address)
                if not self._addresses:
                    raise
                continue
            connection = _Connection(end, address)
            self._selector.register(connection.fd, WRITE, connection)
            self._open.add(connection)
            return connection

    def _advance(self, connection: _Connection) -> None:
        if not connection.ready:
            self._establish(connection)
            self._ask(connection)
            self._listen(connection, READ)
            return
        if connection.out:
            self._write(connection)
            self._listen(connection, READ)
        self._receive(connection)

    def _establish(self, connection: _Connection) -> None:
        if not connection.connected:
            if code := connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(code, os.strerror(code))
            connection.connected = True
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is not None:
                connection.socket = self._context.wrap_socket(
                    connection.socket, server_hostname=self._host, do_handshake_on_connect=False
                )
        if isinstance(connection.socket, ssl.SSLSocket):
            connection.socket.do_handshake()
        connection.ready = True

    # -- answers

    def _receive(self, connection: _Connection) -> None:
        while True:
            if connection.body is None:
                count = connection.socket.recv_into(self._view)
                if connection.get is None:
                    raise OddError("something that was not asked for, or an end")
                if not count:
                    raise StatusError("the connection ended before an answer", 0)
                self._answer(connection, count)
            else:
                body = connection.body
                count = connection.socket.recv_into(memoryview(body)[connection.filled :])
                connection.filled += count
                if not count:
                    raise StatusError(f"the connection ended after {connection.filled} of {len(body)} bytes", 0)
                if connection.filled == len(body):
                    self._finish(connection, bytes(body))
            if connection.get is None or self._context is None:
                return  # of a connection without TLS the selector says when there is more

    def _answer(self, connection: _Connection, count: int) -> None:
        """Take a head, and what came with it of the body, out of the first bytes of the buffer."""
        get = connection.get
        assert get is not None
        view = self._view[:count]
        if connection.head:
            view = memoryview(connection.head + bytes(view))
        head, end, _ = bytes(view[:USUAL_HEAD]).partition(b"\r\n\r\n")
        if not end and len(view) > USUAL_HEAD:
            head, end, _ = bytes(view[:LARGEST_HEAD]).partition(b"\r\n\r\n")
        if not end:
            if len(view) >= LARGEST_HEAD:
                raise OddError("a head without end")
            connection.head = bytes(view)
            return
        connection.head = head
        lines = head.lower() + b"\r\n"
        first, lengths = _STATUS.match(lines), _LENGTH.findall(lines)
        if first is None or len(lengths) != 1 or b"\r\ntransfer-encoding:" in lines:
            raise OddError("an answer of unknown length")
        connection.status, length = int(first[2]), int(lengths[0])
        connection.keep = first[1] == b"1" and b"\r\nconnection: close" not in lines
        if connection.status >= 400:
            if length > LARGEST_HEAD:
                raise OddError("much about an error")
        elif get.size is None:
            if connection.status != 200:
                raise OddError(f"HTTP status {connection.status}")
        else:
            found = _RANGE.search(lines)
            if connection.status != 206 or found is None or int(found[1]) != get.begin:
                raise OddError(f"HTTP status {connection.status} or another range")
            if not length == int(found[2]) - get.begin + 1 <= get.size:
                raise OddError(f"{length} bytes")
        if connection.status < 400 and length > LARGEST:
            if length <= get.most:
                raise OddError(f"{length} bytes")
            connection.keep = False
            return self._finish(connection, OSError(errno.EFBIG, f"{length} bytes, more than {get.most}", get.path))
        began = len(head) + 4
        came = len(view) - began
        if came > length:
            raise OddError("more than was said")
        if came == length:
            return self._finish(connection, bytes(view[began:]))
        connection.body = bytearray(length)
        connection.body[:came] = view[began:]
        connection.filled = came

    def _finish(self, connection: _Connection, found: bytes | Exception) -> None:
        get = connection.get
        assert get is not None
        if connection.status >= 400 and isinstance(found, bytes):
            found = _failure(connection.status, found, get.path)
        del self._busy[get]
        if get in self._wanted:
            self._done[get] = found
        connection.get = connection.body = None
        connection.head, connection.used = b"", True
        if connection.keep:
            self._idle.append(connection)
        else:
            self._close(connection)

    def _end(self, connection: _Connection, error: Exception) -> None:
        """Close a connection that failed, and say so to whom it was for, or ask on another one."""
        self._close(connection)
        get = connection.get
        if get is None:
            self._idle.remove(connection)
            return
        del self._busy[get]
        if isinstance(error, ssl.SSLCertVerificationError):
            self._refused = f"trust in {self._name}: {error.verify_message}"
            log.info("source: %s is read another way, for want of %s", self._name, self._refused)
            error = OddError(self._refused)
        elif not connection.ready and not isinstance(error, OddError):
            if connection.address in self._addresses:
                self._addresses.remove(connection.address)
            if self._addresses and not isinstance(error, TimeoutError):
                return self._todo.appendleft(get)
            if not isinstance(error, TimeoutError):
                error = OddError(f"no connection to {self._name}: {error}")
        elif connection.used and not connection.head and not isinstance(error, TimeoutError | OddError):
            return self._todo.appendleft(get)  # closed by a server that was tired of waiting
        elif not isinstance(error, TimeoutError | StatusError | OddError):
            error = StatusError(f"the connection was lost: {error}", 0)
        if get in self._wanted:
            self._done[get] = error

    def _close(self, connection: _Connection) -> None:
        self._selector.unregister(connection.fd)
        self._open.discard(connection)
        connection.socket.close()


class _Connection:
    """One connection, and what is asked on it."""

    def __init__(self, end: socket.socket, address: Any) -> None:
        self.socket, self.fd, self.address = end, end.fileno(), address
        self.connected = self.ready = False  # TCP; TLS too
        self.listens = WRITE
        self.used = False  # for an earlier request
        self.get: Get | None = None  # None: idle
        self.deadline = 0.0
        self.out = b""
        self.head = b""  # of the answer, as far as it is here
        self.status, self.keep = 0, True
        self.body: bytearray | None = None
        self.filled = 0


def host_of(endpoint: str) -> str:
    """Host and port as a request's head names them."""
    parts = urlsplit(endpoint)
    return parts.netloc.removesuffix(f":{PORTS.get(parts.scheme)}")


def _failure(status: int, body: bytes, path: str) -> Exception:
    if status in (404, 410):
        return FileNotFoundError(errno.ENOENT, "no such object", path)
    words = re.findall(rb"<(?:Code|Message)>([^<]*)<", body)
    said = f"HTTP status {status} " + b": ".join(words).decode(errors="replace")
    said = " ".join(said.split())[:300]
    return PermissionError(errno.EACCES, said, path) if status in (401, 403) else StatusError(said, status)
