"""The reference backend: Kornia's pixels, the same whatever samples share a batch: to the bit, on CUDA within 2e-6."""

from __future__ import annotations

import gc
import random
import re
import weakref
from collections.abc import Callable
from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import threads
from hypothesis import given, settings
from hypothesis import strategies as st
from test_parameters import OPS, OWN
from test_parameters import Own as Subclass
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gpuaug
from gpuaug.augment import reference
from gpuaug.augment.images import unit
from gpuaug.augment.normalize import Normalize
from gpuaug.augment.parameters import tensors
from gpuaug.augment.policy import OneOf, SomeOf, fields, prepare
from gpuaug.augment.recipe import Augment
from gpuaug.augment.reference import ReferenceBackend
from gpuaug.errors import ConfigError

SOME = {"a": K.ColorJitter(0.4, 0.4, 0.4, 0.1), "b": K.RandomGaussianNoise(p=0.7), "c": K.RandomJPEG()}
CHOICES = {
    "oneof": lambda **k: OneOf(ops=SOME),
    "someof": lambda **k: SomeOf((1, 3), ops=SOME, weights={"a": 2}),
    "someof shuffled": lambda **k: SomeOf(2, ops=SOME, random_order=True),
    "randaugment": lambda **k: gpuaug.RandAugment(interpolation="bilinear"),
    "timm": lambda **k: gpuaug.TimmAugment(interpolation="random"),
    "augmix": lambda **k: gpuaug.AugMix(),
    "distort": lambda **k: gpuaug.PhotometricDistort(),
    "distort mmseg": lambda **k: gpuaug.PhotometricDistort(style="mmseg"),
}
SEEDED = {
    "own brightness": lambda **k: Subclass((0.6, 1.4), **k),
}
ALL = OPS | OWN | CHOICES | SEEDED


def images(batch: int, size: tuple[int, int], seed: int = 0) -> Tensor:
    """Noise, a gradient, and a constant in turn: uint8 [B, H, W, 3]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (batch, *size, 3), dtype=torch.uint8, generator=generator)
    ramp = torch.linspace(0, 255, size[1]).round().to(torch.uint8)
    x[1::3] = ramp[None, None, :, None]
    x[2::3] = x[2::3, :1, :1]
    return x


def run(ops: dict[str, object], x: Tensor, indices: list[int]) -> Tensor:
    """Through a recipe, drawn as a loader draws."""
    recipe = Augment(ops=ops, backend="kornia")
    (y,) = recipe.render([x], recipe.draw(seed=5, epoch=2, indices=indices))
    return y


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=4, deadline=None)
@given(
    size=st.sampled_from([(8, 16), (17, 13), (37, 29), (64, 48)]),
    rows=st.lists(st.integers(0, 10), min_size=1, max_size=11, unique=True),
    count=st.sampled_from([1, 2]),
)
def test_pixels_do_not_depend_on_the_batch(name: str, size: tuple[int, int], rows: list[int], count: int) -> None:
    op, x = ALL[name](p=0.7), images(11, size)
    with threads(count):
        whole = run({name: op}, x, list(range(11)))
        assert torch.equal(run({name: op}, x[rows], rows), whole[rows])


LARGE = ("jitter", "elastic", "jpeg", "noise", "blur", "affine all")


@pytest.mark.parametrize("name", LARGE)
def test_pixels_do_not_depend_on_the_batch_where_torch_splits_one_image_over_threads(name: str) -> None:
    x = images(5, (224, 224))
    op = ALL[name](p=0.8)
    whole = run({name: op}, x, list(range(5)))
    for rows in ([0], [3], [4, 1], [2, 4, 0]):
        assert torch.equal(run({name: op}, x[rows], rows), whole[rows])


@pytest.mark.parametrize("name", sorted(OPS.keys() - {"jitter", "jiggle"}))  # an order per sample: see the next test
def test_the_pixels_are_kornias(name: str) -> None:
    """Kornia's module as given, with our parameters and our gate, on the whole batch; JPEG artefacts image by image."""
    op = OPS[name](p=0.6)
    prepared = prepare(name, op)
    x = images(9, (40, 32))
    u = np.random.default_rng(1).random((9, prepared.count), dtype=np.float32)
    keys = np.arange(18, dtype=np.int64).reshape(9, 2) if prepared.keyed else None
    chosen = prepared.draw(u, (40, 32), keys)
    got = ReferenceBackend([prepared])(x, [chosen])
    params = tensors(chosen.params[0][0], np.arange(9))
    if keys is not None:
        key = torch.from_numpy(keys)
        params |= fields(op, params, key, (40, 32))
    params["batch_prob"] = torch.from_numpy((chosen.choice[:, 0] >= 0).astype(np.float32))
    assert 0 < params["batch_prob"].sum() < 9
    rows = [slice(k, k + 1) for k in range(9)] if name in ("jpeg", "boxblur") else [slice(9)]
    want = torch.cat([op(unit(x[own]), params={k: v[own] for k, v in params.items()}) for own in rows])
    # torch rounds `pow` otherwise at the end of a stretch of memory, so gamma has no bits of its own
    assert torch.allclose(got, want, rtol=0, atol=2e-7 if name == "gamma" else 0)


