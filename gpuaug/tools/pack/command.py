"""`gpuaug pack`: a source resized once and written as JPEG shards or as pixels, and checked."""

from __future__ import annotations

import io
import os
import re
import time
import zlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from omegaconf import OmegaConf

from gpuaug import checks
from gpuaug.decode.decoder import Decode
from gpuaug.errors import ConfigError, SourceError
from gpuaug.files import check_regular
from gpuaug.loader.faults import Faults
from gpuaug.source.index import NO_ARRAY
from gpuaug.source.local import read_file
from gpuaug.source.packed import ENDINGS, MANIFEST
from gpuaug.tools.pack.job import Pack, finished
from gpuaug.tools.pack.pack import pack
from gpuaug.tools.report import Report
from gpuaug.tools.request import Request
from gpuaug.tools.store import damaged

PARTS = ("source", "decode", "faults")  # the keys of the loader that decide what is packed


@dataclass(frozen=True, kw_only=True)
class Settings(Pack):
    """What to write and how; the keys of ``conf/gpuaug/command/pack.yaml``, which says what they mean."""

    out: str | None = None
    num_workers: int | None = None
    on: Literal["local", "ray"] = "local"
    verify: bool = False
    json: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.text("out", self.out, optional=True)
        checks.text("json", self.json, optional=True)
        checks.flag("verify", self.verify)


def main(request: Request) -> int:
    """Pack, or continue a stopped run; then check the files if `verify` is set."""
    settings = Settings(**request.settings())
    if (out := settings.out) is None:
        raise ConfigError("`out` must be given: the folder to write. Set it: out=DIR")
    report = Report(file=settings.json)
    _refuse_overrides_without_effect(request)
    config = request.loader()
    before, source = finished(out), config.get("source")
    only_verify = settings.verify and before is not None and (source is None or OmegaConf.is_missing(source, "root"))
    if not only_verify:
        decode, faults = config.get("decode"), config.get("faults")
        begin = time.monotonic()
        manifest = pack(
            request.build(source),
            out,
            what=Pack(**{field.name: getattr(settings, field.name) for field in fields(Pack)}),
            decode=Decode() if decode is None else request.build(decode),
            faults=Faults() if faults is None else request.build(faults),
            num_workers=settings.num_workers,
            on=settings.on,
        )
        _add_result(report, manifest, out, seconds=None if before is not None else time.monotonic() - begin)
    if settings.verify:
        if damage := verify(out, num_workers=settings.num_workers or None):
            report.values["damage"] = damage
            report.write()
            more = f", and {len(damage) - 20} more" if len(damage) > 20 else ""
            listed = "\n  ".join(damage[:20])
            raise SourceError(
                f"{out!r} is damaged in {len(damage)} files:\n  {listed}{more}\nPack again into a new folder."
            )
        report.add("verified", True, "all files are as they were written")
    report.write()
    return 0


def _add_result(report: Report, manifest: dict[str, Any], out: str, *, seconds: float | None) -> None:
    total, bad = manifest["samples"], len(manifest["dropped"])
    left_out = f", {bad} bad ones left out" if bad else ""
    speed = "finished already" if seconds is None else f"{seconds:.1f} s"
    report.add("images", total, f"{total}{left_out} ({speed})")
    report.values |= {"dropped": bad, "seconds": seconds}
    for size in manifest["sizes"]:
        used = sum(bytes_ for name, (bytes_, _) in manifest["files"].items() if name.startswith(f"{size}/"))
        report.add(
            f"size_{size}", used, f"{used / 1e6:.1f} MB in {len(manifest['shards'])} shards: {Path(out) / str(size)}"
        )
    or_webdataset = "" if manifest["format"] == "uint8" else ", or as WebDataset shards"
    report.add("read_it_with", out, f"source=packed source.root={out}{or_webdataset}")


def _refuse_overrides_without_effect(request: Request) -> None:
    """Raise ConfigError for an override that changes nothing here, because augmentation comes after packing."""
    if request.config_name is not None:
        return  # the user's own configuration may describe a whole training
    for root, text in request.others():
        if "=" in text and root.split("/")[0] not in (*PARTS, "hydra"):
            raise ConfigError(
                f"`{root}` changes nothing that `gpuaug pack` writes. It reads its own keys and {', '.join(PARTS)}."
            )


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
