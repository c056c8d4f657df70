"""Programs that run in copies of a process that has imported torch, Kornia, DALI and gpuaug: each saves seconds.

And the start methods of workers: those of a forkserver find torch imported too.
"""

import atexit
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

METHODS = multiprocessing.get_all_start_methods()
if "forkserver" in METHODS:
    multiprocessing.set_forkserver_preload(["torch.utils.data"])


def started_by(method):
    """Settings of a reader: two workers, but one where each of them imports torch for itself."""
    return {"num_workers": 1 if method == "spawn" else 2, "start_method": method}


# Gets lines of JSON and answers with a number each: the pid of a new copy, or how an old one ended. The code of a copy
# runs at the top level, so that errors, interrupts and the end of the process are as in any program.
ORIGINAL = """
import contextlib, json, os, socket, sys
import kornia.augmentation, torch
import gpuaug
gpuaug.Loader, gpuaug.Augment, gpuaug.FolderSource
with contextlib.suppress(ImportError):
    import nvidia.dali.fn, nvidia.dali.pipeline

asked, line, streams, request = socket.socket(fileno=int(sys.argv[1])), b"", [], None
while True:
    data, more, _, _ = socket.recv_fds(asked, 1 << 16, 3)
    line, streams = line + data, [*streams, *more]
    if not data:
        os._exit(0)
    if not line.endswith(b"\\n"):
        continue
    request = json.loads(line)
    if isinstance(request, int):
        answer = os.waitstatus_to_exitcode(os.waitpid(request, 0)[1])
    elif not (answer := os.fork()):
        break
    for stream in streams:
        os.close(stream)
    asked.sendall(b"%d\\n" % answer)
    line, streams = b"", []
asked.close()
for at, stream in enumerate(streams):
    os.dup2(stream, at)
    os.close(stream)
os.environ.clear()
os.environ.update(request["environment"])
sys.argv[1:] = request["args"]
exec(compile(request["code"], "<string>", "exec"))
"""


class Copy:
    """One of them, with the parts of :class:`subprocess.Popen` that tests use."""

    def __init__(self, code, *args, **environment):
        self.returncode = None
        ends = [os.pipe() for _ in range(3)]
        theirs = ends[0][0], ends[1][1], ends[2][1]
        request = {"code": code, "args": [str(each) for each in args], "environment": {**os.environ, **environment}}
        self.pid = _answer(request, theirs)
        for end in theirs:
            os.close(end)
        self.stdin, self.stdout, self.stderr = (os.fdopen(ends[k][k == 0], "rw"[k == 0]) for k in range(3))

    def send_signal(self, what):
        if self.returncode is None:  # else the number may be another process's
            os.kill(self.pid, what)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout=300):
        """How it ended. It is killed if that takes longer."""
        if self.returncode is None:
            try:
                self.returncode = _answer(self.pid, timeout=timeout)
            except TimeoutError:
                self.kill()
                self.returncode = int(_started()[1].recv(99))
                raise subprocess.TimeoutExpired("a copy", timeout) from None
        return self.returncode

    def communicate(self, timeout=300):
        """What it writes until it ends, to stdout and to stderr."""
        with suppress(BrokenPipeError):
            self.stdin.close()
        with ThreadPoolExecutor(2) as threads:
            written = [threads.submit(stream.read) for stream in (self.stdout, self.stderr)]
            self.wait(timeout)
            return tuple(each.result(timeout) for each in written)


def original():
    """Number of the process that they are copies of."""
    return _started()[0].pid


@cache
def _started():
    ours, its = socket.socketpair()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-c", ORIGINAL, str(its.fileno())]
    process = subprocess.Popen(command, pass_fds=[its.fileno()], env=environment)
    its.close()
    atexit.register(process.wait)
    atexit.register(process.kill)  # the last that is registered is the first that is called
    return process, ours


def _answer(request, streams=(), timeout=None):
    asked = _started()[1]
    asked.settimeout(None)
    socket.send_fds(asked, [json.dumps(request).encode() + b"\n"], streams)
    asked.settimeout(timeout)
    return int(asked.recv(99))
