"""Tables of paths and labels: kinds of labels, paths that stay in their place, errors, remote tables."""

import csv

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_remote import read_all

from gpuaug.errors import ConfigError, SourceError
from gpuaug.source import TableSource

NAMES = ["b/1.jpg", "a/2.png", "a/x y, z.jpg", 'ü/"q".jpg', "3.jpg"]


@pytest.fixture
def place(tmp_path):
    for name in NAMES:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"bytes of " + name.encode())
    return tmp_path / "data"


def write(place, name="t.csv", **columns):
    path = place / name
    with open(path, "w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, delimiter="\t" if name.endswith(".tsv") else ",")
        lines.writerow(columns)
        lines.writerows(zip(*columns.values(), strict=True))
    return path


@pytest.mark.parametrize("name", ["t.csv", "t.tsv"])
def test_rows_are_samples(place, name):
    path = write(place, name, label=[2, 0, 1, 1, 0], path=NAMES, other=list("abcde"))
    source = TableSource(path)
    assert list(source) == [(b"bytes of " + n.encode(), label) for n, label in zip(NAMES, [2, 0, 1, 1, 0], strict=True)]
    assert [source.key(i) for i in range(5)] == NAMES
    assert source.labels.tolist() == [2, 0, 1, 1, 0]
    assert source.num_classes == 3
    assert source.classes is source.read_many is None
    names = TableSource(path, label="other", path="path")
    assert names.classes == list("abcde")
    assert TableSource(path, label="other", classes=list("edcba")).labels.tolist() == [4, 3, 2, 1, 0]
    assert TableSource(path, label="none")[0] == (source[0][0], None)
    assert TableSource(path, label="none").digest() == source.digest()


def test_targets(place):
    path = write(place, path=NAMES, age=[1.5, 2, -3, 4e2, 0], cat=[1, 0, 1, 0, 0], dog=[0, 0, 1, 1, 0.25])
    ages = TableSource(path, label="age")
    assert [x[1] for x in ages] == [1.5, 2, -3, 400, 0]
    assert ages.labels is ages.num_classes is None
    several = TableSource(path, label=["cat", "dog"])
    assert [x[1] for x in several] == [[1, 0], [0, 0], [1, 1], [0, 1], [0, 0.25]]
    assert several.classes == ["cat", "dog"]
    assert several.class_to_idx == {"cat": 0, "dog": 1}
    assert several.num_classes == 2
    _, labels, _ = read_all(ages)
    assert labels == dict(enumerate([1.5, 2, -3, 400, 0]))
    with pytest.raises(SourceError, match="must all hold numbers"):
        TableSource(path, label=["path", "dog"])


OUTSIDE = ["../secret.jpg", "/etc/passwd", "a/../../secret.jpg", "", "a\0.jpg", "a/", "file:///etc/passwd"]


@pytest.mark.parametrize("bad", OUTSIDE)
def test_paths_cannot_leave_the_folder_of_the_table(place, bad):
    (place.parent / "secret.jpg").write_bytes(b"secret")
    with pytest.raises(SourceError, match=r"must be relative.* row 1"):
        TableSource(write(place, path=[NAMES[0], bad], label=[0, 1]))


@given(st.text(max_size=12))
@settings(max_examples=60)
def test_no_text_leads_outside(text):
    import os

    from gpuaug.source.table import _names

    try:
        path = os.fsdecode(_names((text,), "t")[0])
    except (SourceError, UnicodeEncodeError):
        return
    assert os.path.realpath(os.path.join("/a/b", path)).startswith("/a/b/")


def test_dots_are_dropped_and_missing_files_are_faults(place):
    path = write(place, path=["./3.jpg", "gone.jpg", " a/2.png", "a"], label=[0, 1, 2, 1])
    source = TableSource(path)
    assert source.key(0) == "3.jpg"
    found, labels, faults = read_all(source)
    assert found == {0: b"bytes of 3.jpg", 1: b"", 2: b"bytes of a/2.png", 3: b""}
    assert faults[1].startswith("FileNotFoundError")
    assert set(faults) == {1, 3}
    assert labels == {0: 0, 1: 1, 2: 2, 3: 1}


def test_tables_that_cannot_be_used(place):
    good = {"path": NAMES[:2], "label": [0, 1]}
    table = write(place, **good)
    with pytest.raises(SourceError, match=r"one column 'klass'\..*: 'path', 'label'"):
        TableSource(table, label="klass")
    with pytest.raises(SourceError, match="one column 'file'"):
        TableSource(table, path="file")
    with pytest.raises(SourceError, match="no rows"):
        TableSource(write(place, path=[], label=[]))
    with pytest.raises(SourceError, match="sample 1 has no label in the column 'label' of .*t.csv"):
        TableSource(write(place, path=NAMES[:2], label=[1, ""]))
    with pytest.raises(SourceError, match="the column 'label' of .*t.csv' must be finite"):
        TableSource(write(place, path=NAMES[:2], label=[0.5, "nan"]))
    for text, message in (
        ("", "must name the columns"),
        ("path,label\na.jpg\n", "line 2 of .* has 1 fields.* 2"),
        ('path,label\n"a.jpg,1', "cannot be read"),
        ("path,path,label\na,b,1\n", "one column 'path'"),
        ("path\na.jpg\n", "label=none"),
        ("path;label\na.jpg;1\nb,c.jpg;2\n", "with ',' between them. Found: 'path;label'"),
        ("path,label\na.jpg,1\n".encode("utf-16"), "must name the columns, in UTF-8"),
    ):
        (place / "bad.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(SourceError, match=message):
            TableSource(place / "bad.csv")
    with pytest.raises(SourceError, match="does not exist"):
        TableSource(place / "nowhere.csv")
    for bad in (place / "t.parquet", place, "", None):
        with pytest.raises(ConfigError, match=r"source\.root"):
            TableSource(bad)
    for more in ({"label": []}, {"path": ""}, {"label": ["a", 3]}, {"label": "none", "classes": ["a"]}):
        with pytest.raises(ConfigError, match=r"source\."):
            TableSource(place / "t.csv", **more)


def test_names_that_python_would_read_as_numbers(place):
    source = TableSource(write(place, path=NAMES[:3], label=["1_0", "2_1", "1_0"]))
    assert source.classes == ["1_0", "2_1"]
    assert source.labels.tolist() == [0, 1, 0]


def test_text_as_spreadsheets_write_it(place):
    (place / "t.csv").write_bytes(b'\xef\xbb\xbf"path", label\r\n"3.jpg",1\r\n\r\n"a/x y, z.jpg", 0\r\n')
    source = TableSource(place / "t.csv")
    assert list(source) == [(b"bytes of 3.jpg", 1), (b"bytes of a/x y, z.jpg", 0)]
