"""Draws what a recipe does to samples, with the same stages as training."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import OmegaConf
from PIL import Image
from tqdm import tqdm

from gpuaug import checks
from gpuaug.augment.crop import pair
from gpuaug.augment.explain import Explanation
from gpuaug.display.annotations import Style
from gpuaug.display.batches import check_bands, contents, cross, name_of
from gpuaug.display.sheet import Legend, SheetRow, check_pixels, sheet
from gpuaug.errors import ConfigError
from gpuaug.loader.arguments import whole_numbers
from gpuaug.loader.batch import Batch
from gpuaug.loader.describe import steps
from gpuaug.loader.faults import Faults
from gpuaug.loader.loader import Loader
from gpuaug.source.adapt import active_numbers
from gpuaug.tools.preview import operations
from gpuaug.tools.preview.originals import Sample, originals
from gpuaug.tools.request import Keys, Request

WIDE, CELL = 6, 160  # defaults: augmented pictures in a row, and longer side of a picture in pixels
WIDE_WITH_TARGETS, CELL_WITH_TARGETS = 4, 280
OPERATIONS_WIDE, SMALL_CELL = 9, 112  # show=operations
ORIGINAL = 1.35  # the original is larger than the other pictures by this factor, because it shows the crops too
SHOWN = {"samples": 5, "operations": 1}  # default number of samples
COLORS = (
    (230, 57, 70), (29, 130, 200), (42, 157, 90), (244, 140, 30),
    (140, 82, 190), (20, 160, 160), (214, 70, 150), (120, 120, 20),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings(Keys):
    """The keys of `gpuaug preview`."""

    out: str = "preview.png"
    show: str = "samples"
    samples: Any = None
    epoch: int = 0
    draws: int | None = None
    cell: int | None = None
    bands: Any = None
    serve: bool = False
    port: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole_number("epoch", self.epoch, 0)
        check_samples(self.samples)
        for name, low in (("cell", 16), ("draws", 1)):
            checks.whole_number(name, getattr(self, name), low, optional=True)
        checks.one_of("show", self.show, SHOWN)
        checks.whole_number("port", self.port, 0, 65535)
        if self.port and not self.serve:
            raise ConfigError(f"`port={self.port}` has no effect without serve=true. Add serve=true, or remove `port`.")
        if self.serve and (self.out != Settings.out or self.json is not None):
            raise ConfigError("`serve=true` writes no file, but `out` or `json` names one. Remove `out` and `json`.")


RECIPE = re.compile(r"(?:gpuaug/)?augment(?:@[^=]*)?=(.*)")  # an override that selects a recipe

# Rows of pictures, the other arguments of :func:`sheet`, and values for the report
Drawing = tuple[list[SheetRow], dict[str, Any], dict[str, Any]]


def drawing(request: Request, config: Any, settings: Settings, *, is_page: bool = False, **objects: Any) -> Drawing:
    """Build the loader that ``config`` describes, and draw its samples.

    ``objects`` replace parts of ``config``. With ``is_page``, show=samples does not scale the augmented pictures.
    """
    # workers would not change the pixels
    with request.build(config, mix=None, num_workers=0, prefetch=0, **objects) as loader:
        indices = chosen(loader.source, settings.samples, count=SHOWN[settings.show])
        legend: Legend = ()
        columns = None
        if settings.show == "operations":
            columns = OPERATIONS_WIDE
            if loader.decode.pixels == "raw":
                raise ConfigError("show=operations needs 8-bit RGB. Found: decode.pixels=raw. Use show=samples.")
            rows, values = _operations(loader, originals(loader, indices, epoch=settings.epoch), settings)
        else:
            wide = WIDE if loader.targets is None else WIDE_WITH_TARGETS
            draws = settings.draws or max(1, wide // len(loader.augment.at(settings.epoch).views))
            if settings.draws is None and (augmented := loader.source.augmented_by):
                draws = min(draws, int(augmented["epochs"]))  # later epochs repeat the stored versions
            epochs = range(settings.epoch, settings.epoch + draws)
            cell = None if is_page else settings.cell or cell_of(loader)
            rows, legend = draw(loader, indices, epochs=epochs, cell=cell, bands=settings.bands)
            views = [name_of(view) for view in loader.augment.at(settings.epoch).views]
            values = {"epochs": list(epochs), "views": views}
        values |= {"numbers": indices, "keys": [loader.source.key(i) for i in indices]}
        lines = _lines(loader, len(indices), epoch=settings.epoch)
        lines[-1] += "" if (root := loader.source.root) is None else f" of {root}"
        above = {"heading": recipe_of(request, config), "lines": lines, "legend": legend, "columns": columns}
        return rows, above, values


def recipe_of(request: Request, config: Any) -> str:
    """The name of the recipe that a request selects."""
    named = [found[1] for text in request.overrides if (found := RECIPE.fullmatch(text))]
    other = request.at or OmegaConf.select(config, "augment._target_", default="recipe")
    return named[-1] if named else "standard" if request.config_name is None else str(other)


def preview(
    loader: Loader,
    indices: Sequence[int] | int | None = None,
    *,
    epochs: int | Sequence[int] = 3,
    size: int | None = None,
    bands: Sequence[int] | None = None,
) -> Image.Image:
    """Draw samples of a loader as one picture. A notebook displays the result, a ``PIL.Image``.

    Each row shows one sample: first the original with its crops, then its augmented images in several epochs. The
    augmented images are those of training, but without mix. Patch masks are gray; with ``per=batch`` they are those of
    a batch of these samples.

    Args:
        loader: the loader whose source, recipe and seed are used. Its position does not change, and no worker starts.
        indices: number or numbers of the samples in the source; None: five samples, evenly spread.
        epochs: a list of epoch numbers, or how many epochs to show, beginning with the loader's current epoch.
        size: longer side of the largest augmented image, in pixels; None: 160, or 280 if the loader has targets.
        bands: the three channels to draw as red, green and blue; needed if images have neither 1 nor 3 channels.

    A sample that cannot be read or decoded is drawn as crosses, with any ``faults.policy``.

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
    numbers = chosen(loader.source, indices, count=SHOWN["samples"], name="indices")
    if not epochs or not numbers:
        raise ConfigError(f"`epochs` and `indices` must not be empty. Found: {epochs} and {numbers}.")
    made, legend = draw(loader, numbers, epochs=epochs, cell=cell, bands=bands)
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


