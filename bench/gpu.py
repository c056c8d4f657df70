"""Everything that needs a GPU, in one go: `python bench/gpu.py OUT`.

    python bench/gpu.py OUT --plan                      # what would run, and how long
    python bench/gpu.py OUT --minutes 9                 # the most important parts that fit into nine minutes
    python bench/gpu.py OUT --only loader large         # these parts

Each part is a process of its own with a limit, so that the failure of one stops no other. After each part OUT holds
summary.json, report.txt (the end of what every part printed) and results.tar.gz (logs, reports, traces): what has run
is there, even if this program is stopped. Parts that OUT's summary calls done are not run again; `--again` runs them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

IMPORT = """
import importlib, platform, shutil, torch
print("python", platform.python_version(), "compiler", shutil.which("g++") or shutil.which("clang++"))
print("torch", torch.__version__, torch.cuda.get_device_name(), torch.cuda.get_device_capability())
names = "triton kornia hydra nvidia.dali nvidia.nvimgcodec torchvision skimage sklearn gpuaug"
for name in names.split():
    try:
        print(name, getattr(importlib.import_module(name), "__version__", "there"))
    except Exception as error:
        print(name, "FAILS:", type(error).__name__, error)
import nvidia.dali, kornia, hydra, gpuaug
from gpuaug.augment import triton_kernels
assert torch.ones(4, device="cuda").sum().item() == 4
"""

DECODE = """
import sys, torch, gpuaug
found = {}
for device in ("cpu", "cuda"):
    for backend in ("kornia", "fused"):
        augment = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(224), backend=backend)
        source = gpuaug.FolderSource(sys.argv[1])
        with gpuaug.Loader(source, augment=augment, device=device, order="sequential") as loader:
            images = found[device, backend] = next(iter(loader)).images.cpu()
            print(device, backend, tuple(images.shape), images.mean().item())
for backend in ("kornia", "fused"):
    gap = (found["cuda", backend] - found["cpu", backend]).abs() * 255
    print(backend, "cuda - cpu, in levels: mean", gap.mean().item(), "largest", gap.max().item())
    assert gap.mean() < 1.5
"""


PHOTOS, LARGE = 12_000, 2_400  # images of an epoch: seconds of a GPU's decoding
DIFFERENT = 160  # in as many files as there are; the rest are further names of the same files


def make_data(folder: Path) -> None:
    """What bench/loader.py would prepare, by all cores: 500 x 375 as it has them, and ``large`` of 1024 x 768."""
    sys.path.insert(0, str(ROOT / "bench"))
    shutil.rmtree(folder, ignore_errors=True)
    with multiprocessing.Pool() as pool:
        jobs = [pool.apply_async(_cut, (folder, seed)) for seed in range(10)]
        jobs += [pool.apply_async(_tile, (folder, number)) for number in range(DIFFERENT)]
        for job in jobs:
            job.get()
    for kind, count in (("photos", PHOTOS), ("large", LARGE)):
        files = sorted((folder / "different" / kind).rglob("*.jpg"))
        for number in range(count):
            file = files[number % len(files)]
            to = folder / f"{kind}_{count}" / "train" / file.parent.name / f"{number:05d}.jpg"
            to.parent.mkdir(parents=True, exist_ok=True)
            os.link(file, to)
        (folder / f"{kind}_{count}" / "done").touch()
        size = sum(file.stat().st_size for file in files) / len(files)
        print(kind, count, "names of", len(files), "files of", round(size), "bytes on average")


def _cut(folder: Path, seed: int) -> None:
    from photographs import cut

    out = cut(folder / "cut" / str(seed), count=250, seed=seed)
    for file in sorted((out / "train").rglob("*.jpg")):
        to = folder / "different" / "photos" / file.parent.name / f"{seed}_{file.name}"
        to.parent.mkdir(parents=True, exist_ok=True)
        os.link(file, to)


def _tile(folder: Path, number: int) -> None:
    """Four windows of photographs side by side, so that a pixel's detail stays a photograph's."""
    from photographs import PHOTOGRAPHS, photograph
    from PIL import Image

    draw, names = random.Random(f"tile/{number}"), sorted(PHOTOGRAPHS)
    image = Image.new("RGB", (1024, 768))
    for x, y in ((0, 0), (512, 0), (0, 384), (512, 384)):
        photo = photograph(draw.choice(names))
        w, h = min(512, photo.width), min(384, photo.height)
        left, top = draw.randint(0, photo.width - w), draw.randint(0, photo.height - h)
        image.paste(photo.resize((512, 384), box=(left, top, left + w, top + h)), (x, y))
    to = folder / "different" / "large" / names[number % len(names)] / f"{number:04d}.jpg"
    to.parent.mkdir(parents=True, exist_ok=True)
    image.save(to, quality=draw.randint(80, 92))


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        expected: seconds, as planned for a machine of 16 cores and one H200.
        limit: seconds after which it is ended.
    """

    name: str
    command: list[str]
    expected: int
    limit: int


