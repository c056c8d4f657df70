"""Real processes under torchrun with gloo: disjoint shards, equal steps, disagreement, kill and resume."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from gpuaug import machine
from gpuaug.decode.decoder import Decode

WORKER = Path(__file__).with_name("ddp_worker.py")


def run(world_size, *args, check=True, patience=900):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    done = subprocess.run([*command, str(WORKER), *map(str, args)], capture_output=True, text=True, timeout=patience)
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return done


def seen(out, *, steps=None, valid=True):
    """The multiset of (index, digest), of the first batches, of all ranks in a folder."""
    lines = [json.loads(line) for path in sorted(out.glob("rank*.jsonl")) for line in path.read_text().splitlines()]
    return Counter(
        (index, digest) for step, index, digest, ok in lines if (steps is None or step <= steps) and (ok or not valid)
    )


def folder(path):
    path.mkdir()
    return path


@pytest.fixture(scope="module")
def whole(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    run(1, photos, out, "--batch-size", 16)
    found = seen(out)
    assert len(found) == found.total() == 65
    return found


STEP = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2"}


@pytest.mark.parametrize(
    ("set_", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "3"}, 3),
        ({**STEP, "SLURM_NTASKS_PER_NODE": "4"}, 4),
        ({**STEP, "SLURM_NTASKS_PER_NODE": "4(x2)"}, 4),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NTASKS_PER_NODE": "8"}, 3),
        ({**STEP, "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}, 4),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "1", "LOCAL_WORLD_SIZE": "8"}, 8),  # torchrun, started by Slurm
        ({"SLURM_NTASKS_PER_NODE": "4"}, 1),  # inside an allocation, and no task of it
        (STEP, 1),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
    ],
)
def test_ranks_of_a_machine_are_counted_as_the_launcher_says(monkeypatch, set_, ranks):
    for name in (*STEP, "SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(machine, "usable_cpus", lambda: 24)
    assert machine.local_world_size() == ranks
    decoder = Decode(backend="pillow").open("cpu")
    assert decoder.num_threads == min(8, 24 // ranks)
    decoder.close()


def test_cuda_is_the_local_rank_s_device_or_torchs_current_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("SLURM_LOCALID", "1")  # Slurm may show each task one device only
    assert machine.choose_device("cuda") == machine.choose_device("auto") == torch.device("cuda", 3)
    assert machine.choose_device("cuda:2") == torch.device("cuda", 2)
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert machine.choose_device("cuda") == machine.choose_device("auto") == torch.device("cuda", 1)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_take_equally_many_steps_by_default(photos, whole, tmp_path, world_size):
    """A collective after each batch ends, though 65 samples in batches of 4 do not divide; every sample counts once."""
    run(world_size, photos, tmp_path, "--collective", patience=300)
    assert seen(tmp_path) == whole
    steps = {2: 9, 3: 6}[world_size]
    assert [len(list(tmp_path.glob(f"state{rank}_*"))) for rank in range(world_size)] == [steps] * world_size
    assert seen(tmp_path, valid=False).total() == steps * world_size * 4


def test_uneven_ranks_see_every_sample_once_and_are_told_of(photos, whole, tmp_path):
    done = run(2, photos, tmp_path, "--last", "uneven")
    assert seen(tmp_path) == whole
    assert len(list(tmp_path.glob("state0_*"))) == 9  # 33 and 32 samples in batches of 4
    assert len(list(tmp_path.glob("state1_*"))) == 8
    assert done.stderr.count("this epoch has 9 batches on rank 0 and 8 on rank 1") == 1
    assert "Set `last=pad` or `last=drop`" in done.stderr


def test_ranks_that_may_lose_batches_are_refused_by_default(photos, tmp_path):
    run(2, photos, tmp_path, "--faults", "drop")
    for rank in range(2):
        assert "`faults.policy=blank`, or `last=uneven`" in (tmp_path / f"error{rank}.txt").read_text()
    assert not seen(tmp_path)


def test_ranks_that_disagree_find_out_at_the_start(photos, tmp_path):
    run(2, photos, tmp_path, "--seed-of-rank-1", 6)
    for rank in range(2):
        message = (tmp_path / f"error{rank}.txt").read_text()
        assert "seed" in message
        assert "5 on rank 0, 6 on rank 1" in message
    assert not seen(tmp_path)


@pytest.mark.long
def test_ranks_with_other_samples_find_out_at_the_start(photos, tmp_path):
    run(2, photos, tmp_path, "--subset-of-rank-1", 30)
    for rank in range(2):
        assert "order of the epoch" in (tmp_path / f"error{rank}.txt").read_text()
    assert not seen(tmp_path)


@pytest.mark.parametrize(
    "resume_with", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("start_with", [pytest.param(2, marks=pytest.mark.long), 3])
def test_killed_and_resumed_with_other_ranks(photos, whole, tmp_path, start_with, resume_with):
    first, second = folder(tmp_path / "first"), folder(tmp_path / "second")
    assert run(start_with, photos, first, "--kill-after", 3, "--collective", check=False).returncode != 0
    consumed = seen(first, steps=3)
    assert consumed.total() == 3 * 4 * start_with
    state = next(
        first.glob("state*_3.json")
    )  # any rank's serves all; the others may have died before they wrote theirs
    run(resume_with, photos, second, "--state", state, "--batch-size", 5)
    assert consumed + seen(second) == whole


@pytest.mark.long
@pytest.mark.parametrize("last", ["drop", "pad"])
def test_equal_steps_with_collectives(photos, whole, tmp_path, last):
    run(3, photos, tmp_path, "--last", last, "--collective")
    steps = {len(list(tmp_path.glob(f"state{rank}_*"))) for rank in range(3)}
    assert steps == ({5} if last == "drop" else {6})
    assert seen(tmp_path) == whole if last == "pad" else not seen(tmp_path) - whole
    assert seen(tmp_path, valid=False).total() == (72 if last == "pad" else 60)
