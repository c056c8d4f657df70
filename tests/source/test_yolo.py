"""YOLO's data sets: boxes, polygons and keypoints against formulas, bad lines, the YAML file, paths, URLs."""

import os
import re

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import encode, photograph

import gpuaug
from gpuaug.errors import ConfigError, GpuaugError, SourceError
from gpuaug.source.yolo import parse_labels

NAMES = ["person", "dog", "cat"]
IMAGE = encode(photograph("coffee", (23, 31)))


def write(root, labels, *, split="train", data=None, images="images/{}", ending=".jpg"):
    """One image for each key of ``labels``, and its label file unless the text is None."""
    folder = images.format(split)
    for stem, text in labels.items():
        path = root / folder / (stem + ending)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(IMAGE)
        if text is not None:
            path = root / re.sub("images(?!.*images)", "labels", folder) / (stem + ".txt")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
    data = {"train": "images/train", "val": "images/val", "names": NAMES} if data is None else data
    (root / "data.yaml").write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return root


def read(text, *, num_classes=3, points=None):
    """The objects of one file, parsed alone."""
    return parsed([text.encode()], num_classes=num_classes, points=points)[0]


def parsed(texts, *, num_classes=3, points=None):
    return parse_labels(texts, num_classes=num_classes, points=points, name=str, numbers=None)


def corners(cx, cy, w, h):
    return [cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2]


# -- objects


def test_boxes_polygons_and_images_without_objects(tmp_path):
    root = write(
        tmp_path,
        {
            "a": "1 0.5 0.25 0.5 0.1\n\n  0\t0.1 .1 2e-1 0.2  ",
            "b/c": "2 0.1 0.9 0.3 0.2 0.2 0.5\r\n0 0.5 0.5 1 1\r\n",
            "empty": "",
            "none": None,
        },
    )
    source = gpuaug.YoloSource(root)
    assert [source.key(i) for i in range(4)] == [f"images/train/{x}.jpg" for x in ("a", "empty", "none", "b/c")]
    wanted = {
        0: ([1, 0], [corners(0.5, 0.25, 0.5, 0.1), corners(0.1, 0.1, 0.2, 0.2)]),
        1: ([], np.zeros((0, 4))),
        2: ([], np.zeros((0, 4))),
        3: ([2, 0], [[0.1, 0.2, 0.3, 0.9], [0, 0, 1, 1]]),
    }
    for i, (labels, boxes) in wanted.items():
        data, target = source[i]
        assert data == IMAGE
        assert target.labels.tolist() == labels
        np.testing.assert_allclose(target.boxes, boxes, atol=1e-7)
        assert target.fractions
        assert target.keypoints is target.mask is target.label is None
        assert source.label(i).boxes.tolist() == target.boxes.tolist()
    assert source.classes == NAMES
    assert source.num_classes == 3
    assert source.target_kinds == {"boxes"}
    assert source.num_keypoints is source.flip_pairs is source.labels is source.read_many is None
    assert repr(source) == f"YoloSource({str(tmp_path)!r}: 4 images, 4 objects, 3 classes)"
    assert "3 images, 2 objects" in repr(gpuaug.YoloSource(root, subset=[0, 1, 2]))


def test_oriented_boxes_become_upright_boxes_with_a_line_that_says_so(tmp_path, caplog):
    turned = "1 .5 .2 .8 .5 .5 .8 .2 .5"  # as ultralytics' DOTA: class, then 4 corners
    source = gpuaug.YoloSource(write(tmp_path, {"a": f"{turned}\n0 .5 .5 .2 .2", "b": turned}))
    np.testing.assert_allclose(source[1][1].boxes, [[0.2, 0.2, 0.8, 0.8]])
    assert "2 lines have nine numbers" in caplog.text
    caplog.clear()
    gpuaug.YoloSource(write(tmp_path, {"a": "1 .5 .2 .8 .5 .5 .8", "b": turned}))  # polygons
    assert "nine numbers" not in caplog.text


