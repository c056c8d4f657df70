"""Python programs in processes of their own that need not import torch first, which takes seconds of each.

A server imports what the programs import, and computes nothing. Each program is a fork of it, which then runs as
``python FILE``, ``python -m MODULE`` or ``python -c CODE`` does. Not for tests of what a program imports, nor of its
memory, and nothing that reads an environment variable while torch is imported sees the program's.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

ADDRESS = "WARM_ADDRESS"  # the server's socket, for the programs that start further ones
SERVER: list[Any] = []  # keeps the server, which ends when its standard input does
PIPE, DEVNULL, COLD = subprocess.PIPE, subprocess.DEVNULL, subprocess.Popen


# -- in the tests


@cache
def _address() -> str:
    """The socket of this process's server, which ends with it."""
    if ADDRESS in os.environ:
        return os.environ[ADDRESS]
    folder = tempfile.mkdtemp(prefix="warm")
    address = f"{folder}/socket"
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (root, *filter(None, sys.path))))}
    server = COLD([sys.executable, __file__, address], stdin=PIPE, stdout=PIPE, env=environment)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    SERVER.append(server)
    return address


class Popen:
    """A program, as :class:`subprocess.Popen` has it; ``command`` begins with this Python."""

    def __init__(
        self, command: Sequence[str], *, stdin: int | None = None, stdout: int | None = None, stderr: int | None = None,
        text: bool = False, errors: str = "strict", env: Any = None, cwd: Any = None, start_new_session: bool = False,
    ) -> None:  # fmt: skip
        assert command[0] == sys.executable
        self.returncode: int | None = None
        self._how: Any = {"errors": errors} if text else {"buffering": 0}
        self._read: dict[Any, Any] = {}  # of each stream, by its thread
        self._threads: list[threading.Thread] = []
        theirs: list[int] = []
        self.stdin, self.stdout, self.stderr = (
            self._stream(number, kind, theirs) for number, kind in enumerate((stdin, stdout, stderr))
        )
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(_address())
        environment = {**(os.environ if env is None else env), ADDRESS: _address()}
        program = [*command[1:]], environment, str(cwd or Path.cwd()), start_new_session
        socket.send_fds(self._connection, [b"program"], theirs)
        self._connection.sendall(json.dumps(program).encode() + b"\n")
        self._answers = self._connection.makefile()
        self.pid = int(self._answers.readline())
        for descriptor in theirs:
            os.close(descriptor)

    def _stream(self, number: int, kind: int | None, theirs: list[int]) -> Any:
        """Our end of standard stream ``number``, if it is a pipe; the program's goes to ``theirs``."""
        if kind == PIPE:
            reading, writing = os.pipe()
            theirs.append(writing if number else reading)
            mode = ("r" if number else "w") + ("" if "errors" in self._how else "b")
            return os.fdopen(reading if number else writing, mode, **self._how)
        theirs.append(os.open(os.devnull, os.O_RDWR) if kind == DEVNULL else os.dup(number if kind is None else kind))
        return None

    def poll(self) -> int | None:
        """The exit status, if there is one."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("", timeout or 0.0)
            self.returncode = int(self._answers.readline())
            self._answers.close()
            self._connection.close()
        return self.returncode

    def communicate(self, given: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
        """Give it that, and wait for what it says and for its end."""
        end = None if timeout is None else time.monotonic() + timeout

        def left() -> float | None:
            return None if end is None else max(0.0, end - time.monotonic())

        if self.stdin is not None and not self.stdin.closed:
            with suppress(BrokenPipeError), self.stdin:
                self.stdin.write(given)
        if not self._threads:
            for stream in filter(None, (self.stdout, self.stderr)):
                reader = threading.Thread(target=lambda s=stream: self._read.update({s: s.read()}), daemon=True)
                self._threads.append(reader)
                reader.start()
        for reader in self._threads:
            reader.join(left())
            if reader.is_alive():
                raise subprocess.TimeoutExpired("", timeout or 0.0)
        self.wait(left())
        return self._read.get(self.stdout), self._read.get(self.stderr)

    def send_signal(self, number: int) -> None:
        """As long as it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Popen:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()


def run(command: Sequence[str], *, timeout: float = 600.0, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as ``subprocess.run(command, capture_output=True, text=True)``."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = Popen(command, stdin=DEVNULL, stdout=out.fileno(), stderr=errors.fileno(), **how)
        try:
            process.wait(timeout)
        finally:
            process.kill()
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(command, process.wait(), out.read(), errors.read())


def popen(command: Sequence[str], **how: Any) -> Any:
    """In the place of ``subprocess.Popen``, which still starts what is no program of this Python."""
    return (Popen if command[0] == sys.executable else COLD)(command, **how)


if not hasattr(os, "pidfd_open"):  # not Linux: each program imports for itself
    Popen = subprocess.Popen  # type: ignore[misc, assignment]


# -- the server


def serve(address: str) -> tuple[list[str], dict[str, str], str, bool]:
    """Fork for each program. Returns in the forks alone, with what to run."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    running: dict[int, tuple[int, socket.socket]] = {}  # of a process's descriptor
    while True:
        ready = select.select([sys.stdin, listener, *running], [], [])[0]
        if sys.stdin in ready:  # its owner has ended
            for pid, _ in running.values():
                os.kill(pid, signal.SIGKILL)
            shutil.rmtree(Path(address).parent)
            os._exit(0)
        for descriptor in running.keys() & set(ready):
            pid, connection = running.pop(descriptor)
            os.close(descriptor)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with suppress(BrokenPipeError), connection:
                connection.sendall(f"{status}\n".encode())
        if listener in ready:
            connection = listener.accept()[0]
            descriptors = socket.recv_fds(connection, len(b"program"), 3)[1]
            with connection.makefile("rb") as lines:
                program = json.loads(lines.readline())
            pid = os.fork()
            if not pid:
                listener.close()
                connection.close()
                for descriptor, (_, other) in running.items():
                    os.close(descriptor)
                    other.close()
                for number, descriptor in enumerate(descriptors):
                    os.dup2(descriptor, number)
                    os.close(descriptor)
                return program  # type: ignore[no-any-return]
            for descriptor in descriptors:
                os.close(descriptor)
            running[os.pidfd_open(pid)] = pid, connection
            connection.sendall(f"{pid}\n".encode())


def main() -> None:
    """Import, serve, and in each fork be the program."""
    import gc

    import kornia.augmentation
    import torch

    import gpuaug.loader.loader
    import gpuaug.tools.main
    import gpuaug.tools.train.command

    assert kornia.augmentation
    assert gpuaug
    with suppress(ImportError):
        import nvidia.dali.fn

        assert nvidia
    gc.freeze()
    path = sys.path[1:]
    arguments, environment, folder, session = serve(sys.argv[1])
    if session:
        os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", torch.get_num_threads())))
    extra = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p]
    kind, *rest = arguments
    if kind in ("-c", "-m"):
        name, *rest = rest
        sys.path[:] = ["" if kind == "-c" else folder, *extra, *path]
        sys.argv[:] = [kind, *rest]
        if kind == "-m":
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            exec(compile(name, "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    else:
        sys.path[:] = [str(Path(kind).parent), *extra, *path]
        sys.argv[:] = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    main()
