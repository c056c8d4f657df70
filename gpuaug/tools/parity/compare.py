"""Our pixels compared with Pillow's and torchvision's, on the user's own images: by stage and by operation.

takes: a loader, and numbers of samples.
does: both sides of each stage get the same input, so that a difference belongs to the stage that shows it. Decoding,
crop and resize are compared with Pillow, each operation of the recipe with torchvision's function and the same drawn
parameters, normalization and MixUp and CutMix with torchvision's. Then the whole path of an image with the whole path.
gives: :class:`Parity`.

Differences are in levels: 1/255 of the range of a pixel. torchvision is asked in float and in uint8, which differ.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpuaug.augment.mix import Mix
from gpuaug.augment.ops import noise
from gpuaug.augment.parameters import Chosen, Params, Prepared
from gpuaug.augment.recipe import Augment, Drawn, View
from gpuaug.batch import Boxes, EncodedBatch, Interpolation
from gpuaug.decode import header
from gpuaug.decode.decoder import Decode, Decoder
from gpuaug.decode.plan import HeaderInfo
from gpuaug.loader.loader import Loader
from gpuaug.read.reader import Reader
from gpuaug.tools.parity.counterpart import ABSENT, Call, call, counterpart, text, torchvision, why

log = logging.getLogger("gpuaug")

EPOCHS = 32  # searched for samples that an operation is drawn for
INTERPOLATIONS: tuple[Interpolation, ...] = ("bilinear", "bicubic")
EQUAL, LEVEL = 0.05, 1.001  # float32 on one side, float64 on the other; one level, and what float32 leaves of it
CLOSE = 4.0  # cutting off fractions costs half a level a step, and recipes have up to eight

Image = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Worst:
    """The image with the largest difference of a comparison.

    Attributes:
        key, index, epoch: which sample, with which draws; epoch None where nothing is drawn.
        y, x: where the difference is largest.
        ours, theirs: float32 [H, W, 3] in levels.
        what: what was done, with its parameters.
    """

    key: str
    index: int
    epoch: int | None
    y: int
    x: int
    ours: Image
    theirs: Image
    what: str


@dataclass(eq=False)
class Difference:
    """One comparison over all images; all numbers in levels of 1/255.

    Attributes:
        stage: ``decode``, ``resize``, ``operation``, ``normalize``, ``mix`` or ``all``.
        name: which of them; an operation's key in the recipe, and after a colon a step or an alternative of it.
        reference: what ours is compared with.
        view: name of the view in a MultiView; "" without one.
        images: how many.
        largest: of all values.
        mean: of the absolute differences.
        bias: mean of ours minus theirs.
        off: share of pixels with a channel off by more than one level.
        why: where the difference comes from, in words; "" where it is none.
        step: whether this is one step of an operation that is compared as a whole too.
        worst: the image with the largest one.
    """

    stage: str
    name: str
    reference: str
    view: str = ""
    images: int = 0
    largest: float = 0.0
    mean: float = 0.0
    bias: float = 0.0
    off: float = 0.0
    why: str = ""
    step: bool = False
    worst: Worst | None = None
    _pixels: int = 0

    @property
    def verdict(self) -> str:
        """``equal``, ``rounding`` (one level, but for rare pixels), ``close`` (up to four on average) or ``other``."""
        if self.largest <= EQUAL:
            return "equal"
        if self.largest <= LEVEL or (self.off <= 0.01 and self.mean <= 1):
            return "rounding"
        return "close" if self.mean <= CLOSE else "other"

    @property
    def title(self) -> str:
        """The name, and of which view."""
        return f"{self.name}, {self.view}" if self.view else self.name

    def add(self, ours: Image, theirs: Image, *, sample: Sample, epoch: int | None = None, what: str = "") -> None:
        """Compare one more image: [H, W, 3] in levels on both sides."""
        gap = ours.astype(np.float32) - theirs.astype(np.float32)
        size = np.abs(gap).max(axis=2)
        before, count = self._pixels, size.size
        self._pixels, self.images = before + count, self.images + 1
        for name, value in (
            ("mean", float(np.abs(gap).mean(dtype=np.float64))),
            ("bias", float(gap.mean(dtype=np.float64))),
            ("off", float((size > LEVEL).mean())),
        ):
            setattr(self, name, (getattr(self, name) * before + value * count) / self._pixels)
        if self.worst is None or size.max() > self.largest:
            self.largest = float(size.max())
            y, x = np.unravel_index(int(size.argmax()), size.shape)
            one, other = (np.array(v, dtype=np.float32) for v in (ours, theirs))
            self.worst = Worst(sample.key, sample.index, epoch, int(y), int(x), one, other, what)

    def plain(self) -> dict[str, Any]:
        """Everything but the pixels, for JSON."""
        values = {k: v for k, v in vars(self).items() if k not in ("worst", "_pixels")}
        if (w := self.worst) is not None:
            place = {"key": w.key, "index": w.index, "epoch": w.epoch, "y": w.y, "x": w.x, "what": w.what}
            values["worst"] = {**place, "ours": w.ours[w.y, w.x].tolist(), "theirs": w.theirs[w.y, w.x].tolist()}
        return {**values, "verdict": self.verdict}


@dataclass(eq=False)
class Sample:
    """One image on its way: the views as the recipe's crop gives them on our side, and on Pillow's."""

    index: int
    key: str
    ours: dict[str, Image] = field(default_factory=dict)  # by the view's name: uint8 [H, W, 3]
    theirs: dict[str, Image] = field(default_factory=dict)


@dataclass(eq=False)
class Parity:
    """What was found.

    Attributes:
        differences: in the order of the stages.
        notes: what could not be compared, and what a reader should know.
        samples: images that were compared.
        torchvision: its version.
    """

    differences: list[Difference]
    notes: list[str]
    samples: int
    torchvision: str

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "samples": self.samples,
            "torchvision": self.torchvision,
            "differences": [d.plain() for d in self.differences],
            "notes": self.notes,
            "summary": summary(self),
        }


def compare(
    loader: Loader,
    decode: Decode,
    *,
    indices: Sequence[int],
    epoch: int = 0,
    progress: Callable[[Iterable[Any], str], Iterable[Any]] = lambda items, what: items,
) -> Parity:
    """Compare every stage on some samples.

    Args:
        loader: whose source, recipe, mix, seed and device are meant.
        decode: settings of the decoder.
        indices: numbers of the samples in the source.
        epoch: whose draws; where they leave an operation out, those of the next epochs are searched.
        progress: wraps what is iterated, as ``tqdm(items, desc=what)`` does.

    Raises:
        ConfigError: if torchvision cannot be imported.
    """
    _, version = torchvision()
    found = _Found()
    views = [view for view in loader.augment.views if view.copy == 0]
    samples = _decoded(loader, decode, found, views, progress(indices, "decode"), epoch=epoch)
    if samples:
        for view in views:
            _operations(loader, found, view, samples, epoch=epoch, progress=progress)
        for view in views:
            _normalize(loader, found, view, samples)
        _mixed(loader, found, views, samples, epoch=epoch)
        for view in views:
            _whole(loader, found, view, samples, epoch=epoch)
    for difference in found.differences.values():
        difference.why = difference.why if difference.verdict != "equal" else ""
    return Parity(
        sorted(found.differences.values(), key=lambda d: _STAGES.index(d.stage)),
        found.notes,
        len(samples),
        version,
    )


def summary(parity: Parity) -> str:
    """What somebody with a model that was trained on torchvision's pipeline can expect, in a few sentences."""
    inputs = [d for d in parity.differences if d.stage == "all" and d.name == _BARE]
    if not inputs:
        return "Nothing could be compared."
    first = max(inputs, key=lambda d: d.mean)
    best: dict[tuple[str, str], Difference] = {}  # torchvision's float and uint8 differ: the nearer one counts
    for d in parity.differences:
        at = d.name, d.view
        if d.stage == "operation" and not d.step and (at not in best or d.mean < best[at].mean):
            best[at] = d
    other = list(dict.fromkeys(d.name for d in best.values() if d.verdict not in ("equal", "rounding")))
    same = [name for name in dict.fromkeys(d.name for d in best.values()) if name not in other]
    small = first.mean <= 1 and first.off <= 0.02
    told = (
        "A model that was trained on torchvision's pipeline (Pillow's decode and resize) gets inputs here that differ "
        f"by {first.mean:.3f} levels of 255 on average, {first.off:.2%} of the pixels by more than one level, at most "
        f"{first.largest:.2f}: "
        + (
            "the size of rounding, far below what any augmentation does. Expect the same accuracy; one evaluation with "
            "augment=eval confirms it."
            if small
            else "more than rounding. Evaluate the model with augment=eval before relying on it; the table and the "
            "picture say which stage it comes from."
        )
    )
    dark = [d.bias for d in parity.differences if d.stage == "all" and d.reference.endswith("uint8")]
    if dark and max(dark) > 0.75:
        told += (
            f" torchvision's uint8 arithmetic cuts off fractions and leaves augmented images {max(dark):.1f} levels "
            "darker than its float arithmetic, which ours equals."
        )
    if same:
        told += f" {_and(same)} {'follows' if len(same) == 1 else 'follow'} torchvision's functions."
    if other:
        told += (
            f" {_and(other)} {'does' if len(other) == 1 else 'do'} something else than torchvision's of that name: "
            "fine for training from scratch, but not the same recipe."
        )
    return told