@pytest.mark.parametrize("kind", [K.ColorJitter, K.ColorJiggle])
def test_a_jitters_pixels_are_kornias_for_each_order(kind: type) -> None:
    op = kind(0.4, 0.4, 0.4, 0.2, p=1.0)
    prepared = prepare("jitter", op)
    x = images(60, (30, 22))
    u = np.random.default_rng(1).random((60, prepared.count), dtype=np.float32)
    chosen = prepared.draw(u, (30, 22))
    got = ReferenceBackend([prepared])(x, [chosen])
    for row in range(60):
        params = tensors(chosen.params[0][0], np.array([row, row]))
        params |= {"order": torch.from_numpy(chosen.choice[row]), "batch_prob": torch.ones(2)}
        assert torch.equal(op(unit(x[[row, row]]), params=params)[0], got[row])


@pytest.mark.parametrize("name", sorted(ALL.keys() - CHOICES.keys()))
def test_nothing_happens_where_all_gates_are_closed(name: str) -> None:
    x = images(3, (16, 16))
    assert torch.equal(run({name: ALL[name](p=0.0)}, x, [0, 1, 2]), unit(x))


@pytest.mark.parametrize("name", ALL)
def test_an_empty_batch(name: str) -> None:
    assert run({name: ALL[name](p=0.9)}, images(0, (12, 9)), []).shape == (0, 3, 12, 9)


# They refuse images smaller than their kernels.
KERNELS = {"elastic", "blur", "blur joint", "sharpness", "boxblur", "medianblur", "clahe", "motion", "rain"}


@pytest.mark.parametrize("name", sorted(ALL.keys() - KERNELS))
@pytest.mark.parametrize("size", [(1, 1), (3, 5), (1, 40)])
def test_images_of_a_few_pixels(name: str, size: tuple[int, int]) -> None:
    x = images(5, size)
    whole = run({name: ALL[name](p=0.9)}, x, list(range(5)))
    for row in range(5):
        assert torch.equal(run({name: ALL[name](p=0.9)}, x[row : row + 1], [row])[0], whole[row])


@pytest.mark.parametrize("name", ALL)
def test_no_global_generator_is_read_or_moved(name: str) -> None:
    x = images(4, (16, 16))
    outcomes = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
        outcomes.append(run({name: ALL[name](p=0.7)}, x, [0, 1, 2, 3]))
        assert torch.equal(torch.get_rng_state(), states[0])
        assert (np.random.get_state()[1] == states[1]).all()
        assert random.getstate() == states[2]
    assert torch.equal(*outcomes)


