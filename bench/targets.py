"""Compares loaders with masks, boxes and keypoints: from files to consumed batches, and the augment stage alone.

    python bench/targets.py --json targets.json --peer-python PYTHON     # everything that runs here
    python bench/targets.py --recipe seg_torchvision --who ours torchvision --peer-python PYTHON
    python bench/targets.py --table targets.json --readme bench/README.md
    python bench/targets.py --quick --json targets.json                  # shows that it runs, measures nothing

Photographs of 500 x 375 with seven things each (bench/scenes.py). Every contestant is a process of its own, and they
run in turns, as in bench/loader.py. The figures are medians of the rounds. Statistics of the first epoch's batches are
in the table too. Peers use their own random values, so the statistics should be similar, not equal.

The rows "stage" are ours alone, in one process, in turns: CPU time of one thread for the same recipe on decoded images,
without and with targets. Decoding is not included.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import readme
import scenes
from contestants import Spec
from loader import Contestant, machine
from target_contestants import DET, RECIPES, SEG, WARP, YOLO, loader, recipe

from gpuaug.targets.masks import decode

WHO = {  # who can do a recipe
    SEG: ("ours", "images_only", "torchvision", "torchvision_pil", "albumentations"),
    DET: ("ours", "torchvision", "torchvision_pil"),
    YOLO: ("ours", "torchvision", "ultralytics"),
    WARP: ("ours", "images_only", "albumentations", "kornia"),
}
EVERYBODY = tuple(dict.fromkeys(who for names in WHO.values() for who in names))
ELSEWHERE = ("torchvision", "torchvision_pil", "albumentations", "ultralytics")
# recipe, who, the smallest accepted ratio (for torchvision: the faster of both)
BARS = {
    (SEG, "torchvision"): 2.5, (DET, "torchvision"): 4.0, (YOLO, "torchvision"): 4.0, (YOLO, "ultralytics"): 2.0,
    (WARP, "albumentations"): 1.2, (WARP, "kornia"): 5.0,
}  # fmt: skip
STAGES = {(WARP, ("masks",)): 1.15, (SEG, ("masks",)): None, (WARP, ("boxes", "keypoints")): 1.02}


def data(folder: Path, count: int) -> Path:
    """Scenes, made once per folder."""
    out = folder / f"scenes_{count}"
    if not (out / "instances.json").exists():
        scenes.write(out, count=count)
    return out


# --- from files to batches


def end_to_end(args: argparse.Namespace, name: str, root: Path) -> list[dict[str, Any]]:
    """Measure every contestant. Returns a row for each."""
    rows, running = [], list[Contestant]()
    with contextlib.ExitStack() as stack:
        for who in [who for who in WHO[name] if who in args.who]:
            spec = Spec(who, name, str(root), args.batch, args.workers, args.threads, "cpu", "float32")
            python = (args.peer_python or sys.executable) if who in ELSEWHERE else sys.executable
            contestant = Contestant(spec, python, script="target_contestants.py")
            stack.callback(contestant.close)
            if contestant.reason is None:
                running.append(contestant)
                print(f"{name} {who}: ready after {contestant.first:.1f} s", flush=True)
            else:
                rows.append({"recipe": name, "who": who, "reason": contestant.reason})
                print(f"{name} {who}: not run: {contestant.reason}", flush=True)
        for _ in range(args.rounds):
            for contestant in running:
                if contestant.reason is None:
                    contestant.round()
        for contestant in running:
            row: dict[str, Any] = {"recipe": name, "who": contestant.spec.who}
            if contestant.reason is None:
                rates = contestant.rates
                row |= {
                    "images_per_second": statistics.median(rates), "rates": rates, "facts": contestant.facts,
                    "processor_us": 1e6 * contestant.processor / contestant.images,
                }  # fmt: skip
            else:
                row["reason"] = contestant.reason
            rows.append(row)
    mine = next((row["rates"] for row in rows if row["who"] == "ours" and "rates" in row), None)
    for row in rows:
        if mine and "rates" in row:
            row["ratios"] = [own / other for own, other in zip(mine, row["rates"], strict=True)]  # of each round
            row["ratio"] = statistics.median(row["ratios"])
    return rows


# --- the augment stage


def stages(args: argparse.Namespace, name: str, kinds: tuple[str, ...], root: Path) -> dict[str, Any]:
    """CPU time of one thread for the augment stage with targets, divided by the time without."""
    import torch

    torch.set_num_threads(1)
    spec = Spec("", name, str(root), args.stage_batch, 0, 1, "cpu", "float32")
    with loader(spec, kinds, recipe(name)) as made:
        pipeline = made.pipeline
        encoded = next(iter(pipeline.read(made.epoch_order, 0)))
        decoder, targets = pipeline.decoder, pipeline.targets
        info = decoder.read_headers(encoded)
        indices, augment = encoded.indices.numpy(), pipeline.recipe
        drawn = augment.draw(seed=0, epoch=0, indices=indices)
        windows = augment.windows(drawn, info.height, info.width)
        images, _ = decoder.pixels(info, windows)
        masks = None
        if "masks" in kinds:
            size = {"exif": 1, "max_pixels": 1 << 24}
            masks = [
                decode(data, stored=(int(height), int(width)), **size)
                for data, height, width in zip(encoded.masks, info.height, info.width, strict=True)
            ]

        def without() -> Any:
            drawn = augment.draw(seed=0, epoch=0, indices=indices)
            augment.windows(drawn, info.height, info.width)
            return augment.render(images, drawn)

        def added() -> Any:
            upright, _ = targets.upright(encoded, info, decoder)
            placed = targets.place(upright, windows, chosen, views=augment.views)
            if masks is not None:
                targets.sample(placed, iter([[*masks]]), decoder.device, threads=decoder.num_threads)
            return targets.finish(placed, encoded.indices, bad=[], keep=None, device=decoder.device)

        chosen = augment.choose(drawn, [window.size for window in windows])
        equal = torch.equal(without()[0], augment.render(images, drawn, chosen=chosen)[0])
        alone, more = _in_turns([without, added], rounds=4 * args.rounds)
    plain, whole = 1000 * statistics.median(alone), 1000 * (statistics.median(alone) + statistics.median(more))
    return {
        "recipe": name, "kinds": list(kinds), "without_ms": plain, "with_ms": whole, "batch": len(encoded),
        "ratios": [1 + b / a for a, b in zip(alone, more, strict=True)], "ratio": whole / plain, "pixels_equal": equal,
    }  # fmt: skip


def _in_turns(functions: list[Callable[[], Any]], *, rounds: int) -> list[list[float]]:
    """CPU seconds of this thread for each function in each round."""
    took: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds + 2):  # two rounds to warm up
        for k, function in enumerate(functions):
            began = time.thread_time()
            function()
            took[k].append(time.thread_time() - began)
    return [times[2:] for times in took]


# --- the table


def ratios(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The required ratios and the measured ones; None if a contestant did not run."""
    out: list[dict[str, Any]] = []
    measured = {row["recipe"] for row in report["results"]}
    for (name, peer), bar in BARS.items():
        if name not in measured:
            continue
        found = [
            row for row in report["results"] if row["recipe"] == name and row["who"].startswith(peer) and "ratio" in row
        ]
        best = min(found, key=lambda row: row["ratio"], default=None)
        values = (best["ratio"], min(best["ratios"]), max(best["ratios"])) if best else (None, None, None)
        out.append({"what": f"{name}: ours / {best['who'] if best else peer}", "values": values, "bar": f">= {bar}"})
    for row in report["stages"]:
        bar = STAGES.get((row["recipe"], tuple(row["kinds"])))
        values = (row["ratio"], min(row["ratios"]), max(row["ratios"]))
        what = f"{row['recipe']}, stage: with {' and '.join(row['kinds'])} / without"
        out.append({"what": what, "values": values, "bar": f"<= {bar}" if bar else ""})
    return out


