"""The fused backend equals Kornia: per operation over its whole range, on photographs and on adversarial images."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from common import threads
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from test_parameters import OPS, OWN
from torch import Tensor

import gpuaug
from gpuaug.augment.fused import backend as fused
from gpuaug.augment.fused import cuda_steps
from gpuaug.augment.fused.backend import FusedBackend
from gpuaug.augment.normalize import Normalize
from gpuaug.augment.ops.codes import ARGS, Code, Trait
from gpuaug.augment.parameters import Chosen
from gpuaug.augment.policy import OneOf, SomeOf, entry_of, prepare
from gpuaug.augment.reference import ReferenceBackend
from gpuaug.native import buffers as recycled

NORMALIZE = Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
POINT, SPACE = 2e-5, 2e-3  # normalised units: pointwise; with resampling or a convolution

# Forms of arguments beside those of OPS: whole ranges, and what the steps or kernels branch on.
FORMS: dict[str, Callable[[], Any]] = {
    "jitter": lambda: K.ColorJitter(0.9, 0.9, 0.9, 0.5, p=0.8),
    "jitter_fixed": lambda: K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8, order=(3, 2, 1, 0)),
    "jitter_partial": lambda: K.ColorJitter(0.4, 0.0, 0.4, 0.0, p=0.8),
    "jiggle": lambda: K.ColorJiggle(0.9, 0.9, 0.9, 0.5, p=0.8),
    "brightness": lambda: K.RandomBrightness((0.0, 2.0), p=0.8),
    "contrast": lambda: K.RandomContrast((0.0, 3.0), p=0.8),
    "saturation": lambda: K.RandomSaturation((0.0, 5.0), p=0.8),
    "hue": lambda: K.RandomHue((-0.5, 0.5), p=0.8),
    "gray_weights": lambda: K.RandomGrayscale(rgb_weights=torch.tensor([0.2, 0.9, 0.4]), p=0.5),
    "gamma": lambda: K.RandomGamma((0.05, 5.0), (0.2, 2.0), p=0.8),
    "erase": lambda: K.RandomErasing((0.02, 0.5), (0.3, 3.3), value=0.7, p=0.8),
    "noise": lambda: K.RandomGaussianNoise(0.1, 0.3, p=0.8),
    "erase_noise": lambda: gpuaug.RandomErasing(p=0.8, count=3),
    "erase_mean": lambda: gpuaug.RandomErasing(p=0.8, mode="const", count=2),
    "autocontrast_open": lambda: K.RandomAutoContrast(clip_output=False, p=0.8),
    "posterize": lambda: K.RandomPosterize((0, 8), p=0.9),
    "blur": lambda: K.RandomGaussianBlur(23, (0.1, 2.0), p=0.8),
    "blur_wide": lambda: K.RandomGaussianBlur((3, 5), (0.1, 9.0), border_type="replicate", p=0.8),
    "blur_zero": lambda: K.RandomGaussianBlur((5, 7), (0.1, 2.0), border_type="constant", p=0.8),
    "blur_circular": lambda: K.RandomGaussianBlur(5, (0.1, 2.0), border_type="circular", p=0.8),
    "boxblur": lambda: K.RandomBoxBlur((3, 7), p=0.8),
    "affine": lambda: K.RandomAffine(180.0, (0.5, 0.5), (0.3, 2.0), (-40.0, 40.0, -40.0, 40.0), p=0.8),
    "affine_border": lambda: K.RandomAffine(30.0, (0.2, 0.2), (0.5, 2.0), padding_mode="border", p=0.8),
    "affine_reflection": lambda: K.RandomAffine(30.0, (0.9, 0.9), (0.5, 2.0), padding_mode="reflection", p=0.8),
    "affine_reflection_corners": lambda: K.RandomAffine(
        30.0, (0.9, 0.9), (0.5, 2.0), padding_mode="reflection", align_corners=True, p=0.8
    ),
    "jpeg": lambda: K.RandomJPEG((10.0, 90.0), p=0.8),
    "perspective_far": lambda: K.RandomPerspective(1.0, p=0.8),
}


def codes_of(op: Any) -> list[Code] | None:
    """The steps of all alternatives of an operation; None if Kornia's module runs."""
    modules = [module for modules in prepare("x", op).slots for module in modules]
    steps = [entry.steps(module) if (entry := entry_of(module)) else None for module in modules]
    return None if None in steps else [code for each in steps for code in each.codes]


