"""Tar shards: the samples of webdataset, index files, labels, hostile tars, one range read for each sample."""

import hashlib
import io
import json
import logging
import os
import pickle
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from servers import remote_copy
from test_remote import read_all

import gpuaug
import gpuaug.files
from gpuaug.errors import ConfigError, SourceError
from gpuaug.source import ShardSource
from gpuaug.source.paths import expand_braces
from gpuaug.source.tar import members

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "gpuaug"


def write(path, entries, kind="gnu"):
    """A tar of (name, bytes) or TarInfo."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=FORMATS[kind]) as tar:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                tar.addfile(entry)
            else:
                info = tarfile.TarInfo(entry[0])
                info.size = len(entry[1])
                tar.addfile(info, io.BytesIO(entry[1]))
    return path


def samples(first, count, *, label=lambda i: i % 3):
    for i in range(first, first + count):
        data = np.random.default_rng(i).bytes(50 + 137 * i)
        yield f"d{i // 4}/{i:04}.jpg", data
        yield f"d{i // 4}/{i:04}.cls", b"%d" % label(i)
        yield f"d{i // 4}/{i:04}.json", json.dumps({"label": f"c{i % 2}", "meta": {"age": i / 2}, "x": None}).encode()


@pytest.fixture
def shards(tmp_path):
    root = tmp_path / "shards"
    for k in range(3):
        write(root / f"train-{k:03}.tar", samples(10 * k, 10))
    return root


def keys(source):
    return [source.key(i) for i in range(len(source))]


def test_samples_are_those_of_webdataset(shards):
    import webdataset

    pattern = str(shards / "train-{000..002}.tar")
    source = ShardSource(pattern)
    theirs = list(webdataset.WebDataset(pattern, shardshuffle=False, empty_check=False))
    assert len(source) == len(theirs) == 30
    for i, sample in enumerate(theirs):
        assert source[i] == (sample["jpg"], int(sample["cls"]))
        assert source.key(i) == f"train-{i // 10:03}.tar/{sample['__key__']}.jpg"
    assert source.labels.tolist() == [int(sample["cls"]) for sample in theirs]
    assert source.num_classes == 3
    assert source.classes is source.indices is source.read_many is None


def test_ways_to_name_shards(shards, tmp_path, monkeypatch):
    whole = ShardSource(str(shards / "train-{000..002}.tar"))
    listed = [shards / f"train-{k:03}.tar" for k in range(3)]
    mixed = [f"{shards}/train-{{000,001}}.tar", f"{shards}/train-002.tar"]
    for root in (shards, str(shards), f"file://{shards}", shards / "*.tar", listed, mixed):
        other = ShardSource(root)
        assert keys(other) == keys(whole)
        assert other.digest() == whole.digest()
    monkeypatch.chdir(shards)
    relative = ShardSource("train-{000..002}.tar")
    monkeypatch.chdir("/")
    assert relative[29] == whole[29]
    assert keys(ShardSource(shards / "train-001.tar")) == keys(whole)[10:20]
    with pytest.raises(SourceError, match=r"train-003\.tar"):
        ShardSource(str(shards / "train-{000..003}.tar"))
    with pytest.raises(SourceError, match="twice"):
        ShardSource([shards, shards / "train-001.tar"])
    with pytest.raises(SourceError, match="or a folder of them"):
        ShardSource(tmp_path / "nowhere")
    for bad in ([], "", None, [3], "{0..9999999}.tar"):
        with pytest.raises(ConfigError, match=r"source\.root"):
            ShardSource(bad)


def test_braces_are_those_of_the_shell():
    for text in ("a-{000..003}.tar", "{x,y}/{1..3}.tar", "{8..12}", "{3..1}", "plain", "{one}", "{a,b,}c", "{09..11}"):
        shell = subprocess.run(["bash", "-c", f"printf '%s\\n' {text}"], capture_output=True, text=True).stdout
        assert expand_braces(text) == shell.removesuffix("\n").split("\n"), text


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_characters="\0/\n", exclude_categories=["Cs"]), min_size=1, max_size=90),
            st.sampled_from(["", "a/", "x" * 99 + "/", "ü/" * 70]),
            st.integers(0, 1500),
        ),
        max_size=8,
    ),
    st.sampled_from(list(FORMATS)),
)
@settings(max_examples=60, deadline=None)
def test_members_are_those_of_tarfile(tmp_path_factory, entries, kind):
    path = tmp_path_factory.mktemp("tar") / "x.tar"
    try:
        write(path, [(folder + name.strip("./ ") + "_", b"x" * size) for name, folder, size in entries], kind)
    except ValueError:  # ustar has no room for such names
        return
    data = path.read_bytes()
    with tarfile.open(path) as tar:
        theirs = [(m.name, m.offset_data, m.size) for m in tar if m.isfile()]
    ours = [
        (os.fsdecode(m.name), m.offset, m.size) for m in members(lambda at, n: data[at : at + n], len(data), path="x")
    ]
    assert ours == theirs


def test_labels(tmp_path, shards):
    names = ShardSource(shards, labels="json")
    assert names.classes == ["c0", "c1"]
    assert names.labels.tolist() == [i % 2 for i in range(30)]
    assert ShardSource(shards, labels="json", classes=["c1", "c0"])[0][1] == 1
    ages = ShardSource(shards, labels="json", label_key="meta.age")
    assert ages.labels is None
    assert ages[3][1] == 1.5
    none = ShardSource(shards, labels="none")
    assert none[0][1] is none.labels is none.num_classes is None
    assert none.digest() == names.digest()
    counted = ShardSource(shards, classes=["a", "b", "c", "d"])
    assert (counted.num_classes, counted.classes) == (4, ["a", "b", "c", "d"])
    many = write(tmp_path / "m.tar", [("a.jpg", b"a"), ("a.json", b'{"label": [1, 0, 0.5]}'), ("b.jpg", b"b"),
                                      ("b.json", b'{"label": [0, 0, 1]}')])  # fmt: skip
    assert ShardSource(many, labels="json")[0] == (b"a", [1.0, 0.0, 0.5])
    assert ShardSource(many, labels="json").num_classes == 3
    with pytest.raises(SourceError, match=r"label_key"):
        ShardSource(shards, labels="json", label_key="nothing")
    with pytest.raises(SourceError, match="the json of .* not valid"):
        ShardSource(shards, labels="json", label_key="x")
    with pytest.raises(SourceError, match="lacks 1 labels"):
        ShardSource(shards, labels="json", classes=["c0"])
    with pytest.raises(SourceError, match=r"0 \.\. 1"):
        ShardSource(shards, classes=["a", "b"])
    odd = write(tmp_path / "odd.tar", [("a.jpg", b"a"), ("a.cls", b"1"), ("b.jpg", b"b"), ("b.cls", b"two")])
    with pytest.raises(SourceError, match="must all be numbers"):
        ShardSource(odd)


def test_which_members_make_a_sample(tmp_path, caplog):
    root = write(
        tmp_path / "x.tar",
        [
            ("./a.seg.png", b"seg"), ("./a.JPG", b"a"), ("./a.cls", b"1"), (".hidden.jpg", b"no"), ("readme", b"no"),
            ("b.cls", b"2"), ("c.jpg", b"c"), ("d.x/e.png", b"e"), ("d.x/e.webp", b"w"), ("d.x/e.cls", b" 3\n"),
        ],
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, "gpuaug"):
        source = ShardSource(root)
    assert keys(source) == ["x.tar/a.JPG", "x.tar/d.x/e.png"]
    assert list(source) == [(b"a", 1), (b"e", 3)]
    assert "2 samples without an image or cls are left out: 'b', 'c'" in caplog.text
    assert ShardSource(root, extensions=["webp"])[0] == (b"w", 3)
    assert ShardSource(root, extensions=["seg.png"])[0] == (b"seg", 1)
    with pytest.raises(SourceError, match=r"'jpg'.*Check `source.extensions`"):
        ShardSource(root, labels="json")
    with pytest.raises(SourceError, match="twice in one sample"):
        ShardSource(write(tmp_path / "t.tar", [("a.jpg", b"1"), ("a.JPG", b"2")]), labels="none")


# -- the index


def looked_at(caplog, *args, **more):
    """How many shards were looked at."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "gpuaug"):
        source = ShardSource(*args, **more)
    words = [record.args[0] for record in caplog.records if record.msg.startswith("index: reading")]
    return (words or [0])[0], source


