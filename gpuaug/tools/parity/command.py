"""`gpuaug parity`: compares our pixels with Pillow's and torchvision's, by stage and operation, on a user's images.

In each stage both sides get the same input, so a difference comes from that stage alone. At the end the complete
pipelines are compared.

Differences are in levels: 1/255 of the pixel range. torchvision runs in float and in uint8, whose results differ.
"""

from __future__ import annotations

import io
import itertools
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray
from PIL import ImageOps
from tqdm import tqdm

from gpuaug import checks
from gpuaug.augment.fused.backend import FusedBackend
from gpuaug.augment.parameters import Chosen, Prepared
from gpuaug.augment.recipe import Drawn, View
from gpuaug.augment.reference import ReferenceBackend
from gpuaug.batch import CropWindows, EncodedBatch
from gpuaug.decode import header
from gpuaug.decode.decoder import Decode
from gpuaug.display.sheet import Cell, Row, printable, scaled, sheet
from gpuaug.errors import ConfigError
from gpuaug.loader.loader import Loader
from gpuaug.source.materialized import MaterializedSource
from gpuaug.targets.batch import BatchTargets
from gpuaug.tools.parity import targets
from gpuaug.tools.parity.counterpart import Call, call, calls_of, text, why
from gpuaug.tools.parity.targets import TargetDifference
from gpuaug.tools.peers import torchvision
from gpuaug.tools.preview.command import chosen, indices_of
from gpuaug.tools.preview.originals import read, upright_targets
from gpuaug.tools.report import Report, png, written
from gpuaug.tools.request import Keys, Request

CELL = 280  # pixels of a picture's longer side
HEADINGS = {
    "decode": "decode, on the same bytes",
    "resize": "crop and resize, on the same decoded image",
    "reduced": "decode.reduced, decoding at a part of the size where the crop allows it",
    "operation": "each operation of the recipe with its random parameters, on the same crop",
    "normalize": "normalize, on the same crop",
    "mix": "mix, on the same crops as one batch",
    "all": "everything, from the bytes to the normalized view",
}


@dataclass(frozen=True, kw_only=True)
class Settings(Keys):
    """What to compare."""

    out: str = "parity.png"
    indices: Any = None
    samples: int = 8
    epoch: int = 0
    rows: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, low in (("samples", 1), ("epoch", 0), ("rows", 1)):
            checks.whole_number(name, getattr(self, name), low)
        object.__setattr__(self, "indices", indices_of(self.indices))


def main(request: Request) -> int:
    """Print the table and write the picture."""
    settings = Settings(**request.settings())
    out = png(settings.out, "out")
    report = Report(file=settings.json)
    config = request.loader()
    decode: Decode = request.build(config.decode) if config.get("decode") is not None else Decode()
    with request.build(config, num_workers=0, prefetch=0) as loader:  # these two change no pixel
        if isinstance(loader.source, MaterializedSource):
            raise ConfigError(
                "`source` must have encoded images or packed pixels. Found: materialized epochs, which are already "
                "decoded and augmented. Compare the original images: source=folder source.root=DIR."
            )
        indices = chosen(loader.source, settings.indices, count=settings.samples)
        parity = compare(loader, decode, indices=indices, epoch=settings.epoch)
    for line in table(parity):
        print(printable(line))
    if parity.samples:
        rows = [row(difference) for difference in worst_cases(parity, settings.rows)]
        heading = f"Largest pixel differences: {parity.samples} images"
        picture = sheet(rows, heading=heading, lines=[summary(parity)])
        with written(out, "out"):
            picture.save(out, "PNG", optimize=True)
        report.add("picture", str(out), f"{out} ({picture.width} x {picture.height})")
    print(f"\n{textwrap.fill(summary(parity), 110)}", flush=True)
    report.values |= {"indices": indices, **parity.plain()}
    report.write()
    if not parity.samples:
        raise ConfigError(f"no sample can be decoded. Tried: {indices[:5]}. Choose other samples with `indices`.")
    return 0