def table(report: dict[str, Any]) -> str:
    m, s = report["machine"], report["settings"]
    lines = [
        f"{m['processor']}, {m['cores']} cores, {m['date']}, load {m['load_before']:.1f}; {s['count']} photographs of "
        f"500 x 375, batches of {s['batch']}, {s['workers']} workers, {s['threads']} threads, median of {s['rounds']} "
        "rounds (lowest to highest); " + ", ".join(f"{k} {v}" for k, v in m["versions"].items()),
        "",
        "| what | ratio | of the rounds | bar |",
        "|---|---|---|---|",
    ]
    for row in ratios(report):
        middle, low, high = row["values"]
        measured = "not run | " if middle is None else f"{middle:.2f} | {low:.2f} to {high:.2f}"
        lines.append(f"| {row['what']} | {measured} | {row['bar']} |")
    lines += ["", "| recipe | who | images/s | lowest to highest | ours is faster by | processor, ms | its batches |"]
    lines.append("|---" * 7 + "|")
    for row in report["results"]:
        start = f"| {row['recipe']} | {row['who']} |"
        if "reason" in row:
            lines.append(f"{start} not run: {row['reason']} | | | | |")
            continue
        facts = ", ".join(f"{name} {value:.3f}" for name, value in row["facts"].items() if value)
        spread = f"{min(row['rates']):,.0f} to {max(row['rates']):,.0f}"
        ratio = f"{row['ratio']:.2f}×" if "ratio" in row else ""
        processor = f"{row['processor_us'] / 1000:.2f}"
        lines.append(f"{start} {row['images_per_second']:,.0f} | {spread} | {ratio} | {processor} | {facts} |")
    if report["stages"]:
        stage = f"stage of recipe, batches of {s['stage_batch']}"
        lines += ["", f"| {stage} | with | ms without | ms with | images are equal |", "|---" * 5 + "|"]
    for row in report["stages"]:
        equal = "yes" if row["pixels_equal"] else "NO"
        start = f"| {row['recipe']} | {', '.join(row['kinds'])} |"
        lines.append(f"{start} {row['without_ms']:.2f} | {row['with_ms']:.2f} | {equal} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", nargs="*", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--who", nargs="+", default=list(EVERYBODY), choices=EVERYBODY)
    parser.add_argument("--no-stages", action="store_true", help="only from files to batches")
    parser.add_argument("--count", type=int, default=256, help="photographs (default: 256)")
    parser.add_argument("--rounds", type=int, default=5, help="epochs of each; the median counts (default: 5)")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--stage-batch", type=int, default=64, help="batch of the rows `stage` (default: 64)")
    parser.add_argument("--workers", type=int, default=2, help="processes of everybody's loader")
    parser.add_argument("--threads", type=int, default=2, help="threads of ours and of torch")
    parser.add_argument("--data", type=Path, help="folder that keeps the photographs; default: one that is removed")
    parser.add_argument("--peer-python", help="a Python that has torch, torchvision and albumentations==2.0.8")
    parser.add_argument("--quick", action="store_true", help="few photographs, one round")
    readme.add_arguments(parser)
    args = parser.parse_args()
    if readme.show(args, " ".join(["targets.py", *(args.recipe if len(args.recipe) == 1 else [])]), table):
        return
    if args.quick:
        args.count, args.rounds, args.batch, args.stage_batch = 16, 1, 8, 8
    args.device = "cpu"
    names = ("batch", "stage_batch", "workers", "threads", "rounds", "count")
    report: dict[str, Any] = {
        "machine": machine(args), "settings": {n: getattr(args, n) for n in names}, "results": [], "stages": []
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        folder = (args.data or Path(stack.enter_context(tempfile.TemporaryDirectory()))).resolve()
        root = data(folder, args.count)
        for name, kinds in () if args.no_stages else STAGES:
            report["stages"].append(stages(args, name, kinds, root))
        for name in args.recipe:
            report["results"] += end_to_end(args, name, root)
            if args.json:  # as far as it is: who has little time may stop it
                args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    main()
