"""Extra fields: every source gives the values that other libraries read, and `batch.extra` has them in order."""

import csv
import json
import pickle
import re

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from common import loader, recipe
from pictures import encode, photograph, write_tar
from torch.utils.data import Subset

import gpuaug
from gpuaug.decode.decoder import Decode
from gpuaug.errors import ConfigError, DataError, ReadError, SourceError
from gpuaug.read.reader import Reader
from gpuaug.source import DatasetSource, ParquetSource, ShardSource, TableSource, adapt
from gpuaug.tools.pack.command import pack
from gpuaug.tools.pack.job import Pack

N = 11
CAPTIONS = ["a dog", "eine Katze, größer", "犬\nと 'quotes\"", "", " space ", *(f"number {i}" for i in range(5, N))]
META = [{"width": 10 * i, "tags": ["x"] * (i % 3), "score": i / 4, "note": None} for i in range(N)]
IMAGES = [encode(photograph(size=(40 + i, 30)), quality=60) for i in range(N)]
PILLOW = Decode(backend="pillow")  # starts at once


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def shards(place):
    """Two shards; a sample is .jpg, .json, .txt, .cls and .npy."""
    for k, numbers in enumerate((range(6), range(6, N))):
        write_tar(place / f"{k}.tar", [
            (f"{i:03}.{kind}", data)
            for i in numbers
            for kind, data in (("jpg", IMAGES[i]), ("json", json.dumps(META[i]).encode()),
                               ("txt", CAPTIONS[i].encode()), ("cls", b"%d" % (i % 3)), ("npy", bytes([i, 0, 255])))
        ])  # fmt: skip
    return place


