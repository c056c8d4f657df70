"""Sources: what is listed and in which order, labels and mappings, subsets, errors, and life in workers."""

import io
import json
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Subset, random_split

from gpuaug.errors import ConfigError, SourceError
from gpuaug.files import CODECS, sniff
from gpuaug.source import FolderSource, Source, adapt
from gpuaug.source.index import Names
from gpuaug.source.local import LARGE, LARGEST_IMAGE
from gpuaug.source.remote.storage import Range, Storage


def fill(root, *names):
    for name in names:
        path = os.path.join(os.fsencode(root), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(b"bytes of " + os.fsencode(name))
    return root


def keys(source):
    numbers = range(len(source)) if source.indices is None else source.indices.tolist()
    return [source.key(i) for i in numbers]


@pytest.fixture
def tree(tmp_path):
    return fill(
        tmp_path / "data",
        "dog/b.jpg",
        "dog/a.PNG",
        "dog/a-1/z.webp",
        "dog/a/y.gif",
        "cat/10.jpeg",
        "cat/9.JPG",
        "cat/notes.txt",
        "cat/archive.jpg.zip",
        "ant/x.tiff",
    )


def torchvision_samples(root, extensions=(".jpg", ".jpeg", ".png", ".webp", ".gif", ".tiff")):
    """torchvision.datasets.folder.make_dataset, written out."""
    found = []
    for label, name in enumerate(sorted(entry.name for entry in os.scandir(root) if entry.is_dir())):
        for folder, _, files in sorted(os.walk(os.path.join(root, name), followlinks=True)):
            for file in sorted(files):
                if file.lower().endswith(extensions):
                    found.append((os.path.relpath(os.path.join(folder, file), root), label))
    return found


def test_order_and_labels_are_those_of_torchvision(tree):
    source = FolderSource(tree)
    expected = torchvision_samples(tree)
    assert [(source.key(i), source[i][1]) for i in range(len(source))] == expected
    assert source.labels.tolist() == [label for _, label in expected]
    assert len(source) == 7
    assert source.classes == ["ant", "cat", "dog"]
    assert source.class_to_idx == {"ant": 0, "cat": 1, "dog": 2}
    assert source.num_classes == 3
    assert source.indices is None
    for i, (key, _) in enumerate(expected):
        assert source[i][0] == b"bytes of " + key.encode()
    assert [label for _, label in source] == source.labels.tolist()


@settings(max_examples=20, deadline=None)
@given(
    st.sets(
        st.tuples(
            st.sampled_from(["a", "B", "a-b", "ä", "a b"]),
            st.lists(st.sampled_from(["x", "x-", "x0", "ü"]), max_size=2),
            st.sampled_from(["1.jpg", "10.jpg", "2.JPG", "é.png", ".jpg", "x.jpg.gif"]),
        ).map(lambda t: "/".join([t[0], *t[1], t[2]])),
        min_size=1,
    )
)
def test_order_is_that_of_torchvision_for_any_tree(tmp_path_factory, names):
    root = fill(tmp_path_factory.mktemp("tree"), *names)
    source = FolderSource(root)
    expected = torchvision_samples(root)
    assert [(source.key(i), int(source.labels[i])) for i in range(len(source))] == expected
    flat = FolderSource(root, labels="none")
    assert sorted(keys(flat)) == sorted(keys(source))
    assert flat.digest() == source.digest()


def test_unlabelled_folder(tree):
    fill(tree, "top.jpg")
    source = FolderSource(tree, labels="none")
    assert len(source) == 8
    assert source[0] == (b"bytes of top.jpg", None)
    assert source.labels is source.classes is source.class_to_idx is source.num_classes is None
    with pytest.raises(ConfigError, match="classes"):
        FolderSource(tree, labels="none", classes=["cat"])
    with pytest.raises(ConfigError, match=r"source\.labels"):
        FolderSource(tree, labels="class")


def test_every_name_is_listed_unread(tree, caplog):
    (tree / "ant" / "broken.jpg").symlink_to(tree / "nowhere.jpg")
    (tree / "ant" / "itself.jpg").symlink_to(tree / "ant" / "itself.jpg")
    (tree / "ant" / "empty.jpg").touch()
    (tree / "ant" / "folder.jpg").mkdir()
    os.mkfifo(tree / "ant" / "pipe.jpg")
    fill(tree, "ant/folder.jpg/inside.jpg", "beside.jpg")
    with caplog.at_level(logging.WARNING, "gpuaug"):
        source = FolderSource(tree)
    assert "1 images" in caplog.text
    ours = [key for key in keys(source) if key.startswith("ant")]
    assert ours == [key for key, label in torchvision_samples(tree) if label == 0]
    assert {"ant/broken.jpg", "ant/itself.jpg", "ant/empty.jpg", "ant/pipe.jpg", "ant/folder.jpg/inside.jpg"} < {*ours}
    read = {key: i for i, key in enumerate(keys(source))}
    assert source[read["ant/empty.jpg"]] == (b"", 0)
    with pytest.raises(FileNotFoundError):
        source[read["ant/broken.jpg"]]
    with pytest.raises(OSError, match="symbolic links"):
        source[read["ant/itself.jpg"]]
    with pytest.raises(OSError, match="not a regular file"):
        source[read["ant/pipe.jpg"]]


def test_a_huge_file_is_refused_without_being_read(tree):
    with open(tree / "ant" / "huge.jpg", "wb") as file:
        file.truncate(1 << 40)
    source = FolderSource(tree)
    with pytest.raises(OSError, match="1099511627776 bytes, more than"):
        source[0]


def test_a_large_file_that_is_no_image_is_not_read(tree, monkeypatch):
    for name, head in (("a", b""), ("b", b"\xff\xd8\xff\xe0")):
        with open(tree / "ant" / f"{name}.jpg", "wb") as file:
            file.write(head)
            file.truncate(LARGE + 1)
    asked = []
    monkeypatch.setattr(os, "pread", lambda fd, size, at, read=os.pread: asked.append(size) or read(fd, size, at))
    source = FolderSource(tree)
    with pytest.raises(OSError, match="not an image: 16777217 bytes that begin with"):
        source[0]
    assert asked == [80]
    data, label = source[1]
    assert (len(data), data[:4], label) == (LARGE + 1, b"\xff\xd8\xff\xe0", 0)


def test_the_codec_of_a_file_is_found():
    heads = [b"\xff\xd8\xff\xe0", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBP", b"BM", b"GIF87a", b"GIF89a", b"II*\0",
             b"MM\0*", b"II+\0", b"MM\0+", b"\x89gpuaug\n", b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51", b"P5\n",
             b"P6 ", b"\0\0\0\x1cftypavif", b"\0\0\0\x18ftypheic"]  # fmt: skip
    assert {sniff(head) for head in heads} == {*CODECS}
    for head in (b"", b"RIFF\0\0\0\0WAVE", b"P6x", b"<html>", b"\x89gpuau"):
        assert sniff(head) is None


def test_large_images_of_a_batch_are_bounded(monkeypatch):
    monkeypatch.setattr("gpuaug.source.local.LARGEST_BATCH", 3 * LARGE)
    read = []
    monkeypatch.setattr("gpuaug.source.local.read_file", lambda path, **more: read.append(path) or b"")
    parts = [Range(f"/{size}", image=size) for size in (LARGE + 5, 1, 2 * LARGE, LARGE + 6, LARGEST_IMAGE + 1)]
    found = Storage().read(parts)
    assert read == [f"/{LARGE + 5}", "/1", f"/{LARGE + 6}"]
    assert f"of at most {3 * LARGE}" in str(found[2])
    assert "Lower `batch_size`" in str(found[2])
    assert f"{LARGEST_IMAGE + 1} bytes, more than {LARGEST_IMAGE}" in str(found[4])


def test_links_are_followed_and_loops_entered_once(tree, caplog):
    outside = fill(tree.parent / "outside", "o/1.jpg", "o/2.jpg")
    (tree / "cat" / "more").symlink_to(outside, target_is_directory=True)
    (tree / "cat" / "again").symlink_to(outside / "o", target_is_directory=True)
    (outside / "o" / "up").symlink_to(outside, target_is_directory=True)
    (tree / "dog" / "self").symlink_to(tree / "dog", target_is_directory=True)
    (tree / "dog" / "root").symlink_to(tree, target_is_directory=True)
    (tree / "fox").symlink_to(outside, target_is_directory=True)
    with caplog.at_level(logging.WARNING, "gpuaug"):
        source = FolderSource(tree)
    assert "lead back to a folder above them" in caplog.text
    assert source.classes == ["ant", "cat", "dog", "fox"]
    found = keys(source)
    assert len(set(found)) == len(found)
    assert {"cat/more/o/1.jpg", "cat/again/1.jpg", "fox/o/2.jpg", "dog/a.PNG"} <= {*found}
    assert not any(key.startswith(("dog/self", "dog/root")) for key in found)


def test_folders_that_link_to_each_other_are_listed_in_time(tmp_path, caplog):
    names = [f"d{i}" for i in range(12)]
    fill(tmp_path, *(f"root/cls/{name}/x.jpg" for name in names))
    for name in names:
        for other in names:
            if name != other:
                (tmp_path / "root" / "cls" / name / f"to-{other}").symlink_to(tmp_path / "root" / "cls" / other)
    with caplog.at_level(logging.WARNING, "gpuaug"):
        source = FolderSource(tmp_path / "root")
    found = keys(source)
    assert {f"cls/{a}/x.jpg" for a in names} < {*found}
    assert {f"cls/{a}/to-{b}/x.jpg" for a in names for b in names if a != b} < {*found}
    assert len({*found}) == len(found) == 12 + 12 * 11 + 12 * 8
    (message,) = [record.getMessage() for record in caplog.records]
    assert "folders are skipped" in message
    assert "visited 8 times" in message
    assert keys(FolderSource(tmp_path / "root", labels="none")) == found


def test_links_to_one_folder_are_all_followed_as_by_torchvision(tree):
    shared = fill(tree.parent / "shared", "s/1.jpg", "s/t/2.jpg")
    for i in range(20):
        (tree / "cat" / f"link{i}").symlink_to(shared, target_is_directory=True)
    (tree.parent / "outer").mkdir()
    for i in range(3):  # links in a link
        (tree.parent / "outer" / f"in{i}").symlink_to(shared / "s", target_is_directory=True)
    (tree / "ant" / "outer").symlink_to(tree.parent / "outer", target_is_directory=True)
    source = FolderSource(tree)
    assert keys(source) == [key for key, _ in torchvision_samples(tree)]


@pytest.mark.skipif(sys.platform != "linux", reason="4096 bytes are Linux's")
def test_folders_deeper_than_a_path_may_be_are_refused(tree, monkeypatch):
    monkeypatch.chdir(tree / "cat")
    for _ in range(25):
        os.mkdir("d" * 250)
        os.chdir("d" * 250)
    with open("y.jpg", "wb"):
        pass
    with pytest.raises(SourceError, match="cannot be listed .*too long"):
        FolderSource(tree)
    monkeypatch.chdir(tree)
    # pytest could not remove it by its path
    subprocess.run(["rm", "-r", tree / "cat" / ("d" * 250)], check=True)


@pytest.mark.parametrize("argument", ["classes", "subset", "exclude"])
def test_json_nested_too_deeply(tree, tmp_path, argument):
    file = tmp_path / "deep.json"
    file.write_text("[" * 100_000 + "\n")
    with pytest.raises(SourceError, match=f"`source.{argument}`"):
        FolderSource(tree, **{argument: file})


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_names_that_are_not_utf8(tmp_path, tree):
    fill(tree, b"caf\xe9/\xff\xfe.jpg", "ünï/日本.jpg", "cat/new\nline.jpg")
    source = FolderSource(tree)
    i = next(i for i in range(len(source)) if os.fsencode(source.key(i)) == b"caf\xe9/\xff\xfe.jpg")
    assert source[i][0].endswith(b"\xff\xfe.jpg")
    assert {"ünï/日本.jpg", "cat/new\nline.jpg"} < {*keys(source)}
    mapping = tmp_path / "classes.json"
    mapping.write_text(json.dumps(source.class_to_idx))
    record = tmp_path / "bad.jsonl"
    record.write_text(json.dumps({"key": source.key(i)}) + "\n")
    again = FolderSource(tree, classes=mapping, exclude=record)
    assert again.classes == source.classes
    assert again.class_to_idx == source.class_to_idx
    assert len(again) == len(source) - 1
    assert i not in again.indices
    names = tmp_path / "classes.txt"
    names.write_bytes(b"\n".join(map(os.fsencode, source.classes)) + b"\n\n")
    assert FolderSource(tree, classes=names).class_to_idx == source.class_to_idx


def test_text_files_may_begin_with_a_bom(tree, tmp_path):
    names, numbers, record = tmp_path / "classes.txt", tmp_path / "subset.txt", tmp_path / "bad.jsonl"
    names.write_text("ant\ncat\ndog\n", encoding="utf-8-sig")
    numbers.write_text("0\n2\n", encoding="utf-8-sig")
    record.write_text(json.dumps({"key": FolderSource(tree).key(2)}) + "\n", encoding="utf-8-sig")
    source = FolderSource(tree, classes=names, subset=numbers, exclude=record)
    assert source.classes == ["ant", "cat", "dog"]
    assert source.indices.tolist() == [0]


def test_given_classes(tree, tmp_path):
    order = ["dog", "bird", "cat", "ant"]
    for given_classes in (order, tuple(order), {name: i for i, name in enumerate(order)}):
        source = FolderSource(tree, classes=given_classes)
        assert source.classes == order
        assert source.num_classes == 4
        assert {source.key(i).split("/")[0]: source[i][1] for i in range(7)} == {"ant": 3, "cat": 2, "dog": 0}
        assert source.digest() == FolderSource(tree).digest()
    fill(tree, "bird/readme.txt")
    assert len(FolderSource(tree, classes=order)) == 7
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "odd.json").write_text("3")
    for bad, message in (
        (["ant", "cat", "dog"], r"lacks 1 of the 4 folders .*'bird'"),
        ({"ant": 0, "cat": 1, "dog": 2, "bird": 2}, r"0 \.\. 3, each once"),
        ({"ant": "0"}, r"0 \.\. 0"),
        (["ant", "ant"], "each class once"),
        ([], "each class once"),
        (tmp_path / "nowhere.json", r"nowhere\.json"),
        (str(tmp_path / "bad.json"), r"source\.classes"),
        (str(tmp_path / "odd.json"), "Found: '"),
    ):
        with pytest.raises(SourceError, match=message):
            FolderSource(tree, classes=bad)


