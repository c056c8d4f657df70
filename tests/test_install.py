"""What is built can be uploaded, and works in an environment with nothing else of ours.

The environment is new, but it imports gpuaug's dependencies from the environment of the tests: to install torch again
takes minutes.
"""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT

import gpuaug

APPLICATION = """\
import sys
import hydra

assert not {"torch", "kornia", "nvidia"} & set(sys.modules), "Hydra's start imported something heavy"

@hydra.main(version_base="1.3", config_path="conf", config_name="app")
def main(cfg):
    assert not {"torch", "kornia"} & set(sys.modules), "composing imported something heavy"
    import gpuaug
    assert cfg.train_data.augment.copies == 2 and cfg.train_data.augment.crop.interpolation == "bicubic"
    assert cfg.val_data.augment.crop.resize == 256 and cfg.val_data.order._target_ == "gpuaug.Sequential"
    assert gpuaug.compose("train").batch_size == 64  # inside a running application
    augment = gpuaug.build(cfg.train_data.augment)
    print("views", len(augment.views), "seed", cfg.train_data.seed, gpuaug.__file__)

main()
"""
CONFIGURATION = """\
defaults:
  - gpuaug@train_data: train
  - gpuaug@val_data: eval
  - _self_
seed: 5
train_data:
  seed: ${seed}
hydra:
  run: {dir: .}
  output_subdir: null
  job_logging: {root: {handlers: []}}
"""


def application(folder: Path, python: str) -> str:
    """What the application prints when it is run in ``folder``."""
    (folder / "conf").mkdir(parents=True)
    (folder / "app.py").write_text(APPLICATION)
    (folder / "conf" / "app.yaml").write_text(CONFIGURATION)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    run = subprocess.run(
        [python, "app.py", "gpuaug/augment@train_data.augment=simclr", "train_data.source.root=/data"],
        cwd=folder, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr + run.stdout
    return run.stdout


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The folder with the source distribution and the wheel that is made from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder))
    return folder


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    (made,) = built.glob("*.whl")
    return made


def test_what_is_built_can_be_uploaded(built):
    files = sorted(str(path) for path in built.iterdir())
    assert len(files) == 2
    run(sys.executable, "-m", "twine", "check", "--strict", *files)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_the_source_distribution_is_the_repository(built):
    (made,) = built.glob("*.tar.gz")
    with tarfile.open(made) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {name for name in listed if not name.startswith(".ci/")} - names == set()


def test_wheel_holds_package_configuration_and_plugin(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for file in (ROOT / "conf").rglob("*.yaml"):
        assert f"gpuaug/conf/{file.relative_to(ROOT / 'conf')}" in names
    for file in (ROOT / "gpuaug").rglob("*"):
        assert file.is_dir() or "__pycache__" in file.parts or str(file.relative_to(ROOT)) in names
    assert "hydra_plugins/gpuaug_searchpath.py" in names
    assert "hydra_plugins/__init__.py" not in names  # a namespace that other distributions share
    assert {name.split("/")[0] for name in names} == {
        "gpuaug",
        "hydra_plugins",
        f"gpuaug-{gpuaug.__version__}.dist-info",
    }
    (entry,) = (n for n in names if n.endswith("entry_points.txt"))
    text = zipfile.ZipFile(wheel).read(entry).decode()
    assert "[hydra.plugins]\ngpuaug = hydra_plugins.gpuaug_searchpath:GpuaugSearchPathPlugin" in text


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_an_application_composes_after_pip_install(kind, wheel, tmp_path):
    python = environment(tmp_path / "env")
    what = [str(wheel)] if kind == "wheel" else ["--no-build-isolation", "--editable", str(ROOT)]
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--quiet", *what)
    printed = application(tmp_path / "app", python)
    assert "views 2 seed 5" in printed
    assert (str(ROOT) in printed) == (kind == "editable")
    command = [str(Path(python).parent / "gpuaug"), "train", "--help"]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "epochs: 10" in printed


def environment(folder: Path) -> str:
    """The Python of a new environment that can import this one's dependencies, after its own packages."""
    venv.create(folder, with_pip=False, symlinks=True)
    base = {"base": str(folder), "platbase": str(folder)}
    # a path file and not PYTHONPATH, which would come before the environment's own packages
    Path(sysconfig.get_path("purelib", vars=base), "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(folder / "bin" / "python")
