"""Operations, a crop and mix that belong to some epochs: the same pixels as recipes written out by hand."""

from __future__ import annotations

import json
from typing import Any

import hydra
import kornia.augmentation as K
import numpy as np
import pytest
import torch
from common import loader
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import encode, photograph

import gpuaug
from gpuaug.errors import ConfigError, StateError
from gpuaug.loader.describe import steps
from gpuaug.tools.main import main
from gpuaug.tools.plan.command import set_largest_epoch

OPS = {
    "flip": K.RandomHorizontalFlip(p=0.5),
    "jitter": K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8),
    "noise": K.RandomGaussianNoise(std=0.1, p=0.5),
}
CROP = gpuaug.RandomResizedCrop((20, 24))
SOURCE = [(encode(photograph(name, (60, 48)), "PNG"), n) for n, name in enumerate(("china", "flower") * 4)]


def without(*off: str, **more: Any) -> gpuaug.Augment:
    return gpuaug.Augment(crop=CROP, ops={name: op for name, op in OPS.items() if name not in off}, **more)


INTERVALS = st.integers(0, 4).flatmap(lambda a: st.tuples(st.just(a), st.one_of(st.none(), st.integers(a + 1, 6))))


@settings(max_examples=25, deadline=None)
@given(epochs=st.dictionaries(st.sampled_from([*OPS]), INTERVALS), backend=st.sampled_from(["fused", "kornia"]))
def test_each_epoch_has_the_pixels_of_the_recipe_written_out(epochs, backend):
    recipe, images = without(epochs=epochs, backend=backend), torch.arange(3 * 3 * 30 * 40).remainder(255).byte()
    images = images.view(3, 3, 30, 40)
    for epoch in range(7):
        off = [name for name, (first, end) in epochs.items() if epoch < first or (end is not None and epoch >= end)]
        want = without(*off, backend=backend)(images, seed=3, epoch=epoch, indices=[4, 5, 6])
        assert torch.equal(recipe(images, seed=3, epoch=np.int64(epoch), indices=[4, 5, 6]), want)
        assert list(recipe.at(epoch).ops) == [name for name in OPS if name not in off]
    assert sorted(recipe.schedule) == sorted({0, *(x for each in epochs.values() for x in each if x is not None)})
    assert ("epochs" in recipe.fingerprint()) == bool(epochs)


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_across_the_change(workers):
    recipe = without(epochs={"jitter": [0, 1], "noise": [1, None]})
    how = {"augment": recipe, "batch_size": 3, "num_workers": workers, "prefetch": workers}
    with loader(SOURCE, **how) as whole:
        passes = [[batch.images for batch in whole] for _ in range(3)]
    for epoch, off in enumerate(("noise", "jitter", "jitter")):
        with loader(SOURCE, augment=without(off), batch_size=3) as plain:
            plain.set_epoch(epoch)
            assert all(map(torch.equal, passes[epoch], [batch.images for batch in plain]))
    inside: dict[str, Any] = {}
    for taken in (1, 2, 3):
        with loader(SOURCE, **how) as first:
            made = iter(first)
            for _ in range(taken):
                next(made)
            state = json.loads(json.dumps(first.state_dict()))
            inside = state if taken == 1 else inside
        with loader(SOURCE, **how) as second:
            second.load_state_dict(state)
            rest = [batch.images for batch in second] if taken < 3 else []
            assert all(map(torch.equal, rest + [batch.images for batch in second], passes[0][taken:] + passes[1]))
    with loader(SOURCE, augment=without(epochs={"jitter": [0, 2]})) as other, pytest.raises(StateError, match="epochs"):
        other.load_state_dict(inside)


def test_explanations_and_text_follow_the_epoch():
    with loader(SOURCE, augment=without(epochs={"jitter": [0, 2]})) as made:
        names = [[step.name for step in made.fetch([0], epoch=epoch).explain(0).steps] for epoch in (1, 2)]
        assert "jitter" in names[0]
        assert "jitter" not in names[1]
        assert steps(made.augment, 2) == [
            "RandomResizedCrop, flip, noise", "this is epoch 2; the recipe changes at epoch 2"
        ]  # fmt: skip
        set_largest_epoch(made)  # every stage has one size


def test_views_change_apart_and_may_share():
    views = {"a": without(epochs={"jitter": [0, 2]}), "b": without(epochs={"jitter": [0, 2], "flip": [1, None]})}
    recipe = gpuaug.MultiView(views=views, share={"jitter": ["a", "b"], "crop": ["a", "b"]})
    images = torch.randint(0, 255, (2, 3, 30, 40), dtype=torch.uint8)
    assert sorted(recipe.schedule) == [0, 1, 2]
    for epoch, off, share in (
        (0, ("flip",), ["jitter", "crop"]),
        (1, (), ["jitter", "crop"]),
        (2, ("jitter",), ["crop"]),
    ):
        a = without(*(["jitter"] if epoch == 2 else []))
        want = gpuaug.MultiView(views={"a": a, "b": without(*off)}, share={name: ["a", "b"] for name in share})
        made = recipe(images, seed=1, epoch=epoch)
        assert all(map(torch.equal, made, want(images, seed=1, epoch=epoch)))


