"""Finds the stage that limits a loader, and predicts what a change would gain.

Stages overlap, and on the CPU they share the cores. Every prediction uses this formula:

    seconds per image = max(reading, headers, decoding, augmenting, model, CPU-seconds of all stages / cores)

`reading` runs in all workers in parallel. `headers`, `decoding` and `augmenting` run in one thread each. `headers`
includes random values, crops and receiving batches. `augmenting` includes mix. Without workers, reading is part of
`headers`. Augmentation on a GPU or in the training thread is part of `model` too. With ``prefetch=0``, the times of
threads and model are one sum. "The whole" is loader plus model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpuaug.files import format_bytes
from gpuaug.tools.profile.costs import FREE, LOADER, STAGES, Cost, Measured
from gpuaug.tools.profile.measure import Profiler

GAIN = 1.07  # changes with a smaller predicted speedup are not proposed, because measurements vary this much
NOTHING = 1.1  # if an ideal loader gives a smaller speedup, a better loader is not worth it
UNEXPLAINED = 2.0  # if the whole takes more than 2 x the predicted time, threads wait for each other
HANDING_OVER = 0.55  # if copying takes a larger share of the reading time, the inter-process copy is the limit
AHEAD = 1.25  # if prefetch gives a larger speedup, the missing prefetch is the limit

TITLES = {  # bottleneck: key of its row in the report, and title
    "storage": ("source", "storage: reading bytes is slow"),
    "workers": ("read", "workers: the reading processes are busy"),
    "inter-process copy": ("copy", "inter-process copy: copying bytes from the workers to this process is slow"),
    "decode": ("decode", "decode"),
    "masks": ("masks", "masks: decoding, cropping and moving them is slow"),
    "augment": ("augment", "augment"),
    "host overhead": ("host", "host overhead: Python on the host, between the stages"),
    "model": ("step", "the model is the limit"),
}
HOST = {"headers": "headers, draws and crops", "objects": "targets", "mix": "mix"}  # parts of the host's time


class Prediction(NamedTuple):
    """The predicted seconds per image: the largest of the terms."""

    seconds: float
    terms: Mapping[str, float]
    text: str


@dataclass(frozen=True, slots=True)
class Change:
    """A change of settings, with its predicted speedup."""

    overrides: tuple[str, ...]  # empty if overrides are not enough
    text: str
    gain: float
    same: bool = True  # whether the pixels stay the same


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The stage that limits the whole, the reason, and the remedy."""

    measured: Measured
    bottleneck: str  # a key of TITLES
    evidence: list[str]
    changes: list[Change]  # to be made together, in this order; each gain includes the changes before it
    others: list[Change]  # each gain comes on top of all `changes`

    @property
    def prediction(self) -> Prediction:
        """The prediction without changes."""
        return predict(self.measured)

    @property
    def ideal_gain(self) -> float | None:
        """The speedup with a loader that takes no time; None: no model."""
        whole, step = self.measured.whole.wall, self.measured.step.wall
        return max(1.0, whole / step) if whole and step else None

    @property
    def gain(self) -> float:
        """The predicted speedup of all changes."""
        return self.changes[-1].gain if self.changes else 1.0

    @property
    def overrides(self) -> list[str]:
        """The overrides of all changes. Of two values for a key, the later value is used."""
        return list({text.partition("=")[0]: text for change in self.changes for text in change.overrides}.values())

    @property
    def text(self) -> str:
        """The answer in a few sentences."""
        m, text = self.measured, f"{TITLES[self.bottleneck][1]}."
        if self.bottleneck == "workers" and not m.workers:
            text = "workers: there are none, so reading keeps this process busy."
        if self.changes:
            return f"{text} Make the listed changes: predicted {_times(self.gain)} as fast."
        if self.bottleneck == "model":
            if self.ideal_gain is None:
                return text
            shared = " Loader and model share the cores." if m.device_type == "cpu" else ""
            about = " A faster loader would not help." if self.ideal_gain < NOTHING else shared
            return (
                f"{text}{about} With a loader that takes no time, training would be {self.ideal_gain - 1:.0%} faster."
            )
        if self.others:
            return f"{text} The changes in the list may help."
        if self.prediction.terms["cores"] == self.prediction.seconds:
            return f"{text} All {m.cores:.2g} cores are busy. No tested setting helps, but more cores would."
        return f"{text} No tested setting helps."


