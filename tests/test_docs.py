"""What is written beside the code: every public name says what it takes, and what the README shows is there."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pyarrow.parquet
import pytest
import scenes
import test_mask_folder
import test_parquet_targets
import test_voc
import test_yolo
import torch
from common import recipe
from conftest import ROOT
from pictures import encode, photograph, write_tar

import gpuaug
from gpuaug.tools.main import COMMANDS, main
from gpuaug.tools.pack.command import pack
from gpuaug.tools.pack.job import Pack

README = (ROOT / "README.md").read_text(encoding="utf-8")


def public() -> Iterator[tuple[str, Any]]:
    """Every public name, and what is public of every public class, with its own docstring only."""
    for name in gpuaug.__all__:
        thing = getattr(gpuaug, name)
        yield name, thing
        if inspect.isclass(thing):
            for base in thing.__mro__:
                if not base.__module__.startswith("gpuaug"):
                    continue
                for member, value in vars(base).items():
                    called = inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)
                    if called and not member.startswith("_"):
                        yield f"{name}.{member}", value


PUBLIC = dict(public())


def parameters(thing: Any) -> list[str]:
    """Names that a caller can give."""
    if isinstance(thing, property):
        return []
    if isinstance(thing, classmethod | staticmethod):
        thing = thing.__func__
    if inspect.isclass(thing) and (issubclass(thing, Exception) or thing.__init__ is object.__init__):
        return []
    if dataclasses.is_dataclass(thing):
        return [f.name for f in dataclasses.fields(thing) if f.init]
    return [name for name in inspect.signature(thing).parameters if name not in ("self", "cls")]


def functions(thing: Any) -> list[Any]:
    """What runs when it is called: the function, the property's, or of a class what makes its objects."""
    if isinstance(thing, property):
        return [thing.fget]
    if isinstance(thing, classmethod | staticmethod):
        return [thing.__func__]
    if inspect.isclass(thing):
        return [made for name in ("__init__", "__post_init__") if inspect.isfunction(made := vars(thing).get(name))]
    return [thing]


def docstring(name: str) -> str:
    thing = PUBLIC[name]
    return inspect.getdoc(thing.__func__ if isinstance(thing, classmethod | staticmethod) else thing) or ""


