"""`gpuaug profile`: traces a loader, and reports its stages, the bottleneck, and what was tried against it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from gpuaug import checks, machine
from gpuaug.loader.batch import Batch
from gpuaug.loader.loader import Loader
from gpuaug.tools.profile.advice import TITLES, Verdict, diagnose
from gpuaug.tools.profile.trace import STAGES, Step
from gpuaug.tools.report import Report
from gpuaug.tools.request import Keys, Request, count_batches
from gpuaug.tools.train.model import build_model
from gpuaug.tools.train.training import Settings as TrainingSettings
from gpuaug.tools.train.training import Training

WORTH = 0.9  # if the training step takes a larger share of the pass, a faster loader is not worth it
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
    amp: str = "auto"
    repeats: int = 3
    seconds: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.training
        checks.whole_number("repeats", self.repeats, 1)
        checks.whole_number("num_classes", self.num_classes, 1, optional=True)
        checks.number("seconds", self.seconds, 1e-3, 60.0)

    @property
    def training(self) -> TrainingSettings:
        same = {name: getattr(self, name) for name in ("model", "optimizer", "amp")}
        return TrainingSettings(**same, lr=1e-5)  # a small rate, because the same batches are repeated


def main(request: Request) -> int:
    settings = Settings(**request.settings())
    report = Report(file=settings.json)
    loader: Loader
    with request.build(request.loader()) as loader:
        count_batches(loader)
        step = None
        if settings.model not in (None, {"_target_": None}):
            step = training_step(request, loader, settings)

        def build(overrides: tuple[str, ...]) -> Loader:
            other = replace(request, overrides=(*request.overrides, *overrides))
            same: dict[str, Any] = {} if any("source" in text for text in overrides) else {"source": loader.source}
            built: Loader = request.build(other.loader(), **same)
            return built

        repeats, seconds = settings.repeats, settings.seconds
        _say(report, diagnose(loader, step, build, repeats=repeats, seconds=seconds, prefix=request.prefix))
    report.write()
    return 0


def training_step(request: Request, loader: Loader, settings: Settings) -> Step:
    """A function that runs a training step of `gpuaug train` on a new model. Labels may be missing."""
    classes = settings.num_classes or loader.num_classes or 1000
    model = build_model(request, settings.model, num_classes=classes, seed=loader.seed)
    training = Training(loader, model=model, settings=settings.training)
    training.each.train()

    def step(batch: Batch) -> None:
        if batch.labels is None:
            batch = replace(batch, labels=torch.zeros(len(batch), dtype=torch.int64, device=loader.device))
        training.train_batch(batch, valid=float(len(batch)), progress=1.0)

    return step


def _say(report: Report, verdict: Verdict) -> None:
    loader, found = verdict.loader, verdict.trace
    report.add("rate", found.rate, f"{found.rate:,.0f} images/s: {found.images} images in {found.seconds:.2g} s")
    lines, values = ["", f"{'stage':<40} {'busy':>6} {'ms/image':>9} {'CPU ms':>8}"], {}
    for stage in (stage for stage in STAGES if stage in found.busy):
        busy, cpu, seconds = found.share(stage), found.cpu[stage], found.busy[stage] / found.images
        values[stage] = {"busy": busy, "seconds_per_image": seconds, "cpu_seconds_per_image": cpu}
        mark = " <" if stage == TITLES[verdict.bottleneck][0] else ""
        name = f"{NAMES[stage]} ({loader.num_workers} workers)" if stage == "read" else NAMES[stage]
        lines.append(f"{name:<40} {busy:>6.0%} {seconds * 1e3:>9.3g} {cpu * 1e3:>8.3g}{mark}")
    report.add("stages", values, "\n".join(lines))
    used, cores = sum(found.cpu.values()) * found.rate, machine.usable_cpus()
    report.add("cores", used, f"{used:.2g} of {cores} cores were busy on average")
    report.add("bottleneck", verdict.bottleneck, verdict.text)
    report.add("because", verdict.evidence, verdict.evidence)
    for number, remedy in enumerate(verdict.tried, start=1):
        pixels = "" if remedy.same else "; pixels change a little"
        words, rate = " ".join(remedy.overrides), f"{remedy.gain:.2f} x, {remedy.rate:,.0f} images/s"
        report.add(f"tried_{number}", asdict(remedy), f"{words}   {rate} ({remedy.text}{pixels})")
    report.values["tried"] = [asdict(remedy) for remedy in verdict.tried]
    report.values["overrides"] = next((list(remedy.overrides) for remedy in verdict.helping if remedy.same), [])
    if step := found.share("step"):
        gain, nothing = max(1.0, 1 / step), ": not worth it" if step > WORTH else ""
        report.add("ideal_loader", gain, f"with a loader that takes no time: {gain:.2f} x as fast{nothing}")
    if check := loader.pipeline.self_check:
        report.add("self_check", str(check), str(check))
    if found.faults:
        text = f"{found.faults} of {found.tried} images could not be read or decoded; to list them, "
        report.add("faults", found.faults, f"{text}train with `faults.policy=blank faults.file=FILE`")