def test_classes_that_are_numbers(tmp_path):
    root = fill(tmp_path / "digits", "0/a.png", "1/a.png", "10/a.png", "2/a.png")
    assert FolderSource(root).classes == ["0", "1", "10", "2"]
    assert FolderSource(root, classes=[0, 1, 2, 10]).labels.tolist() == [0, 1, 3, 2]


def test_subset_keeps_numbers(tree, tmp_path):
    whole = FolderSource(tree)
    some = FolderSource(tree, subset=3)
    assert some.indices.tolist() == [0, 2, 4]
    assert len(some) == 3
    assert some.digest() == whole.digest()
    assert some.labels.tolist() == whole.labels.tolist()
    assert [some[i] for i in some.indices.tolist()] == [whole[i] for i in (0, 2, 4)] == list(some)
    assert FolderSource(tree, subset=0.3).indices.tolist() == [0, 3]
    assert len(FolderSource(tree, subset=1e-9)) == 1
    assert FolderSource(tree, subset=1.0).indices is None
    assert FolderSource(tree, subset=7).indices is None
    numbers = [5, 1, 6]
    np.save(tmp_path / "n.npy", np.array(numbers))
    (tmp_path / "n.json").write_text(json.dumps(numbers))
    (tmp_path / "n.txt").write_text("5\n1\n6\n")
    for given_subset in (numbers, torch.tensor(numbers), *(tmp_path / f"n.{kind}" for kind in ("npy", "json", "txt"))):
        assert FolderSource(tree, subset=given_subset).indices.tolist() == [1, 5, 6]
    (tmp_path / "bad.txt").write_text("1 two")
    (tmp_path / "half.json").write_text("[0.5]")
    for bad in (0, 8, -1, 0.0, 1.5, True, [], [7], [-1], [1, 1], [0.5], tmp_path / "bad.txt", tmp_path / "half.json"):
        with pytest.raises(SourceError, match=r"source\.subset"):
            FolderSource(tree, subset=bad)
    with pytest.raises(SourceError, match=r"nowhere\.txt"):
        FolderSource(tree, subset="nowhere.txt")


