"""Masks and objects in Parquet files: forms of columns, damaged rows, reads of row groups, whole batches; in tables."""

import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from servers import remote_copy
from test_shard_targets import EVERY, K_POINTS, loader, read, same, same_batches, scene, wanted

import gpuaug
from gpuaug.errors import ConfigError, ReadError, SourceError
from gpuaug.source import ParquetSource, TableSource

NAMES = ("boxes", "labels", "keypoints", "crowd", "area", "ids")
STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def columns_of(target, *, nested=False) -> dict:
    """Lists with COCO's names."""
    boxes = target.boxes.tolist()
    return {
        "id": target.ids.tolist(),
        "bbox": [[x1, y1, x2 - x1, y2 - y1] for x1, y1, x2, y2 in boxes],
        "category": target.labels.tolist(),
        "iscrowd": target.crowd.astype(int).tolist(),
        "area": target.area.tolist(),
        "keypoints": [points.tolist() if nested else points.reshape(-1).tolist() for points in target.keypoints],
        "segmentation": ["x"] * len(boxes),
    }


def rows_of(target, **more) -> list[dict]:
    columns = columns_of(target, **more)
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def fields(kind, points):
    return [
        ("id", kind(pa.int64())), ("bbox", kind(pa.list_(pa.float32(), 4))), ("category", kind(pa.int32())),
        ("iscrowd", kind(pa.int8())), ("area", kind(pa.float64())), ("keypoints", kind(points)),
        ("segmentation", kind(pa.string())),
    ]  # fmt: skip


FLAT, POINTS = pa.list_(pa.float32()), pa.list_(pa.list_(pa.float64()))
FORMS = {
    "struct of lists": (pa.struct(fields(pa.list_, FLAT)), columns_of),
    "struct of large lists": (pa.struct(fields(pa.large_list, FLAT)), columns_of),
    "list of structs": (pa.list_(pa.struct(fields(lambda kind: kind, FLAT))), rows_of),
    "points in lists": (
        pa.list_(pa.struct(fields(lambda kind: kind, POINTS))), lambda target: rows_of(target, nested=True)
    ),
    "guessed": (None, columns_of),
}  # fmt: skip


def table(count: int, form="struct of lists", *, change=None, **more) -> pa.Table:
    kind, make = FORMS[form]
    scenes = [scene(i) for i in range(count)]
    objects = [make(target) for _, target in scenes]
    for i, value in (change or {}).items():
        objects[i] = value(objects[i]) if callable(value) else value
    return pa.table(
        {
            "image_id": list(range(count)),
            "image": pa.array([{"bytes": image, "path": f"{i}.jpg"} for i, (image, _) in enumerate(scenes)], STRUCT),
            "width": [target.size[1] for _, target in scenes],
            "height": [target.size[0] for _, target in scenes],
            "mask": pa.array([{"bytes": target.mask, "path": "x" * 9} for _, target in scenes], STRUCT),
            "objects": pa.array(objects, kind),
            **more,
        }
    )


ALL = {"image": "image", "mask": "mask", "objects": "objects"}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_objects(tmp_path, form):
    pq.write_table(table(9, form), tmp_path / "a.parquet", row_group_size=4)
    pq.write_table(table(5, form), tmp_path / "b.parquet")
    source = ParquetSource(tmp_path, mask="mask", objects="objects")
    assert source.target_kinds == {"masks", "boxes", "keypoints"}
    assert source.num_keypoints == K_POINTS
    assert source.labels is source.classes is None
    for i, (image, target) in enumerate(source):
        number = i if i < 9 else i - 9
        assert image == scene(number)[0]
        same(target, scene(number)[1])
        same(source.label(i), gpuaug.Target(**{name: getattr(target, name) for name in NAMES}, size=target.size))
    assert source._objects.bounds.is_shared()
    assert len(source.objects_digest()) == 32


