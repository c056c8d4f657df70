"""Planted bottlenecks: what `gpuaug profile` names and predicts, and the speed-up that its advice really brings.

    python bench/bottlenecks.py --json bottlenecks.json            # all of them; 8 minutes on two cores
    python bench/bottlenecks.py --only "busy worker" --json bottlenecks.json
    python bench/bottlenecks.py --table bottlenecks.json --readme bench/README.md

`gpuaug profile` examines a loader with a planted bottleneck. A second loader follows the advice. Then both run in
turns, and their medians are compared. The bottlenecks are those of the tests (tests/planted.py).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does: spinning threads starve the others

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import photographs
import planted
import readme

import gpuaug
from gpuaug import machine
from gpuaug.loader.loader import Loader
from gpuaug.tools.main import main as cli
from gpuaug.tools.profile import bottleneck, clock
from gpuaug.tools.profile import measure as profiling
from gpuaug.tools.profile.costs import costs_of

BASE = ("device=cpu", "num_workers=1", "batch_size=16", "augment=flip", "augment.crop.size=64")
RAW = ("~augment.crop", "+augment.crop={_target_: gpuaug.RandomCrop, size: 32}")


@dataclass
class Data:
    """The photographs that all loaders read, made once."""

    folder: Path
    made: dict[str, Any] = field(default_factory=dict)

    def files(self, size: tuple[int, int] | None = None, count: int = 16) -> list[bytes]:
        """Encoded photographs, resized to (width, height)."""
        key = f"files {size} {count}"
        if key not in self.made:
            self.made[key] = planted.jpegs(self.photos(), count=count, size=size)
        found: list[bytes] = self.made[key]
        return found

    def photos(self) -> Path:
        """An ImageFolder of 200 of them."""
        if "photos" not in self.made:
            self.made["photos"] = photographs.cut(self.folder / "photos", count=250) / "train"
        folder: Path = self.made["photos"]
        return folder

    def large(self) -> Path:
        """An ImageFolder of 48 of 2,000 x 1,500."""
        folder = self.folder / "large"
        if not folder.exists():
            for k, file in enumerate(self.files((2000, 1500), count=48)):
                (folder / f"c{k % 2}").mkdir(parents=True, exist_ok=True)
                (folder / f"c{k % 2}" / f"{k}.jpg").write_bytes(file)
        return folder

    def packed(self, side: int) -> Path:
        """A packed copy of the large photographs."""
        out = self.folder / f"packed_{side}"
        if not out.exists():
            assert cli(["pack", f"source.root={self.large()}", f"out={out}", f"sizes=[{side}]", "samples=48"]) == 0
        return out


@dataclass(frozen=True)
class Plant:
    """One row.

    Attributes:
        name: name of the planted bottleneck.
        named: the name that `gpuaug profile` should find.
        source: the source object; None: the overrides set one.
        overrides: in addition to ``BASE``.
        step: seconds that a model sleeps per batch, as if it ran on its own device; a function of the measurements.
        other: text in advice that changes more than a setting. The second loader follows it.
        anyway: overrides that are tried if nothing is recommended.
    """

    name: str
    named: str
    source: Callable[[Data], Any] | None
    overrides: tuple[str, ...] = ()
    step: float | str | None = None
    other: str | None = None
    anyway: tuple[str, ...] = ()
    where: Callable[[Data], list[str]] = lambda data: []
    mix: bool = False


PLANTS = [
    Plant("slow storage, one worker", "storage", lambda d: planted.Source(d.files(), wait=0.005)),
    Plant("slow storage, no worker", "storage", lambda d: planted.Source(d.files(), wait=0.005), ("num_workers=0",)),
    Plant(
        "storage with a bandwidth", "storage",
        lambda d: planted.Source(d.files(), wait=0.006, turns=str(d.folder / "turns"), count=256),
        ("num_workers=2",), other="cache=ram",
    ),
    Plant("busy worker", "workers", lambda d: planted.Source(d.files(), work=0.012)),
    Plant("large copies between processes", "inter-process copy", lambda d: planted.Source(planted.raws(1800)), RAW),
    Plant("one thread decodes", "decode", lambda d: planted.Source(d.files((1200, 900))), ("decode.num_threads=1",)),
    Plant("large images", "decode", None, other="gpuaug pack", where=lambda d: [f"source.root={d.large()}"]),
    Plant(
        "Kornia's modules", "augment", lambda d: planted.Source(d.files()),
        ("augment=standard", "augment.crop.size=160", "augment.backend=kornia"),
    ),
    Plant(
        "slow operation", "augment", lambda d: planted.Source(d.files()),
        ("+augment.ops.slow={_target_: planted.SlowOp, p: 0.9}",), other="~augment.ops.slow",
    ),
    Plant("slow callback", "host overhead", lambda d: planted.Source(d.files()), mix=True, other="mix=none"),
    Plant(
        "nothing made ahead", "host overhead", lambda d: planted.Source(d.files((1200, 900))), ("prefetch=0",),
        step="as long as making a batch",
    ),
    Plant(
        "slow model", "model", lambda d: planted.Source(d.files()), step=0.25,
        anyway=("num_workers=2", "prefetch=4", "decode.num_threads=2"),
    ),
]  # fmt: skip


def build(plant: Plant, data: Data, overrides: tuple[str, ...]) -> Loader:
    """The loader with the bottleneck. The last override of a key counts."""
    words = [*BASE, *(["~source"] if plant.source else plant.where(data)), *overrides]
    objects: dict[str, Any] = {"source": plant.source(data)} if plant.source else {}
    if plant.mix and "mix=none" not in overrides:
        objects["mix"] = planted.SlowMix()
    made: Loader = gpuaug.build(gpuaug.compose("train", words), trust=["planted."], **objects)
    return made


def calm(cores: float, patience: float) -> float:
    """Wait until ``cores`` cores are free, at most ``patience`` seconds. Returns the number of free cores."""
    until = time.monotonic() + patience
    while True:
        found = sorted(clock.free_cores(0.3) for _ in range(3))[1]
        if found >= cores or time.monotonic() > until:
            return found
        time.sleep(2)


def measure(plant: Plant, data: Data, *, rounds: int, seconds: float) -> dict[str, Any]:
    """Profile, follow the advice, and compare."""
    with build(plant, data, plant.overrides) as loader:
        step: profiling.Step | None = None
        if plant.step is not None:
            wait = plant.step
            if isinstance(wait, str):
                with profiling.Profiler(loader, repeats=3, seconds=0.1) as profiler:
                    m = profiler.measure()
                wait = loader.batch_size * (m.decode.wall + m.augment.wall + m.host.wall)
            step = sleeping(wait)
        with profiling.Profiler(loader, step=step, repeats=5, seconds=0.2) as profiler:
            m = profiler.measure()
            verdict = bottleneck.diagnose(profiler, m)
        change, predicted, text = list(verdict.overrides), verdict.gain, " ".join(verdict.overrides)
        if plant.other is not None:
            found = [c for c in verdict.others if plant.other in f"{' '.join(c.overrides)} {c.text}"]
            if found:
                predicted *= found[0].gain
                change += found[0].overrides
                text = " ".join(change)
                if "gpuaug pack" in plant.other:
                    side = int(found[0].text.partition("sizes=[")[2].partition("]")[0])
                    change += ["source=packed", f"source.root={data.packed(side)}"]
                    text = f"gpuaug pack sizes=[{side}], source=packed"
        if not change and plant.anyway:
            change, text = list(plant.anyway), f"nothing; tried: {' '.join(plant.anyway)}"
        reached, after = 1.0, None
        if change:
            with build(plant, data, (*plant.overrides, *change)) as changed:
                if loader_cached(changed):
                    for _ in changed:  # the advice speaks of the second epoch
                        pass
                notes = side_by_side([loader, changed], step, rounds=rounds, seconds=seconds)
            before, after = (costs_of(runs)["whole"].rate for runs in notes)
            reached = after / before
        else:
            before = m.whole.rate
    return {
        "name": plant.name, "right": plant.named, "named": verdict.bottleneck, "overrides": text,
        "predicted": predicted, "reached": reached, "before": before, "after": after, "cores": m.cores,
        "said": verdict.text, "evidence": verdict.evidence, "ideal_gain": verdict.ideal_gain,
        "load": os.getloadavg()[0],
    }  # fmt: skip


def side_by_side(
    loaders: list[Loader], step: profiling.Step | None, *, rounds: int, seconds: float
) -> list[list[profiling.Round]]:
    """Measure several loaders in turns. The first round is a warm-up."""
    profilers = [profiling.Profiler(loader, step=step, seconds=seconds / 2) for loader in loaders]
    for loader, profiler in zip(loaders, profilers, strict=True):
        profiler.tasks = profiling.endless(loader)  # all samples, also from a cache
    notes = [[profiler.whole() for profiler in profilers] for _ in range(rounds + 1)]
    return [list(runs) for runs in zip(*notes[1:], strict=True)]


def loader_cached(loader: Loader) -> bool:
    """Whether the loader keeps encoded bytes in memory."""
    return loader.pipeline.cache is not None


def sleeping(seconds: float) -> profiling.Step:
    """A training step as if on its own device: the host only waits."""

    def step(batch: Any) -> None:
        time.sleep(seconds)

    return step


def table(found: dict[str, Any]) -> str:
    """The section of bench/README.md."""
    rows = found["rows"]
    right = sum(r["named"] == r["right"] for r in rows)
    gaining = [r for r in rows if r["predicted"] > 1]
    half = sum(share(r) >= 0.5 for r in gaining)
    lines = [
        f"{found['machine']}, {found['date']}. {right} of {len(rows)} named rightly; {half} of {len(gaining)} pieces "
        "of advice brought at least half of what was predicted.",
        "",
        "| planted | named | advice | images/s | predicted | reached | share of the predicted gain | cores free |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        named = r["named"] if r["named"] == r["right"] else f"**{r['named']}** (right: {r['right']})"
        after = "" if r["after"] is None else f" → {r['after']:,.0f}"
        gain = f"{share(r):.0%}" if r["predicted"] > 1 else "nothing was predicted"
        advice = f"`{r['overrides']}`" if r["overrides"] else "nothing"
        lines.append(
            f"| {r['name']} | {named} | {advice} | {r['before']:,.0f}{after} | {r['predicted']:.2f}× | "
            f"{r['reached']:.2f}× | {gain} | {r['cores']:.1f} |"
        )
    return "\n".join(lines)


def share(row: dict[str, Any]) -> float:
    """The share of the predicted gain that was reached."""
    return float((row["reached"] - 1) / max(row["predicted"] - 1, 1e-9))


def main() -> int:
    """Measure, or print the table of an earlier run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="names of plants")
    parser.add_argument("--rounds", type=int, default=5, help="of the comparison (default: 5)")
    parser.add_argument("--seconds", type=float, default=0.6, help="of each loader in each round (default: 0.6)")
    parser.add_argument("--calm", type=float, default=0.0, help="wait before each row until so many cores are free")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for them (default: 60)")
    readme.add_arguments(parser, "; rows of the same name are replaced")
    args = parser.parse_args()
    if readme.show(args, "bottlenecks.py", table):
        return 0
    warnings.simplefilter("ignore", UserWarning)  # torch's, that there are more workers than cores
    rows: dict[str, Any] = {}
    if args.json is not None and args.json.exists():
        rows = {r["name"]: r for r in json.loads(args.json.read_text())["rows"]}

    def keep() -> None:
        if args.json is None:
            return
        order = [p.name for p in PLANTS]
        found = {
            "machine": f"{machine.cpu_model()}, {machine.usable_cpus()} cores",
            "date": datetime.date.today().isoformat(),
            "rows": sorted(rows.values(), key=lambda r: order.index(r["name"])),
        }
        args.json.write_text(json.dumps(found, indent=1))

    with tempfile.TemporaryDirectory() as folder:
        data = Data(Path(folder))
        for plant in PLANTS:
            if args.only and plant.name not in args.only:
                continue
            if args.calm:
                calm(args.calm, args.patience)
            row = rows[plant.name] = measure(plant, data, rounds=args.rounds, seconds=args.seconds)
            print(
                f"{row['name']:32} {row['named']:20} {row['overrides'][:60]:60} predicted {row['predicted']:6.2f} "
                f"reached {row['reached']:6.2f}  share {share(row) if row['predicted'] > 1 else 1:5.0%}  "
                f"cores {row['cores']:.2f}  load {row['load']:.1f}",
                flush=True,
            )
            keep()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
