"""`gpuaug plan`: how much memory a configuration will take, term by term, and whether it fits this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gpuaug import checks, machine
from gpuaug.errors import ConfigError
from gpuaug.files import format_bytes
from gpuaug.loader.loader import Loader
from gpuaug.tools.plan import predict as plan
from gpuaug.tools.plan.predict import Machine, Plan
from gpuaug.tools.report import Report
from gpuaug.tools.request import Request

log = logging.getLogger("gpuaug")

PLACES = {"host": "host memory", "shared": "of it in /dev/shm", "pinned": "of it pinned", "device": "device memory"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to do; the keys of ``conf/gpuaug/command/plan.yaml``, which says what they mean."""

    measure: bool = False
    seconds: float = 30.0
    sample: int = 128
    json: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.measure, bool):
            raise ConfigError(f"`measure` must be true or false. Found: {self.measure!r}.")
        if isinstance(self.seconds, bool) or not isinstance(self.seconds, int | float) or not self.seconds > 0:
            raise ConfigError(f"`seconds` must be a number above 0. Found: {self.seconds!r}.")
        if type(self.sample) is not int or self.sample < 1:
            raise ConfigError(f"`sample` must be a whole number >= 1. Found: {self.sample!r}.")
        checks.text("json", self.json, optional=True)


def main(request: Request) -> int:
    """Predict, and measure if asked; 0."""
    settings = Settings(**request.settings())
    report = Report(file=settings.json)
    config = request.loader()
    loader: Loader
    with request.build(config) as loader:
        here = Machine.here(loader.device)
        sizes = plan.look(loader, sample=settings.sample)
        plan.warm(loader)  # imports and kernels: part of the base
        base = plan.held()
        worker = plan.one_worker(loader)
        planned = plan.predict(loader, sizes, base=base, worker=worker)
        report.add("images", asdict(sizes), _images(sizes))
        _say(report, planned, here, measured_worker=worker is not None)
        short = plan.shortage(loader, here=here, sizes=sizes, prefix="" if request.at is None else f"{request.at}.")
        report.add("fits", short is None, "yes" if short is None else f"no: {short.text}")
        report.values["overrides"] = [] if short is None else list(short.overrides)
        if settings.measure:
            _compare(report, loader, planned, seconds=settings.seconds)
    report.write()
    return 0


def _images(sizes: plan.Sizes) -> str:
    return (
        f"{sizes.sampled} looked at: {format_bytes(sizes.encoded)} encoded, {format_bytes(sizes.whole)} of pixels, "
        f"{format_bytes(sizes.decoded)} of them decoded for the views"
    )


def _say(report: Report, planned: Plan, here: Machine, *, measured_worker: bool) -> None:
    lines = [f"{'this process':<26} {'host':<7} {format_bytes(planned.base.host):>11}   measured: Python, torch, DALI"]
    for term in planned.terms:
        lines.append(f"{term.name:<26} {term.place:<7} {format_bytes(term.bytes):>11}   = {term.formula}")
    report.add("terms", [asdict(term) for term in planned.terms], "\n".join(["", *lines]))
    report.values["base"] = planned.base.host
    ranks = machine.local_world_size()
    left = {"host": here.host, "shared": here.shared, "device": here.device, "pinned": None}
    for place, title in PLACES.items():
        total = planned.total(place)  # type: ignore[arg-type]
        if not total:
            continue
        there = left[place]
        has = "" if there is None else f", {format_bytes(there)} left here"
        by = f" ({here.host_by})" if place == "host" and here.host_by else ""
        each = f" in each of {ranks} ranks" if ranks > 1 else ""
        report.add(title.replace(" ", "_"), total, f"{format_bytes(total)}{each}{has}{by}")
    if not measured_worker and any(t.name == "workers" for t in planned.terms):
        report.add("note", "worker", "the size of a worker is what was measured elsewhere")


def _compare(report: Report, loader: Loader, planned: Plan, *, seconds: float) -> None:
    peak = plan.measure(loader, seconds=seconds)

    def told(name: str, found: int, predicted: int) -> None:
        off = predicted / max(found, 1) - 1
        report.add(name, {"measured": found, "planned": predicted, "off": off},
                   f"{format_bytes(found)}, planned {format_bytes(predicted)} ({off:+.0%})")  # fmt: skip

    told("measured_host", peak.host, planned.total("host"))
    parts = {part: {"planned": planned.part(part), "measured": getattr(peak.parts, part)} for part in plan.PARTS}
    shown = ", ".join(
        f"{plan.PARTS[part]} {format_bytes(of['measured'])} (planned {format_bytes(of['planned'])})"
        for part, of in parts.items()
        if any(of.values())
    )
    report.add("measured_parts", parts, f"then: {shown}")
    if planned.total("shared"):
        told("measured_shared", peak.shared, planned.total("shared"))
    if loader.device.type == "cuda":
        told("measured_device", peak.device, planned.total("device"))
    few = "" if peak.batches > loader.prefetch + 2 else ", too few for everything to fill up: raise `seconds`"
    text = f"{peak.batches} batches{few}; pages of libraries and files are not counted"
    report.add("measured_over", peak.batches, text)


def check(
    loader: Loader,
    *,
    prefix: str = "",
    beside: Sequence[Loader] = (),
    also: Callable[[plan.Sizes], Sequence[plan.Term]] | None = None,
) -> None:
    """Refuse a run that clearly needs more memory than there is left, and warn of one that may; nothing is changed.

    Args:
        loader: of the run.
        prefix: of its keys on the command line.
        beside: loaders that run at the same time.
        also: what else will be held then, given the sizes of the images.

    Raises:
        ConfigError: with the numbers, and the overrides to copy.
    """
    decoder: Any = loader.pipeline.stage.decoder
    plan.warm(loader)
    short = plan.shortage(loader, beside=beside, also=also, prefix=prefix)
    for count in ("rescued", "truncated"):  # what was looked at beforehand is no part of an epoch
        if hasattr(decoder, count):
            setattr(decoder, count, 0)
    if short is not None and short.clear:
        raise ConfigError(f"{short.text} `check_memory=false` starts it all the same.")
    if short is not None:
        log.warning("memory may not suffice: %s", short.text)
