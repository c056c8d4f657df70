"""Masks as data sets have them: colours, values to ignore, values that nobody named; errors name the mask's file."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common import loader
from pictures import encode, photograph
from PIL import Image

import gpuaug
from gpuaug.decode.header import HeaderError
from gpuaug.errors import ConfigError, DataError
from gpuaug.targets import masks
from gpuaug.targets.colors import color_table
from gpuaug.targets.rules import Masks
from gpuaug.tools.pack.command import pack
from gpuaug.tools.pack.job import Pack

COLORS = {0: [0, 0, 0], 1: [128, 64, 128], 2: [64, 128, 64], 7: [255, 255, 255], 300: [0, 0, 142]}
KNOWN = np.array([*COLORS.values()], np.uint8)
UNKNOWN = np.array([[1, 0, 0], [128, 64, 127]], np.uint8)
SIZE = (37, 51)


def mode(values: np.ndarray, name: str) -> Image.Image:
    """Indices of `KNOWN`, then of `UNKNOWN`, as an image in colours."""
    palette = np.concatenate([KNOWN, UNKNOWN])
    if name == "P":
        image = Image.fromarray(values.astype(np.uint8), "P")
        image.putpalette(palette.tobytes())
        return image
    image = Image.fromarray(palette[values])
    if name == "RGBA":  # any transparency
        image.putalpha(Image.fromarray((values * 40).astype(np.uint8)))
    return image


def decoded(image: Image.Image, rules: Masks, **more: Any) -> np.ndarray:
    size = {"stored": image.size[::-1], "exif": 1, "max_pixels": 10**6}
    return masks.decode(encode(image, "PNG"), table=masks.lookup(rules), **size, **more)


@pytest.mark.parametrize("name", ["RGB", "RGBA", "P"])
@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({}, {0: 0, 1: 1, 2: 2, 7: 7, 300: 300}),
        ({"ignore": [7, 300]}, {0: 0, 1: 1, 2: 2, 7: 255, 300: 255}),
        ({"map": {0: 5, 1: 4, 2: 4, 7: 3, 300: 2}, "ignore": [0]}, {0: 255, 1: 4, 2: 4, 7: 3, 300: 2}),
    ],
)
def test_colours_are_classes(name: str, rules: dict[str, Any], expected: dict[int, int]) -> None:
    values = np.random.default_rng(0).integers(0, len(KNOWN) + len(UNKNOWN), SIZE)
    wanted = np.full(SIZE, 255)
    for number, color in enumerate(COLORS):
        wanted[values == number] = expected[color]
    found = decoded(mode(values, name), Masks(colors=COLORS, **rules), unnamed=(missing := Counter()))
    np.testing.assert_array_equal(found, wanted)
    keys = [r + 256 * g + 65536 * b for r, g, b in UNKNOWN.tolist()]
    assert missing == {key: int((values == len(KNOWN) + k).sum()) for k, key in enumerate(keys)}


def test_grays_are_colours_too() -> None:
    """Programs that make files smaller write an image with gray colours only as a gray image."""
    values = np.random.default_rng(1).choice([0, 3], SIZE)  # black and white
    for name in ("L", "1", "LA"):
        found = decoded(Image.fromarray(KNOWN[values]).convert(name), Masks(colors=COLORS))
        np.testing.assert_array_equal(found, np.where(values == 3, 7, 0))
    with pytest.raises(HeaderError, match="colours of 16 bits"):
        decoded(Image.fromarray(values.astype(np.uint16)), Masks(colors=COLORS))
    with pytest.raises(HeaderError, match=r"mode RGB.*set `targets.masks.colors`"):
        decoded(Image.fromarray(KNOWN[values]), Masks(map=[1, 2]))


@pytest.mark.parametrize(
    "text",
    ["name,r,g,b\nVoid,0,0,0\nRoad,128,64,128\nAnimal,64,128,64\n",
     '\ufeffname, R, G, B\n"a, b",0,0,0\n"",128,64,128\nx,64,128,64',
     "id,blue,green,red\n2,64,128,64\n0,0,0,0\n1,128,64,128\n"],
)  # fmt: skip
def test_files_of_colours(text: str, tmp_path: Path) -> None:
    (tmp_path / "colors.csv").write_text(text, encoding="utf-8")
    rules = Masks(colors=tmp_path / "colors.csv")
    assert rules.colors == {0: (0, 0, 0), 1: (128, 64, 128), 2: (64, 128, 64)}
    assert repr(rules) == repr(Masks(colors={"0": [0, 0, 0], 1: (128, 64, 128), 2: [64, 128, 64]}))  # for saved states


@pytest.mark.parametrize(
    ("given", "match"),
    [({}, "at least one class"), (3, "a mapping or a FILE"), ({"sky": [1, 2, 3]}, "'sky'"), ({1: [1, 2]}, r"\[1, 2\]"),
     ({1: [1, 2, 256]}, "256"), ({1: "abc"}, "abc"), ({True: [1, 2, 3]}, "True"), ("nowhere.csv", "nowhere.csv"),
     ({1: [1, 2, 3], 2: [1, 2, 3]}, r"\[1, 2, 3\] for the classes 1 and 2"),
     ({1: [0, 0, 0], "1": [1, 1, 1]}, "class 1 twice"),
     ("128 64 128 Road\n", "line 1.*id,name,r,g,b"), ("", "line 1"),
     ("name,r,g,b\nRoad,1,2\n", "line 2"), ("name,r,g,b\n", "at least one class")],
)  # fmt: skip
def test_other_colours_are_errors(given: Any, match: str, tmp_path: Path) -> None:
    if isinstance(given, str) and given != "nowhere.csv":
        (tmp_path / "colors.csv").write_text(given)
        given = tmp_path / "colors.csv"
    with pytest.raises(ConfigError, match=f"`targets.masks.colors` must.*{match}"):
        color_table(given)


def test_rules_that_contradict_are_errors() -> None:
    for more in ({"colors": COLORS}, {"ignore": [3]}):
        with pytest.raises(ConfigError, match=r"`colors` null if `targets.masks.kind` is instances"):
            Masks(kind="instances", **more)
    for ignore in (11, "11", [1.5], [-1], [True], {3: 1}):
        with pytest.raises(ConfigError, match=r"`targets.masks.ignore` must be a list"):
            Masks(ignore=ignore)


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("ignore", [[11], [0, 254], [255], [300]])
def test_ignored_values_are_filled_and_others_stay(deep: bool, ignore: list[int]) -> None:
    values = np.r_[0:256, [300, 65535] if deep else [0, 1]].reshape(6, 43)
    image = Image.fromarray(values.astype(np.uint16 if deep else np.uint8))
    found = decoded(image, Masks(ignore=ignore), unnamed=(missing := Counter()))
    assert found.dtype == (np.int32 if deep else np.uint8)
    np.testing.assert_array_equal(found, np.where(np.isin(values, ignore), 255, values))
    large = np.array([[0, 11, 70_000, 2**31 - 1]], dtype=np.int32)  # as of masks that are already decoded
    table = masks.lookup(Masks(ignore=ignore))
    assert table is not None
    np.testing.assert_array_equal(table.apply(large), np.where(np.isin(large, ignore), 255, large))
    assert not missing


def folder(root: Path, values: list[np.ndarray]) -> gpuaug.MaskFolderSource:
    for kind in ("images", "masks"):
        (root / kind).mkdir()
    for k, mask in enumerate(values):
        (root / f"images/{k}.jpg").write_bytes(encode(photograph(size=mask.shape[1::-1]), "JPEG"))
        (root / f"masks/{k}.png").write_bytes(encode(Image.fromarray(mask), "PNG"))
    return gpuaug.MaskFolderSource(root)


def test_values_without_a_class_are_counted_and_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    named = np.full((20, 30), 255, np.uint8)  # 255 is `fill`: no warning
    named[:3] = 1
    odd = named.copy()
    odd[5, :7], odd[6, :4], odd[7, :2] = 11, 12, 5
    source = folder(tmp_path, [named, odd, odd])
    for rules, lines in (({"map": {1: 0}, "ignore": [5]}, 1), ({"map": {1: 0}, "ignore": [5, 11, 12]}, 0)):
        caplog.clear()
        targets = gpuaug.Targets(masks=Masks(**rules))
        settings = {"augment": gpuaug.Augment(), "targets": targets, "batch_size": 1, "shuffle": False}
        with loader(source, **settings) as made:
            for _ in range(2):
                batches = list(made)
        assert set(np.unique(batches[1].targets.masks)) == {0, 255}
        texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(texts) == lines
        if texts:
            assert "2 values without a class: 11 (7 pixels), 12 (4 pixels)" in texts[0]
            assert str(tmp_path / "masks/1.png") in texts[0]
            assert "`targets.masks.ignore`" in texts[0]


def test_an_error_of_a_mask_names_its_file(tmp_path: Path) -> None:
    source = folder(tmp_path, [np.zeros((20, 30), np.uint8)] * 2)
    path = tmp_path / "masks/1.png"
    size = Image.new("L", (31, 20))
    for wrong, reason in ((encode(size, "PNG"), "mask of 31 x 20 pixels"), (b"text", "not an image")):
        path.write_bytes(wrong)
        targets = gpuaug.Targets(masks=Masks())
        with (
            loader(source, augment=gpuaug.Augment(), targets=targets, batch_size=1) as made,
            pytest.raises(DataError, match=reason) as error,
        ):
            list(made)
        assert repr(str(path)) in str(error.value)
        assert "images" not in str(error.value)


@pytest.mark.parametrize("format", ["jpeg", "uint8"])
def test_packed_copies_hold_classes(format: Any, tmp_path: Path) -> None:
    values = np.random.default_rng(2).integers(0, len(KNOWN), (20, 30))
    for kind in ("data", "copy"):
        (tmp_path / kind).mkdir()
    source = folder(tmp_path / "data", [KNOWN[values], KNOWN[values]])
    for _ in range(2):  # the second call finds the copy finished
        pack(source, tmp_path / "copy", what=Pack(format=format, colors=COLORS), num_workers=0)
    with loader(
        gpuaug.PackedSource(tmp_path / "copy"), augment=gpuaug.Augment(), targets=gpuaug.Targets(masks=Masks())
    ) as made:
        ((_, found),) = list(made)
    assert (found.numpy() == np.array([*COLORS])[values]).all()
    with pytest.raises(DataError, match=r"masks/0.png.*mode RGB"):
        pack(source, tmp_path / "other", what=Pack(format=format), num_workers=0)
