"""Pascal VOC: boxes against torchvision's parser and detectron2's formula, damaged XML, splits, URLs."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import encode, photograph

import gpuaug
from gpuaug.errors import ConfigError, GpuaugError, SourceError
from gpuaug.source.voc import CLASSES, _parse

OBJECTS = {
    "2007_000001": [("dog", (1, 1, 47, 31), 0), ("person", (10, 12, 10, 12), 1)],
    "2007_000002": [],
    "2007_000003": [("tvmonitor", (5, 6, 30.5, 20), 0)],
}


def annotation(objects, size=(31, 47)):
    root = ET.Element("annotation")
    ET.SubElement(root, "filename").text = "../../etc/passwd"
    for key, value in zip(("height", "width"), size, strict=True):
        node = root.find("size")
        ET.SubElement(ET.SubElement(root, "size") if node is None else node, key).text = str(value)
    for name, box, difficult in objects:
        node = ET.SubElement(root, "object")
        ET.SubElement(node, "name").text = name
        ET.SubElement(node, "difficult").text = str(difficult)
        corners = ET.SubElement(node, "bndbox")
        for key, value in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True):
            ET.SubElement(corners, key).text = str(value)
        part = ET.SubElement(node, "part")  # VOC's people have parts with names and boxes of their own
        ET.SubElement(part, "name").text = "head"
        corners = ET.SubElement(part, "bndbox")
        for key in ("xmin", "ymin", "xmax", "ymax"):
            ET.SubElement(corners, key).text = "3"
    return ET.tostring(root)


def write(root, objects=OBJECTS, *, year="VOC2012", split="train"):
    folder = root / year
    for name in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for stem, item in objects.items():
        (folder / "JPEGImages" / f"{stem}.jpg").write_bytes(encode(photograph("coffee", (47, 31))))
        if item is not None:
            data = item if isinstance(item, bytes) else annotation(item)
            (folder / "Annotations" / f"{stem}.xml").write_bytes(data)
    (folder / "ImageSets" / "Main" / f"{split}.txt").write_text("\n".join(objects))
    return root


def test_boxes_are_those_of_the_files(tmp_path):
    source = gpuaug.VocSource(write(tmp_path))
    for i, (stem, objects) in enumerate(OBJECTS.items()):
        data, target = source[i]
        assert data == (tmp_path / "VOC2012" / "JPEGImages" / f"{stem}.jpg").read_bytes()
        assert source.key(i) == f"{stem}.jpg"
        wanted = [[box[0] - 1, box[1] - 1, box[2], box[3]] for _, box, _ in objects]
        assert target.boxes.tolist() == wanted
        assert target.labels.tolist() == [CLASSES.index(name) for name, _, _ in objects]
        assert target.size == (31, 47)
        assert target.keypoints is target.mask is None
        assert source.label(i).boxes.tolist() == wanted
    assert source.classes == [*CLASSES]
    assert len(CLASSES) == 20
    assert source.target_kinds == {"boxes"}
    assert source.num_keypoints is source.flip_pairs is source.labels is source.read_many is None
    assert repr(source) == f"VocSource({str(tmp_path / 'VOC2012' / 'JPEGImages')!r}: 3 images, 3 objects, 20 classes)"
    drop = gpuaug.VocSource(tmp_path, difficult="drop", subset=[0, 2])
    assert drop[0][1].labels.tolist() == [CLASSES.index("dog")]
    assert drop[2][1].labels.tolist() == source[2][1].labels.tolist()
    assert "2 images, 2 objects" in repr(drop)


def test_against_torchvision(tmp_path, v2):
    from torchvision.datasets import VOCDetection

    rng = np.random.default_rng(0)
    objects = {}
    for i in range(20):
        low = rng.integers(1, 20, (rng.integers(1, 6), 2))
        boxes = np.concatenate([low, low + rng.integers(0, 20, low.shape)], axis=1)
        objects[f"{i}"] = [(CLASSES[rng.integers(20)], box.tolist(), int(rng.integers(2))) for box in boxes]
    write(tmp_path / "VOCdevkit", objects, year="VOC2007", split="val")
    reference = VOCDetection(str(tmp_path), year="2007", image_set="val")
    source = gpuaug.VocSource(tmp_path / "VOCdevkit", year="VOC2007", split="val")
    assert len(source) == len(reference) == 20
    for i, (_, found) in enumerate(reference):
        items = found["annotation"]["object"]
        wanted = [[float(item["bndbox"][key]) for key in ("xmin", "ymin", "xmax", "ymax")] for item in items]
        target = source[i][1]
        np.testing.assert_array_equal(target.boxes + np.float32([1, 1, 0, 0]), np.float32(wanted))
        assert [CLASSES[label] for label in target.labels] == [item["name"] for item in items]


GOOD = [("cat", (1, 1, 9, 9), 0)]
WHOLE = annotation(GOOD)


def replaced(old, new):
    assert re.search(old, WHOLE)
    return re.sub(old, new, WHOLE, count=1)


LAUGHS = b"""<?xml version="1.0"?><!DOCTYPE a [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>"""
BAD = {
    "encoding": (b"<?xml version='1.0' encoding='klingon'?>" + WHOLE, "is not valid XML"),
    "missing": (None, "cannot be read"),
    "another schema": (b"<boxes><object/></boxes>", "must begin with <annotation>. Found: <boxes>"),
    "entities": (LAUGHS + WHOLE, "<!DOCTYPE>"),
    "entities in UTF-16": (LAUGHS.decode()[21:].encode("utf-16"), "<!DOCTYPE>"),
    "deep": (b"<annotation>" + b"<a>" * 100_000, "is not valid XML"),
    "many tags": (b"<annotation>" + b"<a/>" * 1_100_000 + b"</annotation>", "must have at most 1048576 tags"),
    "no corner": (replaced(b"<ymax>9</ymax>", b""), "has no <ymax>"),
    "no name": (replaced(b"<name>cat</name>", b""), "an object without a name"),
    "another class": (replaced(b"cat", b"unicorn"), "class 'unicorn', which is not in `source.classes`"),
    "a word": (replaced(b"<xmax>9", b"<xmax>nine"), "must have a number in <xmax>. Found: 'nine'"),
    "inverted": (replaced(b"<xmin>1", b"<xmin>10"), "xmax < xmin"),
    "size": (replaced(b"<width>47", b"<width>x"), "must have a number in <width>"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_damaged_file_is_a_fault_of_its_sample_only(tmp_path, kind):
    data, message = BAD[kind]
    source = gpuaug.VocSource(write(tmp_path, {"a": GOOD, "b": data, "c": GOOD}))
    text = rf"the objects of 'b.jpg' cannot be used: '.*Annotations/b.xml' .*{message}"
    with pytest.raises(GpuaugError, match=f"^{text}"):
        source[1]
    assert len(source.label(1).boxes) == 0
    for i in (0, 2):
        assert source[i][1].boxes.tolist() == [[0, 0, 9, 9]]
        assert source[i][1].labels.tolist() == [CLASSES.index("cat")]
    message = r"'unicorn'\. Set source.classes=\[\"unicorn\"\]" if kind == "another class" else message
    with pytest.raises(SourceError, match=f"the objects of 1 of 1 samples cannot be used.*{message}"):
        gpuaug.VocSource(write(tmp_path / "alone", {"b": data}))


def test_an_unknown_class_is_proposed(tmp_path, caplog):
    write(tmp_path, {"a": GOOD, "b": [("traffic light", (1, 1, 9, 9), 0), ("ball", (1, 1, 9, 9), 0)]})
    gpuaug.VocSource(tmp_path)
    assert "2 classes of objects are not in `source.classes`: 'ball', 'traffic light'" in caplog.text
    (proposed,) = re.findall(r"Set source\.(classes=\[.*\])\.", caplog.text)
    node = gpuaug.compose("train", ["source=voc", f"source.root={tmp_path}", f"source.{proposed}"]).source
    source = gpuaug.build(node)
    assert source.classes == ["ball", "cat", "traffic light"]
    assert [target.labels.tolist() for _, target in source] == [[1], [2, 0]]
    gpuaug.VocSource(tmp_path, classes=["cat"])
    assert 'source.classes=["cat", "ball", "traffic light"]' in caplog.text
    many = [(f"class {i}", (1, 1, 9, 9), 0) for i in range(101)]
    with pytest.raises(SourceError, match="to a FILE with the 101 names"):
        gpuaug.VocSource(write(tmp_path / "many", {"a": many}))


def test_folders_of_other_names_and_masks(tmp_path):
    write(tmp_path, {"a": GOOD, "b": GOOD})
    folder = tmp_path / "VOC2012"
    (folder / "JPEGImages").rename(folder / "pictures")
    (folder / "Annotations").rename(folder / "boxes")
    (folder / "ImageSets" / "Main").rename(folder / "splits")
    (folder / "SegmentationClass").mkdir()
    (folder / "SegmentationClass" / "a.png").write_bytes(b"mask of a")
    names = {"images": "pictures", "annotations": "boxes", "lists": "splits", "masks": "SegmentationClass"}
    overrides = ["source=voc", f"source.root={tmp_path}", *(f"source.{key}={name}" for key, name in names.items())]
    source = gpuaug.build(gpuaug.compose("train", overrides).source)
    assert source.target_kinds == {"boxes", "masks"}
    assert source[0][1].mask == b"mask of a"
    assert source[0][1].boxes.tolist() == [[0, 0, 9, 9]]
    with pytest.raises(FileNotFoundError):
        source[1]
    for key in names:
        with pytest.raises(ConfigError, match=f"`source.{key}` must be a name"):
            gpuaug.VocSource(tmp_path, **{key: "../x"})


def test_a_size_that_is_not_known(tmp_path):
    none = replaced(b"<size>.*</size>", b"")
    zero = replaced(b"<height>31", b"<height>0")
    source = gpuaug.VocSource(write(tmp_path, {"a": none, "b": zero, "c": GOOD}))
    assert [source[i][1].size for i in range(3)] == [None, None, (31, 47)]


@settings(max_examples=60)
@given(st.data())
def test_no_change_of_a_file_breaks_the_parser(data):
    """Any bytes in any place: a result with finite boxes, or a reason."""
    text = bytearray(annotation(OBJECTS["2007_000001"]))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 30))] = data.draw(st.binary(max_size=10))
    try:
        size, objects = _parse(bytes(text), drop=False)
        boxes = np.array([box for box, _ in objects])
    except ValueError:
        return
    assert np.isfinite(boxes).all()
    assert min(size) >= 0


def test_splits_years_classes_and_other_extensions(tmp_path):
    write(tmp_path, {"1": GOOD, "2": [("ball", (2, 3, 4, 5), 0)]}, year="mine")
    (tmp_path / "mine" / "JPEGImages" / "1.jpg").rename(tmp_path / "mine" / "JPEGImages" / "1.PNG")
    (tmp_path / "mine" / "JPEGImages" / "unlisted.jpg").write_bytes(b"")
    source = gpuaug.VocSource(tmp_path / "mine", year=None, classes=["ball", "cat"])
    assert [source.key(i) for i in range(2)] == ["1.PNG", "2.jpg"]
    assert [source[i][1].labels.tolist() for i in range(2)] == [[1], [0]]
    for more, error, message in (
        ({}, SourceError, "`source.root` does not exist"),
        ({"year": None, "split": "none"}, SourceError, "`source.split` must name a FILE .*none.txt"),
        ({"year": "../mine"}, ConfigError, "`source.year` must be a name"),
        ({"year": None, "split": "../../train"}, ConfigError, "`source.split` must be a name"),
        ({"year": None, "split": None}, ConfigError, "`source.split` must be a name"),
        ({"difficult": "hide"}, ConfigError, "`source.difficult` must be one of keep, drop"),
    ):
        with pytest.raises(error, match=message):
            gpuaug.VocSource(tmp_path / "mine", **more)
    (tmp_path / "mine" / "ImageSets" / "Main" / "train.txt").write_text("1\n../Annotations/2\n3\n")
    with pytest.raises(SourceError, match=r"2 of the 3 samples .*have no image.*'../Annotations/2', '3'"):
        gpuaug.VocSource(tmp_path, year="mine")
