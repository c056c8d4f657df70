"""Recipes: what they draw and for whom, views and copies, use as a module, descriptions, refusals."""

from __future__ import annotations

import copy
import inspect
import json
import math
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from conftest import SHARED
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from test_parameters import OPS
from test_reference import images
from torch import Tensor, nn

import gpuaug
from gpuaug.augment.crop import RandomCrop, RandomResizedCrop, Resize, ResizeCenterCrop
from gpuaug.augment.multi_view import MultiView
from gpuaug.augment.normalize import Normalize
from gpuaug.augment.policy import OneOf, SomeOf
from gpuaug.augment.recipe import Augment
from gpuaug.errors import ConfigError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def standard(**kwargs: object) -> Augment:
    ops = {
        "vflip": K.RandomVerticalFlip(),
        "flip": K.RandomHorizontalFlip(),
        "jitter": K.ColorJitter(0.3, 0.3, 0.3, 0.1),
        "gray": K.RandomGrayscale(p=0.3),
    }
    settings = {"ops": ops, "normalize": Normalize(MEAN, STD), "backend": "kornia"}
    return Augment(**(settings | kwargs))


def multi() -> MultiView:
    large = {"flip": K.RandomHorizontalFlip(), "jitter": K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8)}
    small = {"jitter": K.ColorJitter(0.1, 0.1, 0.1, 0.1, p=0.8)}
    return MultiView(
        views={
            "global": standard(ops=large, crop=RandomResizedCrop(20), copies=2),
            "off": None,
            "local": standard(ops=small, crop=RandomResizedCrop((9, 12)), copies=3, normalize=None),
        }
    )


def augmented(recipe: Augment | MultiView, x: Tensor, indices: list[int], **kwargs: object) -> list[Tensor]:
    y = recipe(x, indices=indices, **kwargs)
    return y if isinstance(y, list) else [y]


@pytest.mark.parametrize("make", [standard, multi, lambda: standard(crop=RandomCrop(16, padding=4), copies=2)])
@settings(max_examples=8, deadline=None)
@given(rows=st.lists(st.integers(0, 12), min_size=1, max_size=13, unique=True), epoch=st.integers(0, 2**32 - 1))
def test_a_sample_is_a_function_of_its_own_keys(make: object, rows: list[int], epoch: int) -> None:
    x = images(13, (24, 18))
    numbers = [i * 1000003 for i in range(13)]
    whole = augmented(make(), x, numbers, seed=3, epoch=epoch)
    part = augmented(make(), x[rows], [numbers[i] for i in rows], seed=3, epoch=epoch)
    for a, b in zip(part, whole, strict=True):
        assert torch.equal(a, b[rows])


def test_adding_an_operation_or_a_view_changes_nothing_that_others_draw() -> None:
    x = images(6, (20, 20))
    ops = standard().ops
    indices = list(range(6))
    base = standard(ops=ops, normalize=None)
    longer = standard(ops=ops | {"erase": K.RandomErasing(p=1.0)}, normalize=None)
    first = standard(ops={"noop": K.RandomGaussianNoise(p=0.0)} | ops, normalize=None)
    want = augmented(base, x, indices)[0]
    assert torch.equal(augmented(first, x, indices)[0], want)
    got = augmented(longer, x, indices)[0]
    kept = (got != 0) & (want != 0)
    assert torch.equal(got[kept], want[kept])
    assert kept.float().mean() > 0.3
    one = MultiView(views={"a": standard()})
    two = MultiView(views={"b": standard(), "a": standard()})
    assert torch.equal(augmented(two, x, indices)[1], augmented(one, x, indices)[0])
    assert torch.equal(augmented(standard(copies=2), x, indices)[0], augmented(standard(), x, indices)[0])


def test_views_come_in_the_order_of_the_mapping_with_copies_next_to_each_other() -> None:
    recipe = multi()
    assert [(v.name, v.copy) for v in recipe.views] == [
        ("global", 0), ("global", 1), ("local", 0), ("local", 1), ("local", 2),
    ]  # fmt: skip
    made = recipe(images(4, (40, 30)))
    assert [tuple(y.shape) for y in made] == [(4, 3, 20, 20)] * 2 + [(4, 3, 9, 12)] * 3
    assert [(v.name, v.copy) for v in standard(copies=2).views] == [("", 0), ("", 1)]
    assert {(s.view, s.copy, s.name) for s in standard().draws} == {
        ("", 0, "crop"), ("", 0, "vflip"), ("", 0, "flip"), ("", 0, "jitter"), ("", 0, "gray"),
    }  # fmt: skip
    assert not torch.equal(*MultiView(views={"a": standard(), "b": standard()})(images(4, (30, 30)), seed=0))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(40, 60), (500, 375), (7, 3)])
