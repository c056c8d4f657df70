"""Planted bottlenecks: what `gpuaug profile` names, and what the changes bring that it tries.

    python bench/bottlenecks.py --json bottlenecks.json            # all of them; 8 minutes on two cores
    python bench/bottlenecks.py --only "busy worker" --json bottlenecks.json
    python bench/bottlenecks.py --table bottlenecks.json --readme bench/README.md

The bottlenecks are those of the tests (tests/planted.py).
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
from gpuaug.tools.profile.advice import diagnose
from gpuaug.tools.profile.trace import Step, trace

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


@dataclass(frozen=True)
class Plant:
    """One row.

    Attributes:
        name: name of the planted bottleneck.
        named: the name that `gpuaug profile` should find.
        source: the source object; None: the overrides set one.
        overrides: in addition to ``BASE``.
        step: seconds that a model sleeps per batch, as if it ran on its own device; None: no model; -1: as long as
            making a batch takes.
        where: overrides that name the data.
        mix: whether a slow callback mixes the batches.
    """

    name: str
    named: str
    source: Callable[[Data], Any] | None
    overrides: tuple[str, ...] = ()
    step: float | None = None
    where: Callable[[Data], list[str]] = lambda data: []
    mix: bool = False


PLANTS = [
    Plant("slow storage, one worker", "storage", lambda d: planted.Source(d.files(), wait=0.005)),
    Plant("slow storage, no worker", "storage", lambda d: planted.Source(d.files(), wait=0.005), ("num_workers=0",)),
    Plant(
        "storage with a bandwidth", "storage",
        lambda d: planted.Source(d.files(), wait=0.006, turns=str(d.folder / "turns"), count=256),
        ("num_workers=2",),
    ),
    Plant("busy worker", "workers", lambda d: planted.Source(d.files(), work=0.012)),
    Plant("large copies between processes", "workers", lambda d: planted.Source(planted.raws(1800)), RAW),
    Plant("one thread decodes", "decode", lambda d: planted.Source(d.files((1200, 900))), ("decode.num_threads=1",)),
    Plant("large images", "decode", None, where=lambda d: [f"source.root={d.large()}"]),
    Plant(
        "Kornia's modules", "augment", lambda d: planted.Source(d.files()),
        ("augment=standard", "augment.crop.size=160", "augment.backend=kornia"),
    ),
    Plant(
        "slow operation", "augment", lambda d: planted.Source(d.files()),
        ("+augment.ops.slow={_target_: planted.SlowOp, p: 0.9}",),
    ),
    Plant("slow callback", "host overhead", lambda d: planted.Source(d.files()), mix=True),
    Plant(
        "nothing made ahead", "host overhead", lambda d: planted.Source(d.files((1200, 900))), ("prefetch=0",),
        step=-1,
    ),
    Plant("slow model", "model", lambda d: planted.Source(d.files()), step=0.25),
]  # fmt: skip


def build(plant: Plant, data: Data, overrides: tuple[str, ...]) -> Loader:
    """The loader with the bottleneck. The last override of a key counts."""
    words = [*BASE, *(["~source"] if plant.source else plant.where(data)), *overrides]
    objects: dict[str, Any] = {"source": plant.source(data)} if plant.source else {}
    if plant.mix:
        objects["mix"] = planted.SlowMix()
    made: Loader = gpuaug.build(gpuaug.compose("train", words), trust=["planted."], **objects)
    return made


def measure(plant: Plant, data: Data, *, rounds: int, seconds: float) -> dict[str, Any]:
    """Profile, with all trials."""
    with build(plant, data, plant.overrides) as loader:
        step: Step | None = None
        if plant.step is not None:
            wait = loader.batch_size / trace(loader, seconds=seconds).rate if plant.step < 0 else plant.step
            step = sleeping(wait)
        verdict = diagnose(
            loader, step, lambda more: build(plant, data, (*plant.overrides, *more)), repeats=rounds, seconds=seconds
        )
    best = verdict.tried[0] if verdict.tried else None
    return {
        "name": plant.name, "right": plant.named, "named": verdict.bottleneck, "before": verdict.trace.rate,
        "best": "" if best is None else " ".join(best.overrides), "after": None if best is None else best.rate,
        "gain": None if best is None else best.gain, "said": verdict.text, "evidence": verdict.evidence,
        "tried": [{"overrides": " ".join(r.overrides), "gain": r.gain} for r in verdict.tried],
        "load": os.getloadavg()[0],
    }  # fmt: skip


def sleeping(seconds: float) -> Step:
    """A training step as if on its own device: the host only waits."""

    def step(batch: Any) -> None:
        time.sleep(seconds)

    return step


def table(found: dict[str, Any]) -> str:
    """The section of bench/README.md."""
    rows = found["rows"]
    right = sum(r["named"] == r["right"] for r in rows)
    lines = [
        f"{found['machine']}, {found['date']}. {right} of {len(rows)} named rightly.",
        "",
        "| planted | named | images/s | best change that was tried | measured | others |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        named = r["named"] if r["named"] == r["right"] else f"**{r['named']}** (right: {r['right']})"
        best = f"`{r['best']}`" if r["best"] else "nothing to try"
        gain = f"{r['gain']:.2f}×, {r['after']:,.0f} images/s" if r["best"] else ""
        others = ", ".join(f"`{other['overrides']}` {other['gain']:.2f}×" for other in r["tried"][1:])
        lines.append(f"| {r['name']} | {named} | {r['before']:,.0f} | {best} | {gain} | {others} |")
    return "\n".join(lines)


def main() -> int:
    """Measure, or print the table of an earlier run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="names of plants")
    parser.add_argument("--rounds", type=int, default=3, help="passes of each loader (default: 3)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each pass (default: 1)")
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
            row = rows[plant.name] = measure(plant, data, rounds=args.rounds, seconds=args.seconds)
            print(f"{row['name']:32} {row['named']:20} {row['said']}  load {row['load']:.1f}", flush=True)
            keep()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
