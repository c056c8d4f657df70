"""Whatever value a public constructor, a method or a key of the configuration gets: this project's errors, or it works.

A property over all parameters and a list of values that are wrong for most of them: nothing else than GpuaugError may
come out, neither of the constructor nor of the first use of what it made.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import gpuaug
from gpuaug.errors import GpuaugError
from gpuaug.tools.pack.command import pack
from gpuaug.tools.pack.job import Pack

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 10**6, 10**20, -(10**20), 0.0, 0.5, -0.5, 1.5, 1e308, math.nan, math.inf, -math.inf,
    "", "none", "nonsense", "0", "-1", "1e9", "9" * 400, "\0", "/nowhere/at/all", "ä\udcff", b"bytes",
    [], [1], [0, 0], [-1, 2], [1, 2, 3], [math.nan, 1.0], [[1, 2], [3, 4]], ["a"], [None], (), (0.5, 0.2), (2, 10**7),
    {}, {"a": 1}, {1: 2}, {"": None}, set(), object(), int, len, Fraction(1, 3), 3j, np.float32(0.5), np.int64(2),
    np.zeros(3), np.zeros((2, 2)), torch.zeros(2), torch.tensor(1), Path("nowhere"), range(0),
]  # fmt: skip


def said(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.60}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few images as folder, table, shards' place, and packed; with masks and boxes in all forms."""
    root = tmp_path_factory.mktemp("place")
    rng = np.random.default_rng(0)
    for n in range(4):
        file = root / "images" / "ab"[n % 2] / f"{n}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)).save(file)
        annotate(root, n)
    lines = [f"{p.relative_to(root)},{n}" for n, p in enumerate(sorted((root / "images").rglob("*.png")))]
    (root / "table.csv").write_text("path,label\n" + "\n".join(lines) + "\n")
    recipe = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(8))
    pack(source(root), root / "epochs", what=Pack(epochs=1), augment=recipe, seed=3, num_workers=0)
    return root


def annotate(root: Path, n: int) -> None:
    """A mask and one box of image ``n``, for each source of targets."""
    for name in ("scenes/images", "scenes/masks", "scenes/labels", "voc/JPEGImages", "voc/Annotations"):
        (root / name).mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.full((9, 12, 3), 40 * n, dtype=np.uint8))
    image.save(root / f"scenes/images/{n}.png")
    image.save(root / f"voc/JPEGImages/{n}.jpg")
    Image.fromarray(np.full((9, 12), n, dtype=np.uint8)).save(root / f"scenes/masks/{n}.png")
    (root / f"scenes/labels/{n}.txt").write_text("0 0.5 0.5 0.4 0.6\n")
    box = "".join(f"<{name}>{k}</{name}>" for name, k in (("xmin", 2), ("ymin", 2), ("xmax", 9), ("ymax", 8)))
    thing = f"<object><name>cat</name><bndbox>{box}</bndbox></object>"
    (root / f"voc/Annotations/{n}.xml").write_text(f"<annotation>{thing}</annotation>")
    images = [{"id": k, "file_name": f"{k}.png", "height": 9, "width": 12} for k in range(n + 1)]
    boxes = [{"id": k, "image_id": k, "category_id": 1, "bbox": [1, 1, 7, 6], "iscrowd": 0} for k in range(n + 1)]
    coco = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "cat"}]}
    (root / "scenes/boxes.json").write_text(json.dumps(coco))


MASKS, BOXES = gpuaug.Targets(masks=gpuaug.Masks()), gpuaug.Targets(boxes=gpuaug.Boxes())


def pairs(place: Path, **given: Any) -> None:
    one_batch(place, **{"source": gpuaug.MaskFolderSource(place / "scenes"), **given})


def boxes(place: Path, **given: Any) -> None:
    one_batch(
        place,
        **{"source": gpuaug.CocoSource(place / "scenes/images", annotations=place / "scenes/boxes.json"), **given},
    )


def source(place: Path) -> gpuaug.FolderSource:
    return gpuaug.FolderSource(place / "images")


def small(place: Path, **given: Any) -> gpuaug.Loader:
    offered = given.pop("source", place / "images")
    offered = gpuaug.FolderSource(offered) if isinstance(offered, str | Path) else offered
    usual = {"augment": gpuaug.Augment(crop=gpuaug.RandomResizedCrop(8)), "batch_size": 2, "prefetch": 0}
    return gpuaug.Loader(offered, **{**usual, "num_workers": 0, "seed": 3, "device": "cpu", **given})


def one_batch(place: Path, **given: Any) -> None:
    with small(place, **given) as made:
        len(made)
        made.fingerprint()
        next(iter(made), None)
        json.dumps(made.state_dict())


