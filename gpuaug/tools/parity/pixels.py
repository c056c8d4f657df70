"""Compares the images of a loader with Pillow's and torchvision's, stage by stage and operation by operation.

In each stage both sides get the same input, so a difference comes from that stage alone. Differences are in levels:
1/255 of the pixel range. torchvision runs in float and in uint8, because its two results differ.
"""

from __future__ import annotations

import io
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import PIL.Image
import torch
from PIL import ImageOps
from tqdm import tqdm

from gpuaug.augment.parameters import Chosen, Prepared
from gpuaug.augment.recipe import View
from gpuaug.decode import header
from gpuaug.loader.loader import Loader
from gpuaug.tools.parity import targets
from gpuaug.tools.parity.counterpart import Step, calls_of, crop_by_pillow, levels, only, run, taken, text, why
from gpuaug.tools.parity.differences import EPOCHS, HEADINGS, Image, Parity, Sample
from gpuaug.tools.peers import torchvision
from gpuaug.tools.preview.originals import read, upright_targets

FLOAT, UINT8 = REFERENCES = ("torchvision, float", "torchvision, uint8")
BARE, WHOLE = "everything but the operations", "everything"
DECODE = "the two decoders round differently in the inverse DCT and the color conversion"
DEEP = "Pillow clips 16-bit gray at 255, so nearly all pixels become white; gpuaug scales 16-bit gray to 8 bits"
RESIZE = (
    "both use antialiased filters with half-pixel centers; Pillow and torch round to uint8 between the horizontal and "
    "the vertical pass, and the order of the passes depends on their releases"
)
REDUCED = "libjpeg decodes each block to fewer pixels, which filters the image differently than resizing does"
ADDED = "all differences above add up; solarize, posterize and equalize can turn one level of difference into many"


def compare(loader: Loader, *, indices: Sequence[int], epoch: int = 0) -> Parity:
    """Compare every stage of a loader on some samples, with the random parameters of an epoch.

    If this epoch applies an operation to too few samples, later epochs are used too.
    """
    parity = Parity(torchvision()[1])
    views = [view for view in loader.augment.at(epoch).views if view.copy == 0]
    samples = _decoded(parity, loader, tqdm(indices, "decode", leave=False, disable=None), epoch=epoch)
    parity.samples = len(samples)
    for view in views if samples else ():
        for op in tqdm(view.augment.prepared, "operations", leave=False, disable=None):
            _operation(parity, loader, view, op, samples, epoch=epoch)
        _whole(parity, loader, view, samples, epoch=epoch)
        if known := [sample for sample in samples if sample.targets is not None]:
            targets.compare(parity, loader, view, known, epoch=epoch)
    _mixed(parity, loader, views, samples, epoch=epoch)
    for difference in parity.differences:
        if difference.verdict == "equal":
            difference.why = ""
    parity.differences.sort(key=lambda d: [*HEADINGS].index(d.stage))
    return parity


# --- decode, crop, resize


def _decoded(parity: Parity, loader: Loader, indices: Iterable[int], *, epoch: int) -> list[Sample]:
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
            parity.at("decode", decoder.backend, "Pillow", DECODE).add(image, theirs, sample)
        batch = stage.read_headers(encoded, epoch)
        reduced = stage.decode(batch)[0] if loader.decode.reduced else None
        sample.targets = upright_targets(loader, decoder, encoded, headers)
        if loader.targets is not None and sample.targets is None:
            parity.note(f"sample {index} ({sample.key}): masks and boxes cannot be used, so they are left out")
        for n, (view, window) in enumerate(zip(loader.augment.at(epoch).views, batch.windows, strict=True)):
            if view.copy:
                continue
            at = partial(parity.at, view=view.name)
            resized = bool((window.resized[0] != window.window[0, 2:]).any())
            what = f"(top, left, height, width) {window.window[0].tolist()} to {window.resized[0].tolist()}"
            name = f"crop, {window.interpolation}" if resized else "crop"
            ours = decoder.pixels(encoded, headers, [window])[0][0][0].cpu().numpy()
            at("resize", name, "Pillow", RESIZE).add(
                ours, crop_by_pillow(image, window), sample, epoch=epoch, what=what
            )
            if reduced is not None:  # the later stages use these pixels
                full, ours = ours, reduced[n][0].cpu().numpy()
                at("reduced", "reduced", "full decoding", REDUCED).add(ours, full, sample, epoch=epoch)
            sample.ours[view.name], sample.theirs[view.name] = ours, crop_by_pillow(theirs, window)
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


# --- operations, complete pipelines


def _operation(parity: Parity, loader: Loader, view: View, op: Prepared, samples: list[Sample], *, epoch: int) -> None:
    """Compare one operation, on the cropped uint8 views of the samples that get the operation."""
    if op.seeded is not None:
        kind = type(op.op).__name__
        parity.note(f"`{op.name}` ({kind}) is not compared: it makes its own random numbers ({op.seeded})")
        return
    step, of = Step(loader, view, crop=None, ops={op.name: op.op}, normalize=None), f" of {view.name}" * bool(view.name)
    images = Counter[str]()  # for each name: number of images so far
    for now, sample in itertools.product(range(epoch, epoch + EPOCHS), samples):
        if images[op.name] == len(samples):
            return
        image = sample.ours[view.name]
        (chosen,) = step.choose(sample, image, now)
        for name, part in _parts(op, chosen):
            if images[name] == len(samples):
                continue
            images[name] += 1
            calls, kinds = calls_of([op], [part], image.shape[:2])
            if isinstance(calls, str):
                parity.note(f"`{name}`{of} is not compared: {calls}")
                continue
            ours = step.run(image, [part])
            for reference in REFERENCES:
                difference = parity.at("operation", name, reference, why(kinds, reference), view=view.name)
                theirs = run(calls, image, uint8=reference == UINT8)
                difference.add(ours, theirs, sample, epoch=now, what=text(calls))
    if not images:
        parity.note(f"`{op.name}`{of} was not applied to these images in {EPOCHS} epochs")


