"""What is the same for every source: a bucket gives the samples of its folder, workers and subsets share its index."""

import json
import pickle

import pyarrow.parquet as pq
import pytest
import test_coco
import test_mask_folder
import test_parquet
import test_parquet_targets
import test_shard_targets
import test_shards
import test_source
import test_voc
import test_yolo
import torch
from common import METHODS
from pictures import write_tar
from servers import bucket_of, options, s3
from test_coco import tensors
from test_table import write as write_table

import gpuaug
from gpuaug.batch import Target
from gpuaug.source import Remote


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def coco(root):
    test_coco.write(root, test_coco.one([[[0, 0, 3, 0, 3, 3]], [[0, 0, 3, 3]]]))  # the second outline has two points


def table(root):
    test_yolo.write(root, {"a": None, "b": None})
    names = ["images/train/b.jpg", "images/train/a.jpg"]
    write_table(root, path=names, seg=names[::-1], label=[1, 0])


def parquet(root):
    images = test_parquet.images(100, 6)  # 3 KB each
    pq.write_table(test_parquet.table(images, label=[3, 1, 2, 0, 1, 2]), root / "a.parquet", row_group_size=2)


def objects_in_shards(root):
    write_tar(root / "a.tar", [entry for i in range(3) for entry in test_shard_targets.entries_of(i)])


MAKERS = {
    "folder": (lambda root: test_source.fill(root, "b/1.jpg", "a/2.jpg", "a/1.png"), gpuaug.FolderSource),
    "shards": (lambda root: test_shards.write(root / "a.tar", test_shards.samples(0, 5)), gpuaug.ShardSource),
    "shards-of-objects": (
        objects_in_shards,
        lambda root, **more: gpuaug.ShardSource(root, **test_shard_targets.ALL, **more),
    ),
    "parquet": (parquet, gpuaug.ParquetSource),
    "parquet-of-objects": (
        lambda root: pq.write_table(test_parquet_targets.table(4), root / "a.parquet", row_group_size=3),
        lambda root, **more: gpuaug.ParquetSource(root, **test_parquet_targets.ALL, **more),
    ),
    "masks": (test_mask_folder.write, gpuaug.MaskFolderSource),
    "coco": (coco, lambda root, **more: gpuaug.CocoSource(root, split="train2017", masks="instances", **more)),
    "yolo": (
        lambda root: test_yolo.write(root, {"a": "1 .5 .5 .5 .5", "b c": None, "d": "0 x", "e": "2 0 0 1 0 1 .5"}),
        gpuaug.YoloSource,
    ),
    "voc": (lambda root: test_voc.write(root, test_voc.OBJECTS | {"bad": b"<a>", "none": None}), gpuaug.VocSource),
    "table": (table, lambda root, **more: gpuaug.TableSource(f"{root}/t.csv", mask="seg", **more)),
}


def made(name, root):
    write, make = MAKERS[name]
    root.mkdir()
    write(root)
    return make(root)


def told(item):
    """A sample as JSON; the end of an error's message, which has no root."""
    if isinstance(item, Exception):
        return str(item).rpartition("/")[2]
    data, label = item
    if isinstance(label, Target):
        names = ("boxes", "labels", "keypoints", "ids", "crowd", "size", "fractions")
        label = {name: getattr(label, name) for name in names} | {"mask": bytes(label.mask or b"").hex()}
    return json.dumps([bytes(data).hex(), label], default=lambda value: value.tolist())


@pytest.fixture(scope="module")
def port():
    with s3() as port:
        yield port


@pytest.mark.parametrize("name", MAKERS)
def test_a_bucket_is_the_same_as_its_folder(name, tmp_path, port):
    local, make = made(name, tmp_path / "set"), MAKERS[name][1]
    url = bucket_of(port, tmp_path / "set", f"photos-{name}")
    there = make(url, remote=Remote(options=options(f"http://127.0.0.1:{port}"), cache=tmp_path / "cache"))
    there = pickle.loads(pickle.dumps(there))  # as for workers
    assert (there.digest(), there.objects_digest()) == (local.digest(), local.objects_digest())
    numbers = [*reversed(range(len(local))), 0]
    assert [*map(told, there.read_many(numbers))] == [*map(told, local._read(numbers))]
    targets = (item[1] for item in local._read(numbers) if not isinstance(item, Exception))
    checked = [target._checked for target in targets if isinstance(target, Target) and target.boxes is not None]
    assert all(checked) or "shards" in name  # not again in each batch; a shard's objects are read with their image
    (tmp_path / "bad.jsonl").write_text(json.dumps({"key": local.key(0)}) + "\n")
    some = make(tmp_path / "set", subset=[0, 1], exclude=tmp_path / "bad.jsonl")
    assert some.indices.tolist() == [1]  # samples keep their numbers
    assert some.digest() == local.digest()
    assert [*map(told, some._read([1]))] == [*map(told, local._read([1]))]


def read_in_child(sources, queue):
    queue.put([[*map(told, source._read(range(len(source))))] for source in sources])


@pytest.mark.parametrize("method", [method for method in METHODS if method != "forkserver"])  # as spawn
def test_workers_share_the_index_and_read(method, tmp_path):
    sources = [made(name, tmp_path / name) for name in MAKERS]
    items = [[*map(told, source._read(range(len(source))))] for source in sources]  # with files that are open here
    for name, source in zip(MAKERS, sources, strict=True):
        assert len(pickle.dumps(source)) < 10_000, name  # without the rows that it keeps
        assert tensors(source), name
        assert all(tensor.is_shared() for tensor in tensors(source)), name
    context = torch.multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=read_in_child, args=(sources, queue))
    child.start()
    assert queue.get(timeout=300) == items
    child.join()
