"""Draws what a recipe does to samples, with the same stages as training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from tqdm import tqdm

from gpuaug import checks
from gpuaug.augment.describe import lines as described
from gpuaug.augment.recipe import View
from gpuaug.display.annotations import Annotations, Style, counted, drawn
from gpuaug.display.batches import label_text, name_of, pictures
from gpuaug.display.sheet import Cell, Color, Row, check_pixels, sheet
from gpuaug.errors import ConfigError
from gpuaug.loader.arguments import whole_numbers
from gpuaug.loader.chosen import fetch, uncounted
from gpuaug.loader.faults import Policy
from gpuaug.loader.loader import Loader
from gpuaug.loader.stages import LiveStage
from gpuaug.source.adapt import active_numbers
from gpuaug.source.materialized import MaterializedSource
from gpuaug.targets.batch import BatchTargets
from gpuaug.tools.preview import operations
from gpuaug.tools.preview.originals import read, upright_targets
from gpuaug.tools.report import Report
from gpuaug.tools.request import Keys, Request

WIDE, CELL = 6, 160  # defaults: augmented pictures in a row, and longer side of a picture in pixels
WIDE_WITH_TARGETS, CELL_WITH_TARGETS = 4, 280
ORIGINAL = 1.35  # the original is larger than the other pictures by this factor, because it shows the crops too
SHOWN = {"samples": 5, "operations": 8}  # default number of samples; `operations` shows the most colorful of the 8


@dataclass(frozen=True, kw_only=True)
class Settings(Keys):
    """The keys of `gpuaug preview`."""

    out: str = "preview.png"
    show: str = "samples"
    indices: Any = None
    samples: int | None = None
    epoch: int = 0
    draws: int | None = None
    cell: int | None = None
    serve: bool = False
    port: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole_number("epoch", self.epoch, 0)
        checks.whole_number("cell", self.cell, 16, optional=True)
        checks.whole_number("samples", self.samples, 1, optional=True)
        checks.whole_number("draws", self.draws, 1, optional=True)
        checks.one_of("show", self.show, SHOWN)
        checks.whole_number("port", self.port, 0, 65535)
        if self.port and not self.serve:
            raise ConfigError(f"`port={self.port}` has no effect without serve=true. Add serve=true, or remove `port`.")
        if self.serve and (self.out != Settings.out or self.json is not None):
            raise ConfigError("`serve=true` writes no file, but `out` or `json` names one. Remove `out` and `json`.")
        object.__setattr__(self, "indices", indices_of(self.indices))


class Drawing(NamedTuple):
    """Rows of pictures, and the text above them."""

    rows: list[Row]
    heading: str
    lines: list[str]
    legend: list[tuple[Color | None, str]]

    def picture(self) -> Image.Image:
        return sheet(self.rows, heading=self.heading, lines=self.lines, legend=self.legend)


def drawing(
    request: Request, config: Any, settings: Settings, report: Report, *, is_page: bool = False, **objects: Any
) -> Drawing:
    """Build the loader that ``config`` describes, and draw its samples.

    ``objects`` replace parts of ``config``. With ``is_page``, show=samples does not scale the augmented pictures.
    """
    legend: list[tuple[Color | None, str]] = []
    # no workers, because they would not change the pixels
    with request.build(config, mix=None, num_workers=0, prefetch=0, **objects) as loader:
        indices = chosen(loader.source, settings.indices, count=settings.samples or SHOWN[settings.show])
        if settings.show == "operations":
            if settings.indices is None and settings.samples is None:
                indices = [colorful(loader, indices, epoch=settings.epoch)]
            made = _operations(loader, indices, settings, report)
        else:
            epochs, cell = _epochs(loader, settings), None if is_page else settings.cell or cell_of(loader)
            made, legend = samples(loader, indices, epochs=epochs, cell=cell)
            views = [name_of(view) for view in loader.augment.at(settings.epoch).views]
            report.values |= {"epochs": list(epochs), "views": views}
        report.values |= {"indices": indices, "keys": [loader.source.key(i) for i in indices]}
        named = [text.partition("=")[2] for text in request.overrides if text.startswith("augment=")]
        named = named or ["standard" if request.config_name is None else request.at or type(loader.augment).__name__]
        lines = _lines(loader, len(indices), epoch=settings.epoch)
        lines[-1] += "" if (root := getattr(loader.source, "root", None)) is None else f" of {root}"
        return Drawing(made, named[-1], lines, legend)


def preview(
    loader: Loader,
    indices: Sequence[int] | int | None = None,
    *,
    epochs: int | Sequence[int] = 3,
    size: int | None = None,
) -> Image.Image:
    """Draw samples of a loader as one picture. A notebook displays the result, a ``PIL.Image``.

    Each row shows one sample: first the original with its crops, then its augmented images in several epochs. The
    augmented images are those of training, but without mix.

    Args:
        loader: the loader whose source, recipe and seed are used. Its position does not change, and no worker starts.
        indices: number or numbers of the samples in the source; None: five samples, evenly spread.
        epochs: a list of epoch numbers, or how many epochs to show, beginning with the loader's current epoch.
        size: longer side of the largest augmented image, in pixels; None: 160, or 280 if the loader has targets.

    Raises:
        DataError: if a sample cannot be decoded, and the loader's ``faults.policy`` is ``raise``.

    >>> loader = gpuaug.Loader(gpuaug.FolderSource("data/train"), augment=recipe, num_workers=0, device="cpu")
    >>> gpuaug.preview(loader, [0, 1], epochs=2, size=64).mode
    'RGB'
    """
    checks.instance("loader", loader, Loader)
    checks.whole_number("size", size, 16, optional=True)
    cell = size or cell_of(loader)
    if isinstance(epochs, int):
        check_pixels(checks.whole_number("epochs", epochs, 1) * cell**2)
        epochs = range(loader.epoch, loader.epoch + epochs)
    epochs = _listed("epochs", epochs, cell)
    if indices is not None:
        indices = _listed("indices", [indices] if isinstance(indices, int) else indices, cell)
    numbers = chosen(loader.source, indices, count=SHOWN["samples"])
    if not epochs or not numbers:
        raise ConfigError(f"`epochs` and `indices` must not be empty. Found: {epochs} and {numbers}.")
    made, legend = samples(loader, numbers, epochs=epochs, cell=cell)
    lines = _lines(loader, len(numbers), epoch=epochs[0])
    return sheet(made, heading="Originals and augmented images", lines=lines, legend=legend)


def _listed(name: str, given: Any, cell: int) -> list[int]:
    """Return ``given`` as a list of whole numbers. Raises ConfigError if all cells together have too many pixels."""
    if isinstance(given, Sized):  # before the list is made, because it could be huge
        check_pixels(len(given) * cell**2)
    return whole_numbers(name, list(given) if isinstance(given, Iterable) else given).tolist()


def cell_of(loader: Loader) -> int:
    """The default longer side of a picture, in pixels."""
    return CELL if loader.targets is None else CELL_WITH_TARGETS


def _epochs(loader: Loader, settings: Settings) -> range:
    wide = WIDE if loader.targets is None else WIDE_WITH_TARGETS
    draws = settings.draws or max(1, wide // len(loader.augment.at(settings.epoch).views))
    if settings.draws is None and isinstance(loader.source, MaterializedSource):
        draws = min(draws, int(loader.source.manifest["epochs"]))  # later epochs repeat the stored ones
    return range(settings.epoch, settings.epoch + draws)


def samples(
    loader: Loader, indices: list[int], *, epochs: Sequence[int], cell: int | None
) -> tuple[list[Row], list[tuple[Color | None, str]]]:
    """The rows of some samples in some epochs, and the legend. :func:`rows` explains ``cell``."""
    # Check the number of pixels before decoding. The largest stage of a Progressive counts for all epochs.
    crops = [[view.augment.crop for view in recipe.views] for recipe in loader.augment.stages.values()]
    least = (cell or 16) ** 2
    of_epoch = max(sum(max(math.prod(crop.size) if crop else 0, least) for crop in views) for views in crops)
    check_pixels(len(indices) * (len(epochs) * of_epoch + math.ceil(ORIGINAL**2) * least))
    views = [name_of(view) for view in loader.augment.at(epochs[0]).views]
    read = samples_of(loader, indices, epochs=epochs)
    style = None if loader.targets is None else Style.of(loader.source, loader.targets)
    shown = [each for sample in read for each in (*sample.annotations, sample.annotated) if each is not None]
    made = rows(read, epochs=epochs, views=views, cell=cell, style=style)
    return made, [] if style is None else style.legend(shown)


def _operations(loader: Loader, indices: list[int], settings: Settings, report: Report) -> list[Row]:
    if isinstance(loader.source, MaterializedSource):
        raise ConfigError(
            "show=operations needs images to augment. Found: materialized epochs, which are already augmented. "
            "Show the original images: source=folder source.root=DIR."
        )
    views = [view for view in loader.augment.at(settings.epoch).views if not view.copy]
    cell = settings.cell or CELL
    check_pixels(len(indices) * len({name for view in views for name in view.augment.ops}) * cell**2)
    images = whole(loader, indices, views=views, epoch=settings.epoch)
    made = operations.rows(views, images, seed=loader.seed, cell=cell)
    if not made:
        raise ConfigError(
            "show=operations needs a recipe with operations. Found: none. Choose another recipe: augment=standard."
        )
    report.values["operations"] = [
        {"name": row.title, "notes": row.notes, "values": [cell.caption for cell in row.cells[1:]]} for row in made
    ]
    return made


def _lines(loader: Loader, count: int, *, epoch: int) -> list[str]:
    """The recipe's steps in an epoch, then the seed and the number of samples."""
    return [*described(loader.augment, epoch), f"seed {loader.seed}; {count} of {len(loader.source)} samples"]


