"""`gpuaug profile`: how fast every stage is, which one limits the whole, and what to change."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import random
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from gpuaug import checks, machine
from gpuaug.batch import Batch
from gpuaug.errors import ConfigError
from gpuaug.loader.loader import Loader
from gpuaug.source.cache import RamCache
from gpuaug.tools.profile import bottleneck
from gpuaug.tools.profile import measure as profiling
from gpuaug.tools.profile.bottleneck import Change, Cost, Measured, Verdict
from gpuaug.tools.profile.measure import Profiler, Step
from gpuaug.tools.report import Report, output, png, written
from gpuaug.tools.request import Request
from gpuaug.tools.sheet import FAINT, INK, PAPER, fitting, font, wrapped
from gpuaug.tools.train.training import Settings as TrainingSettings
from gpuaug.tools.train.training import Training, build_model

if TYPE_CHECKING:
    from omegaconf import DictConfig

log = logging.getLogger("gpuaug")

CLASSES = 1000  # of the model, where nothing says how many
TRACK = (240, 240, 243)
LIMIT, STAGE, WHOLE, IDEAL = (230, 57, 70), (29, 130, 200), (70, 70, 78), (42, 157, 90)
WIDTH, MARGIN, ROW = 960, 32, 40

# what of the pipeline a verdict is about
STAGES = {
    "storage": "source",
    "workers": "read",
    "inter-process copy": "copy",
    "decode": "decode",
    "augment": "augment",
    "host overhead": "host",
    "model": "step",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure; the keys of ``conf/gpuaug/command/profile.yaml``, which says what they mean."""

    model: Any = None
    num_classes: int | None = None
    optimizer: str = "sgd"
    loss: str = "cross_entropy"
    amp: str = "auto"
    out: str | None = "profile.png"
    repeats: int = 5
    seconds: float = 0.2
    batches: int | None = None
    tune: bool = False
    trace: str | None = None
    json: str | None = None

    def __post_init__(self) -> None:
        _ = self.training
        if isinstance(self.repeats, bool) or not isinstance(self.repeats, int) or self.repeats < 1:
            raise ConfigError(f"`repeats` must be a whole number >= 1. Found: {self.repeats!r}.")
        for name in ("num_classes", "batches"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"`{name}` must be a whole number >= 1, or null. Found: {value!r}.")
        if isinstance(self.seconds, bool) or not isinstance(self.seconds, int | float) or not 0 < self.seconds <= 60:
            raise ConfigError(f"`seconds` must be a number in (0, 60]. Found: {self.seconds!r}.")
        if not isinstance(self.tune, bool):
            raise ConfigError(f"`tune` must be true or false. Found: {self.tune!r}.")
        for name in ("out", "trace", "json"):
            checks.text(name, getattr(self, name), optional=True)

    @property
    def training(self) -> TrainingSettings:
        """How a step is made; the learning rate is small, as the same batches come again and again."""
        return TrainingSettings(optimizer=self.optimizer, loss=self.loss, amp=self.amp, lr=1e-5)


def main(request: Request) -> int:
    """Measure, and say what limits; 0."""
    settings = Settings(**request.settings())
    report = Report(file=settings.json)
    if settings.out is not None:
        png(settings.out, "out")
    if settings.trace is not None:
        output(settings.trace, "trace")
    config = request.loader()
    named = settings.model is not None and settings.model != {"_target_": None}
    loader: Loader
    with logging_redirect_tqdm(loggers=[log]), request.build(config) as loader:
        model = None
        if named:
            classes = settings.num_classes or loader.num_classes or CLASSES
            model = build_model(request, settings.model, num_classes=classes, seed=loader.seed)
        step = None if model is None else training_step(loader, model, settings.training)
        _, verdict = look(loader, step, report, settings=settings, at=request.at)
        if settings.tune:
            tune(request, config, loader, step, report, verdict, settings=settings)
    report.write()
    return 0


