"""Reading over URLs: S3 and HTTP on the loopback with latency, errors and cuts; the disk cache; life in workers."""

import json
import multiprocessing
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler

import numpy as np
import pytest
import torch
from common import METHODS, started_by
from pictures import encode
from servers import bucket_of, client_of, files, options, proxied, s3, serving

import gpuaug
from gpuaug.errors import ConfigError, ReadError, SourceError
from gpuaug.read.reader import Reader
from gpuaug.source import FolderSource, Remote, adapt
from gpuaug.source.packed import PackedSource
from gpuaug.source.paths import absolute, is_safe, join, redact, split
from gpuaug.source.remote.disk import Disk, locked
from gpuaug.source.remote.storage import Range, Storage
from gpuaug.tools.pack.command import pack


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("remote") / "train"
    rng = np.random.default_rng(0)
    for name in ("ant", "b e%e", "cät"):
        (root / name / "more").mkdir(parents=True)
        for i in range(13):
            path = root / name / ("more" if i % 3 == 0 else "") / f"{i} #{i}%20.jpg"
            path.write_bytes(rng.bytes(int(rng.integers(1, 5000))))
    (root / "ant" / "empty.jpg").touch()
    (root / "ant" / "notes.txt").write_text("no image")
    return root


@pytest.fixture(scope="module")
def store():
    with s3() as port:
        yield port


@pytest.fixture(scope="module")
def bucket(store, folder):
    return bucket_of(store, folder, "photos")


def batches(source, size=8):
    indices = torch.arange(len(source)) if source.indices is None else source.indices
    for part in indices.split(size):
        yield part, torch.zeros_like(part), torch.ones(len(part), dtype=torch.bool)


def read_all(source, *, num_workers=0, start_method=None, size=8):
    """Bytes by number, labels by number, faults by number."""
    return read_by(Reader(source, num_workers=num_workers, start_method=start_method, timeout=300), size)


def read_by(reader, size=8):
    data, labels, faults = {}, {}, {}
    try:
        for batch in reader.batches(batches(reader.source, size)):
            for row, i in enumerate(batch.indices.tolist()):
                data[i] = batch.images[row].tobytes()
                labels[i] = None if batch.labels is None else batch.labels[row].item()
            faults |= {int(batch.indices[fault.row]): fault.reason for fault in batch.faults}
    finally:
        reader.close()
    return data, labels, faults


def same(remote, local):
    assert len(remote) == len(local)
    assert [remote.key(i) for i in range(len(local))] == [local.key(i) for i in range(len(local))]
    assert remote.digest() == local.digest()
    assert remote.classes == local.classes
    assert remote.labels.tolist() == local.labels.tolist()
    assert [remote[i] for i in range(len(local))] == list(local)


# -- folders


def test_a_bucket_is_the_same_as_its_folder(store, bucket, folder):
    with proxied(store) as (proxy, url):
        source = FolderSource(bucket, remote=Remote(options=options(url)))
        same(source, FolderSource(folder))
        proxy.reset()
        assert [item[0] for item in source.read_many(range(len(source)))] == [x[0] for x in FolderSource(folder)]
        assert len(proxy.asked) == len(source)  # one request for each, and no question for its size
    some = FolderSource(
        bucket, subset=5, classes=["cät", "b e%e", "ant"], remote=Remote(options=options(f"http://127.0.0.1:{store}"))
    )
    assert some.labels.max() == 2
    assert len(some) == 5
    assert FolderSource(folder).read_many is None


def test_a_folder_over_http_is_the_same(folder):
    with files(folder.parent) as port, proxied(port) as (_, url):
        source = FolderSource(f"{url}/train/")
        same(source, FolderSource(folder))
        flat = FolderSource(f"{url}/train", labels="none")
        assert flat.digest() == source.digest()
        with pytest.raises(SourceError, match="does not exist"):
            FolderSource(f"{url}/nowhere")


KINDS = [(kind, workers) for kind in ("s3", "http") for workers in (0, "fork" if "fork" in METHODS else 1)]