def table(parity: Parity) -> list[str]:
    """The lines to print: one for each comparison, the reasons for differences, and the notes."""
    wide = max([24, *(len(d.title) for d in parity.differences)])
    refer = max([9, *(len(d.reference) for d in parity.differences)])
    lines = [f"{parity.samples} images; differences in levels of 1/255; torchvision {parity.torchvision}"]
    head = f"  {'':{wide}}  {'against':{refer}}  {'largest':>8} {'mean':>8} {'bias':>8} {'> 1 level':>10}  verdict"
    for stage, heading in HEADINGS.items():
        differences = [d for d in parity.differences if d.stage == stage]
        if differences:
            lines += ["", f"{heading}:", head]
        for d in differences:
            lines.append(
                f"  {d.title:{wide}}  {d.reference:{refer}}  {d.largest:8.2f} {d.mean:8.3f} {d.bias:+8.3f} "
                f"{d.off:10.3%}  {'DIFFERENT' if d.verdict == 'other' else d.verdict}"
            )
        for reason in dict.fromkeys(d.why for d in differences if d.why):
            names = dict.fromkeys(d.name for d in differences if d.why == reason)
            lines += textwrap.wrap(
                f"{', '.join(names)}: {reason}.", 112, initial_indent="    ", subsequent_indent="    "
            )
    lines += targets.table(parity.targets) if parity.targets else []
    return [*lines, *([""] if parity.notes else []), *(f"note: {note}" for note in parity.notes), ""]


def worst_cases(parity: Parity, rows: int) -> list[Difference]:
    """The comparisons that are not equal, largest difference first. If all are equal: only the first one."""
    ordered = sorted(nearest(parity), key=lambda d: (d.largest, d.mean), reverse=True)
    return ([d for d in ordered if d.verdict != "equal"] or ordered[:1])[:rows]


def row(difference: Difference) -> Row:
    """The worst image of a comparison: ours, theirs, and the signed difference, amplified, with gray as zero."""
    worst = difference.worst
    assert worst is not None  # every comparison has at least one image
    amplify = next((k for k in (128, 64, 32, 16, 8, 4, 2) if k * difference.largest <= 128), 1)
    notes = [
        f"against {difference.reference}",
        f"largest {difference.largest:.2f}, mean {difference.mean:.3f} levels, {difference.off:.2%} of the pixels "
        "differ by more than one level",
        f"sample {worst.index}, {worst.key}{'' if worst.epoch is None else f', epoch {worst.epoch}'}",
        f"{worst.what or difference.name}; largest at x {worst.x}, y {worst.y}",
        difference.why,
    ]
    gap = 128 + amplify * (worst.ours - worst.theirs)
    captions = ("ours", "theirs", f"difference x {amplify}, signed")
    pictures = zip((worst.ours, worst.theirs, gap), captions, strict=True)
    return Row(difference.title, notes, [Cell(_picture(levels), caption) for levels, caption in pictures])


def _picture(levels: NDArray[Any]) -> PIL.Image.Image:
    image = PIL.Image.fromarray(np.rint(np.clip(levels, 0, 255)).astype(np.uint8))
    return scaled(image, CELL / max(image.size))


STAGES = ("decode", "resize", "reduced", "operation", "normalize", "mix", "all")
FLOAT, UINT8 = REFERENCES = ("torchvision, float", "torchvision, uint8")
BARE, WHOLE = "everything but the operations", "everything"
EPOCHS = 32  # how many epochs are searched for samples to which an operation is applied
EQUAL, LEVEL = 0.05, 1.001  # float32 compared with float64; one level plus float32 rounding
CLOSE = 4.0  # truncation to uint8 loses half a level per step, and recipes have up to eight steps
DECODE = "the two decoders round differently in the inverse DCT and the color conversion"
DEEP = "Pillow clips 16-bit gray at 255, so nearly all pixels become white; gpuaug scales 16-bit gray to 8 bits"
RESIZE = (
    "both use antialiased filters with half-pixel centers; Pillow and torch round to uint8 between the horizontal and "
    "the vertical pass, and the order of the passes depends on the release"
)
REDUCED = "libjpeg makes fewer pixels of each block, which is another filter than that of the resizing"

Image = NDArray[Any]


@dataclass(eq=False)
class Sample:
    """One image: its views after the recipe's crop, made by us and by Pillow."""

    index: int
    key: str
    ours: dict[str, Image] = field(default_factory=dict)  # view name to uint8 [H, W, 3]
    theirs: dict[str, Image] = field(default_factory=dict)
    targets: BatchTargets | None = None  # of the upright image


