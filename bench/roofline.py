"""Paper, not a measurement: the time in which GPUs could move the bytes that a recipe's kernels read and write.

    python bench/roofline.py --json roofline.json            # some minutes on one core, no GPU needed
    python bench/roofline.py --recipe standard --batch 64

The recipe is lowered as for CUDA, and Triton's interpreter runs its kernels on the CPU. So bytes and launches come from
the launches themselves: for each kernel, every byte counts once that it reads, and once that it writes. An operation of
torch counts as one launch that reads its inputs and writes its outputs. The interpreter is slow, so a part of the batch
runs (`--traced`) with small images (`SIDES`). Two sizes separate the bytes per pixel from those per sample.

`paper` is bytes / peak bandwidth. It knows nothing of caches, arithmetic, and gaps between kernels. `limit` is the time
to read the uint8 pixels once and to write the result once. `host` is the CPU time here to make a batch's programs and
to pack them for the upload, without random values and without the launches themselves.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from bisect import bisect
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # Triton decides when it is first imported

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.readme import add_arguments, processor, show

RECIPES = ("flip", "standard", "simclr", "randaugment_torchvision", "dino")
BANDWIDTH = {  # peak bytes per second of one GPU, from NVIDIA's product pages and data sheets
    "T4": 320e9,  # nvidia.com/en-us/data-center/tesla-t4: 320 GB/s
    "A100": 2039e9,  # nvidia.com/en-us/data-center/a100: 80 GB, SXM, 2,039 GB/s
    "H100": 3350e9,  # nvidia.com/en-us/data-center/h100: SXM, 3.35 TB/s
    "H200": 4800e9,  # nvidia.com/en-us/data-center/h200: 4.8 TB/s
    "B200": 8000e9,  # nvidia.com/en-us/data-center/dgx-b200: 64 TB/s for eight
}
DTYPE = torch.bfloat16
SIDES = (16, 32)  # of the images that are traced, plus the remainder of the recipe's own side divided by 8
ROUNDS = 20  # of the host's time


class Launch(NamedTuple):
    """A kernel's launch, or an operation of torch, and the bytes that it reads and writes."""

    name: str
    ours: bool
    moved: int


# --- what a launch reads and writes