def augmented(place: Path, **given: Any) -> None:
    one_batch(place, augment=gpuaug.Augment(**{"crop": gpuaug.Resize(8), **given}))


# what is made, the arguments that make it good, and its first use
Attack = tuple[Callable[[Path], dict[str, Any]], Callable[[Path, Any], Any]]
CROPS: dict[str, dict[str, Any]] = {
    "Letterbox": {"size": 8}, "RandomCrop": {"size": 8}, "RandomResizedCrop": {"size": 8}, "Resize": {"size": 8},
    "ResizeCenterCrop": {"resize": 9, "size": 8},
}  # fmt: skip
MADE: dict[str, Attack] = {
    "Augment": (
        lambda p: {"crop": gpuaug.Resize(8)},
        lambda p, made: made(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), seed=0, epoch=0, indices=[0, 1]),
    ),
    "Decode": (lambda p: {}, lambda p, made: one_batch(p, decode=made)),
    "Faults": (lambda p: {}, lambda p, made: one_batch(p, faults=made)),
    "TableSource": (lambda p: {"root": p / "table.csv"}, lambda p, made: one_batch(p, source=made)),
    "PackedSource": (lambda p: {"root": p / "epochs"}, lambda p, made: one_batch(p, source=made)),
    "Remote": (lambda p: {}, lambda p, made: one_batch(p, source=gpuaug.FolderSource(p / "images", remote=made))),
    "Mix": (lambda p: {"mixup_alpha": 1.0}, lambda p, made: one_batch(p, mix=made)),
    **{
        name: (
            lambda p, n=name: {"patch": 2, **({"min_keep": 3} if n == "MultiBlockMasks" else {})},
            lambda p, made: one_batch(p, patch_masks=made),
        )
        for name in ("BlockMasks", "MultiBlockMasks", "RandomMasks")
    },
    "Cameras": (
        lambda p: {"cameras": {"a": gpuaug.Augment(crop=gpuaug.Resize(8))}},
        lambda p, made: made({"a": torch.zeros(2, 3, 8, 8, dtype=torch.uint8)}, seed=0, epoch=0, indices=[0, 1]),
    ),
    "MultiView": (
        lambda p: {"views": {"a": gpuaug.Augment(crop=gpuaug.Resize(8))}},
        lambda p, made: one_batch(p, augment=made),
    ),
    "match_patches": (
        lambda p: {"a": torch.eye(3)[None], "b": torch.eye(3)[None], "size": 16, "other": 32, "patch": 8},
        lambda p, made: made,
    ),
    "Normalize": (
        lambda p: {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)},
        lambda p, made: augmented(p, normalize=made),
    ),
    "OneOf": (lambda p: {"ops": {"flip": flip()}}, lambda p, made: augmented(p, ops={"one": made})),
    "SomeOf": (lambda p: {"n": 1, "ops": {"flip": flip()}}, lambda p, made: augmented(p, ops={"some": made})),
    **{name: (lambda p, given=given: given, lambda p, made: augmented(p, crop=made)) for name, given in CROPS.items()},
    "Progressive": (
        lambda p: {"schedule": {0: gpuaug.Augment(crop=gpuaug.Resize(8))}},
        lambda p, made: one_batch(p, augment=made),
    ),
    "RandomScaleCrop": (
        lambda p: {"size": 8, "base": 9},
        lambda p, made: None if made.needs else augmented(p, crop=made),
    ),
    "RandomSizeCrop": (lambda p: {"size": 16, "shorter": 8, "before": 8}, lambda p, made: augmented(p, crop=made)),
    "PersonCrop": (
        lambda p: {"size": 8},
        lambda p, made: boxes(p, targets=BOXES, augment=gpuaug.Augment(crop=made)),
    ),
    "RandomIoUCrop": (lambda p: {"size": 8}, lambda p, made: boxed(made)),
    "MaskFolderSource": (lambda p: {"root": p / "scenes"}, lambda p, made: pairs(p, source=made, targets=MASKS)),
    "YoloSource": (lambda p: {"root": p / "scenes"}, lambda p, made: boxes(p, source=made, targets=BOXES)),
    "VocSource": (lambda p: {"root": p / "voc", "year": None}, lambda p, made: boxes(p, source=made, targets=BOXES)),
    "CocoSource": (
        lambda p: {"root": p / "scenes/images", "annotations": p / "scenes/boxes.json"},
        lambda p, made: boxes(p, source=made, targets=BOXES),
    ),
    "Masks": (lambda p: {}, lambda p, made: pairs(p, targets=gpuaug.Targets(masks=made))),
    "Boxes": (lambda p: {}, lambda p, made: boxes(p, targets=gpuaug.Targets(boxes=made))),
    "Keypoints": (lambda p: {}, lambda p, made: repr(gpuaug.Targets(keypoints=made))),
    "Targets": (lambda p: {"masks": gpuaug.Masks()}, lambda p, made: pairs(p, targets=made)),
    "Repeated": (lambda p: {}, lambda p, made: one_batch(p, order=made)),
    "Tokens": (
        lambda p: {"tokens": 64, "lengths": [8, 16]},
        lambda p, made: one_batch(p, batch_size=made, augment=gpuaug.Augment(crop=gpuaug.ResizeToSequence(8, patch=4))),
    ),
    "ResizeToSequence": (lambda p: {"length": 8, "patch": 4}, lambda p, made: augmented(p, crop=made)),
    "Buckets": (
        lambda p: {"samples": 2},
        lambda p, made: boxes(p, order=made, targets=BOXES),
    ),
    "Grouped": (
        lambda p: {},
        lambda p, made: made.order(0, 0, type("Pair", (list,), {"image_ids": [7, 7]})([(b"", 0), (b"", 1)])),
    ),
    "Weighted": (lambda p: {}, lambda p, made: one_batch(p, order=made)),
    "Sizes": (
        lambda p: {"choose": [8, 16]},
        lambda p, made: pairs(p, augment=gpuaug.Augment(crop=gpuaug.RandomResizedCrop(8), sizes=made)),
    ),
    "MixObjects": (lambda p: {}, lambda p, made: boxes(p, targets=BOXES, mix=made)),
    "CutMixMasks": (lambda p: {}, lambda p, made: pairs(p, targets=MASKS, mix=made)),
    "ClassMix": (lambda p: {}, lambda p, made: pairs(p, targets=MASKS, mix=made)),
    "CopyPaste": (lambda p: {}, lambda p, made: repr(made)),
    "class_mix": (
        lambda p: {"images": torch.zeros(2, 3, 4, 4), "labels": torch.zeros(2, 4, 4, dtype=torch.int64)},
        lambda p, made: made,
    ),
    "Mosaic": (
        lambda p: {},
        lambda p, made: boxes(
            p, targets=BOXES, augment=gpuaug.Augment(crop=gpuaug.Letterbox(8), combine={"mosaic": made})
        ),
    ),
    "TileMixUp": (
        lambda p: {},
        lambda p, made: boxes(
            p, targets=BOXES, augment=gpuaug.Augment(crop=gpuaug.Letterbox(8), combine={"mixup": made})
        ),
    ),
    "CanvasAffine": (
        lambda p: {"size": 8},
        lambda p, made: pairs(
            p, targets=MASKS, augment=gpuaug.Augment(crop=gpuaug.Letterbox(8), combine={"affine": made})
        ),
    ),
    "tta": (lambda p: {"model": torch.nn.Identity(), "views": gpuaug.Augment()}, lambda p, made: made),
    "export": (lambda p: {"recipe": gpuaug.Augment(crop=gpuaug.Resize((8, 8))), "path": "x.md"}, lambda p, made: made),
}
OTHERS = {
    "Loader", "Shuffle", "Sequential", "Batch", "PatchMasks", "EncodedBatch", "BatchTargets", "Target", "build",
    "compose", "preview", "preview_page", "Explanation", "Step",
}  # fmt: skip


