"""Compares the outputs of det_yolo with those of Ultralytics' own loader: scale, place and number of boxes.

    python bench/mosaics.py --peer-python PYTHON --json mosaics.json

PYTHON has ultralytics and its requirements, without gpuaug (AGPL-3.0: it is run, nothing is copied). Both read the same
photographs (bench/scenes.py) and make as many outputs. The table has the p-values of two-sample Kolmogorov-Smirnov
tests: below 0.001, the distributions differ. Another table says what a mosaic adds to the affine transform of an
output: `--gather` makes only this table, and needs no PYTHON.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import subprocess
import sys
import tempfile
import timeit
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import readme
from contestants import Spec
from target_contestants import SIZE, YOLO, loader, ultralytics_loader


def measured(boxes: np.ndarray[Any, Any], sample: np.ndarray[Any, Any], count: int) -> dict[str, list[float]]:
    """Numbers of ``count`` outputs. ``boxes`` [N, 4] as fractions: (x1, y1, x2, y2); ``sample`` [N]: their outputs."""
    centre, sides = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
    # one box of each output, because those of one output share their scale and place
    _, first = np.unique(sample, return_index=True)
    return {
        "boxes per output": np.bincount(sample, minlength=count).tolist(),
        "scale: root of a box's area": np.sqrt(sides.prod(axis=1))[first].tolist(),
        "place: x of a box's centre": centre[first, 0].tolist(),
        "place: y of a box's centre": centre[first, 1].tolist(),
    }


def ours(spec: Spec, count: int) -> dict[str, list[float]]:
    parts, samples, done = [], [], 0
    with loader(spec, ("boxes",)) as made:
        while done < count:
            for batch in made:
                order = np.random.default_rng(done).permutation(len(batch.targets.boxes))  # else always the first tile
                parts.append(batch.targets.boxes.numpy()[order] / SIZE[YOLO])
                samples.append(batch.targets.sample.numpy()[order] + done)
                done += len(batch.images)
    return measured(np.concatenate(parts), np.concatenate(samples), done)


def theirs(spec: Spec, count: int) -> dict[str, list[float]]:
    parts, samples, done = [], [], 0
    batches = ultralytics_loader(spec)
    for batch in itertools.islice(batches, -(-count // len(batches.dataset)) * len(batches)):
        boxes, order = batch["bboxes"].numpy(), np.random.default_rng(done).permutation(len(batch["bboxes"]))
        corners = np.concatenate([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], axis=1)
        parts.append(corners[order])
        samples.append(batch["batch_idx"].numpy().astype(int)[order] + done)
        done += len(batch["img"])
    return measured(np.concatenate(parts), np.concatenate(samples), done)


def gather_cost(device: str, rounds: int = 15, batch: int = 16) -> list[dict[str, Any]]:
    """Time of a batch with a mosaic and an affine transform / that of the transform alone, in turns on one thread."""
    import torch

    import gpuaug

    rows, rng, size = list[dict[str, Any]](), np.random.default_rng(0), SIZE[YOLO]
    images = list(torch.from_numpy(rng.integers(0, 256, (4 * batch, size, size, 3), dtype=np.uint8)).to(device))
    for name, degrees in (("scale and shift", 0), ("also rotation by up to 10 degrees", 10)):
        affine = gpuaug.CanvasAffine(size, degrees=degrees, translate=0.1, scale=[0.5, 1.5])
        jobs = []
        for entries in ({"mosaic": gpuaug.Mosaic(), "affine": affine}, {"affine": affine}):
            recipe = gpuaug.Augment(crop=gpuaug.Letterbox(size), combine=entries)
            tiles = 4 if "mosaic" in entries else 1
            drawn = recipe.draw(seed=0, epoch=0, indices=np.arange(batch))
            uniforms = {key: drawn.uniforms["", 0, key] for key in entries}
            whole = np.tile([0, 0, size, size], (batch, tiles, 1))
            layout = recipe.combine.lay(uniforms, (size, size), whole)
            own = [images[tiles * row : tiles * (row + 1)] for row in range(batch)]
            place = layout.origin, layout.visible, layout.inverse, layout.size
            jobs.append(functools.partial(_gathered, own, *place))
        times = [[timeit.timeit(job, number=1) for job in jobs] for _ in range(rounds + 2)][2:]
        both, alone = np.median(times, axis=0) * 1000 / batch
        rows.append({"what": name, "both": both, "alone": alone, "ratio": float(np.median([a / b for a, b in times]))})
    return rows


def _gathered(*given: Any) -> None:
    import torch

    from gpuaug.augment.gather import gather

    if gather(*given, fill=114, threads=1).is_cuda:
        torch.cuda.synchronize()


def table(report: dict[str, Any]) -> str:
    m = report["machine"]
    where = f"{m['processor']}, one thread, device {m['device']}, {m['date']}, load {m['load']:.1f}"
    lines = [f"{where}; torch {m['versions']['torch']}", ""]
    lines.append("| affine transform | with mosaic, ms per output | alone | ratio |\n|---|---|---|---|")
    for row in report["gather"]:
        lines.append(f"| {row['what']} | {row['both']:.2f} | {row['alone']:.2f} | {row['ratio']:.2f} |")
    if report["outputs"]:
        lines += ["", "| what | mean, ours | mean, Ultralytics | outputs | p |\n|---|---|---|---|---|"]
    for row in report["outputs"]:
        counts = " and ".join(f"{number:,}" for number in row["outputs"])
        lines.append(f"| {row['what']} | {row['ours']:.3f} | {row['theirs']:.3f} | {counts} | {row['p']:.2f} |")
    return "\n".join(lines)


def outputs(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Both loaders' outputs, compared."""
    import scenes
    from scipy import stats

    with tempfile.TemporaryDirectory() as made:
        root = (args.data or Path(made)).resolve() / f"scenes_{args.count}"
        if not (root / "instances.json").exists():
            scenes.write(root, count=args.count)
        answer = Path(made, "theirs.json")
        words = [args.peer_python, __file__, "--data", root, "--count", args.count, "--theirs", answer]
        subprocess.run([str(word) for word in [*words, "--peer-python", "-"]], check=True)
        b = json.loads(answer.read_text())
        a = ours(Spec("ours", YOLO, str(root), 16, 2, 2, "cpu", "float32"), args.count)
    return [
        {
            "what": name, "ours": float(np.mean(a[name])), "theirs": float(np.mean(b[name])),
            "outputs": [len(a[name]), len(b[name])], "p": float(stats.ks_2samp(a[name], b[name]).pvalue),
        }
        for name in a
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2048, help="photographs, and outputs of each (default: 2048)")
    parser.add_argument("--data", type=Path, help="folder that keeps the photographs; default: one that is removed")
    parser.add_argument("--peer-python")
    parser.add_argument("--gather", action="store_true", help="only what a mosaic adds to the affine transform")
    parser.add_argument("--device", default="cpu", help="of the affine transform's table (default: cpu)")
    parser.add_argument("--theirs", type=Path, help=argparse.SUPPRESS)
    readme.add_arguments(parser)
    args = parser.parse_args()
    if readme.show(args, "mosaics.py", table):
        return
    if args.theirs:
        spec = Spec("ultralytics", YOLO, str(args.data), 16, 2, 2, "cpu", "float32")
        args.theirs.write_text(json.dumps(theirs(spec, args.count)))
        return
    report: dict[str, Any] = {"machine": readme.machine(args.device), "gather": gather_cost(args.device), "outputs": []}
    if not args.gather:
        report["outputs"] = outputs(args)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))


if __name__ == "__main__":
    main()