@dataclass(frozen=True)
class Sample:
    """A sample to show: the original image, and the augmented images of some epochs."""

    index: int
    key: str
    label: str  # "" if there is none
    original: Image.Image | None
    boxes: list[tuple[int, int, int, int]]  # crop of each picture: (left, top, right, bottom) in pixels of the original
    pictures: list[Image.Image]  # all views of the first epoch, then all views of the next one
    absent: str = "cannot be decoded"  # why the original is None
    annotations: list[Annotations] = field(default_factory=list)  # one per picture; [] without targets
    annotated: Annotations | None = None  # annotations of the original


def indices_of(given: Any) -> list[int] | None:
    """Return the key `indices` as a list of numbers, or None."""
    if isinstance(given, int) and not isinstance(given, bool):
        given = [given]
    if given is not None and (not isinstance(given, list) or not given or any(type(i) is not int for i in given)):
        raise ConfigError(f"`indices` must be a list of sample numbers, such as [3,14,15]. Found: {given!r}.")
    return given


def chosen(source: Any, indices: list[int] | None, *, count: int) -> list[int]:
    """Return ``indices``; None: ``count`` evenly spread samples that the source does not exclude."""
    active = active_numbers(source)
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


def samples_of(loader: Loader, indices: Sequence[int], *, epochs: Sequence[int]) -> list[Sample]:
    """Load the samples ``indices``: the original images, and the images that training sees in ``epochs``."""
    source = loader.source
    why = "not stored, unlike its augmented images" if isinstance(source, MaterializedSource) else "cannot be decoded"
    samples, stage = [], loader.pipeline.stage
    policy: Policy = "blank" if loader.faults.policy == "drop" else loader.faults.policy  # keep the rows of bad samples
    faults = uncounted(loader.faults, policy)
    encoded = read(loader, indices, epoch=epochs[0])
    labels = [None] * len(indices) if encoded.labels is None else encoded.labels.tolist()
    for i, label, (image, known) in zip(indices, labels, _originals(loader, indices, epochs[0]), strict=True):
        picture = Image.fromarray(image) if image.size else None
        annotated = None if known is None else Annotations.of(known, 0, loader.targets)
        text = label_text(label, source.classes)
        samples.append(Sample(i, source.key(i), text, picture, [], [], why, [], annotated))
    for epoch in tqdm(epochs, desc="preview", unit="epoch", leave=False, disable=None):
        batch = fetch(loader, indices, epoch=epoch, faults=faults)
        images: list[Tensor] = batch.images if isinstance(batch.images, list) else [batch.images]
        targets = batch.targets if isinstance(batch.targets, list) else [batch.targets]
        crops = stage.read_headers(encoded, epoch).windows if isinstance(stage, LiveStage) else [None] * len(images)
        for n, (known, tensor, crop) in enumerate(zip(batch.look.normalize, images, crops, strict=True)):
            for row, (sample, picture) in enumerate(zip(samples, pictures(tensor, known), strict=True)):
                sample.pictures.append(picture)
                if loader.targets is not None:
                    sample.annotations.append(Annotations.of(targets[n], row, loader.targets))
                if crop is not None:
                    top, left, height, width = crop.window[row].tolist()
                    sample.boxes.append((left, top, left + width, top + height))
    return samples


