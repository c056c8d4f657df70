"""Requests to object stores (obstore) and web servers (aiohttp) whose answers are odd; against real sockets."""

import re
import socket
import ssl
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from urllib.parse import unquote

import pytest
from common import METHODS

from gpuaug.errors import ConfigError, ReadError, SourceError
from gpuaug.source.remote.storage import Range, Remote, Storage

BODY = bytes(range(256)) * 300
DATED = b'Last-Modified: Mon, 01 Jun 2026 00:00:00 GMT\r\nETag: "x"\r\n'  # obstore needs them for gs and az
KINDS = ["s3", "http"]
LOGINS = {"s3": {"key": "x", "secret": "hidden", "token": "tok"}, "gs": {"bearer_token": "hidden"}}
LOGINS["az"] = {"account_name": "account", "bearer_token": "hidden"}


@contextmanager
def server(answer, context=None, host="127.0.0.1"):
    """Port of a server that gives each request to ``answer(head, send)`` until that is false; also a list of heads."""
    heads, stop = [], threading.Event()
    listener = socket.create_server((host, 0), backlog=128)

    def serve(end):
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
                    if not answer(head.decode(), end.sendall):
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
            threading.Thread(target=serve, args=(end,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1], heads
    finally:
        stop.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def plain(head, send, body=BODY):
    found = re.search(r"range: bytes=(\d+)-(\d*)", head, re.IGNORECASE)
    if found is None:
        send(b"HTTP/1.1 200 OK\r\n%sContent-Length: %d\r\n\r\n" % (DATED, len(body)) + body)
        return True
    part = body[int(found[1]) : int(found[2] or len(body)) + 1]
    at = f"{found[1]}-{int(found[1]) + len(part) - 1}/{len(body)}"
    send(b"HTTP/1.1 206 Partial Content\r\n" + DATED)
    send(f"Content-Range: bytes {at}\r\nContent-Length: {len(part)}\r\n\r\n".encode() + part)
    return True


def asking(kind, port, scheme="http", options=None, host="127.0.0.1", **settings):
    """A storage, and the URL of what it reads."""
    server = f"{scheme}://{host}:{port}" if port else f"{scheme}://{host}"
    if kind == "http":
        return Storage(Remote(**{"tries": 1, "options": options, **settings})), server
    more = {"endpoint_url": server, **LOGINS[kind], **(options or {})}
    return Storage(Remote(**{"tries": 1, "options": more, **settings})), f"{kind}://bucket"


@pytest.mark.parametrize("kind", KINDS)
def test_ranges_and_whole_files(kind):
    with server(plain) as (port, heads):
        storage, url = asking(
            kind, port, options={"headers": {"X-Token": "word"}} if kind == "http" else {}, concurrency=4
        )
        asked = [Range(f"{url}/{i}", i, 1000 + i) for i in range(20)]
        asked += [Range(f"{url}/all"), Range(f"{url}/rest", 70_000, 6800), Range(f"{url}/end", 76_000, 5000)]
        *found, short, again = storage.read([*asked, asked[0]])  # the same twice is asked for once
        assert found == [*(BODY[i : 1000 + 2 * i] for i in range(20)), BODY, BODY[70_000:]]
        assert "800 bytes instead of 5000 at position 76000" in str(short)
        assert again == BODY[:1000]
        assert len(heads) == len(asked)
        assert kind == "s3" or all("X-Token: word" in head for head in heads)


ANSWERS = {
    "404": (b"HTTP/1.1 404 Not Found\r\n", FileNotFoundError, "no such object"),
    "403": (b"HTTP/1.1 403 Forbidden\r\n", PermissionError, "HTTP status 403"),
    "reason": (b"HTTP/1.1 403 Not\x1b[31m yours\r\n", Exception, ""),
    "401": (b"HTTP/1.1 401 Who\r\n", PermissionError, "HTTP status 401"),
    "429": (b"HTTP/1.1 429 Too Many\r\n", ReadError, "HTTP status 429"),
    "503": (b"HTTP/1.1 503 Slow Down\r\n", ReadError, "HTTP status 503"),
    "300": (b"HTTP/1.1 300 Many\r\n", ReadError, ""),
    "cut": (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nabc", ReadError, "tried 3 times"),
    "much": (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\nabc", OSError, "more than 5 bytes"),
    "flood": (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (1 << 20), Exception, ""),
    "whole": (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", ReadError, "no range requests"),
    "other": (b"HTTP/1.1 206 OK\r\nContent-Range: bytes 2-4/9\r\nContent-Length: 3\r\n\r\nabc", ReadError, ""),
    "none": (b"HTTP/1.1 206 OK\r\nContent-Range: bytes */9\r\nContent-Length: 3\r\n\r\nabc", ReadError, ""),
    "negative": (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", ReadError, ""),
    "ssh": (b"SSH-2.0-OpenSSH\r\n\r\n", ReadError, ""),
    "zeros": (b"\0" * 70_000, ReadError, ""),
    "heads": (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200_000, ReadError, ""),
    "empty": (b"", ReadError, ""),
}
LIMITS = {"much": {"most": 5}, "flood": {"most": 5}}
LIMITS |= {name: {"begin": 1, "size": 3} for name in ("whole", "other", "none")}


@pytest.mark.parametrize("kind", KINDS)
def test_odd_answers_are_errors_of_their_own(kind):
    """Each is the error of one range, has no control character and no password, and the next request works."""
    body = b"<Error><Code>Access\x1b[31mDenied</Code><Message>not\n yours</Message></Error>"

    def answer(head, send):
        if (name := re.search(r"/odd/(\w+)", head)) is None:
            return plain(head, send)
        said = ANSWERS[name[1]][0]
        send(said if b"\r\n\r\n" in said or not said.startswith(b"HTTP") else
             said + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)  # fmt: skip
        return False

    with server(answer) as (port, _):
        storage, url = asking(kind, port, tries=3)  # a kept connection may have been closed meanwhile
        if kind == "http":
            url = url.replace("//", "//me:hidden@")
        found = storage.read(
            [*(Range(f"{url}/odd/{name}", **LIMITS.get(name, {})) for name in ANSWERS), Range(f"{url}/a")]
        )
        for (name, (_, error, text)), got in zip(ANSWERS.items(), found, strict=False):
            assert isinstance(got, error), (name, got)
            assert text in str(got), name
            assert str(got).isprintable(), name
            assert "hidden" not in str(got), name
        assert found[-1] == BODY
        if kind == "s3":
            assert r"Access\x1b[31mDenied: not yours" in str(found[1])
        for part in (Range(f"{url}/odd/403"), Range(f"{url}/odd/503"), Range(f"{url}/odd/ssh")):
            with pytest.raises(SourceError) as caught:
                storage.stat([part.path])
            assert str(caught.value).isprintable()
            assert "hidden" not in str(caught.value)
            with pytest.raises(SourceError) as caught:
                storage.find(part.path)
            assert str(caught.value).isprintable()
            assert "hidden" not in str(caught.value)
        assert storage.read([Range(f"{url}/a")]) == [BODY]


def test_answers_without_a_length_over_http():
    says = {
        "/chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        "/close": b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabc",
        "/continue": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc",
        "/gzip": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
    }
    with server(lambda head, send: send(says[head.split()[1]])) as (port, _):
        storage, url = asking("http", port)
        *found, packed = storage.read([Range(url + path) for path in says])
        assert found == [b"abc"] * 3
        assert "Content-Encoding gzip" in str(packed)


def test_a_server_that_allows_only_get():
    """As it does for a signed URL. The size then comes from a GET."""

    def answer(head, send):
        refused = head.startswith("HEAD")
        return send(b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n") or True if refused else plain(head, send)

    with server(answer) as (port, heads):
        storage, url = asking("http", port)
        assert storage.stat([f"{url}/a?sig=x"])[0].size == len(BODY)
        assert [head.split()[0] for head in heads] == ["HEAD", "GET"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_never_answers_or_is_not_there(kind):
    stop = threading.Event()

    def answer(head, send):
        if "/drip" in head:
            send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            while not stop.wait(0.2):
                send(b"x")
        return plain(head, send) if "/hang" not in head else stop.wait(60) and False

    with server(answer) as (port, _):
        storage, url = asking(kind, port, timeout=2.0)
        hang, drip, good = storage.read([Range(f"{url}/hang"), Range(f"{url}/drip"), Range(f"{url}/good")])
        stop.set()
        for late in (hang, drip):
            assert isinstance(late, ReadError)
            assert "no answer within 2 s" in str(late)
        assert good == BODY
    storage, url = asking(kind, port)
    (found,) = storage.read([Range(f"{url}/good")])
    assert isinstance(found, ReadError)
    assert "Connection refused" in str(found) or "connect" in str(found).lower()


@pytest.mark.parametrize("kind", [*KINDS, "gs", "az"])
def test_redirects_to_another_host_are_refused(kind):
    """Unless `source.remote.redirects` allows them. Those to the same host are followed."""
    with server(plain, host="127.0.0.2") as (other, heads):

        def answer(head, send):
            path = head.split()[1].removeprefix("/bucket")
            place = f"http://127.0.0.2:{other}/x" if "away" in head else f"/elsewhere{path}"
            if "/elsewhere" in head:
                return plain(head, send)
            send(f"HTTP/1.1 302 Found\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n".encode())
            return True

        with server(answer) as (port, _):
            storage, url = asking(kind, port)
            away, part, near = storage.read([Range(f"{url}/away"), Range(f"{url}/away", 3, 4), Range(f"{url}/near")])
            for error in (away, part):
                assert isinstance(error, ReadError)
                assert "redirects to" in str(error)
                assert "source.remote.redirects=true" in str(error)
            assert near == BODY
            with pytest.raises(SourceError, match=r"source\.remote\.redirects=true"):
                storage.stat([f"{url}/away"])
            with pytest.raises(SourceError, match=r"source\.remote\.redirects=true"):
                storage.find(f"{url}/away")
            assert not heads
            storage, url = asking(kind, port, redirects=True)
            assert storage.read([Range(f"{url}/away"), Range(f"{url}/away", 3, 4)]) == [BODY, BODY[3:7]]
            assert not [head for head in heads if "authorization" in head.lower() or "hidden" in head]


@pytest.mark.parametrize("kind", [*KINDS, "gs", "az"])
def test_a_host_below_the_own_is_another_host_only_for_web_servers(kind):
    """obstore cannot tell them apart; the guide says so. A name that only begins or ends alike is always another."""

    def answer(head, send):
        place = unquote(head.split()[1].rpartition("/")[2])
        send(f"HTTP/1.1 302 Found\r\nLocation: http://{place}:1/x\r\nContent-Length: 0\r\n\r\n".encode())
        return True

    with server(answer) as (port, _):
        storage, url = asking(kind, port, host="localhost")
        hosts = [Range(f"{url}/{host}") for host in ("localhost.test", "notlocalhost", "sub.localhost")]
        refused = ["source.remote.redirects=true" in str(error) for error in storage.read(hosts)]
        assert refused == [True, True, kind == "http"]


@pytest.mark.parametrize("kind", ["gs", "az"])
def test_credentials_may_come_from_another_host(kind, monkeypatch):
    def token(head, send):
        body = b'{"access_token": "given", "expires_in": 3600, "expires_on": "4102444800", "token_type": "Bearer", '
        body += b'"resource": "x"}'
        send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        return True

    with server(token, host="127.0.0.2") as (login, asked), server(plain) as (port, heads):
        if kind == "gs":
            monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.2:{login}")
            monkeypatch.setenv("HOME", "/nowhere")
        else:
            monkeypatch.setenv("IDENTITY_ENDPOINT", f"http://127.0.0.2:{login}/token")
        options = {"endpoint_url": f"http://127.0.0.1:{port}"} | ({} if kind == "gs" else {"account_name": "account"})
        assert Storage(Remote(options=options, tries=1)).read([Range(f"{kind}://bucket/a")]) == [BODY]
        assert len(asked) == 1
        assert "authorization: bearer given" in heads[0].lower()


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_leaves_nothing_half_done(kind, monkeypatch):
    with server(plain) as (port, _):
        storage, url = asking(kind, port)
        with monkeypatch.context() as patch:

            def interrupted(future, timeout=None):
                raise KeyboardInterrupt

            patch.setattr(Future, "result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                storage.read([Range(f"{url}/{i}") for i in range(9)])
        assert storage.read([Range(f"{url}/a"), Range(f"{url}/b")]) == [BODY, BODY]


@pytest.mark.parametrize("kind", [*KINDS, "gs", "az"])
def test_a_proxy_of_the_environment_is_asked(kind, monkeypatch):
    """obstore cannot refuse redirects behind a proxy. So there, redirects must be allowed."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with server(plain) as (port, heads):
        for name in ("http_proxy",) if kind == "http" else ("http_proxy", "ALL_PROXY"):
            with monkeypatch.context() as patch:
                patch.setenv(name, f"http://127.0.0.1:{port}")
                storage, url = asking(kind, 0, host="store.example.org", redirects=kind != "http")
                assert storage.read([Range(f"{url}/a")]) == [BODY]
                assert heads.pop().startswith("GET http://store.example.org/")
                if kind != "http":
                    storage, url = asking(kind, 0, host="store.example.org")
                    with pytest.raises(ConfigError, match=rf"Found: {name}\. Set `source\.remote\.redirects=true`"):
                        storage.read([Range(f"{url}/a")])
                    patch.setenv("NO_PROXY", "127.0.0.1")
                    storage, url = asking(kind, port)
                    assert storage.read([Range(f"{url}/a")]) == [BODY]
                    assert heads.pop().startswith("GET /")
        assert not heads
        if kind != "http":
            storage, url = asking(kind, 0, options={"client_options": {"proxy_url": f"http://127.0.0.1:{port}"}})
            with pytest.raises(ConfigError, match=r"Found: `source\.remote\.options\.client_options\.proxy_url`"):
                storage.read([Range(f"{url}/a")])


# -- TLS and credentials


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A file with a key and a certificate for 127.0.0.1, signed by itself."""
    from ipaddress import ip_address

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.now(UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(names, critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return str(path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_cannot_be_trusted_gets_no_request(kind, certificate, monkeypatch):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    with server(plain, context) as (port, heads):
        storage, url = asking(kind, port, scheme="https")
        (found,) = storage.read([Range(f"{url}/a")])
        assert isinstance(found, ReadError)
        assert "certificate" in str(found).lower()
        assert not heads
        if kind == "s3":
            for options in ({"verify": certificate}, {"verify": False}):
                storage, url = asking(kind, port, scheme="https", options=options)
                assert storage.read([Range(f"{url}/a"), Range(f"{url}/a", 5, 7)]) == [BODY, BODY[5:12]]
            monkeypatch.setenv("AWS_CA_BUNDLE", certificate)
            storage, url = asking(kind, port, scheme="https")
            assert storage.read([Range(f"{url}/a")]) == [BODY]
        storage, url = asking(kind, port)
        (found,) = storage.read([Range(f"{url}/a")])  # it says something else than HTTP
        assert isinstance(found, ReadError)


def test_without_a_login_nothing_is_requested(tmp_path, no_login):
    config = tmp_path / "config"
    no_login.setenv("AWS_CONFIG_FILE", str(config))
    with server(plain) as (port, heads):
        for content, message in (
            (f"credential_process = {sys.executable} -c print('{{}}')", "cannot be opened.*credential"),
            ("", r"no AWS credentials were found.*anon=true"),
        ):
            config.write_text(f"[default]\n{content}\n")
            with pytest.raises(SourceError, match=message):
                Storage(Remote(options={"endpoint_url": f"http://127.0.0.1:{port}"})).read([Range("s3://bucket/a")])
        assert not heads


FORKS = """
import os, sys, threading
from obstore.store import HTTPStore
from gpuaug.source.remote.storage import Range, Remote, Storage
port = int(sys.argv[1])
mine = HTTPStore(f"http://127.0.0.1:{port}", client_options={"allow_http": True})
assert len(mine.get("mine").bytes()) == 76800  # obstore has threads now, not by gpuaug
options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "x", "secret": "x"}
class Watched(Storage):
    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "_pid" and value != first:  # another thread of a child reads as soon as the process seems known
            reader = threading.Thread(target=storage.read, args=([Range("s3://bucket/other", image=0)],))
            reader.start()
            reader.join()
first, create = os.getpid(), os.memfd_create
os.memfd_create = lambda name: os.dup2(create(name), 200)  # each process may use the same number for its copy
storage = Watched(Remote(options=options))
for depth in range(3):
    (data,) = storage.read([Range(f"s3://bucket/{depth}", image=0)])
    assert len(data) == 76800
    if child := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print("read by all")
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.skipif("fork" not in METHODS, reason="no fork on this system")
def test_children_of_a_process_that_used_obstore_read():
    """Also their children. Without its own copy of the library, a child waits for ever."""
    with server(plain) as (port, _):
        done = subprocess.run([sys.executable, "-c", FORKS, str(port)], capture_output=True, text=True, timeout=100)
        assert done.stdout == "read by all\n", done.stderr