def by(workers):
    """Settings of the reader."""
    return {"num_workers": 1, "start_method": "fork"} if workers == "fork" else {"num_workers": workers}


def agent(proxy):
    """The one client that asked."""
    (found,) = {name.split()[0] for name in proxy.agents}
    return found


@pytest.mark.parametrize(("kind", "workers"), KINDS)
def test_latency_is_hidden_by_requests_at_the_same_time(store, bucket, folder, kind, workers):
    with files(folder.parent) as port, proxied(store if kind == "s3" else port) as (proxy, url):
        root = bucket if kind == "s3" else f"{url}/train"
        source = FolderSource(root, remote=Remote(options=options(url) if kind == "s3" else None, concurrency=16))
        source[0]
        proxy.reset()
        proxy.latency, proxy.together = 0.05, 12
        data, _, faults = read_all(source, size=20, **by(workers))
        assert agent(proxy) == "gpuaug"
        assert data == dict(enumerate(x[0] for x in FolderSource(folder)))
        assert list(faults.values()) == ["0 bytes"]
        assert 12 <= proxy.most <= 16
        assert len(proxy.gets) == len(source)


# what each try of a request gets; None: the file
PASSES = {"8%20%238": [500, "cut", None], "10%20%2310": [503, None]}
BAD = {"1%20%231": 500, "2%20%232": "cut", "4%20%234": "hang", "5%20%235": 404, "7%20%237": 403}


@pytest.fixture(scope="module")
def readings_of_what_fails(store, bucket, folder):
    """(proxy, source, future of what was read) of every kind, all at the same time: mostly they wait for an answer."""

    def trouble(path, count):
        if tries := next((tries for name, tries in PASSES.items() if f"/ant/{name}" in path), None):
            return tries[count]
        return next((what for name, what in BAD.items() if f"/ant/{name}" in path), None)

    readings = {}
    with ExitStack() as stack:
        port = stack.enter_context(files(folder.parent))
        for kind, workers in KINDS:  # threads that read begin after the last fork
            proxy, url = stack.enter_context(proxied(store if kind == "s3" else port))
            root = bucket if kind == "s3" else f"{url}/train"
            remote = Remote(options=options(url) if kind == "s3" else None, tries=3, timeout=5.0)
            reader = Reader(FolderSource(root, remote=remote), timeout=300, **by(workers))
            assert list(reader.batches([])) == []  # starts its workers
            proxy.reset()
            proxy.trouble = trouble
            readings[kind, workers] = proxy, reader
        threads = stack.enter_context(ThreadPoolExecutor(len(readings)))
        yield {
            key: (proxy, reader.source, threads.submit(read_by, reader)) for key, (proxy, reader) in readings.items()
        }


@pytest.mark.parametrize(("kind", "workers"), KINDS)
def test_what_stays_bad_after_all_tries_is_the_fault_of_one_sample(readings_of_what_fails, folder, kind, workers):
    proxy, source, reading = readings_of_what_fails[kind, workers]
    data, labels, faults = reading.result()
    assert agent(proxy) == "gpuaug"
    named = {source.key(i): reason for i, reason in faults.items()}
    bad = {f"ant/{i} #{i}%20.jpg": i for i in (1, 2, 4, 5, 7)}
    assert named.keys() == {*bad, "ant/empty.jpg"}
    assert "no answer within 5 s" in named["ant/4 #4%20.jpg"]
    assert "tried 3 times" in named["ant/2 #2%20.jpg"]
    assert named["ant/5 #5%20.jpg"].startswith("FileNotFoundError")
    assert named["ant/7 #7%20.jpg"].startswith("PermissionError")
    assert all(labels[i] == 0 for i in faults)
    local = FolderSource(folder)
    assert all(data[i] == (b"" if i in faults else local[i][0]) for i in data)
    per = {name: sum(f"/ant/{name}" in path for _, path, _ in proxy.gets) for name in (*BAD, *PASSES)}
    assert list(per.values()) == [3, 3, 3, 1, 1, 3, 2]


