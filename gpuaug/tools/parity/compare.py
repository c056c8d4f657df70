"""Compares the images of a loader with Pillow's, torchvision's and timm's: decode, crop, policies, the whole recipe.

In each stage both sides get the same input, so a difference comes from that stage alone. Operations of torchvision run
in float, because in uint8 they truncate after every step. At the end all differences add up.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import PIL.Image
from PIL import ImageOps
from tqdm import tqdm

from gpuaug.augment.auto import Policy
from gpuaug.augment.recipe import View
from gpuaug.decode.decoder import Decoder
from gpuaug.files import sniff
from gpuaug.loader.loader import Loader
from gpuaug.tools.parity.counterpart import applied, augmented, calls_of, compare_choices, crop_by_pillow, library, run
from gpuaug.tools.parity.differences import STAGES, Image, Parity
from gpuaug.tools.peers import torchvision
from gpuaug.tools.preview.originals import read

BARE, WHOLE = "everything but the operations", "everything"


def compare(loader: Loader, *, indices: Sequence[int], epoch: int = 0) -> Parity:
    """Compare a loader's recipe on some samples, with the random parameters of an epoch."""
    parity = Parity(torchvision()[1])
    views = [view for view in loader.augment.at(epoch).views if view.copy == 0]
    decoder = replace(loader.decode, reduced=False).open(loader.device)
    for index in tqdm(indices, leave=False, disable=None):
        try:
            crops = _cropped(parity, loader, decoder, index, epoch=epoch)
        except Exception as error:  # Pillow raises errors of many types if the bytes are damaged
            parity.note(f"sample {index} ({loader.source.key(index)}) is left out: {error}")
            continue
        parity.samples += 1
        for view in views:
            _augmented(parity, loader, view, *crops[view.name], index=index, epoch=epoch)
    decoder.close()
    if parity.turned:
        parity.note(
            f"{parity.turned} of {parity.samples} images have an EXIF orientation, and gpuaug turns them upright. "
            "torchvision's ImageFolder does not turn them, so a model trained with ImageFolder saw them unturned"
        )
    for name in ("mix", "targets"):
        if getattr(loader, name) is not None:
            parity.note(f"`{name}` is left out: only images are compared, before they are mixed")
    if combine := loader.augment.at(epoch).combine:
        parity.note(f"what follows the window of {combine} is left out: operations are compared on one window")
    parity.differences.sort(key=lambda d: [*STAGES].index(d.stage))
    return parity


def _cropped(
    parity: Parity, loader: Loader, decoder: Decoder, index: int, *, epoch: int
) -> dict[str, tuple[Image, Image]]:
    """Compare decoding, cropping and resizing of one sample.

    Returns each view after the recipe's crop, by gpuaug and by Pillow: uint8 [H, W, 3].
    """
    key, encoded = loader.source.key(index), read(loader, [index], epoch=epoch)
    headers = decoder.read_headers(encoded)
    if faults := [*encoded.faults, *headers.faults]:
        raise ValueError(faults[0].reason)
    image, data = decoder.whole(headers).cpu().numpy(), encoded.images[0].tobytes()
    theirs = image
    if sniff(data) != "raw":
        theirs = _by_pillow(data)
        if theirs.shape != image.shape:
            raise ValueError(f"Pillow gives {theirs.shape[:2]}, ours {image.shape[:2]}")
        parity.at("decode", decoder.backend, "Pillow").add(image, theirs, key)
    parity.turned += int(headers.orientation[0]) != 1
    pipeline, views, crops = loader.pipeline, loader.augment.at(epoch).views, {}
    batch = pipeline.read_headers(encoded, epoch)
    name = "crop of reduced decoding" if loader.decode.reduced else "crop"
    for view, window, made in zip(views, batch.windows, pipeline.decode(batch).images, strict=True):
        if view.copy == 0:
            ours = made[0].cpu().numpy()
            parity.at("crop", name, "full decoding, Pillow", view=view.name).add(
                ours, crop_by_pillow(image, window), key
            )
            crops[view.name] = ours, crop_by_pillow(theirs, window)
    return crops


def _by_pillow(data: bytes) -> Image:
    """Decode to uint8 [H, W, 3]. Raises ValueError if Pillow opens the image as 16-bit or 32-bit gray."""
    with PIL.Image.open(io.BytesIO(data)) as image:
        if image.mode.startswith("I"):
            raise ValueError("Pillow clips 16-bit gray at 255, to white; gpuaug scales 16-bit gray to 8 bits")
        return np.array(ImageOps.exif_transpose(image).convert("RGB"))


def _augmented(
    parity: Parity, loader: Loader, view: View, image: Image, theirs: Image, *, index: int, epoch: int
) -> None:
    """Compare the complete pipelines, without and with the operations, and each policy alone on the same crop."""
    key, ops = loader.source.key(index), view.augment.prepared
    parity.at("all", BARE, "Pillow", view=view.name).add(image, theirs, key)
    if not ops:
        return
    chosen, ours = augmented(loader, view, {op.name: op.op for op in ops}, image, index=index, epoch=epoch)
    calls = calls_of(ops, chosen)
    if isinstance(calls, str):
        parity.note(f"`{WHOLE}` leaves out images with {calls}")
    else:
        parity.at("all", WHOLE, "Pillow, torchvision", view=view.name).add(ours, run(calls, theirs), key)
    for op in ops:
        if not isinstance(op.op, Policy):
            continue
        against = library(op.op)
        title = f"{op.name}{f', {view.name}' * bool(view.name)}, against {against}"
        if title not in parity.choices:
            parity.choices[title] = compare_choices(loader, view, op, image.shape, epoch=epoch)
        if not op.chains:
            (own,), ours = augmented(loader, view, {op.name: op.op}, image, index=index, epoch=epoch)
            parity.at("policy", op.name, against, view=view.name).add(ours, applied(op, own, image), key)
