"""`gpuaug profile`: planted bottlenecks are named, and the reasoning behind what is predicted holds.

Whether the recommended settings bring what was predicted is a measurement: `bench/bottlenecks.py`.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import planted
import pytest
import torch
from common import threads
from PIL import Image

import gpuaug
from gpuaug import machine
from gpuaug.augment.fused import backend as fused
from gpuaug.errors import ConfigError, GpuaugError
from gpuaug.loader.batch import Batch
from gpuaug.loader.loader import Loader
from gpuaug.tools.main import main
from gpuaug.tools.profile import bottleneck, clock
from gpuaug.tools.profile import measure as profiling
from gpuaug.tools.profile.bottleneck import GAIN, TITLES, Verdict, diagnose, expected, gain, predict
from gpuaug.tools.profile.costs import FREE, Cost, Measured
from gpuaug.tools.profile.measure import Profiler

BASE = ("device=cpu", "num_workers=1", "batch_size=8", "augment=flip", "augment.crop.size=32", "~source")
FEW = "batch_size=2"  # of images that each wait


def build(source: Any, *overrides: str, **objects: Any) -> Loader:
    config = gpuaug.compose("train", [*BASE, *overrides])
    made: Loader = gpuaug.build(config, source=source, trust=["planted."], **objects)
    return made


def judged(loader: Loader, step: Any = None, **how: Any) -> tuple[Measured, Verdict]:
    with Profiler(loader, step=step, **{"repeats": 3, "seconds": 0.05, **how}) as profiler:
        measured = profiler.measure()
        return measured, diagnose(profiler, measured)


def plant(source: Any, *overrides: str, named: str, step: Any = None, **objects: Any) -> Verdict:
    """Require the name."""
    with build(source, *overrides, **objects) as loader:
        measured, verdict = judged(loader, step)
    assert verdict.bottleneck == named, f"{verdict} {measured}"
    return verdict


def name_of(source: Any, *overrides: str, named: str) -> None:
    """Require the name alone: nothing is tried."""
    with build(source, *overrides) as loader, Profiler(loader, repeats=2, seconds=0.02) as profiler:
        found = profiler.measure()
    assert bottleneck.bottleneck(found)[0] == named, found


def sleeping(seconds: float) -> Callable[[Batch], None]:
    """A model on a device of its own: the host only waits for it."""

    def step(batch: Batch) -> None:
        time.sleep(seconds)

    return step


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with threads(2):
        yield


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.few_images(monkeypatch)


@pytest.fixture(scope="module")
def small(photos: Path) -> list[bytes]:
    return planted.jpegs(photos)


# -- the formula ------------------------------------------------------------------------------------------------------


def cost(ms: float, cpu: float | None = None) -> Cost:
    return Cost(ms / 1e3, (ms if cpu is None else cpu) / 1e3)


def measured(**changed: Any) -> Measured:
    plain = Measured(
        batch_size=16, workers=2, prefetch=2, main_thread=False, device_type="cpu", cores=2.0,
        source=cost(1.0), read=cost(0.6, 1.1), copy=cost(0.1), take=Cost(0.0001, 0.0), decode=cost(1.0),
        augment=cost(0.5), headers=cost(0.1),
    )  # fmt: skip
    return replace(plain, **changed)


def anything(rng: random.Random) -> Measured:
    """A measurement with costs of any proportion, as real stages have them: CPU time is part of the clock's."""

    def some(threads: int = 1) -> Cost:
        wall = 10 ** rng.uniform(-1, 1)
        return cost(wall, wall * threads * rng.random())

    workers = rng.randrange(5)
    return measured(
        workers=workers, prefetch=rng.randrange(4), main_thread=rng.random() < 0.2,
        cores=rng.choice([0.5, 1, 2, 3.5, 16]), read=some(max(1, workers)),
        decode=some(2), augment=some(2), headers=some(), copy=some() if workers else FREE,
        step=some(2) if rng.random() < 0.6 else FREE, busy=rng.random(),
        whole=cost(10 ** rng.uniform(0, 1.5)) if rng.random() < 0.5 else FREE,
    )  # fmt: skip


