"""Parquet files and datasets of Hugging Face: rows, labels, row groups, damage, one read for each row group."""

import os
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import cut
from servers import remote_copy
from test_remote import read_all

import gpuaug
from gpuaug.errors import ConfigError, SourceError
from gpuaug.source import DatasetSource, FolderSource, ParquetSource, adapt


def images(first, count):
    return [np.random.default_rng(i).bytes(100 + 31 * i) for i in range(first, first + count)]


STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def table(data, *, struct=True, **columns):
    column = pa.array(data, pa.binary())
    if struct:
        rows = [None if d is None else {"bytes": d, "path": f"{i}.jpg"} for i, d in enumerate(data)]
        column = pa.array(rows, STRUCT)
    return pa.table({"image": column, **columns})


@pytest.fixture
def folder(tmp_path):
    """Three files with 23 rows, in row groups of 4."""
    root = tmp_path / "data"
    root.mkdir()
    for k, (first, count) in enumerate([(0, 10), (10, 1), (11, 12)]):
        labels = [i % 3 for i in range(first, first + count)]
        pq.write_table(table(images(first, count), label=labels), root / f"train-{k}.parquet", row_group_size=4)
    return root


def test_rows_are_samples(folder):
    source = ParquetSource(folder)
    assert len(source) == 23
    assert list(source) == [(data, i % 3) for i, data in enumerate(images(0, 23))]
    order = np.random.default_rng(0).permutation(23).tolist()
    assert [source[i] for i in order] == [(images(i, 1)[0], i % 3) for i in order]
    assert [source.key(i) for i in (0, 10, 22)] == ["train-0.parquet/0", "train-1.parquet/0", "train-2.parquet/11"]
    assert source.labels.tolist() == [i % 3 for i in range(23)]
    assert source.num_classes == 3
    assert source.classes is source.indices is source.read_many is None
    assert source._read(order) == [source[i] for i in order]
    for bad in (-1, 23):
        with pytest.raises(IndexError):
            source[bad]


def test_a_batch_reads_each_row_group_once(folder, monkeypatch):
    import gpuaug.source.parquet as module

    read = []
    real = module._images

    def spy(place, *more):
        read.append((place.file.path, place.number))
        return real(place, *more)

    monkeypatch.setattr(module, "_images", spy)
    source = ParquetSource(folder)
    order = np.random.default_rng(0).permutation(23).tolist()
    source._read(order)
    assert len(read) == len(set(read)) == 3 + 1 + 3
    read.clear()
    list(source)
    assert 5 <= len(read) <= 7  # in sequence: once each, without the groups in memory
    read.clear()
    for i in (0, 4, 1, 5, 2, 6):
        source[i]
    assert len(read) == 2


def test_what_a_shuffled_order_costs_is_said_with_the_remedy(folder, caplog):
    caplog.set_level("INFO", "gpuaug")
    ParquetSource(folder)
    assert "write small row groups" in caplog.text


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view()])
@pytest.mark.parametrize("struct", [False, True])
def test_every_type_of_bytes(tmp_path, kind, struct):
    data = images(0, 4)
    column = pa.array(data, type=kind)
    if struct:
        column = pa.StructArray.from_arrays([column, pa.array(["x"] * 4)], names=["bytes", "path"])
    pq.write_table(pa.table({"image": column}), tmp_path / "x.parquet")
    assert [x[0] for x in ParquetSource(tmp_path / "x.parquet")] == data


@pytest.mark.parametrize("struct", [False, True])
def test_a_column_with_a_dot_in_its_name(tmp_path, struct):
    data = images(0, 4)
    pq.write_table(table(data, struct=struct).rename_columns(["left.image"]), tmp_path / "X.PARQUET")
    assert [x[0] for x in ParquetSource(tmp_path / "X.PARQUET")] == data
    assert [x[0] for x in ParquetSource(tmp_path, image="left.image")] == data