def inside(request: Request, config: DictConfig, loader: Loader, settings: TrainingSettings) -> None:
    """Profile the first batches of a training that is about to begin, with a loader and a model of its own.

    Nothing of the training changes, generators of random numbers included.
    """
    quiet = os.environ.get("RANK", "0") != "0"
    same = {name: getattr(loader, name) for name in ("num_workers", "source")}
    if loader.pipeline.cache is not None:  # the first batches again and again: no need for a second cache of full size
        same["cache"] = RamCache(max_bytes=profiling.CACHE_BYTES)
    batches = None if isinstance(settings.profiling, bool) else settings.profiling
    twin: Loader
    with _same_random(loader.device), request.build(config, **same) as twin:
        classes = loader.num_classes or CLASSES
        model = build_model(request, settings.model, num_classes=classes, seed=loader.seed)
        step = training_step(twin, model, replace(settings, lr=1e-5))
        look(twin, step, Report(quiet=quiet), settings=Settings(out=None, batches=batches), at=request.at)


@contextlib.contextmanager
def _same_random(device: torch.device) -> Iterator[None]:
    """Python's, numpy's and torch's generators are behind it as they were before."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def training_step(loader: Loader, model: nn.Module, settings: TrainingSettings) -> Step:
    """One step exactly as `gpuaug train` makes it; images without labels get the first class."""
    training = Training(loader, model=model, settings=settings)
    training.each.train()

    def step(batch: Batch) -> None:
        if batch.labels is None:
            batch = replace(batch, labels=torch.zeros(len(batch), dtype=torch.int64, device=loader.device))
        training.step(batch, valid=float(len(batch)), progress=1.0)

    return step


def look(
    loader: Loader, step: Step | None, report: Report, *, settings: Settings, at: str | None
) -> tuple[Measured, Verdict]:
    """Measure a loader and report on it."""
    with (
        tqdm(
            total=100,
            desc="profile",
            bar_format="{desc} {percentage:3.0f}%|{bar}| {postfix}",
            leave=False,
            disable=None,
        ) as bar,
        Profiler(
            loader,
            step=step,
            repeats=settings.repeats,
            seconds=settings.seconds,
            batches=settings.batches,
            progress=_onto(bar),
        ) as profiler,
    ):
        measured = profiler.measure()
        bar.set_postfix_str("what would help")
        verdict = bottleneck.diagnose(profiler, measured, at=at)
        if settings.trace is not None:
            bar.set_postfix_str("trace")
            with written(Path(settings.trace), "trace"):
                profiler.trace(Path(settings.trace))
        as_fast = _cpu_is_as_fast(profiler, measured)
    _say(report, measured, verdict, as_fast)
    if profiler.faults:
        text = f"{profiler.faults} of the first {profiler.looked} images could not be read or decoded"
        report.add("faults", profiler.faults, f"{text}; `faults.policy=blank faults.file=FILE` in training lists them")
    if settings.out is not None:
        picture = bars(measured, verdict, heading=_heading(loader))
        with written(Path(settings.out), "out"):
            picture.save(settings.out, "PNG", optimize=True)
        report.add("picture", settings.out, f"{settings.out} ({picture.width} x {picture.height})")
    if settings.trace is not None:
        report.add("trace", settings.trace, settings.trace)
    return measured, verdict


def _onto(bar: Any) -> Any:
    def progress(name: str, share: float) -> None:
        bar.n = round(100 * share)
        bar.set_postfix_str(name, refresh=True)

    return progress


# -- saying it --------------------------------------------------------------------------------------------------------


def rows(m: Measured) -> list[tuple[str, str, Cost]]:
    """Key, name and cost of everything that was measured, in the order of the pipeline."""
    workers = f"{m.workers} workers" if m.workers != 1 else "1 worker"
    found: list[tuple[str, str, Cost | None]] = [
        ("source", "source, one process", m.source),
        ("read", f"read, {workers}" if m.workers else "read, this process", m.read),
        ("copy", f"  of it handing over, {workers}", m.copy),
        ("decode", "decode", m.decode),
        ("augment", "augment", m.augment),
        ("host", "host (headers, draws, crops, mix)", m.host),
        ("step", "training step = ideal loader", m.step),
        ("whole", "the whole", m.whole),
    ]
    return [(key, name, cost) for key, name, cost in found if cost is not None]


def _say(report: Report, m: Measured, verdict: Verdict, as_fast: str | None) -> None:
    values = {key: {"images_per_second": cost.rate, **asdict(cost)} for key, _, cost in rows(m)}
    lines = [f"{'':<36} {'images/s':>9} {'ms/image':>9} {'CPU ms':>8}   quartiles of ms/image"]
    for key, name, cost in rows(m):
        mark = " <" if key == STAGES[verdict.bottleneck] else ""
        spread = f"{cost.low * 1e3:.3g} .. {cost.high * 1e3:.3g}"
        lines.append(f"{name:<36} {cost.rate:>9.0f} {cost.wall * 1e3:>9.3g} {cost.cpu * 1e3:>8.3g}   {spread}{mark}")
    report.add("stages", values, "\n".join(["each alone", *lines]))
    report.add("batch_size", m.batch_size, f"{m.batch_size}, {m.bytes_per_image / 1024:.0f} KiB per image")
    report.add("cores", m.cores, f"{m.cores:.2g} of {machine.usable_cpus()} were free")
    report.add(
        "model_of_it", {"seconds": verdict.prediction.seconds, **verdict.prediction.terms}, verdict.prediction.text
    )
    report.add("bottleneck", verdict.bottleneck, verdict.text)
    for number, text in enumerate(verdict.evidence[1:]):
        report.add(f"because_{number + 1}" if number else "because", text, text)
    now = m.whole.rate if m.whole is not None else 1 / verdict.prediction.seconds
    for number, change in enumerate(verdict.changes, start=1):
        text = f"{' '.join(change.overrides)}   {change.text}; predicted {now * change.gain:.0f} images/s"
        report.add(
            f"change_{number}",
            _change(change),
            f"{text} ({change.gain:.2g} x{', with those above' if number > 1 else ''})",
        )
    if len(verdict.changes) > 1:
        report.add("together", verdict.overrides, " ".join(verdict.overrides))
    for number, change in enumerate(verdict.others, start=1):
        shown = f"{' '.join(_quoted(o) for o in change.overrides)}   " if change.overrides else ""
        alone = "with those above another" if verdict.changes else "alone"
        report.add(f"or_{number}", _change(change), f"{shown}{change.text}; {alone} {change.gain:.2g} x{_note(change)}")
    report.values["overrides"] = verdict.overrides
    report.values["predicted_gain"] = verdict.gain
    if verdict.ideal_gain is not None:
        text = f"a loader that costs nothing would bring {verdict.ideal_gain:.2f} x"
        report.add(
            "ideal_loader", verdict.ideal_gain, text + ("" if verdict.ideal_gain >= bottleneck.NOTHING else ": nothing")
        )
    if as_fast is not None:
        report.add("device", as_fast, as_fast)


def _note(change: Change) -> str:
    """What it changes beside the speed."""
    if change.same:
        return ""
    recipe = any(text.startswith("~") or text.endswith("mix=none") for text in change.overrides)
    return ", changes what is trained on" if recipe else ", changes pixels a little"


def _change(change: Change) -> dict[str, Any]:
    return {**asdict(change), "overrides": list(change.overrides)}


def _quoted(override: str) -> str:
    return f"'{override}'" if override.startswith("~") else override


def _cpu_is_as_fast(profiler: Profiler, m: Measured) -> str | None:
    """On CUDA: whether the same loader on the CPU would keep the model as busy."""
    if m.device_type != "cuda" or m.step is None:
        return None
    loader, stage, cpu = profiler.loader, profiler.stage, torch.device("cpu")
    if stage.recipe is None:
        return None  # epochs that are augmented already
    decoder = replace(stage.settings, hardware_load=0.0).open(cpu)
    with contextlib.closing(decoder):
        on_host = profiling.on_host(
            profiler.encoded,
            decoder,
            copy.deepcopy(stage.recipe).to(cpu),
            seed=loader.seed,
            dtype=loader.dtype,
            device=loader.device,
        )
    return bottleneck.cpu_is_enough(m, on_host)


# -- the picture ------------------------------------------------------------------------------------------------------


def bars(m: Measured, verdict: Verdict, *, heading: str) -> Image.Image:
    """One bar per stage, as long as an image takes there; the bottleneck in red, CPU time as a thin line below."""
    big, bold, text, small = font(24), font(16), font(15), font(13)
    shown = rows(m)
    longest = max(max(cost.wall, cost.cpu) for _, _, cost in shown)
    left, right = MARGIN + 270, WIDTH - MARGIN - 210  # behind the longest bar both of its numbers
    answer = wrapped(verdict.text, bold, WIDTH - 2 * MARGIN - 14)
    now = m.whole.rate if m.whole is not None else 1 / verdict.prediction.seconds
    notes = [
        f"{' '.join(c.overrides) or 'or'}:  {c.text}; predicted {now * c.gain:.0f} images/s{_note(c)}"
        for c in verdict.changes or verdict.others
    ]
    below = [line for note in notes for line in wrapped(note, text, WIDTH - 2 * MARGIN - 14)]
    top = MARGIN + 72
    end = top + ROW * len(shown) + 16
    page = Image.new("RGB", (WIDTH, end + 24 * len(answer) + 21 * len(below) + 62 + MARGIN), PAPER)
    pen = ImageDraw.Draw(page)
    pen.text((MARGIN, MARGIN - 8), "What one image costs", INK, big)
    pen.text((MARGIN, MARGIN + 26), fitting(heading, small, WIDTH - 2 * MARGIN), FAINT, small)
    pen.text((left, MARGIN + 48), "milliseconds per image; thin: CPU time over all cores", FAINT, small)
    for step in _ticks(longest):
        x = left + round((right - left) * step / longest)
        pen.line((x, top - 4, x, end - 12), TRACK, 1)
    for n, (key, name, cost) in enumerate(shown):
        y = top + n * ROW
        limiting = key == STAGES[verdict.bottleneck]
        color = LIMIT if limiting and key != "step" else {"whole": WHOLE, "step": IDEAL}.get(key, STAGE)
        if key == "whole":
            pen.line((MARGIN, y - 4, WIDTH - MARGIN, y - 4), TRACK, 2)
        pen.text(
            (MARGIN, y + 6), name.strip(), INK if key != "copy" else FAINT, bold if limiting or key == "whole" else text
        )
        length = max(2, round((right - left) * cost.wall / longest))
        pen.rounded_rectangle((left, y + 4, left + length, y + 22), 4, color)
        spent = round((right - left) * cost.cpu / longest)
        if spent > 1:
            pen.rectangle((left, y + 26, left + spent, y + 28), _lighter(color))
        low, high = (left + round((right - left) * min(longest, v) / longest) for v in (cost.low, cost.high))
        if high - low > 3:
            pen.line((low, y + 13, high, y + 13), PAPER, 1)
        took = f"{cost.wall * 1e3:.3g} ms" if cost.wall < 1 else f"{cost.wall:.3g} s"
        pen.text((left + length + 10, y + 4), took, INK, bold if limiting else text)
        rate = (
            "free"
            if cost.rate >= 1e6
            else f"{cost.rate:,.0f} images/s"
            if cost.rate >= 10
            else f"{cost.rate:.2g} images/s"
        )
        pen.text((WIDTH - MARGIN, y + 5), rate, FAINT, small, anchor="ra")
    y = end + 4
    pen.rectangle((MARGIN, y, MARGIN + 4, y + 24 * len(answer) - 2), IDEAL if verdict.bottleneck == "model" else LIMIT)
    for line in answer:
        pen.text((MARGIN + 14, y + 2), line, INK, bold)
        y += 24
    y += 8
    for line in below:
        pen.text((MARGIN + 14, y), line, INK, text)
        y += 21
    if verdict.ideal_gain is not None and verdict.bottleneck != "model":  # whose answer has it
        pen.text(
            (MARGIN + 14, y + 6), f"A loader that costs nothing would bring {verdict.ideal_gain:.2f} x.", FAINT, small
        )
        y += 24
    pen.text((MARGIN + 14, y + 6), fitting(_terms(verdict), small, WIDTH - 2 * MARGIN - 14), FAINT, small)
    return page.crop((0, 0, WIDTH, y + 26 + MARGIN // 2))


def _terms(verdict: Verdict) -> str:
    terms = ", ".join(f"{name} {value * 1e3:.3g}" for name, value in verdict.prediction.terms.items())
    return f"Predicted: the largest of {terms} ms = {1 / verdict.prediction.seconds:,.0f} images/s"


def _heading(loader: Loader) -> str:
    root = getattr(loader.source, "root", None)
    where = type(loader.source).__name__ if root is None else Path(str(root)).name
    return (
        f"{where}: {len(loader.source):,} samples; batch_size {loader.batch_size}, workers: {loader.num_workers}, "
        f"prefetch {loader.prefetch}, {loader.device}, views: {len(loader.augment.views)}"
    )


def _ticks(longest: float) -> list[float]:
    step = 10.0 ** int(f"{longest:e}".partition("e")[2])
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if longest / s <= 8)
    return [k * step for k in range(int(longest / step) + 1)]


def _lighter(color: tuple[int, int, int]) -> tuple[int, int, int]:
    red, green, blue = (round(v + 0.45 * (255 - v)) for v in color)
    return red, green, blue


# -- tuning -----------------------------------------------------------------------------------------------------------


def tune(
    request: Request,
    config: DictConfig,
    loader: Loader,
    step: Step | None,
    report: Report,
    verdict: Verdict,
    *,
    settings: Settings,
) -> None:
    """Try settings on the whole, from what the verdict recommends, and say which are best.

    What is recommended in the end has been run beside the loader as it is configured, in turns.
    """
    prefix = "" if request.at is None else f"{request.at}."
    decoder: Any = loader.pipeline.stage.decoder
    start: dict[str, Any] = {"num_workers": loader.num_workers, "prefetch": loader.prefetch}
    cores = machine.usable_cpus()
    candidates: dict[str, list[Any]] = {"num_workers": sorted({0, 1, 2, 4, 8, min(16, cores)})}
    if getattr(decoder, "num_threads", None) is not None:
        start["decode.num_threads"] = decoder.num_threads
        candidates["decode.num_threads"] = sorted({1, 2, max(1, cores // 2), min(16, cores), decoder.num_threads})
    if step is not None:  # without a model nothing shows what it is good for
        candidates["prefetch"] = [0, 2, 4]
    if loader.device.type == "cuda" and getattr(decoder, "backend", None) == "dali":
        start["decode.hardware_load"] = decoder.settings.hardware_load
        candidates["decode.hardware_load"] = [0.0, 0.5, 0.65, 0.8, 1.0]
    configured = dict(start)
    for text in verdict.overrides:
        key, _, value = text.removeprefix(prefix).partition("=")
        start[key] = type(start[key])(value) if key in start else value

    @contextlib.contextmanager
    def make(chosen: Mapping[str, Any]) -> Iterator[Loader]:
        with contextlib.closing(_changed(request, config, loader, chosen)) as made:
            yield made

    bar = tqdm(
        total=100, desc="tune", bar_format="{desc} {percentage:3.0f}%|{bar}| {postfix}", leave=False, disable=None
    )
    rounds, seconds = max(3, settings.repeats // 2), 2 * settings.seconds
    with bar, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, that there are more workers than cores
        best, tried = profiling.tune(
            make, start=start, candidates=candidates, step=step, repeats=rounds, seconds=seconds, progress=_onto(bar)
        )
        changed = {key: value for key, value in best.items() if configured.get(key) != value}
        before = after = None
        if changed:
            bar.set_postfix_str("side by side")
            with make(best) as other:
                before, after = profiling.side_by_side([loader, other], step, rounds=rounds, seconds=2 * seconds)
    lines = [f"{t.rate:>9.0f} images/s  {' '.join(prefix + o for o in t.overrides)}" for t in tried]
    report.add("tried", [asdict(t) for t in tried], "\n".join(["the whole, with", *lines]))
    if before is None or after is None or not after.beats(before):
        text = "nothing: no setting that was tried is faster than those configured"
        if before is not None and after is not None:
            text += f"; what looked best is not reliably so ({_pair(before, after)})"
        report.add("tuned", {}, text)
        return
    named = {prefix + key: value for key, value in changed.items()}
    overrides = " ".join(f"{key}={value}" for key, value in named.items())
    report.add("tuned", named, f"{overrides}   {_pair(before, after)}")
    report.values["tuned_gain"] = after.cost().rate / before.cost().rate


def _pair(before: profiling.Notes, after: profiling.Notes) -> str:
    return f"{after.cost().rate:.0f} images/s, {before.cost().rate:.0f} as configured, in turns"


def _changed(request: Request, config: DictConfig, loader: Loader, chosen: Mapping[str, Any]) -> Loader:
    """The loader again with other settings, over the same source, silently."""
    from omegaconf import OmegaConf, open_dict

    changed = copy.deepcopy(config)
    with open_dict(changed):
        for key, value in chosen.items():
            OmegaConf.update(changed, key, value)
    with profiling.silent():
        made: Loader = request.build(changed, source=loader.source)
    return made