# --- bookkeeping

_STAGES = ("decode", "resize", "operation", "normalize", "mix", "all")


class _Found:
    def __init__(self) -> None:
        self.differences: dict[tuple[str, str, str, str], Difference] = {}
        self.notes: list[str] = []

    def at(
        self, stage: str, name: str, reference: str, why: str = "", *, view: str = "", step: bool = False
    ) -> Difference:
        made = Difference(stage, name, reference, view, why=why, step=step)
        return self.differences.setdefault((stage, name, reference, view), made)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _of(view: View) -> str:
    return f" of {view.name}" if view.name else ""


def _and(names: list[str]) -> str:
    quoted = [f"`{n}`" for n in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"


# --- decode, crop, resize


def _decoded(
    loader: Loader, decode: Decode, found: _Found, views: list[View], indices: Iterable[int], *, epoch: int
) -> list[Sample]:
    """Compare decoding, crops and resizing; one image at a time, so that photographs of any size fit."""
    decoder = decode.open(loader.device)
    samples, lying = [], 0
    try:
        for index in indices:
            number = torch.tensor([index], dtype=torch.int64)
            batches = Reader(loader.source, num_workers=0).batches([(number, number * 0, number == number)])
            encoded = next(iter(batches))
            look = decoder.read_headers(encoded)
            sample = Sample(index, loader.source.key(index))
            faults = [*encoded.faults, *look.faults]
            image = None if faults else decoder.full(encoded, look)[0].cpu().numpy()
            if image is None or not image.size:
                reason = faults[0].reason if faults else "it cannot be decoded"
                found.note(f"sample {index} ({sample.key}) is left out: {reason}")
                continue
            data = encoded.encoded(0).numpy().tobytes()
            packed = header.sniff(data) == "raw"
            try:
                theirs = image if packed else _by_pillow(data)
            except Exception as error:  # Pillow raises whatever the bytes lead it to
                found.note(f"sample {index} ({sample.key}) is left out: Pillow cannot decode it ({error})")
                continue
            lying += int(look.orientation[0]) != 1
            if theirs.shape != image.shape:
                found.note(f"sample {index} ({sample.key}): Pillow gives {theirs.shape[:2]}, ours {image.shape[:2]}")
                continue
            if packed:
                found.note("decoding is not compared: these pixels were packed, and need none")
            else:
                deep = _is_deep(data)
                name = f"{decoder.backend}, 16 bits" if deep else decoder.backend
                found.at("decode", name, "Pillow", _DEEP if deep else _DECODE).add(image, theirs, sample=sample)
            drawn = loader.augment.draw(seed=loader.seed, epoch=epoch, indices=[index])
            boxes = loader.augment.boxes(drawn, look.height, look.width)
            for view, box in zip(loader.augment.views, boxes, strict=True):
                if view in views:
                    _resized(found, partial(_view, decoder, encoded, look), sample, view, box, image, epoch=epoch)
                    sample.theirs[view.name] = _canvas(theirs, box)
            samples.append(sample)
    finally:
        decoder.close()
    if lying:
        found.note(
            f"{lying} of {len(samples)} images have an EXIF orientation and are turned, here and by Pillow's "
            "exif_transpose. torchvision's ImageFolder leaves images as they are stored: a model trained with it saw "
            "these lying."
        )
    return samples


def _view(decoder: Decoder, encoded: EncodedBatch, look: HeaderInfo, box: Boxes) -> Image:
    return decoder.pixels(encoded, look, [box])[0][0][0].cpu().numpy()


def _resized(
    found: _Found, cut: Callable[[Boxes], Image], sample: Sample, view: View, box: Boxes, image: Image, *, epoch: int
) -> None:
    """Crop and resize of one decoded image, by both interpolations whichever the recipe takes."""
    scaled = bool((box.resized[0] != box.box[0, 2:]).any())
    for interpolation in INTERPOLATIONS if scaled else (box.interpolation,):
        part = replace(box, interpolation=interpolation)
        ours, theirs = cut(part), _canvas(image, part)
        name = f"crop, {interpolation}" if scaled else "crop"
        difference = found.at("resize", name, "Pillow", _RESIZE, view=view.name)
        difference.add(ours, theirs, sample=sample, epoch=epoch, what=_told(part))
        if interpolation == box.interpolation:
            sample.ours[view.name] = ours


_DECODE = "two decoders' inverse DCT and colour conversion round differently"
_DEEP = (
    "Pillow's convert('RGB'), which torchvision's ImageFolder takes, cuts 16-bit gray off at 255, so that nearly all "
    "of it is white; here it is scaled to 8 bits"
)
_RESIZE = (
    "both take antialiased filters with half-pixel centres; Pillow and torch round to uint8, and cut off beyond it, "
    "between columns and rows, and releases differ in which of them comes first"
)


def _is_deep(data: bytes) -> bool:
    """Whether Pillow opens it as 16 or 32 bits of gray."""
    from PIL import Image as Pillow

    with Pillow.open(io.BytesIO(data)) as opened:
        return opened.mode.startswith("I")


def _by_pillow(data: bytes) -> Image:
    from PIL import Image as Pillow
    from PIL import ImageOps

    with Pillow.open(io.BytesIO(data)) as image:
        return np.array(ImageOps.exif_transpose(image).convert("RGB"))


def _canvas(image: Image, box: Boxes) -> Image:
    """A box of uint8 [H, W, 3], cropped, resized and placed by Pillow."""
    from PIL import Image as Pillow

    top, left, height, width = box.box[0].tolist()
    h, w = box.resized[0].tolist()
    part = Pillow.fromarray(np.ascontiguousarray(image[top : top + height, left : left + width]))
    if (h, w) != (height, width):
        part = part.resize((w, h), Pillow.Resampling[box.interpolation.upper()])
    return _placed(np.asarray(part), box)


def _placed(part: Image, box: Boxes) -> Image:
    (H, W), (y, x), (h, w) = box.size, box.offset[0].tolist(), part.shape[:2]
    canvas = np.full((H, W, 3), box.fill, dtype=part.dtype)
    y0, x0, y1, x1 = max(y, 0), max(x, 0), min(y + h, H), min(x + w, W)
    if y0 < y1 and x0 < x1:
        canvas[y0:y1, x0:x1] = part[y0 - y : y1 - y, x0 - x : x1 - x]
    return canvas


def _told(box: Boxes) -> str:
    top, left, height, width = box.box[0].tolist()
    h, w = box.resized[0].tolist()
    return f"{width}x{height} at ({left}, {top}) to {w}x{h}, {box.interpolation}"


# --- operations


def _operations(
    loader: Loader,
    found: _Found,
    view: View,
    samples: list[Sample],
    *,
    epoch: int,
    progress: Callable[[Iterable[Any], str], Iterable[Any]],
) -> None:
    """Every operation that is drawn for a sample, alone, on the uint8 view that the crop gave."""
    augment = view.augment
    for op in augment.prepared:
        if op.seeded is not None:
            reason = ABSENT.get(type(op.op).__name__, f"it draws by itself ({op.seeded})")
            found.note(f"`{op.name}` ({type(op.op).__name__}) is not compared: {reason}")
    ops = [op for op in augment.prepared if op.seeded is None]
    indices = [s.index for s in samples]
    backends: dict[tuple[str, int], Any] = {}
    counts: dict[str, int] = {}  # images per name, those that have no counterpart among them
    for now in progress(range(epoch, epoch + EPOCHS), f"operations{_of(view)}") if ops else ():
        drawn = loader.augment.draw(seed=loader.seed, epoch=now, indices=indices)
        for op in ops:
            for row, sample in enumerate(samples):
                image = sample.ours[view.name]
                chosen = _chosen(op, drawn, view, row, image)
                for name, slots in _parts(op, chosen, image):
                    if counts.get(name, 0) >= len(samples):
                        continue
                    counts[name] = counts.get(name, 0) + 1
                    calls = _calls(op, chosen, slots, image)
                    if isinstance(calls, str):
                        found.note(f"`{name}`{_of(view)} is not compared: {calls}")
                        continue
                    key = (op.name, -1 if len(slots) == len(op.slots) else slots[0])
                    if key not in backends:
                        backends[key] = _backend(augment, [replace(op, slots=tuple(op.slots[s] for s in slots))])
                    params = tuple(chosen.params[s] for s in slots)
                    own = [Chosen(chosen.choice[:, list(slots)], params, chosen.keys)]
                    ours = _run(backends[key], image, own, loader.device) * 255
                    for reference in REFERENCES:
                        theirs = _levels(image, calls, reference)
                        why, step = _why(op, chosen, slots, reference), name != op.name and counts.get(op.name, 0) > 0
                        difference = found.at("operation", name, reference, why, view=view.name, step=step)
                        difference.add(ours, theirs, sample=sample, epoch=now, what=text(calls))
        if all(counts.get(op.name, 0) >= len(samples) for op in ops):
            break
    for op in ops:
        if not any(name == op.name or name.startswith(f"{op.name}:") for name in counts):
            found.note(f"`{op.name}`{_of(view)} was not drawn for these images in {EPOCHS} epochs")


def _chosen(op: Prepared, drawn: Drawn, view: View, row: int, image: Image) -> Chosen:
    """What training chooses for one sample, as a batch of one."""
    at = (view.name, view.copy, op.name)
    keys = drawn.keys[at][row : row + 1] if at in drawn.keys else None
    chosen = op.draw(drawn.uniforms[at][row : row + 1], (image.shape[0], image.shape[1]), keys)
    # copies: broadcast arrays of one row count as contiguous, and torch warns that they cannot be written
    params = tuple(tuple({k: np.array(v) for k, v in p.items()} for p in slot) for slot in chosen.params)
    return Chosen(chosen.choice, params, chosen.keys)


def _parts(op: Prepared, chosen: Chosen, image: Image) -> list[tuple[str, tuple[int, ...]]]:
    """What to compare of an operation that was drawn for one sample: names, and slots to run."""
    active = [s for s in range(len(op.slots)) if chosen.choice[0, s] >= 0]
    if not active:
        return []
    if len(op.slots) == 1 and len(op.slots[0]) == 1:
        return [(op.name, (0,))]
    kinds = {type(module) for modules in op.slots for module in modules}
    if len(kinds) == 1:  # a jitter: as a whole, then step by step
        steps = [(f"{op.name}: {_call_name(op, chosen, s, image)}", (s,)) for s in active]
        return [(op.name, tuple(range(len(op.slots)))), *steps]
    return [(f"{op.name}: {type(op.slots[s][chosen.choice[0, s]]).__name__}", (s,)) for s in active]


def _call_name(op: Prepared, chosen: Chosen, slot: int, image: Image) -> str:
    calls = _calls(op, chosen, (slot,), image)
    return calls[0][0] if not isinstance(calls, str) and calls else "nothing"


def _calls(op: Prepared, chosen: Chosen, slots: Sequence[int], image: Image) -> list[Call] | str:
    """torchvision's functions for what was chosen for the only sample, in order; or why there are none."""
    calls: list[Call] = []
    for slot in slots:
        if (choice := int(chosen.choice[0, slot])) >= 0:
            module = op.slots[slot][choice]
            one = counterpart(module, _params(module, chosen, slot, image))
            if isinstance(one, str):
                return one
            calls += one
    return calls


def _params(module: nn.Module, chosen: Chosen, slot: int, image: Image) -> Params:
    """Parameters of the only sample, with those per pixel, which the backends make from its key."""
    params = {k: v[0] for k, v in chosen.params[slot][int(chosen.choice[0, slot])].items()}
    if chosen.keys is not None:
        fields = noise(module, torch.from_numpy(chosen.keys), (image.shape[0], image.shape[1]))
        params |= {k: v[0].numpy() for k, v in fields.items()}
    return params


def _why(op: Prepared, chosen: Chosen, slots: Sequence[int], reference: str) -> str:
    active = [s for s in slots if chosen.choice[0, s] >= 0]
    return why({type(op.slots[s][int(chosen.choice[0, s])]).__name__ for s in active}, reference)


# --- torchvision's side

REFERENCES = ("torchvision, float", "torchvision, uint8")


def _levels(image: Image, calls: list[Call], reference: str) -> Image:
    """What torchvision makes of uint8 [H, W, 3], in levels."""
    x = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)
    if not reference.endswith("uint8"):
        x = x.float() / 255
    for one in calls:
        x = call(one, x)
    out: Image = x.permute(1, 2, 0).numpy().astype(np.float32)
    return out if x.dtype == torch.uint8 else out * 255


