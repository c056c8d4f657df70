"""The pictures of the site: what each recipe and each operation does to a photograph."""

from __future__ import annotations

import io
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import gpuaug
from gpuaug.display.sheet import Cell, SheetRow, sheet
from gpuaug.tools.preview.controls import examples
from gpuaug.tools.preview.drawing import draw

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))
import people
import scenes
from photographs import photograph

PICTURES = 6  # augmented ones in a row
SIDE, SIDE_WITH_TARGETS, SIDE_OF_OPERATION = 112, 150, 128
# for recipes whose name begins so: the overrides that select the source and the targets
TARGETS = {
    "seg": ["source=masks", "targets=segmentation"],
    "det": ["source=coco", "source.split=images", "source.annotations=instances.json", "targets=detection"],
    "pose": ["source=coco", "source.split=images", "source.annotations=person_keypoints.json", "source.unit=object"],
}


def of_recipes() -> dict[str, bytes]:
    """For each recipe: a photograph, and its augmented images of several epochs, in a row."""
    logging.getLogger("gpuaug").setLevel(logging.WARNING)
    folder = Path(__file__).resolve().parent.parent / "conf/gpuaug/augment"
    with tempfile.TemporaryDirectory() as made:
        (photographs := Path(made) / "photographs" / "cat").mkdir(parents=True)
        photograph("cat").save(photographs / "cat.jpg", quality=95)
        annotated = scenes.write(Path(made) / "scenes", count=8, things=5, tint=0.5, seed=4)
        of_people = people.write(Path(made) / "people", count=1, people=1)
        found = {}
        for name in sorted(path.stem for path in folder.glob("*.yaml")):
            words = TARGETS.get(name.partition("_")[0])
            root = photographs.parent if words is None else annotated
            if name.startswith("pose"):
                root, words = of_people, [*(words or []), "targets=pose"]
            settings = [f"augment={name}", f"source.root={root}", *(words or []), "device=cpu", "num_workers=0"]
            with gpuaug.build(gpuaug.compose("train", settings)) as loader:
                found[name] = row(loader, draws=not name.endswith(("eval", "none")))
    return found


def row(loader: Any, *, draws: bool) -> bytes:
    """The first sample of a loader: the original, then augmented images."""
    epochs = list(loader.augment.schedule)  # of a recipe with stages: the first epoch of each
    if len(epochs) == 1:
        epochs = list(range(max(1, PICTURES // len(loader.augment.at(0).views)) if draws else 1))
    (of_sample,), legend = draw(loader, [0], epochs=epochs, cell=SIDE if loader.targets is None else SIDE_WITH_TARGETS)
    return webp(sheet([SheetRow("", [], of_sample.cells)], legend=legend))


def of_operations() -> dict[str, bytes]:
    """For each operation: a photograph, and four random draws."""
    image = photograph("cat").resize((SIDE_OF_OPERATION * 5 // 4, SIDE_OF_OPERATION))
    batch = torch.from_numpy(np.array(image)).permute(2, 0, 1).repeat(4, 1, 1, 1)
    found = {}
    for name, settings in examples().items():
        always = {**settings, "p": 1.0} if "p" in settings else settings
        made = gpuaug.Augment(ops={name: gpuaug.build(always)})(batch, seed=1)
        arrays = made.mul(255).round().byte().permute(0, 2, 3, 1).numpy()
        cells = [Cell(image, "original"), *(Cell(Image.fromarray(each), "") for each in arrays)]
        found[name] = webp(sheet([SheetRow("", [], cells)]))
    return found


def webp(picture: Image.Image) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, "WEBP", quality=85)
    return stream.getvalue()
