"""The report of `gpuaug doctor report=FILE`: what this machine is, what was measured, and no private data.

It is one JSON file, because people can read it and programs can compare it. :func:`main` runs in a child process.
"""

from __future__ import annotations

import datetime
import faulthandler
import getpass
import json
import logging
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gpuaug import config, machine
from gpuaug.augment.fused.backend import FusedBackend
from gpuaug.augment.reference import ReferenceBackend
from gpuaug.loader.self_check import LEVEL, steady
from gpuaug.tools.parity.differences import Difference
from gpuaug.tools.profile.trace import trace

ABOUT = (
    "Made by `gpuaug doctor report=FILE`. All images are made by the command. Left out are folders, the names of the "
    "user and of the host, and all environment variables but those below."
)
VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "OMP_NUM_THREADS")
SMI = "name,memory.used,utilization.gpu,pstate,clocks.sm,clocks.mem,temperature.gpu,power.draw,mig.mode.current"
# Bytes per pixel that CUDA's kernels move, a copy of bench/roofline.py's table in bench/README.md; bfloat16 results.
MOVED = {"flip": 9.0, "standard": 12.0, "simclr": 18.1, "randaugment_torchvision": 54.0, "dino": 26.1}
LOADER = "loader"  # the part that is no recipe; it takes half of the seconds
BATCH = {"cpu": 32, "cuda": 256}
DTYPE = torch.bfloat16
SEEDS, SAMPLES = (0, 1), 16  # of the comparison with Kornia
FEWEST = 3  # rounds of a measurement
BUSY = 60_000_000  # clock cycles, some 30 ms, in which the device waits while the host queues a batch
LIMIT_S = 170.0  # a part that takes longer prints where it is, before doctor kills it

Measured = tuple[bool, str, dict[str, Any]]  # whether all is well, the result in words, figures


def this_machine(devices: Any) -> dict[str, Any]:
    """What a report says of the machine. ``devices``: those that torch can use."""
    root = Path(machine.__file__).parents[1]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _lines("git", "-C", str(root), "rev-parse", "HEAD") if (root / ".git").exists() else [],  # of a clone
        **machine.identity(),
        "system": platform.platform(),
        "cpus": machine.usable_cpus(),
        "devices": devices,
        "nvidia_smi": _lines("nvidia-smi", f"--query-gpu={SMI}", "--format=csv"),
        "environment": {name: os.environ.get(name) for name in VARIABLES},
    }


def _lines(*command: str) -> list[str]:
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.splitlines()
    return []


def as_json(values: dict[str, Any]) -> str:
    """A report as JSON, without private data."""
    return json.dumps(_public({"about": ABOUT, **values}), indent=1) + "\n"


def _public(value: Any) -> Any:
    """JSON without folders and without the names of the user and the host."""
    if isinstance(value, dict):
        return {name: _public(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_public(each) for each in value]
    if not isinstance(value, str):
        return value
    if home := os.path.expanduser("~").rstrip("/"):
        value = value.replace(home, "~")  # first, because it may have spaces
    value = re.sub(r"(?<![\w:/.])~?/(?:[^\s/:'\"]+/)+", ".../", value)  # a file keeps its name
    names = {socket.gethostname(), socket.gethostname().partition(".")[0]}
    with suppress(OSError, KeyError):  # in a container, a user may have no name
        names.add(getpass.getuser())
    words = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True) if name)
    return re.sub(rf"(?<!\w)(?:{words})(?!\w)", "***", value) if words else value


# --- in a child process


def main() -> None:
    """Measure the part that the command line names, and print an `Answer` as the last line."""
    part, device, seconds = sys.argv[1:]
    faulthandler.enable()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("gpuaug").setLevel(logging.INFO)
    measure = loader if part == LOADER else recipe
    print(json.dumps(measure(part, torch.device(device), float(seconds))), flush=True)


def recipe(name: str, device: torch.device, seconds: float) -> Measured:
    """Compare a recipe's kernels with Kornia, and measure their time."""
    augment = config.build(config.compose("train", [f"augment={name}", "source.root=."]).augment).at(0)
    differences = [compare(augment, device, seed) for seed in SEEDS]
    worst = max(differences, key=lambda d: d["largest"])
    found = {"differences": differences, **kernels(augment, device, seconds, moved=MOVED[name])}
    paper = f" ({found['paper_milliseconds']:.3g} on paper)" if "paper_milliseconds" in found else ""
    good = all(d["verdict"] in ("equal", "rounding") for d in differences)
    where = "" if good else f": seed {worst['seed']}, {worst['worst']}"
    words = f"differs from Kornia by at most {worst['largest']:.3g} levels ({worst['verdict']}{where})"
    return good, f"{words}; {found['milliseconds']:.3g} ms for {found['batch']} images{paper}", found


