"""Make an ImageFolder of JPEGs from the photographs in the wheels of scikit-image and scikit-learn.

    python bench/photographs.py OUT [--count 800] [--seed 0]

Each photograph is a class. ``OUT/train/<class>`` has parts of its left side, and ``OUT/val/<class>`` parts of its right
side, so training never sees a held-out pixel. As in real collections, the files differ: several sizes around 500 x 375,
portrait and landscape, 4:4:4 and 4:2:0, progressive, grayscale, EXIF-rotated. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import random
from importlib.util import find_spec
from pathlib import Path

from PIL import Image, ImageOps
from tqdm import tqdm

# read by path, because scikit-image's functions would download missing files
PHOTOGRAPHS = {
    "astronaut": ("skimage", "data/astronaut.png"),
    "cat": ("skimage", "data/chelsea.png"),
    "coffee": ("skimage", "data/coffee.png"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
    "galaxies": ("skimage", "data/hubble_deep_field.jpg"),
    "motorcycle": ("skimage", "data/motorcycle_left.png"),
    "retina": ("skimage", "data/retina.jpg"),
    "rocket": ("skimage", "data/rocket.jpg"),
    "temple": ("sklearn", "datasets/images/china.jpg"),
    "tissue": ("skimage", "data/ihc.png"),
}
SIZES = ((500, 375), (500, 375), (500, 375), (500, 333), (480, 360), (512, 384), (640, 480), (400, 400), (320, 240))
TRAIN_PART = 0.6  # of the width; the rest is held out
VAL_SHARE = 0.2  # of the files

# EXIF orientation: how the pixels are turned before they are stored; a reader that applies the tag undoes it
STORED_AS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
ORIENTATION = 0x0112


def photograph(name: str) -> Image.Image:
    """One of the photographs, RGB; FileNotFoundError says which package to install."""
    package, relative = PHOTOGRAPHS[name]
    spec = find_spec(package)
    path = Path(spec.origin).parent / relative if spec and spec.origin else None
    if path is None or not path.exists():
        wheel = {"skimage": "scikit-image", "sklearn": "scikit-learn"}[package]
        raise FileNotFoundError(
            f"photograph {name!r} comes with {wheel} ({relative}). Found: none. `pip install {wheel}`."
        )
    with Image.open(path) as image:
        return image.convert("RGB")


def window(image: Image.Image, rng: random.Random) -> Image.Image:
    """A random part of the image, from half of the largest that fits to all of it, resized to one of the sizes."""
    width, height = rng.choice(SIZES)
    if rng.random() < 0.3:
        width, height = height, width
    fit = min(image.width / width, image.height / height) * rng.uniform(0.5, 1.0)
    w, h = max(1, int(width * fit)), max(1, int(height * fit))
    x, y = rng.randint(0, image.width - w), rng.randint(0, image.height - h)
    return image.resize((width, height), Image.Resampling.BICUBIC, box=(x, y, x + w, y + h))


def save(image: Image.Image, path: Path, rng: random.Random) -> None:
    """Write one JPEG. About 10 % are progressive, 5 % grayscale and 5 % EXIF-rotated."""
    gray, progressive, rotated = rng.random() < 0.05, rng.random() < 0.10, rng.random() < 0.05
    subsampling = rng.choice(("4:4:4", "4:2:0", "4:2:0"))
    orientation, quality = rng.choice(tuple(STORED_AS)), rng.randint(75, 95)
    exif = Image.Exif()
    if gray:
        image = ImageOps.grayscale(image)
    if rotated:
        exif[ORIENTATION] = orientation
        image = image.transpose(STORED_AS[orientation])
    chroma = {} if gray else {"subsampling": subsampling}
    image.save(path, "JPEG", quality=quality, progressive=progressive, exif=exif, **chroma)


def cut(out: str | Path, *, count: int = 800, seed: int = 0, progress: bool = False) -> Path:
    """Write ``count`` JPEGs below ``out``/train and ``out``/val, always the same for (count, seed). Returns ``out``.

    The random values of a file depend on (seed, folder, class, number), so a larger ``count`` only adds files.
    """
    out, names = Path(out), sorted(PHOTOGRAPHS)
    if count < 2 * len(names):
        raise ValueError(f"`count` must be at least {2 * len(names)}, one file per class and folder. Found: {count}.")
    bar = tqdm(total=count, desc="cut photographs", unit="image", disable=not progress)
    in_val = max(len(names), round(count * VAL_SHARE))
    for i, name in enumerate(names):
        whole = photograph(name)
        middle = int(whole.width * TRAIN_PART)
        for folder, total, part in (
            ("train", count - in_val, whole.crop((0, 0, middle, whole.height))),
            ("val", in_val, whole.crop((middle, 0, whole.width, whole.height))),
        ):
            place = out / folder / name
            place.mkdir(parents=True, exist_ok=True)
            for number in range(total // len(names) + (i < total % len(names))):
                rng = random.Random(f"{seed}/{folder}/{name}/{number}")
                save(window(part, rng), place / f"{name}_{number:04d}.jpg", rng)
                bar.update()
    bar.close()
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    cut(args.out, count=args.count, seed=args.seed, progress=True)