def test_files_may_differ_in_whether_a_column_may_be_null(tmp_path):
    for name, nullable in (("a", False), ("b", True)):
        rows = table(images(0, 3), label=[1, 2, 3])
        field = pa.field("label", pa.int64(), nullable=nullable)
        pq.write_table(rows.set_column(1, field, rows["label"]), tmp_path / f"{name}.parquet")
    assert ParquetSource(tmp_path).labels.tolist() == [1, 2, 3, 1, 2, 3]


def test_columns(tmp_path, caplog):
    path = tmp_path / "x.parquet"
    data = images(0, 4)
    columns = {
        "labels": ["b", "a", "b", "c"],
        "age": [0.5, 1, 2, 3],
        "tags": [["x"], ["x", "y"], [], ["y"]],
        "many": [[1.0, 0], [0, 1], [0, 0], [1, 1]],
        "day": pa.array([1, 2, None, 3]),
    }
    pq.write_table(table(data, struct=False, **columns), path)
    names = ParquetSource(path)
    assert names.classes == ["a", "b", "c"]
    assert [x[1] for x in names] == [1, 0, 1, 2]
    assert ParquetSource(path, classes=["c", "b", "a"]).labels.tolist() == [1, 2, 1, 0]
    assert [x[1] for x in ParquetSource(path, label="age")] == [0.5, 1, 2, 3]
    tags = ParquetSource(path, label="tags")
    assert tags.classes == ["x", "y"]
    assert [x[1] for x in tags] == [[1, 0], [1, 1], [0, 0], [0, 1]]
    assert ParquetSource(path, label="many")[0] == (data[0], [1, 0])
    assert ParquetSource(path, label="none")[0] == (data[0], None)
    with pytest.raises(SourceError, match="the column 'day' of .* are null, the first in row x.parquet/2"):
        ParquetSource(path, label="day")
    large = table(data, label=pa.array([1 << 63, 0, 1, 2], pa.uint64()))
    pq.write_table(large, tmp_path / "large.parquet")
    with pytest.raises(SourceError, match="must be below 2\\*\\*63"):
        ParquetSource(tmp_path / "large.parquet")
    with pytest.raises(SourceError, match=r"source\.label.*no 'nothing'.*: labels, age"):
        ParquetSource(path, label="nothing")
    with pytest.raises(SourceError, match=r"source\.image.*'age'"):
        ParquetSource(path, image="age")
    with pytest.raises(ConfigError, match=r"source\.classes"):
        ParquetSource(path, label="none", classes=["a"])
    two = table(data, struct=False).append_column("mask", pa.array(data, pa.large_binary()))
    pq.write_table(two, tmp_path / "two.parquet")
    with pytest.raises(SourceError, match="2 columns .* have bytes"):
        ParquetSource(tmp_path / "two.parquet")
    assert ParquetSource(tmp_path / "two.parquet", image="mask")[1] == (data[1], None)
    pq.write_table(pa.table({"x": [1]}), tmp_path / "none.parquet")
    with pytest.raises(SourceError, match="0 columns"):
        ParquetSource(tmp_path / "none.parquet")
    pq.write_table(table([]), tmp_path / "empty.parquet")
    with pytest.raises(SourceError, match="no rows"):
        ParquetSource(tmp_path / "empty.parquet")
    with pytest.raises(SourceError, match="must have the columns of the first file"):
        ParquetSource([tmp_path / "two.parquet", path], image="mask")


def test_nulls_are_faults_of_their_sample(tmp_path):
    for struct in (True, False):
        data = [*images(0, 3), None, b"", *images(5, 3)]
        pq.write_table(table(data, struct=struct, label=list(range(8))), tmp_path / "x.parquet", row_group_size=5)
        found, labels, faults = read_all(ParquetSource(tmp_path / "x.parquet"))
        assert found == {i: d or b"" for i, d in enumerate(data)}
        assert list(faults) == [3, 4]
        assert "has no image bytes" in faults[3]
        assert labels == {i: i for i in range(8)}


