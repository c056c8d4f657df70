"""Compares two checkouts of this repository: processor time of the same work, measured in turns.

    git worktree add /tmp/before COMMIT
    python bench/checkouts.py /tmp/before                           # before against this checkout
    python bench/checkouts.py /tmp/before --only flip det --rounds 40

A change of one function can make another one slower, because it changes what the compiler inlines. Each checkout runs
in a process of its own, with one thread. A round takes each case once in each checkout, in alternating order. A column
has the median of the rounds' ratios, new / old, and the ratio of the fastest tenths, which other work on the machine
disturbs least. Differences below 2 % are noise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
AUGMENT = ("flip", "standard", "randaugment_torchvision", "simclr", "dino")
LOADER = ("flip", "standard")
TARGETS = {"det": "det_rtdetr", "seg": "seg_torchvision", "warp": "flip_affine_jitter"}
CASES = (
    *(f"augment {recipe}" for recipe in AUGMENT),
    *(f"tensors {dtype}" for dtype in ("uint8", "float32")),
    *(f"loader {recipe}" for recipe in LOADER),
    *(f"targets {name}" for name in TARGETS),
)
LEAST = 0.4  # seconds of processor time per round


# --- in the process of a checkout


def work(case: str, photographs: str, pictures: str) -> Callable[[], object]:
    """What one call of a case does, with the modules of the checkout that comes first in ``sys.path``."""
    import torch

    kind, _, name = case.partition(" ")
    if kind == "augment":
        from bench.augment import Case

        return Case(name, 64, 224, "cpu", torch.float32).ours("fused")
    if kind == "tensors":
        import gpuaug
        from bench.augment import photographs as images_of

        augment = gpuaug.build(gpuaug.compose("train", ["augment=flip", "source.root=."]).augment)
        images = images_of(64, 256).permute(0, 3, 1, 2).contiguous()
        images = images if name == "uint8" else images.float() / 255
        return lambda: augment(images, seed=0, indices=range(64))
    from contestants import Spec, ours

    if kind == "loader":
        return ours(Spec("ours", name, photographs, 64, 0, 1, "cpu", "float32"))
    from target_contestants import loader as with_targets
    from target_contestants import recipe

    kinds = ("boxes",) if name == "det" else ("masks",)
    own = with_targets(Spec("", TARGETS[name], pictures, 32, 0, 1, "cpu", "float32"), kinds, recipe(TARGETS[name]))
    loader = own.__enter__()
    return lambda: sum(len(batch.images) for batch in loader)


def serve(photographs: str, pictures: str) -> None:
    """Answer each case on standard input with the seconds of processor time of a call."""
    import torch

    torch.set_num_threads(1)
    ready: dict[str, tuple[Callable[[], object], int]] = {}
    for line in sys.stdin:
        case = line.strip()
        if case not in ready:
            call = work(case, photographs, pictures)
            call()
            start = time.process_time()
            call()
            ready[case] = call, max(1, round(LEAST / max(time.process_time() - start, 1e-4)))
        call, count = ready[case]
        start = time.process_time()
        for _ in range(count):
            call()
        print(json.dumps((time.process_time() - start) / count), flush=True)


# --- the comparison


class Checkout:
    """The process of a checkout."""

    def __init__(self, root: Path, photographs: Path, pictures: Path) -> None:
        path = os.pathsep.join([str(root), str(root / "bench"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        code = (
            f"import runpy, sys; sys.path[:0] = {[str(root), str(root / 'bench')]!r}; import gpuaug; "
            f"assert gpuaug.__file__.startswith({str(root)!r}), gpuaug.__file__; "
            f"runpy.run_path({str(ROOT / 'bench/checkouts.py')!r}, run_name='child')['serve'](*sys.argv[1:])"
        )
        command = [sys.executable, "-c", code, str(photographs), str(pictures)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=root
        )

    def seconds(self, case: str) -> float:
        """Processor time of one call."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(case + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line[0].isdigit():  # libraries may print other lines
                return float(line)
        raise RuntimeError(f"`{case}` failed in this checkout; see the error above")

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def fastest(values: list[float]) -> float:
    """The tenth percentile."""
    return sorted(values)[len(values) // 10]


def compare(before: Path, cases: list[str], rounds: int, data: Path) -> list[dict[str, Any]]:
    """A row for each case."""
    import photographs
    import scenes

    photos, pictures = data / "photographs", data / "scenes"
    if not photos.exists():
        photographs.cut(photos, count=256)
    if not (pictures / "instances.json").exists():
        scenes.write(pictures, count=96)
    both = [Checkout(root, photos / "train", pictures) for root in (before.resolve(), ROOT)]
    rows = []
    try:
        for case in cases:
            times: list[list[float]] = [[], []]
            for k in range(rounds + 1):
                for number in (0, 1) if k % 2 else (1, 0):
                    seconds = both[number].seconds(case)
                    if k:  # the first round warms up
                        times[number].append(seconds)
            old, new = times
            ratios = [b / a for a, b in zip(old, new, strict=True)]
            rows.append(
                {"case": case, "ratio": statistics.median(ratios), "fastest": fastest(new) / fastest(old),
                 "before_ms": 1e3 * fastest(old), "now_ms": 1e3 * fastest(new)}
            )  # fmt: skip
            print("{case:32} {ratio:6.3f} {fastest:8.3f} {before_ms:9.2f} {now_ms:9.2f}".format(**rows[-1]), flush=True)
    finally:
        for checkout in both:
            checkout.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="folder of the older checkout")
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the cases' names")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir(), "gpuaug-checkouts"))
    args = parser.parse_args()
    cases = [case for case in CASES if any(part in case for part in args.only)]
    print(f"{'case':32} {'median':>6} {'fastest':>8} {'before ms':>9} {'now ms':>9}")
    compare(args.before, cases, args.rounds, args.data)


if __name__ == "__main__":
    main()
