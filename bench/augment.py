"""The augment stage beside its peers: same uint8 pixels in, same normalised [B, 3, H, W] out, in turns in one process.

    python bench/augment.py --json augment.json          # everything that runs here
    python bench/augment.py --recipe standard --batch 64 --peer-python ~/other/bin/python
    python bench/augment.py --table augment.json          # the table of bench/README.md

Every round runs each peer once (A B C A B C ...), so that what else the machine does meets all of them; the median of
the rounds counts. First calls (compilation, warm-up) are reported apart. Beside each ratio stands the largest
difference to Kornia's pixels with the same parameters, in normalised units: without it a ratio says nothing.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RECIPES = ("standard", "standard_random", "simclr", "randaugment", "imagenet", "dino")
PEERS = ("kornia_eager", "kornia_compiled", "dali", "torchvision", "albumentations", "triton_augment", "cvcuda")
ELSEWHERE = ("torchvision", "triton_augment", "cvcuda")  # may live in another environment
FLIPS_AND_JITTER = {"vflip", "flip", "jitter", "gray"}


class CannotRunError(Exception):
    """A peer has no part in this row; says why."""


# --- recipes and draws


class Case:
    """One recipe at one batch size: images, our operations, what was chosen for every sample."""

    def __init__(self, recipe: str, batch: int, size: int, device: str, dtype: torch.dtype) -> None:
        import gpuaug

        name = {"standard_random": "standard"}.get(recipe, recipe)
        overrides = [f"augment={name}", "source.root=."]
        if recipe == "standard":
            overrides.append("augment.ops.jitter.order=[0,1,2,3]")  # the order that Kornia can compile
        try:
            augment = gpuaug.build(gpuaug.compose("train", overrides).augment)
        except gpuaug.ConfigError:
            if recipe != "imagenet":
                raise
            augment = gpuaug.build(gpuaug.compose("train", ["augment=flip", "source.root=."]).augment)
        self.recipe, self.batch, self.device, self.dtype = recipe, batch, torch.device(device), dtype
        # Of several views those of the full size; of several copies one.
        self.views = [v for v in augment.views if v.copy == 0 and v.name != "local"]
        self.images = photographs(batch, size).to(self.device)
        indices = np.arange(batch)
        drawn = augment.draw(seed=0, epoch=0, indices=indices)
        self.work = []  # per view: prepared operations, normalization, choices
        for v in self.views:
            at = (v.name, v.copy)
            chosen = [
                p.draw(drawn.uniforms[(*at, p.name)], (size, size), drawn.keys.get((*at, p.name)))
                for p in v.augment.prepared
            ]
            self.work.append((v.augment.prepared, copy.deepcopy(v.augment.normalize).to(self.device), chosen))

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def one_order(self) -> list[Any]:
        """The choices with one order of the jitter for the batch, all that Kornia can do."""
        work = []
        for prepared, normalize, chosen in self.work:
            changed = []
            for p, c in zip(prepared, chosen, strict=True):
                if len(p.slots) == 4:
                    order = c.choice[int(np.argmax(c.choice[:, 0] >= 0))]
                    changed.append(replace(c, choice=np.where(c.choice[:, :1] >= 0, order, -1)))
                else:
                    changed.append(c)
            work.append((prepared, normalize, changed))
        return work

    def ours(
        self, backend: str, work: list[Any] | None = None, dtype: torch.dtype | None = None
    ) -> Callable[[], list[Any]]:
        from gpuaug.augment.fused import FusedBackend
        from gpuaug.augment.reference import ReferenceBackend

        kind = {"fused": FusedBackend, "kornia": ReferenceBackend}[backend]
        work = work or self.work
        parts = [(kind(p, n), c) for p, n, c in work]
        return lambda: [part(self.images, c, dtype=dtype or self.dtype) for part, c in parts]


def photographs(batch: int, size: int) -> torch.Tensor:
    """uint8 [B, size, size, 3]: windows of the photographs in scikit-image's wheel."""
    from PIL import Image
    from skimage import data

    folder, random = Path(data.__file__).parent, np.random.default_rng(0)
    photos = [
        Image.open(folder / n).convert("RGB") for n in ("astronaut.png", "coffee.png", "chelsea.png", "rocket.jpg")
    ]
    windows = []
    for k in range(batch):
        photo = photos[k % len(photos)]
        side = int(random.integers(120, min(photo.size)))
        x, y = (int(random.integers(0, n - side + 1)) for n in photo.size)
        windows.append(np.asarray(photo.resize((size, size), box=(x, y, x + side, y + side))))
    return torch.from_numpy(np.stack(windows))


