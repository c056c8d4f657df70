"""Runs everything that needs a GPU: `python bench/gpu.py OUT`.

    python bench/gpu.py OUT --plan                      # what would run, how long, and which question it answers
    python bench/gpu.py OUT --minutes 9                 # the most important parts that fit into nine minutes
    python bench/gpu.py OUT --only loader tests         # these parts; `tests` is also tests_gpu, tests_decode, ...
    python bench/gpu.py OUT --rehearse                  # on the CPU, small: whatever can run without a GPU

Each part is a process of its own with a time limit, so a failure does not stop the other parts. A part that exceeds its
time prints its traceback before it is killed. After each part OUT has summary.json, report.txt (the last lines of every
part, and what they mean) and results.tar.gz (logs, reports), so the results are there even if this program is killed.
To continue, run the same command again: parts that have succeeded on this machine do not run again without `--again`.
To send the results, attach OUT/results.tar.gz to an issue with the form "GPU report". The logs have the paths of this
machine. `gpuaug doctor report=FILE` makes a smaller report without them, in a few minutes.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

IMPORT = """
import importlib, platform, shutil, sys, torch
print("python", platform.python_version(), "compiler", shutil.which("g++") or shutil.which("clang++"))
cuda = torch.cuda.is_available()
print("torch", torch.__version__, "for CUDA", torch.version.cuda)
print(torch.cuda.get_device_name() if cuda else "no device", torch.cuda.get_device_capability() if cuda else "")
names = "triton kornia hydra nvidia.dali nvidia.nvimgcodec torchvision skimage sklearn gpuaug"
for name in names.split():
    try:
        print(name, getattr(importlib.import_module(name), "__version__", "there"))
    except Exception as error:
        print(name, "FAILS:", type(error).__name__, error)
import nvidia.dali, kornia, hydra, gpuaug
from gpuaug.augment.fused import cuda
assert torch.ones(4, device=sys.argv[1]).sum().item() == 4
"""

DECODE = """
import sys, torch, gpuaug
found, other = {}, sys.argv[2]
for device in ("cpu", other):
    for backend in ("kornia", "fused"):
        augment = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(224), backend=backend)
        source = gpuaug.FolderSource(sys.argv[1])
        with gpuaug.Loader(source, augment=augment, device=device, order="sequential") as loader:
            images = found[device, backend] = next(iter(loader)).images.cpu()
            print(device, backend, tuple(images.shape), images.mean().item())
for backend in ("kornia", "fused"):
    gap = (found[other, backend] - found["cpu", backend]).abs() * 255
    print(backend, other, "- cpu, in levels: mean", gap.mean().item(), "largest", gap.max().item())
    assert gap.mean() < 1.5
"""


PYTEST = ["-q", "--tb=short", "-rfE", "--durations=5", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
PHOTOS, LARGE = 12_000, 2_400  # images of an epoch: seconds of a GPU's decoding
THREADS = 12  # of the host for everybody's decoding, of 16 cores; the workers read
DIFFERENT = 160  # in as many files as there are; the rest are further names of the same files


def make_data(folder: Path) -> None:
    """Make the data of bench/loader.py on all cores: photographs of 500 x 375, and ``large`` ones of 1024 x 768."""
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
    """Four parts of photographs side by side: larger, and still as detailed as a photograph."""
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
class Want:
    """A figure in a part's report, and its bounds.

    Attributes:
        what: name of the figure.
        of: a function from the report to the figure; KeyError, TypeError or IndexError: it was not measured.
        least, most: bounds; None: no bound.
    """

    what: str
    of: Callable[[Any], float]
    least: float | None = None
    most: float | None = None

    def said(self, report: Any) -> str:
        """A sentence with the figure and its bounds."""
        bound = f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"
        try:
            value = float(self.of(report))
        except (KeyError, TypeError, IndexError, StopIteration):
            return f"{self.what}: not measured (wanted {bound})"
        good = (self.least is None or value >= self.least) and (self.most is None or value <= self.most)
        return f"{self.what}: {value:.3g}, wanted {bound}: {'yes' if good else 'NO'}"


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        asks: the question that this part answers.
        reads: the answer if the part succeeds, or how to read its output.
        expected: seconds it should take on a machine with 16 cores and one H200.
        limit: seconds after which the part is killed.
        wants: figures of its report, the JSON file with the part's name.
        needs_gpu: whether it cannot run on a CPU.
        makes: a file or folder that later parts need; without it the part runs again.
    """

    name: str
    command: list[str]
    asks: str
    expected: int
    limit: int
    reads: str = "Yes."
    wants: tuple[Want, ...] = ()
    needs_gpu: bool = False
    makes: Path | None = None

    def meaning(self, code: int | str, work: Path) -> list[str]:
        """What the part's result means for its question, line by line."""
        bad = f"No, or not answered: {code if isinstance(code, str) else f'exit status {code}'}."
        lines = [f"{self.asks} {self.reads if code == 0 else bad}"]
        report = work / f"{self.name}.json"
        with contextlib.suppress(OSError, ValueError):  # also what was measured before it failed
            given = json.loads(report.read_text()) if self.wants else {}
            lines += [want.said(given) for want in self.wants]
        return lines


