"""Exported recipes beside the loader: pixels, top-1, and the time per image in torch and onnxruntime.

    gpuaug train source.root=DIR/train val.source.root=DIR/val augment=standard out=run
    python bench/export.py DIR/val run/last.pt

Photographs of DIR are cut to odd sizes and written as RGB JPEG, gray JPEG, CMYK JPEG, RGBA PNG, palette PNG and 16-bit
gray PNG, in turn. The loader decodes and evaluates them one by one, as `gpuaug train` does. The graphs get the same
pixels, upright RGB. One thread; the graphs run in turn.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import gpuaug
from bench import readme
from gpuaug.tools.main import main as command
from gpuaug.tools.train.checkpoint import read_checkpoint
from gpuaug.tools.train.model import SmallNet

KINDS = ("RGB", "L", "CMYK", "RGBA", "P", "I;16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photographs", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--readme", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = table(measured(args.photographs, args.checkpoint, args.count))
    print(text)
    if args.readme is not None:
        readme.put(args.readme, "export.py", text)


def images(folder: Path, count: int) -> list[tuple[bytes, int]]:
    """Encoded photographs of odd sizes, and the number of the kind of each."""
    rng, files = np.random.default_rng(0), sorted(folder.rglob("*.jpg"))
    made = []
    for n in range(count):
        picture = Image.open(files[n * 7919 % len(files)]).convert("RGB")
        height, width = (2 * rng.integers(50, 300, 2) + 1).tolist()
        picture, kind, stream = picture.resize((width, height), Image.Resampling.BICUBIC), n % len(KINDS), io.BytesIO()
        if KINDS[kind] == "I;16":
            picture = Image.fromarray(np.asarray(picture.convert("L")).astype(np.uint16) * 257)
        else:
            picture = picture.convert(KINDS[kind])
        picture.save(stream, "JPEG" if KINDS[kind] in ("RGB", "L", "CMYK") else "PNG")
        made.append((stream.getvalue(), kind))
    return made


def measured(folder: Path, checkpoint: Path, count: int) -> dict[str, Any]:
    import onnxruntime

    recipe = gpuaug.build(gpuaug.compose("eval", [f"augment=file:{checkpoint}"]).augment)
    source = images(folder, count)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    runs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        for what in ("recipe", "model"):
            for kind in ("pt2", "onnx"):
                file = Path(place, f"{what}.{kind}")
                if what == "recipe":
                    gpuaug.export(recipe, file)
                elif command(["export", f"checkpoint={checkpoint}", f"out={file}"]):
                    raise SystemExit("the model could not be exported")
                if kind == "pt2":
                    module = torch.export.load(file).module()
                    runs[f"{what} torch"] = lambda x, module=module: module(images=x).numpy()
                else:
                    session = onnxruntime.InferenceSession(file, options)
                    runs[f"{what} onnxruntime"] = lambda x, s=session: s.run(None, {"images": x.numpy()})[0]
        known = read_checkpoint(checkpoint)
        net = SmallNet(num_classes=len(known["classes"])).eval()
        net.load_state_dict(known["model"])
        settings: dict[str, Any] = {"batch_size": 1, "num_workers": 0, "prefetch": 0, "device": "cpu"}
        rows = {name: [] for name in runs}
        same = dict.fromkeys(runs, 0)
        seconds: dict[str, list[float]] = {name: [] for name in ("eager", *runs)}
        whole = gpuaug.Augment()
        with gpuaug.Loader(source, augment=recipe, **settings) as loader, torch.no_grad():
            decoded = gpuaug.Loader(source, augment=whole, **settings)
            for n in range(len(source)):
                expected = loader.fetch([n]).images
                pixels = decoded.fetch([n]).images.mul(255).round().to(torch.uint8)
                logits = net(expected)
                begin = time.perf_counter()
                net(recipe(pixels, seed=0))
                seconds["eager"].append(time.perf_counter() - begin)
                for name, run in runs.items():
                    begin = time.perf_counter()
                    made = run(pixels)
                    seconds[name].append(time.perf_counter() - begin)
                    if name.startswith("recipe"):
                        std = recipe.normalize.std.view(-1, 1, 1).numpy()
                        rows[name].append(np.abs((made - expected.numpy()) * std * 255))
                    else:
                        same[name] += int(made.argmax() == int(logits.argmax()))
            decoded.close()
    found: dict[str, Any] = {"machine": readme.machine("cpu"), "count": len(source), "rows": {}}
    for engine in ("torch", "onnxruntime"):
        pixels = rows[f"recipe {engine}"]
        found["rows"][engine] = {
            "largest": max(float(x.max()) for x in pixels),
            "mean": float(np.mean([x.mean() for x in pixels])),
            "worst mean": max(float(x.mean()) for x in pixels),
            "same": same[f"model {engine}"],
            "recipe_ms": 1e3 * float(np.median(seconds[f"recipe {engine}"])),
            "model_ms": 1e3 * float(np.median(seconds[f"model {engine}"])),
        }
    found["eager_ms"] = 1e3 * float(np.median(seconds["eager"]))
    return found


def table(found: dict[str, Any]) -> str:
    about, count = found["machine"], found["count"]
    lines = [
        f"{about['processor']}, one thread, {about['date']}, load {about['load']:.1f}. {count} photographs of odd "
        f"sizes, {', '.join(KINDS)} in turn.\nThe recipe and the model in eager torch take {found['eager_ms']:.1f} ms "
        "per image. Differences are in levels of 255.",
        "",
        "| | largest difference | mean | mean of the worst image | same top-1 | recipe, ms | with the model |",
        "|---|---|---|---|---|---|---|",
    ]
    for engine, row in found["rows"].items():
        pixels = f"{row['largest']:.2f} | {row['mean']:.4f} | {row['worst mean']:.4f}"
        speed = f"{row['recipe_ms']:.1f} | {row['model_ms']:.1f}"
        lines.append(f"| {engine} | {pixels} | {row['same']} of {count} | {speed} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