# -- which client reads, and as whom


def asks_as(proxy, bucket, **settings):
    """Who asks for objects, and signed as whom."""
    source = FolderSource(bucket, remote=Remote(options=settings, tries=1))
    proxy.reset()
    _, _, faults = read_all(source)
    assert list(faults.values()) == ["0 bytes"]
    (login,) = proxy.logins
    return agent(proxy), login


def test_logins_are_found_where_botocore_finds_them(store, bucket, folder, tmp_path, no_login):
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = ofdefault\naws_secret_access_key = x\n"
        "[other]\naws_access_key_id = ofother\naws_secret_access_key = x\n"
    )
    no_login.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    with proxied(store) as (proxy, url):
        assert asks_as(proxy, bucket, endpoint_url=url) == ("gpuaug", "ofdefault")
        assert asks_as(proxy, bucket, endpoint_url=url, profile="other") == ("gpuaug", "ofother")
        public = bucket_of(store, folder, "public", ACL="public-read")
        assert asks_as(proxy, public, endpoint_url=url, anon=True) == ("gpuaug", "")
        assert asks_as(proxy, bucket, endpoint_url=url, key="ofoption", secret="x") == ("gpuaug", "ofoption")
        no_login.setenv("AWS_ENDPOINT_URL_S3", url)
        no_login.setenv("AWS_ACCESS_KEY_ID", "ofenvironment")
        no_login.setenv("AWS_SECRET_ACCESS_KEY", "x")
        assert asks_as(proxy, bucket) == ("gpuaug", "ofenvironment")


def test_logins_that_expire_are_renewed(store, bucket, no_login):
    given = []

    class Role(BaseHTTPRequestHandler):
        def do_GET(self):
            given.append(f"key{len(given)}")
            until = datetime.now(UTC) + timedelta(seconds=60)
            found = {"AccessKeyId": given[-1], "SecretAccessKey": "x", "Token": "t", "Expiration": until.isoformat()}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        def log_message(self, *args):
            pass

    with serving(Role) as port, proxied(store) as (proxy, url):
        no_login.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://127.0.0.1:{port}/role")
        source = FolderSource(bucket, remote=Remote(options={"endpoint_url": url}))
        for _ in range(2):
            _, _, faults = read_all(source)
            assert list(faults.values()) == ["0 bytes"]
            time.sleep(0.2)  # the client keeps a login for 0.1 s
        assert agent(proxy) == "gpuaug"
        assert len(proxy.logins) > 1
        assert set(proxy.logins) <= set(given)


def test_options_that_the_store_does_not_have(bucket):
    for wrong in ({"version_aware": True}, {"no_such_option": 1}, {"endpoint_url": [1]}):
        with pytest.raises(ConfigError, match=r"source\.remote\.options"):
            FolderSource(bucket, remote=Remote(options=wrong))
    with pytest.raises(SourceError, match=r"s3:// cannot be opened: .*nowhere\.pem"):
        FolderSource(bucket, remote=Remote(options={**options("https://127.0.0.1"), "verify": "/nowhere.pem"}))


def test_keys_that_a_url_would_change(store, tmp_path):
    """Or that obstore refuses."""
    local = tmp_path / "train"
    (local / "a").mkdir(parents=True)
    names = ["a b+c&d=e?f#g%41;h,i@j$k!l~m'n(o)*.jpg", "ä ö.jpg", "..x.jpg", "%2e%2e%2fx.jpg"]
    for k, name in enumerate(names):
        (local / "a" / name).write_bytes(os.urandom(100 + k))
    place = bucket_of(store, local, "odd")
    source = FolderSource(place, remote=Remote(options=options(f"http://127.0.0.1:{store}")))
    same(source, FolderSource(local))
    storage = Storage(Remote(options=options(f"http://127.0.0.1:{store}")))
    for key in ("train/a/../a/x.jpg", "train//x.jpg", "train/./x.jpg"):
        (found,) = storage.read([Range(f"s3://odd/{key}")])
        assert isinstance(found, ReadError)
        assert "empty part" in str(found)


