"""The CUDA kernels: on a GPU where there is one, else in Triton's interpreter; and compiled without any device."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from compile_kernels import KERNELS, OCCUPANCY, compiled, compilers, crop, examine, gather
from conftest import ROOT, SHARED
from test_fused import KNOWN, NORMALIZE, POINTWISE, POLICIES, SPACE, SPATIAL, draw, photographs, rows_of
from test_pillow import drawn

from gpuaug.augment.fused import backend as fused
from gpuaug.augment.fused import cuda_steps
from gpuaug.augment.ops.pillow import PillowOp
from gpuaug.augment.policy import prepare

triton = pytest.importorskip("triton", reason="Triton is not installed")

import triton.language as tl  # noqa: E402
from triton.backends.nvidia import driver  # noqa: E402
from triton.runtime import build  # noqa: E402

from gpuaug.augment.fused import cuda as triton_kernels  # noqa: E402
from gpuaug.augment.fused import cuda_kernels  # noqa: E402

RECIPES = sorted(p.stem for p in (ROOT / "conf" / "gpuaug" / "augment").glob("*.yaml"))


def test_the_kernels_equal_the_reference() -> None:
    """In a process of its own: Triton decides for its interpreter when it is first imported."""
    environment = dict(os.environ) if torch.cuda.is_available() else {**os.environ, "TRITON_INTERPRET": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(ROOT / "tests/augment/triton_cases.py"),
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_equals_the_cpu_without_waiting_for_the_device() -> None:
    ops = {"jitter": POINTWISE["jitter"](), "gray": POINTWISE["gray"](), "blur": SPATIAL["blur"]()}
    prepared = [prepare(name, op) for name, op in ops.items()]
    images = photographs(96)
    chosen = [draw(p, len(images), (96, 96), k) for k, p in enumerate(prepared)]
    backend = fused.FusedBackend(prepared, NORMALIZE)
    expected = backend(images, chosen)
    on_device = images.cuda()
    backend(on_device, chosen)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = backend(on_device, chosen)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (found.cpu() - expected).abs().max() <= SPACE


def _forget_compiler() -> None:
    if hasattr(build, "_find_compiler"):  # Triton 3.8 and newer
        build._find_compiler.cache_clear()


def _no_compiler(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.delenv("CC", raising=False)
    patch.setenv("PATH", "")
    _forget_compiler()
    build._build("probe", str(folder / "probe.c"), str(folder), [], [], [], [])


def _no_headers(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("CC", "false")  # the compiler says by its exit status that a file is missing
    _forget_compiler()
    build._build("probe", str(folder / "probe.c"), str(folder), [], [], [], [])


def _no_libcuda(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(driver.subprocess, "check_output", lambda command: b"")  # what ldconfig prints without a driver
    driver.libcuda_dirs.__wrapped__()


def _no_folder(folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder / "file").touch()
    patch.setenv("TRITON_CACHE_DIR", str(folder / "file" / "cache"))
    _compile(_wrong, 90)


def _small_device(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """A driver whose device has less shared memory than any kernel takes."""
    utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": -1})
    planted = SimpleNamespace(get_current_device=lambda: -1, launcher_cls=lambda source, metadata: None, utils=utils)
    patch.setattr(triton.runtime.driver, "_active", planted)
    _compile(_right, 90)._init_handles()


def _launch(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Without a device Triton finds no driver; with one, it compiles the kernel."""
    _wrong[(1,)](torch.zeros(1))


@triton.jit
def _right(dst):  # type: ignore[no-untyped-def]
    tl.store(dst, 1.0)


@triton.jit
def _wrong(dst):  # type: ignore[no-untyped-def]
    tl.store(dst, no_such_name)  # type: ignore[name-defined]  # noqa: F821


@triton.jit
def _trap(dst):  # type: ignore[no-untyped-def]
    tl.inline_asm_elementwise("trap; mov.u32 $0, $1;", "=r,r", [tl.program_id(0)], tl.int32, is_pure=False, pack=1)


def _compile(kernel: Any, capability: int) -> Any:
    source = triton.compiler.ASTSource(kernel, {"dst": "*fp32"}, {}, {})
    return triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", capability, 32))


FAILURES = {
    "no C compiler": (_no_compiler, RuntimeError),
    "no headers": (_no_headers, subprocess.CalledProcessError),
    "no libcuda": (_no_libcuda, AssertionError),
    "no folder": (_no_folder, OSError),
    "another language": (lambda folder, patch: _compile(_wrong, 90), triton.CompilationError),
    "a small device": (_small_device, triton.OutOfResources),
    "no driver": (_launch, (RuntimeError, triton.CompilationError)),
}


