"""Which stage limits a loader, and what a change would bring: the reasoning behind `gpuaug profile`, without a clock.

takes: :class:`Measured`, what every stage costs alone, and the profiler, which measures what is worth trying.
does: names the stage without which the whole would be fastest, and looks for settings that relieve it.
gives: :class:`Verdict`.

Stages overlap, and on the CPU they share the cores, so their speeds do not add up. The model behind every prediction:

    seconds per image = max(reading, headers, decoding, augmenting, model, CPU-seconds of all stages / cores)

where `reading` is what the workers need together, the next three what a thread each needs behind them (taking over,
headers, draws and crops; decode; augment and mix), and `model` the training step. Without workers `reading` belongs to
`headers`; with ``prefetch=0`` all of them are added. So a second worker or thread gains what idle cores give, and no
more. What the whole takes beyond that is kept as it is in every prediction: no change is credited with it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpuaug.files import format_bytes

if TYPE_CHECKING:
    from gpuaug.tools.profile.measure import Profiler

GAIN = 1.07  # a change that is predicted to bring less is not proposed: noise is of this size
NOTHING = 1.1  # where an ideal loader brings less than this, the model is the limit
UNEXPLAINED = 2.0  # the whole takes so many times what its parts explain: threads wait for each other
HANDING_OVER = 0.55  # of the time that reading takes: then the copy between processes is the limit
AHEAD = 1.25  # what prefetch must bring to be the answer

TITLES = {
    "storage": "storage: the bytes come slowly",
    "workers": "workers: the processes that read are busy",
    "inter-process copy": "inter-process copy: the workers hand over more bytes than they can copy",
    "decode": "decode",
    "augment": "augment",
    "host overhead": "host overhead: Python on the host, between the stages",
    "model": "the model is the limit",
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds per image of one stage: the median of the rounds, and CPU-seconds of all threads."""

    wall: float
    cpu: float

    @property
    def rate(self) -> float:
        """Images per second."""
        return 1.0 / max(self.wall, 1e-9)

    def scaled(self, wall: float, cpu: float) -> Cost:
        """The same times factors."""
        return Cost(self.wall * wall, self.cpu * cpu)


