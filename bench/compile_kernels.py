"""Compiles the CUDA kernels without a GPU: registers, spills, shared memory, instructions, occupancy.

    python bench/compile_kernels.py --json kernels.json      # with the Triton that is installed
    python bench/compile_kernels.py --triton 3.6.0 3.7.1 3.8.0 3.9.0 --json kernels.json
    python bench/compile_kernels.py --table kernels.json --readme bench/README.md

`--triton` installs each release into a folder of its own (700 MB each), and compiles in a process that imports it from
there. The cases are batches of 256 images of 224 x 224 from uint8 to bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import readme
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# Compute capabilities of T4, A100, RTX 30, L4 and RTX 40, H100 and H200, B200, RTX 50. What each multiprocessor has
# (CUDA programming guide, technical specifications): warps, thread blocks, shared memory in KiB.
LIMITS = {
    75: (32, 16, 64), 80: (64, 32, 164), 86: (48, 16, 100), 89: (48, 24, 100), 90: (64, 32, 228), 100: (64, 32, 228),
    120: (48, 24, 100),
}  # fmt: skip
OCCUPANCY = {75: 0.6, 80: 0.25, 86: 0.4, 89: 0.4, 90: 0.25, 100: 0.3, 120: 0.3}  # the least that a kernel may have
RECIPES = ("flip", "standard", "simclr", "randaugment_torchvision", "timm")
KERNELS = (
    "_mean_kernel", "_points_kernel", "_blur_kernel", "_levels_kernel", "_pillow_kernel", "_normal_kernel",
    "_axis_kernel", "_crop_kernel", "_gather_kernel",
)  # fmt: skip
TYPES = {
    torch.uint8: "*u8", torch.uint16: "*u16", torch.int32: "*i32", torch.int64: "*i64",
    torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16", torch.float16: "*fp16",
}  # fmt: skip


class Compiler:
    """In the place of a kernel: compiles what would be launched, with Triton's own compiler, for some GPU.

    Attributes:
        made: the compiled kernels, by all that another compilation depends on: name, capability, types, constants.
        launches: the number of calls.
    """

    def __init__(self, kernel: Any, capability: int, made: dict[Any, Any]) -> None:
        self.kernel, self.capability, self.made, self.launches = kernel, capability, made, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert 0 < grid[0] < 2**31
        assert all(0 < n < 2**16 for n in grid[1:])
        return self.launch

    def launch(self, *args: Any, num_warps: int, enable_fp_fusion: bool, **constants: Any) -> None:
        import triton

        self.launches += 1
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
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if value % 16 == 0 and not self.kernel.params[k].do_not_specialize:
                attributes[(k,)] = [["tt.divisibility", 16]]
        name = self.kernel.__name__
        key = (name, self.capability, *signature.values(), *sorted(attributes), *sorted(constants.items()), num_warps)
        if key not in self.made:
            source = triton.compiler.ASTSource(self.kernel, signature, constants, attributes)
            target = triton.backends.compiler.GPUTarget("cuda", self.capability, 32)
            options = {"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion}
            self.made[key] = triton.compile(source, target=target, options=options)


@contextmanager
def compilers(capability: int, made: dict[Any, Any]) -> Iterator[list[Compiler]]:
    """Inside, launches of the kernels compile them."""
    from gpuaug.augment.fused import cuda

    kernels = [getattr(cuda, name) for name in KERNELS]
    replaced = [Compiler(kernel, capability, made) for kernel in kernels]
    try:
        for name, compiler in zip(KERNELS, replaced, strict=True):
            setattr(cuda, name, compiler)
        yield replaced
    finally:
        for name, kernel in zip(KERNELS, kernels, strict=True):
            setattr(cuda, name, kernel)


def compiled(
    recipe: str, capability: int, batch: int = 32, *, dtype: torch.dtype = torch.bfloat16, channels_last: bool = False
) -> tuple[dict[Any, Any], int]:
    """What a recipe's views need compiled, and how many of our kernels are launched for them."""
    import gpuaug
    from gpuaug.augment.fused import backend as fused
    from gpuaug.augment.fused import cuda

    made: dict[Any, Any] = {}
    augment = gpuaug.build(gpuaug.compose("train", [f"augment={recipe}", "source.root=."]).augment).at(0)
    drawn = augment.draw(seed=3, epoch=0, indices=np.arange(batch))
    with compilers(capability, made) as kernels:
        for view in augment.views:
            size, at = view.augment.crop.size, (view.name, view.copy)
            chosen = [
                p.draw(drawn.uniforms[(*at, p.name)], size, drawn.keys.get((*at, p.name)))
                for p in view.augment.prepared
            ]
            x = torch.zeros((batch, *size, 3), dtype=torch.uint8)
            backend = fused.FusedBackend(view.augment.prepared)
            last = (*backend._affine, dtype, channels_last)
            for part in backend._parts:
                assert part.columns is not None, "a shipped recipe runs through Kornia"
                x = backend._run(x, part, chosen, cuda, last if part is backend._parts[-1] else fused._BETWEEN)
    return made, sum(kernel.launches for kernel in kernels)


