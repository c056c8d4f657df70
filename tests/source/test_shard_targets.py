"""Masks and objects in tar shards: forms of JSON, reads of a sample's members, faults, whole batches."""

import json
import logging
import sys

import forked
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import encode, photograph, png, write_tar
from servers import remote_copy

import gpuaug
from gpuaug.errors import ConfigError, GpuaugError, SourceError
from gpuaug.read.reader import Reader
from gpuaug.source import ShardSource
from gpuaug.source.object_json import parse

K_POINTS = 3
SIZES = [(48, 64), (61, 47), (40, 40)]  # (height, width)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def scene(i: int) -> tuple[bytes, gpuaug.Target]:
    """A photograph with a mask, 0 to 3 objects and their keypoints; all numbers are exact in float32."""
    rng = np.random.default_rng(i)
    h, w = SIZES[i % len(SIZES)]
    count = i % 4
    corner = rng.integers(0, 20, (count, 2))
    boxes = np.concatenate([corner, corner + rng.integers(5, 20, (count, 2))], axis=1) + 0.5
    points = np.concatenate([rng.integers(0, 40, (count, K_POINTS, 2)), rng.integers(0, 3, (count, K_POINTS, 1))], 2)
    target = gpuaug.Target(
        mask=png(rng.integers(0, 5, (h, w)).astype(np.uint8)), boxes=boxes, labels=rng.integers(0, 9, count),
        keypoints=points.astype(float), crowd=rng.integers(0, 2, count) > 0, area=boxes[:, 2] * 2,
        ids=np.arange(count) + 10 * i, size=(h, w),
    )  # fmt: skip
    return encode(photograph(size=(w, h)), quality=90), target


def rows_of(target) -> list[dict]:
    """COCO's annotations of a target."""
    return [
        {
            "id": int(target.ids[k]), "bbox": [x1, y1, x2 - x1, y2 - y1], "category_id": int(target.labels[k]),
            "iscrowd": int(target.crowd[k]), "area": float(target.area[k]), "segmentation": [[1, 2, 3]],
            "keypoints": target.keypoints[k].reshape(-1).tolist(), "num_keypoints": K_POINTS,
        }
        for k, (x1, y1, x2, y2) in enumerate(target.boxes.tolist())
    ]  # fmt: skip


def columns_of(target) -> dict:
    """The same as columns with the names of gpuaug.Target."""
    names = ("boxes", "labels", "keypoints", "crowd", "area", "ids")
    return {name: getattr(target, name).tolist() for name in names}


def with_size(target, fields: dict) -> dict:
    return {"height": target.size[0], "width": target.size[1], **fields}


FORMS = {
    "rows in objects": lambda t: with_size(t, {"objects": rows_of(t), "caption": "x"}),
    "rows in annotations": lambda t: with_size(t, {"annotations": rows_of(t)}),
    "size of the image": lambda t: {"image": with_size(t, {"id": 3}), "annotations": rows_of(t)},
    "columns": lambda t: with_size(t, columns_of(t)),
    "columns in objects": lambda t: with_size(t, {"objects": columns_of(t)}),
    "columns of COCO": lambda t: with_size(
        t,
        {
            "bbox": [row["bbox"] for row in rows_of(t)],
            **{name: [row[name] for row in rows_of(t)] for name in ("category_id", "id", "iscrowd", "area")},
            "keypoints": [row["keypoints"] for row in rows_of(t)],
        },
    ),
}


def entries_of(i: int, form="rows in objects", mask="seg.png"):
    image, target = scene(i)
    text = json.dumps(FORMS[form](target)).encode()
    return [(f"{i:03}.jpg", image), (f"{i:03}.json", text), (f"{i:03}.{mask}", target.mask)]


@pytest.fixture
def shards(tmp_path):
    root = tmp_path / "shards"
    for k in range(2):
        write_tar(root / f"train-{k}.tar", [entry for i in range(6 * k, 6 * k + 6) for entry in entries_of(i)])
    return root


ALL = {"masks": "seg.png", "objects": "json", "num_keypoints": K_POINTS}


