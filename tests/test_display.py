"""Batches and loaders show themselves as what they are; one sample of a loader is that of its batches."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from common import MEAN, NORMALIZE, STD, loader, recipe
from conftest import ROOT
from PIL import Image

import gpuaug
from gpuaug.display.annotations import Style, color_of
from gpuaug.display.batches import WRONG, Appearance, label_text
from gpuaug.display.sheet import GAP, PAPER, SWATCH, drawable, fitting, font, wrapped

SIZE = 64  # a picture of a batch has cells of at least 64 pixels


def expected(images: torch.Tensor) -> np.ndarray:
    """Normalized images [n, 3, H, W] as levels 0..255, [n, H, W, 3]."""
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (MEAN, STD))
    return ((images.float() * std + mean).clamp(0, 1) * 255).permute(0, 2, 3, 1).numpy()


def cells(picture: Image.Image, count: int, *, size: int = SIZE, groups: int = 1) -> list[np.ndarray]:
    """The first row of a picture of square images without a legend."""
    pixels, found, x = np.asarray(picture).astype(float), [], GAP
    for n in range(count):
        found.append(pixels[GAP : GAP + size, x : x + size])
        x += size + GAP * (1 + (groups > 1 and n % groups == groups - 1))
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "channels_last": {"dtype": "float16", "memory_format": "channels_last", "mix": gpuaug.Mix(mixup_alpha=1)},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_batch_shows_its_pixels_without_normalization(settings: dict[str, Any], photos: Path) -> None:
    with loader(photos, augment=recipe(size=SIZE), **settings) as made:
        batch = next(iter(made))
    picture = batch.show(columns=7, size=SIZE)
    for found, image in zip(cells(picture, 7), expected(batch.images), strict=True):
        assert np.abs(found - image).max() <= 0.5 + 1e-3
    for other in (batch.to("cpu"), pickle.loads(pickle.dumps(batch)), replace(batch, labels=batch.labels)):
        assert other.show(columns=7, size=SIZE).tobytes() == picture.tobytes()


def test_views_of_a_sample_are_side_by_side(photos: Path) -> None:
    augment = recipe(size=SIZE).replace(copies=2)
    with loader(photos, augment=augment) as made:
        batch = next(iter(made))
    shown = cells(batch.show(columns=3, size=SIZE), 6, groups=2)
    for n, found in enumerate(shown):
        assert np.abs(found - expected(batch.images[n % 2])[n // 2]).max() <= 0.5 + 1e-3


def test_views_of_several_sizes_have_one_scale(photos: Path) -> None:
    views = {"large": recipe(size=2 * SIZE), "small": recipe(size=SIZE)}
    with loader(photos, augment=gpuaug.MultiView(views=views)) as made:
        picture = made.fetch([3]).show(size=2 * SIZE)
    pixels = np.asarray(picture)
    assert picture.width == 4 * GAP + 3 * SIZE
    assert (pixels[GAP + SIZE + 25 :, 2 * GAP + 2 * SIZE :] == PAPER).all()  # below the small view and its caption


def test_sizes_of_the_picture(photos: Path) -> None:
    with loader(photos, augment=recipe(size=SIZE), batch_size=20) as made:
        batch = next(iter(made))
    assert batch.show().width == GAP + 8 * (128 + GAP)
    assert batch.show(rows=1, columns=3, size=80).width == GAP + 3 * (80 + GAP)
    assert batch.show(rows=3).height > batch.show().height > batch.show(rows=1).height  # two rows by default
    with Image.open(io.BytesIO(batch._repr_png_())) as small:
        assert small.format == "PNG"
        assert small.width < batch.show().width
    with pytest.raises(gpuaug.ConfigError, match="`columns`"):
        batch.show(columns=0)
    with pytest.raises(gpuaug.ConfigError, match="at least one sample"):
        replace(batch, images=batch.images[:0]).show()
    with pytest.raises(gpuaug.ConfigError, match="number of views. Found: 2 and 1"):
        replace(batch, images=[batch.images] * 2).show()


def test_bad_and_repeated_samples_are_marked(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for file in sorted(photos.rglob("*.jpg"))[:2]:
        (tmp_path / "a" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "a" / "zz.jpg").write_bytes(b"no image")
    settings = {"faults": gpuaug.Faults(policy="blank"), "shuffle": False, "last": "pad", "batch_size": 5}
    with loader(tmp_path, augment=recipe(size=SIZE), **settings) as made:
        batch = next(iter(made))
    assert batch.valid.tolist() == [True, True, False, False, False]
    picture = batch.show(columns=5, size=SIZE)
    first, second, blank, *repeated = cells(picture, 5)
    for found, row in ((first, 0), (second, 1), (repeated[0], 3)):
        assert np.abs(found - expected(batch.images)[row]).max() <= 0.5 + 1e-3
    for y, x in ((0, 20), (SIZE // 2, 0), (20, 20), (20, SIZE - 21)):  # a frame and two diagonals
        assert blank[y, x].tolist() == list(WRONG)
    captions = np.asarray(picture)[GAP + SIZE :]
    red = [(captions[:, x : x + SIZE] == WRONG).all(axis=2).any() for x in range(GAP, picture.width, SIZE + GAP)]
    assert red == [False, False, True, True, True]


def test_black_photographs_that_only_fill_the_batch_are_not_crossed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.new("RGB", (SIZE, SIZE)).save(tmp_path / "a" / "black.png")
    (tmp_path / "a" / "zz.png").write_bytes(b"no image")
    settings = {"faults": gpuaug.Faults(policy="blank"), "shuffle": False, "last": "pad", "batch_size": 4}
    with loader(tmp_path, augment=recipe(size=SIZE).replace(ops={}, normalize=None), **settings) as made:
        batch = next(iter(made))
    assert batch.valid.tolist() == [True, False, False, False]
    assert not batch.images.any()
    for each in (batch, pickle.loads(pickle.dumps(batch))):
        shown = cells(each.show(columns=4, size=SIZE), 4)
        assert [cell.any() for cell in shown] == [False, True, False, True]  # the copy of an unreadable one is crossed


def test_looking_at_bad_samples_costs_no_fault_budget(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "bad.jpg").write_bytes(b"no image")
    faults = gpuaug.Faults(policy="blank", max=1, file=str(tmp_path / "faults.jsonl"))
    with loader(tmp_path, augment=recipe(size=SIZE), faults=faults) as made:
        for _ in range(3):
            assert not made[0][0].any()
        gpuaug.preview(made, [0], epochs=2)
    assert faults.count == 0
    assert not (tmp_path / "faults.jsonl").exists()


def test_a_pickled_batch_has_the_keys_of_its_samples_and_no_source(photos: Path) -> None:
    with loader(photos, augment=recipe(size=SIZE)) as made:
        made.source.handle = (photos / "x").parent.joinpath  # stands for an open file
        made.source.large = b"x" * 1_000_000
        batch = made.fetch([3, 7])
        for copied in (pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)):
            assert copied.keys == batch.keys == [made.source.key(3), made.source.key(7)]
            assert torch.equal(copied.images, batch.images)
            assert copied.look == batch.look
        assert len(pickle.dumps(batch)) < 500_000


def test_a_batch_that_no_loader_made_is_shown_as_it_is() -> None:
    images = torch.rand(2, 3, SIZE, SIZE)
    images[0, 0, 0, 0], images[1, 0, 0, 0] = float("nan"), 7.0
    numbers = torch.tensor([4, 2])
    batch = gpuaug.Batch(images=images, labels=None, indices=numbers, valid=numbers > 0)
    for found, image in zip(cells(batch.show(size=SIZE), 2), images, strict=True):
        pixels = image.nan_to_num().clamp(0, 1).permute(1, 2, 0).numpy() * 255
        assert np.abs(found - pixels).max() <= 0.5 + 1e-3
    assert repr(batch) == "Batch(images=float32 [2, 3, 64, 64] on cpu, labels=None, 2 of 2 valid)"
    levels = torch.randint(0, 256, (2, 3, SIZE, SIZE), dtype=torch.uint8)
    for found, image in zip(cells(replace(batch, images=levels).show(size=SIZE), 2), levels, strict=True):
        assert np.array_equal(found, image.permute(1, 2, 0).numpy())
    frames, clips = list(levels.expand(2, 2, 3, SIZE, SIZE)), levels[:, None].expand(2, 2, 3, SIZE, SIZE)
    assert replace(batch, images=clips).show().tobytes() == replace(batch, images=frames).show().tobytes()


@pytest.mark.parametrize(
    ("label", "classes", "text"),
    [
        (None, ["cat"], ""),
        (1, ["cat", "dog"], "dog"),
        (5, ["cat", "dog"], "label 5"),
        (-1, ["cat", "dog"], "label -1"),
        (3, None, "label 3"),
        ([0.3, 0.7], ["cat", "dog"], "dog 0.70, cat 0.30"),
        ([0.01, 0.99], ["cat", "dog"], "dog 0.99"),
        ([1.0, 0.0, 1.0], ["cat", "dog", "cow"], "cat, cow"),
        ([1.0] * 5, None, "label 0, label 1, label 2, 2 more"),
        ([0.0, 0.0], None, "no label"),
        ([1.0000001, -1e-7], ["cat", "dog"], "cat"),
        ([2.5], None, "label 2.5"),
        ([2.5, -1.0, 0.0, 1.0, 2.0], None, "label 2.5, -1, 0, 1, ..."),
    ],
)
def test_labels_as_text(label: Any, classes: list[str] | None, text: str) -> None:
    assert label_text(label, classes) == text


class Squares:
    """Gray images with one box each, and a mask of the box."""

    target_kinds = frozenset({"masks", "boxes"})
    classes = ("ant", "bee", "cow")

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[bytes, gpuaug.Target]:
        image, mask, files = np.full((100, 100, 3), 90, np.uint8), np.zeros((100, 100), np.uint8), []
        mask[30:80, 20:60] = index + 1
        for array in (image, mask):
            Image.fromarray(array).save(file := io.BytesIO(), "png")
            files.append(file.getvalue())
        return files[0], gpuaug.Target(mask=files[1], boxes=[[20, 30, 60, 80]], labels=[index], size=(100, 100))


def test_targets_are_drawn() -> None:
    augment = gpuaug.Augment(crop=gpuaug.Resize((100, 100)), normalize=NORMALIZE)
    boxes, masks = gpuaug.Targets(boxes=gpuaug.Boxes()), gpuaug.Targets(masks=gpuaug.Masks())
    with loader(Squares(), augment=augment, targets=boxes, shuffle=False) as made:
        batch = next(iter(made))
        pixels = np.asarray(batch.show(size=100))
        assert repr(batch).endswith("targets=boxes, 3 of 3 valid)")
        image, targets = made[2]
        assert torch.equal(image, batch.images[2])
        assert targets.boxes.tolist() == [[20, 30, 60, 80]]
    top = 3 * GAP + SWATCH  # below the legend
    for n in range(3):
        cell = pixels[top : top + 100, GAP + n * (100 + GAP) :][:, :100]
        for y, x in ((60, 20), (60, 59), (79, 40)):
            assert cell[y, x].tolist() == list(color_of(n))
        assert cell[60, 40].tolist() == [90, 90, 90]
    with loader(Squares(), augment=augment, targets=masks, shuffle=False) as made:
        batch = next(iter(made))
        pixels = np.asarray(batch.show(size=100)).astype(int)
        assert torch.equal(made[1][1], batch.targets.masks[1])
    for n in range(3):
        cell = pixels[top : top + 100, GAP + n * (100 + GAP) :][:, :100]
        blended = 90 + 0.5 * (np.array(color_of(n)) - 90)
        assert np.abs(cell[50:70, 30:50] - blended).max() <= 1


@pytest.mark.parametrize("copies", [1, 2])
def test_a_sample_of_a_loader_is_that_of_its_batches(copies: int, photos: Path) -> None:
    with loader(photos, augment=recipe("fused").replace(copies=copies), num_workers=0) as made:
        made.set_epoch(2)
        for batch in made:
            for row, index in list(enumerate(batch.indices.tolist()))[:2]:
                image, label = made[np.int64(index)]
                for a, b in zip(
                    image if copies > 1 else [image], batch.images if copies > 1 else [batch.images], strict=True
                ):
                    assert torch.equal(a, b[row])
                assert label == int(batch.labels[row])
                assert type(label) is int
        assert made.epoch == 3
        assert torch.equal(made[-1][0][0], made[len(made.source) - 1][0][0])


def test_numbers_of_samples_that_are_left_out(photos: Path) -> None:
    with loader(gpuaug.FolderSource(photos, subset=10)) as made:
        active = made.source.indices.tolist()
        assert torch.equal(made[-1][0], made[active[-1]][0])
        assert torch.equal(made[active[3]][0], made.fetch([active[3]]).images[0])


def test_what_is_no_sample_is_refused(photos: Path) -> None:
    with loader(photos) as made:
        count = len(made.source)
        for index in (count, -count - 1, 10**9):
            with pytest.raises(IndexError, match=f"the source has {count} samples"):
                made[index]
        for index in (slice(0, 2), [0, 1], 1.0, "a", None):
            with pytest.raises(gpuaug.ConfigError, match="one sample"):
                made[index]
        with pytest.raises(gpuaug.ConfigError, match="takes the place of a DataLoader"):
            next(iter(torch.utils.data.DataLoader(made, batch_size=2)))
        assert sum(len(batch) for batch in made) == count
    with pytest.raises(gpuaug.GpuaugError, match="closed"):
        made[0]


class NotRead:
    """A source whose samples must not be read."""

    classes = ("<b>ant</b>", "bee")

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a sample was read")


class Cells(HTMLParser):
    """The texts of a table, row by row."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        self.rows[-1][-1] += data


