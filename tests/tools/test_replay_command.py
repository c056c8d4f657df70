"""`gpuaug replay`: what training saw, again, also after three ranks trained it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from common import threads, torchrun
from PIL import Image

import gpuaug
from bench import photographs
from gpuaug.tools.main import main

SMALL = ["augment=simclr", "augment.crop.size=24", "+model.width=8", "batch_size=5", "num_workers=0", "device=cpu"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photographs.cut(tmp_path_factory.mktemp("photos"), count=60)


@pytest.fixture(scope="module")
def trained(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on three ranks, stopped by SIGTERM or by its end, and continued by one rank."""
    out = tmp_path_factory.mktemp("run")
    words = [f"source.root={photos}/train", *SMALL, f"out={out}", "digests=true"]
    (out / "digests.rank0.jsonl").write_text('{"step": 999, "digest": "of an earlier run"}\n')
    process = subprocess.Popen([*torchrun(3), "train", *words, "epochs=2"], stderr=subprocess.PIPE, text=True)
    for _ in range(1200):  # until the first epoch has begun
        file = out / "digests.rank0.jsonl"
        if (file.exists() and len(file.read_text().splitlines()) >= 2) or process.poll() is not None:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=100)
    assert (out / "last.pt").exists(), said
    with threads(1):
        assert main(["train", *words, "epochs=3", "resume=auto"]) == 0
    return out


def lines(file: Path) -> dict[int, str]:
    return {x["step"]: x["digest"] for x in map(json.loads, file.read_text().splitlines())}


def test_every_step_of_three_ranks_and_of_one(trained: Path, photos: Path, tmp_path: Path, capfd: Any) -> None:
    steps = sorted(lines(trained / "digests.rank0.jsonl"))
    assert steps == list(range(len(steps)))
    known = sum(len(lines(trained / f"digests.rank{rank}.jsonl")) for rank in range(3))
    assert known > len(steps)  # three ranks began
    words = ["replay", f"source.root={photos}/train", f"state={trained}/last.pt", f"out={tmp_path}/x.html"]
    numbers = ",".join(map(str, steps))
    assert main([*words, f"step=[{numbers}]", f"digests={trained}", "samples=1", f"json={tmp_path}/x.json"]) == 0
    assert f"{known} of {known} batches equal those of the training" in capfd.readouterr().out
    found = json.loads((tmp_path / "x.json").read_text())
    assert [len(each["digests"]) for each in found["replayed"]] == [
        sum(step in lines(trained / f"digests.rank{rank}.jsonl") for rank in range(3)) for step in steps
    ]
    # the steps with the largest losses, in the same way
    assert main([*words, f"spikes={trained}/spikes.json", "top=2", "batch_size=3", f"digests={trained}"]) == 0
    spikes = json.loads((trained / "spikes.json").read_text())["steps"]
    losses = [each["loss"] for each in spikes]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == min(20, len(steps))
    assert f"step {spikes[0]['step']}: " in capfd.readouterr().out

    file = trained / "digests.rank0.jsonl"
    text = file.read_text()
    file.write_text(re.sub('"digest": "(.)', '"digest": "x', text, count=1))
    try:
        assert main([*words, f"step=[{numbers}]", f"digests={trained}"]) == 2
        assert "1 of " in capfd.readouterr().err
    finally:
        file.write_text(text)


def test_the_page_shows_what_was_drawn(trained: Path, photos: Path, tmp_path: Path) -> None:
    words = [f"source.root={photos}/train", f"state={trained}/last.pt", "step=1", "samples=3"]
    for name in ("x.html", "x.png"):
        assert main(["replay", *words, f"out={tmp_path / name}", f"json={tmp_path}/x.json"]) == 0
    details = [unescape(x) for x in re.findall("<pre>(.*?)</pre>", (tmp_path / "x.html").read_text(), re.DOTALL)]
    with gpuaug.build(gpuaug.compose("train", [*words[:1], *SMALL[:2], "num_workers=0", "device=cpu"])) as loader:
        loader.load_state_dict(torch.load(trained / "last.pt", weights_only=True)["loader"])
        batch, *_ = loader.replay(1)
        expected = ["\n".join(view.lines) for row in range(3) for view in batch.explain(row)]
    assert details == expected
    (found,) = json.loads((tmp_path / "x.json").read_text())["replayed"]
    assert [view["window"] for view in found["samples"][0]["views"]] == [list(x.window) for x in batch.explain(0)]
    assert Image.open(tmp_path / "x.png").height > 400