@given(st.integers(1, 500), st.data())
@settings(max_examples=30, deadline=None)
def test_a_counted_subset_is_evenly_spread(total, data):
    from gpuaug.source.filters import _subset

    count = data.draw(st.integers(1, total))
    numbers = _subset(count, total)
    assert len(np.unique(numbers)) == count
    steps = np.diff(np.append(numbers, total + numbers[0]))
    assert steps.max() - steps.min() <= 1


def test_what_is_no_file_is_refused_by_name(tmp_path):
    done = forked.run([sys.executable, Path(__file__).with_name("no_file_worker.py"), tmp_path])
    *lines, last = done.stdout.splitlines() or [""]
    tried = [json.loads(line) for line in lines]
    assert [line for line in tried if line[2] != "refused"] == []
    assert last == "done", f"it ended after {tried[-1:]} with {done.returncode}: {done.stderr[-500:]}"
    assert len(tried) == 15 * 4 - 2


def test_exclude_takes_a_record_of_faults(tree, tmp_path, caplog):
    whole = FolderSource(tree)
    file = tmp_path / "bad.jsonl"
    lines = [{"key": whole.key(2), "index": 99}, {"key": "gone/away.jpg", "index": 0}, {"key": whole.key(4)}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '\n{"key": "cut o\n{"key": "cut')
    with caplog.at_level(logging.INFO, "gpuaug"):
        source = FolderSource(tree, exclude=file)
    assert source.indices.tolist() == [0, 1, 3, 5, 6]
    assert source.digest() == whole.digest()
    assert "1 of 3 keys" in caplog.text
    assert """without a key are ignored: 2, such as line 5: '{"key": "cut o'""" in caplog.text
    assert FolderSource(tree, exclude=file, subset=[2, 3]).indices.tolist() == [3]
    with pytest.raises(SourceError, match="`source.exclude` must leave samples"):
        FolderSource(tree, exclude=file, subset=[2, 4])
    file.write_text("a.jpg\n")
    with pytest.raises(SourceError, match="line 1"):
        FolderSource(tree, exclude=file)
    with pytest.raises(SourceError, match=r"source\.exclude"):
        FolderSource(tree, exclude=tmp_path / "missing.jsonl")
    file.write_text("")
    assert len(FolderSource(tree, exclude=file)) == 7