def test_stages_of_a_progressive_recipe_change_too():
    small = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(16), ops=OPS, epochs={"noise": [0, 5], "jitter": [0, 30]})
    recipe = gpuaug.Progressive(schedule={0: small, 10: without()})
    assert sorted(recipe.schedule) == [0, 5, 10]
    assert [list(recipe.at(epoch).ops) for epoch in (4, 5, 10)] == [[*OPS], ["flip", "jitter"], [*OPS]]


def test_clips_and_cameras():
    clips = torch.rand(2, 3, 3, 24, 24)
    recipe = without(epochs={"jitter": [0, 1]}, same_on_frame={"jitter": False, "crop": False})
    want = without("jitter", same_on_frame={"crop": False})(clips, seed=2, epoch=1)
    assert torch.equal(recipe(clips, seed=2, epoch=1), want)
    cameras = {"top": torch.rand(2, 3, 24, 24), "wrist": torch.rand(2, 3, 24, 24)}
    made = without(epochs={"jitter": [0, 1]}, same_on_camera={"jitter": True})(cameras, seed=2, epoch=1)
    assert torch.equal(made["wrist"], without("jitter")(cameras, seed=2, epoch=1)["wrist"])


def test_rt_detr_stops_at_epoch_71():
    recipe = gpuaug.build(gpuaug.compose("train", ["augment=det_rtdetr"]).augment)
    words = [
        "augment=det_rtdetr",
        "augment.epochs={}",
        "augment.crop.p=0",
        "augment.crop.zoom_p=0",
        "augment.ops.distort=null",
    ]
    plain = gpuaug.build(gpuaug.compose("train", words).augment)
    images, boxes = torch.randint(0, 255, (2, 3, 60, 80), dtype=torch.uint8), [torch.tensor([[4.0, 5, 40, 44]])] * 2
    for epoch in (70, 71):
        made, targets = recipe(images, boxes=boxes, seed=1, epoch=epoch)
        want, known = plain(images, boxes=boxes, seed=1, epoch=epoch)
        assert torch.equal(made, want) == torch.equal(targets.boxes, known.boxes) == (epoch == 71)


def test_mix_stops():
    mix = gpuaug.Mix(mixup_alpha=0.8, label_smoothing=0.1, epochs=[0, 2])
    assert repr(gpuaug.Mix()) == "Mix(mixup_alpha=0.0, cutmix_alpha=0.0, p=1.0, switch_p=0.5, label_smoothing=0.0)"
    assert "epochs=(0, 2)" in repr(mix)

    class Classes(list):
        num_classes = 8

    with loader(Classes(SOURCE), augment=without(), mix=mix) as made:
        for epoch in range(3):
            made.set_epoch(epoch)
            batch = next(iter(made))
            plain = made.fetch(batch.indices, epoch=epoch)
            assert torch.equal(batch.images, plain.images) == (epoch == 2)
            assert batch.labels.dtype == torch.float32
            assert bool((batch.labels.amax(1) > 0.9).all()) == (epoch == 2)


@pytest.mark.parametrize(
    ("epochs", "message"),
    [
        (
            {"x": [0, 1]},
            "must name operations, or `crop` if it is a gpuaug.RandomIoUCrop. Found: 'x'. The names are flip",
        ),
        ({"crop": [0, 1]}, "must name operations, or `crop`"),
        (
            {"jitter": [3, 3]},
            r"`augment.epochs.jitter` must be \[first epoch, first epoch without it\], such as \[0, 90\]",
        ),
        ({"jitter": [-1, 3]}, r"Found: \[-1, 3\]"),
        ({"jitter": [0.0, 3]}, r"Found: \[0.0, 3\]"),
        ({"jitter": 3}, "Found: 3"),
        ({"jitter": [0, 2**40]}, "Found"),
        (["jitter"], "must be a mapping of names. Found: a list"),
    ],
)
def test_wrong_epochs_are_refused(epochs, message):
    with pytest.raises(ConfigError, match=message):
        without(epochs=epochs)


def test_in_yaml_and_on_the_command_line(tmp_path, capsys):
    for n in range(3):
        (tmp_path / "images" / "a").mkdir(parents=True, exist_ok=True)
        photograph("china", (60, 48)).save(tmp_path / "images" / "a" / f"{n}.png")
    words = [
        f"source.root={tmp_path}/images",
        "augment=simclr",
        "augment.crop.size=32",
        "+augment.epochs={jitter:[0,1]}",
    ]
    config = gpuaug.compose("train", [*words, "num_workers=0", "device=cpu"])
    for build in (gpuaug.build, hydra.utils.instantiate):
        with build(config) as made:
            assert sorted(made.augment.schedule) == [0, 1]
    assert main(["preview", *words, "samples=1", "draws=2", f"out={tmp_path}/p.html"]) == 0
    page = (tmp_path / "p.html").read_text()
    assert "this is epoch 0; the recipe changes at epoch 1" in page
    assert len([x for x in page.split("<label title=")[1:] if "jitter" in x.partition(">")[0]]) == 2  # of epoch 0
    pack = ["pack", f"source.root={tmp_path}/images", f"out={tmp_path}/packed", "epochs=2", *words[1:]]
    assert main(pack) == 2
    assert "`epochs` stores versions of one recipe. Found: a recipe that changes at epoch 1" in capsys.readouterr().err
