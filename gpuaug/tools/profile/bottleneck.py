"""Finds the stage that limits a loader, and predicts what a change would gain.

Stages overlap, and on the CPU they share the cores. Every prediction uses this formula:

    seconds per image = max(reading, headers, decoding, augmenting, model, CPU-seconds of all stages / cores)

`reading` runs in all workers in parallel. `headers`, `decoding` and `augmenting` run in one thread each. `headers`
includes random values, crops and receiving batches. `augmenting` includes mix. Without workers, reading is part of
`headers`. With ``prefetch=0``, the times of threads and model are added. The whole is loader and model together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuaug.files import format_bytes
from gpuaug.tools.profile.costs import FREE, Cost, Measured
from gpuaug.tools.profile.measure import Profiler

GAIN = 1.07  # changes with a smaller predicted speedup are not proposed, because measurements vary this much
NOTHING = 1.1  # if an ideal loader gives a smaller speedup, the model is the limit
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


@dataclass(frozen=True, slots=True)
class Prediction:
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

    bottleneck: str  # a key of TITLES
    text: str
    evidence: list[str]
    changes: list[Change]  # to be made together, in this order; each gain includes the changes before it
    others: list[Change]  # each gain comes on top of all `changes`
    prediction: Prediction  # without changes
    ideal_gain: float | None = None  # speedup with a loader that takes no time; None: no model

    @property
    def gain(self) -> float:
        """The predicted speedup of all changes."""
        return self.changes[-1].gain if self.changes else 1.0

    @property
    def overrides(self) -> list[str]:
        """The overrides of all changes. Of two values for a key, the later value is used."""
        return list({text.partition("=")[0]: text for change in self.changes for text in change.overrides}.values())


# -- the model of the pipeline ----------------------------------------------------------------------------------------


def predict(m: Measured) -> Prediction:
    step = m.step or FREE
    mix = min(m.host.wall, m.host_parts.get("mix", 0.0))
    taken = ("receive", m.take) if m.workers else ("read", m.read.wall)
    masks = [] if m.masks is None else [("masks", m.masks.wall)]
    finish = [] if m.masks is None else [("targets", m.finish.wall)]
    augment, training = [("augment", m.augment.wall), *finish, ("mix", mix)], [("model", step.wall)]
    threads = {"headers": [taken, ("host", m.host.wall - mix)], "decoding": [("decode", m.decode.wall), *masks]}
    if m.main_thread:  # augmentation runs in the training thread
        training = augment + training
    else:
        threads["augmenting"] = augment
    ways = {"reading": [("read", m.read.wall)]} if m.workers else {}
    if m.prefetch == 0:
        ways["making and model"] = [*itertools.chain(*threads.values()), *training]
    else:
        ways |= threads
        if m.step is not None or m.main_thread:
            on_device = m.device_type == "cuda" and not m.main_thread  # augmentation and model share the device
            ways["model"] = [*augment[:on_device], *training]
    terms = {name: sum(value for _, value in parts) for name, parts in ways.items()}
    lines = [f"{name} {_sum(parts)}" for name, parts in ways.items()]
    cpu = m.loader_cpu + step.cpu
    terms["cores"] = cpu / m.cores
    lines.append(f"CPU {cpu * 1e3:.3g} ms / {m.cores:.2g} cores = {_ms(cpu / m.cores)}")
    seconds = max(terms.values())
    return Prediction(seconds, terms, f"seconds per image = max({'; '.join(lines)}) = {_ms(seconds)}")


def expected(m: Measured, then: Measured) -> float:
    """Predict seconds per image of the whole, if ``m`` changes to ``then``.

    If the whole takes longer than its parts explain, the difference is added. If the whole takes less, the machine was
    busier while the parts were measured, so the prediction is lowered.
    """
    explained, after = predict(m).seconds, predict(then).seconds
    if m.whole is None:
        return after
    if m.whole.wall >= explained:
        return after + m.whole.wall - explained
    return after * math.sqrt(m.whole.wall / explained)


def gain(m: Measured, then: Measured) -> float:
    """The predicted speedup of the whole."""
    now = predict(m).seconds if m.whole is None else m.whole.wall
    return now / max(expected(m, then), 1e-9)


def bottleneck(m: Measured) -> tuple[str, list[str]]:
    """The stage whose removal would give the largest speedup, and the evidence."""
    now, masks = predict(m), m.masks or FREE
    without: dict[str, tuple[float, dict[str, Any]]] = {  # stage: its seconds, and what changes if it takes no time
        "reading": (m.read.wall, {"read": FREE, "take": 0.0}),
        "decode": (m.decode.wall, {"decode": FREE}),
        "augment": (m.augment.wall, {"augment": FREE}),
        "host": (m.host.wall, {"host": FREE}),
    }
    if m.step is not None:
        without["step"] = m.step.wall, {"step": FREE}
    if m.masks is not None:
        without["masks"] = m.masks.wall + m.finish.wall, {"masks": FREE, "finish": FREE}
    gains = {stage: _speedup(m, **free) for stage, (_, free) in without.items()}
    # if the two largest terms are equal, removing a stage gains nothing; then the slowest stage is chosen
    first = max(gains, key=lambda stage: (round(gains[stage], 2), without[stage][0]))
    if m.prefetch == 0 and m.step is not None:
        ahead = _speedup(m, prefetch=2)
        if ahead >= AHEAD and ahead >= 0.7 * gains[first]:
            return "host overhead", [
                "With prefetch=0 a batch is made only on request, so model and loader wait for each other. "
                f"If both worked at the same time, training would be {ahead:.2g} times as fast."
            ]
    evidence = [f"If `{first}` took no time, the whole would be {_times(gains[first])} as fast."]
    if m.whole is not None and m.whole.wall > UNEXPLAINED * now.seconds:
        evidence.append(
            f"The whole takes {_ms(m.whole.wall)} per image, but its parts explain only {_ms(now.seconds)}: threads "
            "wait for each other, most likely for Python's global interpreter lock."
        )
        return "host overhead", evidence
    if now.terms["cores"] == now.seconds:
        evidence.append(f"All {m.cores:.2g} cores are busy: more workers or threads do not help, less work does.")
    if first == "host":
        part = max(m.host_parts, key=lambda name: m.host_parts[name])
        evidence.append(f"Most of the host time is {part}: {_ms(m.host_parts[part])} per image.")
        return "host overhead", evidence
    if first == "masks":
        text = f"{_ms(masks.wall)} per image to decode, crop and move them, and {_ms(m.finish.wall)} to finish targets."
        evidence.append(f"Masks take {text}")
    if first != "reading":
        return ("model" if first == "step" else first), evidence
    if m.copy is not None and m.copy.wall > HANDING_OVER * m.read.wall:
        text = f"{_ms(m.copy.wall)} of the {_ms(m.read.wall)} to read an image ({m.bytes_per_image / 2**20:.2g} MiB)"
        evidence.append(f"Copying bytes from the workers to this process takes {text}.")
        return "inter-process copy", evidence
    evidence.append(f"Reading a sample takes {_ms(m.source.wall)}. A core is busy for {m.busy:.0%} of this time.")
    return ("storage" if m.busy < 0.5 else "workers"), evidence


def _speedup(m: Measured, **changed: Any) -> float:
    return predict(m).seconds / max(predict(replace(m, **changed)).seconds, 1e-9)


# -- what to change ---------------------------------------------------------------------------------------------------


def diagnose(trials: Profiler, m: Measured, *, at: str | None = None) -> Verdict:
    """Name the bottleneck and the changes that should help. The profiler measures the candidates.

    ``at``: the loader's path in a larger configuration, such as ``train_data``.
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
        factor = gain(m, best)
        if factor >= GAIN and expected(m, current) / max(expected(m, best), 1e-9) >= GAIN:
            current = best
            changes.append(Change((_key(at, override),), text, factor))
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
    if m.prefetch == 0 and m.step is not None:
        yield replace(m, prefetch=2), "prefetch=2", "batches are made while the model works"


