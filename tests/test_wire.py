"""Our own connections: what they take, what they leave to a whole HTTP client, and TLS; against real sockets."""

import os
import re
import socket
import ssl
import subprocess
import sys
import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from servers import bucket_of, options, proxied, s3

from gpuaug.source import objects
from gpuaug.source.wire import Get, OddError, StatusError, Wire

BODY = bytes(range(256)) * 300


@contextmanager
def server(answer, context=None):
    """Port of a server that gives each request to ``answer(head, send, number of its connection)`` until that is false.

    Also a list of heads.
    """
    heads, stop, count = [], threading.Event(), iter(range(1 << 30))
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)

    def serve(end, number):
        with end:
            try:
                if context is not None:
                    end = context.wrap_socket(end, server_side=True)
                data = b""
                while not stop.is_set():
                    while b"\r\n\r\n" not in data:
                        more = end.recv(65536)
                        if not more:
                            return
                        data += more
                    head, _, data = data.partition(b"\r\n\r\n")
                    heads.append(head.decode())
                    if not answer(head.decode(), end.sendall, number):
                        return
            except OSError:
                return
            finally:
                end.close()

    def accept():
        while True:
            try:
                end, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(end, next(count)), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1], heads
    finally:
        stop.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def plain(head, send, number=0, body=BODY):
    found = re.search(r"Range: bytes=(\d+)-(\d+)", head)
    if found is None:
        send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        return True
    part = body[int(found[1]) : int(found[2]) + 1]
    at = f"{found[1]}-{int(found[1]) + len(part) - 1}/{len(body)}"
    send(f"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {at}\r\nContent-Length: {len(part)}\r\n\r\n".encode())
    send(part)
    return True


def wire(port, scheme="http", connections=4, host="127.0.0.1", **more):
    return Wire(f"{scheme}://{host}:{port}", headers=lambda path: "", connections=connections, **more)


def get(path="/x", begin=0, size=None, most=1 << 30, seconds=30.0):
    return Get(path, begin, size, most, seconds)


def test_ranges_and_whole_files_over_kept_connections():
    with server(plain) as (port, heads):
        client = wire(port)
        asked = [get(f"/{i}", i, 1000 + i) for i in range(20)] + [get("/all"), get("/end", 76_000, 5000)]
        for _ in range(2):
            found = client.read([*asked, asked[0]])  # the same twice is asked for once
            assert found == [*(BODY[i : 1000 + 2 * i] for i in range(20)), BODY, BODY[76_000:], BODY[:1000]]
        assert len(heads) == 2 * len(asked)
        client.close()


def test_heads_and_bodies_may_come_in_any_pieces():
    def slowly(head, send, number):
        whole = b""

        def keep(data):
            nonlocal whole
            whole += data

        plain(head, keep)
        for i in (*range(0, 120, 7), 120, 5000):
            send(whole[i : min([x for x in (*range(0, 121, 7), 120, 5000, len(whole)) if x > i])])
        return True

    with server(slowly) as (port, _):
        assert wire(port).read([get(), get("/y", 10, 20_000)]) == [BODY, BODY[10:20_010]]


def test_what_is_expected_is_asked_for_meanwhile_and_once():
    late = threading.Event()

    def answer(head, send, number):
        if "GET /b " in head:
            late.set()
        return late.wait(30) and plain(head, send)

    with server(answer) as (port, heads):
        client = wire(port)
        assert client.read([get("/a")], [get("/b"), get("/never")]) == [BODY]
        assert client.read([get("/b")], [get("/c")]) == [BODY]
        assert client.read([get("/c")]) == [BODY]
        asked = [head.split()[1] for head in heads]
        assert sorted(asked) == sorted(set(asked))


def test_a_server_that_closes_idle_connections_costs_no_try():
    def once(head, send, number):
        plain(head, send)
        return False

    with server(once) as (port, heads):
        client = wire(port)
        for i in range(20):
            assert client.read([get(f"/{i}"), get(f"/{i}", 0, 10)]) == [BODY, BODY[:10]]
        assert len(heads) >= 40


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 301 Moved Permanently\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nuntil the end",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 206 Partial Content\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/2 200\r\nContent-Length: 3\r\n\r\nabc",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"\0" * 70_000,
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000 + b"\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 20000000\r\n\r\n",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 20000000\r\n\r\n",
    ],
)
def test_what_is_not_plain_is_left_to_others(said):
    def answer(head, send, number):
        if "GET /odd " in head:
            send(said)
            return True
        return plain(head, send)

    with server(answer) as (port, _):
        client = wire(port)
        odd, good = client.read([get("/odd"), get("/good")])
        assert isinstance(odd, OddError)
        assert good == BODY
        assert client.read([get("/good")]) == [BODY]


