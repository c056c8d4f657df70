"""What is the same for every source of annotations: a bucket gives the samples of its folder, workers get the index."""

import json
import pickle

import pytest
import test_coco
import test_voc
import test_yolo
from servers import bucket_of, options, s3
from test_table import write as write_table

import gpuaug
from gpuaug.batch import Target
from gpuaug.source import Remote


def coco(root):
    test_coco.write(root, test_coco.one([[[0, 0, 3, 0, 3, 3]], [[0, 0, 3, 3]]]))  # the second outline has two points


def table(root):
    test_yolo.write(root, {"a": None, "b": None})
    names = ["images/train/b.jpg", "images/train/a.jpg"]
    write_table(root, path=names, seg=names[::-1], label=[1, 0])


MAKERS = {
    "coco": (coco, lambda root, **more: gpuaug.CocoSource(root, split="train2017", masks="instances", **more)),
    "yolo": (
        lambda root: test_yolo.write(root, {"a": "1 .5 .5 .5 .5", "b c": None, "d": "0 x", "e": "2 0 0 1 0 1 .5"}),
        gpuaug.YoloSource,
    ),
    "voc": (lambda root: test_voc.write(root, test_voc.OBJECTS | {"bad": b"<a>", "none": None}), gpuaug.VocSource),
    "table": (table, lambda root, **more: gpuaug.TableSource(f"{root}/t.csv", mask="seg", **more)),
}


def told(item):
    """A sample as JSON; the end of an error's message, which has no root."""
    if isinstance(item, Exception):
        return str(item).rpartition("/")[2]
    data, label = item
    if isinstance(label, Target):
        names = ("boxes", "labels", "ids", "crowd", "size", "fractions")
        label = {name: getattr(label, name) for name in names} | {"mask": bytes(label.mask or b"").hex()}
    return json.dumps([data.hex(), label], default=lambda value: value.tolist())


@pytest.fixture(scope="module")
def port():
    with s3() as port:
        yield port


@pytest.mark.parametrize("name", MAKERS)
def test_a_bucket_is_the_same_as_its_folder(name, tmp_path, port):
    write, make = MAKERS[name]
    (tmp_path / "set").mkdir()
    write(tmp_path / "set")
    local = make(tmp_path / "set")
    url = bucket_of(port, tmp_path / "set", f"photos-{name}")
    there = make(url, remote=Remote(options=options(f"http://127.0.0.1:{port}"), cache=tmp_path / "cache"))
    assert (there.digest(), there.objects_digest()) == (local.digest(), local.objects_digest())
    numbers = [*reversed(range(len(local))), 0]
    assert [*map(told, there.read_many(numbers))] == [*map(told, local._read(numbers))]
    again = pickle.loads(pickle.dumps(local))
    assert [*map(told, again._read(numbers))] == [*map(told, local._read(numbers))]
    targets = (item[1] for item in local._read(numbers) if not isinstance(item, Exception))
    assert all(target._checked for target in targets if isinstance(target, Target))  # not again in each batch