def test_what_is_asked_for(tmp_path):
    pq.write_table(table(6, label=[0, 1, 2, 0, 1, 2]), tmp_path / "x.parquet")
    path = tmp_path / "x.parquet"
    plain = ParquetSource(path, image="image")
    assert plain.target_kinds == frozenset()
    assert list(plain) == [(scene(i)[0], i % 3) for i in range(6)]
    masks = ParquetSource(path, mask="mask")
    assert masks.target_kinds == {"masks"}
    assert masks[4] == (scene(4)[0], gpuaug.Target(mask=scene(4)[1].mask, label=1))
    assert masks.digest() == plain.digest()
    boxes = ParquetSource(path, image="image", objects="objects", label="none")
    assert boxes.target_kinds == {"boxes", "keypoints"}
    assert boxes[3][1].mask is boxes[3][1].label is None
    for bad, message in (
        ({"mask": "objects"}, r"`source\.mask` must be a column of bytes"),
        ({"image": "mask", "mask": "mask"}, r"`source\.image` must be a column of bytes"),
        ({"objects": "nothing", "image": "image"}, r"`source\.objects` must be a column"),
        ({"objects": "image_id", "image": "image"}, r"`source\.objects` must be a column .* with boxes"),
        ({"objects": 3}, r"`source\.objects` must be text"),
        ({}, "2 columns .* have bytes"),
    ):
        with pytest.raises((SourceError, ConfigError), match=message):
            ParquetSource(path, **bad)
    with pytest.raises(ConfigError, match="needs a source with masks"):
        loader(boxes)


def test_classes_of_objects(tmp_path):
    kind = pa.list_(pa.struct([("bbox", pa.list_(pa.int32())), ("category", pa.string())]))
    rows = [[{"bbox": [1, 2, 3, 4], "category": name} for name in names] for names in ("ba", "", "c")]
    pq.write_table(pa.table({"image": [b"x"] * 3, "objects": pa.array(rows, kind)}), tmp_path / "x.parquet")
    source = ParquetSource(tmp_path / "x.parquet", objects="objects")
    assert source.classes == ["a", "b", "c"]
    assert [item[1].labels.tolist() for item in source] == [[1, 0], [], [2]]
    assert source.target_kinds == {"boxes"}
    assert source.num_keypoints is source[0][1].size is None
    other = ParquetSource(tmp_path / "x.parquet", objects="objects", classes=["c", "x", "b", "a"])
    assert other.num_classes == 4
    assert [item[1].labels.tolist() for item in other] == [[2, 3], [], [0]]
    with pytest.raises(SourceError, match="lacks 2 labels"):
        ParquetSource(tmp_path / "x.parquet", objects="objects", classes=["c"])


def changed(name, value):
    """Replace the entry of the first object."""

    def change(columns):
        columns[name] = [value, *columns[name][1:]]
        return columns

    return change


def shorter(name):
    return lambda columns: {**columns, name: columns[name][1:]}


DAMAGE = {
    "null row": (None, "is null"),
    "null column": (lambda columns: {**columns, "category": None}, "`category` is null"),
    "fewer classes": (shorter("category"), "`category` has 2 entries, but `bbox` has 3"),
    "fewer boxes": (shorter("bbox"), "but `bbox` has 2"),
    "null box": (changed("bbox", None), "`bbox` of each object must be 4 numbers"),
    "three numbers": (changed("bbox", [1, 2, 3]), "`bbox` of each object must be 4 numbers"),
    "null number": (changed("bbox", [1, 2, None, 3]), r"box of annotation ID must be finite .*Found: \[1.0, 2.0, nan"),
    "infinite box": (changed("bbox", [1, 2, 1e39, 3]), "box of annotation ID must be finite"),
    "inverted box": (changed("bbox", [1, 2, -4, 3]), "box of annotation ID must be .* x1 <= x2"),
    "area": (changed("area", 1e39), "area of annotation ID must be finite, in float32. Found: inf"),
    "negative id": (changed("id", -2), "id of object . must be at least 0"),
    "null class": (changed("category", None), "`category` of an object is null"),
    "negative class": (changed("category", -1), "class of .* must be 0 .. "),
    "points": (changed("keypoints", [1, 2, 2]), "`keypoints` of each object must be 9 numbers"),
    "visibility": (changed("keypoints", [1, 2, 3] * 3), "keypoints of annotation ID must be finite, with visibility"),
    "null point": (changed("keypoints", [1, 2, None] * 3), "keypoints of annotation ID must be finite, with vis"),
}