FIRST = {type(make()): (name, make) for name, make in reversed((OPS | OWN).items())}  # one form per class
ALL = {name: partial(make, p=0.7) for name, make in reversed(FIRST.values())} | FORMS
CODES = {name: codes for name, make in ALL.items() if (codes := codes_of(make())) is not None}


def having(*any_of: Trait) -> dict[str, Callable[[], Any]]:
    """The operations with a step that has one of these traits."""
    return {name: ALL[name] for name, codes in CODES.items() if any(t in c.traits for c in codes for t in any_of)}


KNOWN = {name: ALL[name] for name in CODES}
CODED = {"jpeg": KNOWN["jpeg"]}  # few blocks differ, but by much
JUMPS = {name: make for name, make in having(Trait.JUMPS).items() if name not in CODED}
SPATIAL = {name: make for name, make in KNOWN.items() if name not in having(Trait.POINTWISE, Trait.JUMPS)}
POINTWISE = {name: make for name, make in KNOWN.items() if name not in SPATIAL | JUMPS | CODED}
MEMBERS = {
    "warp": K.RandomAffine(20.0, (0.1, 0.1), p=1.0),
    "jitter": K.ColorJitter(0.3, 0.3, 0.3, 0.1, p=1.0),
    "noise": K.RandomGaussianNoise(p=1.0),
    "choice": OneOf(ops={"noise": K.RandomGaussianNoise(p=1.0), "blur": K.RandomGaussianBlur(5, (0.1, 2.0), p=1.0)}),
}
POLICIES = {
    "one_of": lambda: OneOf(
        ops={
            "gray": K.RandomGrayscale(p=1.0),
            "blur": K.RandomGaussianBlur(5, (0.1, 2.0), p=1.0),
            "s": JUMPS["solarize"](),
        }
    ),
    "one_of_noise": lambda: OneOf(
        ops={
            "noise": K.RandomGaussianNoise(p=1.0),
            "small": gpuaug.RandomErasing(p=1.0, scale=(0.02, 0.1)),
            "large": gpuaug.RandomErasing(p=1.0, scale=(0.3, 0.6)),
            "const": gpuaug.RandomErasing(p=1.0, mode="const"),
        }
    ),
    "some_of": lambda: SomeOf((1, 3), ops=MEMBERS, weights={"warp": 2}),
    "some_of_shuffled": lambda: SomeOf(2, ops=MEMBERS, random_order=True),
}
UNKNOWN = {"clahe": lambda: K.RandomClahe((1.0, 20.0), p=0.5), "median": lambda: K.RandomMedianBlur((3, 3), p=0.5)}


def draw(prepared: Any, batch: int, size: tuple[int, int], seed: int, extreme: bool = False) -> Chosen:
    random = np.random.default_rng(seed)
    u = random.random((batch, prepared.count), dtype=np.float32)
    if extreme:  # the ends of every range, and what lies between
        u = np.where(random.random(u.shape) < 0.4, random.integers(0, 2, u.shape) * np.float32(1 - 2**-24), u)
    keys = random.integers(0, 2**32, (batch, 2)) if prepared.keyed else None
    return prepared.draw(u.astype(np.float32), size, keys)


def rows_of(chosen: Chosen, at: np.ndarray) -> Chosen:
    """The choices and parameters of some samples."""
    params = tuple(tuple({k: v[at] for k, v in a.items()} for a in slot) for slot in chosen.params)
    keys, weights = (None if values is None else values[at] for values in (chosen.keys, chosen.weights))
    return Chosen(chosen.choice[at], params, keys, weights)


@cache
def photographs(size: int) -> Tensor:
    """uint8 [6, size, size, 3]: whole photographs, made smaller."""
    from PIL import Image
    from skimage import data

    folder = Path(data.__file__).parent
    names = ("astronaut.png", "coffee.png", "chelsea.png", "rocket.jpg", "color.png", "ihc.png")
    cut = [Image.open(folder / n).convert("RGB").resize((size, size)) for n in names]
    return torch.from_numpy(np.stack([np.asarray(image) for image in cut]))