def test_roots_that_cannot_be_used(tree, tmp_path):
    (tmp_path / "empty").mkdir()
    flat, texts = fill(tmp_path / "flat", "a.jpg", "b.jpg"), fill(tmp_path / "texts", "a/a.txt", "b/b.txt")
    for root, more, message in (
        (tmp_path / "not" / "here", {}, f"does not exist: .*exists: '{tmp_path}'"),
        (tree / "dog" / "b.jpg", {}, "Found a file"),
        (tmp_path / "empty", {}, "no class folders"),
        (tmp_path / "empty", {"labels": "none"}, "no images"),
        (flat, {}, r"Images directly in this folder: 2\. Set `source.labels=none`"),
        (texts, {}, "no images in .*2 class folders"),
    ):
        with pytest.raises(SourceError, match=message):
            FolderSource(root, **more)
    fill(tree, ".ipynb_checkpoints/x.txt")
    with pytest.raises(SourceError, match=r"1 of the 4 class folders .*'\.ipynb_checkpoints'"):
        FolderSource(tree)
    for bad in (None, "", 3):
        with pytest.raises(ConfigError, match=r"source\.root"):
            FolderSource(bad)
    with pytest.raises(ConfigError, match="extensions"):
        FolderSource(tree, extensions=".jpg")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list every folder")
