"""`gpuaug pack verify=true`: every file of a finished folder against its checksum."""

from __future__ import annotations

import io
import os
import re
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from gpuaug import machine
from gpuaug.errors import SourceError
from gpuaug.source.index import NO_ARRAY
from gpuaug.source.local import check_regular, read_file
from gpuaug.source.packed import ENDINGS, MANIFEST
from gpuaug.tools.pack.job import finished
from gpuaug.tools.store import file_digest


def verify(out: str | os.PathLike[str], *, num_workers: int | None = None) -> list[str]:
    """Read every file of a finished folder and compare it with its checksum.

    Args:
        out: the folder.
        num_workers: threads; None: one per core.

    Returns:
        One line for each damaged file, with the keys of its damaged samples.

    Raises:
        SourceError: if the folder is not finished, or its manifest is damaged.
    """
    place = Path(out)
    manifest = finished(place)
    if manifest is None:
        raise SourceError(f"{str(place)!r} has no {MANIFEST}: it is not finished. The same `gpuaug pack` goes on.")
    files: dict[str, list[Any]] = manifest["files"]
    if bad := [name for name in files if not re.fullmatch(r"[\w-]+(/[\w.-]+)?", name) or ".." in name]:
        raise SourceError(f"{place / MANIFEST} names files outside the folder: {bad[:3]}.")
    total = sum(size for size, _ in files.values())
    damage: list[str] = []
    with (
        tqdm(total=total, desc="verify", unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as bar,
        ThreadPoolExecutor(num_workers or machine.usable_cpus()) as pool,
    ):
        problems = pool.map(lambda name: _problem(place / name, bar, *files[name]), files)
        for name, problem in zip(files, problems, strict=True):
            if problem is not None:
                damage.append(f"{name}: {problem}{_damaged_samples(place, name, manifest)}")
    for name in manifest["sizes"]:  # an extra shard would be read with the others
        for path in sorted((place / str(name)).glob(f"*.{ENDINGS[manifest['format']]}")):
            if (extra := f"{name}/{path.name}") not in files:
                damage.append(f"{extra}: does not belong here")
    return damage


def _problem(path: Path, bar: Any, size: int, digest: str) -> str | None:
    """What is wrong with a file; None if nothing is."""
    try:
        read_bytes, read_digest = file_digest(path, bar.update)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    if read_bytes != size:
        return f"has {read_bytes} bytes instead of {size}"
    return None if read_digest == digest else "its content does not fit its checksum"


def _damaged_samples(place: Path, name: str, manifest: dict[str, Any]) -> str:
    """The keys of the damaged samples in a damaged shard, as text; "" for a file that is not a shard."""
    match = re.fullmatch(rf"(\w+)/(\d+)\.({'|'.join(ENDINGS.values())})", name)
    if match is None:
        return ""
    size, shard = match[1], int(match[2])
    try:
        check_regular(os.stat(place / name), place / name)
        with (place / name).open("rb") as file:
            offsets, lengths, checksums, keys = (
                np.load(io.BytesIO(read_file(str(place / "index" / f))), allow_pickle=False)
                for f in (f"{size}.offsets.npy", f"{size}.lengths.npy", f"{size}.checksums.npy", "keys.npy")
            )
            blob = read_file(str(place / "index" / "keys.bin"))
            first = sum(manifest["shards"][:shard])
            bad = []
            for i in range(first, first + manifest["shards"][shard]):
                file.seek(offsets[i])
                if zlib.crc32(file.read(lengths[i])) != checksums[i]:
                    bad.append(os.fsdecode(blob[keys[i] : keys[i + 1]]))
    except (*NO_ARRAY, IndexError):
        return ""
    listed = ", ".join(map(repr, bad[:5])) + (", …" if len(bad) > 5 else "")
    return f"; {len(bad)} damaged samples: {listed}" if bad else "; no sample's own bytes are damaged"