def test_crops_of_a_module_are_pillows(interpolation: str, size: tuple[int, int]) -> None:
    crop = RandomResizedCrop((24, 32), interpolation=interpolation)
    recipe = Augment(crop=crop, backend="kornia")
    x = images(3, size)
    got = (recipe(x, indices=[0, 1, 2]) * 255).round()
    drawn = recipe.draw(seed=0, epoch=0, indices=[0, 1, 2])
    (boxes,) = recipe.windows(drawn, np.full(3, size[0]), np.full(3, size[1]))
    filters = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
    for row, (top, left, h, w) in enumerate(boxes.window.tolist()):
        part = Image.fromarray(x[row, top : top + h, left : left + w].contiguous().numpy())
        want = torch.from_numpy(np.array(part.resize((32, 24), filters[interpolation]))).permute(2, 0, 1)
        assert (got[row] - want).abs().max() <= 1


@pytest.mark.parametrize("crop", [None, RandomResizedCrop(8), Resize((8, 9)), RandomCrop(8)])
def test_channels_first_and_last_are_the_same_images(crop: object) -> None:
    x = images(4, (10, 12))
    first = x.permute(0, 3, 1, 2)
    for given_ in (first, first.contiguous(), x.contiguous()):
        want = standard(crop=crop)(x, indices=range(4))
        assert torch.equal(standard(crop=crop)(given_, indices=range(4)), want)


def test_an_empty_batch_keeps_its_size() -> None:
    x = torch.zeros((0, 3, 64, 80), dtype=torch.uint8)
    made, targets = Augment()(x, masks=torch.zeros((0, 64, 80), dtype=torch.int64))
    assert Augment()(x).shape == made.shape == (0, 3, 64, 80)
    assert targets.masks.shape == (0, 64, 80)
    assert Augment(crop=RandomResizedCrop((8, 9)))(x).shape == (0, 3, 8, 9)


@pytest.mark.parametrize("backend", ["fused", "kornia"])
def test_without_indices_torch_decides_the_draws(backend: str) -> None:
    x = images(1, (12, 12)).expand(6, -1, -1, -1)
    recipe, again = standard(backend=backend), standard(backend=backend)
    torch.manual_seed(3)
    calls = [recipe(x) for _ in range(3)]
    assert len(torch.unique(torch.cat(calls).flatten(1), dim=0)) > 12  # samples of a call differ, and so do calls
    torch.manual_seed(3)
    with torch.inference_mode():
        assert all(torch.equal(again(x), call) for call in calls)  # another instance goes on alike
    torch.manual_seed(4)
    assert not torch.equal(recipe(x), calls[0])
    torch.manual_seed(3)
    assert not torch.equal(recipe(x, epoch=1), calls[0])


def test_without_indices_a_call_takes_one_draw_of_the_cpus_generator_and_of_nothing_else() -> None:
    states = np.random.get_state()[1].copy(), random.getstate()
    torch.manual_seed(3)
    torch.randint(2**63 - 1, ())
    want = torch.get_rng_state()
    for recipe in (standard(), multi(), Augment(ops={"rain": K.RandomRain((10, 20), (2, 3), (1, 2))})):
        torch.manual_seed(3)
        recipe(images(2, (30, 30)))
        assert torch.equal(torch.get_rng_state(), want)
    assert (np.random.get_state()[1] == states[0]).all()
    assert random.getstate() == states[1]


class Augmented(torch.utils.data.Dataset):
    """Every item a small batch that a worker has augmented, each worker from one and the same state of torch."""

    def __init__(self) -> None:
        self.recipe = standard()

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        torch.manual_seed(0)
        return torch.utils.data.get_worker_info().id, self.recipe(images(4, (12, 12)))


def test_without_indices_workers_draw_for_themselves() -> None:
    """Again and again the same, however they are started."""
    made = []
    for method in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(
            Augmented(), batch_size=None, num_workers=2, multiprocessing_context=method
        )
        workers, batches = zip(*loader, strict=True)
        assert workers == (0, 1)
        assert not torch.equal(*batches)
        made.append(torch.stack(batches))
    assert torch.equal(*made)