def same(found, want, names=("boxes", "labels", "keypoints", "crowd", "area", "ids")) -> None:
    assert found.size == want.size
    assert found.mask == want.mask
    for name in names:
        np.testing.assert_array_equal(getattr(found, name), getattr(want, name))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_objects(tmp_path, form):
    path = write_tar(tmp_path / "x.tar", [entry for i in range(8) for entry in entries_of(i, form)])
    source = ShardSource(path, **ALL)
    assert source.target_kinds == {"masks", "boxes", "keypoints"}
    assert source.labels is source.classes is None
    for i, (image, target) in enumerate(source):
        wanted = scene(i)
        assert image == wanted[0]
        same(target, wanted[1])
        assert source.label(i) == gpuaug.Target()


def test_boxes_alone_and_formats():
    one = parse(b'[{"bbox": [1, 2, 3, 4]}, {"bbox": [5, 6.5, 7, 8]}]')
    assert one.keys() == {"boxes"}
    assert one["boxes"].tolist() == [[1, 2, 4, 6], [5, 6.5, 12, 14.5]]
    assert parse(b'{"boxes": [[1, 2, 3, 4]]}')["boxes"].tolist() == [[1, 2, 3, 4]]
    for empty in (b"[]", b'{"objects": []}', b'{"bbox": [], "category_id": []}', b'{"annotations": {"bbox": []}}'):
        assert parse(empty)["boxes"].shape == (0, 4)
    names = parse(b'[{"bbox": [1, 2, 3, 4], "category": "dog"}]', classes={"cat": 0, "dog": 1})
    assert names["labels"].tolist() == [1]
    some = parse(
        b'[{"bbox": [1, 2, 3, 4]}, {"bbox": [1, 2, 3, 4], "keypoints": [5, 6, 2], "id": 7, "area": null}]',
        num_keypoints=1,
    )
    assert some["keypoints"].tolist() == [[[0, 0, 0]], [[5, 6, 2]]]
    assert some["ids"].tolist() == [-1, 7]
    assert np.isnan(some["area"]).all()