# -- the model of the pipeline ----------------------------------------------------------------------------------------


def predict(m: Measured) -> Prediction:
    taken = {"receive": m.take.wall} if m.workers else {"read": m.read.wall}
    threads = {
        "headers": {**taken, "host": m.headers.wall + m.objects.wall},
        "decoding": {"decode": m.decode.wall, "masks": m.masks.wall},
        "augmenting": {"augment": m.augment.wall, "targets": m.finish.wall, "mix": m.mix.wall},
    }
    training = {"model": m.step.wall}
    if m.main_thread:  # augmentation runs in the training thread
        training = threads.pop("augmenting") | training
    ways = {"reading": {"read": m.read.wall}} if m.workers else {}
    if m.prefetch == 0:
        parts = itertools.chain.from_iterable(way.items() for way in (*threads.values(), training))
        ways["making and model"] = dict(parts)
    else:
        ways |= threads
        if m.step.wall or m.main_thread:
            on_device = m.device_type == "cuda" and not m.main_thread
            ways["model"] = {"augment": m.augment.wall, **training} if on_device else training
    terms = {name: sum(parts.values()) for name, parts in ways.items()}
    lines = [f"{name} {_sum(parts)}" for name, parts in ways.items()]
    cpu = m.total([*LOADER, "step"]).cpu
    terms["cores"] = cpu / m.cores
    lines.append(f"CPU {cpu * 1e3:.3g} ms / {m.cores:.2g} cores = {_ms(cpu / m.cores)}")
    seconds = max(terms.values())
    return Prediction(seconds, terms, f"seconds per image = max({'; '.join(lines)}) = {_ms(seconds)}")


def expected(m: Measured, then: Measured) -> float:
    """Predict seconds per image of the whole, if ``m`` changes to ``then``.

    If the whole takes longer than its parts explain, the prediction is longer by the difference. If it takes less, the
    machine was busier while the parts were measured, so the prediction is lowered.
    """
    explained, after = predict(m).seconds, predict(then).seconds
    if not m.whole.wall:
        return after
    if m.whole.wall >= explained:
        return after + m.whole.wall - explained
    return after * math.sqrt(m.whole.wall / explained)


def gain(m: Measured, then: Measured, *, current: Measured | None = None) -> float:
    """The predicted speedup if ``m`` changes to ``then``. With ``current``: the speedup over ``current``."""
    now = expected(m, current) if current is not None else m.whole.wall or predict(m).seconds
    return now / max(expected(m, then), 1e-9)


