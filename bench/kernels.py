"""The CUDA kernels alone, on a GPU: device time compared with a copy, launches and host time per batch.

    python bench/kernels.py --json kernels.json
    python bench/kernels.py --tune --json kernels.json     # other block sizes too, a minute more

`bytes` is the least that must be moved: every input read once, every output written once. The work is queued while the
device is busy, so the time between two events is device time only. The inputs alternate, so they are not in a cache.
`host` is the whole call with lowering and upload of the program, without waiting for the device.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

INPUTS = 4  # of 38 MB at B = 256: more than the cache holds
REPEATS = 20
BLOCKS = [(512, 1), (512, 2), (1024, 1), (1024, 2), (1024, 4), (2048, 2), (2048, 4), (2048, 8), (4096, 8)]
TILES = [
    ((64, 32, 16), 4), ((64, 32, 32), 4), ((64, 32, 16), 8), ((32, 32, 16), 4), ((32, 64, 16), 4), ((64, 64, 16), 8),
]  # fmt: skip


def on_device(queue: Callable[[], Any]) -> float:
    """Device seconds of the queued work, the median of five."""
    found = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(60_000_000)  # some 30 ms, in which the host queues
        begin.record()
        queue()
        late = begin.query()
        end.record()
        torch.cuda.synchronize()
        if late:
            print("  (the device did not wait for the host: this time holds the host's)", flush=True)
        found.append(begin.elapsed_time(end) / 1e3)
    return float(np.median(found))


def copy_rate(moved: int) -> float:
    """Bytes per second (read and written) of device copies of the same size."""
    pairs = [[torch.empty(moved // 2, dtype=torch.uint8, device="cuda").random_() for _ in range(2)] for _ in range(4)]

    def queue() -> None:
        for k in range(REPEATS):
            pairs[k % 4][0].copy_(pairs[k % 4][1])

    queue()
    return REPEATS * moved / on_device(queue)


class Case:
    """All views of a recipe for one batch of random images, smooth enough to use every branch of the colour code."""

    def __init__(self, recipe: str, batch: int, dtype: torch.dtype, channels_last: bool) -> None:
        import gpuaug
        from gpuaug.augment.fused.backend import FusedBackend

        overrides = ["augment=standard", "augment.ops.jitter.order=[0,1,2,3]"] if recipe == "standard" else []
        name = {"standard_random": "standard"}.get(recipe, recipe)
        augment = gpuaug.build(gpuaug.compose("train", [*(overrides or [f"augment={name}"]), "source.root=."]).augment)
        self.recipe, self.batch, self.dtype, self.channels_last = recipe, batch, dtype, channels_last
        drawn = augment.draw(seed=0, epoch=0, indices=np.arange(batch))
        self.views: list[tuple[Any, Any, list[torch.Tensor]]] = []
        for v in augment.views:
            size, at = v.augment.crop.size, (v.name, v.copy)
            chosen = [
                p.draw(drawn.uniforms[(*at, p.name)], size, drawn.keys.get((*at, p.name))) for p in v.augment.prepared
            ]
            low = torch.randint(0, 256, (batch, 3, size[0] // 8, size[1] // 8), device="cuda").float()
            images = torch.nn.functional.interpolate(low, size=size, mode="bilinear").round().to(torch.uint8)
            images = images.permute(0, 2, 3, 1).contiguous()
            inputs = [images.roll(k, 0) for k in range(INPUTS)]
            self.views.append((FusedBackend(v.augment.prepared, v.augment.normalize), chosen, inputs))

    @property
    def moved(self) -> int:
        return sum(inputs[0].numel() * (1 + self.dtype.itemsize) for _, _, inputs in self.views)

    def whole(self, k: int = 0) -> None:
        """The function that the loader calls."""
        memory_format = torch.channels_last if self.channels_last else torch.contiguous_format
        for backend, chosen, inputs in self.views:
            backend(inputs[k % INPUTS], chosen, dtype=self.dtype, memory_format=memory_format)

    def queued(self) -> Callable[[], None] | None:
        """The kernels without lowering and upload; None if an operation draws a field or runs through Kornia."""
        from gpuaug.augment.fused import backend as fused
        from gpuaug.augment.fused import cuda as triton_kernels
        from gpuaug.augment.fused import cuda_steps

        work = []
        for backend, chosen, inputs in self.views:
            if len(backend._parts) > 1 or backend._parts[0].columns is None:
                return None
            size = tuple(inputs[0].shape[1:3])
            code, args = backend._parts[0].program(chosen, size, len(inputs[0]))
            if (code == fused.Code.NOISE).any():
                return None
            program = cuda_steps.upload(code, args, fused.warp_ramps(size), *backend._affine, inputs[0].device)
            work.append((program, inputs))

        def queue() -> None:  # sums of gray add up over the repeats: other colours, the same work
            for k in range(REPEATS):
                for program, inputs in work:
                    triton_kernels.launch(
                        inputs[k % INPUTS], program, dtype=self.dtype, channels_last=self.channels_last
                    )

        return queue


def launches(run: Callable[[], Any]) -> int:
    """Number of kernels that a call launches, without copies."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    return sum(e.count for e in trace.key_averages() if "LaunchKernel" in e.key)


