"""`gpuaug preview`: what a recipe does to samples, through the training's own stages, as a PNG or an HTML page."""

from __future__ import annotations

import io
import logging
from dataclasses import dataclass, replace
from typing import Any

from gpuaug import checks
from gpuaug.decode.decoder import Decode
from gpuaug.errors import ConfigError
from gpuaug.loader.loader import Loader
from gpuaug.source.materialized import MaterializedSource
from gpuaug.tools.preview import operations
from gpuaug.tools.preview.collect import colorful, rows, samples_of, whole
from gpuaug.tools.report import Report, png, save
from gpuaug.tools.request import Request
from gpuaug.tools.samples import chosen, indices_of
from gpuaug.tools.sheet import Row, check_pixels, page, sheet

log = logging.getLogger("gpuaug")

WIDE = 6  # pictures in a row, unless `draws` says how many
SHOWN = {"samples": 5, "operations": 8}  # samples read; for operations the most colorful one is shown
PAGES = (".html", ".htm")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to show; the keys of ``conf/gpuaug/command/preview.yaml``, which says what they mean."""

    out: str = "preview.png"
    show: str = "samples"
    indices: Any = None
    samples: int | None = None
    epoch: int = 0
    draws: int | None = None
    cell: int = 160
    json: str | None = None

    def __post_init__(self) -> None:
        checks.whole_number("epoch", self.epoch, 0)
        checks.whole_number("cell", self.cell, 16)
        checks.whole_number("samples", self.samples, 1, optional=True)
        checks.whole_number("draws", self.draws, 1, optional=True)
        checks.one_of("show", self.show, SHOWN)
        object.__setattr__(self, "indices", indices_of(self.indices))
        checks.text("out", self.out)
        checks.text("json", self.json, optional=True)


def main(request: Request) -> int:
    """Write the picture or the page."""
    settings = Settings(**request.settings())
    out = png(settings.out, "out", also=PAGES)
    report = Report(file=settings.json)
    config = request.loader()
    if config.get("faults") is not None and config.faults.get("policy") == "drop":
        config.faults.policy = "blank"  # a row of the picture stays a row
    decode: Decode = request.build(config.decode) if config.get("decode") is not None else Decode()
    decode = replace(decode, num_threads=decode.num_threads or 1)  # a few whole images; the loader's own says how many
    if (mix := config.get("mix")) is not None and (mix.get("mixup_alpha") or mix.get("cutmix_alpha")):
        log.info("preview without mix: what it does depends on which samples share a batch")
    is_page, of_operations = out.suffix.lower() in PAGES, settings.show == "operations"
    with request.build(config, mix=None, num_workers=0, prefetch=0) as loader:  # neither changes a pixel
        indices = chosen(loader.source, settings.indices, count=settings.samples or SHOWN[settings.show])
        if of_operations:
            if settings.indices is None and settings.samples is None:
                indices = [colorful(loader, decode, indices=indices)]
            made = _operations(loader, decode, indices, settings, report)
        else:
            made = _samples(loader, decode, indices, settings, report, is_page=is_page)
        report.values |= {"indices": indices, "keys": [loader.source.key(i) for i in indices]}
        named = [text.partition("=")[2] for text in request.overrides if text.startswith("augment=")]
        named = named or ["standard" if request.config_name is None else request.at or type(loader.augment).__name__]
        lines = _lines(loader, len(indices))
    if is_page:
        text = page(made, heading=named[-1], lines=lines)
        save(out, "out", text)
        report.add("preview", str(out), f"{out} ({len(text) / 1e6:.1f} MB)")
    else:
        stream, picture = io.BytesIO(), sheet(made, heading=named[-1], lines=lines)
        picture.save(stream, "PNG", optimize=True)
        save(out, "out", stream.getvalue())
        report.add("preview", str(out), f"{out} ({picture.width} x {picture.height})")
    report.write()
    return 0


def _samples(
    loader: Loader, decode: Decode, indices: list[int], settings: Settings, report: Report, *, is_page: bool
) -> list[Row]:
    views = []
    for view in loader.augment.views:  # below a picture: the view's name, and its number where there are several of it
        several = view.augment.copies > 1
        views.append(f"{view.name or ('view' if several else '')}{f' {view.copy + 1}' if several else ''}")
    draws = settings.draws or max(1, WIDE // len(views))
    if settings.draws is None and isinstance(loader.source, MaterializedSource):
        draws = min(draws, int(loader.source.manifest["epochs"]))  # later ones show them again
    crops = [view.augment.crop for view in loader.augment.views]
    pixels = sum(c.size[0] * c.size[1] for c in crops if c) if is_page else len(views) * settings.cell**2
    check_pixels(len(indices) * draws * pixels)  # an estimate, before anything is made
    epochs = range(settings.epoch, settings.epoch + draws)
    report.values |= {"epochs": list(epochs), "views": views}
    samples = samples_of(loader, decode, indices=indices, epochs=epochs)
    return rows(samples, epochs=epochs, views=views, cell=None if is_page else settings.cell)


def _operations(loader: Loader, decode: Decode, indices: list[int], settings: Settings, report: Report) -> list[Row]:
    if isinstance(loader.source, MaterializedSource):
        raise ConfigError(
            "show=operations needs images to augment. Found: materialized epochs, augmented already. Show "
            "what they were made of: source=folder source.root=DIR."
        )
    views = [view for view in loader.augment.views if not view.copy]
    check_pixels(len(indices) * len({name for view in views for name in view.augment.ops}) * settings.cell**2)
    images = whole(loader, decode, views=views, indices=indices)
    made = operations.rows(views, images, seed=loader.seed, cell=settings.cell)
    if not made:
        raise ConfigError(
            "show=operations needs a recipe with operations. Found: none. Choose another one, as augment=standard."
        )
    report.values["operations"] = [
        {"name": row.title, "notes": row.notes, "values": [cell.caption for cell in row.cells[1:]]} for row in made
    ]
    return made


def _lines(loader: Loader, count: int) -> list[str]:
    """What the recipe does, one line for each named view; and of what the rows are."""
    lines = []
    for view in loader.augment.views:
        augment = view.augment
        if not view.copy:
            steps = [type(augment.crop).__name__] if augment.crop is not None else []
            copies = f" ({augment.copies} views)" if augment.copies > 1 else ""
            name = f"{view.name}{copies}: " if view.name or copies else ""
            lines.append(f"{name}{', '.join([*steps, *augment.ops]) or 'nothing'}")
    root = getattr(loader.source, "root", None)
    of = "" if root is None else f" of {root}"
    return [*lines, f"seed {loader.seed}; {count} of {len(loader.source)} samples{of}"]