def test_damage_costs_its_row_group_only(folder):
    source = ParquetSource(folder)
    path = folder / "train-0.parquet"
    chunk = pq.read_metadata(path).row_group(1).column(0)
    begin, size = chunk.dictionary_page_offset or chunk.data_page_offset, chunk.total_compressed_size
    status = path.stat()
    with open(path, "r+b") as file:
        file.seek(begin)
        file.write(bytes(size))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a disk does it
    found, labels, faults = read_all(source)
    assert set(faults) == {4, 5, 6, 7}
    assert all("row group 1 of" in reason for reason in faults.values())
    assert all(found[i] == images(i, 1)[0] for i in found if i not in faults)
    assert labels[4] == 1
    path.write_bytes(path.read_bytes()[:-1])
    _, _, faults = read_all(pickle.loads(pickle.dumps(source)))
    assert set(faults) == set(range(10))
    for bad in (b"", b"PAR1", b"PAR1" + b"\xff" * 100 + b"PAR1", path.read_bytes()):
        (folder / "bad.parquet").write_bytes(bad)
        with pytest.raises(SourceError, match=r"bad\.parquet' cannot be read as a Parquet file"):
            ParquetSource(folder)


@pytest.mark.parametrize("kind", ["s3", "http"])
def test_remote_files_cost_one_range_for_each_row_group(folder, kind):
    with remote_copy(kind, folder, "parquet", concurrency=5, tries=2) as (proxy, root, remote):
        source = ParquetSource(root, remote=remote)
        local = ParquetSource(folder)
        assert source.digest() == local.digest()
        assert source.labels.tolist() == local.labels.tolist()
        source = pickle.loads(pickle.dumps(source))
        source._read([0, 10, 11])  # footers
        proxy.reset()
        proxy.latency = 0.05
        order = np.random.default_rng(0).permutation(23).tolist()
        assert source._read(order) == [local[i] for i in order]
        assert len(proxy.gets) == 7 - 2  # two are at hand
        assert proxy.most == 5
        proxy.latency = 0.0
        proxy.trouble = lambda path, count: 500 if "train-2" in path else None
        _, _, faults = read_all(pickle.loads(pickle.dumps(source)))
        assert set(faults) == set(range(11, 23))
        assert all("tried 2 times" in reason for reason in faults.values())


def test_datasets_of_hugging_face(tmp_path, caplog):
    import datasets

    root = cut(tmp_path / "photos", 2)
    local = FolderSource(root)
    features = datasets.Features(
        {"image": datasets.Image(decode=False), "label": datasets.ClassLabel(names=local.classes)}
    )
    rows = {"image": [{"bytes": x[0], "path": None} for x in local], "label": [x[1] for x in local]}
    dataset = datasets.Dataset.from_dict(rows, features=features)
    unknown = dataset.remove_columns("label").add_column("kind", [None, *rows["label"][1:]])
    with pytest.raises(
        SourceError, match="labels in the column 'kind' of 'datasets.Dataset' are null, the first in row 0"
    ):
        DatasetSource(unknown, label="kind")
    source = adapt(dataset)
    assert list(source) == list(local)
    assert source.classes == local.classes
    assert source.labels.tolist() == local.labels.tolist()
    assert source.key(3) == "3"
    shuffled = dataset.shuffle(seed=0).with_format("torch")
    assert sorted(x[1] for x in adapt(shuffled)) == local.labels.tolist()
    of_files = datasets.load_dataset(
        "imagefolder", data_dir=str(root), split="train", cache_dir=str(tmp_path / "cache")
    )
    with pytest.raises(SourceError, match=r"cast_column\('image', datasets\.Image\(decode=False\)\)"):
        adapt(of_files)
    plain = adapt(of_files.cast_column("image", datasets.Image(decode=False)))
    assert sorted(plain) == sorted(local)
    with pytest.raises(SourceError, match="0 columns .* have bytes"):
        adapt(dataset.remove_columns("image"))
    found, _, _ = read_all(source, num_workers=1, start_method="spawn")
    assert found == {i: x[0] for i, x in enumerate(local)}
    # and what they write
    dataset.to_parquet(tmp_path / "x" / "train.parquet")
    written = ParquetSource(tmp_path / "x")
    assert list(written) == list(local)
    assert written.classes == local.classes
    again = ParquetSource(tmp_path / "x", classes=local.classes[::-1])
    assert again.labels.tolist() == [len(local.classes) - 1 - label for label in local.labels.tolist()]
    augment = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(32))
    with gpuaug.Loader(dataset, augment=augment, batch_size=4, device="cpu", num_workers=0) as loader:
        assert sum(len(batch) for batch in loader) == len(local)


