"""What is built can be uploaded, and works in an environment with nothing else of ours.

The environment is new, but it imports gpuaug's dependencies from the environment of the tests: to install torch again
takes minutes.
"""

import json
import mmap
import os
import re
import struct
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import levels
import pytest
from conftest import ROOT

import gpuaug
from gpuaug.native import build

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


@pytest.mark.skipif(sys.platform != "linux" or build.find_compiler() is None, reason="the wheel has no libraries")
def test_every_library_of_the_wheel_gives_the_same_bits_without_a_compiler(wheel, tmp_path):
    python = environment(tmp_path / "env")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--quiet", str(wheel))
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CXX")}
    variables |= {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def child(*arguments):
        done = subprocess.run([python, *arguments], cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    found = child(str(ROOT / "tests/levels.py"))
    assert set(found.values()) == {levels.digest()}, found  # of the library that is compiled here
    assert "-none-any" not in wheel.name
    assert not (tmp_path / "cache").exists()
    doctor = "from gpuaug.tools.doctor.probes import main; main()"
    assert f"(installed for {next(iter(found))})" in child("-c", doctor, "compiler")[1]


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


# --- DALI for CUDA 12 beside torch for CUDA 13

SYSTEM = "libc.so.6 libdl.so.2 libm.so.6 libpthread.so.0 librt.so.1 libgcc_s.so.1 libstdc++.so.6 ld-linux-x86-64.so.2"
OPENED = {  # what DALI's wheels open by name when they need it
    "the driver's": "libcuda.so.1 libnvidia-ml.so.1 libnvcuvid.so.1",
    "the wheels'": "libnvimgcodec.so.0 libnvjpeg.so.12 libnvjpeg2k.so.0 libnvtiff.so.0 libnvcomp.so.5",
    # debayering, warps and color conversions with NPP, spectrograms, GPUDirect Storage: gpuaug uses none of them
    "absent": "libnppc.so.12 libnppicc.so.12 libnppig.so.12 libcufft.so.11 libcufile.so.0",
}


def libraries(file: Path) -> tuple[set[str], set[str]]:
    """The names of shared libraries that an ELF file needs, and those that it may open."""
    with open(file, "rb") as stream:
        data = mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ)
    assert data[:6] == b"\x7fELF\x02\x01", f"{file} is no 64-bit little-endian ELF file"
    (start,), (size, count, names) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<3H", data, 58)
    rows = [struct.unpack_from("<2I4Q", data, start + k * size) for k in range(count)]
    found = {}
    for name, _, _, _, at, length in rows:
        name += rows[names][4]
        found[data[name : data.find(b"\0", name)]] = (at, length)
    dynamic, texts, constants = (
        data[at : at + length] for at, length in (found[b".dynamic"], found[b".dynstr"], found.get(b".rodata", (0, 0)))
    )
    needed = [texts[value : texts.index(b"\0", value)] for tag, value in struct.iter_unpack("<qQ", dynamic) if tag == 1]
    opened = re.findall(rb"lib[\w+-]+\.so\.\d+", constants)
    return {name.decode() for name in needed}, {name.decode() for name in opened}


@pytest.mark.skipif(sys.platform != "linux", reason="DALI exists for Linux only")
def test_dali_needs_no_cuda_toolkit():
    """So DALI for CUDA 12 works beside torch for CUDA 13: its wheels link their CUDA runtime statically.

    If this fails after an update of DALI, look whether the README's section "Install" still holds.
    """
    kind = re.compile(r"nvidia-(dali-cuda|(nvimgcodec|nvjpeg|nvjpeg2k|nvtiff|libnvcomp)-cu)\d+")
    files = [f for d in metadata.distributions() if kind.fullmatch(d.metadata["Name"]) for f in d.files or ()]
    files = [file for file in files if ".so" in file.name]
    assert {"libdali.so", "libnvimgcodec.so.0", "libnvjpeg.so.12"} <= {file.name for file in files}
    own, known = {file.name for file in files}, {name for names in OPENED.values() for name in names.split()}
    for file in files:
        needed, opened = libraries(Path(file.locate()))
        assert needed <= own | set(SYSTEM.split()), file
        assert {name for name in opened if re.match("lib(cu|nv|npp)", name)} <= own | known, file
