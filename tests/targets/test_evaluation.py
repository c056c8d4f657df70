"""Predictions get the ids that evaluation programs expect, and boxes in pixels of the source."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import loader
from conftest import ROOT
from pictures import encode, photograph
from PIL import Image

import gpuaug
from gpuaug.tools.pack.command import pack

pytest.importorskip("pycocotools")
IMAGE_IDS, CATEGORY_IDS = (900, 17, 40), (90, 3, 18)  # not ascending, with gaps
RULES = gpuaug.Targets(boxes=gpuaug.Boxes())


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    """Three photographs, one of which EXIF turns; each has an object of each category."""
    rng = np.random.default_rng(0)
    file: dict[str, Any] = {"images": [], "annotations": [], "categories": []}
    file["categories"] = [{"id": number, "name": f"thing {number}"} for number in CATEGORY_IDS]
    (tmp_path / "val2017").mkdir()
    (tmp_path / "annotations").mkdir()
    tag = Image.Exif()
    for image_id, (width, height), tag[274] in zip(IMAGE_IDS, ((90, 60), (64, 64), (50, 80)), (6, 1, 1), strict=True):
        name = f"{image_id}.jpg"
        (tmp_path / "val2017" / name).write_bytes(encode(photograph(size=(width, height)), "JPEG", exif=tag))
        file["images"].append({"id": image_id, "file_name": name, "width": width, "height": height})
        for number in CATEGORY_IDS:
            low, high = (0.1, 0.1, 0.3, 0.3), (0.4, 0.4, 0.5, 0.5)
            x, y, w, h = (rng.uniform(low, high) * np.tile([width, height], 2)).tolist()
            box = {"bbox": [x, y, w, h], "area": w * h, "iscrowd": 0}
            owner = {"id": 1 + len(file["annotations"]), "image_id": image_id, "category_id": number}
            file["annotations"].append(owner | box)
    (tmp_path / "annotations" / "instances_val2017.json").write_text(json.dumps(file))
    return tmp_path


@pytest.mark.parametrize("recipe", ["det_ssd_eval", "det_lsj_eval", "det_rtdetr_eval"])
def test_the_guides_evaluation_finds_the_truth(coco: Path, recipe: str) -> None:
    """The text of the guide, with the truth as predictions: an average precision of 1."""
    (text,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs/guide.md").read_text(encoding="utf-8"), re.DOTALL)
        if "COCOeval" in block
    )
    augment = gpuaug.build(gpuaug.compose("eval", [f"augment={recipe}"]).augment)
    source = gpuaug.CocoSource(coco, split="val2017")
    with loader(source, augment=augment, targets=RULES, batch_size=2) as made:

        class Val:
            source, targets = made.source, None

            def __iter__(self) -> Any:
                for batch in made:
                    self.targets = batch.targets
                    yield batch

        def model(images: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
            return [{**truth, "scores": torch.ones(len(truth["boxes"]))} for truth in val.targets.as_torchvision()]

        val: Any = Val()
        names: dict[str, Any] = {"torch": torch, "val": val, "model": model}
        exec(text.replace('"COCO/', f'"{coco}/'), names)
    assert names["coco"].stats[0] == pytest.approx(1)


def test_ids_are_those_of_the_source(coco: Path) -> None:
    source = gpuaug.CocoSource(coco, split="val2017")
    assert source.category_ids.tolist() == sorted(CATEGORY_IDS)
    more = ["new", *reversed(source.classes or ())]
    assert gpuaug.CocoSource(coco, split="val2017", classes=more).category_ids.tolist() == [-1, 90, 18, 3]

    pack(source, coco / "packed", num_workers=0)
    packed = gpuaug.PackedSource(coco / "packed")
    assert packed.category_ids.tolist() == sorted(CATEGORY_IDS)
    assert gpuaug.PackedSource(coco / "packed", classes=more).category_ids.tolist() == [-1, 90, 18, 3]

    class Samples(list[Any]):
        mask_path = "a folder"  # as a user's own attribute may be called

    samples, own, names = (Samples(source[i] for i in range(3)) for _ in range(3))
    own.image_ids, names.image_ids = [5, 3, 9], ["a", "b", "c"]
    for given, ids in (
        (source, sorted(IMAGE_IDS)),
        (packed, sorted(IMAGE_IDS)),
        (samples, [0, 1, 2]),
        (own, [5, 3, 9]),
        (names, [0, 1, 2]),
    ):
        with loader(given, augment=gpuaug.Augment(crop=gpuaug.Resize((32, 32))), targets=RULES, shuffle=False) as made:
            ((_, targets),) = list(made)
        assert [image["image_id"] for image in targets.as_torchvision()] == ids
        assert [image["image_id"].tolist() for image in targets.as_detr()] == [[number] for number in ids]
