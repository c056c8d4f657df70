"""Compares loaders end to end: from files of photographs to consumed batches, each contestant in its own process.

    python bench/loader.py --json loader.json                       # everything that runs here
    python bench/loader.py --recipe standard --who ours torchvision --peer-python ~/other/bin/python
    python bench/loader.py --table loader.json                      # the section of bench/README.md
    python bench/loader.py --quick --json loader.json               # a minute: shows that it runs, measures nothing

All contestants start first and run one epoch as a warm-up (compilation, page cache). Then each runs one epoch per round
while the others sleep (A B C A B C ...). The figures are medians of the rounds. One more epoch, without measuring time,
gives the highest sum of PSS over all processes of a contestant. To consume a batch is to wait until it is ready.

Who is who:
    ours            files -> gpuaug.Loader -> batches; ours_packed, ours_s3: the same from another place
    ours_reduced    the same with Pillow and decode.reduced=true: large JPEGs are decoded at a fraction of their size
    read, decode, augment   one of our stages alone, on the same cores; `ceiling` is the speed that they allow together
    checks          only reading and checking the headers, and the policy for faults
    shapes          only reading height and width, which random crops need, with nvImageCodec and without checks
    torchvision, torchvision_v2     DataLoader over PIL files, transforms v1 on PIL images, v2 on tensors
    kornia_eager    DataLoader of bytes, DALI decodes, crops and resizes in the main process, Kornia eager on the batch
    dali_reader     DALI alone: its file reader, decoder and operators
    dali_proxy      DataLoader of bytes with DALI's PyTorch proxy
    ours_engine, dali_reader_engine, dali_proxy_engine      the same with 65 % of the JPEGs on the GPU's JPEG engine,
                    DALI's default; all others decode without it. Compare rows of one kind, with the same --threads
    ffcv, ffcv_raw  FFCV from its own file of JPEGs, of raw pixels
    spdl            SPDL: threads that decode, crop and resize with ffmpeg
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import random
import select
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import s3
from contestants import Spec
from readme import processor

RECIPES = ("standard", "flip", "simclr")
SETS = ("photos", "large")
OURS = (
    "ours", "ours_reduced", "ours_engine", "ours_packed", "ours_s3",
    "read", "decode", "augment", "checks", "shapes",
)  # fmt: skip
PEERS = ("torchvision", "torchvision_v2", "kornia_eager", "dali_reader", "dali_proxy", "ffcv", "ffcv_raw", "spdl")
ENGINE = ("dali_reader_engine", "dali_proxy_engine")  # beside `ours_engine`
ELSEWHERE = ("torchvision", "torchvision_v2", "ffcv", "ffcv_raw", "spdl")  # may live in another environment
PATIENCE = 600  # seconds that a contestant may take for an epoch
LATENCY = 0.05  # seconds to the first byte of the S3 server
PROSE = """From files to consumed batches; every contestant is a process of its own, and they run in turns.
`ceiling` is what `read`, `decode` and `augment` allow together, each measured alone on the same cores (one after the
other on a CPU; on a GPU reading runs beside the rest). Memory is the highest sum of PSS over a contestant's processes.
Peers draw for themselves, so their pixels are of the same kind but not the same. `fault_machinery` is the time of
`checks`, on one thread, as a share of the processor time of `ours`. `ours_s3` reads the same folder out of a bucket,
one request per image, 50 ms to the first byte, which every epoch waits for once; `s3.py` is its server, on the same
cores, so a second figure takes the server's processor time out.

