"""What the site needs besides mkdocs: the repository's layout, pages made from files, docstrings as Markdown."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import site_pictures
from griffe import Extension
from mkdocs.structure.files import File, Files

import gpuaug
from gpuaug.tools.preview import controls

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "*.md", "docs/**/*.md", "bench/README.md", "bench/*.py", "examples/*.py", "conf/gpuaug/**/*.yaml",
    "notebooks/*.ipynb",
)  # fmt: skip
FILES = ("assets/*", "docs/*.css")


class Page(File):
    """A page, also if its file is no Markdown."""

    def is_documentation_page(self) -> bool:
        """Always."""
        return True


def on_files(files: Files, config: Any) -> Files:
    """Replace the files of docs/ by those of the repository, under the paths that they have there."""
    made = {
        path.relative_to(ROOT).as_posix(): (kind, str(path))
        for kind, patterns in ((Page, PAGES), (File, FILES))
        for pattern in patterns
        for path in sorted(ROOT.glob(pattern))
    }
    listed = [kind.generated(config, name, abs_src_path=path) for name, (kind, path) in made.items()]
    theme = [file for file in files if file.src_dir != config.docs_dir]  # stylesheets, scripts and the icon
    drawn = {"recipes": site_pictures.of_recipes(), "operations": site_pictures.of_operations()}
    listed += [
        File.generated(config, f"docs/pictures/{kind}/{name}.webp", content=picture)
        for kind, pictures in drawn.items()
        for name, picture in pictures.items()
    ]
    listed += [Page.generated(config, f"docs/{make.__name__}.md", content=make()) for make in (recipes, operations)]
    return Files([*theme, *listed])


def on_page_read_source(page: Any, config: Any) -> str | None:
    """Markdown of a page whose file is a program, YAML or a notebook; None for Markdown."""
    path = Path(page.file.src_uri)
    if path.suffix == ".md":
        return None
    text = page.file.content_string
    if path.suffix == ".ipynb":
        return notebook(json.loads(text))
    return f"# {path.as_posix()}\n\n{fenced(text, {'.py': 'python'}.get(path.suffix, 'yaml'))}\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Complete the pages of the reference. Let a list begin below a bold line, as on GitHub. Hide empty menus."""
    path = Path(page.file.src_uri)
    if path.parent.name == "reference":
        listed = re.findall(r"^::: gpuaug\.(\w+)$", markdown, re.MULTILINE)  # with options of their own
        names = [name for name, (_, where) in gpuaug.PUBLIC.items() if where == path.stem and name not in listed]
        markdown += groups() * (path.stem == "configuration") + "".join(f"\n::: gpuaug.{name}\n" for name in names)
    empty = {"navigation": page.parent is None, "toc": Path(page.file.src_uri).suffix in (".py", ".yaml")}
    page.meta["hide"] = [name for name, hidden in empty.items() if hidden]
    return re.sub(r"^(\*\*.+\*\*)\n- ", r"\1\n\n- ", markdown, flags=re.MULTILINE)


def fenced(text: str, language: str = "") -> str:
    """A block of code; ``language`` may be a list of classes in braces."""
    return f"````{language}\n{text.rstrip()}\n````"