def adversarial(height: int, width: int) -> Tensor:
    """uint8 [12, H, W, 3]: constant, single bright pixel, gray, saturated, two values, noise."""
    random = np.random.default_rng(5)
    images = np.zeros((12, height, width, 3), dtype=np.uint8)
    images[1] = 255
    images[2, height // 2, width // 2] = 255
    images[3] = random.integers(0, 256, (height, width, 1))  # gray
    images[4] = random.choice([0, 255], (height, width, 3))  # saturated
    images[5, ..., 0] = 255
    images[6, ..., 1:] = 255
    images[7] = random.integers(127, 129, (height, width, 3))
    images[8:] = random.integers(0, 256, (4, height, width, 3))
    images[9] //= 64
    images[10] |= 192
    return torch.from_numpy(images)


def compare(ops: dict[str, Any], images: Tensor, tolerance: float, *, seed: int = 0, jumps: bool = False) -> Tensor:
    prepared = [prepare(name, op) for name, op in ops.items()]
    size = (images.shape[1], images.shape[2])
    chosen = [draw(p, len(images), size, seed + k, extreme=seed % 2 == 1) for k, p in enumerate(prepared)]
    expected = ReferenceBackend(prepared, NORMALIZE)(images, chosen)
    found = FusedBackend(prepared, NORMALIZE)(images, chosen)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    difference = (found - expected).abs()
    if jumps:
        far = (difference > tolerance).float().mean().item()
        assert far <= 1e-4, f"{far:.1e} of the values differ, at most by {difference.max().item():.1e}"
    else:
        assert difference.max().item() <= tolerance, f"at most {difference.max().item():.1e}"
    return found


@pytest.mark.parametrize("name", KNOWN)
def test_an_operation_equals_kornia(name: str) -> None:
    tolerance = SPACE if name in SPATIAL else POINT
    for seed in range(2):
        jumps = name in JUMPS | CODED
        compare({name: KNOWN[name]()}, photographs(64).repeat(3, 1, 1, 1), tolerance, seed=seed, jumps=jumps)
        compare({name: KNOWN[name]()}, adversarial(33, 47), tolerance, seed=seed, jumps=jumps)


WARPS = {name for name, codes in CODES.items() if Code.WARP in codes}


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (5, 3), (1, 7)])
@pytest.mark.parametrize("name", [name for name in KNOWN if name in WARPS or name not in SPATIAL])
def test_odd_sizes(name: str, size: tuple[int, int]) -> None:
    tolerance = SPACE if name in WARPS else POINT
    for seed in range(2):
        compare({name: KNOWN[name]()}, adversarial(*size), tolerance, seed=seed, jumps=name in JUMPS | CODED)


@pytest.mark.parametrize("size", [(9, 1200), (1024, 3)])
def test_rows_longer_than_a_block(size: tuple[int, int]) -> None:
    names = ("hflip", "vflip", "jitter", "erase", "noise", "equalize", "blur", "rotation")
    for seed in range(2):
        compare(
            {n: KNOWN[n]() for n in names if n != "blur" or min(size) > 11},
            adversarial(*size),
            SPACE,
            seed=seed,
            jumps=True,
        )


def test_near_the_horizon_as_exact_as_kornia() -> None:
    """There float32 has few digits left: Kornia is up to 0.02 from float64, ours no further (and equals Kornia)."""
    prepared = prepare("op", K.RandomPerspective(0.95, p=1.0))
    images = adversarial(33, 47).repeat(4, 1, 1, 1)
    for seed in range(4):
        chosen = draw(prepared, len(images), (33, 47), seed, extreme=True)
        params = {k: torch.from_numpy(np.array(v)).double() for k, v in chosen.params[0][0].items()}
        exact = prepared.op(images.permute(0, 3, 1, 2).double() / 255, params=params)
        kornia = ReferenceBackend([prepared])(images, [chosen])
        assert (FusedBackend([prepared])(images, [chosen]) - exact).abs().max() <= 2 * (kornia - exact).abs().max()


