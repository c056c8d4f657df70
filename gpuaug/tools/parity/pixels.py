"""Compares the images of a loader with Pillow's and torchvision's, stage by stage and operation by operation.

In each stage both sides get the same input, so a difference comes from that stage alone. Differences are in levels:
1/255 of the pixel range. torchvision runs in float and in uint8, because its two results differ.
"""

from __future__ import annotations

import io
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import PIL.Image
import torch
from PIL import ImageOps
from tqdm import tqdm

from gpuaug.augment.fused.backend import FusedBackend
from gpuaug.augment.parameters import Chosen, Prepared
from gpuaug.augment.recipe import Drawn, View
from gpuaug.augment.reference import ReferenceBackend
from gpuaug.decode import header
from gpuaug.loader.loader import Loader
from gpuaug.targets.batch import BatchTargets
from gpuaug.tools.parity import targets
from gpuaug.tools.parity.counterpart import Call, call, calls_of, crop_by_pillow, text, why
from gpuaug.tools.parity.differences import EPOCHS, HEADINGS, Image, Parity
from gpuaug.tools.peers import torchvision
from gpuaug.tools.preview.originals import read, upright_targets

FLOAT, UINT8 = REFERENCES = ("torchvision, float", "torchvision, uint8")
BARE, WHOLE = "everything but the operations", "everything"
DECODE = "the two decoders round differently in the inverse DCT and the color conversion"
DEEP = "Pillow clips 16-bit gray at 255, so nearly all pixels become white; gpuaug scales 16-bit gray to 8 bits"
RESIZE = (
    "both use antialiased filters with half-pixel centers; Pillow and torch round to uint8 between the horizontal and "
    "the vertical pass, and the order of the passes depends on the release"
)
REDUCED = "libjpeg decodes each block to fewer pixels, which filters the image differently than resizing does"
ADDED = "all differences above add up; solarize, posterize and equalize can turn one level of difference into many"


@dataclass(eq=False)
class Sample:
    """One sample: its views after the recipe's crop, made by gpuaug (ours) and by Pillow (theirs)."""

    index: int
    key: str
    ours: dict[str, Image] = field(default_factory=dict)  # view name to uint8 [H, W, 3]
    theirs: dict[str, Image] = field(default_factory=dict)
    targets: BatchTargets | None = None  # in pixels of the upright image

    @property
    def named(self) -> dict[str, Any]:
        """The arguments of ``Difference.add`` that name the sample."""
        return {"index": self.index, "key": self.key}


def compare(loader: Loader, *, indices: Sequence[int], epoch: int = 0) -> Parity:
    """Compare every stage of a loader on some samples, with the random parameters of an epoch.

    If this epoch applies an operation to too few samples, later epochs are used too.
    """
    parity = Parity(torchvision()[1])
    views = [view for view in loader.augment.at(epoch).views if view.copy == 0]
    samples = _decoded(parity, loader, views, tqdm(indices, "decode", leave=False, disable=None), epoch=epoch)
    parity.samples = len(samples)
    if samples:
        for view in views:
            _operations(parity, loader, view, samples, epoch=epoch)
            _whole(parity, loader, view, samples, epoch=epoch)
            if known := [(s.index, s.key, s.targets) for s in samples if s.targets is not None]:
                targets.compare(parity, loader, view, known, epoch=epoch)
        _mixed(parity, loader, views, samples, epoch=epoch)
    for difference in parity.differences:
        if difference.verdict == "equal":
            difference.why = ""
    parity.differences.sort(key=lambda d: [*HEADINGS].index(d.stage))
    return parity


# --- decode, crop, resize


def _decoded(parity: Parity, loader: Loader, views: list[View], indices: Iterable[int], *, epoch: int) -> list[Sample]:
    """Compare decoding, cropping and resizing, one image at a time to limit memory."""
    decoder, stage = replace(loader.decode, reduced=False).open(loader.device), loader.pipeline.stage
    samples, turned = [], 0
    for index in indices:
        encoded = read(loader, [index], epoch=epoch)
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
        except Exception as error:  # Pillow raises errors of many types if the bytes are damaged
            parity.note(f"sample {index} ({sample.key}) is left out: {error}")
            continue
        turned += int(headers.orientation[0]) != 1
        if packed:
            parity.note("decoding is not compared: the source stores pixels, which need no decoding")
        else:
            parity.at("decode", decoder.backend, "Pillow", DECODE).add(image, theirs, **sample.named)
        batch = stage.read_headers(encoded, epoch)
        reduced = stage.decode(batch)[0] if loader.decode.reduced else None
        sample.targets = upright_targets(loader, decoder, encoded, headers)
        if loader.targets is not None and sample.targets is None:
            parity.note(f"sample {index} ({sample.key}): masks and boxes cannot be used, so they are left out")
        for n, (view, window) in enumerate(zip(loader.augment.at(epoch).views, batch.windows, strict=True)):
            if view not in views:
                continue
            resized = bool((window.resized[0] != window.window[0, 2:]).any())
            what = f"(top, left, height, width) {window.window[0].tolist()} to {window.resized[0].tolist()}"
            name = f"crop, {window.interpolation}" if resized else "crop"
            ours = decoder.pixels(encoded, headers, [window])[0][0][0].cpu().numpy()
            resample, fill = PIL.Image.Resampling[window.interpolation.upper()], np.broadcast_to(window.fill, 3)
            cropped = partial(crop_by_pillow, window=window, resample=resample, fill=tuple(fill.tolist()))
            difference = parity.at("resize", name, "Pillow", RESIZE, view=view.name)
            difference.add(ours, cropped(image), **sample.named, epoch=epoch, what=what)
            if reduced is not None:  # the later stages use these pixels
                full, ours = ours, reduced[n][0].cpu().numpy()
                difference = parity.at("reduced", "reduced", "full decoding", REDUCED, view=view.name)
                difference.add(ours, full, **sample.named, epoch=epoch)
            sample.ours[view.name], sample.theirs[view.name] = ours, cropped(theirs)
        samples.append(sample)
    decoder.close()
    for d in parity.differences:
        if d.stage == "reduced":
            parity.note(f"decode.{d.title}: the largest mean difference of an image is {d.largest_mean:.2f} levels")
    if turned:
        parity.note(
            f"{turned} of {len(samples)} images have an EXIF orientation, and gpuaug turns them upright. "
            "torchvision's ImageFolder does not turn them, so a model trained with ImageFolder saw them unturned"
        )
    return samples


