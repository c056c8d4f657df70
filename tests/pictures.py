"""Real photographs, images as the bytes of a file, and files in a tar."""

import io
import tarfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


@cache
def photographs() -> dict[str, np.ndarray]:
    """Name to uint8 [H, W, 3]."""
    from skimage import data
    from sklearn.datasets import load_sample_image

    return {
        "astronaut": data.astronaut(),
        "chelsea": data.chelsea(),
        "china": load_sample_image("china.jpg"),
        "coffee": data.coffee(),
        "flower": load_sample_image("flower.jpg"),
    }


def photograph(name: str = "china", size: tuple[int, int] = (251, 187)) -> Image.Image:
    """One of them, at (width, height)."""
    return Image.fromarray(photographs()[name]).resize(size)


def encode(image: Image.Image | np.ndarray, form: str = "JPEG", **options: Any) -> bytes:
    """The image as a file of this form; `options` are those of Pillow's writer."""
    out = io.BytesIO()
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    image.save(out, form, **options)
    return out.getvalue()


def png(values: np.ndarray) -> bytes:
    """A PNG of these pixels."""
    return encode(values, "PNG")


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    """A tar of (name, bytes), in a folder that is made if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path
