"""CPU time of the main process's threads for a batch, stage by stage, without the work on pixels.

    python bench/host.py                                # standard and dino, B = 256, a few seconds
    python bench/host.py --other ../other --json host.json   # another checkout too, in turns

The images have 8 x 8 pixels, so only Python takes time. The views have the recipe's own size, and the graph is the one
for CUDA, run by DALI's operators for the CPU. Times are CPU times of the calling thread (`time.thread_time`), without
other work on the machine and without DALI's threads. Launching kernels needs a GPU and is not included.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent.parent
THREADS = (("headers", "draw", "boxes"), ("plan", "feed"), ("program",))  # stages of each thread of a loader
STAGES = tuple(stage for thread in THREADS for stage in thread)


def measure(recipe: str, batch_size: int, rounds: int) -> dict[str, float]:
    """CPU milliseconds of the thread by stage, the median of ``rounds`` batches."""
    import torch
    from PIL import Image

    import gpuaug
    from gpuaug.batch import EncodedBatch
    from gpuaug.decode.dali import CudaPipeline
    from gpuaug.decode.decoder import Decode

    rng, encoded = np.random.default_rng(0), []
    for _ in range(batch_size):
        out = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(out, "JPEG")
        encoded.append(out.getvalue())
    batch = EncodedBatch(
        images=tuple(np.frombuffer(data, dtype=np.uint8) for data in encoded),
        labels=None,
        indices=torch.arange(batch_size),
        repeats=torch.zeros(batch_size, dtype=torch.int64),
        valid=torch.ones(batch_size, dtype=torch.bool),
    )
    augment: Any = gpuaug.build(gpuaug.compose("train", [f"augment={recipe}", "source.root=."]).augment)
    decoder = Decode(backend="dali", num_threads=2).open("cpu")
    graph: Any = CudaPipeline(decoder.device, num_threads=2, operators="cpu")
    took: dict[str, list[float]] = {name: [] for name in (*STAGES, "copy")}

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begin = time.thread_time()
            result = work(*args)
            took[name].append(1e3 * (time.thread_time() - begin))
            return result

        return call

    graph.run = timed("feed", graph.run)
    decoder._dali = graph
    if hasattr(graph, "_copied"):  # the CPU moves the pixels itself, where CUDA queues a copy: no part of the sum
        graph._copied = timed("copy", graph._copied)
    for k in range(rounds + 3):
        look = timed("headers", decoder.read_headers)(batch)
        drawn = timed("draw", lambda: augment.draw(seed=0, epoch=k, indices=np.arange(batch_size)))()  # noqa: B023
        boxes = timed("boxes", augment.windows)(drawn, look.height, look.width)
        images, _ = timed("plan", decoder.pixels)(look, boxes)
        took["plan"][-1] -= took["feed"][-1]
        took["feed"][-1] -= sum(took["copy"])
        took["copy"].clear()
        timed("program", programs)(augment, drawn, [tuple(x.shape[1:3]) for x in images])
        del images
    decoder.close()
    return {name: float(np.median(took[name][3:])) for name in STAGES}


def programs(augment: Any, drawn: Any, sizes: list[tuple[int, int]]) -> None:
    """Parameters and programs of every view."""
    for view, size in zip(augment.views, sizes, strict=True):
        at = view.name, view.copy
        made = [p.draw(drawn.uniforms[*at, p.name], size, drawn.keys.get((*at, p.name))) for p in view.augment.prepared]
        for part in executor(view.augment)._parts:
            if part.columns is not None:
                part.program([made[n] for n in part.numbers], size, len(drawn.uniforms[*at, "crop"]))


def executor(augment: Any) -> Any:
    """The recipe's fused backend, which holds the tables of the programs."""
    if augment._executor is None:
        from gpuaug.augment.fused.backend import FusedBackend

        augment._executor = FusedBackend(augment.prepared, augment.normalize)
    return augment._executor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", nargs="+", default=["standard", "dino"])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3, help="processes per checkout and recipe")
    parser.add_argument("--other", type=Path, help="another checkout of gpuaug, measured in turns with this one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        sys.path.insert(0, args.one)
        print(json.dumps(measure(args.recipe[0], args.batch, args.rounds)))
        return 0
    places = {"here": HERE, **({"other": args.other.resolve()} if args.other else {})}
    rows = []
    for recipe in args.recipe:
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in places}
        for _ in range(args.turns):
            for name, place in places.items():
                command = [sys.executable, __file__, "--one", str(place), "--recipe", recipe]
                command += ["--batch", str(args.batch), "--rounds", str(args.rounds)]
                done = subprocess.run(command, capture_output=True, text=True, timeout=300)
                if done.returncode:
                    raise SystemExit(done.stderr)
                turns[name].append(json.loads(done.stdout.splitlines()[-1]))
        for name, found in turns.items():
            stages = {stage: float(np.median([one[stage] for one in found])) for stage in found[0]}
            threads = [sum(stages[stage] for stage in thread) for thread in THREADS]
            rows.append({"recipe": recipe, "checkout": name, **stages, "busiest": max(threads), "all": sum(threads)})
    columns = (*STAGES, "busiest", "all")
    print(f"| ms of the CPU, B = {args.batch} | checkout | {' | '.join(STAGES)} | busiest thread | all |")
    print("|" + "---|" * (len(columns) + 2))
    for row in rows:
        print(f"| {row['recipe']} | {row['checkout']} | {' | '.join(f'{row[name]:.2f}' for name in columns)} |")
    if args.json:
        args.json.write_text(json.dumps({"batch": args.batch, "results": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
