"""Real processes under torchrun with gloo: disjoint shards, equal steps, disagreement, kill and resume."""

import json
import logging
import os
import subprocess
import sys
from collections import Counter

import ddp_worker
import forked
import pytest
import torch

from gpuaug import machine
from gpuaug.decode.decoder import Decode
from gpuaug.loader.arguments import choose_workers
from gpuaug.source import Source

TORCHRUN = """
import runpy, sys
from torch.distributed import run
launch = run.elastic_launch

def forked(config, entrypoint):
    config.start_method = "fork"
    return launch(config, main)

def main(*words):
    sys.argv = [word for word in words if word != "-u"]
    runpy.run_path(sys.argv[0], run_name="__main__")

run.elastic_launch = forked
run.main(sys.argv[1:])
"""  # its ranks are forked, so that they need not import torch


def run(world_size, *args, check=True):
    """The exit status of torchrun, and what it and the ranks wrote to stderr."""
    words = ["--standalone", f"--nproc-per-node={world_size}", ddp_worker.__file__, *args]
    if any(str(word).startswith("cuda") for word in args):  # a forked process cannot use CUDA
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "torch.distributed.run", *map(str, words)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    else:
        done = forked.run(forked.code(TORCHRUN, *words), timeout=900)
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return done.returncode, done.stderr


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
    ddp_worker.run([str(photos), str(out), "--batch-size", "16"])
    found = seen(out)
    assert len(found) == found.total() == 65
    return found


@pytest.fixture(scope="module")
def two(photos, tmp_path_factory):
    """What two ranks did in four runs, and all that they said."""
    out = tmp_path_factory.mktemp("two")
    runs = {
        "default": ["--collective"],
        "uneven": ["--last", "uneven"],
        "drop": ["--faults", "drop"],
        "disagree": ["--seed-of-rank-1", 6],
    }
    words = [["--then", photos, folder(out / name), *more] for name, more in runs.items()]
    return out, run(2, *[word for each in words for word in each][1:])[1]


@pytest.fixture(scope="module")
def three(photos, tmp_path_factory):
    """What three ranks did in an epoch, and in one that was killed after three batches."""
    out = tmp_path_factory.mktemp("three")
    default, killed = folder(out / "default"), folder(out / "killed")
    words = [photos, default, "--collective", "--then", photos, killed, "--kill-after", 3, "--collective"]
    assert run(3, *words, check=False)[0] != 0
    return out


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


@pytest.mark.parametrize(("cores", "local", "behind_url"), [(1, 1, 2), (2, 1, 2), (6, 3, 3), (64, 4, 4)])
def test_the_default_number_of_workers(monkeypatch, cores, local, behind_url):
    monkeypatch.setattr(machine, "usable_cpus", lambda: cores)
    monkeypatch.setattr(machine, "local_world_size", lambda: 1)
    source = Source([(b"x", 0)])
    assert choose_workers(None, source, logging.getLogger("gpuaug")) == local
    source.read_many = lambda numbers: [source[i] for i in numbers]  # as sources behind URLs have it
    assert choose_workers(None, source, logging.getLogger("gpuaug")) == behind_url


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


def test_ranks_take_equally_many_steps_by_default(whole, two, three):
    """A collective after each batch ends, though 65 samples in batches of 4 do not divide; every sample counts once."""
    for ranks, steps, out in ((2, 9, two[0] / "default"), (3, 6, three / "default")):
        assert seen(out) == whole
        assert [len(list(out.glob(f"state{rank}_*"))) for rank in range(ranks)] == [steps] * ranks
        assert seen(out, valid=False).total() == steps * ranks * 4


def test_uneven_ranks_see_every_sample_once_and_are_told_of(whole, two):
    out, said = two[0] / "uneven", two[1]
    assert seen(out) == whole
    assert len(list(out.glob("state0_*"))) == 9  # 33 and 32 samples in batches of 4
    assert len(list(out.glob("state1_*"))) == 8
    assert said.count("this epoch has 9 batches on rank 0 and 8 on rank 1") == 1
    assert "Set `last=pad` or `last=drop`" in said


def test_ranks_that_may_lose_batches_are_refused_by_default(two):
    out = two[0] / "drop"
    for rank in range(2):
        assert "`faults.policy=blank`, or `last=uneven`" in (out / f"error{rank}.txt").read_text()
    assert not seen(out)


def test_ranks_that_disagree_find_out_at_the_start(two):
    out = two[0] / "disagree"
    for rank in range(2):
        message = (out / f"error{rank}.txt").read_text()
        assert "seed" in message
        assert "5 on rank 0, 6 on rank 1" in message
    assert not seen(out)


@pytest.mark.parametrize("resume_with", [1, pytest.param(2, marks=pytest.mark.long)])
def test_killed_and_resumed_with_other_ranks(photos, whole, three, tmp_path, resume_with):
    first, second = three / "killed", folder(tmp_path / "second")
    consumed = seen(first, steps=3)
    assert consumed.total() == 3 * 4 * 3
    # any rank's state serves all; the others may have died before they wrote theirs
    words = [photos, second, "--state", next(first.glob("state*_3.json")), "--batch-size", 5]
    if resume_with == 1:
        ddp_worker.run([str(word) for word in words])
    else:
        run(resume_with, *words)
    assert consumed + seen(second) == whole
