"""Compares masks and boxes with torchvision's, for the crop, each operation and the whole recipe.

Both sides get the same input and the same random parameters. Cropped masks are also compared with Pillow's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Resampling

from gpuaug.augment.ops import entry_of
from gpuaug.augment.parameters import Chosen, Prepared
from gpuaug.augment.recipe import Augment, MultiView, View
from gpuaug.augment.target_stage import Given, augment_targets
from gpuaug.batch import CropWindows
from gpuaug.loader.loader import Loader
from gpuaug.targets.batch import BatchTargets
from gpuaug.targets.rules import Boxes, Masks, Targets
from gpuaug.tools.parity.counterpart import Call, calls_of, crop_by_pillow, why
from gpuaug.tools.parity.differences import EPOCHS, Difference, Parity
from gpuaug.tools.peers import torchvision

TORCHVISION, PILLOW = "torchvision", "Pillow"
# torchvision's functions that move pixels
MOVES = ("horizontal_flip", "vertical_flip", "rotate", "affine", "perspective", "elastic")
FILLED = MOVES[2:]  # those that take a fill value
_OLD_NEAREST = (
    "torchvision resizes masks by `nearest`, which may take a pixel above or left of the nearest one; "
    "gpuaug takes the nearest pixel, as Pillow does"
)
_TIES = "where two pixels are equally near, rounding decides which one is taken"
_HULLS = (
    "after several operations that rotate or shear, torchvision's boxes are larger: torchvision puts each box around "
    "the box of the previous operation, gpuaug puts one box around the moved corners of the original box"
)
_SAMPLED = "torchvision samples a mask in every operation, gpuaug samples it once for all operations"

Sample = tuple[int, str, "_Placed"]  # number, key, and targets of the upright or cropped image


@dataclass(frozen=True, eq=False)
class _Placed:
    """The mask and the boxes of one image."""

    mask: NDArray[np.int32] | None  # [h, w]
    boxes: NDArray[np.float32] | None  # [n, 4]
    numbers: NDArray[np.int64]  # [n], the row that each box had in the input of the step
    size: tuple[int, int]  # (H, W) of the image


def compare(
    parity: Parity, loader: Loader, view: View, samples: Sequence[tuple[int, str, BatchTargets]], *, epoch: int
) -> None:
    """Compare the crop, each operation, and the whole recipe of one view. The results are added to ``parity``.

    ``samples`` are the number, the key and the upright targets of each sample.
    """
    asked = loader.targets
    assert asked is not None
    rules = Targets(
        masks=None if asked.masks is None else Masks(fill=asked.masks.fill, dtype="int32"),
        boxes=None if asked.boxes is None else Boxes(min_size=0, min_area=0, crowd="keep"),
    )
    if asked.keypoints is not None:
        parity.note("keypoints are not compared: torchvision's are up to a pixel off; gpuaug moves its own like boxes")
    if getattr(view.augment.crop, "centres", False):
        parity.note(
            "boxes with their centre outside the crop are not compared: gpuaug drops them, as RandomIoUCrop does"
        )
    originals = [(index, key, _placed(targets, rules)) for index, key, targets in samples]
    comparer = _Comparer(parity, loader.seed, view, rules)
    crop, cropped = comparer.recipe(ops=None), []
    for sample in originals:
        made, _ = comparer.compare("crop", crop, sample, epoch)
        cropped.append((*sample[:2], replace(made, numbers=np.arange(len(made.numbers)))))
    moving = [op for op in view.augment.prepared if any(_moves(m) for modules in op.slots for m in modules)]
    if still := [f"`{op.name}`" for op in view.augment.prepared if op not in moving]:
        parity.note(f"{', '.join(still)}: only pixel values change, so masks and boxes stay the same")
    for op in moving:
        alone, applied = comparer.recipe(crop=None, ops={op.name: op.op}), 0
        for now in range(epoch, epoch + EPOCHS):
            for sample in cropped:
                if applied < len(cropped):
                    applied += comparer.compare(op.name, alone, sample, now)[1]
        if not applied:
            parity.note(f"`{op.name}` moved no target of these images in {EPOCHS} epochs")
    everything = comparer.recipe()
    for sample in originals if moving else ():
        comparer.compare("everything", everything, sample, epoch)


def summary(differences: Sequence[Difference]) -> str:
    """One sentence on boxes and one on masks; "" without targets."""
    text = ""
    boxes = [d for d in differences if d.kind == "boxes" and d.count]
    masks = [d for d in differences if d.kind == "masks" and d.reference == TORCHVISION and d.count]
    if boxes:
        worst = max(boxes, key=lambda d: d.largest)
        text += f" Boxes differ from torchvision's by at most {worst.largest:.2f} pixels ({worst.name})."
    if masks:
        worst = max(masks, key=lambda d: d.off)
        text += f" Up to {worst.off:.2%} of the mask pixels differ from torchvision's ({worst.name})."
    return text


def _placed(targets: BatchTargets, rules: Targets) -> _Placed:
    mask = None if targets.masks is None or rules.masks is None else targets.masks[0].to(torch.int32).cpu().numpy()
    boxes = None if targets.boxes is None or rules.boxes is None else targets.boxes.cpu().numpy()
    return _Placed(mask, boxes, np.arange(0 if boxes is None else len(boxes)), targets.size)


class _Comparer:
    """Compares steps of one view: a crop, an operation, or the whole recipe."""

    def __init__(self, parity: Parity, seed: int, view: View, rules: Targets) -> None:
        self.parity, self.seed, self.view, self.rules = parity, seed, view, rules
        self.fill = 0 if rules.masks is None else rules.masks.fill

    def recipe(self, **changes: Any) -> Augment | MultiView:
        """The view's recipe with changes. The random numbers stay those of the view."""
        augment = self.view.augment.replace(**changes, copies=1, normalize=None)
        return MultiView(views={self.view.name: augment}) if self.view.name else augment

    def compare(self, name: str, recipe: Augment | MultiView, sample: Sample, epoch: int) -> tuple[_Placed, bool]:
        """Compare a step on one sample. Returns our result, and whether the step cropped or moved pixels."""
        index, key, given = sample
        ours, window, chosen = self._ours(recipe, index, given, epoch)
        (now,) = (each.augment for each in recipe.views)
        taken = [(op, c, _slots(op, c)) for op, c in zip(now.prepared, chosen, strict=True)]
        if now.crop is None and not any(slots for _, _, slots in taken):
            return ours, False
        calls: list[Call] = []
        kinds: set[str] = set()
        for op, c, slots in taken:
            found, names = calls_of(op, c, slots, ours.size)
            if isinstance(found, str):
                self.parity.note(f"masks and boxes: `{op.name}` is not compared, so neither is `everything`: {found}")
                return ours, True
            calls += [call for call in found if call[0] in MOVES]
            kinds |= names
        resized = bool((window.resized[0] != window.window[0, 2:]).any())
        several = sum(name in FILLED for name, _ in calls) > 1
        centers = why(kinds & {"RandomPerspective"}, "float")  # torchvision's perspective uses pixel centers
        if given.boxes is not None and ours.boxes is not None:
            theirs, dropped = _boxes(given, window, calls)
            kept = np.isin(given.numbers, ours.numbers)
            gaps = np.zeros(len(theirs))  # gap of a box that only torchvision keeps: its shorter side
            gaps[kept] = np.abs(theirs[kept] - ours.boxes).max(axis=1, initial=0)
            gaps[~kept] = np.where(dropped, 0, (theirs[:, 2:] - theirs[:, :2]).min(axis=1, initial=np.inf))[~kept]
            only_kept = getattr(now.crop, "centres", False)
            reason = "; ".join(filter(None, [centers, _HULLS * several]))
            self._at(name, "boxes", TORCHVISION, reason).add_targets(gaps[kept] if only_kept else gaps, key)
        if given.mask is not None and ours.mask is not None:
            reason = "; ".join(filter(None, [centers, _OLD_NEAREST * resized, _SAMPLED * several])) or _TIES
            theirs = _mask(given.mask, window, calls, self.fill)
            self._at(name, "masks", TORCHVISION, reason).add_targets(theirs != ours.mask, key)
            if now.crop is not None and not now.prepared:
                theirs = crop_by_pillow(given.mask, window, Resampling.NEAREST, self.fill)
                self._at(name, "masks", PILLOW, _TIES).add_targets(theirs != ours.mask, key)
        return ours, True

    def _at(self, name: str, kind: str, reference: str, reason: str) -> Difference:
        return self.parity.at("targets", name, reference, reason, view=self.view.name, kind=kind)

    def _ours(
        self, recipe: Augment | MultiView, index: int, given: _Placed, epoch: int
    ) -> tuple[_Placed, CropWindows, list[Chosen]]:
        """Mask and boxes after the recipe, the window of the crop, and the choices of the operations."""
        asked = Given(
            masks=None if given.mask is None else torch.from_numpy(given.mask)[None],
            boxes=None if given.boxes is None else [given.boxes],
            labels=None if given.boxes is None else [given.numbers],
            keypoints=None,
            targets=self.rules,
        )
        drawn = recipe.draw(seed=self.seed, epoch=epoch, indices=[index])
        indices, device = np.array([index], dtype=np.int64), torch.device("cpu")
        (window,), (chosen,), (made,) = augment_targets(
            recipe, drawn, asked, size=given.size, indices=indices, device=device
        )
        boxes = None if made.boxes is None else made.boxes.numpy()
        mask = None if made.masks is None else made.masks[0].numpy()
        return _Placed(mask, boxes, made.labels.numpy(), window.size), window, chosen


