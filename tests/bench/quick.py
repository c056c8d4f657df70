"""A quick run of a bench script, as its report; its contestants need not import torch first."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked

ROOT = Path(__file__).resolve().parent.parent.parent


def quick(script: str, folder: Path, *more: str) -> Any:
    """The report of ``bench/SCRIPT --quick``, whose files are in ``folder``."""
    file = folder / "report.json"
    command = [sys.executable, __file__, script, "--quick", "--data", str(folder), "--json", str(file)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = forked.run([*command, *more], timeout=1800, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


def popen(command: Any, **how: Any) -> Any:
    """Starts contestants from the server, and everything else as ever."""
    ours = command[0] == sys.executable and command[1].endswith("contestants.py")
    return (forked.Popen if ours else forked.SYSTEM)(command, **how)


if __name__ == "__main__":
    subprocess.Popen = popen  # type: ignore[misc, assignment]
    sys.argv[:] = sys.argv[1:]
    sys.path.insert(0, str(ROOT / "bench"))
    runpy.run_path(str(ROOT / "bench" / sys.argv[0]), run_name="__main__")
