"""Compares masks and boxes with torchvision's, for the crop, each operation and the whole recipe.

Both sides get the same input and the same random parameters. Cropped masks are also compared with Pillow's.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.augment.ops import entry_of
from gpuaug.augment.parameters import Chosen, Prepared
from gpuaug.augment.recipe import View
from gpuaug.augment.target_stage import Given, augment_targets
from gpuaug.batch import CropWindows
from gpuaug.loader.loader import Loader
from gpuaug.targets.batch import BatchTargets
from gpuaug.targets.rules import Boxes, Masks, Targets
from gpuaug.tools.parity.counterpart import Call, Step, calls_of, crop_by_pillow, only, taken, why
from gpuaug.tools.parity.differences import EPOCHS, Difference, Parity, Sample
from gpuaug.tools.peers import torchvision

TORCHVISION, PILLOW, EVERYTHING = "torchvision", "Pillow", "everything"
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


def compare(parity: Parity, loader: Loader, view: View, samples: Sequence[Sample], *, epoch: int) -> None:
    """Compare the crop, each operation, and the whole recipe of one view. The results are added to ``parity``."""
    asked = loader.targets
    assert asked is not None
    rules = Targets(
        masks=None if asked.masks is None else Masks(fill=asked.masks.fill, dtype="int32"),
        boxes=None if asked.boxes is None else Boxes(min_size=0, min_area=0, crowd="keep"),
    )
    if asked.keypoints is not None:
        parity.note("keypoints are not compared: torchvision's are up to a pixel off; gpuaug's move like boxes")
    if getattr(view.augment.crop, "centres", False):
        parity.note(
            "boxes with their centre outside the crop are not compared: gpuaug drops them, as RandomIoUCrop does"
        )
    comparer = _Comparer(parity, view.name, rules)
    crop = Step(loader, view, ops=None, normalize=None)
    cropped = [comparer.compare("crop", crop, sample, sample.targets, epoch)[0] for sample in samples]
    moving = [op for op in view.augment.prepared if any(_moves(m) for modules in op.slots for m in modules)]
    if still := [f"`{op.name}`" for op in view.augment.prepared if op not in moving]:
        parity.note(f"{', '.join(still)}: only pixel values change, so masks and boxes stay the same")
    for op in moving:
        alone, applied = Step(loader, view, crop=None, ops={op.name: op.op}, normalize=None), 0
        for now, (sample, given) in itertools.product(range(epoch, epoch + EPOCHS), zip(samples, cropped, strict=True)):
            if applied < len(samples):
                applied += comparer.compare(op.name, alone, sample, given, now)[1]
        if not applied:
            parity.note(f"`{op.name}` moved no target of these images in {EPOCHS} epochs")
    everything = Step(loader, view, normalize=None)
    for sample in samples if moving else ():
        comparer.compare(EVERYTHING, everything, sample, sample.targets, epoch)


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


class _Comparer:
    """Compares steps of one view: a crop, an operation, or the whole recipe."""

    def __init__(self, parity: Parity, view: str, rules: Targets) -> None:
        self.parity, self.view, self.rules = parity, view, rules
        self.fill = 0 if rules.masks is None else rules.masks.fill

    def compare(
        self, name: str, step: Step, sample: Sample, given: BatchTargets | None, epoch: int
    ) -> tuple[BatchTargets, bool]:
        """Compare a step on the targets ``given``. Returns our result, and whether the step cropped or moved pixels."""
        assert given is not None
        ours, window, chosen = self._ours(step, sample, given, epoch)
        ops, cropping = step.augment.prepared, step.augment.crop is not None
        moving = [_moving(op, c) for op, c in zip(ops, chosen, strict=True)]
        if not cropping and not any(map(taken, moving)):
            return ours, False
        functions, kinds = calls_of(ops, moving, ours.size)
        if isinstance(functions, str):
            if name != EVERYTHING:  # else the operation alone gave this note
                note = f"masks and boxes: `{name}` is not compared, so neither is `{EVERYTHING}`: {functions}"
                self.parity.note(note)
            return ours, True
        calls = [call for call in functions if call[0] in MOVES]
        resized = bool((window.resized[0] != window.window[0, 2:]).any())
        several = sum(name in FILLED for name, _ in calls) > 1
        centers = why(kinds & {"RandomPerspective"}, "float")  # torchvision's perspective uses pixel centers
        if given.boxes is not None and ours.boxes is not None:
            steps = _called(given.boxes.double(), window, calls, format="XYXY", canvas_size=given.size)
            theirs = steps[-1]
            # torchvision moves a box outside the image to the border, without area; a rotation may give it area again
            dropped = np.logical_or.reduce([(made[:, 2:] <= made[:, :2]).any(axis=1) for made in steps])
            kept = ours.labels.numpy()
            sides = (theirs[:, 2:] - theirs[:, :2]).min(axis=1, initial=np.inf)
            gaps = np.where(dropped, 0, sides)  # gap of a box that only torchvision keeps: its shorter side
            gaps[kept] = np.abs(theirs[kept] - ours.boxes.numpy()).max(axis=1, initial=0)
            only_kept = getattr(step.augment.crop, "centres", False)
            reason = "; ".join(filter(None, [centers, _HULLS * several]))
            self._add(name, "boxes", TORCHVISION, reason, gaps[kept] if only_kept else gaps, sample)
        if given.masks is not None and ours.masks is not None:
            mask, made = given.masks[0].to(torch.int32), ours.masks[0].numpy()
            theirs = _called(mask[None], window, calls, fill=self.fill)[-1][0]
            reason = "; ".join(filter(None, [centers, _OLD_NEAREST * resized, _SAMPLED * several])) or _TIES
            self._add(name, "masks", TORCHVISION, reason, theirs != made, sample)
            if cropping and not ops:
                theirs = crop_by_pillow(mask.numpy(), window, mask_fill=self.fill)
                self._add(name, "masks", PILLOW, _TIES, theirs != made, sample)
        return ours, True

    def _add(self, name: str, kind: str, reference: str, reason: str, gaps: NDArray[Any], sample: Sample) -> None:
        difference = self.parity.at("targets", name, reference, reason, view=self.view, kind=kind)
        difference.add_targets(gaps, sample.key)

    def _ours(
        self, step: Step, sample: Sample, given: BatchTargets, epoch: int
    ) -> tuple[BatchTargets, CropWindows, list[Chosen]]:
        """Targets after the step, the window of the crop, and the choices of the operations.

        The label of a box is its row in ``given``, because a step may drop boxes.
        """
        boxes = None if given.boxes is None else [given.boxes.numpy()]
        rows = None if boxes is None else [np.arange(len(boxes[0]))]
        asked = Given(masks=given.masks, boxes=boxes, labels=rows, keypoints=None, targets=self.rules)
        indices, device = np.array([sample.index], dtype=np.int64), torch.device("cpu")
        (window,), (chosen,), (made,) = augment_targets(
            step.recipe, step.draw(sample, epoch), asked, size=given.size, indices=indices, device=device
        )
        return made, window, chosen


def _moves(module: Any) -> bool:
    entry = entry_of(module)
    return entry is not None and entry.affects != "pixels"


def _moving(op: Prepared, chosen: Chosen) -> Chosen:
    """The choices of the modules that move pixels."""
    return only(chosen, [slot for slot, choice in taken(chosen) if _moves(op.slots[slot][choice])])


def _called(
    x: Tensor, window: CropWindows, calls: Sequence[Call], *, fill: int | None = None, **boxes: Any
) -> list[NDArray[Any]]:
    """A mask, or ``boxes``, after torchvision's crop, resize and pad, then after each operation."""
    from torchvision import tv_tensors

    F = torchvision()[0].functional
    (h, w), (top, left), (H, W) = window.resized[0].tolist(), window.offset[0].tolist(), window.size
    x = tv_tensors.BoundingBoxes(x, **boxes) if boxes else tv_tensors.Mask(x)
    x = F.crop(x, *window.window[0].tolist())
    if (h, w) != tuple(window.window[0, 2:]):
        x = F.resize(x, [h, w])
    x = F.pad(x, [max(left, 0), max(top, 0), max(W - left - w, 0), max(H - top - h, 0)], fill=fill)
    steps = [F.crop(x, max(-top, 0), max(-left, 0), H, W)]
    for name, given in calls:
        steps.append(getattr(F, name)(steps[-1], **given, **({"fill": fill} if name in FILLED else {})))
    return [step.as_subclass(Tensor).numpy() for step in steps]