@dataclass(frozen=True, eq=False)
class Worst:
    """The image with the largest difference of a comparison, and the position of that difference."""

    key: str
    index: int
    epoch: int | None  # None if the stage has no random parameters
    y: int
    x: int
    ours: Image  # float32 [H, W, 3] in levels
    theirs: Image
    what: str  # the operation with its parameters


@dataclass(eq=False)
class Difference:
    """One comparison over all images; all numbers in levels of 1/255."""

    stage: str  # one of STAGES
    name: str  # for an operation: its key in the recipe, and after a colon the chosen alternative
    reference: str  # the implementation that we compare with
    view: str = ""  # its name in a MultiView
    why: str = ""  # cause of the difference; "" if there is none
    images: int = 0
    pixels: int = 0
    largest: float = 0.0
    mean: float = 0.0  # of the absolute differences
    largest_mean: float = 0.0  # of one image
    bias: float = 0.0  # mean of ours minus theirs
    off: float = 0.0  # share of pixels that differ by more than one level in some channel
    worst: Worst | None = None

    @property
    def verdict(self) -> str:
        """``equal``, ``rounding`` (one level, except rare pixels), ``close`` (up to four on average) or ``other``."""
        if self.largest <= EQUAL:
            return "equal"
        if self.largest <= LEVEL or (self.off <= 0.01 and self.mean <= 1):
            return "rounding"
        return "close" if self.mean <= CLOSE else "other"

    @property
    def title(self) -> str:
        """The name, followed by the view's name if there is one."""
        return f"{self.name}, {self.view}" if self.view else self.name

    def add(self, ours: Image, theirs: Image, *, sample: Sample, epoch: int | None = None, what: str = "") -> None:
        """Compare one more image: [H, W, 3] in levels on both sides."""
        ours, theirs = ours.astype(np.float32), theirs.astype(np.float32)
        gap = ours - theirs
        size = np.abs(gap).max(axis=2)
        self.pixels, self.images = self.pixels + size.size, self.images + 1
        part = size.size / self.pixels
        mean = float(np.abs(gap).mean(dtype=np.float64))
        self.mean, self.largest_mean = self.mean + (mean - self.mean) * part, max(self.largest_mean, mean)
        self.bias += (float(gap.mean(dtype=np.float64)) - self.bias) * part
        self.off += (float((size > LEVEL).mean()) - self.off) * part
        if self.worst is None or size.max() > self.largest:
            self.largest = float(size.max())
            y, x = np.unravel_index(int(size.argmax()), size.shape)
            self.worst = Worst(sample.key, sample.index, epoch, int(y), int(x), ours, theirs, what)

    def plain(self) -> dict[str, Any]:
        """Everything but the pixels, for JSON."""
        values = {**vars(self), "verdict": self.verdict}
        if (w := self.worst) is not None:
            at = {"ours": w.ours[w.y, w.x].tolist(), "theirs": w.theirs[w.y, w.x].tolist()}
            values["worst"] = {**vars(w), **at}
        return values


@dataclass(eq=False)
class Parity:
    """The result of a comparison."""

    differences: list[Difference]  # in the order of the stages
    notes: list[str]  # what could not be compared, and other remarks
    samples: int  # number of compared images
    torchvision: str  # its version
    targets: list[TargetDifference] = field(default_factory=list)

    def at(self, stage: str, name: str, reference: str, why: str = "", *, view: str = "") -> Difference:
        """The comparison with these names; it is created if it does not exist yet."""
        for d in self.differences:
            if (d.stage, d.name, d.reference, d.view) == (stage, name, reference, view):
                return d
        self.differences.append(Difference(stage, name, reference, view, why))
        return self.differences[-1]

    def note(self, text: str) -> None:
        """Add a note, unless it is there already."""
        if text not in self.notes:
            self.notes.append(text)

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        lists = {name: [d.plain() for d in getattr(self, name)] for name in ("differences", "targets")}
        return {**vars(self), **lists, "summary": summary(self)}