def test_the_index_is_made_once_and_again_for_changed_shards(shards, caplog, home, tmp_path):
    assert looked_at(caplog, shards)[0] == 3
    count, _ = looked_at(caplog, shards)
    assert count == 0
    write(shards / "train-001.tar", samples(50, 4))
    count, changed = looked_at(caplog, shards)
    assert count == 3
    assert len(changed) == 24
    assert changed[10] == (dict(samples(50, 1))["d12/0050.jpg"], 50 % 3)
    assert looked_at(caplog, shards, labels="json")[0] == 3
    moved = shards.rename(tmp_path / "moved")
    assert looked_at(caplog, moved)[0] == 0
    assert looked_at(caplog, moved, index=tmp_path / "elsewhere")[0] == 3
    assert looked_at(caplog, moved, index=tmp_path / "elsewhere")[0] == 0
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1


def test_the_cache_folder_is_private_whatever_the_umask(shards, home):
    """Compiled code is kept only in a folder that no other user can write to."""
    before = os.umask(0o002)
    try:
        ShardSource(shards)
    finally:
        os.umask(before)
    assert home.stat().st_mode & 0o777 == 0o700


def test_a_damaged_index_is_made_again(shards, caplog):
    source = ShardSource(shards)
    (path,) = shards.glob(".gpuaug-*.index")
    whole = path.read_bytes()
    for damaged in (b"", whole[:100], whole[:-1], whole[:-3] + b"abc", b"x" + whole, pickle.dumps(3)):
        path.write_bytes(damaged)
        count, again = looked_at(caplog, shards)
        assert count == 3
        assert "built again" in caplog.text
        assert list(again) == list(source)
    assert path.read_bytes() == whole
    assert sorted(x.name for x in shards.iterdir()) == sorted([path.name, *(f"train-{k:03}.tar" for k in range(3))])