class Failing:
    """In the place of a kernel: fails when it is launched."""

    def __init__(self, fail: Callable[[], None]) -> None:
        self.fail, self.launches = fail, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **constants: Any) -> None:
            self.launches += 1
            self.fail()

        return launch


@pytest.mark.parametrize("name", FAILURES)
def test_without_triton_a_recipe_runs_through_kornia(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """What Triton itself raises, from its own functions where that can be had; never twice, and the log says why."""
    fail, kind = FAILURES[name]
    raised = []

    def failing() -> None:
        with monkeypatch.context() as patch:
            try:
                fail(tmp_path, patch)
            except BaseException as error:
                raised.append(error)
                raise

    kernel = Failing(failing)
    backend, images, chosen = _backend_with(kernel, monkeypatch)
    with caplog.at_level(logging.WARNING, logger="gpuaug"):
        found = [backend(images, chosen) for _ in range(2)]
    assert isinstance(raised[0], kind)
    assert kernel.launches == 1
    (message,) = [r.message for r in caplog.records if "operation by operation" in r.message]
    assert type(raised[0]).__name__ in message
    expected = backend._reference(images, chosen)
    assert all(torch.equal(x, expected) for x in found)


@pytest.mark.parametrize(
    "kind", [TypeError, ValueError, RuntimeError, AssertionError, OSError, ImportError, subprocess.SubprocessError]
)
def test_an_error_of_ours_is_raised(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not make a recipe slow, with a hint about compilers."""

    def fail() -> None:
        raise kind("planted")

    backend, images, chosen = _backend_with(Failing(fail), monkeypatch)
    with pytest.raises(kind, match="planted"):
        backend(images, chosen)
    assert not fused._no_triton


def test_an_import_error_of_ours_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    package = sys.modules["gpuaug.augment.fused"]
    monkeypatch.delitem(sys.modules, "gpuaug.augment.fused.cuda")
    monkeypatch.delattr(package, "cuda")
    monkeypatch.setitem(sys.modules, "gpuaug.augment.fused.cuda_pillow", ModuleType("gpuaug.augment.fused.cuda_pillow"))
    with pytest.raises(ImportError, match="_levels_kernel"):
        fused.triton_kernels(torch.device("cuda"))
    assert not fused._no_triton


def _backend_with(kernel: Failing, patch: pytest.MonkeyPatch) -> tuple[fused.FusedBackend, torch.Tensor, list[Any]]:
    """A backend that runs on the CPU what it would run on CUDA, with ``kernel`` in the place of every kernel."""
    for name in KERNELS:
        patch.setattr(triton_kernels, name, kernel)
    patch.setattr(fused, "_no_triton", [])
    patch.setattr(fused, "triton_kernels", lambda device: None if fused._no_triton else triton_kernels)
    patch.setattr(fused, "library", lambda: None)
    ops = {"jitter": POINTWISE["jitter"](), "noise": POINTWISE["noise"](), "blur": SPATIAL["blur"]()}
    prepared = [prepare(key, op) for key, op in ops.items()]
    images = photographs(24)
    chosen = [draw(p, len(images), (24, 24), k) for k, p in enumerate(prepared)]
    return fused.FusedBackend(prepared, NORMALIZE), images, chosen


def test_an_error_of_the_device_is_not_tritons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton says RuntimeError whatever is wrong; whether the device is sick only the device can say."""

    def sick(device: Any = None) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    kernel = Failing(lambda: _no_compiler(tmp_path, monkeypatch))
    with pytest.raises(cuda_steps.CannotRunError, match="RuntimeError: Failed to find C compiler"):
        triton_kernels._queue(kernel, (1,), torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", sick)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        triton_kernels._queue(kernel, (1,), torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_broken_context_is_named_as_such() -> None:
    """In a process of its own, whose context a kernel breaks."""
    code = (
        "import torch, triton, gpuaug, test_triton_kernels as t\n"
        "import kornia.augmentation as K\n"
        "images = torch.zeros((2, 8, 8, 3), dtype=torch.uint8, device='cuda')\n"
        "augment = gpuaug.Augment(ops={'jitter': K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=1.0)})\n"
        "augment(images)\n"
        "t._trap[(1,)](torch.zeros(1, device='cuda'))\n"
        "try:\n"
        "    augment(images)\n"
        "    torch.cuda.synchronize()\n"
        "except torch.AcceleratorError:\n"
        "    print('the device')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, SHARED), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.stdout.strip() == "the device", done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", [*KNOWN, *POLICIES])
def test_on_cuda_a_sample_does_not_depend_on_its_batch(name: str) -> None:
    prepared = [prepare(name, (KNOWN | POLICIES)[name]())]
    images = photographs(64).repeat(3, 1, 1, 1).cuda()
    (chosen,) = (draw(p, len(images), (64, 64), 1) for p in prepared)
    backend = fused.FusedBackend(prepared, NORMALIZE)
    whole = backend(images, [chosen])
    for index in (np.arange(1), np.arange(3, 10), np.arange(len(images))[::-1].copy()):
        assert torch.equal(backend(images[torch.from_numpy(index).cuda()], [rows_of(chosen, index)]), whole[index])


def check(made: dict[Any, Any]) -> None:
    """Nothing spills or calls, enough threads fit, and the pixels travel in wide words."""
    odd = any(("KIND", 1) in key for key in made)  # a width like 1333
    for key, kernel in made.items():
        name, capability, types = key[0], key[1], key[2:]
        found = examine(kernel, key)
        code = found.pop("code")
        assert found["local"] == 0, (key, found)
        # Triton 3.6 reduces the angle of a sine above 100,000 in 28 bytes of memory; ours are below 2 pi.
        assert found["stack"] <= (32 if name == "_normal_kernel" else 16), (key, found)
        # One kernel of sm_80 puts four values aside before its loop, and takes them up once after it.
        assert found["spills"] <= found["stack"] // 2, (key, found)
        assert found["occupancy"] >= OCCUPANCY[capability], (key, found)
        if name == "_axis_kernel":  # divides in float64, for few numbers
            continue
        # One or two are how threads of sm_80 meet again; a division that calls has one for each of 8 pixels.
        assert len(re.findall(r"\bCALL\b", code)) <= 4, key
        constants = dict(pair for pair in types if isinstance(pair, tuple) and isinstance(pair[0], str))
        if constants.get("KIND") == 2:
            assert "LDG.E.64" in code, key
            assert "LDG.E.U8" not in code, key
        if name == "_blur_kernel":
            assert ("HMMA" in code) == (capability >= 80), key  # tensor cores
        if name == "_points_kernel" and constants["LAYOUT"] != 1 and not odd:
            assert "STG.E.128" in code, key
            assert "STG.E.U16" not in code, key


@pytest.fixture(autouse=True)
def _no_interpreter() -> None:
    if not isinstance(cuda_kernels.over_255, triton.JITFunction):
        pytest.skip("Triton's interpreter is on in this process")


@pytest.mark.parametrize("recipe", ["flip", "standard", "simclr"])
def test_kernels_compile_without_a_device(recipe: str) -> None:
    made, launches = compiled(recipe, 90)
    assert launches == {"flip": 1, "standard": 2, "simclr": 6}[recipe]  # for all views of a batch
    assert len(made) == launches // {"flip": 1, "standard": 1, "simclr": 2}[recipe]
    check(made)
    if recipe == "flip":  # a copy with a sum, without the registers of the colour steps
        ((key, kernel),) = made.items()
        assert examine(kernel, key)["registers"] <= 64


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.long), 90])
def test_pillows_arithmetic_compiles(capability: int) -> None:
    made: dict[Any, Any] = {}
    rotate = PillowOp("rotate", interpolation="bicubic")
    ops = [(PillowOp("contrast"), 0.5, True), (rotate, 9, [False, True]), (PillowOp("posterize"), 4, True)]
    prepared, chosen = drawn(ops, 2)
    (part,) = fused._parts(tuple(prepared))
    assert part.columns is not None
    x = torch.zeros((2, 64, 64, 3), dtype=torch.uint8)
    code, args = part.program(chosen, (64, 64), 2)
    program = cuda_steps.upload(code, args, np.zeros(1, dtype=np.float32), (1.0,) * 3, (0.0,) * 3, x.device)
    with compilers(capability, made):
        triton_kernels.launch(x, program, dtype=torch.bfloat16, channels_last=False)
    assert [key[0] for key in made] == ["_mean_kernel", "_points_kernel", "_pillow_kernel", "_points_kernel"]
    check(made)
    # The loop over four lines carries their values. Triton takes for constant what its first turn leaves as it is.
    (text,) = (kernel.asm["ttir"] for key, kernel in made.items() if key[0] == "_pillow_kernel")
    assert [len(line.split(", ")) for line in re.findall(r"scf\.for .*iter_args\((.*?)\)", text)] == [4, 5, 3, 5]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float16], ids=str)
