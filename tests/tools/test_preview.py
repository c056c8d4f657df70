"""`gpuaug preview`: picture and page show what training sees; operations stand at the ends of their ranges."""

from __future__ import annotations

import base64
import html
import io
import json
import re
from pathlib import Path

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

import gpuaug
from bench import photographs
from gpuaug.augment.policy import OneOf, SomeOf, prepare
from gpuaug.display import sheet
from gpuaug.display.annotations import Annotated, Style
from gpuaug.display.batches import WRONG
from gpuaug.errors import ConfigError
from gpuaug.tools.main import main
from gpuaug.tools.preview import drawing as preview
from gpuaug.tools.preview import operations
from gpuaug.tools.preview.originals import Sample


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photographs.cut(tmp_path_factory.mktemp("photos"), count=60) / "train"


def compose(photos: Path, *overrides: str) -> gpuaug.Loader:
    return gpuaug.build(gpuaug.compose("train", [f"source.root={photos}", "num_workers=0", *overrides]))


@pytest.mark.parametrize("recipe", ["standard", "dino"])
def test_pictures_are_those_of_the_training(recipe: str, photos: Path) -> None:
    """Another batch size, order and batch give the same pixels, up to one step of 256."""
    with compose(photos, f"augment={recipe}", "batch_size=7", "seed=3") as loader:
        loader.set_epoch(2)
        trained = {}
        for batch in loader:
            views = batch.images if isinstance(batch.images, list) else [batch.images]
            for row, index in enumerate(batch.indices.tolist()):
                trained[index] = [view[row] for view in views]
            if len(trained) > 20:
                break
    chosen = sorted(trained)[:3]
    with compose(photos, f"augment={recipe}", "seed=3") as loader:
        samples = preview.samples_of(loader, chosen, epochs=range(2, 4))
        views = loader.augment.views
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    for sample in samples:
        assert len(sample.augmented) == len(sample.crops) == 2 * len(views)
        for picture, image in zip(sample.augmented, trained[sample.index], strict=False):
            expected = ((image * std + mean).clamp(0, 1) * 255).round().permute(1, 2, 0).numpy()
            assert np.abs(np.asarray(picture.picture).astype(float) - expected).max() <= 1


def test_boxes_are_what_was_cut_out_of_the_original(photos: Path) -> None:
    more = ["augment=flip", "augment.ops.flip.p=0.0", "augment.crop.interpolation=bilinear"]
    with compose(photos, *more) as loader:
        samples = preview.samples_of(loader, [0, 11, 30], epochs=[5])
    for sample in samples:
        assert not sample.absent
        part = sample.original.picture.crop(sample.crops[0]).resize((224, 224), Image.Resampling.BILINEAR)
        difference = np.asarray(part).astype(float) - np.asarray(sample.augmented[0].picture).astype(float)
        assert np.abs(difference).mean() < 2.0  # Pillow's resize rounds between its two passes


def test_originals_are_upright_and_named(photos: Path) -> None:
    from PIL import ImageOps

    with compose(photos) as loader:
        indices = list(range(len(loader.source)))
        samples = preview.samples_of(loader, indices, epochs=[0])
    for sample in samples:
        with Image.open(photos / sample.key) as image:
            upright = ImageOps.exif_transpose(image).convert("RGB")
        assert not sample.absent
        assert np.array_equal(np.asarray(sample.original.picture), np.asarray(upright))
        assert sample.label == sample.key.split("/")[0]