Make it again: `python bench/loader.py --json loader.json --peer-python PYTHON`, then with `--table loader.json --readme
bench/README.md`.
"""
BEGIN, END = "<!-- loader.py -->", "<!-- end of loader.py -->"


class Contestant:
    """A process that runs an epoch on request."""

    def __init__(
        self, spec: Spec, python: str, *, preload: str | None = None, data: str = "", delay: float = 0.0,
        script: str = "contestants.py",
    ) -> None:  # fmt: skip
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        if preload:
            environment |= {"LD_PRELOAD": preload, "SLOW_OPEN": data, "SLOW_OPEN_US": str(int(delay * 1e6))}
        self.spec, self.rates = spec, list[float]()
        self.processor = self.server = 0.0  # seconds that the rounds took of the cores, here and in the S3 server
        self.images = 0
        self.process = subprocess.Popen(
            [python, str(Path(__file__).with_name(script)), json.dumps(asdict(spec))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=None if os.environ.get("BENCH_STDERR") else subprocess.DEVNULL,
            text=True, env=environment, start_new_session=True,
        )  # fmt: skip
        answer = self._answer()
        self.reason = None if answer.get("ok") else answer["reason"]
        self.first, self.facts = answer.get("seconds"), answer.get("facts", {})
        self.peak = 0

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], PATIENCE)[0]:
            return {"reason": f"nothing came in {PATIENCE} s"}
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            return {"reason": f"its process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"}
        return json.loads(line)

    def _ask(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("run\n")
            self.process.stdin.flush()

    def round(self) -> None:
        before = s3.seconds(self.process.pid)
        self._ask()
        answer = self._answer()
        if "images" in answer:
            self.rates.append(answer["images"] / answer["seconds"])
            self.processor += s3.seconds(self.process.pid) - before
            self.images += answer["images"]
        else:
            self.reason = answer["reason"]

    def weigh(self) -> None:
        """The highest memory in one epoch. Its time does not count, because measuring memory slows it."""
        self._ask()
        assert self.process.stdout is not None
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            self.peak = max(self.peak, memory_of(self.process.pid))
            if select.select([self.process.stdout], [], [], 0.1)[0]:
                self._answer()
                return

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()


def memory_of(pid: int) -> int:
    """Bytes of a process and its descendants, shared pages counted once: the sum of their PSS."""
    total = 0
    with contextlib.suppress(OSError):
        sizes = dict(line.split(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
        total = int(sizes["Pss"].split()[0]) * 1024
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(memory_of(int(child)) for child in (task / "children").read_text().split())
    return total


# --- data


def prepare(folder: Path, kind: str, count: int) -> Path:
    """An ImageFolder of at least ``count`` photographs, made once per folder."""
    from photographs import PHOTOGRAPHS, cut, photograph

    out = folder / f"{kind}_{count}"
    if (out / "done").exists():
        return out / "train"
    if kind == "photos":
        cut(out, count=math.ceil(max(count, 16) / 0.8) + len(PHOTOGRAPHS), progress=True)
    else:  # 2 to 12 megapixels: tiles of the photographs, so that the detail of a pixel stays a photograph's
        from PIL import Image
        from tqdm import tqdm

        photos = {name: photograph(name) for name in sorted(PHOTOGRAPHS)}
        for number in tqdm(range(count), desc="large photographs", unit="image"):
            draw = random.Random(f"large/{number}")
            pixels, ratio = draw.uniform(2e6, 12e6), draw.choice((4 / 3, 3 / 2, 3 / 4))
            width, height = int(math.sqrt(pixels * ratio)), int(math.sqrt(pixels / ratio))
            name = sorted(photos)[number % len(photos)]
            image = Image.new("RGB", (width, height))
            for x in range(0, width, 640):
                for y in range(0, height, 480):
                    photo = photos[draw.choice(sorted(photos))]
                    w, h = min(640, photo.width), min(480, photo.height)
                    left, top = draw.randint(0, photo.width - w), draw.randint(0, photo.height - h)
                    image.paste(photo.resize((640, 480), box=(left, top, left + w, top + h)), (x, y))
            (out / "train" / name).mkdir(parents=True, exist_ok=True)
            image.save(out / "train" / name / f"{number:04d}.jpg", quality=draw.randint(80, 92))
    (out / "done").touch()
    return out / "train"


def pack(root: Path, out: Path) -> str:
    """The same photographs, packed as pixels at full size."""
    if not (out / "manifest.json").exists():
        subprocess.run(
            [sys.executable, "-m", "gpuaug.tools", "pack", f"source.root={root}", f"out={out}", "format=uint8"],
            cwd=Path(__file__).parent.parent, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    return str(out)  # where it failed, the contestant says so


def write_ffcv(root: str, out: str, mode: str) -> None:
    """Write FFCV's file. Runs in the Python that has FFCV."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter
    from PIL import Image

    class Labelled:
        files = sorted(str(p) for p in Path(root).rglob("*.jpg"))

        def __len__(self) -> int:
            return len(self.files)

        def __getitem__(self, index: int) -> Any:
            return Image.open(self.files[index]).convert("RGB"), 0

    fields = {"image": RGBImageField(write_mode=mode, jpeg_quality=90), "label": IntField()}
    DatasetWriter(out, fields, num_workers=2).from_indexed_dataset(Labelled())


