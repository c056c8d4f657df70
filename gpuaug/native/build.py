"""Loads compiled C++: libraries that were installed with gpuaug. Without them, it compiles and caches the library.

hatch_build.py puts libraries for several levels of processors into wheels. A checkout has none. The file name of a
cached library depends on the source, compiler, flags and processor, so different machines can share a cache folder.
torch.utils.cpp_extension has no such names, needs ninja, and does not check a library before it loads the library.
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
from collections.abc import Sequence
from pathlib import Path

from gpuaug import files, machine

logger = logging.getLogger("gpuaug")

_LIBRARY = ("-std=c++17", "-shared", "-fPIC", "-pthread")
FLAGS = (*_LIBRARY, "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros")
_PACKAGE = Path(__file__).parents[1]
INSTALLED = _PACKAGE / "native/lib"  # LEVEL/NAME-HASH.so; the hash is that of the source and the flags
_V2 = "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3"
_V3 = f"{_V2} abm avx avx2 bmi1 bmi2 f16c fma movbe"
_V4 = f"{_V3} avx512bw avx512cd avx512dq avx512f avx512vl"
LEVELS = {  # machine: level: flags of the compiler, and the flags in /proc/cpuinfo that it needs; the fastest first
    "x86_64": {
        "x86-64-v4-vbmi": ("-march=x86-64-v4 -mavx512vbmi", f"{_V4} avx512vbmi"),  # a quarter faster than v4
        "x86-64-v4": ("-march=x86-64-v4", _V4),
        "x86-64-v3": ("-march=x86-64-v3", _V3),
        "x86-64-v2": ("-march=x86-64-v2", _V2),
    },
    "aarch64": {"armv8-a": ("-march=armv8-a", "")},
}
_lock = threading.Lock()


def load(
    source: str, *, name: str, without: str, flags: Sequence[str] = FLAGS, definitions: str = ""
) -> ctypes.CDLL | None:
    """Load or build the library of one C++ file. If that fails, log a warning and return None.

    ``source``: a path within the package. ``definitions``: C++ to put before that of the file. ``name``: start of the
    library's file name. ``without``: what a failure means. The warning is ``NAME on cpu WITHOUT: REASON``.
    """
    with _lock:
        text, file = source_text(source, name=name, flags=flags, definitions=definitions)
        if (library := _installed(file)) is not None:
            return library
        if (compiler := find_compiler()) is None:
            logger.warning(
                "%s on cpu %s: no C++ compiler found. Looked for: %s. Install g++ or clang++, or set CXX to one.",
                *(name, without, os.environ.get("CXX", "").strip() or "g++, clang++, c++"),
            )
            return None
        try:
            folder = cache()
            try:
                return _library(compiler, (*flags, "-march=native"), text, folder, name)
            except subprocess.CalledProcessError as error:  # some compilers do not support it on some machines
                logger.info("%s on cpu is slower: %s fails with -march=native: %s", name, compiler[0], error.stderr)
                return _library(compiler, flags, text, folder, name)
        except (OSError, subprocess.SubprocessError) as error:
            detail = getattr(error, "stderr", None) or error
            logger.warning("%s on cpu %s: %s failed: %s", name, without, " ".join(compiler), detail)
            return None


def source_text(source: str, *, name: str, flags: Sequence[str] = FLAGS, definitions: str = "") -> tuple[str, str]:
    """The C++ of a file, and the file name of its installed library: an edited source never gets the old library."""
    shared = "".join((_PACKAGE / "native" / header).read_text() for header in ("threads.hpp", "philox.hpp"))
    text = shared + definitions + (_PACKAGE / source).read_text()
    return text, name + "-" + _digest("\0".join((text, *flags)).encode()) + ".so"


def find_compiler() -> list[str] | None:
    given = os.environ.get("CXX", "").strip()  # a path, or several words, such as `ccache g++`
    choices = [[given], given.split()] if given else [["g++"], ["clang++"], ["c++"]]
    return next((words for words in choices if shutil.which(words[0])), None)


def compile_file(compiler: Sequence[str], flags: Sequence[str], text: str, path: Path) -> None:
    """Compile ``text`` to the library ``path``. Raises CalledProcessError with the compiler's output."""
    command = [*compiler, *flags, "-x", "c++", "-", "-o", str(path)]
    subprocess.run(command, input=text, capture_output=True, text=True, errors="replace", check=True, timeout=300)