@pytest.mark.parametrize(
    ("more", "columns"),
    [
        ((), 6),
        (("augment=dino", "samples=2"), 8),
        (("augment=none", "augment.normalize=null", "draws=2", "samples=[5,40]", "epoch=7"), 2),
        (("source.labels=none", "mix=cutmix", "draws=1", "samples=[3]", "cell=32", "dtype=bfloat16"), 1),
        (("order=repeated", "source.subset=3", "samples=1000", "draws=1", "augment.backend=kornia"), 1),
    ],
)
def test_writes_a_picture(more: tuple[str, ...], columns: int, photos: Path, tmp_path: Path) -> None:
    words = ["preview", f"source.root={photos}", f"out={tmp_path}/p.png", f"json={tmp_path}/p.json", *more]
    assert main(words) == 0
    values = json.loads((tmp_path / "p.json").read_text())
    assert len(values["epochs"]) * len(values["views"]) == columns
    with Image.open(tmp_path / "p.png") as page:
        assert page.format == "PNG"
        assert page.width > 100
        assert page.height > 30 * len(values["numbers"])
        assert len(set(np.asarray(page.convert("L")).ravel().tolist())) > 100  # there is something to be seen
    if "epoch=7" in more:
        assert values["numbers"] == [5, 40]
        assert values["epochs"] == [7, 8]


def test_a_broken_image_is_drawn_as_a_cross(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "images" / "a").mkdir(parents=True)
    (tmp_path / "images" / "a" / "0_broken.jpg").write_bytes(b"\xff\xd8 no image")
    good = next((photos / "cat").iterdir())
    (tmp_path / "images" / "a" / "1_good.jpg").write_bytes(good.read_bytes())
    words = ["preview", f"source.root={tmp_path}/images", f"out={tmp_path}/p.png", "draws=1"]
    for policy in ("raise", "blank", "drop"):
        assert main([*words, f"faults.policy={policy}"]) == 0
        assert "0_broken.jpg') failed in decode" in capsys.readouterr().err
    with gpuaug.build(gpuaug.compose("train", [f"source.root={tmp_path}/images", "num_workers=0"])) as loader:
        bad, well = preview.samples_of(loader, [0, 1], epochs=[0])
        red, none = ((np.asarray(each.augmented[0].picture) == WRONG).all(axis=2) for each in (bad, well))
        assert red.diagonal().all()  # a cross
        assert not none.any()
        assert loader.faults.count == 0


@pytest.mark.parametrize(
    ("augment", "show", "expected"),
    [
        ("lerobot", "samples", [(40, 60), (60, 40)]),
        ("seg_torchvision_eval", "samples", [(520, 780), (780, 520)]),
        ("lerobot", "operations", [(75, 112), (112, 75)]),  # the longer side is 112
    ],
)
def test_images_of_many_sizes_without_one_size_of_the_crop(
    augment: str, show: str, expected: list[tuple[int, int]], tmp_path: Path
) -> None:
    """Without a crop, or with a crop that keeps the aspect ratio, each sample is a batch of its own."""
    (tmp_path / "images").mkdir()
    for n, size in enumerate(((40, 60), (60, 40))):
        Image.new("RGB", size, (90 * n, 120, 30)).save(tmp_path / "images" / f"{n}.png")
    words = ["preview", f"source.root={tmp_path}/images", f"show={show}", f"augment={augment}", "samples=2", "draws=1"]
    words += ["source.labels=none", f"out={tmp_path}/p.html"]
    assert main([*words, "device=cpu"]) == 0
    sizes = sizes_of((tmp_path / "p.html").read_text())
    row = len(sizes) // 2  # pictures of a sample
    assert sizes == [*[sizes[0], *[expected[0]] * (row - 1)], *[sizes[row], *[expected[1]] * (row - 1)]]
    assert row > 1


def sizes_of(html: str) -> list[tuple[int, int]]:
    """The size of each picture of a page."""
    made = []
    for data in re.findall(r'base64,(.*?)"', html):
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            made.append(image.size)
    return made


def test_only_samples_that_are_there_can_be_shown() -> None:
    source = TensorDataset(torch.arange(3))
    source.indices = torch.tensor([2, 5, 9])
    assert preview.chosen(source, None, count=2) == [2, 9]
    assert preview.chosen(source, None, count=100) == [2, 5, 9]
    assert preview.chosen(source, preview.Settings(samples=[9, 2, 9]).samples, count=2) == [9, 2, 9]
    with pytest.raises(ConfigError, match="from 2 to 9.*: 3, 11"):
        preview.chosen(source, [11, 3, 5], count=2)


