"""Compares the images of a loader with Pillow's, torchvision's and timm's: decode, crop, policies, the whole recipe.

In each stage both sides get the same input, so a difference comes from that stage alone. Operations of torchvision run
in float, because in uint8 they truncate after every step. At the end all differences add up.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import PIL.Image
from PIL import ImageOps
from tqdm import tqdm

from gpuaug.augment.auto import Policy
from gpuaug.augment.parameters import Prepared
from gpuaug.augment.recipe import View
from gpuaug.decode import header
from gpuaug.loader.loader import Loader
from gpuaug.tools.parity import policies
from gpuaug.tools.parity.counterpart import Operations, calls_of, crop_by_pillow, run
from gpuaug.tools.parity.differences import STAGES, Image, Parity
from gpuaug.tools.peers import torchvision
from gpuaug.tools.preview.originals import read

BARE, WHOLE = "everything but the operations", "everything"


@dataclass(frozen=True, eq=False)
class Sample:
    """One sample: its views after the recipe's crop, made by gpuaug (ours) and by Pillow (theirs)."""

    index: int
    key: str
    ours: dict[str, Image] = field(default_factory=dict)  # view name to uint8 [H, W, 3]
    theirs: dict[str, Image] = field(default_factory=dict)


def compare(loader: Loader, *, indices: Sequence[int], epoch: int = 0) -> Parity:
    """Compare a loader's recipe on some samples, with the random parameters of an epoch."""
    parity = Parity(torchvision()[1])
    views = [view for view in loader.augment.at(epoch).views if view.copy == 0]
    samples = _decoded(parity, loader, tqdm(indices, "decode", leave=False, disable=None), epoch=epoch)
    parity.samples = len(samples)
    for view in views if samples else ():
        for op in view.augment.prepared:
            if isinstance(op.op, Policy):
                _policy(parity, loader, view, op, samples, epoch=epoch)
        _whole(parity, loader, view, samples, epoch=epoch)
    for name in ("mix", "targets"):
        if getattr(loader, name) is not None:
            parity.note(f"`{name}` is left out: only images are compared, before they are mixed")
    parity.differences.sort(key=lambda d: [*STAGES].index(d.stage))
    return parity


def _decoded(parity: Parity, loader: Loader, indices: Iterable[int], *, epoch: int) -> list[Sample]:
    """Compare decoding, cropping and resizing, one image at a time to limit memory."""
    decoder, pipeline = replace(loader.decode, reduced=False).open(loader.device), loader.pipeline
    samples, turned = [], 0
    for index in indices:
        encoded = read(loader, [index], epoch=epoch)
        headers = decoder.read_headers(encoded)
        sample = Sample(index, loader.source.key(index))
        faults = [*encoded.faults, *headers.faults]
        image = np.empty(0) if faults else decoder.full(encoded, headers)[0].cpu().numpy()
        data = encoded.encoded(0).numpy().tobytes()
        try:
            if not image.size:
                raise ValueError(faults[0].reason if faults else "it cannot be decoded")
            theirs = image if header.sniff(data) == "raw" else _by_pillow(data)
            if theirs.shape != image.shape:
                raise ValueError(f"Pillow gives {theirs.shape[:2]}, ours {image.shape[:2]}")
        except Exception as error:  # Pillow raises errors of many types if the bytes are damaged
            parity.note(f"sample {index} ({sample.key}) is left out: {error}")
            continue
        turned += int(headers.orientation[0]) != 1
        if header.sniff(data) != "raw":
            parity.at("decode", decoder.backend, "Pillow").add(image, theirs, sample.key)
        batch = pipeline.read_headers(encoded, epoch)
        name = "crop of reduced decoding" if loader.decode.reduced else "crop"
        for view, window, made in zip(
            loader.augment.at(epoch).views, batch.windows, pipeline.decode(batch).images, strict=True
        ):
            if view.copy == 0:
                sample.ours[view.name], sample.theirs[view.name] = made[0].cpu().numpy(), crop_by_pillow(theirs, window)
                ours, full = sample.ours[view.name], crop_by_pillow(image, window)
                parity.at("crop", name, "full decoding, Pillow", view=view.name).add(ours, full, sample.key)
        samples.append(sample)
    decoder.close()
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
            raise ValueError("Pillow clips 16-bit gray at 255, to white; gpuaug scales 16-bit gray to 8 bits")
        return np.array(ImageOps.exif_transpose(image).convert("RGB"))


def _policy(parity: Parity, loader: Loader, view: View, op: Prepared, samples: list[Sample], *, epoch: int) -> None:
    """Compare what a policy chooses in many draws, and its pixels for the choices of ``epoch``."""
    alone, library = Operations(loader, view, {op.name: op.op}), policies.library(op.op)
    for sample in samples if not op.chains else ():
        image = sample.ours[view.name]
        chosen = alone.choose([sample.index], image.shape, epoch)
        theirs = policies.applied(op, chosen[0], image)
        parity.at("policy", op.name, library, view=view.name).add(alone.run(image, chosen), theirs, sample.key)
    size = samples[0].ours[view.name].shape
    (many,) = alone.choose(range(policies.DRAWS_OF_CHAINS if op.chains else policies.DRAWS), size, epoch)
    parity.choices[f"{op.name}{f', {view.name}' * bool(view.name)}, against {library}"] = policies.choices(
        op, many, size
    )


def _whole(parity: Parity, loader: Loader, view: View, samples: list[Sample], *, epoch: int) -> None:
    """Compare the complete pipelines, without and with the operations."""
    ops, at = view.augment.prepared, partial(parity.at, "all", view=view.name)
    everything = Operations(loader, view, {op.name: op.op for op in ops})
    for sample in samples:
        image, theirs = sample.ours[view.name], sample.theirs[view.name]
        at(BARE, "Pillow").add(image, theirs, sample.key)
        chosen = everything.choose([sample.index], image.shape, epoch)
        calls = calls_of(ops, chosen)
        if isinstance(calls, str):
            parity.note(f"`{WHOLE}` leaves out images with {calls}")
        elif ops:
            at(WHOLE, "Pillow, torchvision").add(everything.run(image, chosen), run(calls, theirs), sample.key)