@pytest.mark.parametrize("at", ["bytes 1-3/9", "bytes 0-1/9", "bytes 0-4/9", "bytes */9", "3-5"])
def test_another_range_than_the_one_asked_for_is_odd(at):
    def answer(head, send, number):
        send(f"HTTP/1.1 206 Partial Content\r\nContent-Range: {at}\r\nContent-Length: 3\r\n\r\nabc".encode())
        return True

    with server(answer) as (port, _):
        (found,) = wire(port).read([get(size=4)])
        assert isinstance(found, OddError)


def test_errors_are_what_they_say():
    says = {
        "/404": (b"404 Not Found", FileNotFoundError, ""),
        "/403": (b"403 Forbidden", PermissionError, "AccessDenied: not yours"),
        "/503": (b"503 Slow Down", StatusError, "HTTP status 503"),
        "/cut": (b"", StatusError, "after 3 of 10 bytes"),
        "/hang": (b"", TimeoutError, ""),
        "/much": (b"", OSError, "more than 5"),
    }
    stop = threading.Event()

    def answer(head, send, number):
        path = head.split()[1]
        if path == "/hang":
            stop.wait(30)
        elif path in ("/cut", "/much"):
            send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\nabc" % (10 if path == "/cut" else 1 << 25))
        elif path in says:
            body = b"<Error><Code>AccessDenied</Code><Message>not\n yours</Message></Error>"
            send(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (says[path][0], len(body)) + body)
            return True
        else:
            return plain(head, send)
        return False

    with server(answer) as (port, _):
        client = wire(port, connections=8)
        asked = [get(path, most=5 if path == "/much" else 1 << 30, seconds=3.0) for path in says]
        found = client.read([*asked, get("/good")])
        stop.set()
        for (path, (_, kind, text)), error in zip(says.items(), found, strict=False):
            assert isinstance(error, kind), path
            assert text in str(error), path
        assert found[-1] == BODY
        assert client.read([get("/good")]) == [BODY]


def test_without_a_server_there_is_no_connection():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    client = wire(port)
    found = client.read([get(f"/{i}") for i in range(10)])
    assert all(isinstance(item, OddError) for item in found)
    (found,) = wire(1, host="no-such-host.invalid").read([get()])
    assert isinstance(found, OddError)


def test_an_interrupt_leaves_nothing_half_done():
    with server(plain) as (port, _):
        client = wire(port)
        turn, calls = client._turn, []

        def interrupted(seconds):
            calls.append(seconds)
            if len(calls) == 2:
                raise KeyboardInterrupt
            turn(seconds)

        client._turn = interrupted
        with pytest.raises(KeyboardInterrupt):
            client.read([get(f"/{i}") for i in range(9)])
        assert client.read([get("/a"), get("/b")]) == [BODY, BODY]


def test_threads_take_turns():
    came, go = threading.Event(), threading.Event()

    def answer(head, send, number):
        came.set()
        return go.wait(30) and plain(head, send)

    with server(answer) as (port, _):
        client, first = wire(port), []
        thread = threading.Thread(target=lambda: first.extend(client.read([get("/a")])))
        thread.start()
        assert came.wait(30)
        (second,) = client.read([get("/b")])
        go.set()
        thread.join()
        assert isinstance(second, OddError)
        assert first == [BODY]