def factors(case: Case) -> dict[str, np.ndarray]:
    """Gates and factors of flips, fixed-order jitter and gray, for peers with functions of their own."""
    prepared, _, chosen = case.work[0]
    by_name = {p.name: c for p, c in zip(prepared, chosen, strict=True)}
    if len(case.work) > 1 or set(by_name) - FLIPS_AND_JITTER or case.recipe == "standard_random":
        raise CannotRunError("no such operations that can be given our draws")
    out = {}
    for name in FLIPS_AND_JITTER:
        out[name] = by_name[name].choice[:, 0] >= 0 if name in by_name else np.zeros(case.batch, dtype=bool)
    jitter = by_name["jitter"].params[0][0] if "jitter" in by_name else {}
    for key, neutral in (("brightness", 1), ("contrast", 1), ("saturation", 1), ("hue", 0)):
        value = jitter.get(f"{key}_factor", np.full(case.batch, neutral, dtype=np.float32))
        out[key] = np.where(out["jitter"], value, neutral).astype(np.float32)
    return out


# --- peers: each gives a function of no arguments that does a whole batch, from the same uint8 images


def kornia_eager(case: Case) -> Callable[[], list[Any]]:
    if case.recipe in ("randaugment", "standard_random"):  # Kornia's own choose one policy or order for a batch
        return case.ours("kornia")
    runs = [_sequential(case, *work) for work in case.one_order()]
    return lambda: [run() for run in runs]


def _sequential(case: Case, prepared: Any, normalize: Any, chosen: Any) -> Callable[[], Any]:
    import kornia.augmentation as K
    from kornia.augmentation.container.params import ParamItem

    modules, params = [], []
    for p, c in zip(prepared, chosen, strict=True):
        module = copy.deepcopy(p.op)
        module.p = 0.5  # with 1 the gate in `batch_prob` is ignored
        values = {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in c.params[0][0].items()}
        values["forward_input_shape"] = torch.tensor([case.batch, 3, *case.images.shape[1:3]])
        values["batch_prob"] = torch.from_numpy((c.choice[:, 0] >= 0).astype(np.float32))
        if len(p.slots) == 4:
            values["order"] = torch.from_numpy(c.choice[int(np.argmax(c.choice[:, 0] >= 0))])
        modules.append(module)
        params.append(ParamItem(f"{type(module).__name__}_{len(params)}", values))
    sequence = K.AugmentationSequential(*modules, data_keys=["input"]) if modules else None

    def run() -> torch.Tensor:
        x = case.images.permute(0, 3, 1, 2).float().div_(255)
        if sequence is not None:
            x = sequence(x, params=params)
        return normalize(x).to(case.dtype)

    return run


def kornia_compiled(case: Case) -> Callable[[], list[Any]]:
    if case.recipe == "randaugment":
        raise CannotRunError("Kornia's policy is Python over the batch")
    if case.recipe == "standard_random":
        raise CannotRunError("Kornia has one order for a batch")
    torch._dynamo.reset()  # what earlier rows compiled counts towards its limit
    functions = []
    for prepared, normalize, chosen in case.one_order():
        steps = []
        for p, c in zip(prepared, chosen, strict=True):
            module = copy.deepcopy(p.op)
            if len(p.slots) == 4:  # given beforehand: reading it from params cannot be compiled
                module = type(module)(
                    module.brightness, module.contrast, module.saturation, module.hue, p=0.5,
                    order=tuple(c.choice[int(np.argmax(c.choice[:, 0] >= 0))].tolist()),
                )  # fmt: skip
            values = {k: torch.from_numpy(np.ascontiguousarray(v)).to(case.device) for k, v in c.params[0][0].items()}
            gate = torch.from_numpy(c.choice[:, 0] >= 0).to(case.device)[:, None, None, None]
            steps.append((module, values, gate))

        def chain(images: torch.Tensor, steps: Any = steps, normalize: Any = normalize) -> torch.Tensor:
            x = images.permute(0, 3, 1, 2).float() / 255
            for module, values, gate in steps:
                x = torch.where(gate, module.apply_transform(x, values, module.flags, None), x)
            return normalize(x).to(case.dtype)

        functions.append(torch.compile(chain))

    def run() -> list[torch.Tensor]:
        with torch.no_grad():
            return [f(case.images) for f in functions]

    return run