def table(place, ending):
    place.mkdir(exist_ok=True)
    for i, data in enumerate(IMAGES):
        (place / f"{i}.jpg").write_bytes(data)
    columns = {"path": [f"{i}.jpg" for i in range(N)], "label": [i % 3 for i in range(N)], "caption": CAPTIONS}
    columns["url"] = [f"https://example.org/{i}" for i in range(N)]
    with open(place / f"t{ending}", "w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, delimiter="\t" if ending == ".tsv" else ",")
        lines.writerows([list(columns), *zip(*columns.values(), strict=True)])
    return place / f"t{ending}"


def parquet(place):
    """Two files with row groups of 4."""
    place.mkdir(exist_ok=True)
    for k, (begin, end) in enumerate(((0, 7), (7, N))):
        rows = slice(begin, end)
        image = pa.array([{"bytes": data, "path": None} for data in IMAGES[rows]])
        columns = {
            "image": image,
            "caption": CAPTIONS[rows],
            "meta": META[rows],
            "raw": [b"%d" % i for i in range(N)][rows],
        }
        columns["label"] = [i % 3 for i in range(N)][rows]
        pq.write_table(pa.table(columns), place / f"{k}.parquet", row_group_size=4)
    return place


def dataset():
    columns = {"image": [{"bytes": data, "path": None} for data in IMAGES], "caption": CAPTIONS, "meta": META}
    made = datasets.Dataset.from_dict({**columns, "label": [i % 3 for i in range(N)]})
    return made.cast_column("image", datasets.Image(decode=False))


class Plain:
    """Samples with extras as a source of the user's own; ``act`` changes an item."""

    def __init__(self, act=lambda i, item: item):
        self.act = act

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.act(i, (IMAGES[i], i % 3, CAPTIONS[i]))


MAKERS = {
    "shards": lambda place: ShardSource(shards(place), extra="txt"),
    "csv": lambda place: TableSource(table(place, ".csv"), extra="caption"),
    "tsv": lambda place: TableSource(table(place, ".tsv"), extra="caption"),
    "parquet": lambda place: ParquetSource(parquet(place), image="image", extra="caption"),
    "dataset": lambda place: DatasetSource(dataset(), extra="caption"),
    "plain": lambda place: adapt([(IMAGES[i], i % 3, CAPTIONS[i]) for i in range(N)]),
}


@pytest.mark.parametrize("name", MAKERS)
def test_every_source_gives_the_same_samples(name, tmp_path):
    source = MAKERS[name](tmp_path / "data")
    assert [source[i] for i in range(N)] == [(IMAGES[i], i % 3, CAPTIONS[i]) for i in range(N)]
    assert pickle.loads(pickle.dumps(source))[4] == (IMAGES[4], 4 % 3, " space ")
    with loader(source, decode=PILLOW, batch_size=4) as batches:
        for batch in batches:
            assert batch.extra == [CAPTIONS[i] for i in batch.indices.tolist()]


def test_shards_are_read_as_webdataset_reads_them(tmp_path):
    import webdataset

    source = ShardSource(shards(tmp_path / "data"), labels="none", extra=["txt", "json", "npy"])
    theirs = webdataset.WebDataset([str(tmp_path / f"data/{k}.tar") for k in range(2)], shardshuffle=False)
    for i, sample in enumerate(theirs):
        texts = {"txt": sample["txt"].decode(), "json": json.loads(sample["json"]), "npy": sample["npy"]}
        assert source[i] == (sample["jpg"], None, texts)
    assert source.digest() == ShardSource(tmp_path / "data").digest()
    objects = {"objects": [{"bbox": [1, 2, 3, 4], "category_id": 1}]}
    write_tar(tmp_path / "targets" / "a.tar", [("a.jpg", IMAGES[0]), ("a.json", json.dumps(objects).encode())])
    image, target, extra = ShardSource(tmp_path / "targets", objects="json", extra="json")[0]  # one member, two uses
    assert (image, extra) == (IMAGES[0], objects)
    assert target.boxes.tolist() == [[1, 2, 4, 6]]


def test_a_sample_without_the_member_has_none_and_keeps_its_number(tmp_path, caplog):
    members = [("a.jpg", IMAGES[0]), ("a.txt", b"first"), ("b.jpg", IMAGES[1]), ("c.jpg", IMAGES[2]), ("c.txt", b"")]
    write_tar(tmp_path / "data" / "a.tar", [*members, ("d.jpg", IMAGES[3]), ("d.txt", b"\xff"), ("d.json", b"[")])
    source = ShardSource(tmp_path / "data", labels="none", extra="TXT")
    assert [source[i] for i in range(3)] == [(IMAGES[0], None, "first"), (IMAGES[1], None, None), (IMAGES[2], None, "")]
    assert not [r for r in caplog.records if "left out" in r.message]
    with pytest.raises(gpuaug.GpuaugError, match=r"the extra of 'a\.tar/d\.jpg' cannot be used: its txt is not valid"):
        source[3]
    with pytest.raises(gpuaug.GpuaugError, match=r"its json is not valid"):
        ShardSource(tmp_path / "data", labels="none", extra=["json"])[3]
    with loader(source, decode=PILLOW, faults=gpuaug.Faults(policy="blank"), shuffle=False) as batches:
        (batch,) = batches
    assert batch.extra == ["first", None, "", None]
    assert batch.valid.tolist() == [True, True, True, False]


def test_a_large_extra_is_not_taken_for_an_image(tmp_path, monkeypatch):
    text, raw = b"x" * 20_000_000, b"y" * 17_000_000
    members = [(f"{name}.{kind}", data) for name in "ab" for kind, data in
               (("jpg", IMAGES[0]), ("txt", text), ("npy", raw))]  # fmt: skip
    write_tar(tmp_path / "data" / "a.tar", members)
    source = ShardSource(tmp_path / "data", labels="none", extra=["txt", "npy"])
    for i in range(2):
        assert source[i] == (IMAGES[0], None, {"txt": text.decode(), "npy": raw})
    monkeypatch.setattr("gpuaug.source.shards.LARGEST_FILE", 18_000_000)
    with pytest.raises(SourceError, match=r"'a\.txt' has 20000000 bytes.*at most 18000000"):
        ShardSource(tmp_path / "data", labels="none", extra=["npy", "txt"])
    write_tar(tmp_path / "large" / "a.tar", [("a.jpg", raw), ("a.txt", b"")])
    with pytest.raises(OSError, match="not an image"):
        ShardSource(tmp_path / "large", labels="none", extra="txt")[0]


def test_several_names_make_a_dict_in_their_order(tmp_path):
    names = ["url", "caption"]
    wanted = [{"url": f"https://example.org/{i}", "caption": CAPTIONS[i]} for i in range(N)]
    source = TableSource(table(tmp_path / "data", ".csv"), extra=names)
    assert [item[2] for item in source] == wanted
    assert list(source[0][2]) == names
    text = TableSource(tmp_path / "data/t.csv", label="none", extra="label")
    assert text[4][1:] == (None, "1")  # as in the file
    rows = ParquetSource(parquet(tmp_path / "rows"), image="image", extra=["meta", "raw", "label"])
    assert [rows[i][2] for i in (10, 0, 5)] == [{"meta": META[i], "raw": b"%d" % i, "label": i % 3} for i in (10, 0, 5)]
    assert ParquetSource(tmp_path / "rows", extra="raw")[9] == (IMAGES[9], 0, b"9")  # not taken for the image
    assert DatasetSource(dataset(), extra=["meta", "caption"])[7][2] == {"meta": META[7], "caption": CAPTIONS[7]}
    no_label = dataset().remove_columns("label")
    assert DatasetSource(no_label, extra="caption")[1] == (IMAGES[1], None, CAPTIONS[1])


def test_values_that_are_null_large_or_not_valid(tmp_path):
    def made(content, name="t.csv"):
        (tmp_path / name).write_bytes(content)
        return TableSource(tmp_path / name, label="none", extra="caption")

    with pytest.raises(SourceError, match="line 2: field larger than field limit .*use `source=parquet`"):
        made(b"path,caption\na.jpg," + b"x" * 200_000)
    latin = b"path,caption\n\na\xfc.jpg,fine\nb.jpg,f\xfcr alle\n"
    with pytest.raises(
        SourceError, match=r"line 4 of .*'caption' must be UTF-8\. Found: b'\\xfcr alle'\. Save the table"
    ):
        made(latin)
    (tmp_path / "t.csv").write_bytes(latin)
    assert TableSource(tmp_path / "t.csv", label="none").key(0) == "a\udcfc.jpg"  # names of files are bytes
    for content in (b'path\tcaption\na.jpg\tfine\nb.jpg\t"Hi\nc.jpg\tx\n', b'path\tcaption\na\tb\nb.jpg\t"Hi" all\n'):
        with pytest.raises(SourceError, match=r"t\.tsv' cannot be read: line 3: .*double those inside.*or use `source"):
            made(content, "t.tsv")


@pytest.mark.parametrize("name", ["shards", "csv", "parquet", "dataset"])
def test_a_wrong_name_is_refused_with_the_names_that_exist(name, tmp_path):
    make = {
        "shards": lambda extra: ShardSource(tmp_path / "data", extra=extra),
        "csv": lambda extra: TableSource(tmp_path / "data/t.csv", extra=extra),
        "parquet": lambda extra: ParquetSource(tmp_path / "data", image="image", extra=extra),
        "dataset": lambda extra: DatasetSource(dataset(), extra=extra),
    }[name]
    MAKERS[name](tmp_path / "data")
    with pytest.raises(SourceError, match=r"`source\.extra` must name .*'captoin'.*(caption|txt)"):
        make("captoin")
    for bad in ("", [], [3], ["label", "label"], 3, {"a": 1}):
        with pytest.raises(ConfigError, match=r"`source\.extra` must be a name, a list of different names, or null"):
            make(bad)


def test_members_that_cannot_be_extras_say_why(tmp_path):
    write_tar(tmp_path / "one" / "a.tar", [("a.jpg", IMAGES[0]), ("a.txt", b"x"), ("b.jpg", IMAGES[1])])
    with pytest.raises(SourceError, match=r"Extensions found: 'jpg', 'txt'. Needed: jpeg, png.*source\.extensions"):
        ShardSource(tmp_path / "one", labels="none", extra="jpg")
    apart = [("a.jpg", IMAGES[0]), ("b.jpg", IMAGES[1]), ("a.txt", b"x"), ("b.txt", b"y")]
    write_tar(tmp_path / "two" / "a.tar", apart)
    rule = "must stand next to each other, with the same name up to its first dot"
    with pytest.raises(SourceError, match=rf"'txt', which no sample has.*{rule}.*Extensions found: 'jpg', 'txt'"):
        ShardSource(tmp_path / "two", labels="none", extra="txt")
    with pytest.raises(SourceError, match=rf"Extensions found: .*'txt'.*{rule}"):
        ShardSource(tmp_path / "two", labels="txt")


# -- reading and loading


def orders(count, size):
    for first in range(0, count, size):
        numbers = torch.arange(first, min(first + size, count))
        yield numbers, numbers * 0, numbers >= 0


def test_workers_change_no_value(tmp_path):
    source = ShardSource(shards(tmp_path / "data"), extra=["json", "npy", "txt"])
    found = Reader(source, num_workers=2)
    batches = list(found.batches(orders(N, 4)))
    found.close()
    assert [value for batch in batches for value in batch.extra] == [source[i][2] for i in range(N)]
    assert [type(value["npy"]) for value in batches[0].extra] == [bytes] * 4


def test_a_batch_without_extras():
    (batch,) = Reader([(b"x", 0), (b"y", 1, None)]).batches(orders(2, 2))
    assert batch.extra is None
    with loader([(IMAGES[0], 0), (IMAGES[1], 1)], decode=PILLOW) as batches:
        (batch,) = batches
    assert batch.extra == [None, None]


def test_values_that_cannot_be_sent_are_named():
    found = Reader(Plain(lambda i, item: (*item[:2], memoryview(b"x"))), num_workers=1, start_method="fork")
    with pytest.raises(SourceError, match=r"an extra, the third value of a sample, cannot be pickled.*memoryview"):
        list(found.batches(orders(N, 4)))
    found.close()
    with pytest.raises(SourceError, match=r"\(bytes, label, extra\).*Found: tuple"):
        list(Reader(Plain(lambda i, item: (*item, "more"))).batches(orders(N, 4)))


class NotRead(Exception):
    """An exception that pickle writes, but cannot read: it takes two arguments, and stores one."""

    def __init__(self, first, second):
        super().__init__(first)


def test_a_value_that_cannot_be_unpickled_is_named():
    source = Plain(lambda i, item: (*item[:2], NotRead(1, 2) if i == 6 else item[2]))
    found = Reader(source, num_workers=1, start_method="fork")
    message = r"an extra, .* cannot be unpickled: TypeError.*second.* from '4' to '7'.*Give text"
    with pytest.raises(SourceError, match=message):
        list(found.batches(orders(N, 4)))
    found.close()


def test_bad_samples(tmp_path):
    def act(i, item):
        if i == 2:
            raise ReadError("unreachable")
        return (b"no image", *item[1:]) if i == 5 else item

    settings = {"decode": PILLOW, "shuffle": False, "batch_size": N}
    with loader(Plain(act), faults=gpuaug.Faults(policy="blank"), **settings) as batches:
        (batch,) = batches
    assert batch.valid.nonzero().flatten().tolist() == [i for i in range(N) if i not in (2, 5)]
    assert batch.extra == [
        None if i == 2 else text for i, text in enumerate(CAPTIONS)
    ]  # it was read if only its image is bad
    with loader(Plain(act), faults=gpuaug.Faults(policy="drop"), **settings) as batches:
        (batch,) = batches
    assert batch.extra == [CAPTIONS[i] for i in batch.indices.tolist()]
    assert len(batch) == N - 2
    with loader(Plain(act), **settings) as batches, pytest.raises(DataError):
        list(batches)


def test_extras_stay_with_their_sample(tmp_path):
    """Views, mix, ranks with padding, subsets, a resume, `fetch` and `to`."""
    source = ShardSource(shards(tmp_path / "data"), extra="txt")
    views = gpuaug.MultiView(views={"a": recipe(), "b": recipe()})
    mix = gpuaug.Mix(mixup_alpha=1.0)
    usual = {"decode": PILLOW, "batch_size": 4}

    def check(batches):
        seen = []
        for batch in batches:
            assert batch.extra == [CAPTIONS[i] for i in batch.indices.tolist()]
            seen.append(batch)
        return seen

    for settings in ({"augment": views}, {"mix": mix}, {"last": "pad", "rank": 1, "world_size": 2}):
        with loader(source, **usual, **settings) as batches:
            seen = check(batches)
            assert len(seen) > 1
    assert not seen[-1].valid.all()  # padding
    with loader(Subset(source, [9, 1, 4]), **usual) as batches:
        assert sorted(check(batches)[0].extra) == sorted(CAPTIONS[i] for i in (1, 4, 9))
    with loader(source, **usual) as first, loader(ShardSource(tmp_path / "data", extra="npy"), **usual) as second:
        running = iter(first)
        next(running)
        second.load_state_dict(first.state_dict())  # other extras do not change the samples
        rest = [i for batch in running for i in batch.indices.tolist()]
        assert [value for batch in second for value in batch.extra] == [bytes([i, 0, 255]) for i in rest]
    with loader(source, **usual) as batches:
        batch = batches.fetch([5, 0, 5])
        assert batch.extra == batch.to("cpu").extra == [CAPTIONS[5], CAPTIONS[0], CAPTIONS[5]]


# -- stored copies


def test_pack_keeps_them(tmp_path):
    source = ShardSource(shards(tmp_path / "data"), extra=["txt", "json"])
    settings = {"decode": PILLOW, "faults": gpuaug.Faults(), "num_workers": 0}
    pack(source, tmp_path / "out", what=Pack(sizes=[16, 24], samples=4), **settings)
    packed = gpuaug.PackedSource(tmp_path / "out", size={0: 16, 1: 24})
    with loader(packed, decode=PILLOW, batch_size=4) as batches:
        for _ in range(2):
            for batch in batches:
                assert batch.extra == [{"txt": CAPTIONS[i], "json": META[i]} for i in batch.indices.tolist()]
    with pytest.raises(ConfigError, match="extra"):
        other = ShardSource(tmp_path / "data", extra="txt")
        pack(other, tmp_path / "out", what=Pack(sizes=[16, 24], samples=4), **settings)
    with pytest.raises(ConfigError, match=r"stores the values as JSON.*b'\\x00\\x00\\xff' of '0\.tar/000\.jpg'"):
        pack(ShardSource(tmp_path / "data", extra="npy"), tmp_path / "raw", what=Pack(), **settings)


def test_pack_refuses_what_json_changes(tmp_path):
    values = [{"a": [1.5, None], "b": float("-inf")}, None, "NaN"]
    settings = {"what": Pack(), "decode": PILLOW, "faults": gpuaug.Faults(), "num_workers": 0}
    pack(Plain(lambda i, item: (*item[:2], values[i % 3])), tmp_path / "out", **settings)
    packed = gpuaug.PackedSource(tmp_path / "out")
    assert [packed[i][2] for i in range(N)] == [values[i % 3] for i in range(N)]
    for bad in (float("nan"), (1, 2), {"a": (1,)}, {1: "a"}, [{"a": {"b": float("nan")}}]):
        message = rf"`source\.extra` must give .*not NaN.*Found: {re.escape(repr(bad))} of '0'\. Remove `source\.extra`"
        with pytest.raises(ConfigError, match=message):
            pack(Plain(lambda i, item, bad=bad: (*item[:2], bad)), tmp_path / "bad", **settings)