# --- our side


def _backend(augment: Augment, ops: Sequence[Prepared], normalize: nn.Module | None = None) -> Any:
    if augment.backend == "kornia":
        from gpuaug.augment.reference import ReferenceBackend

        return ReferenceBackend(ops, normalize)
    from gpuaug.augment.fused.backend import FusedBackend

    return FusedBackend(ops, normalize)


def _run(backend: Any, image: Image, chosen: list[Chosen], device: torch.device) -> Image:
    """float32 [H, W, 3] of uint8 [H, W, 3]."""
    x: Tensor = backend(torch.from_numpy(np.ascontiguousarray(image))[None].to(device), chosen)
    out: Image = x[0].permute(1, 2, 0).float().cpu().numpy()
    return out


# --- the ends


def _normalize(loader: Loader, found: _Found, view: View, samples: list[Sample]) -> None:
    normalize = view.augment.normalize
    if normalize is None:
        return
    backend, how = _backend(view.augment, (), normalize), normalize.settings
    for sample in samples:
        ours = _run(backend, sample.ours[view.name], [], loader.device)
        x = torch.from_numpy(sample.ours[view.name]).permute(2, 0, 1).float() / 255
        theirs = torchvision()[0].functional.normalize(x, **how).permute(1, 2, 0).numpy()
        difference = found.at("normalize", "normalize", REFERENCES[0], view=view.name)
        difference.add(*(_restored(v, how) for v in (ours, theirs)), sample=sample)