def dali(case: Case) -> Callable[[], list[Any]]:
    f = factors(case)
    from nvidia.dali import fn, pipeline_def, types

    gpu = case.device.type == "cuda"
    images = case.images.cpu().numpy()
    place = "gpu" if gpu else "cpu"

    def feed(name: str, values: Any, **more: Any) -> Any:
        return fn.external_source(source=lambda: list(values), name=name, **more)

    scalars = {k: f[k].astype(np.float32) for k in ("brightness", "contrast", "saturation")}
    scalars["hue"] = f["hue"] * np.float32(360)
    scalars["saturation"] = np.where(f["gray"], np.float32(0), scalars["saturation"])

    @pipeline_def(
        batch_size=case.batch, num_threads=torch.get_num_threads(), device_id=0 if gpu else None, prefetch_queue_depth=1
    )
    def pipeline() -> Any:
        x = feed("x", images, layout="HWC")
        x = x.gpu() if gpu else x
        x = fn.color_twist(x, **{k: feed(k, [np.float32(a) for a in v]) for k, v in scalars.items()})
        x = fn.flip(x, vertical=feed("v", [np.int32(a) for a in f["vflip"]]), horizontal=0, device=place)
        return fn.crop_mirror_normalize(
            x, mirror=feed("h", [np.int32(a) for a in f["flip"]]), dtype=types.FLOAT, output_layout="CHW",
            mean=[255 * m for m in MEAN], std=[255 * s for s in STD], device=place,
        )  # fmt: skip

    pipe = pipeline()
    pipe.build()

    def run() -> list[torch.Tensor]:
        (out,) = pipe.run()
        y = torch.from_dlpack(out.as_tensor())
        return [y.to(case.dtype)]

    return run


def albumentations(case: Case) -> Callable[[], list[Any]]:
    f = factors(case)
    try:
        import albumentations.augmentations.pixel.functional as fp
        import cv2
    except ImportError as error:
        raise CannotRunError(str(error)) from error
    cv2.setNumThreads(0)  # one thread per image, as in a loader's worker
    images, out = case.images.cpu().numpy(), np.empty((case.batch, 3, *case.images.shape[1:3]), dtype=np.float32)
    mean, scale = np.array(MEAN, dtype=np.float32) * 255, 1 / (np.array(STD, dtype=np.float32) * 255)

    def one(k: int) -> None:
        x = images[k]
        if f["vflip"][k]:
            x = cv2.flip(x, 0)
        if f["flip"][k]:
            x = cv2.flip(x, 1)
        if f["jitter"][k]:
            x = fp.adjust_brightness_torchvision(x, float(f["brightness"][k]))
            x = fp.adjust_contrast_torchvision(x, float(f["contrast"][k]))
            x = fp.adjust_saturation_torchvision(x, float(f["saturation"][k]))
            x = fp.adjust_hue_torchvision(x, float(f["hue"][k]))
        if f["gray"][k]:
            x = fp.to_gray_weighted_average(x)
            x = x if x.ndim == 3 and x.shape[2] == 3 else np.repeat(x.reshape(*x.shape[:2], 1), 3, axis=2)
        out[k] = ((x - mean) * scale).transpose(2, 0, 1)

    pool = ThreadPoolExecutor(torch.get_num_threads())

    def run() -> list[torch.Tensor]:
        list(pool.map(one, range(case.batch)))
        return [torch.from_numpy(out)]

    return run


# --- peers in another environment: this file, run by another Python, answers one line per round