BAD = {
    "empty": (b"", "Expecting value"),
    "cut": (b'{"objects": [{"bbo', "Unterminated"),
    "bytes": (b"\xff\xfe\x00", "utf-16|truncated"),
    "number": (b"3", "must be a list of objects"),
    "no boxes": (b'{"caption": "x"}', "must have a field objects, annotations, bbox or boxes. Found: 'caption'"),
    "null objects": (b'{"objects": null}', "must be a list of objects"),
    "object without box": (
        b'[{"bbox": [1, 2, 3, 4]}, {"category_id": 3}]',
        "the entries of `bbox` must have the same length",
    ),
    "no box at all": (b'[{"category_id": 3}]', "`bbox` must be numbers of shape .n, 4."),
    "object without class": (
        b'[{"bbox": [1, 2, 3, 4], "category_id": 3}, {"bbox": [1, 2, 3, 4]}]',
        "`category_id` must be whole numbers",
    ),
    "object that is none": (b"[3]", "object 0 must have named fields"),
    "three numbers": (b'[{"bbox": [1, 2, 3]}]', "`bbox` must "),
    "text": (b'[{"bbox": ["1", "2", "3", "4"]}]', "`bbox` must "),
    "ragged": (b'[{"bbox": [1, 2, 3, 4]}, {"bbox": [1, 2]}]', "`bbox` must have the same length"),
    "huge": (b'[{"bbox": [1, 2, 3, 1%s]}]' % (b"0" * 400), "`bbox` must "),
    "name": (b'[{"bbox": [1, 2, 3, 4], "category": "dog"}]', "`source.classes`"),
    "half a class": (b'[{"bbox": [1, 2, 3, 4], "category_id": 1.5}]', "must be (whole numbers|below)"),
    "large id": (b'[{"bbox": [1, 2, 3, 4], "id": 9223372036854775808}]', "must be (whole numbers|below)"),
    "negative id": (b'[{"bbox": [1, 2, 3, 4], "id": -2}]', "id of object 0 must be at least 0"),
    "negative class": (b'[{"bbox": [1, 2, 3, 4], "category_id": -1}]', "class of object 0 must be 0 .. "),
    "large class": (
        b'[{"bbox": [1, 2, 3, 4], "category_id": 2147483648}]',
        "class of object 0 must be 0 .. 2147483647",
    ),
    "area": (b'[{"bbox": [1, 2, 3, 4], "area": 1e39}]', "area of object 0 must be finite, in float32. Found: inf"),
    "infinite box": (b'[{"bbox": [1, 2, 3, 1e39]}]', "box of object 0 must be finite"),
    "inverted box": (b'[{"bbox": [1, 2, -3, 4], "id": 8}]', "box of annotation 8 must be .* x1 <= x2"),
    "lengths": (b'{"bbox": [[1, 2, 3, 4]], "category_id": []}', "differ in length"),
    "no list": (b'{"bbox": 3}', "`bbox` must be a list"),
    "crowd": (b'[{"bbox": [1, 2, 3, 4], "iscrowd": "yes"}]', "`iscrowd` must be whole|differ in length"),
    "crowd of lists": (b'[{"bbox": [1, 2, 3, 4], "iscrowd": [[]]}]', "`iscrowd` must be whole|differ in length"),
    "points": (b'[{"bbox": [1, 2, 3, 4], "keypoints": [1, 2]}]', "`keypoints` of each object must be 9 numbers"),
    "points no list": (b'[{"bbox": [1, 2, 3, 4], "keypoints": {}}]', "`keypoints` of each object must be 9 numbers"),
    "visibility": (b'[{"bbox": [1, 2, 3, 4], "keypoints": [1, 2, 3, 1, 2, 3, 1, 2, 3]}]', "visibility 0, 1 or 2"),
    "size": (b'{"width": 0, "height": 3, "objects": []}', "must be whole numbers above 0"),
}


def test_other_json_is_a_fault_of_its_sample(tmp_path):
    good, entries = len(BAD), []
    for i, (data, _) in enumerate(BAD.values()):
        image, _, mask = entries_of(i)
        entries += [image, (f"{i:03}.json", data), mask]
    source = ShardSource(write_tar(tmp_path / "x.tar", entries + entries_of(good)), **ALL)
    targets, faults = read(source)
    assert sorted(faults) == [*range(good)]
    for i, (_, message) in enumerate(BAD.values()):
        with pytest.raises(GpuaugError, match=rf"the json of 'x.tar/{i:03}.jpg' cannot be used: .*{message}") as raised:
            source[i]
        assert str(raised.value) in faults[i]
    assert targets == {good: wanted(good + 1)[good]}


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(), st.text(max_size=3), st.just(1 << 70)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["objects", "bbox", "boxes", "label", "id", "area", "iscrowd", "keypoints", "width", "x"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=20,
)


@given(JSON, st.sampled_from([None, 1]))
@settings(max_examples=100)
def test_any_json_is_objects_or_a_value_error(value, points):
    try:
        found = parse(json.dumps(value).encode(), num_keypoints=points)
    except ValueError:
        return
    count = len(found["boxes"])
    assert found["boxes"].shape == (count, 4)
    assert all(len(column) == count for name, column in found.items() if name != "size")


def read(source, **settings):
    """Boxes by sample, and faults, as a reader in workers gives them."""
    from test_remote import batches

    reader = Reader(source, timeout=300, targets=("masks", "boxes"), **settings)
    found, faults = {}, {}
    try:
        for batch in reader.batches(batches(reader.source, 4)):
            bad = {fault.row: fault.reason for fault in batch.faults}
            faults |= {int(batch.indices[row]): reason for row, reason in bad.items()}
            for row, i in enumerate(batch.indices.tolist()):
                if row not in bad:
                    a, b = batch.targets.offsets[row : row + 2]
                    found[i] = bytes(batch.images[row]), bytes(batch.masks[row]), batch.targets.boxes[a:b].tolist()
    finally:
        reader.close()
    return found, faults


