"""`gpuaug plan` of runs with masks, boxes and keypoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from scenes import write

from gpuaug.tools.main import main

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


def test_a_plan_is_within_fifteen_percent(scenes: Path, tmp_path: Path) -> None:
    file, given = tmp_path / "plan.json", words(scenes)
    assert main(["plan", *given, "seconds=5", f"json={file}"]) == 0
    values = json.loads(file.read_text())
    assert values["rehearsal"] >= 6
    code = (
        "import sys, gpuaug; from gpuaug.tools.plan.command import measure\n"
        "with gpuaug.build(gpuaug.compose('train', sys.argv[1:])) as loader:\n"
        "    print(measure(loader, seconds=6).most.host)"
    )
    done = subprocess.run([sys.executable, "-c", code, *given], cwd=ROOT, check=True, capture_output=True, text=True)
    assert abs(values["host_memory"] / int(done.stdout) - 1) < 0.15, (values, done.stdout)