def places(root: Path, who: list[str], python: str) -> dict[str, str]:
    """Paths of the data of contestants that do not read the photographs' files."""
    found = {}
    if "ours_packed" in who:
        found["packed"] = pack(root, root.parent / "packed")
    for name, mode in (("ffcv", "jpg"), ("ffcv_raw", "raw")):
        file = root.parent / f"{mode}.beton"
        if name in who and not file.exists():
            code = subprocess.run(
                [python, __file__, "--write-ffcv", str(root), str(file.with_suffix(".part")), mode],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            ).returncode  # fmt: skip
            if code == 0:
                file.with_suffix(".part").rename(file)
        if file.exists():
            found[name] = str(file)
    return found


SLOW_OPEN = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static void wait_for(const char *path) {
  const char *below = getenv("SLOW_OPEN"), *us = getenv("SLOW_OPEN_US");
  if (path && below && us && !strncmp(path, below, strlen(below))) usleep(atoi(us));
}
#define OPEN(name) int name(const char *path, int flags, ...) { \
  va_list args; va_start(args, flags); mode_t mode = va_arg(args, mode_t); va_end(args); \
  wait_for(path); return ((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name))(path, flags, mode); }
OPEN(open) OPEN(open64)
#define FOPEN(name) FILE *name(const char *path, const char *mode) { \
  wait_for(path); return ((FILE *(*)(const char *, const char *))dlsym(RTLD_NEXT, #name))(path, mode); }
FOPEN(fopen) FOPEN(fopen64)
int openat(int dir, const char *path, int flags, ...) {
  va_list args; va_start(args, flags); mode_t mode = va_arg(args, mode_t); va_end(args);
  wait_for(path);
  return ((int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, "openat"))(dir, path, flags, mode);
}
"""


def slow_open(folder: Path) -> str:
    """Build a preloaded library that delays every opening of a file, for all contestants alike."""
    source, library = folder / "slow_open.c", folder / "slow_open.so"
    source.write_text(SLOW_OPEN)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return str(library)


# --- measuring


def takes_part(who: str, recipe: str, kind: str, device: str) -> bool:
    """Whether a contestant runs. Rows that would repeat others are left out."""
    if who.endswith("_engine") and device == "cpu":
        return False
    if who in ("ours_packed", "ffcv", "ffcv_raw", "spdl"):
        return recipe == "flip" and kind == "photos"
    if who in ("ours_s3", "checks", "shapes"):
        return recipe == "standard" and kind == "photos"
    if who == "ours_reduced" and kind == "photos":  # they are too small: nothing is reduced
        return False
    return kind == "photos" or recipe == "standard"


def measure(args: argparse.Namespace, recipe: str, kind: str, root: Path, preload: str | None) -> list[dict[str, Any]]:
    who = [w for w in args.who if takes_part(w, recipe, kind, args.device)]
    python = args.peer_python or sys.executable
    batch = args.batch if kind == "photos" else max(1, args.batch // 4)  # else an epoch is over when it has begun
    rows, running = [], list[Contestant]()
    with contextlib.ExitStack() as stack:
        found = places(root, who, python)
        server = None
        if "ours_s3" in who:
            try:
                server = stack.enter_context(s3.serve(root, LATENCY))
                found["s3"] = f"{server.endpoint} {server.url}"
            except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
                who.remove("ours_s3")
                rows.append({"set": kind, "recipe": recipe, "who": "ours_s3", "reason": f"no S3 server: {error}"})
        for name in who:
            spec = Spec(name, recipe, str(root), batch, args.workers, args.threads, args.device, args.dtype, found)
            contestant = Contestant(
                spec, python if name in ELSEWHERE else sys.executable, preload=preload, data=str(root.parent.parent),
                delay=args.open_delay,
            )  # fmt: skip
            stack.callback(contestant.close)
            if contestant.reason is None:
                running.append(contestant)
                print(f"{kind} {recipe} {name}: ready after {contestant.first:.1f} s", flush=True)
            else:
                rows.append({"set": kind, "recipe": recipe, "who": name, "reason": contestant.reason})
                print(f"{kind} {recipe} {name}: not run: {contestant.reason}", flush=True)
        for _ in range(args.rounds):
            for contestant in running:
                if contestant.reason is None:
                    before = 0.0 if server is None else server.seconds()
                    contestant.round()
                    contestant.server += 0.0 if server is None else server.seconds() - before
        for contestant in running:
            if contestant.reason is None:
                contestant.weigh()
            row: dict[str, Any] = {"set": kind, "recipe": recipe, "who": contestant.spec.who}
            if contestant.rates:
                rates = sorted(contestant.rates)
                row |= {
                    "images_per_second": _median(rates), "lowest": rates[0], "highest": rates[-1],
                    "rounds": len(rates), "peak_pss": contestant.peak, "start_up_seconds": contestant.first,
                    "processor_us": 1e6 * contestant.processor / contestant.images,
                }  # fmt: skip
                if contestant.spec.who == "ours_s3" and server is not None:
                    row |= {"server": server.how, "server_us": 1e6 * contestant.server / contestant.images}
            else:
                row["reason"] = contestant.reason
            rows.append(row)
            print(_line(row), flush=True)
    rows += _derived(rows, kind, recipe, on_gpu=args.device != "cpu")
    return rows


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _derived(rows: list[dict[str, Any]], kind: str, recipe: str, *, on_gpu: bool) -> list[dict[str, Any]]:
    """The ceiling, and the share of the CPU time that checks for faults take if there are none."""
    rate = {r["who"]: r["images_per_second"] for r in rows if "images_per_second" in r}
    out = []
    if {"read", "decode", "augment"} <= set(rate):
        device = 1 / (1 / rate["decode"] + 1 / rate["augment"])
        # on a CPU all stages share the cores; on a GPU only reading uses them
        ceiling = min(rate["read"], device) if on_gpu else 1 / (1 / device + 1 / rate["read"])
        out.append({"set": kind, "recipe": recipe, "who": "ceiling", "images_per_second": ceiling})
    if {"checks", "ours"} <= set(rate):
        row = {"set": kind, "recipe": recipe, "who": "fault_machinery"}
        spent = {who: 1e6 / rate[who] for who in ("checks", "shapes", "ours") if who in rate}
        # checks and shapes use one thread, and ours uses all cores, so their CPU times are compared
        spent["ours"] = next(r for r in rows if r["who"] == "ours").get("processor_us") or spent["ours"]
        row["share_of_time_at_most"] = spent["checks"] / spent["ours"]
        if "shapes" in spent:
            row["beyond_the_shapes"] = (spent["checks"] - spent["shapes"]) / spent["ours"]
        out.append(row)
    return out


def ratios(rows: list[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """ours/peer per recipe; null if the peer did not run."""
    rate = {(r["set"], r["recipe"], r["who"]): r["images_per_second"] for r in rows if "images_per_second" in r}

    def ratio(a: tuple[str, str, str], b: tuple[str, str, str]) -> float | None:
        return rate[a] / rate[b] if a in rate and b in rate else None

    out: dict[str, dict[str, float | None]] = {}
    for kind in SETS:
        for recipe in RECIPES:
            mine = (kind, recipe, "ours")
            if mine not in rate:
                continue
            found = {p: ratio(mine, (kind, recipe, p)) for p in (*PEERS, "ceiling", "decode") if p != "ffcv_raw"}
            v2 = found.pop("torchvision_v2")
            both = [x for x in (found["torchvision"], v2) if x is not None]
            found["torchvision"] = min(both) if both else None  # the faster of the two
            name = recipe if kind == "photos" else f"{recipe}_{kind}"
            out[name] = found
            reduced = (kind, recipe, "ours_reduced")
            if reduced in rate:
                out[f"{name}_reduced"] = {p: ratio(reduced, (kind, recipe, p)) for p in ("ours", "torchvision")}
            if (kind, recipe, "ours_engine") in rate:
                with_it = {p: ratio((kind, recipe, "ours_engine"), (kind, recipe, p)) for p in ENGINE}
                out[f"{name}_engine"] = {"ours": ratio((kind, recipe, "ours_engine"), mine), **with_it}
    out["flip_packed"] = {"ffcv_raw": ratio(("photos", "flip", "ours_packed"), ("photos", "flip", "ffcv_raw"))}
    out["standard_s3"] = {"local": ratio(("photos", "standard", "ours_s3"), ("photos", "standard", "ours"))}
    return out


def machine(args: argparse.Namespace) -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    import torch

    versions = {}
    for package in ("torch", "kornia", "nvidia-dali-cuda120", "nvidia-dali-cuda130"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    if args.peer_python:
        code = (
            "import importlib.metadata as m, json, contextlib\nout = {}\n"
            "for p in ('torch', 'torchvision', 'albumentations', 'ffcv', 'spdl', 'pillow'):\n"
            "    with contextlib.suppress(m.PackageNotFoundError): out[p] = m.version(p)\nprint(json.dumps(out))"
        )
        found = subprocess.run([args.peer_python, "-c", code], capture_output=True, text=True).stdout
        versions |= {f"{k} (peers)" if k == "torch" else k: v for k, v in json.loads(found or "{}").items()}
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "device": torch.cuda.get_device_name() if args.device != "cpu" else "cpu",
        "load_before": os.getloadavg()[0],
        "date": datetime.date.today().isoformat(),
        "versions": versions,
    }


# --- the table


def _line(r: dict[str, Any]) -> str:
    start = f"| {r['set']} | {r['recipe']} | {r['who']} |"
    if "reason" in r:
        return f"{start} not run: {r['reason']} | | | |"
    if "share_of_time_at_most" in r:
        beyond = f", {r['beyond_the_shapes']:.2%} beyond reading shapes" if "beyond_the_shapes" in r else ""
        return f"{start} {r['share_of_time_at_most']:.2%} of the processor time{beyond} | | | |"
    ratio = f"{r['ours']:.2f}×" if r.get("ours") else ""
    spread = f"{r['lowest']:,.0f} to {r['highest']:,.0f}" if "lowest" in r else ""
    memory = f"{r['peak_pss'] / 2**20:,.0f}" if "peak_pss" in r else ""
    return f"{start} {r['images_per_second']:,.0f} | {spread} | {ratio} | {memory} |"


def table(report: dict[str, Any]) -> str:
    m, s = report["machine"], report["settings"]
    mine = {(r["set"], r["recipe"]): r.get("images_per_second") for r in report["results"] if r["who"] == "ours"}
    lines = [
        f"{m['processor']}, {m['cores']} cores, device {m['device']}, {m['date']}, load {m['load_before']:.1f}; "
        f"batches of {s['batch']} (large: a quarter), {s['workers']} workers, {s['threads']} threads, median of "
        f"{s['rounds']} rounds; " + ", ".join(f"{k} {v}" for k, v in m["versions"].items()),
        "",
        "| photographs | recipe | who | images/s | lowest to highest | ours is faster by | memory, MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in report["results"]:
        own = mine.get((r["set"], r["recipe"]))
        lines.append(_line({**r, "ours": own / r["images_per_second"] if own and r.get("images_per_second") else None}))
    for r in report["results"]:
        local = mine.get((r["set"], r["recipe"]))
        if "server" in r and local:
            # without the CPU time of the server
            alone = 1 / (1 / r["images_per_second"] - r["server_us"] / 1e6 / m["cores"])
            ours = next(x for x in report["results"] if (x["set"], x["who"]) == (r["set"], "ours"))
            lines += ["", (
                f"`ours_s3`: {r['server']}, on the same cores. CPU time per image: "
                f"local {ours['processor_us']:.0f} us, from S3 {r['processor_us']:.0f} us and the server "
                f"{r['server_us']:.0f} us. From S3 it is {r['images_per_second'] / local:.2f} of the local speed; "
                f"{alone / local:.2f} without the server's CPU time."
            )]  # fmt: skip
    return "\n".join(lines)


def insert(text: str, section: str) -> str:
    """The README with this section between its marks. Missing marks are added at the end."""
    if BEGIN not in text:
        return f"{text.rstrip()}\n\n## loader.py: end to end\n\n{PROSE}\n{BEGIN}\n{section}\n{END}\n"
    before, rest = text.split(BEGIN, 1)
    return f"{before}{BEGIN}\n{section}\n{END}{rest.split(END, 1)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--who", nargs="+", default=[*OURS, *PEERS, *ENGINE], choices=[*OURS, *PEERS, *ENGINE])
    parser.add_argument("--set", nargs="+", default=list(SETS), choices=SETS, dest="sets")
    parser.add_argument("--count", type=int, default=1000, help="photographs of about 500 x 375 (default: 1000)")
    parser.add_argument("--large", type=int, default=100, help="photographs of 2 to 12 megapixels (default: 100)")
    parser.add_argument("--rounds", type=int, default=5, help="epochs of each; the median counts (default: 5)")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=None, help="processes of everybody's loader (default: cores)")
    parser.add_argument("--threads", type=int, default=None, help="threads of DALI, FFCV, SPDL, torch (default: cores)")
    parser.add_argument("--device", default=None, help="cuda where there is one")
    parser.add_argument("--dtype", default=None, help="float32 on the cpu, bfloat16 on cuda, unless given")
    parser.add_argument("--open-delay", type=float, default=0.0, help="seconds that opening a file takes longer")
    parser.add_argument("--data", type=Path, help="folder that keeps the photographs; default: one that is removed")
    parser.add_argument("--peer-python", help="a Python in whose environment torchvision, FFCV, SPDL are")
    parser.add_argument("--quick", action="store_true", help="few photographs, one round")
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--table", type=Path, help="print the table of a report and stop")
    parser.add_argument("--readme", type=Path, help="with --table: put it between the marks of this file")
    parser.add_argument("--write-ffcv", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write_ffcv:
        write_ffcv(*args.write_ffcv)
        return
    if args.table:
        text = table(json.loads(args.table.read_text()))
        if args.readme:
            args.readme.write_text(insert(args.readme.read_text(), text))
        else:
            print(text)
        return
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    args.workers = cores if args.workers is None else args.workers
    args.threads = cores if args.threads is None else args.threads
    if args.quick:
        args.count, args.large, args.rounds, args.batch = 48, 12, 1, 8
    settings = ("batch", "workers", "threads", "rounds", "count", "large", "device", "dtype", "open_delay")
    report: dict[str, Any] = {
        "machine": machine(args),
        "settings": {name: getattr(args, name) for name in settings},
        "results": [],
        "ratios": {},
    }
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        data = (args.data or Path(stack.enter_context(tempfile.TemporaryDirectory()))).resolve()
        data.mkdir(parents=True, exist_ok=True)
        preload = slow_open(data) if args.open_delay else None
        for kind in args.sets:
            root = prepare(data, kind, args.count if kind == "photos" else args.large)
            for recipe in args.recipe:
                if any(takes_part(w, recipe, kind, args.device) for w in args.who):
                    print(f"{kind} {recipe}: begins after {time.monotonic() - began:.0f} s", flush=True)
                    report["results"] += measure(args, recipe, kind, root, preload)
                    report["seconds"] = time.monotonic() - began
                    report["ratios"] = ratios(report["results"])
                    if args.json:  # as far as it is: who has little time may stop it
                        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["ratios"], indent=1))


if __name__ == "__main__":
    main()