class Dice(nn.Module):
    """Draws from all three global generators."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(()) + np.random.rand() * random.random()


def test_a_seeded_operation_differs_per_sample_and_repeats() -> None:
    x = images(1, (6, 6)).expand(5, -1, -1, -1)
    a = run({"dice": Dice()}, x, [0, 1, 2, 3, 4])
    assert len(torch.unique(a.flatten(1), dim=0)) == 5
    assert torch.equal(run({"dice": Dice()}, x[:2], [3, 1]), a[[3, 1]])


def test_the_generators_are_restored_when_a_seeded_operation_fails() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.rand(())
            random.random()
            raise KeyError("broken")

    states = torch.get_rng_state(), random.getstate()
    with pytest.raises(KeyError) as caught:
        run({"bad": Broken()}, images(2, (4, 4)), [0, 1])
    assert "`bad`" in caught.value.__notes__[0]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


@pytest.mark.parametrize("module", [nn.AvgPool2d(2), nn.Flatten()])
def test_a_seeded_operation_that_changes_the_shape_is_refused(module: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"`ops\.pool`.*`crop`"):
        run({"pool": module}, images(2, (4, 4)), [0, 1])


class Own(nn.Module):
    """Draws from a generator of its own, by a chance of 0.1 from the global one."""

    def __init__(self, p: float = 1.0) -> None:
        super().__init__()
        self.p, self.generator = p, torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand((), generator=self.generator) if torch.rand(()) < self.p else x


class Does(nn.Module):
    """Any function of an image; counts its calls."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        calls.append(tuple(x.shape))
        return self.function(x)