def _views(augment: Any, count: int, seed: int) -> Iterator[tuple[Any, Tensor, Any]]:
    """For each view: its recipe, smooth images uint8 [count, H, W, 3], and its random choices."""
    random, images = torch.Generator().manual_seed(seed), []
    for height, width in (view.augment.crop.size for view in augment.views):
        low = torch.randint(0, 256, (count, 3, height // 8, width // 8), generator=random).float()
        large = torch.nn.functional.interpolate(low, size=(height, width), mode="bilinear")
        images.append(large.round().to(torch.uint8).permute(0, 2, 3, 1).contiguous())
    drawn = augment.draw(seed=seed, epoch=0, indices=np.arange(count))
    choices = augment.choose(drawn, [(x.shape[1], x.shape[2]) for x in images])
    return zip((view.augment for view in augment.views), images, choices, strict=True)


def compare(augment: Any, device: torch.device, seed: int) -> dict[str, Any]:
    """Compare the compiled kernels on ``device`` with Kornia on the CPU, before the normalization."""
    found, largest = Difference("all", "recipe", "Kornia"), 0.0
    for number, (view, images, chosen) in enumerate(_views(augment, SAMPLES, seed)):
        ours = FusedBackend(view.prepared)(images.to(device), chosen).cpu()
        theirs = ReferenceBackend(view.prepared)(images, chosen)
        without_jumps = steady(view, chosen, (images.shape[1], images.shape[2]), SAMPLES)
        gaps = 255 * (ours - theirs).abs().amax((1, 2, 3)).numpy()
        largest = max([largest, *gaps[without_jumps].tolist()])
        for sample in range(SAMPLES):
            left, right = (255 * x[sample].permute(1, 2, 0).numpy() for x in (ours, theirs))
            found.add(left, right, f"sample {sample}, view {number}")
    names = ("verdict", "images", "largest", "mean", "off", "worst")
    made = {"seed": seed, **{name: getattr(found, name) for name in names}, "largest_without_jumps": largest}
    return made if largest <= LEVEL else made | {"verdict": "DIFFERENT"}


def kernels(augment: Any, device: torch.device, seconds: float, *, moved: float) -> dict[str, Any]:
    """Measure all views of a batch, from pixels on the device to pixels on the device."""
    count, least = BATCH[device.type], 3 + 3 * DTYPE.itemsize
    views = [
        (FusedBackend(view.prepared, view.normalize), images.to(device), chosen)
        for view, images, chosen in _views(augment, count, 0)
    ]
    pixels = sum(images[..., 0].numel() for _, images, _ in views)
    one, other = (torch.zeros(pixels * least // 2, dtype=torch.uint8, device=device) for _ in range(2))
    found = timed(lambda: [backend(x, chosen, dtype=DTYPE) for backend, x, chosen in views], device, seconds)
    found |= {
        "batch": count, "dtype": str(DTYPE), "pixels": pixels, "images_per_second": 1e3 * count / found["milliseconds"],
        "copy_milliseconds": timed(lambda: one.copy_(other), device, seconds / 4)["milliseconds"],
    }  # fmt: skip
    if device.type == "cpu":
        return found | {"paper": "none without a GPU: the counted bytes are those of the kernels for CUDA"}
    p = torch.cuda.get_device_properties(device)
    clock, bits = getattr(p, "memory_clock_rate", 0), getattr(p, "memory_bus_width", 0)
    if not clock * bits:  # the properties of CUDA 13 have no clocks, and some GPUs share the CPU's memory
        return found | {"paper": "none: torch does not tell the peak bandwidth of this GPU"}
    peak = 2 * clock * 1e3 * bits / 8  # bytes/s; kHz, bits, two transfers per cycle
    return found | {
        "paper_milliseconds": 1e3 * pixels * moved / peak, "paper_least_milliseconds": 1e3 * pixels * least / peak,
        "bytes_per_pixel": moved, "least_bytes_per_pixel": least, "peak_bytes_per_second": peak,
    }  # fmt: skip


def timed(run: Callable[[], Any], device: torch.device, seconds: float) -> dict[str, Any]:
    """The median milliseconds of a call: those of the device, and those of the host."""
    run()  # compiles
    rounds: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while len(rounds) < FEWEST or time.perf_counter() < end:
        if on_gpu := device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(device)
            torch.cuda._sleep(BUSY)
            first.record()
        begin = time.perf_counter()
        run()
        host = took = 1e3 * (time.perf_counter() - begin)
        if on_gpu:
            last.record()
            torch.cuda.synchronize(device)
            took = first.elapsed_time(last)
        rounds.append((took, host))
    took, host = (statistics.median(each) for each in zip(*rounds, strict=True))
    return {"milliseconds": took, "host_milliseconds": host, "rounds": len(rounds)}


def loader(_: str, device: torch.device, seconds: float) -> Measured:
    """Measure the real loader with the recipe `standard`. It reads one batch of JPEGs again and again."""
    count, rng = BATCH[device.type], np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for file in (Path(folder, f"{number}.jpg") for number in range(count)):
            low = Image.fromarray(rng.integers(0, 256, (15, 20, 3), dtype=np.uint8)).resize((500, 375))
            noisy = np.asarray(low) + rng.normal(0, 8, (375, 500, 1))  # as many bytes as a photograph
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, quality=85)
        overrides = [f"source.root={folder}", "source.labels=none", f"batch_size={count}", f"device={device}"]
        with config.build(config.compose("train", [*overrides, "dtype=bfloat16"])) as made:
            traces = [trace(made, seconds=seconds / FEWEST) for _ in range(FEWEST)]
            decoders, workers = made.pipeline.decoders, made.num_workers
            backend, threads = decoders.get().backend, decoders.num_threads
    middle = sorted(traces, key=lambda each: each.rate)[FEWEST // 2]
    faults = sum(each.faults for each in traces)
    words = f"{middle.rate:,.0f} images/s, decoded by {backend}; {faults} bad images"
    return not faults, words, {
        "batch": count, "decoder": backend, "num_threads": threads, "num_workers": workers,
        "images": middle.images, "seconds": middle.seconds, "images_per_second": middle.rate,
        "rounds": [each.rate for each in traces], "busy": {stage: middle.share(stage) for stage in middle.busy},
    }  # fmt: skip