def boxed(crop: gpuaug.RandomIoUCrop) -> None:
    recipe = gpuaug.Augment(crop=crop)
    objects = SimpleNamespace(boxes=np.array([[1.0, 1.0, 7.0, 8.0]]), sample=np.array([1]))
    recipe.windows(recipe.draw(seed=0, epoch=0, indices=[0, 1]), np.array([9, 9]), np.array([12, 12]), objects=objects)


def flip() -> Any:
    import kornia.augmentation as K

    return K.RandomHorizontalFlip(p=0.5)


def parameters(of: Any) -> list[str]:
    return [name for name in inspect.signature(of).parameters if name not in ("self", "objects")]


def attacked(calls: Iterator[tuple[str, Callable[[], Any]]]) -> list[str]:
    """What came out that is not ours."""
    found = []
    for what, call in calls:
        try:
            call()
        except GpuaugError as error:
            if not str(error).strip():
                found.append(f"{what}: an empty message")
        except Exception as error:
            found.append(f"{what}: {type(error).__name__}: {str(error)[:150]}")
    return found


# a source that needs nothing but a place
ROOTED: Attack = lambda p: {"root": p / "images"}, lambda p, made: one_batch(p, source=made)
OPERATION: Attack = lambda p: {}, lambda p, made: augmented(p, ops={"one": made})
MADE |= {name: OPERATION for name, (_, page) in gpuaug.PUBLIC.items() if page == "operations" and name not in MADE}
MADE |= {name: ROOTED for name, (_, page) in gpuaug.PUBLIC.items() if page == "sources" and name not in MADE}