calls: list[tuple[int, ...]] = []


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Those about pixels, without the one that says how such an operation is run."""
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    return [message for message in said if "runs one image at a time" not in message]


@pytest.mark.parametrize("backend", ["fused", "kornia"])
def test_rain_that_is_larger_than_the_image_is_refused(backend: str) -> None:
    for op in (K.RandomRain((1, 2), (1, 9), (0, 0), p=1.0), K.RandomRain((1, 2), (1, 2), (-8, 0), p=1.0)):
        with pytest.raises(ConfigError, match=r"smaller than the image.*Found: up to"):
            Augment(ops={"rain": op}, backend=backend)(images(4, (9, 8)), indices=range(4))


@pytest.mark.parametrize("backend", ["fused", "kornia"])
@pytest.mark.parametrize(("name", "p"), [("own", 1.0), ("own rare", 0.1)])
def test_an_operation_that_does_not_repeat_is_named_once(
    name: str, p: float, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    key, op = f"{name} {backend}", Own(p)
    x = images(40, (9, 8))
    for ops in (
        {"before": K.RandomInvert(), key: op, "after": K.RandomInvert()},
        {key: op, "later": Does(torch.clone)},
    ):
        recipe = Augment(ops=ops, backend=backend)
        for epoch in range(4):
            recipe(x, epoch=epoch, indices=range(40))
    (message,) = warnings(caplog)
    assert re.search(rf"`ops\.{key}` \(Own\) .*same sample, .*global generators", message)


def test_an_operation_that_repeats_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    good = {
        "dice": Dice(),
        "in place": Does(lambda x: x.mul_(torch.rand(()))),
        "half": Does(lambda x: x.half()),
        "nan": Does(lambda x: torch.where(x > 0.9, torch.nan, x)),
        **{name: make() for name, make in SEEDED.items()},
    }
    for name, op in good.items():
        recipe = Augment(ops={name: op}, backend="kornia")
        made = [recipe(images(20, (40, 30)), indices=range(20)) for _ in range(4)]  # the first three are checked
        assert all(torch.equal(y.nan_to_num(9), made[3].nan_to_num(9)) for y in made)
    assert not warnings(caplog)


def test_operations_are_run_twice_on_some_samples_of_the_first_batches_only() -> None:
    recipe = Augment(ops={"does": Does(torch.clone)}, backend="kornia")
    counts = []
    for _ in range(5):
        calls.clear()
        recipe(images(20, (6, 6)), indices=range(20))
        counts.append(len(calls))
    assert counts == [28, 28, 28, 20, 20]


class Batched(nn.Module):
    """Any function of a batch and its random numbers."""

    affects = "pixels"

    def __init__(self, uniforms: Any, function: Any) -> None:
        super().__init__()
        self.uniforms, self.function = uniforms, function

    def forward(self, x: Tensor, *u: Tensor) -> Tensor:
        calls.append(tuple(x.shape))
        return self.function(x, *u)


def _dimmed(x: Tensor, u: Tensor) -> Tensor:
    return x.mul_(u[:, 0, None, None, None]) + 0.1 * u[:, 1, None, None, None]


@pytest.mark.parametrize("backend", ["fused", "kornia"])
def test_a_users_module_with_uniforms_runs_on_whole_batches(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    ops = {"dim": Batched(2, _dimmed), "square": Batched(0, torch.square), "flip": K.RandomHorizontalFlip()}
    recipe, x = Augment(ops=ops, backend=backend), images(20, (8, 7))
    assert not recipe.main_thread
    calls.clear()
    made = [recipe(x, seed=3, indices=range(20)) for _ in range(4)]  # the first three are checked
    assert [shape[0] for shape in calls] == [20, 8, 20, 8] * 3 + [20, 20]
    assert all(torch.equal(y, made[3]) for y in made)
    assert len(torch.unique(recipe(x[:1].expand(9, -1, -1, -1), indices=range(9)).flatten(1), dim=0)) == 9
    for own in ([4], [7, 2, 11]):
        assert torch.equal(recipe(x[own], seed=3, indices=own), made[0][own])
    u = recipe.draw(seed=3, epoch=0, indices=range(20)).uniforms["", 0, "dim"]
    want = torch.square(_dimmed(unit(x), torch.from_numpy(u.copy())))
    flipped = recipe.draw(seed=3, epoch=0, indices=range(20)).uniforms["", 0, "flip"][:, 0] < 0.5
    assert torch.equal(made[0], torch.where(torch.from_numpy(flipped)[:, None, None, None], want.flip(3), want))
    one = Augment(
        ops={"one": OneOf(ops={"dim": Batched(2, _dimmed), "gray": K.RandomGrayscale(p=1.0)})}, backend=backend
    )
    assert torch.equal(one(x[5:6], indices=[5])[0], one(x, indices=range(20))[5])
    assert not warnings(caplog)


def test_a_module_that_mixes_samples_or_draws_by_itself_is_named(caplog: pytest.LogCaptureFixture) -> None:
    bad = {"mean": lambda x: x - x.mean(), "own": lambda x: x * torch.rand(len(x), 1, 1, 1)}
    for name, function in bad.items():
        Augment(ops={name: Batched(0, function)})(images(20, (6, 6)), indices=range(20))
    messages = warnings(caplog)
    assert [m.split()[0] for m in messages] == ["`ops.mean`", "`ops.own`"]
    assert all("other samples" in m for m in messages)
    with pytest.raises(ConfigError, match=r"`ops\.pool`.*`crop`"):
        run({"pool": Batched(0, nn.AvgPool2d(2))}, images(2, (4, 4)), [0, 1])
    for count in (-1, 1.5, "2"):
        with pytest.raises(ConfigError, match=r"augment\.ops\.x\.uniforms"):
            prepare("x", Batched(count, torch.square))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.complex64])
def test_an_operation_that_gives_no_floats_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=rf"`ops\.bytes`.*floats.*{dtype}"):
        run({"bytes": Does(lambda x: x.to(dtype))}, images(2, (4, 4)), [0, 1])


def test_modules_keep_nothing_of_a_batch_and_the_given_ones_nothing_at_all() -> None:
    op = K.RandomGaussianNoise(p=1.0)
    warp = K.RandomAffine(20.0, p=1.0)
    prepared = [prepare("noise", op), prepare("warp", warp), prepare("flip", K.RandomHorizontalFlip(p=1.0))]
    x = images(3, (8, 8))
    u, keys = np.full((3, 9), 0.3, dtype=np.float32), np.zeros((3, 2), np.int64)
    chosen = [p.draw(u[:, : p.count], (8, 8), keys if p.keyed else None) for p in prepared]
    inputs = weakref.ref(x)
    ReferenceBackend(prepared)(x, chosen)
    for p in prepared:
        module = p.slots[0][0]
        assert module._params == {}
        assert getattr(module, "_transform_matrix", None) is None
        assert getattr(module, "_lazy_matrix_args", None) is None
        assert p.op._params == {}
    del x
    gc.collect()
    assert inputs() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("batch", [0, 3])
def test_arithmetic_in_float32_and_one_cast(dtype: torch.dtype, memory_format: torch.memory_format, batch: int) -> None:
    x = images(batch, (10, 8))
    normalize = Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    full = ReferenceBackend([], normalize)(x, [])
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)))
    assert torch.equal(full, (x.permute(0, 3, 1, 2).float() / 255 - mean) / std)
    y = ReferenceBackend([], normalize)(x, [], dtype=dtype, memory_format=memory_format)
    assert y.dtype == dtype
    assert y.is_contiguous(memory_format=memory_format)
    assert torch.equal(y, full.to(dtype))


def test_autocast_of_the_caller_changes_nothing() -> None:
    ops = {"affine": K.RandomAffine(20.0, p=1.0), "blur": K.RandomGaussianBlur(5, (1.0, 2.0), p=1.0)}
    x = images(4, (20, 20))
    want = run(ops, x, [0, 1, 2, 3])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(ops, x, [0, 1, 2, 3])
    assert torch.equal(got, want)


def test_the_images_given_are_not_written_to() -> None:
    x = images(4, (20, 20))
    copy = x.clone()
    run({"flip": K.RandomHorizontalFlip(p=1.0), "invert": K.RandomInvert(p=0.5)}, x, [0, 1, 2, 3])
    assert torch.equal(x, copy)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ALL)
def test_on_a_gpu_pixels_do_not_depend_on_the_batch_and_agree_with_the_cpu(name: str) -> None:
    x = images(11, (96, 80))
    recipe = Augment(ops={name: ALL[name](p=0.7)}, backend="kornia")

    def on(x: Tensor, rows: list[int]) -> Tensor:
        (y,) = recipe.render([x], recipe.draw(seed=5, epoch=2, indices=rows))
        return y

    state = torch.cuda.get_rng_state()
    whole = on(x.cuda(), list(range(11)))
    for rows in ([0], [3], [5, 1], [2, 4, 0, 10, 7]):
        assert (on(x[rows].cuda(), rows) - whole[rows]).abs().max() <= 2e-6
    assert torch.equal(torch.cuda.get_rng_state(), state)
    if not recipe.main_thread:  # a generator of the device draws other values than the CPU's
        # a value next to a threshold (posterize, solarize, equalize, an edge of a warp) may fall on its other side
        assert (whole.cpu() - on(x, list(range(11)))).abs().gt(1e-3).float().mean() < 2e-3


class Products(TorchDispatchMode):
    """Cuts the float32 factors of all products to the 10 bits of TF32, as a GPU may, and collects their dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(word in func.__name__ for word in ("mm.", "bmm", "convolution", "addmm", "linear.", "dot.")):
            self.dtypes += [a.dtype for a in args if isinstance(a, Tensor)]
            args = tuple(
                (a.contiguous().view(torch.int32) & -0x2000).view(torch.float32)
                if isinstance(a, Tensor) and a.dtype == torch.float32 and a.ndim > 1  # no bias
                else a
                for a in args
            )
        return func(*args, **(kwargs or {}))


