"""Compares the augment stage with its peers: the same uint8 pixels in, the same normalized [B, 3, H, W] out.

    python bench/augment.py --json augment.json --peer-python PYTHON      # everything that runs here
    python bench/augment.py --recipe standard --batch 64
    python bench/augment.py --table augment.json --readme bench/README.md

Every round runs each peer once (A B C A B C ...), so other work on the machine slows all of them alike. The figures are
medians of the rounds. First calls (compilation, warm-up) have a column of their own. Each row has the largest
difference from Kornia's pixels for the same parameters, in normalized units. A ratio means little without it.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.readme import processor

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RECIPES = ("standard", "standard_random", "simclr", "randaugment_torchvision", "imagenet", "dino")
PEERS = ("kornia_eager", "kornia_compiled", "dali", "torchvision", "albumentations", "triton_augment", "cvcuda")
# The ways in which a peer can do a recipe. Each has a row, and the JSON file has the ratio to the fastest.
VARIANTS = {
    "dali": ("color_twist", "as Kornia"),
    "torchvision": ("uint8", "float32"),
    "albumentations": ("uint8", "float32"),
}
ELSEWHERE = ("torchvision", "albumentations", "triton_augment", "cvcuda")  # bench/augment_peers.py, in own processes
PAUSE = 0.02  # seconds before a run: the threads of OpenMP spin for some milliseconds after the run before
BEGIN, END = "<!-- augment.py on {} -->", "<!-- end of augment.py on {} -->"


class CannotRunError(Exception):
    """A peer cannot run this row. The message says why."""


# --- recipes and draws


class Case:
    """One recipe at one batch size: the images, our operations, and the random choices for every sample."""

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
        self.augment = augment
        # only views of the full size, and one copy of each
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
        """The choices with one order of the jitter for the whole batch, because Kornia cannot do more."""
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
        from gpuaug.augment.fused.backend import FusedBackend
        from gpuaug.augment.reference import ReferenceBackend

        kind = {"fused": FusedBackend, "kornia": ReferenceBackend}[backend]
        work = work or self.work
        parts = [(kind(p, n), c) for p, n, c in work]
        return lambda: [part(self.images, c, dtype=dtype or self.dtype) for part, c in parts]


def photographs(batch: int, size: int) -> torch.Tensor:
    """uint8 [B, size, size, 3]: parts of the photographs in scikit-image's wheel."""
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


def given(case: Case) -> dict[str, np.ndarray]:
    """The random choices, for peers with functions of their own (`Given` in bench/augment_peers.py reads them)."""
    out: dict[str, Any] = {"views": np.array(len(case.work))}
    for number, (prepared, _, chosen) in enumerate(case.work):
        names = [p.name for p in prepared]
        view: dict[str, Any] = {"sequence": np.array(names), "taps": np.array(0)}
        view["order"] = np.tile(np.arange(4), (case.batch, 1))
        for key, neutral in (("brightness", 1), ("contrast", 1), ("saturation", 1), ("hue", 0)):
            view[f"value.{key}"] = np.full(case.batch, neutral, dtype=np.float32)
        for p, c in zip(prepared, chosen, strict=True):
            gate, params = c.choice[:, 0] >= 0, c.params[0][0]
            view[f"gate.{p.name}"] = gate
            if p.name == "jitter":
                for key in ("brightness", "contrast", "saturation", "hue"):
                    neutral = view[f"value.{key}"]
                    view[f"value.{key}"] = np.where(gate, params[f"{key}_factor"], neutral).astype(np.float32)
                if len(p.slots) == 4:
                    view["order"] = np.where(gate[:, None], c.choice, np.arange(4))
            elif p.name == "blur":
                view["value.blur"] = np.broadcast_to(params["sigma"], (case.batch,)).astype(np.float32)
                view["taps"] = np.array(p.op.flags["kernel_size"])
            elif p.name == "randaugment":  # per sample and slot: the operation and its magnitude
                view["policy.name"] = np.array([[p.slots[0][k].name for k in row] for row in c.choice])
                every = np.array([[own["magnitude"] for own in slot] for slot in c.params])  # [slots, operations, B]
                view["policy.magnitude"] = np.take_along_axis(every, c.choice.T[:, None], axis=1)[:, 0].T
            elif p.name == "solarize":
                view["value.solarize"] = np.asarray(params["thresholds"], dtype=np.float32)
        out |= {f"{number}.{k}": v for k, v in view.items()}
    return out