def _restored(image: Image, how: dict[str, Any] | None) -> Image:
    """Levels of a normalized image."""
    return image * 255 if how is None else (image * np.array(how["std"]) + np.array(how["mean"])) * 255


def _mixed(loader: Loader, found: _Found, views: list[View], samples: list[Sample], *, epoch: int) -> None:
    """MixUp and CutMix of the views as one batch; torchvision gets it in an order in which its pairs are ours."""
    mix = loader.mix
    kinds = [k for k in ("mixup", "cutmix") if mix is not None and getattr(mix, f"{k}_alpha")]
    if mix is None or not kinds:
        return
    batches = [[s.ours[view.name] for s in samples] for view in views]
    if len(samples) < 2 or any(image.shape != batch[0].shape for batch in batches for image in batch):
        found.note("mix is not compared: that takes two images of one size at least")
        return
    views_in = [torch.from_numpy(np.stack(batch)).permute(0, 3, 1, 2).float() / 255 for batch in batches]
    for kind in kinds:
        other = "cutmix" if kind == "mixup" else "mixup"
        alone = replace(mix, p=1.0, label_smoothing=0.0, **{f"{other}_alpha": 0.0})
        ours, labels, boxes = _mixture(alone, views_in, loader, samples, epoch=epoch)
        order, lam = _chain(labels), float(labels.diagonal().mean())
        for n, (view, x) in enumerate(zip(views, views_in, strict=True)):
            given = {"batch_size": len(samples), "labels": torch.arange(len(samples))[order]}
            given |= {"lam": lam} if kind == "mixup" else {"box": boxes[n], "lam_adjusted": lam}
            theirs = torch.empty_like(x)
            transform = torchvision()[0].MixUp if kind == "mixup" else torchvision()[0].CutMix
            theirs[order] = transform(num_classes=len(samples)).transform(x[order], given)
            difference = found.at("mix", kind, REFERENCES[0], view=view.name)
            what = f"lambda {lam:.3g}" if kind == "mixup" else f"box {boxes[n]}"
            for row, sample in enumerate(samples):
                pair = (v[row].permute(1, 2, 0).cpu().numpy() * 255 for v in (ours[n], theirs))
                difference.add(*pair, sample=sample, epoch=epoch, what=what)
        found.note(
            f"{kind}: torchvision pairs each image with the one before it in the batch, here the pairs are drawn; the "
            "same ones were given to both"
        )
    if mix.label_smoothing:
        found.note("mix: torchvision leaves label smoothing to the loss (CrossEntropyLoss(label_smoothing=...))")


