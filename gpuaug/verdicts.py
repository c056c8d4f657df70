"""What `gpuaug doctor` found of what may crash, hang or lie on a machine, remembered for the loader's choices.

What decoders do depends on processor, devices, driver and versions, so verdicts are kept as JSON in the user's cache
folder under a name made of them, and :func:`verdict` tells them to whoever has to choose between a fast and a safe way.
Nothing here runs a test: that is :mod:`gpuaug.tools.doctor.checks`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from gpuaug import machine
from gpuaug.errors import ConfigError

log = logging.getLogger("gpuaug")

VERSION = 2  # of the file; larger whenever a test becomes stricter
# name: what a good verdict allows
KEPT = {
    "decoder_cpu": "DALI decodes on the CPU as Pillow does",
    "decoder_mixed": "DALI decodes on the GPU as the CPU does",
    "roi": "DALI decodes a part of an image on the GPU (ROI) as the CPU does",
    "hardware": "the GPU's JPEG engine decodes as the CPU does",
    "stream": "decoding keeps its order with a busy consumer's stream",
    "stream_hardware": "the same with the JPEG engine",
    "fused_cuda": "the compiled augmentations on the GPU equal Kornia's",
}
PACKAGES = (
    "torch",
    "kornia",
    "nvidia-dali-cuda120",
    "nvidia-dali-cuda130",
    "nvidia-nvimgcodec-cu12",
    "nvidia-nvimgcodec-cu13",
    "hydra-core",
    "triton",
    "pillow",
    "numpy",
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a test found.

    Attributes:
        good: None where it cannot be tested here.
        text: what was seen.
        value: more of it, as JSON.
        seconds: how long it took; 0.0 where it was not run.
        kept: whether it is remembered from an earlier run.
    """

    name: str
    good: bool | None
    text: str
    value: Any = None
    seconds: float = 0.0
    kept: bool = False


def verdict(name: str) -> bool | None:
    """What `gpuaug doctor` found on a machine like this with these versions; None where it was never asked.

    Reads one small file, once. Starts neither CUDA nor a test.

    Raises:
        ConfigError: if there is no test of that name.
    """
    if name not in KEPT:
        raise ConfigError(f"`{name}` is no test whose verdict is kept. Those are: {', '.join(KEPT)}.")
    found = _remembered().get(name)
    return None if found is None else found.good


def here() -> dict[str, Any]:
    """What verdicts depend on: processor, devices, driver, versions. Machines that are alike share them."""
    models = machine.gpus()
    alike = len(set(models)) < 2
    return {
        "cpu": machine.cpu_model(),
        "gpus": sorted(set(models)) if alike else models,
        "visible": None if alike else os.environ.get("CUDA_VISIBLE_DEVICES"),
        "driver": machine.driver(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("gpuaug", *PACKAGES)},
    }


def version(package: str) -> str | None:
    """Version of an installed distribution."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cache_file() -> Path:
    """Where the verdicts of machines like this are kept."""
    text = json.dumps(here(), sort_keys=True)
    name = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    return folder() / f"doctor-{name}.json"


def folder() -> Path:
    """The user's cache folder, ``$XDG_CACHE_HOME/gpuaug``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpuaug"


def load() -> dict[str, Verdict]:
    """The verdicts that are remembered; whatever the file holds that is none is left out."""
    try:
        found = json.loads(cache_file().read_text(encoding="utf-8"))
        entries = found["verdicts"] if found["version"] == VERSION else {}
        return {
            name: Verdict(name=name, good=e["good"], text=str(e["text"]), seconds=float(e["seconds"]), kept=True)
            for name, e in entries.items()
            if name in KEPT and isinstance(e["good"], bool)
        }
    except FileNotFoundError:
        return {}
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.info("doctor's verdicts cannot be read and are left out: %s: %s", type(error).__name__, error)
        return {}


@lru_cache(maxsize=1)
def _remembered() -> dict[str, Verdict]:
    return load()


def keep(found: Verdict) -> None:
    """Remember a verdict, beside the others of this machine; in one step, so that readers see all or nothing.

    With ``good`` None an earlier verdict of that test is forgotten.
    """
    known = {**load(), found.name: found}
    entries = {n: {"good": v.good, "text": v.text, "seconds": v.seconds} for n, v in known.items()}
    try:
        file = cache_file()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = file.with_name(f".{file.name}.{os.getpid()}.part")
        part.write_text(json.dumps({"version": VERSION, "machine": here(), "verdicts": entries}, indent=1) + "\n")
        os.replace(part, file)
    except (OSError, RuntimeError) as error:
        log.info("doctor's verdicts are not kept: %s", error)
    _remembered.cache_clear()