def bottleneck(m: Measured) -> tuple[str, list[str]]:
    """Return the bottleneck, usually the stage whose removal gains most, and the evidence."""
    now, alone = predict(m), replace(m, whole=FREE)
    gains = {stage: gain(alone, m.scaled(dict.fromkeys(fields, FREE))) for stage, fields in STAGES.items()}
    # if the two largest terms are equal, removing a stage gains nothing; then the slowest stage is chosen
    first = max(gains, key=lambda stage: (round(gains[stage], 2), m.total(STAGES[stage]).wall))
    if m.prefetch == 0 and m.step.wall:
        ahead = gain(alone, replace(m, prefetch=2))
        if ahead >= AHEAD and ahead >= 0.7 * gains[first]:
            return "host overhead", [
                "With prefetch=0 a batch is made only on request, so model and loader wait for each other. "
                f"If both worked at the same time, training would be {ahead:.2g} times as fast."
            ]
    evidence = [f"If `{first}` took no time, the whole would be {_times(gains[first])} as fast."]
    if m.whole.wall > UNEXPLAINED * now.seconds:
        evidence.append(
            f"The whole takes {_ms(m.whole.wall)} per image, but its parts explain only {_ms(now.seconds)}: threads "
            "wait for each other, most likely for Python's global interpreter lock."
        )
        return "host overhead", evidence
    if now.terms["cores"] == now.seconds:
        evidence.append(f"All {m.cores:.2g} cores are busy: more workers or threads do not help. Less work helps.")
    if first == "host":
        part = max(STAGES["host"], key=lambda name: getattr(m, name).wall)
        evidence.append(f"Most of the host time is {HOST[part]}: {_ms(getattr(m, part).wall)} per image.")
    if first == "masks":
        text = f"{_ms(m.masks.wall)} per image to decode, crop and move. Converting targets takes {_ms(m.finish.wall)}."
        evidence.append(f"Masks take {text}")
    if first != "reading":
        return {"step": "model", "host": "host overhead"}.get(first, first), evidence
    if m.copy.wall > HANDING_OVER * m.read.wall:
        text = f"{_ms(m.copy.wall)} of the {_ms(m.read.wall)} to read an image ({m.bytes_per_image / 2**20:.2g} MiB)"
        evidence.append(f"Copying bytes from the workers to this process takes {text}.")
        return "inter-process copy", evidence
    evidence.append(f"Reading a sample takes {_ms(m.source.wall)}. A core is busy for {m.busy:.0%} of this time.")
    return ("storage" if m.busy < 0.5 else "workers"), evidence


# -- what to change ---------------------------------------------------------------------------------------------------


def diagnose(trials: Profiler, m: Measured, *, prefix: str = "") -> Verdict:
    """Name the bottleneck and the changes that should help. ``trials`` measures possible changes.

    ``prefix``: start of the loader's keys in a larger configuration, such as ``train_data.``.
    """
    name, evidence = bottleneck(m)
    changes: list[Change] = []
    current, tried, stage = m, set[str](), name
    while stage not in tried and len(tried) < 4:
        tried.add(stage)
        best, override, text = current, "", ""
        for option in _options(trials, current, stage):
            if best is current or expected(m, option[0]) < 0.95 * expected(m, best):
                best, override, text = option
        if gain(m, best) >= GAIN and gain(m, best, current=current) >= GAIN:
            current = best
            changes.append(Change((prefix + override,), text, gain(m, best)))
            if stage == "host overhead":
                tried.discard(stage)
        stage, _ = bottleneck(replace(current, whole=FREE))
    others = [
        Change(overrides, text, factor, same)
        for then, overrides, text, same in _others(trials, current, stage, prefix)
        if (factor := gain(m, then, current=current)) >= GAIN
    ]
    return Verdict(measured=m, bottleneck=name, evidence=evidence, changes=changes, others=others)


def _options(trials: Profiler, m: Measured, stage: str) -> Iterator[tuple[Measured, str, str]]:
    """Settings that may make a stage faster: measurements, override and text of each."""
    if stage in ("storage", "workers", "inter-process copy"):
        most = max(16, 2 * trials.cores) if stage == "storage" else trials.cores
        rest = max(value for term, value in predict(replace(m, workers=1)).terms.items() if term != "reading")
        # with perfect scaling, `wanted` workers read at least 1.5 times as fast as the slowest other term
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
            yield then, "num_workers=0", f"this process reads, without a copy: {then.read.rate:.0f} images/s read"
    elif stage in ("decode", "masks"):
        threads = trials.threads
        if threads is not None and threads < trials.cores:
            for count in sorted({min(trials.cores, count) for count in (2 * threads, 4 * threads, 8)}):
                if count > threads:
                    then = trials.with_decoder(m, num_threads=count)
                    yield then, f"decode.num_threads={count}", f"{count} decoding threads instead of {threads}"
        if m.workers == 0 and stage == "decode":
            yield trials.with_workers(m, 1), "num_workers=1", "a worker reads while this process decodes"
    elif stage == "augment" and trials.kornia:
        yield trials.with_fused(m), "augment.backend=fused", "the fused backend gives the same result in one pass"
    if m.prefetch == 0 and m.step.wall:
        yield replace(m, prefetch=2), "prefetch=2", "batches are made while the model works"