def entry(name: str, text: str) -> str | None:
    """What ``text`` says of a parameter: its entry of Args or Attributes, or all, where it is named there as code."""
    listed = re.search(rf"^( +)(?:\w+, )*\**{name}(?:, \w+)*: (.*(?:\n\1 +.*)*)", text, re.MULTILINE)
    if listed:
        return listed.group(2)
    named = re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`|\b{name} \[", text)
    return text if named else None


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_says_what_it_is_and_takes(name: str) -> None:
    text = docstring(name)
    assert text, f"{name} has no docstring"
    promise = text.partition("\n\n")[0]
    assert promise.endswith((".", ":")), f"the first sentence of {name} has no end: {promise!r}"
    assert ">>>" in text or name not in gpuaug.__all__, f"gpuaug.{name} has no example. Add lines with `>>>`"
    absent = [p for p in parameters(PUBLIC[name]) if entry(p, text) is None]
    assert not absent, f"{name} does not say what these are: {', '.join(absent)}"


def arrays(thing: Any) -> list[str]:
    """Names of the tensors and arrays that it takes, has or returns."""
    hints = vars(thing).get("__annotations__", {}) if inspect.isclass(thing) else functions(thing)[0].__annotations__
    return [key for key, hint in hints.items() if re.search(r"\b(Tensor|NDArray|Int|Int64|Float)\b", str(hint))]


@pytest.mark.parametrize("name", [name for name, thing in PUBLIC.items() if arrays(thing)])
def test_tensors_have_shapes(name: str) -> None:
    said = re.search(r"\[[\w ,+()]*\b(?:[BNnHCK]|len|bytes)\b[\w ,+()]*\]", docstring(name))
    assert said, f"{name}: {arrays(PUBLIC[name])}"


UNITS = {
    "timeout": "second",
    "max_bytes": "byte",
    "cache_bytes": "byte",
    "max_pixels": "pixel",
    "padding": "pixel|factor",
    "prefetch": "batches",
}


QUANTITIES = [(name, p) for name, thing in PUBLIC.items() for p in parameters(thing) if p in UNITS]


@pytest.mark.parametrize(("name", "parameter"), QUANTITIES)
def test_quantities_have_units(name: str, parameter: str) -> None:
    said = entry(parameter, docstring(name))
    assert re.search(UNITS[parameter], said or ""), f"{name} does not say in what unit `{parameter}` is: {said!r}"


def test_every_unit_is_of_a_quantity() -> None:
    assert {parameter for _, parameter in QUANTITIES} == UNITS.keys()
    assert {"Batch", "Augment.forward"} <= {name for name, thing in PUBLIC.items() if arrays(thing)}


@pytest.fixture(scope="module")
def data(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``data/``, which has every data set that an example opens, under the name that it has there."""
    folder = tmp_path_factory.mktemp("examples")
    root = folder / "data"
    root.mkdir()
    (root / "train").symlink_to(photos)
    write_coco(root)
    test_mask_folder.write(root / "ade20k", "images/training", "annotations/training")
    test_voc.write(root / "VOCdevkit", split="trainval")
    test_yolo.write(root / "coco8", {"a": "1 0.5 0.25 0.5 0.1"}, split="val")
    (root / "train.csv").write_text("".join(["file,class\n", *(f"train/chelsea/00{k}.jpg,cat\n" for k in range(3))]))
    pyarrow.parquet.write_table(test_parquet_targets.table(4).drop_columns("mask"), root / "train-0.parquet")
    image = encode(photograph(size=(40, 30)))
    (root / "captions.tsv").write_text("path\tcaption\ntrain/chelsea/000.jpg\ta cat\n")
    for k in range(100):
        mask, objects = encode(photograph(size=(40, 30)).convert("L"), "PNG"), b'{"objects": []}'
        write_tar(root / f"train-{k:03d}.tar", {"a.jpg": image, "a.json": b'{"category": 3}'}.items())
        write_tar(root / f"laion-{k:03d}.tar", {"a.jpg": image, "a.txt": b"a cat"}.items())
        write_tar(root / f"scenes-{k:03d}.tar", {"a.jpg": image, "a.seg.png": mask, "a.json": objects}.items())
    source = gpuaug.FolderSource(photos, subset=8)
    pack(source, root / "packed", what=Pack(sizes=(128, 160)), decode=gpuaug.Decode(), num_workers=0)
    return folder


@pytest.mark.parametrize("name", [name for name in PUBLIC if ">>>" in docstring(name)])
def test_examples_of_docstrings_run(name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    for path in (data / "data").iterdir():
        (tmp_path / "data" / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    module = sys.modules[PUBLIC[name].__module__]
    known = {**vars(module), "gpuaug": gpuaug, "recipe": recipe()}
    (test,) = doctest.DocTestFinder(recurse=False).find(PUBLIC[name], name, module=module, globs=known)
    said = io.StringIO()
    assert not doctest.DocTestRunner().run(test, out=said.write).failed, said.getvalue()


ERRORS = {e for e in gpuaug.__all__ if inspect.isclass(t := getattr(gpuaug, e)) and issubclass(t, gpuaug.GpuaugError)}


@pytest.mark.parametrize("name", PUBLIC)
def test_errors_that_are_raised_are_named(name: str) -> None:
    """All but ConfigError for wrong arguments, which the package's own docstring promises of everything."""
    assert "ConfigError" in (gpuaug.__doc__ or "")
    written = [f for f in functions(PUBLIC[name]) if Path(f.__code__.co_filename).exists()]  # not the dataclasses' own
    trees = [ast.parse(textwrap.dedent(inspect.getsource(f))) for f in written]
    raised = {
        ast.unparse(node.exc.func)
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    }
    silent = {e for e in (raised & ERRORS) - {"ConfigError"} if not re.search(rf"\b{e}\b", docstring(name))}
    assert not silent, f"{name} does not say that it raises {', '.join(sorted(silent))}"


def test_type_checkers_see_the_public_names(tmp_path: Path) -> None:
    (tmp_path / "use.py").write_text("".join(f"import gpuaug\nreveal_type(gpuaug.{name})\n" for name in gpuaug.__all__))
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", str(tmp_path / "use.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    told = re.findall(r'Revealed type is "(?:def|overload|Overload)[^"]*"', done.stdout, re.IGNORECASE)
    assert len(told) == len(gpuaug.__all__), done.stdout + done.stderr


def write_coco(root: Path) -> None:
    """``root/coco`` as COCO lays its files out, and ``root/voc`` with images and masks."""
    scenes.write(root / "voc", count=2, size=(96, 128))
    (root / "coco/annotations").mkdir(parents=True)
    (root / "coco/train2017").symlink_to(root / "voc/images")
    (root / "voc/instances.json").rename(root / "coco/annotations/instances_train2017.json")


BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    """The words of every line of the README that runs something of ours."""
    lines = [line for language, text in BLOCKS if not language for line in text.splitlines()]
    words = [shlex.split(line) for line in lines if re.match(r"(gpuaug|torchrun|python) ", line)]
    return [w[w.index("gpuaug.tools") if "gpuaug.tools" in w else 0 :] for w in words]


def test_python_of_the_readme_runs(photos: Path, photo_batch: torch.Tensor, tmp_path: Path) -> None:
    """As it is written, on other images and for one epoch."""
    names: dict[str, Any] = {"images_uint8": photo_batch, "indices": range(len(photo_batch))}
    programs = [text for language, text in BLOCKS if language == "python" and not text.startswith("# app.py")]
    assert len(programs) == 3
    write_coco(tmp_path)
    for text in programs:
        for name, instead in (("/data/train", photos), ("/data/coco", tmp_path / "coco"), ("90)", "1)")):
            text = text.replace(name, str(instead))
        names["detector"] = lambda images, targets: [target["boxes"] for target in targets]
        exec(compile(text, "README.md", "exec"), names)
        names["loader"].close()
    assert names["epoch"] == 0
    assert names["state"]["epoch"] == 1
    height, width = names["images"].shape[2:]
    assert height == width
    assert 480 <= height <= 800  # RT-DETR draws a size for each step
    assert len(names["losses"]) == 2


def test_the_guide_to_batches_of_your_own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block, in order."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "gpuaug" / "augment").mkdir(parents=True)
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    images = torch.rand(2, 3, 32, 40)
    names: dict[str, Any] = {
        "gpuaug": gpuaug,
        "epoch": 1,
        "numbers": [4, 7],
        "clips": images[:, None].expand(2, 5, 3, 32, 40),
    }
    names.update(dict.fromkeys(("images", "top", "wrist", "depth"), images))
    blocks = re.findall(
        r"```(\w+)\n(.*?)```", guide.partition("\n## Your own batches\n")[2].partition("\n## ")[0], re.S
    )
    for kind, block in blocks:
        if kind == "yaml":
            Path(block.splitlines()[0].removeprefix("# ")).write_text(block, encoding="utf-8")
        else:
            exec(compile(block, "guide.md", "exec"), names)
    assert names["images"].shape == (2, 3, 224, 224)
    assert names["clips"].shape == (2, 5, 3, 32, 40)
    sizes = {camera: list(x.shape[2:]) for camera, x in names["views"].items()}
    assert sizes == {"top": [224, 224], "wrist": [112, 112], "depth": [32, 40]}


@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words[:2]))
def test_commands_of_the_readme_run(
    words: list[str], photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are written, on other images, fewer of them and on the CPU."""
    write_coco(tmp_path)
    words = [re.sub(r"/data/(train|val)\b", str(photos), word) for word in words]
    words = [word.replace("/data/", f"{tmp_path}/") for word in words]
    (tmp_path / "conf" / "gpuaug" / "augment").mkdir(parents=True)
    for name in ("conf/app.yaml", "conf/gpuaug/augment/mine.yaml", "app.py"):
        (text,) = [text for _, text in BLOCKS if text.startswith(f"# {name}\n")]
        (tmp_path / name).write_text(text, encoding="utf-8")
    if words[1] == "app.py":
        command = [sys.executable, *words[1:], "train_data.device=cpu", "val_data.device=cpu"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        done = forked.run(command, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
    else:
        few = {"train": ["batch_size=8", "num_workers=0", "limit_batches=1", "epochs=1"]}.get(words[1], ["samples=1"])
        monkeypatch.chdir(tmp_path)
        assert main([*words[1:], "device=cpu", *few]) == 0
    for word in words:
        assert not word.startswith("out=") or (tmp_path / word.removeprefix("out=")).stat().st_size > 0


def test_the_five_steps_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command and the program, in order, with fewer images."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/start.md").read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, re.S) for line in block.splitlines()]
    few = {"train": ["limit_batches=2", "num_workers=0"], "preview": ["samples=1"]}
    for words in map(shlex.split, lines):
        if words[0] == "gpuaug":
            assert main([*words[1:], *few.get(words[1], [])]) == 0
        elif words[0] == "python":
            assert forked.run([sys.executable, str(ROOT / words[1]), *words[2:]]).returncode == 0
        else:
            assert words[:2] == ["pip", "install"]
    capsys.readouterr()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.S)
    exec(compile(program, "start.md", "exec"), {})
    assert capsys.readouterr().out.strip() in {path.name for path in (tmp_path / "photographs/train").iterdir()}


def test_what_the_readme_names_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", README)) <= targets
    assert set(re.findall(r"^(?:.*\s)?gpuaug ([a-z]+)\s+[a-z_.]+=", README, re.MULTILINE)) <= set(COMMANDS)
    for name in re.findall(r"\bgpuaug\.([A-Za-z]\w*)\(", README):
        assert name in gpuaug.__all__, f"README uses gpuaug.{name}"


def test_the_layout_in_contributing_is_that_of_the_package() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = text.partition("## What is where")[2].partition("```")[2].partition("```")[0].splitlines()
    named = {word.rstrip("/") for line in tree if line.startswith("  ") for word in line[2:22].split()}
    there = {p.name for p in (ROOT / "gpuaug").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert named <= there
    folders = {name for name in there if "." not in name}
    assert folders <= named


@pytest.mark.parametrize(
    "file", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/guide.md", "docs/migrate.md", "docs/start.md"]
)
def test_links_and_files_that_are_named_are_there(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    folder = (ROOT / file).parent
    assert [link for link in re.findall(r"\]\(([^)#:]+)\)", text) if not (folder / link).exists()] == []
    named = [
        path
        for path in re.findall(r"`((?:gpuaug|tests|conf|examples|bench)/[\w./]+)`", text)
        if "NAME" not in path and "mine" not in path
    ]
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_changelog_has_this_version() -> None:
    assert f"\n## {gpuaug.__version__} — " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_contributing_names_the_tables_of_the_tests() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tables = {"test_recipes": ("INTERPOLATION", "SHAPES"), "test_parameters": ("OPS",)}
    tables |= {"test_fused": ("FORMS",), "test_moves": ("GEOMETRIC",)}
    for test, names in tables.items():
        source = (ROOT / "tests/augment" / f"{test}.py").read_text(encoding="utf-8")
        assert f"tests/augment/{test}.py" in text
        assert all(f"`{name}`" in text and re.search(rf"^{name}\b.* = {{$", source, re.MULTILINE) for name in names)


def test_import_is_light() -> None:
    """Nothing but a few modules of ours and of the standard library, which is why it takes milliseconds."""
    code = (
        "import sys; before = set(sys.modules); import gpuaug; count = len(set(sys.modules) - before)\n"
        "import gpuaug.machine; new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(count, *sorted(new - {'gpuaug', *sys.stdlib_module_names}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    count, *others = done.stdout.split()
    assert others == []
    assert int(count) < 50


def test_errors_are_ours() -> None:
    errors = [e for e in map(gpuaug.__getattr__, gpuaug.__all__) if inspect.isclass(e) and issubclass(e, Exception)]
    assert all(issubclass(e, gpuaug.GpuaugError) for e in errors)
    assert issubclass(gpuaug.Augment, torch.nn.Module)