class Elsewhere:
    """A peer in a process of another Python; it times itself."""

    def __init__(self, case: Case, peer: str, python: str) -> None:
        self.folder = Path(tempfile.mkdtemp())
        np.savez(self.folder / "in.npz", images=case.images.cpu().numpy(), **factors(case))
        self.process = subprocess.Popen(
            [python, __file__, "--serve", peer, "--folder", str(self.folder), "--device", str(case.device)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.seconds = 0.0
        answer = self._ask("start")
        if not answer.get("ok"):
            self.process.kill()
            raise CannotRunError(answer.get("reason", "its process ended"))

    def _ask(self, what: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(what + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline() or "{}")
        except (BrokenPipeError, json.JSONDecodeError):
            return {}

    def __call__(self) -> list[torch.Tensor] | None:
        self.seconds = self._ask("run").get("seconds", float("nan"))
        return None

    def result(self) -> list[torch.Tensor]:
        self._ask("save")
        return [torch.from_numpy(np.load(self.folder / "out.npy"))]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def serve(peer: str, folder: Path, device: str) -> None:
    data = dict(np.load(folder / "in.npz"))
    try:
        run = {"torchvision": _torchvision}[peer](data, device)
    except (ImportError, RuntimeError, KeyError) as error:
        reason = f"no adapter for {peer}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        print(json.dumps({"ok": False, "reason": reason}), flush=True)
        return
    for line in sys.stdin:
        if line.strip() == "run":
            start = time.perf_counter()
            run()
            if device != "cpu":
                torch.cuda.synchronize()
            print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)
        elif line.strip() == "save":
            np.save(folder / "out.npy", run().float().cpu().numpy())
            print("{}", flush=True)
        else:
            print(json.dumps({"ok": True}), flush=True)


def _torchvision(f: dict[str, Any], device: str) -> Callable[[], torch.Tensor]:
    """torchvision v2's functions, image by image as in a dataset, on as many threads as torch has."""
    from torchvision.transforms.v2 import functional as V

    images = torch.from_numpy(f["images"]).permute(0, 3, 1, 2).contiguous().to(device)
    threads = torch.get_num_threads()

    def one(k: int) -> torch.Tensor:
        x = images[k]
        x = V.vertical_flip(x) if f["vflip"][k] else x
        x = V.horizontal_flip(x) if f["flip"][k] else x
        if f["jitter"][k]:
            x = V.adjust_brightness(x, float(f["brightness"][k]))
            x = V.adjust_contrast(x, float(f["contrast"][k]))
            x = V.adjust_saturation(x, float(f["saturation"][k]))
            x = V.adjust_hue(x, float(f["hue"][k]))
        x = V.rgb_to_grayscale(x, 3) if f["gray"][k] else x
        return V.normalize(V.to_dtype(x, torch.float32, scale=True), list(MEAN), list(STD))

    if device != "cpu":
        return lambda: torch.stack([one(k) for k in range(len(images))])
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(threads)
    return lambda: torch.stack(list(pool.map(one, range(len(images)))))


# --- measuring


def make(case: Case, peer: str, python: str | None) -> Any:
    if peer in ELSEWHERE:
        if peer != "torchvision" and case.device.type != "cuda":
            raise CannotRunError("needs CUDA")
        return Elsewhere(case, peer, python or sys.executable)
    return {
        "kornia_eager": kornia_eager,
        "kornia_compiled": kornia_compiled,
        "dali": dali,
        "albumentations": albumentations,
    }[peer](case)


def measure(case: Case, peers: list[str], rounds: int, python: str | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    runs: dict[str, Any] = {"fused": case.ours("fused")}
    for peer in peers:
        try:
            runs[peer] = make(case, peer, python)
        except CannotRunError as error:
            rows.append(_row(case, peer, reason=str(error)))
    first, differences = {}, {}
    with torch.no_grad():
        same = case.ours("fused", dtype=torch.float32)()
        one_order = case.ours("fused", case.one_order(), dtype=torch.float32)()
        expected = case.ours("kornia", dtype=torch.float32)()
        for name, run in list(runs.items()):
            start = time.perf_counter()
            try:
                out = run()
                case.synchronize()
                first[name] = time.perf_counter() - start
                out = run.result() if isinstance(run, Elsewhere) else out
            except Exception as error:
                if name == "fused":
                    raise
                rows.append(_row(case, name, reason=f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"))
                del runs[name]
                continue
            # What is compared: fused with Kornia's own modules; a peer with those, given what the peer was given.
            batch_order = name in ("kornia_eager", "kornia_compiled") and case.recipe not in (
                "randaugment",
                "standard_random",
            )
            against = expected if name == "fused" else one_order if batch_order else expected
            differences[name] = max(
                (a.float().cpu() - b.cpu()).abs().max().item() for a, b in zip(out, against, strict=True)
            )
            del out
        del same, one_order, expected
        for _ in range(2):
            for run in runs.values():
                run()
        case.synchronize()
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                case.synchronize()
                times[name].append(run.seconds if isinstance(run, Elsewhere) else time.perf_counter() - start)
    medians = {name: float(np.median(t)) for name, t in times.items()}
    for name, seconds in medians.items():
        rows.append(
            _row(
                case,
                name,
                images_per_second=case.batch * len(case.work) / seconds,
                milliseconds=1e3 * seconds,
                first_call_seconds=first[name],
                max_difference=differences[name],
                fused_ratio=None if name == "fused" else seconds / medians["fused"],
                rounds=rounds,
            )
        )
        if isinstance(runs[name], Elsewhere):
            runs[name].close()
    if case.device.type == "cuda":
        rows.append(_row(case, "fused_device", **_device_figures(case, medians["fused"])))
    return sorted(rows, key=lambda r: ("fused", "fused_device", *PEERS).index(r["peer"]))


def _device_figures(case: Case, seconds: float) -> dict[str, float]:
    """Launches per batch, host time per batch, and bytes moved beside a device copy in the same run."""
    from torch.profiler import ProfilerActivity, profile

    run = case.ours("fused")
    run()
    case.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        run()
        case.synchronize()
    launches = sum(e.count for e in trace.key_averages() if "LaunchKernel" in e.key)
    host = []
    for _ in range(20):
        start = time.perf_counter()
        run()
        host.append(time.perf_counter() - start)
        case.synchronize()
    moved = case.images.numel() * (1 + case.dtype.itemsize) * len(case.work)
    buffer = torch.empty(moved // 2, dtype=torch.uint8, device=case.device)
    target = torch.empty_like(buffer)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(buffer)
    begin.record()
    for _ in range(20):
        target.copy_(buffer)
    end.record()
    case.synchronize()
    copied = 20 * moved / (begin.elapsed_time(end) / 1e3)
    return {
        "launches": launches,
        "host_microseconds": 1e6 * float(np.median(host)),
        "bytes_per_second": moved / seconds,
        "copy_bytes_per_second": copied,
        "share_of_copy": moved / seconds / copied,
    }


def _row(case: Case, peer: str, **values: Any) -> dict[str, Any]:
    return {"recipe": case.recipe, "batch": case.batch, "size": case.images.shape[1], "peer": peer, **values}


def machine(device: str) -> dict[str, Any]:
    processor = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            processor = line.split(":", 1)[1].strip()
            break
    versions = {"torch": torch.__version__}
    from importlib.metadata import PackageNotFoundError, version

    for package in ("kornia", "nvidia-dali-cuda120", "albumentations", "triton"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "processor": processor,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "date": datetime.date.today().isoformat(),
        "versions": versions,
    }


def table(report: dict[str, Any]) -> str:
    m = report["machine"]
    lines = [
        f"{m['processor']}, {m['threads']} threads, device {m['device']}, {m['date']}; "
        + ", ".join(f"{k} {v}" for k, v in m["versions"].items()),
        "",
        "| recipe | B | who | images/s | ms per batch | first call, s | fused is faster by | largest difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in report["results"]:
        if r["peer"] == "fused_device":
            lines.append(
                f"| {r['recipe']} | {r['batch']} | launches {r['launches']}, host {r['host_microseconds']:.0f} µs, "
                f"{r['share_of_copy']:.2f} of a device copy | | | | | |"
            )
        elif "reason" in r:
            lines.append(f"| {r['recipe']} | {r['batch']} | {r['peer']} | not run: {r['reason']} | | | | |")
        else:
            ratio = "" if r["fused_ratio"] is None else f"{r['fused_ratio']:.1f}×"
            lines.append(
                f"| {r['recipe']} | {r['batch']} | {r['peer']} | {r['images_per_second']:,.0f} | "
                f"{r['milliseconds']:.1f} | {r['first_call_seconds']:.2f} | {ratio} | {r['max_difference']:.1e} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--peer", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--batch", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument(
        "--rounds", type=int, default=7, help="how often each peer runs; the median counts (default: 7)"
    )
    parser.add_argument("--threads", type=int, default=None, help="torch's threads, also for the other CPU peers")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, help="float32 on the cpu, bfloat16 on cuda, unless given")
    parser.add_argument(
        "--peer-python", help="a Python in whose environment torchvision (or triton_augment, cvcuda) is"
    )
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--table", type=Path, help="print the table of a report and stop")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.serve:
        serve(args.serve, args.folder, args.device)
        return
    if args.table:
        print(table(json.loads(args.table.read_text())))
        return
    dtype = getattr(torch, args.dtype or ("float32" if args.device == "cpu" else "bfloat16"))
    report: dict[str, Any] = {"machine": machine(args.device), "results": [], "ratios": {}}
    main_batch = args.batch[0] if args.device == "cpu" else args.batch[-1]
    for recipe in args.recipe:
        for batch in args.batch:
            rows = measure(Case(recipe, batch, args.size, args.device, dtype), args.peer, args.rounds, args.peer_python)
            report["results"] += rows
            for r in rows:
                print(table({"machine": report["machine"], "results": [r]}).splitlines()[-1], flush=True)
            if batch == main_batch:
                found = {r["peer"]: r.get("fused_ratio") for r in rows}
                report["ratios"][recipe] = {peer: found.get(peer) for peer in PEERS}
            if args.json:  # after every row: a stopped run keeps what it has
                args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
