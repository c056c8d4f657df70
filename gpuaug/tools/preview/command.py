"""`gpuaug preview`: what a recipe does to samples, through the training's own stages, as a PNG or an HTML page."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from tqdm import tqdm

from gpuaug.augment.crop import RandomResizedCrop
from gpuaug.augment.recipe import View
from gpuaug.batch import Boxes, EncodedBatch, Fault
from gpuaug.decode.decoder import Decode
from gpuaug.errors import ConfigError
from gpuaug.loader.loader import Loader
from gpuaug.read.reader import Reader
from gpuaug.source.materialized import MaterializedSource
from gpuaug.tools.preview import operations
from gpuaug.tools.preview.page import page as html_page
from gpuaug.tools.report import Report, check_text, png, written
from gpuaug.tools.request import Request
from gpuaug.tools.samples import Sample, at_least, chosen, indices_of
from gpuaug.tools.sheet import FAINT, INK, blank, check_pixels, fitting, font, scaled, wrapped

if TYPE_CHECKING:
    from omegaconf import DictConfig

log = logging.getLogger("gpuaug")

WIDE = 6  # pictures beside each other that still can be looked at, where `draws` does not say how many
STOPS = 8  # of the slider: a page of five samples and one view then has about 4 MB
SHOWN = {"samples": 5, "operations": 8}  # what can be shown, and of how many; of the operations the most colorful only
COLORS = (
    (230, 57, 70),
    (29, 130, 200),
    (42, 157, 90),
    (244, 140, 30),
    (140, 82, 190),
    (20, 160, 160),
    (214, 70, 150),
    (120, 120, 20),
)
GAP, MARGIN, CAPTION = 8, 20, 34
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
        for name, low in (("epoch", 0), ("cell", 16)):
            at_least(name, getattr(self, name), low)
        for name in ("samples", "draws"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        if self.show not in SHOWN:
            raise ConfigError(f"`show` must be one of {', '.join(SHOWN)}. Found: {self.show!r}.")
        object.__setattr__(self, "indices", indices_of(self.indices))
        check_text(self, "out")
        check_text(self, "json", optional=True)
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
        with written(out, "out"):
            out.write_text(picture, encoding="utf-8")
        report.add("preview", str(out), f"{out} ({len(picture) / 1e6:.1f} MB)")
    else:
        with written(out, "out"):
            picture.save(out, "PNG", optimize=True)
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
        return html_page(samples, **above, epochs=epochs, views=views, color=_color)
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


def look(loader: Loader, decode: Decode, *, indices: Sequence[int], epochs: Sequence[int]) -> list[Sample]:
    """The samples as they are, and as training sees them in each of the epochs.

    Args:
        loader: what training would iterate.
        decode: its settings of the decoder, for the whole images.
        indices: numbers in the source.
        epochs: whose draws to show.
    """
    number = np.array(indices, dtype=np.int64)
    encoded = _read(loader, indices)
    decoder = decode.open("cpu")
    seen = decoder.read_headers(encoded)
    originals = [image.numpy() for image in decoder.full(encoded, seen)]
    decoder.close()
    heights, widths = np.maximum(seen.height, 1), np.maximum(seen.width, 1)
    boxes: list[list[tuple[int, int, int, int]]] = [[] for _ in indices]
    pictures: list[list[Image.Image]] = [[] for _ in indices]
    labels = None
    absent = {"absent": "not stored, only what was made of it"} if isinstance(loader.source, MaterializedSource) else {}
    for epoch in tqdm(epochs, desc="preview", unit="epoch", leave=False, disable=None):
        drawn = loader.augment.draw(seed=loader.seed, epoch=epoch, indices=number)
        batch = loader.fetch(list(indices), epoch=epoch)
        labels = batch.labels
        images = batch.images if isinstance(batch.images, list) else [batch.images]
        for view, tensor, part in zip(
            loader.augment.views, images, loader.augment.boxes(drawn, heights, widths), strict=True
        ):
            for row, picture in enumerate(_pictures(tensor, view)):
                pictures[row].append(picture)
                boxes[row].append(_corners(part, row))
    return [
        Sample(
            index=int(index),
            key=loader.source.key(int(index)),
            label=_label(loader.source, labels, row),
            original=Image.fromarray(originals[row]) if originals[row].size else None,
            boxes=boxes[row],
            pictures=pictures[row],
            **absent,
        )
        for row, index in enumerate(indices)
    ]


def whole(loader: Loader, decode: Decode, *, views: Sequence[View], indices: Sequence[int]) -> list[list[Tensor]]:
    """Per view and sample, uint8 [H, W, 3] on the loader's device: the middle of the image at the view's size.

    Raises:
        ConfigError: if a sample cannot be decoded.
    """
    encoded = _read(loader, indices)
    decoder = decode.open(loader.device)
    seen = decoder.read_headers(encoded)
    _check_whole(loader, indices, [*encoded.faults, *seen.faults])
    made: list[list[Tensor]] = []
    for view in views:
        crop = view.augment.crop
        if crop is None:
            made.append([torch.as_tensor(image).to(loader.device) for image in decoder.full(encoded, seen)])
            continue
        u = None
        if crop.count:  # its middle: where no draw fits, the crop falls back to it
            height, width = crop.size
            crop = RandomResizedCrop(crop.size, scale=(1, 1), ratio=(width / height,) * 2)
            u = np.full((len(indices), crop.count), 0.5, dtype=np.float32)
        images, faults = decoder.pixels(encoded, seen, [crop.boxes(u, seen.height, seen.width)])
        _check_whole(loader, indices, faults)
        made.append(list(images[0]))
    decoder.close()
    return made


def _check_whole(loader: Loader, indices: Sequence[int], faults: Sequence[Fault]) -> None:
    if faults:
        index = indices[faults[0].row]
        raise ConfigError(
            "`indices` must name samples that can be decoded, with show=operations. Found: sample "
            f"{index} ({loader.source.key(index)!r}), {faults[0].reason}."
        )


def colorful(loader: Loader, decode: Decode, *, indices: Sequence[int]) -> int:
    """The one of the samples whose channels differ most: on a gray one half of the operations do nothing."""
    encoded = _read(loader, indices)
    decoder = decode.open("cpu")
    images = [torch.as_tensor(image).numpy() for image in decoder.full(encoded, decoder.read_headers(encoded))]
    decoder.close()
    spread = [float(np.ptp(image, axis=2).mean()) if image.size else -1.0 for image in images]
    return indices[int(np.argmax(spread))]


def _read(loader: Loader, indices: Sequence[int]) -> EncodedBatch:
    number = torch.tensor(list(indices), dtype=torch.int64)
    zeros = torch.zeros_like(number)
    return next(iter(Reader(loader.source, num_workers=0).batches([(number, zeros, zeros == 0)])))


def title(view: View, views: Sequence[View]) -> str:
    """What a view is called above its column: its name, and its number where there are several of it."""
    copies = sum(v.name == view.name for v in views)
    number = f" {view.copy + 1}" if copies > 1 else ""
    return f"{view.name or ('view' if copies > 1 else '')}{number}"


def grid(
    samples: Sequence[Sample],
    *,
    heading: str,
    lines: Sequence[str],
    epochs: Sequence[int],
    views: Sequence[str],
    cell: int,
) -> Image.Image:
    """Rows of samples: the original with the boxes that were read of it, then the views of each epoch.

    Args:
        samples: the rows.
        heading, lines: text above the grid.
        epochs: one group of columns each.
        views: titles of the columns in a group.
        cell: pixels of the longer side of the largest picture; others keep their size relative to it.
    """
    big, bold, small = font(22), font(15), font(12)
    largest = max(max(p.size) for s in samples for p in s.pictures)
    left = MARGIN
    scale = cell / largest
    wide = round(cell * 1.35)  # the original is shown larger: boxes are drawn on it
    by_column = zip(*(s.pictures for s in samples), strict=True)
    columns = [max(64, round(scale * max(p.width for p in column))) for column in by_column]
    starts = [left + wide + 2 * GAP]
    for n, column in enumerate(columns[:-1], start=1):
        starts.append(starts[-1] + column + (3 * GAP if n % len(views) == 0 and len(views) > 1 else GAP))
    width = max(starts[-1] + columns[-1] + MARGIN, 480)
    intro = [part for line in lines for part in wrapped(line, small, width - 2 * MARGIN)]
    top = MARGIN + 32 + 18 * len(intro) + 2 * GAP
    named = any(views)
    body = top + 28 + (18 if named else 0)
    pitch = cell + CAPTION + 2 * GAP
    page = blank(width, body + pitch * len(samples) + MARGIN - 2 * GAP)
    pen = ImageDraw.Draw(page)

    pen.text((left, MARGIN - 4), heading, INK, big)
    for n, line in enumerate(intro):
        pen.text((left, MARGIN + 30 + 18 * n), line, FAINT, small)
    pen.text((left, top), "original", INK, bold)
    for n, x in enumerate(starts):
        epoch, view = divmod(n, len(views))
        if view == 0:
            pen.text((x, top), f"epoch {epochs[epoch]}", INK, bold)
        if named:
            pen.text((x, top + 21), fitting(views[view], small, columns[n], middle=True), FAINT, small)
        pen.line((x, body - 5, x + columns[n] - 1, body - 5), _color(n), 3)

    for row, sample in enumerate(samples):
        y = body + row * pitch
        _paste_original(page, sample, x=left, y=y, width=wide, height=cell)
        pen.text((left, y + cell + 3), fitting(sample.label or sample.key, bold, wide, middle=True), INK, bold)
        note = f"{sample.index}: {Path(sample.key).name}" if sample.label else f"sample {sample.index}"
        pen.text((left, y + cell + 20), fitting(note, small, wide, middle=True), FAINT, small)
        for x, picture in zip(starts, sample.pictures, strict=True):
            page.paste(_scaled(picture, scale), (x, y))
    return page


def sheet(rows: Sequence[operations.Row], *, heading: str, lines: Sequence[str], cell: int) -> Image.Image:
    """Rows of operations: what they do and to what extent, the image before, and the image at every value.

    Args:
        rows: the operations.
        heading, lines: text above them.
        cell: pixels of the longer side of a picture.
    """
    big, bold, small = font(22), font(15), font(12)
    cell = max(cell, 96)  # captions are below the pictures
    left, column = MARGIN, 190
    pictures = max(len(one) for row in rows for one in row.pictures)
    width = left + column + pictures * (cell + GAP) + MARGIN
    intro = [part for line in lines for part in wrapped(line, small, width - 2 * MARGIN)]
    noted = [[part for note in row.notes for part in wrapped(note, small, column - GAP)] for row in rows]
    captions = [["before", *row.captions] for row in rows]
    below = [[wrapped(text, small, cell) for text in texts] for texts in captions]
    heights = [
        max(
            len(row.pictures) * (cell + GAP) + 16 * max(map(len, texts)),
            22 + 16 * len(notes),
        )
        + 2 * GAP
        for row, texts, notes in zip(rows, below, noted, strict=True)
    ]
    top = MARGIN + 32 + 18 * len(intro) + GAP
    page = blank(width, top + sum(heights) + MARGIN - GAP)
    pen = ImageDraw.Draw(page)
    pen.text((left, MARGIN - 4), heading, INK, big)
    for n, line in enumerate(intro):
        pen.text((left, MARGIN + 30 + 18 * n), line, FAINT, small)
    y = top
    for row, texts, notes, height in zip(rows, below, noted, heights, strict=True):
        pen.line((left, y, width - MARGIN, y), (225, 225, 230), 1)
        at = y + GAP
        pen.text((left, at - 2), fitting(row.name, bold, column - GAP, middle=True), INK, bold)
        for n, note in enumerate(notes):
            pen.text((left, at + 20 + 16 * n), note, FAINT, small)
        for one in row.pictures:
            for n, picture in enumerate(one):
                shown = _scaled(picture, cell / max(picture.size))
                page.paste(shown, (left + column + n * (cell + GAP), at))
            at += cell + GAP
        for n, parts in enumerate(texts):
            for k, part in enumerate(parts):
                pen.text((left + column + n * (cell + GAP), at - 4 + 16 * k), part, INK if n else FAINT, small)
        y += height
    return page


def _paste_original(page: Image.Image, sample: Sample, *, x: int, y: int, width: int, height: int) -> None:
    pen = ImageDraw.Draw(page)
    if sample.original is None:
        pen.rectangle((x, y, x + width - 1, y + height - 1), (240, 240, 240))
        pen.text((x + GAP, y + GAP), sample.absent, FAINT, font(12))
        return
    scale = min(width / sample.original.width, height / sample.original.height)
    page.paste(_scaled(sample.original, scale), (x, y))
    # the first epoch's on top; more boxes than colors could not be told apart
    for n in reversed(range(min(len(COLORS), len(sample.boxes)))):
        corners = [round(v * scale) for v in sample.boxes[n]]
        at = (x + corners[0], y + corners[1], x + max(corners[0], corners[2] - 1), y + max(corners[1], corners[3] - 1))
        pen.rectangle(at, outline=_color(n), width=2)


def _pictures(images: Tensor, view: View) -> list[Image.Image]:
    """Images [B, 3, H, W] as a recipe gives them, without its normalization, for the eye."""
    pixels = images.detach().float().cpu()
    if (normalize := view.augment.normalize) is not None:
        mean, std = (b.float().cpu().view(3, 1, 1) for b in (normalize.mean, normalize.std))
        pixels = pixels * std + mean
    array = pixels.clamp(0, 1).mul(255).round().byte().permute(0, 2, 3, 1).numpy()
    return [Image.fromarray(image) for image in array]


def _corners(boxes: Boxes, row: int) -> tuple[int, int, int, int]:
    top, left, height, width = boxes.box[row].tolist()
    return left, top, left + width, top + height


def _label(source: Any, labels: Tensor | None, row: int) -> str | None:
    if labels is None:
        return None
    value = labels[row].tolist()
    if isinstance(value, int) and source.classes is not None:
        return str(source.classes[value])
    return f"label {value:g}" if isinstance(value, int | float) else f"label {[round(v, 2) for v in value]}"


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


def _scaled(image: Image.Image, scale: float) -> Image.Image:
    return scaled(image, (max(1, round(image.width * scale)), max(1, round(image.height * scale))))


def _color(n: int) -> tuple[int, int, int]:
    return COLORS[n % len(COLORS)]
