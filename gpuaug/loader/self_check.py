"""Compares the first images of a loader on CUDA with a reference: compiled kernels with Kornia, DALI with Pillow.

If they differ, the loader logs an error and uses the reference from this batch on. The verdict is stored for this kind
of machine (see :mod:`gpuaug.machine`), so the next loader compares nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug import machine
from gpuaug.augment import reference
from gpuaug.augment.fused import backend as fused
from gpuaug.augment.multi_view import MultiView
from gpuaug.augment.ops.codes import PILLOW_FLAG, Code, Trait, having
from gpuaug.augment.parameters import Chosen, Size
from gpuaug.augment.recipe import Augment
from gpuaug.batch import CropWindows, Int64
from gpuaug.decode.decoder import Decoder
from gpuaug.decode.request import Route
from gpuaug.display.sheet import printable
from gpuaug.loader.describe import steps
from gpuaug.native.buffers import to_device

if TYPE_CHECKING:
    from gpuaug.loader.partial_batch import PartialBatch

IMAGES = 8
LEVEL = 1.001  # one level plus the rounding of float32
TOLERANCE = 4  # levels by which GPU and CPU decoders may differ, as in DALI's tests
PATCH = 256  # largest side of the compared part of a decoded image, in pixels

# Steps that never make a level out of a last bit, so one wrong pixel shows a wrong kernel. The others round, compare or
# have steep curves, or they move pixels by matrices, whose last bits differ.
_STEADY = [
    Code.NONE, Code.HFLIP, Code.VFLIP, Code.MULTIPLY, Code.ADD, Code.CONTRAST, Code.SATURATION, Code.SATURATION_HSV,
    Code.HUE, Code.GRAY, Code.INVERT, Code.SHUFFLE, Code.ERASE, Code.BLUR,
]  # fmt: skip

# Per view: our images and the reference's, [n, H, W, 3] in levels 0..255, and how far one pixel of each may be off.
Pairs = list[tuple[Tensor, Tensor, Sequence[float]]]


def is_rounding(largest: float, mean: float, off: float) -> bool:
    """Whether a difference in levels is small: the largest, or the mean and the share of pixels above LEVEL."""
    return largest <= LEVEL or (off <= 0.01 and mean <= 1)


class SelfCheck:
    """The checks of a loader: of its decoder, and of each of its recipes. Several threads may use it."""

    def __init__(self, key_of: Callable[[int], str], log: Any) -> None:
        self._key_of, self._log, self._lock = key_of, log, threading.Lock()
        self.checks: dict[Any, Check] = {}  # by decoder or recipe

    def __str__(self) -> str:
        return "\n".join(f"{check.name}: {check.text}" for check in self.checks.values()) or "not run yet"

    def _check(self, what: Any, *args: Any) -> Check:
        if what not in self.checks:
            self.checks[what] = Check(*args, log=self._log)
        return self.checks[what]

    def _keys(self, batch: PartialBatch, rows: Int64) -> list[str]:
        return [self._key_of(index) for index in batch.encoded.indices[rows].tolist()]

    def decode(self, decoder: Decoder, batch: PartialBatch) -> None:
        """Compare DALI's pixels with Pillow's, before anything is resized, on the first JPEGs that come."""
        if decoder.backend != "dali" or decoder.settings.pixels == "raw" or batch.info is None:
            return
        with self._lock:
            check = self._check(
                decoder, "decode", decoder.settings.hardware_load, ("decoder_mixed", "stream"),
                lambda *_: True, "decode.backend=pillow", decoder.use_pillow,
            )  # fmt: skip
            rows = np.flatnonzero(batch.info.route == Route.DALI)[: IMAGES - check.images]
            if check.done or not len(rows):
                return
            rescued, headers = decoder.rescued, batch.info.take(rows)
            by_pillow = replace(headers, route=np.full_like(headers.route, Route.PILLOW))
            windows = [_unresized(window.take(rows)) for window in batch.windows]
            ours, theirs = (decoder.pixels(each, windows)[0] for each in (headers, by_pillow))
            decoder.rescued = rescued
            most = [[float(TOLERANCE)] * len(rows)] * len(windows)
            check.add(self._keys(batch, rows), zip(ours, theirs, most, strict=True), "Pillow")

    def augment(self, recipe: Augment | MultiView, batch: PartialBatch, **output: Any) -> None:
        """Compare a recipe's compiled kernels with Kornia's modules, on the first images that can be decoded.

        ``output`` holds ``dtype`` and ``memory_format``. All sizes that the steps draw share one verdict.
        """
        checked = recipe.checked if isinstance(recipe, Augment) else recipe
        augments = [view.augment for view in checked.views]
        if all(augment.backend == "kornia" for augment in augments):
            return

        def use_kornia() -> None:
            for augment in augments:
                augment.cuda_is_wrong = True

        with self._lock:
            about = [checked.fingerprint(), *map(str, output.values())]
            check = self._check(
                checked, f"augment ({'; '.join(steps(checked, 0))})", about,
                ("fused_cuda",), is_rounding, "augment.backend=kornia", use_kornia,
            )  # fmt: skip
            if not check.done and any(augment.cuda_is_wrong for augment in augments):
                check.end("uses augment.backend=kornia, because another loader with this recipe found it wrong")
            good = np.setdiff1d(np.arange(len(batch.encoded)), [fault.row for fault in batch.faults])
            if check.done or not len(good):
                return
            chosen = batch.chosen or recipe.choose(batch.drawn, [(x.shape[1], x.shape[2]) for x in batch.images])
            rows = _varied(good, chosen)[: IMAGES - check.images]
            pairs = _beside_kornia(recipe, batch, chosen, rows, output)
            if isinstance(pairs, str):
                check.end(f"not checked, because {pairs}")
            else:
                check.add(self._keys(batch, rows), pairs, "Kornia")


class Check:
    """The verdict on one recipe or one decoder: a stored one, or that of the first images.

    ``about``: what the verdict depends on, beside the machine, as JSON. ``doctor``: tests of `gpuaug doctor` whose bad
    results count too. ``near``: as :func:`is_rounding`. ``fallback``: the setting for which ``fall_back()`` stands.
    """

    text, done, images = "not run yet", False, 0

    def __init__(
        self, name: str, about: Any, doctor: Sequence[str], near: Callable[..., bool], fallback: str,
        fall_back: Callable[[], None], *, log: Any,
    ) -> None:  # fmt: skip
        self.name, self._near, self._fallback, self._fall_back, self._log = name, near, fallback, fall_back, log
        self._key = f"{name} {machine.digest(about)}"
        # per image and view: arguments of `near`, the largest difference that is right, key
        self._gaps: list[tuple[float, float, float, float, str]] = []
        bad = [key for key in (*doctor, self._key) if machine.verdict(key) is False]
        if bad or machine.verdict(self._key):
            self.end(machine.verdicts()[[*bad, self._key][0]]["text"])
        if bad:
            again = "To check again, first run `gpuaug doctor fresh=true`"
            self._replace(log.warning, f"found wrong earlier: {self.text}", again)

    def end(self, text: str) -> None:
        self.text, self.done = text, True

    def _replace(self, say: Callable[..., None], text: str, more: str) -> None:
        say("self-check: %s: %s. This run uses %s, which is slower. %s", self.name, text, self._fallback, more)
        self.text += f". This run uses {self._fallback}"
        self._fall_back()

    def add(self, keys: Sequence[str], pairs: Iterable[tuple[Tensor, Tensor, Any]], reference: str) -> None:
        """Compare more images, of the samples ``keys``. ``pairs``: see :data:`Pairs`."""
        for ours, theirs, most in pairs:
            gap = (ours.float() - theirs.float()).abs()
            shares = (gap.amax(3) > LEVEL).float().mean((1, 2))
            figures = torch.stack([gap.amax((1, 2, 3)), gap.mean((1, 2, 3)), shares]).cpu().tolist()
            self._gaps += zip(*figures, most, keys, strict=True)
        self.images += len(keys)
        bad = [gap for gap in self._gaps if gap[0] > gap[3] or not self._near(*gap[:3])]
        if not bad and self.images < IMAGES:
            return
        largest, mean, off, _, key = max(bad or self._gaps)
        wrong = f"{len({key for *_, key in bad})} of {self.images} images differ from"
        self.end(
            f"{wrong if bad else f'{self.images} images agree with'} {reference}; in the worst one, the largest "
            f"difference is {largest:.3g} levels of 255, the mean {mean:.3g}, and {100 * off:.3g} % of the pixels "
            f"differ by more than one level ({time.strftime('%Y-%m-%d')})"
        )
        machine.store({self._key: {"good": not bad, "text": self.text}})
        if bad:
            more = f"The worst image is {printable(key)}. Please report this: gpuaug doctor report=FILE"
            self._replace(self._log.error, f"wrong pixels on this GPU: {self.text}", more)


def _beside_kornia(
    recipe: Augment | MultiView, batch: PartialBatch, chosen: list[list[Chosen]], rows: Int64, output: dict[str, Any]
) -> Pairs | str:
    """Some rows of the augmented batch, and the same by Kornia; or why they cannot be compared."""
    drawn, made = batch.drawn, recipe.render(batch.images, batch.drawn, chosen=chosen, **output)
    if fused._no_triton:
        return f"everything runs through Kornia: Triton cannot run ({fused._no_triton[0]})"
    repeats = None if drawn.repeats is None else drawn.repeats[rows]
    drawn = recipe.draw(seed=drawn.seed, epoch=drawn.epoch, indices=drawn.indices[rows], repeats=repeats)
    chosen = recipe.choose(drawn, [(x.shape[1], x.shape[2]) for x in batch.images])
    at, pairs = to_device(torch.from_numpy(rows), batch.images[0].device), Pairs()
    for view, images, ours, own in zip(recipe.views, batch.images, made, chosen, strict=True):
        by_kornia = reference.ReferenceBackend(view.augment.prepared, view.augment.normalize)
        try:
            theirs = by_kornia(images.index_select(0, at), own, **output)
        except Exception as error:  # the run itself does not need Kornia's modules
            return f"Kornia fails: {type(error).__name__}: {error}"
        most = LEVEL + 255 * torch.finfo(ours.dtype).eps  # the last bit of the value that is furthest from the mean
        largest = np.where(steady(view.augment, own, (images.shape[1], images.shape[2]), len(rows)), most, np.inf)
        pairs.append((_levels(ours.index_select(0, at), view.augment), _levels(theirs, view.augment), largest.tolist()))
    if {(op.name, type(op.op).__name__) for view in recipe.views for op in view.augment.prepared} & reference._warned:
        return "an operation gives different pixels for the same sample"
    return pairs


def steady(augment: Augment, chosen: Sequence[Chosen], size: Size, count: int) -> NDArray[np.bool_]:
    """Which of ``count`` rows have steps in ``_STEADY`` only, and none with Pillow's arithmetic."""
    kept = np.ones(count, dtype=np.bool_)
    for part in fused.FusedBackend(augment.prepared)._parts:
        own = [chosen[number] for number in part.numbers]
        if part.columns is None or part.chains:  # Kornia runs it
            kept &= (own[0].choice < 0).all(axis=1)
            continue
        code, args = part.program(own, size, count)
        by_pillow = np.isin(code, list(having(Trait.PILLOW))) & (args[..., PILLOW_FLAG] != 0)
        kept &= (np.isin(code, _STEADY) & ~by_pillow).all(axis=1)
    return kept


def _levels(images: Tensor, augment: Augment) -> Tensor:
    """Convert the result of a recipe to levels, [n, H, W, 3]."""
    x = images.float() if augment.normalize is None else augment.normalize.inverse(images)
    return (x * 255).permute(0, 2, 3, 1)


def _unresized(windows: CropWindows) -> CropWindows:
    """The upper left corner of each window, without resizing."""
    corner, size = windows.window[:, :2], np.minimum(windows.window[:, 2:], PATCH)
    box, (height, width) = np.concatenate([corner, size], axis=1), size.max(axis=0).tolist()
    return replace(windows, window=box, resized=size, offset=np.zeros_like(size), size=(height, width))


def _varied(rows: Int64, chosen: Sequence[Sequence[Chosen]]) -> Int64:
    """Sort rows: first those with operations that few other rows have, so that the first rows have most operations."""
    rarity = np.zeros(len(rows))
    for column in (column for view in chosen for own in view for column in own.choice[rows].T):
        _, which, counts = np.unique(column, return_inverse=True, return_counts=True)
        rarity += (column >= 0) / counts[which]
    return rows[np.argsort(-rarity, kind="stable")]