def test_a_folder_that_cannot_be_listed(tree):
    (tree / "dog" / "a").chmod(0)
    try:
        with pytest.raises(SourceError, match="cannot be listed"):
            FolderSource(tree)
    finally:
        (tree / "dog" / "a").chmod(0o755)


def test_extensions_and_numbers(tree):
    assert len(FolderSource(tree / "..", extensions=["TXT", ".zip"])) == 2
    source = FolderSource(tree)
    for bad in (-1, 7):
        with pytest.raises(IndexError):
            source[bad]
        with pytest.raises(IndexError):
            source.key(bad)
    assert source[np.int64(3)] == source[torch.tensor(3)] == source[3]


def test_digest_follows_the_names_alone(tree, tmp_path):
    digest = FolderSource(tree).digest()
    other = fill(tmp_path / "elsewhere", *keys(FolderSource(tree)))
    assert FolderSource(other).digest() == digest
    fill(other, "cat/11.jpg")
    assert FolderSource(other).digest() != digest
    assert len(digest) == 32


def test_a_relative_root_survives_a_change_of_folder(tree, monkeypatch):
    monkeypatch.chdir(tree.parent)
    source = FolderSource("data")
    monkeypatch.chdir("/")
    assert source[0][0] == b"bytes of ant/x.tiff"