@pytest.mark.parametrize(
    "first", ["hue", "jiggle", "saturation", "sharpness", "blur", "affine", "rotation", "perspective"]
)
@pytest.mark.parametrize("jump", JUMPS)
def test_what_jumps_later_jumps_at_the_same_pixels(first: str, jump: str) -> None:
    compare({first: KNOWN[first](), jump: JUMPS[jump]()}, photographs(64).repeat(2, 1, 1, 1), SPACE, jumps=True)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_equals_kornia(name: str) -> None:
    for seed in range(3):
        compare({name: POLICIES[name]()}, photographs(64).repeat(8, 1, 1, 1), SPACE, seed=seed, jumps=True)


UNSTEADY = {*JUMPS, "gamma", "autocontrast", "autocontrast_open"}  # a last bit before them may change any value
STEADY = sorted(KNOWN.keys() - CODED - UNSTEADY)


@settings(max_examples=25, deadline=None)
@given(
    first=st.sampled_from(sorted(KNOWN.keys() - CODED)),
    others=st.lists(st.sampled_from(STEADY), min_size=1, max_size=4, unique=True),
    seed=st.integers(0, 99),
)
def test_chains_equal_kornia(first: str, others: list[str], seed: int) -> None:
    names = {first, *others}
    tolerance = SPACE if names & SPATIAL.keys() else POINT * len(names)  # differences add up
    if names & {"autocontrast", "autocontrast_open", "gamma", "saturation"}:
        tolerance = SPACE  # they stretch small differences
    chain = {n: KNOWN[n]() for n in (first, *others)}
    compare(chain, photographs(64), tolerance, seed=seed, jumps=first in JUMPS)


def test_unknown_operations_run_through_kornia_between_fused_parts(caplog: pytest.LogCaptureFixture) -> None:
    ops = {
        "flip": K.RandomHorizontalFlip(),
        "clahe": UNKNOWN["clahe"](),
        "median": UNKNOWN["median"](),
        "jitter": K.ColorJitter(0.4, 0.4, 0.4, 0.1),
    }
    fused.say.cache_clear()
    with caplog.at_level(logging.INFO, logger="gpuaug"):
        for _ in range(2):
            compare(ops, photographs(64), POINT)
    assert [r.message for r in caplog.records if "through Kornia" in r.message] == [
        "`clahe` (RandomClahe) runs through Kornia: no fused form of RandomClahe with these settings",
        "`median` (RandomMedianBlur) runs through Kornia: no fused form of RandomMedianBlur with these settings",
    ]
    for op in (
        K.RandomMedianBlur((3, 3), p=0.5),
        K.RandomAffine(30.0, padding_mode="fill", fill_value=0.3, p=0.5),
        K.RandomContrast((0.5, 1.5), clip_output=False, p=0.5),
    ):
        assert FusedBackend([prepare("op", op)])._parts[0].columns is None
        compare({"op": op}, photographs(64), POINT)


@pytest.mark.parametrize("recipe", sorted(p.stem for p in (ROOT / "conf/gpuaug/augment").glob("*.yaml")))
def test_no_shipped_recipe_falls_back_and_all_equal_kornia(recipe: str) -> None:
    augment = gpuaug.build(gpuaug.compose("train", [f"augment={recipe}", "source.root=."]).augment).at(1)
    drawn = augment.draw(seed=3, epoch=1, indices=np.arange(6))
    images = [photographs(40)] * len(augment.views)
    found = augment.render(images, drawn)
    for one in {id(view.augment): view.augment for view in augment.views}.values():  # copies share theirs
        others = [part for part in one._executor._parts if part.columns is None]
        assert len(others) == (recipe == "pose_rtmpose")  # the median blur of a tenth of its images
        one._executor = ReferenceBackend(one.prepared, one.normalize)
    for x, y in zip(found, augment.render(images, drawn), strict=True):
        assert ((x - y).abs() > SPACE).float().mean() <= 1e-4


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_memory_formats(dtype: torch.dtype, channels_last: bool) -> None:
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    prepared = [
        prepare("jitter", K.ColorJitter(0.4, 0.4, 0.4, 0.1)),
        prepare("blur", K.RandomGaussianBlur(5, (0.1, 2.0))),
    ]
    images = photographs(65)
    chosen = [draw(p, len(images), (65, 65), k) for k, p in enumerate(prepared)]
    backend = FusedBackend(prepared, NORMALIZE)
    plain = backend(images, chosen)
    found = backend(images, chosen, dtype=dtype, memory_format=memory_format)
    assert found.dtype == dtype
    assert found.is_contiguous(memory_format=memory_format)
    assert torch.equal(found, plain.to(dtype))  # one cast, rounded as torch rounds