def test_keypoints(tmp_path):
    data = {"train": "images/train", "names": NAMES, "kpt_shape": [3, 3], "flip_idx": [0, 2, 1]}
    write(tmp_path, {"a": "0 .5 .5 .2 .4 .1 .2 2 .3 .4 1 .7 .8 0"}, data=data)
    source = gpuaug.YoloSource(tmp_path)
    target = source[0][1]
    np.testing.assert_allclose(target.boxes, [corners(0.5, 0.5, 0.2, 0.4)], atol=1e-7)
    np.testing.assert_allclose(target.keypoints, [[[0.1, 0.2, 2], [0.3, 0.4, 1], [0, 0, 0]]], atol=1e-7)
    assert source.num_keypoints == 3
    assert source.flip_pairs == (0, 2, 1)
    assert source.target_kinds == {"boxes", "keypoints"}
    write(tmp_path, {"a": "0 .5 .5 .2 .4 .1 .2 0 0 -.001 .5"}, data=data | {"kpt_shape": [3, 2], "flip_idx": None})
    source = gpuaug.YoloSource(tmp_path)
    np.testing.assert_allclose(source[0][1].keypoints, [[[0.1, 0.2, 2], [0, 0, 0], [0, 0, 0]]], atol=1e-7)
    assert source.flip_pairs is None
    write(tmp_path, {"a": "", "b": ""}, data=data)
    assert gpuaug.YoloSource(tmp_path)[1][1].keypoints.shape == (0, 3, 3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(3, 9), st.booleans()), max_size=5), max_size=12))
def test_files_of_a_block_are_as_if_each_were_alone(files):
    """Random files, parsed together and by a loop over words."""
    rng = np.random.default_rng(len(files))
    texts, wanted = [], []
    for lines in files:
        text, objects = "", []
        for label, count, is_box in lines:
            values = np.round(rng.random(4 if is_box else 2 * count), 6)
            text += f"{label} " + " ".join(f"{v:.6f}" for v in values) + rng.choice(["\n", "\r\n", "\n\n \n", "\t\n"])
            low, high = values.reshape(-1, 2).min(0), values.reshape(-1, 2).max(0)
            objects.append((label, corners(*values) if is_box else [*low, *high]))
        texts.append(text.encode())
        wanted.append(objects)
    table, _ = parsed(texts)
    for i, objects in enumerate(wanted):
        assert table.reason(i) is None
        assert table.target(i).labels.tolist() == [label for label, _ in objects]
        boxes = np.reshape([box for _, box in objects], (-1, 4))
        np.testing.assert_allclose(table.target(i).boxes, boxes, atol=1e-6)