def test_a_loader_says_what_it_is_without_reading(photos: Path) -> None:
    augment = recipe(**{"<script>": K.RandomErasing()})
    with loader(NotRead(), augment=augment, num_workers=2, mix=gpuaug.Mix(mixup_alpha=0.2)) as made:
        text = repr(made)
        assert text.splitlines() == [
            "Loader(",
            "  source:  Source(NotRead: 5 samples)",
            "  augment: RandomResizedCrop, vflip, flip, jitter, gray, <script>",
            "  images:  float32 [7, 3, 32, 32] on cpu",
            "  batches: 7 samples, Shuffle(), seed 3, epoch 0",
            "  workers: 2, prefetch 2",
            "  mix:     Mix(mixup_alpha=0.2, cutmix_alpha=0.0, p=1.0, switch_p=0.5, label_smoothing=0.0)",
            ")",
        ]
        table = Cells(made._repr_html_())
        assert [f"{name}:{' ' * (8 - len(name))}{value}" for name, value in table.rows] == [
            line.strip() for line in text.splitlines()[1:-1]
        ]
        assert "script" not in table.tags
    views = {"large": recipe(size=48), "small": recipe(size=24).replace(copies=4)}
    with loader(photos, augment=gpuaug.MultiView(views=views), dtype="bfloat16") as made:
        text = repr(made)
    assert "bfloat16 [7, 3, 48, 48], 4 x [7, 3, 24, 24] on cpu" in text
    assert "\n           small (4 views): RandomResizedCrop, " in text
    assert f"FolderSource('{photos}': {len(made.source)} images, 5 classes)" in text