def _others(
    trials: Profiler, m: Measured, stage: str, prefix: str
) -> Iterator[tuple[Measured, tuple[str, ...], str, bool]]:
    """Other changes: measurements, overrides and text of each, and whether the pixels stay the same."""
    use_packed = f"{_group(prefix, 'source', 'packed')} {prefix}source.root=DIR"
    packed = trials.packed() if stage in ("decode", "masks", "inter-process copy", "storage") else None
    if stage == "augment" and (costs := trials.op_costs()):
        name = max(costs, key=lambda n: costs[n])
        left = 1 - costs[name]
        keys = tuple(f"~{prefix}{key}" for key in trials.op_keys(name))
        text = f"operation `{name}` is {costs[name]:.0%} of the augmentation"
        yield m.scaled({"augment": Cost(left, left)}), keys, text, False
    if stage in ("storage", "workers") and (cache := trials.cache_bytes()) is not None:
        needed, kept = cache
        share = kept / max(needed, 1.0)
        read = Cost(*(a + share * (b - a) for a, b in zip(m.read, m.copy, strict=True)))
        part = "" if share == 1 else f"{share:.0%} of the "
        text = f"{part}bytes stay in memory ({format_bytes(needed)} in all, estimated); helps from the second epoch on"
        yield replace(m, read=read), (_group(prefix, "cache", "ram"),), text, True
    if stage == "decode" and trials.pillow:
        then = trials.with_decoder(m, backend="dali")
        yield then, (f"{prefix}decode.backend=dali",), "DALI decodes instead of Pillow", False
    if stage == "decode" and trials.reducible:
        text = "large JPEGs are decoded at a part of their size; `gpuaug parity` shows how far the pixels change"
        yield trials.with_decoder(m, reduced=True), (f"{prefix}decode.reduced=true",), text, False
    if stage == "masks" and packed is None and (stored := trials.with_runs(m)) is not None:
        command = "gpuaug pack format=uint8 out=DIR"
        text = f"store pixels instead of image files, and masks without compression: {command}, then {use_packed}"
        yield replace(stored, decode=FREE), (), text, False
    if packed is not None:
        side, fewer = packed  # `fewer`: share of the pixels that is kept; times shrink to this share
        factors = dict.fromkeys(("decode", "masks"), Cost(fewer, fewer))
        if stage not in ("decode", "masks"):
            factors["read"] = Cost(max(fewer, 0.05), max(fewer, 0.05))
        text = "if bandwidth, not latency, limits the storage: " if stage == "storage" else ""
        text += f"prepare the images once with a shorter side of {side}: gpuaug pack sizes=[{side}] out=DIR, then "
        yield m.scaled(factors), (), text + use_packed, False
    if stage == "host overhead" and m.mix.wall > 0.5 * m.host.wall > 0:
        yield replace(m, mix=FREE), (_group(prefix, "mix", "none"),), "without mix", False


def _group(prefix: str, group: str, choice: str) -> str:
    return f"gpuaug/{group}@{prefix}{group}={choice}" if prefix else f"{group}={choice}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds * 1e3:,.0f} ms"


def _sum(parts: Mapping[str, float]) -> str:
    spent = [f"{name} {value * 1e3:.3g}" for name, value in parts.items() if value]
    total = _ms(sum(parts.values()))
    return f"{' + '.join(spent)} = {total}" if len(spent) > 1 else total


def _times(factor: float) -> str:
    return "many times" if factor > 50 else f"{factor:.2g} times"