def _chain(labels: Tensor) -> list[int]:
    """The rows in an order in which each is mixed with the one before it, as torchvision does it.

    ``labels`` [B, B]: the share of each label in each row. Our pairs form one chain.
    """
    others = labels.clone().fill_diagonal_(0)
    chain = list(range(len(labels)))
    for n in range(1, len(chain) if others.any() else 0):  # lambda may be drawn as 1
        chain[n] = int(others[chain[n - 1]].argmax())
    return chain[::-1]


def _mixture(
    mix: Mix, views: list[Tensor], loader: Loader, samples: list[Sample], *, epoch: int
) -> tuple[list[Tensor], Tensor, list[tuple[int, int, int, int]]]:
    """Mixed views [B, 3, H, W], labels [B, B], and per view the box (x1, y1, x2, y2) that CutMix pasted."""
    count = len(samples)

    def run(images: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        made, soft = mix(
            [x.to(loader.device) for x in images],
            torch.eye(count, device=loader.device),
            valid=torch.ones(count, dtype=torch.bool),
            num_classes=None,
            seed=loader.seed,
            epoch=epoch,
            first_index=samples[0].index,
        )
        return [x.cpu() for x in made], soft.cpu()

    ours, labels = run(views)
    numbers = torch.arange(count, dtype=torch.float32).view(-1, 1, 1, 1)
    marked, _ = run([numbers.expand(-1, *x.shape[1:]) for x in views])  # where row 0 holds another row's number
    boxes = []
    for x in marked:
        rows, columns = x[0, 0].nonzero(as_tuple=True)
        empty = not len(rows)
        box = (0, 0, 0, 0) if empty else (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
        boxes.append((int(box[0]), int(box[1]), int(box[2]), int(box[3])))
    return ours, labels, boxes


def _whole(loader: Loader, found: _Found, view: View, samples: list[Sample], *, epoch: int) -> None:
    """From the bytes to the normalized view, everything ours on one side and theirs on the other."""
    augment = view.augment
    how = None if augment.normalize is None else augment.normalize.settings
    bare, whole = (_backend(augment, ops, augment.normalize) for ops in ((), augment.prepared))
    drawn = loader.augment.draw(seed=loader.seed, epoch=epoch, indices=[s.index for s in samples])
    seeded = any(op.seeded is not None for op in augment.prepared)
    left_out = 0
    for row, sample in enumerate(samples):
        image, theirs = sample.ours[view.name], sample.theirs[view.name]
        ours = _restored(_run(bare, image, [], loader.device), how)
        found.at("all", _BARE, "Pillow, then torchvision's normalize", view=view.name).add(
            ours, theirs, sample=sample, epoch=epoch
        )
        if seeded or not augment.prepared:
            continue
        chosen = [_chosen(op, drawn, view, row, image) for op in augment.prepared]
        pairs = zip(augment.prepared, chosen, strict=True)
        parts = [_calls(op, c, range(len(op.slots)), image) for op, c in pairs]
        calls = [call for part in parts if not isinstance(part, str) for call in part]
        if any(isinstance(part, str) for part in parts):
            left_out += 1
            continue
        ours = _restored(_run(whole, image, chosen, loader.device), how)
        for reference in REFERENCES:
            theirs_too = _levels(theirs, calls, reference)
            found.at("all", "everything", f"Pillow, then {reference}", _ADDED, view=view.name).add(
                ours, theirs_too, sample=sample, epoch=epoch, what=text(calls)
            )
    if left_out:
        found.note(f"the whole way{_of(view)} leaves out {left_out} images: an operation of theirs has no counterpart")


_BARE = "everything but the operations"
_ADDED = "the sum of the above; a threshold (solarize, posterize, equalize) turns one level into many"