@pytest.fixture
def loose(monkeypatch):
    """A form whose boxes may have any length."""
    kind = pa.struct([(name, pa.list_(FLAT) if name == "bbox" else kind) for name, kind in fields(pa.list_, FLAT)])
    monkeypatch.setitem(FORMS, "loose", (kind, columns_of))
    return "loose"


def test_a_damaged_row_is_a_fault_of_its_sample(tmp_path, loose, caplog):
    damaged = dict(zip(range(3, 4 * len(DAMAGE), 4), DAMAGE.values(), strict=True))  # rows with three objects
    change = {row: change for row, (change, _) in damaged.items()}
    pq.write_table(table(4 * len(DAMAGE), loose, change=change), tmp_path / "x.parquet", row_group_size=3)
    with caplog.at_level("WARNING", "gpuaug"):
        source = ParquetSource(tmp_path / "x.parquet", **ALL)
    assert f"the objects of {len(DAMAGE)} of {len(source)} samples cannot be used; sample 3" in caplog.text
    for row, (_, message) in damaged.items():
        message = message.replace("ID", str(10 * row))
        with pytest.raises(ReadError, match=rf"the objects of 'x\.parquet/{row}' cannot be used: .*{message}"):
            source[row]
    found, faults = read(source)
    assert sorted(faults) == sorted(damaged)
    assert found == {i: value for i, value in wanted(len(source)).items() if i not in faults}


def test_damage_of_fixed_lists_and_of_everything(tmp_path):
    change = {3: changed("bbox", None), 5: None}
    pq.write_table(table(8, change=change), tmp_path / "x.parquet")
    source = ParquetSource(tmp_path / "x.parquet", **ALL)
    found, faults = read(source)
    assert sorted(faults) == [3, 5]
    assert found == {i: value for i, value in wanted(8).items() if i not in faults}
    pq.write_table(table(3, change=dict.fromkeys(range(3))), tmp_path / "y.parquet")
    with pytest.raises(SourceError, match="3 of 3 samples cannot be used"):
        ParquetSource(tmp_path / "y.parquet", **ALL)
    wrong = pa.struct([("bbox", pa.list_(pa.list_(pa.string())))])
    rows = pa.table({"image": [b"x"], "objects": pa.array([{"bbox": [["1"]]}], wrong)})
    pq.write_table(rows, tmp_path / "z.parquet")
    with pytest.raises(SourceError, match=r"must hold numbers\. Found: bbox of type"):
        ParquetSource(tmp_path / "z.parquet", objects="objects")


def test_optional_numbers_may_be_null(tmp_path):
    kind = pa.list_(pa.struct(fields(lambda kind: kind, FLAT)))
    row = {"bbox": [1, 2, 3, 4], "category": 5}
    full = {**row, "area": 7.5, "iscrowd": 1, "id": 9, "keypoints": [4, 5, 2]}
    rows = pa.table({"image": [b"x"], "objects": pa.array([[row, full]], kind), "width": [0], "height": [0]})
    pq.write_table(rows, tmp_path / "x.parquet")
    source = ParquetSource(tmp_path / "x.parquet", objects="objects")
    target = source[0][1]
    assert target.boxes.tolist() == [[1, 2, 4, 6]] * 2
    np.testing.assert_array_equal(target.area, [np.nan, 7.5])
    assert target.crowd.tolist() == [False, True]
    assert target.ids.tolist() == [-1, 9]
    assert target.keypoints.tolist() == [[[0, 0, 0]], [[4, 5, 2]]]
    assert target.size is None
    empty = pa.table({"image": [b"x"] * 2, "objects": [{"bbox": [], "category": []}] * 2})
    pq.write_table(empty, tmp_path / "y.parquet")
    assert [len(item[1].boxes) for item in ParquetSource(tmp_path / "y.parquet", objects="objects")] == [0, 0]


