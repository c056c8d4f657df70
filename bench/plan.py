"""Compares `gpuaug plan` with the memory of real runs: sources, workers, start methods, recipes, image sizes.

    python bench/plan.py --json plan.json                     # everything; 20 minutes on two cores
    python bench/plan.py --only folder packed --json plan.json
    python bench/plan.py --table plan.json --readme bench/README.md

For every configuration `gpuaug plan` predicts the memory. Then a process of its own runs it until all buffers
are full, and its memory is measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import readme
from loader import prepare

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20
FILLED = 4  # batches, by which prefetch=2 has filled up
PARTS = ("main", "workers", "encoded")


@dataclass(frozen=True)
class Configuration:
    """One row: its data and overrides."""

    name: str
    data: str
    overrides: tuple[str, ...]


CONFIGURATIONS = [
    Configuration("folder", "folder", ("augment=flip", "num_workers=2")),
    Configuration("no workers", "folder", ("augment=standard", "num_workers=0")),
    Configuration("4 workers", "folder", ("augment=flip", "num_workers=4", "batch_size=32")),
    Configuration("large batch", "folder", ("augment=standard", "num_workers=2", "batch_size=256")),
    Configuration("dino", "folder", ("augment=dino", "num_workers=2", "batch_size=32")),
    Configuration("forkserver", "folder", ("augment=flip", "num_workers=2", "start_method=forkserver")),
    Configuration("large images", "large", ("augment=flip", "num_workers=2", "batch_size=16")),
    Configuration("packed", "packed", ("augment=flip", "num_workers=0")),
    Configuration("augmented", "augmented", ("augment=flip", "num_workers=0")),
    Configuration("8 workers", "folder", ("augment=simclr", "num_workers=8")),
    Configuration("spawn", "folder", ("augment=standard", "num_workers=4", "start_method=spawn")),
    Configuration(
        "float16, channels last", "folder",
        ("augment=byol", "num_workers=2", "dtype=float16", "memory_format=channels_last", "batch_size=128"),
    ),
    Configuration("shards", "shards", ("augment=standard", "num_workers=4", "prefetch=4")),
    Configuration("parquet", "parquet", ("augment=flip", "num_workers=4", "order=sequential")),
    Configuration("table", "table", ("augment=randaugment_torchvision", "num_workers=1", "batch_size=128")),
    Configuration("packed, 2 workers", "packed", ("augment=dino", "num_workers=2", "batch_size=64")),
    Configuration("large, dino", "large", ("augment=dino", "num_workers=1", "batch_size=8")),
    Configuration("mixup", "folder", ("augment=standard", "mix=mixup_cutmix", "num_workers=2")),
    Configuration("cutmix", "shards", ("augment=threeaugment", "mix=cutmix", "num_workers=1", "batch_size=96")),
]  # fmt: skip


def cli(*words: str) -> None:
    """Run a gpuaug command without its output."""
    subprocess.run(
        [sys.executable, "-m", "gpuaug.tools", *words], check=True, cwd=ROOT, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip


def source(folder: Path, data: str, *, count: int, large: int) -> list[str]:
    """Overrides that set the source. The data are made once per folder."""
    if data == "large":
        return [f"source.root={prepare(folder, 'large', large)}"]
    photos = prepare(folder, "photos", count)
    if data == "folder":
        return [f"source.root={photos}"]
    out = folder / f"{data}_{count}"
    if not (out / "done").exists():
        files = sorted(photos.rglob("*.jpg"))
        out.mkdir(exist_ok=True)
        if data == "shards":
            cli("pack", f"source.root={photos}", f"out={out}/packed", "samples=500")
        elif data == "packed":
            cli("pack", f"source.root={photos}", f"out={out}/packed", "format=uint8", "sizes=[256]")
        elif data == "augmented":
            cli("pack", f"source.root={photos}", f"out={out}/packed", "epochs=1", "augment=flip")
        elif data == "parquet":
            import pyarrow
            import pyarrow.parquet

            columns = {"image": [f.read_bytes() for f in files], "label": [len(f.parent.name) for f in files]}
            pyarrow.parquet.write_table(pyarrow.table(columns), out / "train.parquet", row_group_size=100)
        else:
            for f in files:  # a table reads nothing outside of its folder
                (out / f.parent.name).mkdir(exist_ok=True)
                os.link(f, out / f.parent.name / f.name)
            (out / "train.csv").write_text(
                "path,label\n" + "".join(f"{f.parent.name}/{f.name},{f.parent.name}\n" for f in files)
            )
        (out / "done").touch()
    if data == "shards":
        return ["source=shards", f"source.root={next(p.parent for p in (out / 'packed').rglob('*.tar'))}"]
    kind = {"augmented": "packed"}.get(data, data)
    place = {"parquet": out / "train.parquet", "table": out / "train.csv"}.get(data, out / "packed")
    return [f"source={kind}", f"source.root={place}"]


RUN = """
import dataclasses, json, sys
import gpuaug
from gpuaug.tools.plan.command import measure
with gpuaug.build(gpuaug.compose("train", sys.argv[2:])) as loader:
    peak = measure(loader, seconds=float(sys.argv[1]))
    print(json.dumps({**dataclasses.asdict(peak), "host": peak.most.host}))
