"""GETs by libcurl: kept connections, what is expected, odd answers, TLS, signatures; against real sockets."""

import re
import socket
import ssl
import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from urllib.parse import quote

import pycurl
import pytest

from gpuaug.errors import ReadError
from gpuaug.source.remote import objects
from gpuaug.source.remote.curl import Curl
from gpuaug.source.remote.filesystem import Range, StatusError
from gpuaug.source.remote.objects import Access

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
    found = re.search(r"Range: bytes=(\d+)-(\d*)", head)
    if found is None:
        send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        return True
    part = body[int(found[1]) : int(found[2] or len(body)) + 1]
    at = f"{found[1]}-{int(found[1]) + len(part) - 1}/{len(body)}"
    send(f"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {at}\r\nContent-Length: {len(part)}\r\n\r\n".encode())
    send(part)
    return True


def asking(connections=4, timeout=30.0, **more):
    return Curl(Access(lambda url: url, **more), connections=connections, timeout=timeout)


def get(port, path="/x", begin=0, size=None, most=0, scheme="http", host="127.0.0.1"):
    return Range(f"{scheme}://{host}:{port}{path}", begin, size, most=most)


def test_ranges_and_whole_files_over_kept_connections():
    connected = set()

    def answer(head, send, number):
        connected.add(number)
        return plain(head, send)

    with server(answer) as (port, heads):
        curl = asking()
        asked = [get(port, f"/{i}", i, 1000 + i) for i in range(20)]
        asked += [get(port, "/all"), get(port, "/rest", 70_000, 6800), get(port, "/end", 76_000, 5000)]
        for _ in range(2):
            *found, short, again = curl.read([*asked, asked[0]])  # the same twice is asked for once
            assert found == [*(BODY[i : 1000 + 2 * i] for i in range(20)), BODY, BODY[70_000:]]
            assert "800 bytes instead of 5000 at position 76000" in str(short)
            assert again == BODY[:1000]
        assert len(heads) == 2 * len(asked)
        assert len(connected) <= 4
        curl.close()


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
        assert asking().read([get(port), get(port, "/y", 10, 20_000)]) == [BODY, BODY[10:20_010]]


def test_what_is_expected_is_asked_for_meanwhile_and_once():
    late = threading.Event()

    def answer(head, send, number):
        if "GET /b " in head:
            late.set()
        return late.wait(30) and plain(head, send)

    with server(answer) as (port, heads):
        curl = asking()
        a, b, c, never = (get(port, path) for path in ("/a", "/b", "/c", "/never"))
        assert curl.read([a], [b, never]) == [BODY]
        assert curl.read([b], [c]) == [BODY]
        assert curl.read([c]) == [BODY]
        asked = [head.split()[1] for head in heads]
        assert sorted(asked) == sorted(set(asked))


def test_nobody_listening_is_no_reason_to_give_up():
    """Between two reads a training step may take longer than a try."""
    with server(plain) as (port, heads):
        curl = asking(timeout=2.0)
        soon = get(port, "/soon")
        assert curl.read([get(port)], [soon]) == [BODY]
        threading.Event().wait(2.5)
        assert curl.read([soon]) == [BODY]
        assert len(heads) == 2


def test_what_nobody_wants_any_more_holds_no_connection_for_ever():
    stop = threading.Event()

    def answer(head, send, number):
        if "GET /hang" in head:
            stop.wait(60)
            return False
        return threading.Event().wait(0.4) or plain(head, send)

    with server(answer) as (port, _):
        curl = asking(connections=3)
        assert curl.read([get(port)], [get(port, f"/hang{i}") for i in range(2)]) == [BODY]
        for i in range(5):
            assert curl.read([get(port, f"/{i}")]) == [BODY]
        assert not curl._busy
        stop.set()