@dataclass
class Paper:
    """Trials that are calculated: reading is work and waiting, decoding work; neither gets more than its cores."""

    cores: int = 2
    threads: int | None = 1
    kornia: bool = False
    cached: bool = False
    fits: float = 1.0
    pillow: bool = False
    reducible: bool = False
    ops: dict[str, float] = field(default_factory=dict)

    def with_workers(self, m: Measured, count: int) -> Measured:
        alone = m.read.wall * max(1, m.workers)
        wall = max(alone / max(1, count), m.read.cpu / self.cores)
        return replace(m, workers=count, read=Cost(wall, m.read.cpu), take=m.take if count else FREE)

    def with_decoder(
        self, m: Measured, *, num_threads: int = 1, backend: str | None = None, reduced: bool = False
    ) -> Measured:
        if backend is not None or reduced:
            return m.scaled({"decode": Cost(0.3, 0.3)})
        return replace(m, decode=Cost(max(m.decode.cpu / num_threads, m.decode.cpu / self.cores), m.decode.cpu))

    def with_fused(self, m: Measured) -> Measured:
        return m.scaled({"augment": Cost(0.2, 0.2)})

    def cache_bytes(self) -> tuple[float, float] | None:
        return None if self.cached else (2.0**30, self.fits * 2.0**30)

    def packed(self) -> tuple[int, float] | None:
        return None

    def op_costs(self) -> dict[str, float]:
        return self.ops

    def op_keys(self, name: str) -> list[str]:
        return [f"augment.ops.{name}"]


def simulated(
    *, workers: int, prefetch: int, read: float, headers: float, decode: float, augment: float, model: float
) -> float:
    """Seconds per batch of workers, a thread for each stage that makes batches and one that trains, event by event."""
    batches = 300
    looking, decoding, augmenting, taken = ([0.0] * batches for _ in range(4))
    free, looker, decoder, augmenter, trainer = [0.0] * max(1, workers), 0.0, 0.0, 0.0, 0.0
    for n in range(batches):
        ready = 0.0
        if workers:  # each reads every so many-th batch, at most two ahead of what was taken over
            asked = looking[n - 2 * workers] if n >= 2 * workers else 0.0
            free[n % workers] = ready = max(free[n % workers], asked) + workers * read
        # a batch whose headers are read is in hand; one that is decoded waits beside the one in hand
        rooms = ((decoding, 1), (augmenting, 2), (taken, prefetch + 1))
        room = [at[n - count] if prefetch and n >= count else 0.0 for at, count in rooms]
        looking[n] = max(looker, ready, room[0] if prefetch else trainer)
        looker = looking[n] + headers + (0.0 if workers else read)
        decoding[n] = max(decoder, looker, room[1])
        decoder = decoding[n] + decode
        augmenting[n] = max(augmenter, decoder, room[2])
        augmenter = augmenting[n] + augment
        taken[n] = max(trainer, augmenter)
        trainer = taken[n] + model
    half = batches // 2
    return (taken[-1] - taken[half]) / (batches - 1 - half)


@pytest.mark.parametrize("seed", range(60))
def test_prediction_equals_a_simulation_of_the_pipeline(seed: int) -> None:
    rng = random.Random(seed)
    workers, prefetch = rng.randrange(4), rng.randrange(4)
    read, headers, decode, augment, model = (rng.uniform(1, 10) for _ in range(5))
    found = simulated(
        workers=workers, prefetch=prefetch, read=read, headers=headers, decode=decode, augment=augment, model=model
    )
    m = measured(
        workers=workers, prefetch=prefetch, cores=64.0, read=cost(read), take=FREE, decode=cost(decode),
        augment=cost(augment), headers=cost(headers), step=cost(model),
    )  # fmt: skip
    assert predict(m).seconds * 1e3 == pytest.approx(found, rel=0.03), predict(m).text


def test_prediction_is_the_longest_of_the_parallel_ways() -> None:
    assert predict(measured()).seconds == pytest.approx(1.35e-3)  # (1.1 + 1.0 + 0.5 + 0.1) / 2 cores
    assert predict(measured(cores=64.0)).seconds == pytest.approx(1.0e-3)  # decoding
    assert predict(measured(cores=64.0, workers=0, read=cost(2.0))).seconds == pytest.approx(2.1e-3)  # and headers
    assert predict(measured(step=cost(3.0, 0.1))).seconds == pytest.approx(3.0e-3)
    assert predict(measured(step=cost(3.0, 6.0))).seconds == pytest.approx((1.1 + 1.0 + 0.5 + 0.1 + 6.0) / 2 * 1e-3)
    assert predict(measured(step=cost(3.0, 0.1), prefetch=0)).seconds == pytest.approx(4.7e-3)
    assert predict(measured(step=cost(3.0, 0.1), main_thread=True)).seconds == pytest.approx(3.5e-3)
    assert predict(measured(step=cost(3.0, 0.1), device_type="cuda")).seconds == pytest.approx(3.5e-3)
    assert "= 1.35 ms" in predict(measured()).text