def compare(loader: Loader, decode: Decode, *, indices: Sequence[int], epoch: int = 0) -> Parity:
    """Compare every stage of a loader on some samples, with the random parameters of an epoch.

    If the epoch applies an operation to too few samples, later epochs are used too. Raises ConfigError if torchvision
    cannot be imported.
    """
    parity = Parity([], [], 0, torchvision()[1])
    views = [view for view in loader.augment.at(epoch).views if view.copy == 0]
    samples = _decoded(parity, loader, decode, views, tqdm(indices, "decode", leave=False, disable=None), epoch=epoch)
    parity.samples = len(samples)
    if samples:
        for view in views:
            _operations(parity, loader, view, samples, epoch=epoch)
            _whole(parity, loader, view, samples, epoch=epoch)
            if known := [(s.index, s.key, s.targets) for s in samples if s.targets is not None]:
                parity.targets += targets.compare(loader, view, known, epoch=epoch, note=parity.note)
        _mixed(parity, loader, views, samples, epoch=epoch)
    compared: list[Difference | TargetDifference] = [*parity.differences, *parity.targets]
    for difference in compared:
        if difference.verdict == "equal":
            difference.why = ""
    parity.differences.sort(key=lambda d: STAGES.index(d.stage))
    return parity


def nearest(parity: Parity) -> list[Difference]:
    """For each comparison only the closer reference: torchvision's float or its uint8 arithmetic."""
    best: dict[tuple[str, str], Difference] = {}
    for d in sorted(parity.differences, key=lambda d: d.mean):
        best.setdefault((d.stage, d.title), d)
    return [d for d in parity.differences if best[d.stage, d.title] is d]


def summary(parity: Parity) -> str:
    """A few sentences for users whose model was trained with torchvision's pipeline."""
    inputs = [d for d in parity.differences if d.name == BARE]
    if not inputs:
        return "Nothing could be compared."
    first = max(inputs, key=lambda d: d.mean)
    text = (
        "For a model that was trained with torchvision's pipeline (Pillow's decode and resize), the inputs from gpuaug "
        f"differ by {first.mean:.3f} levels of 255 on average and by {first.largest:.2f} at most; {first.off:.2%} of "
        "the pixels differ by more than one level. "
    )
    if first.mean <= 1 and first.off <= 0.02:
        text += "This is rounding. Expect the same accuracy. To confirm it, evaluate once with augment=eval."
    else:
        text += "This is more than rounding. Evaluate the model with augment=eval before you rely on it. The table "
        text += "and the picture show which stage causes the difference."
    darker = max((d.bias for d in parity.differences if d.reference == f"Pillow, then {UINT8}"), default=0)
    if darker > 0.75:
        text += f" torchvision's uint8 arithmetic truncates. Its augmented images are {darker:.1f} levels darker than "
        text += "those of its float arithmetic, which gpuaug matches."
    ops = [d for d in nearest(parity) if d.stage == "operation"]
    other = dict.fromkeys(f"`{d.name}`" for d in ops if d.verdict not in ("equal", "rounding"))
    if same := dict.fromkeys(f"`{d.name}`" for d in ops if f"`{d.name}`" not in other):
        text += f" {', '.join(same)} {'match' if len(same) > 1 else 'matches'} torchvision's functions."
    if other:
        text += f" {', '.join(other)} {'differ' if len(other) > 1 else 'differs'} from torchvision's function of the "
        text += "same name: fine for training from scratch, but not the same recipe."
    return text + targets.summary(parity.targets)


# --- decode, crop, resize