RANKS = """
import kornia.augmentation as K, torch, torch.distributed as dist
from gpuaug import Augment
recipe = Augment(ops={"jitter": K.ColorJitter(0.3, 0.3, 0.3, 0.1), "gray": K.RandomGrayscale(p=0.3)}, backend="kornia")
images = (torch.arange(4 * 12 * 12 * 3) % 251).to(torch.uint8).reshape(4, 12, 12, 3)
for group in ("none", "gloo"):
    if group == "gloo":
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    print(recipe(images).numpy().tobytes().hex())
"""


def test_without_indices_ranks_draw_for_themselves(tmp_path: Path) -> None:
    """With a process group, and without one."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--log-dir", str(tmp_path / "log")]
    path = os.pathsep.join(filter(None, [*map(str, SHARED), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *words, "--redirects=3", str(script)], check=True, timeout=300, env=environment)
    first, second = (file.read_text().split() for file in (tmp_path / "log").rglob("stdout.log"))
    assert len(first) == len(second) == 2
    assert all(a and b and a != b for a, b in zip(first, second, strict=True))


def test_with_indices_or_a_seed_torchs_generator_decides_nothing() -> None:
    x, state = images(4, (12, 12)), torch.get_rng_state()
    want = standard()(x, indices=[0, 1, 2, 3])
    for given_ in ({"indices": np.arange(4), "seed": 0}, {"indices": torch.arange(4)}, {"seed": 0}):
        assert torch.equal(standard()(x, **given_), want)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ConfigError, match="`indices`"):
        standard()(x, indices=[1, 2])


def test_inside_a_compiled_model_the_pixels_are_the_same() -> None:
    recipe = standard()
    x = images(4, (16, 12))
    compiled = torch.compile(nn.Sequential(recipe, nn.Identity()), backend="eager")
    for _ in range(2):
        torch.manual_seed(1)
        want = recipe(x)
        torch.manual_seed(1)
        assert torch.equal(compiled(x), want)
    assert torch.equal(torch.compile(recipe, backend="eager")(x, indices=range(4)), recipe(x, indices=range(4)))


@pytest.mark.parametrize("backend", ["fused", "kornia"])
def test_output_dtype_and_memory_format_may_be_strings(backend: str) -> None:
    x, recipe = images(2, (9, 8)), standard(backend=backend)
    made = recipe(x, seed=0, dtype="bfloat16", memory_format="channels_last")
    assert torch.equal(made, recipe(x, seed=0).bfloat16())
    assert made.is_contiguous(memory_format=torch.channels_last)
    assert not made.is_contiguous()
    for wrong in ({"memory_format": "channels_first"}, {"memory_format": torch.preserve_format}, {"dtype": "float64"}):
        with pytest.raises(ConfigError, match=rf"`{next(iter(wrong))}` must be one of .*Found: "):
            recipe(x, seed=0, **wrong)


def test_recipes_travel() -> None:
    ops = {name: make() for name, make in OPS.items()} | {"policy": gpuaug.RandAugment()}
    x = images(3, (40, 32))
    grows = gpuaug.Progressive(
        schedule={0: standard(crop=RandomResizedCrop(12)), 1: standard(crop=RandomResizedCrop(9))}
    )
    for recipe in (standard(ops=ops, normalize=None), multi(), grows):
        want = augmented(recipe, x, [0, 1, 2], epoch=1)
        for other in (pickle.loads(pickle.dumps(recipe)), copy.deepcopy(recipe), copy.copy(recipe)):
            for a, b in zip(augmented(other, x, [0, 1, 2], epoch=1), want, strict=True):
                assert torch.equal(a, b)
            assert other.fingerprint() == recipe.fingerprint()


def test_inside_a_model_a_recipe_moves_applies_and_saves_nothing() -> None:
    recipe = standard(ops=standard().ops | {"planckian": K.RandomPlanckianJitter()})
    model = nn.Sequential(nn.Linear(2, 2), recipe)
    x = images(3, (10, 10))
    want = recipe(x, indices=[0, 1, 2])
    seen: list[str] = []
    model.apply(lambda m: seen.append(type(m).__name__))
    assert seen == ["Linear", "Normalize", "Augment", "Sequential"]
    for change in (model.half, model.double, model.eval, model.train):
        change()
        assert torch.equal(recipe(x, indices=[0, 1, 2]), want)
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    assert recipe.normalize.to("meta").mean.device.type == "meta"


def test_main_thread_only_where_an_operation_draws_by_itself() -> None:
    assert not standard().main_thread
    assert not multi().main_thread
    own = Augment(ops={"dropout": nn.Dropout()})
    assert own.main_thread
    assert MultiView(views={"a": standard(), "b": own}).main_thread


# --- fingerprints


def changes() -> dict[str, Augment]:
    jitter = K.ColorJitter(0.3, 0.3, 0.3, 0.1)
    ops = standard().ops
    return {
        "base": standard(),
        "class": standard(ops=ops | {"jitter": K.ColorJiggle(0.3, 0.3, 0.3, 0.1)}),
        "name": standard(ops={k: v for k, v in ops.items() if k != "jitter"} | {"colour": jitter}),
        "sequence": standard(ops=dict(reversed(ops.items()))),
        "off": standard(ops=ops | {"gray": None}),
        "more": standard(ops=ops | {"invert": K.RandomInvert()}),
        "crop": standard(crop=RandomResizedCrop(32)),
        "crop size": standard(crop=RandomResizedCrop(33)),
        "crop scale": standard(crop=RandomResizedCrop(32, scale=(0.1, 1.0))),
        "crop interpolation": standard(crop=RandomResizedCrop(32, interpolation="bicubic")),
        "normalize": standard(normalize=None),
        "std": standard(normalize=Normalize(MEAN, (0.2, 0.2, 0.2))),
        "copies": standard(copies=2),
        "policy": standard(ops=ops | {"policy": gpuaug.RandAugment()}),
        "policy magnitude": standard(ops=ops | {"policy": gpuaug.RandAugment(magnitude=10)}),
        "one": standard(ops={"one": OneOf(ops={"a": K.RandomInvert(), "b": jitter})}),
        "one order": standard(ops={"one": OneOf(ops={"b": jitter, "a": K.RandomInvert()})}),
        **{f"some {given}": standard(ops={"one": SomeOf(**{"n": 1, **given}, ops={"a": K.RandomInvert(), "b": jitter})})
           for given in ({}, {"n": (0, 1)}, {"weights": {"a": 2}}, {"random_order": True}, {"p": 0.5})},
        "one p": standard(ops={"one": OneOf(ops={"a": K.RandomInvert(), "b": jitter}, p=0.5)}),
    }  # fmt: skip


def test_a_fingerprint_changes_with_everything_that_decides_draws_or_pixels() -> None:
    texts = {name: json.dumps(recipe.fingerprint(), sort_keys=True) for name, recipe in changes().items()}
    assert len(set(texts.values())) == len(texts)
    assert texts == {name: json.dumps(r.fingerprint(), sort_keys=True) for name, r in changes().items()}
    views = json.dumps(MultiView(views={"a": standard(), "b": standard()}).fingerprint())
    assert views != json.dumps(MultiView(views={"a": standard(), "c": standard()}).fingerprint())
    assert views != json.dumps(MultiView(views={"a": standard(), "b": standard(copies=2)}).fingerprint())


def test_a_fingerprint_is_the_same_in_another_process() -> None:
    script = (
        f"import json, sys; sys.path += {list(map(str, SHARED))}; from test_recipe import changes;"
        "print(json.dumps({k: v.fingerprint() for k, v in changes().items()}))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == {k: v.fingerprint() for k, v in changes().items()}


@pytest.mark.parametrize(
    "own",
    [
        gpuaug.RandAugment(), gpuaug.TrivialAugmentWide(), gpuaug.AutoAugment(), gpuaug.AugMix(), gpuaug.TimmAugment(),
        gpuaug.PhotometricDistort(), gpuaug.RandomErasing(), gpuaug.RandomScaleCrop(8, base=9), gpuaug.Letterbox(8),
        gpuaug.RandomIoUCrop(8), RandomResizedCrop(8), RandomCrop(8), Resize(8), ResizeCenterCrop(8, 8),
    ],
)  # fmt: skip
def test_a_fingerprint_has_every_argument_of_our_own_classes(own: object) -> None:
    recipe = Augment(ops={"own": own}) if isinstance(own, nn.Module) else Augment(crop=own)
    found = recipe.fingerprint()["crop"] or recipe.fingerprint()["ops"][0]
    assert inspect.signature(type(own)).parameters.keys() <= found.keys()


def test_one_setting_written_as_int_or_float_has_one_fingerprint() -> None:
    a, b = (Augment(ops={"flip": K.RandomHorizontalFlip(p=p)}).fingerprint() for p in (1, 1.0))
    assert json.dumps(a) == json.dumps(b)


# Other valid values of arguments; those of all other arguments are made from the given value. See `other`.
OTHER = {
    "rgb_weights": torch.tensor([0.2, 0.3, 0.5]), "max_val": torch.tensor(0.9), "kernel_size": (7, 3), "bits": 4,
    "order": (1, 0, 2, 3), "ratio": (0.5, 2.0), "border_type": "constant", "padding_mode": "border", "grid": (2, 1),
    "resample": "nearest", "fill_value": 0.5, "translate": (0.1, 0.2), "scale": (0.8, 1.2), "shear": 4.0,
    "times": (1, 2), "translate_x": (0.0, 0.1), "translate_y": (0.0, 0.1), "sampling_method": "area_preserving",
    "mode": "blackbody", "select_from": [1, 2, 3], "drop_width": (-2, 4), "grid_size": (4, 2),
    "affine fill_value": torch.tensor([0.1, 0.2, 0.3]), "erase scale": (0.1, 0.2), "motion border_type": "reflect",
    "motion kernel_size": 7, "motion resample": "bilinear", "snow brightness": (1.5, 2.0), "spline scale": 0.4,
}  # fmt: skip


def other(name: str, argument: str, value: Any) -> object:
    """Another value of an argument of the operation ``name``."""
    given_ = OTHER.get(f"{name} {argument}", OTHER.get(argument))
    if given_ is not None:
        return given_
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return tuple(other(name, argument, v) for v in value)
    return value + 1 if isinstance(value, int) else 0.8 * value + 0.017


def arguments_of(name: str) -> dict[str, Any]:
    """All arguments of an operation of ``OPS``, with their values."""
    kind, given_ = type(OPS[name]()), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(K, kind.__name__, lambda *a, **k: given_.append(inspect.signature(kind).bind(*a, **k)))
        OPS[name]()
    given_[0].apply_defaults()
    return given_[0].arguments


@pytest.mark.parametrize("name", {type(OPS[name]()): name for name in reversed(OPS)}.values())
def test_a_fingerprint_changes_with_every_argument_of_an_operation(name: str) -> None:
    refused = {"same_on_batch", "keepdim", "p_batch"}
    refused |= {"data_keys", "ensure_perm"}  # RandomJigsaw's: test_fitting_in.py has the second one
    kind, given_ = type(OPS[name]()), arguments_of(name)
    variants = [{}, *({k: other(name, k, v)} for k, v in given_.items() if k not in refused)]
    texts = [json.dumps(Augment(ops={"op": kind(**given_ | change)}).fingerprint()) for change in variants]
    assert len(set(texts)) == len(texts)
    assert texts[0] == json.dumps(Augment(ops={"op": OPS[name]()}).fingerprint())


@pytest.mark.parametrize("name", [*OPS, "own", "crop"])
def test_a_fingerprint_stays_with_use_where_classes_move_and_private_attributes_come(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(K.RandomInvert):
        """A class of somebody's own that builds on Kornia."""

    more = {"own": Own, "crop": K.RandomInvert}
    make = (OPS | more)[name]
    crop, op = RandomResizedCrop(8), make()
    before = json.dumps(Augment(crop=crop, ops={"op": op}, backend="kornia").fingerprint())
    assert json.dumps(Augment(crop=crop, ops={"op": make()}).fingerprint()) == before  # the backend is no part of it
    assert "_2d" not in before
    assert "0x" not in before
    op(torch.rand(3, 3, 16, 16))
    for value in (op, crop, *op.modules(), *filter(None, [getattr(op, "_param_generator", None)])):
        value._news = 3
        if type(value) is not Own:
            monkeypatch.setattr(type(value), "__module__", type(value).__module__ + "._moved")
    assert json.dumps(Augment(crop=crop, ops={"op": op}).fingerprint()) == before