@pytest.mark.parametrize("seed", range(60))
def test_prediction_is_bounded_by_the_cores_and_never_falls_when_a_cost_rises(seed: int) -> None:
    rng = random.Random(seed)
    m = anything(rng)
    now = predict(m).seconds
    cpu = sum(c.cpu for c in (m.read, m.decode, m.augment, m.host, m.step))
    assert now > 0
    assert now >= cpu / m.cores
    assert predict(replace(m, cores=m.cores * 2)).seconds <= now
    for name in ("read", "decode", "augment", "headers", "step"):
        for factor in (Cost(1.5, 1.0), Cost(1.0, 1.5)):
            assert predict(m.scaled({name: factor})).seconds >= now
        assert predict(m.scaled({name: FREE})).seconds <= now
    alternating = predict(replace(m, prefetch=0)).seconds
    assert all(predict(replace(m, prefetch=n)).seconds <= alternating * (1 + 1e-9) for n in (1, 2, 5))
    if m.step != FREE:
        assert now >= m.step.wall  # no loader makes training faster than its steps


@pytest.mark.parametrize("seed", range(60))
def test_gains_are_never_more_than_idle_cores_give(seed: int) -> None:
    rng = random.Random(1000 + seed)
    m = anything(rng)
    trials = Paper(cores=max(1, math.ceil(m.cores)), threads=rng.choice([None, 1, 2]))
    verdict = diagnose(trials, m)
    now = max(m.whole.wall, predict(m).seconds)
    cpu = sum(c.cpu for c in (m.read, m.decode, m.augment, m.host, m.step))
    factors = [1.0, *(change.gain for change in verdict.changes)]
    assert factors == sorted(factors)
    assert all(factor >= GAIN for factor in factors[1:])
    # workers, threads and prefetch leave the work as it is, so the cores bound what they bring
    assert verdict.gain <= max(1.0, now / max(cpu / m.cores, 1e-9)) * (1 + 1e-9)
    if m.step != FREE:
        assert verdict.gain <= max(1.0, now / m.step.wall) * (1 + 1e-9)
    assert all(change.gain >= GAIN for change in verdict.others)
    keys = [text.partition("=")[0] for text in verdict.overrides]
    assert len(keys) == len(set(keys))
    assert verdict.bottleneck in TITLES
    assert verdict.ideal_gain is None or verdict.ideal_gain >= 1


def test_what_no_part_explains_is_not_credited_to_a_change() -> None:
    m = measured(read=cost(4, 0.1), workers=1, whole=cost(5))
    then = replace(m, read=cost(0.1))
    assert expected(m, m) == pytest.approx(5e-3)
    assert expected(m, then) == pytest.approx((1.0 + 1.0) * 1e-3)  # 1 ms of the 5 stays
    assert gain(m, then) == pytest.approx(5 / 2)
    fast = replace(m, whole=cost(3))  # the parts were measured in a worse moment than the whole
    assert 3 < gain(fast, then) < 4


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"read": cost(9, 0.2), "source": cost(18, 0.2), "busy": 0.02}, "storage"),
        ({"read": cost(9, 18), "source": cost(18)}, "workers"),
        ({"read": cost(9, 18), "source": cost(4, 0.2), "copy": cost(8), "busy": 0.1}, "inter-process copy"),
        ({"decode": cost(5)}, "decode"),
        ({"augment": cost(5)}, "augment"),
        ({"headers": cost(5)}, "host overhead"),
        ({"step": cost(5)}, "model"),
        ({"step": cost(2, 0.1), "prefetch": 0}, "host overhead"),
        ({"step": cost(20, 0.1), "prefetch": 0}, "model"),
        ({"whole": cost(9)}, "host overhead"),  # nothing explains it
        ({"source": cost(18, 8), "read": cost(9, 18), "busy": 0.95}, "workers"),  # busy, on a machine with others
        ({"workers": 0, "copy": FREE, "read": cost(9, 0.2), "busy": 0.02}, "storage"),
    ],
)
def test_bottleneck_is_the_stage_whose_absence_would_bring_most(changed: dict[str, Any], name: str) -> None:
    assert bottleneck.bottleneck(measured(**changed))[0] == name