def _by_pillow(data: bytes) -> Image:
    """Decode to uint8 [H, W, 3]. Raises ValueError if Pillow opens the image as 16-bit or 32-bit gray."""
    with PIL.Image.open(io.BytesIO(data)) as image:
        if image.mode.startswith("I"):
            raise ValueError(DEEP)
        return np.array(ImageOps.exif_transpose(image).convert("RGB"))


# --- operations


def _operations(parity: Parity, loader: Loader, view: View, samples: list[Sample], *, epoch: int) -> None:
    """Compare each operation alone, on the cropped uint8 views of the samples that get the operation."""
    of = f" of {view.name}" if view.name else ""
    ops, images = [], Counter[str]()  # for each operation's name: number of images so far
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
                    difference.add(ours, theirs, **sample.named, epoch=now, what=text(calls))
    for op in ops:
        if not any(name.partition(": ")[0] == op.name for name in images):
            parity.note(f"`{op.name}`{of} was not applied to these images in {EPOCHS} epochs")


def _chosen(op: Prepared, drawn: Drawn, view: View, row: int, image: Image) -> Chosen:
    """The choices and parameters that training uses for one sample, as a batch of one."""
    at, own = (view.name, view.copy, op.name), slice(row, row + 1)
    keys = drawn.keys[at][own] if at in drawn.keys else None
    return op.draw(drawn.uniforms[at][own], (image.shape[0], image.shape[1]), keys)


def _parts(op: Prepared, chosen: Chosen) -> list[tuple[str, list[int]]]:
    """The names and slots to compare: all slots together, or one by one if they hold several types of operations."""
    active = [s for s in range(len(op.slots)) if chosen.choice[0, s] >= 0]
    if len({type(module) for modules in op.slots for module in modules}) == 1:
        return [(op.name, [*range(len(op.slots))])] if active else []
    return [(f"{op.name}: {type(op.slots[s][chosen.choice[0, s]]).__name__}", [s]) for s in active]


def _ours(loader: Loader, view: View, image: Image, ops: Any = (), chosen: Any = (), normalize: Any = None) -> Image:
    """Run the training backend on uint8 [H, W, 3]. Returns float32 [H, W, 3], not yet in levels."""
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


# --- mix, normalize, complete pipelines


def _levels(image: Image, view: View) -> Image:
    """Convert a normalized image to levels."""
    if (normalize := view.augment.normalize) is not None:
        image = image * np.array(normalize.settings["std"]) + np.array(normalize.settings["mean"])
    return image * 255


def _mixed(parity: Parity, loader: Loader, views: list[View], samples: list[Sample], *, epoch: int) -> None:
    """Compare MixUp and CutMix on all samples as one batch. torchvision gets the same pairs of images as gpuaug."""
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
        (ours, shares), (marked, _) = (  # marked: after CutMix, the number of the image that each pixel comes from
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
            parity.at("mix", kind, FLOAT, view=view.name).add(*levels, **sample.named, epoch=epoch, what=what)
        parity.note(f"{kind}: torchvision mixes neighbors, gpuaug random pairs; here both got the same pairs")
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
            difference = parity.at("normalize", "normalize", FLOAT, view=view.name)
            difference.add(ours, _levels(x.numpy(), view), **sample.named)
        difference = parity.at("all", BARE, "Pillow, then torchvision's normalize", view=view.name)
        difference.add(ours, theirs, **sample.named, epoch=epoch)
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
            difference = parity.at("all", WHOLE, f"Pillow, then {reference}", ADDED, view=view.name)
            difference.add(ours, _theirs(theirs, calls, reference), **sample.named, epoch=epoch, what=text(calls))
