"""`gpuaug pack`: a source resized once and written as JPEG shards or as pixels, and checked."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from gpuaug import checks
from gpuaug.decode.decoder import Decode
from gpuaug.errors import ConfigError, SourceError
from gpuaug.loader.faults import Faults
from gpuaug.tools.pack.job import Pack, finished
from gpuaug.tools.pack.pack import pack
from gpuaug.tools.pack.verify import verify
from gpuaug.tools.report import Report
from gpuaug.tools.request import Request

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
    before = finished(out)
    if not (settings.verify and _nothing_to_pack(config) and before is not None):
        decode, faults = config.get("decode"), config.get("faults")
        begin = time.monotonic()
        manifest = pack(
            request.build(config.source),
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


def _nothing_to_pack(config: Any) -> bool:
    from omegaconf import OmegaConf

    source = config.get("source")
    return source is None or OmegaConf.is_missing(source, "root")


def _refuse_overrides_without_effect(request: Request) -> None:
    """Raise ConfigError for an override that changes nothing here, because augmentation comes after packing."""
    if request.config_name is not None:
        return  # the user's own configuration may describe a whole training
    for root, text in request.others():
        if "=" in text and root.split("/")[0] not in (*PARTS, "hydra"):
            raise ConfigError(
                f"`{root}` changes nothing that `gpuaug pack` writes. It reads its own keys and {', '.join(PARTS)}."
            )
