"""What a recipe did to a sample: the parameters make the same pixels, and the text says which."""

from __future__ import annotations

import pickle
import re

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from common import loader
from pictures import encode, photograph
from test_parameters import OPS, OWN

import gpuaug
from gpuaug.errors import ConfigError

SOURCE = [(encode(photograph(name, (97, 80)), "PNG"), n) for n, name in enumerate(("china", "flower") * 3)]
CROP = gpuaug.RandomResizedCrop((44, 52))
POLICIES = {
    "randaugment": lambda: gpuaug.RandAugment(3, 12, interpolation="bilinear"),
    "trivial": lambda: gpuaug.TrivialAugmentWide(),
    "autoaugment": lambda: gpuaug.AutoAugment(),
    "timm": lambda: gpuaug.TimmAugment("rand-m9-mstd0.5-inc1"),
    "one": lambda: gpuaug.OneOf(ops={"gray": K.RandomGrayscale(p=0.5), "noise": K.RandomGaussianNoise(p=1.0)}, p=0.9),
    "some": lambda: gpuaug.SomeOf(
        (1, 3),
        ops={
            "inner": gpuaug.OneOf(ops={"hue": K.RandomHue((-0.2, 0.2), p=1.0), "invert": K.RandomInvert(p=1.0)}),
            "jitter": K.ColorJitter(0.4, 0.3, 0.2, 0.1, p=0.8),
            "erase": K.RandomErasing(p=1.0),
            "policy": gpuaug.RandAugment(2),
        },
        random_order=True,
    ),
}  # fmt: skip
ALL = {
    **{name: lambda make=make: make(p=0.7) for name, make in OPS.items()},
    **OWN,
    **POLICIES,
}


@pytest.mark.parametrize("backend", ["kornia", "fused"])
@pytest.mark.parametrize("name", ALL)
def test_the_parameters_give_the_pixels(name, backend):
    """Kornia's own modules, one after the other, with the parameters of an explanation."""
    numbers, applied = range(len(SOURCE)), 0
    recipe = gpuaug.Augment(crop=CROP, ops={"flip": K.RandomHorizontalFlip(p=0.5), "op": ALL[name]()}, backend=backend)
    with loader(SOURCE, augment=recipe) as whole, loader(SOURCE, augment=gpuaug.Augment(crop=CROP)) as only_crop:
        batch, crops = whole.fetch(numbers, epoch=3), only_crop.fetch(numbers, epoch=3).images
        for row in numbers:
            x = crops[[row, row]]  # two, because convolutions of one image have other last bits on some processors
            for step in batch.explain(row).steps:
                if step.applied:
                    x = step.module(x, params={k: torch.cat([v, v]) for k, v in step.params.items()})
                    applied += step.name.startswith("op")
            assert (x[0] - batch.images[row]).abs().max() < 3e-6, step
    assert applied or name == "jigsaw"


def test_the_window_gives_the_crop():
    recipe = gpuaug.Augment(crop=CROP)
    with loader(SOURCE, augment=recipe) as made:
        batch = made.fetch([0, 1, 2], epoch=1)
        for row in range(3):
            explained = batch.explain(row)
            top, left, height, width = explained.window
            image = photograph(("china", "flower")[row % 2], (97, 80))
            cut = image.crop((left, top, left + width, top + height)).resize((52, 44), 2)
            ours = batch.images[row].mul(255).permute(1, 2, 0).numpy()
            assert np.abs(np.asarray(cut) - ours).max() <= 1.001
            assert explained.lines == [f"crop: {width} x {height} at ({left}, {top}), resized to 52 x 44"]


def test_letterbox_says_where_the_image_lies():
    with loader(SOURCE, augment=gpuaug.Augment(crop=gpuaug.Letterbox(100))) as made:
        assert str(made[0].explain()) == "crop: 97 x 80 at (0, 0), resized to 100 x 82, placed at (0, 9) of 100 x 100"


