"""The CUDA kernels: on a GPU where there is one, else in Triton's interpreter; and compiled without any device."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, SHARED
from test_fused import KNOWN, NORMALIZE, POINTWISE, POLICIES, SPACE, SPATIAL, draw, photographs, rows_of
from test_pillow import drawn

import gpuaug
from gpuaug.augment.fused import backend as fused
from gpuaug.augment.fused import cuda_steps
from gpuaug.augment.ops.pillow import PillowOp
from gpuaug.augment.policy import prepare
from gpuaug.augment.reference import ReferenceBackend

triton = pytest.importorskip("triton", reason="Triton is not installed")

import triton.language as tl  # noqa: E402
from triton.runtime import build  # noqa: E402

from gpuaug.augment.fused import cuda as triton_kernels  # noqa: E402

RECIPES = sorted(p.stem for p in (ROOT / "conf" / "gpuaug" / "augment").glob("*.yaml"))
# Compute capabilities of the GPUs to compile for: T4, A100, RTX 30, L4 and RTX 40, H100 and H200, B200, RTX 50
CAPABILITIES = (75, 80, 86, 89, 90, 100, 120)
KERNELS = ("_mean_kernel", "_points_kernel", "_blur_kernel")
TYPES = {
    torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64",
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
}  # fmt: skip


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


def _no_compiler(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.delenv("CC", raising=False)
    patch.setenv("PATH", "")
    build._build("probe", str(folder / "probe.c"), str(folder), [], [], [], [])


def _no_folder(folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder / "file").touch()
    patch.setenv("TRITON_CACHE_DIR", str(folder / "file" / "cache"))
    _compile(_wrong, 90)


@triton.jit
def _wrong(dst):  # type: ignore[no-untyped-def]
    tl.store(dst, no_such_name)  # type: ignore[name-defined]  # noqa: F821


@triton.jit
def _trap(dst):  # type: ignore[no-untyped-def]
    tl.inline_asm_elementwise("trap; mov.u32 $0, $1;", "=r,r", [tl.program_id(0)], tl.int32, is_pure=False, pack=1)


def _compile(kernel: Any, capability: int) -> None:
    source = triton.compiler.ASTSource(kernel, {"dst": "*fp32"}, {}, {})
    triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", capability, 32))


FAILURES = {
    "no C compiler": (_no_compiler, RuntimeError),
    "no folder": (_no_folder, OSError),
    "another language": (lambda folder, patch: _compile(_wrong, 90), triton.CompilationError),
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
    for kernel_name in (*KERNELS, "_normal_kernel"):
        monkeypatch.setattr(triton_kernels, kernel_name, kernel)
    monkeypatch.setattr(fused, "_no_triton", [])
    real = fused._triton_kernels
    monkeypatch.setattr(fused, "_triton_kernels", lambda device: real(torch.device("cuda")))
    monkeypatch.setattr(fused, "library", lambda: None)
    ops = {"jitter": POINTWISE["jitter"](), "noise": POINTWISE["noise"](), "blur": SPATIAL["blur"]()}
    prepared = [prepare(key, op) for key, op in ops.items()]
    images = photographs(24)
    chosen = [draw(p, len(images), (24, 24), k) for k, p in enumerate(prepared)]
    backend = fused.FusedBackend(prepared, NORMALIZE)
    with caplog.at_level(logging.WARNING, logger="gpuaug"):
        found = [backend(images, chosen) for _ in range(2)]
    assert isinstance(raised[0], kind)
    assert kernel.launches == 1
    (message,) = [r.message for r in caplog.records if "operation by operation" in r.message]
    assert type(raised[0]).__name__ in message
    expected = ReferenceBackend(prepared, NORMALIZE)(images, chosen)
    assert all(torch.equal(x, expected) for x in found)


def test_an_error_of_the_device_is_not_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton says RuntimeError whatever is wrong; whether the device is sick only the device can say."""

    def sick(device: Any = None) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def launch() -> None:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    with pytest.raises(cuda_steps.CannotRunError, match="RuntimeError: Triton Error"):
        triton_kernels._queue(Failing(launch), (1,), torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", sick)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        triton_kernels._queue(Failing(launch), (1,), torch.device("cuda"))


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
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SHARED))}
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