def one_given(case: Case) -> dict[str, np.ndarray]:
    """The random choices for peers that can do only one view, with flips, a jitter of fixed order, and gray."""
    f = given(case)
    order, names = f["0.order"], set(f["0.sequence"].tolist())
    if len(case.work) > 1 or names - {"vflip", "flip", "jitter", "gray"} or (order != np.arange(4)).any():
        raise CannotRunError("no such operations that take our draws")
    out = {n: f.get(f"0.gate.{n}", np.zeros(case.batch, dtype=bool)) for n in ("vflip", "flip", "gray")}
    return out | {k: f[f"0.value.{k}"] for k in ("brightness", "contrast", "saturation", "hue")}


# --- peers: each returns a function without arguments that augments a whole batch of the same uint8 images


def kornia_eager(case: Case) -> Callable[[], list[Any]]:
    if case.recipe == "randaugment_torchvision":
        raise CannotRunError("Kornia's operations and ranges are others")
    if case.recipe == "standard_random":  # Kornia's own class draws one order for a batch
        run = case.ours("kornia")

        def as_users_run_it() -> list[Any]:  # our backend computes products on CUDA more exactly
            with mock.patch("gpuaug.augment.reference.exact_products", return_value=nullcontext()):
                return run()

        return as_users_run_it
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
    if case.recipe == "randaugment_torchvision":
        raise CannotRunError("Kornia's operations and ranges are others")
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


def dali(case: Case, variant: str) -> Callable[[], list[Any]]:
    f = one_given(case)
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali import math as dali_math

    gpu = case.device.type == "cuda"
    place = "gpu" if gpu else "cpu"
    # on CUDA the pixels are already on the device for all contestants
    images = case.images if gpu else case.images.numpy()

    def feed(name: str, values: Any, **more: Any) -> Any:  # one array is a batch of its rows
        return fn.external_source(source=lambda: values, name=name, batch=True, **more)

    scalars = {k: f[k].astype(np.float32) for k in ("brightness", "contrast", "saturation")}
    scalars["hue"] = (f["hue"] * np.float32(360)).astype(np.float32)
    scalars["saturation"] = np.where(f["gray"], np.float32(0), scalars["saturation"])
    flips = {name: f[name].astype(np.int32) for name in ("vflip", "flip")}
    # if no sample is jittered (recipe imagenet), the operators of the jitter are left out
    colours = any((v != neutral).any() for v, neutral in zip(scalars.values(), (1, 1, 1, 0), strict=True))
    if not colours and variant != "color_twist":
        raise CannotRunError("no colours in this recipe")

    @pipeline_def(
        batch_size=case.batch, num_threads=torch.get_num_threads(), device_id=0 if gpu else None, prefetch_queue_depth=1
    )
    def pipeline() -> Any:
        x = feed("x", images, layout="HWC", device=place, no_copy=gpu)
        given = {k: feed(k, v) for k, v in scalars.items()} if colours else {}
        full = 255.0
        if colours and variant == "color_twist":
            x = fn.color_twist(x, **given)
        elif colours:
            full = 1.0
            x = fn.cast(x, dtype=types.FLOAT) * (1 / 255)
            x = dali_math.clamp(x * given["brightness"], 0.0, 1.0)
            weights = types.Constant(np.array([0.299, 0.587, 0.114], dtype=np.float32))
            # the mean of the gray image equals the gray value of the channels' means
            gray = fn.reductions.sum(
                fn.reductions.mean(x, axes=(0, 1)) * (weights.gpu() if gpu else weights), axes=(0,)
            )
            x = dali_math.clamp(x * given["contrast"] + gray * (1 - given["contrast"]), 0.0, 1.0)
            x = dali_math.clamp(fn.hsv(x, saturation=given["saturation"], dtype=types.FLOAT), 0.0, 1.0)
            x = dali_math.clamp(fn.hue(x, hue=given["hue"], dtype=types.FLOAT), 0.0, 1.0)
        x = fn.flip(x, vertical=feed("v", flips["vflip"]), horizontal=0, device=place)
        return fn.crop_mirror_normalize(
            x, mirror=feed("h", flips["flip"]), dtype=types.FLOAT, output_layout="CHW",
            mean=[full * m for m in MEAN], std=[full * s for s in STD], device=place,
        )  # fmt: skip

    pipe = pipeline()
    pipe.build()

    def run() -> list[torch.Tensor]:
        (out,) = pipe.run()
        y = torch.from_dlpack(out.as_tensor())
        return [y.to(case.dtype)]

    return run