def parts(photographs: Path, work: Path) -> list[Part]:
    """The most important first; what later ones need comes before them."""
    python = sys.executable
    root = str(photographs / "train")
    data = photographs / "bench"
    loader = [python, "bench/loader.py", "--device", "cuda", "--data", str(data), "--workers", "16", "--threads", "8"]
    loader += ["--batch", "256", "--rounds", "3", "--recipe", "standard", "--count", str(PHOTOS), "--large", str(LARGE)]
    stages = ["ours", "read", "decode", "augment"]
    tests = sorted((ROOT / "tests").glob("test_*.py"))
    gpu_tests = [str(p.relative_to(ROOT)) for p in tests if "mark.gpu" in p.read_text()]
    augment = [python, "bench/augment.py", "--device", "cuda"]
    return [
        Part("photographs", [python, "bench/photographs.py", str(photographs)], 15, 90),
        Part("import", [python, "-c", IMPORT], 25, 90),
        Part("decode", [python, "-c", DECODE, root], 40, 120),
        Part("doctor", [python, "-m", "gpuaug.cli", "doctor", f"json={work / 'doctor.json'}"], 100, 240),
        Part("kernels", [python, "bench/kernels.py", "--json", str(work / "kernels.json")], 90, 240),
        Part(
            "tests",
            [python, "-m", "pytest", "-q", "-m", "gpu", "--continue-on-collection-errors", "-p", "no:cacheprovider",
             *gpu_tests],
            120, 300,
        ),
        Part("cases", [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/triton_cases.py"], 90, 240),
        Part(
            "standard",
            [*augment, "--recipe", "standard", "--batch", "256", "--json", str(work / "standard.json")], 70, 200,
        ),
        Part("data", [python, "bench/gpu.py", str(work), "--make-data", str(data)], 25, 120),
        Part(
            "loader",
            [*loader, "--set", "photos", "--who", *stages, "torchvision", "torchvision_v2", "dali_proxy", "dali_reader",
             "--json", str(work / "loader.json")],
            220, 420,
        ),
        Part(
            "slow_open",
            [*loader, "--set", "photos", "--who", "ours", "dali_reader", "--open-delay", "0.0004", "--json",
             str(work / "slow_open.json")],
            60, 200,
        ),
        Part(
            "large",  # 1024 x 768
            [*loader, "--set", "large", "--who", "ours", "decode", "torchvision", "torchvision_v2", "--json",
             str(work / "large.json")],
            150, 400,
        ),
        Part(
            "augment",
            [*augment, "--recipe", "standard_random", "simclr", "randaugment", "--batch", "256", "--json",
             str(work / "augment.json")],
            120, 300,
        ),
        Part(
            "profile",
            [python, "-m", "gpuaug.cli", "profile", f"source.root={root}", "device=cuda", "dtype=bfloat16",
             f"json={work / 'profile.json'}", f"trace={work / 'trace.json'}"],
            60, 200,
        ),
        Part("tune", [python, "bench/kernels.py", "--recipe", "standard", "--batch", "256", "--tune", "--json",
                      str(work / "tune.json")], 110, 300),
        Part(
            "train",
            [python, "-m", "gpuaug.cli", "train", f"source.root={root}", f"val.source.root={photographs / 'val'}",
             "augment=standard", "epochs=3", "batch_size=64", "device=cuda", f"out={work / 'train'}",
             f"json={work / 'train.json'}"],
            60, 150,
        ),
    ]  # fmt: skip


def run(part: Part, log: Path, limit: float) -> int | str:
    """The exit status, or why there is none; what it started is ended with it."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), str(ROOT))))
    with open(log, "w") as out:
        process = subprocess.Popen(
            part.command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return "out of time"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def write(out: Path, work: Path, summary: dict[str, dict[str, object]]) -> None:
    """The three files that hold everything, each replaced in one step."""
    (out / "summary.json.part").write_text(json.dumps(summary, indent=1) + "\n")
    (out / "summary.json.part").replace(out / "summary.json")
    text = []
    for name, result in summary.items():
        log = work / f"{name}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        text += [f"=== {name}: {json.dumps(result)}", *(line[:300] for line in lines[-150:]), ""]
    (out / "report.txt.part").write_text("\n".join(text))
    (out / "report.txt.part").replace(out / "report.txt")
    with tarfile.open(out / "results.tar.gz.part", "w:gz") as tar:
        for path in sorted(work.iterdir()):
            if path.is_file() and path.stat().st_size < 40 << 20:
                tar.add(path, path.name)
    (out / "results.tar.gz.part").replace(out / "results.tar.gz")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--photographs", type=Path, default=Path("/tmp/gpuaug-photographs"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/gpuaug-gpu"), help="where logs and reports are made")
    parser.add_argument("--only", nargs="*", help="names of parts")
    parser.add_argument("--minutes", type=float, help="start no part that is not expected to end within so many")
    parser.add_argument("--again", action="store_true", help="run also what is done")
    parser.add_argument("--make-data", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--plan", action="store_true", help="print the parts and stop")
    args = parser.parse_args()
    if args.make_data:
        make_data(args.make_data)
        return 0
    out, work, began = args.out.resolve(), args.work.resolve(), time.perf_counter()
    all_parts = parts(args.photographs, work)
    unknown = set(args.only or ()) - {p.name for p in all_parts}
    if unknown:
        parser.error(f"--only takes names of parts, {', '.join(p.name for p in all_parts)}. Found: {sorted(unknown)}.")
    if args.plan:
        total = 0
        for part in all_parts:
            total += part.expected
            print(f"{part.name:12} {part.expected:4} s, at most {part.limit:4}; so far {total / 60:4.1f} min")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    kept = work / "summary.json"  # OUT may be emptied between two runs on one machine
    summary: dict[str, dict[str, object]] = json.loads(kept.read_text()) if kept.exists() else {}
    failed = 0
    for part in all_parts:
        if args.only and part.name not in args.only:
            continue
        if summary.get(part.name, {}).get("exit") == 0 and not args.again:
            continue
        left = float("inf") if args.minutes is None else 60 * args.minutes - (time.perf_counter() - began)
        if part.expected > left:
            print(f"{part.name:12} left out: {part.expected} s expected, {left:.0f} s left", flush=True)
            continue
        begin = time.perf_counter()
        code = run(part, work / f"{part.name}.log", min(part.limit, left))
        seconds = round(time.perf_counter() - begin, 1)
        summary[part.name] = {"exit": code, "seconds": seconds, "expected": part.expected}
        failed += code != 0
        last = (work / f"{part.name}.log").read_text(errors="replace").strip().splitlines()[-1:]
        print(f"{part.name:12} exit {code}  {seconds:6.1f} s  {' '.join(last)[:160]}", flush=True)
        kept.write_text(json.dumps(summary, indent=1) + "\n")
        write(out, work, summary)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