def test_an_answer_that_is_not_the_file_itself_is_refused_where_files_are_read():
    def answer(head, send, number):
        send(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc")
        return True

    with server(answer) as (port, _):
        assert asking().read([get(port)]) == [b"abc"]  # of S3 it is what was stored
        (found,) = asking(encoded=False).read([get(port)])
        assert isinstance(found, ReadError)
        assert "gzip" in str(found)


def test_a_login_that_failed_is_not_asked_for_by_every_request():
    asked = []

    def ask():
        asked.append(1)
        raise TimeoutError("no answer of the role's server")

    with server(plain) as (port, heads):
        found = asking(login=ask).read([get(port, f"/{i}") for i in range(50)])
    assert all("no credentials: TimeoutError" in str(item) for item in found)
    assert all("no answer of the role's server" in str(item) for item in found)
    assert all(isinstance(item, ReadError) for item in found)  # which is not tried again
    assert asked == [1]
    assert not heads


def test_a_login_without_lines_has_none_of_the_one_before():
    given = iter([{"HTTPHEADER": ["X-As: one"], "USERNAME": "user", "PASSWORD": "word"}, {"HTTPHEADER": []}])
    with server(plain) as (port, heads):
        curl = asking(login=lambda: next(given), connections=1)
        assert curl.read([get(port, "/a")]) + curl.read([get(port, "/b")]) == [BODY, BODY]
    assert "X-As: one" in heads[0]
    assert "Authorization: Basic" in heads[0]
    assert "X-As" not in heads[1]
    assert "Authorization" not in heads[1]


@pytest.mark.parametrize("lacks", ["version", "signature"])
def test_an_old_libcurl_is_not_used(lacks, monkeypatch):
    if lacks == "version":
        monkeypatch.setattr(pycurl, "version_info", lambda: (9, "7.88.1", 0x075801))
    else:
        monkeypatch.delattr(pycurl, "AWS_SIGV4")
    assert objects.open_access(object(), "s3://bucket") is None


def test_no_url():
    with server(plain) as (port, _):
        odd, good = asking().read([get(port, "/ä"), get(port, "/a")])
        assert isinstance(odd, OSError)
        assert good == BODY


def test_a_server_that_closes_idle_connections_costs_no_try():
    def once(head, send, number):
        plain(head, send)
        return False

    with server(once) as (port, heads):
        curl = asking()
        for i in range(20):
            assert curl.read([get(port, f"/{i}"), get(port, f"/{i}", 0, 10)]) == [BODY, BODY[:10]]
        assert len(heads) >= 40


@pytest.mark.parametrize(
    ("said", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", b"abc"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
        (b"HTTP/1.1 301 Moved Permanently\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", None),
        (b"SSH-2.0-OpenSSH\r\n\r\n", None),
        (b"\0" * 70_000, None),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200_000, None),
    ],
)
def test_odd_answers_are_errors_of_their_own(said, body):
    def answer(head, send, number):
        if "GET /odd " in head:
            send(said)
            return False
        return plain(head, send)

    with server(answer) as (port, _):
        curl = asking()
        odd, good = curl.read([get(port, "/odd"), get(port, "/good")])
        assert odd == body if body is not None else isinstance(odd, StatusError)
        assert good == BODY
        assert curl.read([get(port, "/good")]) == [BODY]


@pytest.mark.parametrize("at", ["bytes 1-3/9", "bytes */9", "3-5"])
def test_another_range_than_the_one_asked_for_is_an_error(at):
    def answer(head, send, number):
        send(f"HTTP/1.1 206 Partial Content\r\nContent-Range: {at}\r\nContent-Length: 3\r\n\r\nabc".encode())
        return True

    with server(answer) as (port, _):
        (found,) = asking().read([get(port, size=4)])
        assert isinstance(found, StatusError)


def test_errors_are_what_they_say():
    says = {
        "/404": (b"404 Not Found", FileNotFoundError, ""),
        "/403": (b"403 Forbidden", PermissionError, "AccessDenied: not yours"),
        "/503": (b"503 Slow Down", StatusError, "HTTP status 503"),
        "/cut": (b"", StatusError, "(18)"),
        "/hang": (b"", TimeoutError, ""),
        "/much": (b"", OSError, "more than 5"),
        "/flood": (b"", OSError, "more than 5"),
        "/whole": (b"", ReadError, "no range requests"),
    }
    stop = threading.Event()

    def answer(head, send, number):
        path = head.split()[1]
        if path == "/hang":
            stop.wait(30)
        elif path in ("/cut", "/much", "/whole"):
            send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\nabc" % (10 if path == "/cut" else 1 << 25))
        elif path == "/flood":
            send(b"HTTP/1.1 200 OK\r\n\r\n")
            for _ in range(1000):
                send(b"x" * 65536)
        elif path in says:
            body = b"<Error><Code>AccessDenied</Code><Message>not\n yours</Message></Error>"
            send(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (says[path][0], len(body)) + body)
            return True
        else:
            return plain(head, send)
        return False

    with server(answer) as (port, _):
        curl = asking(connections=9, timeout=3.0)
        ranges = {"/much": {"most": 5}, "/flood": {"most": 5}, "/whole": {"begin": 1, "size": 9}}
        asked = [get(port, path, **ranges.get(path, {})) for path in says]
        found = curl.read([*asked, get(port, "/good")])
        stop.set()
        for (path, (_, kind, text)), error in zip(says.items(), found, strict=False):
            assert isinstance(error, kind), (path, error)
            assert text in str(error), path
        assert found[-1] == BODY
        assert curl.read([get(port, "/good")]) == [BODY]


def test_without_a_server_there_is_no_connection():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found = asking().read([get(port, f"/{i}") for i in range(10)])
    assert all(isinstance(item, StatusError) and item.status == 0 for item in found)
    (found,) = asking().read([get(1, host="no-such-host.invalid")])
    assert "no-such-host.invalid" in str(found)
    (found,) = asking().read([Range("file:///etc/hostname")])
    assert isinstance(found, StatusError)