# -- Google Cloud Storage


def test_a_bucket_of_google_is_the_same_as_its_folder(store, folder):
    """Google's XML API is that of S3, so that moto can be its server."""
    bucket_of(store, folder, "google", ACL="public-read")
    local = FolderSource(folder)
    with proxied(store) as (proxy, url):
        remote = Remote(options={"anon": True, "endpoint_url": url}, tries=2)
        source = FolderSource("gs://google/train", remote=remote)
        same(source, local)
        proxy.reset()
        proxy.trouble = lambda path, count: 503 if count == 0 and "train" in path else None
        data, _, faults = read_all(source)
        assert list(faults.values()) == ["0 bytes"]
        assert data == {i: local[i][0] for i in range(len(local))}
        assert agent(proxy) == "gpuaug"
        proxy.reset()
        proxy.trouble = lambda path, count: 404 if "train" in path else None
        _, _, faults = read_all(source)
        assert {reason.partition(":")[0] for reason in faults.values()} == {"FileNotFoundError"}
        proxy.trouble = lambda path, count: None
        token = Remote(options={"bearer_token": "secret-word", "endpoint_url": url})
        source = FolderSource("gs://google/train", remote=token)
        proxy.reset()
        read_all(source)
        assert set(proxy.logins) == {"Bearer secret-word"}


