"""`gpuaug plan`: how much memory a configuration will take, term by term, and whether it fits this machine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gpuaug import checks, machine
from gpuaug.errors import ConfigError, GpuaugError
from gpuaug.files import format_bytes
from gpuaug.loader.loader import Loader
from gpuaug.tools.plan import predict
from gpuaug.tools.plan.predict import Machine, Peak, Run
from gpuaug.tools.report import Report
from gpuaug.tools.request import Request

log = logging.getLogger("gpuaug")

PLACES: dict[predict.Place, str] = {"host": "host memory", "shared": "of it in /dev/shm", "device": "device memory"}
SECONDS = 15.0  # of a rehearsal; imports come before it


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to do; the keys of ``conf/gpuaug/command/plan.yaml``, which says what they mean."""

    seconds: float = SECONDS
    sample: int = 128
    json: str | None = None

    def __post_init__(self) -> None:
        checks.number("seconds", self.seconds, 1.0, 3600.0)
        checks.whole_number("sample", self.sample, 1)
        checks.text("json", self.json, optional=True)


def main(request: Request) -> int:
    """Rehearse the run, and report what it takes; 0."""
    settings = Settings(**request.settings())
    report = Report(file=settings.json)
    config = request.loader()
    loader: Loader
    with request.build(config) as loader:
        bound = predict.upper_bound(loader, sample=settings.sample)
        prefix = "" if request.at is None else f"{request.at}."
        run, here = Run(loader=loader, costs=bound, config=config, prefix=prefix), Machine.here(loader.device)
        peak = _rehearse(request, run, here, seconds=settings.seconds)
        if peak is not None:
            run = replace(run, costs=peak.costs(loader, bound))
        report.add("image", bound.image, f"{bound.image / 1024:.0f} KiB encoded, mean of {settings.sample} at most")
        _report(report, run, here)
        few = run.costs.batches <= loader.prefetch + 2 and run.costs.batches < len(loader)
        text = f"{run.costs.batches} batches{', too few for everything to fill up: raise `seconds`' if few else ''}"
        if peak is None:
            text = "ended, because it needed more than there is: these are upper bounds"
        report.add("rehearsal", run.costs.batches, f"{text}; pages of libraries and files are not counted")
        short = predict.shortage([run], here)
        report.add("fits", short is None, "yes" if short is None else f"no: {short.text}")
        report.values["overrides"] = [] if short is None else list(short.overrides)
    report.write()
    return 0


def _rehearse(request: Request, run: Run, here: Machine, *, seconds: float, model: Any = None) -> Peak | None:
    from omegaconf import OmegaConf

    config = OmegaConf.to_container(run.config, resolve=True)
    job = {"config": config, "classes": run.classes, "trust": request.trust, "model": model}
    return predict.rehearse({**job, "host": here.host, "shared": here.shared, "seconds": seconds})


def _report(report: Report, run: Run, here: Machine) -> None:
    terms = run.terms()
    lines = [f"{t.name:<26} {t.place:<7} {format_bytes(t.bytes):>11}   {t.formula}" for t in terms]
    report.add("terms", [asdict(term) for term in terms], "\n".join(["", *lines]))
    ranks = machine.local_world_size()
    for place, title in PLACES.items():
        if bytes_there := predict.total(terms, place):
            left = getattr(here, place)
            has = "" if left is None else f", {format_bytes(left)} left here"
            by = f" ({here.host_by})" if place == "host" and here.host_by else ""
            each = f" in each of {ranks} ranks" if ranks > 1 else ""
            report.add(title.replace(" ", "_"), bytes_there, f"{format_bytes(bytes_there)}{each}{has}{by}")


def check(request: Request, runs: Sequence[Run], settings: Any) -> None:
    """Refuse a run that clearly needs more memory than there is left, and warn of one that may; nothing is changed.

    It is rehearsed only where an upper bound is more than half of what is left, and on one rank of a machine.

    Args:
        request: of the command.
        runs: loaders that run at the same time, the training's first, each with :func:`predict.upper_bound`.
        settings: of the training.

    Raises:
        ConfigError: with the numbers, and the overrides to copy.
    """
    here = Machine.here(runs[0].loader.device)
    wanted = [predict.Settings.of(run.loader) for run in runs]
    if machine.local_rank() or not predict.lacking(runs, wanted, here, share=0.5):
        return
    log.info("memory may be short: this run is rehearsed first, for some %.0f s", (SECONDS + 5) * len(runs))
    how = {**asdict(settings), "model": None, "profiling": False, "resume": None}
    trained = {"config": settings.model, "classes": runs[0].loader.num_classes, "settings": how}
    measured: list[Run] = []
    over = False
    for run in runs:
        try:
            peak = _rehearse(request, run, here, seconds=SECONDS, model=None if measured else trained)
        except GpuaugError as error:
            log.warning("memory may not suffice: what this run takes could not be measured. %s", error)
            return
        measured.append(run if peak is None else replace(run, costs=peak.costs(run.loader, run.costs)))
        over = over or peak is None
    short = predict.shortage(measured, here)
    if short is not None and (short.clear or over):
        raise ConfigError(f"{short.text} `check_memory=false` starts it all the same.")
    if short is not None:
        log.warning("memory may not suffice: %s", short.text)