def _others(trials: Profiler, m: Measured, current: Measured, stage: str, *, at: str | None) -> list[Change]:
    """Other changes, most of which alter pixels or files. Each gain is relative to ``current``."""
    others: list[Change] = []
    use_packed = f"{_group(at, 'source', 'packed')} {_key(at, 'source.root=DIR')}"

    def propose(then: Measured, overrides: Sequence[str], text: str, *, same: bool = False) -> None:
        factor = expected(m, current) / max(expected(m, then), 1e-9)
        if factor >= GAIN:
            others.append(Change(tuple(overrides), text, factor, same))

    if stage == "augment" and (costs := trials.op_costs()):
        name = max(costs, key=lambda n: costs[n])
        left = 1 - costs[name]
        keys = [f"~{_key(at, key)}" for key in trials.op_keys(name)]
        text = f"operation `{name}` is {costs[name]:.0%} of the augmentation"
        propose(replace(current, augment=current.augment.scaled(left, left)), keys, text)
    if stage in ("storage", "workers") and (cache := trials.cache_bytes()) is not None:
        needed, kept = cache
        share, read = kept / max(needed, 1.0), current.read
        in_memory = current.copy or FREE
        wall, cpu = (a + share * (b - a) for a, b in ((read.wall, in_memory.wall), (read.cpu, in_memory.cpu)))
        part = "" if share == 1 else f"{share:.0%} of the "
        text = f"{part}bytes stay in memory ({format_bytes(needed)} in all, estimated); helps from the second epoch on"
        propose(replace(current, read=Cost(wall, cpu)), (_group(at, "cache", "ram"),), text, same=True)
    if stage == "decode" and trials.pillow:
        then = trials.with_decoder(current, backend="dali")
        propose(then, (_key(at, "decode.backend=dali"),), "DALI decodes instead of Pillow")
    if stage == "decode" and trials.reducible:
        text = "large JPEGs are decoded at a part of their size; `gpuaug parity` shows how far the pixels change"
        propose(trials.with_decoder(current, reduced=True), (_key(at, "decode.reduced=true"),), text)
    if stage == "masks" and trials.packed() is None and (stored := trials.with_runs(current)) is not None:
        command = "gpuaug pack format=uint8 out=DIR"
        text = f"store pixels instead of image files, and masks without compression: {command}, then {use_packed}"
        propose(replace(stored, decode=FREE), (), text)
    if stage in ("decode", "masks", "inter-process copy", "storage") and (packed := trials.packed()) is not None:
        side, fewer = packed  # `fewer`: share of the pixels that is kept; times shrink to this share
        decode = current.decode.scaled(fewer, fewer)
        masks = None if current.masks is None else current.masks.scaled(fewer, fewer)
        read = current.read if stage in ("decode", "masks") else current.read.scaled(max(fewer, 0.05), max(fewer, 0.05))
        text = "if bandwidth, not latency, limits the storage: " if stage == "storage" else ""
        text += f"prepare the images once with a shorter side of {side}: gpuaug pack sizes=[{side}] out=DIR, then "
        text += use_packed
        propose(replace(current, decode=decode, masks=masks, read=read), (), text)
    if stage == "host overhead" and current.host_parts.get("mix", 0) > 0.5 * current.host.wall > 0:
        left = current.host.wall - current.host_parts["mix"]
        propose(replace(current, host=Cost(left, left)), (_group(at, "mix", "none"),), "without mix")
    return others


