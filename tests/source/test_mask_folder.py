"""Folders of images and masks: pairs, layouts of the known data sets, errors at the start, URLs."""

import io
import logging
import os

import numpy as np
import pytest
from pictures import encode, photograph
from PIL import Image
from servers import bucket_of, options, proxied, s3

import gpuaug
from gpuaug.batch import Target
from gpuaug.errors import ConfigError, SourceError
from gpuaug.source import Remote

STEMS = ["a/1", "a/b/2", "c", "z.x"]


def mask_of(number: int) -> Image.Image:
    """A palette mask; the pixels tell the samples apart."""
    picture = Image.fromarray(np.full((31, 47), number, dtype=np.uint8), "P")
    picture.putpalette([7 * i % 256 for i in range(768)])
    return picture


def write(root, images="images", masks="masks", stems=STEMS, ends=(".jpg", ".png")):
    for number, stem in enumerate(stems):
        for folder, end, picture in (
            (images, ends[0], photograph("coffee", (47, 31)).rotate(number)),
            (masks, ends[1], mask_of(number)),
        ):
            path = root / folder / (stem + end)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode(picture, "JPEG" if end.endswith("jpg") else "PNG"))
    return root


def check(source, root, stems, images="images", masks="masks", ends=(".jpg", ".png")):
    """Every pair, against the files themselves."""
    assert [source.key(i) for i in range(len(source))] == [stem + ends[0] for stem in stems]
    for i, stem in enumerate(stems):
        data, target = source[i]
        assert data == (root / images / (stem + ends[0])).read_bytes()
        assert target == Target(mask=(root / masks / (stem + ends[1])).read_bytes())
        assert source.label(i) == Target()


def test_pairs_have_the_same_path(tmp_path):
    source = gpuaug.MaskFolderSource(write(tmp_path))
    check(source, tmp_path, ["c", "z.x", "a/1", "a/b/2"])  # files of a folder before its folders, as in FolderSource
    assert [source.key(i) for i in range(4)] == [
        gpuaug.FolderSource(tmp_path / "images", labels="none").key(i) for i in range(4)
    ]
    for i in range(4):
        pixels = np.asarray(Image.open(io.BytesIO(source[i][1].mask)))
        assert (pixels == STEMS.index(source.key(i)[:-4])).all()
    assert source.target_kinds == {"masks"}
    assert source.labels is source.classes is source.read_many is None
    assert repr(source) == f"MaskFolderSource({str(tmp_path / 'images')!r}: 4 images with masks)"


