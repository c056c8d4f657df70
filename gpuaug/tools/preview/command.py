"""`gpuaug preview`: shows what a recipe does to samples as a PNG or HTML page, with the same stages as training."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor
from tqdm import tqdm

from gpuaug import checks
from gpuaug.augment.recipe import View
from gpuaug.decode.decoder import Decode
from gpuaug.errors import ConfigError
from gpuaug.loader.loader import Loader
from gpuaug.read.reader import Reader
from gpuaug.source.materialized import MaterializedSource
from gpuaug.tools.preview import operations
from gpuaug.tools.report import Report, png, save
from gpuaug.tools.request import Keys, Request
from gpuaug.tools.sheet import Cell, Row, check_pixels, page, scaled, sheet

log = logging.getLogger("gpuaug")

WIDE = 6  # pictures in a row, unless `draws` is set
SHOWN = {"samples": 5, "operations": 8}  # samples to read; show=operations shows the most colorful one of them
PAGES = (".html", ".htm")


@dataclass(frozen=True, kw_only=True)
class Settings(Keys):
    """What to show."""

    out: str = "preview.png"
    show: str = "samples"
    indices: Any = None
    samples: int | None = None
    epoch: int = 0
    draws: int | None = None
    cell: int = 160

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole_number("epoch", self.epoch, 0)
        checks.whole_number("cell", self.cell, 16)
        checks.whole_number("samples", self.samples, 1, optional=True)
        checks.whole_number("draws", self.draws, 1, optional=True)
        checks.one_of("show", self.show, SHOWN)
        object.__setattr__(self, "indices", indices_of(self.indices))


def main(request: Request) -> int:
    """Write the picture or the page."""
    settings = Settings(**request.settings())
    out = png(settings.out, "out", also=PAGES)
    report = Report(file=settings.json)
    config = request.loader()
    if config.get("faults") is not None and config.faults.get("policy") == "drop":
        config.faults.policy = "blank"  # keep a row for each sample
    decode: Decode = request.build(config.decode) if config.get("decode") is not None else Decode()
    decode = replace(decode, num_threads=decode.num_threads or 1)  # only a few images are decoded whole
    if (mix := config.get("mix")) is not None and (mix.get("mixup_alpha") or mix.get("cutmix_alpha")):
        log.info("preview shows no mix, because mix depends on which samples share a batch")
    is_page, of_operations = out.suffix.lower() in PAGES, settings.show == "operations"
    with request.build(config, mix=None, num_workers=0, prefetch=0) as loader:  # these two change no pixel
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
    for view in loader.augment.views:  # captions: the view's name, and a number if it has several copies
        several = view.augment.copies > 1
        views.append(f"{view.name or ('view' if several else '')}{f' {view.copy + 1}' if several else ''}")
    draws = settings.draws or max(1, WIDE // len(views))
    if settings.draws is None and isinstance(loader.source, MaterializedSource):
        draws = min(draws, int(loader.source.manifest["epochs"]))  # later epochs repeat the stored ones
    crops = [view.augment.crop for view in loader.augment.views]
    pixels = sum(c.size[0] * c.size[1] for c in crops if c) if is_page else len(views) * settings.cell**2
    check_pixels(len(indices) * draws * pixels)  # an estimate, to fail early
    epochs = range(settings.epoch, settings.epoch + draws)
    report.values |= {"epochs": list(epochs), "views": views}
    samples = samples_of(loader, decode, indices=indices, epochs=epochs)
    return rows(samples, epochs=epochs, views=views, cell=None if is_page else settings.cell)


def _operations(loader: Loader, decode: Decode, indices: list[int], settings: Settings, report: Report) -> list[Row]:
    if isinstance(loader.source, MaterializedSource):
        raise ConfigError(
            "show=operations needs images to augment. Found: materialized epochs, which are already augmented. "
            "Show the original images: source=folder source.root=DIR."
        )
    views = [view for view in loader.augment.views if not view.copy]
    check_pixels(len(indices) * len({name for view in views for name in view.augment.ops}) * settings.cell**2)
    images = whole(loader, decode, views=views, indices=indices)
    made = operations.rows(views, images, seed=loader.seed, cell=settings.cell)
    if not made:
        raise ConfigError(
            "show=operations needs a recipe with operations. Found: none. Choose another recipe: augment=standard."
        )
    report.values["operations"] = [
        {"name": row.title, "notes": row.notes, "values": [cell.caption for cell in row.cells[1:]]} for row in made
    ]
    return made


def _lines(loader: Loader, count: int) -> list[str]:
    """The recipe's operations, one line per named view, then the seed and the source."""
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


