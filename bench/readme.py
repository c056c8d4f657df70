"""Prints the tables of the scripts in bench/, and writes them into bench/README.md."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any


def processor() -> str:
    """Name of this machine's processor."""
    file = Path("/proc/cpuinfo")
    for line in file.read_text().splitlines() if file.exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine(device: str) -> dict[str, Any]:
    """What a report says of this run: processor, threads, device, date, load, and versions of torch and Kornia."""
    import torch

    return {
        "processor": processor(), "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device != "cpu" else "cpu",
        "date": datetime.date.today().isoformat(), "load": os.getloadavg()[0],
        "versions": {name: version(name) for name in ("torch", "kornia")},
    }  # fmt: skip


def headline(report: dict[str, Any]) -> str:
    """The sentence above a table of milliseconds per batch, from :func:`machine`."""
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    return (
        f"{report['processor']}, {report['threads']} threads, device {report['device']}, {report['date']}, load "
        f"{report['load']:.1f}; {versions}. Milliseconds per batch"
        f"{' (processor time of all threads)' if report['device'] == 'cpu' else ''}."
    )


def put(readme: Path, script: str, text: str) -> None:
    """Replace the text between a script's marks."""
    begin, end = f"<!-- {script} -->", f"<!-- end of {script} -->"
    before, mark, rest = readme.read_text(encoding="utf-8").partition(begin)
    _, last, after = rest.partition(end)
    if not mark or not last:
        raise SystemExit(f"{readme} has no {begin} … {end}.")
    readme.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def add_arguments(parser: argparse.ArgumentParser, kept: str = "") -> None:
    """Add the arguments that most scripts share: ``--json``, ``--table`` and ``--readme``."""
    parser.add_argument("--json", type=Path, help=f"FILE for the figures{kept}")
    parser.add_argument("--table", type=Path, help="FILE of an earlier --json: print its table, measure nothing")
    parser.add_argument("--readme", type=Path, help="with --table: README to write it into")


def show(args: argparse.Namespace, script: str, table: Callable[[Any], str]) -> bool:
    """If ``--table`` is given, print the table of this earlier run, and write it into ``--readme``."""
    if args.table is None:
        return False
    text = table(json.loads(args.table.read_text()))
    print(text)
    if args.readme is not None:
        put(args.readme, script, text)
    return True