def notebook(content: dict[str, Any]) -> str:
    """The cells of a notebook with their text and pictures."""
    parts = []
    for cell in content["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else fenced(source, "python"))
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            picture = next((kind for kind in data if kind.startswith("image/")), None)
            if picture:
                encoded = "".join(data[picture]).replace("\n", "")
                parts.append(f'<img alt="output of the code above" src="data:{picture};base64,{encoded}">')
            else:
                parts.append(fenced("".join(output.get("text") or data.get("text/plain", "")), "{ .text .output }"))
    return "\n\n".join(parts)


def recipes() -> str:
    """A page with every recipe: what its first lines say, and the file."""
    parts = [
        "# Recipes\n\nEvery file of `conf/gpuaug/augment`. Select one with `augment=NAME`. A picture shows an image "
        "with the crops of several epochs, and what training sees of it."
    ]
    for path in sorted((ROOT / "conf/gpuaug/augment").glob("*.yaml")):
        lines = path.read_text(encoding="utf-8").splitlines()
        first = next(k for k, line in enumerate(lines) if not line.startswith("#"))
        said = " ".join(line.lstrip("# ") for line in lines[:first])
        said = re.sub(r"arXiv:([\d.]+\d)", r"[arXiv:\1](https://arxiv.org/abs/\1)", said)
        body = "\n".join(f"    {line}".rstrip() for line in fenced("\n".join(lines[first:]), "yaml").splitlines())
        picture = f"![a photograph, and what {path.stem} makes of it](pictures/recipes/{path.stem}.webp)"
        parts.append(f'## {path.stem}\n\n{said}\n\n{picture}\n\n??? note "{path.stem}.yaml"\n\n{body}')
    return "\n\n".join(parts) + "\n"


def operations() -> str:
    """A page with a picture of every operation."""
    parts = [
        "# Operations\n\nWhat each operation does: a photograph, and four random draws in which it is applied "
        "(`p: 1`). A recipe takes these lines below `ops`; with `p: 0.5` the operation changes half of the images. "
        "What the arguments mean is in Kornia's documentation, and for gpuaug's own classes in the "
        "[reference](reference/operations.md)."
    ]
    for name, settings in controls.examples().items():
        kind = settings["_target_"].rpartition(".")[2]
        values = "".join(f", {key}: {json.dumps(value)}" for key, value in settings.items() if key != "_target_")
        line = fenced(f"{name}: {{_target_: {settings['_target_']}{values.replace(chr(34), '')}}}", "yaml")
        picture = f"![a photograph, and four draws of {kind}](pictures/operations/{name}.webp)"
        parts.append(f"## {kind}\n\n{picture}\n\n{line}")
    return "\n\n".join(parts) + "\n"


class Docstrings(Extension):
    """Turns what docstrings have for readers of the code into Markdown: roles, shared entries, examples."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring before it is parsed."""
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """A docstring with links for roles, one entry per argument, and its examples as a section."""
    text = re.sub(r":(?:class|meth|func|mod|attr|data):`~?([^`]+)`", link, text)
    text = re.sub(r"::\n\n", ":\n\n", text)  # before indented code
    # one entry for several names, such as ``rank, world_size: ...``, becomes one for each
    entry = re.compile(r"^( +)(\w+), (\w+(?:, \w+)*): (.*(?:\n\1 +.*)*)", re.MULTILINE)
    while found := entry.search(text):
        indent, first, others, said = found.groups()
        text = text[: found.start()] + f"{indent}{first}: {said}\n{indent}{others}: {said}" + text[found.end() :]
    return re.sub(r"(?:^(?:>>>|\.\.\.) ?.*\n?(?:^(?!>>>)\S.*\n?)*)+", examples, text, flags=re.MULTILINE)


def link(found: re.Match[str]) -> str:
    """A role as a link, or as code if it names something that the reference does not have."""
    name = re.sub(r"^gpuaug\.(errors\.|batch\.)?", "", found.group(1))
    return f"[`{name}`][gpuaug.{name}]" if name.partition(".")[0] in gpuaug.PUBLIC else f"`{found.group(1)}`"


def groups() -> str:
    """A table of the files of each configuration group."""
    rows = ["", "| group | files |", "|---|---|", "| `augment` | [all recipes](../recipes.md) |"]
    for folder in sorted(path for path in (ROOT / "conf/gpuaug").iterdir() if path.is_dir() and path.name != "augment"):
        files = [f"[{file.stem}](../../{file.relative_to(ROOT).as_posix()})" for file in sorted(folder.glob("*.yaml"))]
        rows.append(f"| `{folder.name}` | {', '.join(files)} |")
    return "\n".join(rows) + "\n"


def examples(found: re.Match[str]) -> str:
    """A block of prompts, with the heading that the parser knows."""
    return "Examples:\n" + "".join(f"    {line}\n" for line in found.group().rstrip().splitlines())