@dataclass(frozen=True)
class Sample:
    """A sample to show: the original image, and the training images of some epochs."""

    index: int
    key: str
    label: str | None
    original: Image.Image | None
    boxes: list[tuple[int, int, int, int]]  # (left, top, right, bottom) in the original, one box per picture
    pictures: list[Image.Image]  # all views of the first epoch, then all views of the next one
    absent: str = "cannot be decoded"  # why the original is None


def indices_of(given: Any) -> list[int] | None:
    """The value of the key `indices`: a list of numbers, one number, or None."""
    if isinstance(given, int) and not isinstance(given, bool):
        given = [given]
    if given is not None and (not isinstance(given, list) or not given or any(type(i) is not int for i in given)):
        raise ConfigError(f"`indices` must be a list of sample numbers, such as [3,14,15]. Found: {given!r}.")
    return given


def chosen(source: Any, indices: list[int] | None, *, count: int) -> list[int]:
    """Sample numbers: ``indices`` (none excluded by the source), or ``count`` evenly spread ones."""
    active = np.arange(len(source)) if source.indices is None else source.indices.numpy()
    if indices is None:
        count = min(count, len(active))
        return [int(active[(2 * n + 1) * len(active) // (2 * count)]) for n in range(count)]
    if missing := sorted(set(indices) - set(active.tolist())):
        raise ConfigError(
            f"`indices` must be samples that the source has and does not exclude: {len(active)} samples from "
            f"{active[0]} to {active[-1]}. Not among them: {', '.join(map(str, missing[:5]))}."
        )
    return list(indices)


COLORS = (
    (230, 57, 70), (29, 130, 200), (42, 157, 90), (244, 140, 30),
    (140, 82, 190), (20, 160, 160), (214, 70, 150), (120, 120, 20),
)  # fmt: skip


def samples_of(loader: Loader, decode: Decode, *, indices: Sequence[int], epochs: Sequence[int]) -> list[Sample]:
    """The samples ``indices`` of the source: the original images, and the training images of some epochs."""
    source = loader.source
    why = "not stored, only its augmented images are" if isinstance(source, MaterializedSource) else "cannot be decoded"
    originals = _originals(loader, decode, indices)
    samples = [
        Sample(i, source.key(i), None, Image.fromarray(image) if image.size else None, [], [], why)
        for i, image in zip(indices, originals, strict=True)
    ]
    heights, widths = np.array([np.maximum(image.shape[:2], 1) for image in originals]).T
    for epoch in tqdm(epochs, desc="preview", unit="epoch", leave=False, disable=None):
        batch = loader.fetch(list(indices), epoch=epoch)
        images = batch.images if isinstance(batch.images, list) else [batch.images]
        drawn = loader.augment.draw(seed=loader.seed, epoch=epoch, indices=indices)
        crops = loader.augment.windows(drawn, heights, widths)
        for view, tensor, crop in zip(loader.augment.views, images, crops, strict=True):
            pixels = tensor.detach().float().cpu()
            if (normalize := view.augment.normalize) is not None:
                mean, std = (b.float().cpu().view(3, 1, 1) for b in (normalize.mean, normalize.std))
                pixels = pixels * std + mean
            pictures = pixels.clamp(0, 1).mul(255).round().byte().permute(0, 2, 3, 1).numpy()
            for sample, picture, (top, left, height, width) in zip(
                samples, pictures, crop.window.tolist(), strict=True
            ):
                sample.pictures.append(Image.fromarray(picture))
                sample.boxes.append((left, top, left + width, top + height))
    labels = [None] * len(indices) if batch.labels is None else batch.labels.tolist()
    return [replace(s, label=_label(source, v)) for s, v in zip(samples, labels, strict=True)]


def _label(source: Any, value: Any) -> str | None:
    if isinstance(value, int) and source.classes is not None:
        return str(source.classes[value])
    values = value if isinstance(value, list) else [value]
    return None if value is None else f"label {', '.join(f'{v:.3g}' for v in values)}"


def rows(samples: Sequence[Sample], *, epochs: Sequence[int], views: Sequence[str], cell: int | None) -> list[Row]:
    """A row for each sample: the original with the crop boxes drawn on it, then the views of each epoch.

    ``cell`` is the longer side of the largest picture in pixels. All pictures are scaled by the same factor. None: no
    scaling.
    """
    largest = max(max(p.size) for s in samples for p in s.pictures)
    scale = 1 if cell is None else cell / largest
    captions = [", ".join(filter(None, (f"epoch {epoch}", view))) for epoch in epochs for view in views]
    made = []
    for sample in samples:
        cells = [_original(sample, 1.35 * scale * largest)]  # larger, because boxes are drawn on it
        for n, (picture, caption) in enumerate(zip(sample.pictures, captions, strict=True)):
            cells.append(Cell(scaled(picture, scale), caption, COLORS[n % len(COLORS)]))
        made.append(Row(sample.label or sample.key, [f"{sample.index}: {sample.key}"], cells))
    return made


def _original(sample: Sample, size: float) -> Cell:
    if sample.original is None:
        return Cell(Image.new("RGB", (round(size), round(size / 2)), (240, 240, 240)), f"original: {sample.absent}")
    scale = size / max(sample.original.size)
    image = scaled(sample.original, scale)
    pen = ImageDraw.Draw(image)
    for corners, color in reversed(list(zip(sample.boxes, COLORS, strict=False))):  # the first epoch on top
        left, top, right, bottom = (round(v * scale) for v in corners)
        pen.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=color, width=2)
    return Cell(image, "original")


def whole(loader: Loader, decode: Decode, *, views: Sequence[View], indices: Sequence[int]) -> list[list[Tensor]]:
    """Center crops of each image at each view's size: per view and sample, uint8 [H, W, 3] on the loader's device."""
    originals = _originals(loader, decode, indices)
    for index, image in zip(indices, originals, strict=True):
        if not image.size:
            raise ConfigError(
                "show=operations needs samples that can be decoded. Cannot be decoded: sample "
                f"{index} ({loader.source.key(index)!r}). Choose others with `indices`."
            )
    made = []
    for view in views:
        crop = view.augment.crop
        images = [Image.fromarray(image) for image in originals]
        fitted = [image if crop is None else ImageOps.fit(image, crop.size[::-1]) for image in images]
        made.append([torch.from_numpy(np.array(image)).to(loader.device) for image in fitted])
    return made


def colorful(loader: Loader, decode: Decode, *, indices: Sequence[int]) -> int:
    """The sample whose channels differ most, because half of the operations do not change a gray image."""
    images = _originals(loader, decode, indices)
    spread = [float(np.ptp(image, axis=2).mean()) if image.size else -1.0 for image in images]
    return indices[int(np.argmax(spread))]


def _originals(loader: Loader, decode: Decode, indices: Sequence[int]) -> list[Any]:
    """Whole images, uint8 [H, W, 3] on the CPU; an empty array for a bad sample."""
    number = torch.tensor(list(indices))
    encoded = next(Reader(loader.source).batches([(number, number * 0, number == number)]))
    decoder = decode.open("cpu")
    images = [image.numpy() for image in decoder.full(encoded, decoder.read_headers(encoded))]
    decoder.close()
    return images