def crop(x: torch.Tensor, interpolation: str = "bilinear") -> None:
    """Crop images [B, H, W, C], halved, with the kernels."""
    from gpuaug.augment.fused import cuda
    from gpuaug.augment.images import WHITE
    from gpuaug.batch import CropWindows

    (batch, height, width), zero = x.shape[:3], np.zeros((len(x), 2), dtype=np.int32)
    half = np.full((batch, 2), (height // 2, width // 2), dtype=np.int32)
    windows = CropWindows(np.hstack([zero, 2 * half]), half, zero, (height // 2, width // 2), interpolation)  # type: ignore[arg-type]
    cuda.crop(x, windows, WHITE[x.dtype])


def gather(like: torch.Tensor, tiles: int = 4) -> None:
    """Gather outputs from mosaics of images [B, H, W, C] or masks [B, H, W], with the kernel."""
    from gpuaug.augment.fused import cuda

    (batch, height, width), each = like.shape[:3], (len(like), tiles)
    shown = np.tile([0, 0, width, height], (*each, 1))
    cuda.gather(
        [[image] * tiles for image in like], shown[..., :2], shown, np.tile(np.eye(3), (batch, 1, 1)), (height, width),
        fill=114, add=np.zeros(each, dtype=np.int64), most=np.zeros(each, dtype=np.int64),
    )  # fmt: skip


def examine(kernel: Any, key: Any) -> dict[str, Any]:
    """What the machine code of a compiled kernel uses; its SASS under ``code``. ``key``: as in ``Compiler.made``."""
    import triton

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    found = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    shared, warps = int(kernel.metadata.shared), int(kernel.metadata.num_warps)
    return {
        "registers": found["REG"], "stack": found["STACK"], "local": found["LOCAL"], "shared": shared,
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "instructions": len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", code, re.MULTILINE)),
        "occupancy": occupancy(key[1], found["REG"], shared, warps), "code": code,
    }  # fmt: skip


def occupancy(capability: int, registers: int, shared: int, warps: int) -> float:
    """The share of a multiprocessor's warps that can be resident: the smallest of its limits."""
    most, blocks, kib = LIMITS[capability]
    # registers are given to a warp in units of 256; each block has 1 KiB of shared memory for CUDA itself from sm_80 on
    by_registers = 65536 // (-(-registers * 32 // 256) * 256) // warps
    reserved = shared + (1024 if capability >= 80 else 0)
    by_shared = kib * 1024 // reserved if reserved else blocks
    return min(blocks, by_registers, by_shared, most // warps) * warps / most


def label(key: Any) -> str:
    """A kernel and the constants that make a variant of it."""
    constants = dict(pair for pair in key if isinstance(pair, tuple) and isinstance(pair[0], str))
    shown = [
        f"{k}={int(v)}"
        for k, v in constants.items()
        if k in ("KIND", "LAYOUT", "INTERPOLATION", "COUNT") or (isinstance(v, bool) and k != "CHANNELS_LAST")
    ]
    return " ".join([key[0].strip("_").removesuffix("_kernel"), *shown])


def rows() -> list[dict[str, Any]]:
    """One row per kernel and architecture, with the Triton that this process imports."""
    import triton

    from gpuaug.augment.fused import cuda

    found: dict[tuple[str, int], dict[str, Any]] = {}
    for capability in LIMITS:
        made: dict[Any, Any] = {}
        with compilers(capability, made):
            cuda.normal_field(torch.zeros((2, 2), dtype=torch.int64), 3 * 224 * 224)
            for dtype in (torch.uint8, torch.float32):
                for interpolation in ("bilinear", "bicubic"):
                    crop(torch.zeros((2, 448, 448, 3), dtype=dtype), interpolation)
            gather(torch.zeros((2, 640, 640, 3), dtype=torch.uint8))
            gather(torch.zeros((2, 640, 640), dtype=torch.int32))
        for recipe in RECIPES:
            made |= compiled(recipe, capability)[0]
        for key, kernel in made.items():
            row = examine(kernel, key)
            del row["code"]
            row |= {"triton": triton.__version__, "capability": capability, "kernel": label(key)}
            other = found.setdefault((row["kernel"], capability), row)  # to another dtype, say: the larger one counts
            if row["registers"] > other["registers"]:
                other.update(row)
        print(f"Triton {triton.__version__}, sm_{capability}: {len(made)} kernels", file=sys.stderr, flush=True)
    return list(found.values())


def table(report: Any) -> str:
    """One line per kernel and Triton; a column per architecture: registers, occupancy."""
    lines = [
        f"{report['date']}; batches of 32 images of 224 x 224, uint8 to bfloat16. Registers per thread, occupancy.", "",
        "| kernel | Triton | " + " | ".join(f"sm_{c}" for c in LIMITS) + " | sm_90: shared memory, instructions |",
        "|---|---|" + "---|" * (len(LIMITS) + 1),
    ]  # fmt: skip
    cells = {(r["kernel"], r["triton"], r["capability"]): r for r in report["rows"]}
    versions = dict.fromkeys(r["triton"] for r in report["rows"])
    for kernel in dict.fromkeys(r["kernel"] for r in report["rows"]):
        for version in versions:
            own = [cells[kernel, version, c] for c in LIMITS]
            shown = [f"{r['registers']}, {r['occupancy']:.0%}" for r in own]
            hopper = cells[kernel, version, 90]
            more = f"{hopper['shared']:,} B, {hopper['instructions']:,}"
            lines.append(f"| {kernel} | {version} | {' | '.join(shown)} | {more} |")
    spilled, few = bad(report)
    lines += ["", f"{len(report['rows'])} compilations, {spilled} with spills, {few} with too few warps (`OCCUPANCY`)."]
    return "\n".join(lines)


def bad(report: Any) -> tuple[int, int]:
    """The numbers of compilations with spills, and with an occupancy below ``OCCUPANCY``."""
    rows = report["rows"]
    spilled = sum(r["local"] > 0 or r["spills"] > r["stack"] // 2 for r in rows)
    return spilled, sum(r["occupancy"] < OCCUPANCY[r["capability"]] for r in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", nargs="+", default=[], help="releases to install and compile with")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "tritons", help="of the releases")
    readme.add_arguments(parser)
    args = parser.parse_args()
    if readme.show(args, "compile_kernels.py", table):
        return 0
    report: dict[str, Any] = {"date": str(np.datetime64("today")), "rows": []}
    for version in args.triton:
        folder = args.folder / version
        if not folder.exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
            subprocess.run([*pip, f"triton=={version}"], check=True)
        path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        file = folder / "rows.json"
        command = [sys.executable, __file__, "--json", str(file)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
        report["rows"] += json.loads(file.read_text())["rows"]
    if not args.triton:
        report["rows"] = rows()
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
    return 1 if any(bad(report)) else 0


if __name__ == "__main__":
    sys.exit(main())