def measure(case: Case) -> dict[str, Any]:
    begin = time.perf_counter()
    case.whole()
    torch.cuda.synchronize()
    first = time.perf_counter() - begin
    host = []
    for k in range(30):
        begin = time.perf_counter()
        case.whole(k)
        host.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
    queue = case.queued()
    row: dict[str, Any] = {
        "recipe": case.recipe, "batch": case.batch, "dtype": str(case.dtype).removeprefix("torch."),
        "channels_last": case.channels_last, "views": len(case.views), "bytes": case.moved, "first_call_seconds": first,
        "launches": launches(case.whole), "host_microseconds": 1e6 * float(np.median(host)),
    }  # fmt: skip
    if queue is not None:
        queue()
        seconds = on_device(queue) / REPEATS
        row |= {"device_microseconds": 1e6 * seconds, "bytes_per_second": case.moved / seconds}
        row["copy_bytes_per_second"] = copy_rate(case.moved)
        row["share_of_copy"] = row["bytes_per_second"] / row["copy_bytes_per_second"]
    return row


def tune(recipe: str) -> list[dict[str, Any]]:
    """Device time with other block sizes and numbers of warps; B = 256, bfloat16."""
    from gpuaug.augment.fused import cuda as kernels

    case, rows = Case(recipe, 256, torch.bfloat16, False), []
    as_shipped = (kernels.BLOCK, kernels.WARPS, kernels.TILE, kernels.BLUR_WARPS)
    candidates = [(b, w, *as_shipped[2:]) for b, w in BLOCKS]
    if recipe == "simclr":
        candidates = [(*as_shipped[:2], t, w) for t, w in TILES]
    for candidate in candidates:
        kernels.BLOCK, kernels.WARPS, kernels.TILE, kernels.BLUR_WARPS = candidate
        row: dict[str, Any] = {"recipe": recipe, "block, warps, tile, blur_warps": candidate}
        try:
            queue = case.queued()
            assert queue is not None
            queue()
            seconds = on_device(queue) / REPEATS
            row |= {"device_microseconds": 1e6 * seconds, "bytes_per_second": case.moved / seconds}
        except Exception as error:  # too many registers for so many warps, say: no candidate
            row["reason"] = f"{type(error).__name__}: {str(error)[:200]}"
        rows.append(row)
        shipped = "  <- as shipped" if candidate == as_shipped else ""
        print(f"  {candidate}: {row.get('device_microseconds', row.get('reason'))}{shipped}", flush=True)
    kernels.BLOCK, kernels.WARPS, kernels.TILE, kernels.BLUR_WARPS = as_shipped
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    recipes = ["standard", "standard_random", "simclr", "dino", "randaugment_torchvision", "flip"]
    parser.add_argument("--recipe", nargs="+", default=recipes)
    parser.add_argument("--batch", nargs="+", type=int, default=[256, 64])
    parser.add_argument("--tune", action="store_true", help="also other block sizes, for standard and simclr")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/kernels.py needs a CUDA device. Found: none.")
        return 1
    import triton

    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "results": [], "tuning": [],
    }  # fmt: skip
    print(f"{report['device']}, torch {report['torch']}, triton {report['triton']}")
    failed = 0
    for recipe in args.recipe:
        for batch in args.batch:
            formats = [(torch.bfloat16, False)]
            if recipe == "standard" and batch == args.batch[0]:
                formats += [(torch.bfloat16, True), (torch.float16, False), (torch.float32, False)]
            for dtype, channels_last in formats:
                try:
                    row = measure(Case(recipe, batch, dtype, channels_last))
                except Exception as error:  # the other rows are worth having
                    row = {"recipe": recipe, "batch": batch, "reason": f"{type(error).__name__}: {str(error)[:500]}"}
                    failed += 1
                report["results"].append(row)
                print(json.dumps(row), flush=True)
                if args.json:
                    args.json.write_text(json.dumps(report, indent=1) + "\n")
    for recipe in ("standard", "simclr") if args.tune else ():
        print(f"{recipe}: block, warps, tile, warps of the blur: microseconds of the device")
        report["tuning"] += tune(recipe)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