def rows(
    samples: Sequence[Sample],
    *,
    epochs: Sequence[int],
    views: Sequence[str],
    cell: int | None,
    style: Style | None = None,
) -> list[Row]:
    """A row for each sample: the original with its crops, then the views of each epoch.

    ``cell`` is the longer side of the largest augmented picture in pixels. None: augmented pictures keep their size.
    """
    largest = max(max(p.size) for s in samples for p in s.pictures)
    scale = 1 if cell is None else cell / largest
    captions = [", ".join(filter(None, (f"epoch {epoch}", view))) for epoch in epochs for view in views]
    made = []
    for sample in samples:
        own = None if style is None else style.for_sample(sample.annotated)
        cells = [_original(sample, ORIGINAL * scale * largest, own)]
        known: Sequence[Annotations | None] = sample.annotations or [None] * len(captions)
        for n, (picture, caption, shown) in enumerate(zip(sample.pictures, captions, known, strict=True)):
            picture = drawn(picture, scale, shown, own)
            cells.append(Cell(picture, ", ".join(filter(None, (caption, counted(shown)))), COLORS[n % len(COLORS)]))
        made.append(Row(sample.label or sample.key, [f"{sample.index}: {sample.key}"], cells))
    return made


def _original(sample: Sample, size: float, style: Style | None) -> Cell:
    if sample.original is None:
        return Cell(Image.new("RGB", (round(size), round(size / 2)), (240, 240, 240)), f"original: {sample.absent}")
    scale = size / max(sample.original.size)
    crops = reversed(list(zip(sample.boxes, COLORS, strict=False)))  # so that the first epoch's box is on top
    image = drawn(sample.original, scale, sample.annotated, style, crops=crops)
    return Cell(image, ", ".join(filter(None, ("original", counted(sample.annotated)))))


def whole(loader: Loader, indices: Sequence[int], *, views: Sequence[View], epoch: int) -> list[list[Tensor]]:
    """Images [view][sample], uint8 [H, W, 3]. A view with a crop gets images center-cropped to the crop's size."""
    originals = [image for image, _ in _originals(loader, indices, epoch)]
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


def colorful(loader: Loader, indices: Sequence[int], *, epoch: int) -> int:
    """The number of the most colorful sample. Many operations do not change a gray image."""
    images = _originals(loader, indices, epoch)
    spread = [float(np.ptp(image, axis=2).mean()) if image.size else -1.0 for image, _ in images]
    return indices[int(np.argmax(spread))]


def _originals(loader: Loader, indices: Sequence[int], epoch: int) -> list[tuple[Any, BatchTargets | None]]:
    """The whole images, uint8 [H, W, 3] on the CPU, and their targets. The image of a bad sample is an empty array."""
    decoder, found = replace(loader.decode, num_threads=1).open("cpu"), []
    for index in indices:
        encoded = read(loader, [index], epoch=epoch)
        headers = decoder.read_headers(encoded)
        image = decoder.full(encoded, headers)[0].numpy()
        found.append((image, upright_targets(loader, decoder, encoded, headers)))
    decoder.close()
    return found
