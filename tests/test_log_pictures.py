"""examples/log_pictures.py: what TensorBoard and MLflow give back are the pixels of ``batch.show()``."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
from conftest import ROOT
from PIL import Image

import gpuaug

EXAMPLE = ROOT / "examples/log_pictures.py"
QUIET = {"DO_NOT_TRACK": "true", "GIT_PYTHON_REFRESH": "quiet"}  # for mlflow
RANK = f"""
import sys
import torch
sys.path.insert(0, {str(EXAMPLE.parent)!r})
from log_pictures import to_tensorboard, train

store, rank, *overrides = sys.argv[1:]
torch.distributed.init_process_group("gloo", f"file://{{store}}", world_size=2, rank=int(rank))
train(overrides, to_tensorboard(f"rank{{rank}}"), epochs=2, every=2)
"""


@pytest.fixture
def overrides(photos: Path) -> list[str]:
    small = ["augment=standard", "augment.crop.size=32", "batch_size=16", "num_workers=0", "device=cpu"]
    return [f"source.root={photos}", *small]


def run(folder: Path, *words: str) -> None:
    done = forked.run([sys.executable, *words], cwd=folder, env={**os.environ, **QUIET})
    assert done.returncode == 0, done.stderr


def expected(overrides: list[str], *, epochs: int = 1, every: int = 500, **ranks: int) -> dict[int, tuple[Any, str]]:
    """By step: the pixels of the picture, and what the recipe did to the first sample."""
    with gpuaug.build(gpuaug.compose("train", [*overrides, *(f"{k}={v}" for k, v in ranks.items())])) as loader:
        batches = [batch for _ in range(epochs) for batch in loader]
    return {
        step: (np.asarray(batch.show()), f"{batch.keys[0]}\n\n{batch.explain(0)}")
        for step, batch in enumerate(batches)
        if step % every == 0
    }


def check(found: dict[int, tuple[bytes, str]], wanted: dict[int, tuple[Any, str]]) -> None:
    assert found.keys() == wanted.keys()
    for step, (png, text) in found.items():
        with Image.open(io.BytesIO(png)) as picture:
            assert picture.format == "PNG"
            assert np.array_equal(np.asarray(picture), wanted[step][0])
        assert text == wanted[step][1]


def of_tensorboard(folder: Path) -> dict[int, tuple[bytes, str]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("first sample/text_summary")]
    lines = ["\n".join(line[4:] for line in text.split("\n")) for text in texts]
    images = events.Images("batch")
    return {image.step: (image.encoded_image_string, text) for image, text in zip(images, lines, strict=True)}


def test_tensorboard(overrides: list[str], tmp_path: Path) -> None:
    run(tmp_path, str(EXAMPLE), "tensorboard", "runs", *overrides)
    wanted = expected(overrides)
    assert wanted[0][0].std() > 20
    assert "\ncrop: " in wanted[0][1]
    check(of_tensorboard(tmp_path / "runs"), wanted)


def test_mlflow(overrides: list[str], tmp_path: Path) -> None:
    import mlflow

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    run(tmp_path, str(EXAMPLE), "mlflow", uri, *overrides)
    client = mlflow.MlflowClient(uri)
    (made,) = client.search_runs(["0"])
    assert made.info.status == "FINISHED"
    files = [Path(client.download_artifacts(made.info.run_id, f"batch_0000000.{kind}")) for kind in ("png", "txt")]
    check({0: (files[0].read_bytes(), files[1].read_text(encoding="utf-8"))}, expected(overrides))


def test_rank_0_logs_every_second_step(overrides: list[str], tmp_path: Path) -> None:
    words = [[sys.executable, "-c", RANK, str(tmp_path / "store"), rank, *overrides] for rank in "01"]
    ranks = [forked.Popen(command, cwd=tmp_path, stderr=forked.PIPE, text=True) for command in words]
    for process in ranks:
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
    wanted = expected(overrides, epochs=2, every=2, rank=0, world_size=2)
    assert [*wanted] == [0, 2, 4]
    check(of_tensorboard(tmp_path / "rank0"), wanted)
    assert not (tmp_path / "rank1").exists()


def test_text_of_several_views(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    from log_pictures import what_was_done

    with gpuaug.build(gpuaug.compose("train", [*overrides, "augment=simclr"])) as loader:
        batch = next(iter(loader))
    first, second = batch.explain(3)
    assert what_was_done(batch, 3) == f"{batch.keys[3]}\n\n{first}\n\n{second}"
