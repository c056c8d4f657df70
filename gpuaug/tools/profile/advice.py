"""Names the stage that limits a pass, and tries what may help: each remedy runs, in turns with the loader as it is.

No remedy changes the recipe.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import islice
from typing import Any

from torch.utils.data import Subset

from gpuaug import machine
from gpuaug.augment.progressive import views_of
from gpuaug.errors import GpuaugError
from gpuaug.loader.loader import Loader
from gpuaug.source.adapt import active_numbers, adapt
from gpuaug.tools.pack.command import pack
from gpuaug.tools.pack.job import Pack
from gpuaug.tools.profile.trace import STAGES, THREADS, Step, Trace, trace

log = logging.getLogger("gpuaug")

GAIN = 1.07  # a remedy with a smaller measured gain is not proposed, because measurements vary this much
TRIED = 3  # remedies per bottleneck
PACKED = 96  # images of a packed copy for a trial

TITLES = {  # bottleneck: its stage, and title
    "storage": ("read", "storage: reading bytes is slow"),
    "workers": ("read", "workers: the reading processes are busy"),
    "decode": ("decode", "decode"),
    "masks": ("masks", "masks: decoding, cropping and moving them is slow"),
    "augment": ("augment", "augment"),
    "host overhead": ("headers", "host overhead: Python on the host, between the stages"),
    "model": ("step", "the model is the limit"),
}


@dataclass(frozen=True)
class Remedy:
    """A change of the configuration that may help, and keeps the recipe."""

    overrides: tuple[str, ...]  # a trial replaces DIR by a temporary folder
    text: str  # what the change does
    same: bool = True  # whether all pixels stay the same; otherwise they change a little
    rate: float = 0.0  # measured images per second; 0: not tried yet
    gain: float = 0.0  # `rate` over that of the loader as it is, both measured in turns


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a profile found."""

    loader: Loader
    trace: Trace
    bottleneck: str  # a key of TITLES
    evidence: str
    tried: list[Remedy] = field(default_factory=list)  # sorted: those that keep all pixels, then by gain

    def __post_init__(self) -> None:
        self.tried.sort(key=lambda remedy: (not remedy.same, -remedy.gain))

    @property
    def helping(self) -> list[Remedy]:
        """The remedies with a measured gain."""
        return [remedy for remedy in self.tried if remedy.gain >= GAIN]

    @property
    def text(self) -> str:
        """The answer in a few sentences."""
        text = f"{TITLES[self.bottleneck][1]}."
        if self.bottleneck == "workers" and not self.loader.num_workers:
            text = "workers: there are none, so reading keeps this process busy."
        for remedy in self.helping[:1]:
            but = "" if remedy.same else "No change that was tried keeps all pixels and helps. "
            end = "" if remedy.same else "; pixels change a little"
            return f"{text} {but}{' '.join(remedy.overrides)} is {remedy.gain:.2g} times as fast, measured{end}."
        if not self.tried:
            return f"{text} There is no setting to try."
        return f"{text} Of {len(self.tried)} changes that were tried, none helps."