BAD = {
    "0 .5 .5 .5": "must have 5 numbers .* Found 4 numbers",
    "0": "Found 1 numbers",
    "0 .1 .1 .2 .2 .3": "at least 3 points. Found 6 numbers",
    "x .5 .5 .5 .5": "must hold only numbers: .*'x'",
    "0 .5,.5 .5 .5": "only numbers: .*'.5,.5'",
    "0 1_0 .5 .5 .5": "only numbers. Found: _",
    "0 .5 .5 nan .5": "must hold finite numbers",
    "nan .5 .5 .5 .5": "must hold finite numbers",
    "3 .5 .5 .5 .5": "class number 0 .. 2, because there are 3 classes. Found: 3",
    "-1 .5 .5 .5 .5": "Found: -1",
    "0.5 .5 .5 .5 .5": "Found: 0.5",
    "0 120 80 30 40": "must hold coordinates 0 .. 1, .* Found: 30.0 .. 120.0",
    "0 .5 .5 -.001 .5": "width and a height of at least 0",
    "0 .5 .5 .5 ١": "must hold only numbers",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_is_a_fault_of_its_sample_only(tmp_path, line):
    good = "1 .5 .5 .5 .5"
    write(tmp_path, {"a": good, "b": f"{good}\n\n{line}\n{good}", "c": good, "d": good})
    source = gpuaug.YoloSource(tmp_path)
    text = f"the objects of 'images/train/b.jpg' cannot be used: line 3 of '.*labels/train/b.txt' .*{BAD[line]}"
    with pytest.raises(GpuaugError, match=f"^{text}"):
        source[1]
    assert len(source.label(1).boxes) == 0
    for i in (0, 2, 3):
        assert source[i][1].labels.tolist() == [1]
        np.testing.assert_allclose(source[i][1].boxes, [[0.25, 0.25, 0.75, 0.75]])
    for text in (line, f"{good}\r{line}", f"\ufeff{line}"):  # the same alone
        assert re.search(BAD[line], read(text).reason(0))


def test_bad_keypoints():
    for line, message in {
        "0 .5 .5 .5 .5": "must have 11 numbers.* Found 5 numbers",
        "0 .5 .5 .5 .5 .1 .1 2 .1 .1 3": "must have visibilities 0, 1 or 2",
        "0 .5 .5 .5 .5 .1 .1 2 .1 7 2": "must hold coordinates 0 .. 1",
        "0 .5 .5 .5 .5 .1 .1 2 .1 nan 2": "must hold finite",
        "0 .5 .5 .5 .5 .1 .1 2 .1 .1 2 .2": ".*Found 12 numbers",
    }.items():
        found = read("0 .5 .5 .5 .5 .1 .1 2 .1 .1 0\n" + line, points=(2, 3))
        assert re.match(f"line 2 of '0' {message}", found.reason(0))
        assert found.target(0).keypoints.shape == (0, 2, 3)


@settings(max_examples=60)
@given(
    st.lists(st.one_of(st.binary(max_size=30), st.text("0123456789. \n-e", max_size=40).map(str.encode)), max_size=6)
)
def test_no_bytes_break_the_parser_or_their_neighbours(texts):
    texts, good = [OSError("no permission"), *texts], b"1 .5 .5 .5 .5"
    found, _ = parsed([x for text in texts for x in (text, good)])
    assert found.reason(0) == "'0' cannot be read (no permission)"
    for i, text in enumerate(texts):
        assert found.target(2 * i + 1).labels.tolist() == [1]
        alone, _ = parsed([text])
        assert (alone.reason(0) is None) == (found.reason(2 * i) is None)
        boxes = found.target(2 * i).boxes
        assert np.isfinite(boxes).all()
        np.testing.assert_array_equal(boxes, alone.target(0).boxes)


def test_when_no_label_file_can_be_used(tmp_path):
    write(tmp_path, {"a": "x", "b": "0 1"})
    with pytest.raises(SourceError, match=r"2 of 2 samples cannot be used; sample 0: line 1 of .*a.txt"):
        gpuaug.YoloSource(tmp_path)
    write(tmp_path / "more", {"a": None})
    with pytest.raises(SourceError, match=r"none of the 1 images .* has a label file.*labels/train/a.txt"):
        gpuaug.YoloSource(tmp_path / "more")


# -- the YAML file and paths

GOOD = {"a": "1 .5 .5 .5 .5"}


def test_ways_to_name_a_split(tmp_path):
    def keys(**more):
        source = gpuaug.YoloSource(tmp_path, **more)
        return [source.key(i) for i in range(len(source))]

    write(tmp_path, GOOD)
    write(tmp_path, {"b": GOOD["a"]}, split="val")
    assert keys() == ["images/train/a.jpg"]
    assert keys(split="val") == ["images/val/b.jpg"]
    (tmp_path / "data.yaml").rename(tmp_path / "coco.yaml")
    assert keys(split="val") == ["images/val/b.jpg"]
    assert gpuaug.YoloSource(tmp_path).classes is None
    assert gpuaug.YoloSource(tmp_path, classes=NAMES).classes == NAMES
    assert gpuaug.YoloSource(tmp_path, data="coco.yaml").classes == NAMES
    assert gpuaug.YoloSource(tmp_path, data=tmp_path / "coco.yaml").classes == NAMES
    write(tmp_path, {"r": GOOD["a"]}, images="{}/images", data={"train": ["images/train", "images/val"], "nc": 2})
    assert keys() == ["images/train/a.jpg", "images/val/b.jpg"]
    assert gpuaug.YoloSource(tmp_path).classes == ["class_0", "class_1"]
    (tmp_path / "data.yaml").write_text(yaml.safe_dump({"train": "../train/images", "path": "nowhere"}))
    assert keys() == ["train/images/r.jpg"]
    (tmp_path / "data.yaml").write_text(
        yaml.safe_dump({"path": "images", "train": "train", "val": f"{tmp_path}/images/val"})
    )
    assert keys() == ["images/train/a.jpg"]
    assert keys(split="val") == ["images/val/b.jpg"]
    (tmp_path / "list.txt").write_text(f"./images/val/b.jpg\n{tmp_path}/images/train/a.jpg\n")
    (tmp_path / "data.yaml").write_text(yaml.safe_dump({"train": "list.txt", "names": {"0": "x", 1: "y"}}))
    assert keys() == ["images/val/b.jpg", "images/train/a.jpg"]
    assert gpuaug.YoloSource(tmp_path).classes == ["x", "y"]
    assert gpuaug.YoloSource(tmp_path, split="train")[1][1].labels.tolist() == [1]


def test_classes_of_another_run(tmp_path):
    write(tmp_path, GOOD)
    source = gpuaug.YoloSource(tmp_path, classes=["cat", "bird", "person", "dog"])
    assert source[0][1].labels.tolist() == [3]
    assert source.classes == ["cat", "bird", "person", "dog"]
    with pytest.raises(SourceError, match=r"lacks 2 of the classes .*'dog', 'cat'"):
        gpuaug.YoloSource(tmp_path, classes=["person"])


DAMAGED = {
    "[": "line 1: expected the node content",
    "": "it holds NoneType",
    "train: a\nnames: {0: a, 0: b}": "line 2: found duplicate key '0'",
    "train: a\nnames: [a]\ntrain: b": "line 3: found duplicate key 'train'",
    "{names: [a, a], train: x}": "each class once. Found twice: 'a'",
    "{names: {0: a, 2: b}}": "numbers in `names` must be 0 .. 1",
    "{names: [[a]]}": "`names` must be a list of class names",
    "{names: [a], nc: 2}": "`nc` is 2, but `names` has 1",
    "{nc: 99999999999}": "`nc` must be a whole number",
    "{train: [[a]]}": "`train` must be a path",
    "{train: a, kpt_shape: [1000000000, 3]}": "`kpt_shape` must be",
    "{train: a, kpt_shape: [3, 3], flip_idx: [1, 2, 0]}": "`flip_idx` must list the mirror image of each of the 3",
    "!!python/object/apply:os.system [ls]": "line 1: could not determine a constructor for the tag",
    "[" * 5_000: "it is nested too deeply",
    "a: &a [x,x]\nb: &b [*a,*a]\nnames: [*b, *b]": "`names` must be a list",
    "#" * (1 << 21): "2097152 characters",
    "{val: images/val}": "`source.split` must be in .* which has 'val'. Found: 'train'",
    "{train: ../../images/train}": "must stay inside `source.root`",
    "{train: 's3://bucket/x'}": "must stay inside",
    "{train: images/none}": "`source.split` does not exist",
    "{train: list.txt}": "must stay inside",
    "{train: other.txt}": "must list files that end in .jpg.* Found: 'notes.md'",
    "{train: none.txt}": "`source.split` must name a FILE",
    "{train: [images, images/train]}": "overlap",
}


@pytest.mark.parametrize("text", DAMAGED, ids=lambda text: text[:40])
def test_a_damaged_yaml_file_is_an_error_at_the_start(tmp_path, text):
    write(tmp_path / "set", GOOD, data=text)
    write(tmp_path, GOOD)  # what paths must not reach
    (tmp_path / "set" / "list.txt").write_text("images/train/a.jpg\n../images/train/a.jpg\n")
    (tmp_path / "set" / "other.txt").write_text("notes.md\n")
    with pytest.raises(SourceError, match=DAMAGED[text]) as caught:
        gpuaug.YoloSource(tmp_path / "set")
    assert len(str(caught.value)) < 2000


def test_arguments(tmp_path):
    write(tmp_path, GOOD)
    with pytest.raises(SourceError, match=r"`source.data` does not exist: .*other.yaml"):
        gpuaug.YoloSource(tmp_path, data="other.yaml")
    with pytest.raises(SourceError, match="`source.data` cannot be read"):
        gpuaug.YoloSource(tmp_path, data="images")
    with pytest.raises(ConfigError, match="`source.split` must be text"):
        gpuaug.YoloSource(tmp_path, split=None)
    (tmp_path / "data.yaml").unlink()
    with pytest.raises(ConfigError, match="`source.split` must be a name"):
        gpuaug.YoloSource(tmp_path, split="../other")


def test_the_last_images_folder_becomes_labels_and_names_need_not_be_utf_8(tmp_path):
    name = os.fsdecode(b"x\xffy.z")
    root = tmp_path / "images"
    write(root, {name: GOOD["a"], "images/b": None}, data="{train: images/train, names: [a, b, c]}")
    (root / "images" / "train" / "labels").mkdir()
    (root / "images" / "train" / "labels" / "b.txt").write_text("2 .5 .5 .5 .5")
    source = gpuaug.YoloSource(root)
    assert {source.key(i): source[i][1].labels.tolist() for i in range(2)} == {
        f"images/train/{name}.jpg": [1],
        "images/train/images/b.jpg": [2],
    }
    write(tmp_path / "flat", {"c": None}, data="{train: pictures}", images="pictures")
    (tmp_path / "flat" / "pictures" / "c.txt").write_text("0 .5 .5 .5 .5")
    os.rename(tmp_path / "flat", tmp_path.parent / f"{tmp_path.name}-flat")  # no folder is called images
    assert gpuaug.YoloSource(tmp_path.parent / f"{tmp_path.name}-flat")[0][1].labels.tolist() == [0]