def draw(
    loader: Loader,
    indices: list[int],
    *,
    epochs: Sequence[int],
    cell: int | None,
    bands: Sequence[int] | None = None,
) -> tuple[list[SheetRow], Legend]:
    """The rows of some samples in some epochs, and the legend. :func:`rows_of` explains ``cell``."""
    # Check the number of pixels before decoding. The largest stage of a Progressive counts for all epochs.
    check_bands(bands, loader.decode.channels or 3)
    sizes = [[view.augment.output_size for view in recipe.views] for recipe in loader.augment.schedule.values()]
    least = (cell or 16) ** 2
    areas = [[math.prod(pair("size", size)) if size else 0 for size in of_views] for of_views in sizes]
    of_epoch = max(sum(max(area, least) for area in of_views) for of_views in areas)
    check_pixels(len(indices) * (len(epochs) * of_epoch + math.ceil(ORIGINAL**2) * least))
    samples, style = samples_of(loader, indices, epochs=epochs, bands=bands), Style.of(loader.source, loader.targets)
    known = [each.annotations for sample in samples for each in (*sample.augmented, sample.original)]
    captions = [(f"epoch {epoch}", name_of(view)) for epoch in epochs for view in loader.augment.at(epoch).views]
    return rows_of(samples, captions, style, cell=cell), style.legend(known)


def _operations(loader: Loader, samples: list[Sample], settings: Settings) -> tuple[list[SheetRow], dict[str, Any]]:
    if loader.source.augmented_by:
        raise ConfigError(
            "show=operations needs images to augment. Found: a packed source of augmented images. "
            "Show the original images: source=folder source.root=DIR."
        )
    if bad := [sample for sample in samples if sample.absent]:
        raise ConfigError(
            "show=operations needs samples that can be decoded. Cannot be decoded: sample "
            f"{bad[0].index} ({bad[0].key!r}). Choose others with `samples`."
        )
    views = [view for view in loader.augment.at(settings.epoch).views if not view.copy]
    cell = settings.cell or SMALL_CELL
    check_pixels(len(samples) * len({name for view in views for name in view.augment.ops}) * cell**2)
    rows, listed = operations.grid(views, samples, seed=loader.seed, device=loader.device, cell=cell)
    if not rows:
        raise ConfigError(
            "show=operations needs a recipe with operations. Found: none. Choose another recipe: augment=standard."
        )
    return rows, {"operations": listed}