def test_a_second_worker_is_credited_with_idle_cores_only() -> None:
    m = measured(workers=1, read=cost(12, 12), decode=cost(0.5), augment=cost(0.1))
    two = diagnose(Paper(cores=2), m)
    assert two.overrides == ["num_workers=2"]
    assert two.gain == pytest.approx(12 / ((12 + 0.5 + 0.1 + 0.1) / 2))  # not 2: decode needs a core, too
    many = diagnose(Paper(cores=16), replace(m, cores=16.0))
    assert many.gain > 5
    full = diagnose(Paper(cores=1, cached=True), replace(m, cores=1.0))
    assert full.changes == []
    assert "cores are busy" in full.text


def test_a_second_thread_is_credited_with_idle_cores_only() -> None:
    m = measured(workers=1, read=cost(2, 2), decode=cost(10), augment=cost(0.1), copy=cost(0.2))
    verdict = diagnose(Paper(cores=2), m)
    assert verdict.bottleneck == "decode"
    assert verdict.overrides == ["decode.num_threads=2"]
    assert verdict.gain == pytest.approx(10 / ((2 + 10 + 0.1 + 0.1) / 2))


def test_overrides_name_the_place_of_the_loader() -> None:
    slow = measured(workers=1, read=cost(20, 0.1), decode=cost(2), busy=0.01)
    verdict = diagnose(Paper(), slow, prefix="train_data.")
    assert verdict.overrides == ["train_data.num_workers=16", "train_data.decode.num_threads=2"]
    crawling = measured(workers=16, read=cost(90, 0.1), busy=0.01)
    found = diagnose(Paper(), crawling, prefix="train_data.").others
    assert ("gpuaug/cache@train_data.cache=ram",) in [change.overrides for change in found]
    op = measured(augment=cost(9))
    (other,) = diagnose(Paper(ops={"blur": 0.8}), op, prefix="train_data.").others
    assert other.overrides == ("~train_data.augment.ops.blur",)
    (mix,) = diagnose(Paper(), measured(headers=cost(0.5), mix=cost(8.5)), prefix="data.train.").others
    assert mix.overrides == ("gpuaug/mix@data.train.mix=none",)


def test_group_overrides_compose_in_an_application_of_ones_own(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "app.yaml").write_text("defaults:\n  - gpuaug@train_data: train\n  - _self_\n")
    packed = [bottleneck._group("train_data.", "source", "packed"), f"train_data.source.root={photos}"]
    groups = [bottleneck._group("train_data.", group, choice) for group, choice in (("cache", "ram"), ("mix", "none"))]
    composed = gpuaug.compose("app", [*packed, *groups], config_dir=str(tmp_path)).train_data
    assert composed.cache._target_ == "gpuaug.RamCache"
    assert composed.mix == {}
    assert composed.source._target_ == "gpuaug.PackedSource"


def test_storage_with_a_bandwidth_is_promised_the_cache_and_no_workers() -> None:
    """Costs as measured on storage whose readers take turns: more workers only queue."""
    slow = measured(workers=2, source=cost(6.2, 0.1), read=cost(6.2, 0.3), copy=cost(0.1), decode=cost(0.6), busy=0.02)

    class Queue(Paper):
        def with_workers(self, m: Measured, count: int) -> Measured:
            return replace(m, workers=count)

    verdict = diagnose(Queue(threads=None), slow)
    assert (verdict.bottleneck, verdict.overrides) == ("storage", [])
    (cache,) = verdict.others
    assert (cache.overrides, cache.same) == (("cache=ram",), True)
    assert cache.gain == pytest.approx(6.2 / ((0.1 + 0.6 + 0.5 + 0.1) / 2))  # then the cores are the longest way
    assert "1.00 GiB in all" in cache.text
    assert "second epoch" in cache.text
    (half,) = diagnose(Queue(threads=None, fits=0.5), slow).others
    assert half.gain == pytest.approx(6.2 / (0.5 * 6.2 + 0.5 * 0.1))
    assert half.text.startswith("50% of the bytes")
    assert diagnose(Queue(threads=None, fits=0.05), slow).others == []  # not worth the words


def test_dali_is_named_where_pillow_decodes_without_need() -> None:
    slow = measured(workers=1, decode=cost(9))
    (dali,) = diagnose(Paper(threads=None, pillow=True), slow).others
    assert dali.overrides == ("decode.backend=dali",)
    assert not dali.same
    assert diagnose(Paper(threads=None), slow).others == []


def test_smaller_decoding_is_named_where_crops_allow_it() -> None:
    slow = measured(workers=1, decode=cost(9))
    (smaller,) = diagnose(Paper(threads=None, reducible=True), slow, prefix="data.").others
    assert smaller.overrides == ("data.decode.reduced=true",)
    assert not smaller.same