"""


def measure(configuration: Configuration, where: Sequence[str], *, seconds: float) -> dict[str, Any]:
    """One row: planned and measured MiB, in sum and in parts."""
    words = [*where, *configuration.overrides, "device=cpu"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "plan.json")
        call = [sys.executable, "-m", "gpuaug.tools", "plan", *words, f"json={file}"]
        done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{configuration.name}: {done.stderr[-2000:]}")
        values = json.loads(file.read_text())
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(seconds), *words], cwd=ROOT, capture_output=True, text=True, check=True
    )
    peak = json.loads(done.stdout.splitlines()[-1])
    planned = dict.fromkeys(PARTS, 0)
    for each in values["stages"]:
        part = {"read: workers": "workers", "read: bytes": "encoded"}.get(each["stage"], "main")
        planned[part] += each["bytes"]
    return {
        "name": configuration.name,
        "overrides": " ".join(configuration.overrides),
        "rehearsed": values["rehearsal"],
        "batches": peak["batches"],
        "planned": values["host_memory"] / MIB,
        "measured": peak["host"] / MIB,
        "off": values["host_memory"] / peak["host"] - 1,
        "base": peak["base"]["main"] / MIB,
        "parts": {p: {"planned": planned[p] / MIB, "measured": peak["most"][p] / MIB} for p in PARTS},
    }


def table(found: dict[str, Any]) -> str:
    """The section of bench/README.md."""
    rows = [r for r in found["rows"] if r["batches"] > FILLED]
    left = [r["name"] for r in found["rows"] if r["batches"] <= FILLED]
    lines = [
        f"{found['machine']}, {found['date']}, load {found['load']:.1f}; MiB, planned / measured. "
        f"{sum(abs(r['off']) <= 0.10 for r in rows)} of {len(rows)} within 10 %."
        + (f" Too slow that day to fill up, and left out: {', '.join(left)}." if left else ""),
        "",
        "| configuration | host | off | main beyond its start | workers | encoded | batches |",
        "|---|---|---|---|---|---|---|",
    ]

    def pair(part: dict[str, float], less: float = 0.0) -> str:
        return f"{part['planned'] - less:,.0f} / {part['measured'] - less:,.0f}"

    for r in rows:
        p = r["parts"]
        lines.append(
            f"| {r['name']}: `{r['overrides']}` | {r['planned']:,.0f} / {r['measured']:,.0f} | {r['off']:+.0%} | "
            f"{pair(p['main'], r['base'])} | {pair(p['workers'])} | {pair(p['encoded'])} | "
            f"{r['rehearsed']} / {r['batches']} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, or print the table of an earlier run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="names of configurations")
    parser.add_argument("--count", type=int, default=1500, help="photographs (default: 1500)")
    parser.add_argument("--large", type=int, default=200, help="photographs of 2 to 12 megapixels (default: 200)")
    parser.add_argument("--seconds", type=float, default=40, help="of each run at most (default: 40)")
    parser.add_argument("--data", type=Path, help="folder that keeps the data (default: made and removed)")
    readme.add_arguments(parser, "; rows of the same name are replaced")
    args = parser.parse_args()
    if readme.show(args, "plan.py", table):
        return 0
    chosen = [c for c in CONFIGURATIONS if not args.only or c.name in args.only]
    from gpuaug import machine

    rows: dict[str, Any] = {}
    if args.json is not None and args.json.exists():
        rows = {r["name"]: r for r in json.loads(args.json.read_text())["rows"]}
    with tempfile.TemporaryDirectory() as made:
        folder = args.data or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        for c in chosen:
            row = measure(c, source(folder, c.data, count=args.count, large=args.large), seconds=args.seconds)
            rows[c.name] = row
            parts = "  ".join(f"{p} {row['parts'][p]['planned']:.0f}/{row['parts'][p]['measured']:.0f}" for p in PARTS)
            print(
                f"{c.name:24} {row['planned']:6.0f} / {row['measured']:6.0f} MiB  {row['off']:+5.0%}  "
                f"base {row['base']:.0f}  {parts}  {row['batches']} batches", flush=True,
            )  # fmt: skip
            if args.json is not None:
                order = [x.name for x in CONFIGURATIONS]
                args.json.write_text(json.dumps({
                    "machine": f"{machine.cpu_model()}, {machine.usable_cpus()} cores",
                    "date": datetime.date.today().isoformat(),
                    "load": os.getloadavg()[0],
                    "rows": sorted(rows.values(), key=lambda r: order.index(r["name"])),
                }, indent=1))  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