def rewritten(path, number, change):
    """Change an array of an index file. Its checksum fits."""
    file = io.BytesIO(path.read_bytes().partition(b"\n")[2])
    arrays = [np.lib.format.read_array(file) for _ in range(6)]
    arrays[number] = change(arrays[number])
    body = io.BytesIO()
    for array in arrays:
        np.lib.format.write_array(body, array)
    found = [shard.stat() for shard in sorted(path.parent.glob("*.tar"))]
    versions = repr([(x.st_size, f"{x.st_size}-{x.st_mtime_ns}") for x in found]).encode()
    checksum = hashlib.blake2b(versions + body.getvalue(), digest_size=16).hexdigest()
    path.write_bytes(b"gpuaug-shards-3 " + checksum.encode() + b"\n" + body.getvalue())


def replaced(at, value):
    def change(array):
        array[at] = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value
        return array

    return change


BOUNDS, KEYS, KEY_ENDS, LABELS, LABEL_ENDS, PLACES = range(6)
DAMAGE = [
    *((number, change) for number in range(6) for change in (
        lambda x: x[:-1], lambda x: x[:0], lambda x: x[None], lambda x: x.astype(np.float32),
        lambda x: x.astype(object), lambda x: np.append(x, x[-1:], axis=0),
    )),
    *((number, replaced(at, value)) for number in (BOUNDS, KEY_ENDS, LABEL_ENDS) for at, value in (
        (0, 1), (1, -1), (1, 1 << 62), (-1, 1 << 40),
    )),
    (KEYS, replaced(slice(2), b"..")),  # d0/0000.jpg becomes ../0000.jpg
    (KEYS, replaced(0, ord("/"))),
    *((PLACES, replaced(at, value)) for at, value in (
        ((0, 0), 1 << 40), ((0, 0), (1 << 63) - 8), ((0, 0), -1), ((0, 1), 1 << 20), ((0, 1), -1), ((0, 1), 1 << 62),
    )),
]  # fmt: skip


def test_an_index_of_somebody_else_cannot_lead_outside(shards, caplog):
    source = ShardSource(shards)
    (path,) = shards.glob(".gpuaug-*.index")
    whole = path.read_bytes()
    rewritten(path, 0, lambda array: array)
    assert path.read_bytes() == whole
    for number, change in DAMAGE:
        rewritten(path, number, change)
        count, again = looked_at(caplog, shards)
        assert count == 3
        assert list(again) == list(source)
        assert path.read_bytes() == whole
    assert "outside" in caplog.text


def test_two_samples_of_one_name_are_refused(tmp_path):
    path = write(tmp_path / "x.tar", [("a.jpg", b"1"), ("b.jpg", b"2"), ("./a.jpg", b"3")])
    with pytest.raises(SourceError, match=r"two samples of the name 'a\.jpg'"):
        ShardSource(path, labels="none")