def diagnose(
    loader: Loader,
    step: Step | None,
    build: Callable[[tuple[str, ...]], Loader],
    *,
    repeats: int,
    seconds: float,
    prefix: str = "",
) -> Verdict:
    """Trace the loader, name its bottleneck, and try remedies.

    Args:
        loader: the loader; it does not change. Do not iterate it at the same time.
        step: a training step.
        build: makes the loader with other overrides, which are added to those of ``loader``.
        repeats: number of passes of each loader. The median counts.
        seconds: duration of a pass.
        prefix: start of the loader's keys in a larger configuration, such as ``train_data.``.
    """
    log.info("profile: traces the loader as it is")
    traces = sorted((trace(loader, step, seconds=seconds) for _ in range(repeats)), key=lambda each: each.rate)
    found = traces[repeats // 2]  # a whole trace, because its times belong together
    slow = trace(loader, step, seconds=seconds / 2, lockstep=True)
    found = replace(found, cpu=found.cpu | {name: value for name, value in slow.cpu.items() if name != "read"})
    name, evidence = bottleneck(loader, found)
    tried: list[Remedy] = []
    with tempfile.TemporaryDirectory() as folder:
        for remedy in islice(remedies(loader, found, name, prefix, folder), TRIED):
            log.info("profile: tries %s", " ".join(remedy.overrides))
            trial = tuple(text.replace("=DIR", f"={folder}") for text in remedy.overrides)
            try:
                with build(trial) as other:
                    pairs = [[trace(it, step, seconds=seconds).rate for it in (loader, other)] for _ in range(repeats)]
            except GpuaugError as error:
                log.info("profile: this failed: %s", error)
                continue
            before, after = map(statistics.median, zip(*pairs, strict=True))
            tried.append(replace(remedy, rate=after, gain=after / before))
    return Verdict(loader=loader, trace=found, bottleneck=name, evidence=evidence, tried=tried)


def bottleneck(loader: Loader, found: Trace) -> tuple[str, str]:
    """Name what limits the pass, and say why.

    The queues between the threads are short. So the thread that limits the pass works all the time, and all others
    wait for it. Without prefetching there is one thread, and its longest stage limits the pass.
    """
    if loader.prefetch == 0:
        stages = STAGES
        making = 1 - found.share("step")
        if min(making, found.share("step")) > 0.25:
            return "host overhead", (
                f"With prefetch=0 a batch is made only on request. Model and loader wait for each other: the model "
                f"works {found.share('step'):.0%} of the time."
            )
    else:
        stages = max(THREADS, key=lambda thread: found.share(*thread))
    stage = max(stages, key=found.share)
    share = f"{found.share(stage):.0%} of the pass"
    if stage == "read":
        why = f"Waiting for encoded images takes {share}, and reading uses a processor {found.reading:.0%} of the time."
        return "storage" if found.reading < 0.5 else "workers", why
    if stage == "step":
        return "model", f"The training step takes {share}."
    return "host overhead" if stage in ("headers", "targets", "mix") else stage, f"`{stage}` works {share}."


def remedies(loader: Loader, found: Trace, name: str, prefix: str, folder: str) -> Iterator[Remedy]:
    """Remedies for a bottleneck, the most likely first. ``folder`` gets what trials write."""
    workers, cores, decoder = loader.num_workers, machine.usable_cpus(), loader.pipeline.decoder
    if loader.prefetch == 0:
        yield Remedy((f"{prefix}prefetch=2",), "stages work at the same time, and while the model works")
    if name in ("storage", "workers") and (remote := loader.source.remote) is not None and remote.cache is None:
        text = "a local disk keeps the bytes; helps from the second epoch on, which is what was measured"
        yield Remedy((f"{prefix}source.remote.cache=DIR/cache",), text)
    if name == "storage":
        for count in dict.fromkeys((max(16, 2 * workers), max(2, 4 * workers))):
            yield Remedy((f"{prefix}num_workers={count}",), f"{count} workers wait for storage instead of {workers}")
    if name == "workers" and workers < cores:
        yield Remedy((f"{prefix}num_workers={cores}",), f"{cores} workers instead of {workers}")
    if name == "workers" and workers:
        yield Remedy((f"{prefix}num_workers=0",), "this process reads, so no bytes are handed over")
    if name in ("decode", "masks") and (threads := loader.pipeline.decoders.num_threads) < cores:
        text = f"{cores} decoding threads instead of {threads}"
        yield Remedy((f"{prefix}decode.num_threads={cores}",), text)
    if name == "decode" and decoder.backend == "pillow":
        if find_spec("nvidia.dali") is not None:
            yield Remedy((f"{prefix}decode.backend=dali",), "DALI decodes instead of Pillow", same=False)
        if not loader.decode.reduced:
            text = "large JPEGs are decoded at a part of their size"
            yield Remedy((f"{prefix}decode.reduced=true",), text, same=False)
    if name in ("decode", "masks", "storage", "workers"):
        yield from _packing(loader, found, name, prefix, folder)
    if name == "augment" and any(view.augment.backend == "kornia" for _, view in views_of(loader.augment)):
        yield Remedy((f"{prefix}augment.backend=fused",), "the fused backend gives the same result in one pass")


def _packing(loader: Loader, found: Trace, name: str, prefix: str, folder: str) -> Iterator[Remedy]:
    """A packed copy of the first images, with smaller sides if that helps. It is written and read for the trial."""
    side, text = round(found.largest * 256 / 224), "files of gpuaug are read, and JPEGs keep their bytes"
    settings: dict[str, Any] = {}
    if 0 < side < 0.67 * found.shorter:
        settings, text = {"sizes": [side]}, f"shorter side {side} instead of {found.shorter:.0f}"
    elif name not in ("storage", "workers") or loader.source.wrapped is None:  # files may be as slow when packed
        return
    if loader.targets is not None and loader.targets.masks is not None:
        settings = {"format": "uint8", **settings}
    source: Any = loader.source
    with contextlib.suppress(GpuaugError):
        few: Any = adapt(Subset(source, active_numbers(source)[:PACKED].tolist()))
        pack(few, f"{folder}/packed", what=Pack(**settings), decode=loader.decode, num_workers=0)
        use = f"gpuaug/source@{prefix}source=packed" if prefix else "source=packed"
        words = " ".join(["gpuaug pack", *(f"{key}={value}" for key, value in settings.items()), "out=DIR/packed"])
        yield Remedy((use, f"{prefix}source.root=DIR/packed"), f"after `{words}`: {text}", same=False)
