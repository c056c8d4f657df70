"""docs/migrate.md: every line of gpuaug runs.

Operations of both sides change a photograph by the same amount on average, over many draws. So a factor, a
probability or a unit that was translated wrongly is found.
"""

from __future__ import annotations

import re
import shlex
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT
from PIL import Image
from test_docs import write_coco
from torch import Tensor

import gpuaug
from gpuaug.tools.main import main

TEXT = (ROOT / "docs/migrate.md").read_text(encoding="utf-8")
BASE = {
    "timm": ["augment=timm"],
    "solo-learn": ["augment=simclr"],
    "lightly": ["augment=simclr"],
    "lerobot": ["augment=lerobot"],
}  # the recipe that the overrides change
SMALL = ["batch_size=4", "num_workers=0", "device=cpu"]
COUNT = 300  # draws of each operation


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)$", TEXT, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def blocks(section: str, language: str = "python") -> dict[str, str]:
    """Programs of a section, under the name in their first line."""
    found = re.findall(rf"^```{language}\n(# ([\w-]+).*?)^```$", sections()[section], re.DOTALL | re.MULTILINE)
    return {name: text for text, name in found}


def rows(section: str) -> list[tuple[list[str], list[str], str]]:
    """Lines of a section's tables: code of the other library, code of gpuaug, what differs."""
    lines = re.findall(r"^\| (`.*`) \| (`.*`) \| (.*)\|$", sections()[section], re.MULTILINE)
    return [(re.findall(r"`([^`]+)`", a), re.findall(r"`([^`]+)`", b), c.strip()) for a, b, c in lines]


ROWS = [(name, *row) for name in sections() for row in rows(name)]
ENTRIES = {name: [(a, b[0]) for a, b, _ in rows(name) if b[0].startswith('"')] for name in sections()}


def is_override(code: str) -> bool:
    return bool(re.match(r"'?[~+]?[\w.]+=|'?~", code))


