"""`gpuaug plan` of runs with masks, boxes and keypoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from scenes import write

import gpuaug
from gpuaug.tools.main import main
from gpuaug.tools.plan import command as predict

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs with masks and COCO's annotations."""
    folder = tmp_path_factory.mktemp("scenes")
    write(folder, count=64)
    return folder


def words(scenes: Path, *more: str) -> list[str]:
    return ["source=masks", f"source.root={scenes}", "targets=segmentation", "device=cpu", "num_workers=1",
            "batch_size=8", "augment=standard", "augment.crop.size=320", "order=repeated", "order.repeats=3",
            *more]  # fmt: skip


def test_masks_are_counted_by_dtype_views_and_images(scenes: Path) -> None:
    pixels, image = 8 * 320 * 320, 375 * 500
    for more, each in (((), 8), (("targets.masks.dtype=uint8",), 1), (("targets.masks.dtype=int32",), 4)):
        with gpuaug.build(gpuaug.compose("train", words(scenes, *more))) as loader:
            bound = predict.upper_bound(loader)
            run = predict.Run(loader=loader, costs=bound)
        terms = {term.name: term.bytes for term in run.terms()}
        assert bound.masks == pixels * each
        assert terms["ready masks"] == 4 * bound.masks
        assert terms["decoding of masks"] == 8 * image + 3 * pixels
        assert bound.image > (scenes / "images" / "000.jpg").stat().st_size / 4
    boxes = ["source=coco", "source.annotations=../instances.json", f"source.root={scenes}/images", "targets=detection"]
    with gpuaug.build(gpuaug.compose("train", [*words(scenes)[3:], *boxes])) as loader:
        terms = {term.name for term in predict.Run(loader=loader, costs=predict.upper_bound(loader)).terms()}
    assert not {"ready masks", "decoding of masks"} & terms


def test_a_plan_is_within_fifteen_percent(scenes: Path, tmp_path: Path) -> None:
    file, given = tmp_path / "plan.json", words(scenes)
    assert main(["plan", *given, "seconds=5", f"json={file}"]) == 0
    values = json.loads(file.read_text())
    named = {term["name"]: term["bytes"] for term in values["terms"]}
    assert values["rehearsal"] >= 6
    assert named["ready masks"] == 4 * 8 * 320 * 320 * 8
    assert named["decoding of masks"] > 0
    code = (
        "import sys, gpuaug; from gpuaug.tools.plan.command import measure\n"
        "with gpuaug.build(gpuaug.compose('train', sys.argv[1:])) as loader:\n"
        "    print(measure(loader, seconds=6).most.host)"
    )
    done = subprocess.run([sys.executable, "-c", code, *given], cwd=ROOT, check=True, capture_output=True, text=True)
    assert abs(values["host_memory"] / int(done.stdout) - 1) < 0.15, (values, done.stdout)
