"""`gpuaug pack epochs=K`: version e of a sample is what the live loader shows in epoch e, rounded to 256 levels."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import kornia.augmentation as K
import pytest
import torch
from common import NORMALIZE, STD, loader, recipe
from test_pack_targets import Scenes

import gpuaug
from gpuaug.errors import ConfigError, DataError, StateError
from gpuaug.tools.main import main
from gpuaug.tools.pack.command import pack
from gpuaug.tools.pack.job import Pack

SEED = 3  # of `loader`


def stored(source: Any, out: Path, *, epochs: int = 2, augment: Any = None, **settings: Any) -> gpuaug.PackedSource:
    source = gpuaug.FolderSource(source) if isinstance(source, Path) else source
    settings = {"seed": SEED, "num_workers": 0, **settings}
    pack(
        source, out, what=Pack(epochs=epochs, samples=20), augment=recipe() if augment is None else augment, **settings
    )
    return gpuaug.PackedSource(out)


@pytest.fixture(scope="module")
def two(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 0 and 1 of `recipe()`."""
    return Path(stored(photos, tmp_path_factory.mktemp("two") / "out").root)


def views(batch: gpuaug.Batch) -> list[torch.Tensor]:
    return batch.images if isinstance(batch.images, list) else [batch.images]


def levels(live: gpuaug.Batch, replay: gpuaug.Batch, stds: Any = None) -> float:
    """The largest difference of two equal batches in levels of 255, before normalization."""
    assert live.indices.tolist() == replay.indices.tolist()
    assert live.valid.tolist() == replay.valid.tolist()
    assert live.keys == replay.keys
    assert torch.equal(live.labels, replay.labels)
    pairs = zip(views(live), views(replay), stds or [STD] * len(views(live)), strict=True)
    return max(float(((a - b).abs() * torch.tensor(std).view(3, 1, 1) * 255).max()) for a, b, std in pairs)


def seen(batches: Any) -> dict[int, bytes]:
    return {
        i: x.numpy().tobytes() for batch in batches for i, x in zip(batch.indices.tolist(), batch.images, strict=True)
    }


@pytest.mark.parametrize("backend", ["kornia", "fused"])
def test_a_version_is_the_live_epoch_within_half_a_level(photos: Path, tmp_path: Path, backend: str) -> None:
    augment = recipe(backend)
    source = stored(photos, tmp_path / "out", augment=augment)
    worst = []
    with loader(photos, augment=augment) as live, loader(source, augment=augment) as replay:
        assert live.fingerprint() == replay.fingerprint()
        for epoch in (0, 1, 5, 2):  # 5 shows version 1, and 2 shows version 0, each in its own order
            replay.set_epoch(epoch)
            for batch in replay:
                same = live.fetch(batch.indices.tolist(), epoch=epoch % 2)
                worst.append(levels(same, batch))
    assert 0.3 < max(worst) <= 0.5 + 1e-3


def test_views_of_several_sizes_lie_side_by_side(photos: Path, tmp_path: Path) -> None:
    sizes = {"large": ((24, 30), 2), "wide": ((10, 30), 1), "small": ((16, 14), 3)}
    made = {
        name: gpuaug.Augment(crop=gpuaug.RandomResizedCrop(size), copies=copies, normalize=NORMALIZE)
        for name, (size, copies) in sizes.items()
    }
    made["plain"] = gpuaug.Augment(crop=gpuaug.Resize((16, 16)), ops={"jitter": K.ColorJitter(0.4, p=1.0)})
    augment = gpuaug.MultiView(views=made)
    source = stored(photos, tmp_path / "out", augment=augment)
    assert source.shapes(source.sizes[0])[0].tolist() == [24 + 24 + 10 + 16 + 16, 30]
    stds = [STD] * 6 + [(1.0,) * 3]
    with loader(photos, augment=augment) as live, loader(source, augment=augment, num_workers=1) as replay:
        for _ in range(2):
            for a, b in zip(live, replay, strict=True):
                assert [x.shape[1:] for x in a.images] == [x.shape[1:] for x in b.images]
                assert levels(a, b, stds) <= 0.5 + 1e-3