def test_what_a_protocol_needs_is_said(monkeypatch):
    for protocol, name, remedy in (
        ("s3", "botocore", "pip install gpuaug[remote]"),
        ("gs", "obstore.store", "pip install gpuaug[remote]"),
        ("https", "fsspec", "pip install gpuaug[remote]"),
        ("sftp", "paramiko", 'requires "paramiko" to be installed'),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            for module in ("gpuaug.source.remote.filesystem", "fsspec.implementations.sftp"):
                patch.delitem(sys.modules, module, raising=False)
            with pytest.raises(SourceError, match=re.escape(remedy)):
                FolderSource(f"{protocol}://bucket/x")


# -- the disk cache


def test_a_changed_object_is_read_again(store, tmp_path):
    root = tmp_path / "d"
    (root / "a").mkdir(parents=True)
    (root / "a" / "x.jpg").write_bytes(b"one")
    url = bucket_of(store, root, "changing")
    remote = Remote(options=options(f"http://127.0.0.1:{store}"), cache=tmp_path / "cache")
    assert FolderSource(url, remote=remote)[0][0] == b"one"
    client_of(store).put_object(Bucket="changing", Key="train/a/x.jpg", Body=b"two")
    assert FolderSource(url, remote=remote)[0][0] == b"two"
    for label in (3, 5):  # packed again at the same URL
        pack([(encode(np.full((9, 8, 3), label, np.uint8)), label)], tmp_path / str(label), num_workers=0)
        url = bucket_of(store, tmp_path / str(label), "changing", "packed")
        assert PackedSource(url, remote=remote)[0][1] == label


def size_of(folder):
    total = 0
    for above, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += -(-os.stat(os.path.join(above, name)).st_size // 4096) * 4096 * (name != ".lock")
    return total


def test_the_cache_is_bounded_and_forgets_what_is_old(tmp_path):
    disk = Disk(tmp_path / "c", max_bytes=10 * 4096)
    for i in range(8):
        disk.put([(f"n{i}", b"%d" % i * 3000)])
        os.utime(disk._path(f"n{i}"), (i, i))
    assert disk.get("n0") == b"0" * 3000  # used: it stays
    disk.put([(f"m{i}", b"m" * 3000) for i in range(5)])
    assert disk.get("n0") is not None
    assert disk.get("n1") is disk.get("n2") is None
    assert disk.get("m4") == b"m" * 3000
    assert size_of(disk.folder) <= disk.max_bytes
    disk.put([("large", b"x" * 50_000)])
    assert disk.get("large") is None
    assert disk.get("m4") is not None
    disk.put([("../../escape", b"x"), ("a/b\0c", b"y")])
    assert disk.get("../../escape") == b"x"
    assert not (tmp_path / "escape").exists()
    Disk(disk.folder, max_bytes=3 * 4096).put([("new", b"z")])
    assert size_of(disk.folder) <= 3 * 4096


def test_a_damaged_entry_is_none(tmp_path):
    disk = Disk(tmp_path, max_bytes=1 << 20)
    disk.put([("a", b"whole" * 100), ("b", b"whole" * 100)])
    for name, damage in (("a", lambda x: x[:-1]), ("b", lambda x: x[:-1] + b"!")):
        with open(disk._path(name), "r+b") as file:
            data = damage(file.read())
            file.seek(0)
            file.truncate()
            file.write(data)
        assert disk.get(name) is None
        disk.put([(name, b"again")])
        assert disk.get(name) == b"again"


def fill(folder, seed, done):
    disk = Disk(folder, max_bytes=40 * 4096)
    rng = np.random.default_rng(seed)
    while not done.exists():
        name = int(rng.integers(60))
        found = disk.get(str(name))
        assert found is None or found == b"%d" % name * 4000
        if found is None:
            disk.put([(str(name), b"%d" % name * 4000)])


def test_many_processes_share_a_bounded_cache_even_when_killed(tmp_path):
    context = multiprocessing.get_context("fork")
    folder, done = tmp_path / "cache", tmp_path / "done"
    workers = [context.Process(target=fill, args=(folder, seed, done), daemon=True) for seed in range(4)]
    for worker in workers:
        worker.start()
    most, killed, deadline = 0, None, time.monotonic() + 100
    while time.monotonic() < (deadline if killed is None else killed + 0.7):
        if folder.exists():
            with locked(folder / ".lock"):  # else files come and go while they are counted
                most = max(most, size_of(folder))
        time.sleep(0.01)
        if killed is None and most > 20 * 4096:
            workers[0].kill()
            killed = time.monotonic()
    done.touch()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [-9, 0, 0, 0]
    assert 20 * 4096 < most <= 40 * 4096
    disk = Disk(folder, max_bytes=40 * 4096)
    for name in range(100):  # nobody who is gone holds it, and it is bounded still
        disk.put([(str(name), b"%d" % name * 4000)])
    assert disk.get("99") == b"99" * 4000
    assert size_of(folder) <= 40 * 4096


def test_a_cache_that_cannot_be_written_only_warns(tmp_path, caplog):
    disk = Disk(tmp_path / "c", max_bytes=1 << 20)
    word = disk._path("x")
    os.makedirs(os.path.dirname(os.path.dirname(word)), exist_ok=True)
    open(os.path.dirname(word), "w").close()  # a file stands where a folder must be
    disk.put([("x", b"x")])
    disk.put([("x", b"x")])
    assert caplog.text.count("cannot be written") == 1
    (tmp_path / "file").touch()
    with pytest.raises(SourceError, match=r"source\.remote\.cache"):
        Disk(tmp_path / "file", max_bytes=1)


# -- places and settings


def test_keys_cannot_leave_their_place():
    for key in ("../a", "a/../b", "/a", "a//b", "", ".", "a/.", "s3://b/c", "a\0b", "..", "./a"):
        assert not is_safe(key), key
    for key in ("a", "a/b.jpg", "..a/b..", "a b#?.jpg", "~/x"):
        assert is_safe(key), key


def test_listings_that_lead_outside_are_refused(store):
    client = client_of(store)
    client.create_bucket(Bucket="hostile")
    remote = Remote(options=options(f"http://127.0.0.1:{store}"))
    for key in ("t/a/x.jpg", "t/a/", "secret.jpg", "tx/y.jpg"):
        client.put_object(Bucket="hostile", Key=key, Body=b"data")
    source = FolderSource("s3://hostile/t", labels="none", remote=remote)
    assert [source.key(i) for i in range(len(source))] == ["a/x.jpg"]
    for key in ("t/a/../../secret.jpg", "t//y.jpg", "t/./z.jpg", "t/\x1b[31mx.jpg"):
        client.put_object(Bucket="hostile", Key=key, Body=b"data")
        with pytest.raises(SourceError, match="obstore reads no key with an empty part") as error:
            FolderSource("s3://hostile/t", labels="none", remote=remote)
        assert "tried" not in str(error.value)
        assert str(error.value).isprintable()
        client.delete_object(Bucket="hostile", Key=key)


@pytest.mark.parametrize(("below", "more"), [("/train/ant/more", {}), ("/train", {"classes": ["x"]})])
def test_messages_about_a_folder_show_no_password(folder, below, more):
    with files(folder.parent) as port, pytest.raises(SourceError, match=f"127.0.0.1:{port}") as error:
        FolderSource(f"http://me:secret@127.0.0.1:{port}{below}", **more)
    assert "secret" not in str(error.value)


def test_places(tmp_path):
    assert absolute("s3://b/x/") == "s3://b/x"
    assert absolute("file:///a/b%20c") == "/a/b c"
    for bare in ("s3://", "https:///"):
        with pytest.raises(ConfigError, match=f"`source.root` must name a bucket or a server. Found: '{bare}'"):
            FolderSource(bare)
    assert join("https://h/d", "a b/c%.jpg") == "https://h/d/a%20b/c%25.jpg"
    assert join("s3://b/d", "a b/c%.jpg") == "s3://b/d/a b/c%.jpg"
    assert split("s3://b/d/x.tar") == ("s3://b/d", "x.tar")
    assert redact("https://me:secret@host/x?sig=secret") == "https://host/x"
    assert redact("https://me:se@cret@host/a@b") == "https://host/a@b"
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "x.jpg").write_bytes(b"x")
    assert FolderSource(f"file://{tmp_path}")[0] == (b"x", 0)


def test_settings_that_cannot_work():
    for scheme in ("nothing", "data", "zip"):
        with pytest.raises(ConfigError, match=f"{scheme}:// is not supported.*https, .*s3"):
            FolderSource(f"{scheme}://bucket/x")
    with pytest.raises(ConfigError, match="s3://bucket/path"):
        FolderSource("simplecache::s3://bucket/x")
    with pytest.raises(ConfigError, match=r"source\.remote"):
        FolderSource("s3://bucket/x", remote={"tries": 3})
    assert "secret" not in repr(Remote(options={"secret": "secret"})).replace("options", "")


def test_file_systems_without_a_loop(folder):
    import fsspec

    memory = fsspec.filesystem("memory")
    local = FolderSource(folder)
    for i in range(len(local)):
        memory.pipe(f"/store/{local.key(i)}", local[i][0])
    source = FolderSource("memory://store")
    same(source, local)
    assert adapt(source) is source
    memory.rm(f"/store/{source.key(3)}")
    found = source.read_many([2, 3])
    assert found[0] == local[2]
    assert isinstance(found[1], FileNotFoundError)


@pytest.mark.parametrize("method", METHODS)
def test_workers_of_every_start_method_read(store, bucket, folder, method, tmp_path):
    remote = Remote(options=options(f"http://127.0.0.1:{store}"), cache=tmp_path / "cache")
    source = FolderSource(bucket, remote=remote)
    source[0]  # this process has connections and a thread of its own when it forks
    data, labels, _ = read_all(source, **started_by(method))
    local = FolderSource(folder)
    assert data == {i: local[i][0] for i in range(len(local))}
    assert labels == {i: local[i][1] for i in range(len(local))}
    source[1]  # and still has them afterwards


def test_a_configuration_reads_from_a_bucket(store, bucket):
    overrides = [f"source.root={bucket}", "augment=flip", "source.remote.tries=2", "device=cpu", "num_workers=0"]
    overrides.append(f"source.remote.options={{endpoint_url: 'http://127.0.0.1:{store}', key: x, secret: x}}")
    with gpuaug.build(gpuaug.compose("train", overrides)) as loader:
        assert len(loader.source) == 40
        assert loader.source._storage.remote.tries == 2