@pytest.mark.parametrize("capability", [pytest.param(75, marks=pytest.mark.long), 90])
def test_kernels_of_any_type_and_channels_compile(capability: int, dtype: torch.dtype) -> None:
    made: dict[Any, Any] = {}
    names = ("hflip", "jitter", "blur")
    ops = {"hflip": POINTWISE["hflip"](), "jitter": K.ColorJitter(contrast=0.4, p=1.0), "blur": SPATIAL["blur"]()}
    prepared = [prepare(name, ops[name]) for name in names]
    x = torch.zeros((2, 64, 64, 4), dtype=dtype)
    chosen = [draw(p, 2, (64, 64), 0, extreme=False) for p in prepared]
    (part,) = fused.FusedBackend(prepared)._parts
    with compilers(capability, made):
        for white in (None, 4095.0):
            part.run(x, chosen, triton_kernels, ((1.0,), (0.0,), torch.bfloat16, False), fused.Reading(white))
    assert {key[0] for key in made} == {"_mean_kernel", "_points_kernel", "_blur_kernel"}
    assert {constant for key in made for constant in key if constant in (("KIND", 0), ("CHANNELS", 4))}
    check(made)


@pytest.mark.parametrize(
    "capability", [c if c in (75, 90) else pytest.param(c, marks=pytest.mark.long) for c in OCCUPANCY]
)
def test_crops_compile_for_every_gpu(capability: int) -> None:
    made: dict[Any, Any] = {}
    with compilers(capability, made):
        for dtype, channels in ((torch.uint8, 3), (torch.uint16, 4)):
            for interpolation in ("nearest", "bicubic"):
                crop(torch.zeros((3, 64, 48, channels), dtype=dtype), interpolation)
    assert {key[0] for key in made} == {"_axis_kernel", "_crop_kernel"}
    check(made)


