"""Every notebook runs from top to bottom, and is committed with its output."""

from __future__ import annotations

import copy
import os
import re
import runpy
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT, TORCHVISION

nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FIRST = "compose_augmentations"  # the others take up to two minutes each
PARAMETERS = [pytest.param(p, id=p.stem, marks=() if p.stem == FIRST else pytest.mark.long) for p in NOTEBOOKS]


def pictures(notebook: nbformat.NotebookNode) -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum(any(kind.startswith("image/") for kind in output.get("data", {})) for output in outputs)


@pytest.mark.parametrize("path", PARAMETERS)
def test_notebook_runs_and_shows_what_is_committed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(FOLDER.parent), str(TORCHVISION), os.environ.get("PYTHONPATH", "")])
    )
    committed = nbformat.read(path, as_version=4)
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=900, startup_timeout=300, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    client.execute()  # raises CellExecutionError with the cell and its traceback
    assert pictures(notebook) == pictures(committed)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_as_executed_once_and_small(path: Path) -> None:
    committed = nbformat.read(path, as_version=4)
    assert path.stat().st_size < 700_000
    cells = [cell for cell in committed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    said = [o.get("text", "") + str(o.get("data", {}).get("text/plain", "")) for o in outputs]
    assert not re.search(r"(?:^|[\s'\"=])/(?:tmp|var|home|root|Users)/", "\n".join(said))  # paths of somebody's machine
    stripped = copy.deepcopy(committed)
    runpy.run_path(str(FOLDER.parent / "bench" / "notebooks.py"))["strip"](stripped)
    assert stripped == committed  # executed by `make notebooks`
    links = re.findall(r"\]\(([^)#:]+\.ipynb)\)", "\n".join(c.source for c in committed.cells))
    assert all((FOLDER / link).exists() for link in links)


def test_there_are_notebooks() -> None:
    assert FIRST in [path.stem for path in NOTEBOOKS]