def test_an_interrupt_leaves_nothing_half_done():
    with server(plain) as (port, _):
        curl = asking()
        advance, calls = curl._advance, []

        def interrupted():
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return advance()

        curl._advance = interrupted
        with pytest.raises(KeyboardInterrupt):
            curl.read([get(port, f"/{i}") for i in range(9)])
        assert curl.read([get(port, "/a"), get(port, "/b")]) == [BODY, BODY]


def test_threads_take_turns():
    came, go = threading.Event(), threading.Event()

    def answer(head, send, number):
        came.set()
        return go.wait(30) and plain(head, send)

    with server(answer) as (port, _):
        curl, found = asking(), {}
        threads = [
            threading.Thread(target=lambda k=k: found.update({k: curl.read([get(port, f"/{k}")])})) for k in range(4)
        ]
        for thread in threads:
            thread.start()
        assert came.wait(30)
        go.set()
        for thread in threads:
            thread.join()
        assert found == {k: [BODY] for k in range(4)}


def test_a_proxy_of_the_environment_is_asked(monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with server(plain) as (port, heads):
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        assert asking().read([Range("http://store.example.org/a")]) == [BODY]
        assert heads[0].startswith("GET http://store.example.org/a ")


def test_a_login_is_asked_for_by_each_read_and_its_failure_is_an_error():
    given = iter([{"HTTPHEADER": ["X-As: one"]}, {"HTTPHEADER": ["X-As: two"]}, ValueError("no role")])

    def login():
        found = next(given)
        if isinstance(found, Exception):
            raise found
        return found

    with server(plain) as (port, heads):
        curl = asking(login=login, connections=1)
        assert curl.read([get(port, "/a")]) + curl.read([get(port, "/b")]) == [BODY, BODY]
        (found,) = curl.read([get(port, "/c")])
        assert "no credentials: ValueError('no role')" in str(found)
        assert ["X-As: one" in heads[0], "X-As: two" in heads[1], len(heads)] == [True, True, 2]


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
        curl = asking(options={"CAINFO": certificate})
        more = {"scheme": "https"}
        soon = get(port, "/next", **more)
        for _ in range(2):
            found = curl.read([get(port, **more), *(get(port, f"/{i}", i, 40_000, **more) for i in range(12))], [soon])
            assert found == [BODY, *(BODY[i : i + 40_000] for i in range(12))]
        assert curl.read([soon]) == [BODY]
        assert len({head.split()[1] for head in heads}) == 14


def test_a_server_that_cannot_be_trusted_gets_no_request(certificate):
    with server(plain, tls_of(certificate)) as (port, heads):
        found = asking().read([get(port, f"/{i}", scheme="https") for i in range(9)])
        assert all(isinstance(item, StatusError) for item in found)
        assert "certificate" in str(found[-1])
        assert not heads
        (found,) = asking().read([get(port)])  # it says something else than HTTP
        assert isinstance(found, StatusError)


# -- signatures


@pytest.mark.parametrize("key", ["plain.jpg", "a b/ä%20~(1)*'!+.jpg", "a+b=c&d@e:f,g;h$i#j?k.jpg", "..x/%2e%2e%2fx"])
@pytest.mark.parametrize(("token", "payer"), [(None, False), ("a/token+=", True)])
def test_signatures_are_those_of_botocore(key, token, payer):
    """libcurl's signature of S3 requests; the servers of the other tests do not check them."""
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    lines = [f"x-amz-security-token: {token}"] if token else []
    lines += ["x-amz-request-payer: requester"] if payer else []
    with server(plain) as (port, heads):
        login = {"HTTPHEADER": lines, "USERNAME": "AKID", "PASSWORD": "secret/+:x"}
        curl = asking(login=lambda: login, options={"AWS_SIGV4": "aws:amz:eu-west-3:s3"})
        path = "/bucket/" + quote(key, safe="/~")
        assert curl.read([get(port, path)]) == [BODY]
        assert curl.read([get(port, path, 5, 7)]) == [BODY[5:12]]
    for head in heads:
        first, *rest = head.split("\r\n")
        sent = {name.lower(): value for name, value in (line.split(": ", 1) for line in rest)}
        assert first == f"GET {path} HTTP/1.1"
        signed = re.search(r"SignedHeaders=([^,]+)", sent["authorization"])[1].split(";")
        assert {"host", "x-amz-date", "x-amz-content-sha256", *(line.split(":")[0] for line in lines)} <= set(signed)
        request = AWSRequest("GET", f"http://127.0.0.1:{port}{path}", headers={k: sent[k] for k in signed})
        request.context["timestamp"] = sent["x-amz-date"]
        signer = S3SigV4Auth(Credentials("AKID", "secret/+:x"), "s3", "eu-west-3")
        headers = "".join(f"{name}:{sent[name]}\n" for name in signed)
        canonical = "\n".join(["GET", path, "", headers, ";".join(signed), sent["x-amz-content-sha256"]])
        assert canonical == signer.canonical_request(request)
        whole = signer.string_to_sign(request, canonical)
        assert sent["authorization"].rpartition("=")[2] == signer.signature(whole, request)