def test_nothing_chosen_and_no_operations() -> None:
    images = photographs(32)
    assert torch.equal(FusedBackend([])(images, []), images.permute(0, 3, 1, 2).float() / 255)
    prepared = [prepare("jitter", K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.0))]
    found = FusedBackend(prepared)(images, [draw(prepared[0], 6, (32, 32), 0)])
    assert torch.equal(found, images.permute(0, 3, 1, 2).float() / 255)
    assert FusedBackend(prepared)(images[:0], [draw(prepared[0], 0, (32, 32), 0)]).shape == (0, 3, 32, 32)


def test_input_is_left_alone_and_may_be_strided() -> None:
    prepared = [prepare("jitter", K.ColorJitter(0.4, 0.4, 0.4, 0.1))]
    images = photographs(48)
    before = images.clone()
    chosen = [draw(prepared[0], 6, (48, 48), 0)]
    backend = FusedBackend(prepared, NORMALIZE)
    planar = images.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)  # the same pixels in other memory
    assert torch.equal(backend(planar, chosen), backend(images, chosen))
    assert torch.equal(images, before)


def test_every_number_of_threads_gives_the_same() -> None:
    prepared = [prepare("policy", gpuaug.RandAugment(interpolation="bilinear"))]
    images = photographs(64)
    chosen = [draw(prepared[0], 6, (64, 64), 0)]
    backend, found = FusedBackend(prepared, NORMALIZE), []
    for count in (1, 2, 7):
        with threads(count):
            found.append(backend(images, chosen))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros((2, 8, 8, 3), dtype=torch.int16), torch.zeros((2, 8, 8, 3), dtype=torch.float64),
        torch.zeros((2, 2, 8, 8, 3)), torch.zeros((8, 8, 3)),
    ],
    ids=lambda x: f"{x.dtype} {list(x.shape)}",
)  # fmt: skip
def test_kernels_refuse_what_they_would_misread(x: Tensor) -> None:
    backend = FusedBackend([])
    runs = [backend, lambda x, _: backend._parts[0].run(x, [], fused.library(), fused._BETWEEN)]
    if find_spec("triton"):
        from gpuaug.augment.fused import cuda

        runs.append(lambda x, _: cuda.launch(x, None, dtype=torch.float32, channels_last=False))
    for run in runs:
        with pytest.raises(TypeError, match=r"expected .* but got torch\.\w+ \["):
            run(x, [])


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
def test_triton_kernels_refuse_a_program_of_other_channels() -> None:
    from gpuaug.augment.fused import cuda

    code, args, x = np.zeros((2, 1), np.int32), np.zeros((2, 1, ARGS), np.float32), torch.zeros((2, 8, 8, 4))
    program = cuda_steps.upload(code, args, np.zeros(1, np.float32), (1.0,), (0.0,), x.device)
    with pytest.raises(TypeError, match="expected a program of 4 samples, but got 2"):
        cuda.launch(x, program, dtype=torch.float32, channels_last=False)


