"""Photographs for the tests: windows of the ones inside scikit-image's and scikit-learn's wheels."""

import gc
import importlib.util
import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads starve the others

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from pictures import photographs
from PIL import Image

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in its background
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(min(2, torch.get_num_threads()))
# how long an example takes is the machine's affair; how it can be repeated is printed
hypothesis_settings.register_profile(
    "busy", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
hypothesis_settings.load_profile("busy")


ROOT = Path(__file__).resolve().parent.parent  # of the repository
SHARED = [
    ROOT,
    *(ROOT / "tests" / name for name in (".", "source", "decode", "augment", "loader", "targets")),
    ROOT / "bench",
]  # for child processes
TORCHVISION = Path(sys.prefix) / "torchvision"  # where the Makefile puts it, out of the way of other packages


# more than 10 seconds of a processor each, the longest first
LONGEST = [
    "profile", "remote", "train", "triton_kernels", "failures", "fuzz", "truth_batches", "recipe", "train_models",
    "plan", "pack_epochs", "gpu", "install", "live", "fitting_in", "docs", "decode", "read", "missing_waits",
    "examples", "pack", "forged", "fused", "doctor_report", "doctor", "loader", "distributed", "shards", "config",
    "preview", "truth", "loader_targets", "self_check", "auto", "profile_targets", "bad_values", "bench_gpu",
    "progressive", "parity",
    "notebooks", "site", "coco",
]  # fmt: skip


def pytest_collection_modifyitems(items):
    """The files that take longest come first, so that no process is left alone with one of them at the end."""
    place = {f"test_{name}": at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def pytest_collection_finish():
    """Garbage collections pass over what is imported by now: composing a configuration takes a tenth less."""
    gc.freeze()


@pytest.fixture(scope="session")
def v2():
    """``torchvision.transforms.v2``, which runs without torchvision's compiled operators."""
    from gpuaug.tools.peers import torchvision

    if importlib.util.find_spec("torchvision") is None:
        sys.path.append(str(TORCHVISION))
    return torchvision()[0]


def window(photo: np.ndarray, rng: np.random.Generator) -> Image.Image:
    """A part of a photograph, of random place and size."""
    height, width = photo.shape[:2]
    h, w = int(rng.integers(120, min(280, height))), int(rng.integers(120, min(360, width)))
    y, x = int(rng.integers(0, height - h + 1)), int(rng.integers(0, width - w + 1))
    return Image.fromarray(photo[y : y + h, x : x + w])


def cut(root: Path, per_class: int, seed: int = 0) -> Path:
    """An ImageFolder of JPEGs: 4:4:4 and 4:2:0, some progressive, some grayscale, some EXIF-rotated."""
    rng = np.random.default_rng(seed)
    for name, photo in photographs().items():
        (root / name).mkdir(parents=True)
        for k in range(per_class):
            image, options = window(photo, rng), {"quality": int(rng.integers(75, 96)), "subsampling": 2 * (k % 2)}
            if k % 5 == 1:
                options["progressive"] = True
            if k % 7 == 3:
                image = image.convert("L")
            if k % 6 == 2:
                options["exif"] = Image.Exif()
                options["exif"][274] = 1 + k % 8
            image.save(root / name / f"{k:03d}.jpg", **options)
    return root


@pytest.fixture(scope="session")
def photos(tmp_path_factory) -> Path:
    """An ImageFolder of 5 classes with 13 photographs each."""
    return cut(tmp_path_factory.mktemp("photos") / "train", 13)


@pytest.fixture(scope="session")
def photo_batch() -> torch.Tensor:
    """uint8 [8, 64, 48, 3]: small photographs of one size."""
    rng = np.random.default_rng(1)
    images = [window(p, rng).resize((48, 64)) for p in [*photographs().values()] * 2]
    return torch.from_numpy(np.stack([np.asarray(image) for image in images[:8]]))


@pytest.fixture
def no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """The fixture ``monkeypatch`` on a machine without any login for AWS."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "nothing"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return monkeypatch