def test_batch_size_workers_and_ranks_change_nothing(two: Path) -> None:
    with loader(gpuaug.PackedSource(two)) as whole:
        want = [seen(whole) for _ in range(3)]
    for settings in ({"batch_size": 64}, {"batch_size": 5, "num_workers": 2}, {"prefetch": 0}):
        with loader(gpuaug.PackedSource(two), **settings) as other:
            assert [seen(other) for _ in range(3)] == want
    found = {}
    for rank in range(3):
        with loader(gpuaug.PackedSource(two), rank=rank, world_size=3, last="uneven") as replay:
            found |= seen(replay)
    assert found == want[0]
    assert want[0] == want[2] != want[1]
    part = torch.utils.data.Subset(gpuaug.PackedSource(two), [3, 30, 64])
    with loader(part) as few:
        assert [seen(few) for _ in range(2)] == [{i: images[i] for i in (3, 30, 64)} for images in want[:2]]


def test_mix_and_normalization_are_left_to_do(photos: Path, two: Path) -> None:
    mix = gpuaug.Mix(mixup_alpha=0.8, cutmix_alpha=1.0)
    with loader(photos, mix=mix) as live, loader(gpuaug.PackedSource(two), mix=mix) as replay:
        for a, b in zip(live, replay, strict=True):
            assert levels(a, b) <= 0.5 + 1e-3
    with (
        loader(gpuaug.PackedSource(two)) as normal,
        loader(gpuaug.PackedSource(two), augment=recipe().replace(normalize=None), dtype="bfloat16") as plain,
    ):
        for a, b in zip(normal, plain, strict=True):
            assert torch.allclose(NORMALIZE.inverse(a.images), b.images.float(), atol=2**-8)


