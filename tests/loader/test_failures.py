"""Dying and stalling: within a bounded time it goes on or says what to change, and nothing is left behind."""

import json
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import textwrap
import time
import unicodedata
from pathlib import Path

import forked
import pytest
from common import METHODS, ended, tree
from conftest import ROOT
from pictures import encode, photograph

import gpuaug

BUILD = """
import json, os, signal, sys, time, warnings
import torch
import gpuaug

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of every fork beside threads
torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.5  # else forked workers look for their parent every 5 s

def build(root, **settings):
    augment = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(32), backend="kornia")
    source = gpuaug.FolderSource(root) if isinstance(root, str) else root
    return gpuaug.Loader(source, augment=augment, batch_size=4, device="cpu", **{"num_workers": 2, **settings})
"""


def build(root, **settings):
    augment = gpuaug.Augment(crop=gpuaug.RandomResizedCrop(32), backend="kornia")
    source = gpuaug.FolderSource(root) if isinstance(root, Path) else root
    return gpuaug.Loader(source, augment=augment, batch_size=4, device="cpu", **{"num_workers": 2, **settings})


def children():
    """Of this process and of the server whose forks run the programs below."""
    return {*tree(forked.server()[1].pid)[1:], *tree(os.getpid())[1:]}  # in this order: it may start only now


def until(reached, patience=60.0):
    """Whether it comes true in time."""
    deadline = time.monotonic() + patience
    while not reached():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def nothing_left():
    """Processes are afterwards as before."""
    before = children()
    yield
    assert until(lambda: not children() - before), children() - before


def start(code, *args):
    pipe = subprocess.PIPE
    command = forked.code(BUILD + textwrap.dedent(code), *args)
    return forked.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def indices(batches, steps=None):
    seen = []
    for step, batch in enumerate(batches, start=1):
        seen += batch.indices.tolist()
        if step == steps:
            break
    return seen