def _kernels(report: Any, recipe: str) -> Any:
    return next(r for r in report["results"] if r["recipe"] == recipe and r["batch"] == 256)


AS_BELOW = "The figures are below, or in its log."
ENGINE = ("ours_engine", "dali_reader_engine", "dali_proxy_engine")
TESTS = {  # seconds expected of the files of tests that take long; the limit is thrice that
    "gpu": 120, "doctor": 90, "doctor_report": 120, "train": 80, "reference": 50, "decode": 40, "pack_epochs": 40,
}  # fmt: skip


def parts(photographs: Path, work: Path, *, rehearse: bool = False) -> list[Part]:
    """All parts, the most important first. A part comes after the parts that it needs."""
    python, small = sys.executable, rehearse
    device = "cpu" if small else "cuda"
    root, data = str(photographs / "train"), photographs / "bench"

    def to(name: str) -> list[str]:
        return ["--json", str(work / f"{name}.json")]

    def hazard(name: str, expected: int, limit: int, asks: str, reads: str) -> Part:
        command = [python, "bench/hazards.py", str(work / "hazards.jsonl"), name, *(["--rehearse"] * small)]
        return Part(f"hazard_{name}", command, asks, expected, limit, reads)

    def loader(name: str, kind: str, who: list[str], asks: str, expected: int, limit: int, *more: str,
               wants: tuple[Want, ...] = ()) -> Part:  # fmt: skip
        command = [python, "bench/loader.py", "--device", device, "--data", str(data), "--recipe", "standard", "--set"]
        command += [kind, "--who", *who, *more, *to(name)]
        command += ["--quick", "--workers", "2", "--threads", "2"] if small else [
            "--workers", "16", "--threads", str(THREADS), "--batch", "256", "--rounds", "3", "--count", str(PHOTOS),
            "--large", str(LARGE),
        ]  # fmt: skip
        return Part(name, command, asks, expected, limit, AS_BELOW, wants)

    def augment(name: str, recipe: str, asks: str, expected: int, limit: int, wants: tuple[Want, ...] = ()) -> Part:
        command = [python, "bench/augment.py", "--device", device, "--recipe", recipe, *to(name)]
        command += ["--batch", "4", "--size", "32", "--rounds", "1"] if small else ["--batch", "256"]
        return Part(name, command, asks, expected, limit, AS_BELOW, wants)

    def faster(name: str, over: str, least: float) -> Want:
        return Want(f"ours / {over}", lambda r: r["ratios"][name][over], least)

    def tests(file: Path) -> Part:
        name = file.stem.removeprefix("test_")
        place = str(file.relative_to(ROOT))
        # without a GPU, the tests of test_gpu.py that need none still run
        command = [python, "-m", "pytest", *PYTEST, place]
        command += [] if small and name == "gpu" else ["-m", "gpu"]
        expected, asks = TESTS.get(name, 25), f"Do the tests of {place} pass on CUDA?"
        reads = "Yes, but for what its log calls skipped."
        return Part(f"tests_{name}", command, asks, expected, 3 * expected + 30, reads)

    gpu_tests = [p for p in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in p.read_text()]
    gpu_tests.sort(key=lambda p: p.stem not in ("test_gpu", "test_decode"))  # these two say most
    train = [python, "-m", "gpuaug.tools", "train", f"device={device}"]
    few = ["--count", "60"] if small else []
    return [
        Part("photographs", [python, "bench/photographs.py", str(photographs), *few], "Are there photographs?", 15, 90,
             makes=Path(root)),
        Part("import", [python, "-c", IMPORT, device], "Is everything installed, and does it import?", 25, 90),
        Part(
            "decode", [python, "-c", DECODE, root, device], "Are decoded and augmented pixels those of the CPU?", 40,
            120,
        ),
        Part(
            "doctor", [python, "-m", "gpuaug.tools", "doctor", f"json={work / 'doctor.json'}"],
            "Which of the hazards that doctor names are real here?", 100, 240, "Those that are not `ok` in doctor.log.",
        ),
        hazard(
            "context", 30, 130, "Which import opens a CUDA context?",
            "Numbers are devices: with [] behind `our decoder for the CPU`, forked workers inherit none.",
        ),
        hazard(
            "engine", 30, 130, "Does the JPEG engine keep its order on a busy device?",
            "Where `with` begins with true, hardware_load may be raised (busy 0: decoding waits); false forbids it.",
        ),
        hazard(
            "paging", 15, 60, "Must canvases that the host fills be pinned?",
            "Yes where pageable memory holds the host for long, or where its late_bytes are above 0.",
        ),
        hazard(
            "graveyard", 30, 80, "Does decoding beside a training cost a core?",
            "What `ours` has beyond `training alone`; `DLPack` shows what copying the views saves.",
        ),
        hazard(
            "feed", 30, 100, "What of a batch of 256 does the host do?",
            "Milliseconds, and those of the thread's CPU: 25 in the busiest thread allow 10,000 images/s.",
        ),
        Part(
            "kernels", [python, "bench/kernels.py", *to("kernels")],
            "How near to a copy are the kernels, in how many launches?", 90, 240, AS_BELOW,
            (
                Want("standard: share of a copy", lambda r: _kernels(r, "standard")["share_of_copy"], 0.5),
                Want("standard: launches", lambda r: _kernels(r, "standard")["launches"], most=2),
                Want("simclr: launches, both views", lambda r: _kernels(r, "simclr")["launches"], most=8),
            ),
            needs_gpu=True,
        ),
        Part(
            "cases",
            # without a GPU Triton's interpreter runs them, which takes minutes for all of them
            [*(["env", "TRITON_INTERPRET=1"] * small), python, "-m", "pytest", *PYTEST, "tests/augment/triton_cases.py",
             *(["-k", "chains or share or no_operations"] * small)],
            "Do the kernels equal Kornia, whatever the program?", 90, 240,
        ),
        hazard(
            "batch", 30, 100, "Does the batch change a sample?",
            "0 is promised of `fused`; of `kornia` 2e-6 in 0..1, so 9e-6 after normalization.",
        ),
        hazard("parts", 20, 80, "Can DALI decode parts of images here?", "If not, DALI decodes whole ones."),
        *map(tests, gpu_tests),
        Part("data", [python, "bench/gpu.py", str(work), "--make-data", str(data)], "Are there files to load?", 25, 120,
             needs_gpu=True,  # the rehearsal's are few, and made by bench/loader.py
             makes=data / f"large_{LARGE}" / "done"),
        loader(
            "loader", "photos", ["ours", "ours_engine", "read", "decode", "augment"],
            "Is the whole as fast as its slowest stage?", 90, 240,
            wants=(Want("ours / decode alone", lambda r: r["ratios"]["standard"]["decode"], 0.9),),
        ),
        loader(
            "loader_dali", "photos", ["ours", "dali_reader", "dali_proxy", *ENGINE],
            "How fast are we beside DALI, both without the JPEG engine and both with it?", 120, 300,
            wants=(
                faster("standard", "dali_proxy", 1.2), faster("standard_engine", "dali_proxy_engine", 1.2),
                faster("standard", "dali_reader", 1.0), faster("standard_engine", "dali_reader_engine", 1.0),
            ),
        ),
        loader(
            "slow_open", "photos", ["ours", "dali_reader", "ours_engine", "dali_reader_engine"],
            "And where a file takes 0.4 ms to open?", 90, 240, "--open-delay", "0.0004",
            wants=(faster("standard", "dali_reader", 2.0), faster("standard_engine", "dali_reader_engine", 2.0)),
        ),
        loader(
            "loader_torchvision", "photos", ["ours", "torchvision", "torchvision_v2"],
            "How fast are we beside DataLoader and torchvision?", 110, 280,
            wants=(faster("standard", "torchvision", 1.5),),
        ),
        loader(
            "large", "large", ["ours", "decode", "torchvision", "torchvision_v2"], "And with 1024 x 768 pixels?",
            150, 400, wants=(faster("standard_large", "torchvision", 3.0),),
        ),
        hazard(
            "loader", 90, 280, "What does a training beside it cost the loader?",
            "Rows with 20 products against rows with 0; main_process_cores are the loader's threads.",
        ),
        hazard(
            "ceiling", 60, 190, "How fast is DALI alone?",
            "The fewest threads and the share of the engine with the most images/s: defaults to advise.",
        ),
        Part(
            "profile",
            [python, "-m", "gpuaug.tools", "profile", f"source.root={root}", f"device={device}", "dtype=bfloat16",
             f"json={work / 'profile.json'}",
             *(["repeats=1", "batch_size=8", "augment=flip"] * small)],
            "Which stage is the narrowest?", 60, 200, "The one that profile.log names.",
        ),
        augment(
            "standard", "standard", "How fast is the recipe beside its peers, pixels on the device for all?", 70, 200,
            tuple(faster("standard", over, least) for over, least in
                  (("kornia_eager", 30), ("kornia_compiled", 10), ("torchvision", 10), ("dali", 2))),
        ),
        Part(
            "mosaics", [python, "bench/mosaics.py", "--gather", "--device", device, *to("mosaics")],
            "Does a mosaic cost little more than its affine transform?", 15, 60, AS_BELOW,
            (Want("with / without mosaic", lambda r: max(row["ratio"] for row in r["gather"]), most=1.3),),
        ),
        augment("augment_random", "standard_random", "And with an order per sample?", 50, 150),
        augment("augment_simclr", "simclr", "And with blur, two views?", 50, 150),
        augment("augment_randaugment", "randaugment_torchvision", "And with a policy?", 50, 150),
        Part(
            "tune", [python, "bench/kernels.py", "--recipe", "standard", "--batch", "256", "--tune", *to("tune")],
            "Are other block sizes faster?", 110, 300, "Where a row is below the one as shipped.", needs_gpu=True,
        ),
        Part(
            "peers", [python, "bench/peers_gpu.py", "--device", device, *to("peers"), *(["--quick"] * small)],
            "How fast are two published recipes here, ours and Kornia's?", 90, 280, AS_BELOW,
        ),
        Part(
            "roofline",
            [python, "bench/roofline.py", *to("roofline"), "--traced", "16",
             *(["--recipe", "flip", "--batch", "4"] * small)],
            "What does paper say of the recipes of `kernels`?", 120, 400,
            "The table below. `kernels` has the measured microseconds.",
        ),
        Part(
            "train",
            [*train, f"source.root={root}", f"val.source.root={photographs / 'val'}", "augment=standard",
             f"out={work / 'train'}", f"json={work / 'train.json'}",
             *(["epochs=1", "batch_size=8", "num_workers=1"] if small else ["epochs=3", "batch_size=64"])],
            "Does a training run and learn?", 60, 150,
        ),
        Part(
            "train_resnet50",
            [*train, f"source.root={data / f'photos_{PHOTOS}' / 'train'}", "augment=standard", "epochs=2",
             "batch_size=256", "--trust", "torchvision.", "model._target_=torchvision.models.resnet50",
             f"decode.num_threads={THREADS}", f"out={work / 'train_resnet50'}", f"json={work / 'train_resnet50.json'}"],
            "Does a ResNet-50 wait for its data?", 80, 200, AS_BELOW,
            (Want("share of the time waiting for data", lambda r: r["waiting_for_data"], most=0.05),), needs_gpu=True,
        ),
        Part(
            "compile",
            [python, "-m", "pytest", *PYTEST, "tests/augment/test_triton_kernels.py", "-k",
             "every_gpu and 80" if small else "every_gpu or without_a_device"],
            "Do the kernels compile for every GPU with the Triton that is installed?", 90, 300,
        ),
    ]  # fmt: skip