MULTIPLIES = {"boxblur", "jpeg", "affine all", "blur", "perspective", "rotation", "shear", "translate"}


@pytest.mark.parametrize("name", ALL)
def test_products_that_tf32_shortens_keep_their_precision(name: str) -> None:
    """What an image on CUDA goes through, here on the CPU: the pixels agree."""
    x = images(5, (24, 20))
    expected = run({name: ALL[name](p=0.9)}, x, list(range(5)))
    with reference._SplitProducts(), Products() as products:
        found = run({name: ALL[name](p=0.9)}, x, list(range(5)))
    assert found.dtype == torch.float32
    assert (found - expected).abs().gt(1e-4).float().mean() <= 2e-3  # a value next to a threshold or an edge
    assert name not in MULTIPLIES or products.dtypes


def test_three_products_are_as_exact_as_float32() -> None:
    """Of factors that TF32 shortens; each form in which a product is written."""
    made = torch.Generator().manual_seed(0)
    x, w, bias = (torch.randn(size, generator=made) for size in ((4, 3, 20, 20), (5, 3, 5, 5), (5,)))
    a, b = (torch.randn(2, 64, 64, generator=made) for _ in range(2))
    forms: list[Callable[[Any], Tensor]] = [
        lambda to: F.conv2d(to(x), to(w), to(bias)),
        lambda to: F.conv2d(to(x), to(w), bias=to(bias), stride=2),
        lambda to: F.linear(to(a), to(b[0]), to(b[1, 0])),
        lambda to: to(a) @ to(b),
        lambda to: torch.einsum("bij,bjk->bik", to(a), to(b)),
        lambda to: torch.tensordot(to(a), to(b), dims=([1, 2], [2, 1])),
    ]
    for number, form in enumerate(forms):
        exact = form(lambda v: v.double())
        with Products():
            shortened = form(lambda v: v)
        with reference._SplitProducts(), Products():
            found = form(lambda v: v)
        size = form(lambda v: v.double().abs())  # the sum of the absolute products
        assert found.dtype == torch.float32
        assert ((found - exact).abs() <= 2**-21 * size).all(), number
        assert ((shortened - exact).abs() > 2**-16 * size).any(), number


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["fused", "kornia"])
@pytest.mark.parametrize("name", ["medianblur", "jpeg", "affine all", "perspective", "blur"])
def test_tf32_of_the_user_reaches_no_pixel(name: str, backend: str) -> None:
    x = images(5, (96, 80)).cuda()
    augment = Augment(ops={name: ALL[name](p=0.9)}, backend=backend)
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    found = []
    try:
        for allowed in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
            found.append(augment(x, seed=5, indices=range(5)))
            assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == allowed
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    assert (found[0] - found[1]).abs().max() <= 1e-4


