"""A process that works on numbered inputs, and the process that watches it: every death and every hang is an answer.

Without torch, because a child is started anew after each death.
"""

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

HANG = 600.0  # seconds of the clock


# -- the process that works


def say(what: dict) -> None:
    """A line for the process that watches."""
    os.write(ANSWERS, json.dumps(what).encode() + b"\n")


def serve(jobs: Callable[[str], Any]) -> None:
    """Answer each line of numbers with what became of them, the processor time, and the memory.

    ``jobs`` gives the job with these settings.
    """
    say({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        job = jobs(asked["settings"])
        Path("/proc/self/clear_refs").write_text("5")  # begins the peak of memory anew
        before, began, error, verdicts = memory("VmRSS"), time.process_time(), "", {}
        try:
            verdicts = job.check(asked["numbers"], alone=asked["alone"])
        except Exception as e:
            error = f"{type(e).__name__}: {e}"[:300]
        answer = {"verdicts": verdicts, "cpu": time.process_time() - began, "peak": memory("VmHWM"), "promised": 0}
        answer["more"] = answer["peak"] - before
        if not error and hasattr(job, "promised"):
            answer["promised"] = job.promised()
            if answer["more"] > answer["promised"]:
                error = f"memory of {answer['more'] >> 20} MiB, and {answer['promised'] >> 20} were promised"
        say(answer | {"error": error})


def memory(name: str) -> int:
    """Bytes; not getrusage's peak, which begins with that of the process that started this one."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


# -- the process that watches


class Child:
    """A process that answers; started when it is asked."""

    def __init__(self, script: str, *options: str, hang_cpu: float) -> None:
        self.hang_cpu = hang_cpu
        self.command = [sys.executable, script, *options, "--serve"]
        self.process, self.started = None, 0
        self.folder = tempfile.TemporaryDirectory()

    def ask(self, numbers: Sequence[int], *, settings: str, alone: bool = False) -> dict:
        """Its answer, with ``error`` set if it died or hung, and ``at`` to the number that it had come to."""
        if self.process is None:
            self._start()
        last: dict = {}
        try:
            asked = {"numbers": list(numbers), "settings": settings, "alone": alone}
            self.process.stdin.write(json.dumps(asked).encode() + b"\n")
            self.process.stdin.flush()
            for line in self._lines():
                if "verdicts" in line:
                    return line | {"verdicts": {int(k): v for k, v in line["verdicts"].items()}}
                last = line
            what = f"death: exit code {self.process.wait(60)}: {self._said()}"
        except BrokenPipeError:
            what = f"death: exit code {self.process.wait(60)}: {self._said()}"
        except TimeoutError as error:
            what = str(error)
        self.close()
        return {"verdicts": {}, "error": what, "cpu": 0.0, "peak": 0, "more": 0, "promised": 0, "at": last.get("at")}

    def close(self) -> None:
        """End it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()
            self.process.stdout.close()
            self.errors.close()
            self.process = None

    def _start(self) -> None:
        """In a folder that goes with this object."""
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by close; a full pipe would hold the process
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen(self.command, bufsize=0, cwd=self.folder.name, **pipes)
        self.started += 1
        if next(self._lines(), {}).get("ready") is None:
            raise SystemExit(f"the decoding process cannot work: {self._said()}")

    def _said(self) -> str:
        self.errors.seek(0)
        return self.errors.read().decode(errors="replace")[-300:]

    def _lines(self) -> Iterator[dict]:
        buffer, begin, cpu = b"", time.monotonic(), self._cpu()
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while True:
                if selector.select(1.0):
                    if not (more := os.read(self.process.stdout.fileno(), 1 << 16)):
                        return
                    *lines, buffer = (buffer + more).split(b"\n")
                    for line in lines:
                        yield json.loads(line)
                        begin, cpu = time.monotonic(), self._cpu()
                elif self._cpu() - cpu > self.hang_cpu or time.monotonic() - begin > HANG:
                    raise TimeoutError(f"hang: no answer in {self._cpu() - cpu:.0f} s of processors")

    def _cpu(self) -> float:
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


ANSWERS = 1
if "--serve" in sys.argv:  # what decoders print is no answer
    ANSWERS = os.dup(1)
    os.dup2(2, 1)