def test_memory_of_a_batch_comes_back_when_nobody_holds_it() -> None:
    outputs = recycled.Outputs(most=5 << 20, age=3)
    shape = (1, 3, 512, 600)  # 3.5 MiB
    first = outputs.take(shape, torch.float32, False)
    where, part = first.data_ptr(), first[0, 1]
    assert outputs.take(shape, torch.float32, False).data_ptr() != where
    outputs._free.clear()
    del first
    assert not outputs._free  # a view still holds it
    as_numpy = part.numpy()
    del part
    assert not outputs._free
    del as_numpy
    again = outputs.take(shape, torch.bfloat16, True)
    assert again.is_contiguous(memory_format=torch.channels_last)
    assert again.data_ptr() != where  # half the size
    again = outputs.take(shape, torch.float32, False)
    assert again.is_contiguous()
    assert again.data_ptr() == where
    other = outputs.take(shape, torch.float32, False)
    del again, other
    assert len(outputs._free) == 3
    for _ in range(5):
        outputs.take((1, 3, 700, 700), torch.float32, False)
        assert sum(memory.numel() for _, memory in outputs._free) <= (5 << 20) + 12 * 700 * 700
    assert {memory.numel() for _, memory in outputs._free} == {12 * 700 * 700}  # the others grew old


def test_without_a_compiler_it_says_so_and_works(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    fused.library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="gpuaug"):
            for _ in range(2):
                compare({"jitter": POINTWISE["jitter"]()}, photographs(32), 0.0)  # through Kornia
        assert len([r for r in caplog.records if "no C++ compiler found" in r.message]) == 1
    finally:
        fused.library.cache_clear()


def test_a_triton_that_cannot_be_imported_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise OSError('GLIBCXX_3.4.99 not found')\n")
    code = (
        "import logging, torch\n"
        "from gpuaug.augment.fused import backend as fused\n"
        "logging.basicConfig()\n"
        "print([fused.triton_kernels(torch.device('cuda')) for _ in range(2)])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert done.stdout == "[None, None]\n", done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "operation by operation" in line]
    assert "GLIBCXX_3.4.99 not found" in line


IN_TORCH = [n for n in KNOWN if n not in having(Trait.KERNEL) and not {Code.WARP, Code.BLUR} & set(CODES[n])]


@pytest.mark.parametrize("name", IN_TORCH)
def test_the_steps_in_torch_give_the_pixels_of_the_cpu(name: str) -> None:
    """On CUDA torch runs these steps; here it runs them on the CPU."""
    prepared = prepare(name, KNOWN[name]())
    images, size = adversarial(33, 47), (33, 47)
    chosen = [draw(prepared, len(images), size, 3, extreme=True)]
    (part,) = fused._parts((prepared,))
    code, args = part.program(chosen, size, len(images))
    tables = part.tables(chosen, size, images.device)
    x = images.permute(0, 3, 1, 2) / 255
    for column in range(code.shape[1]):
        for group in cuda_steps.groups(code[:, column], args[:, column]):
            more = {"table": cuda_steps.table_of(group, column, tables), "ramps": torch.empty(0)}
            rows, a = torch.from_numpy(group.rows), torch.from_numpy(args[:, column])
            x = cuda_steps.run_step(group, x, a, rows, formulas=part.formulas, **more)
    assert code.any()
    far = (x - FusedBackend([prepared])(images, chosen)).abs() > 1e-5
    assert far.float().mean() <= (1e-4 if name in JUMPS | CODED else 0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("batch", [1, 3])
def test_parameters_that_all_samples_share_are_no_warning(batch: int) -> None:
    op = K.RandomAffine(10.0, p=1.0)
    found = gpuaug.Augment(ops={"affine": op})(torch.zeros((batch, 8, 9, 3), dtype=torch.uint8))
    assert found.shape == (batch, 3, 8, 9)


@pytest.mark.parametrize("backend", ["fused", "kornia"])
@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        *((name, 0.0) for name in ("noise", "autocontrast", "blur", "posterize", "equalize", "jitter", "erase")),
        ("sharpness", POINT),
        *((name, SPACE) for name in ("affine", "rotation", "perspective")),  # Kornia's matrices are exacter in float64
    ],
)
def test_the_default_dtype_of_torch_changes_nothing(name: str, tolerance: float, backend: Any) -> None:
    ops = {**POINTWISE, **JUMPS, **SPATIAL}

    def pixels() -> Tensor:
        recipe = gpuaug.Augment(ops={name: ops[name]()}, normalize=NORMALIZE, backend=backend)
        return recipe(photographs(32), seed=3)

    expected = pixels()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = pixels()
    finally:
        torch.set_default_dtype(before)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() <= tolerance