def test_normalization_is_undone(v2: Any) -> None:
    images = torch.rand(4, 3, 5, 7)
    normal = NORMALIZE(images)
    torch.testing.assert_close(NORMALIZE.inverse(normal), images, atol=1e-6, rtol=0)
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    theirs = v2.Normalize((-mean / std).tolist(), (1 / std).tolist())
    for given in (3 * torch.randn(2, 3, 4, 4), torch.randn(3, 4, 4)):  # not clamped
        torch.testing.assert_close(NORMALIZE.inverse(given), theirs(given), atol=1e-5, rtol=0)
    half = NORMALIZE.inverse(normal.bfloat16())
    assert half.dtype == torch.float32
    assert (half - images).abs().max() < 0.01
    for wrong in (torch.zeros(3, 4, 4, dtype=torch.uint8), torch.zeros(4, 4), torch.zeros(2, 4, 4), [normal]):
        with pytest.raises(gpuaug.ConfigError, match="float tensor|values for 3 channels"):
            NORMALIZE.inverse(wrong)


def test_preview_shows_originals_and_epochs(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.jpg").write_bytes(sorted(photos.rglob("*.jpg"))[0].read_bytes())
    (tmp_path / "a" / "b.jpg").write_bytes(b"no image")
    with loader(photos, augment=recipe(size=SIZE)) as made:
        made.set_epoch(4)
        picture = gpuaug.preview(made, [5, 17], epochs=[4, 9], size=SIZE)
        assert gpuaug.preview(made, (5, 17), epochs=np.array([4, 9]), size=SIZE).tobytes() == picture.tobytes()
        pixels = np.asarray(picture).astype(float)
        for index in (5, 17):
            for epoch in (4, 9):
                wanted = np.rint(expected(made.fetch([index], epoch=epoch).images)[0])
                places = np.argwhere((pixels[:, :, None] == wanted[0, 0]).all(axis=(2, 3)))
                assert any(
                    pixels[y : y + SIZE, x : x + SIZE].shape == wanted.shape
                    and np.abs(pixels[y : y + SIZE, x : x + SIZE] - wanted).max() <= 1
                    for y, x in places
                )
        assert gpuaug.preview(made, 5, epochs=1).width < gpuaug.preview(made, 5, epochs=3).width
        assert made.epoch == 4
        for wrong in ({"indices": [10**6]}, {"epochs": 0}, {"epochs": []}):
            with pytest.raises(gpuaug.ConfigError, match=f"`{next(iter(wrong))}`"):
                gpuaug.preview(made, **wrong)
        for wrong in ({"epochs": 2.5}, {"epochs": None}, {"indices": slice(0, 2)}, {"indices": 1.0}):
            with pytest.raises(gpuaug.ConfigError, match=f"`{next(iter(wrong))}` must be whole numbers"):
                gpuaug.preview(made, **wrong)
    faults = gpuaug.Faults(policy="drop")
    with loader(tmp_path, augment=recipe(size=SIZE), faults=faults) as made:
        assert gpuaug.preview(made, [0, 1], size=SIZE).height > gpuaug.preview(made, [0], size=SIZE).height
        assert faults.count == 0  # looking is not training


IMPORTS = """
import sys, gpuaug.display.batches
print("torch" in sys.modules)
import gpuaug.read.order, gpuaug.read.reader, gpuaug.source
print(bool({"kornia", "hydra", "omegaconf", "PIL", "nvidia"} & {name.partition(".")[0] for name in sys.modules}))
import gpuaug.loader.loader, torch
print("PIL" in sys.modules)
recipe = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(8))
with gpuaug.Loader(gpuaug.FolderSource(sys.argv[1]), augment=recipe, num_workers=0, device="cpu") as loader:
    next(iter(loader))
print(any(name.startswith("gpuaug") and "target" in name for name in sys.modules), torch.cuda.is_initialized())
"""


def test_drawing_reading_and_loading_import_only_what_they_need(photos: Path) -> None:
    """Drawing no torch, reading no library that augments, a loader no Pillow, a run without targets none of theirs."""
    command = [sys.executable, "-c", IMPORTS, str(photos)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["False"] * 5


def test_texts_are_shortened_to_the_width() -> None:
    face, name = font(12), "".join(map(str, range(60)))
    assert fitting("short", face, 100) == "short"
    assert fitting("a\n\x1b\udcff é.jpg", face, 100) == "a??? e.jpg"  # one line, and names need not be UTF-8
    for middle in (False, True):
        short = fitting(name, face, 100, middle=middle)
        assert 85 < face.getlength(short) <= 100
        first, last = short.split("...")
        assert name.startswith(first)
        assert name.endswith(last)
        assert bool(last) == middle
    begin = time.perf_counter()
    for text in ("W" * 2_000_000, "i" * 20_000, "ab " * 2_000):
        assert face.getlength(fitting(text, face, 180)) <= 180
        assert all(face.getlength(line) <= 180 for line in wrapped(text, face, 180))
    assert time.perf_counter() - begin < 5


def test_too_large_pictures_are_refused_before_they_are_made(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(*_: Any) -> Any:
        raise AssertionError("a picture was scaled")

    monkeypatch.setattr("gpuaug.display.annotations.scaled", scaled)
    numbers = torch.arange(4)
    batch = gpuaug.Batch(images=torch.rand(4, 3, 8, 16), labels=None, indices=numbers, valid=numbers >= 0)
    for size in (20_000, 10**300):
        with pytest.raises(gpuaug.ConfigError, match=r"million pixels|from 16 to 2\*\*63 - 1"):
            batch.show(size=size)
    with loader(photos, augment=recipe(size=SIZE)) as made:
        for settings in ({"epochs": 10**9}, {"epochs": range(10**9)}, {"epochs": 1, "indices": 0, "size": 13_000}):
            with pytest.raises(gpuaug.ConfigError, match="million pixels"):
                gpuaug.preview(made, **settings)


def test_a_batch_without_a_picture_shows_text() -> None:
    numbers = torch.tensor([0, 1])
    batch = gpuaug.Batch(images=torch.rand(2, 3, 8, 8), labels=None, indices=numbers, valid=numbers >= 0)
    assert batch._repr_png_() is not None
    without: Any = None
    for images in (torch.rand(2, 4, 8, 8), torch.rand(0, 3, 8, 8), without):
        other = replace(batch, images=images)
        assert other._repr_png_() is None
        assert repr(other).endswith("labels=None, 2 of 2 valid)")
    assert repr(replace(batch, images=None, valid=without)) == "Batch(images=None, labels=None)"


def test_classes_never_look_the_same() -> None:
    face = font(12)
    assert drawable("Z\u00fcrich, \ufb01sh\u2122") == "Zurich, fishTM"
    assert drawable("\u732b cat\n") == "? cat?"
    names = ["\u732b", "\u72d7", "Zu\u0308rich", "Zurich", "cat"]
    texts = [label_text(n, names) for n in range(5)]
    assert texts == ["0: \u732b", "1: \u72d7", "2: Zu\u0308rich", "Zurich", "cat"]
    assert len({fitting(text, face, 100) for text in texts}) == 5
    assert wrapped(texts[2], face, 100) == ["2: Zurich"]
    numbers = torch.tensor([0, 0])
    batch = gpuaug.Batch(images=torch.zeros(2, 3, 8, 8), labels=numbers, indices=numbers, valid=numbers >= 0)
    pictures = [
        replace(batch, labels=numbers + n, look=Appearance(style=Style(classes=names))).show().tobytes()
        for n in range(5)
    ]
    assert len(set(pictures)) == 5
