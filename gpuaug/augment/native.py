"""The fused program on the CPU: native.cpp, built once per machine with the C++ compiler that is there.

The build is kept in the user's cache directory under a name that holds source, compiler, flags and processor, so that a
home directory shared by different machines serves each its own. Without a compiler :func:`library` gives None and says
so; the same program then runs in torch (batched.py).
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.draw import Float

logger = logging.getLogger("gpuaug")

_FLAGS = (
    "-O3",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-pthread",
)
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_lock = threading.Lock()


class _Job(ctypes.Structure):
    """``Job`` of native.cpp."""

    _fields_ = (
        ("src", ctypes.c_void_p),
        ("dst", ctypes.c_void_p),
        ("code", ctypes.c_void_p),
        ("args", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("ramps", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("height", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("steps", ctypes.c_int64),
        ("src_float", ctypes.c_int32),
        ("dst_type", ctypes.c_int32),
        ("channels_last", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("scale", ctypes.c_float * 3),
        ("shift", ctypes.c_float * 3),
    )


def run(
    library: ctypes.CDLL,
    images: Tensor,
    code: NDArray[np.int32],
    args: Float,
    *,
    tables: list[tuple[NDArray[np.int64], int, Tensor]],
    ramps: Float | None,
    scale: tuple[float, float, float],
    shift: tuple[float, float, float],
    dtype: torch.dtype,
    channels_last: bool,
) -> Tensor:
    """Every sample through its own program, on torch's number of threads.

    Args:
        library: from :func:`library`.
        images: uint8 [B, H, W, 3] or float32 [B, 3, H, W], CPU.
        code: int32 [B, S].
        args: float32 [B, S, ARGS].
        tables: (rows, column, float32 [rows, n]) for the steps that read more than their arguments.
        ramps: output positions for warps, see lower.py; None where there are none.
        scale, shift: the result is ``x * scale + shift`` per channel.
        dtype: float32, bfloat16 or float16.
        channels_last: memory format of the result.

    Returns:
        [B, 3, H, W].
    """
    images = images.contiguous()
    whole = images.dtype == torch.uint8
    batch, height, width = (len(images), *images.shape[1:3]) if whole else (len(images), *images.shape[2:])
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    out = torch.empty((batch, 3, height, width), dtype=dtype, memory_format=memory_format)
    pointers = np.zeros(code.shape, dtype=np.int64) if tables else None
    for rows, column, values in tables:
        assert pointers is not None
        pointers[rows, column] = values.data_ptr() + np.arange(len(rows)) * (values[0].numel() * 4)
    job = _Job(
        src=images.data_ptr(),
        dst=out.data_ptr(),
        code=code.ctypes.data,
        args=args.ctypes.data,
        tables=None if pointers is None else pointers.ctypes.data,
        ramps=None if ramps is None else ramps.ctypes.data,
        batch=batch,
        height=height,
        width=width,
        steps=code.shape[1],
        src_float=not whole,
        dst_type=_DTYPES[dtype],
        channels_last=channels_last,
        threads=torch.get_num_threads(),
        scale=(ctypes.c_float * 3)(*scale),
        shift=(ctypes.c_float * 3)(*shift),
    )
    if library.gpuaug_augment(ctypes.byref(job)):  # without the interpreter's lock
        raise MemoryError(f"no memory for augmenting images of {height}x{width} pixels")
    return out


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled program, or None where it cannot be compiled; logs once which and why."""
    with _lock:
        compiler = _compiler()
        if compiler is None:
            logger.warning(
                "augment on cpu runs uncompiled, many times slower: no C++ compiler found. Install g++ or clang++, or "
                "set CXX to one."
            )
            return None
        try:
            source = Path(__file__).with_name("native.cpp").read_text()
            folder, fingerprint = _cache(), _fingerprint(source, compiler)
            path = _found(folder, fingerprint) or _build(compiler, source, folder, fingerprint)
            return ctypes.CDLL(str(path))
        except (OSError, subprocess.SubprocessError) as error:
            detail = getattr(error, "stderr", None) or error
            logger.warning("augment on cpu runs uncompiled, many times slower: %s failed: %s", compiler, detail)
            return None


def _compiler() -> str | None:
    given = os.environ.get("CXX")
    candidates = given.split()[:1] if given else ["g++", "clang++", "c++"]
    return next((found for name in candidates if (found := shutil.which(name))), None)


def _cache() -> Path:
    """A directory of this user alone: what lies in it is loaded as code."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpuaug"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = root.lstat()
        if stat.S_ISDIR(about.st_mode) and os.access(root, os.W_OK) and _is_ours_alone(about):
            return root
    except (OSError, RuntimeError):
        pass
    logger.info("compiled augmentation is not kept: %s is not a folder that this user alone can write", root)
    return Path(tempfile.mkdtemp(prefix="gpuaug-"))


def _found(folder: Path, fingerprint: str) -> Path | None:
    """A build that may be loaded: this user's, and whole; others of the name are removed.

    The name holds the digest of the content, since to load a file that a full disk has cut kills the process.
    """
    for path in sorted(folder.glob(f"augment-{fingerprint}-*.so")):
        try:
            about = path.lstat()
            own = stat.S_ISREG(about.st_mode) and _is_ours_alone(about)
            if own and path.stem.endswith(_digest(path.read_bytes())):
                return path
        except FileNotFoundError:
            continue  # another rank has removed it
        logger.warning(
            "augment on cpu: %s is %s, and is built anew", path, "damaged" if own else "not this user's alone"
        )
        path.unlink(missing_ok=True)
    return None


def _is_ours_alone(about: os.stat_result) -> bool:
    return about.st_uid == os.getuid() and not about.st_mode & 0o022


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def _fingerprint(source: str, compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    processor = platform.processor() + platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor += "".join(sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))}))
    except OSError:
        pass
    text = "\0".join((source, version, processor, *_FLAGS))
    return _digest(text.encode())


def _build(compiler: str, source: str, folder: Path, fingerprint: str) -> Path:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        text, built = Path(inside, "augment.cpp"), Path(inside, "augment.so")
        text.write_text(source)
        command = [compiler, *_FLAGS, str(text), "-o", str(built)]
        try:
            subprocess.run([*command, "-march=native"], capture_output=True, text=True, check=True, timeout=300)
        except subprocess.CalledProcessError:  # some compilers have no -march=native for their machine
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        built.chmod(0o700)  # a umask may leave it to the group
        path = folder / f"augment-{fingerprint}-{_digest(built.read_bytes())}.so"
        os.replace(built, path)  # in one step: several ranks may build at once
    logger.info("augment on cpu: compiled %s in %.1f s with %s", path.name, time.perf_counter() - start, compiler)
    return path