def _lines(loader: Loader, count: int, *, epoch: int) -> list[str]:
    """The recipe's steps in an epoch, what patch masks look like, then the seed and the number of samples."""
    masks = [] if loader.patch_masks is None else ["gray: masked patches"]
    if hasattr(loader.patch_masks, "targets"):
        masks = ["gray: masked patches; colored: targets of I-JEPA"]
    return [*steps(loader.augment, epoch), *masks, f"seed {loader.seed}; {count} of {len(loader.source)} samples"]


def check_samples(given: Any) -> None:
    """Raise ConfigError unless ``given`` is a value of the key `samples`: a count, a list of numbers, or None."""
    if isinstance(given, list) and given and all(type(i) is int for i in given):
        return
    if given is not None and (type(given) is not int or given < 1):
        raise ConfigError(
            "`samples` must be a count, such as 5, or a list of sample numbers, such as [3,14,15]. "
            f"Found: {given!r:.100}."
        )


def chosen(source: Any, samples: int | Sequence[int] | None, *, count: int, name: str = "samples") -> list[int]:
    """The numbers of the ``samples``. A count, or None for ``count``: evenly spread ones that are not excluded.

    ``name`` stands in errors.
    """
    active = active_numbers(source)
    if samples is None or isinstance(samples, int):
        count = min(samples or count, len(active))
        return [int(active[(2 * n + 1) * len(active) // (2 * count)]) for n in range(count)]
    if missing := sorted(set(samples) - set(active.tolist())):
        raise ConfigError(
            f"`{name}` must be samples that the source has and does not exclude: {len(active)} samples from "
            f"{active[0]} to {active[-1]}. Not among them: {', '.join(map(str, missing[:5]))}."
        )
    return list(samples)


def samples_of(
    loader: Loader, indices: Sequence[int], *, epochs: Sequence[int], bands: Sequence[int] | None = None
) -> list[Sample]:
    """Load the samples ``indices``: the original images, and the images that training sees in ``epochs``."""
    samples = originals(loader, indices, epoch=epochs[0], cropped=epochs, bands=bands)
    faults = Faults(policy="blank", truncated=loader.faults.truncated)
    for epoch in tqdm(epochs, desc="preview", unit="epoch", leave=False, disable=None):
        crops = [view.augment.crop for view in loader.augment.at(epoch).views]
        one_size = all(crop is not None and isinstance(crop.size, tuple) for crop in crops)
        for part in [samples] if one_size else [[sample] for sample in samples]:
            batch = loader.fetch([sample.index for sample in part], epoch=epoch, faults=faults)
            drawn = contents(batch, replace(batch.look, bands=bands))
            for row, (sample, views, valid) in enumerate(zip(part, drawn, batch.valid.tolist(), strict=True)):
                sample.augmented += views
                sample.details += ["\n".join(x.lines) for x in explanations(batch, row)]
                if not valid:
                    for view in views:
                        cross(view.picture)
    return samples


def explanations(batch: Batch, row: int) -> list[Explanation]:
    """For each view of a sample, what the recipe did."""
    made = batch.explain(row)
    return made if isinstance(made, list) else [made]


def rows_of(
    samples: Sequence[Sample], captions: Sequence[tuple[str, ...]], style: Style, *, cell: int | None
) -> list[SheetRow]:
    """A row for each sample: the original with its crops, then the augmented pictures with their ``captions``.

    ``cell`` is the longer side of the largest augmented picture in pixels. None: augmented pictures keep their size.
    """
    largest = max(max(each.picture.size) for sample in samples for each in sample.augmented)
    scale = 1 if cell is None else cell / largest
    made = []
    for sample in samples:
        own = style.for_sample(sample.original.annotations)
        size = ORIGINAL * scale * largest
        crops = reversed(list(zip(sample.crops, COLORS, strict=False)))  # so that the first epoch's box is on top
        caption = f"original: {sample.absent}" if sample.absent else "original"
        cells = [sample.original.cell(size / max(sample.original.picture.size), own, caption, crops=crops)]
        for n, (each, parts, details) in enumerate(zip(sample.augmented, captions, sample.details, strict=True)):
            cells.append(each.cell(scale, own, *parts, color=COLORS[n % len(COLORS)])._replace(details=details))
        made.append(SheetRow(sample.label or sample.key, [f"{sample.index}: {sample.key}", *sample.notes], cells))
    return made