FREE = Cost(0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured; each stage alone, in seconds per image."""

    batch_size: int
    workers: int
    prefetch: int
    main_thread: bool  # augmentation runs on the thread that trains
    device_type: str
    source: Cost  # bytes of a sample, read in one process
    read: Cost  # batches through the workers as configured; without workers, in this process
    copy: Cost | None  # the same with bytes that are in memory already: packing and handing over. None: no workers
    take: float  # what reading costs the thread that takes the batches over
    decode: Cost
    augment: Cost
    host: Cost  # headers, draws, crops and mix
    host_parts: Mapping[str, float]
    step: Cost | None  # the training step on cached batches, the ideal loader; None without a model
    whole: Cost | None  # all of it, as training runs it; None: not measured
    cores: float  # that this process gets, by affinity, quota and what others leave
    busy: float = 1.0  # share of reading a sample in which the reader computed; else it waited for bytes
    bytes_per_image: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds per image, and the terms that they are the largest of."""

    seconds: float
    terms: Mapping[str, float]
    text: str


@dataclass(frozen=True, slots=True)
class Change:
    """Something to change, and the factor it is predicted to bring together with those before it."""

    overrides: tuple[str, ...]  # for the command line; empty where it takes more than that
    text: str
    gain: float
    same: bool = True  # whether the training still sees the same pixels


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Which stage limits the whole, why, and what to do."""

    bottleneck: str  # a key of TITLES
    text: str  # the answer in one or two sentences
    evidence: list[str]
    changes: list[Change]  # to be made together, in this order; the last one's gain is the gain of all
    # what also would help but changes what is trained on, or takes more than an override; each on top of `changes`
    others: list[Change]
    prediction: Prediction  # of the whole as it is
    ideal_gain: float | None = None  # what a loader that costs nothing would bring; None without a model

    @property
    def gain(self) -> float:
        """What all changes together are predicted to bring, as a factor."""
        return self.changes[-1].gain if self.changes else 1.0

    @property
    def overrides(self) -> list[str]:
        """Everything to put on the command line, without changing what is trained on; a later value counts."""
        return list({text.partition("=")[0]: text for change in self.changes for text in change.overrides}.values())


# -- the model of the pipeline ----------------------------------------------------------------------------------------


def predict(m: Measured) -> Prediction:
    """Seconds per image that the parts explain; the formula stands at the top of this file."""
    step = m.step or FREE
    mix = min(m.host.wall, m.host_parts.get("mix", 0.0))
    taken = ("take over", m.take) if m.workers else ("read", m.read.wall)
    augment, training = [("augment", m.augment.wall), ("mix", mix)], [("model", step.wall)]
    threads = {"headers": [taken, ("host", m.host.wall - mix)], "decoding": [("decode", m.decode.wall)]}
    if m.main_thread:  # augmentation on the thread that trains
        training = augment + training
    else:
        threads["augmenting"] = augment
    ways = {"reading": [("read", m.read.wall)]} if m.workers else {}
    if m.prefetch == 0:
        ways["making and model"] = [*itertools.chain(*threads.values()), *training]
    else:
        ways |= threads
        if m.step is not None or m.main_thread:
            on_device = m.device_type == "cuda" and not m.main_thread  # augmentation and model share it
            ways["model"] = [*augment[:on_device], *training]
    terms = {name: sum(value for _, value in parts) for name, parts in ways.items()}
    lines = [f"{name} {_sum(parts)}" for name, parts in ways.items()]
    cpu = m.read.cpu + m.decode.cpu + m.augment.cpu + m.host.cpu + step.cpu
    terms["cores"] = cpu / m.cores
    lines.append(f"CPU {cpu * 1e3:.3g} ms / {m.cores:.2g} cores = {_ms(cpu / m.cores)}")
    seconds = max(terms.values())
    return Prediction(seconds, terms, f"seconds per image = max({'; '.join(lines)}) = {_ms(seconds)}")


def expected(m: Measured, then: Measured) -> float:
    """Seconds per image of the whole after ``m`` has become ``then``.

    No change is credited with what the whole takes beyond its parts. Where it takes less than they explain, they were
    measured in a worse moment, and the answer is the geometric mean of both.
    """
    explained, after = predict(m).seconds, predict(then).seconds
    if m.whole is None:
        return after
    if m.whole.wall >= explained:
        return after + m.whole.wall - explained
    return after * math.sqrt(m.whole.wall / explained)


def gain(m: Measured, then: Measured) -> float:
    """How many times as fast the whole is predicted to become, from what was measured of it."""
    now = predict(m).seconds if m.whole is None else m.whole.wall
    return now / max(expected(m, then), 1e-9)


def bottleneck(m: Measured) -> tuple[str, list[str]]:
    """The stage whose absence would bring most, and the evidence in numbers."""
    now = predict(m)
    stages = ["reading", "decode", "augment", "host", *(["step"] if m.step is not None else [])]
    free: dict[str, dict[str, Any]] = {stage: {stage: FREE} for stage in stages}
    free["reading"] = {"read": FREE, "take": 0.0}
    gains = {stage: now.seconds / max(predict(replace(m, **free[stage])).seconds, 1e-9) for stage in stages}
    evidence = [now.text]
    own = {"reading": m.read, "decode": m.decode, "augment": m.augment, "host": m.host, "step": m.step or FREE}
    # where two ways are equally long no single stage would help: then the one that is longest itself
    first = max(stages, key=lambda stage: (round(gains[stage], 2), own[stage].wall))
    if m.prefetch == 0 and m.step is not None:
        ahead = now.seconds / max(predict(replace(m, prefetch=2)).seconds, 1e-9)
        if ahead >= AHEAD and ahead >= 0.7 * gains[first]:
            evidence.append(
                "prefetch=0 makes a batch only when it is asked for: model and loader wait for each other; "
                f"at the same time they would be {ahead:.2g} times as fast."
            )
            return "host overhead", evidence
    evidence.append(f"If `{first}` cost nothing, the whole would be {_times(gains[first])} as fast.")
    if m.whole is not None and m.whole.wall > UNEXPLAINED * now.seconds:
        evidence.append(
            f"The whole takes {_ms(m.whole.wall)} per image, its parts explain {_ms(now.seconds)}: threads wait for "
            "each other, most likely for the interpreter's lock."
        )
        return "host overhead", evidence
    if now.terms["cores"] == now.seconds:
        evidence.append(
            f"All of the {m.cores:.2g} cores are busy: more workers or threads bring nothing, less work does."
        )
    if first == "host":
        part = max(m.host_parts, key=lambda name: m.host_parts[name])
        evidence.append(f"Most of it is {part}: {_ms(m.host_parts[part])} per image.")
        return "host overhead", evidence
    if first != "reading":
        return ("model" if first == "step" else first), evidence
    if m.copy is not None and m.copy.wall > HANDING_OVER * m.read.wall:
        text = f"{_ms(m.copy.wall)} of the {_ms(m.read.wall)} per image ({m.bytes_per_image / 2**20:.2g} MiB each)"
        evidence.append(f"Handing over bytes that are in memory already takes {text}.")
        return "inter-process copy", evidence
    evidence.append(f"Reading a sample keeps a core busy for {m.busy:.0%} of its {_ms(m.source.wall)}.")
    return ("storage" if m.busy < 0.5 else "workers"), evidence


# -- what to change ---------------------------------------------------------------------------------------------------


def diagnose(trials: Profiler, m: Measured, *, at: str | None = None) -> Verdict:
    """Name the bottleneck and the changes that are predicted to help; candidates are measured by the profiler.

    ``at`` is where the loader stands in a larger configuration, ``train_data``; overrides then name it.
    """
    name, evidence = bottleneck(m)
    changes: list[Change] = []
    current, tried, stage = m, set[str](), name
    while stage not in tried and len(tried) < 4:
        tried.add(stage)
        best: tuple[Measured, str, str] | None = None
        for then, override, text in _options(trials, current, stage):
            if best is None or expected(m, then) < 0.95 * expected(m, best[0]):
                best = then, override, text
        if best is not None and expected(m, current) / max(expected(m, best[0]), 1e-9) >= GAIN:
            factor = gain(m, best[0])
            if factor >= GAIN:
                current = best[0]
                changes.append(Change((_key(at, best[1]),), best[2], factor))
                if stage == "host overhead":
                    tried.discard(stage)
        stage, _ = bottleneck(replace(current, whole=None))
    others = _others(trials, m, current, stage, at=at)
    ideal = None if m.step is None or m.whole is None else max(1.0, m.whole.wall / max(m.step.wall, 1e-9))
    return Verdict(
        bottleneck=name,
        text=_answer(m, name, changes, others, ideal),
        evidence=evidence,
        changes=changes,
        others=others,
        prediction=predict(m),
        ideal_gain=ideal,
    )


def _options(trials: Profiler, m: Measured, stage: str) -> Iterator[tuple[Measured, str, str]]:
    """Settings that may relieve a stage without changing a pixel, the cheapest first; each measured."""
    if stage in ("storage", "workers", "inter-process copy"):
        most = max(16, 2 * trials.cores) if stage == "storage" else trials.cores
        rest = max(value for term, value in predict(replace(m, workers=1)).terms.items() if term != "reading")
        # as many as would hide reading behind everything else, with some to spare, if they did not disturb each other
        wanted = max(2 * m.workers, 1, math.ceil(1.5 * max(1, m.workers) * m.read.wall / max(rest, 1e-9)))
        counts = {min(most, 1 << (wanted - 1).bit_length()), min(most, 2 * max(1, m.workers))}
        for count in sorted(counts, reverse=True):
            if count > m.workers:
                then = trials.with_workers(m, count)
                text = f"{count} workers instead of {m.workers}: {then.read.rate:.0f} images/s read"
                yield then, f"num_workers={count}", text
                if then.read.wall < 0.7 * m.read.wall:
                    break
        if stage == "inter-process copy":
            then = trials.with_workers(m, 0)
            yield then, "num_workers=0", f"read in this process, without a copy: {then.read.rate:.0f} images/s read"
    elif stage == "decode":
        threads = trials.threads
        if threads is not None and threads < trials.cores:
            for count in sorted({min(trials.cores, factor * threads) for factor in (2, 4)} | {min(8, trials.cores)}):
                if count > threads:
                    then = trials.with_decoder(m, num_threads=count)
                    yield then, f"decode.num_threads={count}", f"{count} threads decode, instead of {threads}"
        if m.workers == 0:
            yield trials.with_workers(m, 1), "num_workers=1", "a worker reads while this process decodes"
    elif stage == "augment" and trials.kornia:
        yield trials.with_fused(m), "augment.backend=fused", "the fused backend does the same in one pass"
    if m.prefetch == 0 and m.step is not None:
        yield replace(m, prefetch=2), "prefetch=2", "batches are made while the model works"


def _others(trials: Profiler, m: Measured, current: Measured, stage: str, *, at: str | None) -> list[Change]:
    """What would help and changes pixels or needs more than an override; each alone, on top of what was changed."""
    others: list[Change] = []

    def propose(then: Measured, overrides: Sequence[str], text: str, *, same: bool = False) -> None:
        factor = expected(m, current) / max(expected(m, then), 1e-9)
        if factor >= GAIN:
            others.append(Change(tuple(overrides), text, factor, same))

    if stage == "augment" and (costs := trials.op_costs()):
        name = max(costs, key=lambda n: costs[n])
        left = 1 - costs[name]
        keys = [_key(at, key, sign="~") for key in trials.op_keys(name)]
        text = f"operation `{name}` is {costs[name]:.0%} of the augmentation"
        propose(replace(current, augment=current.augment.scaled(left, left)), keys, text)
    if stage in ("storage", "workers") and (cache := trials.cache_bytes()) is not None:
        needed, kept = cache
        share, read = kept / max(needed, 1.0), current.read
        in_memory = current.copy or FREE  # without workers there is no copy either
        wall, cpu = (a + share * (b - a) for a, b in ((read.wall, in_memory.wall), (read.cpu, in_memory.cpu)))
        part = "" if share == 1 else f"{share:.0%} of the "
        text = f"{part}bytes stay in memory ({format_bytes(needed)} in all, estimated); from the second epoch on"
        propose(replace(current, read=Cost(wall, cpu)), (_group(at, "cache", "ram"),), text, same=True)
    if stage == "decode" and trials.pillow:
        then = trials.with_decoder(current, backend="dali")
        propose(then, (_key(at, "decode.backend=dali"),), "DALI decodes instead of Pillow")
    if stage in ("decode", "inter-process copy", "storage") and (packed := trials.packed()) is not None:
        side, fewer = packed  # decoding and handing over take as long as there are pixels and bytes
        decode = current.decode.scaled(fewer, fewer)
        read = current.read if stage == "decode" else current.read.scaled(max(fewer, 0.05), max(fewer, 0.05))
        text = "where storage is slow by the byte, not by the request, " if stage == "storage" else ""
        text += f"prepare the images once with a shorter side of {side}: gpuaug pack sizes=[{side}] out=DIR, then "
        text += f"{_group(at, 'source', 'packed')} {_key(at, 'source.root=DIR')}"
        propose(replace(current, decode=decode, read=read), (), text)
    if stage == "host overhead" and current.host_parts.get("mix", 0) > 0.5 * current.host.wall > 0:
        left = current.host.wall - current.host_parts["mix"]
        propose(replace(current, host=Cost(left, left)), (_group(at, "mix", "none"),), "without mix")
    return others


def _key(at: str | None, text: str, *, sign: str = "") -> str:
    return f"{sign}{text}" if at is None else f"{sign}{at}.{text}"


def _group(at: str | None, group: str, choice: str) -> str:
    """The override that chooses from a group, in Hydra's words."""
    return f"{group}={choice}" if at is None else f"gpuaug/{group}@{at}.{group}={choice}"


def _answer(m: Measured, name: str, changes: Sequence[Change], others: Sequence[Change], ideal: float | None) -> str:
    text = f"{TITLES[name]}."
    if name == "workers" and not m.workers:
        text = "workers: there are none, and reading keeps this process busy."
    if changes:
        return f"{text} Change what is listed: predicted {_times(changes[-1].gain)} as fast."
    if name == "model":
        if ideal is None:
            return text
        shared = " Loader and model share the cores:" if m.device_type == "cpu" else ""
        about = " nothing in the loader would help:" if ideal < NOTHING else shared
        return f"{text}{about} a loader that costs nothing would bring {ideal - 1:.0%}."
    if others:
        return f"{text} No setting helps at once; what else would is listed."
    if (now := predict(m)).terms["cores"] == now.seconds:
        return f"{text} All {m.cores:.2g} cores are busy: no setting that was tried helps, a faster machine would."
    return f"{text} No setting that was tried helps."


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds * 1e3:,.0f} ms"


def _sum(parts: Sequence[tuple[str, float]]) -> str:
    total = _ms(sum(value for _, value in parts))
    return f"{' + '.join(f'{name} {value * 1e3:.3g}' for name, value in parts)} = {total}" if len(parts) > 1 else total


def _times(factor: float) -> str:
    return "many times" if factor > 50 else f"{factor:.2g} times"