def _parts(op: Prepared, chosen: Chosen) -> list[tuple[str, Chosen]]:
    """Names and choices to compare: all slots together, or one by one if they hold several types of operations."""
    if len({type(module) for modules in op.slots for module in modules}) == 1:
        return [(op.name, chosen)] if taken(chosen) else []
    return [(f"{op.name}: {type(op.slots[slot][n]).__name__}", only(chosen, [slot])) for slot, n in taken(chosen)]


def _whole(parity: Parity, loader: Loader, view: View, samples: list[Sample], *, epoch: int) -> None:
    """Compare normalization alone, then the complete pipelines from the bytes to the normalized view."""
    ops, normalize = view.augment.prepared, view.augment.normalize
    drawn = bool(ops) and all(op.seeded is None for op in ops)  # gpuaug draws the parameters of all operations
    bare, whole = Step(loader, view, crop=None, ops=None), Step(loader, view, crop=None) if drawn else None
    at = partial(parity.at, view=view.name)
    for sample in samples:
        image, theirs = sample.ours[view.name], sample.theirs[view.name]
        ours = bare.run(image, [])
        if normalize is not None:
            x = torch.from_numpy(image).permute(2, 0, 1).float() / 255
            x = torchvision()[0].functional.normalize(x, **normalize.settings).permute(1, 2, 0)
            at("normalize", "normalize", FLOAT).add(ours, levels(x.numpy(), bare.augment), sample)
        at("all", BARE, "Pillow, then torchvision's normalize").add(ours, theirs, sample, epoch=epoch)
        if whole is None:
            continue
        chosen = whole.choose(sample, image, epoch)
        calls, _ = calls_of(ops, chosen, image.shape[:2])
        if isinstance(calls, str):
            parity.note(f"`{WHOLE}` leaves out sample {sample.index}: one of its operations has no counterpart")
            continue
        ours = whole.run(image, chosen)
        for reference in REFERENCES:
            made = run(calls, theirs, uint8=reference == UINT8)
            at("all", WHOLE, f"Pillow, then {reference}", ADDED).add(ours, made, sample, epoch=epoch, what=text(calls))


# --- mix


def _mixed(parity: Parity, loader: Loader, views: list[View], samples: list[Sample], *, epoch: int) -> None:
    """Compare MixUp and CutMix on all samples as one batch. torchvision gets the same pairs of images as gpuaug."""
    mix = loader.mix
    kinds = [kind for kind in ("MixUp", "CutMix") if mix is not None and getattr(mix, f"{kind.lower()}_alpha")]
    if mix is None or not kinds or not samples:
        return
    batches = [[sample.ours[view.name] for sample in samples] for view in views]
    if len(samples) < 2 or any(image.shape != batch[0].shape for batch in batches for image in batch):
        parity.note("mix is not compared: it needs at least two images of the same size")
        return
    count, device = len(samples), loader.device
    images = [torch.from_numpy(np.stack(batch)).permute(0, 3, 1, 2).float() / 255 for batch in batches]
    numbers = [torch.arange(count, dtype=x.dtype).view(-1, 1, 1, 1).expand_as(x) for x in images]
    for kind in kinds:
        alphas = {f"{other.lower()}_alpha": 0.0 for other in kinds if other != kind}
        made, shares = replace(mix, p=1.0, label_smoothing=0.0, **alphas)(
            [x.to(device) for x in (*images, *numbers)],
            torch.eye(count, device=device),
            valid=torch.ones(count, dtype=torch.bool),
            num_classes=None,
            seed=loader.seed,
            epoch=epoch,
            first_index=samples[0].index,
        )
        lam, mates = float(shares[0, 0]), (shares - shares.diagonal().diag()).argmax(dim=1).tolist()
        transform = getattr(torchvision()[0], kind)(num_classes=count)
        for n, view in enumerate(views):
            ys, xs = (made[len(views) + n][0, 0] != 0).nonzero(as_tuple=True)  # the pixels that CutMix pasted
            box = (int(xs.min()), int(ys.min()), int(xs.max()) + 1, int(ys.max()) + 1) if len(ys) else (0, 0, 0, 0)
            what = f"lambda {lam:.3g}" if kind == "MixUp" else f"box {box}"
            given = {"batch_size": 2, "labels": torch.arange(2), "lam": lam, "box": box, "lam_adjusted": lam}
            for row, sample in enumerate(samples):
                pair = images[n][[mates[row], row]]  # torchvision mixes each image with the previous one
                theirs = transform.transform(pair, given)[1]
                ours, theirs = (x.permute(1, 2, 0).cpu().numpy() * 255 for x in (made[n][row], theirs))
                parity.at("mix", kind.lower(), FLOAT, view=view.name).add(ours, theirs, sample, epoch=epoch, what=what)
        parity.note(f"{kind.lower()}: torchvision mixes neighbors, gpuaug random pairs; here both got the same pairs")
    if mix.label_smoothing:
        parity.note("mix: torchvision leaves label smoothing to the loss (CrossEntropyLoss(label_smoothing=...))")