def test_one_sample_of_an_epoch(photos: Path, tmp_path: Path, capsys: Any) -> None:
    key = next((photos / "train").rglob("*.jpg")).relative_to(photos / "train")
    words = ["replay", f"source.root={photos}/train", f"out={tmp_path}/x.png", "epoch=7"]
    assert main([*words, f"sample={key}"]) == 0
    assert str(key) in capsys.readouterr().out
    assert main([*words, "sample=[0,3]"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs step=NUMBER, or spikes=FILE, or epoch=NUMBER and sample=PATH. Found: none"),
        (["step=1", "spikes=x"], "Found: step, spikes"),
        (["sample=1"], "Found: sample"),
        (["epoch=1", "step=1"], "Found: step, epoch"),
        (["step=-1"], "`step` must be"),
        (["step=x"], "`step` must be"),
        (["step=[]"], "`step` must be a number or a list of numbers"),
        (["step=1", "out=x.txt"], "must end in .png or .html"),
        (["epoch=1", "sample=none.jpg"], "`sample` must be the number or the key of a sample"),
        (["epoch=1", "sample=99999"], "must be sample numbers"),
        (["epoch=1", "sample=1", "digests=x"], "names no step"),
        (["spikes=missing.json"], "`spikes` must be a JSON file"),
        (["step=1", "state=missing.json"], "`state` must be a JSON file"),
        (["step=1", "state=missing.pt"], "`state` must name a checkpoint"),
        (["step=0", "digests=missing"], "`digests` must be the folder"),
    ],
)
def test_errors(words: list[str], message: str, photos: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["replay", f"source.root={photos}/train", *words]) == 2
    assert message in capsys.readouterr().err


def test_another_subset_is_refused(trained: Path, photos: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["replay", f"source.root={photos}/train", f"state={trained}/last.pt", f"out={tmp_path}/x.html", "step=1"]
    assert main([*words, "source.subset=20"]) == 2
    assert "samples, and has 20 here. Use the same files, and the same `subset`" in capsys.readouterr().err


def test_steps_without_a_digest_are_counted(trained: Path, photos: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["replay", f"source.root={photos}/train", f"state={trained}/last.pt", f"out={tmp_path}/x.html", "samples=1"]
    last = max(lines(trained / "digests.rank0.jsonl"))
    assert main([*words, f"step=[{last},{last + 1}]", f"digests={trained}"]) == 0
    assert "1 of 1 batches equal those of the training, bit for bit; 1 more have no digest" in capsys.readouterr().out


def test_digests_of_a_run_that_continues_another(photos: Path, tmp_path: Path) -> None:
    """What an older run wrote into the folder from this step on goes; also a torn line."""
    words = ["train", f"source.root={photos}/train", *SMALL, "digests=true", "num_workers=0"]
    with threads(1):
        assert main([*words, f"out={tmp_path}/a", "epochs=1"]) == 0
        (tmp_path / "b").mkdir()
        older = [json.dumps({"step": n, "digest": "x"}) for n in range(99)]
        (tmp_path / "b/digests.rank0.jsonl").write_text("\n".join(older) + '\n{"step": 1')
        assert main([*words, f"out={tmp_path}/b", "epochs=2", f"resume={tmp_path}/a/last.pt"]) == 0
    first = len(lines(tmp_path / "a/digests.rank0.jsonl"))
    found = lines(tmp_path / "b/digests.rank0.jsonl")
    assert sorted(found) == list(range(2 * first))
    assert [step for step, digest in found.items() if digest == "x"] == list(range(first))


def test_a_state_of_other_settings(trained: Path, photos: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["replay", f"source.root={photos}/train", f"state={trained}/last.pt", f"out={tmp_path}/x.html", "step=0"]
    assert main([*words, "augment=dino"]) == 2
    assert "the settings must be those of the training. Found: augment" in capsys.readouterr().err
    assert main([*words, "seed=1"]) == 2
    assert "seed: 0 in the state, 1 here" in capsys.readouterr().err
    state = torch.load(trained / "last.pt", weights_only=True)["loader"]
    (tmp_path / "state.json").write_text(json.dumps(state))
    (tmp_path / "damaged.json").write_text(json.dumps({**state, "epoch": 1}))
    assert main([*words, *SMALL[:2], f"state={tmp_path}/state.json"]) == 0
    assert main([*words, *SMALL[:2], f"state={tmp_path}/damaged.json"]) == 2


def test_help_names_the_keys(capsys: Any) -> None:
    assert main(["replay", "--help"]) == 0
    assert "spikes: null" in capsys.readouterr().out