# --- peers in processes of their own


class Elsewhere:
    """A peer in a process of another Python (bench/augment_peers.py), which measures its own time."""

    def __init__(self, case: Case, peer: str, variant: str, python: str) -> None:
        self.folder = Path(tempfile.mkdtemp())
        np.savez(self.folder / "in.npz", images=case.images.cpu().numpy(), **given(case))
        script, threads = Path(__file__).with_name("augment_peers.py"), str(torch.get_num_threads())
        self.process = subprocess.Popen(
            [python, str(script), peer, variant, str(self.folder), str(case.device), threads],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.seconds = 0.0
        answer = self._answer()
        if not answer.get("ok"):
            self.close()
            raise CannotRunError(answer.get("reason", "its process ended"))
        self.how = answer["how"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                return dict(json.loads(line))
            except json.JSONDecodeError:  # what a library prints
                continue
        return {}

    def _ask(self, what: str) -> float:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(what + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        answer = self._answer()
        if "seconds" not in answer:
            raise RuntimeError("its process ended")
        return float(answer["seconds"])

    def __call__(self) -> None:
        self.seconds = self._ask("run")

    def result(self) -> list[torch.Tensor]:
        self._ask("save")
        return [torch.from_numpy(x) for x in np.load(self.folder / "out.npz").values()]

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


# --- measuring


def make(case: Case, peer: str, variant: str, pythons: list[str]) -> Any:
    if peer in ("triton_augment", "cvcuda") and case.device.type != "cuda":
        raise CannotRunError("needs CUDA")
    if peer in ELSEWHERE:
        reasons = []
        for python in pythons:
            try:
                return Elsewhere(case, peer, variant, python)
            except CannotRunError as error:
                reasons.append(str(error))
        raise CannotRunError(reasons[0])
    if peer == "dali":
        return dali(case, variant)
    return {"kornia_eager": kornia_eager, "kornia_compiled": kornia_compiled}[peer](case)


Name = tuple[str, str]  # peer, variant


def measure(case: Case, peers: list[str], rounds: int, pythons: list[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    runs: dict[Name, Any] = {("fused", ""): case.ours("fused")}
    for peer in peers:
        for variant in VARIANTS.get(peer, ("",)):
            try:
                runs[peer, variant] = make(case, peer, variant, pythons)
            except CannotRunError as error:
                if {"peer": peer, "reason": str(error)}.items() <= (rows[-1] if rows else {}).items():
                    continue  # one row says it for all variants
                rows.append(_row(case, peer, variant, reason=str(error)))
    first, differences = {}, {}
    with torch.no_grad():
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
                if name[0] == "fused":
                    raise
                rows.append(_row(case, *name, reason=f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"))
                del runs[name]
                continue
            # fused is compared with Kornia's modules, and a peer with Kornia's modules for the peer's own choices
            batch_order = name[0] in ("kornia_eager", "kornia_compiled") and case.recipe != "standard_random"
            against = one_order if batch_order else expected
            apart = [(a.float().cpu() - b.cpu()).abs() for a, b in zip(out, against, strict=True)]
            differences[name] = (max(d.max().item() for d in apart), float(np.mean([d.mean().item() for d in apart])))
            del out, apart
        del one_order, expected
        for name, run in runs.items():
            for _ in range(1 if first[name] > 1 else 2):
                run()
        case.synchronize()
        times: dict[Name, list[float]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                time.sleep(PAUSE)
                start = time.perf_counter()
                run()
                case.synchronize()
                times[name].append(run.seconds if isinstance(run, Elsewhere) else time.perf_counter() - start)
    medians = {name: float(np.median(t)) for name, t in times.items()}
    for name, seconds in medians.items():
        run = runs[name]
        rows.append(
            _row(
                case,
                *name,
                images_per_second=case.batch * len(case.work) / seconds,
                milliseconds=1e3 * seconds,
                lowest_milliseconds=1e3 * min(times[name]),
                highest_milliseconds=1e3 * max(times[name]),
                first_call_seconds=first[name],
                max_difference=differences[name][0],
                mean_difference=differences[name][1],
                fused_ratio=None if name[0] == "fused" else seconds / medians["fused", ""],
                rounds=rounds,
                **({"how": run.how} if isinstance(run, Elsewhere) else {}),
            )
        )
        if isinstance(run, Elsewhere):
            run.close()
    rows.append(_row(case, "fused_host", "", **_host_figures(case)))
    if case.device.type == "cuda":
        rows.append(_row(case, "fused_device", "", **_device_figures(case, medians["fused", ""])))
    order = ("fused", "fused_host", "fused_device", *PEERS)
    return sorted(rows, key=lambda r: order.index(r["peer"]))


def _host_figures(case: Case) -> dict[str, Any]:
    """Host time for a batch: random values, parameters, programs, the call, the launch.

    On the CPU the same threads also compute the pixels. So the images have the fewest pixels that the recipe allows.
    """
    blur = any(p.name == "blur" for prepared, _, _ in case.work for p in prepared)
    side = case.images.shape[1] if case.device.type == "cuda" else 12 if blur else 3
    images = case.images[:, :side, :side].contiguous()
    indices, views = np.arange(case.batch), case.augment.views
    took = []
    for k in range(60):
        start = time.perf_counter()
        case.augment.render(
            [images] * len(views), case.augment.draw(seed=0, epoch=k, indices=indices), dtype=case.dtype
        )
        took.append(time.perf_counter() - start)
        case.synchronize()
    return {"host_microseconds": 1e6 * float(np.median(took[10:])), "views": len(views), "pixels": side * side}


def _device_figures(case: Case, seconds: float) -> dict[str, float]:
    """Launches per batch, and bytes per second compared with a device copy in the same run.

    Only the device's time for kernels and copies counts. Host time is a separate figure, because it overlaps with the
    training. ``seconds``, the time of the whole call with the host, give the lower share.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    run, rounds = case.ours("fused"), 10
    run()
    case.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(rounds):
            run()
        case.synchronize()
    events = trace.key_averages()
    launches = sum(e.count for e in events if "LaunchKernel" in e.key) / rounds
    on_device = sum(e.self_device_time_total for e in events if e.device_type == DeviceType.CUDA) / 1e6 / rounds
    on_device = on_device or seconds  # a profiler that sees no device
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
        "device_microseconds": 1e6 * on_device,
        "bytes_per_second": moved / on_device,
        "copy_bytes_per_second": copied,
        "share_of_copy": moved / on_device / copied,
        "share_of_copy_with_host": moved / seconds / copied,
    }


def _row(case: Case, peer: str, variant: str, **values: Any) -> dict[str, Any]:
    size = case.images.shape[1]
    return {"recipe": case.recipe, "batch": case.batch, "size": size, "peer": peer, "variant": variant, **values}


def machine(device: str, pythons: list[str]) -> dict[str, Any]:
    versions = {"torch": torch.__version__}
    from importlib.metadata import PackageNotFoundError, version

    for package in ("kornia", "nvidia-dali-cuda120", "nvidia-dali-cuda130", "triton"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    for package in ("torchvision", "albumentations", "opencv-python-headless", "triton-augment", "cvcuda-cu12"):
        for python in pythons:
            code = f"from importlib.metadata import version; print(version({package!r}))"
            found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
            if found:
                versions[package] = found
                break
    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "date": datetime.date.today().isoformat(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "versions": versions,
    }


def _line(r: dict[str, Any]) -> str:
    start = f"| {r['recipe']} | {r['batch']} |"
    if r["peer"] == "fused_host":
        what = f"host, {r['views']} view{'s' * (r['views'] > 1)}, images of {r['pixels']} pixels"
        return f"{start} fused: {what} | | {r['host_microseconds'] / 1e3:.2f} | | | |"
    if r["peer"] == "fused_device":
        return f"{start} fused: launches {r['launches']}, {r['share_of_copy']:.2f} of a device copy | | | | | |"
    who = ", ".join(x for x in (r["peer"], r["variant"], r.get("how", "")) if x)
    if "reason" in r:
        return f"{start} {r['peer']} | not run: {r['reason']} | | | | |"
    ratio = "" if r["fused_ratio"] is None else f"{r['fused_ratio']:.1f}×"
    spread = f"{r['milliseconds']:.1f} ({r['lowest_milliseconds']:.1f} to {r['highest_milliseconds']:.1f})"
    return (
        f"{start} {who} | {r['images_per_second']:,.0f} | {spread} | {r['first_call_seconds']:.2f} | {ratio} | "
        f"{r['max_difference']:.1e} (mean {r['mean_difference']:.0e}) |"
    )


def table(report: dict[str, Any]) -> str:
    m = report["machine"]
    lines = [
        f"{m['processor']}, {m['threads']} threads, device {m['device']}, {m['date']}, load {m['load'] or 0:.1f}; "
        + ", ".join(f"{k} {v}" for k, v in m["versions"].items() if v != "not installed"),
        "",
        "| recipe | B | who | images/s | ms per batch (of all rounds) | first call, s | fused is faster by | "
        "largest difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join(lines + [_line(r) for r in report["results"]])


def insert(text: str, section: str, device: str) -> str:
    """The README with this section between the marks of its device. Missing marks are added after the chapter."""
    begin, end = BEGIN.format(device), END.format(device)
    if begin not in text:
        before, mark, rest = text.partition("\n## loader.py")
        return f"{before.rstrip()}\n\n{begin}\n{section}\n{end}\n{mark}{rest}"
    before, rest = text.split(begin, 1)
    return f"{before}{begin}\n{section}\n{end}{rest.split(end, 1)[1]}"


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
        "--peer-python", nargs="+", default=[],
        help="Pythons in whose environments torchvision, albumentations (triton_augment, cvcuda) are; "
        "the first that has a peer runs it, this one last",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--table", type=Path, help="print the table of a report and stop")
    parser.add_argument("--readme", type=Path, help="with --table: put it between the marks of this file")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.table:
        report = json.loads(args.table.read_text())
        device = "cpu" if report["machine"]["device"] == "cpu" else "cuda"
        if args.readme:
            args.readme.write_text(insert(args.readme.read_text(), table(report), device))
        else:
            print(table(report))
        return
    dtype = getattr(torch, args.dtype or ("float32" if args.device == "cpu" else "bfloat16"))
    pythons = [*args.peer_python, sys.executable]
    report = {"machine": machine(args.device, pythons), "results": [], "ratios": {}}
    main_batch = args.batch[0] if args.device == "cpu" else args.batch[-1]
    begin, parts = time.perf_counter(), [(recipe, batch) for recipe in args.recipe for batch in args.batch]
    for number, (recipe, batch) in enumerate(parts, 1):
        rows = measure(Case(recipe, batch, args.size, args.device, dtype), args.peer, args.rounds, pythons)
        report["results"] += rows
        for r in rows:
            print(_line(r), flush=True)
        print(f"{number} of {len(parts)} parts, {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        if batch == main_batch:
            found = {
                peer: [r["fused_ratio"] for r in rows if r["peer"] == peer and "reason" not in r] for peer in PEERS
            }
            report["ratios"][recipe] = {peer: min(ratios, default=None) for peer, ratios in found.items()}
        if args.json:  # after every part: a stopped run keeps what it has
            args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
