"""bench/accuracy.py: that it runs, that both pipelines see the same images, and what its table says."""

from contextlib import ExitStack

import accuracy as bench
import photographs
import pytest
import torch


def test_a_run_measures_both(tmp_path, v2):
    row = bench.measure("flip", tmp_path, seeds=2, epochs=1, count=50)
    assert row["images"] == [40, 10]
    for run in row["runs"].values():
        assert len(run["accuracy"]) == len(run["seconds"]) == 2
        assert all(value * 10 == pytest.approx(round(value * 10)) for value in run["accuracy"])
    text = bench.table([{**row, "runs": {"gpuaug": {"accuracy": [0.5, 0.7, 0.9], "seconds": [1, 2, 3]}}}])
    assert text.splitlines()[-1] == "| flip | gpuaug | 3 | 70.0% | 50.0% to 90.0% | 20.0% | 2 |"


def test_both_pipelines_give_images_of_the_same_statistics(tmp_path, v2):
    photographs.cut(tmp_path, count=100)
    means, labels = {}, {}
    for who in bench.WHO:
        with ExitStack() as stack:
            epoch_of = bench.batches(who, "standard", tmp_path / "train", 0, stack)
            found = [(images, label) for _ in range(2) for images, label in epoch_of()]
        pixels = torch.cat([images for images, _ in found])
        assert pixels.shape == (160, 3, bench.SIZE, bench.SIZE)
        means[who] = [float(x) for x in (pixels.mean(), pixels.std(), pixels.diff(dim=3).abs().mean())]
        labels[who] = torch.cat([label for _, label in found]).bincount().tolist()
    assert labels["gpuaug"] == labels["torchvision"] == [16] * 10
    assert means["gpuaug"] == pytest.approx(means["torchvision"], abs=0.15)