def test_a_killed_worker_is_an_error_from_which_one_goes_on(photos, nothing_left):
    others = set(multiprocessing.active_children())
    with build(photos, prefetch=1) as loader:  # a timeout of 120 s
        batches = iter(loader)
        seen = indices(batches, 2)
        os.kill(min(worker.pid for worker in set(multiprocessing.active_children()) - others), signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(gpuaug.ReadError, match="killed by signal 9") as info:
            for batch in batches:
                seen += batch.indices.tolist()
        assert time.monotonic() - begin < 100
        assert "num_workers" in str(info.value) or "memory" in str(info.value)
        loader.load_state_dict(loader.state_dict())
        seen += indices(loader)
    assert sorted(seen) == list(range(65))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_interrupted(photos, how, nothing_left):
    code = """
        loader = build(sys.argv[1])
        for epoch in range(10**6):
            for batch in loader:
                print(epoch, flush=True)
                time.sleep(0.02)
    """
    process = start(code, photos)
    assert process.stdout.readline()
    workers = tree(process.pid)[1:]
    assert len(workers) >= 2
    process.send_signal(how)
    _, error = process.communicate(timeout=100)
    if how == signal.SIGINT:
        assert "KeyboardInterrupt" in error
    assert ended(workers)


def test_a_script_that_ends_while_threads_decode(photos, nothing_left):
    code = """
        passes = [iter(build(sys.argv[1], num_workers=0, prefetch=99)) for _ in range(3)]
        for batches in passes:
            next(batches)
        1 / 0
    """
    _, error = start(code, photos).communicate(timeout=100)
    assert error.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.skipif((3, 12) <= sys.version_info < (3, 12, 2), reason="these versions of Python refuse new threads then")
def test_a_thread_that_trains_after_the_main_thread_has_ended(photos, nothing_left):
    code = """
        import threading

        def train():
            print(sum(len(batch.images) for batch in loader))

        loader = build(sys.argv[1], decode=gpuaug.Decode(backend="pillow", num_threads=2))
        threading.Thread(target=train).start()
    """
    assert start(code, photos).communicate(timeout=100) == ("65\n", "")


def test_few_descriptors(photos, nothing_left):
    """In forks of a process that has only imported."""
    code = """
        import resource
        gpuaug.Loader, gpuaug.Augment, gpuaug.FolderSource
        for limit in map(int, sys.argv[2:]):
            if os.fork():
                os.wait()
                continue
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            try:
                with build(sys.argv[1], num_workers=2) as loader:
                    kept = [batch for batch in loader]
                print("done", len(kept))
            except gpuaug.GpuaugError as error:
                print("error", error)
            break
    """
    limits = (64, 30, 14)
    process = start(code, photos, *limits)
    out, error = process.communicate()
    said = out.splitlines()
    assert len(said) == len(limits), (out, error[-2000:])
    for limit, line in zip(limits, said, strict=True):
        assert line.startswith("done 17") or ("error" in line and "ulimit" in line), (limit, line, error[-2000:])


def test_workers_need_no_shared_memory_file_system(photos, nothing_left):
    """Containers may have a /dev/shm of any size, also one that is smaller than the index."""
    code = """
        if __name__ == "__main__":
            with build(sys.argv[1], start_method="spawn") as loader:
                print("done", sum(len(batch) for batch in loader))
    """
    mount = 'mount -t tmpfs -o size=4k tmpfs /dev/shm && echo full > /dev/shm/full && exec "$@"'
    prefix = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    if subprocess.run([*prefix, "true"], capture_output=True).returncode != 0:
        pytest.skip("no right to mount a small /dev/shm")
    command = [*prefix, sys.executable, "-c", BUILD + textwrap.dedent(code), str(photos)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert (done.returncode, done.stdout) == (0, "done 65\n"), done.stderr[-2000:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_forked_ranks_use_the_loader_of_their_parent_if_no_batch_was_made_before(photos, num_workers):
    code = f"""
    import multiprocessing

    def rank():
        try:
            said = sum(len(batch.images) for batch in loader)
        except gpuaug.GpuaugError as error:
            said = "which then forked" in str(error)
        os.write(1, f"{{said}}\\n".encode())  # two processes: `print` may write a line in two pieces

    def ranks():
        started = [multiprocessing.get_context("fork").Process(target=rank) for _ in range(2)]
        for each in started:
            each.start()
        for each in started:
            each.join(60)
            each.kill()

    loader = build(sys.argv[1], num_workers={num_workers})
    ranks()
    batches = iter(loader)
    first = len(next(batches).images)
    ranks()
    print(first + sum(len(batch.images) for batch in batches))
    """
    lines = start(code, photos).communicate(timeout=120)[0].splitlines()
    count = str(len(gpuaug.FolderSource(photos)))
    assert lines == [count, count, "True", "True", count]


def test_a_forked_child_cannot_go_on_with_an_iterator_of_its_parent(photos):
    code = """
    batches = iter(build(sys.argv[1], num_workers=0))
    next(batches)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sum(1 for batch in batches))
    else:
        signal.alarm(20)
        try:
            next(batches)
        except gpuaug.GpuaugError as error:
            os._exit(7 if "fork" in str(error) else 8)
    """
    assert start(code, photos).communicate(timeout=100) == ("7 16\n", "")


@pytest.mark.parametrize("how", ["del batches, loader", "loader.close()", "sys.exit()"])
def test_a_forked_child_that_drops_the_loader_of_its_parent_ends(photos, how):
    code = f"""
        loader = build(sys.argv[1], num_workers=1, prefetch=0)
        batches = iter(loader)
        next(batches)
        if not (child := os.fork()):
            signal.alarm(20)
            {how}
            sys.exit()
        print(os.waitpid(child, 0)[1], sum(1 for batch in batches))
    """
    assert start(code, photos).communicate(timeout=100) == ("0 16\n", "")


@pytest.mark.skipif("forkserver" not in METHODS, reason="needs forkserver")
def test_workers_of_a_forkserver_end_with_a_killed_process(photos):
    """Their parent, the forkserver, lives as long as they do."""
    code = """
    import multiprocessing
    multiprocessing.set_forkserver_preload(["torch.utils.data"])  # once for both workers
    if __name__ == "__main__":
        loader = build(sys.argv[1], start_method="forkserver")
        batches = iter(loader)
        next(batches)
        print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
        time.sleep(300)
    """
    process = start(code, photos)
    workers = [int(pid) for pid in process.stdout.readline().split()]
    process.kill()
    process.communicate()
    assert len(workers) == 2
    assert ended(workers)


class Failing:
    """A source whose samples 1 and 2 raise these errors."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.good = errors, encode(photograph())

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> tuple[bytes, int]:
        if 0 < i <= len(self.errors):
            raise self.errors[i - 1]
        return self.good, i


@pytest.mark.parametrize("num_workers", [0, 1])
def test_memory_that_runs_out_for_a_sample_is_its_fault(num_workers):
    """Its text, and that of every other error, cannot control a terminal."""
    source = Failing(MemoryError(), OSError("no \x1b[2J\x07\u202e file"))
    recipe, faults = gpuaug.Augment(crop=gpuaug.Resize((8, 8))), gpuaug.Faults(policy="blank")
    settings = {"augment": recipe, "batch_size": 4, "shuffle": False, "num_workers": num_workers, "device": "cpu"}
    with gpuaug.Loader(source, faults=faults, **settings) as loader:
        (batch,) = loader
        assert batch.valid.tolist() == [True, False, False, True]
    source.errors = source.errors[::-1]
    with gpuaug.Loader(source, **settings) as loader, pytest.raises(gpuaug.DataError) as caught:
        next(iter(loader))
    assert r"no \x1b[2J\x07\u202e file" in str(caught.value)
    assert caught.value.reason in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).reason == caught.value.reason


def test_messages_have_no_control_characters():
    text = "".join(map(chr, range(0x3000)))
    for shown in (str(gpuaug.SourceError(text)), gpuaug.batch.Fault(0, "read", text).reason):
        assert not any(unicodedata.category(c) in ("Cc", "Zl", "Zp") for c in shown.replace("\n", ""))


def test_a_full_disk_does_not_end_the_run(tmp_path, caplog):
    """The file may have 150 bytes, which is less than two records."""
    faults = gpuaug.Faults(policy="blank", file=tmp_path / "bad.jsonl")
    bad = [gpuaug.batch.Fault(row, "read", "gone") for row in range(3)]
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150, hard))
    try:
        for epoch in range(2):
            faults.handle(bad, indices=[0, 1, 2], epoch=epoch, key_of=str)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert caplog.text.count("`faults.file` cannot be written") == 1
    faults.handle(bad, indices=[0, 1, 2], epoch=2, key_of=str)
    lines = [json.loads(line)["key"] for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert lines == ["0", "1", "2"]  # when there is space again, the missing ones follow