def test_remote_images_and_masks_are_one_read_if_they_are_adjacent(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    pq.write_table(table(12), root / "near.parquet", row_group_size=4)
    noise = [np.random.default_rng(i).bytes(40_000) for i in range(12)]
    rows = table(12).select(["image", "objects", "height", "width"]).append_column("noise", pa.array(noise))
    pq.write_table(rows.append_column("mask", table(12).column("mask")), root / "far.parquet", row_group_size=4)
    with remote_copy("s3", root, "parquet", concurrency=8, tries=2) as (proxy, url, remote):
        for name, each in (("near", 1), ("far", 2)):
            source = pickle.loads(pickle.dumps(ParquetSource(f"{url}/{name}.parquet", remote=remote, **ALL)))
            source._read([0])  # its footer
            source._reset()
            source._locate(0)
            proxy.reset()
            for i, (image, target) in enumerate(source.read_many(range(12))):
                assert image == scene(i)[0]
                same(target, scene(i)[1])
            assert len(proxy.gets) == 3 * each
        assert read(source, num_workers=1) == (wanted(12), {})


def test_batches_are_those_of_a_list(tmp_path):
    pq.write_table(table(12), tmp_path / "x.parquet", row_group_size=5)
    same_batches(ParquetSource(tmp_path / "x.parquet", **ALL), 12, num_workers=1)


# -- tables of paths


def test_masks_of_a_table(tmp_path):
    name = "t.csv"
    for i in range(6):
        (tmp_path / f"{i}.jpg").write_bytes(scene(i)[0])
        (tmp_path / f"{i}.png").write_bytes(scene(i)[1].mask)
    lines = [(f"{i}.jpg", f"./{i}.png", i % 2) for i in range(6)]
    (tmp_path / name).write_text("path,seg,label\n" + "".join(f"{a},{b},{c}\n" for a, b, c in lines))
    source = TableSource(tmp_path / name, mask="seg")
    assert source.target_kinds == {"masks"}
    assert list(source) == [(scene(i)[0], gpuaug.Target(mask=scene(i)[1].mask, label=i % 2)) for i in range(6)]
    assert source.label(3) == gpuaug.Target(label=1)
    plain = TableSource(tmp_path / name)
    assert list(plain) == [(scene(i)[0], i % 2) for i in range(6)]
    assert plain.digest() == source.digest()
    (tmp_path / "2.png").unlink()
    with pytest.raises(FileNotFoundError):
        source[2]
    with loader(source, gpuaug.Targets(masks=gpuaug.Masks()), faults=gpuaug.Faults(policy="drop")) as made:
        assert sorted(i for batch in made for i in batch.indices.tolist()) == [0, 1, 3, 4, 5]
    with pytest.raises(ConfigError, match="needs a source with boxes"):
        loader(source, EVERY)
    with pytest.raises(SourceError, match="must have one column 'nothing'"):
        TableSource(tmp_path / name, mask="nothing")
    (tmp_path / name).write_text("path,seg,label\n1.jpg,../1.png,3\n")
    with pytest.raises(SourceError, match="must be relative"):
        TableSource(tmp_path / name, mask="seg")


def test_masks_and_images_of_a_table_may_be_named_by_digits(tmp_path):
    for name in ("1", "7", "007"):
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "t.csv").write_text("path,seg,label\n1,007,3\n7,7,5\n")
    source = TableSource(tmp_path / "t.csv", mask="seg")
    assert list(source) == [(b"1", gpuaug.Target(mask=b"007", label=3)), (b"7", gpuaug.Target(mask=b"7", label=5))]
    for text, row in (("path,seg,label\n1,7,3\n7,,5\n", 1), ("path,seg,label\n1,/7,3\n", 0)):
        (tmp_path / "t.csv").write_text(text)
        with pytest.raises(SourceError, match=f"paths in .* must be relative .* row {row}: '"):
            TableSource(tmp_path / "t.csv", mask="seg")