class Compiler:
    """In the place of a kernel: compiles what would be launched, with Triton's own compiler, for some GPU."""

    def __init__(self, kernel: Any, capability: int, made: dict[Any, Any]) -> None:
        self.kernel, self.capability, self.made = kernel, capability, made

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert 0 < grid[0] < 2**31
        assert all(0 < n < 2**16 for n in grid[1:])
        return self.launch

    def launch(self, *args: Any, num_warps: int, enable_fp_fusion: bool, **constants: Any) -> None:
        signature, attributes = {}, {}
        for k, name in enumerate(self.kernel.arg_names):
            if name in constants:
                signature[name] = "constexpr"
                continue
            value = args[k]
            if isinstance(value, torch.Tensor):
                signature[name] = TYPES[value.dtype]
                assert value.data_ptr() % 16 == 0, name  # another alignment would be another compilation
                attributes[(k,)] = [["tt.divisibility", 16]]
                if name in ("dst", "mid"):
                    value.zero_()
                continue
            signature[name] = "i32"
            if value % 16 == 0 and not self.kernel.params[k].do_not_specialize:
                attributes[(k,)] = [["tt.divisibility", 16]]
        name = self.kernel.__name__
        key = (name, self.capability, *signature.values(), *sorted(attributes), *sorted(constants.items()), num_warps)
        if key not in self.made:
            source = triton.compiler.ASTSource(self.kernel, signature, constants, attributes)
            target = triton.backends.compiler.GPUTarget("cuda", self.capability, 32)
            options = {"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion}
            self.made[key] = triton.compile(source, target=target, options=options)


def compiled(
    monkeypatch: pytest.MonkeyPatch, recipe: str, capability: int, batch: int = 32, **options: Any
) -> tuple[dict[Any, Any], int]:
    """What a recipe's views need compiled, and how many of our kernels are launched for them."""
    made: dict[Any, Any] = {}
    launches = 0
    for name in KERNELS:
        monkeypatch.setattr(triton_kernels, name, Compiler(getattr(triton_kernels, name), capability, made))
    count = Compiler.launch

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal launches
        launches += 1
        count(*args, **kwargs)

    monkeypatch.setattr(Compiler, "launch", counted)
    augment = gpuaug.build(gpuaug.compose("train", [f"augment={recipe}", "source.root=."]).augment).at(0)
    for view in augment.views:
        size = view.augment.crop.size
        chosen = [draw(p, batch, size, 3) for p in view.augment.prepared]
        x = torch.zeros((batch, *size, 3), dtype=torch.uint8)
        backend = fused.FusedBackend(view.augment.prepared)
        last = (*backend._affine, options.get("dtype", torch.bfloat16), options.get("channels_last", False))
        for number, part in enumerate(backend._parts):
            assert part.columns is not None, "a shipped recipe runs through Kornia"
            is_last = number == len(backend._parts) - 1
            x = backend._run(x, part, chosen, triton_kernels, last if is_last else fused._BETWEEN)
    monkeypatch.undo()
    return made, launches


def check(made: dict[Any, Any], folder: Path) -> None:
    """Nothing spills or calls, and the pixels travel in wide words."""
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton brings no cuobjdump: the kernels compile, their machine code is not looked at")
    for key, kernel in made.items():
        name, types = key[0], key[2:]
        file = folder / "kernel.cubin"
        file.write_bytes(kernel.asm["cubin"])
        usage = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
        found = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
        assert found["LOCAL"] == 0, (key, found)
        # Triton 3.6 reduces the angle of a sine above 100,000 in 28 bytes of memory; ours are below 2 pi.
        assert found["STACK"] <= (32 if name == "_normal_kernel" else 16), (key, found)
        assert found["REG"] <= 200, (key, found)
        assert kernel.metadata.shared <= 48 * 1024, key
        code = subprocess.run([tool, "--dump-sass", file], capture_output=True, text=True, check=True).stdout
        # One kernel of sm_80 puts four values aside before its loop, and takes them up once after it.
        assert len(re.findall(r"\b(LDL|STL)\b", code)) <= found["STACK"] // 2, key
        # One or two are how threads of sm_80 meet again; a division that calls has one for each of 16 pixels.
        assert len(re.findall(r"\bCALL\b", code)) <= 4, key
        constants = dict(pair for pair in types if isinstance(pair, tuple) and isinstance(pair[0], str))
        if constants.get("KIND") == 2:
            assert "LDG.E.64" in code, key
            assert "LDG.E.U8" not in code, key
        if name == "_points_kernel" and constants["LAYOUT"] != 1 and constants["KIND"] != 1:  # 1: a width like 1333
            assert "STG.E.128" in code, key
            assert "STG.E.U16" not in code, key


@pytest.fixture(autouse=True)
def _no_interpreter() -> None:
    if not isinstance(triton_kernels.over_255, triton.JITFunction):
        pytest.skip("Triton's interpreter is on in this process")


@pytest.mark.parametrize("recipe", ["standard", "simclr"])
def test_kernels_compile_without_a_device(recipe: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made, launches = compiled(monkeypatch, recipe, 90)
    assert launches == {"standard": 2, "simclr": 8}[recipe]  # for all views of a batch
    assert len(made) == launches // {"standard": 1, "simclr": 2}[recipe]
    check(made, tmp_path)


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.long), 90])
def test_pillows_arithmetic_compiles(capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: dict[Any, Any] = {}
    for name in KERNELS:
        monkeypatch.setattr(triton_kernels, name, Compiler(getattr(triton_kernels, name), capability, made))
    ops = [(PillowOp("contrast"), 0.5, True), (PillowOp("rotate"), 9, [False, True]), (PillowOp("posterize"), 4, True)]
    prepared, chosen = drawn(ops, 2)
    (part,) = fused._parts(tuple(prepared))
    assert part.columns is not None
    x = torch.zeros((2, 64, 64, 3), dtype=torch.uint8)
    code, args = part.program(chosen, (64, 64), 2)
    program = cuda_steps.upload(code, args, np.zeros(1, dtype=np.float32), (1.0,) * 3, (0.0,) * 3, x.device)
    triton_kernels.launch(x, program, dtype=torch.bfloat16, channels_last=False)
    assert [key[0] for key in made] == ["_mean_kernel", "_points_kernel", "_points_kernel"]
    check(made, tmp_path)


def test_another_batch_size_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    known, _ = compiled(monkeypatch, "standard", 90, batch=32)
    made, _ = compiled(monkeypatch, "standard", 90, batch=7)
    assert made.keys() <= known.keys()


@pytest.mark.parametrize(
    "capability", [c if c in (75, 90, 120) else pytest.param(c, marks=pytest.mark.long) for c in CAPABILITIES]
)
def test_noise_compiles_for_every_gpu(capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: dict[Any, Any] = {}
    kernel = Compiler(triton_kernels._normal_kernel, capability, made)
    monkeypatch.setattr(triton_kernels, "_normal_kernel", kernel)
    for pixels in (224 * 224, 17 * 23):
        triton_kernels.normal_field(torch.zeros((2, 2), dtype=torch.int64), 3 * pixels)
    assert len(made) == 2
    check(made, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("capability", [c for c in CAPABILITIES if c != 90])
def test_kernels_compile_for_every_gpu(capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made, _ = compiled(monkeypatch, "simclr", capability)
    assert {key[0] for key in made} == set(KERNELS)
    check(made, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("capability", [80, 90])  # whose machine code is looked at
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_compiles(recipe: str, capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for channels_last in (False, True):
            made, _ = compiled(monkeypatch, recipe, capability, 16, dtype=dtype, channels_last=channels_last)
            check(made, tmp_path)


def test_uploaded_arrays_are_whole_and_aligned() -> None:
    """For whatever sizes: where an array begins decides which kernel is taken."""
    random = np.random.default_rng(0)
    arrays: list[Any] = [random.integers(0, 9, (n, 3)).astype(np.int32) for n in (0, 1, 5, 37)]
    arrays += [random.random((n, 2, 5), dtype=np.float32) for n in (1, 3)]
    for given, found in zip(arrays, cuda_steps.pack(arrays, torch.device("cpu")), strict=True):
        assert found.data_ptr() % 16 == 0 or not given.size
        assert np.array_equal(found.numpy(), given)