class Stain(nn.Module):
    """An operation of somebody's own."""

    def __init__(self, strength: float, weights: int) -> None:
        super().__init__()
        self._strength, self.color = strength, [0.1, 0.2]
        self.net = nn.Linear(weights, weights, dtype=torch.bfloat16)
        with torch.no_grad():
            self.net.weight.fill_(0.5)
            self.net.bias.fill_(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self._strength


def test_a_fingerprint_of_ones_own_operation_has_its_attributes_and_weights() -> None:
    variants = [Stain(0.5, 40), Stain(0.6, 40), Stain(0.5, 3), Stain(0.5, 40), Stain(0.5, 40)]
    variants[3].color[0] = 0.3
    with torch.no_grad():
        variants[4].net.weight[39, 39] = 0.25
    texts = [json.dumps(Augment(ops={"stain": op}).fingerprint()) for op in variants]
    assert len(set(texts)) == len(texts)
    assert texts[0] == json.dumps(Augment(ops={"stain": Stain(0.5, 40)}).fingerprint())


# --- settings are read once


@pytest.mark.parametrize("name", ["crop", "ops", "normalize", "copies", "backend", "prepared", "views"])
def test_a_recipes_settings_cannot_be_assigned(name: str) -> None:
    recipe = standard()
    before = getattr(recipe, name)
    for error in (ConfigError, AttributeError):
        with pytest.raises(error, match=rf"`Augment\.{name}` cannot be assigned.*a new loader with it"):
            setattr(recipe, name, None)
    assert str(getattr(recipe, name)) == str(before)
    for name in ("views", "backend", "augments"):
        with pytest.raises(ConfigError, match=rf"`MultiView\.{name}`"):
            setattr(multi(), name, None)


def test_the_operations_of_a_recipe_are_a_mapping_to_read() -> None:
    recipe = standard()
    with pytest.raises(TypeError, match="assignment"):
        recipe.ops["flip"] = K.RandomHorizontalFlip(p=1.0)
    with pytest.raises(TypeError, match="deletion"):
        del recipe.ops["flip"]
    assert list(recipe.ops) == ["vflip", "flip", "jitter", "gray"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: setattr(r.ops["flip"], "p", 0.9), r"`augment\.ops\.flip\.p` was 0\.5 when.* 0\.9 now"),
        (lambda r: setattr(r.ops["jitter"], "hue", 0.3), r"`augment\.ops\.jitter\.hue` was 0\.1 when"),
        (lambda r: r.ops["blur"].flags.update(kernel_size=(3, 3)), r"`augment\.ops\.blur\.kernel_size` was 5 when"),
        (lambda r: setattr(r.ops["one"].ops["a"], "p", 0.9), r"`augment\.ops\.one\.ops\.a\.p` was 1 when"),
        (lambda r: setattr(r.ops["one"].ops["b"].ops["c"], "p", 0.9), r"`augment\.ops\.one\.ops\.b\.ops\.c\.p` was 1 "),
        (lambda r: setattr(r.ops["policy"], "magnitude", 3), r"`augment\.ops\.policy\.magnitude` was 9 when"),
        (lambda r: setattr(r.crop, "size", (9, 9)), r"`augment\.crop\.size\.0` was 8 when"),
        (
            lambda r: setattr(r.normalize, "mean", torch.zeros(3)),
            r"`augment\.normalize\.mean\.0` was 0\.\d+ when.* 0\.0 now",
        ),
        (lambda r: r.normalize.std.fill_(0.5), r"`augment\.normalize\.std\.0` was 0\.2"),
    ],
)
def test_a_setting_that_was_changed_after_it_was_read_is_named(change: Callable, words: str) -> None:
    ops = standard().ops | {
        "blur": K.RandomGaussianBlur(5, (0.1, 2.0)),
        "one": OneOf(ops={"a": K.RandomInvert(p=1.0), "b": OneOf(ops={"c": K.RandomInvert(p=1.0)})}),
        "policy": gpuaug.RandAugment(),
    }
    recipe = standard(crop=RandomResizedCrop(8), ops=ops)
    x = images(2, (20, 20))
    fingerprint = recipe.fingerprint()
    whole = MultiView(views={"a": recipe, "b": standard()})
    for module in (recipe, whole):
        module(x)
        module.half().to("cpu")
        module.check_unchanged()
    for op in recipe.ops.values():  # using them elsewhere changes no setting
        if isinstance(op, K.AugmentationBase2D):
            op(torch.rand(2, 3, 16, 16))
    recipe.check_unchanged()
    change(recipe)
    with pytest.raises(ConfigError, match=words):
        recipe(x)
    with pytest.raises(ConfigError, match=words.replace("augment", r"augment\.views\.a")):
        whole(x, indices=[0, 1])
    for copied in (recipe, copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe)), copy.copy(recipe)):
        with pytest.raises(AttributeError, match=words):
            copied.check_unchanged()
    with pytest.raises(ConfigError, match=words.replace("augment", r"augment\.views\.a")):
        whole.check_unchanged()
    assert recipe.fingerprint() == fingerprint  # of what it draws