@pytest.mark.parametrize("length", [1, 2, 5, 48, 1000])
def test_samples_are_spread_evenly_and_none_is_shown_twice(length: int) -> None:
    source = TensorDataset(torch.arange(length))
    source.indices = torch.arange(length) * 3
    for count in range(1, 12):
        found = preview.chosen(source, None, count=count)
        assert len(set(found)) == len(found) == min(count, length)
        assert found == sorted(found)
        places = np.array([0, *(np.array(found) // 3), length - 1])
        assert np.diff(places).max() <= -(-length // len(found)), (length, count, found)


@pytest.mark.parametrize(
    "words",
    [("cell=100000",), ("draws=1000000",), ("draws=1000000", "out=p.html"), ("show=operations", "cell=50000")],
    ids=" ".join,
)
def test_pictures_beyond_all_bounds_are_refused_before_they_are_made(
    words: tuple[str, ...], photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = tuple(word.replace("out=", f"out={tmp_path}/") for word in words)
    assert main(["preview", f"source.root={photos}", f"out={tmp_path}/p.png", *words]) == 2
    assert "The limit is " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_page_holds_the_pixels_of_the_training(photos: Path, tmp_path: Path) -> None:
    more = ["samples=[3,17]", "epoch=4", "draws=3", "augment=dino", "seed=5"]
    assert main(["preview", f"source.root={photos}", f"out={tmp_path}/p.html", *more]) == 0
    text = (tmp_path / "p.html").read_text()
    data = iter(re.findall(r'<img src="data:image/webp;base64,([^"]+)"', text))
    with compose(photos, "augment=dino", "seed=5") as loader:
        samples = preview.samples_of(loader, [3, 17], epochs=[4, 5, 6])
    for sample in samples:
        next(data)  # the original
        for shown in sample.augmented:
            with Image.open(io.BytesIO(base64.b64decode(next(data)))) as image:
                assert np.array_equal(np.asarray(image.convert("RGB")), np.asarray(shown.picture))
    assert next(data, None) is None
    assert all(text.count(f"epoch {epoch}") == text.count("epoch 4") > 1 for epoch in (5, 6))


def test_a_page_asks_for_nothing_and_runs_nothing_from_the_data() -> None:
    evil = "</script><script>alert(1)</script>\"'&{{data}}\udcff"
    picture = Image.new("RGB", (8, 8))
    shown = Annotated(picture)
    samples = [
        Sample(7, evil, evil, shown, absent, [(0, 0, 4, 4)] * 2, [shown] * 2, [evil] * 2) for absent in ("", evil)
    ]
    made = preview.rows_of(samples, [("epoch 0", evil), ("epoch 1", evil)], Style(), cell=None)
    text = sheet.page(made, heading=evil[:-1], lines=[evil[:-1]])
    text.encode()
    assert "<script" not in text
    assert html.escape("</script><script>alert(1)") in text
    assert "default-src 'none'" in text
    assert not re.search(r"""(src|href)=["'](?!data:)""", text)
    assert not re.search(r"https?://|url\(|@import", text)


def test_the_boxes_of_the_first_draws_are_on_the_original() -> None:
    original, view = (Annotated(Image.new("RGB", (side, side))) for side in (40, 10))
    sample = Sample(7, "a/7.jpg", "a", original, crops=[(0, 0, 20, 20)], augmented=[view], details=[""])
    ((original, view),) = (row.cells for row in preview.rows_of([sample], [("epoch 3", "")], Style(), cell=80))
    assert (original.picture.size, view.picture.size) == ((108, 108), (80, 80))
    assert (original.caption, view.caption) == ("original", "epoch 3")
    pixels = np.asarray(original.picture)
    assert pixels[0, 30].tolist() == pixels[30, 0].tolist() == list(view.color)
    assert not pixels[60:].any()


OPS = {
    "flip": (K.RandomHorizontalFlip(p=0.5), [["applied"]]),
    "jitter": (
        K.ColorJitter(0.4, 0.2, 0.0, 0.1, p=0.8),
        [["brightness 0.6", "brightness 1", "brightness 1.4"], ["contrast 0.8", "contrast 1", "contrast 1.2"],
         ["hue -0.1", "hue 0", "hue 0.1"]],
    ),
    "ordered": (K.ColorJitter(0.4, order=(0, 1)), [["brightness 0.6", "brightness 1", "brightness 1.4"]]),
    "blur": (K.RandomGaussianBlur(5, (0.1, 2.0)), [["sigma 0.1", "sigma 1.05", "sigma 2"]]),
    "solarize": (K.RandomSolarize((0.5, 0.5), (0.0, 0.0)), [["thresholds 0.5, additions 0"]]),
    "rotate": (K.RandomRotation(30.0), [["degrees -30", "degrees 0", "degrees 30"]]),
    "noise": (K.RandomGaussianNoise(0.0, 0.2), [["applied"]]),
    "one": (
        OneOf(ops={"gray": K.RandomGrayscale(p=0.2), "gamma": K.RandomGamma((0.5, 1.5))}),
        [["applied"], ["gamma 0.5", "gamma 1", "gamma 1.5"]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_ranges_are_those_of_the_operation(name: str) -> None:
    op, captions = OPS[name]
    assert [span.captions for span in operations.spans(prepare(name, op), (32, 24))] == captions


def test_policies_show_every_choice_with_both_signs() -> None:
    found = {s.what: s.captions for s in operations.spans(prepare("ra", gpuaug.RandAugment()), (64, 64))}
    assert len(found) == 14
    assert found["rotate: magnitude"] == ["magnitude -9", "magnitude 9"]
    trivial = {s.what: s.captions for s in operations.spans(prepare("ta", gpuaug.TrivialAugmentWide()), (64, 64))}
    assert trivial["rotate: magnitude"] == ["magnitude -135", "magnitude 0", "magnitude 135"]
    auto = operations.spans(prepare("aa", gpuaug.AutoAugment()), (64, 64))
    assert len({s.what.partition(":")[0] for s in auto}) > 5


@pytest.mark.parametrize("backend", ["fused", "kornia"])
def test_operations_are_shown_with_those_values(backend: str) -> None:
    """Brightness in Kornia's jitter is a product: the pictures are the image times the captions."""
    image = Image.new("RGB", (32, 32), (100, 100, 100))
    augment = gpuaug.Augment(
        ops={"flip": K.RandomHorizontalFlip(p=0.1), "jitter": K.ColorJitter(0.5, p=0.1)}, backend=backend
    )
    samples = [preview.Sample(3, "a/x.png", "a", Annotated(image))]
    (row,), listed = operations.grid(augment.views, samples, seed=0, device=torch.device("cpu"), cell=32)
    notes = [["RandomHorizontalFlip", "p 0.1"], ["ColorJitter: brightness", "p 0.1"]]
    assert [each["notes"] for each in listed] == notes
    captions = ["original", "flip: applied", *(f"jitter: brightness {x}" for x in (0.5, 1, 1.5))]
    assert [cell.caption for cell in row.cells] == captions
    assert [cell.details for cell in row.cells] == ["", "\n".join(notes[0]), *["\n".join(notes[1])] * 3]
    values = [np.asarray(cell.picture).mean() for cell in row.cells]
    np.testing.assert_allclose(values, [100, 100, 50, 100, 150], atol=0.51)


def test_the_notes_name_the_choice_and_the_view() -> None:
    one = OneOf(ops={"gray": K.RandomGrayscale(p=0.2), "off": None}, p=0.7)
    some = SomeOf(2, ops={"dark": K.RandomGamma((2.0, 3.0)), "light": K.RandomGamma((0.2, 0.4)), "one": one})
    ops = {"one": one, "vflip": K.RandomVerticalFlip(p=0.5), "some": some}
    views = gpuaug.MultiView(views={"a": gpuaug.Augment(ops=ops)}).views
    samples = [preview.Sample(0, "x", "", Annotated(Image.new("RGB", (32, 32))))]
    _, made = operations.grid(views, samples, seed=0, device=torch.device("cpu"), cell=32)
    assert [(each["name"], *each["notes"]) for each in made] == [
        ("one.gray", "OneOf:", "a: p 0.7", "RandomGrayscale"),
        ("vflip", "RandomVerticalFlip", "a: p 0.5"),
        *((f"some.{name}", "SomeOf:", "a: p 1", "RandomGamma: gamma") for name in ("dark", "light")),
        ("some.one.gray", "SomeOf:", "a: p 1", "RandomGrayscale"),
    ]


def test_an_operation_of_several_views_is_shown_once() -> None:
    views = {
        name: gpuaug.Augment(
            ops={"blur": K.RandomGaussianBlur(5, (0.1, 2.0), p=p), "jitter": K.ColorJitter(0.2 * n, p=1)}
        )
        for n, (name, p) in enumerate((("a", 1.0), ("b", 0.1)), 1)
    }
    samples = [preview.Sample(0, "x", "", Annotated(Image.new("RGB", (32, 32))))]
    (row,), made = operations.grid(
        gpuaug.MultiView(views=views).views, samples, seed=0, device=torch.device("cpu"), cell=32
    )
    assert [each["name"] for each in made] == ["blur", "jitter", "jitter"]
    assert made[0]["notes"] == ["RandomGaussianBlur: sigma", "a: p 1", "b: p 0.1"]
    assert len(row.cells) == 10


def test_operations_of_a_recipe_are_drawn(photos: Path, tmp_path: Path) -> None:
    more = ["augment=threeaugment", "show=operations", f"json={tmp_path}/p.json"]
    assert main(["preview", f"source.root={photos}", f"out={tmp_path}/p.png", *more]) == 0
    values = json.loads((tmp_path / "p.json").read_text())
    assert len(values["operations"]) >= 4
    count = 1 + sum(len(each["values"]) for each in values["operations"])
    with Image.open(tmp_path / "p.png") as sheet:
        assert sheet.width < 1400
        assert sheet.height > 112 * -(-count // 9)
        assert len(set(np.asarray(sheet.convert("L")).ravel().tolist())) > 100


def test_operations_that_cannot_be_shown_are_refused(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["preview", f"source.root={photos}", "show=operations"]
    assert main([*words, f"out={tmp_path}/p.png", "augment=eval"]) == 2
    assert "needs a recipe with operations" in capsys.readouterr().err
    assert main([*words[:2], "show=ops"]) == 2
    assert "`show` must be one of samples, operations" in capsys.readouterr().err
    (tmp_path / "images" / "a").mkdir(parents=True)
    (tmp_path / "images" / "a" / "broken.jpg").write_bytes(b"\xff\xd8 no image")
    assert main(["preview", f"source.root={tmp_path}/images", f"out={tmp_path}/p.png", "show=operations"]) == 2
    assert "broken.jpg" in capsys.readouterr().err


@pytest.mark.parametrize("crop", [gpuaug.RandomResizedCrop((48, 96)), gpuaug.Resize((30, 20)), None])
def test_operations_start_from_the_middle_at_the_size_of_training(crop: gpuaug.Resize | None) -> None:
    ramp = np.broadcast_to(np.linspace(0, 255, 90).astype(np.uint8)[None, :, None], (60, 90, 3))
    fitted = np.asarray(operations.fitted(Image.fromarray(ramp), crop))
    assert fitted.shape[:2] == ((60, 90) if crop is None else crop.size)
    assert abs(fitted.mean() - 127.5) < 2  # the middle


def test_augmented_versions_are_shown_as_they_are_and_their_operations_refused(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [f"source.root={photos}", "source.subset=4", "num_workers=0"]
    assert main(["pack", *few, "epochs=1", f"out={tmp_path}/epochs"]) == 0
    words = ["preview", "source=packed", f"source.root={tmp_path}/epochs", f"out={tmp_path}/p.png"]
    assert main([*words, f"json={tmp_path}/p.json"]) == 0
    assert json.loads((tmp_path / "p.json").read_text())["epochs"] == [0]  # the second would be the first again
    assert main([*words[:-1], f"out={tmp_path}/p.html"]) == 0
    assert "not stored" in (tmp_path / "p.html").read_text()
    assert main([*words, "show=operations"]) == 2
    assert "source=folder" in capsys.readouterr().err