LAYOUTS = {
    "ade20k": ("images/training", "annotations/training", "", "", ("x1", "y/x2"), ("", "")),
    "cityscapes": (
        "leftImg8bit/train",
        "gtFine/train",
        "_leftImg8bit",
        "_gtFine_labelIds",
        ("aachen/a_0", "bochum/b_0"),
        (".png", ".png"),
    ),
    "one folder": ("data", "data", "", "_mask", ("a", "b/c"), (".png", ".png")),
    "one folder, by extension": ("data", "data", "", "", ("a", "b/c"), (".jpg", ".png")),
    "masks inside": ("data", "data/masks", "", "", ("a", "b/c"), (".png", ".png")),
    "images inside": ("data/images", "data", "", "", ("a", "b/c"), (".png", ".png")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tmp_path, layout, caplog):
    images, masks, image_suffix, mask_suffix, stems, kinds = LAYOUTS[layout]
    ends = image_suffix + (kinds[0] or ".jpg"), mask_suffix + (kinds[1] or ".png")
    write(tmp_path, images, masks, stems, ends)
    if layout == "cityscapes":  # what else lies beside the masks, and an image of another kind
        for name in ("a_0_gtFine_color.png", "a_0_gtFine_instanceIds.png", "a_1_gtFine_labelIds.png"):
            (tmp_path / masks / "aachen" / name).write_bytes(b"other")
        (tmp_path / images / "aachen" / "a_0_rightImg8bit.png").write_bytes(b"other")
    with caplog.at_level(logging.INFO, "gpuaug"):
        source = gpuaug.MaskFolderSource(
            tmp_path, images=images, masks=masks, image_suffix=image_suffix, mask_suffix=mask_suffix
        )
    check(source, tmp_path, list(stems), images, masks, ends)
    if layout == "cityscapes":
        assert "1 masks are ignored" in caplog.text
        assert "1 images are ignored" in caplog.text


def test_a_list_names_the_samples_in_its_order(tmp_path):
    write(tmp_path, "JPEGImages", "SegmentationClass")
    (tmp_path / "SegmentationClass" / "c.png").unlink()  # not in the list, so nobody asks for its mask
    lists = tmp_path / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("z.x\r\na/b/2\n\n")
    more = {"images": "JPEGImages", "masks": "SegmentationClass", "list": "ImageSets/Segmentation/train.txt"}
    source = gpuaug.MaskFolderSource(tmp_path, **more)
    check(source, tmp_path, ["z.x", "a/b/2"], "JPEGImages", "SegmentationClass")
    for text, message in (
        ("z.x\n../c\nnone", "2 of the 3 samples .* have no image .* '../c', 'none'"),
        ("c", "1 of 1 images .* have no mask"),
        ("z.x\nz.x", "each sample once. Found twice: 'z.x'"),
        ("\n", "is empty"),
        ("z.x.jpg", "have no image"),
    ):
        (lists / "train.txt").write_text(text)
        with pytest.raises(SourceError, match=message):
            gpuaug.MaskFolderSource(tmp_path, **more)
    with pytest.raises(SourceError, match=r"`source.list` must name a FILE .*no.txt"):
        gpuaug.MaskFolderSource(tmp_path, **more | {"list": "no.txt"})


def test_classes_and_folders_without_root(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    source = gpuaug.MaskFolderSource(images="images", masks=tmp_path / "masks", subset=[0, 3], classes=["sky", "sea"])
    assert source.indices.tolist() == [0, 3]
    assert (source.classes, source.num_classes) == (["sky", "sea"], 2)
    assert source.digest() == gpuaug.MaskFolderSource(tmp_path).digest()


def test_pairs_that_are_not_whole_are_errors_at_the_start(tmp_path):
    write(tmp_path)
    (tmp_path / "masks" / "a" / "1.png").unlink()
    with pytest.raises(SourceError, match=r"1 of 4 images .* have no mask: 'a/1.jpg'.* no 'a/1.png'"):
        gpuaug.MaskFolderSource(tmp_path)
    write(tmp_path)
    (tmp_path / "images" / "c.png").write_bytes(b"")
    with pytest.raises(SourceError, match=r"'c.jpg' and 'c.png' .* differ only in their extension"):
        gpuaug.MaskFolderSource(tmp_path)
    check(gpuaug.MaskFolderSource(tmp_path, extensions=["jpg"]), tmp_path, ["c", "z.x", "a/1", "a/b/2"])
    for key in ("images", "masks"):
        with pytest.raises(SourceError, match=f"`source.{key}` does not exist"):
            gpuaug.MaskFolderSource(tmp_path, **{key: "none"})
    with pytest.raises(SourceError, match="no images .* ends in _x.jpg, _x.jpeg"):
        gpuaug.MaskFolderSource(tmp_path, image_suffix="_x", extensions=["jpg", "jpeg"])
    for more in ({"image_suffix": 3}, {"mask_suffix": "a/b"}, {"mask_extension": ""}, {"images": ""}, {"remote": 1}):
        with pytest.raises(ConfigError, match=f"`source.{next(iter(more))}`"):
            gpuaug.MaskFolderSource(tmp_path, **more)


def test_a_mask_that_cannot_be_read_is_a_fault_of_its_sample(tmp_path):
    write(tmp_path)
    source = gpuaug.MaskFolderSource(tmp_path)
    (tmp_path / "masks" / "c.png").unlink()
    (tmp_path / "images" / "z.x.jpg").unlink()
    for number, name in ((0, "c.png"), (1, "z.x.jpg")):
        with pytest.raises(FileNotFoundError, match=name):
            source[number]
    assert source[2][1].mask
    with pytest.raises(IndexError):
        source[4]


def test_names_need_not_be_utf_8(tmp_path):
    name = os.fsdecode(b"a\xff\n b")
    write(tmp_path, stems=[name, "ü"])
    source = gpuaug.MaskFolderSource(tmp_path, mask_extension="PNG")
    check(source, tmp_path, [name, "ü"])


def test_a_bucket_is_the_same_as_its_folder(tmp_path):
    write(tmp_path / "train")
    local = gpuaug.MaskFolderSource(tmp_path / "train")
    with s3() as port:
        url = bucket_of(port, tmp_path / "train", "photos")
        with proxied(port) as (proxy, address):
            remote = Remote(options=options(address), cache=tmp_path / "cache")
            source = gpuaug.MaskFolderSource(url, remote=remote)
            assert source.digest() == local.digest()
            proxy.reset()
            assert source.read_many(range(4)) == list(local)
            assert len(proxy.gets) == 8  # both ranges of each sample in one read
            assert source.read_many([2, 2]) == [local[2]] * 2
            assert len(proxy.gets) == 8  # from the disk cache
        mixed = gpuaug.MaskFolderSource(
            images=f"{url}/images", masks=tmp_path / "train" / "masks",
            remote=Remote(options=options(f"http://127.0.0.1:{port}")),
        )  # fmt: skip
        assert mixed.read_many(range(4)) == list(local)
