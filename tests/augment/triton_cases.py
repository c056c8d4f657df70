"""The CUDA kernels equal the reference, whatever the program; run by test_cuda.py in a process of its own."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import test_cut
import test_mosaic
import torch
import triton
import triton.language as tl
from test_fused import (
    JUMPS,
    KNOWN,
    NORMALIZE,
    POINT,
    POINTWISE,
    POLICIES,
    SPACE,
    SPATIAL,
    adversarial,
    draw,
    photographs,
)
from test_pillow import FILL, MAGNITUDES, drawn, pictures, pillows, to_levels

import gpuaug
from gpuaug.augment import cut as cuts
from gpuaug.augment.fused import backend as fused
from gpuaug.augment.fused import cuda, cuda_kernels, cuda_pillow, cuda_steps
from gpuaug.augment.gather import gather
from gpuaug.augment.normalize import Normalize
from gpuaug.augment.ops.pillow import INTERPOLATIONS, PillowOp
from gpuaug.augment.policy import prepare
from gpuaug.augment.reference import ReferenceBackend
from gpuaug.augment.sharing import Rows
from gpuaug.random import keyed as draws

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


# --- Triton's interpreter knows no PTX, and rounds twice where a GPU rounds once


@triton.jit
def _unit(x):  # type: ignore[no-untyped-def]
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def _reciprocal(x):  # type: ignore[no-untyped-def]
    return 1.0 / x


@triton.jit
def _cos(x):  # type: ignore[no-untyped-def]
    return tl.cos(x)


@triton.jit
def _sin(x):  # type: ignore[no-untyped-def]
    return tl.sin(x)


@triton.jit
def _product(x, y):  # type: ignore[no-untyped-def]
    return x * y


@triton.jit
def _product64(x, y):  # type: ignore[no-untyped-def]
    return x * y


@triton.jit
def _value(bits):  # type: ignore[no-untyped-def]
    return cuda_kernels.over_255(bits - 8388608.0)


if not isinstance(cuda_kernels.over_255, triton.JITFunction):
    for kernel in (_unit, _reciprocal, _cos, _sin, _product, _product64, _value):
        for module in (cuda_kernels, cuda_pillow):
            setattr(module, kernel.__name__, kernel)


def _call(function: Any, *args: Any, **options: Any) -> Any:
    """Calls a function of the kernels without the interpreter's patches, which the kernel's own call has made already.

    They take 60 % of the time. Triton's own functions need them, because they use other modules.
    """
    ours = function.fn.__module__ in (cuda_kernels.__name__, cuda_pillow.__name__)
    return function.rewrite()(*args, **options) if ours else _patched_call(function, *args, **options)


if not isinstance(cuda_kernels.over_255, triton.JITFunction):
    _patched_call = type(_unit).__call__
    type(_unit).__call__ = _call


def run(
    ops: dict[str, Any], images: torch.Tensor, seed: int = 0, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    images = images[::2] if DEVICE.type == "cpu" else images  # the interpreter takes seconds
    prepared = [prepare(name, op) for name, op in ops.items()]
    size = (images.shape[1], images.shape[2])
    chosen = [draw(p, len(images), size, seed + k, extreme=seed % 2 == 1) for k, p in enumerate(prepared)]
    (part,) = fused._parts(tuple(prepared))
    assert part.columns is not None
    code, args = part.program(chosen, size, len(images))
    scale, shift = fused._affine(NORMALIZE)
    found = cuda.launch(
        images.to(DEVICE),
        cuda_steps.upload(code, args, fused.warp_ramps(size), scale, shift, DEVICE),
        tables=part.tables(chosen, size, DEVICE, cuda.normal_field),
        **{"dtype": torch.float32, "channels_last": False, **options},
    )
    return found.cpu(), ReferenceBackend(prepared, NORMALIZE)(images, chosen), cuda_steps.stretches(code, args)


def far(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> float:
    return ((found - expected).abs() > tolerance).float().mean().item()


@pytest.mark.parametrize("name", KNOWN)
def test_an_operation_equals_kornia(name: str) -> None:
    images = photographs(24) if name in SPATIAL else adversarial(21, 23)
    found, expected, _ = run({name: KNOWN[name]()}, images, seed=1)
    assert far(found, expected, SPACE if name in SPATIAL else POINT) <= (1e-4 if name in JUMPS else 0)


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (30, 43)])
def test_chains_of_colours_are_one_stretch(size: tuple[int, int]) -> None:
    ops = {k: POINTWISE[k]() for k in ("vflip", "hflip", "jitter", "gray")}
    found, expected, stretches = run(ops, adversarial(*size))
    assert [(s.first, s.last, s.contrast, s.rest) for s in stretches] == [(0, 7, True, [])]
    assert far(found, expected, POINT) == 0


def test_a_blur_is_one_more_kernel() -> None:
    ops = {"hflip": POINTWISE["hflip"](), "jitter": POINTWISE["jitter"](), "blur": SPATIAL["blur_wide"]()}
    found, expected, stretches = run(ops, photographs(24))
    assert [len(s.rest) for s in stretches] == [1]
    assert far(found, expected, SPACE) == 0
    solarized = {**ops, "solarize": K.RandomSolarize(0.4, 0.0, p=0.5), "flip": K.RandomVerticalFlip()}
    found, expected, stretches = run(solarized, photographs(24))
    assert len(stretches) == 2
    assert far(found, expected, SPACE) <= 1e-4


@pytest.mark.parametrize(
    ("size", "kernel", "border"),
    [
        ((1, 40), (3, 41), "replicate"),
        ((70, 1), (31, 1), "circular"),
        ((12, 40), (23, 79), "reflect"),
        ((1, 1), (41, 3), "constant"),
    ],
)
def test_a_blur_of_any_size(size: tuple[int, int], kernel: tuple[int, int], border: str) -> None:
    """The kernel may be larger than the image and than a tile."""
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (1, *size, 3), dtype=np.uint8))
    found, expected, _ = run({"blur": K.RandomGaussianBlur(kernel, (0.01, 20.0), border_type=border, p=1.0)}, images)
    assert far(found, expected, POINT) == 0


BOXES = {"pixel": (0.02, 0.04), "const": (0.5, 0.6)}
FIRST = {
    "flip": K.RandomHorizontalFlip(),
    "invert": K.RandomInvert(torch.tensor(3.0), p=0.5),
    "gray": K.RandomGrayscale(torch.tensor([2.0, 0.0, 1.0]), p=0.5),
}


@pytest.mark.parametrize("name", FIRST)
def test_a_blur_of_16_bits(name: str) -> None:
    """Colours in 0..1 come to the blur in 16 bits, others in float32."""
    ops = {name: FIRST[name], "blur": SPATIAL["blur_wide"]()}
    found, expected, _ = run(ops, photographs(24)[:4].repeat_interleave(2, dim=0), dtype=torch.float16)
    assert (expected.max() > 4.0) == (name != "flip")  # white is 2.7
    assert torch.allclose(found.float(), expected, rtol=2**-11, atol=5e-5)


def test_what_must_not_share_a_kernel() -> None:
    ops = {"a": K.ColorJitter(contrast=0.9, p=1.0), "b": K.ColorJitter(contrast=0.9, p=1.0)}  # two means
    found, expected, stretches = run(ops, photographs(24))
    assert len(stretches) == 2
    assert far(found, expected, POINT) == 0
    erased = {"erase": K.RandomErasing(value=0.5, p=1.0), "flip": K.RandomHorizontalFlip(p=0.5)}
    found, expected, stretches = run(erased, photographs(24))
    assert len(stretches) == 2
    assert far(found, expected, POINT) == 0


def test_a_box_without_noise_may_be_larger_than_those_with() -> None:
    boxes = {mode: gpuaug.RandomErasing(p=1.0, mode=mode, scale=scale) for mode, scale in BOXES.items()}
    images = photographs(24).repeat(3, 1, 1, 1)
    found, expected, _ = run({"erase": gpuaug.OneOf(ops=boxes)}, images)
    assert far(found, expected, SPACE) == 0


@pytest.mark.parametrize("name", MAGNITUDES)
def test_an_operation_with_pillows_arithmetic(name: str) -> None:
    """After another one, and on some of the samples."""
    magnitudes = np.resize(np.float32(MAGNITUDES[name]), 9)
    images = torch.from_numpy(np.concatenate([pictures(17, 23)] * 2))[:9]
    taken = np.arange(9) != 4
    for how in INTERPOLATIONS if name == "rotate" else ("bilinear",):
        ops = [(PillowOp("invert"), 0, True), (PillowOp(name, interpolation=how, fill=FILL), magnitudes, taken)]
        prepared, chosen = drawn(ops, len(images))
        (part,) = fused._parts(tuple(prepared))
        assert part.columns is not None
        code, args = part.program(chosen, (17, 23), len(images))
        program = cuda_steps.upload(code, args, np.zeros(1, dtype=np.float32), (1.0,) * 3, (0.0,) * 3, DEVICE)
        found = cuda.launch(images.to(DEVICE), program, dtype=torch.float32, channels_last=False)
        assert torch.equal(found.cpu(), ReferenceBackend(prepared)(images, chosen))


@pytest.mark.parametrize("how", INTERPOLATIONS)
@pytest.mark.parametrize("name", ["shear_x", "translate_y", "rotate"])
def test_pixels_move_as_pillows(name: str, how: str) -> None:
    """By tiny, random, round and far too large distances."""
    random = np.random.default_rng(0)
    for size in ((1, 1), (170, 3), (16, 31)):
        images = random.integers(0, 256, (9, *size, 3), dtype=np.uint8)
        images[:4] = pictures(*size)[:4]
        magnitudes = (random.uniform(-1, 1, 9) * {"s": 0.5, "t": size[0], "r": 180.0}[name[0]]).astype(np.float32)
        magnitudes[3:9] = (1e-7 * magnitudes[3], 1e-14, 1e5, 0.09, 4.5, 45)
        prepared, chosen = drawn([(PillowOp(name, interpolation=how, fill=FILL), magnitudes, True)], 9)
        code, args = fused._parts(tuple(prepared))[0].program(chosen, size, 9)
        program = cuda_steps.upload(code, args, np.zeros(1, dtype=np.float32), (1.0,) * 3, (0.0,) * 3, DEVICE)
        on_device = torch.from_numpy(images).to(DEVICE)
        found = to_levels(cuda.launch(on_device, program, dtype=torch.float32, channels_last=False).cpu())
        for row, image in enumerate(images):
            assert np.array_equal(found[row], pillows(name, image, magnitudes[row], how)), (size, magnitudes[row])


@pytest.mark.skipif(DEVICE.type == "cuda", reason="counts calls inside the interpreter")
@pytest.mark.parametrize(
    ("name", "how", "magnitude", "blocks"),
    [
        ("shear_x", "bilinear", 0.09, 0),
        ("shear_y", "bilinear", -0.27, 0),
        ("rotate", "bilinear", 9, 0),
        ("rotate", "bicubic", 90, 0),
        ("translate_x", "bicubic", 4.5, 8),  # many results are whole levels
    ],
)
def test_few_blocks_take_float64(
    name: str, how: str, magnitude: float, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, position = [], cuda_pillow._position64
    monkeypatch.setattr(cuda_pillow, "_position64", lambda *args: calls.append(1) or position(*args))
    prepared, chosen = drawn([(PillowOp(name, interpolation=how), magnitude, True)], 1)
    code, args = fused._parts(tuple(prepared))[0].program(chosen, (64, 64), 1)
    program = cuda_steps.upload(code, args, np.zeros(1, dtype=np.float32), (1.0,) * 3, (0.0,) * 3, DEVICE)
    cuda.launch(photographs(64)[:1], program, dtype=torch.float32, channels_last=False)
    assert len(calls) == 2 * blocks  # of 8; a call per axis


def test_interpolations_share_a_kernel() -> None:
    images = torch.from_numpy(np.concatenate([pictures(17, 23)] * 2))[:9]
    programs, expected = [], []
    for how in INTERPOLATIONS:
        prepared, chosen = drawn([(PillowOp("rotate", interpolation=how), 20, True)], len(images))
        programs.append(fused._parts(tuple(prepared))[0].program(chosen, (17, 23), len(images)))
        expected.append(ReferenceBackend(prepared)(images, chosen))
    code, args = programs[0][0], np.stack([program[1] for program in programs])[np.arange(9) % 3, np.arange(9)]
    program = cuda_steps.upload(code, args, np.zeros(1, dtype=np.float32), (1.0,) * 3, (0.0,) * 3, DEVICE)
    assert [len(s.rest) for s in program.stretches] == [3]
    found = cuda.launch(images.to(DEVICE), program, dtype=torch.float32, channels_last=False)
    assert torch.equal(found.cpu(), torch.stack(expected)[torch.arange(9) % 3, torch.arange(9)])
    last = cuda.launch(images.to(DEVICE), program, dtype=torch.float32, channels_last=True)
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(last, found)


def of_any_type(dtype: torch.dtype, channels: int) -> torch.Tensor:
    """[3, 10, 16, C], a view of planes."""
    whole = np.random.default_rng(channels).integers(0, 65536, (3, channels, 10, 16))
    images = torch.from_numpy(whole / 65535).to(dtype) if dtype.is_floating_point else None
    if images is None:
        images = torch.from_numpy(whole // (256 if dtype == torch.uint8 else 1)).to(dtype)
    return images.permute(0, 2, 3, 1)


@pytest.mark.parametrize(
    ("channels", "dtype"),
    [
        (1, torch.uint8), (1, torch.float32), (3, torch.uint8), (3, torch.uint16), (3, torch.float16),
        (3, torch.float32), (4, torch.bfloat16), (4, torch.uint8), (13, torch.uint16),
    ],
    ids=str,
)  # fmt: skip
def test_images_of_any_type_and_channels(channels: int, dtype: torch.dtype) -> None:
    """Three channels of an image are a sample of the kernels."""
    images = of_any_type(dtype, channels)
    ops = {
        "flip": K.RandomHorizontalFlip(), "vflip": K.RandomVerticalFlip(),
        "jitter": K.ColorJitter(brightness=0.4, contrast=0.4, p=0.8), "solarize": K.RandomSolarize(p=0.3),
        "noise": K.RandomGaussianNoise(std=0.1, p=0.7), "affine": K.RandomAffine(20.0, p=0.7),
        "invert": K.RandomInvert(), "sharpness": K.RandomSharpness(0.5, p=0.7),
        "contrast": K.RandomContrast((0.6, 1.4), p=0.7), "autocontrast": K.RandomAutoContrast(p=0.7),
        "erase": K.RandomErasing(p=0.7, value=0.3), "blur": K.RandomGaussianBlur(5, (0.5, 2.0), p=0.7),
    }  # fmt: skip
    prepared = [prepare(name, op) for name, op in ops.items()]
    normalize = Normalize([0.1 * k for k in range(channels)], [0.2 + 0.1 * k for k in range(channels)])
    backend = fused.FusedBackend(prepared, normalize)
    chosen = [draw(p, 3, (10, 16), seed, extreme=False) for seed, p in enumerate(prepared)]
    (part,) = backend._parts
    for white, channels_last in ((None, False), (200.0, True)):
        given = images.contiguous() if channels_last else images  # pixels or planes
        output = (*backend._affine, torch.float32, channels_last)
        found = backend._run(given.to(DEVICE), part, chosen, cuda, output, fused.Reading(white)).cpu()
        expected = ReferenceBackend(prepared, normalize)(images, chosen, white=white)
        # behind jumps, rounding that is not Kornia's to the bit can change single pixels
        assert far(found, expected, SPACE) <= 2e-3, white
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        assert found.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("layout", ["contiguous", "planes", "sliced"])
@pytest.mark.parametrize("kind", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("sides", [(1, 20), (24, 31)])
def test_crops_are_those_of_the_cpu(sides: tuple[int, int], kind: str, layout: str) -> None:
    """RGB bytes to the bit, floats and other channels to the rounding of sums."""
    rng = np.random.default_rng(len(layout + kind))
    images = test_cut.LAYOUTS[layout](test_cut.some(rng, (3, *sides, 3)))
    windows = test_cut.random_windows(rng, sides, 3, kind)
    while DEVICE.type == "cpu" and ((windows.window[:, 2:] > 4 * windows.resized).any() or max(windows.size) > 40):
        windows = test_cut.random_windows(rng, sides, 3, kind)  # the interpreter takes seconds
    if kind != "nearest":
        made, white = cuda.crop(images.to(DEVICE), windows, 255.0)
        assert (made.dtype, white) == (torch.uint8, 255.0)
        assert torch.equal(made.cpu(), test_cut.one_by_one(images, windows)), windows
    windows = replace(windows.take(np.arange(2)), fill=(9, 200, 70, 30))
    four = torch.cat([images, images[..., :1] // 2], dim=3)[:2]
    for white, given in ((255.0, four), (1.0, four / 255), (300.0, four.to(torch.uint16))):
        made, unit = cuda.crop(given.to(DEVICE), windows, white)
        assert unit == 1.0
        assert (made.cpu() - cuts.cut(given, windows, white)[0]).abs().max() <= 1e-6


@pytest.mark.parametrize("tiles", [1, 4, 9])
@pytest.mark.parametrize(("channels", "dtype"), [(3, np.uint8), (5, np.uint8), (0, np.uint8), (0, np.int32)])
def test_mosaics_are_those_of_the_cpu_to_the_bit(tiles: int, channels: int, dtype: Any) -> None:
    rng = np.random.default_rng(tiles + channels)
    for degrees, scale in ((0.0, (0.5, 1.5)), (40.0, (0.001, 2)), (90.0, (1.0, 1.0))):
        size = (int(rng.integers(2, 40)), int(rng.integers(2, 40)))
        layout = test_mosaic.laid(rng, size=size, tiles=max(tiles, 4), rows=2, degrees=degrees, scale=scale)
        layout = layout._replace(origin=layout.origin[:, :tiles], visible=layout.visible[:, :tiles])
        shape = (2 * tiles, *size, channels) if channels else (2 * tiles, *size)
        made = torch.from_numpy(rng.integers(0, 256 if channels else 20, shape).astype(dtype))
        where = layout.origin, layout.visible, layout.inverse, layout.size
        add, most = (rng.integers(0, 9, (2, tiles)) * (dtype == np.int32) + n for n in (0, 11))
        more = {"fill": 114, "add": add, "most": most}
        held, expected = (gather([list(x[:tiles]), list(x[tiles:])], *where, **more) for x in (made.to(DEVICE), made))
        if DEVICE.type == "cpu":  # the interpreter
            held = cuda.gather([list(made[:tiles]), list(made[tiles:])], *where, **more)
        assert torch.equal(held.cpu(), expected), (degrees, layout)


@pytest.mark.parametrize("channels", [3, 4])
def test_frames_share_a_row_of_a_table(channels: int) -> None:
    ops = {"noise": K.RandomGaussianNoise(std=0.2, p=0.7), "erase": gpuaug.RandomErasing(0.9, std=0.3)}
    if channels == 4:
        ops["erase"] = gpuaug.RandomErasing(0.9, mean=0.4, std=0.3)
    for same in (True, "field", False):
        recipe = gpuaug.Augment(ops=ops, same_on_frame=dict.fromkeys(ops, same))
        images = of_any_type(torch.float32, channels)[[0, 1, 2, 0]].permute(0, 3, 1, 2).unflatten(0, (2, 2))
        expected = recipe(images, seed=3)
        drawn = recipe.draw(seed=3, epoch=0, indices=np.arange(2), rows=Rows(frames=2))
        ((*chosen,),) = recipe.choose(drawn, [(10, 16)])
        backend = fused.FusedBackend(recipe.prepared)
        (part,) = backend._parts
        given = images.flatten(0, 1).permute(0, 2, 3, 1).to(DEVICE)
        found = backend._run(given, part, chosen, cuda, (*backend._affine, torch.float32, False)).cpu()
        assert far(found, expected.flatten(0, 1), SPACE) == 0, same


@pytest.mark.parametrize("name", ["one_of", "one_of_noise", "some_of_shuffled"])
def test_a_policy_equals_kornia(name: str) -> None:
    found, expected, _ = run({"flip": K.RandomHorizontalFlip(), name: POLICIES[name]()}, photographs(24))
    assert far(found, expected, SPACE) <= 1e-3  # chains with a jump after arithmetic that is not Kornia's to the bit


@cache
def colours_and_blur(dtype: torch.dtype, channels_last: bool) -> torch.Tensor:
    ops = {"jitter": POINTWISE["jitter"](), "blur": K.RandomGaussianBlur(3, (0.1, 2.0), p=0.5)}
    return run(ops, photographs(24), dtype=dtype, channels_last=channels_last)[0]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_memory_formats(dtype: torch.dtype, channels_last: bool) -> None:
    found, plain = colours_and_blur(dtype, channels_last), colours_and_blur(torch.float32, False)
    assert found.dtype == dtype
    assert found.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    assert (found.float() - plain).abs().max() <= (0 if dtype == torch.float32 else 0.02)


@triton.jit
def _words(keys, dst, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    seed = tl.load(keys) | (tl.load(keys + 1) << 32)
    tl.store(dst + at, cuda_kernels._philox(seed, at))


@pytest.mark.parametrize("words", [(0, 0), (1, 2), (2**32 - 1, 2**31), (0x243F6A88, 0x85A308D3)])
def test_random_words_are_the_hosts(words: tuple[int, int]) -> None:
    keys = torch.tensor(words, dtype=torch.int64)
    found = torch.empty(256, dtype=torch.int32, device=DEVICE)
    _words[(1,)](keys.to(DEVICE), found, N=256)
    zero, key = np.zeros(1, dtype=np.uint64), keys.numpy().astype(np.uint64)
    expected = draws.philox((np.arange(64, dtype=np.uint64), zero, zero, zero), (key[:1], key[1:]))
    assert (found.cpu().numpy().view(np.uint32) == np.stack(np.broadcast_arrays(*expected), axis=1).ravel()).all()


@pytest.mark.parametrize("count", [1, 2, 3, 10, 3 * 17 * 23, 3 * 64 * 64])
def test_noise_is_the_hosts(count: int) -> None:
    """Each value is rounded by other functions: logarithm, square root, cosine."""
    keys = torch.tensor([(0, 0), (5, 2**32 - 1), (2**31, 7)])
    found = cuda.normal_field(keys.to(DEVICE), count)
    assert found.shape == (3, count)
    assert (found.cpu() - draws.normal_field(keys, count)).abs().max() <= 1e-5
    assert torch.equal(cuda.normal_field(keys[1:2].to(DEVICE), count), found[1:2])


def test_no_operations() -> None:
    images = photographs(8)
    code, args = np.zeros((6, 0), dtype=np.int32), np.zeros((6, 0, 12), dtype=np.float32)
    program = cuda_steps.upload(code, args, np.zeros(1, dtype=np.float32), (1.0,) * 3, (0.0,) * 3, DEVICE)
    out = cuda.launch(images.to(DEVICE), program, dtype=torch.float32, channels_last=False)
    assert torch.equal(out.cpu(), images.permute(0, 3, 1, 2).float() / 255)