def _decoded(
    parity: Parity, loader: Loader, decode: Decode, views: list[View], indices: Iterable[int], *, epoch: int
) -> list[Sample]:
    """Compare decoding, cropping and resizing, one image at a time to limit memory."""
    decoder, stage = replace(decode, reduced=False).open(loader.device), loader.pipeline.stage
    samples, turned = [], 0
    for index in indices:
        encoded = read(loader, [index])
        headers = decoder.read_headers(encoded)
        sample = Sample(index, loader.source.key(index))
        faults = [*encoded.faults, *headers.faults]
        image = np.empty(0) if faults else decoder.full(encoded, headers)[0].cpu().numpy()
        data = encoded.encoded(0).numpy().tobytes()
        packed = header.sniff(data) == "raw"
        try:
            if not image.size:
                raise ValueError(faults[0].reason if faults else "it cannot be decoded")
            theirs = image if packed else _by_pillow(data)
            if theirs.shape != image.shape:
                raise ValueError(f"Pillow gives {theirs.shape[:2]}, ours {image.shape[:2]}")
        except Exception as error:  # on damaged bytes Pillow raises errors of many types
            parity.note(f"sample {index} ({sample.key}) is left out: {error}")
            continue
        turned += int(headers.orientation[0]) != 1
        if packed:
            parity.note("decoding is not compared: the source stores pixels, which need no decoding")
        else:
            parity.at("decode", decoder.backend, "Pillow", DECODE).add(image, theirs, sample=sample)
        windows = stage.read_headers(encoded, epoch).windows
        sample.targets = upright_targets(loader, decoder, index)
        if loader.targets is not None and sample.targets is None:
            parity.note(f"sample {index} ({sample.key}): masks and boxes are left out, because they cannot be used")
        for view, window in zip(loader.augment.at(epoch).views, windows, strict=True):
            if view not in views:
                continue
            resized = bool((window.resized[0] != window.window[0, 2:]).any())
            what = f"(top, left, height, width) {window.window[0].tolist()} to {window.resized[0].tolist()}"
            name = f"crop, {window.interpolation}" if resized else "crop"
            sample.ours[view.name] = decoder.pixels(encoded, headers, [window])[0][0][0].cpu().numpy()
            sample.theirs[view.name] = _canvas(theirs, window)
            difference = parity.at("resize", name, "Pillow", RESIZE, view=view.name)
            difference.add(sample.ours[view.name], _canvas(image, window), sample=sample, epoch=epoch, what=what)
        samples.append(sample)
        if decode.reduced:
            _reduced(parity, loader, stage, encoded, sample, epoch=epoch)
    decoder.close()
    for d in parity.differences:
        if d.stage == "reduced":
            parity.note(f"decode.{d.title}: the largest mean difference of an image is {d.largest_mean:.2f} levels")
    if turned:
        parity.note(
            f"{turned} of {len(samples)} images have an EXIF orientation, and gpuaug turns them upright. "
            "torchvision's ImageFolder does not, so a model trained with it saw them unturned"
        )
    return samples


def _reduced(parity: Parity, loader: Loader, stage: Any, encoded: EncodedBatch, sample: Sample, *, epoch: int) -> None:
    """Compare the views that `decode.reduced` gives with those of full decoding, and keep them for the later stages."""
    images, _ = stage.decode(stage.read_headers(encoded, epoch))
    for view, pixels in zip(loader.augment.at(epoch).views, images, strict=True):
        if view.name in sample.ours and view.copy == 0:
            ours, full = pixels[0].cpu().numpy(), sample.ours[view.name]
            difference = parity.at("reduced", "reduced", "full decoding", REDUCED, view=view.name)
            difference.add(ours, full, sample=sample, epoch=epoch)
            sample.ours[view.name] = ours


def _by_pillow(data: bytes) -> Image:
    """Decode to uint8 [H, W, 3]. Raises ValueError if Pillow opens the image as 16 or 32-bit gray."""
    with PIL.Image.open(io.BytesIO(data)) as image:
        if image.mode.startswith("I"):
            raise ValueError(DEEP)
        return np.array(ImageOps.exif_transpose(image).convert("RGB"))


def _canvas(image: Image, window: CropWindows) -> Image:
    """Crop, resize and place a window of an image, uint8 [H, W, 3], with Pillow."""
    top, left, height, width = window.window[0].tolist()
    (h, w), (y, x) = window.resized[0].tolist(), window.offset[0].tolist()
    part = PIL.Image.fromarray(np.ascontiguousarray(image[top : top + height, left : left + width]))
    if (h, w) != (height, width):
        part = part.resize((w, h), PIL.Image.Resampling[window.interpolation.upper()])
    canvas = PIL.Image.new("RGB", window.size[::-1], tuple(np.broadcast_to(window.fill, 3).tolist()))
    canvas.paste(part, (x, y))
    return np.array(canvas)


# --- operations