def test_a_proxy_is_for_others(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with pytest.raises(OddError, match="proxy"):
        Wire("http://store.example.org", headers=lambda path: "", connections=1)
    monkeypatch.setenv("no_proxy", "store.example.org")
    Wire("http://store.example.org", headers=lambda path: "", connections=1)


# -- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A file with a key and a certificate for 127.0.0.1 and localhost, signed by itself."""
    from ipaddress import ip_address

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.now(UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1")), x509.DNSName("localhost")])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(names, critical=True)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return str(path)


def tls_of(certificate):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    return context


def test_tls(certificate):
    with server(plain, tls_of(certificate)) as (port, heads):
        client = wire(port, "https", context=ssl.create_default_context(cafile=certificate))
        for _ in range(2):
            found = client.read([get(), *(get(f"/{i}", i, 40_000) for i in range(12))], [get("/next")])
            assert found == [BODY, *(BODY[i : i + 40_000] for i in range(12))]
        assert client.read([get("/next")]) == [BODY]
        assert len({head.split()[1] for head in heads}) == 14


def test_a_server_that_cannot_be_trusted_gets_no_request(certificate):
    with server(plain, tls_of(certificate)) as (port, heads):
        client = wire(port, "https")
        found = client.read([get(f"/{i}") for i in range(9)])
        assert all(isinstance(item, OddError) for item in found)
        assert "trust" in str(found[-1])
        assert not heads
        found = client.read([get()])
        assert isinstance(found[0], OddError)
        (found,) = wire(port, "http").read([get()])  # it says something else than HTTP
        assert isinstance(found, OddError | StatusError)


# -- signatures


def test_signatures_are_those_of_botocore():
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    for token, more in ((None, {}), ("a/token+=", {"x-amz-request-payer": "requester"})):
        login = {"access_key_id": "AKID", "secret_access_key": "secret/+", "token": token, "expires_at": None}
        sign = objects._Signed("store.example.org:9000", "eu-west-3", lambda login=login: login, more)
        path = objects.Objects(None, 1.0, wire=object(), root="/bucket/").get(
            "a b/ä%20~(1)*'!+.jpg", 0, None, most=1, seconds=1.0
        )
        lines = dict(line.split(": ", 1) for line in sign(path.path).split("\r\n") if line)
        request = AWSRequest("GET", f"http://store.example.org:9000{path.path}", headers={**more})
        request.context["timestamp"] = lines["x-amz-date"]
        request.context["payload_signing_enabled"] = True
        signer = S3SigV4Auth(Credentials("AKID", "secret/+", token), "s3", "eu-west-3")
        signer._modify_request_before_signing(request)
        del request.headers["X-Amz-Content-SHA256"]
        request.headers["X-Amz-Content-SHA256"] = lines["x-amz-content-sha256"]
        whole = signer.string_to_sign(request, signer.canonical_request(request))
        assert lines["Authorization"].rpartition("=")[2] == signer.signature(whole, request)
        assert lines.get("x-amz-security-token") == token


def test_keys_that_a_url_would_change_are_left_to_others():
    made = partial(objects.Objects(None, 1.0, wire=object(), root="/b/").get, begin=0, size=3, most=9, seconds=1.0)
    for key in ("", "/a", "a//b", "a/../b", "./a", "a/.", "..", "\udcff"):
        assert made(key) is None, key
    assert made("a/b c?#%.jpg").path == "/b/a/b%20c%3F%23%25.jpg"
    assert objects.Objects(None, 1.0).get("a", 0, 3, most=9, seconds=1.0) is None


# -- beside obstore, in a process that may use it


def test_what_is_odd_is_read_by_obstore(tmp_path, certificate):
    """An answer of another kind ends in the same bytes; and TLS to a bucket works."""
    (tmp_path / "train" / "a").mkdir(parents=True)
    for i in range(6):
        (tmp_path / "train" / "a" / f"{i}.jpg").write_bytes(os.urandom(30_000 + i))
    code = f"""
import multiprocessing, sys
multiprocessing.current_process()._config["daemon"] = True  # as a worker is
sys.path.insert(0, {os.path.dirname(__file__)!r})
from servers import options
from gpuaug.source import FolderSource, Remote
source = FolderSource(sys.argv[1], remote=Remote(options=dict(options(sys.argv[2]), **eval(sys.argv[3]))))
found = source.read_many(range(6))
want = [x[0] for x in FolderSource({str(tmp_path / "train")!r})]
assert [x[0] for x in found] == want, found
"""

    def run(url, place, more):
        done = subprocess.run(
            [sys.executable, "-c", code, place, url, repr(more)], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr

    with s3() as port:
        place = bucket_of(port, tmp_path / "train", "odd")
        with proxied(port) as (proxy, url):
            run(url, place, {})
            assert set(proxy.agents) >= {"gpuaug"}
            assert "object_store" not in proxy.agents

        def forward(head, send, number):
            first, *lines = head.split("\r\n")
            with socket.create_connection(("127.0.0.1", port)) as end:
                kept = [line for line in lines if not line.lower().startswith("connection")]
                end.sendall("\r\n".join([first, *kept, "Connection: close", "", ""]).encode())
                while data := end.recv(1 << 16):
                    send(data)
            return False

        def chunked(head, send, number):
            if "User-Agent: gpuaug" not in head:
                return forward(head, send, number)
            send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
            return True

        with server(chunked) as (other, heads):
            run(f"http://127.0.0.1:{other}", place, {})
            assert sum("user-agent: object_store" in head.lower() for head in heads) == 6
        with server(forward, tls_of(certificate)) as (tls, heads):
            more = {"client_kwargs": {**options("")["client_kwargs"], "verify": certificate}}
            run(f"https://127.0.0.1:{tls}", place, more)
            assert sum("User-Agent: gpuaug" in head for head in heads) == 6
