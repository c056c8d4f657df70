"""Execute the notebooks in place, and print the seconds of each: `make notebooks`.

    python bench/notebooks.py [NAME ...]

A notebook is written only if all its cells ran without an error or a warning. Names of this machine are removed:
temporary folders become DIR, the repository's path becomes a dot, and only the kernel stays in the metadata. If Pillow
returns a picture as PNG and JPEG, only the JPEG is kept, which is many times smaller.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
TEMPORARY = re.compile(rf"(?:{'|'.join({re.escape(tempfile.gettempdir()), '/tmp', '/var/tmp'})})/tmp\w+")


def without_machine(text: str) -> str:
    """``text`` without temporary folders and the path of this repository."""
    return TEMPORARY.sub("DIR", text).replace(str(ROOT), ".")


def strip(notebook: nbformat.NotebookNode) -> None:
    """Remove names of this machine and PNG copies of pictures, in place."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        for output in cell.get("outputs", []):
            if "text" in output:
                output.text = without_machine(output.text)
            if "image/jpeg" in output.get("data", {}):
                output.data.pop("image/png", None)
            for kind, value in output.get("data", {}).items():
                if kind.startswith("text/"):
                    output.data[kind] = without_machine(value)


def execute(path: Path) -> float:
    """Run one notebook and write it back. Returns the seconds, with the start of its kernel."""
    notebook = nbformat.read(path, as_version=4)
    begin = time.perf_counter()
    NotebookClient(
        notebook,
        timeout=900,
        startup_timeout=300,
        kernel_name="python3",
        coalesce_streams=True,
        record_timing=False,
        resources={"metadata": {"path": str(FOLDER)}},
    ).execute()
    seconds = time.perf_counter() - begin
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                raise SystemExit(f"{path.name}: cell {number} wrote to stderr, so nothing was written: {output.text}")
    strip(notebook)
    part = path.with_suffix(".part")
    nbformat.write(notebook, part)
    part.replace(path)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="notebooks, as compose_augmentations; none: all")
    names = parser.parse_args().names
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    for path in [FOLDER / f"{name}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb")):
        print(f"{path.stem:28}{execute(path):6.1f} s", flush=True)


if __name__ == "__main__":
    main()