def _operations(parity: Parity, loader: Loader, view: View, samples: list[Sample], *, epoch: int) -> None:
    """Compare each operation that is applied to a sample, alone, on the cropped uint8 view."""
    of = f" of {view.name}" if view.name else ""
    ops, images = [], Counter[str]()  # images per name, including those without a counterpart
    for op in view.augment.prepared:
        if op.seeded is None:
            ops.append(op)
        else:
            parity.note(
                f"`{op.name}` ({type(op.op).__name__}) is not compared: it makes its own random numbers ({op.seeded})"
            )
    for now in tqdm(range(epoch, epoch + EPOCHS), f"operations{of}", leave=False, disable=None):
        if all(images[op.name] >= len(samples) for op in ops):
            break
        drawn = loader.augment.at(epoch).draw(seed=loader.seed, epoch=now, indices=[s.index for s in samples])
        for op, (row, sample) in itertools.product(ops, enumerate(samples)):
            image = sample.ours[view.name]
            chosen = _chosen(op, drawn, view, row, image)
            for name, slots in _parts(op, chosen):
                if images[name] >= len(samples):
                    continue
                images[name] += 1
                calls, kinds = calls_of(op, chosen, slots, image.shape[:2])
                if isinstance(calls, str):
                    parity.note(f"`{name}`{of} is not compared: {calls}")
                    continue
                part = Chosen(chosen.choice[:, slots], tuple(chosen.params[s] for s in slots), chosen.keys)
                one = replace(op, slots=tuple(op.slots[s] for s in slots))
                ours = _ours(loader, view, image, [one], [part]) * 255
                for reference in REFERENCES:
                    difference = parity.at("operation", name, reference, why(kinds, reference), view=view.name)
                    theirs = _theirs(image, calls, reference)
                    difference.add(ours, theirs, sample=sample, epoch=now, what=text(calls))
    for op in ops:
        if not any(name.partition(": ")[0] == op.name for name in images):
            parity.note(f"`{op.name}`{of} was not applied to these images in {EPOCHS} epochs")


def _chosen(op: Prepared, drawn: Drawn, view: View, row: int, image: Image) -> Chosen:
    """The choices and parameters that training uses for one sample, as a batch of one."""
    at, own = (view.name, view.copy, op.name), slice(row, row + 1)
    keys = drawn.keys[at][own] if at in drawn.keys else None
    return op.draw(drawn.uniforms[at][own], (image.shape[0], image.shape[1]), keys)


def _parts(op: Prepared, chosen: Chosen) -> list[tuple[str, list[int]]]:
    """Names and slots to compare: a color jitter as one, a random choice by each chosen operation."""
    active = [s for s in range(len(op.slots)) if chosen.choice[0, s] >= 0]
    if len({type(module) for modules in op.slots for module in modules}) == 1:
        return [(op.name, [*range(len(op.slots))])] if active else []
    return [(f"{op.name}: {type(op.slots[s][chosen.choice[0, s]]).__name__}", [s]) for s in active]


def _ours(loader: Loader, view: View, image: Image, ops: Any = (), chosen: Any = (), normalize: Any = None) -> Image:
    """Run the training backend: uint8 [H, W, 3] to float32 [H, W, 3]."""
    kind = ReferenceBackend if view.augment.backend == "kornia" else FusedBackend
    x = kind(ops, normalize)(torch.from_numpy(image)[None].to(loader.device), chosen)
    return np.asarray(x[0].permute(1, 2, 0).float().cpu())


def _theirs(image: Image, calls: list[Call], reference: str) -> Image:
    """Run torchvision on uint8 [H, W, 3]. Returns levels."""
    x = torch.from_numpy(image).permute(2, 0, 1)
    x = x if reference == UINT8 else x.float() / 255
    for one in calls:
        x = call(one, x)
    return np.asarray(x.permute(1, 2, 0)).astype(np.float32) * (1 if reference == UINT8 else 255)


# --- the ends


def _levels(image: Image, view: View) -> Image:
    """Convert a normalized image to levels."""
    if (normalize := view.augment.normalize) is not None:
        image = image * np.array(normalize.settings["std"]) + np.array(normalize.settings["mean"])
    return image * 255