def test_fused_kernels_are_recommended_instead_of_kornia() -> None:
    verdict = diagnose(Paper(kornia=True), measured(augment=cost(9)))
    assert verdict.overrides == ["augment.backend=fused"]
    assert diagnose(Paper(), measured(augment=cost(9))).overrides == []


def test_a_model_that_limits_gets_no_advice() -> None:
    verdict = diagnose(Paper(), measured(step=cost(20, 0.1), whole=cost(20.2)))
    assert "faster loader would not help" in verdict.text
    assert (verdict.changes, verdict.others) == ([], [])
    shared = diagnose(Paper(), measured(step=cost(20, 40), whole=cost(25)))
    assert "share the cores" in shared.text
    assert "faster loader would not help" not in shared.text


def test_a_model_that_could_be_kept_busier_is_told_how() -> None:
    """Nothing is made ahead: the model is the longest part, and the answer names what to change."""
    slow = measured(step=cost(6, 0.1), prefetch=0, decode=cost(2, 0.2), augment=cost(0.5, 0.1), whole=cost(8.7))
    verdict = diagnose(Paper(threads=None), slow)
    assert verdict.bottleneck == "model"
    assert verdict.overrides == ["prefetch=2"]
    assert "listed changes" in verdict.text
    assert "faster loader would not help" not in verdict.text


# -- the clock --------------------------------------------------------------------------------------------------------


def test_cores_are_those_of_this_process() -> None:
    assert 0.25 <= clock.free_cores(0.02) <= machine.usable_cpus()


def test_waiting_for_bytes_is_told_from_work(small: list[bytes]) -> None:
    shares = []
    for source in (planted.Source(small, wait=0.02), planted.Source(small, work=0.02)):
        with build(source, FEW, "num_workers=0") as loader, Profiler(loader, repeats=1, seconds=0.05) as profiler:
            shares.append(profiling.busy([profiler.read_samples()]))
    assert shares[0] + 0.3 < shares[1]  # near 0 and 1 where nobody else is at work