def wanted(count: int) -> dict:
    return {i: (image, target.mask, target.boxes.tolist()) for i in range(count) for image, target in [scene(i)]}


def test_json_that_is_nested_deeply_does_not_end_a_worker(tmp_path):
    deep = b"[" * 1_000_000 + b"]" * 1_000_000
    entries = [entry for i in range(5) for entry in entries_of(i)]
    for k, text in enumerate([deep, b'{"objects": [{"bbox": ' + deep + b"}]}", b'{"a":' * 1_000_000]):
        entries[3 * k + 1] = (entries[3 * k + 1][0], text)
    path = write_tar(tmp_path / "x.tar", entries)
    program = (
        "import sys; sys.path[:0] = sys.argv[2:]; from test_shard_targets import ALL, read; import gpuaug\n"
        "found, faults = read(gpuaug.ShardSource(sys.argv[1], **ALL), num_workers=1, start_method='fork')\n"
        "print(sorted(found), *faults.values())"
    )
    done = forked.run(forked.code(program, path, *sys.path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[3, 4] ")
    assert done.stdout.count("nested too deeply") == 3


# -- members


def test_without_the_new_arguments_nothing_changes(shards):
    plain = ShardSource(shards, labels="none", extensions=["jpg"])
    (index,) = shards.glob(".gpuaug-*.index")
    assert list(plain) == [(scene(i)[0], None) for i in range(12)]
    assert plain.target_kinds == frozenset()
    assert plain._places.shape == (12, 2)
    other = ShardSource(shards, extensions=["jpg"], **ALL)
    assert other.digest() == plain.digest()
    assert [other.key(i) for i in range(12)] == [plain.key(i) for i in range(12)]
    assert len([*shards.glob(".gpuaug-*.index")]) == 2
    assert index.exists()


def test_which_members_are_masks(tmp_path, caplog):
    image, target = scene(1)
    plain = write_tar(tmp_path / "p.tar", [("a.png", target.mask), ("a.jpg", image), ("b.png", target.mask)])
    with caplog.at_level(logging.WARNING, "gpuaug"):
        source = ShardSource(plain, masks="png")
    assert "1 samples without an image or png are left out: 'b'" in caplog.text
    assert source.target_kinds == {"masks"}
    assert list(source) == [(image, gpuaug.Target(mask=target.mask))]
    picture = png(np.zeros((4, 5), np.uint8))
    upper = write_tar(tmp_path / "u.tar", [("a.png", picture), ("a.SEG.png", target.mask), ("a.cls", b"3")])
    assert list(ShardSource(upper, masks=".seg.png")) == [(picture, gpuaug.Target(mask=target.mask))]
    labelled = ShardSource(upper, masks="seg.png", labels="cls")
    assert labelled[0] == (picture, gpuaug.Target(mask=target.mask, label=3))
    assert labelled.label(0) == gpuaug.Target(label=3)
    assert labelled.labels.tolist() == [3]
    with pytest.raises(SourceError, match=r"Needed: .* with json\. Check .*`source\.objects`"):
        ShardSource(upper, objects="json")


def test_arguments(shards):
    for bad in ({"masks": 3}, {"masks": "json", "objects": "json"}, {"num_keypoints": 3}, {"objects": ""},
                {"objects": "json", "num_keypoints": 0}):  # fmt: skip
        with pytest.raises(ConfigError, match=r"`source\.(masks|objects|num_keypoints)`"):
            ShardSource(shards, **bad)
    named = ShardSource(shards, objects="json", classes=[f"c{i}" for i in range(9)])
    assert named.target_kinds == {"boxes"}
    assert named.num_classes == 9
    assert named[1][1].labels.tolist() == scene(1)[1].labels.tolist()
    few = ShardSource(shards, objects="json", classes=["a"])
    with pytest.raises(GpuaugError, match=r"must be 0 \.\. 0"):
        [few[i] for i in range(12)]
    with pytest.raises(ConfigError, match="needs a source with masks.*Set `targets=none`"):
        loader(named, gpuaug.Targets(masks=gpuaug.Masks()))


@pytest.mark.parametrize("kind", ["s3", "http"])
def test_remote_members_are_one_read_if_they_are_adjacent(tmp_path, kind):
    far = [
        ("far.jpg", scene(7)[0]),
        ("far.npy", bytes(200_000)),
        ("far.json", b"[]"),
        ("far.seg.png", scene(7)[1].mask),
    ]
    root = tmp_path / "shards"
    write_tar(root / "a.tar", [entry for i in range(6) for entry in entries_of(i)])
    write_tar(root / "b.tar", far)
    with remote_copy(kind, root, "shards", concurrency=8, tries=2) as (proxy, url, remote):
        source = ShardSource([f"{url}/a.tar", f"{url}/b.tar"], remote=remote, **ALL)
        proxy.reset()
        items = source.read_many(range(6))
        assert len(proxy.gets) == 6
        for i, (image, target) in enumerate(items):
            assert image == scene(i)[0]
            same(target, scene(i)[1])
        proxy.reset()
        assert source[6][1].mask == scene(7)[1].mask
        assert len(proxy.gets) == 2
        found, faults = read(source, num_workers=1)
        assert not faults
        assert {i: found[i] for i in range(6)} == wanted(6)
        proxy.cut = ("a.tar", source._parts(2)[0].begin)
        found, faults = read(source)
        assert list(faults) == [2]
        assert {i: found[i] for i in (0, 1, 3, 4, 5)} == {i: x for i, x in wanted(6).items() if i != 2}


def test_large_members_are_read_one_by_one(tmp_path):
    big = scene(0)[0] + bytes(17 << 20)  # a JPEG may have bytes after its end
    text = json.dumps(rows_of(scene(1)[1])).encode()
    entries = [("a.json", text), ("a.jpg", big), ("a.seg.png", scene(1)[1].mask)]
    source = ShardSource(write_tar(tmp_path / "x.tar", entries), **ALL)
    assert len(source._parts(0)) == 3
    image, target = source[0]
    assert image == big
    assert target.mask == scene(1)[1].mask
    np.testing.assert_array_equal(target.boxes, scene(1)[1].boxes)
    wide = [("a.json", b" " * (17 << 20)), *entries[1:]]
    with pytest.raises((OSError, GpuaugError)):
        ShardSource(write_tar(tmp_path / "y.tar", wide), **ALL)[0]


# -- whole batches


class Listed:
    """The same scenes from memory, under the same keys."""

    target_kinds = frozenset({"masks", "boxes", "keypoints"})
    num_keypoints = K_POINTS

    def __init__(self, count: int) -> None:
        self.items = [scene(i) for i in range(count)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int):
        return self.items[index]


EVERY = gpuaug.Targets(masks=gpuaug.Masks(), boxes=gpuaug.Boxes(crowd="keep"), keypoints=gpuaug.Keypoints())


def loader(source, targets=EVERY, **settings):
    augment = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(32, scale=(0.5, 1)))
    usual = {"batch_size": 5, "num_workers": 0, "seed": 3, "device": "cpu"}
    return gpuaug.Loader(source, augment=augment, targets=targets, **usual | settings)


def same_batches(source, count: int, **settings) -> None:
    """Batches of the source are those of :class:`Listed`."""
    with loader(source, **settings) as made, loader(Listed(count)) as other:
        total = 0
        for a, b in zip(made, other, strict=True):
            assert a.indices.tolist() == b.indices.tolist()
            assert (a.images == b.images).all()
            for name in ("masks", "boxes", "labels", "keypoints", "sample", "ids", "crowd", "matrices"):
                assert getattr(a.targets, name).tolist() == getattr(b.targets, name).tolist(), name
            total += len(a.targets.boxes)
        assert total > 5


@pytest.mark.parametrize("settings", [{}, {"num_workers": 1}])
def test_batches_are_those_of_a_list(shards, settings):
    same_batches(ShardSource(shards, **ALL), 12, **settings)