def test_what_is_not_stored_is_refused(photos: Path, two: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = gpuaug.PackedSource(two)
    flip, views = recipe(flip=K.RandomHorizontalFlip(p=0.25)), {"one": recipe(), "two": recipe()}
    for settings, text in (
        ({"augment": recipe(size=24)}, r"augment\.crop\.size.*32.*stored.*24.*here"),
        ({"augment": gpuaug.Augment(normalize=NORMALIZE)}, r"augment\.crop"),
        ({"augment": recipe(invert=K.RandomInvert(p=0.1))}, r"augment\.ops"),
        ({"augment": flip}, r"augment\.ops\.flip.*0\.5 stored.*0\.25 here"),
        ({"augment": gpuaug.MultiView(views=views)}, "augment.views"),
        ({"augment": gpuaug.Progressive(schedule={0: recipe()})}, "a recipe that changes with the epoch here"),
        ({"seed": SEED + 1}, "seed: 3 stored, 4 here"),
        ({"targets": gpuaug.Targets(masks=gpuaug.Masks())}, "`targets.masks` needs a source with masks"),
    ):
        for given in (source, torch.utils.data.Subset(source, [1, 2])):
            with pytest.raises(ConfigError, match=text):
                loader(given, **settings)
    with pytest.raises(ConfigError, match="`source.size` must be null for augmented images"):
        gpuaug.PackedSource(two, size=32)
    with pytest.raises(RuntimeError, match="already augmented, and depend on the epoch. Give"):
        source[0]
    joined = torch.utils.data.ConcatDataset([source, source])
    with loader(joined, augment=recipe()) as wrong, pytest.raises(RuntimeError, match="already augmented"):
        next(iter(wrong))
    with caplog.at_level(logging.INFO, "gpuaug"), loader(source, order=gpuaug.Repeated()) as repeated:
        assert (
            "2 augmented versions of each sample; epoch e reads version e mod 2, also where the order rep"
            in caplog.text
        )
        by_number: dict[int, set[bytes]] = {}
        for batch in repeated:
            for number, image in zip(batch.indices.tolist(), batch.images, strict=True):
                by_number.setdefault(number, set()).add(image.numpy().tobytes())
        assert all(len(images) == 1 for images in by_number.values())
    with loader(photos) as live, pytest.raises(StateError, match="was changed after"):
        live.load_state_dict({**live.state_dict(), "epoch": 7})


@pytest.mark.parametrize(
    ("what", "given", "text"),
    [
        ({"epochs": 0}, {}, "`epochs` must be a whole number from 1 to 1000"),
        ({"epochs": 10**30}, {}, "`epochs` must be a whole number from 1 to 1000"),
        ({"epochs": 2, "format": "jpeg"}, {}, "`format` must be uint8, and `sizes` null"),
        ({"epochs": 2, "sizes": 32}, {}, "`format` must be uint8, and `sizes` null"),
        ({"epochs": 2}, {"augment": gpuaug.Progressive(schedule={0: recipe()})}, "gpuaug.Augment or gpuaug.MultiView"),
        ({"epochs": 2}, {"augment": gpuaug.Augment()}, "`augment.crop` must give images of one size"),
        ({"epochs": 2}, {"augment": gpuaug.Augment(crop=gpuaug.Resize(32))}, "`augment.crop` must give images of one"),
        (
            {"epochs": 2},
            {"augment": recipe(noise=K.RandomGaussianNoise(std=0.3, p=1.0))},
            "pixels from 0 to 1. Found: -",
        ),
        ({"epochs": 2}, {"source": Scenes()}, "no masks, boxes or keypoints. Found: a source with masks, boxes, key"),
        ({"epochs": 2}, {"source": "two"}, "must have one image per sample"),
    ],
)
def test_what_cannot_be_packed(photos: Path, two: Path, tmp_path: Path, what: dict, given: dict, text: str) -> None:
    source = given.pop("source", photos)
    source = gpuaug.PackedSource(two) if source == "two" else source
    source = gpuaug.FolderSource(source) if isinstance(source, Path) else source
    with pytest.raises(ConfigError, match=text):
        pack(source, tmp_path / "out", what=Pack(**what), num_workers=0, **{"augment": recipe(), "seed": SEED, **given})


def test_bad_samples_are_left_out_and_the_others_keep_their_random_numbers(photos: Path, tmp_path: Path) -> None:
    root = tmp_path / "damaged"
    shutil.copytree(photos, root)
    (root / "coffee" / "003.jpg").write_bytes(b"no image at all")
    with pytest.raises(DataError, match="coffee/003.jpg"):
        stored(root, tmp_path / "raised")
    source = stored(root, tmp_path / "out", faults=gpuaug.Faults(policy="drop"))
    assert len(source) == 64
    original = gpuaug.FolderSource(root)
    numbers = {original.key(i): i for i in range(65)}
    with loader(root) as live, loader(source) as replay:
        replay.set_epoch(1)
        for batch in replay:
            same = live.fetch([numbers[key] for key in batch.keys], epoch=1)
            assert ((same.images - batch.images).abs() * torch.tensor(STD).view(3, 1, 1) * 255).max() <= 0.5 + 1e-3


def test_another_number_of_epochs_or_seed_is_another_job(photos: Path, two: Path) -> None:
    with pytest.raises(ConfigError, match="holds another job.*epochs: 2 there, 3 in this run"):
        stored(photos, two, epochs=3)
    with pytest.raises(ConfigError, match="holds another job.*seed: 3 there, 4 in this run"):
        stored(photos, two, seed=4)


def test_command(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, same = tmp_path / "out", ["augment=flip", "augment.crop.size=32", "seed=5"]
    words = ["pack", f"source.root={photos}", "source.subset=26", f"out={out}", "num_workers=0", *same]
    assert main([*words, "epochs=2"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"epochs +2 augmented versions", printed)
    assert f"source=packed source.root={out} and the same `augment` and `seed`" in printed
    train = ["train", "source=packed", f"source.root={out}", *same, "device=cpu", "batch_size=13", "+model.width=8"]
    assert main([*train, "epochs=2", f"out={tmp_path / 'train'}", "mix=mixup"]) == 0
    assert main(words) == 2
    assert "`augment` has no effect on `gpuaug pack`" in (error := capsys.readouterr().err)
    assert "set `epochs`, to store augmented images" in error
    assert main([*words, "epochs=2", "targets=detection"]) == 2
    assert "`targets` has no effect on `gpuaug pack`" in capsys.readouterr().err
