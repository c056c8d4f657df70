"""`gpuaug profile`: traces a loader, and reports its stages, the bottleneck, and what was tried against it."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
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
from gpuaug.tools.epoch import count_batches
from gpuaug.tools.profile.advice import TITLES, WORTH, Remedy, Verdict, diagnose
from gpuaug.tools.profile.trace import STAGES, Step
from gpuaug.tools.report import Report, png, written
from gpuaug.tools.request import Keys, Request
from gpuaug.tools.train.build import build_model
from gpuaug.tools.train.training import Settings as TrainingSettings
from gpuaug.tools.train.training import Training

log = logging.getLogger("gpuaug")

CLASSES = 1000  # default for the number of classes of the model
LIMIT, STAGE, IDEAL = (230, 57, 70), (29, 130, 200), (42, 157, 90)
LENGTH = 720  # pixels of a bar that is as long as the pass
NAMES = {
    "read": "waiting for encoded images",
    "headers": "headers, random values, crops",
    "decode": "decode",
    "masks": "masks (decode, crop, move)",
    "augment": "augment",
    "targets": "targets (dtype, device)",
    "mix": "mix",
    "step": "training step",
}


@dataclass(frozen=True, kw_only=True)
class Settings(Keys):
    """The keys of `gpuaug profile`."""

    model: Any = None
    num_classes: int | None = None
    optimizer: str = "sgd"
    loss: str = "cross_entropy"
    amp: str = "auto"
    out: str | None = "profile.png"
    repeats: int = 3
    seconds: float = 1.0
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
        count_batches(loader)
        step = None
        if settings.model not in (None, {"_target_": None}):
            step = training_step(request, loader, settings.training, num_classes=settings.num_classes)
        report_on(request, loader, step, report, settings=settings)
    report.write()
    return 0


def inside(request: Request, config: DictConfig, loader: Loader, settings: TrainingSettings) -> None:
    """Before a training begins, profile its first batches with a separate loader and model."""
    quiet = os.environ.get("RANK", "0") != "0"
    batches = None if isinstance(settings.profiling, bool) else settings.profiling
    twin: Loader
    with restore_generators(loader.device), request.build(config, source=loader.source) as twin:
        step = training_step(request, twin, replace(settings, lr=1e-5))
        report_on(request, twin, step, Report(quiet=quiet), settings=Settings(out=None, batches=batches))


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


def report_on(request: Request, loader: Loader, step: Step | None, report: Report, *, settings: Settings) -> None:
    bar = tqdm(
        total=100, desc="profile", bar_format="{desc} {percentage:3.0f}%|{bar}| {postfix}", leave=False, disable=None
    )

    def progress(name: str, share: float) -> None:
        bar.n = round(100 * share)
        bar.set_postfix_str(name, refresh=True)

    def build(overrides: tuple[str, ...]) -> Loader:
        other = replace(request, overrides=(*request.overrides, *overrides))
        same: dict[str, Any] = {} if any("source" in text for text in overrides) else {"source": loader.source}
        built: Loader = request.build(other.loader(), **same)
        return built

    how: dict[str, Any] = {name: getattr(settings, name) for name in ("repeats", "seconds", "batches")}
    with bar:
        verdict = diagnose(loader, step, build, prefix=request.prefix, progress=progress, **how)
    _say(report, verdict)
    if settings.out is not None:
        picture = bars(verdict, heading=_heading(loader))
        with written(Path(settings.out), "out"):
            picture.save(settings.out, "PNG", optimize=True)
        report.add("picture", settings.out, f"{settings.out} ({picture.width} x {picture.height})")


def _say(report: Report, verdict: Verdict) -> None:
    loader, found = verdict.loader, verdict.trace
    stages = [stage for stage in STAGES if stage in found.busy]
    report.add("rate", found.rate, f"{found.rate:,.0f} images/s: {found.images} images in {found.seconds:.2g} s")
    lines = ["", f"{'stage':<40} {'busy':>6} {'ms/image':>9} {'CPU ms':>8}"]
    values = {}
    for stage in stages:
        busy, cpu = found.share(stage), found.cpu[stage]
        seconds = found.busy[stage] / found.images
        values[stage] = {"busy": busy, "seconds_per_image": seconds, "cpu_seconds_per_image": cpu}
        mark = " <" if stage == TITLES[verdict.bottleneck][0] else ""
        name = f"{NAMES[stage]} ({loader.num_workers} workers)" if stage == "read" else NAMES[stage]
        lines.append(f"{name:<40} {busy:>6.0%} {seconds * 1e3:>9.3g} {cpu * 1e3:>8.3g}{mark}")
    report.add("stages", values, "\n".join(lines))
    used, cores = sum(found.cpu.values()) * found.rate, machine.usable_cpus()
    report.add("cores", used, f"{used:.2g} of {cores} cores were busy on average")
    report.add("bottleneck", verdict.bottleneck, verdict.text)
    report.add("because", verdict.evidence, verdict.evidence)
    if verdict.costs:
        costs = sorted(verdict.costs.items(), key=lambda each: -each[1])
        text = ", ".join(f"{name} {max(0.0, seconds) * 1e3:.2g}" for name, seconds in costs)
        report.add("operations", verdict.costs, f"ms per image that each takes: {text}")
    tried = []
    for number, remedy in enumerate(verdict.tried, start=1):
        tried.append({name: getattr(remedy, name) for name in ("overrides", "text", "same", "rate", "gain")})
        report.add(f"tried_{number}", tried[-1], advice(remedy))
    report.values["tried"] = tried
    same = [remedy for remedy in verdict.helping if remedy.same]
    report.values["overrides"] = list(same[0].overrides) if same else []
    if verdict.ideal_gain is not None:
        nothing = ": not worth it" if found.share("step") > WORTH else ""
        report.add("ideal_loader", verdict.ideal_gain, f"{_ideal(verdict.ideal_gain)}{nothing}")
    if found.faults:
        text = f"{found.faults} of {found.tried} images could not be read or decoded; to list them, "
        report.add("faults", found.faults, f"{text}train with `faults.policy=blank faults.file=FILE`")


def advice(remedy: Remedy) -> str:
    """One line about a remedy that was tried."""
    pixels = "" if remedy.same else "; pixels change a little"
    words = " ".join(remedy.overrides)
    return f"{words}   {remedy.gain:.2f} x, {remedy.rate:,.0f} images/s ({remedy.text}{pixels})"


def _ideal(gain: float) -> str:
    return f"with a loader that takes no time: {gain:.2f} x as fast"


def bars(verdict: Verdict, *, heading: str) -> Image.Image:
    """Draw the share of the pass in which each stage worked, and as a thin line how many of the cores it kept busy."""
    found, drawn, cores = verdict.trace, [], machine.usable_cpus()
    for stage in (stage for stage in STAGES if stage in found.busy):
        share, used = min(1.0, found.share(stage)), min(1.0, found.cpu[stage] * found.rate / cores)
        limiting = stage == TITLES[verdict.bottleneck][0]
        color = IDEAL if stage == "step" else LIMIT if limiting else STAGE
        bar = Image.new("RGB", (LENGTH, 26), PAPER)
        pen = ImageDraw.Draw(bar)
        pen.rounded_rectangle((0, 0, max(2, round(LENGTH * share)), 18), 4, color)
        pen.rectangle((0, 22, round(LENGTH * used), 24), color)
        drawn.append(Row(NAMES[stage], [f"busy {share:.0%}"], [Cell(bar, "")]))
    lines = [heading, "share of the pass in which a stage worked; thin lines: share of all cores", "", verdict.text]
    lines += [advice(remedy) for remedy in verdict.tried]
    if verdict.ideal_gain is not None and verdict.bottleneck != "model":  # for `model`, see `verdict.text`
        lines.append(_ideal(verdict.ideal_gain))
    return sheet(drawn, heading=f"{found.rate:,.0f} images per second", lines=lines)


def _heading(loader: Loader) -> str:
    root = loader.source.root
    where = type(loader.source).__name__ if root is None else Path(str(root)).name
    stage = f", stage of epoch {loader.epoch}" if len(loader.augment.stages) > 1 else ""
    return (
        f"{where}: {len(loader.source):,} samples; batch_size {loader.batch_size}, workers: {loader.num_workers}, "
        f"prefetch {loader.prefetch}, {loader.device}, views: {len(loader.augment.at(loader.epoch).views)}{stage}"
    )
