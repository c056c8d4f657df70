"""Makes photographs with objects whose masks, boxes and keypoints are known exactly.

    python bench/scenes.py FOLDER [--count 24] [--size 375 500] [--things 7] [--tint 0.0] [--seed 0]

The objects ("things") are ellipses, rectangles and triangles, cut out of other photographs. ``--tint 0.6`` mixes 60 %
of the colour of its class into each thing, so things are easy to see and to learn. FOLDER gets:

    images/000.jpg ...          photographs
    masks/000.png ...           palette PNGs: 0 background, 1 ellipse, 2 rectangle, 3 triangle, 255 at the edges
    instances.json              COCO: boxes, polygons, and three keypoints of each triangle (top, left, right)
    labels/000.txt ...          YOLO: the same boxes
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from photographs import photograph
from PIL import Image, ImageDraw

NAMES = ["ellipse", "rectangle", "triangle"]
POINTS = ["top", "left_foot", "right_foot"]
PALETTE = [40, 40, 40, 230, 80, 60, 60, 160, 230, 90, 200, 90]


def outline(kind: int, center: Any, radius: Any) -> list[tuple[float, float]]:
    """The polygon of a thing, in pixel edges."""
    (x, y), (rx, ry) = center, radius
    if kind == 0:
        turns = np.linspace(0, 2 * np.pi, 40, endpoint=False)
        return [(x + rx * np.cos(t), y + ry * np.sin(t)) for t in turns]
    if kind == 1:
        return [(x - rx, y - ry), (x + rx, y - ry), (x + rx, y + ry), (x - rx, y + ry)]
    return [(x, y - ry), (x - rx, y + ry), (x + rx, y + ry)]


def scene(
    rng: np.random.Generator, sources: list[Image.Image], size: tuple[int, int], things: int, tint: float = 0.0
) -> tuple[Image.Image, Image.Image, list[dict[str, Any]]]:
    """An image, its mask, and its things: ``kind``, ``polygon`` and ``box`` (x1, y1, x2, y2)."""
    height, width = size
    image = sources[int(rng.integers(len(sources)))].resize((width, height))
    mask = Image.new("P", (width, height), 0)
    mask.putpalette(PALETTE + [0] * (756 - len(PALETTE)) + [224, 224, 192] * 4)
    found = []
    for _ in range(things):
        kind = int(rng.integers(3))
        radius = rng.uniform(0.06, 0.2, 2) * min(size)
        center = [rng.uniform(r + 1, side - r - 1) for r, side in zip(radius, (width, height), strict=True)]
        polygon = outline(kind, center, radius)
        texture = sources[int(rng.integers(len(sources)))].resize((width, height))
        if tint:
            color = np.clip(PALETTE[3 * kind + 3 : 3 * kind + 6] + rng.integers(-40, 41, 3), 0, 255)
            texture = Image.blend(texture, Image.new("RGB", texture.size, tuple(color.tolist())), tint)
        stencil = Image.new("L", (width, height), 0)
        ImageDraw.Draw(stencil).polygon(polygon, fill=255)
        image.paste(texture, (0, 0), stencil)
        draw = ImageDraw.Draw(mask)
        draw.polygon(polygon, fill=kind + 1, outline=255)
        xs, ys = zip(*polygon, strict=True)
        found.append({"kind": kind, "polygon": polygon, "box": [min(xs), min(ys), max(xs), max(ys)]})
    return image, mask, found


def write(
    folder: Path,
    *,
    count: int,
    size: tuple[int, int] = (375, 500),
    things: int = 7,
    tint: float = 0.0,
    seed: int = 0,
) -> Path:
    """Write ``count`` scenes in all four forms."""
    rng = np.random.default_rng(seed)
    sources = [photograph(name) for name in ("astronaut", "cat", "coffee", "flower", "temple")]
    for name in ("images", "masks", "labels"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    categories: list[dict[str, Any]] = [{"id": 10 * (k + 1), "name": name} for k, name in enumerate(NAMES)]
    categories[2] |= {"keypoints": POINTS}
    coco: dict[str, Any] = {"images": [], "annotations": [], "categories": categories}
    height, width = size
    for number in range(count):
        image, mask, found = scene(rng, sources, size, things, tint)
        name = f"{number:03d}"
        image.save(folder / "images" / f"{name}.jpg", quality=90)
        mask.save(folder / "masks" / f"{name}.png")
        coco["images"].append({"id": number + 1, "file_name": f"{name}.jpg", "height": height, "width": width})
        lines = []
        for thing in found:
            x1, y1, x2, y2 = thing["box"]
            points = [[x - 0.5, y - 0.5, 2] for x, y in thing["polygon"]] if thing["kind"] == 2 else [[0, 0, 0]] * 3
            coco["annotations"].append(
                {
                    "id": len(coco["annotations"]) + 1,
                    "image_id": number + 1,
                    "category_id": 10 * (thing["kind"] + 1),
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                    "area": (x2 - x1) * (y2 - y1),
                    "iscrowd": 0,
                    "segmentation": [[float(v) for point in thing["polygon"] for v in point]],
                    "keypoints": [float(v) for point in points for v in point],
                    "num_keypoints": 3 if thing["kind"] == 2 else 0,
                }
            )
            box = ((x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height)
            lines.append(" ".join([str(thing["kind"]), *(f"{v:.6f}" for v in box)]))
        (folder / "labels" / f"{name}.txt").write_text("\n".join(lines) + "\n")
    (folder / "instances.json").write_text(json.dumps(coco))
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--size", type=int, nargs=2, default=(375, 500))
    parser.add_argument("--things", type=int, default=7)
    parser.add_argument("--tint", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    more = {"things": given.things, "tint": given.tint, "seed": given.seed}
    write(given.folder, count=given.count, size=tuple(given.size), **more)