def test_a_shuffled_dataset_of_hugging_face_is_another_source():
    import datasets

    features = datasets.Features({"image": datasets.Image(decode=False), "label": datasets.Value("int64")})
    rows = {"image": [{"bytes": b"x", "path": None}] * 20, "label": [*range(20)]}
    dataset = datasets.Dataset.from_dict(rows, features=features)
    same = [dataset, dataset.select(range(20)), dataset.with_format("torch")]
    others = [dataset.shuffle(seed=seed) for seed in (0, 1)]
    others += [dataset.train_test_split(0.5, seed=seed)["train"] for seed in (0, 1)]
    assert len({adapt(each).digest() for each in same}) == 1
    assert len({adapt(each).digest() for each in [dataset, *others]}) == 5
    assert adapt(dataset.shuffle(seed=0)).digest() == adapt(others[0]).digest()


def test_labels_of_another_name_are_asked_for(tmp_path):
    import datasets

    names = datasets.ClassLabel(names=["a", "b"])
    image, rows = datasets.Image(decode=False), [{"bytes": b"x", "path": None}] * 3

    def both(**columns):
        """The same rows as a Dataset and as what it writes."""
        features = datasets.Features({"image": image, **{name: kind for name, (kind, _) in columns.items()}})
        values = {"image": rows, **{name: value for name, (_, value) in columns.items()}}
        dataset = datasets.Dataset.from_dict(values, features=features)
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.parquet"
        dataset.to_parquet(path)
        return (lambda **more: DatasetSource(dataset, **more)), (lambda **more: ParquetSource(path, **more)), dataset

    text = datasets.Value("string")
    *makers, dataset = both(fine_label=(names, [0, 1, 1]), coarse_label=(names, [1, 0, 0]), caption=(text, ["x"] * 3))
    with pytest.raises(SourceError, match=r"no label or labels.*: fine_label, coarse_label, caption.*label='none'"):
        adapt(dataset)
    for make in makers:
        with pytest.raises(SourceError, match=r"no label or labels.*: fine_label, coarse_label, caption"):
            make()
        with pytest.raises(SourceError, match=r"no 'fine'.*: fine_label"):
            make(label="fine")
        assert make(label="fine_label").labels.tolist() == [0, 1, 1]
        assert make(label="coarse_label").classes == ["a", "b"]
        assert make(label="caption").classes == ["x"]
        for none in (None, "none"):
            assert make(label=none).labels is make(label=none)[0][1] is None
    for make in both(caption=(text, ["x", "y", "x"]), kind=(names, [1, 0, 1]))[:2]:
        assert make().labels.tolist() == [1, 0, 1]  # the only one with classes
    for make in both(caption=(text, ["x", "y", "x"]))[:2]:
        with pytest.raises(SourceError, match=": caption"):
            make()
    for make in both()[:2]:
        assert make().labels is None  # images alone: nothing is left aside


def test_without_pyarrow(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SourceError, match=r"pip install gpuaug\[parquet\]"):
        ParquetSource(tmp_path)


def test_a_column_name_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"im\u00e4ge": [b"a"]}), path)
    path.write_bytes(path.read_bytes().replace("\u00e4".encode(), b"\xff\xff"))
    with pytest.raises(SourceError, match=r"x\.parquet.*utf-8"):
        ParquetSource(path, label="none")