def test_index_of_a_read_only_folder_goes_to_the_cache(shards, caplog, home, monkeypatch):
    real = gpuaug.files.write

    def refuse(path, *parts, **more):
        if Path(path).parent == shards:
            raise PermissionError(13, "read-only")
        real(path, *parts, **more)

    monkeypatch.setattr(gpuaug.files, "write", refuse)  # root may write anywhere
    assert looked_at(caplog, shards)[0] == 3
    assert looked_at(caplog, shards)[0] == 0
    assert len(list(home.glob("*.index"))) == 1


# -- hostile and broken tars


def link(name, kind, target="/etc/passwd"):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([("/etc/x.jpg", b"x")], "leads outside"),
        ([("../x.jpg", b"x")], "leads outside"),
        ([("a/../../x.jpg", b"x")], "leads outside"),
        ([("a/" * 60 + "../x.jpg", b"x")], "leads outside"),
        ([link("x.jpg", tarfile.SYMTYPE)], "a symbolic link"),
        ([link("x.jpg", tarfile.LNKTYPE)], "a hard link"),
        ([link("x.jpg", tarfile.CHRTYPE)], "a device"),
        ([link("x.jpg", tarfile.FIFOTYPE)], "a pipe"),
        ([link("x.jpg", b"S")], "a sparse file"),
        ([link("x.jpg", b"Z")], "unknown kind"),
    ],
)
@pytest.mark.parametrize("kind", FORMATS)
def test_hostile_members_are_refused(tmp_path, entries, message, kind):
    path = write(tmp_path / "in" / "x.tar", [("ok.jpg", b"ok"), *entries], kind)
    with pytest.raises(SourceError, match=rf"shard '.*x\.tar': .*{message}.* byte [0-9]+ of"):
        ShardSource(path, labels="none")
    assert sorted(x.name for x in tmp_path.rglob("*.*") if "home" not in str(x)) == ["x.tar"]


def test_a_tar_without_its_end_is_said(tmp_path, shards, caplog):
    whole = (shards / "train-000.tar").read_bytes()
    with tarfile.open(shards / "train-000.tar") as tar:
        ends = [(m.offset_data + -(-m.size // 512) * 512, m.name) for m in tar if m.name.endswith("json")]
    for count, (end, _) in enumerate(ends, start=1):
        path = tmp_path / f"cut-{count}.tar"
        path.write_bytes(whole[:end])
        caplog.clear()
        assert len(ShardSource(path)) == count
        assert [r.levelname for r in caplog.records if "may be cut off" in r.message] == ["WARNING"]
    path.write_bytes(whole[: ends[-1][0] + 512])  # one empty block is enough, as for every tar
    caplog.clear()
    assert len(ShardSource(path)) == 10
    assert "may be cut off" not in caplog.text


def test_broken_tars_are_refused(tmp_path, shards):
    whole = (shards / "train-000.tar").read_bytes()
    end = max(m.offset + m.size for m in members(lambda at, n: whole[at : at + n], len(whole), path="x"))
    path = tmp_path / "x.tar"
    for at in (300, 512, 600, 1024 + 100, end - 1, end + 1 if end % 512 else end - 2):
        path.write_bytes(whole[:at])
        with pytest.raises(SourceError, match="cut off"):
            ShardSource(path)
    path.write_bytes(whole[: -(-end // 512) * 512])  # without the blocks that mark the end: nothing is missing
    assert len(ShardSource(path)) == 10
    for data, message in (
        (b"", "no images"), (b"\0" * 1024, "no images"), (b"hello" * 300, "no valid tar header"),
        (b"\x1f\x8b" + whole, "compressed"), (b"\xff" * 2048, "no valid tar header"),
    ):  # fmt: skip
        path.write_bytes(data)
        with pytest.raises(SourceError, match=message):
            ShardSource(path)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_damage_is_an_error_or_none(tmp_path_factory, data):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=data.draw(st.sampled_from(list(FORMATS.values())))) as tar:
        for name in ("a.jpg", "é/" * 45 + "x.jpg", "b.cls"):
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
    broken = bytearray(buffer.getvalue()[: data.draw(st.integers(0, 6000))])
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=5)):
        if at < len(broken):
            broken[at] = value
            header = at // 512 * 512  # with a checksum that fits, else every damage ends there
            if len(broken) >= header + 512:
                broken[header + 148 : header + 156] = b" " * 8
                broken[header + 148 : header + 156] = b"%06o\0 " % sum(broken[header : header + 512])
    try:
        for member in members(lambda at, n: bytes(broken[at : at + n]), len(broken), path="x"):
            assert 0 < member.offset <= member.offset + member.size <= len(broken)
            assert b".." not in member.name.split(b"/")
    except SourceError:
        pass


def header(kind, size, name=b"x"):
    """A header with a checksum that fits; ``size`` as its 12 bytes say it."""
    head = bytearray(512)
    head[: len(name)], head[124:136], head[156:157], head[257:265] = name, size, kind, b"ustar\x0000"
    head[148:156] = b"%06o\0 " % (sum(head) + 8 * 32)
    return bytes(head)


def steps(data, most):
    """Members of these bytes, or why there are none, and how many reads it took; more than ``most`` is an error."""
    reads = 0

    def read(at, size):
        nonlocal reads
        reads += 1
        assert reads <= most, "the reader does not end"
        assert at >= 0 <= size
        return data[at : at + size]

    try:
        return list(members(read, len(data), path="x")), reads
    except SourceError as error:
        return error, reads


NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 511, 512, -512, -1024, 65536, 65537, 1 << 62, -(1 << 62), (1 << 88) - 1, -(1 << 95)]),
    st.integers(-4096, 4096),
)