@pytest.mark.parametrize("backend", ["fused", "kornia"])
@pytest.mark.parametrize(
    ("op", "side"),
    [
        (K.RandomSharpness(0.5, p=1.0), 1),
        (K.RandomGaussianBlur((9, 9), (0.1, 2.0), p=1.0), 2),
        (K.RandomBoxBlur((5, 5), p=1.0), 2),
        (K.RandomMotionBlur(5, 9.0, 0.0, "reflect", p=1.0), 2),
        (K.RandomMedianBlur((9, 9), p=1.0), 1),
        (K.RandomClahe(p=1.0), 1),
    ],
)
def test_images_too_small_for_an_operation_are_named(backend: str, op: Any, side: int) -> None:
    augment = Augment(ops={"small": op}, backend=backend)
    images = torch.zeros(2, side, side + 2, 3, dtype=torch.uint8)
    with pytest.raises(ConfigError, match=f"{type(op).__name__}.*{side + 2} x {side} "):
        augment(images, seed=0, indices=[0, 1])


@pytest.mark.parametrize("size", [float("nan"), [], "", "abc", {}, [1, 2, 3], (3,), 0, -1, 0.5, None, 2, True, (3, 4)])
def test_a_kernel_has_a_middle(size: Any) -> None:
    blur = K.RandomGaussianBlur(kernel_size=size, sigma=(0.1, 2.0))
    with pytest.raises(ConfigError, match="blur.kernel_size`.* odd"):
        Augment(ops={"blur": blur})
