"""Time and memory of the index of a dataset in COCO's format, as large as COCO's training images.

    python bench/coco_index.py                                    # 118,000 images, 860,000 objects, a few minutes
    python bench/coco_index.py --images 6000 --objects 43000      # a twentieth of it

The file of annotations is synthetic, with an outline of 23 points for each object. Only the images that are read exist,
and nothing decodes them. Each row is measured in a process of its own. ``peak`` is the memory that building the index
adds to the process. ``worker`` is the private memory that a forked worker adds while it reads 5,000 evenly spread
samples.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROWS = {
    "boxes": {},
    "boxes + keypoints": {"annotations": "person_keypoints"},
    "boxes + instance masks": {"masks": "instances"},
}
CLASSES, POINTS, OUTLINE = 80, 17, 23
READ = 5000  # samples that the worker reads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=118_000)
    parser.add_argument("--objects", type=int, default=860_000)
    parser.add_argument("--folder", type=Path, help="keep the files here (default: a temporary folder)")
    parser.add_argument("--only", nargs="*", choices=ROWS, default=list(ROWS))
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row is not None:
        print(json.dumps(measure(args.folder, **ROWS[args.row])))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        if not (folder / "annotations").exists():
            write(folder, args.images, args.objects)
        for path in sorted((folder / "annotations").iterdir()):
            print(f"{path.name}: {path.stat().st_size / 1e6:.0f} MB")
        heads = ["", "seconds", "index MB", "bytes/image", "peak MB", "worker MB", "worker %"]
        print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
        for name in args.only:
            command = [sys.executable, __file__, "--row", name, "--folder", str(folder)]
            row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            cells = [f"{row['seconds']:.1f}", f"{row['bytes'] / 1e6:.1f}", f"{row['bytes'] / row['images']:.0f}",
                     f"{row['peak'] / 1e6:.0f}", f"{row['worker'] / 1e6:.2f}",
                     f"{100 * row['worker'] / row['bytes']:.1f}"]  # fmt: skip
            print("| " + " | ".join([name, *cells]) + " |", flush=True)


def measure(folder: Path, **settings: Any) -> dict[str, float]:
    """Build the index, then read samples in a forked worker."""
    import gpuaug
    from gpuaug.source import coco_json, segmentations  # noqa: F401

    segmentations.import_pycocotools()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    source = gpuaug.CocoSource(folder, split="train2017", **settings)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    out, inside = os.pipe()
    child = os.fork()
    if not child:
        numbers = spread(len(source), READ)
        for i in numbers[:100]:  # a process that has read is what the growth is counted from
            source[i]
        start = private_bytes()
        for i in numbers:
            source[i]
        os.write(inside, str(private_bytes() - start).encode())
        os._exit(0)
    os.waitpid(child, 0)
    worker = int(os.read(out, 100))
    return {
        "seconds": seconds, "bytes": index_bytes(source), "images": len(source), "peak": 1024 * peak, "worker": worker,
    }  # fmt: skip


def index_bytes(source: Any) -> int:
    """Bytes of a source's tensors, which all processes of a machine share."""
    tensors, waiting = dict[int, int](), [source]
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, torch.Tensor):
            tensors[thing.data_ptr()] = thing.nbytes
        elif isinstance(thing, dict) or hasattr(thing, "__dict__"):
            waiting += (thing if isinstance(thing, dict) else vars(thing)).values()
    return sum(tensors.values())


def private_bytes() -> int:
    """Memory that only this process uses."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


def spread(total: int, count: int) -> list[int]:
    """Sample numbers over the whole dataset."""
    return np.unique(np.linspace(0, total - 1, min(count, total)).astype(np.int64)).tolist()


def write(folder: Path, images: int, objects: int) -> None:
    """Write the annotation files, and the images that are read."""
    (folder / "annotations").mkdir(parents=True)
    (folder / "train2017").mkdir()
    for i in spread(images, READ):
        (folder / "train2017" / f"{i:012d}.jpg").write_bytes(b"\xff\xd8\xff" + bytes(1000))
    rng = np.random.default_rng(0)
    owners = rng.integers(0, images, objects).tolist()
    turns = np.linspace(0, 2 * np.pi, OUTLINE, endpoint=False)
    circle = np.stack([np.cos(turns), np.sin(turns)], axis=1)
    outlines = []
    for _ in range(1000):
        points = rng.uniform(100, 380, 2) + rng.uniform(5, 100) * circle
        low, high = points.min(0), points.max(0)
        box = json.dumps([*low.round(2), *(high - low).round(2)])
        ring = json.dumps(points.round(2).ravel().tolist())
        area = f"{np.prod(high - low):.4f}"
        outlines.append(f'"segmentation": [{ring}], "area": {area}, "bbox": {box}')
    dots = rng.uniform(100, 380, (1000, POINTS, 3)).round()
    dots[..., 2] = rng.integers(0, 3, (1000, POINTS))
    points = [f'"num_keypoints": {POINTS}, "keypoints": {json.dumps(x.astype(int).ravel().tolist())}' for x in dots]
    names = [f"{side}_{k}" for k in range(POINTS // 2) for side in ("left", "right")] + ["nose"]
    persons = [{"id": 1, "name": "person", "keypoints": names}]
    kinds = [{"id": k + 1 + k // 8, "name": f"class {k}"} for k in range(CLASSES)]
    for kind, categories in (("instances", kinds), ("person_keypoints", persons)):
        shown = rng.integers(0, len(categories), objects).tolist()
        chosen = rng.integers(0, 1000, objects).tolist()
        with open(folder / "annotations" / f"{kind}_train2017.json", "w", encoding="utf-8") as file:
            file.write('{"info": {"year": 2017}, "images": [')
            for i in range(images):
                file.write(
                    f'{", " if i else ""}{{"license": 3, "file_name": "{i:012d}.jpg", "coco_url": '
                    f'"http://images.cocodataset.org/train2017/{i:012d}.jpg", "height": 480, "width": 640, '
                    f'"date_captured": "2013-11-14 11:18:45", "id": {i}}}'
                )
            file.write(f'], "categories": {json.dumps(categories)}, "annotations": [')
            keep = range(objects) if kind == "instances" else range(0, objects, 3)
            for i in keep:
                extra = f"{points[chosen[i]]}, " if kind != "instances" else ""
                file.write(
                    f'{", " if i else ""}{{{extra}{outlines[chosen[i]]}, "iscrowd": {int(i % 86 == 1)}, "image_id": '
                    f'{owners[i]}, "category_id": {categories[shown[i]]["id"]}, "id": {i + 1}}}'
                )
            file.write("]}")


if __name__ == "__main__":
    main()
