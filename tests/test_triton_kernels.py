"""The CUDA kernels: on a GPU where there is one, else in Triton's interpreter; and compiled without any device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_fused import NORMALIZE, POINTWISE, SPACE, SPATIAL, draw, photographs

import gpuaug
from gpuaug.augment import batched, fused
from gpuaug.augment.prepare import prepare

triton = pytest.importorskip("triton", reason="Triton is not installed")

from gpuaug.augment import triton_kernels  # noqa: E402

RECIPES = sorted(p.stem for p in (Path(__file__).parents[1] / "conf" / "gpuaug" / "augment").glob("*.yaml"))
KERNELS = ("_mean_kernel", "_points_kernel", "_blur_kernel")
TYPES = {
    torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64",
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
}  # fmt: skip


def test_the_kernels_equal_the_reference() -> None:
    """In a process of its own: Triton decides for its interpreter when it is first imported."""
    folder = Path(__file__).parent
    environment = dict(os.environ) if torch.cuda.is_available() else {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / "triton_cases.py")]
    done = subprocess.run(
        command, cwd=folder.parent, env=environment, capture_output=True, text=True, timeout=1800, check=False
    )
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
                if name in ("dst", "mid", "between"):
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
    augment = gpuaug.build(gpuaug.compose("train", [f"augment={recipe}", "source.root=."]).augment)
    for view in augment.views:
        size = view.augment.crop.size
        chosen = [draw(p, batch, size, 3) for p in view.augment.prepared]
        x = torch.zeros((batch, *size, 3), dtype=torch.uint8)
        for part in fused._parts(view.augment.prepared):
            assert part.lowering is not None, "a shipped recipe runs through Kornia"
            code, args = part.lowering.program([chosen[n] for n in part.numbers], size)
            if not part.numbers:
                code, args = np.zeros((batch, 0), dtype=np.int32), np.zeros((batch, 0, 1), dtype=np.float32)
            fields = fused._fields(part.lowering, chosen, code, size, x.device)
            ramps = fused.warp_ramps(size)
            program = triton_kernels.upload(code, args, ramps, (1.0,) * 3, (0.0,) * 3, x.device)
            options = {"dtype": torch.bfloat16, "channels_last": False, **options}
            x = triton_kernels.launch(x, program, fields=fields, **options)
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
        assert found["STACK"] <= 16, (key, found)
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
        if name == "_points_kernel" and constants["LAYOUT"] != 1:
            assert "STG.E.128" in code, key
            assert "STG.E.U16" not in code, key


@pytest.fixture(autouse=True)
def _no_interpreter() -> None:
    if not isinstance(triton_kernels._over_255, triton.JITFunction):
        pytest.skip("Triton's interpreter is on in this process")


@pytest.mark.parametrize("recipe", ["standard", "simclr"])
def test_kernels_compile_without_a_device(recipe: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made, launches = compiled(monkeypatch, recipe, 90)
    assert launches == {"standard": 2, "simclr": 6}[recipe]  # for all views of a batch
    assert len(made) == launches // {"standard": 1, "simclr": 2}[recipe]
    check(made, tmp_path)


def test_another_batch_size_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    known, _ = compiled(monkeypatch, "standard", 90, batch=32)
    for batch in (1, 7, 37, 64):
        made, _ = compiled(monkeypatch, "standard", 90, batch=batch)
        assert made.keys() <= known.keys()


@pytest.mark.long
@pytest.mark.parametrize("capability", [80, 90])
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
    for given, found in zip(arrays, batched.upload(arrays, torch.device("cpu")), strict=True):
        assert found.data_ptr() % 16 == 0 or not given.size
        assert np.array_equal(found.numpy(), given)