def run(part: Part, log: Path, limit: float, more: dict[str, str]) -> int | str:
    """Run a part. Returns its exit status, or the reason why there is none. Its child processes end with it."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **more}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), str(ROOT))))
    with open(log, "w") as out:
        log.with_suffix(".json").unlink(missing_ok=True)  # of an earlier run
        process = subprocess.Popen(
            part.command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # faulthandler writes where every thread is
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            return f"out of time after {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def write(out: Path, work: Path, summary: dict[str, dict[str, Any]]) -> None:
    """Write the three files with all results, and a copy of the summary. Each is replaced in one step."""
    for folder in (work, out):
        (folder / "summary.json.part").write_text(json.dumps(summary, indent=1) + "\n")
        (folder / "summary.json.part").replace(folder / "summary.json")
    text = []
    for name, result in summary.items():
        log = work / f"{name}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        text += [f"=== {name}: {result['exit']}, {result['seconds']} s", *result["means"]]
        text += [*(line[:300] for line in lines[-150:]), ""]
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
    parser.add_argument("--photographs", type=Path, help="where they are made; default: /tmp/gpuaug-photographs")
    parser.add_argument("--work", type=Path, help="where logs and reports are made; default: /tmp/gpuaug-gpu")
    parser.add_argument("--only", nargs="*", help="names of parts, or what they begin with")
    parser.add_argument("--minutes", type=float, help="start no part that is not expected to end within so many")
    parser.add_argument("--again", action="store_true", help="run also what is done")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, small: shows that the parts run")
    parser.add_argument("--make-data", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--plan", action="store_true", help="print the parts and stop")
    args = parser.parse_args()
    if args.make_data:
        make_data(args.make_data)
        return 0
    which = "rehearsal" if args.rehearse else "gpu"
    photographs = args.photographs or Path(f"/tmp/gpuaug-photographs{'-few' * args.rehearse}")
    out, work, began = args.out.resolve(), (args.work or Path(f"/tmp/gpuaug-{which}")).resolve(), time.perf_counter()
    all_parts = parts(photographs, work, rehearse=args.rehearse)
    chosen = [p for p in all_parts if args.only is None or any(_named(p, name) for name in args.only)]
    unknown = [name for name in args.only or () if not any(_named(p, name) for p in all_parts)]
    if unknown:
        parser.error(f"--only takes names of parts, {', '.join(p.name for p in all_parts)}. Found: {unknown}.")
    if args.plan:
        total = 0
        for part in chosen:
            total += part.expected
            time_ = f"{part.expected:4} s, at most {part.limit:4}; so far {total / 60:4.1f} min"
            print(f"{part.name:20} {time_}  {part.asks}")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    kept = work / "summary.json"  # OUT may be emptied between two runs on one machine
    summary: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    more = {"CUDA_VISIBLE_DEVICES": ""} if args.rehearse else {}
    failed = 0
    for part in chosen:
        done = summary.get(part.name, {}).get("exit") == 0 and (part.makes is None or part.makes.exists())
        if done and not args.again:
            continue
        if args.rehearse and part.needs_gpu:
            print(f"{part.name:20} left out: needs a GPU", flush=True)
            continue
        left = float("inf") if args.minutes is None else 60 * args.minutes - (time.perf_counter() - began)
        if part.expected > left:
            print(f"{part.name:20} left out: {part.expected} s expected, {left:.0f} s left", flush=True)
            continue
        begin = time.perf_counter()
        limit = part.limit * (3 if args.rehearse else 1)  # a rehearsal's machine may have two cores and others on them
        code = run(part, work / f"{part.name}.log", min(limit, left), more)
        seconds = round(time.perf_counter() - begin, 1)
        means = [("rehearsed, not measured: " if args.rehearse else "") + line for line in part.meaning(code, work)]
        summary[part.name] = {"exit": code, "seconds": seconds, "expected": part.expected, "means": means}
        failed += code != 0
        last = (work / f"{part.name}.log").read_text(errors="replace").strip().splitlines()[-1:]
        print(f"{part.name:20} exit {code}  {seconds:6.1f} s  {' '.join(last)[:160]}", flush=True)
        for line in means:
            print(f"{'':20} {line}", flush=True)
        write(out, work, summary)
    return int(failed > 0)


def _named(part: Part, name: str) -> bool:
    return part.name == name or part.name.startswith(f"{name}_")


if __name__ == "__main__":
    sys.exit(main())