def octal_or_binary(number, binary):
    return number.to_bytes(12, "big", signed=True) if binary or abs(number) >= 8**10 else b"%011o\0" % number


@given(
    st.lists(
        st.one_of(
            st.builds(
                lambda kind, number, binary, text: (
                    header(kind, octal_or_binary(number, binary)) + text.ljust(512, b"\0")
                ),
                st.sampled_from([b"L", b"K", b"x", b"g", b"0", b"5", b"S", b"\0", b"Z"]),
                NUMBERS,
                st.booleans(),
                st.sampled_from([b"", b"13 size=-512\n", b"12 size=512\n", b"-9 a=b\n", b"6 a=b\n" * 80, b"y.jpg"]),
            ),
            st.binary(min_size=512, max_size=512),
            st.binary(max_size=30),
        ),
        max_size=12,
    ).map(b"".join)
)
@settings(max_examples=400, deadline=None)
@example(
    header(b"0", b"%011o\0" % 0, b"a.jpg") + header(b"L", octal_or_binary(-1024, True)) + bytes(1024)
)  # a header that leads backwards
def test_any_bytes_are_done_with_in_bounded_steps(data):
    found, _ = steps(data, 2 * len(data) // 512 + 2)
    if isinstance(found, list):
        assert [m.offset for m in found] == sorted({m.offset for m in found})


def test_a_shard_that_is_cut_later_costs_its_samples_only(shards, caplog):
    source = ShardSource(shards)
    with open(shards / "train-001.tar", "r+b") as file:
        file.truncate(4096)
    data, _, faults = read_all(source)
    assert set(faults) == set(range(10, 20))
    assert all("changed since it was indexed" in reason for reason in faults.values())
    assert data[0] == source[0][0]
    os.unlink(shards / "train-002.tar")
    _, _, faults = read_all(pickle.loads(pickle.dumps(source)))
    assert set(faults) == set(range(10, 30))


# -- remote places


@pytest.mark.parametrize("kind", ["s3", "http"])
def test_remote_shards_cost_one_range_for_each_sample(shards, kind, tmp_path, caplog):
    local = ShardSource(shards, index=tmp_path / "local")
    with remote_copy(kind, shards, "shards", concurrency=8) as (proxy, root, remote):
        root += "/train-{000..002}.tar"
        count, source = looked_at(caplog, root, remote=remote)
        assert count == 3
        assert keys(source) == keys(local)
        assert source.digest() == local.digest()
        proxy.reset()
        count, source = looked_at(caplog, root, remote=remote)
        assert count == 0
        assert not proxy.gets
        proxy.reset()
        proxy.latency = 0.05
        data, labels, faults = read_all(source, size=30)
        assert not faults
        assert data == {i: item[0] for i, item in enumerate(local)}
        assert labels == dict(enumerate(local.labels.tolist()))
        assert len(proxy.gets) == 30
        assert proxy.most == 8
        assert all(item[2] is not None for item in proxy.gets)
        proxy.latency, proxy.cut = 0.0, ("000", source._parts(7)[0].begin)
        _, _, faults = read_all(source)
        assert list(faults) == [7]
        if kind == "s3":
            folder, _ = root.rsplit("/", 1)
            assert keys(ShardSource(folder, remote=remote)) == keys(local)
