"""Makes photographs with people drawn on them, whose keypoints are known exactly.

    python bench/people.py FOLDER [--count 100] [--size 192 256] [--people 2] [--seed 0]
    python bench/people.py FOLDER --orders --count 400 --size 480 640 --people 3   # then compares orders, on one core

The people have COCO's 17 keypoints, random poses, sizes and colours. They are seen from the front, with the left hand
on the right of the image, or from behind; then nose and eyes have no label. FOLDER gets:

    images/000.jpg ...          photographs
    person_keypoints.json       COCO: boxes, areas and keypoints
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from photographs import photograph
from PIL import Image, ImageDraw

PARTS = ["eye", "ear", "shoulder", "elbow", "wrist", "hip", "knee", "ankle"]
POINTS = ["nose", *(f"{side}_{part}" for part in PARTS for side in ("left", "right"))]
FINER = 3  # people are drawn in an image that is larger by this factor, and then reduced


def pose(rng: np.random.Generator, front: bool) -> Any:
    """The 17 points [17, 2] of a person of height 1, from the middle of the hips; y points down."""
    out = np.array([[1.0, 1.0], [-1.0, 1.0]]) * (1 if front else -1, 1)  # outwards, of the left and the right side

    def moved(start: Any, length: float, degrees: Any) -> Any:
        """The other end of a part of a limb; 0 points down, 90 outwards."""
        angles = np.deg2rad(degrees)
        return start + length * out * np.stack([np.sin(angles), np.cos(angles)], axis=1)

    look = rng.uniform(-0.015, 0.015, 2)
    eyes, ears = out * (0.03, -0.46) + look, out * (0.075, -0.445)
    shoulders, hips = out * (0.12, -0.31), out * (0.075, 0.0)
    arms, legs = rng.uniform(-15, 130, 2), rng.uniform(-5, 50, 2)
    elbows, knees = moved(shoulders, 0.17, arms), moved(hips, 0.23, legs)
    wrists = moved(elbows, 0.16, arms + rng.uniform(-30, 100, 2))
    ankles = moved(knees, 0.22, legs - rng.uniform(0, 60, 2))
    points = np.concatenate([[look + np.array([0, -0.42])], eyes, ears, shoulders, elbows, wrists, hips, knees, ankles])
    lean = np.deg2rad(rng.normal(0, 10))
    return points @ np.array([[np.cos(lean), np.sin(lean)], [-np.sin(lean), np.cos(lean)]])


def draw(image: Image.Image, points: Any, unit: float, front: bool, colors: dict[str, Any]) -> None:
    """Draw a person of the height ``unit``. ``points`` are pixel edges."""
    pen, xy = ImageDraw.Draw(image), {name: tuple(point) for name, point in zip(POINTS, points.tolist(), strict=True)}

    def disc(center: Any, radius: float, color: Any) -> None:
        (x, y), r = center, radius * unit
        pen.ellipse([x - r, y - r, x + r, y + r], fill=color)

    def limb(side: str, parts: list[str], radius: float, color: Any) -> None:
        joints = [xy[f"{side}_{part}"] for part in parts]
        pen.line(joints, fill=color, width=round(2 * radius * unit))
        for joint in joints:
            disc(joint, radius, color)

    for side in ("left", "right"):
        limb(side, ["hip", "knee", "ankle"], 0.035, colors["trousers"])
    corners = [xy[f"{side}_{part}"] for side, part in (("left", "hip"), ("left", "shoulder"), ("right", "shoulder"))]
    pen.polygon([*corners, xy["right_hip"]], fill=colors["shirt"])
    for side in ("left", "right"):
        limb(side, ["hip", "shoulder"], 0.035, colors["shirt"])
        limb(side, ["shoulder", "elbow", "wrist"], 0.028, colors["sleeves"])
        disc(xy[f"{side}_wrist"], 0.03, colors["skin"])
        disc(xy[f"{side}_ear"], 0.02, colors["skin"])
    head, neck = points[3:5].mean(0), points[5:7].mean(0)
    pen.line([*head, *neck], fill=colors["skin"], width=round(0.06 * unit))
    disc(head, 0.075, colors["skin"] if front else colors["hair"])
    for name in ("left_eye", "right_eye", "nose") if front else ():
        disc(xy[name], 0.014, colors["nose" if name == "nose" else "hair"])


def write(folder: Path, *, count: int, size: tuple[int, int] = (192, 256), people: int = 2, seed: int = 0) -> Path:
    """Write ``count`` images of (H, W) = ``size``, and their annotations."""
    rng = np.random.default_rng(seed)
    sources = [photograph(name) for name in ("astronaut", "cat", "coffee", "flower", "motorcycle", "rocket", "temple")]
    (folder / "images").mkdir(parents=True, exist_ok=True)
    coco: dict[str, Any] = {"images": [], "annotations": []}
    coco["categories"] = [{"id": 1, "name": "person", "keypoints": POINTS}]
    height, width = size
    for number in range(1, count + 1):
        source = sources[int(rng.integers(len(sources)))]
        w = min(source.width, source.height * width / height) * rng.uniform(0.5, 1.0)  # of the part that is shown
        h = w * height / width
        x, y = rng.uniform(0, source.width - w), rng.uniform(0, source.height - h)
        image = source.resize((width * FINER, height * FINER), Image.Resampling.BICUBIC, box=(x, y, x + w, y + h))
        for place in range(people):
            front, unit = bool(rng.random() < 0.6), rng.uniform(0.45, 0.85) * height * FINER
            colors = {name: tuple(rng.integers(60, 256, 3).tolist()) for name in ("shirt", "sleeves", "trousers")}
            colors["skin"] = tuple(int(v) for v in rng.uniform(0.6, 1.0) * np.array([250, 205, 175]))
            colors["nose"] = (200, 90, 80)
            colors["hair"] = tuple(rng.integers(0, 80, 3).tolist())
            points = pose(rng, front) * unit
            points += [(place + rng.uniform(0.3, 0.7)) / people * width * FINER, 0.52 * height * FINER]
            edge, limit = 0.09 * unit, np.array([width, height]) * FINER  # move the person into the image
            points += np.maximum(edge - points.min(0), 0) + np.minimum(limit - edge - points.max(0), 0)
            draw(image, points, unit, front, colors)
            draw(mask := Image.new("L", image.size), points, unit, front, dict.fromkeys(colors, 255))
            left, top, right, bottom = (v / FINER for v in mask.getbbox() or (0, 0, 0, 0))
            labelled = np.where(np.arange(17)[:, None] < 3, 2 * front, 2)  # nose and eyes first
            keypoints = np.concatenate([points / FINER - 0.5, labelled], axis=1) * (labelled > 0)
            coco["annotations"].append(
                {
                    "id": len(coco["annotations"]) + 1,
                    "image_id": number,
                    "category_id": 1,
                    "bbox": [left, top, right - left, bottom - top],
                    "area": np.count_nonzero(mask) / FINER**2,
                    "iscrowd": 0,
                    "keypoints": keypoints.reshape(-1).tolist(),
                    "num_keypoints": int((labelled > 0).sum()),
                }
            )
        name = f"{number - 1:03d}.jpg"
        image.resize((width, height), Image.Resampling.BOX).save(folder / "images" / name, quality=90)
        coco["images"].append({"id": number, "file_name": name, "height": height, "width": width})
    (folder / "person_keypoints.json").write_text(json.dumps(coco))
    return folder


def orders(folder: Path, *, rounds: int = 7) -> None:
    """Print the processor time of an epoch of ``pose_hrnet``, ``order=grouped`` as a multiple of ``order=shuffle``."""
    import gpuaug

    words = [
        "augment=pose_hrnet",
        "targets=pose",
        "source=coco",
        f"source.root={folder / 'images'}",
        "source.unit=object",
    ]
    words += [f"source.annotations={folder / 'person_keypoints.json'}", "device=cpu", "num_workers=0", "batch_size=64"]
    for backend in ("pillow", "dali"):
        times: dict[str, list[float]] = {"order=shuffle": [], "order=grouped": [], "order=grouped order.streams=1": []}
        more = [f"decode.backend={backend}", "decode.num_threads=1"]
        loaders = {name: gpuaug.build(gpuaug.compose("train", [*words, *more, *name.split()])) for name in times}
        for k in range(rounds + 1):  # the first is a warm-up
            for name, loader in loaders.items():
                began = time.process_time()
                count = sum(int(batch.valid.sum()) for batch in loader)
                times[name] += [(time.process_time() - began) / count] if k else []
        first = next(iter(times.values()))
        for name, spent in times.items():
            ratios = [a / b for a, b in zip(spent, first, strict=True)]
            text = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"{backend} {name}: {statistics.median(spent) * 1e3:.2f} ms per sample, ratio {text}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--size", type=int, nargs=2, default=(192, 256))
    parser.add_argument("--people", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--orders", action="store_true")
    given = parser.parse_args()
    write(given.folder, count=given.count, size=tuple(given.size), people=given.people, seed=given.seed)
    if given.orders:
        orders(given.folder)