def _mixed(parity: Parity, loader: Loader, views: list[View], samples: list[Sample], *, epoch: int) -> None:
    """Compare MixUp and CutMix on the views as one batch; torchvision gets the same pairs of images."""
    mix = loader.mix
    kinds = [k for k in ("mixup", "cutmix") if mix is not None and getattr(mix, f"{k}_alpha")]
    if mix is None or not kinds:
        return
    batches = [[s.ours[view.name] for s in samples] for view in views]
    if len(samples) < 2 or any(image.shape != batch[0].shape for batch in batches for image in batch):
        parity.note("mix is not compared: it needs at least two images of the same size")
        return
    count, device = len(samples), loader.device
    images = [torch.from_numpy(np.stack(batch)).permute(0, 3, 1, 2).float() / 255 for batch in batches]
    numbers = [torch.arange(count, dtype=x.dtype).view(-1, 1, 1, 1).expand_as(x) for x in images]
    for kind in kinds:
        other = "cutmix" if kind == "mixup" else "mixup"
        alone = replace(mix, p=1.0, label_smoothing=0.0, **{f"{other}_alpha": 0.0})
        (ours, shares), (marked, _) = (  # marked: the image that each CutMix pixel comes from
            alone(
                [x.to(device) for x in batch],
                torch.eye(count, device=device),
                valid=torch.ones(count, dtype=torch.bool),
                num_classes=None,
                seed=loader.seed,
                epoch=epoch,
                first_index=samples[0].index,
            )
            for batch in (images, numbers)
        )
        transform = getattr(torchvision()[0], "MixUp" if kind == "mixup" else "CutMix")(num_classes=count)
        for (n, view), (row, sample) in itertools.product(enumerate(views), enumerate(samples)):
            lam, mates = float(shares[row, row]), shares[row].clone()
            mates[row] = 0
            ys, xs = (marked[n][row, 0] != row).nonzero(as_tuple=True)
            box = (int(xs.min()), int(ys.min()), int(xs.max()) + 1, int(ys.max()) + 1) if len(ys) else (0, 0, 0, 0)
            given = {"lam": lam} if kind == "mixup" else {"box": box, "lam_adjusted": lam}
            pair = images[n][[int(mates.argmax()), row]]  # torchvision mixes each image with the previous one
            theirs = transform.transform(pair, {"batch_size": 2, "labels": torch.arange(2), **given})[1]
            levels = (x.permute(1, 2, 0).cpu().numpy() * 255 for x in (ours[n][row], theirs))
            what = f"lambda {lam:.3g}" if kind == "mixup" else f"box {box}"
            parity.at("mix", kind, FLOAT, view=view.name).add(*levels, sample=sample, epoch=epoch, what=what)
        parity.note(f"{kind}: torchvision pairs neighbors, gpuaug pairs at random; here both got the same pairs")
    if mix.label_smoothing:
        parity.note("mix: torchvision leaves label smoothing to the loss (CrossEntropyLoss(label_smoothing=...))")


def _whole(parity: Parity, loader: Loader, view: View, samples: list[Sample], *, epoch: int) -> None:
    """Compare normalization alone, then the complete pipelines from the bytes to the normalized view."""
    ops, normalize = view.augment.prepared, view.augment.normalize
    drawn = loader.augment.at(epoch).draw(seed=loader.seed, epoch=epoch, indices=[s.index for s in samples])
    for row, sample in enumerate(samples):
        image, theirs = sample.ours[view.name], sample.theirs[view.name]
        ours = _levels(_ours(loader, view, image, normalize=normalize), view)
        if normalize is not None:
            x = torch.from_numpy(image).permute(2, 0, 1).float() / 255
            x = torchvision()[0].functional.normalize(x, **normalize.settings).permute(1, 2, 0)
            parity.at("normalize", "normalize", FLOAT, view=view.name).add(
                ours, _levels(x.numpy(), view), sample=sample
            )
        difference = parity.at("all", BARE, "Pillow, then torchvision's normalize", view=view.name)
        difference.add(ours, theirs, sample=sample, epoch=epoch)
        if not ops or any(op.seeded is not None for op in ops):
            continue
        chosen = [_chosen(op, drawn, view, row, image) for op in ops]
        made = [calls_of(op, c, range(len(op.slots)), image.shape[:2])[0] for op, c in zip(ops, chosen, strict=True)]
        calls = [call for part in made if not isinstance(part, str) for call in part]
        if any(isinstance(part, str) for part in made):
            parity.note(f"`{WHOLE}` leaves out sample {sample.index}: one of its operations has no counterpart")
            continue
        ours = _levels(_ours(loader, view, image, ops, chosen, normalize), view)
        for reference in REFERENCES:
            why = "all differences above add up; a threshold (solarize, posterize, equalize) turns one level into many"
            difference = parity.at("all", WHOLE, f"Pillow, then {reference}", why, view=view.name)
            difference.add(ours, _theirs(theirs, calls, reference), sample=sample, epoch=epoch, what=text(calls))