def test_pickles_as_tensors_and_not_as_strings(tmp_path):
    root = fill(tmp_path / "many", *(f"{c}/{i:05}.jpg" for c in "ab" for i in range(500)))
    source = FolderSource(root)
    assert source._names.blob.dtype == torch.uint8
    sizes = len(pickle.dumps(source)), 1000 * (len("a/00000.jpg") + 8 + 8)
    assert sizes[0] < sizes[1] + 5000
    copy = pickle.loads(pickle.dumps(source))
    assert keys(copy) == keys(source)
    assert copy[999] == source[999]
    # what multiprocessing sends is a handle of the shared memory
    buffer = io.BytesIO()
    multiprocessing.reduction.ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(source)
    assert len(buffer.getvalue()) < 5000


@given(st.lists(st.binary(max_size=5), max_size=30))
@settings(max_examples=30, deadline=None)
def test_names_come_back(names):
    packed = Names.of([names[:7], [], names[7:]])
    assert len(packed) == len(names)
    assert list(packed) == names == [packed[i] for i in range(len(names))]
    assert packed.digest() == Names.of([names[::-1]]).digest()


class Plain:
    def __init__(self, count=4):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return b"%d" % i, i % 2


class Named(Plain):
    classes = ("even", "odd")

    def __init__(self, count=4):
        super().__init__(count)
        self.targets = [i % 2 for i in range(count)]

    def key(self, i):
        return f"n{i}"