@pytest.fixture(scope="module")
def data(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("migrate")
    (root / "train").symlink_to(photos)
    write_coco(root)
    return root


def here(code: str, data: Path) -> str:
    """The code with the paths and devices of this machine, and for one epoch."""
    changed = {
        "/data/": f"{data}/",
        "range(90)": "range(1)",
        "cuda(non_blocking=True)": "cpu()",
        "num_workers=8": "num_workers=0",
        '"mixed"': '"cpu"',
        "device_id=0": "device_id=None",
    }
    for old, new in changed.items():
        code = code.replace(old, new)
    return code


def test_the_page_has_all_libraries_and_lines() -> None:
    assert [*sections()] == [
        *("torchvision", "timm", "Albumentations", "FFCV", "DALI", "solo-learn", "lightly", "stable-pretraining"),
        *("lerobot", "Ultralytics", "DETR", "Segmentation"),
    ]
    lines = [line for line in TEXT.splitlines() if line.startswith("| ") and "gpuaug | what differs" not in line]
    assert len(lines) == len(ROWS) > 100


@pytest.mark.parametrize("section", ["torchvision", "timm", "Albumentations", "FFCV", "DALI", "lightly"])
def test_programs_of_gpuaug_run(section: str, data: Path) -> None:
    for command in re.findall(r"^```\ngpuaug (.+)\n```$", sections()[section], re.MULTILINE):
        main([*shlex.split(here(command, data)), "num_workers=0"])
    names: dict[str, Any] = {}
    exec(compile(here(blocks(section)["gpuaug"], data), section, "exec"), names)
    for images in names["views"] if section == "lightly" else [names["images"]]:
        assert images.shape == (len(images), 3, 224, 224)
        assert images.isfinite().all()
    names["loader"].close()


@pytest.mark.parametrize(("section", "theirs", "ours", "differs"), ROWS, ids=lambda value: str(value)[:60])
def test_lines_of_gpuaug_run(
    section: str, theirs: list[str], ours: list[str], differs: str, data: Path, photo_batch: Tensor
) -> None:
    if ours[0].startswith("gpuaug pack"):
        main([*shlex.split(here(ours[0], data))[1:], "num_workers=0"])
        return
    if is_override(ours[0]):
        overrides = [shlex.split(code)[0] for code in ours]
        base = [] if overrides[0].startswith("augment=") else BASE.get(section, [])
        resize = ["augment.crop={_target_: gpuaug.Resize, size: [64, 64]}"] if section == "lerobot" else []
        cfg = gpuaug.compose("train", [f"source.root={data}/train", *SMALL, *base, *overrides, *resize])
        with gpuaug.build(cfg) as loader:
            images = loader.fetch([0, 1], mix=loader.mix is not None).images
    else:
        names = {"gpuaug": gpuaug, "K": K, "source": gpuaug.FolderSource(data / "train"), "augment": gpuaug.Augment()}
        code = here(ours[0], data)
        if code.startswith('"'):
            images = gpuaug.Augment(ops=eval(f"{{{code}}}", names))(photo_batch.permute(0, 3, 1, 2), seed=0)
        else:
            made = eval(code, names)
            crop = type(made).__module__ in ("gpuaug.augment.crop", "gpuaug.augment.target_crops")
            batch = photo_batch.permute(0, 3, 1, 2)
            known = {"boxes": [torch.tensor([[9.0, 9.0, 30.0, 40.0]])] * len(batch), "masks": batch[:, 0].long()}
            needed = {name: known[name] for name in (made.needs if crop else ())}
            images = gpuaug.Augment(crop=made if crop else None)(batch, seed=0, **needed)
            images = images[0] if needed else images
    for view in images if isinstance(images, list) else [images]:
        assert view.isfinite().all()


# -- the same change of pixels


@pytest.fixture(scope="module")
def photo(photo_batch: Tensor) -> np.ndarray:
    """uint8 [64, 48, 3]."""
    return photo_batch[3].numpy()


def change(images: Any, photo: np.ndarray) -> tuple[float, float, float]:
    """Of ``images`` [n, H, W, 3] in 0..255: the share that changed, by how many levels a pixel of these, its error."""
    difference = np.abs(np.asarray(images, dtype=np.float32) - photo).mean(axis=(1, 2, 3))
    changed = difference[difference > 1e-3]
    return len(changed) / len(difference), float(changed.mean()), float(changed.std() / np.sqrt(len(changed)))


def our_change(entry: str, photo: np.ndarray) -> tuple[float, float, float]:
    # the box is filled with the mean, which the normalization makes 0; on the other side it is filled with 0
    entry = entry.replace('mode="const"', 'mode="const", mean=(0.0, 0.0, 0.0)')
    return change_by(eval(f"{{{entry}}}", {"gpuaug": gpuaug, "K": K}), photo)


def change_by(ops: dict[str, Any], photo: np.ndarray) -> tuple[float, float, float]:
    batch = torch.from_numpy(photo).permute(2, 0, 1).expand(COUNT, -1, -1, -1).contiguous()
    made = gpuaug.Augment(ops=ops)(batch, seed=1, indices=range(COUNT))
    return change(made.permute(0, 2, 3, 1) * 255, photo)


def same(theirs: tuple[float, float, float], ours: tuple[float, float, float]) -> bool:
    """Shares within three standard errors; levels within these and half a level."""
    tolerance = 0.5 + 3 * np.hypot(theirs[2], ours[2])
    return bool(abs(theirs[0] - ours[0]) < 3 * np.sqrt(0.5 / COUNT) and abs(theirs[1] - ours[1]) < tolerance)


@pytest.mark.parametrize(("theirs", "ours"), ENTRIES["torchvision"], ids=lambda value: str(value)[:60])
def test_operations_change_pixels_as_torchvisions(
    theirs: list[str], ours: str, v2: ModuleType, photo: np.ndarray
) -> None:
    transform = eval(theirs[0], {"T": v2})
    image = Image.fromarray(photo)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if "Erasing" in theirs[0]:
            image = torch.from_numpy(photo).permute(2, 0, 1)
            made = [transform(image).permute(1, 2, 0).numpy() for _ in range(COUNT)]
        else:
            made = [np.asarray(transform(image)) for _ in range(COUNT)]
    assert same(change(made, photo), our_change(ours, photo)), (change(made, photo), our_change(ours, photo))


@pytest.mark.parametrize(("theirs", "ours"), [row[:2] for row in rows("lerobot")], ids=lambda value: str(value)[:60])
def test_lines_of_lerobot_are_its_settings(
    theirs: list[str], ours: list[str], v2: ModuleType, photo: np.ndarray
) -> None:
    def sharpness(sharpness: list[float]) -> Any:
        return lambda image: v2.functional.adjust_sharpness(image, torch.empty(1).uniform_(*sharpness).item())

    settings = yaml.safe_load(f"{{{theirs[0]}}}")
    overrides = [*BASE["lerobot"], *(shlex.split(code)[0] for code in ours)]
    cfg = gpuaug.compose("train", ["source.root=.", *overrides])
    choice = gpuaug.build(cfg.augment).ops["choice"]
    assert choice.n == settings.get("max_num_transforms", 3)
    assert choice.random_order is settings.get("random_order", False)
    for name, transform in settings.get("tfs", {}).items():
        weight = transform.get("weight", 1)
        assert (choice.ops[name] is None) == (weight == 0)
        assert weight in (0, choice.weights.get(name, 1))
        if "kwargs" in transform:
            ours_of = cfg.augment.ops.choice.ops[name]
            assert {key: ours_of[key] for key in transform["kwargs"]} == transform["kwargs"]
            kind = sharpness if transform["type"] == "SharpnessJitter" else getattr(v2, transform["type"])
            made, image = kind(**transform["kwargs"]), torch.from_numpy(photo).permute(2, 0, 1)
            with torch.random.fork_rng():
                torch.manual_seed(0)
                images = [made(image).permute(1, 2, 0).numpy() for _ in range(COUNT)]
            found = change(images, photo), change_by({name: choice.ops[name]}, photo)
            assert same(*found), found


def test_operations_change_pixels_as_dalis(photo: np.ndarray) -> None:
    pytest.importorskip("nvidia.dali")
    from nvidia.dali import fn, pipeline_def

    lines = ENTRIES["DALI"]

    @pipeline_def(batch_size=COUNT, num_threads=2, device_id=None, seed=3)
    def pipeline() -> Any:
        images = fn.external_source(lambda: [photo] * COUNT, layout="HWC")
        return tuple(eval(theirs[0], {"fn": fn, "images": images}) for theirs, _ in lines)

    made = pipeline()
    made.build()
    for (theirs, ours), output in zip(lines, made.run(), strict=True):
        found = change(output.as_array(), photo), our_change(ours, photo)
        assert same(*found) or "color_twist" in theirs[0], (theirs, *found)


@pytest.mark.parametrize("section", ["torchvision", "timm"])
def test_evaluation_gives_the_same_pixels(section: str, v2: ModuleType, tmp_path: Path, photo_batch: Tensor) -> None:
    """Within the rounding of Pillow, which has whole levels between the two passes of a resize."""
    from timm.data import create_transform

    (tmp_path / "a").mkdir()
    for k, image in enumerate(photo_batch.numpy()):
        Image.fromarray(image).resize((300, 340)).save(tmp_path / "a" / f"{k}.png")
    lines = [row for row in rows(section) if row[1][0].startswith(("gpuaug.Resize", "augment=eval"))]
    assert len(lines) == {"torchvision": 2, "timm": 1}[section]
    for theirs, ours, _ in lines:
        made = [eval(code, {"T": v2, "create_transform": create_transform}) for code in theirs]
        if section == "torchvision":
            made += [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
            overrides = ["augment=eval", "augment.normalize=null"]
            recipe = gpuaug.Augment(crop=eval(ours[0]))
        else:
            overrides = ours
            recipe = gpuaug.build(gpuaug.compose("eval", ["source.root=.", *overrides]).augment)
        with gpuaug.Loader(gpuaug.FolderSource(tmp_path), augment=recipe, num_workers=0, device="cpu") as loader:
            images = loader.fetch(range(8)).images
        for k in range(8):
            with Image.open(tmp_path / "a" / f"{k}.png") as image:
                expected: Any = image.convert("RGB")
            for transform in made:
                expected = transform(expected)
            assert (images[k] - expected).abs().mean() * 255 * (1 if section == "torchvision" else 0.225) < 0.3


def test_the_recipe_of_solo_learn_has_the_same_settings(tmp_path: Path) -> None:
    found = blocks("solo-learn", "yaml")
    (tmp_path / "augment").mkdir()
    (tmp_path / "augment/asymmetric.yaml").write_text(found["gpuaug"], encoding="utf-8")
    cfg = gpuaug.compose("train", ["source.root=.", "augment=asymmetric"], config_dir=tmp_path)
    shipped = gpuaug.compose("train", ["source.root=.", "augment=barlowtwins"])
    recipe = gpuaug.build(cfg.augment)
    assert len(recipe.views) == 2
    for view, theirs in zip(cfg.augment.views.values(), yaml.safe_load(found["solo-learn"]), strict=True):
        jitter = {name: view.ops.jitter[name] for name in ("brightness", "contrast", "saturation", "hue")}
        assert {"prob": view.ops.jitter.p, **jitter} == theirs["color_jitter"]
        assert [view.crop.size, view.copies] == [theirs["crop_size"], theirs["num_crops"]]
        assert [*view.crop.scale] == [theirs["rrc"]["crop_min_scale"], theirs["rrc"]["crop_max_scale"]]
        names = {"gray": "grayscale", "blur": "gaussian_blur", "solarize": "solarization", "flip": "horizontal_flip"}
        for ours, name in names.items():
            assert view.ops.get(ours, {"p": 0.0})["p"] == theirs[name]["prob"]
        assert theirs["equalization"]["prob"] == 0
    for name, view in shipped.augment.views.items():
        for part in ("crop", "ops", "normalize"):
            written = cfg.augment.views[name][part]
            assert without_none(written) == {key: without_none(view[part])[key] for key in written}


SHARES = ("gray", "blur", "solarize", "flip", "vflip")  # operations with a probability


def settings_of_lightly(transform: Any) -> list[dict[str, Any]]:
    """Of each view: what the lines of the table change."""

    def parts(part: Any) -> list[Any]:
        nested = getattr(part, "transforms", None) or getattr(getattr(part, "transform", None), "transforms", None)
        return [part] if nested is None or hasattr(part, "p") else [each for one in nested for each in parts(one)]

    names = {"RandomGrayscale": "gray", "GaussianBlur": "blur", "RandomSolarization": "solarize"}
    names |= {"RandomHorizontalFlip": "flip", "RandomVerticalFlip": "vflip"}
    views = []
    for view in getattr(transform, "transforms", [transform]):
        found: dict[str, Any] = {"jitter": None, "sigma": None, **dict.fromkeys(SHARES, 0.0), "normalize": False}
        for part in parts(view):
            kind = type(part).__name__
            if kind == "RandomResizedCrop":
                found |= {"size": part.size[0], "scale": [*part.scale]}
            elif kind == "RandomApply":
                (jitter,) = part.transforms
                ranges = [getattr(jitter, name) for name in ("brightness", "contrast", "saturation", "hue")]
                found["jitter"] = [part.p, *((high - low) / 2 for low, high in ranges)]
            elif kind in names:
                found[names[kind]] = getattr(part, "prob", getattr(part, "p", None))
            found |= {"sigma": [*part.sigmas]} if kind == "GaussianBlur" else {}
            found["normalize"] |= kind == "Normalize"
        views.append(found)
    return views


def settings_of_gpuaug(cfg: Any) -> list[dict[str, Any]]:
    views = []
    for view in cfg.augment.views.values() if "views" in cfg.augment else [cfg.augment]:
        jitter = view.ops.get("jitter")
        names = ("p", "brightness", "contrast", "saturation", "hue")
        found = {
            "size": view.crop.size,
            "scale": [*view.crop.scale],
            "jitter": None if jitter is None else [jitter[name] for name in names],
            "sigma": [*view.ops.blur.sigma] if "blur" in view.ops else None,
            "normalize": view.normalize is not None,
            **{name: view.ops.get(name, {"p": 0.0})["p"] for name in SHARES},
        }
        views += [found] * view.copies
    return views


@pytest.mark.parametrize(
    ("theirs", "ours"), [row[:2] for row in rows("lightly") if "rr_" not in row[0][0]], ids=lambda value: str(value[0])
)
def test_the_transforms_of_lightly_have_the_same_settings(v2: ModuleType, theirs: list[str], ours: list[str]) -> None:
    transforms = pytest.importorskip("lightly.transforms")
    overrides = [shlex.split(code)[0] for code in ours]
    base = [] if overrides[0].startswith("augment=") else BASE["lightly"]
    cfg = gpuaug.compose("train", ["source.root=.", *base, *overrides])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = settings_of_lightly(eval(theirs[0], vars(transforms).copy()))
    for a, b in zip(made, settings_of_gpuaug(cfg), strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            assert b[name] == (None if value is None else pytest.approx(value)), name


def without_none(node: Any) -> Any:
    return {k: without_none(v) for k, v in node.items() if v is not None} if hasattr(node, "items") else node
