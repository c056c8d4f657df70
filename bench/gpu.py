"""Everything that needs a GPU, in one go: `python bench/gpu.py OUT`. Each part is a process of its own, so that the
failure of one stops no other; what each printed, and a summary, are written to OUT.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

IMPORT = """
import torch, kornia, nvidia.dali, gpuaug
print(torch.__version__, kornia.__version__, nvidia.dali.__version__, torch.cuda.get_device_name())
"""

DECODE = """
import sys, glob, torch, gpuaug
for device in ("cpu", "cuda"):
    augment = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(224), backend="kornia")
    with gpuaug.Loader(gpuaug.FolderSource(sys.argv[1]), augment=augment, device=device, order="sequential") as loader:
        images = next(iter(loader)).images.cpu()
        print(device, tuple(images.shape), images.mean().item())
"""


def parts(photographs: Path, out: Path) -> list[tuple[str, list[str], int]]:
    """Name, command and limit in seconds of every part, the most important first."""
    python = sys.executable
    root = str(photographs / "train")
    return [
        ("photographs", [python, "bench/photographs.py", str(photographs)], 120),
        ("import", [python, "-c", IMPORT], 120),
        ("decode", [python, "-c", DECODE, root], 180),
        ("doctor", [python, "-m", "gpuaug.cli", "doctor", f"json={out / 'doctor.json'}"], 240),
        ("tests", [python, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"], 400),
        ("augment", [python, "bench/augment.py", "--device", "cuda", "--json", str(out / "augment.json")], 420),
        (
            "loader",
            [
                *(python, "bench/loader.py", "--device", "cuda", "--recipe", "standard", "flip", "--rounds", "3"),
                *("--count", "1000", "--large", "60", "--json", str(out / "loader.json")),
            ],
            560,
        ),
        (
            "profile",
            [
                *(python, "-m", "gpuaug.cli", "profile", f"source.root={root}", "device=cuda"),
                *("dtype=bfloat16", f"json={out / 'profile.json'}", f"trace={out / 'trace.json'}"),
            ],
            240,
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--photographs", type=Path, default=Path("/tmp/gpuaug-photographs"))
    parser.add_argument("--only", nargs="*", help="names of parts")
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    summary = {}
    for name, command, limit in parts(args.photographs, out):
        if args.only and name not in args.only:
            continue
        begin = time.perf_counter()
        with open(out / f"{name}.log", "w") as log:
            try:
                done = subprocess.run(
                    command, stdout=log, stderr=subprocess.STDOUT, timeout=limit, cwd=ROOT, check=False
                )
                code: int | str = done.returncode
            except subprocess.TimeoutExpired:
                code = "out of time"
        summary[name] = {"exit": code, "seconds": round(time.perf_counter() - begin, 1)}
        last = (out / f"{name}.log").read_text(errors="replace").strip().splitlines()[-1:]
        print(f"{name:12} exit {code}  {summary[name]['seconds']:6.1f} s  {' '.join(last)[:120]}", flush=True)
        (out / "summary.json").write_text(json.dumps(summary, indent=1))
    return int(any(part["exit"] != 0 for part in summary.values()))


if __name__ == "__main__":
    sys.exit(main())
