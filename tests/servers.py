"""Real servers on the loopback for tests: S3 (moto), HTTP; a proxy that delays, fails and cuts."""

import atexit
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from functools import partial
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import Request, urlopen

from gpuaug.source import Remote


class Proxy:
    """Forwards to a server on the loopback, after ``latency`` seconds to the first byte.

    ``trouble(path, count)`` says what happens to a request, the count-th one for its path and range from 0: None, an
    HTTP status, ``"cut"`` (the body ends in its middle), ``"hang"`` (no answer for 30 seconds). ``cut`` is a part of a
    path and a first byte: answers for ranges that begin there are cut. ``headers`` are added to answers. The first GETs
    after ``together`` was set wait for one another, until so many are there at the same time, or for 30 seconds.
    """

    def __init__(self, port, latency=0.0, trouble=None, headers=()):
        self.upstream, self.latency, self.trouble = port, latency, trouble or (lambda path, count: None)
        self.lock = threading.Condition()
        self.headers, self.cut = dict(headers), None
        self.stop = threading.Event()
        self.reset()

    def reset(self):
        self.now = self.most = self.together = 0
        self.asked = []  # (method, path, range)
        self.agents = Counter()  # of GETs
        self.logins = Counter()  # of GETs: what they are signed with, "" without a signature
        self.counts = Counter()

    @property
    def gets(self):
        return [item for item in self.asked if item[0] == "GET"]

    def answer(self, handler):
        key = (handler.command, handler.path, handler.headers.get("Range"))
        with self.lock:
            self.asked.append(key)
            if handler.command == "GET":
                self.agents[(handler.headers.get("User-Agent") or "").partition("/")[0]] += 1
                login = handler.headers.get("Authorization") or ""
                self.logins[(re.findall(r"Credential=([^/]*)", login) or [login])[0]] += 1
            self.now += 1
            self.most = max(self.most, self.now)
            count = self.counts[key]
            self.counts[key] += 1
            self.lock.notify_all()
            if handler.command == "GET" and self.together:
                self.lock.wait_for(lambda: self.most >= self.together, 30)
                self.together = 0
                self.lock.notify_all()
        try:
            what = self.trouble(handler.path, count)
            if self.cut and self.cut[0] in handler.path and (key[2] or "").startswith(f"bytes={self.cut[1]}-"):
                what = "cut"
            time.sleep(self.latency)
            if what == "hang":
                self.stop.wait(30)
                handler.close_connection = True
                return
            if isinstance(what, int):
                handler.send_response(what)
                handler.send_header("Content-Length", "0")
                handler.end_headers()
                return
            body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
            connection = HTTPConnection("127.0.0.1", self.upstream, timeout=300)
            connection.request(handler.command, handler.path, body=body, headers=dict(handler.headers))
            response = connection.getresponse()
            data = response.read()
            connection.close()
        finally:
            with self.lock:
                self.now -= 1
        handler.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                handler.send_header(name, value)
        for name, value in self.headers.items():
            handler.send_header(name, value)
        length = response.getheader("Content-Length") if handler.command == "HEAD" else str(len(data))
        handler.send_header("Content-Length", length or "0")
        handler.end_headers()
        if what == "cut":
            handler.wfile.write(data[: len(data) // 2])
            handler.close_connection = True
        elif handler.command != "HEAD":
            handler.wfile.write(data)


class _Forward(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, proxy, *args):
        self.proxy = proxy
        super().__init__(*args)

    def do_GET(self):
        self.proxy.answer(self)

    do_HEAD = do_PUT = do_GET  # noqa: N815

    def log_message(self, *args):
        pass


class _Ranges(SimpleHTTPRequestHandler):
    """Files and listings of a folder, with ranges of one part."""

    def do_GET(self):
        path = self.translate_path(self.path)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked is None or not os.path.isfile(path):
            super().do_GET()
            return
        size = os.path.getsize(path)
        begin, end = int(asked[1]), min(size, int(asked[2] or size - 1) + 1)
        if begin >= size:
            self.send_error(416)
            return
        data = Path(path).read_bytes()[begin:end]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def get_request(self):
        connection, address = super().get_request()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else a body waits 40 ms behind its header
        return connection, address

    def handle_error(self, *args):  # clients that go away
        pass


@contextmanager
def serving(handler):
    """Port of a server in a thread."""
    server = _Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def proxied(port, **more):
    """(proxy, URL) in front of a server."""
    proxy = Proxy(port, **more)
    with serving(partial(_Forward, proxy)) as own:
        try:
            yield proxy, f"http://127.0.0.1:{own}"
        finally:
            proxy.stop.set()


@contextmanager
def files(folder, ranges=True):
    """Port of a server of the folder's files."""

    class Plain(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    with serving(partial(_Ranges if ranges else Plain, directory=str(folder))) as port:
        yield port


# A server sends the body of an answer without waiting 40 ms for a word about its header, and many connections at the
# same time do not wait a second.
AT_ONCE = "import socketserver as s; s.StreamRequestHandler.disable_nagle_algorithm = True"
AT_ONCE += "; s.TCPServer.request_queue_size = 256"
_RUNNING = ExitStack()  # programs that end with this process
_IDLE = []  # ports of servers for S3 that run and that nobody uses
atexit.register(_RUNNING.close)


def new_s3():
    """Port of a new server of moto without any bucket, in a process of its own."""
    return _program(f"{AT_ONCE}; from moto.server import main; main(['-H', '127.0.0.1', '-p', '{{}}'])".format)


@contextmanager
def s3():
    """As :func:`new_s3`, but the server is kept for the next who asks."""
    port = _IDLE.pop() if _IDLE else _RUNNING.enter_context(new_s3())
    yield port
    urlopen(Request(f"http://127.0.0.1:{port}/moto-api/reset", method="POST"), timeout=300).close()
    _IDLE.append(port)


@contextmanager
def _program(code):
    for attempt in range(5):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-c", code(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        if _listens(process, port):
            break
        process.kill()
        process.wait()
        assert attempt < 4, "the server does not start"  # somebody else may have taken the port meanwhile
    try:
        yield port
    finally:
        process.kill()
        process.wait()


def _listens(process, port, patience=300.0):
    """Whether the server answers in time; False if it ended."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return True
        except OSError:
            time.sleep(0.05)
    return False


def client_of(port):
    """boto3's client of a server for S3."""
    import boto3

    return boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1",
                        aws_access_key_id="x", aws_secret_access_key="x")  # fmt: skip


def bucket_of(port, folder, bucket, prefix="train", **more):
    """Put all files of a folder into a new bucket; the URL. ``more`` goes to boto3's put_object."""
    client = client_of(port)
    client.create_bucket(Bucket=bucket)
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file():
            client.put_object(Bucket=bucket, Key=f"{prefix}/{path.relative_to(folder)}", Body=path.read_bytes(), **more)
    return f"s3://{bucket}/{prefix}"


def options(url):
    """Settings of this endpoint."""
    return {"endpoint_url": url, "key": "x", "secret": "x", "region_name": "us-east-1"}


@contextmanager
def remote_copy(kind, folder, bucket, **settings):
    """(proxy, root, Remote) of the folder behind a proxy: of a new bucket for ``s3``, of plain files for ``http``."""
    with s3() if kind == "s3" else files(folder) as port, proxied(port) as (proxy, url):
        root = bucket_of(port, folder, bucket) if kind == "s3" else url
        yield proxy, root, Remote(options=options(url) if kind == "s3" else None, **settings)
