"""`gpuaug profile`: measures a loader, and reports the stages, the bottleneck and what to change."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from PIL import Image, ImageDraw
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from gpuaug import checks, machine
from gpuaug.display.sheet import PAPER, Cell, Row, sheet
from gpuaug.loader.batch import Batch
from gpuaug.loader.loader import Loader
from gpuaug.random.generators import restore_generators
from gpuaug.source.cache import RamCache
from gpuaug.tools.profile.bottleneck import NOTHING, TITLES, Change, Verdict, diagnose
from gpuaug.tools.profile.costs import FREE, LOADER, Cost, Measured
from gpuaug.tools.profile.measure import CACHE_BYTES, Profiler, Step
from gpuaug.tools.report import Report, png, written
from gpuaug.tools.request import Keys, Request
from gpuaug.tools.train.build import build_model
from gpuaug.tools.train.training import Settings as TrainingSettings
from gpuaug.tools.train.training import Training

log = logging.getLogger("gpuaug")

CLASSES = 1000  # default for the number of classes of the model
LIMIT, STAGE, WHOLE, IDEAL = (230, 57, 70), (29, 130, 200), (70, 70, 78), (42, 157, 90)
LENGTH = 720  # pixels of the longest bar


@dataclass(frozen=True, kw_only=True)
class Settings(Keys):
    """The keys of `gpuaug profile`."""

    model: Any = None
    num_classes: int | None = None
    optimizer: str = "sgd"
    loss: str = "cross_entropy"
    amp: str = "auto"
    out: str | None = "profile.png"
    repeats: int = 5
    seconds: float = 0.2
    batches: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.training
        checks.whole_number("repeats", self.repeats, 1)
        checks.whole_number("num_classes", self.num_classes, 1, optional=True)
        checks.whole_number("batches", self.batches, 1, optional=True)
        checks.number("seconds", self.seconds, 1e-3, 60.0)

    @property
    def training(self) -> TrainingSettings:
        same = {name: getattr(self, name) for name in ("model", "optimizer", "loss", "amp")}
        return TrainingSettings(**same, lr=1e-5)  # a small rate, because the same batches are repeated


def main(request: Request) -> int:
    settings = Settings(**request.settings())
    report = Report(file=settings.json)
    if settings.out is not None:
        png(settings.out, "out")
    config = request.loader()
    loader: Loader
    with logging_redirect_tqdm(loggers=[log]), request.build(config) as loader:
        step = None
        if settings.model not in (None, {"_target_": None}):
            step = training_step(request, loader, settings.training, num_classes=settings.num_classes)
        report_on(loader, step, report, settings=settings, prefix=request.prefix)
    report.write()
    return 0


def inside(request: Request, config: DictConfig, loader: Loader, settings: TrainingSettings) -> None:
    """Before a training begins, profile its first batches with a separate loader and model."""
    quiet = os.environ.get("RANK", "0") != "0"
    same = {name: getattr(loader, name) for name in ("num_workers", "source")}
    if loader.pipeline.cache is not None:  # a small cache is enough for the first batches
        same["cache"] = RamCache(max_bytes=CACHE_BYTES)
    batches = None if isinstance(settings.profiling, bool) else settings.profiling
    twin: Loader
    with restore_generators(loader.device), request.build(config, **same) as twin:
        step = training_step(request, twin, replace(settings, lr=1e-5))
        report_on(twin, step, Report(quiet=quiet), settings=Settings(out=None, batches=batches), prefix=request.prefix)


def training_step(
    request: Request, loader: Loader, settings: TrainingSettings, *, num_classes: int | None = None
) -> Step:
    """A function that runs a training step of `gpuaug train` on a new model. Labels may be missing."""
    classes = num_classes or loader.num_classes or CLASSES
    model = build_model(request, settings.model, num_classes=classes, seed=loader.seed)
    training = Training(loader, model=model, settings=settings)
    training.each.train()

    def step(batch: Batch) -> None:
        if batch.labels is None:
            batch = replace(batch, labels=torch.zeros(len(batch), dtype=torch.int64, device=loader.device))
        training.step(batch, valid=float(len(batch)), progress=1.0)

    return step


def report_on(loader: Loader, step: Step | None, report: Report, *, settings: Settings, prefix: str) -> None:
    bar = tqdm(
        total=100, desc="profile", bar_format="{desc} {percentage:3.0f}%|{bar}| {postfix}", leave=False, disable=None
    )

    def progress(name: str, share: float) -> None:
        bar.n = round(100 * share)
        bar.set_postfix_str(name, refresh=True)

    how: dict[str, Any] = {"repeats": settings.repeats, "seconds": settings.seconds, "batches": settings.batches}
    with bar, Profiler(loader, step=step, progress=progress, **how) as profiler:
        measured = profiler.measure()
        progress("possible changes", 1.0)
        verdict = diagnose(profiler, measured, prefix=prefix)
    _say(report, verdict)
    if profiler.faults:
        text = f"{profiler.faults} of the first {profiler.tried} images could not be read or decoded; to list them, "
        report.add("faults", profiler.faults, f"{text}train with `faults.policy=blank faults.file=FILE`")
    if settings.out is not None:
        picture = bars(verdict, heading=_heading(loader))
        with written(Path(settings.out), "out"):
            picture.save(settings.out, "PNG", optimize=True)
        report.add("picture", settings.out, f"{settings.out} ({picture.width} x {picture.height})")


def rows(m: Measured) -> list[tuple[str, str, Cost]]:
    """Key, name and cost of every measured stage."""
    workers = f"{m.workers} workers" if m.workers != 1 else "1 worker"
    names = {
        "source": "source, one process",
        "read": f"read, {workers}" if m.workers else "read, this process",
        "copy": f"  copying only, {workers}",
        "decode": "decode",
        "masks": "masks (decode, crop, move)",
        "augment": "augment",
        "finish": "targets (dtype, device)",
        "host": "host (headers, random values, crops, mix)",
        "step": "training step (ideal loader)",
        "whole": "the whole",
    }
    return [(key, name, cost) for key, name in names.items() if (cost := getattr(m, key)) != FREE]


def _say(report: Report, verdict: Verdict) -> None:
    m, predicted = verdict.measured, verdict.prediction
    lines = ["", f"{'each stage alone':<36} {'images/s':>9} {'ms/image':>9} {'CPU ms':>8}"]
    for key, name, cost in rows(m):
        mark = " <" if key == TITLES[verdict.bottleneck][0] else ""
        lines.append(f"{name:<36} {cost.rate:>9.0f} {cost.wall * 1e3:>9.3g} {cost.cpu * 1e3:>8.3g}{mark}")
    values = {key: {"images_per_second": cost.rate, **cost._asdict()} for key, _, cost in rows(m)}
    report.add("stages", values, "\n".join(lines))
    report.add("batch_size", m.batch_size, f"{m.batch_size}, {m.bytes_per_image / 1024:.0f} KiB per image")
    report.add("cores", m.cores, f"{m.cores:.2g} of {machine.usable_cpus()} were free")
    if m.masks != FREE:
        share = m.total(["masks", "objects", "finish"]).cpu / max(m.total(LOADER).cpu, 1e-9)
        spent = {"masks": m.masks, "objects": m.objects, "dtype and device": m.finish}
        text = ", ".join(f"{name} {cost.cpu * 1e3:.3g} ms" for name, cost in spent.items())
        report.add("targets", share, f"{share:.0%} of the loader's CPU time; per image: {text}")
    report.add("model_of_it", {"seconds": predicted.seconds, **predicted.terms}, predicted.text)
    report.add("bottleneck", verdict.bottleneck, verdict.text)
    for number, text in enumerate(verdict.evidence, start=1):
        report.add("because" if number == 1 else f"because_{number}", text, text)
    for key, changes in (("change", verdict.changes), ("or", verdict.others)):
        for number, change in enumerate(changes, start=1):
            report.add(f"{key}_{number}", asdict(change), _advice(verdict, change))
    if len(verdict.changes) > 1:
        report.add("together", verdict.overrides, " ".join(verdict.overrides))
    report.values |= {"overrides": verdict.overrides, "predicted_gain": verdict.gain}
    if verdict.ideal_gain is not None:
        nothing = "" if verdict.ideal_gain >= NOTHING else ": not worth it"
        report.add("ideal_loader", verdict.ideal_gain, f"{_ideal(verdict.ideal_gain)}{nothing}")


def _advice(verdict: Verdict, change: Change) -> str:
    words = " ".join(f"'{text}'" if text.startswith("~") else text for text in change.overrides)
    recipe = any(text.startswith("~") or text.endswith("mix=none") for text in change.overrides)
    note = "" if change.same else ", changes the training data" if recipe else ", changes pixels a little"
    rest = f"{words}   {change.text}; " if words else f"{change.text}; "
    if change in verdict.changes:
        now = 1 / (verdict.measured.whole.wall or verdict.prediction.seconds)
        beside = "" if change is verdict.changes[0] else ", with the changes above"
        return f"{rest}predicted {now * change.gain:.0f} images/s ({change.gain:.2g} x{beside}){note}"
    alone = "on top of the changes above" if verdict.changes else "alone"
    return f"{rest}{alone} {change.gain:.2g} x{note}"


def _ideal(gain: float) -> str:
    return f"with a loader that takes no time: {gain:.2f} x as fast"


def bars(verdict: Verdict, *, heading: str) -> Image.Image:
    """Draw each stage's time per image as a bar, its CPU time as a thin line. A bottleneck is red, the step green."""
    shown = rows(verdict.measured)
    longest = max(max(cost.wall, cost.cpu) for _, _, cost in shown)
    drawn = []
    for key, name, cost in shown:
        limiting = key == TITLES[verdict.bottleneck][0] and key != "step"
        color = LIMIT if limiting else {"whole": WHOLE, "step": IDEAL}.get(key, STAGE)
        bar = Image.new("RGB", (LENGTH, 26), PAPER)
        pen = ImageDraw.Draw(bar)
        pen.rounded_rectangle((0, 0, max(2, round(LENGTH * cost.wall / longest)), 18), 4, color)
        pen.rectangle((0, 22, round(LENGTH * cost.cpu / longest), 24), color)
        took = f"{cost.wall * 1e3:.3g} ms" if cost.wall < 1 else f"{cost.wall:.3g} s"
        rate = f"{cost.rate:,.0f} images/s" if cost.rate >= 10 else f"{cost.rate:.2g} images/s"
        drawn.append(Row(name.strip(), [f"{took}, {'free' if cost.rate >= 1e6 else rate}"], [Cell(bar, "")]))
    lines = [heading, "milliseconds per image; thin lines: CPU time of all cores", "", verdict.text]
    lines += [_advice(verdict, change) for change in verdict.changes or verdict.others]
    if verdict.ideal_gain is not None and verdict.bottleneck != "model":  # for `model`, see `verdict.text`
        lines.append(_ideal(verdict.ideal_gain))
    return sheet(drawn, heading="What one image costs", lines=lines)


def _heading(loader: Loader) -> str:
    root = getattr(loader.source, "root", None)
    where = type(loader.source).__name__ if root is None else Path(str(root)).name
    stage = f", stage of epoch {loader.epoch}" if len(loader.augment.stages) > 1 else ""
    return (
        f"{where}: {len(loader.source):,} samples; batch_size {loader.batch_size}, workers: {loader.num_workers}, "
        f"prefetch {loader.prefetch}, {loader.device}, views: {len(loader.augment.at(loader.epoch).views)}{stage}"
    )