def test_text_of_the_operations():
    ops = {
        "never": K.RandomHorizontalFlip(p=0.0),
        "flip": K.RandomHorizontalFlip(p=1.0),
        "jitter": K.ColorJitter(0.4, 0.0, 0.2, 0.0, p=1.0),
        "policy": gpuaug.RandAugment(2, 9),
        "noise": K.RandomGaussianNoise(p=1.0),
        "mixed": gpuaug.AugMix(),
    }
    with loader(SOURCE, augment=gpuaug.Augment(crop=CROP, ops=ops)) as made:
        lines = made[1].explain().lines
    assert lines[1:3] == ["never: not applied", "flip: applied"]
    assert re.fullmatch(r"jitter: (brightness|saturation) [\d.]+, (brightness|saturation) [\d.]+", lines[3])
    assert [re.match(r"policy\.[a-z_]+: (magnitude -?[\d.]+|applied)", line) is not None for line in lines[4:6]] == [
        True
    ] * 2
    assert "noise: applied" in lines
    shares = {
        line.split(": ")[0].rpartition(".")[0]: float(re.search("share ([0-9.e-]+)", line)[1]) for line in lines[7:]
    }
    assert 0 < sum(shares.values()) <= 1.0001


def test_several_views_copies_and_samples_that_were_left_out(tmp_path):
    views = {"a": gpuaug.Augment(crop=CROP, copies=2), "b": gpuaug.Augment(crop=gpuaug.Resize((8, 9)))}
    broken = [SOURCE[0], (b"broken", 0), SOURCE[1]]
    with loader(broken, augment=gpuaug.MultiView(views=views), faults=gpuaug.Faults(policy="drop")) as made:
        batch = made.fetch([0, 1, 2])
        assert [(x.view, x.copy) for x in batch.explain(0)] == [("a", 0), ("a", 1), ("b", 0)]
        assert batch.indices.tolist() == [0, 2]
        alone = made.fetch([2])
        assert [x.window for x in batch.explain(1)] == [x.window for x in alone.explain(0)]
        with pytest.raises(ConfigError, match=r"`row` must be .*0 to 1.*Found: 2"):
            batch.explain(2)
        with pytest.raises(ConfigError, match="needs a batch from a gpuaug.Loader"):
            pickle.loads(pickle.dumps(batch)).explain(0)


def test_an_operation_with_its_own_random_numbers():
    class Own(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rand(1)

    with loader(SOURCE, augment=gpuaug.Augment(crop=CROP, ops={"own": Own()})) as made:
        (step,) = made[0].explain().steps
        assert step.seeded
        assert str(step) == "own: its own random numbers"


def test_a_sample_that_could_not_be_read_has_no_explanation():
    recipe = gpuaug.Augment(crop=CROP, ops={"flip": K.RandomHorizontalFlip(p=1.0)})
    with loader([(b"no image", 0), SOURCE[0]], augment=recipe, faults=gpuaug.Faults(policy="blank")) as made:
        batch = made.fetch([0, 1])
        assert batch.valid.tolist() == [False, True]
        assert (batch.explain(0).lines, batch.explain(0).steps) == (["could not be read"], [])
        assert batch.explain(1).lines[1] == "flip: applied"


def test_the_text_names_view_and_copy():
    views = {"global": gpuaug.Augment(crop=CROP), "local": gpuaug.Augment(crop=CROP, copies=2)}
    with loader(SOURCE, augment=gpuaug.MultiView(views=views)) as made:
        texts = [str(each).splitlines()[0] for each in made[0].explain()]
    assert texts == ["global:", "local:", "local, copy 2:"]


def test_a_weight_of_zero_says_how_to_switch_off():
    ops = {"flip": K.RandomHorizontalFlip(p=1.0), "gray": K.RandomGrayscale(p=1.0)}
    with pytest.raises(ConfigError, match="must be above 0. To switch gray off, set `.*ops.gray=null`"):
        gpuaug.Augment(ops={"some": gpuaug.SomeOf(1, ops=ops, weights={"gray": 0})})
