"""`gpuaug materialize`: augmented epochs on disk, for `source=materialized`."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass

from tqdm.contrib.logging import logging_redirect_tqdm

from gpuaug import checks
from gpuaug.errors import ConfigError, GpuaugError
from gpuaug.files import format_bytes
from gpuaug.tools.materialize.materialize import Materialize
from gpuaug.tools.report import Report
from gpuaug.tools.request import Request

log = logging.getLogger("gpuaug")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to write; the keys of ``conf/gpuaug/command/materialize.yaml``, which says what they mean."""

    out: str | None = None
    epochs: int = 1
    start_epoch: int = 0
    store: str = "uint8"
    chunk: int | None = None
    verify: bool = False
    on: str = "local"
    json: str | None = None

    def __post_init__(self) -> None:
        checks.flag("verify", self.verify)
        checks.text("out", self.out, optional=True)
        checks.text("json", self.json, optional=True)


def main(request: Request) -> int:
    """Write the epochs, and say what they take."""
    settings = Settings(**request.settings())
    if settings.out is None:
        raise ConfigError("`out` must be given: the folder to write, as out=/fast/standard3.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("`gpuaug materialize` runs as one process, which uses all cores. Start it without torchrun.")
    config = request.loader()
    if config.get("mix") is not None and config.mix.get("_target_") is not None:
        log.info("mix is not stored: it is drawn at replay")
    report = Report(file=settings.json)
    with logging_redirect_tqdm(loggers=[log]), request.build(config, mix=None, rank=0, world_size=1) as loader:
        names = ("out", "epochs", "start_epoch", "store", "chunk", "on")
        job = Materialize(loader, **{name: getattr(settings, name) for name in names})
        plan, size = job.plan, job.record.itemsize
        report.add("key", plan["key"], f"{plan['key']} (recipe, source and seed)")
        formula = f"{plan['epochs']} x {plan['samples']} x {size} bytes as {plan['store']} = {format_bytes(job.bytes)}"
        report.add("size", job.bytes, formula)
        count = job.samples_missing
        missing = count * size
        report.add("to_write", missing, f"{format_bytes(missing)}, {format_bytes(job.free)} free in {job.out}")
        begin = time.perf_counter()
        faults = job.run()
        seconds = time.perf_counter() - begin
        report.add("faults", faults, f"{faults} of {job.samples} samples have no pixels")
        if count:
            report.add("images_per_second", count / seconds, f"{count / seconds:.0f} ({count} in {seconds:.1f} s)")
        if settings.verify:
            damaged = job.verify()
            report.values["damaged"] = damaged
            if damaged:
                report.write()
                raise GpuaugError(
                    f"{len(damaged)} files do not have the bytes they were written with: {', '.join(damaged[:5])}. "
                    "Remove them, and run the same command: only they are made anew."
                )
            report.add("verified", format_bytes(job.bytes), f"{format_bytes(job.bytes)}, all as written")
        report.add("replay", str(job.out), f"source=materialized source.root={job.out}")
    report.write()
    return 0