def _installed(file: str) -> ctypes.CDLL | None:
    flags = set((machine.read("/proc/cpuinfo") or "").split()) if INSTALLED.exists() else set[str]()
    for level, (_, needed) in LEVELS.get(platform.machine(), {}).items():
        path = INSTALLED / level / file
        if path.exists() and flags.issuperset(needed.split()):
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:  # for example, it was built for a newer C library
                logger.info("%s is not used: %s", path, error)
    return None


def cache() -> Path | None:
    """The cache folder; None if it is unusable, or unsafe because other users can write to it."""
    root = files.cache_folder()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_ours_alone(root, stat.S_IFDIR) and os.access(root, os.W_OK):
            return root
    except OSError:
        pass
    logger.info("compiled code is not cached: %s must be writable by this user only (see XDG_CACHE_HOME)", root)
    return None


def _kept(folder: Path, stem: str) -> Path | None:
    """Return a cached library that is complete and that only this user can write. Delete bad files.

    The file name ends with a digest of the content, because loading a truncated file kills the process.
    """
    for path in sorted(folder.glob(f"{stem}-*.so")):
        try:
            own = _is_ours_alone(path, stat.S_IFREG)
            if own and path.stem.endswith(_digest(path.read_bytes())):
                return path
        except FileNotFoundError:
            continue  # another rank has removed it
        why = "damaged" if own else "not a private file of this user"
        logger.warning("%s on cpu: the library %s is %s. It is compiled again.", stem.split("-")[0], path, why)
        path.unlink(missing_ok=True)
    return None


def _is_ours_alone(path: Path, kind: int) -> bool:
    about = path.lstat()
    return stat.S_IFMT(about.st_mode) == kind and about.st_uid == os.getuid() and not about.st_mode & 0o022


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def _fingerprint(source: str, compiler: list[str], flags: Sequence[str]) -> str:
    version = subprocess.run(
        [*compiler, "--version"], capture_output=True, text=True, errors="replace", check=True, timeout=60
    ).stdout
    lines = (machine.read("/proc/cpuinfo") or "").splitlines()
    processor = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    parts = (source, version, platform.machine(), *sorted(processor), *compiler, *flags)
    return _digest("\0".join(parts).encode(errors="surrogateescape"))


def _library(compiler: list[str], flags: Sequence[str], source: str, folder: Path | None, name: str) -> ctypes.CDLL:
    """Load or build the library. ``folder``: the cache; None: nothing is kept."""
    stem = f"{name}-{_fingerprint(source, compiler, flags)}"
    if folder and (kept := _kept(folder, stem)):
        return ctypes.CDLL(str(kept))
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gpuaug-") as inside:
        path = Path(inside, "built.so")
        compile_file(compiler, flags, source, path)
        seconds = time.perf_counter() - start
        logger.info("%s on cpu: compiled %s in %.1f s with %s", name, stem, seconds, " ".join(compiler))
        if folder:
            content = path.read_bytes()
            kept = folder / f"{stem}-{_digest(content)}.so"
            try:
                with files.replacing(kept) as file:  # atomic, because several ranks may build at the same time
                    os.fchmod(file.fileno(), 0o700)  # because with some umasks the group could write
                    file.write(content)
                path = kept
            except OSError as error:  # for example, the disk is full
                logger.warning(
                    "%s on cpu: each process compiles again, because it cannot write %s: %s", name, kept, error
                )
        return ctypes.CDLL(str(path))