def test_adapt_fills_in_what_is_missing(tree):
    whole = FolderSource(tree)
    assert adapt(whole) is whole
    plain = adapt(Plain())
    assert type(plain) is Source
    assert len(plain) == 4
    assert plain[3] == (b"3", 1)
    assert plain.key(3) == "3"
    assert plain.indices is plain.labels is plain.classes is plain.num_classes is None
    assert plain.digest() == adapt(Plain()).digest() != adapt(Plain(5)).digest()
    named = adapt(Named())
    assert named.labels.tolist() == [0, 1, 0, 1]
    assert named.num_classes == 2
    assert named.key(1) == "n1"
    assert adapt([(b"", 0)]).key(0) == "0"
    assert adapt(pickle.loads(pickle.dumps(named))).key(2) == "n2"
    for bad in (iter([1]), {1, 2}, "text", 3, None, [], Plain(0)):
        with pytest.raises(SourceError):
            adapt(bad)

    class Endless:
        def __getitem__(self, i):
            return b"", 0

    with pytest.raises(SourceError, match="length"):
        adapt(Endless())


def test_samples_without_names_are_told(tree, caplog):
    class Named(list):
        def key(self, i):
            return f"n{i}"

    with caplog.at_level(logging.INFO, "gpuaug"):
        adapt(Named([(b"", 0)] * 3))
        adapt(FolderSource(tree))
        assert "neither" not in caplog.text
        source = adapt([(b"", 0)] * 3)
        adapt(source)
    assert caplog.text.count("source list has neither `key(i)` nor `digest()`") == 1
    assert "3 samples" in caplog.text


def test_a_torch_subset_keeps_numbers(tree):
    whole = FolderSource(tree)
    train, held_out = (adapt(part) for part in random_split(whole, [5, 2], torch.Generator().manual_seed(0)))
    assert sorted(train.indices.tolist() + held_out.indices.tolist()) == list(range(7))
    assert train.digest() == held_out.digest() == whole.digest()
    assert train.classes == whole.classes
    for i in train.indices.tolist():
        assert train[i] == whole[i]
        assert train.key(i) == whole.key(i)
    part = adapt(Subset(Subset(FolderSource(tree, subset=[1, 3, 5, 6]), [0, 2, 3]), [2, 1]))
    assert part.indices.tolist() == [5, 6]
    assert part.positions.tolist() == [6, 5]
    part = adapt(Subset(Subset(whole, [6, 0, 3]), [0, 2]))
    assert part.positions.tolist() == [6, 3]  # as in torch
    assert len(part) == 2
    assert part[6] == whole[6]
    assert adapt(Subset(Plain(), [3, 1])).indices.tolist() == [1, 3]
    for bad in ([4], [-1], [], [1, 1]):
        with pytest.raises(SourceError, match="Subset"):
            adapt(Subset(Plain(), bad))


def test_a_concatenation_cannot_have_sources_that_leave_out_samples(tree):
    whole, part = FolderSource(tree), FolderSource(tree, subset=[1, 3])
    assert adapt(ConcatDataset([whole, Subset(whole, [3, 1])]))[7] == whole[3]
    for wrong in ([whole, part], [whole, Subset(part, [0])]):
        with pytest.raises(SourceError, match=r"ConcatDataset reads samples by position.* 2 samples in use"):
            adapt(Subset(ConcatDataset(wrong), [0]))


def test_skipped_files_are_counted_by_extension(tmp_path, caplog):
    for name in ("a/x.JPG", "a/y.heic", "a/n.txt", "a/b/m.TXT", "a/raw.CR2", "a/README"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    with caplog.at_level(logging.INFO, "gpuaug"):
        assert len(FolderSource(tmp_path)) == 2
    lines = [line.getMessage() for line in caplog.records if ": skipped" in line.getMessage()]
    assert [line.partition(": ")[2] for line in lines] == ["skipped 4 files: 2 .txt, 1 .cr2, 1 without extension"]


def test_a_source_of_ones_own_needs_only_a_length_and_samples():
    class Own(Source):
        def __init__(self):
            pass

        def __len__(self):
            return 3

        def __getitem__(self, index):
            return b"%d" % index, index

    source = adapt(Own())
    assert [source.key(i) for i in range(3)] == ["0", "1", "2"]
    assert source.digest() == adapt([(b"", 0)] * 3).digest()
    assert source.labels is source.label is source.read_many is source.target_kinds is None
    with pytest.raises(IndexError, match="has 3 samples"):
        source.key(3)
