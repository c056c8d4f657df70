"""The site: it builds without a warning, and its reference has every public name."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
import tomllib
import zlib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from browser import CHROMIUM, browser
from conftest import ROOT
from PIL import Image
from test_docs import PUBLIC

import gpuaug
from gpuaug.tools.preview.controls import examples

REFERENCE = ROOT / "docs/reference"
PAGES = {page.name: page.read_text(encoding="utf-8") for page in sorted(REFERENCE.glob("*.md"))}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the site, built as ``make docs`` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "--strict" in (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ndocs:")[2].partition("\n\n")[0]
    return folder


def test_every_public_name_has_a_page_of_the_reference() -> None:
    assert {page for _, page in gpuaug.PUBLIC.values()} == {Path(name).stem for name in PAGES}


def test_the_site_has_an_entry_of_every_public_member(site: Path) -> None:
    """Read from the list of names that other projects' documentation links to."""
    options = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    (handler,) = (
        plugin["mkdocstrings"]["handlers"]["python"] for plugin in options["plugins"] if "mkdocstrings" in plugin
    )
    hidden = re.compile("|".join(pattern.removeprefix("!") for pattern in handler["options"]["filters"]))
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    entries = {line.split()[0]: line.split()[3] for line in zlib.decompress(inventory).decode().splitlines()}
    expected = {f"gpuaug.{name}" for name in PUBLIC if not hidden.search(name.partition(".")[2])}
    assert sorted((expected | {"gpuaug.Augment.forward"}) - entries.keys()) == []
    for name in expected:
        page, _, anchor = entries[name].partition("#")
        assert f'id="{anchor.replace("$", name)}"' in (site / page / "index.html").read_text(encoding="utf-8"), name


def test_the_site_shows_no_markup_of_docstrings(site: Path) -> None:
    for page in PAGES:
        html = (site / "docs/reference" / Path(page).stem / "index.html").read_text(encoding="utf-8")
        text = re.sub(r"<[^>]+>", "", html)
        assert re.findall(r".*(?::(?:class|meth|func|mod|attr|data):|``|::$).*", text, re.MULTILINE) == []
        assert "<blockquote>" not in html  # `>>>` outside a block of code


def test_lists_and_tables_are_rendered(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = re.sub(r"<(pre|script)\b.*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert re.findall(r"^(?:<p>)?(?:- |\|).*", text, re.MULTILINE) == [], page


def test_pages_load_nothing_from_other_servers(site: Path) -> None:
    for page in site.rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        assert re.findall(r"""<(?:script|img|link)[^>]*(?:src|href)=["']?https?:[^>]*>""", html) == [], page


def test_every_file_that_a_page_loads_is_in_the_site(site: Path) -> None:
    """Without the theme's stylesheets a page is a list of links and very large icons."""
    styles = 0
    for page in site.rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        for kind, name in re.findall(r"""<(script|img|link)[^>]*?\s(?:src|href)="?([^">\s]+)""", html):
            if not name.startswith(("data:", "http")):
                path = site / name.lstrip("/") if name.startswith("/") else page.parent / name
                assert path.resolve().exists(), f"{page}: {name}"
                styles += kind == "link" and name.endswith(".css")
    assert styles > 0


def test_every_configuration_file_is_in_the_site(site: Path) -> None:
    shown = (site / "docs/reference/configuration/index.html").read_text(encoding="utf-8")
    recipes = (site / "docs/recipes/index.html").read_text(encoding="utf-8")
    for path in (ROOT / "conf/gpuaug").rglob("*.yaml"):
        name = path.relative_to(ROOT).with_suffix("").as_posix()
        listed = (
            f'id="{path.stem}"' in recipes if path.parent.name == "augment" else f'href="../../../{name}/"' in shown
        )
        assert listed, f"{name}.yaml is missing. Add a link to docs/reference/configuration.md."
        assert (site / name / "index.html").exists()


def test_every_recipe_and_operation_has_a_picture(site: Path) -> None:
    recipes = {path.stem for path in (ROOT / "conf/gpuaug/augment").glob("*.yaml")}
    for kind, names in (("recipes", recipes), ("operations", set(examples()))):
        page = (site / "docs" / kind / "index.html").read_text(encoding="utf-8")
        assert set(re.findall(rf'src="\.\./pictures/{kind}/(\w+)\.webp"', page)) == names
        for name in names:
            with Image.open(site / "docs/pictures" / kind / f"{name}.webp") as picture:
                assert picture.width > 200
                levels = np.asarray(picture.convert("L"))
                assert levels.std() > 10
    with Image.open(site / "docs/pictures/operations/invert.webp") as picture:
        before, *after = (np.asarray(picture)[8:130, x : x + 150].astype(int) for x in (10, 178, 346, 514))
    assert all(np.abs(255 - before - each).mean() < 12 for each in after)


async def look(site: str, width: int) -> list[tuple[str, Any]]:
    """For each of some pages: its first heading, the width of its content, and pictures that did not load."""
    seen = []
    async with browser(width) as tab:
        for page in ("", "docs/start/", "docs/recipes/", "docs/operations/", "docs/guide/", "docs/reference/loader/"):
            await tab.call("Page.navigate", url=f"{site}{page}")
            await tab.until("document.readyState === 'complete' && document.querySelector('h1') !== null")
            code = "[...document.images].filter((x) => x.loading !== 'lazy' && !(x.complete && x.naturalWidth)).length"
            missing = await tab.value(code)
            wide = await tab.value("document.documentElement.scrollWidth")
            seen.append((await tab.value("document.querySelector('h1').innerText"), wide, missing))
    return seen


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_browser(width: int, site: Path) -> None:
    """Pages fit the window, and every picture loads."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        seen = asyncio.run(look(f"http://127.0.0.1:{server.server_port}/", width))
        server.shutdown()
    headings = ["gpuaug", "From a folder to a trained model", "Recipes", "Operations", "Guide", "Loader"]
    assert [name.rstrip("¶") for name, *_ in seen] == headings
    assert all(wide <= width and not missing for _, wide, missing in seen), seen


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Log no requests."""


def test_the_workflow_runs_what_the_makefile_has() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    runs = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in workflow["jobs"].items()}
    assert runs["lint"] == ["make lint"]
    assert runs["test"] == ["make test"]
    assert runs["docs"] == ["make docs"]
    assert runs["build"][1:] == ["python -m build", "python -m twine check --strict dist/*"]
    assert runs["wheels"][1:] == ["python -m cibuildwheel --output-dir dist"]
    assert "python tests/levels.py" in runs["without-a-compiler"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [
        c.rpartition(" ")[2] for c in project["classifiers"] if c.startswith("Programming Language :: Python :: 3.")
    ]
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == named


def test_the_citation_and_the_issue_forms_are_valid() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == gpuaug.__version__
    assert {"cff-version", "message", "title", "authors", "license"} <= citation.keys()  # the format's required keys
    for name in ("bug", "gpu", "question"):
        form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= form.keys()
        assert any("gpuaug doctor" in part["attributes"]["label"] for part in form["body"])