class Touched:
    """The bytes of a kernel's tensors that it reads or writes, each counted once for each."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        sizes = {t.data_ptr(): -(-t.numel() * t.itemsize // 8) * 8 for t in tensors if t.numel()}
        self.starts = sorted(sizes)
        self.marks = [[np.zeros(sizes[at], dtype=np.uint8) for at in self.starts] for _ in ("read", "written")]

    def mark(self, written: bool, pointers: Any, mask: Any, itemsize: int) -> None:
        at = np.broadcast_to(pointers, mask.shape)[mask]
        if at.size:
            number = bisect(self.starts, int(at[0])) - 1
            items = self.marks[written][number].view(f"u{itemsize}")
            items[(at - np.uint64(self.starts[number])) // np.uint64(itemsize)] = np.iinfo(items.dtype).max

    @property
    def moved(self) -> int:
        return sum(int(np.count_nonzero(marks)) for kind in self.marks for marks in kind)


class Watched:
    """Triton's interpreter, with a record of loads and stores."""

    def __init__(self) -> None:
        from triton.runtime import interpreter

        self.touched = Touched([])
        builder = interpreter.InterpreterBuilder
        load, store, add = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw
        call = interpreter.InterpretedFunction.__call__

        def mark(pointers: Any, mask: Any, *kinds: bool) -> None:
            itemsize = np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize
            for written in kinds:
                self.touched.mark(written, pointers.data, mask.data, itemsize)

        def loaded(this: Any, pointers: Any, mask: Any, *more: Any) -> Any:
            mark(pointers, mask, False)
            return load(this, pointers, mask, *more)

        def stored(this: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
            mark(pointers, mask, True)
            return store(this, pointers, value, mask, *more)

        def added(this: Any, what: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
            mark(pointers, mask, False, True)
            return add(this, what, pointers, value, mask, *more)

        def assembly(this: Any, code: str, constraints: str, values: Any, types: Any, *more: Any) -> Any:
            """The interpreter knows no PTX. The first operand serves, because no address depends on a pixel."""
            handle = interpreter.TensorHandle(values[0].data, types[0].scalar)
            return type("Result", (), {"get_result": staticmethod(lambda _: handle)})

        def called(function: Any, *args: Any, **options: Any) -> Any:
            """Call our functions without the interpreter's patches, which the kernel's own call has made already."""
            ours = function.fn.__module__.startswith("gpuaug.")
            return function.rewrite()(*args, **options) if ours else call(function, *args, **options)

        made = {"masked_load": loaded, "masked_store": stored, "atomic_rmw": added, "inline_asm": assembly}
        self.patches = [patch.object(builder, f"create_{name}", function) for name, function in made.items()]
        self.patches.append(patch.object(interpreter.InterpretedFunction, "__call__", called))


_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"}
_FROM_ROWS = {"index_select", "gather", "index"}  # read as much as they write
_INTO_ROWS = {"index_copy_", "index_put_", "scatter_", "scatter_add_"}  # write as much as their last tensor has
_ONLY_WRITTEN = {"copy_", "fill_", "zero_"} | _INTO_ROWS


class Trace(TorchDispatchMode):
    """The launches of ours and of torch. ``watched``: the interpreter that runs ours."""

    def __init__(self, watched: Watched, queue: Callable[..., Any]) -> None:
        super().__init__()
        self.watched, self.real_queue, self.inside = watched, queue, False
        self.launches: list[Launch] = []
        self.on_device: set[StorageWeakRef] = set()  # what a kernel touched, or torch made of it

    def queue(self, kernel: Any, grid: Any, device: Any, *args: Any, **constants: Any) -> None:
        """Run a kernel in place of ``cuda._queue``."""
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        self.put(tensors)
        self.watched.touched, self.inside = Touched(tensors), True
        self.real_queue(kernel, grid, device, *args, **constants)
        self.inside = False
        self.launches.append(Launch(kernel.__name__, True, self.watched.touched.moved))

    def put(self, tensors: list[torch.Tensor]) -> None:
        self.on_device |= {StorageWeakRef(t.untyped_storage()) for t in tensors}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if self.inside:
            return made
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not any(StorageWeakRef(t.untyped_storage()) in self.on_device for t in inputs):
            return made  # the host's own
        outputs = [t for t in tree_leaves(made) if isinstance(t, torch.Tensor)]
        self.put(outputs)
        name = function.overloadpacket.__name__
        if not function.is_view and name not in _FREE:
            read, written = {t.data_ptr(): t for t in inputs}, outputs
            if name in _ONLY_WRITTEN:
                read.pop(inputs[0].data_ptr(), None)
            if name in _FROM_ROWS:
                read[inputs[0].data_ptr()] = outputs[0]
            if name in _INTO_ROWS:
                written = inputs[-1:]
            self.launches.append(Launch(name, False, sum(map(_bytes, [*read.values(), *written]))))
        return made


def _bytes(x: torch.Tensor) -> int:
    """Bytes of a tensor. Those of an expanded axis count once."""
    sizes = [n for n, stride in zip(x.shape, x.stride(), strict=True) if stride]
    return int(np.prod(sizes, dtype=np.int64)) * x.itemsize if x.numel() else 0


# --- recipes


class View(NamedTuple):
    """A view's backend, and its parameters for images of each side of ``SIDES``."""

    backend: Any
    size: tuple[int, int]
    small: list[tuple[tuple[int, int], list[Any]]]  # sizes and parameters


def views(recipe: str, batch: int) -> list[View]:
    import gpuaug
    from gpuaug.augment.fused.backend import FusedBackend

    augment = gpuaug.build(gpuaug.compose("train", [f"augment={recipe}", "source.root=."]).augment).at(0)
    drawn = augment.draw(seed=0, epoch=0, indices=np.arange(batch))
    made = []
    for v in augment.views:
        size, at = (224, 224) if v.augment.crop is None else v.augment.crop.size, (v.name, v.copy)
        small = []
        for side in SIDES:
            own = (side + size[0] % 8, side + size[1] % 8)  # a width that 8 divides takes another branch
            uniforms, keys = drawn.uniforms, drawn.keys
            chosen = [p.draw(uniforms[*at, p.name], own, keys.get((*at, p.name))) for p in v.augment.prepared]
            small.append((own, chosen))
        made.append(View(FusedBackend(v.augment.prepared, v.augment.normalize), size, small))
    return made


def traced(view: View, number: int, batch: int) -> list[Launch]:
    """The launches for images of the side ``SIDES[number]``."""
    from gpuaug.augment.fused import backend as fused
    from gpuaug.augment.fused import cuda

    (height, width), chosen = view.small[number]
    images = torch.zeros((batch, height, width, 3), dtype=torch.uint8)
    with ExitStack() as stack:
        watched = Watched()
        trace = Trace(watched, cuda._queue)
        for each in (
            *watched.patches,
            patch.object(cuda, "_queue", trace.queue),
            patch.object(fused, "library", lambda: None),
            patch.object(fused, "triton_kernels", lambda device: cuda),
            patch.object(fused, "without_triton", _raise),
        ):
            stack.enter_context(each)
        trace.put([images])
        stack.enter_context(trace)
        view.backend(images, chosen, dtype=DTYPE)
    return trace.launches


def _raise(why: str) -> None:
    raise RuntimeError(why)


class NoKernels:
    """In place of the kernels: memory for their results."""

    @staticmethod
    def launch(x: torch.Tensor, program: Any, *, dtype: torch.dtype, **_: Any) -> torch.Tensor:
        height, width = x.shape[1:3] if x.dtype == torch.uint8 else x.shape[2:]
        return torch.empty((len(x), 3, height, width), dtype=dtype)

    @staticmethod
    def normal_field(keys: torch.Tensor, count: int) -> torch.Tensor:
        return torch.empty((len(keys), count))


def host_milliseconds(made: list[View], batch: int) -> float:
    """CPU milliseconds of the calling thread for the programs of all views and their packing."""
    from gpuaug.augment.fused import backend as fused

    took = []
    with patch.object(fused, "library", lambda: None), patch.object(fused, "triton_kernels", lambda _: NoKernels):
        for _ in range(ROUNDS):
            start = time.thread_time()
            for view in made:
                size, chosen = view.small[0]
                view.backend(torch.empty((batch, *size, 3), dtype=torch.uint8), chosen, dtype=DTYPE)
            took.append(time.thread_time() - start)
    return 1e3 * float(np.median(took))


def measure(recipe: str, batch: int, count: int) -> dict[str, Any]:
    """The figures of a batch, of which ``count`` samples are traced."""
    launches: list[Launch] = []
    moved = pixels = 0.0
    for view in views(recipe, count):
        small, large = (traced(view, number, count) for number in range(len(SIDES)))
        names = [[launch.name for launch in found] for found in (small, large)]
        if names[0] != names[1]:
            raise RuntimeError(f"{recipe}: the launches depend on the size of the images: {names}")
        first, second = (sum(launch.moved for launch in found) for found in (small, large))
        few, more = (count * size[0] * size[1] for size, _ in view.small)
        own = count * view.size[0] * view.size[1]
        moved += (first + (second - first) / (more - few) * (own - few)) * batch / count
        pixels += own * batch / count
        launches += large
    least = pixels * 3 * (1 + DTYPE.itemsize)
    made = views(recipe, batch)
    return {
        "recipe": recipe, "batch": batch, "traced": count, "views": len(made), "pixels": pixels,
        "launches": sum(launch.ours for launch in launches),
        "torch_launches": sum(not launch.ours for launch in launches),
        "bytes": moved, "least_bytes": least, "host_milliseconds": host_milliseconds(made, batch),
        "paper_microseconds": {name: 1e6 * moved / rate for name, rate in BANDWIDTH.items()},
        "limit_microseconds": {name: 1e6 * least / rate for name, rate in BANDWIDTH.items()},
    }  # fmt: skip


def table(report: dict[str, Any]) -> str:
    lines = [
        f"**Paper: no GPU ran.** Lowered on {report['processor']}, {report['date']}; torch {report['torch']}, "
        f"triton {report['triton']}; {str(DTYPE).removeprefix('torch.')}. Microseconds per batch, paper / limit.",
        "",
        "| recipe | B | views | launches: ours, torch's | bytes per pixel: moved, least | host, ms | "
        + " | ".join(BANDWIDTH) + " |",
        "|" + "---|" * (6 + len(BANDWIDTH)),
    ]  # fmt: skip
    for r in report["results"]:
        cells = [
            r["recipe"], r["batch"], r["views"], f"{r['launches']}, {r['torch_launches']}",
            f"{r['bytes'] / r['pixels']:.1f}, {r['least_bytes'] / r['pixels']:.0f}", f"{r['host_milliseconds']:.2f}",
            *(f"{r['paper_microseconds'][gpu]:,.0f} / {r['limit_microseconds'][gpu]:,.0f}" for gpu in BANDWIDTH),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", nargs="+", default=RECIPES)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--traced", type=int, default=64, help="samples that the interpreter runs (default: 64)")
    add_arguments(parser)
    args = parser.parse_args()
    if show(args, "roofline.py", table):
        return 0
    import triton

    report: dict[str, Any] = {
        "processor": processor(), "date": datetime.date.today().isoformat(), "torch": torch.__version__,
        "triton": triton.__version__, "results": [],
    }  # fmt: skip
    for recipe in args.recipe:
        report["results"].append(measure(recipe, args.batch, min(args.traced, args.batch)))
        print(f"{recipe}: done", file=sys.stderr, flush=True)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