def test_every_public_constructor_is_attacked() -> None:
    classes = {name for name in gpuaug.__all__ if not name.endswith("Error")}
    assert classes == set(MADE) | OTHERS


@pytest.mark.parametrize("name", MADE)
def test_constructors(name: str, place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # a name may be a file to write
    kind = getattr(gpuaug, name)
    usual, use = MADE[name]

    def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
        for parameter in parameters(kind):
            for value in VALUES:
                given = {**usual(place), parameter: value}
                yield f"{name}({parameter}={said(value)})", lambda given=given: use(place, kind(**given))

    assert attacked(calls()) == []


def test_loader(place: Path) -> None:
    def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
        for parameter in parameters(gpuaug.Loader):
            for value in VALUES:
                if parameter in ("num_workers", "prefetch", "batch_size") and type(value) is int and value > 2:
                    continue  # allowed, and as many as it says
                yield f"Loader({parameter}={said(value)})", lambda p=parameter, v=value: one_batch(place, **{p: v})

    assert attacked(calls()) == []


CALLS: dict[str, Callable[[gpuaug.Loader, Any], Any]] = {
    "fetch(indices)": lambda made, value: made.fetch(value),
    "fetch(epoch)": lambda made, value: made.fetch([0], epoch=value),
    "fetch(faults)": lambda made, value: made.fetch([0], faults=value),
    "replay": lambda made, value: made.replay(value),
    "set_epoch": lambda made, value: made.set_epoch(value),
    "start_at(epoch)": lambda made, value: made.start_at(value, 0),
    "start_at(position)": lambda made, value: made.start_at(0, value),
    "load_state_dict": lambda made, value: made.load_state_dict(value),
    "augment(images)": lambda made, value: made.augment(value, seed=0, epoch=0),
    "augment(seed)": lambda made, value: made.augment(IMAGES, seed=value, epoch=0, indices=[0, 1]),
    "augment(epoch)": lambda made, value: made.augment(IMAGES, seed=0, epoch=value, indices=[0, 1]),
    "augment(indices)": lambda made, value: made.augment(IMAGES, seed=0, epoch=0, indices=value),
    "augment(dtype)": lambda made, value: made.augment(IMAGES, seed=0, epoch=0, dtype=value),
    "augment(layout)": lambda made, value: made.augment(IMAGES, seed=0, epoch=0, layout=value),
    "augment(white)": lambda made, value: made.augment(IMAGES, seed=0, epoch=0, white=value),
    "augment(nan)": lambda made, value: made.augment(IMAGES.float(), seed=0, epoch=0, nan=value),
}
IMAGES = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)


@pytest.mark.parametrize("name", CALLS)
def test_methods(name: str, place: Path) -> None:
    with small(place) as made:

        def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
            for value in [*VALUES, [999], [-1], [0, 0], [10**20], 999, torch.zeros(2, 3, 0, 8, dtype=torch.uint8)]:
                yield f"{name} of {said(value)}", lambda value=value: CALLS[name](made, value)

        assert attacked(calls()) == []


WORDS: list[tuple[str, ...]] = [
    ("augment=standard", "mix=mixup_cutmix", "order=weighted"),
    ("augment=dino", "order=repeated", "last=drop"),
    ("augment=eval", "source=packed"),
]
SETTINGS: list[Any] = [None, True, -1, 0, 0.5, math.nan, 1e30, "abc", "", [], [1, 2, 3], {}, {"a": 1}]


@pytest.mark.long
@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_every_key_of_the_configuration(words: tuple[str, ...], place: Path, monkeypatch: Any, tmp_path: Path) -> None:
    from omegaconf import DictConfig, OmegaConf

    monkeypatch.chdir(tmp_path)
    root = place / ("epochs" if "source=packed" in words else "images")
    small = [f"source.root={root}", "batch_size=2", "num_workers=0", "prefetch=0", "device=cpu"]
    whole = gpuaug.compose("train", [*words, *small])

    def keys(part: Any, above: str = "") -> Iterator[str]:
        for name in part:
            if above or name != "_target_":
                yield f"{above}{name}"
                if isinstance(inside := part._get_node(name), DictConfig) and not inside._is_none():
                    yield from keys(inside, f"{above}{name}.")

    def use(key: str, value: Any) -> None:
        changed = whole.copy()
        OmegaConf.update(changed, key, value, merge=False, force_add=True)
        with gpuaug.build(changed) as made:
            if isinstance(made, gpuaug.Loader) and made.num_workers < 2:
                next(iter(made), None)

    def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
        for key in keys(whole):
            for value in SETTINGS:
                yield f"{key}={said(value)}", lambda key=key, value=value: use(key, value)

    assert attacked(calls()) == []
