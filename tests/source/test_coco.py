"""COCO's format: objects and masks equal those of pycocotools; damaged files are refused, damaged samples faults."""

import contextlib
import copy
import json
import re
import struct
import sys
from dataclasses import replace

import forked
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO

import gpuaug
from gpuaug.batch import Target
from gpuaug.errors import ConfigError, GpuaugError, SourceError
from gpuaug.read.targets import collect
from gpuaug.source import runs
from gpuaug.source.coco_json import mirror_images

PERSON = ["nose", "left_eye", "right_eye", "left_ear", "right_ear", "left_shoulder", "right_shoulder", "left_elbow",
          "right_elbow", "left_wrist", "right_wrist", "left_hip", "right_hip", "left_knee", "right_knee", "left_ankle",
          "right_ankle"]  # fmt: skip
PAIRS = (0, 2, 1, 4, 3, 6, 5, 8, 7, 10, 9, 12, 11, 14, 13, 16, 15)
IDS = [90, 1, 13, 7]  # categories, with gaps and not ascending
SPLIT = "train2017"


def random_file(rng, images=12, objects=60, *, points=None, outlines=True):
    """The content of a file of annotations."""
    shapes = [(int(k), *rng.integers(8, 50, 2).tolist()) for k in rng.permutation(1000)[:images]]
    rows = []
    for number in rng.permutation(5000)[:objects].tolist():
        image, height, width = shapes[rng.integers(0, images // 2 * 2 - 2)]  # the last ones have no objects
        x, y, w, h = rng.uniform(0, 1, 4).round(3).tolist()
        box = [x * width, y * height, w * width, h * height]
        row = {"id": number, "image_id": image, "category_id": int(rng.choice(IDS)), "iscrowd": 0, "bbox": box,
               "area": 500 * x}  # fmt: skip
        if outlines:
            row |= outline(rng, height, width)
        if points:
            row["keypoints"] = rng.integers(0, 3, 3 * len(points)).tolist()
        rows.append(row)
    extra = {"keypoints": list(points)} if points else {}
    return {
        "info": {"year": 2017}, "licenses": [],
        "images": [{"id": i, "file_name": f"{i:012d}.jpg", "height": h, "width": w} for i, h, w in shapes],
        "categories": [{"id": k, "name": f"class {k}", "supercategory": "x", **extra} for k in IDS],
        "annotations": rows,
    }  # fmt: skip


def outline(rng, height, width):
    """Polygons, or run lengths as text or as numbers."""
    kind = rng.integers(0, 4)
    if kind < 2:
        rings = [rng.uniform(-1, 1.2 * max(height, width), 2 * rng.integers(3, 9)) for _ in range(1 + kind)]
        return {"segmentation": [np.float32(ring).tolist() for ring in rings]}
    pixels = (rng.random((height, width)) < rng.random()).astype(np.uint8)
    if kind == 2:
        counts = coco_mask.encode(np.asfortranarray(pixels))["counts"].decode()
        return {"segmentation": {"size": [height, width], "counts": counts}}
    flat = np.concatenate([[0], pixels.T.reshape(-1), [2]])
    edges = np.flatnonzero(flat[1:] != flat[:-1])
    counts = np.diff([0, *edges, flat.size - 2] if edges[0] else [*edges, flat.size - 2])
    return {"segmentation": {"size": [height, width], "counts": counts.tolist()}, "iscrowd": 1}


def write(folder, content, kind="instances"):
    """The file of annotations and the images, whose bytes are their names."""
    text = content if isinstance(content, str | bytes) else json.dumps(content)
    (folder / "annotations").mkdir(exist_ok=True, parents=True)
    path = folder / "annotations" / f"{kind}_{SPLIT}.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    (folder / SPLIT).mkdir(exist_ok=True)
    if isinstance(content, dict):
        for image in content["images"]:
            (folder / SPLIT / image["file_name"]).write_bytes(image["file_name"].encode())
    return folder


def open_coco(folder, **settings):
    return gpuaug.CocoSource(folder, **{"split": SPLIT, **settings})


def decoded(data):
    """The map of object numbers in run-length bytes, written out from the format."""
    assert data[:8] == b"GPUAUGRL"
    height, width, count = struct.unpack_from("<3I", data, 8)
    assert len(data) == 20 + 8 * count
    values = np.frombuffer(data, "<i4", count, 20)
    lengths = np.frombuffer(data, "<u4", count, 20 + 4 * count)
    return np.repeat(values, lengths).reshape(height, width)


# -- run lengths


@given(hnp.arrays(np.int32, st.tuples(st.integers(1, 12), st.integers(1, 12)), elements=st.integers(0, 3)))
@settings(max_examples=100)
def test_runs_give_the_map_back(objects):
    for given_map in (objects, np.asfortranarray(objects), objects.astype(np.uint8).T.copy().T):
        data = runs.encode(given_map)
        assert np.array_equal(decoded(data), objects)
    values = np.frombuffer(data, "<i4", struct.unpack_from("<I", data, 16)[0], 20)
    assert (np.diff(values) != 0).all()  # no run could be longer


# -- what a file says


def test_objects_equal_those_of_pycocotools(tmp_path, capsys):
    content = random_file(np.random.default_rng(0), points=PERSON)
    source = open_coco(write(tmp_path, content))
    peer = COCO(tmp_path / "annotations" / f"instances_{SPLIT}.json")
    numbers = sorted(peer.getImgIds())
    categories = sorted(peer.getCatIds())
    assert source.classes == [peer.cats[k]["name"] for k in categories]
    assert source.num_classes == 4
    assert source.image_ids.tolist() == numbers
    assert source.target_kinds == {"boxes", "keypoints"}
    assert (source.num_keypoints, source.flip_pairs) == (17, PAIRS)
    for i, number in enumerate(numbers):
        data, target = source[i]
        assert data == peer.imgs[number]["file_name"].encode() == source.key(i).encode()
        rows = peer.imgToAnns[number]
        assert target.size == (peer.imgs[number]["height"], peer.imgs[number]["width"])
        assert target.mask is None
        assert target.ids.tolist() == [row["id"] for row in rows]
        assert target.labels.tolist() == [categories.index(row["category_id"]) for row in rows]
        assert (np.zeros(len(rows)) if target.crowd is None else target.crowd).tolist() == [r["iscrowd"] for r in rows]
        assert np.allclose(target.area, [row["area"] for row in rows])
        boxes = np.array([row["bbox"] for row in rows]).reshape(-1, 4)
        assert np.allclose(target.boxes, np.c_[boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], atol=1e-4)
        assert np.array_equal(target.keypoints, np.reshape([row["keypoints"] for row in rows], (-1, 17, 3)))


@pytest.mark.parametrize("seed", range(2))
def test_masks_equal_those_of_pycocotools(tmp_path, seed, capsys):
    content = random_file(np.random.default_rng(seed), images=8, objects=40)
    source = open_coco(write(tmp_path, content), masks="instances")
    assert source.target_kinds == {"boxes", "masks"}
    peer = COCO(tmp_path / "annotations" / f"instances_{SPLIT}.json")
    seen = set()
    for i, number in enumerate(sorted(peer.getImgIds())):
        rows = peer.imgToAnns[number]
        masks = [peer.annToMask(row) for row in rows]
        expected = np.zeros(source.label(i).size, dtype=np.int32)
        below = sorted(range(len(rows)), key=lambda k: (-rows[k]["iscrowd"], -int(masks[k].sum())))
        for k in below:
            expected[masks[k] == 1] = k + 1
        assert np.array_equal(decoded(source[i][1].mask), expected)
        seen |= set(expected.ravel().tolist())
    assert len(seen) > 5


def one(outlines, crowd=None, boxes=None, size=(10, 12)):
    """A file with one image of objects, and one of none before the last."""
    crowd, boxes = crowd or [0] * len(outlines), boxes or [[1, 1, 2, 2]] * len(outlines)
    rows = [{"id": 70 + k, "image_id": 5, "category_id": 1, "iscrowd": c, "area": 4, "bbox": b, "segmentation": s}
            for k, (s, c, b) in enumerate(zip(outlines, crowd, boxes, strict=True))]  # fmt: skip
    rows.append({"id": 99, "image_id": 7, "category_id": 1, "bbox": [0, 0, 2, 2], "segmentation": [[0, 0, 2, 0, 2, 2]]})
    images = [{"id": i, "file_name": f"{i}.jpg", "height": size[0], "width": size[1]} for i in (5, 6, 7)]
    return {"images": images, "categories": [{"id": 1, "name": "cat"}], "annotations": rows}


def test_a_plain_dataset_in_one_folder(tmp_path):
    content = one([[[0, 0, 3, 0, 3, 3]]])
    for row in content["annotations"]:
        del row["id"]
        row.pop("area", None)
    write(tmp_path, content)
    (tmp_path / "labels.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(content).encode())  # as Windows' tools write it
    for image in content["images"]:
        image["file_name"] = f"{SPLIT}/{image['file_name']}"
    (tmp_path / "all.json").write_text(json.dumps(content))
    first = gpuaug.CocoSource(tmp_path, split=SPLIT, annotations="labels.json")
    second = gpuaug.CocoSource(tmp_path, annotations=tmp_path / "all.json")
    assert [data for data, _ in first] == [data for data, _ in second] == [b"5.jpg", b"6.jpg", b"7.jpg"]
    target = first[0][1]
    assert target.ids is target.area is target.crowd is None
    assert target.boxes.tolist() == [[1, 1, 3, 3]]
    assert second.key(0) == f"{SPLIT}/5.jpg"


def test_degenerate_boxes_stay_and_objects_without_points_have_zeros(tmp_path):
    boxes = [[3, 3, 0, 0], [-0.5, -1, 20, 30.25], [11, 2, 0, 4]]
    content = one([[[0, 0, 3, 0, 3, 3]]] * 3, boxes=boxes)
    content["categories"][0]["keypoints"] = ["a", "b"]
    content["annotations"][1]["keypoints"] = [1, 2, 2, 0.5, 7, 1]
    content["annotations"][2]["keypoints"] = []
    source = open_coco(write(tmp_path, content))
    target = source[0][1]
    assert target.boxes.tolist() == [[3, 3, 3, 3], [-0.5, -1, 19.5, 29.25], [11, 2, 11, 6]]
    assert target.keypoints.tolist() == [[[0] * 3] * 2, [[1, 2, 2], [0.5, 7, 1]], [[0] * 3] * 2]
    assert source.flip_pairs is None
    assert source[1][1].boxes.shape == (0, 4)
    assert source[1][1].keypoints.shape == (0, 2, 3)


@pytest.mark.parametrize(("names", "pairs"), [
    (PERSON, PAIRS),
    (["Left Hand", "Right Hand", "tail"], (1, 0, 2)),
    (["eyeLeft", "eyeRight"], (1, 0)),
    (["tail", "nose"], None),
    (["left_eye", "nose"], None),
    (["left", "left", "right"], None),
    ([], None),
])  # fmt: skip
def test_mirror_images_come_from_the_names(names, pairs):
    assert mirror_images(names) == pairs


def test_images_without_objects_can_be_left_out(tmp_path):
    write(tmp_path, one([[[0, 0, 3, 0, 3, 3]]]))
    keep, drop = open_coco(tmp_path), open_coco(tmp_path, empty="drop", masks="instances")
    assert [keep.key(i) for i in range(3)] == ["5.jpg", "6.jpg", "7.jpg"]
    assert [drop.key(i) for i in range(2)] == ["5.jpg", "7.jpg"]
    assert drop.image_ids.tolist() == [5, 7]
    assert [drop[i][1].ids.tolist() for i in range(2)] == [[70], [99]]
    assert decoded(drop[1][1].mask).sum() == decoded(open_coco(tmp_path, masks="instances")[2][1].mask).sum() > 0


def test_classes_of_another_run(tmp_path):
    content = random_file(np.random.default_rng(0), outlines=False)
    source = open_coco(write(tmp_path, content))
    classes = ["other", *reversed(source.classes)]
    renamed = open_coco(tmp_path, classes=classes)
    assert renamed.classes == classes
    assert (renamed.label(0).labels == 4 - source.label(0).labels).all()
    with pytest.raises(SourceError, match="lacks 1 of the 4 categories.*'class 90'"):
        open_coco(tmp_path, classes=source.classes[:3])


def test_a_label_is_known_without_reading(tmp_path):
    content = one([[[0, 0, 3, 0, 3, 3]]], boxes=[[5, 5, -3, 2]])
    source = open_coco(write(tmp_path, content), masks="instances")
    for path in (tmp_path / SPLIT).iterdir():
        path.unlink()
    label = source.label(0)
    assert isinstance(label, Target)
    assert label.mask is None
    assert label.labels.tolist() == []  # its box is damaged
    assert source.label(2).labels.tolist() == [0]
    with pytest.raises(FileNotFoundError):
        source[1]


def tensors(thing, depth=4):
    import torch

    if isinstance(thing, torch.Tensor):
        return [thing]
    parts = thing.values() if isinstance(thing, dict) else vars(thing).values() if hasattr(thing, "__dict__") else []
    return [x for part in parts for x in tensors(part, depth - 1)] if depth else []


def test_an_index_takes_less_than_300_bytes_per_image(tmp_path):
    rng, images = np.random.default_rng(0), 2000
    content = random_file(rng, images=1000, objects=5000, outlines=False)
    extra = [dict(image, id=image["id"] + 1000) for image in content["images"]]
    for image in extra:
        image["file_name"] = f"{image['id']:012d}.jpg"
    content["images"] += extra
    rows = [dict(row, id=row["id"] + 5000 * k) for k in range(3) for row in content["annotations"]][:14_600]
    content["annotations"] = rows
    (tmp_path / SPLIT).mkdir()
    path = tmp_path / "x.json"
    path.write_text(json.dumps(content))
    source = open_coco(tmp_path, annotations=path)
    assert len(source) == images
    assert sum(len(source.label(i).boxes) for i in range(images)) == 14_600
    assert sum({id(x): x.nbytes for x in tensors(source)}.values()) / images < 300


# -- faults of one sample


def edit(**changes):
    """A change of the file, by dotted paths with __ for the dot."""

    def change(content):
        for path, value in changes.items():
            *parents, last = path.split("__")
            node = content
            for part in parents:
                node = node[int(part) if part.isdigit() else part]
            if value is ...:
                del node[last]
            else:
                node[int(last) if last.isdigit() else last] = value
        return content

    return change


def first(**fields):
    """A change of the first annotation, which belongs to sample 0."""
    return edit(**{f"annotations__0__{name}": value for name, value in fields.items()})


def repeat(what):
    return lambda content: content[what].append(copy.deepcopy(content[what][0]))


FORM = "annotation 70 must be a list of polygons"
FAULTS = {
    "inverted": (first(bbox=[5, 5, -3, 2]), r"box of annotation 70 .* Found: \[5\.0, 5\.0, 2\.0, 7\.0\]"),
    "infinite": (first(bbox=[5, 5, 1e300, 2]), "box of annotation 70 in .* must be finite"),
    "NaN": (first(bbox=[1, float("nan"), 2, 2]), "annotation 70 in .*Expected `float`, got `null`.*bbox"),
    "box missing": (first(bbox=...), "annotation 70 in .*`bbox`"),
    "area": (first(area=1e300), "area of annotation 70 in .* must be finite, in float32. Found: inf"),
    "unknown category": (first(category_id=3), "annotation 70 in .*`category_id` 3, which `categories` lacks"),
    "id of 400 digits": (first(id=10**400), "annotation 1000.*`int` <= "),
    "id twice": (repeat("annotations"), "annotation 70 in .* has an id that another object has too"),
    "visibility": (first(keypoints=[1, 2, 3]), "keypoints of annotation 70 in "),
    "far point": (first(keypoints=[1e300, 2, 1]), "keypoints of annotation 70 in "),
    "points a text": (first(keypoints="1 2"), "annotation 70 in .*`keypoints` that are not numbers"),
    "points too few": (first(keypoints=[1, 2]), "annotation 70 in .* must have 3 numbers in `keypoints`"),
    "height missing": (edit(images__0__height=...), r"image 5 in .* >= 1. Found: 12 x nan \(width x height\)"),
    "height a text": (edit(images__0__height="10"), "image 5 in .*Expected `float`, got `str`"),
    "height a fraction": (edit(images__0__height=10.5), r"`width` and `height` of image 5 .* 12 x 10.5 \(width x"),
    "height zero": (edit(images__0__height=0), "`width` and `height` of image 5"),
    "image twice": (repeat("images"), "two images in .* have the id 5"),
}  # fmt: skip
OUTLINES = {  # known when the mask is drawn
    "two points": ([[0, 0, 3, 3]], "annotation 70 .* at least 3 points.* Found: 4 numbers"),
    "odd": ([[0, 0, 3, 3, 5, 5, 5]], "annotation 70 .* at least 3 points.* Found: 7 numbers"),
    "missing": ([], "segmentation of annotation 70 is missing"),
    "a text": ("1 2 3", FORM),
    "huge": ([[10**400, 0, 1, 1, 2, 0]], "annotation 70 "),
    "infinite": ([[1e300, 0, 1, 1, 2, 0]], "annotation 70 has a point far outside"),
    "no size": ({"counts": [120]}, FORM),
    "negative run": ({"size": [10, 12], "counts": [-1, 121]}, FORM),
    "fractions": ({"size": [10, 12], "counts": [0.5]}, FORM),
    "other text": ({"size": [10, 12], "counts": "é"}, "annotation 70 has run lengths with invalid text"),
    "size": ({"size": [12, 10], "counts": [120]}, r"annotation 70 is for an image of 10 x 12 pixels.* 12 x 10 \(width"),
    "short": ({"size": [10, 12], "counts": [100]}, r"must have run lengths .* 12 \* 10 = 120. Found: 100"),
    "bad text": ({"size": [10, 12], "counts": "~~~"}, "annotation 70 has run lengths"),
    "open text": ({"size": [10, 12], "counts": "P"}, "annotation 70 has run lengths"),
    "large text": ({"size": [10, 12], "counts": "oooooooo0"}, "too large"),
    "negative": ({"size": [10, 12], "counts": "O0"}, "annotation 70 must have run lengths"),
}
FAULTS |= {f"outline {name}": (first(segmentation=value), text) for name, (value, text) in OUTLINES.items()}


@pytest.mark.parametrize("name", FAULTS)
def test_a_damaged_image_or_object_is_a_fault_of_its_sample(tmp_path, name, caplog):
    change, text = FAULTS[name]
    content = one([[[0, 0, 3, 0, 3, 3]]])
    content["categories"][0]["keypoints"] = ["a"]
    write(tmp_path, content)
    change(content)
    source = open_coco(write(tmp_path, content), masks="instances")
    late = name.startswith("outline ")
    if not late:  # known before the first batch
        assert re.search(f"samples cannot be used; sample 0: .*{text}", caplog.text)
    with pytest.raises(GpuaugError, match=text) as error:
        source[0]
    assert f"instances_{SPLIT}.json'" in str(error.value)
    assert not isinstance(error.value, SourceError | ConfigError)
    assert len(source.label(0).labels) == late
    items = source._read(range(len(source)))
    assert [type(item) is tuple for item in items] == [False] * (len(source) - 2) + [True] * 2
    assert items[-1][1].ids.tolist() == [99]
    if late:
        assert open_coco(tmp_path)[0][1].labels.tolist() == [0]  # outlines are not read without masks


@pytest.mark.parametrize("value", [8, 10**400, None, ..., "5", [5]])
def test_an_annotation_of_no_image_is_left_out_with_a_warning(tmp_path, value, caplog):
    content = one([[[0, 0, 3, 0, 3, 3]]] * 2)
    write(tmp_path, content)
    edit(annotations__1__image_id=value)(content)
    source = open_coco(write(tmp_path, content), masks="instances")
    assert [target.ids.tolist() for _, target in source] == [[70], [], [99]]
    assert "1 annotations in " in caplog.text
    assert "are left out, because their `image_id` is not in `images`" in caplog.text


def test_a_target_that_a_user_changes_is_checked_again(tmp_path):
    target = open_coco(write(tmp_path, one([[[0, 0, 3, 0, 3, 3]]]))).label(0)
    for given_target, reasons in (
        (target, []),
        (replace(target, boxes=target.boxes.tolist()), []),
        (replace(target, boxes=target.boxes[:, [2, 3, 0, 1]]), ["x1 <= x2"]),
        (replace(target, boxes=["1 2 3 4"]), ["boxes must be numbers of shape"]),
    ):
        _, _, faults = collect([given_target], ("boxes",), skip=(), num_keypoints=None)
        assert len(faults) == len(reasons)
        assert all(re.search(text, fault.reason) for text, fault in zip(reasons, faults, strict=True))


def test_text_that_looks_like_nan_stays(tmp_path):
    content = one([[[0, 0, 3, 0, 3, 3]]])
    content["categories"][0]["name"] = 'x, NaN, "-Infinity\\'
    content["annotations"][0]["area"] = float("nan")
    target = open_coco(write(tmp_path, content))[0][1]
    assert open_coco(tmp_path).classes == ['x, NaN, "-Infinity\\']
    assert target.area is None


def test_a_map_of_too_many_pixels_is_a_fault(tmp_path):
    content = one([[[0, 0, 3, 0, 3, 3]]], size=(1 << 30, 1 << 30))
    source = open_coco(write(tmp_path, content), masks="instances")
    with pytest.raises(GpuaugError, match="at most 178956970 pixels. Found: 1073741824 x .*width x height"):
        source[0]


def test_an_outline_that_needs_more_memory_than_there_is(tmp_path):
    zigzag = [v for i in range(4000) for v in ((-25000, 0) if i % 2 else (25000, 25000))]
    source = open_coco(write(tmp_path, one([[zigzag]], size=(13000, 13000))), masks="instances")
    with pytest.raises(GpuaugError, match="annotation 70 must have outlines of at most 4194304 pixels"):
        source[0]


@given(st.text(st.characters(min_codepoint=40, max_codepoint=120), max_size=30))
@settings(max_examples=100)
def test_no_run_lengths_write_outside_of_the_map(text):
    from gpuaug.source.segmentations import Segmentations

    outlines = Segmentations([json.dumps({"size": [7, 5], "counts": text}).encode()])
    try:
        drawn = outlines.draw(0, 1, size=(7, 5), crowd=None, ids=[1])
    except GpuaugError:
        return
    again = coco_mask.decode({"size": [7, 5], "counts": text.encode()})
    assert np.array_equal(drawn, again)


# -- files that are refused


REFUSED = {
    "no images": (edit(images=[]), "0 images"),
    "no categories": (edit(categories=[]), "0 categories"),
    "annotations missing": (edit(annotations=...), "annotations"),
    "image without a name": (edit(images__1__file_name=...), "`images`: .*`file_name`"),
    "image id a text": (edit(images__1__id="6"), r"`images`: .*got `str` - at `\$.id`"),
    "category twice": (repeat("categories"), "the same id. Found twice: 1"),
    "name twice": (lambda c: c["categories"].append({"id": 2, "name": "cat"}), "same name. Found twice: 'cat'"),
    "names are numbers": (edit(categories__0__keypoints=[1, 2]), "keypoints"),
    "many names": (edit(categories__0__keypoints=["a"] * 4097), "at most 4096 `keypoints`. Found: 4097"),
    "points differ": (
        lambda c: (edit(categories__0__keypoints=["a"])(c),
                   c["categories"].append({"id": 2, "name": "x", "keypoints": ["b"]})), "must have the same"),
}  # fmt: skip
REFUSED |= {
    f"{what}.id of {name}": (edit(**{f"{what}__0__id": value}), "cannot be used")
    for what in ("images", "categories")
    for name, value in [("400 digits", 10**400), ("64 bits", 2**64)]
}
REFUSED |= {
    f"path {name!r}": (edit(images__1__file_name=name), "stay in its folder|unicode|codec|surrogate")
    for name in ["../x.jpg", "/etc/passwd", "a/", "\ud800.jpg"]
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_contradicts_itself_is_refused(tmp_path, name):
    change, text = REFUSED[name]
    content = one([[[0, 0, 3, 0, 3, 3]]])
    write(tmp_path, copy.deepcopy(content))
    change(content)
    write(tmp_path, json.dumps(content))
    with pytest.raises(SourceError, match=text) as error:
        open_coco(tmp_path, masks="instances")
    assert f"instances_{SPLIT}.json' cannot be used: " in str(error.value)
    assert "`source.annotations`" in str(error.value)
    assert len(str(error.value)) < 1000


GOOD = json.dumps(one([[[0, 0, 3, 0, 3, 3]]])).encode()
DAMAGED = {
    "nothing": b"",
    "all but one": GOOD[:-1],
    "two files": GOOD + GOOD,
    "utf-16": GOOD.decode().encode("utf-16"),
    "zip": b"PK\x03\x04" + bytes(100),
    "not utf-8": GOOD.replace(b"cat", b"c\xff\xfet"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_json_is_refused(tmp_path, name):
    write(tmp_path, one([]))
    write(tmp_path, DAMAGED[name])
    with pytest.raises(SourceError, match="cannot be used"):
        open_coco(tmp_path, masks="instances")


def test_every_cut_and_most_flips_of_a_byte_are_refused_or_harmless(tmp_path):
    write(tmp_path, one([]))
    path = tmp_path / "annotations" / f"instances_{SPLIT}.json"
    rng = np.random.default_rng(0)
    refused = 0
    for cut in rng.integers(0, len(GOOD), 20).tolist():
        path.write_bytes(GOOD[:cut])
        with pytest.raises(SourceError):
            open_coco(tmp_path, masks="instances")
    for at in rng.integers(0, len(GOOD), 100).tolist():
        data = bytearray(GOOD)
        data[at] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(data)
        try:
            source = open_coco(tmp_path, masks="instances")
        except SourceError:
            refused += 1
            continue
        for i in range(len(source)):
            with contextlib.suppress(OSError, GpuaugError):
                source[i]
    assert refused > 25


DEEP = """
import sys
import gpuaug
from gpuaug.errors import SourceError
for path in sys.argv[2:]:
    for masks in (None, "instances"):
        try:
            gpuaug.CocoSource(sys.argv[1], annotations=path, masks=masks)
        except SourceError as error:
            print("refused" if "cannot be used" in str(error) else error, flush=True)
"""


def test_a_million_nested_lists_are_refused_and_crash_nothing(tmp_path):
    nested = b"[" * 10**6 + b"]" * 10**6
    texts = {"all": nested}
    for field in ("segmentation", "keypoints"):
        content = one([[[0, 0, 3, 0, 3, 3]]])
        content["categories"][0]["keypoints"] = ["a"]
        content["annotations"][0][field] = "HERE"
        texts[field] = json.dumps(content).encode().replace(b'"HERE"', nested)
    paths = [tmp_path / f"{name}.json" for name in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        path.write_bytes(text)
    done = forked.run(forked.code(DEEP, tmp_path, *paths))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.split() == ["refused"] * 2 * len(paths)


BOUNDED = """
import json, resource, sys
import numpy as np
import gpuaug
from gpuaug.source.object_json import parse
source = gpuaug.CocoSource(sys.argv[1], split="train2017", annotations=sys.argv[2])  # imports what reading needs
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (256 << 20), -1))
source = gpuaug.CocoSource(sys.argv[1], split="train2017", annotations=sys.argv[3])
print(source[0][1].keypoints.shape, int(source[0][1].keypoints.sum()), int(source[1][1].keypoints.sum()))
try:
    source[2]
except gpuaug.GpuaugError as error:
    print(error)
try:
    parse(json.dumps({"boxes": [[0, 0, 1, 1]] * 50_000}).encode(), num_keypoints=4096)
except ValueError as error:
    print(error)
"""


def test_keypoints_take_memory_only_where_objects_have_them(tmp_path):
    content = one([[[0, 0, 3, 0, 3, 3]]])
    small = tmp_path / "small.json"
    small.write_text(json.dumps(content))
    content["categories"][0]["keypoints"] = [f"{i}" for i in range(4096)]
    rows = [{"image_id": k, "category_id": 1, "bbox": [0, 0, 1, 1]} for k in [*range(100, 700)] * 40 + [7] * 65]
    rows.append({"image_id": 5, "category_id": 1, "bbox": [0, 0, 1, 1], "keypoints": [1] * 3 * 4096})
    content["images"] += [{"id": k, "file_name": f"{k}.jpg", "height": 9, "width": 9} for k in range(100, 700)]
    content["annotations"] = rows
    write(tmp_path, content)
    done = forked.run(forked.code(BOUNDED, tmp_path, small, tmp_path / "annotations" / f"instances_{SPLIT}.json"))
    assert done.returncode == 0, done.stderr[-2000:]
    first, second, third = done.stdout.splitlines()
    assert first == "(1, 4096, 3) 12288 0"
    assert "65 objects with 4096 keypoints each are more than 262144 keypoints in one image" in second
    assert "50000 objects with 4096 keypoints each" in third


# -- arguments and places


@pytest.mark.parametrize(("settings", "error", "text"), [
    ({"split": None}, ConfigError, "`source.split` must be set"),
    ({"split": "../x"}, ConfigError, "`source.split` must be a subfolder"),
    ({"split": "val2017"}, SourceError, "folder of images does not exist"),
    ({"annotations": "captions"}, SourceError, "annotations do not exist.*captions_train2017.json"),
    ({"annotations": 3}, ConfigError, "`source.annotations` must be"),
    ({"masks": "semantic"}, ConfigError, "`source.masks` must be one of"),
    ({"empty": "no"}, ConfigError, "`source.empty` must be one of"),
])  # fmt: skip
def test_wrong_arguments_name_their_key(tmp_path, settings, error, text):
    write(tmp_path, one([]))
    with pytest.raises(error, match=text):
        open_coco(tmp_path, **settings)


def test_no_objects_at_all(tmp_path):
    content = one([])
    content["annotations"] = []
    content["categories"][0]["keypoints"] = ["left", "right"]
    source = open_coco(write(tmp_path, content), masks="instances")
    assert source[0][1].boxes.shape == (0, 4)
    assert source[0][1].keypoints.shape == (0, 2, 3)
    assert not decoded(source[0][1].mask).any()
    with pytest.raises(SourceError, match="`source.empty` is drop"):
        open_coco(tmp_path, empty="drop")


def test_missing_packages_are_named_with_their_command(tmp_path, monkeypatch):
    write(tmp_path, one([]))
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    assert len(open_coco(tmp_path)) == 3
    with pytest.raises(ConfigError, match=r"pip install 'gpuaug\[coco\]'"):
        open_coco(tmp_path, masks="instances")
    monkeypatch.setitem(sys.modules, "msgspec", None)
    monkeypatch.delitem(sys.modules, "gpuaug.source.coco_json")
    with pytest.raises(ConfigError, match=r"needs msgspec.*pip install 'gpuaug\[coco\]'"):
        open_coco(tmp_path)


def people(rng):
    """Annotations of which some are crowds, or have no labelled keypoint."""
    content = random_file(rng, points=PERSON, outlines=False)
    for number, row in enumerate(content["annotations"]):
        row["iscrowd"] = int(number % 7 == 0)
        if number % 3 == 0:
            row["keypoints"] = [0] * 51
    return content


def test_a_sample_for_each_person(tmp_path):
    content = people(np.random.default_rng(0))
    folder = write(tmp_path, content, "person_keypoints")
    whole = open_coco(folder, annotations="person_keypoints")
    source = open_coco(folder, annotations="person_keypoints", unit="object")
    files = {image["id"]: image["file_name"] for image in content["images"]}
    rows = [r for r in content["annotations"] if not r["iscrowd"] and any(r["keypoints"][2::3])]
    rows = [r for number in sorted(files) for r in rows if r["image_id"] == number]
    assert len(source) == len(rows) < sum(len(whole.label(i).labels) for i in range(len(whole)))
    assert source.image_ids.tolist() == [row["image_id"] for row in rows]
    assert source.flip_pairs == PAIRS
    assert len({source.key(i) for i in range(len(source))}) == len(source)
    for i, row in enumerate(rows):
        data, target = source[i]
        name = files[row["image_id"]]
        assert (bytes(data).decode(), source.key(i)) == (name, f"{name}/{row['id']}")
        assert target.ids.tolist() == [row["id"]]
        assert target.keypoints[0].ravel().tolist() == row["keypoints"]
        x, y, w, h = row["bbox"]
        assert np.allclose(target.boxes, [[x, y, x + w, y + h]], rtol=1e-5)
        assert target.size == whole.label(whole.image_ids.tolist().index(row["image_id"])).size
    assert source.digest() != whole.digest()
    assert source.objects_digest() != whole.objects_digest()
    half = open_coco(folder, annotations="person_keypoints", unit="object", subset=0.5)
    assert [half.key(i) for i in half.indices.tolist()] == [source.key(i) for i in half.indices.tolist()]
    (tmp_path / "bad.jsonl").write_text(json.dumps({"key": source.key(2)}))
    left = open_coco(folder, annotations="person_keypoints", unit="object", exclude=tmp_path / "bad.jsonl")
    assert left.indices.tolist() == [0, 1, *range(3, len(source))]


def test_a_damaged_person_is_a_fault_and_others_of_its_image_are_not(tmp_path, caplog):
    content = people(np.random.default_rng(1))
    rows = [r for r in content["annotations"] if not r["iscrowd"] and any(r["keypoints"][2::3])]
    images = [r["image_id"] for r in rows]
    shared = [r for r in rows if images.count(r["image_id"]) > 1]
    bad, turned = shared[0], next(r for r in shared if r["image_id"] != shared[0]["image_id"])
    bad["keypoints"][2], lost = 9, turned["image_id"]
    content["images"][[i["id"] for i in content["images"]].index(lost)]["width"] = 0
    empty = next(image for image in content["images"] if image["id"] not in images)
    empty["width"] = -1
    source = open_coco(write(tmp_path, content), unit="object")
    for i, number in enumerate(source.image_ids.tolist()):
        broken = number == lost or source.key(i).endswith(f"/{bad['id']}")
        with pytest.raises(GpuaugError) if broken else contextlib.nullcontext():
            source[i]
    assert "1 damaged images" in caplog.text


def test_persons_without_ids_and_files_without_persons(tmp_path):
    content = people(np.random.default_rng(2))
    for row in content["annotations"]:
        del row["id"]
    source = open_coco(write(tmp_path, content), unit="object")
    assert all(source.key(i).split("/")[1].isdigit() for i in range(len(source)))
    assert len({source.key(i) for i in range(len(source))}) == len(source)
    for row in content["annotations"]:
        row["keypoints"] = [0] * 51
    with pytest.raises(SourceError, match=r"no object in .* has a labelled keypoint, and `source.unit` is object"):
        open_coco(write(tmp_path, content), unit="object")
    with pytest.raises(ConfigError, match="`source.unit` must be one of image, object"):
        open_coco(tmp_path, unit="person")


def test_masks_of_one_person(tmp_path):
    content = people(np.random.default_rng(3))
    for row in content["annotations"]:
        row["segmentation"] = [[1, 1, 5, 1, 5, 4, 1, 4]]
    source = open_coco(write(tmp_path, content), unit="object", masks="instances")
    for i in range(len(source)):
        target = source[i][1]
        mask = decoded(target.mask)
        expected = np.zeros_like(mask)
        expected[1:4, 1:5] = 1
        np.testing.assert_array_equal(mask, expected)
