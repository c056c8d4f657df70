"""`gpuaug preview`: what a recipe does to samples, through the training's own stages, as a PNG or an HTML page."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from gpuaug import checks
from gpuaug.augment.recipe import View
from gpuaug.decode.decoder import Decode
from gpuaug.errors import ConfigError
from gpuaug.loader.loader import Loader
from gpuaug.source.materialized import MaterializedSource
from gpuaug.tools.preview import operations
from gpuaug.tools.preview.collect import colorful, look, whole
from gpuaug.tools.preview.page import page
from gpuaug.tools.preview.picture import color, grid, sheet
from gpuaug.tools.report import Report, png, save
from gpuaug.tools.request import Request
from gpuaug.tools.samples import chosen, indices_of
from gpuaug.tools.sheet import check_pixels

if TYPE_CHECKING:
    from omegaconf import DictConfig

log = logging.getLogger("gpuaug")

WIDE = 6  # pictures in a row, unless `draws` says how many
STOPS = 8  # of the slider: a page of five samples and one view then has about 4 MB
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
        if self.show == "operations" and self.is_page:
            raise ConfigError(
                f"`out` must be a PNG with show=operations: it has no epochs to slide over. Found: {self.out!r}."
            )

    @property
    def is_page(self) -> bool:
        """Whether an HTML page is asked for."""
        return self.out.lower().endswith(PAGES)


def main(request: Request) -> int:
    """Write the picture or the page."""
    settings = Settings(**request.settings())
    out = png(settings.out, "out", also=PAGES)
    report = Report(file=settings.json)
    config = request.loader()
    if config.get("faults") is not None and config.faults.get("policy") == "drop":
        config.faults.policy = "blank"  # a row of the grid stays a row
    decode: Decode = request.build(config.decode) if config.get("decode") is not None else Decode()
    decode = replace(decode, num_threads=decode.num_threads or 1)  # a few whole images; the loader's own says how many
    _say_if_mixed(config)
    with request.build(config, mix=None, num_workers=0, prefetch=0) as loader:  # neither changes a pixel
        if settings.show == "operations" and isinstance(loader.source, MaterializedSource):
            raise ConfigError(
                "show=operations needs images to augment. Found: materialized epochs, augmented already. Show "
                "what they were made of: source=folder source.root=DIR."
            )
        indices = chosen(loader.source, settings.indices, count=settings.samples or SHOWN[settings.show])
        if settings.show == "operations" and settings.indices is None and settings.samples is None:
            indices = [colorful(loader, decode, indices=indices)]
        report.values |= {"indices": indices, "keys": [loader.source.key(i) for i in indices]}
        above = {"heading": _heading(request, loader), "lines": _lines(loader, len(indices))}
        show = _operations if settings.show == "operations" else _samples
        picture = show(loader, decode, indices, settings, above, report)
    if isinstance(picture, str):
        save(out, "out", picture)
        report.add("preview", str(out), f"{out} ({len(picture) / 1e6:.1f} MB)")
    else:
        stream = io.BytesIO()
        picture.save(stream, "PNG", optimize=True)
        save(out, "out", stream.getvalue())
        report.add("preview", str(out), f"{out} ({picture.width} x {picture.height})")
    report.write()
    return 0


def _samples(
    loader: Loader, decode: Decode, indices: list[int], settings: Settings, above: dict[str, Any], report: Report
) -> Image.Image | str:
    views = [title(view, loader.augment.views) for view in loader.augment.views]
    draws = settings.draws or (STOPS if settings.is_page else max(1, WIDE // len(views)))
    if settings.draws is None and isinstance(loader.source, MaterializedSource):
        draws = min(draws, int(loader.source.manifest["epochs"]))  # later ones show them again
    epochs = range(settings.epoch, settings.epoch + draws)
    # the largest view's; an estimate, before anything is made
    each = settings.cell**2 if not settings.is_page else sum(_area(view) for view in loader.augment.views) // len(views)
    check_pixels(len(indices) * draws * len(views) * each)
    samples = look(loader, decode, indices=indices, epochs=epochs)
    report.values |= {"epochs": list(epochs), "views": views}
    if settings.is_page:
        return page(samples, **above, epochs=epochs, views=views, color=color)
    return grid(samples, **above, epochs=epochs, views=views, cell=settings.cell)


def _area(view: View) -> int:
    """Pixels of a view's picture; 0 where they depend on the image."""
    crop = view.augment.crop
    return 0 if crop is None else crop.size[0] * crop.size[1]


def _operations(
    loader: Loader, decode: Decode, indices: list[int], settings: Settings, above: dict[str, Any], report: Report
) -> Image.Image | str:
    views = [view for view in loader.augment.views if not view.copy]
    names = {name for view in views for name in view.augment.ops}
    check_pixels(len(indices) * len(names) * settings.cell**2)
    rows = operations.rows(views, whole(loader, decode, views=views, indices=indices), seed=loader.seed)
    if not rows:
        raise ConfigError(
            "show=operations needs a recipe with operations. Found: none. Choose another one, as augment=standard."
        )
    report.values["operations"] = [{"name": r.name, "notes": r.notes, "values": r.captions} for r in rows]
    return sheet(rows, **above, cell=settings.cell)


def title(view: View, views: Sequence[View]) -> str:
    """What a view is called above its column: its name, and its number where there are several of it."""
    copies = sum(v.name == view.name for v in views)
    number = f" {view.copy + 1}" if copies > 1 else ""
    return f"{view.name or ('view' if copies > 1 else '')}{number}"


def _say_if_mixed(config: DictConfig) -> None:
    mix = config.get("mix")
    if mix is not None and (mix.get("mixup_alpha") or mix.get("cutmix_alpha")):
        log.info("preview without mix: what it does depends on which samples share a batch")


def _heading(request: Request, loader: Loader) -> str:
    named = [text.partition("=")[2] for text in request.overrides if text.startswith("augment=")]
    if named:
        return named[-1]
    return "standard" if request.config_name is None else str(request.at or type(loader.augment).__name__)


def _lines(loader: Loader, count: int) -> list[str]:
    """What the recipe does, one line for each named view; and of what the rows are."""
    lines = []
    for view in loader.augment.views:
        if view.copy:
            continue
        augment = view.augment
        steps = [type(augment.crop).__name__] if augment.crop is not None else []
        steps += list(augment.ops)
        copies = f" ({augment.copies} views)" if augment.copies > 1 else ""
        lines.append(f"{view.name + copies + ': ' if view.name else ''}{', '.join(steps) or 'nothing'}")
        if not view.name and copies:
            lines[-1] += f"; {augment.copies} views of every image"
    root = getattr(loader.source, "root", None)
    if root is not None and Path(root).is_relative_to(Path.cwd()):
        root = Path(root).relative_to(Path.cwd())
    where = "" if root is None else f" of {root}"
    return [*lines, f"seed {loader.seed}; {count} of {len(loader.source)} samples{where}"]