def _key(at: str | None, text: str) -> str:
    return text if at is None else f"{at}.{text}"


def _group(at: str | None, group: str, choice: str) -> str:
    return f"{group}={choice}" if at is None else f"gpuaug/{group}@{at}.{group}={choice}"


def _answer(m: Measured, name: str, changes: Sequence[Change], others: Sequence[Change], ideal: float | None) -> str:
    text = f"{TITLES[name][1]}."
    if name == "workers" and not m.workers:
        text = "workers: there are none, so reading keeps this process busy."
    if changes:
        return f"{text} Make the listed changes: predicted {_times(changes[-1].gain)} as fast."
    if name == "model":
        if ideal is None:
            return text
        shared = " Loader and model share the cores." if m.device_type == "cpu" else ""
        about = " A faster loader would not help." if ideal < NOTHING else shared
        return f"{text}{about} With a loader that takes no time, training would be {ideal - 1:.0%} faster."
    if others:
        return f"{text} The changes in the list may help."
    if (now := predict(m)).terms["cores"] == now.seconds:
        return f"{text} All {m.cores:.2g} cores are busy. No tested setting helps, but more cores would."
    return f"{text} No tested setting helps."


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds * 1e3:,.0f} ms"


def _sum(parts: Sequence[tuple[str, float]]) -> str:
    total = _ms(sum(value for _, value in parts))
    return f"{' + '.join(f'{name} {value * 1e3:.3g}' for name, value in parts)} = {total}" if len(parts) > 1 else total


def _times(factor: float) -> str:
    return "many times" if factor > 50 else f"{factor:.2g} times"