@pytest.mark.parametrize(
    "capability", [c if c in (75, 90) else pytest.param(c, marks=pytest.mark.long) for c in OCCUPANCY]
)
def test_mosaics_compile_for_every_gpu(capability: int) -> None:
    made: dict[Any, Any] = {}
    with compilers(capability, made):
        for shape, dtype in (((64, 48, 3), torch.uint8), ((64, 48, 5), torch.uint8), ((64, 48), torch.int32)):
            for tiles in (1, 4, 9):
                gather(torch.zeros((2, *shape), dtype=dtype), tiles)
    assert {key[0] for key in made} == {"_gather_kernel"}
    check(made)


def test_another_batch_size_compiles_nothing() -> None:
    known, _ = compiled("standard", 90, batch=32)
    made, _ = compiled("standard", 90, batch=7)
    assert made.keys() <= known.keys()
    with compilers(90, known):
        crop(torch.zeros((32, 64, 48, 3), dtype=torch.uint8))
    with compilers(90, made):
        crop(torch.zeros((7, 128, 96, 3), dtype=torch.uint8))
    assert made.keys() <= known.keys()


@pytest.mark.parametrize(
    "capability", [c if c in (75, 90, 120) else pytest.param(c, marks=pytest.mark.long) for c in OCCUPANCY]
)
def test_noise_compiles_for_every_gpu(capability: int) -> None:
    made: dict[Any, Any] = {}
    with compilers(capability, made):
        for pixels in (224 * 224, 17 * 23):
            triton_kernels.normal_field(torch.zeros((2, 2), dtype=torch.int64), 3 * pixels)
    assert len(made) == 2
    check(made)


@pytest.mark.long
@pytest.mark.parametrize("capability", [c for c in OCCUPANCY if c != 90])
def test_kernels_compile_for_every_gpu(capability: int) -> None:
    made, _ = compiled("simclr", capability)
    assert {key[0] for key in made} == {"_mean_kernel", "_points_kernel", "_blur_kernel"}
    check(made)


@pytest.mark.long
@pytest.mark.parametrize("capability", [80, 90])  # whose machine code is looked at
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_compiles(recipe: str, capability: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for channels_last in (False, True):
            check(compiled(recipe, capability, 16, dtype=dtype, channels_last=channels_last)[0])


def test_uploaded_arrays_are_whole_and_aligned() -> None:
    """For whatever sizes: where an array begins decides which kernel is taken."""
    random = np.random.default_rng(0)
    arrays: list[Any] = [random.integers(0, 9, (n, 3)).astype(np.int32) for n in (0, 1, 5, 37)]
    arrays += [random.random((n, 2, 5), dtype=np.float32) for n in (1, 3)]
    for given, found in zip(arrays, cuda_steps.pack(arrays, torch.device("cpu")), strict=True):
        assert found.data_ptr() % 16 == 0 or not given.size
        assert np.array_equal(found.numpy(), given)
