"""Python programs that need not import torch first, which takes seconds of each.

A server imports what the programs import, and computes nothing. Each program is a fork of it, which then runs as
``python FILE``, ``python -m MODULE`` or ``python -c CODE`` does. Not for tests of what a program imports. What reads an
environment variable while torch is imported reads the server's.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

IMPORTS = [
    "torch.distributed.run", "kornia.augmentation", "gpuaug.loader.loader", "gpuaug.tools.main",
    "gpuaug.tools.train.command", "nvidia.dali.fn", "nvidia.dali.pipeline",
]  # fmt: skip
REQUESTS = "FORKED_REQUESTS"  # the variable that tells a program its descriptor of the server's socket
PIPE, DEVNULL, SYSTEM = subprocess.PIPE, subprocess.DEVNULL, subprocess.Popen  # a test may put popen in its place


# -- in the tests


class Popen(subprocess.Popen):
    """As that of ``subprocess``, for a command that begins with this Python. It is killed when this process ends."""

    def _execute_child(self, *given: Any) -> None:
        how = inspect.signature(super()._execute_child).bind(*given).arguments  # type: ignore[misc]
        python, *words = map(str, how["args"])
        assert python == sys.executable
        environment = dict(os.environ if how["env"] is None else how["env"])
        request = words, environment, str(how["cwd"] or Path.cwd()), bool(how["start_new_session"])
        pipes = [how[end] for end in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        streams = [number if end == -1 else end for number, end in enumerate((pipes[0], pipes[3], pipes[5]))]
        requests = server()[0]
        self._answers, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            descriptors = [*streams, theirs.fileno(), requests.fileno()]
            socket.send_fds(requests, [json.dumps(request).encode()], descriptors)
        self.pid = int(self._answers.recv(99))
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            if self._answers.fileno() < 0:  # a wait that was interrupted has read the answer
                self.returncode = -1
                return self.returncode
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(self._answers.recv(99))
            self._answers.close()
        return self.returncode

    def _internal_poll(self, **_: Any) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self._wait(0.0)
        return self.returncode


if not hasattr(os, "pidfd_open"):  # not Linux: each program imports for itself
    Popen = subprocess.Popen  # type: ignore[misc, assignment]


def popen(command: Sequence[str], **how: Any) -> Any:
    """In the place of ``subprocess.Popen``, which still starts what is no program of this Python."""
    return (Popen if command[0] == sys.executable else SYSTEM)(command, **how)


def run(command: Sequence[str], *, timeout: float = 600.0, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as ``subprocess.run(command, capture_output=True, text=True)``."""
    with Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, text=True, **how) as process:
        try:
            out, errors = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def code(text: str, *arguments: Any) -> list[str]:
    """The command that runs these lines."""
    return [sys.executable, "-c", text, *map(str, arguments)]


@cache
def server() -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
    """Its socket and process. It ends when this process and all programs have ended."""
    if REQUESTS in os.environ:  # a program starts another
        return socket.socket(fileno=int(os.environ[REQUESTS])), None
    ours, its = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with its:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
        process = SYSTEM(
            [sys.executable, __file__, str(its.fileno())], pass_fds=[its.fileno()], env=environment,
            stdin=DEVNULL, stdout=DEVNULL, start_new_session=True,
        )  # fmt: skip
    return ours, process


# -- the server


def serve(requests: socket.socket) -> Any:
    """Fork for each request. Returns in the programs alone, with what to run."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the watchers
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 5)
        if not request:
            os._exit(0)
        if not os.fork():
            break
        for descriptor in descriptors:
            os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    requests.close()
    *streams, answers, requests_of_program = descriptors
    if pid := os.fork():
        for descriptor in (*streams, requests_of_program):
            os.close(descriptor)
        watch(pid, socket.socket(fileno=answers))
    os.close(answers)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    words, environment, *how = json.loads(request)
    return words, {**environment, REQUESTS: str(requests_of_program)}, *how


def watch(pid: int, answers: socket.socket) -> None:
    """Say how a program ends. Kill it if nobody is left who wants to know."""
    with suppress(OSError):
        answers.send(b"%d" % pid)
        process = os.pidfd_open(pid)
        if process not in select.select([process, answers.fileno()], [], [])[0]:
            os.kill(pid, signal.SIGKILL)
        answers.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def main() -> None:
    """Import, serve, and in each fork be the program."""
    for name in IMPORTS:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    words, environment, folder, session = serve(socket.socket(fileno=int(sys.argv[1])))
    if session:
        os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if "OMP_NUM_THREADS" in environment:
        sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
    kind = words.pop(0) if words[0] in ("-c", "-m") else ""
    name, *arguments = words
    sys.argv[:] = [kind or name, *arguments]
    first = {"-c": "", "-m": folder, "": str(Path(name).parent)}[kind]
    sys.path[:] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *sys.path[1:]]
    if kind == "-c":
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(name, "<string>", "exec"), vars(sys.modules["__main__"]))
    elif kind == "-m":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    main()
