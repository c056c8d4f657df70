"""Tables in bench/README.md, each between the marks of the script that makes it."""

from __future__ import annotations

from pathlib import Path


def put(readme: Path, script: str, text: str) -> None:
    """Replace what stands between the marks of a script."""
    begin, end = f"<!-- {script} -->", f"<!-- end of {script} -->"
    before, mark, rest = readme.read_text(encoding="utf-8").partition(begin)
    _, last, after = rest.partition(end)
    if not mark or not last:
        raise SystemExit(f"{readme} has no {begin} … {end}.")
    readme.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