def _moves(module: Any) -> bool:
    entry = entry_of(module)
    return entry is not None and entry.affects != "pixels"


def _slots(op: Prepared, chosen: Chosen) -> list[int]:
    """The slots whose chosen module moves pixels."""
    choices = chosen.choice[0].tolist()
    return [slot for slot, choice in enumerate(choices) if choice >= 0 and _moves(op.slots[slot][choice])]


# --- the other side


def _boxes(given: _Placed, window: CropWindows, calls: Sequence[Call]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Boxes [n, 4] by torchvision, in float64, and for each box whether the crop or an operation removed all of it."""
    from torchvision.tv_tensors import BoundingBoxes

    assert given.boxes is not None
    boxes = torch.from_numpy(given.boxes.astype(np.float64))
    steps = [*_called(BoundingBoxes(boxes, format="XYXY", canvas_size=given.size), window, calls, {})]
    made = [np.asarray(step.as_subclass(torch.Tensor).numpy()) for step in steps]
    # torchvision keeps a removed box, without area, at the border; a later rotation can give this box an area again
    empty = [(step[:, 2:] <= step[:, :2]).any(axis=1) for step in made]
    return made[-1], np.logical_or.reduce(empty)


def _mask(mask: NDArray[np.int32], window: CropWindows, calls: Sequence[Call], fill: int) -> NDArray[Any]:
    from torchvision.tv_tensors import Mask

    *_, x = _called(Mask(torch.from_numpy(mask)[None]), window, calls, {"fill": fill})
    return np.asarray(x.as_subclass(torch.Tensor)[0].numpy())


def _called(x: Any, window: CropWindows, calls: Sequence[Call], fill: dict[str, int]) -> Iterator[Any]:
    """Yield ``x`` after torchvision's crop, resize and pad, then after each operation."""
    F = torchvision()[0].functional
    (h, w), (top, left), (H, W) = window.resized[0].tolist(), window.offset[0].tolist(), window.size
    x = F.crop(x, *window.window[0].tolist())
    if (h, w) != tuple(window.window[0, 2:]):
        x = F.resize(x, [h, w])
    x = F.pad(x, [max(left, 0), max(top, 0), max(W - left - w, 0), max(H - top - h, 0)], **fill)
    x = F.crop(x, max(-top, 0), max(-left, 0), H, W)
    yield x
    for name, given in calls:
        x = getattr(F, name)(x, **given, **(fill if name in FILLED else {}))
        yield x