def test_cpu_time_of_another_process_is_seen() -> None:
    code = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nprint(1, flush=True)"
    with subprocess.Popen([sys.executable, "-c", f"{code}\ninput()"], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        spent = clock.cpu_seconds(process.pid)
        process.communicate(b"\n")
    assert 0.3 <= spent < 3.0
    assert clock.cpu_seconds(process.pid) == 0.0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_cache_is_tried_on_whatever_source(workers: int, small: list[bytes], photos: Path, tmp_path: Path) -> None:
    """An object with `len` and `[i]` as well as a folder; not what is in memory already."""
    (tmp_path / "photos").symlink_to(photos)
    table = tmp_path / "table.csv"
    names = [f"photos/{file.relative_to(photos)}" for file in sorted(photos.rglob("*.jpg"))[:20]]
    table.write_text("path,label\n" + "".join(f"{name},{k % 2}\n" for k, name in enumerate(names)))
    for source in (planted.Source(small, count=300), gpuaug.FolderSource(photos), gpuaug.TableSource(table)):
        with build(source, f"num_workers={workers}") as loader, Profiler(loader, repeats=1, seconds=0.01) as profiler:
            found = profiler.measure()
            cache = profiler.cache_bytes()
            assert cache is not None, source
            assert cache[0] == cache[1] == pytest.approx(found.bytes_per_image * len(loader.source))
    with (
        build(planted.Source(small, count=64), "cache=ram") as loader,
        Profiler(loader, repeats=1, seconds=0.01) as again,
    ):
        assert again.cache_bytes() is None


# -- planted ----------------------------------------------------------------------------------------------------------


def test_storage_that_more_workers_hide(small: list[bytes]) -> None:
    # a read is far slower than starting a turn on a busy machine; beside this model, four workers are enough
    slow = planted.Source(small, wait=0.12)
    with build(slow, "batch_size=1") as loader:
        measured, verdict = judged(loader, sleeping(0.06), repeats=1, seconds=0.02)
    assert verdict.bottleneck == "storage", f"{verdict} {measured}"
    assert verdict.overrides[0] == "num_workers=4", f"{verdict} {measured}"
    assert verdict.gain > 1


def test_storage_without_a_worker(small: list[bytes]) -> None:
    name_of(planted.Source(small, wait=0.02), FEW, "num_workers=0", named="storage")


def test_slow_operation(small: list[bytes]) -> None:
    op = "+augment.ops.slow={_target_: planted.SlowOp, work: 0.0, wait: 0.02, p: 0.9}"
    verdict = plant(planted.Source(small), FEW, op, named="augment")
    assert [c.overrides for c in verdict.others] == [("~augment.ops.slow",)]


def test_slow_callback_on_the_host(small: list[bytes]) -> None:
    verdict = plant(planted.Source(small), FEW, named="host overhead", mix=planted.SlowMix(work=0.0, wait=0.02))
    assert any("mix" in text for text in verdict.evidence)
    assert [c.overrides for c in verdict.others] == [("mix=none",)]


def test_slow_model_is_the_limit_and_nothing_is_recommended(small: list[bytes]) -> None:
    verdict = plant(planted.Source(small), FEW, named="model", step=sleeping(0.08))
    assert verdict.changes == []
    assert verdict.others == []
    assert "the model is the limit" in verdict.text


def test_nothing_is_made_ahead(small: list[bytes]) -> None:
    mix = planted.SlowMix(work=0.0, wait=0.02)  # as long as the model
    verdict = plant(planted.Source(small), FEW, "prefetch=0", named="host overhead", step=sleeping(0.04), mix=mix)
    assert "prefetch=2" in verdict.overrides


def test_kornia_backend_instead_of_fused(small: list[bytes]) -> None:
    recipe = ("augment=standard", "augment.crop.size=160", "augment.backend=kornia", "batch_size=4")
    assert "augment.backend=fused" in plant(planted.Source(small), *recipe, named="augment").overrides


def test_large_images(photos: Path) -> None:
    verdict = plant(planted.Source(planted.jpegs(photos, count=3, size=(1600, 1200))), FEW, named="decode")
    assert any("gpuaug pack" in c.text for c in verdict.others)


def test_busy_worker(small: list[bytes]) -> None:
    name_of(planted.Source(small, work=0.02), FEW, named="workers")


@pytest.mark.long
def test_storage_with_a_bandwidth(small: list[bytes], tmp_path: Path) -> None:
    source = planted.Source(small, wait=0.015, turns=str(tmp_path / "lock"))
    verdict = plant(source, "num_workers=2", named="storage")
    assert verdict.gain < 1.5  # more workers only queue
    assert any(c.overrides == ("cache=ram",) for c in verdict.others)


@pytest.mark.long
def test_large_copies_between_processes() -> None:
    plant(planted.Source(planted.raws(1500)), "~augment.crop", "+augment.crop={_target_: gpuaug.RandomCrop, size: 32}",
          named="inter-process copy")  # fmt: skip


@pytest.mark.long
def test_one_thread_that_decodes(photos: Path) -> None:
    files = planted.jpegs(photos, count=8, size=(1200, 900))
    plant(planted.Source(files), "decode.num_threads=1", named="decode")


# -- loaders of all kinds ---------------------------------------------------------------------------------------------


def sensible(measured: Measured, verdict: Verdict) -> None:
    costs = [
        c for c in (getattr(measured, n) for n in ("source", "read", "decode", "augment", "host", "whole")) if c != FREE
    ]
    for c in costs:
        assert math.isfinite(c.wall), measured
        assert c.wall >= 0, measured
        assert c.cpu >= 0, measured
    assert verdict.bottleneck in TITLES
    assert math.isfinite(verdict.gain)
    assert verdict.gain >= 1


@pytest.mark.parametrize(
    "overrides",
    [
        ("num_workers=0",),
        ("num_workers=0", "prefetch=0"),
        ("batch_size=1",),
        ("batch_size=1000",),  # more than there are
        ("cache=ram",),
        ("ahead=1MiB", "num_workers=2"),
        ("augment=dino", "batch_size=4"),
        ("augment=none",),
        ("mix=mixup_cutmix", "last=pad"),
        ("dtype=bfloat16", "memory_format=channels_last", "order=sequential", "limit_batches=1"),
        pytest.param(("start_method=spawn",), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_loaders_of_all_kinds(overrides: tuple[str, ...], photos: Path) -> None:
    base = [o for o in BASE if o != "~source"]
    if {"augment=dino", "augment=none"} & set(overrides):
        base.remove("augment.crop.size=32")
    config = gpuaug.compose("train", [*base, f"source.root={photos}", *overrides])
    with gpuaug.build(config) as loader:
        sensible(*judged(loader, sleeping(0.001), repeats=1, seconds=0.02))
        assert len(next(iter(loader)))  # it still runs


def test_packed_images(photos: Path, tmp_path: Path) -> None:
    few = f"source.root={tmp_path / 'few'}"
    for file in sorted(photos.rglob("00[0-3].jpg")):
        copy = tmp_path / "few" / file.relative_to(photos)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.symlink_to(file)
    assert main(["pack", few, f"out={tmp_path / 'p'}", "format=uint8", "sizes=[48]", "num_workers=0"]) == 0
    recipe = ["augment=flip", "augment.crop.size=32"]
    assert main(["pack", few, "num_workers=0", *recipe, f"out={tmp_path / 'm'}", "epochs=1"]) == 0
    for root, workers in ((tmp_path / "p", 1), (tmp_path / "m", 0)):
        words = ["source=packed", f"source.root={root}", f"num_workers={workers}", "device=cpu", "batch_size=8"]
        with gpuaug.build(gpuaug.compose("train", [*words, *recipe])) as loader:
            found, verdict = judged(loader, repeats=1, seconds=0.02)
            sensible(found, verdict)
            assert not any("gpuaug pack" in c.text or "cache" in str(c.overrides) for c in verdict.others)


@pytest.mark.parametrize("policy", ["raise", "blank", "drop"])
def test_bad_samples_end_nothing_and_are_not_recorded(policy: str, small: list[bytes], tmp_path: Path) -> None:
    source = planted.Source([*small[:3], b"no image"], broken=5, count=64)
    file = tmp_path / "faults.jsonl"
    how = (f"faults.policy={policy}", f"faults.file={file}", "faults.max=0")
    with build(source, *how, "num_workers=0", "order=sequential") as loader:
        with Profiler(loader, repeats=1, seconds=0.02) as profiler:
            sensible(profiler.measure(), diagnose(profiler, profiler.measure()))
            assert profiler.faults == sum(k % 5 == 0 or k % 4 == 3 for k in range(profiler.tried))
        assert not file.exists()
        assert loader.faults.count == 0
        with pytest.raises(GpuaugError):  # the loader itself is as strict as before
            next(iter(loader))


def test_nothing_but_bad_samples_is_an_error(small: list[bytes]) -> None:
    with build(planted.Source([b"no image"]), "faults.policy=blank") as loader:
        with pytest.raises(GpuaugError, match="none of the first"):
            Profiler(loader)
        assert loader.pipeline.faults is loader.faults


# -- the command ------------------------------------------------------------------------------------------------------


def test_command_prints_draws_and_writes(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "app.yaml").write_text(
        "defaults:\n  - gpuaug@train_data: train\n  - _self_\n"
        f"train_data:\n  source:\n    root: {photos}\n  batch_size: 8\n  device: cpu\n  num_workers: 1\n"
        "  augment: {crop: {size: 32}}\n"
    )
    out, file = tmp_path / "p.png", tmp_path / "p.json"
    call = ["profile", "--config-dir", str(folder), "--config-name", "app", "--at", "train_data"]
    call += ["model._target_=gpuaug.tools.train.model.SmallNet", "+model.width=8", f"out={out}", f"json={file}"]
    assert main([*call, "repeats=1", "seconds=0.02"]) == 0
    written, values = capsys.readouterr(), json.loads(file.read_text())
    printed = written.out
    assert "has neither `key(i)`" not in written.err  # the log speaks of the user's source only
    for word in (
        "each stage alone",
        "decode",
        "augment",
        "training step",
        "the whole",
        "bottleneck",
        "seconds per image = max(",
    ):
        assert word in printed
    assert set(values["stages"]) == {"source", "read", "copy", "decode", "augment", "host", "step", "whole"}
    assert values["bottleneck"] in TITLES
    for name in values["overrides"]:
        assert name.startswith("train_data.")
    with Image.open(out) as picture:
        colors = {color for _, color in picture.convert("RGB").getcolors(1 << 16) or []}
        assert picture.width > 900
        # the limiting stage in red, unless it is the model
        assert colors >= {(29, 130, 200), (42, 157, 90) if values["bottleneck"] == "model" else (230, 57, 70)}


def test_reading_without_workers_is_not_blamed_on_them() -> None:
    m = measured(workers=0, copy=FREE, read=cost(9, 9), source=cost(9), busy=1.0)
    assert diagnose(Paper(cached=True, cores=1), m).text.startswith("workers: there are none")


def test_what_is_tried_on_a_recipe_is_not_logged_again(
    photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fused.say.cache_clear()
    op = "+augment.ops.bend={_target_: kornia.augmentation.RandomThinPlateSpline}"
    words = [o for o in BASE if o != "~source"]
    config = gpuaug.compose("train", [*words, f"source.root={photos}", "num_workers=0", op])
    with (
        caplog.at_level("INFO", logger="gpuaug"),
        gpuaug.build(config) as loader,
        Profiler(loader, repeats=1, seconds=0.01) as profiler,
    ):
        assert set(profiler.op_costs()) == {"flip", "bend"}
    assert caplog.text.count("runs through Kornia") == 1


def test_profiling_changes_nothing_of_the_loader(photos: Path) -> None:
    def pixels(loader: Loader) -> list[torch.Tensor]:
        return [batch.images for batch in loader]

    settings = {"augment": gpuaug.Augment(crop=gpuaug.RandomResizedCrop(24)), "batch_size": 16, "device": "cpu"}
    with gpuaug.Loader(gpuaug.FolderSource(photos), **settings, num_workers=0) as loader:
        before, state, generator = pixels(loader), loader.state_dict(), torch.get_rng_state()
        loader.set_epoch(0)
        judged(loader, repeats=1, seconds=0.02)
        assert torch.equal(generator, torch.get_rng_state())
        assert all(torch.equal(a, b) for a, b in zip(before, pixels(loader), strict=True))
        assert loader.state_dict() == state


@pytest.mark.parametrize("how", ["profiling=true", "profiling=4"])
def test_training_is_profiled_with_its_own_model_and_stays_the_same(
    how: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpuaug.tools.profile import command as profile

    whole = profile.Settings
    monkeypatch.setattr(profile, "Settings", lambda **given: whole(**{**given, "repeats": 1, "seconds": 0.02}))
    fast = ["augment=standard", "augment.crop.size=32", "batch_size=8", "num_workers=0", "cache=ram", "dtype=float32"]
    call = ["train", f"source.root={photos}", "device=cpu", "epochs=1", *fast, "--trust", "planted."]
    shown, losses, weights = [], [], []
    for number, more in enumerate(([], [how])):
        out, file = tmp_path / str(number), tmp_path / f"{number}.txt"
        model = ["model._target_=planted.Noting", f"+model.file={file}", "+model.wait=0.1"]
        before = random.getstate()
        assert main([*call, *model, f"out={out}", f"json={out}/r.json", *more]) == 0
        assert random.getstate() == before
        blank, *batches = file.read_text().splitlines()  # what a step takes is found with blank images
        assert blank.endswith(" 0.0")
        shown.append(batches)
        losses.append(json.loads((out / "r.json").read_text())["history"][0]["loss"])
        weights.append(torch.load(out / "last.pt", weights_only=False)["model"])
    printed = capsys.readouterr().out
    assert "the model is the limit" in printed  # that of this run: it takes 100 ms for a batch
    assert len(shown[1]) > len(shown[0]) > 4
    assert shown[1][-len(shown[0]) :] == shown[0]  # the training saw the same pixels in the same order
    assert losses[0] == losses[1]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@pytest.mark.parametrize("wrong", ["repeats=0", "seconds=-1", "optimizer=lion", "out=7", "model=net"])
def test_wrong_keys_are_refused(photos: Path, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", f"source.root={photos}", wrong]) == 2
    assert f"`{wrong.partition('=')[0]}` must be" in capsys.readouterr().err


def test_labels_that_are_no_classes_are_an_error(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "photos").symlink_to(photos)
    names = [f"photos/{file.relative_to(photos)}" for file in sorted(photos.rglob("*.jpg"))[:4]]
    (tmp_path / "table.csv").write_text("path,label\n" + "".join(f"{name},{k + 0.5}\n" for k, name in enumerate(names)))
    call = ["profile", "source=table", f"source.root={tmp_path}/table.csv", "num_workers=0", "device=cpu", "out=null"]
    assert main([*call, "model._target_=gpuaug.tools.train.model.SmallNet", "seconds=0.01"]) == 2
    assert "`loss=cross_entropy` needs classes" in capsys.readouterr().err


def test_no_batch_is_an_error(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["profile", f"source.root={photos}", "batch_size=1000", "last=drop", "num_workers=0", "device=cpu"]
    assert main(call) == 2
    assert "an epoch has no batch" in capsys.readouterr().err


def test_step_needs_a_known_model(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["profile", f"source.root={photos}", "model._target_=os.system", "device=cpu", "num_workers=0"]
    assert main(call) == 2
    assert "os.system" in capsys.readouterr().err


def test_settings_reject_text_for_numbers() -> None:
    from gpuaug.tools.profile.command import Settings

    with pytest.raises(ConfigError, match="num_classes"):
        Settings(num_classes="ten")  # type: ignore[arg-type]