def test_a_loader_refuses_settings_that_were_changed(tmp_path: Path) -> None:
    for row, image in enumerate(images(4, (16, 16))):
        Image.fromarray(image.numpy()).save(tmp_path / f"{row}.png")
    source = gpuaug.FolderSource(tmp_path, labels="none")
    with gpuaug.Loader(source, augment=standard(), batch_size=2, num_workers=0, device="cpu") as loader:
        list(loader)
        loader.augment.ops["flip"].p = 0.9
        with pytest.raises(ConfigError, match=r"`augment\.ops\.flip\.p` was 0\.5"):
            list(loader)
        with pytest.raises(ConfigError, match=r"`augment\.ops\.flip\.p` was 0\.5"):
            loader.fetch([0])


def test_replace_gives_another_recipe_and_keeps_the_rest() -> None:
    x = images(3, (16, 12))
    recipe = standard(crop=RandomResizedCrop(8))
    bare = recipe.replace(normalize=None, copies=2)
    assert recipe.normalize is not None
    assert (recipe.copies, bare.copies, bare.crop, dict(bare.ops)) == (1, 2, recipe.crop, dict(recipe.ops))
    want = recipe.normalize(bare(x, indices=range(3))[0])
    assert torch.equal(recipe(x, indices=range(3)), want)
    with pytest.raises(ConfigError, match="backend"):
        recipe.replace(backend="korniaa")


