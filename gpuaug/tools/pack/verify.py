"""`gpuaug pack verify=true`: every file of a finished folder against its checksum."""

from __future__ import annotations

import io
import os
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from gpuaug.errors import SourceError
from gpuaug.source.index import NO_ARRAY
from gpuaug.source.local import check_regular, read_file
from gpuaug.source.packed import ENDINGS, MANIFEST
from gpuaug.tools.pack.job import finished
from gpuaug.tools.store import damaged


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
    lines = []
    for path, problem in damaged({place / name: files[name][1] for name in files}, num_workers=num_workers).items():
        name = str(path.relative_to(place))
        if path.is_file() and (actual := path.stat().st_size) != files[name][0]:
            problem = f"has {actual} bytes instead of {files[name][0]}"
        lines.append(f"{name}: {problem}{_damaged_samples(place, name, manifest)}")
    for size in manifest["sizes"]:  # an extra shard would be read with the others
        for path in sorted((place / str(size)).glob(f"*.{ENDINGS[manifest['format']]}")):
            if (extra := f"{size}/{path.name}") not in files:
                lines.append(f"{extra}: does not belong here")
    return lines


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
