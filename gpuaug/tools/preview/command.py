"""`gpuaug preview`: shows what a recipe does to samples, as a PNG, an HTML page, or a page with sliders."""

from __future__ import annotations

import io
import logging
from pathlib import Path

from gpuaug.display.sheet import page, sheet
from gpuaug.errors import ConfigError
from gpuaug.tools.preview import server
from gpuaug.tools.preview.drawing import Settings, drawing
from gpuaug.tools.report import Report, output, save
from gpuaug.tools.request import Request

log = logging.getLogger("gpuaug")

PAGES = (".html", ".htm")


def main(request: Request) -> int:
    settings = Settings(**request.settings())
    if settings.serve:
        return server.main(request, settings)
    if Path(settings.out).suffix.lower() not in ("", ".png", *PAGES):
        raise ConfigError(f"`out` must end in .png or {' or '.join(PAGES)}. Found: {settings.out!r}.")
    out = output(settings.out, "out")
    report = Report(file=settings.json)
    config = request.loader()
    if (mix := config.get("mix")) is not None and (mix.get("mixup_alpha") or mix.get("cutmix_alpha")):
        log.info("preview shows no mix, because mix depends on which samples share a batch")
    is_page = out.suffix.lower() in PAGES
    rows, above, values = drawing(request, config, settings, is_page=is_page)
    report.values |= values
    if is_page:
        text = page(rows, **above)
        save(out, "out", text)
        size = f"{len(text) / 1e6:.1f} MB"
    else:
        stream, picture = io.BytesIO(), sheet(rows, **above)
        picture.save(stream, "PNG", optimize=True)
        save(out, "out", stream.getvalue())
        size = f"{picture.width} x {picture.height}"
    report.add("preview", str(out), f"{out} ({size})")
    report.write()
    return 0