# --- normalization and refusals


def test_normalize_is_the_formula_and_nothing_is_the_identity() -> None:
    x = images(3, (9, 8))
    unit = x.permute(0, 3, 1, 2).float() / 255
    assert torch.equal(Augment(backend="kornia")(x), unit)
    want = (unit - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    assert torch.equal(Augment(backend="kornia", normalize=Normalize(mean=MEAN, std=list(STD)))(x), want)
    assert torch.equal(Normalize(torch.tensor(MEAN), np.array(STD))(unit), want)
    assert torch.equal(Normalize(tuple(np.float32(MEAN)), list(np.float32(STD)))(unit), want)


@pytest.mark.parametrize(
    ("mean", "std", "words"),
    [
        ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375), r"0\.\.1.*Found: \(123\.675.*255"),
        ((0.5, 0.5, 0.5), (0.2, 0.0, 0.2), "positive"),
        ((0.5, 0.5, 0.5), (0.2, -0.2, 0.2), "positive"),
        ((0.5, 0.5), STD, "equally many numbers.*Found: 2 and 3"),
        ("abc", STD, "a number, or one per channel"),
        ((0.5, math.nan, 0.5), STD, "a number, or one per channel"),
        (MEAN, (math.inf,) * 3, "a number, or one per channel"),
        (MEAN, None, "a number, or one per channel"),
    ],
)
def test_a_normalization_that_cannot_work_is_refused(mean: object, std: object, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"augment\.normalize\.(mean|std).*{words}"):
        Normalize(mean, std)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"backend": "korniaa"}, ["augment.backend", "korniaa", "fused, kornia"]),
        ({"copies": 0}, ["augment.copies", "0"]),
        ({"copies": True}, ["augment.copies", "True"]),
        ({"crop": K.RandomResizedCrop((8, 8))}, ["augment.crop", "gpuaug.RandomResizedCrop"]),
        ({"normalize": K.Normalize(MEAN, STD)}, ["augment.normalize", "gpuaug.Normalize"]),
        ({"ops": [K.RandomHorizontalFlip()]}, ["augment.ops", "mapping"]),
        ({"ops": {"crop": K.RandomHorizontalFlip()}}, ["augment.ops.crop"]),
        ({"ops": {"flip": K.RandomHorizontalFlip(same_on_batch=True)}}, ["augment.ops.flip.same_on_batch"]),
        ({"ops": {"x": K.RandomGrayscale(p="high")}}, ["augment.ops.x.p", "high"]),
        ({"ops": {"x": K.RandomGrayscale(p=1.5)}}, ["augment.ops.x.p", "1.5"]),
        ({"ops": {"x": K.RandomGaussianBlur(4, (0.1, 2.0))}}, ["augment.ops.x.kernel_size"]),
        ({"views": {}}, ["at least one"]),
        ({"views": {"a": None}}, ["at least one"]),
        ({"views": [Augment()]}, ["mapping"]),
        ({"views": {"a": K.RandomHorizontalFlip()}}, ["augment.views.a", "RandomHorizontalFlip"]),
        ({"views": {"": Augment()}}, ["names"]),
        ({"views": {1: Augment()}}, ["names"]),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        (MultiView if "views" in arguments else Augment)(**arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("crop", [ResizeCenterCrop(256, 224), Resize(224), gpuaug.RandomScaleCrop(480, base=520)])
def test_a_thin_image_that_would_need_gigabytes_is_refused(crop: object) -> None:
    with pytest.raises(ConfigError, match=r"at most 178000000 pixels. Found: image 0 of 2 x 20000 .* becomes \d+ x "):
        Augment(crop=crop)(images(2, (20_000, 2)), seed=0)


def test_images_of_different_sizes_need_a_crop() -> None:
    recipe = standard()
    drawn = recipe.draw(seed=0, epoch=0, indices=[0, 1])
    (boxes,) = recipe.windows(drawn, np.array([5, 5]), np.array([7, 7]))
    assert boxes.size == (5, 7)
    with pytest.raises(ConfigError, match=r"augment\.crop.*\[5, 7\].*\[5, 8\]"):
        recipe.windows(drawn, np.array([5, 5]), np.array([7, 8]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_on_a_gpu_a_module_crops_as_on_the_cpu(interpolation: str) -> None:
    recipe = Augment(
        crop=RandomResizedCrop(24, interpolation=interpolation), normalize=Normalize(MEAN, STD), backend="kornia"
    )
    x = images(5, (60, 50))
    want = recipe(x, indices=range(5))
    for module in (recipe, recipe.cuda()):  # the buffers are found wherever they are
        got = module(x.cuda(), indices=torch.arange(5, device="cuda"))
        assert got.device.type == "cuda"
        assert (got.cpu() - want).abs().max() <= 1.01 / 255 / min(STD)


def test_one_backend_for_all_views():
    views = {"a": gpuaug.Augment(crop=gpuaug.Resize((8, 8))), "b": gpuaug.Augment(crop=gpuaug.Resize((8, 8)))}
    both = gpuaug.MultiView(views=views, backend="kornia")
    assert [view.augment.backend for view in both.views] == ["kornia", "kornia"]
    assert views["a"].backend == "fused"
    with pytest.raises(gpuaug.ConfigError, match="backend"):
        gpuaug.MultiView(views=views, backend="korina")


@pytest.mark.parametrize("settings", [{"indices": [0.5, 1.7]}, {"seed": 1.5}, {"epoch": 1.5}, {"dtype": torch.int32}])
def test_module_arguments_are_not_rounded(settings):
    augment = gpuaug.Augment(backend="kornia")
    with pytest.raises(gpuaug.ConfigError, match=next(iter(settings))):
        augment(torch.zeros((2, 8, 8, 3), dtype=torch.uint8), **settings)
    assert augment(torch.zeros((2, 8, 8, 3), dtype=torch.uint8), dtype="bfloat16").dtype == torch.bfloat16


def test_torchs_default_device_changes_nothing():
    """What numpy and compiled code read stays on the CPU."""
    ops = {
        "jitter": K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=1.0),
        "auto": gpuaug.RandAugment(),
        "drop": K.RandomChannelDropout(p=1.0),
        "noise": K.RandomGaussianNoise(p=1.0),
        "rain": K.RandomRain((1, 9), (1, 9), (1, 9), p=1.0),
        "snow": K.RandomSnow(p=1.0),
        "motion": K.RandomMotionBlur(3, 35.0, 0.5, p=1.0),
        "jpeg": K.RandomJPEG(p=1.0),
        "affine": K.RandomAffine(30.0, p=1.0),
        "perspective": K.RandomPerspective(p=1.0),
    }
    images = torch.arange(2 * 3 * 40 * 30).mul(7).remainder(251).to(torch.uint8).view(2, 3, 40, 30)
    recipe = Augment(crop=RandomResizedCrop(24), ops=ops, normalize=Normalize(MEAN, STD))
    expected = recipe(images, seed=1)
    with torch.device("meta"):
        recipe = Augment(crop=RandomResizedCrop(24), ops=ops, normalize=Normalize(MEAN, STD))
        assert torch.equal(recipe(images, seed=1), expected)
