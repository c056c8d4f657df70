"""A quick run of a bench script, as its report."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from conftest import ROOT


def quick(script: str, folder: Path, *more: str) -> Any:
    """The report of ``bench/SCRIPT --quick``, whose files are in ``folder``."""
    file = folder / "report.json"
    command = [sys.executable, str(ROOT / "bench" / script), "--quick", "--data", str(folder), "--json", str(file)]
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=1800, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())
